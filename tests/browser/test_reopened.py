"A notebook that is opened again tomorrow shows what it showed today, without the widgets that only a kernel can draw."

from __future__ import annotations

import json

import pytest

from .lab import PANEL, Lab, Notebook

BROKEN = ("Error displaying widget", "model not found", "Error creating widget", "Loading widget")
CELLS = {
    "fallback": """
import ipywidgets
from rl_notebook.views.tokens import with_fallback
with_fallback(ipywidgets.Button(description="live"), "<b>still</b>")""",
}


@pytest.fixture(scope="module")
def notebook(lab: Lab):
    "Every view, displayed once."
    notebook = lab.open(list(CELLS.values()), "reopened.ipynb")
    notebook.run_all()
    assert notebook.failures() == []
    yield notebook
    notebook.close()


def test_live_first_and_still_after(notebook: Notebook):
    "In this order: the second half shuts the kernel down."
    fallback = notebook.show(0)
    fallback.get_by_role("button", name="live").wait_for()
    assert not fallback.get_by_text("still").is_visible()

    stored = notebook.save()
    assert "widgets" not in stored["metadata"]
    notebook.shut_down()
    notebook.load()

    look_at_the_still(notebook, "reopened")

    stored["cells"][0]["source"] = "# not what was signed\n" + "".join(stored["cells"][0]["source"])
    notebook.path.write_text(json.dumps(stored))
    notebook.load()
    assert notebook.page.evaluate(f"() => {PANEL}.content.widgets[0].model.trusted") is False
    look_at_the_still(notebook, "untrusted")


def look_at_the_still(notebook: Notebook, when: str) -> None:
    "Static HTML is there, and nothing says that something is missing."
    for index, name in enumerate(CELLS):
        output = notebook.show(index)
        output.locator(".jp-RenderedHTML").first.wait_for()
        assert not any(sign in output.inner_text() for sign in BROKEN), name
        notebook.shot(f"{when}_{name}", index)
    assert notebook.output(0).get_by_text("still").is_visible()
    assert notebook.page.get_by_role("button", name="live").count() == 0
