"""Logs of numbers that other trainers and trackers wrote.

`tests/logs` was written by their own code: TRL 1.16 (`trainer_state.json`, its TensorBoard events, its standard output) on
the tiny model, wandb 0.31 offline with the names of slime, trackio 0.43, and verl's file and console loggers.
"""

import gzip
import io
import json
import math
import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest

import rl_notebook as rln
from rl_notebook.cli import main
from rl_notebook.core.types import RecordError
from rl_notebook.runs.log_files import csv_rows, pasted_rows
from rl_notebook.runs.logs import read_rows
from rl_notebook.runs.metric_names import read_names

LOGS = Path(__file__).parent / "logs"


@pytest.fixture
def unpacked(tmp_path):
    "The packed files under the names that their programs give them."
    for packed, name in (
        ("events.out.tfevents.gz", "tb/events.out.tfevents.1"),
        ("trackio.db.gz", "sums.db"),
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.decompress((LOGS / packed).read_bytes()))
    return tmp_path


def test_the_same_run_by_four_ways(unpacked):
    "TRL's checkpoint, events and printed dicts have the same numbers (printed with four digits)."
    state = rln.Run.open(LOGS / "trainer_state.json").metrics()
    events = rln.Run.open(unpacked / "tb").metrics()
    printed = rln.Run.open(LOGS / "trl_stdout.txt").metrics()
    raw = json.loads((LOGS / "trainer_state.json").read_text())["log_history"]
    assert [row["kl"] for row in raw if "kl" in row] == state["kl"].tolist()
    for name in (
        "reward",
        "loss",
        "kl",
        "entropy",
        "grad_norm",
        "rewards/correct/mean",
        "eval/reward",
    ):
        for table, tolerance in ((events, 1e-6), (printed, 1e-3)):
            pd.testing.assert_series_equal(
                table[name], state[name], rtol=tolerance, atol=1e-6, check_names=False
            )


def test_events_as_tensorboard_reads_them(unpacked):
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    theirs = event_accumulator.EventAccumulator(str(unpacked / "tb"), size_guidance={"scalars": 0})
    theirs.Reload()
    table = rln.Run.open(unpacked / "tb").metrics()
    for tag in theirs.Tags()["scalars"]:
        for event in theirs.Scalars(tag):
            ours = tag.removeprefix("train/")
            ours = {"eval/completions/mean_length": "eval/mean_length"}.get(ours, ours)
            ours = {"eval/completions/clipped_ratio": "eval/clipped_ratio"}.get(ours, ours)
            name = tag if tag in table else ours
            assert table[name][event.step] == pytest.approx(event.value, nan_ok=True), tag


def test_a_run_of_wandb_with_the_two_counts_of_slime():
    run = rln.Run.open(LOGS / "slime.wandb")
    table = run.metrics()
    assert run.config["trainer"] == "slime"
    assert table.index.tolist() == [0, 1, 2, 3, 4, 5]
    assert table["reward"].tolist() == pytest.approx([0.2, 0.25, 0.3, 0.35, 0.4, 0.45])
    assert table["grad_norm"].tolist() == [1.0] * 6  # of two updates a rollout, 0.5 and 1.5
    assert any("their mean is taken" in note for note in run.notes)


def test_a_project_of_trackio_with_two_runs(unpacked):
    with pytest.raises(RecordError, match="2 runs: name one"):
        rln.Run.open(unpacked / "sums.db")
    table = rln.Run.open(unpacked / "sums.db" / "b").metrics()
    assert table["reward"].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert table["completions/mean_length"].tolist() == [21, 22, 23, 24]


def test_the_two_loggers_of_verl_have_the_same_numbers():
    file = rln.Run.open(LOGS / "verl.jsonl")
    console = rln.Run.open(LOGS / "verl_console.txt").metrics()
    pd.testing.assert_frame_equal(file.metrics(), console, check_like=True)
    assert "by verl's table: " in file.origin
    # of the policy one update ago, not of the reference
    assert console["kl"][8] == pytest.approx(0.008)
    assert "not understood" in file.origin
    assert "rollout_probs_diff_mean" in file.origin


def test_standard_input(monkeypatch, capsys):
    text = (LOGS / "trl_stdout.txt").read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    assert main(["show", "-", "--last", "1"]) == 0
    output = capsys.readouterr().out
    assert "no step is in it: its rows are numbered" in output
    assert "1.529" in output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["doctor", "LOG"], "a run with completions, tokens and logprobs"),
        (["show", "LOG", "--step", "3", "--group", "0", "--sample", "0"], "a run with completions"),
        (["replay", "LOG", "3"], "the folder of a run that this package trained"),
        (["export", "LOG"], "the folder of a run that this package trained"),
    ],
)
def test_what_needs_more_says_so(arguments, expected, capsys, tmp_path):
    shutil.copy(LOGS / "trainer_state.json", tmp_path)
    assert main([str(tmp_path) if a == "LOG" else a for a in arguments]) == 2
    output = capsys.readouterr().err
    assert output.count("\n") == 1
    assert "got a log of numbers a step" in output
    assert expected in output
    assert [path.name for path in tmp_path.iterdir()] == ["trainer_state.json"]


