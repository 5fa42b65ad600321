"Services that deviate in one way: what is patched in the emulator, and the check that has to name it."

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rl_notebook.emulator import trainer

KNOWN: dict[tuple, Any] = {}  # what a service remembers
RNG = np.random.default_rng(0)


@dataclass(frozen=True)
class Deviation:
    "A function of the emulator, and what stands in its place."

    named: str  # the check that must not hold
    attribute: str
    wrap: Callable[[Callable], Callable]
    owner: Any = trainer

    def plant(self, monkeypatch) -> None:
        table = isinstance(self.owner, dict)
        old = self.owner[self.attribute] if table else getattr(self.owner, self.attribute)
        (monkeypatch.setitem if table else monkeypatch.setattr)(self.owner, self.attribute, self.wrap(old))


def learns(named: str, change: Callable[[list], list]) -> Deviation:
    "Other datums are learned than were sent."

    def run_otherwise(run, learner, batch):
        if batch.forward_only:
            return run(learner, batch)
        sent = run(learner, replace(batch, datums=tuple(change(list(batch.datums)))))
        missing = [np.zeros(len(d.targets), np.float32) for d in batch.datums[len(sent.logprobs) :]]
        return replace(sent, logprobs=(*sent.logprobs, *missing))

    return Deviation(named, "run_pass", lambda run: lambda *a: run_otherwise(run, *a))


def weighed(datum, change):
    "A datum with other weights, where it has some."
    series = {k: change(v).astype(np.float32) if k == "weights" else v for k, v in datum.series.items()}
    return replace(datum, series=series)


def weighs(named: str, change) -> Deviation:
    return learns(named, lambda datums: [weighed(d, change) for d in datums])


def per_call(datums):
    return [weighed(d, lambda w: w / len(datums)) for d in datums]


def averaged_pass(run):
    "Divides a sequence's loss by the sum of its weights, and the gradient by the number of sequences."

    def of(d, batch):
        carrier = "weights" if batch.loss_fn == "cross_entropy" else "advantages"
        series = {**d.series, carrier: d.series[carrier] / max(d.series["weights"].sum(), 1e-9) / len(batch.datums)}
        return replace(d, series={k: v for k, v in series.items() if k in (carrier, "logprobs")})

    changed = lambda batch: (
        batch if batch.forward_only else replace(batch, datums=tuple(of(d, batch) for d in batch.datums))
    )
    return lambda learner, batch: run(learner, changed(batch))


def last_call_only(run):
    def deviating(learner, batch):
        learner.state.drop_gradients() if not batch.forward_only else None
        return run(learner, batch)

    return deviating


def says(named: str, change, learning: bool | None = None) -> Deviation:
    "Passes answer with other logprobs: `change(series, how many sequences there are)`; of those that learn, or all."

    def answered(run, learner, batch):
        found = run(learner, batch)
        if learning is not None and learning == batch.forward_only:
            return found
        series = [change(s, len(found.logprobs)).astype(np.float32) for s in found.logprobs]
        return replace(found, logprobs=tuple(series))

    return Deviation(named, "run_pass", lambda run: lambda *a: answered(run, *a))


def steps(named: str, before=None, after=None, **adam) -> Deviation:
    "An update with other settings, after something was done to the gradients, or with them put back after it."

    def stepped(run, learner, given, kind):
        targets, passes = learner.state.targets, learner.passes
        kept = [None if t.grad is None else t.grad.clone() for t in targets]
        before(learner) if before else None
        scaled = {k: getattr(given, k) * v if k == "learning_rate" else v for k, v in adam.items()}
        found = run(learner, replace(given, **scaled), kind)
        if after:
            for t, grad in zip(targets, kept, strict=True):
                t.grad = grad
            learner.passes = passes
            found = run(learner, given, kind) if after == "again" else found
        return found

    return Deviation(named, "run_step", lambda run: lambda *a: stepped(run, *a))


def forget_moments(learner):
    learner.state.optimizer = None


def sends(named: str, factor: float, layers: str = "") -> Deviation:
    "The sampler gets an adapter whose second factor is multiplied, in layers of this name."
    part = lambda name: factor if "lora_B" in name and layers in name else 1.0
    change = lambda tensors: {name: part(name) * t for name, t in tensors.items()}
    return Deviation(named, "snapshot_weights", lambda save: lambda *a: change(save(*a)))


def one_late(save):
    def deviating(learner, kind):
        sent = vars(learner).setdefault("sent", [])
        sent.append(save(learner, kind))
        return sent[-2] if len(sent) > 1 else sent[-1]

    return deviating


def rounding(save):
    def deviating(learner, kind):
        with torch.no_grad():
            for p in learner.state.targets:
                p.copy_((p * 20).round() / 20)
        return save(learner, kind)

    return deviating


def live(asample):
    "The sampler has the trainer's weights, synced or not."

    def deviating(call):
        kept, revisions = call.trainer.snapshots, call.memory.pool.revisions
        for learner in call.memory.learners.values():
            if learner.snapshot in kept.names():
                kept.save(learner.snapshot, trainer.snapshot_weights(learner, "base"), kept.meta(learner.snapshot))
                revisions[learner.snapshot] += 1
        return asample(call)

    return deviating


