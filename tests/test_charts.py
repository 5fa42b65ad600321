"""A chart shows what was measured: payloads compared with ==, figures that plotly takes, pictures that hold text."""

from __future__ import annotations

import base64
import io
import itertools
import json
import re
from dataclasses import replace
from typing import ClassVar
from xml.etree import ElementTree

import comm
import plotly.graph_objects as go
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from plotly.offline import get_plotlyjs_version
from synthetic import async_record, synthetic_record

from rl_notebook.config.config import Config
from rl_notebook.core.types import RecordError
from rl_notebook.runs.records import StepRecord
from rl_notebook.runs.run import Run
from rl_notebook.views.charts import (
    COLORS,
    LOOKS,
    Chart,
    LiveCharts,
    asset,
    chart,
    charts,
    module,
    plotly_script,
    svg,
)
from rl_notebook.views.charts import timeline_figure
from rl_notebook.views.payloads import BARS, DRAWN, History, advantages_payload, downsample
from rl_notebook.views.payloads import (
    history_row,
    kl_payload,
    packed_lanes,
    reward_payload,
    run_payloads,
    series,
)
from rl_notebook.views.payloads import step_payloads, timeline_payload


def charts_of(record: StepRecord) -> dict[str, Chart]:
    "All charts of a run that repeats a record five times."
    history = History({**history_row(record), "step": s, "eval/reward": 0.5} for s in range(1, 6))
    off = [replace(d, sampler_logprobs=d.sampler_logprobs - 0.1) for d in record.datums]
    payloads = run_payloads(history, {"kl_beta": 0.1}, noise_floor=1e-6) | step_payloads(
        replace(record, datums=off)
    )
    return charts(payloads | {"timeline": timeline_payload([record])})


# --- long lines -------------------------------------------------------------------------------------------------------

values = st.lists(st.floats(-1e6, 1e6) | st.none(), min_size=1, max_size=400)


@settings(max_examples=200, deadline=None)
@given(y=values, limit=st.integers(5, 60))
def test_a_thin_line_keeps_ends_and_extremes(y: list[float | None], limit: int):
    whole = {"x": [*range(10, 10 + len(y))], "y": y}
    thin = downsample(whole, limit)
    points = dict(zip(whole["x"], y, strict=True))
    assert len(thin["x"]) <= limit
    assert thin["x"] == sorted(set(thin["x"]))
    assert all(points[x] == v for x, v in zip(thin["x"], thin["y"], strict=True))
    assert (thin["x"][0], thin["x"][-1]) == (10, 9 + len(y))
    if results := [v for v in y if v is not None]:
        thinned = [v for v in thin["y"] if v is not None]
        assert (min(thinned), max(thinned)) == (min(results), max(results))
    assert (None in thin["y"]) == (None in y)  # a gap stays a gap


def test_only_the_picture_is_thinned():
    rows = [
        {"step": s, "reward": float(s % 7), "reward_std": 0.5, "frac_dead_high": 0.25}
        for s in range(1, 10_001)
    ]
    history = History(rows)
    assert len(series(history, "reward")["x"]) == 10_000
    payloads = run_payloads(history, {})
    assert len(payloads["reward"]["reward"]["x"]) <= DRAWN
    assert len(payloads["reward"]["inside"]["low"]["x"]) <= DRAWN
    assert payloads["dead"]["high"] == {"x": [*range(1, 10_001, 100)], "y": [0.25] * BARS}
    assert run_payloads(history, {}, limit=None)["reward"]["reward"] == series(history, "reward")
    assert all(len(svg(c.figure, c.title)) < 24_000 for c in charts(payloads).values())


# --- payloads ---------------------------------------------------------------------------------------------------------


def test_a_gap_within_rounding_is_named_and_not_shown():
    gap = "sampling/sampling_logp_difference"
    rounding = [
        {"step": s, "kl/k3": 0.01 * s, f"{gap}/mean": 1e-7 * s, f"{gap}/max": 1e-5 * s}
        for s in (1, 2, 3)
    ]
    payload = kl_payload(History(rounding), {})
    assert [panel["name"] for panel in payload["panels"]] == ["policy to reference"]
    text = chart("kl", payload).caption
    assert text.endswith("Equal up to rounding: trainer to sampler.")
    rounding[-1][f"{gap}/max"] = 0.5  # one token that is no rounding
    assert len(kl_payload(History(rounding), {})["panels"]) == 2
    alone = kl_payload(History([{"step": 1, f"{gap}/mean": 1e-7}]), {})
    assert "all within rounding" in svg(chart("kl", alone).figure)
    axes = [chart("kl", alone).figure["layout"][axis] for axis in ("xaxis", "yaxis")]
    # no scale where nothing is shown
    assert [axis["showticklabels"] for axis in axes] == [False, False]


