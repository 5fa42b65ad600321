"""The asynchronous loop as a whole: what it trains, loses, undoes and leaves behind. On the shipped model, trained.

Rollouts take their time, at random or until a test lets them go, so that they come back in any order. What has to be
so whatever the order is asserted, and nothing that depends on how fast this machine is.
"""

import asyncio
import contextlib
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.config.config import Config
from rl_notebook.core.types import PhaseError, RolloutRun
from rl_notebook.experiments.replay import replay
from rl_notebook.loop.async_loop import AsyncGRPOLoop
from rl_notebook.loop.back import restore_checkpoint, save_checkpoint, updates_of
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.runs.run import RunFolder
from rl_notebook.task.chat import sample_from_completion
from rl_notebook.task.data import load_rows
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_rows

ROWS = 15  # of a run, if nothing else is said
SMALL_RUN = {
    "prompt_groups_per_step": 3,
    "completions_per_prompt": 4,
    "max_completion_tokens": 8,
    "max_seq_len": 96,
    "learning_rate": 1e-3,
    "epochs": 1,
}


# differs inside nearly every group
def LENGTH(text):
    return float(sum(map(ord, text)) % 13)


# a third of the groups have equal rewards
def SOME(text, question):
    return LENGTH(text) if "?" in question else 1.0


# every group is trained on
def ALL(group):
    return True


def begin(reward=SOME, rows=ROWS, kind=AsyncGRPOLoop, keep=None, backend=None, **settings):
    "A loop over the toy task, with a separate backend."
    options = {name: settings.pop(name) for name in (*OPTIONS,) if name in settings}
    recipe = {"recipe": "async_rl_loop"} if kind is AsyncGRPOLoop else {}
    cfg = Config(**SMALL_RUN | recipe | settings)
    model, tokenizer = load_model("tiny")
    backend = backend or open_local(
        model, tokenizer, lora_rank=cfg.lora_rank, reference=cfg.kl_beta > 0
    )
    return kind(
        backend, load_rows(toy_rows(rows, seed=3)), reward, cfg, dynamic_filter_fn=keep, **options
    )


OPTIONS = (
    "outputs",
    "keep_undo",
    "evaluation_fn",
    "advantage_fn",
    "make_loss",
    "eval_rows",
    "extras",
)


def run(coroutine):
    "In a separate event loop, at whose end nothing may be left open."
    return asyncio.run(coroutine)


def weights(loop):
    "A copy of everything that is trained."
    return {k: v.detach().clone() for k, v in loop.backend.policy.state.params.items()}


def same(a, b):
    return all(torch.equal(a[k], b[k]) for k in a)


def row_numbers(records):
    "Rows of the run in each record."
    return [sorted(g.number for g in r.groups) for r in records]


def flat(records):
    return sorted(n for r in records for g in r.groups for n in [g.number])


def trained_groups(record):
    "Groups that the step was trained on."
    trained = {d.group for d in record.datums}
    return [g for g in record.groups if g.index in trained]


async def turns(count=20):
    "Let everything else run n times."
    for _ in range(count):
        await asyncio.sleep(0)


async def up_to(loop, *phases):
    "Run phases by hand."
    for name in phases:
        result = getattr(loop, name)()
        if asyncio.iscoroutine(result):
            result = await result
    return result


SECOND_HALF = (
    "score",
    "advantages",
    "datums",
    "reference",
    "backward",
    "optimize",
    "sync",
    "finish",
)


def check_every_row_is_accounted_for(loop):
    "Every row that was taken is in exactly one record, in the step in progress, or pending."
    of_this_step = (
        [p.number for p in loop.state.values["prompts"]] if "sample" in loop.state.values else []
    )
    places = [*flat(list(loop.records)), *of_this_step, *loop.pending]
    assert sorted(places) == list(range(loop.intake.cursor.consumed))
    gate = loop.producer.gate
    assert gate.running == len(loop.producer.in_flight) * gate.completions_per_prompt


def check_records(records, rows, bound):
    "Every row once, none too old, and `pending` says what is missing."
    done = set()
    assert flat(records) == list(range(rows))
    for r in records:
        assert all(0 <= r.step - 1 - g.submitted <= bound for g in trained_groups(r))
        done |= {g.number for g in r.groups}
        assert r.pending == tuple(sorted({*range(r.consumed)} - done))
        sampled = {g.number for g in r.groups}
        assert {name for name, *_ in r.timeline if name.startswith("row ")} == {
            f"row {n}" for n in sampled
        }
    assert records[-1].pending == ()


