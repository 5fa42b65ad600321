// Numbers of a series and their colours, a hue and a strength on the scale of the series; and what a token is.

const LIGHT = { blue: [40, 103, 178], orange: [204, 98, 40], violet: [116, 84, 168], green: [47, 143, 99], ink: [59, 71, 84] };
const DARK = { blue: [92, 156, 236], orange: [240, 145, 84], violet: [172, 142, 232], green: [96, 196, 150], ink: [213, 219, 227] };
const CLASSES = ["blue", "orange", "green", "violet"];
const STRONGEST = 0.62; // opacity at the end of a scale; text stays legible on it

export const palette = (dark) => (dark ? DARK : LIGHT);
export const clamp = (x, low, high) => Math.min(high, Math.max(low, x));
export const known = (v) => v !== null && v !== undefined;

export function form(v, digits = 4) {
  if (!known(v)) return "–";
  const size = Math.abs(v);
  if (v === 0) return "0";
  if (size >= 1e4 || size < 1e-3) return v.toExponential(digits < 4 ? 1 : 2);
  return String(Number(v.toPrecision(digits)));
}

// Where a value stands on the axis of its series; a difference even around 0, in decades beyond.
export const height = (series, v) => (series.kind === "difference" ? Math.sign(v) * Math.log1p(Math.abs(v) / series.near) : v);

// [name of a colour, strength from 0 to 1] of a value on the scale of its series.
export function tint(series, v) {
  if (!known(v)) return ["blue", 0];
  if (series.kind === "class") return v === 0 ? ["blue", 0] : [CLASSES[(v - 1) % CLASSES.length], 0.45];
  const off = v - series.center;
  const less = series.kind === "gradient" ? off > 0 : off < 0; // a positive dL/dlogprob makes the token less likely
  const hue = series.kind === "logprob" || series.kind === "kl" ? "violet" : less ? "orange" : "blue";
  const noise = Math.abs(off) <= (series.floor ?? -1);
  return [hue, noise ? 0 : Math.min(1, height(series, Math.abs(off)) / height(series, series.limit))];
}

export const colour = (hues, name, alpha) => `rgba(${hues[name].join(",")},${alpha.toFixed(3)})`;
export const paint = (hues, [name, strength], most = STRONGEST) => (strength ? colour(hues, name, most * strength) : "");

export const ROLES = { p: "prompt", m: "masked", s: "scored" };

// Calls `draw(role, start, end)` for each run of tokens of one role.
export function runs(roles, draw) {
  for (let j = 0, end = 0; j < roles.length; j = end) {
    while (end < roles.length && roles[end] === roles[j]) end++;
    draw(roles[j], j, end);
  }
}
