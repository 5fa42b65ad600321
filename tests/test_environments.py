"Rollout functions made of agents, tools and environments."

from __future__ import annotations

import asyncio
import json
import threading
import warnings
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI, OpenAI

from rl_notebook.task.chat import split_calls
from rl_notebook.core.types import (
    AlignmentError,
    BackendError,
    Completion,
    ConfigError,
    SampleParams,
)
from rl_notebook.agents.environments import agent_rollouts, tool_rollouts
from rl_notebook.task.data import make_row
from rl_notebook.loop.rollouts import RolloutSetup, sample_rollouts
from rl_notebook.task.data import Prompt
from rl_notebook.task.models import build_tokenizer

ROW = {"messages": [{"role": "user", "content": "What is 5+7?"}], "answer": "12", "seed": 7}


class Scripted:
    "A sampler that returns scripted texts; an exception is raised."

    def __init__(self, *texts: Any):
        self.tokenizer = build_tokenizer()
        self.texts = list(texts)

    async def sample(self, prompt_tokens: Any, params: SampleParams) -> list[Completion]:
        if isinstance(text := self.texts.pop(0), Exception):
            raise text
        tokens = [
            *self.tokenizer.encode(text, add_special_tokens=False),
            self.tokenizer.eos_token_id,
        ]
        return [
            Completion(
                np.array(prompt_tokens), np.array(tokens), np.full(len(tokens), -0.5), text=text
            )
        ]

    async def logprobs(self, tokens: Any) -> Any:
        raise NotImplementedError

    def play(self, factory: Any, max_seq_len: int | None = None, **columns: Any) -> Any:
        "One rollout of a factory."
        params = SampleParams(max_tokens=200)
        setup = RolloutSetup(
            self, self.tokenizer, params, completions_per_prompt=1, max_seq_len=max_seq_len
        )
        return asyncio.run(factory(setup)(ROW | columns))


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def double(number: int) -> int:
    """
    Twice a number.

    Args:
        number: The number.
    """
    return 2 * number


async def slow(number: int) -> int:
    """
    The number again.

    Args:
        number: The number.
    """
    await asyncio.sleep(0)
    return number


class Counter:
    "Counts what was given to it."

    made = 0

    def __init__(self):
        type(self).made += 1

    def reset(self, start: int = 0, **columns: Any) -> str:
        assert "environment" not in columns
        self.total = start
        return f" Start at {start}."

    def add(self, number: int) -> str:
        """
        Add a number.

        Args:
            number: The number.
        """
        self.total += number
        return str(self.total)

    async def get_reward(self) -> float:
        return float(self.total)


def test_an_agent_with_a_client_that_blocks_plays_too():
    def play(row: dict[str, Any], rollout: Any) -> float:
        with OpenAI(base_url=rollout.url, api_key=rollout.key, max_retries=0) as client:
            reply = client.chat.completions.create(model="policy", messages=row["messages"])
            return float(reply.choices[0].message.content)

    assert Scripted("12").play(agent_rollouts(play)).reward == 12.0


def test_a_rollout_without_a_request_warns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rl_notebook.agents.serve.QUIET", 0.01)
    warned = threading.Event()
    monkeypatch.setattr(
        warnings, "warn", lambda words: "has got no request for 0.01 s" in words and warned.set()
    )

    async def play(row: dict[str, Any], rollout: Any) -> float:
        assert warned.wait(60)  # as a client does that blocks the event loop
        return 1.0

    with pytest.raises(AlignmentError, match="expected at least one request"):
        Scripted("12").play(agent_rollouts(play))


