"""Faults for the doctor by another person who has not read it: kinds that no other part has.

Do not open this file while you improve the doctor. Once its answers were looked at, it belongs to `build`.

What is right was decided by the rules of `unseen6`, before any answer was seen: a cause is right if its remedy in
`causes.FIXES` ends the fault. Where the weights are old and another sync does not end it, `NONE` is right, too. What a
run asks for by name (top-p, top-k, min-p, a penalty, a temperature that all know) is no fault; a server that tells
something else of it, or is wrong besides, is one."""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rl_notebook.core import Completion, Datum, PromptGroup
from rl_notebook.datums import datums_from_groups

from .faults import (
    CLEAN, CUT, DROPOUT, DTYPE, LEAK, PADDING, SHIFT, STALE, TEMPERATURE, TEXT, UNKNOWN, WORLDS, Kind, forced, late,
    paired, put, quantised, reprompted, rotary, scored_late, through_text, told, weighed,
)  # fmt: skip
from .machines import cast
from .steps import Run, World
from .unseen import (
    GROUPS, NAN, REFERENCE, ROWS, VOCABULARY, collated, hooked, ids_of, retold, server,
)  # fmt: skip
from .unseen3 import agreed, best, blocks, by_place, layerwise, logits_of, norms, picked, replaced, rowwise, skipped
from .unseen4 import beside, in_order, moved_places, one_by_one, sees, with_ids, with_tool
from .unseen5 import in_the_loss, read_in_chunks, rescored, shared
from .unseen6 import after, drawn_from

WORLDS |= {
    "lukewarm": World(temperature=1.15, completions=6),
    "icy": World(temperature=0.5, prompts=6, completions=6),
    "hoarse": World(can_echo=False, prompts=3, completions=9, warm_up=5),
    "thin": World(lora_rank=1, learning_rate=3e-3, prompts=6, completions=3),
    "thick": World(lora_rank=24, learning_rate=8e-4, completions=5),
    "alone": World(prompts=1, completions=20, max_tokens=28),
    "swarm": World(prompts=13, completions=2, max_tokens=20),
    "short": World(prompts=8, completions=4, max_tokens=7),
    "wordy": World(prompts=3, completions=5, max_tokens=64, warm_up=3),
    "keen": World(learning_rate=2e-4, prompts=5),
    "hoarse icy": World(can_echo=False, temperature=0.5, prompts=6, completions=5),
    "half lukewarm": World(dtype="bfloat16", temperature=1.15, completions=6),
    "half thin": World(dtype="bfloat16", lora_rank=1, learning_rate=3e-3),
    "half swarm": World(dtype="bfloat16", prompts=13, completions=2, max_tokens=20),
    "unborn": World(warm_up=0, prompts=6, completions=3),
    "unborn icy": World(warm_up=0, temperature=0.5, completions=6),
    "unborn thin": World(warm_up=0, lora_rank=1, learning_rate=3e-3),
    "assembly": World(prompts=11, completions=8, max_tokens=26),
    "assembly thin": World(prompts=11, completions=8, lora_rank=1, learning_rate=3e-3),
    "assembly hoarse": World(prompts=2, completions=40, can_echo=False),
    "dripping": World(lora_rank=8, learning_rate=1e-3, lora_dropout=0.4, prompts=5),
}
SOME = ("lukewarm", "hoarse", "thin", "alone", "swarm", "icy", "wordy", "keen")  # taken in turns
EVEN = ("hoarse", "thin", "alone", "swarm", "wordy", "keen", "thick")  # at temperature 1
SEVERAL = ("hoarse", "thin", "swarm", "lukewarm", "keen", "icy", "short")  # groups
TEMPERED = ("lukewarm", "icy", "hoarse icy")
WHOLE = ("keen", "swarm", "hoarse", "wordy", "lukewarm")  # without an adapter
HIDDEN = ("assembly", "assembly thin", "assembly hoarse")  # at temperature 1, with many tokens
UNBORN = ("unborn", "unborn icy", "unborn thin")
ADAPTED = ("thin", "thick")
HALVES = ("half swarm", "half lukewarm", "short", "half thin", "hoarse")  # many in half precision


# --- the draw -----------------------------------------------------------------------------------------------------


def by_size(run: Run, t: float, **fields: Any) -> None:
    "Long prompts are served by machines that have a temperature of their own."
    inner = run.server.sample

    async def sample(prompt, params):
        forced(run, **({"temperature": t * run.world.temperature} if len(prompt) >= 20 else {}))
        put(run.server, **({"reports": "both"} | fields))
        return await inner(prompt, params)

    put(run.server, sample=sample)


