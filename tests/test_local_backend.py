"The local backend: exact gradients, exact states, a reference that stays, a sampler that serves the last sync."

import asyncio
import copy
import errno
import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_models import byte_tokenizer, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

import rl_notebook.backends.local.trainer as local_module
from rl_notebook.backends.local.engine import plan_batches
from rl_notebook.backends.local.trainer import open_local
from rl_notebook.core.types import (
    AdamParams,
    BackendError,
    ConfigError,
    Datum,
    LossError,
    MissingExtra,
    RecordError,
    SampleParams,
)


ADAM = AdamParams(learning_rate=1e-2)


def backend_of(family: str = "qwen3", model: dict | None = None, **options):
    options = {"inline": True, **options}
    return open_local(tiny_model(family, **(model or {})), byte_tokenizer(), **options)


def random_datums(seed: int, count: int) -> list[Datum]:
    rng = np.random.default_rng(seed)
    datums = []
    for i in range(count):
        n = int(rng.integers(2, 24))
        weights = (rng.random(n - 1) < 0.6).astype(float)
        datums.append(
            Datum(rng.integers(0, 200, n), weights, advantage=float(rng.normal()), sample=i)
        )
    return datums


def mixing_loss(datums, policy_logprobs):
    "A loss whose datums depend on each other: a ratio of sums, squared."
    scored = [lp[torch.tensor(d.active)] for d, lp in zip(datums, policy_logprobs, strict=True)]
    top = sum(d.advantage * s.sum() for d, s in zip(datums, scored, strict=True))
    bottom = 1 + sum((s**2).sum() for s in scored)
    return (top / bottom) ** 2 + top, {}


def gradients(backend) -> dict[str, torch.Tensor]:
    return {
        name: p.grad.clone()
        for name, p in backend.policy.state.params.items()
        if p.grad is not None
    }


def run(coroutine):
    return asyncio.run(coroutine)


# Gradients ------------------------------------------------------------------------------------------------------


def distributions(backend, datums) -> list[torch.Tensor]:
    "Logprobs (N-1, V) of each datum, sequence by sequence through the model's own logits, all of them."
    module = backend.policy.state.module
    temperature = backend.policy.state.scoring.temperature
    rows = [torch.from_numpy(d.input_tokens.copy())[None] for d in datums]
    return [(module(input_ids=row).logits[0] / temperature).log_softmax(-1) for row in rows]


def naive_gradients(backend, datums, loss_fn) -> dict[str, torch.Tensor]:
    "By plain autograd."
    wholes = zip(distributions(backend, datums), datums, strict=True)
    series = [
        lp[torch.arange(len(d.weights)), torch.from_numpy(d.target_tokens.copy())]
        for lp, d in wholes
    ]
    params = backend.policy.state.params
    grads = torch.autograd.grad(
        loss_fn(datums, series)[0], list(params.values()), allow_unused=True
    )
    return {name: g for name, g in zip(params, grads, strict=True) if g is not None}


@settings(max_examples=8)
@example(seed=741, count=7, tokens=10**6, family="qwen3", tied=False, lora=0, temperature=1.0)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 7),
    tokens=st.sampled_from([8, 40, 10**6]),
    family=st.sampled_from(["qwen3", "llama", "gpt2"]),
    tied=st.booleans(),
    lora=st.sampled_from([0, 3]),
    temperature=st.sampled_from([1.0, 0.7]),
)
def test_gradient_and_entropy_are_exact_however_they_are_batched(
    seed, count, tokens, family, tied, lora, temperature
):
    "float64: split into batches, padded, sorted and chunked, they are the naive ones to 1e-10; see `tolerance`."
    lora = 0 if family == "gpt2" else lora
    shape = {"tied": tied, "seed": seed % 100}
    options = {"lora_rank": lora, "temperature": temperature, "reference": False}
    backend = backend_of(family, shape, dtype="float64", tokens_per_batch=tokens, **options)
    if lora:
        torch.manual_seed(seed)
        with torch.no_grad():
            for p in backend.policy.state.params.values():
                p.normal_(std=0.1)
    datums = random_datums(seed, count)
    trained = run(backend.policy.forward_backward_custom(datums, mixing_loss)).logprobs
    got = gradients(backend)
    want = naive_gradients(backend, datums, mixing_loss)
    assert got.keys() == want.keys()
    trees = any(batch.tree for batch in backend.policy.state.scoring.batches(datums))
    # Attention over a tree adds in another order, and these norms round to float32 even in a float64 model.
    tolerance = 1e-6 if trees and family != "gpt2" else 1e-10
    scale = max(float(g.abs().max()) for g in want.values()) or 1.0
    for name, g in want.items():
        assert float((got[name] - g).abs().max()) <= tolerance * max(1.0, scale), name
    for scored in (trained, run(backend.policy.forward(datums))):
        for lp, d, whole in zip(scored, datums, distributions(backend, datums), strict=True):
            entropy = -(whole.exp() * whole).sum(-1).detach().numpy()
            assert np.allclose(
                lp.entropy, np.where(d.active, entropy, np.nan), atol=tolerance, equal_nan=True
            )


