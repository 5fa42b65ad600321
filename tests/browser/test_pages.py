"The page of a run, opened from disk as a reader opens it."

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from synthetic import synthetic_record

from rl_notebook.records import RunFolder
from rl_notebook.views.report import Status, write_report

from .lab import SHOTS

LONGEST = """() => Math.max(0, ...[...document.querySelectorAll('.js-plotly-plot')].flatMap(
    plot => plot.data.map(trace => trace.x?.length ?? 0)))"""
# What is wider than the window, or wider than its place without scrolling there.
CUT_OFF = """width => [document.scrollingElement, ...document.querySelectorAll('.js-plotly-plot, .card:not(.scroll)')]
    .filter(e => e.scrollWidth > Math.min(width, e.clientWidth + 1)).map(e => e.className || e.tagName)"""


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    "A run of six steps."
    run = RunFolder.create(tmp_path / "sums", {"base_model": "tiny", "policy_loss": "grpo", "kl_beta": 0.001})
    for step in range(1, 7):
        run.add(synthetic_record(step, steps=7, groups=4, completions=5))
    return run


@pytest.mark.parametrize("width", [1280, 800])
def test_a_report_fits_its_window(open_page: Callable[..., Page], run: RunFolder, width: int):
    page = open_page(write_report(run, run.path / "report.html"), width)
    page.locator(".js-plotly-plot .main-svg").first.wait_for()
    assert page.evaluate(LONGEST) >= 6
    assert page.evaluate(CUT_OFF, width) == []
    page.screenshot(path=SHOTS / f"report_{width}.png", full_page=True)


def test_a_page_follows_its_run_and_stays_where_it_is_read(open_page: Callable[..., Page], run: RunFolder):
    path = run.path / "report.html"
    page = open_page(write_report(run, path, status=Status("running", "Running: step 6."), refresh=0.5))
    expect(page.locator("body")).to_contain_text("Running: step 6.")
    page.evaluate("() => { window.marked = true; document.scrollingElement.scrollTop = 300; }")
    run.add(synthetic_record(7, steps=7, groups=4, completions=5))
    write_report(run, path, status=Status("running", "Running: step 7."), refresh=0.5)
    expect(page.locator("body")).to_contain_text("Running: step 7.")
    assert page.evaluate("() => window.marked") is None, "it has read the page again"
    page.wait_for_function("() => document.scrollingElement.scrollTop === 300")
    assert page.evaluate(LONGEST) >= 7
    write_report(run, path, status=Status("finished", "Finished after step 7."))
    expect(page.locator("body")).to_contain_text("Finished after step 7.")
    page.wait_for_function("() => document.scrollingElement.scrollTop === 300")


def test_a_page_of_very_many_steps_is_drawn(open_page: Callable[..., Page], tmp_path: Path):
    records = [replace(synthetic_record(1, groups=2, completions=2), step=step) for step in range(1, 2001)]
    page = open_page(write_report(records, tmp_path / "report.html"))
    page.locator(".js-plotly-plot .main-svg").first.wait_for()
    assert 0 < page.evaluate(LONGEST) <= 2000
