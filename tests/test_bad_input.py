"""Bad input, met where a user meets it: at `train`, the loop object or the command. Each test shows the message.

Besides the message, each checks that nothing is lost: no folder is begun for a run that cannot begin, what was recorded
stays, and once the cause is gone the run goes on.
"""

import asyncio
import contextlib
import json
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rl_notebook.backends.base import Backend
from rl_notebook.backends.local.trainer import open_local
from rl_notebook.cli import main as command
from rl_notebook.config.config import Config
from rl_notebook.core.types import BackendError, ConfigError, DataError, RecordError, RewardError, RLNotebookError
from rl_notebook.task.data import load_rows
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.insight.preflight import preflight
from rl_notebook.recipes.rl_loop import Problem, main
from rl_notebook.runs.records import RunFolder
from rl_notebook.task.rewards import reward_fn
from rl_notebook.task.toy import load_model, toy_rows
from rl_notebook.views.charts import chart
from tiny_models import byte_tokenizer, one_thread, tiny_model  # noqa: F401 (the fixture is used by every test)

SMALL: dict[str, Any] = {
    "max_rows": 6,
    "prompt_groups_per_step": 2,
    "completions_per_prompt": 4,
    "max_completion_tokens": 8,
    "max_seq_len": 64,
    "learning_rate": 1e-3,
}
QUESTION = {"question": "What is 1+1?", "answer": "2"}


def uneven(text: str) -> float:
    "A reward that nearly always differs inside a group."
    return float(sum(map(ord, text)) % 7)


def toy(reward: Any = uneven) -> Problem:
    "Six rows and a reward."
    return Problem(load_rows(toy_rows(6)), [], reward)


def run(cfg: Config, **options: Any) -> list[str]:
    "Train quietly; returns what was said."
    said: list[str] = []
    said.append(str(main(cfg, say=said.append, progress=False, **options)))
    return said


def data_set(tmp_path: Path, *rows: dict[str, Any]) -> str:
    "A JSONL file of these rows."
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def backend(**of_tokenizer: Any) -> Backend:
    "The embedded backend, with a tokenizer that has been tampered with."
    model, tokenizer = load_model("tiny")
    for name, value in of_tokenizer.items():
        setattr(tokenizer, name, value)
    return open_local(model, tokenizer)


# --- data -----------------------------------------------------------------------------------------------------------

DATA = {
    "empty data set": ([], r"empty data set: got 0 rows from .*data.jsonl; expected at least 1"),
    "row without prompt": (
        [QUESTION, {"answer": "2"}],
        r"data.jsonl, line 2: no prompt: got columns answer; expected something in messages, prompt, question",
    ),
    "row without answer": (
        [QUESTION, {"question": "What is 2+2?"}],
        r"data.jsonl, line 2: no answer: got columns question; expected something in answer, ground_truth",
    ),
    "prompt too long": (
        [QUESTION, {"question": "x" * 100, "answer": "2", "key": "q17"}],
        r"row 'q17': prompt too long: got 104 tokens; expected at most 56 \(max_seq_len 64 less 8 for the completion\)"
        r". Drop the row, or raise max_seq_len",
    ),
    "only rows to evaluate": (
        [QUESTION, {"question": "What is 2+2?", "answer": "4"}],
        r"eval_rows: got 2; expected fewer than the 2 rows",
    ),
}


