"""A reward for right calculations, whatever they are for: most wrong answers of a small model hold a wrong one."""

from __future__ import annotations

import re

from rl_notebook.rewards import numeric_equal

CALCULATION = re.compile(r"(\$?\d[\d,.]*(?:\s*[-+*/x×÷]\s*\$?\d[\d,.]*)+)\s*=\s*\$?(\d[\d,]*(?:\.\d+)?)")


def calculations(text: str) -> float:
    "The share of the calculations in a completion that are right; 0 if there is none."
    checked = [numeric_equal(left.replace("x", "*"), right) for left, right in CALCULATION.findall(text)]
    return sum(map(bool, checked)) / len(checked) if checked else 0.0
