"""Whatever ends a run, continuing gives the numbers of a run that was never ended.

Each run is a process: forked from a server that has imported everything, so that one costs milliseconds and
can be killed at any moment.
"""

import asyncio
import json
import multiprocessing
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from rl_notebook.config.config import Config
from rl_notebook.recipes.rl_loop import replay_step
from rl_notebook.runs.run import Run, RunFolder
from rl_notebook.task.toy import toy_reward

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["rl_notebook.recipes.rl_loop", "rl_notebook.cli", "peft"])

STEPS = 8
SETTINGS = {
    "max_rows": 24,
    "prompt_groups_per_step": 3,
    "completions_per_prompt": 4,
    "max_completion_tokens": 12,
    "max_seq_len": 64,
    "learning_rate": 1e-3,
    "kl_beta": 0.05,
    "eval_rows": 4,
    "eval_interval": 4,
    "dcp_save_interval": 2,
    "rewards": ["test_resume:uneven"],
}


def uneven(text: str, answer: str) -> float:
    "A reward that differs inside nearly every group, so that nearly every step makes an update."
    return toy_reward(text, answer) + sum(map(ord, text)) % 7 / 10


# --- a run in a separate process ------------------------------------------------------------------------------------


def body(settings: dict[str, Any], resume: bool) -> None:
    "What the process does."
    from rl_notebook.recipes.rl_loop import main

    sys.stdout = sys.stderr = open(f"{settings['log_path']}.out", "a", buffering=1)  # noqa: SIM115 (until it ends)
    print(main(Config(**settings), resume=resume, say=print))


def cli_body(args: list[str], out: str) -> None:
    "The same through the command."
    from rl_notebook.cli import main

    sys.stdout = sys.stderr = open(out, "a", buffering=1)  # noqa: SIM115 (until it ends)
    sys.exit(main(args))


def run(
    settings: dict[str, Any],
    *,
    resume: bool = False,
    kill: tuple[int, float] | None = None,
) -> str:
    "Run to the end, or kill -9 n seconds after a step is recorded; returns the output."
    process = SERVER.Process(target=body, args=(settings, resume))
    process.start()
    if kill is not None:
        kill_after(process, Path(settings["log_path"]), *kill)
    process.join(120)
    output = Path(f"{settings['log_path']}.out").read_text()
    assert process.exitcode == (0 if kill is None else -signal.SIGKILL), output
    return output


def command(args: list[str], out: Path) -> Any:
    "The command in a separate process."
    process = SERVER.Process(target=cli_body, args=(args, str(out)))
    process.start()
    return process


def wait_for(process: Any, is_true: Callable[[], Any]) -> None:
    "Wait until something is true, while a process lives."
    deadline = time.monotonic() + 60
    while not is_true():
        assert process.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def kill_after(
    process: Any, folder: Path, step: int, delay: float, signum: int = signal.SIGKILL
) -> None:
    "Send a signal to a process n seconds after it has recorded a step."
    wait_for(process, (folder / "steps" / f"{step:05d}").exists)
    time.sleep(delay)
    os.kill(process.pid, signum)


