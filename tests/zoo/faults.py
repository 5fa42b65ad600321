"What can be wrong, as a table: each fault changes the machines of a run, or its code, before a step is made."

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from rl_notebook.core.types import Completion, Datum, PromptGroup
from rl_notebook.core.datums import datums_from_groups
from rl_notebook.runs.records import StepRecord

from .machines import cast
from .steps import Run, World

NONE, CLEAN = "none of the known causes", "all well"  # as the doctor says it
PARTS = BUILD, UNSEEN = "build", "unseen"
WORLDS = {
    "plain": World(),
    "lora": World(lora_rank=8, learning_rate=1e-3),
    "cool": World(temperature=0.7),
    "mute": World(can_echo=False),
    "wide": World(prompts=8),
    "small": World(prompts=2, completions=3),
    "slow": World(learning_rate=5e-6),
    "half": World(dtype="bfloat16"),
    "first": World(warm_up=0),
    "hot": World(temperature=2.5),
    "leaky": World(lora_rank=8, learning_rate=1e-3, lora_dropout=0.1),
    "large": World("smollm2", prompts=2, completions=2, max_tokens=16, warm_up=0),
}
USUAL, FULL = ("plain", "lora", "cool", "mute", "wide"), ("plain", "cool", "mute", "wide")  # taken in turns


@dataclass(frozen=True, eq=False)
class Kind:
    "One kind of fault: a row of the table."

    family: str
    name: str
    right: tuple[str, ...]  # causes that are right answers
    strengths: Sequence[Any]
    make: Callable[[Run, Any], Any]  # (run, strength) -> arguments of `Run.step`, or nothing, or an awaitable of it
    worlds: tuple[str, ...] = USUAL
    large: bool = False  # its first strength with SmolLM2, too


@dataclass(frozen=True, eq=False)
class Case:
    "One step with one thing wrong, or with nothing wrong."

    kind: Kind
    split: str
    strength: Any
    setting: str  # a key of WORLDS
    seed: int

    @property
    def name(self) -> str:
        "What it is called in tables and tests."
        return f"{self.kind.name}[{self.strength!s:.20}, {self.setting}, {self.seed}]"

    @property
    def world(self) -> World:
        "Where it takes place; each clean step draws anew, and is small."
        world = replace(WORLDS[self.setting], seed=self.seed)
        if self.kind.family != "clean":
            return world
        return replace(world, draw=self.strength, prompts=min(world.prompts, 2 + self.strength % 3), max_tokens=16)


async def run_case(case: Case, run: Run) -> StepRecord:
    "The step of a case."
    found = case.kind.make(run, case.strength)
    return await run.step(**((await found if inspect.isawaitable(found) else found) or {}))


def cases(split: str) -> Iterator[Case]:
    "All cases of a part: each strength in two settings of `build`, in one of another. The seeds differ."
    from .unseen import UNSEEN_KINDS

    kinds, seeds = {BUILD: (KINDS, (0, 1, 2, 10, 11, 12)), UNSEEN: (UNSEEN_KINDS, (20, 21, 22))}[split]
    for number, kind in enumerate(kinds):
        for i, strength in enumerate(kind.strengths):
            start = number + 2 * i
            settings = dict.fromkeys(kind.worlds[(start + j) % len(kind.worlds)] for j in range(1 + (split == BUILD)))
            for j, name in enumerate(settings):
                yield Case(kind, split, strength, name, seeds[(i + j) % len(seeds)])
        if kind.large:
            yield Case(kind, split, kind.strengths[0], "large", seeds[0])


# --- machines -----------------------------------------------------------------------------------------------------


def put(machine: Any, **fields: Any) -> None:
    "Turn switches of a machine."
    for name, value in fields.items():
        assert hasattr(machine, name)
        setattr(machine, name, value)


def forced(run: Run, **arguments: Any) -> None:
    "The server draws so, whatever is asked, and reports the logprobs of what it draws from."
    put(run.server, forced=arguments, reports="processed")


