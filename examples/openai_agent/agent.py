"""An agent written for OpenAI's API: it may use a calculator, and is done when it does not. It knows nothing of
training; the address and the key of the client decide who answers.
"""

from __future__ import annotations

import json
from typing import Any

from calculator import respond
from openai import AsyncOpenAI

MAX_TURNS = 3  # of the model: two calls and an answer, or one and a second thought
CALC = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "A calculator for whole numbers. It knows + - * // % and brackets.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


async def solve(client: AsyncOpenAI, messages: list[Any]) -> str:
    "Ask, compute what the model wants to have computed, ask again; returns what it says in the end."
    conversation = [*messages]
    for _ in range(MAX_TURNS):
        reply = await client.chat.completions.create(
            model="policy", messages=conversation, tools=[CALC]
        )
        message = reply.choices[0].message
        conversation.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = respond(json.loads(call.function.arguments)["expression"])
            conversation.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return message.content or ""