def test_a_line_stops_where_a_step_has_no_value():
    untrained = (3, 6, 8)
    steps = range(1, 21)
    rows = [{"step": s, "policy_version": s, "reward": 0.1 * s, "reward_std": 0.5} for s in steps]
    rows = [
        row if row["step"] in untrained else row | {"kl/k3": 0.01 * row["step"]} for row in rows
    ]
    rows[10] = {"step": 11, "policy_version": 11, "kl/k3": 0.11}  # whose samples were all dropped
    history = History([{"step": 0, "eval/reward": 0.2}, *rows, {"step": 20, "eval/reward": 0.9}])
    line = series(history, "kl/k3")
    assert line["x"] == [*steps]
    assert [x for x, y in zip(*line.values(), strict=True) if y is None] == [*untrained]
    # not measured at every step
    assert series(history, "eval/reward") == {"x": [0, 20], "y": [0.2, 0.9]}
    figures = {
        name: chart(name, payload).figure
        for name, payload in run_payloads(history, {}, names=["kl", "reward"]).items()
    }
    (trace,) = figures["kl"]["data"]
    assert trace["y"] == line["y"]
    # between two gaps
    assert [x for x, size in zip(trace["x"], trace["marker"]["size"], strict=True) if size] == [7]
    (path,) = re.findall(
        r'<path d="([^"]+)"[^>]*style="fill: none; stroke: #2f73c0', svg(figures["kl"])
    )
    assert path.count("M") == 4
    assert "connectgaps" not in json.dumps(figures)
    band = next(t for t in figures["reward"]["data"] if "fill" in t)
    assert band["x"] == [*range(1, 11), *range(10, 0, -1), None, *range(12, 21), *range(20, 11, -1)]
    held_out = next(t for t in figures["reward"]["data"] if t["name"] == "held out")
    assert held_out["mode"] == "markers"  # no line through the steps between


def test_the_script_is_of_the_version_that_checks_the_figures():
    assert f"plotly.js (cartesian - minified) v{get_plotlyjs_version()}" in plotly_script()[:200]
    assert "MIT License" in asset("plotly-LICENSE")


# --- figures and pictures ---------------------------------------------------------------------------------------------


def elements(picture: str) -> list[str]:
    "Names of the elements of a picture, which must be well-formed."
    return [e.tag.split("}")[1] for e in ElementTree.fromstring(picture).iter()]


@pytest.mark.parametrize("name", LOOKS)
def test_plotly_takes_every_figure(name: str):
    result = charts_of(async_record(synthetic_record(20)))
    go.Figure(result[name].figure)  # raises for what plotly does not know
    payload = result[name].payload
    assert json.loads(json.dumps(payload, allow_nan=False)) == payload
    assert json.loads(json.dumps(result[name].figure, allow_nan=False)) == result[name].figure
    assert "script" not in elements(svg(result[name].figure, name))
    axes = [axis for key, axis in result[name].figure["layout"].items() if key[1:5] == "axis"]
    # would write a number twice
    rounded = [axis for axis in axes if axis.get("tickformat") in ("d", ".0%")]
    assert all("dtick" in axis or "tickvals" in axis for axis in rounded)


def test_the_picture_shows_the_numbers():
    three = {"x": [0, 5, 10], "y": [0.0, 0.25, 1.0]}
    empty = {"x": [], "y": []}
    payload = {
        "reward": three,
        "inside": {"low": empty, "high": empty},
        "held_out": empty,
        "functions": {},
    }
    figure = chart("reward", payload | {"groups": dict.fromkeys(("q25", "q75"), empty)}).figure
    (x0, y0), (x1, y1), (x2, y2) = points_of(svg(figure), COLORS["blue"])
    assert x0 < x1 < x2
    assert y0 > y1 > y2  # up is more
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert (y0 - y1) / (y0 - y2) == pytest.approx(0.25, abs=0.005)


def points_of(picture: str, color: str) -> list[tuple[float, ...]]:
    "The points of the line of a colour, in pixels."
    (line,) = re.findall(
        rf'<path d="([^"]+)"[^>]*style="fill: none; stroke: {color}; stroke-width: 2', picture
    )
    return [tuple(map(float, p)) for p in re.findall(r"[ML] (\S+) (\S+)", line)]


def test_a_map_has_a_colour_for_each_sign():
    record = synthetic_record(5, groups=2, completions=4)
    first = replace(record.groups[0], advantages=[-1.0, 0.0, 0.5, 1.0])
    short = replace(record.groups[1], samples=record.groups[1].samples[:2], advantages=[0.0, 0.0])
    picture = svg(
        chart("advantages", advantages_payload(replace(record, groups=(first, short)))).figure
    )
    cells = Image.open(
        io.BytesIO(base64.b64decode(re.findall(r"data:image/png;base64,\s*([^\"]+)", picture)[0]))
    )
    results = sorted({color for n, color in cells.getcolors(1000) if n > 100 and color[3]})
    assert results == [
        (40, 103, 178, 140),
        (40, 103, 178, 255),
        (133, 147, 163, 30),
        (200, 96, 44, 255),
    ]


