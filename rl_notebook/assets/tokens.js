// The token inspector. Text of a model enters the page through textContent only. No network; plotly draws its charts.
import { along } from "./along.js";
import { library } from "./chart.js";
import { coordinates } from "./coordinates.js";
import { fill, labelled, make, word } from "./elements.js";
import { overview } from "./overview.js";
import { forking } from "./fork.js";
import { ROLES, form, known, paint, palette, tint } from "./scale.js";
import { strip } from "./strip.js";
import { makeTable } from "./table.js";

// What the parts share: the payload, what is selected and hovered, and the listeners to a change.
function makeState(model) {
  const listeners = [];
  return {
    model,
    payload: model.get("payload"),
    hovered: null,
    frame: 0,
    palette: palette(false),
    Plotly: null, // once it is read
    get targets() {
      return Math.max(0, (this.payload.tokens ?? []).length - 1);
    },
    get selected() {
      const t = model.get("target");
      return t >= 0 && t < this.targets ? t : null;
    },
    get curve() {
      const { item, curve } = model.get("forks");
      return item === this.payload.item ? curve : null;
    },
    get current() {
      return this.hovered ?? this.selected;
    },
    get series() {
      return this.one(model.get("series")) ?? this.one(this.payload.first);
    },
    one(name) {
      return (this.payload.series ?? []).find((s) => s.name === name);
    },
    on(run, ...whats) {
      listeners.push([run, whats]);
    },
    tell(...whats) {
      for (const [run, on] of listeners) if (on.some((what) => whats.includes(what))) run();
    },
    // At most once a frame, however fast the pointer moves.
    hover(target, from) {
      if (target === this.hovered) return;
      this.hovered = target;
      this.from = from;
      this.frame = this.frame || requestAnimationFrame(() => ((this.frame = 0), this.tell("hover")));
    },
    set(values) {
      for (const [name, value] of Object.entries(values)) model.set(name, value);
      model.save_changes();
    },
    select(target, item = model.get("item")) {
      this.set({ item, target });
    },
  };
}

// Sample, series and legend.
function head(state) {
  const { model } = state;
  const node = make("div", "rlt-head");
  const sample = make("select", "rlt-sample");
  const series = make("select", "rlt-series");
  const legend = make("div", "rlt-legend");
  const facts = make("div", "rlt-facts");
  const choices = make("div", "rlt-choices");
  const samples = labelled("sample", sample);
  const go = (item) => model.get("items")[item] && state.set({ item, target: -1 });
  const steps = [["‹", -1, "the sample before"], ["›", 1, "the next sample"]].map(([text, by, title]) => {
    const button = Object.assign(make("button", "rlt-step", text), { title, onclick: () => go(model.get("item") + by) });
    return [button, by];
  });
  samples.append(...steps.map(([button]) => button));
  choices.append(samples, labelled("colour", series), legend);
  node.append(choices, facts);
  sample.onchange = () => go(Number(sample.value));
  series.onchange = () => state.set({ series: series.value });

  const drawItems = () => {
    const items = model.get("items");
    fill(sample, items.map((item, i) => [String(i), item.label]), String(model.get("item")));
    for (const [button, by] of steps) button.disabled = !items[model.get("item") + by];
  };
  const drawLegend = () => {
    const s = state.series;
    legend.replaceChildren();
    if (!s) return;
    const addText = (text, kind = "rlt-soft") => legend.append(make("span", kind, text));
    const shade = (v) => paint(state.palette, tint(s, v)) || "transparent";
    fill(series, state.payload.series.map((x) => [x.name, x.label]), s.name);
    if (s.kind === "class") {
      for (const v of [...new Set(s.values)].filter(known).sort((a, b) => a - b)) {
        addText(s.name === "mask" ? ["0 not scored", "1 scored"][v] : v ? `${s.label} ${v}` : "none", "rlt-chip");
        legend.lastChild.style.backgroundColor = shade(v);
      }
      return;
    }
    const low = s.kind === "kl" ? s.center : s.center - s.limit;
    const high = s.kind === "logprob" ? s.center : s.center + s.limit;
    const even = [0, 0.25, 0.5, 0.75, 1].map((share) => low + share * (high - low));
    const values = s.kind === "difference" ? [low, -0.2, -0.02, 0, 0.02, 0.2, high] : even;
    const bar = make("span", "rlt-bar");
    bar.style.backgroundImage = `linear-gradient(to right, ${values.map(shade).join(", ")})`;
    const beyond = s.values.filter((v) => known(v) && Math.abs(v - s.center) > s.limit).length;
    const clip = s.kind === "ratio" && state.payload.clip;
    legend.append(make("span", "", form(low)), bar, make("span", "", form(high)));
    if (s.kind === "difference") addText(`nats, in decades; none within ${form(s.floor, 2)}`);
    if (clip) addText(`the loss clips outside ${form(clip[0])} to ${form(clip[1])} (dashed)`);
    if (beyond) addText(`${beyond} beyond`);
    if (s.bad.length) addText(`${s.bad.length} not a number`, "rlt-alarm");
  };
  const drawFacts = () => {
    const { where, facts: known = [], notes = [] } = state.payload;
    const parts = [[where, "rlt-where"], ...known.map((text) => [text, ""]), ...notes.map((text) => [text, "rlt-alarm"])];
    facts.replaceChildren(...parts.map(([text, kind]) => make("span", kind, text)));
  };
  state.on(drawItems, "items");
  state.on(drawLegend, "payload", "series", "theme");
  state.on(drawFacts, "payload");
  return node;
}

