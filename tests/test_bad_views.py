"""Bad and extreme input, laid before everything that reads a record or a run folder.

For every record and view the table says what has to come out: a picture that shows every value and hides none, or a
message that names what is wrong. No pair is left out.
"""

import asyncio
import base64
import functools
import html
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markup import Page
from synthetic import synthetic_record
from test_loop import make_loop
from tiny_models import one_thread  # noqa: F401 (the fixture is used by every test)

from rl_notebook.cli import main as command
from rl_notebook.config.config import Config
from rl_notebook.core.losses import LossOptions
from rl_notebook.core.metrics import step_metrics
from rl_notebook.core.types import Datum, Logprobs, PromptGroup, RecordError, RLNotebookError
from rl_notebook.insight.doctor.doctor import diagnose
from rl_notebook.experiments.whatif import attribution, reward_lab, what_if
from rl_notebook.insight.xray import invariants, sentence, xray
from rl_notebook.loop.step import evaluate_loss, loss_factory
from rl_notebook.recipes.rl_loop import loop_for, main
from rl_notebook.runs.records import StepRecord
from rl_notebook.views.charts import LiveCharts, chart, charts
from rl_notebook.views.dashboard import Dashboard
from rl_notebook.views.dashboard import still_html as dashboard_html
from rl_notebook.views.payloads import History, history_row, run_payloads, step_payloads
from rl_notebook.views.report import report_html
from rl_notebook.views.tokens import inspect_tokens
from rl_notebook.views.whatif import WhatIfPanel

# --- records --------------------------------------------------------------------------------------------------------

BAD = '</script><script>document.title="owned"</script><img src=x onerror=alert(1)>\x1b[31m\u202e'
OPTIONS = {"policy_loss": "ppo", "kl_beta": 0.01, "eps_clip": 0.2}


def with_loss(record: StepRecord) -> StepRecord:
    "The record with the loss, gradient and metrics that its datums and logprobs really have."
    assert record.loss is not None
    loss = evaluate_loss(record.datums, record.loss.logprobs, loss_factory(LossOptions(**OPTIONS)))
    optim = {"grad_norm": 0.7, "update_norm": 3.1e-4, "learning_rate": 5e-5}
    metrics = step_metrics(record.groups, record.datums, loss, optim, policy_version=1)
    return replace(record, loss=loss, metrics=metrics, options=OPTIONS, policy_version=2)


def step_of(groups: int, completions: int = 8) -> StepRecord:
    "A first step in which policy, sampler and reference agree."
    record = synthetic_record(1, groups=groups, completions=completions)
    policy = record.loss.logprobs
    datums = [replace(d, ref_logprobs=p.values) for d, p in zip(record.datums, policy, strict=True)]
    return with_loss(replace(record, datums=datums))


def all_masked() -> StepRecord:
    "Every datum cut away, as by `overlong`."
    record = record_of("8 groups")
    datums = [replace(d, weights=np.zeros(len(d.weights))) for d in record.datums]
    record = with_loss(replace(record, datums=datums))
    return replace(record, metrics=dict(record.metrics) | {"grad_norm": 0.0, "update_norm": 0.0})


def diverged() -> StepRecord:
    "A policy that says NaN everywhere, and what follows from it."
    record = record_of("8 groups")

    def nan(d):
        return np.where(d.active, np.nan, 0.0)

    loss = replace(
        record.loss,
        loss=math.nan,
        metrics=dict.fromkeys(record.loss.metrics, math.nan),
        logprobs=tuple(Logprobs(np.full(len(d.weights), np.nan)) for d in record.datums),
        dlogprobs=tuple(nan(d) for d in record.datums),
    )
    sick = dict.fromkeys([*loss.metrics, "grad_norm", "update_norm"], math.nan)
    return replace(record, loss=loss, metrics=dict(record.metrics) | sick)


def first_target(d: Datum) -> int:
    return int(np.flatnonzero(d.active)[0])


def hole_in_policy() -> StepRecord:
    "NaN at one target of the policy's."
    record = record_of("8 groups")
    first, *others = record.loss.logprobs
    values = np.array(first.values)
    values[first_target(record.datums[0])] = np.nan
    return replace(
        record, loss=replace(record.loss, logprobs=(replace(first, values=values), *others))
    )


