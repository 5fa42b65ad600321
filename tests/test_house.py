"""Applies the rules of `house.py` to this checkout, and shows on a small project that two of them can fail."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from house import PACKAGE, RULES, House
from packaging.specifiers import SpecifierSet
from pages import readme, relink, write_readme

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def house() -> House:
    return House(ROOT)


@pytest.mark.parametrize("name", RULES)
def test_the_project_keeps(name: str, house: House):
    problems = RULES[name](house)
    assert not problems, f"{RULES[name].__doc__}\n  " + "\n  ".join(problems)


# --- a small project ----------------------------------------------------------------------------------------------


def new_markdown_cell(source: str) -> dict:
    "A cell of text."
    return {"cell_type": "markdown", "metadata": {}, "source": source}


def new_code_cell(source: str, outputs: Sequence[dict] = ()) -> dict:
    "A cell of code."
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": [*outputs],
        "source": source,
    }


def text_output(text: str) -> dict:
    "A stored result."
    return {
        "output_type": "execute_result",
        "data": {"text/plain": text},
        "execution_count": None,
        "metadata": {},
    }


def display_output(data: dict) -> dict:
    "A stored display."
    return {"output_type": "display_data", "data": data, "metadata": {}}


def module_page(name: str) -> list[dict]:
    "The cells of a notebook that exports one function."
    return [
        new_markdown_cell(f"# {name}\n\n> Adds two numbers, so that there is something to check."),
        new_code_cell(f"#| default_exp {name}"),
        new_code_cell(
            '#| export\ndef add(a: int, b: int) -> int:\n    "The sum."\n    return a + b'
        ),
        new_markdown_cell("## What you can change here\n\nThe numbers."),
    ]


def save_notebook(root: Path, name: str, cells: list[dict]) -> None:
    "Writes a notebook; cell ids count up, as nothing here may be random."
    for i, cell in enumerate(cells):
        cell["id"] = f"cell{i:04d}"
    metadata = {"kernelspec": {"name": "python3", "display_name": "python3", "language": "python"}}
    notebook = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    path = root / "nbs" / f"{name}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(notebook, indent=1) + "\n", encoding="utf-8")


MODULES = [
    "core/00_types",
    "backends/00_base",
    "loop/00_rollouts",
    "insight/00_xray",
    "views/00_charts",
]
# what the import contracts name
MODULES += ["backends/local/00_trainer", "emulator/00_service", "00_cli"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    "A project of a few tiny notebooks that keeps every rule."
    root = tmp_path / "project"
    (root / PACKAGE).mkdir(parents=True)
    for name in MODULES:
        save_notebook(root, name, module_page(re.sub(r"\d+_", "", name).replace("/", ".")))
    save_notebook(root, "index", [new_markdown_cell("# rl_notebook\n\n> A promise.")])
    for name in (
        "settings.ini",
        "pyproject.toml",
        "_quarto.yml",
        "constraints.txt",
        "CHANGELOG.md",
    ):
        shutil.copy(ROOT / name, root / name)
    subprocess.run(
        [Path(sys.executable).parent / "nbdev_export"], cwd=root, check=True, capture_output=True
    )
    write_readme(root)
    return root


def test_an_edited_export_is_noticed(project: Path):
    assert RULES["a_fresh_export_leaves_no_diff"](House(project)) == []
    module = project / PACKAGE / "core" / "types.py"
    module.write_text(module.read_text().replace("return a + b", "return a - b"))
    (problem,) = RULES["a_fresh_export_leaves_no_diff"](House(project))
    assert problem == "rl_notebook/core/types.py differs from its notebook: run make prep"


def test_an_import_of_a_higher_folder_is_noticed(project: Path):
    assert RULES["numbers_only_go_down"](House(project)) == []
    cells = module_page("core.types")
    cells.insert(2, new_code_cell(f"#| export\nfrom {PACKAGE}.insight.xray import add as other"))
    save_notebook(project, "core/00_types", cells)
    (problem,) = RULES["numbers_only_go_down"](House(project))
    assert problem.startswith("core/00_types.ipynb cell 2 imports insight.xray")
    subprocess.run(
        [Path(sys.executable).parent / "nbdev_export"], cwd=project, check=True, capture_output=True
    )
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    env = {**os.environ, "PYTHONPATH": str(project), "NO_COLOR": "1"}
    done = subprocess.run(
        command, cwd=project, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "A folder imports only lower folders BROKEN" in done.stdout


# --- how pages are made -------------------------------------------------------------------------------------------


def test_a_page_shows_what_a_reader_sees(project: Path):
    cells = [
        new_markdown_cell(
            "# x\n\n> y\n\n[core](core/00_types.ipynb#nouns) [web](https://x.org) [up](../A.md)"
        ),
        new_code_cell("#| hide\nsecret = 1", outputs=[text_output("hidden output")]),
        new_code_cell("#| echo: false\nunseen = 2", outputs=[text_output("seen output")]),
        new_code_cell("#| output: false\nseen = 3", outputs=[text_output("unseen output")]),
        new_code_cell(
            "4", outputs=[display_output({"text/html": "<style>x</style>", "text/plain": "four"})]
        ),
        new_code_cell(
            "5", outputs=[display_output({"image/png": "aGVsbG8=", "text/plain": "five"})]
        ),
    ]
    save_notebook(project, "index", cells)
    text, pictures = readme(project)
    assert "[core](nbs/core/00_types.ipynb#nouns) [web](https://x.org) [up](A.md)" in text
    assert [word for word in ("seen = 3", "seen output", "four") if word not in text] == []
    assert [
        word
        for word in ("secret", "hidden output", "unseen", "<style>", "#|", "five")
        if word in text
    ] == []
    [(path, data)] = pictures.items()
    assert data == b"hello"
    assert path.startswith("nbs/images/")
    assert f"({path})" in text


def test_a_notebook_that_hangs_ends_the_run_with_its_name(project: Path):
    cells = [*module_page("insight.xray"), new_code_cell("import time\ntime.sleep(600)")]
    save_notebook(project, "insight/00_xray", cells)
    command = [sys.executable, str(ROOT / "tests" / "notebooks.py"), "--n_workers", "2"]
    env = {**os.environ, "RL_NOTEBOOK_PAGE_LIMIT": "4", "PYTHONPATH": str(project)}
    done = subprocess.run(
        command, cwd=project, env=env, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 1
    assert "00_xray.ipynb: not done after 4 s" in done.stderr
    assert "in run_code" in done.stderr  # where each thread stood


def test_links_move_with_their_page():
    assert relink('<img src="images/a.png"> [x](#here) [y](mailto:a@b.c)', "nbs") == (
        '<img src="nbs/images/a.png"> [x](#here) [y](mailto:a@b.c)'
    )


def test_every_pinned_version_installs_on_the_lowest_python():
    "Debian's Python 3.11 is 3.11.2: a pin that wants 3.11.5 would end `make setup` there."
    lowest = (
        re.search(r"^min_python = (\S+)", (ROOT / "settings.ini").read_text(), re.MULTILINE)[1]
        + ".0"
    )
    pins = dict(
        re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    )
    installed = {d.metadata["Name"]: d for d in importlib.metadata.distributions()}
    pinned = {name: d for name, d in installed.items() if pins.get(name) == d.version}
    assert len(pinned) > 100
    wanted = {
        f"{name}=={pins[name]}": d.metadata["Requires-Python"] or "" for name, d in pinned.items()
    }
    assert {
        pin: python for pin, python in wanted.items() if not SpecifierSet(python).contains(lowest)
    } == {}
