"Planted bug: the schedule is at its end after 8 steps, not after 80."

from math import cos, pi

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.config.config import Config
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_rows


def cosine(step, peak=1e-3, floor=1e-9, total=7):
    "A learning rate that falls along half a cosine."
    return floor + (peak - floor) * (1 + cos(pi * min(step / total, 1))) / 2


async def train():
    backend = open_local(*load_model("tiny"))
    cfg = Config(
        prompt_groups_per_step=2,
        completions_per_prompt=4,
        max_completion_tokens=16,
        learning_rate=1e-3,
    )
    loop = GRPOLoop(backend, toy_rows(40), lambda text: len(set(text)), cfg)
    for step in range(9):
        loop.change(learning_rate=cosine(step))
        await loop.run(1)
    return loop
