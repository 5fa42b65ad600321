"marimo's real front end: the token inspector is live there, dashboard and sliders are pictures, phases are drawn."

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from .lab import PATIENCE, free_port

pytest.importorskip("marimo", reason="pip install marimo")
pytestmark = [pytest.mark.slow, pytest.mark.browser]

CELLS = """
import marimo
app = marimo.App()

@app.cell
async def _():
    from rl_notebook.backends.local import open_local
    from rl_notebook.config import Config
    from rl_notebook.loop import GRPOLoop
    from rl_notebook.toy import load_model, toy_reward, toy_rows
    backend = open_local(*load_model("tiny"))
    cfg = Config(prompt_groups_per_step=2, completions_per_prompt=4, max_completion_tokens=24)
    loop = GRPOLoop(backend, toy_rows(64), toy_reward, cfg)
    record = await loop.step()
    return backend, loop, record

@app.cell
def _(loop):
    from rl_notebook.views.dashboard import Dashboard
    Dashboard(loop)
    return

@app.cell
def _(backend, record):
    from rl_notebook.views.tokens import inspect_tokens
    inspect_tokens(record, backend.tokenizer)
    return

@app.cell
def _(record):
    from rl_notebook.views.whatif import WhatIfPanel
    WhatIfPanel(record)
    return

@app.cell
def _(record):
    record
    return
"""


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    "A marimo app that shows a step."
    (tmp_path / "app.py").write_text(CELLS)
    port = free_port()
    command = [sys.executable, "-m", "marimo", "run", "app.py", "--headless", "--no-token", "--port", str(port)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    server = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(PATIENCE):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=2).close()
                break
            except OSError:
                assert server.poll() is None, "marimo did not start"
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.terminate()
        server.wait(30)


def test_views_in_marimo(address: str, browser: Browser):
    page = browser.new_page()
    page.goto(address)
    body = page.locator("body")
    expect(body).to_contain_text("best and worst", timeout=PATIENCE * 1000)  # the step, drawn
    expect(body).to_contain_text("completions of step 1")  # the dashboard's picture
    expect(body).not_to_contain_text("Dashboard(step")
    expect(body).not_to_contain_text("WhatIfPanel(")
    expect(body).to_contain_text("group 0, sample 0 (row")
    page.get_by_role("button", name="›").click()  # the next sample, asked of the kernel
    expect(body).to_contain_text("group 0, sample 1 (row", timeout=30_000)
    page.close()
