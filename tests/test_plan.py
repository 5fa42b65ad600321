"""`rln.plan` against TRL's own sampler and config, and against counting."""

import math

import pytest

import rl_notebook as rln
from rl_notebook.core.types import ConfigError

CONFIGS = [
    {},
    {"gradient_accumulation_steps": 4},
    {"gradient_accumulation_steps": 4, "steps_per_generation": 8, "num_generations": 4},
    {"gradient_accumulation_steps": 3, "num_generations": 4, "num_iterations": 2},
    {"per_device_train_batch_size": 2, "steps_per_generation": 4, "num_iterations": 3},
    {"per_device_train_batch_size": 4, "generation_batch_size": 32, "num_generations": 16},
]


@pytest.mark.parametrize("settings", CONFIGS)
def test_a_pass_has_as_many_steps_as_with_the_sampler_of_trl(settings, tmp_path):
    utils = pytest.importorskip("trl.trainer.utils")
    trl = pytest.importorskip("trl")
    config = trl.GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **settings)
    micro = config.per_device_train_batch_size
    sampler = utils.RepeatSampler(
        data_source=range(101),
        mini_repeat_count=config.num_generations,
        batch_size=config.generation_batch_size // config.num_generations,
        repeat_count=config.num_iterations * config.steps_per_generation,
    )
    # a batch of the loader is a generation
    micro_batches = len(sampler) // (micro * config.steps_per_generation)
    planned = rln.plan(config, rows=101)
    assert planned == rln.plan(settings, rows=101)
    assert not planned.problems
    assert planned.steps_per_pass == math.ceil(micro_batches / config.gradient_accumulation_steps)
    assert planned.prompts * planned.completions == config.generation_batch_size
    first = list(sampler)[: config.generation_batch_size]
    assert len({*first}) == planned.prompts


@pytest.mark.parametrize("settings", CONFIGS)
def test_ages_by_counting(settings):
    "Micro-batches one after another, as the trainer goes through them."
    planned = rln.plan(settings)
    accumulation = settings.get("gradient_accumulation_steps", 1)
    updates = 0
    at_generation = 0
    generation = 0
    for m, part in enumerate(planned.slices):
        if part.generation != generation:
            generation = part.generation
            at_generation = updates
        assert part.age == updates - at_generation
        updates += (m + 1) % accumulation == 0
    assert updates == planned.updates


def test_what_does_not_divide_is_said_with_what_does():
    planned = rln.plan({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3})
    (problem,) = planned.problems
    assert "12 completions of a generation" in problem
    assert "4, 6, 12 would be" in problem


def test_a_config_of_this_package():
    config = rln.Config(
        prompt_groups_per_step=4, completions_per_prompt=8, ppo_n_minibatches=2, policy_loss="ppo"
    )
    planned = rln.plan(config, rows=102)
    assert (planned.prompts, planned.ages, planned.updates) == (4, (0, 1), 2)
    assert (planned.steps_per_pass, planned.rows_left) == (50, 2)


def test_groups_without_signal_by_counting():
    planned = rln.plan({"num_generations": 3})
    outcomes = [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)]
    share = sum(math.prod(0.3 if x else 0.7 for x in o) for o in outcomes if len({*o}) == 1)
    assert planned.without_signal(0.3) == pytest.approx(share)
    with pytest.raises(ConfigError, match="between 0 and 1"):
        planned.without_signal(3)


@pytest.mark.parametrize("wrong", [7, {"num_generations": 0}, {"num_iterations": "two"}])
def test_what_is_no_config(wrong):
    with pytest.raises(ConfigError):
        rln.plan(wrong)


class Measured:
    "A step that was measured."

    step_seconds = 30.0
    step_memory = 4.0


def test_what_a_step_takes_stands_beside_the_plan_of_a_config_only():
    cfg = rln.Config(prompt_groups_per_step=4, ppo_n_minibatches=2)
    text = repr(rln.plan(cfg, rows=41, cost=Measured()))
    assert "about 30 s and 4 GB" in text
    assert "a pass: about 5 minutes" in text  # ten generations of two updates each
    with pytest.raises(ConfigError, match="expected a Config"):
        rln.plan({"num_generations": 8}, cost=Measured())
