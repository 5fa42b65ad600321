"""Every row once, whatever happens to a loop: random walks over each policy by which prompt groups arrive.

A walk runs steps, stops, runs phase by phase, undoes steps, has rollouts fail, is cancelled, and continues from a
checkpoint. After each of these, the numbers in records, in the step in progress and pending are those of the rows
that were taken, each once; and at the end of the data every row has been in one record.
"""

import asyncio
from collections import Counter
from contextlib import suppress

import numpy as np
import pytest
from test_async_loop import begin

from rl_notebook.loop.async_loop import AsyncGRPOLoop
from rl_notebook.loop.back import UNDO_TO, restore_checkpoint, save_checkpoint
from rl_notebook.core.types import RewardError, RolloutSample
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.runs.run import RunFolder

POLICIES = {
    "together": {},
    "few at a time": {"max_concurrent": 2},
    "refill": {"refill": True},
    "greedy": {"min_samples_per_fwd_bwd": 4, "max_samples_per_fwd_bwd": 8},
    "window of 2": {"weight_sync_interval": 2},
    "window of 3, few at a time": {"weight_sync_interval": 3, "max_concurrent": 4},
    "one window": {"weight_sync_interval": 0},
    "ahead 0": {"max_head_offpolicy_versions": 0},
    "ahead 2": {"max_head_offpolicy_versions": 2},
    "ahead 1, in parts": {"max_head_offpolicy_versions": 1, "pipeline_chunks_per_step": 2},
}
ROWS = 23  # the last step is short


class Walk:
    "A loop that gets random calls."

    def __init__(self, policy, folder):
        self.settings = POLICIES[policy] | {"completions_per_prompt": 4, "keep_undo": 2}
        self.kind = AsyncGRPOLoop if policy.startswith("ahead") else GRPOLoop
        self.rng = np.random.default_rng(0)
        self.folder = folder
        self.fails = 0
        self.loop = self.fresh()
        self.before = []  # records of loops that this one continues from

    def fresh(self):
        return begin(self.rollout, rows=ROWS, kind=self.kind, **self.settings)

    async def rollout(self, sample_prompt, row_index, rollout_index):
        "Two tokens, after a while; a third of the rows has no signal, and sometimes one raises."
        rng = np.random.default_rng([row_index, rollout_index])
        await asyncio.sleep(float(rng.exponential(0.002)))
        if self.fails and not row_index % 5:
            self.fails -= 1
            raise ValueError("the tool is broken")
        tokens = sample_prompt["prompt_token_ids"]
        reward = 1.0 if row_index % 3 == 0 else float(rollout_index % 2)
        mask = [0] * len(tokens) + [1, 1]
        logprobs = [np.nan] * len(tokens) + [-2.0, -0.1]
        return RolloutSample([*tokens, 5 + rollout_index, 2], logprobs, mask, reward=reward)

    def check(self):
        "Every row that was taken is in one place."
        loop = self.loop
        taken = "prompts" if self.kind is GRPOLoop else "sample"
        step = Counter(loop.state.numbers if taken in loop.state.values else ())
        assert self.recorded + step + Counter(loop.pending) == Counter(range(loop.cursor.consumed))

    @property
    def recorded(self):
        "Numbers of the rows in all records."
        return Counter(g.number for r in (*self.before, *self.loop.records) for g in r.groups)

    async def act(self):
        "A random call."
        loop = self.loop
        rng = self.rng
        match rng.choice(["run", "stop", "phases", "undo", "fail", "cancel", "checkpoint"]):
            case "run":
                await loop.run(int(rng.integers(1, 4)), progress=False)
            case "stop":
                running = asyncio.ensure_future(loop.run(3, progress=False))
                await asyncio.sleep(float(rng.exponential(0.05)))
                loop.stop()
                await running
            case "phases":
                await self.phases(rng.integers(1, 8))
            case "undo":
                await self.phases(rng.integers(9))
                if loop.weights.snapshots.undoable:
                    await loop.undo(to=str(rng.choice(UNDO_TO)))
            case "fail":
                self.fails = 1
                await loop.run(2, progress=False)
            case "cancel":
                running = asyncio.ensure_future(loop.run(3, progress=False))
                await asyncio.sleep(float(rng.exponential(0.05)))
                running.cancel()
                await asyncio.wait([running])
            case "checkpoint" if not loop.state.updated:
                await self.go_on_from_a_checkpoint()

    async def phases(self, count):
        "Some phases by hand."
        for _ in range(count):
            if not self.loop.done:
                called = getattr(self.loop, self.loop.state.current)()
                _ = await called if asyncio.iscoroutine(called) else called

    async def go_on_from_a_checkpoint(self):
        run = RunFolder.create(
            self.folder / f"run{len(list(self.folder.iterdir()))}", self.loop.cfg
        )
        await save_checkpoint(self.loop, run, every=-1000)
        await self.loop.close()
        self.before += self.loop.records
        self.loop = self.fresh()
        await restore_checkpoint(self.loop, run.latest_checkpoint())

    async def walk(self, actions):
        for _ in range(actions):
            with suppress(RewardError):  # also of a row that was in flight when an action ended
                await self.act()
            self.check()
        self.fails = 0
        while not self.loop.done:
            with suppress(RewardError):
                await self.loop.run(progress=False)
        await self.loop.close()
        assert self.recorded == Counter(range(ROWS))


ALWAYS = ("together", "window of 2", "ahead 2")  # all others with SLOW=1


@pytest.mark.parametrize(
    "policy",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in ALWAYS)) for name in POLICIES],
)
def test_every_row_is_trained_once_whatever_happens(policy, tmp_path):
    asyncio.run(Walk(policy, tmp_path).walk(8))
