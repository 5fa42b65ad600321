"A base in 8 bits under LoRA: the model whose weights are the rounded ones, in less memory, and rejected elsewhere."

import asyncio
import importlib.util
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_local_backend import ADAM, gradients, mixing_loss, naive_gradients, random_datums, run
from tiny_models import byte_tokenizer, one_thread, tiny_model
from transformers import AutoModelForCausalLM

from rl_notebook.backends.local.loading import unpacked
from rl_notebook.backends.local.trainer import open_local
from rl_notebook.recipes.open import open_backend
from rl_notebook.config.config import Config
from rl_notebook.core.types import ConfigError, MissingExtra, RecordError
from rl_notebook.insight.doctor.doctor import diagnose
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.recipes.rl_loop import main
from rl_notebook.task.toy import toy_reward, toy_rows

__all__ = ["one_thread"]


WHY = "torchao is not installed: pip install 'rl-notebook[quantized]'"
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason=WHY)
SETTINGS = {
    "base_model": "tiny", "dataset": "toy", "max_rows": 8, "completions_per_prompt": 4, "prompt_groups_per_step": 2,
    "max_completion_tokens": 8, "max_seq_len": 64, "learning_rate": 1e-2, "lora_rank": 4,
    "rewards": ["test_8bit:uneven"],
}  # fmt: skip


def uneven(text: str, answer: str) -> float:
    "A reward that differs inside nearly every group."
    return toy_reward(text, answer) + sum(map(ord, text)) % 7 / 10


def backend_of(family: str = "qwen3", shape: dict | None = None, **options):
    options = {"lora_rank": 4, "load_in_8bit": True, "inline": True, "device": "cpu", **options}
    backend = open_local(tiny_model(family, **(shape or {})), byte_tokenizer(), **options)
    torch.manual_seed(1)
    with torch.no_grad():  # an adapter that says something
        for p in backend.policy.state.params.values():
            p.normal_(std=0.1)
    return backend


def whole_twin(backend, family: str, shape: dict, dtype: str, **options):
    "A backend in full precision over the same rounded weights, with the same adapter."
    model = tiny_model(family, **shape)
    rounded = backend.policy.state.module.state_dict()
    with torch.no_grad():
        for name, p in model.named_parameters():
            adapted = f"base_model.model.{name.removesuffix('weight')}base_layer.weight"
            p.copy_(unpacked(rounded.get(adapted, rounded.get(f"base_model.model.{name}"))))
    copy = open_local(
        model, byte_tokenizer(), lora_rank=4, dtype=dtype, inline=True, device="cpu", **options
    )
    with torch.no_grad():
        for name, p in copy.policy.state.params.items():
            p.copy_(backend.policy.state.params[name])
    return copy


# What it computes ------------------------------------------------------------------------------------------------


@needs_torchao
@pytest.mark.parametrize(
    ("family", "tied", "options"),
    [
        ("qwen3", False, {}),
        ("qwen3", True, {"tokens_per_batch": 40}),
        ("llama", True, {"gradient_checkpointing": True}),
        ("llama", False, {"temperature": 0.7}),
    ],
)
def test_the_adapters_gradient_is_that_over_the_rounded_weights(family, tied, options):
    "Against the same weights in float64, through plain autograd; in float32 it is off by what float32 is."
    shape = {"tied": tied}
    datums = random_datums(3, 5)
    backend = backend_of(family, shape, **options)
    exact = whole_twin(backend, family, shape, "float64", **options)
    run(backend.policy.forward_backward_custom(datums, mixing_loss))
    want = naive_gradients(exact, datums, mixing_loss)
    got = gradients(backend)
    assert got.keys() == want.keys() == backend.policy.state.params.keys()
    for name, g in want.items():
        assert g.abs().max() > 0, name
        assert (got[name].double() - g).abs().max() <= 1e-4 * g.abs().max(), name
    # over the weights that were not rounded
    other = backend_of(family, shape, load_in_8bit=False, **options)
    run(other.policy.forward_backward_custom(datums, mixing_loss))
    assert (
        max(float((got[n] - g).abs().max() / g.abs().max()) for n, g in gradients(other).items())
        > 1e-3
    )


@needs_torchao
def test_policy_reference_and_sampler_share_the_base_and_a_sync_carries_the_adapter():
    backend = backend_of()
    state = backend.policy.state
    served = backend.sampler.engine.causal.model
    theirs = dict(served.named_parameters())
    mine = dict(state.scoring.causal.model.named_parameters())
    packed = [name for name, p in mine.items() if hasattr(p, "qdata")]
    assert len(packed) == 14
    assert all(theirs[name].qdata.data_ptr() == mine[name].qdata.data_ptr() for name in packed)
    assert backend.reference.scoring.causal is state.scoring.causal
    assert backend.sync.served.keys() == state.params.keys()
    assert all("lora_" in name for name in backend.sync.served)
    assert backend.capabilities.load_in_8bit

    def flops(b):
        return b.size.flops(3, 2)

    plain = backend_of(load_in_8bit=False)
    assert flops(backend) == flops(plain)
    assert backend.size.nbytes < 0.6 * plain.size.nbytes  # of a pass


# What is kept of it ----------------------------------------------------------------------------------------------


