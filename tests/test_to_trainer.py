"""An experiment for another trainer: what is said to be the same is the same in that trainer's own code.

The judge of a loss is TRL's `_compute_loss` on random batches, of a script the script itself: it runs, recorded, and the
same completions are trained here."""

from __future__ import annotations

import ast
import asyncio
import json
import runpy
import sys
import tomllib
from collections import defaultdict
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import test_trainers
import test_trl_words
import torch
from test_trl_words import CASES, LENGTHS, case_id
from transformers import AutoModelForCausalLM
from trl import GRPOConfig
from trl.rewards import get_soft_overlong_punishment

import rl_notebook as rln
from rl_notebook.cli import main as command
from rl_notebook.config.config import Config
from rl_notebook.core.types import ConfigError
from rl_notebook.recipes import conversion
from rl_notebook.recipes.conversion import TRL, convert, learning_settings
from rl_notebook.recipes.from_trainer import pattern_of, read_paths
from rl_notebook.recipes.to_trainer import terms_there
from rl_notebook.task.rewards import make_soft_overlong
from rl_notebook.task.toy import toy_format_reward, toy_reward

pytestmark = pytest.mark.filterwarnings("ignore")
LIKE_TRL: dict[str, Any] = {
    "advantage_eps": 1e-4,
    "drop_zero_variance_groups": False,
    "kl_beta": 0.0,
    "policy_loss": "ppo",
}
LOSS = {
    "policy_loss",
    "aggregation",
    "anchor",
    "kl_beta",
    "kl_bias_correction",
    "kl_estimator",
    "tis",
    "tis_mode",
}
LOSS |= {
    "tis_cap",
    "tis_floor",
    "entropy_coeff",
    "top_entropy_quantile",
    "off_policy_mask_threshold",
}
LOSS |= {*conversion.SURROGATE_PARAM_NAMES}


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", CASES, ids=case_id)
def test_a_loss_that_is_said_to_be_exact_is_that_of_trl(words: dict[str, Any]) -> None:
    "Our loss of a config, and TRL's loss of what the config is converted to."
    cfg = Config(**LENGTHS, **words)
    result = convert(cfg)
    assert {one.kind for one in result.carried if one.setting in LOSS} == {"exact"}
    theirs = {
        name: value
        for name, value in result.settings.items()
        if name in {"loss_type", *conversion.loss_settings({**TRL.defaults, **result.settings})}
    }
    if not result.settings["use_vllm"]:
        theirs = {name: v for name, v in theirs.items() if not name.startswith("vllm_")}
    b = test_trl_words.batch(0)
    for mine, trl in zip(
        test_trl_words.our_loss(words, b), test_trl_words.trl_loss(theirs, b), strict=True
    ):
        np.testing.assert_allclose(mine, trl, rtol=1e-6, atol=1e-9)