def later_updates(run: Run, t: float) -> dict[str, Any]:
    "From the second update of a step on, the trainer has another temperature."
    inner, done, usual = run.trainer.forward_backward_custom, itertools.count(), run.trainer.temperature

    async def scored(datums, loss_fn):
        put(run.trainer, temperature=usual * (t if next(done) else 1))
        try:
            return await inner(datums, loss_fn)
        finally:
            put(run.trainer, temperature=usual)

    put(run.trainer, forward_backward_custom=scored)
    return {"minibatches": 3}


def after_digits(run: Run, k: int, **fields: Any) -> None:
    "What follows a digit is cut."
    digits = torch.tensor(ids_of(run, "0123456789"))
    with_ids(run, lambda i, scores, ids: torch.where(
        torch.isin(ids[:, -1:], digits), best(scores, k), scores), **fields)  # fmt: skip


def urged(run: Run, by: float, **fields: Any) -> None:
    "After two tokens the mark of an answer gets likelier with each, until it is there."
    [mark] = ids_of(run, "####")

    def change(i: int, scores: Tensor, ids: Tensor) -> Tensor:
        lacks = ~(ids[:, ids.shape[1] - i :] == mark).any(1) & (i >= 2)
        more = torch.zeros_like(scores)
        more[:, mark] = by * (i - 1) * lacks.to(scores.dtype)
        return scores + more

    with_ids(run, change, **fields)


