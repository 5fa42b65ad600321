"""The weights of loops that share a backend, in any order of updates, syncs, undo, turns, failures and cancellations.

The model next to it knows numbers only: what each loop's trainer and sampler would hold if the loop were alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from rl_notebook.core.types import AdamParams, BackendError, PhaseError
from rl_notebook.loop.weights import SamplerWeights, Weights


class Numbers:
    "A backend whose policy is a number and whose gradient is a sum; it can fail, or take long, at any call."

    def __init__(self) -> None:
        self.weights = 0
        self.gradient = 0
        self.served = 0
        self.version = 0
        self.saved: dict[str, int] = {}
        # which of the next calls raises, counted down; whether calls take long
        self.to_fail = 0
        self.slow = False
        self.policy = self
        self.sampler = None
        self.shared_slot = []
        self.capabilities = SimpleNamespace(state_snapshots=True)

    async def call(self) -> None:
        for _ in range(3 if self.slow else 1):
            await asyncio.sleep(0)
        self.to_fail -= 1
        if self.to_fail == 0:
            raise BackendError("lost")

    async def optim_step(
        self, adam: AdamParams, *, grad_accumulation_normalization: str
    ) -> dict[str, float]:
        await self.call()
        assert self.gradient, "an update without a gradient"
        self.weights = self.weights * 31 + self.gradient
        self.gradient = 0
        return {}

    async def discard_gradients(self) -> None:
        await self.call()
        self.gradient = 0

    async def save_state(self, name: str) -> str:
        await self.call()
        self.saved[name] = self.weights
        return name

    async def load_state(self, name: str) -> None:
        await self.call()
        self.weights = self.saved[name]
        self.gradient = 0

    async def save_weights_for_sampler(self, name: str) -> str:
        await self.call()
        return name

    async def sync(self, name: str) -> int:
        await self.call()
        self.served, self.version = self.weights, self.version + 1
        return self.version


@dataclass
class Step:
    "As much of a step as weights ask for."

    number: int = 1
    seconds: dict[str, float] = field(default_factory=dict)

    def copied(self) -> Step:
        return replace(self)

    @contextmanager
    def measured(self, what: str) -> Iterator[None]:
        yield
        self.seconds[what] = 0.0


class OneLoop:
    "As much of a loop, and what it would have if it were alone: the model."

    running = ""
    place = "step 1"

    def __init__(self, backend: Any, name: str, weights: int, served: int, family: Any = None):
        self.name = name
        self.state = Step()
        self.can_leave = True
        self.reopened = False
        # the model's
        self.trained = weights
        self.served = served
        self.gradient = 0
        self.before: list[tuple[int, int]] = []  # the model's: (trained, served) before each update
        self.forgotten = 0
        self.weights = Weights(backend, self, 2, family)

    def forget_gradient(self) -> None:
        self.forgotten += 1

    def reopen(self) -> None:
        self.reopened = True

    async def close(self) -> None:
        self.can_leave = True

    def check_can_leave(self) -> None:
        if not self.can_leave or self.gradient:
            raise PhaseError("another loop's turn", got="a step in the middle of its update")


class WeightsInAnyOrder(RuleBasedStateMachine):
    loops = Bundle("loops")

    @staticmethod
    def done(work: Any) -> Any:
        return asyncio.run(work)

    def run_exclusively(
        self, loop: OneLoop, work: Any, failing: int = 0, cancelled: bool = False
    ) -> bool:
        "Whether the work was done, while the loop has the lease; a failure or a cancellation is noticed, not lost."

        async def act() -> None:
            async with loop.weights.lease():
                self.backend.to_fail = failing
                try:
                    await loop.weights.shared.complete(work())
                finally:
                    self.backend.to_fail = 0

        async def cancel() -> None:
            task = asyncio.ensure_future(act())
            self.backend.slow = True
            for _ in range(2):
                await asyncio.sleep(0)
            task.cancel()
            try:
                await task
            finally:
                self.backend.slow = False

        try:
            self.done(cancel() if cancelled else act())
        except BackendError:
            return False
        except asyncio.CancelledError:
            pass  # what was begun is finished: the work, the swap, or nothing
        return True

    def __init__(self) -> None:
        super().__init__()
        self.backend = Numbers()
        self.all = [OneLoop(self.backend, "main", 0, 0)]

    @property
    def loaded(self) -> OneLoop:
        [loop] = [each for each in self.all if each.weights.shared.loaded is each.weights]
        return loop

    def can_go_to(self, loop: OneLoop) -> bool:
        "Whether the loop that is loaded may leave."
        loaded = self.loaded
        may_leave = loaded.can_leave and not loaded.gradient and loaded.weights.sampler.is_current
        return loop is loaded or may_leave

    which = st.integers(0, 2)
    failing = st.sampled_from([0, 0, 0, 1, 2, 3])

    def pick(self, index: int) -> OneLoop:
        return self.all[index % len(self.all)]

    @rule(index=which, size=st.integers(1, 9), cancelled=st.booleans())
    def backward(self, index: int, size: int, cancelled: bool) -> None:
        loop = self.pick(index)
        if not self.can_go_to(loop):
            return

        async def work() -> None:
            await loop.weights.accumulate()
            self.backend.gradient += size
            loop.gradient = size

        self.run_exclusively(loop, work, cancelled=cancelled)

    @rule(index=which, failing=failing, undoable=st.booleans(), cancelled=st.booleans())
    def update(self, index: int, failing: int, undoable: bool, cancelled: bool) -> None:
        loop = self.pick(index)
        if not self.can_go_to(loop) or not loop.gradient:
            return

        async def work() -> None:
            before = await loop.weights.remember() if undoable else None
            await loop.weights.update(AdamParams(), "none", before)
            if before is not None:
                loop.before = [*loop.before, (loop.trained, loop.served)][-2:]
            loop.trained = loop.trained * 31 + loop.gradient
            loop.gradient = 0

        self.run_exclusively(loop, work, failing, cancelled)
        # after a failure, what `remember` had to give up for the new snapshot is gone
        assert (
            0
            <= len(loop.before) - len(loop.weights.snapshots.undoable)
            <= (1 if failing and undoable else 0)
        )
        loop.before = loop.before[len(loop.before) - len(loop.weights.snapshots.undoable) :]

    @rule(index=which, failing=failing, cancelled=st.booleans())
    def sync(self, index: int, failing: int, cancelled: bool) -> None:
        loop = self.pick(index)
        if not self.can_go_to(loop):
            return

        async def work() -> None:
            await loop.weights.sync()
            loop.served = loop.trained

        self.run_exclusively(loop, work, failing, cancelled)

    @rule(index=which)
    def undo(self, index: int) -> None:
        loop = self.pick(index)
        if not self.can_go_to(loop) or not loop.before:
            return

        async def work() -> None:
            version = loop.weights.sampler.version
            entry = await loop.weights.undo(lambda entry: None)
            synced_since = version != entry.policy_version
            (loop.trained, loop.served) = loop.before.pop()
            loop.gradient = 0
            # what it had is nowhere: it has the trainer's
            if synced_since and entry.sampler is SamplerWeights.UNSAVED:
                loop.served = loop.trained

        self.run_exclusively(loop, work)

    @precondition(lambda self: len(self.all) < 3 and self.loaded.weights.sampler.is_current)
    @rule()
    def branch(self) -> None:
        loop = self.loaded
        other = OneLoop(self.backend, "branch", loop.trained, loop.served, loop.weights.family)

        async def work() -> None:
            await loop.weights.fork(other.weights)

        if self.run_exclusively(loop, work):
            self.all.append(other)

    @rule()
    def stranger(self) -> None:
        "A loop that was opened apart from the others continues with the weights of the one that has the backend."
        last = self.loaded
        other = OneLoop(self.backend, "stranger", last.trained, last.served)
        self.all[self.all.index(last)] = other

        async def work() -> None:
            assert not other.weights.has_gradient
            assert not self.backend.gradient or not last.weights.has_gradient

        self.run_exclusively(other, work)
        assert self.loaded is other
        assert last.reopened

    @rule(index=which)
    def turn(self, index: int) -> None:
        "A turn in which nothing is done; rejected within an update of the other loop, or before its sync."
        loop = self.pick(index)

        async def work() -> None:
            pass

        if self.can_go_to(loop):
            self.run_exclusively(loop, work)
            assert self.loaded is loop
        else:
            with pytest.raises(PhaseError):
                self.run_exclusively(loop, work)
            assert self.loaded is not loop

    @rule(index=which, at=st.integers(0, 99))
    def checkpoint(self, index: int, at: int) -> None:
        loop = self.pick(index)
        if not self.can_go_to(loop):
            return
        self.backend.saved["checkpoint"] = at

        async def work() -> None:
            await loop.weights.discard()
            await loop.weights.load("checkpoint")
            loop.trained = at
            loop.gradient = 0

        self.run_exclusively(loop, work)

    @invariant()
    def it_is_as_if_each_were_alone(self) -> None:
        loop = self.loaded
        assert (self.backend.weights, self.backend.served) == (loop.trained, loop.served)
        assert loop.weights.has_gradient >= bool(loop.gradient)
        if loop.weights.has_gradient:
            assert self.backend.gradient == loop.gradient

    @invariant()
    def what_is_noted_is_so(self) -> None:
        for loop in self.all:
            w = loop.weights
            assert len(w.snapshots.undoable) == len(loop.before)
            assert (w.sampler.saved is not None) == (w.sampler.weights is SamplerWeights.SAVED)
            if w.sampler.is_current:
                assert loop.served == loop.trained
            if w.sampler.saved is not None:
                assert self.backend.saved[w.sampler.saved.path] == loop.served
            for entry, (trained, _) in zip(w.snapshots.undoable, loop.before, strict=True):
                assert self.backend.saved[entry.saved.path] == trained
            if loop is not self.loaded:
                assert w.parked is not None
                assert self.backend.saved[w.parked.path] == loop.trained
        assert self.loaded.weights.shared.holder is None
        assert self.loaded.weights.shared.depth == 0


WeightsInAnyOrder.TestCase.settings = hypothesis.settings(stateful_step_count=40)
TestWeightsInAnyOrder = WeightsInAnyOrder.TestCase
