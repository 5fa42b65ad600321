"Settings: the documents' configs, other spellings, types, rules, round trips."

import asyncio
import pickle
import re
import warnings
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import get_args

import hypothesis
import numpy as np
import pytest
import yaml
from hypothesis import strategies as st

import rl_notebook as rln
from rl_notebook.config import aliases as m
from rl_notebook.config.config import Config, DAPOConfig, DeployConfig, DROConfig, GSPOConfig
from rl_notebook.config.config import (
    HotloadConfig,
    InfraConfig,
    ISConfig,
    ResumeConfig,
    TISConfig,
    TrainerConfig,
)
from rl_notebook.config.config import WandBConfig, WeightSyncConfig, WeightSyncScope
from rl_notebook.config.settings import AdvantageScale
from rl_notebook.cli import default_of, parse_train
from rl_notebook.core.types import BackendError, ConfigError, LossError, SampleParams
from rl_notebook.core.losses import POLICY_LOSSES, LossOptions
from rl_notebook.core.loss_params import KLEstimator
from rl_notebook.runs.run import Run, RunFolder, differing

MODEL = "accounts/fireworks/models/qwen3-8b"


def make_config(**kwargs):
    "A Config and the messages that it gave."
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cfg = Config(**kwargs)
    return cfg, [str(w.message) for w in caught]


def config_error(**kwargs) -> str:
    with pytest.raises(ConfigError) as e:
        make_config(**kwargs)
    return str(e.value)


# ---- the documents' tables and snippets


def test_defaults_are_the_documents():
    cfg, messages = make_config()
    table = {
        "learning_rate": 1e-5,
        "kl_beta": 0.001,
        "completions_per_prompt": 4,
        "max_completion_tokens": 1024,
        "temperature": 1.0,
        "epochs": 1,
        "max_rows": 100,
        "max_seq_len": 4096,
        "lora_rank": 0,
        "prompt_groups_per_step": 1,
        "min_samples_per_fwd_bwd": None,
        "max_samples_per_fwd_bwd": 256,
        "max_concurrent": 32,
        "policy_loss": "grpo",
        "tis_enabled": False,
        "router_replay": False,
        "weight_sync_interval": 1,
        "dcp_save_interval": 0,
    }
    assert {k: getattr(cfg, k) for k in table} == table
    assert not messages
    assert (cfg.base_model, cfg.dataset, cfg.backend) == ("tiny", "toy", "local")


def test_the_earliest_recipe_with_all_its_sub_configs():
    cfg, messages = make_config(
        base_model=MODEL,
        dataset="https://example.org/gsm8k.jsonl",
        tis_enabled=True,
        infra=InfraConfig(),
        deployment=DeployConfig(deployment_id="grpo-serving", tokenizer_model="Qwen/Qwen3-8B"),
        hotload=HotloadConfig(hot_load_interval=1, dcp_save_interval=10, hot_load_timeout=300),
        wandb=WandBConfig(entity="my-team", project="grpo-experiment"),
        resume=ResumeConfig(resume_from="step-00010", resume_job_id="job-1", step_offset=10),
        tis=ISConfig(clip_high=2.0),
    )
    assert (cfg.weight_sync_interval, cfg.dcp_save_interval) == (1, 10)
    assert cfg.weight_sync == WeightSyncConfig(weight_sync_timeout=300)
    assert (cfg.tis, cfg.tis_cap, cfg.tis_floor) == ("token", 2.0, 0.0)
    assert cfg.resume == ResumeConfig("step-00010", "job-1", 10)
    assert cfg.backend == "fireworks"
    assert len(messages) == 1
    assert "hotload.hot_load_interval -> weight_sync_interval" in messages[0]


def test_an_async_recipe_has_its_settings_in_the_config_itself():
    cfg = Config(recipe="async_rl_loop", max_head_offpolicy_versions=4.0, learning_rate="1.7e-5")
    assert (cfg.max_head_offpolicy_versions, cfg.learning_rate) == (4, 1.7e-5)
    assert (
        repr(cfg)
        == "Config(learning_rate=1.7e-05, recipe='async_rl_loop', max_head_offpolicy_versions=4)"
    )
    assert Config.from_dict(cfg.to_dict()) == cfg
    assert "max_head_offpolicy_versions: recipe='rl_loop' would ignore it" in config_error(
        max_head_offpolicy_versions=4
    )


# ---- other spellings


