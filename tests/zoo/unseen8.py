"""Faults for the doctor by one more person who has not read it: kinds that no other part has, most of real reports.

Do not open this file while you improve the doctor. Once its answers were looked at, it belongs to `build`.

What is right was decided by the rules of `unseen7`, before any answer was seen: a cause is right if its remedy in
`causes.FIXES` ends the fault. Where the weights are old and another sync does not end it, `NONE` is right, too. A law
that keeps only some tokens, but is no top-p and no top-k, may be called by their name or by none. What a run asks for
by name is no fault; a server that does or tells something else, or is wrong besides, is one."""

from __future__ import annotations

import copy
import itertools
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rl_notebook.core import Completion, Datum, PromptGroup
from rl_notebook.datums import datums_from_groups
from rl_notebook.losses import LossOptions

from .faults import (
    CLEAN, CUT, DROPOUT, DTYPE, LEAK, PADDING, SHIFT, STALE, TEMPERATURE, TEXT, UNKNOWN, WORLDS, Kind, both, every,
    forced, late, other_reference, paired, put, reprompted, through_text, told, weighed, windowed,
)  # fmt: skip
from .machines import Weights
from .steps import Run, World
from .unseen import (
    GROUPS, NAN, REFERENCE, ROWS, VOCABULARY, collated, hooked, ids_of, server, trainer,
)  # fmt: skip
from .unseen3 import agreed, best, blocks, logits_of, picked, replaced, rowwise, skipped
from .unseen4 import in_order, sees, with_ids, with_tool
from .unseen5 import in_the_loss, rescored, shared
from .unseen7 import honoured, in_asking, in_several

WORLDS |= {
    "sultry": World(temperature=1.7, prompts=5),
    "nippy": World(temperature=0.6, prompts=5, completions=6),
    "airy": World(temperature=1.25, prompts=3, completions=5),
    "tacit": World(can_echo=False, prompts=4, completions=6, warm_up=4),
    "tacit nippy": World(can_echo=False, temperature=0.6, prompts=5, completions=5),
    "tacit sultry": World(can_echo=False, temperature=1.7, prompts=3, completions=6),
    "lean": World(lora_rank=2, learning_rate=2.5e-3, prompts=5),
    "stout": World(lora_rank=20, learning_rate=7e-4, prompts=3, completions=6),
    "lean airy": World(lora_rank=2, learning_rate=2.5e-3, temperature=1.25, prompts=5),
    "spread": World(prompts=11, completions=3, max_tokens=18),
    "deep": World(prompts=2, completions=14, max_tokens=26),
    "terse": World(prompts=7, completions=5, max_tokens=8),
    "verbose": World(prompts=2, completions=5, max_tokens=48, warm_up=3),
    "avid": World(learning_rate=1.5e-4, prompts=6),
    "half nippy": World(dtype="bfloat16", temperature=0.6, completions=5),
    "half lean": World(dtype="bfloat16", lora_rank=2, learning_rate=2.5e-3, prompts=5),
    "half tacit": World(dtype="bfloat16", can_echo=False, prompts=6),
    "budding": World(warm_up=0, prompts=5, completions=5),
    "budding nippy": World(warm_up=0, temperature=0.6, completions=6),
    "budding lean": World(warm_up=0, lora_rank=2, learning_rate=2.5e-3),
    "stadium": World(prompts=5, completions=18),
    "stadium lean": World(prompts=4, completions=24, lora_rank=2, learning_rate=2.5e-3),
    "stadium tacit": World(prompts=3, completions=32, can_echo=False),
}
SOME = ("nippy", "tacit", "lean", "deep", "spread", "airy", "verbose", "avid")  # taken in turns
EVEN = ("tacit", "stout", "deep", "spread", "lean", "avid", "verbose")  # at temperature 1
SEVERAL = ("airy", "lean", "tacit", "spread", "nippy", "stout", "terse")  # groups
MANY = ("spread", "stadium", "avid")  # rows, so many that their numbers have two digits
TEMPERED = ("nippy", "sultry", "lean airy", "tacit nippy")
HOT = ("sultry", "tacit sultry")
WHOLE = ("avid", "tacit", "spread", "nippy")  # without an adapter
ADAPTED = ("lean", "stout", "lean airy")
HIDDEN = ("stadium", "stadium lean", "stadium tacit")  # at temperature 1, with many tokens
BUDDING = ("budding", "budding nippy", "budding lean")
HALVES = ("half nippy", "half lean", "half tacit")


# --- the draw -----------------------------------------------------------------------------------------------------


def by_request(run: Run, change: Callable[[int, list[int]], Any]) -> None:
    "Before each request, with its number and its prompt, the server is changed."
    inner, asked = run.server.sample, itertools.count()

    async def sample(prompt, params):
        change(next(asked), [int(t) for t in prompt])
        return await inner(prompt, params)

    put(run.server, sample=sample)


def condensed(run: Run, how: tuple[int, Callable[[Tensor], Tensor]], **fields: Any) -> None:
    "When a batch is condensed, two rows take the place, and the settings, of an evaluation that has ended."

    def change(i: int, scores: Tensor, _: Tensor) -> Tensor:
        if i < how[0] or len(scores) < 3:
            return scores
        return torch.cat([scores[:-2], how[1](scores[-2:])])

    with_ids(run, change, **fields)


def overlapping(run: Run, how: tuple[int, int]) -> None:
    "The trainer divides logits in place, chunk by chunk, and chunks overlap."
    size, overlap = how

    def one(model: Any, d: Datum) -> Tensor:
        logits = logits_of(run.trainer, model, d.tokens)[:-1]
        for at in range(size, len(logits), size):
            logits[at - overlap : at] /= run.trainer.temperature
        return picked(logits, d.tokens[1:])

    rowwise(run.trainer, one)


def one_of_three(run: Run, t: float) -> None:
    "One of three servers has its own temperature, and all report raw."
    put(run.server, reports="raw")
    by_request(run, lambda i, _: put(run.server, forced={} if i % 3 else {"temperature": t}))


