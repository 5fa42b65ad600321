// The likeliest tokens of a place: a column a token, and a row of probabilities for each side that knows them.
import { make, word } from "./elements.js";

const chance = (p) => (p === undefined ? "–" : p < 0.001 ? "<0.001" : p.toFixed(3));

// `sides` are names with what Python made (`likeliest_payload`); `labelOf(id)` is the element of a token's text; `hint`
// stands behind them. Null where no side knows any token of this target.
export function likeliestTable(sides, target, labelOf, hint = "") {
  const known = sides.filter(([, side]) => side?.by_target[target]?.length);
  if (!known.length) return null;
  const texts = new Map(known.flatMap(([, side]) => side.by_target[target].map(([id]) => [id, side.texts[id]])));
  const table = make("table", "likeliest");
  const head = make("tr");
  head.append(make("th", "", "likeliest"));
  for (const [id, text] of texts) {
    const cell = make("th");
    cell.append(word(text, labelOf(id)));
    head.append(cell);
  }
  head.append(make("td", "likeliest-about", hint));
  table.append(head);
  for (const [name, { about, by_target: places }] of known) {
    const chances = new Map(places[target]);
    const line = make("tr");
    line.append(make("th", "", name));
    line.append(...[...texts.keys()].map((id) => make("td", "", chance(chances.get(id)))), make("td", "likeliest-about", about));
    table.append(line);
  }
  return table;
}
