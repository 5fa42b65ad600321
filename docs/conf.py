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
from sphinx.application import Sphinx

_root = Path(__file__).resolve().parent.parent
_settings = configparser.ConfigParser(delimiters=["="])
_settings.read(_root / "settings.ini", encoding="utf-8")
_of = _settings["DEFAULT"]

project, version, release = _of["title"], _of["version"], _of["version"]
author, copyright = _of["author"], _of["copyright"]

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
_mathjax = importlib.util.find_spec("sphinx-mathjax-offline").submodule_search_locations[0]  # its files alone are used:
html_static_path = ["static", f"{_mathjax}/static"]  # as an extension it would keep Sphinx from working in parallel
mathjax_path = "mathjax/tex-chtml.js"
html_favicon = "static/icon.svg"
html_css_files = ["site.css"]


def plain(text: str) -> str:
    "A text whose signs mean nothing to reStructuredText, but for `names`."
    text = re.sub(r"([*|\\]|_(?=\W|$))", r"\\\1", text.replace("``", "`"))
    return re.sub(r"(`[^`]+`)(?=\w)", r"\1\\ ", text)


def told(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    "Docstrings are plain text. The comments beside parameters join them."
    lines[:] = [] if what == "module" else map(plain, lines)  # a module's page begins with its promise
    if name == "rl_notebook.config.Config":
        lines += ["", "Its settings by group: :doc:`/settings`."]
    given = obj if what != "class" or is_dataclass(obj) else obj.__init__
    if what not in ("function", "method", "class") or not (
        is_dataclass(given) or inspect.isfunction(inspect.unwrap(given))
    ):
        return
    try:
        comments = docments(given)
    except (OSError, TypeError, SyntaxError):  # no source: made at run time
        return
    for parameter, comment in comments.items():
        if comment:
            sign = "returns" if parameter == "return" else f"param {parameter}"
            lines += ["", f":{sign}: {plain(' '.join(comment.split()))}"]


def setup(app: Sphinx) -> None:
    "Sphinx calls this."
    app.connect("autodoc-process-docstring", told)
