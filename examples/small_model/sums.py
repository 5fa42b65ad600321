"""Sums of four digits. The worked examples show two ways: to blurt out a number, and to write running sums first."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

TRAINING_ROWS = 2000
HELD_OUT_ROWS = 200
HELD_OUT_SETS = 80  # of the 330 sets of four digits from 2 to 9
DIGITS = range(2, 10)


def question_of(digits: Sequence[int]) -> str:
    "The question."
    return f"What is {' + '.join(map(str, digits))}?"


def running_sums(digits: Sequence[int]) -> list[str]:
    "Every addition on a line, from the first two digits on."
    totals = list(itertools.accumulate(digits))
    return [
        f"{before} + {digit} = {total}"
        for before, digit, total in zip(totals, digits[1:], totals[1:], strict=False)
    ]


def example_turns(digits: Sequence[int], worked_out: bool) -> list[dict[str, str]]:
    "A question and its answer, with running sums or without."
    lines = running_sums(digits) if worked_out else []
    answer = "\n".join([*lines, f"#### {sum(digits)}"])
    return [
        {"role": "user", "content": question_of(digits)},
        {"role": "assistant", "content": answer},
    ]


EXAMPLE_DIGITS = ([6, 2, 9, 5], [7, 4, 8, 3], [5, 8, 2, 6])
EXAMPLES = [
    turn
    for digits, worked_out in zip(EXAMPLE_DIGITS, (False, True, True), strict=True)
    for turn in example_turns(digits, worked_out)
]


def make_rows(sets: Sequence[Sequence[int]], count: int, seed: str) -> list[dict[str, Any]]:
    "So many rows; their digits are those of a set, in any order."
    pick = random.Random(seed)
    orders = {order for digits in sets for order in itertools.permutations(digits)}
    chosen = pick.sample(sorted(orders), count)
    return [
        {
            "messages": [*EXAMPLES, {"role": "user", "content": question_of(digits)}],
            "answer": str(sum(digits)),
            "digits": list(digits),
        }
        for digits in chosen
    ]


def rows() -> list[dict[str, Any]]:
    "Rows to train on, then held-out ones, whose digits are in no row to train on together in any order."
    sets = list(itertools.combinations_with_replacement(DIGITS, 4))
    random.Random("sets").shuffle(sets)
    return make_rows(sets[HELD_OUT_SETS:], TRAINING_ROWS, "training") + make_rows(
        sets[:HELD_OUT_SETS], HELD_OUT_ROWS, "held out"
    )


def taught_turns(digits: Sequence[int]) -> list[dict[str, str]]:
    "A question with its running sums in it, and the same as its answer."
    answer = example_turns(digits, worked_out=True)[1]
    question = f"{question_of(digits)}\n\nSolution:\n{answer['content']}"
    return [{"role": "user", "content": question}, answer]


def with_solution(row: Mapping[str, Any], sample: Any, group: Any) -> list[dict[str, str]]:
    "A teacher's prompt: three questions with their solutions and answers, then that of the row with its solution."
    examples = [turn for digits in EXAMPLE_DIGITS for turn in taught_turns(digits)]
    return [*examples, taught_turns(row["digits"])[0]]


def exact(text: str, answer: str) -> float:
    "1 if the completion ends with #### and the right number."
    last = re.search(r"#### *(-?\d+)\s*$", text)
    return float(last is not None and last[1] == answer)


def worked_out(text: str, digits: Sequence[int]) -> float:
    "The share of the running sums that the completion begins with, each with the right result."
    wanted = running_sums(digits)
    pairs = zip(wanted, text.splitlines(), strict=False)
    right = list(itertools.takewhile(lambda pair: pair[0] == pair[1].strip(), pairs))
    return len(right) / len(wanted)
