"""GRPO on Fireworks as a recipe: a `Config`, `main(cfg)`, and all else is handled. In the words of three guides.

FIREWORKS_API_KEY=... python examples/fireworks/recipe.py
"""

from __future__ import annotations

import argparse
from typing import Any

from task import SAMPLE, service, tokenizer_folder

from rl_notebook.config.config import (
    DeployConfig,
    HotloadConfig,
    InfraConfig,
    TrainerConfig,
    WandBConfig,
    WeightSyncConfig,
)
from rl_notebook.recipes.rl_loop import Config, main

SPELLINGS = ("trainer", "infra", "hotload")


def options() -> argparse.Namespace:
    "The settings of the command line."
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-model", default="accounts/fireworks/models/qwen3-8b")
    parser.add_argument(
        "--tokenizer", default="Qwen/Qwen3-8B", help="name on the hub, a folder, or tiny"
    )
    parser.add_argument(
        "--rows", default=str(SAMPLE), help="JSONL with questions and answers, or toy"
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--max-seq-len", type=int, default=4096)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--shape", default="accounts/fireworks/trainingShapes/qwen3-8b-128k-h200")
    parser.add_argument("--deployment", default="grpo-serving")
    parser.add_argument(
        "--spelling", choices=SPELLINGS, default=SPELLINGS[0], help="which guide's words"
    )
    parser.add_argument(
        "--wandb", metavar="PROJECT", help="a project of Weights & Biases; WANDB_MODE=offline works"
    )
    parser.add_argument("--log-path", default=None, help="run folder")
    return parser.parse_args()


def config(args: argparse.Namespace) -> Config:
    "The same run in the words of three guides; what they spell differently is in `where`."
    where: dict[str, Any] = {
        "trainer": {
            "trainer": TrainerConfig(
                training_shape_id=args.shape, reference_training_shape_id=f"{args.shape}-forward"
            ),
            "weight_sync_interval": 1,
        },
        "infra": {
            "infra": InfraConfig(
                training_shape_id=args.shape, ref_training_shape_id=f"{args.shape}-forward"
            ),
            "weight_sync": WeightSyncConfig(weight_sync_interval=1),
        },
        "hotload": {
            "infra": InfraConfig(
                training_shape_id=args.shape, ref_training_shape_id=f"{args.shape}-forward"
            ),
            "hotload": HotloadConfig(hot_load_interval=1),
        },
    }[args.spelling]
    return Config(
        log_path=args.log_path,
        base_model=args.base_model,
        dataset=args.rows,
        max_rows=200,
        epochs=1,
        steps=args.steps,
        completions_per_prompt=4,
        max_completion_tokens=args.max_tokens,
        temperature=1.0,
        learning_rate=args.learning_rate,
        max_seq_len=args.max_seq_len,
        policy_loss="grpo",  # or "importance_sampling", "reinforce", "dapo", "dro", "gspo", "cispo"
        deployment=DeployConfig(
            deployment_id=args.deployment, tokenizer_model=tokenizer_folder(args.tokenizer)
        ),
        wandb=WandBConfig(project=args.wandb) if args.wandb else None,
        **where,
    )


if __name__ == "__main__":
    service()  # says what to do when there is no key
    print(main(config(options())))