def draws(named: str, change=None, report=None, echo=None, front=(), **params) -> Deviation:
    "Completions are drawn or reported otherwise; or, with `echo`, the logprobs of given tokens are."

    def wrap(draw):
        async def deviating(sampler, prompt, body):
            if body.get("prompt_logprobs"):
                found = await draw(sampler, prompt, body)
                return replace(found, prompt_logprobs=echo(prompt, found.prompt_logprobs)) if echo else found
            given = dict(body.get("sampling_params") or {})
            given |= params | (change(given) if change else {})
            found = await draw(sampler, [*front, *prompt], {**body, "sampling_params": given})
            return replace(found, completions=[report(c) for c in found.completions]) if report else found

        return deviating

    return Deviation(named, "draw_and_score", wrap)


def processed(c):
    return replace(c, logprobs=c.sampling_logprobs)


def without_end(c):
    cut = {"tokens": c.tokens[:-1], "logprobs": c.logprobs[:-1], "sampling_logprobs": None}
    return replace(c, **cut) if c.finish_reason == "stop" else c


def warm(open_learner):
    def deviating(*call):
        learner = open_learner(*call)
        learner.state.scoring = replace(learner.state.scoring, temperature=0.8)
        return learner

    return deviating


def boastful(capabilities):
    twice = lambda model: {**model, "max_context_length": 2 * model["max_context_length"]}
    return lambda call: {"supported_models": [twice(m) for m in capabilities(call)["supported_models"]]}


def unclipped(served):
    open_ended = lambda batch: replace(batch, loss_fn="importance_sampling", config={})
    return lambda batch: served(open_ended(batch) if batch.loss_fn == "ppo" else batch)


TINKER: dict[str, Deviation] = {
    "sign turned": weighs("gradient sign", lambda w: -w),
    "negative weights dropped": weighs("gradient sign", lambda w: np.maximum(w, 0)),
    "weights clipped at 1": weighs("twice the derivative", lambda w: np.clip(w, -1, 1)),
    "mask ignored": weighs("one position moves another", lambda w: np.where(np.abs(w) < 1e-9, w.sum(), w)),
    "a place early": weighs("one position moves another", lambda w: np.roll(w, -1)),
    "divided by tokens": weighs("derivatives travel as", lambda w: w / max(1, np.count_nonzero(w))),
    "averaged": Deviation("derivatives travel as", "run_pass", averaged_pass),
    "divided by sequences": learns("two sequences", per_call),
    "last sequence left out": learns("two sequences", lambda datums: datums[:-1] or datums),
    "equal sequences once": learns("two sequences", lambda datums: [*{d.tokens.tobytes(): d for d in datums}.values()]),
    "last call only": Deviation("two calls", "run_pass", last_call_only),
    "scored a place late": says("shift", lambda s, n: np.roll(s, 1)),
    "base 2": says("policy and sampler", lambda s, n: s / np.log(2)),
    "temperature 0.8": Deviation("policy and sampler", "open_learner", warm),
    "dropout": says("alone and in a batch", lambda s, n: s + RNG.normal(0, 0.3, len(s))),
    "dropout in training": says("forward inside backward", lambda s, n: s + RNG.normal(0, 0.3, len(s)), True),
    "neighbours leak": says("alone and in a batch", lambda s, n: s - 0.2 * (n - 1)),
    "half the rate": steps("size of a step", learning_rate=0.5),
    "nothing moves": steps("gradient sign", learning_rate=0.0),
    "two updates": steps("size of a step", after="again"),
    "eps of its own": steps("twice the derivative", eps=1e-8),
    "clipped": steps("twice the derivative", grad_clip_norm=0.1),
    "weight decay": steps("momentum", weight_decay=0.1),
    "betas of its own": steps("momentum", beta1=0.5),
    "gradient carried on": steps("momentum", after="kept"),
    "moments forgotten": steps("momentum", forget_moments),
    "states not loaded": Deviation("states", "load_state", lambda load: lambda *a: None),
    "states without optimizer": Deviation(
        "optimizer in a state", "load_state", lambda load: lambda a, b, c, d, e: load(a, b, c, False, e)
    ),
    "sync brings nothing": sends("second sync", 0.0),
    "half the layers": sends("second sync", 0.0, "layers.0"),
    "adapter twice": sends("second sync", 2.0),
    "one sync late": Deviation("second sync", "snapshot_weights", one_late),
    "scores remembered": draws("second sync", echo=lambda prompt, scores: KNOWN.setdefault(tuple(prompt), scores)),
    "sync rounds the trainer": Deviation("trainer after a sync", "snapshot_weights", rounding),
    "sampler follows": Deviation("sampler before a sync", "asample", live, trainer.POSTS),
    "drawn at 0.5": draws("drawn as often as said", temperature=0.5),
    "top-p 0.8": draws("drawn as often as said", top_p=0.8),
    "greedy": draws("drawn as often as said", temperature=0.0),
    "top-k 3, reported after the cut": draws("drawn and scored", report=processed, top_k=3),
    "reported at 0.7": draws("drawn and scored", report=processed, temperature=0.7),
    "longer than asked": draws("drawn and scored", lambda given: {"max_tokens": given["max_tokens"] + 4}),
    "shorter than asked": draws("drawn and scored", max_tokens=1),
    "BOS in front of draws": draws("drawn and scored", front=(0,)),
    "end tokens cut off": draws("the end is part of it", report=without_end),
    "echo a place early": draws("policy and sampler", echo=lambda prompt, scores: np.append(scores[1:], scores[-1:])),
    "prompts cut": draws("longest sequence", echo=lambda prompt, scores: scores[-100:]),
    "sequences cut": says("longest sequence", lambda s, n: np.where(np.arange(len(s)) < 100, s, 0)),
    "says twice its context": Deviation("longest sequence", "get_server_capabilities", boastful, trainer.GETS),
    "ppo does not clip": Deviation("its own losses", "served_loss", unclipped),
}
