"Serverless training of Fireworks, with its own SDK against the emulator."

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

import rl_notebook as rln
from rl_notebook.core.types import ConfigError

pytest.importorskip("fireworks.training.sdk", reason="the SDK of Fireworks is not installed")

MODEL = "accounts/fireworks/models/qwen3p6-27b"


@pytest.fixture(scope="module")
def running() -> Iterator[Any]:
    from rl_notebook.emulator.service import start_emulator

    with start_emulator("tiny") as emulator:
        yield emulator


@contextlib.asynccontextmanager
async def open_serverless(
    running: Any, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> AsyncIterator[Any]:
    "A backend and its config."
    for name, value in running.environment().items():
        monkeypatch.setenv(name, value)
    defaults = {
        "backend": "tinker",
        "base_url": f"{running.url}/training/v1/serverless",
        "base_model": MODEL,
    }
    defaults |= {
        "tokenizer_model": "tiny",
        "lora_rank": 8,
        "kl_beta": 0.0,
        "kl_metric": False,
        "learning_rate": 2e-3,
    }
    defaults |= {
        "prompt_groups_per_step": 2,
        "completions_per_prompt": 8,
        "max_completion_tokens": 16,
        "max_seq_len": 96,
    }
    cfg = rln.Config(**(defaults | settings))
    async with await rln.open_backend(cfg, lambda line: None) as backend:
        yield backend, cfg


def pool(running: Any) -> Any:
    return running.emulator.site.trainers["pool"].memory


def test_a_run_trains_in_one_session_and_leaves_none(running: Any, monkeypatch: pytest.MonkeyPatch):
    async def test() -> None:
        async with open_serverless(running, monkeypatch) as (backend, cfg):
            assert not backend.checks.failed
            assert len(pool(running).sessions) == 1
            loop = rln.GRPOLoop(
                backend, rln.toy_rows(16), lambda text: float(sum(map(ord, text)) % 2), cfg
            )
            records = [await loop.step() for _ in range(2)]
            for record in records:
                assert "Nothing to fix" in (await rln.diagnose(record)).sentence
            versions = [s.policy_version for r in records for g in r.groups for s in g.samples]
            assert sorted(set(versions)) == [0, 1]
        assert not pool(running).sessions
        assert not pool(running).learners

    asyncio.run(test())


def test_a_snapshot_is_sampled_in_its_session_only(running: Any, monkeypatch: pytest.MonkeyPatch):
    async def test() -> None:
        async with (
            open_serverless(running, monkeypatch) as (backend, _cfg),
            open_serverless(running, monkeypatch),
        ):
            path = await backend.policy.save_weights_for_sampler("mine")
            mine, other = sorted(pool(running).sessions, key=lambda id: f"/{id}/" not in path)
            body = {"prompt": [1, 2, 3], "max_tokens": 2}
            headers = {"Authorization": f"Bearer {running.environment()['FIREWORKS_API_KEY']}"}
            url = f"{running.url}/training/v1/serverless/inference/v1/completions"
            result = {}
            async with httpx.AsyncClient(headers=headers) as client:
                for session in (mine, other, "ts-none"):
                    model = f"accounts/local/trainingSessions/{session}/checkpoints/{path}"
                    result[session] = (
                        await client.post(url, json=body | {"model": model})
                    ).status_code
            assert result == {mine: 200, other: 404, "ts-none": 404}

    asyncio.run(test())


def test_settings_that_serverless_training_lacks_are_rejected(
    running: Any, monkeypatch: pytest.MonkeyPatch
):
    async def test() -> None:
        with pytest.raises(ConfigError, match="kl_beta=0"):
            async with open_serverless(running, monkeypatch, kl_beta=0.1):
                pass

    asyncio.run(test())
