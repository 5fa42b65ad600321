// The tokens of a sample, coloured by a series; the prompt folds.
import { make, word } from "./elements.js";
import { ROLES, clamp, paint, runs, tint } from "./scale.js";

const BLOCK = 160; // tokens in a block at most; a block ends at a line end, too
export function strip(state, id) {
  const node = make("div", "rlt-strip");
  node.tabIndex = 0;
  node.setAttribute("role", "listbox");
  node.setAttribute("aria-label", "tokens of the sample; arrow keys move");
  let spans = [];
  let marked = {};
  let folded = true;
  const fold = make("button", "rlt-fold");
  const setFolded = (on) => {
    const prompt = state.payload.prompt ?? 0;
    folded = on;
    state.folded = on && prompt > 0;
    node.classList.toggle("rlt-folded", folded);
    fold.textContent = `${folded ? "▸" : "▾"} prompt ${prompt}`;
    fold.setAttribute("aria-expanded", String(!folded));
    fold.title = folded ? "show the prompt" : "fold the prompt";
  };
  fold.onclick = () => {
    setFolded(!folded);
    state.tell("fold");
  };

  const token = (p, j, special) => {
    const span = make("span", `rlt-token rlt-${ROLES[p.roles[j]]}`);
    if (special.has(j)) span.classList.add("rlt-special");
    span.id = `${id}-${j}`;
    span.setAttribute("role", "option");
    if (j > 0) span.dataset.target = j - 1;
    span.dataset.token = j;
    return word(p.texts[j], span);
  };
  // A token over its part of the curve of `locate`.
  const withCurve = (span, cell) => {
    if (!cell) return span;
    const column = make("span", "rlt-column");
    const axis = make("span", "rlt-axis");
    const area = make("span", "rlt-area");
    [area.style.clipPath, axis.style.background] = cell;
    axis.append(area);
    column.append(span, axis);
    return column;
  };
  const build = () => {
    const p = state.payload;
    const special = new Set(p.special);
    const cells = state.curve?.cells ?? {};
    const page = document.createDocumentFragment();
    let line = null;
    spans = [];
    setFolded(folded);
    if (p.prompt) page.append(fold);
    runs(p.roles ?? "", (role, start, end) => {
      if (start === p.prompt) line = null;
      for (let j = start; j < end; j++) {
        if (line === null || line.childElementCount >= BLOCK) {
          const block = make("div", role === "p" ? "rlt-block rlt-ofprompt" : "rlt-block");
          line = make("div", "rlt-line");
          block.append(make("span", "rlt-gutter", String(j)), line);
          page.append(block);
        }
        if (j === start && role !== "p") line.append(make("span", "rlt-region", `${ROLES[role]} ${end - j}`));
        spans[j] = token(p, j, special);
        line.append(withCurve(spans[j], cells[j - 1]));
        if (p.texts[j].endsWith("⏎")) line = null;
      }
    });
    if (p.cut) (line ?? page).append(make("span", "rlt-region rlt-cut", `✂ ${p.cut} tokens cut off here`));
    if (p.message) page.append(make("p", "rlt-message", p.message));
    node.replaceChildren(page);
    node.scrollTop = 0;
    marked = {};
    paintTokens();
  };
  const paintTokens = () => {
    const s = state.series;
    const bad = new Set(s?.bad);
    for (let j = 1; s && j < spans.length; j++) {
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
    span?.classList.add(kind);
    if (!span || !scroll) return;
    see(span);
    requestAnimationFrame(() => see(span)); // again, when the blocks on the way have their true heights
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
  // The token above or below: the first line in that direction, and there the one at the same place.
  const nextLine = (here, step) => {
    const box = (t) => spans[t + 1].getBoundingClientRect();
    const inside = (t) => t >= 0 && t < state.targets;
    if (here < 0) return 0;
    const start = box(here);
    let t = here;
    while (inside(t + step) && Math.abs(box(t).top - start.top) < 4) t += step;
    const { top } = box(t);
    if (Math.abs(top - start.top) < 4) return here;
    let best = t;
    for (; inside(t) && Math.abs(box(t).top - top) < 4; t += step) {
      if (Math.abs(box(t).left - start.left) < Math.abs(box(best).left - start.left)) best = t;
    }
    return best;
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

  let hasCurve = false;
  const buildCurve = () => {
    if (state.curve || hasCurve) build();
    hasCurve = Boolean(state.curve);
  };
  state.on(build, "payload");
  state.on(buildCurve, "forks");
  state.on(paintTokens, "series", "theme");
  state.on(drawSelected, "payload", "target", "forks");
  state.on(() => mark("rlt-hover", state.hovered, state.from === "chart"), "hover");
  return node;
}
