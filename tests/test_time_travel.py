"Going back, branching off, rebuilding, replaying: everything on the shipped model, compared bit for bit."

import asyncio
import functools
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_loop import ALL, LENGTH, SMALL_RUN, make_loop, same, texts, up_to, weights

from rl_notebook.config.config import Config
from rl_notebook.core.losses import make_loss_fn
from rl_notebook.core.types import (
    BackendError,
    ConfigError,
    DataError,
    PhaseError,
    RecordError,
    RewardError,
)
from rl_notebook.experiments.replay import replay
from rl_notebook.loop.back import save_checkpoint
from rl_notebook.loop.state import PHASES, StepState
from rl_notebook.recipes.rl_loop import replay_step, train
from rl_notebook.runs.records import write_record
from rl_notebook.runs.run import RunFolder
from rl_notebook.task.models import load_model


def run(coroutine):
    return asyncio.run(coroutine)


def length(text: str) -> float:
    "A reward that differs inside nearly every group, by name."
    return float(len(text))


def measurements(record):
    "Everything measured in a step, but the clock, and the probe of its sync, which is of the run's first step."
    loss = float("nan") if record.loss is None else record.loss.loss
    measured = {
        name: value for name, value in record.metrics.items() if not name.startswith("sync/")
    }
    return {**measured, "version": record.policy_version, "loss of the record": loss}


def assert_equal(ours, theirs, rel=0.0):
    "The same names and, to the last bit unless said otherwise, the same numbers."
    assert ours.keys() == theirs.keys()
    different = {
        k: (ours[k], theirs[k])
        for k in ours
        if ours[k] != pytest.approx(theirs[k], rel=rel, abs=0, nan_ok=True)
    }
    assert different == {}


# --- the phase in progress ------------------------------------------------------------------------------------------


BREAKS = {  # phase: (owner of the method that fails, its name)
    "prompts": (lambda loop: loop.backend.tokenizer, "apply_chat_template"),
    "sample": (lambda loop: loop.backend.sampler, "sample"),
    "score": (lambda loop: loop, "score"),  # with a reward function that fails
    "reference": (lambda loop: loop.backend.reference, "forward"),
    "backward": (lambda loop: loop.backend.policy, "forward_backward_custom"),
    "optimize": (lambda loop: loop.backend.policy, "optim_step"),
    "sync": (lambda loop: loop.backend.policy, "save_weights_for_sampler"),
}


@functools.cache
def reference_steps():
    "The first two steps of an undisturbed loop."
    return asyncio.run(make_loop().run(2, progress=False))


def position_of(loop):
    "Where a loop is."
    state = loop.state
    return (
        state.number,
        set(state.values),
        loop.cursor.consumed,
        len(loop.records),
        loop.policy_version,
        loop.running,
    )


async def run_failing_phase(loop, phase, monkeypatch):
    "Run a phase of which something fails."

    def failing(*args, **kwargs):
        assert loop.running == phase
        raise RuntimeError("the fault of the backend")

    if phase == "score":
        loop.score(lambda text: failing())
    owner, name = BREAKS[phase]
    with monkeypatch.context() as broken:
        broken.setattr(owner(loop), name, failing)
        result = getattr(loop, phase)()
        await result if asyncio.iscoroutine(result) else result


def test_a_phase_that_fails_leaves_the_loop_where_it_stood(monkeypatch):
    expected = measurements(reference_steps()[1])

    async def main():
        loop = make_loop()
        await loop.step()
        for phase in PHASES:
            if phase in BREAKS:
                before = position_of(loop)
                weights_before = weights(loop)
                loop.state.cache.clear()  # scored again by the reference
                with pytest.raises(
                    (RuntimeError, RewardError, DataError), match="the fault of the backend"
                ):
                    await run_failing_phase(loop, phase, monkeypatch)
                assert position_of(loop) == before, phase
                assert same(weights_before, weights(loop)), phase
            result = getattr(loop, phase)()
            record = await result if asyncio.iscoroutine(result) else result
        assert_equal(measurements(record), expected, rel=1e-6)

    run(main())