// Every number of the token under the pointer, or of the selected one.
function readout(state) {
  const node = make("div", "rlt-readout");
  const draw = () => {
    const t = state.current;
    const p = state.payload;
    node.replaceChildren();
    if (t === null) return node.append(make("span", "rlt-soft", "Point at a token, or at the chart."));
    const name = make("div", "rlt-name");
    const about = `token ${t + 1}, id ${p.tokens[t + 1]}, ${ROLES[p.roles[t + 1]]} — target ${t}`;
    name.append(word(p.texts[t + 1], make("span", "rlt-big")), make("span", "rlt-soft", about));
    node.append(name);
    for (const s of p.series.filter(({ name }) => name !== "mask")) {
      const cell = make("div", "rlt-value");
      cell.dataset.series = s.name;
      const bad = s.bad.includes(t);
      const value = make("b", bad ? "rlt-alarm" : "", bad ? "not a number" : form(s.values[t]));
      value.style.backgroundColor = paint(state.palette, tint(s, s.values[t]), 0.45);
      cell.append(make("span", "rlt-soft", s.label), value);
      node.append(cell);
    }
  };
  state.on(draw, "payload", "target", "hover", "theme");
  return node;
}

// All scored tokens, those first where the value is farthest from the middle of the scale, or should be a number and is none.
function worst(state) {
  const node = make("div", "rlt-worst");
  const none = make("p", "rlt-soft");
  const table = makeTable({
    label: "tokens",
    size: 12,
    view: { sort: "shown", descending: true },
    open: (row) => state.select(row.target),
    paint: (row, column) => (column.name === "shown" ? paint(state.palette, tint(state.series, row.value), 0.5) : ""),
  });
  const columns = [
    { name: "token", label: "token", kind: "number", format: ".9g", width: "64px" },
    { name: "text", label: "text", kind: "text", opens: true },
    { name: "shown", label: "value", kind: "text", key: "off", width: "92px" },
  ];
  node.append(none, table.element);
  const draw = () => {
    const s = state.series;
    const { texts, roles } = state.payload;
    const scale = s && s.kind !== "class";
    const row = (value, target) => {
      const off = known(value) ? Math.abs(value - s.center) : Infinity;
      const shown = known(value) ? form(value) : "not a number";
      return { id: String(target), target, token: target + 1, text: texts[target + 1], value, shown, off };
    };
    const scored = (_, t) => roles[t + 1] === "s" && (known(s.values[t]) || s.bad.includes(t));
    const rows = scale ? s.values.map(row).filter((row) => scored(row, row.target)) : [];
    const still = rows.every((row) => row.off === 0);
    none.textContent = !scale ? "Choose a series with a scale." : still ? `Every value is ${form(s.center)}, or there is none.` : "";
    table.element.hidden = !rows.length;
    table.draw({ title: scale ? `Farthest from ${form(s.center)}: ${s.label}` : "", columns, rows });
  };
  state.on(draw, "payload", "series", "theme");
  state.on(() => table.select(state.selected === null ? null : String(state.selected)), "payload", "target");
  return node;
}

let count = 0;

function render({ model, el, signal }) {
  const state = makeState(model);
  const stops = [];
  const root = make("div", "rlt");
  const wait = make("div", "rlt-wait");
  wait.setAttribute("role", "status");
  const below = make("div", "rlt-below");
  below.append(coordinates(state), worst(state));
  root.append(overview(state, stops), head(state), wait, strip(state, `rlt${count++}`), readout(state), forking(state), along(state, stops), below);
  el.append(root);

  // Keys that the inspector uses itself are not commands of the notebook, as long as the focus is in here.
  const keys = (e) => {
    const own = !(e.ctrlKey || e.metaKey || e.altKey) && e.key !== "Escape" && !(e.shiftKey && e.key === "Enter");
    if (root.contains(e.target)) e.target.toggleAttribute("data-lm-suppress-shortcuts", own);
  };
  window.addEventListener("keydown", keys, true);
  const theme = () => {
    const dark = document.body.dataset.jpThemeLight === "false";
    state.palette = palette(dark);
    root.classList.toggle("rlt-dark", dark);
    state.tell("theme");
  };
  const themes = new MutationObserver(theme);
  themes.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light"] });
  const sizes = new ResizeObserver(() => state.tell("size"));
  sizes.observe(root);

  let timer = 0;
  const waiting = () => {
    clearTimeout(timer);
    const late = model.get("item") !== (model.get("payload").item ?? model.get("item"));
    root.classList.toggle("rlt-late", late);
    wait.textContent = late ? "fetching the sample …" : "";
    if (late) timer = setTimeout(() => (wait.textContent = "No response from the kernel yet: it is busy, or it is gone."), 4000);
  };
  const affected = { item: ["items"], payload: ["payload", "items"] }; // the parts that change with a trait; else those of its name
  const changed = (name) => () => {
    if (name === "payload") [state.payload, state.hovered] = [model.get("payload"), null];
    if (name in affected) waiting();
    state.tell(...(affected[name] ?? [name]));
  };
  const events = ["payload", "item", "items", "overview", "series", "target", "shift", "forks", "alternatives", "asking"].map((name) => [`change:${name}`, changed(name)]);
  for (const [name, run] of events) model.on(name, run);
  theme();
  state.tell("items", "payload", "overview", "forks", "asking");
  root.dataset.ready = "true";
  library(model).then((Plotly) => {
    if (signal?.aborted) return;
    state.Plotly = Plotly;
    state.tell("plotly");
  });

  return () => {
    for (const [name, run] of events) model.off(name, run);
    window.removeEventListener("keydown", keys, true);
    clearTimeout(timer);
    cancelAnimationFrame(state.frame);
    for (const observer of [themes, sizes]) observer.disconnect();
    for (const stop of stops) stop();
  };
}

export default { render };
