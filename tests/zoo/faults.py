"What can be wrong, as a table: each fault changes the machines of a run, or its code, before a step is made."

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache

from rl_notebook.core.types import Datum, PromptGroup
from rl_notebook.core.datums import datums_from_groups
from rl_notebook.runs.records import StepRecord

from .machines import cast_parameters
from .steps import Run, World, open_run

# as the doctor says it
NONE = "none of the known causes"
CLEAN = "no mismatch"


PLAIN = World()


@dataclass(frozen=True, eq=False)
class Fault:
    "One thing that is wrong, or nothing."

    right: tuple[str, ...]  # causes that are right answers
    # (run) -> arguments of `Run.step`, or nothing, or an awaitable of it
    make: Callable[[Run], Any]
    world: World = PLAIN
    later: int = 0  # updates, and syncs, between the step and its diagnosis

    async def step(self) -> tuple[Run, StepRecord]:
        "A run, and its step with the fault."
        run = await open_run(self.world)
        result = self.make(run)
        record = await run.step(**((await result if inspect.isawaitable(result) else result) or {}))
        if self.later:
            await run.update(self.later)
        return run, record


def set_fields(machine: Any, **fields: Any) -> None:
    "Turn switches of a machine."
    for name, value in fields.items():
        assert hasattr(machine, name)
        setattr(machine, name, value)


# --- machines -----------------------------------------------------------------------------------------------------


def force_sampling(run: Run, reports: str = "processed", **arguments: Any) -> None:
    "The server samples so, whatever is asked."
    set_fields(run.server, forced=arguments, reports=reports)


def raw_at(run: Run, t: float) -> dict[str, Any]:
    "All agree on a temperature, at which the server samples, and does not report."
    (
        set_fields(run.trainer, temperature=t),
        set_fields(run.reference, temperature=t),
        set_fields(run.server, reports="raw"),
    )
    return {"temperature": t}


def through_text(run: Run, change: Callable[[str], str]) -> None:
    "The server is sent text, and renders it in its own way."
    words = run.tokenizer
    set_fields(
        run.server,
        reads=lambda ids: words(change(words.decode(ids)), add_special_tokens=False)["input_ids"],
    )


def templated(run: Run) -> None:
    "The server has another template, for the last thing that the user said."

    def last(text):
        return text.split("<|user|>")[-1].split("<|assistant|>")[0].replace("<|end|>", "")

    through_text(run, lambda text: f"<|bos|>Q: {last(text)}\nA: ")


async def late(run: Run, updates: int) -> None:
    "The server has earlier weights, and its versions show it."
    await run.update(updates, publish=False)
    run.trainer.version += updates


async def part_left_behind(run: Run, part: str, updates: int) -> None:
    "Weights whose name has this part never reach the server."
    set_fields(run.sync, travels=lambda name: part not in name)
    for _ in range(updates):
        await run.update()


def decoding_elsewhere(run: Run, position: int) -> None:
    "The server computes each token that it has sampled itself as if it stood at this position."
    forward = run.server.model.forward

    def misplaced(*args: Any, **kwargs: Any) -> Any:
        ids = kwargs.get("input_ids")
        if ids is not None and ids.shape[-1] == 1:
            kwargs["position_ids"] = torch.full_like(ids, position)
        return forward(*args, **kwargs)

    run.server.model.forward = misplaced


async def cache_of_older_weights(run: Run, updates: int) -> None:
    "The server reads prompts from a cache of keys and values that earlier weights have made."
    older = copy.deepcopy(run.server.model)
    await run.update(updates)
    generate = run.server.model.generate

    def cached(ids: torch.Tensor, **options: Any) -> Any:
        empty = DynamicCache(config=older.config)
        with torch.no_grad():
            cache = older(ids[:, :-1], use_cache=True, past_key_values=empty).past_key_values
        return generate(ids, past_key_values=cache, **options)

    run.server.model.generate = cached


class CacheOf8Bits(DynamicCache):
    "Keeps keys and values in 8 bits; a prompt is computed with those that it has just made."

    def update(self, keys: torch.Tensor, values: torch.Tensor, *layer: Any, **options: Any) -> Any:
        rounded = [x.to(torch.float8_e4m3fn).to(x.dtype) for x in (keys, values)]
        kept = super().update(*rounded, *layer, **options)
        return kept if keys.shape[-2] == 1 else (keys, values)


def kept_in_8_bits(run: Run) -> None:
    generate = run.server.model.generate
    config = run.server.model.config
    run.server.model.generate = lambda ids, **options: generate(
        ids, past_key_values=CacheOf8Bits(config=config), **options
    )


async def adapter_left_behind(run: Run, updates: int) -> None:
    set_fields(run.sync, scale=0.0)
    for _ in range(updates):
        await run.update()


@torch.no_grad()
def quantised(model: nn.Module, bits: int) -> None:
    "Weights of linear layers as whole multiples of 1/(2**(bits-1)-1) of the largest in their row."
    for module in model.modules():
        if isinstance(module, nn.Linear):
            step = module.weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
            module.weight.copy_((module.weight / step).round() * step)


