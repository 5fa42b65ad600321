"""The architectures that transformers has for causal text, made small, through two steps here.

python tests/families.py    # writes nbs/tutorials/families.csv; takes half an hour on two busy cores
"""

from __future__ import annotations

import asyncio
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import transformers
from tiny_models import byte_tokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import rl_notebook as rln
from rl_notebook.core.types import RLNotebookError

TABLE = Path(__file__).parents[1] / "nbs/tutorials/families.csv"
SIZES = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "head_dim": 8,
}
SIZES |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
SIZES |= {"eos_token_id": None, "bos_token_id": None}
LINEAR = {
    f"linear_{name}": n
    for name, n in (("num_value_heads", 4), ("num_key_heads", 2), ("key_head_dim", 8))
}
LINEAR |= {"linear_value_head_dim": 8}
MAMBA = {
    f"mamba_{name}": 8
    for name in ("n_heads", "d_head", "d_state", "num_heads", "head_dim", "headdim")
}
MAMBA |= {
    "mamba_n_groups": 1,
    "mamba_ngroups": 1,
    "mamba_expand": 2,
    "mamba_d_ssm": 64,
    "mamba_chunk_size": 16,
}
STATE = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 16}
EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
GATED = EXPERTS | {"moe_num_experts": 4, "moe_k": 2, "n_routed_experts": 4}
HYBRID: dict[str, dict] = {
    "Qwen3_5Text": LINEAR,
    "Qwen3Next": LINEAR | EXPERTS,
    "Lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "FalconH1": MAMBA,
    "Mamba": {"state_size": 8},
    "Mamba2": STATE,
    "GraniteMoeHybrid": MAMBA
    | EXPERTS
    | {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 48},
    "Bamba": MAMBA | {"attn_layer_indices": [1, 3]},
    "NemotronH": MAMBA
    | {"ssm_state_size": 8, "n_groups": 1, "chunk_size": 16, "expand": 2, "n_routed_experts": 4}
    | {
        "hybrid_override_pattern": "M*M-",
        "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
    },
    "Jamba": EXPERTS
    | {"mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "Zamba2": MAMBA
    | {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "n_mamba_heads": 8,
        "attention_head_dim": 16,
        "num_mem_blocks": 1,
    }
    | {"attention_hidden_size": 64},
    "OlmoHybrid": LINEAR,
    "KimiLinear": EXPERTS
    | {"num_experts_per_token": 2, "linear_head_dim": 8, "linear_num_heads": 4, "kv_lora_rank": 8}
    | {"layer_types": ["linear_attention", "full_attention"] * 2}
    | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4},
    "BailingHybrid": GATED
    | {"layer_types": ["linear_attention", "full_attention"] * 2, "num_expert_group": 1},
    "Lfm2Moe": EXPERTS | {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
}
WHOLE = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 4,
}
WHOLE |= {
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
OLDER = {
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 256,
    "n_inner": 48,
    "d_model": 32,
    "num_layers": 4,
}
OLDER |= {
    "num_heads": 4,
    "ffn_dim": 48,
    "rotary_dim": 4,
    "n_heads": 4,
    "n_layers": 4,
    "bos_token_id": 1,
}
OLDER |= {
    f"decoder_{name}": n for name, n in (("layers", 4), ("attention_heads", 4), ("ffn_dim", 48))
}
OLDER |= {"attention_types": [[["global", "local"], 2]]}
# sizes in addition to `SIZES`, until a model runs here
TRIED = ({}, GATED, GATED | WHOLE, GATED | WHOLE | OLDER)


def model_of(config: str, more: dict | None = None) -> Any:
    "A model of random weights, sharp enough to tell one context from another; raises `ValueError` for a large one."
    model_config = getattr(transformers, config)(**SIZES | (more or {}))
    with torch.device("meta"):
        if (
            sum(
                p.numel()
                for p in transformers.AutoModelForCausalLM.from_config(model_config).parameters()
            )
            > 3e6
        ):
            raise ValueError("too large")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(model_config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2 if p.ndim == 2 else 1)
    return model


def loop_of(model: Any, lora: int = 0, **kwargs: Any) -> rln.GRPOLoop:
    "A loop on prompts of unequal length."
    size = {
        "prompt_groups_per_step": 3,
        "completions_per_prompt": 4,
        "max_completion_tokens": 12,
        "max_seq_len": 96,
    }
    cfg = rln.Config(**size, learning_rate=1e-3, kl_beta=0.05, lora_rank=lora)
    rows = [{"prompt": "x" * n + "yz"[n % 2]} for n in (1, 9, 17, 3, 30, 31)]
    backend = rln.open_local(model, byte_tokenizer(), lora_rank=lora, **kwargs)
    return rln.GRPOLoop(backend, rows, lambda text: float(len(text) % 5), cfg)


def plain_logprobs(model: Any, tokens: np.ndarray) -> np.ndarray:
    "What plain transformers say of a sequence alone, without a cache."
    ids = torch.tensor(np.array(tokens)[None])
    with torch.no_grad():
        result = model(ids).logits[0, :-1].float().log_softmax(-1)
    return result.gather(-1, ids[0, 1:, None])[:, 0].numpy()


async def two_steps(loop: rln.GRPOLoop, plain: Any) -> float:
    "The largest gap between trainer, sampler, reference and plain transformers, in nats."
    gaps = [0.0]
    for step in (1, 2):
        record = await loop.step()
        assert record.loss is not None
        for d, lp in zip(record.datums, record.loss.logprobs, strict=True):
            others = [d.sampler_logprobs] + (
                [plain_logprobs(plain, d.tokens), d.ref_logprobs] if step == 1 else []
            )
            gaps += [float(np.abs(lp.values - other)[d.active].max()) for other in others]
    return max(gaps)


def row_of(name: str) -> dict[str, Any]:
    "What the table says of an architecture."
    config = CONFIG_MAPPING_NAMES[name]
    row = {"architecture": name}
    for more in TRIED:
        try:
            more = more | HYBRID.get(config.removesuffix("Config"), {})
            loop = loop_of(model_of(config, more))
            row |= {
                "largest gap": asyncio.run(two_steps(loop, model_of(config, more))),
                "refused": "",
            }
        except RLNotebookError as error:
            row["refused"] = str(error)
        except Exception as error:  # of transformers' own making
            row.setdefault("not made here", f"{type(error).__name__}: {error}"[:100])
        else:
            break
    else:
        if "refused" in row:
            row.pop("not made here", None)
        return row
    causal, scoring = loop.backend.sampler.engine.causal, loop.backend.policy.state.scoring.causal  # type: ignore[union-attr]
    decoder = {"fast": "own decoder", "modules": "its modules", "full": "its modules and head"}[
        causal.route
    ]
    row |= {
        "drawn by": decoder + ", states" * causal.keeps_state,
        "shared prefixes": "no" if scoring.no_tree else "yes",
    }
    try:
        row["LoRA gap"] = asyncio.run(
            two_steps(loop_of(model_of(config, more), 4), model_of(config, more))
        )
    except Exception as error:
        row["LoRA"] = f"{type(error).__name__}: {error}"[:100]
    row.pop("not made here", None)
    return row


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = []
    for name in sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        rows.append(row_of(name))
        print(rows[-1], flush=True)
    if not sys.argv[1:]:
        pd.DataFrame(rows).to_csv(TABLE, index=False)


if __name__ == "__main__":
    main()
