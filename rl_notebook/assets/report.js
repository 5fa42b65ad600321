// Draws the completions and the figures of a report from what the page carries, marks what its address names, and reads
// the page again if it asks for that.
import { followSteps } from "./cursor.js";
import { button, fill, labelled, make } from "./elements.js";
import { likeliestTable } from "./likeliest.js";
import { makeTable, number } from "./table.js";

const stepPages = new Set((document.querySelector("main").dataset.pages ?? "").split(" ")); // of this run, beside this page
const seconds = Number(document.querySelector("main").dataset.refresh);
const name = "rl-notebook " + location.pathname;
const again = performance.getEntriesByType("navigation")[0].type === "reload";
const kept = again ? JSON.parse(sessionStorage.getItem(name)) : null; // from before the page was read again
const chosen = { view: {}, step: null, smoothing: 0, log: false, ...kept?.chosen }; // what the reader has chosen
const boxes = () => [document.scrollingElement, ...document.querySelectorAll(".scroll, .strip")];
history.scrollRestoration = "manual";

// A text that the page carries compressed; null where it carries none of that name.
async function unpack(id) {
  const text = document.getElementById(id)?.textContent;
  if (!text) return null;
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

// --- completions of a step -------------------------------------------------------------------------------------------

function makeCompletions({ columns, steps }) {
  const place = document.getElementById("completions");
  const numbers = Object.keys(steps).map(Number).sort((a, b) => a - b);
  const cut = (row, column) => column.name === "finish_reason" && row.finish_reason !== "stop";
  const table = makeTable({
    label: "completions",
    size: 8,
    view: chosen.view,
    changed: (view) => (chosen.view = view),
    paint: (row, column) => (cut(row, column) ? "rgb(217 119 43 / 0.16)" : ""),
  });
  const bar = make("div", "bar");
  const select = make("select");
  select.setAttribute("aria-label", "step of the completions");
  const line = make("span", "soft");
  const neighbour = (by) => numbers[numbers.indexOf(chosen.step) + by];
  const back = button("‹", "The step before", () => turnTo(neighbour(-1)));
  const on = button("›", "The next step", () => turnTo(neighbour(1)));
  fill(select, numbers.map((step) => [String(step), String(step)]), "");
  select.addEventListener("change", () => turnTo(Number(select.value)));
  bar.append(labelled("step", select), back, on, line);
  place.replaceChildren(bar, table.element);

  function turnTo(step) {
    history.replaceState(null, "", `#step=${step}`);
    go(false);
  }
  function choose(step) {
    chosen.step = step;
    select.value = String(step);
    back.disabled = neighbour(-1) === undefined;
    on.disabled = neighbour(1) === undefined;
    line.textContent = steps[step].line;
    table.draw({ columns, rows: steps[step].rows });
  }
  choose(steps[chosen.step] ? chosen.step : numbers.at(-1));
  const rowOf = ({ step, id }) => steps[step]?.rows.find((row) => row.id === id);
  const nearest = (step) => numbers.reduce((a, b) => (Math.abs(b - step) < Math.abs(a - step) ? b : a));
  return { place, table, choose, rowOf, nearest, steps };
}

// The tokens of the completion that the address names, under the table: each is a link to itself, and one is marked.
const panel = make("section", "tokens");
const [head, strip, numbers, absent] = [make("h4"), make("div", "strip"), make("dl"), make("p", "status quiet")];
const MARKED = "Choose a token to see its numbers; the address of the page then names it.";
const floats = (text) => new Float32Array(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
const words = (at) => ["step", "group", "sample", "token"].filter((n) => at[n]).map((n) => `${n} ${at[n]}`).join(" · ");
const asked = ({ token, id }) => `rl-notebook view RUN --show '${id}${token ? `&token=${token}` : ""}'`;
strip.setAttribute("aria-label", "sampled tokens; arrow keys move");
strip.setAttribute("role", "group");
const results = make("div", "results"); // forks and curves of the completion, which the page has further up
const likeliest = make("div", "scroll-x");
panel.append(head, strip, numbers, likeliest, results);
let shown = null; // the address of the completion in the panel

// What the address of the page names: a step, or a completion as {id, step, group, sample}, and perhaps a token of it.
function named() {
  const parameters = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const { step, group, sample } = parameters;
  const isNumber = (value) => /^\d+$/.test(value);
  if (isNumber(step) && group === undefined) return { step };
  if (![step, group, sample].every(isNumber)) return null;
  const token = isNumber(parameters.token) ? parameters.token : undefined;
  return { step, group, sample, token, id: `step=${step}&group=${group}&sample=${sample}` };
}

function drawTokens({ id }, { first, ids, texts, roles }) {
  const links = ids.map((token, i) => {
    const link = make("a", roles[i] === "s" ? "" : "masked", texts?.[i] ?? String(token));
    link.href = `#${id}&token=${first + i}`;
    link.tabIndex = -1;
    return link;
  });
  strip.classList.toggle("ids", !texts);
  strip.replaceChildren(...links.flatMap((link) => (link.textContent.endsWith("⏎") ? [link, make("br")] : [link])));
}

function drawNumbers({ token }, { first, ids, texts, roles, series, values, likeliest: ofSampler }, row) {
  const i = token - first;
  const [size, all] = [ids.length, floats(values)];
  const of = (name) => all[series.findIndex(([other]) => other === name) * size + i];
  const known = series.map(([name, label]) => [label, of(name), ".6g"]);
  if (["policy", "sampler"].every((name) => series.some(([other]) => other === name))) {
    known.push(["policy − sampler", of("policy") - of("sampler"), "+.4g"]);
  }
  if (!series.some(([name]) => name === "advantage")) known.push(["advantage", row.advantage, "+.4g"]);
  const what = `${texts ? `${texts[i]} · ` : ""}id ${ids[i]} · ${roles[i] === "s" ? "scored" : "masked: not in the loss"}`;
  const pair = (name, value) => {
    const node = make("div");
    node.append(make("dt", "", name), make("dd", "", value));
    return node;
  };
  const shown = (value, format) => number(Number.isFinite(value) ? value : null, format);
  numbers.replaceChildren(pair(`token ${token}`, what), ...known.map(([label, value, f]) => pair(label, shown(value, f))));
  const table = likeliestTable([["sampler", ofSampler]], token - 1, (id) => make("span", id === ids[i] ? "said" : ""));
  likeliest.replaceChildren(...(table ? [table] : []));
}

function mark(at, row, reveal) {
  const tokens = held.tokens[at.id];
  const fresh = shown !== at.id;
  if (fresh) {
    shown = at.id;
    const range = tokens ? ` · tokens ${tokens.first} to ${tokens.first + tokens.ids.length - 1}` : "";
    head.textContent = words({ ...at, token: undefined }) + range;
    strip.replaceChildren();
    const sections = [...document.querySelectorAll("main > section[data-of]")].filter((one) => one.dataset.of === at.id);
    results.replaceChildren(...sections.flatMap((one) => [...one.cloneNode(true).children].slice(1))); // without the title
    if (tokens) drawTokens(at, tokens);
  }
  const links = [...strip.querySelectorAll("a")];
  const link = at.token && tokens ? links[at.token - tokens.first] : undefined;
  for (const old of links.filter((other) => other.ariaCurrent)) [old.ariaCurrent, old.tabIndex] = [null, -1];
  if (link) link.ariaCurrent = "true";
  if (links.length) (link ?? links[0]).tabIndex = 0;
  const outside = at.token && (at.token < tokens?.first ? "is part of the prompt, which stands above" : "is beyond the end of this completion");
  const why = !tokens ? `Its tokens are not on this page, which holds those of some steps: ${asked(at)} writes a page that has them.` : outside ? `Token ${at.token} ${outside}.` : MARKED;
  if (link) drawNumbers(at, tokens, row);
  else {
    numbers.replaceChildren(make("p", "soft", why));
    likeliest.replaceChildren();
  }
  if (reveal && (link ?? panel)) (link ?? panel).scrollIntoView({ block: fresh ? "center" : "nearest" });
}

// Marks what the address names; with `reveal`, goes there. What the page does not hold is said at its top.
function go(reveal) {
  const at = named();
  const { completions } = held;
  const row = at && completions?.rowOf(at);
  const isHere = at?.id ? row && held.tokens[at.id] : completions?.steps[at?.step];
  if (at && !isHere && stepPages.has(at.step)) {
    return location.replace(`steps/${at.step.padStart(5, "0")}.html${location.hash}`);
  }
  const elsewhere = at?.id !== shown;
  absent.remove();
  if (row && String(chosen.step) !== at.step) completions.choose(Number(at.step));
  completions?.table.select(row?.id ?? null, reveal && elsewhere);
  if (row) {
    if (panel.parentNode !== completions.place) completions.place.append(panel); // moved, it would lose the focus
    return mark(at, row, reveal);
  }
  panel.remove();
  shown = null;
  if (!at) return;
  if (at.id === undefined && completions) {
    completions.choose(completions.nearest(Number(at.step)));
    if (reveal) completions.place.scrollIntoView({ block: "nearest" });
    return;
  }
  absent.textContent = `This page does not hold ${words({ ...at, token: undefined })}. It shows some completions of some steps; ${asked(at)} writes a page that has this one.`;
  document.querySelector("main").prepend(absent);
  if (reveal) absent.scrollIntoView();
}

strip.addEventListener("keydown", (event) => {
  const links = [...strip.querySelectorAll("a")];
  const here = links.indexOf(document.activeElement);
  const to = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: links.length - 1 }[event.key];
  if (to === undefined || !links[to] || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  history.replaceState(null, "", links[to].href);
  go(true);
  links[to].focus();
});

// --- figures ---------------------------------------------------------------------------------------------------------

const CONFIG = { displayModeBar: false, responsive: true };
const isLine = (t) => t.type === "scatter" && t.mode?.includes("lines") && !t.fill && !t.line?.dash;
const axesOf = (layout) => Object.keys(layout).filter((key) => key.startsWith("yaxis"));

// The exponential moving average of a series, as it would be without the zero that it starts from; a gap stays a gap.
function smoothed(y, weight) {
  let last = 0;
  let count = 0;
  return y.map((v) => {
    if (v === null) return null;
    last = weight * last + (1 - weight) * v;
    count += 1;
    return last / (1 - weight ** count);
  });
}

// Each line smoothed, and pale behind it the line as it was measured.
function withSmoothing(data, weight) {
  return data.flatMap((t) => {
    if (!isLine(t)) return [t];
    return [{ ...t, opacity: 0.25, showlegend: false }, { ...t, y: smoothed(t.y, weight), name: `${t.name}, smoothed` }];
  });
}

// Lines on a logarithmic axis, which has no place for 0 and below, nor for an area that goes there, and a sentence about
// what is left out. Shares and bars stay.
function withLog({ data, layout }) {
  const on = (key) => data.filter((t) => `yaxis${(t.yaxis ?? "y").slice(1)}` === key);
  const lines = (key) => on(key).filter(isLine).flatMap((t) => t.y).filter((v) => v !== null);
  const isPositive = (values) => values.every((v) => v >= 0) && values.some((v) => v > 0);
  const fits = (key) => !layout[key].range && on(key).every((t) => t.type === "scatter") && isPositive(lines(key));
  const keys = axesOf(layout).filter(fits);
  const isOnLog = (t) => keys.includes(`yaxis${(t.yaxis ?? "y").slice(1)}`);
  const positive = (t) => ({ ...t, y: t.y.map((v) => (v > 0 ? v : null)) });
  const isBelow = (v) => v !== null && v <= 0;
  const isArea = (t) => isOnLog(t) && t.fill && t.y.some(isBelow);
  const areas = [...new Set(data.filter(isArea).map((t) => `“${t.name}”`))];
  const points = data.filter((t) => isOnLog(t) && !t.fill).flatMap((t) => t.y).filter(isBelow).length;
  const left = areas.length ? `On a log scale ${areas.join(" and ")} is not drawn: it reaches 0 or below. ` : "";
  const out = points ? `Points at 0 have no place on a log scale: ${points} left out.` : "";
  const note = keys.length ? left + out : "The scale stays linear.";
  const axes = Object.fromEntries(keys.map((key) => [key, { ...layout[key], type: "log", rangemode: "normal" }]));
  const kept = data.filter((t) => !isArea(t)).map((t) => (isOnLog(t) && !t.fill ? positive(t) : t));
  return { data: kept, layout: { ...layout, ...axes }, note };
}

// As the reader wants it; plotly writes into what it is given.
function dressed(figure, isOverSteps) {
  let { data, layout } = structuredClone(figure);
  let note = "";
  if (isOverSteps && chosen.smoothing) data = withSmoothing(data, chosen.smoothing);
  if (isOverSteps && chosen.log) ({ data, layout, note } = withLog({ data, layout }));
  return { data, layout, note };
}

function drawFigures(Plotly, figures) {
  const plots = Object.keys(figures).map((id) => document.getElementById(id));
  const overSteps = plots.filter((plot) => plot.dataset.steps);
  const notes = new Map(overSteps.map((plot) => [plot, make("div", "soft note")]));
  for (const [plot, note] of notes) plot.before(note);
  function render(plot) {
    const { data, layout, note } = dressed(figures[plot.id], Boolean(plot.dataset.steps));
    Plotly.react(plot, data, layout, CONFIG);
    if (notes.has(plot)) notes.get(plot).textContent = note;
  }
  plots.forEach(render);
  // One cursor for all charts over the steps.
  for (const plot of overSteps) {
    followSteps(Plotly, plot, overSteps.filter((other) => other !== plot));
    plot.on("plotly_click", ({ points }) => held.completions && (location.hash = `step=${points[0].x}`));
  }
  return () => overSteps.forEach(render);
}

function makeControls(render) {
  const bar = make("div", "bar");
  const range = Object.assign(make("input"), { type: "range", min: "0", max: "0.99", step: "0.01", value: String(chosen.smoothing) });
  const output = make("output", "", chosen.smoothing.toFixed(2));
  const log = Object.assign(make("input"), { type: "checkbox", checked: chosen.log });
  range.addEventListener("input", () => {
    chosen.smoothing = Number(range.value);
    output.textContent = chosen.smoothing.toFixed(2);
    render();
  });
  log.addEventListener("change", () => {
    chosen.log = log.checked;
    render();
  });
  const hint = held.completions ? "Click a point to read the completions of its step." : "";
  bar.append(labelled("smoothing", range), output, labelled("log scale", log), make("span", "soft", hint));
  range.title = "Weight of the moving average; pale: as measured";
  log.title = "0 and below have no place on it, and are left out";
  return bar;
}

// --- the page --------------------------------------------------------------------------------------------------------

const held = { completions: null, tokens: {} };

// plotly's script is run as part of the page, which allows it by its checksum.
async function library() {
  const script = make("script");
  script.textContent = await unpack("plotly");
  document.head.append(script);
  return globalThis.Plotly;
}

async function start() {
  const { figures, completions, tokens } = JSON.parse((await unpack("carried")) ?? "{}");
  held.tokens = tokens ?? {};
  if (completions) held.completions = makeCompletions(completions);
  go(!kept);
  window.addEventListener("hashchange", () => go(true));
  let update = () => {};
  document.querySelector(".charts:has([data-steps])")?.before(makeControls(() => update()));
  if (figures) update = drawFigures(await library(), figures);
  if (kept) boxes().forEach((box, i) => (box.scrollTop ||= kept.tops[i] || 0));
}

let typed = -Infinity;
window.addEventListener("input", () => (typed = performance.now()));

// The place is remembered when the page goes: until then its reader may choose and scroll. Who has scrolled since it came
// back stays there.
addEventListener("pagehide", () => {
  const place = { tops: boxes().map((box) => box.scrollTop), open: document.querySelector("details")?.open, chosen };
  sessionStorage.setItem(name, JSON.stringify(place));
});
if (kept) {
  const details = document.querySelector("details");
  if (details) details.open = Boolean(kept.open);
}
start();

if (seconds > 0) {
  setInterval(() => {
    const typing = performance.now() - typed < 5000;
    if (document.hidden || typing || String(getSelection())) return; // not seen, or a text in it is typed or selected
    location.reload();
  }, seconds * 1000);
}
