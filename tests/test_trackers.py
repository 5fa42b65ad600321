"Trackers: the three packages really run, offline and in temporary folders, and what they kept is read back."

import asyncio
import json
import logging
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from rl_notebook.config.config import Config, WandBConfig
from rl_notebook.core.types import RecordError
from rl_notebook.runs import trackers as m
from rl_notebook.runs.trackers import open_trackers

SECRET = "sk-0123456789abcdef-not-a-real-key"
CONFIG = Config(learning_rate=5e-5, stop=("\n",), run_name="sums").to_dict() | {
    "where": f"https://{SECRET}@example.org"
}
STEPS = [
    (1, {"reward": 0.25, "kl/k3": 0.5}),
    (2, {"reward": math.nan}),
    (3, {"reward": 0.75}),
    (2, {"reward": 1.0}),
]

TABLE = {
    "step": [1, 1],
    "row": ["sums:3", "sums:3"],
    "prompt": ["12+9=?", "12+9=?"],
    "completion": ["21 <b>", f"é{SECRET}\n|"],
    "rewards/exact": [1.0, math.nan],
    "reward": [1.0, 0.0],
    "advantage": [0.5, -0.5],
}


def clean_rows(rows):
    "Rows of `TABLE` as they come back: text without its key, None for NaN."
    for row, i in zip(rows, range(2), strict=True):
        for name, values in TABLE.items():
            wanted = values[i].replace(SECRET, "***") if isinstance(values[i], str) else values[i]
            missing = wanted != wanted
            assert (
                row[name] in (None, "NaN") or math.isnan(row[name])
                if missing
                else row[name] == wanted
            ), name
    return True


def run(tracker, steps=STEPS):
    for step, metrics in steps:
        tracker.log(metrics, step)
    m.finish_trackers([tracker])


def all_bytes(folder: Path) -> bytes:
    return b"\n".join(p.read_bytes() for p in Path(folder).rglob("*") if p.is_file())


# ---- W&B


def wandb_records(folder: Path):
    "The records of a W&B run file, once its writer, a separate process, has written the last one."
    deadline = time.monotonic() + 30
    while True:
        result = list(read_wandb(folder))
        kinds = [r.WhichOneof("record_type") for r in result]
        if "exit" in kinds:
            return result
        assert time.monotonic() < deadline, kinds
        time.sleep(0.1)


def read_wandb(folder: Path):
    "Protocol buffers in a W&B run file: 7 bytes of header, then records cut into blocks of 32 kB (LevelDB's log)."
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    (path,) = Path(folder).glob("wandb/*run-*/*.wandb")
    data = path.read_bytes()
    at = 7
    parts = b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length = int.from_bytes(data[at + 4 : at + 6], "little")
        kind = data[at + 6]
        parts = parts + data[at + 7 : at + 7 + length]
        at = at + 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield pb.Record.FromString(parts)
            parts = b""


@pytest.fixture
def wandb_offline(monkeypatch, tmp_path):
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # it reads the environment once a process
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name))
    yield tmp_path / "run"
    wandb.teardown()


