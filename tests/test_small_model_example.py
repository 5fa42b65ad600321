"The tasks of examples/small_model: held-out rows share nothing with those to train on, and rewards pay for what they say."

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

import rl_notebook as rln
from rl_notebook.recipes.rl_loop import load_problem, train
from rl_notebook.runs.run import config_dict

FOLDER = Path(__file__).parent.parent / "examples" / "small_model"


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(FOLDER.parent.parent)


@pytest.fixture
def extraction():
    from examples.small_model import extraction

    return extraction


@pytest.fixture
def sums():
    from examples.small_model import sums

    return sums


@pytest.mark.parametrize("name", [pytest.param("extraction", marks=pytest.mark.slow), "sums"])
def test_a_config_trains_as_it_is(name, tmp_path):
    cfg = rln.Config.from_yaml(FOLDER / f"{name}.yaml")
    problem = load_problem(cfg)
    assert len(problem.rows) == cfg.max_rows
    assert len(problem.eval_rows) == cfg.eval_rows
    small = {
        "base_model": "tiny",
        "lora_rank": 2,
        "steps": 1,
        "eval_rows": 2,
        "prompt_groups_per_step": 1,
        "completions_per_prompt": 2,
        "max_completion_tokens": 4,
        "max_seq_len": 512,
        "log_path": str(tmp_path / "run"),
    }
    result = asyncio.run(train(replace(cfg, **small)))
    assert result.steps == 1
    rewards = {f"rewards/{reward.split(':')[1]}" for reward in cfg.rewards}
    assert rewards <= {*result.run.held_out().names}


def test_held_out_sentences_share_no_part_with_the_others(extraction):
    rows = extraction.rows()
    assert len({row["question"] for row in rows}) == len(rows)
    for part in ("names", "cities", "sentences", "orders"):
        assert not {*getattr(extraction.TRAINING, part)} & {*getattr(extraction.HELD_OUT, part)}
    answers = [json.loads(row["answer"]) for row in rows]
    trained, held_out = (
        answers[: extraction.TRAINING_ROWS],
        answers[extraction.TRAINING_ROWS :],
    )
    assert not {tuple(a) for a in trained} & {tuple(a) for a in held_out}
    assert not {a["name"] for a in trained} & {a["name"] for a in held_out}


@pytest.mark.parametrize(
    ("text", "exact", "fields"),
    [
        ('{"age": 30, "name": "Mia", "city": "Bern"}', 1, 1),
        ('{\n  "age": 30,\n  "name": "Mia",\n  "city": "Bern"\n}', 1, 1),
        ('{"name": "Mia", "age": 30, "city": "Bern"}', 0, 1 / 2),  # another order
        ('{"age": 30, "name": "Mia", "city": "Rome"}', 0, 2 / 3),
        ('{"age": 30, "name": " Mia", "city": "Bern "}', 1, 1),  # spaces around a value
        ('{"age": 30, "name": "M ia", "city": "Bern"}', 0, 2 / 3),
        ('{"age": "30", "name": "Mia", "city": "Bern"}', 0, 2 / 3),  # no number
        ('{"age": 30, "name": "Mia", "city": "Bern"}\n\nThis is', 0, 1),  # and more
        ('{"age": 30, "name": "Mia", "city": "Bern"', 0, 0),  # cut
        ("[1]", 0, 0),
        ("", 0, 0),
    ],
)
def test_extraction_pays_for_the_object(extraction, text, exact, fields):
    answer = '{"age": 30, "name": "Mia", "city": "Bern"}'
    assert extraction.exact(text, answer) == exact
    assert extraction.fields(text, answer) == pytest.approx(fields)


def test_held_out_sums_have_digits_that_no_other_row_has(sums):
    digits = [tuple(sorted(row["digits"])) for row in sums.rows()]
    trained, held_out = digits[: sums.TRAINING_ROWS], digits[sums.TRAINING_ROWS :]
    assert not {*trained} & {*held_out}
    assert len(held_out) == sums.HELD_OUT_ROWS
    shown = {tuple(sorted(d)) for d in ([6, 2, 9, 5], [7, 4, 8, 3], [5, 8, 2, 6])}
    assert not shown & {*held_out}


