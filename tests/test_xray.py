"""What a step says about itself is true: every claim is checked against its own computation.

Every fault that is put into a real step is found, and a clean step raises no alarm.
"""

import asyncio
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import rl_notebook as rln
from rl_notebook.backends.base import Backend
from rl_notebook.config.config import Config
from rl_notebook.core.types import Datum, RecordError, RolloutSample
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.core.losses import (
    AGGREGATIONS,
    POLICY_LOSSES,
    LossOptions,
    make_loss_fn,
    register_loss,
)
from rl_notebook.core.metrics import step_metrics
from rl_notebook.core.loss_params import SURROGATE_PARAMS
from rl_notebook.runs.records import StepRecord
from rl_notebook.loop.step import evaluate_loss, loss_factory
from rl_notebook.task.toy import toy_reward, toy_rows
from rl_notebook.experiments.preflight import preflight
from rl_notebook.insight.xray import TERM_WORDS, first_not_finite, invariants
from rl_notebook.insight.xray import sentence, xray
from rl_notebook.core.findings import Finding
from tiny_models import tiny, uneven

SMALL_RUN: dict[str, Any] = {
    "prompt_groups_per_step": 4,
    "completions_per_prompt": 6,
    "max_completion_tokens": 24,
    "max_seq_len": 96,
    "learning_rate": 5e-4,
}


def steps(
    n: int = 1, reward: Any = toy_reward, *, backend: Any = None, **settings: Any
) -> list[StepRecord]:
    "The first steps of a run on sums."
    loop = GRPOLoop(backend or tiny(), toy_rows(40), reward, Config(**SMALL_RUN | settings))
    return asyncio.run(loop.run(n, progress=False))


def failed_checks(
    record: StepRecord, previous: StepRecord | None = None, **known: Any
) -> list[str]:
    "Names of the checks that do not hold."
    return [c.name for c in invariants(record, previous, **known) if c.ok is False]


@pytest.fixture(scope="module")
def fresh() -> StepRecord:
    "One real step with a reference: the raw material of the constructed ones."
    return steps(policy_loss="ppo", kl_beta=0.01)[0]


# --- situations and what is said about them -------------------------------------------------------------------------


@pytest.mark.parametrize("loss", SURROGATE_PARAMS)
def test_losses_that_are_no_ratio_times_advantage_have_separate_words(loss: str, fresh: StepRecord):
    values = set()
    for more in (0.0, 0.25):  # at ratio 1 only their terms see how likely the tokens are
        series = [
            (d.sampler_logprobs - more * (d.advantage > 0)).astype(np.float32) for d in fresh.datums
        ]
        datums = [
            replace(d, old_logprobs=x, sampler_logprobs=x)
            for d, x in zip(fresh.datums, series, strict=True)
        ]
        loss_value, _ = make_loss_fn(datums, policy_loss=loss)(
            datums, [torch.tensor(x) for x in series]
        )
        values.add(round(float(loss_value), 6))
    assert (len(values) == 2) == (loss in TERM_WORDS and loss not in ("sapo", "clip_cov", "kl_cov"))


def test_a_registered_loss_is_not_taken_apart():
    register_loss(lambda t, tis, o: -t.advantages * t.policy_logprobs, name="tilted")
    try:
        record = steps(policy_loss="tilted", kl_beta=0.0)[0]
        text = " ".join(c.text for c in invariants(record))
        assert re.search(
            r"from the custom loss tilted, which is not taken apart\.$", xray(record).sentence
        )
        assert "the loss is a custom one" in text
    finally:
        del POLICY_LOSSES["tilted"]


def test_later_steps_of_a_window_know_that_the_policy_moved():
    first, second = steps(
        2, weight_sync_interval=2, policy_loss="ppo", aggregation="sequence_mean", kl_beta=0.0
    )
    text = sentence(second, first)
    assert "Loss is 0.000 because the ratio is 1, so the advantages cancel" in text
    message = r"the policy has moved since sampling, by 0\.\d+ nats per token on average, and the loss does not correct for it"
    assert re.search(rf"^✗ correction: {message}", text)
    assert "Not synced: the sampler keeps version 0" in text
    assert failed_checks(second, first, weight_sync_interval=2) == ["correction"]
    assert "whether the weights are the same needs the record of the step before" in str(
        invariants(second)
    )


