"The local backend on a device that is not the CPU, tried without one: shapes, devices, and what the host waits for."

import asyncio

import numpy as np
import pytest
import torch
from pretend import DEVICE, Pretend
from tiny_models import byte_tokenizer, one_thread, tiny_model

from rl_notebook.backends.local import scoring
from rl_notebook.backends.local.engine import Engine
from rl_notebook.backends.local.model import open_model
from rl_notebook.backends.local.trainer import open_local
from rl_notebook.core.types import AdamParams, ConfigError, Datum, SampleParams

__all__ = ["one_thread"]


# --- the decode loop ---------------------------------------------------------------------------------------------


def test_a_decode_step_waits_only_where_it_is_looked_at():
    steps = 16
    with Pretend() as counts:
        causal = open_model(tiny_model(eos=None).to(DEVICE), routes=("fast",))
        engine = Engine(causal, eos_token_ids=frozenset())
        for n in (3, 2):
            engine.submit(
                [1, 2, 3, 4, 5], SampleParams(n=n, max_tokens=100, temperature=n / 4, top_k=20)
            )
        engine.run_steps(1)
        counts.forget()
        engine.run_steps(steps)
    assert len(engine.rows[0].tokens) >= steps
    assert (counts.reads, counts.uploads.total(), counts.strays.total()) == ({"emit": steps}, 0, 0)
    assert counts.sent.total() == 1  # more uniform numbers; the rest follows from the step before
    print(f"the host waits {counts.waits / steps:g} times a decode step")


# --- the whole backend -------------------------------------------------------------------------------------------


def group_datums(prompt: int = 24, tokens: int = 12, count: int = 4) -> list[Datum]:
    "Completions of one prompt, of different lengths."
    rng = np.random.default_rng(0)
    rows = [
        np.concatenate([np.arange(1, prompt + 1), rng.integers(0, 200, tokens + i)])
        for i in range(count)
    ]
    return [Datum(row, (np.arange(1, len(row)) >= prompt).astype(float), 1.0) for row in rows]


def summed(datums, series):
    "The sum of what is scored."
    return sum(s[torch.from_numpy(d.active)].sum() for s, d in zip(series, datums, strict=True)), {}


def test_a_step_of_the_backend_stays_on_its_device(monkeypatch):
    monkeypatch.setitem(scoring.TREE_GAIN, DEVICE, 1)
    datums = group_datums()
    result = {}

    async def step(counts: Pretend) -> None:
        def note(phase: str) -> None:
            result[phase] = counts.waits
            assert not counts.uploads, (phase, counts.uploads)
            counts.forget()

        backend = open_local(
            tiny_model(),
            byte_tokenizer(),
            device=DEVICE,
            inline=True,
        )
        assert not counts.strays
        counts.forget()
        await backend.sampler.sample([1, 2, 3], SampleParams(n=4, max_tokens=9))
        note("sampling")
        await backend.sampler.logprobs(datums[0].tokens)
        note("echo")
        await backend.reference.forward(datums)
        note("reference")
        output = await backend.policy.forward_backward_custom(datums, summed)
        assert output.metrics["perf/prefix_tokens_saved"] > 0
        note("training")
        await backend.policy.optim_step(AdamParams(learning_rate=1e-3))
        note("update")
        state = await backend.policy.save_state("before")
        await backend.sync(await backend.policy.save_weights_for_sampler("v1"))
        note("sync")
        await backend.policy.load_state(state)
        await backend.policy.sample_gradients(datums, [d.active.astype(float) for d in datums])
        assert not counts.strays
        await backend.close()

    with Pretend() as counts:
        asyncio.run(step(counts))
    assert not counts.strays
    assert result["sampling"] <= 9 + 1  # a look at the tokens of each step
    batches = 1
    # one read back, and transformers looks once at the positions of a pass
    assert result["reference"] <= 1 + batches
    assert result["training"] <= 3 + 2 * batches
    assert result["update"] <= 5  # whatever the number of tensors and layers
    assert result["sync"] <= 1


def test_a_missing_device_is_rejected_at_once():
    availability = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "xpu": torch.xpu.is_available(),
    }
    absent = [name for name, available in availability.items() if not available]
    for device in [*absent, "cuda:99", "meta", "gpu", "hpu", torch.device("xla")]:
        with pytest.raises(
            ConfigError,
            match=rf"device: got {device}; expected a device that torch finds here: cpu",
        ):
            open_local(tiny_model(), byte_tokenizer(), device=device)
