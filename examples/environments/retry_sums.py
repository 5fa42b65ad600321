"""An environment of verifiers 0.4: sums, a second try where the first is wrong, and an agent that runs in this process.

It knows nothing of training. `vf eval` plays it as it is, against any model.
"""

from __future__ import annotations

import verifiers.v1 as vf
from openai import AsyncOpenAI

from rl_notebook.task.toy import toy_reward, toy_rows

__all__ = ["Asks", "Retry", "Sums"]


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData, vf.State]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return toy_reward(trace.last_reply, self.data.answer) / trace.num_turns


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for row in toy_rows(512):
            yield Sum(SumData(prompt=row["question"], answer=row["answer"]), self.config.task)


class Retry(vf.Env[vf.SingleAgentEnvConfig]):
    async def run(self, task: Sum, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as chat:
            await chat.turn()
            if toy_reward(chat.trace.last_reply, task.data.answer) == 0:
                await chat.turn("Try again.")


class Asks(vf.Harness[vf.HarnessConfig]):
    "The simplest agent: it asks the model once a turn. Those that come with verifiers are separate programs."

    NEEDS_CONTAINER = EXECUTES_CODE = False
    SUPPORTS_RESUME = True

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None
    ):
        prompt = (
            [{"role": "user", "content": data.prompt}]
            if isinstance(data.prompt, str)
            else data.prompt
        )
        messages = [
            m if isinstance(m, dict) else {"role": m.role, "content": m.content} for m in prompt
        ]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(0, "", "")
