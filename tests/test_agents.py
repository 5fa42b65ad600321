"What AGENTS.md and llms.txt tell a coding agent is true: paths exist, phases are those of the loop, commands run."

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

import rl_notebook as rln
from rl_notebook.cli import main
from rl_notebook.loop.state import AWAITED, LOOK_ONLY, PHASES

ROOT = Path(__file__).parent.parent
AGENTS, LLMS = ((ROOT / name).read_text(encoding="utf-8") for name in ("AGENTS.md", "llms.txt"))
SHOWN = re.findall(r"^rl-notebook (show runs/demo.*?) *#", AGENTS, re.MULTILINE)


def test_every_name_in_the_guides_exists():
    linked = re.findall(r"\]\(([^)]+)\)", AGENTS + LLMS)
    named = re.findall(
        r"`((?:nbs|tests|benchmarks|examples|rl_notebook)/[\w./]*|\w+\.(?:toml|md))`", AGENTS
    )
    assert len(linked) > 10
    missing = [
        path for path in [*linked, *named] if not (ROOT / path).exists() and "NN_name" not in path
    ]
    assert missing == []
    targets = set(
        re.findall(r"^(\w+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert {*re.findall(r"(?:^|`)make (\w+)", AGENTS, re.MULTILINE)} - targets == set()
    assert [name for name in re.findall(r"`?rln\.(\w+)", AGENTS) if name not in rln.__all__] == []


def test_the_phases_are_those_of_the_loop():
    section = AGENTS.partition("## A step and its phases")[2].partition("Each is a method")
    assert re.findall(r"`(\w+)`", section[0]) == [*PHASES]
    assert re.findall(r"`(\w+)`", section[2].partition("are awaited")[0])[-len(AWAITED) :] == [
        *AWAITED
    ]
    assert [f"`{phase}` (may be left out)" in section[0] for phase in LOOK_ONLY] == [True]


def test_the_program_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    program = AGENTS.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(program, {"__name__": "__main__"})
    output = capsys.readouterr().out
    assert all(
        part in output for part in ("32 graded samples", "✓ finite: every reward", "no mismatch:")
    )


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "A place with a short run in runs/demo."
    place = tmp_path_factory.mktemp("place")
    cfg = rln.Config(
        steps=3,
        prompt_groups_per_step=4,
        completions_per_prompt=8,
        log_path=str(place / "runs/demo"),
    )
    rln.main(cfg, progress=False, say=lambda line: None)
    return place


@pytest.mark.parametrize("command", SHOWN)
def test_a_run_is_read(
    command: str, demo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(demo)
    assert main(shlex.split(command)) == 0
    output = capsys.readouterr().out
    if "--json" in command:
        assert ["finite", True] in [[c["name"], c["ok"]] for c in json.loads(output)["checks"]]
    else:
        assert (
            "loss_mask"
            if "--sample" in command
            else "✓ finite"
            if "--step" in command
            else "3 steps"
        ) in output


def test_what_is_shown_is_what_was_recorded(demo: Path, capsys: pytest.CaptureFixture[str]):
    record = rln.Run.open(demo / "runs/demo").record(2)
    d = record.datums[0]
    assert (
        main(
            [
                "show",
                str(demo / "runs/demo"),
                *f"--step 2 --group {d.group} --sample {d.sample} --json".split(),
            ]
        )
        == 0
    )
    fields = json.loads(capsys.readouterr().out)
    sample = next(g for g in record.groups if g.index == d.group).samples[d.sample]
    assert (fields["text"], fields["reward"]) == (sample.text, sample.reward)
    assert [t["token"] for t in fields["tokens"]] == sample.tokens.tolist()
    texts = [t["text"] for t in fields["tokens"]]
    assert "".join(texts[: sample.prompt_len]).startswith("<|bos|><|user|>")
    assert "".join(texts[sample.prompt_len :]).startswith(sample.text)
    last = record.loss.logprobs[0].values[-1], record.loss.dlogprobs[0][-1], d.ref_logprobs[-1]
    shown = [
        fields["tokens"][-1][name] for name in ("policy_logprobs", "dlogprobs", "ref_logprobs")
    ]
    assert shown == pytest.approx(last)
    assert main(["show", str(demo / "runs/demo"), "--step", "9"]) == 2
    assert "rl-notebook show:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("nowhere/model", "no text of tokens: "),
        ("other", "the tokenizer of .*other did not make this text"),
    ],
)
def test_without_the_tokenizer_ids_are_shown_and_why(
    model, why, demo: Path, tmp_path: Path, capsys
):
    run = shutil.copytree(demo / "runs/demo", tmp_path / "run")
    if model == "other":  # a tokenizer in which the same ids are other texts
        tokenizer = rln.load_model("tiny")[1]
        tokenizer.save_pretrained(tmp_path / "other")
        vocabulary = json.loads((tmp_path / "other/tokenizer.json").read_text())
        ids = vocabulary["model"]["vocab"]
        names = sorted(ids, key=ids.get)
        vocabulary["model"]["vocab"] = dict(
            zip(names, reversed([ids[name] for name in names]), strict=True)
        )
        (tmp_path / "other/tokenizer.json").write_text(json.dumps(vocabulary))
        model = str(tmp_path / "other")
    settings = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(settings.replace("base_model: tiny", f"base_model: {model}"))
    place = ["--step", "2", "--group", "0", "--sample", "0"]
    assert main(["show", str(run), *place]) == 0
    assert re.search(why, capsys.readouterr().out)
    assert main(["show", str(run), *place, "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert re.search(why, fields["note"])
    assert "text" not in fields["tokens"][0]
