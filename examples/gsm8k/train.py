"""Train SmolLM2 on short problems of GSM8K, after three worked examples; figures.py measures what came of it.

    python examples/gsm8k/train.py --dataset train.jsonl --log-path runs/gsm8k
    python examples/gsm8k/train.py --dataset train.jsonl --log-path runs/gsm8k --resume
    python examples/gsm8k/figures.py runs/gsm8k

Settings are those of config.yaml and the rewards below; any of them may follow as an option. Rows are in the public
form of GSM8K: JSON Lines with `question` and `answer`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from calculations import wanted

import rl_notebook as rln
from rl_notebook.cli import option_values
from rl_notebook.recipes.rl_loop import Config, load_problem, main

HERE = Path(__file__).parent
ROLES = ("user", "assistant")
OURS = {  # what the form and the right number earn, and what calculations do; the last one is only looked at
    "rewards": [
        "gsm8k",
        "gsm8k_format",
        "calculations:calculations",
        "calculations:with_calculator",
    ],
    "reward_weights": [1.0, 0.1, 1.0, 0.0],
}
EXAMPLES = (
    (
        "A florist binds 9 bunches of 12 roses each. 35 of the roses are white. How many are not?",
        "9 * 12 = 108 roses are bound.\n108 - 35 = 73 roses are not white.\n#### 73",
    ),
    (
        "Jonas has 40 stickers and gives away a quarter of them. How many does he keep?",
        "He gives away 40 / 4 = 10 stickers.\nHe keeps 40 - 10 = 30 stickers.\n#### 30",
    ),
    (
        "A pen costs 2 dollars and a book costs 5 dollars more. How much do 3 pens and a book cost?",
        "3 pens cost 3 * 2 = 6 dollars.\nA book costs 2 + 5 = 7 dollars.\nTogether that is 6 + 7 = 13 dollars.\n"
        "#### 13",
    ),
)


def ask(rows: Sequence[rln.Row]) -> list[rln.Row]:
    "The same rows, with the examples as the first turns of the conversation."
    turns = [
        {"role": role, "content": text}
        for pair in EXAMPLES
        for role, text in zip(ROLES, pair, strict=True)
    ]
    return [replace(row, messages=(row.messages[0], *turns, *row.messages[1:])) for row in rows]


def short(rows: Sequence[rln.Row]) -> list[rln.Row]:
    "Those whose solution marks one or two calculations: of longer ones a model this small finds next to none."
    return [row for row in rows if 1 <= len(wanted(row.data["answer"])) <= 2]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--resume", action="store_true", help="continue the run in --log-path")
    args, rest = parser.parse_known_args()
    cfg = Config.from_yaml(HERE / "config.yaml", OURS | option_values(rest))
    print(main(cfg, rows=ask(short(load_problem(cfg).rows)), resume=args.resume))
