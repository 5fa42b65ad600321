"Every view in JupyterLab: live numbers, light and dark, wide and narrow, and what is shown when the kernel is gone."

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from playwright.sync_api import Locator, expect
from synthetic import synthetic_record

from rl_notebook.views.tokens import inspect_tokens
from rl_notebook.insight.xray import scored_first

from .lab import PANEL, Lab, Notebook

CELLS = {
    "record": """
from synthetic import synthetic_record
from rl_notebook.views.tokens import inspect_tokens

record = synthetic_record(3)
record""",
    "inspector": "inspector = inspect_tokens(record)\ninspector",
}


@pytest.fixture(scope="module")
def notebook(lab: Lab) -> Iterator[Notebook]:
    "The inspector, displayed; charts and dashboard have another file."
    notebook = lab.open(list(CELLS.values()), "views.ipynb")
    notebook.run_all()
    assert notebook.failures() == []
    yield notebook
    notebook.close()


def view(notebook: Notebook, name: str) -> Locator:
    "The output of a cell of CELLS, in view."
    return notebook.show(list(CELLS).index(name))


# --- the token inspector ----------------------------------------------------------------------------------------------

RECORD = synthetic_record(3)
VERDICT = inspect_tokens(RECORD).overview["verdict"]
SERIES = {
    "policy": lambda d, i: RECORD.loss.logprobs[i],
    "old": lambda d, i: d.old_logprobs,
    "sampler": lambda d, i: d.sampler_logprobs,
    "ref": lambda d, i: d.ref_logprobs,
    "dlogprob": lambda d, i: RECORD.loss.dlogprobs[i],
}


@pytest.fixture
def inspector(notebook: Notebook) -> Locator:
    "The inspector, at its first sample."
    result = view(notebook, "inspector").locator(".rlt[data-ready]")
    result.wait_for()
    result.locator(".rlt-sample").select_option(index=0)
    if result.locator(".rlt-fold").get_attribute("aria-expanded") == "true":
        result.locator(".rlt-fold").click()
    return result


def shown_sample(inspector: Locator) -> int:
    "Position in `RECORD.datums` of the sample that is shown; -1 for one that was not trained."
    text = inspector.locator(".rlt-sample option:checked").inner_text()
    place = tuple(map(int, re.match(r"group (\d+), sample (\d+)", text).groups()))
    return next((i for i, d in enumerate(RECORD.datums) if (d.group, d.sample) == place), -1)


def agree(inspector: Locator, index: int, target: int) -> None:
    "The readout shows what the record has for a target of a datum."
    datum = RECORD.datums[index]
    readout = inspector.locator(".rlt-readout")
    expect(readout.locator(".rlt-name")).to_contain_text(
        f"token {target + 1}, id {datum.tokens[target + 1]}, "
    )
    expect(readout.locator(".rlt-name")).to_contain_text(f"target {target}")
    for name, values in SERIES.items():
        text = readout.locator(f".rlt-value[data-series={name}] b").inner_text()
        value = float(np.asarray(values(datum, index))[target])
        assert (
            text == "–" if math.isnan(value) else math.isclose(float(text), value, rel_tol=1e-3)
        ), (name, target)


def test_the_cause_is_shown_first_and_the_prompt_is_folded(inspector: Locator):
    text = inspector.locator(".rlt-verdict").inner_text()
    for words in (VERDICT["text"], VERDICT["more"], "step 3 · sampler version"):
        assert words in text
    first = inspector.locator(".rlt-strip [data-token='0']")
    expect(first).to_be_hidden()
    inspector.locator(".rlt-fold").click()
    expect(first).to_be_visible()
    inspector.locator(".rlt-fold").click()
    expect(first).to_be_hidden()
    inspector.locator(".rlt-strip").focus()
    inspector.page.keyboard.press("Home")  # a token of the prompt
    expect(first).to_be_visible()


