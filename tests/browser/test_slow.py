"A page on a machine that has other things to do: whatever is displayed comes alive, only later."

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import BrowserContext

from .lab import Lab, Notebook

pytestmark = pytest.mark.slow  # the page's two seconds are real ones: on a machine with other work they may pass
SLOWER = 6  # times; a widget is given up by the page if it is not ready within two seconds
CELLS = [
    """
from IPython.display import display
from synthetic import synthetic_record
from rl_notebook.views.charts import charts
from rl_notebook.views.payloads import History, history_row, run_payloads

history = History(history_row(synthetic_record(step)) for step in range(1, 6))


def reward():
    return charts(run_payloads(history, {}))["reward"]""",
    """
live, other = reward().live(), reward().live()
display(live, other)""",
]
# How many of the displayed charts have a line of so many points.
DRAWN = """([count, points]) => [...document.querySelectorAll('.js-plotly-plot')]
    .filter(p => p.data?.some(t => t.type === 'scatter' && t.y?.length === points)).length === count"""


@pytest.fixture
def slow(lab: Lab, context: BrowserContext) -> Iterator[Notebook]:
    "A notebook whose page gets a fraction of the processor from its second cell on."
    notebook = lab.open(CELLS, "slow.ipynb")
    notebook.run_cells(0)
    session = context.new_cdp_session(notebook.page)
    session.send("Emulation.setCPUThrottlingRate", {"rate": SLOWER})
    yield notebook
    session.send("Emulation.setCPUThrottlingRate", {"rate": 1})
    notebook.close()


def test_charts_are_drawn_and_take_new_points(slow: Notebook):
    slow.run_cells(1)
    slow.ask("history.add(history_row(synthetic_record(6)))")
    slow.ask("live.draw(reward())")  # while plotly is being read
    slow.page.wait_for_function(DRAWN, arg=[1, 6])
    slow.page.wait_for_function(DRAWN, arg=[1, 5])
    slow.ask("other.draw(reward())")
    slow.page.wait_for_function(DRAWN, arg=[2, 6])
    assert slow.failures() == []
    assert slow.page.evaluate("globalThis.rlNotebookPlotly.size") == 1, "plotly was read once for both"
    slow.shot("slow", 1)
