"""Whether the weights of a sync arrived, asked of syncs that fail in part or in silence.

The trainers and samplers are those of the zoo (a Hugging Face model trained by torch's AdamW, a server made of
`generate`), and the local backend with a sync of which something is taken away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rl_notebook import Config, GRPOLoop
from rl_notebook.backends.base import SyncReport
from rl_notebook.backends.local.trainer import open_local
from rl_notebook.core.types import BackendError
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_rows
from rl_notebook.loop.loop import verdict_line
from rl_notebook.insight.xray import check_version

from .faults import set_fields
from .machines import cast_parameters
from .steps import Run, World, open_run

SMALL_RUN = {
    "prompt_groups_per_step": 2,
    "completions_per_prompt": 3,
    "max_completion_tokens": 16,
    "max_seq_len": 96,
}


def reward(text: str) -> float:
    "Another one for nearly every text, so that every group has signal."
    return float(sum(map(ord, text)) % 7)


def loop_on(backend: Any, **settings: Any) -> GRPOLoop:
    defaults = {
        "drop_zero_variance_groups": False,
        "kl_beta": 0.0,
        "seed": 3,
        "learning_rate": 5e-5,
    }
    return GRPOLoop(
        backend, toy_rows(24, seed=0), reward, Config(**SMALL_RUN | defaults | settings)
    )


def local(**options: Any) -> Any:
    return open_local(*load_model("tiny"), reference=False, **options)


@pytest.mark.parametrize("part", ["lm_head", "layers.2."])
def test_a_part_that_is_not_synced_is_detected(part: str) -> None:
    "At once, and later too, when it is more than one sync old."
    backend = local()
    for name in [name for name in backend.sync.served if part in name]:
        del backend.sync.served[name]

    async def run() -> None:
        loop = loop_on(backend)
        for step in (1, 2, 3):
            record = await loop.step()
            report = SyncReport.from_metrics(record.metrics)
            assert report == loop.weights.sampler.audit.report
            assert f"sync {step} did not bring these weights" in verdict_line(loop.records, record)

    asyncio.run(run())


def travels(*left: str) -> Callable[[Run], None]:
    return lambda run: set_fields(
        run.sync, travels=lambda name: not any(part in name for part in left)
    )


def half_precision(run: Run) -> None:
    set_fields(run.server, model=cast_parameters(run.server.model, torch.bfloat16))


def nothing(run: Run) -> None:
    set_fields(run.sync, travels=lambda name: False)


SERVERS = {  # world, what is wrong with it, whether the weights arrived, words
    "well": (World(), lambda run: None, True, "arrived"),
    "nothing": (World(), nothing, False, "changed nothing"),
    "half precision": (World(), half_precision, None, "may be rounding"),
    "no layer": (World(), travels("layers.1."), False, "did not bring"),
    "half of an adapter": (
        World(lora_rank=4),
        lambda run: set_fields(run.sync, scale=0.5),
        False,
        "did not bring",
    ),
    "cannot score": (World(can_echo=False), nothing, None, ""),
}


@pytest.mark.parametrize("name", SERVERS)
def test_servers_of_other_makers(name: str) -> None:
    world, fault, ok, words = SERVERS[name]

    async def run() -> None:
        machines = await open_run(world)
        fault(machines)
        settings = {"temperature": world.temperature, "lora_rank": world.lora_rank}
        loop = loop_on(
            machines.backend, **settings | {"learning_rate": 5e-4 if world.lora_rank else 5e-5}
        )
        record = await loop.step()
        report = loop.weights.sampler.audit.report
        assert (report.sentence if report else "").find(words) >= 0
        assert (report.ok if report else None) is ok
        assert check_version(record).ok is (ok if report else True)
        assert machines.trainer.temperature == world.temperature  # it was asked at 1, and put back

    asyncio.run(run())


def test_small_updates_are_seen() -> None:
    "At a learning rate of one in a million, as large models are trained with."

    async def step(fault: bool) -> bool | None:
        backend = local()
        if fault:
            del backend.sync.served["lm_head.weight"]
        loop = loop_on(backend, learning_rate=1e-6)
        await loop.step()
        assert loop.weights.sampler.audit.report is not None
        return loop.weights.sampler.audit.report.ok

    assert [asyncio.run(step(fault)) for fault in (False, True)] == [True, False]


def test_healthy_runs_raise_no_alarm() -> None:
    async def run(**settings: Any) -> list[bool | None]:
        options = {"dtype": settings.pop("dtype")} if "dtype" in settings else {}
        loop = loop_on(local(temperature=settings.get("temperature", 1.0), **options), **settings)
        await loop.run(2, progress=False)
        results = [SyncReport.from_metrics(r.metrics) for r in loop.records]
        return [report.ok for report in results if report]

    assert asyncio.run(run(learning_rate=3e-4)) == [True] * 2
    assert asyncio.run(run(temperature=0.6)) == [True] * 2
    assert asyncio.run(run(ppo_n_minibatches=2, policy_loss="ppo")) == [True] * 2
    assert False not in asyncio.run(run(dtype="bfloat16"))


def test_a_window_is_judged_by_the_record_after_it() -> None:
    async def run() -> None:
        loop = loop_on(local(), weight_sync_interval=2)
        await loop.run(4, progress=False)
        reports = [SyncReport.from_metrics(r.metrics) for r in loop.records]
        assert [report.version if report else None for report in reports] == [None, None, 1, None]
        assert loop.weights.sampler.audit.report is not None
        assert (
            loop.weights.sampler.audit.report.version,
            loop.weights.sampler.audit.report.ok,
        ) == (2, True)

    asyncio.run(run())


def test_a_step_that_is_undone_is_checked_again() -> None:
    async def run() -> None:
        loop = loop_on(local())
        await loop.step()
        await loop.undo()
        assert loop.weights.sampler.audit.probe is None
        await loop.step()
        assert loop.weights.sampler.audit.report is not None
        assert loop.weights.sampler.audit.report.ok

    asyncio.run(run())


def test_a_state_that_is_loaded_and_synced_by_hand_is_synced() -> None:
    "The sampler's version goes back with the weights, and its samples are as fresh as they are."

    async def run() -> None:
        backend = local()
        loop = loop_on(backend)
        await loop.step()
        await backend.policy.save_state("kept")
        await loop.run(2, progress=False)
        await backend.policy.load_state("kept")
        await backend.sync(await backend.policy.save_weights_for_sampler("again"))
        record = await loop.step()
        assert check_version(record, 1).ok is True
        assert record.metrics["staleness/max"] == 0

    asyncio.run(run())


def test_the_audit_leaves_samples_gradients_and_weights_as_they_are() -> None:
    "Samples, gradients and weights of a run are the same, bit by bit."

    async def run(audit: bool) -> list[dict[str, float]]:
        loop = loop_on(local(temperature=0.9), sync_audit=audit, temperature=0.9)
        await loop.run(2, progress=False)
        assert any(name.startswith("sync/") for name in loop.records[-1].metrics) is audit
        kept = ("loss", "grad_norm", "update_norm", "reward/mean")
        return [{name: r.metrics[name] for name in kept if name in r.metrics} for r in loop.records]

    assert asyncio.run(run(True)) == asyncio.run(run(False))


@pytest.mark.parametrize("well", [0, 1])
def test_no_reply_of_a_sampler_loses_an_update_or_a_sync(well: int) -> None:
    "One that cannot score is asked once; one that falls silent after the sync, again in the next step."

    async def run() -> None:
        loop = loop_on(local())
        asked = list[int]()
        score = loop.backend.sampler.logprobs

        async def first_only(tokens: Any) -> Any:
            asked.append(len(tokens))
            if len(asked) > well:
                raise BackendError("the server", got="no answer")
            return await score(tokens)

        loop.backend.sampler.logprobs = first_only
        for step in (1, 2, 3):
            record = await loop.step()
            assert (record.policy_version, loop.weights.sampler.audit.report) == (step, None)
        assert len(asked) == 1 + 2 * well

    asyncio.run(run())


def test_a_bug_in_a_sampler_is_raised() -> None:
    async def run() -> None:
        loop = loop_on(local())

        async def wrong(tokens: Any) -> Any:
            raise KeyError("prompt_logprobs")

        loop.backend.sampler.logprobs = wrong
        with pytest.raises(KeyError, match="prompt_logprobs"):
            await loop.step()

    asyncio.run(run())


@pytest.mark.parametrize(("value", "well"), [(np.nan, 0), (-np.inf, 1)])
def test_a_value_that_is_not_finite_is_no_evidence(value: float, well: int) -> None:
    async def run() -> None:
        loop = loop_on(local())
        asked = list[int]()
        score = loop.backend.sampler.logprobs

        async def corrupted(tokens: Any) -> Any:
            asked.append(len(tokens))
            scored = await score(tokens)
            return (
                scored
                if len(asked) <= well
                else replace(scored, values=np.append(scored.values[1:], value))
            )

        loop.backend.sampler.logprobs = corrupted
        await loop.step()
        assert (loop.policy_version, loop.weights.sampler.audit.report) == (1, None)
        assert loop.weights.sampler.audit.floor < 1e-4 or not well

    asyncio.run(run())


def test_a_sampler_without_such_a_method() -> None:
    async def run() -> None:
        backend = local()
        backend.sampler = SimpleNamespace(sample=backend.sampler.sample, policy_version=0)
        loop = loop_on(backend)
        await loop.step()
        assert (loop.policy_version, loop.weights.sampler.audit.report) == (1, None)

    asyncio.run(run())


def test_a_server_that_is_one_sync_late() -> None:
    async def run() -> None:
        machines = await open_run(World())
        held = list[Any]()
        load = machines.server.load

        def late(weights: Any) -> None:
            held.append({name: t.clone() for name, t in weights.items()})
            if len(held) > 1:
                load(held[-2])

        machines.server.load = late  # type: ignore[method-assign]
        loop = loop_on(machines.backend)
        lines = []
        for _ in range(3):
            await loop.step()
            assert loop.weights.sampler.audit.report is not None
            lines.append(loop.weights.sampler.audit.report.sentence)
        assert "changed nothing" in lines[0]
        assert "is late" in lines[1]
        assert "is late" in lines[2]

    asyncio.run(run())


def test_a_trainer_that_never_says_the_same_twice_and_does_not_learn() -> None:
    "The first step of a warm-up: nothing moves, and what the policy says differs."

    async def run() -> None:
        loop = loop_on(local(), warmup_steps=2, steps=4, lr_scheduler_type="linear")
        rng = np.random.default_rng(0)
        score = loop.backend.policy.forward

        async def noisy(datums: Any) -> Any:
            scored = await score(datums)
            return [
                replace(lp, values=lp.values + 1e-3 * rng.normal(size=len(lp.values)))
                for lp in scored
            ]

        loop.backend.policy.forward = noisy
        await loop.run(4, progress=False)
        results = [SyncReport.from_metrics(r.metrics) for r in loop.records]
        assert [report.ok for report in results if report] == [None, True, True, True]

    asyncio.run(run())


def test_a_window_without_a_record_after_it_warns() -> None:
    async def run() -> None:
        backend = local()
        backend.sync.served.clear()
        with pytest.warns(UserWarning, match="sync 1 changed nothing"):
            await loop_on(backend, weight_sync_interval=2).run(2, progress=False)

    asyncio.run(run())
