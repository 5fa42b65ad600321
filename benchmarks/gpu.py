"""The local backend on one GPU: does it agree with the CPU, and how fast is it next to TRL and next to the machine.

    python benchmarks/gpu.py --json FILE                  # a random Qwen3 of 0.6B weights, nothing is downloaded
    python benchmarks/gpu.py --device cpu --json FILE     # tries this script on a tiny shape; its figures mean nothing

What it does (`README.md` has the figures of one H200):

1. Agreement, on a small model: logprobs, gradients, an update and sampled tokens, here and on the CPU; the sampler next to
   the trainer; the same step twice from one saved state. It ends with status 1 where float32 is further off than
   `LIMITS`.
2. Which attention kernel torch takes for each kind of pass.
3. Sampling: tokens/s for several numbers of rows, next to the floor of reading all weights, and the keys and values, once
   per decoded position.
4. Training alone: forward, backward and update over sequences of 1,024 tokens, as model FLOP utilisation: the FLOPs
   that the model needs (no attention, nothing computed twice) a second, over what the vendor names for bfloat16, and
   over the best product that is measured here. For scale: 11.1 % is a published figure of another trainer, for a full
   fine-tune of a 0.6B model on one H100.
5. Whole steps in turns with TRL, as `step.py` does (extra `bench`; left out, and said so, where TRL is missing).
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import step as steps
import torch
from roofline import gemm_rate, read_rate
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.attention import SDPBackend
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.core.types import AdamParams, Datum, SampleParams
from rl_notebook.backends.work import peak_memory, synchronize

# model FLOP utilisation, published, of another trainer: full fine-tune of a 0.6B model on one H100
ANCHOR = 0.111
# dense bfloat16 FLOP/s
VENDOR = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}
LIMITS = {"logprobs": 2e-4, "gradients": 2e-3, "update": 1e-4, "sampler": 2e-4, "again": 1e-5}
ADAM = AdamParams(learning_rate=1e-5)


@dataclass(frozen=True)
class Shape:
    "A Qwen3 with random weights."

    vocab: int
    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    def model(self) -> Qwen3ForCausalLM:
        "In float32, on the CPU."
        torch.manual_seed(0)
        sizes = {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
        }
        heads = {
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
        }
        rest = {
            "num_hidden_layers": self.layers,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        }
        ends = {"eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0}
        return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, **rest, **ends)).eval()

    @property
    def kv_weights(self) -> int:
        "Numbers that one token leaves in the cache."
        return 2 * self.layers * self.kv_heads * self.head_dim


SHAPES = {"0.6b": Shape(151936, 1024, 3072, 28, 16, 8, 128), "tiny": Shape(400, 32, 64, 2, 4, 2, 8)}
CHECKED = Shape(4096, 256, 768, 4, 8, 4, 32)  # what is compared with the CPU


def word_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    "A tokenizer whose id i is the word w<i>, so that any sampled token is text."
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, vocab)}
    raw = Tokenizer(models.WordLevel(words, unk_token="w2"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w3{% endif %}"
    return tokenizer


class Backend:
    "The local backend under one event loop."

    def __init__(self, model: Any, vocab: int, device: str, dtype: str = "float32", **kwargs: Any):
        self.backend = open_local(
            model, word_tokenizer(vocab), device=device, dtype=dtype, **kwargs
        )  # type: ignore[arg-type]
        self.policy: Any = self.backend.policy
        self.engine: Any = self.backend.sampler.engine  # type: ignore[attr-defined]
        self.engine.eos_token_ids = frozenset()
        self.run = asyncio.Runner().run

    def sample(self, prompts: Sequence[Sequence[int]], **kwargs: Any) -> list[Any]:
        "Completions of all prompts, sampled together; the n-th prompt has the seed n."
        params_of_prompts = [SampleParams(seed=i, **kwargs) for i in range(len(prompts))]

        async def all_of_them() -> list[list[Any]]:
            return await asyncio.gather(
                *map(self.backend.sampler.sample, prompts, params_of_prompts)
            )

        return [c for completions in self.run(all_of_them()) for c in completions]

    def gradients(self) -> list[torch.Tensor]:
        "What is accumulated, on the CPU."
        return [t.grad.detach().double().cpu() for t in self.policy.state.targets]

    def weights(self) -> list[torch.Tensor]:
        return [t.detach().double().cpu() for t in self.policy.state.targets]

    def close(self) -> None:
        self.run(self.backend.close())


def surrogate(
    datums: Sequence[Datum], series: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    "-A p, summed over the scored tokens, over their number."
    terms = [
        -d.advantage * s[torch.from_numpy(d.active)].sum()
        for d, s in zip(datums, series, strict=True)
    ]
    return torch.stack(terms).sum() / sum(d.num_loss_tokens for d in datums), {}


def made_up(vocab: int, count: int, prompt: int, tokens: int) -> list[Datum]:
    "Sequences of random ids, in groups of four with a common prompt, the rest scored."
    rng = np.random.default_rng(0)
    rows = []
    for i in range(count):
        begin = rng.integers(2, vocab, prompt) if i % 4 == 0 else rows[-1].tokens[:prompt]
        ids = np.concatenate([begin, rng.integers(2, vocab, tokens)])
        rows.append(
            Datum(ids, (np.arange(1, len(ids)) >= prompt).astype(float), float(rng.normal()))
        )
    return rows


# --- agreement ---------------------------------------------------------------------------------------------------


def farthest(a: Sequence[Any], b: Sequence[Any]) -> float:
    "Largest gap where both are numbers."
    return max(
        float(np.nanmax(np.abs(np.asarray(x) - np.asarray(y)))) for x, y in zip(a, b, strict=True)
    )


def relative(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    "Norm of the difference over the norm of the second."
    one, two = (torch.cat([t.flatten() for t in side]) for side in (a, b))
    return float((one - two).norm() / two.norm())


def pass_over(side: Backend, datums: list[Datum]) -> dict[str, Any]:
    "Logprobs, gradients, weights after an update and samples of one side; ends where it began."
    state = side.run(side.policy.save_state("before"))
    output = side.run(side.policy.forward_backward_custom(datums, surrogate))
    result: dict[str, Any] = {
        "logprobs": [lp.values for lp in output.logprobs],
        "gradients": side.gradients(),
    }
    side.run(side.policy.optim_step(ADAM))
    result["weights"] = side.weights()
    side.run(side.policy.load_state(state))
    prompts = [d.tokens[:16].tolist() for d in datums[::4]]
    return result | {"completions": side.sample(prompts, n=4, max_tokens=48)}


def sampler_gap(side: Backend, completions: Sequence[Any]) -> float:
    "Largest gap between the logprobs that were reported while sampling and those of the trainer."
    rows = [(np.asarray(c.full_tokens), c) for c in completions]
    datums = [
        Datum(ids, (np.arange(1, len(ids)) >= c.prompt_len).astype(float), 1.0) for ids, c in rows
    ]
    scored = side.run(side.policy.forward(datums))
    return farthest(
        [lp.values[c.prompt_len - 1 :] for lp, c in zip(scored, completions, strict=True)],
        [c.logprobs for c in completions],
    )


def same_tokens(a: Sequence[Any], b: Sequence[Any]) -> float:
    "Share of completions with the same tokens."
    return statistics.mean(
        float(np.array_equal(x.tokens, y.tokens)) for x, y in zip(a, b, strict=True)
    )


def agreement(device: str, dtype: str) -> dict[str, float]:
    "This device next to the CPU in float32; in other precisions the gaps are for looking at."
    datums = made_up(CHECKED.vocab, 8, 24, 40)
    model = CHECKED.model()
    sides = [
        Backend(copy.deepcopy(model), CHECKED.vocab, "cpu"),
        Backend(copy.deepcopy(model), CHECKED.vocab, device, dtype),
    ]
    here, there = (pass_over(side, datums) for side in sides)
    again = pass_over(sides[1], datums)
    result = {
        "logprobs": farthest(there["logprobs"], here["logprobs"]),
        "gradients": relative(there["gradients"], here["gradients"]),
        "update": relative(there["weights"], here["weights"]),
        "sampler": sampler_gap(sides[1], there["completions"]),
        "again": max(
            farthest(again["logprobs"], there["logprobs"]),
            relative(again["weights"], there["weights"]),
        ),
        "same_samples_as_cpu": same_tokens(there["completions"], here["completions"]),
    }
    for side in sides:
        side.close()
    return result


def kernels(device: str, dtype: str) -> dict[str, str]:
    "The attention kernel that torch takes, by kind of pass."
    kind: Any = {"device": device, "dtype": getattr(torch, dtype)}
    s = SHAPES["0.6b"]
    names = {b.value: n for n, b in SDPBackend.__members__.items()}
    few, many = (torch.zeros(4, h, 256, s.head_dim, **kind) for h in (s.kv_heads, s.heads))
    stacked = torch.zeros(4, s.kv_heads, s.heads // s.kv_heads, s.head_dim, **kind)

    def choice(q, k, mask, **kwargs):
        return names[torch._fused_sdp_choice(q, k, k, mask, 0.0, **kwargs)]

    whole = few if dtype == "bfloat16" or device == "cpu" else many
    return {
        "prefill, scoring": choice(many, whole, None, is_causal=True, enable_gqa=whole is few),
        "decode step": choice(stacked, few, torch.zeros(4, 1, 1, 256, **kind)),
        "prefix tree": choice(many, many, torch.zeros(4, 1, 256, 256, **kind)),
    }


# --- sampling and training alone ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    "How much is measured."

    shape: str = "0.6b"
    device: str = "cuda"
    dtype: str = "bfloat16"
    rows: tuple[int, ...] = (8, 32, 128)
    prompt: int = 128
    tokens: int = 256
    rounds: int = 3  # measured ones; one more comes before them
    train_rows: int = 16
    train_tokens: int = 1024
    steps: int = 5
    product: int = 8192  # rows of the matrix product that training is held against


TINY = Plan(
    "tiny",
    "cpu",
    "float32",
    (4, 8),
    prompt=12,
    tokens=16,
    rounds=1,
    train_rows=2,
    train_tokens=64,
    steps=1,
    product=256,
)


def timed(run: Callable[[], Any], plan: Plan) -> float:
    "Median seconds of the rounds after the first, the device's work included."
    results = []
    for _ in range(plan.rounds + 1):
        synchronize(plan.device)
        start = time.perf_counter()
        run()
        synchronize(plan.device)
        results.append(time.perf_counter() - start)
    return statistics.median(results[1:])


def time_sampling(side: Backend, plan: Plan, read: float) -> list[dict[str, Any]]:
    "Tokens a second, next to the floor of reading weights and cache."
    shape = SHAPES[plan.shape]
    size = side.backend.size
    results = []
    ids = np.random.default_rng(0).integers(2, shape.vocab, plan.prompt).tolist()
    for rows in plan.rows:
        cache = (
            rows
            * (plan.prompt + plan.tokens / 2)
            * shape.kv_weights
            * getattr(torch, plan.dtype).itemsize
        )
        floor = plan.tokens * (size.nbytes + cache) / read
        seconds = timed(lambda r=rows: side.sample([ids], n=r, max_tokens=plan.tokens), plan)
        case = {"rows": rows, "seconds": seconds, "floor_seconds": floor}
        results.append(
            case | {"tokens_per_s": rows * plan.tokens / seconds, "times_floor": seconds / floor}
        )
    return results


def training(side: Backend, plan: Plan, gemm: float, vendor: float | None) -> dict[str, Any]:
    "Forward, backward and update; each sequence is another one, so that no prefix is shared."
    rng = np.random.default_rng(1)
    n = plan.train_tokens
    rows = [rng.integers(2, SHAPES[plan.shape].vocab, n + 1) for _ in range(plan.train_rows)]
    datums = [Datum(ids, np.ones(n), float(rng.normal())) for ids in rows]

    def once() -> None:
        side.run(side.policy.forward_backward_custom(datums, surrogate))
        side.run(side.policy.optim_step(ADAM))

    seconds = timed(once, plan)
    tokens = plan.train_rows * n
    rate = side.backend.size.flops(tokens, tokens, backward=True) / seconds
    result = {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "flops_per_s": rate,
    }
    result |= {
        "of_best_product": rate / gemm,
        "mfu": rate / vendor if vendor else None,
        "anchor_mfu": ANCHOR,
    }
    return result


# --- next to TRL --------------------------------------------------------------------------------------------------


def beside_trl(plan: Plan, progress: Callable[[str], None]) -> dict[str, Any]:
    "Whole steps in turns; raises `AssertionError` where the two sides did other work."
    shape = SHAPES[plan.shape]
    setting = steps.Setting("", tokens=plan.tokens, steps=plan.steps, words=plan.prompt - 1)
    setting = replace(setting, device=plan.device, dtype=plan.dtype)
    with tempfile.TemporaryDirectory() as folder:
        shape.model().save_pretrained(folder)
        word_tokenizer(shape.vocab).save_pretrained(folder)
        ours, theirs = steps.alternate(setting, folder, progress)
    steps.check_same_work(setting, ours, theirs)
    parts = {"ours": ours[1:], "trl": theirs[1:]}
    median = {
        n: {p: statistics.median(getattr(s, p) for s in r) for p in steps.PARTS}
        for n, r in parts.items()
    }
    ratio = {p: median["trl"][p] / median["ours"][p] for p in steps.PARTS}
    rate = {n: setting.rows * setting.tokens / m["sampling"] for n, m in median.items()}
    return {"setting": asdict(setting), "seconds": median, "ratio": ratio, "tokens_per_s": rate}


# --- all of it ---------------------------------------------------------------------------------------------------


def machine(device: str) -> dict[str, Any]:
    "What it ran on."
    result: dict[str, Any] = {
        "device": device,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
    }
    result |= {
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
        "processor": platform.machine(),
    }
    if device == "cuda":
        at = torch.cuda.get_device_properties(0)
        result |= {
            "gpu": at.name,
            "gpu_memory_gb": at.total_memory / 1e9,
            "capability": [at.major, at.minor],
        }
        result["cuda"] = torch.version.cuda
    return result


def measure(
    plan: Plan, trl: bool = True, progress: Callable[[str], None] = print
) -> dict[str, Any]:
    "Everything, as plain values."
    where = machine(plan.device)
    result = {"plan": asdict(plan), "limits": LIMITS}
    result |= {
        "machine": where,
        "agreement": {d: agreement(plan.device, d) for d in ("float32", "bfloat16")},
    }
    result["agreed"] = all(
        result["agreement"]["float32"][name] <= limit for name, limit in LIMITS.items()
    )
    progress(agreed(result))
    result["attention"] = {d: kernels(plan.device, d) for d in ("float32", "bfloat16")}
    for dtype, seconds in result["attention"].items():
        progress(
            f"attention in {dtype}: "
            + ", ".join(f"{name} {kernel}" for name, kernel in seconds.items())
        )
    side = Backend(
        SHAPES[plan.shape].model(),
        SHAPES[plan.shape].vocab,
        plan.device,
        plan.dtype,
        reference=False,
    )
    size = side.backend.size
    assert size is not None
    read = read_rate(2**29 if plan.device == "cuda" else size.nbytes, plan.device)
    gemm = gemm_rate(size, plan.product)
    vendor = next((rate for name, rate in VENDOR.items() if name in where.get("gpu", "")), None)
    result["rates"] = {"read_bytes": read, "product_flops": gemm, "vendor_flops": vendor}
    result["sampling"] = time_sampling(side, plan, read)
    result["training"] = training(side, plan, gemm, vendor)
    side.close()
    del side
    gc.collect()
    progress(alone(result))
    result["step"] = beside_trl(plan, progress) if trl and find_spec("trl") else None
    progress(whole(result))
    result["peak_memory_gb"] = peak_memory()
    return result


def agreed(result: dict[str, Any]) -> str:
    "The gaps, and whether they are within the limits."
    head = f"{'':<12}{'logprobs':>10}{'gradients':>11}{'update':>10}{'sampler':>10}{'again':>10}{'samples':>8}"

    def line(n, a):
        return (
            f"{n:<12}{a['logprobs']:>10.1e}{a['gradients']:>11.1e}{a['update']:>10.1e}{a['sampler']:>10.1e}{a['again']:>10.1e}"
            f"{a['same_samples_as_cpu']:>8.0%}"
        )

    verdict = (
        "agrees with the CPU in float32"
        if result["agreed"]
        else "DISAGREES with the CPU in float32"
    )
    return "\n".join(
        [
            head,
            *(line(n, a) for n, a in result["agreement"].items()),
            f"{result['machine']['device']} {verdict}",
        ]
    )


def alone(result: dict[str, Any]) -> str:
    "Sampling and training."

    def row(c):
        return f"{c['rows']:>6}{c['tokens_per_s']:>11.0f}{c['times_floor']:>9.1f}"

    lines = [f"{'rows':>6}{'tokens/s':>11}{'/ floor':>9}", *map(row, result["sampling"])]
    t = result["training"]
    used = (
        "no vendor's figure is known here"
        if t["mfu"] is None
        else f"MFU {t['mfu']:.1%} (for scale {ANCHOR:.1%})"
    )
    lines.append(
        f"training: {t['tokens_per_s']:.0f} tokens/s, {t['of_best_product']:.1%} of the best product, {used}"
    )
    return "\n".join(lines)


def whole(result: dict[str, Any]) -> str:
    "Steps next to TRL."
    if result["step"] is None:
        return "TRL was not run"
    lines = [f"{'seconds':<10}{'ours':>9}{'TRL':>9}{'TRL/ours':>10}"]
    sides = result["step"]["seconds"]
    for part, ratio in result["step"]["ratio"].items():
        lines.append(
            f"{part:<10}{sides['ours'][part]:>9.3f}{sides['trl'][part]:>9.3f}{ratio:>10.2f}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: a tiny shape, to try the script",
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--no-trl", action="store_true", help="leave TRL out")
    parser.add_argument(
        "--rows", nargs="+", type=int, help="completions at once, for sampling alone"
    )
    parser.add_argument("--tokens", type=int, help="of a completion")
    parser.add_argument("--steps", type=int, help="measured steps next to TRL")
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "--device: got cuda, but torch sees no GPU; `--device cpu` tries the script on a tiny shape"
        )
    transformers_logging.disable_progress_bar()
    chosen = {k: v for k in ("tokens", "steps") if (v := getattr(args, k)) is not None}
    if args.rows:
        chosen |= {"rows": tuple(args.rows)}
    result = measure(replace(TINY if args.device == "cpu" else Plan(), **chosen), not args.no_trl)
    if args.device == "cpu":
        print("This was a CPU: the script works, its figures mean nothing.")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(0 if result["agreed"] else 1)


if __name__ == "__main__":
    main()
