"""Every run below a folder, ours and other trainers', and the completions of all of them that a question asks for."""

import json
import math
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import synthetic_record

import rl_notebook as rln
from rl_notebook.cli import main
from rl_notebook.insight.doctor.why import brief, numbers_of_run, why
from rl_notebook.runs.conditions import ConditionError, parse_conditions
from rl_notebook.runs.run import Run, RunFolder
from rl_notebook.runs.search import completions_of, find_runs, passes

FOREIGN = Path(__file__).parent / "foreign"
LOGS = Path(__file__).parent / "logs"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    "Two runs of ours next to those of other trainers and logs."
    folder = tmp_path_factory.mktemp("disk")
    for name in ("a", "deep/er/b"):
        run = RunFolder.create(folder / name, {"base_model": "tiny", "dataset": "toy"})
        for step in (1, 2, 3):
            run.add(synthetic_record(step, steps=3, groups=3, completions=4))
        (run.path / "copy.jsonl").write_text('{"step": 1, "reward": 0.5}\n')  # is of the run
    shutil.copytree(FOREIGN, folder / "foreign")
    (folder / "logs").mkdir()
    for name in ("verl.jsonl", "slime.wandb"):
        shutil.copy(LOGS / name, folder / "logs")
    return folder


@pytest.fixture(scope="module")
def runs(place) -> dict[Path, Run | Exception]:
    "The runs that are found there."
    return find_runs(place)


@pytest.fixture(scope="module")
def completions(runs) -> list[tuple[tuple[str, int, int, int], dict]]:
    "Every completion with its place, read by way of the records."
    return [
        ((str(path), record.step, row["group"], row["sample"]), row)
        for path, run in runs.items()
        if isinstance(run, Run)
        for record in run
        for row in record.completions_table().to_dict("records")
    ]


def test_each_run_is_found_once_under_a_path_that_opens_it(place, runs):
    names = {str(path.relative_to(place)): run for path, run in runs.items()}
    trainers = [p for p in FOREIGN.iterdir() if p.is_dir() and p.name != "faulty"]
    for trainer in trainers:
        assert len([n for n in names if n.startswith(f"foreign/{trainer.name}")]) == 1, trainer
    own = [n for n in names if not n.startswith("foreign")]
    assert sorted(own) == ["a", "deep/er/b", "logs/slime.wandb", "logs/verl.jsonl"]
    for path, run in runs.items():
        if isinstance(run, Run):
            assert run.steps == Run.open(path).steps, path
    assert [n for n, run in names.items() if not isinstance(run, Run)] == ["foreign/skyrl/exports"]


@pytest.mark.parametrize(
    ("question", "passes"),
    [
        ("reward 1", lambda r: r["reward"] is not None and math.isclose(r["reward"], 1)),
        ('"####" and reward <0.5', lambda r: "####" in r["text"] and r["reward"] < 0.5),
        ('reward <0.3 but no "####"', lambda r: "####" not in r["text"] and r["reward"] < 0.3),
        ("length 3..7", lambda r: r["length"] is not None and 3 <= r["length"] <= 7),
        ("advantage <0 or reward 1", lambda r: r["advantage"] < 0 or math.isclose(r["reward"], 1)),
        ("group 1, sample 2", lambda r: (r["group"], r["sample"]) == (1, 2)),
    ],
)
def test_a_question_finds_what_the_records_say(place, completions, question, passes):
    def has_text(row):
        return row["text"] and not row["text"].endswith("there is no capture)")

    asks_text = '"' in question
    expected = {w for w, row in completions if (has_text(row) or not asks_text) and passes(row)}
    table = rln.find(question, place)
    found = {
        tuple(row) for row in table[["run", "step", "group", "sample"]].itertuples(index=False)
    }
    assert found == expected
    assert found
    assert len(found) == len(table) < table.attrs["completions"] == len(completions)