def test_loss_then_backward_is_forward_backward():
    datums = random_datums(5, 5)
    for tokens in (20, 10**6):
        one, two = (backend_of(tokens_per_batch=tokens, reference=False) for _ in range(2))
        whole = run(one.policy.forward_backward_custom(datums, mixing_loss))
        looked = run(two.policy.loss(datums, mixing_loss))
        assert gradients(two) == {}
        with pytest.raises(BackendError, match="no accumulated gradient"):
            run(two.policy.optim_step(ADAM))
        looked = run(two.policy.loss(datums, mixing_loss))
        run(two.policy.backward(datums, looked.dlogprobs))
        assert looked.loss == whole.loss
        for name, g in gradients(one).items():
            assert torch.allclose(g, gradients(two)[name], rtol=1e-5, atol=1e-7)


def test_edited_dlogprobs_are_checked():
    backend = backend_of(reference=False)
    datums = [Datum([1, 2, 3], [0, 1])]
    with pytest.raises(LossError, match="a derivative at an unscored position"):
        run(backend.policy.backward(datums, [np.array([1.0, 1.0])]))
    with pytest.raises(LossError, match=r"got \(1,\); expected \(2,\)"):
        run(backend.policy.backward(datums, [np.array([1.0])]))
    with pytest.raises(LossError, match="expected 1, one per datum"):
        run(backend.policy.backward(datums, []))


def test_masked_positions_get_exactly_nothing():
    "A loss that reads NaN behind a where() has a NaN derivative there; it must not reach the weights."
    backend = backend_of(reference=False)
    datums = random_datums(2, 3)

    def loss(ds, lps):
        masks = [torch.tensor(d.active) for d in ds]
        return sum(
            torch.where(m, lp.exp(), 0.0).sum() for m, lp in zip(masks, lps, strict=True)
        ), {}

    out = run(backend.policy.forward_backward_custom(datums, loss))
    for d, dlogprob in zip(datums, out.dlogprobs, strict=True):
        assert (dlogprob[~d.active] == 0).all()
        assert (dlogprob[d.active] > 0).all()
    assert all(g.isfinite().all() for g in gradients(backend).values())


def test_prompt_logprobs_scores_everything():
    backend = backend_of(prompt_logprobs=True)
    datums = random_datums(2, 3)
    for scorer in (backend.policy, backend.reference):
        assert all(np.isfinite(s.values).all() for s in run(scorer.forward(datums)))

    def multiplied(ds, lps):
        return (sum((lp * torch.tensor(d.weights)).sum() for d, lp in zip(ds, lps)), {})

    out = run(backend.policy.forward_backward_custom(datums, multiplied))
    assert all(
        np.array_equal(dlogprob, d.weights)
        for dlogprob, d in zip(out.dlogprobs, datums, strict=True)
    )


@settings(max_examples=60)
@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 300), st.integers(1, 2000))
def test_batches_hold_everything_once_and_keep_the_budget(lengths, budget, gain):
    batches = plan_batches(lengths, budget, gain)
    assert sorted(i for b in batches for i in b) == list(range(len(lengths)))
    for b in batches:
        assert len(b) == 1 or len(b) * max(lengths[i] for i in b) <= budget


# Updates --------------------------------------------------------------------------------------------------------


