"""A loop of a notebook as a config and as a script: the same numbers, bit for bit, from a kernel and a process.

Where functions come from decides what becomes of them: a file is imported, a cell is copied, and what only a kernel
holds is rejected in words."""

from __future__ import annotations

import asyncio
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.cli import main as command
from rl_notebook.config.config import Config
from rl_notebook.core.losses import POLICY_LOSSES
from rl_notebook.core.types import ConfigError
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.recipes.rl_loop import train
from rl_notebook.runs.records import StepRecord
from rl_notebook.runs.run import Run
from rl_notebook.task.data import load_rows
from rl_notebook.task.rewards import reward_fn
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_format_reward, toy_reward, toy_rows

SMALL_RUN: dict[str, Any] = {
    "prompt_groups_per_step": 2,
    "completions_per_prompt": 4,
    "max_completion_tokens": 8,
}
SMALL_RUN |= {"max_seq_len": 64, "learning_rate": 1e-3, "kl_beta": 0.0, "steps": 2}

MODULE = """
from dataclasses import replace


def close(text: str, answer: str) -> float:
    return 1 / (1 + abs(len(text) - len(answer)))


def against_the_worst(groups):
    return [replace(g, advantages=g.rewards - g.rewards.min()) for g in groups]
"""


def run_script(path: Path, log: Path, *options: str) -> list[StepRecord]:
    "What a script records, in this process: another one than that in which its functions were written."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(path), "--log-path", str(log), *options])
        runpy.run_path(str(path), run_name="__main__")
    return list(Run.open(log))


def assert_same(expected: Sequence[StepRecord], records: Sequence[StepRecord]) -> None:
    "Two runs made the same steps, to the last bit."
    assert [r.step for r in expected] == [r.step for r in records]
    for one, other in zip(expected, records, strict=True):

        def samples(r):
            return [(s.text, s.reward, s.tokens.tolist()) for g in r.groups for s in g.samples]

        assert samples(one) == samples(other)
        np.testing.assert_equal(
            [g.advantages for g in one.groups], [g.advantages for g in other.groups]
        )

        def measured(r):
            return {
                name: value for name, value in r.metrics.items() if not name.startswith("sync/")
            }

        # a run's probe is of that run's first step
        np.testing.assert_equal(measured(one), measured(other))
        assert one.options == other.options


def grpo_loop(
    reward: Any, *, cfg: dict[str, Any] | None = None, rows: Any = None, **kwargs: Any
) -> GRPOLoop:
    "A loop as a notebook opens one."
    settings = Config(**SMALL_RUN | (cfg or {}))
    rank = (
        {"lora_rank": settings.lora_rank, "lora_alpha": settings.lora_alpha}
        if settings.lora_rank
        else {}
    )
    backend = open_local(*load_model("tiny"), reference=settings.kl_beta > 0, **rank)
    return GRPOLoop(
        backend,
        load_rows(toy_rows(8)) if rows is None else load_rows(rows),
        reward,
        settings,
        **kwargs,
    )


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    "A working directory with `my_functions.py`."
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delitem(sys.modules, "my_functions", raising=False)
    (tmp_path / "my_functions.py").write_text(MODULE)
    return tmp_path


# --- from a kernel --------------------------------------------------------------------------------------------------

OPEN = f"""
import rl_notebook as rln
from rl_notebook.backends.local.trainer import open_local
from rl_notebook.runs.run import RunFolder
SMALL_RUN = {SMALL_RUN}
"""
RUN = """
run = RunFolder.create("here", cfg)
loop.outputs.append(run.add)
records = await loop.run(progress=False)
print(repr(loop.to_script("made/run.py")))
"""


CELLS = [
    "%matplotlib inline\nimport os.path\nimport re\nfrom dataclasses import replace\nimport numpy as np",
    'NUMBER = re.compile(r"-?\\d+")\nUNITS = {"far": 0.25, "near": 1.0}',
    """
def points(near: bool) -> float:
    return UNITS["near" if near else "far"]


def last(text):
    numbers = NUMBER.findall(text)
    return int(numbers[-1]) if numbers else None
""",
    """
def graded(text: str, answer: str, tolerance: int = len(UNITS) + 3) -> float:
    number = last(text)
    folder = os.path.join("a", "b")
    return 0.0 if number is None else points(abs(number - int(answer)) <= tolerance) + len(text) / 100
""",
    'def shape(text):\n    return float("#" in text)\ndef keep(group):\n    return group.rewards.std() > 0.001',
    """
@rln.register_loss(name="mine", eps_clip=0.2)
def ratio(t, tis, o):
    return -t.advantages * t.policy_logprobs * tis


def by_rank(groups):
    "Advantages."
    return [replace(g, advantages=np.argsort(np.argsort(g.rewards)) - (len(g.rewards) - 1) / 2) for g in groups]
""",
]
OPENED = """
cfg = rln.Config(**SMALL_RUN, policy_loss="mine")
backend = open_local(*rln.load_model("tiny"), reference=False)
from rl_notebook.task.rewards import reward_fn
reward = [graded, rln.gsm8k_reward, reward_fn(shape, name="form", weight=0.1)]
rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "odd": float("nan")} for a in range(3) for b in range(2)]
loop = rln.GRPOLoop(backend, rows, reward, cfg, dynamic_filter_fn=keep, advantage_fn=by_rank)
"""

