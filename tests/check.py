"""Checks one notebook: lint, the types of its module, the notebook itself, and the tests of its module.

`make check NB=nbs/core/09_losses.ipynb`, after `make prep`. `make test` checks everything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST_IMPORTING = 3  # files of tests; a module that more of them import is checked by `make test`


def module_of(notebook: Path) -> str:
    "The module that a notebook exports: `rl_notebook.core.losses` of `nbs/core/09_losses.ipynb`."
    parts = notebook.with_suffix("").relative_to("nbs").parts
    return ".".join(["rl_notebook", *(re.sub(r"^\d+_", "", part) for part in parts)])


def singular(module: str) -> str:
    "The name of a module without its plural: `loss` of `rl_notebook.core.losses`."
    return re.sub(r"e?s$", "", module.rpartition(".")[2])


def tests_of(module: str) -> list[Path]:
    "Test files that have the module's name in theirs; where none has, those that import it if they are few."
    files = sorted((ROOT / "tests").glob("test_*.py"))
    named = [file for file in files if re.match(rf"test_{singular(module)}(e?s)?[._]", file.name)]
    if named:
        return named
    importing = [file for file in files if re.search(rf"\b{module}\b", file.read_text())]
    return importing if len(importing) <= MOST_IMPORTING else []


def run(*command: str | Path) -> None:
    "Run a program of the environment; end with its exit code if it fails."
    name, *arguments = map(str, command)
    print("+", name, *arguments, flush=True)
    program = str(Path(sys.executable).parent / name)
    result = subprocess.run(
        [program, *arguments], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if result.returncode:
        sys.exit(result.returncode)


def check(notebook: Path) -> None:
    "Run all checks of one notebook."
    module = module_of(notebook)
    source = Path(*module.split(".")).with_suffix(".py")
    run("ruff", "check", notebook)
    run("ruff", "format", "--check", notebook)
    if (ROOT / source).exists():  # tutorials export nothing
        run("pyright", source)
    run("python", "tests/notebooks.py", "--n_workers", "1", "--path", notebook)
    tests = [file.relative_to(ROOT) for file in tests_of(module)]
    word = re.compile(rf"(^|_){singular(module)}(e?s)?(_|$)")
    golden = (ROOT / "tests" / "golden").glob("*.json")
    recorded = sorted(file.stem for file in golden if word.search(file.stem))
    if tests:
        run("pytest", "-q", "-p", "no:cacheprovider", *tests)
    if recorded:
        run(
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "tests/test_golden.py",
            "-k",
            " or ".join(recorded),
        )
    if not tests and not recorded:
        print(f"No test file is about {module} alone: `make test` has its tests.")


if __name__ == "__main__":
    notebooks = [Path(os.path.relpath(name, ROOT)) for name in sys.argv[1:]]
    wrong = [str(path) for path in notebooks if path.parts[0] != "nbs" or not path.is_file()]
    if wrong or not notebooks:
        sys.exit(
            f"make check: got NB={' '.join(wrong) or 'nothing'}; expected NB=nbs/folder/NN_name.ipynb"
        )
    for notebook in notebooks:
        check(notebook)