def test_what_is_not_recorded_passes_no_condition_but_none(place):
    folder = place / "foreign/prime_rl_exports"  # ids without texts and rewards
    everything = rln.find("group >=0", folder)
    assert everything["text"].isna().all()
    assert everything["reward"].isna().all()
    for question in ("reward 0", "not reward 0", '"a"', 'no "a"'):
        assert not len(rln.find(question, folder)), question
    assert len(rln.find("reward none", folder)) == len(everything)
    assert not len(rln.find("not reward none", folder))
    assert "without text" in " ".join(rln.find('no "a"', folder).attrs["notes"])


def test_upper_and_lower_case_and_the_signs_of_patterns_are_text(tmp_path):
    run = RunFolder.create(tmp_path / "r", {"base_model": "tiny"})
    record = synthetic_record(1, steps=1, groups=1, completions=4)
    samples = list(record.groups[0].samples)
    for sample, text in zip(
        samples, ["I am SORRY (.*)", "sorry", "fine\n", 'say "hi"'], strict=True
    ):
        object.__setattr__(sample, "text", text)
    run.add(record)
    asked = {
        "sorry": 2,
        '"(.*)"': 1,
        "text is sorry": 1,
        "text begins with i AM": 1,
        "text ends with sorry": 1,
        r'"say \"hi\""': 1,
        "no sorry": 2,
    }
    assert {question: len(rln.find(question, run.path)) for question in asked} == asked


UNDERSTOOD = {
    "reward>0.5, length 3..7": [["reward > 0.5", "length = 3..7"]],
    "step 12 group 3: sorry": [["step = 12", "group = 3", 'text contains "sorry"']],
    'reward 1 no "####"': [["reward = 1", 'text lacks "####"']],
    "completion lacks '####' && tokens > 1,000": [['text lacks "####"', "length > 1000"]],
    "reward between 0.2 and 0.4 or more than 500 tokens": [["reward = 0.2..0.4"], ["length > 500"]],
    "rewards/format is not 1": [["rewards/format != 1"]],
    "I am sorry": [['text contains "I am sorry"']],
    "14 19": [['text contains "14 19"']],
    'reward is 1 and the text does not contain "####"': [["reward = 1", 'text lacks "####"']],
    'prompt mentions "train"': [['prompt contains "train"']],
    "the answer is 5": [['text contains "the answer is 5"']],
    "finish reason is length and trainer TRL": [['finish_reason = "length"', 'trainer contains "TRL"']],
    "reward ~0.5": [["reward = 0.45..0.55"]],
    "rewards/format 0 rewards/right 1": [["rewards/format = 0", "rewards/right = 1"]],
    "not reward none": [["reward != none"]],
}  # fmt: skip


@pytest.mark.parametrize("question", UNDERSTOOD)
def test_a_question_is_understood_as_it_is_typed(question):
    understood = [[str(c) for c in part] for part in parse_conditions(question, "question")]
    assert understood == UNDERSTOOD[question]


@pytest.mark.parametrize(
    ("question", "named"),
    [
        ("reward high and length 3", "got 'reward high'; expected a number behind reward"),
        ("no reward", "reward none asks for"),
        ("(reward 1 or reward 0) and x", "without parentheses"),
        ("reward 1 and prompt > 3", "got 'prompt > 3'"),
        ("reward 0.5 in step 3", "got 'in step 3'"),
        ("", "expected conditions such as reward 1"),
    ],
)
def test_a_part_that_is_not_understood_is_named(question, named):
    with pytest.raises(ConditionError) as raised:
        parse_conditions(question, "question")
    assert named in str(raised.value)


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(
        st.text(),
        st.lists(
            st.sampled_from(
                ["reward", "no", "and", "or", '"a"', "1", ">", "..", "(", "is", ",", "step", "none"]
            )
        ).map(" ".join),
    )
)
def test_any_text_is_a_question_or_its_error(text):
    frame = pd.DataFrame({"reward": [1.0, np.nan], "text": ["a", None], "step": [1, 2]})
    with suppress(ConditionError):
        for part in parse_conditions(text, "question"):
            assert all(passes(frame, condition).shape == (2,) for condition in part)


