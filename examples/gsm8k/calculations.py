"A reward for the right calculations: those of the reference solution, which GSM8K marks as `<<6*24=144>>`."

from __future__ import annotations

import re
from collections import Counter

from rl_notebook.rewards import numeric_equal, worked_out

NUMBER = r"\$?\d[\d,]*(?:\.\d+)?%?"
UNIT = r"(?:\s?[A-Za-z]+){0,2}"
CALCULATION = re.compile(rf"({NUMBER}{UNIT}(?:\s*[-+*/×÷]\s*{NUMBER}{UNIT})+)\s*=\s*({NUMBER})")  # without brackets
MARKED = re.compile(r"<<[^<>]*=\s*(-?[\d,.]+)")


def plain(expression: str) -> str:
    "The same without units, dollars and commas, and with `25%` as `(25/100)`."
    return re.sub(r"([\d.]+)%", r"(\1/100)", re.sub(r"[A-Za-z\s$,]", "", expression))


def results(text: str) -> list[float]:
    "Results of the calculations in a text that are right, and nan for each one that is not."
    found = [(plain(left), plain(right)) for left, right in CALCULATION.findall(text)]
    return [float(worked_out(b) or 0) if numeric_equal(a, b, 0.01) else float("nan") for a, b in found]


def wanted(answer: str) -> list[float]:
    "Results of the calculations that a reference solution marks."
    return [float(worked_out(plain(n.rstrip("."))) or 0) for n in MARKED.findall(answer) if n.strip(",.")]


def calculations(text: str, answer: str) -> float:  # 0 to 1
    "The share of the reference's calculations that are there and right, of theirs or ours, whichever are more."
    there, gold = Counter(results(text)), Counter(wanted(answer))
    return (there & gold).total() / max(there.total(), gold.total(), 1)
