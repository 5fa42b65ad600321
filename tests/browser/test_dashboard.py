"The dashboard in JupyterLab: it updates while the loop runs, its buttons act while it runs, and it shows completions."

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from rl_notebook.views.charts import module, plotly_script

from .lab import HEAT, PANEL, Lab, Notebook

CELLS = [
    """
from rl_notebook.backends.local.trainer import open_local
from rl_notebook.config.config import Config
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.loop.state import LOOK_ONLY, PHASES
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_reward, toy_rows
from rl_notebook.views.dashboard import Dashboard, dashboards_of

failing = []


def reward(text: str, answer: str) -> float:
    if failing:
        raise ValueError("no reward today")
    return toy_reward(text, answer=answer)


cfg = Config(prompt_groups_per_step=3, completions_per_prompt=4, max_completion_tokens=16, learning_rate=1e-4)
loop = GRPOLoop(open_local(*load_model("tiny")), toy_rows(6000), reward, cfg)
pressed = []


walked = [phase for phase in PHASES if phase not in LOOK_ONLY]  # by the buttons


def place() -> list[int]:
    return [loop.state.number - 1, loop.state.number * len(walked) + walked.index(loop.state.current)]""",
    """
dashboard = Dashboard(loop)
for name, button in dashboard.screen.buttons.items():
    button.on_click(lambda _, name=name: pressed.append([name, *place()]))
dashboard""",
    "records = await loop.run(400, progress=False)",
    "6 * 7",
    "await loop.run(1, progress=False)",
    """
import time
from pathlib import Path

while not Path("done").exists():
    time.sleep(0.05)""",
    """
import time
from dataclasses import replace

cfg = replace(cfg, max_completion_tokens=32)
loop = GRPOLoop(loop.backend, toy_rows(40, split="hard"), reward, cfg)
engine = loop.backend.sampler.engine
run_steps = engine.run_steps
allowed = [3]


def wait_for_permission(steps=16):
    "Stop at a token of the first row until it may go on, as a large model would take its time."
    if engine.rows and len(engine.rows[0].tokens) >= allowed[-1]:
        time.sleep(0.05)
        return []
    return run_steps(1)


engine.run_steps = wait_for_permission""",
    "dashboard = Dashboard(loop)\ndashboard",
]
LOOP, SHOW, RUN, SCRATCH, FAIL, BUSY, SLOW_ENGINE, ROLLOUTS = range(len(CELLS))

# Points of the longest line that is drawn, noted whenever it changes.
RECORD = """() => {
    const lines = p => (p.data ?? []).filter(t => t.type === 'scatter' && t.y && !t.fill).map(t => t.y.length);
    const points = () => Math.max(0, ...[...document.querySelectorAll('.js-plotly-plot')].flatMap(lines));
    clearInterval(window.recorder);
    window.points = [];
    window.recorder = setInterval(() => points() !== window.points.at(-1) && window.points.push(points()), 20);
}"""
GREW = "n => window.points.length && window.points.at(-1) >= window.points[0] + n"


# The widget of the charts on a separate page, updated three hundred times before the page has time to draw once.
PILE = """async ([module, script, about]) => {
    const url = URL.createObjectURL(new Blob([module], { type: "text/javascript" }));
    const { default: widget } = await import(url);
    const data = steps => [{ type: "scatter", x: [...Array(steps).keys()], y: [...Array(steps).keys()] }];
    const figures = steps => ({ reward: { data: data(steps), layout: {} } });
    const state = { plotly: "IPY_MODEL_plotly", shown: [about], figures: figures(1) };
    const heard = {};
    const widget_manager = { get_model: async () => ({ get: () => script }) };
    const model = { widget_manager, get: n => state[n], on: (n, f) => (heard[n] = f), off() {} };
    await widget.render({ model, el: document.body });
    const drawn = (window.drawn = []);
    const react = Plotly.react;
    Plotly.react = (plot, data, ...more) => (drawn.push(data[0].y.length), react(plot, data, ...more));
    for (let steps = 2; steps <= 300; steps++) {
        state.figures = figures(steps);
        heard["change:figures"]();
    }
}"""

# plotly takes a moment to see what the mouse is on.
POINTED = "([plot, group, sample]) => plot._hoverdata?.[0]?.x === sample && plot._hoverdata[0].y === group"

THEME = "theme => window.jupyterapp.commands.execute('apputils:change-theme', { theme })"

# What the focus is on.
FOCUSED = """() => {
    const e = document.activeElement;
    return [...e.classList].find(c => /^rld-(play|pause|phase|step|stop|undo)$/.test(c))
        ?? (e.closest('.rld-speed') && 'speed') ?? (e.closest('.rltable-filters') && 'filter')
        ?? (e.closest('.rld-table tbody') && 'row') ?? (e.closest('.rld-table thead') && 'sort') ?? e.tagName;
}"""


