"What can be wrong, as a table: each fault changes machines or code of a run, and makes a step."

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from rl_notebook.core import Completion, Datum, PromptGroup
from rl_notebook.datums import datums_from_groups
from rl_notebook.records import StepRecord

from .steps import Run, World

NONE, CLEAN = "none of the known causes", "all well"  # as the doctor says it
BUILD, UNSEEN = "build", "unseen"
Make = Callable[[Run, Any], Awaitable[StepRecord]]

WORLDS = {
    "plain": World(),
    "lora": World(lora_rank=8, learning_rate=1e-3),
    "cool": World(temperature=0.7),
    "mute": World(can_echo=False),
    "half": World(dtype="bfloat16"),
    "wide": World(prompts=8, completions=4),
    "small": World(prompts=2, completions=3),
    "first": World(warm_up=0),
    "hot": World(temperature=1.6),
    "large": World("smollm2", prompts=2, completions=2, max_tokens=16, warm_up=0),
}
USUAL = ("plain", "lora", "cool", "mute", "wide")  # taken in turns


@dataclass(frozen=True, eq=False)
class Kind:
    "One kind of fault."

    name: str
    family: str
    right: tuple[str, ...]  # causes that are right answers
    make: Make
    strengths: dict[str, tuple[Any, ...]]  # by split
    worlds: tuple[str, ...] = USUAL


@dataclass(frozen=True)
class Case:
    "One step with one thing wrong, or with nothing wrong."

    kind: Kind
    split: str
    strength: Any
    setting: str  # a key of WORLDS
    seed: int

    @property
    def name(self) -> str:
        return f"{self.kind.name}[{self.strength}, {self.setting}, {self.seed}]"

    @property
    def world(self) -> World:
        draw = self.strength if self.kind.family == "clean" else 0
        return replace(WORLDS[self.setting], seed=self.seed, draw=draw)


KINDS: list[Kind] = []


def kind(
    family: str, *right: str, build: Sequence[Any] = (), unseen: Sequence[Any] = (), worlds: Sequence[str] = USUAL
):
    "Puts a function `(run, strength)` into the table, under its name."

    def put(make: Make) -> Make:
        name = make.__name__.replace("_", " ")
        KINDS.append(Kind(name, family, right, make, {BUILD: tuple(build), UNSEEN: tuple(unseen)}, tuple(worlds)))
        return make

    return put


# --- the draw: a server that processes logits as nobody asked it to -----------------------------------------------


def forced(run: Run, reports: str = "processed", **arguments: Any) -> None:
    "The server draws so, whatever is asked, and reports the logprobs of what it draws from."
    run.server.forced, run.server.reports = arguments, reports


@kind("draw", "temperature", build=(0.6, 0.9, 1.04, 1.4), unseen=(0.75, 0.95, 1.15))
async def the_server_has_its_own_temperature(run, t):
    forced(run, temperature=t * run.world.temperature)
    return await run.step()


@kind("draw", "top-p or top-k", build=(2, 8), unseen=(3, 20))
async def the_server_has_its_own_top_k(run, k):
    forced(run, top_k=k)
    return await run.step()


@kind("draw", "top-p or top-k", build=(0.7, 0.97), unseen=(0.85, 0.95))
async def the_server_has_its_own_top_p(run, p):
    forced(run, top_p=p)
    return await run.step()


@kind("draw", "top-p or top-k", build=(0.8, 0.95), worlds=("plain", "lora", "mute"))
async def top_p_is_asked_for(run, p):
    return await run.step(top_p=p)


# Min-p keeps what is likely enough and renormalises, as top-p and top-k do: either answer leads there.
@kind("draw", "top-p or top-k", NONE, unseen=(0.02, 0.1, 0.4))
async def the_server_has_a_min_p(run, p):
    forced(run, min_p=p)
    return await run.step()


@kind("draw", NONE, build=(1.05, 1.2, 1.5))
async def the_server_penalises_repetition(run, penalty):
    forced(run, repetition_penalty=penalty)
    return await run.step()


# One token is cut off and the rest renormalised: "top-p or top-k" has found the truncation.
@kind("draw", "top-p or top-k", NONE, unseen=(4, 12))
async def the_server_forbids_eos_at_first(run, tokens):
    forced(run, min_new_tokens=tokens)
    return await run.step()


@kind("draw", "temperature", build=(0.8, 1.1, 2.0), worlds=("plain", "lora", "mute", "wide"))
async def the_trainer_divides_by_its_own_temperature(run, t):
    run.trainer.temperature = t
    return await run.step()


@kind("draw", "temperature", unseen=(0.6, 1.3))
async def one_of_two_servers_has_its_own_temperature(run, t):
    inner, asked = run.server.sample, itertools.count()

    async def sample(prompt, params):
        forced(run, **({"temperature": t * run.world.temperature} if next(asked) % 2 else {}))
        return await inner(prompt, params)

    run.server.sample = sample
    return await run.step()


