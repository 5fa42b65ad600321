// Charts in a grid. The kernel sends whole figures.

import { fit, library, react, rest } from "./chart.js";
import { followSteps } from "./cursor.js";

function makeCard(about) {
  const card = document.createElement("section");
  card.className = `rld-chart rld-chart-${about.name.replaceAll(" ", "-")}${about.wide ? " rld-wide" : ""}`;
  const title = document.createElement("h4");
  title.textContent = about.title;
  title.title = about.caption;
  const plot = document.createElement("div");
  plot.setAttribute("role", "img");
  plot.setAttribute("aria-label", `${about.title}. ${about.caption}`);
  card.append(title, plot);
  return { card, plot, title };
}

async function render({ model, el, signal }) {
  const board = document.createElement("div");
  board.className = "rld-board";
  const grid = document.createElement("div");
  grid.className = "rld-charts";
  board.append(grid);
  el.append(board);
  const cards = new Map();
  const fitAll = () => cards.forEach(({ plot }) => fit(Plotly, plot));
  const observer = new ResizeObserver(fitAll);
  const Plotly = await library(model);
  if (signal?.aborted) return;

  function place(about) {
    if (!cards.has(about.name)) {
      const made = makeCard(about);
      cards.set(about.name, made);
      grid.append(made.card);
      observer.observe(made.plot);
    }
    const { card, plot, title } = cards.get(about.name);
    title.textContent = about.title;
    card.classList.toggle("rld-wide", about.wide);
    return plot;
  }
  async function draw() {
    const shown = model.get("shown");
    const figures = model.get("figures");
    const names = new Set(shown.map((about) => about.name));
    for (const [name, { card }] of cards) card.hidden = !names.has(name);
    for (const about of shown) {
      const figure = figures[about.name];
      if (!figure) continue;
      await rest(0); // for what else the page has to do
      const plot = place(about);
      plot.style.height = `${about.height}px`;
      const isNew = !plot.data;
      await react(Plotly, plot, figure, about.height);
      if (isNew) {
        followSteps(Plotly, plot);
        plot.on("plotly_click", ({ points: [p] }) => model.send({ clicked: about.name, x: Number(p.x), y: Number(p.y) }));
      }
    }
    fitAll();
  }
  // One drawing at a time; what comes meanwhile is drawn afterwards, and only the last of it. Drawing takes up the page's
  // only thread, so between two drawings there is as long a rest as the last one took: for what has come, and for clicks.
  let busy = false;
  let again = false;
  async function update() {
    again = true;
    if (busy) return;
    busy = true;
    try {
      while (again) {
        again = false;
        const start = performance.now();
        grid.classList.add("rld-behind"); // pale, where it takes long: what is around the charts is of a later step already
        await draw();
        grid.classList.toggle("rld-behind", again);
        await rest(performance.now() - start);
      }
    } finally {
      busy = false;
      grid.classList.remove("rld-behind");
    }
  }
  model.on("change:figures", update);
  model.on("change:shown", update);
  update();
  return () => {
    observer.disconnect();
    model.off("change:figures", update);
    model.off("change:shown", update);
    for (const { plot } of cards.values()) Plotly.purge(plot);
  };
}

export default { render };
