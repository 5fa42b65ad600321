// Draws the figures of a report from the JSON that the page carries.
const figures = JSON.parse(document.getElementById("figures").textContent);
for (const [id, figure] of Object.entries(figures)) {
  Plotly.newPlot(id, figure.data, figure.layout, { displayModeBar: false, responsive: true });
}