def test_a_window_of_which_nothing_came_costs_no_prompts(monkeypatch):
    async def main():
        loop = make_loop(weight_sync_interval=2, reward=LENGTH)

        async def failing(tokens, params):
            raise TimeoutError("no sampler")

        with monkeypatch.context() as broken:
            broken.setattr(loop.backend.sampler, "sample", failing)
            with pytest.raises(TimeoutError):
                await loop.run(2, progress=False)
        assert (loop.cursor.consumed, loop.pending, loop.running) == (0, [], "")
        assert [r.step for r in await loop.run(2, progress=False)] == [1, 2]
        assert loop.pending == []

    run(main())


# --- undo: exceptions, backends that cannot, what it costs ----------------------------------------------------------


def backend_without_states(loop):
    "The loop's backend, as one that cannot save states."
    loop.backend.capabilities = replace(
        loop.backend.capabilities, name="bare", state_snapshots=False
    )
    loop.backend.policy.save_state = loop.backend.policy.load_state = None  # must not be called
    return loop


def test_a_backend_without_snapshots_trains_and_says_what_it_cannot(tmp_path):
    async def main():
        loop = backend_without_states(make_loop())
        folder = record_to_folder(loop, tmp_path)
        assert (await loop.step()).trained
        assert "remember" not in loop.records[-1].seconds
        calls = {
            "undo": loop.undo,
            "branch": lambda: loop.branch(kl_beta=0.5),
            "seek": lambda: loop.seek(1, folder),
        }
        for what, call in calls.items():
            with pytest.raises(
                BackendError, match=rf"backend bare: {what}: got no state snapshots; expected a"
            ):
                await call()
        assert loop.state.number == 2

    run(main())


def test_undo_after_a_sync_gives_the_sampler_what_it_served_not_what_the_trainer_had():
    async def main():
        loop = make_loop(keep_undo=2, weight_sync_interval=2, reward=LENGTH)
        tokens = loop.prompts()[0].tokens
        served = (await loop.backend.sampler.logprobs(tokens)).values
        for _ in range(2):
            await up_to(loop, "finish")
        assert loop.policy_version == 1
        await loop.undo()  # step 2, after whose update the weights were synced
        np.testing.assert_array_equal((await loop.backend.sampler.logprobs(tokens)).values, served)
        assert loop.policy_version == 0
        assert not same(weights(loop), load_weights(loop))

    run(main())


def load_weights(loop):
    "The weights that the shipped model came with."
    return dict(load_model("tiny")[0].named_parameters())


# --- branches -------------------------------------------------------------------------------------------------------


async def loop_with_changes(changes=None, **settings):
    "A loop with one finished step and a batch in hand, for which settings were changed."
    loop = make_loop(reward=LENGTH, **settings)
    await loop.step()
    loop.cfg = replace(loop.cfg, **changes or {})
    await up_to(loop, "score")
    return loop


async def records_without_branch(changes, at, steps, **settings):
    "The records of a loop that does the same as a branch, with a backend to itself."
    loop = await loop_with_changes(changes, **settings)
    if at == "start":
        loop.state = StepState(loop.state.number, loop.state.cursor)
    else:
        loop.state.values = {
            k: v for k, v in loop.state.values.items() if k in ("prompts", "sample", "score")
        }
    return [await loop.step() for _ in range(steps)], weights(loop)


