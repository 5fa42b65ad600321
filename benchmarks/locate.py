"""Whether `locate` finds a wrong running sum that was planted, and what a question costs.

    python benchmarks/locate.py --cases 100 --json FILE

A case is a sum of five digits, answered in the form that the tiny model was taught, in which one running sum is off by
one to three and all later ones, with the answer, follow from it. The place is the first token that is wrong. The same
sums without a mistake are asked about, too: there the policy may have won at a token, or at none. The model is the
shipped one, the reward that of the toy task, and the budget 300 continuations. Cases are numbered: others are had with
another `--first`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np

import rl_notebook as rln
from rl_notebook.loop.rollouts import encode_rows

FORM = 30  # tokens that a completion may have


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


def record_of(row: dict[str, str], text: str, tokenizer: Any) -> rln.StepRecord:
    "A step of one sample, as if it had been sampled."
    [prompt] = encode_rows(rln.load_rows([row]), tokenizer)
    tokens = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    ids = [*prompt.tokens.tolist(), *tokens]
    mask = [0] * len(prompt.tokens) + [1] * len(tokens)
    reward = rln.toy_reward(text, row["answer"])
    sample = rln.RolloutSample(ids, np.full(len(ids), -0.1), mask, reward, text=text)
    return rln.StepRecord(step=1, groups=(rln.PromptGroup([sample], row=row, key=row["question"]),))


async def ask(backend: rln.Backend, number: int, mistake: bool, budget: int) -> dict[str, Any]:
    "One case: what was named, what is right, what it cost."
    tokenizer = backend.tokenizer
    row, text, right = planted(number, mistake)
    tokens, others = (tokenizer.encode(t, add_special_tokens=False) for t in (text, right))
    differ = [i for i, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b]
    begun = time.process_time()
    located = await rln.locate(
        backend,
        record_of(row, text, tokenizer),
        budget=budget,
        reward=rln.toy_reward,
        params=rln.SampleParams(max_tokens=FORM),
        seed=number,
    )
    return {
        "case": number,
        "mistake": mistake,
        "place": differ[0] if differ else None,
        "named": located.place,
        "reason": located.reason,
        "continuations": located.used,
        "tokens": located.sampled_tokens,
        "seconds": located.seconds,
        "processor": time.process_time() - begun,
    }


def summary(cases: list[dict[str, Any]]) -> dict[str, Any]:
    "How often the place was named, and the cost."
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
    for name in ("continuations", "tokens", "seconds", "processor"):
        out[name] = float(np.median([c[name] for c in wrong]))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--budget", type=int, default=300)
    args = parser.parse_args()
    backend = rln.open_local(*rln.load_model("tiny"))

    async def all_cases() -> list[dict[str, Any]]:
        numbers = range(args.first, args.first + args.cases)
        wrong = [await ask(backend, number, True, args.budget) for number in numbers]
        right = numbers[: max(1, args.cases // 4)]
        return [*wrong, *[await ask(backend, number, False, args.budget) for number in right]]

    cases = asyncio.run(all_cases())
    result = summary(cases)
    print("\n".join(f"{name:<24}{value:10.3g}" for name, value in result.items()))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result | {"all": cases}, indent=1))


if __name__ == "__main__":
    main()
