"""More faults for the doctor by somebody who has not read it: kinds that no other part has.

Do not open this file while you improve the doctor. Once its answers were looked at, it belongs to `build`.

What is right was decided by the rules of `unseen3`: a cause is right if its remedy in `causes.FIXES` ends the fault.
Where the weights are old and another sync does not end it, `NONE` is right, too. A law that keeps a beginning of the
ranking, but is no top-p and no top-k, may be called by their name or by none. A mask or positions that hide or move
what is no padding may be called by the name of padding or by none."""

from __future__ import annotations

import copy
import itertools
import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rl_notebook.chat import start_conversation
from rl_notebook.core import Completion, Datum, PromptGroup, RolloutSample, SampleParams
from rl_notebook.datums import datums_from_groups
from rl_notebook.losses import LossOptions
from rl_notebook.rollouts import Prompt

from .faults import (
    CLEAN,
    CUT,
    DROPOUT,
    DTYPE,
    LEAK,
    PADDING,
    SHIFT,
    STALE,
    TEMPERATURE,
    TEXT,
    UNKNOWN,
    WORLDS,
    Kind,
    forced,
    paired,
    put,
    reordered,
    reprompted,
    rotary,
    through_text,
    told,
)
from .machines import plain_weights, seeded
from .steps import Run, World
from .unseen import (
    GROUPS,
    NAN,
    REFERENCE,
    ROWS,
    VOCABULARY,
    alternatives,
    biased,
    collated,
    continued,
    hooked,
    ids_of,
    parsed,
    processed,
    retold,
    retyped,
    server,
    trainer,
)
from .unseen3 import (
    agreed,
    altered_copy,
    attention,
    best,
    blocks,
    by_place,
    chosen,
    handed,
    layerwise,
    logits_of,
    norms,
    one_of_two,
    other_rows,
    picked,
    replaced,
    rowwise,
    skipped,
    system,
)

WORLDS |= {
    "calm": World(temperature=0.85, completions=5),
    "lively": World(temperature=1.6, prompts=3, max_tokens=30),
    "quiet": World(can_echo=False, completions=6, warm_up=3),
    "narrow": World(lora_rank=4, learning_rate=1.5e-3, prompts=5),
    "roomy": World(prompts=5, completions=5, max_tokens=36),
    "seasoned": World(warm_up=5, learning_rate=3e-5),
    "half calm": World(dtype="bfloat16", temperature=0.85),
    "half narrow": World(dtype="bfloat16", lora_rank=4, learning_rate=1.5e-3),
    "newborn": World(warm_up=0, prompts=3, completions=6),
    "newborn calm": World(warm_up=0, temperature=0.85),
    "newborn narrow": World(warm_up=0, lora_rank=4, learning_rate=1.5e-3),
    "quiet lively": World(can_echo=False, temperature=1.6),
    "host": World(prompts=7, completions=10, max_tokens=28),
    "host narrow": World(prompts=7, completions=10, lora_rank=4, learning_rate=1.5e-3),
    "host quiet": World(prompts=6, completions=12, can_echo=False),
    "spare": World(lora_rank=8, learning_rate=1e-3, lora_dropout=0.2),
}
SOME = ("calm", "quiet", "narrow", "roomy", "lively", "seasoned")  # taken in turns
EVEN = ("quiet", "narrow", "roomy", "seasoned")  # at temperature 1
TEMPERED = ("calm", "lively", "quiet lively")
HALVES = (*SOME, "half calm", "half narrow")
HIDDEN = ("host", "host narrow", "host quiet")  # at temperature 1, with many tokens
NEWBORN = ("newborn", "newborn calm", "newborn narrow")


# --- the draw -----------------------------------------------------------------------------------------------------


def kept(scores: Tensor, mask: Tensor) -> Tensor:
    "Scores where a mask is true, and the likeliest."
    return scores.masked_fill(~(mask | (scores == scores.amax(-1, keepdim=True))), -torch.inf)


def nucleus(scores: Tensor, p: float) -> Tensor:
    law, order = scores.float().softmax(-1).sort(-1, descending=True)
    inside = law.cumsum(-1) - law < p
    return kept(scores, torch.zeros_like(inside).scatter(-1, order, inside))


def tail_free(scores: Tensor, z: float) -> Tensor:
    "Scores before the tail, where the law is flat: its second derivative has little weight there."
    law, order = scores.float().softmax(-1).sort(-1, descending=True)
    bend = law.diff(dim=-1).diff(dim=-1).abs()
    share = (bend / bend.sum(-1, keepdim=True)).cumsum(-1)
    inside = nn.functional.pad(share <= z, (1, 1)).roll(-1, -1)
    return kept(scores, torch.zeros_like(inside).scatter(-1, order, inside))


def by_shard(scores: Tensor, shards: int, k: int) -> Tensor:
    "The k likeliest of each shard of the vocabulary."
    return best(scores.unflatten(-1, (shards, -1)), k).flatten(-2)


def with_ids(run: Run, change: Callable[[int, Tensor, Tensor], Tensor], **fields: Any) -> None:
    "The server changes scores (B, V) by how many tokens have been drawn, and by ids (B, N)."
    inner = run.server.sample

    async def sample(prompt, params):
        start = len(run.server.fed(run.server.reads([int(t) for t in prompt])))
        processed(run, lambda ids, scores: change(ids.shape[1] - start, scores, ids), **fields)
        return await inner(prompt, params)

    put(run.server, sample=sample)


def cut_after(run: Run, k: int) -> None:
    "What follows the mark of an answer is cut."
    [mark] = ids_of(run, "####")

    def change(i: int, scores: Tensor, ids: Tensor) -> Tensor:
        return torch.where((ids[:, ids.shape[1] - i :] == mark).any(1, keepdim=True), best(scores, k), scores)

    with_ids(run, change)


def dry(run: Run, how: tuple[float, int]) -> None:
    "What would go on a repetition has less of a chance, the longer that is."

    def change(i: int, scores: Tensor, ids: Tensor) -> Tensor:
        penalty = torch.zeros_like(scores)
        for row, taken in zip(ids.tolist(), penalty, strict=True):
            for at in range(1, len(row)):
                n = next((k for k in range(at) if row[at - 1 - k] != row[-1 - k]), at)
                if n >= how[1]:
                    taken[row[at]] = max(float(taken[row[at]]), how[0] * 1.75 ** (min(n, 8) - how[1]))
        return scores - penalty

    with_ids(run, change)


