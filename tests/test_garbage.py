"Services that answer garbage: a step through the real SDKs goes on, or ends in one of our errors."

import asyncio
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from test_fireworks import QUICK, QWEN, SHAPE
from tiny_models import byte_tokenizer, one_thread, tiny_model

from rl_notebook.emulator.service import Emulator, RunningEmulator
from rl_notebook.backends.fireworks import open_fireworks
from rl_notebook.backends.tinker import open_tinker
from rl_notebook.core import AdamParams, Datum, RLNotebookError, SampleParams

__all__ = ["one_thread"]

KEY = "tml-not-to-be-seen"
BODIES = {
    "null": b"null",
    "empty": b"",
    "object": b"{}",
    "list": b"[]",
    "html": b"<html><body>502</body></html>",
    "text": b"\xff\xfe\x00",
    "nulls": b'{"a": null, "model_id": null, "request_id": null, "state": null}',
    "cut": None,  # the first half of the right answer
}
DATUMS = [Datum([72, 105, 33, 10], [0, 1, 1]), Datum([72, 111, 33], [0, 1], sample=1)]
SEEN = [  # these came out as errors of the SDK, or of json, once
    ("tinker", "GET get_server_capabilities", "null"),
    ("fireworks", "GET accounts", "null"),
    ("fireworks", "GET rlorTrainerJobs/*", "null"),
    ("fireworks", "POST create_session", "object"),
]


def label(method: str, path: str) -> str:
    "A request without its numbers and the way to it."
    parts = ["*" if any(c.isdigit() for c in p) or len(p) > 24 else p for p in path.strip("/").split("/")]
    keep = 2 if parts[-1] in ("*", "weights", "config") else 1
    return f"{method} {'/'.join(parts[-keep:])}"


class Garbling:
    "An application of which one kind of request is answered with something else."

    def __init__(self, app: Any):
        self.app, self.seen, self.hits = app, dict[str, int](), 0
        self.what: tuple[str, str] | None = None
        self.times = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.app, name)

    def garble(self, label: str, body: str, times: int) -> None:
        self.what, self.times, self.hits = (label, body), times, 0

    async def __call__(self, scope, receive, send):
        asked = label(scope.get("method", ""), scope.get("path", ""))
        self.seen[asked] = self.seen.get(asked, 0) + 1
        if self.what is None or self.what[0] != asked or self.hits >= self.times:
            await self.app(scope, receive, send)
            return
        self.hits += 1
        start, parts, new = {}, [], BODIES[self.what[1]]

        async def hold(message):
            if message["type"] == "http.response.start":
                start.update(message)
                return
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                right = b"".join(parts)
                body = right[: len(right) // 2] if new is None else new
                headers = [h for h in start["headers"] if h[0] not in (b"content-length", b"content-encoding")]
                await send({**start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
                await send({"type": "http.response.body", "body": body})

        await self.app(scope, receive, hold)


@pytest.fixture(scope="module")
def services(tmp_path_factory) -> Iterator[dict[str, RunningEmulator]]:
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    made = {"tinker": Emulator(model=str(folder), key=KEY), "fireworks": Emulator()}
    for emulator in made.values():
        emulator.app = Garbling(emulator.app)
    running = {name: RunningEmulator(emulator) for name, emulator in made.items()}
    yield running
    for one in running.values():
        one.stop()


def opened(name: str, service: RunningEmulator) -> Any:
    if name == "tinker":
        where = {"base_url": service.url, "key": KEY, "base_model": "a-model", "tokenizer": byte_tokenizer()}
        quick = {"probing": False, "conformance": "off", "pause_s": 0.02, "reference": False}
        return open_tinker(**where, **quick, lora_rank=4, say=lambda line: None)
    trainer = {"training_shape_id": SHAPE, "reference_training_shape_id": f"{SHAPE}-forward"}
    sizes = {"max_seq_len": 256, "max_completion_tokens": 64, "kl_beta": 0.0}
    where = {"base_model": QWEN, "trainer": trainer, "deployment": {"tokenizer_model": "tiny"}}
    return open_fireworks(**where, **sizes, **QUICK, key=service.key.reveal(), base_url=service.url)


async def one_step(name: str, service: RunningEmulator) -> None:
    async with await opened(name, service) as backend:
        await backend.sampler.sample([72, 105], SampleParams(n=2, max_tokens=4))
        await backend.policy.forward_backward_custom(DATUMS, lambda ds, lps: (-sum(x.nansum() for x in lps), {}))
        await backend.policy.optim_step(AdamParams(learning_rate=1e-3))
        await backend.policy.load_state(await backend.policy.save_state("a"))
        await backend.sync(await backend.policy.save_weights_for_sampler("x"))
        await backend.sampler.sample([72, 105], SampleParams(n=1, max_tokens=2))


def outcome(name: str, service: RunningEmulator) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            asyncio.run(one_step(name, service))
        except RLNotebookError as error:
            said = str(error)
            return "the key" if KEY in said else "ours"
    return "went on"


@pytest.mark.parametrize(("name", "asked", "body"), SEEN)
def test_garbage_ends_in_our_errors(name, asked, body, services):
    app = services[name].emulator.app
    app.garble(asked, body, 10)
    assert outcome(name, services[name]) in ("ours", "went on")
    assert app.hits


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tinker", "fireworks"])
def test_garbage_in_any_answer_of_a_step(name, services):
    app = services[name].emulator.app
    app.what = None
    app.seen.clear()
    assert outcome(name, services[name]) == "went on"
    asked = [*app.seen]
    hits = 0
    for request in asked:
        for body in BODIES:
            app.garble(request, body, 1)
            assert outcome(name, services[name]) in ("ours", "went on")
            hits += app.hits
    assert hits > 100
