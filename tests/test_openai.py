"The client of OpenAI-compatible servers, over real HTTP: agreement, faults, limits, keys, weight sync."

import asyncio
import contextlib
import logging
import os
import re
import time
import traceback
from dataclasses import replace

import httpx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from live_server import app_of, emulated, serve
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tiny_models import byte_tokenizer, tiny_model

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.backends.services.completions import OpenAISampler, probe_server, request_seed
from rl_notebook.backends.services.openai import open_openai
from rl_notebook.core.types import (
    AdamParams,
    AlignmentError,
    BackendError,
    ConfigError,
    Datum,
    SampleParams,
)
from rl_notebook.core.retries import AdaptiveLimit, Retries


PROMPT = [72, 101, 108, 108, 111]
QUICK = Retries(deadline_s=100, attempt_s=30, first_wait_s=0.01)
KEY = "not-a-real-key-0123456789"


def model():
    "The model that every server of these tests starts with."
    return tiny_model(context=96)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    "A server, and its address."
    server = emulated(model(), byte_tokenizer(), tmp_path_factory.mktemp("server"))
    with serve(app_of(server)) as url:
        yield server, url


@pytest.fixture(scope="module")
def processed_site(tmp_path_factory):
    "One that reports what it sampled from."
    server = emulated(
        model(), byte_tokenizer(), tmp_path_factory.mktemp("p"), logprobs_mode="processed_logprobs"
    )
    with serve(app_of(server)) as url:
        yield server, url


@pytest.fixture(scope="module")
def local():
    backend = open_local(model(), byte_tokenizer(), inline=True)
    yield backend
    asyncio.run(backend.__aexit__())


@contextlib.asynccontextmanager
async def sampler_at(url, **options):
    sampler = OpenAISampler(url, "tiny", byte_tokenizer(), **{"retries": QUICK} | options)
    try:
        yield sampler
    finally:
        await sampler.close()


def ids(completions):
    return [c.tokens.tolist() for c in completions]


async def sample_locally(local, params, prompt=PROMPT):
    "What the server must answer: it samples completion i with the seed of request i."
    alone = [replace(params, n=1, seed=request_seed(params.seed, i)) for i in range(params.n)]
    return [(await local.sampler.sample(prompt, p))[0] for p in alone]


# --- what comes back ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["vllm", "fireworks", "echo"])
def test_completions_are_those_of_the_model(site, local, dialect):
    params = SampleParams(n=5, max_tokens=9, seed=3)

    async def test():
        async with sampler_at(site[1], dialect=dialect) as sampler:
            got = await sampler.sample(PROMPT, params)
            want = await sample_locally(local, params)
            assert ids(got) == ids(want)
            assert [c.text for c in got] == [c.text for c in want]
            assert [c.finish_reason for c in got] == [c.finish_reason for c in want]
            for g, w in zip(got, want, strict=True):
                assert np.abs(g.logprobs - w.logprobs).max() < 1e-5
                assert np.array_equal(g.logprobs, g.sampling_logprobs)
                scored = await sampler.logprobs(g.full_tokens)
                exact = await local.sampler.logprobs(g.full_tokens)
                assert scored.coordinate == "target"
                assert np.abs(scored.values - exact.values).max() < 1e-5
            assert sampler.meter.tokens_sampled == sum(map(len, ids(got)))

    asyncio.run(test())


def test_stop_strings(site, local):  # stop ids: test_servers_of_other_makes
    params = SampleParams(n=6, max_tokens=40, seed=0, stop=("e", "a"))

    async def test():
        async with sampler_at(site[1]) as sampler:
            got = await sampler.sample(PROMPT, params)
            want = await sample_locally(local, params)
            assert [(c.tokens.tolist(), c.text, c.finish_reason) for c in got] == [
                (c.tokens.tolist(), c.text, c.finish_reason) for c in want
            ]

    asyncio.run(test())


