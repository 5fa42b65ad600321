"The site as a reader sees it, in a browser, wide and narrow, light and dark. It is built by `make docs`."

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from .lab import SHOTS

SITE = Path(__file__).resolve().parent.parent.parent / "_docs"
pytestmark = pytest.mark.skipif(
    not (SITE / "index.html").exists(), reason="the site is not built: make docs"
)
EMPTY = "() => [...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src)"
COLOURS = "() => (s => [s.backgroundColor, s.color])(getComputedStyle(document.body))"
WIDER = "() => document.scrollingElement.scrollWidth - innerWidth"
OUTSIDE = """() => [...document.querySelectorAll("article pre")].filter(pre => {
  const box = pre.closest("div.cell, div.highlight") ?? pre;
  return pre.getBoundingClientRect().right > box.getBoundingClientRect().right + 1
    || (pre.scrollWidth > pre.clientWidth + 1 && getComputedStyle(pre).overflowX === "visible");
}).map(pre => pre.textContent.slice(0, 60))"""
SEARCHES = {  # asked: what is found first
    "kl_beta": "settings.html",
    "GRPOLoop": "api/rl_notebook.loop.loop.html",
    "custom reward": "task/01_rewards.html",
    "write a reward function": "task/01_rewards.html",
    "vllm": "tutorials/402_past_one_machine.html",
    "lora": "backends/local/07_loading.html",
    "dead group": "core/06_advantages.html",
    "resume": "tutorials/401_scripted_runs.html",
    "wandb": "runs/13_trackers.html",
    "install": "start.html",
}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    "Where the site is served."
    quiet = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(quiet, directory=SITE))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture
def read(context: BrowserContext, address: str) -> Iterator[Callable[..., Page]]:
    "Open a page of the site."
    page = context.new_page()

    def go(name: str, width: int = 1280) -> Page:
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(f"{address}/{name}.html", wait_until="load")
        return page

    yield go
    page.close()


def test_the_landing_page_shows_the_dashboard(read: Callable[..., Page]):
    page = read("index")
    picture = page.locator("img[src$='dashboard.webp']")
    expect(picture).to_be_visible()
    assert page.evaluate(EMPTY) == []
    page.screenshot(path=SHOTS / "site_landing.png")


def test_a_search_finds_a_name_and_a_word(read: Callable[..., Page]):
    page = read("index")
    first = page.locator("#search-results li a").first
    for query, page_path in SEARCHES.items():
        page.locator(".sidebar-search").fill(query)
        page.keyboard.press("Enter")
        expect(first).to_have_attribute(
            "href", re.compile(rf"^{re.escape(page_path)}(\?.*)?(#.*)?$")
        )
    page.screenshot(path=SHOTS / "site_search.png")
    page.locator("#search-results li a").first.click()
    expect(page.locator("h1").first).to_be_visible()


def test_a_name_in_a_page_leads_to_its_signature_and_its_source(read: Callable[..., Page]):
    page = read("tutorials/101_one_step_by_hand")
    page.locator("article a[href*='api/']").first.click()
    expect(page.locator("dt.sig:target, :target dt.sig, dt.sig").first).to_be_visible()
    page.locator("article .viewcode-link").first.click()
    expect(page.locator(".viewcode-block").first).to_be_visible()


def test_the_sidebar_leads_through_the_pages(read: Callable[..., Page]):
    page = read("index")
    page.locator(".sidebar-tree a", has_text="One GRPO step by hand").click()
    expect(page.locator("h1")).to_contain_text("One GRPO step by hand")
    page.locator("a.next-page").click()
    expect(page.locator("h1")).to_contain_text("Reading logprobs")
    assert page.locator(".sidebar-tree .caption-text").all_text_contents() == ["Start", "Topics"]
    shown = [
        link.text_content() for link in page.locator(".sidebar-tree a").all() if link.is_visible()
    ]
    assert shown[0].startswith("Start: install, quickstart")
    assert len(shown) < 25


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
@pytest.mark.parametrize("name", ["gallery", "core/09_losses", "tutorials/101_one_step_by_hand"])
def test_pages_fit_their_window(read: Callable[..., Page], name: str, width: int, scheme: str):
    page = read(name, width)
    page.emulate_media(color_scheme=scheme)
    assert page.evaluate(WIDER) <= 0
    assert page.evaluate(OUTSIDE) == []
    back, ink = page.evaluate(COLOURS)

    def light(colour):
        return sum(map(int, colour.strip("rgba()").split(",")[:3])) / 765

    assert (
        (light(back) > 0.8 > 0.4 > light(ink))
        if scheme == "light"
        else (light(back) < 0.2 < 0.6 < light(ink))
    )
    page.screenshot(path=SHOTS / f"site_{name.replace('/', '_')}_{scheme}_{width}.png")


def test_formulas_are_set_without_another_machine(read: Callable[..., Page]):
    page = read("core/09_losses")
    expect(page.locator("mjx-container").first).to_be_visible()
