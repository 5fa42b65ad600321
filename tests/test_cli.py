"""The command, as it is typed."""

import contextlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import typing
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest
import yaml
from synthetic import synthetic_record
from tiny_models import one_thread  # noqa: F401 (the fixture is used by every test)

from rl_notebook import cli
from rl_notebook.cli import main, option_values, parse_train
from rl_notebook.config.config import Config
from rl_notebook.core.validation import leaf_types
from rl_notebook.runs import run as run_module
from rl_notebook.core.advantages import has_no_signal
from rl_notebook.runs.run import Run, RunFolder

# --- demo and view --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    "Two steps of the demonstration: its run folder and what it said."
    folder = tmp_path_factory.mktemp("demo") / "run"
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main(["demo", "--steps", "2", "--log-path", str(folder)]) == 0
    return folder, output.getvalue()


def test_the_demo_ends_with_its_result(demo):
    folder, output = demo
    last, _, next_commands = output.rpartition("\nnext:\n")
    assert [line.split()[1] for line in next_commands.splitlines()] == [
        "view",
        "show",
        "why",
        "doctor",
        "export",
    ]
    last = last.splitlines()[-1]
    matches = re.fullmatch(r"held-out reward (\d+\.\d\d) -> (\d+\.\d\d) \(2 steps, \d+ s\)", last)
    assert matches, last
    rewards = RunFolder.open(folder).metrics()["eval/reward"].dropna()
    assert rewards.index.tolist() == [0, 2]
    # the figures are those that were measured
    assert [f"{r:.2f}" for r in rewards] == list(matches.groups())
    assert RunFolder.open(folder).checkpoints == [2]  # the trained policy is kept
    shown = [
        line
        for line in output.splitlines()
        if re.search(r"reward -?\d\.\d +advantage [+-]\d\.\d\d", line)
    ]
    texts = {s.text for record in RunFolder.open(folder) for g in record.groups for s in g.samples}
    assert len(shown) == 8
    # as they were sampled
    assert all(line.partition(" reward")[0].strip() in texts for line in shown)


class Loads(HTMLParser):
    "What a page asks its browser to fetch."

    def __init__(self, page: str):
        super().__init__()
        self.urls: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.urls += [
            v for k, v in attrs if v and k in ("src", "srcset", "href", "data", "poster", "action")
        ]
        self.urls += [v for k, v in attrs if v and k == "style" and "url(" in v]


def test_the_report_needs_no_network(demo):
    page = (demo[0] / "report.html").read_text()
    assert Loads('<img src="https://example.org/x.png">').urls == ["https://example.org/x.png"]
    assert [url for url in Loads(page).urls if not url.startswith(("#", "data:"))] == []
    styles = "".join(re.findall(r"<style[^>]*>(.*?)</style>", page, re.DOTALL))
    assert not re.search(r"@import|url\(\s*[\"']?\s*(https?:)?//", styles)
    for part in ("reward", "KL", "advantage", "</html>"):
        assert part in page


def test_view_follows_a_run_until_it_is_finished(demo, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(demo[0], run)
    whole = (run / "metrics.jsonl").read_text()
    recorded = yaml.safe_load((run / "config.yaml").read_text())
    # so one step is missing
    (run / "config.yaml").write_text(yaml.safe_dump(recorded | {"steps": 3}))
    threading.Timer(1.5, append_step, [run]).start()
    assert main(["view", str(run), "--every", "0.2", "--out", str(tmp_path / "page.html")]) == 0
    output = capsys.readouterr().err
    assert "The page follows the run" in output
    assert "Ctrl-C ends that" in output
    assert "No longer followed: Finished after step 3" in output
    page = (tmp_path / "page.html").read_text()
    assert "Finished after step 3" in page
    assert (run / "metrics.jsonl").read_text().startswith(whole)


def test_view_leaves_a_folder_of_a_script_that_says_no_end(demo, tmp_path, capsys):
    "A script wrote it and ended: its settings plan more steps than will ever come."
    run = tmp_path / "run"
    shutil.copytree(demo[0], run)
    recorded = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(recorded | {"steps": None, "epochs": 50}))
    os.utime(run / "metrics.jsonl")  # it has just written
    assert main(["view", str(run), "--every", "0.1", "--idle-timeout", "1"]) == 0
    output = capsys.readouterr()
    page = Path(output.out.strip())
    assert "was not started here: its page is written outside of it" in output.err
    for words in (
        "Open file://",
        "or add --open",
        "1 s without a new step",
        "Ctrl-C ends that",
        "No longer followed",
    ):
        assert words in output.err
    assert "data-refresh" not in page.read_text()