async def nothing_left():
    "No row is in flight in this event loop, and what a sampler has begun for one ends by itself."
    await turns()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert {task.get_coro().__qualname__ for task in left} <= {"LocalSampler.run_scheduler"}
    await asyncio.gather(*left)


# --- rollouts ---------------------------------------------------------------------------------------------------------


def rollouts(reward=SOME, delay=0.01, lost=0.0, before=None, segments=1, alone=False):
    """A factory of rollouts that take a random while, and of which some come to nothing.

    What is sampled together is not the same to the last bit as what is sampled `alone`."""

    def make_rollout_fn(setup):
        turn = asyncio.Lock() if alone else contextlib.nullcontext()

        async def rollout_fn(sample_prompt, row_index, rollout_index):
            rng = np.random.default_rng([row_index, rollout_index])
            if before is not None:
                await before(row_index, rollout_index)
            if delay:
                await asyncio.sleep(float(rng.exponential(delay)))
            if rng.random() < lost:
                return None
            params = replace(setup.params, seed=sample_prompt["seed"])
            async with turn:
                [c] = await setup.sampler.sample(sample_prompt["prompt_token_ids"], params)
            grade = reward(c.text, sample_prompt["question"]) if reward is SOME else reward(c.text)
            sample = sample_from_completion(c, reward=grade)
            return sample if segments == 1 else RolloutRun((sample,) * segments, grade)

        return rollout_fn

    return make_rollout_fn


class HeldRows:
    "Rollouts that wait until their row is released, and that are counted."

    def __init__(self, closed=()):
        self.closed = {n: asyncio.Event() for n in closed}
        self.calls = Counter()
        self.now = 0
        self.most = 0

    async def __call__(self, row, index):
        self.calls[row] += 1
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(0)
            if row in self.closed:
                await self.closed[row].wait()
        finally:
            self.now -= 1

    def open(self, *rows):
        for row in rows:
            self.closed[row].set()


# --- on-policy and synchronous: the same as the synchronous loop ------------------------------------------------------

# the sampler's, which depend a little on what is sampled at the same time
SAMPLED_SERIES = ("logprobs", "sampler_logprobs")