def in_later_turns(run: Run, arguments: dict[str, Any]) -> dict[str, Any]:
    "Later turns are drawn otherwise, and raw is reported."
    [mark] = ids_of(run, "<|assistant|>")
    put(run.server, reports="raw")
    by_request(run, lambda _, prompt: put(run.server, forced=arguments if prompt.count(mark) > 1 else {}))
    return {"turns": 2}


def with_a_baseline(run: Run, rows: int) -> None:
    "The first of each group are drawn greedily, as a baseline for the others."
    with_ids(run, lambda i, scores, ids: torch.cat([best(scores[:rows], 1), scores[rows:]]), reports="raw")


def from_a_draft(run: Run, k: int) -> None:
    "A draft says which tokens there are to choose from."
    draft = copy.deepcopy(run.server.model)
    skipped(draft, 1)

    def change(i: int, scores: Tensor, ids: Tensor) -> Tensor:
        guess = draft(ids, use_cache=False).logits[:, -1]
        return scores.masked_fill(guess < guess.topk(k).values[:, -1:], -torch.inf)

    with_ids(run, change)


def tired(run: Run, by: float, **fields: Any) -> None:
    "What was just said is less likely, and with each token less so."

    def change(i: int, scores: Tensor, ids: Tensor) -> Tensor:
        less = torch.zeros_like(scores)
        for back in range(min(8, ids.shape[1]), 0, -1):
            less.scatter_(1, ids[:, -back, None], by * 0.75 ** (back - 1))
        return scores - less

    with_ids(run, change, **fields)


def counted(run: Run, by: float, **fields: Any) -> None:
    "What was drawn is less likely each time that it was."

    def change(i: int, scores: Tensor, ids: Tensor) -> Tensor:
        drawn = ids[:, ids.shape[1] - i :]
        return scores - by * torch.zeros_like(scores).scatter_add(1, drawn, torch.ones_like(drawn, dtype=scores.dtype))

    with_ids(run, change, **fields)


def two_prompts(run: Run, words: str) -> None:
    "A second way to put the prompt has half of the say."
    more = torch.tensor([ids_of(run, words)])

    def change(i: int, scores: Tensor, ids: Tensor) -> Tensor:
        told = torch.cat([ids[:, :1], more.expand(len(ids), -1), ids[:, 1:]], 1)
        other = run.server.model(told, use_cache=False).logits[:, -1].float()
        return torch.logaddexp(scores.float().log_softmax(-1), other.log_softmax(-1))

    with_ids(run, change)


def leaning(run: Run, share: float) -> None:
    "Scores of a row lean to the mean of its batch."
    with_ids(run, lambda i, scores, ids: torch.lerp(scores, scores.mean(0, keepdim=True), share))


# --- what is told of it -------------------------------------------------------------------------------------------


def entropy_told(run: Run, _: int) -> None:
    "What a token was expected to have is told, not what it has."

    @torch.no_grad()
    def says(c: Completion) -> Completion:
        start, whole = len(c.prompt_tokens), [*map(int, c.prompt_tokens), *map(int, c.tokens)]
        logits = run.server.model(torch.tensor([whole])).logits[0, start - 1 : -1].float()
        own = lambda t: (-torch.distributions.Categorical(logits=logits / t).entropy()).double().numpy()
        return replace(c, logprobs=own(1.0), sampling_logprobs=own(c.params.temperature or 1.0))

    put(run.server, says=says)


def moved(v: np.ndarray, by: int) -> np.ndarray:
    "Numbers that are off by one, with a 0 at the edge."
    return np.r_[v[1:], 0.0] if by > 0 else np.r_[0.0, v[:-1]]


def as_moved(c: Completion, by: int) -> Completion:
    return replace(c, logprobs=moved(c.logprobs, by), sampling_logprobs=moved(c.sampling_logprobs, by))


def one_of_two_is_off(run: Run, by: int) -> None:
    "One of two servers is off by one."
    says = (copy.copy, partial(as_moved, by=by))
    by_request(run, lambda i, _: put(run.server, says=says[i % 2]))


def translated(run: Run, ids: slice) -> Callable[[Sequence[int]], list[int]]:
    "Ids of a tokenizer that has some tokens in another order."
    table = np.arange(run.server.model.config.vocab_size)
    table[ids] = np.roll(table[ids], 1)
    return lambda tokens: table[np.asarray(tokens, int)].tolist()


def read_by_others(run: Run, ids: slice) -> None:
    "A client has another tokenizer than the server, and its ids for what was said."
    other = translated(run, ids)
    put(run.server, says=lambda c: replace(c, tokens=np.array(other(c.tokens))))


# --- text ---------------------------------------------------------------------------------------------------------


def reworded(run: Run, form: str) -> None:
    "What a user says is put into another form."
    through_text(run, lambda s: re.sub(
        r"(<\|user\|>)(.*?)(<\|end\|>)", lambda m: m[1] + form.replace("%s", m[2]) + m[3], s, flags=re.S))  # fmt: skip


