"""Config and wiring of the tool example. Run it: python examples/tool_use/train.py

Any setting may follow, such as --seed 1, and --warm-start N. Another backend is a setting, too: see examples/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
from rollout import HOW, make_rollout_fn
from task import line, measure, shares, tool_rows
from warm_start import warm_start

import rl_notebook as rln
from rl_notebook.cli import option_values
from rl_notebook.loop.setup import rollout_setup
from rl_notebook.recipes.async_rl_loop import Config, train

SETTINGS = {
    "base_model": "tiny",
    "steps": 80,
    "prompt_groups_per_step": 8,
    "completions_per_prompt": 8,
    "max_completion_tokens": 24,  # of each turn
    "max_seq_len": 256,  # of all turns
    "learning_rate": 5e-4,
    "kl_beta": 0.0,
}
# rows to measure on, rows of the warm start, rows for RL: all different
HELD_OUT = 200
DEMONSTRATED = 500
ROWS = 1500
WARM_STEPS = 250  # for the small model, which has never seen a call; others read the instructions


def curve(say: Callable[[str], Any], every: int = 10) -> Callable[[rln.StepRecord], None]:
    "A line for n steps: means over what was sampled for training."
    history: list[dict[str, float]] = []

    def on_record(record: rln.StepRecord) -> None:
        history.append(shares([s for g in record.groups for s in g.samples]))
        if len(history) % every == 0:
            means = {
                name: float(
                    np.mean([metrics_of_step[name] for metrics_of_step in history[-every:]])
                )
                for name in history[0]
            }
            say(line(f"  steps to {record.step}", means))

    return on_record


async def run(
    cfg: Config, warm_steps: int, say: Callable[[str], Any] = print, held_out: int = HELD_OUT
) -> list[Any]:
    "Measure, warm up, measure, train, measure; returns what was measured."
    small = cfg.base_model == "tiny" or (
        cfg.deployment is not None and cfg.deployment.tokenizer_model == "tiny"
    )
    rows = tool_rows(held_out + DEMONSTRATED + ROWS, system="" if small else HOW)
    test = rows[:held_out]
    shown = rows[held_out:][:DEMONSTRATED]
    rows = rows[held_out + DEMONSTRATED :]
    async with await rln.open_backend(cfg, say) as backend:
        setup = rollout_setup(backend, cfg)
        results = [await measure(setup, test)]
        say(line("base model", results[-1]))
        if warm_steps:
            await warm_start(backend, shown, warm_steps, cfg.seed)
            results.append(await measure(setup, test))
            say(line("after warm start", results[-1]))
        wiring = {"rollout_fn_factory": make_rollout_fn, "rows": rows, "backend": backend}
        await train(cfg, **wiring, on_record=[curve(say)], say=lambda verdict: None)
        results.append(await measure(setup, test))
        say(line("after RL", results[-1]))
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--warm-start", type=int, help=f"supervised steps first; the small model needs {WARM_STEPS}"
    )
    args, rest = parser.parse_known_args()
    cfg = Config.from_dict(SETTINGS, option_values(rest))
    default = WARM_STEPS if cfg.base_model == "tiny" else 0
    asyncio.run(run(cfg, default if args.warm_start is None else args.warm_start))