def open_dashboard(lab: Lab, name: str) -> Notebook:
    "A notebook whose first cell makes a loop and whose second a dashboard on it; only these two have run."
    notebook = lab.open(CELLS, name)
    notebook.run_cells(LOOP, SHOW)
    assert notebook.failures() == []
    notebook.show(SHOW).locator(".rld").first.wait_for()
    return notebook


@pytest.fixture(scope="module")
def notebook(lab: Lab) -> Iterator[Notebook]:
    "A dashboard on a loop of the model that ships."
    notebook = open_dashboard(lab, "dashboard.ipynb")
    yield notebook
    notebook.close()


@pytest.fixture
def board(notebook: Notebook) -> Iterator[Locator]:
    "The dashboard, at rest before and after; the reward function does not fail."
    notebook.ask("failing.clear()")
    board = notebook.show(SHOW)
    yield board
    notebook.ask("dashboard.stop() if dashboard.doing else None")
    at_rest(notebook, board)


def control(board: Locator, name: str) -> Locator:
    "A button."
    return board.locator(f"button.rld-{name}")


def press(board: Locator, name: str) -> None:
    "Press a button as soon as it can be pressed."
    control(board, name).click()


def at_rest(notebook: Notebook, board: Locator) -> None:
    "Wait until nothing runs, and until the buttons show it."
    notebook.until("not (dashboard.doing or loop.running)")
    expect(control(board, "pause")).to_be_disabled()
    expect(control(board, "play")).to_be_enabled()


def test_points_appear_while_it_plays_and_the_kernel_is_free(notebook: Notebook, board: Locator):
    notebook.page.evaluate(RECORD)
    press(board, "play")
    notebook.page.wait_for_function(GREW, arg=2)
    notebook.start_cell(SCRATCH)
    expect(notebook.output(SCRATCH)).to_contain_text("42")
    assert control(board, "pause").is_enabled(), "it played on while the cell ran"
    before = notebook.page.evaluate("window.points.length")
    notebook.page.wait_for_function("n => window.points.length >= n + 2", arg=before)
    notebook.shot("dashboard_plays")
    press(board, "stop")
    at_rest(notebook, board)
    finished = notebook.ask("place()[0]")  # and the step in progress, once it has rewards
    notebook.page.wait_for_function("n => [n, n + 1].includes(window.points.at(-1))", arg=finished)
    points = notebook.page.evaluate("window.points")
    assert points == sorted(points)


@pytest.mark.slow
def test_a_pause_takes_effect_within_one_phase(notebook: Notebook, board: Locator):
    press(board, "play")
    press(board, "pause")
    at_rest(notebook, board)
    name, _, then = notebook.ask("pressed[-1]")
    assert name == "pause"
    assert 0 <= notebook.ask("place()[1]") - then <= 1
    rested = notebook.ask("place()")
    notebook.run_cells(SCRATCH)
    assert notebook.ask("place()") == rested
    press(board, "phase")  # and on from where it was held
    at_rest(notebook, board)
    assert notebook.ask("place()[1]") == rested[1] + 1


def test_one_phase_one_step_and_back(notebook: Notebook, board: Locator):
    press(board, "step")
    at_rest(notebook, board)
    steps, place = notebook.ask("place()")
    press(board, "phase")
    at_rest(notebook, board)
    assert notebook.ask("place()[1]") == place + 1
    press(board, "step")
    at_rest(notebook, board)
    assert notebook.ask("[place()[0], loop.state.current]") == [steps + 1, "prompts"]
    press(board, "undo")
    at_rest(notebook, board)
    assert notebook.ask("place()[0]") == steps


def test_a_click_on_the_heat_map_opens_that_completion(notebook: Notebook, board: Locator):
    press(board, "step")  # also ends what the head says of an undo before
    at_rest(notebook, board)
    pane = board.locator(".rld-completion")
    heat_map = board.locator(".js-plotly-plot").filter(
        has=notebook.page.locator(".heatmaplayer image")
    )
    for group, sample in ((0, 0), (2, 3), (1, 2)):
        notebook.page.mouse.move(*heat_map.evaluate(HEAT, [group, sample]))
        notebook.page.wait_for_function(POINTED, arg=[heat_map.element_handle(), group, sample])
        notebook.page.mouse.down()
        notebook.page.mouse.up()
        expect(pane.locator("h4").first).to_contain_text(f"group {group}, completion {sample}")
        text = notebook.ask(f"loop.records[-1].groups[{group}].samples[{sample}].text")
        assert pane.locator("pre").last.text_content() == text
    notebook.shot("dashboard_completion")
    pane.get_by_role("button", name="Inspect tokens").click()
    expect(board.locator(".rld-inspector .rlt-strip")).to_be_in_viewport()
    notebook.shot("dashboard_inspect")
    pane.get_by_role("button", name="Close tokens").click()
    heat_map.scroll_into_view_if_needed()
    read = pane.bounding_box()
    map_box = heat_map.bounding_box()
    whole = board.locator(".rld").bounding_box()
    assert read["x"] >= map_box["x"] + map_box["width"] - 1, "next to the map"
    assert abs(read["y"] - map_box["y"]) < 60
    assert whole["height"] < 1030  # about 1,000; a longer sentence wraps once more


