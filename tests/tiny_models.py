"Tiny random models and a tokenizer of one byte a token, made from nothing in milliseconds."

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rl_notebook.backends.base import Backend
from rl_notebook.backends.local.trainer import open_local
from rl_notebook.task.models import load_model

EOS = 256


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    "Tensors this small are faster on one thread, above all on a busy machine."
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def uneven(text: str) -> float:
    "A reward that nearly always differs inside a group."
    return float(sum(map(ord, text)) % 7)


def always(value: float) -> Callable[[str], float]:
    "A reward without signal."
    return lambda text: value


shipped = functools.cache(load_model)


def tiny(change: Callable[[Any], Any] = lambda model: None, **options: Any) -> Backend:
    "The tiny model as it ships, or with something done to it."
    model, tokenizer = shipped("tiny")
    model = copy.deepcopy(model)
    change(model)
    return open_local(model, tokenizer, **options)


@functools.cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    "Ids 0 to 255 are bytes, 256 is <eos>, 257 is <pad>."
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")


def tiny_model(
    family: str = "qwen3",
    *,
    seed: int = 0,
    tied: bool = False,
    vocab: int = 258,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    context: int = 256,
    eos: int | list[int] | None = EOS,
    scale: float = 4.0,
) -> PreTrainedModel:
    "A causal LM with random weights; `scale` sharpens its logits, so that tokens differ in probability."
    torch.manual_seed(seed)
    ids = {"eos_token_id": eos, "bos_token_id": None, "pad_token_id": None}
    if family == "gpt2":
        sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": context}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=vocab, **sizes, **ids))
    else:
        config, kind = {
            "qwen3": (Qwen3Config, Qwen3ForCausalLM),
            "llama": (LlamaConfig, LlamaForCausalLM),
        }[family]
        sizes = {
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
        }
        sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 8}
        model = kind(
            config(
                vocab_size=vocab,
                max_position_embeddings=context,
                tie_word_embeddings=tied,
                **sizes,
                **ids,
            )
        )
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.mul_(scale)
    return model.eval()
