"The entropy bonus: its gradient is that of plain autograd, however it is batched; rejected where it cannot be."

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_local_backend import backend_of, distributions, gradients, random_datums

from rl_notebook.core.builtin import builtin_loss
from rl_notebook.backends.local.trainer import open_local
from rl_notebook.config.config import Config
from rl_notebook.core.types import ConfigError, LossError
from rl_notebook.core.losses import LossOptions, make_loss_fn
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.recipes.rl_loop import main as train_by
from rl_notebook.recipes.rl_loop import replay_step
from rl_notebook.runs.run import Run
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_reward, toy_rows
from rl_notebook.experiments.replay import replay_backward
from rl_notebook.experiments.whatif import what_if
from rl_notebook.insight.xray import loss_words
from tiny_models import one_thread

__all__ = ["one_thread"]


def run(coroutine):
    return asyncio.run(coroutine)


def by_hand(backend, datums, coeff, aggregation):
    "Value and gradient of REINFORCE with a bonus, from the model's own logits, without the package's losses."
    terms = []
    for d, whole in zip(datums, distributions(backend, datums), strict=True):
        sampled = whole[torch.arange(len(d.weights)), torch.from_numpy(d.target_tokens.copy())]
        entropy = -(whole.exp() * whole).sum(-1)
        terms.append((-d.advantage * sampled - coeff * entropy)[torch.from_numpy(d.active.copy())])
    if aggregation == "token_mean":
        loss = torch.cat(terms).mean()
    else:
        loss = sum(t.mean() for t in terms if len(t)) / len(terms)
    params = backend.policy.state.params
    result = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    return loss.item(), {n: g for n, g in zip(params, result, strict=True) if g is not None}


@pytest.mark.parametrize(
    ("family", "tokens", "aggregation", "options", "share"),
    [
        ("qwen3", 10**6, "token_mean", {}, False),
        ("qwen3", 40, "sequence_mean", {"temperature": 0.7}, True),
        (
            "qwen3",
            10**6,
            "token_mean",
            {"prompt_logprobs": True, "gradient_checkpointing": True},
            False,
        ),
        ("gpt2", 60, "sequence_mean", {}, True),
    ],
)
def test_value_and_gradient_are_those_of_autograd(family, tokens, aggregation, options, share):
    backend = backend_of(
        family, dtype="float64", tokens_per_batch=tokens, reference=False, **options
    )
    torch.manual_seed(1)
    datums = random_datums(11, 6)
    if share:  # one prompt before all of them: computed once where there is room
        prompt = np.random.default_rng(0).integers(0, 200, 225)
        longer = [
            (np.r_[prompt, d.tokens], np.r_[np.zeros(len(prompt)), d.weights]) for d in datums
        ]
        datums = [replace(d, tokens=t, weights=w) for d, (t, w) in zip(datums, longer, strict=True)]
    value, want = by_hand(backend, datums, 0.3, aggregation)
    loss_fn = make_loss_fn(datums, entropy_coeff=0.3, aggregation=aggregation)
    out = run(backend.policy.forward_backward_custom(datums, loss_fn))
    got = gradients(backend)
    assert out.loss == pytest.approx(value, rel=1e-6)
    assert got.keys() == want.keys()
    trees = any(batch.tree for batch in backend.policy.state.scoring.batches(datums))
    assert trees or not (share and tokens == 10**6)
    scale = max(float(g.abs().max()) for g in want.values())
    for name, g in want.items():
        assert float((got[name] - g).abs().max()) <= (1e-6 if trees else 1e-7) * scale, name
    plain = backend_of(family, dtype="float64", tokens_per_batch=tokens, reference=False, **options)
    if "lora_rank" not in options:  # without the bonus it is another gradient
        run(
            plain.policy.forward_backward_custom(
                datums, make_loss_fn(datums, aggregation=aggregation)
            )
        )
        assert (
            max(float((gradients(plain)[n] - g).abs().max()) for n, g in want.items())
            > 1e-3 * scale
        )


def test_calls_of_a_step_add_up():
    datums = random_datums(4, 6)
    results = []
    for parts in ([datums], [datums[:2], datums[2:]]):
        backend = backend_of(dtype="float64", reference=False)
        tokens = float(sum(d.num_loss_tokens for d in datums))
        for part in parts:
            run(
                backend.policy.forward_backward_custom(
                    part, make_loss_fn(part, entropy_coeff=0.2, denominator=tokens)
                )
            )
        results.append(gradients(backend))
    for name, g in results[0].items():
        assert torch.allclose(g, results[1][name], rtol=1e-6, atol=1e-12)


SMALL_RUN = {
    "prompt_groups_per_step": 2,
    "completions_per_prompt": 4,
    "max_completion_tokens": 8,
    "max_seq_len": 96,
}


