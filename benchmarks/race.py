"""What `rln.race` promises, held against races of the tiny model: less variance from common random numbers, few false answers,
and the power that a plan states.

    python benchmarks/race.py --record curves.json --seeds 40
    python benchmarks/race.py --curves curves.json --json FILE

The first line runs three variants of the tiny model side by side, eight seeds at a time, and keeps each reward; it takes about
an hour on one core. The second one computes the figures from them: a race is a sample of the recorded seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rl_notebook.config.config import Config
from rl_notebook.core.intervals import detection_power
from rl_notebook.recipes.race import Race, race, recent_means
from rl_notebook.task.toy import toy_reward, toy_rows

STEPS = 20
EVERY = 4  # steps between two evaluations
BASE = Config(
    prompt_groups_per_step=4,
    completions_per_prompt=8,
    max_completion_tokens=24,
    learning_rate=1e-4,
    eval_interval=EVERY,
)
VARIANTS = {
    "grpo": BASE,
    "dr_grpo": replace(BASE, advantage_scale="none", aggregation="constant"),
    "slower": replace(BASE, learning_rate=3e-5),
}
Curves = dict[str, dict[str, np.ndarray]]  # metric -> variant -> (seeds, steps)


def record(path: Path, seeds: int, at_once: int = 8) -> None:
    "Race all variants to the end with many seeds, and add their rewards to a file as they come."
    rows = toy_rows(BASE.prompt_groups_per_step * STEPS)
    held_out = toy_rows(32, split="heldout")
    for first in range(0, seeds, at_once):
        chosen = range(first, min(first + at_once, seeds))
        going = race(
            VARIANTS,
            rows,
            toy_reward,
            seeds=chosen,
            steps=STEPS,
            eval_rows=held_out,
            stop=False,
            on_step=lambda r: print(f"seeds {r.seeds}: step {r.taken}", flush=True),
            progress=False,
        )
        finished = asyncio.run(going)
        lines = json.loads(path.read_text()) if path.exists() else []
        for (variant, seed), loop in finished.loops.items():
            for metric in ("reward", "eval/reward"):
                values = [r.metrics.get(metric) for r in loop.records]
                lines.append({"variant": variant, "seed": seed, "metric": metric, "values": values})
        path.write_text(json.dumps(lines) + "\n")


def read(path: Path) -> Curves:
    "The rewards of a file."
    curves: dict[str, dict[str, list]] = {}
    for line in json.loads(path.read_text()):
        values = [np.nan if v is None else v for v in line["values"]]
        curves.setdefault(line["metric"], {}).setdefault(line["variant"], []).append(values)
    return {m: {v: np.array(c) for v, c in by.items()} for m, by in curves.items()}


def variance_ratios(curves: Curves, steps: Sequence[int]) -> list[dict[str, Any]]:
    "Variance of the difference of pairs with the same seed, over that of pairs with other seeds."
    rows = []
    for metric, window in (("reward", 1), ("reward", 5), ("eval/reward", EVERY)):
        means = {v: recent_means(c, window) for v, c in curves[metric].items()}
        for variant in [*VARIANTS][1:]:
            ours, theirs = means[variant], means["grpo"]
            paired = (ours - theirs).var(0, ddof=1)
            unpaired = ours.var(0, ddof=1) + theirs.var(0, ddof=1)
            ratios = {step: float(paired[step - 1] / unpaired[step - 1]) for step in steps}
            rows.append({"metric": metric, "window": window, "variant": variant, "ratio": ratios})
    return rows


def share_of_answers(
    first: np.ndarray, other: np.ndarray, seeds: int, races: int, paired: bool, difference: float
) -> dict[str, float]:
    "How races of so many seeds, sampled from recorded ones, are answered."
    rng = np.random.default_rng(seeds)
    answers = list[str]()
    for _ in range(races):
        chosen = rng.permutation(len(first))[: seeds if paired else 2 * seeds]
        ours = other[chosen[-seeds:]]
        sampled = {"a": first[chosen[:seeds]], "b": ours}
        result = Race(sampled, tuple(range(seeds)), STEPS, difference)
        answers.append(result.results[0].answer)
    kinds = ("better", "worse", "no difference", "undecided")
    return {kind: answers.count(kind) / races for kind in kinds}


def with_difference(first: np.ndarray, other: np.ndarray, difference: float) -> np.ndarray:
    "The other curves, their mean difference to the first replaced by one that grows to this and stays for the last five steps."
    ramp = np.minimum(np.arange(STEPS) / (STEPS - 5), 1)
    return other + (first - other).mean(0) + difference * ramp


def stated_and_found(
    curves: Curves, variant: str, difference: float, pilot: int, seeds: int, races: int
) -> dict[str, Any]:
    "The power that pilots state for a true difference, and the share of races that find it; seeds are sampled with replacement."
    first = curves["reward"][variant]
    other = with_difference(first, curves["reward"]["grpo"], difference)
    differences = recent_means(other, 5)[:, -1] - recent_means(first, 5)[:, -1]
    rng = np.random.default_rng(1)
    stated, found, earlier = [], [], []
    for _ in range(races):
        sample = rng.integers(len(first), size=pilot)
        rest = rng.integers(len(first), size=seeds)
        tried = Race({"a": first[rest], "b": other[rest]}, tuple(range(seeds)), STEPS)
        found.append(tried.leads("b")[-1].answer == "better")
        earlier.append(tried.results[0].answer == "better")
        std = differences[sample].std(ddof=1)
        stated.append(detection_power(std, pilot - 1, difference, seeds, tried.levels[-1]))
    return {
        "pair": f"{variant}, grpo",
        "difference": difference,
        "pilot": pilot,
        "seeds": seeds,
        "stated": round(float(np.mean(stated)), 3),
        "found at the last look": round(float(np.mean(found)), 3),
        "found at any look": round(float(np.mean(earlier)), 3),
        "pilots within 10 points": float(np.mean(np.abs(np.array(stated) - np.mean(found)) <= 0.1)),
    }


def figures(curves: Curves, races: int) -> dict[str, Any]:
    "All figures."
    steps = (2, 4, 8, 12, 16, 20)
    rewards = curves["reward"]
    equal = {
        f"{name}, {seeds} seeds": share_of_answers(
            rewards[name], rewards[name], seeds, races, paired=False, difference=0.05
        )
        for name in VARIANTS
        for seeds in (2, 4, 8)
    }
    others = {
        f"{name} to grpo, {seeds} seeds, {'paired' if paired else 'unpaired'}": share_of_answers(
            rewards["grpo"], rewards[name], seeds, races, paired=paired, difference=0.05
        )
        for name in ("dr_grpo", "slower")
        for seeds in (4, 8)
        for paired in (True, False)
    }
    powers = [
        stated_and_found(curves, variant, difference, pilot, seeds, races)
        for variant in ("dr_grpo", "slower")
        for difference in (0.02, 0.04, 0.08, 0.12)
        for pilot, seeds in ((4, 4), (8, 4), (8, 8))
    ]
    ratios = variance_ratios({m: curves[m] for m in curves}, steps)
    return {
        "seeds": len(rewards["grpo"]),
        "variance": ratios,
        "equal": equal,
        "others": others,
        "power": powers,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--record", type=Path, help="file to add recorded rewards to")
    parser.add_argument("--seeds", type=int, default=40, help="of each variant, to record")
    parser.add_argument("--curves", type=Path, help="file of recorded rewards")
    parser.add_argument("--races", type=int, default=200, help="of each kind")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args(arguments)
    if args.record:
        record(args.record, args.seeds)
    if args.curves or args.record:
        result = figures(read(args.curves or args.record), args.races)
        for part, rows in result.items():
            print(f"\n{part}")
            for row in rows.items() if isinstance(rows, dict) else np.atleast_1d(rows):
                print("  ", row)
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