def assert_same_records(ours, theirs):
    "The same numbers, tokens and logprobs to the last bit."
    assert [r.step for r in ours] == [r.step for r in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert_equal(measurements(a), measurements(b))
        assert (a.policy_version, a.consumed, a.options) == (
            b.policy_version,
            b.consumed,
            b.options,
        )
        for g, h in zip(a.groups, b.groups, strict=True):
            for s, t in zip(g.samples, h.samples, strict=True):
                np.testing.assert_array_equal(s.tokens, t.tokens)
                np.testing.assert_array_equal(s.logprobs, t.logprobs)
        assert (a.loss is None) == (b.loss is None)
        for x, y in zip(
            a.loss.logprobs if a.loss else (), b.loss.logprobs if b.loss else (), strict=True
        ):
            np.testing.assert_array_equal(x.values, y.values)


CHANGES = {"kl_beta": 0.5, "learning_rate": 3e-3, "policy_loss": "reinforce"}


def test_two_branches_give_what_each_gives_alone():
    async def main():
        loop = await loop_with_changes(lora_rank=4)
        branch = await loop.branch(at="batch", **CHANGES)
        assert branch.state.current == "advantages"
        ours = []
        theirs = []
        for _ in range(2):
            theirs.append(await branch.step())
            ours.append(await loop.step())
        assert_same_records(
            ours, (expected := await records_without_branch({}, "batch", 2, lora_rank=4))[0]
        )
        async with loop.weights.lease():
            assert same(weights(loop), expected[1])
        assert_same_records(
            theirs, (expected := await records_without_branch(CHANGES, "batch", 2, lora_rank=4))[0]
        )
        async with branch.weights.lease():
            assert same(weights(branch), expected[1])

    run(main())


def test_a_branch_keeps_the_batch_and_scores_it_again_with_another_reward():
    async def main():
        loop = await loop_with_changes()
        branch = await loop.branch(reward=lambda text: -float(len(text)))
        assert branch.state.current == "score"
        ours = await loop.step()
        theirs = await branch.step()
        assert texts(ours) == texts(theirs)
        assert [g.rewards.tolist() for g in ours.groups] == [
            (-g.rewards).tolist() for g in theirs.groups
        ]
        weighted = await (await loop_with_changes(rewards=["length"])).branch(reward_weights=[0.5])
        assert weighted.state.current == "score"
        regrouped = await (await loop_with_changes()).branch(min_group_size=2)
        assert regrouped.state.current == "score"

    run(main())


NO_BRANCH = [
    (
        {"base_model": "smollm2"},
        r"base_model: got 'smollm2'; expected 'tiny', as the loop was opened",
    ),
    ({"log_path": "runs/x"}, r"log_path: got 'runs/x'.*open another loop for it"),
    ({"temperature": 0.7}, r"temperature: got 0.7; expected 1.0, at which the policy scores"),
    ({"kl_betta": 0.7}, r"unknown setting 'kl_betta'"),
]


def test_a_setting_that_a_branch_cannot_change_is_rejected():
    async def main():
        loop = await loop_with_changes()
        for changes, message in NO_BRANCH:
            with pytest.raises(ConfigError, match=message):
                await loop.branch(**changes)
        assert loop.weights.family == ["main"]
        assert (await loop.step()).trained

    run(main())


def test_places_from_which_no_branch_leaves_say_why():
    async def main():
        loop = make_loop(reward=LENGTH, keep=ALL)
        with pytest.raises(
            PhaseError, match=r"step 1: branch: got no samples yet; expected a batch. Run await"
        ):
            await loop.branch(at="batch")
        with pytest.raises(PhaseError, match=r"branch: got at='end'; expected 'batch' or 'start'"):
            await loop.branch(at="end")
        await up_to(loop, "optimize")
        with pytest.raises(
            PhaseError, match=r"branch: got updated weights; expected a step before its update"
        ):
            await loop.branch()
        windows = make_loop(reward=LENGTH, keep=ALL, weight_sync_interval=2)
        async for _ in windows:
            with pytest.raises(
                PhaseError, match=r"branch: got a running window; .* Let the window end"
            ):
                await windows.branch(kl_beta=0.5)
            break
        never = make_loop(reward=LENGTH, weight_sync_interval=0)
        await up_to(never, "finish")
        with pytest.raises(
            PhaseError, match=r"weights that the sampler has not got yet; .*weight_sync_interval=0"
        ):
            await never.branch(kl_beta=0.5)

    run(main())


def test_a_turn_that_could_never_come_is_rejected_and_costs_nothing():
    async def main():
        loop = make_loop(reward=LENGTH, keep=ALL, weight_sync_interval=2, rows=12)
        branch = await loop.branch(kl_beta=0.5)
        numbers = []
        async for record in loop:
            numbers.append(record.step)
            with pytest.raises(
                PhaseError, match=r"the backend for 'kl_beta=0.5': got a step of 'main' that waits"
            ):
                await branch.step()
        assert numbers == [1, 2, 3, 4]
        assert [r.step for r in await branch.run(progress=False)] == [1, 2, 3, 4]

    run(main())


def test_an_interrupt_stops_all_loops_that_run_and_the_handler_comes_back():
    async def main():
        handler = signal.getsignal(signal.SIGINT)
        loop = await loop_with_changes()
        branch = await loop.branch(kl_beta=0.5)
        loop.outputs.append(lambda record: signal.raise_signal(signal.SIGINT))
        ours, theirs = await asyncio.gather(loop.run(progress=False), branch.run(progress=False))
        assert (len(ours), loop.stop_requested, branch.stop_requested) == (1, True, True)
        assert len(theirs) <= 1
        assert signal.getsignal(signal.SIGINT) is handler

    run(main())


# --- seek -----------------------------------------------------------------------------------------------------------


def record_to_folder(loop, tmp_path):
    "A run folder that the loop writes to."
    folder = RunFolder.create(tmp_path / "run", loop.cfg)
    loop.outputs.append(folder.add)
    return folder


STEPS = 5


class Recorded:
    "A run in a folder, with the weights after each of its steps."

    def __init__(self, path, every):
        self.every = every
        self.loop = self.fresh()
        self.folder = RunFolder.create(path / "run", self.loop.cfg)
        self.loop.outputs.append(self.folder.add)
        self.weights = [weights(self.loop)]
        run(self.all())

    def fresh(self, **settings):
        gentle = {"learning_rate": 2e-4, "rows": 48}
        return make_loop(reward=LENGTH, **gentle | settings)

    async def all(self):
        for _ in range(STEPS):
            assert (await self.loop.step()).trained
            self.weights.append(weights(self.loop))
            if self.every:
                await save_checkpoint(self.loop, self.folder, every=self.every)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    "Runs by checkpoint interval, made when asked for."

    class Runs(dict):
        def __missing__(self, key):
            self[key] = Recorded(tmp_path_factory.mktemp("runs"), key)
            return self[key]

    return Runs()


def test_seek_restores_the_weights_of_the_run_and_continues_as_it_did(runs):
    result = runs[0]

    async def main():
        assert result.folder.checkpoints == []
        loop = result.fresh()
        for step in (3, 5, 4):
            arrival = await loop.seek(step, result.folder)
            assert (arrival.step, arrival.gap) == (step, 0.0)
            assert arrival.base == 0
            assert same(weights(loop), result.weights[step])
            record = result.folder.record(step)
            assert (loop.state.number, loop.cursor.consumed) == (step + 1, record.consumed)
            assert (loop.policy_version, loop.state.values) == (record.policy_version, {})
        last = await loop.step()
        assert_same_records([last], [result.folder.record(5)])
        assert same(weights(loop), result.weights[5])

    run(main())


def test_seek_goes_back_in_a_running_loop_and_forward_again(runs):
    result = runs[2]

    async def main():
        loop = result.loop
        records = [result.folder.record(n) for n in range(1, STEPS + 1)]
        assert [r.step for r in loop.records] == [1, 2, 3, 4, 5]
        outputs = loop.outputs
        loop.outputs = []
        await loop.seek(3, result.folder)
        assert [r.step for r in loop.records] == [1, 2, 3]
        assert_same_records([await loop.step(), await loop.step()], records[3:])
        await up_to(loop, "optimize")
        await loop.seek(5, result.folder)
        assert same(weights(loop), result.weights[5])
        assert [r.step for r in loop.records] == [1, 2, 3, 4, 5]
        with pytest.raises(PhaseError, match="no update to take back"):
            await loop.undo()
        with pytest.raises(
            RecordError, match=r"no way to step 1: got checkpoints after 2, 4, and a loop in step 6"
        ):
            await loop.seek(1, result.folder)
        assert result.folder.steps == [1, 2, 3, 4, 5]
        loop.outputs = outputs

    run(main())


def test_seek_leaves_the_folder_alone_until_it_is_rewound(runs, tmp_path):
    result = runs[0]

    async def main():
        shutil.copytree(result.folder.path, tmp_path / "copy")
        folder = RunFolder.open(tmp_path / "copy")
        loop = result.fresh()
        loop.outputs.append(folder.add)
        await loop.seek(2, folder)
        with pytest.raises(
            RecordError, match=r"recorded already.*Rewind the run to an earlier step first"
        ):
            await loop.step()
        folder.rewind(2)
        loop.finish()
        assert_same_records([folder.record(3)], [result.folder.record(3)])

    run(main())


def test_seek_from_another_model_is_noticed(runs):
    result = runs[0]

    async def main():
        loop = result.fresh()
        with torch.no_grad():
            next(iter(loop.backend.policy.state.params.values())).mul_(1.05)
        with pytest.warns(
            UserWarning, match=r"not the weights of .*: logprobs differ from its records by"
        ):
            arrival = await loop.seek(2, result.folder)
        assert arrival.gap > 1e-3

    run(main())


@pytest.mark.slow
def test_a_run_in_windows_is_sought_where_a_checkpoint_is(tmp_path):
    async def main():
        settings = {"weight_sync_interval": 2, "rows": 18}
        loop = make_loop(reward=LENGTH, keep=ALL, **settings)
        folder = record_to_folder(loop, tmp_path)
        loop.at_boundary.append(lambda: save_checkpoint(loop, folder))
        records = await loop.run(progress=False)
        other = make_loop(reward=LENGTH, keep=ALL, **settings)
        await other.seek(4, folder)
        assert_same_records(await other.run(progress=False), records[4:])
        with pytest.raises(
            RecordError,
            match=r"step 5 of a run in windows: got no checkpoint; expected a step with a",
        ):
            await other.seek(5, folder)
        assert other.done

    run(main())


# --- replay ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [0, 2])
def test_every_step_is_replayed_to_the_last_bit(every, runs):
    outcome = runs[every]

    async def main():
        loop = outcome.fresh()
        for step in (3, 5) if every else (1, 3):
            result = await replay(outcome.folder, step, loop)
            assert result.first_difference is None, result
            assert result.same is True
            assert same(weights(loop), outcome.weights[step])
            assert (loop.state.number, loop.state.current) == (step, "finish")
            assert_same_records([loop.finish()], [outcome.folder.record(step)])

    run(main())


def test_the_first_phase_that_differs_is_named(runs, tmp_path):
    "A reference logprob that was recorded otherwise; other phases are on the page of replay."
    outcome = runs[2]

    async def main():
        shutil.copytree(outcome.folder.path, tmp_path / "tampered")
        folder, record = RunFolder.open(tmp_path / "tampered"), outcome.folder.record(3)
        values = np.array(record.datums[1].ref_logprobs)
        datums = list(record.datums)
        values[-1] += 0.125
        datums[1] = replace(datums[1], ref_logprobs=values)
        place = folder.path / "steps" / "00003"
        shutil.rmtree(place)
        place.mkdir()
        write_record(replace(record, datums=datums), place)
        result = await replay(folder, 3, outcome.fresh())
        first = result.first_difference
        assert (first.phase, first.unit) == ("reference", "nats"), result
        assert first.difference == pytest.approx(0.125, rel=1e-6)
        assert first.where.startswith(
            f"group 0, sample 1 (row '{record.groups[0].key}'), logprobs["
        )
        assert result.sentence.startswith(
            "step 3: reference is the first phase that is not the same; it differs by"
        )

    run(main())


@pytest.mark.slow
def test_phases_that_cannot_be_computed_again_are_reported(tmp_path):
    async def main():
        def doubled(datums, denominator):
            inner = make_loss_fn(datums, policy_loss="grpo", denominator=denominator)
            return lambda data, logprobs: (2 * inner(data, logprobs)[0], inner(data, logprobs)[1])

        def better(text):
            return float(len(text))

        loop = make_loop(reward=better, make_loss=doubled)
        folder = record_to_folder(loop, tmp_path)
        await loop.run(2, progress=False)

        def notes(result):
            assert result.first_difference is None, result
            return {p.phase: p.note for p in result.phases if p.same is None}

        assert (await replay(folder, 2, make_loop(reward=better, make_loss=doubled))).same
        without = notes(await replay(folder, 1, make_loop(reward=better)))
        assert set(without) == {"backward", "optimize", "sync", "finish"}
        assert (
            "a custom loss: got no make_loss; expected a loop with this loss: "
            in without["backward"]
        )
        later = notes(await replay(folder, 2, make_loop(reward=better)))
        assert set(later) == {"sample", "backward", "optimize", "sync", "finish"}
        assert later["sample"].startswith(
            "the weights before the step are not known: step 1: a custom loss"
        )
        other = notes(await replay(folder, 1, make_loop(reward=LENGTH, make_loss=doubled)))
        assert other == {"score": "graded by better, and the loop has <lambda>"}

    run(main())


@pytest.mark.slow
def test_windows_are_replayed_as_far_as_they_can_be(tmp_path):
    async def main():
        settings = {"weight_sync_interval": 2, "rows": 18}
        loop = make_loop(reward=LENGTH, keep=ALL, **settings)
        folder = record_to_folder(loop, tmp_path)
        await loop.run(progress=False)
        for step in (1, 2, 3, 6):
            result = await replay(folder, step, make_loop(reward=LENGTH, keep=ALL, **settings))
            assert result.first_difference is None, result
            assert [p.phase for p in result.phases if p.same is None] == ["sample", "sync"]

    run(main())


def test_a_loss_that_was_passed_by_hand_is_replayed_and_reported(tmp_path):
    async def main():
        loop = make_loop(reward=LENGTH)
        folder = record_to_folder(loop, tmp_path)
        await up_to(loop, "reference")
        loop.loss(kl_beta=0.5)
        await loop.step()
        fresh = make_loop(reward=LENGTH)
        result = await replay(folder, 1, fresh)
        assert result.same
        [note] = [p.note for p in result.phases if p.phase == "backward"]
        assert note == "trained with kl_beta=0.5, config 0.05"
        assert_same_records([fresh.finish()], [folder.record(1)])

    run(main())


def test_replay_works_on_a_backend_without_snapshots_from_the_beginning(runs):
    result = runs[0]

    async def main():
        assert (await replay(result.folder, 3, backend_without_states(result.fresh()))).same

    run(main())


# --- bad input ------------------------------------------------------------------------------------------------------


def test_a_step_that_is_not_there(runs):
    result = runs[0]

    async def main():
        loop = result.fresh()
        for call in (lambda: replay(result.folder, 9, loop), lambda: loop.seek(9, result.folder)):
            with pytest.raises(RecordError, match=r"no such step: got 9; expected 1 to 5"):
                await call()
        with pytest.raises(RecordError, match=r"no such step: got -1; expected 1 to 5"):
            await loop.seek(-1, result.folder)
        assert (loop.state.number, loop.state.values) == (1, {})
        assert same(weights(loop), result.weights[0])

    run(main())


def test_a_loop_with_another_past_is_rejected(runs):
    result = runs[0]

    async def main():
        loop = result.fresh(seed=9)
        for call in (lambda: replay(result.folder, 2, loop), lambda: loop.seek(2, result.folder)):
            with pytest.raises(RecordError, match=r"got seed=9; expected seed=0"):
                await call()

    run(main())


# --- from a folder alone --------------------------------------------------------------------------------------------


def test_a_step_is_replayed_from_its_folder(tmp_path):
    async def main():
        small = {k: v for k, v in SMALL_RUN.items() if k != "epochs"} | {
            "max_rows": 12,
            "rewards": ["test_time_travel:length"],
        }
        cfg = Config(log_path=str(tmp_path / "run"), dcp_save_interval=2, **small)
        quiet = {"say": lambda line: None, "progress": False}
        await train(cfg, **quiet)
        assert (await replay_step(cfg.log_path, 3)).same
        later = replace(
            cfg,
            log_path=str(tmp_path / "later"),
            dcp_save_interval=0,
            resume={"resume_from": checkpoint(cfg, 2)},
        )
        await train(later, **quiet)
        result = await replay_step(later.log_path, 4)
        assert result.same, result
        with pytest.raises(RecordError, match="no such step: got 1; expected 3 to 4"):
            await replay_step(later.log_path, 1)

    def checkpoint(cfg, step):
        return str(Path(cfg.log_path) / "checkpoints" / f"{step:05d}")

    run(main())
