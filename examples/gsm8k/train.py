"""Train SmolLM2 on GSM8K, with one worked example in front of each question; figures.py measures what came of it.

    python examples/gsm8k/train.py --dataset train.jsonl --log-path runs/gsm8k
    python examples/gsm8k/train.py --dataset train.jsonl --log-path runs/gsm8k --resume
    python examples/gsm8k/figures.py runs/gsm8k

Settings are those of config.yaml; any of them may follow as an option. Rows are in the public form of GSM8K: JSON Lines
with `question` and `answer`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import rl_notebook as rln
from rl_notebook.cli import option_values
from rl_notebook.recipes.rl_loop import Config, load_problem, main

HERE = Path(__file__).parent
EXAMPLE = (
    "A pen costs 2 dollars and a book costs 5 dollars more. How much do 3 pens and a book cost?",
    "3 pens cost 3 * 2 = 6 dollars.\nA book costs 2 + 5 = 7 dollars.\nTogether that is 6 + 7 = 13 dollars.\n#### 13",
)


def ask(rows: Sequence[rln.Row]) -> list[rln.Row]:
    "The same rows, with the example as the first turn of the conversation."
    turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), EXAMPLE, strict=True)]
    return [replace(row, messages=(row.messages[0], *turns, *row.messages[1:])) for row in rows]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--resume", action="store_true", help="go on with the run in --log-path")
    given, rest = parser.parse_known_args()
    cfg = Config.from_yaml(HERE / "config.yaml", option_values(rest))
    print(main(cfg, rows=ask(load_problem(cfg).rows), resume=given.resume))
