"The chat template of a run, and its arguments: every prompt and every turn is rendered so."

import asyncio
import copy
from dataclasses import replace
from functools import partial

import pytest

import rl_notebook as rln
from rl_notebook.task.chat import start_conversation, with_template
from rl_notebook.config.config import Config
from rl_notebook.core.types import Completion, ConfigError, SampleParams
from rl_notebook.task.data import load_rows
from rl_notebook.loop.setup import rollout_setup
from rl_notebook.task.rewards import gsm8k_reward, score
from rl_notebook.loop.rollouts import sample_completions, encode_rows
from rl_notebook.loop.step import score_group

# as the templates of models that think before they answer have it: switched off, the thought is there, and empty
THINKER = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
SIZES = {"prompt_groups_per_step": 2, "completions_per_prompt": 4, "max_completion_tokens": 12}


@pytest.fixture(scope="module")
def backend():
    return rln.open_local(*rln.load_model("tiny"), inline=True)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "thinker.jinja"
    path.write_text(THINKER)
    Config(
        chat_template=str(path), chat_template_kwargs={"enable_thinking": False}, **SIZES
    ).to_yaml(tmp_path / "c.yaml")
    return Config.from_yaml(tmp_path / "c.yaml")


def rendered(tokenizer, row, **options):
    "What transformers itself makes of it."
    fixed_options = {"chat_template": THINKER, "tokenize": False, "add_generation_prompt": True}
    return tokenizer.apply_chat_template(
        [dict(m) for m in row.messages], **fixed_options, **options
    )


def test_every_prompt_of_a_run_is_rendered_so(backend, config):
    loop = rln.GRPOLoop(backend, rln.toy_rows(8), rln.toy_reward, config)
    record = asyncio.run(loop.step())
    rows = {row.key: row for row in load_rows(rln.toy_rows(8))}
    assert len(record.groups) == 2
    for group in record.groups:
        sample = group.samples[0]
        prompt = backend.tokenizer.decode(
            sample.tokens[: sample.prompt_len], skip_special_tokens=False
        )
        assert prompt == rendered(backend.tokenizer, rows[group.key], enable_thinking=False)
        assert prompt.endswith("<think>\n\n</think>\n\n")
    # the backend's own tokenizer is left as it was
    assert backend.tokenizer.chat_template != THINKER


def test_later_turns_and_custom_rollouts_are_rendered_so(backend, config):
    setup = rollout_setup(backend, config)
    (row,) = load_rows(rln.toy_rows(1))
    conversation = start_conversation(setup.tokenizer, row)
    tokenizer = setup.tokenizer
    back = backend.tokenizer
    text = tokenizer.apply_chat_template(
        [dict(m) for m in row.messages], tokenize=False, add_generation_prompt=True
    )
    assert (
        text == tokenizer.decode(conversation.tokens) == rendered(back, row, enable_thinking=False)
    )


def test_one_request_may_override_template_options(backend, config):
    tokenizer = rollout_setup(backend, config).tokenizer
    (row,) = load_rows(rln.toy_rows(1))
    conversation = start_conversation(tokenizer, row, enable_thinking=True)
    assert tokenizer.decode(conversation.tokens) == rendered(
        backend.tokenizer, row, enable_thinking=True
    )


def test_an_option_that_the_template_never_reads_is_rejected(backend, config):
    wrong = replace(config, chat_template_kwargs={"enable_thinkin": False})
    with pytest.raises(
        ConfigError, match="'enable_thinkin': got a chat template that never reads it"
    ):
        rln.GRPOLoop(backend, rln.toy_rows(8), rln.toy_reward, wrong)
    with pytest.raises(ConfigError, match="chat_template: got /nowhere"):
        with_template(backend.tokenizer, "/nowhere.jinja", None)
    plain = rln.GRPOLoop(backend, [{"prompt": "1+1=", "answer": "2"}], rln.toy_reward, config)
    with pytest.raises(ConfigError, match="a prompt that no template renders"):
        plain.prompts()


def test_the_script_and_its_preflight_take_it(backend, config, tmp_path):
    cfg = replace(config, steps=1, max_rows=4, log_path=str(tmp_path / "run"))
    asyncio.run(rln.preflight(backend, rln.toy_rows(4), rln.toy_reward, cfg))
    rln.main(cfg)
    record = rln.Run.open(tmp_path / "run").record(1)
    assert "</think>" in backend.tokenizer.decode(record.groups[0].samples[0].tokens)


