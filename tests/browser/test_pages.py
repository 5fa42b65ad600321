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


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 800])
def test_completions_are_sorted_searched_and_have_an_address(
    open_page: Callable[..., Page], run: RunFolder, width: int, scheme: str
):
    page = open_page(write_report(run, run.path / "report.html"), width)
    page.emulate_media(color_scheme=scheme)
    tables = page.locator(".rltable")
    expect(tables).to_have_count(3)
    first = tables.first
    expect(first.get_by_role("status")).to_have_text("20 completions, page 1 of 3")
    expect(first.locator("td[rowspan='5']")).to_have_count(1)  # a prompt beside its completions
    tables.last.scroll_into_view_if_needed()
    page.screenshot(path=SHOTS / f"report_table_{scheme}_{width}.png")
    first.get_by_role("button", name="reward").click()
    first.get_by_role("button", name="reward").click()
    rewards = [*map(float, first.locator("tbody td:nth-last-child(4)").all_inner_texts())]
    assert rewards == sorted(rewards, reverse=True)
    assert rewards[0] == max(s.reward for g in run.record(1).groups for s in g.samples)
    first.get_by_label("Search completions").fill(run.record(1).groups[2].samples[0].text.split()[0])
    first.locator("tbody a").first.click()
    chosen = page.locator("tr[aria-current]")
    expect(chosen).to_have_count(1)
    address = page.url
    assert address.endswith("#" + chosen.get_attribute("data-id"))
    page.goto(address.split("#")[0] + "#6-2-4")  # in another table
    expect(tables.last.locator("tr[aria-current]")).to_have_attribute("data-id", "6-2-4")
    expect(chosen).to_have_count(1)
    expect(chosen).to_be_in_viewport()
    page.screenshot(path=SHOTS / f"report_row_{scheme}_{width}.png")


def test_a_page_follows_its_run_and_stays_where_it_is_read(open_page: Callable[..., Page], run: RunFolder):
    path = run.path / "report.html"
    page = open_page(write_report(run, path, status=Status("running", "Running: step 6."), refresh=0.5))
    expect(page.locator("body")).to_contain_text("Running: step 6.")
    page.get_by_role("button", name="reward").first.click()
    page.evaluate("() => { window.marked = true; document.scrollingElement.scrollTop = 300; }")
    run.add(synthetic_record(7, steps=7, groups=4, completions=5))
    write_report(run, path, status=Status("running", "Running: step 7."), refresh=0.5)
    expect(page.locator("body")).to_contain_text("Running: step 7.")
    assert page.evaluate("() => window.marked") is None, "it has read the page again"
    page.wait_for_function("() => document.scrollingElement.scrollTop === 300")
    expect(page.locator("th[aria-sort=ascending]")).to_have_text("reward")  # as it was chosen
    assert page.evaluate(LONGEST) >= 7
    write_report(run, path, status=Status("finished", "Finished after step 7."))
    expect(page.locator("body")).to_contain_text("Finished after step 7.")
    page.wait_for_function("() => document.scrollingElement.scrollTop === 300")


def test_a_page_of_very_many_steps_is_drawn(open_page: Callable[..., Page], tmp_path: Path):
    records = [replace(synthetic_record(1, groups=2, completions=2), step=step) for step in range(1, 2001)]
    page = open_page(write_report(records, tmp_path / "report.html"))
    page.locator(".js-plotly-plot .main-svg").first.wait_for()
    assert 0 < page.evaluate(LONGEST) <= 2000