TRL = {
    "num_generations": (8, "completions_per_prompt", 8),
    "max_completion_length": (64, "max_completion_tokens", 64),
    "beta": (0.04, "kl_beta", 0.04),
    "num_train_epochs": (3.0, "epochs", 3),
    "max_steps": (-1, "steps", None),
    "output_dir": ("runs/a", "log_path", "runs/a"),
    "scale_rewards": (False, "advantage_scale", "none"),
    "multi_objective_aggregation": ("normalize_then_sum", "advantage_scale", "gdpo"),
    "mask_truncated_completions": (True, "overlong", "mask"),
    "max_grad_norm": (0.2, "grad_clip_norm", 0.2),
    "shuffle_dataset": (False, "shuffle", False),
    "bf16": (True, "dtype", "bfloat16"),
    "adam_epsilon": (1e-6, "adam_eps", 1e-6),
}


@pytest.mark.parametrize("name", TRL)
def test_trl_names(name):
    value, ours, expected = TRL[name]
    cfg, messages = make_config(**{name: value})
    assert getattr(cfg, ours) == expected
    assert len(messages) == 1
    assert f"{name} -> {ours}" in messages[0]


def test_log_completions_by_trls_switch():
    settings = {"report_to": "trackio"}
    for trl_settings, expected in (
        ({"log_completions": True}, 16),
        ({"log_completions": True, "num_completions_to_print": 4}, 4),
        ({"log_completions": True, "num_completions_to_print": None}, 16),
        ({"log_completions": False}, 0),
        ({"log_completions": 5}, 5),
    ):
        cfg, messages = make_config(**settings, **trl_settings)
        assert (cfg.log_completions, messages) == (expected, [])
    assert "given twice" in config_error(**settings, log_completions=5, num_completions_to_print=4)


def test_the_message_points_at_the_caller():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Config(num_generations=8)
    assert caught[0].filename == __file__


def test_a_setting_that_only_trl_has_is_rejected_with_its_replacement():
    places = {
        "deepspeed": "tinker",
        "peft_config": "lora_rank",
        "optim": "adam_beta1",
        "resume_from_checkpoint": "=",
    }
    places |= {
        "push_to_hub": "loop.export",
        "remove_unused_columns": "column",
        "vllm_dtype": "openai",
    }
    for name, place in places.items():
        assert place in config_error(**{name: "x"}).partition(". ")[2]
    assert "loss_type='dr_grpo'), which is {'policy_loss': 'ppo', 'agg" in config_error(
        policy_loss="DR_GRPO"
    )
    assert (
        "take ppo, dapo, gspo, cispo, gmpo, clip_cov. It is TRL's epsilon: loss_type='grpo'"
        in config_error(epsilon=0.2)
    )


def test_a_checkpoint_of_another_job():
    cfg, _ = make_config(base_model=MODEL, init_from_checkpoint="job-7:step-00010")
    assert cfg.resume == ResumeConfig("step-00010", "job-7", 0)


# ---- unknown names and wrong types


def test_unknown_names_are_reported_all_at_once(tmp_path):
    (tmp_path / "c.yaml").write_text("learning_rte: 0.1\nigpo: {gama: 1, qqqq: 2}\nseed: 3\n")
    with pytest.raises(ConfigError) as caught:
        Config.from_yaml(tmp_path / "c.yaml", {"kl_betta": 0.1, "zzzz": 1, "xxxx": 2})
    head, *lines = str(caught.value).splitlines()
    assert head.endswith("c.yaml with kl_betta, zzzz, xxxx: Config: 6 unknown settings:")
    assert [lines[i].split("'")[3] for i in (0, 1, 3)] == ["learning_rate", "gamma", "kl_beta"]
    assert ["train --help` has all." in line for line in lines] == [
        False,
        False,
        True,
        False,
        True,
        True,
    ]
    with pytest.raises(
        ConfigError, match=r"DeployConfig: 2 unknown settings:\n- 'tokenizer'\. .*\n- 'shape'"
    ):
        DeployConfig(tokenizer="Qwen/Qwen3-8B", shape="x")


def test_names_of_the_field_are_taken_with_a_note():
    theirs = {
        "lr": 3e-4,
        "group_size": 8,
        "groups_per_batch": 2,
        "max_new_tokens": 64,
        "max_model_len": 512,
    }
    ours = {"learning_rate": 3e-4, "completions_per_prompt": 8, "prompt_groups_per_step": 2}
    ours |= {"max_completion_tokens": 64, "max_seq_len": 512}
    with pytest.warns(UserWarning, match="lr -> learning_rate"):
        assert Config(**theirs) == Config(**ours)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("clip_ratio", "eps_clip"),
        ("adv_estimator", "advantage_scale"),
        ("ppo_mini_batch_size", "ppo_n_minibatches"),
        ("kl_coef", "kl_beta"),
        ("kl_loss_coef", "kl_beta"),
        ("n_samples_per_prompt", "completions_per_prompt"),
        ("max_response_length", "max_completion_tokens"),
        ("total_epochs", "epochs"),
        ("total_training_steps", "steps"),
        ("clip_grad", "grad_clip_norm"),
    ],
)
def test_a_name_of_verl_leads_to_ours(theirs, ours):
    with pytest.raises(ConfigError, match=f"unknown setting {theirs!r}. Did you mean {ours!r}\\?"):
        Config(**{theirs: 1})


