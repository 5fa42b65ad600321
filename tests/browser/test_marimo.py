"marimo's real front end: inspector, dashboard and sliders are live there, phases are drawn."

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
    expect(body).to_contain_text("Completions of step 1")  # the dashboard's table
    expect(body).not_to_contain_text("Dashboard(step")
    expect(body).not_to_contain_text("WhatIfPanel(")
    expect(body).to_contain_text("group 0, sample 0 (row")
    page.get_by_role("button", name="›", exact=True).click()  # the next sample, asked of the kernel
    expect(body).to_contain_text("group 0, sample 1 (row", timeout=30_000)
    page.get_by_role("button", name="Step", exact=False).first.click()
    expect(body).to_contain_text("Completions of step 2", timeout=60_000)
    expect(page.locator(".rld-chart-reward svg.main-svg").first).to_be_visible()
    page.locator(".rld-table tbody tr").first.click()
    page.get_by_role("button", name="Settings").click()
    rate = page.locator(".rld-settings label", has_text="learning_rate").locator("input")
    rate.fill("0.5")
    rate.blur()
    page.get_by_role("button", name="Change").click()
    expect(page.locator(".rld-settings")).to_contain_text("-> 0.5, in step 3", timeout=30_000)
    page.get_by_role("button", name="Play").click()
    expect(page.get_by_role("button", name="Pause")).to_be_enabled()
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("button", name="Play")).to_be_enabled(timeout=60_000)
    page.get_by_role("button", name="Inspect").click()  # one more widget, in a place that was empty
    expect(page.locator(".rld-inspector")).to_contain_text("group 0, sample 0 (row", timeout=30_000)
    expect(page.get_by_role("button", name="Undo")).to_be_enabled()
    numbers = page.get_by_role("row", name="loss", exact=False).first
    before = numbers.inner_text()
    page.locator("label", has_text="mean over").locator("select").select_option("sequence_mean")
    expect(numbers).not_to_have_text(before, timeout=30_000)
    page.close()
