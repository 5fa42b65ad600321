"The dashboard without a screen: its player, its table, what it shows, what it leaves behind."

import asyncio
import json
import math
import re
import time
from dataclasses import replace

import pytest
from synthetic import hostile_record, synthetic_record
from test_loop import make_loop
from tiny_models import one_thread

from rl_notebook.core.types import PhaseError
from rl_notebook.runs.records import utf8
from rl_notebook.views.dashboard import (
    COLUMNS,
    HINT_GROUPS,
    Dashboard,
    dashboards_of,
    hint_html,
    step_table,
)
from rl_notebook.views.player import ACTIVE_PLAYERS

__all__ = ["one_thread"]


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 300))


async def until(true, seconds=60.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.005)


def press(dashboard, action):
    dashboard.screen.buttons[action].click()


def enabled(dashboard):
    return {action for action, button in dashboard.screen.buttons.items() if not button.disabled}


# --- playing ------------------------------------------------------------------------------------------------------


def test_play_runs_to_the_end_and_shows_every_step():
    async def main():
        loop = make_loop(rows=9)
        dashboard = Dashboard(loop)
        assert enabled(dashboard) == {"play", "phase", "step"}
        await dashboard.play()
        assert loop.done
        assert [r.step for r in loop.records] == [1, 2, 3]
        assert dashboard.history.column("reward")[0].tolist() == [1, 2, 3]
        assert dashboard.record is loop.records[-1]
        assert enabled(dashboard) == {"undo"}
        await until(lambda: "Step 3." in dashboard.screen.words.value)
        assert dashboard.screen.buttons["play"].tooltip == "All steps are done."
        assert "The run is over:</b> all 9 prompts are used up" in dashboard.screen.head.value
        assert "raise epochs" in dashboard.screen.head.value

    run(main())


def test_played_and_run_are_the_same_training():
    async def main():
        played = make_loop(rows=9)
        plain = make_loop(rows=9)
        await Dashboard(played).play(2)
        await plain.run(2, progress=False)
        for a, b in zip(played.records, plain.records, strict=True):
            assert a.metrics["update_norm"] == b.metrics["update_norm"]
            assert a.loss.loss == b.loss.loss

    run(main())


def test_play_continues_to_the_number_of_steps_that_a_pause_left_and_a_stop_forgets_it():
    async def main():
        loop = make_loop(rows=30)
        dashboard = Dashboard(loop)
        loop.outputs.append(lambda r: dashboard.pause() if r.step == 1 else None)
        await dashboard.play(3)
        assert (len(loop.records), dashboard.left) == (1, 2)
        await dashboard.play()
        assert [r.step for r in loop.records] == [1, 2, 3]
        loop.outputs[-1] = lambda r: dashboard.stop()
        await dashboard.play(3)
        assert (len(loop.records), dashboard.left) == (4, math.inf)
        assert not loop.stop_requested

    run(main())


def test_phase_step_and_undo():
    async def main():
        loop = make_loop(rows=24)
        dashboard = Dashboard(loop)
        await dashboard.phase()
        await dashboard.phase()
        assert loop.state.current == "score"
        await dashboard.step()
        assert (loop.state.number, loop.state.current) == (2, "prompts")
        assert "undo" in enabled(dashboard)
        await dashboard.undo()
        assert (loop.state.number, len(loop.records), dashboard.record) == (1, 0, None)
        assert "Step 1 is back at prompts." in dashboard.screen.head.value
        assert dashboard.history.column("reward")[0].tolist() == []
        assert "No step is finished" in dashboard.screen.now.value
        message = r"undo: got There is no update to take back: keep_undo=1 keeps the last update\. Open the loop with"
        with pytest.raises(PhaseError, match=message) as caught:
            await dashboard.undo()
        assert "press stop" not in str(caught.value)
        assert "keep_undo=N" in dashboard.screen.buttons["undo"].tooltip

    run(main())


def test_the_sentence_is_never_of_another_step_than_the_charts():
    async def main():
        dashboard = Dashboard(make_loop(rows=24, keep_undo=2))

        def steps_of():
            return {int(n) for n in re.findall(r"Step (\d+)\.", dashboard.screen.words.value)}

        for step in (1, 2, 3):
            await dashboard.step()
            assert steps_of() == {dashboard.record.step} == {step}
        await until(lambda: "…" not in dashboard.screen.words.value)
        await dashboard.undo()
        assert steps_of() == {dashboard.record.step} == {2}
        assert dashboard.screen.pane.table["title"] == "Completions of step 2"
        await until(lambda: "Gradient norm" in dashboard.screen.words.value)
        assert steps_of() == {2}

    run(main())


def test_the_rewards_next_to_the_map_are_few_enough_to_be_shown_whole():
    groups = synthetic_record(3, groups=20, completions=4).groups
    assert hint_html(groups).count("<tr") == 1 + HINT_GROUPS
    assert "and 12 more groups" in hint_html(groups)
    assert "more groups" not in hint_html(groups[:HINT_GROUPS])


def test_two_things_are_never_run_at_once():
    async def main():
        dashboard = Dashboard(make_loop(rows=24))
        playing = dashboard.start("play", 1)
        for action in ("play", "phase", "step", "undo"):
            with pytest.raises(PhaseError, match="Busy: play"):
                dashboard.start(action)
        press(dashboard, "play")  # a click that was on its way when the button was disabled
        await playing
        assert len(dashboard.loop.records) == 1

    run(main())


