"Sphinx: how the pages that docs/sources.py wrote become a site. Nothing on it asks another machine for anything."

from __future__ import annotations

import configparser
import importlib.util
import inspect
import re
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from fastcore.docments import docments
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxRole

_root = Path(__file__).resolve().parent.parent
_settings = configparser.ConfigParser(delimiters=["="])
_settings.read(_root / "settings.ini", encoding="utf-8")
_of = _settings["DEFAULT"]

project = _of["title"]
version = _of["version"]
release = _of["version"]
author = _of["author"]
copyright = _of["copyright"]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx.ext.mathjax"]
root_doc = "index"
nb_execution_mode = "off"  # the notebooks hold their outputs
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_heading_anchors = 4
default_role = "py:obj"  # `name` in a docstring leads to the name, where it is public
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
suppress_warnings = ["mystnb.mime_priority", "misc.highlighting_failure"]

html_theme = "furo"
html_title = _of["title"]
html_copy_source = False
html_show_sourcelink = False
# its files alone are used:
_mathjax = importlib.util.find_spec("sphinx-mathjax-offline").submodule_search_locations[0]
# as an extension it would keep Sphinx from working in parallel
html_static_path = ["static", f"{_mathjax}/static"]
mathjax_path = "mathjax/tex-chtml.js"
html_favicon = "static/icon.svg"
html_css_files = ["site.css"]
html_search_scorer = str(_root / "docs" / "search.js")
# excerpts would be fetched, which a page of the disk may not: promises stand below
html_show_search_summary = False


def plain(text: str) -> str:
    "A text whose signs mean nothing to reStructuredText, but for `names`."
    text = re.sub(r"([*|\\]|_(?=\W|$))", r"\\\1", text.replace("``", "`"))
    return re.sub(r"(`[^`]+`)(?=\w)", r"\1\\ ", text)


def paragraphs(lines: list[str]) -> list[str]:
    "A docstring as reStructuredText: plain text, and indented lines as code."
    result = list[str]()
    in_code = False
    for line in lines:
        indented = line.startswith("    ")
        if indented and not in_code:
            result += [".. code-block:: python", ""]
        in_code = indented or (in_code and not line.strip())
        result.append(line if indented else plain(line))
    return result


def convert_docstring(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    "Docstrings become reStructuredText. The comments next to parameters join them."
    # a module's page begins with its promise
    lines[:] = [] if what == "module" else paragraphs(lines)
    if name == "rl_notebook.config.config.Config":
        lines += ["", "Its settings by group: :doc:`/settings`."]
    if what in ("function", "method") and is_awaited(obj):
        lines[:0] = ["*Awaited.*", ""]
    target = obj if what != "class" or is_dataclass(obj) else obj.__init__
    if what not in ("function", "method", "class") or not (
        is_dataclass(target) or inspect.isfunction(inspect.unwrap(target))
    ):
        return
    try:
        comments = docments(target)
    except (OSError, TypeError, SyntaxError):  # no source: made at run time
        return
    for parameter, comment in comments.items():
        if comment:
            sign = "returns" if parameter == "return" else f"param {parameter}"
            lines += ["", f":{sign}: {plain(' '.join(comment.split()))}"]


def is_awaited(function: Any) -> bool:
    "Whether a function is async behind decorators that return something else, so that its signature does not say it."
    return inspect.iscoroutinefunction(
        inspect.unwrap(function)
    ) and not inspect.iscoroutinefunction(function)


class SettingRole(SphinxRole):
    "A setting where it is explained: the search finds it, and `settings.html#name` leads there."

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        "The name as code, with its place."
        node = nodes.literal(self.rawtext, self.text, ids=[self.text])
        self.env.domains.standard_domain.note_object("setting", self.text, self.text, location=node)
        return [node], []


def promised(app: Sphinx, page: str, *_: Any) -> None:
    "The search page knows what each page promises."
    if page == "search":
        app.add_js_file("promises.js")


def setup(app: Sphinx) -> None:
    "Sphinx calls this."
    app.connect(
        "config-inited",
        lambda app, config: config.html_static_path.append(f"{app.srcdir}/promises"),
    )
    app.connect("html-page-context", promised)
    app.add_object_type("setting", "to-setting", objname="setting")
    app.add_role("setting", SettingRole())
    app.connect("autodoc-process-docstring", convert_docstring)
