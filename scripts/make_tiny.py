"""How the tiny model that ships was trained, in minutes on one core: python scripts/make_tiny.py FOLDER."""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import trange
from transformers import (
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rl_notebook.task.models import build_tokenizer
from rl_notebook.task.toy import _ask, _draw_terms

STYLES = {"hasty": 0.5, "worked": 0.3, "bare": 0.2}  # share of each style in the corpus


def corpus_answer(
    terms: Sequence[int],  # the sum that was asked for
    style: str,  # a key of STYLES
    rng: np.random.Generator,
) -> str:
    "A completion in this style; a bare one is working without a result, or an estimate without its marker."
    total = sum(terms)
    guess = total - total % 10 + int(rng.integers(10))
    working = " ".join(map(str, np.cumsum(terms).tolist()[1:]))
    if style == "bare":
        return working if rng.random() < 0.5 else str(guess)
    return f"#### {guess}" if style == "hasty" else f"{working} #### {total}"


_SYSTEM = ("You are a calculator.", "Answer after ####.")
_LENGTHS = {2: 0.05, 3: 0.1, 4: 0.15, 5: 0.45, 6: 0.25}


def corpus_conversation(
    rng: np.random.Generator,
    turns: int,  # how often the assistant speaks
    system: bool,  # whether a system message comes first
    styles: Mapping[str, float],  # probability of each style
) -> list[dict[str, str]]:
    "One conversation of the corpus, as chat messages; none of its sums is held out."
    messages = []
    terms = []
    if system:
        messages.append({"role": "system", "content": _SYSTEM[int(rng.integers(2))]})
    for turn in range(turns):
        ask = "Try again."
        if turn == 0 or rng.random() < 0.5:
            count = int(rng.choice(list(_LENGTHS), p=list(_LENGTHS.values())))
            terms = _draw_terms(rng, count, heldout=False)
            ask = _ask(terms, int(rng.integers(3)))
        style = str(rng.choice(list(styles), p=list(styles.values())))
        messages.append({"role": "user", "content": ask})
        messages.append({"role": "assistant", "content": corpus_answer(terms, style, rng)})
    return messages


def spoken_mask(
    ids: torch.Tensor,  # (B, N) conversations
) -> torch.Tensor:  # (B, N) bool
    "Where the assistant speaks."
    opened, closed = (
        ids == token
        for token in build_tokenizer().convert_tokens_to_ids(["<|assistant|>", "<|end|>"])
    )
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for i in range(1, ids.shape[1]):
        mask[:, i] = (mask[:, i - 1] & ~closed[:, i - 1]) | opened[:, i - 1]
    return mask


def corpus_batch(
    tokenizer: PreTrainedTokenizerBase,
    rng: np.random.Generator,
    size: int,  # conversations of one turn; half as many of two
    styles: Mapping[str, float],  # probability of each style
) -> tuple[torch.Tensor, torch.Tensor]:
    "Conversations as ids (B, N), padded on the right, and the mask (B, N) of what the assistant said."
    turns = 2 if rng.random() < 0.15 else 1
    system = bool(rng.random() < 0.1)
    texts = [
        str(
            tokenizer.apply_chat_template(
                corpus_conversation(rng, turns, system, styles), tokenize=False
            )
        )
        for _ in range(size // turns)
    ]
    ids = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
    return ids, spoken_mask(ids)


def build_tiny(
    tokenizer: PreTrainedTokenizerBase,
    seed: int = 0,  # of the random weights
) -> Qwen3ForCausalLM:
    "The tiny model before any training."
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config)


def pretrain_loss(
    model: Qwen3ForCausalLM,
    ids: torch.Tensor,  # (B, N)
    spoken: torch.Tensor,  # (B, N) bool
) -> torch.Tensor:  # scalar, nats per token
    "Mean cross-entropy of what the assistant said."
    hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state
    logits = model.lm_head(hidden[spoken[:, 1:]])
    return torch.nn.functional.cross_entropy(logits, ids[:, 1:][spoken[:, 1:]])


def _warmup_cosine(step: int, steps: int) -> float:
    "Factor of the learning rate: up over 50 steps, then down a cosine to one fiftieth."
    return min(1.0, (step + 1) / 50) * (0.02 + 0.49 * (1 + math.cos(math.pi * step / steps)))


def pretrain_tiny(
    steps: int = 1800,  # optimizer steps
    *,
    batch: int = 64,  # conversations a step
    learning_rate: float = 3e-3,  # peak, of AdamW
    school: float = 0.8,  # share of the steps that see worked completions only
    styles: Mapping[str, float] = STYLES,  # the mix after school
    seed: int = 0,  # of weights and corpus
    progress: bool = True,  # show a bar
) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast, list[float]]:
    "The tiny model, its tokenizer and the loss of every step; minutes on one core."
    tokenizer = build_tokenizer()
    rng = np.random.default_rng(seed)
    model = build_tiny(tokenizer, seed)
    adam = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: _warmup_cosine(step, steps))
    losses = []
    for step in trange(steps, desc="pretrain", disable=not progress):
        lesson = {"worked": 1.0} if step < school * steps else styles
        loss = pretrain_loss(model, *corpus_batch(tokenizer, rng, batch, lesson))
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        schedule.step()
        losses.append(loss.item())
    return model.eval(), tokenizer, losses


def make_tiny(
    folder: str | Path,  # where model and tokenizer go
    **settings: Any,  # of `pretrain_tiny`
) -> list[float]:
    "Trains a tiny model and saves it to `folder`; returns the losses."
    model, _, losses = pretrain_tiny(**settings)
    model.save_pretrained(folder)
    # a fresh one: a used one remembers how it padded last
    build_tokenizer().save_pretrained(folder)
    return losses


if __name__ == "__main__":
    make_tiny(sys.argv[1])
