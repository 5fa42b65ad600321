"An emulator that fails on purpose: dropped connections, refusals, stalls, failed jobs and loads, forgotten memory."

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rl_notebook.emulator import server as server_module
from rl_notebook.emulator.messages import error_reply
from rl_notebook.emulator.server import EmulatedServer
from rl_notebook.emulator.service import Emulator, Resource, RunningEmulator, server_of

KINDS = (
    "drop_before",  # the connection is closed before anything is executed
    "drop_after",  # the request is executed, then the connection is closed without a response
    "429",  # rejected with Retry-After: `retry_after`
    "503",  # rejected: temporarily unavailable
    "slow",  # executed after `seconds`
    "truncate_sse",  # a stream of completions ends before its last event
    "job_fails",  # a trainer job that starts ends in JOB_STATE_FAILED
    "hotload_stalls",  # a hotload takes `seconds` longer
    "hotload_error",  # a hotload ends in stage: error
    "restart_trainer",  # the trainer forgets sessions, models and gradients before a request; files stay
)
# requests whose number depends on the clock; only a fault with a path counts them
UNCOUNTED = {"healthz", "telemetry", "session_heartbeat", "retrieve_future"}
HOT_LOAD = "/hot_load/v1/models/hot_load"


@dataclass(frozen=True)
class Fault:
    "One way to fail, and when."

    kind: str  # one of KINDS
    chance: float = 1.0  # probability at each occasion
    at: int | None = None  # at this occasion only, counted from 1
    times: float = math.inf  # at most this often
    path: str = ""  # only where the address contains this
    seconds: float = 1.0
    retry_after: float = 1.0  # seconds

    def __post_init__(self) -> None:
        assert self.kind in KINDS


class Faults:
    "Decides by seed, fault and number of the occasion where a fault is injected, and counts."

    def __init__(self, faults: Sequence[Fault] = (), seed: int = 0):
        self.reset(faults, seed)

    def reset(self, faults: Sequence[Fault], seed: int = 0) -> None:
        "Inject these from now on; counts and log start again."
        self.faults = tuple(faults)
        self.seed = seed
        self.counts: Counter[str] = Counter()  # kind -> how often it was injected
        self.log: list[tuple[str, str]] = []  # (kind, where), in order
        self._occasions: Counter[int] = Counter()
        self._injected: Counter[int] = Counter()

    def inject(self, kind: str, where: str, counted: bool = True) -> Fault | None:
        "The fault to inject at this occasion, if any."
        injected = None
        for i, fault in enumerate(self.faults):
            if fault.kind != kind or fault.path not in where or not (counted or fault.path):
                continue
            self._occasions[i] += 1
            occasion = self._occasions[i]
            if fault.at:
                due = occasion == fault.at
            else:
                due = random.Random(f"{self.seed}/{i}/{occasion}").random() < fault.chance
            if due and injected is None and self._injected[i] < fault.times:
                self._injected[i] += 1
                injected = fault
        if injected is not None:
            self.counts[kind] += 1
            self.log.append((kind, where))
        return injected


def injected_rejection(faults: Faults, where: str, path: str) -> Response | None:
    "The response 429 or 503 that is injected for a request, if any."
    if fault := faults.inject("429", where):
        return error_reply(path, 429, "rate limited", {"Retry-After": f"{fault.retry_after:g}"})
    if faults.inject("503", where):
        return error_reply(path, 503, "temporarily unavailable")
    return None


def cut_stream(body: bytes) -> bytes:
    "A stream of server-sent events without the event that has the finish reason, and without what follows."

    def unfinished(event: bytes) -> bool:
        return b'"finish_reason": "' not in event

    return b"".join(event + b"\n\n" for event in takewhile(unfinished, body.split(b"\n\n")))


class CutReply:
    "Sends a response whose stream of completions may be cut."

    def __init__(self, faults: Faults, where: str, send: Send):
        self.faults = faults
        self.where = where
        self.send = send
        self.truncated = False
        self.held = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            content_type = dict(message["headers"]).get(b"content-type", b"")
            if content_type.startswith(b"text/event-stream"):
                self.truncated = bool(self.faults.inject("truncate_sse", self.where))
        elif self.truncated:
            self.held += message.get("body", b"")
            if message.get("more_body", False):
                return
            message = {"type": "http.response.body", "body": cut_stream(self.held)}
        await self.send(message)


