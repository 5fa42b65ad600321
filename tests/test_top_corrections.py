"Score centering and the kept sampling mask: other trainers' numbers, exact expectations, and steps of a real model."

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import one_thread

import rl_notebook as rln
from rl_notebook.core.losses import LossOptions, make_loss_fn, reads_top
from rl_notebook.core.types import ConfigError, Datum, LossError, TopLogprobs

__all__ = ["one_thread"]

CASES = json.loads((Path(__file__).parent / "golden/corrections/cases.json").read_text())
WEIGHTS = {
    "none": {},
    "tis": {"tis": "token", "tis_cap": 2.0, "tis_anchor": "policy"},
    "mis": {
        "tis": "token",
        "tis_cap": 2.0,
        "tis_floor": 0.5,
        "tis_mode": "mask",
        "tis_anchor": "policy",
    },
}


def datum_of(case) -> Datum:
    "The tokens of a case as one sequence."
    ids = np.array(case["ids"])
    values = np.where(ids < 0, np.nan, np.array(case["sampler"]))
    sampled = [
        values[i, list(row).index(t)] if t in row else -9.0
        for i, (row, t) in enumerate(zip(ids, case["tokens"], strict=True))
    ]
    top = TopLogprobs(ids, values, np.ones(len(ids), bool))
    series = {"advantage": np.array(case["advantages"]), "sampler_logprobs": np.array(sampled)}
    return Datum([0, *case["tokens"]], np.ones(len(ids)), **series, top_logprobs=top)


def loss_gradient(case, **options):  # (T, V)
    "Gradient by the logits of the summed loss of a case."
    datum = datum_of(case)
    logits = torch.tensor(case["logits"], dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(-1)
    loss_fn = make_loss_fn([datum], aggregation="sum", **options)
    top = logprobs.gather(-1, torch.tensor(case["ids"]).clamp(min=0))
    sampled = logprobs.gather(-1, torch.tensor(case["tokens"])[:, None])[:, 0]
    more = {"top_policy_logprobs": [top]} if reads_top(loss_fn) else {}
    loss_fn([datum], [sampled], **more)[0].backward()
    return logits.grad.numpy()


@pytest.mark.parametrize("mode", WEIGHTS)
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)).__contains__)
def test_score_centering_is_that_of_vime(case, mode):
    options = WEIGHTS[mode]
    difference = loss_gradient(case["whole"], score_centering=True, **options)
    difference = difference - loss_gradient(case["whole"], **options)
    want = np.array(case["vime"][mode]["gradient"]) * np.array(case["whole"]["advantages"])[:, None]
    assert np.abs(difference - want).max() < 2e-6
    assert mode == "tis" or np.abs(want).max() > 0.01  # without a capped weight the mean is 0


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)).__contains__)
def test_the_kept_mask_is_that_of_slime_and_prime_rl(case):
    got = loss_gradient(case["cut"], keep_sampling_mask=True)
    for name in ("slime", "prime-rl"):
        assert np.abs(got + np.array(case["kept"][name]["gradient"])).max() < 2e-6
    whole = loss_gradient(case["cut"])
    assert np.abs(got - whole).max() > 0.01


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)).__contains__)
def test_a_token_named_without_probability_is_not_kept(case):
    cut = case["cut"]
    missing = np.array(cut["ids"]) < 0
    assert missing.any()
    sampler = np.where(missing, -np.inf, cut["sampler"])
    named = {**cut, "ids": np.maximum(cut["ids"], 0), "sampler": sampler}
    assert np.array_equal(
        loss_gradient(named, keep_sampling_mask=True), loss_gradient(cut, keep_sampling_mask=True)
    )


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)).__contains__)
def test_both_together_are_prime_rls_centering(case):
    options = {"keep_sampling_mask": True, **WEIGHTS["tis"]}
    difference = loss_gradient(case["cut"], score_centering=True, **options)
    difference = difference - loss_gradient(case["cut"], **options)
    assert np.abs(difference - np.array(case["centered on kept"]["gradient"])).max() < 2e-6


# Exact expectations -----------------------------------------------------------------------------------------------


