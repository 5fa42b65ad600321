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
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rl_notebook.core.builtin import BUILTIN_LOSSES, builtin_inputs, builtin_loss, check_builtin
from rl_notebook.core.types import Datum
from rl_notebook.core.losses import AGGREGATIONS, POLICY_LOSSES, LossOptions, make_loss_fn
from rl_notebook.loop.step import in_calls, step_denominator

EXAMPLES = settings(max_examples=15)
BY_CALL = {"kl_cov", "clip_cov"}  # their means and shares are those of one call
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

    series = {
        "sampler_logprobs": near(),
        "ref_logprobs": near(),
        "old_logprobs": near() if has_old else None,
    }
    nowhere = {
        k: None if v is None else np.where(weights > 0, v, np.nan) for k, v in series.items()
    }
    place = {"group": index // 2, "sample": index}
    datum = Datum(
        tokens=range(n + 1), weights=weights, advantage=draw(advantages), **place, **nowhere
    )
    return datum, np.where(weights > 0, policy, np.nan)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    has_old = draw(st.booleans())
    pairs = [draw(samples(i, has_old)) for i in range(draw(st.integers(1, 4)))]
    return [d for d, _ in pairs], [p for _, p in pairs]


@st.composite
def loss_options(draw: st.DrawFn, policy_loss: str | None = None) -> LossOptions:
    "Any valid combination of settings."
    name = policy_loss or draw(st.sampled_from(sorted(POLICY_LOSSES.keys() - BY_CALL)))
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
    levels = ["off", "token", *([] if name == "vespo" else ["sequence", "product"])]
    if name != "reinforce" and (level := draw(st.sampled_from(levels))) != "off":
        settings |= {"tis": level, "tis_cap": draw(st.sampled_from([0.8, 1.3, 5.0]))}
        settings |= {"tis_mode": draw(st.sampled_from(["truncate", "mask", "reject"]))}
        settings |= {"tis_floor": draw(st.sampled_from([0.0, 0.7]))}
        settings |= {"tis_anchor": draw(st.sampled_from(["old", "policy"]))}
        if level == "token":
            settings |= {"icepop_threshold": draw(st.sampled_from([None, 1.5]))}
    settings["off_policy_mask_threshold"] = draw(st.sampled_from([None, 0.3]))
    choices = {
        "vespo_k_pos": [None, 1.0],
        "vespo_lambda_neg": [None, 0.5],
        "dppo_low": [None, 0.01],
        "dppo_high": [None, 0.01],
        "dppo_cap": [None, 1.1],
        "cov_share": [None, 0.4],
        "kl_cov_coef": [None, 0.3],
        "clip_cov_low": [None, 0.0],
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
    return LossOptions(
        **settings, **{k: draw(st.sampled_from(v)) for k, v in choices.items() if k in read}
    )


def evaluate(
    datums: list[Datum],
    policy: list[np.ndarray],
    options: LossOptions,
    denominator: float | None = None,
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
def test_micro_batches_do_not_change_the_gradient(
    batch: Batch, options: LossOptions, random: Any
) -> None:
    datums, policy = batch
    loss, grads = evaluate(datums, policy, options)
    calls, step = in_calls(datums, options.aggregation, random.randrange(1, len(datums) + 1), None)
    cuts = np.cumsum([0, *map(len, calls)]).tolist()
    parts = [evaluate(datums[a:b], policy[a:b], options, step) for a, b in pairwise(cuts)]
    assert sum(part for part, _ in parts) == pytest.approx(loss, rel=1e-10, abs=1e-12)
    same([g for _, part in parts for g in part], grads)


@EXAMPLES
@given(batches(), loss_options(), st.randoms(use_true_random=False))
def test_row_order_does_not_change_the_gradient(
    batch: Batch, options: LossOptions, random: Any
) -> None:
    datums, policy = batch
    loss, grads = evaluate(datums, policy, options)
    order = list(range(len(datums)))
    random.shuffle(order)
    shuffled_loss, shuffled = evaluate(
        [datums[i] for i in order], [policy[i] for i in order], options
    )
    assert shuffled_loss == pytest.approx(loss, rel=1e-10, abs=1e-12)
    same(shuffled, [grads[i] for i in order])


def padded(x: np.ndarray, left: int, right: int, value: float) -> np.ndarray:
    return np.pad(x, (left, right), constant_values=value)


@EXAMPLES
@given(
    batches(),
    loss_options(),
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from([0.0, -1e4, np.nan, -np.inf]),
)
def test_padding_does_not_change_the_gradient(
    batch: Batch, options: LossOptions, left: int, right: int, filler: float
) -> None:
    datums, policy = batch
    loss, grads = evaluate(datums, policy, options)
    wider = []
    for d in datums:
        names = [
            n
            for n in ("sampler_logprobs", "old_logprobs", "ref_logprobs")
            if getattr(d, n) is not None
        ]
        series = {n: padded(getattr(d, n), left, right, filler) for n in names}
        tokens = range(len(d.tokens) + left + right)
        wider.append(
            replace(d, tokens=tokens, weights=padded(d.weights, left, right, 0.0), **series)
        )
    wide_loss, wide = evaluate(wider, [padded(p, left, right, filler) for p in policy], options)
    assert wide_loss == pytest.approx(loss, rel=1e-10, abs=1e-12)
    same(wide, [padded(g, left, right, 0.0) for g in grads])


@EXAMPLES
@given(batches(), loss_options())
def test_masked_tokens_get_exactly_zero_and_every_datum_a_gradient(
    batch: Batch, options: LossOptions
) -> None:
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
        self.datums = datums
        self.options = options
        self.held = held
        self.moved = {}
        self.places = [(i, int(j)) for i, d in enumerate(datums) for j in np.flatnonzero(d.active)]

    def live(self, i: int, j: int) -> float:
        return self.moved.get((i, j), self.held[i][j])

    def old(self, i: int, j: int) -> float:
        d = self.datums[i]
        series = d.sampler_logprobs if self.options.anchor == "rollout" else d.old_logprobs
        return self.held[i][j] if series is None else series[j]

    def sum(self, i: int, of: Callable[[int, int], float]) -> float:
        return sum(of(i, j) for k, j in self.places if k == i)

    def mean(self, i: int, of: Callable[[int, int], float]) -> float:
        return self.sum(i, of) / self.sum(i, lambda i, j: 1)

    def correction(self, i: int, j: int) -> float:
        o = self.options
        if o.tis == "off":
            return 1.0

        def gap(i: int, j: int) -> float:
            anchor = self.held[i][j] if o.tis_anchor == "policy" else self.old(i, j)
            return anchor - self.datums[i].sampler_logprobs[j]

        by_sample = {"sequence": self.mean, "product": self.sum}
        raw = math.exp(by_sample[o.tis](i, gap) if o.tis in by_sample else gap(i, j))
        h = o.icepop_threshold
        outside = o.tis_mode != "truncate" and not o.tis_floor <= raw <= o.tis_cap
        if outside or (h is not None and not 1 / h <= raw <= h):
            return 0.0
        return 1.0 if o.tis_mode == "reject" else within(raw, o.tis_floor, o.tis_cap)

    def kept(self, i: int) -> bool:
        far = self.mean(i, lambda i, j: self.datums[i].sampler_logprobs[j] - self.held[i][j])
        threshold = self.options.off_policy_mask_threshold
        return threshold is None or self.datums[i].advantage >= 0 or far <= threshold

    def token_ratio(self, i: int, j: int, p: float, cap: float) -> float:
        return math.exp(within(p - self.old(i, j), -cap, cap))

    def sequence_ratio(self, i: int, j: int, p: float, cap: float) -> float:
        centre = self.mean(i, lambda i, j: self.held[i][j] - self.old(i, j))
        return math.exp(min(p - self.held[i][j] + centre, cap))

    def clipped(self, r: float, a: float, params: dict[str, Any]) -> float:
        high = params["eps_clip"] if params["eps_clip_high"] is None else params["eps_clip_high"]
        loss = max(-r * a, -within(r, 1 - params["eps_clip"], 1 + high) * a)
        return (
            min(-params["eps_clip_c"] * a, loss)
            if a < 0 and params["eps_clip_c"] is not None
            else loss
        )

    def vespo(self, i: int, p: float, params: dict[str, Any]) -> float:
        def log_w(i: int, j: int) -> float:
            return self.held[i][j] - self.old(i, j) + math.log(max(self.correction(i, j), 1e-8))

        a = self.datums[i].advantage
        x = within(self.sum(i, log_w), math.log(1e-8), 20)
        side = "pos" if a >= 0 else "neg"
        k = params[f"vespo_k_{side}"]
        rate = params[f"vespo_lambda_{side}"]
        return -math.exp(rate) * math.exp(k * x) * math.exp(-rate * math.exp(x)) * a * p

    def gmpo(self, i: int, params: dict[str, Any]) -> float:
        high = params["eps_clip"] if params["eps_clip_high"] is None else params["eps_clip_high"]
        a = self.datums[i].advantage

        def gap(i: int, j: int) -> float:
            d = within(
                self.live(i, j) - self.old(i, j), -params["ratio_log_cap"], params["ratio_log_cap"]
            )
            return min(d, high) if a > 0 else max(d, -params["eps_clip"])

        return -math.exp(self.mean(i, gap)) * a

    def dppo(self, name: str, i: int, j: int, p: float, params: dict[str, Any]) -> float:
        a = self.datums[i].advantage
        was = math.exp(self.old(i, j))
        now = math.exp(self.held[i][j])
        odds = (1 - was + 1e-8) / (1 - now + 1e-8)
        rest = math.log(odds) if odds > 0 else math.nan  # random old logprobs may be above 0
        far = abs(now - was) if name == "dppo_tv" else was * math.log(was / now) + (1 - was) * rest
        gone = (a > 0 and now > was and far > params["dppo_high"]) or (
            a < 0 and now < was and far > params["dppo_low"]
        )
        return 0.0 if gone else -min(now / was, params["dppo_cap"]) * a * p

    def selected_tokens(self, name: str, params: dict[str, Any]) -> list[tuple[int, int]]:
        "The tokens that the covariance of advantage and logprob singles out, in the batch."
        a = np.array([self.datums[i].advantage for i, _ in self.places])
        p = np.array([self.held[i][j] for i, j in self.places])
        cov = (a - a.mean()) * (p - p.mean())
        count = max(1, int(len(a) * params["cov_share"]))
        if name == "kl_cov":
            chosen = torch.tensor(cov).topk(count).indices.tolist()
        else:
            high = (
                params["eps_clip"] if params["eps_clip_high"] is None else params["eps_clip_high"]
            )
            r = np.array(
                [
                    self.token_ratio(i, j, self.held[i][j], params["ratio_log_cap"])
                    for i, j in self.places
                ]
            )
            free = ~(-np.clip(r, 1 - params["eps_clip"], 1 + high) * a > -r * a)
            among = np.flatnonzero(
                free & (cov > params["clip_cov_low"]) & (cov < params["clip_cov_high"])
            )
            order = torch.randperm(len(among), generator=torch.Generator().manual_seed(0))
            chosen = among[order[:count].numpy()]
        return [self.places[k] for k in chosen]

    def surrogate(self, i: int, j: int) -> float:
        name = self.options.policy_loss
        a = self.datums[i].advantage
        p = self.live(i, j)
        chosen = {k: getattr(self.options, k) for k in POLICY_LOSSES[name][1]}
        params = {k: POLICY_LOSSES[name][1][k] if v is None else v for k, v in chosen.items()}
        t = self.correction(i, j)
        q = self.held[i][j]
        cap = params.get("ratio_log_cap", 20.0)
        match name:
            case "grpo":
                return -a * p * t
            case "reinforce":
                return -math.exp(within(p - self.datums[i].sampler_logprobs[j], -20, 20)) * a
            case "importance_sampling":
                return -self.token_ratio(i, j, p, cap) * a * t
            case "ppo" | "dapo":
                return self.clipped(self.token_ratio(i, j, p, cap), a, params) * t
            case "gspo":
                return (
                    self.clipped(
                        self.sequence_ratio(i, j, p, params["seq_ratio_log_cap"]), a, params
                    )
                    * t
                )
            case "cispo":
                high = (
                    params["eps_clip"]
                    if params["eps_clip_high"] is None
                    else params["eps_clip_high"]
                )
                return (
                    -within(self.token_ratio(i, j, q, cap), 1 - params["eps_clip"], 1 + high)
                    * p
                    * a
                    * t
                )
            case "dro":
                return -(p * a * t - params["dro_beta"] / 2 * (p - self.old(i, j)) ** 2 * (a != 0))
            case "sapo":
                tau = params["sapo_temperature_pos"] if a > 0 else params["sapo_temperature_neg"]
                tau = float(np.float32(tau))  # torch.where makes it single precision, in TRL too
                gate = 1 / (1 + math.exp(-tau * (self.token_ratio(i, j, p, cap) - 1)))
                return -gate * 4 / tau * a * t
            case "vespo":
                return self.vespo(i, p, params)
            case "gmpo":
                return self.gmpo(i, params) * t
            case "dppo_tv" | "dppo_kl":
                return self.dppo(name, i, j, p, params) * t
            case "kl_cov":
                gap = within(p - self.old(i, j), -cap, cap)
                pays = (
                    params["kl_cov_coef"] * abs(gap)
                    if (i, j) in self.selected_tokens(name, params)
                    else 0.0
                )
                return (-math.exp(gap) * a + pays) * t
            case "clip_cov":
                gone = (i, j) in self.selected_tokens(name, params)
                return 0.0 if gone else self.clipped(self.token_ratio(i, j, p, cap), a, params) * t
        raise AssertionError(f"no formula for {name}: write one")

    def kl(self, i: int, j: int) -> float:
        o = self.options
        x = self.datums[i].ref_logprobs[j] - self.live(i, j)
        value = {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - x - 1}[o.kl_estimator]
        if not o.kl_bias_correction:
            return o.kl_beta * value
        if o.policy_loss == "gspo":
            cap = 10.0 if o.seq_ratio_log_cap is None else o.seq_ratio_log_cap
            return (
                o.kl_beta
                * value
                * math.exp(min(self.mean(i, lambda i, j: self.live(i, j) - self.old(i, j)), cap))
            )
        return o.kl_beta * value * self.token_ratio(i, j, self.live(i, j), 20.0)

    def share(self, i: int) -> float:
        "What one token of sample i counts in the batch."
        samples = len(self.datums)
        match self.options.aggregation:
            case "token_mean":
                return 1 / len(self.places)
            case "sequence_mean":
                return 1 / samples / sum(k == i for k, _ in self.places)
            case "prompt_mean":
                of_prompt = [self.datums[k].group == self.datums[i].group for k, _ in self.places]
                return 1 / len({d.group for d in self.datums}) / sum(of_prompt)
            case "sample_mean":
                return 1 / samples
            case "constant":
                return 1 / samples / 7
        return 1.0

    def value(self) -> float:
        return sum(
            (self.surrogate(i, j) * self.kept(i) + self.kl(i, j)) * self.share(i)
            for i, j in self.places
        )


@pytest.mark.parametrize("policy_loss", sorted(POLICY_LOSSES))
@EXAMPLES
@given(data=st.data())
def test_value_and_gradient_agree_with_a_scalar_formula(
    policy_loss: str, data: st.DataObject
) -> None:
    datums, policy = data.draw(batches())
    options = data.draw(loss_options(policy_loss))
    loss, grads = evaluate(datums, policy, options)
    scalar = Scalar(datums, options, policy)
    expected = scalar.value()
    h = 1e-6
    assert loss == pytest.approx(expected, rel=1e-10, abs=1e-12)
    for i, j in scalar.places:
        values = []
        for step in (-h, h):
            scalar.moved = {(i, j): policy[i][j] + step}
            values.append(scalar.value())
        # they differ where the loss has a kink
        dlogprobs = sorted([(expected - values[0]) / h, (values[1] - expected) / h])
        assert dlogprobs[0] - 1e-4 <= grads[i][j] <= dlogprobs[1] + 1e-4, (
            f"{datums[i].where}, target {j}"
        )


# -- losses that a service computes ------------------------------------------------------------------------------


def service(
    name: str, config: dict[str, float], p: torch.Tensor, sent: dict[str, np.ndarray]
) -> torch.Tensor:
    "The loss of one datum as the services' documentation has it: every position counts, and there is no mask."
    series = {k: torch.tensor(v, dtype=torch.float64) for k, v in sent.items()}
    if name == "cross_entropy":
        return -(p * series["weights"]).sum()
    a = series["advantages"]
    o = series["logprobs"]
    cap = config.get("ratio_log_cap", math.inf)
    ratio = torch.exp(torch.clamp(p - o, -cap, cap))
    low = config.get("clip_low_threshold", 0.0)
    high = config.get("clip_high_threshold", math.inf)
    match name:
        case "importance_sampling":
            return -(ratio * a).sum()
        case "cispo":
            return -(torch.clamp(ratio, low, high).detach() * a * p).sum()
        case "dro":
            return -(p * a - config["beta"] / 2 * (p - o) ** 2 * (a != 0)).sum()
        case "gspo":
            trained = a != 0
            mean = (p - o).detach()[trained].mean() if trained.any() else torch.zeros(())
            ratio = (
                torch.exp(
                    torch.clamp(p - p.detach() + mean, max=config.get("seq_ratio_log_cap", 10.0))
                )
                * trained
            )
    objective = torch.minimum(ratio * a, torch.clamp(ratio, low, high) * a)
    if "eps_clip_c" in config:
        objective = torch.where(
            a < 0, torch.maximum(objective, config["eps_clip_c"] * a), objective
        )
    return -objective.sum()


@st.composite
def served_options(draw: st.DrawFn, where: str) -> LossOptions:
    "Any loss that this service can compute; no bound is a round number, so that rounding to float32 crosses none."
    name = draw(st.sampled_from(sorted(BUILTIN_LOSSES[where])))
    chosen: dict[str, Any] = {"policy_loss": name, "max_completion_tokens": 7}
    chosen["aggregation"] = "sum" if name == "dro" else draw(st.sampled_from(AGGREGATIONS))
    if name != "grpo":
        chosen["anchor"] = draw(st.sampled_from(["old", "rollout"]))
    if (level := draw(st.sampled_from(["off", "token", "sequence"]))) != "off":
        chosen |= {"tis": level, "tis_cap": draw(st.sampled_from([0.8, 5.0]))}
        drops = level == "token" and name not in ("gspo", "dro")
        if drops:
            chosen |= {"icepop_threshold": draw(st.sampled_from([None, 1.5]))}
    choices = {"eps_clip": [None, 0.1, 0.5], "eps_clip_high": [None, 0.3]}
    if where == "fireworks":
        choices |= {
            "ratio_log_cap": [None, 0.61234],
            "seq_ratio_log_cap": [None, 0.31234],
            "dro_beta": [None, 0.5],
        }
        if name in ("ppo", "dapo"):
            choices |= {"eps_clip_c": [None, 1.4]}
    read = POLICY_LOSSES[name][1]
    return LossOptions(
        **chosen, **{k: draw(st.sampled_from(v)) for k, v in choices.items() if k in read}
    )


def with_old(batch: Batch) -> Batch:
    "The batch with old logprobs: those of the sampler, a little lower, where there are none."
    datums, policy = batch
    old = [d.sampler_logprobs - 0.125 if d.old_logprobs is None else d.old_logprobs for d in datums]
    return [replace(d, old_logprobs=o) for d, o in zip(datums, old, strict=True)], policy


@EXAMPLES
@given(batches(), st.sampled_from(sorted(BUILTIN_LOSSES)), st.data())
def test_a_service_computes_the_same_value_and_gradient(
    batch: Batch, where: str, data: st.DataObject
) -> None:
    datums, policy = with_old(batch)
    options = data.draw(served_options(where))
    name, config = builtin_loss(options, where)
    p = [torch.tensor(np.where(np.isnan(x), -1.5, x), requires_grad=True) for x in policy]
    sent = builtin_inputs(datums, options)
    theirs = sum(
        (service(name, config, x, row) for x, row in zip(p, sent, strict=True)), torch.zeros(())
    )
    theirs.backward()
    ours, dlogprobs = evaluate(datums, policy, options)
    assert theirs.item() == pytest.approx(ours, rel=1e-5, abs=1e-5)
    for x, dlogprob in zip(p, dlogprobs, strict=True):
        np.testing.assert_allclose(x.grad.numpy(), dlogprob, rtol=1e-5, atol=1e-5)
    assert check_builtin(datums, options, [x.detach() for x in p], theirs.item()) < 1e-5


@EXAMPLES
@given(batches(), served_options("fireworks"), st.randoms(use_true_random=False))
def test_inputs_of_a_service_do_not_depend_on_order_or_split(
    batch: Batch, options: LossOptions, random: Any
) -> None:
    datums, _ = with_old(batch)
    whole = builtin_inputs(datums, options)
    assume(options.aggregation != "prompt_mean")  # which is split between prompts alone
    count = step_denominator(datums, options.aggregation)
    order = random.sample(range(len(datums)), len(datums))
    names = {"weights"} if options.policy_loss == "grpo" else {"logprobs", "advantages"}
    for i, alone in ((i, builtin_inputs([datums[i]], options, count)[0]) for i in order):
        assert set(alone) == set(whole[i]) == names
        for name, series in alone.items():
            np.testing.assert_array_equal(series, whole[i][name])


def one_datum(**changes: Any) -> Datum:
    series = {"sampler_logprobs": [np.nan, -1.0, -2.0], "old_logprobs": [np.nan, -1.2, -2.1]}
    return Datum(
        **{"tokens": [5, 6, 7, 8], "weights": [0, 1, 1], "advantage": 1.0, **series, **changes}
    )


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        ({}, {"old_logprobs": None}, "old_logprobs: got none"),
        ({}, {"old_logprobs": [0.0, np.nan, -1.0]}, "old_logprobs"),
        ({"anchor": "rollout"}, {"sampler_logprobs": None}, "sampler_logprobs: got none"),
        ({"tis": "token"}, {"sampler_logprobs": None}, "sampler_logprobs: got none"),
        ({"policy_loss": "grpo", "tis": "token"}, {"old_logprobs": None}, "old_logprobs: got none"),
        ({}, {"weights": [0, 0.5, 1]}, "weights: got 0.5"),
        ({"aggregation": "sum"}, {"advantage": 1e39}, "finite in float32"),
    ],
)
def test_inputs_that_a_service_cannot_take_are_rejected(
    settings: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        builtin_inputs([one_datum(**changes)], LossOptions(**{"policy_loss": "ppo", **settings}))
    assert message in str(caught.value)


def test_icepop_counts_what_it_leaves_out_and_not_what_a_cap_of_zero_does() -> None:
    policy = [torch.tensor([-1.0, -1.0, -2.0], requires_grad=True)]
    # ratios e^0.2 and e^2
    datum = one_datum(sampler_logprobs=[np.nan, -1.2, -4.0], old_logprobs=None)
    for cap in (0.0, 5.0):
        loss = make_loss_fn(
            [datum], policy_loss="ppo", tis="token", tis_cap=cap, icepop_threshold=2.0
        )
        assert loss([datum], policy)[1]["tis/icepop_frac"] == 0.5
