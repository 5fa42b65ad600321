"""The sentence of a step that goes wrong: each situation is made by running the loop wrongly.

`SITUATIONS` pairs a way to go wrong with words that the sentence must have and words that would be false. They were
chosen before the sentences were.
"""

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import always, tiny, uneven

from rl_notebook.backends.base import Backend
from rl_notebook.config.config import Config
from rl_notebook.core.losses import make_loss_fn
from rl_notebook.core.types import Completion, LossOutput, PromptGroup
from rl_notebook.insight.xray import sentence
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.loop.step import evaluate_loss
from rl_notebook.runs.records import StepRecord
from rl_notebook.task.chat import sample_from_completion
from rl_notebook.task.toy import toy_reward, toy_rows

Records = list[StepRecord]


def make_loop(
    reward: Any = toy_reward, *, backend: Backend | None = None, rows: Any = None, **kwargs: Any
) -> GRPOLoop:
    "A loop on sums; keywords that are not the loop's are settings."
    arguments = {name: kwargs.pop(name) for name in ("make_loss", "advantage_fn") if name in kwargs}
    size = {
        "prompt_groups_per_step": 4,
        "completions_per_prompt": 6,
        "max_completion_tokens": 24,
        "max_seq_len": 96,
    }
    cfg = Config(**size | {"learning_rate": 5e-4, "kl_beta": 0.01} | kwargs)
    return GRPOLoop(
        backend or tiny(), toy_rows(40) if rows is None else rows, reward, cfg, **arguments
    )


def run(n: int, *args: Any, **kwargs: Any) -> Records:
    "Steps of such a loop."
    return list(asyncio.run(make_loop(*args, **kwargs).run(n, progress=False)))


def between(n: int, do: Callable[[GRPOLoop], Any], **kwargs: Any) -> Records:
    "Steps of a loop to which something is done after each."

    async def steps() -> Records:
        loop = make_loop(**kwargs)
        records = []
        for _ in range(n):
            records += [await loop.step()]
            await do(loop)
        return records

    return asyncio.run(steps())


# --- ways to go wrong ---------------------------------------------------------------------------------------------


def times(factor: float) -> Any:
    "The loss of the config, multiplied."

    def make(datums: Any, denominator: float | None) -> Any:
        plain = make_loss_fn(datums, policy_loss="grpo", denominator=denominator)

        def loss(datums: Any, logprobs: Any) -> Any:
            value, metrics = plain(datums, logprobs)
            return value * factor, metrics

        return loss

    return make


def root(datums: Any, denominator: float | None) -> Any:
    "A loss whose value is fine, and whose derivative is 0 times infinity."
    plain = make_loss_fn(datums, policy_loss="grpo", denominator=denominator)

    def loss(datums: Any, logprobs: Any) -> Any:
        value, metrics = plain(datums, logprobs)
        live = torch.tensor(datums[0].active)
        return value + torch.sqrt((logprobs[0] - logprobs[0].detach()).abs())[live].sum(), metrics

    return loss


class Careless:
    "A trainer that checks nothing, as some services do: it reports the gradient that it was handed."

    def __init__(self, inner: Any):
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def forward_backward_custom(self, datums: Any, loss_fn: Any) -> LossOutput:
        logprobs = await self.inner.forward(datums)
        out = evaluate_loss(datums, logprobs, lambda ds, denominator: loss_fn)
        await self.inner.backward(datums, [np.nan_to_num(g) for g in out.dlogprobs])
        self.norm = float(np.sum([g.sum() for g in out.dlogprobs]))
        return out

    async def optim_step(self, adam: Any, **kwargs: Any) -> dict[str, float]:
        return await self.inner.optim_step(adam, **kwargs) | {
            "grad_norm": self.norm,
            "grad_norm_clipped": self.norm,
        }


class Scheduled(Careless):
    "A trainer whose own schedule of learning rates has ended."

    async def forward_backward_custom(self, datums: Any, loss_fn: Any) -> LossOutput:
        return await self.inner.forward_backward_custom(datums, loss_fn)

    async def optim_step(self, adam: Any, **kwargs: Any) -> dict[str, float]:
        return await self.inner.optim_step(replace(adam, learning_rate=0.0), **kwargs)


def trained_by(kind: type[Careless]) -> Backend:
    backend = tiny()
    backend.policy = kind(backend.policy)
    return backend


