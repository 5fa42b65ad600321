"What a step says of its speed: FLOPs against PyTorch's own count, bytes and padding against counts by hand."

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from test_router_replay import tiny_mixture
from tiny_models import byte_tokenizer, tiny_model
from torch.utils.flop_counter import FlopCounterMode

from rl_notebook.loop.async_loop import AsyncGRPOLoop
from rl_notebook.backends.base import Backend, Meter
from rl_notebook.backends.local.trainer import open_local
from rl_notebook.config.config import Config
from rl_notebook.core.types import Datum, SampleParams
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.core.losses import make_loss_fn
from rl_notebook.runs.run import metrics_row
from rl_notebook.backends.work import Work, model_size, work_between, work_metrics
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_reward, toy_rows
from rl_notebook.experiments.preflight import preflight


def products(counter: FlopCounterMode) -> int:
    "FLOPs of products with a weight, as PyTorch counted them; attention is a product of another kind."
    counts = counter.get_flop_counts().get("Global", {})
    return sum(n for op, n in counts.items() if str(op) in ("aten.mm", "aten.addmm"))


def datums_of(lengths: Sequence[int], prompt: int = 0) -> list[Datum]:
    "Random sequences, the first `prompt` tokens common to all; every other token is scored."
    rng = np.random.default_rng(0)
    start = rng.integers(0, 200, prompt)
    rows = [[*start, *rng.integers(0, 200, n - prompt)] for n in lengths]
    weights = [np.arange(1, n) >= max(prompt, 1) for n in lengths]
    return [
        Datum(r, w.astype(float), advantage=1.0, sample=i)
        for i, (r, w) in enumerate(zip(rows, weights))
    ]


def backend_of(**options: Any) -> Backend:
    "A tiny model, computed on this thread, so that PyTorch's counter sees it."
    return open_local(tiny_model(), byte_tokenizer(), inline=True, device="cpu", **options)


# --- counts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[9, 9, 9], [6, 12, 9]])
def test_scoring_counts_what_pytorch_counts(lengths: list[int]):
    backend = backend_of()
    datums = datums_of(lengths)
    with FlopCounterMode(display=False) as counter:
        asyncio.run(backend.policy.forward(datums))
    work = backend.meter.work["scoring"]
    assert work.flops == products(counter)
    assert work.tokens == len(lengths) * (max(lengths) - 1)
    assert work.padding == work.tokens - sum(n - 1 for n in lengths)
    assert work.seconds > 0


@pytest.mark.parametrize("options", [{}, {"lora_rank": 4}], ids=["full", "lora"])
@pytest.mark.parametrize("prompt", [0, 40])
def test_training_counts_what_pytorch_counts(options: dict[str, Any], prompt: int):
    backend = backend_of(**options)
    datums = datums_of([48] * 6, prompt)
    with FlopCounterMode(display=False) as counter:
        asyncio.run(
            backend.policy.forward_backward_custom(datums, make_loss_fn(datums, policy_loss="ppo"))
        )
    work = backend.meter.work["training"]
    size = backend.size
    assert size is not None
    scored = sum(d.num_loss_tokens for d in datums)
    assert work.tokens == (47 * 6 if not prompt else 40 + 7 * 6)
    assert work.padding == 0
    # the head's logits are made a second time, to save memory
    again = 0 if options else 2 * size.head * scored
    counted = products(counter) - again
    # a frozen first layer passes no gradient on
    assert counted == pytest.approx(work.flops, rel=0.06 if options else 1e-9)


def test_sampling_counts_prefill_and_decode_steps():
    backend = backend_of(reference=False)
    params = SampleParams(n=3, max_tokens=8, seed=1)
    with FlopCounterMode(display=False) as counter:
        [completions] = asyncio.run(sample_all(backend, [list(range(5, 17))], params))
    work = backend.meter.work["sampling"]
    size = backend.size
    assert size is not None
    lengths = [len(c.tokens) for c in completions]
    assert work.tokens == 12 + sum(n - 1 for n in lengths)  # the first token comes of the prompt
    assert work.flops == products(counter)
    # a pass for the prompt, and one a step while a row is left
    assert work.bytes == size.nbytes * max(lengths)


