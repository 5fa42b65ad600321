// plotly in a widget: its script is read once per page, and a chart is as wide as its box.

const CONFIG = { displaylogo: false, displayModeBar: false };
export const rest = (ms) => new Promise((done) => setTimeout(done, ms));

// plotly's script is the data of a model that all widgets share, and is read once per page, whichever is drawn first.
export async function library(model) {
  const shared = await model.widget_manager.get_model(model.get("plotly").replace("IPY_MODEL_", ""));
  const script = shared.get("script");
  const loading = (globalThis.rlNotebookPlotly ??= new Map()); // script -> promise of what it defines
  if (!loading.has(script)) loading.set(script, evaluate(script));
  return loading.get(script);
}

// A module that defines a function is read quickly; calling the function is what takes long.
async function evaluate(script) {
  const parts = ["export default () => {\n", script, "\nreturn globalThis.Plotly;\n};\n"];
  const url = URL.createObjectURL(new Blob(parts, { type: "text/javascript" }));
  const { default: run } = await import(url);
  URL.revokeObjectURL(url);
  await idle();
  return run();
}

// JupyterLab drops widgets that are not ready within two seconds. So the only thread of the page is blocked when it has
// had nothing to do for a moment, or when the reader has waited long enough.
async function idle() {
  const end = performance.now() + 3000;
  for (let rests = 0; rests < 3 && performance.now() < end; ) {
    const start = performance.now();
    await rest(50);
    rests = performance.now() - start < 100 ? rests + 1 : 0;
  }
}

// Draw a figure, or draw it again: what the reader did to it, such as zooming in, stays. plotly writes into what it gets.
export function react(Plotly, plot, { data, layout }, height) {
  const sized = { ...structuredClone(layout), height, autosize: true };
  return Plotly.react(plot, structuredClone(data), sized, CONFIG);
}

export function fit(Plotly, plot) {
  const isOff = plot.data && plot.clientWidth > 0 && Math.abs(plot.clientWidth - plot._fullLayout.width) > 1;
  if (isOff) Plotly.Plots.resize(plot);
}
