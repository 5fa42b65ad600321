"""Folders that other trainers' own writers made, of sums of digits, next to the truth of what was sampled and trained.

`tests/foreign/TOOL` has one or two steps of a run; `truth.json` has their rows in completion coordinates.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_notebook.cli import main
from rl_notebook.core.types import RecordError
from rl_notebook.experiments.whatif import reward_lab
from rl_notebook.insight.doctor.doctor import diagnose
from rl_notebook.insight.xray import xray
from rl_notebook.runs.foreign import SHOWN
from rl_notebook.runs.run import Run, open_foreign

FOREIGN = Path(__file__).parent / "foreign"
ROUNDED = {"prime_rl_rollouts", "prime_rl_monitors", "verifiers"}  # four decimals on disk
NO_IDS = {"trl", "fw_cookbook"}
PER_TOKEN = ("sampler_logprobs", "old_logprobs", "policy_logprobs", "ref_logprobs", "entropy")
THERE = {  # series other than tokens that `show` says are there; all others must be None
    "nemo_rl": "sampler_logprobs old_logprobs advantages reward",
    "prime_rl_exports": "sampler_logprobs policy_logprobs entropy advantages",
    "prime_rl_rollouts": "sampler_logprobs advantages reward policy_version",
    "prime_rl_monitors": "sampler_logprobs policy_logprobs entropy advantages reward policy_version",
    "verifiers": "sampler_logprobs reward",
    "miles": "sampler_logprobs old_logprobs ref_logprobs entropy advantages reward policy_version",
    "slime": "sampler_logprobs old_logprobs ref_logprobs advantages reward policy_version",
    "tinker_cookbook": "sampler_logprobs reward policy_version",
    "verl": "sampler_logprobs reward policy_version",
    "trl": "advantages reward",
    "fw_cookbook": "advantages reward",
}
STEPS = {
    "nemo_rl": [1],
    "prime_rl_monitors": [0, 1, 2, 3],
    "tinker_cookbook": [0, 1],
    "verl": [1],
    "trl": [1, 2, 3, 4],
}
CHECKED = {"prime_rl_monitors": [0, 3]}  # steps that the truth has


def with_nan(values) -> np.ndarray:
    return np.array([np.nan if v is None else v for v in values], dtype=float)


def series_of(record, group: int, sample: int, prompt: int) -> dict[str, object]:
    "What a record says of a sample, per token of its completion."
    s = next(g for g in record.groups if g.index == group).samples[sample]
    series: dict[str, object] = {
        "sampler_logprobs": s.logprobs[prompt:],
        "mask": s.loss_mask[prompt:],
    }
    at = [k for k, d in enumerate(record.datums) if (d.group, d.sample) == (group, sample)]
    for k in at:
        d = record.datums[k]
        series |= {
            n: None if getattr(d, n) is None else getattr(d, n)[prompt - 1 :]
            for n in PER_TOKEN[1::2][:1]
        }
        series |= {"ref_logprobs": None if d.ref_logprobs is None else d.ref_logprobs[prompt - 1 :]}
        series |= {"advantage": d.advantage}
        if record.loss:
            lp = record.loss.logprobs[k]
            series |= {"policy_logprobs": lp.values[prompt - 1 :]}
            series |= {"entropy": None if lp.entropy is None else lp.entropy[prompt - 1 :]}
        elif "entropy" in s.info:
            series |= {"entropy": s.info["entropy"][prompt:]}
    return series


@pytest.mark.parametrize("tool", THERE)
def test_a_folder_says_what_its_truth_says(tool):
    run = Run.open(FOREIGN / tool)
    assert run.steps == STEPS.get(tool, [0])
    present = {*THERE[tool].split(), *([] if tool in NO_IDS else ["tokens"])}
    assert f"there: {', '.join(n for n in SHOWN if n in present)}\n" in run.origin
    limit = 6e-5 if tool in ROUNDED else 1e-6
    for step, rows in zip(
        CHECKED.get(tool, run.steps),
        json.loads((FOREIGN / tool / "truth.json").read_text())["steps"],
        strict=True,
    ):
        record = run.record(step)
        places = {}
        for g in record.groups:
            for i, s in enumerate(g.samples):
                key = s.text.strip() if tool in NO_IDS else tuple(s.tokens.tolist())
                places.setdefault(key, []).append((g, i, s))
        groups = {}
        for row in rows:
            ids = [*row["prompt_ids"], *row["completion_ids"]]
            same = places[row["text"].strip() if tool in NO_IDS else tuple(ids)]
            distances = [abs((sample.reward or 0) - row["reward"]) for _, _, sample in same]
            g, i, s = same.pop(distances.index(min(distances)))
            groups.setdefault(row.get("group", row.get("group_idx")), set()).add(g.index)
            assert (
                s.reward == pytest.approx(row["reward"])
                if "reward" in present
                else s.reward is None
            )
            if s.rewards:
                assert dict(s.rewards) == row["rewards"]
            if tool in NO_IDS:
                assert g.advantages[i] == pytest.approx(row["advantage"], abs=limit)
                continue
            result = series_of(record, g.index, i, len(row["prompt_ids"]))
            mask = np.array(row.get("mask") or [1] * len(row["completion_ids"]))
            assert (result["mask"] == mask).all()
            truth = row | {
                "sampler_logprobs": row.get("sampler_logprobs", row.get("sampler_logprobs_true"))
            }
            for name in PER_TOKEN:
                if name not in present:
                    assert result.get(name) is None, name
                elif name in result and truth.get(name) is not None:
                    difference = np.abs(np.asarray(result[name]) - with_nan(truth[name]))[mask > 0]
                    assert difference.max() <= limit, (name, difference)
            if "advantages" in present and "advantage" in result:
                assert result["advantage"] == pytest.approx(row["advantage"], abs=1e-6)
        assert not any(places.values()), "completions that the truth has not"
        assert tool in NO_IDS or all(len(prompts) == 1 for prompts in groups.values())


def test_faults_are_named_from_the_files_alone_and_healthy_ones_raise_nothing(capsys):
    shifted = [Run.open(FOREIGN / tool).record(0) for tool in ("miles", "prime_rl_monitors")]
    assert [asyncio.run(diagnose(r)).cause for r in shifted] == ["shift", "shift"]
    first = {tool: Run.open(FOREIGN / tool).record(STEPS.get(tool, [0])[0]) for tool in THERE}
    failed = {tool: [check.name for check in xray(record).failed] for tool, record in first.items()}
    assert {tool: names for tool, names in failed.items() if names} == {
        "fw_cookbook": ["advantages"]
    }
    assert all(
        asyncio.run(diagnose(first[tool])).ok for tool in ("nemo_rl", "slime", "prime_rl_exports")
    )
    assert main(["show", str(FOREIGN / "verifiers"), "0"]) == 0
    assert (
        "were not compared: no old_logprobs, no policy_logprobs in these files. To compare: score the tokens"
        in capsys.readouterr().out
    )


RUNS = {  # of two or three steps: the exit status of the doctor, and what it says
    "nemo_rl-temp07": (
        1,
        "the sampler sampled at temperature 0.70; scoring at 0.70 closes the gap",
    ),
    "prime_rl_exports-stale": (
        1,
        "✗ sync: the sampler is behind from step 2 on",
        "stale weights, likely",
    ),
    "slime-system": (
        1,
        "a gap that the record cannot explain: such as",
        "It may be BOS or template.",
    ),
    "slime-healthy_bf16": (
        0,
        "small, and without a direction: 0.0031 nats on average in every step",
        "differs: rounding, likely",
    ),
}


@pytest.mark.parametrize("run", RUNS)
def test_the_steps_of_a_run_are_put_together(run, capsys):
    status, *expected = RUNS[run]
    assert main(["doctor", str(FOREIGN / "faulty" / run)]) == status
    text = capsys.readouterr().out
    assert [part for part in expected if part not in text] == []
    named = re.findall(r"^step +\d+  (\S.*?) +largest gap", text, re.MULTILINE)
    verdict = text.partition("nats\n\n")[2]
    assert all(
        word == "no mismatch" or word.startswith("differs") or f"\n{word}: " in verdict
        for word in named
    )


def doctor_output(folder, capsys) -> tuple[int, str]:
    "Exit status of the doctor, and all that it printed."
    status = main(["doctor", str(folder)])
    return status, "".join(capsys.readouterr())


def sampled_with(place: Path, versions) -> Path:
    "A run of prime-rl's rollouts with a step for each version of the weights."
    lines = (
        next((FOREIGN / "prime_rl_rollouts").rglob("effective/traces.jsonl"))
        .read_text()
        .splitlines()
    )
    for step, version in enumerate(versions):
        file = place / "rollouts" / f"step_{step}" / "train" / "effective" / "traces.jsonl"
        file.parent.mkdir(parents=True)
        rows = [json.loads(line) for line in lines]
        for row in rows:
            row["run"]["work"] |= {"step": step, "policy": {"start": version, "end": version}}
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


SAME = "versions: steps {} to {} were sampled with the same weights, version {}: "
STUCK = "the sampler got no new weights after step "
VERSIONS = {  # of the steps: the exit status, and what is said of them
    "0111": (1, f"✗ {SAME.format(1, 3, 1)}{STUCK}1"),
    "000": (1, f"✗ {SAME.format(0, 2, 0)}{STUCK}0"),
    "00123": (2, f"– {SAME.format(0, 1, 0)}samples are up to 1 step old"),
    "0123": (2, ""),
}


@pytest.mark.parametrize("versions", VERSIONS)
def test_staleness_is_reported_where_only_versions_tell(tmp_path, capsys, versions):
    status, words = VERSIONS[versions]
    exit_status, text = doctor_output(sampled_with(tmp_path, map(int, versions)), capsys)
    assert (exit_status, words in text, "versions:" in text) == (status, True, bool(words))
    assert (
        "were not compared: no old_logprobs, no policy_logprobs in these files. To compare: trainer"
        in text
    )
    assert "Rewards were not regraded" in text


@pytest.mark.parametrize("scoped", [True, False])
def test_a_sampling_client_of_tinker_that_serves_every_iteration_is_stale(tmp_path, capsys, scoped):
    run = shutil.copytree(FOREIGN / "tinker_cookbook", tmp_path / "run")
    before = [[s.tokens.tolist() for g in r.groups for s in g.samples] for r in Run.open(run)]
    store = next(run.rglob("capture.sqlite"))
    with closing(sqlite3.connect(store)) as connection, connection:
        columns = ", iteration = cursor / 10" if scoped else ""
        connection.execute(
            f"UPDATE wire_rows SET sampling_session_id = 'session:sample:0'{columns}"
        )
    result = Run.open(run)
    assert [[s.tokens.tolist() for g in r.groups for s in g.samples] for r in result] == before
    assert {s.policy_version for r in result for g in r.groups for s in g.samples} == {0}
    assert (
        "– versions: steps 0 to 1 were sampled with the same weights, version 0"
        in doctor_output(run, capsys)[1]
    )


def test_a_temperature_that_the_trainer_does_not_score_at_is_reported(tmp_path, capsys):
    "tinker scores at 1; elsewhere both series of a record agree at 1, and its samples say 0.7."
    run = shutil.copytree(FOREIGN / "tinker_cookbook", tmp_path / "run")
    cooler = """metadata = replace(metadata, '"temperature": 1.0', '"temperature": 0.7')"""
    with closing(sqlite3.connect(next(run.rglob("capture.sqlite")))) as connection, connection:
        connection.execute(f"UPDATE wire_rows SET {cooler}")
    status, text = doctor_output(run, capsys)
    assert status == 1
    assert (
        "✗ temperature: completions were sampled at 0.7, as recorded, and this trainer scores at 1"
        in text
    )
    record = Run.open(FOREIGN / "prime_rl_exports").record(0)
    groups = [
        replace(g, samples=[replace(s, temperature=0.7) for s in g.samples]) for g in record.groups
    ]
    output = asyncio.run(diagnose(replace(record, groups=groups)))
    assert output.cause == "temperature"
    assert output.text.startswith("sampled at temperature 0.7 and scored at 1, as recorded")


def test_what_the_doctor_found_ends_its_output(capsys):
    "An uncentred advantage, where nothing can be compared, and healthy files where something can."
    status, text = doctor_output(FOREIGN / "fw_cookbook", capsys)
    assert (status, "were not compared: no tokens" in text) == (1, True)
    assert text.strip().splitlines()[-1].startswith("✗ advantages: a group does not sum to 0")
    regraded = reward_lab(
        Run.open(FOREIGN / "verl").record(1), lambda completions, **_: [1.0 for _ in completions]
    )
    # as it is proposed, where no advantages are recorded
    assert set(regraded.samples.new_reward) == {1.0}
    status, text = doctor_output(FOREIGN / "slime", capsys)
    assert (status, "Nothing to fix" in text, "Rewards were not regraded" in text) == (
        0,
        True,
        True,
    )


@pytest.mark.parametrize("tool", ["nemo_rl", "prime_rl_monitors", "slime", "trl"])
def test_the_command_line_takes_such_a_folder(tool, capsys, tmp_path):
    folder = str(FOREIGN / tool)
    assert main(["show", folder]) == 0
    assert " at " in capsys.readouterr().out.splitlines()[0]
    assert main(["view", folder, "--out", str(tmp_path / "page.html")]) == 0
    assert main(["doctor", folder]) in (0, 1, 2)
    assert "Traceback" not in capsys.readouterr().err


def test_a_file_that_is_being_written_waits_or_is_reported(tmp_path):
    run = shutil.copytree(FOREIGN / "nemo_rl", tmp_path / "nemo")
    file = next(run.rglob("train_data_step1.jsonl"))
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:8]) + lines[8][:500])
    with pytest.raises(
        RecordError, match="line 9: damaged: got half a line: it is still being written"
    ):
        Run.open(run).record(1)
    file.write_bytes(b"".join(lines))
    file.with_name("train_data_step2.jsonl").write_bytes(b"".join(lines[:8]))
    assert "step 2 has 8 completions, 12 before: is it still being written?" in Run.open(run).origin
    file.with_name("train_data_step2.jsonl").unlink()
    file.write_bytes(b"".join([*lines[:3], lines[3][:500] + b"\n", *lines[4:]]))
    with pytest.raises(RecordError, match="line 4"):
        Run.open(run).record(1)
    dump = shutil.copytree(FOREIGN / "miles", tmp_path / "miles") / "dump/train_data"
    for rank in (0, 1):
        (dump / f"1_{rank}.pt").write_bytes(
            (dump / f"0_{rank}.pt").read_bytes()[: 900 if rank else None]
        )
    assert Run.open(tmp_path / "miles").steps == [0]
    exports = shutil.copytree(FOREIGN / "faulty/prime_rl_exports-stale", tmp_path / "exports")
    next(exports.rglob("step_2/STABLE")).unlink()
    assert Run.open(exports).steps == [0, 1]
    rollouts = shutil.copytree(FOREIGN / "prime_rl_rollouts", tmp_path / "rollouts")
    shutil.copytree(
        next(rollouts.rglob("step_0/train/all")),
        next(rollouts.rglob("step_0")).parent / "step_1/train/all",
    )
    assert Run.open(rollouts).steps == [0]
    monitors = shutil.copytree(FOREIGN / "prime_rl_monitors", tmp_path / "prime")
    sealed = next(monitors.rglob("stream/00000.jsonl.zst"))
    sealed.write_bytes(sealed.read_bytes()[:-300])
    assert Run.open(monitors).steps[-1] == 3


def test_one_step_is_read_without_the_others(tmp_path):
    for step in range(1, 201):
        Path(tmp_path, f"train_data_step{step}.jsonl").write_text("no JSON\n")
    shutil.copy(next((FOREIGN / "nemo_rl").rglob("*.jsonl")), tmp_path / "train_data_step77.jsonl")
    run = Run.open(tmp_path)
    assert (len(run.steps), len(run.record(77).datums)) == (200, 12)


def edit_lines(place, tool: str, pattern: str, edit) -> Run:
    "The run of a tool with every line of the matching files as `edit(row, number)` leaves it."
    for path in shutil.copytree(FOREIGN / tool, place).rglob(pattern):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text(
            "".join(json.dumps(row | edit(row, k)) + "\n" for k, row in enumerate(rows))
        )
    return Run.open(place)


def test_unusual_rows_of_writers_are_read(tmp_path, capsys):
    "An empty completion, a text in place of messages, a reward of NaN, a mask one token off, a judge's trace."

    def later(row, k):
        return {"token_loss_mask": [[0, *row["token_loss_mask"][0][:-1]]]}

    odd = edit_lines(tmp_path / "mask", "nemo_rl", "*.jsonl", later).record(1)
    assert ([len(g.samples) for g in odd.groups], xray(odd).failed[0].name) == ([4, 4, 4], "mask")
    assert main(["doctor", str(tmp_path / "mask")]) == 1
    assert "✗ mask: a sampled token" in capsys.readouterr().out
    broken = {"content": ["1+1"], "rewards": [math.nan], "advantages": [[math.nan] * 99]}

    def unsaid(mask):
        return {"token_loss_mask": [[0] * 99], "input_lengths": [mask.index(1)]}

    def nothing(row, k):
        return broken | (unsaid(row["token_loss_mask"][0]) if k == 5 else {})

    odd = edit_lines(tmp_path / "nan", "nemo_rl", "*.jsonl", nothing).record(1)
    assert [g.dropped for g in odd.groups] == [(), ("no token was sampled",), ()]
    assert (odd.groups[0].samples[0].text, odd.groups[0].row) == ("1+1", {})
    assert np.isnan([*odd.groups[0].advantages, odd.datums[0].advantage]).all()
    texts = edit_lines(
        tmp_path / "text", "fw_cookbook", "*.jsonl", lambda row, k: {"completion": "4" * k}
    ).record(0)

    def judge(row, k):
        return {"traces": [*row["traces"], {**row["traces"][0], "agent": {"trainable": False}}]}

    odd = edit_lines(tmp_path / "judge", "prime_rl_rollouts", "traces.jsonl", judge).record(0)
    assert ([len(g.samples) for g in odd.groups], texts.groups[0].samples[0].text) == (
        [4, 4],
        "(no text)",
    )
    for step, more in ((1, {}), (2, {"prev_logprobs": [[0.0] * 99]})):
        rows = [
            json.loads(line) | more for line in next((FOREIGN / "nemo_rl").rglob("*.jsonl")).open()
        ]
        (tmp_path / f"train_data_step{step}.jsonl").write_text(
            "\n".join(map(json.dumps, rows)) + "\n"
        )
    assert main(["doctor", str(tmp_path)]) == 0
    assert "1 of 2 steps: those with both" in capsys.readouterr().out


class Bad:
    "Unpickled, it makes a folder."

    def __reduce__(self):
        return os.mkdir, ("opened",)


def test_nothing_is_unpickled_and_the_owner_is_shown_how(tmp_path):
    with pytest.raises(RecordError, match=r"pickles of SkyRL(.|\n)*np\.savez"):
        Run.open(FOREIGN / "skyrl")
    (tmp_path / "train_data").mkdir()
    torch.save({"samples": Bad()}, tmp_path / "train_data" / "0.pt")
    with pytest.raises(RecordError, match="only unpickling"):
        Run.open(tmp_path).record(0)
    assert not Path("opened").exists()


@pytest.mark.parametrize("tool", [t for t in THERE if t not in NO_IDS])
def test_a_bundle_keeps_all_that_a_record_has(tool, tmp_path):
    before = Run.open(FOREIGN / tool).record(STEPS.get(tool, [0])[0])
    before.save_bundle(tmp_path)
    after = Run.open(tmp_path).record(before.step)
    assert (after.origin, len(after.datums)) == (before.origin, len(before.datums))
    pairs = zip(
        [s for g in after.groups for s in g.samples],
        [s for g in before.groups for s in g.samples],
        strict=True,
    )
    for ours, theirs in pairs:
        for name in ("tokens", "loss_mask", "logprobs"):
            assert np.array_equal(getattr(ours, name), getattr(theirs, name), equal_nan=True)
        assert (ours.reward, ours.rewards) == (theirs.reward, theirs.rewards)
        assert ours.policy_version == theirs.policy_version
    for d, e in zip(after.datums, before.datums, strict=True):
        assert np.allclose(d.advantage, e.advantage)
        for name in ("old_logprobs", "ref_logprobs", "sampler_logprobs"):
            mine = getattr(d, name)
            other = getattr(e, name)
            assert (mine is None) == (other is None)
            assert mine is None or np.allclose(mine, other, equal_nan=True)


def test_several_runs_or_none_are_rejected_by_name(tmp_path):
    with pytest.raises(RecordError, match="NeMo-RL, prime-rl"):
        Run.open(tmp_path)
    for name in ("a", "b"):
        shutil.copytree(FOREIGN / "nemo_rl", tmp_path / name)
    with pytest.raises(RecordError, match="2 of them"):
        Run.open(tmp_path)


def test_a_neighbour_of_a_folder_is_no_part_of_it(tmp_path):
    step = tmp_path / "step_1"
    other = tmp_path / "notes"
    step.mkdir()
    other.mkdir()
    (step / "gen_batch.dp").touch()
    with pytest.raises(RecordError, match="gen_batch"):
        open_foreign(step)
    assert open_foreign(other) is None


def test_the_likeliest_tokens_that_miles_recorded_are_read(tmp_path):
    dump = shutil.copytree(FOREIGN / "miles", tmp_path / "miles") / "dump/rollout_data/0.pt"
    content = torch.load(dump, weights_only=False)
    for sample in content["samples"]:
        length = sample["response_length"]
        ids = np.full((length, 3), -1, np.int32)
        logprobs = np.full((length, 3), -np.inf, np.float32)
        ids[1:, :2] = [[int(t), 7] for t in sample["tokens"][-length:][1:]]
        logprobs[1:, :2] = [np.log(0.25), np.log(0.75)]
        sample |= {"rollout_topk_token_ids": ids, "rollout_topk_log_probs": logprobs}
    torch.save(content, dump)
    record = Run.open(tmp_path / "miles").record(0)
    for group in record.groups:
        for sample in group.samples:
            assert sample.top_logprobs.distribution == "sampling"
            assert sample.top_logprobs[sample.prompt_len] == []
            for at in range(sample.prompt_len + 1, len(sample.tokens)):
                (likeliest, highest), (own, chance) = sample.top_logprobs[at]
                assert (likeliest, own) == (7, sample.tokens[at])
                assert [np.exp(highest), np.exp(chance)] == pytest.approx([0.75, 0.25])
    for datum in record.datums:
        sample = record.groups[datum.group].samples[datum.sample]
        assert [*datum.top_logprobs] == [*sample.top_logprobs][1:]

    content["samples"][0]["rollout_topk_log_probs"] = np.zeros((2, 2), np.float32)
    torch.save(content, dump)
    with pytest.raises(RecordError, match="rollout_topk_token_ids"):
        Run.open(tmp_path / "miles").record(0)
    content["samples"][0]["rollout_topk_log_probs"] = np.array([print], dtype=object)
    torch.save(content, dump)
    with pytest.raises(RecordError, match="unpickling"):
        Run.open(tmp_path / "miles").record(0)


def test_responses_of_a_batch_are_read_with_the_likeliest_tokens_that_have_ids(tmp_path):
    completion = {
        "text": " 4",
        "finish_reason": "length",
        "token_ids": [7, 2],
        "prompt_token_ids": [1, 5],
        "logprobs": {
            "tokens": ["token_id:7", "token_id:2"],
            "token_logprobs": [-0.1, -1.5],
            "top_logprobs": [
                {"token_id:7": -0.1, "token_id:3": -2.5},
                {"token_id:2": -1.5, "token_id:9": -0.4, "token_id:4": -9999.0},
            ],
        },
    }
    top = [{"token": "4", "logprob": -0.1}, {"token": "5", "logprob": -2.5}]
    said = {"content": [{**top[0], "top_logprobs": top}]}
    chat = {"message": {"content": "4"}, "finish_reason": "stop", "logprobs": said}
    failed = {"custom_id": "c", "response": None, "error": {"code": "x"}}
    for name, choices in {"ids": [completion, completion], "texts": [chat]}.items():
        answered = {"custom_id": "a", "response": {"body": {"choices": choices}}}
        lines = [json.dumps(answered), json.dumps(failed)]
        (tmp_path / name).mkdir()
        (tmp_path / name / "out.jsonl").write_text("\n".join(lines) + "\n")
    run = Run.open(tmp_path / "ids")
    assert run.steps == [0]
    [group] = run.record(0).groups
    [sample, _] = group.samples
    assert sample.tokens.tolist() == [1, 5, 7, 2]
    assert sample.finish_reason == "length"
    np.testing.assert_allclose(sample.logprobs[2:], [-0.1, -1.5])
    assert sample.top_logprobs.distribution == "unknown"
    assert [token for token, _ in sample.top_logprobs[2]] == [7, 3]
    assert [token for token, _ in sample.top_logprobs[3]] == [9, 2]
    [group] = Run.open(tmp_path / "texts").record(0).groups
    assert group.samples[0].text == "4"  # without ids, the text is all there is
    assert group.samples[0].top_logprobs is None
