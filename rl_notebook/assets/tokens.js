// The token inspector. Text of a model enters the page through textContent only. No network, no dependencies.
import { make, makeTable } from "./table.js";

// --- numbers and colours ---------------------------------------------------------------------------------------------

const LIGHT = { blue: [40, 103, 178], orange: [204, 98, 40], violet: [116, 84, 168], green: [47, 143, 99] };
const DARK = { blue: [92, 156, 236], orange: [240, 145, 84], violet: [172, 142, 232], green: [96, 196, 150] };
const CLASSES = ["blue", "orange", "green", "violet"];
const STRONGEST = 0.62; // opacity at the end of a scale; text stays legible on it

const clamp = (x, low, high) => Math.min(high, Math.max(low, x));
const known = (v) => v !== null && v !== undefined;

function form(v, digits = 4) {
  if (!known(v)) return "–";
  const size = Math.abs(v);
  if (v === 0) return "0";
  if (size >= 1e4 || size < 1e-3) return v.toExponential(digits < 4 ? 1 : 2);
  return String(Number(v.toPrecision(digits)));
}

// [name of a colour, strength from 0 to 1] of a value on the scale of its series.
function tint(series, v) {
  if (!known(v)) return ["blue", 0];
  if (series.kind === "class") return v === 0 ? ["blue", 0] : [CLASSES[(v - 1) % CLASSES.length], 0.45];
  const off = v - series.center;
  if (series.kind === "difference") {
    const far = Math.abs(off) > series.floor ? symlog(series, Math.abs(off)) / symlog(series, series.limit) : 0;
    return [off < 0 ? "orange" : "blue", Math.min(1, far)];
  }
  const t = clamp(off / series.limit, -1, 1);
  if (series.kind === "logprob" || series.kind === "kl") return ["violet", Math.abs(t)];
  return [t < 0 ? "orange" : "blue", Math.abs(t)];
}

// Where a difference stands on its axis: even around 0, in decades beyond.
const symlog = (series, v) => Math.sign(v) * Math.log1p(Math.abs(v) / series.near);
const DECADES = [-10, -1, -0.1, 0, 0.1, 1, 10];

const paint = (palette, [name, strength], most = STRONGEST) =>
  strength ? `rgba(${palette[name].join(",")},${(most * strength).toFixed(3)})` : "";

function ticks(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= 0.75 * raw) ?? raw;
  const out = [];
  for (let k = Math.ceil(low / step); k * step <= high + step * 1e-9; k++) out.push(k * step);
  return out;
}

// --- elements --------------------------------------------------------------------------------------------------------

function labelled(name, control) {
  const node = make("label", "rlt-label");
  node.append(make("span", "", name), control);
  return node;
}

function fill(select, options, value) {
  select.replaceChildren(
    ...options.map(([v, text]) => {
      const option = make("option", "", text);
      option.value = v;
      return option;
    }),
  );
  select.value = value;
}

function word(text, into) {
  if (text.startsWith("·") && text.length > 1) {
    into.append(make("span", "rlt-ws", "·"), text.slice(1));
  } else {
    into.textContent = text;
  }
  return into;
}

const FONT = '11px system-ui, "Segoe UI", Roboto, Arial, sans-serif';

// A canvas that is redrawn when its box changes; `draw(context, width, height)` works in CSS pixels.
function surface(kind, height, label, draw) {
  const canvas = make("canvas", kind);
  canvas.style.height = `${height}px`;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", label);
  let pending = 0;
  const redraw = () => {
    pending = 0;
    const width = canvas.clientWidth;
    if (!width) return;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.font = FONT;
    draw(context, width, height, ratio);
  };
  const ask = () => {
    pending = pending || requestAnimationFrame(redraw);
  };
  const observer = new ResizeObserver(ask);
  observer.observe(canvas);
  return { canvas, ask, stop: () => (observer.disconnect(), cancelAnimationFrame(pending)) };
}

// --- what the parts share ----------------------------------------------------------------------------------------------

function makeState(model) {
  const listeners = [];
  const state = {
    model,
    payload: model.get("payload"),
    hovered: null,
    frame: 0,
    dark: false,
    get palette() {
      return this.dark ? DARK : LIGHT;
    },
    get targets() {
      return Math.max(0, (this.payload.tokens ?? []).length - 1);
    },
    get selected() {
      const t = model.get("target");
      return t >= 0 && t < this.targets ? t : null;
    },
    get current() {
      return this.hovered ?? this.selected;
    },
    get series() {
      const all = this.payload.series ?? [];
      return all.find((s) => s.name === model.get("series")) ?? all.find((s) => s.name === this.payload.first) ?? all[0];
    },
    one(name) {
      return (this.payload.series ?? []).find((s) => s.name === name);
    },
    on(what, run) {
      listeners.push([what, run]);
    },
    tell(...whats) {
      for (const [what, run] of listeners) if (whats.includes(what)) run();
    },
    // At most once a frame, however fast the pointer moves.
    hover(target, from) {
      if (target === this.hovered) return;
      this.hovered = target;
      this.from = from;
      this.frame = this.frame || requestAnimationFrame(() => ((this.frame = 0), this.tell("hover")));
    },
    select(target, item) {
      if (item !== undefined) model.set("item", item);
      model.set("target", target);
      model.save_changes();
    },
  };
  return state;
}

// --- the head: sample, series, legend -----------------------------------------------------------------------------------

