"""What the alignment doctor is given, rejects and answers, and that it accuses no honest sampler.

Whether it names the right cause of a fault is asked in `zoo/test_zoo.py`, of machines that share no code with it.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_models import one_thread  # noqa: F401 (the fixture is used by every test)

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.config.config import Config
from rl_notebook.core.advantages import with_advantages
from rl_notebook.core.datums import datums_from_groups
from rl_notebook.core.losses import LossOptions, make_loss_fn
from rl_notebook.core.types import (
    AdamParams,
    BackendError,
    Completion,
    Datum,
    Logprobs,
    LossOutput,
    PromptGroup,
    SampleParams,
)
from rl_notebook.insight.doctor.causes import MIN_GAIN, UNEXPLAINED, resample_gains
from rl_notebook.insight.doctor.doctor import Diagnosis, diagnose
from rl_notebook.insight.doctor.evidence import (
    HALF_PRECISION,
    MIN_LIKELY,
    UNIT_ROUNDOFF,
    Evidence,
    Resample,
)
from rl_notebook.insight.xray import ROUNDING, check_ratio
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.loop.rollouts import assemble, sample_completions, encode_rows
from rl_notebook.loop.step import sync_weights
from rl_notebook.runs.records import StepRecord
from rl_notebook.task.data import load_rows
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_rows

SLOW = os.environ.get("SLOW") == "1"


# --- a step with real logprobs ----------------------------------------------------------------------------------------


class Bench:
    "The tiny model on the embedded backend."

    def __init__(self):
        model, self.tokenizer = load_model("tiny")
        self.backend = open_local(model, self.tokenizer, inline=True)
        self.moved = False
        self.cache = dict[Any, Any]()

    async def reset(self) -> None:
        "The weights that the package ships, on both sides."
        if self.moved:
            await self.backend.policy.load_state("shipped")
            await sync_weights(self.backend, "shipped")
            self.moved = False

    async def groups(self, seed: int, **params: Any) -> list[PromptGroup]:
        "Answers without what the sampler could claim about them."
        prompts = encode_rows(load_rows(toy_rows(3, seed=seed)), self.tokenizer)
        rng = np.random.default_rng(seed)
        sampled = []
        for prompt in prompts:
            options: dict[str, Any] = {"max_tokens": 16} | params
            settings = SampleParams(n=4, seed=seed, **options)
            rollouts = await sample_completions(self.backend.sampler, prompt, settings)
            plain = [replace(s, temperature=1.0, processed=False) for s in rollouts.samples]
            graded = [replace(s, reward=float(rng.integers(2))) for s in plain]
            sampled.append(assemble(rollouts, graded))
        return with_advantages(sampled)

    async def record(self, groups: Sequence[PromptGroup]) -> StepRecord:
        "A step as the loop would have recorded it."
        datums = datums_from_groups(groups)
        scored = await self.backend.policy.forward(datums)
        zeros = tuple(np.zeros(len(d.weights)) for d in datums)
        return StepRecord(
            3, tuple(groups), tuple(datums), LossOutput(0.0, {}, tuple(scored), zeros)
        )

    async def healthy(self, seed: int) -> tuple[StepRecord, list[np.ndarray]]:
        "A step without fault, and the sampler's logprobs of prompts and completions (N-1,)."
        if seed not in self.cache:
            record = await self.record(await self.groups(seed))
            self.cache[seed] = record, await self.echo(record.datums)
        return self.cache[seed]

    async def echo(self, datums: Sequence[Datum]) -> list[np.ndarray]:
        "The sampler's logprobs of all tokens."
        return [
            lp.values
            for lp in await asyncio.gather(
                *(self.backend.sampler.logprobs(d.tokens) for d in datums)
            )
        ]

    async def train(self, seed: int, updates: int, rate: float = 5e-5) -> None:
        "Updates of the policy, without a sync of the sampler."
        self.moved = True
        rng = np.random.default_rng(seed)
        datums = [
            replace(d, advantage=float(rng.normal()))
            for d in datums_from_groups(await self.groups(seed))
        ]
        for _ in range(updates):
            await self.backend.policy.forward_backward_custom(
                datums, make_loss_fn(datums, LossOptions())
            )
            await self.backend.policy.optim_step(AdamParams(learning_rate=rate))


def with_trainer(record: StepRecord, series: Sequence[np.ndarray]) -> StepRecord:
    "The record with other trainer logprobs."
    assert record.loss is not None
    pairs = zip(record.datums, series, strict=True)
    scored = tuple(Logprobs(np.where(d.active, s, np.nan), policy_version=0) for d, s in pairs)
    return replace(record, loss=replace(record.loss, logprobs=scored))


# --- a fault ----------------------------------------------------------------------------------------------------------


async def stale_weights(b: Bench, updates: int) -> StepRecord:
    "Updates without a sync."
    groups = (await b.healthy(100))[0].groups
    await b.train(1100, updates)
    return await b.record(groups)


# --- what it is given, and what it answers ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench() -> Bench:
    "One bench for the tests below; none of them may leave other weights behind."
    b = Bench()
    asyncio.run(b.backend.policy.save_state("shipped"))
    return b


def ask(source: Any, *series: Any, **options: Any) -> Diagnosis:
    "`diagnose`, waited for."
    return asyncio.run(diagnose(source, *series, **options))


def test_datums_and_series_do_without_a_record(bench: Bench) -> None:
    "The trainer's series handed over, or scored by the backend; the sampler's in the datums, or handed over."
    record, full = asyncio.run(bench.healthy(100))
    assert record.loss is not None
    late = [np.roll(x, 1) for x in full]
    plain = [replace(d, sampler_logprobs=None) for d in record.datums]
    assert ask(record.datums, record.loss.logprobs).ok
    assert ask(plain, record.loss.logprobs, late).cause == "shift"
    assert ask(plain, None, late, backend=bench.backend).cause == "shift"


@pytest.mark.parametrize("dtype", ROUNDING)
def test_the_doctor_is_no_more_lenient_than_the_x_ray(bench: Bench, dtype: str) -> None:
    "What rounding may do is no failed check for the x-ray; in 16 bits the doctor asks for less, and for no direction."
    record, _ = asyncio.run(bench.healthy(100))
    assert record.loss is not None
    for share in (0.9, 1.1):
        off = [np.asarray(d.sampler_logprobs) + share * ROUNDING[dtype].mean for d in record.datums]
        loss = replace(
            record.loss, logprobs=tuple(Logprobs(x, dtype=dtype, policy_version=0) for x in off)
        )
        scored = replace(record, step=1, loss=loss)
        is_small = share < 1
        allowed = is_small and dtype not in HALF_PRECISION
        assert (check_ratio(scored).ok, ask(scored).ok) == (is_small, allowed)


@pytest.mark.parametrize("dtype", HALF_PRECISION)
def test_a_record_in_16_bits_excuses_noise_and_no_direction(bench: Bench, dtype: str) -> None:
    "Noise as large as rounding makes it is no mismatch; as much in one direction, or ten times as much, is; none of it is sure."
    record, _ = asyncio.run(bench.healthy(100))
    assert record.loss is not None
    rng = np.random.default_rng(0)
    # of logits of about 3 nats, times what is left for other tokens
    scale = [3 * UNIT_ROUNDOFF[dtype] * -np.expm1(lp.values) for lp in record.loss.logprobs]
    normal = [rng.normal(size=len(x)) for x in scale]
    changes = {
        "noise": [x * n for x, n in zip(scale, normal, strict=True)],
        "one direction": scale,
        "much noise": [10 * x * n for x, n in zip(scale, normal, strict=True)],
    }
    verdicts = {}
    for name, change in changes.items():
        pairs = zip(record.loss.logprobs, change, strict=True)
        series = tuple(replace(lp, values=lp.values + x, dtype=dtype) for lp, x in pairs)
        verdicts[name] = ask(replace(record, loss=replace(record.loss, logprobs=series)))
    assert [d.ok for d in verdicts.values()] == [True, False, False]
    assert all(d.certainty != "sure" for d in verdicts.values())
    assert verdicts["one direction"].cause == UNEXPLAINED


def test_a_reference_that_rounds_as_the_policy_does_shows_nothing_learned(bench: Bench) -> None:
    "Where policy and reference are the same program, the rounding of both goes one way: that is no stale sampler."
    record, _ = asyncio.run(bench.healthy(100))
    assert record.loss is not None
    rng = np.random.default_rng(0)
    series, datums = [], []
    for lp, d in zip(record.loss.logprobs, record.datums, strict=True):
        scale = 3 * UNIT_ROUNDOFF["bfloat16"] * -np.expm1(lp.values)
        rounded = lp.values + scale * rng.choice([-1, 1], len(scale))
        series.append(replace(lp, values=rounded, dtype="bfloat16"))
        datums.append(replace(d, ref_logprobs=rounded))
    loss = replace(record.loss, logprobs=tuple(series))
    assert ask(replace(record, loss=loss, datums=tuple(datums))).ok


def test_claims_count_where_numbers_are_missing(bench: Bench) -> None:
    "Versions that differ make stale weights likely; a record alone says what it cannot tell apart."
    record, _ = asyncio.run(bench.healthy(100))
    assert record.loss is not None
    rng = np.random.default_rng(0)
    off = [lp.values + rng.normal(0, 0.02, len(lp)) * (len(lp) % 2) for lp in record.loss.logprobs]
    noisy = with_trainer(record, off)
    assert ask(noisy).undecided
    newer = tuple(replace(lp, policy_version=3) for lp in noisy.loss.logprobs)  # type: ignore[union-attr]
    verdict = ask(replace(noisy, loss=replace(record.loss, logprobs=newer)))
    assert verdict.cause in ("stale weights", "dropout")
    assert next(f for f in verdict.findings if f.cause == "stale weights").score >= MIN_LIKELY


def test_without_sync_the_sampler_is_left_alone(bench: Bench) -> None:
    "A control that changes something is run only if it is asked for."

    async def behind_one() -> tuple[Diagnosis, Diagnosis, list[int]]:
        record = await stale_weights(bench, 2)
        backend = bench.backend
        versions = [bench.backend.sampler.engine.policy_version]  # type: ignore[attr-defined]
        careful = await diagnose(
            record, backend=backend, controls=("rescore", "echo", "context", "parts")
        )
        versions.append(bench.backend.sampler.engine.policy_version)  # type: ignore[attr-defined]
        sure = await diagnose(record, backend=backend)
        return careful, sure, versions

    try:
        careful, sure, versions = asyncio.run(behind_one())
    finally:
        asyncio.run(bench.reset())
    assert versions[0] == versions[1]
    assert careful.certainty != "sure"
    assert sure.cause == "stale weights"
    assert sure.score > 0.99
    assert not sure.undecided


class Deaf:
    "A sampler without echo."

    async def logprobs(self, tokens: Any) -> Logprobs:
        raise BackendError("prompt logprobs", got="a server without echo")

    async def sample(self, prompt_tokens: Any, params: SampleParams) -> list[Completion]:
        raise BackendError("completions", got="a server that is busy")


def test_a_rejected_control_is_named(bench: Bench) -> None:
    "What the backend cannot do is listed, and what needs it is left out."
    quiet = asyncio.run(stale_weights(bench, 1))
    asyncio.run(bench.reset())
    verdict = ask(quiet, backend=replace(bench.backend, sampler=Deaf()))  # type: ignore[arg-type]
    assert verdict.failed.keys() == {"echo", "listing", "completions"}
    assert "a server without echo" in repr(verdict)


# --- models that are not peaked -----------------------------------------------------------------------------------


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
FLAT: dict[
    str, dict[str, Any]
] = {  # random models of other families, whose distributions have a long tail everywhere
    "Qwen2": SIZES | {"num_key_value_heads": 2},
    "Gemma": SIZES | {"num_key_value_heads": 2, "head_dim": 8},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
}


def flat_model(family: str, seed: int) -> Any:
    "A random model of a family; or the tiny one with its head divided by three."
    model, tokenizer = load_model("tiny")
    if family == "tiny":
        with torch.no_grad():
            head = model.get_output_embeddings()
            head.weight = torch.nn.Parameter(head.weight / 3)
        return model
    torch.manual_seed(seed)
    ids = {"vocab_size": len(tokenizer), "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{family}Config")(**ids | FLAT[family])
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def verdicts_of_a_step(
    model: Any, sampler: Callable[[Any], Any] | None = None, **settings: Any
) -> list[Diagnosis]:
    "What the doctor says of a step: of its record alone, and with the backend, its sampler replaced."

    async def answers() -> list[Diagnosis]:
        sizes = {
            "prompt_groups_per_step": 2,
            "completions_per_prompt": 4,
            "max_completion_tokens": 24,
        }
        cfg = Config(
            **sizes
            | {"max_seq_len": 128, "kl_beta": 0.0, "drop_zero_variance_groups": False}
            | settings
        )
        options = {"reference": False, "dtype": dtype_of(model), "temperature": cfg.temperature}
        async with open_local(model, load_model("tiny")[1], **options) as b:
            other = replace(b, sampler=sampler(b.sampler)) if sampler else b
            step = await GRPOLoop(
                other, toy_rows(8, seed=cfg.seed), lambda text: float(len(text) % 5), cfg
            ).step()
            return [await diagnose(step), await diagnose(step, backend=other)]

    return asyncio.run(answers())


def dtype_of(model: Any) -> str:
    "The precision of a model's weights."
    return str(model.dtype).removeprefix("torch.")


@pytest.mark.parametrize(
    ("family", "dtype"), [("tiny", "float32"), ("Qwen2", "bfloat16"), ("GPT2", "float32")]
)
def test_an_honest_sampler_is_not_accused(family: str, dtype: str) -> None:
    "A tail that did not come up is no cut, and half precision samples otherwise than it scores, honestly."
    for seed in range(10 if SLOW else 1):
        model = flat_model(family, seed).to(getattr(torch, dtype))
        for verdict in verdicts_of_a_step(model, seed=seed):
            assert verdict.ok, verdict.sentence


@pytest.mark.parametrize("settings", [{"temperature": 0.7}, {"top_p": 0.9}])
def test_a_sampler_with_the_requested_settings_has_no_mismatch(settings: dict[str, float]) -> None:
    for verdict in verdicts_of_a_step(flat_model("Qwen2", 0), **settings):
        assert verdict.ok, verdict.sentence


class Secret:
    "A sampler that samples with a hidden setting, and reports the model's logprobs."

    def __init__(self, inner: Any, **settings: float):
        self.inner = inner
        self.settings = settings
        self.logprobs = inner.logprobs

    async def sample(self, prompt_tokens: Any, params: SampleParams) -> list[Completion]:
        completions = await self.inner.sample(prompt_tokens, replace(params, **self.settings))
        return [replace(c, params=params, sampling_logprobs=None) for c in completions]


@pytest.mark.parametrize(
    ("settings", "cause", "certainty"),
    [
        ({"top_p": 0.9}, "top-p or top-k", "likely"),
        ({"temperature": 0.7}, "temperature", "sure"),
    ],
)
def test_a_secret_cut_or_temperature_is_named_where_the_samples_show_it(
    settings: dict[str, float], cause: str, certainty: str
) -> None:
    "Of a peaked model; samples do not tell a cut from a forbidden token."
    *_, verdict = verdicts_of_a_step(load_model("tiny")[0], lambda inner: Secret(inner, **settings))
    assert (verdict.cause, verdict.certainty) == (cause, certainty), verdict
    assert ("bias or penalty" in verdict.undecided) == (certainty == "likely")


def test_chance_has_the_odds_that_are_claimed() -> None:
    "No sample from the claimed distribution looks like another temperature, a cut or a bias, whatever the distribution."
    rng = np.random.default_rng(0)
    tail = np.arange(1, 5001) ** -1.0
    distributions = [np.exp(rng.normal(0, width, 264)) for width in (0.1, 1, 2, 4)]
    distributions += [tail, np.r_[tail.sum(), tail], np.r_[0.55, 0.45, np.full(30, 1e-6)]]
    datum = Datum(np.arange(3), np.array([0.0, 1.0]))
    for distribution in (weights / weights.sum() for weights in distributions):
        for _ in range(200 if SLOW else 4):
            halves = rng.multinomial(128, distribution, size=(8, 2))
            ids = [np.flatnonzero(h.sum(axis=0)) for h in halves]
            places = zip(ids, halves, strict=True)
            sampled = [Resample(0, k, np.log(distribution[k]), h[:, k]) for k, h in places]
            e = Evidence((datum,), (np.zeros(2),), (np.zeros(2),), resamples=tuple(sampled))
            assert max(gain for gain, _ in resample_gains(e).values()) < MIN_GAIN
