"A run folder and its one writer: a lock that dies with its process, a folder that vanishes, rows of any column type."

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from dataclasses import replace
from datetime import date, datetime, time, timedelta, UTC
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from service_runs import checksum, config, open_service, problem

from rl_notebook.emulator.service import start_emulator
from rl_notebook.backends.local.trainer import open_local
from rl_notebook.cli import main
from rl_notebook.config.config import Config
from rl_notebook.core.types import RecordError, RewardError
from rl_notebook.task.data import load_rows
from rl_notebook.recipes.rl_loop import Problem, plan_run, train
from rl_notebook.runs.records import StepRecord, decode, encode
from rl_notebook.runs.run import Run, RunFolder
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_rows

CFG = Config(
    prompt_groups_per_step=2,
    completions_per_prompt=3,
    max_completion_tokens=6,
    max_seq_len=128,
    kl_beta=0.0,
    steps=3,
)


def LENGTH(text):
    return float(sum(map(ord, text)) % 13)


QUIET: dict[str, Any] = {"say": lambda line: None, "progress": False}


def rows(count: int = 8) -> list[Any]:
    return load_rows(toy_rows(count, seed=3))


def tiny(**options: Any) -> Any:
    return open_local(*load_model("tiny"), reference=False, **options)


# --- one process writes -------------------------------------------------------------------------------------------

WRITER = """
import sys, time
from rl_notebook.runs.run import RunFolder
run = RunFolder.create(sys.argv[1], {"steps": 3})
run.log_metrics(0, {"reward": 0.5})
print("writing", flush=True)
time.sleep(600)
"""


def test_a_second_process_is_rejected_until_the_first_has_ended_even_by_kill(tmp_path):
    path = tmp_path / "run"
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True, env=env
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        for call in (
            lambda: RunFolder.resume(path, {"steps": 3}),
            lambda: plan_run(replace(CFG, log_path=str(path)), True),
        ):
            with pytest.raises(
                RecordError, match=rf"another process that writes to it \(process {writer.pid}\)"
            ):
                call()
        assert Run.open(path).metrics().loc[0, "reward"] == 0.5  # looking is possible
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        RunFolder.resume(path, {"steps": 3}).log_metrics(0, {"reward": 0.75})
    assert Run.open(path).metrics().loc[0, "reward"] == 0.75


# --- the folder vanishes ------------------------------------------------------------------------------------------


def run_training(tmp_path: Path, **options: Any) -> Any:
    cfg = replace(CFG, log_path=str(tmp_path / "run"), **options.pop("settings", {}))
    problem = Problem(rows(), options.pop("eval_rows", ()), options.pop("reward", LENGTH))
    return asyncio.run(
        train(
            cfg, problem=problem, backend=options.pop("backend", None) or tiny(), **QUIET, **options
        )
    )


@pytest.mark.parametrize("at", [1, 3])
def test_a_run_whose_folder_is_deleted_ends_with_an_error(tmp_path, at):
    def delete(record):
        return record.step == at and shutil.rmtree(tmp_path / "run")

    with pytest.raises(RecordError, match="the run folder is gone"):
        run_training(tmp_path, on_record=[delete], settings={"dcp_save_interval": 1})
    assert not (tmp_path / "run").exists(), "half a run was begun again"


# --- columns of any type ------------------------------------------------------------------------------------------

VALUES = {
    "day": date(2026, 11, 22),
    "moment": datetime(2026, 11, 22, 9, 30, 0, 250, tzinfo=UTC),
    "clock": time(23, 59, 59, 5),
    "price": Decimal("1234.500"),
    "took": timedelta(days=-1, seconds=3, microseconds=7),
    "nested": {"days": [date(2020, 2, 29)], "when": time(1, 2)},
}


def test_dates_times_and_decimals_of_a_parquet_file_reach_the_record(tmp_path):
    table = pd.DataFrame(
        [{"question": f"{i}+{i} = ?", "answer": str(2 * i), **VALUES} for i in range(8)]
    )
    table.to_parquet(tmp_path / "rows.parquet")
    problem = Problem(load_rows(tmp_path / "rows.parquet"), (), LENGTH)
    cfg = replace(CFG, log_path=str(tmp_path / "run"), steps=1)
    asyncio.run(train(cfg, problem=problem, backend=tiny(), **QUIET))
    [group, *_] = Run.open(tmp_path / "run").record(1).groups
    for name, value in VALUES.items():
        assert (group.row[name], type(group.row[name])) == (
            value,
            type(value) if name != "moment" else type(group.row[name]),
        )


@pytest.mark.parametrize("value", VALUES.values(), ids=repr)
def test_written_values_come_back(value):
    assert decode(encode(value)) == value
    assert decode(encode(pd.NaT)) is pd.NaT


# --- what was trained is promoted ---------------------------------------------------------------------------------


def test_one_bad_step_does_not_skip_promotion(tmp_path):
    finished: list[StepRecord] = []

    def reward(completion_text: str) -> float:
        if len(finished) == 2:
            raise RuntimeError("one bad step")
        return checksum(completion_text)

    async def main(running: Any) -> str:
        cfg = config("fireworks", 3, None, output_model_id="kept")
        async with await open_service(running, cfg) as backend:
            failing = replace(problem(), reward=[reward])
            with pytest.raises(RewardError, match="one bad step"):
                await train(
                    cfg, problem=failing, backend=backend, on_record=[finished.append], **QUIET
                )
        return " ".join(e.path for e in running.emulator.log if e.path.endswith(":promote"))

    running = start_emulator(folder=tmp_path, key="fw-promoted")
    try:
        assert asyncio.run(main(running))
    finally:
        running.stop()


