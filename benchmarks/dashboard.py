"""What a dashboard costs: `update(record)` after 10, 200, 2,000 and 10,000 steps.

    python benchmarks/dashboard.py --json FILE

A history of n steps is put in, then further steps are added and shown, and each call is timed: the table of
completions and the charts (the five that are always shown, then all), and packing the messages for the browser as the
kernel does. The plain sentence and the checks are found in a worker thread after the call and timed on their own. The
wire itself and the browser are not in it. Records are made up; their completions are short.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import comm
from synthetic import synthetic_record

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.config.config import Config
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.runs.records import StepRecord
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_reward, toy_rows
from rl_notebook.views.dashboard import Dashboard, words_html
from rl_notebook.views.payloads import history_row

POINTS = (10, 200, 2_000, 10_000)
SHAPES = ((8, 8), (64, 16))  # groups, completions
KINDS = 12  # different records, used in turn


class HttpClient(comm.DummyComm):
    "A comm that packs its messages and throws them away."

    packed = 0  # bytes, of all comms together

    def publish_msg(
        self,
        msg_type: str,
        data: Any = None,
        metadata: Any = None,
        buffers: Any = None,
        **keys: Any,
    ) -> None:
        text = json.dumps({"data": data, **keys}).encode()
        HttpClient.packed += len(text) + sum(memoryview(b).nbytes for b in buffers or ())


def prepared(points: int, records: list[StepRecord], loop: GRPOLoop, more: bool) -> Dashboard:
    "A dashboard that has seen n steps."
    dashboard = Dashboard(loop, noise_floor=1e-5)
    dashboard.screen.more.value = more
    rows = [history_row(r) for r in records]
    for step in range(1, points + 1):
        dashboard.history.add({**rows[step % len(rows)], "step": step})
    dashboard.update(replace(records[0], step=points + 1))  # makes what is made once
    return dashboard


def measure(
    points: int, shape: tuple[int, int], loop: GRPOLoop, repeats: int, more: bool = False
) -> dict[str, Any]:
    "Time and size of an update."
    records = [
        synthetic_record(i, groups=shape[0], completions=shape[1]) for i in range(1, KINDS + 1)
    ]
    dashboard = prepared(points, records, loop, more)
    times = []
    sizes = []
    for i in range(repeats):
        record = replace(records[i % KINDS], step=points + 2 + i)
        before = HttpClient.packed
        start = time.perf_counter()
        dashboard.update(record)
        times.append(1000 * (time.perf_counter() - start))
        sizes.append(HttpClient.packed - before)
    start = time.perf_counter()
    words_html(dashboard.record, dashboard.previous)
    words = 1000 * (time.perf_counter() - start)
    dashboard.close()
    quick = sorted(times)[: max(1, repeats // 10)]
    return {
        "points": points,
        "groups": shape[0],
        "completions": shape[1],
        "charts": "all" if more else "main",
        "median_ms": statistics.median(times),
        "fastest_tenth_ms": statistics.mean(quick),
        "words_ms": words,
        "message_kb": statistics.median(sizes) / 1000,
        "times_ms": times,
    }


COLUMNS = {
    "points": "8", "groups": "7", "completions": "12", "charts": "7", "median_ms": "10.1f",
    "fastest_tenth_ms": "17.1f", "message_kb": "11.0f", "words_ms": "9.0f",
}  # fmt: skip


def table(results: list[dict[str, Any]]) -> str:
    "Results as text."
    head = " ".join(f"{name:>{form.split('.')[0]}}" for name, form in COLUMNS.items())
    return "\n".join(
        [head, *(" ".join(f"{r[name]:>{form}}" for name, form in COLUMNS.items()) for r in results)]
    )


async def main(repeats: int) -> list[dict[str, Any]]:
    "All cases."
    comm.create_comm = HttpClient
    loop = GRPOLoop(open_local(*load_model("tiny")), toy_rows(8), toy_reward, Config())
    cases = [(p, s, more) for more in (False, True) for s in SHAPES for p in POINTS]
    return [measure(p, s, loop, repeats, more) for p, s, more in cases]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write every figure here")
    parser.add_argument("--repeats", type=int, default=40)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    results = asyncio.run(main(args.repeats))
    print(table(results))
    print(
        f"load of the machine: {load:.1f} before, {os.getloadavg()[0]:.1f} after, {os.cpu_count()} cores"
    )
    if args.json:
        about = {
            "load": [load, os.getloadavg()[0]],
            "cores": os.cpu_count(),
            "repeats": args.repeats,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({**about, "results": results}, indent=1))
