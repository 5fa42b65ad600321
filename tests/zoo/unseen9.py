"""Faults for the doctor by yet another person who has not read it: kinds that no other part has, many of real reports.

Do not open this file while you improve the doctor. Once its answers were looked at, it belongs to `build`.

What is right was decided by the rules of `unseen7` and `unseen8`, before any answer was seen: a cause is right if its
remedy in `causes.FIXES` ends the fault. Where the weights are old and another sync does not end it, `NONE` is right,
too. A law that keeps only some tokens, but is no top-p and no top-k, may be called by their name or by none. What a run
asks for by name is no fault; a server that does or tells something else, or is wrong besides, is one.

Where mechanisms are from: marks of ends taken for padding because both have one id (huggingface/trl#2708, #6357),
tables repeated where they are interleaved (wenet-e2e/west#121), truncated laws that are not in what is told
(huggingface/trl#6789), accepted guesses with a logprob of 0 (vllm-project/vllm#17876), caches kept across a sync
(modelscope/ms-swift#6343, InternLM/lmdeploy#4917), penalties that come from a checkpoint and that nobody asked for
(verl-project/verl#7270, PrimeIntellect-ai/prime-rl#886), a first logit that is kept or dropped on one of two ways
(unslothai/unsloth#2736, #4181), a base of few bits beneath an adapter, as Unsloth trains it."""

from __future__ import annotations

import copy
import json
import math
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rl_notebook.core import Completion, Datum, PromptGroup
from rl_notebook.datums import datums_from_groups
from rl_notebook.losses import LossOptions

from .faults import (
    CLEAN, CUT, DROPOUT, DTYPE, LEAK, PADDING, SHIFT, STALE, TEMPERATURE, TEXT, UNKNOWN, WORLDS, Kind, both, every,
    forced, late, paired, put, quantised, reprompted, rotary, through_text, told, weighed,
)  # fmt: skip
from .machines import plain_weights, seeded
from .steps import Run, World
from .unseen import (
    GROUPS, NAN, REFERENCE, ROWS, VOCABULARY, collated, from_checkpoint, hooked, ids_of, retold, server, trainer,
)  # fmt: skip
from .unseen3 import agreed, attends, blocks, by_place, handed, logits_of, picked, rowwise
from .unseen4 import in_order, low_frequencies, one_by_one, sees, with_ids, with_tool
from .unseen5 import in_the_loss, rescored
from .unseen6 import noisy_weights
from .unseen7 import honoured, in_asking
from .unseen8 import linears, of_lower_rank, reworded, translated

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
    "forum crisp": World(prompts=6, completions=26, temperature=0.65),
    "forum limpid": World(prompts=6, completions=26, temperature=1.35),
    "hermit": World(prompts=4, completions=2),
}
SOME = ("crisp", "hushed", "slender", "well", "parade", "limpid", "fluent", "fervid")  # taken in turns
EVEN = ("hushed", "burly", "well", "parade", "slender", "fervid", "fluent")  # at temperature 1
SEVERAL = ("sober", "slender", "hushed", "parade", "crisp", "burly", "curt")  # groups
TEMPERED = ("crisp", "limpid", "slender sober", "hushed crisp")
ADAPTED = ("slender", "burly", "slender sober")
HIDDEN = ("forum", "forum slender", "forum hushed")  # at temperature 1, with many tokens
SEEDLINGS = ("seedling", "seedling crisp", "seedling slender")
HALVES = ("half crisp", "half slender", "half hushed")


# --- the draw -----------------------------------------------------------------------------------------------------


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


