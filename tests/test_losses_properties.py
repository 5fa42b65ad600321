"Properties of every policy loss, and its value and gradient against one formula per token written with plain numbers."

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_notebook.core import Datum
from rl_notebook.losses import AGGREGATIONS, POLICY_LOSSES, LossOptions, make_loss_fn, natural_denominator

EXAMPLES = settings(max_examples=40)
Batch = tuple[list[Datum], list[np.ndarray]]  # datums and the policy's logprobs

logprobs = st.integers(-3000, -1).map(lambda i: i / 1000)
gaps = st.integers(-1500, 1500).map(lambda i: i / 1000)
advantages = st.integers(-20, 20).map(lambda i: i / 10)


@st.composite
def samples(draw: st.DrawFn, index: int, has_old: bool) -> tuple[Datum, np.ndarray]:
    "One datum whose series stay within a factor of e^1.5 of the policy, which is undefined where nothing is trained."
    n = draw(st.integers(1, 5))
    weights = np.array(draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)), dtype=float)
    policy = np.array(draw(st.lists(logprobs, min_size=n, max_size=n)))

    def near() -> np.ndarray:
        return policy + np.array(draw(st.lists(gaps, min_size=n, max_size=n)))

    series = {"sampler_logprobs": near(), "ref_logprobs": near(), "old_logprobs": near() if has_old else None}
    nowhere = {k: None if v is None else np.where(weights > 0, v, np.nan) for k, v in series.items()}
    datum = Datum(tokens=range(n + 1), weights=weights, advantage=draw(advantages), sample=index, **nowhere)
    return datum, np.where(weights > 0, policy, np.nan)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    has_old = draw(st.booleans())
    drawn = [draw(samples(i, has_old)) for i in range(draw(st.integers(1, 4)))]
    return [d for d, _ in drawn], [p for _, p in drawn]


@st.composite
def loss_options(draw: st.DrawFn, policy_loss: str | None = None) -> LossOptions:
    "Any valid combination of settings."
    name = policy_loss or draw(st.sampled_from(sorted(POLICY_LOSSES)))
    settings: dict[str, Any] = {
        "policy_loss": name,
        "kl_beta": draw(st.sampled_from([0.0, 0.05, 1.0])),
        "kl_estimator": draw(st.sampled_from(["k1", "k2", "k3"])),
        "kl_bias_correction": draw(st.booleans()),
        "aggregation": draw(st.sampled_from(AGGREGATIONS)),
        "max_completion_tokens": 7,
    }
    if name not in ("grpo", "reinforce"):
        settings["anchor"] = draw(st.sampled_from(["old", "rollout"]))
    if name != "reinforce" and (level := draw(st.sampled_from(["off", "token", "sequence"]))) != "off":
        settings |= {"tis": level, "tis_cap": draw(st.sampled_from([0.8, 1.3, 5.0]))}
        settings |= {"tis_floor": draw(st.sampled_from([0.0, 0.7]))}
        settings |= {"tis_anchor": draw(st.sampled_from(["old", "policy"]))}
        settings |= {"icepop_threshold": draw(st.sampled_from([None, 1.5]))} if level == "token" else {}
    choices = {
        "eps_clip": [None, 0.0, 0.1, 0.5],
        "eps_clip_high": [None, 0.3],
        "eps_clip_c": [None, 1.4],
        "ratio_log_cap": [None, 0.6],
        "seq_ratio_log_cap": [None, 0.3],
        "dro_beta": [None, 0.5],
        "sapo_temperature_pos": [None, 2.0],
        "sapo_temperature_neg": [None, 3.0],
    }
    read = POLICY_LOSSES[name][1]
    return LossOptions(**settings, **{k: draw(st.sampled_from(v)) for k, v in choices.items() if k in read})


def evaluate(
    datums: list[Datum], policy: list[np.ndarray], options: LossOptions, denominator: float | None = None
) -> tuple[float, list[np.ndarray]]:
    "Loss and gradient, one array per datum."
    p = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in policy]
    loss, _ = make_loss_fn(datums, options, denominator=denominator)(datums, p)
    loss.backward()
    for d, x in zip(datums, p, strict=True):
        assert x.grad is not None, f"{d.where}: no gradient"
    return loss.item(), [x.grad.numpy() for x in p]


def same(got: list[np.ndarray], want: list[np.ndarray]) -> None:
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-10, atol=1e-12)


# -- properties --------------------------------------------------------------------------------------------------


