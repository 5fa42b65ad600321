"The example scripts run as they are, and learn from what the policy said and from nothing else."

from __future__ import annotations

import asyncio
import contextlib
import importlib
import re
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import rl_notebook as rln
from rl_notebook.emulator.testing import emulator_fixture
from rl_notebook.backends.local.trainer import open_local
from rl_notebook.cli import option_values
from rl_notebook.core.types import Completion, SampleParams
from rl_notebook.runs.run import Run
from rl_notebook.loop.rollouts import RolloutSetup
from rl_notebook.task.models import build_tokenizer, load_model
from rl_notebook.task.toy import toy_rows

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL_RUN_OPTIONS = [
    "--steps",
    "2",
    "--prompt-groups-per-step",
    "2",
    "--completions-per-prompt",
    "4",
]

emulator = emulator_fixture(scope="module")


@contextlib.contextmanager
def at_home(folder: str) -> Iterator[list[str]]:
    "Where the scripts of an example find each other; the names of its modules."
    names = [path.stem for path in (EXAMPLES / folder).glob("*.py")]
    sys.path.insert(0, str(EXAMPLES / folder))
    try:
        yield names
    finally:
        sys.path.remove(str(EXAMPLES / folder))
        for name in names:
            sys.modules.pop(name, None)


@pytest.fixture
def example(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    "The modules of an example."
    with at_home(request.param) as names:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})


# --- the scripts -------------------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    "Runs a script to its end; returns what it printed."

    def run(folder: str, *options: str) -> str:
        with at_home(folder):
            script = str(EXAMPLES / folder / "train.py")
            monkeypatch.setattr(sys, "argv", [script, *SMALL_RUN_OPTIONS, *options])
            runpy.run_path(script, run_name="__main__")
        return capsys.readouterr().out

    return run


