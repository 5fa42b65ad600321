"""The faults by which the doctor is judged once: new kinds, and those of `faults` with other seeds and strengths.

Do not open this file while you improve the doctor. Once its answers were looked at, it belongs to `build`."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList

from rl_notebook.core.types import Completion, Datum, PromptGroup
from rl_notebook.core.datums import datums_from_groups
from rl_notebook.core.losses import LossOptions

from .faults import (
    CLEAN,
    CUT,
    DROPOUT,
    DTYPE,
    FULL,
    KINDS,
    LEAK,
    PADDING,
    SHIFT,
    STALE,
    TEMPERATURE,
    TEXT,
    UNKNOWN,
    WORLDS,
    Kind,
    badly_synced,
    every,
    fitted,
    forced,
    paired,
    put,
    quantised,
    reprompted,
    through_text,
)
from .machines import plain_weights
from .steps import Run, World, opened

NAN, REFERENCE, ROWS, GROUPS = ("non-finite",), ("wrong reference",), ("rows permuted",), ("wrong group",)
VOCABULARY = ("vocabulary",)
WORLDS |= {
    "cool first": World(temperature=0.7, warm_up=0),
    "lora first": World(lora_rank=8, learning_rate=1e-3, warm_up=0),
    "one group": World(prompts=1, completions=8),
    "odd": World(prompts=3, completions=5),
    "sharp": World(temperature=0.2),
    "flat": World(temperature=8.0),
    "steep": World(learning_rate=1e-3),
    "half lora": World(dtype="bfloat16", lora_rank=8, learning_rate=1e-3),
    "old": World(warm_up=6),
}


# --- the server and its clients -----------------------------------------------------------------------------------


def processed(run: Run, change: Callable[[Tensor, Tensor], Tensor], **fields: Any) -> None:
    "The server changes scores (B, V) after ids (B, N), and says so in its logprobs if it is not told to report raw."
    forced(run, logits_processor=LogitsProcessorList([change]))
    put(run.server, **fields)


def ids_of(run: Run, text: str) -> list[int]:
    "The ids of a text, as they are."
    return run.tokenizer(text, add_special_tokens=False)["input_ids"]


def penalised(run: Run, penalty: float) -> None:
    "Every token that was there before has less of a chance, by the same amount."
    processed(run, lambda ids, scores: scores - penalty * torch.zeros_like(scores).scatter_(1, ids, 1.0))


def biased(run: Run, bias: tuple[str, float]) -> None:
    "Some tokens have a better chance."
    extra = torch.zeros(run.server.model.config.vocab_size)
    extra[ids_of(run, bias[0])] = bias[1]
    processed(run, lambda ids, scores: scores + extra)


def by_entropy(run: Run, width: float) -> None:
    "The server is cooler where the model is sure."

    def change(ids: Tensor, scores: Tensor) -> Tensor:
        p = scores.float().softmax(-1)
        entropy = torch.special.entr(p).sum(-1, keepdim=True)
        return scores / (1 - width + 2 * width * entropy.clamp(max=1))

    processed(run, change)


def forbidden(run: Run, text: str, **fields: Any) -> None:
    "Some tokens may not be drawn."
    forced(run, suppress_tokens=ids_of(run, text))
    put(run.server, **fields)


def hot_later(run: Run, t: float) -> dict[str, Any]:
    "The temperature that was asked for holds for the first turn, and then the server's own."
    inner, user = run.server.sample, ids_of(run, "<|user|>")[0]

    async def sample(prompt, params):
        forced(run, **({"temperature": t * run.world.temperature} if list(prompt).count(user) > 1 else {}))
        return await inner(prompt, params)

    put(run.server, sample=sample)
    return {"turns": 2}


@torch.no_grad()
def alternatives(run: Run, c: Completion, temperature: float) -> Tensor:
    "Logprobs (C, V) of all that could have been drawn, as a server lists them."
    read = run.server.fed([*run.server.reads(c.prompt_tokens.tolist()), *c.tokens.tolist()])
    logits = run.server.model(torch.tensor([read])).logits[0, -len(c.tokens) - 1 : -1]
    return (logits.float() / temperature).log_softmax(-1)


def parsed(run: Run, parse: Callable[[Tensor, np.ndarray], np.ndarray]) -> None:
    "The client makes its numbers of what the server lists: (C, V) logprobs, and ids (C,)."

    def says(c: Completion) -> Completion:
        read = lambda t: parse(alternatives(run, c, t), c.tokens)
        return replace(c, logprobs=read(1.0), sampling_logprobs=read(c.params.temperature or 1.0))

    put(run.server, says=says)


def of_the_likeliest(listed: Tensor, ids: np.ndarray) -> np.ndarray:
    return listed.max(-1).values.double().numpy()


def if_listed(listed: Tensor, ids: np.ndarray, most: int, fill: float) -> np.ndarray:
    "The server lists so many alternatives, and the client fills in what is not among them."
    own = listed.gather(-1, torch.tensor(ids)[:, None])
    return torch.where(own >= listed.topk(most).values[:, -1:], own, fill)[:, 0].double().numpy()


def retold(run: Run, change: Callable[[np.ndarray], np.ndarray]) -> None:
    "The client misreads the numbers of a completion."
    series = lambda c: {n: change(getattr(c, n)) for n in ("logprobs", "sampling_logprobs")}
    put(run.server, says=lambda c: replace(c, **series(c)))


def ended(run: Run, most: int) -> dict[str, Any]:
    "The client ends what was cut with an eos that nobody drew."

    def says(c: Completion) -> Completion:
        if c.finish_reason == "stop":
            return c
        more = {n: np.r_[getattr(c, n), 0.0] for n in ("logprobs", "sampling_logprobs")}
        return replace(c, tokens=np.r_[c.tokens, run.tokenizer.eos_token_id], **more)

    put(run.server, says=says)
    return {"max_tokens": most}


async def continued(inner: Any, c: Completion, params: Any, between: Sequence[int] = ()) -> Completion:
    "A completion that was interrupted, goes on after some tokens put in between, and is handed over as one."
    if c.finish_reason == "stop" or len(c.tokens) >= params.max_tokens:
        return c
    left = replace(params, n=1, max_tokens=params.max_tokens - len(c.tokens), seed=(params.seed or 0) + len(c.tokens))
    rest = (await inner([*c.full_tokens, *between], left))[0]
    whole = {
        n: np.r_[getattr(c, n), np.zeros(len(between)), getattr(rest, n)] for n in ("logprobs", "sampling_logprobs")
    }
    tokens, text = np.r_[c.tokens, list(between), rest.tokens].astype(int), c.text + rest.text
    return replace(rest, prompt_tokens=c.prompt_tokens, tokens=tokens, text=text, params=params, **whole)


def pushed(run: Run, push: tuple[int, str]) -> None:
    "After so many tokens the harness puts words into the policy's mouth."
    inner, words = run.server.sample, ids_of(run, push[1])

    async def sample(prompt, params):
        begun = await inner(prompt, replace(params, max_tokens=min(push[0], params.max_tokens)))
        return [await continued(inner, c, params, words) for c in begun]

    put(run.server, sample=sample)


def retried(run: Run, nth: int) -> None:
    "Each nth completion was drawn twice: tokens of the second try, logprobs of the first."
    inner = run.server.sample

    async def sample(prompt, params):
        tries = [await inner(prompt, replace(params, seed=(params.seed or 0) + 77 * i)) for i in range(2)]
        series = lambda a, b: {n: fitted(getattr(a, n), len(b.tokens)) for n in ("logprobs", "sampling_logprobs")}
        return [a if i % nth else replace(b, **series(a, b)) for i, (a, b) in enumerate(zip(*tries, strict=True))]

    put(run.server, sample=sample)


# --- weights ------------------------------------------------------------------------------------------------------


async def cached(run: Run, updates: int) -> None:
    "The keys and values of prompts are still those of earlier weights."
    earlier, inner = copy.deepcopy(run.server.model), run.server.sample
    await run.update(updates)

    async def sample(prompt, params):
        read = run.server.fed(prompt)[:-1]
        with torch.no_grad():
            kept = earlier(torch.tensor([read] * params.n), use_cache=True).past_key_values if read else None
        put(run.server, forced={"past_key_values": kept})
        return await inner(prompt, params)

    put(run.server, sample=sample)


async def caught(run: Run, when: tuple[int, int]) -> None:
    "So many updates arrive when so many tokens of the step's completions have been drawn."
    earlier, inner, asked = copy.deepcopy(run.server.model), run.server.sample, itertools.count()
    await run.update(when[0])

    async def sample(prompt, params):
        if next(asked) >= run.world.prompts:
            return await inner(prompt, params)
        newest = run.server.model
        put(run.server, model=earlier)
        begun = await inner(prompt, replace(params, max_tokens=min(when[1], params.max_tokens)))
        put(run.server, model=newest)
        return [await continued(inner, c, params) for c in begun]

    put(run.server, sample=sample)


async def half_late(run: Run, updates: int) -> None:
    "One of two servers behind a balancer gets no sync."
    earlier, asked = copy.deepcopy(run.server.model), itertools.count()
    await run.update(updates)

    def balanced(call: Any) -> Any:
        async def answer(*args):
            newest = run.server.model
            put(run.server, model=earlier if next(asked) % 2 else newest)
            try:
                return await call(*args)
            finally:
                put(run.server, model=newest)

        return answer

    put(run.server, sample=balanced(run.server.sample), logprobs=balanced(run.server.logprobs))


async def merged_again(run: Run, updates: int) -> None:
    "Each sync adds what was learned since the beginning to what the server has."
    load, base = run.server.load, run.sync.base
    put(run.server, load=lambda new: load({n: run.server.model.state_dict()[n] + t - base[n] for n, t in new.items()}))
    for _ in range(updates):
        await run.update()


async def of_another_run(run: Run, updates: int) -> None:
    "Two runs share a server: the weights of the other arrived last."
    other = await opened(replace(run.world, seed=run.world.seed + 50))
    await other.update(updates)
    run.server.load(plain_weights(other.trainer.model))


async def from_checkpoint(run: Run, updates: int) -> None:
    "The policy begins from a checkpoint, and the reference is the model before it."
    await run.update(updates)
    run.updates = run.server.version = run.trainer.version = 0


# --- models -------------------------------------------------------------------------------------------------------


def hooked(model: nn.Module, part: str, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    "Change (read, given) of what modules of this name give, once."
    for name, module in model.named_modules():
        if name.endswith(part) and not module._forward_hooks:
            module.register_forward_hook(lambda module, read, given: change(read[0], given))


@torch.no_grad()
def retyped(model: nn.Module, dtype: torch.dtype) -> None:
    "Weights of matrices rounded to a type; the arithmetic stays."
    for p in model.parameters():
        scale = p.abs().max() / torch.finfo(dtype).max if p.ndim > 1 and dtype.itemsize == 1 else 1.0
        p.copy_((p / scale).to(dtype).to(p.dtype) * scale if p.ndim > 1 else p)


def small_cache(model: nn.Module, dtype: torch.dtype) -> None:
    "Keys and values are kept in a small type."
    for part in ("k_norm", "v_proj"):
        hooked(model, part, lambda read, given: given.to(dtype).to(given.dtype))


@torch.no_grad()
def swapped(model: Any, layer: int, what: str) -> None:
    "Two parts of a fused matrix arrive in the wrong order."
    block = model.model.layers[layer]
    if what == "gate and up":
        one, two = block.mlp.gate_proj.weight, block.mlp.up_proj.weight
    else:
        one, two = block.self_attn.k_proj.weight.chunk(2)
    kept = one.clone()
    one.copy_(two), two.copy_(kept)


@torch.no_grad()
def rolled_head(model: Any, shards: int) -> None:
    "The shards of the output layer are gathered in another order."
    weight = model.get_output_embeddings().weight
    weight.copy_(weight.roll(len(weight) // shards, 0))


@torch.no_grad()
def tied(model: Any) -> None:
    model.get_output_embeddings().weight.copy_(model.get_input_embeddings().weight)


@torch.no_grad()
def added(model: Any, ids: list[int]) -> None:
    "Embeddings of some tokens are as if they had just been added."
    weight = model.get_input_embeddings().weight
    weight[ids] = weight.mean(0)


def rounded_angles(model: Any, dtype: torch.dtype) -> None:
    [module] = [m for m in model.modules() if hasattr(m, "inv_freq")]
    module.inv_freq.copy_(module.inv_freq.to(dtype).float())


def noisy(model: nn.Module, alpha: float) -> None:
    "Embeddings with noise, as in fine-tuning: https://arxiv.org/abs/2310.05914"
    noise = lambda given: torch.empty_like(given).uniform_(-1, 1) * alpha / (given.shape[-2] * given.shape[-1]) ** 0.5
    hooked(model, "embed_tokens", lambda read, given: given + noise(given))


def kept_only(logits: Tensor, most: int) -> Tensor:
    "Logits as for a draw from the top k."
    return logits.masked_fill(logits < logits.topk(most).values[..., -1:], -1e4)


def overflowing(model: nn.Module, most: float) -> None:
    "The last layer computes in a type that holds numbers up to this, the rest of its range being spent on a scale."
    hooked(model, "layers.3.mlp", lambda read, given: (given * (65504 / most)).half().float() / (65504 / most))


def masks_eos(model: Any, eos: int) -> None:
    "The attention mask is made from ids, and the padding id is eos."
    mask = lambda module, args, told: (args, told | {"attention_mask": told["attention_mask"] * (args[0] != eos)})
    model.register_forward_pre_hook(mask, with_kwargs=True)


def packed(run: Run, resets: bool) -> None:
    "The trainer puts the sequences of a batch into one row, and each attends to those before it."

    def _pass(model: Any, rows: Sequence[np.ndarray]) -> list[Tensor]:
        ids = torch.from_numpy(np.concatenate(rows))[None]
        place = torch.cat([torch.arange(len(r)) for r in rows]) if resets else torch.arange(ids.shape[1])
        told = {"attention_mask": torch.ones_like(ids), "position_ids": place[None]}
        logits = model(ids, **told, use_cache=False).logits[0, :-1].float() / run.trainer.temperature
        found = torch.cat([logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0], torch.zeros(1)])
        return [part[:-1] for part in found.split([len(r) for r in rows])]

    put(run.trainer, _pass=_pass)


def misread(run: Run, batch: int) -> None:
    "The trainer pads on the left, blanks the padding, and reads its table as if it were on the right."
    inner = run.trainer._pass

    def _pass(model: Any, rows: Sequence[np.ndarray]) -> list[Tensor]:
        longest = max(map(len, rows))
        table = [torch.cat([torch.zeros(longest - len(r)), s]) for r, s in zip(rows, inner(model, rows), strict=True)]
        return [line[: len(r) - 1] for r, line in zip(rows, table, strict=True)]

    put(run.trainer, _pass=_pass, pads_left=True, batch=batch)


def gathered(run: Run, ranks: int) -> None:
    "Sequences are dealt out to ranks in turns, and gathered rank by rank."
    inner = run.trainer.score

    def score(datums: Sequence[Datum]) -> list[Tensor]:
        whole = inner([replace(d, weights=np.ones(len(d.weights))) for d in datums])
        dealt = [whole[i] for rank in range(ranks) for i in range(rank, len(datums), ranks)]
        table = nn.utils.rnn.pad_sequence(dealt, batch_first=True)
        rows = [row[: len(d.weights)] for row, d in zip(table, datums, strict=True)]
        return [r.masked_fill(torch.from_numpy(~d.active), torch.nan) for r, d in zip(rows, datums, strict=True)]

    put(run.trainer, score=score)


def reference_in_training(run: Run, p: float) -> None:
    "The reference is left in training mode."
    put(run.reference, model=copy.deepcopy(run.reference.model), training=True)
    every(run.reference.model, "attention_dropout", p)


# --- bookkeeping --------------------------------------------------------------------------------------------------


def moved(groups: Sequence[PromptGroup], by: int, later: bool) -> list[Datum]:
    "Logprobs some places early or late, in all turns or in all but the first."
    datums = datums_from_groups(groups)

    def move(d: Datum) -> np.ndarray:
        turns = np.split(d.sampler_logprobs[d.active], np.flatnonzero(np.diff(np.flatnonzero(d.active)) > 1) + 1)
        shift = lambda v: np.r_[v[by:], np.zeros(by)] if by > 0 else np.r_[np.zeros(-by), v[:by]]
        return np.concatenate([fitted(shift(v), len(v)) if i >= later else v for i, v in enumerate(turns)])

    return paired(datums, [move(d) for d in datums])


def unlisted(groups: Sequence[PromptGroup], run: Run, most: int) -> list[Datum]:
    "A token that is not among the likeliest has no logprob."
    samples = [s for g in groups for s in g.samples]
    drawn = [Completion(*np.split(s.tokens, [s.prompt_len]), s.logprobs[s.prompt_len :]) for s in samples]
    listed = [if_listed(alternatives(run, c, run.world.temperature), c.tokens, most, np.nan) for c in drawn]
    return paired(datums_from_groups(groups), listed)


def rendered_again(groups: Sequence[PromptGroup], run: Run, change: Callable[[str], str]) -> list[Datum]:
    "The trainer renders prompts in its own way."
    prompts = [s.tokens[: s.prompt_len] for g in groups for s in g.samples]
    new = [np.array(ids_of(run, change(run.tokenizer.decode(p)))) for p in prompts]
    return reprompted(datums_from_groups(groups), new)


def cut_before(groups: Sequence[PromptGroup], most: int) -> list[Datum]:
    "The trainer keeps the end of a prompt."
    prompts = [s.tokens[: s.prompt_len][-most:] for g in groups for s in g.samples]
    return reprompted(datums_from_groups(groups), prompts)


def forgets(run: Run, pattern: str) -> dict[str, Any]:
    "The server renders a conversation anew, without something that the assistant said before."
    answers = re.compile(r"(<\|assistant\|>)" + pattern)
    through_text(run, lambda s: answers.sub(r"\1", s))
    return {"turns": 2}


# --- the table ----------------------------------------------------------------------------------------------------

server = lambda alteration: lambda run, x: run.server.alter(lambda model: alteration(model, x))
trainer = lambda alteration: lambda run, x: put(run.trainer, altered=lambda model: alteration(model, x))
collated = lambda collate: lambda run, x: {"collate": lambda groups: collate(groups, x)}

HIDDEN = ("plain", "mute", "wide")  # at temperature 1, with the raw logprobs of a right draw
NEW: list[Kind] = [
    Kind("draw", "the server penalises presence", UNKNOWN, (0.3, 1.5), penalised),
    Kind("draw", "the server has a logit bias", UNKNOWN, (("<|end|>", 1.0), ("123", -1.5)), biased),
    Kind("draw", "the server forbids tokens", CUT + UNKNOWN, ("####", "13579"), forbidden),
    Kind("draw", "the server cuts by a rule of its own", CUT + UNKNOWN,
         ({"typical_p": 0.8}, {"epsilon_cutoff": 0.02}), lambda run, how: forced(run, **how)),
    Kind("draw", "the temperature depends on the entropy", TEMPERATURE + UNKNOWN, (0.3, 0.1), by_entropy),
    Kind("draw", "later turns have another temperature", TEMPERATURE, (0.6, 1.5), hot_later, ("plain", "lora", "cool")),
    Kind("draw", "the trainer keeps the top k", CUT, (3, 10),
         trainer(lambda model, k: hooked(model, "lm_head", lambda read, given: kept_only(given, k)))),

    # The likeliest token is what temperature 0 gives, and top-k of 1.
    Kind("hidden", "the server is greedy, and reports raw", TEMPERATURE + CUT, ("greedy", "again"),
         lambda run, _: forced(run, do_sample=False) or put(run.server, reports="raw"), HIDDEN),
    Kind("hidden", "the server forbids tokens, and reports raw", CUT + UNKNOWN, ("####", "02468"),
         partial(forbidden, reports="raw"), HIDDEN),
    Kind("hidden", "the server penalises repetition, and reports raw", UNKNOWN, (2.0, 1.5),
         lambda run, penalty: forced(run, repetition_penalty=penalty) or put(run.server, reports="raw"), HIDDEN),

    Kind("report", "the likeliest token's logprob is taken", UNKNOWN, ("top", "again"),
         lambda run, _: parsed(run, of_the_likeliest), FULL),
    Kind("report", "a logprob that is not listed is a number", UNKNOWN, ((1, -100.0), (2, -20.0)),
         lambda run, how: parsed(run, partial(if_listed, most=how[0], fill=how[1]))),
    Kind("report", "a logprob that is not listed is none", NAN, (1, 2),
         lambda run, most: {"collate": partial(unlisted, run=run, most=most)}),
    Kind("report", "logprobs are summed up", UNKNOWN, ("so far", "mean"),
         lambda run, how: retold(run, np.cumsum if how == "so far" else lambda v: np.full(len(v), v.mean()))),
    Kind("report", "a chunk has one logprob", UNKNOWN, (2, 5),
         lambda run, n: retold(run, lambda v: v[np.arange(len(v)) // n * n])),
    Kind("report", "logprobs are written in a small type", DTYPE + UNKNOWN, (torch.bfloat16, torch.float8_e4m3fn),
         lambda run, dtype: put(run.server, writes=lambda v: torch.from_numpy(v.copy()).to(dtype).double().numpy())),

    Kind("text", "the server forgets what was said before", TEXT, ("[^#<]*(?=####)", "[^<]*"), forgets,
         ("plain", "lora", "mute")),
    Kind("text", "the generation prompt is not as agreed", TEXT, ("", "<|assistant|><|assistant|>"), lambda run, end:
         through_text(run, lambda s: s.removesuffix("<|assistant|>") + end)),
    # The text is changed, not the template; token ids instead of text are the remedy.
    Kind("text", "the server tidies text up", TEXT + UNKNOWN, ("lower", "space"), lambda run, how: through_text(
         run, lambda s: s.lower() if how == "lower" else re.sub(r"(\d)([+,])", r"\1 \2", s))),
    Kind("text", "the server pads prompts on the right", PADDING + TEXT, (16, 2), lambda run, n: put(
         run.server, reads=lambda ids: ids + [run.tokenizer.pad_token_id] * (-len(ids) % n))),
    Kind("text", "the trainer renders prompts otherwise", TEXT, ("<|bos|>", "<|bos|><|system|>Be brief.<|end|>"),
         lambda run, more: {"collate": partial(rendered_again, run=run, change=lambda s: s.replace(
             "<|bos|>", "<|bos|>" + more.replace("<|bos|><", "<")))}),
    Kind("text", "the trainer cuts long prompts", TEXT + UNKNOWN, (18, 8), collated(cut_before)),

    # The weights were synced, the cache was not: old weights, and no sync mends it.
    Kind("weights", "prompts are cached across a sync", STALE + UNKNOWN, (1, 4), cached,
         ("plain", "lora", "cool", "mute")),
    Kind("weights", "a sync in the middle of completions", STALE, ((1, 6), (4, 3)), caught,
         ("plain", "lora", "mute", "cool")),
    Kind("weights", "one of two servers is late", STALE, (1, 4), half_late, ("plain", "lora", "cool", "mute", "slow")),
    Kind("weights", "each sync adds to the last", UNKNOWN, (1, 3), merged_again, ("lora", "plain")),
    Kind("weights", "the weights of another run arrive", STALE + UNKNOWN, (1, 3), of_another_run,
         ("plain", "lora", "slow")),
    Kind("weights", "a part of the adapter does not travel", STALE + UNKNOWN, ("mlp", "layers.1"),
         lambda run, part: badly_synced(run, 3, travels=lambda name: part not in name), ("lora",)),

    Kind("arithmetic", "a sync rounds to half precision", DTYPE, (torch.bfloat16,), server(retyped), ("lora", *FULL)),
    Kind("arithmetic", "the server has weights of float8", DTYPE + UNKNOWN, (torch.float8_e4m3fn,), server(retyped)),
    Kind("arithmetic", "the server has a cache of float8", DTYPE + UNKNOWN, (torch.float8_e4m3fn, torch.float8_e5m2),
         server(small_cache)),
    Kind("arithmetic", "the trainer's log-softmax is of half precision", DTYPE, (torch.bfloat16,),
         trainer(lambda model, dtype: hooked(
             model, "lm_head", lambda read, given: given.to(dtype).log_softmax(-1).float()))),
    Kind("arithmetic", "angles are of half precision", DTYPE, (torch.bfloat16,), server(rounded_angles)),
    Kind("arithmetic", "the trainer overflows", NAN + DTYPE, (30.0, 15.0), trainer(overflowing)),

    Kind("model", "logits are capped in the server", UNKNOWN, (6.0, 15.0), server(lambda model, cap: hooked(
         model, "lm_head", lambda read, given: cap * (given / cap).tanh()))),
    Kind("model", "attention has another scale in the server", UNKNOWN, (0.9, 1.5),
         server(lambda model, by: every(model, "scaling", by * model.config.head_dim**-0.5))),
    Kind("model", "a norm is left out in the server", UNKNOWN,
         ("layers.3.self_attn.k_norm", "layers.3.post_attention_layernorm"),
         server(lambda model, part: hooked(model, part, lambda read, given: read))),
    Kind("model", "matrices are swapped in a sync", UNKNOWN, ("gate and up", "heads"),
         server(lambda model, what: swapped(model, 2, what))),
    Kind("model", "the server ties its embeddings", UNKNOWN + VOCABULARY, ("tied",),
         server(lambda model, _: tied(model)), FULL),
    Kind("model", "the server's added tokens are new", VOCABULARY + UNKNOWN, ("<|user|><|assistant|>", "<|end|>"),
         lambda run, text: run.server.alter(lambda model: added(model, ids_of(run, text)))),
    Kind("model", "the server gathers its vocabulary wrongly", VOCABULARY, (2,), server(rolled_head)),
    # To give the model its positions and mask is the remedy, as it is for padding.
    Kind("model", "sequences of the trainer see each other", UNKNOWN + PADDING, (True, False), packed, FULL),
    Kind("model", "the trainer masks eos", PADDING + UNKNOWN, ("eos", "again"), lambda run, _: put(
         run.trainer, altered=lambda model: masks_eos(model, run.tokenizer.eos_token_id))),
    Kind("model", "embeddings have noise in the trainer", DROPOUT, (5.0, 0.5), trainer(noisy)),

    Kind("bookkeeping", "off by two", SHIFT, (2, -2), collated(partial(moved, later=False))),
    Kind("bookkeeping", "off by one after the first turn", SHIFT, (1, -1),
         lambda run, by: {"turns": 2, "collate": partial(moved, by=by, later=True)}, ("plain", "lora", "mute")),
    Kind("bookkeeping", "the trainer reads left padding as right padding", SHIFT + PADDING, (16, 4), misread),
    Kind("bookkeeping", "ranks are gathered in their own order", ROWS + GROUPS, (2, 4), gathered),
    Kind("bookkeeping", "some completions were drawn twice", ROWS + UNKNOWN, (2, 4), retried),
    Kind("bookkeeping", "words are put into completions", LEAK + UNKNOWN, ((4, " ####"), (2, "#")), pushed),
    Kind("bookkeeping", "an eos is put after what was cut", LEAK + UNKNOWN, (6, 10), ended),

    Kind("bookkeeping", "the policy begins from a checkpoint", REFERENCE, (1, 4), from_checkpoint,
         ("lora first", "first")),
    Kind("bookkeeping", "the reference has another temperature", REFERENCE + TEMPERATURE, (1.0, 0.8),
         lambda run, t: put(run.reference, temperature=t), ("cool first",)),
    Kind("bookkeeping", "the reference computes in half precision", REFERENCE + DTYPE, (torch.bfloat16,),
         lambda run, dtype: put(run.reference, dtype=dtype), ("first",)),
    Kind("bookkeeping", "the reference has dropout", REFERENCE + DROPOUT, (0.1,), reference_in_training, ("first",)),
]  # fmt: skip


def both_quantised(run: Run, bits: int) -> None:
    "All machines serve and score the same few bits."
    run.server.alter(lambda model: quantised(model, bits))
    put(run.trainer, altered=lambda model: quantised(model, bits))
    put(run.reference, altered=lambda model: quantised(model, bits))


WELL: list[Kind] = [
    Kind("clean", "a single group", (CLEAN,), range(6), lambda run, _: None, ("one group",)),
    Kind("clean", "odd batches", (CLEAN,), range(6), lambda run, n: put(run.trainer, batch=1 + 2 * n), ("odd",)),
    Kind("clean", "one token", (CLEAN,), range(8), lambda run, _: {"max_tokens": 1}, ("plain", "wide", "mute")),
    Kind("clean", "two tokens and more", (CLEAN,), range(8), lambda run, n: {"max_tokens": 2 + n},
         ("plain", "cool", "lora")),
    Kind("clean", "long", (CLEAN,), range(6), lambda run, _: {"max_tokens": 120}, ("hot", "flat")),
    Kind("clean", "nearly certain", (CLEAN,), range(6), lambda run, _: None, ("sharp",)),
    Kind("clean", "nearly uniform", (CLEAN,), range(6), lambda run, _: None, ("flat",)),
    Kind("clean", "large steps", (CLEAN,), range(6), lambda run, _: None, ("steep",)),
    Kind("clean", "large steps, several a step", (CLEAN,), range(6), lambda run, n: {"minibatches": 4}, ("steep",)),
    Kind("clean", "long trained", (CLEAN,), range(6), lambda run, _: None, ("old",)),
    Kind("clean", "several updates with a correction", (CLEAN,), range(8), lambda run, n: {
         "minibatches": 2, "options": LossOptions(tis="token")}, ("plain", "lora", "mute")),
    Kind("clean", "the trainer pads on the left, and says so", (CLEAN,), range(6),
         lambda run, n: put(run.trainer, pads_left=True, batch=16), ("plain", "lora", "cool")),
    Kind("clean", "stop tokens", (CLEAN,), range(6),
         lambda run, _: {"stop_token_ids": tuple(ids_of(run, " "))}, ("plain", "lora")),
    Kind("clean", "all have weights of few bits", (CLEAN,), range(6),
         lambda run, n: both_quantised(run, 3 + n), ("plain", "mute")),
    Kind("clean", "half precision and an adapter", (CLEAN, *DTYPE), range(6), lambda run, _: None, ("half lora",)),
]  # fmt: skip

AGAIN: dict[str, Sequence[Any]] = {  # kinds of `faults`, with new strengths
    "the server has its own temperature": (0.85, 1.07),
    "the server has its own top-k": (5,),
    "the server has its own top-p": (0.9, 0.6),
    "the server has a min-p": (0.2,),
    "the server penalises repetition": (1.1,),
    "the trainer has its own temperature": (0.92, 1.5),
    "one of two servers has its own temperature": (0.8,),
    "the server cuts, and reports raw": (0.65,),
    "the server has its own temperature, and reports raw": (0.5,),
    "raw is reported where a temperature was asked": (0.6, 1.5),
    "probabilities are reported": ("exp again",),
    "logprobs have a floor": (-1.0,),
    "another template": ("Human: {} AI:",),
    "the server adds a system prompt": ("Think first.",),
    "the server has another bos": ("<|user|>",),
    "the server adds bos to everything": (3,),
    "rollouts are late": (6, 1),
    "nobody syncs": (2,),
    "a sync copies nothing": (4,),
    "a part does not travel": ("layers.0",),
    "the adapter does not travel": (2,),
    "the adapter is wrongly scaled": (0.25, 1.5),
    "the trainer scores after its update": (3,),
    "the server computes in half precision": (torch.bfloat16,),
    "the trainer computes in half precision": (torch.bfloat16,),
    "the server has weights of 4 bits": (3,),
    "the server has another rope base": (20_000.0,),
    "the trainer has another rope scaling": (1.3,),
    "the server has another norm eps": (3e-3,),
    "the server has a sliding window": (12,),
    "the trainer pads on the left and does not say so": (6,),
    "the server pads on the left and does not say so": (32,),
    "dropout": (0.05, 0.005),
    "the server has another vocabulary": (slice(30, 60),),
    "off by one, with 0 at the edge": (1, -1),
    "the prompt is trained": (3,),
    "padding is trained": (3,),
    "logprobs by arrival in a group": ("group",),
    "logprobs of another group": (3,),
    "another reference": (4,),
    "a step": range(24),
    "several updates a step": range(12),
    "half precision on both sides": range(5),
}
UNSEEN_KINDS = NEW + WELL + [replace(k, strengths=AGAIN[k.name], large=False) for k in KINDS if k.name in AGAIN]