def series_of(name: str, bad: float, everywhere: bool) -> StepRecord:
    "A series of the datums with a value that is no number, once or everywhere."

    def with_bad_values(d: Datum) -> Datum:
        values = np.array(getattr(d, name))
        values[d.active if everywhere else first_target(d)] = bad
        return replace(d, **{name: values})

    record = record_of("8 groups")
    datums = [
        with_bad_values(d) if everywhere or i == 0 else d for i, d in enumerate(record.datums)
    ]
    return replace(record, datums=datums)


def bad_reward() -> StepRecord:
    "A reward that is NaN, and with it the advantages of its group."
    record = record_of("8 groups")
    first, *others = record.groups
    samples = [replace(first.samples[0], reward=math.nan), *first.samples[1:]]
    return replace(
        record, groups=[replace(first, samples=samples, advantages=[math.nan] * 8), *others]
    )


def all_wrong() -> StepRecord:
    "A step without signal, as the loop records it."
    record = record_of("8 groups")

    def wrong(s):
        return replace(s, reward=0.0, rewards={"correct": 0.0})

    groups = [
        replace(g, samples=tuple(map(wrong, g.samples)), advantages=np.zeros(8))
        for g in record.groups
    ]
    return StepRecord(
        1, groups, metrics=step_metrics(groups, []), reason="all 8 groups had equal rewards"
    )


def no_completions() -> StepRecord:
    "A group that lost all its completions."
    group = PromptGroup((), key="q7", dropped=("sample 0: RuntimeError: the server is gone",))
    return StepRecord(1, [group], reason="every rollout failed")


def hostile() -> StepRecord:
    "Markup, terminal codes and marks of direction in every text."
    record = step_of(2, 4)

    def dress(s):
        return replace(s, text=BAD, finish_reason=BAD, rewards={BAD: s.reward}, info={BAD: BAD})

    groups = [
        replace(
            g,
            samples=tuple(map(dress, g.samples)),
            key=BAD,
            row={"question": BAD, BAD: BAD},
            dropped=(BAD,),
        )
        for g in record.groups
    ]
    return with_loss(
        replace(record, groups=groups, datums=[replace(d, key=BAD) for d in record.datums])
    )


MADE: dict[str, Callable[[], StepRecord]] = {
    "8 groups": lambda: step_of(8),
    "1 group": lambda: step_of(1),
    "512 groups": lambda: step_of(512),
    "all masked": all_masked,
    "NaN policy": diverged,
    "one NaN of the policy": hole_in_policy,
    "NaN sampler": lambda: series_of("sampler_logprobs", math.nan, True),
    "one -inf of the sampler": lambda: series_of("sampler_logprobs", -math.inf, False),
    "NaN reference": lambda: series_of("ref_logprobs", math.nan, True),
    "NaN reward": bad_reward,
    "nothing trained": all_wrong,
    "no completions": no_completions,
    "nothing at all": lambda: StepRecord(1, reason="no prompt could be encoded"),
    "no loss": lambda: replace(record_of("8 groups"), loss=None, metrics={}),
    "hostile text": hostile,
}


@functools.cache
def record_of(name: str) -> StepRecord:
    "A record of the table, made once."
    return MADE[name]()


# --- who looks at a record ------------------------------------------------------------------------------------------


class Tokenizer:
    "A tokenizer that decodes every id to hostile text."

    def decode(self, ids: list[int], **options: Any) -> str:
        return BAD


def words(page: str) -> str:
    "What a reader of a page sees; fails where a text of ours became an element, or a number was written as NaN."
    assert not re.search(r"<script>document|<img src=x", page)
    assert not re.search(r'(?:d|points|x|y|cx|cy|width|height)="[^"]*\b(?:nan|inf)\b', page)
    body = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.S)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", body)))


@functools.cache
def live_charts() -> LiveCharts:
    "One widget for all charts, which shows one record after the other."
    return LiveCharts()


@pytest.fixture(autouse=True, scope="module")
def _tidy() -> Iterator[None]:
    "Nothing stays open after these tests."
    yield
    for made, cached in (
        (dashboard, dashboard.cache_info()),
        (live_charts, live_charts.cache_info()),
    ):
        if cached.currsize:
            made().close()


