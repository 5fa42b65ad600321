"A reward for the right calculations: those of the reference solution, which GSM8K marks as `<<6*24=144>>`."

from __future__ import annotations

import re
from collections import Counter

NUMBER = r"\$?\d[\d,]*(?:\.\d+)?%?"
UNIT = r"(?:\s?[A-Za-z]+){0,2}"
CALCULATION = re.compile(rf"({NUMBER}{UNIT}(?:\s*[-+*/×÷]\s*{NUMBER}{UNIT})+)\s*=\s*({NUMBER})")  # without brackets
MARKED = re.compile(r"<<[^<>]*=\s*(-?[\d,.]+)")


def number(text: str) -> float:
    "The value of `1,200`, `$3.50` or `25%`; a per cent counts as a hundredth."
    value = float(text.strip("$%").replace(",", ""))
    return value / 100 if text.endswith("%") else value


def value(expression: str) -> float | None:
    "What `2 + 3 * 4` comes to; None where it divides by nothing."
    numbers = [number(n) for n in re.findall(NUMBER, expression)]
    signs = re.findall(r"[-+*/×÷]", expression)
    terms = [numbers[0]]
    for sign, n in zip(signs, numbers[1:], strict=True):
        if sign in "+-":
            terms.append(n if sign == "+" else -n)
        elif sign in "*×":
            terms[-1] *= n
        elif n == 0:
            return None
        else:
            terms[-1] /= n
    return sum(terms)


def results(text: str) -> list[float]:
    "Results of the calculations in a text that are right, and nan for each one that is not."
    found = [(value(left), number(right)) for left, right in CALCULATION.findall(text)]
    return [right if left is not None and abs(left - right) < 0.01 else float("nan") for left, right in found]


def wanted(answer: str) -> list[float]:
    "Results of the calculations that a reference solution marks."
    return [number(n.rstrip(".")) for n in MARKED.findall(answer) if n.strip(",.")]


def calculations(text: str, answer: str) -> float:  # 0 to 1
    "The share of the reference's calculations that are there and right, of theirs or ours, whichever are more."
    there, gold = Counter(results(text)), Counter(wanted(answer))
    return (there & gold).total() / max(there.total(), gold.total(), 1)
