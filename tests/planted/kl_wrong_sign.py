"Planted bug: a custom KL term has the wrong sign."

import torch

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.config.config import Config
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.core.losses import make_loss_fn
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_reward, toy_rows

BETA = 0.1


def grpo_with_kl(datums, denominator):
    grpo = make_loss_fn(datums, policy_loss="grpo", denominator=denominator)

    def loss_fn(datums, logprobs):
        loss, metrics = grpo(datums, logprobs)
        for d, pi in zip(datums, logprobs, strict=True):
            log_ratio = torch.tensor(d.ref_logprobs) - pi
            k3 = log_ratio.exp() - log_ratio - 1
            loss = loss - BETA * k3[torch.tensor(d.active)].sum() / denominator
        return loss, metrics

    return loss_fn


async def train():
    backend = open_local(*load_model("tiny"))
    cfg = Config(
        prompt_groups_per_step=4,
        completions_per_prompt=6,
        max_completion_tokens=24,
        learning_rate=1e-3,
    )
    loop = GRPOLoop(backend, toy_rows(40), toy_reward, cfg, make_loss=grpo_with_kl)
    await loop.run(4)
    return loop
