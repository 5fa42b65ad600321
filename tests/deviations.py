"Services with one deviation each: what is patched in the emulator, and the check that has to name it."

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rl_notebook.backends.local.engine import Request
from rl_notebook.backends.local.trainer import LocalSampler, open_local
from rl_notebook.emulator import models, server, trainer
from rl_notebook.task.models import load_model

KNOWN: dict[tuple, Any] = {}  # what a service remembers
COUNT = itertools.count()
RNG = np.random.default_rng(0)


@dataclass(frozen=True)
class Deviation:
    "A function of the emulator, and its replacement."

    named: str  # the check that must not hold
    attribute: str
    wrap: Callable[[Callable], Callable]
    owner: Any = trainer

    def plant(self, monkeypatch) -> None:
        table = isinstance(self.owner, dict)
        old = self.owner[self.attribute] if table else getattr(self.owner, self.attribute)
        (monkeypatch.setitem if table else monkeypatch.setattr)(
            self.owner, self.attribute, self.wrap(old)
        )


def learns_other_datums(named: str, change: Callable[[list], list]) -> Deviation:
    "Other datums are learned than were sent."

    def run_otherwise(run, learner, batch):
        if batch.forward_only:
            return run(learner, batch)
        sent = run(learner, replace(batch, datums=tuple(change(list(batch.datums)))))
        missing = [np.zeros(len(d.targets), np.float32) for d in batch.datums[len(sent.logprobs) :]]
        return replace(sent, logprobs=(*sent.logprobs, *missing))

    return Deviation(named, "run_pass", lambda run: lambda *a: run_otherwise(run, *a))


def with_changed_weights(datum, change):
    "A datum with other weights, where it has some."
    series = {
        k: change(v).astype(np.float32) if k == "weights" else v for k, v in datum.series.items()
    }
    return replace(datum, series=series)


def changes_weights(named: str, change) -> Deviation:
    return learns_other_datums(
        named, lambda datums: [with_changed_weights(d, change) for d in datums]
    )


def per_call(datums):
    return [with_changed_weights(d, lambda w: w / len(datums)) for d in datums]


def averaged_pass(run):
    "Divides a sequence's loss by the sum of its weights, and the gradient by the number of sequences."

    def of(d, batch):
        carrier = "weights" if batch.loss_fn == "cross_entropy" else "advantages"
        series = {
            **d.series,
            carrier: d.series[carrier] / max(d.series["weights"].sum(), 1e-9) / len(batch.datums),
        }
        return replace(d, series={k: v for k, v in series.items() if k in (carrier, "logprobs")})

    def changed(batch):
        return (
            batch
            if batch.forward_only
            else replace(batch, datums=tuple(of(d, batch) for d in batch.datums))
        )

    return lambda learner, batch: run(learner, changed(batch))


def last_call_only(run):
    def deviating(learner, batch):
        learner.state.drop_gradients() if not batch.forward_only else None
        return run(learner, batch)

    return deviating


def other_logprobs(named: str, change, learning: bool | None = None) -> Deviation:
    "Passes answer with other logprobs: `change(series, how many sequences there are)`; of those that learn, or all."

    def answered(run, learner, batch):
        result = run(learner, batch)
        if learning is not None and learning == batch.forward_only:
            return result
        series = [change(s, len(result.logprobs)).astype(np.float32) for s in result.logprobs]
        return replace(result, logprobs=tuple(series))

    return Deviation(named, "run_pass", lambda run: lambda *a: answered(run, *a))


def steps(check: str, before=None, after=None, **adam) -> Deviation:
    "An update with other settings, after something was done to the gradients, or with them put back after it."

    def stepped(run, learner, adam_params, kind):
        targets = learner.state.targets
        passes = learner.passes
        gradients = [None if t.grad is None else t.grad.clone() for t in targets]
        before(learner) if before else None
        scaled = {
            k: getattr(adam_params, k) * v if k == "learning_rate" else v for k, v in adam.items()
        }
        result = run(learner, replace(adam_params, **scaled), kind)
        if after:
            for t, grad in zip(targets, gradients, strict=True):
                t.grad = grad
            learner.passes = passes
            result = run(learner, adam_params, kind) if after == "again" else result
        return result

    return Deviation(check, "run_step", lambda run: lambda *a: stepped(run, *a))


def forget_moments(learner):
    learner.state.optimizer = None


def sends_scaled_adapter(named: str, factor: float, layers: str = "") -> Deviation:
    "The sampler gets an adapter whose second factor is multiplied, in layers of this name."

    def part(name):
        return factor if "lora_B" in name and layers in name else 1.0

    def change(tensors):
        return {name: part(name) * t for name, t in tensors.items()}

    return Deviation(named, "snapshot_weights", lambda save: lambda *a: change(save(*a)))


