"The policy behind an address, asked by the real client of OpenAI over real HTTP."

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Annotated, Any, Literal

import httpx
import numpy as np
import pytest
import torch
from pydantic import BaseModel, Field
from tiny_models import tiny_model
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import rl_notebook as rln
from rl_notebook.backends.local.trainer import open_local
from rl_notebook.core.types import AlignmentError, BackendError, ConfigError, SampleParams
from rl_notebook.core.datums import datum_from_tokens_weights
from rl_notebook.loop.rollouts import RolloutSetup
from rl_notebook.agents.serve import serve
from rl_notebook.task.models import build_tokenizer

openai = pytest.importorskip("openai", reason="the client of OpenAI is not installed")

ASKED = [{"role": "user", "content": "1+2+3+4+5 = ?"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = '{"name": "add", "arguments": {"a": 2}}'
ANSWER = "The sum is 4."


def tool_calling_model() -> tuple[Any, Any]:
    "A model of one rule: a question makes it call a tool, what a tool said makes it answer. Each text is one token."
    texts = [
        "<end>",
        "<|user|>",
        "<|assistant|>",
        "<|system|>",
        "<tool_call>",
        CALL,
        "</tool_call>",
        ANSWER,
        "x",
        "<?>",
    ]
    raw = Tokenizer(models.WordLevel({text: i for i, text in enumerate(texts)}, unk_token="<?>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"<[^>]*>"), "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<end>", pad_token="<end>", unk_token="<?>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}"
        "{% if '<tool_response>' not in messages[-1]['content'] %}{{ '<|assistant|>' }}{% else %}{{ '</tool_call>' }}"
        "{% endif %}"
    )
    # assistant, call, its text, its end, the answer, the end
    follows = {2: 4, 4: 5, 5: 6, 6: 7, 7: 0}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
    ids = {"eos_token_id": 0, "bos_token_id": None, "pad_token_id": 0}
    model = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=len(texts), tie_word_embeddings=False, **sizes, **heads, **ids)
    )
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model.model.norm.weight.fill_(1.0)
        for layer in model.model.layers:
            layer.input_layernorm.weight.fill_(1.0)
            layer.post_attention_layernorm.weight.fill_(1.0)
        model.model.embed_tokens.weight.copy_(torch.eye(len(texts), 16))
        for token, after in follows.items():
            model.lm_head.weight[after, token] = 20.0
    return model, tokenizer


@dataclass
class Watched:
    "A sampler that keeps what it sampled, and waits while its gate is closed."

    sampler: Any
    completions: list[Any] = field(default_factory=list)
    gate: asyncio.Event | None = None
    cancelled: int = 0

    async def sample(self, prompt_tokens: Any, params: SampleParams) -> Any:
        try:
            if self.gate is not None:
                await self.gate.wait()
            completions = await self.sampler.sample(prompt_tokens, params)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.completions += completions
        return completions

    async def logprobs(self, tokens: Any) -> Any:
        return await self.sampler.logprobs(tokens)


@asynccontextmanager
async def serve_model(
    model: Any = None, tokenizer: Any = None, max_seq_len: int = 256, **params: Any
):
    "A server, the watched sampler and the backend of a model with random weights, whose text is nothing like English."
    tokenizer = tokenizer or build_tokenizer()
    model = model or tiny_model(vocab=len(tokenizer), eos=tokenizer.eos_token_id, scale=1.0)
    async with open_local(model, tokenizer, reference=False) as backend:
        watched = Watched(backend.sampler)
        setup = RolloutSetup(watched, tokenizer, SampleParams(**{"max_tokens": 12} | params), 1)
        async with serve(setup, max_seq_len=max_seq_len) as server:
            yield server, watched, backend


def client_of(rollout: Any, **options: Any) -> Any:
    "A client with the address and the key of a rollout."
    return openai.AsyncOpenAI(
        base_url=rollout.url, api_key=rollout.key, **{"max_retries": 0} | options
    )


async def ask(client: Any, messages: list[Any], **more: Any) -> Any:
    "One turn."
    return await client.chat.completions.create(model="any", messages=messages, **more)


