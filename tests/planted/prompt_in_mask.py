"Planted bug: the prompt is in the mask, with logprobs that the server gave for it by echo."

from dataclasses import replace

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.config.config import Config
from rl_notebook.core.types import RolloutSample
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_reward, toy_rows


def make_rollout_fn(setup):
    async def rollout_fn(sample_prompt):
        prompt = sample_prompt["prompt_token_ids"]
        params = replace(setup.params, n=1, seed=sample_prompt["seed"])
        (completion,) = await setup.sampler.sample(prompt, params)
        tokens = [*prompt, *completion.tokens]
        echo = await setup.sampler.logprobs(tokens)
        reward = toy_reward(completion.text, sample_prompt["answer"])
        mask = [0] + [1] * (len(tokens) - 1)  # the first token has no logprob
        return RolloutSample(
            tokens, [0.0, *echo.values], mask, reward, completion.finish_reason, completion.text
        )

    return rollout_fn


async def train():
    backend = open_local(*load_model("tiny"))
    cfg = Config(
        prompt_groups_per_step=4,
        completions_per_prompt=6,
        max_completion_tokens=24,
        learning_rate=1e-3,
    )
    loop = GRPOLoop(backend, toy_rows(40), make_rollout_fn, cfg)
    await loop.run(1)
    return loop
