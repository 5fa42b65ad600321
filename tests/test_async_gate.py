"""Rollouts during training, in any order: what may happen to rows, counted without a look inside.

A state machine drives the real gate and the real producer. Rows end when a rule says so, time passes when a rule says
so, and a separate model knows where each row has to be. Loops that really train are in `test_groups.py`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rl_notebook.core.types import PhaseError
from rl_notebook.loop.groups import Finished, Gate, Producer


class Broken(Exception):
    "What a rollout raises."


class Rows(RuleBasedStateMachine):
    "Where each row is, whatever happens to the others."

    @initialize(
        per_step=st.integers(1, 3),
        k=st.integers(1, 4),
        bound=st.integers(0, 2),
        room=st.none() | st.integers(0, 9),
        total=st.integers(1, 24),
    )
    def open(self, per_step: int, k: int, bound: int, room: int | None, total: int) -> None:
        self.per_step = per_step
        self.k = k
        self.bound = bound
        self.total = total
        self.room = None if room is None else k + room
        self.loop = asyncio.new_event_loop()
        self.complaints: list[Any] = []  # of callbacks, which nothing else would report
        self.loop.set_exception_handler(lambda loop, context: self.complaints.append(context))
        self.now = 0.0
        self.idle = 0.0
        self.idle_before = 0.0
        self.gate = Gate(per_step, k, bound, self.room)
        # where the rows are
        self.taken = 0
        self.waiting: deque[int] = deque()  # to be sampled again
        self.in_flight: dict[int, tuple[int, asyncio.Future[bool]]] = {}  # (version, end) by row
        self.ready: dict[int, int] = {}  # version by row, in the order in which they came
        self.rejected: list[int] = []
        self.training: dict[int, int] = {}  # a batch: version by row
        self.last: dict[int, int] = {}  # the batch before it, for undo
        self.trained: set[int] = set()
        self.resolved: set[int] = set()  # rejected, and part of a step
        # what is running
        self.held = False  # no row is to be started
        self.broken = False  # a rollout raised, and no waiting task got the error yet
        self.asking: asyncio.Task[list[Finished[Any]]] | None = None
        self.draining: asyncio.Task[None] | None = None
        self.producer = Producer(
            self.gate, self.take, self.run, lambda value: value[1], self.requeue, self.clock
        )

    def teardown(self) -> None:
        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        if hasattr(self, "loop"):
            self.producer.held = "closed"
            self.loop.run_until_complete(end())
            self.loop.close()

    # -- what the producer is made of, and what it tells the model by using it

    def clock(self) -> float:
        return self.now

    def take(self) -> int | None:
        if self.waiting:
            return self.waiting.popleft()
        if self.taken == self.total:
            return None
        self.taken += 1
        return self.taken - 1

    def run(self, number: int) -> Any:
        assert not self.held, f"row {number} was started although no row is to be"
        assert self.draining is None, (
            f"row {number} was started while a task waits until all have ended"
        )
        assert not self.broken, f"row {number} was started although a rollout has raised"
        end = self.loop.create_future()
        assert number not in self.in_flight
        self.in_flight[number] = self.gate.version, end

        async def sample() -> tuple[int, bool]:
            return number, await end

        return sample()

    def requeue(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            places = (self.in_flight, self.ready, self.rejected)
            assert sum(number in place for place in places) == 1, (
                f"row {number} was not there to be requeued"
            )
            self.in_flight.pop(number, None)
            self.ready.pop(number, None)
            if number in self.rejected:
                self.rejected.remove(number)
            self.waiting.append(number)
        self.waiting = deque(sorted(self.waiting))

    @property
    def rows_left(self) -> bool:
        return bool(self.waiting) or self.taken < self.total

    # -- what happens

    def inside(self, call: Callable[[], Any]) -> Any:
        "Call something in the event loop, and let everything happen that follows from it."

        async def main() -> Any:
            result = call()
            for _ in range(6):
                await asyncio.sleep(0)
            return result

        self.quiet = self.draining is not None
        result = self.loop.run_until_complete(main())
        if self.complaints:
            raise self.complaints[0].get("exception") or AssertionError(self.complaints)
        self.collect_results()
        return result

    def collect_results(self) -> None:
        "Look whether a batch or the end of a drain has come."
        if self.draining is not None and self.draining.done():
            task = self.draining
            self.draining = None
            if not self.got_error(task.exception()):
                assert not self.in_flight, "drained, with rows in flight"
        if self.asking is not None and self.asking.done():
            task = self.asking
            self.asking = None
            if not self.got_error(task.exception()):
                self.begin_training(task.result())

    def got_error(self, error: BaseException | None) -> bool:
        "Whether a waiting task got an error; then it is the right one, and no row continues after it."
        if isinstance(error, PhaseError) and not self.broken:
            assert self.held, error
            assert not self.in_flight
            assert len(self.ready) < self.per_step
            return True
        assert (error is not None) == self.broken
        if error is not None:
            assert isinstance(error, Broken | PhaseError)
            self.broken = False
            self.quiet = True
            assert not [*self.in_flight, *self.ready, *self.rejected], (
                "a row continues after an error"
            )
        return error is not None

    def begin_training(self, batch: list[Finished[Any]]) -> None:
        "A batch was handed over."
        for row in batch:
            version = self.ready.pop(row.number)
            assert row.version == version
            assert 0 <= self.gate.version - version <= self.bound, (
                f"started at {version}, trained at {self.gate.version}"
            )
            assert row.number not in self.trained
            assert row.value == (row.number, True)
            assert row.began <= row.ended <= self.now
            self.training[row.number] = version
        assert len(batch) <= self.per_step
        if len(batch) < self.per_step:
            more = [*self.in_flight, *self.ready] or self.rows_left
            assert not more, "a batch is short, and more could come"
        self.take_rejected()

    def take_rejected(self) -> None:
        assert [row.number for row in self.producer.take_rejected()] == self.rejected
        self.resolved |= {*self.rejected}
        self.rejected = []

    def eager(self) -> None:
        "What may be started, is; but after an error or a drain nothing is, until a batch is asked for."
        if not (self.held or self.broken or self.quiet):
            assert not (self.gate.rows and self.rows_left), "a row could be started"

    def finished(self, number: int, outcome: str) -> None:
        version, end = self.in_flight[number]
        if outcome in ("raises", "cancels itself"):  # and is requeued
            end.cancel() if outcome == "cancels itself" else end.set_exception(Broken())
            self.broken = True
            return
        del self.in_flight[number]
        if outcome == "useful":
            self.ready[number] = version
        else:
            self.rejected.append(number)
        end.set_result(outcome == "useful")

    @rule(hours=st.integers(1, 5))
    def time_passes(self, hours: int) -> None:
        self.now += hours
        if not self.in_flight:
            self.idle += hours

    @rule()
    def fill(self) -> None:
        self.inside(self.producer.fill)
        self.eager()

    ENDS = st.sampled_from(["useful"] * 5 + ["useless"] * 3 + ["raises", "cancels itself"])

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), outcome=ENDS)
    def a_row_ends(self, data: st.DataObject, outcome: str) -> None:
        number = data.draw(st.sampled_from(sorted(self.in_flight)))
        self.inside(lambda: self.finished(number, outcome))
        self.eager()

    @precondition(lambda self: len(self.in_flight) > 1)
    @rule(data=st.data(), outcome=st.sampled_from(["useful", "useless"]))
    def rows_end_together(self, data: st.DataObject, outcome: str) -> None:
        numbers = data.draw(
            st.lists(st.sampled_from(sorted(self.in_flight)), unique=True, min_size=2)
        )
        self.inside(lambda: [self.finished(number, outcome) for number in numbers])
        self.eager()

    def ask(self) -> None:
        self.asking = self.loop.create_task(self.producer.batch(self.per_step))

    def publish(self) -> None:
        self.trained |= {*self.training}
        self.last = self.training
        self.training = {}
        self.gate.publish(self.gate.version + 1)
        self.producer.fill()

    @precondition(lambda self: not (self.asking or self.draining or self.training))
    @rule()
    def somebody_wants_a_batch(self) -> None:
        self.inside(self.ask)

    @precondition(
        lambda self: not (self.asking or self.draining or self.training or self.held or self.broken)
    )
    @rule()
    def a_step_is_made_of_the_newest_rows(self) -> None:
        self.make_step(lambda rows: rows[-1])

    def make_step(self, next_row: Callable[[list[int]], int]) -> None:
        self.inside(self.ask)
        while self.asking is not None:
            assert self.in_flight, "a task waits, and no row is in flight"
            number = next_row([*self.in_flight])  # in the order in which they were started
            self.inside(lambda number=number: self.finished(number, "useful"))
        self.inside(self.publish)
        self.eager()

    @precondition(lambda self: self.training and not self.draining)
    @rule()
    def weights_are_published(self) -> None:
        self.inside(self.publish)
        self.eager()

    @precondition(lambda self: self.last and not (self.asking or self.draining or self.training))
    @rule(at_once=st.booleans())
    def the_last_step_is_undone(self, at_once: bool) -> None:
        def undo() -> None:
            version = self.gate.version - 1
            kept = {n for n, v in self.ready.items() if v <= version} | {
                n for n, (v, _) in self.in_flight.items() if v <= version
            }
            self.producer.cancel_newer_than(newer_than=version)
            assert {*self.ready, *self.in_flight} == kept
            self.gate.publish(version)
            self.trained -= {*self.last}
            self.training = self.last
            self.last = {}
            if at_once:
                self.producer.fill()

        self.inside(undo)

    @precondition(lambda self: not (self.asking or self.draining))
    @rule(at_once=st.booleans())
    def everything_is_given_up(self, at_once: bool) -> None:
        def give_up() -> None:
            self.producer.cancel_newer_than()
            assert not [*self.in_flight, *self.ready, *self.rejected]
            if at_once:
                self.producer.fill()

        self.inside(give_up)

    @precondition(lambda self: not self.draining)
    @rule()
    def no_row_is_to_be_started(self) -> None:
        self.held = True
        self.producer.held = "paused"

    @precondition(lambda self: self.held and not self.draining)
    @rule()
    def rows_are_started_again(self) -> None:
        def resume() -> None:
            self.held = False
            self.producer.held = ""
            self.producer.fill()

        self.inside(resume)
        self.eager()

    @precondition(lambda self: not (self.asking or self.draining))
    @rule()
    def drain(self) -> None:
        def begin() -> None:
            self.draining = self.loop.create_task(self.producer.drain())

        self.inside(begin)

    # -- what holds

    @invariant()
    def every_row_is_in_one_place(self) -> None:
        places = [
            self.waiting,
            self.in_flight,
            self.ready,
            self.rejected,
            self.training,
            self.trained,
            self.resolved,
        ]
        assert sorted(number for place in places for number in place) == list(range(self.taken))

    @invariant()
    def the_producer_knows_them_there(self) -> None:
        p = self.producer
        assert p.in_flight.keys() == self.in_flight.keys()
        assert [(row.number, row.version) for row in p.ready] == list(self.ready.items())
        assert [row.number for row in p.rejected] == self.rejected

    @invariant()
    def the_gate_counts_whole_rows(self) -> None:
        assert self.gate.running == self.k * len(self.in_flight)
        assert self.gate.accepted == self.k * (
            len(self.ready) + len(self.training) + len(self.trained)
        )

    @invariant()
    def nothing_is_overdrawn(self) -> None:
        assert self.gate.staleness_capacity >= 0
        assert self.room is None or self.k * len(self.in_flight) <= self.room
        assert self.gate.concurrency_capacity is None or self.gate.concurrency_capacity >= 0

    @invariant()
    def a_waiting_task_continues(self) -> None:
        if self.asking is not None or self.draining is not None:
            assert self.in_flight, "a task waits, and no row is in flight"
        stuck = not (self.in_flight or self.training or self.held or self.broken)
        if stuck and self.rows_left:
            assert self.gate.rows or len(self.ready) >= self.per_step, (
                "no batch, and no row may be started"
            )

    @invariant()
    def idle_time_is_right(self) -> None:
        idle = self.producer.idle_seconds
        assert idle == self.idle
        assert idle >= self.idle_before
        self.idle_before = idle


TestRows = Rows.TestCase
TestRows.settings = settings(stateful_step_count=50)

ORDERS = {
    "newest": lambda rows: rows[-1],
    "oldest": lambda rows: rows[0],
    "middle": lambda rows: rows[len(rows) // 2],
}


@pytest.mark.parametrize("order", ORDERS)
def test_every_row_is_trained_in_time_in_the_worst_order(order: str) -> None:
    for per_step, bound, room in product((1, 2, 3), (0, 1, 2, 3), (None, 2, 5)):
        rows = Rows()
        rows.open(per_step=per_step, k=1, bound=bound, room=room, total=7 * per_step + 1)
        while rows.rows_left or rows.in_flight or rows.ready:
            rows.make_step(ORDERS[order])
            for check in (
                rows.every_row_is_in_one_place,
                rows.the_gate_counts_whole_rows,
                rows.nothing_is_overdrawn,
            ):
                check()
        assert rows.trained == {*range(rows.total)}
        rows.teardown()