# --- what is written lands where it belongs ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "A run of three steps and a checkpoint."
    cfg = replace(CFG, log_path=str(tmp_path_factory.mktemp("theirs") / "run"), dcp_save_interval=3)
    asyncio.run(train(cfg, problem=Problem(rows(), [], LENGTH), backend=tiny(), **QUIET))
    return Path(str(cfg.log_path))


@pytest.fixture
def sent(theirs: Path, tmp_path: Path) -> Path:
    "The same, elsewhere: nothing says that it was started here."
    return Path(shutil.copytree(theirs, tmp_path / "sent"))


@pytest.mark.parametrize("name", ["report.html", ".report.html.writing"])
def test_looking_at_a_folder_that_was_sent_writes_nothing_in_it_and_follows_no_link(
    name, sent, tmp_path, capsys
):
    mine = tmp_path / "mine.txt"
    mine.write_text("my text")
    (sent / name).unlink(missing_ok=True)
    (sent / name).symlink_to(mine)
    there = sorted(sent.rglob("*"))
    assert main(["view", str(sent), "--once"]) == 0
    output = capsys.readouterr()
    assert "was not started here: its page is written outside of it" in output.err
    page = Path(output.out.strip())
    assert "step 3" in page.read_text()
    assert not page.is_relative_to(sent)
    assert sorted(sent.rglob("*")) == there
    main(["view", str(sent), "--once", "--out", str(sent / name)])
    assert mine.read_text() == "my text"


WAYS_OUT = [".lock", "metrics.jsonl", "steps", "checkpoints/00003/trainer"]


@pytest.mark.parametrize("name", WAYS_OUT)
def test_a_folder_that_leads_elsewhere_is_not_resumed_unless_it_is_trusted(
    name, sent, tmp_path, capsys
):
    outside = tmp_path / "outside"
    link = sent / name
    if link.is_file():
        # half a line, which would be cut off
        outside.write_bytes(link.read_bytes() + b'{"step": 9')
        link.unlink()
    else:
        outside.mkdir()
        (outside / ".00009.writing").mkdir()  # which would be deleted
        if link.exists():
            shutil.copytree(link, outside, dirs_exist_ok=True)
            shutil.rmtree(link)
    link.symlink_to(outside)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    resume = ["train", "--resume", "--log-path", str(sent), "--steps", "3"]
    assert main(resume) == 2
    assert "expected only files and folders of a run. Nothing was written" in (
        output := capsys.readouterr().err
    )
    assert f"{name} -> {outside}" in output
    with pytest.raises(RecordError, match="Nothing was written"):
        RunFolder.resume(sent, CFG)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    if name != ".lock":  # which is never followed
        assert RunFolder.resume(sent, Run.open(sent).config, trust=True).steps == [1, 2, 3]
        RunFolder.resume(sent, Run.open(sent).config).release()  # trusted from here on


def test_a_pipe_in_the_place_of_a_file_is_rejected_before_it_is_waited_for(sent):
    os.mkfifo(sent / "steps" / "more")
    with pytest.raises(
        RecordError, match=r"got steps/more -> .*; expected only files and folders of a run"
    ):
        RunFolder.resume(sent, CFG)


# --- looking at a run reads what it shows, and asks no service ---------------------------------------------------------


def test_show_reads_the_steps_that_it_is_about(tmp_path, capsys):
    run = RunFolder.create(tmp_path / "run", CFG)
    for step in range(1, 46):
        run.add(StepRecord(step, metrics={"reward": step / 45}, reason="no signal"))
    for step in range(1, 6):  # not looked at, so it is not noticed
        (run.path / "steps" / f"{step:05d}" / "arrays.safetensors").write_bytes(b"")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(["show", str(run.path)]) == 0
        text = capsys.readouterr().out
        assert main(["show", str(run.path), "--last", "2", "--json"]) == 0
    assert text.startswith("Run run: 45 steps")
    assert [step["step"] for step in json.loads(capsys.readouterr().out)["steps"]] == [44, 45]


def replace_by_endless(path: Path, put: str) -> None:
    "Something that never ends, or that grows without end, in the place of a file."
    path.unlink(missing_ok=True)
    if put == "a pipe":
        os.mkfifo(path)
    elif put == "a device":
        path.symlink_to("/dev/zero")
    else:
        bomb = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'x'}]" for i in range(12)]
        path.write_text("\n".join(bomb) + "\n")


FILES = ("config.yaml", "steps/00003/record.json")
HARMS = [(put, name) for name in FILES for put in ("a pipe", "a device")] + [
    ("aliases of aliases", "config.yaml")
]


@pytest.mark.parametrize(("put", "name"), HARMS)
@pytest.mark.filterwarnings("ignore:.*left out")
def test_an_endless_file_is_named_and_not_waited_for(put, name, sent, capsys):
    replace_by_endless(sent / name, put)
    code = main(["view", str(sent), "--once"])
    output = capsys.readouterr()
    assert (code == 2 and name.rpartition("/")[2] in output.err) or "step 3 is left out" in Path(
        output.out.strip()
    ).read_text()


def test_a_tokenizer_of_the_hub_is_taken_from_this_machine_without_a_request(sent, tmp_path):
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / "abc"
    load_model("tiny")[1].save_pretrained(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        env = os.environ | {
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_HOME": str(tmp_path),
        }
        env |= {
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
            "PYTHONPATH": str(Path(__file__).parents[1]),
        }
        code = "from rl_notebook.task.models import tokenizer_of; print(len(tokenizer_of({'base_model': 'some/model'})))"
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        hub.shutdown()
    assert done.stdout.strip() == str(len(load_model("tiny")[1]))
    assert asked == []
