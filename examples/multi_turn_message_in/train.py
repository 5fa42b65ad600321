"""Config and wiring of the retry example. Run it: python examples/multi_turn_message_in/train.py

Any setting may follow, such as --steps 20 or --seed 1. Another backend is a setting, too: see examples/README.md.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from rollout import make_rollout_fn

import rl_notebook as rln
from rl_notebook.cli import option_values
from rl_notebook.recipes.async_rl_loop import Config, main

SETTINGS = {
    "base_model": "tiny",
    "steps": 40,
    "prompt_groups_per_step": 8,
    "completions_per_prompt": 8,
    "max_completion_tokens": 24,  # of each turn
    "max_seq_len": 192,  # of all turns
    "learning_rate": 2e-4,
    "kl_beta": 0.01,
}


def messages(row: dict[str, str]) -> dict[str, Any]:
    "A question as a conversation that the policy is to continue with."
    conversation = [
        {"role": "system", "content": "Answer after ####."},
        {"role": "user", "content": row["question"]},
    ]
    return {"messages": conversation, "answer": row["answer"]}


def learnable(group: rln.PromptGroup) -> bool:
    "Groups whose rewards are all equal have nothing to compare."
    return len(set(group.rewards.tolist())) > 1


def show(record: rln.StepRecord) -> None:
    "A line of the curve."
    samples = [s for g in record.groups for s in g.samples]
    first = np.mean([bool(s.info["right"]) and s.info["turns"] == 1 for s in samples])
    ever = np.mean([bool(s.info["right"]) for s in samples])
    reward = float(np.mean([s.reward for s in samples]))
    bar = "#" * round(40 * reward)
    print(
        f"step {record.step:3}  reward {reward:.3f}  right at once {first:.2f}, in the end {ever:.2f}  {bar}"
    )


if __name__ == "__main__":
    result = main(
        Config.from_dict(SETTINGS, option_values(sys.argv[1:])),
        rollout_fn_factory=make_rollout_fn,
        rows=[messages(row) for row in rln.toy_rows(1000, seed=1)],
        eval_rows=[messages(row) for row in rln.toy_rows(100, seed=1, split="heldout")],
        dynamic_filter_fn=learnable,
        on_record=[show],
        say=lambda verdict: None,
    )
    print(result)