def test_a_correction_in_a_window_is_credited():
    first, second = steps(2, weight_sync_interval=2, tis_enabled=True, kl_beta=0.0)
    assert ", and the loss corrects for it." in sentence(second, first)
    assert failed_checks(second, first, weight_sync_interval=2) == []


# --- every claim, against its own computation -----------------------------------------------------------------------


def with_moved_policy(fresh: StepRecord, **options: Any) -> StepRecord:
    "The real batch under other options, its policy moved by noise."
    rng = np.random.default_rng(0)

    def noise(lp):
        return np.where(np.isfinite(lp.values), rng.normal(0, 0.2, len(lp)), 0)

    datums = [d for d in fresh.datums if d.group < 2]
    before = fresh.loss.logprobs[: len(datums)]
    policy = [replace(lp, values=lp.values + noise(lp)) for lp in before]
    output = evaluate_loss(datums, policy, loss_factory(LossOptions(**options)))
    metrics = step_metrics(fresh.groups[:2], datums, output, policy_version=0)
    changed = {
        "datums": datums,
        "loss": output,
        "options": options,
        "metrics": metrics,
        "step": 2,
    }
    return replace(fresh, groups=fresh.groups[:2], **changed)


def loss_value_under(record: StepRecord, **changes: Any) -> float:
    "The loss of a record under changed options."
    fn = make_loss_fn(record.datums, **dict(record.options) | changes)
    return float(fn(record.datums, [torch.tensor(lp.values) for lp in record.loss.logprobs])[0])


def false_claims(record: StepRecord, text: str) -> list[str]:
    "Claims of a sentence that are not true of its record."
    o = LossOptions(**record.options)
    wrong = []

    def active(name):
        return np.concatenate([np.asarray(getattr(d, name))[d.active] for d in record.datums])

    p = np.concatenate(
        [lp.values[d.active] for lp, d in zip(record.loss.logprobs, record.datums, strict=True)]
    )
    to_sampler = np.abs(p - active("sampler_logprobs")).max()
    a, n, group = np.array([(d.advantage, d.num_loss_tokens, d.group) for d in record.datums]).T
    push = sum(np.abs(g).sum() for g in record.loss.dlogprobs)
    to_anchor = 0.0
    if o.anchor == "rollout" or o.policy_loss == "reinforce":
        to_anchor = to_sampler
    elif record.datums[0].old_logprobs is not None:
        to_anchor = np.abs(p - active("old_logprobs")).max()

    def claim(pattern: str, truth: Callable[..., bool]) -> None:
        wrong.extend(
            repr(match[0]) for match in re.finditer(pattern, text) if not truth(*match.groups())
        )

    def close(stated, real):
        return math.isclose(float(stated), real, rel_tol=0.06, abs_tol=6e-4)

    without_kl = loss_value_under(record, kl_beta=0.0)
    claim(r"\bLoss is (-?[\d.e+-]+\d)", lambda x: close(x, record.loss.loss))
    claim(
        r"\bLoss is 0\.000",
        lambda: abs(record.loss.loss) <= 2e-4 * push * max(1, np.abs(p).max()) + 1e-9,
    )
    claim(r"ratio 1\b|ratio is 1\b|hence 1", lambda: to_anchor <= 2e-3)
    claim(r"ratio \d+\.\d+ to", lambda: to_anchor > 1e-3)
    claim(r"not moved since sampling", lambda: to_sampler <= 1e-3)
    claim(r"differ by|(?<!not )moved since", lambda: to_sampler > 1e-3)
    claim(
        r"advantages cancel",
        lambda: np.any(a > 0) and np.any(a < 0) and abs(without_kl) <= 2e-4 * np.abs(a * n).sum(),
    )
    claim(r"longer completions had the higher", lambda: np.dot(a, n) > 0 and abs(a.sum()) < 1e-6)
    claim(r"longer completions had the lower", lambda: np.dot(a, n) < 0 and abs(a.sum()) < 1e-6)
    claim(
        r"minus the advantages",
        lambda: close(without_kl, _minus_advantages(a, n, o, group)),
    )
    claim(r"every advantage is 0", lambda: not a.any())
    claim(r"the gradient is 0\b", lambda: push == 0)
    claim(r"Gradient (?:norm|sum)", lambda: push > 0)
    aware = o.tis != "off" or o.anchor == "rollout" or o.policy_loss == "reinforce"
    aware = aware or (
        record.datums[0].old_logprobs is not None and o.policy_loss not in ("grpo", "reinforce")
    )
    claim(r"the loss corrects", lambda: aware)
    claim(r"the loss does not correct", lambda: not aware)
    return wrong


