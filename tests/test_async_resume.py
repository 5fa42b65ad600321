"""Kill -9 at any point of an asynchronous run, resume, kill again: every row is trained once, and the run is whole.

Each run is a process, forked from a server that has imported everything. Where one is killed is drawn from a
seed: the n-th time that it reaches a place, before, inside or after the work there, or after some time. Several
kills fall on the same run folder, one after the other. `RL_NOTEBOOK_KILLS=20 pytest tests/test_async_resume.py` makes
twenty of them; `pytest -s` prints a table of what happened.
"""

import asyncio
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from rl_notebook.loop.async_loop import AsyncGRPOLoop
from rl_notebook.backends.local.trainer import open_local
from rl_notebook.task.chat import sample_from_completion
from rl_notebook.task.data import load_rows
from rl_notebook.recipes.async_rl_loop import Config
from rl_notebook.runs.run import Run
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_rows

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["rl_notebook.recipes.async_rl_loop", "peft"])

KILLS = int(os.environ.get("RL_NOTEBOOK_KILLS", "6" if os.environ.get("SLOW") == "1" else "2"))
PER_RUN = 4  # kills of one run folder
ROWS = 24
K = 4
SETTINGS = {
    "prompt_groups_per_step": 3,
    "completions_per_prompt": K,
    "max_completion_tokens": 8,
    "max_seq_len": 64,
    "learning_rate": 1e-3,
    "kl_beta": 0.0,
    "epochs": 1,
    "shuffle": True,
}
VARIANTS = [  # (versions ahead, steps between checkpoints, other settings)
    (1, 1, {}),
    (2, 2, {}),
    (2, 1, {"pipeline_chunks_per_step": 3}),
    (1, 2, {"ppo_n_minibatches": 2}),
    (2, 1, {"max_concurrency_rollout_sample": 3 * K}),
]


# --- what is run ------------------------------------------------------------------------------------------------------


def make_rollout_fn(setup: Any) -> Any:
    "Completions that take time. Every fifth row has no signal, and some samples are lost."
    log = setup.extras.get("log")

    async def rollout_fn(sample_prompt: dict, row_index: int, rollout_index: int) -> Any:
        rng = np.random.default_rng([row_index, rollout_index])
        if log is not None and rollout_index == 0:
            log(row_index)
        await asyncio.sleep(float(rng.exponential(0.01)))
        if rng.random() < 0.05:
            return None
        params = replace(setup.params, seed=sample_prompt["seed"])
        [completion] = await setup.sampler.sample(sample_prompt["prompt_token_ids"], params)
        reward = (
            1.0 if row_index % 5 == 3 else sum(map(ord, completion.text)) % 7 + rollout_index / 10
        )
        return sample_from_completion(completion, reward=reward)

    return rollout_fn


# --- where it is killed -----------------------------------------------------------------------------------------------

PLACES = {  # phase: (module, owner, function)
    "backward": ("backends.local.trainer", "LocalTrainer", "forward_backward_custom"),
    "optimize": ("backends.local.trainer", "LocalTrainer", "optim_step"),
    "sync": ("backends.local.trainer", "LocalTrainer", "save_weights_for_sampler"),
    "record": ("runs.run", "", "write_record"),
    "line of metrics": ("runs.run", "", "_append_line"),
    "checkpoint": ("backends.local.trainer", "LocalTrainer", "save_state"),
    "checkpoint, its end": ("runs.run", "", "write_described"),
    "old checkpoints": ("runs.run", "", "_keep_last"),
    "sampling": ("backends.local.trainer", "LocalSampler", "sample"),
}


@dataclass(frozen=True)
class Point:
    "Where a process ends."

    place: str  # of PLACES, or "any time"
    when: str = ""  # before, inside or after what is done there
    count: int = 1  # the n-th time that it comes there
    seconds: float = 0.0  # "inside": after it has begun; "any time": after the first answer

    def __str__(self) -> str:
        if self.place == "any time":
            return f"{1e3 * self.seconds:.0f} ms after the first answer"
        return f"{self.when} {self.place}, time {self.count}"


def points(seed: int) -> Iterator[Point]:
    "Points without end: every place comes up before one of them does again."
    rng = np.random.default_rng(seed)
    while True:
        for place in rng.permutation([*PLACES, "any time"]).tolist():
            if place == "any time":
                yield Point(place, seconds=float(rng.uniform(0.0, 0.6)))
                continue
            count = int(rng.integers(1, 3)) * (6 if place == "sampling" else 1)
            yield Point(
                place,
                str(rng.choice(["before", "inside", "after"])),
                count,
                float(rng.uniform(0, 0.01)),
            )


