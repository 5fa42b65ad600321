"""How much of sampling and training happens at the same time, and what the staleness bound allows.

    python benchmarks/overlap.py --json FILE

Three parts. On a *virtual clock* the recipe trains with a trainer that only takes its time and rollouts that only take
theirs: what is measured is the schedule, exactly. With the *emulator* in a separate process the training is real and
goes over HTTP. With the *local* backend trainer and sampler are one worker thread.

Every run is timed from the first rollout to the last weight sync, start-up and drain included, and compared with the
longer of two others: "sampling" is the same run when training takes no time, "training" when rollouts take none.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import re
import selectors
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch

from rl_notebook.backends.base import Backend
from rl_notebook.backends.local.scoring import loss_and_dlogprobs
from rl_notebook.backends.local.trainer import open_local
from rl_notebook.backends.services.wire import Secret
from rl_notebook.backends.services.tinker import open_tinker
from rl_notebook.task.chat import sample_from_completion
from rl_notebook.config.config import Config
from rl_notebook.core.types import (
    AdamParams,
    Datum,
    Logprobs,
    LossOutput,
    RolloutSample,
    SampleParams,
)
from rl_notebook.runs.records import StepRecord
from rl_notebook.recipes import async_rl_loop, rl_loop
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_rows

T = TypeVar("T")


# --- a clock that jumps ------------------------------------------------------------------------------------------


class Jumps(selectors.DefaultSelector):
    "Instead of waiting it moves its clock on."

    clock = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "every task waits and nothing is scheduled"
        self.clock += max(timeout, 0.0)
        return super().select(0)


class Inline(ThreadPoolExecutor):
    "`asyncio.to_thread` without threads: the clock would not wait for them."

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        done: Future[T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


def simulate(main: Coroutine[Any, Any, T]) -> T:
    "Run a coroutine on an event loop in which sleeping takes no time and everything else takes none either."
    selector = Jumps()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.clock
    loop.set_default_executor(Inline())
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


def now() -> float:
    "Seconds, on the clock of the event loop."
    return asyncio.get_running_loop().time()


# --- rollouts and trainers that take a given time ----------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    "A run."

    steps: int = 40
    groups: int = 4  # of a batch
    completions: int = 4  # of a group
    versions: int = 1  # O: max_head_offpolicy_versions
    places: float = 1.0  # R: samples that may be in flight, in batches
    latency: float = 1.0  # seconds of a rollout
    spread: float = 0.0  # share by which rollouts are faster or slower, evenly spread
    training: float = 1.0  # seconds of a step of a trainer that only takes its time
    tokens: int = 2  # of a completion that is made up
    sampled: bool = False  # after the latency, sample from the sampler
    synchronous: bool = False  # with `rl_loop`

    @property
    def samples(self) -> int:
        "Of a batch."
        return self.groups * self.completions

    def config(self) -> Config:
        "For the recipe."
        overrides = {"recipe": "rl_loop"} if self.synchronous else {
            "recipe": "async_rl_loop",
            "max_head_offpolicy_versions": self.versions,
            "max_concurrency_rollout_sample": round(self.places * self.samples),
        }  # fmt: skip
        shape = {"prompt_groups_per_step": self.groups, "completions_per_prompt": self.completions}
        short = {"max_completion_tokens": 32, "max_seq_len": 128}
        return Config(
            steps=self.steps, kl_beta=0.0, sync_audit=False, **short, **shape, **overrides
        )


@dataclass
class Ledger:
    "Who was busy when, on the clock of the event loop."

    sampling: list[tuple[float, float]] = field(default_factory=list)
    training: list[tuple[float, float]] = field(default_factory=list)
    syncs: list[float] = field(default_factory=list)  # when the weights had reached the sampler


class PacedTrainer:
    "A trainer that learns nothing, and takes its time: most of it backward, a tenth each for update and sync."

    def __init__(self, seconds: float, ledger: Ledger):
        self.seconds = seconds
        self.ledger = ledger
        self.version = 0

    async def work(self, share: float) -> None:
        begin = now()
        await asyncio.sleep(share * self.seconds)
        self.ledger.training.append((begin, now()))

    async def forward(self, datums: Sequence[Datum]) -> list[Logprobs]:
        raise AssertionError("this run needs no scores")

    async def forward_backward_custom(self, datums: Sequence[Datum], loss_fn: Any) -> LossOutput:
        await self.work(0.8)
        series = [torch.full((len(d.weights),), -1.0, requires_grad=True) for d in datums]
        loss, metrics, dlogprobs = loss_and_dlogprobs(datums, series, loss_fn)
        return LossOutput(
            loss, metrics, tuple(Logprobs(s.detach().numpy()) for s in series), tuple(dlogprobs)
        )

    async def optim_step(self, adam: AdamParams, **options: Any) -> dict[str, float]:
        await self.work(0.1)
        return {"update_norm": 0.0}

    async def save_weights_for_sampler(self, name: str) -> str:
        return name

    async def sync(self, snapshot: str) -> int:
        await self.work(0.1)
        self.ledger.syncs.append(now())
        self.version += 1
        return self.version


def paced(backend: Backend, seconds: float, ledger: Ledger) -> Backend:
    "The backend with a trainer that only takes its time."
    trainer: Any = PacedTrainer(seconds, ledger)
    return replace(backend, policy=trainer, sync=trainer.sync, close=None)


def make_rollouts(setting: Setting, ledger: Ledger) -> Callable[[Any], Any]:
    "A rollout factory: sleep, then a made-up answer, or one that is really sampled. Every second sample is right."

    def factory(setup: Any) -> Any:
        async def rollout_fn(sample_prompt: dict) -> RolloutSample:
            begin = now()
            seed = sample_prompt["seed"]
            prompt = sample_prompt["prompt_token_ids"]
            factor = 1 + setting.spread * random.Random(seed).uniform(-1, 1)
            await asyncio.sleep(setting.latency * factor)
            reward = float(sample_prompt["sample_index"] % 2)
            if setting.sampled:
                params = SampleParams(max_tokens=setting.tokens, seed=seed)
                [completion] = await setup.sampler.sample(prompt, params)
                sample = sample_from_completion(completion, reward)
            else:
                tokens = [*prompt, *(5 + (seed + i) % 40 for i in range(setting.tokens))]
                mask = [0] * len(prompt) + [1] * setting.tokens
                sample = RolloutSample(tokens, [-1.0] * len(tokens), mask, reward=reward)
            ledger.sampling.append((begin, now()))
            return sample

        return rollout_fn

    return factory


# --- one run -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    "What a run took."

    wall: float  # seconds, first rollout to last sync
    period: float  # seconds per step in the second half: without start-up and drain
    trainer_idle: float  # share of the wall
    sampler_idle: float  # share of the wall times the samples that may be in flight
    age: int  # versions, of the oldest group trained on


async def train(setting: Setting, backend: Backend, ledger: Ledger) -> Timing:
    "One run of the recipe."
    factory = make_rollouts(setting, ledger)
    cfg = setting.config()
    records = list[StepRecord]()
    ends = list[float]()
    rows = toy_rows((setting.steps + 1) * setting.groups, seed=1)
    quiet: dict[str, Any] = {"say": lambda line: None, "progress": False, "backend": backend}
    quiet["on_record"] = [records.append, lambda record: ends.append(now())]
    if setting.synchronous:
        problem = rl_loop.Problem(rl_loop.load_rows(rows), (), factory)
        await rl_loop.train(cfg, problem=problem, **quiet)
    else:
        await async_rl_loop.train(cfg, rollout_fn_factory=factory, rows=rows, **quiet)
    assert len(records) == setting.steps
    assert all(r.trained and len(r.datums) == setting.samples for r in records), (
        "not every batch was whole"
    )
    return measured(setting, ledger, records, ends)


def measured(
    setting: Setting, ledger: Ledger, records: Sequence[StepRecord], ends: Sequence[float]
) -> Timing:
    "The figures of a run from what was noted."
    ends = ledger.syncs[-len(ends) :] or ends
    begin = min(b for b, _ in ledger.sampling)
    bursts = max(1, len(ends) // 2 // (setting.versions + 1))
    # O + 1 batches may come in one burst
    wall = ends[-1] - begin
    late = bursts * (setting.versions + 1)
    phases = ("reference", "backward", "optimize", "sync")
    seconds = [e - b for b, e in ledger.training] or [
        r.seconds.get(p, 0.0) for r in records for p in phases
    ]
    busy = sum(seconds)
    sampled_s = sum(e - b for b, e in ledger.sampling)
    room = setting.samples * (1.0 if setting.synchronous else setting.places)
    ages = [
        r.step - 1 - (g.submitted or 0)
        for r in records
        for g in r.groups
        if not setting.synchronous
    ]
    return Timing(
        wall,
        (ends[-1] - ends[-1 - late]) / late if late < len(ends) else wall / len(ends),
        1 - busy / wall if wall else 0.0,
        1 - sampled_s / (room * wall) if wall else 0.0,
        max(ages, default=0),
    )


# --- part 1: the schedule ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Overlap:
    "A run, compared with the two that it combines."

    setting: Setting
    both: Timing
    sampling: float  # seconds when training takes no time
    training: float  # seconds when rollouts take none
    bound: float | None  # seconds per step that the staleness bound forces; None = latencies differ

    @property
    def wall_over_max(self) -> float:
        return self.both.wall / max(self.sampling, self.training)


def least_period(setting: Setting) -> float:
    """Seconds per step that no schedule can undercut, with latencies that are all the same.

    The trainer needs its time, and the sampler's places theirs. And a rollout that is trained at version v started at
    version v - O or later, so that O + 1 steps take at least as long as one rollout and one training.
    """
    ahead = (setting.latency + setting.training) / (setting.versions + 1)
    return max(setting.training, setting.latency / setting.places, ahead)


@cache
def unused_model() -> Backend:
    "A backend for its tokenizer, and for what it says it can do."
    return open_local(*load_model("tiny"), reference=False, inline=True)


@cache
def timed(setting: Setting) -> Timing:
    "A run on the virtual clock."
    ledger = Ledger()

    async def main() -> Timing:
        return await train(setting, paced(unused_model(), setting.training, ledger), ledger)

    return simulate(main())


def scheduled(setting: Setting) -> Overlap:
    "One setting, and the two runs that it combines."
    sampling = replace(setting, training=0.0)
    training = replace(setting, latency=0.0, spread=0.0)
    bound = None if setting.spread else least_period(setting)
    return Overlap(setting, timed(setting), timed(sampling).wall, timed(training).wall, bound)


ONE_BATCH = "one batch of places"
RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)  # time to sample a batch, in training times
UNIFORMS_AHEAD = (0, 1, 2, 4)  # O


MORE = (2, 4)  # R


def schedules(
    steps: int,
    ratios: Sequence[float] = RATIOS,
    ahead: Sequence[int] = UNIFORMS_AHEAD,
    places: Sequence[int] = MORE,
) -> dict[str, list[Overlap]]:
    "All settings of the first part."
    base = Setting(steps=steps)
    one = [replace(base, versions=o, latency=r) for o in ahead for r in ratios]
    many = [replace(base, versions=o, places=p, latency=p) for p in places for o in (1, 2, 3, 4)]
    return {
        ONE_BATCH: [scheduled(s) for s in one],
        "latencies of 0.5 to 1.5": [scheduled(replace(s, spread=0.5)) for s in one],
        "more places, sampling as long as training": [scheduled(s) for s in many],
    }


def enough_versions(result: Overlap) -> bool:
    "Whether the staleness bound leaves the sampler's places filled while a step trains: O >= R."
    return result.setting.versions >= result.setting.places


# --- parts 2 and 3: real training --------------------------------------------------------------------------------


@contextlib.contextmanager
def emulator() -> Iterator[tuple[str, Secret]]:
    "`rl-notebook emulate` in a separate process; its address and key."
    code = "import sys; from rl_notebook.cli import main; sys.exit(main(sys.argv[1:]))"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", code, "emulate", "--port", "0", "--folder", folder]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
            assert process.stdout is not None
            settings: dict[str, str] = {}
            for line in process.stdout:
                settings.update(re.findall(r"export (\w+)=(\S+)", line))
                if "Ctrl-C" in line:
                    break
            try:
                yield settings["TINKER_BASE_URL"], Secret(settings["TINKER_API_KEY"])
            finally:
                process.terminate()
                process.communicate()  # what it says at its end


@dataclass(frozen=True)
class Real:
    "Runs of one kind, taken in turns."

    name: str
    settings: list[Setting]  # turn by turn
    runs: dict[str, list[Timing]]  # by "sampling", "training", "synchronous", "asynchronous"

    def ratios(self, of: str) -> list[float]:
        "Wall over the longer of its parts, turn by turn."
        parts = zip(self.runs["sampling"], self.runs["training"], strict=True)
        longer = [max(a.wall, b.wall) for a, b in parts]
        return [run.wall / most for run, most in zip(self.runs[of], longer, strict=True)]

    def gain(self) -> list[float]:
        "The synchronous wall over the asynchronous one, turn by turn."
        pairs = zip(self.runs["synchronous"], self.runs["asynchronous"], strict=True)
        return [a.wall / b.wall for a, b in pairs]


async def one_run(setting: Setting, backend: Backend, still: bool = False) -> Timing:
    "One real run; `still`: with a trainer that does nothing."
    ledger = Ledger()
    used = paced(backend, 0.0, ledger) if still else replace(backend, close=None)
    return await train(setting, used, ledger)


async def in_turns(
    name: str,
    setting: Setting,
    backend: Backend,
    repeats: int,
    say: Callable[[str], Any],
    paced_by_training: bool,
) -> Real:
    """Each turn: training alone, sampling alone, synchronous, asynchronous, and training alone once more.

    Paced by training, rollouts take as long as a step has just taken: where most can be gained.
    """
    alone = replace(setting, latency=0.0, sampled=False)
    await one_run(replace(alone, steps=2), backend)  # makes what is made once
    runs: dict[str, list[Timing]] = {
        kind: [] for kind in ("training", "sampling", "synchronous", "asynchronous")
    }
    settings: list[Setting] = []
    for turn in range(repeats):
        first = await one_run(alone, backend)
        paced_setting = replace(setting, latency=first.period) if paced_by_training else setting
        settings.append(paced_setting)
        runs["sampling"].append(await one_run(paced_setting, backend, still=True))
        for kind in ("synchronous", "asynchronous")[:: 1 if turn % 2 else -1]:
            runs[kind].append(
                await one_run(replace(paced_setting, synchronous=kind == "synchronous"), backend)
            )
        last = await one_run(alone, backend)
        runs["training"].append(replace(first, wall=(first.wall + last.wall) / 2))
        say(f"{name}: turn {turn + 1} of {repeats}")
    return Real(name, settings, runs)


async def measure_service(
    url: str, key: Secret, setting: Setting, repeats: int, say: Callable[[str], Any] = print
) -> list[Real]:
    "Training over HTTP, rollouts made up after their latency; then with a request to the sampler in each."
    settings: dict[str, Any] = {
        "base_model": "tiny",
        "base_url": url,
        "key": key,
        "lora_rank": 0,
        "reference": False,
    }
    async with await open_tinker(
        **settings, tokenizer="tiny", conformance="off", probing=False
    ) as backend:
        results = await in_turns("emulator, made-up answers", setting, backend, repeats, say, True)
        sampled = replace(setting, sampled=True)
        return [
            results,
            await in_turns(
                "emulator, completions sampled after the wait", sampled, backend, repeats, say, True
            ),
        ]


async def measure_emulator(
    setting: Setting, repeats: int, say: Callable[[str], Any] = print
) -> list[Real]:
    "Training and sampling in another process."
    with emulator() as (url, key):
        return await measure_service(url, key, setting, repeats, say)


async def measure_local(
    setting: Setting, repeats: int, say: Callable[[str], Any] = print
) -> list[Real]:
    "Rollouts that wait for something else, that need the thread that trains, and that are sampled next to it."
    sampled = replace(setting, latency=0.0, sampled=True)
    async with open_local(*load_model("tiny"), reference=False) as backend:
        waits = await in_turns(
            "local, rollouts wait elsewhere", setting, backend, repeats, say, True
        )
        shared = await in_turns(
            "local, rollouts need the same thread", sampled, backend, repeats, say, False
        )
    async with open_local(
        *load_model("tiny"), reference=False, concurrent_sampling=True
    ) as backend:
        return [
            waits,
            shared,
            await in_turns(
                "local, concurrent_sampling=True", sampled, backend, repeats, say, False
            ),
        ]


# --- report ------------------------------------------------------------------------------------------------------


def median_and_range(values: Sequence[float]) -> dict[str, float]:
    "Median and range."
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summary(virtual: dict[str, list[Overlap]], real: Sequence[Real]) -> dict[str, Any]:
    "Every figure as plain values."
    where = {
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
    }
    result: dict[str, Any] = {"machine": where}
    if virtual:
        result["wall_over_max"] = worst(virtual[ONE_BATCH])
        result["virtual"] = {name: part_summary(part) for name, part in virtual.items()}
    result["real"] = {r.name: real_summary(r) for r in real}
    return result


def worst(part: Sequence[Overlap]) -> float:
    "Wall over the longer of its parts, the largest where staleness leaves enough room."
    return max(result.wall_over_max for result in part if enough_versions(result))


def part_summary(part: Sequence[Overlap]) -> dict[str, Any]:
    "The worst ratio, and the runs behind it."
    runs = [asdict(result) | {"wall_over_max": result.wall_over_max} for result in part]
    return {"wall_over_max": worst(part), "runs": runs}


def real_summary(result: Real) -> dict[str, Any]:
    "Ratios, and the runs behind them."
    return {
        "settings": [asdict(setting) for setting in result.settings],
        "wall_over_max": median_and_range(result.ratios("asynchronous")),
        "synchronous_over_max": median_and_range(result.ratios("synchronous")),
        "synchronous_over_asynchronous": median_and_range(result.gain()),
        "runs": {kind: [asdict(run) for run in runs] for kind, runs in result.runs.items()},
    }


def schedule_table(part: Sequence[Overlap]) -> str:
    "One line a setting; times in training times."
    head = f"{'R':>4}{'O':>4}{'sampling/training':>19}{'wall':>8}{'sampling':>10}{'training':>10}{'wall/max':>10}"
    lines = [
        f"{head}{'per step':>10}{'least':>8}{'trainer idle':>14}{'sampler idle':>14}{'age':>5}"
    ]
    for f in part:
        s = f.setting
        least = f"{f.bound:>8.2f}" if f.bound is not None else f"{'':>8}"
        lines.append(
            f"{s.places:>4.0f}{s.versions:>4}{s.latency / s.places / s.training:>19.2f}{f.both.wall:>8.1f}"
            f"{f.sampling:>10.1f}{f.training:>10.1f}{f.wall_over_max:>10.3f}{f.both.period:>10.2f}{least}"
            f"{f.both.trainer_idle:>14.0%}{f.both.sampler_idle:>14.0%}{f.both.age:>5}"
        )
    return "\n".join(lines)


def real_table(results: Sequence[Real]) -> str:
    "One line a kind: ratios, median and range over the turns."

    def shown(values):
        return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"

    head = f"{'':<40}{'sync / max':>22}{'async / max':>22}{'sync / async':>22}{'idle: trainer':>15}{'sampler':>9}"
    lines = [head]
    for r in results:
        idle = [
            statistics.median(getattr(t, f"{who}_idle") for t in r.runs["asynchronous"])
            for who in ("trainer", "sampler")
        ]
        ratios = [shown(v) for v in (r.ratios("synchronous"), r.ratios("asynchronous"), r.gain())]
        lines.append(
            f"{r.name:<40}"
            + "".join(f"{v:>22}" for v in ratios)
            + f"{idle[0]:>15.0%}{idle[1]:>9.0%}"
        )
    return "\n".join(lines)


PARTS = ("virtual", "emulator", "local")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument(
        "--part", choices=PARTS, action="append", help="may be given several times; default: all"
    )
    parser.add_argument("--steps", type=int, default=40, help="of a run on the virtual clock")
    parser.add_argument("--real-steps", type=int, default=16, help="of a real run")
    parser.add_argument("--repeats", type=int, default=5, help="of the real runs")
    args = parser.parse_args()
    parts = args.part or PARTS
    virtual = {}
    real = []
    torch.set_num_threads(1)
    if "virtual" in parts:
        virtual = schedules(args.steps)
        for name, part in virtual.items():
            print(
                f"\n{name}; {args.steps} steps, times in training times\n{schedule_table(part)}",
                flush=True,
            )
    real_setting = Setting(
        steps=args.real_steps, groups=4, completions=4, versions=1, latency=0.0, tokens=16
    )
    for name, measure in (("emulator", measure_emulator), ("local", measure_local)):
        if name in parts:
            real += asyncio.run(
                measure(
                    real_setting,
                    args.repeats,
                    lambda line: print(line, file=sys.stderr, flush=True),
                )
            )
    result = summary(virtual, real)
    if real:
        about = f"{args.real_steps} steps, O = 1, one batch of places; median and range of {args.repeats} turns"
        print(f"\n{about}\n{real_table(real)}")
    print(f"\nload {result['machine']['load']:.1f} on {result['machine']['cpus']} processors")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
