"Planted bug: the inference server says that it took the new weights, and continues with the old ones."

from dataclasses import replace

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.config.config import Config
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_reward, toy_rows


class Server:
    "Our inference server, behind its HTTP client."

    def __init__(self, engine):
        self.engine = engine
        self.version = 0

    async def sample(self, prompt_tokens, params):
        completions = await self.engine.sample(prompt_tokens, params)
        return [replace(c, policy_version=self.version) for c in completions]

    async def logprobs(self, tokens):
        return await self.engine.logprobs(tokens)

    async def load_weights(self, snapshot):
        self.version += 1
        return self.version


async def train():
    backend = open_local(*load_model("tiny"))
    backend.sampler = server = Server(backend.sampler)
    backend.sync = server.load_weights
    cfg = Config(
        prompt_groups_per_step=4,
        completions_per_prompt=6,
        max_completion_tokens=24,
        learning_rate=1e-3,
    )
    loop = GRPOLoop(backend, toy_rows(40), toy_reward, cfg)
    await loop.run(3)
    return loop