def every_other(run: Run, t: float) -> None:
    "One of two servers behind a balancer has its own temperature."
    inner, asked = run.server.sample, itertools.count()

    async def sample(prompt, params):
        forced(run, **({"temperature": t * run.world.temperature} if next(asked) % 2 else {}))
        return await inner(prompt, params)

    put(run.server, sample=sample)


def raw_at(run: Run, t: float) -> dict[str, Any]:
    "All agree on a temperature, at which the server draws, and does not report."
    put(run.trainer, temperature=t), put(run.reference, temperature=t), put(run.server, reports="raw")
    return {"temperature": t}


def fitted(values: np.ndarray, length: int) -> np.ndarray:
    "Values for so many tokens, by cutting or filling up: what code does that must not."
    return np.r_[values, np.zeros(length)][:length]


def through_text(run: Run, change: Callable[[str], str]) -> None:
    "The server is sent text, and renders it in its own way."
    words = run.tokenizer
    put(run.server, reads=lambda ids: words(change(words.decode(ids)), add_special_tokens=False)["input_ids"])


def templated(run: Run, template: str) -> None:
    "The server has another template, for the last thing that the user said."
    last = lambda text: text.split("<|user|>")[-1].split("<|assistant|>")[0].replace("<|end|>", "")
    through_text(run, lambda text: "<|bos|>" + template.format(last(text)))


def reencoded(run: Run, strip: bool) -> None:
    "The client keeps the text of a completion and encodes it anew."

    def says(completion: Completion) -> Completion:
        text = completion.text.strip() if strip else completion.text
        end = [run.tokenizer.eos_token_id] * (completion.finish_reason == "stop")
        ids = run.tokenizer(text, add_special_tokens=False)["input_ids"] + end
        told = {n: fitted(getattr(completion, n), len(ids)) for n in ("logprobs", "sampling_logprobs")}
        return replace(completion, tokens=ids, **told)

    put(run.server, says=says)


async def late(run: Run, updates: int, *, known: bool = True) -> None:
    "The server has earlier weights; the versions say so, or do not."
    await run.update(updates, publish=False)
    run.trainer.version += updates * known


async def badly_synced(run: Run, updates: int, **fields: Any) -> None:
    "Updates, each with a sync that does not do all of its work."
    put(run.sync, **fields)
    for _ in range(updates):
        await run.update()


async def scored_late(run: Run, updates: int) -> dict[str, Any]:
    "The trainer scores a step after it has been updated."
    there = run.updates
    await run.update(updates, publish=False)
    after, run.updates = run.trainer.states[await run.trainer.save_state("after")], there
    await run.update(0)

    def collate(groups: Sequence[PromptGroup]) -> list[Datum]:
        run.trainer.take(after)
        return datums_from_groups(groups)

    return {"collate": collate}


@torch.no_grad()
def quantised(model: nn.Module, bits: int) -> None:
    "Weights of linear layers as whole multiples of 1/(2**(bits-1)-1) of the largest in their row."
    for module in model.modules():
        if isinstance(module, nn.Linear):
            step = module.weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
            module.weight.copy_((module.weight / step).round() * step)


def rotary(model: nn.Module, base: float = 10_000.0, factor: float = 1.0) -> None:
    "Rotary positions of another base, or scaled."
    [module] = [m for m in model.modules() if hasattr(m, "inv_freq")]
    half = len(module.inv_freq)
    module.inv_freq.copy_(base ** -(torch.arange(half) / half) / factor)


def every(model: nn.Module, attribute: str, value: Any) -> None:
    "The same attribute for all modules that have it."
    for module in model.modules():
        put(module, **{attribute: value} if hasattr(module, attribute) else {})


def windowed(model: Any, window: int) -> None:
    "Attention that sees so many tokens."
    put(model.config, sliding_window=window, layer_types=["sliding_attention"] * len(model.model.layers))
    put(model.model, has_sliding_layers=True)
    every(model, "sliding_window", window)


@torch.no_grad()
def reordered(model: Any, ids: slice) -> None:
    "The embeddings of some ids in another order: those of another tokenizer."
    for rows in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
        rows[ids] = rows[ids].roll(1, 0)


