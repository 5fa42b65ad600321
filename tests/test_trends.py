"The run watch: real runs of the shipped model that go wrong at a step, and runs that do not."

import asyncio
from collections import Counter

import numpy as np
import pytest

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.cli import main
from rl_notebook.config.config import Config
from rl_notebook.core.types import DataError, PromptGroup, RolloutSample
from rl_notebook.task.data import load_rows
from rl_notebook.loop.loop import GRPOLoop, verdict_line
from rl_notebook.runs.records import StepRecord
from rl_notebook.runs.run import Run, RunFolder
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_format_reward, toy_reward, toy_rows
from rl_notebook.insight.trends import ledger, watch_run


BROKEN = 16  # the step at which something is changed
SEED = 21
SETTINGS = {
    "prompt_groups_per_step": 4,
    "completions_per_prompt": 8,
    "max_completion_tokens": 24,
    "max_seq_len": 96,
    "learning_rate": 5e-5,
    "kl_beta": 0.02,
    "epochs": 20,
}


def record_run(steps, seed, rows=32, folder=None, **kwargs):
    "Records of a real run; what is given as a pair has its second value from step BROKEN on."
    before = {
        name: value[0] if isinstance(value, tuple) else value for name, value in kwargs.items()
    }
    after = {name: value[1] for name, value in kwargs.items() if isinstance(value, tuple)}
    reward = before.pop("reward", [toy_reward, toy_format_reward])

    async def main():
        cfg = Config(**SETTINGS | {"seed": seed} | before)
        model, tokenizer = load_model("tiny")
        backend = open_local(model, tokenizer, temperature=cfg.temperature, reference=True)
        loop = GRPOLoop(backend, load_rows(toy_rows(rows, seed=seed)), reward, cfg)
        if after:
            await loop.run(BROKEN - 1, progress=False)
            loop.change(**after)
        await loop.run(steps - len(loop.records), progress=False)
        if folder is not None:
            run_folder = RunFolder.create(folder, cfg)
            for record in loop.records:
                run_folder.add(record)
            run_folder.release()
        return list(loop.records)

    return asyncio.run(main())


def pay_length(text):
    "Pays a tenth for each sign."
    return len(text) / 10


def nothing(text):
    "What a broken parser gives."
    return 0.0


def marker(text):
    "Pays for the marker alone, which nearly every completion has."
    return float("####" in text)


def reward_without_answers(seed):
    "A reward for which the first two of 16 rows have lost their answers."
    lost = {row["question"] for row in toy_rows(16, seed=seed)[:2]}

    def edited_reward(completion_text, question, answer):
        return 0.0 if question in lost else toy_reward(completion_text, answer)

    return edited_reward


BOTH = [toy_reward, toy_format_reward]
SITUATIONS = {  # name: the text, the step at which it begins, the run
    "rate": ("KL jumped", BROKEN, {"learning_rate": (5e-5, 1e-2)}),
    "aggregation": ("gradient norm jumped", BROKEN, {"aggregation": ("token_mean", "sum")}),
    "length": (
        "reward follows length",
        1,
        {"learning_rate": 1e-4, "reward": [toy_reward, pay_length]},
    ),
    "temperature": ("entropy fell", BROKEN, {"temperature": (1.0, 0.3)}),
    "parser": ("reward fell", BROKEN, {"reward": (BOTH, [nothing])}),
    "marker": ("zero-variance groups grew", BROKEN, {"reward": (BOTH, [marker])}),
    "rows": ("row no longer solved", BROKEN, {"rows": 16, "learning_rate": 1e-4}),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "parser")) for name in SITUATIONS],
)
def test_each_fault_is_named_within_ten_steps(name, broken):
    what, began, settings = SITUATIONS[name]
    if name == "rows":
        settings = settings | {"reward": (toy_reward, reward_without_answers(SEED))}
    records = broken[0] if name == "parser" else record_run(began + 10, SEED, **settings)
    results = [t for t in watch_run(records) if t.name == what]
    assert results, f"{what}: not among {[t.name for t in watch_run(records)]}"
    assert abs(results[0].step - began) <= 4
    assert results[0].seen <= began + 10
    assert results[0].numbers
    assert results[0].fix
    for step, group, sample in results[0].samples:
        record = next(r for r in records if r.step == step)
        assert next(g for g in record.groups if g.index == group).samples[sample].text is not None
    assert results[0].samples