function head(state) {
  const { model } = state;
  const node = make("div", "rlt-head");
  const sample = make("select", "rlt-sample");
  const series = make("select", "rlt-series");
  const back = make("button", "rlt-step", "‹");
  const on = make("button", "rlt-step", "›");
  back.title = "the sample before";
  on.title = "the next sample";
  const legend = make("div", "rlt-legend");
  const facts = make("div", "rlt-facts");
  const choices = make("div", "rlt-choices");
  const samples = labelled("sample", sample);
  samples.append(back, on);
  choices.append(samples, labelled("colour", series), legend);
  node.append(choices, facts);

  const go = (item) => {
    if (item < 0 || item >= model.get("items").length) return;
    model.set("item", item);
    model.set("target", -1);
    model.save_changes();
  };
  sample.onchange = () => go(Number(sample.value));
  back.onclick = () => go(model.get("item") - 1);
  on.onclick = () => go(model.get("item") + 1);
  series.onchange = () => {
    model.set("series", series.value);
    model.save_changes();
  };

  const drawItems = () => {
    const items = model.get("items");
    fill(sample, items.map((item, i) => [String(i), item.label]), String(model.get("item")));
    back.disabled = model.get("item") <= 0;
    on.disabled = model.get("item") >= items.length - 1;
  };
  const drawLegend = () => {
    const s = state.series;
    legend.replaceChildren();
    if (!s) return;
    fill(series, state.payload.series.map((x) => [x.name, x.label]), s.name);
    if (s.kind === "class") {
      const values = [...new Set(s.values)].filter(known).sort((a, b) => a - b);
      for (const v of values) {
        const chip = make("span", "rlt-chip", s.name === "mask" ? (v ? "1 scored" : "0 not scored") : v ? `${s.label} ${v}` : "none");
        chip.style.backgroundColor = paint(state.palette, tint(s, v));
        legend.append(chip);
      }
      return;
    }
    const bar = make("span", "rlt-bar");
    const both = !(s.kind === "logprob" || s.kind === "kl");
    const at = both ? [-1, -0.5, 0, 0.5, 1] : s.kind === "kl" ? [0, 0.5, 1] : [-1, -0.5, 0];
    const values = s.kind === "difference" ? [-s.limit, -0.2, -0.02, 0, 0.02, 0.2, s.limit] : at.map((t) => s.center + t * s.limit);
    const stops = values.map((v) => paint(state.palette, tint(s, v)) || "transparent");
    bar.style.backgroundImage = `linear-gradient(to right, ${stops.join(", ")})`;
    const low = s.kind === "kl" ? s.center : s.center - s.limit;
    const high = s.kind === "logprob" ? s.center : s.center + s.limit;
    const beyond = s.values.filter((v) => known(v) && Math.abs(v - s.center) > s.limit).length;
    legend.append(make("span", "", form(low)), bar, make("span", "", form(high)));
    if (s.kind === "difference") legend.append(make("span", "rlt-soft", `nats, in decades; none within ${form(s.floor, 2)}`));
    const clip = s.kind === "ratio" && state.payload.clip;
    if (clip) legend.append(make("span", "rlt-soft", `the loss clips outside ${form(clip[0])} to ${form(clip[1])} (dashed)`));
    if (beyond) legend.append(make("span", "rlt-soft", `${beyond} beyond`));
    if (s.bad.length) legend.append(make("span", "rlt-alarm", `${s.bad.length} not a number`));
  };
  const drawFacts = () => {
    const p = state.payload;
    facts.replaceChildren();
    if (!p.regions) return;
    const said = (text, kind = "") => facts.append(make("span", kind, text));
    said(p.where, "rlt-where");
    for (const [name, v] of Object.entries(p.facts)) if (known(v)) said(`${name} ${typeof v === "number" ? form(v) : v}`);
    said(`prompt ${p.regions.prompt} tokens, scored ${p.regions.scored}, masked ${p.regions.masked}, cut ${p.regions.cut}`);
    if (p.ids_only) said("no tokenizer: ids are shown", "rlt-soft");
    for (const note of p.notes) said(note, "rlt-alarm");
  };
  state.on("items", drawItems);
  for (const what of ["payload", "series", "theme"]) state.on(what, drawLegend);
  state.on("payload", drawFacts);
  return node;
}

// --- the strip -----------------------------------------------------------------------------------------------------------

const BLOCK = 160; // tokens in a block at most; a block ends at a line end, too
const CHUNK = 800; // tokens after which a new chunk begins; chunks out of view are not laid out
const LINE = 23; // pixels, for the height of a chunk that was never laid out