def _minus_advantages(a: np.ndarray, n: np.ndarray, o: LossOptions, group: np.ndarray) -> float:
    "Minus the advantages, aggregated by the definition of each aggregation."
    by = {
        "token_mean": (a * n).sum() / n.sum(),
        "sequence_mean": a.mean(),
        "prompt_mean": np.mean(
            [np.average(a[group == g], weights=n[group == g]) for g in set(group)]
        ),
        "sample_mean": (a * n).sum() / len(n),
        "constant": (a * n).sum() / len(n) / (o.max_completion_tokens or 1),
        "sum": (a * n).sum(),
    }
    return -by[o.aggregation]


def combinations() -> list[dict[str, Any]]:
    "Every loss, with and without KL, correction and another anchor; four of them in every aggregation."
    usual = ("token_mean", "sequence_mean")
    each = ("grpo", "ppo", "gspo", "sapo")
    corners = ((0.0, "off"), (0.05, "off"), (0.0, "token"), (0.05, "sequence"))
    out = []
    for loss, aggregation, (kl, tis) in itertools.product(POLICY_LOSSES, AGGREGATIONS, corners):
        barred = {"reinforce": ("token", "sequence"), "vespo": ("sequence",)}.get(loss, ())
        if tis in barred or (aggregation not in usual and loss not in each):
            continue
        constant = {"max_completion_tokens": 24} if aggregation == "constant" else {}
        out.append(
            {"policy_loss": loss, "aggregation": aggregation, "kl_beta": kl, "tis": tis} | constant
        )
        if aggregation in usual and loss not in ("grpo", "reinforce"):
            out.append(out[-1] | {"anchor": "rollout"})
    return out


def test_no_sentence_claims_what_is_not_so(fresh: StepRecord):
    lies = {}
    for options in combinations():
        record = with_moved_policy(fresh, **options)
        # whose update no sync has published
        text = sentence(record, replace(fresh, policy_version=0))
        if wrong := false_claims(record, text):
            lies[str(options)] = (wrong, text)
    assert not lies, f"{len(lies)} of {len(combinations())}: {next(iter(lies.items()))}"


# --- invariants -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"advantage_scale": "loo", "temperature": 1.0, "top_k": 5},
        {"min_samples_per_fwd_bwd": 6},
    ],
    ids=str,
)
def test_a_clean_run_raises_no_alarm(settings: dict[str, Any]):
    records = steps(2, **settings)
    result = {
        r.step: failed_checks(r, p, weight_sync_interval=1)
        for r, p in zip(records, [None, *records], strict=False)
    }
    dead_or_narrow = {"signal", "variety"}  # true of some of these steps
    assert {n for names in result.values() for n in names} <= dead_or_narrow


def first_target(d: Datum) -> int:
    return int(d.active.argmax())


def with_value(series: np.ndarray, at: int, bad: float) -> np.ndarray:
    out = np.array(series)
    out[at] = bad
    return out


def in_datum(name: str, bad: float) -> Callable[[StepRecord], StepRecord]:
    def corrupt(r: StepRecord) -> StepRecord:
        d = r.datums[2]
        corrupted = replace(d, **{name: with_value(getattr(d, name), first_target(d), bad)})
        return replace(r, datums=[*r.datums[:2], corrupted, *r.datums[3:]])

    return corrupt


