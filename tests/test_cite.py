"""Claims held against records: of our run, of other trainers' runs, of logs; and the skill that tells agents to do so."""

import io
import json
import math
import re
import shlex
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import rl_notebook as rln
from rl_notebook.cli import describe_sample, main
from rl_notebook.core.types import RecordError
from rl_notebook.runs.cite import cite, parse_place
from rl_notebook.runs.conditions import ConditionError, parse_conditions, parse_number
from rl_notebook.runs.run import Run

ROOT = Path(__file__).parents[1]
LOGS = ROOT / "tests/logs"
MOST = 4  # completions of a run that are cited
FOREIGN = {  # folder: a run in it
    "trl": "completions",
    "verl": "rollout_data",
    "nemo_rl": "logs",
    "prime_rl_rollouts": "run",
    "slime": "dump",
    "tinker_cookbook": "log",
    "verifiers": "run",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    "Two steps of the built-in model."
    folder = tmp_path_factory.mktemp("runs") / "demo"
    options = "--steps 2 --prompt-groups-per-step 4 --completions-per-prompt 4 --max-completion-tokens 16 --kl-beta 0.01"
    assert main(["train", *options.split(), "--log-path", str(folder)]) == 0
    return Run.open(folder)


def other_than(value: float) -> float:
    return value + 1.5


def check_samples(run: Run, step: int) -> int:
    "Each recorded value of a step can be cited, and no other; returns how many there were."
    count = 0
    record = run.record(step)
    for row in record.completions_table().head(MOST).to_dict("records"):
        place = f"step {step} group {row['group']} sample {row['sample']}:"
        for name in ("reward", "advantage", "length"):
            value = row[name]
            if value is None or math.isnan(value):
                continue
            written = f"{value:.4f}"
            assert cite(record, f"{place} {name} {written}").holds is True
            assert cite(record, f"{place} {name} {other_than(value):.4f}").holds is False
            count += 1
        begins = json.dumps(row["text"][:20], ensure_ascii=False)
        assert cite(record, f"{place} text begins with {begins}").holds is True
        assert cite(record, f'{place} text contains "{row["text"]}, and more"').holds is False
        assert cite(record, f"{place} finish_reason {row['finish_reason']}").holds is True
        assert cite(record, f"{place} finish_reason other").holds is False
    return count


def test_each_recorded_value_can_be_cited_and_no_other(run):
    assert check_samples(run, 2) == 3 * MOST


@pytest.mark.parametrize("trainer", FOREIGN)
def test_runs_of_other_trainers_can_be_cited(trainer):
    opened = Run.open(ROOT / "tests/foreign" / trainer / FOREIGN[trainer])
    assert check_samples(opened, opened.steps[-1]) > 0


def test_tokens_are_those_that_show_prints(run):
    record = run.record(1)
    trained = record.datums[0]
    data, _ = describe_sample(run, 1, trained.group, trained.sample)
    place = f"step 1 group {trained.group} sample {trained.sample} token"
    sampled = [t for t in data["tokens"] if t["loss_mask"]]
    for token in sampled[:2]:
        at = f"{place} {token['position']}:"
        for name, column in (("logprob", "policy_logprobs"), ("sampler logprob", "sampler_logprobs"),
                             ("ref_logprob", "ref_logprobs")):  # fmt: skip
            value = token[column]
            assert cite(run, f"{at} {name} {value:.4f}, id {token['token']}").holds is True
            assert cite(run, f"{at} {name} {value - 0.01:.4f}").holds is False
        assert cite(run, f"{at} text {json.dumps(token['text'])}").holds is True
    first, last = sampled[0]["position"], sampled[-1]["position"]
    whole = "".join(t["text"] for t in sampled)
    claim = (
        f"{place}s {first}-{last}: text {json.dumps(whole)}, mean logprob < 0, no id 0, loss_mask 1"
    )
    assert cite(run, claim).holds is True
    turn = f"step 1 group {trained.group} sample {trained.sample} turn 0: {len(sampled)} tokens"
    assert cite(run, turn).holds is True


def test_a_place_that_is_not_there_is_false_and_what_is_not_kept_is_open(run):
    for place in ("step 9", "step 1 group 9", "step 1 group 0 sample 9", "step 1 group 0 sample 0 token 900",
                  "step 1 group 0 sample 0 turn 3"):  # fmt: skip
        citation = cite(run, f"{place}: reward 1")
        assert (citation.holds, bool(citation.missing)) == (False, True)
    kept = cite(run, "step 1: nothing_such 1, reward > 5")
    assert [fact.holds for fact in kept.facts] == [None, False]
    assert kept.holds is False
    assert cite(run, "step 1: reward_stdd 1").holds is None
    texts = Run.open(ROOT / "tests/foreign/trl/completions")
    assert cite(texts, "last step group 0 sample 0 token 2: logprob -0.3").holds is None


def test_metrics_have_our_names_and_those_of_the_trainer(run):
    reward = run.metrics()["reward"][2]
    for name in ("reward", "reward/mean", "critic/score/mean"):
        assert cite(run, f"step 2: {name} {reward:.3f}").holds is True
        assert cite(run, f"step 2: {name} {reward + 0.01:.3f}").holds is False
    verl = LOGS / "verl.jsonl"
    last = json.loads(verl.read_text().splitlines()[-1])
    score = last["data"]["critic/score/mean"]
    assert cite(verl, f"step {last['step']}: critic/score/mean {score:.4f}").holds is True
    assert cite(verl, f"step {last['step']}: reward {score:.4f}").holds is True
    assert cite(verl, f"step {last['step']} group 0: reward {score}").holds is None


def test_several_completions_need_a_word_or_all_of_them(run):
    rewards = run.record(2).completions_table()["reward"]
    claims = {
        f"mean reward {rewards.mean():.4f}": True,
        f"max reward {rewards.max():g}, min reward {rewards.min():g}": True,
        "every reward >= 0": True,
        "any reward > 2": False,
        "no reward > 2": True,
        'any text contains "####"': True,
        'no text contains "####"': False,
        "samples 16, groups 4": True,
        "15 samples": False,
    }
    for claim, holds in claims.items():
        assert cite(run, f"step 2: {claim}").holds is holds, claim
    assert cite(run, "step 2 group 1: 4 samples").holds is True


def test_loops_and_records_can_be_cited(run):
    record = run.record(1)
    claim = f"step 1 group 0 sample 0: reward {record.groups[0].samples[0].reward:g}"
    assert rln.cite(record, claim).holds is rln.cite([record], claim).holds is True
    with pytest.raises(RecordError, match="expected a run folder, a log, a Run, a loop or records"):
        rln.cite(3, claim)


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        ("reward 1", "got no step"),
        ("step 1 sample 2: reward 1", "a sample without a group"),
        ("step 1 group 2 tokens 3-4: id 1", "tokens without a sample"),
        ("step 1 step 2: reward 1", "two steps"),
        ("step 1-3: reward 1", "several steps"),
        ("step 1 group 0 sample 0 turn 1 token 2: id 1", "a turn and tokens"),
        ("step 1", "a name, a comparison and a value"),
        ("step 1: good", "a name, a comparison and a value"),
        ("step 1: reward", "a number behind reward"),
        ("step 1: kl < high", "a number behind kl"),
        ("step 1: reward 1 or reward 0", "facts that hold together"),
    ],
)
def test_what_is_not_understood_is_said(claim, message):
    with pytest.raises(ConditionError, match=message):
        cite([rln.StepRecord(1)], claim)


