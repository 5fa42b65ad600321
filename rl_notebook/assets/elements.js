// Elements of a page. Everything that a model wrote enters as textContent, never as markup.

export function make(name, kind, text) {
  const element = document.createElement(name);
  if (kind) element.className = kind;
  if (text !== undefined) element.textContent = text;
  return element;
}

export function button(text, title, act) {
  const element = make("button", "", text);
  element.type = "button";
  element.title = title;
  element.addEventListener("click", act);
  return element;
}

export function labelled(name, control) {
  const node = make("label", "rlt-label");
  node.append(make("span", "", name), control);
  return node;
}

export function fill(select, options, value) {
  const option = ([v, text]) => Object.assign(make("option", "", text), { value: v });
  select.replaceChildren(...options.map(option));
  select.value = value;
}

// A token's text, a blank at its beginning shown pale.
export function word(text, into) {
  if (text.startsWith("·") && text.length > 1) into.append(make("span", "rlt-ws", "·"), text.slice(1));
  else into.textContent = text;
  return into;
}
