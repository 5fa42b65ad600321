"""Writes what Sphinx reads, from the notebooks.

python docs/sources.py _proc/site && sphinx-build -c docs _proc/site _docs

Every notebook becomes a page as a reader sees it, with the names of the package linked to their signatures. The sidebar
has a start page and one page per section of `_quarto.yml`, which lists the pages of the section; the titles are from
there, too. One page per module lists its public names, one all settings; the gallery is cut from the notebooks.
"""

from __future__ import annotations

import ast
import configparser
import json
import posixpath
import re
import shutil
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import nbformat
import yaml
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from pages import LINK, LOCAL, visible

# pages at the top of the checkout; the examples' come with them
EXTRA = ("CONTRIBUTING.md", "CHANGELOG.md", "AGENTS.md")
# for those who change the package: pages of the section Reference
CONTRIBUTOR_PAGES = ("docs/modules.md", "docs/recipes.md", "docs/testing.md")
HUBS = {  # the sections of `_quarto.yml` that are one entry of the sidebar: their pages, and what they hold
    "Your own task": (
        "task.md",
        "Rows, rewards, losses, advantages, tools, environments, and runs in a script.",
    ),
    "Look into a step": (
        "look.md",
        "Dashboard, x-ray, token inspector, what-if, doctor, replay, reports and charts.",
    ),
    "Other trainers and machines": (
        "machines.md",
        "Services, servers and GPUs; runs of TRL and of other trainers.",
    ),
    "Reference": ("reference.md", "The command line, every setting, and the modules one by one."),
}
EXTRA_LINKS = {  # pages that are no notebooks
    "Your own task": ["- [Examples](/examples/README.md): scripts and task folders that run."],
    "Reference": [
        "- [All settings](/settings.md)",
        "- [Names and signatures](/api/index.md)",
        "- [Modules](/docs/modules.md): every module and page in reading order.",
        "- [Recipes](/docs/recipes.md): adding an estimator, a loss, a backend or a setting.",
        "- [Test environments](/docs/testing.md): oldest versions, a vLLM server, a browser.",
    ],
}
FIRST = 4  # tutorials of the section Start that the start page names
# `name`, `rln.name` or `name()`
CODE_SPAN = re.compile(r"(?<![`\w{}])`(?:rln\.|loop\.)?([A-Za-z_]\w*)(?:\(\))?`(?!`)")

# The gallery: what is seen, and where: the notebook, and how the text above the picture begins.
FAULTS = (
    "Off by one",
    "Another temperature",
    "Top-p",
    "Stale weights",
    "Another prompt",
    "Half precision",
)
GALLERY: dict[str, list[tuple[str, str, str]]] = {
    "A step explains itself": [
        ("A step that went well", "insight/00_xray.ipynb", "## A step to look at"),
        (
            "Samples two syncs old",
            "insight/00_xray.ipynb",
            "The same step with samples that are two",
        ),
        (
            "Before the first step",
            "experiments/03_preflight.ipynb",
            "In a notebook the same is shown as HTML. Here with",
        ),
    ],
    "Trainer and sampler disagree": [
        (fault, "tutorials/102_reading_logprobs.ipynb", f"### {fault}\n") for fault in FAULTS
    ],
}


@dataclass(frozen=True)
class Checkout:
    "A checkout, and the place of each of its pages on the site."

    root: Path
    url: str  # of files that are no page, up to and with the slash before their path

    @classmethod
    def of(cls, root: Path) -> Checkout:
        "The site of a checkout."
        config = configparser.ConfigParser(delimiters=["="])
        config.read(root / "settings.ini", encoding="utf-8")
        return cls(root, f"{config['DEFAULT']['git_url']}/blob/{config['DEFAULT']['branch']}/")

    def notebooks(self) -> list[Path]:
        "All notebooks, in order."
        return sorted(
            p
            for p in (self.root / "nbs").rglob("*.ipynb")
            if not any(x.startswith(".") for x in p.parts)
        )

    @cached_property  # every page asks for it, and the file is long
    def sidebar(self) -> list[tuple[str, dict[str, str]]]:  # (caption, titles by page below nbs/)
        "The sections of `_quarto.yml`, with what their pages are called on the site."
        config = yaml.safe_load((self.root / "_quarto.yml").read_text(encoding="utf-8"))
        sections = [
            entry
            for entry in config["website"]["sidebar"]["contents"]
            if not isinstance(entry, str)
        ]
        return [
            (entry["section"], {p["href"]: p["text"] for p in entry["contents"]})
            for entry in sections
        ]

    def titles(self) -> dict[str, str]:
        "What each page is called."
        return {page: title for _, pages in self.sidebar for page, title in pages.items()}

    def place(self, path: str) -> str | None:
        "Where a file of the checkout stands on the site; `None` if it is no page and no picture."
        if path.startswith("nbs/") and path.endswith((".ipynb", ".png", ".webp", ".svg")):
            return path.removeprefix("nbs/")
        if path in (*EXTRA, *CONTRIBUTOR_PAGES) or (
            path.startswith("examples/") and path.endswith(("README.md", ".svg"))
        ):
            return path
        return "index.ipynb" if path == "README.md" else None

    def relink(self, text: str, page: str) -> str:  # page: its path in the checkout
        "The text with links between files of the checkout made links of the site, or of the repository."
        at = posixpath.dirname(self.place(page) or "")

        def moved(match: re.Match[str]) -> str:
            before, target = match.groups()
            if not LOCAL.match(target):
                return match[0]
            path, anchor, rest = target.partition("#")
            path = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
            place = self.place(path)
            if place is not None and not before.endswith("("):
                # HTML is not Sphinx's to resolve
                place = re.sub(r"(\.ipynb|\.md)$", ".html", place)
            return (
                before
                + (self.url + path if place is None else posixpath.relpath(place, at or "."))
                + anchor
                + rest
            )

        return LINK.sub(moved, text)


