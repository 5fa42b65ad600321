"Forks and curves that are saved with a record and shown with its completion; and asked for through the inspector."

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
from markup import Page
from synthetic import synthetic_record
from test_fork import parameters, same_samples
from test_loop import make_loop

from rl_notebook.cli import describe_sample, describe_step
from rl_notebook.core.intervals import Interval
from rl_notebook.core.types import RecordError, TopLogprobs
from rl_notebook.experiments.fork import Branch, Continuation, Fork
from rl_notebook.experiments.locate import Located, Point, saved_results
from rl_notebook.runs.run import Run, RunFolder
from rl_notebook.show.html import shown_text
from rl_notebook.task.toy import toy_reward
from rl_notebook.views.report import material, report_html
from rl_notebook.views.tokens import NEEDED, inspect_tokens

BAD = "<img src=x onerror=alert(1)>"
COMMON = {"step": 3, "group": 1, "sample": 2, "key": "q", "weights": "the current ones", "gap": 0.1}


def made_fork(record, target):
    "A fork of a synthetic completion with two branches."
    branches = []
    for token, reward in ((49, 0.0), (50, 1.0)):
        continuations = tuple(Continuation((token, 51), BAD, reward) for _ in range(4))
        interval = Interval(0.0, 0.6, "Clopper-Pearson", 0.95)
        versus = interval if branches else None
        branches.append(
            Branch(
                (token,), chr(token) + BAD, continuations, reward, interval, reward, versus, 0.5, 8
            )
        )
    texts = {49: "1", 50: "2", 51: BAD}
    return Fork(
        **COMMON, target=target, before=BAD, branches=tuple(branches), seconds=1.0, texts=texts
    )


def made_curve(record):
    "A curve of a synthetic completion that falls at its third token."
    sample = record.groups[1].samples[2]
    targets = tuple((np.flatnonzero(sample.loss_mask) - 1).tolist())
    interval = Interval(0.2, 0.9, "betting", 0.95)
    means = {0: 0.8, 2: 0.7, 3: 0.1}
    points = [Point(kept, 8, mean, interval) for kept, mean in means.items()]
    points.append(Point(len(targets), 0, 0.0, Interval(0.0, 0.0, "", 0.95)))
    return Located(
        **COMMON,
        reward=0.0,
        pieces=(BAD, *"x" * (len(targets) - 1)),
        targets=targets,
        points=tuple(points),
        place=2,
        reason="",
        change=-0.6,
        change_interval=Interval(-0.9, -0.3, "betting", 0.95),
        used=64,
        sampled_tokens=500,
        seconds=2.0,
    )


@pytest.fixture
def run(tmp_path):
    "A run of three steps, with a fork and a curve of one completion of the last."
    run = RunFolder.create(tmp_path / "run", {"base_model": "tiny"})
    for step in (1, 2, 3):
        run.add(synthetic_record(step))
    record = run.record(3)
    made_fork(record, made_curve(record).targets[2]).save(run)
    made_curve(record).save(run)
    return run


def test_results_are_read_back_and_shown_with_their_completion(run):
    record = run.record(3)
    curve = made_curve(record)
    fork = made_fork(record, curve.targets[2])
    fork.save(run)  # of the same place: the last counts
    opened = Run.open(run.path)
    assert saved_results(opened, record) == [curve, fork]
    assert saved_results(opened, run.record(2)) == []

    page = Page(report_html(opened))
    assert list(material(opened).results) == ["step=3&group=1&sample=2"]
    assert fork.headline in page.text
    assert curve.headline in page.text
    assert page.handlers == []
    assert "step=3&group=1&sample=2" in page.carried("tokens")

    data, text = describe_sample(opened, 3, 1, 2)
    assert [value["target"] for value in data["continuations"] if "target" in value] == [
        fork.target
    ]
    assert repr(curve) in text
    assert "continuations" not in describe_sample(opened, 3, 1, 1)[0]
    assert f"group 1, sample 2: {curve.headline}" in describe_step(opened, 3)[1]

    still = inspect_tokens(record, run=opened, group=1, sample=2).static_html()
    assert still.count("clip-path") == len(curve.pieces)
    assert Page(still).handlers == []
    assert "clip-path" not in inspect_tokens(record, run=opened, group=1, sample=1).static_html()


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '{"format": "rl_notebook fork 9"}', json.dumps({"format": "rl_notebook locate 1"})],
)
def test_a_damaged_file_of_results_is_named_and_the_page_is_written(run, line):
    path = run.path / "steps" / "00003" / "continuations.jsonl"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(RecordError, match=r"continuations\.jsonl"):
        saved_results(run, run.record(3))
    assert "continuations.jsonl" in Page(report_html(run)).text
    assert "continuations.jsonl" in inspect_tokens(run.record(3), run=run).forks["note"]


def test_a_result_of_a_completion_that_is_not_there_is_damage(run):
    path = run.path / "steps" / "00003" / "continuations.jsonl"
    path.write_text(path.read_text().replace('"sample": 2', '"sample": 99'))
    with pytest.raises(RecordError, match="sample 99"):
        saved_results(run, run.record(3))