def test_plain_and_async_tools_are_called_and_their_errors_returned():
    texts = (
        call("double", number=6) + call("slow", number=1),
        call("triple", number=1),
        call("double", x=1),
        "24",
    )
    [sample] = (
        Scripted(*texts)
        .play(tool_rollouts(lambda text, answer: float(text == "24"), tools=[double, slow]))
        .segments
    )
    tool_replies = [m["content"] for m in sample.info["messages"] if m["role"] == "user"]
    # of one turn
    assert tool_replies[0] == "<tool_response>12</tool_response>\n<tool_response>1</tool_response>"
    assert "no tool 'triple'" in tool_replies[1]
    assert "unexpected keyword" in tool_replies[2]
    assert (sample.reward, sample.info["tool_calls"], sample.info["tool_errors"]) == (1.0, 4, 2)


ALTERNATING = (
    "{% for m in messages if m.role != 'system' %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def test_two_calls_in_a_turn_under_a_template_that_alternates():
    scripted = Scripted(call("double", number=6) + call("double", number=1), "24")
    scripted.tokenizer.chat_template = ALTERNATING
    [sample] = scripted.play(
        tool_rollouts(lambda text: float(text == "24"), tools=[double])
    ).segments
    assert (sample.reward, sample.info["tool_calls"]) == (1.0, 2)


WRITTEN = {  # what a policy writes
    "openings": "<tool_call>" * 20_000,
    "nested": '<tool_call>{"name": "double", "arguments": '
    + '{"a":' * 100_000
    + "}" * 100_001
    + "</tool_call>",
    "tags": "<tool_call><function=double>" * 20_000,
    "lists": "[double(" * 20_000 + ")]" * 20_000,
    "parameters": "<tool_call><function=double><parameter=number>" * 20_000
    + "</parameter></function>",
    "lists that do not end": "</think>[double(" * 20_000,
    "escapes in a text of Python": '[double(number="""' + "a\\n" * 20_000,
    "quotes in Python": '</think>[double(number="\\"' * 20_000,
    "JSON that does not end": '<tool_call>{"name":' * 20_000,
    "values in tags": "<tool_call><function=f><parameter=x>" * 8000
    + "</parameter><parameter=y>" * 8000
    + "</parameter>",
    "no number of JSON": '<tool_call>{"name": "double", "arguments": {"number": NaN}}</tool_call>',
    "a function without a name": "<tool_call><function=\n></function></tool_call>",
    "a position": "[double(6)]",
    "a huge number": f"[double(number={'9' * 400}+1j)]",
    "a list": '<tool_call>{"name": "double", "arguments": [1]}</tool_call>',
}


@pytest.mark.parametrize("written", WRITTEN)
def test_markup_of_a_degenerate_policy_is_text(written):
    "Each place is read once: none of these is a call, and none takes longer than its length."
    text = WRITTEN[written]
    assert split_calls(text) == (text, [])
    content, [good] = split_calls(text + call("double", number=6))
    assert (content, json.loads(good["function"]["arguments"])) == (text.strip(), {"number": 6})


TYPES = {  # JSON schemas, which the tool below declares, and what its parameters get for each text
    "a str": (
        {"type": "string"},
        {
            t: t
            for t in (
                "42",
                "true",
                "null",
                "1e3",
                "[1, 2]",
                '"quoted"',
                "\n x \n",
                "a</parameter>b",
            )
        },
    ),
    "a number": (
        {"type": "number"},
        {"1e3": 1000.0, "42": 42, "1.10": 1.1, "many": "many", "NaN": "NaN", "1e999": "1e999"},
    ),
    "an int": ({"type": "integer"}, {"42": 42, "true": "true", str(10**30): 10**30}),
    "a bool": ({"type": "boolean"}, {"true": True, "False": False, "1": "1"}),
    "a list": (
        {"type": "array"},
        {'["a", null]': ["a", None], "a": "a", "[-Infinity]": "[-Infinity]"},
    ),
    "a dict": ({"type": "object"}, {'{"a": {"b": 1}}': {"a": {"b": 1}}, "[1]": "[1]"}),
    "a str or None": (
        {"type": "string", "nullable": True},
        {"null": None, "None": "None", "42": "42"},
    ),
    "an int or None": ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"None": None, "7": 7}),
    "choices": ({"enum": [1, "2"]}, {"1": 1, "two": "two"}),
    "a reference": ({"$ref": "#/$defs/Count"}, {"7": 7}),
    "a loop of references": ({"$ref": "#/$defs/Loop"}, {"7": "7"}),
    "anything": ({}, {"42": "42"}),
}


