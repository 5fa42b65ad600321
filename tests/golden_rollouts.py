"""Recorded rollouts, groups, batches and cursors, turned into calls of ours; `golden_adapters` registers them.

Where a recorded function took a list of results, ours takes the function that makes them, so the adapters play the
results back: each rollout returns, or is lost, at the moment at which the recorded one was.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from golden_adapters import (
    AGREED,
    EXACT,
    SINGLE,
    Case,
    Outcome,
    adapter,
    close,
    floats,
    assert_rejected,
    simulate,
    stats_of,
)

from rl_notebook.core.advantages import has_no_signal, with_advantages
from rl_notebook.core.align import align_logprobs, align_routing
from rl_notebook.backends.local.trainer import open_local
from rl_notebook.task.chat import sample_from_completion
from rl_notebook.core.types import (
    AlignmentError,
    Completion,
    Logprobs,
    PromptGroup,
    RewardError,
    RLNotebookError,
)
from rl_notebook.core.types import RolloutRun, RolloutSample, SampleParams
from rl_notebook.config.config import Config
from rl_notebook.task.data import Cursor, Row, load_rows, restore_cursor
from rl_notebook.core.datums import attach, datums_from_groups
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.core.metrics import step_metrics
from rl_notebook.runs.records import StepRecord
from rl_notebook.loop.rollouts import (
    RolloutSetup,
    assemble,
    balanced_chunks,
    sample_rollouts,
    minibatch_slices,
)
from rl_notebook.recipes.open import build_deployment_sampler
from rl_notebook.task.data import Prompt
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_rows

ROW_PROMPT = Prompt(Row(key="row", prompt="?"), [1])


def sampled_group(results: Sequence[Any]) -> PromptGroup:
    "The group of one prompt of which these are the results; a callable is called first."

    async def rollout_fn(sample_prompt: dict[str, Any], rollout_index: int) -> Any:
        result = results[rollout_index]
        return result() if callable(result) else result

    sampled = asyncio.run(sample_rollouts(rollout_fn, ROW_PROMPT, len(results)))
    return assemble(sampled, sampled.samples)


# -- cutting a step ----------------------------------------------------------------------------------------------

ZERO_IS_ONE = "0 minibatches count as one there; here they are rejected"


@adapter("async_chunks__HEAD")
def chunks(case: Case) -> Outcome:
    "Pipeline chunks: balanced, the larger ones first."
    c = case.config
    if case.raises:
        sizes = {
            "prompt_groups_per_step": c["total_groups"],
            "pipeline_chunks_per_step": c["requested_chunks"],
        }
        assert_rejected(lambda: Config(recipe="async_rl_loop", **sizes), *sizes)
    else:
        assert balanced_chunks(c["total_groups"], c["requested_chunks"]) == case.expected["targets"]
    return AGREED


@adapter("ppo_minibatches__517d206d")
def minibatches(case: Case) -> Outcome:
    "Slices of the datums, one per optimizer step."
    count = case.inputs["n_datums"]
    parts = case.config["ppo_n_minibatches"]
    if parts < 1:
        assert_rejected(lambda: Config(ppo_n_minibatches=parts), "ppo_n_minibatches")
    slices = minibatch_slices(count, max(parts, 1))
    assert [[s.start, s.stop] for s in slices] == case.expected["slices"]
    return AGREED if parts >= 1 else Outcome((ZERO_IS_ONE,))


# -- one completion, one sample ----------------------------------------------------------------------------------

DROPPED = "logprobs that do not fit, or have gaps, are an error here; there the sample is dropped silently"
NO_PROMPT = (
    "a sequence that begins with a sampled token is rejected: nothing scores its first token"
)
UNSHIFTED = "N values without an undefined first one are rejected as already shifted; agrees once the first is undefined"
BELIEVED = "a gap in the logprobs of sampled tokens is rejected; there it goes into the sample"
ECHOED = "an echo of N-1 values is understood; there every such sample is dropped"


def completion_logprobs(case: Case, values: Sequence[float | None]) -> np.ndarray:
    "(C,) what a sampler returned, as completion logprobs."
    x = case.inputs
    target = align_logprobs(
        values, x["prompt_len"], len(x["full_tokens"]), echoed=x["logprobs_echoed"]
    )
    return target[x["prompt_len"] - 1 :]


def completion_of(case: Case, values: Sequence[float | None] | None) -> Completion:
    "A recorded completion as one of ours; raises where its series do not fit."
    x = case.inputs
    if values is None:
        raise AlignmentError("sampler logprobs", got="none")
    tokens = x["full_tokens"]
    at = x["prompt_len"]
    raw = x.get("raw_logprobs")
    sampled = completion_logprobs(case, values)
    if raw is not None:
        raw = completion_logprobs(case, raw if len(raw) != len(tokens) else [None, *raw[1:]])
    return Completion(
        tokens[:at], tokens[at:], sampled if raw is None else raw, sampled, "t", "length"
    )


def same_sample(ours: RolloutSample, recorded: Mapping[str, Any]) -> None:
    "Tokens, mask, reward, and the series where the mask is 1; elsewhere it is 0 there, undefined here."
    active = ours.loss_mask == 1
    assert ours.tokens.tolist() == recorded["tokens"]
    assert ours.loss_mask.tolist() == recorded["loss_mask"]
    assert ours.reward == recorded["reward"]
    for name in ("logprobs", "raw_logprobs"):
        series = floats(recorded.get(name))
        if len(series):
            close(getattr(ours, name)[active], series[active], name, EXACT)
            assert not series[~active].any()
            assert np.isnan(getattr(ours, name)[~active]).all()


def outcome_of(
    case: Case, make: Callable[[Sequence[float | None] | None], RolloutSample], recorded: Any
) -> Outcome:
    "The outcome of a completion: the recorded sample, or an error with a reason that can be named."
    x = case.inputs
    values = x["logprobs"]
    tokens = x["full_tokens"]
    at = x["prompt_len"]
    if recorded is None:
        try:
            ours = make(values)
        except RLNotebookError:
            return Outcome((DROPPED,))
        whole = len(values) == len(tokens) - 1
        assert x["logprobs_echoed"], "a sample was made of what the other program dropped"
        assert whole
        close(ours.logprobs[at:], floats(values)[at - 1 :], "echo", EXACT)
        return Outcome((ECHOED,))
    if at < 1:
        assert_rejected(lambda: make(values), "prompt_len")
        return Outcome((NO_PROMPT,))
    if any(v is None for v in recorded["logprobs"]):
        assert_rejected(lambda: make(values), "logprobs")
        return Outcome((BELIEVED,))
    if len(values) == len(tokens) and x["logprobs_echoed"]:
        assert_rejected(lambda: make(values), "echo logprobs")
        same_sample(make([None, *values[1:]]), recorded)
        return Outcome((UNSHIFTED,))
    same_sample(make(values), recorded)
    return AGREED


@adapter("completion_to_run__HEAD")
def completion_to_run(case: Case) -> Outcome:
    "A completion, echoed or not, as a graded sample."
    run = case.expected["run"]
    assert run is None or run["n_segments"] == 1

    def make(values: Sequence[float | None] | None) -> RolloutSample:
        sample = sample_from_completion(
            completion_of(case, values), reward=float(case.config["reward"])
        )
        return sampled_group([sample]).samples[0]

    return outcome_of(case, make, run)


class Replies:
    "A sampler that has one completion to give."

    def __init__(self, completion: Callable[[], Completion]):
        self.completion = completion

    async def sample(self, prompt_tokens: Any, params: SampleParams) -> list[Completion]:
        return [self.completion()]

    async def logprobs(self, tokens: Any) -> Any:
        raise NotImplementedError


@adapter("rollout_example__517d206d")
def rollout_example(case: Case) -> Outcome:
    "The guides' single-turn rollout, written against our sampler, sampled as the loop samples it."

    def make(values: Sequence[float | None] | None) -> RolloutSample:
        completion = completion_of(case, values)  # raises here what the sampler would raise
        sampler = build_deployment_sampler(
            RolloutSetup(Replies(lambda: completion), None, SampleParams(), 1)
        )

        async def rollout_fn(sample_prompt: dict[str, Any]) -> RolloutSample | None:
            completions = await sampler.sample_with_prompt_tokens(
                sample_prompt["prompt_token_ids"], n=1
            )
            if not completions:
                return None
            c = completions[0]
            output = list(c.full_tokens)[c.prompt_len :]
            return RolloutSample(
                tokens=list(c.full_tokens),
                logprobs=[0.0] * c.prompt_len + list(c.inference_logprobs),
                loss_mask=[0] * c.prompt_len + [1] * len(output),
                reward=case.config["reward"],
                finish_reason=c.finish_reason,
                text=c.text,
            )

        sampled = asyncio.run(sample_rollouts(rollout_fn, ROW_PROMPT, 1))
        if not sampled.samples:
            raise AlignmentError("sample", got=sampled.dropped)
        return sampled.samples[0]

    recorded = case.expected["sample"]
    if recorded is not None:
        assert (recorded["finish_reason"], recorded["text"]) == ("length", "t")
    return outcome_of(case, make, recorded)


# -- groups ------------------------------------------------------------------------------------------------------

FIRST_MASKED = "a mask on the first token, which nothing scores, is rejected"
INFINITE = (
    "an infinite reward is an error that names the sample; there the group is dropped in silence"
)
ALONE = "a group of one is rejected, or has advantage 0; there a function that centres nothing may train it"
NO_RESULTS = (
    "a prompt of which nothing came back is a group without samples, counted; there it is an error"
)
ONE_REWARD = "a run is given its reward once, so that its segments cannot differ; there they can, and are rejected"
ONE_PER_TOKEN = "routing of one entry a token is rejected, since the last token is never read; there it is passed on"
UNKNOWN_ROW = "a result belongs to a call, so that one for a row that was never started cannot come"


def sample_from(plain: Mapping[str, Any], **changes: Any) -> RolloutSample:
    "A recorded sample or segment as one of ours."
    fields = {k: v for k, v in plain.items() if k != "routing_matrices"}
    sample = RolloutSample(**{**fields, **changes})
    if plain.get("routing_matrices") is None:
        return sample
    return replace(
        sample,
        routing=align_routing(plain["routing_matrices"], sample.prompt_len, len(sample.tokens) - 1),
    )


def runs_of(case: Case) -> list[list[dict[str, Any]]]:
    "The recorded results as runs of segments, whichever way they were written down."
    return (
        [[s] for s in case.inputs["samples"]] if "samples" in case.inputs else case.inputs["runs"]
    )


def result_of(run: Sequence[Mapping[str, Any]]) -> Callable[[], Any]:
    "What a rollout function returns for a recorded run."
    if len(run) == 1:
        return lambda: sample_from(run[0])
    return lambda: RolloutRun(tuple(sample_from(s) for s in run), run[0]["reward"] if run else None)


@adapter("rollout_to_prompt_group__*")
def prompt_group(case: Case) -> Outcome:
    "Results of the samples of one prompt, as a group with advantages and its datums."
    runs = runs_of(case)
    c = case.config
    if case.raises:
        return group_rejected(case, runs)
    group = case.expected["prompt_group"]
    segments = [s for run in runs for s in run]
    for because, about, broken in (
        (
            ONE_PER_TOKEN,
            "routing",
            any(len(s.get("routing_matrices") or []) == len(s["tokens"]) for s in segments),
        ),
        (INFINITE, "reward", not all(np.isfinite(float(run[0]["reward"])) for run in runs)),
        (FIRST_MASKED, "loss_mask", any(s["loss_mask"][0] for s in segments)),
    ):
        if broken:
            assert_rejected(
                lambda: sampled_group([result_of(run) for run in with_numbers(runs)]), about
            )
            return Outcome((because,))
    ours = sampled_group([result_of(run) for run in runs])
    if len(runs) == 1:
        assert_rejected(lambda: with_advantages([ours]), "group size")
        if group is None:
            assert has_no_signal(ours.rewards)
            return AGREED
    # custom advantages are set by hand
    sets_advantages = len(runs) == 1 or c.get("advantage_fn") == "identity"
    same_group(
        replace(ours, advantages=ours.rewards) if sets_advantages else with_advantages([ours])[0],
        group,
    )
    return Outcome((ALONE,)) if len(runs) == 1 else AGREED


def with_numbers(runs: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[dict[str, Any]]]:
    "Recorded runs whose rewards may be spelled out."
    return [[{**s, "reward": float(s["reward"])} for s in run] for run in runs]


def group_rejected(case: Case, runs: Sequence[Sequence[Mapping[str, Any]]]) -> Outcome:
    "What the other program rejected, rejected here too, or impossible here."

    def ours():
        return sampled_group([result_of(run) for run in runs])

    if not runs:
        assert not ours().samples
        return Outcome((NO_RESULTS,))
    if any(len({s["reward"] for s in run}) > 1 for run in runs):
        assert all(len(set(ours().rewards[a:b])) == 1 for a, b in spans(ours()))
        return Outcome((ONE_REWARD,))
    if case.config.get("advantage_fn") == "drop_last":
        assert_rejected(lambda: replace(ours(), advantages=ours().rewards[:-1]), "advantages")
        return AGREED
    with np.errstate(all="raise"):
        message = message_of(ours)
    bad = next(i for i, run in enumerate(runs) if not valid(run))
    assert f"rollout {bad}" in message, f"the message does not say which run: {message}"
    return AGREED


def spans(group: PromptGroup) -> list[tuple[int, int]]:
    "(first, one past the last) sample of each run."
    return list(zip(group.run_starts, [*group.run_starts[1:], len(group.samples)], strict=True))


def valid(run: Sequence[Mapping[str, Any]]) -> bool:
    "Whether a recorded run holds together."
    sizes = [
        {len(s[k]) for k in ("tokens", "logprobs", "loss_mask", "raw_logprobs") if s.get(k)}
        for s in run
    ]
    return (
        bool(run)
        and all(len(n) == 1 and max(n) > 1 for n in sizes)
        and all(any(s["loss_mask"]) for s in run)
    )


def message_of(call: Callable[[], Any]) -> str:
    "What a rejected call says."
    try:
        call()
    except RLNotebookError as error:
        return str(error)
    raise AssertionError("it was accepted")


def same_group(ours: PromptGroup, recorded: Mapping[str, Any]) -> None:
    "Everything that a group and its datums have in common."
    datums = datums_from_groups([ours])
    assert [d.input_tokens.tolist() for d in datums] == [
        d["model_input_tokens"] for d in recorded["data"]
    ]
    inputs = [d["loss_fn_inputs"] for d in recorded["data"]]
    series = {name: [x[name]["data"] for x in inputs] for name in ("target_tokens", "weights")}
    assert [d.target_tokens.tolist() for d in datums] == series["target_tokens"]
    assert [d.weights.tolist() for d in datums] == series["weights"]
    for d in recorded["ref_data"]:  # the reference scores the same sequences, with the same mask
        assert d["loss_fn_inputs"]["loss_mask"]["data"] in series["weights"]
    close([d.advantage for d in datums], recorded["advantages"], "advantages", SINGLE)
    close(ours.rewards[ours.run_starts], recorded["rewards"], "rewards", EXACT)
    for d, sample, theirs in zip(datums, ours.samples, recorded["inf_logprobs"], strict=True):
        close(d.sampler_logprobs[d.active], floats(theirs)[d.active], "sampler logprobs", EXACT)
        assert np.isnan(d.sampler_logprobs[~d.active]).all()
        assert sample.prompt_len >= 1
    assert [s.prompt_len for s in ours.samples] == recorded["prompt_lens"]
    assert [s.completion_len for s in ours.samples] == recorded["completion_lens"]
    assert [s.truncated for s in ours.samples] == recorded["truncated"]
    for s, raw in zip(
        ours.samples, recorded.get("raw_inf_logprobs") or [[]] * len(ours.samples), strict=True
    ):
        if raw:
            close(
                s.raw_logprobs[1:][s.loss_mask[1:] == 1],
                floats(raw)[s.loss_mask[1:] == 1],
                "raw logprobs",
                EXACT,
            )
    trained = [sum(ours.samples[i].completion_len for i in range(*span)) for span in spans(ours)]
    if recorded.get("run_metadata"):
        assert trained == [m["trainable_tokens"] for m in recorded["run_metadata"]]


@adapter("combine_prompt_groups")
def combined(case: Case) -> Outcome:
    "Groups laid end to end as the datums of a step."
    groups = []
    refs = []
    for g, x in enumerate(case.inputs["groups"]):
        lens = x["prompt_lens"] or [x["prompt_len"]] * len(x["target_tokens"])
        samples = []
        for targets, series, at in zip(x["target_tokens"], x["inf_logprobs"], lens, strict=True):
            mask = [0] * at + [1] * (len(targets) + 1 - at)
            samples.append(RolloutSample([0, *targets], [None, *series], mask, 0.0))
        groups.append(PromptGroup(tuple(samples), index=g, advantages=x["advantages"]))
        refs += x["ref_logprobs"] or [None] * len(samples)
    datums = datums_from_groups(groups)
    e = case.expected
    assert len(datums) == e["n_data"]
    assert [d.target_tokens.tolist() for d in datums] == e["target_tokens"]
    close([d.advantage for d in datums], e["advantages"], "advantages", EXACT)
    assert [int(np.argmax(d.weights)) + 1 for d in datums] == e["prompt_lens"]
    for d, series in zip(datums, e["inf_logprobs"], strict=True):
        close(d.sampler_logprobs[d.active], floats(series)[d.active], "sampler logprobs", EXACT)
    with_ref = [(d, r) for d, r in zip(datums, refs, strict=True) if r is not None]
    attached = attach(
        [d for d, _ in with_ref],
        "ref_logprobs",
        [Logprobs(r, source="reference") for _, r in with_ref],
    )
    for d, series in zip(attached, e["ref_logprobs"], strict=True):
        close(d.ref_logprobs, series, "reference logprobs", EXACT)
    return AGREED


@adapter("group_assembler")
def group_assembler(case: Case) -> Outcome:
    "Results of several rows, in any order; a row's group is there when its last result is."
    ops = case.inputs["ops"]
    c = case.config
    plan = defaultdict(list)
    versions = defaultdict(list)
    differs = []
    for at, op in enumerate(ops):
        if op["op"] == "note_started":
            versions[op["row"]].append(op["submit_version"])
        elif op["row"] in versions:
            plan[op["row"]].append((at, op.get("sample")))
    done: dict[int, PromptGroup] = {}

    async def rollout_fn(
        sample_prompt: dict[str, Any], row_index: int, rollout_index: int
    ) -> RolloutSample | None:
        at, sample = plan[row_index][rollout_index]
        await asyncio.sleep(at)
        return (
            None if sample is None else sample_from(sample, policy_version=min(versions[row_index]))
        )

    async def row(number: int) -> None:
        prompt = replace(ROW_PROMPT, number=number)
        sampled = await sample_rollouts(rollout_fn, prompt, c["completions_per_prompt"])
        group = assemble(sampled, sampled.samples, c["min_group_size"])
        done[round(asyncio.get_running_loop().time())] = replace(group, advantages=group.rewards)

    async def everything() -> None:
        whole = [r for r in plan if len(plan[r]) == c["completions_per_prompt"]]
        await asyncio.gather(*(row(r) for r in whole))

    simulate(everything())
    for at, (op, recorded) in enumerate(zip(ops, case.expected["outputs"], strict=True)):
        if "raises" in recorded:
            assert op["row"] not in versions
            differs.append(UNKNOWN_ROW)
            continue
        assert (recorded["result"] is not None) == (at in done)
        if "pending_rows" in recorded:
            assert recorded["pending_rows"] == len(versions) - sum(t <= at for t in done)
        if recorded["result"] is not None:
            same_result(done[at], recorded["result"])
    return Outcome(tuple(dict.fromkeys(differs)))


def same_result(group: PromptGroup, recorded: Mapping[str, Any]) -> None:
    "What is left of a row."
    assert len(group.samples) == (recorded["n_survivors"] or 0)
    assert group.rewards.tolist() == (recorded["rewards"] or [])
    assert group.advantages.tolist() == (recorded["advantages"] or [])
    if group.samples:
        assert min(s.policy_version for s in group.samples) == recorded["min_submit_version"]


# -- rows --------------------------------------------------------------------------------------------------------

NO_ROWS = "no rows, or no epochs, are rejected; there the loader is empty"
LOW_WATER = "a place is the rows taken, of which the unfinished are kept apart; there it is the first unfinished row"


@adapter("cursor_dataloader__HEAD")
def cursor_dataloader(case: Case) -> Outcome:
    "Rows over several epochs, and where a run continues."
    items = case.inputs["items"]
    c = case.config
    e = case.expected
    rows = [Row(key=str(item), prompt=str(item)) for item in items]

    def make(**place):
        return Cursor(rows, c["seed"], c["epochs"], c["shuffle"], **place)

    if not rows or c["epochs"] < 1:
        assert e["items"] == []
        assert_rejected(make, "empty data set", "epochs")
        return Outcome((NO_ROWS,))
    cursor = make()
    assert cursor.total == e["total_items"]
    taken_rows, behind = cursor.take(int(cursor.total))
    assert behind.exhausted
    recorded = [str(item) for _, item in e["items"]]
    if c["shuffle"]:
        size = len(rows)
        epochs = [
            [r.key for r in taken_rows[i : i + size]] for i in range(0, len(taken_rows), size)
        ]
        assert all(sorted(epoch) == sorted(map(str, items)) for epoch in epochs), (
            "each epoch has every row once"
        )
    else:
        assert [r.key for r in taken_rows][c["start_cursor"] :] == recorded
    assert [i for i, _ in e["items"]] == list(range(c["start_cursor"], len(taken_rows)))
    for _, place, epoch, within in e["resolve_trace"]:
        restored = restore_cursor(cursor, make(consumed=place).state())
        assert (restored.epoch, restored.consumed % len(rows)) == (epoch, within)
        assert [r.key for r in restored.peek(len(taken_rows))] == [
            r.key for r in taken_rows[place:]
        ]
    in_order = [i for i, *_ in e["resolve_trace"]] == sorted(i for i, *_ in e["resolve_trace"])
    return AGREED if in_order else Outcome((LOW_WATER,))


# -- the numbers of a step ---------------------------------------------------------------------------------------

NOT_A_SAMPLE = "a sample without a sampled token does not exist here; sums agree without it"
NAMES = {
    "rollout/reward": "reward",
    "rollout/response_len/mean": "completions/mean_length",
    "rollout/truncated_ratio": "completions/clipped_ratio",
}


def step_groups(
    case: Case, mask_of: Callable[[Mapping[str, Any], int], Sequence[int]]
) -> list[PromptGroup]:
    "The recorded groups, without samples in which nothing is masked."
    groups = []
    for g, x in enumerate(case.inputs["groups"]):
        samples = []
        for i, targets in enumerate(x["targets"]):
            mask = mask_of(x, i)
            series = x["inf_logprobs"][i] or [None] * len(targets)
            ended = "length" if x["truncated"][i] else "stop"
            if any(mask):
                samples.append(
                    RolloutSample(
                        [0, *targets], [None, *series], [0, *mask], x["rewards"][i], ended
                    )
                )
        groups.append(PromptGroup(tuple(samples), index=g))
    return groups


def mask_of_length(x: Mapping[str, Any], i: int) -> list[int]:
    "A mask as long as the completion is said to be."
    length = x["completion_lens"][i]
    return [0] * (len(x["targets"][i]) - length) + [1] * length


def mask_of_weights(x: Mapping[str, Any], i: int) -> list[int]:
    "The mask that is recorded, or everything after the prompt; in recorded groups the two lengths may differ."
    before = (x["prompt_lens"] or [x["prompt_len"]] * len(x["targets"]))[i] - 1
    return x["weights"][i] or [0] * before + [1] * (len(x["targets"][i]) - before)


@adapter("step_metrics__517d206d")
def metrics_of_a_step(case: Case) -> Outcome:
    "What a step says about its samples; its timings and losses are those of the loop that ran it."
    e = case.expected["metrics"]
    ours = step_metrics(step_groups(case, mask_of_length), [])
    each = [(x, i) for x in case.inputs["groups"] for i in range(len(x["rewards"]))]
    lost = [(x["rewards"][i], x["truncated"][i]) for x, i in each if not x["completion_lens"][i]]
    count = ours["rollout/num_samples"]
    theirs = e["rollout/samples_completed"]
    assert count + len(lost) == theirs
    away = {"reward": sum(r for r, _ in lost), "completions/clipped_ratio": sum(t for _, t in lost)}
    for name, our_name in NAMES.items():
        close(ours[our_name] * count + away.get(our_name, 0.0), e[name] * theirs, name, EXACT)
    assert ours["completions/max_length"] == e["rollout/response_len/max"]
    assert (0 if lost else ours["completions/min_length"]) == e["rollout/response_len/min"]
    if "rollout/entropy" in e:
        masked = step_metrics(step_groups(case, mask_of_weights), [])
        close(masked["entropy"], e["rollout/entropy"], "entropy", EXACT)
    return Outcome((NOT_A_SAMPLE,)) if lost else AGREED


# -- full batches ---------------------------------------------------------------------------------------------------

ALL_LOST = "a step of which no rollout came back is an error here; there it is an empty batch"
ANSWER = {"ok": (0.0, 1.0), "uniform": (1.0, 1.0)}


def collecting_loop(kinds: Sequence[str], target: int, filtered: bool) -> GRPOLoop:
    "A loop over rows that go well, are all alike, or fail; it samples further rows for those without signal."

    async def rollout_fn(
        sample_prompt: dict[str, Any], row_index: int, rollout_index: int
    ) -> RolloutSample | None:
        if kinds[row_index] == "fail":
            return None
        prompt = sample_prompt["prompt_token_ids"]
        series = [None] * len(prompt) + [-0.1]
        mask = [0] * len(prompt) + [1]
        return RolloutSample([*prompt, 5], series, mask, ANSWER[kinds[row_index]][rollout_index])

    cfg = Config(
        prompt_groups_per_step=target,
        completions_per_prompt=2,
        refill=True,
        shuffle=False,
        kl_beta=0.0,
        max_seq_len=96,
        max_completion_tokens=16,
    )
    keep = None if filtered else lambda group: len(group.samples) > 0
    model, tokenizer = load_model("tiny")
    rows = load_rows(toy_rows(len(kinds), seed=3)) if kinds else []
    return GRPOLoop(
        open_local(model, tokenizer, reference=False), rows, rollout_fn, cfg, dynamic_filter_fn=keep
    )


def batch_of(record: StepRecord, keep: Callable[[PromptGroup], bool], first: int) -> dict[str, Any]:
    "What a step took from the rows, and what came of it."
    groups = sorted(record.groups, key=lambda g: g.number)
    live = [g for g in groups if keep(g)]
    dropped = [g for g in groups if not keep(g)]
    return {
        "groups": [g.number for g in live],
        "consumed": [first + g.number for g in groups],
        "stats": {**stats_of(live, dropped), "trainer_wait_for_sampler_time": 0.0},
    }


@adapter("sync_collect__HEAD")
def sync_collect(case: Case) -> Outcome:
    "Batches that are filled up with further rows, until there are no more; each row is taken once, in order."
    kinds = case.inputs["kind"]
    c = case.config
    e = case.expected
    if case.raises:
        assert_rejected(
            lambda: Config(prompt_groups_per_step=c["target_size"]), "prompt_groups_per_step"
        )
        return AGREED
    recorded = [
        {**b, "stats": {**b["stats"], "all_raw_rewards": sorted(b["stats"]["all_raw_rewards"])}}
        for b in e["batches"]
    ]
    assert recorded.pop()["consumed"] == [], "it ends with an empty batch"
    if not kinds:
        assert recorded == []
        assert_rejected(
            lambda: collecting_loop(kinds, c["target_size"], c["filter"]), "empty data set"
        )
        return Outcome((NO_ROWS,))

    async def run() -> tuple[list[dict[str, Any]], bool]:
        loop = collecting_loop(kinds, c["target_size"], c["filter"])
        batches = []
        while not loop.done:
            try:
                record = await loop.step()
            except RewardError as error:
                if "no sample of the step could be used" not in error.what:
                    raise
                return batches, True
            batches.append(batch_of(record, loop.keep, c["first_cursor_index"]))
        return batches, False

    batches, lost = asyncio.run(run())
    if lost:
        consumed = sum(len(b["consumed"]) for b in batches)
        assert set(kinds[consumed : consumed + c["target_size"]]) == {"fail"}
        assert batches == recorded[: len(batches)]
        return Outcome((ALL_LOST,))
    assert batches == recorded
    assert [i for b in batches for i in b["consumed"]] == e["calls"]
    return AGREED
