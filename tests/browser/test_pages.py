"The page of a run, opened from disk as a reader opens it."

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from playwright.sync_api import BrowserContext, Page, expect
from synthetic import synthetic_record

from rl_notebook.runs.run import RunFolder
from rl_notebook.views.report import Status, report_html, write_report
from rl_notebook.views.site import write_site

from .hostile import hostile_record
from .lab import SHOTS, Watch

LONGEST = """() => Math.max(0, ...[...document.querySelectorAll('.js-plotly-plot')].flatMap(
    plot => plot.data.map(trace => trace.x?.length ?? 0)))"""
# What is wider than the window, or wider than its place without scrolling there.
CUT_OFF = """width => [document.scrollingElement, ...document.querySelectorAll('.js-plotly-plot, .card:not(.scroll)')]
    .filter(e => e.scrollWidth > Math.min(width, e.clientWidth + 1)).map(e => e.className || e.tagName)"""


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    "A run of six steps."
    run = RunFolder.create(
        tmp_path / "sums", {"base_model": "tiny", "policy_loss": "grpo", "kl_beta": 0.001}
    )
    for step in range(1, 7):
        record = synthetic_record(step, steps=7, groups=4, completions=5)
        metrics = {k: v for k, v in record.metrics.items() if not k.startswith("eval/")}
        run.add(replace(record, metrics=metrics | ({"eval/reward": 0.5} if step % 2 else {})))
    return run


def test_a_report_fits_its_window_and_completions_are_sorted_searched_and_have_an_address(
    open_page: Callable[..., Page], run: RunFolder
):
    page = open_page(write_report(run, run.path / "report.html"), 1280)
    page.emulate_media(color_scheme="light")
    page.locator(".js-plotly-plot .main-svg").first.wait_for()
    assert page.evaluate(LONGEST) >= 6
    assert page.evaluate(CUT_OFF, 1280) == []
    first = page.locator(".rltable")
    expect(page.get_by_label("step of the completions")).to_have_value("6")
    page.get_by_label("step of the completions").select_option("1")
    expect(first.get_by_role("status")).to_have_text("20 completions, page 1 of 3")
    expect(first.locator("td[rowspan='5']")).to_have_count(1)  # a prompt next to its completions
    first.scroll_into_view_if_needed()
    page.screenshot(path=SHOTS / "report_table_light_1280.png")
    first.get_by_role("button", name="reward").click()
    first.get_by_role("button", name="reward").click()
    rewards = [*map(float, first.locator("tbody td:nth-last-child(4)").all_inner_texts())]
    assert rewards == sorted(rewards, reverse=True)
    assert rewards[0] == max(s.reward for g in run.record(1).groups for s in g.samples)
    first.get_by_label("Search completions").fill(
        run.record(1).groups[2].samples[0].text.split()[0]
    )
    first.locator("tbody a").first.click()
    chosen = page.locator("tr[aria-current]")
    expect(chosen).to_have_count(1)
    address = page.url
    assert address.endswith("#" + chosen.get_attribute("data-id"))
    page.goto(address.split("#")[0] + "#step=6&group=2&sample=4")  # of another step
    expect(page.get_by_label("step of the completions")).to_have_value("6")
    expect(chosen).to_have_attribute("data-id", "step=6&group=2&sample=4")
    expect(chosen).to_have_count(1)
    expect(chosen).to_be_in_viewport()
    page.screenshot(path=SHOTS / "report_row_light_1280.png")


# Of every chart over the steps: whether it has a cursor, what its lines are drawn of, and the kind of its axis.
CURSORS = """() => [...document.querySelectorAll('[data-steps]')].map(p => Boolean(p.querySelector('.spikeline')))"""
LINES = """() => document.getElementById('f0').data.filter(t => t.name.startsWith('mean')).map(t => t.y)"""
POINT_AT = """step => {
    const { left, top, height } = document.querySelector('#f0 .nsewdrag').getBoundingClientRect();
    return [left + document.getElementById('f0')._fullLayout.xaxis.c2p(step), top + height / 2];
}"""
AXES = """() => [...document.querySelectorAll('[data-steps]')].map(p => p._fullLayout.yaxis.type)"""