async def play_turns(rollout: Any, turns: int, **more: Any) -> list[Any]:
    "An agent of n turns; returns its messages."
    messages: list[Any] = [*ASKED]
    async with client_of(rollout) as client:
        for turn in range(turns):
            messages.append((await ask(client, messages, **more)).choices[0].message)
            messages.append({"role": "user", "content": f"turn {turn}?"})
    return messages


def check_exact(samples: Any, completions: Any) -> None:
    "Every sampled token is sampled in exactly one place, with its logprobs, after the tokens that it was sampled from."
    left = {id(c): c for c in completions}
    for sample in samples:
        for first, end in sample.turns:
            tokens = sample.tokens.tolist()
            result = next(
                c
                for c in left.values()
                if c.prompt_tokens.tolist() == tokens[:first]
                and c.tokens.tolist() == tokens[first:end]
            )
            assert np.array_equal(sample.raw_logprobs[first:end], result.logprobs)
            del left[id(result)]
    assert not left


async def check_scores(backend: Any, samples: Any) -> None:
    "The policy gives the tokens the logprobs that they were sampled with."
    for sample in samples:
        datum = datum_from_tokens_weights(sample.tokens, sample.loss_mask)
        [scored] = await backend.policy.forward([datum])
        inside = sample.loss_mask[1:] == 1
        assert np.allclose(scored.values[inside], sample.raw_logprobs[1:][inside], atol=1e-4)


def test_what_comes_back_is_what_was_sampled() -> None:
    async def play() -> None:
        async with serve_model() as (server, watched, backend):
            odd = 0
            turns = 4
            for i in range(4):
                with server.rollout(f"q{i}") as rollout:
                    await play_turns(rollout, turns, seed=i)
                run = rollout.to_run(0.5, note="kept")
                (sample,) = run.segments
                assert (sample.info["rollout"], sample.info["note"], sample.reward) == (
                    f"q{i}",
                    "kept",
                    0.5,
                )
                assert (sample.info["turns"], len(sample.turns)) == (turns, turns)
                check_exact(run.segments, watched.completions[-turns:])
                await check_scores(backend, run.segments)
                odd += sample.info["noncanonical_turns"]
            assert odd > 0  # else there would be nothing that a tokenizer could have cut otherwise

    asyncio.run(play())


def test_the_experts_that_read_a_token_come_back_too() -> None:
    async def play() -> None:
        tokenizer = build_tokenizer()
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "head_dim": 8,
            "num_experts": 4,
        }
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
        experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
        ids = {
            "vocab_size": len(tokenizer),
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": None,
        }
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts, **ids)).eval()
        async with open_local(model, tokenizer, reference=False, router_replay=True) as backend:
            setup = RolloutSetup(backend.sampler, tokenizer, SampleParams(max_tokens=8), 1)
            async with serve(setup) as server:
                with server.rollout() as rollout:
                    await play_turns(rollout, 3)
        (sample,) = rollout.to_run(1.0).segments
        assert sample.info["turns"] == 3
        assert sample.routing is not None
        for first, end in sample.turns:  # noted from the last token before each turn on
            assert all(sample.routing[first - 1 : end - 1])

    asyncio.run(play())


def test_a_stream_says_the_same_and_is_recorded() -> None:
    async def play() -> None:
        async with serve_model() as (server, watched, _backend):
            with server.rollout() as rollout:
                async with client_of(rollout) as client:
                    whole = await ask(client, ASKED, seed=3)
                    options = {"stream": True, "stream_options": {"include_usage": True}}
                    events = [event async for event in await ask(client, ASKED, seed=3, **options)]
                    text = "".join(e.choices[0].delta.content or "" for e in events if e.choices)
                    assert text == whole.choices[0].message.content
                    assert [e.usage for e in events if e.usage] == [whole.usage]
                    more = [
                        *ASKED,
                        {"role": "assistant", "content": text},
                        {"role": "user", "content": "and?"},
                    ]
                    await ask(client, more)
            run = rollout.to_run(1.0)
            assert [s.info["turns"] for s in run.segments] in ([1, 2], [2, 1])
            check_exact(run.segments, watched.completions)

    asyncio.run(play())