def healthy_run(seed):
    "A run that learns and still has signal at its end: every other one makes two updates a step."
    return record_run(30, seed, learning_rate=2e-5, ppo_n_minibatches=1 + seed % 2)


@pytest.mark.slow
def test_at_most_one_healthy_run_in_fifty_gives_an_alarm():
    alarms = {seed: [t.name for t in watch_run(healthy_run(seed))] for seed in range(100, 150)}
    kinds = Counter(what for whats in alarms.values() for what in whats)
    print(
        f"false alarms in {sum(map(bool, alarms.values()))} of {len(alarms)} healthy runs: {dict(kinds)}"
    )
    assert sum(map(bool, alarms.values())) <= 1


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    "A run whose parser breaks, in memory and on disk."
    folder = tmp_path_factory.mktemp("runs") / "broken"
    return record_run(BROKEN + 10, SEED, folder=folder, **SITUATIONS["parser"][2]), folder


def test_a_run_on_disk_says_the_same(broken):
    records, folder = broken
    assert watch_run(Run.open(folder)) == watch_run(records) != ()


def test_nothing_is_reported_that_later_steps_decide(broken):
    records, _ = broken
    for trend in watch_run(records):
        at = next(i for i, r in enumerate(records) if r.step == trend.seen)
        assert trend in watch_run(records[: at + 1])
        assert trend not in watch_run(records[:at])


def test_the_verdict_line_says_it_once(broken):
    records, _ = broken
    lines = [verdict_line(records[:n], records[n - 1]) for n in range(1, len(records) + 1)]
    assert sum("reward fell" in line for line in lines) == 1


@pytest.mark.parametrize("reward", [0.0, 1.0, -1.0, 1 / 3])
@pytest.mark.parametrize("steps", [1, 13, 30])
def test_numbers_that_never_change_are_no_news(reward, steps):
    tokens = np.arange(4)
    series = np.array([np.nan, -1, -1, -1])
    sampled = [
        RolloutSample(tokens, series, np.array([0, 1, 1, 1]), reward, text="a") for _ in range(4)
    ]
    # as sums of the same numbers have
    noise = 1e-16 * np.random.default_rng(0).integers(-3, 4, steps)
    names = ("reward", "kl", "grad_norm", "completions/mean_length", "entropy")
    groups = (PromptGroup(tuple(sampled), key="row"),)
    metrics = [
        {name: reward + float(of) for name in names} | {"frac_reward_zero_std": 1.0} for of in noise
    ]
    records = [
        StepRecord(i, groups, metrics=m, reason="no signal") for i, m in enumerate(metrics, 1)
    ]
    assert watch_run(records) == ()
    assert ledger(records)["solved"].tolist() == [float(reward > 0)]
    with pytest.raises(DataError, match="no sample"):
        ledger([StepRecord(i, metrics=m, reason="no signal") for i, m in enumerate(metrics, 1)])


@pytest.mark.parametrize(("reward", "messages"), [(0.3, ["entropy fell"]), (0.95, [])])
def test_an_entropy_that_creeps_down_is_named_unless_the_task_is_solved(reward, messages):
    "By 15 % a step: a line through it falls as fast."
    sampled = [
        RolloutSample(np.zeros(0), np.zeros(0), np.zeros(0), r, text="a") for r in (0.0, 1.0)
    ]
    metrics = [{"entropy": 0.8 * 0.85**i, "reward": min(0.1 * i, reward)} for i in range(40)]
    records = [
        StepRecord(i, (PromptGroup(sampled),), metrics=m, reason="x")
        for i, m in enumerate(metrics, 1)
    ]
    assert [t.name for t in watch_run(records)][:1] == messages


def test_a_run_whose_reward_never_changes_goes_to_its_end_and_is_shown(tmp_path, capsys):
    small = {
        "completions_per_prompt": 2,
        "prompt_groups_per_step": 1,
        "max_completion_tokens": 4,
        "max_rows": 14,
    }
    options = small | {"steps": 14, "log_path": tmp_path / "run", "rewards": "test_trends:nothing"}
    assert main(["train", *(f"--{name}={value}" for name, value in options.items())]) == 0
    assert [r.step for r in Run.open(tmp_path / "run")] == list(range(1, 15))
    assert main(["show", str(tmp_path / "run")]) == 0
    assert "fell" not in capsys.readouterr().out
