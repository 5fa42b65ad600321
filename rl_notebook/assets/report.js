// Draws the figures of a report from the JSON that the page carries, and reads the page again if it asks for that.
const carried = document.getElementById("figures");
for (const [id, figure] of Object.entries(carried ? JSON.parse(carried.textContent) : {})) {
  Plotly.newPlot(id, figure.data, figure.layout, { displayModeBar: false, responsive: true });
}

const seconds = Number(document.querySelector("main").dataset.refresh);
const kept = "rl-notebook " + location.pathname;
const boxes = () => [document.scrollingElement, ...document.querySelectorAll(".scroll")];

function store() {
  const place = { tops: boxes().map((box) => box.scrollTop), open: document.querySelector("details")?.open };
  sessionStorage.setItem(kept, JSON.stringify(place));
}

function restore() {
  const place = JSON.parse(sessionStorage.getItem(kept) || "null");
  if (!place) return;
  sessionStorage.removeItem(kept);
  const details = document.querySelector("details");
  if (details) details.open = Boolean(place.open);
  boxes().forEach((box, i) => (box.scrollTop = place.tops[i] || 0));
}

history.scrollRestoration = "manual";
restore(); // also after the last reading, when the run has ended
if (seconds > 0) {
  setInterval(() => {
    if (document.hidden || String(getSelection())) return; // the page is not seen, or a text in it is selected
    store();
    location.reload();
  }, seconds * 1000);
}
