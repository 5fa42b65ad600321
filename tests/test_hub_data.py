"Data sets of the Hugging Face hub by name, tried on a folder that is laid out as one: no hub is asked."

import asyncio
import sys

import pandas as pd
import pytest

import rl_notebook as rln
from rl_notebook.config.config import Config
from rl_notebook.core.types import ConfigError, DataError
from rl_notebook.task.data import load_rows
from rl_notebook.recipes.rl_loop import load_problem

pytest.importorskip("datasets")

README = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train-*}
---
"""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    "openai/gsm8k, with its two configurations and its columns, under the working directory."
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "openai" / "gsm8k"
    for name, split, count in (
        ("main", "train", 40),
        ("main", "test", 6),
        ("socratic", "train", 3),
    ):
        (folder / name).mkdir(parents=True, exist_ok=True)
        rows = [
            {"question": f"{name} {split} {i}: {i}+1?", "answer": f"so\n#### {i + 1}"}
            for i in range(count)
        ]
        pd.DataFrame(rows).to_parquet(folder / name / f"{split}-00000-of-00001.parquet")
    (folder / "README.md").write_text(README)
    return "openai/gsm8k"


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_by_configuration_and_split(hub, streaming):
    rows = load_rows(
        hub, config="main", split="test", streaming=streaming, max_rows=4, require_answer=True
    )
    assert [row.messages[0]["content"] for row in rows] == [
        f"main test {i}: {i}+1?" for i in range(4)
    ]
    assert rows[3].answer == "so\n#### 4"
    assert len(load_rows(hub, config="socratic", streaming=streaming)) == 3


def test_a_folder_that_was_saved_to_disk_is_read_by_its_splits(hub, tmp_path):
    import datasets

    parts = {
        n: datasets.Dataset.from_list([{"prompt": f"{n}?", "answer": None}])
        for n in ("train", "test")
    }
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    parts["test"].save_to_disk(tmp_path / "alone")
    cfg = Config(dataset=str(tmp_path / "saved"), dataset_split="test", rewards=["format"])
    assert [row.prompt for row in load_problem(cfg).rows] == ["test?"]
    assert [load_rows(tmp_path / name)[0].prompt for name in ("saved", "alone")] == [
        "train?",
        "test?",
    ]
    for wrong in ({"split": "dev"}, {"config": "main"}):
        with pytest.raises(DataError, match=r"dev|no configurations"):
            load_rows(tmp_path / "saved", **wrong)


def test_a_config_names_it_and_a_run_learns_from_it(hub, tmp_path):
    settings = {
        "dataset_name": hub,
        "dataset_config": "main",
        "dataset_train_split": "train",
        "dataset_test_split": "test",
    }
    with pytest.warns(UserWarning, match="dataset_name -> dataset"):
        cfg = Config(
            **settings, eval_rows=4, max_rows=8, max_completion_tokens=8, max_seq_len=128, steps=1
        )
    problem = load_problem(cfg)
    assert (len(problem.rows), len(problem.eval_rows), problem.reward) == (8, 4, ["gsm8k"])
    assert problem.eval_rows[0].messages[0]["content"].startswith("main test 0")
    cfg.to_yaml("c.yaml")
    asyncio.run(rln.train(Config.from_yaml("c.yaml", {"log_path": str(tmp_path / "run")})))
    assert rln.Run.open(tmp_path / "run").record(1).groups[0].samples[0].prompt_len > 10
    held_out = load_problem(Config(dataset=hub, dataset_config="main", max_rows=30, eval_rows=10))
    assert [row.key for row in held_out.eval_rows] == [str(i) for i in range(30, 40)]


def test_columns_have_the_names_that_are_reported(hub):
    columns = {"prompt": "question", "label": "answer"}
    (row,) = load_problem(
        Config(dataset=hub, dataset_config="main", dataset_columns=columns, max_rows=1)
    ).rows
    assert (row.prompt, row.answer) == ("main train 0: 0+1?", "so\n#### 1")
    assert row.data["question"] == row.data["prompt"]  # a reward function finds either
    with pytest.raises(
        DataError, match=r"record 0: column 'task' \(for 'question'\): got columns question, answer"
    ):
        load_rows(hub, config="main", columns={"question": "task"})


def test_a_missing_data_set_or_split_is_reported(hub):
    with pytest.raises(
        DataError, match=r"(?s)'openai/gsm8k'.*Config name is missing.*main.*socratic"
    ):
        load_rows(hub)
    with pytest.raises(DataError, match="dev"):
        load_rows(hub, config="main", split="dev")
    with pytest.raises(ConfigError, match="dataset_split: dataset='rows"):
        Config(dataset="rows.jsonl", dataset_split="test")
    with pytest.raises(ConfigError, match="dataset_eval_split: no rows are held out"):
        Config(dataset=hub, dataset_eval_split="test")
    with pytest.raises(DataError, match=r"no such file or data set: got missing\.jsonl"):
        load_rows("missing.jsonl")


def test_without_the_package_the_extra_is_named(hub, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ImportError, match=r"(?s)'openai/gsm8k': got no datasets.*pip install 'rl-notebook\[hub\]'"
    ):
        load_rows("openai/gsm8k")