def test_clipping_and_the_size_of_an_update():
    free = backend_of(reference=False)
    tight = backend_of(reference=False)
    datums = random_datums(1, 4)
    for b in (free, tight):
        run(b.policy.forward_backward_custom(datums, mixing_loss))
    before = {name: p.detach().clone() for name, p in tight.policy.state.params.items()}
    raw = torch.cat([g.flatten() for g in gradients(free).values()]).norm()
    loose = run(free.policy.optim_step(ADAM))
    metrics = run(tight.policy.optim_step(AdamParams(learning_rate=1e-2, grad_clip_norm=0.1)))
    assert loose["grad_norm"] == loose["grad_norm_clipped"] == pytest.approx(float(raw), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(float(raw), rel=1e-5)
    assert metrics["grad_norm_clipped"] == pytest.approx(0.1)
    moved = (
        sum(float((p - before[n]).square().sum()) for n, p in tight.policy.state.params.items())
        ** 0.5
    )
    assert metrics["update_norm"] == pytest.approx(moved, rel=1e-4)
    assert metrics["num_loss_tokens"] == sum(d.num_loss_tokens for d in datums)


def test_adamw_is_torchs_with_this_steps_parameters():
    backend = backend_of(reference=False)
    datums = random_datums(4, 3)
    copies = {
        n: p.detach().clone().requires_grad_() for n, p in backend.policy.state.params.items()
    }
    groups = [[p for p in copies.values() if (p.ndim > 1) is matrix] for matrix in (True, False)]
    plain = torch.optim.AdamW([{"params": group} for group in groups], foreach=False)
    steps = [AdamParams(1e-2), AdamParams(3e-3, 0.8, 0.95, 1e-6, 0.1)]
    steps += [
        AdamParams(1e-2, weight_decay=2.0, weight_decay_on="matrices"),
        AdamParams(1e-2, weight_decay=1.0),
    ]
    for adam in steps:
        run(backend.policy.forward_backward_custom(datums, mixing_loss))
        for name, g in gradients(backend).items():
            copies[name].grad = g
        betas = (adam.beta1, adam.beta2)
        for group, decays in zip(
            plain.param_groups, (True, adam.weight_decay_on == "all"), strict=True
        ):
            decay = adam.weight_decay if decays else 0.0
            group.update(lr=adam.learning_rate, betas=betas, eps=adam.eps, weight_decay=decay)
        plain.step()
        run(backend.policy.optim_step(adam))
    for name, p in backend.policy.state.params.items():
        assert torch.allclose(p, copies[name], atol=1e-6), name
    run(backend.policy.forward_backward_custom(datums, mixing_loss))
    with pytest.raises(
        BackendError, match="weight_decay_on: got 'norms'; expected 'all' or 'matrices'"
    ):
        run(backend.policy.optim_step(AdamParams(weight_decay_on="norms")))


def state_tensors(backend) -> dict[str, torch.Tensor]:
    "Weights, masters and moments."
    return local_module.capture(backend.policy.state)[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rejected_update_leaves_weights_moments_and_gradient(dtype):
    "The same gradient at a lower rate gives what it would have given at once."
    datums = random_datums(4, 3)
    adams = [ADAM, AdamParams(learning_rate=1e-3, grad_clip_norm=0.01)]
    backend = backend_of(dtype=dtype, reference=False)
    calm = backend_of(dtype=dtype, reference=False)
    for adam in adams:
        for b in (backend, calm):
            run(b.policy.forward_backward_custom(datums, mixing_loss))
        before = state_tensors(backend)
        for _ in range(2):
            with pytest.raises(
                BackendError, match=r"update rejected: .*as before\. Lower learning_rate \(1e\+38\)"
            ):
                run(backend.policy.optim_step(replace(adam, learning_rate=1e38), **BY_TOKENS))
            assert all(torch.equal(t, before[n]) for n, t in state_tensors(backend).items())
        assert run(backend.policy.optim_step(adam, **BY_TOKENS)) == run(
            calm.policy.optim_step(adam, **BY_TOKENS)
        )
    assert state_tensors(backend).keys() == state_tensors(calm).keys()
    assert all(torch.equal(t, state_tensors(backend)[n]) for n, t in state_tensors(calm).items())


BY_TOKENS: Any = {"grad_accumulation_normalization": "num_loss_tokens"}


def test_infinite_gradients_do_not_reach_the_weights():
    backend = backend_of(reference=False)
    datums = random_datums(4, 3)
    run(backend.policy.forward_backward_custom(datums, mixing_loss))
    before = state_tensors(backend)
    next(p for p in backend.policy.state.params.values() if p.grad is not None).grad[0] = torch.inf
    with pytest.raises(
        BackendError,
        match=r"gradient norm: got inf; .* as before\. Run the backward pass with another",
    ):
        run(backend.policy.optim_step(ADAM))
    assert all(torch.equal(t, before[n]) for n, t in state_tensors(backend).items())


def test_an_update_copies_a_few_weights_at_a_time(monkeypatch):
    "Its metrics need no second copy of the model."
    monkeypatch.setitem(local_module.TRIED_AT_ONCE, "cpu", 200)
    backend = backend_of(reference=False)
    whole = backend_of(reference=False)
    datums = random_datums(4, 3)
    for b in (backend, whole):
        run(b.policy.forward_backward_custom(datums, mixing_loss))
        run(b.policy.optim_step(ADAM))  # moments are made in the first update
        run(b.policy.forward_backward_custom(datums, mixing_loss))

    state = backend.policy.state
    held = {
        t.untyped_storage().data_ptr()
        for p in state.params.values()
        for t in (p, p.grad, *state.optimizer.state[p].values())
    }
    copies = list[int]()

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in held:
                copies.append(out.numel())
            return out

    with Copies():
        metrics = local_module.update(state, ADAM)
    assert 0 < max(copies) <= 200 < max(t.numel() for t in state.targets)
    monkeypatch.undo()
    assert metrics == pytest.approx(run(whole.policy.optim_step(ADAM)), rel=1e-5)


def test_an_injected_nan_reaches_neither_update_nor_sampler_nor_disk(tmp_path):
    backend = backend_of(reference=False)
    datums = random_datums(1, 4)
    run(backend.policy.forward_backward_custom(datums, mixing_loss))
    good = run(backend.policy.save_state(str(tmp_path / "good")))
    backend.policy.state.params["model.layers.1.mlp.up_proj.weight"].data[3, 5] = torch.nan
    with pytest.raises(
        BackendError,
        match=r"update 1: not finite: got NaN or infinity in model.layers.1.mlp.up_.*undo",
    ):
        run(backend.policy.optim_step(ADAM))
    with pytest.raises(
        BackendError, match=r"save_weights_for_sampler: not finite: got NaN .*layers.1.mlp.up_proj"
    ):
        run(backend.policy.save_weights_for_sampler("s"))
    with pytest.raises(
        RecordError,
        match=r"save_state, .*: not finite: got NaN or infinity in .*layers.1.mlp.up_proj",
    ):
        run(backend.policy.save_state(good))
    run(backend.policy.load_state(good))
    run(backend.policy.forward_backward_custom(datums, mixing_loss))
    run(backend.policy.optim_step(ADAM))


def test_small_updates_are_not_lost_in_bfloat16():
    backend = backend_of(dtype="bfloat16", reference=False)
    datums = random_datums(4, 3)
    start = {n: m.clone() for n, m in backend.policy.state.masters.items()}
    for _ in range(3):
        run(backend.policy.forward_backward_custom(datums, mixing_loss))
        metrics = run(backend.policy.optim_step(AdamParams(learning_rate=1e-6, weight_decay=0)))
    assert metrics["update_norm"] > 0
    state = backend.policy.state
    assert all(p.dtype == torch.bfloat16 for p in state.params.values())
    moved = [float((state.masters[n] - start[n]).abs().max()) for n in start]
    assert all(1e-6 < m < 4e-6 for m in moved)
    assert all(torch.equal(state.params[n], m.bfloat16()) for n, m in state.masters.items())


# Agreement ------------------------------------------------------------------------------------------------------


@settings(max_examples=8)
@given(
    seed=st.integers(0, 10**6),
    family=st.sampled_from(["qwen3", "llama"]),
    tied=st.booleans(),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1)]),
    lora=st.sampled_from([0, 2]),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    tokens=st.sampled_from([32, 16384]),
    temperature=st.sampled_from([1.0, 0.6]),
)
def test_sampler_and_policy_agree_on_every_token(
    seed, family, tied, heads, lora, lengths, tokens, temperature
):
    shape = {"tied": tied, "heads": heads[0], "kv_heads": heads[1], "seed": seed % 1000}
    options = {
        "lora_rank": lora,
        "tokens_per_batch": tokens,
        "temperature": temperature,
        "max_batch": 6,
    }
    backend = backend_of(family, shape, **options)
    rng = np.random.default_rng(seed)

    async def check():
        prompts = [rng.integers(0, 256, n) for n in lengths]
        params = [
            SampleParams(1 + i % 3, 3 + 4 * i, temperature, seed=seed + i)
            for i in range(len(prompts))
        ]
        jobs = (backend.sampler.sample(p, s) for p, s in zip(prompts, params, strict=True))
        completions = [c for group in await asyncio.gather(*jobs) for c in group]
        weights = [[0] * (c.prompt_len - 1) + [1] * len(c.tokens) for c in completions]
        datums = [
            Datum(c.full_tokens, w, advantage=float(rng.normal()), sample=i)
            for i, (c, w) in enumerate(zip(completions, weights, strict=True))
        ]
        for scorer in (
            (backend.policy, backend.reference)
            if not backend.policy.state.steps
            else (backend.policy,)
        ):
            for d, c, scored in zip(datums, completions, await scorer.forward(datums), strict=True):
                assert scored.temperature == temperature
                assert np.abs(scored.values[d.active] - c.sampling_logprobs).max() <= 1e-4
        return datums

    for version in range(1, 3):
        datums = run(check())
        run(backend.policy.forward_backward_custom(datums, mixing_loss))
        run(backend.policy.optim_step(ADAM))
        assert run(backend.sync(run(backend.policy.save_weights_for_sampler("now")))) == version
    run(check())


