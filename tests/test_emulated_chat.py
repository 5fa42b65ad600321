"Chat completions of the emulator, asked by the real client of OpenAI."

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rl_notebook.emulator.service import RunningEmulator, start_emulator
from rl_notebook.task.toy import load_model

openai = pytest.importorskip("openai", reason="the client of OpenAI is not installed")

ASKED = [{"role": "user", "content": "1+2+3+4+5 = ?"}]
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALL, ANSWER = '{"name": "add", "arguments": {"a": 2}}', "The sum is 4."


@pytest.fixture(scope="module")
def running() -> Iterator[RunningEmulator]:
    with start_emulator() as emulator:
        yield emulator


def client_of(running: RunningEmulator, path: str = "/v1") -> Any:
    "The client, told an address and a key."
    return openai.OpenAI(base_url=running.url + path, api_key=running.environment()["OPENAI_API_KEY"], max_retries=0)


@pytest.mark.parametrize("path", ["/v1", "/inference/v1"])
def test_what_is_said_is_what_was_drawn(running: RunningEmulator, path: str) -> None:
    tokenizer = load_model("tiny")[1]
    more = {"return_token_ids": True} if path == "/v1" else {"return_token_ids": True, "raw_output": True}
    asked = {"model": "tiny", "messages": ASKED, "max_tokens": 20, "n": 2, "seed": 3, "temperature": 0.7}
    with client_of(running, path) as client:
        said = client.chat.completions.create(**asked, logprobs=True, extra_body=more)
        parts = [{"type": "text", "text": ASKED[0]["content"]}]
        again = client.chat.completions.create(**asked | {"messages": [{"role": "user", "content": parts}]})
    prompt = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)
    assert said.prompt_token_ids == prompt
    assert said.usage.prompt_tokens == len(prompt)
    assert said.usage.completion_tokens == sum(len(c.token_ids) for c in said.choices)
    assert [c.message.content for c in again.choices] == [c.message.content for c in said.choices]
    for choice in said.choices:
        assert choice.message.content == tokenizer.decode(choice.token_ids, skip_special_tokens=True)
        assert (choice.finish_reason, choice.message.tool_calls) in (("stop", None), ("length", None))
        records = choice.logprobs.content
        assert [bytes(r.bytes).decode() for r in records] == [tokenizer.decode([i]) for i in choice.token_ids]
    # the logprobs are those of the model that is served, for the same ids
    model, _ = load_model("tiny")
    ids = said.choices[0].token_ids
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    wanted = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert np.allclose([r.logprob for r in said.choices[0].logprobs.content], wanted, atol=1e-4)


@pytest.mark.parametrize("path", ["/v1", "/inference/v1"])
def test_a_stream_says_the_same_in_pieces(running: RunningEmulator, path: str) -> None:
    asked = {"model": "tiny", "messages": ASKED, "max_completion_tokens": 20, "seed": 3, "logprobs": True}
    more = {"extra_body": {"return_token_ids": True}}
    with client_of(running, path) as client:
        whole = client.chat.completions.create(**asked, **more)
        events = list(
            client.chat.completions.create(**asked, **more, stream=True, stream_options={"include_usage": True})
        )
    pieces = [event.choices[0] for event in events if event.choices]
    assert len(pieces) > 3
    assert pieces[0].delta.role == "assistant"
    assert "".join(p.delta.content or "" for p in pieces) == whole.choices[0].message.content
    assert [i for p in pieces for i in getattr(p, "token_ids", None) or ()] == whole.choices[0].token_ids
    records = [r for p in pieces if p.logprobs for r in p.logprobs.content]
    assert records == whole.choices[0].logprobs.content
    assert [p.finish_reason for p in pieces if p.finish_reason] == [whole.choices[0].finish_reason]
    assert [event.usage for event in events if event.usage] == [whole.usage]
    assert [getattr(e, "prompt_token_ids", None) for e in events].count(whole.prompt_token_ids) == 1


def caller() -> tuple[Any, Any]:
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
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", pad_token="<end>", unk_token="<?>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}"
        "{% if '<tool_response>' not in messages[-1]['content'] %}{{ '<|assistant|>' }}{% else %}{{ '</tool_call>' }}"
        "{% endif %}"
    )
    follows = {2: 4, 4: 5, 5: 6, 6: 7, 7: 0}  # assistant, call, its text, its end, the answer, the end
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
    ids = {"eos_token_id": 0, "bos_token_id": None, "pad_token_id": 0}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(texts), tie_word_embeddings=False, **sizes, **heads, **ids))
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


