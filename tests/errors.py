"How a test looks at an error of ours: by its parts, so that words may change."

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rl_notebook.core.types import RLNotebookError


def failed(
    call: Callable[[], Any],
    what: str = "",
    *,
    where: str = "",
    got: str = "",
    expected: str = "",
    fix: str = "",
    kind: type[RLNotebookError] = RLNotebookError,
) -> RLNotebookError:
    "The error that `call`, or what it returns to be awaited, raises; each part of it has these words."

    def called() -> None:
        result = call()
        if asyncio.iscoroutine(result):
            asyncio.run(result)

    with pytest.raises(kind) as caught:
        called()
    error = caught.value
    wanted = {"what": what, "where": where, "expected": expected, "fix": fix}
    missing = {
        name: words for name, words in wanted.items() if words not in (getattr(error, name) or "")
    }
    if f"got {got}" not in str(error) and got:
        missing |= {"got": got}
    assert not missing, f"{missing} not in: {error}"
    return error