def expected_gradient(logits, sampler, advantages, head, **options):
    "Sum over the vocabulary of probability under the sampler times gradient by the logits (V,)."
    order = np.argsort(-sampler)[:head]
    order = order[np.isfinite(sampler[order])]
    total = np.zeros(len(logits))
    for token in np.flatnonzero(np.isfinite(sampler)):
        case = {
            "logits": [logits.tolist()],
            "ids": [order.tolist()],
            "sampler": [sampler[order].tolist()],
            "tokens": [int(token)],
            "advantages": [float(advantages[token])],
        }
        datum = datum_of(case)
        datum = replace(datum, sampler_logprobs=np.array([sampler[token]]))
        leaf = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
        logprobs = leaf.log_softmax(-1)
        loss_fn = make_loss_fn([datum], aggregation="sum", **options)
        more = (
            {"top_policy_logprobs": [logprobs[order.tolist()][None]]} if reads_top(loss_fn) else {}
        )
        loss_fn([datum], [logprobs[token][None]], **more)[0].backward()
        total += np.exp(sampler[token]) * leaf.grad.numpy()
    return total


def log_softmax(x):
    return x - np.log(np.exp(x).sum())


@pytest.mark.parametrize("seed", range(4))
def test_a_centred_score_has_mean_zero_under_the_sampler(seed):
    rng = np.random.default_rng(seed)
    logits = 2 * rng.standard_normal(7)
    sampler = log_softmax(logits + rng.standard_normal(7))
    constant = np.ones(7)
    for options in WEIGHTS.values():
        drift = expected_gradient(logits, sampler, constant, 7, **options)
        centred = expected_gradient(logits, sampler, constant, 7, score_centering=True, **options)
        assert np.abs(drift).max() > 1e-3 or options  # uncapped weights have no drift
        assert np.abs(centred).max() < 1e-6
    parts = [
        expected_gradient(logits, sampler, constant, k, score_centering=True) for k in (1, 3, 6)
    ]
    sizes = [np.abs(part).max() for part in parts]
    assert sizes[2] < 0.2 * np.abs(expected_gradient(logits, sampler, constant, 7)).max()


@pytest.mark.parametrize("seed", range(4))
def test_on_kept_tokens_the_gradient_is_that_of_the_samplers_reward(seed):
    rng = np.random.default_rng(seed)
    logits = 2 * rng.standard_normal(7)
    rewards = rng.standard_normal(7)
    keep = np.argsort(-logits)[:2]
    cut = np.full(7, -np.inf)
    cut[keep] = logits[keep]
    sampler = log_softmax(cut)
    leaf = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    (leaf[keep.tolist()].softmax(-1) @ torch.tensor(rewards[keep])).backward()
    for options in ({}, {"policy_loss": "ppo"}, {"policy_loss": "ppo", "anchor": "rollout"}):
        got = expected_gradient(logits, sampler, rewards, 7, keep_sampling_mask=True, **options)
        assert np.abs(-got - leaf.grad.numpy()).max() < 1e-6
        whole = expected_gradient(logits, sampler, rewards, 7, **options)
        assert np.abs(-whole - leaf.grad.numpy()).max() > 1e-3


# Settings ---------------------------------------------------------------------------------------------------------


def test_what_is_missing_is_said():
    with pytest.raises(
        LossError, match="score_centering: got True; expected False: policy_loss='ppo'"
    ):
        LossOptions(score_centering=True, policy_loss="ppo")
    with pytest.raises(LossError, match="expected tis='token' or 'off' with it"):
        LossOptions(score_centering=True, tis="sequence")
    with pytest.raises(ConfigError, match="score_centering: the sampler reports no other tokens"):
        rln.Config(score_centering=True)
    with pytest.raises(ConfigError, match="keep_sampling_mask: nothing is cut off"):
        rln.Config(keep_sampling_mask=True, top_logprobs=5)
    with pytest.raises(
        ConfigError, match="keep_sampling_mask: backend='tinker' scores sampled tokens alone"
    ):
        rln.Config(keep_sampling_mask=True, top_logprobs=5, top_k=5, backend="tinker", lora_rank=4)
    datum = datum_of(CASES[0]["whole"])
    with pytest.raises(LossError, match="of the sampler's distribution at target"):
        make_loss_fn([datum], keep_sampling_mask=True)
    with pytest.raises(LossError, match="top_logprobs: got none"):
        make_loss_fn([replace(datum, top_logprobs=None)], score_centering=True)
    raw = replace(datum, top_logprobs=replace(datum.top_logprobs, distribution="raw"))
    with pytest.raises(LossError, match="a distribution that is raw"):
        make_loss_fn([raw], score_centering=True)
    old = replace(datum_of(CASES[0]["cut"]), old_logprobs=np.full(9, -1.0))
    with pytest.raises(LossError, match="keep_sampling_mask: got old_logprobs"):
        make_loss_fn([old], keep_sampling_mask=True)
    loss_fn = make_loss_fn([datum], score_centering=True)
    with pytest.raises(LossError, match="likeliest tokens: got none"):
        loss_fn([datum], [torch.zeros(9)])


