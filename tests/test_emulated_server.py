"The sampling half of the emulator: asked by the real Fireworks SDK, by plain HTTP, and steered like vLLM."

import asyncio
import json
import time

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_server import app_of, emulated, serve
from tiny_models import byte_tokenizer, one_thread, tiny_model

from rl_notebook.emulator.server import Shown, split_choice
from rl_notebook.backends.local.trainer import open_local
from rl_notebook.core.types import SampleParams
from rl_notebook.agents.openai_chat import in_pieces, token_record
from rl_notebook.show.html import token_text

__all__ = ["one_thread"]


PROMPT = [72, 101, 108, 108, 111]
KEY = "fw-not-a-real-key"


def model():
    return tiny_model(context=96)


@pytest.fixture(scope="module")
def local():
    backend = open_local(model(), byte_tokenizer(), inline=True)
    yield backend
    asyncio.run(backend.__aexit__())


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    server = emulated(model(), byte_tokenizer(), tmp_path_factory.mktemp("server"))
    with serve(app_of(server)) as url:
        yield server, url


@pytest.fixture
def fresh(tmp_path):
    server = emulated(model(), byte_tokenizer(), tmp_path)
    with serve(app_of(server)) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield server, client


def ask(client, path="/v1/completions", **body):
    response = client.post(
        path, json={"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "seed": 3} | body
    )
    assert response.status_code == 200, response.text
    return response.json()


def sample_locally(local, **params):
    params = SampleParams(**{"max_tokens": 6, "seed": 3} | params)
    return asyncio.run(local.sampler.sample(PROMPT, params))


# --- the Fireworks SDK --------------------------------------------------------------------------------------------


@pytest.fixture
def sdk_sampler(site):
    sampling = pytest.importorskip("fireworks.training.sdk.sampling")
    return sampling.DeploymentSampler(
        inference_url=site[1],
        model="accounts/local/deployments/d",
        api_key=KEY,
        tokenizer=byte_tokenizer(),
    )


PARAMS = {
    "plain": {},
    "cool": {"temperature": 0.7},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 4, "temperature": 1.3},
    "min_p": {"min_p": 0.1, "repetition_penalty": 1.5},
    "greedy": {"temperature": 0.0},
    "stop": {"stop": ["a", "e", "o"], "max_tokens": 30},
}


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("name", PARAMS)
def test_the_sdk_samples(sdk_sampler, local, name, echo):
    options = {"max_tokens": 6} | PARAMS[name]
    coroutine = sdk_sampler.sample_with_prompt_tokens(
        PROMPT, logprobs=True, echo=echo, seed=3, **options
    )
    (got,) = asyncio.run(coroutine)
    (want,) = sample_locally(
        local, **options | ({"stop": tuple(options["stop"])} if "stop" in options else {})
    )
    assert (got.full_tokens, got.prompt_len, got.finish_reason) == (
        want.full_tokens,
        5,
        want.finish_reason,
    )
    assert got.completion_len == len(want.tokens)
    start = len(PROMPT) - 1 if echo else 0
    assert got.logprobs_echoed is echo
    assert len(got.inference_logprobs) == start + len(want.tokens)
    assert np.abs(np.array(got.inference_logprobs[start:]) - want.logprobs).max() < 1e-5
    assert np.abs(np.array(got.sampling_logprobs[start:]) - want.sampling_logprobs).max() < 1e-5
    if echo:
        scores = asyncio.run(local.sampler.logprobs(want.full_tokens)).values
        assert np.abs(np.array(got.inference_logprobs) - scores).max() < 1e-5
        assert got.echoed_prompt_logprob_count == 4
    else:
        assert got.text == want.text


# --- shapes -------------------------------------------------------------------------------------------------------

VLLM_CHOICE = "index text logprobs finish_reason stop_reason token_ids prompt_logprobs prompt_token_ids routed_experts"
# both as vLLM 0.32.0 sent them
VLLM_LISTS = {"text_offset", "token_logprobs", "tokens", "top_logprobs"}


def test_the_shape_is_that_of_vllm(fresh, local):
    (c,) = sample_locally(local)
    response = ask(
        fresh[1],
        logprobs=1,
        return_token_ids=True,
        return_tokens_as_token_ids=True,
        prompt_logprobs=0,
    )
    (choice,) = response["choices"]
    assert set(choice) <= set(VLLM_CHOICE.split())
    assert set(choice["logprobs"]) == VLLM_LISTS
    assert choice["token_ids"] == c.tokens.tolist()
    assert choice["prompt_token_ids"] == PROMPT
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in c.tokens]
    assert np.abs(np.array(choice["logprobs"]["token_logprobs"]) - c.logprobs).max() < 1e-5
    scores = asyncio.run(local.sampler.logprobs(PROMPT)).values
    assert choice["prompt_logprobs"][0] is None
    results = [
        row[str(i)]["logprob"]
        for row, i in zip(choice["prompt_logprobs"][1:], PROMPT[1:], strict=True)
    ]
    assert np.abs(np.array(results) - scores).max() < 1e-5
    assert response["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": len(c.tokens),
        "total_tokens": 5 + len(c.tokens),
    }


@pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/completions"])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_in_parallel_lists_begins_with_null(site, local, path, max_tokens):
    with httpx.Client(base_url=site[1]) as client:
        options = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, "prompt_cache_max_len": 0}
        # the literal prefill of Fireworks' guide
        (choice,) = ask(client, path, **options)["choices"]
    values = choice["logprobs"]["token_logprobs"]
    assert len(values) == 5 + max_tokens
    assert values[0] is None
    assert (
        np.abs(np.array(values[1:5]) - asyncio.run(local.sampler.logprobs(PROMPT)).values).max()
        < 1e-5
    )


def events(client, path, **body):
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 30, "seed": 3, "stream": True} | body
    text = client.post(path, json=body).text
    assert text.endswith("data: [DONE]\n\n")
    return [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_adds_up_to_the_whole_reply(fresh, n):
    _, client = fresh
    options = {"max_tokens": 30, "n": n, "logprobs": 1, "return_token_ids": True}
    whole = ask(client, **options)["choices"]
    parts = [c for e in events(client, "/v1/completions", **options) for c in e["choices"]]
    for i, choice in enumerate(whole):
        mine = [p for p in parts if p["index"] == i]
        assert "".join(p["text"] for p in mine) == choice["text"]
        assert [t for p in mine for t in p["token_ids"]] == choice["token_ids"]
        assert [v for p in mine for v in p["logprobs"]["token_logprobs"]] == choice["logprobs"][
            "token_logprobs"
        ]
        assert [p["finish_reason"] for p in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
    usage = events(client, "/v1/completions", stream_options={"include_usage": True})[-1]
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == 5


@given(st.text(min_size=1, max_size=40))
def test_pieces_of_text_are_the_text(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text)
    part = Shown(
        ids,
        [-1.0] * len(ids),
        [-1.0] * len(ids),
        tokenizer.decode(ids, skip_special_tokens=True),
        "stop",
    )
    assert (
        "".join(piece for _, _, piece in in_pieces(ids, part.text, tokenizer, size=3)) == part.text
    )
    pieces = split_choice({"index": 0, "finish_reason": "stop", "token_ids": ids}, part, tokenizer)
    assert [i for p in pieces for i in p["token_ids"]] == ids


def test_a_stream_costs_in_proportion_to_its_tokens() -> None:
    tokenizer = byte_tokenizer()

    class Counting:
        decoded = 0

        def decode(self, tokens, **options):
            self.decoded += len(tokens)
            return tokenizer.decode(tokens, **options)

    for text in ("2+3=5, 🙂é " * 400, "\ufffd🙂" * 300):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        counting = Counting()
        text = tokenizer.decode(tokens)
        pieces = [piece for *_, piece in in_pieces(tokens, text, counting)]
        assert "".join(pieces) == text
        assert max(map(len, pieces)) < 40
        assert counting.decoded < 8 * len(tokens)
    in_part = [tokenizer.decode(tokens[:9]) + "|", "other words"]
    assert [
        "".join(piece for *_, piece in in_pieces(tokens, text, tokenizer)) for text in in_part
    ] == in_part


def test_a_record_of_a_token_says_what_pages_say() -> None:
    tokenizer = byte_tokenizer()
    tokens = tokenizer.encode("2🙂é", add_special_tokens=False)
    records = [token_record(tokenizer, token, -1.0) for token in tokens]
    assert [r["token"] for r in records] == [token_text(t, tokenizer) for t in tokens]
    assert bytes(byte for r in records for byte in r["bytes"]).decode() == "2🙂é"
    assert "\\xf0" in "".join(r["token"] for r in records)


REJECTED = [
    ({"model": "qwen"}, 404, "The model `qwen` does not exist"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [9999]}, 400, "9999"),
    ({"prompt": [1] * 97}, 400, "maximum context length is 96 tokens"),
    ({"temperature": -1}, 400, "temperature"),
    ({"max_tokens": "many"}, 400, "max_tokens"),
    ({"max_tokens": 0}, 400, "0 only with echo"),
    ({"ignore_eos": True}, 400, "does not do this"),
    ({"n": 10**9}, 400, "at most 1,024"),
]


@pytest.mark.parametrize(
    ("body", "status", "message"), REJECTED, ids=[str(r[0])[:30] for r in REJECTED]
)
def test_errors_have_the_shape_of_openai(site, body, status, message):
    response = httpx.post(
        site[1] + "/v1/completions", json={"model": "tiny", "prompt": PROMPT} | body
    )
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"object", "message", "type", "code"}
    assert error["code"] == status
    assert message in error["message"]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"prompt": "\\ud800"}', "surrogates"),
        (b'{"prompt": [1], "top_k": 1e400}', "beyond all others"),
        (b'{"prompt": [1], "temperature": 1' + b"0" * 400 + b"}", "beyond all others"),
        (b'{"prompt": [1], "stop": ["\\uD83D"]}', "surrogates"),
    ],
)
def test_odd_json_is_rejected(site, raw, message):
    response = httpx.post(
        site[1] + "/v1/completions", content=raw, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


# --- steering -----------------------------------------------------------------------------------------------------


def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_a_client_that_hangs_up_is_no_longer_served(site):
    server, url = site

    async def hang_up():
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 91, "n": 64}
            request = asyncio.create_task(client.post("/v1/completions", json=body))
            while not server.running:
                await asyncio.sleep(0.002)
            request.cancel()
            await asyncio.wait([request])
            assert request.cancelled()

    asyncio.run(asyncio.wait_for(hang_up(), 60))
    until(lambda: server.running == 0)
    sampler = server.serving().backend.sampler
    until(sampler.scheduler.done)
    assert sampler.engine.meter.tokens_sampled < 64 * 91
