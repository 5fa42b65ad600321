"""A rollout: one prompt answered once, and graded. The recipe calls it for every sample of every group.

This one asks the model, looks at its completion, and does what a reward function alone could not do: it keeps what it
saw (`info`), and it drops completions that ran out of room instead of scoring them (`return None`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import rl_notebook as rln


def make_rollout_fn(
    setup: rln.RolloutSetup,
) -> Callable[[dict[str, Any]], Awaitable[rln.RolloutSample | None]]:
    "Called once; `setup` has the sampler, the tokenizer and how to sample."

    async def rollout_fn(sample_prompt: dict[str, Any]) -> rln.RolloutSample | None:
        "Called once per sample; `sample_prompt` has the row's columns and the prompt's tokens."
        params = rln.SampleParams(**setup.sample_kwargs, seed=sample_prompt["seed"])
        [completion] = await setup.sampler.sample(sample_prompt["prompt_token_ids"], params)
        if completion.truncated:
            return None
        right = rln.toy_reward(completion.text, sample_prompt["answer"])
        tidy = rln.toy_format_reward(completion.text)
        return rln.sample_from_completion(
            completion, reward=right + 0.1 * tidy, info={"right": right, "tidy": tidy}
        )

    return rollout_fn