# A real model -----------------------------------------------------------------------------------------------------


async def one_step(**settings):
    cfg = rln.Config(completions_per_prompt=4, max_completion_tokens=6, kl_beta=0, **settings)
    async with rln.open_local("tiny", reference=False) as backend:
        rewards = [lambda completion: float(sum(map(ord, str(completion))) % 3)]
        loop = rln.GRPOLoop(backend, rln.toy_rows(2), rewards, cfg)
        return await loop.step()


def test_a_step_on_kept_tokens_has_a_ratio_of_one():
    cut = {"top_p": 0.7, "top_logprobs": 64, "policy_loss": "ppo", "anchor": "rollout"}
    whole = asyncio.run(one_step(**cut))
    kept = asyncio.run(one_step(**cut, keep_sampling_mask=True))
    assert whole.metrics["sampling/sampling_logp_difference/max"] > 0.05
    assert kept.metrics["sampling/sampling_logp_difference/max"] < 1e-4
    assert abs(kept.metrics["ratio/mean"] - 1) < 1e-4
    assert abs(whole.metrics["ratio/mean"] - 1) > 1e-3


def test_the_gradient_of_the_model_is_that_of_its_logits():
    "Weights change as they do when the same loss is written on the whole logits of transformers."
    model, tokenizer = rln.load_model("tiny")
    cfg = rln.Config(
        completions_per_prompt=4,
        max_completion_tokens=5,
        kl_beta=0,
        temperature=1.0,
        top_logprobs=8,
        score_centering=True,
    )

    async def gradient():
        async with rln.open_local(model, tokenizer, reference=False, inline=True) as backend:
            rewards = [lambda completion: float(sum(map(ord, str(completion))) % 3)]
            loop = rln.GRPOLoop(backend, rln.toy_rows(2), rewards, cfg)
            for phase in (loop.prompts, loop.sample, loop.score, loop.advantages):
                await phase()
            datums = await loop.datums()
            datums = list(getattr(datums, "value", datums))
            loss_fn = make_loss_fn(datums, score_centering=True)
            await backend.policy.forward_backward_custom(datums, loss_fn)
            ours = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            model.zero_grad()
            terms, count = 0.0, 0
            for d in datums:
                logprobs = (
                    model(torch.tensor(d.input_tokens.copy())[None])
                    .logits[0]
                    .double()
                    .log_softmax(-1)
                )
                for t in np.flatnonzero(d.active):
                    pairs = d.top_logprobs[t]
                    ids = [token for token, _ in pairs]
                    q = torch.tensor([value for _, value in pairs], dtype=torch.float64).exp()
                    p = logprobs[t, ids].detach().exp()
                    tail = (1 - q.sum()).clamp(min=1e-6) / (1 - p.sum()).clamp(min=1e-6)
                    score = (
                        logprobs[t, d.target_tokens[t]] - ((q - tail * p) * logprobs[t, ids]).sum()
                    )
                    terms = terms - d.advantage * score
                    count += 1
            (terms / count).backward()
            theirs = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            return ours, theirs

    ours, theirs = asyncio.run(gradient())
    assert ours.keys() == theirs.keys()
    size = max(float(g.abs().max()) for g in theirs.values())
    assert size > 1e-4
    for name, g in theirs.items():
        assert float((ours[name] - g).abs().max()) < 1e-4 * size, name
