"What-if, reward lab and attribution: against formulas written out here, and against what trained steps recorded."

import asyncio
import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from synthetic import prompt_group, synthetic_record
from tiny_models import byte_tokenizer, tiny_model

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.config.config import Config, TISConfig
from rl_notebook.core.advantages import group_advantages, with_advantages
from rl_notebook.core.losses import make_loss_fn
from rl_notebook.core.types import (
    AdamParams,
    BackendError,
    Datum,
    Logprobs,
    LossError,
    LossOutput,
    RewardError,
)
from rl_notebook.experiments.whatif import (
    RECORDED,
    REPRODUCED,
    FrozenBatch,
    attribution,
    flat,
    reproduction_error,
    reward_lab,
    true_gradients,
    what_if,
)
from rl_notebook.insight.xray import sentence
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.runs.records import StepRecord
from rl_notebook.task.data import load_rows
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_format_reward, toy_reward, toy_rows


SMALL_RUN = {
    "prompt_groups_per_step": 3,
    "completions_per_prompt": 6,
    "max_completion_tokens": 16,
    "max_seq_len": 96,
    "learning_rate": 5e-4,
    "kl_beta": 0.05,
    "epochs": 1,
}
REWARDS = [toy_reward, toy_format_reward]


def open_loop(make_loss=None, **settings) -> GRPOLoop:
    "A loop over the toy task with the shipped model."
    cfg = Config(**SMALL_RUN | settings)
    backend = open_local(*load_model("tiny"), inline=True, lora_rank=cfg.lora_rank)
    return GRPOLoop(backend, load_rows(toy_rows(24, seed=3)), REWARDS, cfg, make_loss=make_loss)


def trained_record(steps: int = 2, make_loss=None, **settings) -> StepRecord:
    "The last record of a few really trained steps."

    async def run():
        loop = open_loop(make_loss, **settings)
        return [await loop.step() for _ in range(steps)][-1]

    return asyncio.run(run())


@pytest.fixture(scope="module")
def record() -> StepRecord:
    return trained_record()


