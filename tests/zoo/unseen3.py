"""Faults for the doctor by somebody who has not read it: kinds that neither `faults` nor `unseen` has.

Do not open this file while you improve the doctor. Once its answers were looked at, it belongs to `build`.

What is right was decided by three rules. A cause is right if its remedy in `causes.FIXES` ends the fault. Where another
sync does not end it, weights that are old cannot be told from other arithmetic, and `NONE` is right, too. A law of the
draw that keeps a beginning of the ranking, but is no top-p and no top-k, may be called by their name or by none; a law
that changes the ranking is none of them."""

from __future__ import annotations

import copy
import html
import itertools
import json
import math
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import WatermarkingConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rl_notebook.core import AdamParams, Completion, Datum, PromptGroup, SampleParams
from rl_notebook.datums import datums_from_groups
from rl_notebook.losses import make_loss_fn

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
    every,
    fitted,
    forced,
    paired,
    put,
    quantised,
    reprompted,
    templated,
    through_text,
    told,
)
from .machines import Sync, Trainer, Weights, plain_weights, seeded
from .process import in_process
from .steps import Run, World, opened
from .unseen import (
    GROUPS,
    NAN,
    REFERENCE,
    ROWS,
    VOCABULARY,
    alternatives,
    collated,
    continued,
    hooked,
    ids_of,
    parsed,
    processed,
    retold,
    server,
    trainer,
)

WORLDS |= {
    "third": World(warm_up=3, completions=5, max_tokens=20),
    "slim": World(lora_rank=2, learning_rate=2e-3),
    "warm": World(temperature=1.3),
    "deaf": World(can_echo=False, prompts=3, completions=6),
    "lengthy": World(max_tokens=40, prompts=3),
    "aged": World(warm_up=8),
    "fresh": World(warm_up=0, completions=5),
    "fresh slim": World(warm_up=0, lora_rank=2, learning_rate=2e-3),
    "fresh warm": World(warm_up=0, temperature=1.3),
    "full": World(lora_rank=16, learning_rate=5e-4),
    "half slim": World(dtype="bfloat16", lora_rank=4, learning_rate=1e-3),
    "half warm": World(dtype="bfloat16", temperature=1.3),
    "throng": World(prompts=6, completions=8),
    "throng slim": World(prompts=6, completions=8, lora_rank=2, learning_rate=2e-3),
    "throng deaf": World(prompts=5, completions=9, max_tokens=32, can_echo=False),
    "pair": World(prompts=1, completions=2),
    "crowd": World(prompts=2, completions=16),
}
MANY = ("third", "slim", "warm", "deaf", "lengthy")  # taken in turns
EVEN = ("third", "slim", "deaf", "lengthy")  # at temperature 1
HALF = (*MANY, "half slim", "half warm")
HIDDEN = ("throng", "throng slim", "throng deaf")  # at temperature 1, with many tokens
ECHO = ("third", "slim", "lengthy")  # at temperature 1, with an echo
FRESH = ("fresh", "fresh slim", "fresh warm")


# --- the draw -----------------------------------------------------------------------------------------------------


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


def laddered(run: Run, width: float) -> None:
    "The completions of a group have temperatures around the one asked for."

    def change(ids: Tensor, scores: Tensor) -> Tensor:
        return scores / torch.linspace(1 - width, 1 + width, len(scores))[:, None]

    processed(run, change)


def one_of_two(run: Run, fault: Callable[[Run], Any]) -> None:
    "Every second request goes to a server that has a fault."
    usual = dict(vars(run.server))
    fault(run)
    other = {n: v for n, v in vars(run.server).items() if n not in usual or v is not usual[n]}
    usual, asked = {n: usual.get(n) for n in other}, itertools.count()
    put(run.server, **usual)

    def balanced(call: Any) -> Any:
        async def answer(*args):
            put(run.server, **(other if next(asked) % 2 else usual))
            try:
                return await call(*args)
            finally:
                put(run.server, **usual)

        return answer

    put(run.server, sample=balanced(run.server.sample), logprobs=balanced(run.server.logprobs))


def altered_copy(run: Run, alteration: Callable[[nn.Module], Any]) -> None:
    "The server has a model of its own, altered."
    put(run.server, model=copy.deepcopy(run.server.model))
    alteration(run.server.model)


def later(run: Run, **arguments: Any) -> dict[str, Any]:
    "From the second turn on the server draws otherwise."
    inner, user = run.server.sample, ids_of(run, "<|user|>")[0]

    async def sample(prompt, params):
        forced(run, **(arguments if list(prompt).count(user) > 1 else {}))
        return await inner(prompt, params)

    put(run.server, sample=sample)
    return {"turns": 2}


def by_spread(scores: Tensor, n: float) -> Tensor:
    "Scores within n standard deviations of the best: https://arxiv.org/abs/2411.07641"
    finite = scores.float()
    return scores.masked_fill(finite < finite.amax(-1, keepdim=True) - n * finite.std(-1, keepdim=True), -torch.inf)


def excluded(scores: Tensor, least: float) -> Tensor:
    "Half of the time, of all that are likelier than this, only the least likely stays (XTC)."
    p = scores.float().softmax(-1)
    above = p >= least
    lowest = p.masked_fill(~above, torch.inf).amin(-1, keepdim=True)
    off = above & (p > lowest) & (torch.rand(len(p), 1) < 0.5)
    return scores.masked_fill(off, -torch.inf)


def smoothed(scores: Tensor, factor: float) -> Tensor:
    "Scores as a square of their distance from the best."
    most = scores.amax(-1, keepdim=True)
    return most - factor * (most - scores) ** 2


def frequent(run: Run, penalty: float) -> None:
    "A token has less of a chance for each time that it was drawn."
    inner = run.server.sample

    async def sample(prompt, params):
        start = len(run.server.fed(prompt))

        def change(ids: Tensor, scores: Tensor) -> Tensor:
            new = ids[:, start:]
            return scores - penalty * torch.zeros_like(scores).scatter_add_(1, new, torch.ones_like(new).float())

        processed(run, change)
        return await inner(prompt, params)

    put(run.server, sample=sample)


def guided(run: Run, rule: str) -> None:
    "The server lets only such tokens be drawn as keep to a grammar."
    digits, end = ids_of(run, "0123456789"), [run.tokenizer.eos_token_id]
    odd, mark, space = ids_of(run, "13579"), ids_of(run, "####"), ids_of(run, " ")
    inner = run.server.sample

    async def sample(prompt, params):
        start = len(run.server.fed(prompt))

        def allowed(_: int, ids: Tensor) -> list[int]:
            new = ids[start:].tolist()
            if rule == "result":
                return [mark, space][len(new)] if len(new) < 2 else [*digits, *end]
            return [*mark, *space, *end] if new and new[-1] in odd else [*digits, *mark, *space, *end]

        forced(run, prefix_allowed_tokens_fn=allowed)
        return await inner(prompt, params)

    put(run.server, sample=sample)


@torch.no_grad()
def contrasted(run: Run, weight: float) -> None:
    "The server draws what it prefers to a smaller model: https://arxiv.org/abs/2210.15097"
    amateur = copy.deepcopy(run.server.model)
    skipped(amateur, 1)

    def change(ids: Tensor, scores: Tensor) -> Tensor:
        with torch.no_grad():
            other = amateur(ids, use_cache=False).logits[:, -1].float()
        return (1 + weight) * scores.float().log_softmax(-1) - weight * other.log_softmax(-1)

    processed(run, change)


def listed_anew(listed: Tensor, ids: np.ndarray, most: int) -> np.ndarray:
    "Logprobs normalised over what is listed: the likeliest, and the token itself."
    own = listed.gather(-1, torch.tensor(ids)[:, None])
    kept = listed.masked_fill((listed < listed.topk(most).values[:, -1:]) & (listed != own), -torch.inf)
    return (own[:, 0] - kept.logsumexp(-1)).double().numpy()