def test_tools_are_called_with_the_tokens_that_were_sampled() -> None:
    async def play() -> None:
        model, tokenizer = tool_calling_model()
        async with serve_model(model, tokenizer, max_tokens=3) as (server, watched, _backend):
            with server.rollout() as rollout:
                async with client_of(rollout) as client:
                    messages: list[Any] = [{"role": "user", "content": "x"}]
                    reply = (await ask(client, messages, tools=[ADD])).choices[0]
                    assert (reply.finish_reason, reply.message.content) == ("tool_calls", None)
                    (call,) = reply.message.tool_calls
                    assert (call.function.name, json.loads(call.function.arguments)) == (
                        "add",
                        {"a": 2},
                    )
                    # sent again as a library would: other spelling of the arguments, further fields
                    again = reply.message.to_dict() | {"content": "", "name": "policy"}
                    again["tool_calls"][0]["function"]["arguments"] = '{ "a":2 }'
                    messages += [again, {"role": "tool", "tool_call_id": call.id, "content": "4"}]
                    async with client.chat.completions.stream(
                        model="any", messages=messages, tools=[ADD]
                    ) as stream:
                        last = (await stream.get_final_completion()).choices[0]
                    assert (last.message.content, last.finish_reason) == (ANSWER, "stop")
            (sample,) = rollout.to_run(1.0).segments
            assert CALL in tokenizer.decode(sample.tokens)
            assert sample.info["turns"] == 2
            check_exact([sample], watched.completions)
            with server.rollout() as rollout:
                async with client_of(rollout) as client:  # then a call is only text
                    plain = await ask(
                        client, [{"role": "user", "content": "x"}], tools=[ADD], tool_choice="none"
                    )
            assert plain.choices[0].message.tool_calls is None
            assert CALL in plain.choices[0].message.content

    asyncio.run(play())


def test_branches_and_edited_histories_are_separate_sequences() -> None:
    async def play() -> None:
        async with serve_model() as (server, watched, backend):
            with server.rollout() as rollout:
                async with client_of(rollout) as client:
                    first = (await ask(client, ASKED)).choices[0].message
                    both = [*ASKED, first, {"role": "user", "content": "go on"}]
                    await asyncio.gather(ask(client, both), ask(client, both))
                    other = [*ASKED, first, {"role": "user", "content": "or so"}]
                    last = (await ask(client, other)).choices[0].message
                    edited = [*ASKED, {"role": "assistant", "content": "15"}, *other[2:], last]
                    await ask(client, [*edited, {"role": "user", "content": "sure?"}])
                    await ask(client, [{"role": "system", "content": "Add."}, *both])
                    await ask(client, both, tools=[ADD])
            run = rollout.to_run(1.0)
            assert [s.info["turns"] for s in run.segments] == [2, 1, 1, 1, 1, 1]
            branch = "a second branch from message 2 on"
            edited = "other history from message"
            tools = "other tools"
            reasons = ["", branch, branch, f"{edited} 1 on", f"{edited} 0 on", tools]
            assert all(
                s.info["apart"].startswith(why)
                for s, why in zip(run.segments, reasons, strict=True)
            )
            check_exact(run.segments, watched.completions)
            await check_scores(backend, run.segments)

    asyncio.run(play())


def test_a_template_that_rewrites_history_makes_each_turn_a_sequence() -> None:
    async def play() -> None:
        tokenizer = build_tokenizer()
        tokenizer.chat_template = (
            "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'user' %}{{ m.content }}{% endif %}"
            "{{ '<|end|>' }}{% endfor %}{{ '<|assistant|>' }}"
        )
        async with serve_model(tokenizer=tokenizer) as (server, watched, _backend):
            with server.rollout() as rollout:
                # an answer that ends at once would be as the template renders it
                await play_turns(rollout, 3, seed=0)
            run = rollout.to_run(1.0)
            assert [s.info["turns"] for s in run.segments] == [1, 1, 1]
            assert all("the chat template" in s.info["apart"] for s in run.segments[1:])
            check_exact(run.segments, watched.completions)

    asyncio.run(play())