@pytest.mark.parametrize("declared", TYPES)
def test_a_value_in_a_tag_has_the_declared_type_and_else_its_very_text(declared):
    schema, cases = TYPES[declared]
    defs = {"Count": {"type": "integer"}, "Loop": {"$ref": "#/$defs/Loop"}}
    tool = {"function": {"name": "f", "parameters": {"properties": {"p": schema}, "$defs": defs}}}
    for text, value in cases.items():
        call = f"<tool_call>\n<function=f>\n<parameter=p>\n{text}\n</parameter>\n</function>\n</tool_call>"
        _, [read] = split_calls(call, [tool])
        got = json.loads(read["function"]["arguments"])["p"]
        assert (got, type(got)) == (value, type(value)), text


def test_arguments_are_handed_on_as_they_were_written():
    "What looks like markup inside of an argument is part of it, and a call in a thought is none."
    inner = '<tool_call>{"name": "g", "arguments": {}}</tool_call><think>'
    for arguments in (
        '{"a": 1.10, "b":1e3,  "c": "é\\u00e9\\n", "d": 12345678901234567890}',
        json.dumps({"a": inner, "b": "</tool_call>"}),
        '{"a": 1, "a": 2}',
    ):
        text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        assert [c["function"]["arguments"] for c in split_calls(text)[1]] == [arguments]
        assert split_calls("then I would call " + text, opened="<think>\n")[1] == []
        assert split_calls(f"no</think>{text}", opened="<think>\n")[0] == "no</think>"
        assert split_calls(text[len("<tool_call>\n") :], opened="<tool_call>\n")[0] is None
    # JSON in JSON, and as Llama writes it
    for call_arguments in ('"arguments": "{\\"a\\": 1}"', '"parameters": {"a": 1}'):
        [read] = split_calls(f'<tool_call>{{"name": "f", {call_arguments}}}</tool_call>')[1]
        assert read["function"]["arguments"] == '{"a": 1}'
    [read] = split_calls("[f(a=[1,\n 'é'], b=1e999, c=[-1e999])]")[1]
    assert json.loads(read["function"]["arguments"]) == {
        "a": [1, "é"],
        "b": "1e999",
        "c": "[-1e999]",
    }
    tagged = f"<tool_call><function=f><parameter=a>\n{inner}\n<parameter=b>\n\n</parameter></function></tool_call>"
    [read] = split_calls(tagged)[1]
    assert json.loads(read["function"]["arguments"]) == {"a": f"{inner}\n<parameter=b>\n"}
    [first, second] = split_calls(f"[f(a={inner!r}, b=')]' * 1), f(a=1)]".replace("' * 1", "'"))[1]
    assert json.loads(first["function"]["arguments"]) == {"a": inner, "b": ")]"}
    assert second["function"]["arguments"] == '{"a": 1}'


