"A service for all tests of a file; a small GRPO run on a service, and what has to be the same when it is made twice."

from __future__ import annotations

import asyncio
import functools
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from tiny_models import byte_tokenizer, tiny_model

from rl_notebook.emulator.service import RunningEmulator, start_emulator
from rl_notebook.backends.services.fireworks import open_fireworks
from rl_notebook.backends.services.tinker import open_tinker
from rl_notebook.config.config import Config
from rl_notebook.core.types import Datum
from rl_notebook.task.data import load_rows
from rl_notebook.recipes.rl_loop import Problem, RunResult, train
from rl_notebook.runs.records import StepRecord

QWEN = "accounts/fireworks/models/qwen3-8b"
SHAPE = "accounts/fireworks/trainingShapes/qwen3-8b-128k-h200"
GROUPS = 2
COMPLETIONS = 4
KEY = "tml-of-the-file"


@functools.cache
def service() -> RunningEmulator:
    "One emulator of all services, over the model that the local backends have."
    folder = Path(tempfile.mkdtemp(prefix="service-"))
    tiny_model().save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    return start_emulator(model=str(folder / "model"), folder=folder / "served", key=KEY)


@pytest.fixture(autouse=True, scope="module")
def no_service_is_left() -> Iterator[None]:
    yield
    if service.cache_info().currsize:
        service().stop()
        service.cache_clear()


def checksum(completion_text: str) -> float:
    "A reward that any other token changes, and that no two different answers share."
    return crc32(completion_text.encode()) / 2**32


def problem() -> Problem:
    "Sums that are too long for the model, so that its answers differ."
    terms = [
        "9+8+7+6+5+4+3+2",
        "31+47+58+66",
        "5+55+555",
        "2*3*4*5",
        "8-7+6-5",
        "1+1=3?",
        "99+1+99+1",
        "7+7+7+7+7+7",
    ]
    return Problem(
        load_rows([{"question": f"{t} = ?", "answer": ""} for t in terms]), (), [checksum]
    )


def config(backend: str, steps: int, log_path: Path | None, **more: Any) -> Config:
    "Two prompts of four short answers a step, with a KL term, all of it decided by one seed."
    sizes = {
        "completions_per_prompt": COMPLETIONS,
        "prompt_groups_per_step": GROUPS,
        "epochs": 1000,
    }
    sizes |= {"max_completion_tokens": 8, "max_seq_len": 256, "steps": steps, "max_rows": 8}
    learning = {
        "learning_rate": 2e-4,
        "kl_beta": 0.05,
        "drop_zero_variance_groups": False,
        "seed": 5,
        "base_model": QWEN,
    }
    where = {"backend": backend, "log_path": None if log_path is None else str(log_path)}
    if backend == "fireworks":
        where["weight_sync"] = {"weight_sync_timeout": 60}
        where["trainer"] = {
            "training_shape_id": SHAPE,
            "reference_training_shape_id": f"{SHAPE}-forward",
        }
        where["deployment"] = {"tokenizer_model": "tiny", "deployment_id": "serving"}
    else:
        where |= {"tokenizer_model": "tiny", "lora_rank": 4}
    return Config(**sizes, **learning, **where, **more)


@dataclass(frozen=True)
class Outcome:
    "What a run came to."

    result: RunResult
    records: Sequence[StepRecord]
    logprobs: np.ndarray  # (T,) of fixed datums, by the final policy
    served: np.ndarray  # (T,) of the same, by the sampler
    reconnects: int
    updates: int  # that the policy holds, as its service counts them
    weights: Mapping[str, np.ndarray]  # of the policy, read in the service's memory
    snapshot: Mapping[str, np.ndarray]  # what was last saved for the sampler


FIXED = ([2, 5, 72, 105, 33, 10, 40], [2, 5, 50, 44, 51, 62, 51], [2, 80, 81, 82, 83, 84])


def fixed_datums() -> list[Datum]:
    "Sequences that no run samples."
    return [
        Datum(np.array(tokens), np.array([0] + [1] * (len(tokens) - 2)), sample=i)
        for i, tokens in enumerate(FIXED)
    ]


async def train_and_measure(
    cfg: Config, backend: Any, running: RunningEmulator, **options: Any
) -> Outcome:
    "Train, then look at the weights from every side."
    records: list[StepRecord] = []
    silent = {"say": lambda line: None, "progress": False}
    result = await train(
        cfg, problem=problem(), backend=backend, on_record=[records.append], **silent, **options
    )
    datums = fixed_datums()
    scored = await backend.policy.forward(datums)
    served = [await backend.sampler.logprobs(d.tokens) for d in datums]

    def flat(series):
        return np.concatenate([lp.values[d.active] for lp, d in zip(series, datums, strict=True)])

    trainer = policy_trainer(running, backend)
    inside = (
        *updates_and_weights(trainer, backend.policy.link.client.model_id),
        newest_snapshot(trainer),
    )
    return Outcome(result, records, flat(scored), flat(served), backend.policy.reconnects, *inside)


def policy_trainer(running: RunningEmulator, backend: Any) -> Any:
    "The emulated trainer of a policy."
    infra = getattr(backend, "infra", None)
    job = infra.policy_job_id if infra else ""
    return running.emulator.site.trainers[
        f"accounts/local/rlorTrainerJobs/{job}" if job else "root"
    ]


def updates_and_weights(trainer: Any, model_id: str) -> tuple[int, dict[str, np.ndarray]]:
    "The number of updates of a model in the emulator's memory, and its weights."
    state = trainer.memory.learners[model_id].state
    return state.steps, {name: p.detach().numpy().copy() for name, p in state.params.items()}


def newest_snapshot(trainer: Any) -> dict[str, np.ndarray]:
    "What was last saved for the sampler, from the emulator's disk."
    pages = trainer.snapshots.folder.glob("[!.]*/state.json")
    newest = max(pages, key=lambda page: page.stat().st_mtime_ns).parent.name
    return {name: tensor.numpy() for name, tensor in trainer.snapshots.load(newest)[0].items()}


async def open_service(running: RunningEmulator, cfg: Config, **options: Any) -> Any:
    "The backend of a config, on an emulator."
    where = {"key": running.key, "base_url": running.url, "say": lambda line: None, "pause_s": 0.05}
    if cfg.backend == "fireworks":
        return await open_fireworks(cfg, **where, grace_s=0, poll_interval_s=0.05, **options)
    names = {
        "base_model": cfg.base_model,
        "lora_rank": cfg.lora_rank,
        "tokenizer": cfg.tokenizer_model,
    }
    return await open_tinker(
        **names, seed=cfg.seed, conformance="off", probing=False, **where, **options
    )


def killed_config(folder: Path | None, steps: int, every: int, name: str) -> Config:
    "The config of a run with checkpoints; its jobs and its deployment have the name."
    cfg = config("fireworks", steps, folder, dcp_save_interval=every, run_name=name)
    return replace(cfg, deployment=replace(cfg.deployment, deployment_id=name))


async def run_in_this_process(folder: Path, steps: int, every: int, name: str) -> None:
    "Train on the service of the environment, and say each step."
    cfg = killed_config(folder, steps, every, name)
    quick = {"grace_s": 0, "poll_interval_s": 0.05, "say": lambda line: None}
    async with await open_fireworks(cfg, **quick) as backend:

        def tell(record):
            return print(f"step {record.step} is recorded", flush=True)

        await train(cfg, problem=problem(), backend=backend, on_record=[tell], progress=False)


if __name__ == "__main__":
    asyncio.run(
        run_in_this_process(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    )
