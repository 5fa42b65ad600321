"A run in the zoo: real updates, then one real step, as far as the record that the doctor reads."

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rl_notebook.core.advantages import with_advantages
from rl_notebook.backends.base import Backend
from rl_notebook.task.chat import start_conversation
from rl_notebook.core.types import (
    AdamParams,
    Datum,
    LossOutput,
    PromptGroup,
    RolloutSample,
    SampleParams,
)
from rl_notebook.task.data import load_rows
from rl_notebook.core.datums import attach, datums_from_groups
from rl_notebook.core.losses import make_loss_fn
from rl_notebook.runs.records import StepRecord
from rl_notebook.loop.rollouts import assemble, sample_completions, encode_rows, minibatch_slices
from rl_notebook.task.data import Prompt, Rollouts
from rl_notebook.loop.step import evaluate_loss, merge_outputs
from rl_notebook.task.toy import toy_rows

from .machines import (
    Server,
    Sync,
    Trainer,
    Weights,
    assemble_backend,
    cast_parameters,
    shipped_model,
    with_adapter,
)


@dataclass(frozen=True)
class World:
    "What trainer and server have in common, and how large a step is."

    dtype: str = "float32"  # of both
    lora_rank: int = 0
    temperature: float = 1.0  # asked of the server, and divided by in the trainer
    can_echo: bool = True
    prompts: int = 4
    completions: int = 4
    max_tokens: int = 24
    learning_rate: float = 5e-5
    warm_up: int = 2  # updates before the step
    seed: int = 0  # of its updates


LEARNS = ("dtype", "lora_rank", "learning_rate", "seed")  # what decides a history


@functools.cache
def history(learns: tuple[Any, ...]) -> list[Weights]:
    "Weights after 0, 1, 2, ... real updates of a world; grows."
    return []