def late_by_one_snapshot(save):
    def deviating(learner, kind):
        sent = vars(learner).setdefault("sent", [])
        sent.append(save(learner, kind))
        return sent[-2] if len(sent) > 1 else sent[-1]

    return deviating


def rounded_weights(save):
    def deviating(learner, kind):
        with torch.no_grad():
            for p in learner.state.targets:
                p.copy_((p * 20).round() / 20)
        return save(learner, kind)

    return deviating


def live_weights(asample):
    "The sampler has the trainer's weights, synced or not."

    def deviating(call):
        snapshots = call.trainer.snapshots
        revisions = call.memory.pool.revisions
        for learner in call.memory.learners.values():
            if learner.snapshot in snapshots.names():
                snapshots.save(
                    learner.snapshot,
                    trainer.snapshot_weights(learner, "base"),
                    snapshots.meta(learner.snapshot),
                )
                revisions[learner.snapshot] += 1
        return asample(call)

    return deviating


def samples(
    check: str, report=None, echo=None, prompt=None, change=None, both=False, **params
) -> Deviation:
    """Completions are sampled or reported otherwise, or from another prompt; or given tokens are scored otherwise.

    With `both`, given tokens are scored in that prompt, too."""

    def wrap(post):
        async def deviating(sampler, item):
            if isinstance(item, Request):
                changed = replace(item.params, **params | (change(item.params) if change else {}))
                ends = item.stop_ids | {*changed.stop_token_ids}
                read = tuple(prompt(item.prompt)) if prompt else item.prompt
                sampled = await post(
                    sampler, replace(item, prompt=read, params=changed, stop_ids=ends)
                )
                return [report(c) for c in sampled] if report else sampled
            if callable(item):
                return await post(sampler, item)
            scores = await post(sampler, np.array(prompt(item)) if both else item)
            values = scores.values[1 - len(item) :]
            return replace(scores, values=echo(tuple(item), values) if echo else values)

        return deviating

    return Deviation(check, "post", wrap, LocalSampler)


def report_processed(c):
    return replace(c, logprobs=c.sampling_logprobs)


def without_end(c):
    cut = {"tokens": c.tokens[:-1], "logprobs": c.logprobs[:-1], "sampling_logprobs": None}
    return replace(c, **cut) if c.finish_reason == "stop" else c


def scored_at_other_temperature(open_learner):
    def deviating(*call):
        learner = open_learner(*call)
        learner.state.scoring = replace(learner.state.scoring, temperature=0.8)
        return learner

    return deviating


def doubled_context(capabilities):
    def twice(model):
        return {**model, "max_context_length": 2 * model["max_context_length"]}

    return lambda call: {
        "supported_models": [twice(m) for m in capabilities(call)["supported_models"]]
    }


def without_clipping(served):
    def open_ended(batch):
        return replace(batch, loss_fn="importance_sampling", config={})

    return lambda batch: served(open_ended(batch) if batch.loss_fn == "ppo" else batch)


