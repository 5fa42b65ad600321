"""What a run of train.py came to: rows that it did not train on, answered before and after, and the curve.

    python examples/gsm8k/figures.py runs/gsm8k        # writes figures.md and curve.svg into the run folder

Held out are the first 100 short rows after those of the run in its data set. Completions of both models go to
answers.jsonl in the run folder; those that are there are not sampled again.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from train import HERE, ask, short

import rl_notebook as rln
from rl_notebook.task.rewards import score
from rl_notebook.loop.rollouts import encode_rows
from rl_notebook.views.charts import svg
from rl_notebook.views.payloads import History, reward_payload

# rows, and completions of each
HELD_OUT = 100
TIMES = 8
SHOWN = 10  # example rows whose completions are shown
WINDOW = 10  # steps that a point of the curve is the mean of
DRAWS = 10_000  # of the bootstrap


# --- answers ---------------------------------------------------------------------------------------------------------


async def answers(
    backend: rln.Backend, cfg: rln.Config, rows: Sequence[rln.Row], n: int
) -> list[dict[str, Any]]:
    "Completions of each row, sampled and graded as in training."

    async def of(i: int, prompt: Any) -> list[dict[str, Any]]:
        sampled = await backend.sampler.sample(
            prompt.tokens.tolist(), cfg.sample_params(n=n, seed=i)
        )
        scores = await score(sampled, prompt.row, list(cfg.rewards), cfg.reward_weights)
        reported = [
            {"tokens": len(c.tokens), "cut": c.finish_reason == "length", "text": c.text}
            for c in sampled
        ]
        graded = [{"reward": scores.reward(j), **scores.rewards(j)} for j in range(n)]
        return [{"row": prompt.row.key, **a, **b} for a, b in zip(graded, reported, strict=True)]

    prompts = encode_rows(ask(rows), backend.tokenizer)
    return [
        line
        for lines in await asyncio.gather(*map(of, range(len(prompts)), prompts))
        for line in lines
    ]


async def measure(run: rln.Run, out: Path) -> None:
    "Answer held-out rows and example rows with the model as it was, and with the newest checkpoint."
    cfg = rln.Config.from_dict(run.config)
    result = run.latest_checkpoint()
    assert result is not None, "the run has no checkpoint"
    assert cfg.max_rows is not None
    rows = rln.load_rows(cfg.dataset, system_prompt=cfg.system_prompt)
    held_out = short(rows[cfg.max_rows :])[:HELD_OUT]
    shown_rows = rln.load_rows(
        HERE / "sample.jsonl", max_rows=SHOWN, system_prompt=cfg.system_prompt
    )
    measured_steps = set(pd.read_json(out, lines=True)["step"]) if out.exists() else set()
    async with await rln.open_backend(cfg, print) as backend:
        for step in sorted({0, result.step} - measured_steps):
            if step:
                await backend.policy.load_state(result.state, optimizer=False)
                await rln.sync_weights(backend, f"step-{step}")
            sampled = {"held out": await answers(backend, cfg, held_out, TIMES)}
            sampled["shown"] = await answers(backend, cfg, shown_rows, 1)
            lines = [
                {"step": step, "set": name, **line}
                for name, several in sampled.items()
                for line in several
            ]
            with out.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


# --- the page --------------------------------------------------------------------------------------------------------


def interval(by_row: np.ndarray) -> str:  # means of rows
    "The mean and its 95 % interval, a bootstrap over rows."
    picks = np.random.default_rng(0).integers(len(by_row), size=(DRAWS, len(by_row)))
    low, high = np.quantile(by_row[picks].mean(axis=1), [0.025, 0.975])
    return f"{by_row.mean():#.3g} ({low:#.3g} to {high:#.3g})"


def table(held: pd.DataFrame, names: Sequence[str]) -> str:
    "Means over rows before and after, and of the differences row by row."
    lines = ["| | before | after | difference |", "|---|---|---|---|"]
    for name in names:
        means = held.assign(value=held[name].astype(float)).pivot_table("value", "row", "step")
        before = means.iloc[:, 0].to_numpy()
        after = means.iloc[:, -1].to_numpy()
        lines.append(
            f"| {name} | {' | '.join(interval(v) for v in (before, after, after - before))} |"
        )
    return "\n".join(lines)


def curve(metrics: pd.DataFrame, held: pd.DataFrame) -> str:
    "Reward of the steps, smoothed, and of held-out rows, as a picture."
    metrics = metrics.drop(columns="reason").rolling(WINDOW, min_periods=1).mean()
    metrics = metrics.join(held.groupby("step")["reward"].mean().rename("eval/reward"), how="outer")
    return svg(
        rln.chart("reward", reward_payload(History(metrics))).figure,
        f"Reward, means of {WINDOW} steps",
    )


def completions(shown: pd.DataFrame) -> str:
    "For example rows: the completion before training, and the one after it."
    questions = {row.key: row.data["question"] for row in rln.load_rows(HERE / "sample.jsonl")}
    parts = []
    for row, of_row in shown.groupby("row", sort=False):
        parts.append(f"**{questions[str(row)]}**")
        for name, reported in zip(("before", "after"), of_row.to_dict("records"), strict=True):
            parts.append(
                f"{name}, reward {reported['reward']:.2g}:\n\n```text\n{reported['text'].strip()}\n```"
            )
    return "\n\n".join(parts)


def main(folder: Path) -> None:
    run = rln.Run.open(folder)
    out = folder / "answers.jsonl"
    asyncio.run(measure(run, out))
    result = pd.read_json(out, lines=True, dtype={"row": str})
    held = result[result["set"] == "held out"]
    shown = result[result["set"] == "shown"]
    names = [
        "reward",
        *(n for n in result if f"rewards/{n}/mean" in run.metrics()),
        "cut",
        "tokens",
    ]
    (folder / "curve.svg").write_text(curve(run.metrics(), held), encoding="utf-8")
    (folder / "figures.md").write_text(
        f"{table(held, names)}\n\n{completions(shown)}\n", encoding="utf-8"
    )
    print(table(held, names))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
