"Planted bug: a reward is computed on prompt and completion."

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.config.config import Config
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_reward, toy_rows
from rl_notebook.experiments.preflight import preflight


def form(prompt, completion):
    "Half a point for an answer in the right form."
    text = "".join(message["content"] for message in prompt + completion)
    return 0.5 * ("####" in text)


async def train():
    backend = open_local(*load_model("tiny"))
    rows = [{**row, "question": row["question"] + " End with ####."} for row in toy_rows(40)]
    cfg = Config(
        prompt_groups_per_step=4,
        completions_per_prompt=6,
        max_completion_tokens=32,
        learning_rate=1e-3,
    )
    print(await preflight(backend, rows, [toy_reward, form], cfg))
    loop = GRPOLoop(backend, rows, [toy_reward, form], cfg)
    await loop.run(1)
    return loop
