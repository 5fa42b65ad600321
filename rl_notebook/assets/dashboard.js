// The table of completions and the completion that is open. The kernel sorts, filters and pages; this file only draws.
// Everything that the model wrote reaches the page as textContent, never as markup.

const UNSEEN = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/u;
const MANY = 2000; // marks; a text with more of them is shown without setting them apart

function make(name, kind, text) {
  const element = document.createElement(name);
  if (kind) element.className = kind;
  if (text !== undefined) element.textContent = text;
  return element;
}

const code = (c) => "\\u" + c.codePointAt(0).toString(16).padStart(4, "0");
const unseen = (c) => c !== "\n" && c !== "\t" && UNSEEN.test(c);

// Text in which characters that cannot be seen, such as escape codes and direction marks, are written out.
function visible(element, text) {
  const parts = [];
  let plain = "";
  let marks = 0;
  for (const c of text) {
    if (!unseen(c)) plain += c;
    else if (++marks > MANY) plain += code(c);
    else {
      parts.push(plain, make("span", "rld-mark", code(c)));
      plain = "";
    }
  }
  element.replaceChildren(...parts, plain);
  return element;
}

const number = (value) => (value === null || value === undefined ? "–" : String(+value.toPrecision(4)));

function button(text, title, act) {
  const element = make("button", "", text);
  element.type = "button";
  element.title = title;
  element.addEventListener("click", act);
  return element;
}

function head(columns, send) {
  const names = make("tr");
  const filters = make("tr", "rld-filters");
  for (const c of columns) {
    const cell = make("th", c.numeric ? "rld-num" : "");
    cell.scope = "col";
    cell.style.width = c.width;
    cell.dataset.column = c.name;
    cell.append(button(c.label, `Sort by ${c.label}`, () => send({ sort: c.name })));
    names.append(cell);
    const box = make("th");
    const input = make("input");
    input.placeholder = c.hint;
    input.title = c.help;
    input.setAttribute("aria-label", `Filter by ${c.label}`);
    input.dataset.column = c.name;
    let timer;
    input.addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => send({ filter: [c.name, input.value] }), 200);
    });
    box.append(input);
    filters.append(box);
  }
  const element = make("thead");
  element.append(names, filters);
  return element;
}

function marks(thead, page) {
  for (const cell of thead.querySelectorAll("tr:first-child th")) {
    const sorted = cell.dataset.column === page.sort;
    const label = page.columns.find((c) => c.name === cell.dataset.column).label;
    cell.setAttribute("aria-sort", sorted ? (page.descending ? "descending" : "ascending") : "none");
    cell.firstChild.textContent = label + (sorted ? (page.descending ? " ▾" : " ▴") : "");
  }
  for (const input of thead.querySelectorAll("input")) {
    const problem = page.problems[input.dataset.column];
    input.setAttribute("aria-invalid", problem ? "true" : "false");
    if (problem) input.title = problem;
    if (document.activeElement !== input) input.value = page.filters[input.dataset.column] || "";
  }
}

function body(page, open, send) {
  return page.rows.map((row) => {
    const line = make("tr");
    const here = open.step === page.step && open.group === row.group && open.sample === row.sample;
    if (here) line.className = "rld-open";
    line.dataset.place = `${row.group}:${row.sample}`;
    for (const c of page.columns) {
      const cell = make("td", c.numeric ? "rld-num" : "");
      if (c.name === "text") {
        const title = `Show completion ${row.sample} of group ${row.group}`;
        const shown = visible(button("", title, () => {}), row.text.replace(/\s*\n\s*/g, " ⏎ "));
        shown.setAttribute("aria-pressed", here ? "true" : "false");
        cell.append(shown);
      } else if (c.numeric) cell.textContent = number(row[c.name]);
      else visible(cell, row[c.name]);
      line.append(cell);
    }
    line.addEventListener("click", () => send({ open: [row.group, row.sample] }));
    return line;
  });
}