@pytest.mark.parametrize(
    ("text", "exact", "worked_out"),
    [
        ("7 + 4 = 11\n11 + 8 = 19\n19 + 3 = 22\n#### 22", 1, 1),
        ("#### 22", 1, 0),
        ("7 + 4 = 11\n11 + 8 = 18\n18 + 3 = 21\n#### 21", 0, 1 / 3),
        ("7 + 4 = 11\n11 + 8 = 18\n19 + 3 = 22\n#### 22", 1, 1 / 3),  # a wrong line, a right end
        ("7 + 4 + 8 + 3 = 22\n#### 22", 1, 0),
        ("7 + 4 = 11\n11 + 8 = 19\n19 + 3 = 22", 0, 1),
        ("#### 22 or 23", 0, 0),
    ],
)
def test_sums_pay_for_the_number_and_for_running_sums(sums, text, exact, worked_out):
    assert sums.exact(text, "22") == exact
    assert sums.worked_out(text, [7, 4, 8, 3]) == pytest.approx(worked_out)


def test_the_recorded_run_is_that_of_the_config_and_of_the_page():
    run = rln.Run.open(FOLDER / "recorded" / "sums")
    settings = config_dict(rln.Config.from_yaml(FOLDER / "sums.yaml"))
    # a setting that came later is in the config alone
    assert {k: v for k, v in run.config.items() if settings[k] != v} == {}
    means = run.held_out().means().loc["rewards/exact"]
    row = f"| 0 | {means['before']:.2g} ({means['before_low']:.2f} to {means['before_high']:.2f}) | {means['after']:.3g} ("
    assert row in (FOLDER / "README.md").read_text()


def test_the_tables_of_the_page_say_what_was_recorded():
    runs = pd.read_csv(FOLDER / "recorded" / "runs.csv")
    page = (FOLDER / "README.md").read_text()
    rows = {
        "as it stands": "nothing",
        "16 prompts of 4 completions": "16 prompts of 4 completions, as many tokens",
        "learning rate 2e-5": "learning rate 2e-5, a tenth",
        "exact alone": "`exact` alone",
        "a KL of 0.04": "a KL of 0.04 to the first weights",
    }
    short = runs[(runs.task == "sums") & (runs.steps == 10)]
    for changed, words in rows.items():
        ends = short[(short.changed == changed) & (short.step == 10)].right_held_out
        assert len(ends) == 3
        written = page.partition(f"| {words} | ")[2].partition(" |\n")[0].split(" | ")
        for text, end in zip(written, ends, strict=True):
            digits = len(text.partition(".")[2])
            assert abs(float(text) - end) <= 0.5 * 10**-digits + 1e-9, (words, text, end)
    for task, seed, steps in (("sums", 2, 30), *(("extraction", s, 60) for s in (0, 1, 2))):
        whole = runs[(runs.task == task) & (runs.seed == seed) & (runs.steps == steps)]
        end = whole.right_held_out.iloc[-1]
        parts = whole.right_in_training.dropna().to_numpy().reshape(6, steps // 6).mean(axis=1)
        means = ", ".join(f"{mean:.2f}" for mean in parts)
        section = page.partition(f"## `{task}`")[2]
        row = next(line for line in section.splitlines() if line.startswith(f"| {seed} | "))
        assert f"| {end:.3g} (" in row
        assert row.endswith(f"| {means} |")


def test_the_self_taught_run_is_on_the_page_and_its_teacher_reads_the_solution(sums):
    cfg = rln.Config.from_yaml(FOLDER / "sums_solutions.yaml")
    assert cfg.teacher_prompt == "examples.small_model.sums:with_solution"
    assert (cfg.reward_coeff, cfg.teacher_coeff, cfg.steps) == (0, 1, 10)
    runs = pd.read_csv(FOLDER / "recorded" / "runs.csv")
    shares = runs[runs.changed == "self-taught"].right_held_out.dropna().tolist()
    section = (FOLDER / "README.md").read_text().partition("## `sums_solutions`")[2]
    row = next(line for line in section.splitlines() if line.startswith("| 0 | "))
    cells = [cell.strip().partition(" ")[0] for cell in row.split("|")[2:4]]
    assert [float(cell) for cell in cells] == pytest.approx(shares)
    last = sums.with_solution({"digits": [7, 4, 8, 3]}, None, None)[-1]
    assert last["role"] == "user"
    assert "#### 22" in last["content"]