function strip(state, id) {
  const node = make("div", "rlt-strip");
  node.tabIndex = 0;
  node.setAttribute("role", "listbox");
  node.setAttribute("aria-label", "tokens of the sample; arrow keys move");
  let spans = [];
  let marked = {};
  let folded = true;
  const fold = make("button", "rlt-fold");
  const setFolded = (on) => {
    folded = on;
    state.folded = on && (state.payload.regions?.prompt ?? 0) > 0;
    node.classList.toggle("rlt-folded", folded);
    fold.textContent = `${folded ? "▸" : "▾"} prompt ${state.payload.regions?.prompt ?? 0}`;
    fold.setAttribute("aria-expanded", String(!folded));
    fold.title = folded ? "show the prompt" : "fold the prompt";
  };
  fold.onclick = () => {
    setFolded(!folded);
    state.tell("fold");
  };

  const token = (p, j, special) => {
    const span = make("span", `rlt-token rlt-${{ p: "prompt", m: "masked", s: "scored" }[p.roles[j]]}`);
    if (special.has(j)) span.classList.add("rlt-special");
    span.id = `${id}-${j}`;
    span.setAttribute("role", "option");
    if (j > 0) span.dataset.target = j - 1;
    span.dataset.token = j;
    return word(p.texts[j], span);
  };
  const NAMES = { p: "prompt", m: "masked", s: "scored" };
  const build = () => {
    const p = state.payload;
    const special = new Set(p.special ?? []);
    const size = (p.tokens ?? []).length;
    const page = document.createDocumentFragment();
    spans = new Array(size);
    let line = null;
    let chunk = null;
    const prompt = p.regions?.prompt ?? 0;
    setFolded(folded);
    if (prompt) page.append(fold);
    for (let j = 0; j < size; j++) {
      if (j === prompt) line = null;
      if (line === null || line.childElementCount >= BLOCK) {
        if (chunk === null || j - chunk.start >= CHUNK) {
          chunk = { node: make("div", "rlt-chunk"), start: j };
          page.append(chunk.node);
        }
        const block = make("div", j < prompt ? "rlt-block rlt-ofprompt" : "rlt-block");
        line = make("div", "rlt-line");
        block.append(make("span", "rlt-gutter", String(j)), line);
        chunk.node.append(block);
      }
      if (p.roles[j] !== "p" && (j === 0 || p.roles[j] !== p.roles[j - 1])) {
        let end = j;
        while (end < size && p.roles[end] === p.roles[j]) end++;
        line.append(make("span", "rlt-region", `${NAMES[p.roles[j]]} ${end - j}`));
      }
      spans[j] = token(p, j, special);
      line.append(spans[j]);
      if (p.texts[j].endsWith("⏎")) line = null;
    }
    if (p.regions?.cut) (line ?? page).append(make("span", "rlt-region rlt-cut", `✂ ${p.regions.cut} tokens cut off here`));
    if (p.message) page.append(make("p", "rlt-message", p.message));
    for (const part of page.querySelectorAll(".rlt-chunk")) part.style.containIntrinsicHeight = `auto ${part.childElementCount * LINE}px`;
    node.replaceChildren(page);
    node.scrollTop = 0;
    marked = {};
    colour();
  };
  const colour = () => {
    const s = state.series;
    if (!s) return;
    const bad = new Set(s.bad);
    for (let j = 1; j < spans.length; j++) {
      spans[j].style.backgroundColor = paint(state.palette, tint(s, s.values[j - 1]));
      spans[j].classList.toggle("rlt-bad", bad.has(j - 1));
    }
  };
  const see = (span) => {
    const outer = node.getBoundingClientRect();
    const inner = span.getBoundingClientRect();
    if (inner.top < outer.top + 4) node.scrollTop += inner.top - outer.top - 24;
    else if (inner.bottom > outer.bottom - 4) node.scrollTop += inner.bottom - outer.bottom + 24;
  };
  const mark = (kind, target, scroll) => {
    marked[kind]?.classList.remove(kind);
    const span = target === null ? null : spans[target + 1];
    marked[kind] = span;
    if (!span) return;
    span.classList.add(kind);
    if (scroll) {
      see(span);
      requestAnimationFrame(() => see(span)); // again, when the blocks on the way have their true heights
    }
  };
  const drawSelected = () => {
    if (folded && state.selected !== null && state.payload.roles[state.selected + 1] === "p") fold.onclick();
    mark("rlt-selected", state.selected, true);
    for (const old of node.querySelectorAll("[aria-selected]")) old.removeAttribute("aria-selected");
    const span = state.selected === null ? null : spans[state.selected + 1];
    span?.setAttribute("aria-selected", "true");
    if (span) node.setAttribute("aria-activedescendant", span.id);
    else node.removeAttribute("aria-activedescendant");
  };

  const targetAt = (event) => {
    const span = event.target.closest?.(".rlt-token");
    return span?.dataset.target === undefined ? null : Number(span.dataset.target);
  };
  node.addEventListener("pointermove", (e) => state.hover(targetAt(e), "strip"));
  node.addEventListener("pointerleave", () => state.hover(null, "strip"));
  node.addEventListener("click", (e) => targetAt(e) !== null && state.select(targetAt(e)));
  node.addEventListener("keydown", (e) => {
    const here = state.selected ?? -1;
    const to = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: state.targets - 1 }[e.key];
    const line = { ArrowDown: 1, ArrowUp: -1 }[e.key];
    if ((to === undefined && line === undefined) || e.ctrlKey || e.metaKey || e.altKey || !state.targets) return;
    e.preventDefault();
    state.hover(null, "strip");
    state.select(clamp(to ?? nextLine(here, line), 0, state.targets - 1));
  });
  // The token above or below: the first line in that direction, and there the one at the same place.
  const nextLine = (here, step) => {
    const box = (t) => spans[t + 1].getBoundingClientRect();
    if (here < 0) return 0;
    const start = box(here);
    let t = here;
    while (t + step >= 0 && t + step < state.targets && Math.abs(box(t).top - start.top) < 4) t += step;
    const top = box(t).top;
    if (Math.abs(top - start.top) < 4) return here;
    let best = t;
    for (let u = t; u >= 0 && u < state.targets && Math.abs(box(u).top - top) < 4; u += step) {
      if (Math.abs(box(u).left - start.left) < Math.abs(box(best).left - start.left)) best = u;
    }
    return best;
  };

  state.on("payload", build);
  for (const what of ["series", "theme"]) state.on(what, colour);
  for (const what of ["payload", "target"]) state.on(what, drawSelected);
  state.on("hover", () => mark("rlt-hover", state.hovered, state.from === "chart"));
  return node;
}

// --- the readout -----------------------------------------------------------------------------------------------------------

function readout(state) {
  const node = make("div", "rlt-readout");
  node.setAttribute("aria-live", "off");
  const draw = () => {
    const t = state.current;
    const p = state.payload;
    node.replaceChildren();
    if (t === null) return node.append(make("span", "rlt-soft", "Point at a token, or at the chart."));
    const name = make("div", "rlt-name");
    const role = { p: "prompt", m: "masked", s: "scored" }[p.roles[t + 1]];
    name.append(word(p.texts[t + 1], make("span", "rlt-big")));
    name.append(make("span", "rlt-soft", `token ${t + 1}, id ${p.tokens[t + 1]}, ${role} — target ${t}`));
    node.append(name);
    for (const s of p.series) {
      if (s.kind === "class" && s.name === "mask") continue;
      const cell = make("div", "rlt-value");
      cell.dataset.series = s.name;
      const bad = s.bad.includes(t);
      const value = make("b", bad ? "rlt-alarm" : "", bad ? "not a number" : form(s.values[t]));
      value.style.backgroundColor = paint(state.palette, tint(s, s.values[t]), 0.45);
      cell.append(make("span", "rlt-soft", s.label), value);
      node.append(cell);
    }
  };
  for (const what of ["payload", "target", "hover", "theme"]) state.on(what, draw);
  return node;
}

// --- the chart -------------------------------------------------------------------------------------------------------------

const PAD = { left: 58, right: 12, top: 10, bottom: 26 };

