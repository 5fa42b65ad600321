"""The questions, and what is measured: reward, how often the calculator is called, how often that ends well."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from calculator import calculate
from rollout import make_rollout_fn

import rl_notebook as rln


def tool_rows(n: int, system: str = "", seed: int = 0) -> list[dict[str, Any]]:
    "`n` different questions such as `What is 3*4-5+9?`. The small model was trained on sums only."
    rng = np.random.default_rng(seed)
    rows = {}
    while len(rows) < n:
        digits = rng.integers(1, 10, size=4).tolist()
        signs = [*rng.choice(list("+-*"), size=3), ""]
        expression = "".join(f"{digit}{sign}" for digit, sign in zip(digits, signs, strict=True))
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": f"What is {expression}?"})
        rows[expression] = {
            "messages": messages,
            "expression": expression,
            "answer": str(calculate(expression)),
        }
    return list(rows.values())


def shares(samples: Sequence[rln.RolloutSample]) -> dict[str, float]:
    "Mean reward, share of rollouts that called the calculator, and share of those that were right."
    called = [s.reward for s in samples if s.info["calls"]]
    right = float(np.mean(called)) if called else 0.0
    return {
        "reward": float(np.mean([s.reward for s in samples])),
        "calls": len(called) / len(samples),
        "right": right,
    }


async def measure(setup: rln.RolloutSetup, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    "`shares` of one rollout per row."
    rollout_fn = make_rollout_fn(setup)
    samples = await asyncio.gather(*[rollout_fn({**row, "seed": i}) for i, row in enumerate(rows)])
    return shares([s for s in samples if s is not None])


def line(name: str, result: dict[str, float]) -> str:
    "What was measured, as a line of a table with a bar."
    numbers = f"reward {result['reward']:.3f}   called {result['calls']:.2f}   right if called {result['right']:.2f}"
    return f"{name:<17} {numbers}  {'#' * round(40 * result['reward'])}"
