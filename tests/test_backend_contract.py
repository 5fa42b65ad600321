"What every backend must do. A new backend adds itself to `BACKENDS` and passes."

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deviations import FIREWORKS, KNOWN, OPENAI, TINKER
from service_runs import KEY, no_service_is_left, service
from tiny_models import byte_tokenizer, one_thread, tiny_model

from rl_notebook.backends.base import Backend, Sampler, Scorer, Trainer, WeightSync
from rl_notebook.backends.services.fireworks import open_fireworks
from rl_notebook.config.config import Config
from rl_notebook.backends.local.trainer import open_local
from rl_notebook.backends.services.openai import open_openai
from rl_notebook.backends.contract import check_contract, toy_datum
from rl_notebook.backends.services.tinker import open_tinker
from rl_notebook.core.types import (
    AdamParams,
    BackendError,
    Datum,
    LossError,
    RLNotebookError,
    SampleParams,
)
from rl_notebook.core.losses import LossOptions, make_loss_fn
from rl_notebook.loop.step import step_denominator

__all__ = ["no_service_is_left", "one_thread"]


def local(**options) -> Backend:
    return open_local(tiny_model(), byte_tokenizer(), **options)


async def local_weights(backend: Backend) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in backend.policy.state.params.items()}


async def tinker(**options) -> Backend:
    quick = {"probing": False, "conformance": "off"} | options
    return await open_tinker(
        base_url=service().url,
        key=KEY,
        base_model="a-model",
        tokenizer=byte_tokenizer(),
        lora_rank=4,
        **quick,
    )


async def tinker_weights(backend: Backend) -> dict[str, torch.Tensor]:
    path = await backend.policy.save_weights_for_sampler("compared")
    files = list(service().emulator.folder.rglob("*" + path.rsplit("/", 1)[-1]))
    return safetensors_in(files[0])


SHAPE = "accounts/fireworks/trainingShapes/a-shape"


async def fireworks(lora_rank: int = 0) -> Backend:
    reference = None if lora_rank else f"{SHAPE}-forward"  # with LoRA, the policy's base
    trainer = {"training_shape_id": SHAPE, "reference_training_shape_id": reference}
    settings = {
        "base_model": "accounts/fireworks/models/a-model",
        "lora_rank": lora_rank,
        "trainer": trainer,
    }
    settings |= {
        "deployment": {"tokenizer_model": "at-hand"},
        "max_completion_tokens": 64,
        "max_seq_len": 256,
    }
    quick = {"say": lambda line: None, "grace_s": 0, "poll_interval_s": 0.02}
    return await open_fireworks(
        key=KEY, base_url=service().url, tokenizer=byte_tokenizer(), **settings, **quick
    )


async def fireworks_weights(backend: Backend) -> dict[str, torch.Tensor]:
    name = await backend.policy.save_weights_for_sampler("compared")
    return safetensors_in(next(iter(service().emulator.folder.rglob(name))))


async def openai() -> Backend:
    served = {"base_url": service().url, "served_model": service().emulator.site.model, "key": KEY}
    return await open_openai(tiny_model(), byte_tokenizer(), **served)


def safetensors_in(folder: Path) -> dict[str, torch.Tensor]:
    "Weights that a service has put on its disk."
    from safetensors.torch import load_file

    return {
        name: t
        for file in sorted(folder.glob("*.safetensors"))
        for name, t in load_file(file).items()
    }


@dataclass
class Entry:
    "A backend, and the local one that it must agree with."

    open: Callable[[], Backend | Awaitable[Backend]]
    # of the `local` backend to compare with
    local_options: dict[str, Any] = field(default_factory=dict)
    weights: Callable[[Backend], Awaitable[dict[str, torch.Tensor]]] = local_weights


BACKENDS = {
    "local": Entry(local),
    "local-lora": Entry(lambda: local(lora_rank=4), {"lora_rank": 4}),
    "local-concurrent": Entry(lambda: local(concurrent_sampling=True)),
    "tinker": Entry(tinker, {"lora_rank": 4}, tinker_weights),
    "fireworks": Entry(fireworks, weights=fireworks_weights),
    "openai": Entry(openai),
}

