"""A run on a Tinker service in a process of its own: `python tinker_run.py URL TOKENIZER STEPS [PATH OF A STATE]`.

Needs nothing but the package and the `tinker` SDK, so that older versions of it run this in their own environment.
"""

import asyncio
import os
import sys

import numpy as np
import torch

from rl_notebook.backends.services.tinker import open_tinker
from rl_notebook.core.types import AdamParams, Datum, SampleParams

PROMPT = [72, 101, 108, 108, 111]


def reinforce(datums, logprobs):
    parts = [-d.advantage * lp[torch.tensor(d.active)].sum() for d, lp in zip(datums, logprobs, strict=True)]
    return torch.stack(parts).sum(), {"parts": float(len(parts))}


async def trained(backend, steps: int, upset=lambda k: None) -> list[np.ndarray]:
    "Train on fixed datums; returns the logprobs at the end."
    tokens = [[*PROMPT, *np.random.default_rng(i).integers(1, 250, 6)] for i in range(4)]
    datums = [Datum(t, [0] * 4 + [1] * 6, advantage=i - 1.5, sample=i) for i, t in enumerate(tokens)]
    for k in range(steps):
        upset(2 * k)
        await backend.policy.forward_backward_custom(datums[k % 2 :], reinforce)
        upset(2 * k + 1)
        await backend.policy.optim_step(AdamParams(learning_rate=1e-3))
    return [lp.values for lp in await backend.policy.forward(datums)]


def total(values) -> float:
    "All logprobs as one number."
    return float(np.nansum(np.concatenate(values)))


async def main(url: str, tokenizer: str, steps: str, path: str = "") -> None:
    checked = {"probing": False, "conformance": "off"} if path else {}
    where = {"base_url": url, "base_model": "a-model", "tokenizer": tokenizer, "lora_rank": 4, "reference": False}
    async with await open_tinker(**where, **checked) as backend:
        if path:
            await backend.policy.load_state(path)
        print(backend.policy.link.sdk.version, os.environ["TINKER_API_KEY"] in repr(backend))
        print(backend.policy.versions)
        values = await trained(backend, int(steps))
        await backend.sync(await backend.policy.save_weights_for_sampler("x"))
        drawn = await backend.sampler.sample(PROMPT, SampleParams(n=2, max_tokens=4, seed=1))
        assert {c.policy_version for c in drawn} == {backend.policy.versions.current}
        print(total(values))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
