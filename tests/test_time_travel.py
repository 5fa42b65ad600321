"Going back, branching off, rebuilding, replaying: everything on the shipped model, compared bit for bit."

import asyncio

import pytest
from test_loop import LENGTH, make_loop, same, up_to, weights

from rl_notebook.core import RewardError
from rl_notebook.loop import PHASES


def run(coroutine):
    return asyncio.run(coroutine)


def numbers(record):
    "Everything measured in a step, but the clock."
    return {**record.metrics, "version": record.policy_version, "loss": record.loss and record.loss.loss}


# --- the phase under way --------------------------------------------------------------------------------------------


def watch(loop, seen):
    "Note what the loop says is under way whenever it asks something of its backend."
    backend = loop.backend
    for owner, names in [
        (backend.policy, ("forward_backward_custom", "optim_step", "save_weights_for_sampler")),
        (backend.reference, ("forward",)),
        (backend.sampler, ("sample",)),
    ]:
        for name in names:
            wrap(owner, name, lambda: seen.append(loop.running))


def wrap(owner, name, before):
    "Call something before a method."
    method = getattr(owner, name)

    def both(*args, **kwargs):
        before()
        return method(*args, **kwargs)

    setattr(owner, name, both)


def test_a_loop_says_which_phase_is_under_way():
    async def main():
        loop, seen = make_loop(), []
        watch(loop, seen)
        await loop.step()
        await loop.evaluate(loop.rows[:1])
        assert list(dict.fromkeys(seen)) == ["sample", "reference", "backward", "optimize", "sync", "evaluate"]
        assert loop.running == ""

    run(main())


@pytest.mark.parametrize("settings", [{"refill": True}, {"weight_sync_interval": 2}, {"min_samples_per_fwd_bwd": 6}])
def test_a_loop_that_works_says_at_what(settings):
    async def main():
        loop, seen = (
            make_loop(reward=lambda text, question: float(len(text)) if "?" in question else 1.0, **settings),
            [],
        )
        watch(loop, seen)
        await loop.run(2, progress=False)
        assert "" not in seen[:-1]
        assert loop.running == ""

    run(main())


BREAKS = {  # phase: (owner of the method that fails, its name)
    "prompts": (lambda loop: loop.backend.tokenizer, "apply_chat_template"),
    "sample": (lambda loop: loop.backend.sampler, "sample"),
    "score": (lambda loop: loop, "score"),  # with a reward function that fails
    "reference": (lambda loop: loop.backend.reference, "forward"),
    "backward": (lambda loop: loop.backend.policy, "forward_backward_custom"),
    "optimize": (lambda loop: loop.backend.policy, "optim_step"),
    "sync": (lambda loop: loop.backend.policy, "save_weights_for_sampler"),
}


@pytest.mark.parametrize("phase", BREAKS)
@pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
def test_a_phase_that_fails_leaves_the_loop_where_it_stood(phase, again, monkeypatch):
    async def main():
        undisturbed, loop = make_loop(), make_loop()
        for one in (undisturbed, loop):
            await one.step()
        whole = await undisturbed.step()
        if PHASES.index(phase):
            await up_to(loop, PHASES[PHASES.index(phase) - 1 + (again and phase not in ("optimize", "sync"))])
        before = loop.state.number, set(loop.state.values), loop.cursor.consumed, len(loop.records), loop.policy_version
        kept = weights(loop)

        def failing(*args, **kwargs):
            assert loop.running == phase
            raise TimeoutError("somebody else's fault")

        loop.state.cache.clear()  # scored again by the reference
        with monkeypatch.context() as broken, pytest.raises((TimeoutError, RewardError), match="somebody else's fault"):
            if phase == "score":
                loop.score(lambda text: failing())
            else:
                owner, name = BREAKS[phase]
                broken.setattr(owner(loop), name, failing)
                result = getattr(loop, phase)()
                await result if asyncio.iscoroutine(result) else result
        after = loop.state.number, set(loop.state.values), loop.cursor.consumed, len(loop.records), loop.policy_version
        gone = {"backward"} if phase == "backward" and again else set()  # its gradient was dropped
        assert after == (before[0], before[1] - gone, *before[2:])
        assert loop.running == ""
        assert same(kept, weights(loop))
        assert numbers(await loop.step()) == pytest.approx(numbers(whole), nan_ok=True)

    run(main())


def test_a_window_of_which_nothing_came_costs_no_prompts(monkeypatch):
    async def main():
        loop = make_loop(weight_sync_interval=2, reward=LENGTH)

        async def failing(tokens, params):
            raise TimeoutError("no sampler")

        with monkeypatch.context() as broken, pytest.raises(TimeoutError):
            broken.setattr(loop.backend.sampler, "sample", failing)
            await loop.run(2, progress=False)
        assert (loop.cursor.consumed, loop.state.untrained, loop.running) == (0, 0, "")
        assert [r.step for r in await loop.run(2, progress=False)] == [1, 2]
        assert loop.state.untrained == 0

    run(main())