@pytest.mark.parametrize("written", ["so bad", " so bad"])
def test_a_turn_that_the_template_rejects_later_costs_an_agent_its_rollout(written):
    scripted = Scripted(*[written] * 8)
    rejection = "{% if m.role == 'assistant' and 'bad' in m.content %}{{ raise_exception('no bad words') }}{% endif %}"
    scripted.tokenizer.chat_template = ALTERNATING.replace("{{ '<|'", rejection + "{{ '<|'")

    async def play(row, rollout):
        async with AsyncOpenAI(base_url=rollout.url, api_key=rollout.key) as client:

            def ask(messages):
                return client.chat.completions.create(model="policy", messages=messages)

            reply = await ask(first := [{"role": "user", "content": "What is 5+7?"}])
            turn = {"role": "assistant", "content": reply.choices[0].message.content}
            await ask([*first, turn, {"role": "user", "content": "Sure?"}])
        return 1.0

    setup = RolloutSetup(
        scripted, scripted.tokenizer, SampleParams(max_tokens=20), completions_per_prompt=2
    )
    prompt = Prompt(make_row(ROW), [1, 2])
    rollouts = asyncio.run(sample_rollouts(agent_rollouts(play)(setup), prompt, 2))
    assert (rollouts.samples, len(rollouts.dropped)) == ((), 2)
    assert all(
        "cannot be continued (on_template_mismatch: drop)" in r and "no bad words" in r
        for r in rollouts.dropped
    )
    assert len(scripted.texts) == 6, "a request that was rejected is not made again by the client"
    with pytest.raises(AlignmentError, match="no bad words"):
        asyncio.run(
            sample_rollouts(agent_rollouts(play)(setup), prompt, 1, on_template_mismatch="raise")
        )


def test_rewards_of_functions_and_of_the_environment_are_added():
    def total_reward(completions: Any, environments: Any, **columns: Any) -> list[float]:
        roles = [m["role"] for m in completions[0]]
        assert roles == ["assistant", "tool", "assistant"]
        return [10.0 * environments[0].total]

    run = Scripted(call("add", number=2), "done").play(
        tool_rollouts(total_reward, environment_factory=Counter), start=3
    )
    assert run.segments[0].rewards == {"total_reward": 50.0, "Counter": 5.0}
    assert run.reward == run.segments[0].reward == 55.0
    assert "What is 5+7? Start at 3." in build_tokenizer().decode(run.segments[0].tokens)


def test_environments_are_chosen_by_name_and_used_again():
    factory = tool_rollouts(environment_factory={"a": Counter, "b": Counter})
    before = Counter.made
    for name in ("a", "b", "a"):
        assert Scripted("nothing").play(factory, environment=name).reward == 0
    assert Counter.made == before + 2
    with pytest.raises(ConfigError, match="one of 'a', 'b'"):
        Scripted("nothing").play(factory, environment="c")


def test_rounds_and_room_end_a_conversation():
    endless = [call("add", number=1)] * 9
    counted = Scripted(*endless).play(
        tool_rollouts(environment_factory=Counter, max_tool_calling_iterations=2)
    )
    assert (counted.reward, counted.segments[0].info["turns"]) == (2.0, 3)
    short = Scripted(*endless).play(tool_rollouts(environment_factory=Counter), max_seq_len=700)
    assert 1 <= short.segments[0].info["turns"] < 9
    assert short.segments[0].turns[-1][0] < 700


async def hiding(sample_prompt: dict[str, Any], rollout: Any, **options: Any) -> float | None:
    "An agent that hides every failure."
    async with AsyncOpenAI(base_url=rollout.url, api_key=rollout.key, max_retries=0) as client:
        try:
            await client.chat.completions.create(
                model="policy", messages=sample_prompt["messages"], **options
            )
        except Exception:
            return 0.0
    return 1.0


def test_a_failure_that_an_agent_hides_is_raised():
    assert Scripted("fine").play(agent_rollouts(hiding)).reward == 1
    with pytest.raises(BackendError, match="gone"):
        Scripted(BackendError("the server is gone")).play(agent_rollouts(hiding))
    with pytest.raises(AlignmentError, match=r"rejected: .*temperature"):
        Scripted("fine").play(
            agent_rollouts(lambda row, rollout: hiding(row, rollout, temperature=0.5))
        )


def test_a_rollout_without_a_reward_is_unscorable():
    async def play(sample_prompt: dict[str, Any], rollout: Any) -> None:
        await hiding(sample_prompt, rollout)

    assert Scripted("fine").play(agent_rollouts(play)).reward is None
