// What else could have come at a token, what came of it, and where the completion was lost. Python asks the policy; here
// are its buttons and its answers.
import { button, make } from "./elements.js";
import { likeliestTable } from "./likeliest.js";

const BUDGET = 300; // continuations of a search

// The parts of a result, as text.
function resultNodes({ headline, head, rows, more, footer }) {
  const nodes = [make("p", "rlt-headline", headline)];
  if (rows) {
    const table = make("table");
    for (const cells of [head, ...rows]) {
      const line = make("tr");
      line.append(...cells.map((text) => make(cells === head ? "th" : "td", "", text)));
      table.append(line);
    }
    const details = make("details");
    details.append(make("summary", "", "Continuations"), make("pre", "", more));
    nodes.push(table, details);
  }
  return [...nodes, make("p", "rlt-soft", footer)];
}

export function forking(state) {
  const { model } = state;
  const node = make("div", "rlt-fork");
  const chips = make("div", "rlt-alternatives");
  const bar = make("div", "rlt-ask");
  const progress = make("span", "rlt-progress");
  const note = make("p", "rlt-alarm");
  const results = make("div", "rlt-results");
  progress.setAttribute("role", "status");
  note.setAttribute("role", "alert");

  const known = () => (model.get("forks").item === model.get("item") ? model.get("forks") : { forks: [] });
  const ofPolicy = () => (model.get("alternatives").item === model.get("item") ? model.get("alternatives") : undefined);
  const isBusy = () => model.get("asking").text !== undefined;
  const isScored = (t) => t !== null && state.payload.roles?.[t + 1] === "s";
  const ask = (question) => model.send(question);
  const fork = (token = null) => ask({ fork: state.selected, token });
  const forkHere = button("Fork here", "Sample on from the selected token, with it and with its likeliest alternatives", () => fork());
  const budget = Object.assign(make("input"), { type: "number", min: 24, step: 8, value: BUDGET, title: "continuations, at most" });
  budget.setAttribute("aria-label", "continuations, at most");
  const search = button("Where was it lost?", "Sample on from several of its tokens, and see where the reward falls", () => ask({ locate: Number(budget.value) }));
  const stop = button("■", "Stop the question in progress", () => ask({ stop: true }));
  bar.append(forkHere, search, budget, make("span", "rlt-soft", "continuations at most"), stop, progress);
  node.append(chips, bar, note, results);

  // The likeliest tokens of the place of the pointer, for the policy and for the sampler; those of the selected one are buttons.
  const drawChips = () => {
    const t = state.current;
    const canFork = known().refusal === "";
    const ofSampler = state.payload.likeliest;
    const said = state.payload.tokens?.[t + 1];
    const label = (id) => {
      const isButton = canFork && t === state.selected && id !== said;
      const node = isButton ? button("", "Fork here with this token", () => fork(id)) : make("span", "rlt-chip");
      node.disabled = isBusy();
      node.classList.toggle("rlt-said", id === said);
      return node;
    };
    chips.replaceChildren();
    if (t === null || !(canFork || ofSampler)) return;
    const sides = [["policy", ofPolicy()], ["sampler", ofSampler]];
    const offer = canFork && t === state.selected && !isBusy() ? "click one to fork here with it" : "";
    const table = likeliestTable(sides, t, label, offer);
    const hint = isScored(t) && !ofPolicy() ? "Point at a token for its likeliest alternatives." : "";
    chips.append(table ?? make("span", "rlt-soft", hint));
    if (table) chips.style.minHeight = `${chips.offsetHeight}px`; // what is below stays where it is
  };
  // Asked for once a sample, when its first token is pointed at or clicked.
  let asked = -1;
  const wantChips = () => {
    const item = model.get("item");
    if (known().refusal !== "" || !isScored(state.current) || ofPolicy() || asked === item || isBusy()) return;
    asked = item;
    ask({ alternatives: true });
  };
  const drawBar = () => {
    const { refusal } = known();
    const { text, share } = model.get("asking");
    const busy = isBusy();
    bar.hidden = refusal !== "";
    forkHere.disabled = busy || !isScored(state.selected);
    search.disabled = busy;
    stop.hidden = !busy;
    progress.textContent = text ?? "";
    progress.style.setProperty("--share", share ?? 0);
  };
  const drawResults = () => {
    const { refusal, forks, curve, note: message } = known();
    note.textContent = message ?? "";
    const parts = [];
    if (refusal) parts.push(make("p", "rlt-soft", refusal));
    for (const one of [...(curve ? [curve] : []), ...[...forks].reverse()]) {
      const section = make("section");
      section.append(...resultNodes(one));
      if (one.target !== null) section.prepend(button(`token ${one.target + 1}`, "Select it", () => state.select(one.target)));
      parts.push(section);
    }
    results.replaceChildren(...parts);
  };
  state.on(drawResults, "payload", "forks");
  state.on(drawBar, "payload", "forks", "asking", "target");
  state.on(drawChips, "payload", "forks", "asking", "alternatives", "target", "hover");
  state.on(wantChips, "hover");
  return node;
}