@pytest.mark.parametrize(
    "name", ["batch_size", "per_device_train_batch_size", "train_batch_size", "max_prompt_length"]
)
def test_a_name_that_means_something_else_is_rejected_with_the_one_to_take(name):
    with pytest.raises(
        ConfigError, match=f"^Config: {name}: got a .*[Ss]et (prompt_groups_per_step|max_seq_len), "
    ):
        Config(**{name: 8})


@pytest.mark.parametrize("entry", ["Config", "change", "branch"])
def test_a_loss_is_passed_as_a_function(entry):
    def mine(policy_logprobs, advantages):
        return -advantages * policy_logprobs

    small = {
        "prompt_groups_per_step": 2,
        "completions_per_prompt": 4,
        "max_completion_tokens": 8,
        "max_seq_len": 64,
    }
    loop = rln.GRPOLoop(
        rln.open_local(*rln.load_model("tiny")), rln.toy_rows(8), rln.toy_reward, Config(**small)
    )
    entries = {
        "Config": Config,
        "change": loop.change,
        "branch": lambda **s: asyncio.run(loop.branch(**s)),
    }
    try:
        result = entries[entry](policy_loss=mine)
        settings = {"Config": result, "change": loop.cfg, "branch": getattr(result, "cfg", None)}[
            entry
        ]
        assert settings.policy_loss == "mine"
        assert Config.from_dict(settings.to_dict()) == settings
        assert POLICY_LOSSES["mine"][0] is mine
        with pytest.raises(
            ConfigError, match=r"got a lambda; .*Write it as def my_loss\(.*rln\.register_loss"
        ) as e:
            entries[entry](
                policy_loss=lambda policy_logprobs, advantages: -advantages * policy_logprobs
            )
        assert "0x" not in str(e.value)
    finally:
        for name in [name for name in POLICY_LOSSES if name == "mine" or "lambda" in name]:
            POLICY_LOSSES.pop(name)


NEAR_MISSES = [
    (
        {"backend": "vllm"},
        r"expected one of local, openai, .* is backend='openai' with base_url='http",
    ),
    (
        {"backend": "transformers"},
        r"got 'transformers'; .* trains in this process is backend='local'",
    ),
    ({"wandb_project": "sums"}, r"Set wandb\.project, on the command line --wandb\.project"),
    ({"wandb": True}, r"wandb: got True; .* --report-to wandb"),
    (
        {"optimizer": "adamw"},
        r"optimizer: got a choice of optimizers\. It is AdamW: set learning_rate",
    ),
    ({"log_with": "wandb"}, r"Set report_to to some of wandb, trackio, tensorboard"),
]


@pytest.mark.parametrize(
    ("settings", "message"), NEAR_MISSES, ids=[next(iter(settings)) for settings, _ in NEAR_MISSES]
)
def test_a_near_miss_gets_the_name_that_is_meant(settings, message):
    assert re.search(message, config_error(**settings))


@pytest.mark.parametrize("data", [None, [("steps", 1)], "steps: 1", 3])
def test_a_config_is_read_from_a_mapping(data):
    with pytest.raises(
        ConfigError, match=r"from_dict: config: got .*; expected a mapping of settings"
    ):
        Config.from_dict(data)
    with pytest.raises(
        BackendError, match=r"load_model\(.*: model: got a value of type|no such folder"
    ):
        rln.load_model(data)


RANGES = {
    "learning_rate": "a finite number above 0",
    "top_p": "a finite number above 0, at most 1",
    "epochs": "a whole number, at least 1",
    "kl_beta": "a finite number, at least 0",
    "min_p": "a finite number from 0 to 1",
    "igpo.gamma": "a finite number from 0 to 1",
}


@pytest.mark.parametrize("name", RANGES)
def test_a_type_is_named_with_its_range(name):
    with pytest.raises(ConfigError) as error:
        Config(**{name: "fast"})
    assert f"{name}: got 'fast'; expected {RANGES[name]}" in str(error.value)
    assert "expected a finite number above 0, from 1e-37 to 1e38 in size" in config_error(
        learning_rate=1e-50
    )


