"Planted bug: the advantages are not centred."

from dataclasses import replace

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.config.config import Config
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_reward, toy_rows


def normalised(groups):
    "Rewards over their standard deviation, so that every group counts the same."
    return [replace(g, advantages=g.rewards / (g.rewards.std() + 1e-6)) for g in groups]


async def train():
    backend = open_local(*load_model("tiny"))
    cfg = Config(
        prompt_groups_per_step=4,
        completions_per_prompt=6,
        max_completion_tokens=24,
        learning_rate=1e-3,
    )
    loop = GRPOLoop(backend, toy_rows(40), toy_reward, cfg, advantage_fn=normalised)
    await loop.run(1)
    return loop