function chart(state, stops) {
  let view = [0, 1]; // targets from, to (exclusive)
  let drag = null;

  const spread = (width) => (width - PAD.left - PAD.right) / (view[1] - view[0]);
  const xOf = (t, width) => PAD.left + (t + 0.5 - view[0]) * spread(width);
  const at = (x, width) => clamp(Math.floor(view[0] + (x - PAD.left) / spread(width)), 0, state.targets - 1);

  // Where a value stands on the axis of its series.
  const height = (s, v) => (s.kind === "difference" ? symlog(s, v) : v);

  // Lowest and highest value in view, with the middle of the scale and a little air; of a difference always a nat and more.
  const reach = (s) => {
    let low = s.kind === "difference" ? -1 : s.center;
    let high = s.kind === "difference" ? 1 : s.center;
    for (let t = Math.floor(view[0]); t < Math.min(view[1], state.targets); t++) {
      const v = s.values[t];
      if (!known(v)) continue;
      if (v < low) low = v;
      if (v > high) high = v;
    }
    if (low === high) [low, high] = [low - (s.kind === "kl" ? 0 : s.limit), high + (s.kind === "logprob" ? 0 : s.limit)];
    [low, high] = [height(s, low), height(s, high)];
    const air = 0.06 * (high - low);
    const middle = height(s, s.center);
    return [low < middle ? low - air : low, high > middle ? high + air : high];
  };

  const regions = (g, width, height, ink) => {
    const { roles } = state.payload;
    for (let j = 1; j < roles.length; ) {
      let end = j;
      while (end < roles.length && roles[end] === roles[j]) end++;
      if (roles[j] !== "s") {
        const x = Math.max(PAD.left, xOf(j - 1.5, width));
        const right = Math.min(width - PAD.right, xOf(end - 1.5, width));
        if (right > x) {
          g.fillStyle = `${ink}14`;
          g.fillRect(x, PAD.top, right - x, height - PAD.top - PAD.bottom);
          const name = roles[j] === "p" ? "prompt" : "masked";
          g.fillStyle = `${ink}99`;
          if (right - x > g.measureText(name).width + 8) g.fillText(name, x + 4, PAD.top + 11);
        }
      }
      j = end;
    }
  };

  const axes = (g, s, width, tall, low, high, yOf, ink) => {
    g.textAlign = "right";
    g.textBaseline = "middle";
    const decades = s.kind === "difference";
    const shown = decades ? DECADES.filter((v) => symlog(s, v) >= low && symlog(s, v) <= high) : ticks(low, high, 4);
    for (const v of shown) {
      g.fillStyle = `${ink}22`;
      g.fillRect(PAD.left, Math.round(yOf(v)), width - PAD.left - PAD.right, 1);
      g.fillStyle = `${ink}b0`;
      g.fillText(form(!decades && Math.abs(v) < (high - low) * 1e-9 ? 0 : v), PAD.left - 6, yOf(v));
    }
    if (decades) {
      g.fillStyle = `${ink}26`;
      g.fillRect(PAD.left, yOf(s.floor), width - PAD.left - PAD.right, Math.max(1, yOf(-s.floor) - yOf(s.floor)));
    }
    g.fillStyle = `${ink}b0`;
    g.textAlign = "center";
    g.textBaseline = "alphabetic";
    const last = width - PAD.right - 46;
    for (const t of ticks(view[0], view[1] - 1, Math.max(2, width / 110))) {
      if (Number.isInteger(t) && xOf(t, width) < last) g.fillText(String(t), xOf(t, width), tall - 10);
    }
    g.textAlign = "right";
    g.fillText("target", width - PAD.right, tall - 10);
    g.textAlign = "left";
  };

  // One stem a token where there is room, else the lowest and highest of each column of pixels.
  const values = (g, s, width, yOf) => {
    const step = spread(width);
    const zero = yOf(s.center);
    const first = Math.max(0, Math.floor(view[0]));
    const last = Math.min(view[1], state.targets);
    const bad = new Set(s.bad);
    const shade = (t) => {
      const [name] = tint(s, s.values[t]);
      return `rgba(${state.palette[name].join(",")},${state.payload.roles[t + 1] === "s" ? 0.9 : 0.35})`;
    };
    if (step >= 1.5) {
      for (let t = first; t < last; t++) {
        const x = xOf(t, width);
        if (bad.has(t)) {
          g.fillStyle = "#b5179e";
          g.fillText("×", x - 3, zero - 4);
        }
        if (!known(s.values[t])) continue;
        const y = yOf(s.values[t]);
        g.fillStyle = shade(t);
        const wide = s.kind === "class" ? step : clamp(step * 0.5, 1, 6);
        g.fillRect(x - wide / 2, Math.min(y, zero), wide, Math.max(1, Math.abs(y - zero)));
      }
      return;
    }
    for (let x = PAD.left; x < width - PAD.right; x++) {
      const from = Math.max(first, Math.floor(view[0] + (x - PAD.left) / step));
      const to = Math.min(last, Math.ceil(view[0] + (x + 1 - PAD.left) / step));
      let low = null;
      let high = null;
      for (let t = from; t < to; t++) {
        if (!known(s.values[t])) continue;
        if (low === null || s.values[t] < s.values[low]) low = t;
        if (high === null || s.values[t] > s.values[high]) high = t;
      }
      for (const t of [low, high]) {
        if (t === null) continue;
        g.fillStyle = shade(t);
        const y = yOf(s.values[t]);
        g.fillRect(x, Math.min(y, zero), 1, Math.max(1, Math.abs(y - zero)));
      }
    }
  };

  // Everything but the markers, drawn once and copied under them while the pointer moves.
  const still = document.createElement("canvas");
  let stale = true;
  const drawStill = (ratio, width, tall, ink) => {
    const s = state.series;
    [still.width, still.height] = [Math.round(width * ratio), Math.round(tall * ratio)];
    const g = still.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.font = FONT;
    const [low, high] = reach(s);
    const yOf = (v) => PAD.top + ((high - height(s, v)) / (high - low)) * (tall - PAD.top - PAD.bottom);
    regions(g, width, tall, ink);
    axes(g, s, width, tall, low, high, yOf, ink);
    values(g, s, width, yOf);
    if (s.kind === "ratio" && state.payload.clip) {
      g.setLineDash([4, 3]);
      g.strokeStyle = `${ink}99`;
      for (const v of state.payload.clip.filter((c) => c > low && c < high)) {
        g.beginPath();
        g.moveTo(PAD.left, yOf(v));
        g.lineTo(width - PAD.right, yOf(v));
        g.stroke();
      }
    }
    stale = false;
  };

  const draw = (g, width, height, ratio) => {
    g.clearRect(0, 0, width, height);
    if (!state.series || !state.targets) return;
    const ink = state.dark ? "#d5dbe3" : "#3b4754";
    if (stale || still.width !== Math.round(width * ratio)) drawStill(ratio, width, height, ink);
    g.drawImage(still, 0, 0, width, height);
    for (const [t, strength] of [[state.selected, "ff"], [state.hovered, "88"]]) {
      if (t === null || t < view[0] - 1 || t >= view[1]) continue;
      const x = xOf(t, width);
      g.fillStyle = ink + strength;
      g.fillRect(x - 0.5, PAD.top, 1, height - PAD.top - PAD.bottom);
      g.beginPath();
      g.moveTo(x - 4, PAD.top - 7);
      g.lineTo(x + 4, PAD.top - 7);
      g.lineTo(x, PAD.top);
      g.fill();
    }
    if (drag?.moved) {
      g.fillStyle = `rgba(${state.palette.blue.join(",")},0.18)`;
      g.fillRect(Math.min(drag.from, drag.to), PAD.top, Math.abs(drag.to - drag.from), height - PAD.top - PAD.bottom);
    }
  };

  const { canvas, ask, stop } = surface("rlt-chart", 168, "the chosen series by target position", draw);
  stops.push(stop);
  canvas.tabIndex = 0;
  canvas.title = "drag to zoom in; wheel to zoom once clicked; double click to see all";
  const look = (from, to) => {
    const size = clamp(to - from, Math.min(2, state.targets), Math.max(1, state.targets));
    const start = clamp(from, 0, state.targets - size);
    view = [start, start + size];
    canvas.dataset.from = String(Math.round(view[0]));
    canvas.dataset.to = String(Math.round(view[1]));
    stale = true;
    ask();
  };
  const place = (e) => e.clientX - canvas.getBoundingClientRect().left;
  canvas.addEventListener("pointermove", (e) => {
    if (!state.targets) return;
    if (drag) {
      drag.to = clamp(place(e), PAD.left, canvas.clientWidth - PAD.right);
      drag.moved = drag.moved || Math.abs(drag.to - drag.from) > 5;
      ask();
    }
    state.hover(at(place(e), canvas.clientWidth), "chart");
  });
  canvas.addEventListener("pointerleave", () => state.hover(null, "chart"));
  canvas.addEventListener("pointerdown", (e) => {
    drag = { from: clamp(place(e), PAD.left, canvas.clientWidth - PAD.right), to: place(e), moved: false };
    canvas.setPointerCapture(e.pointerId);
    canvas.focus({ preventScroll: true });
  });
  canvas.addEventListener("pointerup", () => {
    const { from, to, moved } = drag ?? {};
    drag = null;
    if (!state.targets || from === undefined) return;
    const ends = [from, to].sort((a, b) => a - b).map((x) => at(x, canvas.clientWidth));
    if (moved) look(ends[0], ends[1] + 1);
    else state.select(ends[0]);
  });
  canvas.addEventListener("dblclick", () => look(0, state.targets));
  canvas.addEventListener(
    "wheel",
    (e) => {
      if (document.activeElement !== canvas && !e.ctrlKey) return; // else the page scrolls
      e.preventDefault();
      const size = view[1] - view[0];
      if (e.shiftKey || Math.abs(e.deltaX) > Math.abs(e.deltaY)) {
        const by = ((e.deltaX || e.deltaY) / canvas.clientWidth) * size;
        return look(view[0] + by, view[1] + by);
      }
      const share = clamp((place(e) - PAD.left) / (canvas.clientWidth - PAD.left - PAD.right), 0, 1);
      const to = clamp(size * 1.002 ** e.deltaY, 8, state.targets);
      const pivot = view[0] + share * size;
      look(pivot - share * to, pivot + (1 - share) * to);
    },
    { passive: false },
  );
  canvas.addEventListener("keydown", (e) => {
    const here = state.selected ?? -1;
    const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
    if (e.key === "Escape") return look(0, state.targets);
    if (step === undefined || !state.targets) return;
    e.preventDefault();
    state.select(clamp(here + step, 0, state.targets - 1));
  });
  // Where the selected token is out of view the view follows it.
  const follow = () => {
    const t = state.selected;
    if (t !== null && (t < view[0] || t >= view[1])) look(t - (view[1] - view[0]) / 2, t + (view[1] - view[0]) / 2);
    ask();
  };
  const home = () => look(state.folded ? clamp(state.payload.regions.prompt - 1, 0, state.targets) : 0, state.targets);
  state.on("payload", home);
  state.on("fold", home);
  for (const what of ["series", "theme"]) state.on(what, () => ((stale = true), ask()));
  state.on("hover", ask);
  state.on("target", follow);
  return canvas;
}

