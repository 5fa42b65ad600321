// Which entry of a series belongs to which token, around the selected one; the sampler's row can be slid.
import { make, word } from "./elements.js";
import { clamp, form, known, paint, tint } from "./scale.js";

const SIDES = [[520, 2], [700, 3], [Infinity, 4]]; // up to this width: columns on each side of the selected one

export function coordinates(state) {
  const { model } = state;
  const node = make("div", "rlt-coords");
  const rows = make("div", "rlt-rows");
  const slide = make("div", "rlt-shift");
  const about = "A series has one entry fewer than there are tokens: entry i is of target i, which is token i + 1, read after token i.";
  node.append(make("h4", "", "Which entry belongs to which token"), make("p", "rlt-soft", about), rows, slide);

  const row = (name, title, cells) => {
    const line = make("div", "rlt-row");
    const label = make("span", "rlt-rowname", name);
    label.title = title;
    const track = make("div", "rlt-track");
    track.append(...cells);
    line.append(label, track);
    rows.append(line);
  };
  const cell = (t, text, small, hue) => {
    const here = `${t === state.current ? "rlt-here" : ""} ${state.payload.roles[t + 1] === "s" ? "" : "rlt-dim"}`;
    const node = make("span", `rlt-cell ${here}`, text);
    if (small) node.append(make("small", "", small));
    if (hue) node.style.backgroundColor = paint(state.palette, hue, 0.4);
    return node;
  };
  const tokenCell = (j, t) => {
    const node = cell(t, "", `token ${j}`);
    node.prepend(word(state.payload.texts[j], make("span", "rlt-text")));
    return node;
  };
  const valueCell = (s, from, t) => {
    if (from < 0 || from >= state.targets) return make("span", "rlt-cell");
    return cell(t, form(s.values[from], 3), `entry ${from}`, tint(s, s.values[from]));
  };

  const drawRows = () => {
    const p = state.payload;
    rows.replaceChildren();
    if (!state.targets) return;
    const side = SIDES.find(([width]) => node.clientWidth < width)[1];
    const count = Math.min(2 * side + 1, state.targets);
    const start = clamp((state.current ?? 0) - side, 0, state.targets - count);
    const each = (draw) => Array.from({ length: count }, (_, k) => draw(start + k));
    const [a, b] = (p.pair ?? []).map((name) => state.one(name));
    rows.style.setProperty("--rlt-columns", String(count));
    row("target", "entry i of a series in target coordinates", each((t) => cell(t, String(t))));
    row("reads up to", "what the model has read last: token i", each((t) => tokenCell(t, t)));
    row("is scored on", "what the entry scores: token i+1", each((t) => tokenCell(t + 1, t)));
    for (const s of a ? [a] : p.series.filter((s) => s.kind === "logprob")) row(s.name, s.label, each((t) => valueCell(s, t, t)));
    if (!b) return;
    const shift = model.get("shift");
    const by = shift ? ` [i${shift > 0 ? "+" : "−"}${Math.abs(shift)}]` : "";
    const like = state.one(`${a.name}-${b.name}`);
    const gap = (t) => (known(a.values[t]) && known(b.values[t + shift]) ? Math.abs(a.values[t] - b.values[t + shift]) : null);
    const gapCell = (t) => cell(t, form(gap(t), 3), "", like && ["orange", tint(like, gap(t))[1]]);
    row(`${b.name}${by}`, b.label, each((t) => valueCell(b, t + shift, t)));
    row("|difference|", `|${a.label} − ${b.label}|`, each(gapCell));
  };

  const drawShift = () => {
    const s = model.get("overview")?.shift;
    slide.replaceChildren();
    if (!s || !state.payload.pair) return;
    const sizes = s.means.map((m) => m ?? 0);
    const least = Math.min(...s.means.filter(known));
    const bars = make("div", "rlt-bars");
    bars.setAttribute("role", "group");
    bars.setAttribute("aria-label", "shift of the sampler's row");
    s.shifts.forEach((by, k) => {
      const button = make("button", `rlt-shiftby${s.means[k] === least ? " rlt-least" : ""}`);
      button.dataset.shift = String(by);
      button.setAttribute("aria-pressed", String(by === model.get("shift")));
      button.title = `mean |difference| ${form(s.means[k])} over ${s.counts[k]} tokens`;
      const bar = make("i");
      bar.style.height = `${Math.max(2, (34 * sizes[k]) / (Math.max(...sizes) || 1))}px`;
      const room = make("span", "rlt-room");
      room.append(bar);
      const where = by ? `${Math.abs(by)} too ${by > 0 ? "late" : "early"}` : "in place";
      button.append(room, make("b", "", form(s.means[k], 3)), make("small", "", where));
      button.onclick = () => state.set({ shift: by });
      bars.append(button);
    });
    const about = "Mean |difference| of all samples if the sampler's values are in place, too early or too late; click to slide them back:";
    slide.append(make("p", "rlt-soft", about), bars);
  };
  state.on(drawRows, "payload", "target", "hover", "shift", "theme", "size");
  state.on(drawShift, "payload", "shift", "overview");
  return node;
}