TINKER: dict[str, Deviation] = {
    "sign turned": changes_weights("gradient sign", lambda w: -w),
    "negative weights dropped": changes_weights("gradient sign", lambda w: np.maximum(w, 0)),
    "weights clipped at 1": changes_weights("twice the derivative", lambda w: np.clip(w, -1, 1)),
    "mask ignored": changes_weights(
        "one position moves another", lambda w: np.where(np.abs(w) < 1e-9, w.sum(), w)
    ),
    "a place early": changes_weights("one position moves another", lambda w: np.roll(w, -1)),
    "divided by tokens": changes_weights(
        "derivatives travel as", lambda w: w / max(1, np.count_nonzero(w))
    ),
    "averaged": Deviation("derivatives travel as", "run_pass", averaged_pass),
    "divided by sequences": learns_other_datums("two sequences", per_call),
    "last sequence left out": learns_other_datums(
        "two sequences", lambda datums: datums[:-1] or datums
    ),
    "equal sequences once": learns_other_datums(
        "two sequences", lambda datums: [*{d.tokens.tobytes(): d for d in datums}.values()]
    ),
    "last call only": Deviation("two calls", "run_pass", last_call_only),
    "scored a place late": other_logprobs("shift", lambda s, n: np.roll(s, 1)),
    "base 2": other_logprobs("policy and sampler", lambda s, n: s / np.log(2)),
    "temperature 0.8": Deviation("policy and sampler", "open_learner", scored_at_other_temperature),
    "dropout": other_logprobs("alone and in a batch", lambda s, n: s + RNG.normal(0, 0.3, len(s))),
    "dropout in training": other_logprobs(
        "forward inside backward", lambda s, n: s + RNG.normal(0, 0.3, len(s)), True
    ),
    "neighbours leak": other_logprobs("alone and in a batch", lambda s, n: s - 0.2 * (n - 1)),
    "half the rate": steps("size of a step", learning_rate=0.5),
    "nothing moves": steps("gradient sign", learning_rate=0.0),
    "two updates": steps("size of a step", after="again"),
    "another eps": steps("twice the derivative", eps=1e-8),
    "clipped": steps("twice the derivative", grad_clip_norm=0.1),
    "weight decay": steps("momentum", weight_decay=0.1),
    "other betas": steps("momentum", beta1=0.5),
    "gradient carried on": steps("momentum", after="kept"),
    "moments forgotten": steps("momentum", forget_moments),
    "states not loaded": Deviation("states", "load_state", lambda load: lambda *a: None),
    "states without optimizer": Deviation(
        "optimizer in a state",
        "load_state",
        lambda load: lambda a, b, c, d, e: load(a, b, c, False, e),
    ),
    "sync brings nothing": sends_scaled_adapter("second sync", 0.0),
    "half the layers": sends_scaled_adapter("second sync", 0.0, "layers.0"),
    "adapter twice": sends_scaled_adapter("second sync", 2.0),
    "one sync late": Deviation("second sync", "snapshot_weights", late_by_one_snapshot),
    "sync rounds the trainer": Deviation(
        "trainer after a sync", "snapshot_weights", rounded_weights
    ),
    "sampler follows": Deviation("sampler before a sync", "asample", live_weights, trainer.POSTS),
    "sequences cut": other_logprobs(
        "longest sequence", lambda s, n: np.where(np.arange(len(s)) < 100, s, 0)
    ),
    "says twice its context": Deviation(
        "longest sequence", "get_server_capabilities", doubled_context, trainer.GETS
    ),
    "ppo does not clip": Deviation("its own losses", "served_loss", without_clipping),
}
SAMPLERS: dict[str, Deviation] = {  # whatever it speaks
    "sampled at 0.5": samples("sampling frequencies", temperature=0.5),
    "top-p 0.8": samples("sampling frequencies", top_p=0.8),
    "greedy": samples("sampling frequencies", temperature=0.0),
    "top-k 3, reported after the cut": samples("sampled and scored", report_processed, top_k=3),
    "reported at 0.7": samples("sampled and scored", report_processed, temperature=0.7),
    "longer than asked": samples(
        "how it ended", change=lambda p: {"max_tokens": 2 * p.max_tokens - 1}
    ),
    "shorter than asked": samples("how it ended", max_tokens=1),
    "BOS in front of prompts": samples("sampled and scored", prompt=lambda ids: (1, *ids)),
    "end tokens cut off": samples("how it ended", without_end),
    "echo a place early": samples(
        "policy and sampler", echo=lambda ids, s: np.append(s[1:], s[-1:])
    ),
    "prompts cut": samples(
        "longest sequence", echo=lambda ids, s: np.where(np.arange(len(s)) < 100, s, 0)
    ),
    "two replicas": samples("scored again", echo=lambda ids, s: s - 0.3 * (next(COUNT) % 2)),
}
TINKER |= SAMPLERS | {
    "scores remembered": samples("second sync", echo=lambda ids, s: KNOWN.setdefault(ids, s))
}


def scaled_logprobs(change) -> dict[str, Callable]:
    "All logprobs, of what is sampled and of what is given."

    def report(c):
        return replace(c, logprobs=change(c.logprobs), sampling_logprobs=None)

    return {"report": report, "echo": lambda ids, scores: change(scores)}


def sampled_past_the_end(c):
    more = {"tokens": [*c.tokens, 84], "logprobs": [*c.logprobs, -1], "sampling_logprobs": None}
    return replace(c, **more) if c.finish_reason == "stop" else c


def other_fields(named: str, change) -> Deviation:
    "A choice in a response has other fields: `change(choice)` returns some of them."

    def altered(choice):
        return choice | change(choice)

    return Deviation(named, "choice_of", lambda make: lambda *a: altered(make(*a)), server)


def quantise(w):
    step = w.abs().amax(-1, keepdim=True) / 7 + 1e-9
    return (w / step).round() * step if w.ndim == 2 else w


