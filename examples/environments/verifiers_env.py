"""An environment of verifiers 0.4. Run it: pip install verifiers; python examples/environments/verifiers_env.py"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import small
import verifiers.v1 as vf

from rl_notebook.agents.environments import agent_rollouts
from rl_notebook.agents.serve import ServedRollout

# or the id of an installed one
WHERE = {"taskset": {"id": "retry_sums"}, "agent": {"runtime": {"type": "subprocess"}}}
env = vf.load_environment(vf.resolve_env_config(WHERE))


# --- the glue: 8 lines
tasks = list(env.taskset.take(512))
rows = [{"prompt": task.data.prompt_text, "task": i} for i, task in enumerate(tasks)]


async def play(row: dict[str, Any], rollout: ServedRollout) -> float | None:
    "One episode of the environment, played by the policy."
    os.environ["POLICY_KEY"] = rollout.key  # one key for all rollouts
    client = vf.EvalClientConfig(base_url=rollout.url, api_key_var="POLICY_KEY")
    episode = await env.run_episode(tasks[row["task"]], vf.ModelContext("policy", client))
    return episode.traces[0].reward if episode.ok else None


# ---------------------------------------------------------------------------------------------------------------------


async def main(options: list[str] | None = None, say: Any = print) -> list[float]:
    # an episode costs this library a tenth of a second, so there are fewer
    async with env.serving():
        return await small.train(
            rows, agent_rollouts(play), options, say, steps=10, prompt_groups_per_step=4
        )


if __name__ == "__main__":
    asyncio.run(main())
