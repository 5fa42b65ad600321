"The widgets in a page without a kernel, as html-manager renders them: for VS Code, Colab, voilà and exported pages."

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from . import html_manager
from .lab import SHOTS


@pytest.fixture(scope="module")
def packages() -> None:
    "html-manager and what loads it."
    try:
        for package in html_manager.PACKAGES:
            html_manager.fetch_package(package)
    except OSError as error:
        pytest.skip(f"html-manager is not here and cannot be fetched: {error}")


@pytest.fixture(scope="module")
def page(
    packages: None, context: BrowserContext, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Page]:
    "The page of `write_run`."
    folder = tmp_path_factory.mktemp("page")
    # Playwright keeps an event loop running in this thread
    with ThreadPoolExecutor(1) as elsewhere:
        elsewhere.submit(write_run, folder).result()
    with html_manager.serve_folder(folder) as address:
        page = context.new_page()
        page.set_viewport_size({"width": 1240, "height": 1400})
        page.goto(address)
        yield page
        page.close()


def write_run(folder: Path) -> None:
    "A page with a dashboard after three steps of eight groups, and the panel of what-if of the last one."
    from test_loop import make_loop

    from rl_notebook.views.dashboard import Dashboard
    from rl_notebook.views.whatif import WhatIfPanel

    loop = make_loop(rows=24, prompt_groups_per_step=8)
    asyncio.run(loop.run(3, progress=False))
    html_manager.write_page(
        folder, [Dashboard(loop).screen.root, WhatIfPanel(loop.records[-1]).widget]
    )


def test_a_dashboard_is_shown_without_a_kernel(page: Page):
    board = page.locator(".rld").first
    expect(board.locator(".js-plotly-plot .main-svg").first).to_be_visible()
    page.wait_for_function(
        "() => document.querySelectorAll('.js-plotly-plot .main-svg').length >= 6"
    )
    page.screenshot(path=SHOTS / "html_manager.png", full_page=True)
    expect(board.locator(".rld-controls button", has_text="Play")).to_be_visible()
    expect(board.locator(".rld-words")).to_contain_text("Step 3.")


def test_no_row_of_the_rewards_is_cut(page: Page):
    box = page.locator(".rld-value")
    rows = page.locator(".rld-hint tbody tr")
    expect(rows).to_have_count(8)
    end = box.evaluate("e => e.getBoundingClientRect().bottom")
    assert all(
        row.evaluate("e => e.getBoundingClientRect().bottom") <= end + 1 for row in rows.all()
    )
    assert box.evaluate("e => e.scrollHeight <= e.clientHeight + 1")


def test_its_table_is_sorted_and_its_sliders_are_there(page: Page):
    table = page.locator(".rld-table")
    table.get_by_role("button", name="reward").click()
    expect(table.locator("th[aria-sort=ascending]")).to_have_text("reward")
    expect(page.get_by_text("gradient: norm over the logprobs")).to_be_visible()
    expect(page.get_by_text("KL weight")).to_be_visible()


def test_tokens_are_inspected_without_a_kernel(
    packages: None, context: BrowserContext, tmp_path: Path
):
    from synthetic import synthetic_record

    from rl_notebook.views.tokens import inspect_tokens

    with ThreadPoolExecutor(1) as elsewhere:
        elsewhere.submit(
            lambda: html_manager.write_page(tmp_path, [inspect_tokens(synthetic_record(3))])
        ).result()
    with html_manager.serve_folder(tmp_path) as address:
        other = context.new_page()
        other.goto(address)
        expect(other.locator(".rlt-token").first).to_be_attached()
        expect(other.locator(".rlt-along figcaption")).to_contain_text("logprob by token")
        expect(other.locator(".rlt-coords")).to_contain_text(
            "entry i is of target i, which is token i + 1"
        )
        charts = other.locator(".js-plotly-plot .main-svg")
        expect(other.locator(".js-plotly-plot")).to_have_count(3)
        expect(charts.first).to_be_visible()
        expect(other.locator(".rlt-along .js-plotly-plot .main-svg").first).to_be_visible()
        other.screenshot(path=SHOTS / "html_manager_tokens.png", full_page=True)
        other.close()
