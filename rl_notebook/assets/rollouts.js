// The completions in flight: how long each is, its last words, and a button that ends it.
import { button, make } from "./elements.js";
import { visible } from "./table.js";

function render({ model, el }) {
  const box = make("details", "rld-rollouts");
  const line = make("summary");
  const list = make("div", "rld-inflight");
  const rest = make("p", "rld-sentence");
  const lines = new Map(); // by key; a line stays where it is as long as its completion is in flight
  box.open = true;
  box.hidden = true;
  box.append(line, list, rest);
  el.append(box);

  const makeLine = (key) => {
    const node = make("div", "rld-flight");
    const parts = { node, name: make("b"), count: make("span", "rld-count"), text: make("div", "rld-tail") };
    parts.stop = button("■", "End it with its next token: finish reason “cut”, graded as it is", () => {
      parts.stop.disabled = true;
      model.send({ cut: key });
    });
    node.append(parts.stop, parts.name, parts.count, parts.text);
    return parts;
  };
  const draw = () => {
    const { line: words = "Nothing is in flight.", rows = [], left_out: more = 0 } = model.get("payload");
    if (rows.length || model.get("payload").line) box.hidden = false;
    line.textContent = words;
    for (const [key, { node }] of [...lines]) {
      if (rows.some((row) => row.key === key)) continue;
      node.remove();
      lines.delete(key);
    }
    for (const { key, name, tokens, most, text } of rows) {
      if (!lines.has(key)) lines.set(key, makeLine(key));
      const parts = lines.get(key);
      parts.name.textContent = name;
      parts.count.textContent = tokens ? `${tokens} / ${most}` : "waits";
      parts.count.style.setProperty("--share", tokens / most);
      parts.text.replaceChildren();
      visible(parts.text.appendChild(make("span")), text);
      list.append(parts.node);
    }
    rest.textContent = more ? `and ${more} shorter ones` : "";
    box.style.minHeight = box.open ? `${Math.min(box.offsetHeight, 300)}px` : ""; // what is below stays where it is
  };
  model.on("change:payload", draw);
  draw();
  return () => model.off("change:payload", draw);
}

export default { render };
