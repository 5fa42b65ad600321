"""Makes README.md from nbs/index.ipynb with nbconvert alone. The site is made by docs/sources.py.

python tests/pages.py readme        # writes README.md and the pictures that its cells show
python tests/pages.py stills NB...  # takes live widgets out of stored outputs; their still pictures stay
"""

from __future__ import annotations

import json
import posixpath
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # nbformat and nbconvert take a second to load: only where a page is made
    from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
BANNER = "<!-- Made from nbs/index.ipynb by `make prep`: edit the notebook. -->\n\n"
# [text](target), ![alt](target), <img src="target">
LINK = re.compile(r'(\]\(|src="|href=")([^)"\s]+)')
WIDGET = "application/vnd.jupyter.widget-view+json"  # the type of a live widget's output
LOCAL = re.compile(r"(?!#|/|[a-z][a-z+.-]*:)")  # neither an anchor nor an absolute address


def directives(source: str) -> set[str]:
    "The `#|` lines of a code cell, without the sign."
    return {
        line[2:].strip().replace(": ", ":") for line in source.splitlines() if line.startswith("#|")
    }


def visible(nb: NotebookNode) -> NotebookNode:
    "The notebook as a reader sees it: no hidden cells, no directives, nothing that a directive switches off."
    import nbformat

    page = nbformat.from_dict(
        {**nb, "cells": [], "metadata": {**nb.metadata, "language_info": {"name": "python"}}}
    )
    for cell in nb.cells:
        if cell.cell_type != "code":
            page.cells.append(cell)
            continue
        marks = directives(cell.source)
        if marks & {"hide", "include:false"} or any(m.startswith("default_exp") for m in marks):
            continue
        cell = nbformat.from_dict(cell)
        cell.source = "\n".join(
            line for line in cell.source.splitlines() if not line.startswith("#|")
        ).strip("\n")
        if marks & {"echo:false", "hide_input"}:
            cell.source = ""
        if marks & {"output:false", "hide_output"}:
            cell.outputs = []
        if cell.source or cell.outputs:
            page.cells.append(cell)
    return page


def relink(text: str, folder: str) -> str:
    "The same text with links that were relative to `folder` made relative to the folder above all."

    def moved(match: re.Match[str]) -> str:
        before, target = match.groups()
        if not LOCAL.match(target):
            return match[0]
        path, anchor, rest = target.partition("#")
        return before + posixpath.normpath(posixpath.join(folder, path)) + anchor + rest

    return LINK.sub(moved, text)


def readme(root: Path) -> tuple[str, dict[str, bytes]]:  # the text, and the pictures by their path
    "README.md and its pictures, made from the stored cells and outputs of nbs/index.ipynb."
    import nbformat
    from nbconvert import MarkdownExporter

    nb = visible(nbformat.read(root / "nbs" / "index.ipynb", as_version=4))
    exporter = MarkdownExporter()
    # GitHub shows the style sheets of HTML tables as text, so text comes first and HTML never.
    exporter.config.NbConvertBase.display_data_priority = [
        "text/markdown",
        "image/svg+xml",
        "image/png",
        "image/jpeg",
        "text/plain",
    ]
    text, resources = exporter.from_notebook_node(
        nb, {"unique_key": "index", "output_files_dir": "images"}
    )
    pictures = {
        posixpath.join("nbs", path): data for path, data in resources.get("outputs", {}).items()
    }
    text = re.sub(r"\n{3,}", "\n\n", relink(text, "nbs")).strip()
    return BANNER + "\n".join(line.rstrip() for line in text.splitlines()) + "\n", pictures


def write_readme(root: Path) -> None:
    "Writes README.md and its pictures."
    text, pictures = readme(root)
    for path, data in {**pictures, "README.md": text.encode()}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)


def keep_stills(path: Path) -> None:
    "Takes live widgets out of a notebook's outputs; the still pictures next to them stay."
    raw = json.loads(path.read_text(encoding="utf-8"))
    for cell in raw["cells"]:
        if "outputs" in cell:
            cell["outputs"] = [o for o in cell["outputs"] if WIDGET not in o.get("data", {})]
    raw["metadata"].pop("widgets", None)
    path.write_text(json.dumps(raw, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["stills", *paths]:
            for path in paths:
                keep_stills(Path(path))
        case ["readme"]:
            write_readme(ROOT)
        case _:
            sys.exit(__doc__)
