// The chosen series along the tokens of a sample: drag to zoom in, double click to see all, click to select.
import { fit, react } from "./chart.js";
import { make } from "./elements.js";
import { ROLES, colour, form, height, known, runs, tint } from "./scale.js";

const HEIGHT = 178;
const DECADES = [-100, -10, -1, -0.1, 0, 0.1, 1, 10, 100]; // marks of an axis in decades
const HALF_BAR = 0.3; // of a bar, in tokens
const ALARM = "#b5179e";
const tokenOf = (target) => target + 1; // the axis counts tokens, a series has an entry a target

// Bars from the middle of the scale. Those of a colour are one outline, which plotly draws fast for thousands of tokens.
function bars(s, roles, palette) {
  const middle = height(s, s.center);
  const traces = new Map();
  s.values.forEach((v, t) => {
    if (!known(v)) return;
    const color = colour(palette, tint(s, v)[0], roles[t + 1] === "s" ? 0.9 : 0.35);
    if (!traces.has(color)) traces.set(color, { x: [], y: [], fillcolor: color, line: { color, width: 0.5 } });
    const { x, y } = traces.get(color);
    const end = height(s, v);
    const x0 = tokenOf(t);
    x.push(x0 - HALF_BAR, x0 - HALF_BAR, x0 + HALF_BAR, x0 + HALF_BAR);
    y.push(middle, end, end, middle);
  });
  const look = { type: "scatter", mode: "lines", fill: "toself", hoverinfo: "skip" };
  return [...traces.values()].map((trace) => ({ ...trace, ...look }));
}

// What the pointer finds: the end of each bar, with its value as text.
function ends(s) {
  return {
    type: "scatter",
    mode: "lines",
    line: { width: 0 },
    x: s.values.map((_, t) => tokenOf(t)),
    y: s.values.map((v) => (known(v) ? height(s, v) : null)),
    customdata: s.values.map((v) => form(v)),
    hovertemplate: "token %{x}: %{customdata}<extra></extra>",
  };
}

// Values that should be numbers and are none.
function crosses(s) {
  const y = s.bad.map(() => height(s, s.center));
  const marker = { symbol: "x", size: 8, color: ALARM };
  return { type: "scatter", mode: "markers", x: s.bad.map(tokenOf), y, marker, hovertemplate: "token %{x}: not a number<extra></extra>" };
}

// The axis of a difference counts decades, and shows a nat up and down at least.
function axis(s) {
  if (s.kind !== "difference") return {};
  const heights = s.values.filter(known).map((v) => height(s, v));
  const low = heights.reduce((a, b) => Math.min(a, b), height(s, -1));
  const high = heights.reduce((a, b) => Math.max(a, b), height(s, 1));
  return { range: [1.1 * low, 1.1 * high], tickvals: DECADES.map((v) => height(s, v)), ticktext: DECADES.map(String) };
}

const level = (y, line) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line });

// Prompt and masked tokens, the noise floor, the clip of the loss, and the selected token.
function marks({ payload, series: s, selected, palette }) {
  const ink = (alpha) => colour(palette, "ink", alpha);
  const shapes = [];
  runs(payload.roles, (role, start, end) => {
    if (role === "s") return;
    const label = { text: ROLES[role], textposition: "top left", font: { size: 10, color: ink(0.6) } };
    const area = { x0: start - 0.5, x1: end - 0.5, yref: "paper", y0: 0, y1: 1 };
    shapes.push({ type: "rect", layer: "below", fillcolor: ink(0.08), line: { width: 0 }, label, ...area });
  });
  if (s.kind === "difference") {
    const area = { xref: "paper", x0: 0, x1: 1, y0: height(s, -s.floor), y1: height(s, s.floor) };
    shapes.push({ type: "rect", layer: "below", fillcolor: ink(0.15), line: { width: 0 }, ...area });
  }
  const clip = s.kind === "ratio" ? (payload.clip ?? []) : [];
  for (const v of clip) shapes.push(level(v, { color: ink(0.6), width: 1, dash: "dash" }));
  if (selected !== null) {
    const line = { color: ink(1), width: 1.5 };
    const x = tokenOf(selected);
    shapes.push({ type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line });
  }
  return shapes;
}

export function along(state, stops) {
  const figure = make("figure", "rlt-along");
  const caption = make("figcaption");
  const plot = make("div", "rlt-chart");
  plot.style.height = `${HEIGHT}px`;
  plot.setAttribute("role", "img");
  plot.setAttribute("aria-label", "the chosen series by token");
  plot.title = "drag to zoom in; double click to see all; click to select";
  figure.append(caption, plot);
  let range = [0, 1]; // tokens in view

  const listen = () => {
    plot.on("plotly_hover", ({ points: [point] }) => state.hover(point.x - 1, "chart"));
    plot.on("plotly_unhover", () => state.hover(null, "chart"));
    plot.on("plotly_click", ({ points: [point] }) => state.select(point.x - 1));
    plot.on("plotly_relayout", () => (range = [...plot._fullLayout.xaxis.range]));
  };
  const render = () => {
    const { payload, series, targets, palette } = state;
    caption.textContent = series ? `${series.label} by token` : "";
    plot.hidden = !series || !targets;
    if (!state.Plotly || plot.hidden) return;
    const { layout } = state.model.get("figures").along;
    const axes = { xaxis: { ...layout.xaxis, range }, yaxis: { ...layout.yaxis, ...axis(series) } };
    const data = [...bars(series, payload.roles, palette), ends(series), crosses(series)];
    const isNew = !plot.data;
    react(state.Plotly, plot, { data, layout: { ...layout, ...axes, shapes: marks(state) } }, HEIGHT);
    if (isNew) listen();
  };
  const showAll = () => {
    range = [(state.folded ? state.payload.prompt : 1) - 0.5, state.targets + 0.5];
    render();
  };
  // A token that is selected out of view is brought to the middle of it.
  const follow = () => {
    const { selected, Plotly } = state;
    const half = (range[1] - range[0]) / 2;
    const x = selected === null ? null : tokenOf(selected);
    const isOut = x !== null && (x < range[0] || x > range[1]);
    if (isOut) range = [x - half, x + half];
    if (plot.data) Plotly.relayout(plot, { shapes: marks(state), ...(isOut && { "xaxis.range": range }) });
  };
  const showCursor = () => {
    if (!plot.data || state.from === "chart") return;
    const isShown = state.hovered !== null && known(state.series.values[state.hovered]);
    if (isShown) state.Plotly.Fx.hover(plot, { xval: tokenOf(state.hovered) }, "xy", true);
    else state.Plotly.Fx.unhover(plot);
  };
  state.on(showAll, "payload", "fold");
  state.on(render, "series", "theme", "plotly");
  state.on(follow, "target");
  state.on(showCursor, "hover");
  state.on(() => state.Plotly && fit(state.Plotly, plot), "size");
  stops.push(() => state.Plotly?.purge(plot));
  return figure;
}