def kill_this_process() -> None:
    "As kill -9 from outside."
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(point: Point, note: Callable[[str], None]) -> None:
    "Arrange the end of this process, and note where it is meanwhile."
    import importlib

    for place, (module, owner, name) in PLACES.items():
        home = importlib.import_module(f"rl_notebook.{module}")
        home = getattr(home, owner) if owner else home
        setattr(home, name, with_kill_point(getattr(home, name), place, point, note))


def with_kill_point(function: Any, place: str, point: Point, note: Callable[[str], None]) -> Any:
    "A function that kills its process at the point."
    counts = Counter()

    def enter() -> bool:
        counts["calls"] += 1
        note(place)
        if point.place == "any time" and counts["calls"] == 1 and place == "sampling":
            threading.Timer(point.seconds, kill_this_process).start()
        at_point = point.place == place and counts["calls"] == point.count
        if at_point and point.when == "before":
            kill_this_process()
        if at_point and point.when == "inside":
            threading.Timer(point.seconds, kill_this_process).start()
        return at_point

    def leave(at_point: bool) -> None:
        note(f"after {place}")
        if at_point:
            kill_this_process()

    if asyncio.iscoroutinefunction(function):

        async def both(*args: Any, **kwargs: Any) -> Any:
            at_point = enter()
            result = await function(*args, **kwargs)
            leave(at_point)
            return result
    else:

        def both(*args: Any, **kwargs: Any) -> Any:
            at_point = enter()
            result = function(*args, **kwargs)
            leave(at_point)
            return result

    return both


def body(settings: dict[str, Any], resume: bool, point: Point | None, seen: Any) -> None:
    "What the process does."
    import torch

    from rl_notebook.recipes.async_rl_loop import main

    folder = settings["log_path"]
    sys.stdout = sys.stderr = open(f"{folder}.out", "a", buffering=1)  # noqa: SIM115 (until it ends)
    torch.set_num_threads(1)
    if point is not None:
        die_at(point, lambda place: setattr(seen, "value", place.encode()))
    started = os.open(f"{folder}.started", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    extras = {"log": lambda number: os.write(started, f"{os.getpid()} {number}\n".encode())}
    options = {
        "rollout_fn_factory": make_rollout_fn,
        "rows": toy_rows(ROWS, seed=3),
        "rollout_extras": extras,
    }
    print(main(Config(**settings), resume=resume, say=print, progress=False, **options))


# --- a run that is killed again and again -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Killed:
    "What was found after a kill."

    variant: str
    point: str
    phase: str  # the last place that the process is known to have come to
    steps: int  # with a record
    resumed_from: int  # the step
    resampled: int  # rows
    outcome: str = "whole"


def start(settings: dict[str, Any], resume: bool, point: Point | None) -> tuple[int, str, str]:
    "Run until the end, or until the point; (exit status, last place, output)."
    seen = SERVER.Array("c", 64)
    process = SERVER.Process(target=body, args=(settings, resume, point, seen))
    process.start()
    process.join(300)
    output = Path(f"{settings['log_path']}.out").read_text()
    assert process.exitcode is not None, f"the process did not end\n{output}"
    return process.exitcode, seen.value.decode(), output


def started_rows(folder: Path) -> list[list[int]]:
    "Rows that were started, by process."
    by_process: dict[str, list[int]] = {}
    for line in Path(f"{folder}.started").read_text().splitlines():
        process, number = line.split()
        by_process.setdefault(process, []).append(int(number))
    return list(by_process.values())


def there(folder: Path, kind: str) -> list[int]:
    "Steps of which there is a record, or a checkpoint."
    path = folder / kind
    return sorted(int(p.name) for p in path.iterdir() if p.name.isdigit()) if path.is_dir() else []


def kill_and_resume(
    settings: dict[str, Any], upcoming: Iterator[Point], kills: int, label: str
) -> list[Killed]:
    "Begin a run, kill it n times, and let it end."
    folder = Path(settings["log_path"])
    results = list[Killed]()
    resume = False
    while len(results) < kills:
        point = next(upcoming)
        status, phase, output = start(settings, resume, point)
        if status == 0:  # it ended before it came there
            break
        assert status == -signal.SIGKILL, output
        resume = (folder / "run.json").exists()
        recorded = there(folder, "steps")
        saved = there(folder, "checkpoints")
        results.append(Killed(label, str(point), phase, len(recorded), max([0, *saved]), 0))
    status, _, output = start(settings, resume, None)
    assert status == 0, output
    per_process = started_rows(folder)
    before = set[int]()
    again = []
    for rows in per_process:
        assert len(rows) == len(set(rows)), "a row was started twice in one process"
        again.append(len(set(rows) & before))
        before |= set(rows)
    return [replace(k, resampled=n) for k, n in zip(results, again[1:], strict=False)]


def check_whole(folder: Path) -> None:
    "Every row once, every step readable, every number of the gate within its bounds."
    run = Run.open(folder)
    records = list(run)
    assert [r.step for r in records] == list(range(1, len(records) + 1))
    assert sorted(g.number for r in records for g in r.groups) == list(range(ROWS))
    bound = run.config["max_head_offpolicy_versions"]
    done = set[int]()
    for record in records:
        done |= {g.number for g in record.groups}
        assert record.pending == tuple(sorted({*range(record.consumed)} - done))
        offsets = [
            record.step - 1 - g.submitted
            for g in record.groups
            if record.trained and np.ptp(g.rewards) > 0
        ]
        assert all(0 <= offset <= bound for offset in offsets)
        assert np.isfinite(record.metrics["reward"])
    assert (records[-1].pending, records[-1].consumed) == ((), ROWS)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "reason" in line] == [r.step for r in records]
    last = run.latest_checkpoint()
    assert last is not None
    assert (last.step, last.extra.get("pending"), last.cursor["consumed"]) == (
        len(records),
        [],
        ROWS,
    )
    assert not list(folder.glob("**/.*.writing"))
    assert (folder / "report.html").exists()