async def swallow(message: Message) -> None:
    "Send nothing."


original_load = server_module.run_load
planned_loads: dict[EmulatedServer, tuple[float, bool]] = {}  # -> seconds to stall, whether to fail


async def faulty_load(server: EmulatedServer, name: str) -> None:
    "Load weights after a stall, or fail, where that was planned for the server."
    stall_s, fails = planned_loads.pop(server, (0.0, False))
    await asyncio.sleep(stall_s)
    if fails:
        server.load.stage = "error"
        server.load.message = "an injected fault"
    else:
        await original_load(server, name)


server_module.run_load = faulty_load


class FaultyApp:
    "The application of an emulator, with faults in front of it."

    def __init__(self, running: FaultyEmulator, emulator: Emulator, app: ASGIApp):
        self.running = running
        self.site = emulator.site
        self.app = app
        self.faults = running.faults
        self._put = self.site.resources.put
        self.site.resources.put = self.put_resource  # type: ignore[method-assign]

    def put_resource(self, resource: Resource) -> Resource:
        "Keep a resource; a job that starts may fail."
        starts = resource.goal == "JOB_STATE_RUNNING" and "/rlorTrainerJobs/" in resource.name
        if starts and self.faults.inject("job_fails", resource.name):
            status = {"code": "INTERNAL", "message": "the trainer did not start (injected fault)"}
            resource = replace(
                resource, goal="JOB_STATE_FAILED", body={**resource.body, "status": status}
            )
        return self._put(resource)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        path = scope["path"]
        where = f"{scope['method']} {path}"
        if self.faults.inject("drop_before", where):
            return await self.drop(scope, receive)
        if rejection := injected_rejection(self.faults, where, path):
            await Request(scope, receive).body()
            return await rejection(scope, receive, send)
        slow = self.faults.inject("slow", where)
        lost = self.faults.inject("drop_after", where)
        if slow:
            await asyncio.sleep(slow.seconds)
        self.restart_trainer(path)
        self.prepare_hotload(Request(scope))
        with contextlib.suppress(Exception):  # the application has responded with an error
            await self.app(scope, receive, CutReply(self.faults, where, swallow if lost else send))
        if lost:
            await self.drop(scope, receive)

    async def drop(self, scope: Scope, receive: Receive) -> None:
        "Close the connection and wait until the server has seen it."
        self.running.close_connection(scope["client"])
        while (await receive())["type"] != "http.disconnect":
            pass

    def restart_trainer(self, path: str) -> None:
        "Let the trainer of a request forget its memory, if that is due."
        prefix, separator, call = path.partition("/api/v1/")
        if not separator:
            return
        if self.faults.inject("restart_trainer", path, counted=call not in UNCOUNTED):
            job = prefix.rsplit("/", 1)[-1]
            key = {"": "root", "serverless": "pool"}.get(
                job, f"accounts/local/rlorTrainerJobs/{job}"
            )
            if key in self.site.trainers:
                self.site.trainers[key].lose_memory()

    def prepare_hotload(self, request: Request) -> None:
        "Let the load that a request starts stall or fail, if that is due."
        name = request.headers.get("fireworks-deployment", "")
        if request.method != "POST" or request.url.path != HOT_LOAD or not name:
            return
        stall = self.faults.inject("hotload_stalls", name)
        error = self.faults.inject("hotload_error", name)
        if stall or error:
            server = server_of(self.site, name)
            planned_loads[server] = (stall.seconds if stall else 0.0, bool(error))


class FaultyEmulator(RunningEmulator):
    "A running emulator with faults; `faults.reset(...)` changes them."

    def __init__(self, faults: Sequence[Fault] = (), seed: int = 0, **settings: Any):
        self.faults = Faults(faults, seed)
        emulator = Emulator(**settings)
        access = emulator.app
        access.app = FaultyApp(self, emulator, access.app)
        super().__init__(emulator)

    def close_connection(self, client: Any) -> None:
        "Close the connection of a client address."
        for connection in list(self._server.server_state.connections):
            if getattr(connection, "client", None) == client and connection.transport is not None:
                connection.transport.close()
