// What all samples show: the verdict, trainer against sampler, and the gap by place in the completion.
import { fit, react } from "./chart.js";
import { fill, labelled, make } from "./elements.js";
import { form, known } from "./scale.js";

const HINT = "A point is a token; click one to go there. Highlighted: the sample shown below.";
const HEIGHT = 300;
const CHARTS = [
  ["scatter", "Trainer against sampler"],
  ["gap", "|trainer − sampler| by place in the completion"],
];

// Dots of the chosen group only, those of the sample that is shown below highlighted.
function highlighted({ data: [dots, ...lines], layout }, group, item) {
  const isIn = ([, , ofGroup]) => !known(group) || ofGroup === group;
  const y = dots.y.map((v, k) => (isIn(dots.customdata[k]) ? v : null));
  const selectedpoints = dots.customdata.flatMap(([ofItem], k) => (ofItem === item ? [k] : []));
  return { data: [{ ...dots, y, selectedpoints }, ...lines], layout };
}

export function overview(state, stops) {
  const { model } = state;
  const node = make("div", "rlt-overview");
  const verdict = make("div", "rlt-verdict");
  const body = make("div", "rlt-overviewbody");
  const numbers = make("div", "rlt-numbers");
  const scope = make("select", "rlt-scope");
  const table = make("div", "rlt-quantiles");
  const data = () => model.get("overview");
  const chosen = () => data().scopes[Number(scope.value) || 0];

  const plots = CHARTS.map(([name, title]) => {
    const plot = make("div", `rlt-${name}`);
    plot.style.height = `${HEIGHT}px`;
    plot.setAttribute("role", "img");
    plot.setAttribute("aria-label", `${title}, one point per token`);
    const figure = make("figure");
    figure.append(make("figcaption", "", title), plot);
    body.append(figure);
    return [name, plot];
  });
  const drawCharts = () => {
    if (!state.Plotly || node.hidden) return;
    for (const [name, plot] of plots) {
      const isNew = !plot.data;
      react(state.Plotly, plot, highlighted(model.get("figures")[name], chosen().group, model.get("item")), HEIGHT);
      const go = ({ points: [point] }) => point.customdata && state.select(point.customdata[1], point.customdata[0]);
      if (isNew) plot.on("plotly_click", go);
    }
  };
  node.append(verdict, body, numbers, make("p", "rlt-soft", HINT));

  numbers.append(labelled("tokens of", scope), table);
  const drawNumbers = () => {
    const { shown, tokens, undefined: missing } = data();
    const { quantiles, tokens: compared } = chosen();
    table.replaceChildren(make("span", "rlt-soft", `|difference| over ${compared.toLocaleString("en")} tokens`));
    for (const [name, v] of Object.entries(quantiles)) {
      const pair = make("span", "rlt-quantile");
      pair.append(make("span", "rlt-soft", name), make("b", "", form(v)));
      table.append(pair);
    }
    if (shown < tokens - missing) table.append(make("span", "rlt-soft", `${shown.toLocaleString("en")} shown, the farthest among them`));
    if (missing) table.append(make("span", "rlt-alarm", `${missing} not a number`));
    drawCharts();
  };
  const drawAll = () => {
    const o = data();
    node.hidden = !o;
    if (node.hidden) return;
    verdict.dataset.state = o.verdict.state;
    verdict.replaceChildren(make("b", "", o.verdict.text));
    for (const line of [o.verdict.more, o.sides.join(" · ")]) if (line) verdict.append(make("p", "rlt-soft", line));
    fill(scope, o.scopes.map((s, k) => [String(k), s.name]), scope.value || "0");
    drawNumbers();
  };
  scope.onchange = drawNumbers;
  state.on(drawAll, "overview");
  state.on(drawCharts, "payload", "plotly");
  state.on(() => state.Plotly && plots.forEach(([, plot]) => fit(state.Plotly, plot)), "size");
  stops.push(() => plots.forEach(([, plot]) => state.Plotly?.purge(plot)));
  return node;
}
