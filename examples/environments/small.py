"""What the examples share: settings for the small model, how it calls a tool, and a run that prints its steps."""

from __future__ import annotations

import json
import secrets
import sys
from typing import Any

import numpy as np

import rl_notebook as rln
from rl_notebook.cli import option_values
from rl_notebook.task.rewards import final_answer

SETTINGS = {
    "base_model": "tiny",
    "steps": 15,
    "prompt_groups_per_step": 8,
    "completions_per_prompt": 8,
    "max_completion_tokens": 24,  # of each turn
    "max_seq_len": 160,  # of all turns
    "learning_rate": 4e-4,
    "kl_beta": 0.0,
}


def read_answer(text: str) -> tuple[str, list[dict[str, Any]]]:
    "Reads `#### 12` as `answer(number=12)`. Models that know tools write <tool_call> and need no function."
    number = final_answer(text)
    if number is None or not number.isdigit():
        return text, []
    function = {"name": "answer", "arguments": json.dumps({"number": int(number)})}
    return text, [{"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function}]


def with_tools(template: str) -> str:
    "The small model's chat template with one more role: what a tool says is read as said by the user."
    role = "('user' if message['role'] == 'tool' else message['role'])"
    with_tool_role = template.replace("'assistant'] -%}", "'assistant', 'tool'] -%}", 1)
    return "{#- tools -#}" + with_tool_role.replace("'<|' + message['role']", f"'<|' + {role}", 1)


async def train(
    rows: Any,
    task: Any,  # a rollout factory, or a reward function
    options: list[str] | None = None,  # settings, as on a command line
    say: Any = print,
    **settings: Any,  # others than the above
) -> list[float]:  # mean reward of each step
    "Train, and say every fifth step what the rewards of five were."
    cfg = rln.Config.from_dict(
        SETTINGS | settings, option_values(sys.argv[1:] if options is None else options)
    )
    rewards: list[float] = []
    async with await rln.open_backend(cfg, say) as backend:
        if cfg.base_model == "tiny":
            backend.tokenizer.chat_template = with_tools(backend.tokenizer.chat_template)
        async for record in rln.GRPOLoop(backend, rows, task, cfg):
            samples = [s for g in record.groups for s in g.samples]
            rewards.append(record.metrics["reward"])
            if record.step == 1 or record.step % 5 == 0:
                turns = np.mean([s.info.get("turns", 1) for s in samples])
                say(f"step {record.step:3}  reward {np.mean(rewards[-5:]):.3f}  turns {turns:.2f}")
    return rewards