def synthetic_batch_record() -> tuple[StepRecord, dict[str, np.ndarray]]:
    "A record with every series set apart from the others, and the same numbers end to end."
    length = 9
    rng = np.random.default_rng(0)
    datums = []
    policy = []
    active = []
    for i in range(6):
        w = (rng.random(length) < 0.7).astype(float)
        w[-1] = 1.0
        on = w > 0
        series = {
            k: np.where(on, -rng.exponential(0.6, length), np.nan)
            for k in ("sampler", "old", "ref")
        }
        fields = {f"{k}_logprobs": v for k, v in series.items()}
        a = float(rng.normal())
        datums.append(
            Datum(rng.integers(0, 50, length + 1), w, a, **fields, group=i // 3, sample=i % 3)
        )
        policy.append(np.where(on, series["old"] + rng.normal(0, 0.4, length), np.nan))
        active.append(on)

    def cat(arrays):
        return np.concatenate([np.asarray(x)[on] for x, on in zip(arrays, active, strict=True)])

    numbers = {
        k: cat([getattr(d, f"{k}_logprobs") for d in datums]) for k in ("sampler", "old", "ref")
    }
    numbers |= {"policy": cat(policy), "A": cat([np.full(length, d.advantage) for d in datums])}
    numbers["n"] = np.array([int(on.sum()) for on in active])
    loss = LossOutput(
        0.0, {}, tuple(map(Logprobs, policy)), tuple(np.zeros(length) for _ in datums)
    )
    return StepRecord(7, (), datums, loss, options={"policy_loss": "grpo"}), numbers


# --- what_if against formulas -------------------------------------------------------------------------------------


def test_ppo_with_kl_and_correction_is_the_formula():
    record, x = synthetic_batch_record()
    settings = {
        "policy_loss": "ppo",
        "eps_clip": 0.2,
        "kl_beta": 0.3,
        "tis": "token",
        "tis_cap": 1.5,
    }
    result = what_if(record, {"v": settings})
    r = np.exp(x["policy"] - x["old"])
    tis = np.minimum(np.exp(x["old"] - x["sampler"]), 1.5)
    stopped = ((r > 1.2) & (x["A"] > 0)) | ((r < 0.8) & (x["A"] < 0))
    surrogate = np.where(stopped, 0.0, -x["A"] * r * tis) / len(r)
    kl = 0.3 * (1 - np.exp(x["ref"] - x["policy"])) / len(r)
    g = surrogate + kl
    row = result.table.loc["v"]
    assert stopped.any()
    assert not stopped.all()
    np.testing.assert_allclose(
        flat(record.datums, result.dlogprobs["v"]), g, rtol=1e-12, atol=1e-15
    )
    mass = np.abs(g).sum()
    slope = -x["A"] / len(r)
    expected = {
        "dlogprob_norm": np.sqrt((g**2).sum()),
        "clipped": stopped.mean(),
        "positive": np.abs(g)[x["A"] > 0].sum() / mass,
        "negative": np.abs(g)[x["A"] < 0].sum() / mass,
        "kl": np.abs(kl).sum() / (np.abs(kl).sum() + np.abs(surrogate).sum()),
        "cosine": g @ slope / np.sqrt((g @ g) * (slope @ slope)),
    }
    np.testing.assert_allclose([row[k] for k in expected], list(expected.values()), rtol=1e-10)
    k3 = np.exp(x["ref"] - x["policy"]) - (x["ref"] - x["policy"]) - 1
    value = np.maximum(-r * x["A"], -np.clip(r, 0.8, 1.2) * x["A"]) * tis + 0.3 * k3
    assert row["loss"] == pytest.approx(value.mean(), rel=1e-12)


ADVANTAGES = {
    "loo": (
        {"advantage_scale": "loo"},
        lambda r, everything: (r - r.mean()) * len(r) / (len(r) - 1),
    ),
    "none": ({"advantage_scale": "none"}, lambda r, everything: r - r.mean()),
    "population": ({"ddof": 0}, lambda r, everything: (r - r.mean()) / (r.std() + 1e-8)),
    "batch": (
        {"advantage_scale": "batch"},
        lambda r, everything: (r - r.mean()) / (everything.std(ddof=1) + 1e-8),
    ),
}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantage_variants_use_the_rewards_of_all_groups(name):
    record = synthetic_record(20, seed=4)
    (changes, formula) = ADVANTAGES[name]
    everything = np.concatenate([g.rewards for g in record.groups])
    wanted = {g.index: formula(g.rewards, everything) for g in record.groups}
    n = sum(d.num_loss_tokens for d in record.datums)
    want = np.concatenate(
        [np.full(d.num_loss_tokens, -wanted[d.group][d.sample] / n) for d in record.datums]
    )
    got = what_if(record, {"v": {**changes, "kl_beta": 0.0}}).dlogprobs["v"]
    np.testing.assert_allclose(flat(record.datums, got), want, rtol=1e-9, atol=1e-18)


# --- what_if against really trained steps -------------------------------------------------------------------------

TRAINED = {
    "grpo": {},
    "ppo, tis, in parts": {
        "policy_loss": "ppo",
        "tis_enabled": True,
        "tis": TISConfig(cap=2.0),
        "max_samples_per_fwd_bwd": 5,
    },
    "gspo by sequence": {
        "policy_loss": "gspo",
        "aggregation": "sequence_mean",
        "tis_enabled": True,
        "tis": TISConfig(level="sequence"),
    },
    "dr. grpo": {"aggregation": "constant", "advantage_scale": "none"},
    "as groups arrive": {"min_samples_per_fwd_bwd": 6, "aggregation": "sample_mean"},
    "k1, no kl term": {"kl_beta": 0.0, "kl_metric": True, "kl_estimator": "k1"},
    "several updates": {
        "policy_loss": "cispo",
        "aggregation": "sum",
        "max_samples_per_fwd_bwd": 4,
        "ppo_n_minibatches": 2,
    },
    "several updates, tis": {"policy_loss": "ppo", "tis_enabled": True, "ppo_n_minibatches": 3},
}


@functools.cache
def cached_trained_record(name: str) -> StepRecord:
    "The record of a trained step, made once."
    return trained_record(**TRAINED[name])


@pytest.mark.parametrize("name", TRAINED)
def test_the_recorded_loss_and_gradient_come_out_again(name):
    record = cached_trained_record(name)
    result = what_if(record, {})
    output = result.outputs[RECORDED]
    assert output.loss == pytest.approx(record.loss.loss, rel=1e-4, abs=1e-6)
    assert reproduction_error(result.batch, output) < REPRODUCED
    assert "NOT" not in result.headline
    assert (len(record.updates) > 1) == ("updates" in name)
    assert "cause is not known" not in sentence(record)
    for ours, theirs in zip(output.dlogprobs, record.loss.dlogprobs, strict=True):
        np.testing.assert_allclose(
            ours, theirs, atol=1e-4 * max(np.abs(g).max() for g in record.loss.dlogprobs)
        )


def test_a_record_that_lies_is_noticed():
    assert "NOT reproduced" in what_if(synthetic_record(20), {}).headline


def test_a_custom_loss_is_compared_by_its_recorded_gradient():
    def mine(datums, denominator):
        return make_loss_fn(datums, policy_loss="grpo", aggregation="sum")

    record = trained_record(1, make_loss=mine, kl_beta=0.0)
    result = what_if(record, {"sum": {"aggregation": "sum"}, "mean": {}})
    assert result.table.note["sum"] == "same gradient as recorded"
    assert result.table.cosine["mean"] == pytest.approx(1, abs=1e-6)
    with pytest.raises(LossError, match="custom loss"):
        what_if(record, {}, policy_logprobs=record.loss.logprobs)


# --- reward lab ---------------------------------------------------------------------------------------------------


def length_reward(text: str) -> float:
    return -float(len(text))


@pytest.mark.parametrize("settings", [{}, {"advantage_scale": "none"}])
def test_another_reward_is_compared_by_the_steps_own_rule(settings):
    record = trained_record(1, **settings)
    lab = reward_lab(record, length_reward)
    for g in record.groups:
        r = np.array([-float(len(s.text)) for s in g.samples])
        want = group_advantages(r, scale=settings.get("advantage_scale", "std"))
        rows = lab.samples[lab.samples.group == g.index]
        np.testing.assert_allclose(rows.new_advantage, want)
        swapped = sum(
            (g.rewards[i] - g.rewards[j]) * (r[i] - r[j]) < 0
            for i in range(len(r))
            for j in range(i)
        )
        assert lab.groups.set_index("group").swapped_pairs[g.index] == swapped
    flips = (np.sign(lab.samples.advantage) * np.sign(lab.samples.new_advantage) < 0).sum()
    assert lab.summary["sign_flips"] == flips


def test_two_graders_on_the_same_completions(record):
    "With a step and without one; pairs counted one by one."
    texts = ["", "a", "bb", "bbb", "cccc", "cc"]
    rows = [({"question": f"q{i}", "answer": "b"}, texts[i:]) for i in range(3)]

    def count(text, answer):
        return None if text == "" else float(text.count(answer))

    lab = reward_lab(rows, length_reward, against=count)
    assert lab.samples.groupby("row", sort=False).size().tolist() == [5, 5, 4], (
        "what has no reward is left out"
    )
    lists = [zip(t.reward, t.new_reward, strict=True) for _, t in lab.samples.groupby("row")]
    pairs = [
        (np.sign(a - c), np.sign(b - d))
        for t in lists
        for (a, b), (c, d) in itertools.combinations(t, 2)
    ]
    before, now = np.transpose(pairs)
    tau = (before * now).sum() / np.sqrt((before != 0).sum() * (now != 0).sum())
    assert lab.summary["rank_correlation"] == pytest.approx(tau)
    assert len(lab.disagreements) == (lab.samples.reward != lab.samples.new_reward).sum()
    one = reward_lab(record, length_reward)
    two = reward_lab(record, REWARDS, against=length_reward)
    np.testing.assert_allclose(two.samples.new_advantage, one.samples.advantage)
    assert reward_lab(record, REWARDS, against=REWARDS).disagreements.empty
    with pytest.raises(RewardError, match="two graders"):
        reward_lab(rows, length_reward)


def test_groups_gain_and_lose_their_signal():
    rng = np.random.default_rng(1)
    equal_rewards = prompt_group(rng, 0, 1.0, 4)
    equal_rewards = replace(
        equal_rewards, samples=tuple(replace(s, reward=1.0) for s in equal_rewards.samples)
    )
    unequal_rewards = prompt_group(rng, 1, 0.5, 4)
    unequal_rewards = replace(
        unequal_rewards,
        samples=tuple(
            replace(s, reward=float(i), text="x" * 3) for i, s in enumerate(unequal_rewards.samples)
        ),
    )
    equal_rewards = replace(
        equal_rewards,
        samples=tuple(replace(s, text="x" * i) for i, s in enumerate(equal_rewards.samples)),
    )
    record = StepRecord(1, with_advantages([equal_rewards, unequal_rewards]))
    lab = reward_lab(record, length_reward)
    assert list(lab.groups.signal) == ["gained", "lost"]
    assert (lab.summary["no_signal_before"], lab.summary["no_signal_after"]) == (0.5, 0.5)
    assert lab.samples.sign.tolist()[:4] == ["0 → +", "0 → +", "0 → −", "0 → −"]


def test_unscorable_completions_leave_their_group(record):
    lab = reward_lab(record, lambda text: None if "####" not in text else float(len(text)))
    gone = ["####" not in s.text for g in record.groups for s in g.samples]
    assert any(gone)
    assert lab.samples.new_reward.isna().tolist() == gone
    assert lab.samples.new_advantage.isna().tolist() == gone
    assert lab.summary["unscorable"] == sum(gone)
    everything = reward_lab(record, lambda text: None)
    assert everything.summary["unscorable"] == len(gone)
    assert everything.summary["no_signal_after"] == 1.0


def test_a_misbehaving_reward_is_named(record):
    with pytest.raises(RewardError, match=r"group 0, sample 0 .*ZeroDivisionError"):
        reward_lab(record, lambda text: 1 / 0)
    with pytest.raises(RewardError, match="weights"):
        reward_lab(record, REWARDS, weights=[1.0])
    odd = [replace(g, advantages=np.arange(len(g.samples)) - 7.0) for g in record.groups]
    with pytest.raises(RewardError, match="no known rule"):
        reward_lab(replace(record, groups=odd), length_reward)
    assert (
        len(reward_lab(replace(record, groups=odd), length_reward, advantage_scale="none").groups)
        == 3
    )


# --- attribution --------------------------------------------------------------------------------------------------


def test_each_token_is_at_its_place(record):
    a = attribution(record)
    batch = FrozenBatch.of(record)
    assert len(a.by_token) == sum(d.num_loss_tokens for d in record.datums)
    for row in a.top_tokens(20).itertuples():
        d = batch.datums[row.datum]
        assert (d.group, d.sample) == (row.group, row.sample)
        assert d.tokens[row.target + 1] == row.token
        assert record.loss.dlogprobs[row.datum][row.target] == row.dlogprob
    assert a.top_tokens(5).mass.is_monotonic_decreasing


# --- bad input ----------------------------------------------------------------------------------------------------


def test_a_series_that_the_record_lacks_is_named(record):
    bare = [replace(d, sampler_logprobs=None, ref_logprobs=None) for d in record.datums]
    without = replace(record, datums=bare, options={"policy_loss": "grpo"})
    assert len(what_if(without, {"ppo": {"policy_loss": "ppo"}}).table) == 2
    for changes, reader in (
        ({"tis": "token"}, "tis='token'"),
        ({"policy_loss": "reinforce"}, "policy_loss='reinforce'"),
        ({"policy_loss": "ppo", "anchor": "rollout"}, "anchor='rollout'"),
        ({"kl_beta": 0.1}, "kl_beta=0.1"),
    ):
        with pytest.raises(
            LossError, match=f"variant 'x'.*{reader}.*{len(bare)} of {len(bare)} datums without"
        ):
            what_if(without, {"x": changes})
    with pytest.raises(LossError, match="without rewards"):
        what_if(replace(record, groups=()), {"x": {"advantage_scale": "none"}})
    with pytest.raises(LossError, match="'recorded'"):
        what_if(record, {RECORDED: {}})


# --- what the weights make of it ----------------------------------------------------------------------------------

KINDS = {
    "tied llama": {"family": "llama", "tied": True},
    "gpt2": {"family": "gpt2"},
    "lora": {"lora_rank": 4},
    "bfloat16": {"dtype": "bfloat16"},
    "small batches": {"tokens_per_batch": 30},
}


def tiny_backend(family: str = "qwen3", tied: bool = False, **options):
    "A random model on the local backend."
    return open_local(tiny_model(family, tied=tied), byte_tokenizer(), inline=True, **options)


def random_datums(seed: int, count: int = 5) -> tuple[list[Datum], list[np.ndarray]]:
    "Sequences of several lengths with derivatives, one of them all zero, one of them masked."
    rng = np.random.default_rng(seed)
    datums = []
    dlogprobs = []
    for i in range(count):
        n = int(rng.integers(4, 24))
        w = (rng.random(n - 1) < 0.7).astype(float) * (i != 3)
        datums.append(Datum(rng.integers(0, 200, n), w, advantage=1.0, sample=i))
        dlogprobs.append(np.where(w > 0, rng.normal(size=n - 1), 0.0) * (i != 2))
    return datums, dlogprobs


def trainer_state(state) -> dict[str, torch.Tensor]:
    "A copy of all that a trainer holds: weights, masters, moments, accumulated gradients and their counts."
    held = {f"weight/{n}": p for n, p in state.params.items()} | {
        f"master/{n}": m for n, m in state.masters.items()
    }
    grads = {f"grad/{n}": t.grad for n, t in held.items() if t.grad is not None}
    moments = state.optimizer.state.values() if state.optimizer else ()
    moved = {f"adam/{i}/{k}": v for i, m in enumerate(moments) for k, v in m.items()}
    counts = {"counts": torch.tensor([state.loss_tokens, state.sequences, state.steps])}
    return {n: t.detach().clone() for n, t in (held | grads | moved | counts).items()}


async def look_at_gradients(policy, start: str, datums, dlogprobs) -> None:
    "Everything that must leave no trace, mistakes included; raises if it leaves one."
    before = trainer_state(policy.state)
    graph = policy.state.graph
    await policy.sample_gradients(datums, dlogprobs)
    await policy.sample_gradients(datums, dlogprobs, start)
    for at in (None, start):
        with pytest.raises(LossError):
            await policy.sample_gradients(datums, dlogprobs[1:], at)
    after = trainer_state(policy.state)
    assert before.keys() == after.keys()
    assert any(n.startswith("grad/") for n in before)
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert policy.state.graph is graph is not None


@pytest.mark.parametrize("kind", KINDS)
def test_looking_at_gradients_leaves_no_trace(kind):
    async def steps(look: bool):
        policy = tiny_backend(**KINDS[kind]).policy
        (datums, dlogprobs) = random_datums(0)
        others = [replace(d, weights=d.weights) for d in datums]
        pushes = [2 * s for s in dlogprobs]

        def loss(ds, lps):
            return (
                sum(lp[torch.tensor(d.active)].sum() for d, lp in zip(ds, lps, strict=True)),
                {},
            )

        start = await policy.save_state("start")
        await policy.backward(datums, dlogprobs)
        await policy.optim_step(AdamParams(learning_rate=1e-3))
        await policy.backward(datums, dlogprobs)
        await policy.forward_backward_custom(others, loss)
        short = others[:2]
        await policy.loss(short, loss)  # its graph is kept, for the backward pass below
        if look and kind != "small batches":
            await look_at_gradients(policy, start, others, pushes)
        elif look:
            await policy.sample_gradients(others, pushes, start)
        await policy.backward(short, dlogprobs[:2])
        await policy.optim_step(AdamParams(learning_rate=1e-3))
        return trainer_state(policy.state)

    observed = asyncio.run(steps(True))
    unseen = asyncio.run(steps(False))
    assert observed.keys() == unseen.keys()
    assert all(torch.equal(observed[n], unseen[n]) for n in observed)


def by_hand(module: torch.nn.Module, datum: Datum, dlogprob: np.ndarray) -> torch.Tensor:
    "The gradient of sum(dlogprob * logprob) through the model's own logits, as one long vector."
    params = [p for p in module.parameters() if p.requires_grad]
    ids = torch.from_numpy(datum.tokens.copy())
    logprobs = module(ids[None]).logits[0, :-1].log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
    grads = torch.autograd.grad(
        (logprobs * torch.from_numpy(dlogprob)).sum(), params, allow_unused=True
    )
    parts = zip(grads, params, strict=True)
    return torch.cat(
        [torch.zeros_like(p).flatten() if g is None else g.flatten() for g, p in parts]
    )


@pytest.mark.parametrize("options", [{"family": "llama", "tied": True}, {"lora_rank": 4}])
def test_norms_and_products_are_those_of_autograd(options):
    backend = tiny_backend(dtype="float64", **options)
    datums, dlogprobs = random_datums(2)
    gradients = torch.stack(
        [by_hand(backend.policy.state.module, d, s) for d, s in zip(datums, dlogprobs, strict=True)]
    )
    logprobs, norms, products = asyncio.run(backend.policy.sample_gradients(datums, dlogprobs))
    np.testing.assert_allclose(norms, gradients.norm(dim=1).numpy(), rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(
        products, (gradients @ gradients.sum(0)).numpy(), rtol=1e-5, atol=1e-6
    )
    assert norms[2] == norms[3] == 0
    for lp, again in zip(logprobs, asyncio.run(backend.policy.forward(datums)), strict=True):
        np.testing.assert_array_equal(lp.values, again.values)


@pytest.fixture(scope="module")
def stepped() -> tuple[GRPOLoop, StepRecord, str]:
    "A loop after two steps, the record of the second, and the state before it."

    async def run():
        loop = open_loop()
        await loop.step()
        before = await loop.backend.policy.save_state("before")
        return loop, await loop.step(), before

    return asyncio.run(run())


def test_attribution_with_true_gradients(stepped):
    loop, record, before = stepped
    policy = loop.backend.policy
    a = asyncio.run(true_gradients(policy, record, before))
    assert a.by_sample.contribution.sum() == pytest.approx(1)
    assert a.by_group.contribution.sum() == pytest.approx(1)
    first = a.by_sample[a.by_sample.group == a.by_group.group[0]].contribution.sum()
    assert a.by_group.contribution[0] == pytest.approx(first)
    _, norms, products = asyncio.run(
        policy.sample_gradients(record.datums, record.loss.dlogprobs, before)
    )
    assert products.sum() ** 0.5 == pytest.approx(record.metrics["grad_norm"], rel=1e-5)
    np.testing.assert_allclose(a.by_sample.grad_norm, norms[a.by_sample.datum])
    np.testing.assert_allclose(
        a.by_sample.cosine, (products / norms)[a.by_sample.datum] / products.sum() ** 0.5
    )


# --- several updates a step ---------------------------------------------------------------------------------------


def test_true_gradients_of_several_updates_are_rejected():
    async def run():
        loop = open_loop(ppo_n_minibatches=2, policy_loss="ppo", learning_rate=5e-6)
        before = await loop.backend.policy.save_state("before")
        record = await loop.step()
        with pytest.raises(LossError, match="2 updates, each from other weights"):
            await true_gradients(loop.backend.policy, record, before)

    asyncio.run(run())


def test_true_gradients_at_other_weights_are_rejected(stepped):
    loop, record, _ = stepped
    with pytest.raises(BackendError, match="weights are not those of the step"):
        asyncio.run(true_gradients(loop.backend.policy, record))