class Bent:
    "A sampler that is asked something else than the loop asked."

    def __init__(self, inner: Any, ask: Callable[..., Any]):
        self.inner = inner
        self.ask = ask
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def sample(self, prompt: Any, params: Any) -> list[Completion]:
        self.calls += 1
        return await self.ask(self.inner.sample, np.asarray(prompt), params, self.calls)


def sampled_by(ask: Callable[..., Any]) -> Backend:
    backend = tiny()
    backend.sampler = Bent(backend.sampler, ask)
    return backend


async def one_long(sample: Any, prompt: Any, params: Any, call: int) -> list[Completion]:
    "The first prompt may be answered at length, the others may not."
    return await sample(prompt, params if call == 1 else replace(params, max_tokens=1))


def another_prompt(setup: Any) -> Any:
    "A rollout function: half of a group belongs to another prompt."

    async def rollout_fn(sample_prompt: dict) -> Any:
        ids = list(sample_prompt["prompt_token_ids"])
        ids[len(ids) // 2] += sample_prompt["sample_index"] % 2
        [completion] = await setup.sampler.sample(
            ids, replace(setup.params, seed=sample_prompt["seed"])
        )
        return sample_from_completion(completion, reward=uneven(completion.text))

    return rollout_fn


def negated(groups: Sequence[PromptGroup]) -> list[PromptGroup]:
    return [replace(g, advantages=g.rewards.mean() - g.rewards) for g in groups]


def no_gradient(model: Any) -> None:
    "Every weight is kept where it is by a hook."
    for p in model.parameters():
        p.register_hook(torch.zeros_like)


def reference_that_is_the_policy() -> Backend:
    backend = tiny()
    backend.reference = backend.policy
    return backend


def reset_policy(sampler_too: bool) -> Records:
    "After each step the policy is loaded as it was at the beginning."

    async def steps() -> Records:
        loop = make_loop(uneven, learning_rate=2e-3)
        start = await loop.backend.policy.save_state("start")
        records = []
        for _ in range(2):
            records += [await loop.step()]
            await loop.backend.policy.load_state(start)
            if sampler_too:
                await loop.backend.sync(await loop.backend.policy.save_weights_for_sampler("again"))
        return records

    return asyncio.run(steps())


def by_row(text: str, row: Any) -> float:
    "Only the first row is ever graded apart from 0."
    return uneven(text) if row.data["question"] == toy_rows(1)[0]["question"] else 0.0


# --- what the text must say, and what would be false -------------------------------------------------------------------

# how it is made, what the text must say, what it must not
Situation = tuple[Callable[[], Records], str, str]
MOVED = r"cancel|has not moved since|on-policy"
SITUATIONS: dict[str, Situation] = {
    "all rewards 0": (lambda: run(1, always(0.0)), r"(?i)reward 0\b|rewards are (all )?0\b", r"all right|cut|masked"),
    "all rewards 1": (lambda: run(1, always(1.0)), r"(?i)reward 1\b|rewards are (all )?1\b", r"all wrong|cut|masked"),
    "NaN gradient": (
        lambda: run(1, uneven, backend=trained_by(Careless), make_loss=root),
        r"(?i)(NaN|not finite)[^.]*(gradient|dL/d)|(gradient|dL/d)[^.]*(NaN|not finite)",
        r"gradient is not 0|norm \d|cancel",
    ),
    "exploding gradient": (
        lambda: run(1, lambda text: 1e6 * uneven(text), advantage_scale="none", grad_clip_norm=0),
        r"(?i)gradient[^.]*(explo|huge|very large|large)",
        r"clipped to|gradient is 0",
    ),
    "KL explosion": (
        lambda: run(2, uneven, learning_rate=0.01, kl_beta=0.1, grad_clip_norm=0),
        r"(?i)KL[^.]*(far|large|high|explo)|far from the reference|reference[^.]*far",
        r"is the reference|close to|KL is 0",
    ),
    "collapse to one completion": (
        lambda: run(1, top_k=1),
        r"(?i)identical|the same completion|the same text|collapse",
        r"cut at|masked|different",
    ),
    "truncation": (
        lambda: run(1, max_completion_tokens=3),
        r"(?i)(all|every)[^.]*(cut|truncat)|(cut|truncat)[^.]*(all|every)",
        r"all right|masked",
    ),
    "wrong sign of advantages": (
        lambda: run(1, uneven, advantage_fn=negated),
        r"(?i)advantage[^.]*(opposite|against|negative(ly)? corr|sign)",
        r"corr[^.]*\+0|higher rewards? (has|have) (a )?higher",
    ),
    "learning rate 0": (
        lambda: run(2, uneven, backend=trained_by(Scheduled)),
        r"(?i)learning rate (is |of )?0|weights (did|have|were) not (move|change)|no weight (moved|changed)",
        r"(?i)gradient is 0|policy has moved",
    ),
    "loss coefficient 0": (
        lambda: run(1, uneven, make_loss=times(0.0)),
        r"(?i)gradient[^.]*\b(is|was) (exactly )?0\b|no gradient|gradient 0\b",
        r"cancel|gradient is not 0|same reward",
    ),
    "frozen parameters": (
        lambda: run(1, uneven, backend=tiny(no_gradient), weight_decay=0.0),
        r"(?i)frozen|no gradient reach|gradient[^.]*does not reach|weights (did|have|were) not (move|change)",
        r"gradient is not 0|same reward",
    ),
    "everything masked out": (
        lambda: run(1, uneven, max_completion_tokens=3, overlong="mask"),
        r"(?i)mask",
        r"all right|all wrong|same reward",
    ),
    "one group dominates by length": (
        lambda: run(1, uneven, backend=sampled_by(one_long)),
        r"(?i)group \d+[^.]*\d+ ?%|\d+ ?%[^.]*group \d+|one group[^.]*(most|\d+ ?%)",
        r"(?i)equal weight|same reward",
    ),
    "length hacking": (
        lambda: run(1, lambda text: float(len(text))),
        r"(?i)reward[^.]*length|length[^.]*reward|longer[^.]*reward|reward[^.]*longer",
        r"(?i)shorter",
    ),
    "duplicate prompts": (
        lambda: run(1, uneven, rows=[toy_rows(1)[0] | {"id": i} for i in range(8)]),
        r"(?i)(same|duplicate|repeat)\w*[^.]*prompt|prompts?[^.]*(same|duplicate|repeat|times|twice|equal)",
        r"(?i)same completion|same reward",
    ),
    "wrong group ids": (
        lambda: run(1, another_prompt),
        r"(?i)(different|another|two|more than one|not the same|mix)[^.]*prompt|prompts[^.]*(differ|mix)",
        r"(?i)duplicate prompt|same reward",
    ),
    "the reference is the policy": (
        lambda: run(3, uneven, backend=reference_that_is_the_policy()),
        r"(?i)reference[^.]*(policy|moves|follow|same)[^.]*|KL[^.]*\b0\b[^.]*although",
        r"(?i)far from the reference|first step",
    ),
    "the policy is reset between steps": (
        lambda: reset_policy(False),
        r"(?i)(policy|trainer)[^.]*(not|differ|other|than|moved)[^.]*(sampl|drew|drawn)",
        r"cancel|has not moved since|ratio 1\b",
    ),
    "everything is clipped": (
        lambda: run(
            2, uneven, policy_loss="ppo", anchor="rollout", eps_clip=0.0, weight_sync_interval=0, learning_rate=2e-2,
            ppo_n_minibatches=2,
        ),
        r"(?i)clip[^.]*\d+ ?%|\d+ ?%[^.]*clip",
        MOVED,
    ),
    "one group with signal": (
        lambda: run(1, by_row, rows=toy_rows(4), shuffle=False),
        r"(?i)(one|1)( live)? of (the )?(4|four)|only (one|1) (live )?(prompt )?group|3 of 4 groups",
        r"all right|all wrong",
    ),
}  # fmt: skip


def last_sentence(records: Records) -> str:
    "The sentence of the last step."
    return sentence(records[-1], records[-2] if records[1:] else None)


ALWAYS = (  # all others with SLOW=1
    "all rewards 0",
    "exploding gradient",
    "truncation",
    "loss coefficient 0",
    "one group dominates by length",
    "wrong group ids",
    "everything is clipped",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in ALWAYS)) for name in SITUATIONS],
)
def test_the_sentence_says_the_main_thing_and_nothing_false(name: str) -> None:
    make, must, not_true = SITUATIONS[name]
    text = last_sentence(make())
    assert re.search(must, text), f"missing in: {text}"
    assert not re.search(not_true, text), f"false: {text}"