# Reference ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [0, 3])
def test_the_reference_is_where_the_policy_began(lora):
    backend = backend_of(lora_rank=lora)
    plain = tiny_model()
    datums = random_datums(6, 4)
    want = []
    for d in datums:
        with torch.no_grad():
            logits = plain(torch.from_numpy(d.input_tokens.copy())[None]).logits[0]
        at = torch.from_numpy(d.target_tokens.copy())
        want.append(logits.log_softmax(-1)[torch.arange(len(at)), at].numpy())
    for _ in range(3):
        for d, w, r in zip(datums, want, run(backend.reference.forward(datums)), strict=True):
            assert np.abs(r.values - w)[d.active].max(initial=0) < 1e-5
        run(backend.policy.forward_backward_custom(datums, mixing_loss))
        run(backend.policy.optim_step(ADAM))
    policy = run(backend.policy.forward(datums))
    assert max(np.nanmax(np.abs(p.values - w)) for p, w in zip(policy, want, strict=True)) > 0.05


def test_lora_shares_the_base_and_trains_only_the_adapter():
    backend = backend_of(lora_rank=3)
    state = backend.policy.state
    assert all("lora" in name for name in state.params)
    served = dict(backend.sampler.engine.causal.model.named_parameters())
    policy = dict(state.scoring.causal.model.named_parameters())
    for name, p in policy.items():
        same = served[name].data_ptr() == p.data_ptr()
        assert same == ("lora" not in name), name
    assert backend.reference.scoring.causal is state.scoring.causal
    assert backend.capabilities.lora_rank == 3


