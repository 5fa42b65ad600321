"The best rates of this machine at the matrices of a model: FLOP/s of products and bytes/s of reading."

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from rl_notebook.backends.work import ModelSize, synchronize

# calls that are timed together on a GPU, where a single one is over before the wait for it has begun
CALLS = 20


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    "Torch on this number of threads; None leaves it alone."
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def best_rate(
    run: Callable[[], Any], amount: float, device: str, seconds: float, max_threads: int | None
) -> float:
    "The best rate of an `amount` per call, per second, on one thread and on `max_threads` (None = as torch is set)."
    best = math.inf
    calls = 1 if device == "cpu" else CALLS
    counts = {1, max_threads or torch.get_num_threads()} if device == "cpu" else {None}
    for count in counts:
        with threads(count):
            end = time.perf_counter() + seconds / len(counts)
            while best == math.inf or time.perf_counter() < end:
                start = time.perf_counter()
                for _ in range(calls):
                    run()
                synchronize(device)
                best = min(best, time.perf_counter() - start)
    return calls * amount / best


def gemm_rate(
    size: ModelSize, rows: int, seconds: float = 0.1, max_threads: int | None = None
) -> float:
    "The best FLOP/s that torch reaches with this number of rows on one of the model's larger matrices."
    rates = []
    options = {"dtype": getattr(torch, size.dtype), "device": size.device}
    for n, k in sorted(size.shapes, key=math.prod)[-4:]:
        a = torch.randn(rows, k, **options)
        b = torch.randn(n, k, **options)
        out = torch.empty(rows, n, **options)
        multiply = partial(torch.mm, a, b.t(), out=out)
        rates.append(best_rate(multiply, 2.0 * rows * n * k, size.device, seconds, max_threads))
    return max(rates)


def read_rate(
    nbytes: int, device: str = "cpu", seconds: float = 0.3, max_threads: int | None = None
) -> float:
    "The best bytes/s of reading that many bytes again and again."
    buffer = torch.ones(max(nbytes // 4, 1), device=device)
    return best_rate(buffer.sum, nbytes, device, seconds, max_threads)
