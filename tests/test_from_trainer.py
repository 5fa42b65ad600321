"""Experiments of other trainers, read: what `to_trainer` writes comes back, and of what others wrote nothing is dropped in silence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

import rl_notebook as rln
from rl_notebook.cli import main as command
from rl_notebook.config.config import Config
from rl_notebook.core.types import ConfigError
from rl_notebook.recipes.conversion import TABLES, convert, learning_settings, same_value
from rl_notebook.recipes.from_trainer import pattern_of, read_paths, shell_settings
from rl_notebook.recipes.rl_loop import Problem
from rl_notebook.recipes.to_trainer import write_trainer
from rl_notebook.task.rewards import reward_fn
from rl_notebook.task.toy import toy_format_reward, toy_reward

VALUES: dict[str, list[Any]] = {  # of settings that a table has, and of some that none has
    "base_model": ["Qwen/Qwen3-0.6B"],
    "epochs": [1, 3],
    "steps": [None, 7],
    "seed": [0, 5],
    "shuffle": [True, False],
    "completions_per_prompt": [4, 8],
    "prompt_groups_per_step": [4, 8],
    "ppo_n_minibatches": [1, 2],
    "max_completion_tokens": [32, 64],
    "max_seq_len": [96, 256],
    "temperature": [1.0, 0.7],
    "top_p": [1.0, 0.9],
    "top_k": [0, 20],
    "min_p": [0.0, 0.05],
    "repetition_penalty": [1.0, 1.1],
    "advantage_scale": ["std", "none", "loo", "batch"],
    "advantage_eps": [1e-4, 1e-6],
    "overlong": ["keep", "mask"],
    "drop_zero_variance_groups": [True, False],
    "policy_loss": ["ppo", "grpo", "importance_sampling", "cispo", "gspo", "dppo_tv"],
    "anchor": ["old", "rollout"],
    "aggregation": ["token_mean", "sequence_mean", "sample_mean", "sum", "constant", "prompt_mean"],
    "kl_beta": [0.0, 0.05],
    "kl_estimator": ["k3", "k1"],
    "eps_clip": [0.2, 0.1],
    "eps_clip_high": [None, 0.28],
    "eps_clip_c": [None, 3.0],
    "dppo_low": [None, 0.15],
    "entropy_coeff": [0.0, 0.01],
    "learning_rate": [1e-5, 3e-6],
    "lr_scheduler_type": ["constant", "constant_with_warmup", "linear", "cosine"],
    "warmup_steps": [0, 2],
    "adam_beta1": [0.9, 0.8],
    "adam_beta2": [0.999, 0.95],
    "weight_decay": [0.01, 0.0],
    "grad_clip_norm": [1.0, 0.0],
    "lora_rank": [0, 16, 32],
    "lora_alpha": [32.0, 16.0],
    "dtype": ["float32", "bfloat16"],
}
LIKE = {  # a config that a trainer has a term for
    "trl": {"policy_loss": "ppo", "advantage_eps": 1e-4, "drop_zero_variance_groups": False},
    "verl": {"policy_loss": "ppo", "advantage_eps": 1e-6, "drop_zero_variance_groups": False},
    "skyrl": {"policy_loss": "ppo", "advantage_eps": 1e-6, "drop_zero_variance_groups": False},
    "prime-rl": {"policy_loss": "dppo_tv", "anchor": "rollout", "advantage_scale": "none"},
    "tinker": {"policy_loss": "ppo", "anchor": "rollout", "aggregation": "sum", "lora_rank": 32},
}
SMALL = {
    "max_completion_tokens": 32,
    "max_seq_len": 96,
    "prompt_groups_per_step": 4,
    "kl_beta": 0.0,
}
ROWS = rln.load_rows(rln.toy_rows(32))
REWARD = [toy_reward, reward_fn(toy_format_reward, weight=0.5)]
PAIRS = [(name, value) for name, values in VALUES.items() for value in values]
changes = st.lists(st.sampled_from(PAIRS), max_size=6).map(dict)


def config_like(trainer: str, values: dict[str, Any]) -> Config:
    try:
        return Config(**SMALL | LIKE[trainer] | values)
    except ConfigError:  # settings that do not go together
        assume(False)
        raise


@pytest.mark.parametrize("trainer", TABLES)
@settings(
    max_examples=6,
    phases=[Phase.generate],
    suppress_health_check=[*HealthCheck],
    deadline=None,
    derandomize=True,
)
@given(values=changes)
def test_what_was_written_is_read(
    trainer: str, values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    "By way of the files: each setting is what the conversion says that it is there, and an exact one is ours."
    cfg = config_like(trainer, values)
    folder = tmp_path_factory.mktemp("out")
    written = write_trainer(cfg, Problem(ROWS, (), REWARD), trainer, folder, None)
    experiment = rln.from_trainer(folder)
    read = learning_settings(experiment.cfg.flat())
    for one in written.conversion.carried:
        if one.there is not None:
            assert same_value(read[one.setting], one.there), one
        if one.kind == "exact" and one.setting not in ("eps_clip", "eps_clip_high"):
            assert same_value(one.here, one.there), one
    assert experiment.trainer == trainer
    assert experiment.notes == ()
    assert experiment.weights == (1.0, 0.5)
    assert [fn.function for fn in experiment.load_rewards()] == [toy_reward, toy_format_reward]
    assert [(r.messages, r.answer) for r in experiment.rows] == [
        (r.messages, r.answer) for r in ROWS
    ]


@pytest.mark.parametrize("trainer", TABLES)
def test_each_setting_of_a_table_comes_back(trainer: str) -> None:
    "All of them at once, each at a value that is no default."
    table = TABLES[trainer]
    ours = {slot.setting for slot in table.slots} & {*VALUES}
    values: dict[str, Any] = SMALL | LIKE[trainer]
    values |= {"steps": 9, "lr_scheduler_type": "constant_with_warmup"}
    if "kl_beta" in ours:
        values["kl_beta"] = 0.05
    changed = ours - {*values}
    values |= {name: VALUES[name][:2][-1] for name in changed - {"kl_estimator"}}
    if values.get("advantage_scale") == "none":
        values.pop("advantage_eps", None)
    result = convert(Config(**values), trainer)
    read, notes, _ = read_paths(trainer, result.settings)
    learned = learning_settings(read.flat())
    assert notes == []
    compared = {one.setting: one for one in result.carried if one.setting in ours}
    assert changed - {"eps_clip", "eps_clip_high", "max_seq_len"} <= {*compared}
    assert len(compared) >= 12
    for one in compared.values():
        assert one.kind != "impossible", one
        assert same_value(learned[one.setting], one.here), one


@pytest.mark.parametrize("trainer", TABLES)
def test_defaults_are_read_written_and_read_again(trainer: str) -> None:
    needed = {
        "model_name": "m",
        "learning_rate": 1e-5,
        "max_tokens": 64,
        "rows.batch_size": 8,
        "rows.group_size": 4,
    }
    sizes = {
        "tinker": needed,
        "prime-rl": {"orchestrator.batch_size": 64, "orchestrator.group_size": 8},
    }
    cfg, _, _ = read_paths(trainer, {**TABLES[trainer].defaults, **sizes.get(trainer, {})})
    again, notes, _ = read_paths(trainer, convert(cfg, trainer).settings)
    assert learning_settings(again.flat()) == learning_settings(cfg.flat())
    assert again == replace(cfg, eps_clip_high=again.eps_clip_high)  # None is eps_clip
    assert notes == []


@pytest.mark.parametrize("trainer", TABLES)
def test_every_name_of_a_table_is_used(trainer: str) -> None:
    table = TABLES[trainer]
    local = table.local.split()
    known = {*table.config, *table.defaults, *table.outside}
    assert {*table.earlier}.isdisjoint(table.config)
    for today in table.earlier.values():
        assert today in known or pattern_of(today, local), today
    for name, value in table.defaults.items():
        if name in table.config and not str(table.config[name]).startswith("$"):
            assert same_value(value, table.config[name]) or name in table.lacks, name


# --- files of others --------------------------------------------------------------------------------------------------

SCRIPT = r"""
set -x
: "${N:=8}"
LR=${LR:-1e-6}   # of AdamW
case "$LOSS" in
    vanilla) CLIP=0.2;;
    *) CLIP=0.15;;
