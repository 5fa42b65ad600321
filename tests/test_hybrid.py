"Models whose layers fold the past into a state: Qwen3.5, LFM2, Falcon-H1, Mamba, Granite 4 and others take real steps."

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tiny_models import byte_tokenizer, one_thread  # noqa: F401 (the fixture is used by every test)

import rl_notebook as rln
from rl_notebook.backends.local.loading import in_dtype
from rl_notebook.core.types import SampleParams

SIZES = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0}
SIZES |= {"eos_token_id": None, "bos_token_id": None}
LINEAR = {f"linear_{name}": n for name, n in (("num_value_heads", 4), ("num_key_heads", 2), ("key_head_dim", 8))}
LINEAR |= {"linear_value_head_dim": 8}
MAMBA = {f"mamba_{name}": 8 for name in ("n_heads", "d_head", "d_state", "num_heads", "head_dim", "headdim")}
MAMBA |= {"mamba_n_groups": 1, "mamba_ngroups": 1, "mamba_expand": 2, "mamba_d_ssm": 64, "mamba_chunk_size": 16}
STATE = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 16}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict] = {
    "Qwen3_5Text": LINEAR,
    "Qwen3Next": LINEAR | EXPERTS,
    "Lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "FalconH1": MAMBA,
    "Mamba": {"state_size": 8},
    "Mamba2": STATE,
    "GraniteMoeHybrid": MAMBA | EXPERTS | {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 48},
    "Bamba": MAMBA | {"attn_layer_indices": [1, 3]},
    "NemotronH": MAMBA
    | {"ssm_state_size": 8, "n_groups": 1, "chunk_size": 16, "expand": 2, "n_routed_experts": 4}
    | {"hybrid_override_pattern": "M*M-", "layers_block_type": ["mamba", "attention", "mamba", "mlp"]},
    "Jamba": EXPERTS | {"mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "Zamba2": MAMBA
    | {"layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 8, "attention_head_dim": 16, "num_mem_blocks": 1}
    | {"attention_hidden_size": 64},
    "OlmoHybrid": LINEAR,
}
RARE = pytest.mark.variant(every=3)


def model_of(family: str, more: dict | None = None) -> torch.nn.Module:
    "A model of random weights, sharp enough to tell one context from another."
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES.get(family, more))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2 if p.ndim == 2 else 1)
    return model


def loop_of(family: str, lora: int = 0) -> rln.GRPOLoop:
    "A loop on prompts of unequal length."
    size = {"prompt_groups_per_step": 3, "completions_per_prompt": 4, "max_completion_tokens": 12, "max_seq_len": 96}
    cfg = rln.Config(**size, learning_rate=1e-3, kl_beta=0.05, lora_rank=lora)
    rows = [{"prompt": "x" * n + "yz"[n % 2]} for n in (1, 9, 17, 3, 30, 31)]
    backend = rln.open_local(model_of(family), byte_tokenizer(), lora_rank=lora)
    return rln.GRPOLoop(backend, rows, lambda text: float(len(text) % 5), cfg)


def own_logprobs(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    "What plain transformers say of a sequence alone, without a cache."
    ids = torch.tensor(np.array(tokens)[None])
    with torch.no_grad():
        found = model(ids).logits[0, :-1].float().log_softmax(-1)
    return found.gather(-1, ids[0, 1:, None])[:, 0].numpy()


def weights(loop: rln.GRPOLoop) -> str:
    return hashlib.sha256(
        b"".join(p.detach().numpy().tobytes() for p in loop.backend.policy.state.params.values())
    ).hexdigest()


@RARE
@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_trainer_sampler_and_transformers_agree_over_two_steps(family: str, lora: int, tmp_path: Path):
    asyncio.run(two_steps(family, lora, tmp_path))


async def two_steps(family: str, lora: int, tmp_path: Path) -> None:
    loop, plain = loop_of(family, lora), model_of(family)
    assert loop.backend.sampler is not None
    for step in (1, 2):
        record = await loop.step()
        for d, lp in zip(record.datums, record.loss.logprobs, strict=True):
            assert np.abs(lp.values - d.sampler_logprobs)[d.active].max() < 2e-6
            if step == 1:
                assert np.abs(lp.values - own_logprobs(plain, d.tokens))[d.active].max() < 2e-6
                assert np.abs(d.ref_logprobs - lp.values)[d.active].max() < 2e-6
    assert {f.name for f in rln.xray(record).failed} <= {"completions"}  # which are all cut
    folder = await loop.export(tmp_path / "out")
    if not lora:
        again = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        [prompt] = await loop.backend.sampler.sample([5, 6, 7, 8, 9], SampleParams(max_tokens=8, seed=3))
        assert np.abs(prompt.logprobs - own_logprobs(again, prompt.full_tokens)[4:]).max() < 1e-5


GATED = {"moe_num_experts": 4, "moe_k": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@RARE
@pytest.mark.parametrize("family", ["Ernie4_5_Moe", "Glm4Moe", "GptOss", *FAMILIES])
def test_bfloat16_keeps_in_float32_what_transformers_keeps(family: str, tmp_path: Path):
    model = model_of(family, GATED | EXPERTS)
    model.save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="bfloat16").eval()
    ours, ids = in_dtype(model, "bfloat16", "cpu"), torch.arange(200)[None]
    kinds = lambda m: {n: t.dtype for n, t in (*m.named_parameters(), *m.named_buffers())}
    assert kinds(ours) == kinds(theirs)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, atol=0, rtol=0)


@RARE
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_that_is_taken_back_comes_again_to_the_last_bit(family: str):
    asyncio.run(there_and_back(family))


async def there_and_back(family: str) -> None:
    loop = loop_of(family)
    await loop.step()
    first = await loop.step()
    after = weights(loop)
    await loop.undo()
    second = await loop.step()
    assert weights(loop) == after
    for a, b in zip(first.datums, second.datums, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        np.testing.assert_array_equal(a.sampler_logprobs, b.sampler_logprobs)


@RARE
@pytest.mark.parametrize("family", FAMILIES)
def test_cuts_penalties_turns_and_greedy_draws_are_the_models_own(family: str):
    asyncio.run(draws(family))


async def draws(family: str) -> None:
    "A second turn goes on from what was kept of the first; greedy text is that of `generate`."
    loop, plain = loop_of(family), model_of(family)
    sampler, prompt = loop.backend.sampler, [7, 9, 11, 13]
    greedy = (await sampler.sample(prompt, SampleParams(max_tokens=10, temperature=0)))[0].tokens.tolist()
    for n in range(1, len(greedy)):
        with torch.no_grad():
            assert greedy[n] == int(plain(torch.tensor([[*prompt, *greedy[:n]]])).logits[0, -1].argmax())
    for turn in await sampler.sample(
        prompt, SampleParams(n=2, max_tokens=9, seed=1, top_p=0.9, repetition_penalty=1.2)
    ):
        [later] = await sampler.sample([*turn.full_tokens, 21, 22], SampleParams(max_tokens=8, seed=2))
        own = own_logprobs(plain, later.full_tokens)[later.prompt_len - 1 :]
        assert np.abs(later.logprobs - own).max() < 2e-6
