"TRL's words mean what TRL does: each is compared with TRL's code on random batches, or rejected by its name."

import inspect
import textwrap
import warnings
from collections import defaultdict
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainingArguments
from trl import GRPOConfig, GRPOTrainer

from rl_notebook.config.aliases import canonical
from rl_notebook.config.config import Config
from rl_notebook.core.advantages import with_advantages
from rl_notebook.core.losses import LossOptions, make_loss_fn
from rl_notebook.core.types import ConfigError, Datum, PromptGroup, RolloutSample

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS = 6
WIDTH = 7
SEEDS = 2
LENGTHS = {"max_completion_length": 256}


def compiled_lines(function: str, first: str, last: str) -> Any:
    "Lines of a method of TRL's trainer, from one that begins so up to one that contains so, compiled."
    lines = inspect.getsource(getattr(GRPOTrainer, function)).splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip().startswith(first))
    end = next(i for i, line in enumerate(lines) if i > start and last in line)
    return compile(textwrap.dedent("\n".join(lines[start:end])), f"trl:{function}", "exec")


WEIGHTS = compiled_lines(
    "_generate_and_score_completions",
    "per_token_logps_diff =",
    "log probabilities for the reference model",
)
ADVANTAGES = compiled_lines(
    "_generate_and_score_completions", "unscorable_mask =", "# Unscorable completions"
)


class Accelerator:
    num_processes = 1
    sync_gradients = True

    def reduce(self, x: Any, reduction: str = "sum") -> Any:
        return x

    gather = gather_for_metrics = reduce

    def pad_across_processes(self, x: Any, dim: int, pad_index: float) -> Any:
        return x


def batch(seed: int) -> dict[str, torch.Tensor]:
    "Logprobs of a stale policy in float64, with holes and a short row."
    g = torch.Generator().manual_seed(seed)
    p = -3 * torch.rand(ROWS, WIDTH, generator=g, dtype=torch.float64) - 0.05

    def near(by):
        return (p + by * torch.randn(p.shape, generator=g, dtype=torch.float64)).clamp(max=-1e-3)

    mask = (torch.arange(WIDTH) < torch.tensor([[7], [4], [6], [7], [2], [5]])).double()
    mask[0, 2] = 0  # a token of a tool
    advantages = torch.tensor([1.2, -0.8, 0.0, -1.5, 0.6, 0.5], dtype=torch.float64)
    entropy = 2 * torch.rand(p.shape, generator=g, dtype=torch.float64)
    series = {"p": p, "old": near(0.4), "ref": near(0.5), "sampler": near(0.3), "entropy": entropy}
    return {**series, "mask": mask, "advantages": advantages}


def trl_loss(
    words: dict[str, Any], b: dict[str, torch.Tensor]
) -> tuple[float, np.ndarray, np.ndarray]:
    "TRL's loss, dL/dlogprob and dL/dentropy."
    vllm = any(name.startswith("vllm_") for name in words)
    args = GRPOConfig(
        **{**LENGTHS, **words}, use_cpu=True, bf16=False, report_to="none", num_generations=2
    )
    t: Any = GRPOTrainer.__new__(GRPOTrainer)
    t.args = args
    t.accelerator = Accelerator()
    t.model = SimpleNamespace(training=True)
    same = "loss_type beta importance_sampling_level top_entropy_quantile off_policy_mask_threshold entropy_coef"
    same += (
        " use_adaptive_entropy vllm_importance_sampling_correction vllm_importance_sampling_mode"
    )
    same += (
        " vllm_importance_sampling_clip_min vllm_importance_sampling_clip_max max_completion_length"
    )
    for name in same.split():
        setattr(t, name, getattr(args, name))
    t.epsilon_low = args.epsilon
    t.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    t.use_vllm = vllm
    t.aux_loss_enabled = False
    t.current_gradient_accumulation_steps = 1
    t._entropy_bonus_enabled = args.entropy_coef > 0
    t._metrics = {"train": defaultdict(list)}
    args.steps_per_generation = 1
    p = b["p"].clone().requires_grad_()
    entropy = b["entropy"].clone().requires_grad_()
    t._get_per_token_logps_and_entropies = lambda *a, **k: (p, entropy, None)
    inputs = {"prompt_ids": torch.ones(ROWS, 1), "prompt_mask": torch.ones(ROWS, 1)}
    inputs |= {
        "completion_ids": torch.ones(ROWS, WIDTH),
        "completion_mask": b["mask"],
        "advantages": b["advantages"],
    }
    inputs |= {"old_per_token_logps": b["old"], "ref_per_token_logps": b["ref"]}
    inputs |= {"num_items_in_batch": b["mask"].sum()}
    if vllm and args.vllm_importance_sampling_correction:
        names = vars(inspect.getmodule(GRPOTrainer)) | {"self": t, "mask": b["mask"]}
        exec(
            WEIGHTS,
            names := names
            | {"sampling_per_token_logps": b["sampler"], "old_per_token_logps": b["old"]},
        )
        inputs |= {"importance_sampling_ratio": names["vllm_importance_sampling_ratio"]}
        inputs |= {"sampling_per_token_logps": b["sampler"]}
    loss = t._compute_loss(None, inputs)
    loss.backward()
    return (
        loss.item(),
        p.grad.numpy(),
        np.zeros_like(p.grad) if entropy.grad is None else entropy.grad.numpy(),
    )