def test_charts_are_smoothed_put_on_a_log_scale_and_share_a_cursor(
    open_page: Callable[..., Page], run: RunFolder
):
    page = open_page(write_report(run, run.path / "report.html"))
    page.wait_for_function(
        "() => [...document.querySelectorAll('.plot')].every(p => p.querySelector('.main-svg'))"
    )
    (measured,) = page.evaluate(LINES)
    assert measured == [run.record(step).metrics["reward"] for step in range(1, 7)]
    plot = page.locator("#f0 .nsewdrag")
    plot.hover()
    page.wait_for_function(f"() => ({CURSORS})().every(Boolean)")
    cursor = page.locator("#f0 .hoverlayer .legend")
    for step in (4, 5):  # an evaluation only in the second
        page.mouse.move(*page.evaluate(POINT_AT, step + 0.1))
        expect(cursor).to_contain_text(f"step {step}")
        expect(cursor).to_contain_text(f"mean : {measured[step - 1]:#.4g}")
        assert ("held out" in cursor.text_content()) == (step == 5)
        expect(page.locator("[data-steps] .hoverlayer .legendtitletext").last).to_have_text(
            f"step {step}"
        )
    page.mouse.move(2, 2)
    page.wait_for_function(f"() => !({CURSORS})().some(Boolean)")
    page.get_by_label("smoothing").fill("0.5")
    raw, smooth = page.evaluate(LINES)
    assert raw == measured
    average = 0.0
    expected = []
    for n, value in enumerate(measured, start=1):
        average = 0.5 * average + 0.5 * value
        expected.append(average / (1 - 0.5**n))
    assert smooth == pytest.approx(expected)
    page.mouse.move(*page.evaluate(POINT_AT, 4))
    expect(cursor).to_contain_text(f"mean : {measured[3]:#.4g}")
    expect(cursor).to_contain_text(f"mean, smoothed : {smooth[3]:#.4g}")
    assert "log" not in page.evaluate(AXES)
    page.get_by_label("log scale").check()
    page.wait_for_function(f"() => ({AXES})()[0] === 'log'")
    expect(page.locator("figure:has(#f0) .note")).to_contain_text("“± std in a group” is not drawn")
    page.screenshot(path=SHOTS / "report_log.png")
    page.get_by_label("log scale").uncheck()
    box = page.locator("#f0 .nsewdrag").bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_url("**#step=*")
    step = page.url.partition("#step=")[2]
    expect(page.get_by_label("step of the completions")).to_have_value(step)
    expect(page.locator("#completions tbody tr").first).to_have_attribute(
        "data-id", f"step={step}&group=0&sample=0"
    )


class Letters:
    "A tokenizer whose tokens are characters, one of them markup."

    def decode(self, ids: list[int], **options: object) -> str:
        return "".join("<img src=x onerror=alert(1)>" if i == ord("#") else chr(i) for i in ids)