// --- coordinates and shift -------------------------------------------------------------------------------------------------

const SIDES = [[520, 2], [700, 3], [Infinity, 4]]; // up to this width: columns on each side of the selected one

function coordinates(state) {
  const { model } = state;
  const node = make("div", "rlt-coords");
  const rows = make("div", "rlt-rows");
  const slide = make("div", "rlt-shift");
  node.append(make("h4", "", "Which entry belongs to which token"), rows, slide);

  const cell = (kind, text) => make("span", `rlt-cell ${kind}`, text);
  const row = (name, title, cells, kind = "") => {
    const line = make("div", `rlt-row ${kind}`);
    const label = make("span", "rlt-rowname", name);
    label.title = title;
    const track = make("div", "rlt-track");
    track.append(...cells);
    line.append(label, track);
    return line;
  };
  const tokenCell = (j, kind) => {
    const node = cell(kind, "");
    node.append(word(state.payload.texts[j], make("span", "rlt-text")), make("small", "", `token ${j}`));
    return node;
  };
  const links = (count) => {
    const line = make("div", "rlt-row rlt-links");
    const track = make("div", "rlt-track");
    const NS = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(NS, "svg");
    svg.setAttribute("viewBox", `0 0 ${count} 1`);
    svg.setAttribute("preserveAspectRatio", "none");
    for (let k = 0; k < count - 1; k++) {
      const l = document.createElementNS(NS, "line");
      const ends = { x1: k + 0.5, y1: 1, x2: k + 1.5, y2: 0 };
      for (const [name, v] of Object.entries(ends)) l.setAttribute(name, String(v));
      svg.append(l);
    }
    track.append(svg);
    line.append(make("span", "rlt-rowname"), track);
    return line;
  };

  const drawRows = () => {
    const p = state.payload;
    rows.replaceChildren();
    if (!state.targets) return;
    const side = SIDES.find(([width]) => node.clientWidth < width)[1];
    const count = Math.min(2 * side + 1, state.targets);
    const start = clamp((state.current ?? 0) - side, 0, state.targets - count);
    const window = Array.from({ length: count }, (_, k) => start + k);
    const [a, b] = (p.pair ?? []).map((name) => state.one(name));
    const shift = b ? model.get("shift") : 0;
    const kind = (t) => `${t === state.current ? "rlt-here" : ""} ${p.roles[t + 1] === "s" ? "" : "rlt-dim"}`;
    const value = (s, t) => {
      if (t < 0 || t >= state.targets) return cell("", "");
      const node = cell(kind(t), form(s.values[t], 3));
      node.append(make("small", "", `entry ${t}`));
      node.style.backgroundColor = paint(state.palette, tint(s, s.values[t]), 0.4);
      return node;
    };
    rows.style.setProperty("--rlt-columns", String(count));
    rows.append(
      row("target", "entry i of a series in target coordinates", window.map((t) => cell(`rlt-index ${kind(t)}`, String(t)))),
      row("reads up to", "what the model has read last: token i", window.map((t) => tokenCell(t, kind(t)))),
      links(count),
      row("is scored on", "what the entry scores: token i+1", window.map((t) => tokenCell(t + 1, kind(t)))),
    );
    for (const s of a ? [a] : p.series.filter((s) => s.kind === "logprob")) {
      rows.append(row(s.name, s.label, window.map((t) => value(s, t))));
    }
    if (!b) return;
    const moved = row(
      `${b.name}${shift ? ` [i${shift > 0 ? "+" : "−"}${Math.abs(shift)}]` : ""}`,
      b.label,
      window.map((t) => {
        const from = t + shift;
        const node = value(b, from);
        node.classList.toggle("rlt-here", t === state.current);
        return node;
      }),
    );
    const gaps = window.map((t) => {
      const other = t + shift >= 0 ? b.values[t + shift] : null;
      const gap = known(a.values[t]) && known(other) ? Math.abs(a.values[t] - other) : null;
      const node = cell(kind(t), form(gap, 3));
      const like = state.one(`${a.name}-${b.name}`);
      if (like && gap !== null) node.style.backgroundColor = paint(state.palette, ["orange", tint(like, gap)[1]], 0.5);
      return node;
    });
    rows.append(moved, row("|difference|", `|${a.label} − ${b.label}|`, gaps));
    if (shift !== state.shown) {
      const by = (shift - (state.shown ?? 0)) * 100;
      moved.querySelector(".rlt-track").animate(
        [{ transform: `translateX(${by / count}%)` }, { transform: "none" }],
        { duration: 220, easing: "ease-out" },
      );
      state.shown = shift;
    }
  };

  const drawShift = () => {
    const s = model.get("overview")?.shift;
    slide.replaceChildren();
    if (!s || !state.payload.pair) return;
    const top = Math.max(...s.means.map((m) => m ?? 0)) || 1;
    const bars = make("div", "rlt-bars");
    bars.setAttribute("role", "group");
    bars.setAttribute("aria-label", "shift of the sampler's row");
    const least = Math.min(...s.means.map((m) => m ?? Infinity));
    s.shifts.forEach((by, k) => {
      const button = make("button", `rlt-shiftby${s.means[k] === least ? " rlt-least" : ""}`);
      button.dataset.shift = String(by);
      button.setAttribute("aria-pressed", String(by === model.get("shift")));
      button.title = `mean |difference| ${form(s.means[k])} over ${s.counts[k]} tokens`;
      const bar = make("i");
      bar.style.height = `${Math.max(2, (34 * (s.means[k] ?? 0)) / top)}px`;
      const room = make("span", "rlt-room");
      room.append(bar);
      button.append(room, make("b", "", form(s.means[k], 3)), make("small", "", by ? `${Math.abs(by)} too ${by > 0 ? "late" : "early"}` : "in place"));
      button.onclick = () => {
        model.set("shift", by);
        model.save_changes();
      };
      bars.append(button);
    });
    slide.append(make("p", "rlt-soft", "Mean |difference| of all samples if the sampler's values are in place, too early or too late; click to slide them back:"), bars);
  };
  for (const what of ["payload", "target", "hover", "shift", "theme", "size"]) state.on(what, drawRows);
  for (const what of ["payload", "shift", "overview"]) state.on(what, drawShift);
  return node;
}

