"A trained policy is talked to: streamed, stopped, next to its base, in a real terminal."

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pexpect
import pytest

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.cli import main
from rl_notebook.core.types import BackendError, ConfigError, SampleParams
from rl_notebook.recipes.playground import Playground, open_playground, streamed
from rl_notebook.task.toy import load_model


SMALL = "--max-rows 4 --prompt-groups-per-step 2 --completions-per-prompt 4 --max-completion-tokens 24 --steps 1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    "A run of one large step of an adapter."
    path = tmp_path_factory.mktemp("chat") / "run"
    options = [*SMALL.split(), "--learning-rate", "0.01", "--lora-rank", "4"]
    assert main(["train", *options, "--log-path", str(path)]) == 0
    return path


def run(awaitable: Any) -> Any:
    return asyncio.run(awaitable)


def test_the_trained_weights_answer_and_the_base_is_the_base(folder):
    async def both() -> tuple[Any, ...]:
        async with await open_playground(folder, beside="base", temperature=0.0) as playground:
            exchange = await playground.ask("What is 3+7+2+9+4?")
            datums, series = await playground.scored()
            return exchange, datums, series, await playground.tokens(), await playground.inspect()

    exchange, datums, series, table, inspector = run(both())
    for i, who in enumerate(("trained", "base")):
        answer = exchange.answers[who]
        np.testing.assert_allclose(series[who][i][datums[i].active], answer.logprobs, atol=1e-4)
        assert datums[i].num_loss_tokens == len(answer.tokens)
    assert np.abs(series["trained"][0] - series["base"][0]).max() > 1e-2  # they are two models
    assert list(table.columns) == ["drawn by", "token", "trained", "base"]
    assert len(table) == sum(len(c.tokens) for c in exchange.answers.values())
    assert inspector.series == "policy-ref"
    model, tokenizer = load_model("tiny")

    async def plain() -> Any:
        async with open_local(model, tokenizer) as backend:
            return await backend.sampler.sample(
                exchange.answers["base"].prompt_tokens, SampleParams(temperature=0)
            )

    assert run(plain())[0].text == exchange.answers["base"].text


def test_an_answer_is_said_as_it_grows_and_stops_when_it_is_cancelled(folder):
    async def ask() -> tuple[list[tuple[str, str]], Any, Playground]:
        async with await open_playground(folder, beside="base", seed=1) as playground:
            said = list[tuple[str, str]]()
            exchange = await playground.ask(
                "What is 3+7+2+9+4?", lambda who, piece: said.append((who, piece))
            )

            def stop(who: str, piece: str) -> None:
                raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                await playground.ask("And 1+1+1+1+1?", stop)
            assert len(playground.exchanges) == playground.talks["trained"].turns == 1
            await playground.ask("And 1+1+1+1+1?")
            assert playground.talks["base"].turns == 2
            assert len(playground.exchanges) == 2
            playground.samplers["trained"].engine.max_seq_len = 40
            with pytest.raises(
                ConfigError, match=r"expected less than the model's 40\. Begin a new conversation"
            ):
                await playground.ask("And 2+2+2+2+2?")
            return said, exchange, playground

    said, exchange, playground = run(ask())
    for who, answer in exchange.answers.items():
        pieces = [piece for speaker, piece in said if speaker == who]
        assert "".join(pieces) == answer.text
        assert len(pieces) > 1
    playground.forget()
    with pytest.raises(BackendError):  # they are closed
        run(playground.ask("Is somebody there?"))


def test_a_stop_string_is_never_said():
    async def draw() -> tuple[str, str]:
        async with open_local(*load_model("tiny")) as backend:
            said = list[str]()
            prompt = backend.tokenizer.apply_chat_template(
                [{"role": "user", "content": "What is 3+7+2+9+4?"}],
                add_generation_prompt=True,
                return_dict=False,
            )
            params = SampleParams(temperature=0, max_tokens=24, stop=("## 2", " 21 "))
            whole = await streamed(backend.sampler, backend.tokenizer, prompt, params, said.append)
            return "".join(said), whole.text

    said, text = run(draw())
    assert said == text
    assert not re.search("## 2| 21 ", said)


def test_what_is_not_there_is_said(folder, capsys):
    assert main(["chat", str(folder), "--step", "7"]) == 2
    assert (
        "chat: got no whole checkpoint after step 7; expected one after 1"
        in capsys.readouterr().err
    )
    with pytest.raises(ConfigError, match="beside: got 'both'; expected 'base' or None"):
        run(open_playground(folder, beside="both"))


def test_a_chat_in_a_terminal(folder):
    code = "import sys; from rl_notebook.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["-c", code, "chat", str(folder), "--beside", "base", "--temperature", "0"]
    terminal = pexpect.spawn(
        sys.executable, arguments, encoding="utf-8", timeout=60, dimensions=(50, 120)
    )
    terminal.expect("tiny after step 1 beside its base model")
    for line, answers in (
        ("What is 3+7+2+9+4?", ["trained> ", "base> "]),
        ("/tokens", ["drawn by +token +trained +base +difference", "trained ", "base "]),
        ("/nothing", ["/new: a new conversation"]),
        ("/new", []),
        ("/tokens", ["tokens: got no answer yet; expected a question before"]),
    ):
        terminal.expect("you> ")
        terminal.sendline(line)
        for answer in answers:
            terminal.expect(answer)
    terminal.expect("you> ")
    terminal.sendeof()
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0