def test_a_step_says_what_the_bonus_took_off():
    async def main():
        cfg = Config(**SMALL_RUN, kl_beta=0.0, entropy_coeff=0.02, drop_zero_variance_groups=False)
        backend = open_local(*load_model("tiny"), reference=False)
        loop = GRPOLoop(backend, toy_rows(16, seed=3), lambda text: float(len(text)), cfg)
        for phase in (
            "prompts",
            "sample",
            "score",
            "advantages",
            "datums",
            "reference",
            "loss",
            "backward",
        ):
            result = getattr(loop, phase)()
            result = await result if asyncio.iscoroutine(result) else result
        looked = loop.state.values["loss"].output.loss
        trained = loop.state.values["backward"].output.loss
        assert looked == pytest.approx(trained, abs=1e-5)
        record = await loop.step()
        assert record.options["entropy_coeff"] == 0.02
        assert "the entropy bonus takes off" in loss_words(record)
        table = what_if(
            record, {"none": {"entropy_coeff": 0.0}, "more": {"entropy_coeff": 0.1}}
        ).table
        exact = record.metrics["entropy/exact"]
        assert table.loc["none", "loss"] - table.loc["recorded", "loss"] == pytest.approx(
            0.02 * exact, rel=1e-4
        )
        assert table.loc["none", "loss"] - table.loc["more", "loss"] == pytest.approx(
            0.1 * exact, rel=1e-4
        )
        await loop.undo()
        backward = await replay_backward(loop, record, "")
        assert backward.same is not False

    run(main())


ADAPTS = {
    **SMALL_RUN,
    "kl_beta": 0.0,
    "entropy_coeff": 0.01,
    "entropy_coeff_step": 0.004,
    "drop_zero_variance_groups": False,
    "seed": 4,
}


def weights_of_the_bonus(records) -> tuple[list[float], list[float]]:
    return [r.metrics["entropy/coeff"] for r in records], [
        r.options["entropy_coeff"] for r in records
    ]


def test_it_rises_below_its_target_and_falls_above():
    async def main(target, steps, undone=False):
        backend = open_local(*load_model("tiny"), reference=False)
        loop = GRPOLoop(
            backend, toy_rows(16, seed=3), toy_reward, Config(**ADAPTS, entropy_target=target)
        )
        for _ in range(steps):
            await loop.step()
            if undone:
                after = loop.state.bonus
                await loop.undo()
                await loop.step()
                assert loop.state.bonus == after
        return [*loop.records]

    rising = run(main(9.0, 4))
    coeffs, used = weights_of_the_bonus(rising)
    assert coeffs == used == pytest.approx([0.01, 0.014, 0.018, 0.022])
    assert [r.metrics["entropy/coeff"] for r in run(main(9.0, 3, undone=True))] == coeffs[:3]
    coeffs, used = weights_of_the_bonus(run(main(1e-3, 5)))
    assert coeffs == pytest.approx([0.01, 0.006, 0.002, 0.0, 0.0])
    assert used == [0.01, 0, 0, 0, 0]  # above the target nothing is used


def test_a_weight_that_adapts_is_resumed_sought_and_replayed(tmp_path):
    common = {**ADAPTS, "dcp_save_interval": 1, "rewards": ["format"], "entropy_target": 9.0}
    for name, lengths in (("whole", (5,)), ("parts", (2, 5))):
        for k, steps in enumerate(lengths):
            cfg = Config.from_dict({**common, "steps": steps, "log_path": str(tmp_path / name)})
            train_by(cfg, resume=k > 0, say=lambda text: None)
    whole, parts = ([*Run.open(tmp_path / name)] for name in ("whole", "parts"))
    assert weights_of_the_bonus(whole) == weights_of_the_bonus(parts)
    assert whole[-1].metrics["loss"] == parts[-1].metrics["loss"]

    result = run(replay_step(tmp_path / "whole", 4))
    assert result.first_difference is None, result
    assert "entropy_coeff" not in repr(result)  # what it adapted to is no other setting


def test_backends_and_losses_without_entropy_are_rejected_by_name():
    for settings, message in (
        ({"entropy_target": 0.0}, "entropy_target: got 0.0, step 0.005"),
        ({"entropy_coeff_step": 0.1}, "entropy_coeff_step: entropy_coeff is fixed"),
        (
            {"entropy_target": 0.3, "backend": "tinker", "lora_rank": 8},
            "entropy_target: backend='tinker' computes no",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            Config(**settings)
    with pytest.raises(ConfigError, match="entropy_coeff: backend='tinker' computes no entropy"):
        Config(backend="tinker", lora_rank=8, entropy_coeff=0.01)
    with pytest.raises(ConfigError, match="entropy_coeff: got -1"):
        Config(entropy_coeff=-1.0)
    with pytest.raises(LossError, match="a service cannot compute this loss: entropy_coeff"):
        builtin_loss(LossOptions("importance_sampling", entropy_coeff=0.01), "tinker")
    backend = open_local(*load_model("tiny"), reference=False)
    elsewhere = replace(backend, capabilities=replace(backend.capabilities, entropy=False))
    with pytest.raises(ConfigError, match=r"entropy_coeff: got 0\.01; expected 0"):
        GRPOLoop(
            elsewhere, toy_rows(4), toy_reward, Config(**SMALL_RUN, kl_beta=0.0, entropy_coeff=0.01)
        )