async def check_weights(folder: Path, copy: Path) -> None:
    "The updates in the records, made from the beginning, give the weights that each step was trained with."
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / "checkpoints")
    run = Run.open(copy)
    model, tokenizer = load_model("tiny")
    backend = open_local(model, tokenizer)
    loop = AsyncGRPOLoop(
        backend, load_rows(toy_rows(ROWS, seed=3)), make_rollout_fn, Config.from_dict(run.config)
    )
    arrival = await loop.seek(max(run.steps), run)
    await loop.close()
    assert arrival.gap == 0.0
    [saved] = (folder / "checkpoints" / f"{max(run.steps):05d}").glob("**/*.safetensors")
    ended = load_file(saved)
    ours = {k: v.detach().numpy() for k, v in backend.policy.state.params.items()}
    assert [k for k, v in ours.items() if not np.array_equal(v, ended[f"weights/{k}"])] == []


CHAINS = [min(PER_RUN, KILLS - i) for i in range(0, KILLS, PER_RUN)]


@pytest.mark.slow
@pytest.mark.parametrize("chain", range(len(CHAINS)))
def test_kill_9_at_seeded_points_loses_no_row_and_trains_none_twice(
    chain: int, tmp_path: Path
) -> None:
    versions, every, other = VARIANTS[chain % len(VARIANTS)]
    settings = (
        SETTINGS
        | {"max_head_offpolicy_versions": versions, "dcp_save_interval": every, "seed": chain}
        | other
    )
    label = f"O={versions}, checkpoint every {every}" + "".join(
        f", {k}={v}" for k, v in other.items()
    )
    done = list[Killed]()
    upcoming = points(chain)
    while len(done) < CHAINS[chain]:  # a run that ends early is followed by another
        folder = tmp_path / f"run-{len(done)}"
        done += kill_and_resume(
            settings | {"log_path": str(folder)}, upcoming, CHAINS[chain] - len(done), label
        )
        check_whole(folder)
        asyncio.run(check_weights(folder, tmp_path / f"copy-{len(done)}"))
    print(table(done))


def table(done: list[Killed]) -> str:
    "What happened, in columns."
    rows = [("killed", "last place", "records", "resumed after", "rows sampled again", "outcome")]
    rows += [
        (k.point, k.phase, str(k.steps), str(k.resumed_from), str(k.resampled), k.outcome)
        for k in done
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([f"kill -9, {done[0].variant}", *lines])