def test_hovering_shows_the_numbers_of_the_record(inspector: Locator):
    inspector.locator(".rlt-fold").click()
    for index in (0, 3):
        datum = RECORD.datums[index]
        where = f"group {datum.group}, sample {datum.sample} "
        label = (
            inspector.locator(".rlt-sample option")
            .filter(has_text=re.compile(f"^{where}"))
            .inner_text()
        )
        inspector.locator(".rlt-sample").select_option(label=label)
        expect(inspector.locator(".rlt-facts")).to_contain_text(where.strip())
        scored = np.flatnonzero(datum.active)
        size = len(datum.weights)
        for target in (
            0,
            int(scored[0]) - 1,
            int(scored[0]),
            int(scored[len(scored) // 2]),
            size - 1,
        ):
            inspector.locator(f".rlt-strip [data-target='{target}']").hover()
            agree(inspector, index, target)


def test_strip_and_chart_point_at_the_same_token(inspector: Locator):
    index = shown_sample(inspector)
    chart = inspector.locator(".rlt-chart")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    tokens_shown = set()
    for share in (0.15, 0.5, 0.97):
        chart.hover(position={"x": box["width"] * share, "y": box["height"] / 2})
        target = int(inspector.locator(".rlt-strip .rlt-hover").get_attribute("data-target"))
        agree(inspector, index, target)
        tokens_shown.add(target)
    assert len(tokens_shown) == 3
    assert max(tokens_shown) == len(RECORD.datums[index].weights) - 1


# where a point of a chart is on the page
PLACE = """(plot, k) => {
    const { xaxis, yaxis } = plot._fullLayout;
    const { left, top } = plot.getBoundingClientRect();
    const { x, y } = plot.data[0];
    return [left + xaxis._offset + xaxis.d2p(x[k]), top + yaxis._offset + yaxis.d2p(y[k])];
}"""


def test_a_point_of_the_scatter_leads_to_its_token(inspector: Locator, notebook: Notebook):
    scatter = inspector.locator(".rlt-scatter")
    scatter.scroll_into_view_if_needed()
    scatter.locator(".nsewdrag").wait_for()
    x, y = scatter.evaluate(PLACE, 40)
    notebook.page.mouse.move(x, y)
    label = scatter.locator(".hovertext")
    label.wait_for()
    label_match = re.match(
        r"group (\d+), sample (\d+), token (\d+): trainer (\S+), sampler (\S+)$",
        label.text_content().replace("−", "-"),
    )
    group, sample, token = map(int, label_match.groups()[:3])
    target = token - 1
    notebook.page.mouse.down()
    notebook.page.mouse.up()
    expect(inspector.locator(".rlt-facts")).to_contain_text(f"group {group}, sample {sample}")
    expect(inspector.locator(".rlt-strip .rlt-selected")).to_have_attribute(
        "data-target", str(target)
    )
    index = shown_sample(inspector)
    notebook.page.mouse.move(5, 5)
    agree(inspector, index, target)
    datum = RECORD.datums[index]
    x = datum.sampler_logprobs[target]
    y = scored_first(RECORD)[index].values[target]
    assert math.isclose(float(label_match[4]), y, rel_tol=1e-3)
    assert math.isclose(float(label_match[5]), x, rel_tol=1e-3)


def shows_targets(table: Locator, targets: Sequence[int]) -> None:
    "Wait until these are the rows of a table; they are read at once, since a table may be drawn again in between."
    rows = table.locator("tbody tr")
    end = time.monotonic() + 30

    def read():
        return rows.evaluate_all("rows => rows.map(row => Number(row.dataset.id))")

    while read() != [*map(int, targets)] and time.monotonic() < end:
        time.sleep(0.05)
    assert read() == [*map(int, targets)]


def test_tokens_are_sorted_and_searched_in_their_table(inspector: Locator):
    index = shown_sample(inspector)
    datum = RECORD.datums[index]
    logprobs = np.asarray(RECORD.loss.logprobs[index].values)
    inspector.locator(".rlt-series").select_option("policy")
    table = inspector.locator(".rlt-worst .rltable")
    scored = np.flatnonzero(datum.active)
    worst = scored[np.argsort(-np.abs(logprobs[scored]), kind="stable")]
    shows_targets(table, worst[:12])  # the farthest from 0 first
    table.locator("tbody tr").nth(1).click()
    agree(inspector, index, int(worst[1]))
    expect(table.locator("tr[aria-current]")).to_have_attribute("data-id", str(worst[1]))
    table.get_by_role("button", name="token").first.click()
    shows_targets(table, scored[:12])
    inspector.locator(".rlt-sample").select_option(index=2)
    expect(table.locator("th[aria-sort=ascending]")).to_have_text("token")  # as it was chosen
    table.get_by_label("Search tokens").fill("#")
    expect(table.locator("tbody tr").filter(has_not_text="#")).to_have_count(0)
    table.get_by_label("Search tokens").fill("")
    for _ in range(2):
        table.get_by_role("button", name="value").click()


def test_the_inspector_is_used_by_keyboard(inspector: Locator, notebook: Notebook):
    cells = notebook.page.evaluate(f"() => {PANEL}.content.widgets.length")
    index = shown_sample(inspector)
    keyboard = notebook.page.keyboard
    inspector.locator(".rlt-sample").focus()
    reached = set()
    for _ in range(12):
        keyboard.press("Tab")
        reached.add(notebook.page.evaluate("() => document.activeElement.className.split(' ')[0]"))
    assert {"rlt-series", "rlt-strip"} <= reached
    inspector.locator(".rlt-strip").focus()
    keyboard.press("End")
    last = len(RECORD.datums[index].weights) - 1
    expect(inspector.locator(".rlt-strip .rlt-selected")).to_have_attribute(
        "data-target", str(last)
    )
    keyboard.press("ArrowLeft")
    expect(inspector.locator(".rlt-strip .rlt-selected")).to_have_attribute(
        "data-target", str(last - 1)
    )
    agree(inspector, index, last - 1)
    for key in ("d", "d", "x", "b"):  # would delete, cut and insert cells of the notebook
        keyboard.press(key)
    assert notebook.page.evaluate(f"() => {PANEL}.content.widgets.length") == cells
