"""Steps of the tiny model on threads that are chosen pass by pass (the default), on one, and on all.

    python benchmarks/threads.py --json FILE

One loop takes all steps, the ways in turns, and before each step this thread computes something, as a cell
would: first with nothing beside it, then beside a program that keeps one processor busy. Then decode steps, by rows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rl_notebook.backends.base import SampleParams
from rl_notebook.backends.engine import Engine, following, open_model
from rl_notebook.backends.worker import ThreadChoice, on_threads, set_threads
from rl_notebook.toy import load_model
from step import MEASURES, SETTINGS, Ours, Step, save_endless

WAYS = ("chosen", "one", "sampling on one", "all")
TURN = 4  # steps of each way at a time


def measure(rounds: int) -> dict[str, list[Step]]:
    "Steps of each way after the first turn."
    most = torch.get_num_threads()
    setting = replace(SETTINGS["tiny"], steps=len(WAYS) * TURN * (rounds + 1))
    found: dict[str, list[Step]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        save_endless(setting.model, folder)
        ours = Ours(setting, folder)
        policy: Any = ours.loop.backend.policy
        reference: Any = ours.loop.backend.reference
        sampler: Any = ours.loop.backend.sampler
        own = policy.state.scoring.threads
        fixed = {"one": (1, 1), "sampling on one": (1, most), "all": (most, most)}
        try:
            for _ in range(rounds + 1):
                for way in WAYS:
                    drawing, passes = fixed.get(way, (1, None))
                    choice = own if passes is None else Fixed((drawing, passes))
                    sampler.engine.threads = own if passes is None else Fixed((drawing, drawing))
                    policy.state.scoring = replace(policy.state.scoring, threads=choice)
                    reference.scoring = replace(reference.scoring, threads=choice)
                    ours.runner.run(policy.run(set_threads, drawing))
                    for _ in range(TURN):
                        some = torch.ones(500, 500)
                        _ = some @ some
                        found[way].append(ours.step())
        finally:
            ours.close()
    return {way: steps[TURN:] for way, steps in found.items()}


class Fixed(ThreadChoice):
    "Passes on the last of its numbers, whatever is fastest."

    def next(self, kind: str, idle: int = sys.maxsize) -> int:
        super().next(kind)
        return self.counts[-1]


def decode_steps(rows: int, model: str = "tiny", turns: int = 9, steps: int = 32) -> dict[str, float]:
    "Milliseconds of a decode step of so many rows on one thread, on all, and as chosen, in turns."
    causal, most = open_model(load_model(model)[0].requires_grad_(False)), torch.get_num_threads()
    large = causal.in_blocks
    ways: dict[str, ThreadChoice] = {n: Fixed((1, c), follows=large) for n, c in (("one", 1), ("all", most))}
    ways["chosen"] = following(causal) if large else ThreadChoice((1, most))
    found: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(turns):
        for way, choice in ways.items():
            with on_threads(1):
                engine = Engine(causal, eos_token_ids=frozenset(), max_batch=rows, threads=choice)
                for i in range(rows // 8):
                    engine.submit([5 + i] * 20, SampleParams(max_tokens=steps + 1, n=8, seed=i))
                engine.run_steps(0)
                begin = time.perf_counter()
                while not engine.idle:
                    engine.run_steps()
                found[way] += [1000 * (time.perf_counter() - begin) / steps] if turn else []
    return {way: statistics.median(times) for way, times in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=6, help="measured turns of each way; one more comes before them")
    parser.add_argument("--smollm2", action="store_true", help="decode steps of SmolLM2 too")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args(arguments)
    load, found, decode = os.getloadavg()[0], {}, {}
    for beside in (0, 1):
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(beside)]
        try:
            steps = measure(args.rounds)
            decode[beside] = {f"tiny, {rows} rows": decode_steps(rows) for rows in (32, 64, 128, 256)}
            if args.smollm2:
                decode[beside]["smollm2, 32 rows"] = decode_steps(32, "smollm2", turns=5)
        finally:
            for other in others:
                other.kill()
                other.wait()
        found[beside] = {
            way: {m: statistics.median(getattr(s, m) for s in steps[way]) for m in MEASURES} for way in WAYS
        }
    print(f"{'seconds':<28}" + "".join(f"{m:>10}" for m in MEASURES))
    for beside, ways in found.items():
        for way, medians in ways.items():
            print(f"{beside} beside, {way:<18}" + "".join(f"{medians[m]:>10.3f}" for m in MEASURES))
    print("milliseconds of a decode step")
    for beside, by_rows in decode.items():
        for rows, medians in by_rows.items():
            print(f"{beside} beside, {rows:<18}" + "".join(f"  {way} {ms:.2f}" for way, ms in medians.items()))
    print(f"{torch.get_num_threads()} threads, load {load:.1f} before")
    if args.json:
        rest = {"threads": torch.get_num_threads(), "load": load}
        args.json.write_text(json.dumps({"seconds": found, "decode_ms": decode} | rest, indent=1) + "\n")


if __name__ == "__main__":
    main()