def few_bits(scores: Tensor, bits: int) -> Tensor:
    "The law of a draw by a random number of few bits, that finds its place in the sums of the law."
    sums = (scores.float().softmax(-1).double().cumsum(-1) * 2**bits).clamp(max=2**bits)
    sums[..., -1] = 2**bits
    return (sums.ceil().diff(dim=-1, prepend=torch.zeros_like(sums[..., :1])) / 2**bits).log().to(scores.dtype)


def with_noise(scores: Tensor, size: float) -> Tensor:
    return scores + size * torch.randn_like(scores)


def now_and_then(scores: Tensor, share: float) -> Tensor:
    "Now and then any token is drawn."
    law = scores.float().softmax(-1)
    return ((1 - share) * law + share / law.shape[-1]).log()


def of_prompt(run: Run, by: float, **fields: Any) -> None:
    "Tokens of the prompt are likelier."
    with_ids(run, lambda i, scores, ids: scores + by * torch.zeros_like(scores).scatter_(
        1, ids[:, : ids.shape[1] - i], 1.0), **fields)  # fmt: skip


def early_law(run: Run, weight: float, **fields: Any) -> None:
    "What the last layer adds to the law of an earlier one counts more: https://arxiv.org/abs/2309.03883"
    early = copy.deepcopy(run.server.model)
    skipped(early, 2), skipped(early, 3)

    def change(ids: Tensor, scores: Tensor) -> Tensor:
        with torch.no_grad():
            other = early(ids, use_cache=False).logits[:, -1].float().log_softmax(-1)
        late = scores.float().log_softmax(-1)
        return late + weight * (late - other).clamp(-2, 2)

    processed(run, change, **fields)