def noise_of(run: Run, size: float) -> None:
    "A token is the best of scores with noise, and noise has another size than it should have."

    def draw(ids: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        gumbel = -torch.empty_like(p).exponential_().log()
        return (p.log() + size * gumbel).argmax(-1, keepdim=True), (p.log() / size).softmax(-1)

    one_by_one(run, draw)


def only_at_first(run: Run, n: int) -> None:
    "The temperature that was asked for is lost after so many tokens."
    by_place(run, lambda i, scores: scores * (1.0 if i < n else run.world.temperature))


def cut_untold(run: Run, **arguments: Any) -> None:
    "Logprobs are told at the temperature, and before the cut."
    put(run.server, forced=arguments, says=lambda c: handed(run, c.prompt_tokens, c.tokens.tolist(), c.params))


def best_of_buckets(run: Run, n: int) -> None:
    "An approximate top-k: each of so many buckets of the vocabulary keeps its best."

    def change(i: int, scores: Tensor) -> Tensor:
        parts = scores.unflatten(-1, (-1, n))
        return parts.masked_fill(parts < parts.amax(-2, keepdim=True), -torch.inf).flatten(-2)

    by_place(run, change)


def present(run: Run, by: float) -> None:
    "What was drawn before is less likely, however often it was."

    def change(i: int, scores: Tensor, ids: Tensor) -> Tensor:
        return scores - by * torch.zeros_like(scores).scatter(1, ids[:, ids.shape[1] - i :], 1.0)

    with_ids(run, change, reports="raw")


def guessed(ids: Sequence[int], n: int) -> int | None:
    "What came next when the last n tokens were there before."
    end = list(ids[-n:])
    places = (at for at in range(len(ids) - n - 1, -1, -1) if list(ids[at : at + n]) == end)
    return next((ids[at + n] for at in places), None)


def copied(run: Run, every_nth: int) -> None:
    "At some places a guess, looked up in what was said, is taken without a look at the law."

    def draw(ids: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        law = p.clone()
        for row, before in zip(law, ids.tolist(), strict=True):
            if ids.shape[1] % every_nth == 0 and (guess := guessed(before, 1)) is not None:
                row.zero_()[guess] = 1.0
        return law.multinomial(1), law

    one_by_one(run, draw)


def raced(run: Run, every_nth: int) -> None:
    "At some places the next token is drawn before scores are there, from those of the place before."

    def draw(ids: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        if ids.shape[1] % every_nth:
            return p.multinomial(1), p
        old = run.server.model(ids[:, :-1], use_cache=False).logits[:, -1].float().softmax(-1)
        return old.multinomial(1), old

    one_by_one(run, draw)


def guesses_are_sure(run: Run, n: int) -> None:
    "Tokens that a look at what was said would have guessed have a logprob of 0."

    def says(c: Completion) -> Completion:
        whole, start = c.full_tokens, len(c.prompt_tokens)
        sure = np.array([guessed(whole[:i], n) == whole[i] for i in range(start, len(whole))])
        return replace(c, **{k: np.where(sure, 0.0, getattr(c, k)) for k in ("logprobs", "sampling_logprobs")})

    put(run.server, says=says)


# --- text ---------------------------------------------------------------------------------------------------------


def escaped(run: Run, ascii_only: bool) -> dict[str, Any]:
    "What a user says is escaped once more than it is read back."
    inside = lambda m: m[1] + json.dumps(m[2], ensure_ascii=ascii_only)[1:-1] + m[3]
    through_text(run, lambda s: re.sub(r"(<\|user\|>)(.*?)(<\|end\|>)", inside, s, flags=re.S))
    return {"asks": lambda rows: [r | {"question": f'Señor, "{r["question"]}"\nThat is all.'} for r in rows]}


def with_thoughts(run: Run, thought: str) -> dict[str, Any]:
    "Earlier answers are rendered with a thought that they have not had."
    through_text(run, lambda s: re.sub(r"<\|assistant\|>(?=.)", f"<|assistant|>{thought}", s, flags=re.S))
    return {"turns": 2}


def shortened(run: Run, most: int) -> None:
    "Each message is cut to a length."
    through_text(run, lambda s: re.sub(r"(<\|(?:user|system)\|>)([^<]*)", lambda m: m[1] + m[2][:most], s))


def goes_on_from_before(run: Run, n: int) -> None:
    "A session is not begun anew: what was asked before is still there."
    past: list[list[int]] = []

    def reads(ids: list[int]) -> list[int]:
        if not past or past[-1] != ids:
            past.append(list(ids))
        between = [t for old in past[-1 - n : -1] for t in (*old[1:], run.tokenizer.eos_token_id)]
        return [*ids[:1], *between, *ids[1:]]

    put(run.server, reads=reads)


# --- weights ------------------------------------------------------------------------------------------------------


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


async def what_was_said_is_kept(run: Run, updates: int) -> dict[str, Any]:
    "A sync comes between turns, and the cache of what was said by then stays."
    old, inner = copy.deepcopy(run.server.model), run.server.sample
    [mark] = ids_of(run, "<|user|>")
    await run.update(updates)

    async def sample(prompt, params):
        newest, ids = run.server.model, [int(t) for t in prompt]
        turns = [i for i, t in enumerate(ids) if t == mark]
        kept = None
        if len(turns) > 1:
            with torch.no_grad():
                kept = old(torch.tensor([ids[: turns[-1]]] * params.n), use_cache=True).past_key_values
        put(run.server, model=newest if len(turns) > 1 else old, forced={"past_key_values": kept} if kept else {})
        try:
            return await inner(prompt, params)
        finally:
            put(run.server, model=newest, forced={})

    put(run.server, sample=sample)
    return {"turns": 2}


async def of_several_ages(run: Run, updates: int) -> None:
    "Completions of a group come from servers that were synced at different times."
    models, inner = list[Any](), run.server.sample
    for _ in range(updates):
        models.append(copy.deepcopy(run.server.model))
        await run.update()

    async def sample(prompt, params):
        newest, drawn = run.server.model, list[list[Completion]]()
        try:
            for model in (newest, *models):
                put(run.server, model=model)
                drawn.append(await inner(prompt, params))
        finally:
            put(run.server, model=newest)
        return [drawn[i % len(drawn)][i] for i in range(params.n)]

    put(run.server, sample=sample)


async def broken_off(run: Run, updates: int) -> None:
    "A sync breaks off after the first layers, and nobody hears of it."
    await run.update(updates, publish=False)
    put(run.sync, travels=lambda name: "embed" in name or "layers.0." in name)
    await run.publish()
    put(run.sync, travels=bool)


async def values_into_keys(run: Run, updates: int) -> None:
    "What values have learned is added to keys, and the other way round."
    base, load = run.sync.base, run.server.load
    swap = lambda name: re.sub(r"\b[kv]_proj", lambda m: {"k": "v", "v": "k"}[m[0][0]] + "_proj", name)
    put(run.server, load=lambda new: load({n: base[n] + new[swap(n)] - base[swap(n)] for n in new}))
    await run.update(updates)


# --- models -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def rounded_at_random(model: nn.Module, seed: int) -> None:
    "Weights are rounded to half precision, up or down by chance."
    with seeded(seed):
        for p in model.parameters():
            bits = p.float().contiguous().view(torch.int32)
            p.copy_(((bits + torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32)) & -65536).view(torch.float32))


def small_queries(model: nn.Module, dtype: torch.dtype) -> None:
    "Queries are of half precision."
    hooked(model, "q_proj", lambda read, given: given.to(dtype).to(given.dtype))


def beneath(model: nn.Module, change: Callable[[nn.Module], Any]) -> None:
    "Change what is beneath an adapter."
    for m in [m for n, m in model.named_modules() if n.endswith("base_layer")]:
        change(m)


NORMAL = torch.distributions.Normal(0.0, 1.0).icdf(torch.linspace(0.033, 0.967, 16))
NORMAL = NORMAL / NORMAL.max()


@torch.no_grad()
def normal_floats(m: nn.Module, size: int) -> None:
    "Weights are one of 16 quantiles of a normal law, times the largest of their block."
    for linear in linears(m):
        parts = linear.weight.float().unflatten(-1, (-1, size))
        most = parts.abs().amax(-1, keepdim=True).clamp(min=1e-12)
        nearest = ((parts / most)[..., None] - NORMAL).abs().argmin(-1)
        linear.weight.copy_((NORMAL[nearest] * most).flatten(-2))


def capped(model: nn.Module, cap: float) -> None:
    hooked(model, "lm_head", lambda read, given: cap * (given / cap).tanh())


def yarn(model: nn.Module, factor: float) -> None:
    "Long waves are stretched, and both sides of a product are larger: https://arxiv.org/abs/2309.00071"
    low_frequencies(model, factor)
    [module] = [m for m in model.modules() if hasattr(m, "inv_freq")]
    put(module, attention_scaling=0.1 * math.log(factor) + 1)


def by_own_length(run: Run, n: int) -> None:
    "Rotary positions have a base that grows with the row, from a length on."
    put(run.trainer, altered=lambda model: None)

    def one(model: Any, d: Datum) -> Tensor:
        rotary(model, 10_000.0 * max(1.0, len(d.tokens) / n) ** (32 / 30))
        return picked(logits_of(run.trainer, model, d.tokens)[:-1], d.tokens[1:])

    rowwise(run.trainer, one)


@torch.no_grad()
def turned(model: Any, angle: float) -> None:
    "Values are turned in each head, and what reads them is not."
    for block in blocks(model):
        parts = block.self_attn.v_proj.weight.unflatten(0, (-1, 2))
        a, b = parts[:, 0].clone(), parts[:, 1].clone()
        parts[:, 0], parts[:, 1] = a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)


def every_second_layer_near(model: Any, n: int) -> None:
    "Every second layer sees so many tokens."
    for layer in range(0, len(blocks(model)), 2):
        sees(model, lambda q, k, whole: q - k < n, layer)


def never_filled_biases(model: Any, size: float) -> None:
    "Queries and keys have biases, which no file has, and which are what was there."
    with seeded(5):
        for block in blocks(model):
            for m in (block.self_attn.q_proj, block.self_attn.k_proj):
                m.bias = nn.Parameter((size * torch.randn(m.out_features)).to(m.weight.dtype), requires_grad=False)


@torch.no_grad()
def dealt(model: Any, ranks: int) -> None:
    "Ids are dealt to ranks in turns, and both tables are in the order of ranks."
    order = torch.cat([torch.arange(model.config.vocab_size)[r::ranks] for r in range(ranks)])
    for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
        weight.copy_(weight[order].clone())


# --- the trainer --------------------------------------------------------------------------------------------------


def gradients_are_off(run: Run, by: int) -> dict[str, Any]:
    "The pass with gradients keeps a logit that the other drops."
    score = run.trainer.score
    in_the_loss(run, score=lambda datums: [s.nan_to_num(0.0).roll(by) for s in score(datums)])
    return {"minibatches": 2}


def odd_rows_are_off(run: Run, by: int) -> None:
    "Rows that had to be filled up to an even length are off by one."
    rescored(run.trainer, lambda rows: [row.roll(by) if len(row) % 2 else row for row in rows])


def sorted_within(run: Run, n: int) -> None:
    "Each micro-batch is sorted by length, and its results are not put back."

    def change(rows: list[Tensor]) -> list[Tensor]:
        parts = [rows[at : at + n] for at in range(0, len(rows), n)]
        return [row for part in parts for row in sorted(part, key=len, reverse=True)]

    rescored(run.trainer, change)


def ends_are_padding(run: Run, counts: bool) -> None:
    "What is padding is known by its id, which is that of the end of a message."

    def one(model: Any, d: Datum) -> Tensor:
        mask = torch.from_numpy(d.tokens != run.tokenizer.eos_token_id).long()[None]
        place = (mask.cumsum(-1) - 1).clamp(min=0) if counts else torch.arange(len(d.tokens))[None]
        logits = logits_of(run.trainer, model, d.tokens, attention_mask=mask, position_ids=place)
        return picked(logits[:-1], d.tokens[1:])

    rowwise(run.trainer, one)


def at_least(run: Run, n: int) -> None:
    "The server fills short prompts up on the left, to a length for which it is compiled."
    pad = [run.tokenizer.pad_token_id]
    put(run.server, fed=lambda tokens: pad * (n - len(tokens)) + [int(t) for t in tokens])


def first_in_training(run: Run, p: float) -> None:
    "The trainer leaves training mode after its first micro-batch."
    every(run.trainer.model, "attention_dropout", p)
    inner, score, done = run.trainer._pass, run.trainer.score, list[int]()

    def _pass(model: Any, rows: Sequence[np.ndarray]) -> list[Tensor]:
        model.train(not done)
        done.append(len(rows))
        return inner(model, rows)

    put(run.trainer, _pass=_pass, score=lambda datums: done.clear() or score(datums), batch=6)


def short_table(run: Run, n: int) -> None:
    "Places beyond a table are what was there, which is no number."

    def one(model: Any, d: Datum) -> Tensor:
        found = picked(logits_of(run.trainer, model, d.tokens)[:-1], d.tokens[1:])
        return torch.where(torch.arange(len(found)) < n, found, torch.nan)

    rowwise(run.trainer, one)


# --- bookkeeping --------------------------------------------------------------------------------------------------


def in_whole_blocks(groups: Sequence[PromptGroup], n: int) -> list[Datum]:
    "A mask begins where a block of so many tokens does."
    return weighed(groups, lambda w: np.where(np.arange(len(w)) >= np.argmax(w) - np.argmax(w) % n, 1.0, w))


def retrained(groups: Sequence[PromptGroup], trains: Callable[[np.ndarray, Datum], np.ndarray]) -> list[Datum]:
    "Weights (N-1,) are made of tokens (N,); where there is no logprob there is a 0."
    return [
        replace(d, weights=trains(d.tokens, d).astype(float), sampler_logprobs=np.nan_to_num(d.sampler_logprobs))
        for d in datums_from_groups(groups)
        if d.sampler_logprobs is not None
    ]


def every_second_message(run: Run, n: int) -> dict[str, Any]:
    "Every second message is trained, and a tool's answer is a message, too."
    marks = ids_of(run, "<|system|><|user|><|assistant|>")

    def trains(tokens: np.ndarray, d: Datum) -> np.ndarray:
        begins = np.isin(tokens, marks)
        return ((begins.cumsum() - 1) % 2 == 1)[1:] & ~begins[1:]

    return with_tool(run, n) | {"collate": partial(retrained, trains=trains)}


def marks_are_trained(run: Run, turns: int) -> dict[str, Any]:
    "Marks of a template are trained wherever they are."
    marks = ids_of(run, "<|user|><|assistant|><|end|>")
    trains = lambda tokens, d: np.isin(tokens[1:], marks) | d.active
    return {"turns": turns, "collate": partial(retrained, trains=trains)}


def other_way_round(datums: list[Datum], by: int) -> list[int]:
    "Rows are laid out by sample, and read by group; or by halves of samples."
    size = max(d.sample for d in datums) + 1
    place = np.arange(len(datums)).reshape(-1, size)
    return (place.T if by else place.reshape(len(place), 2, -1).transpose(1, 0, 2)).ravel().tolist()


def by_worker(datums: list[Datum], workers: int) -> list[int]:
    "A group is dealt to workers, and gathered from one after another."
    return sorted(range(len(datums)), key=lambda i: (datums[i].group, datums[i].sample % workers, datums[i].sample))


def miscounted_groups(datums: list[Datum], more: int) -> list[int]:
    "A group is taken to be larger than it is, or smaller."
    size, first = max(d.sample for d in datums) + 1, datums[0].group
    return [((d.group - first) * (size + more) + d.sample) % len(datums) for d in datums]


def prompts_by(groups: Sequence[PromptGroup], order: Callable[[list[np.ndarray]], Sequence[int]]) -> list[Datum]:
    "Completions after prompts in another order."
    prompts = [g.samples[0].tokens[: g.samples[0].prompt_len] for g in groups]
    place = {g.index: i for i, g in enumerate(groups)}
    theirs, datums = order(prompts), datums_from_groups(groups)
    return reprompted(datums, [prompts[theirs[place[d.group]]] for d in datums])


def long_first(groups: Sequence[PromptGroup], sign: int) -> list[Datum]:
    "Prompts are sorted by length, completions are not."
    return prompts_by(groups, lambda prompts: sorted(
        range(len(prompts)), key=lambda i: (sign * len(prompts[i]), prompts[i].tolist())))  # fmt: skip


def ranks_read_alike(groups: Sequence[PromptGroup], n: int) -> list[Datum]:
    "Ranks read the same rows, as each has the same seed."
    return prompts_by(groups, lambda prompts: [i % n for i in range(len(prompts))])


def trained_in_other_ids(run: Run, ids: slice) -> dict[str, Any]:
    "The trainer encodes prompts by another tokenizer."
    other = translated(run, ids)

    def collate(groups: Sequence[PromptGroup]) -> list[Datum]:
        datums = datums_from_groups(groups)
        return reprompted(datums, [np.array(other(d.tokens[: int(np.argmax(d.active)) + 1].tolist())) for d in datums])

    return {"collate": collate}


def cut_without_last(groups: Sequence[PromptGroup], blank: float) -> list[Datum]:
    "What was cut at its limit comes without its last logprob."
    datums = datums_from_groups(groups)
    cut = [s.finish_reason == "length" for g in groups for s in g.samples]
    return paired(datums, [np.r_[v[:-1], blank] if c else v for v, c in zip(told(datums), cut, strict=True)])


# --- the table ----------------------------------------------------------------------------------------------------

ordered = lambda order: lambda run, x: {"collate": partial(in_order, order=lambda datums: order(datums, x))}
in_reference = lambda alter: lambda run, x: put(run.reference, altered=lambda model: alter(model, x))
HALF = (torch.bfloat16, torch.float16)

KNOWN: list[Kind] = [
    Kind("draw", "the trainer takes a temperature to a power", TEMPERATURE, (2, -1), lambda run, power: put(
        run.trainer, temperature=run.world.temperature**power), TEMPERED),
    Kind("draw", "some micro-batches have another temperature", TEMPERATURE, (0.7, 1.3), lambda run, t: some_batches(
        run, 4, temperature=t * run.world.temperature), SEVERAL),
    Kind("draw", "a temperature follows a plan that the trainer does not know", TEMPERATURE, (0.8, 1.2),
         lambda run, t: {"temperature": t}, EVEN),
    Kind("hidden", "noise of the draw has another size, and raw is reported", TEMPERATURE, (0.3, 2.0), noise_of,
         HIDDEN),
    Kind("draw", "only the first tokens have the temperature", TEMPERATURE, (1, 4), only_at_first, TEMPERED),

    Kind("hidden", "a nucleus at a temperature is not in what is told", CUT, (0.8, 0.6), lambda run, p: cut_untold(
        run, top_p=p), ("forum crisp", "forum limpid")),
    # A law that keeps only some tokens.
    Kind("hidden", "a min-p, and raw is reported", CUT + UNKNOWN, (0.5, 0.3), lambda run, p: forced(
        run, min_p=p) or put(run.server, reports="raw"), HIDDEN),
    Kind("hidden", "an end is forbidden at first, and raw is reported", CUT + UNKNOWN, (16, 8), lambda run, n: forced(
        run, min_new_tokens=n) or put(run.server, reports="raw"), HIDDEN),
    Kind("draw", "the best of each bucket are kept", CUT + UNKNOWN, (8, 24), best_of_buckets, SOME),

    Kind("weights", "later turns come from a server that is late", STALE, (1, 3), late_in_later_turns, EVEN),
    # Caches are emptied by some syncs, and not by the one that there is.
    Kind("weights", "what was said stays in the cache across a sync", STALE + UNKNOWN, (2, 4), what_was_said_is_kept,
         EVEN),
    Kind("weights", "a top-k is asked for in a conversation, and nobody syncs", STALE, (2, 5), lambda run, n:
         in_asking(late(run, n, known=False), {"top_k": 12, "turns": 2}), EVEN),
    Kind("weights", "a group comes from servers of several ages", STALE, (2, 4), of_several_ages, SEVERAL),
    Kind("weights", "a sync is broken off", STALE, (2, 4), broken_off, SOME),

    Kind("text", "a tool's answers are sent as JSON", TEXT, (0, 1), lambda run, n: through_text(run, lambda s: re.sub(
        r"tool: (\d+)", r'tool: {"result": \1}', s)) or with_tool(run, n), EVEN),
    Kind("text", "each message is cut to a length", TEXT, (12, 8), shortened, HALVES + SOME),
    Kind("text", "what a user says is escaped", TEXT, (True, False), escaped, SOME),
    Kind("text", "earlier answers are rendered with a thought", TEXT, ("<think>\n\n</think>\n\n", "Hm. "),
         with_thoughts, EVEN),
    Kind("text", "the question is put into a sentence", TEXT, ("Question: %s", "%s Think first."), reworded, HALVES),

    Kind("arithmetic", "weights are rounded at random", DTYPE, (0, 1), server(rounded_at_random), SOME),
    Kind("arithmetic", "queries are of half precision", DTYPE, HALF, server(small_queries), SOME, large=True),
    Kind("arithmetic", "attention of the trainer is of half precision", DTYPE, HALF, trainer(
        lambda model, dtype: attends(model, {"small": dtype})), SOME),
    # Eight bits are a lower precision.
    Kind("arithmetic", "the trainer has eight bits beneath an adapter", DTYPE + UNKNOWN, (8,), trainer(
        lambda model, bits: beneath(model, lambda m: quantised(m, bits))), ADAPTED),

    Kind("model", "the pass with gradients is off by one", SHIFT, (1, -1), gradients_are_off, SEVERAL),
    Kind("model", "rows of an odd length are off by one", SHIFT, (1, -1), odd_rows_are_off, SOME),

    Kind("bookkeeping", "masks begin where blocks do", LEAK, (8, 5), collated(in_whole_blocks), SOME, large=True),
    Kind("bookkeeping", "every second message is trained", LEAK, (0, 1), every_second_message, EVEN),
    Kind("bookkeeping", "marks of a template are trained", LEAK, (1, 2), marks_are_trained, EVEN),

    Kind("bookkeeping", "rows are laid out by sample, and read by group", ROWS + GROUPS, (1, 0), ordered(
        other_way_round), ("sober", "slender sober", "limpid", "parade", "curt", "crisp"), large=True),
    Kind("bookkeeping", "micro-batches are sorted, and not put back", ROWS + GROUPS, (8, 5), sorted_within, SOME),
    Kind("bookkeeping", "a group is gathered from its workers", ROWS, (2, 3), ordered(by_worker), (
        "well", "limpid", "curt", "sober", "slender")),
    Kind("bookkeeping", "a group is taken to be larger or smaller", ROWS + GROUPS, (1, -1), ordered(
        miscounted_groups), SEVERAL),
    Kind("bookkeeping", "prompts are sorted by length, completions are not", GROUPS, (1, -1), collated(long_first),
         ("parade", "curt", "hushed", "fervid")),
    Kind("bookkeeping", "ranks read the same prompts", GROUPS, (2, 3), collated(ranks_read_alike), (
        "parade", "curt", "crisp", "burly", "half hushed")),

    Kind("model", "ends of messages are taken for padding", PADDING + UNKNOWN, (True, False), ends_are_padding, SOME),
    Kind("model", "some micro-batches are padded on the left, and do not say so", PADDING, (8, 5), lambda run, n:
         some_batches(run, n, pads_left=True, tells=()), ("parade", "fluent", "crisp", "fervid")),
    Kind("model", "short prompts are filled up to a length", PADDING, (40, 28), at_least, SOME),

    Kind("model", "what attention hands down is dropped", DROPOUT, (0.1, 0.02), lambda run, p: put(
        run.trainer, training=True, altered=lambda model: hooked(
            model, "o_proj", lambda read, given: nn.functional.dropout(given, p))), SOME, large=True),
    Kind("model", "the first micro-batch is in training mode", DROPOUT, (0.15, 0.04), first_in_training, SEVERAL),

    Kind("model", "ids are dealt to ranks in turns", VOCABULARY, (2, 3), server(dealt), SOME),
    Kind("text", "the trainer encodes prompts by another tokenizer", VOCABULARY + TEXT, (slice(21, 31), slice(70, 96)),
         trained_in_other_ids, SOME),

    Kind("bookkeeping", "the reference has matrices of lower rank", REFERENCE, (48, 96), in_reference(of_lower_rank),
         SEEDLINGS),
    Kind("bookkeeping", "the reference is another release", REFERENCE, (0.03, 0.1), in_reference(
        lambda model, size: torch.no_grad()(noisy_weights)(model, size)), SEEDLINGS),

    Kind("model", "places beyond a table are no numbers", NAN, (30, 24), short_table, ("fluent", "well", "fervid")),
    Kind("bookkeeping", "what was cut has no last logprob", NAN, (6, 9), lambda run, most: {
        "max_tokens": most, "collate": partial(cut_without_last, blank=np.nan)}, SOME),

    # Two at once: either is a right answer.
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
]  # fmt: skip

OTHER: list[Kind] = [
    Kind("hidden", "a penalty of presence, and raw is reported", UNKNOWN, (4.0, 2.0), present, HIDDEN),
    Kind("hidden", "ends get likelier, and raw is reported", UNKNOWN, ((2, 1.4), (4, 1.3)), lambda run, how: forced(
        run, exponential_decay_length_penalty=how) or put(run.server, reports="raw"), HIDDEN),
    Kind("hidden", "guidance without a prompt, and raw is reported", UNKNOWN, (2.0, 1.5), lambda run, scale: forced(
        run, guidance_scale=scale) or put(run.server, reports="raw"), HIDDEN),
    Kind("hidden", "no n-gram comes twice, and raw is reported", UNKNOWN + CUT, (2, 3), lambda run, n: forced(
        run, no_repeat_ngram_size=n) or put(run.server, reports="raw"), HIDDEN),
    Kind("hidden", "guesses from what was said are not verified", UNKNOWN, (4, 12), copied, HIDDEN),
    Kind("hidden", "some tokens are drawn from the law of the place before", UNKNOWN, (5, 12), raced, HIDDEN),
    Kind("report", "guesses from what was said have a logprob of 0", UNKNOWN, (1,), guesses_are_sure, (
        "limpid", "fluent", "burly", "parade")),
    Kind("report", "a sum is spread over its tokens", UNKNOWN, (0,), lambda run, _: retold(
        run, lambda v: np.full(len(v), v.mean())), SOME, large=True),

    # A session that is ended, or a prompt of ids to a server that keeps none, would end it.
    Kind("text", "a session is not begun anew", UNKNOWN + TEXT, (1, 2), goes_on_from_before, SEVERAL),
    Kind("weights", "values and keys get what the other has learned", UNKNOWN, (4, 8), values_into_keys, (
        "slender", "fervid", "burly")),

    Kind("model", "a base of rotations grows with the row", UNKNOWN, (12, 24), by_own_length, SOME),
    Kind("model", "rotations are stretched in the server only", UNKNOWN, (4.0, 1.5), server(yarn), SOME),
    # Four bits are another model; to score in the sampler's precision ends it, too.
    Kind("model", "the trainer has four bits beneath an adapter", UNKNOWN + DTYPE, (64, 128), trainer(
        lambda model, size: beneath(model, lambda m: normal_floats(m, size))), ADAPTED),
    Kind("model", "values are turned, and not turned back", UNKNOWN, (0.5, 0.15), server(turned), SOME),
    Kind("model", "every second layer has a window", UNKNOWN, (6, 14), server(every_second_layer_near), SOME,
         large=True),
    Kind("model", "the trainer caps its logits", UNKNOWN, (6.0, 15.0), trainer(capped), SOME, large=True),
    Kind("model", "biases were never filled", UNKNOWN, (0.5, 0.15), server(never_filled_biases), SOME),
    Kind("model", "a min-p is asked for, and rotations are stretched", UNKNOWN, (4.0,), lambda run, factor:
         run.server.alter(lambda model: yarn(model, factor)) or honoured(run, {"min_p": 0.05}), EVEN),
]  # fmt: skip


# --- clean --------------------------------------------------------------------------------------------------------


def more_than_kept(run: Run, more: int) -> None:
    "More is drawn than is kept, and nobody looks at what is left out."
    inner = run.server.sample

    async def sample(prompt, params):
        return [replace(c, params=params) for c in (await inner(prompt, replace(params, n=params.n + more)))[more:]]

    put(run.server, sample=sample)


def prompt_read_once(run: Run, _: int) -> None:
    "The trainer reads a prompt once for all of its completions."

    def score(datums: Sequence[Datum]) -> list[Tensor]:
        model, out, seen = run.trainer.scorer(), list[Tensor](), dict[tuple[int, ...], Any]()
        model.train(run.trainer.training)
        for d in datums:
            start = int(np.argmax(d.active))  # the last token of the prompt is read with the completion
            prompt = tuple(map(int, d.tokens[:start]))
            if prompt not in seen:
                seen[prompt] = model(torch.tensor([prompt]), use_cache=True).past_key_values
            rest = torch.from_numpy(d.tokens[start:].copy())[None]
            logits = model(rest, past_key_values=copy.deepcopy(seen[prompt]), use_cache=True).logits[0, :-1].float()
            found = picked(logits / run.trainer.temperature, d.tokens[start + 1 :])
            hole = torch.from_numpy(np.where(d.active, 0.0, np.nan)).float()
            out.append(torch.cat([torch.zeros(start), found]) + hole)
        return out

    put(run.trainer, score=score)


async def sent_twice(run: Run, n: int) -> None:
    "Weights are sent more than once."
    await run.update(1)
    for _ in range(1 + n):
        await run.publish()


async def from_a_file(run: Run, n: int) -> None:
    "A run is resumed from files, and what serves is begun anew."
    await run.update(n)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.pt"
        torch.save(run.trainer.states[await run.trainer.save_state("resumed")], path)
        run.server.load(run.sync.base)
        await run.update(2, publish=False)
        run.updates -= 2
        run.trainer.take(torch.load(path))
    await run.publish()


async def with_its_reference(run: Run, n: int) -> None:
    "A policy begins from a checkpoint, and so does its reference."
    await from_checkpoint(run, 1 + n)
    put(run.reference, model=copy.deepcopy(run.reference.model))
    run.reference.model.load_state_dict(plain_weights(run.trainer.model))


def in_wide_numbers(run: Run, _: int) -> None:
    "Weights travel in double precision."
    load = run.server.load
    put(run.server, load=lambda new: load({n: t.double() for n, t in new.items()}))


def asked_twice(run: Run, _: int) -> None:
    "Each request is sent twice, and the second answer is taken."
    inner = run.server.sample

    async def sample(prompt, params):
        await inner(prompt, params)
        return await inner(prompt, params)

    put(run.server, sample=sample)


def always_as_long(run: Run, n: int) -> None:
    "The trainer fills rows up on the right to one length, and says so."
    inner, longest = run.trainer._pass, np.full(120 + 8 * n, run.trainer.pad)
    put(run.trainer, _pass=lambda model, rows: inner(model, [*rows, longest])[: len(rows)])


def long_questions(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        r | {"question": f"Read all of this with care, and answer the last line only.\n{r['question']}"} for r in rows
    ]


def with_signs(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [r | {"question": f"  ¿{r['question'].upper()} → ✓ 😀\t\n"} for r in rows]


FINE = (0.72, 1.05, 1.33, 0.58, 0.95, 1.6)
ASKED = ({"top_p": 0.88}, {"top_k": 5}, {"top_p": 0.6}, {"top_k": 30, "top_p": 0.94}, {"top_k": 2}, {"top_p": 0.99})
ASKED_TOO = ({"min_p": 0.04}, {"repetition_penalty": 1.08}, {"min_p": 0.2}, {"repetition_penalty": 1.3})
CORRECTED = ({"policy_loss": "ppo"}, {"kl_beta": 0.05}, {"policy_loss": "ppo", "tis": "token", "kl_beta": 0.01})

WELL: list[Kind] = [
    Kind("clean", "a step of one more shape", (CLEAN,), range(10), lambda run, _: None, (
        "limpid", "crisp", "sober", "hushed", "hushed crisp", "slender", "burly", "slender sober", "parade",
        "seedling"), large=True),
    Kind("clean", "half precision, crisp, adapted or hushed", (CLEAN, *DTYPE), range(6), lambda run, _: None, HALVES),
    Kind("clean", "a fine temperature that all know", (CLEAN,), range(4), lambda run, n: agreed(run, FINE[n]), EVEN),
    Kind("clean", "a cut of another width", (CLEAN,), range(6), lambda run, n: ASKED[n], EVEN[1:]),
    Kind("clean", "a cut at a fine temperature", (CLEAN,), range(5), lambda run, n: agreed(
        run, FINE[-1 - n]) | ASKED[n], EVEN[2:], large=True),
    Kind("clean", "a min-p or a penalty, and several updates", (CLEAN,), range(4), lambda run, n: honoured(
        run, ASKED_TOO[n] | {"minibatches": 2 + n % 2}), EVEN[3:]),
    Kind("clean", "a cut of an adapter in half precision", (CLEAN, *DTYPE), range(4), lambda run, n: ASKED[n], (
        "half slender", "half hushed")),
    Kind("clean", "several updates of an adapter, and a cut", (CLEAN,), range(4), lambda run, n: ASKED[-1 - n] | {
        "minibatches": 2 + n % 3}, ("slender", "burly"), large=True),
    Kind("clean", "four turns", (CLEAN,), range(4), lambda run, n: {"turns": 4, "max_tokens": 4 + n}, EVEN),
    Kind("clean", "a tool answers at a fine temperature", (CLEAN,), range(4), lambda run, n: with_tool(
        run, n) | agreed(run, FINE[n]), EVEN[1:]),
    Kind("clean", "a penalty in a conversation", (CLEAN,), range(4), lambda run, n: honoured(
        run, ASKED_TOO[n] | {"turns": 2}), EVEN[2:]),
    Kind("clean", "more is drawn than is kept", (CLEAN,), range(1, 5), more_than_kept, SOME),
    Kind("clean", "the trainer reads a prompt once", (CLEAN,), range(4), prompt_read_once, SOME[1:]),
    Kind("clean", "weights are sent more than once", (CLEAN,), range(3), sent_twice, SOME[2:]),
    Kind("clean", "a run is resumed from files", (CLEAN,), range(1, 5), from_a_file, SOME[3:]),
    Kind("clean", "a policy begins from a checkpoint, with its reference", (CLEAN,), range(4), with_its_reference,
         SEEDLINGS),
    Kind("clean", "several updates from the beginning", (CLEAN,), range(4), lambda run, n: {"minibatches": 2 + n % 2},
         SEEDLINGS),
    Kind("clean", "groups of two", (CLEAN,), range(3), lambda run, _: None, ("hermit",)),
    Kind("clean", "long questions, short answers", (CLEAN,), range(4), lambda run, n: {
        "asks": long_questions, "max_tokens": 2 + n}, SOME[4:]),
    Kind("clean", "questions in capitals, with signs", (CLEAN,), range(4), lambda run, _: {"asks": with_signs}, SOME),
    Kind("clean", "rows alone in several updates", (CLEAN,), range(3), lambda run, n: put(
        run.trainer, batch=1) or {"minibatches": 2 + n}, SOME[5:]),
    Kind("clean", "each request is sent twice", (CLEAN,), range(3), asked_twice, SOME[6:]),
    Kind("clean", "several updates with one more correction", (CLEAN,), range(3), lambda run, n: {
        "minibatches": 3, "options": LossOptions(**CORRECTED[n])}, EVEN[4:]),
    Kind("clean", "a token of its own ends, and a cut", (CLEAN,), range(3), lambda run, n: ASKED[n] | {
        "stop_token_ids": tuple(ids_of(run, "=+ "[n]))}, EVEN[3:] + EVEN[:2]),
    Kind("clean", "weights travel in double precision", (CLEAN,), range(3), in_wide_numbers, SOME),
    Kind("clean", "rows are always as long", (CLEAN,), range(4), always_as_long, SOME[1:]),
]  # fmt: skip

UNSEEN9_KINDS = KNOWN + OTHER + WELL