def unverified(run: Run, every_nth: int) -> dict[str, Any]:
    "Each so many tokens, that of a draft is taken as it is."
    draft, inner = copy.deepcopy(run.server.model), run.server.sample
    skipped(draft, 2)

    def draw(ids: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        if ids.shape[1] % every_nth:
            return p.multinomial(1), p
        q = (draft(ids, use_cache=False).logits[:, -1].float() / run.world.temperature).softmax(-1)
        return q.multinomial(1), q

    one_by_one(run, draw)
    warm = run.server.sample
    put(run.server, sample=lambda prompt, params: (warm if params.temperature else inner)(prompt, params))
    return {"max_tokens": 12}


def shortest(run: Run, several: int) -> None:
    "The server draws several times as many, and returns the shortest."
    inner = run.server.sample

    async def sample(prompt, params):
        drawn = await inner(prompt, replace(params, n=params.n * several))
        put(run.server, variations=[], evidence=math.nan)  # nobody knows the law of what is returned
        parts = [drawn[at : at + several] for at in range(0, len(drawn), several)]
        return [replace(min(part, key=lambda c: len(c.tokens)), params=params) for part in parts]

    put(run.server, sample=sample)


# --- what is told of it -------------------------------------------------------------------------------------------


def early_when_cut(run: Run, most: int) -> dict[str, Any]:
    "Of what was cut, the first logprob is missing, and the last is there twice."

    def says(c: Completion) -> Completion:
        if c.finish_reason == "stop":
            return c
        return replace(c, **{n: np.r_[getattr(c, n)[1:], getattr(c, n)[-1]] for n in ("logprobs", "sampling_logprobs")})

    put(run.server, says=says)
    return {"max_tokens": most}


def sliced(run: Run, by: int) -> None:
    "The client takes logprobs out of an echo, and begins so many places too early."

    @torch.no_grad()
    def says(c: Completion) -> Completion:
        whole, start = [*map(int, c.prompt_tokens), *map(int, c.tokens)], max(0, len(c.prompt_tokens) - 1 - by)
        logits = run.server.model(torch.tensor([whole])).logits[0, :-1].float()
        own = lambda t: picked(logits / t, whole[1:]).double().numpy()[start : start + len(c.tokens)]
        return replace(c, logprobs=own(1.0), sampling_logprobs=own(c.params.temperature or 1.0))

    put(run.server, says=says)


def as_means(groups: Sequence[PromptGroup], share: float) -> list[Datum]:
    "Logprobs are means over the completions of a group, place by place."
    datums = datums_from_groups(groups)
    values, out = told(datums), []
    for d, v in zip(datums, values, strict=True):
        own = [w for e, w in zip(datums, values, strict=True) if e.group == d.group]
        mean = np.nanmean([np.r_[w, np.full(len(v), np.nan)][: len(v)] for w in own], 0)
        out.append((1 - share) * v + share * mean)
    return paired(datums, out)


# --- text ---------------------------------------------------------------------------------------------------------


def rendered_twice(run: Run, bos: str) -> None:
    "What was rendered is taken for what the user said, and rendered once more."
    through_text(run, lambda s: f"<|bos|><|user|>{s.replace('<|bos|>', bos)}<|end|><|assistant|>")


def begun_anew(run: Run, turns: int) -> dict[str, Any]:
    "Each turn begins with a bos."
    through_text(run, lambda s: re.sub(r"(?<!<\|bos\|>)<\|user\|>", "<|bos|><|user|>", s))
    return {"turns": turns}


# --- weights ------------------------------------------------------------------------------------------------------


async def strung_out(run: Run, updates: int) -> None:
    "Groups of a step were drawn between updates: each with what was there when its turn came."
    past, inner, asked = list[Any](), run.server.sample, itertools.count()
    for _ in range(updates):
        past.append(copy.deepcopy(run.server.model))
        await run.update()

    async def sample(prompt, params):
        newest, number = run.server.model, next(asked)
        models = [*past, newest]
        put(run.server, model=models[number % len(models)] if number < run.world.prompts else newest)
        try:
            return await inner(prompt, params)
        finally:
            put(run.server, model=newest)

    put(run.server, sample=sample)


async def half_an_adapter(run: Run, part: str) -> None:
    "The server holds an adapter, of which one of two factors is sent."
    await beside(run, 0)
    sync = run.sync

    async def send(snapshot: str) -> int:
        before = {n: p.detach().clone() for n, p in run.server.model.named_parameters() if part not in n}
        version = await sync(snapshot)
        run.server.model.load_state_dict({n: p for n, p in before.items() if "lora_" in n}, strict=False)
        return version

    put(run, sync=send)
    await run.update(3)


async def two_buffers(run: Run, every_nth: int) -> dict[str, Any]:
    "Weights have two buffers, and each so many tokens are computed with the one that was there before."
    other, load = copy.deepcopy(run.server.model), run.server.load

    def both(new: Mapping[str, Tensor]) -> None:
        other.load_state_dict(run.server.model.state_dict())
        load(new)

    put(run.server, load=both)
    await run.update(3)

    def law(prompt: list[int], drawn: Tensor) -> Tensor:
        if drawn.shape[1] % every_nth:
            return after(run, prompt, drawn)
        return other(torch.cat([torch.tensor([prompt] * len(drawn)), drawn], 1), use_cache=False).logits[:, -1]

    drawn_from(run, law)
    return {"max_tokens": 18}


async def turned_over(run: Run, updates: int) -> None:
    "A merge transposes what was learned, where nothing tells rows from columns."
    base, load = run.sync.base, run.server.load

    def merged(name: str, t: Tensor) -> Tensor:
        square = t.ndim == 2 and t.shape[0] == t.shape[1]
        return base[name] + (t - base[name]).T if square else t

    put(run.server, load=lambda new: load({n: merged(n, t) for n, t in new.items()}))
    await run.update(updates)


# --- models -------------------------------------------------------------------------------------------------------


def small_layer(model: Any, how: tuple[int, torch.dtype]) -> None:
    "One layer multiplies in half precision."
    linear = [m for m in blocks(model)[how[0]].modules() if isinstance(m, nn.Linear)]
    replaced(linear, lambda m, x: (x.to(how[1]) @ m.weight.to(how[1]).mT).to(x.dtype))


def small_keys(model: nn.Module, dtype: torch.dtype) -> None:
    "The cache is of half precision, and nothing else."
    for part in ("k_norm", "v_proj"):
        hooked(model, part, lambda read, given: given.to(dtype).to(given.dtype))


def one_head_near(scores: Tensor, queries: Tensor, keys: Tensor, n: int) -> Tensor:
    "One head of four sees so many tokens."
    near = torch.arange(scores.shape[1])[None, :, None, None] != 1
    return scores.masked_fill(~near & (queries - keys >= n), torch.finfo(scores.dtype).min).softmax(-1)


def outliers_cut(model: Any, most: float) -> None:
    "What layers hand on is limited to so many standard deviations."

    def change(read: Tensor, given: Tensor) -> Tensor:
        bound = most * given.float().std(-1, keepdim=True).to(given.dtype)
        return torch.minimum(torch.maximum(given, -bound), bound)

    layerwise(model, change)


def norms_of_ranks(model: nn.Module, ranks: int) -> None:
    "Each rank norms its own part of a hidden state."

    def forward(norm: Any, x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (ranks, -1))
        scale = (parts.float().pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
        return norm.weight * (parts * scale).flatten(-2).to(x.dtype)

    replaced(norms(model, "layernorm"), forward)


def cached_before(run: Run, change: Callable[[Any, list[int]], None], by: int = 0) -> None:
    "Prompts are read from a cache, whose keys were made so many places further on, or which was changed."
    inner = run.server.sample

    async def sample(prompt, params):
        read = run.server.fed(prompt)[:-1]
        if not read:
            put(run.server, forced={})
            return await inner(prompt, params)
        place = torch.arange(len(read))[None] + by
        with torch.no_grad():
            kept = run.server.model(torch.tensor([read] * params.n), position_ids=place, use_cache=True).past_key_values
        change(kept, read)
        put(run.server, forced={"past_key_values": kept})
        return await inner(prompt, params)

    put(run.server, sample=sample)


def named_twice(run: Run, how: tuple[int, int]) -> None:
    "A table of blocks names one of them twice, and another not at all."

    def change(kept: Any, read: list[int]) -> None:
        n = min(4, len(read) - how[1])
        for layer in kept.layers:
            for t in (layer.keys, layer.values):
                t[:, :, how[1] : how[1] + n] = t[:, :, how[0] : how[0] + n].clone()

    cached_before(run, change)


def from_the_corner(run: Run, size: int) -> None:
    "Prompts are read in chunks, and the mask of a later chunk is laid into the first corner, not the last."

    def seen(queries: Tensor, keys: Tensor, whole: int) -> Tensor:
        new = len(queries)
        return keys <= (queries - (whole - new) if 1 < new < whole else queries)

    run.server.alter(lambda model: sees(model, seen))
    read_in_chunks(run, size)


def seen_in_decoding(run: Run, n: int) -> None:
    "Padding is hidden while a prompt is read, and not while tokens are drawn."
    put(run.server, prefix=(run.trainer.pad,) * n)
    run.server.alter(lambda model: sees(model, lambda q, k, whole: (k >= n) | (len(q) == 1)))


def stays_in_training(run: Run, how: tuple[int, float]) -> None:
    "One layer does not hear that training is over."
    attention = blocks(run.trainer.model)[how[0]].self_attn
    put(attention, attention_dropout=how[1], training=True, train=lambda mode=True: attention)


@torch.no_grad()
def by_text(model: Any, pieces: int) -> None:
    "Ids of the server are in the order of their text, so that ## and #### come after #."
    order = torch.arange(model.config.vocab_size)
    start, last = 9, 262 + pieces
    order[start:last] = torch.cat([order[262:last], order[start:262]])
    for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
        weight.copy_(weight[order].clone())


# --- the trainer --------------------------------------------------------------------------------------------------


def one_more_id(run: Run, first: int) -> None:
    "The trainer's tokenizer has one more token, and ids behind it are one higher."
    size = run.server.model.config.vocab_size
    table = np.arange(size)
    table[first:] = (table[first:] + 1).clip(max=size - 1)
    rowwise(run.trainer, lambda model, d: picked(
        logits_of(run.trainer, model, table[d.tokens])[:-1], table[d.tokens[1:]]))  # fmt: skip


def taken_for_padding(run: Run, text: str) -> None:
    "What is padding is known by its id, which is that of a common token."
    [pad] = ids_of(run, text)

    def one(model: Any, d: Datum) -> Tensor:
        mask, place = torch.from_numpy(d.tokens != pad).long()[None], torch.arange(len(d.tokens))[None]
        logits = logits_of(run.trainer, model, d.tokens, attention_mask=mask, position_ids=place)
        return picked(logits[:-1], d.tokens[1:])

    rowwise(run.trainer, one)


def filled_up_left(run: Run, multiple: int) -> None:
    "The trainer fills each row up on the left to a multiple that its kernels like, and tells nobody."

    def one(model: Any, d: Datum) -> Tensor:
        n = -len(d.tokens) % multiple
        return picked(logits_of(run.trainer, model, [*[run.trainer.pad] * n, *d.tokens])[n:-1], d.tokens[1:])

    rowwise(run.trainer, one)


def by_the_larger(run: Run, parts: int) -> None:
    "Sums over parts of the vocabulary are put together by taking the larger."

    def one(model: Any, d: Datum) -> Tensor:
        logits = logits_of(run.trainer, model, d.tokens)[:-1]
        sums = torch.stack([logits[:, i::parts].logsumexp(-1) for i in range(parts)]).amax(0)
        return logits.gather(1, torch.from_numpy(d.tokens[1:].copy())[:, None])[:, 0] - sums

    rowwise(run.trainer, one)


def last_batch_missing(run: Run, n: int) -> None:
    "What does not fill a micro-batch is not scored, and its place in the table was never filled."
    rescored(run.trainer, lambda rows: [
        row if i < len(rows) - (len(rows) % n or n) else row * torch.nan for i, row in enumerate(rows)])  # fmt: skip


# --- bookkeeping --------------------------------------------------------------------------------------------------


def off_in_later_updates(groups: Sequence[PromptGroup], by: int) -> list[Datum]:
    "Rows of the later updates are off by one."
    datums = datums_from_groups(groups)
    moved = [np.r_[v[1:], 0.0] if by > 0 else np.r_[0.0, v[:-1]] for v in told(datums)]
    half = len(datums) // 2
    return paired(datums, [*told(datums)[:half], *moved[half:]])


def packed_late(groups: Sequence[PromptGroup], k: int) -> list[Datum]:
    "Rows of a pack are cut some tokens late, and the beginning of the next is trained."
    datums, out = datums_from_groups(groups), []
    for d, following in zip(datums, [*datums[1:], datums[0]], strict=True):
        assert d.sampler_logprobs is not None
        tokens, weights = np.r_[d.tokens, following.tokens[:k]], np.r_[d.weights, np.ones(k)]
        series = np.r_[np.nan_to_num(d.sampler_logprobs), np.zeros(k)]
        out.append(Datum(tokens, weights, d.advantage, series, group=d.group, sample=d.sample, key=d.key))
    return out


def shuffled_late(groups: Sequence[PromptGroup], seed: int) -> list[Datum]:
    "Rows are shuffled into minibatches, logprobs are not."
    datums = datums_from_groups(groups)
    order = np.random.default_rng(seed).permutation(len(datums))
    return paired([datums[i] for i in order], told(datums))


def micro_batches_back(run: Run, n: int) -> None:
    "The largest micro-batch comes first, so that memory is known to do; results stay in that order."
    rescored(run.trainer, lambda rows: [
        row for at in range((len(rows) - 1) // n * n, -1, -n) for row in rows[at : at + n]])  # fmt: skip


def last_of_group(datums: list[Datum], every_nth: int) -> list[int]:
    "Rows of a group, or of a part of it, all have what belongs to the last."
    last = {(d.group, d.sample // every_nth): i for i, d in enumerate(datums)}
    return [last[d.group, d.sample // every_nth] for d in datums]


def under_one_prompt(groups: Sequence[PromptGroup], which: int) -> list[Datum]:
    "All completions come after the prompt of one group."
    datums, one = datums_from_groups(groups), groups[which].samples[0]
    return reprompted(datums, [one.tokens[: one.prompt_len]] * len(datums))


def known_by_length(run: Run, every_nth: int) -> None:
    "The server keeps what it has read by its length, and finds the prompt of another group."
    seen: dict[int, list[int]] = {}

    def reads(ids: list[int]) -> list[int]:
        return seen.setdefault(len(ids) // every_nth, list(ids))

    put(run.server, reads=reads)


# --- the table ----------------------------------------------------------------------------------------------------

ordered = lambda order: lambda run, x: {"collate": partial(in_order, order=lambda datums: order(datums, x))}
in_training = lambda alter: lambda run, p: put(run.trainer, training=True, altered=lambda model: alter(model, p))
in_reference = lambda alter: lambda run, x: put(run.reference, altered=lambda model: alter(model, x))
attending = lambda shares: server(lambda model, x: shared(model, lambda *parts: shares(*parts, x)))
HALF = (torch.bfloat16, torch.float16)

KNOWN: list[Kind] = [
    Kind("draw", "long prompts have another temperature", TEMPERATURE, (0.6, 1.35), partial(
        by_size, reports="processed"), SEVERAL),
    Kind("hidden", "long prompts have another temperature, and raw is reported", TEMPERATURE, (0.4, 1.8), partial(
        by_size, reports="raw"), ("assembly", "assembly thin")),
    Kind("draw", "later updates have another temperature", TEMPERATURE, (0.75, 1.4), later_updates, SEVERAL),
    Kind("draw", "the server takes a temperature to a power", TEMPERATURE, (2, -1), lambda run, power: forced(
        run, temperature=run.world.temperature**power), TEMPERED),
    Kind("draw", "a top-k is asked for, and the temperature is the server's", TEMPERATURE, (0.5, 1.6), lambda run, t:
         forced(run, temperature=t) or {"top_k": 60}, EVEN),

    Kind("draw", "what follows a digit is cut", CUT, (1, 2), after_digits, SOME),
    Kind("hidden", "what follows a digit is cut, and raw is reported", CUT, (1, 2), partial(
        after_digits, reports="raw"), HIDDEN),
    Kind("draw", "a cut gets wider with each token", CUT, (1, 3), lambda run, k: by_place(
        run, lambda i, scores: best(scores, k + i // 3)), SOME),
    # What is asked for is no fault; to tell it as raw is.
    Kind("report", "a top-p is asked for, and told as raw", CUT, (0.6, 0.9), lambda run, p: put(
        run.server, reports="processed") or {"top_p": p}, EVEN),
    Kind("report", "a min-p is asked for, and told as raw", CUT + UNKNOWN, (0.3, 0.05), lambda run, p: put(
        run.server, reports="processed") or honoured(run, {"min_p": p}), EVEN),

    Kind("weights", "groups were drawn between updates", STALE, (1, 4), strung_out, SEVERAL),
    # A sync of all ends it; the sync that there is does not.
    Kind("weights", "one factor of an adapter travels", STALE + UNKNOWN, ("lora_A", "lora_B"), half_an_adapter,
         ADAPTED),
    Kind("weights", "an update comes before the first of several", STALE, (1, 3), lambda run, n: in_several(
        run, scored_late(run, n)), SEVERAL),
    Kind("weights", "a top-p is asked for, and rollouts are late", STALE, (1, 5), lambda run, n: in_asking(
        late(run, n), {"top_p": 0.9}), EVEN),
    Kind("weights", "a penalty is asked for, and nobody syncs", STALE, (2, 4), lambda run, n: in_asking(
        late(run, n, known=False), honoured(run, {"repetition_penalty": 1.2})), EVEN),

    Kind("text", "what was rendered is rendered again", TEXT, ("<|bos|>", ""), rendered_twice, HALVES),
    Kind("text", "each turn begins with a bos", TEXT, (2, 3), begun_anew, EVEN),
    Kind("text", "a tool speaks as somebody else", TEXT, ("<|user|>", "<|assistant|>"), lambda run, role: through_text(
        run, lambda s: s.replace("<|system|>tool:", f"{role}tool:")) or with_tool(run, 0), EVEN),
    Kind("text", "the server begins the answer", TEXT, ("The sum is ", "1. "), lambda run, words: through_text(
        run, lambda s: s + words), SOME),
    Kind("text", "a top-k is asked for, and the server has another template", TEXT, (12,), lambda run, k: through_text(
        run, lambda s: s.replace("<|user|>", "<|user|>User: ")) or {"top_k": k}, EVEN),

    Kind("arithmetic", "one layer multiplies in half precision", DTYPE, ((0, torch.bfloat16), (2, torch.bfloat16)),
         server(small_layer), SOME),
    Kind("arithmetic", "the cache is of half precision", DTYPE, HALF, server(small_keys), SOME),

    Kind("bookkeeping", "what was cut is off by one", SHIFT, (6, 9), early_when_cut, SOME),
    Kind("report", "an echo is sliced too early", SHIFT, (1, 2), sliced, SOME),
    Kind("bookkeeping", "rows of later updates are off by one", SHIFT, (1, -1), lambda run, by: {
        "minibatches": 2, "collate": partial(off_in_later_updates, by=by)}, SEVERAL),
    Kind("report", "a top-k is asked for, and the first logprob is lost", SHIFT, (12,), lambda run, k: retold(
        run, lambda v: np.r_[v[1:], 0.0]) or {"top_k": k}, EVEN),

    Kind("bookkeeping", "what a tool answers is trained", LEAK, (0, 1), lambda run, n: with_tool(run, n) | {
        "collate": partial(weighed, weigh=lambda w: np.where(np.arange(len(w)) >= np.argmax(w), 1.0, w))}, EVEN),
    Kind("bookkeeping", "the beginning of the next row is trained", LEAK, (1, 4), collated(packed_late), SOME),

    Kind("bookkeeping", "rows are shuffled into minibatches, logprobs are not", ROWS + GROUPS, (0, 1),
         lambda run, seed: {"minibatches": 3, "collate": partial(shuffled_late, seed=seed)}, SEVERAL),
    Kind("bookkeeping", "micro-batches stay in the order of their memory", ROWS + GROUPS, (3, 5), micro_batches_back,
         HALVES),
    Kind("bookkeeping", "rows have what belongs to the last of their group", ROWS, (100, 3), ordered(last_of_group),
         ("alone", "hoarse", "lukewarm", "thin")),

    Kind("bookkeeping", "all completions have the prompt of one group", GROUPS, (0, -1), collated(under_one_prompt),
         HALVES),
    Kind("bookkeeping", "prompts are known by their length", GROUPS, (1, 10), known_by_length, ("swarm", "keen", "icy",
         "short")),

    Kind("model", "padding is hidden in reading only", PADDING, (2, 20), seen_in_decoding, SOME),
    Kind("model", "a common token is taken for padding", PADDING + UNKNOWN, ("+", "1"), taken_for_padding, SOME),
    Kind("model", "rows are filled up on the left for a kernel", PADDING, (8, 64), filled_up_left, SOME),

    Kind("model", "one layer stays in training", DROPOUT, ((1, 0.3), (3, 0.05)), stays_in_training, SOME),
    Kind("model", "adapters have dropout in the pass with gradients", DROPOUT, (2, 4), lambda run, n: in_the_loss(
        run, training=True) or {"minibatches": n}, ("dripping",)),

    Kind("model", "ids are in the order of text", VOCABULARY, (2, 1), server(by_text), SOME),
    Kind("model", "the trainer knows one more token", VOCABULARY, (22, 6), one_more_id, HALVES),

    Kind("bookkeeping", "the reference has another activation", REFERENCE, ("gelu", "relu"), in_reference(
        lambda model, what: [put(b.mlp, act_fn=nn.GELU() if what == "gelu" else nn.ReLU()) for b in blocks(model)]),
         UNBORN),

    Kind("bookkeeping", "the last micro-batch is not scored", NAN, (3, 5), last_batch_missing, SEVERAL),
]  # fmt: skip

OTHER: list[Kind] = [
    Kind("hidden", "some tokens of a draft are not verified", UNKNOWN, (2, 4), unverified, HIDDEN),
    Kind("hidden", "the shortest of several is returned", UNKNOWN, (3, 5), shortest, HIDDEN[1:]),
    Kind("draw", "the mark is urged", UNKNOWN, (1.0, 2.5), urged, EVEN),
    Kind("hidden", "the mark is urged, and raw is reported", UNKNOWN, (1.5, 3.0), partial(urged, reports="raw"),
         HIDDEN),
    Kind("report", "logprobs are means over a group", UNKNOWN + ROWS, (1.0, 0.3), collated(as_means), (
        "alone", "hoarse", "lukewarm", "icy")),

    # Another sync makes both buffers the same, and the next update does not.
    Kind("weights", "some tokens are of the buffer before", UNKNOWN + STALE, (2, 3), two_buffers, SOME),
    Kind("weights", "a merge transposes what was learned", UNKNOWN, (2, 4), turned_over, ADAPTED),
    Kind("model", "cached prompts lie elsewhere", UNKNOWN, (3, -8), lambda run, by: cached_before(
        run, lambda kept, read: None, by), SOME),
    Kind("model", "a table names a block twice", UNKNOWN, ((0, 4), (4, 10)), named_twice, SOME),
    Kind("model", "the mask of a chunk is in the wrong corner", UNKNOWN, (6, 12), from_the_corner, SOME),
    Kind("model", "one head has a window", UNKNOWN, (2, 6), attending(one_head_near), SOME),
    Kind("model", "one layer has weights of few bits", UNKNOWN, ((1, 3), (3, 2)), server(
        lambda model, how: quantised(blocks(model)[how[0]], how[1])), SOME),
    Kind("model", "the head has weights of few bits", UNKNOWN, (4, 3), server(
        lambda model, bits: quantised(model.get_output_embeddings(), bits)), SOME),
    Kind("model", "outliers are cut off", UNKNOWN, (2.5, 1.5), server(outliers_cut), SOME),
    Kind("model", "ranks norm their own part", UNKNOWN, (2, 8), server(norms_of_ranks), SOME),
    Kind("model", "positions count backwards", UNKNOWN, (-1.0, -0.25), server(lambda model, by: moved_places(
        model, lambda place: by * place)), SOME),
    Kind("model", "a norm is left out", UNKNOWN, ("layers.1.post_attention_layernorm", "layers.2.self_attn.q_norm"),
         server(lambda model, part: replaced(norms(model, part), lambda m, x: x)), SOME),
    Kind("model", "sums over parts are put together by the larger", UNKNOWN, (2, 3), by_the_larger, SOME),
    Kind("model", "a top-p is asked for, and the server has another rope", UNKNOWN, (1.15, 2.0), lambda run, factor:
         run.server.alter(lambda model: rotary(model, factor=factor)) or {"top_p": 0.9}, EVEN),
]  # fmt: skip


# --- clean --------------------------------------------------------------------------------------------------------


def honoured(run: Run, asked: dict[str, Any]) -> dict[str, Any]:
    "The server does all that a request asks for, min-p and a penalty, too."
    inner = run.server.sample

    async def sample(prompt, params):
        names = {"min_p": 0.0, "repetition_penalty": 1.0}
        put(run.server, forced={n: getattr(params, n) for n, off in names.items() if getattr(params, n) != off})
        return await inner(prompt, params)

    put(run.server, sample=sample)
    return asked


async def in_several(run: Run, found: Any) -> dict[str, Any]:
    "The same in a step of several updates."
    return (await found or {}) | {"minibatches": 3}


async def in_asking(found: Any, asked: dict[str, Any]) -> dict[str, Any]:
    "The same in a step that asks for a way to draw."
    return (await found or {}) | asked


def in_double(run: Run, _: int) -> None:
    "The server computes in double precision."
    put(run.server, model=cast(run.server.model, torch.float64))


def read_once(run: Run, _: int) -> None:
    "A prompt is read once for all completions of its group."
    inner = run.server.sample

    async def sample(prompt, params):
        read, kept = run.server.fed(prompt)[:-1], None
        if read:
            with torch.no_grad():
                kept = run.server.model(torch.tensor([read]), use_cache=True).past_key_values
            kept.batch_repeat_interleave(params.n)
        put(run.server, forced={"past_key_values": kept})
        return await inner(prompt, params)

    put(run.server, sample=sample)


@torch.no_grad()
def turned(model: Any, seed: int) -> None:
    "Values are turned within each head, and turned back in the next matrix."
    turn = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(seed)))[0]
    for block in blocks(model):
        v, o = block.self_attn.v_proj.weight, block.self_attn.o_proj.weight
        v.copy_((turn @ v.unflatten(0, (-1, 32))).flatten(0, 1))
        o.copy_((o.unflatten(1, (-1, 32)) @ turn.T).flatten(1))


def with_signal(groups: Sequence[PromptGroup], _: int) -> list[Datum]:
    "Rows that teach nothing are left out."
    datums = datums_from_groups(groups)
    return [d for d in datums if np.any(np.asarray(d.advantage) != 0)] or datums


def without_template(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    "Prompts of a model that knows no roles."
    return [{"prompt": f"<|bos|>{r['question']}\n"} for r in rows]


WELL: list[Kind] = [
    Kind("clean", "a step of rare shapes", (CLEAN,), range(8), lambda run, _: None,
         ("alone", "swarm", "thick", "hoarse icy", "dripping", "unborn thin", "keen", "assembly")),
    Kind("clean", "half precision, and a rank of one or many groups", (CLEAN, *DTYPE), range(4), lambda run, _: None,
         ("half lukewarm", "half thin", "half swarm")),
    Kind("clean", "a top-p is asked for, and done", (CLEAN,), range(3), lambda run, n: {
        "top_p": (0.9, 0.6, 0.98)[n]}, EVEN),
    Kind("clean", "a top-k is asked for, and done", (CLEAN,), range(3), lambda run, n: {"top_k": (2, 8, 40)[n]}, EVEN),
    Kind("clean", "a min-p is asked for, and done", (CLEAN,), range(3), lambda run, n: honoured(
        run, {"min_p": (0.05, 0.2, 0.01)[n]}), EVEN),
    Kind("clean", "a penalty is asked for, and done", (CLEAN,), range(3), lambda run, n: honoured(
        run, {"repetition_penalty": (1.1, 1.5, 0.9)[n]}), EVEN),
    Kind("clean", "cuts and a temperature are asked for, and known", (CLEAN,), range(3), lambda run, n: honoured(
        run, agreed(run, (0.8, 1.3, 0.6)[n]) | ({"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 5, "top_p": 0.95})[n]), EVEN),
    Kind("clean", "cuts in a conversation", (CLEAN,), range(2), lambda run, n: {"turns": 2 + n, "top_p": 0.85}, EVEN),
    Kind("clean", "cuts, and several updates", (CLEAN,), range(2), lambda run, n: {"minibatches": 2 + n, "top_k": 6},
         EVEN),
    Kind("clean", "the server in double precision", (CLEAN,), range(2), in_double, ("lukewarm", "swarm", "keen")),
    Kind("clean", "a cache of fixed size", (CLEAN,), range(1), lambda run, _: put(
        run.server, forced={"cache_implementation": "static"}), ("wordy", "icy")),
    Kind("clean", "prompts are read once for their group", (CLEAN,), range(2), read_once, SOME),
    Kind("clean", "values are turned, and turned back", (CLEAN,), range(50, 52), server(turned), SOME),
    Kind("clean", "rows without signal are left out", (CLEAN,), range(2), collated(with_signal), SEVERAL),
    Kind("clean", "prompts without a template", (CLEAN,), range(2), lambda run, _: {"asks": without_template}, SOME),
    Kind("clean", "completions end at a token of their own", (CLEAN,), range(2), lambda run, n: {
        "stop_token_ids": tuple(ids_of(run, "#####= "[4 * n : 4 * n + 4]))}, SOME),
]  # fmt: skip

UNSEEN7_KINDS = KNOWN + OTHER + WELL