def one_by_one(run: Run, draw: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    "A sampler of its own: draw(ids, p) gives tokens (B, 1) and the law (B, V) that they are from."

    async def sample(prompt, params):
        ids = torch.tensor([[int(t) for t in prompt]] * params.n)
        with torch.no_grad(), seeded(params.seed):
            for _ in range(params.max_tokens):
                p = (run.server.model(ids, use_cache=False).logits[:, -1].float() / params.temperature).softmax(-1)
                drawn, law = draw(ids, p)
                if not (going := ~(ids[:, len(prompt) :] == run.tokenizer.eos_token_id).any(1)).any():
                    break
                run.server.compare(law[going].log()[None], p[going].log()[None], [int(going.sum())])
                ids = torch.cat([ids, drawn], 1)
        return [handed(run, prompt, row[len(prompt) :].tolist(), params) for row in ids]

    put(run.server, sample=sample)


def typically_accepted(run: Run, least: float) -> None:
    "The likeliest token of a draft is accepted wherever the model does not find it odd."
    draft = copy.deepcopy(run.server.model)
    skipped(draft, 1)

    def draw(ids: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        proposed = draft(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        bound = (least * torch.special.entr(p).sum(-1, keepdim=True).neg().exp()).clamp(max=least)
        law = torch.where(p.gather(1, proposed) > bound, torch.zeros_like(p).scatter_(1, proposed, 1.0), p)
        return law.multinomial(1), law

    one_by_one(run, draw)


def rightly_accepted(run: Run, layer: int) -> None:
    "Speculative decoding as it should be: what is refused is drawn from what the draft lacks."
    draft = copy.deepcopy(run.server.model)
    skipped(draft, layer)

    def draw(ids: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        q = draft(ids, use_cache=False).logits[:, -1].float().softmax(-1)
        proposed, lacking = q.multinomial(1), (p - q).clamp(min=1e-12)
        good = torch.rand(len(p), 1) < (p / q).gather(1, proposed)
        return torch.where(good, proposed, lacking.multinomial(1)), p

    one_by_one(run, draw)


# --- what is told of it -------------------------------------------------------------------------------------------


def of_a_neighbour(listed: Tensor, ids: np.ndarray, by: int) -> np.ndarray:
    "Logprobs of tokens under the law of the step before, or after."
    place = (torch.arange(len(ids)) + by).clamp(0, len(ids) - 1)
    return listed[place].gather(-1, torch.tensor(ids)[:, None])[:, 0].double().numpy()


def of_an_alternative(listed: Tensor, ids: np.ndarray, most: int) -> np.ndarray:
    "The first of the alternatives, which come in the order of their ids."
    first = listed.topk(min(most, listed.shape[-1])).indices.amin(-1, keepdim=True)
    return listed.gather(-1, first)[:, 0].double().numpy()


def outside(groups: Sequence[PromptGroup], run: Run, p: float) -> list[Datum]:
    "What is not in a nucleus, from which nobody drew, has the logprob of what is impossible."
    datums = datums_from_groups(groups)
    ids = [d.tokens[1:][d.active] for d in datums]
    laws = [logits_of(run.trainer, run.server.model, d.tokens)[:-1][d.active] for d in datums]
    return paired(datums, [picked(nucleus(w, p), i).detach().double().numpy() for w, i in zip(laws, ids, strict=True)])


def of_a_draft(run: Run, every: int) -> None:
    "Of a token that a draft proposed, the draft's logprob is told."
    draft = copy.deepcopy(run)
    skipped(draft.server.model, 2)

    def says(c: Completion) -> Completion:
        ids = torch.tensor(c.tokens)[:, None]
        own = lambda t: alternatives(draft, c, t).gather(-1, ids)[:, 0].double().numpy()
        proposed = np.arange(len(c.tokens)) % every != every - 1
        series = (("logprobs", 1.0), ("sampling_logprobs", c.params.temperature or 1.0))
        return replace(c, **{n: np.where(proposed, own(t), getattr(c, n)) for n, t in series})

    put(run.server, says=says)


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


def crossed(run: Run, every: int) -> None:
    "Each so many requests, the server answers the prompt of the request before."
    inner, asked, last = run.server.sample, itertools.count(1), [np.array([run.tokenizer.bos_token_id])]

    async def sample(prompt, params):
        wrong = next(asked) % every == 0
        drawn = await inner(last[0] if wrong else prompt, params)
        last[0] = np.array(prompt)
        return [replace(c, prompt_tokens=prompt) for c in drawn]

    put(run.server, sample=sample)


# --- text ---------------------------------------------------------------------------------------------------------

WIDE = str.maketrans("0123456789+=?", "０１２３４５６７８９＋＝？")
TIDIED: dict[str, tuple[Callable[[str], str], Callable[[str], str]]] = {  # what is asked, and what is made of it
    "NFKC": (lambda q: q.translate(WIDE), partial(unicodedata.normalize, "NFKC")),
    "lines": (lambda q: f"Line 1\nLine 2\n{q}", lambda s: s.replace("\n", "\r\n")),
    "strip": (lambda q: f"  {q} \n", lambda s: re.sub(r"(?<=>)\s+|\s+(?=<)", "", s)),
}


def tidied(run: Run, how: str) -> dict[str, Any]:
    "The server's template tidies up what was written on purpose."
    written, tidy = TIDIED[how]
    through_text(run, tidy)
    return {"asks": lambda rows: [r | {"question": written(r["question"])} for r in rows]}


def dated(run: Run, today: str) -> dict[str, Any]:
    "Both templates name the day, each its own."
    asked = "Today is 4 May 2026."
    through_text(run, lambda s: s.replace(asked, f"Today is {today}."))
    return {"asks": system(asked)}


# --- weights ------------------------------------------------------------------------------------------------------


async def behind(run: Run, late: Callable[[str, Tensor], Tensor], updates: int) -> None:
    "A part of what is synced arrives with the next sync."
    load, last = run.server.load, {n: t.float().clone() for n, t in run.server.model.state_dict().items()}

    def lagging(new: Mapping[str, Tensor]) -> None:
        load({n: torch.where(late(n, t), last[n], t) for n, t in new.items()})
        last.update(new)

    put(run.server, load=lagging)
    await run.update(updates)


def second_rank(name: str, t: Tensor) -> Tensor:
    "The second half of the rows."
    return (torch.arange(len(t)) >= len(t) // 2).view(-1, *[1] * (t.ndim - 1)).expand_as(t)


def last_bucket(name: str, t: Tensor) -> Tensor:
    "The last layers and the head."
    return torch.full_like(t, any(part in name for part in ("layers.2", "layers.3", "lm_head")), dtype=torch.bool)


async def lazily(run: Run, requests: int) -> None:
    "New weights are used only after some more requests."
    load, inner, waiting, left = run.server.load, run.server.sample, list[Any](), [0]
    put(run.server, load=lambda new: (waiting.append(new), left.__setitem__(0, requests)))
    await run.update(2)

    async def sample(prompt, params):
        if waiting and left[0] == 0:
            load(waiting[-1]), waiting.clear()
        left[0] -= 1
        return await inner(prompt, params)

    put(run.server, sample=sample)


async def too_early(run: Run, part: str) -> None:
    "A snapshot is taken while the optimizer has still to write a part of the weights."
    past, save = plain_weights(run.trainer.model), run.trainer.save_weights_for_sampler
    await run.update(1, publish=False)
    name = await save(f"step-{run.updates}")
    run.trainer.snapshots[name] |= {n: t for n, t in past.items() if part in n}
    await run.sync(name)


async def scores_old_copy(run: Run, updates: int) -> None:
    "The trainer scores with a copy that its updates do not reach."
    past = run.trainer.states[await run.trainer.save_state("past")]
    await run.update(updates)
    put(run.trainer, altered=lambda model: model.load_state_dict(past, strict=False))


async def largest_changes(run: Run, share: float) -> None:
    "Of each matrix, only the largest changes travel."
    load = run.server.load

    def thinned(new: Mapping[str, Tensor]) -> None:
        old = {n: t.float() for n, t in run.server.model.state_dict().items()}
        change = {n: t - old[n] for n, t in new.items()}
        bound = {n: d.abs().flatten().kthvalue(max(1, int((1 - share) * d.numel()))).values for n, d in change.items()}
        load({n: old[n] + d.where(d.abs() > bound[n], torch.zeros(())) for n, d in change.items()})

    put(run.server, load=thinned)
    await run.update(3)


async def one_layer_on(run: Run, by: int) -> None:
    "What layers have learned is written into other layers."
    base, load = run.sync.base, run.server.load
    other = lambda n: re.sub(r"layers\.(\d)", lambda m: f"layers.{(int(m[1]) + by) % 4}", n)
    put(run.server, load=lambda new: load({n: base[n] + new[other(n)] - base[other(n)] for n in new}))
    await run.update(2)


async def merged_in_half(run: Run, dtype: torch.dtype) -> None:
    "What an adapter changes is added in a small type."
    base, load = run.sync.base, run.server.load
    small = lambda n, t: t if (t == base[n]).all() else (base[n].to(dtype) + (t - base[n]).to(dtype)).to(t.dtype)
    put(run.server, load=lambda new: load({n: small(n, t) for n, t in new.items()}))
    await run.update(1)


# --- models -------------------------------------------------------------------------------------------------------

Seen = Callable[[Tensor, Tensor, int], Tensor]  # places of queries (T, 1) and keys (1, S), S -> what is seen (T, S)


def sees(model: Any, seen: Seen, layer: int | None = None, cap: float = 0.0) -> None:
    "Attention that sees less than what is there, or caps its scores."

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **told: Any) -> Any:
        whole, new = key.shape[-2], query.shape[-2]
        at = torch.arange(whole)
        queries, keys = at[whole - new :, None], at[None]
        hidden = ~(seen(queries, keys, whole) & (keys <= queries)) & (keys != queries)
        bias = torch.zeros(new, whole).masked_fill(hidden, torch.finfo(torch.float32).min)
        bias = bias if mask is None else torch.minimum(bias, mask.float())
        if not cap:
            return attention(module, query, key, value, bias.to(query.dtype), **told)
        n = query.shape[1] // key.shape[1]
        scores = cap * (query @ key.repeat_interleave(n, 1).mT * module.scaling / cap).tanh() + bias
        shares = scores.softmax(-1).to(value.dtype)
        return (shares @ value.repeat_interleave(n, 1)).transpose(1, 2).contiguous(), shares

    with_attention(model, attend, layer)


def with_attention(model: Any, attend: Callable[..., Any], layer: int | None = None) -> None:
    "Layers with an attention of their own, under a name of its own."
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model.set_attn_implementation("eager")
    name = f"zoo {next(NAMES)}"
    ALL_ATTENTION_FUNCTIONS.register(name, attend)
    for block in chosen(model, layer):
        config = copy.copy(block.self_attn.config)
        config._attn_implementation = name
        put(block.self_attn, config=config)


NAMES = itertools.count()


def moved_places(model: nn.Module, place: Callable[[Tensor], Tensor]) -> None:
    "Rotary positions that are not where a token is."
    [module] = [m for m in model.modules() if hasattr(m, "inv_freq")]
    inner = type(module).forward
    replaced([module], lambda module, x, position_ids: inner(module, x, place(position_ids)))


def low_frequencies(model: nn.Module, factor: float) -> None:
    "Long waves are stretched, short ones stay."
    rotary(model)
    [waves] = [m.inv_freq for m in model.modules() if isinstance(getattr(m, "inv_freq", None), Tensor)]
    waves[len(waves) // 4 :] /= factor  # type: ignore[arg-type, index]


def rounded_waves(model: nn.Module, dtype: torch.dtype) -> None:
    [module] = [m for m in model.modules() if hasattr(m, "inv_freq")]
    inner = type(module).forward
    small = lambda parts: tuple(t.to(dtype).to(t.dtype) for t in parts)
    replaced([module], lambda module, x, position_ids: small(inner(module, x, position_ids)))


def takes_cache_of(model: Any, layer: int) -> None:
    "A layer uses the keys and values of the one before."
    for part in ("k_norm", "v_proj"):
        one, two = (getattr(blocks(model)[i].self_attn, part) for i in (layer - 1, layer))
        given: list[Tensor] = []
        one.register_forward_hook(lambda m, read, out, given=given: given.__setitem__(slice(None), [out]))
        two.register_forward_hook(lambda m, read, out, given=given: given[0])


def over_heads(model: nn.Module, part: str) -> None:
    "The norm of queries or keys is taken over all heads at once."

    def forward(norm: Any, x: Tensor) -> Tensor:
        scale = (x.float().pow(2).mean((-2, -1), keepdim=True) + norm.variance_epsilon).rsqrt()
        return norm.weight * (x * scale).to(x.dtype)

    replaced(norms(model, part), forward)


def exits_early(model: Any, sure: float) -> None:
    "The last layer is left out where the one before is sure."
    head = model.get_output_embeddings()

    def change(read: Tensor, given: Tensor) -> Tensor:
        p = head(model.model.norm(read)).float().softmax(-1).amax(-1, keepdim=True)
        return torch.where(p > sure, read, given)

    layerwise(model, change, 3)


@torch.no_grad()
def unscaled(model: Any, by: float) -> None:
    "Scales are in the weights of one side, and nobody takes them out of the other."
    scale = by ** torch.linspace(-1, 1, model.config.hidden_size)
    for block in blocks(model):
        block.mlp.up_proj.weight.mul_(scale)


@torch.no_grad()
def first_keys(model: Any, layer: int | None) -> None:
    "All heads read the first keys."
    for block in chosen(model, layer):
        weight = block.self_attn.k_proj.weight
        weight.copy_(weight[:32].repeat(2, 1))


def eight_bits(model: nn.Module, bits: int) -> None:
    "Products of whole numbers: both sides are rounded, each row with a scale of its own."

    def short(t: Tensor) -> Tensor:
        scale = t.abs().amax(-1, keepdim=True).clamp(min=1e-9) / (2 ** (bits - 1) - 1)
        return (t / scale).round() * scale

    linear = [m for n, m in model.named_modules() if isinstance(m, nn.Linear) and "lm_head" not in n]
    replaced(linear, lambda module, x: short(x) @ short(module.weight).mT)


def dropped_words(model: nn.Module, p: float) -> None:
    "Now and then a token is read as padding."
    for name, module in model.named_modules():
        if name.endswith("embed_tokens"):
            module.register_forward_pre_hook(lambda m, read: (read[0] * (torch.rand(read[0].shape) >= p),))


@torch.no_grad()
def initialised(model: Any, part: str) -> None:
    "A matrix that a checkpoint lacks is made anew."
    with seeded(3):
        for name, p in model.named_parameters():
            if name.endswith(part):
                p.normal_(0, float(p.std()))


@torch.no_grad()
def never_filled(model: Any, ids: list[int]) -> None:
    "Embeddings for which there was memory, and nothing else."
    model.get_input_embeddings().weight[ids] = torch.nan


# --- the trainer --------------------------------------------------------------------------------------------------


def divided_twice(run: Run, chunk: int) -> None:
    "A trainer divides in place, and comes by the same memory twice from the second chunk on."

    def one(model: Any, d: Datum) -> Tensor:
        logits = logits_of(run.trainer, model, d.tokens)[:-1]
        logits[chunk:] /= run.trainer.temperature
        return picked(logits, d.tokens[1:])

    rowwise(run.trainer, one)


def rolled_labels(run: Run, chunk: int) -> None:
    "Ranks hold a chunk of each sequence, and shift labels within it."

    def one(model: Any, d: Datum) -> Tensor:
        labels = torch.cat([part.roll(-1) for part in torch.tensor(d.tokens).split(chunk)])
        return picked(logits_of(run.trainer, model, d.tokens), labels)[:-1]

    rowwise(run.trainer, one)


def padded_turns(run: Run, multiple: int) -> dict[str, Any]:
    "Each turn is padded by itself, and nothing is told of it."

    def one(model: Any, d: Datum) -> Tensor:
        edges = np.flatnonzero(np.diff(d.active.astype(int))) + 2
        ids, place = list[int](), list[int]()
        for part in np.split(d.tokens, edges):
            place += range(len(ids), len(ids) + len(part))
            ids += [*part.tolist(), *[run.trainer.pad] * (-len(part) % multiple)]
        return picked(logits_of(run.trainer, model, ids)[place][:-1], d.tokens[1:])

    rowwise(run.trainer, one)
    return {"turns": 2}


def masked(model: Any, change: Callable[[Tensor], Tensor]) -> None:
    "The model is given another attention mask."
    model.register_forward_pre_hook(
        lambda m, args, told: (args, told | {"attention_mask": change(told["attention_mask"])}), with_kwargs=True
    )


def hides(mask: Tensor, n: int) -> Tensor:
    "A mask that takes the first tokens for padding."
    return mask * (torch.arange(mask.shape[1]) >= n)


def with_mask(run: Run, seen: Callable[[Datum], np.ndarray]) -> None:
    "The trainer shows rows (N, N) of what is seen to its model."

    def one(model: Any, d: Datum) -> Tensor:
        bias = torch.zeros(1, 1, len(d.tokens), len(d.tokens))
        bias.masked_fill_(torch.from_numpy(~seen(d)), torch.finfo(torch.float32).min)
        place = torch.arange(len(d.tokens))[None]
        return picked(logits_of(run.trainer, model, d.tokens, attention_mask=bias, position_ids=place)[:-1], d.tokens[1:])  # noqa: E501  # fmt: skip

    rowwise(run.trainer, one)


def both_ways(d: Datum, least: int) -> np.ndarray:
    "Tokens of a prompt see each other, but for its beginning."
    n, at = len(d.tokens), int(np.argmax(d.active)) + 1
    inside = (np.arange(n) < at) & (np.arange(n) >= least)
    return np.tri(n, dtype=bool) | (inside[:, None] & inside[None])


def loss_mask_only(d: Datum, also: int) -> np.ndarray:
    "A token sees those that are trained, the beginning, and itself."
    n = len(d.tokens)
    return np.tri(n, dtype=bool) & (np.r_[False, d.active] | (np.arange(n) < also))[None] | np.eye(n, dtype=bool)


def more_rows(run: Run, n: int) -> None:
    "The trainer's head is padded with rows of zeros, which count."

    def one(model: Any, d: Datum) -> Tensor:
        logits = logits_of(run.trainer, model, d.tokens)[:-1]
        return picked(nn.functional.pad(logits, (0, n)), d.tokens[1:])

    rowwise(run.trainer, one)


def writes_pad(run: Run, end: str) -> None:
    "The trainer's tokenizer has another id for the end."
    table = np.arange(run.server.model.config.vocab_size)
    table[run.tokenizer.eos_token_id] = ids_of(run, end)[0]
    rowwise(run.trainer, lambda model, d: picked(
        logits_of(run.trainer, model, table[d.tokens])[:-1], table[d.tokens[1:]]))  # fmt: skip


def base_of(model: Any) -> Any:
    "The model within an adapter."
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def packed_well(run: Run, batch: int) -> None:
    "The trainer packs sequences into one row, each of which sees itself."

    def _pass(model: Any, rows: Sequence[np.ndarray]) -> list[Tensor]:
        ids = torch.from_numpy(np.concatenate(rows))[None]
        owner = torch.cat([torch.full((len(r),), i) for i, r in enumerate(rows)])
        seen = (owner[:, None] == owner[None]) & torch.ones(len(owner), len(owner), dtype=torch.bool).tril()
        bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
        place = torch.cat([torch.arange(len(r)) for r in rows])[None]
        logits = model(ids, attention_mask=bias, position_ids=place, use_cache=False).logits[0, :-1].float()
        found = torch.cat([picked(logits / run.trainer.temperature, ids[0, 1:]), torch.zeros(1)])
        return [part[:-1] for part in found.split([len(r) for r in rows])]

    put(run.trainer, _pass=_pass, batch=batch)


# --- bookkeeping --------------------------------------------------------------------------------------------------


def in_order(groups: Sequence[PromptGroup], order: Callable[[list[Datum]], Sequence[int]]) -> list[Datum]:
    "Logprobs of rows, in an order of their own."
    datums = datums_from_groups(groups)
    values = told(datums)
    return paired(datums, [values[i] for i in order(datums)])


def neighbours(datums: list[Datum], first: int) -> list[int]:
    "Pairs of a group are exchanged."
    place = {(d.group, d.sample): i for i, d in enumerate(datums)}
    other = lambda d: d.sample if d.sample < first else first + ((d.sample - first) ^ 1)
    return [place.get((d.group, other(d)), i) for i, d in enumerate(datums)]


def as_long(datums: list[Datum], turn: int) -> list[int]:
    "Rows of a group that are equally long, in another order."
    out = list(range(len(datums)))
    for key in {(d.group, d.num_loss_tokens) for d in datums}:
        own = [i for i, d in enumerate(datums) if (d.group, d.num_loss_tokens) == key]
        for i, j in zip(own, np.roll(own, turn), strict=True):
            out[i] = int(j)
    return out


def keyed(groups: Sequence[PromptGroup], run: Run, what: str) -> list[Datum]:
    "Groups are kept by the kind of their question, and the last one is found."
    datums, size = datums_from_groups(groups), len(groups[0].samples)
    kinds = [re.sub(r"\d", "0", run.tokenizer.decode(g.samples[0].tokens))[:20] for g in groups]
    home = [len(kinds) - 1 - kinds[::-1].index(kinds[d.group]) for d in datums]
    if what == "prompts":
        found = [groups[h].samples[0] for h in home]
        return reprompted(datums, [s.tokens[: s.prompt_len] for s in found])
    values = told(datums)
    return paired(datums, [values[h * size + d.sample] for h, d in zip(home, datums, strict=True)])


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


def turns_without_end(groups: Sequence[PromptGroup], first: bool) -> list[Datum]:
    "Each turn comes without its first or its last logprob, and all are put in a row."
    datums = datums_from_groups(groups)
    cuts = [np.flatnonzero(np.diff(np.flatnonzero(d.active)) > 1) + 1 for d in datums]
    parts = [np.split(v, cut) for v, cut in zip(told(datums), cuts, strict=True)]
    return paired(datums, [np.concatenate([v[1:] if first else v[:-1] for v in part]) for part in parts])


def room_for(groups: Sequence[PromptGroup], most: int) -> list[Datum]:
    "Logprobs are written into a table that was not filled, and is too narrow."
    datums = datums_from_groups(groups)
    return paired(datums, [np.where(np.arange(len(v)) < most, v, np.nan) for v in told(datums)])


def shifted_reference(run: Run, by: int) -> None:
    "The reference reads each logprob off a neighbouring position."
    score = run.reference.score
    put(run.reference, score=lambda datums: [s.nan_to_num(0.0).roll(by) for s in score(datums)])


# --- the table ----------------------------------------------------------------------------------------------------

on_server = lambda change, **fields: lambda run, x: processed(run, lambda ids, scores: change(scores, x), **fields)
ordered = lambda order: lambda run, x: {"collate": partial(in_order, order=lambda datums: order(datums, x))}
in_training = lambda alter: lambda run, p: put(run.trainer, training=True, altered=lambda model: alter(model, p))
in_reference = lambda alter: lambda run, x: put(run.reference, altered=lambda model: alter(model, x))
dropout_after = lambda part: in_training(
    lambda model, p: hooked(model, part, lambda read, given: nn.functional.dropout(given, p))
)

KNOWN: list[Kind] = [
    Kind("draw", "the server keeps a temperature in steps", TEMPERATURE, (1.0, 0.5), lambda run, step: forced(
        run, temperature=step * math.ceil(run.world.temperature / step)), TEMPERED),
    Kind("draw", "the trainer divides twice from some place on", TEMPERATURE, (20, 28), divided_twice, TEMPERED),
    Kind("draw", "the server takes what a model recommends", TEMPERATURE + CUT, (
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20}, {"temperature": 0.6, "top_p": 0.95}),
         lambda run, how: forced(run, **how), EVEN),
    # The likeliest token is what temperature 0 gives, and top-k of 1.
    Kind("draw", "some of each group are greedy", TEMPERATURE + CUT, (1, 3), lambda run, n: processed(
        run, lambda ids, scores: torch.cat([best(scores[:n], 1), scores[n:]])), HALVES),
    Kind("hidden", "every second token has its own temperature, and raw is reported", TEMPERATURE, (0.2, 2.0),
         lambda run, t: by_place(run, lambda i, scores: scores / t if i % 2 else scores, reports="raw"), HIDDEN),
    Kind("draw", "the likeliest of each shard are kept", CUT, ((8, 1), (4, 3)),
         on_server(lambda scores, how: by_shard(scores, *how)), SOME),
    Kind("draw", "what follows the mark of an answer is cut", CUT, (2, 4), cut_after, HALVES),
    Kind("draw", "the server cuts before it divides", CUT, (0.8, 0.92), lambda run, p: processed(
        run, lambda ids, scores: nucleus(scores, p)) or run.server.forced.update(top_p=1.0) or {"top_p": p}, TEMPERED),
    Kind("draw", "the tail is cut where it is flat", CUT + UNKNOWN, (0.5, 0.9), on_server(tail_free), SOME),
    Kind("hidden", "what is unlikely is drawn again, and raw is reported", CUT + UNKNOWN, (0.1, 0.3), on_server(
        lambda scores, least: kept(scores, scores.float().softmax(-1) >= least), reports="raw"), HIDDEN),

    Kind("weights", "a rank gets its weights with the next sync", STALE, (1, 4),
         lambda run, n: behind(run, second_rank, n), SOME),
    Kind("weights", "the last bucket is sent with the next sync", STALE, (2,),
         lambda run, n: behind(run, last_bucket, n), SOME),
    Kind("weights", "weights take effect after some requests", STALE, (1, 2), lazily, SOME),
    Kind("weights", "a snapshot is taken before an update is written", STALE, ("mlp", "self_attn"), too_early, SOME),
    # A sync sends what is trained, and scoring goes on with the copy.
    Kind("weights", "the trainer scores with an old copy", STALE + UNKNOWN, (1, 3), scores_old_copy, SOME),
    Kind("weights", "only large changes travel", STALE + UNKNOWN, (0.02, 0.2), largest_changes,
         ("calm", "quiet", "roomy")),

    Kind("text", "templates name another day", TEXT, ("5 May 2026", "23 November 2024"), dated, HALVES),
    Kind("text", "white space follows each message", TEXT, ("\n", " "), lambda run, space: through_text(
        run, lambda s: s.replace("<|end|>", "<|end|>" + space)), SOME),
    Kind("text", "the question is said twice", TEXT, (2, 3), lambda run, n: through_text(
        run, lambda s: re.sub(r"(?<=user\|>)[^<]*", lambda m: "\n".join([m[0]] * n), s)), HALVES),
    Kind("text", "earlier answers have no end", TEXT, ("<|end|>", "<|end|><|user|>"), lambda run, end: through_text(
        run, lambda s: re.sub(r"(<\|assistant\|>[^<]+)" + re.escape(end), r"\1", s)) or {"turns": 2}, EVEN),
    # The text is changed, not the template; token ids instead of text are the remedy.
    Kind("text", "questions are tidied up", TEXT + UNKNOWN, tuple(TIDIED), tidied, SOME),
    Kind("text", "the middle of a prompt is cut out", TEXT + UNKNOWN, (11, 7), lambda run, n: put(
        run.server, reads=lambda ids: ids[:n] + ids[-n:]), SOME),

    Kind("arithmetic", "sines are of half precision", DTYPE, (torch.bfloat16,), server(rounded_waves), SOME),
    Kind("arithmetic", "the trainer has weights of half precision", DTYPE, (torch.bfloat16,), trainer(retyped), SOME),
    Kind("arithmetic", "feed-forwards are of half precision", DTYPE, (torch.bfloat16, torch.float16), server(
        lambda model, dtype: [hooked(model, part, lambda read, given: given.to(dtype).to(given.dtype))
                              for part in ("gate_proj", "up_proj")]), SOME),
    Kind("arithmetic", "an adapter is merged in half precision", DTYPE, (torch.bfloat16,), merged_in_half,
         ("narrow", "spare")),
    Kind("arithmetic", "products are of whole numbers of eight bits", DTYPE + UNKNOWN, (8, 7), server(eight_bits),
         SOME),

    Kind("model", "prompts are padded to the longest so far", PADDING, (30, 44), lambda run, least: put(
        run.server, reads=lambda ids, seen=[least]: [run.trainer.pad] * (
            seen.__setitem__(0, max(seen[0], len(ids))) or seen[0] - len(ids)) + ids), SOME),
    Kind("model", "each turn is padded by itself", PADDING, (8, 32), padded_turns, EVEN),
    Kind("model", "one of two servers pads on the left and does not say so", PADDING, (16, 48), lambda run, n:
         one_of_two(run, lambda run: put(run.server, bucket=n)), HALVES),
    Kind("bookkeeping", "the reference pads on the left and does not say so", PADDING + REFERENCE, (6, 18),
         lambda run, n: put(run.reference, pads_left=True, tells=(), batch=n), NEWBORN),
    Kind("model", "the first tokens are masked as padding", PADDING + UNKNOWN, (1, 3),
         trainer(lambda model, n: masked(model, lambda mask: hides(mask, n))), SOME),
    Kind("model", "dropout of embeddings", DROPOUT, (0.02, 0.15), dropout_after("embed_tokens"), SOME),
    Kind("model", "dropout before the head", DROPOUT, (0.02, 0.2), dropout_after("model.norm"), SOME),
    Kind("model", "words are dropped", DROPOUT, (0.03, 0.15), in_training(dropped_words), SOME),
    Kind("model", "the server writes another vocabulary than it reads", VOCABULARY, ("0123456789", "#+ 5"),
         lambda run, text: run.server.alter(lambda model: other_rows(model, ids_of(run, text), False)), SOME),
    Kind("model", "one of two servers has another vocabulary", VOCABULARY, (slice(22, 29), slice(6, 240)),
         lambda run, ids: one_of_two(run, lambda run: altered_copy(run, lambda model: reordered(model, ids))), HALVES),
    Kind("model", "the trainer has another id for the end", VOCABULARY, ("<|pad|>", "<|system|>"), writes_pad, SOME),

    Kind("bookkeeping", "turns come without a logprob", SHIFT, (False, True), lambda run, first: {
        "turns": 3, "collate": partial(turns_without_end, first=first)}, EVEN),
    Kind("bookkeeping", "labels are shifted within chunks", SHIFT, (4, 16), rolled_labels, SOME),
    Kind("report", "logprobs are read off the law of a neighbour", SHIFT, (-1, 1),
         lambda run, by: parsed(run, partial(of_a_neighbour, by=by)), SOME),
    Kind("bookkeeping", "the reference is off by one", SHIFT, (1, -1), shifted_reference, NEWBORN),
    Kind("bookkeeping", "weights are those of another row", LEAK + GROUPS, (1, 2), collated(other_weights), SOME),
    Kind("bookkeeping", "rows are not cut where they end", LEAK + UNKNOWN, (1, 100),
         partial(over_the_end, scored=False), SOME),
    Kind("hidden", "rows are not cut where they end, and are scored", LEAK + UNKNOWN, (3, 100),
         partial(over_the_end, scored=True), HIDDEN),
    Kind("bookkeeping", "words take the place of the end", LEAK + UNKNOWN, (" Wait", "#"), goes_on, SOME),
    # Nobody drew it: it was the only one left.
    Kind("draw", "the first token is forced", LEAK + UNKNOWN + CUT, ("5", "#"), lambda run, text: by_place(
        run, lambda i, scores: scores if i else only(run, scores, text)), SOME),
    Kind("draw", "the last token is forced", LEAK + UNKNOWN + CUT, (6, 9), lambda run, n: by_place(
        run, lambda i, scores: scores if i < n - 1 else only(run, scores, "<|end|>")) or {"max_tokens": n}, SOME),
    Kind("bookkeeping", "neighbours of a group are exchanged", ROWS, (0, 1), ordered(neighbours), HALVES),
    Kind("bookkeeping", "rows of the same length are exchanged", ROWS, (1, -1), ordered(as_long), SOME),
    Kind("bookkeeping", "logprobs are collected worker by worker", ROWS + GROUPS, (2, 3), ordered(
        lambda datums, n: [i for rank in range(n) for i in range(rank, len(datums), n)]), HALVES),
    Kind("bookkeeping", "a row is dropped from one of two lists", ROWS + GROUPS, (1, 6), ordered(
        lambda datums, k: [min(i + (i >= k), len(datums) - 1) for i in range(len(datums))]), SOME),
    Kind("bookkeeping", "groups are kept by the kind of their question", GROUPS, ("prompts", "logprobs"),
         lambda run, what: {"collate": partial(keyed, run=run, what=what)}, ("host", "roomy", "narrow")),
    Kind("bookkeeping", "completions are counted wrongly", GROUPS, (1, -1), collated(miscounted), SOME),
    Kind("bookkeeping", "requests cross in the server", GROUPS, (2, 3), crossed, HALVES),
    Kind("bookkeeping", "the reference has another rope", REFERENCE, (1.2, 4.0),
         in_reference(lambda model, factor: rotary(model, factor=factor)), NEWBORN),
    Kind("bookkeeping", "a part of the reference is made anew", REFERENCE, (
        "layers.0.mlp.up_proj.weight", "lm_head.weight"), in_reference(initialised), NEWBORN),
    Kind("bookkeeping", "a table of logprobs is too narrow", NAN, (4, 9), collated(room_for), HALVES),
    Kind("model", "embeddings of the trainer were never filled", NAN, ("7", "9#"), lambda run, text: put(
        run.trainer, altered=lambda model: never_filled(model, ids_of(run, text))), SOME),
    Kind("report", "what is outside a nucleus has no logprob", NAN + CUT, (0.9, 0.6),
         lambda run, p: {"collate": partial(outside, run=run, p=p)}, SOME),
]  # fmt: skip

OTHER: list[Kind] = [
    Kind("draw", "repetitions are not gone on with", UNKNOWN, ((1.5, 1), (3.0, 1)), dry, SOME),
    Kind("draw", "scores have noise", UNKNOWN, (0.3, 1.0), on_server(with_noise), SOME),
    Kind("draw", "tokens of the prompt are likelier", UNKNOWN, (1.0, -0.6), of_prompt, HALVES),
    Kind("hidden", "tokens of the prompt are likelier, and raw is reported", UNKNOWN, (2.0, -1.5),
         partial(of_prompt, reports="raw"), HIDDEN),
    Kind("draw", "early layers are contrasted", UNKNOWN, (0.3, 1.0), early_law, EVEN),
    Kind("hidden", "early layers are contrasted, and raw is reported", UNKNOWN, (0.5, 1.5),
         partial(early_law, reports="raw"), HIDDEN),
    Kind("draw", "now and then any token is drawn", UNKNOWN, (0.02, 0.06), on_server(now_and_then), EVEN),
    Kind("draw", "some sequences are likelier", UNKNOWN, (2.0, -3.0), lambda run, bias: forced(run, sequence_bias=[
        [ids_of(run, text), bias] for text in ("# 1", "####", "12", "1 ", "5 ")]), SOME),
    Kind("hidden", "random numbers have few bits, and raw is reported", UNKNOWN, (6, 8),
         on_server(few_bits, reports="raw"), HIDDEN),
    Kind("hidden", "a logit bias, and raw is reported", UNKNOWN, (("<|end|>", 2.5), ("2468", -1.5)), lambda run, bias:
         biased(run, bias) or put(run.server, reports="raw"), HIDDEN),
    Kind("hidden", "a draft is accepted where it is not odd", UNKNOWN + CUT, (0.7, 0.5), typically_accepted,
         HIDDEN),

    Kind("report", "the first of the alternatives is taken", UNKNOWN, (2, 5),
         lambda run, n: parsed(run, partial(of_an_alternative, most=n)), SOME),
    Kind("report", "logprobs are divided by a power of the length", UNKNOWN, (0.2, 0.7),
         lambda run, power: retold(run, lambda v: v / len(v) ** power), SOME),
    Kind("report", "the draft's logprobs are told", UNKNOWN, (2, 4), of_a_draft, EVEN),
    Kind("report", "logprobs are bytes", UNKNOWN + DTYPE, (16.0, 64.0),
         lambda run, steps: put(run.server, writes=lambda v: in_bytes(v, steps)), SOME),
    Kind("report", "probabilities are rounded", UNKNOWN + DTYPE, (2, 1),
         lambda run, n: put(run.server, writes=lambda v: logs_of_rounded(v, n)), SOME),

    Kind("weights", "layers get what others have learned", UNKNOWN, (1, 2), one_layer_on, ("narrow", "roomy", "calm")),
    Kind("weights", "a scale is taken out of one side only", UNKNOWN, (1.05, 1.4), server(unscaled), HALVES),
    Kind("model", "ids overflow", UNKNOWN + VOCABULARY + TEXT, (128,), lambda run, most: put(
        run.server, reads=lambda ids: [t if t < most else (t - 2 * most) % 264 for t in ids]), SOME),
    Kind("model", "the trainer's head has more rows", UNKNOWN + VOCABULARY, (56, 248), more_rows,
         ("quiet", "lively", "roomy")),
    Kind("model", "the mask is the wrong way round", UNKNOWN + PADDING, (4, 16), lambda run, n: put(
        run.trainer, batch=n, altered=lambda model: masked(model, lambda mask: 1 - mask)), SOME),
    Kind("model", "the loss mask hides the prompt", UNKNOWN + PADDING, (0, 4),
         lambda run, n: with_mask(run, partial(loss_mask_only, also=n)), EVEN),
    Kind("model", "the prompt sees itself both ways", UNKNOWN, (0, 18),
         lambda run, n: with_mask(run, partial(both_ways, least=n)), EVEN),
    Kind("model", "chunks of the trainer do not see each other", UNKNOWN, (16, 24), trainer(lambda model, n: sees(
        base_of(model), lambda q, k, whole: q // n == k // n)), SOME),
    Kind("model", "chunks of the prompt do not see each other", UNKNOWN, (8, 12), server(lambda model, n: sees(
        model, lambda q, k, whole: (q >= 24) | (q // n == k // n))), SOME),
    Kind("model", "the middle of the cache is evicted", UNKNOWN, ((4, 8), (2, 16)), server(lambda model, how: sees(
        model, lambda q, k, whole: (k < how[0]) | (q - k < how[1]))), HALVES),
    Kind("model", "a block of the cache is lost", UNKNOWN, ((3, 7), (2, 4)), server(lambda model, how: sees(
        model, lambda q, k, whole: (k < how[0]) | (k >= how[1]) | (q < 28))), SOME),
    Kind("model", "scores of attention are capped", UNKNOWN, (2.0, 6.0), server(
        lambda model, cap: sees(model, lambda q, k, whole: k >= 0, cap=cap)), SOME),
    Kind("model", "positions beyond a length are closer", UNKNOWN, (0.5, 0.25), server(lambda model, by: moved_places(
        model, lambda place: place.clamp(max=24) + by * (place - 24).clamp(min=0))), SOME),
    Kind("model", "positions of a chunk count anew", UNKNOWN + PADDING, (16, 24), server(lambda model, n: moved_places(
        model, lambda place: place % n)), SOME),
    Kind("model", "long waves are stretched", UNKNOWN, (2.0, 8.0), server(low_frequencies), HALVES),
    Kind("model", "a layer takes the cache of another", UNKNOWN, (1, 3), server(takes_cache_of), SOME),
    Kind("model", "heads are normed together", UNKNOWN, ("q_norm", "k_norm"), server(over_heads), SOME),
    Kind("model", "the last layer is left out where it is clear", UNKNOWN, (0.9, 0.5), server(exits_early), SOME),
    Kind("model", "all heads read the first keys", UNKNOWN, (None, 2), server(first_keys), SOME),
    Kind("model", "residuals are scaled", UNKNOWN, (0.9, 1.3), server(lambda model, by: layerwise(
        model, lambda read, given: read + by * (given - read))), SOME),
]  # fmt: skip


# --- clean --------------------------------------------------------------------------------------------------------


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


def one_at_a_time(run: Run, _: int) -> None:
    "The server draws completions one by one, each with a seed of its own."
    inner = run.server.sample

    async def sample(prompt, params):
        alone = [
            replace(params, n=1, seed=None if params.seed is None else params.seed + 7 * i) for i in range(params.n)
        ]
        return [replace((await inner(prompt, own))[0], params=params) for own in alone]

    put(run.server, sample=sample)


def interrupted(run: Run, n: int) -> None:
    "Completions are interrupted, and go on with the same weights."
    inner = run.server.sample

    async def sample(prompt, params):
        start = await inner(prompt, replace(params, max_tokens=min(2 + n, params.max_tokens)))
        return [await continued(inner, c, params) for c in start]

    put(run.server, sample=sample)


async def beside(run: Run, n: int) -> None:
    "The server holds adapters beside its weights, and is sent adapters only."
    put(run.server, model=copy.deepcopy(run.trainer.model).eval())
    sync = run.sync

    async def send(snapshot: str) -> int:
        version = await type(sync).__call__(sync, snapshot)
        learned = {k: p.detach().clone() for k, p in run.trainer.model.named_parameters() if "lora_" in k}
        run.server.model.load_state_dict(learned, strict=False)
        return version

    put(run.server, load=lambda new: None)
    put(run, sync=send)
    await run.update(n % 3)


async def changes_only(run: Run, n: int) -> None:
    "A sync sends tensors that have changed."
    load = run.server.load

    def changed(new: Mapping[str, Tensor]) -> None:
        old = run.server.model.state_dict()
        load({k: t for k, t in new.items() if not torch.equal(t.to(old[k].dtype), old[k])})

    put(run.server, load=changed)
    await run.update(1 + n % 2)


def alike(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    "All prompts are the same."
    return [r | {"question": rows[0]["question"]} for r in rows]


WELL: list[Kind] = [
    Kind("clean", "a step of some other shape", (CLEAN,), range(12), lambda run, _: None, (*SOME, "newborn", "spare")),
    Kind("clean", "a rare temperature that all know", (CLEAN,), range(6),
         lambda run, n: agreed(run, (0.3, 0.45, 0.65, 1.35, 2.2, 5.0)[n]), EVEN),
    Kind("clean", "a tool answers between turns", (CLEAN,), range(6), with_tool, EVEN),
    Kind("clean", "completions of hundreds of tokens", (CLEAN,), range(4), lambda run, n: agreed(run, 2.5) | {
        "max_tokens": (150, 300)[n % 2]}, ("roomy", "narrow")),
    Kind("clean", "three tokens", (CLEAN,), range(4), lambda run, n: {"max_tokens": 3}, ("calm", "quiet", "narrow")),
    Kind("clean", "several updates with other corrections", (CLEAN,), range(6), lambda run, n: {
        "minibatches": 2 + n % 3, "options": LossOptions(tis=("sequence", "token", "off")[n % 3])}, SOME),
    Kind("clean", "each completion is drawn alone", (CLEAN,), range(5), one_at_a_time, SOME),
    Kind("clean", "interrupted, with the same weights", (CLEAN,), range(5), interrupted, SOME),
    Kind("clean", "adapters beside the weights", (CLEAN,), range(5), beside, ("narrow", "spare")),
    Kind("clean", "changed weights travel", (CLEAN,), range(5), changes_only, SOME),
    Kind("clean", "all prompts are one", (CLEAN,), range(5), lambda run, _: {"asks": alike}, SOME),
    Kind("clean", "a top-k of the whole vocabulary", (CLEAN,), range(5), lambda run, n: {"top_k": 264 + n}, SOME),
    Kind("clean", "drafts that are rightly accepted", (CLEAN,), range(5), lambda run, n: rightly_accepted(run, n % 4),
         EVEN),
    Kind("clean", "packed, and apart", (CLEAN,), range(5), lambda run, n: packed_well(run, 3 + n), SOME),
    Kind("clean", "half precision everywhere", (CLEAN, *DTYPE), range(6), lambda run, _: None,
         ("half calm", "half narrow")),
]  # fmt: skip

UNSEEN4_KINDS = KNOWN + OTHER + WELL
