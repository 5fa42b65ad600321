"""Train the small model through an agent of OpenAI's API. Run it: python examples/openai_agent/train.py

The task, the calculator and the warm start are those of ../tool_use. There the rollout is written by hand, here an
agent plays it over HTTP. `--library` takes the agent of library.py. Any setting may follow, such as --seed 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import secrets
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tool_use"))
from openai import AsyncOpenAI
from task import line, measure, tool_rows
from warm_start import warm_start

import rl_notebook as rln
from rl_notebook.cli import option_values
from rl_notebook.core.types import RolloutRun
from rl_notebook.loop.setup import rollout_setup

SETTINGS = {
    "recipe": "async_rl_loop",
    "base_model": "tiny",
    "steps": 80,
    "prompt_groups_per_step": 8,
    "completions_per_prompt": 8,
    "max_completion_tokens": 24,  # of each turn
    "max_seq_len": 256,  # of all turns
    "learning_rate": 5e-4,
    "kl_beta": 0.0,
}
# rows to measure on, rows of the warm start, rows for RL: all different
HELD_OUT = 200
DEMONSTRATED = 500
ROWS = 1500
CALL = re.compile(r"calc\((.*)\)\s*$")


def calls_in(text: str) -> tuple[str | None, list[dict[str, Any]]]:
    "How this model calls: its text ends in `calc(...)`. Models that write <tool_call>...</tool_call> need no function."
    result = CALL.search(text)
    if result is None:
        return text, []
    function = {"name": "calc", "arguments": json.dumps({"expression": result[1]})}
    call = {"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function}
    return text[: result.start()] or None, [call]


def with_tools(template: str) -> str:
    "The small model's chat template with one more role: it has no tool role, so the calculator's result comes as a user message."
    role = "('user' if message['role'] == 'tool' else message['role'])"
    with_tool_role = template.replace("'assistant'] -%}", "'assistant', 'tool'] -%}", 1)
    return "{#- tools -#}" + with_tool_role.replace("'<|' + message['role']", f"'<|' + {role}", 1)


async def run(
    cfg: rln.Config,
    warm_steps: int,
    solve: Callable[[AsyncOpenAI, list[Any]], Any],
    say: Callable[[str], Any] = print,
    held_out: int = HELD_OUT,
) -> list[dict[str, float]]:
    "Measure, warm up, measure, train, measure; returns what was measured."
    rows = tool_rows(held_out + DEMONSTRATED + ROWS)
    test = rows[:held_out]
    shown = rows[held_out:][:DEMONSTRATED]
    rows = rows[held_out + DEMONSTRATED :]

    async def play(sample_prompt: dict[str, Any]) -> RolloutRun:
        "One rollout: the agent, at a separate address."
        with server.rollout() as rollout:
            rollout_client = client.with_options(base_url=rollout.url, api_key=rollout.key)
            text = await solve(rollout_client, sample_prompt["messages"])
        return rollout.to_run(rln.gsm8k_reward(text, sample_prompt["answer"]))

    async with (
        await rln.open_backend(cfg, say) as backend,
        AsyncOpenAI(base_url="set", api_key="later") as client,
    ):
        backend.tokenizer.chat_template = with_tools(backend.tokenizer.chat_template)
        setup = rollout_setup(backend, cfg)
        results = [await measure(setup, test)]
        say(line("base model", results[-1]))
        # as in ../tool_use: it has never seen a call
        await warm_start(backend, shown, warm_steps, cfg.seed)
        results.append(await measure(setup, test))
        say(line("after warm start", results[-1]))
        loop = rln.AsyncGRPOLoop(backend, rows, play, cfg)
        async with loop.serve(read_calls=calls_in) as server:
            async for record in loop:
                samples = [s for g in record.groups for s in g.samples]
                turns = sum(s.info["turns"] for s in samples) / len(samples)
                say(
                    f"step {record.step:3}  reward {record.metrics['reward']:.3f}  turns {turns:.2f}"
                )
        results.append(await measure(setup, test))
        say(line("after RL", results[-1]))
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--warm-start",
        type=int,
        default=250,
        help="supervised steps that show what a call looks like",
    )
    parser.add_argument("--library", action="store_true", help="the agent of library.py")
    args, rest = parser.parse_known_args()
    agent = import_module("library" if args.library else "agent")
    asyncio.run(
        run(rln.Config.from_dict(SETTINGS, option_values(rest)), args.warm_start, agent.solve)
    )
