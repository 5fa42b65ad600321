"Every tutorial that needs neither network nor account runs from top to bottom in JupyterLab; all can be read before."

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .lab import PANEL, Lab, Notebook

TUTORIALS = Path(__file__).parents[2] / "nbs" / "tutorials"
# Pictures that the browser cannot draw.
BROKEN = (
    "outputs => [...outputs.querySelectorAll('img')].filter(i => !i.naturalWidth).map(i => i.alt)"
)
LOADED = "outputs => [...outputs.querySelectorAll('img')].every(i => i.complete)"


def html_of(cell: dict[str, Any]) -> str:
    "What a cell has stored as HTML."
    return "".join("".join(o.get("data", {}).get("text/html", "")) for o in cell.get("outputs", ()))


def stored_pictures(path: Path) -> list[dict[str, Any]]:
    "The cells of a notebook whose HTML has pictures."
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [c for c in cells if "<img" in html_of(c)]


@pytest.fixture(scope="module")
def cells() -> list[dict[str, Any]]:
    "Those of all tutorials, after two that are run."
    ours = ["import urllib.request", "urllib.request.urlopen('http://192.0.2.1')"]
    plain = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
    stored = [c for path in sorted(TUTORIALS.glob("*.ipynb")) for c in stored_pictures(path)]
    return [
        c | {"id": f"cell-{i}"}
        for i, c in enumerate([*(plain | {"source": text} for text in ours), *stored])
    ]


@pytest.fixture(scope="module")
def notebook(
    lab: Lab, cells: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Notebook]:
    "One notebook with the pictures that all tutorials have stored; JupyterLab sees it for the first time."
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    content = {
        "cells": cells,
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    path = tmp_path_factory.mktemp("stored") / "stored.ipynb"
    path.write_text(json.dumps(content), encoding="utf-8")
    notebook = lab.open(path)
    yield notebook
    notebook.close()


def test_a_tutorial_that_was_never_run_here_shows_all_its_pictures(
    notebook: Notebook, cells: list[dict[str, Any]]
):
    "JupyterLab does not trust what another machine has stored: it takes scripts, styles and inline SVG out of it."
    assert not any(
        notebook.page.evaluate(f"() => {PANEL}.content.widgets.map(c => c.model.trusted)")[2:]
    )
    assert len(cells) > 20
    for i, cell in enumerate(cells[2:], 2):
        outputs = notebook.show(i)
        outputs.locator(".jp-OutputArea-output").first.wait_for()
        notebook.until_true(f"async e => ({LOADED})(e)", outputs.element_handle())
        assert outputs.evaluate(BROKEN) == []
        pictures = outputs.locator(".jp-RenderedHTMLCommon img").count()
        assert pictures >= html_of(cell).count("<img"), "no picture was taken out"


def test_a_kernel_stays_here_and_its_errors_are_seen(notebook: Notebook):
    notebook.run_cells(0, 1)
    (failure,) = notebook.failures()
    assert "tests do not use the network" in failure
    assert notebook.ask("urllib.request.__name__") == "urllib.request"
