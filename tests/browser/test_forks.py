"The inspector in JupyterLab asks the policy: alternatives under the pointer, a fork, the stop button, the curve of a search."

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, expect

from .lab import Lab, Notebook

CELLS = (
    """
import rl_notebook as rln
from rl_notebook.experiments.locate import saved_results

cfg = rln.Config(
    prompt_groups_per_step=4, completions_per_prompt=8, max_completion_tokens=32, max_seq_len=128,
    learning_rate=5e-4, kl_beta=0.0, top_logprobs=5,
)
run = rln.RunFolder.create("forked", cfg)
loop = rln.GRPOLoop(
    rln.open_local(*rln.load_model("tiny")), rln.toy_rows(40, split="hard"), rln.toy_reward, cfg, outputs=[run.add]
)
[record] = await loop.run(1, progress=False)""",
    """
inspector = rln.inspect_tokens(record, loop.backend.tokenizer, backend=loop, group=2, sample=1)
inspector""",
    "rln.inspect_tokens(record, loop.backend.tokenizer, group=2, sample=1)",
)


@pytest.fixture(scope="module")
def notebook(lab: Lab) -> Iterator[Notebook]:
    "A step of the tiny model, and its inspector with the loop."
    notebook = lab.open(CELLS, "forks.ipynb")
    notebook.run_all()
    assert notebook.failures() == []
    yield notebook
    notebook.close()


@pytest.fixture
def inspector(notebook: Notebook) -> Locator:
    "The inspector, in view."
    result = notebook.show(1).locator(".rlt[data-ready]")
    result.wait_for()
    return result


def test_a_token_has_alternatives_and_one_of_them_is_tried(notebook: Notebook, inspector: Locator):
    sampled = inspector.locator(".rlt-strip .rlt-scored")
    chips = inspector.locator(".rlt-alternatives")
    known = chips.locator("tr")
    sampled.nth(12).hover()
    expect(known).to_have_count(3)
    expect(known.nth(1)).to_contain_text(re.compile("^policy.*weights: those of step 1"))
    expect(known.nth(2)).to_contain_text(
        re.compile("^sampler.*of the distribution that it sampled from")
    )
    assert (
        known.nth(1).locator("td").first.inner_text()
        == known.nth(2).locator("td").first.inner_text()
    )
    sampled.nth(12).click()
    tried = chips.get_by_role("button").first
    word = tried.inner_text()
    tried.click()
    section = inspector.locator(".rlt-results section")
    expect(section.locator("tr")).to_have_count(
        3
    )  # the head, what was said, what else could have been
    expect(section.locator("tr").nth(2)).to_contain_text(word)
    expect(inspector.locator(".rlt-progress")).to_be_empty()
    assert notebook.ask("len(saved_results(run, record))") == 1
    inspector.get_by_role("button", name="Fork here").click()
    expect(section).to_have_count(2)
    notebook.until("len(inspector.policy.results) == 2")


def test_without_a_policy_the_samplers_own_are_shown(notebook: Notebook):
    recorded = notebook.show(2).locator(".rlt[data-ready]")
    recorded.locator(".rlt-strip .rlt-scored").nth(12).click()
    known = recorded.locator(".rlt-alternatives tr")
    expect(known).to_have_count(2)
    expect(known.nth(1)).to_contain_text(re.compile("^sampler"))
    expect(recorded.locator(".rlt-alternatives button")).to_have_count(0)


def test_a_search_is_stopped_and_another_draws_its_curve_below_the_tokens(
    notebook: Notebook, inspector: Locator
):
    search = inspector.get_by_role("button", name="Where was it lost?")
    stop = inspector.get_by_role("button", name="■")
    search.click()
    stop.click()
    expect(stop).to_be_hidden()
    expect(search).to_be_enabled()
    expect(inspector.locator(".rlt-axis")).to_have_count(0)
    search.click()
    expect(inspector.locator(".rlt-progress")).to_contain_text("of at most 300 continuations")
    tokens = inspector.locator(".rlt-strip .rlt-scored")
    cells = inspector.locator(".rlt-strip .rlt-axis")
    expect(cells).to_have_count(tokens.count())
    for i in (0, 5, tokens.count() - 1):
        token, cell = tokens.nth(i).bounding_box(), cells.nth(i).bounding_box()
        assert abs(token["x"] - cell["x"]) < 1
        assert abs(token["width"] - cell["width"]) < 1
        assert cell["y"] >= token["y"] + token["height"] - 1
    expect(inspector.locator(".rlt-results")).to_contain_text("lost at token 31")
    assert notebook.ask("len(saved_results(run, record))") == 3
    notebook.shot("forks", 1)
    notebook.width(900, 900)
    notebook.shot("forks_narrow", 1)
    notebook.width(1280, 900)
    theme = "theme => window.jupyterapp.commands.execute('apputils:change-theme', { theme })"
    notebook.page.evaluate(theme, "JupyterLab Dark")
    expect(notebook.page.locator("body[data-jp-theme-light=false]")).to_be_attached()
    expect(inspector).to_have_class("rlt rlt-dark")
    notebook.shot("forks_dark", 1)
    notebook.page.evaluate(theme, "JupyterLab Light")