def chart_words(payloads: Mapping[str, Mapping[str, Any]]) -> str:
    "Every chart of the payloads as a figure, a picture, still HTML and live; the lines of those with data."
    json.dumps(payloads, allow_nan=False)
    all_charts = {name: chart(name, payload) for name, payload in payloads.items()}
    stills = {name: c.static_html() for name, c in all_charts.items()}
    sources = {
        name: re.search('svg\\+xml;base64,([^"]+)', still)[1] for name, still in stills.items()
    }
    pictures = {name: base64.b64decode(source).decode() for name, source in sources.items()}
    for page in (*stills.values(), *pictures.values()):
        words(page)
    live_charts().draw(*all_charts.values())
    json.dumps(live_charts().figures, allow_nan=False)
    result = charts(payloads)
    lines = [
        f"{name} | {trace.get('name', '')} {json.dumps(trace.get('z', trace.get('y')))[:400]}"
        for name, c in result.items()
        for trace in c.figure["data"]
    ]
    lines += [
        c.figure["layout"]["yaxis"]["title"]["text"]
        for name, c in result.items()
        if name == "advantages"
    ]
    empty = [name for name, picture in pictures.items() if "nothing measured yet" in picture]
    return "\n".join(
        [f"charts: {', '.join(result) or 'none'}", f"empty: {', '.join(empty)}", *lines]
    )


def run_charts(record: StepRecord) -> str:
    "The charts over a run of one step."
    return chart_words(run_payloads(History([history_row(record)]), record.options))


def tokens(record: StepRecord) -> str:
    "The inspector: its menu, its still picture, and every sample opened once where there are few."
    inspector = inspect_tokens(record, Tokenizer())
    json.dumps([inspector.payload, inspector.overview, inspector.items], allow_nan=False)
    for item in inspector.items[:4]:
        inspector.select(item["group"], item["sample"])
    if inspector.items:
        inspector.select(inspector.items[0]["group"], inspector.items[0]["sample"])
    assert len(inspector.static_html()) < 100_000
    return f"{inspector!r}\n{words(inspector.static_html())}"


@functools.cache
def dashboard() -> Dashboard:
    "One dashboard for all records, as it would meet them."
    board = Dashboard(make_loop(rows=24))
    board.screen.more.value = True
    return board


def dashboard_words(record: StepRecord) -> str:
    "The dashboard's sentence, warnings and table, live and still."
    d = dashboard()
    d.update(record)
    table = d.screen.pane.table
    json.dumps(table, allow_nan=False)
    assert len(table["rows"]) == sum(len(g.samples) for g in record.groups)
    names = [name for name, _ in d.screen.rows.options]
    return f"{words(d.screen.words.value)}\n{len(table['rows'])} completions\n{names}\n{words(dashboard_html(d))}"


def sliders(record: StepRecord) -> str:
    "The panel of sliders, before and after one of them moved."
    panel = WhatIfPanel(record)
    before = words(panel.static_html())
    panel.controls["kl_beta"].value = 0.1
    return f"{before}\n{words(panel.static_html())}"


def report_words(record: StepRecord) -> str:
    "The page of a run of one step, and the rows of its table."
    page = report_html([record])
    return f"{words(page)}\n{json.dumps(Page(page).carried('completions'))}"


SEERS: dict[str, Callable[[StepRecord], str]] = {
    "record": lambda r: f"{r!r}\n{words(r._repr_html_())}",
    "sentence": sentence,
    "invariants": lambda r: "\n".join(map(repr, invariants(r))),
    "x-ray": lambda r: words(xray(r)._repr_html_()),
    "doctor": lambda r: f"{(d := asyncio.run(diagnose(r)))!r}\n{words(d._repr_html_())}",
    "what-if": lambda r: (
        f"{(w := what_if(r, {'no KL': {'kl_beta': 0.0}}))!r}\n{words(w._repr_html_())}"
    ),
    "reward lab": lambda r: (
        f"{(lab := reward_lab(r, lambda text: float(len(text)))).headline}\n{words(lab._repr_html_())}"
    ),
    "attribution": lambda r: f"{(a := attribution(r)).headline}\n{words(a._repr_html_())}",
    "run charts": run_charts,
    "step charts": lambda r: chart_words(step_payloads(r)),
    "tokens": tokens,
    "dashboard": dashboard_words,
    "sliders": sliders,
    "report": report_words,
}