COOL = {"temperature": SampleParams(n=4, max_tokens=8, seed=2, temperature=0.6)}
COOL["top_p"] = replace(COOL["temperature"], temperature=1.0, top_p=0.7)
COOL["min_p"] = replace(COOL["temperature"], temperature=1.0, min_p=0.1, repetition_penalty=1.3)
COOL["greedy"] = replace(COOL["temperature"], temperature=0.0)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("raw", "top_p"),
        ("processed", "temperature"),
        ("both", "temperature"),
        ("both", "min_p"),
        ("unknown", "greedy"),
    ],
)
def test_raw_and_sampling_logprobs_are_kept_apart(site, processed_site, local, kind, name):
    params = COOL[name]

    async def test(url):
        dialect = "fireworks" if kind == "both" else "vllm"
        async with sampler_at(url, dialect=dialect) as sampler:
            if kind != "unknown":
                assert (await probe_server(sampler, PROMPT)).kind == kind
            if name == "min_p" and kind == "both":
                with pytest.raises(BackendError, match="expected 0: it has no such setting"):
                    await sampler.sample(PROMPT, params)
                return
            got = await sampler.sample(PROMPT, params)
            want = await sample_locally(local, params)
            assert ids(got) == ids(want)
            for g, w in zip(got, want, strict=True):
                assert np.abs(g.logprobs - w.logprobs).max() < 1e-5
                if kind in ("processed", "both") or name == "greedy":
                    assert np.abs(g.sampling_logprobs - w.sampling_logprobs).max() < 1e-5
                else:
                    assert g.sampling_logprobs is None

    asyncio.run(test((processed_site if kind == "processed" else site)[1]))


# --- servers that misbehave ---------------------------------------------------------------------------------------


class Moody:
    "A server that responds to its first requests for completions with the statuses of a list, and then as usual."

    def __init__(self, server, moods):
        self.inner = app_of(server)
        self.moods = list(moods)
        self.times = []

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or not scope["path"].endswith("/completions"):
            return await self.inner(scope, receive, send)
        self.times.append(time.monotonic())
        mood = self.moods.pop(0) if self.moods else ""
        if mood:
            return await JSONResponse({"error": {"message": "moody"}}, int(mood))(
                scope, receive, send
            )
        await self.inner(scope, receive, send)


def test_a_server_that_is_not_there():
    async def test():
        retries = Retries(deadline_s=2.0, first_wait_s=0.05)
        async with sampler_at("http://127.0.0.1:9", retries=retries) as sampler:
            with (
                pytest.warns(UserWarning, match="ConnectError"),
                pytest.raises(BackendError, match="Is the server up"),
            ):
                await sampler.sample(PROMPT, SampleParams(max_tokens=2))

    asyncio.run(test())


@pytest.mark.parametrize("status", [400, 401])
def test_a_permanent_error_is_raised_at_once(site, status):
    app = Moody(site[0], [str(status)])

    async def test(url):
        async with sampler_at(url, key=KEY) as sampler:
            with pytest.raises(
                BackendError, match=f"/v1/completions: refused: got status {status}: moody"
            ):
                await sampler.sample(PROMPT, SampleParams(max_tokens=2))

    with serve(app) as url:
        asyncio.run(test(url))
    assert len(app.times) == 1


def canned(choice, **rest):
    "A server that always answers this."

    async def respond(request):
        return JSONResponse({"choices": [choice]} | rest)

    return Starlette(routes=[Route("/v1/completions", respond, methods=["POST"])])