esac
if [ -z "$MODEL" ]; then
    MODEL=Qwen/Qwen3-8B
fi
DATA=(
    data.train_batch_size=$((32 * 4))
    data.train_files="$HOME/data/train.parquet"
)
ACTOR=(actor_rollout_ref.actor.optim.lr=${LR} actor_rollout_ref.actor.ppo_mini_batch_size=64)
python3 -m verl.trainer.main_ppo "${DATA[@]}" "${ACTOR[@]}" \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.model.path=$MODEL actor_rollout_ref.rollout.n=${N} \
    actor_rollout_ref.actor.clip_ratio_low=${CLIP} \
    actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean \
    actor_rollout_ref.actor.grad_clip=0.5 \
    +actor_rollout_ref.actor.mystery=3 \
    reward.custom_reward_function.path=my_reward.py \
    trainer.logger='["console","wandb"]' "$@"
"""


def test_a_launch_script_of_verl(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    (tmp_path / "my_reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.25\n"
    )
    experiment = rln.from_trainer(tmp_path)
    cfg = experiment.cfg
    assert experiment.trainer == "verl"
    assert (cfg.base_model, cfg.completions_per_prompt, cfg.prompt_groups_per_step) == (
        "Qwen/Qwen3-8B",
        8,
        128,
    )
    assert (cfg.ppo_n_minibatches, cfg.learning_rate, cfg.grad_clip_norm) == (2, 1e-6, 0.5)
    named = {note.partition("=")[0]: note for note in experiment.notes}
    assert set(named) == {
        "data.seed",
        "actor_rollout_ref.actor.clip_ratio_low",
        "actor_rollout_ref.actor.policy_loss.loss_mode",
        "actor_rollout_ref.actor.mystery",
    }
    assert named["actor_rollout_ref.actor.clip_ratio_low"].endswith(
        "not read, it is no literal value"
    )
    assert "'geo_mean': 'vanilla' here" in named["actor_rollout_ref.actor.policy_loss.loss_mode"]
    assert named["actor_rollout_ref.actor.mystery"].endswith("=3: not in the table of verl 0.9.1")
    assert set(experiment.unlearned) == {
        "data.train_files",
        "trainer.logger",
        "reward.custom_reward_function.path",
    }
    assert experiment.load_rewards()[0].function("", "", "") == 0.25
    assert command(["convert", str(tmp_path), "--out", str(tmp_path / "ours.yaml")]) == 0
    assert "geo_mean" in capsys.readouterr().out
    assert Config.from_yaml(tmp_path / "ours.yaml") == cfg


def test_a_folder_of_hydra(tmp_path: Path) -> None:
    words = {
        "data": {"max_response_length": 256},
        "actor_rollout_ref": {
            "rollout": {"response_length": "${data.max_response_length}", "n": 4}
        },
    }
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra/config.yaml").write_text(yaml.safe_dump(words))
    (tmp_path / ".hydra/overrides.yaml").write_text(
        "- data.max_response_length=256\n- actor_rollout_ref.rollout.n=4\n"
    )
    for path in (tmp_path, tmp_path / ".hydra/overrides.yaml"):
        cfg = rln.from_trainer(path).cfg
        assert (cfg.max_completion_tokens, cfg.completions_per_prompt) == (256, 4)


def test_a_config_of_skyrl(tmp_path: Path) -> None:
    lines = {
        "trainer.algorithm.loss_reduction": "prompt_mean",
        "trainer.policy.optimizer_config.lr": "3e-6",
        "trainer.algorithm.use_tis": True,
    }
    lines |= {
        "trainer.policy.optimizer_config.num_warmup_steps": 8,
        "generator.sampling_params.top_k": -1,
    }
    (tmp_path / "skyrl.yaml").write_text(yaml.safe_dump(lines))
    experiment = rln.from_trainer(tmp_path / "skyrl.yaml")
    cfg = experiment.cfg
    assert (cfg.aggregation, cfg.learning_rate, cfg.top_k) == ("prompt_mean", 3e-6, 0)
    assert (cfg.lr_scheduler_type, cfg.warmup_steps) == (
        "constant_with_warmup",
        2,
    )  # four updates a step
    assert experiment.notes == (
        "trainer.algorithm.use_tis=True: a correction for the sampler, set tis",
    )


def test_files_of_prime_rl(tmp_path: Path) -> None:
    whole = 'max_steps = 20\nseq_len = 2048\n[model]\nname = "m"\n[orchestrator]\nbatch_size = 128\ngroup_size = 16\nmax_off_policy_steps = 0\n'
    (tmp_path / "rl.toml").write_text(
        whole
        + "[orchestrator.sampling]\nmax_tokens = 64\n[trainer.loss]\nkl_tau = 0.0\n[trainer.optim]\nlr = 3e-6\nfoo = 1\n"
    )
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/orch.toml").write_text(
        'max_steps = 20\nseq_len = 2048\nbatch_size = 128\nrollouts_per_example = 16\nmax_off_policy_steps = 0\n[model]\nname = "m"\n[sampling]\nmax_tokens = 64\n'
    )
    (tmp_path / "parts/train.toml").write_text(
        '[model]\nname = "m"\n[optim]\nlr = 3e-6\n[loss]\nkl_tau = 0.0\n'
    )
    whole_file = rln.from_trainer(tmp_path / "rl.toml")
    parts = rln.from_trainer(tmp_path / "parts")
    assert whole_file.notes == ("trainer.optim.foo=1: not in the table of prime-rl 559b447",)
    assert parts.notes == ()
    assert parts.cfg == whole_file.cfg
    assert (
        parts.cfg.prompt_groups_per_step,
        parts.cfg.policy_loss,
        parts.cfg.max_completion_tokens,
    ) == (8, "dppo_tv", 64)


RECIPE = """
import chz
from tinker_cookbook.rl import train

