"`rl-notebook new`: a task folder that runs unchanged, as a new user would run it, without a network."

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rl_notebook.config.config import Config
from rl_notebook.runs.run import Run
from rl_notebook.task.models import load_model

HERE = Path(__file__).parent
PATHS = os.pathsep.join([str(HERE), str(HERE.parent)])
PROGRAM = Path(sys.executable).with_name("rl-notebook")


def run(*command: str | Path, cwd: Path) -> str:
    "What a program prints; it has to end well."
    env = os.environ | {"PYTHONPATH": PATHS}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "A fresh task folder."
    place = tmp_path_factory.mktemp("desk")
    assert "rl-notebook train --config config.yaml" in run(PROGRAM, "new", "my_task/", cwd=place)
    return place / "my_task"


def test_a_new_task_has_the_files_that_its_readme_lists(task):
    names = sorted(path.name for path in task.iterdir())
    assert names == ["README.md", "config.yaml", "step_through.ipynb", "task.py", "test_task.py"]
    text = (task / "README.md").read_text()
    assert all(f"`{name}`" in text for name in names if name != "README.md")
    assert [line[:2] for line in text.splitlines() if line[:1].isdigit()] == ["1.", "2.", "3."]
    assert "python -m pytest" in text
    assert "pip install pytest" in text  # it does not come with the package


def test_the_test_of_a_new_task_passes(task):
    assert "5 passed" in run(
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=task
    )


@pytest.mark.slow
def test_a_new_task_trains(task):
    output = run(PROGRAM, "train", "--config", "config.yaml", "--steps", "2", cwd=task)
    assert "held-out reward" in output.splitlines()[-1]
    records = [*Run.open(task / "runs" / "first")]
    assert [record.step for record in records] == [1, 2]
    assert all(record.trained for record in records)
    assert {"reward right", "reward tidy"} <= records[0].sources.keys()
    assert "every phase is the same" in run(PROGRAM, "replay", "runs/first", "2", cwd=task)


@pytest.mark.slow
def test_the_notebook_of_a_new_task_runs_and_shows_the_config(task):
    import nbformat
    from nbclient import NotebookClient

    nb = nbformat.read(task / "step_through.ipynb", as_version=4)
    NotebookClient(
        nb, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(task)}}
    ).execute()
    last = nb.cells[-1].outputs[0]["data"]["text/plain"]
    assert "dataset='task:rows'" in last
    assert "rewards=['task:right', 'task:tidy']" in last


@pytest.mark.slow
@pytest.mark.parametrize("from_file", [False, True])
def test_the_test_and_notebook_of_a_new_task_survive_the_three_changes_of_its_readme(
    tmp_path, from_file
):
    run(PROGRAM, "new", "mine", cwd=tmp_path)
    mine = tmp_path / "mine"
    model, tokenizer = load_model("tiny")
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    code = (mine / "task.py").read_text()
    settings = (mine / "config.yaml").read_text()
    rows = [
        {"question": f"What is {a}*{b}?", "answer": str(a * b)}
        for a in range(1, 6)
        for b in range(1, 7)
    ]
    (mine / "products.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    head, _, rest = code.partition("def rows()")
    rest = rest.partition("def right(")[2].partition("def known()")[2]
    replacement = "" if from_file else f"def rows():\n    return {rows!r}\n\n\n"
    replacement += "def exact(text, answer):\n    return float(text.strip() == answer)\n\n\n"
    replacement += (
        "def known():\n    return [({'question': 'What is 2*3?', 'answer': '6'}, '6', 'six')]\n"
    )
    assert all([head, rest])
    (mine / "task.py").write_text(head + replacement)
    changes = {
        "dataset: task:rows": f"dataset: {'products.jsonl' if from_file else 'task:rows'}",
        "rewards: [task:right, task:tidy]\nreward_weights: [1.0, 0.1]": "rewards: [task:exact]",
        "max_rows: 250": "max_rows: 20", "eval_rows: 50": "eval_rows: 10",
        "base_model: tiny": f"base_model: {tmp_path / 'model'}",
        "max_completion_tokens: 24": "max_completion_tokens: 32",
    }  # fmt: skip
    for before, after in changes.items():
        assert before in settings
        settings = settings.replace(before, after)
    (mine / "config.yaml").write_text(settings)
    assert "3 passed" in run(
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=mine
    )
    import nbformat
    from nbclient import NotebookClient

    nb = nbformat.read(mine / "step_through.ipynb", as_version=4)
    NotebookClient(
        nb, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(mine)}}
    ).execute()
    assert "rewards=['task:exact']" in nb.cells[-1].outputs[0]["data"]["text/plain"]
    # and the test fails where the rewards are not as its writer said
    (mine / "task.py").write_text((head + replacement).replace("'6', 'six'", "'six', '6'"))
    again = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "apart"]
    assert subprocess.run(again, cwd=mine, env=os.environ | {"PYTHONPATH": PATHS}).returncode == 1


def test_a_folder_that_holds_something_is_left_alone(task):
    before = {path.name: path.read_bytes() for path in task.iterdir() if path.is_file()}
    done = subprocess.run([PROGRAM, "new", task], capture_output=True, text=True)
    assert done.returncode == 2
    assert (
        "got a file, or a folder that is not empty; expected a new or an empty folder"
        in done.stderr
    )
    assert before == {path.name: path.read_bytes() for path in task.iterdir() if path.is_file()}


def test_the_config_of_a_new_task_has_no_default_values(task):
    settings = yaml.safe_load((task / "config.yaml").read_text())
    default = Config().to_dict()
    # the first to change
    assert [name for name, value in settings.items() if value == default[name]] == ["base_model"]
