"One policy for everything that goes over a network: what it does, and that nothing else does it again."

import asyncio
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_notebook.core.retries import AskAgain, Retries, with_retries, with_retries_blocking

KINDS = st.sampled_from(["passing", "final", "answer"])


def run_awaited_and_blocking(calls, retries: Retries) -> list[tuple[str, int, list[float]]]:
    "Outcome, tries and pauses of the same calls, awaited and blocking."
    results = []
    for awaited in (True, False):
        tries = 0
        pauses = []

        def once():
            nonlocal tries
            kind = calls[min(tries, len(calls) - 1)]
            tries += 1
            if kind == "answer":
                return "an answer"
            raise AskAgain("busy") if kind == "passing" else KeyError("wrong")

        async def once_awaited():
            return once()

        async def note(seconds, pauses=pauses):
            pauses.append(seconds)

        try:
            if awaited:
                outcome = asyncio.run(with_retries(once_awaited, retries, sleep=note))
            else:
                outcome = with_retries_blocking(once, retries, sleep=pauses.append)
        except (AskAgain, KeyError) as error:
            outcome = type(error).__name__
        results.append((outcome, tries, pauses))
    return results


@given(st.lists(KINDS, min_size=1, max_size=6), st.integers(1, 5), st.integers(0, 2**40))
def test_awaited_and_blocking_calls_have_the_same_tries_and_pauses(kinds, attempts, seed):
    awaited, blocking = run_awaited_and_blocking(
        kinds, Retries(attempts, deadline_s=math.inf, seed=seed)
    )
    assert awaited == blocking
    outcome, tries, pauses = awaited
    passing = next((i for i, kind in enumerate(kinds) if kind != "passing"), attempts)
    assert tries == min(passing + 1, attempts)
    last = kinds[min(tries - 1, len(kinds) - 1)]
    assert outcome == {"passing": "AskAgain", "final": "KeyError", "answer": "an answer"}[last]
    assert len(pauses) == tries - 1
    assert all(0.5 <= pause / (0.5 * 2**i) <= 1 for i, pause in enumerate(pauses))


def test_a_deadline_counts_attempts_and_pauses_and_not_the_time_in_line():
    def tries(in_line):
        made = []

        def once():
            made.append(time.monotonic())
            time.sleep(0.1)
            error = AskAgain("busy")
            error.in_line_s = time.monotonic() - made[-1] if in_line else 0.0
            raise error

        with pytest.raises(AskAgain):
            with_retries_blocking(once, Retries(8, deadline_s=0.5, first_wait_s=0.0))
        return len(made)

    assert tries(in_line=False) <= 5
    assert tries(in_line=True) == 8


@pytest.mark.parametrize("where", ["attempt", "pause"])
def test_a_cancelled_call_ends_at_once_and_is_not_made_again(where):
    tries = []

    async def once():
        tries.append(1)
        if where == "attempt":
            await asyncio.sleep(3600)
        raise AskAgain("busy", after_s=3600)

    async def cancelled():
        task = asyncio.create_task(with_retries(once, Retries(deadline_s=math.inf)))
        while not tries:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(cancelled(), 30))
    assert len(tries) == 1
