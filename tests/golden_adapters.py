"""Recorded calls of other implementations, turned into calls of ours.

An adapter takes one recorded case and checks it with assertions. It returns an `Outcome`: agreed, or the differences
that were chosen, each in one line; a call that we reject is one of them. What decides is always the content of a case,
never its name, so that other cases of the same format can be run.
"""

from __future__ import annotations

import asyncio
import re
import selectors
import warnings
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, TypeVar

import httpx
import numpy as np
import pytest
import torch

from rl_notebook.core.advantages import STD_TOLERANCE, group_advantages, has_no_signal
from rl_notebook.core.align import align_logprobs, require_finite
from rl_notebook.core.builtin import builtin_inputs, builtin_loss
from rl_notebook.backends.services.completions import OpenAISampler
from rl_notebook.config.aliases import canonical
from rl_notebook.config.config import Config, DAPOConfig
from rl_notebook.config.settings import LossSettings
from rl_notebook.core.types import (
    Completion,
    Datum,
    PromptGroup,
    RLNotebookError,
    RolloutSample,
    SampleParams,
    TensorData,
)
from rl_notebook.core.datums import build_grpo_datums, datum_from_tokens_weights
from rl_notebook.core.loss_params import TRL_PRESETS
from rl_notebook.core.losses import (
    POLICY_LOSSES,
    LossOptions,
    SideData,
    loss_metrics,
    make_grpo_loss_fn,
    make_loss_fn,
    make_offpolicy_grpo_loss_fn,
    tis_weights,
)
from rl_notebook.task.rewards import (
    MathVerify,
    final_answer,
    gsm8k_reward,
    last_boxed,
    parse_figure,
    parse_number,
    tagged_integer,
    tagged_integer_reward,
)
from rl_notebook.loop.groups import Gate, Producer
from rl_notebook.loop.rollouts import groups_per_pass

T = TypeVar("T")
# tolerances: float64, counts in float32, advantages in float32, a correction computed in float32
EXACT = 1e-9
FRACTION = 1e-6
SINGLE = 2e-6
SENT = 2e-5


@dataclass(frozen=True)
class Case:
    "One recorded call."

    file: str  # stem of its file
    name: str  # only for messages
    inputs: dict[str, Any]
    config: dict[str, Any]  # the file's defaults filled in
    expected: dict[str, Any]

    @property
    def raises(self) -> bool:
        "Whether the other program raised."
        return "raises" in self.expected


@dataclass(frozen=True)
class Outcome:
    "What came of a case; disagreement is an AssertionError, not an outcome."

    differs: tuple[str, ...] = ()  # chosen differences, one line each; none = agreed


AGREED = Outcome()
Adapter = Callable[[Case], Outcome]
ADAPTERS: list[tuple[str, Adapter]] = []


def adapter(*patterns: str) -> Callable[[Adapter], Adapter]:
    "Register an adapter for the files whose stem fits one of the patterns."

    def register(fn: Adapter) -> Adapter:
        ADAPTERS.extend((p, fn) for p in patterns)
        return fn

    return register


def find_adapter(stem: str) -> Adapter | None:
    "The adapter of a file, or None."
    return next((fn for pattern, fn in ADAPTERS if fnmatch(stem, pattern)), None)


