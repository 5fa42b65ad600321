// What all samples say: the verdict, trainer against sampler, and the gap by place in the completion.
import { fill, labelled, make } from "./elements.js";
import { path, plane, surface } from "./plot.js";
import { colour, form, known, ticks } from "./scale.js";

const DEEPEST = -8; // decades; the axis of the gap begins there
const HINT = "A point is a token; click one to go there. Highlighted: the sample shown below.";
const decades = (v) => (v > 0 ? Math.max(Math.log10(v), DEEPEST) : DEEPEST);

export function overview(state, stops) {
  const { model } = state;
  const node = make("div", "rlt-overview");
  const verdict = make("div", "rlt-verdict");
  const body = make("div", "rlt-overviewbody");
  const numbers = make("div", "rlt-numbers");
  const scope = make("select", "rlt-scope");
  const table = make("div", "rlt-quantiles");
  const tip = make("p", "rlt-soft rlt-tip");
  const data = () => model.get("overview");
  const chosen = () => data().scopes[Number(scope.value) || 0];
  const hue = (name, alpha = 1) => colour(state.palette, name, alpha);

  // Points of the chosen samples, those of the sample shown last; returns where they are.
  const dots = (g, X, Y) => {
    const placed = [];
    const { x, item } = data().points;
    const items = model.get("items");
    const { group } = chosen();
    for (const own of [false, true]) {
      g.fillStyle = own ? hue("ink", 0.9) : hue("blue", 0.4);
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

  const scatter = (g, width, height) => {
    const { x, y } = data().points;
    const low = Math.min(-0.1, ...x, ...y) * 1.04;
    const size = Math.min(width - 62, height - 46);
    const box = [52, 10, 52 + size, 10 + size];
    const axis = (who) => ({ low, high: 0, marks: ticks(low, 0, 4), text: (v) => form(v), name: `${who} logprob` });
    const [X, Y] = plane(g, box, axis("sampler"), axis("trainer"), state.palette);
    path(g, box, [low, 0].map((v) => [X(v), Y(v)]), hue("ink", 0.4), 1);
    return dots(g, (k) => X(x[k]), (k) => Y(y[k]));
  };

  const byPlace = (g, width, height) => {
    const { points, places, floor, half } = data();
    const gap = points.x.map((v, k) => Math.abs(points.y[k] - v));
    const last = Math.max(1, ...points.at);
    const high = Math.max(1.3, decades(Math.max(0, ...gap)) + 0.2);
    const box = [46, 10, width - 8, height - 36];
    const [left, , right, under] = box;
    const marks = [-8, -6, -4, -2, 0, 2].filter((power) => power <= high).map((power) => 10 ** power);
    const label = (v) => (v === marks[0] ? "0" : v < 1e-3 ? `1e${Math.log10(v)}` : String(v)); // below the axis all are 0
    const up = { low: DEEPEST - 0.3, high, marks, at: decades, name: "nats", text: label };
    const whole = ticks(0, last, 6).filter(Number.isInteger);
    const across = { low: -0.02 * last, high: 1.02 * last, marks: whole, text: String, name: "token of the completion" };
    const [X, Y] = plane(g, box, across, up, state.palette);
    g.fillStyle = hue("ink", 0.12);
    g.fillRect(left, Y(floor), right - left, under - Y(floor));
    g.fillStyle = hue("ink", 0.7);
    g.textAlign = "right";
    g.fillText(`rounding: up to ${form(floor, 2)}`, right - 5, Y(floor) + 13);
    if (half > floor) {
      path(g, box, [[left, Y(half)], [right, Y(half)]], hue("ink", 0.6), 1, [2, 3]);
      g.fillText(`rounding of bfloat16: up to ${form(half, 2)}`, right - 5, Y(half) - 4);
    }
    g.textAlign = "left";
    const placed = dots(g, (k) => X(points.at[k]), (k) => Y(gap[k]));
    path(g, box, places.x.map((v, k) => [X(v), Y(places.y[k])]), hue("orange"), 1.6);
    g.fillStyle = hue("orange");
    g.fillText("mean", left + 6, 20);
    return placed;
  };

  // A canvas of points that say what they are and lead to their token.
  const pointed = (kind, title, label, draw) => {
    let placed = [];
    const made = surface(kind, 300, label, (g, width, height) => {
      if (data()?.points) placed = draw(g, width, height);
    });
    const { canvas } = made;
    const nearest = (e) => {
      const box = canvas.getBoundingClientRect();
      const far = ([x, y]) => Math.hypot(x - e.clientX + box.left, y - e.clientY + box.top);
      const best = placed.reduce((a, b) => (a && far(a) <= far(b) ? a : b), null);
      return best && far(best) < 14 ? best[2] : null;
    };
    canvas.addEventListener("pointermove", (e) => {
      const k = nearest(e);
      canvas.style.cursor = k === null ? "" : "pointer";
      tip.textContent = HINT;
      if (k === null) return;
      const { x, y, item, target } = data().points;
      const where = model.get("items")[item[k]];
      tip.textContent = `group ${where.group}, sample ${where.sample}, target ${target[k]}: ${form(y[k])} against ${form(x[k])}. Click to go there.`;
    });
    canvas.addEventListener("click", (e) => {
      const k = nearest(e);
      if (k !== null) state.select(data().points.target[k], data().points.item[k]);
    });
    const figure = make("figure");
    figure.append(make("figcaption", "", title), canvas);
    body.append(figure);
    stops.push(made.stop);
    return made.ask;
  };
  const asks = [
    pointed("rlt-scatter", "Trainer against sampler", "trainer against sampler logprob, one point a token", scatter),
    pointed("rlt-places", "|trainer − sampler| by place, nats, log scale; at the bottom those that are equal", "gap by place in the completion, one point a token", byPlace),
  ];
  const redraw = () => asks.forEach((ask) => ask());
  numbers.append(labelled("tokens of", scope), table);
  node.append(verdict, body, numbers, tip);

  const drawNumbers = () => {
    const { points, tokens, undefined: lost } = data();
    const s = chosen();
    table.replaceChildren(make("span", "rlt-soft", `|difference| over ${s.tokens.toLocaleString("en")} tokens`));
    for (const [name, v] of Object.entries(s.quantiles)) {
      const pair = make("span", "rlt-quantile");
      pair.append(make("span", "rlt-soft", name), make("b", "", form(v)));
      table.append(pair);
    }
    const drawn = points.x.length;
    if (drawn < tokens - lost) table.append(make("span", "rlt-soft", `${drawn.toLocaleString("en")} drawn, the farthest among them`));
    if (lost) table.append(make("span", "rlt-alarm", `${lost} not a number`));
    redraw();
  };
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
  scope.onchange = drawNumbers;
  state.on(drawAll, "overview");
  state.on(redraw, "payload", "theme");
  return node;
}
