// A table that its reader sorts, searches and filters. It is given all rows, so nothing but the page that shows it takes
// part. Everything that a model wrote reaches the page as textContent, never as markup.
import { button, make } from "./elements.js";

const UNSEEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/u;
const SHOWN = { "\n": "↵", "\t": "⇥" };
const MANY = 2000; // marks; a text with more of them is shown without setting them apart
const LONGEST = 160; // characters of a text in a line
const NUMERIC = ["number", "bar"];
const ORDER = new Intl.Collator("en", { numeric: true });

// Text in which characters that cannot be seen, such as escape codes and direction marks, are written out; with `ends`,
// line ends, tabs, and spaces at both ends are marked, too.
export function visible(element, text, ends = false) {
  const parts = [];
  let plain = "";
  let marks = 0;
  const mark = (label, kept = "") => {
    if (++marks > MANY) plain += label + kept;
    else {
      parts.push(plain, make("span", "rltable-mark", label), kept);
      plain = "";
    }
  };
  const body = ends ? text.replace(/^ +| +$/g, "") : text;
  const before = text.length - text.replace(/^ +/, "").length;
  if (ends && before) mark("·".repeat(before));
  for (const c of body) {
    if (c in SHOWN) ends ? mark(SHOWN[c], c) : (plain += c);
    else if (UNSEEN.test(c)) mark("\\u" + c.codePointAt(0).toString(16).padStart(4, "0"));
    else plain += c;
  }
  const after = text.length - before - body.length;
  if (ends && after) mark("·".repeat(after));
  element.replaceChildren(...parts, plain);
  return element;
}

// A number in a format such as ".4g" or "+.3f"; a dash where there is none.
export function number(value, format = ".4g") {
  if (value === null || value === undefined) return "–";
  const [, sign, digits, kind] = /^(\+?)\.(\d+)([gf])$/.exec(format);
  const text = kind === "f" ? value.toFixed(digits) : String(+value.toPrecision(digits));
  const plain = Number(text) === 0 ? text.replace("-", "") : text;
  return sign && !plain.startsWith("-") ? `+${plain}` : plain;
}

const numeric = (column) => NUMERIC.includes(column.kind);
const cellText = (row, column) => (numeric(column) ? number(row[column.name], column.format) : row[column.name] ?? "");

// --- what is shown: rows, columns and what the reader chose in, rows out ------------------------------------------------