def handed(run: Run, prompt: Sequence[int], tokens: Sequence[int], params: SampleParams) -> Completion:
    "These tokens, with the logprobs that the server's model gives to them."
    eos = [run.tokenizer.eos_token_id, *params.stop_token_ids]
    tokens = list(tokens)[: next((i for i, t in enumerate(tokens, 1) if t in eos), len(tokens))]
    told_of = [*map(int, prompt)], tokens, np.zeros(len(tokens))
    draft = Completion(*told_of, params=params, policy_version=run.server.version)
    ids = torch.tensor(tokens)[:, None]
    series = [
        alternatives(run, draft, t).gather(-1, ids)[:, 0].double().numpy() for t in (1.0, params.temperature or 1.0)
    ]
    text = run.tokenizer.decode(tokens, skip_special_tokens=True)
    reason = "stop" if tokens[-1] in eos else "length"
    return replace(draft, logprobs=series[0], sampling_logprobs=series[1], text=text, finish_reason=reason)


def beams(run: Run, width: int) -> None:
    "The server searches with beams, and gives the raw logprobs of what it has found."

    async def sample(prompt, params):
        ids = torch.tensor([[int(t) for t in prompt]] * params.n)
        asked = {"num_beams": width, "do_sample": True, "top_k": 0, "max_new_tokens": params.max_tokens}
        asked |= {"eos_token_id": run.tokenizer.eos_token_id, "pad_token_id": run.tokenizer.pad_token_id}
        with torch.no_grad(), seeded(params.seed):
            out = run.server.model.generate(ids, attention_mask=torch.ones_like(ids), **asked)
        return [handed(run, prompt, row[ids.shape[1] :].tolist(), params) for row in out]

    put(run.server, sample=sample)


def best_of(run: Run, several: int) -> None:
    "The server draws several times as many, and returns those with the highest mean logprob."
    inner = run.server.sample

    async def sample(prompt, params):
        drawn = await inner(prompt, replace(params, n=params.n * several))
        put(run.server, variations=[], evidence=math.nan)  # nobody knows the law of what is returned
        parts = [drawn[at : at + several] for at in range(0, len(drawn), several)]
        return [replace(max(part, key=lambda c: c.logprobs.mean()), params=params) for part in parts]

    put(run.server, sample=sample)


def speculative(run: Run, lenience: float) -> None:
    "A draft is accepted too easily; what is refused is drawn from the whole law instead of what the draft lacks."

    async def sample(prompt, params):
        draft = copy.deepcopy(run.server.model)
        skipped(draft, 2)
        ids = torch.tensor([[int(t) for t in prompt]] * params.n)
        with torch.no_grad(), seeded(params.seed):
            for _ in range(params.max_tokens):
                laws = [m(ids, use_cache=False).logits[:, -1].float() for m in (run.server.model, draft)]
                p, q = [(law / (params.temperature or 1.0)).softmax(-1) for law in laws]
                accepted = (lenience * p / q).clamp(max=1)
                law = q * accepted + (1 - (q * accepted).sum(-1, keepdim=True)) * p
                run.server.compare(law.log()[None], p.log()[None], [len(p)])
                proposed, anew = q.multinomial(1), p.multinomial(1)
                good = torch.rand(len(p), 1) < accepted.gather(1, proposed)
                ids = torch.cat([ids, torch.where(good, proposed, anew)], 1)
        return [handed(run, prompt, row[len(prompt) :].tolist(), params) for row in ids]

    put(run.server, sample=sample)


# --- what is told of it -------------------------------------------------------------------------------------------