def quantised_model(load):
    def deviating(self):
        model, tokenizer = load(self)
        with torch.no_grad():
            [p.copy_(quantise(p)) for p in model.parameters()]
        return model, tokenizer

    return deviating


OPENAI: dict[str, Deviation] = SAMPLERS | {
    "end tokens cut off": samples("completions of ids", without_end),
    "prompts of samples cut": samples("longest sequence", prompt=lambda ids: ids[-100:]),
    "top-k 3": samples("sampling frequencies", top_k=3),
    "min-p 0.2": samples("sampling frequencies", min_p=0.2),
    "repetition penalty 1.3": samples("sampling frequencies", repetition_penalty=1.3),
    "a model's own settings": samples(
        "sampling frequencies", temperature=0.6, top_p=0.95, top_k=20
    ),
    "another seed": samples("sampling frequencies", seed=7),
    "seed ignored": samples("seed", seed=None),
    "temperature at least 0.7": samples(
        "temperature", change=lambda p: {"temperature": max(0.7, p.temperature)}
    ),
    "temperature at most 1": samples(
        "temperature", change=lambda p: {"temperature": min(1.0, p.temperature)}
    ),
    "base 10": samples("policy and sampler", **scaled_logprobs(lambda s: s / np.log(10))),
    "-100 where it is rare": samples(
        "policy and sampler", **scaled_logprobs(lambda s: np.where(s < -4, -100, s))
    ),
    "16 tokens at most": samples(
        "how it ended", change=lambda p: {"max_tokens": min(p.max_tokens, 16)}
    ),
    "BOS in front of all": samples("policy and sampler", prompt=lambda ids: (1, *ids), both=True),
    "zeros for what is in the cache": samples(
        "scored again", echo=lambda ids, s: s * (KNOWN.setdefault(ids, s) is s)
    ),
    "other ids": samples(
        "sampled and scored", lambda c: replace(c, tokens=np.minimum(c.tokens + 1, 263))
    ),
    "always stop": samples("how it ended", lambda c: replace(c, finish_reason="stop")),
    "always length": samples("how it ended", lambda c: replace(c, finish_reason="length")),
    "samples on behind the end": samples("how it ended", sampled_past_the_end),
    "ends at another token": samples("how it ended", stop_token_ids=(226,)),
    "quantised": Deviation("policy and sampler", "load", quantised_model, models.Models),
    "text stripped": other_fields("text", lambda c: {"text": c["text"][1:].strip()}),
    "special tokens in the text": other_fields("text", lambda c: {"text": c["text"] + "<|end|>"}),
    "no logprobs": other_fields("completions of ids", lambda c: {"logprobs": None}),
    "BOS in front, and said": other_fields(
        "completions of ids", lambda c: {"prompt_token_ids": [1, 2]}
    ),
}


def loads_other_weights(named: str, change) -> Deviation:
    "A deployment loads `change(the new weights, the old ones)`."

    def wrap(swap):
        async def deviating(self, name, new):
            old = {n: p.detach().clone() for n, p in self.backend.sync.served.items()}
            return await swap(self, name, change(new, old))

        return deviating

    return Deviation(named, "swap", wrap, models.Serving)


def without_part(part: str) -> Callable:
    return lambda new, old: {n: old[n] if part in n else t for n, t in new.items()}


def keeps_first_weights(named: str, when) -> Deviation:
    "What is asked `when` is answered by the first weights."

    def wrap(post):
        async def deviating(sampler, item):
            if "old" not in KNOWN:
                KNOWN["old"] = open_local(*load_model("tiny"), mask_unknown=False).sampler
            return await post(KNOWN["old"] if not callable(item) and when(item) else sampler, item)

        return deviating

    return Deviation(named, "post", wrap, LocalSampler)


FIREWORKS: dict[str, Deviation] = SAMPLERS | {
    "end tokens cut off": samples("set up", without_end),  # the first of all is empty
    "weights not loaded": loads_other_weights("second sync", lambda new, old: old),
    "difference added twice": loads_other_weights(
        "second sync", lambda new, old: {n: 2 * t - old[n] for n, t in new.items()}
    ),
    "a layer not loaded": loads_other_weights("second sync", without_part("layers.0")),
    "head not loaded": loads_other_weights("second sync", without_part("embed")),
    "quantised when loaded": loads_other_weights(
        "first sync", lambda new, old: {n: quantise(t) for n, t in new.items()}
    ),
    "a replica keeps its weights": keeps_first_weights("second sync", lambda item: next(COUNT) % 2),
    "samples keep their weights": keeps_first_weights(
        "samples after a sync", lambda item: isinstance(item, Request)
    ),
}
