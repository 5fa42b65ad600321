"""What a researcher reads when a script is wrong: eight scripts, each with one planted bug, and the displays they make.

`EXPECTED_WORDS` names for each the display, the step and the words in which it must say so. The words were written before the
displays were read. Every display comes by itself, or by the one call that the display before names.
"""

import asyncio
import contextlib
import functools
import importlib
import io
import re
from dataclasses import replace
from typing import Any

import pytest

from rl_notebook.core.advantages import with_advantages
from rl_notebook.insight.doctor.doctor import diagnose
from rl_notebook.insight.xray import sentence

LINE = "line of loop.run"
XRAY = "sentence of the x-ray"
DOCTOR = "doctor, from the record"
PREFLIGHT = "pre-flight"
# bug, display, step (0 = before the first), words
EXPECTED_WORDS: tuple[tuple[str, str, int, str], ...] = (
    ("advantages_not_centred", XRAY, 1, r"(?i)advantages[^.]*(do not sum to 0|not centred)"),
    ("reward_reads_prompt", PREFLIGHT, 0, r"(?i)form[^\n]*every completion"),
    (
        "reward_reads_prompt",
        PREFLIGHT,
        0,
        r"(?i)form[^\n]*(prompt|empty completion|not (read|depend))",
    ),
    (
        "prompt_in_mask",
        LINE,
        1,
        r"(?i)(prompt[^.]*(in the loss|mask|trained))|((loss|mask)[^.]*prompt)",
    ),
    (
        "kl_wrong_sign",
        LINE,
        4,
        r"(?i)(KL|loss)[^.]*(away from the reference|wrong sign|opposite sign)",
    ),
    (
        "learning_rate_collapses",
        LINE,
        8,
        r"(?i)learning rate[^;]*(fell|dropped|collapsed)|hardly moved[^;]*learning",
    ),
    (
        "server_ignores_syncs",
        LINE,
        2,
        r"(?i)(sampler|server)[^;]*(older|old|stale|previous|first|not)[^;]*weights",
    ),
    ("server_ignores_syncs", DOCTOR, 2, r"(?i)^stale weights"),
    ("server_renders_otherwise", LINE, 1, r"(?i)policy is not what the sampler sampled from"),
    ("server_renders_otherwise", LINE, 1, r"(?i)(sampler|server)[^;]*(template|prompt)"),
    (
        "server_renders_otherwise",
        DOCTOR,
        1,
        r"(?i)^(BOS or )?template|^[^.]*(another|other) prompt",
    ),
    (
        "duplicated_rows",
        PREFLIGHT,
        0,
        r"(?i)\b(rows|prompts)\b[^.\n]*(duplicate|repeat|twice|another row)",
    ),
)


def planted_module(bug: str) -> Any:
    return importlib.import_module(f"planted.{bug}")


@functools.cache
def trained_with_bug(bug: str) -> tuple[Any, str]:
    "The loop of a script, and what it printed."
    with contextlib.redirect_stdout(io.StringIO()) as out:
        loop = asyncio.run(planted_module(bug).train())
    return loop, out.getvalue()


def display_text(loop: Any, printed: str, display: str, step: int) -> str:
    "What a display says."
    if display == PREFLIGHT:
        return printed[: printed.index("step 1 ")]
    if display == LINE:
        return next(line for line in printed.splitlines() if line.startswith(f"step {step} "))
    previous, record = [None, *loop.records][step - 1 : step + 1]
    return sentence(record, previous) if display == XRAY else asyncio.run(diagnose(record)).sentence


def case(bug: str, display: str, step: int, words: str) -> Any:
    return pytest.param(bug, display, step, words, id=f"{bug}, {display}")


@pytest.mark.parametrize(("bug", "display", "step", "words"), [case(*s) for s in EXPECTED_WORDS])
def test_the_bug_is_reported(bug: str, display: str, step: int, words: str) -> None:
    text = display_text(*trained_with_bug(bug), display, step)
    assert re.search(words, text), text


def test_without_the_bug_it_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    script = planted_module("advantages_not_centred")
    monkeypatch.setattr(
        script, "normalised", lambda groups: [replace(g) for g in with_advantages(groups)]
    )
    with contextlib.redirect_stdout(io.StringIO()) as out:
        loop = asyncio.run(script.train())
    for bug, display, step, words in EXPECTED_WORDS:
        if bug == "advantages_not_centred":
            text = display_text(loop, out.getvalue(), display, step)
            assert not re.search(words, text), text