def test_tools_are_called_and_answered() -> None:
    with start_emulator(caller()) as running, client_of(running) as client:
        model = client.models.list().data[0].id
        ask = {"model": model, "messages": [{"role": "user", "content": "x"}], "tools": [ADD], "max_tokens": 3}
        said = client.chat.completions.create(**ask, logprobs=True)
        choice = said.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2})
        assert len(choice.logprobs.content) == 3
        with client.chat.completions.stream(**ask) as stream:  # puts the pieces together again
            final = stream.get_final_completion().choices[0]
        assert final.finish_reason == "tool_calls"
        assert final.message.tool_calls[0].function.name == "add"
        assert json.loads(final.message.tool_calls[0].function.arguments) == {"a": 2}
        answered = [*ask["messages"], choice.message, {"role": "tool", "tool_call_id": call.id, "content": "4"}]
        last = client.chat.completions.create(**ask | {"messages": answered, "max_tokens": 4}).choices[0]
        assert (last.message.content, last.finish_reason, last.message.tool_calls) == (ANSWER, "stop", None)
        plain = client.chat.completions.create(**ask, tool_choice="none").choices[0]  # then it is only text
        assert plain.message.tool_calls is None
        assert CALL in plain.message.content


@pytest.mark.parametrize("path", ["/v1", "/inference/v1"])
def test_a_reply_is_held_to_a_schema_or_to_a_tool(running: RunningEmulator, path: str) -> None:
    pytest.importorskip("llguidance")
    small = {"type": "integer", "minimum": 0, "maximum": 9}
    schema = {"type": "object", "properties": {"sum": small}, "required": ["sum"]}
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema, "strict": True}}
    tell, say = ({"type": "function", "function": {"name": n, "parameters": schema}} for n in ("tell", "say"))
    ask = {"model": "tiny", "messages": ASKED, "seed": 1, "max_tokens": 100}
    with client_of(running, path) as client:
        said = client.chat.completions.create(**ask, response_format=form, logprobs=True).choices[0]
        assert json.loads(said.message.content)["sum"] in range(10)
        any_object = client.chat.completions.create(**ask, response_format={"type": "json_object"}).choices[0]
        assert any_object.message.content.startswith("{")
        told, part = {"type": "object", "properties": {"a": 1}}, {"$ref": "#/$defs/sum"}
        other = {"allOf": [part, {"properties": {"b": small}, "required": ["b"]}], "$defs": {"sum": schema}}
        for joined, begins in (({"const": told}, json.dumps(told)), (other, "{")):  # neither value nor part is closed
            form["json_schema"]["schema"] = joined
            words = client.chat.completions.create(**ask, response_format=form).choices[0].message.content.split()
            assert "".join(words).startswith("".join(begins.split()))
        assert min(r.logprob for r in said.logprobs.content) < -3  # of the model, which would not have said so
        named = {"type": "function", "function": {"name": "tell"}}
        for choice, names in (("required", ("tell", "say")), (named, ("tell",))):
            how = {"tools": [say, tell], "tool_choice": choice}
            with client.chat.completions.stream(**ask, **how) as stream:
                (call,) = stream.get_final_completion().choices[0].message.tool_calls
            assert call.function.name in names
            assert json.loads(call.function.arguments)["sum"] in range(10)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"messages": [{"role": "judge", "content": "x"}]}, "unknown role judge"),
        ({"response_format": {"type": "json_schema", "json_schema": "x"}}, "json_schema with an object"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs: got ['messages']"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_what_is_not_done_is_refused_by_name(running: RunningEmulator, more: dict[str, Any], named: str) -> None:
    body = {"model": "tiny", "messages": ASKED, "max_tokens": 2} | more
    for path in ("/v1", "/inference/v1"):
        headers = {"Authorization": f"Bearer {running.key.reveal()}"}
        reply = httpx.post(f"{running.url}{path}/chat/completions", json=body, headers=headers, timeout=60)
        assert (reply.status_code, named in reply.json()["error"]["message"]) == (400, True), reply.text


def test_other_names_and_unknown_fields(running: RunningEmulator) -> None:
    with client_of(running) as client:
        name = client.models.list().data[0].id
        assert client.models.retrieve(name).id == name
        for ask in (client.models.retrieve, partial(client.chat.completions.create, messages=ASKED)):
            with pytest.raises(openai.NotFoundError, match="no-such"):
                ask(model="no-such")
    with client_of(running, "/inference/v1") as client, pytest.raises(openai.BadRequestError, match="made_up"):
        client.chat.completions.create(model="tiny", messages=ASKED, max_tokens=1, extra_body={"made_up": 1})
