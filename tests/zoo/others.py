"""Faults for the doctor by people who had not read it: kinds that no other part has, many of real reports.

What is right was decided before any answer was seen. A cause is right if its remedy in `causes.FIXES` ends the fault.
Where another sync does not end it, weights that are old cannot be told from other arithmetic, and `NONE` is right, too.
A law of the draw that keeps only some tokens, but is no top-p and no top-k, may be called by their name or by none; one
that changes the ranking is none of them. What a run asks for by name is no fault; a server that does or tells something
else is one."""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import WatermarkingConfig

from rl_notebook.chat import start_conversation
from rl_notebook.core import AdamParams, BackendError, Completion, Datum, PromptGroup, RolloutSample, SampleParams
from rl_notebook.datums import datums_from_groups
from rl_notebook.losses import make_loss_fn
from rl_notebook.rollouts import Prompt, Rollouts, draw_completions

from .faults import (
    CLEAN, CUT, DROPOUT, DTYPE, LEAK, PADDING, SHIFT, STALE, TEMPERATURE, TEXT, UNKNOWN, WORLDS, Kind, both, every,
    fitted, forced, late, paired, put, quantised, reordered, reprompted, rotary, scored_late, through_text, told,
    weighed, windowed,
)  # fmt: skip
from .machines import Trainer, seeded
from .steps import Run, World
from .unseen import (
    GROUPS, NAN, REFERENCE, ROWS, VOCABULARY, alternatives, biased, collated, continued, hooked, ids_of, parsed,
    processed, retold, retyped, server, tied, trainer,
)  # fmt: skip

WORLDS |= {
    "limpid": World(temperature=1.35, completions=6),
    "crisp": World(temperature=0.65, prompts=6),
    "sober": World(temperature=0.85, prompts=3, completions=6),
    "hushed": World(can_echo=False, prompts=5, warm_up=3),
    "hushed crisp": World(can_echo=False, temperature=0.65, prompts=5, completions=5),
    "slender": World(lora_rank=3, learning_rate=2e-3, completions=5),
    "burly": World(lora_rank=28, learning_rate=6e-4, prompts=5),
    "slender sober": World(lora_rank=3, learning_rate=2e-3, temperature=0.85, prompts=5),
    "parade": World(prompts=10, max_tokens=20),
    "well": World(prompts=2, completions=12, max_tokens=30),
    "curt": World(prompts=6, completions=6, max_tokens=10),
    "fluent": World(prompts=3, max_tokens=52),
    "fervid": World(learning_rate=1.2e-4, prompts=5),
    "half crisp": World(dtype="bfloat16", temperature=0.65, completions=5),
    "half slender": World(dtype="bfloat16", lora_rank=3, learning_rate=2e-3, prompts=5),
    "half hushed": World(dtype="bfloat16", can_echo=False, prompts=6),
    "seedling": World(warm_up=0, prompts=5),
    "seedling crisp": World(warm_up=0, temperature=0.65, completions=5),
    "seedling slender": World(warm_up=0, lora_rank=3, learning_rate=2e-3),
    "forum": World(prompts=6, completions=26),
    "forum slender": World(prompts=5, completions=28, lora_rank=3, learning_rate=2e-3),
    "forum hushed": World(prompts=3, completions=44, can_echo=False),
}
SOME = ("crisp", "hushed", "slender", "well", "parade", "limpid", "fluent", "fervid")  # taken in turns
EVEN = ("hushed", "burly", "well", "parade", "slender", "fervid", "fluent")  # at temperature 1
SEVERAL = ("sober", "slender", "hushed", "parade", "crisp", "burly", "curt")  # groups
TEMPERED = ("crisp", "limpid", "slender sober", "hushed crisp")
WHOLE = ("crisp", "hushed", "parade", "fervid")  # without an adapter
ADAPTED = ("slender", "burly", "slender sober")
HIDDEN = ("forum", "forum slender", "forum hushed")  # at temperature 1, with many tokens
SEEDLINGS = ("seedling", "seedling crisp", "seedling slender")
HALVES = ("half crisp", "half slender", "half hushed")


def by_place(run: Run, change: Callable[[int, Tensor], Tensor], **fields: Any) -> None:
    "The server changes scores (B, V) by how many tokens have been drawn."
    inner = run.server.sample

    async def sample(prompt, params):
        start = len(run.server.fed(run.server.reads([int(t) for t in prompt])))
        processed(run, lambda ids, scores: change(ids.shape[1] - start, scores), **fields)
        return await inner(prompt, params)

    put(run.server, sample=sample)


def falling(run: Run, end: float, **fields: Any) -> None:
    "The temperature goes from the one asked for to another within 12 tokens."
    by_place(run, lambda i, scores: scores / (1 + (end - 1) * min(i / 12, 1)), **fields)


def best(scores: Tensor, k: int) -> Tensor:
    "Scores of the k likeliest."
    return scores.masked_fill(scores < scores.topk(k).values[..., -1:], -torch.inf)


def listed_anew(listed: Tensor, ids: np.ndarray, most: int) -> np.ndarray:
    "Logprobs normalised over what is listed: the likeliest, and the token itself."
    own = listed.gather(-1, torch.tensor(ids)[:, None])
    kept = listed.masked_fill((listed < listed.topk(most).values[:, -1:]) & (listed != own), -torch.inf)
    return (own[:, 0] - kept.logsumexp(-1)).double().numpy()


def best_of(run: Run, several: int) -> None:
    "The server draws several times as many, and returns those with the highest mean logprob."
    inner = run.server.sample

    async def sample(prompt, params):
        drawn = await inner(prompt, replace(params, n=params.n * several))
        put(run.server, variations=[], evidence=math.nan)  # nobody knows the law of what is returned
        parts = [drawn[at : at + several] for at in range(0, len(drawn), several)]
        return [replace(max(part, key=lambda c: c.logprobs.mean()), params=params) for part in parts]

    put(run.server, sample=sample)


def significant(v: np.ndarray, digits: int) -> np.ndarray:
    return np.array(json.loads(json.dumps([float(f"{x:.{digits}g}") for x in v])))


SHOTS = [("1+2+3 = ?", "3 6 #### 6"), ("What is 2+2?", "#### 4"), ("Add up 5, 1, 1.", "6 7 #### 7")]


def shown(n: int) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    "Rows with so many examples before the question."
    said = [{"role": r, "content": c} for pair in SHOTS[:n] for r, c in zip(("user", "assistant"), pair, strict=True)]
    return lambda rows: [{"messages": [*said, {"role": "user", "content": r["question"]}]} for r in rows]


async def diverged(run: Run, rate: float) -> None:
    "An update that was far too large."
    datums = (await run.step()).datums
    await run.trainer.forward_backward_custom(datums, make_loss_fn(datums))
    await run.trainer.optim_step(AdamParams(learning_rate=rate))
    run.updates += 1


@torch.no_grad()
def other_rows(model: Any, ids: list[int], embed: bool) -> None:
    "Some rows of the first matrix, or of the last, are those of another vocabulary."
    weight = (model.get_input_embeddings() if embed else model.get_output_embeddings()).weight
    weight[ids] = weight[ids].roll(1, 0)


def rowwise(machine: Trainer, one: Callable[[Any, Datum], Tensor]) -> None:
    "A trainer that scores (N-1,) row by row."

    def score(datums: Sequence[Datum]) -> list[Tensor]:
        model = machine.scorer()
        model.train(machine.training)
        holes = [torch.from_numpy(np.where(d.active, 0.0, np.nan)).float() for d in datums]
        return [one(model, d) + hole for d, hole in zip(datums, holes, strict=True)]

    put(machine, score=score)


def logits_of(machine: Trainer, model: Any, ids: Any, **more: Any) -> Tensor:  # (N, V)
    return model(torch.tensor([list(map(int, ids))]), **more, use_cache=False).logits[0].float() / machine.temperature


def picked(logits: Tensor, ids: Any) -> Tensor:  # (C,)
    "Logprobs of ids (C,) under logits (C, V)."
    return logits.log_softmax(-1).gather(-1, torch.tensor(list(map(int, ids)))[:, None])[:, 0]


def counted_without(run: Run, first: int) -> None:
    "The trainer puts a token before each sequence, and reads its table as if it had not."
    rowwise(run.trainer, lambda model, d: picked(
        logits_of(run.trainer, model, [first, *d.tokens])[: len(d.weights)], d.tokens[: len(d.weights)]))  # fmt: skip


def rotated(groups: Sequence[PromptGroup], first: int) -> list[Datum]:
    "Of each group, one request failed and was made again, so that its logprobs come last."
    datums = datums_from_groups(groups)
    values, size = told(datums), len(groups[0].samples)
    parts = [values[at : at + size] for at in range(0, len(values), size)]
    return paired(datums, [v for part in parts for v in (*part[:first], *part[first + 1 :], part[first])])


def last_first(groups: Sequence[PromptGroup], every: int) -> list[Datum]:
    "Logprobs of a group are taken off a stack."
    datums = datums_from_groups(groups)
    values, size = told(datums), len(groups[0].samples)
    parts = [values[at : at + size] for at in range(0, len(values), size)]
    return paired(datums, [v for i, part in enumerate(parts) for v in (part if i % every else part[::-1])])