@pytest.mark.parametrize(
    "word", ["clip_low", "clip_range", "cliprange", "clip_ratio_low", "clip_eps"]
)
def test_a_clip_leads_to_eps_clip(word):
    for takes_settings in (Config, LossOptions):
        with pytest.raises(
            (ConfigError, LossError), match=f"unknown setting {word!r}. Did you mean 'eps_clip'?"
        ):
            takes_settings(policy_loss="ppo", **{word: 0.1})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("epochs", 1.5, "a whole number"),
        ("epochs", True, "a whole number"),
        ("learning_rate", "fast", "a finite number"),
        ("learning_rate", float("nan"), "a finite number"),
        ("shuffle", "yes", "true or false"),
        ("base_model", 3, "text"),
        ("stop", 3, "a list"),
        ("policy_loss", "grp", "'grpo' or 'ppo'"),
        ("report_to", ["mlflow"], "'wandb' or 'trackio' or 'tensorboard'"),
        ("tis", 3.0, "a sub-config or a mapping"),
        ("deployment", {"weight_sync_scope": "per_run"}, "'per_trainer' or 'per_deployment'"),
        ("weight_sync_scope", "PER_DEPLOYMENT", "deployment.weight_sync_scope"),
        ("training_shape_id", "accounts/a", "trainer.training_shape_id"),
    ],
)
def test_wrong_types(name, value, expected):
    text = config_error(**{name: value})
    assert name.split(".")[0] in text
    assert expected in text


def test_values_of_the_cookbook_are_accepted():
    "A cap of 0 leaves the ratio at 1, a wide clip leaves it free below; an enum member goes by its name, too."
    taken = {
        "dapo": {"ratio_log_cap": 0},
        "gspo": {"seq_ratio_log_cap": 0},
        "cispo": {"eps_low": 1e3},
    }
    for name, value in taken.items():
        make_config(policy_loss=name, **{name: value})
    assert (
        make_config(policy_loss="importance_sampling", ratio_log_cap=0)[0].loss_options()[
            "ratio_log_cap"
        ]
        == 0
    )
    for scope in ("PER_DEPLOYMENT", "per_deployment", WeightSyncScope.PER_DEPLOYMENT):
        cfg, _ = make_config(backend="fireworks", deployment={"weight_sync_scope": scope})
        assert cfg.deployment.weight_sync_scope is WeightSyncScope.PER_DEPLOYMENT
    cfg, messages = make_config(backend="fireworks", hot_load_interval=2, hot_load_timeout=300)
    assert (cfg.weight_sync_interval, cfg.weight_sync.weight_sync_timeout) == (2, 300)
    assert "hot_load_interval -> weight_sync_interval" in messages[0]


def test_types_that_lose_nothing_are_taken():
    class Mode(Enum):
        TOKENS = "num_loss_tokens"

    cfg, _ = make_config(
        epochs=np.int64(3),
        learning_rate=np.float32(0.5),
        max_rows="20",
        log_path=Path("runs") / "a",
        stop="\n",
        kl_beta=0,
        aggregation="sum",
        grad_accumulation_normalization=Mode.TOKENS,
    )
    assert (cfg.epochs, cfg.learning_rate, cfg.max_rows, cfg.stop, cfg.kl_beta) == (
        3,
        0.5,
        20,
        ("\n",),
        0.0,
    )
    assert (type(cfg.epochs), type(cfg.kl_beta), cfg.log_path) == (
        int,
        float,
        str(Path("runs") / "a"),
    )
    assert cfg.grad_accumulation_normalization == "num_loss_tokens"
    assert (
        make_config(grad_accumulation_normalization=None)[0].grad_accumulation_normalization
        == "none"
    )


# ---- rules: each with the setting at fault and the way out

