"""What it costs to look at a long run: processor seconds and memory of `show`, `view` and `doctor` on 2,000 steps.

    python benchmarks/long_run.py --json FILE

The run is made of three steps that the tiny model was trained for, written again under each number. `--keep FOLDER`
keeps it, or takes one that is there. The goals are 5 s and 300 MB for each command.

    python benchmarks/long_run.py --train 2000 --json FILE

trains for n steps instead, and says what a step takes as the run grows: processor seconds, and those of the
record among them, bytes on disk, memory and open files of the process.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_notebook.config.config import Config
from rl_notebook.runs.records import write_record
from rl_notebook.runs.run import Run, RunFolder, metrics_row

GOAL = {"seconds": 5.0, "MB": 300.0}
COMMANDS = (
    "show",
    "show --last 5",
    "show --json",
    "show --step {last}",
    "view --once --out {page}",
    "doctor",
)
SIZES: dict[str, Any] = {
    "prompt_groups_per_step": 8,
    "completions_per_prompt": 8,
    "max_completion_tokens": 24,
}
CODE = """
import atexit, re, sys, time
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
atexit.register(lambda: print(time.process_time(), peak(), file=sys.stderr))
from rl_notebook.cli import main
sys.exit(main())
"""  # memory as Linux tells it: that of `wait4` counts the parent, too


def make_run(folder: Path, steps: int, **settings: Any) -> Run:
    "A run of n steps; a few of them were trained."
    from rl_notebook.recipes.rl_loop import train

    cfg = Config(**SIZES | settings, max_seq_len=96, steps=3, max_rows=64, log_path=str(folder))
    asyncio.run(train(cfg, say=lambda line: None, progress=False))
    run = Run.open(folder)
    trained = [*run]
    with (folder / "metrics.jsonl").open("a") as lines:
        for step in range(len(trained) + 1, steps + 1):
            record = trained[step % len(trained)]
            record = replace(
                record,
                step=step,
                metrics={**record.metrics, "reward": 0.5 + (step * 37 % 100) / 500},
            )
            (folder / "steps" / f"{step:05d}").mkdir()
            write_record(record, folder / "steps" / f"{step:05d}")
            lines.write(json.dumps(metrics_row(record)) + "\n")
    return run


def measure(command: str, folder: Path, steps: int) -> dict[str, Any]:
    "Processor seconds and the most memory of a command, in a separate process."
    name, *options = command.format(last=steps, page=folder.parent / "page.html").split()
    done = subprocess.run(
        [sys.executable, "-c", CODE, name, str(folder), *options], capture_output=True, text=True
    )
    seconds, peak = done.stderr.splitlines()[-1].split()
    return {
        "command": command,
        "exit": done.returncode,
        "seconds": float(seconds),
        "MB": float(peak),
    }


def growth(folder: Path, steps: int, every: int = 100) -> list[dict[str, float]]:
    "What a step takes, as medians of `every` neighbouring steps of a run that is really trained."
    from rl_notebook.recipes.rl_loop import train

    add = RunFolder.add
    clock = time.process_time
    state = []

    def timed(run: RunFolder, record: Any) -> Any:
        start = clock()
        path = add(run, record)
        memory = (
            int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6
        )
        kept = (
            sum(
                f.stat().st_size
                for f in (folder / "steps" / f"{record.step:05d}").rglob("*")
                if f.is_file()
            )
            / 1e3
        )
        state.append((clock(), clock() - start, kept, memory, len(os.listdir("/proc/self/fd"))))
        return path

    RunFolder.add = timed  # type: ignore[method-assign]
    sizes = SIZES | {"max_completion_tokens": 16}
    cfg = Config(**sizes, steps=steps, epochs=1000, max_seq_len=96, log_path=str(folder))
    asyncio.run(train(cfg, say=lambda line: None, progress=False))
    ends, *rest = zip(*state, strict=True)
    series = {"step_s": [b - a for a, b in itertools.pairwise(ends)]}
    series |= {
        name: values[1:]
        for name, values in zip(("record_s", "kB", "MB", "files"), rest, strict=True)
    }

    def medians(end):
        return {
            name: statistics.median(values[end - every : end]) for name, values in series.items()
        }

    return [{"step": end} | medians(end) for end in range(every, steps, every)]


def main() -> None:
    "Make the run, measure, print."
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--keep", type=Path, default=None, help="folder of the run")
    parser.add_argument(
        "--train", type=int, help="train for this number of steps, and see how a step grows"
    )
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = args.keep or Path(place) / "run"
        if args.train:
            rows = growth(folder, args.train)
            for row in rows:
                print("  ".join(f"{name} {value:.4g}" for name, value in row.items()))
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1))
            return
        if not (folder / "run.json").exists():
            make_run(folder, args.steps)
        rows = [measure(command, folder, args.steps) for command in COMMANDS]
    for row in rows:
        within = row["seconds"] < GOAL["seconds"] and row["MB"] < GOAL["MB"]
        print(
            f"{row['command']:<26} {row['seconds']:6.2f} s {row['MB']:6.0f} MB  {'' if within else 'above the goal'}"
        )
    if args.json:
        args.json.write_text(
            json.dumps({"steps": args.steps, "goal": GOAL, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