@needs_torchao
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_saved_state_is_exact_and_belongs_to_its_kind_of_base(where, tmp_path):
    name = "then" if where == "memory" else str(tmp_path / "then")
    datums = random_datums(7, 4)
    backend = backend_of()
    again = backend_of()

    async def train(one, steps):
        for _ in range(steps):
            await one.policy.forward_backward_custom(datums, mixing_loss)
            await one.policy.optim_step(ADAM)
        return {n: p.detach().clone() for n, p in one.policy.state.params.items()}

    run(train(again, 1))
    path = run(again.policy.save_state(name))
    run(train(again, 2))
    run(again.policy.load_state(path))
    want = run(train(backend, 3))
    got = run(train(again, 2))
    assert all(torch.equal(want[n], got[n]) for n in want)
    if where == "disk":
        plain = backend_of(load_in_8bit=False)
        with pytest.raises(
            RecordError, match="load_in_8bit of the saved state: got True; expected False"
        ):
            run(plain.policy.load_state(path))
        other = run(plain.policy.save_state(str(tmp_path / "other")))
        with pytest.raises(
            RecordError, match="load_in_8bit of the saved state: got False; expected True"
        ):
            run(backend.policy.load_state(other))


async def run_steps(cfg: Config, steps: int = 2):
    backend = await open_backend(cfg, say=lambda text: None)
    return GRPOLoop(backend, toy_rows(8), uneven, cfg)


@needs_torchao
def test_a_loop_over_it_steps_undoes_and_has_no_mismatch():
    async def test():
        cfg = Config.from_dict({**SETTINGS, "load_in_8bit": True, "kl_beta": 0.01})
        loop = await run_steps(cfg)
        records = [await loop.step() for _ in range(3)]
        result = await diagnose(records[-1])
        assert result.ok, result
        after = {n: p.detach().clone() for n, p in loop.backend.policy.state.params.items()}
        await loop.undo()
        again = await loop.step()
        assert again.metrics["loss"] == records[-1].metrics["loss"]
        assert all(torch.equal(p, after[n]) for n, p in loop.backend.policy.state.params.items())
        with pytest.raises(
            ConfigError, match="load_in_8bit: got False; expected True, as the backend was opened"
        ):
            GRPOLoop(loop.backend, loop.rows, uneven, replace(cfg, load_in_8bit=False))
        await loop.backend.close()

    asyncio.run(test())


@needs_torchao
def test_a_merged_export_is_the_model_that_was_trained(tmp_path):
    async def test():
        loop = await run_steps(Config.from_dict({**SETTINGS, "load_in_8bit": True}))
        await loop.step()
        tokens = np.arange(20, 32)
        trained = await loop.backend.sampler.logprobs(tokens)
        await loop.export(tmp_path / "adapter", "adapter")
        await loop.export(tmp_path / "merged", "merged")
        await loop.backend.close()
        return tokens, trained.values

    tokens, trained = asyncio.run(test())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.as_tensor(tokens)[None]
    with torch.no_grad():
        logprobs = torch.log_softmax(merged(ids).logits[0].float(), -1)
    scored = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0]
    np.testing.assert_allclose(scored, trained, atol=1e-4)
    assert "rounded to 8 bits" in (tmp_path / "adapter" / "README.md").read_text()


def test_a_run_recorded_without_the_setting_continues(tmp_path):
    settings = {**SETTINGS, "dcp_save_interval": 1, "log_path": str(tmp_path / "run")}
    main(Config.from_dict({**settings, "steps": 1}), say=lambda text: None)
    file = tmp_path / "run" / "config.yaml"
    lines = [
        line for line in file.read_text().splitlines(keepends=True) if "load_in_8bit" not in line
    ]
    assert len(lines) + 1 == len(file.read_text().splitlines())
    file.write_text("".join(lines))
    with pytest.raises(RecordError, match=r"another run's checkpoint.*load_in_8bit=True"):
        main(
            Config.from_dict({**settings, "steps": 2, "load_in_8bit": True}),
            resume=True,
            say=lambda text: None,
        )
    main(Config.from_dict({**settings, "steps": 2}), resume=True, say=lambda text: None)
    assert len(list((tmp_path / "run" / "steps").iterdir())) == 2


# What it costs, and what it says ---------------------------------------------------------------------------------


# Rejected by name ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"lora_rank": 0},
            r"load_in_8bit: got lora_rank=0, which trains the weights themselves; expected an adapter",
        ),
        (
            {"dtype": "float64"},
            r"load_in_8bit: got dtype float64 on cpu; expected dtype float32 or bfloat16",
        ),
        (
            {"family": "gpt2"},
            r"load_in_8bit: got GPT2LMHeadModel, where transformer.h.0.attn.c_attn.weight is in no",
        ),
    ],
)
def test_rejected_by_open_local(options, message):
    options = {"load_in_8bit": True, **options}
    with pytest.raises(ConfigError, match=message):
        backend_of(**options)


def test_a_mixture_of_experts_is_rejected():
    from test_router_replay import tiny_mixture

    with pytest.raises(
        ConfigError,
        match=r"load_in_8bit: got \w+MoeForCausalLM, where .*experts.* is in no nn.Linear",
    ):
        open_local(tiny_mixture(), byte_tokenizer(), lora_rank=4, load_in_8bit=True, inline=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "load_in_8bit: lora_rank=0 trains the base itself"),
        (
            {"lora_rank": 4, "backend": "tinker", "kl_beta": 0.0},
            "load_in_8bit: backend='tinker' samples from another base",
        ),
        (
            {"lora_rank": 4, "backend": "openai", "base_url": "http://127.0.0.1:1"},
            "load_in_8bit: backend='openai'",
        ),
    ],
)
def test_rejected_by_the_config(settings, message):
    with pytest.raises(ConfigError, match=message):
        Config(load_in_8bit=True, **settings)
    with pytest.raises(
        ConfigError, match="load_in_4bit: got 4 bits, which torchao packs for GPUs only"
    ):
        Config.from_dict({"load_in_4bit": True})


def test_a_missing_torchao_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(
        MissingExtra, match=r"load_in_8bit: got no torchao.*pip install 'rl-notebook\[quantized\]'"
    ):
        backend_of()
