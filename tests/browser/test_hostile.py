"What a model wrote is shown as text, whatever it wrote."

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Page
from rl_notebook.views.report import write_report

from .hostile import CLOSING, HARM, HARMLESS, LONG, OPENING, SHORT, hostile_record
from .lab import Lab, Notebook, Watch


@pytest.mark.parametrize("text", [SHORT, LONG], ids=["short", "100 kB"])
def test_in_a_report(open_page: Callable[[Path], Page], tmp_path: Path, text: str):
    records = [hostile_record(step, text) for step in (1, 2)]
    page = open_page(write_report(records, tmp_path / "report.html", title=SHORT))
    page.locator(".js-plotly-plot").first.wait_for()
    assert page.evaluate(HARM) == HARMLESS
    said = page.locator("td .said").first.inner_text()
    assert OPENING in said
    assert "</script><script>window.pwned = 'script'</script><img src=x" in said
    assert all(mark in said for mark in ("\\u001b[31mred", "\\u202eright to left"))
    assert said.rstrip().endswith(CLOSING)


def test_harm_is_seen(open_page: Callable[[Path], Page], tmp_path: Path, watch: Watch, context: BrowserContext):
    (tmp_path / "page.html").write_text(f"<!doctype html><title>unescaped</title><p>{SHORT}")
    page = open_page(tmp_path / "page.html")
    page.wait_for_function("window.pwned !== undefined && window.pwned !== 'script'")  # an image fails a moment later
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


CELLS = [
    "from browser.hostile import LONG, hostile_record\nfrom rl_notebook.step import list_groups",
    "record = hostile_record()\nrecord",
    "hostile_record(text=LONG)",
    "list_groups(record.groups)",
    "print(record)\nprint(record.groups[0].samples[0].text)",
    "record.completions_table()",
]


@pytest.fixture(scope="module")
def notebook(lab: Lab):
    "Records of hostile text, displayed in every way."
    notebook = lab.open(CELLS, "hostile.ipynb")
    notebook.run_all()
    yield notebook
    notebook.close()


def test_in_a_notebook(notebook: Notebook):
    assert notebook.failures() == []
    assert notebook.page.evaluate(HARM) == HARMLESS
    for index in (1, 2):
        assert OPENING in notebook.show(index).inner_text()
    notebook.shot("hostile_notebook")