def test_a_missing_peft_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtra, match=r"pip install 'rl-notebook\[lora\]'"):
        backend_of(lora_rank=2)


# Sync -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inline", [True, False])
def test_a_sync_waits_for_what_is_being_sampled(inline):
    async def test():
        async with backend_of(model={"eos": None, "scale": 1}, inline=inline) as backend:
            backend.sampler.engine.eos_token_ids = frozenset()
            params = SampleParams(n=2, max_tokens=60, seed=0)
            want = [c.tokens.tolist() for c in await backend.sampler.sample([5, 6], params)]
            await backend.policy.forward_backward_custom(random_datums(1, 3), mixing_loss)
            await backend.policy.optim_step(AdamParams(learning_rate=0.3))
            name = await backend.policy.save_weights_for_sampler("new")
            early = asyncio.create_task(backend.sampler.sample([5, 6], params))
            for _ in range(3):
                await asyncio.sleep(0)
            sync = asyncio.create_task(backend.sync(name))
            await asyncio.sleep(0)
            late = asyncio.create_task(backend.sampler.sample([5, 6], params))
            early, version, late = await asyncio.gather(early, sync, late)
            assert version == 1
            assert {c.policy_version for c in early} == {0}
            assert {c.policy_version for c in late} == {1}
            assert [c.tokens.tolist() for c in early] == want
            assert [c.tokens.tolist() for c in late] != want

    run(test())