# --- the report: the right draw, and numbers that say something else of it ----------------------------------------


@kind("report", "temperature", build=(0.7, 1.3), unseen=(0.8, 0.5), worlds=("plain", "mute", "wide"))
async def raw_is_reported_where_a_temperature_was_asked(run, t):
    run.trainer.temperature = run.reference.temperature = t
    run.server.reports = "raw"
    return await run.step(temperature=t)


# The numbers are right but for noise in the last digit that is left, which is what "dtype" says; it is no dtype.
@kind("report", "dtype or batching", NONE, build=(2, 1), unseen=(3, 0))
async def logprobs_are_rounded(run, digits):
    run.server.writes = lambda logprobs: np.round(logprobs, digits)
    return await run.step()


@kind("report", NONE, build=(2.0,), unseen=(10.0,))
async def logprobs_have_another_base(run, base):
    run.server.writes = lambda logprobs: logprobs / np.log(base)
    return await run.step()


@kind("report", NONE, unseen=("exp",))
async def probabilities_are_reported(run, _):
    run.server.writes = np.exp
    return await run.step()


@kind("report", NONE, unseen=(-0.5, -3.0))
async def logprobs_have_a_floor(run, floor):
    run.server.writes = lambda logprobs: np.maximum(logprobs, floor)
    return await run.step()


def without_eos(completion: Completion, blank: float) -> Completion:
    "What a server says that has no logprob for the token which ends it."
    if completion.finish_reason != "stop":
        return completion
    told = np.r_[completion.logprobs[:-1], blank]
    return replace(completion, logprobs=told, sampling_logprobs=told)


@kind("report", NONE, build=(0.0,), unseen=(-1.0,))
async def eos_has_no_logprob(run, blank):
    run.server.says = lambda completion: without_eos(completion, blank)
    return await run.step()


# --- text: what the server reads is not what the trainer reads ----------------------------------------------------


def through_text(run: Run, change: Callable[[str], str]) -> None:
    "The server is sent text, and renders it in its own way."
    tokenizer = run.tokenizer
    run.server.reads = lambda ids: tokenizer(change(tokenizer.decode(ids)), add_special_tokens=False)["input_ids"]


@kind("text", "BOS or template", build=("Q: {}\nA: ", "<|user|>{}<|assistant|>"), unseen=("### {}\n",))
async def another_template(run, template):
    marks = ("<|bos|>", "<|end|>", "<|user|>", "<|assistant|>")
    bare = lambda text: "".join(text.split(marks[0])).replace(marks[1], "").split(marks[2])[-1].split(marks[3])[0]
    through_text(run, lambda text: marks[0] + template.format(bare(text)))
    return await run.step()


@kind("text", "BOS or template", build=("You are a calculator.",), unseen=("Be brief.", "Answer after ####."))
async def the_server_adds_a_system_prompt(run, words):
    through_text(run, lambda text: text.replace("<|bos|>", f"<|bos|><|system|>{words}<|end|>", 1))
    return await run.step()


@kind("text", "BOS or template", build=("",), unseen=("<|pad|>", "<|end|>"))
async def the_server_begins_with_another_bos(run, bos):
    through_text(run, lambda text: text.replace("<|bos|>", bos, 1))
    return await run.step()


@kind("text", "BOS or template", unseen=(1, 2))
async def the_server_adds_bos_to_everything(run, times):
    run.server.prefix = (run.tokenizer.bos_token_id,) * times
    return await run.step()


@kind("text", "BOS or template", unseen=(" ", "\n"))
async def white_space_ends_the_prompt(run, space):
    through_text(run, lambda text: text + space)
    return await run.step()


# --- weights: those of the server are not the trainer's -----------------------------------------------------------


@kind("weights", "stale weights", build=(1, 2, 5), unseen=(3, 4), worlds=("plain", "lora", "cool", "mute"))
async def rollouts_are_late(run, updates):
    await run.update(updates, publish=False)
    run.trainer.version += updates
    return await run.step()


# Nothing that is asked of the machines tells weights that never arrive from a server that computes otherwise.
@kind("weights", "stale weights", NONE, build=(1, 3), unseen=(2,), worlds=("plain", "lora", "half", "mute"))
async def a_sync_copies_nothing(run, updates):
    run.sync.travels = lambda name: False
    for _ in range(updates):
        await run.update()
    return await run.step()


# As above.
@kind("weights", "stale weights", NONE, unseen=("lm_head", "embed_tokens"), worlds=("plain", "cool", "wide"))
async def a_part_of_the_model_does_not_travel(run, part):
    run.sync.travels = lambda name: part not in name
    await run.update(4)
    return await run.step()


