"The chat view in JupyterLab: a trained policy beside its base, and the tokens of an answer one click away."

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, expect

from .hostile import BAD
from .lab import Lab, Notebook

CELLS = [
    """
import rl_notebook as rln
from rl_notebook.recipes.playground import ChatView, open_playground

small = {"max_rows": 4, "prompt_groups_per_step": 2, "completions_per_prompt": 4, "max_completion_tokens": 16}
often = {"steps": 1, "eval_rows": 2, "eval_interval": 1, "keep_best": "eval/reward", "learning_rate": 1e-3}
result = await rln.train(rln.Config(**small, **often, log_path=RUN), say=lambda line: None, progress=False)""",
    """
playground = await open_playground(RUN, "best", beside="base", seed=0)
view = ChatView(playground)
view""",
]


@pytest.fixture(scope="module")
def chat(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    folder: Path = tmp_path_factory.mktemp("chat") / "run"
    made = lab.open([f"RUN = {str(folder)!r}{CELLS[0]}", CELLS[1]])
    made.run_cells(0, 1)
    yield made
    made.close()


def seen(view: Locator, text: str) -> Locator:
    "The first place that says so and is not hidden, as the still picture is."
    return view.get_by_text(text, exact=True).locator("visible=true").first


def test_answers_stand_beside_each_other_and_show_their_tokens(chat):
    view = chat.show(1)
    view.get_by_placeholder("Ask something").fill("What is 3+7+2+9+4?")
    view.get_by_placeholder("Ask something").press("Enter")
    tokens = view.get_by_role("button", name="Tokens")
    expect(tokens).to_have_count(1)
    texts = chat.ask("[c.text for c in playground.exchanges[0].answers.values()]")
    for who, text in zip(("trained", "base"), texts, strict=True):
        box = view.locator("div").filter(has_text=re.compile(rf"^{who}{re.escape(text)}")).last
        expect(box).to_be_visible()
    left, right = (seen(view, who).bounding_box() for who in ("trained", "base"))
    assert abs(left["y"] - right["y"]) < 2
    assert left["x"] + 200 < right["x"]
    tokens.click()
    samples = view.locator(".rlt-sample option")
    expect(samples).to_have_count(2)
    expect(view.get_by_text("policy: trained, ref: base")).to_be_visible()
    chat.shot("chat-tokens", 1)
    tokens.click()
    expect(samples).to_have_count(0)


def test_an_answer_goes_on_a_hostile_line_stays_text_and_a_new_conversation_is_empty(chat):
    view = chat.show(1)
    view.get_by_placeholder("Ask something").fill(BAD)
    view.get_by_role("button", name="Ask", exact=True).click()
    expect(view.get_by_role("button", name="Tokens")).to_have_count(2)
    assert chat.ask("len(playground.talks['base'].spans)") == 4
    chat.shot("chat", 1)
    view.get_by_role("button", name="New").click()
    expect(view.get_by_role("button", name="Tokens")).to_have_count(0)
    assert chat.ask("playground.exchanges") == []