def append_step(run: Path) -> None:
    "What a running process does at the end of a step."
    folder = RunFolder.open(run)
    folder.add(replace(folder.record(2), step=3))


def test_a_long_run_is_read_in_part_and_without_torch(tmp_path, monkeypatch, capsys):
    run = RunFolder.create(tmp_path / "run", {"base_model": "tiny"})
    read = list[int]()
    for step in range(1, 61):
        record = synthetic_record(step, groups=2, completions=4)
        run.add(replace(record, metrics={**record.metrics, cli.GAP: float(step == 7)}))
    whole = run_module.read_record
    monkeypatch.setattr(
        run_module,
        "read_record",
        lambda path, *options: read.append(int(path.name)) or whole(path, *options),
    )
    for command_, most in (("show --json", 40), ("show", 40), ("doctor", 50), ("view --once", 49)):
        name, *options = command_.split()
        read.clear()
        main([name, str(run.path), *options])
        assert len({*read}) <= most, command_
        assert len(read) <= len({*read}) + 9 * (name == "view"), command_  # the last ones, whole
        assert {*range(41, 61)} <= {*read}
        assert (7 in read) == (name == "doctor")
    # of the 40 that are read
    assert "28 of 60 steps: those with both series" in capsys.readouterr().out
    code = "import sys; from rl_notebook.cli import main; main(sys.argv[1:]); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "show", run.path], capture_output=True, text=True, check=True
    )
    assert not {"torch", "transformers"} & {*done.stdout.splitlines()[-1].split()}


