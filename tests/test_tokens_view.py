"""The token inspector says what the record says, shows an off-by-one, and runs nothing that a model wrote."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib import resources

import comm
import ipywidgets
import numpy as np
import plotly.graph_objects as go
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ipykernel.comm.comm import BaseComm
from markup import Page
from synthetic import hostile_record, synthetic_record

from rl_notebook.core.types import (
    AlignmentError,
    Datum,
    Logprobs,
    PromptGroup,
    RecordError,
    RolloutSample,
)
from rl_notebook.insight.doctor.doctor import Diagnosis
from rl_notebook.runs.records import StepRecord
from rl_notebook.show.html import shown_text, token_text
from rl_notebook.views import tokens as views
from rl_notebook.views.charts import module
from rl_notebook.views.payloads import all_series, token_payload, token_rows
from rl_notebook.views.tokens import (
    WithFallback,
    inspect_tokens,
    inspector_figures,
    overview_payload,
)
from rl_notebook.views.whatif import WhatIfPanel

NAN = float("nan")
BAD = '</script><script>document.title="owned"</script><img src=x onerror=alert(1)>'


class Words:
    "A tokenizer whose tokens are the words of a list."

    def __init__(self, *words: str, special: tuple[int, ...] = ()):
        self.words = words
        self.all_special_ids = special

    def decode(self, ids: list[int], **options: bool) -> str:
        return "".join(self.words[i % len(self.words)] for i in ids)


def small_datum(**changes) -> Datum:
    "Three prompt tokens, two scored ones."
    about = {
        "sampler_logprobs": [NAN, NAN, -1.0, -0.5],
        "old_logprobs": [NAN, NAN, -1.0, -0.25],
        "advantage": 0.5,
    }
    return Datum(tokens=[5, 6, 7, 8, 9], weights=[0, 0, 1, 1], **about | changes)


POLICY = [[NAN, NAN, -1.5, -0.25]]


def long_datum(size: int, seed: int = 0, **changes) -> Datum:
    "A long sample in two turns."
    rng = np.random.default_rng(seed)
    weights = np.ones(size - 1)
    weights[: size // 4] = weights[size // 2 : size // 2 + size // 8] = 0
    logprobs = np.where(weights > 0, -rng.exponential(0.5, size - 1), NAN)
    return Datum(
        tokens=rng.integers(0, 200, size), weights=weights, sampler_logprobs=logprobs, **changes
    )


# --- payloads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "ratio", "clipped"),
    [
        ({"policy_loss": "ppo", "eps_clip": 0.1}, [np.exp(-0.5), 1.0], [0.9, 1.0]),
        ({"policy_loss": "grpo"}, [np.exp(-0.5), 1.0], None),
        ({"policy_loss": "reinforce"}, [np.exp(-0.5), np.exp(0.25)], None),
        (
            {"policy_loss": "importance_sampling", "anchor": "rollout"},
            [np.exp(-0.5), np.exp(0.25)],
            None,
        ),
        ({"policy_loss": "gspo", "eps_clip": 0.1}, [np.exp(-0.25)] * 2, [0.9, 0.9]),
        ({"policy_loss": "ppo", "ratio_log_cap": 0.1}, [np.exp(-0.1), 1.0], [np.exp(-0.1), 1.0]),
    ],
)
def test_the_ratio_is_the_one_of_the_loss(
    options: dict, ratio: list[float], clipped: list[float] | None
):
    (row,) = token_rows([small_datum()], policy_logprobs=POLICY)
    result = all_series(replace(row, options=options))
    assert result["ratio"][2:] == pytest.approx(ratio)
    assert ("ratio_clipped" in result) == (clipped is not None)
    if clipped is not None:
        assert result["ratio_clipped"][2:] == pytest.approx(clipped)


def test_a_record_gives_every_sample_trained_or_not():
    record = synthetic_record(1, groups=6, completions=4)
    rows = token_rows(record)
    assert [(r.group, r.sample) for r in rows] == [
        (g.index, i) for g in record.groups for i in range(len(g.samples))
    ]
    trained = {(d.group, d.sample): i for i, d in enumerate(record.datums)}
    for r in rows:
        sample = record.groups[r.group].samples[r.sample]
        assert r.tokens.tolist() == sample.tokens.tolist()
        assert r.prompt_len == sample.prompt_len
        assert r.facts["reward"] == sample.reward
        i = trained.get((r.group, r.sample))
        assert bool(r.notes) == (i is None)
        if i is not None:
            assert np.array_equal(
                r.series["policy"], record.loss.logprobs[i].values, equal_nan=True
            )
            assert np.array_equal(r.series["dlogprob"], record.loss.dlogprobs[i])
    assert len(trained) < len(rows)  # else the test shows half of it


def test_turns_and_raw_logprobs_of_a_sample():
    mask = [0, 0, 1, 1, 0, 1]
    lp = np.array([-1.0] * 6)
    sample = RolloutSample(
        tokens=range(6), logprobs=lp, raw_logprobs=lp * 2, loss_mask=mask, reward=1.0
    )
    (row,) = token_rows(StepRecord(1, [PromptGroup((sample,), index=3)], reason="a test"))
    payload = token_payload(row)
    named = {s["name"]: s["values"] for s in payload["series"]}
    assert payload["roles"] == "ppssms"
    assert named["turn"] == [0, 1, 1, 0, 2]
    assert named["sampler_raw"] == [None, -2.0, -2.0, None, -2.0]
    assert payload["pair"] is None
    assert payload["notes"] == ["not trained: a test"]


def test_series_that_do_not_fit_are_rejected():
    short = [[-1.0] * 3]
    for changes in (
        {"policy_logprobs": short},
        {"extra": {"mine": short}},
        {"policy_logprobs": [Logprobs([1.0] * 5, "token")]},
    ):
        with pytest.raises(AlignmentError, match="group 0, sample 0"):
            token_rows([small_datum()], **changes)
    with pytest.raises(AlignmentError, match="2 series for 1 datums"):
        token_rows([small_datum()], policy_logprobs=POLICY * 2)
    with pytest.raises(RecordError, match="got a str; expected a StepRecord"):
        token_rows("text")


# --- the verdict ------------------------------------------------------------------------------------------------------


def verdict(source: StepRecord | list[Datum], **options) -> dict[str, str]:
    "The text above the inspector."
    return inspect_tokens(source, **options).overview["verdict"]


@settings(max_examples=60, deadline=None)
@given(
    shift=st.integers(-2, 2),
    seed=st.integers(0, 10**6),
    size=st.integers(12, 60),
    noise=st.sampled_from([0.0, 1e-5, 0.02]),
)
def test_a_planted_shift_is_detected(shift: int, seed: int, size: int, noise: float):
    rng = np.random.default_rng(seed)
    policy = -rng.exponential(1.0, (4, size))
    sampler = np.full_like(policy, -1.0)
    to = np.arange(max(0, shift), size + min(0, shift))
    sampler[:, to] = policy[:, to - shift] + noise * rng.normal(size=(4, len(to)))
    datums = [
        Datum(range(size + 1), np.ones(size), sampler_logprobs=row, sample=i)
        for i, row in enumerate(sampler)
    ]
    overview = inspect_tokens(datums, policy_logprobs=policy).overview
    means = overview["shift"]["means"]
    assert overview["shift"]["shifts"][int(np.argmin(means))] == shift
    assert overview["verdict"]["text"].startswith("Probably shift") == (shift != 0)
    assert (overview["verdict"]["state"] == "well") == (shift == 0 and noise < 1e-3)


def test_the_verdict_is_the_doctors():
    record = synthetic_record(1)
    result = Diagnosis(
        "dropout", 0.95, "scored twice, it differs", (), "Call eval.", (), controls=("policy",)
    )
    assert verdict(record, diagnosis=result)["text"] == "Dropout: scored twice, it differs"
    assert verdict(record, diagnosis=result)["more"].endswith("Call eval.")
    likely = verdict(record, diagnosis=replace(result, score=0.7, undecided=("padding side",)))
    assert (likely["state"], likely["text"]) == (
        "likely",
        "Probably dropout: scored twice, it differs; or padding side",
    )
    half = verdict(
        record,
        diagnosis=replace(result, cause="shift", score=0.7, undecided=("dropout",), controls=()),
    )
    assert (half["state"], half["text"].endswith("causes fit: dropout")) == ("open", True)
    assert "diagnose(record, backend=backend)" in half["more"]


# --- scales and the overview ------------------------------------------------------------------------------------------


def test_the_overview_counts_all_and_shows_some():
    datums = [long_datum(4001, seed=i, group=i // 2, sample=i % 2) for i in range(4)]
    policy = [
        d.sampler_logprobs + np.random.default_rng(i).normal(0, 0.01, 4000)
        for i, d in enumerate(datums)
    ]
    policy[3][1500] += 7.0
    rows = token_rows(datums, policy_logprobs=policy)
    result = overview_payload(datums, rows, policy_logprobs=policy)
    gap = np.concatenate(
        [(p - d.sampler_logprobs)[d.active] for p, d in zip(policy, datums, strict=True)]
    )
    assert len(result["points"]["x"]) == 5000 < result["tokens"] == len(gap)
    assert result["scopes"][0]["quantiles"]["max"] == pytest.approx(7.0, abs=0.1)
    assert result["scopes"][0]["quantiles"]["p90"] == pytest.approx(np.quantile(np.abs(gap), 0.9))
    assert [s["name"] for s in result["scopes"]] == ["all 4 samples", "group 0", "group 1"]
    assert sum(s["tokens"] for s in result["scopes"][1:]) == len(gap)
    assert (3, 1500) in zip(result["points"]["item"], result["points"]["target"], strict=True)
    figures = inspector_figures(result)
    for name in ("scatter", "gap"):
        dots = figures[name]["data"][0]
        assert len(dots["x"]) == len(dots["y"]) == 5000
        assert [3, 1500] in [list(about[:2]) for about in dots["customdata"]]
        go.Figure(figures[name])  # raises for what plotly does not know
    assert figures.keys() == {"along", "scatter", "gap"}
    assert inspector_figures(None).keys() == {"along"}
    json.dumps([result, figures], allow_nan=False)


# --- hostile text -----------------------------------------------------------------------------------------------------


def test_white_space_cannot_be_forged():
    assert shown_text(" \n\t·⏎⇥") == "·⏎⇥\\u00b7\\u23ce\\u21e5"
    assert shown_text("\u202eabc\u200b\x1b[31m") == "\\u202eabc\\u200b\\u001b[31m"
    assert len(shown_text("x" * 100_000)) < 150


def test_tokens_of_two_kinds_of_tokenizers():
    class Pieces(Words):
        def convert_ids_to_tokens(self, token: int) -> str:
            return ("▁the", "âĤ", "Ġa")[token]

    tokenizer = Pieces("the", "\ufffd", " a")
    assert [token_text(t, tokenizer) for t in range(3)] == [" the", "\\xe2\\x82", " a"]


def test_nothing_that_a_model_wrote_becomes_markup():
    words = Words(BAD, "\u202e", "\x1b[31m", "x" * 100_000, "שלום", "\n", "&lt;", special=(3,))
    record = hostile_record()
    for source in (record, [long_datum(300, key=BAD)]):
        inspector = inspect_tokens(
            source,
            words,
            extra={BAD: [np.ones(len(d.weights)) for d in getattr(source, "datums", source)]},
        )
        inspector.series = BAD
        page = Page(inspector.static_html())
        plain = {"div", "b", "bdi", "span", "i", "img", "details", "summary"}
        assert {*page.tags} <= plain | {"table", "thead", "tbody", "tr", "th", "td"}
        assert page.handlers == [] == [name for name in page.attributes if name == "href"]
        assert all(src.startswith("data:image/svg+xml;base64,") for src in page.links)
        assert BAD in page.text.replace("·", " ")


def test_a_still_picture_is_small_and_honest():
    d = long_datum(8192)
    policy = [d.sampler_logprobs + 0.01 * np.cos(np.arange(len(d.weights)))]
    still = inspect_tokens([d], Words(" some", BAD, "\n"), policy_logprobs=policy).static_html()
    Page(still)
    assert len(still.encode()) < 70_000
    left = [int(n) for n in re.findall(r"… (\d+) tokens …", still)]
    assert sum(left) + 2 * 300 == 8192, (
        "of prompt and completion, the tokens shown and the tokens counted as left out"
    )


# --- the widget -------------------------------------------------------------------------------------------------------


def test_live_and_still_are_two_outputs(monkeypatch: pytest.MonkeyPatch):
    shown: list[dict] = []
    monkeypatch.setattr(views, "display", lambda data, raw, display_id=None: shown.append(data))
    both = WithFallback(ipywidgets.Button(), "<p>still</p>", text="in words")
    both._ipython_display_()
    still, live = shown
    assert "<p>still</p>" in still["text/html"]
    assert still["text/plain"] == "in words"
    assert "application/vnd.jupyter.widget-view+json" not in still
    assert live.keys() == {"application/vnd.jupyter.widget-view+json", "text/plain"}
    assert live["text/plain"] == ""
    replaced: list[tuple[dict, str]] = []
    monkeypatch.setattr(
        views, "update_display", lambda data, raw, display_id: replaced.append((data, display_id))
    )
    both.update("<p>later</p>", "in other words")
    ((later, place),) = replaced
    assert (place, later["text/plain"]) == (both.place, "in other words")
    assert later["text/html"] == still["text/html"].replace("still</p>", "later</p>")
    shown.clear()
    inspector = inspect_tokens([small_datum()])
    inspector._ipython_display_()
    assert inspector.static_html() in shown[0]["text/html"]


def test_a_page_gets_plotly_and_the_points_of_an_inspector_once():
    first, second = (inspect_tokens(synthetic_record(3)) for _ in range(2))
    assert first.plotly is second.plotly
    state = second.get_state()
    assert len(json.dumps(state)) < 300_000 < len(first.plotly.script)
    assert state["overview"]["shown"] == len(second.overview["points"]["x"])
    assert "points" not in state["overview"]
    first.plotly.close()
    assert inspect_tokens(synthetic_record(3)).plotly.comm is not None


def test_messages_for_our_widgets_go_to_the_main_thread(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(comm, "create_comm", BaseComm)  # what a kernel makes
    asked_by_a_subshell = {}, "subshell"
    if not hasattr(BaseComm, "_reply_subshell_for"):
        pytest.skip("this ipykernel has one thread for all messages")
    assert ipywidgets.Button().comm._reply_subshell_for(*asked_by_a_subshell) == "subshell"
    panel = WhatIfPanel(synthetic_record(1))
    for widget in (inspect_tokens([small_datum()]), panel.controls["policy_loss"], panel.widget):
        assert widget.comm._reply_subshell_for(*asked_by_a_subshell) is None


# --- the module in the browser ----------------------------------------------------------------------------------------


def asset(name: str) -> str:
    return (resources.files("rl_notebook") / "assets" / name).read_text(encoding="utf-8")


def test_the_module_asks_for_nothing_and_writes_no_markup():
    code = module("tokens.js")
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|fetch\(|srcdoc", code
    )
    # of a blob of the trait that holds plotly's script
    assert {*re.findall(r"import\s*\(.*?\)", code)} == {"import(url)"}
    assert not re.findall(r"https?://[^\"']+", code + asset("tokens.css"))
    assert "url(" not in asset("tokens.css")