def in_lines(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [r | {"question": f"Solve this:\n{r['question']}\nThen stop."} for r in rows]


def tried_again(run: Run, words: str) -> None:
    "Each third request was tried again, with a word more."
    through_text(run, lambda s: s.replace("<|end|><|assistant|>", f"{words}<|end|><|assistant|>"))
    reads = (list, run.server.reads, list)
    by_request(run, lambda i, _: put(run.server, reads=reads[i % 3]))


def with_bos(run: Run, n: int) -> None:
    "The trainer puts a bos before each row, though it has one."
    more = [run.tokenizer.bos_token_id] * n
    rowwise(run.trainer, lambda model, d: picked(
        logits_of(run.trainer, model, [*more, *d.tokens])[n:-1], d.tokens[1:]))  # fmt: skip


# --- weights ------------------------------------------------------------------------------------------------------


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


async def after_an_evaluation(run: Run, how: tuple[int, int]) -> None:
    "An evaluation loads an old snapshot, which serves the first groups of the step, too."
    old = copy.deepcopy(run.server.model)
    await run.update(how[0])
    inner, asked, newest = run.server.sample, itertools.count(), run.server.model

    async def sample(prompt, params):
        put(run.server, model=old if next(asked) < how[1] else newest)
        try:
            return await inner(prompt, params)
        finally:
            put(run.server, model=newest)

    put(run.server, sample=sample)


async def left_offloaded(run: Run, layer: int) -> None:
    "A layer of the trainer was offloaded before some updates, and what scores has it as it was."
    before = run.trainer.states[await run.trainer.save_state("offloaded")]
    old = {n: t for n, t in before.items() if f"layers.{layer}." in n}
    await run.update(4)
    put(run.trainer, altered=lambda model: model.load_state_dict(old, strict=False))


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


async def rows_without(run: Run, share: float) -> None:
    "Some rows of a batch are served without the adapter."
    await run.update(3)
    plain, inner = copy.deepcopy(run.server.model), run.server.sample
    plain.load_state_dict(run.sync.base)

    async def sample(prompt, params):
        newest, adapted = run.server.model, await inner(prompt, params)
        put(run.server, model=plain)
        try:
            return [*(await inner(prompt, params))[: int(share * params.n)], *adapted[int(share * params.n) :]]
        finally:
            put(run.server, model=newest)

    put(run.server, sample=sample)


# --- models -------------------------------------------------------------------------------------------------------


def gated(model: Any, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    "Feed-forwards that make what they hand down in their own way, of a gate and of what goes through it."
    replaced([b.mlp for b in blocks(model)], lambda m, x: m.down_proj(change(m.act_fn(m.gate_proj(x)), m.up_proj(x))))


def small_gates(model: Any, dtype: torch.dtype) -> None:
    "Gates multiply in half precision."
    gated(model, lambda gate, up: (gate.to(dtype) * up.to(dtype)).to(up.dtype))


def few_active(model: Any, share: float) -> None:
    "Of what a feed-forward hands down, the smallest are zero."

    def change(gate: Tensor, up: Tensor) -> Tensor:
        whole = gate * up
        return whole * (whole.abs() > whole.abs().float().quantile(share, -1, keepdim=True))

    gated(model, change)


def begins_under_autocast(model: Any, layers: int) -> None:
    "The first layers compute in half precision."

    def forward(block: Any, *args: Any, **told: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return type(block).forward(block, *args, **told)

    replaced(blocks(model)[:layers], forward)


def linears(model: nn.Module) -> list[nn.Linear]:
    return [m for m in model.modules() if isinstance(m, nn.Linear)]


@torch.no_grad()
def in_blocks(model: nn.Module, bits: int) -> None:
    "Weights share an exponent with their block of 32."
    for m in linears(model):
        parts = m.weight.float().unflatten(-1, (-1, 32))
        most = parts.abs().amax(-1, keepdim=True).clamp(min=1e-12)
        step = torch.exp2((most / (2 ** (bits - 1) - 1)).log2().ceil())
        m.weight.copy_(((parts / step).round() * step).flatten(-2))


@torch.no_grad()
def zero_points_off(model: nn.Module, bits: int) -> None:
    "Weights are whole numbers from a zero point, which is one too high when they are read."
    for m in linears(model):
        low, high = m.weight.amin(1, keepdim=True), m.weight.amax(1, keepdim=True)
        step = ((high - low) / (2**bits - 1)).clamp(min=1e-12)
        m.weight.copy_(low + (((m.weight - low) / step).round() + 1) * step)


@torch.no_grad()
def scales_of_others(model: nn.Module, size: int) -> None:
    "Whole numbers of a group of columns are read with the scale of the next."
    for m in linears(model):
        parts = m.weight.float().unflatten(-1, (-1, size))
        step = parts.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        m.weight.copy_(((parts / step).round() * step.roll(1, -2)).flatten(-2))


@torch.no_grad()
def of_lower_rank(model: Any, rank: int) -> None:
    "Matrices of feed-forwards are products of thin ones."
    for block in blocks(model):
        for m in linears(block.mlp):
            u, s, v = torch.linalg.svd(m.weight.float(), full_matrices=False)
            m.weight.copy_((u[:, :rank] * s[:rank]) @ v[:rank])


@torch.no_grad()
def keys_exchanged(model: Any, layers: slice) -> None:
    "Heads of keys are in another order than those of values."
    for block in blocks(model)[layers]:
        weight = block.self_attn.k_proj.weight
        weight.copy_(weight.unflatten(0, (-1, block.self_attn.head_dim)).flip(0).flatten(0, 1))


def placeless(model: Any, layer: int) -> None:
    "A layer knows no positions."
    attention = blocks(model)[layer].self_attn

    def forget(module: Any, args: Any, told: dict[str, Any]) -> Any:
        cos, sin = told["position_embeddings"]
        return args, told | {"position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}

    if not attention._forward_pre_hooks:
        attention.register_forward_pre_hook(forget, with_kwargs=True)


def fed_forward_twice(model: Any, layer: int) -> None:
    "The feed-forward of a layer is there twice."
    block = blocks(model)[layer]
    if not block._forward_hooks:
        block.register_forward_hook(lambda m, read, given: given + m.mlp(m.post_attention_layernorm(given)))


def normed_embeddings(model: Any, share: float) -> None:
    "Embeddings are normed."

    def change(read: Tensor, given: Tensor) -> Tensor:
        size = given.float().pow(2).mean(-1, keepdim=True).sqrt().clamp(min=1e-6)
        usual = model.get_input_embeddings().weight.float().pow(2).mean().sqrt()
        return torch.lerp(given, (given * usual / size).to(given.dtype), share)

    hooked(model, "embed_tokens", change)


def every_second_block(model: Any, n: int) -> None:
    "Attention sees what is near, and every second block of what is far."
    sees(model, lambda q, k, whole: (q - k < n) | ((k // n) % 2 == 0))


def far_keys_pooled(scores: Tensor, queries: Tensor, keys: Tensor, n: int) -> Tensor:
    "Keys of a block that is far have equal shares."
    shares, block = scores.softmax(-1), keys[0] // n
    same = (block[:, None] == block[None]).to(shares.dtype)
    return torch.where(queries // n - keys // n > 1, shares @ (same / same.sum(0)), shares)


def put_together_evenly(scores: Tensor, queries: Tensor, keys: Tensor, n: int) -> Tensor:
    "Parts of so many keys are attended to by themselves, and count alike."
    parts = []
    for at in range(0, scores.shape[-1], n):
        inside = (keys >= at) & (keys < at + n)
        own = scores.masked_fill(~inside, torch.finfo(scores.dtype).min).softmax(-1)
        parts.append(torch.where(queries >= at, own, 0.0))
    whole = torch.stack(parts).sum(0)
    return whole / whole.sum(-1, keepdim=True)


def small_adapters(model: nn.Module, dtype: torch.dtype) -> None:
    "Adapters multiply in half precision, beside weights in single."
    for part in ("lora_A.default", "lora_B.default"):
        hooked(model, part, lambda read, given: given.to(dtype).to(given.dtype))


def filled_with_ends(run: Run, multiple: int) -> None:
    "The server fills prompts up on the left, with ends."
    end = [run.tokenizer.eos_token_id]
    put(run.server, fed=lambda tokens: end * (-len(tokens) % multiple) + [int(t) for t in tokens])


def one_of_two_trains(run: Run, p: float) -> None:
    "One of two servers is in training mode."
    every(run.server.model, "attention_dropout", p)
    by_request(run, lambda i, _: run.server.model.train(bool(i % 2)))


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


def masked_one_off(run: Run, by: int) -> None:
    "Rows are filled up on the left, and the mask of it is off by so many."

    def one(model: Any, d: Datum) -> Tensor:
        n = 24 - len(d.tokens) % 24
        place = torch.arange(n + len(d.tokens))
        mask, positions = (place >= n - by).long(), (place - n).clamp(min=0)
        told = {"attention_mask": mask[None], "position_ids": positions[None]}
        return picked(logits_of(run.trainer, model, [*[run.trainer.pad] * n, *d.tokens], **told)[n:-1], d.tokens[1:])

    rowwise(run.trainer, one)


def one_batch_off(run: Run, how: tuple[int, int]) -> None:
    "One micro-batch of the trainer is off by one."
    rescored(run.trainer, lambda rows: [
        row.roll(how[1]) if i // 4 == how[0] else row for i, row in enumerate(rows)])  # fmt: skip


def sorted_once_more(run: Run, sign: int) -> None:
    "Rows are scored by length, and put back by the order instead of its inverse."

    def change(rows: list[Tensor]) -> list[Tensor]:
        order = sorted(range(len(rows)), key=lambda i: (sign * len(rows[i]), i % 3, i))
        scored = [rows[i] for i in order]
        return [scored[i] for i in order]

    rescored(run.trainer, change)


def a_number_is_broken(run: Run, value: float) -> None:
    "One number of a file that the trainer reads is broken."

    @torch.no_grad()
    def alter(model: Any) -> None:
        blocks(model)[1].post_attention_layernorm.weight[7] = value

    put(run.trainer, altered=alter)


# --- bookkeeping --------------------------------------------------------------------------------------------------


def ended_are_off(groups: Sequence[PromptGroup], by: int) -> list[Datum]:
    "What ended is off by one, and what was cut is not."
    datums = datums_from_groups(groups)
    ends = [s.finish_reason == "stop" for g in groups for s in g.samples]
    return paired(datums, [moved(v, by) if end else v for v, end in zip(told(datums), ends, strict=True)])


def runs_of(active: np.ndarray) -> list[slice]:
    "Where a mask is true."
    edges = np.flatnonzero(np.diff(active.astype(int), prepend=0, append=0))
    return [slice(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def turns_are_off(groups: Sequence[PromptGroup], by: int) -> list[Datum]:
    "Each turn is off by one by itself."
    out = []
    for d in datums_from_groups(groups):
        assert d.sampler_logprobs is not None
        series = d.sampler_logprobs.copy()
        for part in runs_of(d.active):
            series[part] = moved(series[part], by)
        out.append(replace(d, sampler_logprobs=series))
    return out


def found_by(run: Run, text: str) -> dict[str, Any]:
    "Where a completion begins is found by looking for its first token, or for one of a text."
    marks = ids_of(run, text)

    def collate(groups: Sequence[PromptGroup]) -> list[Datum]:
        out = []
        for d in datums_from_groups(groups):
            assert d.sampler_logprobs is not None
            targets, start = d.tokens[1:], int(np.argmax(d.active))
            first = int(np.argmax(np.isin(targets, marks or [targets[start]])))
            places = np.arange(len(targets))
            weights = np.where((places >= min(first, start)) & (places < start), 1.0, d.weights)
            out.append(replace(d, weights=weights, sampler_logprobs=np.nan_to_num(d.sampler_logprobs)))
        return out

    return {"collate": collate}


def one_worker_trains(groups: Sequence[PromptGroup], n: int) -> list[Datum]:
    "One of two workers trains the end of the prompt."
    whole = weighed(groups, lambda w: np.where(np.arange(len(w)) >= np.argmax(w) - n, 1.0, w))
    return [w if i % 2 else d for i, (d, w) in enumerate(zip(datums_from_groups(groups), whole, strict=True))]


def beyond_a_turn(groups: Sequence[PromptGroup], n: int) -> list[Datum]:
    "What follows a turn is trained, for so many tokens."

    def weigh(w: np.ndarray) -> np.ndarray:
        out = w.copy()
        for part in runs_of(w > 0.5):
            out[part.stop : part.stop + n] = 1.0
        return out

    return weighed(groups, weigh)


def as_text(datums: list[Datum], first: int) -> list[int]:
    "Rows are sorted by their number, as text."
    return sorted(range(len(datums)), key=lambda i: str(i + first))


def groups_as_text(datums: list[Datum], first: int) -> list[int]:
    "Groups are sorted by their number, as text."
    numbers = [*dict.fromkeys(d.group for d in datums)]
    order = sorted(range(len(numbers)), key=lambda i: str(i + first))
    return [i for g in order for i, d in enumerate(datums) if d.group == numbers[g]]


def in_a_snake(datums: list[Datum], ranks: int) -> list[int]:
    "Rows are dealt to ranks there and back, and gathered as if they were dealt in one direction."
    rounds = [list(range(len(datums)))[at : at + ranks] for at in range(0, len(datums), ranks)]
    return [i for n, dealt in enumerate(rounds) for i in (dealt[::-1] if n % 2 else dealt)]


def from_the_end(datums: list[Datum], every_nth: int) -> list[int]:
    "A stack gives the rows of a group back from its end."
    place = {(d.group, d.sample): i for i, d in enumerate(datums)}
    sizes = {d.group: max(e.sample for e in datums if e.group == d.group) for d in datums}
    return [place[d.group, sizes[d.group] - d.sample] if d.group % every_nth == 0 else i for i, d in enumerate(datums)]


def under_others(groups: Sequence[PromptGroup], others: dict[int, int]) -> list[Datum]:
    "Completions of some groups come after the prompt of another."
    place = {g.index: i for i, g in enumerate(groups)}
    firsts = [groups[others.get(i, i)].samples[0] for i in range(len(groups))]
    prompts = [s.tokens[: s.prompt_len] for s in firsts]
    datums = datums_from_groups(groups)
    return reprompted(datums, [prompts[place[d.group]] for d in datums])


def numbers_of_first_turns(groups: Sequence[PromptGroup], blank: float) -> list[Datum]:
    "Of a conversation only the first turn keeps its logprobs."
    out = []
    for d in datums_from_groups(groups):
        assert d.sampler_logprobs is not None
        series = d.sampler_logprobs.copy()
        for part in runs_of(d.active)[1:]:
            series[part] = blank
        out.append(replace(d, sampler_logprobs=series))
    return out


async def mixed_reference(run: Run, how: tuple[int, float]) -> None:
    "The reference is mixed with a later policy."
    before = {n: p.detach().clone() for n, p in run.reference.model.named_parameters()}
    await other_reference(run, how[0])
    for n, p in run.reference.model.named_parameters():
        p.data = torch.lerp(before[n], p.data, how[1])


# --- the table ----------------------------------------------------------------------------------------------------

ordered = lambda order: lambda run, x: {"collate": partial(in_order, order=lambda datums: order(datums, x))}
in_reference = lambda alter: lambda run, x: put(run.reference, altered=lambda model: alter(model, x))
attending = lambda shares: lambda model, x: shared(model, lambda *parts: shares(*parts, x))
divided = lambda t: lambda scores: scores / t
HALF = (torch.bfloat16, torch.float16)

KNOWN: list[Kind] = [
    Kind("draw", "a proxy limits the temperature", TEMPERATURE, (1.0, 1.45), lambda run, most: forced(
        run, temperature=min(most, run.world.temperature)), HOT),
    Kind("draw", "two rows keep an evaluation's temperature", TEMPERATURE, (0, 6), lambda run, at: condensed(
        run, (at, divided(0.4 if at else 1.6))), ("deep", "airy", "tacit", "stout")),
    Kind("draw", "a fused kernel forgets a scale of logits", TEMPERATURE, (0.8, 1.2), trainer(
        lambda model, scale: hooked(model, "lm_head", lambda read, given: given * scale)), SOME, large=True),
    Kind("draw", "overlapping chunks are divided in place", TEMPERATURE, ((6, 2), (5, 4)), overlapping, TEMPERED),
    Kind("draw", "a nucleus is asked for, and the trainer has another temperature", TEMPERATURE, (0.7, 1.4),
         lambda run, t: put(run.trainer, temperature=t) or {"top_p": 0.9}, EVEN),
    Kind("hidden", "one of three servers has its own temperature, and raw is reported", TEMPERATURE, (0.3, 1.7),
         one_of_three, HIDDEN[:2]),
    Kind("hidden", "later turns have their own temperature, and raw is reported", TEMPERATURE, (0.5, 1.6),
         lambda run, t: in_later_turns(run, {"temperature": t}), EVEN),
    # The likeliest token is what temperature 0 gives, and top-k of 1.
    Kind("hidden", "the first of a group are a greedy baseline, and raw is reported", TEMPERATURE + CUT, (2, 5),
         with_a_baseline, HIDDEN[:2]),

    # A client that draws among the alternatives that a server lists.
    Kind("hidden", "what is listed is drawn from, and raw is reported", CUT, (2, 4), lambda run, k: put(
        run.server, forced={"top_k": k}, reports="raw"), HIDDEN[:2]),
    Kind("hidden", "later turns have their own cut, and raw is reported", CUT, (0.5, 0.75), lambda run, p:
         in_later_turns(run, {"top_p": p}), EVEN),
    Kind("draw", "a nucleus is asked for, and a narrower one is used", CUT, (0.4, 0.6), lambda run, p: forced(
        run, top_p=p) or put(run.server, reports="both") or {"top_p": 0.95}, HIDDEN),
    Kind("report", "a top-k is asked for, and told as raw", CUT, (2, 5), lambda run, k: put(
        run.server, reports="processed") or {"top_k": k}, EVEN),
    Kind("draw", "a draft says what there is to choose from", CUT + UNKNOWN, (3, 8), from_a_draft, SOME),

    Kind("weights", "long completions are of an earlier policy", STALE, ((2, True), (5, False)), long_ones_are_old,
         SEVERAL),
    Kind("weights", "norms do not travel", STALE + UNKNOWN, (6, 12), norms_stay, WHOLE),
    Kind("weights", "the first groups have the weights of an evaluation", STALE, ((3, 1), (6, 2)), after_an_evaluation,
         SEVERAL),
    # A sync cannot bring it back.
    Kind("weights", "a layer of the trainer stays offloaded", STALE + UNKNOWN, (0, 3), left_offloaded, SOME),
    Kind("weights", "a min-p and a temperature are asked for, and rollouts are late", STALE, (2, 4), lambda run, n:
         in_asking(late(run, n), honoured(run, agreed(run, 0.8) | {"min_p": 0.05})), EVEN),
    Kind("weights", "rollouts of several updates are late", STALE, (1, 3), lambda run, n: in_several(
        run, late(run, n)), SEVERAL, large=True),

    Kind("text", "content is sent as a list of parts", TEXT, ("[{'type': 'text', 'text': '%s'}]", "['%s']"), reworded,
         SOME),
    Kind("text", "the question is sent in quotation marks", TEXT, ('"%s"', "`%s`"), reworded, HALVES),
    Kind("text", "lines end otherwise", TEXT, ("\r\n", " "), lambda run, end: through_text(
        run, lambda s: s.replace("\n", end)) or {"asks": in_lines}, SOME),
    Kind("text", "what a tool answers is not sent", TEXT, (0, 1), lambda run, n: through_text(
        run, lambda s: re.sub(r"<\|system\|>tool:.*?<\|end\|>", "", s)) or with_tool(run, n), EVEN),
    Kind("text", "earlier answers end twice", TEXT, (2, 3), lambda run, turns: through_text(run, lambda s: re.sub(
        r"(<\|assistant\|>.*?<\|end\|>)", r"\1<|end|>", s, flags=re.S)) or {"turns": turns}, EVEN),
    Kind("text", "the trainer adds a bos to each row", TEXT, (1, 2), with_bos, SOME, large=True),
    Kind("text", "each third request has a word more", TEXT, (" Please.", " Hurry!!"), tried_again, SEVERAL),

    Kind("arithmetic", "gates multiply in half precision", DTYPE, HALF, server(small_gates), SOME, large=True),
    Kind("arithmetic", "adapters multiply in half precision", DTYPE, HALF, trainer(small_adapters), ADAPTED),
    Kind("arithmetic", "the first layers of the trainer are under autocast", DTYPE, (1, 3), trainer(
        begins_under_autocast), SOME),
    # Eight bits are a lower precision.
    Kind("arithmetic", "weights share exponents in blocks", DTYPE + UNKNOWN, (8,), server(in_blocks), SOME),

    Kind("bookkeeping", "what ended is off by one", SHIFT, (1, -1), collated(ended_are_off), SOME, large=True),
    Kind("model", "one micro-batch is off by one", SHIFT, ((0, 1), (2, -1)), one_batch_off, SOME),
    Kind("report", "one of two servers is off by one", SHIFT, (1, -1), one_of_two_is_off, SEVERAL),
    Kind("bookkeeping", "turns are off by one", SHIFT, (1, -1), lambda run, by: {
        "turns": 2, "collate": partial(turns_are_off, by=by)}, EVEN),

    Kind("bookkeeping", "a completion is found by its beginning", LEAK, ("", "0123456789"), found_by, SOME),
    Kind("bookkeeping", "one of two workers trains the end of the prompt", LEAK, (1, 5), collated(one_worker_trains),
         HALVES, large=True),
    Kind("bookkeeping", "what follows a turn is trained", LEAK, (1, 4), lambda run, n: {
        "turns": 2, "collate": partial(beyond_a_turn, n=n)}, EVEN),

    Kind("bookkeeping", "rows are sorted by their number as text", ROWS + GROUPS, (0, 1), ordered(as_text), MANY),
    Kind("bookkeeping", "rows are put back by an order instead of its inverse", ROWS + GROUPS, (1, -1),
         sorted_once_more, SOME, large=True),
    Kind("bookkeeping", "rows are dealt in a snake", ROWS + GROUPS, (3, 5), ordered(in_a_snake), SOME),
    Kind("bookkeeping", "a stack gives rows back from its end", ROWS, (1, 2), ordered(from_the_end), (
        "deep", "stout", "nippy", "terse")),

    Kind("bookkeeping", "two groups have the prompt of each other", GROUPS, (0, 1), lambda run, a: {
        "collate": partial(under_others, others={a: a + 1, a + 1: a})}, SEVERAL),
    Kind("bookkeeping", "one group has the prompt of the one before", GROUPS, (1, 2), lambda run, a: {
        "collate": partial(under_others, others={a: a - 1})}, HALVES + SEVERAL),
    Kind("bookkeeping", "groups are sorted by their number as text", GROUPS, (0, 1), ordered(groups_as_text), (
        "spread",)),

    Kind("model", "the pass with gradients pads on the left and does not say so", PADDING, (16, 5), lambda run, n:
         in_the_loss(run, pads_left=True, tells=(), batch=n) or {"minibatches": 2}, SEVERAL),
    Kind("model", "the mask of padding is off by some", PADDING, (1, 6), masked_one_off, SOME),
    Kind("model", "prompts are filled up with ends", PADDING, (32, 64), filled_with_ends, SOME, large=True),

    Kind("model", "one of two servers is in training", DROPOUT, (0.15, 0.04), one_of_two_trains, SEVERAL),
    Kind("model", "later updates have dropout", DROPOUT, (0.15, 0.03), later_in_training, SEVERAL),
    Kind("model", "values are dropped", DROPOUT, (0.02, 0.15), lambda run, p: put(
        run.trainer, training=True, altered=lambda model: hooked(
            model, "v_proj", lambda read, given: nn.functional.dropout(given, p))), SOME),

    Kind("text", "prompts are encoded by another tokenizer", VOCABULARY + TEXT, (slice(21, 31), slice(70, 96)),
         lambda run, ids: put(run.server, reads=translated(run, ids)), SOME),
    Kind("report", "completions are read by another tokenizer", VOCABULARY, (slice(21, 31), slice(8, 36)),
         read_by_others, SOME),

    Kind("bookkeeping", "the reference is mixed with a later policy", REFERENCE, ((4, 0.4), (2, 0.8)), mixed_reference,
         BUDDING[:2]),
    Kind("bookkeeping", "the reference has a window", REFERENCE, (6, 12), in_reference(windowed), BUDDING),

    Kind("bookkeeping", "later turns have no numbers", NAN, (np.nan,), lambda run, blank: {
        "turns": 2, "collate": partial(numbers_of_first_turns, blank=blank)}, EVEN),
    Kind("model", "a number of a file is broken", NAN, (np.nan,), a_number_is_broken, SOME),

    # Two at once: either is a right answer.
    Kind("pair", "a temperature, and a template", TEMPERATURE + TEXT, (
        ("the server has its own temperature", 0.75, "another template", "Q: {}\nA: "),), both, SEVERAL),
    Kind("pair", "late, and padding", STALE + PADDING, (
        ("rollouts are late", 3, "the trainer pads on the left and does not say so", 16),), both, SEVERAL[2:]),
    Kind("pair", "off by one, and half precision", SHIFT + DTYPE, (
        ("off by one, with 0 at the edge", -1, "the server computes in half precision", torch.bfloat16),), both,
         SEVERAL[4:]),
    Kind("pair", "by arrival, and late", ROWS + STALE, (
        ("logprobs by arrival in a group", "group", "rollouts are late", 2),), both, ("deep", "nippy", "stout")),
    Kind("pair", "another vocabulary, and a temperature of the trainer", VOCABULARY + TEMPERATURE, (
        ("the server has another vocabulary", slice(21, 31), "the trainer has its own temperature", 1.3),), both, SOME),
    Kind("pair", "dropout, and a top-k", DROPOUT + CUT, (("dropout", 0.08, "the server has its own top-k", 5),), both,
         EVEN),
    Kind("pair", "the prompt is trained, and late", LEAK + STALE, (
        ("the prompt is trained", 3, "rollouts are late", 2),), both, SOME[3:]),
]  # fmt: skip

OTHER: list[Kind] = [
    Kind("draw", "what was just said is less likely", UNKNOWN, (0.6, 2.0), tired, SOME),
    Kind("hidden", "what was just said is less likely, and raw is reported", UNKNOWN, (1.2, 3.0), partial(
        tired, reports="raw"), HIDDEN),
    Kind("hidden", "a penalty of frequency, and raw is reported", UNKNOWN, (0.8, 2.0), partial(
        counted, reports="raw"), HIDDEN[1:]),
    Kind("draw", "two prompts have a vote", UNKNOWN, ("Say it in words. ", "<|system|>Only one.<|end|>"), two_prompts,
         EVEN),
    Kind("draw", "rows lean to the mean of their batch", UNKNOWN, (0.3, 0.7), leaning, ("deep", "nippy", "stout",
         "tacit")),
    Kind("report", "entropies are told", UNKNOWN, (0,), entropy_told, SOME),

    # Weights that are sent whole end it; the sync that there is does not.
    Kind("weights", "what was learned travels in few bits", UNKNOWN + STALE, (1, 2), coarse_changes, SOME),
    Kind("weights", "rows of a batch lack the adapter", UNKNOWN + STALE, (0.25, 0.7), rows_without, ("stout", "lean")),

    Kind("model", "heads of keys are exchanged", UNKNOWN, (slice(0, 1), slice(3, 4)), server(keys_exchanged), SOME),
    Kind("model", "a layer knows no positions", UNKNOWN, (0, 3), server(placeless), SOME),
    Kind("model", "every second block of keys is seen", UNKNOWN, (4, 12), server(every_second_block), SOME),
    Kind("model", "small activations are zero", UNKNOWN, (0.3, 0.7), server(few_active), SOME, large=True),
    Kind("model", "embeddings are normed", UNKNOWN, (1.0,), server(normed_embeddings), SOME),
    Kind("model", "matrices are of lower rank", UNKNOWN, (96, 56), server(of_lower_rank), SOME),
    Kind("model", "a feed-forward is there twice", UNKNOWN, (0, 2), server(fed_forward_twice), SOME),
    Kind("model", "parts of attention are put together evenly", UNKNOWN, (8, 20), trainer(
        attending(put_together_evenly)), SOME, large=True),
    Kind("model", "far keys have equal shares", UNKNOWN, (6, 12), server(attending(far_keys_pooled)), SOME),
    Kind("model", "weights share exponents, and have few bits", UNKNOWN, (4, 3), server(in_blocks), SOME),
    Kind("model", "zero points are one off", UNKNOWN, (8, 6), server(zero_points_off), SOME),
    Kind("model", "scales are those of other columns", UNKNOWN, (32, 8), server(scales_of_others), SOME),
    Kind("model", "a nucleus is asked for, and activations are zero", UNKNOWN, (0.6, 0.8), lambda run, share:
         run.server.alter(lambda model: few_active(model, share)) or {"top_p": 0.9}, EVEN),
]  # fmt: skip


# --- clean --------------------------------------------------------------------------------------------------------


def through_files(run: Run, parts: int) -> None:
    "Snapshots pass through files, in several parts."
    load = run.server.load

    def read(new: Weights) -> None:
        names = sorted(new)
        with tempfile.TemporaryDirectory() as folder:
            for i in range(parts):
                save_file({n: new[n].contiguous() for n in names[i::parts]}, Path(folder) / f"{i}.safetensors")
            load({n: t for path in Path(folder).iterdir() for n, t in load_file(path).items()})

    put(run.server, load=read)


def drawn_anew(run: Run, every_nth: int) -> None:
    "Some requests fail after they were drawn, and are drawn anew with another seed."
    inner, asked = run.server.sample, itertools.count()

    async def sample(prompt, params):
        drawn = await inner(prompt, params)
        if next(asked) % every_nth:
            return drawn
        again = await inner(prompt, replace(params, seed=(params.seed or 0) + 77_777))
        return [replace(c, params=params) for c in again]

    put(run.server, sample=sample)


def some_are_gone(groups: Sequence[PromptGroup], seed: int) -> list[Datum]:
    "Some rollouts failed, whatever was in them."
    datums = datums_from_groups(groups)
    left = np.random.default_rng(seed).random(len(datums)) < 0.7
    return [d for d, here in zip(datums, left, strict=True) if here] or datums


def as_ids(run: Run, _: int) -> dict[str, Any]:
    "Prompts are rows of ids."

    def asks(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        words = [f"<|bos|><|user|>{r['question']}<|end|><|assistant|>" for r in rows]
        return [{"prompt_tokens": ids_of(run, text), "answer": r["answer"]}
                for r, text in zip(rows, words, strict=True)]  # fmt: skip

    return {"asks": asks}


def of_code(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    "Questions with what templates and formats have a meaning for."
    return [r | {"question": f'f = {{"x": [{r["question"]!r}, %s]}}  # {{{{x}}}} \\n <b>&amp;</b>'} for r in rows]


def computed_twice(run: Run, n: int) -> dict[str, Any]:
    "The trainer keeps no activations, and computes them again for gradients; its layers are in training mode for it."
    run.trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    put(run.trainer, training=True)
    return {"minibatches": 2 + n % 2}


def beginnings_shared(run: Run, _: int) -> None:
    "What prompts have in common is read once, and again after each sync."
    inner, load, seen = run.server.sample, run.server.load, list[tuple[list[int], Any]]()

    def loaded(new: Mapping[str, Tensor]) -> None:
        seen.clear()
        load(new)

    def common(a: list[int], b: list[int]) -> int:
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    async def sample(prompt, params):
        read, kept = run.server.fed(prompt)[:-1], None
        there, cache = max(seen, key=lambda entry: common(entry[0], read), default=([], None))
        if n := common(there, read):
            kept = copy.deepcopy(cache)
            if n < len(there):
                kept.crop(n - len(there))
            kept.batch_repeat_interleave(params.n)
        with torch.no_grad():
            seen.append((read, run.server.model(torch.tensor([read]), use_cache=True).past_key_values))
        put(run.server, forced={"past_key_values": kept} if n else {})
        return await inner(prompt, params)

    put(run.server, sample=sample, load=loaded)


def written_out(run: Run, _: int) -> None:
    "The server has a head of keys and values for each head of queries, those that share one alike."
    load = run.server.load

    def widened(name: str, t: Tensor) -> Tensor:
        shares = "k_proj" in name or "v_proj" in name
        return t.unflatten(0, (-1, 32)).repeat_interleave(2, 0).flatten(0, 1) if shares else t

    for block in blocks(run.server.model):
        for name in ("k_proj", "v_proj"):
            linear = getattr(block.self_attn, name)
            linear.weight = nn.Parameter(widened(name, linear.weight.detach()), requires_grad=False)
            put(linear, out_features=len(linear.weight))
        put(block.self_attn, num_key_value_groups=1)
    put(run.server, load=lambda new: load({n: widened(n, t) for n, t in new.items()}))


ASKED = ({"top_p": 0.92}, {"top_k": 7}, {"top_p": 0.7}, {"top_k": 3, "top_p": 0.9}, {"top_k": 25}, {"top_p": 0.97})
ASKED_TOO = ({"min_p": 0.03}, {"repetition_penalty": 1.15}, {"min_p": 0.25}, {"repetition_penalty": 1.4},
             {"min_p": 0.1, "repetition_penalty": 1.05}, {"repetition_penalty": 0.85})  # fmt: skip
KNOWN_TO_ALL = (0.75, 1.2, 0.55, 1.5, 0.9, 2.0)
CORRECTED = ({"kl_beta": 0.1}, {"policy_loss": "ppo", "tis": "token"}, {"policy_loss": "ppo", "kl_beta": 0.02})

WELL: list[Kind] = [
    Kind("clean", "a step of yet another shape", (CLEAN,), range(11), lambda run, _: None, (
        "sultry", "nippy", "airy", "tacit", "tacit nippy", "lean", "stout", "lean airy", "spread", "deep", "budding"),
         large=True),
    Kind("clean", "half precision, with no echo or an adapter", (CLEAN, *DTYPE), range(8), lambda run, _: None, HALVES),
    Kind("clean", "a cut at a temperature that all know", (CLEAN,), range(6), lambda run, n: agreed(
        run, KNOWN_TO_ALL[n]) | ASKED[n], EVEN, large=True),
    Kind("clean", "a cut at a temperature of 1", (CLEAN,), range(6), lambda run, n: ASKED[-1 - n], EVEN[2:]),
    Kind("clean", "a min-p or a penalty at a temperature that all know", (CLEAN,), range(6), lambda run, n: honoured(
        run, agreed(run, KNOWN_TO_ALL[-1 - n]) | ASKED_TOO[n]), EVEN[1:]),
    Kind("clean", "a cut in half precision", (CLEAN, *DTYPE), range(4), lambda run, n: ASKED[n], HALVES[1:]),
    Kind("clean", "several updates, a cut and a temperature", (CLEAN,), range(6), lambda run, n: agreed(
        run, KNOWN_TO_ALL[n]) | ASKED[n - 1] | {"minibatches": 2 + n % 2}, EVEN[3:], large=True),
    Kind("clean", "several updates of an adapter", (CLEAN,), range(5), lambda run, n: agreed(
        run, KNOWN_TO_ALL[n]) | {"minibatches": 2 + n % 3}, ("lean", "stout")),
    Kind("clean", "several updates in half precision", (CLEAN, *DTYPE), range(4), lambda run, n: {
        "minibatches": 2 + n % 2}, HALVES),
    Kind("clean", "several updates, corrected or held back", (CLEAN,), range(3), lambda run, n: {
        "minibatches": 2, "options": LossOptions(**CORRECTED[n])}, EVEN[4:]),
    Kind("clean", "short answers of a conversation", (CLEAN,), range(5), lambda run, n: {
        "turns": 2 + n % 2, "max_tokens": 3 + n}, EVEN),
    Kind("clean", "long completions of a narrow draw", (CLEAN,), range(4), lambda run, n: ASKED[n] | {
        "max_tokens": 60 + 15 * n}, ("tacit", "lean", "avid")),
    Kind("clean", "a tool answers, and a cut", (CLEAN,), range(4), lambda run, n: with_tool(run, n) | ASKED[n], EVEN),
    Kind("clean", "snapshots pass through files", (CLEAN,), range(1, 5), through_files, SOME),
    Kind("clean", "requests that failed are drawn anew", (CLEAN,), range(1, 5), drawn_anew, SOME[1:]),
    Kind("clean", "some rollouts are gone", (CLEAN,), range(4), collated(some_are_gone), SEVERAL),
    Kind("clean", "prompts are ids", (CLEAN,), range(3), as_ids, SOME[2:]),
    Kind("clean", "questions of code", (CLEAN,), range(4), lambda run, _: {"asks": of_code}, SOME[3:]),
    Kind("clean", "activations are computed twice", (CLEAN,), range(4), computed_twice, ("lean", "avid", "stout",
         "tacit")),
    Kind("clean", "beginnings are shared", (CLEAN,), range(4), beginnings_shared, SOME[4:]),
    Kind("clean", "logprobs are in single precision", (CLEAN,), range(3), lambda run, _: put(
        run.server, writes=lambda v: v.astype(np.float32).astype(np.float64)), SOME[5:], large=True),
    Kind("clean", "heads of keys are written out", (CLEAN,), range(3), written_out, SOME[6:] + SOME[:2]),
]  # fmt: skip

UNSEEN8_KINDS = KNOWN + OTHER + WELL