def rotary(model: nn.Module, base: float) -> None:
    "Rotary positions of another base."
    [module] = [m for m in model.modules() if hasattr(m, "inv_freq")]
    half = len(module.inv_freq)
    module.inv_freq.copy_(base ** -(torch.arange(half) / half))


@torch.no_grad()
def reordered(model: Any, ids: slice) -> None:
    "The embeddings of some ids in another order: those of another tokenizer."
    for rows in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
        rows[ids] = rows[ids].roll(1, 0)


def dropped(run: Run, p: float) -> None:
    "The trainer is left in training mode, with dropout in its attention."
    for module in run.trainer.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = p
    set_fields(run.trainer, training=True)


def packed(run: Run) -> None:
    "The trainer reads the sequence before in front of each: rows are packed, and not kept apart."
    score = run.trainer.score

    def leaking(datums: Sequence[Datum]) -> list[torch.Tensor]:
        fronts = [datums[0].tokens[:0], *(d.tokens for d in datums[:-1])]
        longer = [
            Datum(np.r_[x, d.tokens], np.r_[0.0 * x, d.weights])
            for x, d in zip(fronts, datums, strict=True)
        ]
        return [s[len(x) :] for s, x in zip(score(longer), fronts, strict=True)]

    set_fields(run.trainer, score=leaking)


async def other_reference(run: Run) -> None:
    "The reference is a later policy."
    await run.update(1, publish=False)
    set_fields(run.reference, model=copy.deepcopy(run.reference.model))
    run.reference.take(run.trainer.states[await run.trainer.save_state("later")])
    await run.update(-1, publish=False)


# --- bookkeeping: from samples to datums, by code that has a bug --------------------------------------------------


def with_changed_logprobs(
    groups: Sequence[PromptGroup], change: Callable[[list[np.ndarray]], list[np.ndarray]]
) -> list[Datum]:
    "Datums whose logprobs of completions were changed, and cut or filled up with zeros where they do not fit."
    datums = datums_from_groups(groups)
    out = []
    for d, values in zip(
        datums, change([d.sampler_logprobs[d.active] for d in datums]), strict=True
    ):
        series = np.full(len(d.weights), np.nan)
        series[d.active] = np.r_[values, np.zeros(d.num_loss_tokens)][: d.num_loss_tokens]
        out.append(replace(d, sampler_logprobs=series))
    return out


def off_by_one(groups: Sequence[PromptGroup]) -> list[Datum]:
    return with_changed_logprobs(groups, lambda values: [np.r_[v[1:], 0.0] for v in values])


def first_is_zero(groups: Sequence[PromptGroup]) -> list[Datum]:
    return with_changed_logprobs(groups, lambda values: [np.r_[0.0, v[1:]] for v in values])


def of_next_group(groups: Sequence[PromptGroup]) -> list[Datum]:
    n = len(groups[0].samples)
    return with_changed_logprobs(groups, lambda values: [*values[n:], *values[:n]])


