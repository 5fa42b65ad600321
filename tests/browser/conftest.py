"A browser, a JupyterLab, and a watch over both. Without a browser these tests fail, unless they were left out by name."

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from . import chromium
from .lab import MILLIS, SHOTS, Lab, Watch, jupyter_lab

FLAGS = (
    "--disable-gpu",
    "--disable-dev-shm-usage",  # containers have a small one
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # nothing leaves, not even the browser's own questions
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    "Everything in this folder is a browser test."
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.browser)
            if chromium.switched_off():
                item.add_marker(pytest.mark.skip(reason=f"left out by {chromium.SKIP}"))


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    "The system's browser. It ends with this folder, since Playwright keeps an event loop going."
    path = chromium.find()
    if path is None:
        pytest.fail(chromium.missing(), pytrace=False)
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=path, args=FLAGS)


@pytest.fixture(scope="package")
def watch() -> Watch:
    "What the pages did that they must not do."
    return Watch()


@pytest.fixture(scope="package")
def context(browser: Browser, watch: Watch) -> Iterator[BrowserContext]:
    "One profile for all pages, so that JupyterLab is loaded once."
    SHOTS.mkdir(exist_ok=True)
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(MILLIS)
    expect.set_options(timeout=MILLIS)
    watch.follow(context)
    yield context
    context.close()


@pytest.fixture(scope="package")
def lab(context: BrowserContext, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    "A JupyterLab for all tests of this folder."
    with jupyter_lab(tmp_path_factory.mktemp("lab"), context) as lab:
        yield lab


@pytest.fixture
def open_page(context: BrowserContext) -> Iterator[Callable[..., Page]]:
    "Open HTML files as a reader does, from disk."
    pages = []

    def open_file(path: Path, width: int = 1280, address: str = "") -> Page:
        pages.append(page := context.new_page())
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(f"{path.resolve().as_uri()}#{address}" if address else path.resolve().as_uri())
        return page

    yield open_file
    for page in pages:
        page.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    "Keep the report of a test where its fixtures find it."
    report = yield
    item.stash.setdefault(REPORTS, {})[report.when] = report
    return report


REPORTS = pytest.StashKey[dict[str, pytest.TestReport]]()


@pytest.fixture(autouse=True)
def clean(
    context: BrowserContext, watch: Watch, open_page: object, request: pytest.FixtureRequest
) -> Iterator[None]:
    "No console error, no exception in a page, no request to another machine; and a picture of what failed."
    yield
    complaints = watch.take(context)
    called = request.node.stash.get(REPORTS, {}).get("call")
    if complaints or (called and called.failed):
        name = re.sub(r"\W+", "_", request.node.name)
        for number, page in enumerate(context.pages):
            page.screenshot(path=SHOTS / f"failed_{name}_{number}.png")
    assert not complaints, "\n".join(complaints)
