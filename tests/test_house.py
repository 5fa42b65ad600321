"""Holds the project to the rules of `house.py`, and proves for each rule that it can fail.

The proof is a small project that keeps every rule, and for each rule one thing done to it that breaks it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from house import MAX_LINES, MAX_NAMES, MAX_TEST_LINES, PACKAGE, RULES, House
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


# --- a small project that keeps every rule -----------------------------------------------------------------------


def new_markdown_cell(source: str) -> dict:
    "A cell of text."
    return {"cell_type": "markdown", "metadata": {}, "source": source}


def new_code_cell(source: str, outputs: Sequence[dict] = ()) -> dict:
    "A cell of code."
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [*outputs], "source": source}


def module_page(name: str, *imports: str) -> list:
    "The cells of a notebook that exports one function."
    cells = [
        new_markdown_cell(f"# {name}\n\n> Adds two numbers, so that there is something to check.\n\n" + "Prose. " * 60),
        new_code_cell(f"#| default_exp {name}"),
        new_code_cell("#| export\n" + "\n".join(imports)) if imports else None,
        new_code_cell('#| export\ndef add(a: int, b: int) -> int:\n    "The sum."\n    return a + b'),
        new_code_cell("total = add(1, 2)\nassert total == 3\ntotal", outputs=[text_output("3")]),
        new_markdown_cell("## What you can change here\n\nThe numbers."),
    ]
    return [cell for cell in cells if cell]


def text_output(text: str) -> dict:
    "A stored result."
    return {"output_type": "execute_result", "data": {"text/plain": text}, "execution_count": None, "metadata": {}}


def drawn(data: dict) -> dict:
    "A stored display."
    return {"output_type": "display_data", "data": data, "metadata": {}}


NAMES = ["core/00_types", "backends/00_base", "backends/local/00_trainer", "loop/00_rollouts", "insight/00_xray"]
NAMES += ["views/00_charts", "emulator/00_service", "00_cli", "tutorials/101_first"]

PAGES = {
    "core/00_types": module_page("core.types"),
    "backends/00_base": module_page("backends.base", f"from {PACKAGE}.core.types import add as core_add"),
    "backends/local/00_trainer": module_page("backends.local.trainer", f"from {PACKAGE}.backends import base"),
    "loop/00_rollouts": module_page("loop.rollouts", f"from {PACKAGE}.backends.base import add as base_add"),
    "insight/00_xray": module_page("insight.xray"),
    "views/00_charts": module_page("views.charts", f"import {PACKAGE}.insight.xray"),
    "emulator/00_service": module_page("emulator.service", f"from {PACKAGE}.backends.local import trainer"),
    "00_cli": module_page("cli", f"from {PACKAGE}.views.charts import add as charts_add"),
    "tutorials/101_first": [new_markdown_cell("# first\n\n> Walks.\n\nSee [core](../core/00_types.ipynb).")],
    "index": [new_markdown_cell("# rl_notebook\n\n> A promise.\n\nSee [core](core/00_types.ipynb).")],
}
module_of = lambda name: re.sub(r"\d+_", "", name).replace("/", ".")
MAP = "".join(f"| [{name}](nbs/{name}.ipynb) | `{module_of(name)}` |\n" for name in NAMES)


def save(root: Path, name: str, cells: list, **metadata) -> None:
    "Writes a notebook; cell ids count up, as nothing here may be random."
    for i, cell in enumerate(cells):
        cell["id"] = f"cell{i:04d}"
    metadata = {"kernelspec": {"name": "python3", "display_name": "python3", "language": "python"}, **metadata}
    notebook = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    writes(f"nbs/{name}.ipynb", json.dumps(notebook, indent=1) + "\n")(root)


@pytest.fixture(scope="session")
def model_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "A project of a few tiny notebooks that keeps every rule."
    root = tmp_path_factory.mktemp("house") / "project"
    (root / "nbs").mkdir(parents=True)
    (root / PACKAGE).mkdir()
    (root / "tests").mkdir()
    writes("CONTRIBUTING.md", f"# Contributing\n\n| notebook | module |\n|---|---|\n{MAP}")(root)
    for name in ("settings.ini", "pyproject.toml", "_quarto.yml", "constraints.txt", "CHANGELOG.md"):
        shutil.copy(ROOT / name, root / name)
    (root / "nbs" / "_quarto.yml").symlink_to("../_quarto.yml")
    for name, cells in PAGES.items():
        save(root, name, cells)
    subprocess.run([Path(sys.executable).parent / "nbdev_export"], cwd=root, check=True, capture_output=True)
    write_readme(root)
    return root


@pytest.fixture
def project(model_project: Path, tmp_path: Path) -> Path:
    "A copy of it to break."
    return Path(shutil.copytree(model_project, tmp_path / "project", symlinks=True))


@pytest.mark.parametrize("name", RULES)
def test_the_model_project_keeps(name: str, model_project: Path):
    assert RULES[name](House(model_project)) == []


# --- one thing that breaks each rule -----------------------------------------------------------------------------

Break = Callable[[Path], object]


def adds(cell: str, to: str = "core/00_types", **kwargs) -> Break:
    "Adds a code cell to a notebook."

    def add(root: Path) -> None:
        cells = json.loads((root / "nbs" / f"{to}.ipynb").read_text(encoding="utf-8"))["cells"]
        save(root, to, [*cells[:-1], new_code_cell(cell, **kwargs), cells[-1]])

    return add


def many(cell: str, times: int) -> Break:
    "Adds a code cell to every module several times."
    return lambda root: [adds(cell, to)(root) for to in NAMES if to != "tutorials/101_first" for _ in range(times)]


def replaces(old: str, new: str, file: str) -> Break:
    "Replaces text in a file, which must hold it."

    def replace(root: Path) -> None:
        text = (root / file).read_text(encoding="utf-8")
        assert old in text, f"{file} does not hold {old!r}"
        (root / file).write_text(text.replace(old, new), encoding="utf-8")

    return replace


def writes(file: str, text: str) -> Break:
    "Writes a file."

    def write(root: Path) -> None:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text, encoding="utf-8")

    return write


LONG = "#| export\ndef long() -> None:\n    'Long.'\n" + "    print()\n" * 70
MIDDLING = "#| export\ndef middling() -> None:\n    'Middling.'\n" + "    print()\n" * 20
CORE = "nbs/core/00_types.ipynb"

BREAKS: dict[str, list[Break]] = {
    "a_fresh_export_leaves_no_diff": [
        replaces("return a + b", "return a - b", f"{PACKAGE}/core/types.py"),
        lambda root: [
            writes(f"{PACKAGE}/stray.py", "x = 1\n")(root),
            (root / PACKAGE / "insight" / "xray.py").unlink(),
        ],
    ],
    "a_notebook_is_named_after_its_module": [
        replaces("default_exp core.types", "default_exp core.kernel", CORE),
        lambda root: (root / CORE).rename(root / "nbs" / "core" / "types.ipynb"),
        adds("#| export\nx = 1", to="tutorials/101_first"),
    ],
    "numbers_only_go_down": [
        adds(f"#| export\nfrom {PACKAGE}.backends.base import add as base_add"),
        adds(f"#| export\ndef late():\n    import {PACKAGE}.cli"),
        adds(f"#| export\nimport importlib\nm = importlib.import_module('{PACKAGE}.cli')"),
        adds(f"from {PACKAGE}.emulator.service import add as emulated", to="backends/local/00_trainer"),
    ],
    "core_is_pure": [
        adds("#| export\nimport torch.nn.functional as F"),
    ],
    "the_layers_name_every_folder": [replaces(f'    "({PACKAGE}.insight)",\n', "", "pyproject.toml")],
    "a_cell_fits_a_glance": [adds(LONG)],
    "the_number_of_lines_only_falls": [
        adds("#| export\n" + "x = 1\n" * MAX_LINES),
        writes(f"{PACKAGE}/new.css", "a {}\n" * MAX_LINES),
        writes("tests/test_new.py", "x = 1\n" * (MAX_TEST_LINES + 1)),
    ],
    "a_notebook_reads_as_a_page": [
        replaces("# core.types", "core.types", CORE),
        replaces("What you can change here", "The end", CORE),
    ],
    "little_is_hidden": [lambda root: [adds("#| hide\nx = 1")(root) for _ in range(5)]],
    "there_is_enough_prose": [
        lambda root: [replaces("Prose. ", "", CORE)(root), adds(MIDDLING)(root)],
        many(MIDDLING, 2),
    ],
    "enough_is_shown": [replaces("total = add(1, 2)", "#| hide\\nadd(1, 2)", CORE), many(MIDDLING, 1)],
    "public_names_have_docstrings": [
        adds("#| export\ndef mute(): return 1"),
    ],
    "few_names_are_public": [
        writes(f"{PACKAGE}/core/types.py", "__all__ = [" + "'x', " * (MAX_NAMES + 1) + "]\n"),
        replaces('"The sum."', "", f"{PACKAGE}/core/types.py"),
    ],
    "public_names_have_types": [
        adds("#| export\ndef loose(a) -> int:\n    'One.'\n    return 1"),
        adds("#| export\nclass C:\n    'C.'\n    def loose(self, *args) -> int:\n        'One.'\n        return 1"),
    ],
    "the_words_are_those_of_the_field": [
        adds("#| export\nslope_of = 1"),
        replaces("The numbers.", "Who pushed?", CORE),
    ],
    "no_bad_habits": [
        adds("#| export\nfrom math import *"),
        adds("#| export\n@patch\ndef add(self: int): return 1"),
        adds("#| export\nimport asyncio\ndef go(): asyncio.run(None)"),
    ],
    "readme_is_what_the_index_makes": [
        replaces("A promise.", "A lie.", "nbs/index.ipynb"),
        adds("1", to="index", outputs=[drawn({"image/png": "aGVsbG8="})]),
    ],
    "the_map_lists_every_notebook": [
        lambda root: save(root, "tutorials/201_second", [new_markdown_cell("# second\n\n> Runs.")]),
        lambda root: (root / CORE).unlink(),
        replaces("`core.types`", "`kernel`", "CONTRIBUTING.md"),
    ],
    "links_lead_somewhere": [
        replaces("../core/00_types.ipynb", "../core/00_kernel.ipynb", "nbs/tutorials/101_first.ipynb"),
        writes("CONTRIBUTING.md", "See [rules](RULES.md)."),
    ],
    "no_keys": [
        adds("key = '" + "sk-" + "a1" * 12 + "'"),
        adds("1", outputs=[text_output("fw_" + "a1" * 12)]),
    ],
    "no_widget_state": [
        lambda root: save(root, "core/00_types", PAGES["core/00_types"], widgets={"state": {}}),
        adds(
            "1",
            outputs=[drawn({"application/vnd.jupyter.widget-view+json": {"model_id": "1"}})],
        ),
    ],
    "outputs_are_stable": [
        adds("1", outputs=[text_output("<object object at 0x7f0011223344>")]),
        adds("1", outputs=[{"output_type": "error", "ename": "E", "evalue": "e", "traceback": []}]),
    ],
    "notebooks_are_small": [adds("1", outputs=[text_output("x" * 300_000)])],
    "one_source_of_name_and_version": [
        replaces("__version__ = ", "__version__ = '9' + ", f"{PACKAGE}/__init__.py"),
        replaces('target-version = "py311"', 'target-version = "py312"', "pyproject.toml"),
        replaces("[build-system]", '[project]\nname = "x"\n[build-system]', "pyproject.toml"),
        replaces("# rl_notebook", "# other", "nbs/index.ipynb"),
        lambda root: (root / "nbs" / "_quarto.yml").unlink(),
    ],
    "every_requirement_is_pinned": [
        replaces("torch==", "torch>=", "constraints.txt"),
        replaces("torch==2.13.0", "torch==1.0.0", "constraints.txt"),
        replaces("torch==2.13.0\n", "torch==2.13.0\n--find-links wheels\n", "constraints.txt"),
    ],
}


def test_every_rule_has_something_that_breaks_it():
    assert BREAKS.keys() == RULES.keys()


@pytest.mark.parametrize(
    ("name", "how"),
    [pytest.param(name, how, id=f"{name}-{i}") for name, hows in BREAKS.items() for i, how in enumerate(hows)],
)
def test_a_break_is_noticed(name: str, how: Break, project: Path):
    how(project)
    assert RULES[name](House(project)), f"{name} did not notice"


# --- import-linter, and how pages are made -----------------------------------------------------------------------


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    "Runs lint-imports in a project."
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    env = {**os.environ, "PYTHONPATH": str(root), "NO_COLOR": "1"}
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)


def test_the_import_contracts_can_break(project: Path):
    assert lint_imports(project).returncode == 0
    breaks = [
        ("core.types", f"from {PACKAGE}.insight.xray import add as other", "A folder imports only lower folders"),
        (
            "loop.rollouts",
            f"from {PACKAGE}.backends.local import trainer",
            "Only recipes, the emulator and the command",
        ),
        ("insight.xray", f"from {PACKAGE}.views import charts", "Views are leaves"),
        ("backends.local.trainer", f"from {PACKAGE}.emulator import service", "The emulator is a program of its own"),
    ]
    for module, line, _ in breaks:
        with (project / PACKAGE / f"{module.replace('.', '/')}.py").open("a") as file:
            file.write(line + "\n")
    broken = [line for line in lint_imports(project).stdout.splitlines() if "BROKEN" in line]
    assert [contract for _, _, contract in breaks if not any(contract in line for line in broken)] == []


def test_a_page_shows_what_a_reader_sees(project: Path):
    cells = [
        new_markdown_cell("# x\n\n> y\n\n[core](core/00_types.ipynb#nouns) [web](https://x.org) [up](../A.md)"),
        new_code_cell("#| hide\nsecret = 1", outputs=[text_output("hidden output")]),
        new_code_cell("#| echo: false\nunseen = 2", outputs=[text_output("seen output")]),
        new_code_cell("#| output: false\nseen = 3", outputs=[text_output("unseen output")]),
        new_code_cell("4", outputs=[drawn({"text/html": "<style>x</style>", "text/plain": "four"})]),
        new_code_cell("5", outputs=[drawn({"image/png": "aGVsbG8=", "text/plain": "five"})]),
    ]
    save(project, "index", cells)
    text, pictures = readme(project)
    assert "[core](nbs/core/00_types.ipynb#nouns) [web](https://x.org) [up](A.md)" in text
    assert [word for word in ("seen = 3", "seen output", "four") if word not in text] == []
    assert [word for word in ("secret", "hidden output", "unseen", "<style>", "#|", "five") if word in text] == []
    [(path, data)] = pictures.items()
    assert data == b"hello"
    assert path.startswith("nbs/images/")
    assert f"({path})" in text


def test_a_notebook_that_hangs_ends_the_run_with_its_name(project: Path):
    adds("import time\ntime.sleep(600)", to="insight/00_xray")(project)
    command = [sys.executable, str(ROOT / "tests" / "notebooks.py"), "--n_workers", "2"]
    env = {**os.environ, "RL_NOTEBOOK_PAGE_LIMIT": "4", "PYTHONPATH": str(project)}
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert "00_xray.ipynb: not done after 4 s" in done.stderr
    assert "in run_code" in done.stderr  # where each thread stood


def test_links_move_with_their_page():
    assert relink('<img src="images/a.png"> [x](#here) [y](mailto:a@b.c)', "nbs") == (
        '<img src="nbs/images/a.png"> [x](#here) [y](mailto:a@b.c)'
    )


def test_every_pinned_version_installs_on_the_lowest_python():
    "Debian's Python 3.11 is 3.11.2: a pin that wants 3.11.5 would end `make setup` there."
    lowest = re.search(r"^min_python = (\S+)", (ROOT / "settings.ini").read_text(), re.MULTILINE)[1] + ".0"
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    installed = {d.metadata["Name"]: d for d in importlib.metadata.distributions()}
    known = {name: d for name, d in installed.items() if pins.get(name) == d.version}
    assert len(known) > 100
    wanted = {f"{name}=={pins[name]}": d.metadata["Requires-Python"] or "" for name, d in known.items()}
    assert {pin: python for pin, python in wanted.items() if not SpecifierSet(python).contains(lowest)} == {}