def by_arrival(groups: Sequence[PromptGroup]) -> list[Datum]:
    "The short ones of each group were done first."
    each = len(groups[0].samples)

    def order(values):
        return sorted(range(len(values)), key=lambda i: (i // each, len(values[i])))

    return with_changed_logprobs(groups, lambda values: [values[i] for i in order(values)])


def eos_has_no_logprob(groups: Sequence[PromptGroup]) -> list[Datum]:
    ends = [s.finish_reason == "stop" for g in groups for s in g.samples]
    return with_changed_logprobs(
        groups,
        lambda values: [
            np.r_[v[:-1], np.nan] if e else v for v, e in zip(values, ends, strict=True)
        ],
    )


def end_appended(groups: Sequence[PromptGroup]) -> list[Datum]:
    "Completions that were cut get an end token, with a logprob of 0."
    cut = [s.finish_reason != "stop" for g in groups for s in g.samples]
    return [
        replace(
            d,
            tokens=np.r_[d.tokens, 2],
            weights=np.r_[d.weights, 1.0],
            sampler_logprobs=np.r_[d.sampler_logprobs, 0.0],
        )
        if is_cut
        else d
        for d, is_cut in zip(datums_from_groups(groups), cut, strict=True)
    ]


def prompt_in_mask(groups: Sequence[PromptGroup]) -> list[Datum]:
    filled = [
        replace(d, sampler_logprobs=np.nan_to_num(d.sampler_logprobs))
        for d in datums_from_groups(groups)
    ]
    return [replace(d, weights=np.ones(len(d.weights))) for d in filled]


# --- the table ----------------------------------------------------------------------------------------------------

TEMPERATURE, CUT, BIAS, STALE, TEXT, DTYPE = ("temperature",), ("top-p or top-k",), ("bias or penalty",), ("stale weights",), ("BOS or template",), ("dtype or batching",)  # fmt: skip
PART = ("part of the weights does not arrive",)
LORA = World(lora_rank=8, learning_rate=1e-3)


def use_collate(collate):
    return lambda run: {"collate": collate}


# fmt: off
FAULTS: dict[str, Fault] = {
    "the server has its own temperature": Fault(TEMPERATURE, lambda run: force_sampling(run, temperature=0.6)),
    "the trainer has its own temperature": Fault(TEMPERATURE, lambda run: set_fields(run.trainer, temperature=0.8)),
    "raw is reported where a temperature was asked": Fault(TEMPERATURE, lambda run: raw_at(run, 0.7)),
    "the server has its own top-k": Fault(CUT, lambda run: force_sampling(run, top_k=2)),
    "the server cuts, and reports raw": Fault(CUT, lambda run: force_sampling(run, "raw", top_p=0.6)),
    "the server penalises repetition": Fault(BIAS, lambda run: force_sampling(run, repetition_penalty=1.5)),
    "the server forbids the end token": Fault(BIAS, lambda run: force_sampling(run, suppress_tokens=[run.tokenizer.eos_token_id])),
    "the server has its own temperature, in half precision":
        Fault(TEMPERATURE, lambda run: force_sampling(run, temperature=0.7), World(dtype="bfloat16")),
    "the server penalises repetition, in half precision":
        Fault(BIAS, lambda run: force_sampling(run, repetition_penalty=1.3), World(dtype="bfloat16", seed=3)),
    "the server cuts, in half precision": Fault(CUT, lambda run: force_sampling(run, top_k=3), World(dtype="bfloat16", seed=5)),
    "the server has its own temperature, cut and penalty":
        Fault((*TEMPERATURE, *CUT, *BIAS), lambda run: force_sampling(run, temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05)),
    "another template": Fault(TEXT, templated),
    "the server adds bos to everything": Fault(TEXT, lambda run: set_fields(run.server, prefix=(run.tokenizer.bos_token_id,))),
    "the server puts a token of the template in front": Fault(TEXT, lambda run: set_fields(run.server, prefix=(4,))),
    "and in half precision": Fault(TEXT, lambda run: set_fields(run.server, prefix=(3,)), World(dtype="bfloat16", seed=17)),
    "the server loses the first token, and both learn before they are asked":
        Fault(TEXT, lambda run: set_fields(run.server, reads=lambda ids: ids[1:]), World(warm_up=0, learning_rate=1e-3), 3),
    "the server reports the likeliest token": Fault((NONE,), lambda run: set_fields(run.server, reports="likeliest")),
    "rollouts are late": Fault(STALE, lambda run: late(run, 2)),
    "rollouts are late, and cool": Fault(STALE, lambda run: late(run, 2), World(temperature=0.8)),
    "the adapter does not travel": Fault((*STALE, *PART), lambda run: adapter_left_behind(run, 3), LORA),
    "the feed-forward layers do not travel":
        Fault(PART, lambda run: part_left_behind(run, "mlp", 4), World(learning_rate=2e-4)),
    "the server decodes at another position": Fault(("decoding",), lambda run: decoding_elsewhere(run, 3)),
    "the server reads prompts from a cache of older weights":
        Fault(("decoding",), lambda run: cache_of_older_weights(run, 4), World(learning_rate=3e-4)),
    "the server keeps keys and values in 8 bits": Fault(("decoding",), kept_in_8_bits),
    "the server computes in half precision":
        Fault(DTYPE, lambda run: set_fields(run.server, model=cast_parameters(run.server.model, torch.bfloat16))),
    "the server has weights of 4 bits": Fault((NONE,), lambda run: run.server.alter(partial(quantised, bits=4))),
    "the server has another rope base": Fault((NONE,), lambda run: run.server.alter(partial(rotary, base=1e5))),
    "the trainer pads on the left and does not say so":
        Fault(("padding side",), lambda run: set_fields(run.trainer, pads_left=True, tells=(), batch=16)),
    "the trainer packs rows and reads across them": Fault(("padding side",), packed),
    "dropout": Fault(("dropout",), lambda run: dropped(run, 0.1)),
    "the server has another vocabulary":
        Fault(("vocabulary",), lambda run: run.server.alter(partial(reordered, ids=slice(40, 240)))),
    "off by one": Fault(("shift",), use_collate(off_by_one)),
    "the first logprob is 0": Fault(("filled in",), use_collate(first_is_zero)),
    "logprobs of another group": Fault(("wrong group",), use_collate(of_next_group)),
    "logprobs by arrival": Fault(("rows permuted",), use_collate(by_arrival)),
    "eos has no logprob": Fault(("non-finite",), use_collate(eos_has_no_logprob)),
    "an end token is appended": Fault(("filled in",), use_collate(end_appended), World(max_tokens=8)),
    "the prompt is trained": Fault(("mask leak",), use_collate(prompt_in_mask)),
    "another reference": Fault(("wrong reference",), other_reference, World(warm_up=0)),
    "a step": Fault((CLEAN,), lambda run: None),
    "several updates": Fault((CLEAN,), lambda run: {"minibatches": 3}, LORA),
    "two turns": Fault((CLEAN,), lambda run: {"turns": 2}),
    "half precision on both sides": Fault((CLEAN, *DTYPE), lambda run: None, World(dtype="bfloat16")),
    "and hot": Fault((CLEAN, *DTYPE), lambda run: None, World(dtype="bfloat16", temperature=1.3)),
}
# fmt: on
