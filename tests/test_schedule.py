"""The learning rate by step: transformers' own values, here and on a service, and the same by every way to a step."""

from __future__ import annotations

import asyncio
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from transformers import get_scheduler

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.config.config import Config
from rl_notebook.core.types import ConfigError
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.recipes.rl_loop import replay_step, train
from rl_notebook.runs.run import Run
from rl_notebook.config.settings import UpdateSettings, lr_factor
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_rows
from rl_notebook.insight.xray import check_gradient
from tiny_models import uneven

SMALL_RUN: dict[str, Any] = {
    "prompt_groups_per_step": 2,
    "completions_per_prompt": 4,
    "max_completion_tokens": 8,
}
SMALL_RUN |= {
    "max_seq_len": 64,
    "learning_rate": 1e-3,
    "kl_beta": 0.0,
    "rewards": ["test_schedule:uneven"],
}
LINEAR = {"lr_scheduler_type": "linear", "warmup_steps": 1}
SHAPES = [
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_min_lr",
    "inverse_sqrt",
]


def transformers_factors(shape: str, warm: int, of: int) -> list[float]:
    "The factors of transformers' scheduler, one per optimizer step."
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    more = {"min_lr_rate": 0.1} if shape == "cosine_with_min_lr" else None
    scheduler = get_scheduler(shape, optimizer, warm, of, scheduler_specific_kwargs=more)
    rates = []
    for _ in range(of):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("warm", "of"), [(0, 1), (0, 7), (1, 7), (5, 100), (10, 10), (12, 10)])
def test_the_values_are_those_of_transformers(shape, warm, of):
    warm = 0 if shape == "constant" else warm
    more = {"min_lr_rate": 0.1} if shape == "cosine_with_min_lr" else {}
    settings = UpdateSettings(lr_scheduler_type=shape, warmup_steps=warm, **more)
    ours = [lr_factor(settings, step, of) for step in range(1, of + 1)]
    np.testing.assert_allclose(ours, transformers_factors(shape, warm, of), rtol=1e-14, atol=1e-16)


def test_a_share_is_rounded_up_as_transformers_rounds_it():
    settings = UpdateSettings(lr_scheduler_type="linear", warmup_ratio=0.25)
    assert [lr_factor(settings, step, 10) for step in range(1, 11)] == pytest.approx(
        transformers_factors("linear", 3, 10)
    )


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"warmup_steps": 3}, "'constant' has no warm-up"),
        ({"lr_scheduler_type": "linear", "warmup_steps": 3, "warmup_ratio": 0.1}, "says the same"),
        ({"lr_scheduler_type": "cosine", "min_lr_rate": 0.1}, "min_lr_rate"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "Set both, or neither"),
        ({"lr_scheduler_type": "cosin"}, "Did you mean 'cosine'"),
        ({"lr_scheduler_type": "linear", "warmup_ratio": 1.5}, "at most 1"),
    ],
)
def test_what_would_be_ignored_is_rejected(settings, match):
    with pytest.raises(ConfigError, match=match):
        Config(**settings)


def learning_rates_of(records: Any) -> list[float]:
    "The learning rate that the optimizer reported, by step."
    return [record.metrics["learning_rate"] for record in records]


def grpo_loop(**settings: Any) -> GRPOLoop:
    "A loop over the toy task."
    cfg = Config(**{**SMALL_RUN, "steps": 4, **LINEAR, **settings})
    return GRPOLoop(
        open_local(*load_model("tiny"), reference=False),
        toy_rows(16),
        list(cfg.rewards),
        cfg,
        keep_undo=3,
    )


EXPECTED = [0.0, 1e-3, 1e-3 * (1 - 1 / 3), 1e-3 * (1 - 2 / 3)]


def test_a_loop_follows_it_and_records_it():
    loop = grpo_loop()
    records = asyncio.run(loop.run(progress=False))
    assert learning_rates_of(records) == EXPECTED
    assert [r.metrics["learning_rate/schedule"] for r in records] == [
        0.0,
        1.0,
        1 - 1 / 3,
        1 - 2 / 3,
    ]
    first = check_gradient(records[0])
    assert (first.ok, first.text) == (None, "the learning rate is 0 here, as its schedule has it")
    assert (
        "learning_rate/schedule"
        not in asyncio.run(
            grpo_loop(lr_scheduler_type="constant", warmup_steps=0, steps=1).run(progress=False)
        )[0].metrics
    )


def test_undo_branch_and_another_length():
    async def test() -> None:
        loop = grpo_loop()
        await loop.run(3, progress=False)
        third = loop.records[-1]
        await loop.undo()
        again = await loop.step()
        assert again is not None
        assert (learning_rates_of([again]), again.metrics["loss"]) == (
            learning_rates_of([third]),
            third.metrics["loss"],
        )
        other = await loop.branch(lr_scheduler_type="constant_with_warmup")
        assert learning_rates_of([await other.step()]) == [1e-3]
        loop.change(steps=7)  # the rest is spread over more steps
        assert learning_rates_of([await loop.step()]) == pytest.approx([1e-3 * (7 - 3) / (7 - 1)])

    asyncio.run(test())


def test_resumed_and_replayed_it_is_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    cfg = Config(
        **SMALL_RUN,
        **LINEAR,
        steps=4,
        max_rows=16,
        dcp_save_interval=2,
        log_path=str(tmp_path / "run"),
    )
    quiet: dict[str, Any] = {"say": lambda line: None, "progress": False}
    asyncio.run(train(cfg, **quiet))
    whole = [*Run.open(tmp_path / "run")]
    assert learning_rates_of(whole) == pytest.approx(EXPECTED)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "00004")
    asyncio.run(train(cfg, resume=True, **quiet))
    again = [*Run.open(tmp_path / "run")]
    assert [r.metrics["loss"] for r in again] == [r.metrics["loss"] for r in whole]
    assert learning_rates_of(again) == learning_rates_of(whole)
    result = asyncio.run(replay_step(tmp_path / "run", 2))
    assert result.same is not False, result  # without a KL term there is no reference to compare
    assert "optimize    the same" in repr(result)


def test_a_service_gets_it_with_every_optimizer_step(monkeypatch):
    pytest.importorskip("tinker")
    from rl_notebook.backends.services.tinker import open_tinker
    from rl_notebook.emulator import trainer
    from rl_notebook.emulator.service import start_emulator

    learning_rates = list[float]()
    key = "tml-a-key-of-the-tests"
    step = trainer.run_step

    def noting(learner: Any, adam: Any, *rest: Any) -> Any:
        learning_rates.append(adam.learning_rate)
        return step(learner, adam, *rest)

    monkeypatch.setattr(trainer, "run_step", noting)

    async def test(url: str) -> list[float]:
        where: dict[str, Any] = {"base_url": url, "base_model": "tiny", "lora_rank": 4}
        cfg = Config(**SMALL_RUN, **LINEAR, **where, backend="tinker", sync_audit=False, steps=4)
        quick = {
            "probing": False,
            "conformance": "off",
            "reference": False,
            "say": lambda line: None,
        }
        async with await open_tinker(
            **where, **quick, key=key, tokenizer=load_model("tiny")[1]
        ) as backend:
            return learning_rates_of(
                await GRPOLoop(backend, toy_rows(16), uneven, cfg).run(progress=False)
            )

    with start_emulator(key=key) as running:
        assert asyncio.run(test(running.url)) == EXPECTED
    assert learning_rates == EXPECTED
