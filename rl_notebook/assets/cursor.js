// The cursor of a chart lists the numbers of one step. plotly by itself lists of each series the point that is nearest to
// the mouse, which may be of another step where a series has gaps.

const hasValue = (trace, step) => (trace.y?.[trace.x?.indexOf(step)] ?? null) !== null;
const isListed = (trace) => trace.visible === true && trace._input.hoverinfo !== "skip";
const tracesOf = (plot) => plot.calcdata.map((points) => points[0]?.trace).filter(Boolean);

// The visible step that is nearest to the mouse, of the panel below it; null where there is none.
function nearestStep(plot, event) {
  const { xaxis } = plot._fullLayout._plots[event.target.dataset.subplot];
  const at = xaxis.p2c(event.clientX - event.target.getBoundingClientRect().left);
  const [low, high] = xaxis.range;
  const traces = tracesOf(plot).filter((trace) => isListed(trace) && (trace.xaxis ?? "x") === xaxis._id);
  const steps = traces.flatMap((trace) => trace.x.filter((x) => x >= low && x <= high && hasValue(trace, x)));
  return steps.reduce((best, x) => (best === null || Math.abs(x - at) < Math.abs(best - at) ? x : best), null);
}

function showCursor(Plotly, plot, step, subplots) {
  for (const trace of tracesOf(plot)) {
    trace.hoverinfo = isListed(trace) && hasValue(trace, step) ? trace._input.hoverinfo ?? "all" : "skip";
  }
  Plotly.Fx.hover(plot, { xval: step }, subplots, true);
}

// Put the cursor of a chart on steps; `others` have theirs on the same one.
export function followSteps(Plotly, plot, others = []) {
  plot.on("plotly_beforehover", (event) => {
    const subplot = event.target.dataset?.subplot;
    if (!subplot || plot._fullLayout.hovermode !== "x unified") return true;
    const step = nearestStep(plot, event);
    if (step === null) return true;
    showCursor(Plotly, plot, step, subplot);
    for (const other of others) showCursor(Plotly, other, step, other._fullLayout._subplots.cartesian);
    return false;
  });
  plot.addEventListener("mouseout", (event) => {
    if (event.target.dataset?.subplot) for (const one of [plot, ...others]) Plotly.Fx.unhover(one);
  });
}