def dropped(run: Run, p: float, seed: int | None = None) -> None:
    "The trainer is left in training mode, with dropout in its attention."
    every(run.trainer.model, "attention_dropout", p)
    put(run.trainer, training=True, dropout_seed=seed)


def shifted_trainer(run: Run, by: int) -> None:
    "The trainer reads each logprob off a neighbouring position."
    score = run.trainer.score
    put(run.trainer, score=lambda datums: [s.nan_to_num(0.0).roll(by) for s in score(datums)])


# --- bookkeeping: from samples to datums, by code that has a bug --------------------------------------------------


def paired(datums: Sequence[Datum], values: Sequence[np.ndarray]) -> list[Datum]:
    "Datums with these logprobs of completions."
    out = []
    for d, v in zip(datums, values, strict=True):
        series = np.full(len(d.weights), np.nan)
        series[d.active] = fitted(v, d.num_loss_tokens)
        out.append(replace(d, sampler_logprobs=series))
    return out


def told(datums: Sequence[Datum]) -> list[np.ndarray]:
    "The logprobs of completions, as they were drawn."
    return [d.sampler_logprobs[d.active] for d in datums]


def off_by_one(groups: Sequence[PromptGroup], by: int, edge: float) -> list[Datum]:
    datums = datums_from_groups(groups)
    moved = [np.r_[v[1:], edge] if by > 0 else np.r_[edge, v[:-1]] for v in told(datums)]
    return paired(datums, moved)


def blank_eos(groups: Sequence[PromptGroup], blank: float) -> list[Datum]:
    "The server has no logprob for the token that ends a completion, and the client fills in something."
    datums = datums_from_groups(groups)
    ends = [s.finish_reason == "stop" for g in groups for s in g.samples]
    return paired(datums, [np.r_[v[:-1], blank] if end else v for v, end in zip(told(datums), ends, strict=True)])


def weighed(groups: Sequence[PromptGroup], weigh: Callable[[np.ndarray], np.ndarray]) -> list[Datum]:
    "Weights from masks by a rule that is wrong; where there is no logprob there is a 0."
    filled = [replace(d, sampler_logprobs=np.nan_to_num(d.sampler_logprobs)) for d in datums_from_groups(groups)]
    return [replace(d, weights=weigh(d.weights)) for d in filled]


def padded_and_trained(groups: Sequence[PromptGroup], pad: int, most: int) -> list[Datum]:
    datums = datums_from_groups(groups)
    longest = max(len(d.tokens) for d in datums)
    blank = [min(most, longest - len(d.tokens)) for d in datums]
    return [
        Datum(np.r_[d.tokens, np.full(n, pad)], np.r_[d.weights, np.ones(n)], d.advantage,
              np.r_[d.sampler_logprobs, np.zeros(n)], group=d.group, sample=d.sample, key=d.key)
        for d, n in zip(datums, blank, strict=True)
    ]  # fmt: skip


def by_arrival(groups: Sequence[PromptGroup], within: str) -> list[Datum]:
    "Logprobs in the order in which completions were done, the short ones first, of a group or of the step."
    datums = datums_from_groups(groups)
    place = lambda i: (datums[i].group if within == "group" else 0, datums[i].num_loss_tokens)
    values = told(datums)
    return paired(datums, [values[i] for i in sorted(range(len(datums)), key=place)])


def of_next_group(groups: Sequence[PromptGroup], by: int) -> list[Datum]:
    "Logprobs of the sample with the same number, of another group."
    datums = datums_from_groups(groups)
    values = told(datums)
    return paired(datums, [*values[by * len(groups[0].samples) :], *values[: by * len(groups[0].samples)]])


def reprompted(datums: Sequence[Datum], prompts: Sequence[np.ndarray]) -> list[Datum]:
    "The same completions, each after this prompt."
    out = []
    for d, prompt in zip(datums, prompts, strict=True):
        start, blank = int(np.argmax(d.active)), np.zeros(len(prompt) - 1)
        series = np.r_[blank + np.nan, d.sampler_logprobs[start:]]
        weights, place = np.r_[blank, d.weights[start:]], {"group": d.group, "sample": d.sample, "key": d.key}
        out.append(Datum(np.r_[prompt, d.tokens[start + 1 :]], weights, d.advantage, series, **place))
    return out