@pytest.mark.parametrize("case", DATA)
def test_data(case, tmp_path, capsys):
    rows, message = DATA[case]
    settings = SMALL | {"dataset": data_set(tmp_path, *rows), "log_path": str(tmp_path / "run")}
    settings["eval_rows"] = 2 if case == "only rows to evaluate" else 0
    with pytest.raises((DataError, ConfigError), match=message):
        run(Config(**settings))
    assert not (tmp_path / "run").exists()  # so the same command works once the data are right
    Config(**settings).to_yaml(tmp_path / "config.yaml")
    assert command(["train", "--config", str(tmp_path / "config.yaml")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("rl-notebook train: ")
    assert "Traceback" not in said


def test_a_loop_object_says_the_same_and_keeps_its_place():
    rows = load_rows([QUESTION, {"question": "x" * 100, "answer": "2", "key": "q17"}])
    loop = GRPOLoop(backend(), rows, uneven, Config(**SMALL | {"prompt_groups_per_step": 1}, shuffle=False))
    asyncio.run(loop.step())
    with pytest.raises(DataError, match=r"row 'q17': prompt too long"):
        loop.prompts()
    assert (loop.cursor.consumed, len(loop.records)) == (1, 1)


def test_no_rows_for_a_loop_object():
    with pytest.raises(DataError, match=r"empty data set: got 0 rows from list; expected at least 1"):
        GRPOLoop(backend(), [], uneven, Config(**SMALL))


# --- rewards --------------------------------------------------------------------------------------------------------


def raises(text: str) -> float:
    "A function with a mistake in it."
    return 1 / len(text[:0])


REWARDS: dict[str, tuple[Callable[..., Any], str]] = {
    "raises": (
        raises,
        r"group 0, sample 0 \(row '3'\): reward function 'raises' raised: got ZeroDivisionError: division by zero for "
        r"completion '.+'; expected a finite number, or None for unscorable",
    ),
    "nan": (
        lambda text: float("nan"),
        r"group 0, sample 0 \(row '3'\): reward function '<lambda>': got nan for completion '.+'; expected a finite",
    ),
    "string": (lambda text: "good", r"reward function '<lambda>': got 'good' for completion '.+'; expected a finite"),
    "wrong number of values": (
        lambda prompts, completions, **columns: [1.0],
        r"group 0 \(row '3'\): reward function '<lambda>': got 1 values for 4 completions, the first '.+'; "
        r"expected a list of 4, one per completion",
    ),
}


@pytest.mark.parametrize("case", REWARDS)
def test_a_reward_that_is_none_and_a_loop_that_goes_on(case):
    reward, message = REWARDS[case]
    loop = GRPOLoop(backend(), toy().rows, reward, Config(**SMALL))
    with pytest.raises(RewardError, match=message):
        asyncio.run(loop.step())
    drawn = loop.state.values["sample"]  # the answers are still there
    loop.score(uneven)
    record = asyncio.run(loop.step())
    assert record is not None
    assert [s.text for g in record.groups for s in g.samples] == [s.text for r in drawn for s in r.samples]


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.variant
def test_a_reward_that_fails_late_costs_no_finished_step(interval, tmp_path):
    steps, cfg = 3, Config(**SMALL, log_path=str(tmp_path / "run"), weight_sync_interval=interval)
    whole = replace(cfg, log_path=str(tmp_path / "whole"))
    run(whole, problem=toy())
    calls: list[str] = []

    def fails_late(text: str) -> float:
        calls.append(text)
        return uneven(text) if len(calls) <= 8 * (steps - 1) else float("nan")

    said: list[str] = []
    with pytest.raises(RewardError, match="got nan for completion"):
        main(cfg, problem=toy(reward_fn(fails_late, name="uneven")), say=said.append, progress=False)
    assert "stopped after step 2; it goes on after step 2 with: rl-notebook train --resume" in said[-1]
    assert len(RunFolder.open(cfg.log_path)) == 2
    assert "going on after step 2" in run(cfg, problem=toy(), resume=True)[0]
    assert numbers(cfg) == numbers(whole)


def test_the_command_shows_where_a_reward_raised(tmp_path, capsys):
    options = [f"--{k}={v}" for k, v in SMALL.items()]
    assert command(["train", *options, "--rewards", "test_bad_input:raises", "--log-path", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "return 1 / len(text[:0])" in said
    assert "rl-notebook train: group 0, sample 0 (row '" in said.splitlines()[-1]


def test_a_reward_that_nobody_knows_is_refused_before_anything_is_begun(tmp_path):
    cfg = Config(**SMALL, rewards=["gsm8kk"], log_path=str(tmp_path / "run"))
    with pytest.raises(RewardError, match=r"reward: got 'gsm8kk'; expected one of gsm8k, .*Write module:function"):
        run(cfg)
    assert not (tmp_path / "run").exists()


# --- settings -------------------------------------------------------------------------------------------------------


def test_what_opens_a_model_takes_its_name_or_its_pair_and_says_what_is_missing():
    for given in ("tiny", load_model("tiny")):
        assert open_local(given, reference=False).capabilities.name == "local"
    with pytest.raises(ConfigError, match=r"tokenizer: got none; expected that of the model.*open_local\('tiny'\)"):
        open_local(load_model("tiny")[0])


@pytest.mark.parametrize(("name", "near"), [("tinny", "tiny"), ("smolm2", "smollm2")])
def test_a_misspelt_model_is_named_before_the_hub_is_asked(name, near, monkeypatch):
    for reader in ("AutoTokenizer", "AutoModelForCausalLM"):
        monkeypatch.setattr(f"transformers.{reader}", None)  # nothing is loaded, and nobody is asked
    with pytest.raises(BackendError, match=f"no model here. Did you mean '{near}'"):
        open_local(name)


def test_what_is_given_in_another_order_is_said_at_once():
    backend, rows, cfg = open_local("tiny"), load_rows(toy_rows(6)), Config(**SMALL)
    order = "They come in this order: backend, rows, reward, cfg"
    for opened in (GRPOLoop, lambda *given: asyncio.run(preflight(*given))):
        with pytest.raises(ConfigError, match=rf"backend: got \[.*expected a Backend. {order}"):
            opened(rows, backend, uneven, cfg)
        with pytest.raises(ConfigError, match=rf"cfg: got {{'seed': 1}}; expected a Config. {order}"):
            opened(backend, rows, uneven, {"seed": 1})
        with pytest.raises(ConfigError, match=rf"rows: got <function uneven.*{order}"):
            opened(backend, uneven, rows, cfg)


def test_a_chart_that_is_not_there_is_said_in_one_sentence():
    with pytest.raises(RecordError, match=r"^chart: got 'rewards'. Did you mean 'reward'\?$"):
        chart("rewards", [])
    with pytest.raises(RecordError, match=r"^chart: got 'reward'. Take a step first: await loop.step\(\)\.$"):
        chart("reward", [])


# --- tokenizer and models -------------------------------------------------------------------------------------------


def test_a_tokenizer_without_chat_template(tmp_path):
    bare = backend(chat_template=None)
    with pytest.raises(DataError, match=r"chat_template: got none; expected a template for messages.*instruct model"):
        run(Config(**SMALL, log_path=str(tmp_path / "run")), backend=bare)
    assert not (tmp_path / "run").exists()
    plain = Problem(load_rows([{"prompt": "1+1=", "answer": "2"}] * 1), [], uneven)
    assert run(Config(**SMALL), backend=bare, problem=plain)[-1].startswith("done (1 steps")  # as the message says


def test_a_tokenizer_without_eos(tmp_path):
    with pytest.raises(DataError, match=r"eos_token: got none; expected the token that ends a completion.*Set it"):
        run(Config(**SMALL, log_path=str(tmp_path / "run")), backend=backend(eos_token=None))
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_with_more_tokens_than_the_model():
    with pytest.raises(BackendError, match=r"tokenizer: got 264 tokens; expected at most the model's 258.*own token"):
        open_local(tiny_model(), load_model("tiny")[1])


@pytest.mark.parametrize("vocab", [258, 300])
def test_a_reference_with_another_vocabulary(vocab, tmp_path):
    other = open_local(tiny_model(vocab=vocab, context=512), byte_tokenizer())
    mixed = replace(backend(), reference=other.reference)
    with pytest.raises(RLNotebookError, match=rf"reference.*vocabulary: got {vocab} tokens; expected 264"):
        GRPOLoop(mixed, toy().rows, uneven, Config(**SMALL, kl_beta=0.1))


# --- checkpoints and run folders ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "A run of three steps with a checkpoint after each."
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(Config(**SMALL, log_path=str(folder), dcp_save_interval=1), problem=toy())
    return folder


def test_a_checkpoint_of_another_model_by_its_settings(finished, tmp_path):
    cfg = Config(**SMALL, log_path=str(tmp_path / "run"), lora_rank=4)
    named = replace(cfg, resume={"resume_from": str(finished / "checkpoints" / "00003")})
    with pytest.raises(RecordError, match=r"another run's checkpoint: got lora_rank=4; expected lora_rank=0. Resume"):
        run(named)
    assert not (tmp_path / "run").exists()
    before = files(finished)
    with pytest.raises(RecordError, match=r"another run's checkpoint: got lora_rank=4"):
        run(replace(cfg, log_path=str(finished)), resume=True)
    assert files(finished) == before


def test_a_checkpoint_of_another_model_by_its_weights(finished):
    before = files(finished)
    stranger = open_local(tiny_model(vocab=264, context=512), load_model("tiny")[1])
    with pytest.raises(RecordError, match=r"162 more\): got float32 .*expected .*Open the backend with"):
        run(Config(**SMALL, log_path=str(finished)), problem=toy(), backend=stranger, resume=True)
    assert files(finished) == before


def test_a_checkpoint_on_other_data(finished, tmp_path):
    cfg = Config(**SMALL, log_path=str(tmp_path / "run"))
    cfg = replace(cfg, resume={"resume_from": str(finished / "checkpoints" / "00003")})
    with pytest.raises(DataError, match=r"resume: rows of the data: got 5; expected 6, as recorded"):
        run(cfg, problem=Problem(toy().rows[:5], [], uneven))
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_that_is_not_there(tmp_path):
    cfg = replace(Config(**SMALL, log_path=str(tmp_path / "run")), resume={"resume_from": str(tmp_path / "nothing")})
    with pytest.raises(RecordError, match=r"nothing/checkpoint.json: cannot read: got No such file or directory"):
        run(cfg, problem=toy())
    with pytest.raises(RecordError, match=r"no run here: got no run.json; expected the log_path of a run"):
        run(Config(**SMALL, log_path=str(tmp_path / "run")), problem=toy(), resume=True)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_another_run(finished, capsys):
    before = files(finished)
    cfg = Config(**SMALL | {"learning_rate": 1e-4}, log_path=str(finished), dcp_save_interval=1)
    with pytest.raises(
        RecordError,
        match=r"the run folder holds another run: got 3 steps of a run with other settings: learning_rate "
        r"\(recorded 0.001, now 0.0001\); expected none. Choose another log_path, or resume the run that is there",
    ):
        run(cfg)
    assert command(["train", f"--log-path={finished}", "--dcp-save-interval=1"]) == 2
    assert "the run folder holds another run" in capsys.readouterr().err
    assert files(finished) == before


def test_a_folder_that_holds_something_else(tmp_path):
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "notes.txt").write_text("mine")
    with pytest.raises(RecordError, match=r"run folder: got steps; expected a folder without files of these names"):
        run(Config(**SMALL, log_path=str(tmp_path)), problem=toy())
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RecordError, match=r"file: cannot write: got Not a directory .*choose another log_path"):
        run(Config(**SMALL, log_path=str(tmp_path / "file")), problem=toy())
    assert (tmp_path / "file").read_text() == "in the way"


# --- disks ----------------------------------------------------------------------------------------------------------


def files(folder: Path) -> dict[str, bytes]:
    "Every file in a folder."
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


class Disk:
    "A disk of 64 MB, mounted where that is allowed; elsewhere a folder under a limit of file sizes."

    def __init__(self, path: Path):
        self.path = path
        path.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(path)]
        self.mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0
        self.limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self, room: int) -> None:
        "Leave so many bytes."
        if self.mounted:
            used = shutil.disk_usage(self.path)
            (self.path / "ballast").write_bytes(bytes(used.free - room))
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, self.limits[1]))

    def free(self) -> None:
        "Make room again."
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)
        (self.path / "ballast").unlink(missing_ok=True)

    def writable(self, allowed: bool) -> None:
        "Allow writing, or not."
        if self.mounted:
            how = f"remount,{'rw' if allowed else 'ro'}"
            subprocess.run(["mount", "-o", how, str(self.path)], check=True)
        else:
            for folder in [self.path, *(p for p in self.path.rglob("*") if p.is_dir())]:
                folder.chmod(0o755 if allowed else 0o555)

    def close(self) -> None:
        "Take the disk away."
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)
        if self.mounted:
            subprocess.run(["umount", str(self.path)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with contextlib.closing(Disk(tmp_path / "disk")) as made:
        yield made


FULL = r"cannot write: got (No space left on device|File too large) .*Free some space.*what was recorded before is inta"
FULL_FOR_STATE = r"save_state: got .*(No space left on device|File too large).*Free some space"


@pytest.mark.variant
def test_a_disk_that_fills_up_under_a_loop(disk):
    cfg = Config(**SMALL, log_path=str(disk.path / "run"))
    folder = RunFolder.create(cfg.log_path or "", cfg)
    loop = GRPOLoop(backend(), toy().rows, uneven, cfg, outputs=[folder.add])
    asyncio.run(loop.step())
    before = files(folder.path)
    disk.fill(4096)
    with pytest.raises(RecordError, match=FULL):
        asyncio.run(loop.step())
    disk.free()
    assert files(folder.path) == before
    record = asyncio.run(loop.step())  # what is left of the step: to be recorded
    assert record is not None
    assert (record.step, len(folder)) == (2, 2)
    assert len(asyncio.run(loop.run(progress=False))) == 1
    assert folder.metrics().index.tolist() == [1, 2, 3]
    folder.release()


@pytest.mark.parametrize(
    ("room", "full_after", "every", "message"),
    [(4096, 1, 2, FULL), (600_000, 1, 1, FULL_FOR_STATE), (600_000, 2, 2, FULL_FOR_STATE)],
    ids=["at record 2", "at checkpoint 1", "at checkpoint 2"],
)
@pytest.mark.variant
def test_a_disk_that_fills_up_under_a_run(room, full_after, every, message, disk, tmp_path):
    whole = Config(**SMALL, log_path=str(tmp_path / "whole"), dcp_save_interval=every)
    run(whole, problem=toy())
    cfg, said = replace(whole, log_path=str(disk.path / "run")), []
    fill: Callable[[Any], Any] = lambda record: disk.fill(room) if record.step == full_after else None
    loop_records = []
    with pytest.raises(RecordError, match=message):
        main(cfg, problem=toy(), say=said.append, progress=False, on_record=[fill, loop_records.append])
    disk.free()
    assert "with: rl-notebook train --resume --log-path" in said[-1]
    assert [record.step for record in RunFolder.open(cfg.log_path or "")] == [r.step for r in loop_records]
    run(cfg, problem=toy(), resume=True)
    assert numbers(cfg) == numbers(whole)


def numbers(cfg: Config) -> list[dict[str, Any]]:
    "The metrics of a run without the clock."
    lines = (Path(cfg.log_path or "") / "metrics.jsonl").read_text().splitlines()
    clock = ("seconds/", "perf/", "sync/", "crc32")  # a checksum is one of the clock, too
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(clock)} for line in lines]


def test_a_disk_that_becomes_read_only(disk):
    if os.geteuid() == 0 and not disk.mounted:
        pytest.skip("nothing is read-only for root, and disks cannot be mounted here")
    cfg, said = Config(**SMALL, log_path=str(disk.path / "run"), dcp_save_interval=1), []
    lock: Callable[[Any], Any] = lambda record: disk.writable(False) if record.step == 2 else None
    with pytest.raises(RecordError, match=r"got (Read-only file system|Permission denied|.*Read-only|.*denied)"):
        main(cfg, problem=toy(), say=said.append, progress=False, on_record=[lock])
    with pytest.raises(RecordError, match=r"cannot write: got (Read-only file system|Permission denied)"):
        run(replace(cfg, log_path=str(disk.path / "other")), problem=toy())
    disk.writable(True)
    assert RunFolder.open(cfg.log_path or "").steps == [1, 2]
    run(cfg, problem=toy(), resume=True)
    assert RunFolder.open(cfg.log_path or "").steps == [1, 2, 3]


def test_a_place_where_nothing_can_be_made():
    with pytest.raises(RecordError, match=r"/proc/run: cannot write: got No such file or directory"):
        run(Config(**SMALL, log_path="/proc/run"), problem=toy())
