"""TRL's own trainer, watched: two lines in the script that anybody has. Run it: python examples/watch_trl/train.py

Then look at what TRL did, here or next to it while it trains:

    rl-notebook view runs/watch_trl
    rl-notebook show runs/watch_trl --step 20
"""

from __future__ import annotations

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, TrlParser

import rl_notebook as rln
from rl_notebook.task.models import tiny_path


def right(completions: list, answer: list, **_) -> list[float]:
    "1 for a completion that ends in the answer."
    texts = [completion[-1]["content"].strip() for completion in completions]
    return [float(text.endswith(expected)) for text, expected in zip(texts, answer, strict=True)]


def short(completions: list, **_) -> list[float]:
    "A hundredth off for each character."
    return [-len(completion[-1]["content"]) / 100 for completion in completions]


if __name__ == "__main__":
    parser = TrlParser(GRPOConfig)
    parser.set_defaults(
        output_dir="runs/watch_trl_checkpoints",
        use_cpu=True,
        bf16=False,
        max_steps=20,
        learning_rate=1e-4,
        per_device_train_batch_size=32,
        max_completion_length=24,
        beta=0.01,
        save_strategy="no",
        report_to="none",
        logging_steps=5,
    )
    (args,) = parser.parse_args_and_config()
    rows = [
        {"prompt": [{"role": "user", "content": r["question"]}], "answer": r["answer"]}
        for r in rln.toy_rows(512)
    ]
    trainer = GRPOTrainer(
        str(tiny_path()), [right, short], args, train_dataset=Dataset.from_list(rows)
    )
    watched = rln.watch(trainer, "runs/watch_trl")  # the one line more; the other is its import
    trainer.train()
    print(watched)
