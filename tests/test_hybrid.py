"Models whose layers fold the past into a state: Qwen3.5, LFM2, Falcon-H1, Mamba, Granite 4 and others take real steps."

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from families import GATED, HYBRID, loop_of, model_of, plain_logprobs, two_steps
from tiny_models import byte_tokenizer, one_thread  # noqa: F401 (the fixture is used by every test)

import rl_notebook as rln
from rl_notebook.backends.local.loading import in_dtype
from rl_notebook.core.types import SampleParams

FAMILIES = (
    "Qwen3_5Text",
    "Mamba2",
    pytest.param("Zamba2", marks=pytest.mark.slow),
)  # the others stand in the table of families alone


def loop_for(family: str, lora: int = 0) -> rln.GRPOLoop:
    return loop_of(model_of(f"{family}Config", HYBRID[family]), lora)


def weights(loop: rln.GRPOLoop) -> str:
    return hashlib.sha256(
        b"".join(p.detach().numpy().tobytes() for p in loop.backend.policy.state.params.values())
    ).hexdigest()


@pytest.mark.parametrize(
    ("family", "lora"),
    [("Qwen3_5Text", 0), ("Lfm2", 4), ("Mamba2", 0), ("Bamba", 4), ("Zamba2", 0)],
)
def test_trainer_sampler_and_transformers_agree_over_two_steps(
    family: str, lora: int, tmp_path: Path
):
    asyncio.run(check_two_steps(family, lora, tmp_path))


async def check_two_steps(family: str, lora: int, tmp_path: Path) -> None:
    loop = loop_for(family, lora)
    plain = model_of(f"{family}Config", HYBRID[family])
    assert await two_steps(loop, plain) < 4e-6
    record = loop.records[-1]
    assert {f.name for f in rln.xray(record).failed} <= {"completions"}  # which are all cut
    folder = await loop.export(tmp_path / "out")
    if not lora:
        again = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        [prompt] = await loop.backend.sampler.sample(
            [5, 6, 7, 8, 9], SampleParams(max_tokens=8, seed=3)
        )
        assert np.abs(prompt.logprobs - plain_logprobs(again, prompt.full_tokens)[4:]).max() < 1e-5


@pytest.mark.parametrize("family", ["Ernie4_5_Moe", "Lfm2", "Bamba"])
def test_bfloat16_keeps_in_float32_what_transformers_keeps(family: str, tmp_path: Path):
    model = model_of(f"{family}Config", HYBRID.get(family, GATED))
    model.save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="bfloat16").eval()
    ours = in_dtype(model, "bfloat16", "cpu")
    ids = torch.arange(200)[None]

    def kinds(m):
        return {n: t.dtype for n, t in (*m.named_parameters(), *m.named_buffers())}

    assert kinds(ours) == kinds(theirs)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, atol=0, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_that_is_taken_back_comes_again_to_the_last_bit(family: str):
    asyncio.run(there_and_back(family))


async def there_and_back(family: str) -> None:
    loop = loop_for(family)
    await loop.step()
    first = await loop.step()
    after = weights(loop)
    await loop.undo()
    second = await loop.step()
    assert weights(loop) == after
    for a, b in zip(first.datums, second.datums, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        np.testing.assert_array_equal(a.sampler_logprobs, b.sampler_logprobs)


@pytest.mark.parametrize("family", FAMILIES)
def test_cuts_penalties_turns_and_greedy_samples_agree_with_the_model(family: str):
    asyncio.run(check_samples(family))


async def check_samples(family: str) -> None:
    "A second turn continues from what was kept of the first; greedy text is that of `generate`."
    loop = loop_for(family)
    plain = model_of(f"{family}Config", HYBRID[family])
    sampler = loop.backend.sampler
    prompt = [7, 9, 11, 13]
    greedy = (await sampler.sample(prompt, SampleParams(max_tokens=10, temperature=0)))[
        0
    ].tokens.tolist()
    for n in range(1, len(greedy)):
        with torch.no_grad():
            assert greedy[n] == int(
                plain(torch.tensor([[*prompt, *greedy[:n]]])).logits[0, -1].argmax()
            )
    for turn in await sampler.sample(
        prompt, SampleParams(n=2, max_tokens=9, seed=1, top_p=0.9, repetition_penalty=1.2)
    ):
        [later] = await sampler.sample(
            [*turn.full_tokens, 21, 22], SampleParams(max_tokens=8, seed=2)
        )
        expected = plain_logprobs(plain, later.full_tokens)[later.prompt_len - 1 :]
        assert np.abs(later.logprobs - expected).max() < 2e-6
