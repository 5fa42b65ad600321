"""Faults for the doctor by one more person who has not read it: kinds that no other part has, many of real reports.

Do not open this file while you improve the doctor. Once its answers were looked at, it belongs to `build`.

What is right was decided by the rules of `unseen5`, before any answer was seen: a cause is right if its remedy in
`causes.FIXES` ends the fault. Where the weights are old and another sync does not end it, `NONE` is right, too. A law
that keeps only some tokens, but is no top-p and no top-k, may be called by their name or by none."""

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

from rl_notebook.core import AdamParams, BackendError, Completion, Datum, PromptGroup, SampleParams
from rl_notebook.datums import datums_from_groups
from rl_notebook.rollouts import Prompt, Rollouts, draw_completions

from .faults import (
    CLEAN, CUT, DROPOUT, DTYPE, LEAK, PADDING, SHIFT, STALE, TEMPERATURE, TEXT, UNKNOWN, WORLDS, Kind, fitted, forced,
    paired, put, reordered, rotary, through_text, told, weighed,
)  # fmt: skip
from .machines import seeded
from .steps import Run, World
from .unseen import (
    GROUPS, NAN, REFERENCE, ROWS, VOCABULARY, alternatives, collated, hooked, ids_of, processed, retold, server, tied,
    trainer,
)  # fmt: skip
from .unseen3 import (
    agreed, attention, best, blocks, handed, logits_of, picked, replaced, rowwise, shown, skipped, system,
)  # fmt: skip
from .unseen4 import beside, in_order, kept, nucleus, one_by_one, with_attention, with_ids, with_tool
from .unseen5 import in_the_loss, rescored, shared

WORLDS |= {
    "tepid": World(temperature=0.8, completions=5),
    "ardent": World(temperature=1.45, prompts=3, completions=5, max_tokens=26),
    "reticent": World(can_echo=False, prompts=5, completions=5, warm_up=3),
    "modest": World(lora_rank=3, learning_rate=1.8e-3, prompts=5),
    "ample": World(prompts=5, completions=6, max_tokens=30),
    "veteran": World(warm_up=7, learning_rate=4e-5),
    "zealous": World(lora_rank=12, learning_rate=2.5e-3),
    "half tepid": World(dtype="bfloat16", temperature=0.8, completions=5),
    "half modest": World(dtype="bfloat16", lora_rank=3, learning_rate=1.8e-3),
    "infant": World(warm_up=0, prompts=5),
    "infant tepid": World(warm_up=0, temperature=0.8, completions=5),
    "infant modest": World(warm_up=0, lora_rank=3, learning_rate=1.8e-3),
    "reticent ardent": World(can_echo=False, temperature=1.45, prompts=5),
    "arena": World(prompts=9, completions=8, max_tokens=28),
    "arena modest": World(prompts=9, completions=8, lora_rank=3, learning_rate=1.8e-3),
    "arena reticent": World(prompts=8, completions=10, can_echo=False),
    "duel": World(prompts=6, completions=2, max_tokens=20),
    "leaking": World(lora_rank=6, learning_rate=1.5e-3, lora_dropout=0.15),
    "idle": World(learning_rate=0.0, completions=3),
}
SOME = ("tepid", "reticent", "modest", "ample", "ardent", "veteran")  # taken in turns
EVEN = ("reticent", "modest", "ample", "veteran")  # at temperature 1
TEMPERED = ("tepid", "ardent", "reticent ardent")
HALVES = (*SOME, "half tepid", "half modest")
HIDDEN = ("arena", "arena modest", "arena reticent")  # at temperature 1, with many tokens
INFANT = ("infant", "infant tepid", "infant modest")
ADAPTED = ("modest", "zealous")


# --- the draw -----------------------------------------------------------------------------------------------------


def fallback(run: Run, by: float) -> dict[str, Any]:
    "What does not end is drawn once more, hotter or cooler, as speech recognition does."
    inner = run.server.sample

    async def sample(prompt, params):
        first = await inner(prompt, params)
        usual = {name: getattr(run.server, name) for name in ("forced", "reports")}
        forced(run, temperature=by * params.temperature)
        again = await inner(prompt, replace(params, seed=(params.seed or 0) + 5))
        put(run.server, **usual)
        return [a if a.finish_reason == "stop" else b for a, b in zip(first, again, strict=True)]

    put(run.server, sample=sample)
    return {"max_tokens": 9}


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


def multiplied(run: Run, by: float, **fields: Any) -> None:
    "All requests of a step share an object, in which each of them multiplies the temperature."
    inner, asked = run.server.sample, itertools.count()

    async def sample(prompt, params):
        forced(run, temperature=run.world.temperature * by ** (next(asked) % run.world.prompts))
        put(run.server, **fields)
        return await inner(prompt, params)

    put(run.server, sample=sample)


def own_bound(scores: Tensor, a: float) -> Tensor:
    "What is likelier than a chance meeting of two draws (arxiv.org/abs/2509.23234), or than a square of the best."
    p = scores.float().softmax(-1)
    return kept(scores, p >= (a * p.amax(-1, keepdim=True) ** 2 if a else (p * p).sum(-1, keepdim=True)))


def where_unsure(scores: Tensor, p: float) -> Tensor:
    "A nucleus, where there is much to choose from."
    entropy = torch.special.entr(scores.float().softmax(-1)).sum(-1, keepdim=True)
    return torch.where(entropy > 0.6, nucleus(scores, p), scores)


