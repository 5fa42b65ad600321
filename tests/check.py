"""Checks notebooks: lint, the types of their modules, the notebooks themselves, and the tests of their modules.

`make check`, after `make prep`, checks those that differ from the last commit, `make check NB=nbs/core/09_losses.ipynb`
the named ones. `make test` checks everything."""

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


def golden_names(module: str) -> list[str]:
    "The recorded inputs and outputs that have the module's name in theirs."
    word = re.compile(rf"(^|_){singular(module)}(e?s)?(_|$)")
    golden = (ROOT / "tests" / "golden").glob("*.json")
    return sorted(file.stem for file in golden if word.search(file.stem))


def changed_notebooks() -> list[Path]:
    "Notebooks that differ from the last commit, or that git does not know yet."
    changed = ["git", "diff", "--name-only", "--diff-filter=d", "HEAD", "--", "nbs"]
    new = ["git", "ls-files", "--others", "--exclude-standard", "--", "nbs"]
    lines = [
        line
        for command in (changed, new)
        for line in subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    ]
    return [Path(line) for line in sorted(lines) if line.endswith(".ipynb")]


def check(notebooks: list[Path]) -> None:
    "Run all checks of these notebooks, the quick ones first."
    modules = [module_of(notebook) for notebook in notebooks]
    sources = [Path(*module.split(".")).with_suffix(".py") for module in modules]
    exported = [
        source for source in sources if (ROOT / source).exists()
    ]  # tutorials export nothing
    run("ruff", "check", *notebooks)
    run("ruff", "format", "--check", *notebooks)
    if exported:
        run("pyright", *exported)
    for notebook in notebooks:
        run("python", "tests/notebooks.py", "--n_workers", "1", "--path", notebook)
    pytest = ("pytest", "-q", "-p", "no:cacheprovider")
    tests = {file.relative_to(ROOT): None for module in modules for file in tests_of(module)}
    recorded = {name: None for module in modules for name in golden_names(module)}
    if tests:
        run(*pytest, *tests)
    if recorded:
        run(*pytest, "tests/test_golden.py", "-k", " or ".join(recorded))
    for module in modules:
        if not tests_of(module) and not golden_names(module):
            print(f"No test file is about {module} alone: `make test` has its tests.")


if __name__ == "__main__":
    notebooks = [Path(os.path.relpath(name, ROOT)) for name in sys.argv[1:]] or changed_notebooks()
    wrong = [str(path) for path in notebooks if path.parts[0] != "nbs" or not path.is_file()]
    if wrong:
        sys.exit(f"make check: got NB={' '.join(wrong)}; expected NB=nbs/folder/NN_name.ipynb")
    if not notebooks:
        sys.exit(
            "make check: no notebook differs from the last commit; name one: NB=nbs/folder/NN_name.ipynb"
        )
    check(notebooks)
