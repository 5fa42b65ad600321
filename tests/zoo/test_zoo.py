"The zoo in short: its machines agree when nothing is wrong, its faults can be seen, and the doctor answers."

import asyncio
import itertools
import os

import pytest
from tiny_models import one_thread

from rl_notebook.backends.base import Sampler, Scorer, Trainer, WeightSync
from rl_notebook.insight.doctor.causes import FIXES

from .faults import BUILD, CLEAN, NONE, PARTS, Case, cases
from .judge import judged
from .steps import World, gap, opened

__all__ = ["one_thread"]

FEW = ("another template", "a step")
ALL = os.environ.get("SLOW") == "1"


def test_the_machines_are_a_backend_that_agrees_with_itself():
    async def test():
        run = await opened(World(prompts=2))
        backend = run.backend
        for role, protocol in (("policy", Trainer), ("reference", Scorer), ("sampler", Sampler), ("sync", WeightSync)):
            assert isinstance(getattr(backend, role), protocol)
        assert gap(await run.step()) < 1e-4
        await run.update(publish=False)
        assert gap(await run.step()) > 1e-2
        await run.publish()
        assert gap(await run.step()) < 1e-4

    asyncio.run(test())


def test_http_changes_nothing():
    "Drawn one by one, a completion has another seed; what it is scored with is the same to the last digit."

    async def test():
        for temperature in (1.0, 0.7):
            run = await opened(World(prompts=2, temperature=temperature, http=True))
            try:
                assert gap(await run.step()) < 1e-4
                tokens = [5, 6, 7, 8, 9]
                there, here = await run.sampler.logprobs(tokens), await run.server.logprobs(tokens)
                assert (there.values == here.values).all()
                assert (there.source, there.policy_version) == ("sampler", run.server.version)
            finally:
                await run.close()

    asyncio.run(test())


def test_the_parts_share_no_case():
    parts = [list(cases(split)) for split in PARTS]
    assert all({*c.kind.right} <= {*FIXES, NONE, CLEAN} for part in parts for c in part)
    for what in (lambda c: c.name, lambda c: c.seed):
        assert not any({what(c) for c in a} & {what(c) for c in b} for a, b in itertools.combinations(parts, 2))
    build, unseen = ({c.kind.name for c in part} for part in parts)
    assert len(unseen - build) >= len(unseen) / 4


CHOSEN = [c for c in cases(BUILD) if c.setting != "large"]
CHOSEN = CHOSEN if ALL else [next(c for c in CHOSEN if c.kind.name == name) for name in FEW]


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
def test_the_doctor_answers(case: Case):
    answer = asyncio.run(judged(case))
    assert answer.outcome != "error", answer.cause
    assert answer.cause in {*FIXES, NONE}