def other_way(groups: Sequence[PromptGroup], _: Any) -> list[Datum]:
    "Completions are laid out by number, and read by prompt."
    datums, size = datums_from_groups(groups), len(groups[0].samples)
    homes = [groups[(d.sample * len(groups) + d.group) // size].samples[0] for d in datums]
    return reprompted(datums, [home.tokens[: home.prompt_len] for home in homes])


def failed(groups: Sequence[PromptGroup], how: str | int) -> list[Datum]:
    "Some requests, or the first token of all, came back with null."
    datums = datums_from_groups(groups)
    if how == "first":
        return paired(datums, [np.r_[np.nan, v[1:]] for v in told(datums)])
    return paired(datums, [v * np.nan if i < int(how) else v for i, v in enumerate(told(datums))])


def without_first(run: Run, n: int) -> None:
    "The reference is shown sequences without their first tokens."
    machine = run.reference

    def one(model: Any, d: Datum) -> Tensor:
        found = picked(logits_of(machine, model, d.tokens[n:])[:-1], d.tokens[n + 1 :])
        return torch.cat([torch.zeros(n), found])

    rowwise(machine, one)


def agreed(run: Run, t: float) -> dict[str, Any]:
    "All agree on a temperature."
    put(run.trainer, temperature=t), put(run.reference, temperature=t)
    return {"temperature": t}


def kept(scores: Tensor, mask: Tensor) -> Tensor:
    "Scores where a mask is true, and the likeliest."
    return scores.masked_fill(~(mask | (scores == scores.amax(-1, keepdim=True))), -torch.inf)


def nucleus(scores: Tensor, p: float) -> Tensor:
    law, order = scores.float().softmax(-1).sort(-1, descending=True)
    inside = law.cumsum(-1) - law < p
    return kept(scores, torch.zeros_like(inside).scatter(-1, order, inside))


def with_ids(run: Run, change: Callable[[int, Tensor, Tensor], Tensor], **fields: Any) -> None:
    "The server changes scores (B, V) by how many tokens have been drawn, and by ids (B, N)."
    inner = run.server.sample

    async def sample(prompt, params):
        start = len(run.server.fed(run.server.reads([int(t) for t in prompt])))
        processed(run, lambda ids, scores: change(ids.shape[1] - start, scores, ids), **fields)
        return await inner(prompt, params)

    put(run.server, sample=sample)


def with_noise(scores: Tensor, size: float) -> Tensor:
    return scores + size * torch.randn_like(scores)


def of_a_neighbour(listed: Tensor, ids: np.ndarray, by: int) -> np.ndarray:
    "Logprobs of tokens under the law of the step before, or after."
    place = (torch.arange(len(ids)) + by).clamp(0, len(ids) - 1)
    return listed[place].gather(-1, torch.tensor(ids)[:, None])[:, 0].double().numpy()


def outside(groups: Sequence[PromptGroup], run: Run, p: float) -> list[Datum]:
    "What is not in a nucleus, from which nobody drew, has the logprob of what is impossible."
    datums = datums_from_groups(groups)
    ids = [d.tokens[1:][d.active] for d in datums]
    laws = [logits_of(run.trainer, run.server.model, d.tokens)[:-1][d.active] for d in datums]
    return paired(datums, [picked(nucleus(w, p), i).detach().double().numpy() for w, i in zip(laws, ids, strict=True)])


def logs_of_rounded(v: np.ndarray, digits: int) -> np.ndarray:
    return np.log(np.maximum(np.round(np.exp(v), digits), 1e-9))


def in_bytes(v: np.ndarray, steps: float) -> np.ndarray:
    "Numbers as bytes, in so many steps per nat."
    return np.clip(np.round(v * steps), -128, 127).astype(np.int8) / steps


def over_the_end(run: Run, most: int, scored: bool) -> None:
    "Completions that ended are filled up with padding, like their batch, and nobody cuts that off."

    def says(c: Completion) -> Completion:
        n = min(most, c.params.max_tokens - len(c.tokens)) if c.finish_reason == "stop" else 0
        whole = replace(c, tokens=np.r_[c.tokens, [run.trainer.pad] * n].astype(int),
                        **{name: np.r_[getattr(c, name), np.zeros(n)] for name in ("logprobs", "sampling_logprobs")})  # fmt: skip  # noqa: E501
        if not scored:
            return whole
        ids = torch.tensor(whole.tokens)[:, None]
        return replace(whole, **{name: alternatives(run, whole, t).gather(-1, ids)[:, 0].double().numpy() for name, t in
                                 (("logprobs", 1.0), ("sampling_logprobs", c.params.temperature or 1.0))})  # fmt: skip

    put(run.server, says=says)


def goes_on(run: Run, words: str) -> None:
    "A completion may not end: words take the place of its end, and it goes on."
    inner, put_in = run.server.sample, ids_of(run, words)
    cut = lambda c: {n: getattr(c, n)[:-1] for n in ("tokens", "logprobs", "sampling_logprobs")}

    async def sample(prompt, params):
        drawn = await inner(prompt, params)
        open_ended = [replace(c, **cut(c), finish_reason="length") if c.finish_reason == "stop" else c for c in drawn]
        return [await continued(inner, c, params, put_in) for c in open_ended]

    put(run.server, sample=sample)


def only(run: Run, scores: Tensor, text: str) -> Tensor:
    "Scores of some tokens."
    return torch.full_like(scores, -torch.inf).index_copy_(
        1, torch.tensor(ids_of(run, text)), scores[:, ids_of(run, text)]
    )


async def one_layer_on(run: Run, by: int) -> None:
    "What layers have learned is written into other layers."
    base, load = run.sync.base, run.server.load
    other = lambda n: re.sub(r"layers\.(\d)", lambda m: f"layers.{(int(m[1]) + by) % 4}", n)
    put(run.server, load=lambda new: load({n: base[n] + new[other(n)] - base[other(n)] for n in new}))
    await run.update(2)


@torch.no_grad()
def never_filled(model: Any, ids: list[int]) -> None:
    "Embeddings for which there was memory, and nothing else."
    model.get_input_embeddings().weight[ids] = torch.nan


def masked(model: Any, change: Callable[[Tensor], Tensor]) -> None:
    "The model is given another attention mask."
    model.register_forward_pre_hook(
        lambda m, args, told: (args, told | {"attention_mask": change(told["attention_mask"])}), with_kwargs=True
    )


def hides(mask: Tensor, n: int) -> Tensor:
    "A mask that takes the first tokens for padding."
    return mask * (torch.arange(mask.shape[1]) >= n)


def miscounted(groups: Sequence[PromptGroup], by: int) -> list[Datum]:
    "Prompts are found by a number of completions that is not theirs."
    datums, size = datums_from_groups(groups), len(groups[0].samples)
    home = [groups[min(i // (size + by), len(groups) - 1)].samples[0] for i in range(len(datums))]
    return reprompted(datums, [s.tokens[: s.prompt_len] for s in home])


def other_weights(groups: Sequence[PromptGroup], by: int) -> list[Datum]:
    "Weights of a row of another group."
    datums, size = datums_from_groups(groups), len(groups[0].samples)
    out = []
    for i, d in enumerate(datums):
        other = datums[(i + by * size) % len(datums)]
        weights = np.r_[other.weights, np.zeros(len(d.weights))][: len(d.weights)]
        assert d.sampler_logprobs is not None
        out.append(replace(d, weights=weights, sampler_logprobs=np.nan_to_num(d.sampler_logprobs)))
    return out


def room_for(groups: Sequence[PromptGroup], most: int) -> list[Datum]:
    "Logprobs are written into a table that was not filled, and is too narrow."
    datums = datums_from_groups(groups)
    return paired(datums, [np.where(np.arange(len(v)) < most, v, np.nan) for v in told(datums)])


def shifted_reference(run: Run, by: int) -> None:
    "The reference reads each logprob off a neighbouring position."
    score = run.reference.score
    put(run.reference, score=lambda datums: [s.nan_to_num(0.0).roll(by) for s in score(datums)])


on_server = lambda change, **fields: lambda run, x: processed(run, lambda ids, scores: change(scores, x), **fields)


in_reference = lambda alter: lambda run, x: put(run.reference, altered=lambda model: alter(model, x))


def with_tool(run: Run, n: int) -> dict[str, Any]:
    "A tool answers between the turns, in words that depend on what was said."

    async def talk(prompt: Prompt, turns: int, index: int, params: SampleParams) -> RolloutSample:
        said = start_conversation(run.tokenizer, prompt.row)
        for turn in range(turns):
            if turn:
                total = sum(map(int, re.findall(r"\d", said.text)))
                said = said.add_messages(
                    {"role": "system", "content": f"tool: {total}"}, {"role": "user", "content": "So?"}
                )
            own = replace(params, n=1, seed=(params.seed or 0) + 1000 * prompt.number + 10 * index + turn)
            said = said.add_completion((await run.sampler.sample(said.tokens, own))[0])
        return said.to_sample()

    put(run, talk=talk)
    return {"turns": 2 + n % 3}


def in_the_loss(run: Run, **fields: Any) -> None:
    "The trainer is another one while it computes gradients."
    inner = run.trainer.forward_backward_custom

    async def scored(datums, loss_fn):
        usual = {name: getattr(run.trainer, name) for name in fields}
        put(run.trainer, **fields)
        try:
            return await inner(datums, loss_fn)
        finally:
            put(run.trainer, **usual)

    put(run.trainer, forward_backward_custom=scored)


def divided_logprobs(run: Run, where: str) -> None:
    "Logprobs, and not logits, are divided by the temperature."
    t = run.world.temperature
    if where == "server":
        return put(run.server, says=lambda c: replace(c, sampling_logprobs=c.logprobs / t))
    return rowwise(
        run.trainer, lambda model, d: picked(t * logits_of(run.trainer, model, d.tokens)[:-1], d.tokens[1:]) / t
    )


def of_a_slot(run: Run, rows: int, change: Callable[[Tensor], Tensor]) -> None:
    "Some rows of a batch keep what another request asked for: vllm-project/vllm#14301."
    processed(run, lambda ids, scores: torch.cat([change(scores[:rows]), scores[rows:]]), reports="raw")


def where_sure(scores: Tensor, sure: float) -> Tensor:
    "Greedy where the best has such a share."
    return torch.where(scores.float().softmax(-1).amax(-1, keepdim=True) > sure, best(scores, 1), scores)


def evenly_begun(run: Run, k: int) -> None:
    "So that completions differ, their first token is any of the k likeliest."
    begin = lambda scores: torch.where(torch.isfinite(best(scores, k)), 0.0, -torch.inf)
    by_place(run, lambda i, scores: scores if i else begin(scores), reports="raw")


def of_the_base(run: Run, change: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> None:
    "What is told is made of own logprobs and of those of the model before any update."
    first = copy.deepcopy(run.server.model)
    first.load_state_dict({n: t.to(first.dtype) for n, t in run.sync.base.items()})
    other: Any = SimpleNamespace(server=replace(run.server, model=first))

    def says(c: Completion) -> Completion:
        ids = torch.tensor(c.tokens)[:, None]
        base = lambda t: alternatives(other, c, t).gather(-1, ids)[:, 0].double().numpy()
        series = (("logprobs", 1.0), ("sampling_logprobs", c.params.temperature or 1.0))
        return replace(c, **{n: change(getattr(c, n), base(t)) for n, t in series})

    put(run.server, says=says)


def in_chunks(v: np.ndarray, n: int) -> np.ndarray:
    "Logprobs that are a place late within each chunk of accepted tokens."
    return np.concatenate([np.roll(v[at : at + n], 1) for at in range(0, len(v), n)])


def with_echo(run: Run, _: Any) -> None:
    "The client asks for an echo, and takes the prompt for a part of the completion."

    @torch.no_grad()
    def says(c: Completion) -> Completion:
        read = run.server.fed(c.prompt_tokens)
        law = run.server.model(torch.tensor([read])).logits[0, :-1].float()
        told_of = {"logprobs": law, "sampling_logprobs": law / (c.params.temperature or 1.0)}
        own = {n: np.r_[0.0, picked(w, read[1:]).double().numpy(), getattr(c, n)] for n, w in told_of.items()}
        return replace(c, tokens=np.r_[c.prompt_tokens, c.tokens], **own)

    put(run.server, says=says)


async def known_by_id(run: Run, updates: int) -> None:
    "The server holds an adapter under an id, and does not load what comes under the same: vllm-project/vllm#42125."
    put(run.server, model=copy.deepcopy(run.trainer.model).eval(), load=lambda new: None)
    await run.update(updates)


async def old_scales(run: Run, updates: int) -> None:
    "Weights of eight bits are new, their scales are those of the first load: vllm-project/vllm#48312."
    base, load = run.sync.base, run.server.load

    def scaled(name: str, t: Tensor) -> Tensor:
        if t.ndim < 2 or "proj" not in name:
            return t
        new, old = (w.abs().amax(1, keepdim=True) / 127 for w in (t, base[name]))
        return (t / new).round() * old

    put(run.server, load=lambda new: load({n: scaled(n, t) for n, t in new.items()}))
    await run.update(updates)


def at_the_end(run: Run, batch: int) -> None:
    "The completion is looked for in the last columns of a table that is padded on the right: verl-project/verl#2368."
    inner = run.trainer.score

    def score(datums: Sequence[Datum]) -> list[Tensor]:
        whole = inner([replace(d, weights=np.ones(len(d.weights))) for d in datums])
        out: list[Tensor] = []
        for at in range(0, len(datums), batch):
            table = nn.utils.rnn.pad_sequence(whole[at : at + batch], batch_first=True)
            for d, row in zip(datums[at : at + batch], table, strict=True):
                start, found = int(np.argmax(d.active)), torch.full((len(d.weights),), torch.nan)
                found[start:] = row[row.shape[0] - (len(d.weights) - start) :]
                out.append(found.masked_fill(torch.from_numpy(~d.active), torch.nan))
        return out

    put(run.trainer, score=score)


def first_shard(run: Run, shards: int) -> None:
    "An id of any shard of the vocabulary is looked up in the first."
    size = -(-run.server.model.config.vocab_size // shards)
    rowwise(run.trainer, lambda model, d: picked(logits_of(run.trainer, model, d.tokens)[:-1], d.tokens[1:] % size))


def naive_sum(run: Run, by: float) -> None:
    "The sum of a softmax is made in half precision, without taking the largest away."

    def one(model: Any, d: Datum) -> Tensor:
        logits = logits_of(run.trainer, model, d.tokens)[:-1]
        own = logits.gather(1, torch.from_numpy(d.tokens[1:].copy())[:, None])[:, 0]
        return own - (by * (logits.half().exp() / by).sum(-1)).float().log()

    rowwise(run.trainer, one)


def packed_late(groups: Sequence[PromptGroup], k: int) -> list[Datum]:
    "Of each row of a pack but the first, one place more is missing: PrimeIntellect-ai/prime-rl#605."
    datums = datums_from_groups(groups)
    return paired(datums, [v[i % k :] for i, v in enumerate(told(datums))])


def filtered(groups: Sequence[PromptGroup], which: int) -> list[Datum]:
    "A group that teaches nothing is left out of one of two lists."
    datums = datums_from_groups(groups)
    left = [d for d in datums if d.group != which]
    return paired(left, told(datums)[: len(left)])


def one_session(run: Run, turns: int) -> dict[str, Any]:
    "A session is kept by prompt: later turns of a group go on from what was said in its first conversation."
    inner, user = run.server.sample, ids_of(run, "<|user|>")[0]
    heard: dict[tuple[Any, ...], list[int]] = {}

    async def sample(prompt, params):
        ids = [int(t) for t in prompt]
        starts = [i for i, t in enumerate(ids) if t == user]
        if len(starts) < 2:
            return await inner(prompt, params)
        end = ids.index(run.tokenizer.eos_token_id)
        read = heard.setdefault((len(starts), *ids[:end]), ids)
        return [replace(c, prompt_tokens=np.array(ids)) for c in await inner(read, params)]

    put(run.server, sample=sample)
    return {"turns": turns}


HALF = (torch.bfloat16,)


def by_group(run: Run, ask: Callable[[int, SampleParams], SampleParams]) -> None:
    "Each group is asked for in its own way, and its samples say so."

    async def draw(prompts: Sequence[Prompt], turns: int, params: SampleParams) -> list[Rollouts]:
        return [await draw_completions(run.sampler, p, ask(p.index, params)) for p in prompts]

    put(run, draw=draw)


def half_divided(run: Run, what: str) -> None:
    "A fused kernel divides a token's own logit by the temperature, or the sum of all, but not both."
    t = run.world.temperature

    def one(model: Any, d: Datum) -> Tensor:
        cool = logits_of(run.trainer, model, d.tokens)[:-1]
        own, whole = (cool, t * cool) if what == "own" else (t * cool, cool)
        return own.gather(1, torch.from_numpy(d.tokens[1:].copy())[:, None])[:, 0] - whole.logsumexp(-1)

    rowwise(run.trainer, one)


def of_the_batch(scores: Tensor, k: int) -> Tensor:
    "Tokens that are among the k likeliest of the mean of all rows."
    mean = scores.float().softmax(-1).mean(0, keepdim=True)
    return kept(scores, torch.isfinite(best(mean, k)))


def drawn_from(run: Run, law: Callable[[list[int], Tensor], Tensor]) -> None:
    "A sampler of its own: law(prompt, drawn) gives logits (B, V) after what was drawn (B, D), and tells of them."

    async def sample(prompt, params):
        drawn, series = torch.zeros(params.n, 0, dtype=torch.long), []
        with torch.no_grad(), seeded(params.seed):
            for _ in range(params.max_tokens):
                logits = law([int(t) for t in prompt], drawn).float()
                laws = [(logits / t).log_softmax(-1) for t in (1.0, params.temperature or 1.0)]
                token = laws[1].exp().multinomial(1)
                series.append([part.gather(1, token) for part in laws])
                drawn = torch.cat([drawn, token], 1)
        put(run.server, variations=[], evidence=math.nan)
        raw, own = (torch.cat(part, 1).double().numpy() for part in zip(*series, strict=True))
        rows, eos = drawn.tolist(), run.tokenizer.eos_token_id
        ends = [row.index(eos) + 1 if eos in row else len(row) for row in rows]
        return [
            Completion(np.array(prompt), np.array(row[:n]), a[:n], b[:n],
                       run.tokenizer.decode(row[:n], skip_special_tokens=True), "stop" if eos in row else "length",
                       run.server.version, params)
            for row, n, a, b in zip(rows, ends, raw, own, strict=True)
        ]  # fmt: skip

    put(run.server, sample=sample)


def after(run: Run, prompt: Sequence[int], drawn: Tensor, **given: Any) -> Tensor:
    "Logits (B, V) of the server's model after a prompt and what was drawn (B, D)."
    read = torch.cat([torch.tensor([list(prompt)] * len(drawn)), drawn], 1)
    return run.server.model(read, use_cache=False, **given).logits[:, -1]


def shared_block(run: Run, size: int) -> None:
    "Completions of a group were forked from one, and all write into its block: each reads the first tokens of one."

    def law(prompt: list[int], drawn: Tensor) -> Tensor:
        first = drawn[:1, :size].expand(len(drawn), -1)
        return after(run, prompt, torch.cat([first, drawn[:, size:]], 1))

    drawn_from(run, law)


def moving_average(v: np.ndarray, share: float) -> np.ndarray:
    "What a dashboard shows of a stream."
    return np.array(list(itertools.accumulate(v, lambda old, new: share * old + (1 - share) * new)))


def without_prompt(run: Run, part: str) -> None:
    "Completions are scored after a beginning of their own, and not after their prompt."
    start = ids_of(run, part)

    def says(c: Completion) -> Completion:
        other, ids = replace(c, prompt_tokens=start), torch.tensor(c.tokens)[:, None]
        own = lambda t: alternatives(run, other, t).gather(-1, ids)[:, 0].double().numpy()
        return replace(c, logprobs=own(1.0), sampling_logprobs=own(c.params.temperature or 1.0))

    put(run.server, says=says)


def turns_of(d: Datum) -> list[np.ndarray]:
    "Places of tokens that were drawn, turn by turn."
    on = np.flatnonzero(d.active) + 1
    return np.split(on, np.flatnonzero(np.diff(on) > 1) + 1)


@torch.no_grad()
def fewer_ids(model: Any, most: int) -> None:
    "The server knows so many ids; others are read as padding, and are as good as impossible."
    weight = model.get_input_embeddings().weight
    weight[most:] = weight[0]
    far = torch.where(torch.arange(len(weight)) >= most, -30.0, 0.0)
    hooked(model, "lm_head", lambda read, given: given + far.to(given.dtype))


@torch.no_grad()
def shard_off(model: Any, by: int) -> None:
    "The second shard of the embeddings begins with its padding."
    weight = model.get_input_embeddings().weight
    weight[len(weight) // 2 :] = weight[len(weight) // 2 :].roll(by, 0)


def pass_with(run: Run, bias: Callable[[Tensor, Tensor], Tensor], batch: int) -> None:
    "The trainer pads on the left; what it adds to scores (R, N, N) is made of what is padding (R, N) and causal."

    def _pass(model: Any, rows: Sequence[np.ndarray]) -> list[Tensor]:
        longest = max(map(len, rows))
        starts = torch.tensor([longest - len(r) for r in rows])[:, None]
        known = torch.arange(longest)[None] >= starts
        ids = torch.full(known.shape, run.trainer.pad)
        ids[known] = torch.from_numpy(np.concatenate(rows))
        causal = torch.ones(longest, longest, dtype=torch.bool).tril()
        place = (torch.arange(longest)[None] - starts).clamp(min=0)
        logits = model(ids, attention_mask=bias(known, causal)[:, None], position_ids=place, use_cache=False).logits
        laws = logits[:, :-1].float() / run.trainer.temperature
        return [picked(law[int(a) :], r[1:]) for law, a, r in zip(laws, starts[:, 0], rows, strict=True)]

    put(run.trainer, _pass=_pass, batch=batch)


def hidden_wholly(known: Tensor, causal: Tensor) -> Tensor:
    "Padding is hidden, and sees nothing at all."
    return torch.zeros(len(known), *causal.shape).masked_fill(~(known[:, None, :] & causal), -torch.inf)


def at_zero(run: Run, every: int) -> None:
    "Some groups are greedy, for an evaluation, and the trainer divides them by their temperature."
    cold = lambda i: i % every == every - 1
    by_group(run, lambda i, params: replace(params, temperature=0.0) if cold(i) else params)
    rowwise(run.trainer, lambda model, d: picked(
        logits_of(run.trainer, model, d.tokens)[:-1] / (0.0 if cold(d.group) else 1.0), d.tokens[1:]))  # fmt: skip


async def overscaled(run: Run, scale: float) -> None:
    "A loss is scaled for the sake of small gradients, and an update is made of what overflows."
    datums = (await run.step()).datums

    def loss(datums: Sequence[Datum], logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        parts = [-lp[torch.from_numpy(d.active)].sum() for d, lp in zip(datums, logprobs, strict=True)]
        return scale * torch.stack(parts).sum(), {}

    inner = run.server.sample

    async def sample(prompt, params):
        try:
            return await inner(prompt, params)
        except RuntimeError as error:  # with such weights, as soon as it has them
            raise BackendError("request", where="a server of the zoo", got=str(error), expected="a draw") from error

    await run.trainer.forward_backward_custom(datums, loss)
    await run.trainer.optim_step(AdamParams(learning_rate=run.world.learning_rate))
    run.updates += 1
    put(run.server, sample=sample)


def over_occurring(run: Run, _: str) -> None:
    "The trainer normalises over ids that occur in a row."

    def one(model: Any, d: Datum) -> Tensor:
        ids, logits = torch.tensor(np.unique(d.tokens)), logits_of(run.trainer, model, d.tokens)[:-1]
        return picked(torch.full_like(logits, -torch.inf).index_copy(1, ids, logits[:, ids]), d.tokens[1:])

    rowwise(run.trainer, one)


def of_other_side(groups: Sequence[PromptGroup], _: Any) -> list[Datum]:
    "Weights are of rows that are padded on the right, tokens of rows that are padded on the left."
    longest = max(len(d.weights) for d in datums_from_groups(groups))
    return weighed(groups, lambda w: fitted(w[longest - len(w) :], len(w)))


def of_another_tool(groups: Sequence[PromptGroup], by: int) -> list[Datum]:
    "What a tool answered, and all between the turns, is that of another group."
    datums, out = datums_from_groups(groups), []
    place = {(d.group, d.sample): d for d in datums}
    for d in datums:
        other = place[(d.group + by) % len(groups), d.sample]
        assert d.sampler_logprobs is not None
        series, parts = np.r_[np.nan, d.sampler_logprobs], [d.tokens[: turns_of(d)[0][0]]]
        values = [np.full(len(parts[0]), np.nan)]
        for i, turn in enumerate(turns_of(d)):
            parts.append(d.tokens[turn]), values.append(series[turn])
            if i + 1 < len(turns_of(d)):
                mine, theirs = turns_of(d), turns_of(other)
                source, turns = (other, theirs) if i + 1 < len(theirs) else (d, mine)
                between = source.tokens[turns[i][-1] + 1 : turns[i + 1][0]]
                parts.append(between), values.append(np.full(len(between), np.nan))
        tokens, told_of = np.concatenate(parts), np.concatenate(values)
        out.append(Datum(tokens, (told_of == told_of)[1:].astype(float), d.advantage, told_of[1:], group=d.group,
                         sample=d.sample, key=d.key))  # fmt: skip
    return out


def turns_reversed(groups: Sequence[PromptGroup], _: Any = None) -> list[Datum]:
    "Logprobs of turns are taken off a stack."
    datums = datums_from_groups(groups)
    cuts = [np.cumsum([len(turn) for turn in turns_of(d)])[:-1] for d in datums]
    return paired(datums, [np.concatenate(np.split(v, c)[::-1]) for v, c in zip(told(datums), cuts, strict=True)])


def floored_reference(run: Run, floor: float) -> None:
    score = run.reference.score
    put(run.reference, score=lambda datums: [s.clamp(min=floor) for s in score(datums)])


def as_means(groups: Sequence[PromptGroup], share: float) -> list[Datum]:
    "Logprobs are means over the completions of a group, place by place."
    datums = datums_from_groups(groups)
    values, out = told(datums), []
    for d, v in zip(datums, values, strict=True):
        own = [w for e, w in zip(datums, values, strict=True) if e.group == d.group]
        mean = np.nanmean([np.r_[w, np.full(len(v), np.nan)][: len(v)] for w in own], 0)
        out.append((1 - share) * v + share * mean)
    return paired(datums, out)


def shuffled_late(groups: Sequence[PromptGroup], seed: int) -> list[Datum]:
    "Rows are shuffled into minibatches, logprobs are not."
    datums = datums_from_groups(groups)
    order = np.random.default_rng(seed).permutation(len(datums))
    return paired([datums[i] for i in order], told(datums))


async def in_several(run: Run, found: Any) -> dict[str, Any]:
    "The same in a step of several updates."
    return (await found or {}) | {"minibatches": 3}


def by_request(run: Run, change: Callable[[int, list[int]], Any]) -> None:
    "Before each request, with its number and its prompt, the server is changed."
    inner, asked = run.server.sample, itertools.count()

    async def sample(prompt, params):
        change(next(asked), [int(t) for t in prompt])
        return await inner(prompt, params)

    put(run.server, sample=sample)


def overlapping(run: Run, how: tuple[int, int]) -> None:
    "The trainer divides logits in place, chunk by chunk, and chunks overlap."
    size, overlap = how

    def one(model: Any, d: Datum) -> Tensor:
        logits = logits_of(run.trainer, model, d.tokens)[:-1]
        for at in range(size, len(logits), size):
            logits[at - overlap : at] /= run.trainer.temperature
        return picked(logits, d.tokens[1:])

    rowwise(run.trainer, one)


def with_a_baseline(run: Run, rows: int) -> None:
    "The first of each group are drawn greedily, as a baseline for the others."
    with_ids(run, lambda i, scores, ids: torch.cat([best(scores[:rows], 1), scores[rows:]]), reports="raw")


def translated(run: Run, ids: slice) -> Callable[[Sequence[int]], list[int]]:
    "Ids of a tokenizer that has some tokens in another order."
    table = np.arange(run.server.model.config.vocab_size)
    table[ids] = np.roll(table[ids], 1)
    return lambda tokens: table[np.asarray(tokens, int)].tolist()


def read_by_others(run: Run, ids: slice) -> None:
    "A client has another tokenizer than the server, and its ids for what was said."
    other = translated(run, ids)
    put(run.server, says=lambda c: replace(c, tokens=np.array(other(c.tokens))))


def tried_again(run: Run, words: str) -> None:
    "Each third request was tried again, with a word more."
    through_text(run, lambda s: s.replace("<|end|><|assistant|>", f"{words}<|end|><|assistant|>"))
    reads = (list, run.server.reads, list)
    by_request(run, lambda i, _: put(run.server, reads=reads[i % 3]))


async def long_ones_are_old(run: Run, how: tuple[int, bool]) -> None:
    "Completions that took long are those that an earlier policy began; their version says so, or does not."
    old, inner = copy.deepcopy(run.server.model), run.server.sample
    await run.update(how[0])

    async def sample(prompt, params):
        newest = run.server.model
        fresh = await inner(prompt, params)
        put(run.server, model=old)
        try:
            before = await inner(prompt, params)
        finally:
            put(run.server, model=newest)
        order = sorted(range(params.n), key=lambda i: len(before[i].tokens))
        there = {i: replace(before[i], policy_version=before[i].policy_version - how[0] * how[1])
                 for i in order[params.n // 2 :]}  # fmt: skip
        return [there.get(i, c) for i, c in enumerate(fresh)]

    put(run.server, sample=sample)


async def norms_stay(run: Run, updates: int) -> None:
    "Only matrices are sent."
    put(run.sync, travels=lambda name: "norm" not in name)
    await run.update(updates)


async def coarse_changes(run: Run, bits: int) -> None:
    "What was learned travels in few bits, and what is lost of it is not sent later."
    base, load = run.sync.base, run.server.load

    def few(t: Tensor) -> Tensor:
        if bits == 1:
            return t.sign() * t.abs().mean()
        step = (t.abs().max() / (2 ** (bits - 1) - 1)).clamp(min=1e-12)
        return (t / step).round() * step

    put(run.server, load=lambda new: load({n: base[n] + few(t - base[n]) for n, t in new.items()}))
    await run.update(3)


def linears(model: nn.Module) -> list[nn.Linear]:
    return [m for m in model.modules() if isinstance(m, nn.Linear)]


def filled_with_ends(run: Run, multiple: int) -> None:
    "The server fills prompts up on the left, with ends."
    end = [run.tokenizer.eos_token_id]
    put(run.server, fed=lambda tokens: end * (-len(tokens) % multiple) + [int(t) for t in tokens])


def later_in_training(run: Run, p: float) -> dict[str, Any]:
    "From the second update of a step on, the trainer is in training mode."
    every(run.trainer.model, "attention_dropout", p)
    inner, done = run.trainer.forward_backward_custom, itertools.count()

    async def scored(datums, loss_fn):
        put(run.trainer, training=bool(next(done)))
        try:
            return await inner(datums, loss_fn)
        finally:
            put(run.trainer, training=False)

    put(run.trainer, forward_backward_custom=scored)
    return {"minibatches": 3}


ASKED = ({"top_p": 0.92}, {"top_k": 7}, {"top_p": 0.7}, {"top_k": 3, "top_p": 0.9}, {"top_k": 25}, {"top_p": 0.97})


def some_batches(run: Run, batch: int, **fields: Any) -> None:
    "Every second micro-batch of the trainer is computed otherwise."
    inner, score, done = run.trainer._pass, run.trainer.score, list[int]()

    def _pass(model: Any, rows: Sequence[np.ndarray]) -> list[Tensor]:
        usual = {name: getattr(run.trainer, name) for name in fields}
        put(run.trainer, **(fields if len(done) % 2 else {}))
        done.append(len(rows))
        try:
            return inner(model, rows)
        finally:
            put(run.trainer, **usual)

    put(run.trainer, _pass=_pass, score=lambda datums: done.clear() or score(datums), batch=batch)


def goes_on_from_before(run: Run, n: int) -> None:
    "A session is not begun anew: what was asked before is still there."
    past: list[list[int]] = []

    def reads(ids: list[int]) -> list[int]:
        if not past or past[-1] != ids:
            past.append(list(ids))
        between = [t for old in past[-1 - n : -1] for t in (*old[1:], run.tokenizer.eos_token_id)]
        return [*ids[:1], *between, *ids[1:]]

    put(run.server, reads=reads)


async def late_in_later_turns(run: Run, updates: int) -> dict[str, Any]:
    "Later turns are served by another server, which is late."
    old, inner = copy.deepcopy(run.server.model), run.server.sample
    [mark] = ids_of(run, "<|user|>")
    await run.update(updates)

    async def sample(prompt, params):
        newest = run.server.model
        put(run.server, model=old if [int(t) for t in prompt].count(mark) > 1 else newest)
        try:
            return await inner(prompt, params)
        finally:
            put(run.server, model=newest)

    put(run.server, sample=sample)
    return {"turns": 2}


def beneath(model: nn.Module, change: Callable[[nn.Module], Any]) -> None:
    "Change what is beneath an adapter."
    for m in [m for n, m in model.named_modules() if n.endswith("base_layer")]:
        change(m)


NORMAL = torch.distributions.Normal(0.0, 1.0).icdf(torch.linspace(0.033, 0.967, 16))


@torch.no_grad()
def normal_floats(m: nn.Module, size: int) -> None:
    "Weights are one of 16 quantiles of a normal law, times the largest of their block."
    for linear in linears(m):
        parts = linear.weight.float().unflatten(-1, (-1, size))
        most = parts.abs().amax(-1, keepdim=True).clamp(min=1e-12)
        nearest = ((parts / most)[..., None] - NORMAL / NORMAL.max()).abs().argmin(-1)
        linear.weight.copy_((NORMAL[nearest] / NORMAL.max() * most).flatten(-2))


def capped(model: nn.Module, cap: float) -> None:
    hooked(model, "lm_head", lambda read, given: cap * (given / cap).tanh())


def gradients_are_off(run: Run, by: int) -> dict[str, Any]:
    "The pass with gradients keeps a logit that the other drops."
    score = run.trainer.score
    in_the_loss(run, score=lambda datums: [s.nan_to_num(0.0).roll(by) for s in score(datums)])
    return {"minibatches": 2}


def in_whole_blocks(groups: Sequence[PromptGroup], n: int) -> list[Datum]:
    "A mask begins where a block of so many tokens does."
    return weighed(groups, lambda w: np.where(np.arange(len(w)) >= np.argmax(w) - np.argmax(w) % n, 1.0, w))


OTHER_KINDS: list[Kind] = [
    Kind("draw", "the first token has its own temperature", TEMPERATURE, (0.4, 3.0),
         lambda run, t: by_place(run, lambda i, scores: scores if i else scores / t), SOME),
    Kind("draw", "the server's model scales its logits", TEMPERATURE, (0.8, 1.25, 0.95), server(
        lambda model, by: hooked(model, "lm_head", lambda read, given: given * by)), SOME),
    Kind("draw", "the beginning of a completion is cut", CUT, ((2, 6), (3, 10), (1, 3)), lambda run, how: by_place(
        run, lambda i, scores: best(scores, how[0]) if i < how[1] else scores), SOME),
    Kind("draw", "the server cuts by yet another rule", CUT + UNKNOWN,
         ({"top_h": 0.4}, {"eta_cutoff": 0.05}), lambda run, how: forced(run, **how), SOME),
    Kind("draw", "no n-gram comes twice", UNKNOWN, (2, 3), lambda run, n: forced(run, no_repeat_ngram_size=n), SOME),
    Kind("draw", "eos gets likelier", UNKNOWN, ((2, 1.1), (4, 1.3)),
         lambda run, how: forced(run, exponential_decay_length_penalty=how), SOME),
    Kind("draw", "a watermark", UNKNOWN, (1.0, 3.0),
         lambda run, bias: forced(run, watermarking_config=WatermarkingConfig(bias=bias, greenlist_ratio=0.5)), HALVES,
         large=True),
    Kind("draw", "guidance without a prompt", UNKNOWN, (1.2, 1.8),
         lambda run, scale: forced(run, guidance_scale=scale), EVEN),
    Kind("draw", "the server keeps a temperature in steps", TEMPERATURE, (1.0, 0.5), lambda run, step: forced(
        run, temperature=step * math.ceil(run.world.temperature / step)), TEMPERED),
    Kind("draw", "the server takes what a model recommends", TEMPERATURE + CUT, (
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20}, {"temperature": 0.6, "top_p": 0.95}),
         lambda run, how: forced(run, **how), EVEN),
    Kind("draw", "some of each group are greedy", TEMPERATURE + CUT, (1, 3), lambda run, n: processed(
        run, lambda ids, scores: torch.cat([best(scores[:n], 1), scores[n:]])), HALVES),
    Kind("draw", "the server cuts before it divides", CUT, (0.8, 0.92), lambda run, p: processed(
        run, lambda ids, scores: nucleus(scores, p)) or run.server.forced.update(top_p=1.0) or {"top_p": p}, TEMPERED),
    Kind("draw", "the first token is forced", LEAK + UNKNOWN + CUT, ("5", "#"), lambda run, text: by_place(
        run, lambda i, scores: scores if i else only(run, scores, text)), SOME),
    Kind("draw", "the last token is forced", LEAK + UNKNOWN + CUT, (6, 9), lambda run, n: by_place(
        run, lambda i, scores: scores if i < n - 1 else only(run, scores, "<|end|>")) or {"max_tokens": n}, SOME),
    Kind("draw", "scores have noise", UNKNOWN, (0.3, 1.0), on_server(with_noise), SOME),
    Kind("draw", "some sequences are likelier", UNKNOWN, (2.0, -3.0), lambda run, bias: forced(run, sequence_bias=[
        [ids_of(run, text), bias] for text in ("# 1", "####", "12", "1 ", "5 ")]), SOME),
    Kind("draw", "greedy where it is sure", CUT + UNKNOWN, (0.7, 0.45),
         lambda run, sure: processed(run, lambda ids, scores: where_sure(scores, sure)), ("sober", *EVEN)),
    Kind("draw", "a nucleus that shrinks", CUT, (0.9, 0.97), lambda run, by: by_place(
        run, lambda i, scores: nucleus(scores, max(0.3, by ** (i + 1)))), SOME),
    Kind("draw", "groups have temperatures of their own, and say so", TEMPERATURE, (0.6, 1.25), lambda run, t: by_group(
        run, lambda i, params: replace(params, temperature=params.temperature * (t if i % 2 else 1))), SOME),
    Kind("draw", "the trainer divides one half of a logprob", TEMPERATURE + UNKNOWN, ("own", "sum"), half_divided,
         TEMPERED),
    Kind("draw", "groups have cuts of their own, and say so", CUT, ({"top_p": 0.75}, {"top_k": 3}), lambda run, how:
         by_group(run, lambda i, params: replace(params, **how) if i % 2 == 0 else params), SOME),
    Kind("draw", "the likeliest of a batch are kept", CUT + UNKNOWN, (4, 10), on_server(of_the_batch), SOME),
    Kind("draw", "scores are whole multiples", UNKNOWN + DTYPE, (2.0, 0.5), on_server(
        lambda scores, step: (scores / step).round() * step), EVEN),
    Kind("draw", "each row is drawn from its neighbour's law", UNKNOWN + ROWS, (0, 8), lambda run, n: with_ids(
        run, lambda i, scores, ids: scores.roll(1, 0) if i >= n else scores), HALVES),
    Kind("draw", "the server takes a temperature to a power", TEMPERATURE, (2, -1), lambda run, power: forced(
        run, temperature=run.world.temperature**power), TEMPERED),
    Kind("draw", "a top-k is asked for, and the temperature is the server's", TEMPERATURE, (0.5, 1.6), lambda run, t:
         forced(run, temperature=t) or {"top_k": 60}, EVEN),
    Kind("draw", "a cut gets wider with each token", CUT, (1, 3), lambda run, k: by_place(
        run, lambda i, scores: best(scores, k + i // 3)), SOME),
    Kind("draw", "overlapping chunks are divided in place", TEMPERATURE, ((6, 2), (5, 4)), overlapping, TEMPERED),
    Kind("draw", "a nucleus is asked for, and a narrower one is used", CUT, (0.4, 0.6), lambda run, p: forced(
        run, top_p=p) or put(run.server, reports="both") or {"top_p": 0.95}, HIDDEN),
    Kind("draw", "some micro-batches have another temperature", TEMPERATURE, (0.7, 1.3), lambda run, t: some_batches(
        run, 4, temperature=t * run.world.temperature), SEVERAL),

    Kind("hidden", "the temperature changes along a completion, and raw is reported", TEMPERATURE, (2.5, 4.0, 1.6),
         partial(falling, reports="raw"), HIDDEN),
    Kind("hidden", "a watermark, and raw is reported", UNKNOWN, (1.5, 4.0), lambda run, bias: forced(
         run, watermarking_config=WatermarkingConfig(bias=bias)) or put(run.server, reports="raw"), HIDDEN),
    Kind("hidden", "the best of several is returned", UNKNOWN + TEMPERATURE, (6, 16), best_of, HIDDEN),
    Kind("hidden", "every second token has its own temperature, and raw is reported", TEMPERATURE, (0.2, 2.0),
         lambda run, t: by_place(run, lambda i, scores: scores / t if i % 2 else scores, reports="raw"), HIDDEN),
    Kind("hidden", "what is unlikely is drawn again, and raw is reported", CUT + UNKNOWN, (0.1, 0.3), on_server(
        lambda scores, least: kept(scores, scores.float().softmax(-1) >= least), reports="raw"), HIDDEN),
    Kind("hidden", "rows are not cut where they end, and are scored", LEAK + UNKNOWN, (3, 100),
         partial(over_the_end, scored=True), HIDDEN),
    Kind("hidden", "a logit bias, and raw is reported", UNKNOWN, (("<|end|>", 2.5), ("2468", -1.5)), lambda run, bias:
         biased(run, bias) or put(run.server, reports="raw"), HIDDEN),
    Kind("hidden", "some rows of a batch keep a temperature, and raw is reported", TEMPERATURE, (0.2, 2.5),
         lambda run, t: of_a_slot(run, 4, lambda scores: scores / t), HIDDEN),
    Kind("hidden", "some rows of a batch keep a cut, and raw is reported", CUT, (2, 3),
         lambda run, k: of_a_slot(run, 5, lambda scores: best(scores, k)), HIDDEN),
    Kind("hidden", "completions begin evenly", UNKNOWN + LEAK, (12, 40), evenly_begun, HIDDEN),
    Kind("hidden", "the first of a group are a greedy baseline, and raw is reported", TEMPERATURE + CUT, (2, 5),
         with_a_baseline, HIDDEN[:2]),
    Kind("hidden", "what is listed is drawn from, and raw is reported", CUT, (2, 4), lambda run, k: put(
        run.server, forced={"top_k": k}, reports="raw"), HIDDEN[:2]),
    Kind("hidden", "a min-p, and raw is reported", CUT + UNKNOWN, (0.5, 0.3), lambda run, p: forced(
        run, min_p=p) or put(run.server, reports="raw"), HIDDEN),
    Kind("hidden", "an end is forbidden at first, and raw is reported", CUT + UNKNOWN, (16, 8), lambda run, n: forced(
        run, min_new_tokens=n) or put(run.server, reports="raw"), HIDDEN),
    Kind("hidden", "ends get likelier, and raw is reported", UNKNOWN, ((2, 1.4), (4, 1.3)), lambda run, how: forced(
        run, exponential_decay_length_penalty=how) or put(run.server, reports="raw"), HIDDEN),
    Kind("hidden", "guidance without a prompt, and raw is reported", UNKNOWN, (2.0, 1.5), lambda run, scale: forced(
        run, guidance_scale=scale) or put(run.server, reports="raw"), HIDDEN),
    Kind("hidden", "no n-gram comes twice, and raw is reported", UNKNOWN + CUT, (2, 3), lambda run, n: forced(
        run, no_repeat_ngram_size=n) or put(run.server, reports="raw"), HIDDEN),

    Kind("report", "the client normalises over what is listed", CUT + UNKNOWN, (2, 5),
         lambda run, n: parsed(run, partial(listed_anew, most=n)), SOME),
    Kind("report", "logprobs have few significant digits", DTYPE + UNKNOWN, (2, 3),
         lambda run, n: put(run.server, writes=lambda v: significant(v, n)), SOME),
    Kind("report", "some requests came back with null", NAN, (1, 3), collated(failed), SOME),
    Kind("report", "first tokens came back with null", NAN, ("first",), collated(failed), SOME),
    Kind("report", "logprobs are read off the law of a neighbour", SHIFT, (-1, 1),
         lambda run, by: parsed(run, partial(of_a_neighbour, by=by)), SOME),
    Kind("report", "what is outside a nucleus has no logprob", NAN + CUT, (0.9, 0.6),
         lambda run, p: {"collate": partial(outside, run=run, p=p)}, SOME),
    Kind("report", "logprobs are divided by a power of the length", UNKNOWN, (0.2, 0.7),
         lambda run, power: retold(run, lambda v: v / len(v) ** power), SOME),
    Kind("report", "logprobs are bytes", UNKNOWN + DTYPE, (16.0, 64.0),
         lambda run, steps: put(run.server, writes=lambda v: in_bytes(v, steps)), SOME),
    Kind("report", "probabilities are rounded", UNKNOWN + DTYPE, (2, 1),
         lambda run, n: put(run.server, writes=lambda v: logs_of_rounded(v, n)), SOME),
    Kind("report", "logprobs are divided, not logits", TEMPERATURE + UNKNOWN, ("server", "trainer"), divided_logprobs,
         TEMPERED),
    Kind("report", "the base model's logprobs are told", UNKNOWN + STALE, ("base",),
         lambda run, _: of_the_base(run, lambda own, base: base), ADAPTED),
    Kind("report", "the ratio to the base model is told", UNKNOWN, (1.0, 0.1),
         lambda run, by: of_the_base(run, lambda own, base: own - by * base), EVEN),
    Kind("report", "logprobs come in the opposite order", UNKNOWN + SHIFT, ("last first",),
         lambda run, _: retold(run, lambda v: v[::-1].copy()), SOME),
    Kind("report", "logprobs are a moving average", UNKNOWN + SHIFT, (0.15, 0.6),
         lambda run, share: retold(run, lambda v: moving_average(v, share)), SOME),
    Kind("report", "completions are scored without their prompt", UNKNOWN + TEXT, ("<|bos|>", "<|bos|><|assistant|>"),
         without_prompt, EVEN),
    Kind("report", "logprobs are told as distances", UNKNOWN, ("mean", "max"), lambda run, how: retold(
        run, lambda v: v - getattr(v, how)()), SOME),
    Kind("report", "a top-p is asked for, and told as raw", CUT, (0.6, 0.9), lambda run, p: put(
        run.server, reports="processed") or {"top_p": p}, EVEN),
    Kind("report", "a top-k is asked for, and the first logprob is lost", SHIFT, (12,), lambda run, k: retold(
        run, lambda v: np.r_[v[1:], 0.0]) or {"top_k": k}, EVEN),
    Kind("report", "logprobs are means over a group", UNKNOWN + ROWS, (1.0, 0.3), collated(as_means), (
        "well", "hushed", "limpid", "crisp")),
    Kind("report", "a top-k is asked for, and told as raw", CUT, (2, 5), lambda run, k: put(
        run.server, reports="processed") or {"top_k": k}, EVEN),
    Kind("report", "completions are read by another tokenizer", VOCABULARY, (slice(21, 31), slice(8, 36)),
         read_by_others, SOME),
    Kind("report", "a sum is spread over its tokens", UNKNOWN, (0,), lambda run, _: retold(
        run, lambda v: np.full(len(v), v.mean())), SOME, large=True),

    Kind("text", "the trainer adds a token, and does not count it", SHIFT + TEXT, (1, 0), counted_without, SOME),
    Kind("text", "white space follows each message", TEXT, ("\n", " "), lambda run, space: through_text(
        run, lambda s: s.replace("<|end|>", "<|end|>" + space)), SOME),
    Kind("text", "the question is said twice", TEXT, (2, 3), lambda run, n: through_text(
        run, lambda s: re.sub(r"(?<=user\|>)[^<]*", lambda m: "\n".join([m[0]] * n), s)), HALVES),
    Kind("text", "earlier answers have no end", TEXT, ("<|end|>", "<|end|><|user|>"), lambda run, end: through_text(
        run, lambda s: re.sub(r"(<\|assistant\|>[^<]+)" + re.escape(end), r"\1", s)) or {"turns": 2}, EVEN),
    Kind("text", "the middle of a prompt is cut out", TEXT + UNKNOWN, (11, 7), lambda run, n: put(
        run.server, reads=lambda ids: ids[:n] + ids[-n:]), SOME),
    Kind("text", "earlier answers are encoded anew", TEXT + UNKNOWN, (2.5, 3.5),
         lambda run, t: through_text(run, str) or agreed(run, t) | {"turns": 2}, EVEN),
    Kind("text", "a tool speaks as somebody else", TEXT, ("<|user|>", "<|assistant|>"), lambda run, role: through_text(
        run, lambda s: s.replace("<|system|>tool:", f"{role}tool:")) or with_tool(run, 0), EVEN),
    Kind("text", "the server begins the answer", TEXT, ("The sum is ", "1. "), lambda run, words: through_text(
        run, lambda s: s + words), SOME),
    Kind("text", "a top-k is asked for, and the server has another template", TEXT, (12,), lambda run, k: through_text(
        run, lambda s: s.replace("<|user|>", "<|user|>User: ")) or {"top_k": k}, EVEN),
    Kind("text", "each third request has a word more", TEXT, (" Please.", " Hurry!!"), tried_again, SEVERAL),
    Kind("text", "prompts are encoded by another tokenizer", VOCABULARY + TEXT, (slice(21, 31), slice(70, 96)),
         lambda run, ids: put(run.server, reads=translated(run, ids)), SOME),
    Kind("text", "a tool's answers are sent as JSON", TEXT, (0, 1), lambda run, n: through_text(run, lambda s: re.sub(
        r"tool: (\d+)", r'tool: {"result": \1}', s)) or with_tool(run, n), EVEN),
    Kind("text", "a session is not begun anew", UNKNOWN + TEXT, (1, 2), goes_on_from_before, SEVERAL),

    Kind("weights", "layers get what others have learned", UNKNOWN, (1, 2), one_layer_on, ("burly", "wide", "sober")),
    Kind("weights", "an adapter is known by its id", STALE + UNKNOWN, (1, 3), known_by_id, ADAPTED),
    Kind("weights", "new weights have old scales", UNKNOWN + STALE + DTYPE, (1, 4), old_scales, ADAPTED),
    Kind("weights", "a scaled loss overflows", NAN, (2.0**127,), overscaled, SOME),
    Kind("weights", "an update comes before the first of several", STALE, (1, 3), lambda run, n: in_several(
        run, scored_late(run, n)), SEVERAL),
    Kind("weights", "long completions are of an earlier policy", STALE, ((2, True), (5, False)), long_ones_are_old,
         SEVERAL),
    Kind("weights", "norms do not travel", STALE + UNKNOWN, (6, 12), norms_stay, WHOLE),
    Kind("weights", "rollouts of several updates are late", STALE, (1, 3), lambda run, n: in_several(
        run, late(run, n)), SEVERAL, large=True),
    Kind("weights", "what was learned travels in few bits", UNKNOWN + STALE, (1, 2), coarse_changes, SOME),
    Kind("weights", "later turns come from a server that is late", STALE, (1, 3), late_in_later_turns, EVEN),

    Kind("arithmetic", "the trainer has weights of half precision", DTYPE, (torch.bfloat16,), trainer(retyped), SOME),
    Kind("arithmetic", "feed-forwards are of half precision", DTYPE, (torch.bfloat16, torch.float16), server(
        lambda model, dtype: [hooked(model, part, lambda read, given: given.to(dtype).to(given.dtype))
                              for part in ("gate_proj", "up_proj")]), SOME),
    Kind("arithmetic", "embeddings are of half precision", DTYPE, HALF, server(lambda model, dtype: hooked(
        model, "embed_tokens", lambda read, given: given.to(dtype).to(given.dtype))), SOME),
    Kind("arithmetic", "the sum of a softmax overflows", NAN + DTYPE, (1.0,), naive_sum, EVEN),
    Kind("arithmetic", "the pass with gradients is of half precision", DTYPE, (2, 4), lambda run, n: in_the_loss(
        run, dtype=torch.bfloat16) or {"minibatches": n}, SOME),
    Kind("arithmetic", "the trainer has eight bits beneath an adapter", DTYPE + UNKNOWN, (8,), trainer(
        lambda model, bits: beneath(model, lambda m: quantised(m, bits))), ADAPTED),

    Kind("model", "prompts are padded to the longest", PADDING, (0, 6), lambda run, n: put(run.server, reads=lambda ids:
         [run.tokenizer.pad_token_id] * (25 + n - len(ids)) + ids), SOME),
    Kind("model", "the server has dropout", DROPOUT, (0.05, 0.01), lambda run, p: every(
         run.server.model, "attention_dropout", p) or put(run.server, model=run.server.model.train()), SOME),
    Kind("model", "dropout after the feed-forward", DROPOUT, (0.2, 0.03), lambda run, p: put(run.trainer, training=True,
         altered=lambda model: hooked(model, "mlp", lambda read, given: nn.functional.dropout(given, p))), SOME),
    Kind("model", "the trainer reads another vocabulary than it writes", VOCABULARY, ("0123456789", "13579 "),
         lambda run, text: put(run.trainer, altered=lambda model: other_rows(model, ids_of(run, text), True)), WHOLE),
    Kind("model", "two special tokens are exchanged", VOCABULARY + TEXT, (("<|user|>", "<|assistant|>"),
         ("<|bos|>", "<|system|>")), lambda run, pair: through_text(run, lambda s: s.replace(pair[0], "\0").replace(
             pair[1], pair[0]).replace("\0", pair[1])), SOME),
    Kind("model", "the trainer has diverged", NAN, (1e13, 1e16), diverged, SOME),
    Kind("model", "another activation in the server", UNKNOWN, (nn.GELU(), nn.ReLU(), nn.Mish()),
         server(lambda model, act: every(model, "act_fn", act)), HALVES, large=True),
    Kind("model", "another activation in the trainer", UNKNOWN, (nn.GELU("tanh"),),
         trainer(lambda model, act: every(model, "act_fn", act)), SOME),
    Kind("model", "embeddings are scaled", UNKNOWN, (0.2, 3.0), server(
         lambda model, by: hooked(model, "embed_tokens", lambda read, given: by * given)), SOME),
    Kind("model", "prompts are padded to the longest so far", PADDING, (30, 44), lambda run, least: put(
        run.server, reads=lambda ids, seen=[least]: [run.trainer.pad] * (
            seen.__setitem__(0, max(seen[0], len(ids))) or seen[0] - len(ids)) + ids), SOME),
    Kind("model", "the first tokens are masked as padding", PADDING + UNKNOWN, (1, 3),
         trainer(lambda model, n: masked(model, lambda mask: hides(mask, n))), SOME),
    Kind("model", "the server writes another vocabulary than it reads", VOCABULARY, ("0123456789", "#+ 5"),
         lambda run, text: run.server.alter(lambda model: other_rows(model, ids_of(run, text), False)), SOME),
    Kind("model", "embeddings of the trainer were never filled", NAN, ("7", "9#"), lambda run, text: put(
        run.trainer, altered=lambda model: never_filled(model, ids_of(run, text))), SOME),
    Kind("model", "ids overflow", UNKNOWN + VOCABULARY + TEXT, (128,), lambda run, most: put(
        run.server, reads=lambda ids: [t if t < most else (t - 2 * most) % 264 for t in ids]), SOME),
    Kind("model", "the mask is the wrong way round", UNKNOWN + PADDING, (4, 16), lambda run, n: put(
        run.trainer, batch=n, altered=lambda model: masked(model, lambda mask: 1 - mask)), SOME),
    Kind("model", "dropout in the pass with gradients", DROPOUT, (0.1, 0.02), lambda run, p: every(
        run.trainer.model, "attention_dropout", p) or in_the_loss(run, training=True) or {"minibatches": 2}, SOME),
    Kind("model", "ids are looked up in the first shard", UNKNOWN + VOCABULARY, (2, 4), first_shard, SOME),
    Kind("model", "padding comes after bos", PADDING + TEXT, (4, 24), lambda run, n: put(
        run.server, reads=lambda ids: [*ids[:1], *[run.trainer.pad] * n, *ids[1:]]), HALVES),
    Kind("model", "the server's tokenizer knows fewer merges", VOCABULARY + TEXT, (1, 3), lambda run, n: put(
        run.server, reads=lambda ids: [i for t in ids for i in (
            ids_of(run, "##") * 2 if t == ids_of(run, "####")[0] else [t])]) or {"asks": shown(n)}, SOME),
    Kind("model", "the server knows fewer ids", VOCABULARY + CUT, (263, 228), lambda run, most: run.server.alter(
        lambda model: fewer_ids(model, most)) or {"asks": shown(2)}, SOME),
    Kind("model", "a shard of embeddings is off", VOCABULARY, (4, 40), server(shard_off), HALVES),
    Kind("model", "padding sees nothing", NAN + PADDING, (4, 16), lambda run, n: pass_with(run, hidden_wholly, n),
         SOME),
    Kind("model", "forks share a block", UNKNOWN + ROWS, (2, 6), shared_block, SOME),
    Kind("model", "the trainer normalises over what occurs", UNKNOWN + CUT, ("row",), over_occurring, SOME),
    Kind("model", "adapters have dropout in the pass with gradients", DROPOUT, (2, 4), lambda run, n: in_the_loss(
        run, training=True) or {"minibatches": n}, ("leaky",)),
    Kind("model", "the head has weights of few bits", UNKNOWN, (4, 3), server(
        lambda model, bits: quantised(model.get_output_embeddings(), bits)), SOME),
    Kind("model", "a top-p is asked for, and the server has another rope", UNKNOWN, (1.15, 2.0), lambda run, factor:
         run.server.alter(lambda model: rotary(model, factor=factor)) or {"top_p": 0.9}, EVEN),
    Kind("model", "the pass with gradients pads on the left and does not say so", PADDING, (16, 5), lambda run, n:
         in_the_loss(run, pads_left=True, tells=(), batch=n) or {"minibatches": 2}, SEVERAL),
    Kind("model", "prompts are filled up with ends", PADDING, (32, 64), filled_with_ends, SOME, large=True),
    Kind("model", "later updates have dropout", DROPOUT, (0.15, 0.03), later_in_training, SEVERAL),
    Kind("model", "values are dropped", DROPOUT, (0.02, 0.15), lambda run, p: put(
        run.trainer, training=True, altered=lambda model: hooked(
            model, "v_proj", lambda read, given: nn.functional.dropout(given, p))), SOME),
    Kind("model", "the pass with gradients is off by one", SHIFT, (1, -1), gradients_are_off, SEVERAL),
    Kind("model", "some micro-batches are padded on the left, and do not say so", PADDING, (8, 5), lambda run, n:
         some_batches(run, n, pads_left=True, tells=()), ("parade", "fluent", "crisp", "fervid")),
    Kind("model", "what attention hands down is dropped", DROPOUT, (0.1, 0.02), lambda run, p: put(
        run.trainer, training=True, altered=lambda model: hooked(
            model, "o_proj", lambda read, given: nn.functional.dropout(given, p))), SOME, large=True),
    Kind("model", "the trainer has four bits beneath an adapter", UNKNOWN + DTYPE, (64, 128), trainer(
        lambda model, size: beneath(model, lambda m: normal_floats(m, size))), ADAPTED),
    Kind("model", "the trainer caps its logits", UNKNOWN, (6.0, 15.0), trainer(capped), SOME, large=True),

    Kind("bookkeeping", "what was tried again comes last", ROWS, (0, 2), collated(rotated), SOME),
    Kind("bookkeeping", "the last comes first", ROWS, (1, 2), collated(last_first), HALVES),
    Kind("bookkeeping", "completions are laid out the other way", GROUPS, ("n",), collated(other_way), SOME),
    Kind("bookkeeping", "the reference has weights of few bits", REFERENCE, (4, 3), lambda run, bits: put(
         run.reference, altered=lambda model: quantised(model, bits)), SEEDLINGS),
    Kind("bookkeeping", "the reference lacks the first tokens", REFERENCE + TEXT, (1, 2), without_first, SEEDLINGS),
    Kind("bookkeeping", "the reference pads on the left and does not say so", PADDING + REFERENCE, (6, 18),
         lambda run, n: put(run.reference, pads_left=True, tells=(), batch=n), SEEDLINGS),
    Kind("bookkeeping", "the reference is off by one", SHIFT, (1, -1), shifted_reference, SEEDLINGS),
    Kind("bookkeeping", "weights are those of another row", LEAK + GROUPS, (1, 2), collated(other_weights), SOME),
    Kind("bookkeeping", "rows are not cut where they end", LEAK + UNKNOWN, (1, 100),
         partial(over_the_end, scored=False), SOME),
    Kind("bookkeeping", "words take the place of the end", LEAK + UNKNOWN, (" Wait", "#"), goes_on, SOME),
    Kind("bookkeeping", "completions are counted wrongly", GROUPS, (1, -1), collated(miscounted), SOME),
    Kind("bookkeeping", "the reference has another rope", REFERENCE, (1.2, 4.0),
         in_reference(lambda model, factor: rotary(model, factor=factor)), SEEDLINGS),
    Kind("bookkeeping", "a table of logprobs is too narrow", NAN, (4, 9), collated(room_for), HALVES),
    Kind("bookkeeping", "logprobs are late within a draft", SHIFT, (3, 6),
         lambda run, n: retold(run, lambda v: in_chunks(v, n)), SOME),
    Kind("bookkeeping", "completions are looked for at the end of rows", SHIFT + PADDING, (16, 4), at_the_end, SOME),
    Kind("bookkeeping", "rows of a pack come ever later", SHIFT, (2, 4), collated(packed_late), SOME),
    Kind("bookkeeping", "an echo is taken for a completion", LEAK + TEXT + UNKNOWN, ("echo",), with_echo, EVEN),
    Kind("bookkeeping", "a group is filtered out of one list", GROUPS + ROWS, (0, 1), collated(filtered), SOME),
    Kind("bookkeeping", "a session is kept by prompt", GROUPS + ROWS + TEXT, (2, 3), one_session, EVEN),
    Kind("bookkeeping", "the reference has another vocabulary", REFERENCE + VOCABULARY, (slice(21, 31), slice(8, 200)),
         in_reference(reordered), SEEDLINGS),
    Kind("bookkeeping", "all is trained but what was drawn", LEAK, (1, 2), lambda run, n: {
        "turns": n, "collate": partial(weighed, weigh=lambda w: 1 - w)}, EVEN),
    Kind("bookkeeping", "weights are padded on the other side", LEAK + PADDING, ("right",), collated(of_other_side),
         SOME),
    Kind("bookkeeping", "the reference ties its embeddings", REFERENCE + VOCABULARY, ("tied",),
         in_reference(lambda model, _: tied(model)), SEEDLINGS),
    Kind("bookkeeping", "a tool's answers are those of another group", GROUPS + TEXT, (1, 2), lambda run, by: with_tool(
        run, 0) | {"collate": partial(of_another_tool, by=by)}, EVEN),
    Kind("bookkeeping", "greedy rows are divided by zero", NAN + TEMPERATURE, (2, 3), at_zero, EVEN),
    Kind("bookkeeping", "logprobs of the reference have a floor", UNKNOWN + REFERENCE, (-2.0, -0.7), floored_reference,
         SEEDLINGS),
    Kind("bookkeeping", "logprobs of turns come in the opposite order", UNKNOWN + SHIFT + ROWS, (2, 3),
         lambda run, n: {"turns": n, "collate": turns_reversed}, EVEN),
    Kind("bookkeeping", "what a tool answers is trained", LEAK, (0, 1), lambda run, n: with_tool(run, n) | {
        "collate": partial(weighed, weigh=lambda w: np.where(np.arange(len(w)) >= np.argmax(w), 1.0, w))}, EVEN),
    Kind("bookkeeping", "rows are shuffled into minibatches, logprobs are not", ROWS + GROUPS, (0, 1),
         lambda run, seed: {"minibatches": 3, "collate": partial(shuffled_late, seed=seed)}, SEVERAL),
    Kind("bookkeeping", "the reference has a window", REFERENCE, (6, 12), in_reference(windowed), SEEDLINGS),
    Kind("bookkeeping", "masks begin where blocks do", LEAK, (8, 5), collated(in_whole_blocks), SOME, large=True),

    Kind("pair", "a temperature, and a template", TEMPERATURE + TEXT, (
        ("the server has its own temperature", 0.75, "another template", "Q: {}\nA: "),), both, SEVERAL),
    Kind("pair", "late, and padding", STALE + PADDING, (
        ("rollouts are late", 3, "the trainer pads on the left and does not say so", 16),), both, SEVERAL[2:]),
    Kind("pair", "off by one, and half precision", SHIFT + DTYPE, (
        ("off by one, with 0 at the edge", -1, "the server computes in half precision", torch.bfloat16),), both,
         SEVERAL[4:]),
    Kind("pair", "by arrival, and late", ROWS + STALE, (
        ("logprobs by arrival in a group", "group", "rollouts are late", 2),), both, ("well", "crisp", "slender")),
    Kind("pair", "another vocabulary, and a temperature of the trainer", VOCABULARY + TEMPERATURE, (
        ("the server has another vocabulary", slice(21, 31), "the trainer has its own temperature", 1.3),), both, SOME),
    Kind("pair", "dropout, and a top-k", DROPOUT + CUT, (("dropout", 0.08, "the server has its own top-k", 5),), both,
         EVEN),
    Kind("pair", "the prompt is trained, and late", LEAK + STALE, (
        ("the prompt is trained", 3, "rollouts are late", 2),), both, SOME[3:]),
    Kind("pair", "a top-p, and late", CUT + STALE, (
        ("the server has its own top-p", 0.8, "rollouts are late", 2),), both, EVEN),
    Kind("pair", "a template, and dropout", TEXT + DROPOUT, (
        ("another template", "### {}\n", "dropout", 0.1),), both, SOME),
    Kind("pair", "off by one, and a temperature", SHIFT + TEMPERATURE, (
        ("off by one, with 0 at the edge", 1, "the server has its own temperature", 1.4),), both, SEVERAL),
    Kind("pair", "another group, and half precision", GROUPS + DTYPE, (
        ("logprobs of another group", 1, "the trainer computes in half precision", torch.bfloat16),), both, SEVERAL),
    Kind("pair", "padding, and a temperature of the trainer", PADDING + TEMPERATURE, (
        ("the server pads on the left and does not say so", 32, "the trainer has its own temperature", 1.3),), both,
         SOME[2:]),
    Kind("pair", "by arrival, and a system prompt", ROWS + TEXT, (
        ("logprobs by arrival in a group", "group", "the server adds a system prompt", "Be brief."),), both, (
            "well", "limpid", "curt", "slender")),
    Kind("pair", "another vocabulary, and late", VOCABULARY + STALE, (
        ("the server has another vocabulary", slice(40, 240), "rollouts are late", 3),), both, EVEN),

    Kind("clean", "adapters of other ranks", (CLEAN,), range(10), lambda run, _: None, ("lora", "lora", "lora first")),
    Kind("clean", "three turns", (CLEAN,), range(6), lambda run, _: {"turns": 3}, ("old", "lora", "mute", "limpid")),
    Kind("clean", "both sides in half precision", (CLEAN, *DTYPE), range(8), lambda run, _: None,
         ("half lora", "half crisp")),
    Kind("clean", "examples in the prompt", (CLEAN,), range(6), lambda run, n: {"asks": shown(1 + n % 3)}, SOME),
    Kind("clean", "no cache", (CLEAN,), range(5), lambda run, _: put(run.server, forced={"use_cache": False}), SOME),
    Kind("clean", "a step of a large model", (CLEAN,), range(3), lambda run, _: None, ("large",)),
    Kind("clean", "a step of some other shape", (CLEAN,), range(12), lambda run, _: None, (*SOME, "first", "spare")),
    Kind("clean", "a tool answers between turns", (CLEAN,), range(6), with_tool, EVEN),
    Kind("clean", "three tokens", (CLEAN,), range(4), lambda run, n: {"max_tokens": 3}, ("sober", "hushed", "burly")),
    Kind("clean", "half precision everywhere", (CLEAN, *DTYPE), range(6), lambda run, _: None,
         ("half crisp", "half lora")),
    Kind("clean", "half precision at two temperatures", (CLEAN, *DTYPE), range(5), lambda run, _: None,
         ("half crisp", "half lora")),
    Kind("clean", "half precision, tepid or adapted", (CLEAN, *DTYPE), range(4), lambda run, _: None,
         ("half crisp", "half lora")),
    Kind("clean", "half precision, and a rank of one or many groups", (CLEAN, *DTYPE), range(4), lambda run, _: None,
         ("half crisp", "half lora", "half")),
    Kind("clean", "half precision, with no echo or an adapter", (CLEAN, *DTYPE), range(8), lambda run, _: None, HALVES),
    Kind("clean", "a cut in half precision", (CLEAN, *DTYPE), range(4), lambda run, n: ASKED[n], HALVES[1:]),
    Kind("clean", "half precision, crisp, adapted or hushed", (CLEAN, *DTYPE), range(6), lambda run, _: None, HALVES),
]  # fmt: skip