def rewards_shown(board: Locator) -> list[float]:
    "The rewards of the table's page."
    return [*map(float, board.locator(".rld-table tbody td:nth-child(3)").all_inner_texts())]


def test_the_table_is_sorted_and_filtered_while_a_cell_keeps_the_kernel_busy(
    notebook: Notebook, board: Locator
):
    "And what was chosen stays for the next step."
    press(board, "step")
    at_rest(notebook, board)
    table = board.locator(".rld-table")
    expect(table.get_by_role("status")).to_have_text("12 completions, page 1 of 2")
    (notebook.lab.root / "done").unlink(missing_ok=True)
    notebook.start_cell(BUSY)
    notebook.show(SHOW)
    for order in (sorted, lambda values: sorted(values, reverse=True)):
        table.get_by_role("button", name="reward").click()
        rewards = rewards_shown(board)
        assert rewards == order(rewards)
    table.get_by_label("Filter by group").fill("1..2")
    expect(table.get_by_role("status")).to_have_text("8 of 12 completions")
    assert notebook.runs(BUSY)
    (notebook.lab.root / "done").touch()
    notebook.wait_for_cell(BUSY)
    notebook.show(SHOW)
    press(board, "step")
    at_rest(notebook, board)
    expect(table.locator("h4")).to_have_text(
        f"Completions of step {notebook.ask('loop.records[-1].step')}"
    )
    best = notebook.ask("max(s.reward for g in loop.records[-1].groups[1:] for s in g.samples)")
    assert rewards_shown(board)[0] == pytest.approx(best, abs=1e-3)
    notebook.shot("dashboard_sorted")
    table.get_by_label("Filter by group").fill("")
    table.get_by_role("button", name="group").click()


def test_it_works_while_a_cell_awaits_the_loop(notebook: Notebook, board: Locator):
    notebook.page.evaluate(RECORD)
    before = notebook.ask("place()[0]")
    notebook.start_cell(RUN)
    notebook.show(SHOW)
    notebook.page.wait_for_function(GREW, arg=2)
    assert notebook.runs(RUN)
    press(board, "pause")
    notebook.wait_for_cell(RUN)
    assert notebook.failures() == []
    assert before + 2 <= notebook.ask("place()[0]") < before + 400


def test_an_error_is_shown_and_the_loop_is_where_it_was(notebook: Notebook, board: Locator):
    notebook.ask("failing.append(1)")
    press(board, "play")
    error = board.locator(".rld-error")
    expect(error).to_contain_text("no reward today")
    at_rest(notebook, board)
    assert notebook.ask("loop.state.current") == "score"
    notebook.shot("dashboard_error")

    notebook.ask("failing.clear()")
    press(board, "step")
    at_rest(notebook, board)
    expect(error).to_have_count(0)


def test_every_control_is_reached_by_keyboard(notebook: Notebook, board: Locator):
    place = notebook.ask("place()[1]")
    reached = []
    page = notebook.page
    control(board, "play").focus()
    for _ in range(60):
        reached.append(page.evaluate(FOCUSED))
        page.keyboard.press("Tab")
    assert {
        "rld-play",
        "rld-phase",
        "rld-step",
        "rld-undo",
        "speed",
        "filter",
        "row",
        "sort",
    } - set(reached) == set()

    control(board, "phase").focus()
    page.keyboard.press("Enter")
    at_rest(notebook, board)
    assert notebook.ask("place()[1]") == place + 1


def test_settings_are_changed_between_two_steps(notebook: Notebook, board: Locator):
    press(board, "step")
    at_rest(notebook, board)
    board.get_by_role("button", name="Settings").click()
    pane = board.locator(".rld-settings")
    rate = pane.get_by_label("learning_rate")
    expect(rate).to_have_value("0.0001")
    rate.fill("-1")
    pane.get_by_role("button", name="Change").click()
    expect(pane).to_contain_text("learning_rate: got -1")
    rate.fill("3e-5")
    pane.get_by_label("policy_loss").select_option("dapo")
    pane.get_by_role("button", name="Change").click()
    expect(pane).to_contain_text("learning_rate: 0.0001 -> 3e-05")
    notebook.shot("dashboard_settings")
    assert notebook.ask("[loop.cfg.learning_rate, loop.cfg.policy_loss]") == [
        3e-5,
        "dapo",
    ]
    press(board, "step")
    at_rest(notebook, board)
    assert notebook.ask("loop.records[-1].changed") == {
        "learning_rate": 3e-5,
        "policy_loss": "dapo",
    }
    board.get_by_role("button", name="Settings").click()
    expect(pane).to_be_hidden()