# --- what each record gives -----------------------------------------------------------------------------------------

GRADIENT = ("what-if", "attribution", "sliders")  # compute the loss again
PLACE = "group 0, sample 0 (row 'q757')"  # of the first bad value
HOLE = rf"{re.escape(PLACE)}.*: got (nan|-inf) at target 9 \(token 10\), \d+ such"


@dataclass(frozen=True)
class Expected:
    "The outcome of a record: a text of the checks, which views reject it and why, and texts of others."

    checks: str
    rejected_by: tuple[str, ...] = ()
    because: str = ""
    others: Mapping[str, str] = field(default_factory=dict)


def not_finite(
    name: str, value: str, *rejected_by: str, because: str = HOLE, **others: str
) -> Expected:
    "A value that is not finite, first met at one target of the first sample."
    at = f"✗ finite: {name} is {value} at {PLACE}, target 9 (token 10)"
    texts = {"tokens": "not a number", "dashboard": "✗ finite: ", "doctor": "non-finite: "} | others
    return Expected(
        at,
        rejected_by,
        because,
        {seer: text for seer, text in texts.items() if seer not in rejected_by},
    )


EXPECTED = {
    "8 groups": Expected("✓ on-policy: ratio 1", others={"doctor": "no mismatch", "sentence": "All 8 groups carry signal"}),
    "1 group": Expected("✓ signal: 1 of 1 groups carries signal", others={"doctor": "Nothing to fix"}),
    "512 groups": Expected(
        "they sum to 0 in each of 512 groups",
        others={"step charts": "group 0-63 of 512", "report": "501 of them with signal; 896 of these completions are here"},
    ),
    "all masked": Expected(
        "✗ mask: every datum is masked", (*GRADIENT, "doctor"), "all masked|no token in",
        {"tokens": "0 scored"},
    ),
    "NaN policy": not_finite("policy_logprobs", "nan", *GRADIENT, sentence="Loss is nan.", tokens="27 not a number"),
    "one NaN of the policy": not_finite("policy_logprobs", "nan", *GRADIENT, sentence="policy_logprobs is nan"),
    "NaN sampler": not_finite("sampler_logprobs", "nan", "doctor", "what-if", because=f"{HOLE}|infinity at all 786 positions"),
    "one -inf of the sampler": not_finite("sampler_logprobs", "-inf", "what-if", doctor="1 of 786 positions have no finite"),
    "NaN reference": not_finite("ref_logprobs", "nan", "what-if", doctor="786 of 786 positions have no finite number"),
    "NaN reward": Expected(
        "rewards is nan at group 0 (row 'q757'), sample 0", ("reward lab",), "recorded reward: got nan",
        {"step charts": "[[null, null,", "tokens": "reward nan", "report": '"reward": null'},
    ),
    "nothing trained": Expected(
        "✗ signal: none of the 8 groups has a signal", (*GRADIENT, "doctor"), "all 8 groups had equal rewards",
        {"sentence": "Nothing was trained.", "tokens": "not trained: all 8 groups had equal rewards"},
    ),
    "no completions": Expected(
        "✗ completions: 1 of 1 completions lost", (*GRADIENT, "doctor", "reward lab"),
        "every rollout failed|no saved completions",
        {"sentence": "Nothing was trained: every rollout failed.", "tokens": "no sample in this step"},
    ),
    "nothing at all": Expected(
        "– completions: the record holds no samples", (*GRADIENT, "doctor", "reward lab"),
        "no prompt could be encoded|no saved completions", {"report": "The record holds no groups."},
    ),
    "no loss": Expected(
        "– on-policy: the record holds no loss", (*GRADIENT, "doctor"), "got no loss|trainer logprobs: got none",
        {"sentence": "says that it trained, but holds no loss"},
    ),
    "hostile text": Expected(  # that nothing becomes markup is checked in `words`, for every page
        "2 of 10 completions lost", others={"report": "\\u001b", "tokens": "\\u001b[31m\\u202e"}
    ),
}  # fmt: skip
FURTHER = ("512 groups", "1 group", "all masked", "no loss", "one NaN of the policy", "NaN sampler")
FURTHER += (
    "one -inf of the sampler",
    "NaN reference",
    "no completions",
    "nothing at all",
    "8 groups",
    "nothing trained",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in FURTHER)) for name in MADE]
)
def test_every_view_shows_a_record_or_says_what_is_wrong(name: str):
    expected = EXPECTED[name]
    texts = dict[str, str]()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # a mean of nothing is not a number to show
        for seer, see in SEERS.items():
            if seer in expected.rejected_by:
                with pytest.raises(RLNotebookError, match=expected.because):
                    see(record_of(name))
            else:
                texts[seer] = see(record_of(name))
    for seer, text in {"invariants": expected.checks, **expected.others}.items():
        assert text in texts[seer], (seer, texts[seer][:4000])
    assert name not in ("8 groups", "512 groups") or "✗" not in texts["invariants"]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_without_a_number_among_others_is_a_hole(bad: float):
    "Three steps, of which the second diverged: no value is shown there, least of all 0."
    rows = [
        {"step": n, "reward": r, "kl": k}
        for n, r, k in ((1, 0.5, 0.1), (2, bad, bad), (3, 0.7, 0.3))
    ]
    payloads = run_payloads(History(rows), {})
    for line in (payloads["reward"]["reward"], payloads["kl"]["panels"][0]["lines"]["loss"]):
        assert [x for x, y in zip(line["x"], line["y"], strict=True) if y is not None] == [1, 3]
    chart_words(payloads)


