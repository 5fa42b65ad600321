"""How long training takes until a real model gets a task right: ours and TRL's `GRPOTrainer`, in turns from the same weights.

    python benchmarks/learn.py --task sums --json FILE
    python benchmarks/learn.py --task extraction --target 0.9 --seed 1

The task is one of `examples/small_model`, with the settings of its config: the same rows, rewards, adapter, learning rate
and temperature on both sides. TRL trains, and after each of its steps a callback runs one of ours, until the share of
right completions of the last three steps has reached the target on both sides. Seconds are those of each side's own steps.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
from step import give_back_memory, machine

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.config.config import Config
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.task.data import load_rows
from rl_notebook.task.models import load_model

WINDOW = 3  # steps whose mean has to reach the target
REWARDS = {"sums": ("exact", "worked_out"), "extraction": ("exact", "fields")}


@dataclass
class Side:
    "What one side has done so far."

    target: float
    seconds: list[float] = field(default_factory=list)  # of each step
    right: list[float] = field(default_factory=list)  # share of right completions in each step

    @property
    def steps_to_target(self) -> int | None:
        "The first step at which it and the steps before it reach the target on average; None before that."
        for step in range(WINDOW, len(self.right) + 1):
            if float(np.mean(self.right[step - WINDOW : step])) >= self.target:
                return step
        return None

    @property
    def there(self) -> bool:
        "Whether the target has been reached; later steps may fall below it again."
        return self.steps_to_target is not None

    def result(self) -> dict[str, Any]:
        "For the JSON."
        return {
            "reached": self.there,
            "steps": self.steps_to_target or len(self.right),
            "seconds": sum(self.seconds[: self.steps_to_target]),
            "seconds_a_step": float(np.median(self.seconds)),
            "right": self.right,
        }


class Ours:
    "Our loop, one step at a time."

    def __init__(self, cfg: Config, rows: list[dict[str, Any]], rewards: list[Any]):
        backend = open_local(
            *load_model(cfg.base_model),
            lora_rank=cfg.lora_rank,
            lora_alpha=cfg.lora_alpha,
            reference=False,
            temperature=cfg.temperature,
            seed=cfg.seed,
        )
        self.loop = GRPOLoop(backend, load_rows(rows), rewards, cfg, keep_undo=0)
        self.runner = asyncio.Runner()

    def step(self, side: Side) -> None:
        start = time.perf_counter()
        record = self.runner.run(self.loop.step())
        side.seconds.append(time.perf_counter() - start)
        side.right.append(record.metrics["rewards/exact/mean"])

    def close(self) -> None:
        self.runner.run(self.loop.backend.close())
        self.runner.close()


def trl_reward(function: Any) -> Any:
    "A reward of the example in TRL's form: one list a column."

    def reward(completions: list[Any], **columns: Any) -> list[float]:
        names = function.__code__.co_varnames[1 : function.__code__.co_argcount]
        texts = [completion[0]["content"] for completion in completions]
        return [
            function(text, *(columns[name][i] for name in names)) for i, text in enumerate(texts)
        ]

    reward.__name__ = function.__name__
    return reward


def trl_config(cfg: Config, folder: str, steps: int) -> Any:
    "TRL's settings; what costs it time and we do not do is off."
    from trl import GRPOConfig

    rows = cfg.prompt_groups_per_step * cfg.completions_per_prompt
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,  # on by default: less memory, one more forward pass
        per_device_train_batch_size=cfg.max_samples_per_fwd_bwd,
        gradient_accumulation_steps=rows // cfg.max_samples_per_fwd_bwd,
        num_generations=cfg.completions_per_prompt,
        max_completion_length=cfg.max_completion_tokens,
        max_steps=steps,
        temperature=cfg.temperature,
        top_k=0,
        beta=cfg.kl_beta,
        loss_type="dapo",
        scale_rewards="group",
        reward_weights=list(cfg.reward_weights or ()),
        learning_rate=cfg.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=cfg.weight_decay,
        max_grad_norm=cfg.grad_clip_norm,
        optim="adamw_torch_fused",
        seed=cfg.seed,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
    )


def in_turns(
    task: str, target: float, most_steps: int, seed: int, base_model: str = "smollm2"
) -> dict[str, Side]:
    "Steps of both sides, in turns, until both have reached the target."
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOTrainer

    module = importlib.import_module(f"examples.small_model.{task}")
    cfg = Config.from_yaml(ROOT / "examples" / "small_model" / f"{task}.yaml")
    cfg = replace(
        cfg, base_model=base_model, seed=seed, log_path=None, dcp_save_interval=0, eval_rows=0
    )
    rewards = [getattr(module, name) for name in REWARDS[task]]
    rows = module.rows()[: cfg.max_rows]
    sides = {"ours": Side(target), "TRL": Side(target)}
    side = Ours(cfg, rows, rewards)

    class TakeTurns(TrainerCallback):
        "Notes TRL's step, runs ours, and ends where both are there."

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            sides["TRL"].seconds.append(time.perf_counter() - self.started)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
            if len(sides["TRL"].right) == len(sides["TRL"].seconds):
                return  # a summary at the end of training
            sides["TRL"].right.append(logs["rewards/exact/mean"])
            give_back_memory()
            if not sides["ours"].there:
                side.step(sides["ours"])
                give_back_memory()
            # TRL stops by itself after the most steps
            control.should_training_stop |= sides["ours"].there and sides["TRL"].there
            print(
                *(f"{name}: step {len(s.right)}, {sum(s.seconds):.0f} s, right {s.right[-1]:.2f}"
                  for name, s in sides.items()),
                sep="   ",
                flush=True,
            )  # fmt: skip

    model, tokenizer = load_model(cfg.base_model)
    adapter = LoraConfig(r=cfg.lora_rank, lora_alpha=cfg.lora_alpha, target_modules="all-linear")
    prompts = [
        row.get("messages") or [{"role": "user", "content": row["question"]}] for row in rows
    ]
    columns = [{k: v for k, v in row.items() if k not in ("messages", "question")} for row in rows]
    data = [{"prompt": prompt, **kept} for prompt, kept in zip(prompts, columns, strict=True)]
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            args=trl_config(cfg, scratch, most_steps),
            reward_funcs=[trl_reward(reward) for reward in rewards],
            train_dataset=Dataset.from_list(data),
            peft_config=adapter,
            callbacks=[TakeTurns()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    side.close()
    return sides


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--task", choices=[*REWARDS], default="sums")
    parser.add_argument("--base-model", default="smollm2", help="of both sides")
    parser.add_argument("--target", type=float, default=0.85, help="share of right completions")
    parser.add_argument("--most-steps", type=int, default=60, help="of either side")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args(arguments)
    sides = in_turns(args.task, args.target, args.most_steps, args.seed, args.base_model)
    result = {name: side.result() for name, side in sides.items()}
    print("\n| | steps | seconds | seconds a step |\n|---|---|---|---|")
    for name, one in result.items():
        reached = "" if one["reached"] else " (target not reached)"
        print(
            f"| {name} | {one['steps']}{reached} | {one['seconds']:.0f} | {one['seconds_a_step']:.1f} |"
        )
    asked = {
        "task": args.task,
        "base_model": args.base_model,
        "target": args.target,
        "seed": args.seed,
    }
    if args.json:
        args.json.write_text(json.dumps({**asked, **result, "machine": machine()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