def exported(path: Path) -> list[str]:
    "What a module exports: its `__all__`, read without importing it."
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return sorted(ast.literal_eval(node.value), key=str.lower)
    return []


def public_names(root: Path) -> dict[str, str]:
    "Every public name and the module that exports it, for example `{'Config': 'rl_notebook.config.config'}`."
    result: dict[str, str] = {}
    for path in sorted((root / "rl_notebook").rglob("*.py")):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        if not path.name.startswith("_"):
            result = (
                dict.fromkeys(exported(path), module) | result
            )  # the first home of a name counts
    return result


def linked(text: str, names: dict[str, str]) -> str:
    "Markdown in which the first mention of each public name leads to its signature; headings and code blocks stay."
    seen: set[str] = set()

    def link(match: re.Match[str]) -> str:
        name = match[1]
        if name not in names or name in seen:
            return match[0]
        seen.add(name)
        return f"{{py:obj}}`{match[0].strip('`')} <{names[name]}.{name}>`"

    lines = []
    fenced = False
    for line in text.splitlines():
        fenced ^= line.lstrip().startswith("```")
        skip = fenced or line.startswith("#") or "](" in line
        lines.append(line if skip else CODE_SPAN.sub(link, line))
    return "\n".join(lines)


def head(module: str, public: bool, url: str) -> str:
    "The line below a page's promise: where the names are listed, if there are any, and where the notebook is."
    names = f"[names and signatures](/api/{module}.md)" if public else "no public names"
    return f"Module `{module}`: {names}, [notebook]({url})"


def module_of(nb: NotebookNode) -> str | None:
    "The module that a notebook exports."
    for cell in nb.cells:
        if matches := re.search(r"^#\|\s*default_exp\s+(\S+)", cell.source, re.MULTILINE):
            return f"rl_notebook.{matches[1]}"
    return None


def only_imports(source: str) -> bool:
    "Whether a cell has nothing but imports, which a page folds."
    try:
        result = ast.parse(source).body
    except SyntaxError:  # an `await`, or a command of IPython
        return False
    return bool(result) and all(isinstance(node, ast.Import | ast.ImportFrom) for node in result)


def write_notebook(site: Checkout, path: Path, target: Path, names: dict[str, str]) -> None:
    "One notebook as a page."
    raw = nbformat.read(path, as_version=4)
    name = path.relative_to(site.root).as_posix()
    module = module_of(raw)
    nb = visible(raw)
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            cell.source = linked(site.relink(cell.source, name), names)
    if title := site.titles().get(name.removeprefix("nbs/")):
        nb.cells[0].source = re.sub(r"^# .*", f"# {title}", nb.cells[0].source, count=1)
    if module is not None:
        nb.cells[0].source += f"\n\n{head(module, module in names.values(), site.url + name)}"
        for cell in nb.cells:
            if cell.cell_type == "code" and only_imports(cell.source):
                cell.metadata["tags"] = [*cell.metadata.get("tags", []), "hide-input"]
    if path.name == "index.ipynb":
        nb.cells.append(nbformat.v4.new_markdown_cell(contents(site)))
    out = target / str(site.place(name))
    out.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nb, out)


def toctree(caption: str, pages: list[str]) -> str:
    "A hidden table of contents, which fills the sidebar."
    lines = [":hidden:", *([f":caption: {caption}"] if caption else []), "", *pages]
    return "\n".join(["```{toctree}", *lines, "```"])