# Here they can be told apart: the server is the reference.
@kind("weights", "stale weights", build=(3, 1), unseen=(5,), worlds=("lora",))
async def the_adapter_does_not_travel(run, updates):
    run.sync.scale = 0.0
    await run.update(updates)
    return await run.step()


# --- arithmetic ---------------------------------------------------------------------------------------------------


@kind("arithmetic", "dtype or batching", build=("bfloat16",), unseen=("float16",), worlds=("plain", "lora", "cool"))
async def the_server_computes_in_half_precision(run, dtype):
    run.server.model.to(getattr(torch, dtype))
    return await run.step()


@torch.no_grad()
def quantised(model: nn.Module, bits: int) -> None:
    "Weights of linear layers as whole multiples of 1/(2**(bits-1)-1) of the largest in their row."
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.requires_grad | (module.weight.shape[0] > 64):
            step = module.weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
            module.weight.copy_((module.weight / step).round() * step)


# Eight bits are a lower precision, and to score in the sampler's is a remedy; four bits are another model.
@kind("arithmetic", "dtype or batching", NONE, build=(8,))
async def the_server_has_weights_of_8_bits(run, bits):
    run.server.alter(lambda model: quantised(model, bits))
    return await run.step()


@kind("arithmetic", NONE, unseen=(4, 5))
async def the_server_has_weights_of_4_bits(run, bits):
    run.server.alter(lambda model: quantised(model, bits))
    return await run.step()


# --- the model: the same weights, computed with differently -------------------------------------------------------


def rotary(model: nn.Module, base: float = 10_000.0, factor: float = 1.0) -> None:
    "Rotary positions of another base, or scaled."
    [module] = [m for m in model.modules() if hasattr(m, "inv_freq")]
    half = len(module.inv_freq)
    module.inv_freq.copy_(base ** -(torch.arange(half) / half) / factor)


@kind("model", NONE, build=(9_000.0, 100_000.0))
async def the_server_has_another_rope_base(run, base):
    run.server.alter(lambda model: rotary(model, base))
    return await run.step()


@kind("model", NONE, unseen=(1.1, 2.0))
async def the_trainer_has_another_rope_scaling(run, factor):
    run.trainer.altered = lambda model: rotary(model, factor=factor)
    return await run.step()


@kind("model", "padding side", build=(16,), worlds=("plain", "lora", "cool", "wide"))
async def the_trainer_pads_on_the_left_and_does_not_say_so(run, batch):
    run.trainer.pads_left, run.trainer.tells, run.trainer.batch = True, (), batch
    return await run.step()


# --- bookkeeping --------------------------------------------------------------------------------------------------


def with_logprobs(datums: Sequence[Datum], series: Sequence[np.ndarray]) -> list[Datum]:
    "Datums with sampler logprobs as a faulty piece of code pairs them."
    return [replace(d, sampler_logprobs=s) for d, s in zip(datums, series, strict=True)]


@kind("bookkeeping", "shift", build=(1, -1), worlds=("plain", "cool", "mute"))
async def logprobs_are_off_by_one_with_0_at_the_edge(run, by):
    def collate(groups: Sequence[PromptGroup]) -> list[Datum]:
        datums = datums_from_groups(groups)
        filled = [np.nan_to_num(np.r_[0.0, d.sampler_logprobs, 0.0]) for d in datums]
        return with_logprobs(datums, [f[1 + by : len(f) - 1 + by] for f in filled])

    return await run.step(collate=collate)


@kind("bookkeeping", "mask leak", build=("zeros",), unseen=("echo",), worlds=("plain", "lora", "cool"))
async def the_prompt_is_trained(run, logprobs):
    def collate(groups: Sequence[PromptGroup]) -> list[Datum]:
        datums = datums_from_groups(groups)
        return [replace(d, weights=np.ones(len(d.weights)), sampler_logprobs=np.nan_to_num(d.sampler_logprobs))
                for d in datums]  # fmt: skip

    return await run.step(collate=collate)


# --- nothing is wrong ---------------------------------------------------------------------------------------------


@kind("clean", CLEAN, build=range(30), unseen=range(15), worlds=("plain", "lora", "cool", "mute", "wide", "small"))
async def a_step(run, _):
    return await run.step()


def cases(split: str) -> Iterator[Case]:
    "All cases of a part, kind by kind; seeds of the two parts differ."
    for number, k in enumerate(KINDS):
        for i, strength in enumerate(k.strengths[split]):
            start = number + 2 * i
            settings = dict.fromkeys(k.worlds[(start + j) % len(k.worlds)] for j in range(2))
            for j, setting in enumerate(settings):
                yield Case(k, split, strength, setting, (i + j) % 3 + (0 if split == BUILD else 10))