def test_cancelled_and_abandoned_requests_do_no_harm():
    backend = backend_of(inline=False)
    params = SampleParams(n=3, max_tokens=20, seed=0)
    want = [c.tokens.tolist() for c in run(backend.sampler.sample([5, 6], params))]

    async def cancel_one():
        gone = asyncio.create_task(
            backend.sampler.sample([7] * 9, SampleParams(n=9, max_tokens=200))
        )
        request = asyncio.create_task(backend.sampler.sample([5, 6], params))
        await asyncio.sleep(0.01)
        gone.cancel()
        return await request

    async def leave():
        asyncio.create_task(backend.sampler.sample([7] * 9, SampleParams(n=9, max_tokens=200)))  # noqa: RUF006
        await asyncio.sleep(0.01)

    assert [c.tokens.tolist() for c in run(cancel_one())] == want
    run(leave())
    assert [c.tokens.tolist() for c in run(backend.sampler.sample([5, 6], params))] == want
    assert backend.sampler.engine.idle


def test_an_engine_that_fails_tells_everybody_and_recovers():
    async def test():
        async with backend_of(inline=False) as backend:
            engine, run_steps = backend.sampler.engine, backend.sampler.engine.run_steps
            engine.run_steps = lambda *a: 1 / 0
            jobs = [backend.sampler.sample([5, i], SampleParams(max_tokens=4)) for i in range(3)]
            results = await asyncio.gather(*jobs, return_exceptions=True)
            assert [type(r) for r in results] == [ZeroDivisionError] * 3
            engine.run_steps = run_steps
            assert len(await backend.sampler.sample([5], SampleParams(n=2, max_tokens=4))) == 2

    run(test())


# States ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"lora_rank": 2}, {"dtype": "bfloat16"}])
def test_a_state_on_disk_gives_the_same_next_steps(tmp_path, options):
    backend = backend_of(reference=False, **options)
    datums = random_datums(1, 4)

    def step(b):
        loss = run(b.policy.forward_backward_custom(datums, mixing_loss)).loss
        return loss, run(b.policy.optim_step(ADAM)), torch.rand(1).item()

    step(backend)
    run(backend.sync(run(backend.policy.save_weights_for_sampler("s"))))
    path = run(backend.policy.save_state(str(tmp_path / "deep" / "state")))
    first = [step(backend) for _ in range(2)]
    other = backend_of(reference=False, **options)
    run(other.policy.load_state(path))
    assert (other.policy.state.steps, other.policy.versions.current) == (1, 1)
    assert run(other.sync(run(other.policy.save_weights_for_sampler("s")))) == 1
    assert [step(other) for _ in range(2)] == first
    assert run(other.sync(run(other.policy.save_weights_for_sampler("s")))) == 2
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["state"]


def test_weights_without_the_optimizer():
    backend = backend_of(reference=False)
    datums = random_datums(1, 4)
    run(backend.policy.forward_backward_custom(datums, mixing_loss))
    run(backend.policy.optim_step(ADAM))
    want = [s.values for s in run(backend.policy.forward(datums))]
    path = run(backend.policy.save_state("now"))
    run(backend.policy.forward_backward_custom(datums, mixing_loss))
    run(backend.policy.optim_step(ADAM))
    run(backend.policy.load_state(path, optimizer=False))
    got = [s.values for s in run(backend.policy.forward(datums))]
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(got, want, strict=True))
    assert backend.policy.state.optimizer is None


