"""Config and wiring: what is trained on which rows, with which rollout. Run it: python examples/single_turn/train.py"""

from __future__ import annotations

from rollout import make_rollout_fn

from rl_notebook.data import load_rows
from rl_notebook.recipes.rl_loop import Config, Problem, main
from rl_notebook.toy import toy_rows

cfg = Config(
    base_model="tiny",
    steps=20,
    prompt_groups_per_step=8,
    completions_per_prompt=8,
    max_completion_tokens=24,
    max_seq_len=96,
    learning_rate=1e-4,
    policy_loss="grpo",
    kl_beta=0.01,
)

problem = Problem(
    rows=load_rows(toy_rows(512, seed=1)),
    eval_rows=load_rows(toy_rows(100, seed=1, split="heldout")),
    reward=make_rollout_fn,
)

if __name__ == "__main__":
    print(main(cfg, problem=problem))
