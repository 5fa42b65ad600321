"""What is predicted of a step before its model is loaded."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tiny_models import one_thread
from transformers import LlamaConfig

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.config.config import Config
from rl_notebook.core.types import BackendError, ConfigError
from rl_notebook.recipes.predict import (
    StepShape,
    build_model,
    extrapolate,
    kept_bytes,
    layer_counts,
    live_bytes,
    measure_layers,
    predict_step,
    random_datums,
    read_config,
)
from rl_notebook.task.models import load_model, tiny_path

__all__ = ["one_thread"]

STEP = {"prompt_groups_per_step": 2, "completions_per_prompt": 4, "max_completion_tokens": 10}
BYTES = ("state", "token", "pass", "weight")


def shape_of(cfg: Config) -> StepShape:
    return StepShape.of(cfg, prompt_tokens=12, completion_tokens=10)


def measured(cfg: Config, layers: int) -> dict[str, float]:
    before = live_bytes("cpu")
    return asyncio.run(measure_layers(cfg, read_config("tiny"), layers, shape_of(cfg), before))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"dtype": "bfloat16", "kl_beta": 0.0}, marks=pytest.mark.slow),
        {"lora_rank": 4},
    ],
    ids=["float32", "bfloat16", "lora"],
)
def test_bytes_of_two_layers_lead_to_those_of_all(settings):
    cfg = Config(**STEP, **settings)
    line = extrapolate([measured(cfg, 1), measured(cfg, 2)], (1, 2), 4)
    whole = measured(cfg, 4)
    for name in BYTES:
        assert line[name] == pytest.approx(whole[name], rel=0.01), name


def test_state_is_what_policy_sampler_reference_and_optimizer_hold():
    "Policy, sampler and its copy in another layout, reference, gradient, two moments, three snapshots: ten times the weights."
    cfg = Config(**STEP, kl_beta=0.01)
    parameters = list(build_model(read_config("tiny"), 4, "float32").parameters())
    weights = sum(p.nbytes for p in parameters)
    copied = weights - parameters[0].nbytes  # the embedding is looked up, not multiplied
    assert measured(cfg, 4)["state"] == pytest.approx(9 * weights + copied, rel=0.02)


def test_the_state_of_a_deep_model_is_predicted_from_few_layers(tmp_path):
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, **heads, num_hidden_layers=18)
    config.save_pretrained(tmp_path)
    cfg = Config(**STEP, base_model=str(tmp_path), kl_beta=0.0)
    predicted = asyncio.run(predict_step(cfg, prompt_tokens=12))
    assert predicted.layers == (1, 3)
    before = live_bytes("cpu")
    shape = StepShape.of(cfg, prompt_tokens=12, completion_tokens=10)
    whole = asyncio.run(measure_layers(cfg, read_config(str(tmp_path)), 18, shape, before))
    assert predicted.memory["state"] == pytest.approx(whole["state"] / 1e9, rel=0.02)


def test_what_a_pass_keeps_is_that_of_the_loaded_model():
    "The same batch through the weights that ship, at random through the shape: nothing depends on the values."
    cfg = Config(**STEP)
    shape = shape_of(cfg)
    datums = random_datums(shape, 264)

    async def kept_by_loaded() -> tuple[int, int]:
        async with open_local(*load_model("tiny"), reference=False, device="cpu") as backend:
            policy: Any = backend.policy
            return await policy.run(kept_bytes, policy.state, datums)

    kept, weight = asyncio.run(kept_by_loaded())
    values = measured(cfg, 4)
    assert values["weight"] == weight
    assert values["pass"] == pytest.approx(kept / weight, rel=1e-6)


def test_no_weight_is_read(tmp_path):
    config = json.loads((tiny_path() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    cfg = Config(**STEP, base_model=str(tmp_path), kl_beta=0.0)
    predicted = asyncio.run(predict_step(cfg, prompt_tokens=12))
    assert predicted.layers == (4,)
    assert set(predicted.seconds) == {"sample", "backward", "optimize", "sync"}
    assert all(seconds > 0 for seconds in predicted.seconds.values())
    assert f"about {predicted.step_seconds:.2g} s a step" in repr(predicted)
    with pytest.raises(BackendError):
        load_model(tmp_path)


def test_more_rows_than_are_sampled_at_once_take_more_rounds():
    cfg = Config(**{**STEP, "prompt_groups_per_step": 16}, max_concurrent=8)
    shape = shape_of(cfg)
    assert (shape.rows, shape.at_once, shape.sampled_groups) == (64, 8, 2)


@pytest.mark.parametrize(
    ("layers", "counts"), [(3, (3,)), (8, (1, 2)), (30, (1, 5)), (64, (1, 10))]
)
def test_layers_that_are_measured(layers, counts):
    config = read_config("tiny")
    config.layer_types = layers * ["full_attention"]
    config.num_hidden_layers = layers
    assert layer_counts(config) == counts


def test_a_pattern_of_layers_is_kept_whole():
    config = read_config("tiny")
    config.num_hidden_layers = 24
    config.layer_types = 6 * [
        "sliding_attention",
        "sliding_attention",
        "full_attention",
        "full_attention",
    ]
    assert layer_counts(config) == (4, 8)


@pytest.mark.parametrize(
    ("settings", "tokens", "text"),
    [
        ({}, {"prompt_tokens": 0}, "prompt_tokens"),
        ({}, {"prompt_tokens": 5, "completion_tokens": 0}, "completion_tokens"),
        (
            {"backend": "tinker", "base_model": "Qwen/Qwen3-8B", "lora_rank": 32},
            {"prompt_tokens": 5},
            "'local'",
        ),
    ],
)
def test_what_cannot_be_predicted_is_named(settings, tokens, text):
    with pytest.raises(ConfigError, match=text):
        asyncio.run(predict_step(Config(**settings), **tokens))