def streamed(run: Run, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    "Completions come as lines of JSON, one per token; the client has its own way with them."

    def says(c: Completion) -> Completion:
        assert c.sampling_logprobs is not None
        parts = zip(c.tokens.tolist(), c.logprobs.tolist(), c.sampling_logprobs.tolist(), strict=True)
        lines = [json.dumps({"id": t, "logprob": a, "drawn": b}) for t, a, b in parts]
        seen = change([json.loads(line) for line in lines])
        ids = [e["id"] for e in seen]
        text = run.tokenizer.decode(ids, skip_special_tokens=True)
        return replace(c, tokens=ids, text=text, **{n: [e[k] for e in seen] for n, k in SERIES})

    put(run.server, says=says)


SERIES = (("logprobs", "logprob"), ("sampling_logprobs", "drawn"))


def lost(events: list[dict[str, Any]], every: int, first: int) -> list[dict[str, Any]]:
    "Without one token of so many."
    return [e for i, e in enumerate(events) if i % every != first or len(events) == 1]


def overtaken(events: list[dict[str, Any]], at: int) -> list[dict[str, Any]]:
    "One token comes before the one that it follows."
    return events if len(events) < at + 2 else [*events[:at], events[at + 1], events[at], *events[at + 2 :]]


def slipped(v: np.ndarray, at: int) -> np.ndarray:
    "Numbers of which one is lost, or comes twice if it is negative."
    n = abs(at)
    return v if len(v) <= n else np.r_[v[:n], v[n + 1 :], 0.0] if at > 0 else np.r_[v[: n + 1], v[n:-1]]


def other_number(listed: Tensor, ids: np.ndarray, what: str) -> np.ndarray:
    "What a server may give instead of a logprob."
    own = listed.gather(-1, torch.tensor(ids)[:, None])[:, 0].double()
    found = {
        "odds": own - torch.log1p(-own.exp().clamp(max=1 - 1e-9)),
        "margin": own - listed.max(-1).values,
        "entropy": (listed.exp() * listed).sum(-1),
        "loss": -own,
    }
    return found[what].double().numpy()


def significant(v: np.ndarray, digits: int) -> np.ndarray:
    return np.array(json.loads(json.dumps([float(f"{x:.{digits}g}") for x in v])))


# --- text ---------------------------------------------------------------------------------------------------------


def system(say: str) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    "Rows with a system message."
    first = {"role": "system", "content": say}
    return lambda rows: [{"messages": [first, {"role": "user", "content": r["question"]}]} for r in rows]


SHOTS = [("1+2+3 = ?", "3 6 #### 6"), ("What is 2+2?", "#### 4"), ("Add up 5, 1, 1.", "6 7 #### 7")]


def shown(n: int) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    "Rows with so many examples before the question."
    said = [{"role": r, "content": c} for pair in SHOTS[:n] for r, c in zip(("user", "assistant"), pair, strict=True)]
    return lambda rows: [{"messages": [*said, {"role": "user", "content": r["question"]}]} for r in rows]


def begun(words: str) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    "Rows whose answer begins with these words."
    return lambda rows: [{"prompt": f"<|bos|><|user|>{r['question']}<|end|><|assistant|>{words}"} for r in rows]


def examples(run: Run, n: int) -> None:
    "A proxy puts examples before the conversation."
    said = "".join(f"<|user|>{q}<|end|><|assistant|>{a}<|end|>" for q, a in SHOTS[:n])
    through_text(run, lambda s: s.replace("<|bos|>", "<|bos|>" + said))


def spelled_out(run: Run, special: tuple[str, ...]) -> None:
    "The server reads the names of special tokens letter by letter."
    pieces = {run.tokenizer.convert_tokens_to_ids(s): ids_of(run, s[0]) + ids_of(run, s[1:]) for s in special}
    put(run.server, reads=lambda ids: [piece for t in ids for piece in pieces.get(t, [t])])


def one_turn(run: Run, which: str) -> dict[str, Any]:
    "Of what the user said, the server is sent one thing."
    said = lambda s: s.split("<|user|>")[:2][-1] if which == "first" else s.split("<|user|>")[-1]
    through_text(run, lambda s: f"<|bos|><|user|>{said(s).split('<|end|>')[0]}<|end|><|assistant|>")
    return {"turns": 2}


def in_the_question(change: str) -> Callable[[str], str]:
    "What a form, a URL or a page makes of the text of a question."
    how = {"plus": urllib.parse.unquote_plus, "percent": urllib.parse.quote, "page": lambda s: html.escape(f"'{s}'")}

    def rewritten(s: str) -> str:
        before, mark, rest = s.partition("<|user|>")
        said, end, after = rest.partition("<|end|>")
        return before + mark + how[change](said) + end + after

    return rewritten


# --- weights ------------------------------------------------------------------------------------------------------


async def went_back(run: Run, how: tuple[int, bool]) -> None:
    "The trainer goes on from an earlier checkpoint, which the server is not told of."
    await run.update(how[0])
    await run.update(-how[0], publish=False)
    run.trainer.version -= how[1]


async def buffered(run: Run, how: tuple[int, bool]) -> None:
    "The groups of a step were drawn at the last versions, in turns; the versions say so, or do not."
    past = [(copy.deepcopy(run.server.model), run.server.version)]
    for _ in range(how[0]):
        await run.update()
        past.append((copy.deepcopy(run.server.model), run.server.version))
    inner, asked = run.server.sample, itertools.count()

    async def sample(prompt, params):
        n, newest = next(asked), (run.server.model, run.server.version)
        model, version = past[n % len(past)] if n < run.world.prompts else newest
        put(run.server, model=model, version=version if how[1] else newest[1])
        try:
            return await inner(prompt, params)
        finally:
            put(run.server, model=newest[0], version=newest[1])

    put(run.server, sample=sample)


async def ahead(run: Run, updates: int) -> Weights:
    "Weights after further updates; the run stays where it is."
    there = run.updates
    await run.update(updates, publish=False)
    after, run.updates = run.trainer.states[await run.trainer.save_state("after")], there
    await run.update(0)
    return after


async def midway(run: Run, updates: int) -> None:
    "The trainer is updated while it scores a step."
    after, inner = await ahead(run, updates), run.trainer.score

    def score(datums: Sequence[Datum]) -> list[Tensor]:
        half = inner(datums[: len(datums) // 2])
        run.trainer.take(after)
        return [*half, *inner(datums[len(datums) // 2 :])]

    put(run.trainer, score=score)


async def averaged(run: Run, decay: float) -> None:
    "The server has a moving average of the weights."
    load = run.server.load

    def blended(new: Weights) -> None:
        old = run.server.model.state_dict()
        load({n: torch.lerp(t, old[n], decay) for n, t in new.items()})

    put(run.server, load=blended)
    for _ in range(3):
        await run.update()


class ByName(Sync):
    "Takes the last snapshot by name, and step-9 comes after step-10."

    async def __call__(self, snapshot: str) -> int:
        return await super().__call__(max(self.trainer.snapshots))


async def by_name(run: Run, updates: int) -> None:
    put(run, sync=ByName(run.trainer, run.server, run.sync.base))
    for _ in range(updates):
        await run.update()


async def kept_by_name(run: Run, updates: int) -> None:
    "The process of the server reads the file of its weights once."
    in_process(run, by_name=True)
    await run.publish()
    await run.update(updates)


async def diverged(run: Run, rate: float) -> None:
    "An update that was far too large."
    datums = (await run.step()).datums
    await run.trainer.forward_backward_custom(datums, make_loss_fn(datums))
    await run.trainer.optim_step(AdamParams(learning_rate=rate))
    run.updates += 1


async def low_rank(run: Run, rank: int) -> None:
    "The server takes so many ranks of what an adapter changes."
    base, load = run.sync.base, run.server.load

    def cut(name: str, t: Tensor) -> Tensor:
        change = t - base[name]
        if t.ndim < 2 or not change.any():
            return t
        u, s, v = torch.linalg.svd(change)
        return base[name] + (u[:, :rank] * s[:rank]) @ v[:rank]

    put(run.server, load=lambda new: load({n: cut(n, t) for n, t in new.items()}))
    await run.update(2)


async def rounded_adapter(run: Run, dtype: torch.dtype) -> None:
    "What an adapter changes is kept in a small type, of which the whole range is used."
    base, load = run.sync.base, run.server.load

    def small(name: str, t: Tensor) -> Tensor:
        scale = (t - base[name]).abs().max().clamp(min=1e-30) / torch.finfo(dtype).max
        return base[name] + ((t - base[name]) / scale).to(dtype).to(t.dtype) * scale

    put(run.server, load=lambda new: load({n: small(n, t) for n, t in new.items()}))
    await run.update(2)


# --- models -------------------------------------------------------------------------------------------------------


def blocks(model: Any) -> list[Any]:
    "The layers."
    return list(next(m for n, m in model.named_modules() if n.endswith("layers")))


def chosen(model: Any, layer: int | None) -> list[Any]:
    "One layer, or all."
    return blocks(model) if layer is None else [blocks(model)[layer]]


def replaced(modules: Sequence[nn.Module], forward: Callable[..., Any]) -> None:
    "Modules that compute in another way: forward(module, ...)."
    for module in modules:
        put(module, forward=partial(forward, module))


def norms(model: nn.Module, part: str = "norm") -> list[nn.Module]:
    return [m for n, m in model.named_modules() if type(m).__name__.endswith("RMSNorm") and part in n]


def attention(
    module: Any,
    query: Tensor,  # (B, H, T, D)
    key: Tensor,  # (B, K, S, D)
    value: Tensor,
    mask: Tensor | None,  # (B, 1, T, S), added
    scaling: float,
    tiled: bool = False,  # heads take keys in turns instead of in groups
    sink: float = 0.0,  # added to the denominator
    lag: int | None = None,  # how far ahead a token sees
    small: torch.dtype | None = None,  # of scores and shares
    **_: Any,
) -> tuple[Tensor, Tensor]:
    "Attention, eagerly."
    n = query.shape[1] // key.shape[1]
    spread = (lambda t: t.repeat(1, n, 1, 1)) if tiled else (lambda t: t.repeat_interleave(n, 1))
    scores = query @ spread(key).mT * scaling
    if lag is not None:
        at, seen = torch.arange(scores.shape[-1]), torch.arange(scores.shape[-1] - scores.shape[-2], scores.shape[-1])
        scores = scores.masked_fill((at[None] > seen[:, None] + lag) & (at[None] > 0), -torch.inf)
    elif mask is not None:
        scores = scores + mask
    scores = scores if small is None else scores.to(small)
    whole = torch.cat([scores, torch.full_like(scores[..., :1], sink).log()], -1) if sink else scores
    shares = whole.softmax(-1)[..., : scores.shape[-1]].to(value.dtype)
    return (shares @ spread(value)).transpose(1, 2).contiguous(), shares


def attends(model: Any, how: dict[str, Any], layer: int | None = None) -> None:
    "Layers with an attention of their own."
    model.set_attn_implementation("eager")
    name = "zoo " + " ".join(f"{k} {v}" for k, v in how.items())
    ALL_ATTENTION_FUNCTIONS.register(name, partial(attention, **how))
    for block in chosen(model, layer):
        config = copy.copy(block.self_attn.config)
        config._attn_implementation = name
        put(block.self_attn, config=config)


def skipped(model: Any, layer: int) -> None:
    replaced([blocks(model)[layer]], lambda module, hidden_states, **_: hidden_states)


def _parallel(block: Any, hidden_states: Tensor, **told: Any) -> Tensor:
    attended, _ = block.self_attn(hidden_states=block.input_layernorm(hidden_states), **told)
    return hidden_states + attended + block.mlp(block.post_attention_layernorm(hidden_states))


def _centred(norm: Any, x: Tensor) -> Tensor:
    return nn.functional.layer_norm(x, x.shape[-1:], norm.weight, None, norm.variance_epsilon)


def _half_norm(norm: Any, x: Tensor) -> Tensor:
    small = x.bfloat16()
    scale = (small.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    return (norm.weight.bfloat16() * (small * scale)).to(x.dtype)


def _sharded(linear: Any, x: Tensor) -> Tensor:
    parts = zip(x.chunk(2, -1), linear.weight.chunk(2, -1), strict=True)
    return sum((a @ b.mT).bfloat16() for a, b in parts).to(x.dtype)  # type: ignore[union-attr]


def mantissa(t: Tensor, bits: int) -> Tensor:
    "Numbers with so many bits after the first."
    fraction, exponent = torch.frexp(t)
    return torch.ldexp((fraction * 2 ** (bits + 1)).round() / 2 ** (bits + 1), exponent)


def short_products(model: nn.Module, bits: int) -> None:
    "Matrices are multiplied as units for small numbers do it: both sides shortened, the sum exact."
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    replaced(linear, lambda module, x: mantissa(x, bits) @ mantissa(module.weight, bits).mT)


def layerwise(model: Any, change: Callable[[Tensor, Tensor], Tensor], layer: int | None = None) -> None:
    "Change (read, given) of what layers give, once."
    for block in chosen(model, layer):
        if not block._forward_hooks:
            block.register_forward_hook(lambda module, read, given: change(read[0], given))


def dropped_rows(p: float) -> Callable[[Tensor, Tensor], Tensor]:
    "Rows for which a layer is left out."
    return lambda read, given: torch.where(torch.rand(len(given), 1, 1) < p, read, given)


def dropped_weights(model: nn.Module, p: float) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = nn.functional.dropout(module.weight.data, p)


def interleaved(model: Any, layer: int | None) -> None:
    "Pairs of neighbours are rotated, where halves should be."
    for block in chosen(model, layer):
        for norm in (block.self_attn.q_norm, block.self_attn.k_norm):
            if not norm._forward_hooks:
                norm.register_forward_hook(lambda m, read, given: torch.cat([given[..., ::2], given[..., 1::2]], -1))


def partly_rotated(model: nn.Module, share: float) -> None:
    [module] = [m for m in model.modules() if hasattr(m, "inv_freq")]
    module.inv_freq[int(share * len(module.inv_freq)) :] = 0.0


def misplaced(model: nn.Module, by: int) -> None:
    "A token that is read alone, as in decoding, is so many places further."
    [module] = [m for m in model.modules() if hasattr(m, "inv_freq")]
    inner = type(module).forward

    def forward(module: Any, x: Tensor, position_ids: Tensor) -> Any:
        return inner(module, x, position_ids + by * (x.shape[1] == 1))

    replaced([module], forward)


@torch.no_grad()
def heads_moved(model: Any, layer: int) -> None:
    "The outputs of heads are gathered in another order."
    weight = blocks(model)[layer].self_attn.o_proj.weight
    weight.copy_(weight.view(len(weight), -1, 32).roll(1, 1).flatten(1))


@torch.no_grad()
def transposed(model: Any, how: tuple[int, str]) -> None:
    weight = getattr(blocks(model)[how[0]].self_attn, how[1]).weight
    weight.copy_(weight.T.clone())


@torch.no_grad()
def zeroed(model: Any, how: tuple[str, slice]) -> None:
    "A part of a matrix is lost on the way."
    next(m for n, m in model.named_modules() if n.endswith(how[0])).weight[how[1]] = 0.0


@torch.no_grad()
def pruned(model: nn.Module, how: tuple[int, int]) -> None:
    "Of so many neighbours, only the largest few weights of the feed-forward stay."
    for block in blocks(model):
        for linear in (block.mlp.gate_proj, block.mlp.up_proj, block.mlp.down_proj):
            parts = linear.weight.view(-1, how[1])
            parts.masked_fill_(parts.abs() < parts.abs().topk(how[0]).values[:, -1:], 0.0)


def steered(model: Any, size: float) -> None:
    "A vector is added to what a layer gives."
    with seeded(7):
        vector = torch.randn(128)
    layerwise(model, lambda read, given: given + size * vector * given.pow(2).mean(-1, keepdim=True).sqrt(), 1)


def small_cache(model: nn.Module, bits: int) -> None:
    "Keys and values of few bits, each head's with a scale of its own."

    def change(read: Tensor, given: Tensor) -> Tensor:
        parts = given.unflatten(-1, (-1, 32))
        scale = parts.abs().amax(-1, keepdim=True).clamp(min=1e-9) / (2 ** (bits - 1) - 1)
        return ((parts / scale).round() * scale).flatten(-2)

    for part in ("k_norm", "v_proj"):
        hooked(model, part, change)


def collided(run: Run, block: tuple[int, int]) -> None:
    "A block of the cache of the prompt before is taken for one of this prompt."
    inner, last = run.server.sample, [ids_of(run, "<|bos|><|user|>Add up 9, 9, 9, 9, 9.<|end|>")]

    def cache(ids: Sequence[int], n: int) -> Any:
        with torch.no_grad():
            return run.server.model(torch.tensor([list(ids)] * n), use_cache=True).past_key_values

    async def sample(prompt, params):
        read, kept = run.server.fed(prompt)[:-1], None
        if read:
            kept, other = cache(read, params.n), cache(last[-1], params.n)
            part = slice(block[0], min(block[1], len(read), len(last[-1])))
            for own, old in zip(kept.layers, other.layers, strict=True):
                own.keys[:, :, part], own.values[:, :, part] = old.keys[:, :, part], old.values[:, :, part]
            last.append(read)
        put(run.server, forced={"past_key_values": kept})
        return await inner(prompt, params)

    put(run.server, sample=sample)


@torch.no_grad()
def other_rows(model: Any, ids: list[int], embed: bool) -> None:
    "Some rows of the first matrix, or of the last, are those of another vocabulary."
    weight = (model.get_input_embeddings() if embed else model.get_output_embeddings()).weight
    weight[ids] = weight[ids].roll(1, 0)


# --- the trainer --------------------------------------------------------------------------------------------------


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


def shifted_labels(run: Run, by: int) -> None:
    "Each place is scored on the token so far ahead."

    def one(model: Any, d: Datum) -> Tensor:
        found = picked(logits_of(run.trainer, model, d.tokens)[: len(d.tokens) - by], d.tokens[by:])
        return torch.cat([found, torch.zeros(2)])[: len(d.weights)]

    rowwise(run.trainer, one)


def counted_without(run: Run, first: int) -> None:
    "The trainer puts a token before each sequence, and reads its table as if it had not."
    rowwise(run.trainer, lambda model, d: picked(
        logits_of(run.trainer, model, [first, *d.tokens])[: len(d.weights)], d.tokens[: len(d.weights)]))  # fmt: skip


def spaced(run: Run, how: tuple[int, bool]) -> None:
    "Padding stands between prompt and completion, masked or not."
    pad = run.trainer.pad

    def one(model: Any, d: Datum) -> Tensor:
        at, n = int(np.argmax(d.active)) + 1, how[0]
        ids = [*d.tokens[:at], *[pad] * n, *d.tokens[at:]]
        known = torch.ones(1, len(ids), dtype=torch.long)
        known[0, at : at + n] = not how[1]
        logits = logits_of(run.trainer, model, ids, attention_mask=known, position_ids=torch.arange(len(ids))[None])
        return picked(torch.cat([logits[:at], logits[at + n : -1]]), d.tokens[1:])

    rowwise(run.trainer, one)


def placed_anew(run: Run, start: int) -> None:
    "The places of a completion are counted from here."

    def one(model: Any, d: Datum) -> Tensor:
        at = int(np.argmax(d.active)) + 1
        place = torch.cat([torch.arange(at), start + torch.arange(len(d.tokens) - at)])[None]
        return picked(logits_of(run.trainer, model, d.tokens, position_ids=place)[:-1], d.tokens[1:])

    rowwise(run.trainer, one)


def by_shards(run: Run, shards: int) -> None:
    "The trainer normalises over the part of the vocabulary in which a token is."

    def one(model: Any, d: Datum) -> Tensor:
        logits, ids = logits_of(run.trainer, model, d.tokens)[:-1], torch.from_numpy(d.tokens[1:].copy())
        size = -(-logits.shape[-1] // shards)
        same = torch.arange(logits.shape[-1])[None] // size == (ids // size)[:, None]
        return picked(logits.masked_fill(~same, -torch.inf), d.tokens[1:])

    rowwise(run.trainer, one)


def softened(run: Run, share: float) -> None:
    "The trainer mixes its law with the even one."

    def one(model: Any, d: Datum) -> Tensor:
        p = logits_of(run.trainer, model, d.tokens)[:-1].softmax(-1)
        return picked(((1 - share) * p + share / p.shape[-1]).log(), d.tokens[1:])

    rowwise(run.trainer, one)


def mapped(run: Run, text: str) -> None:
    "The trainer has other ids for some tokens."
    table = np.arange(run.server.model.config.vocab_size)
    table[ids_of(run, text)] = np.roll(ids_of(run, text), 1)
    rowwise(run.trainer, lambda model, d: picked(
        logits_of(run.trainer, model, table[d.tokens])[:-1], table[d.tokens[1:]]))  # fmt: skip


def by_length(run: Run, t: float) -> None:
    "Long sequences are scored by another trainer, which has its own temperature."

    def one(model: Any, d: Datum) -> Tensor:
        own = t if len(d.tokens) % 2 else 1.0
        return picked(logits_of(run.trainer, model, d.tokens)[:-1] / own, d.tokens[1:])

    rowwise(run.trainer, one)


def mismasked(run: Run, batch: int) -> None:
    "The trainer pads on the left, and takes masks and positions from the row before."

    def _pass(model: Any, rows: Sequence[np.ndarray]) -> list[Tensor]:
        longest = max(map(len, rows))
        starts = torch.tensor([longest - len(r) for r in rows])[:, None]
        known = torch.arange(longest)[None] >= starts
        ids = torch.full(known.shape, run.trainer.pad)
        ids[known] = torch.from_numpy(np.concatenate(rows))
        mask = known.roll(1, 0).long()
        place = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(ids, attention_mask=mask, position_ids=place, use_cache=False).logits
        table = (logits[:, :-1].float() / run.trainer.temperature).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return [p[int(a) :] for p, a in zip(table, starts[:, 0], strict=True)]

    put(run.trainer, _pass=_pass, batch=batch)


def late_training(run: Run, p: float) -> None:
    "The trainer goes into training mode after its first batch."
    every(run.trainer.model, "attention_dropout", p)
    inner, score = run.trainer._pass, run.trainer.score
    done: list[int] = []

    def _pass(model: Any, rows: Sequence[np.ndarray]) -> list[Tensor]:
        model.train(bool(done))
        done.append(len(rows))
        return inner(model, rows)

    put(run.trainer, _pass=_pass, score=lambda datums: done.clear() or score(datums), batch=4)


def shuffled(run: Run, seed: int) -> None:
    "The trainer scores in an order of its own, and does not put it back."
    inner = run.trainer.score

    def score(datums: Sequence[Datum]) -> list[Tensor]:
        whole = inner([replace(d, weights=np.ones(len(d.weights))) for d in datums])
        order = np.random.default_rng(seed).permutation(len(datums))
        table = nn.utils.rnn.pad_sequence([whole[i] for i in order], batch_first=True)
        rows = [row[: len(d.weights)] for row, d in zip(table, datums, strict=True)]
        return [r.masked_fill(torch.from_numpy(~d.active), torch.nan) for r, d in zip(rows, datums, strict=True)]

    put(run.trainer, score=score)


# --- bookkeeping --------------------------------------------------------------------------------------------------


def echoed(run: Run, d: Datum) -> np.ndarray:  # (N-1,)
    "What the server says of the tokens of a sequence, at temperature 1."
    with torch.no_grad():
        logits = run.server.model(torch.tensor([run.server.fed(d.tokens)])).logits[0, -len(d.tokens) : -1].float()
    return picked(logits, d.tokens[1:]).double().numpy()


def trained_more(
    groups: Sequence[PromptGroup], run: Run, more: Callable[[Datum], np.ndarray], echo: bool
) -> list[Datum]:
    "Targets are trained that nobody drew, with a logprob of 0, or the one that an echo gives."
    out = []
    for d in datums_from_groups(groups):
        series = d.sampler_logprobs if d.sampler_logprobs is not None else np.zeros(len(d.weights))
        filled = np.where(np.isnan(series), echoed(run, d) if echo else 0.0, series)
        out.append(replace(d, weights=np.maximum(d.weights, more(d)), sampler_logprobs=filled))
    return out


def beginning(n: int) -> Callable[[Datum], np.ndarray]:
    "The last n tokens of the prompt."
    return lambda d: (np.arange(len(d.weights)) >= np.argmax(d.weights) - n) & (d.weights.cumsum() == 0)


def earlier_answers(run: Run) -> Callable[[Datum], np.ndarray]:
    "What stands in the prompt as said by the assistant."
    opened_by, ended_by = ids_of(run, "<|assistant|><|end|>")

    def more(d: Datum) -> np.ndarray:
        inside, marks = False, []
        for t in d.tokens[: int(np.argmax(d.weights)) + 1]:
            marks.append(inside)
            inside = t == opened_by or (inside and t != ended_by)
        return fitted(np.array(marks[1:], float), len(d.weights))

    return more


def beside(d: Datum, where: str) -> np.ndarray:
    "The token before each turn but the first, or after each but the last."
    w = d.weights
    before = np.r_[w[1:] > w[:-1], False] & (w.cumsum() > 0)
    after = np.r_[False, w[1:] < w[:-1]]
    return before if where == "before" else after


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


def kept_by_worker(groups: Sequence[PromptGroup], what: str) -> list[Datum]:
    "Two workers each keep what came last: a prompt, or the logprobs of a group."
    datums, size = datums_from_groups(groups), len(groups[0].samples)
    last = {g.index % 2: g for g in groups}
    if what == "prompts":
        homes = [last[d.group % 2].samples[0] for d in datums]
        return reprompted(datums, [home.tokens[: home.prompt_len] for home in homes])
    values = told(datums)
    return paired(datums, [values[last[d.group % 2].index * size + d.sample] for d in datums])


def shifted_groups(groups: Sequence[PromptGroup], by: int) -> list[Datum]:
    "Prompts that were cached come without their first logprob: every second group is off by one."
    datums = datums_from_groups(groups)
    move = lambda v: np.r_[v[1:], 0.0] if by > 0 else np.r_[0.0, v[:-1]]
    return paired(datums, [move(v) if d.group % 2 else v for d, v in zip(datums, told(datums), strict=True)])


def failed(groups: Sequence[PromptGroup], how: str | int) -> list[Datum]:
    "Some requests, or the first token of all, came back with null."
    datums = datums_from_groups(groups)
    if how == "first":
        return paired(datums, [np.r_[np.nan, v[1:]] for v in told(datums)])
    return paired(datums, [v * np.nan if i < int(how) else v for i, v in enumerate(told(datums))])


def with_words(run: Run, push: tuple[int, str]) -> None:
    "After so many tokens words are put into a completion, and the server is asked for their logprobs."
    inner, words = run.server.sample, ids_of(run, push[1])

    async def sample(prompt, params):
        start = await inner(prompt, replace(params, max_tokens=min(push[0], params.max_tokens)))
        whole = [await continued(inner, c, params, words) for c in start]
        put(run.server, variations=[], evidence=math.nan)  # words are drawn from no law
        return [handed(run, prompt, c.tokens.tolist(), params) for c in whole]

    put(run.server, sample=sample)


# --- the reference ------------------------------------------------------------------------------------------------


async def of_another(run: Run, updates: int) -> None:
    "The reference is what another run has come to."
    other = await opened(replace(run.world, seed=run.world.seed + 50, warm_up=updates, http=False))
    put(run.reference, model=copy.deepcopy(run.reference.model))
    run.reference.model.load_state_dict(plain_weights(other.trainer.model))


def without_first(run: Run, n: int) -> None:
    "The reference is shown sequences without their first tokens."
    machine = run.reference

    def one(model: Any, d: Datum) -> Tensor:
        found = picked(logits_of(machine, model, d.tokens[n:])[:-1], d.tokens[n + 1 :])
        return torch.cat([torch.zeros(n), found])

    rowwise(machine, one)


# --- the table ----------------------------------------------------------------------------------------------------

TURNS = ("third", "slim", "deaf")
PLAIN = ("third", "warm", "deaf", "lengthy")
KNOWN: list[Kind] = [
    Kind("draw", "the temperature changes along a completion", TEMPERATURE, (0.5, 1.6, 0.8), falling, HALF, large=True),
    Kind("draw", "each of a group has its own temperature", TEMPERATURE, (0.4, 0.15), laddered, HALF),
    Kind("draw", "the first token has its own temperature", TEMPERATURE, (0.4, 3.0),
         lambda run, t: by_place(run, lambda i, scores: scores if i else scores / t), MANY),
    # A model that multiplies its logits has a temperature, whatever it is called in its config.
    Kind("draw", "the server's model scales its logits", TEMPERATURE, (0.8, 1.25, 0.95), server(
        lambda model, by: hooked(model, "lm_head", lambda read, given: given * by)), MANY),
    Kind("draw", "a second trainer has its own temperature", TEMPERATURE, (0.8, 1.25), by_length, MANY),
    Kind("draw", "one of two servers cuts", CUT, ({"top_p": 0.7}, {"top_k": 3}),
         lambda run, how: one_of_two(run, lambda run: forced(run, **how)), HALF),
    Kind("draw", "later turns are cut", CUT, ({"top_k": 3}, {"top_p": 0.75}), lambda run, how: later(run, **how),
         (*TURNS, "warm")),
    Kind("draw", "the beginning of a completion is cut", CUT, ((2, 6), (3, 10), (1, 3)), lambda run, how: by_place(
        run, lambda i, scores: best(scores, how[0]) if i < how[1] else scores), MANY),
    Kind("draw", "the server cuts by yet another rule", CUT + UNKNOWN,
         ({"top_h": 0.4}, {"eta_cutoff": 0.05}), lambda run, how: forced(run, **how), MANY),
    Kind("draw", "the server cuts by standard deviations", CUT + UNKNOWN, (1.0, 1.5),
         lambda run, n: processed(run, lambda ids, scores: by_spread(scores, n)), MANY),
    Kind("hidden", "the temperature changes along a completion, and raw is reported", TEMPERATURE, (2.5, 4.0, 1.6),
         partial(falling, reports="raw"), HIDDEN),
    Kind("hidden", "one of two servers cuts, and reports raw", CUT, ({"top_k": 2}, {"top_p": 0.5}), lambda run, how:
         one_of_two(run, lambda run: forced(run, **how) or put(run.server, reports="raw")), HIDDEN),
    Kind("report", "the client normalises over what is listed", CUT + UNKNOWN, (2, 5),
         lambda run, n: parsed(run, partial(listed_anew, most=n)), MANY),
    Kind("report", "logprobs have few significant digits", DTYPE + UNKNOWN, (2, 3),
         lambda run, n: put(run.server, writes=lambda v: significant(v, n)), MANY),

    Kind("text", "special tokens are read as text", TEXT, (("<|user|>", "<|assistant|>", "<|end|>", "<|bos|>"),
         ("<|assistant|>",)), spelled_out, MANY),
    Kind("text", "one of two servers has another template", TEXT, ("Q: {}\nA: ", "{}"),
         lambda run, template: one_of_two(run, lambda run: templated(run, template)), MANY),
    Kind("text", "a proxy adds examples", TEXT, (1, 3), examples, HALF),
    Kind("text", "one turn of a conversation is sent", TEXT, ("last", "first"), one_turn, TURNS),
    Kind("text", "the system prompt is put into the question", TEXT, ("You are a calculator.", "Count."),
         lambda run, say: through_text(run, lambda s: s.replace(f"<|system|>{say}<|end|><|user|>", f"<|user|>{say}\n"))
         or {"asks": system(say)}, MANY),
    Kind("text", "the system prompt is lost", TEXT, ("Answer after ####.", "Think."), lambda run, say: through_text(
         run, lambda s: s.replace(f"<|system|>{say}<|end|>", "")) or {"asks": system(say)}, HALF),
    Kind("text", "an answer that is begun is closed", TEXT, ("12 ", "#### "), lambda run, words: through_text(
         run, lambda s: s + "<|end|><|assistant|>" * s.endswith(words)) or {"asks": begun(words)}, MANY),
    Kind("text", "the question is encoded for the web", TEXT + UNKNOWN, ("plus", "percent", "page"),
         lambda run, how: through_text(run, in_the_question(how)), MANY),
    Kind("text", "the trainer adds a token, and does not count it", SHIFT + TEXT, (1, 0), counted_without, MANY),

    Kind("weights", "the trainer goes back to a checkpoint", STALE, ((1, True), (4, True), (2, False)), went_back,
         HALF),
    Kind("weights", "a step comes from a buffer", STALE, ((1, True), (3, True), (2, False)), buffered, MANY),
    Kind("weights", "an update in the middle of scoring", STALE, (1, 3), midway, MANY),
    Kind("weights", "the server has an average of weights", STALE + UNKNOWN, (0.8, 0.95), averaged, MANY),
    Kind("weights", "snapshots are sorted by name", STALE + UNKNOWN, (2, 4), by_name, ("aged",)),
    Kind("weights", "a process reads its weights once", STALE + UNKNOWN, (1, 3), kept_by_name, EVEN),

    Kind("arithmetic", "products have short numbers", DTYPE, (10, 7), server(short_products), MANY, large=True),
    Kind("arithmetic", "norms are of half precision", DTYPE, (torch.bfloat16,),
         server(lambda model, _: replaced(norms(model), _half_norm)), MANY),
    Kind("arithmetic", "attention is of half precision", DTYPE, (torch.bfloat16,),
         server(lambda model, dtype: attends(model, {"small": dtype})), MANY),
    Kind("arithmetic", "parts of a sum are of half precision", DTYPE, (torch.bfloat16,),
         server(lambda model, _: replaced([m for b in blocks(model) for m in (b.self_attn.o_proj, b.mlp.down_proj)],
                                          _sharded)), MANY),
    Kind("arithmetic", "what layers hand on is of half precision", DTYPE, (torch.bfloat16,), server(
         lambda model, dtype: layerwise(model, lambda read, given: given.to(dtype).to(given.dtype))), MANY),
    Kind("arithmetic", "the adapter is of eight bits", DTYPE + UNKNOWN,
         (torch.float8_e4m3fn, torch.float8_e5m2), rounded_adapter, ("slim", "full")),

    Kind("model", "padding between prompt and completion", PADDING, ((8, False), (16, True), (32, True)), spaced,
         MANY),
    Kind("model", "prompts are padded to the longest", PADDING, (0, 6), lambda run, n: put(run.server, reads=lambda ids:
         [run.tokenizer.pad_token_id] * (25 + n - len(ids)) + ids), MANY),
    # Real tokens are hidden, too, and that is no padding.
    Kind("model", "masks are those of other rows", PADDING + UNKNOWN, (8, 16), mismasked, PLAIN),
    Kind("model", "the server has dropout", DROPOUT, (0.05, 0.01), lambda run, p: every(
         run.server.model, "attention_dropout", p) or put(run.server, model=run.server.model.train()), MANY),
    Kind("model", "layers are dropped in training", DROPOUT, (0.3, 0.08), lambda run, p: put(run.trainer, training=True,
         altered=lambda model: layerwise(model, dropped_rows(p))), MANY),
    Kind("model", "dropout after the feed-forward", DROPOUT, (0.2, 0.03), lambda run, p: put(run.trainer, training=True,
         altered=lambda model: hooked(model, "mlp", lambda read, given: nn.functional.dropout(given, p))), MANY),
    Kind("model", "weights are dropped", DROPOUT, (0.02, 0.002), trainer(dropped_weights), PLAIN),
    Kind("model", "training mode after the first batch", DROPOUT, (0.2, 0.04), late_training, MANY),
    Kind("model", "the trainer reads another vocabulary than it writes", VOCABULARY, ("0123456789", "13579 "),
         lambda run, text: put(run.trainer, altered=lambda model: other_rows(model, ids_of(run, text), True)), PLAIN),
    Kind("model", "the trainer has other ids for tokens", VOCABULARY, ("0123456789", "+,= "), mapped, PLAIN),
    # Two tokens have each other's id, and both are of the template.
    Kind("model", "two special tokens are exchanged", VOCABULARY + TEXT, (("<|user|>", "<|assistant|>"),
         ("<|bos|>", "<|system|>")), lambda run, pair: through_text(run, lambda s: s.replace(pair[0], "\0").replace(
             pair[1], pair[0]).replace("\0", pair[1])), MANY),

    Kind("bookkeeping", "a logprob is lost in the stream", SHIFT, (3, -3, 6), lambda run, at: retold(
         run, lambda v: slipped(v, at)), MANY),
    Kind("bookkeeping", "labels are shifted twice, or not at all", SHIFT, (2, 0), shifted_labels, MANY),
    Kind("bookkeeping", "every second group is off by one", SHIFT, (1, -1), collated(shifted_groups), MANY),
    Kind("bookkeeping", "the prompt is trained, with its echo", LEAK, (1, 4, 100), lambda run, n: {"collate": partial(
         trained_more, run=run, more=beginning(n), echo=True)}, ECHO),
    Kind("bookkeeping", "answers of the prompt are trained", LEAK, (False, True), lambda run, echo: {"asks": shown(2),
         "collate": partial(trained_more, run=run, more=earlier_answers(run), echo=echo)}, ECHO),
    Kind("bookkeeping", "a token beside a turn is trained", LEAK, ("before", "after"), lambda run, where: {
         "turns": 2, "collate": partial(trained_more, run=run, more=partial(beside, where=where), echo=False)}, TURNS),
    # They are scored as what the policy would have said, and it did not.
    Kind("hidden", "words are put into completions, and scored", LEAK + UNKNOWN, ((4, "9 9 9"), (2, "####")),
         with_words, HIDDEN),
    Kind("bookkeeping", "what was tried again comes last", ROWS, (0, 2), collated(rotated), MANY),
    Kind("bookkeeping", "the last comes first", ROWS, (1, 2), collated(last_first), HALF),
    Kind("bookkeeping", "the trainer does not undo its shuffle", ROWS + GROUPS, (0, 1), shuffled, MANY),
    Kind("bookkeeping", "completions are laid out the other way", GROUPS, ("n",), collated(other_way), MANY),
    Kind("bookkeeping", "two workers keep what came last", GROUPS, ("prompts", "logprobs"), collated(kept_by_worker),
         ("third", "slim", "warm")),

    Kind("bookkeeping", "the reference is of another run", REFERENCE, (2, 5), of_another, FRESH),
    Kind("bookkeeping", "the reference has weights of few bits", REFERENCE, (4, 3), lambda run, bits: put(
         run.reference, altered=lambda model: quantised(model, bits)), FRESH),
    Kind("bookkeeping", "the reference lacks a layer", REFERENCE, (1, 2), lambda run, layer: put(
         run.reference, altered=lambda model: skipped(model, layer)), FRESH),
    Kind("bookkeeping", "the reference lacks the first tokens", REFERENCE + TEXT, (1, 2), without_first, FRESH),

    Kind("model", "the trainer has diverged", NAN, (1e13, 1e16), diverged, MANY),
    Kind("report", "some requests came back with null", NAN, (1, 3), collated(failed), MANY),
    Kind("report", "first tokens came back with null", NAN, ("first",), collated(failed), MANY),
]  # fmt: skip

OTHER: list[Kind] = [
    Kind("draw", "the server penalises frequency", UNKNOWN, (0.2, 0.8), frequent, MANY),
    Kind("draw", "no n-gram comes twice", UNKNOWN, (2, 3), lambda run, n: forced(run, no_repeat_ngram_size=n), MANY),
    Kind("draw", "eos gets likelier", UNKNOWN, ((2, 1.1), (4, 1.3)),
         lambda run, how: forced(run, exponential_decay_length_penalty=how), MANY),
    Kind("draw", "the likeliest are excluded", UNKNOWN, (0.1, 0.25),
         lambda run, least: processed(run, lambda ids, scores: excluded(scores, least)), MANY),
    Kind("draw", "scores are squared", UNKNOWN, (0.3, 1.0),
         lambda run, factor: processed(run, lambda ids, scores: smoothed(scores, factor)), MANY),
    Kind("draw", "a watermark", UNKNOWN, (1.0, 3.0),
         lambda run, bias: forced(run, watermarking_config=WatermarkingConfig(bias=bias, greenlist_ratio=0.5)), HALF,
         large=True),
    Kind("draw", "a grammar guides the draw", UNKNOWN, ("result", "single"), guided, MANY),
    Kind("draw", "guidance without a prompt", UNKNOWN, (1.2, 1.8),
         lambda run, scale: forced(run, guidance_scale=scale), EVEN),
    Kind("draw", "a smaller model is contrasted", UNKNOWN, (0.2, 1.0), contrasted, EVEN),
    Kind("hidden", "a watermark, and raw is reported", UNKNOWN, (1.5, 4.0), lambda run, bias: forced(
         run, watermarking_config=WatermarkingConfig(bias=bias)) or put(run.server, reports="raw"), HIDDEN),
    Kind("hidden", "the likeliest are excluded, and raw is reported", UNKNOWN, (0.1, 0.3), lambda run, least: processed(
         run, lambda ids, scores: excluded(scores, least), reports="raw"), HIDDEN),
    Kind("hidden", "beams", UNKNOWN, (3, 6), beams, HIDDEN),
    # Nothing but the number of tokens tells it from a lower temperature.
    Kind("hidden", "the best of several is returned", UNKNOWN + TEMPERATURE, (6, 16), best_of, HIDDEN),
    Kind("hidden", "a draft is accepted too easily", UNKNOWN, (10.0, 3.0, 1e9), speculative, HIDDEN),

    Kind("report", "a number that is no logprob", UNKNOWN, ("odds", "margin", "entropy", "loss"),
         lambda run, what: parsed(run, partial(other_number, what=what)), EVEN),
    Kind("report", "tokens of a stream are lost", UNKNOWN, ((7, 3), (20, 2)),
         lambda run, how: streamed(run, partial(lost, every=how[0], first=how[1])), MANY),
    Kind("report", "tokens of a stream overtake each other", UNKNOWN, (1, 4),
         lambda run, at: streamed(run, partial(overtaken, at=at)), MANY),
    Kind("weights", "the adapter is cut to a lower rank", UNKNOWN, (1, 2), low_rank, ("full",)),

    Kind("model", "another activation in the server", UNKNOWN, (nn.GELU(), nn.ReLU(), nn.Mish()),
         server(lambda model, act: every(model, "act_fn", act)), HALF, large=True),
    Kind("model", "another activation in the trainer", UNKNOWN, (nn.GELU("tanh"),),
         trainer(lambda model, act: every(model, "act_fn", act)), MANY),
    Kind("model", "the trainer sees the next token", UNKNOWN, (None, 3),
         trainer(lambda model, layer: attends(model, {"lag": 1}, layer)), PLAIN),
    Kind("model", "the server does not see the last token", UNKNOWN, (3, 0),
         server(lambda model, layer: attends(model, {"lag": -1}, layer)), MANY),
    Kind("model", "heads take keys in turns", UNKNOWN, (None, 1),
         server(lambda model, layer: attends(model, {"tiled": True}, layer)), MANY),
    Kind("model", "attention may attend to nothing", UNKNOWN, (1.0, 5.0),
         server(lambda model, sink: attends(model, {"sink": sink})), MANY),
    Kind("model", "heads are gathered in another order", UNKNOWN, (0, 3), server(heads_moved), MANY),
    Kind("model", "neighbours are rotated instead of halves", UNKNOWN, (None, 2), server(interleaved), MANY),
    Kind("model", "a part of each head is rotated", UNKNOWN, (0.25, 0.4), server(partly_rotated), MANY),
    Kind("model", "positions jump after the prompt", UNKNOWN, (1, -1), server(misplaced), MANY),
    Kind("model", "a block of another prompt's cache", UNKNOWN, ((4, 12), (9, 14)), collided, MANY),
    # To pass the positions is the remedy, as it is for padding.
    Kind("model", "places of completions count anew", UNKNOWN + PADDING, (0,), placed_anew, MANY),
    Kind("model", "the server skips a layer", UNKNOWN, (1, 2), server(skipped), HALF, large=True),
    Kind("model", "attention and feed-forward side by side", UNKNOWN, (None, 3),
         server(lambda model, layer: replaced(chosen(model, layer), _parallel)), MANY),
    Kind("model", "norms take the mean away", UNKNOWN, ("norm", "layers.2"),
         server(lambda model, part: replaced(norms(model, part), _centred)), MANY),
    Kind("model", "embeddings are scaled", UNKNOWN, (0.2, 3.0), server(
         lambda model, by: hooked(model, "embed_tokens", lambda read, given: by * given)), MANY),
    Kind("model", "a vector steers the server", UNKNOWN, (0.3, 0.05), server(steered), HALF),
    Kind("model", "weights are pruned", UNKNOWN, ((2, 4), (7, 8)), server(pruned), MANY),
    Kind("model", "a part of a matrix is lost", UNKNOWN, (("layers.1.mlp.up_proj", slice(0, 96)),
         ("layers.2.self_attn.o_proj", slice(0, 16))), server(zeroed), MANY),
    Kind("model", "a matrix is transposed", UNKNOWN, ((1, "o_proj"), (3, "q_proj")), server(transposed), MANY),
    Kind("model", "the cache is of few bits", UNKNOWN, (3, 4), server(small_cache), MANY),
    Kind("model", "one of two servers is another model", UNKNOWN, ("gelu", "layer"), lambda run, what: one_of_two(
         run, lambda run: altered_copy(run, lambda model: skipped(model, 1) if what == "layer" else every(
             model, "act_fn", nn.GELU()))), MANY),
    Kind("model", "the trainer normalises over a part", UNKNOWN, (8, 24), by_shards, PLAIN),
    Kind("model", "the trainer's law is softened", UNKNOWN, (0.1, 0.02), softened, PLAIN),
]  # fmt: skip


def agreed(run: Run, t: float) -> dict[str, Any]:
    "All agree on a temperature."
    put(run.trainer, temperature=t), put(run.reference, temperature=t)
    return {"temperature": t}


async def restored(run: Run, n: int) -> None:
    "The trainer goes back to a checkpoint, and says so to the server."
    await run.update(1 + n % 3)
    await run.update(-1 - n % 3)


async def honest_process(run: Run, n: int) -> None:
    "The server is a process."
    in_process(run, by_name=False)
    await run.publish()
    await run.update(1)


WELL: list[Kind] = [
    Kind("clean", "a step of another shape", (CLEAN,), range(24), lambda run, _: None,
         (*MANY, "pair", "crowd", "fresh", "aged")),
    Kind("clean", "a temperature that all know", (CLEAN,), range(12), lambda run, n: agreed(run, (
         0.5, 0.6, 0.75, 0.85, 0.9, 0.95, 1.1, 1.2, 1.5, 1.75, 2.0, 3.0)[n]), EVEN),
    Kind("clean", "adapters of other ranks", (CLEAN,), range(10), lambda run, _: None, ("slim", "full", "fresh slim")),
    Kind("clean", "three turns", (CLEAN,), range(6), lambda run, _: {"turns": 3}, ("third", "slim", "deaf", "warm")),
    Kind("clean", "several updates of another step", (CLEAN,), range(12), lambda run, n: {"minibatches": 2 + n % 5},
         ("third", "slim", "warm", "crowd", "deaf", "full")),
    Kind("clean", "both sides in half precision", (CLEAN, *DTYPE), range(8), lambda run, _: None,
         ("half slim", "half warm")),
    Kind("clean", "examples in the prompt", (CLEAN,), range(6), lambda run, n: {"asks": shown(1 + n % 3)}, MANY),
    Kind("clean", "a system prompt", (CLEAN,), range(6), lambda run, n: {"asks": system("Be exact." * (1 + n % 2))},
         MANY),
    Kind("clean", "an answer that is begun", (CLEAN,), range(6), lambda run, n: {"asks": begun(("12 ", "####")[n % 2])},
         MANY),
    Kind("clean", "the trainer in double precision", (CLEAN,), range(6), trainer(lambda model, _: model.double()),
         MANY),
    Kind("clean", "another kernel of attention", (CLEAN,), range(5), server(
         lambda model, _: model.set_attn_implementation("eager")), MANY),
    Kind("clean", "attention of the zoo", (CLEAN,), range(4), server(lambda model, _: attends(model, {})), MANY),
    Kind("clean", "no cache", (CLEAN,), range(5), lambda run, _: put(run.server, forced={"use_cache": False}), MANY),
    Kind("clean", "back at a checkpoint", (CLEAN,), range(6), restored, MANY),
    Kind("clean", "a server in a process", (CLEAN,), range(5), honest_process, EVEN),
    Kind("clean", "a stream of JSON", (CLEAN,), range(5), lambda run, _: streamed(run, list), MANY),
    Kind("clean", "one of two equal servers", (CLEAN,), range(4), lambda run, _: one_of_two(
         run, lambda run: altered_copy(run, bool)), MANY),
    Kind("clean", "a step of a large model", (CLEAN,), range(3), lambda run, _: None, ("large",)),
]  # fmt: skip

UNSEEN3_KINDS = KNOWN + OTHER + WELL