SETTINGS: dict[str, dict[str, Any]] = {
    "defaults of TRL": {},
    "no clip": {"policy_loss": "importance_sampling"},
    "gspo": {"policy_loss": "gspo", "aggregation": "sequence_mean", "eps_clip": 3e-4, "eps_clip_high": 4e-4},
    "dual clip": {"policy_loss": "dapo", "eps_clip_c": 4.0},
    "a mean of sums": {"aggregation": "sum", "grad_accumulation_normalization": "num_sequences"},
    "cispo": {"policy_loss": "cispo", "eps_clip": 1.0, "eps_clip_high": 4.0},
    "rates": {"lr_scheduler_type": "cosine_with_min_lr", "min_lr_rate": 0.1, "warmup_ratio": 0.1, "steps": 20},
    "warm-up": {"lr_scheduler_type": "linear", "warmup_steps": 3, "epochs": 2, "learning_rate": 3e-6},
    "an adapter": {"lora_rank": 16, "lora_alpha": 32.0, "weight_decay": 0.0},
    "decay": {"weight_decay": 0.1, "weight_decay_on": "matrices", "grad_clip_norm": 0.2, "adam_beta2": 0.99},
    "sampling": {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "min_p": 0.05, "repetition_penalty": 1.1},
    "batches": {"prompt_groups_per_step": 12, "completions_per_prompt": 8, "max_samples_per_fwd_bwd": 20},
    "signal": {"advantage_scale": "batch", "overlong": "mask", "overlong_buffer": 4},
    "gdpo": {"advantage_scale": "gdpo"},
    "mean": {"advantage_scale": "none", "advantage_eps": 1e-8},
    "KL": {"kl_beta": 0.04, "kl_bias_correction": True, "seed": 7, "shuffle": False},
    "evaluation": {"eval_rows": 8, "eval_interval": 5, "eval_samples": 2},
    "entropy": {"entropy_target": 0.4, "entropy_coeff_step": 0.01},
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_there_and_back_is_the_identity_for_what_both_have(name: str) -> None:
    cfg = Config(**LIKE_TRL | SETTINGS[name])
    result = convert(cfg, processes=1)
    assert {one.setting: one.kind for one in result.carried if one.kind != "exact"} == {}
    assert {one.setting for one in result.carried if one.here != one.there} <= {"eps_clip_high"}
    GRPOConfig(**result.settings | {"use_cpu": True})  # raises for a name or value that TRL lacks


NOT_EXACT: dict[str, tuple[dict[str, Any], str]] = {  # setting: values, and its kind
    "policy_loss": ({"policy_loss": "grpo"}, "factor"),
    "aggregation": ({"aggregation": "prompt_mean"}, "impossible"),
    "advantage_scale": ({"advantage_scale": "loo", "advantage_eps": 1e-8}, "factor"),
    "ddof": ({"ddof": 0}, "factor"),
    "advantage_eps": ({"advantage_eps": 1e-8}, "factor"),
    "drop_zero_variance_groups": ({"drop_zero_variance_groups": True}, "factor"),
    "ppo_n_minibatches": ({"ppo_n_minibatches": 2, "prompt_groups_per_step": 2}, "factor"),
    "kl_estimator": ({"kl_beta": 0.1, "kl_estimator": "k1"}, "impossible"),
    "eps_clip_c": ({"eps_clip_c": 1.1}, "impossible"),
    "eps_clip": ({"policy_loss": "cispo"}, "impossible"),
    "tis": ({"tis": "sequence"}, "impossible"),
    "icepop_threshold": ({"tis": "token", "icepop_threshold": 2.0}, "impossible"),
    "anchor": ({"anchor": "rollout"}, "impossible"),
    "refill": ({"drop_zero_variance_groups": True, "refill": True}, "impossible"),
    "weight_sync_interval": ({"weight_sync_interval": 2}, "impossible"),
    "stop": ({"stop": ("\n",)}, "impossible"),
    "ratio_log_cap": ({"ratio_log_cap": 2.0}, "impossible"),
    "entropy_coeff": ({"entropy_coeff": 0.1, "aggregation": "sequence_mean"}, "impossible"),
}


@pytest.mark.parametrize("setting", NOT_EXACT)
def test_what_trl_lacks_or_does_otherwise_is_named(setting: str) -> None:
    values, kind = NOT_EXACT[setting]
    result = convert(Config(**LIKE_TRL | values))
    (one,) = [one for one in result.carried if one.setting == setting]
    assert one.kind == kind
    assert one.why


def test_every_setting_is_compared_or_changes_nothing_that_is_learned() -> None:
    known = {one.setting for one in convert(Config(kl_beta=0.1, lora_rank=4, tis="token")).carried}
    listed = {name.partition(".")[0] for name in Config().flat()} - conversion.LOCAL
    unused = {"grad_accumulation_normalization", "entropy_coeff_step", "eps_clip"}
    assert listed - known - unused - {*conversion.SURROGATE_PARAM_NAMES} == set()


def test_the_defaults_are_those_of_trl() -> None:
    defaults = {f.name: f.default for f in fields(GRPOConfig)}
    assert {name: defaults[name] for name in TRL.defaults} == TRL.defaults


def test_every_setting_of_trl_is_in_the_table() -> None:
    known = {*TRL.config, *TRL.defaults, *TRL.earlier, "reward_weights"}
    patterns = [*TRL.local.split(), *TRL.lacks]
    names = {f.name for f in fields(GRPOConfig)} - known
    assert [name for name in names if not pattern_of(name, patterns)] == []


def test_what_only_trl_has_is_a_note() -> None:
    words = {
        "sync_ref_model": True,
        "num_iterations": 2,
        "optim": "adafactor",
        "vllm_gpu_memory_utilization": 0.5,
    }
    _, notes, _ = read_paths("trl", words)
    text = "\n".join(notes)
    assert len(notes) == 3
    assert all(name in text for name in ("sync_ref_model", "num_iterations=2", "optim"))
    with pytest.raises(ConfigError, match="no whole number of groups"):
        read_paths("trl", {"num_generations": 5})


def test_the_penalty_for_length_is_trls() -> None:
    ours = make_soft_overlong(20, 8)
    ids = [list(range(n)) for n in range(1, 21)]
    assert [ours("", row) for row in ids] == pytest.approx(get_soft_overlong_punishment(20, 8)(ids))


# --- verl, prime-rl, SkyRL and tinker-cookbook -------------------------------------------------------------------------------------------------

CLIPPED: dict[str, Any] = {
    "policy_loss": "ppo",
    "kl_beta": 0.0,
    "advantage_eps": 1e-6,
    "eps_clip": 0.2,
}
SAMPLED: dict[str, Any] = {  # by prime-rl and Tinker
    "policy_loss": "importance_sampling",
    "anchor": "rollout",
    "advantage_scale": "none",
    "kl_beta": 0.0,
}
CLIP: dict[str, Any] = {"eps_clip": 0.2, "eps_clip_high": 0.28}
BY_CONSTANT: dict[str, Any] = {"aggregation": "constant", "max_completion_tokens": 64}
OURS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [  # trainer, settings of a recorded case, the same in our config
    ("verl", {}, {"eps_clip_c": 3.0}),
    ("verl", {"kl_beta": 1e-3}, {"eps_clip_c": 3.0, "kl_beta": 1e-3}),
    ("verl", {"aggregation": "sequence_mean", "eps_clip_high": 0.28},
     {"aggregation": "sequence_mean", "eps_clip_high": 0.28, "eps_clip_c": 3.0}),
    ("verl", BY_CONSTANT, {**BY_CONSTANT, "eps_clip_c": 3.0}),
    ("SkyRL", {}, {"kl_beta": 1e-3}),
    ("SkyRL", {"eps_clip_c": 3.0, "kl_beta": 0.0}, {"eps_clip_c": 3.0}),
    ("SkyRL", BY_CONSTANT, {**BY_CONSTANT, "kl_beta": 1e-3}),
    ("SkyRL", {"aggregation": "prompt_mean"}, {"aggregation": "prompt_mean", "kl_beta": 1e-3}),
    ("prime-rl", {"dppo_mask": None, "kl_beta": 0.0}, SAMPLED),
    ("tinker-cookbook", {}, SAMPLED | {"aggregation": "sum"}),
    *(
        ("tinker-cookbook", {"policy_loss": name, **CLIP}, SAMPLED | {"policy_loss": name, "aggregation": "sum", **CLIP})
        for name in ("ppo", "cispo")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("title", "recorded", "ours"), OURS)
def test_a_conversion_has_the_loss_that_the_trainer_computed(
    title: str, recorded: dict[str, Any], ours: dict[str, Any]
) -> None:
    "The recorded loss and gradient of the trainer's own code, for the settings that were written."
    base = SAMPLED if "anchor" in ours else CLIPPED
    result = convert(Config(**base | ours), title.lower().removesuffix("-cookbook"))
    kinds = {one.setting: one.kind for one in result.carried}
    names = ("policy_loss", "aggregation", "advantage_scale", "anchor", "eps_clip", "eps_clip_c")
    assert {kinds.get(name, "exact") for name in names} == {"exact"}
    cases = test_trainers.GOLDEN["cases"]
    (case,) = [c for c in cases if (c["trainer"], c["settings"]) == (title, recorded)]
    for number in range(2):
        converted = {**case, "settings": terms_there(result)}
        assert test_trainers.difference(converted, number, {}) < 1e-6


def test_masks_of_prime_rl_leave_the_gradient_of_dppo() -> None:
    "Its loss has another value, which the conversion says."
    own = {"policy_loss": "dppo_tv", "dppo_low": 0.1, "dppo_high": 0.1, "dppo_cap": 1e9}
    result = convert(Config(**SAMPLED | own), "prime-rl")
    (loss,) = [one for one in result.carried if one.setting == "policy_loss"]
    assert (loss.kind, loss.there) == ("factor", "dppo_tv")
    recorded = {"dppo_mask": 0.1, "kl_beta": 0.0}
    (case,) = [c for c in test_trainers.GOLDEN["cases"] if c["settings"] == recorded]
    for number in range(2):
        batch = test_trainers.frozen_step(number, {})
        compared = rln.compare_trainers(batch, {"prime-rl": terms_there(result)})
        gradient = test_trainers.flat(batch.datums, compared.dlogprobs["prime-rl"])
        np.testing.assert_allclose(gradient, case["grad"][number], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("trainer", ["verl", "prime-rl", "skyrl", "tinker"])
def test_every_slot_holds_a_setting_or_a_quantity(trainer: str) -> None:
    table = conversion.TABLES[trainer]
    known = conversion.quantities(Config()).keys() | {"prompts_of_update"} | Config().flat().keys()
    assert {slot.setting for slot in table.slots} <= known
    assert set(table.fixed) <= set(Config().flat())


def test_prime_rl_and_tinker_get_settings_rows_and_an_environment(tmp_path: Path) -> None:
    cfg = Config(**SAMPLED | {k: v for k, v in RUN.items() if k != "device"}, grad_clip_norm=0.0)
    loop = open_loop(replace(cfg, lr_scheduler_type="cosine", warmup_steps=2), toy_reward)
    folder = loop.to_trainer("prime-rl", tmp_path / "prime").folder
    settings = tomllib.loads((folder / "rl.toml").read_text())
    assert settings["max_steps"] == 10
    assert settings["orchestrator"]["batch_size"] == 16
    assert settings["trainer"]["scheduler"] == {"type": "cosine", "warmup_steps": 2}
    assert settings["trainer"]["optim"]["max_norm"] == "None"
    (source,) = settings["orchestrator"]["train"]["source"]
    assert (folder / f"{source['env']['taskset']['id']}.py").exists()
    recipe = loop.to_trainer("tinker", tmp_path / "tinker").folder / "train.py"
    assigned = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(recipe.read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    }
    assert assigned["SETTINGS"]["loss_fn"] == "importance_sampling"
    assert assigned["ROWS"] == {"batch_size": 4, "group_size": 4, "shuffle": False, "seed": 0}
    assert len(recipe.with_name("rows.jsonl").read_text().splitlines()) == 40


@pytest.mark.parametrize("trainer", ["verl", "skyrl"])
def test_verl_and_skyrl_get_rows_rewards_and_options(tmp_path: Path, trainer: str) -> None:
    cfg = Config(**CLIPPED | {k: v for k, v in RUN.items() if k != "device"})
    folder = open_loop(cfg, [toy_reward, last_number]).to_trainer(trainer, tmp_path).folder
    rows = pd.read_parquet(folder / "rows.parquet")
    score = runpy.run_path(str(folder / "rewards.py"))["compute_score"]
    right = f"2 3 #### {rows['reward_model'][0]['ground_truth']}"
    assert rows["prompt"][0][0]["role"] == "user"
    assert [score("", text, "", rows["extra_info"][0]) for text in (right, "3")] == [2.0, 0.0]
    options = (folder / "run.sh").read_text()
    assert "=rows.parquet" in options or "=[rows.parquet]" in options
    assert "A training was not run" in (folder / "DIFFERENCES.md").read_text()
    with pytest.raises(ConfigError, match="tokens, or async"):
        open_loop(cfg, shorter).to_trainer(trainer, tmp_path / "other")


# --- a script -------------------------------------------------------------------------------------------------------

RUN: dict[str, Any] = {
    "prompt_groups_per_step": 4,
    "completions_per_prompt": 4,
    "max_completion_tokens": 24,
    "max_seq_len": 96,
    "learning_rate": 1e-4,
    "lr_scheduler_type": "linear",
    "shuffle": False,
    "device": "cpu",
}
SCRIPTS: dict[str, dict[str, Any]] = {
    "a mean over tokens, KL": {"kl_beta": 0.05, "kl_bias_correction": True},
    "sequences in micro-batches": {
        "policy_loss": "gspo",
        "aggregation": "sequence_mean",
        "max_samples_per_fwd_bwd": 4,
        "weight_decay": 0.1,
        "weight_decay_on": "matrices",
    },
}


def last_number(completions: list, answer: list, **_: Any) -> list[float]:
    "As TRL calls it; here completions are texts."
    return [float(c.split()[-1:] == [a]) for c, a in zip(completions, answer, strict=True)]


def shorter(text: str, tokens: list[int], bonus: float = 0.5) -> float | None:
    return None if len(tokens) < 3 else bonus - len(tokens) / 100


def of_row(text: str, row: Any) -> float:
    return float(row.answer in text)


def open_loop(cfg: Config, rewards: Any = None) -> rln.GRPOLoop:
    backend = rln.open_local(*rln.load_model("tiny"), reference=cfg.kl_beta > 0)
    fns = [toy_reward, rln.task.rewards.reward_fn(shorter, weight=0.25), last_number]
    return rln.GRPOLoop(backend, rln.toy_rows(40), rewards or fns, cfg)


def make_trainer(folder: Path) -> Any:
    "The trainer of a script, in this process."
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.delitem(sys.modules, "rewards", raising=False)
        made = runpy.run_path(str(folder / "train.py"))["make_trainer"]
        sys.modules.pop("rewards")
        return made()


def run_script(folder: Path) -> tuple[Any, list[rln.StepRecord]]:
    "Run the script in this process, recorded."
    trainer = make_trainer(folder)
    watched = rln.watch(trainer, folder / "run")
    trainer.train()
    assert not watched.ended
    return trainer, watched.records


def replayed(records: list[rln.StepRecord], cfg: Config) -> rln.GRPOLoop:
    "A loop of ours whose rollouts are TRL's completions, with the rewards that they had."
    samples = defaultdict[str, list[rln.RolloutSample]](list)
    for record in records:
        for i, datum in enumerate(record.datums):
            group = record.groups[datum.group]
            sample = group.samples[datum.sample]
            logprobs = np.concatenate([[np.nan], record.loss.logprobs[i].values])
            text = group.row["prompt"][-1]["content"]
            samples[text].append(replace(sample, logprobs=logprobs, policy_version=0))

    async def rollout(sample_prompt: dict[str, Any]) -> rln.RolloutSample:
        return samples[sample_prompt["question"]].pop(0)

    return open_loop(cfg, rollout)


def compare(folder: Path, name: str, steps: int) -> tuple[float, float, float]:
    "Largest differences in loss and gradient of the first step, and in the weights after the last."
    cfg = Config(**LIKE_TRL | RUN | SCRIPTS[name], steps=steps)
    written = open_loop(cfg).to_trainer("trl", folder)
    assert {one.kind for one in written.conversion.carried} == {"exact"}
    trainer, theirs = run_script(folder)
    assert {len(g.samples) for r in theirs for g in r.groups} == {4}
    loop = replayed(theirs, cfg)
    ours = asyncio.run(loop.run(progress=False))
    assert len(ours) == len(theirs) == steps
    asyncio.run(loop.export(folder / "policy", to="hf"))
    policy = AutoModelForCausalLM.from_pretrained(folder / "policy")
    trained = dict(trainer.model.named_parameters())
    moved = max(float((p - trained[n]).abs().max().detach()) for n, p in policy.named_parameters())
    place = {(d.group, d.sample, d.tokens.tobytes()): i for i, d in enumerate(theirs[0].datums)}
    gradients = [
        np.abs(gradient - theirs[0].loss.dlogprobs[i]).max()
        for d, gradient in zip(ours[0].datums, ours[0].loss.dlogprobs, strict=True)
        for key, i in place.items()
        if key[0] == d.group and key[2] == d.tokens.tobytes()
    ]
    assert len(gradients) >= len(ours[0].datums)
    assert ours[0].metrics["grad_norm"] == pytest.approx(theirs[0].metrics["grad_norm"], rel=1e-4)
    return abs(ours[0].loss.loss - theirs[0].loss.loss), float(max(gradients)), moved


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[float, float, float]]:
    folder = tmp_path_factory.mktemp("trl") / "out"
    return folder, compare(folder, "a mean over tokens, KL", 2)


def test_the_script_computes_our_loss_gradient_and_weights(two_steps: Any) -> None:
    loss, gradient, weights = two_steps[1]
    assert loss < 1e-6
    assert gradient < 1e-6
    assert weights < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_ten_steps_of_the_script_end_in_our_weights(tmp_path: Path, name: str) -> None:
    loss, gradient, weights = compare(tmp_path / "out", name, 10)
    print(name, loss, gradient, weights)
    assert max(loss, gradient) < 1e-6
    assert weights < 1e-4


def test_a_script_is_read_without_running_it(two_steps: Any) -> None:
    folder, _ = two_steps
    script = (folder / "train.py").read_text()
    (folder / "other").mkdir(exist_ok=True)
    for name in ("rewards.py", "rows.jsonl"):
        (folder / "other" / name).write_text((folder / name).read_text())
    (folder / "other" / "train.py").write_text(f"raise SystemExit('it was run')\n{script}")
    experiment = rln.from_trainer(folder / "other")
    assert experiment.notes == ()
    assert experiment.weights == (1.0, 0.25, 1.0)
    assert experiment.rewards == (
        "rl_notebook.task.toy:toy_reward",
        "test_to_trainer:shorter",
        "test_to_trainer:last_number",
    )
    assert [fn.function for fn in experiment.load_rewards()] == [toy_reward, shorter, last_number]
    assert [r.answer for r in experiment.rows] == [r["answer"] for r in rln.toy_rows(40)]
    cfg = Config(**LIKE_TRL | RUN | SCRIPTS["a mean over tokens, KL"], steps=2)
    assert learning_settings(experiment.cfg.flat()) == learning_settings(cfg.flat())


def test_the_page_says_what_differs_on_the_recorded_step(tmp_path: Path) -> None:
    "A default config differs from TRL; the comparison is that of `compare_trainers` for what was written."
    loop = open_loop(Config(**RUN | {"prompt_groups_per_step": 3}), [toy_reward, toy_format_reward])
    asyncio.run(loop.run(1, progress=False))
    text = loop.to_trainer("trl", tmp_path / "out").folder.joinpath("DIFFERENCES.md").read_text()
    for name in ("policy_loss", "advantage_eps", "drop_zero_variance_groups"):
        assert f"- **{name}** " in text
    assert "Step 1:" in text
    assert "leaves out the 1 rows" in text
    endless = open_loop(Config(**RUN, steps=1000)).to_trainer("trl", tmp_path / "endless")
    assert endless.conversion.settings["max_steps"] == 10
    for_two = loop.to_trainer("trl", tmp_path / "two", processes=2).folder
    with pytest.raises(SystemExit, match="for 2 processes, and 1 run"):
        make_trainer(for_two)
    assert "TRL: " in text
    (tmp_path / "out" / "train.py").write_text("print('mine')\n")
    with pytest.raises(ConfigError, match="something that this package did not write"):
        loop.to_trainer("trl", tmp_path / "out")


def test_a_run_is_converted_from_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    small = [
        "--prompt-groups-per-step",
        "2",
        "--max-completion-tokens",
        "8",
        "--steps",
        "1",
        "--max-rows",
        "8",
    ]
    assert command(["train", *small, "--log-path", str(tmp_path / "run")]) == 0
    assert (
        command(["convert", str(tmp_path / "run"), "--to", "trl", "--out", str(tmp_path / "out")])
        == 0
    )
    assert "DIFFERENCES.md" in capsys.readouterr().out
    experiment = rln.from_trainer(tmp_path / "out")
    assert experiment.weights == (1.0, 0.0)
    assert len(experiment.rows) == 8
    assert experiment.cfg.prompt_groups_per_step == 2


SOMEONES = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

EPSILON = 0.1

def close(completions, **kwargs):
    return [0.5 for _ in completions]

def main(args):
    config = GRPOConfig("out", learning_rate=2e-6, epsilon=EPSILON, beta=args.beta, num_generations=4, loss_type="grpo")
    dataset = load_dataset("trl-lib/DeepMath-103K", split="train")
    GRPOTrainer("Qwen/Qwen3-0.6B", reward_funcs=[accuracy_reward, close], args=config, train_dataset=dataset).train()
"""


def test_somebodys_script_settings_and_a_pickle(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SOMEONES)
    experiment = rln.from_trainer(tmp_path / "train.py")
    cfg = experiment.cfg
    assert (cfg.policy_loss, cfg.aggregation, cfg.eps_clip) == ("ppo", "sequence_mean", 0.1)
    assert (cfg.base_model, cfg.dataset, cfg.dataset_split) == (
        "Qwen/Qwen3-0.6B",
        "trl-lib/DeepMath-103K",
        "train",
    )
    assert experiment.rewards == ("trl.rewards:accuracy_reward", "train:close")
    assert experiment.notes == ("beta=args.beta: not read, it is no literal value",)
    assert experiment.load_rewards()[1].function(["a"]) == [0.5]
    args = GRPOConfig(
        output_dir=str(tmp_path), beta=0.04, bf16=False, use_cpu=True, num_generations=4
    )
    (tmp_path / "args.json").write_text(args.to_json_string())
    from_json = rln.from_trainer(tmp_path / "args.json")
    assert (from_json.cfg.kl_beta, from_json.cfg.completions_per_prompt, from_json.notes) == (
        0.04,
        4,
        (),
    )
    torch.save({}, tmp_path / "training_args.bin")
    with pytest.raises(ConfigError, match="a pickle, which may run anything"):
        rln.from_trainer(tmp_path / "training_args.bin")
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(ConfigError, match="no literal setting of GRPOConfig"):
        rln.from_trainer(tmp_path / "empty.py")


def test_functions_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    cfg = Config(**RUN)

    def closure(text: str) -> float:
        return len(text) / cfg.max_completion_tokens

    async def rollout(sample_prompt: dict) -> None:
        return None

    for reward, message in (
        (closure, "a closure over cfg(.|\n)*my_functions.py"),
        (rollout, "rollout_func: write it there"),
        (of_row, "parameter 'row'(.|\n)*Name the columns"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_loop(cfg, reward).to_trainer("trl", tmp_path / "out")
    with pytest.raises(ConfigError, match="16 completions in 1 updates on 3"):
        open_loop(cfg).to_trainer("trl", tmp_path / "out", processes=3)
    assert not (tmp_path / "out").exists()
    assert json.dumps(convert(cfg).settings)
