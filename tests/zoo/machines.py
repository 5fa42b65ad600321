"A server and a trainer made of Hugging Face modules, with switches for what can be wrong with either."

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rl_notebook.backends.base import Backend, Capabilities
from rl_notebook.core.types import (
    AdamParams,
    BackendError,
    Completion,
    Datum,
    Logprobs,
    LossOutput,
    SampleParams,
    TopLogprobs,
)
from rl_notebook.task.models import load_model

Weights = dict[str, Tensor]
Alteration = Callable[[nn.Module], Any]  # changes a model in place


@functools.cache
def shipped_model(name: str) -> tuple[Any, Any]:
    "A model and its tokenizer, to be copied and never changed."
    return load_model(name)


def merged(model: Any) -> Any:
    "A copy of a model without adapters; those that it has are merged in."
    copied = copy.deepcopy(model)
    return copied.merge_and_unload() if hasattr(model, "merge_and_unload") else copied


def plain_weights(model: Any) -> Weights:
    "Weights of a model without adapters; those of an adapter are merged in."
    return {name: t.detach() for name, t in merged(model).state_dict().items()}


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    "A block with a separate generator."
    with torch.random.fork_rng():
        torch.manual_seed(0 if seed is None else seed % 2**63)
        yield


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    "The model with parameters of this type; what it computes with, such as rotary frequencies, stays as it is."
    for p in model.parameters():
        p.data = p.data.to(dtype)
    return model


@dataclass(eq=False)
class Server:
    "Samples with `generate`. What a client does not know of it is a field."

    model: Any  # not shared
    tokenizer: Any
    # arguments of `generate`, whatever was asked for
    forced: dict[str, Any] = field(default_factory=dict)
    # "both", only "raw" or "processed" logprobs, under either name, or those of the "likeliest"
    # token
    reports: str = "both"
    reads: Callable[[list[int]], list[int]] = list  # what it makes of a prompt
    prefix: tuple[int, ...] = ()  # ids that it puts before everything that it reads
    can_echo: bool = True
    altered: Alteration | None = None  # after each load
    version: int = 0

    def load(self, weights: Mapping[str, Tensor]) -> None:
        "Serve these weights; what is not among them stays as it is."
        self.model.load_state_dict(
            {n: t.to(self.model.dtype) for n, t in weights.items()}, strict=False
        )
        if self.altered is not None:
            self.altered(self.model)

    def alter(self, alteration: Alteration) -> None:
        "Serve an altered model from now on."
        self.altered = alteration
        alteration(self.model)

    def fed(self, tokens: Sequence[int] | np.ndarray) -> list[int]:
        "What the model reads for a sequence."
        return [*self.prefix, *map(int, tokens)]

    async def sample(
        self, prompt_tokens: Sequence[int] | np.ndarray, params: SampleParams
    ) -> list[Completion]:
        "Completions, with raw logprobs and those of the distribution sampled from."
        prompt = [int(t) for t in prompt_tokens]
        if not prompt or params.stop:
            raise BackendError(
                "request", got="no tokens" if not prompt else "stop strings", expected="token ids"
            )
        ids = torch.tensor([self.fed(self.reads(prompt))] * params.n)
        asked: dict[str, Any] = {
            "do_sample": params.temperature > 0,
            "max_new_tokens": params.max_tokens,
        }
        if params.temperature > 0:
            asked |= {
                "temperature": float(params.temperature),
                "top_k": params.top_k,
                "top_p": float(params.top_p),
            }
        eos = [self.tokenizer.eos_token_id, *params.stop_token_ids]
        asked |= {"eos_token_id": eos, "pad_token_id": self.tokenizer.pad_token_id} | self.forced
        settings = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
        with torch.no_grad(), seeded(params.seed):
            out = self.model.generate(ids, attention_mask=torch.ones_like(ids), **asked, **settings)
        sampled = out.sequences[:, ids.shape[1] :]
        both_logits = [torch.stack(parts, 1).float() for parts in (out.logits, out.scores)]
        series = [
            _picked(
                logits_of_kind,
                logits_of_kind.argmax(-1) if self.reports == "likeliest" else sampled,
            )
            for logits_of_kind in both_logits
        ]
        ends = [
            next((i for i, t in enumerate(row.tolist(), 1) if t in eos), len(row))
            for row in sampled
        ]
        completions = [self._completion(prompt, row[:n], r[:n], p[:n], params, eos)
                       for row, r, p, n in zip(sampled.numpy(), *series, ends, strict=True)]  # fmt: skip
        if params.top_logprobs == 0:
            return completions
        listed = both_logits[0 if self.reports == "raw" else 1].log_softmax(-1)
        listed = [row[:n].topk(params.top_logprobs) for row, n in zip(listed, ends, strict=True)]
        return [
            replace(
                c,
                top_logprobs=TopLogprobs(
                    top.indices.numpy(), top.values.numpy(), np.ones(len(c.tokens), dtype=bool)
                ),
            )
            for c, top in zip(completions, listed, strict=True)
        ]

    def _completion(self, prompt, tokens, raw, processed, params, eos) -> Completion:
        reported = {
            "both": (raw, processed),
            "raw": (raw, raw),
            "processed": (processed, processed),
        }.get(self.reports, (raw, processed))
        logprobs, sampling_logprobs = reported
        text = self.tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
        reason = "stop" if tokens[-1] in eos else "length"
        return Completion(
            prompt, tokens, logprobs, sampling_logprobs, text, reason, self.version, params
        )

    async def logprobs(self, tokens: Sequence[int] | np.ndarray) -> Logprobs:
        "Raw logprobs of given tokens (N-1,)."
        if not self.can_echo:
            raise BackendError(
                "echo",
                where="a server of the zoo",
                got="a request",
                expected="none: it cannot echo",
            )
        with torch.no_grad():
            logits = self.model(torch.tensor([self.fed(tokens)])).logits[0, -len(tokens) : -1]
        series = _picked(logits[None], torch.tensor([list(map(int, tokens[1:]))]))[0]
        dtype = str(self.model.dtype).removeprefix("torch.")
        return Logprobs(series, source="sampler", policy_version=self.version, dtype=dtype)


