"""Forward and backward over the completions of a step, with common prefixes computed once and datum by datum.

    python benchmarks/prefixes.py --setting tiny --json FILE
    python benchmarks/prefixes.py --setting smollm2 --json FILE

One backend does both in turns, on one thread by default, and must arrive at the same logprobs and gradients.
The tokens are random. Seconds are processor time, medians after the first round; a ratio is the median over neighbours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import numpy as np
import torch

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.core.types import Datum
from rl_notebook.core.losses import make_loss_fn
from rl_notebook.task.models import load_model


@dataclass(frozen=True)
class Setting:
    "Prompts, their completions, and how often."

    model: str  # for `load_model`
    prompts: int = 4
    completions: int = 8  # of each prompt
    prompt_tokens: int = 20
    tokens: int = 64  # of a completion; with `ragged` from a third of it up
    ragged: bool = False
    rounds: int = 9


SETTINGS = {
    "tiny": Setting("tiny"),
    "tiny-ragged": Setting("tiny", ragged=True),
    "smollm2": Setting("smollm2", prompts=1, prompt_tokens=100, tokens=48, rounds=5),
    "smollm2-ragged": Setting(
        "smollm2", prompts=2, prompt_tokens=100, tokens=48, ragged=True, rounds=5
    ),
}


def datums_of(setting: Setting, vocabulary: int) -> list[Datum]:
    "Random groups."
    rng = np.random.default_rng(0)
    datums = []
    for group in range(setting.prompts):
        prompt = rng.integers(0, vocabulary, setting.prompt_tokens)
        for sample in range(setting.completions):
            n = (
                int(rng.integers(setting.tokens // 3, setting.tokens + 1))
                if setting.ragged
                else setting.tokens
            )
            tokens = [*prompt, *rng.integers(0, vocabulary, n)]
            mask = [0.0] * (len(prompt) - 1) + [1.0] * n
            datums.append(
                Datum(tokens, mask, advantage=float(rng.normal()), group=group, sample=sample)
            )
    return datums


@dataclass
class Side:
    "One backend that shares prefixes or does not, and its processor time."

    policy: Any
    no_tree: str
    seconds: dict[str, list[float]]

    def run(self, what: str, call: Callable[[], Any]) -> Any:
        "Time one call."
        self.policy.state.scoring.causal.no_tree = self.no_tree
        start = time.process_time()
        result = asyncio.run(call())
        self.seconds[what].append(time.process_time() - start)
        return result


def gradient(policy: Any) -> torch.Tensor:
    "Of all weights, and forgotten."
    whole = torch.cat([p.grad.double().flatten() for p in policy.state.params.values()])
    asyncio.run(policy.discard_gradients())
    return whole


def measure(setting: Setting, progress: Callable[[str], None] = print) -> dict[str, Any]:
    "Alternate both sides; raises `AssertionError` unless they agree."
    model, tokenizer = load_model(setting.model)
    policy = open_local(model, tokenizer, reference=False, inline=True, device="cpu").policy
    datums = datums_of(setting, len(tokenizer))
    loss_fn = make_loss_fn(datums, policy_loss="ppo")
    scoring = policy.state.scoring
    sides = {
        name: Side(policy, why, {"forward": [], "training": []})
        for name, why in (("once", ""), ("each", "off"))
    }
    tokens = {}
    result = {}
    gaps = []
    for turn in range(setting.rounds + 1):
        for name, side in sides.items():
            side.run("forward", lambda: policy.forward(datums))
            output = side.run("training", lambda: policy.forward_backward_custom(datums, loss_fn))
            result[name] = (
                np.concatenate([lp.values[d.active] for lp, d in zip(output.logprobs, datums)]),
                gradient(policy),
            )
            tokens[name] = sum(b.tokens for b in scoring.batches(datums))
        (a, ga) = result["once"]
        (b, gb) = result["each"]
        gaps.append((float(np.abs(a - b).max()), float((ga - gb).norm() / gb.norm())))
        assert gaps[-1][0] < 1e-4, f"logprobs differ by {gaps[-1][0]:.2g} nats"
        assert gaps[-1][1] < 5e-6, f"gradients differ by {gaps[-1][1]:.2g}"
        progress(f"round {turn} of {setting.rounds}")
    return (
        asdict(setting)
        | {"tokens": tokens, "nats": max(gaps)[0], "gradients": max(g for _, g in gaps)}
        | times(sides)
    )


def times(sides: dict[str, Side]) -> dict[str, Any]:
    "Medians after the first round."
    seconds = {
        name: {what: s[1:] for what, s in side.seconds.items()} for name, side in sides.items()
    }
    medians = {
        name: {what: statistics.median(s) for what, s in parts.items()}
        for name, parts in seconds.items()
    }

    def pairs(what):
        return zip(seconds["each"][what], seconds["once"][what], strict=True)

    ratio = {
        what: statistics.median(each / once for each, once in pairs(what))
        for what in seconds["each"]
    }
    return {
        "seconds": medians,
        "ratio": ratio,
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
    }


def table(result: dict[str, Any]) -> str:
    "One line per part."
    lines = [f"{'seconds':<10}{'each':>10}{'once':>10}{'ratio':>8}"]
    for what, ratio in result["ratio"].items():
        each, once = (result["seconds"][side][what] for side in ("each", "once"))
        lines.append(f"{what:<10}{each:>10.4f}{once:>10.4f}{ratio:>8.2f}")
    tokens = result["tokens"]
    lines.append(
        f"tokens    {tokens['each']:>10}{tokens['once']:>10}{tokens['each'] / tokens['once']:>8.2f}"
    )
    lines.append(
        f"logprobs differ by at most {result['nats']:.1e} nats, gradients by {result['gradients']:.1e} of their norm"
    )
    return "\n".join([*lines, f"{result['threads']} threads, load {result['load']:.1f}"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--setting", choices=SETTINGS, default="tiny")
    parser.add_argument("--rounds", type=int, help="measured ones; one more comes before them")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    setting = SETTINGS[args.setting]
    result = measure(replace(setting, rounds=args.rounds or setting.rounds), lambda line: None)
    print(table(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
