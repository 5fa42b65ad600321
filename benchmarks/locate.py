"""Whether `locate` finds a wrong running sum that was planted, and what a question to it or to `fork` costs.

    python benchmarks/locate.py --cases 100 --json FILE
    python benchmarks/locate.py --cases 0 --smollm2 3 --json FILE

A case is a sum of five digits, answered in the form that the tiny model was taught, in which one running sum is off by
one to three and all later ones, with the answer, follow from it. The place is the first token that is wrong. The same
sums without a mistake are asked about, too: there the policy may have won at a token, or at none. The model is the
shipped one, the reward that of the toy task, and the budget 300 continuations. `fork` is then asked at the place that
was named, else in the middle, for 16 continuations of the token there and of each of three others.

With `--smollm2` the completions are SmolLM2's own wrong answers to the sums of `examples/small_model`, worked out on
several lines, with the rewards of that example. Cases are numbered: others are had with another `--first`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np

import rl_notebook as rln
from rl_notebook.loop.rollouts import encode_rows

FORM = 30  # tokens that a completion may have
SMALL_MODEL_TOKENS = 40  # the same of SmolLM2, as in examples/small_model/sums.yaml


def planted(number: int, mistake: bool) -> tuple[dict[str, str], str, str]:
    "A row, its answer in running sums, and the same without the mistake."
    rng = np.random.default_rng([99, number])
    [row] = rln.toy_rows(1, seed=5000 + number)
    terms = [int(digit) for digit in re.findall(r"\d+", row["question"])]
    sums = np.cumsum(terms)[1:]
    wrong = sums + (np.arange(len(sums)) >= rng.integers(len(sums))) * rng.choice(
        [-3, -2, -1, 1, 2, 3]
    )

    def text(values: Any) -> str:
        return f"{' '.join(map(str, values))} #### {values[-1]}"

    return row, text(wrong if mistake else sums), text(sums)


def record_of(
    row: rln.Row, prompt: np.ndarray, completion: list[int], text: str, reward: float
) -> rln.StepRecord:
    "A step of one sample, as if it had been sampled."
    ids = np.array([*prompt.tolist(), *completion])
    mask = np.arange(len(ids)) >= len(prompt)
    sample = rln.RolloutSample(ids, np.full(len(ids), -0.1), mask.astype(int), reward, text=text)
    group = rln.PromptGroup((sample,), row=row.data, key=row.key)
    return rln.StepRecord(step=1, groups=(group,))


async def ask_both(
    backend: rln.Backend, record: rln.StepRecord, budget: int, seed: int, **settings: Any
) -> dict[str, Any]:
    "What `locate` names, and what it and a fork at that place cost."
    begun = time.process_time()
    located = await rln.locate(backend, record, budget=budget, seed=seed, **settings)
    processor = time.process_time() - begun
    middle = located.targets[len(located.targets) // 2]
    target = middle if located.target is None else located.target
    begun = time.process_time()
    forked = await rln.fork(backend, record, target=target, seed=seed, **settings)
    return {
        "named": located.place,
        "reason": located.reason,
        "continuations": located.used,
        "tokens": located.sampled_tokens,
        "seconds": located.seconds,
        "processor": processor,
        "fork_continuations": sum(len(branch.continuations) for branch in forked.branches),
        "fork_tokens": forked.sampled_tokens,
        "fork_seconds": forked.seconds,
        "fork_processor": time.process_time() - begun,
    }


async def ask(backend: rln.Backend, number: int, mistake: bool, budget: int) -> dict[str, Any]:
    "One planted case: what was named, what is right, what it cost."
    tokenizer = backend.tokenizer
    columns, text, right = planted(number, mistake)
    tokens, others = (tokenizer.encode(t, add_special_tokens=False) for t in (text, right))
    differ = [i for i, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b]
    [row] = rln.load_rows([columns])
    [prompt] = encode_rows([row], tokenizer)
    completion = [*tokens, tokenizer.eos_token_id]
    reward = rln.toy_reward(text, columns["answer"])
    record = record_of(row, prompt.tokens, completion, text, reward)
    params = rln.SampleParams(max_tokens=FORM)
    costs = await ask_both(backend, record, budget, number, reward=rln.toy_reward, params=params)
    return {"case": number, "mistake": mistake, "place": differ[0] if differ else None, **costs}


async def wrong_answer(backend: rln.Backend, number: int) -> tuple[rln.Row, rln.Completion]:
    "A sum of the example, and an answer of several lines that is wrong."
    from examples.small_model import sums

    rows = rln.load_rows(sums.rows())[100 * number :]
    params = rln.SampleParams(max_tokens=SMALL_MODEL_TOKENS, temperature=0.7, seed=number)
    for row in rows:
        [prompt] = encode_rows([row], backend.tokenizer)
        [completion] = await backend.sampler.sample(prompt.tokens, params)
        if "\n" in completion.text and not sums.exact(completion.text, row.answer):
            return row, completion
    raise SystemExit(f"case {number}: no wrong answer of several lines in {len(rows)} rows")


async def ask_smollm2(backend: rln.Backend, number: int, budget: int) -> dict[str, Any]:
    "One wrong answer that SmolLM2 worked out by itself: what was named, and what it cost."
    from examples.small_model import sums

    def reward(text: str, answer: str, digits: list[int]) -> float:
        return sums.exact(text, answer) + 0.5 * sums.worked_out(text, digits)

    row, completion = await wrong_answer(backend, number)
    tokens = completion.tokens.tolist()
    earned = reward(completion.text, row.answer, row.data["digits"])
    record = record_of(row, completion.prompt_tokens, tokens, completion.text, earned)
    settings: dict[str, Any] = {
        "reward": reward,
        "params": rln.SampleParams(max_tokens=SMALL_MODEL_TOKENS, temperature=0.7),
        "bounds": (0.0, 1.5),
    }
    costs = await ask_both(backend, record, budget, number, **settings)
    return {"case": number, "text": completion.text, "length": len(tokens), **costs}


COSTS = (
    "continuations", "tokens", "seconds", "processor", "fork_continuations", "fork_tokens", "fork_seconds", "fork_processor",
)  # fmt: skip


def summary(cases: list[dict[str, Any]]) -> dict[str, Any]:
    "How often the place was named, and the median cost."
    wrong = [c for c in cases if c["mistake"]]
    near = [c["named"] is not None and abs(c["named"] - c["place"]) <= 1 for c in wrong]
    out: dict[str, Any] = {
        "cases": len(wrong),
        "exact": float(np.mean([c["named"] == c["place"] for c in wrong])),
        "within_one": float(np.mean(near)),
        "elsewhere": float(np.mean([c["named"] is not None for c in wrong]) - np.mean(near)),
        "named_without_mistake": float(
            np.mean([c["named"] is not None for c in cases if not c["mistake"]])
        ),
    }
    return out | median_costs(wrong)


def median_costs(cases: list[dict[str, Any]]) -> dict[str, float]:
    "The median of each cost."
    return {name: float(np.median([c[name] for c in cases])) for name in COSTS}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--budget", type=int, default=300)
    parser.add_argument("--smollm2", type=int, default=0, help="wrong answers of SmolLM2")
    args = parser.parse_args()
    numbers = range(args.first, args.first + args.cases)

    async def tiny_cases() -> list[dict[str, Any]]:
        async with rln.open_local(*rln.load_model("tiny")) as backend:
            wrong = [await ask(backend, number, True, args.budget) for number in numbers]
            right = numbers[: max(1, args.cases // 4)]
            return [*wrong, *[await ask(backend, number, False, args.budget) for number in right]]

    async def smollm2_cases() -> list[dict[str, Any]]:
        model = rln.load_model("smollm2")
        async with rln.open_local(*model, reference=False) as backend:
            first = args.first
            wrong = range(first, first + args.smollm2)
            return [await ask_smollm2(backend, number, args.budget) for number in wrong]

    result = {}
    cases = []
    if args.cases:
        cases = asyncio.run(tiny_cases())
        result["tiny"] = summary(cases)
    if args.smollm2:
        own = asyncio.run(smollm2_cases())
        result["smollm2"] = median_costs(own)
        cases += own
    for name, values in result.items():
        print(name)
        print("\n".join(f"  {key:<24}{value:10.3g}" for key, value in values.items()))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result | {"all": cases}, indent=1))


if __name__ == "__main__":
    main()