def test_a_script_trains_here(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    "With fewer rows than it asks for."
    monkeypatch.setattr(rln, "toy_rows", lambda n, **kwargs: toy_rows(min(n, 20), **kwargs))
    output = run("multi_turn_message_in", "--log-path", str(tmp_path))
    assert re.search(r"held-out reward 0\.\d\d -> 0\.\d\d \(2 steps", output)
    assert Run.open(tmp_path).steps == [1, 2]


def odd_is_right(text: str, answer: str) -> float:
    "A reward with which every other answer is right, whatever the model knows."
    return float(sum(map(ord, text)) % 2)


@pytest.mark.parametrize("example", ["tool_use"], indirect=True)
def test_the_tool_example_trains_on_the_emulator(
    example: SimpleNamespace, emulator, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("fireworks.training.sdk")
    for name, value in {**emulator.environment(), "FW_TRAINER_CANCEL_GRACE_PERIOD_S": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(example.rollout.rln, "gsm8k_reward", odd_is_right)
    service = [
        "--base-model",
        "accounts/fireworks/models/qwen3-8b",
        "--deployment.tokenizer-model",
        "tiny",
    ]
    cfg = example.train.Config.from_dict(
        example.train.SETTINGS, option_values([*SMALL_RUN_OPTIONS, *service])
    )
    result = asyncio.run(example.train.run(cfg, warm_steps=2, say=lambda line: None, held_out=4))
    assert len(result) == 3
    paths = [entry.path for entry in emulator.emulator.log if entry.status == 200]
    # two of the warm start, two of the loop
    assert sum(path.endswith("/optim_step") for path in paths) == 4
    assert sum(path.endswith("/hot_load") for path in paths) >= 3


@pytest.fixture
def openai_agent() -> Iterator[SimpleNamespace]:
    "The modules of the example with an agent, which takes those of another one; `library` where that is installed."
    pytest.importorskip("openai", reason="the client of OpenAI is not installed")
    with at_home("tool_use"), at_home("openai_agent") as names:
        if find_spec("pydantic_ai") is None:
            names.remove("library")
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})


def test_an_agent_of_openais_api_trains_here(openai_agent: SimpleNamespace, monkeypatch):
    train = openai_agent.train
    lines = list[str]()
    monkeypatch.setattr(train.rln, "gsm8k_reward", odd_is_right)
    cfg = train.rln.Config.from_dict(train.SETTINGS, option_values(SMALL_RUN_OPTIONS))
    result = asyncio.run(train.run(cfg, 2, openai_agent.agent.solve, lines.append, held_out=4))
    assert len(result) == 3
    assert [line[:8].strip() for line in lines] == [
        "base mod",
        "after wa",
        "step   1",
        "step   2",
        "after RL",
    ]


# --- the calculator ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("example", ["tool_use"], indirect=True)
def test_the_calculator_computes_what_python_does(example: SimpleNamespace):
    for text in (
        "3*4-5+9",
        "-(2+3)*4",
        "17//5",
        "-17 % 5",
        " 1 + 1 ",
        "999999*999999",
        "2-+-3",
        "1+" * 30 + "1",
    ):
        assert example.calculator.calculate(text) == eval(text.strip())
    assert example.calculator.respond("3*4") == "= 12"


HOSTILE = [
    "",
    "()",
    "(1,2)",
    "1//0",
    "9**9**9",
    "1/2",
    "1.5",
    "1e9",
    "1_000",
    "007",
    "1<2",
    "x",
    "(1).__class__",
]
HOSTILE += [
    "__import__('os').system('true')",
    "lambda: 1",
    "'a'*9",
    "1;2",
    "1\x00",
    "#1",
    "²",
    "calc(1)",
    "1<<99",
]
HOSTILE += [
    "(" * 31 + "1" + ")" * 31,
    "(" * 90 + "1",
    "-" * 90 + "1",
    "1+" * 49 + "1",
    "1" * 100_000,
]


@pytest.mark.parametrize("example", ["tool_use"], indirect=True)
def test_the_calculator_rejects_everything_else(example: SimpleNamespace):
    for text in HOSTILE:
        began = time.thread_time()
        with pytest.raises(ValueError, match=r"^[a-z]") as caught:
            example.calculator.calculate(text)
        # of computing, however busy the machine is
        assert time.thread_time() - began < 0.5, text[:40]
        assert type(caught.value) is ValueError, text[:40]
        assert example.calculator.respond(text) == f"error: {caught.value}"
        assert len(str(caught.value)) < 60  # it goes back to the model


# --- the rollouts ------------------------------------------------------------------------------------------------


class Scripted:
    "A sampler that returns scripted texts, and keeps what it was asked."

    def __init__(self, *texts: str):
        self.tokenizer = build_tokenizer()
        self.texts = list(texts)
        self.asked = []
        self.seeds = []

    async def sample(self, prompt_tokens, params: SampleParams) -> list[Completion]:
        self.asked.append(list(prompt_tokens))
        self.seeds.append(params.seed)
        text = self.texts.pop(0)
        tokens = [
            *self.tokenizer.encode(text, add_special_tokens=False),
            self.tokenizer.eos_token_id,
        ]
        return [
            Completion(
                np.array(prompt_tokens), np.array(tokens), np.full(len(tokens), -0.5), text=text
            )
        ]

    def rollout(self, example: SimpleNamespace, **row):
        "One rollout of an example."
        setup = RolloutSetup(
            self, self.tokenizer, SampleParams(max_tokens=24), completions_per_prompt=1
        )
        row = {
            "messages": [{"role": "user", "content": "What is 3*4-5+9?"}],
            "answer": "16",
            "seed": 7,
        } | row
        return asyncio.run(example.rollout.make_rollout_fn(setup)(row))

    def trained(self, sample) -> str:
        "What the mask covers."
        return self.tokenizer.decode(sample.tokens[sample.loss_mask == 1])


@pytest.mark.parametrize("example", ["tool_use"], indirect=True)
def test_the_tool_rollout_trains_on_the_tokens_of_the_policy(example: SimpleNamespace):
    sampler = Scripted("let me see: calc(3*4-5+9)", "#### 16")
    sample = sampler.rollout(example)
    assert (sample.reward, sample.info["calls"], sample.info["turns"]) == (1.0, 1, 2)
    assert sampler.trained(sample) == "let me see: calc(3*4-5+9)<|end|>#### 16<|end|>"
    whole = sampler.tokenizer.decode(sample.tokens)
    assert "<|user|>= 16<|end|><|assistant|>" in whole  # the tool's words are there, and masked
    assert sampler.asked[1] == sample.tokens[: len(sampler.asked[1])].tolist()
    assert len(set(sampler.seeds)) == 2
    np.testing.assert_array_equal(np.isnan(sample.logprobs), sample.loss_mask == 0)


@pytest.mark.parametrize("example", ["tool_use"], indirect=True)
def test_the_tool_rollout_ends(example: SimpleNamespace):
    endless = Scripted(*["calc(1+1)"] * 4)
    assert endless.rollout(example).reward == 0
    assert len(endless.asked) == example.rollout.MAX_TURNS
    attack = Scripted("calc(__import__('os'))", "#### 16")
    assert attack.rollout(example).info["messages"][1]["content"].startswith("error: ")
    # read out, but not given as the answer
    assert Scripted("calc(3*4-5+9)", "= 16").rollout(example).reward == 0


@pytest.mark.parametrize("example", ["tool_use"], indirect=True)
def test_the_warm_start_learns_its_traces(example: SimpleNamespace):
    rows = example.task.tool_rows(8)
    rng = np.random.default_rng(0)
    backend = open_local(*load_model("tiny"))
    traces = [example.warm_start.trace(backend.tokenizer, row, rng) for row in rows]
    replies = [backend.tokenizer.decode(d.target_tokens[d.active]) for d in traces]
    assert {text.startswith("calc(") for text in replies} == {True, False}
    assert all(
        re.fullmatch(r"(calc\([^()]+\)<\|end\|>)?#### -?\d+<\|end\|>", text) for text in replies
    )
    losses = asyncio.run(example.warm_start.warm_start(backend, rows, steps=8))
    assert losses[-1] < losses[0] / 2
    loss, _ = example.warm_start.cross_entropy(
        traces[:1], [torch.full((len(traces[0].weights),), -2.0)]
    )
    assert float(loss) == 2


@pytest.mark.parametrize("example", ["multi_turn_message_in"], indirect=True)
def test_retries_are_discounted(example: SimpleNamespace):
    sampler = Scripted("#### 1", "15 and 1", "#### 16", "not asked any more")
    sample = sampler.rollout(example)
    assert sample.reward == pytest.approx(0.64)
    assert sampler.trained(sample) == "#### 1<|end|>15 and 1<|end|>#### 16<|end|>"
    assert sample.info["turns"] == 3
    assert Scripted("#### 16", "#### 1").rollout(example).reward == 1
    assert Scripted(*["#### 1"] * 3, "#### 16").rollout(example).reward == 0
    assert Scripted("#### 16").rollout(example, answer="many").reward is None


@pytest.mark.parametrize("example", ["single_turn_token_in"], indirect=True)
def test_rows_are_tokens(example: SimpleNamespace):
    rows = example.train.token_rows(build_tokenizer(), 3)
    assert all(
        set(row) == {"prompt_token_ids", "answer"} and isinstance(row["prompt_token_ids"][0], int)
        for row in rows
    )
    sampler = Scripted("#### 16")
    sample = sampler.rollout(example, prompt_token_ids=rows[0]["prompt_token_ids"])
    assert sampler.asked == [rows[0]["prompt_token_ids"]]
    assert sampler.trained(sample) == "#### 16<|end|>"
    assert sample.reward == pytest.approx(1.1)


# --- environments of other libraries -----------------------------------------------------------------------------

ENVIRONMENTS = {  # script -> the package that it needs, and how old or new
    "trl_environment": ("", (0,), (99,)),
    "reasoning_gym_rows": ("reasoning_gym", (0,), (99,)),
    "verifiers_env": ("verifiers", (0, 4), (99,)),
    "verifiers_classic": ("verifiers", (0, 1), (0, 4)),
}


def environment(script: str) -> Any:
    "The module of a script, where its package is installed in a version that it is written for."
    package, least, below = ENVIRONMENTS[script]
    if package:
        pytest.importorskip(package, reason=f"{package} is not installed")
        release = tuple(
            int(part) for part in re.findall(r"\d+", version(package.replace("_", "-")))[:2]
        )
        if not least <= release < below:
            pytest.skip(f"{script} is not written for {package} {version(package)}")
    return importlib.import_module(script)


@pytest.mark.parametrize("script", ENVIRONMENTS)
def test_an_environment_of_another_library_trains_here(script: str):
    with at_home("environments"):
        module = environment(script)
        lines = []
        rewards = asyncio.run(module.main([*SMALL_RUN_OPTIONS, "--seed", "1"], lines.append))
    assert len(rewards) == 2
    assert re.match(r"step   1  reward \d\.\d{3}  turns \d\.\d\d", lines[-1])


@pytest.mark.parametrize("script", ENVIRONMENTS)
def test_the_glue_is_at_most_ten_lines(script: str):
    text = (EXAMPLES / "environments" / f"{script}.py").read_text()
    ruler = r"# -{20,}"
    [_, glue, _] = re.split(rf"\n{ruler}\n|\n# --- the glue.*\n", text)
    lines = [line for line in glue.splitlines() if line.strip()]
    [count] = re.findall(r"# --- the glue: (\d+) lines?", text)
    assert len(lines) == int(count) <= 10


def test_an_environment_trains_on_the_tokens_of_the_policy():
    with at_home("environments"):
        module = importlib.import_module("trl_environment")
        sampler = Scripted("#### 1", "#### 16")
        sampler.tokenizer.chat_template = module.small.with_tools(sampler.tokenizer.chat_template)
        setup = RolloutSetup(
            sampler, sampler.tokenizer, SampleParams(max_tokens=24), completions_per_prompt=1
        )
        row = {
            "messages": [{"role": "user", "content": "What is 3*4-5+9?"}],
            "answer": "16",
            "seed": 7,
        }
        sampler.texts.append("Done.")
        [sample] = asyncio.run(module.task(setup)(row)).segments
    assert (sample.reward, sample.rewards, sample.info["tool_calls"]) == (0.5, {"Adding": 0.5}, 2)
    assert sampler.trained(sample) == "#### 1<|end|>#### 16<|end|>Done.<|end|>"
    assert "<|user|>Too low.<|end|><|assistant|>" in sampler.tokenizer.decode(sample.tokens)
    np.testing.assert_array_equal(np.isnan(sample.logprobs), sample.loss_mask == 0)