def test_an_address_opens_the_page_at_its_token(open_page: Callable[..., Page], run: RunFolder):
    record = run.record(6)
    d = record.datums[-1]
    loss = record.loss
    at = int(np.flatnonzero(d.active)[-1])  # a target; its token is one further
    path = write_report(run, run.path / "report.html", tokenizer=Letters())
    page = open_page(path, 400, f"step=6&group={d.group}&sample={d.sample}&token={at + 1}")
    page.emulate_media(color_scheme="light")
    panel = page.locator(".tokens")
    marked = page.locator(".tokens [aria-current]")
    expect(panel).to_contain_text(f"step 6 · group {d.group} · sample {d.sample}")
    expect(marked).to_have_text(
        {" ": "·", "\n": "⏎"}.get(text := Letters().decode([d.tokens[at + 1]]), text)
    )
    expect(marked).to_be_in_viewport()
    row = page.locator("tr[aria-current]")
    expect(row).to_have_attribute("data-id", f"step=6&group={d.group}&sample={d.sample}")
    shown = dict(
        zip(*(panel.locator(part).all_inner_texts() for part in ("dt", "dd")), strict=True)
    )
    expected = {
        "sampler logprob": d.sampler_logprobs[at],
        "policy logprob": loss.logprobs[-1].values[at],
        "old logprob": d.old_logprobs[at],
        "reference logprob": d.ref_logprobs[at],
        "dL/dlogprob": loss.dlogprobs[-1][at],
        "advantage": d.advantage,
    }
    for name, value in expected.items():
        assert math.isclose(float(shown[name]), value, rel_tol=1e-3), name
    gap = loss.logprobs[-1].values[at] - d.sampler_logprobs[at]
    assert math.isclose(float(shown["policy − sampler"]), gap, abs_tol=1e-6)
    assert shown[f"token {at + 1}"] == f"{marked.inner_text()} · id {d.tokens[at + 1]} · scored"
    assert page.evaluate(CUT_OFF, 400) == []
    page.screenshot(path=SHOTS / "report_token_light_400.png")


def test_a_token_is_a_link_to_itself(open_page: Callable[..., Page], run: RunFolder):
    d = run.record(6).datums[-1]
    first = int(np.flatnonzero(d.active)[0]) + 1
    page = open_page(write_report(run, run.path / "report.html", tokenizer=Letters()))
    expect(page.locator(".tokens")).to_have_count(0)
    page.locator(".js-plotly-plot .main-svg").first.wait_for()
    page.get_by_role("button", name="Next ›").click()
    page.locator(f"tr[data-id='step=6&group={d.group}&sample={d.sample}'] a").evaluate(
        "e => e.click()"
    )
    strip = page.locator(".strip")
    marked = page.locator(".strip [aria-current]")
    expect(marked).to_have_count(0)
    expect(page.locator(".tokens")).to_contain_text("Choose a token to see its numbers")
    expect(strip.locator("a")).to_have_count(len(d.tokens) - first)
    strip.locator("a").nth(3).click()
    assert page.url.endswith(f"#step=6&group={d.group}&sample={d.sample}&token={first + 3}")
    page.keyboard.press("ArrowRight")
    assert page.url.endswith(f"&token={first + 4}")
    expect(strip.locator("a").nth(4)).to_be_focused()
    expect(marked).to_have_count(1)
    page.keyboard.press("End")
    assert page.url.endswith(f"&token={len(d.tokens) - 1}")
    page.go_back()  # before the tokens, which the keys went through without a trace
    expect(page.locator(".tokens")).to_contain_text("Choose a token to see its numbers")
    assert page.evaluate("() => document.querySelectorAll('.strip img').length") == 0


def test_an_address_that_is_not_on_the_page(open_page: Callable[..., Page], run: RunFolder):
    page = open_page(
        write_report(run, run.path / "report.html"), address="step=3&group=1&sample=2&token=40"
    )
    page.locator(".rltable").first.wait_for()
    expect(page.get_by_text("Its tokens are not on this page")).to_be_in_viewport()
    expect(page.locator(".strip [aria-current]")).to_have_count(0)


# A reader who sorts a table and scrolls at the last moment: when the page has already begun to read itself again.
AT_THE_LAST_MOMENT = """addEventListener("beforeunload", () => {
    if (sessionStorage.acted) return;
    sessionStorage.acted = "once";
    document.querySelector("th[data-column=reward] button").click();
    document.scrollingElement.scrollTop = 300;
})"""
THERE = "() => sessionStorage.acted && document.scrollingElement.scrollTop === 300"


