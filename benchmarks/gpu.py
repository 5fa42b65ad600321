"""The local backend on one GPU: does it agree with the CPU, and how fast is it next to TRL and next to the machine.

    python benchmarks/gpu.py --json FILE                  # a random Qwen3 of 0.6B weights, nothing is downloaded
    python benchmarks/gpu.py --device cpu --json FILE     # tries this script on a tiny shape; its figures mean nothing
    python benchmarks/gpu.py --parts training variants    # only these

It takes `--minutes` at most (8 unless said otherwise). On a GPU each part has a limit of its own, too; one that passes its
limit or fails is noted, the next one begins, and FILE is written after each. The parts, in this order (`README.md` has figures):

1. `agreement`, on a small model: logprobs, gradients, an update and sampled tokens, here and on the CPU; the sampler next
   to the trainer; the same step twice from one saved state. The command ends with status 1 where float32 is further off
   than `LIMITS`.
2. `attention`: which kernel torch takes for each kind of pass.
3. `training` alone: forward, backward and update over sequences of 1,024 tokens, as model FLOP utilisation: the FLOPs
   that the model needs (no attention, nothing computed twice) a second, over what the vendor names for bfloat16, and
   over the best product that is measured here. For scale: 11.1 % is a published figure of another trainer, for a full
   fine-tune of a 0.6B model on one H100. Then the kernels that take the most time.
4. `long`: one step over 16 completions of 8,192 tokens: seconds and peak memory.
5. `step`: whole steps in turns with TRL, as `step.py` does, and the peak memory of each side (extra `bench`).
6. `sampling`: tokens/s for several numbers of rows, next to the floor of reading all weights, and the keys and values,
   once per decoded position.
7. `variants` of a training pass, each next to the pass as it is: prompts for each completion, attention over sequences of
   any length in one call without padding, compiled layers.
8. `vllm` at the same numbers of rows, in a process of its own, where it is installed or named by `--vllm PYTHON`.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import gc
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import sampling as samplers
import step as steps
import torch
import torch.nn.functional as F
from roofline import gemm_rate, read_rate
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.attention import SDPBackend
from transformers import AttentionInterface, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from rl_notebook.backends.local.prefixes import NAME, gathered, tree_attention
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
            "max_position_embeddings": 16384,
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
            model, word_tokenizer(vocab), device=device, dtype=dtype, inline=True, **kwargs
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


def made_up(vocab: int, count: int, prompt: int, tokens: int, group: int = 4) -> list[Datum]:
    "Sequences of random ids, in groups with a common prompt, the rest scored."
    rng = np.random.default_rng(0)
    rows = []
    for i in range(count):
        begin = rng.integers(2, vocab, prompt) if i % group == 0 else rows[-1].tokens[:prompt]
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


# --- parts that share one model ----------------------------------------------------------------------------------


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
    long_rows: int = 16
    long_prompt: int = 512
    long_tokens: int = 8192  # of a sequence, its prompt included
    steps: int = 3
    product: int = 8192  # rows of the matrix product that training is held against
    compiler: str = "inductor"  # of torch.compile
    vllm: str | None = None  # python of an environment with vLLM


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
    long_rows=4,
    long_prompt=16,
    long_tokens=96,
    steps=1,
    product=256,
    compiler="aot_eager",
)


@cache
def backend_of(plan: Plan) -> Backend:
    "Policy and sampler of the plan's shape; it stays for the parts that follow."
    shape = SHAPES[plan.shape]
    return Backend(shape.model(), shape.vocab, plan.device, plan.dtype, reference=False)


def release() -> None:
    "Forget the shared model, and give its memory back."
    if backend_of.cache_info().currsize:
        backend_of.cache_clear()
    give_back()


def give_back() -> None:
    "Give back memory that nothing uses."
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def seconds_of(run: Callable[[], Any], device: str) -> float:
    "Of one call, the device's work included."
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def timed(run: Callable[[], Any], plan: Plan) -> float:
    "Median seconds of the rounds after the first."
    return statistics.median([seconds_of(run, plan.device) for _ in range(plan.rounds + 1)][1:])


def peak_gb(run: Callable[[], Any], device: str) -> float | None:
    "GPU memory at the peak of a call, with all that was there before; None on a CPU."
    if device != "cuda":
        run()
        return None
    torch.cuda.reset_peak_memory_stats()
    run()
    synchronize(device)
    return torch.cuda.max_memory_allocated() / 1e9


def backward(side: Backend, datums: list[Datum]) -> Any:
    "Forward and backward of a batch, and nothing else accumulated."
    side.run(side.policy.discard_gradients())
    return side.run(side.policy.forward_backward_custom(datums, surrogate))


def distinct(plan: Plan) -> list[Datum]:
    "Sequences that share no prefix, scored everywhere."
    rng = np.random.default_rng(1)
    n = plan.train_tokens
    rows = [rng.integers(2, SHAPES[plan.shape].vocab, n + 1) for _ in range(plan.train_rows)]
    return [Datum(ids, np.ones(n), float(rng.normal())) for ids in rows]


def time_sampling(plan: Plan) -> list[dict[str, Any]]:
    "Tokens a second, next to the floor of reading weights and cache."
    side = backend_of(plan)
    shape = SHAPES[plan.shape]
    size = side.backend.size
    assert size is not None
    read = read_rate(2**29 if plan.device == "cuda" else size.nbytes, plan.device)
    results = []
    ids = np.random.default_rng(0).integers(2, shape.vocab, plan.prompt).tolist()
    for rows in plan.rows:
        columns = rows * (plan.prompt + plan.tokens / 2)
        kept = columns * shape.kv_weights * getattr(torch, plan.dtype).itemsize
        floor = plan.tokens * (size.nbytes + kept) / read
        seconds = timed(lambda r=rows: side.sample([ids], n=r, max_tokens=plan.tokens), plan)
        case = {"rows": rows, "seconds": seconds, "floor_seconds": floor, "read_bytes": read}
        results.append(
            case | {"tokens_per_s": rows * plan.tokens / seconds, "times_floor": seconds / floor}
        )
    return results


def training(plan: Plan) -> dict[str, Any]:
    "Forward, backward and update; each sequence is another one, so that no prefix is shared."
    side = backend_of(plan)
    datums = distinct(plan)
    size = side.backend.size
    assert size is not None
    passes = []
    updates = []

    def once() -> None:
        passes.append(seconds_of(lambda: backward(side, datums), plan.device))
        updates.append(seconds_of(lambda: side.run(side.policy.optim_step(ADAM)), plan.device))

    for _ in range(plan.rounds + 1):
        once()
    seconds = {"pass": statistics.median(passes[1:]), "update": statistics.median(updates[1:])}
    total = sum(seconds.values())
    tokens = plan.train_rows * plan.train_tokens
    rate = size.flops(tokens, tokens, backward=True) / total
    gemm = gemm_rate(size, plan.product)
    name = torch.cuda.get_device_name() if plan.device == "cuda" else ""
    vendor = next((rate for gpu, rate in VENDOR.items() if gpu in name), None)
    result: dict[str, Any] = {"tokens": tokens, "seconds": total, "seconds_of": seconds}
    result |= {
        "tokens_per_s": tokens / total,
        "flops_per_s": rate,
        "product_flops": gemm,
        "vendor_flops": vendor,
        "of_best_product": rate / gemm,
        "mfu": rate / vendor if vendor else None,
        "anchor_mfu": ANCHOR,
        "peak_gb": peak_gb(once, plan.device),
    }
    return result | {"operators": operators(once, plan.device)}


def operators(run: Callable[[], Any], device: str, most: int = 15) -> dict[str, Any]:
    "Milliseconds in all operators of a call, and those that take the most, by their own time on the device."
    from torch.profiler import ProfilerActivity, profile

    here = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    with profile(activities=here) as profiler:
        run()
        synchronize(device)
    kind = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    spent = [(getattr(e, kind) / 1e3, e.count, e.key) for e in profiler.key_averages()]
    spent.sort(reverse=True)
    rows = [{"ms": ms, "calls": calls, "name": name[:120]} for ms, calls, name in spent[:most]]
    return {"ms": sum(ms for ms, _, _ in spent), "most": rows}


def long(plan: Plan) -> dict[str, Any]:
    "A training step over one group of long completions: seconds and memory."
    side = backend_of(plan)
    new = plan.long_tokens - plan.long_prompt
    datums = made_up(
        SHAPES[plan.shape].vocab, plan.long_rows, plan.long_prompt, new, plan.long_rows
    )
    seconds = []

    def once() -> None:
        seconds.append(seconds_of(lambda: backward(side, datums), plan.device))
        side.run(side.policy.optim_step(ADAM))

    peak = peak_gb(once, plan.device)
    return {
        "rows": plan.long_rows,
        "tokens": plan.long_tokens,
        "seconds": seconds[0],
        "peak_gb": peak,
    }


# --- variants of a training pass ----------------------------------------------------------------------------------


def segments(tree: Any) -> list[tuple[int, int, np.ndarray]]:
    "Runs of tokens of a prefix tree, each with the places of all that its last token may attend to."
    positions = tree.positions[0].cpu().numpy()
    starts = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1), len(positions)]
    result = []
    for start, stop in pairwise(starts):
        column = positions[stop - 1]
        row = np.flatnonzero(tree.place[:, column] == stop - 1)[0]
        result.append((start, stop, tree.place[row, : column + 1]))
    return result


def attend_segments(q: Any, k: Any, v: Any, queries: list[int], keys: list[int], scale: Any) -> Any:
    "Causal attention of segments one after the other (T, heads, dim), by torch's kernel for them; plain on a CPU."
    if q.device.type == "cuda":
        from torch.nn.attention.varlen import varlen_attn

        def ends(lengths: list[int]) -> torch.Tensor:
            return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=q.device)

        # as many heads for keys, since not every version of torch takes fewer
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        causal = ends(queries), ends(keys), max(queries), max(keys)
        try:
            return varlen_attn(q, k, v, *causal, scale=scale, window_size=(-1, 0))
        except TypeError:  # torch 2.10 and 2.11
            return varlen_attn(q, k, v, *causal, is_causal=True, scale=scale)
    outputs = []
    for one, its_keys, its_values in zip(
        q.split(queries), k.split(keys), v.split(keys), strict=True
    ):
        shape = (len(one), len(its_keys))
        mask = torch.ones(shape, dtype=torch.bool).tril(shape[1] - shape[0])
        parts = (x.transpose(0, 1)[None] for x in (one, its_keys, its_values))
        out = F.scaled_dot_product_attention(*parts, attn_mask=mask, scale=scale, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


PREPARED: dict[int, tuple[list[int], list[int], torch.Tensor]] = {}


def packed_attention(
    module: Any, query: Any, key: Any, value: Any, mask: Any = None, scaling: Any = None, **_: Any
) -> tuple[torch.Tensor, None]:
    "`tree_attention` without padding and without masks: every token once as a query, each segment's keys behind each other."
    tree = module.config.prefix_tree
    if id(tree) not in PREPARED:
        parts = segments(tree)
        places = torch.from_numpy(np.concatenate([places for _, _, places in parts]))
        lengths = [stop - start for start, stop, _ in parts]
        PREPARED.clear()
        PREPARED[id(tree)] = (lengths, [len(x) for _, _, x in parts], places.to(query.device)[None])
    queries, keys, places = PREPARED[id(tree)]
    q = query[0].transpose(0, 1)
    k, v = (gathered(x, places)[0].transpose(0, 1) for x in (key, value))
    return attend_segments(q, k, v, queries, keys, scaling)[None], None


@contextmanager
def for_each(side: Backend, plan: Plan) -> Iterator[None]:
    "No common prefixes."
    causal = side.policy.state.scoring.causal
    before = causal.no_tree
    causal.no_tree = "switched off"
    try:
        yield
    finally:
        causal.no_tree = before


@contextmanager
def packed(side: Backend, plan: Plan) -> Iterator[None]:
    "Prefix trees without padding in attention."
    AttentionInterface.register(NAME, packed_attention)
    try:
        yield
    finally:
        AttentionInterface.register(NAME, tree_attention)


@contextmanager
def compiled(side: Backend, plan: Plan) -> Iterator[None]:
    "Each decoder layer compiled."
    layers = side.policy.state.scoring.causal.decoder.layers
    for layer in layers:
        layer.compile(backend=plan.compiler)
    try:
        yield
    finally:
        for layer in layers:
            layer._compiled_call_impl = None


def shortened(d: Datum, by: int) -> Datum:
    "The datum without its last tokens."
    n = len(d.tokens) - by
    return replace(d, tokens=d.tokens[:n], weights=d.weights[: n - 1])


def variants(plan: Plan) -> dict[str, Any]:
    "Forward and backward with one thing changed: seconds, memory, and how far logprobs are from those of the pass as it is."
    side = backend_of(plan)
    vocab = SHAPES[plan.shape].vocab
    even = made_up(vocab, 4 * plan.train_rows, plan.prompt, plan.tokens, group=8)
    ragged = [shortened(d, i % 8 * plan.tokens // 16) for i, d in enumerate(even)]
    batches = {"groups": ragged, "distinct": distinct(plan)}
    changes = {"groups": (for_each, packed), "distinct": (compiled,)}
    results: dict[str, Any] = {}
    for name, datums in batches.items():
        want = None
        for change in (None, *changes[name]):
            case = name if change is None else f"{name}, {change.__name__}"
            try:
                with nullcontext() if change is None else change(side, plan):
                    first = seconds_of(lambda d=datums: backward(side, d), plan.device)
                    got = [lp.values for lp in side.run(side.policy.forward(datums))]
                    want = got if change is None else want
                    results[case] = {
                        "first_seconds": first,
                        "seconds": timed(lambda d=datums: backward(side, d), plan),
                        "peak_gb": peak_gb(lambda d=datums: backward(side, d), plan.device),
                        "off": farthest(got, want),
                    }
            except TimeoutError as reason:
                return results | {case: {"failed": str(reason)}}
            except (RuntimeError, ImportError, AttributeError, TypeError, ValueError) as reason:
                results[case] = {"failed": f"{type(reason).__name__}: {reason}"[:500]}
    return results


# --- next to TRL and vLLM -----------------------------------------------------------------------------------------


def beside_trl(plan: Plan, progress: Callable[[str], None] = print) -> dict[str, Any] | None:
    "Whole steps in turns, None without TRL; raises `AssertionError` where the two sides did other work."
    if not find_spec("trl"):
        return None
    release()
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
    peaks = {n: max(s.peak_gb for s in r) for n, r in parts.items()}
    result = {"setting": asdict(setting), "seconds": median, "ratio": ratio, "tokens_per_s": rate}
    return result | {"peak_gb": peaks if plan.device == "cuda" else None}


def beside_vllm(plan: Plan) -> list[dict[str, Any]] | None:
    "Tokens a second of vLLM for the prompt and the rows of `sampling`; None where it is not installed."
    python = plan.vllm or (sys.executable if find_spec("vllm") else None)
    if python is None:
        return None
    release()
    shape = SHAPES[plan.shape]
    ids = np.random.default_rng(0).integers(2, shape.vocab, plan.prompt).tolist()
    asked = {
        "dtype": plan.dtype,
        "prompts": [ids],
        "counts": plan.rows,
        "tokens": plan.tokens,
        "rounds": plan.rounds,
    }
    seconds = samplers.run_vllm(python, asked, shape.model(), word_tokenizer(shape.vocab))
    return [
        {"rows": rows, "seconds": s, "tokens_per_s": rows * plan.tokens / s}
        for rows, s in zip(plan.rows, seconds, strict=True)
    ]


# --- all of it ---------------------------------------------------------------------------------------------------


def machine(device: str) -> dict[str, Any]:
    "What it ran on."
    result: dict[str, Any] = {
        "device": device,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
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
            "cuda": torch.version.cuda,
        }
    return result


def agreement_of(plan: Plan) -> dict[str, Any]:
    "`agreement` in both precisions."
    return {dtype: agreement(plan.device, dtype) for dtype in ("float32", "bfloat16")}


def attention_of(plan: Plan) -> dict[str, Any]:
    "`kernels` in both precisions."
    return {dtype: kernels(plan.device, dtype) for dtype in ("float32", "bfloat16")}


# seconds that a part may take, and the part
PARTS: dict[str, tuple[int, Callable[[Plan], Any]]] = {
    "agreement": (60, agreement_of),
    "attention": (10, attention_of),
    "training": (70, training),
    "long": (70, long),
    "step": (140, beside_trl),
    "sampling": (60, time_sampling),
    "variants": (90, variants),
    "vllm": (150, beside_vllm),
}


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    "Raises `TimeoutError` in the main thread after that many seconds."

    def stop(*_: Any) -> None:
        raise TimeoutError(f"stopped after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def measure(
    plan: Plan,
    parts: Sequence[str] = tuple(PARTS),
    minutes: float = 8.0,
    save: Callable[[dict[str, Any]], None] = lambda result: None,
    progress: Callable[[str], None] = print,
) -> dict[str, Any]:
    "The parts one after the other, as plain values; a part that fails or takes too long is noted as `failed`."
    end = time.monotonic() + 60 * minutes
    result: dict[str, Any] = {
        "plan": asdict(plan),
        "limits": LIMITS,
        "machine": machine(plan.device),
    }
    result["part_seconds"] = {}
    for name in parts:
        seconds, part = PARTS[name]
        start = time.monotonic()
        try:
            own = seconds if plan.device == "cuda" else end - start
            with limited(min(own, end - start)):
                result[name] = part(plan)
        except Exception as reason:  # the parts that follow have their own models
            result[name] = {"failed": f"{type(reason).__name__}: {reason}"[:2000]}
            release()
        give_back()
        result["part_seconds"][name] = time.monotonic() - start
        save(result)
        progress(f"{name} ({result['part_seconds'][name]:.0f} s)\n{shown(name, result[name])}")
    release()
    whole = result.get("agreement", {}).get("float32")
    result["agreed"] = whole is not None and all(whole[n] <= limit for n, limit in LIMITS.items())
    result["peak_memory_gb"] = peak_memory()
    save(result)
    return result


def shown(name: str, value: Any) -> str:
    "A part in a few lines."
    if value is None:
        return "not installed, so it was not run"
    if "failed" in value:
        return f"failed: {value['failed']}"
    return SHOW[name](value)


def show_agreement(value: dict[str, Any]) -> str:
    "The gaps, and whether they are within the limits."
    names = (*LIMITS, "same_samples_as_cpu")
    lines = [f"{'':<10}" + "".join(f"{name:>21}" for name in names)]
    lines += [f"{d:<10}" + "".join(f"{gaps[n]:>21.1e}" for n in names) for d, gaps in value.items()]
    agrees = all(value["float32"][name] <= limit for name, limit in LIMITS.items())
    return "\n".join([*lines, f"float32 {'agrees' if agrees else 'DISAGREES'} with the CPU's"])


def show_attention(value: dict[str, Any]) -> str:
    "Kernels by precision."
    return "\n".join(
        f"{d}: " + ", ".join(f"{n} {k}" for n, k in v.items()) for d, v in value.items()
    )


def show_training(value: dict[str, Any]) -> str:
    "Speed, and what takes the time."
    parts = value["seconds_of"]
    mfu = "no vendor's figure is known here"
    if value["mfu"] is not None:
        mfu = f"MFU {value['mfu']:.1%} (for scale {ANCHOR:.1%})"
    peak = "" if value["peak_gb"] is None else f", {value['peak_gb']:.1f} GB at the peak"
    lines = [
        f"{value['tokens_per_s']:.0f} tokens/s, {value['of_best_product']:.1%} of the best product, {mfu}{peak}",
        f"pass {parts['pass']:.3f} s, update {parts['update']:.3f} s; in operators {value['operators']['ms']:.0f} ms",
    ]
    rows = value["operators"]["most"]
    return "\n".join([*lines, *(f"{r['ms']:>9.1f} ms {r['calls']:>6}  {r['name']}" for r in rows)])


def show_long(value: dict[str, Any]) -> str:
    "Memory of long sequences."
    peak = "" if value["peak_gb"] is None else f", {value['peak_gb']:.1f} GB at the peak"
    return f"{value['rows']} sequences of {value['tokens']} tokens: {value['seconds']:.2f} s{peak}"


def show_sampling(value: list[dict[str, Any]]) -> str:
    "Tokens a second by rows."
    lines = [f"{'rows':>6}{'tokens/s':>11}{'/ floor':>9}"]
    for case in value:
        times = f"{case['times_floor']:>9.1f}" if "times_floor" in case else ""
        lines.append(f"{case['rows']:>6}{case['tokens_per_s']:>11.0f}{times}")
    return "\n".join(lines)


def show_variants(value: dict[str, Any]) -> str:
    "Seconds by variant."
    lines = [f"{'':<22}{'seconds':>9}{'first':>9}{'off':>10}{'GB':>7}"]
    for name, case in value.items():
        if "failed" in case:
            lines.append(f"{name:<22}  failed: {case['failed'][:100]}")
            continue
        peak = "" if case["peak_gb"] is None else f"{case['peak_gb']:>7.1f}"
        lines.append(
            f"{name:<22}{case['seconds']:>9.3f}{case['first_seconds']:>9.2f}{case['off']:>10.1e}{peak}"
        )
    return "\n".join(lines)


def show_step(value: dict[str, Any]) -> str:
    "Steps next to TRL."
    lines = [f"{'seconds':<10}{'ours':>9}{'TRL':>9}{'TRL/ours':>10}"]
    sides = value["seconds"]
    for part, ratio in value["ratio"].items():
        ours, trl = (sides[side][part] for side in ("ours", "trl"))
        lines.append(f"{part:<10}{ours:>9.3f}{trl:>9.3f}{ratio:>10.2f}")
    if value["peak_gb"]:
        lines.append(
            f"{'peak GB':<10}{value['peak_gb']['ours']:>9.1f}{value['peak_gb']['trl']:>9.1f}"
        )
    return "\n".join(lines)


SHOW: dict[str, Callable[[Any], str]] = {
    "agreement": show_agreement,
    "attention": show_attention,
    "training": show_training,
    "long": show_long,
    "step": show_step,
    "sampling": show_sampling,
    "variants": show_variants,
    "vllm": show_sampling,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: a tiny shape, to try the script",
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=8.0, help="for all parts together")
    parser.add_argument(
        "--rows", nargs="+", type=int, help="completions at once, for sampling alone"
    )
    parser.add_argument("--tokens", type=int, help="of a completion")
    parser.add_argument("--steps", type=int, help="measured steps next to TRL")
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment with vLLM")
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "--device: got cuda, but torch sees no GPU; `--device cpu` tries the script on a tiny shape"
        )
    transformers_logging.disable_progress_bar()
    names = ("tokens", "steps", "vllm")
    chosen: dict[str, Any] = {k: v for k in names if (v := getattr(args, k)) is not None}
    if args.rows:
        chosen |= {"rows": tuple(args.rows)}

    def save(result: dict[str, Any]) -> None:
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")

    plan = replace(TINY if args.device == "cpu" else Plan(), **chosen)
    result = measure(plan, args.parts, args.minutes, save)
    if args.device == "cpu":
        print("This was a CPU: the script works, its figures mean nothing.")
    sys.exit(0 if result["agreed"] or "agreement" not in args.parts else 1)


if __name__ == "__main__":
    main()