def test_the_doctor_names_the_step_and_the_cause(demo, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(demo[0], run)
    record = RunFolder.open(run).record(2)
    RunFolder.open(run).rewind(1)
    moved = [replace(d, sampler_logprobs=np.roll(d.sampler_logprobs, 1)) for d in record.datums]
    series = [
        np.where(np.isnan(d.sampler_logprobs) & (d.weights > 0), -0.1, d.sampler_logprobs)
        for d in moved
    ]
    broken = replace(
        record, datums=[replace(d, sampler_logprobs=s) for d, s in zip(moved, series, strict=True)]
    )
    RunFolder.open(run).add(broken)
    assert main(["doctor", str(run)]) == 1
    output = capsys.readouterr().out
    assert re.search(r"^step +1  no mismatch", output, flags=re.M)
    assert re.search(r"^step +2  differs: shift", output, flags=re.M)
    assert main(["doctor", str(run), "--step", "1", "--rescore"]) == 0


def test_view_opens_a_browser_only_when_asked(demo, monkeypatch, capsys):
    opened: list[str] = []
    monkeypatch.setattr(cli.webbrowser, "open", opened.append)
    assert main(["view", str(demo[0])]) == 0
    assert opened == []
    assert main(["view", str(demo[0]), "--open"]) == 0
    assert opened == [(demo[0] / "report.html").resolve().as_uri()]
    capsys.readouterr()


def test_a_second_demo_takes_the_next_free_folder(tmp_path):
    assert cli.free_folder(tmp_path / "demo") == tmp_path / "demo"
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo-2").mkdir()
    assert cli.free_folder(tmp_path / "demo") == tmp_path / "demo-3"


# --- options --------------------------------------------------------------------------------------------------------


def another(hint: Any) -> tuple[list[str], Any]:
    "How a value of this type is typed, and what it is."
    args = [a for a in typing.get_args(hint) if a is not type(None)]
    if typing.get_origin(hint) is typing.Literal:
        return [str(args[-1])], args[-1]
    if typing.get_origin(hint) is tuple:
        texts, value = another(args[0])
        return texts * 2, (value, value)
    if typing.get_origin(hint) is Mapping:
        return ["{a: 1}"], {"a": 1}
    if args:
        return another(args[0])
    known = {
        bool: (["true"], True),
        int: (["7"], 7),
        float: (["1.5e-3"], 0.0015),
        str: (["yes: 1"], "yes: 1"),
    }
    return known[hint] if hint in known else ([[*hint][-1].value], [*hint][-1])


def test_every_field_can_follow_as_an_option():
    for name, hint in leaf_types(Config).items():
        texts, value = another(hint)
        for option in (f"--{name}", f"--{name.replace('_', '-')}"):
            ((typed, read),) = option_values([option, *texts]).items()
            assert (typed, pydantic.TypeAdapter(hint).validate_python(read)) == (name, value)


def test_typed_options_arrive_as_typed_values():
    def cfg(*args: str) -> Config:
        return parse_train(args)[0]

    assert cfg("--system-prompt", "Answer: yes, 3").system_prompt == "Answer: yes, 3"
    assert cfg("--run-name", "007").run_name == "007"
    assert cfg("--stop", "\n", "a: b").stop == ("\n", "a: b")
    assert cfg("--learning-rate", "1e-4").learning_rate == 1e-4
    assert cfg("--learning-rate=1e-4").learning_rate == 1e-4
    assert cfg("--no-shuffle").shuffle is False
    assert (cfg("--tis-enabled").tis_enabled, cfg("--tis-enabled", "false").tis_enabled) == (
        True,
        False,
    )
    assert cfg("--max-rows", "null").max_rows is None
    assert cfg("--max-rows", "None").max_rows is None  # as --help writes it
    assert cfg("--rewards", "gsm8k", "--reward-weights", "0.5").reward_weights == (0.5,)
    assert cfg("--tis-enabled", "--tis.cap", "3") == cfg("--tis-cap", "3", "--tis", "token")
    assert cfg("--steps", "1", "--steps", "2").steps == 2


def test_resume_takes_the_recorded_settings(tmp_path):
    RunFolder.create(tmp_path / "run", Config(learning_rate=0.5, steps=3))
    cfg, options = parse_train(
        ["--resume", "--log-path", str(tmp_path / "run"), "--steps", "9", "--leftover", "attach"]
    )
    assert (cfg.learning_rate, cfg.steps, cfg.log_path) == (0.5, 9, str(tmp_path / "run"))
    assert options == {"resume": True, "leftover": "attach", "trust": False}


# --- help and errors ------------------------------------------------------------------------------------------------


def test_help(capsys):
    assert main(["--help"]) == 0
    usage = capsys.readouterr().out
    assert all(name in usage for name in cli.COMMANDS)
    for args in (
        ["demo", "--help"],
        ["view", "--help"],
        ["train", "--steps", "3", "-h"],
        ["train", "--help"],
    ):
        with pytest.raises(SystemExit) as left:
            main(args)
        assert left.value.code == 0
        page = capsys.readouterr().out
    titles = [line for line in page.splitlines() if re.match(r"[A-Z].*:$", line)]
    assert titles[:3] == [
        "Which model learns which task:",
        "How completions are sampled:",
        "From rewards to advantages:",
    ]
    assert len(titles) >= 15
    assert page.index("--learning-rate FLOAT") > page.index(
        "Optimizer, adapter, batching of the backward passes:"
    )
    text = re.sub(r"[\s│]+", " ", page)
    missing = [
        name
        for name in leaf_types(Config)
        if f"--{name.replace('_', '-')} " not in text.replace(",", " ")
    ]
    assert (
        missing == re.findall(r"(--[a-z.-]+) (?:\S+ )?\(default: ", text) == []
    )  # none is left out, none says nothing
    assert all(
        name in text for name in ("--config", "--resume", "weight of the KL term to the reference")
    )
    assert "how rewards become advantages (default: std)" in text


def test_help_and_mistakes_do_not_wait_for_torch():
    lines = [
        "import contextlib, io, sys",
        "from rl_notebook.cli import COMMANDS, main",
        "output = io.StringIO()",
        "for args in [*([name, '--help'] for name in COMMANDS), ['train', '--learning-rat', '1'], ['--help']]:",
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):",
        "        main(args)",
        "assert output.getvalue().count('usage: ') == len(COMMANDS) + 1",
        "assert \"Did you mean 'learning_rate'\" in output.getvalue()",
        "print([name for name in ('torch', 'transformers', 'pandas', 'plotly', 'matplotlib') if name in sys.modules])",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["export", "run", "--to", "mergd"],
            "Did you mean 'merged'? rl-notebook export --help lists the options.",
        ),
        (
            ["show", "run", "--step", "abc"],
            "--step: expected a whole number; got: 'abc'. rl-notebook show --help",
        ),
        (
            ["replay", "run"],
            "the following arguments are required: step. rl-notebook replay --help lists",
        ),
        (["train", "--rewards", "gsm8k", "--reward-weights", "1", "2"], "--reward-weights 1 0.5"),
        (
            ["train", "--backend", "locl"],
            "expected one of local, openai, tinker, fireworks. Did you mean 'local'?",
        ),
        (["trian"], "unknown command. Did you mean 'train'?"),
        (["train", "--learning-rat", "1"], "Did you mean 'learning_rate'?"),
        (["train", "--steps", "many"], "steps: got 'many'; expected a whole number"),
        (["train", "--lora-rank", "[1"], "--lora_rank: got '[1'; expected a value"),
        (["train", "3"], "option: got '3'; expected --name before its value"),
        (["train", "--config", "no-such-file.yaml"], "config file: got no such file"),
        (["train", "--resume"], "resume: got no log_path; expected the run folder to resume"),
        (
            ["train", "--base-model", "no/such/model"],
            "model: got no such folder; expected 'tiny', 'smollm2'",
        ),
        (["train", "--base-model", "nomodel"], "got no such folder, and the hub cannot be asked ("),
        (["emulate", "--model", "tinyy"], "Did you mean 'tiny'?"),
        (
            ["train", "--dataset", "owner/nothing", "--rewards", "gsm8k"],
            "the hub cannot be asked (",
        ),
        (
            ["train", "--rewards", "nomodule:fn"],
            "reward: got 'nomodule:fn'; expected an importable module:function",
        ),
        (
            ["view", "no-such-run"],
            "no-such-run: no run here: got no such folder; expected the folder that was given",
        ),
        (
            ["show", "."],
            "no run here: got a folder without run.json; expected the folder that was given as log_path",
        ),
        (["check"], "check: --backend: got none; expected openai, tinker or fireworks"),
        (
            ["train", "--help", "zebra"],
            "--help: got 'zebra'; expected words of an option or of its group",
        ),
        (["train", "--help", "lerning-rate"], "Did you mean learning_rate?"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(args, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # tests have no network in any case
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    begun = time.perf_counter()
    assert main(args) == 2
    output = capsys.readouterr()
    assert time.perf_counter() - begun < 10  # the hub is asked once
    assert output.out == ""
    assert output.err.startswith(f"rl-notebook {args[0]}: ")
    assert message in output.err
    assert "Traceback" not in output.err
    assert "Retrying" not in output.err
    assert not list(tmp_path.iterdir())


def test_a_run_that_fails_in_its_first_step_leaves_no_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "custom_reward.py").write_text("def fn(text):\n    raise ValueError('broken')\n")
    monkeypatch.chdir(tmp_path)
    short = [
        "--max-completion-tokens",
        "4",
        "--prompt-groups-per-step",
        "1",
        "--rewards",
        "custom_reward:fn",
    ]
    assert main(["train", *short]) == 2
    output = capsys.readouterr()
    assert "--resume" not in output.out + output.err
    assert [*(tmp_path / "runs").iterdir()] == []
    assert main(["train", *short, "--log-path", "kept"]) == 2
    assert (tmp_path / "kept" / "run.json").exists()
    capsys.readouterr()
    assert main(["show", "nope"]) == 2
    assert "No run is near by." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "among", "not_among"),
    [
        (["learning_rate"], {"--learning-rate", "--warmup-steps"}, {"--temperature", "--config"}),
        (["learning", "rate"], {"--learning-rate"}, {"--temperature"}),
        (["loss"], {"--policy-loss", "--eps-clip", "--kl-beta", "--aggregation"}, {"--base-model"}),
        (["--beta"], {"--kl-beta"}, {"--steps"}),  # as TRL calls it
    ],
)
def test_help_with_a_word_lists_the_options_that_have_it(words, among, not_among, capsys):
    with pytest.raises(SystemExit) as left:
        main(["train", "--help", *words])
    assert left.value.code == 0
    page = capsys.readouterr().out
    listed = {*re.findall(r"^  (--[a-z.-]+)", page, re.M)}
    assert among <= listed
    assert not not_among & listed
    assert len(page.splitlines()) < 160