def _picked(logits: Tensor, ids: Tensor) -> np.ndarray:  # (B, C)
    "Logprobs of ids (B, C) under logits (B, C, V)."
    return logits.float().log_softmax(-1).gather(-1, ids[..., None])[..., 0].double().numpy()


def logprobs_of_named(datum: Datum, logprobs: Tensor) -> Tensor | None:  # (N-1, V) to (N-1, k)
    "Of the tokens that a datum names at some places, NaN elsewhere; None where it names none."
    top = datum.top_logprobs
    if top is None:
        return None
    named = torch.full((len(logprobs), top.tokens.shape[1]), torch.nan)
    places = torch.from_numpy(np.flatnonzero(top.sampled))
    ids = torch.from_numpy(top.tokens.astype(np.int64))
    named[places] = logprobs[places].gather(-1, ids.clamp(min=0)).detach()
    return named


@dataclass(eq=False)
class Trainer:
    "Scores in right-padded batches of eager modules, and learns by `torch.optim.AdamW`."

    model: Any  # not shared
    pad: int
    temperature: float = 1.0
    dtype: torch.dtype = torch.float32  # of the arithmetic, by autocast
    batch: int = 8  # sequences of one pass
    altered: Alteration | None = None  # of a copy that scores
    pads_left: bool = False
    # what the model gets of the padding
    tells: tuple[str, ...] = (
        "attention_mask",
        "position_ids",
    )
    training: bool = False  # whether the model is left in training mode
    version: int = 0
    source: str = "policy"
    snapshots: dict[str, Weights] = field(default_factory=dict)
    states: dict[str, Weights] = field(default_factory=dict)
    optimizer: torch.optim.AdamW | None = None
    entropies: list[Tensor] = field(default_factory=list)  # of what was scored last, one per datum
    of_pass: list[Tensor] = field(default_factory=list)  # and in the last pass
    # logprobs of the tokens that a datum names, (N-1, k) one per datum
    tops: list[Tensor | None] = field(default_factory=list)

    def scorer(self) -> Any:
        "The model that scores."
        if self.altered is None:
            return self.model
        other = copy.deepcopy(self.model)
        self.altered(other)
        return other

    def score(self, datums: Sequence[Datum]) -> list[Tensor]:
        "One (N-1,) tensor per datum, NaN where its weight is 0."
        model = self.scorer()
        series = [torch.empty(0)] * len(datums)
        self.entropies = [*series]
        self.tops = [None] * len(datums)
        model.train(self.training)
        order = sorted(range(len(datums)), key=lambda i: len(datums[i].tokens))
        for at in range(0, len(order), self.batch):
            part = order[at : at + self.batch]
            self.of_pass = []
            passed = self._pass(model, [datums[i] for i in part])
            for i, (values, top) in zip(part, passed, strict=True):
                series[i] = values
                self.tops[i] = top
            # a bug with a separate pass tells none
            for i, values in zip(part, self.of_pass, strict=False):
                self.entropies[i] = values
        holes = [torch.from_numpy(np.where(d.active, 0.0, np.nan)).float() for d in datums]
        return [s + hole for s, hole in zip(series, holes, strict=True)]

    def _pass(
        self, model: Any, datums: Sequence[Datum]
    ) -> list[tuple[Tensor, Tensor | None]]:  # (N-1,), and (N-1, k) where a datum names k tokens
        rows = [d.tokens for d in datums]
        longest = max(map(len, rows))
        starts = torch.tensor([longest - len(r) if self.pads_left else 0 for r in rows])[:, None]
        ends = starts + torch.tensor([len(r) for r in rows])[:, None]
        place = torch.arange(longest)[None]
        known = (place >= starts) & (place < ends)
        ids = torch.full(known.shape, self.pad)
        ids[known] = torch.from_numpy(np.concatenate(rows))
        padding = {"attention_mask": known.long(), "position_ids": (place - starts).clamp(min=0)}
        padding = {name: t for name, t in padding.items() if name in self.tells}
        with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            logits = model(ids, **padding, use_cache=False).logits[:, :-1]
        chances = torch.distributions.Categorical(
            logits=logits.float() / self.temperature, validate_args=False
        )
        slices = [
            slice(int(a), int(a) + len(r) - 1) for a, r in zip(starts[:, 0], rows, strict=True)
        ]
        self.of_pass = [h[part] for h, part in zip(chances.entropy().detach(), slices, strict=True)]
        scored = chances.log_prob(ids[:, 1:])
        return [
            (scored[i, part], logprobs_of_named(d, chances.logits[i, part]))
            for i, (d, part) in enumerate(zip(datums, slices, strict=True))
        ]

    def as_logprobs(self, series: Sequence[Tensor]) -> list[Logprobs]:
        "Series with what is true of them as far as a trainer knows."
        what = {
            "source": self.source,
            "policy_version": self.version,
            "temperature": self.temperature,
        }
        kind = str(self.dtype).removeprefix("torch.")
        scored, entropies = (
            [s.detach().double().numpy() for s in part] for part in (series, self.entropies)
        )
        if [len(s) for s in scored] != [len(h) for h in entropies]:  # a bug scores in other parts
            entropies = [None] * len(scored)
        tops = self.tops if len(self.tops) == len(scored) else [None] * len(scored)
        return [
            Logprobs(s, **what, dtype=kind, entropy=h, top=None if top is None else top.numpy())
            for s, h, top in zip(scored, entropies, tops, strict=True)
        ]

    async def forward(self, datums: Sequence[Datum]) -> list[Logprobs]:
        with torch.no_grad():
            return self.as_logprobs(self.score(datums))

    async def forward_backward_custom(self, datums: Sequence[Datum], loss_fn: Any) -> LossOutput:
        series = self.score(datums)
        leaves = [s.detach().clone().requires_grad_() for s in series]
        loss, metrics = loss_fn(datums, leaves)
        loss.backward()
        results = [
            torch.zeros_like(p) if p.grad is None else p.grad.nan_to_num(0.0) for p in leaves
        ]
        whole = [
            (s[a], g[a])
            for s, g, d in zip(series, results, datums, strict=True)
            for a in [torch.from_numpy(d.active)]
        ]
        parts = [(s * g).sum() for s, g in whole]
        torch.stack(parts).sum().backward()
        dlogprobs = tuple(g.double().numpy() for g in results)
        return LossOutput(loss.item(), dict(metrics), tuple(self.as_logprobs(series)), dlogprobs)

    async def optim_step(
        self, adam: AdamParams, *, grad_accumulation_normalization: str = "none"
    ) -> dict[str, float]:
        if grad_accumulation_normalization != "none":
            raise BackendError("optim_step", got=grad_accumulation_normalization, expected="none")
        learning = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = self.optimizer or torch.optim.AdamW(learning)
        group = {"lr": adam.learning_rate, "betas": (adam.beta1, adam.beta2), "eps": adam.eps}
        self.optimizer.param_groups[0].update(group, weight_decay=adam.weight_decay)
        norm = float(nn.utils.clip_grad_norm_(learning, adam.grad_clip_norm or float("inf")))
        self.optimizer.step()
        await self.discard_gradients()
        return {"grad_norm": norm, "learning_rate": adam.learning_rate}

    async def discard_gradients(self) -> None:
        self.model.zero_grad(set_to_none=True)

    async def save_state(self, name: str) -> str:
        self.states[name] = {
            n: p.detach().clone() for n, p in self.model.named_parameters() if p.requires_grad
        }
        return name

    async def load_state(self, path: str, *, optimizer: bool = True) -> None:
        self.take(self.states[path])

    def take(self, weights: Weights) -> None:
        "Go on from these weights."
        self.model.load_state_dict(weights, strict=False)

    async def save_weights_for_sampler(self, name: str) -> str:
        self.snapshots[name] = plain_weights(self.model)
        return name

    async def save_changed_weights(self, name: str, change: Callable[[str, Tensor], Tensor]) -> str:
        changed = merged(self.model)
        for key, p in changed.named_parameters():
            p.data = change(key, p.data)
        self.snapshots[name] = {key: t.detach() for key, t in changed.state_dict().items()}
        return name


