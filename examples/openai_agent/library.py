"""The same agent in a library: pip install 'pydantic-ai-slim[openai]'. The library has the loop, and writes the history
in its own way; the tokens that are trained are those that were sampled all the same.
"""

from __future__ import annotations

from typing import Any

from agent import MAX_TURNS
from calculator import respond
from openai import AsyncOpenAI
from pydantic_ai import Agent, UsageLimits
from pydantic_ai.exceptions import UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


def calc(expression: str) -> str:
    "A calculator for whole numbers. It knows + - * // % and brackets."
    return respond(expression)


async def solve(client: AsyncOpenAI, messages: list[Any]) -> str:
    "What the agent says in the end; nothing, where the library gives up on the model."
    model = OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client))
    try:
        result = await Agent(model, tools=[calc]).run(
            messages[-1]["content"], usage_limits=UsageLimits(request_limit=MAX_TURNS)
        )
    except (UnexpectedModelBehavior, UsageLimitExceeded):
        return ""
    return result.output
