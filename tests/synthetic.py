"""A run that never happened, for tests of what reads records: sums whose answers get better, one character a token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rl_notebook.core.advantages import has_no_signal, with_advantages
from rl_notebook.core.types import Logprobs, LossOutput, PromptGroup, RolloutSample
from rl_notebook.core.datums import attach, datums_from_groups
from rl_notebook.core.metrics import step_metrics
from rl_notebook.runs.records import StepRecord


def sampled_sum(rng: np.random.Generator, terms: list[int], p: float) -> RolloutSample:
    "One graded answer to a sum: worked out and right with probability `p`, else a guess or cut off."
    prompt = "+".join(map(str, terms)) + "="
    total = sum(terms)
    if rng.random() < p:
        text = "+".join(map(str, np.cumsum(terms).tolist()[1:])) + f"\n#### {total}"
        finish_reason = "stop"
    elif rng.random() < 0.2:
        text = "is " * 9
        finish_reason = "length"
    else:
        text = f"#### {total + int(rng.integers(1, 5))}"
        finish_reason = "stop"
    correct = float(text.endswith(f"#### {total}"))
    rewards = {"correct": correct, "format": float("####" in text)}
    n = len(prompt)
    m = len(text)
    logprobs = np.concatenate([np.full(n, np.nan), -rng.exponential(0.4, m)])
    return RolloutSample(
        tokens=[ord(c) for c in prompt + text],
        logprobs=logprobs,
        loss_mask=[0] * n + [1] * m,
        reward=rewards["correct"] + 0.2 * rewards["format"],
        finish_reason=finish_reason,
        text=text,
        rewards=rewards,
        raw_logprobs=logprobs,
        policy_version=1,
        info={"turns": 1},
    )


def prompt_group(rng: np.random.Generator, index: int, p: float, completions: int) -> PromptGroup:
    "All answers to one sum."
    terms = rng.integers(1, 10, size=5).tolist()
    row = {"question": "+".join(map(str, terms)) + "=", "answer": str(sum(terms))}
    samples = tuple(sampled_sum(rng, terms, p) for _ in range(completions))
    return PromptGroup(samples, row=row, key=f"q{rng.integers(1000)}", index=index)


def synthetic_record(
    step: int, steps: int = 60, groups: int = 8, completions: int = 8, seed: int = 0
) -> StepRecord:
    "A step of a run in which answers get better and longer."
    rng = np.random.default_rng([seed, step])
    p = 0.25 + 0.7 / (1 + np.exp(-8 * (step / steps - 0.45)))
    sampled = with_advantages([prompt_group(rng, i, p, completions) for i in range(groups)])
    datums = datums_from_groups([g for g in sampled if not has_no_signal(g.rewards)])
    if not datums:
        reason = f"all {groups} groups had equal rewards"
        return StepRecord(
            step, sampled, metrics=step_metrics(sampled, []), reason=reason, policy_version=step - 1
        )
    kl = 0.02 * (step / steps) ** 2

    def near(size, scale):
        return [
            Logprobs(
                np.where(
                    d.active,
                    d.sampler_logprobs + scale + rng.normal(0, size, len(d.weights)),
                    np.nan,
                )
            )
            for d in datums
        ]

    policy = near(1e-5, 0)
    datums = attach(attach(datums, "old_logprobs", policy), "ref_logprobs", near(0.1, -kl))
    loss = LossOutput(
        -0.1,
        {"loss": -0.1, "kl": kl, "kl/k1": kl * 0.9, "kl/k3": kl},
        tuple(policy),
        tuple(-d.advantage * d.weights / 100 for d in datums),
    )
    optim = {"grad_norm": 0.7, "update_norm": 3.1e-4, "learning_rate": 5e-5}
    return StepRecord(
        step=step,
        groups=sampled,
        datums=datums,
        loss=loss,
        metrics=step_metrics(sampled, datums, loss, optim, policy_version=step),
        options={"policy_loss": "grpo", "kl_beta": 0.001},
        policy_version=step,
        seconds={"sample": 0.8, "backward": 0.4},
    )


def async_record(record: StepRecord) -> StepRecord:
    "The same step of an asynchronous run: a second long, rows in flight for two; all groups but one are a version old."
    begin = float(record.step)
    ages = [0, *[1] * (len(record.groups) - 1)]
    numbers = [record.step * len(record.groups) + i for i in range(len(record.groups))]
    started = [max(0, record.step - 1 - a) for a in ages]
    marks = zip(record.groups, numbers, started, strict=True)
    rows = [(f"row {n}", begin - 1.5 - i / 10, begin + 0.2) for i, n in enumerate(numbers)]
    phases = [
        ("sample", begin, begin + 0.2),
        ("backward", begin + 0.2, begin + 0.8),
        ("sync", begin + 0.8, begin + 0.9),
    ]
    offsets = {"mean": float(np.mean(ages)), "min": 0.0, "max": 1.0}
    metrics = {f"async/version_offset_{name}": value for name, value in offsets.items()}
    metrics |= {"async/in_flight": 4.0, "async/ready": 1.0, "async/staleness_capacity_at_step": 0.0}
    metrics |= {"perf/wait_time_ratio": 0.2, "perf/sampler_idle_ratio": 0.0}
    groups = [replace(g, number=n, submitted=v) for g, n, v in marks]
    return replace(
        record, groups=groups, metrics={**record.metrics, **metrics}, timeline=[*phases, *rows]
    )


def hostile_record(step: int = 1) -> StepRecord:
    "A record whose every text tries to be markup."
    bad = '</script><script>document.title="owned"</script><img src=x onerror=alert(1)>'
    record = synthetic_record(step, groups=2, completions=4)

    def samples(g):
        return tuple(replace(s, text=bad, finish_reason=bad, rewards={bad: 1.0}) for s in g.samples)

    groups = [replace(g, samples=samples(g), key=bad, row={"question": bad}) for g in record.groups]
    return replace(record, groups=groups)