async def sample_all(backend: Backend, prompts: list[list[int]], params: SampleParams) -> list[Any]:
    return await asyncio.gather(*(backend.sampler.sample(p, params) for p in prompts))


def test_a_model_with_experts_has_no_size():
    assert model_size(tiny_mixture()) is None
    assert model_size(tiny_model("gpt2")) is None
    assert work_metrics({"sampling": Work(1.0, 100)}) == {
        "perf/sampling_tokens": 100.0,
        "perf/padding_ratio": 0.0,
    }


SIZE = model_size(tiny_model())
assert SIZE is not None


# --- in a step -------------------------------------------------------------------------------------------------------

SMALL_RUN = {"prompt_groups_per_step": 2, "completions_per_prompt": 4, "max_completion_tokens": 24}
RATES = {
    f"perf/{name}_{what}"
    for name in ("sampling", "ref", "train")
    for what in ("tokens", "flops_per_s")
}
RATES |= {"perf/sampling_bytes_per_s", "perf/padding_ratio", "perf/peak_memory_gb"}


def step_of(loop: type[GRPOLoop], recipe: str) -> dict[str, float]:
    "The metrics of one step of the toy."

    async def run() -> Any:
        backend = open_local(*load_model("tiny"), device="cpu")
        loop_of_kind = loop(
            backend,
            toy_rows(16),
            toy_reward,
            Config(**SMALL_RUN, recipe=recipe),
            dynamic_filter_fn=lambda g: True,
        )
        try:
            return await loop_of_kind.step()
        finally:
            await loop_of_kind.close()
            await backend.close()  # type: ignore[misc]

    return metrics_row(asyncio.run(run()))


@pytest.mark.parametrize(
    ("loop", "recipe"), [(GRPOLoop, "rl_loop"), (AsyncGRPOLoop, "async_rl_loop")]
)
def test_a_step_reports_what_it_computed(loop, recipe):
    metrics = step_of(loop, recipe)
    assert metrics.keys() >= RATES


def test_work_is_counted_by_phase_and_not_for_what_runs_between():
    meter = Meter()
    meter.note("sampling", Work(1.0, 10))
    before = dict(meter.work)
    meter.note("sampling", Work(0.5, 5, 1))
    meter.note("training", trained := Work(tokens=3, flops=2.0))
    assert work_between(before, meter.work) == {
        "sampling": Work(0.5, 5, 1),
        "training": trained,
    }
    assert before == {"sampling": Work(1.0, 10)}


# --- before the first step -------------------------------------------------------------------------------------------


def test_preflight_predicts_the_phases_it_runs_and_memory():
    cfg = Config(**SMALL_RUN)

    async def look() -> Any:
        async with open_local(*load_model("tiny"), device="cpu") as backend:
            return (
                await preflight(backend, toy_rows(16), toy_reward, cfg, prompts=2, samples=8)
            ).cost, backend.size

    cost, size = asyncio.run(look())
    assert set(cost.step_seconds) == {"sample", "score", "reference", "backward"}
    assert all(s > 0 for s in cost.step_seconds.values())
    assert cost.step_memory == pytest.approx(cost.memory["process"][0] + 20 * size.learned / 1e9)
    assert "a step, before update and sync" in repr(cost)
    assert f"about {cost.step_memory:.2g} GB in a step" in repr(cost)


def test_a_phase_that_was_undone_leaves_no_work_behind():
    "Adding 0.1 and 0.2 seconds and taking 0.3 away leaves a little: no token, no work."
    before = {"training": Work(0.3, 5, 0, 0.3, 0.3)}
    after = {"training": Work(0.1 + 0.2, 5, 0, 0.1 + 0.2, 0.1 + 0.2)}
    assert after["training"] - before["training"] != Work()
    assert work_metrics(work_between(before, after)) == {}