BUILTIN = {"loss_path": "builtin", "kl_beta": 0.0}
THERE = {**BUILTIN, "base_model": MODEL}
AT_TINKER = {**BUILTIN, "backend": "tinker", "lora_rank": 8}
DIVIDED = {"aggregation": "sum", "grad_accumulation_normalization": "num_loss_tokens"}
IGNORED = [
    ({"tis_cap": 3.0}, "tis_cap: the correction is off. "),
    ({"tis_enabled": True, "policy_loss": "reinforce"}, "tis: got token; expected 'off': "),
    ({"tis": TISConfig(level="sequence", icepop_threshold=2)}, "icepop_threshold: "),
    ({"tis": TISConfig(floor=6.0)}, "tis_floor: got 6.0; expected at "),
    ({"eps_clip": 0.2}, "policy_loss='grpo' does not read eps_clip: "),
    ({"eps_clip_c": 1.0, "policy_loss": "ppo"}, "eps_clip_c: "),
    ({"anchor": "rollout"}, "anchor: got rollout; expected 'o"),
    ({"dapo": DAPOConfig()}, "dapo: it is read with policy_los"),
    ({"kl_beta": 0, "kl_estimator": "k1"}, "kl_estimator: "),
    ({"kl_metric": True}, "kl_metric: the KL is measured an"),
    ({"grad_accumulation_normalization": "num_loss_tokens"}, "division happens once"),
    ({"completions_per_prompt": 1}, "a group of one has nothing to compare with"),
    ({"ddof": 0, "advantage_scale": "loo"}, "ddof: advantage_scale='loo'"),
    (
        {"refill": True, "drop_zero_variance_groups": False},
        "refill: with drop_zero_variance_groups=False",
    ),
    ({"rewards": ["a", "b"], "reward_weights": [1.0]}, "reward_weights: "),
    ({"max_completion_tokens": 4096}, "max_completion_tokens: 4096"),
    ({"min_samples_per_fwd_bwd": 512}, "min_samples_per_fwd_bwd: "),
    ({"lora_alpha": 16}, "lora_alpha: there is no adapter"),
    ({"report_to": "tensorboard"}, "report_to: TensorBoard's event f"),
    ({"log_completions": 5}, "log_completions: "),
    ({"weight_decay_on": "matrices", "weight_decay": 0}, "weight_decay_on: "),
    ({"difficulty_sampling": 0.1}, "difficulty_sampling: "),
    (
        {"dataset": "a.jsonl", "dataset_columns": {"question:problem": None}},
        "with a space after the colon",
    ),
    ({"dcp_save_interval": 5}, "dcp_save_interval: "),
    ({"temperature": 0}, "temperature: "),
    ({"concurrency": {"mode": "fixed"}}, "concurrency: "),
    (
        {"concurrency": {"mode": "fixed", "max_concurrency": 2}, "max_concurrent": 4},
        "max_concurrent says the same",
    ),
    ({"temperature": 0.7, "backend": "tinker", "lora_rank": 8}, "temperature: "),
    (
        {"temperature": 0.7, "base_model": "accounts/fireworks/models/qwen3-8b"},
        "backend='fireworks' scores at 1",
    ),
    (
        {"min_p": 0.1, "backend": "tinker", "lora_rank": 8},
        "min_p: backend='tinker' is not asked for it",
    ),
    (
        {"repetition_penalty": 1.2, "base_model": MODEL},
        "repetition_penalty: backend='fireworks' is not asked",
    ),
    ({"top_p": 1.5}, "top_p: got 1.5; expected at most 1"),
    ({"steps": 0}, "steps: got 0; expected at least 1"),
    ({"infra": InfraConfig()}, "trainer: backend='local' would ign"),
    ({"deployment": DeployConfig()}, "deployment: "),
    ({"resume": ResumeConfig(resume_job_id="j")}, "resume.resume_job_id: "),
    ({"router_replay": True, "backend": "tinker", "lora_rank": 8}, "router_replay: "),
    ({"loss_path": "builtin", "kl_beta": 0.0}, "loss_path: backend='local' compu"),
    ({"loss_path": "builtin", "base_model": MODEL}, "kl_beta: got 0.001"),
    ({**THERE, "tis": {"anchor": "policy"}}, "Set tis_anchor='old'"),
    ({**THERE, "policy_loss": "sapo"}, "got 'sapo'; expected grpo"),
    (
        {**AT_TINKER, "policy_loss": "dro"},
        "got 'dro'; expected grpo, ppo, importance_sampling, dapo, gspo, cispo at",
    ),
    ({**AT_TINKER, **DIVIDED}, "before it can be divided, and Tinker divides nothing"),
    (
        {**AT_TINKER, "min_samples_per_fwd_bwd": 8},
        "with min_samples_per_fwd_bwd the division comes last",
    ),
    ({**THERE, "policy_loss": "ppo", **DIVIDED}, "divide by what has a gradient"),
    ({"base_model": MODEL, "backend": "local"}, "base_model: "),
    (
        {"infra": InfraConfig(region="a"), "trainer": TrainerConfig(region="b")},
        "trainer.region is given twice",
    ),
    ({"base_model": MODEL, "dtype": "bfloat16"}, "dtype: backend='fireworks' decid"),
]


@pytest.mark.parametrize(
    ("settings", "message"), IGNORED, ids=lambda x: x[:40] if isinstance(x, str) else ""
)
def test_what_would_be_ignored_is_rejected(settings, message):
    assert message in config_error(**settings)


# ---- what the core gets