# --- asynchronous rollouts ----------------------------------------------------------------------------------------------

rows_in_flight = st.lists(st.tuples(st.floats(0, 100), st.floats(0.01, 20)), max_size=80)


@given(rows_in_flight)
def test_rows_that_overlap_are_in_different_lanes_and_lanes_are_few(
    rows: list[tuple[float, float]],
):
    bars = [{"begin": begin, "end": begin + length} for begin, length in sorted(rows)]
    placed = list(zip(packed_lanes(bars), bars, strict=True))
    together = [sum(b["begin"] <= at["begin"] + 1e-9 < b["end"] for b in bars) for at in bars]
    assert max((lane for lane, _ in placed), default=-1) + 1 <= max(together, default=0)
    for (lane, a), (other, b) in itertools.combinations(placed, 2):
        assert lane != other or min(a["end"], b["end"]) <= max(a["begin"], b["begin"]) + 1e-9


@given(rows_in_flight, st.integers(1, 30), st.integers(1, 9))
def test_a_timeline_is_thinned_evenly_and_says_so(
    rows: list[tuple[float, float]], most: int, lanes: int
):
    waiting = [(i, begin, begin + length, "ready") for i, (begin, length) in enumerate(rows)]
    result = timeline_payload([], waiting, rows=most, lanes=lanes)
    assert len(result["rows"]) == -(-result["total"] // result["every"]) <= most
    assert all(bar["lane"] < lanes for bar in result["rows"])
    whole = timeline_payload([], waiting, rows=100, lanes=100)["rows"][:: result["every"]]
    assert [bar["row"] for bar in result["rows"]] == [bar["row"] for bar in whole]
    text = timeline_figure(result)["layout"]["yaxis"]["ticktext"][1]
    assert text == ("rows" if result["every"] == 1 else f"rows, 1 of {result['every']}")


# --- live -------------------------------------------------------------------------------------------------------------


def history(steps: int) -> History:
    return History(
        {**history_row(synthetic_record(s, groups=3, completions=4))} for s in range(1, steps + 1)
    )


class RecordingComm(comm.DummyComm):
    "A comm that keeps the state it sends."

    sent: ClassVar[list[dict]] = []

    def publish_msg(self, msg_type: str, data=None, metadata=None, buffers=None, **keys) -> None:
        RecordingComm.sent.append(
            {"state": (data or {}).get("state", {}), "buffers": buffers or []}
        )


def test_an_update_is_one_message(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(comm, "create_comm", RecordingComm)
    live = chart("reward", run_payloads(history(13), {})["reward"]).live()
    # announced with its charts, never empty
    assert any("figures" in m["state"] for m in RecordingComm.sent)
    RecordingComm.sent.clear()
    later = run_payloads(history(20), {})
    live.draw(chart("reward", later["reward"]), chart("kl", later["kl"]))
    (message,) = RecordingComm.sent
    assert message["state"].keys() == {"shown", "figures"}
    live.draw(chart("reward", later["reward"]), chart("kl", later["kl"]))
    assert len(RecordingComm.sent) == 1  # nothing new, nothing sent


def test_assets_of_a_page_are_small_and_request_nothing():
    code = module("charts.js")
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|fetch\(|http", code
    )
    # of a blob of the trait that holds plotly's script
    assert re.findall(r"import\s*\(.*?\)", code) == ["import(url)"]
    assert str(LiveCharts._esm) == code
    assert len(code) < 10_000  # a page waits two seconds for it
    assert chart("reward", reward_payload(history(5))).live().plotly.script == plotly_script()
    assert "url(" not in asset("charts.css")


class Stepped:
    "What a chart asks of a loop: its records, and its settings."

    def __init__(self, *records: StepRecord):
        self.records = records
        self.cfg = Config(kl_beta=0.25)


def test_an_unknown_chart_is_named():
    with pytest.raises(RecordError, match=r"got 'rewards'\. Did you mean 'reward'\?"):
        chart("rewards", [synthetic_record(1)])
    # only with asynchronous rollouts
    with pytest.raises(RecordError, match=r"'waits'; expected one of 'reward'"):
        chart("waits", synthetic_record(1))
    with pytest.raises(RecordError, match=r"Take a step first"):
        chart("reward", Stepped())


def test_a_run_whose_steps_were_not_kept_is_charted_from_its_metrics(tmp_path):
    log = tmp_path / "trainer_state.json"
    rows = [{"step": s, "loss": 0.0, "grad_norm": 0.1, "reward": s / 4, "kl": 0.0} for s in (1, 2)]
    log.write_text(json.dumps({"log_history": rows}))
    run = Run.open(log)
    assert [*chart("reward", run).payload["reward"]["y"]] == [0.25, 0.5]
    with pytest.raises(RecordError, match=r"'mismatch'; expected one of 'reward'"):
        chart("mismatch", run)  # of tokens
