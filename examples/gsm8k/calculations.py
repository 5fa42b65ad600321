"""Rewards for the right calculations: those of the reference solution, which GSM8K marks as `<<6*24=144>>`.

What to calculate is one thing, and to calculate it without a calculator another. A calculation is recognized here by the result that a
calculator has for it; whether the text has the same one is a second question. Where its numbers come from is not asked,
and what is written in another way (brackets, `**144**`) is not found: short reference solutions themselves earn 0.80.
"""

from __future__ import annotations

import re
from collections import Counter

from rl_notebook.task.rewards import final_answer, numeric_equal, parse_number

NUMBER = r"\$?(?<![\d.,])(?:\d+(?:,\d+)*(?:\.\d+)?|\.\d+)(?!\d)%?"
UNIT = r"(?:\s?[A-Za-z]+(?![A-Za-z])){0,2}"
SIGN = r"\s*[-+*/×÷]\s*"
# Without brackets; what is claimed is one number, and not the first of a fraction or of a second calculation.
CALCULATION = re.compile(
    rf"({NUMBER}{UNIT}(?:{SIGN}{NUMBER}{UNIT})+)\s*=\s*({NUMBER})(?!{SIGN}\$?[\d.])"
)
MARKED = re.compile(r"<<[^<>]*=\s*(-?[\d,.]+)")
MINUS = {0x2013: "-", 0x2212: "-"}
CENT = 0.01


def plain(expression: str) -> str:
    "The same without units, dollars and commas, and with `25%` as `(25/100)`."
    return re.sub(r"([\d.]+)%", r"(\1/100)", re.sub(r"[A-Za-z\s$,]", "", expression))


def results(text: str) -> list[tuple[float, bool]]:
    "What a calculator has for each calculation of a text, earlier results put right, and whether the text has it, too."
    outcomes = list[tuple[float, bool]]()
    right = dict[str, str]()
    text = re.sub(r"\s[x×]\s", " * ", text.translate(MINUS))
    for left, claimed in CALCULATION.findall(text):
        left = re.sub(r"[\d.]+", lambda n: right.get(n[0], n[0]), plain(left))
        claimed = plain(claimed)
        value = parse_number(left)
        same = bool(numeric_equal(claimed, left, CENT))
        right.pop(claimed, None)
        if value is not None and not same:
            right[claimed] = f"({value})"
        outcomes.append((float("nan") if value is None else round(float(value), 2), same))
    return outcomes


def wanted(answer: str) -> list[float]:
    "Results of the calculations that a reference solution marks."
    return [
        round(float(parse_number(plain(n.rstrip("."))) or 0), 2)
        for n in MARKED.findall(answer)
        if n.strip(",.")
    ]


def calculations(text: str, answer: str) -> float:  # 0 to 1
    "The share of the reference's calculations that are there, of theirs or ours, whichever are more; half for a slip."
    computed = results(text)
    gold = Counter(wanted(answer))
    earned = 0.0
    for value, same in sorted(computed, key=lambda calculation: not calculation[1]):
        earned += (gold[value] > 0) * (1.0 if same else 0.5)
        gold[value] -= 1
    return earned / max(len(computed), len(wanted(answer)), 1)


def with_calculator(text: str, answer: str) -> float:  # 0 or 1
    "Whether the last calculation gives the answer if a calculator works out all of them."
    computed = results(text)
    return float(
        bool(computed) and bool(numeric_equal(computed[-1][0], final_answer(answer), CENT))
    )
