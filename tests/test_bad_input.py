"""Bad input, met where a user meets it: at `train`, the loop object or the command. Each test shows the message.

Besides the message, each checks that nothing is lost: no folder is begun for a run that cannot begin, what was recorded
stays, and once the cause is gone the run continues.
"""

import asyncio
import contextlib
import json
import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rl_notebook.backends.base import Backend
from rl_notebook.backends.local.trainer import open_local
from rl_notebook.cli import main as command
from rl_notebook.config.config import Config
from rl_notebook.core.types import BackendError, RecordError, RewardError
from rl_notebook.task.data import load_rows
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.experiments.preflight import preflight
from rl_notebook.recipes.rl_loop import Problem, main
from rl_notebook.runs.run import RunFolder
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_rows
from errors import failed
from tiny_models import byte_tokenizer, one_thread, tiny_model, uneven  # noqa: F401 (the fixture is used by every test)

SMALL_RUN: dict[str, Any] = {
    "max_rows": 6,
    "prompt_groups_per_step": 2,
    "completions_per_prompt": 4,
    "max_completion_tokens": 8,
    "max_seq_len": 64,
    "learning_rate": 1e-3,
}
QUESTION = {"question": "What is 1+1?", "answer": "2"}


def toy(reward: Any = uneven) -> Problem:
    "Six rows and a reward."
    return Problem(load_rows(toy_rows(6)), [], reward)


def run(cfg: Config, **options: Any) -> list[str]:
    "Train quietly; returns the printed lines."
    lines: list[str] = []
    lines.append(str(main(cfg, say=lines.append, progress=False, **options)))
    return lines


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

DATA: dict[str, tuple[list[dict[str, Any]], dict[str, str]]] = {  # rows, and the parts of the error
    "row without answer": (
        [QUESTION, {"question": "What is 2+2?"}],
        {
            "what": "no answer",
            "where": "data.jsonl, line 2",
            "got": "columns question",
            "expected": "ground_truth",
        },
    ),
    "prompt too long": (
        [QUESTION, {"question": "x" * 100, "answer": "2", "key": "q17"}],
        {
            "what": "prompt too long",
            "where": "row 'q17'",
            "got": "104 tokens",
            "expected": "at most 56",
            "fix": "max_seq",
        },
    ),
    "only rows to evaluate": (
        [QUESTION, {"question": "What is 2+2?", "answer": "4"}],
        {"what": "eval_rows", "got": "2", "expected": "fewer than the 2 rows"},
    ),
}


@pytest.mark.parametrize("case", DATA)
def test_data(case, tmp_path, capsys):
    rows, parts = DATA[case]
    settings = SMALL_RUN | {"dataset": data_set(tmp_path, *rows), "log_path": str(tmp_path / "run")}
    settings["eval_rows"] = 2 if case == "only rows to evaluate" else 0
    failed(lambda: run(Config(**settings)), **parts)
    assert not (tmp_path / "run").exists()  # so the same command works once the data are right
    Config(**settings).to_yaml(tmp_path / "config.yaml")
    assert command(["train", "--config", str(tmp_path / "config.yaml")]) == 2
    output = capsys.readouterr().err
    assert output.startswith("rl-notebook train: ")
    assert "Traceback" not in output


# --- rewards --------------------------------------------------------------------------------------------------------


def raises(text: str) -> float:
    "A function with a mistake in it."
    return 1 / len(text[:0])


FIRST = "group 0, sample 0 (row '3')"
REWARDS: dict[str, tuple[Callable[..., Any], dict[str, str]]] = {
    "raises": (
        raises,
        {"what": "'raises' raised", "where": FIRST, "got": "ZeroDivisionError: division by zero"},
    ),
    "wrong number of values": (
        lambda prompts, completions, **columns: [1.0],
        {
            "where": "group 0 (row '3')",
            "got": "1 values for 4 completions",
            "expected": "a list of 4",
        },
    ),
}


@pytest.mark.parametrize("case", REWARDS)
def test_a_reward_of_none_is_dropped_and_the_loop_continues(case):
    reward, parts = REWARDS[case]
    loop = GRPOLoop(backend(), toy().rows, reward, Config(**SMALL_RUN))
    failed(loop.step, **parts, kind=RewardError)
    sampled = loop.state.values["sample"]  # the answers are still there
    loop.score(uneven)
    record = asyncio.run(loop.step())
    assert record is not None
    assert [s.text for g in record.groups for s in g.samples] == [
        s.text for r in sampled for s in r.samples
    ]