def test_a_reward_function_is_asked_for_by_name_and_a_wrong_name_is_said(place):
    trl = place / "foreign/trl"
    names = [c for c in rln.find("step >=0", trl).columns if c.startswith("rewards/")]
    bare = names[0].removeprefix("rewards/")
    assert len(rln.find(f"{bare} >=0", trl)) == len(rln.find(f"{names[0]} >=0", trl)) > 0
    with pytest.raises(ConditionError, match=bare):
        rln.find(f"{bare}x 1", trl)


def test_the_list_has_the_verdict_of_the_numbers(place, runs):
    table = rln.list_runs(place).set_index("run")
    assert list(table.columns) == ["what", "steps", "before", "reward", "verdict"]
    for path, run in runs.items():
        row = table.loc[str(path)]
        if isinstance(run, Run):
            assert row["steps"] == len(run.steps)
            assert row["verdict"] == brief(why(path, tokens=False)), path
        else:
            assert row["verdict"].startswith("not read: not unpickled")
    assert table.loc[str(place / "a"), "what"] == "tiny · toy"


def test_the_numbers_of_our_run_are_the_same_without_its_records(place):
    run = Run.open(place / "a")
    with_records = numbers_of_run(run)
    alone = numbers_of_run(run, tokens=False)
    assert with_records.records
    assert not alone.records
    assert with_records.steps.tolist() == alone.steps.tolist()
    assert with_records.columns.keys() == alone.columns.keys()
    for name, values in with_records.columns.items():
        np.testing.assert_array_equal(values, alone.columns[name])


def test_what_belongs_to_a_run_and_what_no_run_is_are_not_listed(tmp_path):
    (tmp_path / "pages" / "trainer_state.json").mkdir(parents=True)  # a folder of that name
    out = tmp_path / "out"
    for number in (10, 20):
        (out / f"checkpoint-{number}").mkdir(parents=True)
        shutil.copy(LOGS / "trainer_state.json", out / f"checkpoint-{number}")
    (out / "runs/host").mkdir(parents=True)
    (out / "runs/host/events.out.tfevents.1").write_bytes(b"")
    (tmp_path / "rows.jsonl").write_text('{"question": "2+2=", "answer": 4, "step": 1}\n')
    for hidden in (".venv", "node_modules"):
        (tmp_path / hidden).mkdir()
        shutil.copy(LOGS / "verl.jsonl", tmp_path / hidden)
    (tmp_path / "link").symlink_to(out)
    assert [path.relative_to(tmp_path).as_posix() for path in find_runs(tmp_path)] == ["out"]


def test_a_damaged_step_is_left_out_by_name(place, tmp_path):
    path = tmp_path / "a"
    shutil.copytree(place / "a", path)
    (path / "steps/00002/completions.parquet").write_bytes(b"PAR1 and nothing else")
    table, notes = completions_of(Run.open(path), set())
    assert sorted(set(table["step"])) == [1, 3]
    assert notes[0].startswith("1 of 3 steps are left out, step 2: ")
    assert len(rln.find("step >0", path).attrs["notes"]) == 1


def test_the_command_line(place, runs, capsys):
    assert main(["runs", str(place), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {row["run"] for row in listed} == {str(path) for path in runs}
    assert main(["runs", str(place)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(listed) + 1
    assert main(["find", "reward 1.2", str(place / "a"), "--limit", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("reward = 1.2: ")
    count = len(rln.find("reward 1.2", place / "a"))
    assert lines[-1] == f"{count - 1} more: --limit {count}"
    claim = lines[1].split(" ", 1)[1].partition(' "')[0]
    assert main(["cite", str(place / "a"), claim]) == 0  # a place that `cite` takes, and what is so
    assert main(["find", "reward 1.2", str(place / "a"), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["matches"]) == count
    assert main(["find", "reward 77", str(place)]) == 1
    assert main(["find", "reward high", str(place)]) == 2
    assert main(["find", "reward 1", str(place / "nowhere")]) == 2
    assert "no such folder" in capsys.readouterr().err