def test_a_state_of_another_model_names_what_differs(tmp_path):
    path = run(backend_of(reference=False).policy.save_state(str(tmp_path / "s")))
    with pytest.raises(
        RecordError,
        match="model of the saved state: got Qwen3ForCausalLM; expected LlamaForCausalLM",
    ):
        run(backend_of("llama", reference=False).policy.load_state(path))
    with pytest.raises(
        RecordError, match=r"saved tensor weights/.*got nothing.* settings that it was saved with"
    ):
        run(backend_of(lora_rank=2, reference=False).policy.load_state(path))
    meta = json.loads((tmp_path / "s" / "state.json").read_text())
    (tmp_path / "s" / "state.json").write_text(json.dumps(meta | {"format": 99}))
    with pytest.raises(RecordError, match="format of the saved state: got 99; expected 1"):
        run(backend_of(reference=False).policy.load_state(path))


def shorter(t):
    return t.reshape(-1)[:-1].clone()


DAMAGED = {  # how a tensor of a saved state is damaged, and what the message says of it
    "short moment": (
        "adam/exp_avg/model.norm.weight",
        shorter,
        r"got float32 \[31\]; expected float32 \[32\]",
    ),
    "head of one value": (
        "weights/lm_head.weight",
        lambda t: t[:1, :1],
        r"got float32 \[1, 1\]; expected",
    ),
    "unknown": (
        "adam/max_exp_avg_sq/lm_head.weight",
        lambda t: torch.ones(3),
        r"got float32 \[3\]; expected nothing",
    ),
}


@pytest.mark.parametrize("damage_kind", DAMAGED)
def test_a_saved_tensor_of_the_wrong_shape_is_rejected_before_it_is_used(damage_kind, tmp_path):
    name, damage, message = DAMAGED[damage_kind]
    backend = backend_of(reference=False)
    datums = random_datums(1, 4)
    run(backend.policy.forward_backward_custom(datums, mixing_loss))
    run(backend.policy.optim_step(ADAM))
    path = run(backend.policy.save_state(str(tmp_path / "s")))
    tensors = load_file(tmp_path / "s" / "state.safetensors")
    damaged = damage(tensors.pop(name, torch.zeros(1))).contiguous()
    save_file(tensors | {name: damaged}, tmp_path / "s" / "state.safetensors")
    before = state_tensors(backend)
    with pytest.raises(RecordError, match=f"saved tensor {name}.*{message}"):
        run(backend.policy.load_state(path))
    if name.startswith("weights"):
        with pytest.raises(RecordError, match=f"saved tensor {name}"):
            run(backend.policy.load_state(path, optimizer=False))
    assert all(torch.equal(t, before[n]) for n, t in state_tensors(backend).items())
    run(backend.policy.forward_backward_custom(datums, mixing_loss))
    run(backend.policy.optim_step(ADAM))


def test_a_full_disk_leaves_the_old_state_and_nothing_else(tmp_path, monkeypatch):
    backend = backend_of(reference=False)
    path = str(tmp_path / "s")
    run(backend.policy.save_state(path))
    before = (tmp_path / "s" / "state.safetensors").read_bytes()

    def full(tensors, target):
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(local_module, "save_file", full)
    with pytest.raises(RecordError, match="No space left on device"):
        run(backend.policy.save_state(path))
    assert [p.name for p in tmp_path.iterdir()] == ["s"]
    assert (tmp_path / "s" / "state.safetensors").read_bytes() == before


# Opening --------------------------------------------------------------------------------------------------------


def test_an_unusable_dtype_tokenizer_or_model_is_rejected():
    with pytest.raises(ConfigError, match="'float8'; expected float32 or bfloat16 or float64"):
        backend_of(dtype="float8")
    with pytest.raises(
        BackendError, match="tokenizer: got 258 tokens; expected at most the model's 100"
    ):
        backend_of(model={"vocab": 100, "eos": None})
    with pytest.raises(BackendError, match="trainable parameters: got none"):
        open_local(tiny_model().requires_grad_(False), byte_tokenizer())


@pytest.mark.parametrize("asked", [{"threads": 0}, {"threads": 2, "inline": True}])
def test_threads_that_would_be_ignored_are_rejected(asked):
    with pytest.raises(ConfigError, match="open_local: threads: got"):
        backend_of(**asked)