GOOD = {
    "text": "ab",
    "token_ids": [5, 6],
    "finish_reason": "stop",
    "logprobs": {"token_logprobs": [-1.0, -2.0]},
}
BAD = {
    "no logprobs": (GOOD | {"logprobs": None}, BackendError, "no logprobs came back"),
    "too few logprobs": (
        GOOD | {"logprobs": {"token_logprobs": [-1.0]}},
        AlignmentError,
        "1 values for 2 tokens",
    ),
    "odd ending": (
        GOOD | {"finish_reason": "content_filter"},
        BackendError,
        "got 'content_filter'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_replies_that_cannot_be_used_are_rejected(name):
    choice, kind, match = BAD[name]

    async def test(url):
        async with sampler_at(url) as sampler:
            with pytest.raises(kind, match=match):
                await sampler.sample(PROMPT, SampleParams(max_tokens=2))

    with serve(canned(choice)) as url:
        asyncio.run(test(url))


# --- the limit ----------------------------------------------------------------------------------------------------


FATES = st.tuples(st.sampled_from(["ok", "busy", "cancel", "fewer", "more"]), st.integers(1, 4))


@given(st.lists(FATES, min_size=1, max_size=40), st.integers(1, 6))
def test_places_are_never_lost_nor_assigned_twice(fates, start):
    limit = AdaptiveLimit(start=start, most=8)

    async def visit(fate, places):
        async with limit.slot(places) as generation:
            assert places <= limit.in_flight <= 8
            await asyncio.sleep(0)
            if fate in ("fewer", "more"):
                limit.at_most(2 if fate == "fewer" else 16)
            limit.answered() if fate == "ok" else limit.rejected(generation)

    async def test():
        tasks = [asyncio.create_task(visit(*fate)) for fate in fates]
        await asyncio.sleep(0)
        for task, (fate, _) in zip(tasks, fates, strict=True):
            if fate == "cancel":
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(test())
    assert (limit.in_flight, len(limit.waiting)) == (0, 0)
    assert 1 <= limit.window <= 8


# --- keys ---------------------------------------------------------------------------------------------------------


def test_a_key_is_sent_and_never_shown(caplog, capsys):
    caplog.set_level(logging.DEBUG)
    headers = []

    async def respond(request):
        headers.append(request.headers.get("authorization"))
        return JSONResponse({"error": {"message": f"the key {KEY} is not known"}}, 401)

    async def test(url):
        async with sampler_at(url, key=KEY) as sampler:
            print(sampler.wire.key, vars(sampler), vars(sampler.wire))
            with pytest.raises(BackendError, match=r"the key \*\*\* is not known") as caught:
                await sampler.sample(PROMPT, SampleParams(max_tokens=2))
            return "".join(
                traceback.TracebackException.from_exception(
                    caught.value, capture_locals=True
                ).format()
            )

    with serve(Starlette(routes=[Route("/v1/completions", respond, methods=["POST"])])) as url:
        trace = asyncio.run(test(url))
    assert headers == [f"Bearer {KEY}"]
    for text in (trace, caplog.text, *capsys.readouterr()):
        assert KEY not in text


# --- new weights --------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def open_backend(url, tmp_path, **options):
    options = {"inline": True, "folder": tmp_path / "weights", "retries": QUICK} | options
    async with await open_openai(
        model(), byte_tokenizer(), base_url=f"{url}/v1", served_model="tiny", **options
    ) as backend:
        yield backend


def datums_of(completions):
    dlogprobs = np.linspace(-1, 1, len(completions))
    return [
        Datum(
            c.full_tokens,
            [0] * (c.prompt_len - 1) + [1] * len(c.tokens),
            advantage=float(a),
            sample=i,
        )
        for i, (c, a) in enumerate(zip(completions, dlogprobs, strict=True))
    ]


def reinforce(datums, policy_logprobs):
    parts = [
        -d.advantage * lp[torch.tensor(d.active)].sum()
        for d, lp in zip(datums, policy_logprobs, strict=True)
    ]
    return torch.stack(parts).sum(), {}


async def step(backend, seed=0, rate=1e-2):
    "Sample, learn, and name the snapshot."
    completions = await backend.sampler.sample(PROMPT, SampleParams(n=4, max_tokens=6, seed=seed))
    await backend.policy.forward_backward_custom(datums_of(completions), reinforce)
    await backend.policy.optim_step(AdamParams(learning_rate=rate))
    return await backend.policy.save_weights_for_sampler(f"step-{seed}")


async def gap_to_policy(backend):
    completions = await backend.sampler.sample(PROMPT, SampleParams(n=4, max_tokens=6, seed=9))
    datums = datums_of(completions)
    scored = await backend.policy.forward(datums)
    gaps = [
        np.abs(s.values[d.active] - c.logprobs).max()
        for s, d, c in zip(scored, datums, completions, strict=True)
    ]
    return float(max(gaps)), {c.policy_version for c in completions}


@pytest.mark.parametrize("options", [{"lora_rank": 4}, {"mode": "keep"}], ids=str)
def test_weights_reach_the_server(tmp_path, options):
    server = emulated(model(), byte_tokenizer(), tmp_path)

    async def test(url):
        async with open_backend(url, tmp_path, **options) as backend:
            for version in (1, 2, 3):
                snapshot = await step(backend, version)
                assert (await gap_to_policy(backend))[0] > 1e-3
                assert await backend.sync(snapshot) == version
                gap, versions = await gap_to_policy(backend)
                assert gap < 1e-4
                assert versions == {version}
                report = backend.sync.reports[-1]
                assert report.gap <= report.tolerance < report.sampler_moved
            assert len(list((tmp_path / "weights").glob("weights-*"))) == 2

    with serve(app_of(server)) as url:
        asyncio.run(test(url))


def test_every_completion_has_the_logprobs_of_its_version(tmp_path):
    "Samples and syncs at the same time: what has version 2 was sampled, wholly, by weights 2."
    server = emulated(model(), byte_tokenizer(), tmp_path)

    async def test(url):
        async with open_backend(url, tmp_path, limit=AdaptiveLimit(start=4)) as backend:
            states = {0: await backend.policy.save_state("v0")}
            sampled = []
            over = False
            lesson = datums_of(
                await backend.sampler.sample(PROMPT, SampleParams(n=4, max_tokens=6, seed=1))
            )

            async def draw(first):
                for seed in range(first, 10_000, 6):
                    if over:
                        return
                    sampled.extend(
                        await backend.sampler.sample(
                            PROMPT, SampleParams(n=2, max_tokens=12, seed=seed)
                        )
                    )

            async def until_version(version):
                async with asyncio.timeout(60):
                    while not any(c.policy_version == version for c in sampled):
                        await asyncio.sleep(0.002)

            tasks = [asyncio.create_task(draw(first)) for first in range(6)]
            for version in (1, 2, 3):
                await until_version(version - 1)
                await backend.policy.forward_backward_custom(lesson, reinforce)
                await backend.policy.optim_step(AdamParams(learning_rate=1e-2))
                await backend.sync(await backend.policy.save_weights_for_sampler(f"v{version}"))
                states[version] = await backend.policy.save_state(f"v{version}")
            await until_version(3)
            over = True
            await asyncio.gather(*tasks)
            assert {c.policy_version for c in sampled} == {0, 1, 2, 3}
            for version, state in states.items():
                await backend.policy.load_state(state)
                mine = [c for c in sampled if c.policy_version == version]
                datums = datums_of(mine)
                for s, d, c in zip(await backend.policy.forward(datums), datums, mine, strict=True):
                    assert np.abs(s.values[d.active] - c.logprobs).max() < 1e-4

    with serve(app_of(server)) as url:
        asyncio.run(test(url))


def test_a_folder_that_the_server_cannot_see_leaves_the_old_weights(tmp_path):
    server = emulated(model(), byte_tokenizer(), tmp_path)

    async def test(url):
        async with open_backend(url, tmp_path) as backend:
            await backend.sync(await step(backend, 1))
            snapshot = await step(backend, 2)
            moved = tmp_path / "weights" / "weights-00002"
            real = backend.policy.run

            async def vanish(fn, *args):
                result = await real(fn, *args)
                if getattr(fn, "__name__", "") == "write_weights":
                    moved.rename(moved.with_name("gone"))
                return result

            backend.policy.run = vanish
            with pytest.raises(BackendError, match="Does the server see the folder"):
                await backend.sync(snapshot)
            backend.policy.run = real
            assert (server.bare, server.dead, backend.policy.versions.upcoming) == (False, "", 2)
            assert (await gap_to_policy(backend))[1] == {1}
            assert await backend.sync(snapshot) == 2
            assert (await gap_to_policy(backend))[0] < 1e-4

    with serve(app_of(server)) as url:
        asyncio.run(test(url))


def test_a_server_that_was_restarted_gets_its_weights_again(tmp_path):
    servers = [emulated(model(), byte_tokenizer(), tmp_path / name) for name in ("first", "second")]

    async def test(urls):
        async with open_backend(urls[0], tmp_path) as backend:
            await backend.sync(await step(backend, 1))
            want = await backend.sampler.sample(PROMPT, SampleParams(n=3, max_tokens=6, seed=5))
            # another process at the address, with the first weights
            backend.sampler.wire.root = urls[1]
            backend.sync.check_after_s = 60.0
            backend.sampler.wire.last_response_at -= 61.0  # the last answer was a minute ago
            with pytest.warns(UserWarning, match="lost its weights"):
                got = await backend.sampler.sample(PROMPT, SampleParams(n=3, max_tokens=6, seed=5))
            assert ids(got) == ids(want)
            assert {c.policy_version for c in got} == {1}
            before = backend.sampler.wire.counts["attempts"]
            await backend.sampler.sample(PROMPT, SampleParams(n=3, max_tokens=6, seed=5))
            assert backend.sampler.wire.counts["attempts"] == before + 3
            # as after a broken connection: looked at once, and found in order
            backend.sampler.wire.lost = True
            await backend.sampler.sample(PROMPT, SampleParams(n=3, max_tokens=6, seed=5))
            assert (backend.sampler.wire.counts["attempts"], backend.sampler.wire.lost) == (
                before + 8,
                False,
            )

    with serve(app_of(servers[0])) as first, serve(app_of(servers[1])) as second:
        asyncio.run(test((first, second)))


def test_servers_without_weight_sync(site, tmp_path):
    async def test():
        async with open_backend(site[1], tmp_path, sync="none") as backend:
            assert (await gap_to_policy(backend))[0] < 1e-4
            with pytest.raises(BackendError, match="weight_sync_interval=0"):
                await backend.sync("step-1")
        plain = Starlette(routes=[r for r in app_of(site[0]).routes if "completions" in r.path])
        with (
            serve(plain) as url,
            pytest.raises(BackendError, match=r"status 404: Not Found.*VLLM_SERVER_DEV_MODE=1"),
        ):
            async with open_backend(url, tmp_path) as backend:
                await backend.sync(await step(backend, 1))

    asyncio.run(test())


KIN = {  # owner of its models, where it says its version and what, the field for a length, what it rejects
    "vLLM 0.8.5": ("vllm", "/version", {"version": "0.8.5"}, {"max_model_len": 96}, {"top_k": 0}),
    "vLLM behind a gateway": ("vllm", None, {}, {"max_model_len": 96}, {}),
    "SGLang 0.5.23": (
        "sglang",
        "/get_server_info",
        {"version": "0.5.23"},
        {"max_model_len": 96},
        {"top_k": 0},
    ),
    "llama.cpp b9000": (
        "llamacpp",
        "/props",
        {"build_info": "b9000"},
        {"meta": {"n_ctx": 96}},
        {"echo": True},
    ),
    "a gateway": (None, None, {}, {"context_length": 96}, {}),
}


class Kin:
    "A server of another make, in the words of its sources, before the model of these tests."

    def __init__(self, local, kind):
        self.local = local
        self.kind = kind
        self.owner, self.says_at, self.says, self.length, self.rejects = KIN[kind]
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/completions", self.complete, methods=["POST"]),
        ]
        if self.says_at:
            routes.append(Route(self.says_at, lambda request: JSONResponse(self.says)))
        self.app = Starlette(routes=routes)

    def models(self, request):
        return JSONResponse(
            {"data": [{"id": "tiny", "owned_by": self.owner or "openai"} | self.length]}
        )

    async def complete(self, request):
        body = await request.json()
        if any(body.get(name) == value for name, value in self.rejects.items()):
            return JSONResponse({"error": {"message": f"rejected: {self.rejects}"}}, 400)
        sampler = self.local.sampler
        prompt = body["prompt"]
        knows = ("max_tokens", "temperature", "top_p", "seed") + ("stop_token_ids",) * (
            self.owner != "llamacpp"
        )
        settings = {
            k: tuple(body[k]) if k == "stop_token_ids" else body[k] for k in knows if k in body
        }
        (completion,) = await sampler.sample(prompt, SampleParams(**settings))
        ids = completion.tokens.tolist()
        values = completion.logprobs.tolist()
        choice = {"index": 0, "text": completion.text, "finish_reason": completion.finish_reason}
        if self.owner == "llamacpp":
            rows = zip(ids, values, strict=True)
            choice["logprobs"] = {
                "content": [{"id": i, "token": "?", "bytes": [63], "logprob": v} for i, v in rows]
            }
            return JSONResponse({"choices": [choice], "usage": {"prompt_tokens": len(prompt)}})
        if body.get("prompt_logprobs") is not None and self.owner == "vllm":
            scores = (await sampler.logprobs(prompt)).values
            rows = zip(prompt[1:], scores, strict=True)
            choice["prompt_logprobs"] = [None, *({str(i): {"logprob": v}} for i, v in rows)]
        if body.get("echo"):
            ids = prompt + ids
            values = [None, *(await sampler.logprobs(prompt)).values.tolist(), *values]
        choice["logprobs"] = {"tokens": ["?"] * len(ids), "token_logprobs": values}
        if self.kind != "vLLM 0.8.5":
            choice |= {"token_ids": completion.tokens.tolist()}
        elif body.get("return_tokens_as_token_ids"):
            choice["logprobs"]["tokens"] = [f"token_id:{i}" for i in ids]
        return JSONResponse({"choices": [choice]})


@pytest.mark.parametrize("kind", KIN)
def test_servers_of_other_makes(local, kind):
    params = SampleParams(n=4, max_tokens=24, seed=3, stop_token_ids=(101, 97, 33))

    async def test(url):
        async with sampler_at(url) as sampler:
            report = await probe_server(sampler, PROMPT)
            assert report.server == {
                "vLLM behind a gateway": "vLLM of a version that it does not say",
                "a gateway": "OpenAI-compatible server",
            }.get(kind, kind)
            assert (report.max_seq_len, report.prompt_logprobs, report.loads) == (
                96,
                kind[:2] != "ll",
                (),
            )
            got = await sampler.sample(PROMPT, params)
            want = await sample_locally(local, params)
            assert {c.finish_reason for c in want} == {"stop", "length"}
            for g, w in zip(got, want, strict=True):
                assert (g.tokens.tolist(), g.text, g.finish_reason) == (
                    w.tokens.tolist(),
                    w.text,
                    w.finish_reason,
                )
                assert np.abs(g.logprobs - w.logprobs).max() < 1e-5
            if report.prompt_logprobs:
                exact = (await local.sampler.logprobs(got[0].full_tokens)).values
                assert (
                    np.abs((await sampler.logprobs(got[0].full_tokens)).values - exact).max() < 1e-5
                )
                return
            with pytest.raises(BackendError, match=r"scores no given tokens \(llama.cpp b9000\)"):
                await sampler.logprobs(PROMPT)

    with serve(Kin(local, kind).app) as url:
        asyncio.run(test(url))


def test_check_says_which_server_it_is_and_what_is_missing_for_what(local, capsys, tmp_path):
    from rl_notebook.cli import run_check

    for part in (model(), byte_tokenizer()):
        part.save_pretrained(tmp_path / "model")

    def check_output(url):
        report = tmp_path / "new" / "check.html"
        options = f"--backend openai --base-url {url} --served-model tiny --base-model {tmp_path}/model".split()
        code = run_check([*options, "--report", str(report)])
        page = report.read_text(encoding="utf-8")
        assert f"rl-notebook check {' '.join(options)}</code>" in page
        assert ("What does not hold" in page) == bool(code)
        return code, capsys.readouterr().out

    with serve(Kin(local, "llama.cpp b9000").app) as url:
        code, out = check_output(url)
    assert code == 0
    assert "llama.cpp b9000, which serves 'tiny'" in out
    assert re.search(r"✗ prompt logprobs: none\n.*A weight sync cannot be checked", out)
    assert re.search(r"✗ takes new weights: no\n.*Set weight_sync_interval=0", out)
    assert re.search(
        r"✓ sampling frequencies: .*\n– sampled and scored: .*scores no given tokens", out
    )
    (tmp_path / "mine.html").write_text("mine")
    with pytest.raises(
        ConfigError, match=r"mine\.html: report: got something that this package did not"
    ):
        run_check(
            [
                "--backend",
                "openai",
                "--base-url",
                "http://127.0.0.1:9",
                "--report",
                str(tmp_path / "mine.html"),
            ]
        )


# --- what comes in -----------------------------------------------------------------------------------------------


TORTS = {
    "html": (200, b"<html><body>Welcome</body></html>", "got a page of HTML"),
    "deep": (200, b'{"choices": ' + b"[" * 200_000, "JSON that is nested too deeply"),
    "endless": (200, b'{"choices": ["' + b"x" * 2**25, r"got more than 16,\d+,\d+ bytes"),
    "escapes": (
        400,
        b'{"error": "\\u001b]0;owned\\u0007 \\u001b[31mno"}',
        r"\\u001b\]0;owned\\u0007 \\u001b\[31mno",
    ),
}


@pytest.mark.parametrize("name", TORTS)
def test_an_impossible_response_is_named_at_once(name):
    status, body, match = TORTS[name]
    requests = []

    async def respond(request):
        requests.append(request.url.path)
        return Response(
            body, status, media_type="text/html" if name == "html" else "application/json"
        )

    async def test(url):
        async with sampler_at(url) as sampler:
            with pytest.raises(BackendError, match=match) as caught:
                await sampler.sample(PROMPT, SampleParams(max_tokens=2))
            assert not set(str(caught.value)) & {"\x1b", "\x07"}
        assert requests == ["/v1/completions"]

    with serve(Starlette(routes=[Route("/{path:path}", respond, methods=["GET", "POST"])])) as url:
        asyncio.run(test(url))


# --- a real vLLM server, when there is one ------------------------------------------------------------------------

VLLM = os.environ.get("RL_NOTEBOOK_VLLM_URL", "")
DEV = "python -m vllm.entrypoints.openai.api_server --model DIR --served-model-name tiny, with VLLM_SERVER_DEV_MODE=1"


@pytest.mark.skipif(
    not VLLM,
    reason=f"RL_NOTEBOOK_VLLM_URL is not set; start {DEV}, DIR being the tiny model as saved",
)
def test_vllm(tmp_path):
    from rl_notebook.task.models import load_model

    async def test():
        policy, tokenizer = load_model("tiny")
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": "What is 1+2+3?"}],
            add_generation_prompt=True,
            return_dict=False,
        )
        async with await open_openai(
            policy, tokenizer, base_url=VLLM, served_model="tiny", folder=tmp_path
        ) as backend:
            assert backend.sampler.report.server.startswith("vLLM")
            assert backend.capabilities.seed
            for version in (1, 2):
                completions = await backend.sampler.sample(
                    prompt, SampleParams(n=8, max_tokens=20, seed=version)
                )
                again = await backend.sampler.sample(
                    prompt, SampleParams(n=8, max_tokens=20, seed=version)
                )
                assert ids(completions) == ids(again)
                datums = datums_of(completions)
                for scored, d, c in zip(
                    await backend.policy.forward(datums), datums, completions, strict=True
                ):
                    assert np.abs(scored.values[d.active] - c.logprobs).max() < 1e-3
                    echoed = await backend.sampler.logprobs(c.full_tokens)
                    assert np.abs(echoed.values[d.active] - c.logprobs).max() < 1e-3
                await backend.policy.forward_backward_custom(datums, reinforce)
                await backend.policy.optim_step(AdamParams(learning_rate=1e-3))
                assert (
                    await backend.sync(await backend.policy.save_weights_for_sampler(f"s{version}"))
                    == version
                )
                assert backend.sync.reports[-1].sampler_moved > 1e-2

    asyncio.run(test())