def test_an_unknown_reward_is_rejected_before_anything_is_begun(tmp_path):
    cfg = Config(**SMALL_RUN, rewards=["gsm8kk"], log_path=str(tmp_path / "run"))
    failed(
        lambda: run(cfg), "reward", got="'gsm8kk'", expected="one of gsm8k, ", fix="module:function"
    )
    assert not (tmp_path / "run").exists()


# --- settings -------------------------------------------------------------------------------------------------------


def test_open_functions_take_a_model_by_name_or_as_a_pair_and_report_a_missing_tokenizer():
    for given in ("tiny", load_model("tiny")):
        assert open_local(given, reference=False).capabilities.name == "local"

    def alone():
        return open_local(load_model("tiny")[0])

    failed(alone, "tokenizer", got="none", expected="that of the model", fix="open_local('tiny')")


def test_a_misspelt_model_is_named_before_the_hub_is_asked(monkeypatch):
    for reader in ("AutoTokenizer", "AutoModelForCausalLM"):
        # nothing is loaded, and the hub is not asked
        monkeypatch.setattr(f"transformers.{reader}", None)
    failed(lambda: open_local("smolm2"), fix="Did you mean 'smollm2'", kind=BackendError)


def test_a_wrong_order_of_arguments_is_reported_at_once():
    backend = open_local("tiny")
    rows = load_rows(toy_rows(6))
    cfg = Config(**SMALL_RUN)
    order = "They come in this order: backend, rows, reward, cfg"
    for opened in (GRPOLoop, preflight):
        failed(
            lambda opened=opened: opened(rows, backend, uneven, cfg), "backend", got="[", fix=order
        )
        failed(
            lambda opened=opened: opened(backend, rows, uneven, {"seed": 1}),
            "cfg",
            got="{'seed': 1}",
            fix=order,
        )
        failed(
            lambda opened=opened: opened(backend, uneven, rows, cfg),
            "rows",
            got="<function uneven",
            fix=order,
        )


# --- tokenizer and models -------------------------------------------------------------------------------------------


def test_a_tokenizer_without_chat_template(tmp_path):
    bare = backend(chat_template=None)
    cfg = Config(**SMALL_RUN, log_path=str(tmp_path / "run"))
    failed(
        lambda: run(cfg, backend=bare),
        "chat_template",
        got="none",
        expected="a template",
        fix="instruct model",
    )
    assert not (tmp_path / "run").exists()
    plain = Problem(load_rows([{"prompt": "1+1=", "answer": "2"}] * 1), [], uneven)
    # as the message says
    assert run(Config(**SMALL_RUN), backend=bare, problem=plain)[-1].startswith("done (1 steps")


def test_a_tokenizer_without_eos(tmp_path):
    cfg = Config(**SMALL_RUN, log_path=str(tmp_path / "run"))
    failed(
        lambda: run(cfg, backend=backend(eos_token=None)),
        "eos_token",
        got="none",
        expected="ends",
        fix="Set it",
    )
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_with_more_tokens_than_the_model():
    def mixed():
        return open_local(tiny_model(), load_model("tiny")[1])

    failed(mixed, "tokenizer", got="264 tokens", expected="at most the model's 258")


@pytest.mark.parametrize("vocab", [258, 300])
def test_a_reference_with_another_vocabulary(vocab, tmp_path):
    other = open_local(tiny_model(vocab=vocab, context=512), byte_tokenizer())
    mixed = replace(backend(), reference=other.reference)

    def opened():
        return GRPOLoop(mixed, toy().rows, uneven, Config(**SMALL_RUN, kl_beta=0.1))

    failed(opened, "reference vocabulary", got=f"{vocab} tokens", expected="264")


# --- checkpoints and run folders ------------------------------------------------------------------------------------