def our_loss(
    words: dict[str, Any], b: dict[str, torch.Tensor]
) -> tuple[float, np.ndarray, np.ndarray]:
    "Our loss of a config in the same words."
    options = LossOptions(**Config(**LENGTHS, **words).loss_options())
    corrected = options.tis != "off"
    series = {
        f"{name}_logprobs": b[name].numpy()
        for name in ("old", "ref", *(["sampler"] if corrected else []))
    }
    datums = [
        Datum(
            range(WIDTH + 1),
            b["mask"][i].numpy(),
            b["advantages"][i].item(),
            **{k: v[i] for k, v in series.items()},
        )
        for i in range(ROWS)
    ]
    p, entropy = ([x.clone().requires_grad_() for x in b[name]] for name in ("p", "entropy"))
    loss, _ = make_loss_fn(datums, options)(datums, p, entropy)
    loss.backward()
    rows = (
        [np.zeros(WIDTH) if x.grad is None else x.grad.numpy() for x in leaves]
        for leaves in (p, entropy)
    )
    return loss.item(), *map(np.stack, rows)


SEQUENCE = {"importance_sampling_level": "sequence"}
MODES = [f"{level}_{what}" for level in ("token", "sequence") for what in ("truncate", "mask")]
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
CASES: list[dict[str, Any]] = [
    *({"loss_type": k, "beta": beta} for k in (*CLIPPED, "cispo", "sapo", "vespo") for beta in (0.0, 0.04)),
    *({"loss_type": k, "beta": 0.04, **SEQUENCE} for k in CLIPPED),
    *({"loss_type": k, "vllm_importance_sampling_mode": mode} for k in ("grpo", "dapo", "sapo") for mode in MODES),
    *({"loss_type": "luspo", **SEQUENCE, "vllm_importance_sampling_mode": mode} for mode in MODES[2:]),
    *({"loss_type": "vespo", "vllm_importance_sampling_mode": mode} for mode in MODES[:2]),
    *({"loss_type": "dapo", "delta": delta, **more} for delta in (1.0, 1.1, 1.2, 1.5, 4.0) for more in ({}, SEQUENCE)),
    {"loss_type": "dapo", "delta": 1.15, "epsilon": 0.1, "epsilon_high": 0.28},
    {"loss_type": "dapo", "epsilon": 0.1, "epsilon_high": 0.28, "beta": 0.04, "use_bias_correction_kl": False},
    {"loss_type": "cispo", "epsilon_high": 5.0},
    {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0},
    {"loss_type": "vespo", "vespo_k_pos": 1.5, "vespo_lambda_pos": 2.0, "vespo_k_neg": 2.0, "vespo_lambda_neg": 1.0},
    *({"loss_type": k, "off_policy_mask_threshold": 0.05, "beta": 0.04} for k in ("grpo", "luspo", "vespo")),
    {"loss_type": "dapo", "off_policy_mask_threshold": 0.05, "vllm_importance_sampling_clip_max": 2.0},
    {"loss_type": "dapo", "vllm_importance_sampling_correction": True},
    {"loss_type": "dapo", "vllm_importance_sampling_correction": False, "vllm_importance_sampling_mode": "token_mask"},
    {"loss_type": "dapo", "vllm_importance_sampling_clip_min": 0.7, "vllm_importance_sampling_clip_max": None},
    *({"loss_type": k, "top_entropy_quantile": 0.4, "beta": 0.04} for k in ("grpo", "dapo", "cispo", "vespo")),
    *({"loss_type": k, "entropy_coef": 0.1} for k in ("dapo", "cispo", "vespo", "bnpo")),
]  # fmt: skip


def case_id(words: dict[str, Any]) -> str:
    return " ".join(f"{k.removeprefix('vllm_importance_sampling_')}={v}" for k, v in words.items())


@pytest.mark.parametrize("words", CASES, ids=case_id)
def test_loss_and_gradient_are_those_of_trl(words: dict[str, Any]) -> None:
    for seed in range(SEEDS):
        b = batch(seed)
        for mine, trl in zip(our_loss(words, b), trl_loss(words, b), strict=True):
            np.testing.assert_allclose(mine, trl, rtol=1e-9, atol=1e-9)