# --- restarts in line, pauses, silence --------------------------------------------------------------------------


def test_a_request_that_waited_while_the_server_restarted_is_not_sampled_from_its_first_weights(
    tmp_path,
):
    servers = [emulated(model(), byte_tokenizer(), tmp_path / name) for name in ("first", "second")]
    apps = [Moody(servers[0], []), app_of(servers[1])]

    async def test(urls):
        async with open_backend(urls[0], tmp_path, limit=AdaptiveLimit(start=1, most=1)) as backend:
            await backend.sync(await step(backend, 1))
            want = await backend.sampler.sample(PROMPT, SampleParams(n=2, max_tokens=6, seed=5))
            wire = backend.sampler.wire
            apps[0].moods = ["slow:0.3", "half"]
            wire.retries = replace(QUICK, attempt_s=30)
            task = asyncio.create_task(
                backend.sampler.sample(PROMPT, SampleParams(n=2, max_tokens=6, seed=5))
            )
            async with asyncio.timeout(60):
                while not wire.limit.waiting:  # one request is in flight, the other waits
                    await asyncio.sleep(0.005)
            # the connection breaks, and another process is at the address
            wire.root = urls[1]
            wire.lost = True
            with pytest.warns(UserWarning, match="lost its weights"):
                got = await task
            assert ids(got) == ids(want)
            assert {c.policy_version for c in got} == {1}

    with serve(apps[0]) as first, serve(apps[1]) as second:
        asyncio.run(test((first, second)))


def test_a_server_that_was_left_paused_is_resumed_if_it_is_ours_and_named_otherwise(tmp_path):
    server = emulated(model(), byte_tokenizer(), tmp_path)

    async def test(url):
        async with httpx.AsyncClient() as client:
            await client.post(f"{url}/pause", params={"mode": "keep"})
            with pytest.raises(BackendError, match=r"got a paused one.*POST /resume"):
                async with open_backend(url, tmp_path, sync="none"):
                    pass
            with pytest.warns(UserWarning, match=r"was left paused.*resumed"):
                async with open_backend(url, tmp_path) as backend:
                    assert (await gap_to_policy(backend))[0] < 1e-4

    with serve(app_of(server)) as url:
        asyncio.run(test(url))