@pytest.mark.parametrize(
    ("family", "options", "sampling"),
    [
        ("qwen3", {}, {"temperature": 0.7, "top_p": 0.9, "top_k": 40}),
        ("tied", {"lora_rank": 2}, {}),
        ("gpt2", {"inline": True}, {}),
    ],
)
def test_ids_that_the_tokenizer_does_not_know_have_no_share(options, sampling, family):
    "Never sampled, and the logprobs of sampler, echo, policy and reference are of the law without them."
    tokenizer = byte_tokenizer()
    model = tiny_model(
        "gpt2" if family == "gpt2" else "qwen3", vocab=400, tied=family == "tied", scale=2.0
    )
    logits = copy.deepcopy(model)
    size = len(tokenizer)
    with pytest.warns(
        UserWarning,
        match=r"142 ids of the model have no token in the tokenizer \(258, 259, 260, ...\)",
    ):
        backend = open_local(
            model, tokenizer, temperature=sampling.get("temperature", 1.0), **options
        )
    params = SampleParams(n=8, max_tokens=20, seed=3, **sampling)
    completions = asyncio.run(backend.sampler.sample([65, 66, 67], params))
    datums = []
    for c in completions:
        assert c.tokens.max() < size
        whole = [65, 66, 67, *c.tokens.tolist()]
        with torch.no_grad():
            expected_logits = (
                logits(input_ids=torch.tensor([whole]))
                .logits[0, :-1, :size]
                .double()
                .log_softmax(-1)
            )
        want = expected_logits[torch.arange(len(whole) - 1), torch.tensor(whole[1:])].numpy()
        np.testing.assert_allclose(c.logprobs, want[2:], atol=1e-5)
        np.testing.assert_allclose(
            asyncio.run(backend.sampler.logprobs(whole)).values, want, atol=1e-5
        )
        datums.append(Datum(whole, [0, 0] + [1] * len(c.tokens)))
    forward = (
        asyncio.run(backend.policy.forward(datums)),
        asyncio.run(backend.reference.forward(datums)),
    )
    hot = sampling.get("temperature", 1.0)
    for datum, policy, reference in zip(datums, *forward, strict=True):
        with torch.no_grad():
            expected_logits = (
                logits(input_ids=torch.tensor([datum.tokens.tolist()]))
                .logits[0, :-1, :size]
                .double()
                / hot
            )
        want = expected_logits.log_softmax(-1)[
            torch.arange(len(datum.tokens) - 1), torch.tensor(datum.tokens[1:])
        ].numpy()[2:]
        np.testing.assert_allclose(policy.values[2:], want, atol=1e-5)
        np.testing.assert_allclose(reference.values[2:], want, atol=1e-5)
    masked = Datum([65, 300, 66], [0, 1])
    scored = Datum([65, 66, 300], [0, 1], key="q17")
    assert np.isfinite(asyncio.run(backend.policy.forward([masked]))[0].values[1])
    for model in (backend.policy, backend.reference):
        with pytest.raises(
            BackendError, match=r"q17.*token id: got 300, which the tokenizer does not know"
        ):
            asyncio.run(model.forward([scored]))
    asyncio.run(backend.__aexit__(None, None, None))


def test_where_memory_ends_it_is_reported_what_to_lower(monkeypatch):
    "With allocations that no machine grants."
    backend = backend_of(reference=False, inline=False)
    datums = random_datums(1, 4)

    def greedy(datums, logprobs):
        return logprobs[0].sum() * torch.empty(2**60)[0], {}

    for _ in range(2):
        with pytest.raises(
            BackendError,
            match=r"out of memory: got .*alloc.*Lower max_samples_per_fwd_bwd, max_comp",
        ):
            run(backend.policy.forward_backward_custom(datums, greedy))
    run(backend.policy.forward_backward_custom(datums, mixing_loss))
    monkeypatch.setattr(local_module, "frozen_copy", lambda *args: bytearray(2**62))
    with pytest.raises(
        BackendError, match=r"open_local: out of memory: got MemoryError.*dtype='bfloat16'"
    ):
        backend_of()
