"A server in a process of its own, which is handed its weights in files."

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .steps import Run, World


def serve(pipe: Connection) -> None:
    "The process: opens servers, one after another, and does what they are asked."
    torch.set_num_threads(1)
    server, kept, by_name = Run(World()).server, functools.cache(torch.load), False
    while True:
        what, version, args = pipe.recv()
        server.version = version
        try:
            if what == "open":
                server, kept, by_name = Run(args[0]).server, functools.cache(torch.load), args[1]
            elif what == "load":
                server.load((kept if by_name else torch.load)(args[0]))
            answer = asyncio.run(getattr(server, what)(*args)) if what in ("sample", "logprobs") else None
        except Exception as error:  # it is the client's to know
            answer = error
        pipe.send(answer)


@functools.cache
def process() -> Connection:
    "One process for all cases, which ends with this one."
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    spawn.Process(target=serve, args=(theirs,), daemon=True).start()
    return ours


def in_process(run: Run, *, by_name: bool) -> None:
    "From now on the server is a process that reads a file at each sync; one file name is read once, if `by_name`."
    pipe, folder = process(), tempfile.TemporaryDirectory()

    def ask(what: str, *args: Any) -> Any:
        pipe.send((what, run.server.version, args))
        if isinstance(answer := pipe.recv(), Exception):
            raise answer
        return answer

    def load(weights: Mapping[str, Tensor]) -> None:
        path = Path(folder.name) / "weights.pt"
        torch.save(dict(weights), path)
        ask("load", path)

    async def sample(prompt: Any, params: Any) -> Any:
        return ask("sample", prompt, params)

    async def logprobs(tokens: Any) -> Any:
        return ask("logprobs", tokens)

    ask("open", replace(run.world, http=False), by_name)
    run.server.load, run.server.sample, run.server.logprobs = load, sample, logprobs