def test_the_names_of_losses_are_those_of_the_losses():
    losses = pytest.importorskip("rl_notebook.core.losses")
    from rl_notebook.core.advantages import SCALES

    assert set(m.SURROGATE_PARAMS) == set(losses.POLICY_LOSSES)
    assert set(get_args(KLEstimator)) == set(losses.KL_ESTIMATORS)
    assert set(get_args(AdvantageScale)) == set(SCALES)


def test_the_help_of_eps_clip_names_the_defaults():
    defaults = {n: p["eps_clip"] for n, p in m.SURROGATE_PARAMS.items() if "eps_clip" in p}
    assert defaults.pop("gmpo") == 0.4
    assert set(defaults.values()) == {0.2}
    assert default_of("eps_clip", None) == (
        "by loss: ppo 0.2, dapo 0.2, gspo 0.2, cispo 0.2, gmpo 0.4, clip_cov 0.2"
    )


CAP_3 = {"tis": "token", "tis_cap": 3.0}
SPELLINGS = {  # what is meant: all the ways to say it
    "the correction as it comes": (
        {"tis": "token"},
        [
            {"tis_enabled": True},
            {"tis": TISConfig()},
            {"tis": {}},
            {"tis": True},
            {"tis_enabled": True, "tis": {}},
        ],
    ),
    "a cap": (
        CAP_3,
        [{"tis": TISConfig(cap=3.0)}, {"tis.cap": 3.0}, {"tis_enabled": True, "tis": {"cap": 3.0}}],
    ),
    "no correction": ({}, [{"tis_enabled": False}, {"tis": "off"}, {"tis": False}, {"tis": None}]),
    "dapo": (
        {"policy_loss": "dapo", "eps_clip": 0.1, "eps_clip_high": 0.28, "ratio_log_cap": 20.0},
        [{"policy_loss": "dapo", "dapo": DAPOConfig(eps_clip=0.1)}],
    ),
    "gspo": (
        {"policy_loss": "gspo", "eps_clip": 0.3},
        [{"policy_loss": "gspo", "gspo": {"clip_ratio_low": 0.3}}],
    ),
    "both": (
        {"policy_loss": "gspo", "eps_clip": 0.3, "eps_clip_high": 0.3},
        [{"policy_loss": "gspo", "gspo": {"clip_ratio": 0.3}}],
    ),
    "cispo": (
        {"policy_loss": "cispo", "eps_clip": 0.5},
        [{"policy_loss": "cispo", "cispo": {"eps_low": 0.5}}],
    ),
    "dro": (
        {"policy_loss": "dro", "dro_beta": 0.2},
        [{"policy_loss": "dro", "dro": DROConfig(beta=0.2)}],
    ),
}


@pytest.mark.parametrize("meant", SPELLINGS)
def test_a_setting_of_the_loss_means_the_same_in_every_spelling(meant, tmp_path):
    "By keyword, from a file and on a command line."
    ours, others = SPELLINGS[meant]
    expected = Config(**ours).loss_options()
    for i, settings in enumerate([ours, *others]):
        plain = {name: m.plain(value) for name, value in settings.items()}
        path = tmp_path / f"{i}.yaml"
        path.write_text(yaml.safe_dump(plain))
        texts = {
            name: yaml.safe_dump(value, default_flow_style=True).split("\n")[0]
            for name, value in plain.items()
        }
        arguments = [part for name, text in texts.items() for part in (f"--{name}", text)]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            configs = [
                Config(**settings),
                Config.from_yaml(path),
                Config.from_dict({}, plain),
                parse_train(arguments)[0],
            ]
            configs += [parse_train(["--config", str(path)])[0], replace(Config(), **settings)]
        assert [cfg.loss_options() for cfg in configs] == [expected] * len(configs), settings
        assert {cfg.tis_enabled for cfg in configs} == {expected["tis"] != "off"}


def test_replace_takes_the_cookbooks_words():
    "A value that another spelling sets wins over the value that is copied."
    cfg = Config(policy_loss="dapo", dapo=DAPOConfig(eps_clip=0.1), tis="sequence")
    assert replace(cfg, dapo=DAPOConfig()).eps_clip == 0.2
    assert (replace(cfg, tis=TISConfig(cap=3.0)).tis, replace(cfg, **{"tis.cap": 3.0}).tis) == (
        "token",
        "sequence",
    )
    assert replace(cfg, tis_enabled=False).tis == "off"
    with pytest.raises(ConfigError, match="it is read with policy_loss='gspo', not 'dapo'"):
        replace(cfg, gspo=GSPOConfig())