const NUMBER = "([+-]?(?:\\d+\\.?\\d*|\\.\\d+)(?:e[+-]?\\d+)?)";
const RANGE = new RegExp(`^${NUMBER}\\s*\\.\\.\\s*${NUMBER}$`, "i");
const BOUND = new RegExp(`^(<=|>=|<|>|=|)\\s*${NUMBER}$`, "i");
const close = (a, b) => Math.abs(a - b) <= 1e-8 + 1e-5 * Math.abs(b);
const COMPARE = { "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b };

// A function that says whether a value passes a filter; null when the filter cannot be read.
function passes(column, wanted) {
  if (!numeric(column)) return (value) => String(value ?? "").toLowerCase().includes(wanted.toLowerCase());
  const there = (test) => (value) => value !== null && value !== undefined && test(value);
  const range = RANGE.exec(wanted);
  if (range) return there((value) => value >= +range[1] && value <= +range[2]);
  const bound = BOUND.exec(wanted);
  return bound && there((value) => (COMPARE[bound[1]] ?? close)(value, +bound[2]));
}

function chosenRows(rows, columns, view) {
  const problems = {};
  const tests = [];
  for (const column of columns) {
    const wanted = (view.filters[column.name] ?? "").trim();
    const test = wanted && passes(column, wanted);
    if (test) tests.push((row) => test(row[column.name]));
    else if (wanted) problems[column.name] = `"${wanted}" is none of: 1, >0.5, <=12, 3..7`;
  }
  const search = view.search.trim().toLowerCase();
  if (search) tests.push((row) => columns.some((c) => cellText(row, c).toLowerCase().includes(search)));
  const matches = rows.filter((row) => tests.every((test) => test(row)));
  const column = columns.find((c) => c.name === view.sort);
  if (!column) return { matches, problems };
  const key = column.key ?? column.name; // what has no number comes last, whichever way the rest is sorted
  const missing = (row) => row[key] === null || row[key] === undefined;
  const less = numeric(column) || column.key ? (a, b) => a - b || 0 : ORDER.compare;
  const direction = view.descending ? -1 : 1;
  matches.sort((a, b) => missing(a) - missing(b) || (missing(a) ? 0 : direction * less(a[key], b[key])));
  return { matches, problems };
}

// --- the parts ----------------------------------------------------------------------------------------------------------

// One line of a text, beginning shortly before what was searched for.
function line(text, wanted) {
  const flat = text.replace(/\s*\n\s*/g, " ⏎ ");
  const at = wanted ? flat.toLowerCase().indexOf(wanted) : -1;
  return at > LONGEST / 2 ? `…${flat.slice(at - 30, at - 30 + LONGEST)}` : flat.slice(0, LONGEST);
}

function fill(cell, row, column, top, wanted) {
  const value = row[column.name];
  if (numeric(column)) {
    cell.textContent = cellText(row, column);
    if (column.kind !== "bar" || !value) return;
    cell.classList.add("rltable-bar", value < 0 ? "rltable-minus" : "rltable-plus");
    cell.style.setProperty("--part", Math.abs(value) / top);
  } else if (column.kind === "block") cell.append(visible(make("div", "rltable-block"), value, true));
  else visible(cell, line(value ?? "", wanted));
}

// The number of rows from `i` on that say the same in these columns.
function alike(rows, i, names) {
  let end = i + 1;
  while (end < rows.length && names.every((name) => rows[end][name] === rows[i][name])) end++;
  return end - i;
}

// A table in an element. A column is {name, label, kind, ...}: kind is "number", "bar" (a number with a bar behind it),
// "text" (one line) or "block" (the whole text); format is one of `number`; width is CSS; filter is the placeholder of a
// filter field; key names the number to sort by; merge names columns, rows that agree in them share a cell; opens marks
// the column whose cells open their row. Every row has an id.
export function makeTable({
  label, // what the rows are, such as "completions"
  size = 12, // rows of a page
  view: first = {}, // what the reader has chosen: sort, descending, search, filters, page
  changed = () => {}, // called with the view when the reader chooses something else
  open = null, // called with the row that the reader opens; null where rows are opened by their address
  paint = () => "", // background of a cell, as CSS, from row and column
}) {
  const view = { sort: "", descending: false, search: "", filters: {}, page: 0, ...first };
  let [columns, rows, chosen] = [[], [], null];

  const element = make("div", "rltable");
  const title = make("h4", "rltable-title");
  const search = make("input", "rltable-search");
  const table = make("table");
  const head = make("thead");
  const body = make("tbody");
  const foot = make("div", "rltable-foot");
  const count = make("span");
  const [top, box] = [make("div", "rltable-top"), make("div", "rltable-box")];
  count.setAttribute("role", "status");
  search.type = "search";
  search.placeholder = "Search";
  search.setAttribute("aria-label", `Search ${label}`);
  table.setAttribute("aria-label", label);
  const back = button("‹ Back", "Previous page", () => choose({ page: view.page - 1 }));
  const on = button("Next ›", "Next page", () => choose({ page: view.page + 1 }));
  table.append(head, body);
  top.append(title, search);
  box.append(table);
  foot.append(count, back, on);
  element.append(top, box, foot);
  search.addEventListener("input", () => choose({ search: search.value, page: 0 }));
  search.value = view.search;

  const choose = (change) => {
    Object.assign(view, change);
    show();
    changed({ ...view });
  };
  const sortBy = (name) => choose({ sort: name, descending: name === view.sort && !view.descending, page: 0 });

  function drawHead() {
    const names = make("tr");
    const filters = make("tr", "rltable-filters");
    for (const c of columns) {
      const cell = make("th", numeric(c) ? "rltable-number" : "");
      cell.scope = "col";
      if (c.width) cell.style.width = c.width;
      cell.dataset.column = c.name;
      cell.append(button(c.label, `Sort by ${c.label}`, () => sortBy(c.name)));
      names.append(cell);
      const place = make("td");
      if (c.filter) place.append(filterField(c));
      filters.append(place);
    }
    head.replaceChildren(names, ...(columns.some((c) => c.filter) ? [filters] : []));
  }
  function filterField(c) {
    const input = make("input");
    input.placeholder = c.filter;
    input.setAttribute("aria-label", `Filter by ${c.label}`);
    input.dataset.column = c.name;
    input.value = view.filters[c.name] ?? "";
    input.addEventListener("input", () => choose({ filters: { ...view.filters, [c.name]: input.value }, page: 0 }));
    return input;
  }
  function markHead(problems) {
    for (const cell of head.querySelectorAll("th")) {
      const direction = view.descending ? "descending" : "ascending";
      cell.setAttribute("aria-sort", cell.dataset.column === view.sort ? direction : "none");
    }
    for (const input of head.querySelectorAll("input")) {
      const { [input.dataset.column]: problem } = problems;
      const plain = numeric(columns.find((c) => c.name === input.dataset.column)) ? "A number, >0.5, <=12 or 3..7" : "Part of it";
      input.setAttribute("aria-invalid", problem ? "true" : "false");
      input.title = problem ?? plain;
    }
  }
  function opener(row) {
    const here = row.id === chosen;
    const name = open ? make("button") : make("a");
    if (open) {
      name.type = "button";
      name.setAttribute("aria-pressed", String(here));
    } else name.href = `#${encodeURI(row.id)}`;
    name.title = `Show ${row.id}`;
    return name;
  }
  function drawRow(page, i, tops) {
    const row = page[i];
    const result = make("tr");
    result.dataset.id = row.id;
    if (row.id === chosen) result.setAttribute("aria-current", "true");
    for (const c of columns) {
      if (c.merge && i && alike(page, i - 1, c.merge) > 1) continue;
      const cell = make("td", numeric(c) ? "rltable-number" : "");
      if (c.merge) cell.rowSpan = alike(page, i, c.merge);
      const inner = c.opens ? opener(row) : cell;
      fill(inner, row, c, tops[c.name], view.search.trim().toLowerCase() || (view.filters[c.name] ?? "").trim().toLowerCase());
      if (inner !== cell) cell.append(inner);
      const colour = paint(row, c);
      if (colour) cell.style.backgroundColor = colour;
      result.append(cell);
    }
    if (open) result.addEventListener("click", () => open(row));
    return result;
  }
  function show() {
    const { matches, problems } = chosenRows(rows, columns, view);
    const pages = Math.max(1, Math.ceil(matches.length / size));
    view.page = Math.min(Math.max(view.page, 0), pages - 1);
    const page = matches.slice(view.page * size, (view.page + 1) * size);
    const bars = columns.filter((c) => c.kind === "bar");
    const largest = (c) => rows.reduce((most, row) => Math.max(most, Math.abs(row[c.name] ?? 0)), 0);
    const tops = Object.fromEntries(bars.map((c) => [c.name, largest(c) || 1]));
    const focused = body.contains(element.getRootNode().activeElement) && element.getRootNode().activeElement;
    const id = focused && focused.closest("tr").dataset.id;
    markHead(problems);
    body.replaceChildren(...page.map((_, i) => drawRow(page, i, tops)));
    if (id) [...body.children].find((r) => r.dataset.id === id)?.querySelector("button, a")?.focus();
    const which = pages > 1 ? `, page ${view.page + 1} of ${pages}` : "";
    count.textContent = `${matches.length < rows.length ? `${matches.length} of ` : ""}${rows.length} ${label}${which}`;
    [back.disabled, on.disabled] = [view.page <= 0, view.page >= pages - 1];
    back.hidden = on.hidden = pages < 2;
    return matches;
  }

  return {
    element,
    // Show these rows; what the reader has chosen stays chosen.
    draw(next) {
      const same = JSON.stringify(next.columns) === JSON.stringify(columns);
      ({ columns, rows } = next);
      title.textContent = next.title ?? "";
      if (!same) drawHead();
      show();
    },
    // Mark a row, or none; with `reveal`, go to its page, past search and filters if they hide it.
    select(id, reveal = false) {
      chosen = id;
      const at = (matches) => matches.findIndex((row) => row.id === id);
      let matches = show();
      if (!reveal || !rows.some((row) => row.id === id)) return;
      if (at(matches) < 0) {
        Object.assign(view, { search: "", filters: {} });
        search.value = "";
        drawHead();
        matches = show();
      }
      choose({ page: Math.floor(at(matches) / size) });
      [...body.children].find((row) => row.dataset.id === id).scrollIntoView({ block: "nearest" });
    },
  };
}
