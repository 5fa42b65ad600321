"""The rules of the project, each a function from a project folder to the list of places that break it.

`test_house.py` applies them to this checkout.
"""

from __future__ import annotations

import ast
import contextlib
import configparser
import copy
import filecmp
import json
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nbdev.clean import clean_nb
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pages import LINK, LOCAL, directives, readme

PACKAGE = "rl_notebook"
INDEX = "_modidx.py"  # of nbdev: made with every export, not kept
CLOSING = "What you can change here"


NETWORK = {
    "aiohttp",
    "ftplib",
    "http",
    "httpx",
    "requests",
    "smtplib",
    "socket",
    "ssl",
    "urllib",
    "urllib3",
    "websockets",
}
NETWORK |= {
    "datasets",
    "fireworks",
    "huggingface_hub",
    "openai",
    "starlette",
    "tinker",
    "trackio",
    "uvicorn",
    "wandb",
}
DISPLAY = {"IPython", "anywidget", "ipywidgets", "matplotlib", "plotly", "rich", "tqdm"}
TORCH = {"accelerate", "peft", "safetensors", "torch", "transformers", "trl"}


# floor of the folder, folder, number in it: what a notebook may import stands lower
Place = tuple[int, str, int]

# --- reading a project ------------------------------------------------------------------------------------------


def parsed(text: str, where: str) -> ast.Module:
    """Code as a tree.

    CPython 3.11 counts the depth of all threads in one number, so a thread that formats a traceback in between (a
    client whose service has ended logs one now and then) can change the count: then it is counted again."""
    for _ in range(4):
        with contextlib.suppress(SystemError):
            return compile(text, where, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)  # type: ignore
    return compile(text, where, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)  # type: ignore


@dataclass(frozen=True)
class Cell:
    "One cell of a notebook."

    where: str  # notebook and position, for messages
    kind: str  # "code" or "markdown"
    source: str
    outputs: tuple[dict[str, Any], ...] = ()

    @cached_property
    def marks(self) -> set[str]:
        "Its directives."
        return directives(self.source) if self.kind == "code" else set()

    @property
    def exported(self) -> bool:
        "Whether it goes into the module."
        return any(mark.split()[0] in ("export", "exporti", "exports") for mark in self.marks)

    @cached_property
    def tree(self) -> ast.Module:
        "Its code; magics and shell lines count as blank."
        text = "\n".join(
            "" if line.lstrip().startswith(("%", "!")) else line
            for line in self.source.splitlines()
        )
        return parsed(text, self.where)

    @property
    def output_text(self) -> str:
        "What its stored outputs show, as one text."
        return json.dumps(
            [{k: v for k, v in out.items() if k != "metadata"} for out in self.outputs],
            ensure_ascii=False,
        )


@dataclass(frozen=True)
class Notebook:
    "A notebook and what its name says."

    path: Path
    raw: dict[str, Any]

    @cached_property
    def cells(self) -> list[Cell]:
        "Its cells in order."
        return [
            Cell(
                f"{self.name} cell {i}",
                c["cell_type"],
                "".join(c["source"]),
                tuple(c.get("outputs", ())),
            )
            for i, c in enumerate(self.raw["cells"])
        ]

    @property
    def name(self) -> str:
        "Its path below nbs/."
        return f"{self.folder}/{self.path.name}".lstrip("/")

    @cached_property
    def folder(self) -> str:
        "Its folder below nbs/, with slashes."
        return self.path.parent.as_posix().rpartition("/nbs")[2].strip("/")

    @cached_property
    def numbered(self) -> tuple[int, str] | None:
        "Number and module of `folder/NN_name.ipynb`; None for the index and the tutorials."
        match = re.fullmatch(r"(\d\d)_([a-z_][a-z_0-9]*)", self.path.stem)
        if match is None or self.folder == "tutorials":
            return None
        return int(match[1]), ".".join([*filter(None, self.folder.split("/")), match[2]])

    @property
    def exported(self) -> list[Cell]:
        "The cells that go into the module."
        return [cell for cell in self.cells if cell.exported]