def test_a_page_follows_its_run_and_stays_where_it_is_read(
    open_page: Callable[..., Page], run: RunFolder
):
    path = run.path / "report.html"
    page = open_page(
        write_report(run, path, status=Status("running", "Running: step 6."), refresh=2)
    )
    page.add_init_script(AT_THE_LAST_MOMENT)
    page.wait_for_function(THERE)
    run.add(synthetic_record(7, steps=7, groups=4, completions=5))
    write_report(run, path, status=Status("running", "Running: step 7."), refresh=2)
    expect(page.locator("body")).to_contain_text("Running: step 7.")
    page.wait_for_function(THERE)
    expect(page.locator("th[aria-sort=ascending]")).to_have_text("reward")  # as it was chosen
    page.wait_for_function(f"() => ({LONGEST})() >= 7")
    write_report(run, path, status=Status("finished", "Finished after step 7."))
    expect(page.locator("body")).to_contain_text("Finished after step 7.")
    page.wait_for_function(THERE)
    expect(page.locator("th[aria-sort=ascending]")).to_have_text("reward")


def test_a_script_that_got_into_the_page_does_not_run(
    open_page: Callable[..., Page], tmp_path: Path, watch: Watch, context: BrowserContext
):
    "The page allows its own two scripts and no other."
    bad = '<script>document.title="owned"</script><img src=x onerror=document.title="owned">'
    path = tmp_path / "r.html"
    path.write_text(
        report_html([hostile_record(1)], title="Sums").replace("</main>", f"{bad}</main>")
    )
    page = open_page(path)
    page.locator(".js-plotly-plot .main-svg").first.wait_for()
    assert "Content Security Policy" in "\n".join(watch.take(context))
    expect(page).to_have_title("Sums")
    path.write_text(f"<!doctype html><title>Sums</title><main>{bad}</main>")
    expect(open_page(path)).to_have_title("owned")  # without the policy it would have run
    watch.take(context)  # and the image is nowhere


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    "A web host for the test's folder, which serves files and nothing else."
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_an_address_of_a_site_opens_at_a_step_a_completion_and_a_token(
    open_page: Callable[..., Page], run: RunFolder, tmp_path: Path, web: str, scheme: str
):
    gallery = write_site([run, run], tmp_path / "site")
    d = run.record(2).datums[-1]  # of a step whose tokens are on no report
    token = int(np.flatnonzero(d.active)[2]) + 1
    place = f"step=2&group={d.group}&sample={d.sample}"
    page = open_page(gallery)
    page.emulate_media(color_scheme=scheme)
    assert page.evaluate(CUT_OFF, 1280) == []
    page.screenshot(path=SHOTS / f"site_gallery_{scheme}_1280.png")
    for base in (gallery.parent.resolve().as_uri(), f"{web}/site"):
        page.goto(f"{base}/sums/index.html#{place}&token={token}")
        page.wait_for_url(f"**/sums/steps/00002.html#{place}&token={token}")
        marked = page.locator(".strip [aria-current]")
        expect(marked).to_be_in_viewport()
        expect(marked).to_have_attribute("href", f"#{place}&token={token}")
        expect(page.locator(".tokens dl")).to_contain_text(f"token {token}")
    page.screenshot(path=SHOTS / f"site_token_{scheme}_1280.png")
    assert page.evaluate(CUT_OFF, 1280) == []
    page.goto(f"{web}/site/sums-2/index.html#{place}")
    page.wait_for_url(f"**/sums-2/steps/00002.html#{place}")
    expect(page.locator("tr[aria-current]")).to_have_attribute("data-id", place)
    page.get_by_role("link", name="‹ sums").click()
    page.wait_for_url("**/sums-2/index.html#step=2")
    expect(page.get_by_label("step of the completions")).to_have_value("2")
    page.goto(f"{web}/site/index.html")
    page.get_by_role("link", name="3", exact=True).first.click()
    expect(page.get_by_role("heading", name="Step 3")).to_be_visible()
    page.get_by_role("link", name="the step after: 4").click()
    expect(page.get_by_role("heading", name="Step 4")).to_be_visible()