@chz.chz
class CLIConfig:
    model_name: str = "Qwen/Qwen3-8B"
    group_size: int = 4
    groups_per_batch: int = 100
    learning_rate: float = 4e-5
    max_tokens: int = 512
    loss_fn: str = "cispo"
    difficulty: str = "hard"

def main(cli):
    builder = Builder(batch_size=cli.groups_per_batch, group_size=cli.group_size)
    return train.Config(learning_rate=cli.learning_rate, num_substeps=2, dataset_builder=builder)
"""


def test_a_recipe_its_arguments_and_the_config_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE)
    (tmp_path / "run.sh").write_text(
        "python -m tinker_cookbook.recipes.math_rl.train model_name=Qwen/Qwen3-8B group_size=4 groups_per_batch=100 \\\n  learning_rate=4e-5 max_tokens=512 loss_fn=cispo num_substeps=2 difficulty=hard\n"
    )
    logged = {
        "model_name": "Qwen/Qwen3-8B",
        "learning_rate": 4e-5,
        "max_tokens": 512,
        "loss_fn": "cispo",
        "num_substeps": 2,
        "difficulty": "hard",
    }
    logged["dataset_builder"] = {"batch_size": 100, "group_size": 4}
    (tmp_path / "config.json").write_text(json.dumps(logged))
    cfgs = []
    for name in ("recipe.py", "run.sh", "config.json"):
        experiment = rln.from_trainer(tmp_path / name)
        assert any(
            note.startswith("difficulty='hard': not in the table") for note in experiment.notes
        )
        cfgs.append(experiment.cfg)
    assert cfgs[0] == cfgs[1] == cfgs[2]
    cfg = cfgs[0]
    assert (
        cfg.policy_loss,
        cfg.prompt_groups_per_step,
        cfg.completions_per_prompt,
        cfg.ppo_n_minibatches,
    ) == ("cispo", 100, 4, 2)


def test_a_shell_script_is_not_run_and_hostile_words_do_nothing(tmp_path: Path) -> None:
    text = "x=$(touch /tmp/never)\na.b=${x:-${y:-3}} c.d=$((9**9**9)) e.f='it''s' \\\n g.h=\"1 # no comment\" # one\ni.j=${#z[@]} \"open"
    words = shell_settings(text)
    assert (words["a.b"], words["c.d"], words["e.f"]) == ("$(touch", "$((9**9**9))", "its")
    assert (words["g.h"], words["i.j"]) == ("1 # no comment", "${#z[@]}")


def test_arithmetic_of_a_shell_script() -> None:
    words = shell_settings("n=8\na.b=$(((n + 2) * 4)) c.d=$((n / (1 + 1)))")
    assert words == {"a.b": "40", "c.d": "4"}
    words = shell_settings("train a.b=$((3+)) c.d=$((1/0))")
    assert words == {"a.b": "$((3+))", "c.d": "$((1/0))"}


def test_variables_that_contain_each_other_do_not_hang() -> None:
    assert len(shell_settings("x=a$y\ny=b$x\nz=$y$x\na.b=$z")["a.b"]) < 1000


OWN_TRAINER = """
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer
from peft import LoraConfig

