"`rl-notebook new`: a task folder that runs as it stands, as a new user would run it, without a network."

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml
from nbclient import NotebookClient

from rl_notebook.config import Config
from rl_notebook.records import Run

HERE = Path(__file__).parent
PROGRAM = Path(sys.executable).with_name("rl-notebook")


def run(*command: str | Path, cwd: Path) -> str:
    "What a program prints; it has to end well."
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "A fresh task folder."
    place = tmp_path_factory.mktemp("desk")
    assert "rl-notebook train --config config.yaml" in run(PROGRAM, "new", "my_task/", cwd=place)
    return place / "my_task"


def test_its_files_are_those_that_its_readme_lists(task):
    names = sorted(path.name for path in task.iterdir())
    assert names == ["README.md", "config.yaml", "step_through.ipynb", "task.py", "test_task.py"]
    text = (task / "README.md").read_text()
    assert all(f"`{name}`" in text for name in names if name != "README.md")
    assert [line[:2] for line in text.splitlines() if line[:1].isdigit()] == ["1.", "2.", "3."]


def test_its_test_passes(task):
    assert "3 passed" in run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=task)


def test_it_trains(task):
    said = run(PROGRAM, "train", "--config", "config.yaml", "--steps", "2", cwd=task)
    assert "held-out reward" in said.splitlines()[-1]
    records = [*Run.open(task / "runs" / "first")]
    assert [record.step for record in records] == [1, 2]
    assert all(record.trained for record in records)
    assert {"reward right", "reward tidy"} <= records[0].sources.keys()
    assert "every phase is the same" in run(PROGRAM, "replay", "runs/first", "2", cwd=task)


def test_its_notebook_runs_and_says_the_config(task):
    nb = nbformat.read(task / "step_through.ipynb", as_version=4)
    NotebookClient(nb, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(task)}}).execute()
    last = nb.cells[-1].outputs[0]["data"]["text/plain"]
    assert "dataset='task:rows'" in last
    assert "rewards=['task:right', 'task:tidy']" in last


def test_a_folder_that_holds_something_is_left_alone(task):
    before = {path.name: path.read_bytes() for path in task.iterdir() if path.is_file()}
    done = subprocess.run([PROGRAM, "new", task], capture_output=True, text=True)
    assert done.returncode == 2
    assert "got a place that holds something; expected a new or an empty folder" in done.stderr
    assert before == {path.name: path.read_bytes() for path in task.iterdir() if path.is_file()}


def test_its_config_says_nothing_that_is_the_default_anyway(task):
    settings = yaml.safe_load((task / "config.yaml").read_text())
    default = Config().to_dict()
    assert [name for name, value in settings.items() if value == default[name]] == ["base_model"]  # the first to change