def under_next_prompt(groups: Sequence[PromptGroup], by: int) -> list[Datum]:
    "Completions after the prompt of another group."
    datums = datums_from_groups(groups)
    others = [groups[(d.group + by) % len(groups)].samples[0] for d in datums]
    return reprompted(datums, [other.tokens[: other.prompt_len] for other in others])


async def other_reference(run: Run, updates: int) -> None:
    "The reference is a later policy."
    await run.update(updates, publish=False)
    put(run.reference, model=copy.deepcopy(run.reference.model))
    run.reference.take(run.trainer.states[await run.trainer.save_state("later")])
    await run.update(-updates, publish=False)


# --- the table ----------------------------------------------------------------------------------------------------


async def both(run: Run, pair: tuple[str, Any, str, Any]) -> dict[str, Any]:
    "Two faults of the table at once."
    arguments = {}
    for name, strength in (pair[:2], pair[2:]):
        found = next(k for k in KINDS if k.name == name).make(run, strength)
        arguments |= (await found if inspect.isawaitable(found) else found) or {}
    return arguments


TEMPERATURE, CUT, STALE, TEXT, DTYPE = ("temperature",), ("top-p or top-k",), ("stale weights",), ("BOS or template",), ("dtype or batching",)  # fmt: skip  # noqa: E501
SHIFT, LEAK, PADDING, DROPOUT, UNKNOWN = ("shift",), ("mask leak",), ("padding side",), ("dropout",), (NONE,)
# fmt: off
KINDS: list[Kind] = [
    # The draw: a server that processes logits as nobody asked it to, or a trainer that does.
    Kind("draw", "the server has its own temperature", TEMPERATURE, (0.6, 0.9, 1.04, 1.4, 0.75, 0.95, 1.15),
         lambda run, t: forced(run, temperature=t * run.world.temperature), large=True),
    Kind("draw", "the server has its own top-k", CUT, (2, 8, 3, 20), lambda run, k: forced(run, top_k=k), large=True),
    Kind("draw", "the server has its own top-p", CUT, (0.7, 0.97, 0.85, 0.95), lambda run, p: forced(run, top_p=p)),
    Kind("draw", "top-p is asked for", CUT, (0.8, 0.95), lambda run, p: {"top_p": p}),
    Kind("draw", "top-k is asked for", CUT, (2, 6), lambda run, k: {"top_k": k}),
    # Min-p cuts off and renormalises, as top-p and top-k do: either answer leads there.
    Kind("draw", "the server has a min-p", CUT + UNKNOWN, (0.02, 0.1, 0.4), lambda run, p: forced(run, min_p=p)),
    Kind("draw", "the server penalises repetition", UNKNOWN, (1.05, 1.2, 1.5),
         lambda run, penalty: forced(run, repetition_penalty=penalty)),
    # One token is cut off and the rest renormalised: "top-p or top-k" has found the truncation.
    Kind("draw", "the server forbids eos at first", CUT + UNKNOWN, (4, 12),
         lambda run, n: forced(run, min_new_tokens=n)),
    Kind("draw", "the trainer has its own temperature", TEMPERATURE, (0.8, 1.1, 2.0),
         lambda run, t: put(run.trainer, temperature=t * run.world.temperature)),
    Kind("draw", "one of two servers has its own temperature", TEMPERATURE, (0.6, 1.3), every_other),

    # Hidden: numbers that are right, of tokens that were drawn otherwise. There is no gap to be seen.
    Kind("hidden", "the server cuts, and reports raw", CUT, (0.8, 0.6, 0.9, 0.7),
         lambda run, p: forced(run, top_p=p) or put(run.server, reports="raw"), ("plain", "lora", "mute", "slow")),
    Kind("hidden", "the server has its own temperature, and reports raw", TEMPERATURE, (0.7, 1.3, 0.8, 0.6),
         lambda run, t: forced(run, temperature=t) or put(run.server, reports="raw"), ("plain", "lora", "mute")),

    # The report: the right draw, and numbers that say something else of it.
    Kind("report", "raw is reported where a temperature was asked", TEMPERATURE, (0.7, 1.3, 0.8, 0.5), raw_at),
    # Right but for noise in the last digit that is left: what "dtype" says, though it is no dtype.
    Kind("report", "logprobs are rounded", DTYPE + UNKNOWN, (2, 1, 3, 0),
         lambda run, n: put(run.server, writes=lambda v: np.round(v, n))),
    Kind("report", "logprobs have another base", UNKNOWN, (2.0, 10.0),
         lambda run, base: put(run.server, writes=lambda v: v / np.log(base))),
    Kind("report", "probabilities are reported", UNKNOWN, ("exp",), lambda run, _: put(run.server, writes=np.exp)),
    Kind("report", "logprobs have a floor", UNKNOWN, (-0.5, -3.0),
         lambda run, floor: put(run.server, writes=lambda v: np.maximum(v, floor))),
    Kind("report", "eos has a logprob of 0", UNKNOWN, (0.0, -1.0),
         lambda run, v: {"collate": partial(blank_eos, blank=v)}),
    Kind("report", "eos has no logprob", ("non-finite",), (np.nan,),
         lambda run, v: {"collate": partial(blank_eos, blank=v)}),

    # Text: what the server reads is not what the trainer reads.
    Kind("text", "another template", TEXT, ("Q: {}\nA: ", "<|user|>{}<|assistant|>", "### {}\n"), templated),
    Kind("text", "the server adds a system prompt", TEXT, ("You are a calculator.", "Be brief.", "After ####."),
         lambda run, say: through_text(run, lambda s: s.replace("<|bos|>", f"<|bos|><|system|>{say}<|end|>"))),
    Kind("text", "the server has another bos", TEXT, ("", "<|system|>", "<|pad|>", "<|end|>"),
         lambda run, bos: through_text(run, lambda s: s.replace("<|bos|>", bos))),
    Kind("text", "the server adds bos to everything", TEXT, (1, 2),
         lambda run, n: put(run.server, prefix=(run.tokenizer.bos_token_id,) * n)),
    Kind("text", "white space ends the prompt", TEXT, (" ", "\n"),
         lambda run, space: through_text(run, lambda s: s + space)),
    # The beginning of the template is gone, and something of the question: another prompt, by no template.
    Kind("text", "the server cuts long prompts", TEXT + UNKNOWN, (16, 10),
         lambda run, n: put(run.server, reads=lambda ids: ids[-n:])),
    # "Hand over token ids instead of text" is the remedy.
    Kind("text", "completions are encoded anew", TEXT + UNKNOWN, (False, True), reencoded, ("hot",), large=True),

    # Weights: those of the server are not the trainer's.
    Kind("weights", "rollouts are late", STALE, (1, 2, 5, 3, 4), late, ("plain", "lora", "cool", "mute", "slow")),
    Kind("weights", "nobody syncs", STALE, (1, 4), partial(late, known=False), ("plain", "lora", "slow", "half")),
    # Nothing that is asked of the machines tells weights that never arrive from a server that computes otherwise.
    Kind("weights", "a sync copies nothing", STALE + UNKNOWN, (1, 3, 2),
         lambda run, n: badly_synced(run, n, travels=lambda name: False), ("plain", "slow", "half", "mute")),
    Kind("weights", "a part does not travel", STALE + UNKNOWN, ("lm_head", "embed_tokens", "layers.2"),
         lambda run, part: badly_synced(run, 4, travels=lambda name: part not in name), FULL),
    # Here they can be told apart: one side is the reference.
    Kind("weights", "the adapter does not travel", STALE, (3, 1, 5),
         lambda run, n: badly_synced(run, n, scale=0.0), ("lora",)),
    Kind("weights", "the trainer scores without its adapter", STALE + UNKNOWN, ("off",),
         lambda run, _: put(run.trainer, altered=lambda model: model.disable_adapter_layers()), ("lora",)),
    Kind("weights", "the adapter is wrongly scaled", UNKNOWN, (0.5, 2.0),
         lambda run, scale: badly_synced(run, 1, scale=scale), ("lora",)),
    Kind("weights", "the trainer scores after its update", STALE, (1, 2), scored_late, ("plain", "lora", "slow")),

    # Arithmetic.
    Kind("arithmetic", "the server computes in half precision", DTYPE, (torch.bfloat16, torch.float16),
         lambda run, dtype: put(run.server, model=cast(run.server.model, dtype)), large=True),
    Kind("arithmetic", "the trainer computes in half precision", DTYPE, (torch.bfloat16,),
         lambda run, dtype: put(run.trainer, dtype=dtype)),
    Kind("arithmetic", "logits are of half precision", DTYPE, (torch.bfloat16,),
         lambda run, dtype: run.server.alter(lambda model: model.lm_head.register_forward_hook(
             lambda module, read, logits: logits.to(dtype).float()))),
    # Eight bits are a lower precision, and to score in the sampler's is a remedy; four bits are another model.
    Kind("arithmetic", "the server has weights of 8 bits", DTYPE + UNKNOWN, (8,),
         lambda run, bits: run.server.alter(lambda model: quantised(model, bits)), large=True),
    Kind("arithmetic", "the server has weights of 4 bits", UNKNOWN, (4, 5),
         lambda run, bits: run.server.alter(lambda model: quantised(model, bits))),

    # The model: the same weights, computed with differently.
    Kind("model", "the server has another rope base", UNKNOWN, (9_000.0, 100_000.0),
         lambda run, base: run.server.alter(lambda model: rotary(model, base))),
    Kind("model", "the trainer has another rope scaling", UNKNOWN, (1.1, 2.0),
         lambda run, factor: put(run.trainer, altered=lambda model: rotary(model, factor=factor))),
    Kind("model", "the server has another norm eps", UNKNOWN, (1e-3, 1e-2),
         lambda run, eps: run.server.alter(lambda model: every(model, "variance_epsilon", eps))),
    Kind("model", "the server has a sliding window", UNKNOWN, (8, 16),
         lambda run, n: run.server.alter(lambda model: windowed(model, n))),
    Kind("model", "the trainer pads on the left and does not say so", PADDING, (16, 4),
         lambda run, n: put(run.trainer, pads_left=True, tells=(), batch=n)),
    Kind("model", "the trainer pads on the left and gives no positions", PADDING, (16,),
         lambda run, n: put(run.trainer, pads_left=True, tells=("attention_mask",), batch=n)),
    Kind("model", "the server pads on the left and does not say so", PADDING, (16, 64),
         lambda run, n: put(run.server, bucket=n)),
    Kind("model", "dropout", DROPOUT, (0.003, 0.1, 0.02), dropped),
    Kind("model", "dropout with a fixed seed", DROPOUT, (0.005, 0.2), partial(dropped, seed=1)),
    Kind("model", "dropout in the adapter", DROPOUT, ("on",), lambda run, _: put(run.trainer, training=True),
         ("leaky",)),
    Kind("model", "the server has another vocabulary", ("vocabulary",), (slice(21, 31), slice(40, 240), slice(18, 80)),
         lambda run, ids: run.server.alter(lambda model: reordered(model, ids))),

    # Bookkeeping.
    Kind("bookkeeping", "off by one, with 0 at the edge", SHIFT, (1, -1),
         lambda run, by: {"collate": partial(off_by_one, by=by, edge=0.0)}),
    Kind("bookkeeping", "off by one, with NaN at the edge", SHIFT, (1, -1),
         lambda run, by: {"collate": partial(off_by_one, by=by, edge=np.nan)}),
    Kind("bookkeeping", "the trainer is off by one", SHIFT, (1, -1), shifted_trainer),
    Kind("bookkeeping", "the prompt is trained", LEAK, (100, 2, 1, 6), lambda run, n: {"collate": partial(
        weighed, weigh=lambda w: np.where(np.arange(len(w)) >= np.argmax(w) - n, 1.0, w))}),
    Kind("bookkeeping", "what others say is trained", LEAK, (2, 3), lambda run, n: {"turns": n, "collate": partial(
        weighed, weigh=lambda w: np.where(np.arange(len(w)) >= np.argmax(w), 1.0, w))}, ("plain", "lora", "mute")),
    Kind("bookkeeping", "padding is trained", LEAK, (1, 100), lambda run, n: {"collate": partial(
        padded_and_trained, pad=run.tokenizer.pad_token_id, most=n)}),
    Kind("bookkeeping", "weights are off by one", LEAK, (2, 1), lambda run, turns: {"turns": turns, "collate":
        partial(weighed, weigh=lambda w: np.r_[w[1:], 0.0])}, ("plain", "lora", "mute")),
    # Across groups either remedy, a row's own datum or its own group, keeps rows where they belong.
    Kind("bookkeeping", "logprobs by arrival in a group", ("rows permuted",), ("group",),
         lambda run, within: {"collate": partial(by_arrival, within=within)}),
    Kind("bookkeeping", "logprobs by arrival in a step", ("rows permuted", "wrong group"), ("step",),
         lambda run, within: {"collate": partial(by_arrival, within=within)}),
    Kind("bookkeeping", "the trainer does not undo its sorting", ("rows permuted", "wrong group"), (8, 2),
         lambda run, n: put(run.trainer, sorts_back=False, batch=n)),
    Kind("bookkeeping", "logprobs of another group", ("wrong group",), (1, 2),
         lambda run, by: {"collate": partial(of_next_group, by=by)}),
    Kind("bookkeeping", "completions under another prompt", ("wrong group",), (1, 3),
         lambda run, by: {"collate": partial(under_next_prompt, by=by)}),
    Kind("bookkeeping", "another reference", ("wrong reference",), (1, 3, 2), other_reference, ("first",)),

    # Two at once: either is a right answer.
    Kind("pair", "a temperature, and late", TEMPERATURE + STALE,
         (("the server has its own temperature", 0.8, "rollouts are late", 1),), both),
    Kind("pair", "by arrival, and half precision", ("rows permuted", *DTYPE),
         (("logprobs by arrival in a group", "group", "the trainer computes in half precision", torch.bfloat16),),
         both),
    Kind("pair", "a system prompt, and a top-p", TEXT + CUT,
         (("the server adds a system prompt", "Add.", "the server has its own top-p", 0.9),), both),
    Kind("pair", "rope, and a temperature", UNKNOWN + TEMPERATURE,
         (("the trainer has another rope scaling", 1.05, "the server has its own temperature", 0.7),), both),
    Kind("pair", "late, and dropout", STALE + DROPOUT, (("rollouts are late", 2, "dropout", 0.01),), both),
    Kind("pair", "off by one, and a top-k", SHIFT + CUT,
         (("off by one, with 0 at the edge", 1, "the server has its own top-k", 4),), both),

    # Nothing is wrong.
    Kind("clean", "a step", (CLEAN,), range(24), lambda run, _: None, (*USUAL, "small", "first", "slow"),
         large=True),
    Kind("clean", "several updates a step", (CLEAN,), range(12),
         lambda run, n: {"minibatches": 2 + n % 4}, ("plain", "slow", "lora", "mute", "wide", "small")),
    Kind("clean", "two turns", (CLEAN,), range(5), lambda run, _: {"turns": 2}, ("small", "lora", "mute")),
    # Both sides in half precision: what is left is noise of the arithmetic, and "dtype" says so.
    Kind("clean", "half precision on both sides", (CLEAN, *DTYPE), range(8), lambda run, _: None, ("half",)),
    Kind("clean", "other batches", (CLEAN,), range(6),
         lambda run, n: put(run.trainer, batch=1 + n % 3), ("wide", "lora", "cool", "mute")),
]
# fmt: on
