// What else could have come at a token, what came of it, and where the completion was lost. Python asks the policy; here
// are its buttons and its answers.
import { button, make, word } from "./elements.js";

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
  const choices = () => {
    const { item, by_target: places } = model.get("alternatives");
    return item === model.get("item") ? places : undefined;
  };
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

  // The likeliest tokens of the place of the pointer; those of the selected one are buttons.
  const drawChips = () => {
    const t = state.current;
    const there = choices()?.[t] ?? [];
    const isChosen = t === state.selected;
    const said = state.payload.tokens?.[t + 1];
    const chip = ([text, id, p]) => {
      const label = isChosen && id !== said ? button("", "Fork here with this token", () => fork(id)) : make("span", "rlt-chip");
      label.disabled = isBusy();
      label.append(word(text, make("span", "rlt-text")), ` ${p < 0.001 ? "<0.001" : p.toFixed(3)}`);
      label.classList.toggle("rlt-said", id === said);
      return label;
    };
    chips.replaceChildren();
    if (known().refusal !== "" || !isScored(t)) return;
    const { weights } = model.get("alternatives");
    const lead = there.length ? "likeliest here:" : choices() ? "" : "Point at a token for its likeliest alternatives.";
    chips.append(make("span", "rlt-soft", lead), ...there.map(chip));
    if (there.length) chips.append(make("span", "rlt-soft", `weights: ${weights}`));
  };
  // Asked for once a sample, when its first token is pointed at or clicked.
  let asked = -1;
  const wantChips = () => {
    const item = model.get("item");
    if (known().refusal !== "" || !isScored(state.current) || choices() || asked === item || isBusy()) return;
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
      if (one.target !== null) section.prepend(button(`target ${one.target}`, "Select its token", () => state.select(one.target)));
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
