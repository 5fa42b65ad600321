// The chosen series along the targets of a sample: drag or turn the wheel to zoom, click to select.
import { make } from "./elements.js";
import { path, plane, sized, surface } from "./plot.js";
import { ROLES, clamp, colour, form, height, known, runs, ticks, tint } from "./scale.js";

const PAD = { left: 58, right: 12, top: 10, bottom: 36 };
const DECADES = [-10, -1, -0.1, 0, 0.1, 1, 10];

export function along(state, stops) {
  let view = [0, 1]; // targets from, to (exclusive)
  let drag = null;
  const hue = (name, alpha) => colour(state.palette, name, alpha);
  const spread = (width) => (width - PAD.left - PAD.right) / (view[1] - view[0]);
  const xOf = (t, width) => PAD.left + (t + 0.5 - view[0]) * spread(width);
  const at = (x, width) => clamp(Math.floor(view[0] + (x - PAD.left) / spread(width)), 0, state.targets - 1);

  // Lowest and highest value in view, with the middle of the scale and a little air; of a difference always a nat and more.
  const reach = (s) => {
    const decades = s.kind === "difference";
    const seen = s.values.slice(Math.max(0, Math.floor(view[0])), Math.ceil(view[1])).filter(known);
    let low = Math.min(decades ? -1 : s.center, ...seen);
    let high = Math.max(decades ? 1 : s.center, ...seen);
    if (low === high) [low, high] = [low - (s.kind === "kl" ? 0 : s.limit), high + (s.kind === "logprob" ? 0 : s.limit)];
    [low, high] = [height(s, low), height(s, high)];
    const air = 0.06 * (high - low);
    const middle = height(s, s.center);
    return [low < middle ? low - air : low, high > middle ? high + air : high];
  };

  const regions = (g, [left, top, right, under], width) =>
    runs(state.payload.roles, (role, start, end) => {
      const from = Math.max(left, xOf(start - 1.5, width));
      const to = Math.min(right, xOf(end - 1.5, width));
      if (role === "s" || to <= from) return;
      g.fillStyle = hue("ink", 0.08);
      g.fillRect(from, top, to - from, under - top);
      g.fillStyle = hue("ink", 0.6);
      if (to - from > g.measureText(ROLES[role]).width + 8) g.fillText(ROLES[role], from + 4, top + 11);
    });

  // One stem a token where there is room, else the lowest and highest of each column of pixels.
  const stems = (g, s, width, Y) => {
    const step = spread(width);
    const zero = Y(s.center);
    const [first, last] = [Math.max(0, Math.floor(view[0])), Math.min(Math.ceil(view[1]), state.targets)];
    const stem = (t, x, wide) => {
      g.fillStyle = hue(tint(s, s.values[t])[0], state.payload.roles[t + 1] === "s" ? 0.9 : 0.35);
      g.fillRect(x, Math.min(Y(s.values[t]), zero), wide, Math.max(1, Math.abs(Y(s.values[t]) - zero)));
    };
    if (step >= 1.5) {
      const wide = s.kind === "class" ? step : clamp(step * 0.5, 1, 6);
      for (let t = first; t < last; t++) if (known(s.values[t])) stem(t, xOf(t, width) - wide / 2, wide);
      g.fillStyle = "#b5179e";
      for (const t of s.bad) if (t >= first && t < last) g.fillText("×", xOf(t, width) - 3, zero - 4);
      return;
    }
    for (let x = PAD.left; x < width - PAD.right; x++) {
      const [from, to] = [x, x + 1].map((edge) => view[0] + (edge - PAD.left) / step);
      let [low, high] = [null, null];
      for (let t = Math.max(first, Math.floor(from)); t < Math.min(last, Math.ceil(to)); t++) {
        if (!known(s.values[t])) continue;
        if (low === null || s.values[t] < s.values[low]) low = t;
        if (high === null || s.values[t] > s.values[high]) high = t;
      }
      if (low !== null) for (const t of new Set([low, high])) stem(t, x, 1);
    }
  };

  // Everything but the markers, drawn once and copied under them while the pointer moves.
  const still = document.createElement("canvas");
  let stale = true;
  const drawStill = (width, tall, ratio) => {
    const s = state.series;
    const g = sized(still, width, tall, ratio);
    const [low, high] = reach(s);
    const box = [PAD.left, PAD.top, width - PAD.right, tall - PAD.bottom];
    const within = (v) => height(s, v) >= low && height(s, v) <= high;
    const marks = s.kind === "difference" ? DECADES.filter(within) : ticks(low, high, 4);
    const text = (v) => form(Math.abs(v) < (high - low) * 1e-9 ? 0 : v);
    const whole = ticks(view[0], view[1] - 1, Math.max(2, width / 110)).filter(Number.isInteger);
    const across = { low: view[0] - 0.5, high: view[1] - 0.5, marks: whole, text: String, name: "target" };
    regions(g, box, width);
    const [, Y] = plane(g, box, across, { low, high, marks, text, at: (v) => height(s, v), name: "" }, state.palette);
    if (s.kind === "difference") {
      g.fillStyle = hue("ink", 0.15);
      g.fillRect(box[0], Y(s.floor), box[2] - box[0], Math.max(1, Y(-s.floor) - Y(s.floor)));
    }
    stems(g, s, width, Y);
    const clip = s.kind === "ratio" ? (state.payload.clip ?? []) : [];
    for (const v of clip.filter(within)) path(g, box, [[box[0], Y(v)], [box[2], Y(v)]], hue("ink", 0.6), 1, [4, 3]);
    stale = false;
  };

  const draw = (g, width, tall, ratio) => {
    if (!state.series || !state.targets) return;
    if (stale || still.width !== Math.round(width * ratio)) drawStill(width, tall, ratio);
    g.drawImage(still, 0, 0, width, tall);
    for (const [t, strength] of [[state.selected, 1], [state.hovered, 0.53]]) {
      if (t === null || t < view[0] - 1 || t >= view[1]) continue;
      const x = xOf(t, width);
      g.fillStyle = hue("ink", strength);
      g.fillRect(x - 0.5, PAD.top, 1, tall - PAD.top - PAD.bottom);
      g.fillText("▾", x - 4, PAD.top);
    }
    if (drag?.moved) {
      g.fillStyle = hue("blue", 0.18);
      g.fillRect(Math.min(drag.from, drag.to), PAD.top, Math.abs(drag.to - drag.from), tall - PAD.top - PAD.bottom);
    }
  };

  const { canvas, ask, stop } = surface("rlt-chart", 178, "the chosen series by target position", draw);
  stops.push(stop);
  canvas.tabIndex = 0;
  canvas.title = "drag to zoom in; wheel to zoom once clicked; double click to see all";
  const redraw = () => {
    stale = true;
    ask();
  };
  const look = (from, to) => {
    const size = clamp(to - from, Math.min(2, state.targets), Math.max(1, state.targets));
    const start = clamp(from, 0, state.targets - size);
    view = [start, start + size];
    [canvas.dataset.from, canvas.dataset.to] = view.map((t) => String(Math.round(t)));
    redraw();
  };
  const place = (e) => clamp(e.clientX - canvas.getBoundingClientRect().left, PAD.left, canvas.clientWidth - PAD.right);
  canvas.addEventListener("pointermove", (e) => {
    if (!state.targets) return;
    if (drag) {
      drag.to = place(e);
      drag.moved = drag.moved || Math.abs(drag.to - drag.from) > 5;
      ask();
    }
    state.hover(at(place(e), canvas.clientWidth), "chart");
  });
  canvas.addEventListener("pointerleave", () => state.hover(null, "chart"));
  canvas.addEventListener("pointerdown", (e) => {
    drag = { from: place(e), to: place(e), moved: false };
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
  const zoom = (e) => {
    if (document.activeElement !== canvas && !e.ctrlKey) return; // else the page scrolls
    e.preventDefault();
    const size = view[1] - view[0];
    const by = ((e.deltaX || e.deltaY) / canvas.clientWidth) * size;
    if (e.shiftKey || Math.abs(e.deltaX) > Math.abs(e.deltaY)) return look(view[0] + by, view[1] + by);
    const share = (place(e) - PAD.left) / (canvas.clientWidth - PAD.left - PAD.right);
    const to = clamp(size * 1.002 ** e.deltaY, 8, state.targets);
    const start = view[0] + share * (size - to);
    look(start, start + to);
  };
  canvas.addEventListener("wheel", zoom, { passive: false });
  canvas.addEventListener("keydown", (e) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
    if (e.key === "Escape") look(0, state.targets);
    if (step === undefined || !state.targets) return;
    e.preventDefault();
    state.select(clamp((state.selected ?? -1) + step, 0, state.targets - 1));
  });
  // Where the selected token is out of view the view follows it.
  const follow = () => {
    const t = state.selected;
    const half = (view[1] - view[0]) / 2;
    if (t !== null && (t < view[0] || t >= view[1])) look(t - half, t + half);
    ask();
  };
  const home = () => look(state.folded ? clamp(state.payload.prompt - 1, 0, state.targets) : 0, state.targets);
  const figure = make("figure", "rlt-along");
  const caption = make("figcaption");
  figure.append(caption, canvas);
  const name = () => (caption.textContent = state.series ? `${state.series.label} by target (target i scores token i + 1)` : "");
  state.on(home, "payload", "fold");
  state.on(name, "payload", "series");
  state.on(redraw, "series", "theme");
  state.on(ask, "hover");
  state.on(follow, "target");
  return figure;
}
