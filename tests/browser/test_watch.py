"The watch that all these tests rely on sees what it is there to see."

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Page

from . import chromium
from .lab import Watch

BAD = """<!doctype html><title>bad</title><script>
console.error("said");
setTimeout(() => { throw new Error("raised") });
fetch("https://example.com/asked").catch(() => document.title = "blocked");
</script>"""


def test_errors_and_requests_are_seen(
    context: BrowserContext, watch: Watch, open_page: Callable[..., Page], tmp_path: Path
):
    (tmp_path / "bad.html").write_text(BAD)
    page = open_page(tmp_path / "bad.html")
    page.wait_for_function("document.title === 'blocked'")  # it really went nowhere
    complaints = "\n".join(watch.take(context))
    assert "console error: said" in complaints
    assert "page error: Error: raised" in complaints or "page error: raised" in complaints
    assert "request leaves this machine: GET https://example.com/asked" in complaints
    assert watch.take(context) == []


def test_without_a_browser_it_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv(chromium.BROWSER, "no-such-browser")
    assert chromium.find() is None
    assert all(
        word in chromium.missing()
        for word in ("no-such-browser", "apt-get install chromium", chromium.SKIP)
    )
    monkeypatch.setenv(chromium.SKIP, "1")
    assert chromium.switched_off()
