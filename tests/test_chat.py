"Prompts and multi-turn conversations on a real tokenizer built here: what is kept, what is masked, what is rejected."

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from rl_notebook.task.chat import completion_logprobs, encode_prompt, render
from rl_notebook.task.chat import (
    sample_from_completion,
    split_calls,
    start_conversation,
    template_end,
    turn_ends,
)
from rl_notebook.core.types import AlignmentError, Completion, ConfigError, DataError, SampleParams
from rl_notebook.task.data import load_rows, make_row

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def build(template=CHATML, post=None, **options) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(
        ["user assistant system tool hello what is the sum of these numbers think again"] * 9,
        trainer,
    )
    if post:
        bpe.post_processor = processors.TemplateProcessing(
            single=post, special_tokens=[("<s>", 2), ("<|im_end|>", 1)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, **{"eos_token": "<|im_end|>", **options}
    )
    tokenizer.chat_template = template
    return tokenizer


TOKENIZER = build()
ROW = make_row({"id": "q17", "question": "what is 24+48?", "answer": "72"})
PLAIN = make_row({"id": "q18", "prompt": "24+48 ="})


def encode(text, tokenizer=TOKENIZER) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def speak(conversation, *pieces, **fields) -> Completion:
    tokens = [t for piece in pieces for t in encode(piece)]
    return Completion(conversation.tokens, tokens, [-0.5 - i for i in range(len(tokens))], **fields)


def message(call, exc=DataError) -> str:
    with pytest.raises(exc) as e:
        call()
    return str(e.value)


# --- prompts


def test_text_gets_the_special_tokens_of_the_tokenizer_and_no_template():
    with_bos = build(post="<s> $A", bos_token="<s>")
    assert encode_prompt(with_bos, PLAIN) == [with_bos.bos_token_id, *encode("24+48 =", with_bos)]
    assert encode_prompt(TOKENIZER, PLAIN) == encode("24+48 =")
    assert encode_prompt(build(template=None), PLAIN) == encode("24+48 =")
    assert encode_prompt(TOKENIZER, make_row({"prompt_token_ids": [5, 6]})) == [5, 6]
    # a template that writes its own bos does not get a second one
    assert (
        encode_prompt(build("<s>" + CHATML, post="<s> $A", bos_token="<s>"), ROW).count(
            with_bos.bos_token_id
        )
        == 1
    )


SHAPE = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
ADD = {"type": "function", "function": {"name": "add", "parameters": SHAPE}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
CALLED = [
    {"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": [{"type": "text", "text": "4"}], "tool_call_id": "c1"},
]
KNOWING = """{% if tools %}{{ tools | map(attribute='function') | map(attribute='name') | list }}
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.a }})
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.parametrize("form", ["a list", "JSON", "JSON Lines", "parquet", "DataFrame"])
def test_rows_get_what_conversations_get(form, tmp_path):
    "Parts, tools and calls reach the prompt from every source, whether the template knows of tools or not."
    record = {"messages": CALLED, "tools": [ADD], "answer": "4"}
    if form == "JSON":
        record = {**record, "tools": json.dumps(record["tools"])}
    if form == "JSON Lines":
        (tmp_path / "d.jsonl").write_text(json.dumps(record))
    # a table fills in None: each message has every field, each part an image
    if form in ("parquet", "DataFrame"):
        filled = [
            *CALLED,
            {"role": "user", "content": [{"type": "text", "text": "So?", "image_url": None}]},
        ]
        record = {**record, "messages": filled, "tools": json.dumps([ADD])}
        pd.DataFrame([record]).to_parquet(tmp_path / "d.parquet")
    source = {"JSON Lines": tmp_path / "d.jsonl", "parquet": tmp_path / "d.parquet"}.get(
        form, [record]
    )
    [row] = load_rows(pd.read_parquet(tmp_path / "d.parquet") if form == "DataFrame" else source)
    more = "<|im_start|>user\nSo?<|im_end|>\n" if form in ("parquet", "DataFrame") else ""
    knowing = TOKENIZER.decode(encode_prompt(build(KNOWING), row))
    turns = "user\n2+2?<|im_end|>\n<|im_start|>assistant\nadd(2)<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n"
    assert knowing == f"['add']\n<|im_start|>{turns}{more}<|im_start|>assistant\n"
    prompt = TOKENIZER.decode(encode_prompt(TOKENIZER, row))
    assert json.dumps(ADD["function"]) in prompt
    assert '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>' in prompt
    assert "<|im_start|>user\n<tool_response>4</tool_response><|im_end|>" in prompt
    conversation = start_conversation(build(KNOWING), row)
    later = conversation.add_completion(speak(conversation, "4<|im_end|>")).add_messages(
        {"role": "user", "content": CALLED[0]["content"]}
    )
    assert (
        later.text
        == knowing + "4<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_prompt_with_unusable_content_is_rejected_with_its_row(tmp_path):
    image = {
        "role": "user",
        "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}],
    }
    for record, text in (
        ({"messages": [image]}, "line 1, message 0: content: got {'type': 'image'}; expected text"),
        (
            {"question": "What is this?", "images": ["a.png"]},
            "line 1: images: got ['a.png']; expected prompts of text",
        ),
        (
            {"question": "2+2?", "tools": ["add"]},
            "line 1: tools: got ['add']; expected a list of mappings",
        ),
        (
            {"prompt": "2+2=", "tools": [ADD]},
            "line 1: chat template: got tools together with prompt; expected a conversation",
        ),
    ):
        (tmp_path / "d.jsonl").write_text(json.dumps(record))
        assert text in message(lambda: load_rows(tmp_path / "d.jsonl"))
    nameless = make_row(
        {"id": "q9", "messages": [{**CALLED[1], "tool_calls": [{"id": "c1"}]}, CALLED[2]]}
    )
    assert "row 'q9': messages or tools: got KeyError: 'function'" in message(
        lambda: encode_prompt(TOKENIZER, nameless)
    )
    thinking = make_row({"question": "2+2?", "chat_template_kwargs": {"enable_thinking": False}})
    assert "'enable_thinking': got a chat template that never reads it" in message(
        lambda: encode_prompt(TOKENIZER, thinking), ConfigError
    )


# --- one completion


def test_logprobs_of_what_was_really_sampled():
    c = Completion(
        [5], [6, 7], [-1.0, -2.0], [-0.5, -0.25], params=SampleParams(temperature=0.5, top_k=9)
    )
    s = sample_from_completion(c, reward=0.5, info={"k": 1})
    np.testing.assert_array_equal(s.logprobs, [np.nan, -0.5, -0.25])
    np.testing.assert_array_equal(s.raw_logprobs, [np.nan, -1.0, -2.0])
    assert (s.temperature, s.processed, s.reward, s.info) == (0.5, True, 0.5, {"k": 1})
    raw = Completion([5], [6], [-1.0])
    assert completion_logprobs(raw).tolist() == [-1.0]
    hot = Completion([5], [6], [-1.0], params=SampleParams(temperature=2.0))
    text = message(lambda: sample_from_completion(hot), AlignmentError)
    assert "sampling logprobs: got none, at temperature 2.0, top_p 1.0, top_k 0, min_p 0.0" in text


# --- conversations

WORDS = st.text(alphabet="abcdefghi 0123456789+=?é☃\n", min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(WORDS, min_size=1, max_size=3), st.booleans(), WORDS),
        min_size=1,
        max_size=4,
    ),
)
def test_conversations_keep_every_token_that_was_sampled(turns):
    c = start_conversation(TOKENIZER, ROW)
    sampled = []
    messages = []
    for pieces, ended, reply in turns:
        completion = speak(
            c,
            *pieces,
            *(["<|im_end|>"] if ended else []),
            finish_reason="stop" if ended else "length",
        )
        before = c
        c = c.add_completion(completion)
        assert c.tokens == [*before.tokens, *completion.tokens.tolist()]
        c = c.add_messages({"role": "user", "content": reply})
        assert c.tokens[: len(before.tokens) + len(completion.tokens)] == [
            *before.tokens,
            *completion.tokens.tolist(),
        ]
        sampled += completion.tokens.tolist()
        messages += [
            {"role": "assistant", "content": "".join(pieces)},
            {"role": "user", "content": reply},
        ]
    assert list(c.messages) == messages
    assert c.text == render(TOKENIZER, [*ROW.messages, *messages]) == TOKENIZER.decode(c.tokens)
    last = speak(c, "72<|im_end|>")
    s = c.add_completion(last).to_sample(reward=1.0)
    assert s.tokens[s.loss_mask == 1].tolist() == sampled + last.tokens.tolist()
    assert np.isnan(s.logprobs[s.loss_mask == 0]).all()
    assert not np.isnan(s.logprobs[s.loss_mask == 1]).any()
    assert (s.text, s.reward, s.info["turns"], s.finish_reason) == (
        "72",
        1.0,
        len(turns) + 1,
        "stop",
    )
    assert s.info["messages"][:-1] == messages


@pytest.mark.parametrize(
    ("change", "reply", "got", "expected"),
    [
        (
            "m.content.split('</think>')[-1]",
            "<think>hm</think>62",
            "<think>hm</think>62<|im_end|>",
            "62<|im_end|>",
        ),
        ("m.content | trim", " 62", " 62<|im_end|>", "62<|im_end|>"),
    ],
)
def test_a_template_that_rewrites_earlier_turns(change, reply, got, expected):
    forgetful = build(CHATML.replace("m.content", change))
    c = start_conversation(forgetful, ROW)
    at = len(c.text)
    c = c.add_completion(speak(c, reply, "<|im_end|>"))
    text = message(lambda: c.add_messages({"role": "user", "content": "again"}), AlignmentError)
    assert (
        f"row 'q17', turn 1: character {at} differs from the chat template's rendering: got" in text
    )
    assert f"assistant\\n{got}" in text.partition("; expected")[0]
    assert f"assistant\\n{expected}" in text.partition("; expected")[2]
    assert "make each turn a separate sample" in text


# a model, the tokens that may end its turn, the one that the template writes behind an earlier turn
ENDINGS = {
    "gemma": (["<im_end>", "<eos>"], CHATML.replace("<|im_end|>", "<im_end>")),
    "llama": (["<|eot_id|>", "<|eom_id|>"], CHATML.replace("<|im_end|>", "<|eot_id|>")),
    "gpt-oss": (
        ["<|return|>", "<|call|>"],
        CHATML.replace(
            "<|im_end|>",
            "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}",
        ),
    ),
}


@pytest.mark.parametrize(
    ("model", "ended"), [(m, e) for m, (ends, _) in ENDINGS.items() for e in ends]
)
def test_a_turn_may_end_with_any_of_the_models_ends(model, ended):
    "Eos of tokenizer, generation_config or template: it is no part of the text, and stays as it was sampled."
    ends, template = ENDINGS[model]
    tokenizer = build(template)
    tokenizer.add_special_tokens({"additional_special_tokens": [*ends, "<|end|>"]})
    tokenizer.eos_token = ends[-1]
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in [*ends, "<|end|>"]}
    assert {ids[e] for e in ends} == turn_ends(
        tokenizer, SimpleNamespace(eos_token_id=[ids[e] for e in ends])
    )
    assert template_end(tokenizer) == ids[ends[0]]
    c = start_conversation(tokenizer, ROW)
    plain = render(tokenizer, ROW.messages)
    for turn in range(3):
        tokens = [*encode("62", tokenizer), ids[ended]]
        c = c.add_completion(Completion(c.tokens, tokens, [-1.0] * len(tokens), text="62"))
        assert c.messages[-1] == {"role": "assistant", "content": "62"}
        c = c.add_messages({"role": "user", "content": f"again {turn}"})
        default_end = "<|end|>" if model == "gpt-oss" else ends[0]
        assert c.text == render(tokenizer, [*ROW.messages, *c.messages]).replace(
            "62" + default_end, "62" + ended
        )
    assert c.text.startswith(plain)
    assert c.tokens == encode(c.text, tokenizer)


def test_turns_of_several_versions_and_temperatures():
    c = start_conversation(TOKENIZER, ROW)
    c = c.add_completion(speak(c, "62<|im_end|>", policy_version=5)).add_messages(
        {"role": "tool", "content": "no"}
    )
    late = c.add_completion(speak(c, "7", policy_version=6, finish_reason="length")).to_sample()
    assert (late.policy_version, late.finish_reason, late.truncated, late.reward) == (
        5,
        "length",
        True,
        None,
    )
    hot = speak(c, "72", params=SampleParams(temperature=0.5))
    hot = Completion(hot.prompt_tokens, hot.tokens, hot.logprobs, hot.logprobs, params=hot.params)
    text = message(lambda: c.add_completion(hot).to_sample(), AlignmentError)
    assert "temperature: got [0.5, 1.0]; expected one for all turns" in text


def test_a_conversation_shows_what_trains_and_escapes_what_it_shows():
    c = start_conversation(TOKENIZER, ROW)
    assert repr(c).startswith("row 'q17': 0 turns, 19 tokens, 0 sampled: 0% trains\n")
    c = c.add_completion(speak(c, "<script>hello</script>", "<|im_end|>"))
    tokens = len(c.tokens)
    sampled = c.to_sample().completion_len
    assert f"1 turn, {tokens} tokens, {sampled} sampled: {sampled / tokens:.0%} trains" in repr(c)
    assert "sampled" in repr(c).splitlines()[2]
    page = c._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;hello" in page
    assert page.count("<span") == len(c.spans)
    assert page.count("background") == c.turns


def test_a_template_that_does_not_end_is_interrupted(monkeypatch):
    monkeypatch.setattr("rl_notebook.task.chat.TEMPLATE_SECONDS", 0.2)
    loops = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    error_text = message(lambda: encode_prompt(build(loops), ROW))
    assert "row 'q17': chat template: got not ended after 0.2 seconds for roles user" in error_text
    assert encode_prompt(TOKENIZER, ROW), "nothing is left behind"


# which brings templates of the families, as they are published
TRL = importlib.util.find_spec("trl")
FAMILIES = [
    "qwen3_5_think",
    "qwen3_5_nothink",
    "qwen3_6",
    "nemotron_3_nano",
    "lfm2_2_5",
    "qwen3",
    "cohere2",
]


@pytest.mark.skipif(TRL is None, reason="trl is in the extra `dev`")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_that_the_template_of_a_family_renders_is_read_back(family):
    "Then, where earlier turns are kept, a conversation continues after such a call, with a thought and without one."
    template = (Path(TRL.origin).parent / "chat_templates" / f"{family}.jinja").read_text()
    teller = build(template)
    question = {"role": "user", "content": "2+2?"}
    arguments = {"a": 2, "b": "4 </parameter> é"}
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "add", "arguments": json.dumps(arguments)},
    }
    tool_message = {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "add"}
    offered = {"type": "function", "function": ADD["function"] | {"description": "Adds."}}
    row = make_row(
        {
            "messages": [
                question,
                {"role": "assistant", "content": "", "tool_calls": [call]},
                tool_message,
            ],
            "tools": [offered],
        }
    )
    _, [read] = split_calls(
        teller.decode(encode_prompt(teller, row)).partition("2+2?")[2], [offered]
    )
    assert (read["function"]["name"], json.loads(read["function"]["arguments"])) == (
        "add",
        arguments,
    )
    for thinks in (True, False) if "qwen3_5" in family or family == "qwen3_6" else ():
        conversation = start_conversation(
            teller, make_row({"messages": [question]}), tools=[offered], enable_thinking=thinks
        )
        reply = (
            "I add.\n</think>\n\n" * thinks
            + "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>"
        )
        assert split_calls(reply, [offered])[1][0]["function"]["arguments"] == '{"a": 2}'
        ids = encode(f"{reply}<|im_end|>", teller)
        later = conversation.add_completion(Completion(conversation.tokens, ids, [0.0] * len(ids)))
        assert later.add_messages(tool_message).text.startswith(
            f"{conversation.text}{reply}<|im_end|>\n<|im_start|>user\n<tool_response>\n4\n"
        )
