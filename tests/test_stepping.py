"What one sees while stepping: why a run ended, who has the loop, what was changed, and the step under way."

import asyncio

import pytest
from test_async_loop import begin
from test_loop import LENGTH, make_loop
from tiny_models import one_thread

from rl_notebook.core import PhaseError
from rl_notebook.loop import TURNS
from rl_notebook.views.dashboard import Dashboard

__all__ = ["one_thread"]


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 300))


# --- how a run ends -----------------------------------------------------------------------------------------------


def test_a_run_prints_each_verdict_once_with_the_checks_that_failed_and_says_why_it_ended(capsys):
    async def main():
        loop = make_loop(rows=6, reward=lambda completion_text: 1.0)  # no group teaches anything
        records = await loop.run(50)
        said = capsys.readouterr().out
        assert [said.count(r.verdict) for r in records] == [1, 1]
        assert said.count("✗") == 2
        assert all(
            r.verdict in line and "signal" in line.partition("✗")[2] for r, line in zip(records, said.split("\n"))
        )
        assert "2 steps: all 6 prompts are used up (6 rows, epochs=1); raise epochs, or pass more rows" in said
        assert repr(records) == "2 records, steps 1 to 2"
        assert await loop.run(50) == []
        assert "no steps: all 6 prompts are used up" in capsys.readouterr().out
        assert "all 6 prompts are used up" in repr(await loop.run(progress=False))

    run(main())


def test_a_run_that_was_stopped_or_is_at_its_last_step_says_so_and_a_whole_one_says_nothing(capsys):
    async def main():
        loop = make_loop(rows=30, steps=3)
        loop.outputs.append(lambda record: loop.stop() if record.step == 1 else None)
        assert "stopped as requested (step 2, next: prompts" in (await loop.run(2)).ended
        assert (await loop.run(1)).ended == ""
        assert "all steps of the config are done (steps=3)" in (await loop.run(2)).ended
        assert "steps=3" in capsys.readouterr().out
        assert (await make_loop(rows=6).run(progress=False)).ended == ""  # to the end, as asked

    run(main())


# --- who has the loop ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["in turns", "beside training"])
def test_a_step_in_a_cell_while_the_dashboard_plays_waits_for_its_turn(kind):
    async def main():
        loop = make_loop(rows=24) if kind == "in turns" else begin(rows=40, reward=LENGTH)
        dashboard = Dashboard(loop)
        playing = dashboard.player.start("play", 2)
        records = [await loop.step(), await loop.step()]
        await playing
        steps = [r.step for r in loop.records]
        assert steps == list(range(1, len(steps) + 1))
        assert len({r.step for r in records}) == 2
        assert dashboard.error is None
        dashboard.close()
        await loop.close()

    run(main())


def test_two_cells_that_step_the_same_loop_take_turns_and_a_phase_that_cannot_wait_says_who_has_it():
    async def main():
        loop = make_loop(rows=30)
        first = asyncio.ensure_future(loop.step())
        while loop.running != "sample":
            await asyncio.sleep(0.001)
        with pytest.raises(PhaseError, match=r"score: got sample is under way, begun in another cell.*Pause the dash"):
            loop.score()
        with pytest.raises(PhaseError, match="prompts"):
            loop.prompts()
        others = await asyncio.gather(first, loop.step(), loop.step())
        assert [r.step for r in others] == [1, 2, 3]
        assert (loop.stage.holder, loop.stage.turn, TURNS.get()) == (None, None, ())

    run(main())


def test_a_window_is_joined_between_its_steps_and_says_who_has_it_within_one():
    async def main():
        loop = make_loop(rows=24, weight_sync_interval=2, keep=lambda g: True)
        dashboard = Dashboard(loop)
        playing = dashboard.player.start("step")
        while not loop.running:
            await asyncio.sleep(0.001)
        with pytest.raises(
            PhaseError, match=r"a window of several steps.*under way, begun in another cell or by a dash"
        ):
            await asyncio.create_task(loop.evaluate(loop.rows[:1]))
        await playing
        assert dashboard.player.window is not None
        await asyncio.create_task(loop.evaluate(loop.rows[:1]))
        await dashboard.play(1)
        assert [r.step for r in loop.records] == [1, 2]

    run(main())


@pytest.mark.parametrize("kind", ["in turns", "beside training"])
def test_after_a_stop_step_goes_on(kind):
    async def main():
        loop = make_loop(rows=30, reward=LENGTH) if kind == "in turns" else begin(rows=30)
        loop.stop()
        assert (await loop.step()).step == 1
        stepping = asyncio.ensure_future(loop.step())
        while not loop.running:
            await asyncio.sleep(0.001)
        loop.stop()
        assert await stepping is None
        assert (await loop.step()).step == 2
        await loop.close()

    run(main())
