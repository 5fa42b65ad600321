"""A rollout with a tool: ask, and where the completion ends in `calc(...)`, add the result and ask again.

The conversation is assembled from the tokens that were really sampled. What the calculator says is masked: the policy
learns from its own tokens only. The reward looks at the last turn and at nothing else: a call in itself earns none.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

from calculator import respond

import rl_notebook as rln
from rl_notebook.task.chat import Conversation
from rl_notebook.loop.rollouts import prompt_seed

MAX_TURNS = 3  # of the policy: two calls and an answer, or one and a second thought
CALL = re.compile(r"calc\((.*)\)\s*$")

HOW = (
    "You have a calculator for whole numbers. To use it, end a message with calc(...), such as calc(12*3-4), and wait "
    "for the result. It knows + - * // % and brackets. Then give the final answer after ####, for example #### 32"
)


def call_in(text: str) -> str | None:  # None = this is an answer
    "The expression that a message asks the calculator for."
    result = CALL.search(text)
    return result[1] if result else None


def begin(setup: rln.RolloutSetup, sample_prompt: dict[str, Any]) -> Conversation:
    "The conversation before the policy has said anything."
    row = rln.Row(key=sample_prompt.get("key", ""), messages=tuple(sample_prompt["messages"]))
    return rln.start_conversation(setup.tokenizer, row)


def make_rollout_fn(
    setup: rln.RolloutSetup,
) -> Callable[[dict[str, Any]], Awaitable[rln.RolloutSample | None]]:
    "Called once; `setup` has the sampler, the tokenizer and how to sample."

    async def rollout_fn(sample_prompt: dict[str, Any]) -> rln.RolloutSample | None:
        "Called once per sample: turns until the policy answers, or has had all that it gets."
        conversation = begin(setup, sample_prompt)
        calls = 0
        for turn in range(MAX_TURNS):
            params = rln.SampleParams(
                **setup.sample_kwargs, seed=prompt_seed(sample_prompt["seed"], turn)
            )
            [completion] = await setup.sampler.sample(conversation.tokens, params)
            conversation = conversation.add_completion(completion)
            expression = call_in(completion.text) if completion.finish_reason == "stop" else None
            if expression is None or turn == MAX_TURNS - 1:
                break
            conversation = conversation.add_messages(
                {"role": "user", "content": respond(expression)}
            )
            calls = calls + 1
        right = rln.gsm8k_reward(completion.text, sample_prompt["answer"])
        return conversation.to_sample(right, calls=calls)

    return rollout_fn
