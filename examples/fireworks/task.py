"""What the scripts of this folder share: their settings, the rows, and the reward."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import transformers

import rl_notebook as rln
from rl_notebook.task.models import tiny_path

SAMPLE = Path(__file__).parent.parent / "gsm8k" / "sample.jsonl"
ASK = "Work out the answer step by step, then give it after ####, such as: #### 42"


def settings(about: str, **defaults: Any) -> argparse.Namespace:
    "The settings at the top of a script; `defaults` are those in which it differs."
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--base-model", default="accounts/fireworks/models/qwen3-8b", help="what is trained"
    )
    parser.add_argument(
        "--tokenizer", default="Qwen/Qwen3-8B", help="name on the hub, a folder, or tiny"
    )
    parser.add_argument(
        "--rows", default=str(SAMPLE), help="JSONL with questions and answers, or toy"
    )
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps")
    parser.add_argument("--samples", type=int, default=4, help="completions per prompt")
    parser.add_argument(
        "--max-tokens", type=int, default=512, help="tokens after which a completion is cut"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-5, help="of AdamW")
    parser.add_argument(
        "--shape",
        default="accounts/fireworks/trainingShapes/qwen3-8b-128k-h200",
        help="of trainers",
    )
    parser.add_argument(
        "--deployment", default="grpo-serving", help="id of the deployment; reused if it is there"
    )
    parser.set_defaults(**defaults)
    return parser.parse_args()


def service() -> tuple[str, str]:
    "Key and address of the service, from the environment."
    if "FIREWORKS_API_KEY" not in os.environ:
        raise SystemExit(
            "FIREWORKS_API_KEY is not set; without an account, run: rl-notebook emulate"
        )
    return os.environ["FIREWORKS_API_KEY"], os.environ.get(
        "FIREWORKS_BASE_URL", "https://api.fireworks.ai"
    )


def tokenizer_folder(name: str) -> str:
    "What the tokenizer is loaded from; the model of the package goes by its short name."
    return str(tiny_path()) if name == "tiny" else name


def load_tokenizer(name: str) -> Any:
    "The tokenizer of the base model: prompts are encoded here, not by the service."
    return transformers.AutoTokenizer.from_pretrained(tokenizer_folder(name))


def load_task(source: str) -> list[rln.Row]:
    "Conversations that end before the answer, each with the right one."
    if source == "toy":
        return rln.load_rows(rln.toy_rows(256, seed=0))
    return rln.load_rows(source, require_answer=True, system_prompt=ASK)


def score(text: str, row: rln.Row) -> float:
    "1 for the right number, else 0."
    return rln.gsm8k_reward(text, row.answer) or 0.0