@EXAMPLES
@given(batches(), loss_options(), st.randoms(use_true_random=False))
def test_micro_batches_do_not_change_the_gradient(batch: Batch, options: LossOptions, random: Any) -> None:
    datums, policy = batch
    loss, grads = evaluate(datums, policy, options)
    step = natural_denominator(np.array([d.num_loss_tokens for d in datums]), options.aggregation)
    cuts = sorted({0, len(datums), *(random.randrange(len(datums) + 1) for _ in range(2))})
    parts = [evaluate(datums[a:b], policy[a:b], options, step) for a, b in pairwise(cuts)]
    assert sum(part for part, _ in parts) == pytest.approx(loss, rel=1e-10, abs=1e-12)
    same([g for _, part in parts for g in part], grads)


@EXAMPLES
@given(batches(), loss_options(), st.randoms(use_true_random=False))
def test_row_order_does_not_change_the_gradient(batch: Batch, options: LossOptions, random: Any) -> None:
    datums, policy = batch
    loss, grads = evaluate(datums, policy, options)
    order = list(range(len(datums)))
    random.shuffle(order)
    shuffled_loss, shuffled = evaluate([datums[i] for i in order], [policy[i] for i in order], options)
    assert shuffled_loss == pytest.approx(loss, rel=1e-10, abs=1e-12)
    same(shuffled, [grads[i] for i in order])


def padded(x: np.ndarray, left: int, right: int, value: float) -> np.ndarray:
    return np.pad(x, (left, right), constant_values=value)


@EXAMPLES
@given(batches(), loss_options(), st.integers(0, 3), st.integers(0, 3), st.sampled_from([0.0, -1e4, np.nan, -np.inf]))
def test_padding_does_not_change_the_gradient(
    batch: Batch, options: LossOptions, left: int, right: int, filler: float
) -> None:
    datums, policy = batch
    loss, grads = evaluate(datums, policy, options)
    wider = []
    for d in datums:
        names = [n for n in ("sampler_logprobs", "old_logprobs", "ref_logprobs") if getattr(d, n) is not None]
        series = {n: padded(getattr(d, n), left, right, filler) for n in names}
        tokens = range(len(d.tokens) + left + right)
        wider.append(replace(d, tokens=tokens, weights=padded(d.weights, left, right, 0.0), **series))
    wide_loss, wide = evaluate(wider, [padded(p, left, right, filler) for p in policy], options)
    assert wide_loss == pytest.approx(loss, rel=1e-10, abs=1e-12)
    same(wide, [padded(g, left, right, 0.0) for g in grads])


@EXAMPLES
@given(batches(), loss_options())
def test_masked_tokens_get_exactly_zero_and_every_datum_a_gradient(batch: Batch, options: LossOptions) -> None:
    datums, policy = batch
    silent = replace(datums[0], weights=np.zeros_like(datums[0].weights))
    _, grads = evaluate([*datums, silent], [*policy, np.full(len(silent.weights), np.nan)], options)
    for d, g in zip([*datums, silent], grads, strict=True):
        assert (g[~d.active] == 0).all()
        assert np.isfinite(g).all()


# -- an independent formula --------------------------------------------------------------------------------------