@pytest.mark.slow
def test_running_the_cell_again_leaves_one_dashboard(notebook: Notebook, board: Locator):
    press(board, "play")
    notebook.run_cells(SHOW)
    board = notebook.show(SHOW)
    expect(board.locator(".rld-controls")).to_have_count(1)
    at_rest(notebook, board)  # closing the first held its loop
    assert notebook.ask("len(dashboards_of(loop))") == 1
    steps = notebook.ask("place()[0]")
    press(board, "step")
    at_rest(notebook, board)
    assert notebook.ask("place()[0]") == steps + 1


def test_updates_do_not_pile_up_in_the_browser(open_page: Callable[..., Page], tmp_path: Path):
    "A page that draws slower than a loop trains must not fall behind without end: buttons would answer minutes late."
    (tmp_path / "charts.html").write_text("<!doctype html><meta charset=utf-8><body></body>")
    page = open_page(tmp_path / "charts.html")
    about = {"name": "reward", "title": "Reward", "caption": "", "height": 200, "wide": True}
    page.evaluate(PILE, [module("charts.js"), plotly_script(), about])
    page.wait_for_function("() => drawn.at(-1) === 300")
    assert len(page.evaluate("drawn")) <= 2, "the drawing in progress, and one of the newest"


def test_texts_appear_while_they_are_sampled_and_one_is_cut(notebook: Notebook):
    "With a loop of its own; the tests above are done with theirs."
    notebook.run_cells(SLOW_ENGINE, ROLLOUTS)
    board = notebook.show(ROLLOUTS)
    press(board, "phase")
    at_rest(notebook, board)
    press(board, "phase")
    flights = board.locator(".rld-flight")
    tails = flights.locator(".rld-tail")
    expect(flights).to_have_count(12)
    waited_for = ", ".join(f"group {i} (4 completions)" for i in range(3))
    expect(board.locator(".rld-rollouts summary")).to_have_text(
        f"The step waits for {waited_for}; 0 prompts are back."
    )
    expect(flights.first).to_contain_text("3 / 32")
    before = tails.all_inner_texts()
    notebook.shot("rollouts", ROLLOUTS)
    notebook.page.evaluate(THEME, "JupyterLab Dark")
    notebook.shot("rollouts_dark", ROLLOUTS)
    notebook.page.evaluate(THEME, "JupyterLab Light")
    notebook.ask("allowed.append(4)")
    expect(flights.first).to_contain_text("4 / 32")
    # waits: a change of the theme takes the cell out of the page for a moment
    expect(tails).to_have_text([re.compile("^" + re.escape(text)) for text in before])
    working = next(i for i, text in enumerate(before) if "#" not in text)  # the others end at once
    group = int(flights.nth(working).locator("b").inner_text().removeprefix("group "))
    flights.nth(working).get_by_role("button").click()
    expect(flights).to_have_count(11)
    notebook.ask("allowed.append(99)")
    at_rest(notebook, board)
    expect(flights).to_have_count(0)
    ended = notebook.ask(
        "[[s.finish_reason for s in r.samples] for r in loop.state.values['sample']]"
    )
    assert [reasons.count("cut") for reasons in ended] == [i == group for i in range(3)]
    press(board, "step")
    at_rest(notebook, board)
    assert notebook.ask("loop.state.number") == 2


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["restarted", "shut down"])
def test_a_dashboard_whose_kernel_is_gone_says_so_and_presses_nothing(lab: Lab, ending: str):
    notebook = open_dashboard(lab, f"gone-{ending.replace(' ', '-')}.ipynb")
    board = notebook.show(SHOW)
    expect(control(board, "play")).to_be_enabled()
    method = "restart" if ending == "restarted" else "shutdown"
    notebook.page.evaluate(
        f"async () => {{ await {PANEL}.sessionContext.session.kernel.{method}() }}"
    )
    expect(board).to_contain_text("The kernel of this dashboard is gone")
    for name in ("play", "phase", "step", "undo"):
        expect(control(board, name)).to_be_disabled()
    board.get_by_role("button", name="reward").click()  # the table needs no kernel
    expect(board.locator("th[aria-sort=ascending]")).to_contain_text("reward")
    notebook.shot(f"dashboard_gone_{method}")
    notebook.close()
