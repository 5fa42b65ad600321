"What a model wrote is shown as text, whatever it wrote."

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Locator, Page, expect
from rl_notebook.views.report import write_report

from .hostile import CLOSING, HARM, HARMLESS, LONG_TEXT, OPENING, SHORT_TEXT, hostile_record
from .lab import HEAT, Lab, Notebook, Watch

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("text", [SHORT_TEXT, LONG_TEXT], ids=["short", "100 kB"])
def test_in_a_report(open_page: Callable[..., Page], tmp_path: Path, text: str):
    records = [hostile_record(step, text) for step in (1, 2)]
    page = open_page(write_report(records, tmp_path / "report.html", title=SHORT_TEXT))
    page.locator(".js-plotly-plot").first.wait_for()
    assert page.evaluate(HARM) == HARMLESS
    shown_text = page.locator("td .rltable-block").first.inner_text()
    assert OPENING in shown_text
    assert "</script><script>window.pwned = 'script'</script><img src=x" in shown_text
    assert all(mark in shown_text for mark in ("\\u001b[31mred", "\\u202eright to left"))
    assert shown_text.rstrip().endswith(CLOSING)


def test_harm_is_seen(
    open_page: Callable[..., Page], tmp_path: Path, watch: Watch, context: BrowserContext
):
    (tmp_path / "page.html").write_text(f"<!doctype html><title>unescaped</title><p>{SHORT_TEXT}")
    page = open_page(tmp_path / "page.html")
    # an image fails a moment later
    page.wait_for_function("window.pwned !== undefined && window.pwned !== 'script'")
    harm = page.evaluate(HARM)
    assert harm["pwned"] != "undefined"
    assert [text.split()[0] for text in harm["elements"]] == [
        "<script>window.pwned",
        "<img",
        "<svg",
        "<iframe",
        "<a",
        "<style>body",
    ]
    assert harm["hidden"]
    assert watch.take(context)


CELLS = {
    "record": """
from IPython.display import display
from browser.hostile import LONG_TEXT, HostileTokenizer, hostile_record
from rl_notebook.loop.step import list_groups
from rl_notebook.views.charts import charts
from rl_notebook.views.payloads import History, history_row, run_payloads, step_payloads
from rl_notebook.views.tokens import inspect_tokens, WithFallback
from rl_notebook.insight.xray import xray

records = [hostile_record(1), hostile_record(2, LONG_TEXT)]
records[0]""",
    "long record": "records[1]",
    "groups": "list_groups(records[0].groups)",
    "printed": "print(records[0])\nprint(records[0].groups[0].samples[0].text)",
    "table": "records[0].completions_table()",
    "xray": "display(*map(xray, records))",
    "charts": """
all_charts = charts(run_payloads(History(map(history_row, records)), records[0].options)) | charts(step_payloads(records[1]))
display(*all_charts.values())""",
    "live charts": """
shown = [all_charts["functions"], all_charts["advantages"]]
display(*(WithFallback(c.live(), c.static_html()) for c in shown))""",
    "inspector": "inspect_tokens(records[0], HostileTokenizer())",
    "dashboard": """
from rl_notebook.backends.local.trainer import open_local
from rl_notebook.config.config import Config
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_reward, toy_rows
from rl_notebook.views.dashboard import Dashboard

dashboard = Dashboard(GRPOLoop(open_local(*load_model("tiny")), toy_rows(4), toy_reward, Config()))
for record in records:
    dashboard.update(record)
dashboard""",
}


@pytest.fixture(scope="module")
def notebook(lab: Lab):
    "Records of hostile text, displayed in every way."
    notebook = lab.open(list(CELLS.values()), "hostile.ipynb")
    notebook.run_all()
    yield notebook
    notebook.close()


def view(notebook: Notebook, name: str) -> Locator:
    "The output of a cell of CELLS, in view."
    return notebook.show(list(CELLS).index(name))


def test_in_a_notebook(notebook: Notebook):
    assert notebook.failures() == []
    for name in CELLS:
        output = view(notebook, name)
        output.locator(":scope > :visible").first.wait_for()
        assert notebook.page.evaluate(HARM) == HARMLESS, name
    for name in ("record", "long record"):
        assert OPENING in view(notebook, name).inner_text()
    notebook.shot("hostile_notebook")


def test_in_live_charts(notebook: Notebook):
    plots = view(notebook, "live charts").locator(".js-plotly-plot")
    plots.last.locator(".main-svg").first.wait_for()
    plots.first.locator(".legendtext").filter(has_text="<script>window.pwned").wait_for()
    notebook.page.mouse.move(*plots.last.evaluate(HEAT, [1, 2]))
    expect(plots.last.locator(".hoverlayer .hovertext")).to_contain_text("<script>window.pwned")
    assert notebook.page.evaluate(HARM) == HARMLESS
    notebook.shot("hostile_charts", list(CELLS).index("live charts"))


def test_in_the_inspector(notebook: Notebook):
    inspector = view(notebook, "inspector").locator(".rlt[data-ready]")
    inspector.wait_for()
    inspector.locator(".rlt-strip [data-target]").last.hover()
    text = inspector.locator(".rlt-strip").inner_text()
    assert "<script>window.pwned" in text
    assert "\u202e" not in text
    inspector.locator(".rlt-sample").select_option(index=1)
    inspector.locator(".rlt-worst tbody button").first.click()
    assert notebook.page.evaluate(HARM) == HARMLESS
    notebook.shot("hostile_inspector", list(CELLS).index("inspector"))


def test_in_the_dashboard(notebook: Notebook):
    board = view(notebook, "dashboard").locator(".rld").first
    pane = board.locator(".rld-completion")
    board.locator(".rld-table tbody tr").nth(1).click()
    completion = pane.locator("pre").last
    expect(completion).to_contain_text(OPENING)
    assert "<script>window.pwned = 'script'</script>" in completion.text_content()
    assert "\u202e" not in completion.text_content()
    assert completion.text_content().rstrip().endswith(CLOSING)
    assert notebook.page.evaluate(HARM) == HARMLESS
    notebook.shot("hostile_dashboard")