def within(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


class Scalar:
    "One batch, one setting, one token at a time. `live` is what is differentiated, `held` is the stop-gradient copy."

    def __init__(self, datums: list[Datum], options: LossOptions, held: list[np.ndarray]):
        self.datums, self.options, self.held = datums, options, held
        self.places = [(i, int(j)) for i, d in enumerate(datums) for j in np.flatnonzero(d.active)]

    def old(self, i: int, j: int) -> float:
        d = self.datums[i]
        series = d.sampler_logprobs if self.options.anchor == "rollout" else d.old_logprobs
        return self.held[i][j] if series is None else series[j]

    def mean(self, i: int, of: Callable[[int, int], float]) -> float:
        inside = [j for k, j in self.places if k == i]
        return sum(of(i, j) for j in inside) / len(inside)

    def correction(self, i: int, j: int) -> float:
        o = self.options
        if o.tis == "off":
            return 1.0

        def gap(i: int, j: int) -> float:
            anchor = self.held[i][j] if o.tis_anchor == "policy" else self.old(i, j)
            return anchor - self.datums[i].sampler_logprobs[j]

        raw = math.exp(self.mean(i, gap) if o.tis == "sequence" else gap(i, j))
        h = o.icepop_threshold
        return 0.0 if h is not None and not 1 / h <= raw <= h else within(raw, o.tis_floor, o.tis_cap)

    def token_ratio(self, i: int, j: int, p: float, cap: float) -> float:
        return math.exp(within(p - self.old(i, j), -cap, cap))

    def sequence_ratio(self, i: int, j: int, p: float, cap: float) -> float:
        centre = self.mean(i, lambda i, j: self.held[i][j] - self.old(i, j))
        return math.exp(min(p - self.held[i][j] + centre, cap))

    def clipped(self, r: float, a: float, knob: dict[str, Any]) -> float:
        high = knob["eps_clip"] if knob["eps_clip_high"] is None else knob["eps_clip_high"]
        loss = max(-r * a, -within(r, 1 - knob["eps_clip"], 1 + high) * a)
        return min(-knob["eps_clip_c"] * a, loss) if a < 0 and knob["eps_clip_c"] is not None else loss

    def surrogate(self, i: int, j: int, p: float) -> float:
        name, a = self.options.policy_loss, self.datums[i].advantage
        own = {k: getattr(self.options, k) for k in POLICY_LOSSES[name][1]}
        knob = {k: POLICY_LOSSES[name][1][k] if v is None else v for k, v in own.items()}
        t, q, cap = self.correction(i, j), self.held[i][j], knob.get("ratio_log_cap", 20.0)
        match name:
            case "grpo":
                return -a * p * t
            case "reinforce":
                return -math.exp(within(p - self.datums[i].sampler_logprobs[j], -20, 20)) * a
            case "importance_sampling":
                return -self.token_ratio(i, j, p, cap) * a * t
            case "ppo" | "dapo":
                return self.clipped(self.token_ratio(i, j, p, cap), a, knob) * t
            case "gspo":
                return self.clipped(self.sequence_ratio(i, j, p, knob["seq_ratio_log_cap"]), a, knob) * t
            case "cispo":
                high = knob["eps_clip"] if knob["eps_clip_high"] is None else knob["eps_clip_high"]
                return -within(self.token_ratio(i, j, q, cap), 1 - knob["eps_clip"], 1 + high) * p * a * t
            case "dro":
                return -(p * a * t - knob["dro_beta"] / 2 * (p - self.old(i, j)) ** 2 * (a != 0))
            case "sapo":
                tau = knob["sapo_temperature_pos"] if a > 0 else knob["sapo_temperature_neg"]
                tau = float(np.float32(tau))  # torch.where makes it single precision, in TRL too
                gate = 1 / (1 + math.exp(-tau * (self.token_ratio(i, j, p, cap) - 1)))
                return -gate * 4 / tau * a * t
        raise AssertionError(f"no formula for {name}: write one")

    def kl(self, i: int, j: int, p: float) -> float:
        o, x = self.options, self.datums[i].ref_logprobs[j] - p
        value = {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - x - 1}[o.kl_estimator]
        if not o.kl_bias_correction:
            return o.kl_beta * value
        if o.policy_loss == "gspo":
            cap = 10.0 if o.seq_ratio_log_cap is None else o.seq_ratio_log_cap
            return o.kl_beta * value * self.sequence_ratio(i, j, p, cap)
        return o.kl_beta * value * self.token_ratio(i, j, p, 20.0)

    def share(self, i: int) -> float:
        "What one token of sample i counts in the batch."
        samples = len(self.datums)
        match self.options.aggregation:
            case "token_mean":
                return 1 / len(self.places)
            case "sequence_mean":
                return 1 / samples / sum(k == i for k, _ in self.places)
            case "sample_mean":
                return 1 / samples
            case "constant":
                return 1 / samples / 7
        return 1.0

    def term(self, i: int, j: int, p: float) -> float:
        return (self.surrogate(i, j, p) + self.kl(i, j, p)) * self.share(i)


@pytest.mark.parametrize("policy_loss", sorted(POLICY_LOSSES))
@settings(max_examples=25)
@given(data=st.data())
def test_value_and_gradient_agree_with_a_scalar_formula(policy_loss: str, data: st.DataObject) -> None:
    datums, policy = data.draw(batches())
    options = data.draw(loss_options(policy_loss))
    loss, grads = evaluate(datums, policy, options)
    scalar = Scalar(datums, options, policy)
    assert loss == pytest.approx(sum(scalar.term(i, j, policy[i][j]) for i, j in scalar.places), rel=1e-10, abs=1e-12)
    h = 1e-6
    for i, j in scalar.places:
        p = policy[i][j]
        below, here, above = (scalar.term(i, j, p + d) for d in (-h, 0.0, h))
        slopes = sorted([(here - below) / h, (above - here) / h])  # they differ where the loss has a kink
        assert slopes[0] - 1e-4 <= grads[i][j] <= slopes[1] + 1e-4, f"{datums[i].where}, target {j}"
