"""How soon a slider of the what-if panel is answered, on a batch of 32 answers of 512 tokens.

    python benchmarks/whatif.py --json FILE

A slider is moved through all losses, KL weights, clips, corrections, aggregations and advantage scales. The time is
that from the new value to the finished HTML: freezing is done before, everything else is in it (advantages, loss,
gradient of the recorded and of the chosen settings, table, dots). The goal is 100 ms. The browser's share is not in it.
Next to the wall time is the processor's time, which is steadier when others use the machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_notebook.core.advantages import with_advantages
from rl_notebook.core.types import Logprobs, LossOutput, PromptGroup, RolloutSample
from rl_notebook.core.datums import attach, datums_from_groups
from rl_notebook.core.losses import POLICY_LOSSES
from rl_notebook.runs.records import StepRecord
from rl_notebook.views.whatif import WhatIfPanel

GOAL = 0.1  # seconds
PROMPT = 64  # tokens


def batch(
    groups: int = 4, completions: int = 8, tokens: int = 512, seed: int = 0
) -> tuple[StepRecord, list[Logprobs]]:
    "A step with every series a loss may read, and the logprobs of a policy that has moved."
    rng = np.random.default_rng(seed)

    def sample() -> RolloutSample:
        n = PROMPT + tokens
        mask = [0] * PROMPT + [1] * tokens
        logprobs = np.where(np.array(mask) == 1, -rng.exponential(0.5, n), np.nan)
        return RolloutSample(rng.integers(0, 1000, n), logprobs, mask, reward=float(rng.random()))

    sampled = [
        PromptGroup(tuple(sample() for _ in range(completions)), index=g) for g in range(groups)
    ]
    datums = datums_from_groups(with_advantages(sampled))

    def near(size):
        return [Logprobs(d.sampler_logprobs + rng.normal(0, size, len(d.weights))) for d in datums]

    policy = near(0.01)
    datums = attach(attach(datums, "old_logprobs", policy), "ref_logprobs", near(0.2))
    loss = LossOutput(0.0, {}, tuple(policy), tuple(np.zeros(len(d.weights)) for d in datums))
    options = {"policy_loss": "grpo", "kl_beta": 0.01, "max_completion_tokens": tokens}
    return StepRecord(1, with_advantages(sampled), datums, loss, options=options), near(0.1)


def moves() -> list[tuple[str, Any]]:
    "One change of one control after the other."
    out: list[tuple[str, Any]] = []
    for loss in POLICY_LOSSES:
        out += [
            ("policy_loss", loss),
            ("kl_beta", 0.1),
            ("kl_beta", 0.0),
            ("kl_estimator", "k1"),
            ("kl_beta", 0.5),
        ]
        if "eps_clip" in POLICY_LOSSES[loss][1]:
            out += [("kl_estimator", "k3")] + [("eps_clip", e) for e in (0.1, 0.3)]
        out += [
            ("tis", "token"),
            ("tis_cap", 2.0),
            ("tis_cap", 5.0),
            ("tis", "sequence"),
            ("tis", "off"),
        ]
        out += [("aggregation", a) for a in ("sequence_mean", "constant", "token_mean")]
        out += [("advantage_scale", a) for a in ("batch", "loo", "as recorded")]
    return out


def measure(
    record: StepRecord, later: list[Logprobs], rounds: int
) -> tuple[list[dict[str, Any]], int]:
    "Seconds of every move, and how many of them were answered with a reason instead of a table."
    panel = WhatIfPanel(record, later)
    answers = []
    reasons = 0
    panel.where.value = "after it moved"
    for turn in range(rounds):
        for name, value in moves():
            start = time.perf_counter()
            busy = time.process_time()
            panel.controls[name].value = value
            times = {
                "seconds": time.perf_counter() - start,
                "processor": time.process_time() - busy,
            }
            answers.append({"round": turn, "control": name, "value": value, **times})
            reasons += bool(panel.error)
    return answers, reasons


def quantiles(seconds: list[float]) -> dict[str, float]:
    "Median, 95 % quantile and maximum."
    return {
        "median": statistics.median(seconds),
        "p95": float(np.quantile(seconds, 0.95)),
        "max": max(seconds),
    }


def summary(answers: list[dict[str, Any]], reasons: int, tokens: int) -> dict[str, Any]:
    "Times of the answers after the first round, which pays for what is made once, and of the first round."
    after = [a for a in answers if a["round"] > 0]
    return {
        "tokens": tokens,
        "answers": len(after),
        "reasons": reasons,
        "seconds": quantiles([a["seconds"] for a in after]),
        "processor": quantiles([a["processor"] for a in after]),
        "first_round": quantiles([a["seconds"] for a in answers if a["round"] == 0]),
        "goal": GOAL,
        "within_goal": sum(a["seconds"] <= GOAL for a in after) / len(after),
        "machine": {"system": platform.platform(), "threads": torch.get_num_threads()},
    }


def table(result: dict[str, Any]) -> str:
    "What is printed."
    goal = f"{result['within_goal']:.1%} within {GOAL * 1000:.0f} ms"
    lines = [f"{result['answers']} answers on {result['tokens']} tokens, {goal}"]
    lines += [f"{'':<12}{'median':>10}{'p95':>10}{'max':>10}"]
    for name in ("seconds", "processor", "first_round"):
        lines.append(f"{name:<12}" + "".join(f"{1000 * s:>7.1f} ms" for s in result[name].values()))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--rounds", type=int, default=3, help="the first is not counted")
    args = parser.parse_args()
    record, later = batch()
    answers, reasons = measure(record, later, args.rounds)
    result = summary(answers, reasons, sum(d.num_loss_tokens for d in record.datums))
    print(table(result))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result | {"all": answers}, indent=1))


if __name__ == "__main__":
    main()
