"""Still more faults for the doctor by somebody who has not read it: kinds that no other part has, many of real reports.

Do not open this file while you improve the doctor. Once its answers were looked at, it belongs to `build`.

What is right was decided by the rules of `unseen4`, before any answer was seen: a cause is right if its remedy in
`causes.FIXES` ends the fault. Where the weights are old and another sync does not end it, `NONE` is right, too. A law
that keeps a beginning of the ranking, but is no top-p and no top-k, may be called by their name or by none. A mask or
positions that hide or move what is no padding may be called by the name of padding or by none."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rl_notebook.core import Completion, Datum, PromptGroup, SampleParams
from rl_notebook.data import load_rows
from rl_notebook.datums import datums_from_groups
from rl_notebook.rollouts import Prompt, Rollouts, draw_completions, encode_rows
from rl_notebook.toy import toy_rows

from .faults import (
    CLEAN, CUT, DROPOUT, DTYPE, LEAK, PADDING, SHIFT, STALE, TEMPERATURE, TEXT, UNKNOWN, WORLDS, Kind, every,
    forced, paired, put, reordered, reprompted, through_text, told, weighed,
)  # fmt: skip
from .machines import cast, plain_weights, seeded
from .steps import Run, World
from .unseen import (
    GROUPS, NAN, REFERENCE, ROWS, VOCABULARY, alternatives, collated, continued, hooked, ids_of, processed,
    retold, server, trainer,
)  # fmt: skip
from .unseen3 import (
    SHOTS, agreed, altered_copy, best, blocks, by_place, chosen, logits_of, norms, one_of_two, picked, replaced,
    rowwise, shown, skipped, system,
)  # fmt: skip
from .unseen4 import in_order, kept, nucleus, sees, with_attention, with_ids

WORLDS |= {
    "brisk": World(temperature=0.9, completions=6),
    "torrid": World(temperature=1.8, prompts=3, max_tokens=28),
    "blank": World(can_echo=False, prompts=3, completions=7, warm_up=4),
    "frugal": World(lora_rank=6, learning_rate=1.2e-3, completions=5),
    "broad": World(prompts=6, max_tokens=32),
    "mellow": World(warm_up=4, learning_rate=2e-5, completions=5),
    "bold": World(lora_rank=8, learning_rate=3e-3),
    "half brisk": World(dtype="bfloat16", temperature=0.9),
    "half frugal": World(dtype="bfloat16", lora_rank=6, learning_rate=1.2e-3),
    "nascent": World(warm_up=0, completions=5),
    "nascent brisk": World(warm_up=0, temperature=0.9, prompts=3),
    "nascent frugal": World(warm_up=0, lora_rank=6, learning_rate=1.2e-3),
    "blank torrid": World(can_echo=False, temperature=1.8),
    "hall": World(prompts=8, completions=9, max_tokens=26),
    "hall frugal": World(prompts=8, completions=8, lora_rank=6, learning_rate=1.2e-3),
    "hall blank": World(prompts=7, completions=11, can_echo=False),
    "twins": World(prompts=9, completions=2),
    "still": World(learning_rate=0.0),
}
SOME = ("brisk", "blank", "frugal", "broad", "torrid", "mellow")  # taken in turns
EVEN = ("blank", "frugal", "broad", "mellow")  # at temperature 1
TEMPERED = ("brisk", "torrid", "blank torrid")
HALVES = (*SOME, "half brisk", "half frugal")
HIDDEN = ("hall", "hall frugal", "hall blank")  # at temperature 1, with many tokens
NASCENT = ("nascent", "nascent brisk", "nascent frugal")
ADAPTED = ("frugal", "bold")


# --- the draw -----------------------------------------------------------------------------------------------------


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


def undivided(run: Run, updates: int) -> dict[str, Any]:
    "The pass with gradients takes logits as they are: huggingface/trl#4159."
    inner = run.trainer._pass

    def _pass(model: Any, rows: Sequence[np.ndarray]) -> list[Tensor]:
        usual = run.trainer.temperature
        put(run.trainer, temperature=1.0)
        try:
            return inner(model, rows)
        finally:
            put(run.trainer, temperature=usual)

    in_the_loss(run, _pass=_pass)
    return {"minibatches": updates}


def divided_logprobs(run: Run, where: str) -> None:
    "Logprobs, and not logits, are divided by the temperature."
    t = run.world.temperature
    if where == "server":
        return put(run.server, says=lambda c: replace(c, sampling_logprobs=c.logprobs / t))
    return rowwise(
        run.trainer, lambda model, d: picked(t * logits_of(run.trainer, model, d.tokens)[:-1], d.tokens[1:]) / t
    )


def at_first(run: Run, how: tuple[float, int]) -> None:
    "The first requests keep what an evaluation was asked with: EvolvingLMMs-Lab/lmms-eval#1325."
    inner, asked = run.server.sample, itertools.count()

    async def sample(prompt, params):
        early = next(asked) < how[1]
        forced(run, **({"temperature": how[0]} if early else {}))
        put(run.server, reports="processed" if early else "both")
        return await inner(prompt, params)

    put(run.server, sample=sample)


def after_mark(run: Run, t: float) -> None:
    "What follows the mark of an answer has a temperature of its own."
    [mark] = ids_of(run, "####")
    with_ids(run, lambda i, scores, ids: torch.where(
        (ids[:, ids.shape[1] - i :] == mark).any(1, keepdim=True), scores / t, scores))  # fmt: skip


def of_a_slot(run: Run, rows: int, change: Callable[[Tensor], Tensor]) -> None:
    "Some rows of a batch keep what another request asked for: vllm-project/vllm#14301."
    processed(run, lambda ids, scores: torch.cat([change(scores[:rows]), scores[rows:]]), reports="raw")


def replayed(run: Run, p: float) -> None:
    "The trainer normalises over a nucleus that the server did not draw from: huggingface/trl#7269."

    def one(model: Any, d: Datum) -> Tensor:
        logits, ids = logits_of(run.trainer, model, d.tokens)[:-1], torch.from_numpy(d.tokens[1:].copy())[:, None]
        inside = torch.isfinite(nucleus(logits.detach(), p)).scatter(1, ids, True)
        return picked(logits.masked_fill(~inside, -torch.inf), d.tokens[1:])

    rowwise(run.trainer, one)


def mirostat(run: Run, how: tuple[float, float]) -> None:
    "What would surprise too much is cut off, by a bound that follows what was drawn: https://arxiv.org/abs/2007.14966"
    target, rate = how
    state: dict[str, Tensor] = {}

    def change(i: int, scores: Tensor, ids: Tensor) -> Tensor:
        if i == 0 or len(state["bound"]) != len(scores):
            state["bound"] = torch.full((len(scores), 1), 2 * target)
        else:
            surprise = -state["law"].gather(1, ids[:, -1:]).clamp(min=-50)
            state["bound"] = state["bound"] - rate * (surprise - target)
        cut = kept(scores, -scores.float().log_softmax(-1) / math.log(2) < state["bound"])
        state["law"] = cut.float().log_softmax(-1) / math.log(2)
        return cut

    with_ids(run, change)


def where_sure(scores: Tensor, sure: float) -> Tensor:
    "Greedy where the best has such a share."
    return torch.where(scores.float().softmax(-1).amax(-1, keepdim=True) > sure, best(scores, 1), scores)


def apart(run: Run, by: float, **fields: Any) -> None:
    "The rows of a batch keep off what the others drew last."

    def change(i: int, scores: Tensor, ids: Tensor) -> Tensor:
        if not i:
            return scores
        drawn = nn.functional.one_hot(ids[:, -1], scores.shape[-1])
        return scores - by * ((drawn.sum(0, keepdim=True) - drawn) > 0)

    with_ids(run, change, **fields)


def voted(run: Run, share: float, **fields: Any) -> None:
    "A smaller model has a vote."
    other = copy.deepcopy(run.server.model)
    skipped(other, 2)

    def change(ids: Tensor, scores: Tensor) -> Tensor:
        with torch.no_grad():
            law = other(ids, use_cache=False).logits[:, -1].float().softmax(-1)
        return ((1 - share) * scores.float().softmax(-1) + share * law).log()

    processed(run, change, **fields)


def rewarded(run: Run, by: float) -> None:
    "A reward for each token guides the draw."
    with_ids(run, lambda i, scores, ids: scores + by * (torch.arange(scores.shape[-1]) % 2 == i % 2))


def evenly_begun(run: Run, k: int) -> None:
    "So that completions differ, their first token is any of the k likeliest."
    begin = lambda scores: torch.where(torch.isfinite(best(scores, k)), 0.0, -torch.inf)
    by_place(run, lambda i, scores: scores if i else begin(scores), reports="raw")


# --- what is told of it -------------------------------------------------------------------------------------------


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


def rejected_stay(run: Run, every_nth: int) -> None:
    "Tokens of a draft that were refused stay in the cache: vllm-project/vllm#9730."

    async def sample(prompt, params):
        read, t = torch.tensor([[int(i) for i in prompt]] * params.n), params.temperature
        drawn, series = [], []
        with torch.no_grad(), seeded(params.seed):
            for i in range(params.max_tokens):
                logits = run.server.model(read, use_cache=False).logits[:, -1].float()
                laws = [(logits / by).log_softmax(-1) for by in (1.0, t)]
                token, refused = laws[1].exp().multinomial(1), logits.topk(2).indices[:, 1:]
                drawn.append(token), series.append([law.gather(1, token) for law in laws])
                read = torch.cat([read, refused, token] if i % every_nth == every_nth - 1 else [read, token], 1)
        rows, eos = torch.cat(drawn, 1).tolist(), run.tokenizer.eos_token_id
        raw, own = (torch.cat(part, 1).double().numpy() for part in zip(*series, strict=True))
        ends = [row.index(eos) + 1 if eos in row else len(row) for row in rows]
        text = [run.tokenizer.decode(row[:n], skip_special_tokens=True) for row, n in zip(rows, ends, strict=True)]
        return [
            Completion(np.array(prompt), np.array(row[:n]), a[:n], b[:n], said, "stop" if eos in row else "length",
                       run.server.version, params)
            for row, n, a, b, said in zip(rows, ends, raw, own, text, strict=True)
        ]  # fmt: skip

    put(run.server, sample=sample)


def resumed(run: Run, n: int) -> None:
    "A completion that was interrupted goes on as if its last token had not been drawn."
    inner = run.server.sample
    forgetful = lambda ids, params: inner(ids[:-1], params)

    async def sample(prompt, params):
        begun = await inner(prompt, replace(params, max_tokens=min(n, params.max_tokens)))
        return [await continued(forgetful, c, params) for c in begun]

    put(run.server, sample=sample)


# --- text ---------------------------------------------------------------------------------------------------------

TOOL = {"name": "add", "args": {"second": "int", "first": "int"}}
COMPACT = partial(json.dumps, separators=(",", ":"))
WRITTEN = {"spaces": json.dumps(TOOL), "sorted": COMPACT(TOOL, sort_keys=True)}


def other_order(run: Run, n: int) -> dict[str, Any]:
    "The server puts examples in another order."
    parts = [f"<|user|>{q}<|end|><|assistant|>{a}<|end|>" for q, a in SHOTS[:n]]
    through_text(run, lambda s: s.replace("".join(parts), "".join(parts[::-1])))
    return {"asks": shown(n)}


def tool_schema(run: Run, how: str) -> dict[str, Any]:
    "Two templates write the same schema of a tool."
    through_text(run, lambda s: s.replace(COMPACT(TOOL), WRITTEN[how]))
    return {"asks": system(COMPACT(TOOL))}


def placeholder(run: Run, n: int) -> dict[str, Any]:
    "The server puts n tokens in the place of one picture, the trainer one."
    through_text(run, lambda s: s.replace("@", "@" * n))
    return {"asks": lambda rows: [r | {"question": f"@ {r['question']}"} for r in rows]}


def flattened(run: Run, line: str) -> dict[str, Any]:
    "A proxy makes one message of a conversation."

    def one(s: str) -> str:
        said = re.findall(r"<\|(user|assistant)\|>([^<]+)", s)
        return f"<|bos|><|user|>{''.join(line.format(*pair) for pair in said)}<|end|><|assistant|>"

    through_text(run, one)
    return {"turns": 2}


# --- weights ------------------------------------------------------------------------------------------------------


def restarted(run: Run, after: int) -> None:
    "After so many requests the server fails, and comes back with the weights of its checkpoint."
    inner, asked = run.server.sample, itertools.count()

    async def sample(prompt, params):
        if next(asked) == after:
            run.server.load(run.sync.base)
        return await inner(prompt, params)

    put(run.server, sample=sample)


async def known_by_id(run: Run, updates: int) -> None:
    "The server holds an adapter under an id, and does not load what comes under the same: vllm-project/vllm#42125."
    put(run.server, model=copy.deepcopy(run.trainer.model).eval(), load=lambda new: None)
    await run.update(updates)


def in_decoding(model: nn.Module, step: Callable[..., Any]) -> None:
    "What a model does with single tokens."
    inner = model.forward

    @functools.wraps(inner)
    def forward(*args: Any, **given: Any) -> Any:
        ids = args[0] if args else given["input_ids"]
        return (step if ids.shape[1] == 1 else inner)(*args, **given)

    put(model, forward=forward)


async def captured(run: Run, updates: int) -> None:
    "A captured graph of decoding keeps the buffers of old weights: NovaSky-AI/SkyRL#2129."
    earlier = copy.deepcopy(run.server.model)
    await run.update(updates)
    in_decoding(run.server.model, earlier.forward)


async def woken(run: Run, updates: int) -> None:
    "A server is synced while it sleeps, and wakes with what it fell asleep with: huggingface/trl#5312."
    load, inner, asleep = run.server.load, run.server.sample, list[Mapping[str, Tensor]]()

    def asleep_load(new: Mapping[str, Tensor]) -> None:
        asleep.append({n: t.clone() for n, t in run.server.model.state_dict().items()})
        load(new)

    async def sample(prompt, params):
        if asleep:
            load(asleep[0]), asleep.clear()
        return await inner(prompt, params)

    put(run.server, load=asleep_load, sample=sample)
    await run.update(updates)


async def change_lost(run: Run, which: int) -> None:
    "Syncs send changes, and one of them does not arrive."
    load, last, number = run.server.load, plain_weights(run.trainer.model), itertools.count(1)

    def add(new: Mapping[str, Tensor]) -> None:
        change = {n: t - last[n] for n, t in new.items()}
        last.update({n: t.clone() for n, t in new.items()})
        if next(number) != which:
            load({n: t.float() + change[n] for n, t in run.server.model.state_dict().items() if n in change})

    put(run.server, load=add)
    for _ in range(3):
        await run.update()


async def other_modules(run: Run, part: str) -> None:
    "What an adapter changes is added to another matrix of the same shape: vllm-project/vllm#34186."
    base, load, (own, into) = run.sync.base, run.server.load, part.split(">")

    def misnamed(new: Mapping[str, Tensor]) -> None:
        change = {n: t - base[n] for n, t in new.items()}
        other = {n: n.replace(own, into) for n in new if own in n}
        out = dict(new) | {n: base[n] for n in other}
        load(out | {to: out[to] + change[n] for n, to in other.items()})

    put(run.server, load=misnamed)
    await run.update(2)


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


# --- models -------------------------------------------------------------------------------------------------------

Shares = Callable[[Tensor, Tensor, Tensor], Tensor]  # scores (B, H, T, S), places of queries and keys -> shares


def shared(model: Any, shares: Shares, layer: int | None = None) -> None:
    "Attention that makes shares of scores in its own way."

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **_: Any) -> Any:
        whole, new, n = key.shape[-2], query.shape[-2], query.shape[1] // key.shape[1]
        at = torch.arange(whole)
        queries, keys = at[whole - new :, None], at[None]
        bias = torch.zeros(new, whole).masked_fill(keys > queries, torch.finfo(torch.float32).min)
        bias = bias if mask is None else torch.minimum(bias, mask.float())
        scores = (query @ key.repeat_interleave(n, 1).mT * module.scaling).float() + bias
        found = shares(scores, queries, keys).to(value.dtype)
        return (found @ value.repeat_interleave(n, 1)).transpose(1, 2).contiguous(), found

    with_attention(model, attend, layer)


def sparse(scores: Tensor, queries: Tensor, keys: Tensor, k: int) -> Tensor:
    "Shares of the best keys only, as in sparse attention."
    least = scores.topk(min(k, scores.shape[-1])).values[..., -1:]
    return scores.masked_fill(scores < least, -torch.inf).softmax(-1)


def counted_twice(scores: Tensor, queries: Tensor, keys: Tensor, n: int) -> Tensor:
    "A beginning that requests share is counted once for all, and once for each: vllm-project/vllm#17652."
    return (scores + math.log(2) * ((keys < n) & (queries >= n))).softmax(-1)


def unused_places(scores: Tensor, queries: Tensor, keys: Tensor, block: int) -> Tensor:
    "The places of the last block that are still empty have a share."
    whole = scores.shape[-1]
    return nn.functional.pad(scores, (0, -whole % block)).softmax(-1)[..., :whole]


def fast(scores: Tensor, queries: Tensor, keys: Tensor, share: float) -> Tensor:
    "Powers of 2 between whole ones are on a straight line, or on the way there."
    far = (scores - scores.amax(-1, keepdim=True)).clamp(min=-80) / math.log(2)
    line = torch.exp2(far.floor()) * (1 + far - far.floor())
    found = torch.lerp(torch.exp2(far), line, share).masked_fill(keys > queries, 0.0)
    return found / found.sum(-1, keepdim=True)


def of_long(scores: Tensor, queries: Tensor, keys: Tensor, n: int) -> Tensor:
    "Scores of far queries are larger, as in the first Qwen."
    return (scores * (torch.log(queries + 1.0) / math.log(n)).clamp(min=1.0)).softmax(-1)


def short_floats(model: nn.Module, dtype: torch.dtype) -> None:
    "Products of floats of eight bits, each 32 with a scale of their own."

    def short(t: Tensor) -> Tensor:
        parts = t.unflatten(-1, (-1, 32))
        scale = parts.abs().amax(-1, keepdim=True).clamp(min=1e-9) / torch.finfo(dtype).max
        return ((parts / scale).to(dtype).to(t.dtype) * scale).flatten(-2)

    linear = [m for n, m in model.named_modules() if isinstance(m, nn.Linear) and "lm_head" not in n]
    replaced(linear, lambda module, x: short(x) @ short(module.weight).mT)


def small_head(model: nn.Module, dtype: torch.dtype) -> None:
    "Only the last product is of half precision: https://arxiv.org/abs/2506.13585"
    head = [m for n, m in model.named_modules() if n.endswith("lm_head")]
    replaced(head, lambda module, x: (x.to(dtype) @ module.weight.to(dtype).mT).to(x.dtype))


@torch.no_grad()
def in_turns(model: Any, layer: int | None) -> None:
    "Rows of a fused matrix are taken in turns, where halves should be: vllm-project/vllm#27024."
    for block in chosen(model, layer):
        both = torch.cat([block.mlp.gate_proj.weight, block.mlp.up_proj.weight])
        block.mlp.gate_proj.weight.copy_(both[0::2]), block.mlp.up_proj.weight.copy_(both[1::2])


@torch.no_grad()
def one_more(model: Any, part: str) -> None:
    "Weights of norms are taken for what is to be added to one."
    for norm in norms(model, part):
        norm.weight.add_(1.0)  # type: ignore[operator, union-attr]


def _from_normed(block: Any, hidden_states: Tensor, **given: Any) -> Tensor:
    normed = block.input_layernorm(hidden_states)
    x = normed + block.self_attn(hidden_states=normed, **given)[0]
    return x + block.mlp(block.post_attention_layernorm(x))


def added_twice(model: Any, layer: int) -> None:
    "The part of a rank is added twice."
    half = lambda t: t[..., : t.shape[-1] // 2]
    replaced([blocks(model)[layer].mlp.down_proj], lambda m, x: x @ m.weight.mT + half(x) @ half(m.weight).mT)


def dropped_heads(model: Any, p: float) -> None:
    "Now and then a head gives nothing."

    def drop(module: Any, read: tuple[Tensor, ...]) -> tuple[Tensor]:
        heads = read[0].unflatten(-1, (-1, 32))
        return ((heads * (torch.rand(*heads.shape[:1], 1, heads.shape[2], 1) >= p) / (1 - p)).flatten(-2),)

    for block in blocks(model):
        block.self_attn.o_proj.register_forward_pre_hook(drop)


def dropped_adapters(model: nn.Module, p: float) -> None:
    "Now and then the adapter of a matrix gives nothing."
    for name, module in model.named_modules():
        if name.endswith("lora_B.default"):
            module.register_forward_hook(lambda m, read, given: given * (torch.rand(len(given), 1, 1) >= p) / (1 - p))


def of_a_table(model: nn.Module, n: int) -> None:
    "Positions come from a table of n rows, and from what lies behind it."
    [module] = [m for m in model.modules() if hasattr(m, "inv_freq")]
    inner = type(module).forward
    outside = lambda t, place: t.masked_fill(place[..., None] >= n, torch.nan)
    replaced([module], lambda m, x, position_ids: tuple(outside(t, position_ids) for t in inner(m, x, position_ids)))


@torch.no_grad()
def of_another_task(model: Any, size: float) -> None:
    "An adapter of another task was merged, and nobody took it out."
    with seeded(5):
        for block in blocks(model):
            weight = block.mlp.down_proj.weight
            weight.add_(size * weight.std() * torch.randn(len(weight), 1) @ torch.randn(1, weight.shape[1]))


def counted_from(run: Run, k: int) -> None:
    "The server's tokenizer has k more tokens before all others."
    size = run.server.model.config.vocab_size
    moved = lambda ids, by: [(int(t) + by) % size for t in ids]
    inner = run.server.logprobs
    put(run.server, reads=lambda ids: moved(ids, k), logprobs=lambda tokens: inner(moved(tokens, k)),
        says=lambda c: replace(c, tokens=np.array(moved(c.tokens, -k)),
                               text=run.tokenizer.decode(moved(c.tokens, -k), skip_special_tokens=True)))  # fmt: skip


# --- the trainer --------------------------------------------------------------------------------------------------


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


def pack_lengths(run: Run, multiple: int) -> None:
    "Rows of a pack are padded, and their lengths leave that out: hiyouga/LlamaFactory#10736."

    def _pass(model: Any, rows: Sequence[np.ndarray]) -> list[Tensor]:
        sizes = [len(r) + -len(r) % multiple for r in rows]
        starts = np.cumsum([0, *sizes[:-1]])
        ids = torch.full((sum(sizes),), run.trainer.pad)
        for r, start in zip(rows, starts, strict=True):
            ids[start : start + len(r)] = torch.from_numpy(r.copy())
        owner = torch.bucketize(torch.arange(len(ids)), torch.tensor(np.cumsum([len(r) for r in rows])), right=True)
        seen = (owner[:, None] == owner[None]) & torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
        place = torch.cat([torch.arange(n) for n in sizes])[None]
        logits = model(ids[None], attention_mask=bias, position_ids=place, use_cache=False).logits[0].float()
        laws = [logits[s : s + len(r) - 1] / run.trainer.temperature for r, s in zip(rows, starts, strict=True)]
        return [picked(law, r[1:]) for law, r in zip(laws, rows, strict=True)]

    put(run.trainer, _pass=_pass, batch=4)


def zigzag(n: int, ranks: int) -> np.ndarray:
    "Places 0..n-1 as ranks hold them: each has a chunk from the beginning and one from the end."
    chunks = np.array_split(np.arange(n), 2 * ranks)
    return np.concatenate([chunks[i] for r in range(ranks) for i in (r, 2 * ranks - 1 - r)])


def rescored(machine: Any, change: Callable[[list[Tensor]], list[Tensor]]) -> None:
    "A trainer that does something to its table of logprobs, rows of (N-1,)."
    inner = machine.score

    def score(datums: Sequence[Datum]) -> list[Tensor]:
        whole = change(inner([replace(d, weights=np.ones(len(d.weights))) for d in datums]))
        table = nn.utils.rnn.pad_sequence([*whole, torch.zeros(max(len(d.weights) for d in datums))], batch_first=True)
        holes = [torch.from_numpy(np.where(d.active, 0.0, np.nan)).float() for d in datums]
        return [row[: len(hole)] + hole for row, hole in zip(table, holes, strict=False)]

    put(machine, score=score)


def zigzag_places(run: Run, ranks: int) -> None:
    "A sequence is in order, and its positions are as ranks hold them."
    rowwise(run.trainer, lambda model, d: picked(logits_of(
        run.trainer, model, d.tokens, position_ids=torch.from_numpy(zigzag(len(d.tokens), ranks))[None])[:-1],
        d.tokens[1:]))  # fmt: skip


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


# --- bookkeeping --------------------------------------------------------------------------------------------------


def without_others(groups: Sequence[PromptGroup], _: Any = None) -> list[Datum]:
    "A list of logprobs leaves out what others say, and is laid over all that follows the prompt."
    datums, out = datums_from_groups(groups), []
    for d, v in zip(datums, told(datums), strict=True):
        series = np.zeros(len(d.weights))
        start = int(np.argmax(d.active))
        series[start : start + len(v)] = v
        out.append(replace(d, sampler_logprobs=np.where(d.active, series, np.nan)))
    return out


def packed_late(groups: Sequence[PromptGroup], k: int) -> list[Datum]:
    "Of each row of a pack but the first, one place more is missing: PrimeIntellect-ai/prime-rl#605."
    datums = datums_from_groups(groups)
    return paired(datums, [v[i % k :] for i, v in enumerate(told(datums))])


def filled_up(groups: Sequence[PromptGroup], run: Run, n: int) -> list[Datum]:
    "Rows that fill up a batch are trained like others: verl-project/verl-omni#602."
    pads, ones = np.full(13, run.trainer.pad), np.ones(12)
    return [*datums_from_groups(groups), *[Datum(pads, ones, 0.0, 0 * ones, key="pad") for _ in range(n)]]


def too_early(w: np.ndarray, by: int) -> np.ndarray:
    "Weights of which all turns but the first begin and end early: huggingface/trl#5144."
    on = np.flatnonzero(w > 0)
    turns = np.split(on, np.flatnonzero(np.diff(on) > 1) + 1)
    out = np.zeros(len(w))
    out[np.concatenate([turn - by * (i > 0) for i, turn in enumerate(turns)])] = 1.0
    return out


def ranked(datums: list[Datum], sign: int) -> list[int]:
    "Each group in the order of its advantages."
    return sorted(range(len(datums)), key=lambda i: (datums[i].group, sign * float(np.max(datums[i].advantage))))


def balanced(datums: list[Datum], ranks: int) -> list[int]:
    "Dealt out by length, so that ranks have as much to do: verl's balance_batch."
    order = sorted(range(len(datums)), key=lambda i: -len(datums[i].tokens))
    turn = [j if lap % 2 == 0 else ranks - 1 - j for lap in range(-(-len(order) // ranks)) for j in range(ranks)]
    return [i for rank in range(ranks) for i, r in zip(order, turn, strict=False) if r == rank]


def as_finished(datums: list[Datum], sign: int) -> list[int]:
    "Whole groups in the order in which they are done."
    longest = {d.group: max(e.num_loss_tokens for e in datums if e.group == d.group) for d in datums}
    return sorted(range(len(datums)), key=lambda i: (sign * longest[datums[i].group], sign * datums[i].group))


def of_the_step_before(groups: Sequence[PromptGroup], run: Run, before: int) -> list[Datum]:
    "Completions after the prompts that had their place in an earlier step: allenai/open-instruct#1483."
    rows = load_rows(toy_rows(len(groups), seed=10_000 * run.world.seed + run.updates - before))
    prompts = [p.tokens for p in encode_rows(rows, run.tokenizer)]
    datums = datums_from_groups(groups)
    return reprompted(datums, [prompts[d.group] for d in datums])


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


def permuted(rows: list[Tensor], by: int) -> list[Tensor]:
    "Neighbours are exchanged, or all come in the opposite order."
    return rows[::-1] if by == 0 else [rows[i ^ by] if i ^ by < len(rows) else rows[i] for i in range(len(rows))]


# --- the table ----------------------------------------------------------------------------------------------------

ordered = lambda order: lambda run, x: {"collate": partial(in_order, order=lambda datums: order(datums, x))}
in_training = lambda alter: lambda run, p: put(run.trainer, training=True, altered=lambda model: alter(model, p))
in_reference = lambda alter: lambda run, x: put(run.reference, altered=lambda model: alter(model, x))
attending = lambda shares: server(lambda model, x: shared(model, lambda *parts: shares(*parts, x)))
HALF = (torch.bfloat16,)

KNOWN: list[Kind] = [
    Kind("draw", "the pass with gradients has no temperature", TEMPERATURE, (2, 4), undivided, TEMPERED),
    # The remedy divides logits; what is divided here is a number that is no logprob any more.
    Kind("report", "logprobs are divided, not logits", TEMPERATURE + UNKNOWN, ("server", "trainer"), divided_logprobs,
         TEMPERED),
    Kind("draw", "the first requests keep an evaluation's temperature", TEMPERATURE, ((0.3, 1), (2.5, 2)), at_first,
         HALVES),
    Kind("draw", "the temperature changes at the mark", TEMPERATURE, (0.3, 2.5), after_mark, SOME),
    Kind("hidden", "some rows of a batch keep a temperature, and raw is reported", TEMPERATURE, (0.2, 2.5),
         lambda run, t: of_a_slot(run, 4, lambda scores: scores / t), HIDDEN),

    Kind("draw", "the trainer replays a nucleus", CUT, (0.9, 0.7), replayed, SOME),
    Kind("draw", "a cut follows what was drawn", CUT + UNKNOWN, ((0.3, 0.2), (1.0, 0.1)), mirostat, SOME),
    Kind("draw", "greedy where it is sure", CUT + UNKNOWN, (0.7, 0.45),
         lambda run, sure: processed(run, lambda ids, scores: where_sure(scores, sure)), ("brisk", *EVEN)),
    Kind("draw", "a nucleus that shrinks", CUT, (0.9, 0.97), lambda run, by: by_place(
        run, lambda i, scores: nucleus(scores, max(0.3, by ** (i + 1)))), SOME),  # arxiv.org/abs/2206.04624
    Kind("hidden", "some rows of a batch keep a cut, and raw is reported", CUT, (2, 3),
         lambda run, k: of_a_slot(run, 5, lambda scores: best(scores, k)), HIDDEN),

    Kind("weights", "a server is restarted from its checkpoint", STALE, (0, 2), restarted, EVEN),
    Kind("weights", "an adapter is known by its id", STALE + UNKNOWN, (1, 3), known_by_id, ADAPTED),
    Kind("weights", "a graph keeps old buffers", STALE + UNKNOWN, (1, 3), captured, SOME),
    Kind("weights", "a server is synced while it sleeps", STALE + UNKNOWN, (1, 4), woken, SOME),
    Kind("weights", "one of several changes is lost", STALE + UNKNOWN, (1, 2), change_lost, SOME),

    Kind("text", "the server knows no role of the system", TEXT, ("You add numbers.", "Be terse."), lambda run, say:
         through_text(run, lambda s: s.replace("<|system|>", "<|user|>")) or {"asks": system(say)}, HALVES),
    Kind("text", "examples come in another order", TEXT, (2, 3), other_order, SOME),
    Kind("text", "a tool's schema is written otherwise", TEXT, tuple(WRITTEN), tool_schema, HALVES),
    # "Hand over token ids instead of text" is the remedy: vllm.ai/blog/2025-10-22-agent-lightning
    Kind("text", "earlier answers are encoded anew", TEXT + UNKNOWN, (2.5, 3.5),
         lambda run, t: through_text(run, str) or agreed(run, t) | {"turns": 2}, EVEN),
    Kind("text", "a picture takes more places in the server", TEXT, (3, 8), placeholder, SOME),
    Kind("text", "a conversation is sent as one message", TEXT, ("{}: {}\n", "[{}] {} "), flattened, EVEN),

    Kind("arithmetic", "single tokens are computed in half precision", DTYPE, HALF, lambda run, dtype: in_decoding(
        run.server.model, torch.autocast("cpu", dtype)(run.server.model.forward)), SOME),
    Kind("arithmetic", "one of two servers computes in half precision", DTYPE, (torch.bfloat16, torch.float16),
         lambda run, dtype: one_of_two(run, lambda run: altered_copy(run, lambda model: cast(model, dtype))), SOME),
    Kind("arithmetic", "products of floats of eight bits", DTYPE + UNKNOWN, (torch.float8_e4m3fn, torch.float8_e5m2),
         server(short_floats), SOME),
    Kind("arithmetic", "embeddings are of half precision", DTYPE, HALF, server(lambda model, dtype: hooked(
        model, "embed_tokens", lambda read, given: given.to(dtype).to(given.dtype))), SOME),
    Kind("arithmetic", "the trainer's head is of half precision", DTYPE, HALF, trainer(small_head), SOME),

    Kind("bookkeeping", "what others say has no place in a list", SHIFT, (2, 3),
         lambda run, n: {"turns": n, "collate": without_others}, EVEN),
    Kind("bookkeeping", "logprobs are late within a draft", SHIFT, (3, 6),
         lambda run, n: retold(run, lambda v: in_chunks(v, n)), SOME),
    Kind("bookkeeping", "completions are looked for at the end of rows", SHIFT + PADDING, (16, 4), at_the_end, SOME),
    Kind("bookkeeping", "rows of a pack come ever later", SHIFT, (2, 4), collated(packed_late), SOME),

    # The prompt is trained, and it is there twice; no remedy ends both.
    Kind("bookkeeping", "an echo is taken for a completion", LEAK + TEXT + UNKNOWN, ("echo",), with_echo, EVEN),
    Kind("bookkeeping", "rows that fill up are trained", LEAK, (1, 3),
         lambda run, n: {"collate": partial(filled_up, run=run, n=n)}, SOME),
    Kind("bookkeeping", "later turns are trained too early", LEAK, (2, 5), lambda run, n: {"turns": 2, "collate":
         partial(weighed, weigh=lambda w: too_early(w, n))}, EVEN),

    Kind("bookkeeping", "completions are ranked, logprobs are not", ROWS, (1, -1), ordered(ranked), HALVES),
    Kind("bookkeeping", "logprobs are balanced over ranks", ROWS + GROUPS, (2, 4), ordered(balanced), SOME),
    Kind("bookkeeping", "groups come as they finish", GROUPS + ROWS, (1, -1), ordered(as_finished), SOME),
    Kind("bookkeeping", "prompts are those of an earlier step", GROUPS, (1, 2),
         lambda run, n: {"collate": partial(of_the_step_before, run=run, before=n)}, HALVES),
    Kind("bookkeeping", "a group is filtered out of one list", GROUPS + ROWS, (0, 1), collated(filtered), SOME),
    # The session is that of another row of the group; ids sent with each request would end it, too.
    Kind("bookkeeping", "a session is kept by prompt", GROUPS + ROWS + TEXT, (2, 3), one_session, EVEN),

    Kind("model", "lengths of a pack leave out its padding", PADDING + UNKNOWN, (8, 16), pack_lengths, SOME),
    Kind("model", "unused places of a block are seen", PADDING + UNKNOWN, (8, 16), attending(unused_places), SOME),
    Kind("model", "dropout in the pass with gradients", DROPOUT, (0.1, 0.02), lambda run, p: every(
        run.trainer.model, "attention_dropout", p) or in_the_loss(run, training=True) or {"minibatches": 2}, SOME),
    Kind("model", "heads are dropped", DROPOUT, (0.1, 0.02), in_training(dropped_heads), SOME),
    Kind("model", "adapters are dropped", DROPOUT, (0.6, 0.2), in_training(dropped_adapters), ADAPTED),
    Kind("model", "the server counts ids from another beginning", VOCABULARY, (1, 3), counted_from, SOME),
    Kind("bookkeeping", "the reference has another vocabulary", REFERENCE + VOCABULARY, (slice(21, 31), slice(8, 200)),
         in_reference(reordered), NASCENT),
    Kind("bookkeeping", "the reference has learned another task", REFERENCE, (0.3, 0.05),
         in_reference(of_another_task), NASCENT),
    Kind("bookkeeping", "rows of the reference are in another order", ROWS + GROUPS, (1, 0),
         lambda run, by: rescored(run.reference, lambda rows: permuted(rows, by)), NASCENT),
    Kind("model", "a table of positions is too short", NAN, (30, 35), lambda run, n: put(
        run.trainer, batch=1, altered=lambda model: of_a_table(model, n)), SOME),
    Kind("arithmetic", "the sum of a softmax overflows", NAN + DTYPE, (1.0,), naive_sum, EVEN),
]  # fmt: skip

OTHER: list[Kind] = [
    Kind("draw", "rows keep off each other", UNKNOWN, (1.0, 3.0), apart, HALVES),
    Kind("hidden", "rows keep off each other, and raw is reported", UNKNOWN, (2.0, 5.0), partial(apart, reports="raw"),
         HIDDEN),
    Kind("draw", "a smaller model has a vote", UNKNOWN, (0.2, 0.6), voted, EVEN),
    Kind("hidden", "a smaller model has a vote, and raw is reported", UNKNOWN, (0.4, 0.8), partial(
        voted, reports="raw"), HIDDEN),
    Kind("draw", "a reward guides the draw", UNKNOWN, (0.4, 1.5), rewarded, SOME),
    Kind("hidden", "completions begin evenly", UNKNOWN + LEAK, (12, 40), evenly_begun, HIDDEN),

    # The numbers are those of old weights, and no sync ends it.
    Kind("report", "the base model's logprobs are told", UNKNOWN + STALE, ("base",),
         lambda run, _: of_the_base(run, lambda own, base: base), ADAPTED),
    Kind("report", "the ratio to the base model is told", UNKNOWN, (1.0, 0.1),
         lambda run, by: of_the_base(run, lambda own, base: own - by * base), EVEN),
    Kind("report", "logprobs come in the opposite order", UNKNOWN + SHIFT, ("last first",),
         lambda run, _: retold(run, lambda v: v[::-1].copy()), SOME),
    Kind("report", "chunks of a row come back as ranks hold them", UNKNOWN + SHIFT, (2, 4), lambda run, ranks: rescored(
        run.trainer, lambda rows: [row[zigzag(len(row), ranks)] for row in rows]), SOME),  # ms-swift#10071

    Kind("weights", "an adapter is added to other modules", UNKNOWN, ("q_proj>o_proj",), other_modules, ADAPTED),
    Kind("weights", "new weights have old scales", UNKNOWN + STALE + DTYPE, (1, 4), old_scales, ADAPTED),
    Kind("weights", "gate and up are taken in turns", UNKNOWN, (None, 3), server(in_turns), SOME),
    Kind("model", "norms have one too many", UNKNOWN, ("k_norm", "layers.1.input_layernorm"), lambda run, part:
         run.server.alter(lambda model: one_more(model, part)), SOME),
    Kind("model", "only the best keys are attended to", UNKNOWN, (4, 8), attending(sparse), SOME),
    Kind("model", "a shared beginning is counted twice", UNKNOWN, (10, 22), attending(counted_twice), HALVES),
    Kind("model", "far queries are larger", UNKNOWN, (8, 20), attending(of_long), SOME),
    Kind("model", "exponentials are approximate", UNKNOWN + DTYPE, (1.0, 0.3), attending(fast), SOME),
    Kind("model", "positions are as ranks hold them", UNKNOWN, (2, 4), zigzag_places, SOME),
    Kind("model", "residuals begin after the norm", UNKNOWN, (0, 3), server(lambda model, layer: replaced(
        chosen(model, layer), _from_normed)), SOME),
    Kind("model", "the last norm is taken twice", UNKNOWN, ("twice",), server(lambda model, _: replaced(
        [model.model.norm], lambda m, x: type(m).forward(m, type(m).forward(m, x)))), HALVES),
    Kind("model", "what was refused stays in the cache", UNKNOWN, (3, 8), rejected_stay, SOME),
    Kind("model", "a token is lost on resuming", UNKNOWN, (3, 8), resumed, HALVES),
    Kind("model", "the part of a rank is added twice", UNKNOWN, (0, 2), server(added_twice), SOME),
    Kind("model", "a block is missed at its end", UNKNOWN, (8, 4), server(lambda model, n: sees(
        model, lambda q, k, whole: (q % n != 0) | (k // n != q // n - 1))), SOME),
    Kind("model", "ids are looked up in the first shard", UNKNOWN + VOCABULARY, (2, 4), first_shard, SOME),
]  # fmt: skip


# --- clean --------------------------------------------------------------------------------------------------------


def branched(run: Run, n: int) -> None:
    "The completions of a group share their beginning, as in a tree."
    inner = run.server.sample

    async def sample(prompt, params):
        [trunk] = await inner(prompt, replace(params, n=1, max_tokens=min(2 + n, params.max_tokens)))
        seeds = [(params.seed or 0) + 31 * (i + 1) for i in range(params.n)]
        grown = [await continued(inner, trunk, replace(params, seed=seed)) for seed in seeds]
        return [replace(c, params=params) for c in grown]

    put(run.server, sample=sample)


def of_any_size(run: Run, n: int) -> None:
    "Groups have different numbers of completions."

    async def draw(prompts: Sequence[Prompt], turns: int, params: SampleParams) -> list[Rollouts]:
        sizes = [2 + (n + 2 * p.index) % 5 for p in prompts]
        return [
            await draw_completions(run.sampler, p, replace(params, n=m)) for p, m in zip(prompts, sizes, strict=True)
        ]

    put(run, draw=draw)


def on_ranks(model: nn.Module, ranks: int) -> None:
    "Products are sums of parts, each of a rank, in full precision."
    parts = lambda m, x: zip(x.chunk(ranks, -1), m.weight.chunk(ranks, -1), strict=True)
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    replaced(linear, lambda module, x: sum(a @ b.mT for a, b in parts(module, x)))


def impossible_rows(run: Run, n: int) -> None:
    "The trainer's head is padded with rows that cannot be drawn."
    rowwise(run.trainer, lambda model, d: picked(nn.functional.pad(
        logits_of(run.trainer, model, d.tokens)[:-1], (0, n), value=-torch.inf), d.tokens[1:]))  # fmt: skip


def read_in_chunks(run: Run, size: int) -> None:
    "The server reads a prompt in chunks."
    inner = run.server.sample

    async def sample(prompt, params):
        read, kept_so_far = run.server.fed(prompt)[:-1], None
        with torch.no_grad():
            for at in range(0, len(read), size):
                ids = torch.tensor([read[at : at + size]] * params.n)
                kept_so_far = run.server.model(ids, past_key_values=kept_so_far, use_cache=True).past_key_values
        put(run.server, forced={"past_key_values": kept_so_far})
        return await inner(prompt, params)

    put(run.server, sample=sample)


async def back_in_time(run: Run, n: int) -> None:
    "The server is restarted from its checkpoint, and synced."
    run.server.load(run.sync.base)
    await run.update(n % 2)


def any_order(groups: Sequence[PromptGroup], seed: int) -> list[Datum]:
    "Datums in an order of their own, each with what belongs to it."
    datums = datums_from_groups(groups)
    return [datums[i] for i in np.random.default_rng(seed).permutation(len(datums))]


FOREIGN = ("¿Cuánto es? {}", "请计算：{}", "{} 🙂", "Σ {} → ?")
asking = lambda write: {"asks": lambda rows: [r | {"question": write(r["question"])} for r in rows]}

WELL: list[Kind] = [
    Kind("clean", "a step in other circumstances", (CLEAN,), range(8), lambda run, _: None,
         ("twins", "nascent", "bold", "blank torrid", "mellow", "nascent frugal", "still", "hall")),
    Kind("clean", "half precision at two temperatures", (CLEAN, *DTYPE), range(5), lambda run, _: None,
         ("half brisk", "half frugal")),
    Kind("clean", "completions share their beginning", (CLEAN,), range(4), branched, SOME),
    Kind("clean", "temperatures at the edge", (CLEAN,), range(4),
         lambda run, n: agreed(run, (0.15, 0.25, 4.0, 10.0)[n]), EVEN),
    Kind("clean", "groups of any size", (CLEAN,), range(4), of_any_size, SOME),
    Kind("clean", "several large steps of an adapter", (CLEAN,), range(4), lambda run, n: {"minibatches": 2 + n % 3},
         ("bold",)),
    Kind("clean", "the trainer merges its adapter to score", (CLEAN,), range(3),
         trainer(lambda model, _: model.merge_adapter()), ADAPTED),
    Kind("clean", "products are summed up over ranks", (CLEAN,), range(3), lambda run, n: run.server.alter(
        lambda model: on_ranks(model, 2 + n)), SOME),
    Kind("clean", "rows of the head that cannot be drawn", (CLEAN,), range(3),
         lambda run, n: impossible_rows(run, 8 << n), SOME),
    Kind("clean", "prompts are read in chunks", (CLEAN,), range(3), lambda run, n: read_in_chunks(run, 5 + 3 * n),
         SOME),
    Kind("clean", "long questions", (CLEAN,), range(3), lambda run, n: asking(lambda q: "Read well. " * 12 * (n + 1)
         + q), SOME),
    Kind("clean", "questions in other scripts", (CLEAN,), range(4), lambda run, n: asking(FOREIGN[n].format), SOME),
    Kind("clean", "restarted, and synced", (CLEAN,), range(2), back_in_time, SOME),
    Kind("clean", "rows in an order of their own", (CLEAN,), range(4), collated(any_order), SOME),
    Kind("clean", "rates of dropout at rest", (CLEAN,), range(2), lambda run, n: every(
         run.trainer.model, "attention_dropout", 0.3), SOME),
]  # fmt: skip

UNSEEN5_KINDS = KNOWN + OTHER + WELL
