"Difficulty sampling: which rows come follows from their pass rates, and is the same by every way to a step."

import asyncio
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from rl_notebook.loop.async_loop import AsyncGRPOLoop
from rl_notebook.backends.local.trainer import open_local
from rl_notebook.config.config import Config
from rl_notebook.core.types import ConfigError, RecordError
from rl_notebook.task.data import Cursor, graded_rows, load_rows
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.recipes.rl_loop import Problem, replay_step, train
from rl_notebook.runs.run import Run
from rl_notebook.task.models import load_model

ROWS = load_rows([{"prompt": f"{i}+{i}=", "kind": i % 3, "id": f"q{i}"} for i in range(6)])
SMALL_RUN = {
    "prompt_groups_per_step": 2,
    "completions_per_prompt": 4,
    "max_completion_tokens": 3,
    "max_seq_len": 32,
    "kl_beta": 0.0,
    "epochs": 40,
    "drop_zero_variance_groups": False,
    "difficulty_sampling": 0.1,
}


def by_kind(text, kind):
    "Never, always, or by the text."
    return float(kind == 1 or (kind == 2 and sum(map(ord, text)) % 2 == 0))


def tiny_backend():
    return open_local(*load_model("tiny"), reference=False)


def make_loop(kind=GRPOLoop, **settings):
    return kind(tiny_backend(), ROWS, by_kind, Config(**SMALL_RUN | settings))


def rows_of_steps(records):
    "Numbers of the rows of each step."
    return [[g.number for g in r.groups] for r in records]


def expected_visits(records):
    "How often the row of each group had come, and its pass rate, from the groups alone."
    times = Counter()
    rates = {}
    for r in records:
        for g in r.groups:
            now = float(np.mean(g.rewards >= 1.0))
            times[g.key] += 1
            rates[g.key] = (rates[g.key] + now) / 2 if g.key in rates else now
        yield tuple((times[g.key], rates[g.key]) for g in r.groups)


def test_rows_come_by_their_pass_rate_and_records_say_how_often():
    async def main():
        loop = make_loop()
        records = await loop.run(24, progress=False)
        assert [r.visits for r in records] == list(expected_visits(records))
        # nothing is known of a row before it has come
        assert rows_of_steps(records)[:3] == [[0, 1], [2, 3], [4, 5]]
        taken = [n for step in rows_of_steps(records) for n in step]
        assert taken == sorted(set(taken))
        cursor = Cursor(ROWS, epochs=40, floor=0.1)
        at = 0
        for record in records:  # the rows of every step from its past alone
            assert replace(cursor, consumed=at).positions(2) == [g.number for g in record.groups]
            rates = {g.number: float(np.mean(g.rewards >= 1.0)) for g in record.groups}
            cursor = graded_rows(cursor, rates)
            at = record.consumed
        epochs = records[-1].consumed / len(ROWS)
        times = Counter(g.row["kind"] for r in records for g in r.groups)
        assert epochs > 8
        assert times[2] > times[0] + times[1]
        assert min(times.values()) >= 2  # each of them once at least
        assert "places in the epochs" in loop.place

    asyncio.run(main())


def test_undo_branch_and_phases_again_give_the_same_rows():
    async def main():
        loop = make_loop(epochs=9)
        first = await loop.run(6, progress=False)
        place = loop.cursor
        await loop.undo()
        assert loop.cursor.seen == loop.state.cursor.seen != place.seen
        other = await loop.branch(at="start", learning_rate=1e-4)
        loop.prompts()
        loop.prompts()
        again = await loop.step()
        assert (rows_of_steps([again]), again.visits) == (
            rows_of_steps(first[-1:]),
            first[-1].visits,
        )
        assert loop.cursor == place
        record = await other.step()
        assert (rows_of_steps([record]), record.visits) == (rows_of_steps([again]), again.visits)
        with pytest.raises(ConfigError, match="difficulty_sampling"):
            loop.change(difficulty_sampling=0.5)
        while not loop.done:
            last = await loop.step()
        assert not loop.cursor.positions(1)
        assert last.groups

    asyncio.run(main())


def test_a_run_that_is_resumed_sought_and_replayed_has_the_same_rows(tmp_path):
    cfg = Config(**SMALL_RUN, steps=8, dcp_save_interval=3, log_path=str(tmp_path / "run"))
    quiet = {"say": lambda line: None, "progress": False, "problem": Problem(ROWS, [], by_kind)}

    async def main():
        await train(cfg, backend=tiny_backend(), **quiet)
        run = Run.open(cfg.log_path)
        before = [run.record(n) for n in run.steps]
        assert [r.visits for r in before] == list(expected_visits(before))
        for step in [n for n in run.checkpoints if n > 3]:
            shutil.rmtree(tmp_path / "run" / "checkpoints" / f"{step:05d}")
        await train(cfg, backend=tiny_backend(), resume=True, **quiet)
        run = Run.open(cfg.log_path)
        after = [run.record(n) for n in run.steps]
        assert rows_of_steps(after) == rows_of_steps(before)
        assert [(r.visits, r.consumed) for r in after] == [(r.visits, r.consumed) for r in before]
        replayed = await replay_step(
            cfg.log_path, 6, problem=quiet["problem"], backend=tiny_backend()
        )
        assert all(phase.same is not False for phase in replayed.phases), replayed
        fresh = GRPOLoop(tiny_backend(), ROWS, by_kind, cfg)
        await fresh.seek(5, run)
        assert [rows_of_steps([await fresh.step()]), rows_of_steps([await fresh.step()])] == [
            rows_of_steps(before[5:6]),
            rows_of_steps(before[6:7]),
        ]
        with pytest.raises(RecordError, match=r"difficulty_sampling=0\.5"):
            await train(
                replace(cfg, difficulty_sampling=0.5), backend=tiny_backend(), resume=True, **quiet
            )

    asyncio.run(main())


def test_with_asynchronous_rollouts_too():
    async def main():
        loop = make_loop(AsyncGRPOLoop, recipe="async_rl_loop", max_head_offpolicy_versions=1)
        records = await loop.run(10, progress=False)
        assert [r.visits for r in records] == list(expected_visits(records))
        assert max(n for step in rows_of_steps(records) for n in step) > 22  # some were passed over
        await loop.undo()
        times = {
            loop.cursor.index(g.number): r.visits[i][0]
            for r in records[:-1]
            for i, g in enumerate(r.groups)
        }
        assert {i: t for i, (t, _) in loop.cursor.seen.items()} == times
        again = await loop.step()
        assert again.visits == records[-1].visits
        await loop.close()

    asyncio.run(main())
