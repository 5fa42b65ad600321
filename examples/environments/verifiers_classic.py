"""An environment of verifiers before 0.4, with the library's own multi-turn `rollout`.

Run it: pip install 'verifiers<0.4'; python examples/environments/verifiers_classic.py
"""

from __future__ import annotations

import asyncio
from typing import Any

import small
import verifiers as vf
from datasets import Dataset
from openai import AsyncOpenAI

import rl_notebook as rln
from rl_notebook.agents.environments import agent_rollouts
from rl_notebook.agents.serve import ServedRollout


class Retry(vf.MultiTurnEnv):
    "A sum, and a second try where the first is wrong. `vf.load_environment('...')` gives an installed one."

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        if rln.toy_reward(messages[-1].content, state["answer"]) == 1:
            state["final_env_response"] = []
        return [vf.UserMessage(content="Try again.")]


def right(completion: Any, answer: str) -> float:
    turns = [message.content for message in completion if message.role == "assistant"]
    return rln.toy_reward(turns[-1], answer) / len(turns)


sums = Dataset.from_list(rln.toy_rows(512))
env = Retry(dataset=sums, rubric=vf.Rubric(funcs=[right]), max_turns=2)


# --- the glue: 7 lines
rows = [{**row, "input": row} for row in env.get_dataset()]


async def play(row: dict[str, Any], rollout: ServedRollout) -> float | None:
    "One rollout of the environment, played by the policy."
    async with AsyncOpenAI(base_url=rollout.url, api_key=rollout.key) as client:
        state = await env.rollout(row["input"], vf.OpenAIChatCompletionsClient(client), "policy")
    await env.rubric.score_rollout(state)
    return state["reward"] if state.get("error") is None else None


# ---------------------------------------------------------------------------------------------------------------------


async def main(options: list[str] | None = None, say: Any = print) -> list[float]:
    return await small.train(rows, agent_rollouts(play), options, say, steps=10)


if __name__ == "__main__":
    asyncio.run(main())
