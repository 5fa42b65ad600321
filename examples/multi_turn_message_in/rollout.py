"""A rollout of several turns: answer, be told that it is wrong, try again, until it is right or the turns are used up.

Rows hold OpenAI-style messages. Only what is appended is encoded; what the policy said stays the tokens that it sampled,
and these alone are trained on. All turns share one reward, so an answer that is right at once beats a lucky third.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from reward import is_right, reward

import rl_notebook as rln
from rl_notebook.loop.rollouts import prompt_seed

MAX_TURNS = 3
FEEDBACK = "Try again."


def make_rollout_fn(
    setup: rln.RolloutSetup,
) -> Callable[[dict[str, Any]], Awaitable[rln.RolloutSample | None]]:
    "Called once; `setup` has the sampler, the tokenizer, how to sample, and what `rollout_extras` says."
    max_turns = setup.extras.get("max_turns", MAX_TURNS)
    feedback = setup.extras.get("feedback", FEEDBACK)

    async def rollout_fn(sample_prompt: dict[str, Any]) -> rln.RolloutSample | None:
        "Called once per sample: a conversation to its end."
        row = rln.Row(key=sample_prompt.get("key", ""), messages=tuple(sample_prompt["messages"]))
        conversation = rln.start_conversation(setup.tokenizer, row)
        while True:
            params = rln.SampleParams(
                **setup.sample_kwargs, seed=prompt_seed(sample_prompt["seed"], conversation.turns)
            )
            [completion] = await setup.sampler.sample(conversation.tokens, params)
            conversation = conversation.add_completion(completion)
            right = is_right(completion.text, sample_prompt["answer"])
            # no room to answer, and no end of turn to reply to
            cut = completion.truncated
            if right or right is None or cut or conversation.turns == max_turns:
                return conversation.to_sample(
                    reward(right, retries=conversation.turns - 1), right=right
                )
            conversation = conversation.add_messages({"role": "user", "content": feedback})

    return rollout_fn