def of_the_batch(scores: Tensor, k: int) -> Tensor:
    "Tokens that are among the k likeliest of the mean of all rows."
    mean = scores.float().softmax(-1).mean(0, keepdim=True)
    return kept(scores, torch.isfinite(best(mean, k)))


def lingering(run: Run, share: float, **fields: Any) -> None:
    "Scores of the step before are still in the buffer."
    last: list[Tensor] = []

    def change(i: int, scores: Tensor, ids: Tensor) -> Tensor:
        old = last[0] if i and last and last[0].shape == scores.shape else scores
        last[:] = [scores.clone()]
        return torch.lerp(scores, old, share)

    with_ids(run, change, **fields)


def of_digits(run: Run, t: float) -> None:
    "Digits have a temperature, and nothing else has."
    digits = ids_of(run, "0123456789")

    def change(ids: Tensor, scores: Tensor) -> Tensor:
        law = scores.float().log_softmax(-1).clone()
        law[:, digits] /= t
        return law

    processed(run, change)


def until_marked(run: Run, tries: int) -> None:
    "A completion without the mark of an answer is drawn again, several times."
    inner, [mark] = run.server.sample, ids_of(run, "####")

    async def sample(prompt, params):
        drawn = await inner(prompt, params)
        for i in range(tries):
            again = await inner(prompt, replace(params, seed=(params.seed or 0) + 17 * (i + 1)))
            drawn = [a if mark in a.tokens else b for a, b in zip(drawn, again, strict=True)]
        put(run.server, variations=[], evidence=math.nan)  # nobody knows the law of what is returned
        return drawn

    put(run.server, sample=sample)


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


def several_at_once(run: Run, every: int) -> None:
    "One token of so many is drawn together with the one before it, and does not see it."

    def law(prompt: list[int], drawn: Tensor) -> Tensor:
        seen = drawn.clone()
        if seen.shape[1] % every == every - 1:
            seen[:, -1] = run.trainer.pad
        return after(run, prompt, seen)

    drawn_from(run, law)


def padded_prefill(run: Run, n: int) -> None:
    "Prompts are padded on the right to a bucket, places go on where the prompt ended, and padding stays in the cache."

    def law(prompt: list[int], drawn: Tensor) -> Tensor:
        pads = [run.trainer.pad] * (n - len(prompt) % n)
        place = [*range(len(prompt) + len(pads)), *range(len(prompt), len(prompt) + drawn.shape[1])]
        return after(run, prompt + pads, drawn, position_ids=torch.tensor([place])) if drawn.shape[1] else after(
            run, prompt, drawn)  # fmt: skip

    drawn_from(run, law)


# --- what is told of it -------------------------------------------------------------------------------------------


def without_end(run: Run, _: Any) -> None:
    "Of what has ended, the client drops the last token, and the first logprob."

    def says(c: Completion) -> Completion:
        if c.finish_reason != "stop" or len(c.tokens) < 2:
            return c
        return replace(c, tokens=c.tokens[:-1], **{n: getattr(c, n)[1:] for n in ("logprobs", "sampling_logprobs")})

    put(run.server, says=says)


def two_entries(run: Run, text: str) -> None:
    "A token of several bytes has two entries in the list of logprobs."
    [token] = ids_of(run, text)
    often = lambda c, v: np.repeat(v, 1 + (c.tokens == token))[: len(v)]
    series = lambda c: {n: often(c, getattr(c, n)) for n in ("logprobs", "sampling_logprobs")}
    put(run.server, says=lambda c: replace(c, **series(c)))


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


# --- text ---------------------------------------------------------------------------------------------------------


def written_again(run: Run, space: str) -> dict[str, Any]:
    "Earlier answers are parsed, and written again with other separators."
    through_text(run, lambda s: re.sub(
        r"(?<=<\|assistant\|>)[^<]+(?=<\|end\|>)", lambda m: m[0].replace(" ", space), s))  # fmt: skip
    return {"turns": 2}


def one_by_role(run: Run, between: str) -> dict[str, Any]:
    "The server's template joins messages of one role."
    through_text(run, lambda s: s.replace("<|end|><|user|>", between))
    said = lambda q: [{"role": "user", "content": text} for text in ("Two numbers may be equal.", q)]
    return {"asks": lambda rows: [{"messages": said(r["question"])} for r in rows]}


def turns_of(d: Datum) -> list[np.ndarray]:
    "Places of tokens that were drawn, turn by turn."
    on = np.flatnonzero(d.active) + 1
    return np.split(on, np.flatnonzero(np.diff(on) > 1) + 1)


def without_thoughts(groups: Sequence[PromptGroup], share: float) -> list[Datum]:
    "The last turn is trained after a conversation whose earlier answers lost their beginning: verl-project/verl#6854."
    out = []
    for d in datums_from_groups(groups):
        stays, weights, turns = np.ones(len(d.tokens), bool), np.r_[0.0, d.weights], turns_of(d)
        for turn in turns[:-1]:
            stays[turn[: math.ceil(share * (len(turn) - 1))]], weights[turn] = False, 0.0
        assert d.sampler_logprobs is not None
        series = np.where(weights > 0, np.r_[np.nan, d.sampler_logprobs], np.nan)
        out.append(Datum(d.tokens[stays], weights[stays][1:], d.advantage, series[stays][1:], group=d.group,
                         sample=d.sample, key=d.key))  # fmt: skip
    return out


