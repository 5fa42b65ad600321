"Planted bug: a join has doubled the rows of the data."

import pandas as pd

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.config.config import Config
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_reward, toy_rows
from rl_notebook.experiments.preflight import preflight


def sums():
    "Questions with their source, from two tables."
    questions = pd.DataFrame(toy_rows(20))
    sources = pd.DataFrame(
        {"question": [*questions.question, *questions.question], "source": ["a"] * 20 + ["b"] * 20}
    )
    return questions.merge(sources, on="question").to_dict("records")


async def train():
    backend = open_local(*load_model("tiny"))
    rows = sums()
    cfg = Config(
        prompt_groups_per_step=4,
        completions_per_prompt=6,
        max_completion_tokens=24,
        learning_rate=1e-3,
    )
    print(await preflight(backend, rows, toy_reward, cfg))
    loop = GRPOLoop(backend, rows, toy_reward, cfg)
    await loop.run(1)
    return loop