PROMPT = [72, 101, 108, 108, 111]
ADAM = AdamParams(learning_rate=1e-2)


@pytest.fixture(params=BACKENDS)
def opened(request):
    "A function that runs an async test against a fresh backend."

    def run(test):
        async def inside():
            opening = BACKENDS[request.param].open()
            async with await opening if inspect.isawaitable(opening) else opening as backend:
                return await test(backend)

        return asyncio.run(inside())

    return run


@pytest.fixture
def entry(opened, request):
    "What `opened` opens."
    return BACKENDS[request.node.callspec.params["opened"]]


def datums_of(completions, advantages=None) -> list[Datum]:
    "One datum per completion, trained on the sampled tokens."
    advantages = np.linspace(-1, 1, len(completions)) if advantages is None else advantages

    def make(c, a, i):
        return Datum(
            c.full_tokens,
            [0] * (c.prompt_len - 1) + [1] * len(c.tokens),
            advantage=float(a),
            sample=i,
        )

    return [make(c, a, i) for i, (c, a) in enumerate(zip(completions, advantages, strict=True))]


def reinforce(datums, policy_logprobs):
    parts = [
        -d.advantage * lp[torch.tensor(d.active)].sum()
        for d, lp in zip(datums, policy_logprobs, strict=True)
    ]
    return torch.stack(parts).sum(), {"parts": float(len(parts))}


async def sample(backend: Backend, seed: int = 0, n: int = 4, max_tokens: int = 6):
    return await backend.sampler.sample(PROMPT, SampleParams(n=n, max_tokens=max_tokens, seed=seed))


async def publish(backend: Backend, name: str) -> int:
    return await backend.sync(await backend.policy.save_weights_for_sampler(name))


def active(series, datums) -> list[np.ndarray]:
    return [np.asarray(s)[d.active] for s, d in zip(series, datums, strict=True)]


def gap(a, b) -> float:
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))


def test_roles_have_their_protocols_and_a_reference_cannot_be_trained(opened):
    async def test(backend):
        assert isinstance(backend.policy, Trainer)
        assert isinstance(backend.reference, Scorer)
        assert isinstance(backend.sampler, Sampler)
        assert isinstance(backend.sync, WeightSync)
        for role, protocol in (
            (backend.policy, Trainer),
            (backend.sampler, Sampler),
            (backend.reference, Scorer),
        ):
            for name in (n for n in vars(protocol) if not n.startswith("_")):
                assert inspect.iscoroutinefunction(getattr(role, name)), name
        assert not isinstance(backend.reference, Trainer)
        with pytest.raises(AttributeError):
            await backend.reference.optim_step(ADAM)

    opened(test)


def test_completions(opened):
    async def test(backend):
        completions = await sample(backend, n=5)
        assert len(completions) == 5
        for c in completions:
            assert c.prompt_tokens.tolist() == PROMPT
            assert 1 <= len(c.tokens) <= 6
            assert (c.logprobs < 0).all()
            assert np.isfinite(c.sampling_logprobs).all()
            assert c.finish_reason in ("stop", "length")
            assert c.policy_version == 0

    opened(test)


def test_policy_reference_and_sampler_agree_at_the_start_and_are_stamped(opened):
    async def test(backend):
        completions = await sample(backend)
        datums = datums_of(completions)
        policy = await backend.policy.forward(datums)
        reference = await backend.reference.forward(datums)
        samples = [c.logprobs for c in completions]
        assert gap(active(policy, datums), samples) <= 1e-4
        assert gap(active(reference, datums), samples) <= 1e-4
        for c, d in zip(completions, datums, strict=True):
            echoed = await backend.sampler.logprobs(c.full_tokens)
            assert echoed.coordinate == "target"
            assert len(echoed) == len(d.weights)
            assert np.isfinite(echoed.values).all()
            assert np.abs(echoed.values[d.active] - c.logprobs).max() <= 1e-4
        for series, source in ((policy, "policy"), (reference, "reference")):
            for scored, d in zip(series, datums, strict=True):
                assert (scored.coordinate, scored.source, scored.temperature) == (
                    "target",
                    source,
                    1.0,
                )
                assert scored.policy_version == 0
                assert len(scored) == len(d.weights)
                assert np.array_equal(np.isnan(scored.values), ~d.active)

    opened(test)


