"""How often the intervals of `fork` and `locate` contain a mean reward that is known exactly.

    python benchmarks/coverage.py --cases 300 --json FILE

The model is a random one with a vocabulary of seven tokens, and a completion has four at most, so the mean reward from any
place is a sum over all that may follow. Rewards are made from the text: right or wrong, within known bounds, or without
bounds (right or wrong, and up to 0.3 more). For each case a fork at the first or second token, with the defaults, and for
rewards with bounds `locate` with a budget of 72. A row counts intervals, not cases; "unknown" has no interval. Cases are
numbered: others are had with another `--first`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import rl_notebook as rln
from rl_notebook.core.intervals import Interval

LETTERS = "abcdef."  # the last one ends a completion
END = len(LETTERS) - 1
LONGEST = 4  # tokens of a completion
PARAMS = rln.SampleParams(max_tokens=LONGEST)
KINDS = ("right or wrong", "bounds", "no bounds")


def make_model() -> tuple[Any, Any]:
    "A random model of seven tokens, whose choices are neither even nor sure, and its tokenizer."
    vocabulary = {letter: i for i, letter in enumerate(LETTERS)}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    letters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token=".", pad_token=".")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(LETTERS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=END,
        pad_token_id=END,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.normal_(0, 0.35)
    return model, tokenizer


def next_probabilities(model: Any, prompt: list[int]) -> dict[tuple[int, ...], np.ndarray]:
    "Probabilities of the next token after every beginning of a completion."
    out = {}
    level: list[tuple[int, ...]] = [()]
    for _ in range(LONGEST):
        ids = torch.tensor([[*prompt, *tokens] for tokens in level])
        with torch.no_grad():
            logits = model(ids).logits[:, -1].double()
        out |= dict(zip(level, logits.softmax(-1).numpy(), strict=True))
        level = [(*tokens, token) for tokens in level for token in range(END)]
    return out


def text_of(tokens: tuple[int, ...]) -> str:
    "A completion as text."
    return "".join(LETTERS[token] for token in tokens if token != END)


def exact_mean(
    tokens: tuple[int, ...],
    probabilities: dict[tuple[int, ...], np.ndarray],
    reward: Callable[[str], float],
) -> float:
    "The mean reward if the policy goes on after these tokens."
    if tokens and (tokens[-1] == END or len(tokens) == LONGEST):
        return reward(text_of(tokens))
    means = [
        p * exact_mean((*tokens, token), probabilities, reward)
        for token, p in enumerate(probabilities[tokens])
    ]
    return math.fsum(means)


def rewards_of(number: int) -> dict[str, Callable[[str], float]]:
    "The rewards of a case, by kind; each text has its own."
    share = np.random.default_rng([number, 6]).uniform(0.1, 0.9)

    def chance(text: str, salt: str = "") -> float:
        return crc32(f"{number}{salt}:{text}".encode()) / 2**32

    return {
        "right or wrong": lambda text: float(chance(text) < share),
        "bounds": lambda text: chance(text) ** 2,
        "no bounds": lambda text: float(chance(text) < share) + 0.3 * chance(text, "b"),
    }


async def ask(
    backend: rln.Backend, model: Any, number: int
) -> list[tuple[str, str, float, Interval]]:
    "One case: (kind of reward, what, exact value, interval), several times."
    rng = np.random.default_rng([number, 5])
    prompt = rng.integers(0, END, int(rng.integers(2, 6))).tolist()
    probabilities = next_probabilities(model, prompt)
    one = rln.SampleParams(max_tokens=LONGEST, seed=number)
    [completion] = await backend.sampler.sample(np.array(prompt), one)
    tokens = tuple(completion.tokens.tolist())
    ids = np.array([*prompt, *tokens])
    mask = (np.arange(len(ids)) >= len(prompt)).astype(int)
    out = []
    for kind, reward in rewards_of(number).items():

        def mean_after(kept: tuple[int, ...], reward: Callable[[str], float] = reward) -> float:
            return exact_mean(kept, probabilities, reward)

        text = completion.text
        sample = rln.RolloutSample(ids, np.full(len(ids), -1.0), mask, reward(text), text=text)
        group = rln.PromptGroup((sample,), row={"question": "a"})
        record = rln.StepRecord(step=1, groups=(group,))
        settings: dict[str, Any] = {"reward": reward, "params": PARAMS, "seed": number}
        at = int(rng.integers(min(len(tokens), 2)))
        bounds = (0.0, 1.0) if kind == "bounds" else None
        target = len(prompt) + at - 1
        fork = await rln.fork(backend, record, target=target, bounds=bounds, **settings)
        base = mean_after(tokens[: at + 1])
        for branch in fork.branches:
            value = mean_after((*tokens[:at], *branch.tokens))
            out.append((kind, "branch", value, branch.interval))
            if branch.difference_interval is not None:
                out.append((kind, "difference", value - base, branch.difference_interval))
        if kind == "no bounds":
            continue
        located = await rln.locate(backend, record, 0, 0, 72, **settings)
        out += [
            (kind, "curve", mean_after(tokens[: point.kept]), point.interval)
            for point in located.points[:-1]
        ]
        if located.place is not None:
            place = located.place
            change = mean_after(tokens[: place + 1]) - mean_after(tokens[:place])
            out.append((kind, "change", change, located.change_interval))
    return out


def coverage(rows: list[tuple[str, str, float, Interval]]) -> Iterator[dict[str, Any]]:
    "How many of each kind of interval contain the value, and how wide they are."
    groups = defaultdict(list)
    for kind, what, value, interval in rows:
        groups[kind, what, interval.method].append((value, interval))
    for (kind, what, method), pairs in sorted(groups.items()):
        known = [(value, i) for value, i in pairs if not math.isnan(i.low)]
        covered = [i.low - 1e-9 <= value <= i.high + 1e-9 for value, i in known]
        yield {
            "reward": kind,
            "interval": f"{what}, {method}",
            "count": len(known),
            "unknown": len(pairs) - len(known),
            "covered": float(np.mean(covered)) if known else math.nan,
            "width": float(np.mean([i.high - i.low for _, i in known])) if known else math.nan,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    args = parser.parse_args()

    model, tokenizer = make_model()

    async def all_cases() -> list[tuple[str, str, float, Interval]]:
        async with rln.open_local(model, tokenizer, reference=False) as backend:
            numbers = range(args.first, args.first + args.cases)
            return [row for number in numbers for row in await ask(backend, model, number)]

    rows = [*coverage(asyncio.run(all_cases()))]
    print(f"{'reward':<16}{'interval':<42}{'count':>7}{'unknown':>9}{'covered':>9}{'width':>7}")
    for row in rows:
        counts = f"{row['count']:>7}{row['unknown']:>9}{row['covered']:>9.3f}{row['width']:>7.2f}"
        print(f"{row['reward']:<16}{row['interval']:<42}{counts}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