// --- the worst tokens --------------------------------------------------------------------------------------------------------

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
    { name: "target", label: "target", kind: "number", format: ".9g", width: "64px" },
    { name: "text", label: "token", kind: "text", opens: true },
    { name: "shown", label: "value", kind: "text", key: "off", width: "92px" },
  ];
  node.append(none, table.element);
  const draw = () => {
    const s = state.series;
    const { texts, roles } = state.payload;
    const rows = [];
    const bad = new Set(s?.bad);
    for (let t = 0; s && s.kind !== "class" && t < state.targets; t++) {
      const value = s.values[t];
      if (roles[t + 1] !== "s" || (!known(value) && !bad.has(t))) continue;
      const off = known(value) ? Math.abs(value - s.center) : Infinity;
      rows.push({ id: String(t), target: t, text: texts[t + 1], value, shown: known(value) ? form(value) : "not a number", off });
    }
    const scale = s && s.kind !== "class";
    const still = rows.every((row) => row.off === 0);
    none.textContent = !scale ? "Choose a series with a scale." : still ? `Every value is ${form(s.center)}, or there is none.` : "";
    table.element.hidden = !rows.length;
    table.draw({ title: scale ? `Farthest from ${form(s.center)}: ${s.label}` : "", columns, rows });
  };
  const mark = () => table.select(state.selected === null ? null : String(state.selected));
  for (const what of ["payload", "series", "theme"]) state.on(what, draw);
  for (const what of ["payload", "target"]) state.on(what, mark);
  return node;
}