def assert_same_training(ours, theirs, logprob_atol=1e-4):
    "The same rows, tokens, grades and training sequences, and the same passes over the policy, to the last bit."
    assert [r.step for r in ours] == [r.step for r in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert (a.trained, a.options) == (b.trained, b.options)
        # the next rows are in flight after the sync
        assert a.consumed - len(a.pending) == b.consumed - len(b.pending)
        assert (a.passes, a.updates, a.divided_by) == (b.passes, b.updates, b.divided_by)
        by_number = {g.number: g for g in a.groups}
        assert sorted(by_number) == sorted(g.number for g in b.groups)
        for h in b.groups:
            g = by_number[h.number]
            assert (g.key, g.dropped) == (h.key, h.dropped)
            np.testing.assert_array_equal(g.rewards, h.rewards)
            for s, t in zip(g.samples, h.samples, strict=True):
                np.testing.assert_array_equal(s.tokens, t.tokens)
                np.testing.assert_allclose(s.logprobs, t.logprobs, rtol=0, atol=logprob_atol)
        for d, e in zip(a.datums, b.datums, strict=True):
            assert d.advantage == pytest.approx(e.advantage, rel=0.0, abs=0)
            for name in ("tokens", "weights", "sampler_logprobs", "ref_logprobs", "old_logprobs"):
                x = getattr(d, name)
                y = getattr(e, name)
                assert (x is None) == (y is None)
                pair = [[] if series is None else series for series in (x, y)]
                np.testing.assert_allclose(
                    *pair, rtol=0, atol=logprob_atol if name in SAMPLED_SERIES else 0.0
                )
        for x, y in zip(
            a.loss.logprobs if a.loss else (), b.loss.logprobs if b.loss else (), strict=True
        ):
            np.testing.assert_array_equal(x.values, y.values)
        other = ("async/", "perf/", "sync/", "epoch")
        for name in [n for n in a.metrics.keys() & b.metrics.keys() if not n.startswith(other)]:
            assert a.metrics[name] == pytest.approx(
                b.metrics[name], rel=1e-9, abs=logprob_atol, nan_ok=True
            ), name


@pytest.mark.parametrize(
    "timing", ["straight", pytest.param("late and lost", marks=pytest.mark.slow)]
)
def test_on_policy_and_synchronous_is_the_synchronous_loop(timing):
    reward = SOME if timing == "straight" else rollouts(lost=0.1, alone=True)

    async def main():
        settings = {"kl_beta": 0.05, "seed": 2}
        ours = begin(reward, synchronous_training=True, **settings)
        theirs = begin(reward, kind=GRPOLoop, refill=True, **settings)
        records = await ours.run(progress=False), await theirs.run(progress=False)
        await ours.close()
        return ours, theirs, records

    ours, theirs, records = run(main())
    assert sum(r.trained for r in records[0]) >= 3
    # some had equal rewards
    assert any(len(r.groups) > 3 for r in records[0])
    assert_same_training(*records, logprob_atol=1e-4 if timing == "straight" else 0.0)
    assert same(weights(ours), weights(theirs))


# --- any age, any order -----------------------------------------------------------------------------------------------


def test_lost_rows_at_the_end_of_the_data_do_not_end_the_run():
    async def main():
        held_rows = HeldRows([6])

        def factory(setup):
            rollout = rollouts(LENGTH, delay=0, before=held_rows)(setup)

            async def rollout_fn(sample_prompt, row_index, rollout_index):
                sample = await rollout(sample_prompt, row_index, rollout_index)
                return None if row_index == 6 else sample

            return rollout_fn

        loop = begin(factory, rows=7, keep=ALL, max_head_offpolicy_versions=2)
        first = await loop.run(2, progress=False)  # two whole batches, and row 6 is still in flight
        assert [r.trained for r in first] == [True, True]
        assert loop.pending == [6]
        held_rows.open(6)
        [last] = await loop.run(progress=False)
        assert (last.trained, [g.number for g in last.groups]) == (False, [6])
        assert len(last.groups[0].dropped) == 4

    run(main())


def test_rows_that_the_last_step_cannot_use_are_not_started():
    async def main():
        held_rows = HeldRows()
        loop = begin(
            rollouts(LENGTH, before=held_rows), keep=ALL, steps=2, max_head_offpolicy_versions=5
        )
        records = await loop.run(progress=False)
        assert [r.step for r in records] == [1, 2]
        assert sorted(held_rows.calls) == flat(records) == list(range(6))
        assert loop.done
        await nothing_left()

    run(main())


# --- in parts ---------------------------------------------------------------------------------------------------------


def test_chunks_give_the_gradient_of_one_pass():
    async def main():
        extra = {"aggregation": "token_mean", "grad_clip_norm": 0.0, "keep": ALL, "kl_beta": 0.05}
        whole = begin(LENGTH, **extra)
        parts = begin(LENGTH, pipeline_chunks_per_step=3, **extra)
        results = [gradients_of(loop) for loop in (whole, parts)]
        one = await whole.step()
        several = await parts.step()
        assert row_numbers([one]) == row_numbers([several]) == [[0, 1, 2]]
        assert (one.passes, several.passes) == ((12,), (4, 4, 4))
        assert several.metrics["num_loss_tokens"] == one.metrics["num_loss_tokens"]
        assert several.metrics["grad_norm"] == pytest.approx(one.metrics["grad_norm"], rel=2e-4)
        assert several.loss.loss == pytest.approx(one.loss.loss, rel=1e-4, abs=1e-6)
        directions = [torch.cat([g.flatten() for g in grads]) for grads in results]
        torch.testing.assert_close(*(d / d.norm() for d in directions), rtol=0, atol=1e-5)
        for loop in (whole, parts):
            await loop.close()

    run(main())


def gradients_of(loop):
    "A list that gets the gradients of the first update, as they are before they are divided."
    results = []
    optim_step = loop.backend.policy.optim_step

    async def recording(*args, **kwargs):
        results.extend(p.grad.detach().clone() for p in loop.backend.policy.state.params.values())
        return await optim_step(*args, **kwargs)

    loop.backend.policy.optim_step = recording
    return results


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_trainer_that_fails_once_loses_nothing():
    async def main():
        loop = begin(LENGTH, keep=ALL, max_head_offpolicy_versions=1)
        trainer = loop.backend.policy
        calls = Counter()
        method = trainer.optim_step

        async def failing(*args, **kwargs):
            calls["all"] += 1
            if calls["all"] == 2:
                raise TimeoutError("no trainer")
            return await method(*args, **kwargs)

        trainer.optim_step = failing
        with pytest.raises(TimeoutError):
            await loop.run(progress=False)
        check_every_row_is_accounted_for(loop)
        done = [*loop.records]
        done += await loop.run(progress=False)
        check_records(done, ROWS, 1)
        assert all(r.trained for r in done)

    run(main())


# --- by hand ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["prompts", "sample"])
def test_a_phase_that_is_run_again_loses_no_row(phase):
    async def main():
        loop = begin(rollouts(), max_head_offpolicy_versions=1, rows=15)
        await up_to(loop, "prompts", "sample")
        if phase == "prompts":
            loop.prompts()
        await loop.sample()
        check_every_row_is_accounted_for(loop)
        records = [await loop.step(), *await loop.run(progress=False)]
        check_records(records, 15, 1)

    run(main())


def test_pause_starts_nothing_and_resume_continues():
    async def main():
        held_rows = HeldRows(range(ROWS))
        loop = begin(
            rollouts(LENGTH, before=held_rows, delay=0), keep=ALL, max_head_offpolicy_versions=1
        )
        loop.prompts()
        await turns()
        assert sorted(held_rows.calls) == [0, 1, 2, 3, 4, 5]
        await loop.pause()
        held_rows.open(*range(ROWS))
        record = await loop.step()  # what is in flight is enough for a batch
        await loop.pause(drain=True)
        assert sorted(held_rows.calls) == [0, 1, 2, 3, 4, 5]
        assert (len(record.groups), len(loop.producer.ready), loop.producer.in_flight) == (3, 3, {})
        assert "no row is started: paused" in loop.place
        await loop.step()
        with pytest.raises(
            PhaseError,
            match=r"a batch: got 0 of 3 rows, and none started: paused. Call loop.resume",
        ):
            await loop.step()
        assert loop.resume() == 6
        check_records([*loop.records, await loop.step(), *await loop.run(progress=False)], ROWS, 1)

    run(main())


def test_closing_ends_a_step_that_waits():
    async def main():
        loop = begin(rollouts(before=HeldRows([0]), delay=0), rows=6)
        step = asyncio.ensure_future(loop.step())
        await turns()
        await loop.close()
        done, _ = await asyncio.wait([step], timeout=60)
        step.cancel()
        assert done, "a step waits for rows that were given up"
        assert isinstance(step.exception(), PhaseError)

    run(main())


def test_close_twice_and_continue():
    async def main():
        loop = begin(rollouts(), max_head_offpolicy_versions=2)
        await loop.close()  # before anything was started
        first = await loop.step()
        loop.prompts()
        await turns(3)
        await loop.close()
        await nothing_left()
        check_every_row_is_accounted_for(loop)
        await loop.close()
        check_records([first, *await loop.run(progress=False)], ROWS, 2)

    run(main())


# --- going back -------------------------------------------------------------------------------------------------------


async def records_and_weights(loop, steps):
    "Records and weights of n steps."
    results = []
    for _ in range(steps):
        record = await loop.step()
        results.append((record, weights(loop)))
    return results


def test_undo_and_the_same_batch_again_gives_the_same_weights():
    async def main():
        loop = begin(max_head_offpolicy_versions=0)
        await loop.step()
        before = weights(loop)
        [(second, after)] = await records_and_weights(loop, 1)
        await loop.undo(to="backward")
        assert same(before, weights(loop))
        assert (loop.state.number, loop.producer.gate.version) == (2, 1)
        assert loop.producer.gate.accepted == 12 + 4 * (
            len(trained_groups(second)) + len(loop.producer.ready)
        )
        check_every_row_is_accounted_for(loop)
        again = await loop.step()
        assert same(after, weights(loop))
        assert row_numbers([again]) == row_numbers([second])
        assert [g.submitted for g in again.groups] == [g.submitted for g in second.groups]
        assert (
            again.metrics["async/version_offset_max"] == second.metrics["async/version_offset_max"]
        )
        check_records([*loop.records, *await loop.run(progress=False)], ROWS, 0)

    run(main())


def test_rows_of_weights_that_are_gone_are_sampled_again_and_older_ones_stay():
    async def main():
        held_rows = HeldRows([5])
        loop = begin(
            rollouts(LENGTH, before=held_rows, delay=0), keep=ALL, max_head_offpolicy_versions=2
        )
        await loop.step()
        loop.prompts()
        while len(loop.producer.in_flight) > 1:
            await asyncio.sleep(0.001)
        newer = {r.number for r in loop.producer.ready if r.version == 1}
        older = {r.number for r in loop.producer.ready if r.version == 0}
        assert (len(newer), len(older), set(loop.producer.in_flight)) == (3, 5, {5})
        calls = held_rows.calls.copy()
        await loop.undo()
        assert {r.number for r in loop.producer.ready} == older
        assert set(loop.producer.in_flight) == {5}
        assert {*loop.intake.upcoming(len(newer))} == newer
        check_every_row_is_accounted_for(loop)
        held_rows.open(5)
        check_records([await loop.step(), *await loop.run(progress=False)], ROWS, 2)
        again = {n for n in held_rows.calls if held_rows.calls[n] > 4}
        assert again == newer
        assert all(calls[n] == 4 for n in older)

    run(main())


# --- branches ---------------------------------------------------------------------------------------------------------


def test_a_branch_waits_until_nothing_is_in_flight():
    async def main():
        held_rows = HeldRows([4])
        loop = begin(
            rollouts(LENGTH, before=held_rows, delay=0), keep=ALL, max_head_offpolicy_versions=1
        )
        await loop.step()
        with pytest.raises(
            PhaseError, match=r"branch: got \d rows? in flight; .*pause\(drain=True\)"
        ):
            await loop.branch(learning_rate=1e-4)
        held_rows.open(4)
        await loop.pause(drain=True)
        branch = await loop.branch(learning_rate=1e-4)
        loop.resume()
        await up_to(loop, "prompts", "sample", *SECOND_HALF)  # the sync has opened the gate
        with pytest.raises(PhaseError, match=r"another loop's turn: got \d+ rows? in flight"):
            await branch.step()
        await loop.close()
        assert (await branch.step()).step == 2
        await branch.close()

    run(main())


def test_a_branch_gives_what_it_gives_alone():
    "On-policy, so that what is sampled depends on nothing but the weights."

    async def main():
        loop = begin(rows=24)
        alone = begin(rows=24)
        for one in (loop, alone):
            await one.step()
        alone.cfg = replace(alone.cfg, learning_rate=3e-3)
        for one in (loop, alone):
            await up_to(one, "prompts", "sample")
        branch = await loop.branch(at="start", learning_rate=3e-3)
        theirs = [await alone.step() for _ in range(3)]
        ours = []
        others = []
        for _ in range(3):
            others.append(await loop.step())
            ours.append(await branch.step())
        assert row_numbers(ours)[:1] == row_numbers(others)[:1] == row_numbers(theirs)[:1]
        assert_same_training(ours, theirs)
        async with branch.weights.lease():
            assert same(weights(branch), weights(alone))

    run(main())


# --- several updates a step -------------------------------------------------------------------------------------------


def same_but_for_company(result):
    "Whether a replayed step is the same, but for what being sampled together makes of the sampler's logprobs."
    different = [p for p in result.phases if p.same is False]
    return all((p.phase, p.unit) == ("sample", "nats") and p.difference < 1e-4 for p in different)


def test_several_updates_are_recorded_replayed_and_sought(tmp_path):
    async def main():
        settings = {"policy_loss": "grpo", "ppo_n_minibatches": 3, "rows": 9}
        loop = begin(LENGTH, kind=AsyncGRPOLoop, keep=ALL, **settings)
        folder = RunFolder.create(tmp_path / "run", loop.cfg)
        loop.outputs.append(folder.add)
        steps = await records_and_weights(loop, 2)
        for record, _ in steps:
            assert record.updates == (4, 4, 4)
            assert (
                record.metrics[
                    "optim/num_updates" if "optim/num_updates" in record.metrics else "num_updates"
                ]
                == 3
            )
            assert [[len(p) for p in passes] for passes in updates_of(record)] == [[4], [4], [4]]
            gap = max(
                np.abs(d.old_logprobs - d.sampler_logprobs)[d.active].max() for d in record.datums
            )
            assert record.metrics["sampling/sampling_logp_difference/max"] == pytest.approx(
                gap, abs=1e-5
            )
        result = await replay(
            folder, 2, fresh := begin(LENGTH, kind=AsyncGRPOLoop, keep=ALL, **settings)
        )
        assert same_but_for_company(result), result
        assert all(p.same is not None for p in result.phases)
        [note] = [p.note for p in result.phases if p.phase == "backward"]
        assert note == "the first of 3 updates"
        await fresh.close()
        assert same(weights(fresh), steps[1][1])
        other = begin(LENGTH, kind=AsyncGRPOLoop, keep=ALL, **settings)
        arrival = await other.seek(2, folder)
        assert (arrival.step, arrival.gap) == (2, 0.0)
        assert same(weights(other), steps[1][1])
        last = await loop.step()
        theirs = await other.step()
        assert_same_training([theirs], [last])
        for one in (loop, other):
            await one.close()

    run(main())


def breaking(loop, what, *fail):
    "Let calls of the trainer fail, by their number."
    method = getattr(loop.backend.policy, what)
    calls = Counter()

    async def failing(*args, **kwargs):
        calls["all"] += 1
        if calls["all"] in fail:
            raise TimeoutError("no trainer")
        return await method(*args, **kwargs)

    setattr(loop.backend.policy, what, failing)
    return calls


@pytest.mark.parametrize("kind", [GRPOLoop, pytest.param(AsyncGRPOLoop, marks=pytest.mark.slow)])
def test_failed_updates_are_continued_and_none_is_made_twice(kind):
    async def main():
        settings = {"ppo_n_minibatches": 3, "policy_loss": "ppo"}
        plain, loop = (begin(LENGTH, kind=kind, keep=ALL, **settings) for _ in range(2))
        await plain.step()
        await up_to(
            loop, "prompts", "sample", "score", "advantages", "datums", "reference", "backward"
        )
        calls = breaking(loop, "optim_step", 2)
        with pytest.raises(TimeoutError):
            await loop.optimize()
        record = await loop.step()
        assert calls["all"] == 4
        assert (record.updates, record.passes) == ((4, 4, 4), (4, 4, 4))
        assert same(weights(loop), weights(plain))
        await loop.undo(to="advantages")
        await loop.step()
        assert same(weights(loop), weights(plain))
        for one in (loop, plain):
            await one.close()

    run(main())


@pytest.mark.parametrize("kind", [pytest.param(GRPOLoop, marks=pytest.mark.slow), AsyncGRPOLoop])
def test_a_step_between_two_updates_can_be_taken_back_and_is_no_place_to_leave(kind, tmp_path):
    async def main():
        settings = {"ppo_n_minibatches": 2, "policy_loss": "ppo"}
        loop, plain = (begin(LENGTH, kind=kind, keep=ALL, **settings) for _ in range(2))
        folder = RunFolder.create(tmp_path / "run", loop.cfg)
        await loop.step()
        before = weights(loop)
        breaking(loop, "optim_step", 2)
        with pytest.raises(TimeoutError):
            await loop.step()
        assert not same(before, weights(loop))
        if kind is AsyncGRPOLoop:
            await loop.pause(drain=True)
        with pytest.raises(PhaseError, match="step 2 half done"):
            await save_checkpoint(loop, folder)
        with pytest.raises(PhaseError, match="branch: got updated weights"):
            await loop.branch(learning_rate=1e-4)
        for phase in ("score", "advantages", "datums", "loss"):
            with pytest.raises(PhaseError, match="step 2 has updated the weights"):
                getattr(loop, phase)()
        await loop.undo(to="advantages")
        assert same(before, weights(loop))
        if kind is AsyncGRPOLoop:
            loop.resume()
        await loop.step()
        await plain.run(2, progress=False)
        assert same(weights(loop), weights(plain))
        for one in (loop, plain):
            await one.close()

    run(main())


# --- checkpoints, records ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("versions", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_run_continues_from_a_checkpoint_with_rows_that_were_in_flight(versions, tmp_path):
    async def main():
        loop = begin(rollouts(), max_head_offpolicy_versions=versions)
        folder = RunFolder.create(tmp_path / "run", loop.cfg)
        loop.outputs.append(folder.add)
        first = await loop.run(2, progress=False)
        loop.prompts()
        assert await save_checkpoint(loop, folder) == 2
        pending = loop.pending
        await up_to(
            loop, "sample", "score", "advantages", "datums", "reference", "backward", "optimize"
        )
        with pytest.raises(PhaseError, match="step 3 half done"):
            await save_checkpoint(loop, folder)
        await loop.close()
        result = folder.latest_checkpoint()
        assert result.extra["pending"] == pending
        plain = begin(rollouts(), kind=GRPOLoop)  # has nothing in flight, and samples them first
        assert await restore_checkpoint(plain, result) == 2
        upcoming = [*pending, *range(result.cursor["consumed"], ROWS)]
        assert [p.number for p in plain.prompts()] == upcoming[:3]
        assert flat([*first, *await plain.run(progress=False)]) == [*range(ROWS)]
        later = begin(rollouts(), max_head_offpolicy_versions=versions)
        assert await restore_checkpoint(later, result) == 2
        assert (later.pending, later.cursor.consumed) == (pending, result.cursor["consumed"])
        check_records([*first, *await later.run(progress=False)], ROWS, versions)

    run(main())


def test_a_step_is_replayed_as_far_as_it_can_be(tmp_path):
    reward = rollouts(alone=True)
    settings = {"max_head_offpolicy_versions": 1, "pipeline_chunks_per_step": 3, "kl_beta": 0.05}

    async def main():
        loop = begin(reward, **settings)
        folder = RunFolder.create(tmp_path / "run", loop.cfg)
        loop.outputs.append(folder.add)
        records = await loop.run(progress=False)
        outcome = weights(loop)
        assert any(len(r.groups) > len(trained_groups(r)) for r in records)
        for record in records[-2:]:
            fresh = begin(reward, **settings)
            result = await replay(folder, record.step, fresh)
            assert same_but_for_company(result), result
            older = {s.policy_version for g in record.groups for s in g.samples} - {record.step - 1}
            together = not loop.cfg.max_head_offpolicy_versions and len(record.groups) <= 3
            room = loop.cfg.max_concurrency_rollout_sample or 999
            together = together and len(record.groups) * loop.cfg.completions_per_prompt <= room
            left = {p.phase: p.note for p in result.phases if p.same is None}
            without = {"reference"} if record.trained and not loop.cfg.kl_beta else set()
            graded = {"score"}  # while they were sampled
            assert set(left) == without | (set() if together else {"sample"} | graded), result
            if older:
                assert left["sample"].startswith("sampled from the weights of version")
            elif not together:
                assert left["sample"].startswith("sampled in another batch")
            await nothing_left()  # a replay starts no row
            if record is records[-1]:
                assert same(weights(fresh), outcome)
            await fresh.close()

    run(main())


@pytest.mark.parametrize("versions", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_seek_in_a_loop_that_is_running(versions, tmp_path):
    async def main():
        loop = begin(rollouts(), rows=24, max_head_offpolicy_versions=versions)
        folder = RunFolder.create(tmp_path / "run", loop.cfg)
        loop.outputs.append(folder.add)
        steps = await records_and_weights(loop, 1)
        await save_checkpoint(loop, folder)
        steps += await records_and_weights(loop, 2)
        loop.prompts()
        await turns(3)
        loop.outputs.clear()
        arrival = await loop.seek(2, folder)
        assert arrival.gap == 0.0
        assert same(weights(loop), steps[1][1])
        assert tuple(loop.pending) == steps[1][0].pending
        assert (loop.producer.gate.version, loop.state.number) == (2, 3)
        later = await loop.run(progress=False)
        check_records([*(r for r, _ in steps[:2]), *later], 24, versions)

    run(main())


# --- what the user brings ---------------------------------------------------------------------------------------------


def test_a_filter_decides_what_is_trained_on():
    async def main():
        counts = Counter()

        def keep(group):
            counts[group.number] += 1
            assert group.advantages is not None
            return group.number % 3 > 0 and np.ptp(group.rewards) > 0

        loop = begin(rollouts(), keep=keep, max_head_offpolicy_versions=1)
        records = await loop.run(progress=False)
        check_records(records, ROWS, 1)
        trained = {g.number for r in records for g in trained_groups(r)}
        assert trained
        assert not any(n % 3 == 0 for n in trained)
        assert records[-1].metrics["async/filter_drops"] == ROWS - len(trained)

    run(main())
