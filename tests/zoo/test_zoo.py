"The zoo: its machines agree when nothing is wrong, and the doctor names what is wrong with them."

import asyncio

import pytest
from tiny_models import one_thread

from rl_notebook.backends.base import Sampler, Scorer, Trainer, WeightSync
from rl_notebook.insight.doctor.causes import CAUSES, UNEXPLAINED
from rl_notebook.insight.doctor.doctor import diagnose

from .faults import CLEAN, FAULTS
from .steps import World, gap, open_run

__all__ = ["one_thread"]


def test_the_machines_are_a_backend_that_agrees_with_itself():
    async def test():
        run = await open_run(World(prompts=2))
        backend = run.backend
        for role, protocol in (
            ("policy", Trainer),
            ("reference", Scorer),
            ("sampler", Sampler),
            ("sync", WeightSync),
        ):
            assert isinstance(getattr(backend, role), protocol)
        assert gap(await run.step()) < 1e-4
        await run.update(publish=False)
        assert gap(await run.step()) > 1e-2
        await run.publish()
        assert gap(await run.step()) < 1e-4

    asyncio.run(test())


def test_every_cause_has_a_fault():
    assert {cause for fault in FAULTS.values() for cause in fault.right} == {*CAUSES} - {
        UNEXPLAINED
    }


ALWAYS = (  # all others with SLOW=1
    "the server has its own temperature",
    "several updates",
    "the feed-forward layers do not travel",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in ALWAYS)) for name in FAULTS],
)
def test_the_doctor_names_the_fault(name: str):
    "Or is undecided about it; where nothing is wrong there is no alarm. The record alone is never surely wrong."
    fault = FAULTS[name]

    async def test():
        run, record = await fault.step()
        d = await diagnose(record, backend=run.backend)
        alone = await diagnose(record)
        named = {d.cause, *(d.undecided if CLEAN not in fault.right else ())}
        assert named & {*fault.right}, d
        assert alone.cause in fault.right or alone.certainty != "sure", alone
        assert CLEAN not in fault.right or alone.cause in fault.right, alone

    asyncio.run(test())
