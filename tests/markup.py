"The elements of an HTML page, for the tests of everything that renders one; and a tokenizer whose tokens are characters."

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping
from html.parser import HTMLParser
from typing import Any

VOID = ("meta", "img", "br", "wbr")


class Page(HTMLParser):
    "Elements, attributes and text of a page, as a browser would take them; `marks` are where elements begin."

    def __init__(self, text: str, marks: Mapping[str, str] | None = None):
        super().__init__()
        self.marks = marks or {}
        self.text = ""
        self.tags = list[str]()
        self.attributes = list[str]()
        self.links = list[str]()
        self.ids = list[str]()
        self.open = list[str]()
        self.scripts = list[str]()
        self.feed(text)
        self.close()
        assert self.open == [], "everything is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        self.links += [
            value or "" for name, value in attrs if name in ("src", "href", "action", "srcset")
        ]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.text += self.marks.get(tag, "")
        if tag not in VOID:
            self.open += [tag]
        if tag == "script":
            self.scripts += [""]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif "style" not in self.open:
            self.text += data

    @property
    def handlers(self) -> list[str]:
        "Attributes that would run something."
        return [name for name in self.attributes if name.startswith("on")]

    def carried(self, name: str) -> dict[str, Any]:
        "What a report carries for its script, by name."
        return json.loads(unpacked(self.scripts[0])).get(name, {})


def unpacked(text: str) -> str:
    "A text that a page carries compressed."
    return gzip.decompress(base64.b64decode(text)).decode()


class Letters:
    "A tokenizer whose tokens are characters."

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(map(chr, ids))
