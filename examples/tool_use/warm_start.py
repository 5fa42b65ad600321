"""Before RL: show the small model what a call looks like. It has never seen one, and RL can only reward what is sampled.

Half of the traces call the calculator and repeat its result, half blurt out some number, as the model does anyway. So
it learns the form of both, and that both happen; which of the two pays is left for RL to find out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from calculator import respond
from tqdm.auto import tqdm

import rl_notebook as rln
from rl_notebook.task.chat import Conversation
from rl_notebook.core.types import AdamParams
from rl_notebook.core.datums import datum_from_tokens_weights

BATCH = 32  # traces per step
CALLS = 0.5  # share of traces that call


def with_reply(conversation: Conversation, text: str) -> Conversation:
    "With a turn that was written, not sampled."
    tokens = [
        *conversation.tokenizer.encode(text, add_special_tokens=False),
        conversation.tokenizer.eos_token_id,
    ]
    return conversation.add_completion(
        rln.Completion(conversation.tokens, tokens, logprobs=np.zeros(len(tokens)), text=text)
    )


def trace(tokenizer: Any, row: Mapping[str, Any], rng: np.random.Generator) -> rln.Datum:
    "One demonstration, with the mask of a rollout: 1 on what the assistant says."
    conversation = rln.start_conversation(
        tokenizer, rln.Row(key=row["expression"], messages=tuple(row["messages"]))
    )
    if rng.random() < CALLS:
        result = respond(row["expression"])
        conversation = with_reply(conversation, f"calc({row['expression']})").add_messages(
            {"role": "user", "content": result}
        )
        conversation = with_reply(conversation, f"#### {result.removeprefix('= ')}")
    else:
        conversation = with_reply(conversation, f"#### {rng.integers(100)}")
    sample = conversation.to_sample()
    return datum_from_tokens_weights(sample.tokens, sample.loss_mask)


def cross_entropy(
    datums: Sequence[rln.Datum], logprobs: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    "Mean over the assistant's tokens of -log p."
    logprobs_of_completion = [
        series[torch.tensor(d.active)] for d, series in zip(datums, logprobs, strict=True)
    ]
    loss = -torch.cat(logprobs_of_completion).mean()
    return loss, {"cross_entropy": float(loss.detach())}


async def warm_start(
    backend: rln.Backend,
    rows: Sequence[Mapping[str, Any]],  # to demonstrate
    steps: int,
    seed: int = 0,
) -> list[float]:  # cross entropy of each step, nats per token
    "Supervised steps through the same backend, and one weight sync at their end."
    rng = np.random.default_rng(seed)
    losses = []
    traces = [trace(backend.tokenizer, row, rng) for row in rows]
    for _ in tqdm(range(steps), desc="warm start", leave=False):
        batch = [
            traces[i] for i in rng.choice(len(traces), size=min(BATCH, len(traces)), replace=False)
        ]
        output = await backend.policy.forward_backward_custom(batch, cross_entropy)
        await backend.policy.optim_step(AdamParams(learning_rate=1e-3))
        losses.append(output.metrics["cross_entropy"])
    await rln.sync_weights(backend, "warm-start")
    return losses