@given(st.floats(-1e6, 1e6), st.integers(1, 6))
def test_a_number_is_what_rounds_to_its_digits(value, digits):
    claimed = parse_number(f"{value:.{digits}f}")
    assert value in claimed
    assert value + 1.1 * 10**-digits not in claimed


@given(st.text())
def test_any_text_is_parsed_or_refused(text):
    try:
        place, rest = parse_place(f"step 1 {text}", [1])
        facts = parse_conditions(rest, "claim", text)
    except ConditionError:
        return
    assert place.step == 1
    assert facts


def test_the_command_says_by_its_exit_status_what_holds(run, capsys, monkeypatch):
    sample = run.record(2).groups[0].samples[0]
    right = f"step 2 group 0 sample 0: reward {sample.reward:g}"
    wrong = f"step 2 group 0 sample 0: reward {1 - sample.reward:g}"
    codes = {
        (right,): 0,
        (right, wrong): 1,
        (right, "step 2: unknown_thing 3"): 2,
        ("good",): 2,
    }
    for claims, code in codes.items():
        assert main(["cite", str(run.path), *claims]) == code
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{right}\n\n{wrong}\n"))
    assert main(["cite", str(run.path), "-", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert [c["holds"] for c in data["claims"]] == [True, False]
    assert data["claims"][1]["facts"][0]["values"] == [sample.reward]
    assert main(["cite", "no-such-run", right]) == 2


def skill() -> str:
    return (files("rl_notebook") / "assets/SKILL.md").read_text(encoding="utf-8")


def test_the_skill_has_the_front_matter_that_agents_read(tmp_path):
    assert main(["skill", "--install", str(tmp_path)]) == 0
    path = tmp_path / "rl-notebook/SKILL.md"
    _, front, body = path.read_text(encoding="utf-8").split("---\n", 2)
    about = yaml.safe_load(front)
    assert set(about) == {"name", "description"}
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", about["name"])
    assert about["name"] == path.parent.name
    assert 0 < len(about["description"]) <= 1024
    assert len(body.splitlines()) < 80
    assert main(["skill", "--install", str(tmp_path)]) == 0  # an older one is replaced
    path.write_text("mine", encoding="utf-8")
    assert main(["skill", "--install", str(tmp_path)]) == 2
    for page in ("AGENTS.md", "llms.txt"):
        assert "rl-notebook skill" in (ROOT / page).read_text(encoding="utf-8")


def test_every_command_of_the_skill_runs(run, tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"```sh\n(.*?)```", skill(), re.DOTALL)
    inline = re.findall(r"`(rl-notebook [^`]*RUN[^`]*)`", skill())
    lines = [line.strip() for block in blocks for line in block.splitlines() if line.strip()]
    commands = [*lines, *inline]
    assert len(commands) >= 7
    monkeypatch.chdir(tmp_path)
    for command in commands:
        words = shlex.split(command.partition("<")[0])
        monkeypatch.setattr(sys, "stdin", io.StringIO("step 2: reward >= 0\n"))
        code = main([str(run.path) if word == "RUN" else word for word in words[1:]])
        output = capsys.readouterr()
        assert code in (0, 1), f"{command}: {output.err}"
        if "--json" in words:
            json.loads(output.out)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "completions" in page
