"What a run on a service trains on, and how."

import numpy as np
import torch

from rl_notebook.core.types import AdamParams, Datum

PROMPT = [72, 101, 108, 108, 111]


def reinforce(datums, logprobs):
    parts = [
        -d.advantage * lp[torch.tensor(d.active)].sum()
        for d, lp in zip(datums, logprobs, strict=True)
    ]
    return torch.stack(parts).sum(), {"parts": float(len(parts))}


async def train_on_fixed(backend, steps: int) -> list[np.ndarray]:
    "Train on fixed datums; returns the logprobs at the end."
    tokens = [[*PROMPT, *np.random.default_rng(i).integers(1, 250, 6)] for i in range(4)]
    datums = [
        Datum(t, [0] * 4 + [1] * 6, advantage=i - 1.5, sample=i) for i, t in enumerate(tokens)
    ]
    for k in range(steps):
        await backend.policy.forward_backward_custom(datums[k % 2 :], reinforce)
        await backend.policy.optim_step(AdamParams(learning_rate=1e-3))
    return [lp.values for lp in await backend.policy.forward(datums)]