@dataclass(frozen=True)
class House:
    "A project folder."

    root: Path

    @cached_property
    def notebooks(self) -> list[Notebook]:
        "All notebooks, tutorials included."
        return [
            Notebook(path, json.loads(path.read_text(encoding="utf-8")))
            for path in notebooks(self.root)
        ]

    @cached_property
    def folders(self) -> list[str]:
        "The folders of the package, lowest first: the layers that lint-imports checks."
        contracts = self.pyproject["tool"]["importlinter"]["contracts"]
        [layers] = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
        return [layer.strip("()").removeprefix(f"{PACKAGE}.") for layer in reversed(layers)]

    @cached_property
    def modules(self) -> list[tuple[Place, str, Notebook]]:
        "Place, module and notebook of those that export, lowest first."
        results = []
        for nb in self.notebooks:
            if nb.numbered:
                number, module = nb.numbered
                top = module.split(".")[0]
                floor = self.folders.index(top) if top in self.folders else len(self.folders)
                results.append(((floor, nb.folder, number), module, nb))
        return sorted(results, key=lambda entry: entry[0])

    @cached_property
    def places(self) -> dict[str, Place]:
        "The place of each module."
        return {module: place for place, module, _ in self.modules}

    @property
    def package(self) -> Path:
        "The exported package."
        return self.root / PACKAGE

    def text(self, name: str) -> str:
        "A text file of the project; empty when there is none."
        path = self.root / name
        return path.read_text(encoding="utf-8") if path.exists() else ""

    @cached_property
    def settings(self) -> configparser.SectionProxy:
        "settings.ini."
        config = configparser.ConfigParser(delimiters=["="])
        config.read_string(self.text("settings.ini"))
        return config["DEFAULT"]

    @cached_property
    def pyproject(self) -> dict[str, Any]:
        "pyproject.toml."
        return tomllib.loads(self.text("pyproject.toml"))

    def python_files(self) -> list[Path]:
        "What nbdev exported."
        names = ("__init__.py", INDEX)
        return sorted(path for path in self.package.rglob("*.py") if path.name not in names)


def notebooks(root: Path) -> list[Path]:
    "All notebooks of a checkout, in order; not Jupyter's checkpoints of them."
    return sorted(
        p for p in (root / "nbs").rglob("*.ipynb") if not any(x.startswith(".") for x in p.parts)
    )


def imported(tree: ast.AST) -> Iterator[str]:
    "Dotted names of everything that is imported anywhere in the code, `import_module('...')` included."
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "__import__")
        ):
            yield from (
                a.value
                for a in node.args[:1]
                if isinstance(a, ast.Constant) and isinstance(a.value, str)
            )


def package_imports(house: House) -> Iterator[tuple[Place, Cell, Place, str]]:
    "Every import of a module of the package: place of the importer, cell, place and name of the imported."
    for place, _, nb in house.modules:
        for cell in (cell for cell in nb.cells if cell.kind == "code"):
            for name in set(imported(cell.tree)):
                parts = name.split(".")
                if parts[0] != PACKAGE:
                    continue
                tails = [".".join(parts[1:end]) for end in range(len(parts), 1, -1)]
                if module := next((tail for tail in tails if tail in house.places), None):
                    yield place, cell, house.places[module], module


# --- rules ------------------------------------------------------------------------------------------------------

Rule = Callable[[House], list[str]]
RULES: dict[str, Rule] = {}


def rule(check: Rule) -> Rule:
    "Adds a rule to the list that the project is held to."
    RULES[check.__name__] = check
    return check