# --- weights ------------------------------------------------------------------------------------------------------


async def between_turns(run: Run, updates: int) -> dict[str, Any]:
    "A sync comes between the turns of all conversations."
    earlier, inner, asked = copy.deepcopy(run.server.model), run.server.sample, itertools.count()
    [user] = ids_of(run, "<|user|>")
    await run.update(updates)

    async def sample(prompt, params):
        newest = run.server.model
        of_step = next(asked) < 2 * run.world.prompts * run.world.completions
        put(run.server, model=earlier if of_step and list(prompt).count(user) == 1 else newest)
        try:
            return await inner(prompt, params)
        finally:
            put(run.server, model=newest)

    put(run.server, sample=sample)
    return {"turns": 2}


async def while_arriving(run: Run, updates: int) -> None:
    "Weights arrive part by part, and the server goes on answering meanwhile."
    copied = lambda: {n: t.clone() for n, t in run.server.model.state_dict().items()}
    old, load, inner, asked = copied(), run.server.load, run.server.sample, itertools.count()
    await run.update(updates)
    new, names = copied(), sorted(copied())

    async def sample(prompt, params):
        if (n := next(asked)) <= run.world.prompts:
            there = set(names[: len(names) * n // run.world.prompts])
            load({name: (new if name in there else old)[name] for name in names})
        return await inner(prompt, params)

    put(run.server, sample=sample)


async def overtaken(run: Run, updates: int) -> None:
    "Two syncs are on their way, and the earlier one arrives last."
    earlier = await run.trainer.save_weights_for_sampler("earlier")
    await run.update(updates)
    await run.sync(earlier)


async def scores_average(run: Run, decay: float) -> None:
    "The trainer scores with a moving average of its weights, as for an evaluation."
    mean = dict(run.trainer.states[await run.trainer.save_state("mean")])
    for i in range(3):
        await run.update()
        new = run.trainer.states[await run.trainer.save_state(f"mean {i}")]
        mean = {n: torch.lerp(t, mean[n], decay) for n, t in new.items()}
    put(run.trainer, altered=lambda model: model.load_state_dict(mean, strict=False))


async def old_norms(run: Run, updates: int) -> None:
    "A merge keeps the norms that rows had before, as if those were learned apart."
    base, load = run.sync.base, run.server.load

    def normed(name: str, t: Tensor) -> Tensor:
        if t.ndim < 2 or torch.equal(t, base[name]):
            return t
        return t * base[name].norm(dim=1, keepdim=True) / t.norm(dim=1, keepdim=True)

    put(run.server, load=lambda new: load({n: normed(n, t) for n, t in new.items()}))
    await run.update(updates)


@torch.no_grad()
def noisy_weights(model: Any, size: float) -> None:
    "Parameters have noise, so that the server explores."
    with seeded(9):
        for p in model.parameters():
            if p.ndim > 1:
                p.add_((size * p.float().std() * torch.randn(p.shape)).to(p.dtype))


@torch.no_grad()
def stages_swapped(model: Any, pair: tuple[int, int]) -> None:
    "Two stages of a pipeline have each other's layers."
    one, two = (blocks(model)[i] for i in pair)
    first = copy.deepcopy(one.state_dict())
    one.load_state_dict(copy.deepcopy(two.state_dict())), two.load_state_dict(first)


@torch.no_grad()
def overwritten(model: Any, how: tuple[int, str, str]) -> None:
    "A buffer has the next tensor before it is read: sgl-project/sglang#6626."
    block = blocks(model)[how[0]]
    one, two = (next(m for n, m in block.named_modules() if n.endswith(part)) for part in how[1:])
    one.weight.copy_(two.weight)


@torch.no_grad()
def residue(model: Any, dtype: torch.dtype) -> None:
    "An adapter was merged for a sync and taken out again in a small type."
    for module in model.modules():
        if hasattr(module, "get_delta_weight"):
            weight, change = module.base_layer.weight, module.get_delta_weight("default").to(dtype)
            weight.copy_(((weight.to(dtype) + change) - change).to(weight.dtype))


# --- models -------------------------------------------------------------------------------------------------------


def in_reading(run: Run, dtype: torch.dtype) -> None:
    "Whatever is read at once is computed in half precision; single tokens are not."
    inner = run.server.model.forward
    small = torch.autocast("cpu", dtype)(inner)
    put(run.server.model, forward=lambda input_ids, *args, **given: (small if input_ids.shape[1] > 1 else inner)(
        input_ids, *args, **given))  # fmt: skip


def small_rank(model: nn.Module, dtype: torch.dtype) -> None:
    "Of two ranks, one computes in half precision."

    def forward(module: Any, x: Tensor) -> Tensor:
        one, two = module.weight.chunk(2)
        return torch.cat([(x.to(dtype) @ one.to(dtype).mT).to(x.dtype), x @ two.mT], -1)

    replaced([m for m in model.modules() if isinstance(m, nn.Linear)], forward)


def noisy_norms(model: nn.Module, size: float) -> None:
    "Gaussian dropout: what norms give is multiplied by noise around one."
    hooked(model, "post_attention_layernorm", lambda read, given: given * (1 + size * torch.randn_like(given)))


def mixed_out(run: Run, p: float) -> None:
    "In training, single weights are those of the beginning: https://arxiv.org/abs/1909.11299"
    base = run.sync.base

    @torch.no_grad()
    def mix(model: nn.Module) -> None:
        for name, w in model.named_parameters():
            w.copy_(torch.where(torch.rand(w.shape) < p, base[name], w))

    put(run.trainer, training=True, altered=mix)


async def server_in_training(run: Run, n: int) -> None:
    "The server holds an adapter, and nobody has told it that it does not learn."
    await beside(run, n)
    run.server.model.train()


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


@torch.no_grad()
def even_head(model: Any, _: Any) -> None:
    "All rows of the head are equally long."
    weight = model.get_output_embeddings().weight
    length = weight.norm(dim=1, keepdim=True)
    weight.copy_(weight * length.mean() / length)


def clipped_gates(model: nn.Module, most: float) -> None:
    "What a gate reads is limited."
    hooked(model, "gate_proj", lambda read, given: given.clamp(-most, most))


def inclined(scores: Tensor, queries: Tensor, keys: Tensor, slope: float) -> Tensor:
    "What is far counts less: https://arxiv.org/abs/2108.12409"
    return (scores - slope * (queries - keys).clamp(min=0)).softmax(-1)


# --- the trainer --------------------------------------------------------------------------------------------------


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


def discouraged(known: Tensor, causal: Tensor, by: float) -> Tensor:
    "Padding is not hidden, but only less likely to be looked at."
    bias = torch.zeros(len(known), *causal.shape).masked_fill(~known[:, None, :], -by)
    return bias.masked_fill(~causal, torch.finfo(torch.float32).min)


def hidden_wholly(known: Tensor, causal: Tensor) -> Tensor:
    "Padding is hidden, and sees nothing at all."
    return torch.zeros(len(known), *causal.shape).masked_fill(~(known[:, None, :] & causal), -torch.inf)


def one_less_each(row: Tensor, size: int) -> Tensor:
    "Ranks hold chunks of a sequence; each shifts its own, which leaves one less, and the rest moves up."
    return row[(torch.arange(len(row)) + 1) % size != 0]


def first_prefix(run: Run, n: int) -> None:
    "Rows of a batch share a prompt, so that it is computed once: that of the first."
    datums_of: list[Sequence[Datum]] = [[]]
    begin = lambda d: int(np.argmax(d.active)) + 1

    def one(model: Any, d: Datum) -> Tensor:
        i = next(i for i, other in enumerate(datums_of[0]) if other is d)
        first = datums_of[0][i - i % n]
        prompt, own = first.tokens[: begin(first)], d.tokens[begin(d) :]
        found = picked(logits_of(run.trainer, model, [*prompt, *own])[len(prompt) - 1 : -1], own)
        return torch.cat([torch.zeros(begin(d) - 1), found])

    rowwise(run.trainer, one)
    inner = run.trainer.score
    put(run.trainer, score=lambda datums: datums_of.__setitem__(0, datums) or inner(datums))


def one_for_several(run: Run, pair: tuple[str, str]) -> None:
    "The trainer's tokenizer does not tell some tokens apart."
    table = np.arange(run.server.model.config.vocab_size)
    table[ids_of(run, pair[0])] = ids_of(run, pair[1])
    rowwise(run.trainer, lambda model, d: picked(
        logits_of(run.trainer, model, table[d.tokens])[:-1], table[d.tokens[1:]]))  # fmt: skip


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


def of_the_loss(run: Run, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    "What a loss does for its own reasons to logprobs (N-1,), by their logits (N-1, V), is in the logprobs."

    def one(model: Any, d: Datum) -> Tensor:
        logits = logits_of(run.trainer, model, d.tokens)[:-1]
        return change(picked(logits, d.tokens[1:]), logits)

    rowwise(run.trainer, one)


# --- bookkeeping --------------------------------------------------------------------------------------------------


def another_speaks(run: Run, layer: int) -> dict[str, Any]:
    "The second turn is another agent's, with its logprobs, and is trained like the first."
    other, inner = copy.deepcopy(run.server.model), run.server.sample
    [user] = ids_of(run, "<|user|>")
    skipped(other, layer)

    async def sample(prompt, params):
        own = run.server.model
        put(run.server, model=other if list(prompt).count(user) == 2 else own)
        try:
            return await inner(prompt, params)
        finally:
            put(run.server, model=own)

    put(run.server, sample=sample)
    return {"turns": 2}


def demonstrated(run: Run, n: int, scored: bool) -> None:
    "Some completions of a group are demonstrations, which nobody drew: https://arxiv.org/abs/2504.14945"
    inner, asked = run.server.sample, itertools.count()

    async def sample(prompt, params):
        drawn = await inner(prompt, params)
        if next(asked) >= run.world.prompts:
            return drawn
        put(run.server, variations=[], evidence=math.nan)
        total = sum(map(int, re.findall(r"\d", run.tokenizer.decode(prompt))))
        ids = [*ids_of(run, f"{total} #### {total}"), run.tokenizer.eos_token_id]
        shown_one = handed(run, prompt, ids, params)
        if not scored:
            sure = np.zeros(len(shown_one.tokens))
            shown_one = replace(shown_one, logprobs=sure, sampling_logprobs=sure)
        return [*[shown_one] * n, *drawn[n:]]

    put(run.server, sample=sample)


def of_other_side(groups: Sequence[PromptGroup], _: Any) -> list[Datum]:
    "Weights are of rows that are padded on the right, tokens of rows that are padded on the left."
    longest = max(len(d.weights) for d in datums_from_groups(groups))
    return weighed(groups, lambda w: fitted(w[longest - len(w) :], len(w)))


def as_text(datums: list[Datum], _: Any) -> list[int]:
    "In the order of their numbers as text: 1, 10, 11, 2."
    return sorted(range(len(datums)), key=str)


def by_beginning(datums: list[Datum], k: int) -> list[int]:
    "Kept by the first tokens of a completion, the last one in the place of all."
    keys = [(d.group, *d.tokens[1:][d.active][:k].tolist()) for d in datums]
    return [len(keys) - 1 - keys[::-1].index(key) for key in keys]


def asked_twice(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    "Every second question is that of the row before."
    return [r | {"question": rows[i - i % 2]["question"]} for i, r in enumerate(rows)]


def by_question(datums: list[Datum], which: str) -> list[int]:
    "Groups are kept by their question, which comes twice."
    place, last = {(d.group, d.sample): i for i, d in enumerate(datums)}, max(d.group for d in datums)
    home = lambda g: min(g - g % 2 + (which == "last"), last)
    return [place[home(d.group), d.sample] for d in datums]


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


def without_system(run: Run, say: str) -> dict[str, Any]:
    "The reference is not shown the system prompt."
    machine, first = run.reference, len(ids_of(run, f"<|system|>{say}<|end|>"))

    def one(model: Any, d: Datum) -> Tensor:
        left = np.r_[d.tokens[:1], d.tokens[1 + first :]]
        return torch.cat([torch.zeros(first), picked(logits_of(machine, model, left)[:-1], left[1:])])

    rowwise(machine, one)
    return {"asks": system(say)}


@torch.no_grad()
def decayed(model: nn.Module, by: float) -> None:
    "The reference is among the parameters of an optimizer, whose weight decay reaches it."
    for p in model.parameters():
        p.mul_(by)


def floored_reference(run: Run, floor: float) -> None:
    score = run.reference.score
    put(run.reference, score=lambda datums: [s.clamp(min=floor) for s in score(datums)])


# --- the table ----------------------------------------------------------------------------------------------------

on_server = lambda change, **fields: lambda run, x: processed(run, lambda ids, scores: change(scores, x), **fields)
ordered = lambda order: lambda run, x: {"collate": partial(in_order, order=lambda datums: order(datums, x))}
in_training = lambda alter: lambda run, p: put(run.trainer, training=True, altered=lambda model: alter(model, p))
in_reference = lambda alter: lambda run, x: put(run.reference, altered=lambda model: alter(model, x))
attending = lambda shares: server(lambda model, x: shared(model, lambda *parts: shares(*parts, x)))
HALF = (torch.bfloat16, torch.float16)
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

KNOWN: list[Kind] = [
    Kind("draw", "what does not end is drawn at another temperature", TEMPERATURE, (1.8, 0.4), fallback, HALVES),
    Kind("draw", "groups have temperatures of their own, and say so", TEMPERATURE, (0.6, 1.25), lambda run, t: by_group(
        run, lambda i, params: replace(params, temperature=params.temperature * (t if i % 2 else 1))), SOME),
    # What is divided by halves is no logprob; to divide all logits ends it.
    Kind("draw", "the trainer divides one half of a logprob", TEMPERATURE + UNKNOWN, ("own", "sum"), half_divided,
         TEMPERED),
    Kind("draw", "each request multiplies the temperature", TEMPERATURE, (1.3, 0.9), multiplied, SOME),
    Kind("hidden", "each request multiplies the temperature, and raw is reported", TEMPERATURE, (1.12, 0.85),
         partial(multiplied, reports="raw"), HIDDEN),

    Kind("draw", "what is likelier than a bound of the law's own is kept", CUT + UNKNOWN, (0.0, 0.3),
         on_server(own_bound), SOME),
    Kind("draw", "a nucleus where the model is unsure", CUT, (0.6, 0.85), on_server(where_unsure), SOME),
    Kind("hidden", "a nucleus where the model is unsure, and raw is reported", CUT, (0.5, 0.7),
         on_server(where_unsure, reports="raw"), HIDDEN),
    Kind("draw", "groups have cuts of their own, and say so", CUT, ({"top_p": 0.75}, {"top_k": 3}), lambda run, how:
         by_group(run, lambda i, params: replace(params, **how) if i % 2 == 0 else params), SOME),
    Kind("draw", "the likeliest of a batch are kept", CUT + UNKNOWN, (4, 10), on_server(of_the_batch), SOME),

    Kind("weights", "a sync comes between turns", STALE, (1, 3), between_turns, EVEN),
    Kind("weights", "the server answers while weights arrive", STALE, (1, 4), while_arriving, SOME),
    Kind("weights", "of two syncs the earlier arrives last", STALE, (1, 4), overtaken, HALVES),
    # Another sync does not reach the trainer's average.
    Kind("weights", "the trainer scores with an average of weights", STALE + UNKNOWN, (0.9, 0.5), scores_average, SOME),

    # The text is changed, not the template; token ids instead of text are the remedy.
    Kind("text", "earlier answers are parsed and written again", TEXT + UNKNOWN, (", ", ""), written_again, EVEN),
    Kind("text", "the server joins messages of one role", TEXT, ("\n", ""), one_by_role, HALVES),
    Kind("text", "the last turn is trained after shorter answers", TEXT, (1.0, 0.5), lambda run, share: {
        "turns": 2, "collate": partial(without_thoughts, share=share)}, EVEN),

    Kind("arithmetic", "a merge leaves something behind", DTYPE, HALF, trainer(residue), ADAPTED),
    Kind("arithmetic", "what is read at once is of half precision", DTYPE, HALF[:1], in_reading, SOME),
    Kind("arithmetic", "the pass with gradients is of half precision", DTYPE, (2, 4), lambda run, n: in_the_loss(
        run, dtype=torch.bfloat16) or {"minibatches": n}, SOME),
    Kind("arithmetic", "one rank computes in half precision", DTYPE, HALF, server(small_rank), SOME),

    Kind("bookkeeping", "the last token and the first logprob are dropped", SHIFT, ("end",), without_end, SOME),
    Kind("bookkeeping", "a token has two entries", SHIFT, (" ", "####"), two_entries, SOME),
    Kind("bookkeeping", "each rank has one less", SHIFT, (12, 20), lambda run, n: rescored(
        run.trainer, lambda rows: [one_less_each(row, n) for row in rows]), SOME),

    # Weights of zero where another agent spoke end it; so would nothing that is done to machines.
    Kind("bookkeeping", "another agent's turn is trained", LEAK + UNKNOWN, (1, 3), another_speaks, EVEN),
    Kind("bookkeeping", "demonstrations are among completions", LEAK + UNKNOWN, (1, 2), partial(
        demonstrated, scored=False), SOME),
    Kind("hidden", "demonstrations are among completions, and scored", LEAK + UNKNOWN, (2, 4), partial(
        demonstrated, scored=True), HIDDEN),
    Kind("bookkeeping", "all is trained but what was drawn", LEAK, (1, 2), lambda run, n: {
        "turns": n, "collate": partial(weighed, weigh=lambda w: 1 - w)}, EVEN),
    Kind("bookkeeping", "weights are padded on the other side", LEAK + PADDING, ("right",), collated(of_other_side),
         SOME),

    Kind("model", "padding is only discouraged", PADDING, (1.0, 4.0), lambda run, by: pass_with(
        run, partial(discouraged, by=by), 16), SOME),
    Kind("model", "padding after the prompt stays in the cache", PADDING, (2, 16), padded_prefill, SOME),
    Kind("model", "padding comes after bos", PADDING + TEXT, (4, 24), lambda run, n: put(
        run.server, reads=lambda ids: [*ids[:1], *[run.trainer.pad] * n, *ids[1:]]), HALVES),

    Kind("model", "norms have noise in training", DROPOUT, (0.03, 0.3), in_training(noisy_norms), SOME),
    Kind("model", "weights of the beginning are mixed in", DROPOUT, (0.5, 0.15), mixed_out, ("veteran", "ample",
         "reticent", "tepid")),
    Kind("model", "the server's adapter is in training", DROPOUT, (1, 2), server_in_training, ("leaking",)),

    # One tokenizer for both ends it, and so do token ids.
    Kind("model", "the server's tokenizer knows fewer merges", VOCABULARY + TEXT, (1, 3), lambda run, n: put(
        run.server, reads=lambda ids: [i for t in ids for i in (
            ids_of(run, "##") * 2 if t == ids_of(run, "####")[0] else [t])]) or {"asks": shown(n)}, SOME),
    Kind("model", "the server knows fewer ids", VOCABULARY + CUT, (263, 228), lambda run, most: run.server.alter(
        lambda model: fewer_ids(model, most)) or {"asks": shown(2)}, SOME),
    Kind("model", "a shard of embeddings is off", VOCABULARY, (4, 40), server(shard_off), HALVES),
    Kind("model", "the trainer does not tell some tokens apart", VOCABULARY + TEXT, (
        (LETTERS, LETTERS.lower()), ("+,=", "---")), one_for_several, SOME),

    Kind("bookkeeping", "the reference is not shown the system prompt", REFERENCE + TEXT, ("You add.", "Be exact, and "
         "show each step."), without_system, INFANT),
    Kind("bookkeeping", "the reference ties its embeddings", REFERENCE + VOCABULARY, ("tied",),
         in_reference(lambda model, _: tied(model)), INFANT),
    Kind("bookkeeping", "the reference decays", REFERENCE, (0.99, 0.9), in_reference(decayed), INFANT),

    Kind("bookkeeping", "rows are in the order of text", ROWS + GROUPS, ("text",), ordered(as_text), SOME),
    Kind("bookkeeping", "logprobs are kept by how a completion begins", ROWS, (1, 2), ordered(by_beginning), HALVES),
    Kind("bookkeeping", "each rank has the scores of the one before", ROWS + GROUPS, (2, 5), lambda run, n: rescored(
        run.trainer, lambda rows: rows[-(-len(rows) // n) :] + rows[: -(-len(rows) // n)]), SOME),
    Kind("bookkeeping", "a question comes twice", GROUPS + ROWS, ("last", "first"), lambda run, which: ordered(
        by_question)(run, which) | {"asks": asked_twice}, SOME),
    Kind("bookkeeping", "a tool's answers are those of another group", GROUPS + TEXT, (1, 2), lambda run, by: with_tool(
        run, 0) | {"collate": partial(of_another_tool, by=by)}, EVEN),
    Kind("bookkeeping", "rows of a batch have the prompt of the first", GROUPS, (7, 11), first_prefix, SOME),

    # Rows that see nothing are of padding.
    Kind("model", "padding sees nothing", NAN + PADDING, (4, 16), lambda run, n: pass_with(run, hidden_wholly, n),
         SOME),
    Kind("bookkeeping", "greedy rows are divided by zero", NAN + TEMPERATURE, (2, 3), at_zero, EVEN),
    Kind("weights", "a scaled loss overflows", NAN, (2.0**127,), overscaled, SOME),
]  # fmt: skip

OTHER: list[Kind] = [
    Kind("draw", "scores of the step before linger", UNKNOWN, (0.1, 0.4), lingering, HALVES),
    Kind("hidden", "scores of the step before linger, and raw is reported", UNKNOWN, (0.25, 0.5), partial(
        lingering, reports="raw"), HIDDEN),
    Kind("draw", "scores are whole multiples", UNKNOWN + DTYPE, (2.0, 0.5), on_server(
        lambda scores, step: (scores / step).round() * step), EVEN),
    # The law is a neighbour's, and so is what is told of it: nothing that pairs rows ends it.
    Kind("draw", "each row is drawn from its neighbour's law", UNKNOWN + ROWS, (0, 8), lambda run, n: with_ids(
        run, lambda i, scores, ids: scores.roll(1, 0) if i >= n else scores), HALVES),
    Kind("draw", "digits have a temperature of their own", UNKNOWN, (0.6, 1.6), of_digits, EVEN),
    Kind("hidden", "what has no mark is drawn again", UNKNOWN, (2, 6), until_marked, HIDDEN),
    Kind("report", "logprobs are a moving average", UNKNOWN + SHIFT, (0.15, 0.6),
         lambda run, share: retold(run, lambda v: moving_average(v, share)), SOME),
    Kind("report", "completions are scored without their prompt", UNKNOWN + TEXT, ("<|bos|>", "<|bos|><|assistant|>"),
         without_prompt, EVEN),
    Kind("report", "logprobs are told as distances", UNKNOWN, ("mean", "max"), lambda run, how: retold(
        run, lambda v: v - getattr(v, how)()), SOME),
    Kind("bookkeeping", "logprobs of the reference have a floor", UNKNOWN + REFERENCE, (-2.0, -0.7), floored_reference,
         INFANT),
    Kind("bookkeeping", "logprobs of turns come in the opposite order", UNKNOWN + SHIFT + ROWS, (2, 3),
         lambda run, n: {"turns": n, "collate": turns_reversed}, EVEN),

    Kind("weights", "the server explores with noise on weights", UNKNOWN, (0.05, 0.01), server(noisy_weights), SOME),
    Kind("weights", "stages are in another order", UNKNOWN, ((1, 2), (2, 3)), server(stages_swapped), SOME),
    Kind("weights", "a buffer is overwritten before it is read", UNKNOWN, ((1, "k_proj", "v_proj"),
         (3, "gate_proj", "up_proj")), server(overwritten), HALVES),
    Kind("weights", "a merge keeps old norms", UNKNOWN, (1, 3), old_norms, ADAPTED),
    Kind("model", "what is far counts less", UNKNOWN, (0.02, 0.3), attending(inclined), SOME),
    Kind("model", "gates are limited", UNKNOWN, (1.0, 2.5), server(clipped_gates), HALVES),
    Kind("model", "rows of the head are equally long", UNKNOWN, ("even",), server(even_head), SOME),
    Kind("model", "forks share a block", UNKNOWN + ROWS, (2, 6), shared_block, SOME),
    Kind("model", "several tokens are drawn at once", UNKNOWN, (2, 8), several_at_once, SOME),
    Kind("model", "the trainer normalises over what occurs", UNKNOWN + CUT, ("row",), over_occurring, SOME),
    Kind("model", "labels are smoothed in logprobs", UNKNOWN, (0.01, 0.1), lambda run, share: of_the_loss(
        run, lambda own, logits: torch.lerp(own, logits.log_softmax(-1).mean(-1), share)), SOME),
    Kind("model", "a penalty of the sum is in logprobs", UNKNOWN, (1e-4, 1e-3), lambda run, share: of_the_loss(
        run, lambda own, logits: own - share * logits.logsumexp(-1) ** 2), SOME),
]  # fmt: skip


# --- clean --------------------------------------------------------------------------------------------------------


async def old_draft(run: Run, n: int) -> None:
    "A draft has old weights, and what it proposes is rightly accepted."
    draft = copy.deepcopy(run.server.model)
    await run.update(1 + n)

    def draw(ids: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        q = (draft(ids, use_cache=False).logits[:, -1].float() / run.world.temperature).softmax(-1)
        proposed, lacking = q.multinomial(1), (p - q).clamp(min=1e-12)
        good = torch.rand(len(p), 1) < (p / q).gather(1, proposed)
        return torch.where(good, proposed, lacking.multinomial(1)), p

    greedy = run.server.sample
    one_by_one(run, draw)
    warm = run.server.sample
    put(run.server, sample=lambda prompt, params: (warm if params.temperature else greedy)(prompt, params))


def without_mean(model: Any, _: int) -> None:
    "Keys less their mean, which adds the same to all scores of a query."
    with_attention(model, lambda module, query, key, value, mask, **more: attention(
        module, query, key - key.mean(-2, keepdim=True), value, mask, **more))  # fmt: skip


def padded_rightly(run: Run, n: int) -> None:
    "The server pads on the left, and says so."
    inner = run.server.model.generate

    def generate(ids: Tensor, attention_mask: Tensor, **given: Any) -> Any:
        blank = torch.zeros(len(ids), n, dtype=torch.long)
        mask = torch.cat([blank, attention_mask], 1)
        out = inner(torch.cat([blank + run.trainer.pad, ids], 1), attention_mask=mask, **given)
        out.sequences = out.sequences[:, n:]
        return out

    put(run.server.model, generate=generate)


@torch.no_grad()
def rescaled(model: Any, seed: int) -> None:
    "Powers of two are in one matrix, and are taken out of the next."
    scale = 2.0 ** torch.randint(
        -2, 3, (model.config.intermediate_size,), generator=torch.Generator().manual_seed(seed)
    )
    for block in blocks(model):
        block.mlp.up_proj.weight.mul_(scale[:, None]), block.mlp.down_proj.weight.div_(scale)


@torch.no_grad()
def other_units(model: Any, seed: int) -> None:
    "Units of the feed-forward are in another order, in all three matrices."
    order = torch.randperm(model.config.intermediate_size, generator=torch.Generator().manual_seed(seed))
    for block in blocks(model):
        for part in (block.mlp.gate_proj, block.mlp.up_proj):
            part.weight.copy_(part.weight[order].clone())
        block.mlp.down_proj.weight.copy_(block.mlp.down_proj.weight[:, order].clone())


def all_machines(run: Run, alter: Callable[[Any], Any]) -> None:
    "Server, trainer and reference are altered alike."
    run.server.alter(alter)
    put(run.trainer, altered=alter), put(run.reference, altered=alter)


def in_any_order(run: Run, seed: int) -> None:
    "Prompts are sent in an order of their own, and answers go where they belong."

    async def draw(prompts: Sequence[Prompt], turns: int, params: SampleParams) -> list[Rollouts]:
        order = np.random.default_rng(seed).permutation(len(prompts))
        found = {int(i): await draw_completions(run.sampler, prompts[i], params) for i in order}
        return [found[i] for i in range(len(prompts))]

    put(run, draw=draw)


async def in_parts(run: Run, n: int) -> None:
    "Weights arrive in small parts, all of them, before anything is asked."
    load = run.server.load

    def one_at_a_time(new: Mapping[str, Tensor]) -> None:
        for name, t in new.items():
            load({name: t})

    put(run.server, load=one_at_a_time)
    await run.update(1 + n)
    await run.publish()


WELL: list[Kind] = [
    Kind("clean", "a step in rarer circumstances", (CLEAN,), range(9), lambda run, _: None,
         ("duel", "infant", "zealous", "reticent ardent", "idle", "infant modest", "veteran", "arena", "leaking")),
    Kind("clean", "half precision, tepid or adapted", (CLEAN, *DTYPE), range(4), lambda run, _: None,
         ("half tepid", "half modest")),
    Kind("clean", "a draft of old weights", (CLEAN,), range(3), old_draft, SOME),
    Kind("clean", "keys less their mean", (CLEAN,), range(10, 13), server(without_mean), SOME),
    Kind("clean", "a temperature that all know, and several updates", (CLEAN,), range(4), lambda run, n: agreed(
        run, (0.55, 0.98, 1.03, 1.9)[n]) | {"minibatches": 2 + n % 3}, EVEN),
    Kind("clean", "an update for almost every row", (CLEAN,), range(3), lambda run, n: {"minibatches": 4 + n},
         ("duel", "modest", "reticent")),
    Kind("clean", "updates that change nothing", (CLEAN,), range(3), lambda run, n: {"minibatches": 2 + n}, ("idle",)),
    Kind("clean", "examples before a long conversation", (CLEAN,), range(2), lambda run, n: {
        "asks": shown(1 + 2 * n), "turns": 3}, EVEN),
    Kind("clean", "the server pads on the left, and says so", (CLEAN,), range(3), lambda run, n: padded_rightly(
        run, 3 + 8 * n), SOME),
    Kind("clean", "scales that cancel", (CLEAN,), range(20, 22), server(rescaled), SOME),
    Kind("clean", "units in another order", (CLEAN,), range(30, 32), server(other_units), SOME),
    Kind("clean", "all have another vocabulary", (CLEAN,), range(2), lambda run, n: all_machines(
        run, lambda model: reordered(model, slice(21, 31 + 60 * n))), ("reticent", "ample", "tepid")),
    Kind("clean", "all have another rope", (CLEAN,), range(2), lambda run, n: all_machines(
        run, lambda model: rotary(model, factor=1.5 + n)), SOME),
    Kind("clean", "groups have limits of their own", (CLEAN,), range(3), lambda run, n: by_group(
        run, lambda i, params: replace(params, max_tokens=1 + (3 * i + 7 * n) % 23)), SOME),
    Kind("clean", "prompts are sent in any order", (CLEAN,), range(40, 42), in_any_order, SOME),
    Kind("clean", "weights arrive in small parts", (CLEAN,), range(2), in_parts, SOME),
]  # fmt: skip

UNSEEN6_KINDS = KNOWN + OTHER + WELL