def in_loss(name: str, bad: float) -> Callable[[StepRecord], StepRecord]:
    def corrupt(r: StepRecord) -> StepRecord:
        series = list(getattr(r.loss, name))
        at = first_target(r.datums[2])
        one = series[2]
        series[2] = (
            replace(one, values=with_value(one.values, at, bad))
            if name == "logprobs"
            else with_value(one, at, bad)
        )
        return replace(r, loss=replace(r.loss, **{name: tuple(series)}))

    return corrupt


def in_reward(bad: float) -> Callable[[StepRecord], StepRecord]:
    def corrupt(r: StepRecord) -> StepRecord:
        g = r.groups[1]
        samples = [replace(s, reward=bad) if i == 3 else s for i, s in enumerate(g.samples)]
        return replace(r, groups=[r.groups[0], replace(g, samples=samples), *r.groups[2:]])

    return corrupt


BAD_TENSORS = {
    "rewards": (in_reward(math.nan), "rewards is nan at group 1 .*sample 3"),
    "sampler_logprobs": (
        in_datum("sampler_logprobs", -math.inf),
        r"sampler_logprobs is -inf at group .*target \d+ \(token",
    ),
    "ref_logprobs": (in_datum("ref_logprobs", math.nan), "ref_logprobs is nan at group"),
    "policy_logprobs": (in_loss("logprobs", math.nan), "policy_logprobs is nan at group"),
    "dlogprobs": (in_loss("dlogprobs", math.inf), "dL/dlogprob is inf at group"),
    "metric": (
        lambda r: replace(r, metrics=dict(r.metrics) | {"grad_norm": math.nan}),
        "metric grad_norm is nan",
    ),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_the_first_bad_tensor_is_named(fresh: StepRecord, name: str):
    corrupt, text = BAD_TENSORS[name]
    assert first_not_finite(fresh) == ""
    record = corrupt(fresh)
    assert re.match(text, first_not_finite(record)), first_not_finite(record)
    assert "finite" in failed_checks(record)
    sentence(record)  # says something, whatever is not finite


def hole(r: StepRecord) -> StepRecord:
    first = r.datums[0]
    dlogprob = r.loss.dlogprobs[0]
    at = first_target(first)
    without = replace(first, weights=with_value(first.weights, at, 0.0))
    dlogprobs = (with_value(dlogprob, at, 0.0), *r.loss.dlogprobs[1:])
    return replace(r, datums=[without, *r.datums[1:]], loss=replace(r.loss, dlogprobs=dlogprobs))


def metric(name: str, number: float) -> Callable[[StepRecord], StepRecord]:
    return lambda r: replace(r, metrics=dict(r.metrics) | {name: number})


def neighbours(r: StepRecord) -> StepRecord:
    turned = [*r.datums[5:], *r.datums[:5]]
    return replace(
        r, datums=[replace(d, advantage=e.advantage) for d, e in zip(r.datums, turned, strict=True)]
    )


FAULTS: dict[
    str, tuple[Callable[[StepRecord], StepRecord], str]
] = {  # in addition to those that the page of the x-ray plants
    "advantages of the neighbour": (neighbours, "advantages"),
    "a sampled token left out": (hole, "mask"),
    "no gradient": (metric("grad_norm", 0.0), "update"),
    "version goes back": (lambda r: replace(r, policy_version=-1), "weights"),
    "answers lost": (
        lambda r: replace(
            r, groups=[replace(g, dropped=("rollout 0 returned None",) * 6) for g in r.groups]
        ),
        "completions",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_fails_its_check(fresh: StepRecord, fault: str):
    corrupt, name = FAULTS[fault]
    assert name not in failed_checks(fresh, weight_sync_interval=1)
    record = corrupt(fresh)
    assert name in failed_checks(record, weight_sync_interval=1)
    check = next(c for c in invariants(record, weight_sync_interval=1) if c.name == name)
    assert check.fix
    assert check.text


# --- noise floor ----------------------------------------------------------------------------------------------------


def test_coarse_numbers_are_no_fault_and_hide_none(fresh: StepRecord):
    backend = tiny(dtype="bfloat16")
    loop = GRPOLoop(backend, toy_rows(40), toy_reward, Config(**SMALL_RUN))
    (record,) = asyncio.run(loop.run(1, progress=False))
    assert "on-policy" not in failed_checks(record)
    cooled = [replace(d, sampler_logprobs=d.sampler_logprobs / 0.7) for d in record.datums]
    assert "on-policy" in failed_checks(replace(record, datums=cooled))


# --- pre-flight -----------------------------------------------------------------------------------------------------


def test_preflight_changes_nothing():
    cfg = Config(**SMALL_RUN | {"kl_beta": 0.01})

    def run(first_look: bool) -> tuple[list[float], list[str]]:
        async def go() -> list[StepRecord]:
            backend = tiny()
            if first_look:
                await preflight(backend, toy_rows(40), toy_reward, cfg)
            return await GRPOLoop(backend, toy_rows(40), toy_reward, cfg).run(2, progress=False)

        records = asyncio.run(go())
        return [r.loss.loss for r in records], [
            s.text for r in records for g in r.groups for s in g.samples
        ]

    assert run(True) == run(False)


def small_preflight(
    reward: Any = toy_reward, backend: Backend | None = None, **settings: Any
) -> Any:
    "A small pre-flight."
    coroutine = preflight(
        backend or tiny(),
        toy_rows(10),
        reward,
        Config(**SMALL_RUN | settings),
        prompts=2,
        samples=8,
    )
    return asyncio.run(coroutine)


def check_named(flight: Any, name: str) -> Finding:
    return next(c for c in flight.checks if c.name == name)


def test_preflight_with_a_rollout_function():
    async def rollout(sample_prompt: dict[str, Any]) -> RolloutSample | None:
        if sample_prompt["sample_index"] == 0:
            return None
        ids = sample_prompt["prompt_token_ids"]
        tokens = [20 + sample_prompt["sample_index"], 2]
        return RolloutSample(
            [*ids, *tokens],
            [0.0] * len(ids) + [-1.0, -2.0],
            [0] * len(ids) + [1, 1],
            reward=tokens[0] % 2,
        )

    flight = small_preflight(rollout)
    assert "2 of 16 completions were lost" in check_named(flight, "lost").text
    assert check_named(flight, "sampler").ok is False  # the logprobs are made up


def test_preflight_knows_stale_weights():
    backend = tiny()

    async def train_without_sync() -> None:
        loop = GRPOLoop(
            backend,
            toy_rows(40),
            toy_reward,
            Config(**SMALL_RUN | {"weight_sync_interval": 0, "learning_rate": 1e-2}),
        )
        await loop.run(1, progress=False)

    asyncio.run(train_without_sync())
    check = check_named(small_preflight(backend=backend), "sampler")
    assert check.ok is False
    assert "Sync first" in check.fix


@pytest.mark.parametrize("argument", ["loop", "not awaited", "record"])
def test_a_loop_for_a_step_or_a_step_for_a_loop_is_named(argument: str, fresh: StepRecord):
    loop = GRPOLoop(tiny(), toy_rows(4), toy_reward, Config(**SMALL_RUN))
    views = [xray, rln.inspect_tokens, rln.what_if]
    thing = loop
    text = "loop.records"
    if argument == "not awaited":
        thing = asyncio.sleep(0)
        text = "Await it first"
    if argument == "record":
        views = [rln.Dashboard]
        thing = fresh
        text = "the loop that made it"
    for view in views:
        with pytest.raises(RecordError, match=text):
            view(thing, {}) if view is rln.what_if else view(thing)
    if argument == "not awaited":
        thing.close()


@pytest.mark.parametrize(
    "settings", [{"learning_rate": 0.5}, {"learning_rate": 0.02, "ppo_n_minibatches": 3}], ids=str
)
def test_a_learning_rate_that_wrecks_a_step_has_its_cross(settings: dict[str, Any]):
    (record,) = steps(1, uneven, **settings)
    assert "update" in failed_checks(record)