@pytest.mark.parametrize("bad", [math.inf, -math.inf])
def test_a_kl_that_is_0_but_for_an_infinity_is_not_left_out(bad: float):
    "What is 0 throughout says nothing; a step at which it is no number says much."
    rows = [{"step": n, "kl/k3": k} for n, k in ((1, 0.0), (2, bad), (3, 0.0))]
    (panel,) = (payloads := run_payloads(History(rows), {}))["kl"]["panels"]
    assert panel["lines"]["k3"]["y"] == [0.0, None, 0.0]
    chart_words(payloads)


# --- run folders ----------------------------------------------------------------------------------------------------


def test_a_step_that_is_damaged_costs_that_step(tmp_path: Path, capsys: pytest.CaptureFixture):
    "`view` and `doctor` say so and show the others; what needs the step rejects. Else nothing is left out."
    path = tmp_path / "run"
    page = tmp_path / "page.html"
    sizes = {
        "prompt_groups_per_step": 2,
        "completions_per_prompt": 8,
        "max_completion_tokens": 24,
        "max_seq_len": 64,
    }
    cfg = Config(max_rows=6, **sizes, learning_rate=1e-3, steps=2, log_path=str(path))
    main(cfg, say=lambda text: None, progress=False)

    def viewed() -> str:
        assert command(["view", str(path), "--once", "--out", str(page)]) == 0
        return words(page.read_text())

    async def sought() -> str:
        async with loop_for(path, 2) as (run, loop):
            return repr(await loop.seek(1, run))

    assert "Step 1" in (whole := viewed())
    assert "Finished after step 2." in whole
    assert command(["doctor", str(path)]) == 0
    assert "step    2  no mismatch" in capsys.readouterr().out
    assert "logprobs within 0 nats" in asyncio.run(sought())

    tokens = path / "steps/00002/tokens.parquet"
    tokens.write_bytes(tokens.read_bytes()[:-40])
    message = "steps/00002/tokens.parquet: damaged"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        harmed = viewed()
        assert command(["doctor", str(path)]) == 0
    assert "Note: step 2 is left out: " in harmed
    assert message in harmed
    assert "Step 2" not in harmed
    assert "step    2" not in capsys.readouterr().out
    assert command(["replay", str(path), "2"]) == 2
    assert message in capsys.readouterr().err
    with pytest.raises(RecordError, match=message):
        asyncio.run(sought())