def contents(site: Checkout) -> str:
    "The sidebar: the start page, the pages of the section Start, and a page for each other section."
    start = ["start.md", *site.sidebar[0][1], "gallery.ipynb"]
    return "\n\n".join(
        [toctree("Start", start), toctree("Topics", [*(page for page, _ in HUBS.values()), *EXTRA])]
    )


def promise_of(site: Checkout, page: str) -> str:
    "The one-line promise of a notebook, or the first paragraph of another page."
    path = site.root / "nbs" / page
    if path.suffix == ".ipynb":
        first = nbformat.read(path, as_version=4).cells[0].source
        return " ".join(re.findall(r"^> (.+)$", first, re.MULTILINE))
    parts = (site.root / page).read_text(encoding="utf-8").split("\n\n")
    return " ".join(next(part for part in parts if not part.startswith(("#", "!", "<!--"))).split())


def listed(site: Checkout, pages: dict[str, str]) -> list[str]:  # titles by page
    "Pages as a list of links, each with its promise."
    return [f"- [{title}](/{page}): {promise_of(site, page)}" for page, title in pages.items()]


def write_hubs(site: Checkout, target: Path) -> None:
    "The start page, and a page for every other section of the sidebar."
    cells = [
        cell.source for cell in nbformat.read(site.root / "nbs" / "index.ipynb", as_version=4).cells
    ]
    (quick,) = (
        source.split("## Quickstart\n")[1] for source in cells if "\n## Quickstart\n" in source
    )
    (pip,) = (
        source.removeprefix("### With pip\n")
        for source in cells
        if source.startswith("### With pip\n")
    )
    tutorials = dict([*site.sidebar[0][1].items()][:FIRST])
    lines = [
        "# Start: install, quickstart, first tutorials",
        "",
        "> From a checkout to a step that you can look into.",
    ]
    lines += ["", "## Install and quickstart", re.sub(r"^!\[.*\n?", "", quick, flags=re.MULTILINE)]
    lines += [
        "## Install with pip",
        site.relink(pip, "nbs/index.ipynb"),
        "",
        "## The first four tutorials",
        "",
    ]
    lines += [*listed(site, tutorials), "", "## After that", ""]
    lines += [f"- [{section}](/{page}): {text}" for section, (page, text) in HUBS.items()]
    (target / "start.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    examples = sorted(
        p.relative_to(site.root).as_posix() for p in (site.root / "examples").rglob("README.md")
    )
    first = {"Reference": ["settings.md", "api/index.md"]}
    last = {"Your own task": examples, "Reference": CONTRIBUTOR_PAGES}
    for section, pages in site.sidebar:
        if section in HUBS:
            page, text = HUBS[section]
            inside = toctree("", [*first.get(section, []), *pages, *last.get(section, [])])
            links = [*listed(site, pages), *EXTRA_LINKS.get(section, [])]
            lines = [f"# {section}", "", f"> {text}", "", *links, "", inside]
            (target / page).write_text("\n".join(lines) + "\n", encoding="utf-8")


def passage(site: Checkout, title: str, page: str, begin: str) -> list[NotebookNode]:
    "One picture of the gallery: a text cell of a notebook, and the first picture below it."
    cells = visible(nbformat.read(site.root / "nbs" / page, as_version=4)).cells
    results = [i for i, cell in enumerate(cells) if cell.source.startswith(begin)]
    if len(results) != 1:
        text = f"{len(results)} text cells begin with {begin!r}; expected one. Adapt GALLERY"
        raise SystemExit(f"docs/sources.py: {page}: {text}")
    picture_cells = (
        c
        for c in cells[results[0] :]
        if any("text/html" in o.get("data", {}) for o in c.get("outputs", []))
    )
    text = re.sub(r"^#+ .*\n+", "", site.relink(cells[results[0]].source, f"nbs/{page}"))
    text = text.replace("](#", f"](/{page}#")
    text = f"### {title}\n\n{text}\n\n[The run, and how it was made](/{page})"
    shown = nbformat.from_dict(
        {**next(picture_cells), "source": "...", "metadata": {"tags": ["remove-input"]}}
    )
    return [nbformat.v4.new_markdown_cell(text), shown]


def write_gallery(site: Checkout, target: Path) -> None:
    "The gallery: steps that explain themselves, and what each fault looks like."
    promise = "Pictures of real runs: steps that x-ray explains, and six faults between trainer and sampler."
    cells = [nbformat.v4.new_markdown_cell(f"# Gallery\n\n> {promise}")]
    for title, wanted in GALLERY.items():
        cells.append(nbformat.v4.new_markdown_cell(f"## {title}"))
        cells += [cell for entry in wanted for cell in passage(site, *entry)]
    nb = nbformat.v4.new_notebook(cells=cells, metadata={"language_info": {"name": "python"}})
    nbformat.write(nb, target / "gallery.ipynb")