def test_show_as_json(capsys):
    assert main(["show", str(LOGS / "verl.jsonl"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["metrics"][-1]["reward"] == 0.5
    assert main(["show", str(LOGS / "verl.jsonl"), "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["reward"] == 0.5


def test_checkpoints_of_one_run_and_of_two(tmp_path):
    for step in (2, 10):
        folder = tmp_path / "a" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        rows = [{"step": n, "reward": n / 10} for n in range(1, step + 1)]
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    assert len(rln.Run.open(tmp_path)) == 10
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with pytest.raises(RecordError, match="got 2 of them"):
        rln.Run.open(tmp_path)


def test_names_that_only_look_alike():
    names = read_names(
        {
            "actor/ppo_kl": (0.0, 1.0),
            "critic/grad_norm": (0.0, 1.0),
            "format_reward_mean": (0.0, 1.0),
            "rewards/kl": (0.0, 1.0),
            "kl_coef": (0.0, 1.0),
            "timing/reward": (0.0, 9.0),
            "eval/kl": (0.0, 1.0),
            "policy/entropy_loss": (-2.0, -1.0),
            "clip_pct_mean": (0.0, 30.0),
        }
    )
    assert dict(names.ours) == {"eval/kl": "eval/kl"}


def test_two_names_of_the_same_rank_are_both_left():
    names = read_names({"a/grad_norm": (0.0, 1.0), "b/grad_norm": (0.0, 1.0), "loss": (0.0, 1.0)})
    assert "grad_norm" not in names.ours.values()
    assert "would all be grad_norm" in names.unused["a/grad_norm"]


def test_a_written_nan_stays_and_an_empty_field_is_none():
    rows, _ = csv_rows("step,reward,kl\n1,0.5,nan\n2,0.5,\n")
    table = read_rows(rows).steps
    assert math.isnan(table[1]["kl"])
    assert "kl" not in table[2]


def test_epochs_that_count_from_the_start():
    rows = [
        {"step": n, "epoch": e, "reward": 0.1 * e} for e in (0.0, 1.0, 2.0) for n in (1.0, 2.0, 3.0)
    ]
    table = read_rows(rows)
    assert list(table.steps) == [*range(1, 10)]
    assert "counted through" in table.notes[0]


def test_a_printed_config_is_no_step():
    text = "{'lr': 1e-6, 'steps': 100}\n" + "{'loss': 0.1, 'reward': 0.5}\n" * 2
    rows, _ = pasted_rows(text)
    assert rows == [{"loss": 0.1, "reward": 0.5}] * 2


def test_a_folder_with_a_log_next_to_other_files(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"kind": "checkpoint", "message": "saved"}\n')
    lines = ["step,reward_mean,reward_component.format", *(f"{i},0.5,{0.1 * i}" for i in range(5))]
    (tmp_path / "steps.csv").write_text("\n".join(lines))
    run = rln.Run.open(tmp_path)
    assert run.metrics()["rewards/format/mean"].tolist() == [0.1 * i for i in range(5)]


def test_no_log(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing here\n")
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(RecordError, match="no run here"):
            rln.Run.open(path)


TRUTH = {step: round(0.2 + 0.013 * step, 4) for step in range(1, 13)}
ROWS = [{"step": s, "loss": 0.001, "reward": r, "kl": 0.01} for s, r in TRUTH.items()]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
TABLE = pd.DataFrame(ROWS).to_csv(index=False)


def nested(wrap):
    "Lines with the metrics in other places."
    return "".join(json.dumps(wrap(row)) + "\n" for row in ROWS)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("m.jsonl", b"\xef\xbb\xbf" + LINES.encode()),
        ("m.csv", TABLE.encode("utf-16")),
        ("m.csv", TABLE.replace("\n", "\r\n").encode()),
        ("m.csv", TABLE.replace("\n5,", "\nstep,loss,reward,kl\n5,").encode()),
        ("m.csv", TABLE.replace(",", ";").replace(".", ",").encode()),
        ("m.jsonl", nested(lambda r: {"step": r["step"], "data": r}).encode()),
        ("m.jsonl", nested(lambda r: {"step": r["step"], "train": r}).encode()),
        ("m.jsonl", nested(lambda r: r | {"kl": "NaN"}).encode()),
        ("m.jsonl", nested(lambda r: r | {"kl": None}).encode()),
        ("m.json", json.dumps({name: [r[name] for r in ROWS] for name in ROWS[0]}).encode()),
        ("m.jsonl", (LINES + '{"step": 1' + "0" * 30 + ', "reward": 9}\n').encode()),
        ("m.jsonl", (LINES + '{"step": 13, "rew').encode()),
        (
            "out.txt",
            "".join(
                f"\x1b[32m{row}\x1b[0m\n 8%|▊  | 1/12 [00:01<00:11]\r" for row in ROWS
            ).encode(),
        ),
    ],
)
def test_damage_changes_no_number(name, data, tmp_path):
    (tmp_path / name).write_bytes(data)
    assert rln.Run.open(tmp_path / name).metrics()["reward"].to_dict() == TRUTH


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("events.out.tfevents.1", gzip.decompress((LOGS / "events.out.tfevents.gz").read_bytes())),
        ("run-x.wandb", (LOGS / "slime.wandb").read_bytes()),
    ],
)
def test_a_file_that_is_cut_off_says_so(name, data, tmp_path):
    (tmp_path / name).write_bytes(data)
    whole = rln.Run.open(tmp_path / name)
    assert not any("cut off" in note for note in whole.notes)
    (tmp_path / name).write_bytes(data[: len(data) * 2 // 3 + 5])
    cut = rln.Run.open(tmp_path / name)
    assert any("cut off" in note for note in cut.notes)
    assert 0 < len(cut) < len(whole)