def reinforce(
    datums: Sequence[Datum], logprobs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    "A custom loss, which does not look at the sampler's logprobs."
    parts = [
        -d.advantage * lp[torch.from_numpy(d.active)].sum()
        for d, lp in zip(datums, logprobs, strict=True)
    ]
    return torch.stack(parts).sum(), {}


class Run:
    "Machines of a world after its warm-up, in agreement. A fault changes them, then makes a step."

    def __init__(self, world: World):
        self.world = world
        model, self.tokenizer = shipped_model("tiny")
        dtype = getattr(torch, world.dtype)
        pad = self.tokenizer.pad_token_id
        base = copy.deepcopy(model)
        base.set_attn_implementation("eager")
        learner = with_adapter(base, world.lora_rank) if world.lora_rank else base
        options = {"pad": pad, "temperature": world.temperature, "dtype": dtype}
        self.trainer = Trainer(learner, **options)
        self.reference = Trainer(model, source="reference", **options)
        self.server = Server(
            cast_parameters(copy.deepcopy(model), dtype), self.tokenizer, can_echo=world.can_echo
        )
        self.sync = Sync(self.trainer, self.server, model.state_dict())
        self.updates = 0

    @property
    def backend(self) -> Backend:
        "What `diagnose` is given."
        return assemble_backend(
            self.trainer, self.reference, self.server, self.sync, self.world.lora_rank
        )

    async def publish(self) -> None:
        "Sync the server."
        await self.sync(await self.trainer.save_weights_for_sampler(f"step-{self.updates}"))

    async def update(self, times: int = 1, *, publish: bool = True) -> None:
        "So many further updates of the trainer, made once for all runs of a world; then a sync."
        past = history(tuple(getattr(self.world, name) for name in LEARNS))
        self.updates += times
        if len(past) <= self.updates:
            await learn(self.world, past, self.updates)
        self.trainer.take(past[self.updates])
        if publish:
            await self.publish()

    async def sample(
        self, prompts: Sequence[Prompt], turns: int, params: SampleParams
    ) -> list[Rollouts]:
        "Completions, or conversations of several turns."
        if turns == 1:
            return [await sample_completions(self.server, p, params) for p in prompts]
        return [
            Rollouts(
                p, tuple([await self.play_turns(p, turns, i, params) for i in range(params.n)])
            )
            for p in prompts
        ]

    async def play_turns(
        self, prompt: Prompt, turns: int, index: int, params: SampleParams
    ) -> RolloutSample:
        "One conversation, whose answers meet with the same words each time."
        conversation = start_conversation(self.tokenizer, prompt.row)
        for turn in range(turns):
            conversation = (
                conversation.add_messages({"role": "user", "content": "Check it, step by step."})
                if turn
                else conversation
            )
            request = replace(
                params, n=1, seed=(params.seed or 0) + 1000 * prompt.number + 10 * index + turn
            )
            conversation = conversation.add_completion(
                (await self.server.sample(conversation.tokens, request))[0]
            )
        return conversation.to_sample()

    async def step(
        self,
        *,
        collate: Callable[[list[PromptGroup]], Sequence[Datum]] = datums_from_groups,
        turns: int = 1,
        minibatches: int = 1,  # updates of the step
        **params: Any,  # of SampleParams
    ) -> StepRecord:
        "Sample, grade, score; the trainer is left, or put back, where its first logprobs are from."
        w = self.world
        first = self.updates * self.world.prompts
        seed = 10_000 * w.seed + self.updates
        asked = SampleParams(
            n=w.completions, max_tokens=w.max_tokens, temperature=w.temperature, seed=seed
        )
        rows = load_rows(toy_rows(w.prompts, seed=seed))
        prompts = encode_rows(rows, self.tokenizer, first_number=first)
        sampled = await self.sample(prompts, turns, replace(asked, **params))
        graded = [
            assemble(r, [replace(s, reward=float(len(s.text) % 5)) for s in r.samples])
            for r in sampled
        ]
        groups = with_advantages(graded)
        datums = list(collate(groups))
        datums = attach(datums, "ref_logprobs", await self.reference.forward(datums))
        if minibatches > 1:
            datums = attach(datums, "old_logprobs", await self.trainer.forward(datums))
        parts = [datums[part] for part in minibatch_slices(len(datums), minibatches)]
        if minibatches > 1:
            loss = await self.updated(parts)
        else:
            loss = evaluate_loss(
                datums, await self.trainer.forward(datums), lambda datums, _: reinforce
            )
        sizes = tuple(map(len, parts))
        more = {
            "policy_version": self.server.version,
            "passes": sizes,
            "updates": sizes if minibatches > 1 else (),
        }
        return StepRecord(self.updates + 1, tuple(groups), tuple(datums), loss, **more)

    async def updated(self, parts: Sequence[Sequence[Datum]]) -> LossOutput:
        "The losses of several updates, after which the weights are put back."
        here = await self.trainer.save_state("here")
        outputs = []
        for part in parts:
            outputs.append(await self.trainer.forward_backward_custom(part, make_loss_fn(part)))
            await self.trainer.optim_step(AdamParams(learning_rate=self.world.learning_rate))
        await self.trainer.load_state(here)
        return merge_outputs(outputs)


async def learn(world: World, past: list[Weights], updates: int) -> None:
    "Make the updates that a history lacks, from its beginning if there is none."
    usual = {"temperature": 1.0, "can_echo": True, "prompts": 4, "completions": 4, "max_tokens": 24}
    run = Run(replace(world, **usual))
    if not past:
        past.append(run.trainer.states[await run.trainer.save_state("0")])
    run.updates = len(past) - 1
    run.trainer.take(past[-1])
    while len(past) <= updates:
        await run.publish()
        record = await run.step()
        await run.trainer.forward_backward_custom(record.datums, make_loss_fn(record.datums))
        await run.trainer.optim_step(AdamParams(learning_rate=world.learning_rate))
        run.updates += 1
        past.append(run.trainer.states[await run.trainer.save_state(str(run.updates))])


async def open_run(world: World) -> Run:
    "A run after its warm-up."
    run = Run(world)
    if world.warm_up:
        await run.update(world.warm_up, publish=False)
        run.server.version = world.warm_up - 1
        await run.publish()
    return run


def gap(record: StepRecord) -> float:
    "The largest difference of sampler and trainer at a trained token, nats."
    assert record.loss is not None
    pairs = zip(record.datums, record.loss.logprobs, strict=True)
    return max(float(np.abs(d.sampler_logprobs - lp.values)[d.active].max()) for d, lp in pairs)
