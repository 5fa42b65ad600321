"Asynchronous rollouts in the views: a player that holds, drains and continues, and what it shows."

import asyncio
from dataclasses import replace

import pytest
from synthetic import async_record, synthetic_record
from test_dashboard import enabled, press, run, until
from tiny_models import one_thread

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.config.config import Config
from rl_notebook.core.types import PhaseError, RolloutSample
from rl_notebook.loop.async_loop import AT_REST, AsyncGRPOLoop
from rl_notebook.runs.run import Run, RunFolder
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_rows
from rl_notebook.views.dashboard import Dashboard, progress_of
from rl_notebook.views.player import PAUSED, refusal, rows_in_flight
from rl_notebook.views.report import report_html

__all__ = ["one_thread"]

TITLES = (
    "Rollouts during training",
    "Staleness of trained groups",
    "Who waits",
)


class HeldRollouts:
    "Rollouts that return while it is open."

    def __init__(self):
        self.open = asyncio.Event()
        self.through = 0
        self.open.set()

    async def __call__(self, sample_prompt):
        "Half of the completions are right."
        await self.open.wait()
        self.through += 1
        tokens = sample_prompt["prompt_token_ids"]
        index = sample_prompt["sample_index"]
        mask = [0] * len(tokens) + [1, 1]
        return RolloutSample(
            [*tokens, 5 + index, 2],
            [0.0] * len(tokens) + [-2.0, -0.1],
            mask,
            reward=float(index % 2),
        )


def loop_of(held, rows=48, **settings):
    "A loop with two rows in a batch."
    small = {
        "prompt_groups_per_step": 2,
        "completions_per_prompt": 2,
        "max_completion_tokens": 8,
        "kl_beta": 0.0,
    }
    cfg = Config(recipe="async_rl_loop", **small | {"max_head_offpolicy_versions": 1} | settings)

    async def rollout(sample_prompt):
        return await held(sample_prompt)

    return AsyncGRPOLoop(open_local(*load_model("tiny")), toy_rows(rows), rollout, cfg)


async def play_until_a_batch_waits(dashboard, held):
    "Play until the rollouts of a batch wait."
    held.open.clear()
    press(dashboard, "play")
    await until(lambda: dashboard.loop.running == "sample" and rows_in_flight(dashboard.loop))


def test_a_pause_holds_admission_at_once_and_play_continues():
    async def main():
        held = HeldRollouts()
        dashboard = Dashboard(loop := loop_of(held))
        await play_until_a_batch_waits(dashboard, held)
        consumed = loop.cursor.consumed
        in_flight = rows_in_flight(loop)
        press(dashboard, "pause")
        assert loop.producer.held == PAUSED
        held.open.set()
        await until(lambda: not dashboard.doing)
        assert "no row is started: paused" in dashboard.screen.head.value
        await until(lambda: not rows_in_flight(loop))  # they finish, and wait
        assert (loop.cursor.consumed, len(loop.batch.rows) + len(loop.producer.ready)) == (
            consumed,
            in_flight,
        )
        await dashboard.play(2)
        assert dashboard.error is None
        assert [r.step for r in loop.records] == [1, 2]
        assert {g.number for r in loop.records for g in r.groups} == set(range(4))
        await loop.close()

    run(main())


def test_a_batch_that_a_pause_keeps_from_being_complete_is_no_error():
    async def main():
        held = HeldRollouts()
        # one row at a time
        dashboard = Dashboard(loop := loop_of(held, max_concurrency_rollout_sample=2))
        await play_until_a_batch_waits(dashboard, held)
        press(dashboard, "pause")
        held.open.set()
        await until(lambda: not dashboard.doing)
        assert (loop.state.current, len(loop.producer.ready), dashboard.error) == (
            "sample",
            1,
            None,
        )
        await dashboard.step()
        assert [[g.number for g in r.groups] for r in loop.records] == [[0, 1]]
        await loop.close()

    run(main())


def test_a_drain_waits_for_rows_and_a_stop_ends_the_wait():
    async def main():
        held = HeldRollouts()
        dashboard = Dashboard(loop := loop_of(held))
        assert refusal(dashboard, "drain") == "No row is in flight."
        with pytest.raises(PhaseError, match="No row is in flight"):
            await dashboard.drain()
        await play_until_a_batch_waits(dashboard, held)
        assert {"pause", "drain", "stop"} == enabled(dashboard)
        press(dashboard, "drain")
        assert refusal(dashboard, "drain") == "Busy: drain."
        held.open.set()
        await until(lambda: not dashboard.doing)
        assert (rows_in_flight(loop), dashboard.error, loop.producer.held) == (0, None, PAUSED)

        held.open.clear()
        while not rows_in_flight(loop):  # rows that are ready are trained first
            await dashboard.step()
        press(dashboard, "drain")  # at rest, with rows in flight
        await until(lambda: dashboard.at == "drain")
        assert progress_of(loop, dashboard.watch)["phase"] == "drain"
        press(dashboard, "stop")
        await dashboard.task  # a cell that awaits it continues, too
        assert not dashboard.doing
        assert rows_in_flight(loop) > 0
        assert loop.producer.held == PAUSED
        held.open.set()
        await loop.close()

    run(main())


def test_a_stop_lets_rows_finish_and_starts_none():
    async def main():
        held = HeldRollouts()
        dashboard = Dashboard(loop := loop_of(held))
        await play_until_a_batch_waits(dashboard, held)
        press(dashboard, "stop")
        consumed = loop.cursor.consumed
        held.open.set()
        await until(lambda: not dashboard.doing and not rows_in_flight(loop))
        assert (loop.producer.held, loop.cursor.consumed, loop.stop_requested) == (
            AT_REST,
            consumed,
            False,
        )
        dashboard.refresh()
        assert "no row is started: the loop is at rest" in dashboard.screen.head.value
        await dashboard.play(1)
        assert len(loop.records) == 1
        await loop.close()

    run(main())


def test_a_report_has_the_asynchronous_charts_only_for_an_asynchronous_run(tmp_path):
    records = [synthetic_record(step, groups=4, completions=4) for step in range(1, 9)]
    for made, expected in ((records, False), ([async_record(r) for r in records], True)):
        folder = RunFolder.create(
            tmp_path / str(expected),
            {"max_head_offpolicy_versions": 1, "completions_per_prompt": 4},
        )
        for record in made:
            folder.add(record)
        for source in (made, Run.open(folder.path)):
            page = report_html(source)
            assert [f"<h3>{title}</h3>" in page for title in TITLES] == [expected] * len(TITLES)
    late = replace(async_record(records[0]), timeline=())
    assert f"<h3>{TITLES[0]}</h3>" not in report_html([late])
