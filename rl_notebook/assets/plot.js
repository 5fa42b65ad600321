// Drawing on a canvas: a surface that is redrawn when its box changes, and a plane with two axes.
import { colour } from "./scale.js";

const FONT = '11px system-ui, "Segoe UI", Roboto, Arial, sans-serif';

// `draw(context, width, height, ratio)` works in CSS pixels.
export function surface(kind, height, label, draw) {
  const canvas = document.createElement("canvas");
  canvas.className = kind;
  canvas.style.height = `${height}px`;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", label);
  let pending = 0;
  const redraw = () => {
    pending = 0;
    const width = canvas.clientWidth;
    const ratio = window.devicePixelRatio || 1;
    if (width) draw(sized(canvas, width, height, ratio), width, height, ratio);
  };
  const ask = () => {
    pending = pending || requestAnimationFrame(redraw);
  };
  const observer = new ResizeObserver(ask);
  observer.observe(canvas);
  return { canvas, ask, stop: () => (observer.disconnect(), cancelAnimationFrame(pending)) };
}

export function sized(canvas, width, height, ratio) {
  [canvas.width, canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.font = FONT;
  return context;
}

// Grid, numbers and names of two axes in a box [left, top, right, under]; returns where values stand. An axis is
// {low, high, marks, text, name, at}; `at` says where a value stands between low and high.
export function plane(g, [left, top, right, under], across, up, hues) {
  const share = ({ low, high, at = (v) => v }, v) => (at(v) - low) / (high - low);
  const X = (v) => left + (right - left) * share(across, v);
  const Y = (v) => under - (under - top) * share(up, v);
  g.fillStyle = colour(hues, "ink", 0.12);
  for (const v of across.marks) g.fillRect(X(v), top, 1, under - top);
  for (const v of up.marks) g.fillRect(left, Math.round(Y(v)), right - left, 1);
  g.fillStyle = colour(hues, "ink", 0.7);
  g.textAlign = "center";
  for (const v of across.marks) g.fillText(across.text(v), X(v), under + 14);
  g.fillText(across.name, (left + right) / 2, under + 29);
  g.save();
  g.translate(10, (top + under) / 2);
  g.rotate(-Math.PI / 2);
  g.fillText(up.name, 0, 0);
  g.restore();
  g.textAlign = "right";
  for (const v of up.marks) g.fillText(up.text(v), left - 5, Y(v) + 4);
  g.textAlign = "left";
  return [X, Y];
}

// A line through places, within a box.
export function path(g, [left, top, right, under], places, style, wide, dash = []) {
  g.save();
  g.beginPath();
  g.rect(left, top, right - left, under - top);
  g.clip();
  g.beginPath();
  g.setLineDash(dash);
  g.strokeStyle = style;
  g.lineWidth = wide;
  places.forEach(([x, y], k) => g[k ? "lineTo" : "moveTo"](x, y));
  g.stroke();
  g.restore();
}