def test_a_result_is_not_written_where_there_is_no_step_or_a_link_leads_away(run, tmp_path):
    curve = made_curve(run.record(3))
    path = run.path / "steps" / "00003" / "continuations.jsonl"
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RecordError, match="leaves the run folder"):
        curve.save(run)
    assert not (tmp_path / "elsewhere").exists()
    empty = RunFolder.create(tmp_path / "empty", {})
    with pytest.raises(RecordError, match="no step 3"):
        curve.save(empty)


def test_without_a_policy_one_sentence_says_what_is_needed():
    inspector = inspect_tokens(synthetic_record(3))
    assert inspector.forks["refusal"] == NEEDED
    inspector.on_question({"stop": True})
    assert inspector.task is None


class Decoder:
    "A tokenizer whose token 1000 says markup."

    def decode(self, tokens, **options):
        return "".join(BAD if t == 1000 else chr(t) for t in tokens)


def with_likeliest(record):
    "A record whose completion 2 of group 1 has the two likeliest tokens of each place: its own, and markup."
    group = record.groups[1]
    sample = group.samples[2]
    rows = [[(int(t), -0.1), (1000, -9.0)] for t in sample.tokens[sample.prompt_len :]]
    top = TopLogprobs.join([sample.prompt_len, TopLogprobs.from_rows(rows, "raw")])
    samples = list(group.samples)
    samples[2] = replace(sample, top_logprobs=top)
    groups = list(record.groups)
    groups[1] = replace(group, samples=tuple(samples))
    part = top.part(1, len(sample.tokens))
    datums = [
        replace(d, top_logprobs=part) if (d.group, d.sample) == (1, 2) else d for d in record.datums
    ]
    return replace(record, groups=tuple(groups), datums=tuple(datums))


@pytest.mark.parametrize("trained", [True, False])
def test_the_samplers_likeliest_tokens_are_shown_without_a_model(tmp_path, trained):
    record = with_likeliest(synthetic_record(3))
    if not trained:
        record = replace(record, datums=(), loss=None)
    run = RunFolder.create(tmp_path / "run", {"base_model": "none that is here"})
    run.add(record)
    record = run.record(3)
    sample = record.groups[1].samples[2]
    first = sample.prompt_len - 1
    said = int(sample.tokens[first + 1])

    inspector = inspect_tokens(record, Decoder(), group=1, sample=2)
    shown = inspector.payload["likeliest"]
    assert list(shown["by_target"]) == list(range(first, len(sample.tokens) - 1))
    assert shown["by_target"][first] == [[said, 0.9048], [1000, 0.0001234]]
    assert shown["texts"][said] == chr(said)
    assert "temperature 1" in shown["about"]
    still = Page(inspector.static_html())
    assert f"'1' 0.905, '{shown_text(BAD)}' <0.001" in still.text
    assert still.handlers == []
    assert inspect_tokens(record, Decoder(), group=1, sample=1).payload["likeliest"] is None

    carried = Page(report_html(run)).carried("tokens")["step=3&group=1&sample=2"]
    assert carried["likeliest"]["by_target"][str(first)] == shown["by_target"][first]

    data, text = describe_sample(run, 3, 1, 2)
    assert data["likeliest"]["by_target"][first] == shown["by_target"][first]
    assert f"'{said}' 0.905, '1000' <0.001" in text  # ids, as there is no tokenizer
    assert "likeliest" not in describe_sample(run, 3, 1, 1)[0]


def test_questions_through_the_inspector_leave_the_next_step_alone(tmp_path):
    async def main():
        run = RunFolder.create(tmp_path / "run", {})
        asked = make_loop(toy_reward, outputs=[run.add])
        other = make_loop(toy_reward)
        [record] = await asked.run(1, progress=False)
        await other.run(1, progress=False)
        inspector = inspect_tokens(
            record, asked.backend.tokenizer, backend=asked, group=0, sample=0
        )
        assert inspector.forks["refusal"] == ""
        target = inspector.payload["roles"].index("s") - 1

        inspector.on_question({"alternatives": True})
        await inspector.task
        likeliest = inspector.alternatives["by_target"][target]
        chances = [p for _, p in likeliest]
        assert chances == sorted(chances, reverse=True)
        assert 0 < sum(chances) <= 1 + 1e-6

        inspector.on_question({"fork": target, "token": likeliest[1][0]})
        assert inspector.asking
        await inspector.task
        assert inspector.asking == {}
        [fork] = inspector.policy.results
        assert fork.branches[-1].tokens == (likeliest[1][0],)
        assert inspector.forks["forks"][0]["rows"] == fork.rows()
        assert saved_results(run, record) == [fork]

        inspector.on_question({"locate": 96})
        while not inspector.asking.get("share"):
            await asyncio.sleep(0.01)
        inspector.on_question({"stop": True})
        with pytest.raises(asyncio.CancelledError):
            await inspector.task
        assert (inspector.task, inspector.asking) == (None, {})
        assert inspector.forks["curve"] is None

        inspector.on_question({"locate": 8})
        await inspector.task
        assert "at least 24" in inspector.forks["note"]

        [a] = await asked.run(1, progress=False)
        [b] = await other.run(1, progress=False)
        assert same_samples(a, b)
        assert a.loss.loss == b.loss.loss
        theirs = parameters(other)
        assert all(bool((p == theirs[k]).all()) for k, p in parameters(asked).items())

    asyncio.run(main())
