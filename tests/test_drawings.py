"Every phase shows itself as HTML: small, safe, legible in any theme, and still readable where pictures and styles are removed."

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markup import Letters, Page

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.config.config import Config
from rl_notebook.core.advantages import with_advantages
from rl_notebook.core.datums import attach, datums_from_groups
from rl_notebook.core.types import Logprobs, LossOutput, PromptGroup, RolloutSample
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.loop.step import (
    LossReport,
    PhaseMetrics,
    list_datums,
    list_groups,
    list_prompts,
    list_rollouts,
)
from rl_notebook.runs.records import StepRecord
from rl_notebook.show.html import STRONGEST, number, tint
from rl_notebook.task.data import Prompt, Rollouts, Row, load_rows
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_format_reward, toy_reward, toy_rows

LIMIT = 40_000  # bytes
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\u202e\x1b[31m</div></table>"


def page_of(value: Any) -> Page:
    "What a value shows, held to the rules of every view."
    text = value._repr_html_()
    page = Page(
        text,
        dict.fromkeys(("tr", "div", "p", "summary"), "\n") | dict.fromkeys(("td", "th"), " | "),
    )
    assert len(text.encode()) <= LIMIT
    assert not {*page.tags} & {"script", "style", "svg", "iframe", "object", "link"}, page.tags
    assert all(src.startswith("data:image/svg+xml;base64,") for src in page.links)
    assert {*page.attributes} <= {
        *("style", "title", "colspan", "width", "height", "alt", "src"),
    }
    assert not re.search(r"(?<![\w.])[-+]?-0(\.0+)?(?![\w.,]| …)", page.text), (
        "no minus before zero"
    )
    assert not re.search(r"[\u202e\x1b]", text)
    return page


# --- a step of a real model ------------------------------------------------------------------------------------------


async def phases_of_a_step() -> dict[str, Any]:
    "The values of all phases of the second step of the tiny model."
    backend = open_local(*load_model("tiny"))
    sizes = {
        "prompt_groups_per_step": 3,
        "completions_per_prompt": 6,
        "max_completion_tokens": 24,
        "max_seq_len": 96,
    }
    cfg = Config(**sizes, learning_rate=1e-4, kl_beta=0.01)
    async with backend:
        loop = GRPOLoop(
            backend, load_rows(toy_rows(16, seed=0)), [toy_reward, toy_format_reward], cfg
        )
        await loop.run(1, progress=False)
        values = {"prompts": loop.prompts(), "sample": await loop.sample(), "score": loop.score()}
        values |= {
            "advantages": loop.advantages(),
            "datums": loop.datums(),
            "reference": await loop.reference(),
        }
        values |= {
            "loss": loop.loss(),
            "backward": await loop.backward(),
            "optimize": await loop.optimize(),
        }
        return values | {
            "sync": await loop.sync(),
            "finish": loop.finish(),
            "tokenizer": backend.tokenizer,
        }


@pytest.fixture(scope="module")
def phases() -> dict[str, Any]:
    return asyncio.run(phases_of_a_step())


WORDS = {
    "prompts": "<|user|>",
    "sample": "####",
    "score": "toy_format_reward",
    "advantages": "a cell a completion",
    "datums": "is scored on",
    "reference": "the policy's logprob minus the reference's",
    "loss": "share of |dL/dlogprob|",
    "backward": "layer_00",
    "optimize": "update norm",
    "finish": "best and worst",
}


@pytest.mark.parametrize("phase", WORDS)
def test_every_phase_shows_itself_and_says_the_same_without_its_pictures(
    phases: dict[str, Any], phase: str
):
    page = page_of(phases[phase])
    assert WORDS[phase] in page.text
    assert "Ġ" not in page.text
    if phase not in ("optimize", "finish"):
        assert "Table" in page.text, "the table is one click below"
    if phase in ("score", "datums", "backward", "optimize", "finish"):
        assert "img" in page.tags
    if phase == "sample":
        texts = [s.text for r in phases["sample"] for s in r.samples]
        assert sum(text in page.text for text in texts) == len(texts), "every completion is there"
    if phase in ("sample", "score", "advantages", "reference", "loss"):
        questions = [str(prompt.row.data["question"]) for prompt in phases["prompts"]]
        assert all(question in page.text for question in questions), (
            "every group is headed by its prompt"
        )
    if phase == "advantages":
        every = [number(float(a), "+.2f") for g in phases["advantages"] for a in g.advantages]
        assert all(a in page.text for a in every), "every number is there"


# --- anything else ---------------------------------------------------------------------------------------------------


def phases_of_size(groups: int, completions: int, tokens: int, text: str = "") -> dict[str, Any]:
    "The values of all phases of a step of any size."
    rng = np.random.default_rng(0)
    letters = np.frombuffer((text or "ab c\n").encode("latin-1", "replace"), np.uint8)
    key = text or "a long name of a row " * 9
    rows = [
        Row(key=key, prompt=text or "a question " * 80, data={"prompt": text or "a question " * 80})
    ] * groups
    prompts = [
        Prompt(row, [ord(c) for c in "ask"] * 60, index=i, number=i) for i, row in enumerate(rows)
    ]
    answers = list[Rollouts]()
    for p in prompts:
        samples = []
        for k in range(completions):
            completion = np.resize(np.roll(letters, -k), tokens)
            n = len(p.tokens)
            rewards = {text or "right": float(rng.normal()), "form": float(k % 2)}
            logprobs = np.r_[np.zeros(n), -rng.exponential(1.0, tokens)]
            ids = np.r_[p.tokens, completion]
            mask = [0] * n + [1] * tokens
            words = text or "".join(map(chr, completion))
            samples.append(
                RolloutSample(
                    ids, logprobs, mask, sum(rewards.values()), text=words, rewards=rewards
                )
            )
        answers.append(Rollouts(p, tuple(samples), dropped=(text or "lost " * 90,)))
    graded = [
        PromptGroup(a.samples, a.prompt.row.data, key, i, dropped=a.dropped, number=i)
        for i, a in enumerate(answers)
    ]
    groups_with_advantages = with_advantages(graded)
    datums = datums_from_groups(groups_with_advantages)
    policy = [Logprobs(d.sampler_logprobs) for d in datums]
    reference = [Logprobs(np.where(d.active, d.sampler_logprobs - 0.1, np.nan)) for d in datums]
    datums = attach(datums, "ref_logprobs", reference)
    dlogprobs = tuple(np.where(d.active, rng.normal(size=len(d.weights)), 0.0) for d in datums)
    norms = {
        f"{kind}/layer_{i:02d}": 1.0 + i for kind in ("grad_norm", "update_norm") for i in range(96)
    }
    output = LossOutput(0.1, norms, tuple(policy), dlogprobs)
    tokenizer = Letters()
    return {
        "prompts": list_prompts(prompts, tokenizer),
        "sample": list_rollouts(answers, tokenizer),
        "sample without tokenizer": list_rollouts(answers),
        "score": list_groups(graded),
        "advantages": list_groups(groups_with_advantages),
        "datums": list_datums(datums_from_groups(groups_with_advantages), tokenizer),
        "reference": list_datums(datums, tokenizer, policy),
        "loss": LossReport(replace(output, metrics={}), tuple(datums), tokenizer),
        "backward": LossReport(output, tuple(datums), tokenizer),
        "optimize": PhaseMetrics("weights updated", norms),
        "finish": StepRecord(
            1, tuple(groups_with_advantages), tuple(datums), output, metrics=norms
        ),
    }


@pytest.mark.parametrize(
    ("groups", "completions", "tokens"), [(1, 2, 1), (2, 64, 300), (12, 16, 700)]
)
def test_a_drawing_stays_small_and_says_what_it_leaves_out(
    groups: int, completions: int, tokens: int
):
    for name, value in phases_of_size(groups, completions, tokens).items():
        page = page_of(value)
        if groups * completions > 100 and name in ("sample", "loss", "reference"):
            assert re.search(r"and \d+ more|… \d+ tokens", page.text), name


def test_text_of_a_model_is_never_markup():
    for value in phases_of_size(2, 3, 60, HOSTILE).values():
        page_of(value)


def test_a_tint_leaves_text_legible_on_white_and_on_black():
    "The contrast of black text on a tint over white, and of white text on a tint over black, is 4.5 : 1 or more."

    def linear(c):
        return c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4

    def light(rgb):
        return sum(w * linear(c / 255) for w, c in zip((0.2126, 0.7152, 0.0722), rgb, strict=True))

    for hue in ("blue", "orange", "violet", "green"):
        result = tint(hue, 1.0)
        r, g, b, alpha = (int(result[i : i + 2], 16) for i in (1, 3, 5, 7))
        assert alpha == round(255 * STRONGEST)

        def over(paper, rgb=(r, g, b)):
            return [STRONGEST * c + (1 - STRONGEST) * paper for c in rgb]

        assert (light(over(255)) + 0.05) / 0.05 >= 4.5
        assert 1.05 / (light(over(0)) + 0.05) >= 4.5


def test_no_notebook_holds_a_picture_that_jupyterlab_takes_out():
    "Inline SVG is taken out of a notebook that was not run here: what is stored are images that carry their data."
    nbs = Path(__file__).parents[1] / "nbs"
    for path in [*nbs.glob("*.ipynb"), *nbs.glob("tutorials/*.ipynb")]:
        outputs = [
            o
            for c in json.loads(path.read_text(encoding="utf-8"))["cells"]
            for o in c.get("outputs", ())
        ]
        assert not any(
            "<svg" in "".join(o.get("data", {}).get("text/html", ())) for o in outputs
        ), path.name
