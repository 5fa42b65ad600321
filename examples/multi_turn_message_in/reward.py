"""What a conversation is worth: a right answer, less for every retry that it took."""

from __future__ import annotations

import rl_notebook as rln

DISCOUNT = 0.8  # factor per retry


def is_right(text: str, answer: str) -> bool | None:  # None = the row's own answer is no number
    "Whether the number after `####` is the right one."
    right = rln.gsm8k_reward(text, answer)
    return None if right is None else bool(right)


def reward(
    right: bool | None, retries: int
) -> float | None:  # None = unscorable: the sample is dropped and counted
    "1 for a right first answer, then 0.8, 0.64, ...; 0 for one that never came."
    return None if right is None else right * DISCOUNT**retries