OLD_RUN = """\
max_completion_tokens: 1024
policy_loss: {loss}
kl_beta: 0.0
eps_clip: null
eps_clip_high: null
eps_clip_c: null
ratio_log_cap: null
anchor: old
tis_enabled: {on}
loss_path: client
tis: {tis}
dapo: {dapo}
gspo: null
cispo: null
dro: null
sapo: null
igpo: null
"""
KEPT = {
    "the guides' correction": (
        {"loss": "grpo", "on": "true", "tis": "null", "dapo": "null"},
        {"tis": "token", "tis_cap": 2.0, "tis_anchor": "policy"},
    ),
    "a TISConfig": (
        {
            "loss": "ppo",
            "on": "true",
            "tis": "{cap: 5.0, level: sequence, anchor: old, floor: 0.0}",
            "dapo": "null",
        },
        {"tis": "sequence", "tis_cap": 5.0, "tis_anchor": "old"},
    ),
    "no correction": (
        {
            "loss": "dapo",
            "on": "false",
            "tis": "null",
            "dapo": "{eps_clip: 0.1, eps_clip_high: 0.3, ratio_log_cap: 20.0}",
        },
        {"tis": "off", "eps_clip": 0.1, "eps_clip_high": 0.3, "ratio_log_cap": 20.0},
    ),
}


@pytest.mark.parametrize("case", KEPT)
def test_a_run_that_was_recorded_with_two_homes_keeps_its_numbers(case, tmp_path):
    recorded, meant = KEPT[case]
    RunFolder.create(tmp_path, Config(kl_beta=0.0))
    (tmp_path / "config.yaml").write_text(OLD_RUN.format(**recorded))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = Run.open(tmp_path)
        configs = [
            Config.from_dict(run.config),
            Config.from_yaml(tmp_path / "config.yaml"),
            Config(**run.config),
        ]
        configs += [parse_train(["--resume", "--log-path", str(tmp_path)])[0]]
    for cfg in configs:
        assert {name: cfg.loss_options()[name] for name in meant} == meant
    assert not [
        name for name, *_ in differing(run.config, configs[0]).rows if name in cfg.loss_options()
    ]


def test_sampling_and_optimizer():
    cfg = Config(
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        stop=["</a>"],
        completions_per_prompt=8,
        grad_clip_norm=0.5,
    )
    params = cfg.sample_params(seed=3)
    assert (params.n, params.temperature, params.top_p, params.top_k, params.stop, params.seed) == (
        8, 0.7, 0.9, 5, ("</a>",), 3,
    )  # fmt: skip
    wary = Config(min_p=0.05, repetition_penalty=1.1).sample_params()
    assert (wary.min_p, wary.repetition_penalty, wary.processed, wary.draws_from_raw) == (
        0.05,
        1.1,
        True,
        False,
    )
    adam = cfg.adam()
    assert (adam.learning_rate, adam.beta1, adam.beta2, adam.eps, adam.weight_decay, adam.grad_clip_norm) == (
        1e-5, 0.9, 0.999, 1e-8, 0.01, 0.5,
    )  # fmt: skip


# ---- in and out

FULL = {
    "base_model": MODEL,
    "policy_loss": "gspo",
    "gspo": GSPOConfig(clip_ratio_low=0.1),
    "tis_enabled": True,
    "tis": TISConfig(cap=3.0, level="sequence"),
    "deployment": DeployConfig(deployment_extra_args=("--a",), extra_values={"k": "v"}),
    "trainer": TrainerConfig(extra_args=("--b", "--c")),
    "weight_sync": WeightSyncConfig(first_checkpoint_type="delta"),
    "wandb": WandBConfig(),
    "resume": ResumeConfig(resume_from="a"),
    "rewards": ("accuracy", "format"),
    "reward_weights": (1.0, 0.5),
    "stop": ("\n", "é☃"),
    "learning_rate": 1e-7,
    "steps": 3,
    "log_path": "runs/x",
    "output_model_id": "mine-1",
}


