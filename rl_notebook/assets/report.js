// Draws the tables and the figures of a report from the JSON that the page carries, and reads the page again if it asks
// for that.
import { makeTable } from "./table.js";

const carried = (id) => Object.entries(JSON.parse(document.getElementById(id)?.textContent ?? "{}"));
const seconds = Number(document.querySelector("main").dataset.refresh);
const name = "rl-notebook " + location.pathname;
const kept = JSON.parse(sessionStorage.getItem(name) || "null"); // from before the page was read again
const boxes = () => [document.scrollingElement, ...document.querySelectorAll(".scroll")];
sessionStorage.removeItem(name);
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
  return made;
});
const go = (reveal) => tables.forEach((table) => table.select(decodeURIComponent(location.hash.slice(1)), reveal));

for (const [id, figure] of carried("figures")) {
  Plotly.newPlot(id, figure.data, figure.layout, { displayModeBar: false, responsive: true });
}

go(!kept);
window.addEventListener("hashchange", () => go(true));

let typed = -Infinity;
window.addEventListener("input", () => (typed = performance.now()));

function store() {
  const place = { tops: boxes().map((box) => box.scrollTop), open: document.querySelector("details")?.open, views };
  sessionStorage.setItem(name, JSON.stringify(place));
}

function restore() {
  const details = document.querySelector("details");
  if (details) details.open = Boolean(kept.open);
  boxes().forEach((box, i) => (box.scrollTop = kept.tops[i] || 0));
}

if (kept) restore(); // also after the last reading, when the run has ended
if (seconds > 0) {
  setInterval(() => {
    const typing = performance.now() - typed < 5000;
    if (document.hidden || typing || String(getSelection())) return; // not seen, or a text in it is typed or selected
    store();
    location.reload();
  }, seconds * 1000);
}
