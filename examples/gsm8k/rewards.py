"""A reward for right calculations, whatever they are for: most wrong answers of a small model hold a wrong one."""

from __future__ import annotations

import re

from rl_notebook.rewards import numeric_equal

NUMBER = r"\$?\d[\d,.]*(?: [a-zA-Z]{2,})?"  # with a unit, perhaps
CALCULATION = re.compile(rf"({NUMBER}(?:\s*[-+*/x×÷]\s*{NUMBER})+)\)?\s*=\s*\$?(\d[\d,]*(?:\.\d+)?)")
AT_LEAST = 2  # calculations that a problem of this set takes


def calculations(text: str) -> float:
    "The share of right ones among the calculations in a completion, of which two are expected."
    found = [
        (re.sub(r" [a-zA-Z]{2,}|[$, ]", "", left).replace("x", "*"), right) for left, right in CALCULATION.findall(text)
    ]
    return sum(bool(numeric_equal(left, right)) for left, right in found) / max(len(found), AT_LEAST)