@pytest.mark.parametrize(
    "settings", [{}, FULL, {"tis_enabled": True, "tis": {}}, {"report_to": ("wandb", "trackio")}]
)
def test_round_trip_is_exact_and_quiet(settings, tmp_path):
    cfg, _ = make_config(**settings)
    cfg.to_yaml(tmp_path / "config.yaml")
    cfg.to_yaml(tmp_path / "config.yaml")  # its own it writes again
    (tmp_path / "mine.yaml").write_text("seed: 1  # and why")
    with pytest.raises(
        ConfigError, match=r"mine\.yaml: to_yaml: got something that this package did not write"
    ):
        cfg.to_yaml(tmp_path / "mine.yaml")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for again in (
            Config.from_yaml(tmp_path / "config.yaml"),
            Config.from_dict(cfg.to_dict()),
            Config(**cfg.flat()),
            replace(cfg),
            pickle.loads(pickle.dumps(cfg)),
        ):
            assert again == cfg
            assert not again.diff(cfg)
    assert Config.from_yaml(tmp_path / "config.yaml").to_yaml() == cfg.to_yaml()


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(
    st.fixed_dictionaries(
        {},
        optional={
            "learning_rate": st.floats(1e-12, 1e3),
            "temperature": st.floats(1e-3, 10),
            "kl_beta": st.just(0.0) | st.floats(1e-12, 1),
            "seed": st.integers(0, 2**63),
            "stop": st.lists(st.text(min_size=1, max_size=4), max_size=3).map(tuple),
            "run_name": st.text(
                st.characters(exclude_categories=["C"]), min_size=1, max_size=8
            ).filter(str.strip),
            "max_rows": st.none() | st.integers(1, 10**9),
            "rewards": st.lists(
                st.text(st.characters(categories=["L"]), min_size=1), max_size=3
            ).map(tuple),
        },
    )
)
@hypothesis.example({"stop": ("\x85", "a\u2028b\x85:", "\ufeff#", "\x07\r")})
def test_any_values_survive_yaml(settings):
    cfg = Config(**settings)
    assert Config.from_dict(yaml.safe_load(cfg.to_yaml())) == cfg


def test_overrides_win_under_any_spelling():
    data = {"completions_per_prompt": 8, "tis_enabled": True, "tis": {"cap": 3.0}}
    with pytest.warns(UserWarning, match="num_generations"):
        cfg = Config.from_dict(data, {"num_generations": 16, "tis.level": "sequence"})
    assert (cfg.completions_per_prompt, cfg.tis, cfg.tis_cap) == (16, "sequence", 3.0)
    assert Config.from_dict(data, {"tis": None}) == Config.from_dict(data, {"tis_enabled": False})
    assert (
        Config.from_dict(data, {"tis": None}).loss_options()
        == Config(completions_per_prompt=8).loss_options()
    )
    with pytest.warns(UserWarning, match="epsilon_high"):
        assert Config.from_dict({"loss_type": "cispo"}, {"epsilon_high": 5.0}).eps_clip_high == 4.0


def test_numbers_that_yaml_reads_as_text_are_numbers_inside_of_a_setting_too(tmp_path):
    samples = "{temperature: 6e-1, top_p: '0.5', max_completion_tokens: 1e1, stop: ['1e1x']}"
    text = f"eval_rows: 4\neval_sampling: {samples}\nchat_template_kwargs: {{a: [5E-2], version: '0.1'}}\nrun_name: 12e5\n"
    (tmp_path / "c.yaml").write_text(text)
    cfg = Config.from_yaml(tmp_path / "c.yaml")
    assert cfg.eval_sampling == {
        "temperature": 0.6,
        "top_p": 0.5,
        "max_completion_tokens": 10,
        "stop": ["1e1x"],
    }
    assert cfg.chat_template_kwargs == {"a": [0.05], "version": "0.1"}
    assert cfg.run_name == "12e5"
    assert Config.from_dict(yaml.safe_load(cfg.to_yaml())) == cfg


@pytest.mark.parametrize(
    "line",
    [
        "min_p: null",
        "top_k: -1",
        "top_k: 0",
        "top_k: null",
        "repetition_penalty: null",
        "top_p: null",
    ],
)
def test_values_that_other_tools_write_for_off_mean_off(line, tmp_path):
    (tmp_path / "c.yaml").write_text(line + "\n")
    settings = yaml.safe_load(line)
    for cfg in (
        Config.from_yaml(tmp_path / "c.yaml"),
        Config(**settings),
        replace(Config(), **settings),
    ):
        assert cfg == Config()
    assert Config(eval_sampling=settings).eval_params() == Config().eval_params()
    assert SampleParams(**settings) == SampleParams()


def test_a_config_file_that_cannot_be_used_is_named_with_all_that_is_wrong(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text("kl_beta: -3\nmax_completion_tokens: 0\n")
    with pytest.raises(ConfigError) as caught:
        Config.from_yaml(path, {"temperature": -1})
    message = str(caught.value)
    assert message.startswith(f"{path} with temperature: ")
    assert all(name in message for name in ("kl_beta", "max_completion_tokens", "temperature"))
    with pytest.raises(ConfigError, match=r"Did you mean '.*config.yaml'\?"):
        Config.from_yaml(tmp_path / "confg.yaml")
    path.write_text("kl_beta: [1\nfoo")
    with pytest.raises(ConfigError, match="line 2: expected ',' or ']'"):
        Config.from_yaml(path)