// --- the overview ------------------------------------------------------------------------------------------------------------

const DEEPEST = -8; // decades; the axis of the gap begins there
const decades = (v) => (v > 0 ? Math.max(Math.log10(v), DEEPEST) : DEEPEST);

// What all samples say: the verdict, trainer against sampler, and the gap by place in the completion.
function overview(state, stops) {
  const { model } = state;
  const node = make("div", "rlt-overview");
  const verdict = make("div", "rlt-verdict");
  const body = make("div", "rlt-overviewbody");
  const numbers = make("div", "rlt-numbers");
  const scope = make("select", "rlt-scope");
  const table = make("div", "rlt-quantiles");
  const tip = make("p", "rlt-soft rlt-tip");
  const HINT = "A point is a token; click one to go there. Dark: the sample shown below.";
  const data = () => model.get("overview");
  const chosen = () => data()?.scopes?.[Number(scope.value) || 0];
  const colour = (name, alpha) => `rgba(${state.palette[name].join(",")},${alpha})`;
  const ink = () => (state.dark ? "#d5dbe3" : "#3b4754");

  // Points of the chosen samples, those of the sample shown last; returns where they are.
  const dots = (g, X, Y) => {
    const placed = [];
    const { x, item } = data().points;
    const items = model.get("items");
    const group = chosen()?.group;
    for (const own of [false, true]) {
      g.fillStyle = own ? `${ink()}e6` : colour("blue", 0.4);
      for (let k = 0; k < x.length; k++) {
        if ((item[k] === model.get("item")) !== own) continue;
        if (known(group) && items[item[k]]?.group !== group) continue;
        g.beginPath();
        g.arc(X(k), Y(k), own ? 2.8 : 2.4, 0, 7);
        g.fill();
        placed.push([X(k), Y(k), k]);
      }
    }
    return placed;
  };
  const upright = (g, text, x, y) => {
    g.save();
    g.translate(x, y);
    g.rotate(-Math.PI / 2);
    g.fillText(text, 0, 0);
    g.restore();
  };

  // Grid, numbers and names of two axes, each {low, high, marks, text, name}, in a box; returns where values stand.
  const plane = (g, [left, top, right, under], across, up) => {
    const X = (v) => left + ((right - left) * (v - across.low)) / (across.high - across.low);
    const Y = (v) => under - ((under - top) * (v - up.low)) / (up.high - up.low);
    g.fillStyle = `${ink()}1c`;
    for (const v of across.marks) g.fillRect(X(v), top, 1, under - top);
    for (const v of up.marks) g.fillRect(left, Y(v), right - left, 1);
    g.fillStyle = `${ink()}b0`;
    g.textAlign = "center";
    for (const v of across.marks) g.fillText(across.text(v), X(v), under + 14);
    g.fillText(across.name, (left + right) / 2, under + 29);
    upright(g, up.name, 10, (top + under) / 2);
    g.textAlign = "right";
    for (const v of up.marks) g.fillText(up.text(v), left - 5, Y(v) + 4);
    return [X, Y];
  };
  // A line through places, within a box.
  const path = (g, [left, top, right, under], places, style, wide) => {
    g.save();
    g.beginPath();
    g.rect(left, top, right - left, under - top);
    g.clip();
    g.beginPath();
    g.strokeStyle = style;
    g.lineWidth = wide;
    places.forEach(([x, y], k) => g[k ? "lineTo" : "moveTo"](x, y));
    g.stroke();
    g.restore();
  };

  const scatter = (g, width, height) => {
    const o = data();
    g.clearRect(0, 0, width, height);
    if (!o?.points) return [];
    const { x, y } = o.points;
    const low = Math.min(-0.1, ...x, ...y) * 1.04;
    const size = Math.min(width - 62, height - 46);
    const box = [52, 10, 52 + size, 10 + size];
    const axis = (name) => ({ low, high: 0, marks: ticks(low, 0, 4), text: (v) => form(v), name });
    const [X, Y] = plane(g, box, axis("sampler logprob"), axis("trainer logprob"));
    const line = ([factor, up], style, wide) => path(g, box, [low, 0].map((v) => [X(v), Y(factor * v + up)]), style, wide);
    line([1, 0], `${ink()}66`, 1);
    const placed = dots(g, (k) => X(x[k]), (k) => Y(y[k]));
    if (o.line) line(o.line, colour("orange", 1), 1.6);
    g.textAlign = "left";
    g.fillStyle = o.line ? colour("orange", 1) : `${ink()}b0`;
    g.fillText(o.fit, 60, 24);
    return placed;
  };

  const byPlace = (g, width, height) => {
    const o = data();
    g.clearRect(0, 0, width, height);
    if (!o?.points) return [];
    const { x, y, at } = o.points;
    const gap = x.map((v, k) => Math.abs(y[k] - v));
    const last = Math.max(1, ...at);
    const high = Math.max(1.3, decades(Math.max(0, ...gap)) + 0.2);
    const box = [46, 10, width - 8, height - 36];
    const [left, , right, under] = box;
    const marks = ticks(0, last, 6).filter(Number.isInteger);
    const powers = [-8, -6, -4, -2, 0, 2].filter((power) => power <= high);
    const power = (v) => (v < -3 ? `1e${v}` : String(10 ** v));
    const across = { low: -0.02 * last, high: 1.02 * last, marks, text: String, name: "token of the completion" };
    const [X, Y] = plane(g, box, across, { low: DEEPEST - 0.3, high, marks: powers, text: power, name: "nats" });
    const floor = Y(decades(o.floor));
    g.fillStyle = `${ink()}1f`;
    g.fillRect(left, floor, right - left, under - floor);
    g.fillStyle = `${ink()}b0`;
    g.fillText(`rounding: up to ${form(o.floor, 2)}`, right - 5, floor + 13);
    if (o.half > o.floor) {
      const half = Y(decades(o.half));
      g.setLineDash([2, 3]);
      path(g, box, [[left, half], [right, half]], `${ink()}99`, 1);
      g.setLineDash([]);
      g.fillText(`rounding of bfloat16: up to ${form(o.half, 2)}`, right - 5, half - 4);
    }
    const placed = dots(g, (k) => X(at[k]), (k) => Y(decades(gap[k])));
    path(g, box, o.places.x.map((v, k) => [X(v), Y(decades(o.places.y[k]))]), colour("orange", 1), 1.6);
    g.textAlign = "left";
    g.fillStyle = colour("orange", 1);
    g.fillText("mean", left + 6, 20);
    return placed;
  };

  // A canvas of points that say what they are and lead to their token.
  const pointed = (kind, label, draw) => {
    let placed = [];
    const made = surface(kind, 300, label, (g, width, height) => {
      placed = draw(g, width, height);
    });
    stops.push(made.stop);
    const { canvas } = made;
    const nearest = (e) => {
      const box = canvas.getBoundingClientRect();
      const [mx, my] = [e.clientX - box.left, e.clientY - box.top];
      let best = null;
      let least = 14 ** 2;
      for (const [x, y, k] of placed) {
        const d = (x - mx) ** 2 + (y - my) ** 2;
        if (d < least) [best, least] = [k, d];
      }
      return best;
    };
    canvas.addEventListener("pointermove", (e) => {
      const k = nearest(e);
      const { x, y, item, target } = data()?.points ?? {};
      canvas.style.cursor = k === null ? "" : "pointer";
      const where = k === null ? null : model.get("items")[item[k]];
      tip.textContent = where
        ? `group ${where.group}, sample ${where.sample}, target ${target[k]}: ${form(y[k])} against ${form(x[k])}. Click to go there.`
        : HINT;
    });
    canvas.addEventListener("click", (e) => {
      const k = nearest(e);
      if (k !== null) state.select(data().points.target[k], data().points.item[k]);
    });
    return made;
  };
  const points = pointed("rlt-scatter", "trainer against sampler logprob, one point a token", scatter);
  const places = pointed("rlt-places", "gap by place in the completion, one point a token", byPlace);
  scope.onchange = () => state.tell("scope");

  const figure = (title, canvas) => {
    const made = make("figure");
    made.append(make("figcaption", "", title), canvas);
    return made;
  };
  body.append(figure("Trainer against sampler", points.canvas), figure("|trainer − sampler| by place, nats", places.canvas));
  numbers.append(labelled("tokens of", scope), table);
  node.append(verdict, body, numbers, tip);

  const drawAll = () => {
    const o = data();
    node.hidden = !o?.points;
    if (node.hidden) return;
    verdict.dataset.state = o.verdict.state;
    verdict.replaceChildren(make("b", "", o.verdict.text));
    for (const line of [o.verdict.more, o.sides.join(" · ")]) if (line) verdict.append(make("p", "rlt-soft", line));
    fill(scope, o.scopes.map((s, k) => [String(k), s.name]), scope.value || "0");
    tip.textContent = HINT;
    drawNumbers();
  };
  const drawNumbers = () => {
    const s = chosen();
    if (!s) return;
    const o = data();
    table.replaceChildren(make("span", "rlt-soft", `|difference| over ${s.tokens.toLocaleString("en")} tokens`));
    for (const [name, v] of Object.entries(s.quantiles)) {
      const pair = make("span", "rlt-quantile");
      pair.append(make("span", "rlt-soft", name), make("b", "", form(v)));
      table.append(pair);
    }
    const drawn = o.points.x.length;
    if (drawn < o.tokens - o.undefined) table.append(make("span", "rlt-soft", `${drawn.toLocaleString("en")} drawn, the farthest among them`));
    if (o.undefined) table.append(make("span", "rlt-alarm", `${o.undefined} not a number`));
    points.ask();
    places.ask();
  };
  state.on("overview", drawAll);
  state.on("scope", drawNumbers);
  for (const what of ["payload", "theme"]) state.on(what, () => (points.ask(), places.ask()));
  return node;
}

