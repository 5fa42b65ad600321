"""Config and wiring of the plainest example. Run it: python examples/single_turn_token_in/train.py

Any setting may follow, such as --steps 40 or --seed 1. Another backend is a setting, too: see examples/README.md.
"""

from __future__ import annotations

import sys
from typing import Any

from rollout import make_rollout_fn

import rl_notebook as rln
from rl_notebook.backends.services.link import open_tokenizer
from rl_notebook.task.chat import encode_prompt
from rl_notebook.cli import option_values
from rl_notebook.recipes.async_rl_loop import Config, main

SETTINGS = {
    "base_model": "tiny",
    "steps": 20,
    "prompt_groups_per_step": 8,
    "completions_per_prompt": 8,
    "max_completion_tokens": 24,
    "max_seq_len": 96,
    "learning_rate": 1e-4,
    "kl_beta": 0.01,
}


def token_rows(tokenizer: Any, n: int, split: str = "train") -> list[dict[str, Any]]:
    "Rows that are tokens already; the author of a data set chooses what encodes them."
    rows = rln.load_rows(rln.toy_rows(n, seed=1, split=split))
    return [
        {"prompt_token_ids": encode_prompt(tokenizer, row), "answer": row.answer} for row in rows
    ]


if __name__ == "__main__":
    cfg = Config.from_dict(SETTINGS, option_values(sys.argv[1:]))
    tokenizer = open_tokenizer(cfg.deployment and cfg.deployment.tokenizer_model, cfg.base_model)
    result = main(
        cfg,
        rollout_fn_factory=make_rollout_fn,
        rows=token_rows(tokenizer, 512),
        eval_rows=token_rows(tokenizer, 100, "heldout"),
    )
    print(result)