REJECTED: list[tuple[str, dict[str, Any]]] = [
    *(
        ("importance_sampling_level", {"loss_type": k, **SEQUENCE})
        for k in ("cispo", "sapo", "vespo")
    ),
    (
        "vllm_importance_sampling_mode",
        {"loss_type": "grpo", **SEQUENCE, "vllm_importance_sampling_mode": "token_mask"},
    ),
    (
        "tis: got product; expected 'token'",
        {"loss_type": "vespo", "vllm_importance_sampling_clip_max": 2},
    ),
    ("top_entropy_quantile", {"loss_type": "grpo", **SEQUENCE, "top_entropy_quantile": 0.2}),
    ("delta: got 0.9; expected at least 1", {"loss_type": "grpo", "delta": 0.9}),
    *(
        ("entropy_coef", {"loss_type": k, "entropy_coef": 0.1})
        for k in ("grpo", "dr_grpo", "sapo", "luspo")
    ),
    ("entropy_coef", {"loss_type": "dapo", "entropy_coef": 0.1, "top_entropy_quantile": 0.2}),
]


@pytest.mark.parametrize(("message", "words"), REJECTED)
def test_a_setting_whose_value_differs_from_trl_is_rejected(
    message: str, words: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as error:
        Config(**words)
    assert message in str(error.value)


FUNCTIONS = {"sum_then_normalize": 1, "normalize_then_sum": 2}


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("aggregation", FUNCTIONS)
def test_advantages_are_those_of_trl(aggregation: str, scale: str) -> None:
    weights = torch.tensor([1.0, 0.5])[: FUNCTIONS[aggregation]]
    scores = torch.rand(
        12, FUNCTIONS[aggregation], generator=torch.Generator().manual_seed(3)
    ).double()
    scores[4:8] = 0.25  # a group without signal
    trainer = SimpleNamespace(
        multi_objective_aggregation=aggregation, scale_rewards=scale, reward_weights=weights
    )
    trainer.reward_funcs = [*range(FUNCTIONS[aggregation])]
    trl = vars(inspect.getmodule(GRPOTrainer)) | {
        "self": trainer,
        "rewards_per_func": scores,
        "num_generations": 4,
    }
    exec(ADVANTAGES, trl := trl | {"device": "cpu"})
    cfg = Config(scale_rewards=scale, multi_objective_aggregation=aggregation)
    parts = [dict(zip("ab", row.tolist(), strict=False)) for row in scores]
    total = (scores * weights).sum(1).tolist()
    plain = {"tokens": [1, 2], "logprobs": [0, -1], "loss_mask": [0, 1]}
    samples = [
        RolloutSample(**plain, reward=r, rewards=p) for r, p in zip(total, parts, strict=True)
    ]
    groups = [PromptGroup(tuple(samples[i : i + 4]), index=i) for i in (0, 4, 8)]
    rule = {"scale": cfg.advantage_scale, "eps": cfg.advantage_eps}
    rule["weights"] = dict(zip("ab", weights.tolist(), strict=False))
    advantages = np.concatenate([g.advantages for g in with_advantages(groups, **rule)])
    np.testing.assert_allclose(advantages, trl["advantages"], atol=1e-6)


BASE = {f.name for f in fields(TrainingArguments)}


@pytest.mark.parametrize("name", [f.name for f in fields(GRPOConfig) if f.name not in BASE])
def test_every_field_of_trl_is_understood_or_rejected_by_its_name(name: str) -> None:
    "TRL's default is accepted, or rejected with what to take here; another value is never ignored."
    default = next(f.default for f in fields(GRPOConfig) if f.name == name)
    for value in (default, "something else"):
        try:
            understood = canonical(Config, {name: value})[0] or value in (default, None)
            text = ""
        except ConfigError as error:
            understood = name in str(error)
            text = str(error)
        assert understood
        assert "unknown setting" not in text


def test_defaults_that_enter_the_gradient_are_trls_and_are_listed() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain = Config(loss_type="dapo")
        with_kl = Config(loss_type="grpo", beta=0.04, num_generations=8)
        below = Config.from_dict({"loss_type": "grpo"}, {"beta": 0.04})
    assert (plain.kl_beta, plain.kl_bias_correction, plain.advantage_eps) == (0.0, False, 1e-4)
    assert (with_kl.kl_bias_correction, below.kl_bias_correction) == (True, True)
    first, second = (str(w.message) for w in caught[:2])
    assert "TRL's defaults: kl_beta=0.0, advantage_eps=0.0001" in first
    assert (
        "other defaults than TRL: learning_rate=1e-05 (1e-06 there), completions_per_prompt=4 (8 there)"
        in first
    )
    assert "completions_per_prompt=" not in second.partition("other defaults than TRL")[2]
    # nothing is divided
    assert Config(loss_type="grpo", scale_rewards="none").advantage_eps == 1e-8
    adaptive = Config(
        loss_type="dapo", use_adaptive_entropy=True, entropy_coef_delta=0.01, entropy_target=0.4
    )
    assert (adaptive.entropy_target, adaptive.entropy_coeff_step) == (0.4, 0.01)
    assert (
        Config(loss_type="dapo", use_adaptive_entropy=False, entropy_target=0.4).entropy_target
        is None
    )