// --- all of it -----------------------------------------------------------------------------------------------------------------

let count = 0;

function render({ model, el }) {
  const state = makeState(model);
  const stops = [];
  const root = make("div", "rlt");
  const wait = make("div", "rlt-wait");
  wait.setAttribute("role", "status");
  const below = make("div", "rlt-below");
  below.append(coordinates(state), worst(state));
  root.append(
    overview(state, stops),
    head(state),
    wait,
    strip(state, `rlt${count++}`),
    readout(state),
    chart(state, stops),
    below,
  );
  el.append(root);

  // Keys that the inspector uses itself are not commands of the notebook, as long as the focus is in here.
  const keys = (e) => {
    const own = !(e.ctrlKey || e.metaKey || e.altKey) && e.key !== "Escape" && !(e.shiftKey && e.key === "Enter");
    if (root.contains(e.target)) e.target.toggleAttribute("data-lm-suppress-shortcuts", own);
  };
  window.addEventListener("keydown", keys, true);
  const theme = () => {
    state.dark = document.body.dataset.jpThemeLight === "false";
    root.classList.toggle("rlt-dark", state.dark);
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
  const events = {
    "change:payload": () => {
      state.payload = model.get("payload");
      state.hovered = null;
      waiting();
      state.tell("payload", "items");
    },
    "change:item": () => {
      waiting();
      state.tell("items");
    },
    "change:items": () => state.tell("items"),
    "change:overview": () => state.tell("overview"),
    "change:series": () => state.tell("series"),
    "change:target": () => state.tell("target"),
    "change:shift": () => state.tell("shift"),
  };
  for (const [name, run] of Object.entries(events)) model.on(name, run);
  theme();
  state.tell("items", "payload", "overview");
  root.dataset.ready = "true";

  return () => {
    for (const [name, run] of Object.entries(events)) model.off(name, run);
    window.removeEventListener("keydown", keys, true);
    clearTimeout(timer);
    cancelAnimationFrame(state.frame);
    themes.disconnect();
    sizes.disconnect();
    for (const stop of stops) stop();
  };
}

export default { render };
