"""Recorded runs of the cookbook's asynchronous loops, replayed with our gate and our producer on a simulated clock.

Each is played our way. Where that is not what was recorded, it is played the other program's way (`theirs`): a case
then agrees up to the choices of `OTHER_WAY`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from golden_adapters import (
    AGREED,
    Case,
    Outcome,
    adapter,
    assert_rejected,
    simulate,
    unordered_rewards,
)

from rl_notebook.loop.async_loop import AsyncGRPOLoop
from rl_notebook.loop import rollouts
from rl_notebook.core.advantages import has_no_signal
from rl_notebook.config.config import Config
from rl_notebook.core.types import RolloutSample
from rl_notebook.task.data import Row
from rl_notebook.loop.groups import Finished, Gate, ScoredGroup, Producer
from rl_notebook.task.data import Prompt

NO_ROOM = "a row without room for all of it is rejected; agrees when it is counted all the same"
PARTLY_DONE = "a row takes the place of all its samples until it is complete; agrees when those that are done leave"
OTHER_WAY = (
    "agrees in the other way: samples that are done leave their place, rows come back only while it waits, a batch "
    "waits for no slow row, a whole row is sampled again, rows without signal are resolved at once and go with the "
    "next step, samples and not rows are in flight, rewards are those of the rows that train"
)
INTERVAL = "weights are synced after every step, another interval is rejected; agrees when the gate is opened by hand"
GROUP_OF_ONE = "groups of one are rejected at once; it drops every row"
MANY_CHUNKS = "more chunks than groups are rejected; agrees with as many chunks as groups"


def either_way(play: Callable[[bool], Any], wanted: Any) -> tuple[str, ...]:
    "Nothing where the recorded thing happens in our way; the difference where it happens only in the other one."
    if play(False) == wanted:
        return ()
    assert play(True) == wanted
    return (OTHER_WAY,)


# -- the gate ----------------------------------------------------------------------------------------------------


@adapter("async_gate__HEAD")
def gate_arithmetic(case: Case) -> Outcome:
    "How many rows may be started, for any counts."
    x = case.inputs
    c = case.config
    e = case.expected
    k = c["completions_per_prompt"]
    gate = Gate(
        c["prompt_groups_per_step"],
        k,
        x["max_staleness"],
        x["max_concurrent"],
        version=x["published_version"],
    )
    gate.accepted = x["accepted_samples_offset"] + x["accepted_samples"]
    gate.running = x["reserved_samples"]
    recorded = (e["staleness_capacity"], e["concurrency_capacity"], e["admission_capacity"] // k)
    assert gate.staleness_capacity == e["staleness_capacity"]

    if (gate.concurrency_capacity, gate.rows) == recorded[1:]:
        return AGREED
    room = replace(gate, max_concurrency=gate.max_concurrency + gate.running - x["in_flight"])
    assert (room.staleness_capacity, room.concurrency_capacity, room.rows) == recorded
    return Outcome((PARTLY_DONE,))


def states_of(producer: Producer[str], offset: int) -> dict[str, Any]:
    "What the recorded controller shows."
    gate, k = producer.gate, producer.gate.completions_per_prompt
    stale = gate.staleness_capacity
    room = gate.concurrency_capacity
    rejected = Counter(row.value for row in producer.rejected)
    return {
        "version": gate.version,
        "running": gate.running,
        "accepted": gate.accepted,
        "staleness_capacity": stale,
        "concurrency_capacity": room,
        "capacity": max(0, stale if room is None else min(stale, room)),
        "rows_admissible": gate.rows,
        "is_staleness_bound": stale < k and (room is None or room >= k),
        "resolved_count": offset + len(producer.ready) + rejected.total(),
        "sample_fails": rejected["reject:none"],
        "filter_drops": rejected["reject:filter"],
    }


@adapter("async_gate_controller__517d206d")
def gate_controller(case: Case) -> Outcome:
    "Rows that are started, come back useful or not, and weights that are published, in any order."
    x = case.inputs
    c = case.config
    ends = dict[int, asyncio.Future[str]]()
    differs = dict[str, None]()
    gate = Gate(
        c["prompt_groups_per_step"],
        c["completions_per_prompt"],
        c["max_head_offpolicy_versions"],
        c["max_concurrent"],
    )

    async def play() -> list[dict[str, Any]]:
        wanted = list[int]()
        numbers = iter(range(len(x["ops"])))

        def run(number: int) -> asyncio.Future[str]:
            ends[number] = asyncio.get_running_loop().create_future()
            return ends[number]

        producer = Producer(
            gate,
            lambda: wanted.pop() if wanted else None,
            run,
            lambda value: value == "accept",
            clock=lambda: 0.0,
        )
        states = [states_of(producer, c["resolved_offset"])]
        for op in x["ops"]:
            if op == "submit":
                room = gate.rows
                wanted = [next(numbers)]
                if not room:
                    assert_rejected(gate.admit, "a row")
                    differs[NO_ROOM] = None
                    producer.gate = replace(
                        gate, max_head_offpolicy_versions=10**6, max_concurrency=None
                    )
                assert producer.fill() == 1
                await asyncio.sleep(0)
                gate.running = producer.gate.running
                producer.gate = gate
            elif op == "advance_version":
                gate.publish(gate.version + 1)
            else:
                number, flight = next(iter(producer.in_flight.items()))
                ends[number].set_result(op)
                await asyncio.wait([flight.task])
                await asyncio.sleep(0)
            states.append(states_of(producer, c["resolved_offset"]))
        producer.cancel_newer_than()
        await asyncio.sleep(0)
        return states

    assert simulate(play()) == case.expected["states"]
    return Outcome(tuple(differs))


# -- whole runs --------------------------------------------------------------------------------------------------


class Run:
    "Rows of a recorded case, sampled by our functions, with a gate, a producer, and what of a loop is asked by them."

    waits = True  # whether the other program lets rows come back only while it waits for them

    def __init__(self, case: Case, theirs: bool, gate: Gate):
        self.x = case.inputs
        self.c = case.config
        self.theirs = theirs
        self.gate = gate
        self.events: list[Any] = []
        # of the rollout function, by row and sample
        self.calls: Counter[tuple[int, int]] = Counter()
        self.out: Counter[int] = Counter()  # samples that are not done, by row
        self.taken = self.lost = 0
        self.reasons: dict[int, str] = {}  # of rows that are back
        self.looking = asyncio.Event()
        self.counts: Counter[str] = Counter()
        steps = {"prompt_groups_per_step": gate.groups_per_step, "advantage_scale": "batch"}
        self.cfg = SimpleNamespace(drop_zero_variance_groups=True, teacher_coeff=0.0, **steps)
        clock = asyncio.get_running_loop().time
        self.producer: Producer[ScoredGroup] = Producer(
            gate, self.take, self.row, self.useful, clock=clock
        )

    # what a loop is asked
    @property
    def batch(self) -> Any:
        return SimpleNamespace(rows=self.live)

    @property
    def state(self) -> Any:
        return SimpleNamespace(number=self.gate.version + 1)

    def keep(self, group: Any) -> bool:
        return not (self.c["filter"] and has_no_signal(group.rewards))

    trains_on = AsyncGRPOLoop.trains_on
    _compared_alone = AsyncGRPOLoop._compared_alone

    # what a producer is made of
    def take(self) -> int | None:
        "The next row, if there is one, and as far as samples are counted, if there is room."
        k = self.c["completions_per_prompt"]
        most = self.c.get("max_concurrent_rollouts")
        full = self.theirs and most is not None and self.out.total() + k > most
        if full or self.taken == len(self.x["kind"]):
            return None
        self.out[self.taken] = k
        self.taken += 1
        return self.taken - 1

    async def rollout(
        self, sample_prompt: dict, row_index: int, rollout_index: int
    ) -> RolloutSample | None:
        "One sample, as recorded."
        at = row_index, rollout_index
        self.out[row_index] += self.calls[at] > 0
        self.calls[at] += 1
        self.events.append(["start", *at])
        await asyncio.sleep(
            self.x["latency"][row_index][rollout_index] + 0.5 * (self.calls[at] - 1)
        )
        while self.theirs and self.waits and not self.looking.is_set():
            await self.looking.wait()
        self.out[row_index] -= 1
        if self.theirs and self.out[row_index]:
            self.producer.fill()
        kind = self.x["kind"][row_index][rollout_index]
        self.lost += kind == "drop"
        reward = 1.0 if kind == "uniform" else float(sum(at) % 2)
        return (
            None
            if kind == "drop"
            else RolloutSample([1, 2], [float("nan"), -0.1], [0, 1], reward=reward)
        )

    async def row(self, number: int) -> ScoredGroup:
        "All samples of a row, those that are lost again."
        prompt = Prompt(Row(str(number), prompt="?"), [1], index=number, number=number)
        k = self.c["completions_per_prompt"]
        again = self.c.get("max_incomplete_group_retries", 0)
        fewest = max(self.c["min_group_size"], 2 if self.theirs else 1)
        rounds, inside = (1 + again, 0) if self.theirs else (1, again)
        for _ in range(rounds):
            sampled = await rollouts.sample_rollouts(self.rollout, prompt, k, group_retries=inside)
            group = rollouts.assemble(sampled, sampled.samples, fewest)
            if group.samples:
                break
        return ScoredGroup(sampled, group)

    def useful(self, answered: ScoredGroup) -> bool:
        "Whether a row is trained on, as a loop decides it."
        result = AsyncGRPOLoop.note_signal(self, answered)
        number = answered.group.number
        self.counts["sample_fails"] += len(answered.group.dropped)
        self.counts["filter_drops"] += bool(answered.group.samples) and not result
        self.reasons[number] = (
            "accepted" if result else "filter" if answered.group.samples else "none"
        )
        return result

    async def next_rows(self, count: int, places: int) -> list[Finished[ScoredGroup]]:
        "`count` rows to train on, as soon as they are there."
        p = self.producer
        if not self.theirs:
            return await p.batch(count, places=places)
        p.fill()
        while len(p.ready) < count and p.in_flight:
            p.changed.clear()
            await p.changed.wait()
        rows = p.ready[:count]
        p.ready = p.ready[count:]
        return rows

    # what is shown of it
    def rejected(self, reason: str = "") -> int:
        "The number of rows so far without signal, for one reason or any."
        return sum(why != "accepted" and reason in ("", why) for why in self.reasons.values())

    @property
    def retries(self) -> int:
        "Rounds in which something was sampled again."
        most = {
            row: max(self.calls[row, i] for i in range(len(kinds)))
            for row, kinds in enumerate(self.x["kind"])
        }
        return sum(max(0, calls - 1) for calls in most.values())

    def metrics(self, live: Sequence[Finished[ScoredGroup]]) -> dict[str, float]:
        "Those of a step."
        self.live = live
        metrics = AsyncGRPOLoop.gate_metrics(self)
        if self.theirs:
            metrics |= {
                "async/in_flight": self.out.total(),
                "async/sample_fails": self.rejected("none"),
            }
        return metrics


def rewards_of(rows: Sequence[Finished[ScoredGroup]]) -> list[float]:
    return [float(r) for row in rows for r in row.value.group.rewards]


def settings(c: dict[str, Any]) -> dict[str, Any]:
    "A recorded call in the words of our config."
    names = {
        "completions_per_prompt": "completions_per_prompt",
        "prompt_groups_per_step": "prompt_groups_per_step",
        "max_head_offpolicy_versions": "max_head_offpolicy_versions",
        "max_head_off_policy_versions": "max_head_offpolicy_versions",
        "max_concurrent": "max_concurrency_rollout_sample",
        "max_concurrent_rollouts": "max_concurrency_rollout_sample",
        "weight_sync_interval": "weight_sync_interval",
        "min_group_size": "min_group_size",
        "max_incomplete_group_retries": "max_incomplete_group_retries",
        "training_chunks_per_step": "pipeline_chunks_per_step",
        "synchronous_training": "synchronous_training",
    }
    return {
        "recipe": "async_rl_loop",
        **{ours: c[theirs] for theirs, ours in names.items() if theirs in c},
    }


def checked_settings(case: Case) -> list[str]:
    "What our config rejects of a call that the other program takes."
    c = case.config
    settings_of_case = settings(case.config)
    differs = []
    fixes = {
        INTERVAL: ("weight_sync_interval", 1, c.get("weight_sync_interval", 1) != 1),
        GROUP_OF_ONE: ("completions_per_prompt", 2, c["completions_per_prompt"] == 1),
        MANY_CHUNKS: (
            "pipeline_chunks_per_step",
            c["prompt_groups_per_step"],
            c.get("training_chunks_per_step", 1) > c["prompt_groups_per_step"],
        ),
    }
    for why, (name, fixed, broken) in fixes.items():
        if broken:
            assert_config_rejects(settings_of_case, name)
            settings_of_case[name] = fixed
            differs.append(why)
    Config(**settings_of_case)
    return differs


def assert_config_rejects(config_settings: dict[str, Any], *names: str) -> None:
    "Check that our config rejects a call because of a setting."
    assert_rejected(lambda: Config(**config_settings), *names)


@adapter("async_loop__517d206d")
def whole_loop(case: Case) -> Outcome:
    "What trains together, how stale it is, what the gate says, when weights are synced."
    c = case.config
    e = case.expected
    if case.raises:
        assert_config_rejects(settings(c), *(name for name in settings(c) if name != "recipe"))
        return AGREED
    wanted = {
        **e,
        "train_and_sync": [round_floats(unordered_rewards(event)) for event in e["train_and_sync"]],
    }
    names = {name for event in e["train_and_sync"] if event[0] == "train_step" for name in event[3]}

    def play(theirs: bool) -> Any:
        return simulate(played_loop(case, theirs, names))

    return Outcome((*checked_settings(case), *either_way(play, wanted)))


def round_floats(event: Sequence[Any]) -> list[Any]:
    "An event with its floats to 12 digits."

    def short(value):
        return round(value, 12) if isinstance(value, float) else value

    return [
        {k: short(v) for k, v in part.items()} if isinstance(part, dict) else part for part in event
    ]


async def played_loop(case: Case, theirs: bool, names: set[str]) -> dict[str, Any]:
    "The recorded loop with our parts."
    c = case.config
    k = c["completions_per_prompt"]
    n = c["prompt_groups_per_step"]
    events = []
    step = c["global_step"]
    in_records = 0
    gate = Gate(n, k, c["max_head_offpolicy_versions"], c["max_concurrent"])
    run = Run(case, theirs, gate)

    async def next_batch() -> list[Finished[ScoredGroup]]:
        run.looking.set()
        try:
            return await run.next_rows(n, n)
        finally:
            run.looking.clear()

    while live := await next_batch():
        back = len(run.reasons)
        if c["synchronous_training"]:
            run.looking.set()
            await run.producer.drain()
            run.looking.clear()
        others = run.producer.take_rejected()
        in_records += len(live) + len(others)
        stats = run.metrics(live) | {
            "all_raw_rewards": sorted(rewards_of(live if theirs else [*live, *others])),
            "valid_prompt_groups": len(live),
            "total_sampled": gate.accepted + run.rejected() * k,
            "resolved_rows": c["resolved_rows_offset"] + (back if theirs else in_records),
        }
        await asyncio.sleep(c["train_duration"])
        shown = {name: stats[name] for name in names}
        events.append(round_floats(["train_step", step, [row.number for row in live], shown]))
        step += 1
        if c["weight_sync"] and step % c["weight_sync_interval"] == 0:
            await asyncio.sleep(c["weight_sync_duration"])
            events.append(["weight_sync", step])
            gate.publish(gate.version + 1)
        run.producer.fill()
    return {
        "global_step": step,
        "final_stats": {
            "sample_fails": run.rejected("none") if theirs else run.counts["sample_fails"],
            "filter_drops": run.counts["filter_drops"],
            "stale_drops": 0,
            "total_accepted": gate.accepted // k,
            "resolved_rows": c["resolved_rows_offset"]
            + in_records
            + len(run.producer.take_rejected()),
        },
        "train_and_sync": events,
    }


@adapter("async_coordinator__HEAD")
def coordinator(case: Case) -> Outcome:
    "What is sampled when, which chunks train, when rows are resolved, and what the gate says when weights are published."
    c = case.config
    e = case.expected
    if case.raises:
        assert_config_rejects(settings(c), *(name for name in settings(c) if name != "recipe"))
        return AGREED
    wanted = [unordered_completed(event) for event in e["events"]], e["global_step"]
    shown = [event for event in e["events"] if event[0] in ("chunk", "publish")]
    assert shown == e["train_and_publish"]

    def play(theirs: bool) -> Any:
        return simulate(played_coordinator(case, theirs))

    return Outcome((*checked_settings(case), *either_way(play, wanted)))


def unordered_completed(event: Sequence[Any]) -> list[Any]:
    "A recorded event; the order of rewards is not guaranteed."

    def listed(part):
        return isinstance(part, dict) and "completed_rewards" in part

    return [
        {**part, "completed_rewards": sorted(part["completed_rewards"])} if listed(part) else part
        for part in event
    ]


class Coordinated(Run):
    "A run whose rows are resolved in the order of the data."

    waits = False
    resolved = 0
    batch: Sequence[Finished[ScoredGroup]] = ()  # rows of the step in progress
    # rows without signal, taken and kept for a later step
    unrecorded: Sequence[Finished[ScoredGroup]] = ()

    def useful(self, answered: ScoredGroup) -> bool:
        result = super().useful(answered)
        if not result and self.theirs:
            self.resolve()
        return result

    def resolve(self) -> None:
        "Note the rows that need not be sampled again, as far as all rows before them need not."
        p = self.producer
        kept = [*p.ready, *self.batch]
        if not self.theirs:
            kept += [*p.rejected, *self.unrecorded]
        pending = {*p.in_flight, *(row.number for row in kept)}
        while self.resolved < self.taken and self.resolved not in pending:
            self.events.append(["resolved", self.resolved, self.reasons[self.resolved]])
            self.resolved += 1

    def take_others(self, partial: bool) -> list[Finished[ScoredGroup]]:
        "Rows without signal, which go with the step in progress."
        others = [*self.unrecorded, *self.producer.take_rejected()]
        last = float("inf") if partial or not self.theirs else max(row.ended for row in self.batch)
        self.unrecorded = [row for row in others if row.ended > last]
        return [row for row in others if row.ended <= last]

    def snapshot(self, offset: int) -> dict[str, Any]:
        "What the gate says."
        gate = self.gate
        most = self.c["max_concurrent_rollouts"]
        room = gate.concurrency_capacity
        if self.theirs and most is not None:
            room = most - self.out.total()
        room = None if room is None else max(0, room)
        stale = max(0, gate.staleness_capacity)
        return {
            "published_version": gate.version,
            "accepted_samples": gate.accepted - offset,
            "reserved_samples": gate.running,
            "admission_capacity": stale if room is None else min(stale, room),
            "staleness_capacity": stale,
            "concurrency_capacity": room,
            "rows_submitted": self.taken,
            "rows_accepted": gate.accepted // gate.completions_per_prompt
            - offset // gate.completions_per_prompt,
            "rows_rejected": self.rejected(),
            "sample_fails": self.rejected("none") if self.theirs else self.counts["sample_fails"],
            "filter_drops": self.counts["filter_drops"],
            "trajectory_drops": self.lost,
            "incomplete_group_retries": self.retries,
        }


async def played_coordinator(case: Case, theirs: bool) -> tuple[list[Any], int]:
    "The recorded coordinator with our parts."
    c = case.config
    n = c["prompt_groups_per_step"]
    k = c["completions_per_prompt"]
    version = c["global_step"]
    offset = version * n * k
    room = None if theirs else c["max_concurrent_rollouts"]
    gate = Gate(n, k, c["max_head_off_policy_versions"], room, version=version, accepted=offset)
    run = Coordinated(case, theirs, gate)
    chunks = rollouts.balanced_chunks(n, c["training_chunks_per_step"])
    while True:
        run.batch = []
        for i, target in enumerate(chunks):
            if not (rows := await run.next_rows(target, n - len(run.batch))):
                break
            run.batch = [*run.batch, *rows]
            numbers = [row.number for row in rows]
            versions = [row.version for row in rows]
            run.events.append(
                ["chunk", gate.version + 1, i, len(chunks), target, numbers, versions]
            )
            await asyncio.sleep(c["train_chunk_duration"])
        if not run.batch:
            break
        partial = len(run.batch) < n
        others = run.take_others(partial)
        realized = run.batch
        run.batch = ()
        run.resolve()
        gate.publish(gate.version + 1)
        published = {
            "resolved_rows": run.resolved,
            "trained_against_version": gate.version - 1,
            "partial": partial,
            "realized_groups": len(realized),
            "completed_rewards": sorted(rewards_of([*realized, *others])),
        }
        run.events.append(["publish", gate.version, published, run.snapshot(offset)])
        run.producer.fill()
    run.unrecorded = run.take_others(True) and []
    run.resolve()
    return run.events, gate.version
