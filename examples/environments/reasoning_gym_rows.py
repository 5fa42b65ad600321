"""A data set of reasoning-gym. Run it: pip install reasoning-gym; python examples/environments/reasoning_gym_rows.py"""

from __future__ import annotations

import asyncio
from typing import Any

import reasoning_gym
import small

from rl_notebook.task.rewards import final_answer

SUMS = {
    "min_terms": 5,
    "max_terms": 5,
    "min_digits": 1,
    "max_digits": 1,
    "operators": ("+",),
    "allow_parentheses": False,
}
data = reasoning_gym.create_dataset(
    "basic_arithmetic", size=512, seed=1, allow_negation=False, **SUMS
)


def question_of(entry: dict[str, Any]) -> str:
    "The question as the small model knows it. For another model: `return entry['question']`."
    return f"What is {entry['metadata']['expression'].replace(' ', '')}?"


# --- the glue: 6 lines
rows = [
    {"prompt": [{"role": "user", "content": question_of(entry)}], "entry": entry} for entry in data
]


def score(text: str, entry: dict[str, Any]) -> float:
    "The data set grades what stands behind #### or in \\boxed{}."
    return data.score_answer(final_answer(text), entry)


# ---------------------------------------------------------------------------------------------------------------------


async def main(options: list[str] | None = None, say: Any = print) -> list[float]:
    return await small.train(rows, score, options, say)


if __name__ == "__main__":
    asyncio.run(main())
