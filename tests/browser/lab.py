"A separate JupyterLab, and notebooks in it that a test can run, read and press."

from __future__ import annotations

import ast
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.sync_api import (
    BrowserContext,
    ConsoleMessage,
    Locator,
    Page,
    Request,
    TimeoutError,
    WebSocket,
)

TESTS = Path(__file__).resolve().parents[1]
SHOTS = Path(__file__).parent / "shots"
TIMEOUT = 180  # seconds that cells, or the start of a server, may take on a busy machine
MILLIS = 60_000  # that a page may take to show something

SETTINGS = {
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/docmanager-extension/plugin": {"autosave": False},  # tests save when they mean to
}
START = "from offline import stay_here; stay_here(); "  # of the server and of each kernel

# What JupyterLab itself writes to the console, and why it does no harm.
HARMLESS: dict[str, str] = {}


# --- what must not happen --------------------------------------------------------------------------------------------


@dataclass
class Watch:
    "Collects what no page may do: log an error, raise one, or ask another machine for anything."

    complaints: list[str] = field(default_factory=list)

    def follow(self, context: BrowserContext) -> None:
        "Listen to every page of a context, present and future."
        context.on("console", self._console)
        context.on("weberror", lambda e: self.complaints.append(f"page error: {e.error}"))
        context.on("request", self._request)
        context.on("page", lambda page: page.on("websocket", self._socket))

    def take(self, context: BrowserContext) -> list[str]:
        "The complaints since the last call."
        for page in context.pages:
            page.evaluate("0")  # what was said until now has arrived once this has
        result = self.complaints[:]
        self.complaints[:] = []
        return result

    def _console(self, message: ConsoleMessage) -> None:
        if message.type == "error" and not any(re.search(sign, message.text) for sign in HARMLESS):
            self.complaints.append(
                f"console error: {message.text} ({message.location.get('url', '')})"
            )

    def _request(self, request: Request) -> None:
        page_itself = request.url.startswith("file:") and request.is_navigation_request()
        if not page_itself and not request.url.startswith(
            ("http://127.0.0.1:", "data:", "blob:", "about:")
        ):
            self.complaints.append(
                f"request leaves this machine: {request.method} {request.url[:200]}"
            )

    def _socket(self, socket: WebSocket) -> None:
        if not socket.url.startswith("ws://127.0.0.1:"):
            self.complaints.append(f"socket leaves this machine: {socket.url[:200]}")


# --- the server -------------------------------------------------------------------------------------------------------


def free_port() -> int:
    "A port of 127.0.0.1 that no one listens on."
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def separate_folders(home: Path) -> dict[str, str]:
    "Environment of a Jupyter that shares nothing with the user's: folders, settings, start-up of kernels."
    for plugin, values in SETTINGS.items():
        file = home / "settings" / f"{plugin}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    startup = home / "ipython" / "profile_default" / "startup" / "00-offline.py"
    startup.parent.mkdir(parents=True)
    startup.write_text(START)
    folders = ("config", "data", "runtime")
    return {f"JUPYTER_{name.upper()}_DIR": str(home / name) for name in folders} | {
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "IPYTHONDIR": str(home / "ipython"),
    }


@contextmanager
def jupyter_lab(home: Path, context: BrowserContext) -> Iterator[Lab]:
    "A JupyterLab on a free port of 127.0.0.1 whose kernels are the python that runs the tests."
    root = home / "notebooks"
    port = free_port()
    token = secrets.token_hex(16)
    root.mkdir(parents=True)
    keys = re.compile(r"JUPYTER|.*(_API_KEY|_TOKEN)$")
    env = {
        name: value for name, value in os.environ.items() if not keys.match(name)
    } | separate_folders(home)
    ours = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    env |= {"JUPYTER_TOKEN": token, "OMP_NUM_THREADS": "1", "PYTHONPATH": ours}
    command = [sys.executable, "-c", START + "from jupyterlab.labapp import main; main()"]
    options = {
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.port": port,
        "ServerApp.port_retries": 0,
        "ServerApp.root_dir": root,
        "ServerApp.open_browser": False,
        "ServerApp.allow_root": True,
        "LabApp.news_url": None,
        "LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
        "LabApp.extension_manager": "readonly",
        "LabApp.expose_app_in_browser": True,
    }
    log = home / "lab.log"
    with log.open("w") as out:
        command += [f"--{name}={value}" for name, value in options.items()]
        server = subprocess.Popen(command, cwd=root, env=env, stdout=out, stderr=out)
    try:
        lab = Lab(f"http://127.0.0.1:{port}", token, root, context)
        deadline = time.monotonic() + TIMEOUT
        while not lab.answers():
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()[-4000:]}")
            time.sleep(0.2)
        yield lab
        lab.close()
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()


