"""What pre-flight says of a step's time (without update and sync) and memory before the first one, next to what the steps then take.

    python benchmarks/predict.py --setting tiny --json FILE
    python benchmarks/predict.py --setting smollm2 --json FILE
    python benchmarks/predict.py --unloaded smollm2 --json FILE

Pre-flight runs before each round of steps, so that both meet the same machine; a ratio is predicted over measured.
Steps are those of the recipes, without undo. The first round warms up, and tells the memory: later the process has had
its peak.

`--unloaded` compares what `predict_step` says before a model is loaded, all phases of a step, with real steps of ten
settings. Each setting has its own process, since a process keeps its peak of memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.config.config import Config
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.backends.work import peak_memory
from rl_notebook.recipes.open import local_options
from rl_notebook.recipes.predict import PHASES as ALL_PHASES
from rl_notebook.recipes.predict import predict_step
from rl_notebook.task.data import Row
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_format_reward, toy_reward, toy_rows
from rl_notebook.experiments.preflight import preflight

PHASES = ("sample", "reference", "backward")  # that pre-flight runs


@dataclass(frozen=True)
class Setting:
    "A model and a step of it."

    model: str  # for `load_model`
    tokens: int  # of a completion, at most
    prompts: int = 4
    completions: int = 8
    samples: int = 16  # of each prompt that pre-flight samples
    steps: int = 6  # in a round
    rounds: int = 4


SETTINGS = {
    "tiny": Setting("tiny", 24),
    "smollm2": Setting("smollm2", 32, samples=4, steps=2, rounds=3),
}


def any_length(text: str) -> float:
    "A grade by which completions of a model that cannot add differ."
    return (len(text) % 7) / 7


async def measure(setting: Setting) -> dict[str, Any]:
    "Rounds of pre-flight and steps, on one backend and one loop."
    backend = open_local(*load_model(setting.model), device="cpu")
    rows = toy_rows(4 * setting.prompts * setting.steps * setting.rounds, seed=1)
    reward = [toy_reward, toy_format_reward] if setting.model == "tiny" else [any_length]
    shape = {
        "prompt_groups_per_step": setting.prompts,
        "completions_per_prompt": setting.completions,
    }
    cfg = Config(
        **shape, max_completion_tokens=setting.tokens, kl_beta=0.01, learning_rate=1e-6, steps=None
    )
    loop = GRPOLoop(backend, rows, reward, cfg, keep_undo=0)
    rounds = []
    for turn in range(setting.rounds):
        flight = await preflight(
            backend, rows, reward, cfg, prompts=setting.prompts, samples=setting.samples
        )
        assert flight.cost is not None
        records = [await loop.step() for _ in range(setting.steps)]
        took = {p: statistics.mean(r.seconds.get(p, 0.0) for r in records if r) for p in PHASES}
        total = statistics.median(sum(r.seconds.get(p, 0.0) for p in PHASES) for r in records if r)
        predicted = {p: flight.cost.step_seconds.get(p, 0.0) for p in PHASES}
        memory = {"predicted_gb": flight.cost.step_memory, "measured_gb": peak_memory()["process"]}
        times = {"predicted": sum(predicted.values()), "measured": total}
        rounds.append(
            {"round": turn, **times, "phases": {"predicted": predicted, "measured": took}, **memory}
        )
    return {
        "setting": asdict(setting),
        "rounds": rounds,
    }  # type: ignore[arg-type]


# --- before a model is loaded ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unloaded:
    "A step that is predicted before its model is loaded. All prompts, and all completions, have one length."

    groups: int
    completions: int  # of each
    prompt: int  # tokens
    tokens: int  # of a completion
    settings: dict[str, Any] = field(default_factory=dict)  # of the config

    def config(self, model: str) -> Config:
        "The config of such steps."
        shape = {
            "prompt_groups_per_step": self.groups,
            "completions_per_prompt": self.completions,
            "max_completion_tokens": self.tokens,
            "max_seq_len": self.prompt + self.tokens,
        }
        given = {"kl_beta": 0.0, "learning_rate": 1e-6, "steps": None, "sync_audit": False}
        return Config(base_model=model, **shape, **(given | self.settings))


UNLOADED = (
    Unloaded(4, 8, 100, 32),
    Unloaded(4, 8, 100, 32, {"kl_beta": 0.01}),
    Unloaded(8, 8, 60, 48),
    Unloaded(8, 8, 60, 48, {"max_samples_per_fwd_bwd": 16}),
    Unloaded(8, 8, 60, 48, {"lora_rank": 16}),
    Unloaded(4, 8, 100, 32, {"dtype": "bfloat16"}),
    Unloaded(2, 8, 200, 128),
    Unloaded(4, 4, 400, 64),
    Unloaded(1, 8, 100, 256),
    Unloaded(2, 16, 60, 96, {"temperature": 0.7}),
)


async def measure_unloaded(model: str, case: Unloaded, steps: int) -> dict[str, Any]:
    "What is predicted, and then what steps take after the first; raises `AssertionError` where a completion is shorter."
    cfg = case.config(model)
    predicted = await predict_step(cfg, prompt_tokens=case.prompt)
    loaded, tokenizer = load_model(model, dtype=cfg.dtype)
    async with open_local(loaded, tokenizer, **local_options(cfg)) as backend:
        backend.sampler.engine.eos_token_ids = frozenset()  # type: ignore[attr-defined]
        ids = np.random.default_rng(2).integers(10, 250, (case.groups * steps, case.prompt))
        rows = [Row(f"r{i}", prompt_tokens=tuple(row)) for i, row in enumerate(ids.tolist())]
        loop = GRPOLoop(backend, rows, [any_length], cfg, keep_undo=0)
        records = [await loop.step() for _ in range(steps)]
    samples = [s for r in records if r for g in r.groups for s in g.samples]
    assert {s.completion_len for s in samples} == {case.tokens}
    seconds = {
        p: statistics.median(r.seconds.get(p, 0.0) for r in records[1:] if r) for p in ALL_PHASES
    }
    return {
        "setting": asdict(case),
        "seconds": {"predicted": dict(predicted.seconds), "measured": seconds},
        "memory_gb": {"predicted": dict(predicted.memory), "measured": peak_memory()["process"]},
    }


def run_unloaded(model: str, steps: int) -> dict[str, Any]:
    "Every setting in its own process; raises `CalledProcessError`."
    results = []
    print(f"{'':<64}{'predicted':>11}{'measured':>11}{'ratio':>8}")
    for number, case in enumerate(UNLOADED):
        command = [sys.executable, __file__, "--unloaded", model, "--number", str(number)]
        command += ["--steps", str(steps)]
        text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        result = json.loads(text.splitlines()[-1])
        name = f"{case.groups} x {case.completions}, {case.prompt} + {case.tokens} tokens"
        name = " ".join([name, *(f"{k}={v}" for k, v in case.settings.items())])
        seconds, memory = result["seconds"], result["memory_gb"]
        totals = [sum(seconds[side].values()) for side in ("predicted", "measured")]
        print(f"{name:<56}{line('s', *totals)[12:]}")
        print(f"{'':<56}{line('GB', sum(memory['predicted'].values()), memory['measured'])[12:]}")
        results.append(result)
    return {"model": model, "cpus": os.cpu_count(), "load": os.getloadavg(), "settings": results}


def table(result: dict[str, Any]) -> str:
    "A line for each round, the phases of the last, and the memory of the first."
    rounds = result["rounds"]
    lines = [f"{'seconds of a step':<20}{'predicted':>11}{'measured':>11}{'ratio':>8}"]
    lines += [line(f"round {r['round']}", r["predicted"], r["measured"]) for r in rounds]
    lines += [
        line(p, *(rounds[-1]["phases"][side][p] for side in ("predicted", "measured")))
        for p in PHASES
    ]
    ratio = statistics.median(r["predicted"] / r["measured"] for r in rounds[1:])
    predicted = rounds[0]["predicted_gb"]
    peak = rounds[0]["measured_gb"]
    lines.append(line("memory, GB", predicted, peak))
    return "\n".join(
        [
            *lines,
            f"{result['setting']['model']}: median ratio of the rounds after the first {ratio:.2f}",
        ]
    )


def line(name: str, predicted: float, took: float) -> str:
    "One row of the table."
    return f"{name:<20}{predicted:>11.4f}{took:>11.4f}{predicted / took if took else float('nan'):>8.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--setting", choices=SETTINGS, default="tiny")
    parser.add_argument(
        "--unloaded", metavar="MODEL", help="ten settings of a model, before it is loaded"
    )
    parser.add_argument("--number", type=int, help="one of the ten settings, as JSON")
    parser.add_argument("--steps", type=int, default=4, help="of each; the first is left out")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    if args.number is not None:
        case = UNLOADED[args.number]
        print(json.dumps(asyncio.run(measure_unloaded(args.unloaded, case, args.steps))))
        return
    if args.unloaded:
        result = run_unloaded(args.unloaded, args.steps)
    else:
        result = asyncio.run(measure(SETTINGS[args.setting]))
        print(table(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