def test_the_list_that_is_asked_of_services_holds(opened):
    async def test(backend):
        before = await backend.policy.forward([datum := toy_datum(PROMPT)])
        result = await check_contract(backend.policy, backend.sampler, PROMPT, backend.sync)
        assert not result.failed, repr(result)
        assert result["second sync"].ok
        np.testing.assert_allclose(
            (await backend.policy.forward([datum]))[0].values, before[0].values, atol=1e-6
        )

    opened(test)


@pytest.fixture(scope="module")
def emulated():
    "A service with the model that ships."
    from rl_notebook.emulator.service import start_emulator

    with start_emulator() as emulator:
        yield emulator


DEVIATIONS = {
    "tinker": (TINKER, {"base_model": "tiny", "tokenizer_model": "tiny", "lora_rank": 2}),
    "openai": (OPENAI, {"base_model": "tiny", "served_model": "tiny"}),
    "fireworks": (
        FIREWORKS,
        {"base_model": "accounts/fireworks/models/tiny", "deployment.tokenizer_model": "tiny"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"), [(k, n) for k, (table, _) in DEVIATIONS.items() for n in (None, *table)]
)
def test_a_deviation_of_a_service_is_named(kind, name, emulated, monkeypatch):
    "By `rl-notebook check`, over HTTP; a service that does not deviate is accused of nothing."
    from rl_notebook.backends.services import fireworks
    from rl_notebook.recipes.open import check_backend
    from rl_notebook.views.check import check_html

    unhurried = fireworks.open_fireworks
    monkeypatch.setattr(
        fireworks, "open_fireworks", lambda **o: unhurried(**o, poll_interval_s=0.02)
    )
    for variable, value in emulated.environment().items():
        monkeypatch.setenv(variable, value)
    table, asked = DEVIATIONS[kind]
    emulated.emulator.site.servers.clear()
    KNOWN.clear()
    table[name].plant(monkeypatch) if name else None
    cfg = Config.from_dict(asked | {"backend": kind, "base_url": emulated.url})
    whole = asyncio.run(check_backend(cfg, say=lambda line: None))
    result = whole[-1]
    page = check_html(cfg, whole, "rl-notebook check")
    failed = page.partition("<h2>What does not hold</h2>")[2].partition("<h2>")[0]
    assert re.findall(r"✗ ([\w ]+)", failed) == [f.name for f in result.failed]
    if name:
        row = next(
            f for findings in reversed(whole) for f in findings if f.name == table[name].named
        )
        assert row.ok is not True or row.text.startswith("advantages"), repr(row)
    else:
        assert not result.failed


def test_same_seed_same_tokens(opened):
    async def test(backend):
        if not backend.capabilities.seed:
            pytest.skip("the backend has no seed")
        alone = await sample(backend, seed=3)
        crowd = await asyncio.gather(*(sample(backend, seed=s, n=1 + s) for s in range(6)))
        assert [c.tokens.tolist() for c in crowd[3]] == [c.tokens.tolist() for c in alone]

    opened(test)


def test_the_loss_is_called_once_with_everything(opened):
    async def test(backend):
        datums = datums_of(await sample(backend, n=7))
        calls = []

        def loss(ds, lps):
            calls.append(
                (len(ds), [tuple(lp.shape) for lp in lps], all(lp.requires_grad for lp in lps))
            )
            return reinforce(ds, lps)

        out = await backend.policy.forward_backward_custom(datums, loss)
        assert calls == [(7, [(len(d.weights),) for d in datums], True)]
        assert {
            k: v for k, v in out.metrics.items() if not k.startswith(("grad_norm/", "perf/"))
        } == {"parts": 7.0}
        want = -sum(
            d.advantage * np.nansum(s.values) for d, s in zip(datums, out.logprobs, strict=True)
        )
        assert out.loss == pytest.approx(want, rel=1e-5)
        for d, dlogprob in zip(datums, out.dlogprobs, strict=True):
            assert np.allclose(dlogprob, np.where(d.active, -d.advantage, 0.0))
            assert (dlogprob[~d.active] == 0).all()

    opened(test)


def test_training_moves_the_policy_and_nothing_else(opened):
    async def test(backend):
        completions = await sample(backend)
        datums = datums_of(completions, [1.0] * 4)
        before = active(await backend.policy.forward(datums), datums)
        await backend.policy.forward_backward_custom(datums, reinforce)
        metrics = await backend.policy.optim_step(ADAM)
        assert metrics["grad_norm"] > 0
        assert metrics["learning_rate"] == ADAM.learning_rate
        after = active(await backend.policy.forward(datums), datums)
        assert sum(a.sum() for a in after) > sum(b.sum() for b in before)
        assert gap(active(await backend.reference.forward(datums), datums), before) <= 1e-4
        again = await sample(backend)
        assert [c.tokens.tolist() for c in again] == [c.tokens.tolist() for c in completions]
        assert again[0].policy_version == 0

    opened(test)


def test_sync_brings_the_policy_to_the_sampler_and_an_unknown_snapshot_names_the_known_ones(opened):
    async def test(backend):
        for version in (1, 2):
            await backend.policy.forward_backward_custom(
                datums_of(await sample(backend)), reinforce
            )
            await backend.policy.optim_step(ADAM)
            assert await publish(backend, f"step-{version}") == version
            completions = await sample(backend, seed=version)
            assert {c.policy_version for c in completions} == {version}
            datums = datums_of(completions)
            policy = await backend.policy.forward(datums)
            assert policy[0].policy_version == version
            assert gap(active(policy, datums), [c.logprobs for c in completions]) <= 1e-4
        with pytest.raises(BackendError, match=r"'step-9'.*step-1"):
            await backend.sync("step-9")

    opened(test)


@pytest.mark.parametrize("opened", ["local"], indirect=True)
def test_normalizations_divide_once(opened):
    async def test(backend):
        datums = datums_of(await sample(backend, n=5))
        path = await backend.policy.save_state("start")
        norms = {}
        for kind in backend.capabilities.grad_accumulation_normalization:
            await backend.policy.load_state(path)
            for part in [datums] if kind == "none" else [[d] for d in datums]:
                await backend.policy.forward_backward_custom(part, reinforce)
            norms[kind] = (
                await backend.policy.optim_step(ADAM, grad_accumulation_normalization=kind)
            )["grad_norm"]
        counts = {
            "none": 1,
            "num_sequences": 5,
            "num_loss_tokens": sum(d.num_loss_tokens for d in datums),
        }
        for kind, norm in norms.items():
            assert norm == pytest.approx(norms["none"] / counts[kind], rel=1e-4)
        await backend.policy.forward_backward_custom(datums, reinforce)
        with pytest.raises(BackendError, match="'per_moon'"):
            await backend.policy.optim_step(ADAM, grad_accumulation_normalization="per_moon")

    opened(test)


def test_a_step_needs_gradients_and_uses_them_up(opened):
    async def test(backend):
        datums = datums_of(await sample(backend))
        with pytest.raises(BackendError, match="no accumulated gradient"):
            await backend.policy.optim_step(ADAM)
        await backend.policy.forward_backward_custom(datums, reinforce)
        await backend.policy.optim_step(ADAM)
        with pytest.raises(BackendError, match="no accumulated gradient"):
            await backend.policy.optim_step(ADAM)
        if backend.capabilities.discard_gradients:
            await backend.policy.forward_backward_custom(datums, reinforce)
            await backend.policy.discard_gradients()
            with pytest.raises(BackendError, match="no accumulated gradient"):
                await backend.policy.optim_step(ADAM)

    opened(test)


def test_states_restore_exactly(opened):
    async def test(backend):
        datums = datums_of(await sample(backend))

        async def step():
            out = await backend.policy.forward_backward_custom(datums, reinforce)
            return out.loss, await backend.policy.optim_step(ADAM)

        await step()
        path = await backend.policy.save_state("middle")
        first = [await step() for _ in range(2)]
        await backend.policy.load_state(path)
        assert [await step() for _ in range(2)] == first

    opened(test)


def test_bad_losses_are_rejected_and_leave_nothing_behind(opened):
    async def test(backend):
        datums = datums_of(await sample(backend))

        def ignoring(ds, lps):
            return reinforce(ds[:-1], lps[:-1])

        with pytest.raises(LossError, match="sample 3: gradient: got none"):
            await backend.policy.forward_backward_custom(datums, ignoring)

        def forgetful(ds, lps):
            return (sum((lp * torch.tensor(d.weights)).sum() for d, lp in zip(ds, lps)), {})

        if not backend.capabilities.prompt_logprobs:
            with pytest.raises(LossError, match="index with weights > 0"):
                await backend.policy.forward_backward_custom(datums, forgetful)
        with pytest.raises(LossError, match="gradient: got none"):
            await backend.policy.forward_backward_custom(
                datums, lambda ds, lps: (torch.tensor(1.0), {})
            )
        with pytest.raises(LossError, match="got float; expected a tensor"):
            await backend.policy.forward_backward_custom(datums, lambda ds, lps: (1.0, {}))
        with pytest.raises(ZeroDivisionError):
            await backend.policy.forward_backward_custom(datums, lambda ds, lps: 1 / 0)
        with pytest.raises(BackendError, match="no accumulated gradient"):
            await backend.policy.optim_step(ADAM)

    opened(test)


def test_bad_prompts_are_rejected_and_others_continue(opened):
    async def test(backend):
        limit = backend.capabilities.max_seq_len
        with pytest.raises(RLNotebookError, match=f"{limit} prompt tokens.*at most {limit}"):
            await backend.sampler.sample([1] * limit, SampleParams(max_tokens=4))
        with pytest.raises(RLNotebookError, match="expected at least one"):
            await backend.sampler.sample([], SampleParams(max_tokens=4))
        too_long = Datum([1] * (limit + 1), [1] * limit, sample=3, key="q17")
        with pytest.raises(RLNotebookError, match=rf"sample 3 \(row 'q17'\).*at most {limit}"):
            await backend.policy.forward([too_long])
        results = await asyncio.gather(
            sample(backend),
            backend.sampler.sample([], SampleParams()),
            sample(backend),
            return_exceptions=True,
        )
        assert isinstance(results[1], BackendError)
        assert [c.tokens.tolist() for c in results[0]] == [c.tokens.tolist() for c in results[2]]

    opened(test)


def test_a_closed_backend_says_so(opened):
    async def test(backend):
        async with backend:
            await sample(backend)
        with pytest.raises(BackendError, match="closed"):
            await backend.policy.forward([Datum([1, 2], [1])])
        with pytest.raises(BackendError, match="closed"):
            await sample(backend)

    opened(test)


def test_three_steps_agree_with_the_local_backend(opened, entry):
    "Same seeds, same batch: logprobs, losses, gradients, and the weights after three steps."

    async def three(backend, datums):
        outputs = []
        for k in range(3):
            out = await backend.policy.forward_backward_custom(datums[k::2], reinforce)
            outputs.append((out.loss, active(out.logprobs, datums[k::2]), out.dlogprobs))
            await backend.policy.optim_step(AdamParams(learning_rate=1e-3))
        return outputs

    async def test(backend):
        async with local(**entry.local_options) as local_backend:
            datums = datums_of(await sample(local_backend, n=8))
            ours, theirs = [await three(b, datums) for b in (backend, local_backend)]
            for (loss, logprobs, dlogprobs), (loss_, logprobs_, dlogprobs_) in zip(
                ours, theirs, strict=True
            ):
                assert loss == pytest.approx(loss_, rel=1e-5, abs=1e-6)
                assert gap(logprobs, logprobs_) <= 1e-5
                assert gap(dlogprobs, dlogprobs_) <= 1e-6
            weights = await entry.weights(backend)
            weights_ = await local_weights(local_backend)
            assert weights.keys() == weights_.keys()
            assert max(float((weights[n] - weights_[n]).abs().max()) for n in weights) <= 1e-5

    opened(test)


async def datums_with_anchors(backend: Backend) -> list[Datum]:
    "Datums whose anchors lie around the policy, so that ratios are clipped; one has no advantage."
    datums = datums_of(await sample(backend, n=5))
    scored = await backend.policy.forward(datums)
    rng = np.random.default_rng(0)
    return [
        replace(
            d,
            old_logprobs=np.where(d.active, lp.values + rng.normal(0, 0.4, len(lp.values)), np.nan),
        )
        for d, lp in zip(datums, scored, strict=True)
    ]


def requests_since(start: int) -> list[str]:
    "What trainers were asked to compute."
    names = [exchange.path.rsplit("/", 1)[-1] for exchange in list(service().emulator.log)[start:]]
    return [name for name in names if name in ("forward", "forward_backward")]


@pytest.mark.parametrize("opened", ["tinker"], indirect=True)
def test_a_builtin_loss_trains_like_the_same_loss_here(opened, entry):
    "Every loss that the service has: values, derivatives, weights after two steps, and how many calls that takes."

    async def two(backend, datums, options, there: bool, divided_by):
        outputs = []
        begun = len(service().emulator.log)
        whole = step_denominator(datums, options.aggregation)
        for k in range(2):
            for half in (datums[:2], datums[2:])[k % 2 :]:
                if there:
                    out = await backend.policy.forward_backward_builtin(
                        half, options, denominator=whole
                    )
                else:
                    loss_fn = make_loss_fn(half, options, denominator=whole)
                    out = await backend.policy.forward_backward_custom(half, loss_fn)
                outputs.append((out.loss, out.metrics, out.dlogprobs))
            # an eps far above the rounding of a gradient
            adam = AdamParams(learning_rate=1e-3, eps=1e-6)
            await backend.policy.optim_step(adam, grad_accumulation_normalization=divided_by)
        return outputs, await entry.weights(backend), requests_since(begun)

    async def test(backend):
        datums = await datums_with_anchors(backend)
        start = await backend.policy.save_state("start")
        assert backend.capabilities.builtin_losses
        for name in backend.capabilities.builtin_losses:
            late = {"importance_sampling": "num_loss_tokens", "cispo": "num_sequences"}
            divided_by = late.get(name, "none") if backend.policy.link.sdk.divides else "none"
            options = LossOptions(
                name, aggregation="sum" if name == "dro" or divided_by != "none" else "token_mean"
            )
            runs = []
            for there in (False, True):
                await backend.policy.load_state(start)
                runs.append(await two(backend, datums, options, there, divided_by))
            (ours, weights, calls), (theirs, weights_, calls_) = runs
            for (loss, metrics, dlogprobs), (loss_, metrics_, dlogprobs_) in zip(
                ours, theirs, strict=True
            ):
                assert loss == pytest.approx(loss_, rel=1e-5, abs=1e-6)
                assert metrics == pytest.approx(metrics_, rel=1e-3, abs=1e-5, nan_ok=True)
                assert gap(dlogprobs, dlogprobs_) <= 1e-6
            assert max(float((weights[n] - weights_[n]).abs().max()) for n in weights) <= 1e-5, name
            assert len(calls) == 6  # a forward and a backward pass each
            assert calls_ == ["forward_backward"] * 3

    opened(test)