def write_api(site: Checkout, target: Path, names: dict[str, str]) -> None:
    "One page per module with its public names, and a list of those pages."
    modules: dict[str, str] = {}  # module -> promise of its notebook
    for path in site.notebooks():
        nb = nbformat.read(path, as_version=4)
        if (module := module_of(nb)) in names.values():
            promise = re.findall(r"^> (.+)$", nb.cells[0].source, re.MULTILINE)
            modules[str(module)] = " ".join(promise)
    folder = target / "api"
    folder.mkdir(parents=True, exist_ok=True)
    rows = ["# Names and signatures", "", "> Every public name, by module.", ""]
    rows += [f"- [`{module}`]({module}.md): {promise}" for module, promise in modules.items()]
    (folder / "index.md").write_text("\n".join(rows) + "\n", encoding="utf-8")
    for module, promise in modules.items():
        listed = ["```{eval-rst}", f".. automodule:: {module}", "   :members:", "```"]
        lines = [
            "---",
            "orphan: true",
            "---",
            f"# {module}: names and signatures",
            "",
            f"> {promise}",
            "",
            *listed,
        ]
        (folder / f"{module}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_promises(target: Path) -> None:
    "For the search: what each page promises, and what each setting means."
    promises: dict[str, str] = {}
    for path in [*target.rglob("*.ipynb"), *target.rglob("*.md")]:
        text = path.read_text(encoding="utf-8")
        page = path.relative_to(target).with_suffix("").as_posix()
        if path.suffix == ".ipynb":
            text = nbformat.reads(text, as_version=4).cells[0].source
        first = next(
            (
                part
                for part in text.split("\n\n")
                if not part.startswith(("#", "---", "<!--", "```"))
            ),
            "",
        )
        promises[page] = plain_text(first)
        rows = re.findall(r"^\| \{setting\}`(\S+)` \| .+ \| (.+) \|$", text, re.MULTILINE)
        promises |= {f"{page}#{name}": plain_text(meaning) for name, meaning in rows}
    folder = target / "promises"
    folder.mkdir()
    (folder / "promises.js").write_text(
        f"const PROMISES = {json.dumps(promises)};\n", encoding="utf-8"
    )


def plain_text(markdown: str) -> str:
    "A paragraph of Markdown without its signs, in one line."
    text = re.sub(r"\{py:obj\}`(\S+) <[^>]+>`", r"\1", markdown)
    text = re.sub(r"\[([^]]+)\]\([^)]*\)|[*`\\]|^> ?", r"\1", text, flags=re.MULTILINE)
    return " ".join(text.split())


def write_settings(target: Path) -> None:
    "Every setting by group, with the words that `rl-notebook train --help` has."
    from rl_notebook.cli import option_groups

    def safe(text):
        return re.sub(r"([|<*])", r"\\\1", text)

    promise = "Every field of `Config`: in YAML, as an option of `rl-notebook train`, or in Python."
    lines = ["# All settings (Config)", "", f"> {promise}", ""]
    for title, options in option_groups().items():
        lines += [
            f"## {safe(title)}",
            "",
            "| setting | takes | default | meaning |",
            "|---|---|---|---|",
        ]
        for name, shape, default, text in options:
            choices = safe((shape or "true|false").replace("|", " | "))
            lines.append(f"| {{setting}}`{name}` | {choices} | {safe(default)} | {safe(text)} |")
        lines.append("")
    (target / "settings.md").write_text("\n".join(lines), encoding="utf-8")


def write_site(root: Path, target: Path) -> None:
    "Everything that Sphinx reads. What was in `target` goes."
    shutil.rmtree(target, ignore_errors=True)
    site = Checkout.of(root)
    names = public_names(root)
    for path in site.notebooks():
        write_notebook(site, path, target, names)
    examples = [p for pattern in ("README.md", "*.svg") for p in (root / "examples").rglob(pattern)]
    for path in [*map(root.joinpath, (*EXTRA, *CONTRIBUTOR_PAGES)), *examples]:
        name = path.relative_to(root).as_posix()
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            (target / name).write_text(
                site.relink(path.read_text(encoding="utf-8"), name), encoding="utf-8"
            )
        else:
            shutil.copy(path, target / name)
    shutil.copytree(root / "nbs" / "images", target / "images")
    write_gallery(site, target)
    write_hubs(site, target)
    write_api(site, target, names)
    write_settings(target)
    write_promises(target)


def main(argv: list[str]) -> Any:
    "The command."
    if len(argv) != 1:
        return __doc__
    write_site(ROOT, ROOT / argv[0])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