REFUSED = {
    "a closure": (
        "def make(k):\n    return lambda text: k * len(text)\nfn = make(2.0)",
        "a closure over k",
    ),
    "nested": (
        "def make():\n    def inner(text):\n        return 1.0\n    return inner\nfn = make()",
        "a function inside make",
    ),
    "a lambda": ("fn = lambda text: 1.0", "a lambda"),
    "no source": ("exec('def fn(text): return 1.0')", "a function without source"),
    "a partial": (
        "import functools\ndef scale(text, k):\n    return k\nfn = functools.partial(scale, k=2)",
        "an object of type partial",
    ),
    "a class": (
        "class Grade:\n    pass\ndef fn(text):\n    return float(Grade() is None)",
        "function 'Grade': reward: got a class of a cell",
    ),
    "kernel state": (
        "model = rln.load_model('tiny')[0]\ndef fn(text):\n    return float(model.training)",
        "got model, Qwen3ForCausalLM of the kernel",
    ),
    "state it keeps": (
        "n = 0\ndef fn(text):\n    global n\n    n += 1\n    return float(n)",
        "got n, which it assigns",
    ),
}


ASK = """
backend = open_local(*rln.load_model("tiny"), reference=False)
def ask():
    try:
        loop = rln.GRPOLoop(backend, rln.toy_rows(4), fn, rln.Config(**SMALL_RUN))
        loop.to_script("rejected/run.py")
    except rln.RLNotebookError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    "A Jupyter kernel in a folder, and what each of its cells printed."
    import nbformat
    from nbclient import NotebookClient

    rejected_cells = [cell for source, _ in REFUSED.values() for cell in (source, "ask()")]
    cells = map(nbformat.v4.new_code_cell, [OPEN, *CELLS, OPENED, RUN, ASK, *rejected_cells])
    nb = nbformat.v4.new_notebook(cells=[*cells])
    folder = tmp_path_factory.mktemp("kernel")
    NotebookClient(
        nb, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    return folder, [
        "".join(o.get("text", "") for o in cell.outputs if o.name == "stdout") for cell in nb.cells
    ]


def test_functions_of_cells_come_with_their_source(kernel):
    folder, printed = kernel
    summary = printed[len(CELLS) + 2]
    first = summary.splitlines()[0]
    assert first.startswith("run.py, run.yaml, run.rows.jsonl: with the source of ")
    assert {"points", "last", "graded", "shape", "keep", "ratio", "by_rank"} <= set(
        first.split("of ")[-1].split(", ")
    )
    assert "note" not in summary
    by_script = run_script(folder / "made" / "run.py", folder / "log")
    POLICY_LOSSES.pop("mine")
    assert_same(by_script, list(Run.open(folder / "here")))


def test_a_value_that_only_the_kernel_has_is_rejected_with_an_explanation(kernel):
    folder, printed = kernel
    for (name, (_, expected)), words in zip(
        REFUSED.items(), printed[len(CELLS) + 5 :: 2], strict=True
    ):
        assert expected in words, f"{name}: {words}"
        assert all(
            part in words
            for part in (
                "reward",
                "function '",
                "expected a function that a cell defines",
                "%%writefile",
            )
        ) or ("Make it inside" in words or "Return it" in words), words
    assert not (folder / "rejected").exists()


# --- a config --------------------------------------------------------------------------------------------------------


def test_a_config_names_functions_of_files(workdir):
    import my_functions  # pyright: ignore[reportMissingImports]

    rewards = [reward_fn(my_functions.close, weight=2.0), "format"]
    loop = grpo_loop(
        rewards, cfg={"lora_rank": 4, "kl_beta": 0.01}, advantage_fn=my_functions.against_the_worst
    )
    cfg = loop.to_config()
    assert (cfg.rewards, cfg.reward_weights) == (("my_functions:close", "format"), (2.0, 1.0))
    assert (cfg.advantage_fn, cfg.max_rows) == ("my_functions:against_the_worst", 8)
    cfg.to_yaml(workdir / "run.yaml")
    by_loop = asyncio.run(loop.run(progress=False))
    assert command(["train", "--config", "run.yaml", "--log-path", "log"]) == 0
    assert_same(list(Run.open(workdir / "log")), by_loop)


@pytest.mark.parametrize(
    ("reward", "named"),
    [
        (toy_reward, ("rl_notebook.task.toy:toy_reward",)),
        ([toy_reward, reward_fn(toy_format_reward, weight=0.0)], ()),  # those of the data set
        (["gsm8k"], ("gsm8k",)),
    ],
)
def test_rewards_of_ours_have_names(reward, named):
    assert grpo_loop(reward).to_config().rewards == named


def test_the_config_is_that_of_the_loop_as_it_is_now():
    loop = grpo_loop(toy_reward, cfg={"seed": 3, "eval_rows": 2}, rows=toy_rows(8, seed=3))
    loop.change(learning_rate=2e-3)
    cfg = loop.to_config()
    # none was held out
    assert (cfg.learning_rate, cfg.seed, cfg.max_rows, cfg.eval_rows) == (2e-3, 3, 8, 0)


def test_a_default_length_fits_the_model():
    cfg = Config(
        prompt_groups_per_step=2, completions_per_prompt=2, max_completion_tokens=6, kl_beta=0
    )
    loop = GRPOLoop(open_local(*load_model("tiny"), reference=False), toy_rows(8), toy_reward, cfg)
    assert loop.to_config().max_seq_len == loop.backend.capabilities.max_seq_len < cfg.max_seq_len


def test_changes_during_a_run_are_noted(tmp_path):
    loop = grpo_loop(toy_reward)
    asyncio.run(loop.run(1, progress=False))
    loop.change(learning_rate=2e-3)
    shown_text = repr(loop.to_script(tmp_path / "run.py"))
    assert (
        "note: learning_rate: changed since the loop was opened; the script has the last value from step 1 on"
        in shown_text
    )
    text = (tmp_path / "run.py").read_text()
    assert "main(cfg, **options)" in text  # all of it has a name
    assert (
        "note: the script makes 2 steps (steps=2), this loop has made 1: --steps 1 ends it there"
        in shown_text
    )


def test_the_settings_of_a_script_name_the_file_that_has_its_rows(tmp_path):
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(4)]
    grpo_loop(toy_reward, rows=rows).to_script(tmp_path / "sums.py")
    cfg = Config.from_yaml(tmp_path / "sums.yaml")
    assert (cfg.dataset, cfg.rewards) == ("sums.rows.jsonl", ("rl_notebook.task.toy:toy_reward",))
    # those of the built-in data
    loop = grpo_loop([toy_reward, reward_fn(toy_format_reward, weight=0.0)], rows=rows)
    loop.to_script(tmp_path / "sums.py")
    assert Config.from_yaml(tmp_path / "sums.yaml").reward_weights == (1.0, 0.0)


# --- a script ---------------------------------------------------------------------------------------------------------


def test_a_file_of_another_program_is_left_alone(tmp_path):
    loop = grpo_loop(toy_reward, rows=[{"prompt": "1+1=", "answer": "2"}])
    for name in ("run.py", "run.yaml", "run.rows.jsonl"):
        (tmp_path / name).write_text("mine\n")
        with pytest.raises(
            ConfigError, match=rf"{name}: to_script: got something that this package did not write"
        ):
            loop.to_script(tmp_path / "run.py")
        assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [(name, "mine\n")]
        (tmp_path / name).unlink()
    script = grpo_loop(toy_reward).to_script(tmp_path / "other.py")
    # its own it writes again
    assert grpo_loop(toy_reward).to_script(tmp_path / "other.py") == script


@pytest.mark.parametrize(
    ("opened", "cfg", "match"),
    [
        (
            {"lora_rank": 4, "lora_alpha": 16},
            {"lora_rank": 4},
            "lora_alpha: got 32.0 in the config; expected 16",
        ),
        ({"lora_rank": 4, "seed": 7}, {"lora_rank": 4}, "seed"),
        ({}, {"base_model": "smollm2"}, "base_model"),
        ({"dtype": "bfloat16"}, {}, "dtype"),
    ],
)
def test_a_backend_that_the_config_would_not_open(opened, cfg, match, monkeypatch):
    monkeypatch.setattr(
        "rl_notebook.recipes.script.model_source",
        lambda name: load_model("tiny")[1].name_or_path + name[4:],
    )
    loop = GRPOLoop(
        open_local(*load_model("tiny"), reference=False, **opened),
        toy_rows(4),
        toy_reward,
        Config(**SMALL_RUN | cfg),
    )
    for write in (loop.to_config, loop.to_script):
        with pytest.raises(ConfigError, match=match):
            write()


# --- in the background ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_script_in_the_background_is_looked_at_stopped_and_resumed_with_the_same_numbers(
    tmp_path: Path,
):
    settings = {"steps": 60, "max_completion_tokens": 6, "log_path": None}

    def opened():
        return grpo_loop(toy_reward, cfg=settings, rows=toy_rows(40, seed=3))

    script = opened().to_script(tmp_path / "run.py").path
    log = tmp_path / "night"
    command = [sys.executable, script, "--log-path", log]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    while running.poll() is None and not ((log / "run.json").exists() and len(Run.open(log)) >= 2):
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    output = running.communicate(timeout=300)[0].decode()
    last = len(Run.open(log))
    assert (running.returncode, 2 <= last < 60) == (0, True), output
    assert "the script that began it" in output
    cfg = replace(Config.from_dict(Run.open(log).config), log_path=str(log))
    with pytest.raises(
        ConfigError, match=r"resume: got a run with custom rows.*script that began it"
    ):
        asyncio.run(train(cfg, resume=True))
    resumed = run_script(script, log, "--resume", "--steps", str(last + 2))
    assert_same(resumed, asyncio.run(opened().run(last + 2, progress=False)))