def test_no_answer_is_read_in_a_thought_that_the_template_opens_and_the_policy_never_closes(
    backend, tmp_path
):
    (tmp_path / "opens.jinja").write_text(
        "{% for m in messages %}{{ m['content'] }}{% endfor %}<think>\n"
    )
    texts = ["Is it #### 72", "Is it #### 7?</think>#### 72", "<answer>72</answer>"]
    [row] = rows = load_rows([{"question": "48/2+48?", "answer": "72"}])

    def completions_of(tokenizer, tokens, params):
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        read = partial(tokenizer.decode, skip_special_tokens=True)
        return [
            Completion(tokens, i, *[[0.0] * len(i)] * 2, text=read(i), params=params) for i in ids
        ]

    def shown(completions, **columns):
        return [gsm8k_reward(messages[-1]["content"], "72") for messages in completions]

    async def rewards(tokenizer, grammar=""):
        params = SampleParams(n=3, grammar=grammar)

        class Sampler:
            async def sample(self, tokens, params):
                return completions_of(tokenizer, tokens, params)

        [prompt] = encode_rows(rows, tokenizer)
        group = await score_group(await sample_completions(Sampler(), prompt, params), "gsm8k")
        begun = start_conversation(tokenizer, row)
        turns = [
            begun.add_completion(c).to_sample()
            for c in completions_of(tokenizer, begun.tokens, params)
        ]
        return group.rewards.tolist(), *[
            (await score(turns, row, fn)).totals.tolist() for fn in ("gsm8k", shown)
        ]

    opens = with_template(backend.tokenizer, tmp_path / "opens.jinja", None)
    assert asyncio.run(rewards(opens)) == ([0, 1, 0],) * 3
    assert asyncio.run(rewards(opens, "start: /.*/")) == ([1, 1, 1],) * 3
    marks = copy.deepcopy(opens)
    marks.add_tokens(["<think>", "</think>"], special_tokens=True)
    assert asyncio.run(rewards(marks)) == ([0, 1, 0],) * 3
    assert asyncio.run(rewards(backend.tokenizer)) == ([1, 1, 1],) * 3


FORMS = {  # what a template opens: rewards of three completions
    "<think>\n": (
        [
            "4</think><answer>4</answer>",
            "4 <answer>4</answer>",
            "<think>4</think><answer>4</answer>",
        ],
        [1, 0, 0],
    ),
    "Well: <think>\nI see. ": (
        ["4</think><answer>4</answer>", "4 <answer>4</answer>", "</think>4"],
        [1, 0, 0],
    ),
    "<think>\n\n</think>\n\n": (
        ["<think>4</think><answer>4</answer>", "<answer>4</answer>", "4"],
        [1, 0, 0],
    ),
    "<think>4</think><answer>": (
        ["4</answer>", "4", "<think>4</think><answer>4</answer>"],
        [1, 0, 0],
    ),
}


@pytest.mark.parametrize("opens", FORMS)
def test_form_is_judged_with_what_the_prompt_opened(backend, opens, tmp_path):
    "A function of the user gets the completion, and `opened` where it asks for it; answers are read after a tag, too."
    texts, right = FORMS[opens]
    turn = "{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}"
    begun = "{% if add_generation_prompt %}<|assistant|>" + opens + "{% endif %}"
    (tmp_path / "opens.jinja").write_text("{% for m in messages %}" + turn + "{% endfor %}" + begun)
    tokenizer = with_template(backend.tokenizer, tmp_path / "opens.jinja", None)

    def form_reward(text, opened):
        return float(text in texts and opens.endswith(opened))

    class Sampler:
        async def sample(self, tokens, params):
            ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
            sampled = zip(ids, texts, strict=True)
            return [
                Completion(tokens, i, *[[0.0] * len(i)] * 2, text=text, params=params)
                for i, text in sampled
            ]

    [prompt] = encode_rows(load_rows([{"question": "Use <think>. 2+2?", "answer": "4"}]), tokenizer)
    sampled = asyncio.run(sample_completions(Sampler(), prompt, SampleParams(n=3)))
    group = asyncio.run(score_group(sampled, ["format", "gsm8k", form_reward]))
    assert [s.rewards["format"] for s in group.samples] == right
    assert group.samples[0].rewards["gsm8k"] == 1
    assert [s.rewards["form_reward"] for s in group.samples] == [
        "unfinished_thinking" not in s.info for s in group.samples
    ]
