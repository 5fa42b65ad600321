"Every tutorial that needs neither network nor account runs from top to bottom in JupyterLab."

from __future__ import annotations

from pathlib import Path

import pytest

from .lab import Lab

TUTORIALS = Path(__file__).parents[2] / "nbs" / "tutorials"


@pytest.mark.parametrize("name", ["101_one_step_by_hand", "102_reading_logprobs"])
def test_a_tutorial_runs_through_the_menu(lab: Lab, name: str):
    notebook = lab.open(TUTORIALS / f"{name}.ipynb")
    notebook.run_all()
    assert notebook.failures() == []
    assert any(notebook.outputs())
    notebook.shot(f"tutorial_{name[:3]}")
    notebook.close()
