// The table of completions and the completion that is open.

import { button, make } from "./elements.js";
import { makeTable, number, visible } from "./table.js";

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
  let live = true;
  const send = (message) => live && model.send(message);
  const pane = make("div", "rld-pane");
  const left = make("div", "rld-table");
  const right = make("div", "rld-completion");
  right.setAttribute("aria-live", "polite");
  const table = makeTable({
    label: "completions",
    size: model.get("size"),
    view: model.get("view"),
    open: (row) => send({ open: [row.group, row.sample] }),
    changed(view) {
      if (!live) return;
      model.set("view", view);
      model.save_changes();
    },
  });
  left.append(table.element);
  pane.append(left, right);
  el.append(pane);

  const drawTable = () => table.draw(model.get("table"));
  function drawCompletion() {
    const open = model.get("completion");
    right.replaceChildren(...completion(open, model.get("inspecting"), send));
    right.hidden = !right.childElementCount;
    table.select(open.id ?? null);
  }
  function drawClose() {
    const close = right.querySelector(".rld-close");
    if (!close) return;
    if (close === el.getRootNode().activeElement) close.previousElementSibling.focus();
    close.hidden = !model.get("inspecting");
    if (close.hidden) return;
    const tokens = el.closest(".rld").querySelector(".rld-inspector"); // below the table; gone to once it is drawn
    new ResizeObserver((_, drawn) => {
      if (!tokens.offsetHeight) return;
      drawn.disconnect();
      tokens.scrollIntoView({ block: "start" });
    }).observe(tokens);
  }
  // A kernel that is gone responds to no button; the table needs none.
  function gone() {
    live = false;
    const board = el.closest(".rld");
    if (!board || board.querySelector(".rld-gone")) return;
    const text = "The kernel of this dashboard is gone: what it shows is from before. Run its cell again.";
    const note = make("p", "rld-error rld-gone", text);
    note.setAttribute("role", "alert");
    board.prepend(note);
    for (const control of board.querySelectorAll("button, select, input")) {
      if (!left.contains(control)) control.disabled = true;
    }
  }
  const kernel = model.widget_manager?.kernel; // JupyterLab's; only there is the end of a kernel reported
  kernel?.disposed.connect(gone);
  const listeners = { comm_live_update: gone, "change:table": drawTable, "change:completion": drawCompletion, "change:inspecting": drawClose };
  for (const [event, run] of Object.entries(listeners)) model.on(event, run);
  drawTable();
  drawCompletion();
  return () => {
    kernel?.disposed.disconnect(gone);
    for (const [event, run] of Object.entries(listeners)) model.off(event, run);
  };
}

export default { render };