def test_a_loop_that_is_stepped_says_that_its_log_path_stays_empty(tmp_path, recwarn):
    cfg = Config(**SMALL_RUN, log_path=str(tmp_path / "run"))

    def opened(**more):
        return GRPOLoop(backend(), toy().rows, uneven, cfg, **more)

    with pytest.warns(
        UserWarning, match=r"log_path '.*run': .*RunFolder\.create\(cfg\.log_path, cfg\)"
    ):
        asyncio.run(opened().step())
    asyncio.run(opened(outputs=[RunFolder.create(cfg.log_path, cfg).add]).step())  # as it says
    assert not [warned for warned in recwarn if "log_path" in str(warned.message)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "A run of three steps with a checkpoint after each."
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(Config(**SMALL_RUN, log_path=str(folder), dcp_save_interval=1), problem=toy())
    return folder


def test_a_checkpoint_of_another_model_by_its_settings(finished, tmp_path):
    cfg = Config(**SMALL_RUN, log_path=str(tmp_path / "run"), lora_rank=4)
    named = replace(cfg, resume={"resume_from": str(finished / "checkpoints" / "00003")})
    parts = {
        "what": "another run's checkpoint",
        "got": "lora_rank=4",
        "expected": "lora_rank=0",
        "fix": "Resume",
    }
    failed(lambda: run(named), **parts)
    assert not (tmp_path / "run").exists()
    before = files(finished)
    failed(lambda: run(replace(cfg, log_path=str(finished)), resume=True), **parts)
    assert files(finished) == before


def test_a_checkpoint_on_other_data(finished, tmp_path):
    cfg = Config(**SMALL_RUN, log_path=str(tmp_path / "run"))
    cfg = replace(cfg, resume={"resume_from": str(finished / "checkpoints" / "00003")})
    other = Problem(toy().rows[:5], [], uneven)
    failed(lambda: run(cfg, problem=other), "rows of the data", got="5", expected="6, as recorded")
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_another_run(finished, capsys):
    before = files(finished)
    cfg = Config(**SMALL_RUN | {"learning_rate": 1e-4}, log_path=str(finished), dcp_save_interval=1)
    settings = "3 steps of a run with other settings: learning_rate (recorded 0.001, now 0.0001)"
    failed(
        lambda: run(cfg),
        "the run folder holds another run",
        got=settings,
        fix="resume the run that is there",
    )
    assert command(["train", f"--log-path={finished}", "--dcp-save-interval=1"]) == 2
    assert "the run folder holds another run" in capsys.readouterr().err
    assert files(finished) == before


def test_a_folder_that_holds_something_else(tmp_path):
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "notes.txt").write_text("mine")

    def folder(path):
        return run(Config(**SMALL_RUN, log_path=str(path)), problem=toy())

    failed(
        lambda: folder(tmp_path),
        "run folder",
        got="steps",
        expected="a folder without files of these names",
    )
    (tmp_path / "file").write_text("in the way")
    failed(
        lambda: folder(tmp_path / "file"),
        "cannot write",
        got="Not a directory",
        fix="choose another log_path",
    )
    assert (tmp_path / "file").read_text() == "in the way"


# --- disks ----------------------------------------------------------------------------------------------------------


def files(folder: Path) -> dict[str, bytes]:
    "Every file in a folder."
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


@contextlib.contextmanager
def no_file_above(size: int) -> Iterator[None]:
    "As on a disk that is full: a write that really stops in the middle."
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


FULL = r"(cannot write|save_state): got .*File too large.*Free some space"


def test_a_disk_that_fills_up_under_a_run(tmp_path):
    whole = Config(**SMALL_RUN, log_path=str(tmp_path / "whole"), dcp_save_interval=2)
    run(whole, problem=toy())
    cfg = replace(whole, log_path=str(tmp_path / "run"))
    lines = []
    records = []
    with contextlib.ExitStack() as disk:

        def fill(record: Any) -> None:
            records.append(record.step)
            if record.step == 1:
                disk.enter_context(no_file_above(4096))

        with pytest.raises(RecordError, match=FULL):
            main(cfg, problem=toy(), say=lines.append, progress=False, on_record=[fill])
    assert "with: rl-notebook train --resume --log-path" in lines[-1]
    assert RunFolder.open(cfg.log_path or "").steps == records
    run(cfg, problem=toy(), resume=True)
    assert numbers(cfg) == numbers(whole)


def numbers(cfg: Config) -> list[dict[str, Any]]:
    "The metrics of a run without the clock."
    lines = (Path(cfg.log_path or "") / "metrics.jsonl").read_text().splitlines()
    clock = ("seconds/", "perf/", "sync/", "crc32")  # a checksum is one of the clock, too
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith(clock)} for line in lines
    ]
