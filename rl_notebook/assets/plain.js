// Boxes, HTML, buttons and fields of ipywidgets for a front end that draws anywidgets only. Every widget keeps its
// element, so that a redraw does not take the focus from a field; anywidgets inside draw themselves.

const ICONS = { play: "▶", pause: "❚❚", stop: "■", undo: "↶", "step-forward": "▸", "fast-forward": "▸▸", check: "✓" };

function make(node, say) {
  const el = document.createElement(
    { button: "button", toggle: "button", select: "label", number: "label", text: "label" }[node.kind] ?? "div",
  );
  const field = { select: "select", number: "input", text: "input" }[node.kind];
  if (field) {
    el.append(document.createElement("span"), document.createElement(field));
    const input = el.lastChild;
    if (node.kind === "number") input.type = "range";
    input.onchange = () => say({ widget: node.id, value: field === "select" ? input.selectedIndex : input.value });
  }
  if (node.kind === "button") el.onclick = () => say({ widget: node.id, click: true });
  if (node.kind === "toggle") el.onclick = () => say({ widget: node.id, value: !el.classList.contains("mod-active") });
  return el;
}

function update(el, node) {
  el.className = node.classes.join(" ");
  el.style.cssText = Object.entries(node.layout)
    .map(([name, value]) => `${name.replace("_", "-")}: ${value};`)
    .join(" ");
  el.title = node.tooltip ?? "";
  if (node.kind === "html" && el.innerHTML !== node.value) el.innerHTML = node.value;
  if (node.kind === "button" || node.kind === "toggle") {
    el.textContent = [ICONS[node.icon], node.description].filter(Boolean).join(" ");
    el.disabled = node.disabled;
    el.classList.add("jupyter-button");
    el.classList.toggle("mod-active", node.value === true);
  }
  const input = el.querySelector?.(":scope > input, :scope > select");
  if (!input) return;
  el.firstChild.textContent = node.description ? `${node.description} ` : "";
  input.disabled = node.disabled;
  if (node.kind === "select") {
    input.replaceChildren(...node.options.map((text) => Object.assign(document.createElement("option"), { text })));
    input.selectedIndex = node.value;
  } else {
    if (node.range) [input.min, input.max, input.step] = node.range;
    if (input !== input.getRootNode().activeElement) input.value = node.value;
  }
}

export default {
  render({ model, el, host }) {
    const known = new Map();
    const style = Object.assign(document.createElement("style"), { textContent: model.get("css") });
    function draw(node) {
      if (!known.has(node.id)) {
        known.set(node.id, make(node, (message) => model.send(message)));
        if (node.kind === "widget") host.getWidget(node.id).then((w) => w.render({ el: known.get(node.id) }));
      }
      const own = known.get(node.id);
      update(own, node);
      if (node.children) {
        const inner = node.children.map(draw);
        if (inner.length !== own.childNodes.length || inner.some((e, i) => e !== own.childNodes[i]))
          own.replaceChildren(...inner);
      }
      return own;
    }
    const redraw = () => {
      const root = draw(model.get("tree"));
      if (root.parentNode !== el) el.replaceChildren(style, root);
    };
    model.on("change:tree", redraw);
    redraw();
    return () => model.off("change:tree", redraw);
  },
};