@dataclass(eq=False)
class Lab:
    "A running JupyterLab and the browser that looks at it."

    url: str
    token: str
    root: Path  # where its notebooks are
    context: BrowserContext
    opened: list[Notebook] = field(default_factory=list)
    page: Page | None = None  # JupyterLab, loaded once; each notebook is a tab of it

    def request(self, method: str, path: str, body: Any = None) -> Any:
        "An answer of the server's REST interface."
        headers = {"Authorization": f"token {self.token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
            text = reply.read()
        return json.loads(text) if text else None

    def answers(self) -> bool:
        "Whether the server is up."
        try:
            return bool(self.request("GET", "api"))
        except OSError:
            return False

    def open(self, source: Path | Sequence[str], name: str = "") -> Notebook:
        "Copy a notebook, or make one of cells of code, and open it with a live kernel."
        name = name or (
            source.name if isinstance(source, Path) else f"notebook_{len(self.opened)}.ipynb"
        )
        if isinstance(source, Path):
            shutil.copy(source, self.root / name)
        else:
            kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
            cell = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
            cells = [{**cell, "id": f"cell-{i}", "source": text} for i, text in enumerate(source)]
            content = {
                "cells": cells,
                "metadata": {"kernelspec": kernel},
                "nbformat": 4,
                "nbformat_minor": 5,
            }
            (self.root / name).write_text(json.dumps(content), encoding="utf-8")
        # A session made beforehand: else Lab now and then asks which kernel to take.
        body = {"path": name, "name": name, "type": "notebook", "kernel": {"name": "python3"}}
        self.request("POST", "api/sessions", body)
        if self.page is None or self.page.is_closed():
            self.page = self.context.new_page()
        notebook = Notebook(self, name, self.page)
        self.opened.append(notebook)
        notebook.load()
        return notebook

    def close(self) -> None:
        "Close what is open."
        for notebook in list(self.opened):
            notebook.close()


# --- a notebook -------------------------------------------------------------------------------------------------------

PANEL = "window.jupyterapp.shell.currentWidget"
OPEN = "path => { window.jupyterapp.commands.execute('docmanager:open', { path }); }"
# Without a question about what has not been saved.
CLOSE = """name => [...window.jupyterapp.shell.widgets('main')]
    .filter(panel => panel.context?.path === name).forEach(panel => panel.dispose())"""
# The execution indicator says idle too early: ask the session itself.
CONNECTED = """async (name) => {
    const panel = window.jupyterapp?.shell?.currentWidget;
    const session = panel?.sessionContext;
    if (!session || panel.context.path !== name) return false;
    await session.ready;
    const kernel = session.session?.kernel;
    if (!kernel) return false;
    await kernel.info;
    return kernel.connectionStatus === 'connected' && kernel.status === 'idle';
}"""
# All cells have run, or one has failed; and the kernel is idle.
FINISHED = f"""() => {{
    const panel = {PANEL};
    const cells = panel.content.widgets.filter(c => c.model.type === 'code' && c.model.sharedModel.getSource().trim());
    const failed = cells.some(c => c.model.outputs.toJSON().some(o => o.output_type === 'error'));
    const waiting = cells.some(c => c.model.executionState === 'running' || c.prompt === '*');
    return panel.sessionContext.session?.kernel?.status === 'idle' && !waiting
        && (failed || cells.every(c => c.model.executionCount !== null));
}}"""
# A cell runs, or has run since its count was the one given.
STARTED = f"""([i, before]) => {{
    const model = {PANEL}.content.widgets[i].model;
    return model.executionState === 'running' || ![null, before].includes(model.executionCount);
}}"""
ASK = f"""async (expression) => {{
    const kernel = {PANEL}.sessionContext.session.kernel;
    const user_expressions = {{asked: `__import__('json').dumps(${{expression}})`}};
    const reply = await kernel.requestExecute({{code: '', store_history: false, user_expressions}}).done;
    const asked = reply.content.user_expressions?.asked ?? reply.content;
    return asked.status === 'ok' ? asked.data['text/plain'] : `raise ${{asked.ename}}: ${{asked.evalue}}`;
}}"""
# The middle of a cell of a heat map, in the window.
HEAT = """(plot, [group, sample]) => {
    plot.scrollIntoView({block: 'center'});
    const box = plot.querySelector('.nsewdrag').getBoundingClientRect();
    return [box.x + plot._fullLayout.xaxis.d2p(sample), box.y + plot._fullLayout.yaxis.d2p(group)];
}"""


@dataclass(eq=False)
class Notebook:
    "A notebook that is open in the browser."

    lab: Lab
    name: str
    page: Page

    @property
    def path(self) -> Path:
        "Its file."
        return self.lab.root / self.name

    def load(self) -> None:
        "Open it and wait for its kernel; JupyterLab starts one where there is none."
        page = self.page
        if page.url.startswith(self.lab.url):
            page.evaluate(OPEN, self.name)
        else:
            address = (
                f"{self.lab.url}/lab/workspaces/tests/tree/{self.name}?reset&token={self.lab.token}"
            )
            page.goto(address, wait_until="domcontentloaded")
        self.until_true(CONNECTED, self.name)
        page.locator(".jp-NotebookPanel:visible .jp-Cell").first.wait_for()
        page.evaluate(
            "() => { const s = window.jupyterapp.shell; s.collapseLeft(); s.collapseRight(); }"
        )

    def menu(self, *labels: str) -> None:
        "Choose from the menu bar, as a hand would."
        self.page.locator(".lm-MenuBar-itemLabel").get_by_text(labels[0], exact=True).click()
        for label in labels[1:]:
            self.page.locator(".lm-Menu-itemLabel").get_by_text(label, exact=True).click()

    def start_all(self) -> None:
        "Run > Run All Cells; returns as soon as the kernel has been asked."
        started = (
            self.page.locator(".jp-InputPrompt").filter(has_text=re.compile(r"\[[0-9*]+\]")).first
        )
        for _ in range(5):  # a menu can be clicked before it is wired up
            self.menu("Run", "Run All Cells")
            try:
                return started.wait_for(timeout=8000)
            except TimeoutError:
                continue
        raise AssertionError(f"{self.name}: Run All Cells had no effect")

    def wait(self) -> None:
        "Until every cell has run, or one has failed, and the kernel is idle."
        self.page.wait_for_function(FINISHED, timeout=TIMEOUT * 1000)

    def run_all(self) -> None:
        "Run all cells through the menu and wait for the end."
        self.start_all()
        self.wait()

    def start_cell(self, index: int) -> None:
        "Select a cell and press Shift+Enter; returns as soon as it runs, or has run."
        before = self.page.evaluate(f"i => {PANEL}.content.widgets[i].model.executionCount", index)
        for _ in range(5):  # a key is lost when a redraw takes the focus from the cell
            self.page.evaluate(
                f"i => {{ const n = {PANEL}.content; n.activeCellIndex = i; n.mode = 'command'; }}",
                index,
            )
            self.cell(index).locator(".jp-InputPrompt").click()
            self.page.keyboard.press("Shift+Enter")
            try:
                self.page.wait_for_function(STARTED, arg=[index, before], timeout=10_000)
            except TimeoutError:
                continue
            return
        raise AssertionError(f"{self.name}: Shift+Enter in cell {index} had no effect")

    def runs(self, index: int) -> bool:
        "Whether a cell is running, or waits for its turn."
        return self.page.evaluate(
            f"i => {PANEL}.content.widgets[i].model.executionState === 'running'", index
        )

    def wait_for_cell(self, index: int) -> None:
        "Until a cell that was started has run."
        done = f"i => (m => m.executionState !== 'running' && m.executionCount !== null)({PANEL}.content.widgets[i].model)"
        self.page.wait_for_function(done, arg=index, timeout=TIMEOUT * 1000)

    def run_cells(self, *indexes: int) -> None:
        "Run cells, one after the other."
        for index in indexes:
            self.start_cell(index)
            self.wait_for_cell(index)

    def cell(self, index: int) -> Locator:
        "A cell by its position."
        return self.page.locator(".jp-NotebookPanel:visible .jp-Notebook .jp-Cell").nth(index)

    def output(self, index: int) -> Locator:
        "The outputs of a cell."
        return self.cell(index).locator(".jp-Cell-outputArea")

    def show(self, index: int) -> Locator:
        "Scroll to a cell (JupyterLab renders only what is near) and return its outputs."
        self.page.evaluate(f"i => {PANEL}.content.scrollToItem(i, 'start')", index)
        self.output(index).scroll_into_view_if_needed()
        return self.output(index)

    def outputs(self) -> list[list[dict[str, Any]]]:
        "The outputs of each cell, as the notebook's file would hold them."
        return self.page.evaluate(
            f"() => {PANEL}.content.widgets.map(c => c.model.outputs?.toJSON() ?? [])"
        )

    def failures(self) -> list[str]:
        "What its cells raised."
        errors = (o for outs in self.outputs() for o in outs if o["output_type"] == "error")
        return [f"{o['ename']}: {o['evalue']}" for o in errors]

    def ask(self, expression: str) -> Any:
        "The value of an expression in the kernel, through JSON."
        text = self.page.evaluate(ASK, expression)
        assert not text.startswith("raise "), text
        return json.loads(ast.literal_eval(text))

    def until(self, expression: str) -> None:
        "Wait until an expression is true in the kernel, which has by then done all that it was sent before."
        self.until_true(f"async e => (await ({ASK})(e)) === `'true'`", f"bool({expression})")

    def until_true(self, function: str, argument: Any = None) -> None:
        "Wait until an async function of the page says true; `wait_for_function` takes its promise for a yes."
        deadline = time.monotonic() + TIMEOUT
        while not self.page.evaluate(function, argument):
            assert time.monotonic() < deadline, (
                f"not true within {TIMEOUT} s: {argument or function}"
            )
            self.page.wait_for_timeout(100)

    def shut_down(self) -> None:
        "End its kernel."
        for session in self.lab.request("GET", "api/sessions"):
            if session["path"] == self.name:
                self.lab.request("DELETE", f"api/sessions/{session['id']}")

    def width(self, width: int, height: int) -> None:
        "Resize the window."
        self.page.set_viewport_size({"width": width, "height": height})

    def shot(self, name: str, index: int | None = None) -> Path:
        "A picture of the window, or of the outputs of one cell in a window that is high enough for them."
        path = SHOTS / f"{name}.png"
        size = self.page.viewport_size
        if index is None:
            self.page.screenshot(path=path)
            return path
        try:
            self.width(
                size["width"], min(4000, 150 + int(self.show(index).bounding_box()["height"]))
            )
            self.show(index).screenshot(path=path)
        finally:
            self.page.set_viewport_size(size)
        return path

    def close(self) -> None:
        "Close it and end the kernel; the page, too, where a dialog would be in the way of the next one."
        if self in self.lab.opened:
            self.lab.opened.remove(self)
            self.page.evaluate(CLOSE, self.name)
            if self.page.locator(".jp-Dialog").count():
                self.page.close()
            self.shut_down()
