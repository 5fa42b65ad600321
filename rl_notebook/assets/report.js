// Draws the tables and the figures of a report from the JSON that the page carries, marks what its address names, and reads
// the page again if it asks for that.
import { make } from "./elements.js";
import { makeTable, number } from "./table.js";

const carried = (id) => Object.entries(JSON.parse(document.getElementById(id)?.textContent ?? "{}"));
const seconds = Number(document.querySelector("main").dataset.refresh);
const name = "rl-notebook " + location.pathname;
const again = performance.getEntriesByType("navigation")[0].type === "reload";
const kept = again ? JSON.parse(sessionStorage.getItem(name)) : null; // from before the page was read again
const boxes = () => [document.scrollingElement, ...document.querySelectorAll(".scroll, .strip")];
history.scrollRestoration = "manual";

// What the reader has chosen in the tables; a completion that the address names is marked in its own.
const views = kept?.views ?? {};
const cut = (row, column) => column.name === "finish_reason" && row.finish_reason !== "stop";
const tables = carried("tables").map(([id, table]) => {
  const made = makeTable({
    label: "completions",
    size: 8,
    view: views[id],
    changed: (view) => (views[id] = view),
    paint: (row, column) => (cut(row, column) ? "rgb(217 119 43 / 0.16)" : ""),
  });
  document.getElementById(id).replaceChildren(made.element);
  made.draw(table);
  return { ...made, rows: table.rows };
});

// The tokens of the completion that the address names, under its table: each is a link to itself, and one is marked.
const held = Object.fromEntries(carried("tokens"));
const panel = make("section", "tokens");
const [head, strip, numbers, absent] = [make("h4"), make("div", "strip"), make("dl"), make("p", "status quiet")];
const MARKED = "Choose a token to see its numbers; the address of the page then names it.";
const floats = (text) => new Float32Array(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
const words = (at) => ["step", "group", "sample", "token"].filter((n) => at[n]).map((n) => `${n} ${at[n]}`).join(" · ");
const asked = ({ token, id }) => `rl-notebook view RUN --show '${id}${token ? `&token=${token}` : ""}'`;
strip.setAttribute("aria-label", "sampled tokens; arrow keys move");
strip.setAttribute("role", "group");
panel.append(head, strip, numbers);
let shown = null; // the address of the completion in the panel

// What the address of the page names: the completion as {id, step, group, sample}, and perhaps a token of it.
function named() {
  const given = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const { step, group, sample } = given;
  if (![step, group, sample].every((value) => /^\d+$/.test(value))) return null;
  const token = /^\d+$/.test(given.token) ? given.token : undefined;
  return { step, group, sample, token, id: `step=${step}&group=${group}&sample=${sample}` };
}

function drawTokens({ id }, { first, ids, texts, roles }) {
  const said = ids.map((token, i) => {
    const link = make("a", roles[i] === "s" ? "" : "masked", texts?.[i] ?? String(token));
    link.href = `#${id}&token=${first + i}`;
    link.tabIndex = -1;
    return link;
  });
  strip.classList.toggle("ids", !texts);
  strip.replaceChildren(...said.flatMap((link) => (link.textContent.endsWith("⏎") ? [link, make("br")] : [link])));
}

function drawNumbers({ token }, { first, ids, texts, roles, series, values }, row) {
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
}

function mark(at, row, reveal) {
  const tokens = held[at.id];
  const fresh = shown !== at.id;
  if (fresh) {
    shown = at.id;
    const range = tokens ? ` · tokens ${tokens.first} to ${tokens.first + tokens.ids.length - 1}` : "";
    head.textContent = words({ ...at, token: undefined }) + range;
    strip.replaceChildren();
    if (tokens) drawTokens(at, tokens);
  }
  const links = [...strip.querySelectorAll("a")];
  const link = at.token && tokens ? links[at.token - tokens.first] : undefined;
  for (const old of links.filter((other) => other.ariaCurrent)) [old.ariaCurrent, old.tabIndex] = [null, -1];
  if (link) link.ariaCurrent = "true";
  if (links.length) (link ?? links[0]).tabIndex = 0;
  const outside = at.token && (at.token < tokens?.first ? "is part of the prompt, which stands above" : "is beyond the end of this completion");
  const why = !tokens ? `Its tokens are not on this page, which holds those of the first completions: ${asked(at)} holds them.` : outside ? `Token ${at.token} ${outside}.` : MARKED;
  if (link) drawNumbers(at, tokens, row);
  else numbers.replaceChildren(make("p", "soft", why));
  if (reveal && (link ?? panel)) (link ?? panel).scrollIntoView({ block: fresh ? "center" : "nearest" });
}

// Marks what the address names; with `reveal`, goes there. What the page does not hold is said at its top.
function go(reveal) {
  const at = named();
  const table = at && tables.find(({ rows }) => rows.some((row) => row.id === at.id));
  const elsewhere = at?.id !== shown;
  for (const other of tables) other.select(at?.id ?? null, reveal && elsewhere);
  absent.remove();
  if (!table) {
    panel.remove();
    shown = null;
    if (!at) return;
    absent.textContent = `This page does not hold ${words({ ...at, token: undefined })}. It shows some completions of some steps; ${asked(at)} writes a page that has this one.`;
    document.querySelector("main").prepend(absent);
    if (reveal) absent.scrollIntoView();
    return;
  }
  if (!table.element.nextSibling) table.element.after(panel);
  mark(at, table.rows.find((row) => row.id === at.id), reveal);
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

for (const [id, figure] of carried("figures")) {
  Plotly.newPlot(id, figure.data, figure.layout, { displayModeBar: false, responsive: true });
}

go(!kept);
window.addEventListener("hashchange", () => go(true));

let typed = -Infinity;
window.addEventListener("input", () => (typed = performance.now()));

// The place is remembered when the page goes: until then its reader may choose and scroll. Who has scrolled since it came
// back stays there.
addEventListener("pagehide", () => {
  const place = { tops: boxes().map((box) => box.scrollTop), open: document.querySelector("details")?.open, views };
  sessionStorage.setItem(name, JSON.stringify(place));
});
if (kept) {
  const details = document.querySelector("details");
  if (details) details.open = Boolean(kept.open);
  boxes().forEach((box, i) => (box.scrollTop ||= kept.tops[i] || 0));
}

if (seconds > 0) {
  setInterval(() => {
    const typing = performance.now() - typed < 5000;
    if (document.hidden || typing || String(getSelection())) return; // not seen, or a text in it is typed or selected
    location.reload();
  }, seconds * 1000);
}