class MyTrainer(GRPOTrainer):
    pass

args = GRPOConfig(learning_rate=2e-6, warmup_ratio=0.1, max_steps=20, scale_rewards=False, output_dir=str(HERE))
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
trainer = MyTrainer(model=model, reward_funcs=["gsm8k"], args=args, peft_config=LoraConfig(r=16))
"""


def test_a_script_of_trl_with_its_own_trainer(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OWN_TRAINER)
    experiment = rln.from_trainer(tmp_path)
    cfg = experiment.cfg
    assert (cfg.base_model, cfg.advantage_scale) == ("Qwen/Qwen3-0.6B", "none")
    assert (cfg.warmup_ratio, cfg.lora_rank, cfg.lora_alpha) == (0.1, 16, 8)
    assert (experiment.rewards, experiment.notes) == (("gsm8k",), ())
    assert "output_dir" in experiment.unlearned
    text = OWN_TRAINER.replace('from_pretrained("Qwen/Qwen3-0.6B")', "load(sys.argv[1])")
    (tmp_path / "train.py").write_text(text.replace("trainer =", "trainer.beta ="))
    (note,) = rln.from_trainer(tmp_path).notes
    assert note == "model=AutoModelForCausalLM.load(sys.argv[1]): not read, it is no literal value"


def test_settings_of_no_trainer(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {name: x}\nsteps: 3\n")
    with pytest.raises(
        ConfigError, match="no settings of TRL, verl, prime-rl, SkyRL, tinker-cookbook"
    ):
        rln.from_trainer(tmp_path)
    (tmp_path / "rl.toml").write_text("a = [")
    with pytest.raises(ConfigError, match=r"rl\.toml"):
        rln.from_trainer(tmp_path)
    with pytest.raises(ConfigError, match="no such file"):
        rln.from_trainer(tmp_path / "nothing.sh")
