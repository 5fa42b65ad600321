"""A report shows what the records say, without a network, and runs nothing that a model wrote."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import html
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from markup import Page
from synthetic import hostile_record, synthetic_record

from rl_notebook import __version__
from rl_notebook.cli import main as command
from rl_notebook.core.types import ConfigError, PromptGroup, RecordError
from rl_notebook.insight.xray import sentence
from rl_notebook.runs.records import StepRecord
from rl_notebook.runs.run import RunFolder
from rl_notebook.views.payloads import History, advantages_payload, reward_payload, run_payloads
from rl_notebook.views.report import Known, Status, charts_of_last_step
from rl_notebook.views.report import (
    charts_over_steps,
    compare,
    follow,
    linked,
    material,
    report_html,
    run_status,
)
from rl_notebook.views.report import write_report
from rl_notebook.views.site import write_site

CONFIG = {
    "base_model": "tiny",
    "dataset": "toy",
    "policy_loss": "grpo",
    "kl_beta": 0.001,
    "note": None,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    "A run of seven steps with held-out rewards."
    run = RunFolder.create(tmp_path_factory.mktemp("runs") / "sums", CONFIG)
    run.log_metrics(0, {"eval/reward": 0.25})
    for step in range(1, 8):
        run.add(synthetic_record(step, steps=7, groups=4, completions=5))
    run.log_metrics(7, {"eval/reward": 0.75})
    return run


# --- payloads ---------------------------------------------------------------------------------------------------------


def test_a_run_and_its_records_give_the_same_material(run: RunFolder):
    disk = material(run)
    memory = material(iter(run))
    assert [r.step for r in disk.samples] == [r.step for r in memory.samples] == [1, 4, 7]
    assert [step for step, _ in disk.recent] == [3, 4, 5, 6, 7]
    assert disk.recent == memory.recent
    held_out = {"reward", "functions"}  # was logged next to the records
    payloads = [run_payloads(History(m.metrics), {"kl_beta": 0.001}) for m in (disk, memory)]
    assert payloads[0].keys() == payloads[1].keys()
    for name in payloads[0].keys() - held_out:
        assert payloads[0][name] == payloads[1][name]
    assert payloads[0]["reward"]["groups"] == payloads[1]["reward"]["groups"]


def step_after_a_fall(step: int) -> StepRecord:
    "A step of a run whose reward falls at step 16."
    record = synthetic_record(step, steps=30, groups=3, completions=4)
    return replace(
        record,
        metrics={**record.metrics, "reward": (0.9 if step < 16 else 0.1) + 0.001 * (step % 3)},
    )


def test_changes_are_shown_first_with_what_to_try(tmp_path: Path):
    run = RunFolder.create(tmp_path / "sums", CONFIG)
    known = Known()
    for step in range(1, 16):
        run.add(step_after_a_fall(step))
    assert not material(run, known).trends
    assert "What changed" not in Page(report_html(run, known=known)).text
    for step in range(16, 24):
        run.add(step_after_a_fall(step))
    trends = material(run, known).trends
    assert [(t.name, t.step) for t in trends if t.name == "reward fell"] == [("reward fell", 16)]
    assert trends == material(iter(run)).trends == material(run).trends
    text = Page(report_html(run, known=known)).text
    words = ["What changed over the last steps", str(trends[-1]), "The last steps, in words"]
    assert sorted(map(text.index, words)) == [text.index(w) for w in words]
    assert sorted(known.watched) == list(range(1, 24))
    named = re.search(r"see (step (\d+), group (\d+), sample (\d+))", str(trends[-1]))
    address = "step={}&group={}&sample={}".format(*named.groups()[1:])
    page = report_html(run, known=known)
    assert f'<a href="#{html.escape(address)}">{named[1]}</a>' in page
    assert address in Page(page).carried("tokens")
    assert address in {
        row["id"] for s in Page(page).carried("completions")["steps"].values() for row in s["rows"]
    }
    shutil.rmtree(run.path / "steps" / "00001")  # was rewound, say
    material(run, known)
    assert sorted(known.watched) == list(range(2, 24))


# --- from a finding to its completion ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "step", "address"),
    [
        ("so it is; see step 12, group 1, sample 3. Try less.", None, "step=12&group=1&sample=3"),
        ("at group 1, sample 3 (row 'q17'), target 40: 0.5", 9, "step=9&group=1&sample=3&token=41"),
        ('group 1 (row "it\'s"), sample 3 does not', 9, "step=9&group=1&sample=3"),
        ("group 1, sample 3", None, None),
        ("in 3 groups, sample by sample", 9, None),
    ],
)
def test_a_completion_that_is_named_is_a_link(text: str, step: int | None, address: str | None):
    page = Page(linked(text + " <b>", step))
    assert page.text == text + " <b>"
    assert page.tags == ["a"] * (address is not None)
    assert [html.unescape(href) for href in re.findall('href="#(.*?)"', linked(text, step))] == [
        address
    ] * len(page.tags)


def test_a_check_that_fails_leads_to_its_token(run: RunFolder):
    record = run.record(7)
    gradient = record.loss.dlogprobs[0].copy()
    at = int(np.flatnonzero(record.datums[0].active)[2])
    gradient[at] = np.nan
    record = replace(
        record, loss=replace(record.loss, dlogprobs=(gradient, *record.loss.dlogprobs[1:]))
    )
    d = record.datums[0]
    page = report_html([run.record(6), record])
    address = f"step=7&group={d.group}&sample={d.sample}&token={at + 1}"
    assert f'<a href="#{html.escape(address)}">' in page
    assert address.rpartition("&")[0] in Page(page).carried("tokens")


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_shows_what_the_payloads_say(run: RunFolder):
    page = Page(report_html(run))
    m = material(run)
    titles = [c.title for c in [*charts_over_steps(m), *charts_of_last_step(m)]]
    assert titles == [
        "Reward",
        "Reward functions",
        "Completion length",
        "Groups without signal",
        "KL and logprob differences",
        "Advantages over the steps",
        "Tokens by sign of advantage",
        "Time by phase",
        "Advantages by group",
        "Rewards, counted",
    ]
    figures = page.carried("figures")
    assert (
        [*figures]
        == [i for i in page.ids if re.fullmatch(r"f\d+", i)]
        == [f"f{i}" for i in range(len(titles))]
    )
    mean, held_out = (
        next(t for t in figures["f0"]["data"] if t.get("name") == n) for n in ("mean", "held out")
    )
    assert mean["y"] == reward_payload(History(m.metrics))["reward"]["y"]
    assert held_out["y"] == [0.25, 0.75]
    assert figures["f8"]["data"][0]["z"] == advantages_payload(run.record(7))["advantages"]
    title = figures["f4"]["layout"]["annotations"][0]["text"]
    assert title == "policy to reference · kl_beta = 0.001"
    for words in ("0.25 → 0.75", sentence(run.record(7), run.record(6)), "base_model"):
        assert words in page.text
    assert page.carried("completions")["steps"].keys() == {*map(str, range(1, 8))}
    assert "Settings (4)" in page.text  # `note` says nothing


def test_the_numbers_above_do_not_pass_over_a_spike(tmp_path: Path):
    kl = [0.0, 0.02, 0.594, None, 0.03, 0.04]  # a step that trained nothing has none
    run = RunFolder.create(tmp_path / "sums", CONFIG)
    for step, value in enumerate(kl, start=1):
        record = synthetic_record(step, groups=2, completions=3)
        metrics = {name: v for name, v in record.metrics.items() if not name.startswith("kl")}
        run.add(
            replace(
                record, metrics=metrics | ({} if value is None else {"kl": value, "kl/k3": value})
            )
        )
    text = Page(page := report_html(run)).text
    assert "KL to the reference0 → 0.04step 1 → 6highest 0.594 at step 3" in text
    started = json.loads((run.path / "run.json").read_text())["started"]
    assert f"started {started[:10]} {started[11:16]} UTC" in text
    assert f"rl_notebook {__version__}" in text
    assert "<title>sums: tiny on toy</title>" in page
    line = next(t for t in Page(page).carried("figures")["f4"]["data"] if t["name"] == "k3")
    assert line["y"] == kl


def test_a_page_holds_completions_of_every_step_and_stays_small(tmp_path: Path):
    records = [synthetic_record(step, groups=4, completions=6) for step in range(1, 31)]
    page = report_html(records)
    assert len(page) < 1_500_000
    steps = Page(page).carried("completions")["steps"]
    assert [*steps] == [str(record.step) for record in records]
    for record in records:
        results = [
            (row["group"], row["sample"], row["text"]) for row in steps[str(record.step)]["rows"]
        ]
        assert results == [
            (g.index, i, s.text) for g in record.groups for i, s in enumerate(g.samples)
        ]
    large = [replace(r, groups=tuple(long_group(g) for g in r.groups)) for r in records]
    steps = Page(report_html(large)).carried("completions")["steps"]
    # a prompt of each, at least
    assert all({row["group"] for row in step["rows"]} for step in steps.values())
    assert "6 of these completions are here" in steps["2"]["line"]


def long_group(group: PromptGroup) -> PromptGroup:
    "A group whose completions are 30,000 characters long."
    return replace(group, samples=tuple(replace(s, text="long " * 6000) for s in group.samples))


def test_everything_from_a_run_is_escaped(tmp_path: Path):
    bad = '</script><script>document.title="owned"</script><img src=x onerror=alert(1)>'
    records = [hostile_record(1), replace(hostile_record(2), reason=bad)]
    run = RunFolder.create(tmp_path / "run", {"base_model": bad, bad: bad})
    for record in records:
        run.add(record)
    for page in (Page(report_html(records, title=bad)), Page(report_html(run, title=bad))):
        assert page.tags.count("script") == 3
        assert "x" not in page.links
        assert page.handlers == []
        assert page.text.count(bad) > 5
        assert "<" not in "".join(page.scripts[:2])
        assert bad[:9] in page.carried("completions")["steps"]["1"]["rows"][0]["text"]


def test_writing(run: RunFolder, tmp_path: Path):
    path = write_report(run, tmp_path / "deep" / "report.html", title="Sums")
    assert path.read_text(encoding="utf-8") == report_html(run, title="Sums")
    assert "<title>Sums</title>" in path.read_text(encoding="utf-8")
    assert write_report(run, path) == path
    path.write_text("a page of mine")
    with pytest.raises(
        ConfigError, match=r"report: got something that this package did not write; expected a free"
    ):
        write_report(run, path)
    assert path.read_text() == "a page of mine"
    (tmp_path / "file").write_text("")
    with pytest.raises(
        RecordError, match=r"report\.html: cannot write: got (Not a directory|File exists)"
    ):
        write_report(run, tmp_path / "file" / "report.html")
    surrogate = replace(synthetic_record(1), reason="\ud800")
    odd = Page(write_report([surrogate], tmp_path / "odd.html").read_text(encoding="utf-8"))
    assert odd.carried("completions")["steps"]["1"]["line"].endswith("nothing trained: \\ud800")


# --- a run that continues ---------------------------------------------------------------------------------------------


def running_run(path: Path, **config: object) -> RunFolder:
    "A run of two steps that may get more."
    run = RunFolder.create(path, {**CONFIG, **config})
    for step in (1, 2):
        run.add(synthetic_record(step, groups=2, completions=3))
    return run


def set_age(run: RunFolder, seconds: float) -> float:
    "Move the time of the last line that far back."
    return (run.path / "metrics.jsonl").stat().st_mtime + seconds


def test_a_run_is_called_what_its_folder_shows(tmp_path: Path):
    run = running_run(tmp_path / "a", steps=3, epochs=1)
    assert run_status(run, set_age(run, 20)) == Status("running", "Running: step 2 of at most 3.")
    assert run_status(run, set_age(run, 150)) == Status(
        "quiet", "Quiet since step 2 of at most 3, for 2 minutes: paused, stopped or slow."
    )
    run.add(synthetic_record(3, groups=2, completions=3))
    assert run_status(run, set_age(run, 9000)) == Status("finished", "Finished after step 3.")
    endless = running_run(tmp_path / "b", epochs=2)
    assert run_status(endless, set_age(endless, 0)).text == "Running: step 2."
    endless.log_metrics(2, {"epoch": 2.0})
    assert run_status(endless).state == "finished"
    new = RunFolder.create(tmp_path / "c", CONFIG)
    assert run_status(new, set_age(new, 0)) == Status("running", "Running: step 0.")
    slow = running_run(tmp_path / "d")
    slow.add(replace(synthetic_record(3), seconds={"sample": 1000.0}))
    assert run_status(slow, set_age(slow, 600)).state == "running"


def test_a_page_that_is_no_longer_followed_does_not_change(tmp_path: Path):
    run = running_run(tmp_path / "run")
    out = tmp_path / "page.html"

    async def stop_early() -> None:
        task = asyncio.create_task(follow(run.path, out, every=0.05))
        while not out.exists():
            await asyncio.sleep(0.05)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(stop_early())
    assert "data-refresh" not in out.read_text(encoding="utf-8")
    with pytest.raises(RecordError, match="no run here"):
        asyncio.run(follow(tmp_path / "nothing", out))


# --- runs next to each other -----------------------------------------------------------------------------------------


def run_with_rewards(path: Path, add: float, seed: int) -> RunFolder:
    "A run of three steps of four rows, each of which earns its share of `add` more."
    run = RunFolder.create(path, {"learning_rate": add, "seed": 1})
    rng = np.random.default_rng(seed)
    for step in (1, 2, 3):
        record = synthetic_record(step, groups=4, completions=2)
        groups = []
        for i, group in enumerate(record.groups):
            samples = tuple(
                replace(s, reward=add + i + rng.normal(0, 0.01), rewards={}) for s in group.samples
            )
            number = 4 * step + i
            groups.append(
                replace(group, samples=samples, number=number, key=f"row {number}", advantages=None)
            )
        run.add(replace(record, groups=tuple(groups), datums=(), loss=None))
    return run


def test_runs_next_to_each_other_differ_by_what_the_rows_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for name, add, seed in (("a", 0.0, 1), ("b", 0.5, 2), ("c", 0.0, 3)):
        run_with_rewards(tmp_path / name, add, seed)
    assert (
        command(
            [
                "view",
                str(tmp_path / "a"),
                str(tmp_path / "c"),
                "--out",
                str(tmp_path / "equal.html"),
            ]
        )
        == 0
    )
    output = capsys.readouterr().err
    assert "No recorded setting differs between a and c." in output
    assert "Empty" not in output
    both = compare(*(tmp_path / name for name in "abc"))
    table = both.table
    assert table["reward"].tolist() == ["b - a", "b - a", "c - a", "c - a"]
    assert table["rows"].tolist() == [12, 4, 12, 4]
    assert table["difference"].round(1).tolist() == [0.5, 0.5, 0, 0]
    assert (table["low"] < table["difference"]).all()
    # the rows differ by 1 each; what is compared is the same row
    assert (table["high"] - table["low"] < 0.1).all()
    assert both.settings.loc["learning_rate"].tolist() == [0.0, 0.5, 0.0]
    with pytest.raises(ConfigError, match="compare: got 1 runs; expected two or more"):
        compare(tmp_path / "a")
    assert (
        command(
            [
                "view",
                *(str(tmp_path / name) for name in "abc"),
                "--out",
                str(tmp_path / "page.html"),
            ]
        )
        == 0
    )
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "Difference of the reward to a, on the same rows" in page.text
    assert "learning_rate" in page.text
    assert "b - a" in capsys.readouterr().err


# --- a site -----------------------------------------------------------------------------------------------------------


def test_a_site_has_every_completion_and_token_of_every_step(run, tmp_path):
    gallery = write_site([run, run.path], tmp_path / "site")
    folder = gallery.parent / "sums"
    assert (gallery.parent / "comparison.html").is_file()
    assert (gallery.parent / "sums-2/index.html").is_file()
    for step in run.steps:
        page = (folder / "steps" / f"{step:05d}.html").read_text(encoding="utf-8")
        carried = json.loads(unpacked(page))
        samples = [(g.index, i) for g in run.record(step).groups for i in range(len(g.samples))]
        ids = [f"step={step}&group={g}&sample={i}" for g, i in samples]
        assert [row["id"] for row in carried["completions"]["steps"][str(step)]["rows"]] == ids
        assert [*carried["tokens"]] == ids
        assert 'id="plotly"' not in page


def test_a_site_forgets_steps_that_are_gone_and_spares_files_of_others(run, tmp_path):
    site = tmp_path / "site"
    write_site([run], site)
    old = site / "sums/steps/00099.html"
    shutil.copy(site / "sums/steps/00001.html", old)
    write_site([run], site)
    assert not old.exists()
    old.write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match="did not write"):
        write_site([run], site)
    with pytest.raises(ConfigError, match="got no run"):
        write_site([], site)


def test_a_name_of_a_folder_asks_for_a_site(run, tmp_path, capsys):
    log = tmp_path / "numbers.jsonl"
    rows = [{"step": n, "reward": n / 4, "loss": 0.1} for n in range(1, 5)]
    log.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert command(["view", str(run.path), str(log), "--out", str(tmp_path / "pages")]) == 0
    gallery = Path(capsys.readouterr().out.strip())
    assert gallery == tmp_path / "pages/index.html"
    assert not (tmp_path / "pages/numbers.jsonl/steps").exists()
    text = gallery.read_text(encoding="utf-8")
    assert 'href="numbers.jsonl/index.html"' in text
    assert "<script" not in text


def unpacked(page: str) -> str:
    "What a page carries."
    text = re.search(r'<script type="text/plain" id="carried">([^<]*)</script>', page)[1]
    return gzip.decompress(base64.b64decode(text)).decode()
