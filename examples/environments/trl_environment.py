"""An environment in the form that TRL's GRPOTrainer takes. Run it: python examples/environments/trl_environment.py"""

from __future__ import annotations

import asyncio
from typing import Any

import small

import rl_notebook as rln
from rl_notebook.agents.environments import tool_rollouts


class Adding:
    "Asks for a sum until it is right, twice at most. It fits GRPOTrainer(environment_factory=Adding) as it is."

    def reset(self, answer: str, **columns) -> str | None:
        self.number = int(answer)
        self.tries = 0
        self.right = False
        return None

    def answer(self, number: int) -> str:
        """
        Give the answer, and hear whether it is right.

        Args:
            number: The sum.
        """
        if self.right or self.tries == 2:
            raise ValueError("the game is over")
        self.tries, self.right = self.tries + 1, number == self.number
        return "Right." if self.right else "Too high." if number > self.number else "Too low."

    def get_reward(self) -> float:
        return 1 / self.tries if self.right else 0.0


# --- the glue: 7 lines. A model that was taught tools needs no `read_calls`.
rows = [
    {"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]}
    for row in rln.toy_rows(512)
]
task = tool_rollouts(
    environment_factory=Adding, read_calls=small.read_answer, max_tool_calling_iterations=2
)
# ---------------------------------------------------------------------------------------------------------------------


async def main(options: list[str] | None = None, say: Any = print) -> list[float]:
    return await small.train(rows, task, options, say)


if __name__ == "__main__":
    asyncio.run(main())