def test_the_version_names_what_a_report_of_a_bug_needs(capsys):
    assert main(["--version"]) == 0
    output = capsys.readouterr().out
    assert re.fullmatch(r"rl-notebook \d\S*, Python 3\S+, torch \S+, transformers \S+\n", output)


def test_a_run_is_kept_and_learns_by_default(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    short = ["train", "--steps", "1", "--max-completion-tokens", "24"]
    assert main(short) == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-toy", run.name)
    output = capsys.readouterr().out
    assert output.index(f"run folder: runs/{run.name}") < output.index("step 1 ·")
    assert f"rl-notebook view runs/{run.name}" in output
    record = Run.open(run).record(1)
    assert len(record.groups) == 16
    assert sum(not has_no_signal(group.rewards) for group in record.groups) >= 8  # those that train
    assert main([*short, "--prompt-groups-per-step", "2", "--num-generations", "4"]) == 0
    (other,) = {*(tmp_path / "runs").iterdir()} - {run}
    assert [len(group.samples) for group in Run.open(other).record(1).groups] == [4, 4]
    capsys.readouterr()
    assert main([*short, "--log-path", "None", "--prompt-groups-per-step", "1"]) == 0
    output = capsys.readouterr()
    assert len([*(tmp_path / "runs").iterdir()]) == 2
    lines = (output.out + output.err).splitlines()
    hint = next(i for i, line in enumerate(lines) if "are not kept. Set log_path=" in line)
    assert hint < next(i for i, line in enumerate(lines) if "step 1 ·" in line)


@pytest.mark.parametrize("setting", ["--rewards", "--policy-loss", "--advantage-fn", "--dataset"])
def test_an_error_of_your_own_file_shows_your_lines_only(setting, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    named = setting.strip("-").replace("-", "_")
    (tmp_path / f"open_{named}.py").write_text("def mine(text:\n    return 1.0\n")
    (tmp_path / f"raises_{named}.py").write_text("import json\n\nTABLE = json.loads('{')\n")
    for module, last in (
        (f"open_{named}", "'(' was never closed"),
        (f"raises_{named}", "JSONDecodeError"),
    ):
        assert main(["train", setting, f"{module}:mine", "--steps", "1", "--log-path", "run"]) == 2
        output = capsys.readouterr().err
        assert f"{module}.py" in output.splitlines()[0] + output.splitlines()[1]
        assert last in output
        assert "importlib" not in output
        assert "named_function" not in output


def test_a_warning_is_a_line(capsys):
    with pytest.warns(UserWarning, match="All connection attempts failed"):
        main(
            [
                "check",
                "--backend",
                "openai",
                "--base-url",
                "http://127.0.0.1:9/v1",
                "--base-model",
                "tiny",
            ]
        )
    code = "import sys, warnings; from rl_notebook import cli; cli._run = lambda args: warnings.warn('busy'); cli.main([])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == "warning: busy\n"


def test_runs_near_by_are_named(demo, tmp_path, monkeypatch, capsys):
    shutil.copytree(demo[0], tmp_path / "runs" / "first")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "progress.csv").write_text("step,reward\n1,0.5\n")
    for path in ("nope", "runs", "runs/frist", "runs/first/steps"):
        assert main(["show", path]) == 2
        assert "Runs near by: runs/first." in capsys.readouterr().err.replace("./", ""), path
    assert main(["show", "runs/first/metrics.jsonl"]) == 0
    assert "runs/first is the folder of this run" in capsys.readouterr().out
    for path in ("progress.csv", "."):  # a log of numbers
        assert main(["show", path]) == 0
        assert "numbers only (progress.csv): 1 step" in capsys.readouterr().out


def test_a_part_of_a_place_says_which_part_is_missing(demo, capsys):
    for options, got, missing in (
        (["--group", "0"], "--group 0", "Add --step and --sample"),
        (["--step", "1", "--sample", "2"], "--step 1 and --sample 2", "Add --group;"),
    ):
        assert main(["show", str(demo[0]), *options]) == 2
        output = capsys.readouterr().err
        assert f"got {got}; expected --step, --group and --sample together. {missing}" in output


def test_a_second_export_says_what_to_do(demo, tmp_path, capsys):
    for code in (0, 2):
        assert main(["export", str(demo[0]), "--out", str(tmp_path / "weights")]) == code
    assert "Name another folder; on the command line: --out FOLDER." in capsys.readouterr().err


def test_a_reader_that_has_read_enough_ends_it_quietly() -> None:
    "As `rl-notebook ... | head` does: its output goes into a pipe that nothing reads."
    code = "import sys; from rl_notebook.cli import main; sys.exit(main(sys.argv[1:]))"
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", code, "check", "--help"]
    ended = subprocess.run(
        command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=300, check=False
    )
    os.close(writing)
    assert ended.stderr == ""
    # argparse says nothing of a pipe that is closed
    assert ended.returncode in (0, 128 + signal.SIGPIPE)


def test_sigterm_ends_a_command_as_ctrl_c_does(monkeypatch):
    def command(args):
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            return 130

    monkeypatch.setattr(cli, "_run", command)
    before = signal.getsignal(signal.SIGTERM)
    assert cli.main([]) == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
