"""What pre-flight says of a step's time (without update and sync) and memory before the first one, next to what the steps then take.

    python benchmarks/predict.py --setting tiny --json FILE
    python benchmarks/predict.py --setting smollm2 --json FILE

Pre-flight runs before each round of steps, so that both meet the same machine; a ratio is predicted over measured.
Steps are those of the recipes, without undo. The first round warms up, and tells the memory: later the process has had
its peak.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.config.config import Config
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.backends.work import peak_memory
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
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    result = asyncio.run(measure(SETTINGS[args.setting]))
    print(table(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