def test_the_speed_limit_waits_between_phases_and_a_pause_does_not_wait_for_it():
    async def main():
        dashboard = Dashboard(make_loop(rows=24))
        dashboard.screen.speed.value = 5.0
        assert dashboard.delay == 5.0
        dashboard.delay = 600.0  # longer than a busy machine keeps a click waiting
        press(dashboard, "play")
        await until(lambda: "prompts" in dashboard.loop.state.values and not dashboard.at)
        start = time.monotonic()
        press(dashboard, "pause")
        await until(lambda: not dashboard.doing)
        assert time.monotonic() - start < 60
        assert dashboard.loop.state.current == "sample"

    run(main())


def test_with_windows_steps_are_played_and_single_phases_are_rejected_with_the_reason():
    async def main():
        loop = make_loop(rows=24, weight_sync_interval=2, keep=lambda g: True)
        dashboard = Dashboard(loop)
        assert (
            "Single phases are not available with windows"
            in dashboard.screen.buttons["phase"].tooltip
        )
        await dashboard.step()
        assert [r.step for r in loop.records] == [1]
        assert dashboard.window is not None
        assert loop.weights.in_window
        await dashboard.play(2)
        assert [r.step for r in loop.records] == [1, 2, 3]
        assert loop.policy_version == 1
        assert "stop" in enabled(dashboard)
        press(dashboard, "stop")
        await until(lambda: not dashboard.doing)
        assert (dashboard.window, loop.weights.in_window, loop.weights.shared.holder) == (
            None,
            False,
            None,
        )
        await loop.step()
        assert len(loop.records) == 4

    run(main())


# --- other code runs the loop --------------------------------------------------------------------------------------


def test_a_run_of_a_cell_is_shown_can_be_stopped_and_is_not_run_twice():
    async def main():
        loop = make_loop(rows=60)
        dashboard = Dashboard(loop)
        running = asyncio.ensure_future(loop.run(progress=False))
        await until(lambda: dashboard.elsewhere)
        assert enabled(dashboard) == {"pause", "stop"}
        assert "The loop is being run elsewhere" in dashboard.screen.buttons["play"].tooltip
        await until(lambda: dashboard.record is not None)
        press(dashboard, "stop")
        records = await running
        assert 1 <= len(records) < 20
        await until(lambda: "play" in enabled(dashboard))
        shown_steps = dashboard.history.column("reward")[0].tolist()
        finished_steps = [r.step for r in records]
        assert shown_steps[: len(finished_steps)] == finished_steps
        # a step that was stopped after its rewards is shown
        assert shown_steps[len(finished_steps) :] in ([], [loop.state.number])
        await dashboard.step()

    run(main())


# --- one dashboard ------------------------------------------------------------------------------------------------


def test_a_loop_has_one_dashboard_and_nothing_grows():
    from ipywidgets.widgets.widget import _instances

    async def main():
        loop = make_loop(rows=60)
        await loop.step()
        counts = []
        for _ in range(3):
            dashboard = Dashboard(loop)
            assert dashboards_of(loop) == [dashboard]
            press(dashboard, "play")
            await asyncio.sleep(0.05)
            counts.append((len(_instances), len(loop.outputs), len(loop.on_undo)))
        assert len(set(counts)) == 1
        await until(lambda: len(ACTIVE_PLAYERS) <= 1)
        dashboard.close()
        await until(lambda: not dashboard.doing)
        this_task = asyncio.current_task()
        await until(
            lambda: (
                not ACTIVE_PLAYERS
                and not [t for t in asyncio.all_tasks() - {this_task} if "follow" in repr(t)]
            )
        )
        assert (loop.outputs, loop.on_undo) == ([], [])
        at = loop.state.number, loop.state.current
        await asyncio.sleep(0.3)
        assert (loop.state.number, loop.state.current) == at  # the old ones play no more
        with pytest.raises(PhaseError, match="This dashboard is closed"):
            await dashboard.play()

    run(main())


def test_a_new_loop_on_the_same_backend_pauses_the_old_one():
    async def main():
        from rl_notebook.loop.loop import GRPOLoop

        old = make_loop(rows=60)
        first = Dashboard(old)
        press(first, "play")
        await until(lambda: old.state.values)
        new = GRPOLoop(
            old.backend, old.rows, lambda completion_text: float(len(completion_text)), old.cfg
        )
        second = Dashboard(new)
        await second.step()
        assert not first.doing
        assert len(new.records) == 1

    run(main())


# --- completions --------------------------------------------------------------------------------------------------


def test_the_table_holds_every_completion_in_full_as_json_holds_it():
    record = hostile_record()
    first = record.groups[0]
    odd = replace(first.samples[0], reward=None, text="\ud800" + "x" * 5000)
    record = replace(
        record, groups=(replace(first, samples=(odd, *first.samples[1:])), *record.groups[1:])
    )
    table = step_table(record)
    row = table["rows"][0]
    assert (row["id"], row["reward"], len(row["text"])) == (
        f"step={record.step}&group=0&sample=0",
        None,
        len(utf8("\ud800")) + 5000,
    )
    assert all(set(r) == {"id", *(c["name"] for c in COLUMNS)} for r in table["rows"])
    json.dumps(table, allow_nan=False, ensure_ascii=False).encode()