@rule
def a_fresh_export_leaves_no_diff(house: House) -> list[str]:
    "rl_notebook/ is what the notebooks export: nothing edited by hand, nothing forgotten."
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "project"
        copy.mkdir()
        for name in ("settings.ini", "pyproject.toml"):
            shutil.copy(house.root / name, copy / name)
        shutil.copytree(house.root / "nbs", copy / "nbs", symlinks=True)
        # nbdev makes one where there is none, and leaves those that exist
        for init in house.package.rglob("__init__.py"):
            (copy / init.relative_to(house.root)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(init, copy / init.relative_to(house.root))
        export = [str(Path(sys.executable).parent / "nbdev_export")]
        done = subprocess.run(export, cwd=copy, capture_output=True, text=True, check=False)
        if done.returncode:
            return [f"nbdev_export failed: {(done.stderr or done.stdout).strip()[-500:]}"]
        fresh = {
            str(path.relative_to(copy / PACKAGE)) for path in (copy / PACKAGE).rglob("*.py")
        } - {INDEX}
        stored = {str(path.relative_to(house.package)) for path in house.package.rglob("*.py")} - {
            INDEX
        }
        _, differing, _ = filecmp.cmpfiles(
            copy / PACKAGE, house.package, sorted(fresh & stored), shallow=False
        )
    return (
        [f"{PACKAGE}/{name} differs from its notebook: run make prep" for name in differing]
        + [f"{PACKAGE}/{name} is missing: run make prep" for name in sorted(fresh - stored)]
        + [f"{PACKAGE}/{name} is exported by no notebook" for name in sorted(stored - fresh)]
    )


@rule
def a_notebook_is_named_after_its_module(house: House) -> list[str]:
    "`folder/NN_name` exports `folder.name`; no number twice in a folder; the index and the tutorials do not."
    problems = []
    seen = dict[tuple[str, int], str]()
    for nb in house.notebooks:
        exports = [
            mark.split()[-1]
            for cell in nb.cells
            for mark in cell.marks
            if mark.startswith("default_exp")
        ]
        if nb.numbered is None:
            if exports or nb.exported:
                problems.append(f"{nb.name} exports; only nbs/folder/NN_name.ipynb may")
            if nb.folder != "tutorials" and nb.path.stem != "index":
                problems.append(f"{nb.name}: expected nbs/folder/NN_name.ipynb")
            continue
        number, module = nb.numbered
        if exports != [module]:
            problems.append(f"{nb.name}: default_exp is {exports}, expected {[module]}")
        if (nb.folder, number) in seen:
            problems.append(f"{nb.name} and {seen[nb.folder, number]} share a number")
        seen[nb.folder, number] = nb.name
    return problems


@rule
def numbers_only_go_down(house: House) -> list[str]:
    """A notebook imports lower folders, and lower numbers of its folder; what is not exported may import its own module.

    Examples on the pages of insight and of the loop use the whole loop, which is on a later page, and those of the
    contract of a backend use the local backend. The loop's methods
    `serve`, `to_config`, `to_script` and `to_trainer` hand it to a higher folder when they are called."""

    def is_allowed(cell, module):
        uses_loop = cell.where.startswith(("insight/", "loop/")) and module.startswith("loop.")
        hands_over = cell.where.startswith("loop/11_loop") and module in HANDED_TO
        uses_local = cell.where.startswith("backends/03_contract") and "backends.local" in module
        return ((uses_loop or uses_local) and not cell.exported) or hands_over

    return [
        f"{cell.where} imports {module} ({there})"
        for here, cell, there, module in package_imports(house)
        if (there > here and not is_allowed(cell, module)) or (cell.exported and there == here)
    ]


HANDED_TO = (
    "agents.serve",
    "recipes.script",
    "recipes.to_trainer",
)  # modules that methods of the loop call


@rule
def core_is_pure(house: House) -> list[str]:
    "Core knows no network, no display, and outside the losses no torch."
    problems = []
    for _, module, nb in house.modules:
        if not module.startswith("core."):
            continue
        banned = NETWORK | DISPLAY | (set() if module in ("core.losses", "core.builtin") else TORCH)
        for cell in nb.exported:
            roots = {name.split(".")[0] for name in imported(cell.tree)}
            problems += [f"{cell.where} imports {root}" for root in sorted(roots & banned)]
    return problems


@rule
def the_layers_name_every_folder(house: House) -> list[str]:
    "The layers that lint-imports checks are the folders of the package."
    tops = sorted({module.split(".")[0] for _, module, _ in house.modules})
    return [
        f"pyproject.toml: no layer for {PACKAGE}.{top}" for top in tops if top not in house.folders
    ]


@rule
def a_notebook_reads_as_a_page(house: House) -> list[str]:
    "`# Name`, `> promise`; a module's notebook ends with what the reader can change."
    problems = []
    for nb in house.notebooks:
        first = nb.cells[0] if nb.cells else Cell(nb.name, "markdown", "")
        if first.kind != "markdown" or not re.match(r"# \S.*\n\s*\n> \S", first.source):
            problems.append(
                f"{nb.name} does not begin with '# Name', a blank line and '> one-line promise'"
            )
        headings = [
            h
            for c in nb.cells
            if c.kind == "markdown"
            for h in re.findall(r"^## +(.+?)\s*$", c.source, re.M)
        ]
        if nb.numbered and (not headings or headings[-1] != CLOSING):
            problems.append(f"{nb.name} does not end with '## {CLOSING}'")
    return problems


@rule
def a_page_is_named_after_its_module(house: House) -> list[str]:
    "The H1 of a module's page is the module, or the end of its dotted name."
    problems = []
    for _, module, nb in house.modules:
        title = nb.cells[0].source.splitlines()[0].removeprefix("# ") if nb.cells else ""
        if not f".{module}".endswith(f".{title}"):
            problems.append(
                f"{nb.name}: the title is {title!r}; expected {module!r} or the end of it"
            )
    return problems


@rule
def module_docstrings_are_sentences(house: House) -> list[str]:
    "The docstring of a module is the promise of its page: one line, so that nbdev takes it whole."
    problems = []
    for path in house.python_files():
        docstring = ast.get_docstring(parsed(path.read_text(encoding="utf-8"), str(path))) or ""
        if not docstring.endswith((".", "?")):
            problems.append(
                f"{path.relative_to(house.root)}: the docstring does not end a sentence: {docstring!r}"
            )
    return problems


def definitions(
    tree: ast.Module,
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    "Public functions, classes, and the public methods of those, by dotted name."
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in tree.body:
        if not isinstance(node, kinds) or node.name.startswith("_"):
            continue
        yield node.name, node
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, kinds) and not inner.name.startswith("_"):
                    yield f"{node.name}.{inner.name}", inner


def _decorators(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> set[str]:
    return {ast.unparse(d).split("(")[0].split(".")[-1] for d in node.decorator_list}


@rule
def public_names_have_docstrings(house: House) -> list[str]:
    "Every public function, class and method says what it is."
    return [
        f"{cell.where}: {name} has no docstring"
        for _, _, nb in house.modules
        for cell in nb.exported
        for name, node in definitions(cell.tree)
        if not ast.get_docstring(node) and not _decorators(node) & {"overload", "setter"}
    ]


@rule
def public_names_have_types(house: House) -> list[str]:
    "Every public function and method is annotated: what it takes and what it returns."
    problems = []
    for cell in (cell for _, _, nb in house.modules for cell in nb.exported):
        for name, node in definitions(cell.tree):
            if isinstance(node, ast.ClassDef):
                continue
            args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            args += [a for a in (node.args.vararg, node.args.kwarg) if a]
            bare = [a.arg for a in args if a.annotation is None and a.arg not in ("self", "cls")]
            if not node.returns:
                bare += ["its result"]
            if bare:
                problems += [f"{cell.where}: {name} does not give the type of {', '.join(bare)}"]
    return problems


STARTERS = {"recipes", "agents", "cli"}  # what may start an event loop


def _habit(node: ast.AST, module: str) -> str | None:
    "What is wrong with a node of an exported cell of this module's notebook."
    match node:
        case ast.ImportFrom(level=level) if level:
            return "a relative import"
        case ast.ImportFrom(names=names) if any(alias.name == "*" for alias in names):
            return "a star import"
        case ast.Name(id="__file__"):
            return "__file__, which a cell does not have"
        case ast.FunctionDef() | ast.AsyncFunctionDef() if _decorators(node) & {
            "patch",
            "patch_to",
        }:
            return "@patch"
        case ast.Call() if (
            ast.unparse(node.func) == "asyncio.run" and module.split(".")[0] not in STARTERS
        ):
            return "asyncio.run, which breaks inside a running notebook"
    return None


@rule
def no_bad_habits(house: House) -> list[str]:
    "No `@patch`, no star imports, no relative imports, no `__file__`; only recipes and the command line start a loop."
    return [
        f"{cell.where} uses {habit}"
        for _, module, nb in house.modules
        for cell in nb.exported
        for node in ast.walk(cell.tree)
        if (habit := _habit(node, module))
    ]


@rule
def readme_is_what_the_index_makes(house: House) -> list[str]:
    "README.md and its pictures are made from nbs/index.ipynb."
    text, pictures = readme(house.root)
    stale = [] if house.text("README.md") == text else ["README.md"]
    for path, data in pictures.items():
        stored = house.root / path
        if not (stored.exists() and stored.read_bytes() == data):
            stale += [path]
    return [f"{name} is not what nbs/index.ipynb makes: run make prep" for name in stale]


@rule
def links_lead_somewhere(house: House) -> list[str]:
    "Links to files of the project, in notebooks and in the pages at the top, lead to files that exist."
    pages = [
        (name, posixpath.dirname(name), house.text(name))
        for name in (
            "README.md",
            "CONTRIBUTING.md",
            "CHANGELOG.md",
            "docs/modules.md",
            "docs/recipes.md",
        )
    ]
    for nb in house.notebooks:
        folder = nb.path.parent.relative_to(house.root).as_posix()
        pages += [(cell.where, folder, cell.source) for cell in nb.cells if cell.kind == "markdown"]
    problems = []
    for where, folder, text in pages:
        text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
        for _, target in LINK.findall(text):
            path = posixpath.normpath(posixpath.join(folder, target.partition("#")[0]))
            if LOCAL.match(target) and not (house.root / path).exists():
                problems.append(f"{where} links {target}, which does not exist")
    return problems


SECRET = re.compile(
    r"\b(?:sk-[A-Za-z0-9_-]{16,}|fw_[A-Za-z0-9]{16,}|fpk_[A-Za-z0-9]{16,}|hf_[A-Za-z0-9]{20,}|tml-[A-Za-z0-9_-]{16,}"
    r"|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16}|Bearer [A-Za-z0-9._-]{20,})"
)


@rule
def no_keys(house: House) -> list[str]:
    "Nothing that looks like a key in notebooks, their exports and the README."
    texts = {nb.name: json.dumps(nb.raw) for nb in house.notebooks} | {
        "README.md": house.text("README.md")
    }
    texts |= {
        str(path.relative_to(house.root)): path.read_text(encoding="utf-8")
        for path in house.python_files()
    }
    result = {name: SECRET.search(text) for name, text in texts.items()}
    return [f"{name} holds what looks like a key: {m[0][:6]}..." for name, m in result.items() if m]


@rule
def no_widget_state(house: House) -> list[str]:
    "Stored widgets are megabytes that show nothing outside a live kernel."
    problems = [
        f"{nb.name} stores widget state"
        for nb in house.notebooks
        if "widgets" in nb.raw.get("metadata", {})
    ]
    return problems + [
        f"{cell.where} stores a live widget: store text, static HTML or a picture"
        for nb in house.notebooks
        for cell in nb.cells
        if any(
            "application/vnd.jupyter.widget" in mime
            for out in cell.outputs
            for mime in out.get("data", {})
        )
    ]


@rule
def cleaning_changes_nothing(house: House) -> list[str]:
    "`make prep` on a clean tree leaves every notebook as it is: none stores what nbdev_clean takes away."
    problems = []
    for nb in house.notebooks:
        cleaned = copy.deepcopy(nb.raw)
        clean_nb(cleaned, clean_ids=False)
        if cleaned != nb.raw:
            problems += [f"{nb.name} stores what nbdev_clean takes away: run make prep"]
    return problems


UNSTABLE = {
    "an address in memory": re.compile(r"\bat 0x[0-9a-fA-F]{6,}"),
    "a path of one machine": re.compile(
        r"(?<![\w.:/])/(?:home|root|Users|tmp|private|var/folders|work|opt)/[\w.-]+"
    ),
    "a timing": re.compile(r"\d+(?:\.\d+)?\s?(?:it/s|s/it)\b|\bWall time:"),
}


@rule
def outputs_are_stable(house: House) -> list[str]:
    "Stored outputs hold nothing that changes from machine to machine or from run to run, and no traceback."
    problems = []
    for cell in (cell for nb in house.notebooks for cell in nb.cells if cell.outputs):
        problems += [
            f"{cell.where} stores {what}"
            for what, sign in UNSTABLE.items()
            if sign.search(cell.output_text)
        ]
        if any(out["output_type"] == "error" for out in cell.outputs):
            problems.append(f"{cell.where} stores a traceback")
    return problems


@rule
def one_source_of_name_and_version(house: House) -> list[str]:
    "What settings.ini says is repeated nowhere, or repeated exactly."
    s = house.settings
    project = house.pyproject
    tools = project["tool"]
    version = s["version"]
    python = s["min_python"]
    init = re.search(
        r"__version__ = [\"'](.+?)[\"']",
        (house.package / "__init__.py").read_text(encoding="utf-8"),
    )
    newest = re.search(r"^## (\S+)", house.text("CHANGELOG.md"), re.M)
    facts = {
        f"{PACKAGE}/__init__.py, __version__": (init and init[1], version),
        "CHANGELOG.md, first heading": (newest and newest[1], version),
        "pyproject.toml, ruff's target-version": (
            project["tool"]["ruff"]["target-version"],
            f"py{python.replace('.', '')}",
        ),
        "pyproject.toml, pyright's pythonVersion": (tools["pyright"]["pythonVersion"], python),
        "pyproject.toml, pyright's include": (tools["pyright"]["include"], [s["lib_path"]]),
        "pyproject.toml, import-linter's root_package": (
            project["tool"]["importlinter"]["root_package"],
            s["lib_path"],
        ),
        "pyproject.toml, [project]": (project.get("project"), None),
        "nbs/index.ipynb, title": (_title(house), s["title"]),
    }
    problems = [
        f"{what}: {got!r}, settings.ini says {want!r}"
        for what, (got, want) in facts.items()
        if got != want
    ]
    site = house.text("_quarto.yml")
    problems += [
        f"_quarto.yml repeats {key} (nbdev writes it)" for key in ("title:", "-url:") if key in site
    ]
    link = house.root / "nbs" / "_quarto.yml"
    if not link.exists() or link.resolve() != (house.root / "_quarto.yml").resolve():
        problems.append("nbs/_quarto.yml is not a link to _quarto.yml")
    return problems


def _title(house: House) -> str | None:
    index = next((nb for nb in house.notebooks if nb.path.stem == "index"), None)
    return (
        index.cells[0].source.splitlines()[0].removeprefix("# ") if index and index.cells else None
    )


@rule
def every_requirement_is_pinned(house: House) -> list[str]:
    "constraints.txt pins each requirement to one version within its range, and names no machine and no index."
    lines = [
        line
        for line in house.text("constraints.txt").splitlines()
        if line and not line.startswith("#")
    ]
    pin = re.compile(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)")
    problems = [
        f"constraints.txt: {line!r} is not name==version"
        for line in lines
        if not pin.fullmatch(line)
    ]
    pins = {canonicalize_name(m[1]): m[2] for m in map(pin.fullmatch, lines) if m}
    if len(pins) + len(problems) != len(lines):
        problems.append("constraints.txt pins a name twice")
    for key, value in house.settings.items():
        for need in map(Requirement, value.split() if key.endswith("requirements") else []):
            version = pins.get(canonicalize_name(need.name))
            if version is None:
                problems.append(f"constraints.txt does not pin {need.name} ({key})")
            elif not need.specifier.contains(version, prereleases=True):
                problems.append(f"constraints.txt pins {need.name}=={version}, {key} says {need}")
    return problems