def test_wandb_offline(wandb_offline, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", SECRET.ljust(40, "0"))
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    options = WandBConfig(entity="my-team", project="sums-project")
    (tracker,) = open_trackers(
        ["wandb"], run_name="sums", config=CONFIG, log_path=wandb_offline, wandb=options
    )
    run(tracker)
    records = list(wandb_records(wandb_offline))
    begun = next(r.run for r in records if r.WhichOneof("record_type") == "run")
    assert (begun.project, begun.display_name, begun.entity) == ("sums-project", "sums", "my-team")
    settings = {u.key: json.loads(u.value_json) for u in begun.config.update if u.key}
    assert (settings["learning_rate"], settings["stop"], settings["output_model_id"]) == (
        5e-5,
        ["\n"],
        None,
    )
    assert settings["where"] == "https://***@example.org"
    rows = [
        {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item}
        for r in records
        if r.WhichOneof("record_type") == "history"
    ]
    rewards = [(row["step"], row["reward"]) for row in rows]
    assert rewards[:1] + rewards[2:] == [(1, 0.25), (3, 0.75), (2, 1.0)]
    assert rows[0]["kl/k3"] == 0.5
    assert rows[1]["step"] == 2
    assert math.isnan(float(rows[1]["reward"]))
    axes = {
        r.metric.name or r.metric.glob_name: r.metric.step_metric
        for r in records
        if r.HasField("metric")
    }
    assert axes.get("*", axes.get("reward")) == "step"
    assert SECRET.encode() not in all_bytes(wandb_offline)


def wandb_tables(folder: Path):
    "name -> step -> rows of the tables in a W&B run folder."
    result: dict[str, dict[int, list[dict]]] = {}
    for record in wandb_records(folder):
        if record.WhichOneof("record_type") != "history":
            continue
        row = {
            ".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item
        }
        for name, path in (
            (k.removesuffix(".path"), v) for k, v in row.items() if k.endswith(".path")
        ):
            assert row[f"{name}._type"] == "table-file"
            (file,) = Path(folder).glob(f"wandb/*run-*/files/{path}")
            table = json.loads(file.read_text())
            rows = [dict(zip(table["columns"], values, strict=True)) for values in table["data"]]
            result.setdefault(name, {})[row["step"]] = rows
    return result


def test_wandb_has_completions_as_a_table(wandb_offline, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    (tracker,) = open_trackers(["wandb"], run_name="sums", config={}, log_path=wandb_offline)
    run(tracker, [(1, {"reward": 0.5, "completions": pd.DataFrame(TABLE)}), (2, {"reward": 0.5})])
    (rows,) = wandb_tables(wandb_offline)["completions"].values()
    assert [*rows[0]] == [*TABLE]
    assert clean_rows(rows)
    assert SECRET.encode() not in all_bytes(wandb_offline)


def test_wandb_continues_the_same_run(wandb_offline):
    ids = []
    for _ in range(2):
        (tracker,) = open_trackers(["wandb"], run_name=None, config={}, log_path=wandb_offline)
        assert tracker.run.name == "run"
        ids.append(tracker.run.id)
        tracker.finish()
    assert ids[0] == ids[1]
    (other,) = open_trackers(
        ["wandb"], run_name=None, config={}, log_path=wandb_offline.parent / "other"
    )
    other.finish()
    assert other.run.id != ids[0]


def test_wandb_rejecting_a_key_does_not_repeat_it(wandb_offline, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "tooshort-but-secret")
    with pytest.raises(RecordError) as e:
        open_trackers(["wandb"], run_name="a", config={}, log_path=wandb_offline)
    assert "did not start" in str(e.value)
    assert "tooshort-but-secret" not in str(e.value)
    assert e.value.__cause__ is None


# ---- trackio


TRACKIO = """
import json, math, sys, threading
import pandas as pd
from rl_notebook.runs.trackers import open_trackers
from tests_steps import CONFIG, STEPS, TABLE, run
before = {t.name for t in threading.enumerate()}
for part in range(2):
    (tracker,) = open_trackers(["trackio"], run_name="sums", config=CONFIG, log_path=sys.argv[1])
    run(tracker, STEPS if part == 0 else [(4, {"reward": 0.5})])
(other,) = open_trackers(["trackio"], run_name="sums", config={}, log_path=sys.argv[1] + "-other")
run(other, [(1, {"reward": 9.0, "completions": pd.DataFrame(TABLE)})])
from trackio.sqlite_storage import SQLiteStorage as storage
logs = storage.get_logs("rl-notebook", "sums", run_id=tracker.run.id)
config = storage.get_run_config("rl-notebook", "sums", run_id=tracker.run.id)
threads = sorted({t.name for t in threading.enumerate()} - before)
tables = storage.get_logs("rl-notebook", "sums", run_id=other.run.id)
results = [logs, config, other.run.id != tracker.run.id, threads, sorted(sys.modules), tables]
print("RESULT" + json.dumps(results) + "RESULT")
"""


def test_trackio_local(tmp_path):
    pytest.importorskip("trackio")
    (tmp_path / "tests_steps.py").write_text(
        "import math\nfrom rl_notebook.runs.trackers import finish_trackers\n"
        f"CONFIG = {CONFIG!r}\nSTEPS = {STEPS!r}\nTABLE = {TABLE!r}\n".replace("nan", "math.nan")
        + "def run(tracker, steps):\n"
        "    for step, metrics in steps:\n        tracker.log(metrics, step)\n    finish_trackers([tracker])\n"
    )
    env = os.environ | {
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "OPENAI_API_KEY": SECRET,
        "HOME": str(tmp_path),
    }
    env["PYTHONPATH"] = f"{Path(m.__file__).parents[1]}{os.pathsep}{tmp_path}"
    done = subprocess.run(
        [sys.executable, "-c", TRACKIO, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        env=env,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    logs, config, separate, threads, modules, tables = json.loads(done.stdout.split("RESULT")[1])
    rewards = [(row["step"], row["reward"]) for row in logs]
    assert [s for s in rewards if s[1] == s[1]] == [(1, 0.25), (3, 0.75), (2, 1.0), (4, 0.5)]
    assert [step for step, reward in rewards if reward != reward] == [2]
    assert logs[0]["kl/k3"] == 0.5
    assert (config["learning_rate"], config["where"]) == (5e-5, "https://***@example.org")
    assert separate
    assert tables[0]["completions"]["_type"] == "trackio.table"
    assert clean_rows(tables[0]["completions"]["_value"])
    assert not threads
    assert not [name for name in modules if name.split(".")[0] in ("gradio", "torch")]
    assert SECRET.encode() not in all_bytes(tmp_path / "trackio")


# ---- TensorBoard


def board_of(folder: Path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    return reader.EventAccumulator(str(folder / "tensorboard")).Reload()


# ---- a whole run


def trained_with(report_to, log_path):
    "Two steps on the tiny model, the last of which is evaluated on held-out rows."
    from rl_notebook.backends.local.trainer import open_local
    from rl_notebook.recipes.rl_loop import Problem, train
    from rl_notebook.task.data import load_rows
    from rl_notebook.task.models import load_model
    from rl_notebook.task.toy import toy_rows

    sizes = {
        "prompt_groups_per_step": 2,
        "completions_per_prompt": 2,
        "max_completion_tokens": 4,
        "max_seq_len": 96,
    }
    sizes |= {"log_completions": 3, "drop_zero_variance_groups": False, "eval_interval": 2}
    cfg = Config(**sizes, steps=2, kl_beta=0.0, report_to=report_to, log_path=str(log_path))
    problem = Problem(
        load_rows(toy_rows(8, seed=3)),
        load_rows(toy_rows(2, seed=4)),
        lambda text: float(len(text)),
    )
    backend = open_local(*load_model("tiny"), reference=False)
    return asyncio.run(
        train(cfg, problem=problem, backend=backend, say=lambda line: None, progress=False)
    )


def check_scalars(scalars):  # name -> {step: value}
    "What a tracker received in the run of `trained_with`."
    assert scalars["eval/reward"].keys() == {0, 2}, "before and after training"
    for name in ("reward", "policy_version", "seconds/sample", "seconds/optimize"):
        assert scalars[name].keys() == {1, 2}, name
    assert scalars["policy_version"] == {1: 1.0, 2: 2.0}


def test_tensorboard_has_the_held_out_scores_the_seconds_and_completions(tmp_path):
    pytest.importorskip("tensorboard")
    result = trained_with(["tensorboard"], tmp_path / "run")
    board = board_of(tmp_path / "run")
    scalars = {
        name: {e.step: e.value for e in board.Scalars(name)} for name in board.Tags()["scalars"]
    }
    check_scalars(scalars)
    assert scalars["eval/reward"] == pytest.approx(
        {0: result.reward_before, 2: result.reward_after}
    )
    texts = {
        e.step: json.loads(e.tensor_proto.string_val[0])
        for e in board.Tensors("completions/text_summary")
    }
    check_completions(texts, tmp_path / "run")


def check_completions(rows_by_step, folder):  # step -> rows
    "The first three completions of both steps, as the run folder has them."
    from rl_notebook.runs.run import Run

    assert [*rows_by_step] == [1, 2]
    for step, rows in rows_by_step.items():
        table = Run.open(folder).record(step).completions_table().head(3)
        assert [row["completion"] for row in rows] == table["text"].tolist()
        for name in ("prompt", "reward", "advantage"):
            assert [row[name] for row in rows] == table[name].tolist()
        assert {row["step"] for row in rows} == {step}