def test_keys_and_addresses() -> None:
    async def play() -> None:
        async with serve_model() as (server, watched, _backend):
            with server.rollout() as rollout:
                for key in ("x", rollout.key[:-1], rollout.key + "x"):
                    async with client_of(rollout) as client:
                        with pytest.raises(openai.AuthenticationError, match="key"):
                            await ask(client.with_options(api_key=key), ASKED)
                assert rollout.key not in repr(server)
                async with client_of(rollout) as client:
                    with pytest.raises(openai.AuthenticationError, match="key"):
                        await client.with_options(api_key="x").models.list()
                    for address_form in (client, client.with_options(base_url=f"{server.url}/v1")):
                        assert [model.id async for model in address_form.models.list()] == [
                            "policy"
                        ]
                        assert (await address_form.models.retrieve("any")).id == "any"
                    with pytest.raises(
                        openai.NotFoundError,
                        match=r"GET /v1/files: there is only POST .* GET .*models",
                    ):
                        await client.with_options(base_url=f"{server.url}/v1").files.list()
                    with pytest.raises(openai.NotFoundError, match="chat/completions"):
                        await client.embeddings.create(model="any", input="x")
            async with client_of(rollout) as client:
                with pytest.raises(openai.NotFoundError, match="is not open"):
                    await ask(client, ASKED)
                with pytest.raises(openai.NotFoundError, match="is not open"):
                    await client.models.list()
            assert not watched.completions
            with pytest.raises(AlignmentError, match="at least one request"):
                rollout.to_run(1.0)
            for bad in ("a/b", "ä", " "):
                with pytest.raises(ConfigError, match="rollout id"):
                    server.rollout(bad)
            with server.rollout("twice"), pytest.raises(ConfigError, match="no id that is open"):
                server.rollout("twice")
        with pytest.raises(ConfigError, match=r"loop\.serve"):
            server.rollout()
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url)

    asyncio.run(play())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "judge", "content": "x"}]}, "unknown role judge"),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ]
        },
        "image_url",
    ),
    (
        {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        "tool_choice",
    ),
    ({"tool_choice": "required"}, "a function that is offered"),
    ({"tools": [ADD], "parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"tools": [{"type": "function"}]}, "function"),
    ({"response_format": {"type": "xml"}}, "response_format: got {'type': 'xml'}"),
    ({"temperature": 0.2}, "temperature: got 0.2; expected 1.0"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"made_up": 1}, "made_up: got 1; expected no such field"),
    ({"chat_template_kwargs": {"nonsense": True}}, "nonsense"),
]
if find_spec("llguidance"):  # of the extra `structured`
    schema = {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}
    REFUSED.append(({"response_format": schema}, "Unimplemented keys"))


def test_unsupported_requests_are_rejected_by_name() -> None:
    async def play() -> None:
        async with serve_model() as (server, watched, _backend):
            with server.rollout() as rollout:
                headers = {"Authorization": f"Bearer {rollout.key}"}
                async with httpx.AsyncClient() as client:
                    for more, named in REFUSED:
                        body = {"model": "any", "messages": ASKED} | more
                        reply = await client.post(
                            f"{rollout.url}/chat/completions", json=body, headers=headers
                        )
                        message = reply.json()["error"]["message"]
                        assert (reply.status_code, named in message) == (400, True), reply.text
            assert not watched.completions

    asyncio.run(play())


def test_a_repeated_request_gets_the_reply_that_was_sampled() -> None:
    async def play() -> None:
        async with serve_model() as (server, watched, _backend):
            with server.rollout() as rollout:
                address = f"{rollout.url}/chat/completions"
                key = {"Authorization": f"Bearer {rollout.key}"}
                body = {"model": "any", "messages": ASKED}
                again = {"X-Stainless-Retry-Count": "1"}
                async with httpx.AsyncClient(headers=key) as client:
                    first = (await client.post(address, json=body)).json()
                    for headers in ({}, again, again | {"Idempotency-Key": "other body"}):
                        last = await client.post(address, json=body, headers=headers)
                        same = last.json()["choices"] == first["choices"]
                        assert same == ("Idempotency-Key" not in headers)
                    asking = {"Idempotency-Key": "one", "X-Stainless-Retry-Count": "0"}
                    both = [
                        client.post(address, json=body | {"seed": 7}, headers=asking)
                        for _ in range(2)
                    ]
                    one, two = await asyncio.gather(*both)  # while the first is being sampled
                    assert one.json() == two.json()
                    other = await client.post(address, json=body | {"seed": 8}, headers=asking)
                    assert (other.status_code, "another body" in other.text) == (422, True)
                    assert len(watched.completions) == 3
                    # a client that counts asks for a second answer
                    fresh = {"X-Stainless-Retry-Count": "0"}
                    await client.post(address, json=body, headers=fresh)
                    assert len(watched.completions) == 4
            run = rollout.to_run(1.0)
            assert len(run.segments) == 4
            check_exact(run.segments, watched.completions)

    asyncio.run(play())


def test_several_completions_and_their_logprobs() -> None:
    async def play() -> None:
        async with serve_model() as (server, watched, backend):
            with server.rollout() as rollout:
                async with client_of(rollout) as client:
                    first = (await ask(client, ASKED)).choices[0].message
                    more = [*ASKED, first, {"role": "developer", "content": "Be sure."}]
                    reply = await ask(client, more, n=3, logprobs=True)
                    assert [choice.index for choice in reply.choices] == [0, 1, 2]
                    for choice, completion in zip(
                        reply.choices, watched.completions[1:], strict=True
                    ):
                        assert [
                            t.logprob for t in choice.logprobs.content
                        ] == completion.logprobs.tolist()
                    chosen = [*more, reply.choices[2].message, {"role": "user", "content": "and?"}]
                    stream = await ask(client, chosen, n=2, logprobs=True, stream=True)
                    chunks = [c async for c in stream]
                    assert {c.choices[0].index for c in chunks} == {0, 1}
                    assert any(c.choices[0].logprobs for c in chunks)
            run = rollout.to_run(1.0)
            assert sorted(s.info["turns"] for s in run.segments) == [1, 1, 2, 2]
            check_exact(run.segments, watched.completions)
            await check_scores(backend, run.segments)

    asyncio.run(play())


class Sum(BaseModel):
    "What a reply is to be."

    total: Annotated[int, Field(ge=0, le=99)]
    sure: Literal["yes", "no"]


def test_a_reply_is_held_to_a_schema_or_to_a_tool() -> None:
    "By the real client, from a model that writes noise. Tokens are trained as they were sampled, and the sample says so."
    pytest.importorskip("llguidance")
    tool = openai.pydantic_function_tool(Sum, name="report")
    named = {"type": "function", "function": {"name": "report"}}

    async def play(rollout: Any, seed: int) -> None:
        async with client_of(rollout) as client:
            chat = client.chat.completions
            common = {"model": "any", "seed": seed}
            reply = (
                (await chat.parse(messages=ASKED, response_format=Sum, **common)).choices[0].message
            )
            assert reply.parsed.total in range(100)
            more = [
                *ASKED,
                {"role": "assistant", "content": reply.content},
                {"role": "user", "content": "Report."},
            ]
            for choice in ("required", named):
                ask = {
                    "messages": more,
                    "tools": [tool],
                    "tool_choice": choice,
                    "parallel_tool_calls": False,
                }
                async with chat.stream(**ask, **common) as stream:
                    last = (await stream.get_final_completion()).choices[0]
                (call,) = last.message.tool_calls
                assert isinstance(call.function.parsed_arguments, Sum)
                assert (last.finish_reason, last.message.content) == ("tool_calls", None)
            either = await chat.parse(messages=more, tools=[tool], response_format=Sum, **common)
            assert either.choices[0].message.parsed or either.choices[0].message.tool_calls
            reply = await client.responses.parse(model="any", input="2+2", text_format=Sum)
            assert reply.output_parsed.sure in ("yes", "no")

    async def both() -> None:
        tokenizer = build_tokenizer()
        model = tiny_model(
            vocab=len(tokenizer), eos=tokenizer.eos_token_id, scale=1.0, context=2048
        )
        async with serve_model(model, tokenizer, max_seq_len=2048, max_tokens=150) as (
            server,
            watched,
            backend,
        ):
            for _ in range(2):
                with server.rollout() as rollout:
                    await play(rollout, seed=1)
            tokens = [c.tokens.tolist() for c in watched.completions]
            half = len(watched.completions) // 2
            assert tokens[: half - 1] == tokens[half:-1]  # the last request has no seed
            run = rollout.to_run(1.0)
            assert all(
                s.processed and s.info["grammar_turns"] == s.info["turns"] for s in run.segments
            )
            check_exact(run.segments, watched.completions[half:])
            await check_scores(backend, run.segments)
            # then nothing reads the calls that a grammar makes
            server.read_calls = lambda text: (text, [])
            with (
                server.rollout() as rollout,
                pytest.raises(openai.BadRequestError, match="split_calls"),
            ):
                await ask(client_of(rollout), ASKED, tools=[ADD], tool_choice="required")

    asyncio.run(both())


def test_the_responses_api_plays_the_same_conversation() -> None:
    async def play() -> None:
        async with serve_model(*tool_calling_model(), max_seq_len=512, max_tokens=60) as (
            server,
            watched,
            _backend,
        ):
            with server.rollout() as rollout:
                async with client_of(rollout) as client:
                    tool = {"type": "function", **ADD["function"]}
                    options = {
                        "model": "any",
                        "tools": [tool],
                        "instructions": "x",
                        "max_output_tokens": 3,
                    }
                    items: list[Any] = [
                        {"role": "user", "content": [{"type": "input_text", "text": "x"}]}
                    ]
                    for _ in range(2):
                        reply = await client.responses.create(input=items, **options)
                        items += [item.to_dict() for item in reply.output]
                        for call in [item for item in reply.output if item.type == "function_call"]:
                            out = {
                                "type": "function_call_output",
                                "call_id": call.call_id,
                                "output": "4",
                            }
                            items.append(out)
                    kinds = [item.get("type", "asked") for item in items]
                    assert kinds == ["asked", "function_call", "function_call_output", "message"]
                    assert reply.output_text == ANSWER
                    items.append({"role": "user", "content": "x"})
                    async with client.responses.stream(input=items, **options) as stream:
                        kinds = [event.type async for event in stream]
                        whole = await stream.get_final_response()
                    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
                    assert whole.output[0].type == "function_call"
                    assert whole.usage.output_tokens == len(watched.completions[-1].tokens)
                    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
                        await client.responses.create(
                            input="x", previous_response_id=reply.id, model="any"
                        )
                    with pytest.raises(openai.BadRequestError, match="web_search"):
                        await client.responses.create(
                            input="x", tools=[{"type": "web_search"}], model="any"
                        )
            run = rollout.to_run(1.0)
            assert run.segments[0].info["turns"] >= 2
            check_exact(run.segments, watched.completions)

    asyncio.run(play())


def test_a_conversation_that_has_grown_too_long_is_rejected_and_kept() -> None:
    async def play() -> None:
        async with serve_model(max_seq_len=64) as (server, watched, _backend):
            with server.rollout() as rollout, pytest.raises(openai.BadRequestError) as caught:
                await play_turns(rollout, 20)
            assert caught.value.code == "context_length_exceeded"
            (sample,) = rollout.to_run(0.0).segments
            assert len(sample.tokens) <= 64
            check_exact([sample], watched.completions)

    asyncio.run(play())


def test_a_client_that_hangs_up_has_never_asked() -> None:
    async def play() -> None:
        async with serve_model() as (server, watched, _backend):
            with server.rollout() as rollout:
                messages = (await play_turns(rollout, 1))[:3]
                watched.gate = asyncio.Event()
                async with client_of(rollout, timeout=0.2) as client:
                    with pytest.raises(openai.APITimeoutError):
                        await ask(client, messages)
                    while not watched.cancelled:
                        await asyncio.sleep(0.01)
                    watched.gate.set()
                    await ask(client.with_options(timeout=30), messages)
                watched.gate = asyncio.Event()
                client = client_of(rollout)
                pending = asyncio.create_task(ask(client, messages))
                while not rollout._sampling_tasks:
                    await asyncio.sleep(0.01)
            with pytest.raises(openai.APIStatusError) as caught:  # the end of the rollout ends it
                await pending
            assert caught.value.status_code == 503
            await client.close()
            (sample,) = rollout.to_run(1.0).segments
            assert sample.info["turns"] == 2
            check_exact([sample], watched.completions)

    asyncio.run(play())


def test_a_server_that_ends_lets_no_request_wait() -> None:
    async def play() -> None:
        async with serve_model() as (server, watched, _backend):
            watched.gate = asyncio.Event()
            rollout = server.rollout()
            client = client_of(rollout)
            pending = asyncio.create_task(ask(client, ASKED))
            while not rollout._sampling_tasks:
                await asyncio.sleep(0.01)
            await server.close()
            with pytest.raises(openai.APIError):
                await pending
            await client.close()
        assert watched.cancelled == 1

    asyncio.run(play())


def test_a_backend_that_fails_is_what_is_raised() -> None:
    async def play() -> None:
        async with serve_model() as (server, _watched, backend):
            await backend.close()
            with pytest.raises(BackendError, match="closed"), server.rollout() as rollout:
                await play_turns(rollout, 1)

    asyncio.run(play())


def loop_of(play: Any, kind: Any = rln.GRPOLoop, **settings: Any) -> tuple[Any, Any]:
    "A loop over the toy task, and its backend."
    cfg = {
        "prompt_groups_per_step": 3,
        "completions_per_prompt": 4,
        "max_completion_tokens": 32,
        "max_seq_len": 128,
    }
    backend = open_local(*rln.load_model("tiny"), reference=False)
    return kind(
        backend, rln.toy_rows(32), play, rln.Config(**cfg | {"kl_beta": 0.0} | settings)
    ), backend


def player(servers: list[Any]) -> Any:
    "A rollout function: an agent of two turns at most, at the address of the last of the servers."

    async def rollout_fn(sample_prompt: dict[str, Any]) -> Any:
        with servers[-1].rollout() as rollout:
            async with client_of(rollout) as client:
                messages = [*sample_prompt["messages"]]
                for _ in range(2):
                    reply = (await ask(client, messages)).choices[0].message
                    if rln.toy_reward(reply.content, sample_prompt["answer"]) == 1:
                        break
                    messages += [reply, {"role": "user", "content": "Try again."}]
        return rollout.to_run(float(len(reply.content)))

    return rollout_fn


def test_a_step_on_served_rollouts_is_sound_and_is_replayed() -> None:
    async def play() -> None:
        servers: list[Any] = []
        loop, backend = loop_of(player(servers))
        async with backend, loop.serve() as server:
            servers.append(server)
            for _ in range(2):
                record = await loop.step()
                assert record.trained
                assert not rln.xray(record).failed
                assert (await rln.diagnose(record)).sentence.startswith("no mismatch")
            sampled = [s.tokens.tolist() for g in record.groups for s in g.samples]
            assert max(s.info["turns"] for g in record.groups for s in g.samples) == 2
            await loop.undo()
            again = await loop.step()
            assert [s.tokens.tolist() for g in again.groups for s in g.samples] == sampled

    asyncio.run(play())


def test_a_lost_backend_loses_the_sample_and_a_bug_is_an_error() -> None:
    async def play() -> None:
        servers: list[Any] = []
        loop, backend = loop_of(player(servers), max_rollout_failure_rate=1.0)
        real = backend.sampler.sample
        calls = iter(range(10**6))

        async def sometimes(prompt: Any, params: Any) -> Any:
            if next(calls) == 0:
                raise BackendError("sampler", got="a reset")
            return await real(prompt, params)

        backend.sampler.sample = sometimes
        async with backend, loop.serve() as server:
            servers.append(server)
            record = await loop.step()
            assert sum(len(g.dropped) for g in record.groups) == 1

            async def broken(prompt: Any, params: Any) -> Any:
                raise ZeroDivisionError("a bug")

            backend.sampler.sample = broken
            with pytest.raises(rln.RLNotebookError, match="ZeroDivisionError"):
                await loop.step()

    asyncio.run(play())


def test_asynchronous_rollouts_and_a_branch() -> None:
    async def play() -> None:
        servers: list[Any] = []
        loop, backend = loop_of(
            player(servers), rln.AsyncGRPOLoop, recipe="async_rl_loop", max_completion_tokens=16
        )
        async with backend, loop.serve() as server:
            servers.append(server)
            for record in await loop.run(1, progress=False):
                check = {s.info["rollout"] for g in record.groups for s in g.samples}
                assert len(check) == sum(len(g.samples) for g in record.groups)
                assert (await rln.diagnose(record)).sentence.startswith("no mismatch")
            assert server.rollouts  # rows of later steps are in flight
        assert not server.rollouts
        assert not loop.producer.in_flight
        loop, backend = loop_of(player(servers))
        async with backend, loop.serve() as server:
            servers.append(server)
            await loop.step()
            other = await loop.branch()
            records = [await each.step() for each in (loop, other)]
            sampled = [
                [s.tokens.tolist() for g in record.groups for s in g.samples] for record in records
            ]
            assert sampled[0] == sampled[1]

    asyncio.run(play())