@dataclass(eq=False)
class Sync:
    "Copies a snapshot of the trainer into the server, as far as it does its work."

    trainer: Trainer
    server: Server
    base: Weights  # of the model before any update
    travels: Callable[[str], bool] = bool  # which weights arrive
    scale: float = 1.0  # of what was learned

    async def __call__(self, snapshot: str) -> int:
        if snapshot not in self.trainer.snapshots:
            raise BackendError(
                "snapshot", got=repr(snapshot), expected=f"one of {sorted(self.trainer.snapshots)}"
            )
        new = {n: t for n, t in self.trainer.snapshots[snapshot].items() if self.travels(n)}
        self.server.load({n: torch.lerp(self.base[n], t, self.scale) for n, t in new.items()})
        self.server.version += 1
        self.trainer.version = self.server.version
        return self.server.version


def with_adapter(model: Any, rank: int) -> Any:
    "The model, of which only a LoRA adapter learns."
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM")
    with seeded(0):
        return get_peft_model(model, config)


def assemble_backend(
    trainer: Trainer, reference: Trainer, sampler: Any, sync: Sync, lora_rank: int
) -> Backend:
    "The machines as a backend."

    def score_at(temperature: float) -> None:
        trainer.temperature = reference.temperature = temperature

    can = {"lora_rank": lora_rank, "policy_temperature": trainer.temperature, "top_logprobs": 20}
    scores_top = "score" not in vars(trainer)  # a bug's own score says nothing of other tokens
    capabilities = Capabilities(
        "zoo", grad_accumulation_normalization=("none",), scores_top=scores_top, **can
    )
    roles = {"policy": trainer, "reference": reference, "sampler": sampler, "sync": sync}
    return Backend(
        **roles, tokenizer=sampler.tokenizer, capabilities=capabilities, score_at=score_at
    )
