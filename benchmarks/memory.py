"""Peak memory of one training forward and backward pass: ours, and the naive one that holds all logits.

    python benchmarks/memory.py --json FILE

Both run the same loss on the same small model and sequences, each in a separate process, and must arrive at the same
gradients. Memory is what the process holds at its peak, less what it held before the pass (Linux, CPU, float32). Of
each sequence the last three quarters are trained on, as a completion would be.

Then completions of common prompts, with each prompt computed once and for each of them. The two differ by less than
what the allocator keeps back, so the storage of all tensors that are alive is counted instead.

    python benchmarks/memory.py --base

SmolLM2-135M under LoRA, its base in full precision and in 8 bits, each in a separate process: what the process holds
more after opening than before loading, after sampling, and at the peak of a training pass. It needs the extras smollm2
and quantized.

    python benchmarks/memory.py --long

One group of eight completions of 1,024 to 8,192 tokens: how the peak grows with their length.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import re
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.core.types import Datum
from rl_notebook.core.losses import make_loss_fn

MB = 1e6
VOCABULARIES = (50_000, 150_000)
LENGTHS = (128, 512)


@dataclass(frozen=True)
class Case:
    "One pass: a batch of sequences through a model with a small body and a large head."

    vocabulary: int
    length: int  # tokens of a sequence
    sequences: int = 4
    hidden: int = 64
    layers: int = 2
    completions: int = 1  # sequences of one prompt

    @property
    def logits_mb(self) -> float:
        "Size of the logits of all positions, held once."
        return self.sequences * (self.length - 1) * self.vocabulary * 4 / MB


def model_of(case: Case) -> LlamaForCausalLM:
    "The model of a case, the same every time."
    torch.manual_seed(0)
    sizes = {
        "hidden_size": case.hidden,
        "intermediate_size": 3 * case.hidden,
        "num_hidden_layers": case.layers,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": case.length,
    }
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=case.vocabulary, tie_word_embeddings=False, **sizes, **heads)
    ).eval()


def datums_of(case: Case) -> list[Datum]:
    "Random sequences, a quarter of each a prompt, with advantages of both signs."
    rng = np.random.default_rng(0)
    weights = (np.arange(case.length - 1) >= case.length // 4).astype(float)
    advantages = rng.normal(size=case.sequences)
    tokens = rng.integers(0, case.vocabulary, (case.sequences, case.length))
    for i in range(case.sequences):
        tokens[i, : case.length // 4] = tokens[i - i % case.completions, : case.length // 4]
    return [
        Datum(t, weights, advantage=float(a), sample=i)
        for i, (t, a) in enumerate(zip(tokens, advantages, strict=True))
    ]


# --- the two passes ----------------------------------------------------------------------------------------------

Pass = Callable[[], object]


def ours(model: LlamaForCausalLM, datums: Sequence[Datum]) -> Pass:
    "`forward_backward_custom` of the local backend."
    backend = open_local(model, None, reference=False, inline=True, device="cpu")
    loss_fn = make_loss_fn(datums, policy_loss="ppo")
    return lambda: asyncio.run(backend.policy.forward_backward_custom(datums, loss_fn))


def naive(model: LlamaForCausalLM, datums: Sequence[Datum]) -> Pass:
    "All logits, their log-softmax, the loss, backward."
    loss_fn = make_loss_fn(datums, policy_loss="ppo")

    def run() -> None:
        ids = torch.from_numpy(np.stack([d.tokens for d in datums]))
        logprobs = model(input_ids=ids[:, :-1], use_cache=False).logits.log_softmax(-1)
        picked = logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1)
        loss_fn(datums, list(picked))[0].backward()

    return run


VARIANTS = {"ours": ours, "naive": naive}


# --- measuring ---------------------------------------------------------------------------------------------------


def held(what: str) -> float:
    "Megabytes of this process: 'VmRSS' now, or 'VmHWM' at its peak."
    matches = re.search(
        rf"^{what}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE
    )
    assert matches, f"/proc/self/status has no {what}"
    return int(matches[1]) * 1024 / MB


def peak_growth(run: Pass) -> float:
    "Megabytes by which the process grows at most while `run` runs."
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = held("VmRSS")
    run()
    return held("VmHWM") - before


class Live(TorchDispatchMode):
    "Counts the bytes of the tensors that are alive, of those made inside."

    def __init__(self) -> None:
        super().__init__()
        self.known = dict[int, int]()
        self.now = 0
        self.peak = 0

    def gone(self, place: int) -> None:
        self.now -= self.known.pop(place)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for storage in (t.untyped_storage() for t in tree_leaves(result) if isinstance(t, Tensor)):
            if (place := storage.data_ptr()) and place not in self.known:
                self.known[place] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.gone, place)
        return result


SHARED = Case(8_000, 1024, sequences=32, completions=8)


def live_mb(case: Case, no_tree: str, checkpointing: bool) -> float:
    "Megabytes of tensors that are alive at the peak of one pass of ours."
    options = {
        "reference": False,
        "inline": True,
        "device": "cpu",
        "gradient_checkpointing": checkpointing,
    }
    policy = open_local(model_of(case), None, **options).policy
    datums = datums_of(case)
    policy.state.scoring.causal.no_tree = no_tree
    loss_fn = make_loss_fn(datums, policy_loss="ppo")
    with Live() as live:
        asyncio.run(policy.forward_backward_custom(datums, loss_fn))
    return live.peak / MB


def measure_shared(case: Case = SHARED) -> dict[str, float]:
    "The peak with prompts computed once and for each completion, layers kept and computed again."
    sides = {"once": "", "each": "switched off"}
    layers = {"": False, ", checkpointing": True}
    return {
        side + kept: live_mb(case, why, again)
        for side, why in sides.items()
        for kept, again in layers.items()
    }


BASES = {"full": {}, "8 bits": {"load_in_8bit": True}}


def measure_base(kind: str, model: str = "smollm2", length: int = 128) -> dict[str, float]:
    "Megabytes of this process under LoRA, beyond those before the model was loaded."
    from rl_notebook.core.types import SampleParams
    from rl_notebook.task.models import load_model

    before = held("VmRSS")
    backend = open_local(*load_model(model), lora_rank=8, inline=True, device="cpu", **BASES[kind])
    gc.collect()
    result = {"opened": held("VmRSS") - before}
    rng = np.random.default_rng(0)
    tokens = rng.integers(5, backend.policy.vocab_size, (4, length))
    datums = [
        Datum(t, np.arange(length - 1) >= 32, advantage=(-1.0) ** i, sample=i)
        for i, t in enumerate(tokens)
    ]

    def pass_():
        return asyncio.run(
            backend.policy.forward_backward_custom(datums, make_loss_fn(datums, kl_beta=0.0))
        )

    result["training pass"] = result["opened"] + peak_growth(pass_)
    asyncio.run(
        backend.sampler.sample(tokens[0, :32].tolist(), SampleParams(n=4, max_tokens=4, seed=0))
    )
    gc.collect()
    return result | {"after sampling": held("VmRSS") - before}


def measure(variant: str, case: Case) -> tuple[float, dict[str, Tensor]]:
    "Peak growth of one pass in this process, and the gradients that it leaves."
    model = model_of(case)
    datums = datums_of(case)
    growth = peak_growth(VARIANTS[variant](model, datums))
    return growth, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def measure_apart(variant: str, case: Case, folder: Path) -> tuple[float, dict[str, Tensor]]:
    "`measure` in a fresh process."
    file = folder / "measured.pt"
    arguments = json.dumps(asdict(case))
    subprocess.run(
        [sys.executable, __file__, "--one", variant, "--case", arguments, "--out", str(file)],
        check=True,
    )
    growth, gradients = torch.load(file)
    return growth, gradients


def compare(results: dict[str, tuple[float, dict[str, Tensor]]], case: Case) -> dict[str, Any]:
    "What was measured, as plain values; raises `AssertionError` unless all gradients are the same."
    (mine, a) = results["ours"]
    (full, b) = results["naive"]
    assert a.keys() == b.keys() == {name for name, _ in model_of(case).named_parameters()}, (
        "not every weight has one"
    )
    for name, gradient in b.items():
        assert gradient.abs().max() > 0, f"the naive gradient of {name} is zero"
        torch.testing.assert_close(
            a[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()), msg=name
        )
    weights = sum(g.numel() for g in b.values()) * 4 / MB
    sizes = {
        "logits_mb": case.logits_mb,
        "gradients_mb": weights,
        "ours_mb": mine,
        "naive_mb": full,
    }
    return asdict(case) | sizes | {"ratio": full / mine}


def table(results: Sequence[dict[str, Any]]) -> str:
    "One line per case."
    lines = [
        f"{'vocabulary':>10}{'tokens':>9}{'logits':>9}{'gradients':>11}{'ours':>8}{'naive':>8}{'naive/ours':>12}"
    ]
    for r in results:
        tokens = f"{r['sequences']}x{r['length']}"
        sizes = f"{r['logits_mb']:>9.0f}{r['gradients_mb']:>11.0f}{r['ours_mb']:>8.0f}{r['naive_mb']:>8.0f}"
        lines.append(f"{r['vocabulary']:>10}{tokens:>9}{sizes}{r['ratio']:>12.1f}")
    return "\n".join(
        [*lines, "megabytes; ours and naive are the growth at the peak, gradients included in both"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument(
        "--base", action="store_true", help="the base of an adapter in full precision and in 8 bits"
    )
    parser.add_argument("--long", action="store_true", help="sequences of up to 8,192 tokens")
    parser.add_argument("--kind", choices=BASES, help=argparse.SUPPRESS)
    parser.add_argument("--one", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        torch.save(measure(args.one, Case(**json.loads(args.case))), args.out)
        return
    if args.kind:
        print(json.dumps(measure_base(args.kind)))
        return
    if args.base:
        for kind in BASES:
            command = [sys.executable, __file__, "--kind", kind]
            output = subprocess.run(
                command, check=True, capture_output=True, text=True
            ).stdout.splitlines()[-1]
            print(
                f"{kind:<8}"
                + "".join(f"  {name} {size:.0f} MB" for name, size in json.loads(output).items())
            )
        return
    if args.long:
        for length in (1024, 2048, 4096, 8192):
            with tempfile.TemporaryDirectory() as folder:
                case = Case(8_000, length, sequences=8, hidden=128, layers=4, completions=8)
                print(
                    f"{length:>6} tokens  {measure_apart('ours', case, Path(folder))[0]:.0f} MB",
                    flush=True,
                )
        return
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for case in (Case(v, n) for v in VOCABULARIES for n in LENGTHS):
            result = {variant: measure_apart(variant, case, Path(folder)) for variant in VARIANTS}
            results.append(compare(result, case))
    shared = measure_shared()
    print(
        table(results),
        "",
        f"{SHARED.sequences}x{SHARED.length}, {SHARED.completions} of a prompt:",
        sep="\n",
    )
    print("\n".join(f"{name:<24}{size:>6.0f}" for name, size in shared.items()))
    if args.json:
        result = {
            "torch": torch.__version__,
            "cases": results,
            "shared": asdict(SHARED) | {"live_mb": shared},
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
