"Rollouts beside training, in the dashboard of JupyterLab and in the page of a run."

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Locator, Page, expect

from rl_notebook.runs.records import Run
from rl_notebook.views.report import write_report

from .lab import SHOTS, Lab, Notebook
from .test_dashboard import SHOW, control, open_dashboard, press
from .test_pages import CUT_OFF

pytestmark = pytest.mark.variant

CELLS = [
    """
import asyncio

from rl_notebook.loop.async_loop import AsyncGRPOLoop
from rl_notebook.backends.local.trainer import open_local
from rl_notebook.config.config import Config
from rl_notebook.core.types import RolloutSample
from rl_notebook.runs.records import RunFolder
from rl_notebook.task.toy import load_model, toy_rows
from rl_notebook.views.player import rows_in_flight
from rl_notebook.views.dashboard import Dashboard

pace = [0.2]  # seconds


async def slow(sample_prompt):
    tokens, index = sample_prompt["prompt_token_ids"], sample_prompt["sample_index"]
    await asyncio.sleep(pace[0] * (1 + sum(tokens) % 3))
    mask, right = [0] * len(tokens) + [1, 1], sum(tokens) % 7 and index % 2  # every seventh row teaches nothing
    return RolloutSample([*tokens, 5 + index, 2], [0.0] * len(tokens) + [-2.0, -0.1], mask, reward=float(right))


cfg = Config(
    recipe="async_rl_loop", prompt_groups_per_step=3, completions_per_prompt=4, max_completion_tokens=16,
    max_head_offpolicy_versions=2, learning_rate=1e-4,
)
run = RunFolder.create("beside", cfg)
loop = AsyncGRPOLoop(open_local(*load_model("tiny")), toy_rows(6000), slow, cfg, outputs=[run.add])


def steps() -> int:
    return loop.state.number - 1""",
    """
dashboard = Dashboard(loop)
dashboard""",
]
DRAWN = """step => [...document.querySelectorAll('.js-plotly-plot')].some(
    plot => plot.data.some(trace => trace.type === 'scatter' && [...(trace.x ?? [])].includes(step)))"""
STILL = "not dashboard.doing and not rows_in_flight(loop)"
TITLES = ["Rollouts beside training", "Staleness of trained groups", "Who waits"]


@pytest.fixture(scope="module")
def notebook(lab: Lab) -> Iterator[Notebook]:
    "A dashboard on a loop whose rollouts take a while."
    notebook = open_dashboard(lab, CELLS, "beside.ipynb")
    yield notebook
    notebook.close()


@pytest.fixture
def board(notebook: Notebook) -> Iterator[Locator]:
    "The dashboard, at rest afterwards."
    yield notebook.show(SHOW)
    notebook.ask("pace.__setitem__(0, 0.2) or dashboard.doing and dashboard.stop()")
    notebook.until(STILL)


def test_it_plays_and_draws_what_happens_beside(notebook: Notebook, board: Locator):
    press(board, "play")
    notebook.until("steps() >= 4")
    expect(board.locator(".rld-progress")).to_contain_text("rows in flight")
    for title in TITLES:
        expect(board.get_by_role("heading", name=title, exact=True)).to_be_visible()
    press(board, "stop")
    notebook.until(STILL)
    assert notebook.ask("[dashboard.error, loop.producer.held]") == [None, "the loop is at rest"]
    notebook.page.wait_for_function(DRAWN, arg=notebook.ask("steps()"))
    for width in (1280, 800):
        notebook.width(width)
        notebook.page.wait_for_timeout(500)
        notebook.shot(f"beside_dashboard_{width}", SHOW)
    notebook.width(1280)


def test_a_pause_starts_no_row_and_draining_waits_for_those_in_flight(notebook: Notebook, board: Locator):
    notebook.ask("pace.__setitem__(0, 1.0)")
    before = notebook.ask("steps()")
    press(board, "play")
    notebook.until(f"steps() > {before} and loop.running == 'sample' and rows_in_flight(loop)")
    press(board, "drain")
    expect(board.locator(".rld-progress")).to_contain_text("no row is started: paused")
    taken = notebook.ask("loop.intake.cursor.consumed")
    notebook.until("not dashboard.doing")
    assert notebook.ask("[rows_in_flight(loop), loop.intake.cursor.consumed]") == [0, taken]
    expect(control(board, "drain")).to_be_disabled()
    expect(board.locator(".rld-progress")).to_contain_text("0 rows in flight")
    assert notebook.ask("dashboard.error") is None

    press(board, "step")  # opens the gate again
    notebook.until(f"steps() > {before} + 1 and not dashboard.doing")
    assert notebook.ask("dashboard.error") is None


@pytest.mark.parametrize("width", [1280, 800])
def test_the_page_of_its_run(notebook: Notebook, board: Locator, open_page: Callable[..., Page], width: int):
    if not notebook.ask("steps()"):
        press(board, "step")
        notebook.until("steps()")
    run = Run.open(notebook.lab.root / "beside")
    page = open_page(write_report(run, run.path / "report.html"), width)
    page.locator(".js-plotly-plot .main-svg").first.wait_for()
    for title in (*TITLES, "Groups by staleness", "Rows in the pipeline"):
        expect(page.get_by_role("heading", name=title, exact=True)).to_be_visible()
    assert page.evaluate(CUT_OFF, width) == []
    page.screenshot(path=SHOTS / f"beside_report_{width}.png", full_page=True)