def read_cases(stem: str, content: Mapping[str, Any]) -> list[Case]:
    "All cases of one file, with the file's defaults in place of absent settings."

    def filled(defaults: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        nested = {
            k: filled(v, config.get(k) or {}) for k, v in defaults.items() if isinstance(v, dict)
        }
        return {**defaults, **config, **nested}

    defaults = content.get("defaults", {})
    return [
        Case(stem, c["name"], c["inputs"], filled(defaults, c.get("config") or {}), c["expected"])
        for c in content["cases"]
    ]


# -- comparing ---------------------------------------------------------------------------------------------------


def floats(values: Sequence[Any] | None) -> np.ndarray:
    "A recorded list as numbers: 'nan' and 'inf' are spelled out, null is undefined."
    return np.array([np.nan if v is None else float(v) for v in values or []], dtype=np.float64)


def close(got: Any, want: Any, what: str, tolerance: float = EXACT) -> None:
    "Same shape, and same values within an absolute and relative tolerance."
    got = np.asarray(got, dtype=np.float64)
    want = np.asarray(want, dtype=np.float64)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, recorded {want.shape}"
    np.testing.assert_allclose(
        got, want, rtol=tolerance, atol=tolerance, equal_nan=True, err_msg=what
    )


def all_close(got: Sequence[Any], want: Sequence[Any], what: str, tolerance: float = EXACT) -> None:
    "The same for a list of series."
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        close(g, w, f"{what} of sample {i}", tolerance)


def assert_rejected(call: Callable[[], Any], *names: str) -> None:
    "Check that one of our errors is raised, and that it is about one of `names`."
    with pytest.raises(RLNotebookError) as caught:
        call()
    assert any(n in caught.value.what for n in names), (
        f"rejected, but not because of {names}: {caught.value}"
    )


# -- policy losses: a recorded call in our terms ------------------------------------------------------------------

Rows = list[np.ndarray | None]  # one series per sample; None where nothing was recorded


@dataclass(frozen=True)
class Batch:
    "One recorded loss call: the inputs of our datums and options, and the result."

    tokens: list[list[int]]
    response: Rows  # 1 where the completion is, whatever the mask says
    weights: Rows  # the mask inside the completion, as long as it was recorded
    advantages: list[float]
    pi: Rows
    old: Rows
    sampler: Rows
    ref: Rows
    options: dict[str, Any]
    loss: float | None  # None = not comparable
    grads: Rows
    denominator: float | None = None

    def each(self, rows: Rows) -> list[tuple[int, np.ndarray | None]]:
        "(number of targets, series) of every sample."
        return [(len(t) - 1, row) for t, row in zip(self.tokens, rows, strict=False)]

    def active(self, i: int) -> np.ndarray:
        "(N-1,) bool, the trained positions of a sample."
        w = self.weights[i]
        return np.pad(w, (0, len(self.response[i]) - len(w))) > 0.5

    @property
    def needs_sampler(self) -> bool:
        "Whether the loss reads the sampler's logprobs."
        o = self.options
        return (
            o.get("tis", "off") != "off"
            or o.get("anchor") == "rollout"
            or o["policy_loss"] == "reinforce"
        )


@dataclass(frozen=True)
class Ran:
    "The result of our loss on a batch."

    loss: float
    grads: list[np.ndarray]
    metrics: dict[str, float]


def datum(b: Batch, i: int) -> Datum:
    "Sample i as one of our datums."
    series = {"sampler_logprobs": b.sampler[i], "old_logprobs": b.old[i], "ref_logprobs": b.ref[i]}
    return Datum(
        tokens=b.tokens[i], weights=b.weights[i], advantage=b.advantages[i], sample=i, **series
    )


def run(b: Batch, **changes: Any) -> Ran:
    "Our loss, its metrics and its gradient; every datum must get a gradient, and exactly zero where it is masked."
    datums = [datum(b, i) for i in range(len(b.weights))]
    loss_fn = make_loss_fn(datums, denominator=b.denominator, **{**b.options, **changes})
    pi = [torch.tensor(p, dtype=torch.float64, requires_grad=True) for p in b.pi]
    loss, metrics = loss_fn(datums, pi)
    loss.backward()
    grads = [p.grad.numpy() for p in pi]
    for d, g in zip(datums, grads, strict=True):
        assert np.all(g[~d.active] == 0), f"{d.where}: a masked token has a gradient"
    return Ran(loss.item(), grads, metrics)


def agree(ran: Ran, b: Batch) -> None:
    "Loss and gradient are the recorded ones."
    if b.loss is not None:
        close(ran.loss, b.loss, "loss")
    all_close(ran.grads, b.grads, "gradient")


# -- policy losses: what we reject ---------------------------------------------------------------------------------


def misfits(b: Batch, rows: Rows) -> bool:
    "Whether a series that is there has another length than its targets."
    return any(row is not None and len(row) != n for n, row in b.each(rows))


def unsampled(b: Batch) -> bool:
    "Whether a needed sampler series is absent, too short, or undefined where it is trained on."
    for i, (n, row) in enumerate(b.each(b.sampler[: len(b.weights)])):
        a = b.active(i)
        missing = (
            b.needs_sampler
            if row is None
            else len(row) != n or (b.needs_sampler and np.isnan(row[a]).any())
        )
        if missing:
            return True
    return False


def below(name: str, limit: float = 0.0) -> Callable[[Batch], bool]:
    return lambda b: b.options.get(name) is not None and b.options[name] < limit


def empty_clip_range(b: Batch) -> bool:
    low = -b.options["eps_clip"] if b.options.get("policy_loss") == "cispo" else 0.0
    return below("eps_clip_high", low)(b)


# (what our error is about, whether we reject a batch for it)
RULES: list[tuple[str, Callable[[Batch], bool]]] = [
    ("policy_logprobs", lambda b: len(b.weights) != len(b.tokens)),
    (
        "weights",
        lambda b: misfits(b, b.weights) or any(not np.isin(w, (0, 1)).all() for w in b.weights),
    ),
    ("old_logprobs", lambda b: misfits(b, b.old)),
    ("ref_logprobs", lambda b: misfits(b, b.ref)),
    ("kl_beta", below("kl_beta")),
    ("ref_logprobs", lambda b: b.options.get("kl_beta", 0) > 0 and any(r is None for r in b.ref)),
    ("sampler_logprobs", unsampled),
    ("tis", lambda b: b.options.get("tis", "off") not in ("off", "token", "sequence")),
    ("eps_clip", below("eps_clip")),
    ("eps_clip_high", empty_clip_range),
    ("eps_clip_c", lambda b: (b.options.get("eps_clip_c") or 2) <= 1),
    ("ratio_log_cap", below("ratio_log_cap")),
    ("seq_ratio_log_cap", below("seq_ratio_log_cap")),
    ("dro_beta", below("dro_beta")),
    ("tis_cap", below("tis_cap")),
    ("icepop_threshold", below("icepop_threshold", 1.0)),
    (
        "icepop_threshold",
        lambda b: b.options.get("icepop_threshold") is not None and b.options.get("tis") != "token",
    ),
]


def refusal(case: Case, b: Batch, attempt: Callable[[Batch], Any] = run) -> Outcome | None:
    "The outcome of a call that we reject; None if there is something to compare."
    names = [name for name, broken in RULES if broken(b)]
    if not names:
        assert not case.raises, "the other program rejects this, we do not"
        return None
    assert_rejected(lambda: attempt(b), *names)
    return AGREED if case.raises else Outcome((f"rejected: {names[0]}",))


# -- policy losses: the cookbook ---------------------------------------------------------------------------------

COOKBOOK_LOSSES = ("grpo", "importance_sampling", "reinforce", "dapo", "dro", "gspo", "cispo")

KL_VALUE_ONLY = (
    "its KL term has no gradient; value agrees with k1, gradient agrees without the term"
)
MASKED_IN_RATIO = (
    "its sequence ratio averages masked tokens in; agrees once old logprobs absorb that difference"
)
KL_AS_ADVANTAGE = (
    "its KL term is beta p T, without the reference; agrees as an advantage lowered by beta"
)
MASK_IGNORED = "it ignores masks inside the completion; agrees when all sampled tokens are trained"
MASKING_CISPO = "its cispo drops clipped tokens, as the gradient of our ppo does; ours keeps them with a clipped weight"
NO_REF_NEEDED = (
    "it needs a reference for a metric even without KL term; we do not, and it changes nothing"
)


def loss_batch(case: Case, options: dict[str, Any], **fields: Any) -> Batch:
    "A recorded cookbook call as a batch."
    x = case.inputs
    e = case.expected
    targets = [len(t) - 1 for t in x["tokens"]]
    prompt_lens = (
        x["prompt_lens"]
        if isinstance(x["prompt_lens"], list)
        else [x["prompt_lens"]] * len(targets)
    )
    response = [
        (np.arange(n) >= max(0, p - 1)).astype(float)
        for n, p in zip(targets, prompt_lens, strict=False)
    ]
    masks = [None] * len(targets) if x["weights"] is None else [floats(w) for w in x["weights"]]
    weights = [
        r if m is None else r[: len(m)] * m[: len(r)] for r, m in zip(response, masks, strict=False)
    ]

    def rows(name: str) -> Rows:
        results = [floats(r) if r else None for r in x[name]]
        return results + [None] * (len(targets) - len(results))

    return Batch(
        tokens=x["tokens"],
        response=response,
        weights=weights,
        advantages=[float(a) for a in x["advantages"]],
        pi=rows("pi_logprobs"),
        old=rows("old_logprobs"),
        sampler=rows("inf_logprobs"),
        ref=rows("ref_logprobs"),
        options={"aggregation": "sum", **options},
        loss=None if case.raises else float(e["loss"]),
        grads=[] if case.raises else [floats(g) for g in e["grad_pi"]],
        **fields,
    )


def surrogate_options(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    "The cookbook's settings of one loss in our words."
    options = config.get(name, config)
    match name:
        case "grpo":
            names = {"eps_clip": "eps_clip", "eps_clip_high": "eps_clip_high", "kl_beta": "kl_beta"}
        case "reinforce":
            names = {"kl_beta": "kl_beta"}
        case "importance_sampling":
            names = {"ratio_log_cap": "ratio_log_cap"}
        case "dapo":
            names = {k: k for k in ("eps_clip", "eps_clip_high", "eps_clip_c", "ratio_log_cap")}
        case "dro":
            names = {"beta": "dro_beta"}
        case "gspo":
            names = {
                k: k.replace("clip_ratio_low", "eps_clip")
                for k in ("clip_ratio_low", "seq_ratio_log_cap")
            }
            names["clip_ratio_high"] = "eps_clip_high"
        case "cispo":
            names = {
                "eps_low": "eps_clip",
                "eps_high": "eps_clip_high",
                "ratio_log_cap": "ratio_log_cap",
            }
    return {
        "policy_loss": "ppo" if name == "grpo" else name,
        **{ours: options[k] for k, ours in names.items() if k in options},
    }


def absorb_masked(b: Batch) -> tuple[Batch, bool]:
    "Shift old and sampler logprobs by what masked tokens add to the mean log ratio of their sample."
    old = list(b.old)
    sampler = list(b.sampler)
    any_holes = False
    for i, inside in enumerate(b.response):
        a = b.active(i)
        gap = b.pi[i] - b.old[i]
        if a.any() and (a != (inside > 0.5)).any():
            shift = gap[a].mean() - gap[inside > 0.5].mean()
            old[i], sampler[i], any_holes = old[i] + shift, sampler[i] + shift, True
    return replace(b, old=old, sampler=sampler), any_holes


def value_only_kl(b: Batch) -> None:
    "Compare with a KL term that has a value and no gradient."
    beta = b.options["kl_beta"]
    without = run(b, kl_beta=0.0)
    with_kl = run(b, kl_estimator="k1")
    agree(replace(without, loss=with_kl.loss), b)
    all_close(
        with_kl.grads,
        [g + beta * w for g, w in zip(b.grads, b.weights, strict=True)],
        "gradient with k1",
    )


# theirs -> (ours, whether theirs is a mean over samples rather than over tokens)
SHARED_METRICS = {
    "ppo_kl": ("ppo_kl", True),
    "ref_kl": ("kl/k3", True),
    "tis/weight_mean": ("tis/weight_mean", True),
    "tis/clip_frac": ("tis/clip_frac", True),
    "tis/icepop_clip_frac": ("tis/icepop_frac", True),
    "tis/seq_ratio": ("tis/raw_mean", True),
    "ppo_ratio_mean": ("ratio/mean", True),
    "is_ratio_mean": ("ratio/mean", True),
    "mean_kl": ("kl/k1", False),
    "active_tokens": ("num_loss_tokens", False),
}


def shared_metrics(case: Case, b: Batch, ran: Ran) -> None:
    "Metrics that mean the same on both sides."
    recorded = case.expected["metrics"]
    # its ratio is another one, and no correction applies
    reinforce = b.options["policy_loss"] == "reinforce"
    holes = any(
        (b.active(i) != (r > 0.5)).any() and b.active(i).any() for i, r in enumerate(b.response)
    )
    trained = [i for i in range(len(b.weights)) if b.active(i).any()]
    if not trained:
        return
    per_sample = [run(select(b, i)).metrics for i in trained]
    for theirs, (ours, by_sample) in SHARED_METRICS.items():
        skip = theirs not in recorded or (reinforce and ("tis" in theirs or "ratio" in theirs))
        skip = skip or (
            "kl" in theirs and theirs != "ppo_kl" and any(b.ref[i] is None for i in trained)
        )
        if skip or (holes and "ratio_mean" in theirs and b.options["policy_loss"] != "ppo"):
            continue
        got = np.mean([m[ours] for m in per_sample]) if by_sample else ran.metrics[ours]
        close(
            got,
            float(recorded[theirs]),
            f"metric {theirs}",
            FRACTION if "frac" in theirs else EXACT,
        )


def select(b: Batch, i: int) -> Batch:
    "The batch of one sample."
    names = ("tokens", "response", "weights", "advantages", "pi", "old", "sampler", "ref", "grads")
    return replace(b, **{n: [getattr(b, n)[i]] for n in names})


@adapter(
    *(f"loss_{name}__{version}" for name in COOKBOOK_LOSSES for version in ("517d206d", "HEAD"))
)
def shared_loss(case: Case) -> Outcome:
    "The later cookbook: old policy as anchor, correction always on, sums over tokens."
    name, version = re.fullmatch(r"loss_(.+)__(.+)", case.file).groups()
    tis = case.config["tis"]
    options = surrogate_options(name, case.config)
    options["kl_estimator"] = "k3" if version == "HEAD" and name == "grpo" else "k1"
    correction = {
        "tis": tis["level"],
        "tis_cap": tis["cap"],
        "icepop_threshold": tis.get("icepop_threshold"),
    }
    applies = name != "reinforce"
    b = loss_batch(case, {**options, **(correction if applies else {})})
    if case.raises and not applies and not any(broken(b) for _, broken in RULES):
        # it checks settings that it does not read
        b = replace(b, options={"policy_loss": "ppo", **correction})
    if (outcome := refusal(case, b)) is not None:
        return outcome
    differs = []
    if name == "gspo":
        b, holes = absorb_masked(b)
        if holes:
            differs += [MASKED_IN_RATIO]
    if b.options.get("kl_beta") and options["kl_estimator"] == "k1":
        value_only_kl(b)
        return Outcome((*differs, KL_VALUE_ONLY))
    ran = run(b)
    agree(ran, b)
    if not differs:
        shared_metrics(case, b, ran)
    return Outcome(tuple(differs))


@adapter(*(f"loss_{name}__ebed367d" for name in COOKBOOK_LOSSES))
def early_loss(case: Case) -> Outcome:
    "The early cookbook: no masks, ratio against the sampler, optional correction anchored on the current policy."
    name = re.fullmatch(r"loss_(.+)__ebed367d", case.file).group(1)
    options = surrogate_options(name, case.config) | (
        {} if name == "grpo" else {"anchor": "rollout"}
    )
    if name == "grpo":
        options = {
            "policy_loss": "grpo",
            "kl_estimator": "k1",
            "kl_beta": case.config.get("kl_beta", 0.001),
        }
    if case.config.get("tis_enabled"):
        limits = case.config["is_config"]
        options |= {"tis": "token", "tis_anchor": "policy", "tis_cap": limits["clip_high"]}
        options |= {"tis_floor": limits["clip_low"]}
    b = loss_batch(case, options)
    b = replace(b, weights=b.response)
    differs = []
    if case.inputs["weights"] is not None:
        recorded = loss_batch(case, options).weights
        same = [
            len(w) == len(r) and (w == r).all() for w, r in zip(recorded, b.response, strict=True)
        ]
        if not all(same):
            differs += [MASK_IGNORED]
    if case.raises and all(r is None for r in b.ref) and not options.get("kl_beta"):
        with_ref = replace(b, ref=[np.zeros(n) for n, _ in b.each(b.ref)])
        all_close(run(b).grads, run(with_ref).grads, "gradient with and without reference", 0.0)
        return Outcome((NO_REF_NEEDED,))
    if (outcome := refusal(case, b)) is not None:
        return outcome
    if beta := b.options.get("kl_beta"):
        agree(run(replace(b, advantages=[a - beta for a in b.advantages]), kl_beta=0.0), b)
        if b.options.get("tis", "off") == "off":
            all_close(run(b).grads, b.grads, "gradient")
        return Outcome((*differs, KL_AS_ADVANTAGE))
    if name == "cispo":
        all_close(run(b, policy_loss="ppo").grads, b.grads, "gradient of ppo")
        return Outcome((*differs, MASKING_CISPO))
    agree(run(b), b)
    return Outcome(tuple(differs))


# -- policy losses: TRL ------------------------------------------------------------------------------------------

SEQUENCE_AS_TOKENS = (
    "we offer no sequence ratio for this loss; agrees once every token has that ratio"
)
TOKENS_OF_A_SEQUENCE = (
    "token weights on a ratio per sequence mix in its gradient; value and gradient per sample agree"
)


CLIPPED_BY_TRL = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


def trl_divisor(
    loss_type: str, config: Mapping[str, Any], x: Mapping[str, Any], active: np.ndarray
) -> float | None:
    "What TRL divides the sum of its token or sequence terms by; None where it is what we divide by anyway."
    accumulated = config["current_gradient_accumulation_steps"] if config["training"] else 1
    ours = (
        max(active.sum(), 1.0)
        if TRL_PRESETS[loss_type]["aggregation"] == "token_mean"
        else len(active)
    )
    theirs = ours * accumulated
    if loss_type in ("dapo", "cispo", "vespo"):
        share = accumulated / config["steps_per_generation"] if config["training"] else 1.0
        theirs = max(float(x["num_items_in_batch"]), 1.0) / config["num_processes"] * share
    return None if theirs == ours else theirs


def trl_batch(case: Case) -> Batch:
    "A recorded TRL call as a batch: one prompt token in front of every row, padding masked."
    x = case.inputs
    c = case.config
    loss_type = case.file.removeprefix("trl_")
    pi = np.array(x["per_token_logps"], dtype=np.float64)
    active = np.array(x["completion_mask"], dtype=np.float64) * np.array(x.get("tool_mask", 1.0))
    words = {
        "loss_type": loss_type,
        "beta": c["beta"],
        "use_bias_correction_kl": c["use_bias_correction_kl"],
    }
    prefixes = (loss_type,) if loss_type in ("sapo", "vespo") else ("epsilon", "delta")
    words |= {
        k: v
        for k, v in c.items()
        if k.startswith(prefixes) and (loss_type != "cispo" or k == "epsilon_high")
    }
    words |= {"off_policy_mask_threshold": c["off_policy_mask_threshold"]}
    if loss_type in CLIPPED_BY_TRL:
        words["importance_sampling_level"] = c["importance_sampling_level"]
    options = canonical(LossSettings, words)[0]
    if loss_type == "dr_grpo":
        options["max_completion_tokens"] = c["max_completion_length"]

    def rows(name: str) -> Rows:
        return (
            [None] * len(pi) if x.get(name) is None else list(np.array(x[name], dtype=np.float64))
        )

    old = rows("old_per_token_logps")
    sampler = [None] * len(pi)
    if x.get("sampling_per_token_logps") is not None:
        sampler = rows("sampling_per_token_logps")
    if c["use_vllm"] and (c["vllm_importance_sampling_correction"] or loss_type == "vespo"):
        ratio = np.broadcast_to(
            np.array(x["importance_sampling_ratio"], dtype=np.float64), pi.shape
        )
        # the random weights are not 1 at padding, as TRL's are: the first token gets them
        if loss_type == "vespo":
            padding = np.where(active > 0, 1.0, ratio).prod(axis=1, keepdims=True)
            ratio = np.concatenate([ratio[:, :1] * padding, ratio[:, 1:]], axis=1)
        sampler = [
            (p if o is None else o) - np.log(r) for p, o, r in zip(pi, old, ratio, strict=True)
        ]
        options |= {"tis": "token", "tis_cap": 1e9}
    return Batch(
        tokens=[list(range(len(p) + 1)) for p in pi],
        response=list(np.ones_like(pi)),
        weights=list(active),
        advantages=[float(a) for a in x["advantages"]],
        pi=list(pi),
        old=old,
        sampler=sampler,
        ref=rows("ref_per_token_logps"),
        options=options,
        loss=None if case.raises else float(case.expected["loss"]),
        grads=[] if case.raises else [floats(g) for g in case.expected["grad_per_token_logps"]],
        denominator=trl_divisor(loss_type, c, x, active),
    )


def gap(b: Batch, i: int) -> np.ndarray:
    "p - o of a sample; zero where nothing older is known."
    return np.zeros_like(b.pi[i]) if b.old[i] is None else b.pi[i] - b.old[i]


def mean_gap(b: Batch, i: int) -> float:
    "Mean of p - o over the trained tokens of a sample."
    return float(gap(b, i)[b.active(i)].sum() / max(b.active(i).sum(), 1))


def trl_sequence_level(b: Batch, differs: list[str]) -> Batch:
    "The same batch with one ratio per sequence."
    if b.options["policy_loss"] == "gspo":
        return b
    differs.append(SEQUENCE_AS_TOKENS)
    return replace(b, old=[p - mean_gap(b, i) for i, p in enumerate(b.pi)])


def trl_metrics(case: Case, b: Batch, ran: Ran) -> None:
    "Metrics that mean the same on both sides."
    corrected = b.options.get("kl_bias_correction") and b.old[0] is not None
    names = {f"clip_ratio/{k}_mean": f"clip_ratio/{k}_mean" for k in ("low", "high", "region")}
    names |= {"cispo_clip_ratio": "clip_ratio/high_mean"} | ({} if corrected else {"kl": "kl"})
    for theirs, ours in names.items():
        if theirs in case.expected["metrics"]:
            tolerance = EXACT if theirs == "kl" else FRACTION
            close(
                ran.metrics[ours],
                floats(case.expected["metrics"][theirs])[0],
                f"metric {theirs}",
                tolerance,
            )


@adapter(*(f"trl_{loss_type}" for loss_type in TRL_PRESETS))
def trl_loss(case: Case) -> Outcome:
    "TRL's loss types as presets of ours; the divisor is given, as a loop that accumulates would."
    c = case.config
    b = trl_batch(case)
    differs = []
    if (outcome := refusal(case, b)) is not None:
        return outcome
    by_sequence = c["importance_sampling_level"] == "sequence"
    b = trl_sequence_level(b, differs) if by_sequence else b
    ran = run(b)
    if by_sequence and (
        b.sampler[0] is not None or (differs and b.options.get("kl_bias_correction"))
    ):
        close(ran.loss, b.loss, "loss")
        all_close([g.sum() for g in ran.grads], [g.sum() for g in b.grads], "gradient, summed,")
        return Outcome((*differs, TOKENS_OF_A_SEQUENCE))
    agree(ran, b)
    if not differs and not by_sequence:
        trl_metrics(case, b, ran)
    return Outcome(tuple(differs))


# -- the Fireworks guides' losses ----------------------------------------------------------------------------------

ONE_SAMPLE = "a group of one has no spread and is rejected; it makes NaN"
NOT_FINITE = "rewards that are not finite are rejected; it makes NaN"
DEAD_GROUP = (
    f"rewards closer than {STD_TOLERANCE:g} have advantage 0; the rest agrees given its advantages"
)
SMALL_SPREAD = "a spread below eps still divides; its advantages are ours times a constant, the rest agrees given them"
SHORTEST = "series of different lengths are rejected, not cut to the shortest"


def advantage_difference(rewards: Sequence[Any], eps: float) -> str | None:
    "Why our advantages of these rewards are not the recorded ones, or None."
    r = floats(rewards)
    if not np.isfinite(r).all():
        return NOT_FINITE
    if len(r) == 1:
        return ONE_SAMPLE
    if has_no_signal(r):
        return None if len(r) == 0 or (np.ptp(r) == 0 and eps > 0) else DEAD_GROUP
    return SMALL_SPREAD if r.std(ddof=1) < eps else None


def check_advantages(
    rewards: Sequence[Any], eps: float, recorded: np.ndarray, single: np.ndarray
) -> str | None:
    "Compare group advantages with the recorded ones in float64 and, if there are, in float32."
    r = floats(rewards)
    why = advantage_difference(rewards, eps)
    if why in (NOT_FINITE, ONE_SAMPLE):
        assert_rejected(lambda: group_advantages(r, eps=eps), "rewards of a group")
        return why
    ours = group_advantages(r, eps=eps)
    if why == DEAD_GROUP:
        assert (ours == 0).all()
    elif why == SMALL_SPREAD:
        close(ours * (r.std(ddof=1) + eps), recorded * (1 + eps), "centred rewards")
    else:
        close(ours, recorded, "advantages")
        close(ours, single, "advantages in float32", SINGLE)
    return why


@adapter("advantages")
def advantages(case: Case) -> Outcome:
    "Group-relative advantages: std, ddof 1."
    e = case.expected
    single = floats(e["advantages"])
    double = floats(e["same_formula_float64"])
    why = check_advantages(case.inputs["rewards"], case.config["eps"], double, single)
    return Outcome((why,)) if why else AGREED


def seed_call(loss_fn: Callable[..., Any], weights: Rows, pi: Rows) -> Ran:
    "A seed-style loss on datums of which only the weights are looked at."
    data = [SimpleNamespace(loss_fn_inputs={"weights": TensorData(w.tolist())}) for w in weights]
    p = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in pi]
    loss, metrics = loss_fn(data, p)
    loss.backward()
    return Ran(loss.item(), [x.grad.numpy() for x in p], metrics)


@adapter("seed003_grpo_onpolicy", "seed003_grpo_offpolicy")
def seed_loss(case: Case) -> Outcome:
    "The seed documents' functions in their own signature, and the on-policy one as options of `make_loss_fn`."
    x = case.inputs
    c = case.config
    e = case.expected
    names = [n for n in ("weights", "pi_logprobs", "ref_logprobs", "behavior_logprobs") if n in x]
    series = {n: [floats(row) for row in x[n]] for n in names}
    eps = c.get("eps", 1e-8)
    beta = c.get("kl_beta", 0.001)
    recorded = floats(e["advantages"])
    why = check_advantages(x["rewards"], eps, recorded, recorded)
    differs = [why] if why else []

    def ours(s: Mapping[str, Rows], **more: Any) -> Ran:
        if "behavior_logprobs" in s:
            more |= {
                "behavior_logprobs": s["behavior_logprobs"],
                "clip_rho": c.get("clip_rho", 10.0),
            }
        make = make_offpolicy_grpo_loss_fn if "behavior_logprobs" in s else make_grpo_loss_fn
        loss_fn = make(floats(x["rewards"]), s["ref_logprobs"], kl_beta=beta, eps=eps, **more)
        return seed_call(loss_fn, s["weights"], s["pi_logprobs"])

    if why in (ONE_SAMPLE, NOT_FINITE):
        assert_rejected(lambda: ours(series), "rewards of a group")
        return Outcome(tuple(differs))
    shortest = [min(len(row) for row in rows) for rows in zip(*series.values(), strict=True)]
    if any(
        len(row) != m for rows in series.values() for row, m in zip(rows, shortest, strict=True)
    ):
        assert_rejected(lambda: ours(series), "weights", "ref_logprobs", "behavior_logprobs")
        return Outcome((*differs, SHORTEST))
    b = Batch(
        tokens=[list(range(m + 1)) for m in shortest],
        response=series["weights"],
        weights=series["weights"],
        advantages=list(recorded),
        pi=series["pi_logprobs"],
        old=[None] * len(shortest),
        sampler=[None] * len(shortest),
        ref=series["ref_logprobs"],
        options={
            "policy_loss": "grpo",
            "kl_beta": beta,
            "kl_estimator": "k1",
            "aggregation": "sample_mean",
        },
        loss=float(e["loss"]),
        grads=[floats(g) for g in e["grad_pi"]],
    )
    if "behavior_logprobs" not in series and np.isfinite(recorded).all():
        agree(run(b), b)
    if not why:
        seed_functions(b, e, ours(series), lambda: ours(series, detach_rho=True))
    return Outcome(tuple(differs))


def seed_functions(
    b: Batch, expected: Mapping[str, Any], ran: Ran, detached: Callable[[], Ran]
) -> None:
    "Loss, gradients and metrics of the seed-style functions."
    agree(ran, b)
    for name, value in expected.get("metrics", {}).items():
        close(ran.metrics[name], float(value), f"metric {name}")
    if "rho" in expected:
        rho = floats(expected["rho"])
        close([ran.metrics["rho/mean"], ran.metrics["rho/max"]], [rho.mean(), rho.max()], "rho")
        want = [floats(g) for g in expected["grad_pi_if_rho_detached"]]
        agree(detached(), replace(b, grads=want))


# -- correction between trainer and sampler ----------------------------------------------------------------------

UNKNOWN_LEVEL = "an unknown level is rejected, not read as token"
NEGATIVE_CAP = "a negative cap is rejected; it makes negative weights"


@adapter("tis_weights__517d206d", "tis_weights__HEAD", "tis_weights__ebed367d")
def correction(case: Case) -> Outcome:
    "Weights of one sample, and their metrics."
    x = case.inputs
    c = case.config
    early = "pi_response_logprobs" in x
    anchor = floats(x["pi_response_logprobs"] if early else x["old_logprobs"])
    sampler = floats(
        x["inf_logprobs"][max(0, x["prompt_len"] - 1) :] if early else x["inf_logprobs"]
    )
    options = {
        "policy_loss": "ppo",
        "tis": c.get("level", "token"),
        "icepop_threshold": c.get("icepop_threshold"),
    }
    if early:
        options |= {"tis_cap": c["clip_high"], "tis_floor": c["clip_low"], "tis_anchor": "policy"}
    if not early:
        options |= {"tis_cap": c["cap"]}

    def ours() -> tuple[np.ndarray, dict[str, float]]:
        o = LossOptions(**options)
        n = len(anchor)
        nothing = np.full(1, np.nan)  # a sample without a trained token
        d = Datum(
            tokens=range(max(n, 1) + 1),
            weights=np.ones(n) if n else np.zeros(1),
            old_logprobs=anchor if n else nothing,
            sampler_logprobs=sampler if n else None if early else nothing,
        )
        t = SideData([d], o).with_policy(
            [torch.tensor(anchor if n else [0.0], dtype=torch.float64)]
        )
        return tis_weights(t, o).numpy(), loss_metrics(t, o)

    reasons = {
        "sampler_logprobs": len(anchor) != len(sampler) or (early and len(anchor) == 0),
        "tis_cap": options["tis_cap"] < options.get("tis_floor", 0.0),
        "icepop_threshold": options["icepop_threshold"] is not None
        and (options["icepop_threshold"] < 1 or options["tis"] != "token"),
        "tis": options["tis"] not in ("token", "sequence"),
    }
    if names := [n for n, broken in reasons.items() if broken]:
        assert_rejected(ours, *names)
        assert case.raises or names in (["tis"], ["tis_cap"]), f"recorded without {names}"
        return (
            AGREED
            if case.raises
            else Outcome((UNKNOWN_LEVEL if names == ["tis"] else NEGATIVE_CAP,))
        )
    assert not case.raises, "the other program rejects this, we do not"
    weights, metrics = ours()
    close(weights, floats(case.expected["weights"]), "weights")
    theirs = {
        "tis/weight_mean": "tis/weight_mean",
        "tis/clip_frac": "tis/clip_frac",
        "tis/seq_ratio": "tis/raw_mean",
    }
    theirs |= {"tis/icepop_clip_frac": "tis/icepop_frac", "tis_mean_ratio": "tis/raw_mean"}
    theirs |= {"tis_max_ratio": "tis/raw_max", "tis_clip_frac": "tis/clip_frac"}
    for name, value in case.expected["metrics"].items():
        if len(weights):
            close(metrics[theirs[name]], float(value), name, FRACTION if "frac" in name else EXACT)
    return AGREED


# -- coordinates, datums, filter ---------------------------------------------------------------------------------

UNDEFINED_IS_NAN = "undefined prompt entries are NaN, not 0; the completion agrees"
NULL_IN_PROMPT = "a null in the prompt is undefined and allowed; the rest agrees"
NOTHING_SAMPLED = "a completion without tokens has no logprobs to miss"
EMPTY_IS_NOT_NONE = "an empty series is rejected, not read as absent"
UNCHECKED = "lengths, prompt_len and nulls are checked and rejected; it checks nothing"
NO_PROMPT = "an empty prompt is rejected, the first sampled token would have no logprob"


def align_reason(
    series: Sequence[Any], prompt_len: int, n: int, echoed: bool
) -> tuple[str, str] | None:
    "(what our error is about, the difference if the other program continues) for a series that we reject."
    if not 1 <= prompt_len <= n:
        return "prompt_len", NO_PROMPT if prompt_len == 0 else UNCHECKED
    fits = (
        {n - 1} | (set() if echoed else {n - prompt_len})
        if echoed or prompt_len == 1
        else {n - prompt_len}
    )
    if echoed and len(series) == n:
        return None if series[0] is None else ("echo logprobs", UNCHECKED)
    if len(series) not in fits:
        return "sampler logprobs", UNCHECKED if len(series) else EMPTY_IS_NOT_NONE
    completion = series[prompt_len - 1 :] if echoed else series
    return ("sampler logprobs", UNCHECKED) if any(v is None for v in completion) else None


@adapter("logprob_align__517d206d", "logprob_align__HEAD")
def alignment(case: Case) -> Outcome:
    "What a sampler returned, in target coordinates."
    x = case.inputs
    series = x["logprobs"]
    p = x["prompt_len"]
    n = len(x["full_tokens"])
    echoed = x["logprobs_echoed"]
    if series is None:
        d = Datum(tokens=[1, 2], weights=[1.0])  # nothing to align; what needs the series says so
        if case.raises:
            assert_rejected(
                lambda: make_loss_fn([d], policy_loss="ppo", tis="token"), "sampler_logprobs"
            )
        else:
            assert case.expected["aligned"] is None
            make_loss_fn([d], policy_loss="ppo")
        return AGREED

    def ours() -> np.ndarray:
        target = align_logprobs(series, p, n, echoed=echoed)
        return require_finite(target, np.arange(n - 1) >= p - 1, name="sampler logprobs")

    if (reason := align_reason(series, p, n, echoed)) is not None:
        assert_rejected(ours, reason[0])
        return AGREED if case.raises else Outcome((reason[1],))
    got = ours()
    returned = floats(series)[1:] if echoed and len(series) == n else floats(series)
    if case.raises:
        assert len(series) == 0 or not np.isfinite(returned[: p - 1]).all(), (
            "the other program rejects this, we do not"
        )
        close(got, returned if len(returned) == n - 1 else np.full(n - 1, np.nan), "aligned")
        return Outcome((NULL_IN_PROMPT if len(series) else NOTHING_SAMPLED,))
    want = floats(case.expected["aligned"])
    close(got[p - 1 :], want[p - 1 :], "aligned completion")
    for mine, theirs in zip(got[: p - 1], want[: p - 1], strict=True):
        assert np.isnan(mine) if theirs == 0 else np.array_equal(mine, theirs, equal_nan=True)
    return Outcome((UNDEFINED_IS_NAN,)) if (want[: p - 1] == 0).any() else AGREED


TOO_SHORT = "a sequence without a target is rejected; it makes an empty datum"
WEIGHTS_MISFIT = "weights of another length than the tokens are rejected"


def check_datum(d: Datum, recorded: Mapping[str, Any], tokens: int) -> None:
    "Inputs, targets and weights are the recorded ones, and what was cut off is written on the datum."
    assert d.input_tokens.tolist() == recorded["model_input_tokens"]
    assert d.target_tokens.tolist() == recorded["target_tokens"]
    close(d.weights, recorded["weights"], "weights", FRACTION)  # recorded in float32
    assert d.truncated_tokens == tokens - len(d.tokens)


@adapter("datum_from_tokens_weights")
def datum_making(case: Case) -> Outcome:
    "Shifting, weights, and truncation that is reported."
    x = case.inputs
    c = case.config
    e = case.expected
    if "completions" in x:
        completions = [SimpleNamespace(**completion) for completion in x["completions"]]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            datums = build_grpo_datums(completions, c["max_seq_len"])
        cut = any(len(completion.full_tokens) > c["max_seq_len"] for completion in completions)
        assert bool(caught) == cut, "truncation is said exactly when it happens"
        for d, recorded, completion in zip(datums, e["datums"], completions, strict=True):
            check_datum(d, recorded, len(completion.full_tokens))
        return AGREED
    tokens = x["tokens"]
    weights = floats(x["weights"])
    limit = c["max_length"]
    if len(tokens) != len(weights):
        assert_rejected(lambda: datum_from_tokens_weights(tokens, weights, limit), "weights")
        return Outcome((WEIGHTS_MISFIT,))
    if min(len(tokens), len(tokens) if limit is None else limit) < 2:
        assert_rejected(lambda: datum_from_tokens_weights(tokens, weights, limit), "tokens")
        assert e["target_tokens"] == []
        return Outcome((TOO_SHORT,))
    d = datum_from_tokens_weights(tokens, weights, limit)
    check_datum(d, e, len(tokens))
    return AGREED


TOLERANCE = (
    f"rewards closer than {STD_TOLERANCE:g} count as equal; agrees with a tolerance of nothing"
)


@adapter("dynamic_filter")
def dynamic_filter(case: Case) -> Outcome:
    "Which groups are trained on."
    rewards = case.inputs["rewards"]
    accepted = case.expected["should_accept"]
    assert (not has_no_signal(rewards, tolerance=np.nextafter(0, 1))) == accepted
    if has_no_signal(rewards) == accepted:
        assert np.ptp(floats(rewards)) < STD_TOLERANCE
        return Outcome((TOLERANCE,))
    return AGREED


# -- losses that a service computes ------------------------------------------------------------------------------

ONE_MASK_EACH = (
    "a datum carries its own mask; there is no list of prompt lengths that could be too short"
)
UNKNOWN_LOSS = "an unknown loss is rejected wherever it would be computed"
CAP_SENT = "we also say the cap of the log ratio, so that nothing hangs on the service's default"


def served_series(b: Batch) -> list[dict[str, np.ndarray]]:
    "What a service would be sent."
    return builtin_inputs([datum(b, i) for i in range(len(b.weights))], LossOptions(**b.options))


@adapter("server_datums__517d206d", "server_datums__HEAD")
def server_datums(case: Case) -> Outcome:
    "The series that a service's own loss reads; the recorded advantages are where a batch has its gradients."
    x = case.inputs
    e = case.expected
    if len(x["prompt_lens"]) != len(x["tokens"]):
        assert case.raises
        return Outcome((ONE_MASK_EACH,))
    recorded = [] if case.raises else [d["advantages"] for d in e["datums"]]
    asked = {"level": "token", "cap": 5.0} | (case.config["tis"] or {})
    options = {"policy_loss": "ppo", "tis": asked["level"], "tis_cap": asked["cap"]}
    inputs = {**x, "ref_logprobs": [], "pi_logprobs": x["old_logprobs"]}
    whole = replace(case, inputs=inputs, expected={**e, "loss": 0.0, "grad_pi": recorded})
    b = loss_batch(whole, options)
    if (outcome := refusal(case, b, served_series)) is not None:
        return outcome
    sent = served_series(b)
    assert all(series.dtype == np.float32 for row in sent for series in row.values())
    all_close([row["advantages"] for row in sent], b.grads, "advantages", SENT)
    all_close(
        [row["logprobs"] for row in sent],
        [d["logprobs"] for d in e["datums"]],
        "logprobs",
        FRACTION,
    )
    return AGREED


@adapter("loss_path__517d206d")
def loss_path(case: Case) -> Outcome:
    "Which losses a service may compute, and the settings that it is sent then. Pipeline parallelism is looked at by neither."
    c = case.config
    e = case.expected
    name = "ppo" if c["policy_loss"] == "grpo" else c["policy_loss"]
    arguments = {
        "policy_loss": name,
        "loss_path": c["loss_path"],
        "kl_beta": c["kl_beta"],
        "aggregation": "sum",
    }
    if name == "ppo":
        arguments |= {"eps_clip_high": c["eps_clip_high"]}
    if name == "dapo":
        arguments |= {"dapo": DAPOConfig(eps_clip_c=c["dapo_eps_clip_c"])}

    def config(**changes: Any) -> Config:
        return Config(backend="fireworks", **arguments | changes)

    if name not in POLICY_LOSSES:
        assert_rejected(config, "policy_loss")
        return AGREED if "raises" in e["validate"] else Outcome((UNKNOWN_LOSS,))
    if "raises" in e["validate"]:
        assert_rejected(config, "policy_loss" if name == "reinforce" else "kl_beta")
    else:
        assert config().loss_path == c["loss_path"]
    if c["loss_path"] == "client":
        assert "raises" in e["builtin"], "a loss that is computed here has no name at the service"
        return AGREED
    without_kl = partial(config, loss_path="client", kl_beta=0.0)
    if "raises" in e["builtin"]:
        assert_rejected(
            lambda: builtin_loss(LossOptions(**without_kl().loss_options())), "policy_loss"
        )
        return AGREED
    ours, settings = builtin_loss(LossOptions(**without_kl().loss_options()))
    theirs, recorded = e["builtin"]["name_config"]
    assert ours == theirs
    unsaid = set(settings) - set(recorded)
    assert unsaid == ({"ratio_log_cap"} if name == "ppo" else set())
    assert {k: v for k, v in settings.items() if k not in unsaid} == pytest.approx(recorded)
    return Outcome((CAP_SENT,)) if unsaid else AGREED


# -- what a server returned --------------------------------------------------------------------------------------

ALWAYS_KEPT = "logprobs are always asked for and kept; the tokens agree"
REJECTED_FIRST = "a completion that could grow past max_seq_len is rejected before it is sampled, not dropped afterwards"
EMPTY_COMPLETION = (
    "a completion without tokens and logprobs is rejected, there is nothing to train on"
)
UNKNOWN_IS_NONE = "unknown sampling logprobs are None as a whole, not a list of nulls"
NULL_IS_ITS_OWN = (
    "a null costs its own place, which for the first token is none, and not all other logprobs"
)
TWO_CALLS = "an echo is a separate call, which has raw logprobs only; agrees in two calls, one to score, one to sample"


def asked_of(
    response: Mapping[str, Any], call: Callable[[OpenAISampler], Coroutine[Any, Any, T]]
) -> T:
    "What our sampler makes of one recorded response, which is all that its server ever says."

    def respond(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=response)

    async def main() -> T:
        transport = httpx.MockTransport(respond)
        sampler = OpenAISampler(
            "http://server", "m", None, dialect="fireworks", kind="both", transport=transport
        )
        try:
            return await call(sampler)
        finally:
            await sampler.close()

    return asyncio.run(main())


def sampled_completion(
    response: Mapping[str, Any],
    prompt: Sequence[int],
    raw: bool = True,
    limit: int | None = None,
    room: int = 64,
) -> Completion:
    "The completion in a recorded response, sampled from the model's own distribution or at another temperature."

    async def call(sampler: OpenAISampler) -> Completion:
        sampler.max_seq_len = limit
        (completion,) = await sampler.sample(
            prompt, SampleParams(max_tokens=room, temperature=1.0 if raw else 0.7)
        )
        return completion

    return asked_of(response, call)


def scored_logprobs(response: Mapping[str, Any], tokens: Sequence[int]) -> np.ndarray:
    "The logprobs of given tokens in a recorded response."

    async def call(sampler: OpenAISampler) -> np.ndarray:
        return (await sampler.logprobs(tokens)).values

    return asked_of(response, call)


def only_completion(response: Mapping[str, Any], echoed: int) -> dict[str, Any]:
    "The response as it would be without the echo."
    (choice,) = response["choices"]
    ids = choice["raw_output"]["completion_token_ids"]
    content = choice["logprobs"]["content"]
    rows = {
        "raw_output": {"completion_token_ids": ids[echoed:]},
        "logprobs": {"content": content[echoed:]},
    }
    return {**response, "choices": [{**choice, **rows}]}


def same_completion(got: Completion, want: Mapping[str, Any], echoed: int = 0) -> None:
    "Tokens, finish reason and logprobs are the recorded ones; `echoed` leading logprobs are not of the completion."
    assert got.full_tokens == want["full_tokens"]
    assert (got.prompt_len, len(got.tokens)) == (want["prompt_len"], want["completion_len"])
    assert got.finish_reason == want["finish_reason"]
    raw = want["inference_logprobs"]
    sampling = want["sampling_logprobs"]
    if raw is not None:
        close(got.logprobs, floats(raw)[echoed:], "logprobs", 0.0)
    if sampling is not None and any(v is not None for v in sampling):
        close(got.sampling_logprobs, floats(sampling)[echoed:], "sampling logprobs", 0.0)


@adapter("sdk_parse_completions")
def parsed_completions(case: Case) -> Outcome:
    "A response of a Fireworks deployment, as its SDK reads it and as we do."
    x = case.inputs
    c = case.config
    prompt = x["prompt_ids"]
    response = x["response"]
    limit = c["max_seq_len"]
    (choice,) = response["choices"]
    ids = choice["raw_output"].get("completion_token_ids")
    rows = choice["logprobs"]["content"]
    echoed = c["echo_mode"] or c.get("echo_last")
    length = len(ids or ()) + (0 if echoed else len(prompt))
    if limit is not None and length > limit and not case.raises:
        room = max(1, length - len(prompt))
        assert_rejected(
            lambda: sampled_completion(response, prompt, limit=limit, room=room),
            "sequence too long",
        )
        assert case.expected["completions"] == []
        return Outcome((REJECTED_FIRST,))
    if echoed:
        return echoed_completion(case, [*prompt, *ids[len(prompt) :]])
    if ids is None:
        assert case.raises
        assert_rejected(lambda: sampled_completion(response, prompt), "no token ids")
        return AGREED
    if not rows:
        assert_rejected(lambda: sampled_completion(response, prompt), "no logprobs")
        assert case.expected["completions"][0]["completion_len"] == 0
        return Outcome((EMPTY_COMPLETION,))
    assert not case.raises, "the other program rejects this, we do not"
    (want,) = case.expected["completions"]
    got = sampled_completion(response, prompt, raw=c["raw_logprobs_match_sampling"])
    same_completion(got, want)
    assert not want["logprobs_echoed"]
    if not c["user_requested_logprobs"]:
        close(got.logprobs, [row["logprob"] for row in rows], "logprobs", 0.0)
        return Outcome((ALWAYS_KEPT,))
    if all(v is None for v in want["sampling_logprobs"]):
        assert got.sampling_logprobs is None
        return Outcome((UNKNOWN_IS_NONE,))
    return AGREED


def echoed_completion(case: Case, tokens: Sequence[int]) -> Outcome:
    "A response that repeats the prompt."
    response = case.inputs["response"]
    p = len(case.inputs["prompt_ids"])
    if case.raises:
        assert_rejected(lambda: scored_logprobs(response, tokens), "echo")
        return AGREED
    (want,) = case.expected["completions"]
    got = scored_logprobs(response, tokens)
    assert len(got) == len(tokens) - 1
    assert want["logprobs_echoed"]
    assert want["echoed_prompt_logprob_count"] == p - 1
    same_completion(
        sampled_completion(only_completion(response, p), tokens[:p]), want, echoed=p - 1
    )
    if want["inference_logprobs"] is None:
        rows = response["choices"][0]["logprobs"]["content"]
        assert any(row["logprob"] is None for row in rows)
        close(got, [row["logprob"] for row in rows[1:]], "logprobs", 0.0)
        return Outcome((NULL_IS_ITS_OWN,))
    close(got, want["inference_logprobs"], "logprobs", 0.0)
    return Outcome((TWO_CALLS,))


# -- rewards -----------------------------------------------------------------------------------------------------

NO_TRUTH = "a row whose own answer cannot be read is unscorable, not wrong"
WHOLE_NUMBERS = (
    "gsm8k_reward reads whole numbers and other markers; the recorded rule is tagged_integer_reward"
)
PERCENT = "percent is a hundredth, unless the worked solution is in percent"
TO_DO = "arithmetic that a completion leaves to do is not its result"
UNITS = "a word next to the number is a unit; the recorded rule takes it for a factor"


@adapter("gsm8k_reward")
def tagged_reward(case: Case) -> Outcome:
    "The integer between answer tags, compared as text; and where our default reward decides otherwise."
    text = case.inputs["completion"]
    e = case.expected
    truth = case.inputs["row"].get("ground_truth")
    assert tagged_integer(text) == e["extracted_completion"]
    assert tagged_integer(truth) == e["extracted_truth"]
    assert tagged_integer_reward(text, truth) == e["reward"]
    ours = gsm8k_reward(text, truth)
    if ours is None:
        assert e["reward"] == 0
        return Outcome((NO_TRUTH,))
    return AGREED if ours == e["reward"] else Outcome((WHOLE_NUMBERS,))


@adapter("gsm8k_boxed_reward")
def boxed_reward(case: Case) -> Outcome:
    "The last box against the number after ####, symbolically where that is not decisive."
    text = case.inputs["completion"]
    truth = case.inputs["answer"]
    e = case.expected
    assert last_boxed(text) == e["boxed"]
    if e["gt_number"] is not None:
        assert parse_number(final_answer(truth)) == parse_number(e["gt_number"])
    ours = gsm8k_reward(text, truth)
    if (
        e["reward"] == 1
        and parse_number(e["boxed"]) is not None
        and parse_figure(e["boxed"]) is None
    ):
        assert (ours, math_verdict(text, truth)) == (0, 0)
        return Outcome((TO_DO,))
    if e["decided_by"] != "math_verify":
        assert ours == e["reward"]
        return AGREED
    verdict = math_verdict(text, truth)
    if verdict is None:
        assert ours is None
        assert e["reward"] == 0
        return Outcome((NO_TRUTH,))
    if e["reward"] == 0 and re.fullmatch(r"[\d.]+ [a-z]{3,}", e["boxed"]):
        assert (ours, verdict) == (1, 1)
        return Outcome((UNITS,))
    assert verdict == e["reward"]
    if ours == e["reward"]:
        return AGREED
    if "%" in e["boxed"]:
        assert ours == 0
        return Outcome((PERCENT,))
    raise AssertionError("a right answer is not recognised, or a wrong one paid")


@cache
def math_verify() -> MathVerify:
    "One worker process for all cases."
    return MathVerify(timeout=60)


def math_verdict(text: str, truth: str) -> float | None:
    "What the symbolic reward says, called as the loop calls it."
    return asyncio.run(math_verify()(text, truth))


# -- batching: replayed on a simulated clock --------------------------------------------------------------------


SINGLES_KEPT = (
    "its filter keeps groups of one, which have nothing to compare with; agrees when they are kept"
)


class Jumps(selectors.DefaultSelector):
    "Instead of waiting it moves its clock on."

    clock = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "every task waits, and no timer is set"
        self.clock += max(timeout, 0.0)
        return super().select(0)


def simulate(main: Coroutine[Any, Any, T]) -> T:
    "Run a coroutine in which sleeping takes no time."
    selector = Jumps()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.clock
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


def group_of(row: int, kind: str, rewards: Sequence[float]) -> PromptGroup:
    "What comes back for one row; a failed one has no samples."
    graded = [] if kind == "fail" else rewards
    samples = [RolloutSample([1, 2], [np.nan, -0.1], [0, 1], reward=r) for r in graded]
    return PromptGroup(tuple(samples), index=row, dropped=("failed",) if kind == "fail" else ())


def stats_of(live: Sequence[PromptGroup], dropped: Sequence[PromptGroup]) -> dict[str, Any]:
    "What the recorded loops count per step."
    fails = [g for g in dropped if not g.samples]
    return {
        "valid_prompt_groups": len(live),
        "total_sampled": len(live) + len(dropped),
        "filter_drops": len(dropped) - len(fails),
        "sample_fails": len(fails),
        "all_raw_rewards": sorted(r for g in [*live, *dropped] for r in g.rewards),
    }


def unordered_rewards(event: Sequence[Any]) -> list[Any]:
    "A recorded event; the order of rewards is not guaranteed."
    return [
        {**part, "all_raw_rewards": sorted(part["all_raw_rewards"])}
        if isinstance(part, dict)
        else part
        for part in event
    ]


def round_of(rows: Sequence[int], most: int, run: Any, useful: Any) -> Producer[PromptGroup]:
    "These rows, each of which keeps its place: a window, or a step that is trained on as it arrives."
    upcoming = iter(rows)
    gate = Gate(len(rows), 1, max_concurrency=most or None, refills=False)
    return Producer(gate, lambda: next(upcoming, None), run, useful)


@adapter("sync_windows__517d206d")
def sync_windows(case: Case) -> Outcome:
    "Windows of steps between weight syncs: who is sampled when, what trains together, when weights are synced."
    x = case.inputs
    c = case.config
    events = []
    rows = range(len(x["kind"]))
    per_step = c["prompt_groups_per_step"]
    size = c["weight_sync_interval"] * per_step or max(len(rows), 1)

    async def sampled(row: int) -> PromptGroup:
        events.append(["sample_start", row])
        await asyncio.sleep(x["latency"][row])
        events.append(["sample_end", row])
        return group_of(row, x["kind"][row], [0.0, 1.0] if x["kind"][row] == "ok" else [1.0, 1.0])

    async def loop() -> int:
        step = c["global_step"]
        for first in range(0, len(rows), size):
            before = step
            window = round_of(
                rows[first : first + size],
                c["max_concurrent"],
                sampled,
                lambda g: not has_no_signal(g.rewards),
            )
            while batch := await window.batch(per_step):
                live, dropped = [
                    [row.value for row in collected]
                    for collected in (batch, window.take_rejected())
                ]
                await asyncio.sleep(c["train_duration"])
                events.append(
                    ["train_step", step, [g.index for g in live], stats_of(live, dropped)]
                )
                step += 1
            if step > before and c["weight_sync_interval"]:
                await asyncio.sleep(c["weight_sync_duration"])
                events.append(["weight_sync", step])
        return step

    assert simulate(loop()) == case.expected["global_step"]
    assert events == [unordered_rewards(event) for event in case.expected["events"]]
    return AGREED


COUNTED_LATER = "a round of which nothing is trained has its own counts; there they are added to the next step's"
MIN_ABOVE_MAX = "a minimum above the maximum is an error; there the minimum starts a pass, which leaves groups over"


def counts_moved_to_next_step(
    stats: dict[str, Any], earlier: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    "The counts of a step with those of the rounds without training before it, as the recorded loop has them."
    names = ("total_sampled", "filter_drops", "sample_fails")
    moved = {name: stats[name] + sum(round[name] for round in earlier) for name in names}
    rewards = [
        *stats["all_raw_rewards"],
        *(r for round in earlier for r in round["all_raw_rewards"]),
    ]
    return {**stats, **moved, "all_raw_rewards": sorted(rewards)}


@adapter("greedy_batching__e6d8bb36", "greedy_batching_edges__e6d8bb36")
def greedy_batching(case: Case) -> Outcome:
    "Backward passes inside a step that start as soon as enough groups are there."
    x = case.inputs
    c = case.config
    if (c["min_samples_per_fwd_bwd"] or 0) > c["max_samples_per_fwd_bwd"]:
        settings = {
            name: c[name] for name in ("min_samples_per_fwd_bwd", "max_samples_per_fwd_bwd")
        }
        assert_rejected(
            lambda: Config(**settings), "min_samples_per_fwd_bwd", "max_samples_per_fwd_bwd"
        )
        return Outcome((MIN_ABOVE_MAX,))
    events = []
    rounds_without_training = []
    moved = False
    k = c["completions_per_prompt"]
    per_step = c["prompt_groups_per_step"]
    limits = groups_per_pass(k, c["min_samples_per_fwd_bwd"], c["max_samples_per_fwd_bwd"])
    assert limits == (c["min_prompt_groups_per_fwd_bwd"], c["max_prompt_groups_per_fwd_bwd"])

    async def sampled(row: int) -> PromptGroup:
        await asyncio.sleep(x["latency"][row])
        mixed = [1.0, *[0.0] * (k - 1)] if k > 1 else [float(row)]
        return group_of(row, x["kind"][row], mixed if x["kind"][row] == "ok" else [1.0] * k)

    def keep(g: PromptGroup) -> bool:
        return len(g.samples) > 0 and not (
            c["filter"] and len(g.samples) > 1 and has_no_signal(g.rewards)
        )

    async def loop() -> int:
        nonlocal moved
        step = 0
        for first in range(0, len(x["kind"]), per_step):
            rows = range(first, min(first + per_step, len(x["kind"])))
            passes = []
            source = round_of(rows, c["max_concurrent"], sampled, keep)
            while batch := await source.batch(*limits, per_step):
                groups = [row.value for row in batch]
                events.extend(
                    [name, [g.index for g in groups]] for name in ("ref_forward", "fwd_bwd")
                )
                passes.append(groups)
            dropped = [row.value for row in source.take_rejected()]
            if passes:
                live = [g for groups in passes for g in groups]
                stats = counts_moved_to_next_step(stats_of(live, dropped), rounds_without_training)
                stats["fwd_bwd_group_counts"] = [len(groups) for groups in passes]
                events.append(["finish_step", step, [g.index for g in live], len(passes), stats])
                step += 1
                moved = moved or bool(rounds_without_training)
                rounds_without_training.clear()
            else:
                rounds_without_training.append(stats_of([], dropped))
        return step

    assert simulate(loop()) == case.expected["global_step"]
    assert events == [unordered_rewards(event) for event in case.expected["events"]]
    singles = c["filter"] and k == 1 and any(kind != "fail" for kind in x["kind"])
    differences = ((SINGLES_KEPT, singles), (COUNTED_LATER, moved))
    return Outcome(tuple(text for text, differs in differences if differs))


# -- adapters in separate files ------------------------------------------------------------------------

import golden_async  # noqa: F401
import golden_igpo  # noqa: F401
import golden_rollouts  # noqa: F401
import golden_routing  # noqa: F401