def numbers(folder: Path) -> dict[int, dict[str, Any]]:
    "Everything in metrics.jsonl except the clock: versions, staleness and held-out rewards included."
    rows: dict[int, dict[str, Any]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        metrics = {
            k: v
            for k, v in row.items()
            if not k.startswith(("seconds/", "perf/", "sync/", "crc32"))
        }
        rows.setdefault(row["step"], {}).update(metrics)
    return rows


def state(folder: Path, step: int = STEPS) -> dict[str, np.ndarray]:
    "Weights, optimizer and generator in a checkpoint."
    return load_file(folder / "checkpoints" / f"{step:05d}" / "trainer" / "state.safetensors")


def assert_same_run(folder: Path, other: Path) -> None:
    "Exactly the same numbers in every step, and bit for bit the same final state."
    ours = numbers(folder)
    theirs = numbers(other)
    assert list(ours) == list(theirs)
    for step in ours:
        assert ours[step] == theirs[step], f"step {step}"
    ours = state(folder)
    theirs = state(other)
    assert ours.keys() == theirs.keys()
    assert [k for k in ours if not np.array_equal(ours[k], theirs[k])] == []
    for a, b in zip(RunFolder.open(folder), RunFolder.open(other), strict=True):
        assert [s.text for g in a.groups for s in g.samples] == [
            s.text for g in b.groups for s in g.samples
        ]


# --- kill -9 --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "The folder of a run that is not interrupted."
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(SETTINGS | {"log_path": str(folder)})
    return folder


def test_kill_9_anywhere_and_resume_gives_the_same_numbers(whole, tmp_path):
    settings = SETTINGS | {"log_path": str(tmp_path / "run")}
    typical = np.median([sum(record.seconds.values()) for record in RunFolder.open(whole)])
    rng = np.random.default_rng(0)
    for i, step in enumerate((3, 5)):
        run(settings, resume=i > 0, kill=(step, float(rng.random() * typical)))
    output = run(settings, resume=True)
    assert "resuming after step" in output
    assert "were moved to" in output
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.slow
def test_kill_9_again_and_again(whole, tmp_path):
    settings = SETTINGS | {"log_path": str(tmp_path / "run")}
    folder = tmp_path / "run"
    rng = np.random.default_rng(0)
    for attempt in range(6):  # the first ones never get to a checkpoint
        process = SERVER.Process(target=body, args=(settings, attempt > 0))
        process.start()
        wait_for(
            process,
            lambda n=attempt: (
                Path(f"{folder}.out").exists() and (n or (folder / "run.json").exists())
            ),
        )
        time.sleep(float(rng.random()))
        process.kill()
        process.join(60)
    run(settings, resume=True)
    assert_same_run(folder, whole)


# --- with other settings ---------------------------------------------------------------------------------------------


def test_steps_before_a_resume_with_other_settings_are_replayed_with_the_earlier_ones(tmp_path):
    settings = SETTINGS | {"log_path": str(tmp_path / "run"), "eval_interval": 0, "eval_rows": 0}
    run(settings | {"steps": 3})
    run(settings | {"steps": 5, "learning_rate": 1e-4, "grad_clip_norm": 0.01}, resume=True)
    begun = Run.open(tmp_path / "run", trust=True)
    assert [begun.config_at(step)["learning_rate"] for step in (3, 4)] == [1e-3, 1e-4]
    for step in (3, 5):
        again = asyncio.run(replay_step(begun.path, step, trust=True))
        assert again.same, again.sentence


# --- an interrupt ---------------------------------------------------------------------------------------------------


def test_the_command_ends_with_130_and_its_advice_works(whole, tmp_path):
    folder = tmp_path / "run"
    out = tmp_path / "out"
    Config(**SETTINGS, log_path="elsewhere").to_yaml(tmp_path / "config.yaml")
    process = command(
        ["train", "--config", str(tmp_path / "config.yaml"), "--log-path", str(folder)], out
    )
    kill_after(process, folder, 3, 0.0, signal.SIGINT)
    process.join(60)
    output = out.read_text()
    assert process.exitcode == 130, output
    [advice] = [
        line.partition("with: ")[2]
        for line in output.splitlines()
        if "it resumes after step" in line
    ]
    name, *args = shlex.split(advice)
    assert name == "rl-notebook"
    process = command(args, out)
    process.join(60)
    assert process.exitcode == 0, out.read_text()
    assert_same_run(folder, whole)
    first = numbers(folder)[0]["eval/reward"]
    last = numbers(folder)[STEPS]["eval/reward"]
    assert f"held-out reward {first:.2f} -> {last:.2f} (" in out.read_text()


# --- another folder, other settings ---------------------------------------------------------------------------------


def test_changed_settings_are_reported(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    settings = SETTINGS | {
        "log_path": str(tmp_path / "run"),
        "learning_rate": 1e-4,
        "epochs": 2,
        "steps": 9,
    }
    output = run(settings, resume=True)
    assert "settings that differ from those recorded" in output
    assert "learning_rate  0.001     0.0001" in output
    assert RunFolder.open(tmp_path / "run").steps == list(range(1, 10))


@pytest.mark.slow
def test_resume_from_begins_another_folder_where_the_first_one_stood(whole, tmp_path):
    checkpoint = whole / "checkpoints" / "00006"
    settings = SETTINGS | {
        "log_path": str(tmp_path / "run"),
        "resume": {"resume_from": str(checkpoint)},
    }
    run(settings)
    ours = numbers(tmp_path / "run")
    theirs = numbers(whole)
    assert list(ours) == [6, 7, 8]
    assert [ours[s] for s in (7, 8)] == [theirs[s] for s in (7, 8)]
    again = run(settings, resume=True)  # its own checkpoint counts now, and nothing is left to do
    assert f"resuming after step 8, from {tmp_path / 'run' / 'checkpoints' / '00008'}" in again
    assert "(0 steps, " in again.splitlines()[-1]
    renumbered = settings | {"log_path": str(tmp_path / "other")}
    renumbered["resume"] = {"resume_from": str(checkpoint), "step_offset": 0}
    run(renumbered)
    assert RunFolder.open(tmp_path / "other").steps == [1, 2]
