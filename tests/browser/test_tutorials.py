"Every tutorial that needs neither network nor account runs from top to bottom in JupyterLab; all can be read before."

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .lab import PANEL, Lab

TUTORIALS = Path(__file__).parents[2] / "nbs" / "tutorials"
# What a drawing has lost: pictures that JupyterLab took out, or that the browser cannot draw.
BROKEN = """outputs => [...outputs.querySelectorAll('.jp-RenderedHTMLCommon')].flatMap(html => [
    ...[...html.querySelectorAll('img')].filter(i => !i.naturalWidth).map(i => `broken picture: ${i.alt}`),
    ...(html.textContent.trim() || html.querySelector('img') ? [] : ['nothing is left']),
])"""
LOADED = "outputs => [...outputs.querySelectorAll('img')].every(i => i.complete)"


@pytest.mark.parametrize("path", sorted(TUTORIALS.glob("*.ipynb")), ids=lambda path: path.stem[:3])
def test_a_tutorial_that_was_never_run_here_shows_all_its_pictures(lab: Lab, path: Path):
    "JupyterLab does not trust what another machine has stored: it takes scripts, styles and inline SVG out of it."
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    stored = {
        i: "".join(o["data"]["text/html"])
        for i, c in enumerate(cells)
        for o in c.get("outputs", ())
        if "text/html" in o.get("data", ())
    }
    notebook = lab.open(path, f"fresh_{path.name}")
    assert not all(notebook.page.evaluate(f"() => {PANEL}.content.widgets.map(c => c.model.trusted)")) or not stored
    for i, html in stored.items():
        outputs = notebook.show(i)
        outputs.locator(".jp-OutputArea-output").first.wait_for()
        notebook.until_true(f"async e => ({LOADED})(e)", outputs.element_handle())
        assert outputs.evaluate(BROKEN) == []
        assert outputs.locator(".jp-RenderedHTMLCommon img").count() >= html.count("<img"), "no picture was taken out"
        assert "<svg" not in html
    notebook.shot(f"fresh_{path.stem[:3]}")
    notebook.close()


@pytest.mark.parametrize("name", ["101_one_step_by_hand", "102_reading_logprobs"])
@pytest.mark.variant
def test_a_tutorial_runs_through_the_menu(lab: Lab, name: str):
    notebook = lab.open(TUTORIALS / f"{name}.ipynb")
    notebook.run_all()
    assert notebook.failures() == []
    assert any(notebook.outputs())
    notebook.shot(f"tutorial_{name[:3]}")
    notebook.close()
