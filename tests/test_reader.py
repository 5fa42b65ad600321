"""What a researcher reads when a script is wrong: eight scripts, each with one planted bug, and the displays they make.

`SAID` names for each the display, the step and the words in which it must say so. The words were written before the
displays were read. Every display is one that comes by itself, or by the one call that the display before names.
"""

import asyncio
import importlib
import re
from typing import Any

import pytest

from rl_notebook.doctor import diagnose
from rl_notebook.xray import sentence
from tiny_models import one_thread  # noqa: F401 (the fixture is used by every test)

LINE, XRAY, DOCTOR, PREFLIGHT = "line of loop.run", "sentence of the x-ray", "doctor, from the record", "pre-flight"
SAID: dict[str, tuple[tuple[str, int, str], ...]] = {  # bug: (display, step, words)
    "advantages_not_centred": ((XRAY, 1, r"(?i)advantages[^.]*(not (sum to 0|centred)|do not sum to 0|not centred)"),),
    "reward_reads_prompt": (
        (PREFLIGHT, 0, r"(?i)form[^.]*every completion"),
        (PREFLIGHT, 0, r"(?i)form[^\n]*(prompt|empty completion|not (read|depend))"),
    ),
    "prompt_in_mask": ((LINE, 1, r"(?i)(prompt[^.]*(in the loss|mask|trained))|((loss|mask)[^.]*prompt)"),),
    "kl_wrong_sign": ((LINE, 4, r"(?i)(KL|loss)[^.]*(away from the reference|wrong sign|opposite sign)"),),
    "learning_rate_collapses": (
        (LINE, 8, r"(?i)learning rate[^;]*(fell|dropped|collapsed)|hardly moved[^;]*learning rate"),
    ),
    "server_ignores_syncs": (
        (LINE, 2, r"(?i)(sampler|server)[^;]*(older|old|stale|previous|first|not)[^;]*weights"),
        (DOCTOR, 2, r"(?i)^stale weights"),
    ),
    "server_renders_otherwise": (
        (LINE, 1, r"(?i)policy is not what the sampler drew from|(sampler|server)[^;]*(other|another|different) prompt"),
        (DOCTOR, 1, r"(?i)^[^.]*(template|another prompt|other prompt)"),
    ),
    "duplicated_rows": ((PREFLIGHT, 0, r"(?i)(rows|prompts)[^.]*(same|duplicate|repeat|twice|only \d+ (differ|dist))"),),
}


def shown(loop: Any, printed: str, display: str, step: int) -> str:
    "What a display says."
    previous, record = [None, *loop.records][step - 1 : step + 1] if step else (None, None)
    if display == LINE:
        return next(line for line in printed.splitlines() if line.startswith(f"step {step} "))
    if display == XRAY:
        return sentence(record, previous)
    if display == DOCTOR:
        return asyncio.run(diagnose(record)).sentence
    return printed[: printed.index("step 1 ")]


@pytest.mark.parametrize("bug", SAID)
def test_it_is_said(bug: str, capsys: pytest.CaptureFixture[str]) -> None:
    loop = asyncio.run(importlib.import_module(f"planted.{bug}").train())
    printed = capsys.readouterr().out
    missing = [
        f"{display}, step {step}: {text}"
        for display, step, words in SAID[bug]
        if not re.search(words, text := shown(loop, printed, display, step))
    ]
    assert not missing, "\n".join(missing)