function pager(page, send) {
  const back = button("‹ Back", "Previous page", () => send({ page: page.page - 1 }));
  const on = button("Next ›", "Next page", () => send({ page: page.page + 1 }));
  back.disabled = page.page <= 0;
  on.disabled = page.page >= page.pages - 1;
  const left = page.found < page.total ? `${page.found} of ${page.total}` : `${page.total}`;
  const which = page.pages > 1 ? `, page ${page.page + 1} of ${page.pages}` : "";
  return [make("span", "", `${left} completions${which}`), ...(page.pages > 1 ? [back, on] : [])];
}

function completion(open, inspecting, send) {
  if (!open.facts) return [];
  const facts = make("dl");
  for (const [name, value] of open.facts) {
    facts.append(make("dt", "", name), visible(make("dd"), typeof value === "number" ? number(value) : value ?? "–"));
  }
  const title = make("h4", "", `Step ${open.step}, group ${open.group}, completion ${open.sample}`);
  const parts = [title, facts, make("h4", "", "Prompt, as the model saw it"), visible(make("pre"), open.prompt)];
  parts.push(make("h4", "", "Completion"), visible(make("pre"), open.text));
  parts.push(button("Inspect tokens", "Every token with its logprobs, below", () => send({ inspect: true })), " ");
  const close = button("Close tokens", "Put the tokens away", () => send({ inspect: false }));
  close.className = "rld-close";
  close.hidden = !inspecting;
  const back = button("×", "Close this completion", () => send({ close: true }));
  back.className = "rld-back";
  return [back, ...parts, close];
}

function render({ model, el }) {
  const send = (message) => model.send(message);
  const pane = make("div", "rld-pane");
  const left = make("div", "rld-table");
  const caption = make("h4");
  const table = make("table");
  const rows = make("tbody");
  const foot = make("div", "rld-pager");
  const right = make("div", "rld-completion");
  right.setAttribute("aria-live", "polite");
  left.append(caption, table, foot);
  pane.append(left, right);
  el.append(pane);
  let thead = null;

  function drawPage() {
    const page = model.get("page");
    if (!page.columns) return;
    if (!thead) {
      thead = head(page.columns, send);
      table.append(thead, rows);
    }
    caption.textContent = page.step ? `Completions of step ${page.step}` : "Completions";
    const focused = rows.contains(document.activeElement) && document.activeElement.closest("tr").dataset.place;
    marks(thead, page);
    rows.replaceChildren(...body(page, model.get("completion"), send));
    foot.replaceChildren(...pager(page, send));
    if (focused) rows.querySelector(`tr[data-place="${focused}"] button`)?.focus();
  }
  function drawCompletion() {
    right.replaceChildren(...completion(model.get("completion"), model.get("inspecting"), send));
    right.hidden = !right.childElementCount;
    drawPage();
  }
  function drawClose() {
    const close = right.querySelector(".rld-close");
    if (!close) return;
    if (close === document.activeElement) close.previousElementSibling.focus();
    close.hidden = !model.get("inspecting");
  }
  // A kernel that is gone responds to no button.
  function gone() {
    const board = el.closest(".rld");
    if (!board || board.querySelector(".rld-gone")) return;
    const said = "The kernel of this dashboard is gone: what it shows is from before. Run its cell again.";
    const note = make("p", "rld-error rld-gone", said);
    note.setAttribute("role", "alert");
    board.prepend(note);
    for (const control of board.querySelectorAll("button, select, input")) control.disabled = true;
  }
  const kernel = model.widget_manager?.kernel; // JupyterLab's; only there is the end of a kernel reported
  kernel?.disposed.connect(gone);
  model.on("comm_live_update", gone);
  model.on("change:page", drawPage);
  model.on("change:completion", drawCompletion);
  model.on("change:inspecting", drawClose);
  drawCompletion();
  return () => {
    kernel?.disposed.disconnect(gone);
    model.off("comm_live_update", gone);
    model.off("change:page", drawPage);
    model.off("change:completion", drawCompletion);
    model.off("change:inspecting", drawClose);
  };
}

export default { render };
