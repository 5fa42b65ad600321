"The server of the zoo behind HTTP, and the client that the package has for such servers."

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from rl_notebook.backends.services.openai import OpenAISampler
from rl_notebook.core.types import BackendError, Completion, SampleParams

from .machines import Server


def told(values: Sequence[float]) -> list[float | None]:
    "Numbers as JSON has them."
    return [float(v) if math.isfinite(v) else None for v in values]


def choice_of(drawn: Completion) -> dict[str, Any]:
    "A completion as vLLM and Fireworks write it, with raw logprobs and those of the distribution drawn from."
    pairs = zip(drawn.tokens, told(drawn.logprobs), told(drawn.sampling_logprobs), strict=True)
    content = [{"token": "", "token_id": int(t), "logprob": raw, "sampling_logprob": own} for t, raw, own in pairs]
    ids = [int(t) for t in drawn.tokens]
    return {
        "text": drawn.text,
        "finish_reason": drawn.finish_reason,
        "token_ids": ids,
        "logprobs": {"content": content},
    }


class Client(OpenAISampler):
    "The package's client, which hears of new weights where it asks."

    def __init__(self, front: Front):
        self.served = front.server
        super().__init__(f"http://127.0.0.1:{front.port}", "zoo", front.server.tokenizer, kind="both")

    @property
    def policy_version(self) -> int:
        return self.served.version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        "Is the server's to say."


class Front:
    "Serves `server` on a free port of this machine until it is closed; requests that wait for the same are one batch."

    def __init__(self, server: Server):
        self.server, self.alone = server, asyncio.Lock()
        self.waiting: dict[str, list[asyncio.Future[Completion]]] = {}
        app = Starlette(routes=[Route("/v1/completions", self.complete, methods=["POST"])])
        self.http = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
        self.thread = threading.Thread(target=self.http.run, daemon=True)
        self.thread.start()
        while not self.http.started:
            self.thread.join(0.01)
        self.port = self.http.servers[0].sockets[0].getsockname()[1]

    async def complete(self, request: Request) -> JSONResponse:
        body = await request.json()
        prompt, usage = body["prompt"], {"prompt_tokens": len(self.server.reads(body["prompt"]))}
        try:
            if "prompt_logprobs" in body:
                async with self.alone:
                    scores = [None, *told((await self.server.logprobs(prompt)).values)]
                rows = [{str(t): {"logprob": s}} for t, s in zip(prompt, scores, strict=True)]
                return JSONResponse({"choices": [{"text": "", "token_ids": [], "prompt_logprobs": [None, *rows[1:]]}]})
            drawn = await self.draw(body)
        except BackendError as error:
            return JSONResponse({"error": {"message": str(error)}}, status_code=400)
        return JSONResponse({"choices": [choice_of(drawn)], "usage": usage})

    async def draw(self, body: dict[str, Any]) -> Completion:
        "One completion, of the batch of those that are asked for alike."
        names = ("temperature", "top_p", "top_k", "max_tokens")
        asked = {name: body[name] for name in names if name in body}
        batch = self.waiting.setdefault(json.dumps([body["prompt"], asked]), [])
        batch.append(mine := asyncio.get_running_loop().create_future())
        async with self.alone:
            await asyncio.sleep(0.002)
            if batch := self.waiting.pop(json.dumps([body["prompt"], asked]), []):
                params = SampleParams(n=len(batch), seed=body["seed"], **asked)
                try:
                    found = await self.server.sample(body["prompt"], params)
                except BackendError as error:
                    return [other.set_exception(error) for other in batch] and await mine
                for other, drawn in zip(batch, found, strict=True):
                    other.set_result(drawn)
        return await mine

    def client(self) -> Client:
        "What draws from it."
        return Client(self)

    def close(self) -> None:
        self.http.should_exit = True
        self.thread.join()
