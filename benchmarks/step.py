"""One GRPO step of ours next to one of TRL's `GRPOTrainer`, and both next to what the machine could do at best.

    python benchmarks/step.py --setting tiny --json FILE
    python benchmarks/step.py --setting smollm2 --json FILE
    python benchmarks/step.py --setting gsm8k --json FILE       # SmolLM2 again, with word problems for prompts
    python benchmarks/step.py --setting gsm8k --dtype bfloat16 --json FILE
    python benchmarks/step.py --setting sums --json FILE        # the step of examples/small_model/sums.yaml
    python benchmarks/step.py --setting tiny --profile          # where our time goes

TRL trains; each time it has finished a step, a callback runs one of ours. Both start from the same weights, are given
the same prompts in the same order, sample the same number of completions of exactly the same length, grade them with the
same function and update with the same loss and optimizer. Every figure is the median over the steps after the first.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import inspect
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from zlib import crc32

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)
from transformers.utils import logging as transformers_logging

from roofline import gemm_rate, read_rate, threads

from examples.small_model import sums
from rl_notebook.backends.local.trainer import open_local
from rl_notebook.config.config import Config
from rl_notebook.task.data import load_rows
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.runs.records import StepRecord
from rl_notebook.backends.work import ModelSize, model_size, peak_memory
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_rows

PARTS = ("sampling", "scoring", "training", "total")
MEASURES = (*PARTS, "cpu")


@dataclass(frozen=True)
class Setting:
    "What both sides are asked to do."

    model: str  # for `load_model`
    prompts: int = 4  # in a step
    completions: int = 8  # of each prompt
    tokens: int = 64  # of each completion
    kl_beta: float = 0.001  # 0 = no reference model on either side
    steps: int = 20  # measured ones; one more comes before them
    learning_rate: float = 1e-6
    weight_decay: float = 0.01
    # "toy": short sums; "gsm8k": word problems of about 100 tokens; "sums": of examples/small_model
    task: str = "toy"
    words: int = 0  # prompts of n made-up words instead
    lora_rank: int = 0  # 0 = all weights are trained
    batch: int = 0  # completions of one forward and backward pass; 0 = all of the step
    device: str = "cpu"
    # of ours; "bfloat16" keeps float32 masters, and TRL's side runs under autocast
    dtype: str = "float32"

    @property
    def rows(self) -> int:
        "Completions of one step."
        return self.prompts * self.completions

    @property
    def rows_at_once(self) -> int:
        "Completions of one forward and backward pass."
        return self.batch or self.rows


SETTINGS = {
    "tiny": Setting("tiny"),
    "smollm2": Setting("smollm2", tokens=32, steps=3),
    "gsm8k": Setting("smollm2", tokens=96, steps=3, task="gsm8k"),
    "sums": Setting(
        "smollm2",
        prompts=8,
        tokens=33,  # a completion's mean length at the end of the run
        kl_beta=0.0,
        steps=3,
        learning_rate=2e-4,
        task="sums",
        lora_rank=16,
        batch=16,
    ),
    "hybrid": Setting("hybrid", tokens=32, steps=3),
}
PROBLEMS = ROOT / "examples" / "gsm8k" / "sample.jsonl"
SHOWN_ONCE = """Work out the answer in one line, then give it after ####.

Question: A pen costs 2 dollars. How much do 3 pens cost?
Answer: 3 * 2 = 6
#### 6"""


def arbitrary_reward(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    "A grade that differs between any two texts, so that no group is left out; both sides call this function."
    return [crc32(c[0]["content"].encode()) / 2**32 for c in completions]


def conversations(setting: Setting) -> list[list[dict[str, str]]]:
    "The prompts of all steps, in order."
    needed = setting.prompts * (setting.steps + 1)
    if setting.words:
        rng = np.random.default_rng(0)
        texts = [
            " ".join(f"w{i}" for i in rng.integers(10, 250, setting.words)) for _ in range(needed)
        ]
        return [[{"role": "user", "content": text}] for text in texts]
    if setting.task == "sums":
        return [row["messages"] for row in sums.rows()[:needed]]
    if setting.task == "gsm8k":
        return [
            list(row.messages)
            for row in load_rows(PROBLEMS, max_rows=needed, system_prompt=SHOWN_ONCE)
        ]
    return [[{"role": "user", "content": row["question"]}] for row in toy_rows(needed)]


# --- the model that both sides load ------------------------------------------------------------------------------


def hybrid() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    "A Qwen3.5 of 7 million random weights, three of four layers with linear attention, and the tokenizer of `tiny`."
    _, tokenizer = load_model("tiny")
    torch.manual_seed(0)
    heads = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "tie_word_embeddings": False,
    }
    linear = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 8,
    }
    linear |= {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "max_position_embeddings": 1024,
    }
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, **heads, **linear)).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(
            30
        )  # sharp, so that a token whose logit is always 0 is not sampled
        model.lm_head.weight[-1] = 0
    return model, tokenizer


def save_endless(name: str, folder: str) -> None:
    "Save a model that ends a sequence with the token it is least likely to sample: completions run to the limit."
    model, tokenizer = hybrid() if name == "hybrid" else load_model(name)
    ids = tokenizer.apply_chat_template(
        conversations(Setting(name))[:4], add_generation_prompt=True, padding=True
    )
    with torch.no_grad():
        likely = model(**ids.convert_to_tensors("pt")).logits.log_softmax(-1).amax((0, 1))
    likely[tokenizer.pad_token_id] = torch.inf
    rarest = int(likely[: len(tokenizer)].argmin())
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(rarest)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# --- measured steps ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    "One step of one side."

    total: float  # seconds, like the next three
    cpu: float  # of all cores together: on a shared machine steadier than the time that passed
    # prompts to tokens to text; with ours, also the copy of the weights to the sampler
    sampling: float
    scoring: float  # rewards, advantages, reference logprobs, batches
    prompts: tuple[tuple[int, ...], ...]  # ids
    lengths: tuple[int, ...]  # tokens of each completion that was trained on
    # through the policy or the reference over whole sequences, one of them with gradient
    passes: int
    weights: float  # sum of the absolute values of the weights after the step
    peak_gb: float = 0.0  # GPU memory of this side so far, at its peak; 0 on a CPU

    @property
    def training(self) -> float:
        "Seconds of forward, backward, update and the rest."
        return self.total - self.sampling - self.scoring


def size_of(model: torch.nn.Module) -> float:
    "Sum of the absolute values of all weights, in float64."
    with torch.no_grad():
        return sum(p.abs().sum(dtype=torch.float64).item() for p in model.parameters())


class Ours:
    "Our loop, one step at a time."

    SAMPLING = ("prompts", "sample", "sync")
    SCORING = ("score", "advantages", "datums", "reference")

    def __init__(
        self, setting: Setting, folder: str, inline: bool = False
    ):  # inline: no worker thread
        model, tokenizer = load_model(folder)
        options: Any = {"device": setting.device, "dtype": setting.dtype}
        backend = open_local(
            model,
            tokenizer,
            reference=setting.kl_beta > 0,
            lora_rank=setting.lora_rank,
            inline=inline,
            **options,
        )
        self.model = backend.policy.state.module  # with the adapter, where there is one
        # not the template's, too
        ends = frozenset() if setting.words else frozenset({tokenizer.eos_token_id})
        backend.sampler.engine.eos_token_ids = ends  # type: ignore[attr-defined]
        rows = [{"messages": messages, "answer": ""} for messages in conversations(setting)]
        self.loop = GRPOLoop(backend, rows, arbitrary_reward, config_of(setting), keep_undo=0)
        self.runner = asyncio.Runner()

    def step(self) -> Step:
        start = now()
        record = self.runner.run(self.loop.step())
        total, cpu = (b - a for a, b in zip(start, now(), strict=True))
        assert isinstance(record, StepRecord)
        spent = [
            sum(record.seconds.get(p, 0.0) for p in phases)
            for phases in (self.SAMPLING, self.SCORING)
        ]
        prompts = tuple(
            tuple(s.tokens[: s.prompt_len].tolist()) for s, *_ in (g.samples for g in record.groups)
        )
        lengths = tuple(d.num_loss_tokens for d in record.datums)
        batches = -(-len(lengths) // self.loop.cfg.max_samples_per_fwd_bwd)
        passes = batches + (self.loop.backend.reference is not None)
        return Step(total, cpu, *spent, prompts, lengths, passes, size_of(self.model))

    def close(self) -> None:
        self.runner.run(self.loop.backend.close())
        self.runner.close()


def config_of(setting: Setting) -> Config:
    "Our settings, spelled out where TRL's defaults are others."
    return Config(
        completions_per_prompt=setting.completions,
        prompt_groups_per_step=setting.prompts,
        max_completion_tokens=setting.tokens,
        max_samples_per_fwd_bwd=setting.rows_at_once,
        lora_rank=setting.lora_rank,
        policy_loss="ppo",
        kl_beta=setting.kl_beta,
        kl_bias_correction=setting.kl_beta > 0,
        aggregation="token_mean",
        learning_rate=setting.learning_rate,
        weight_decay=setting.weight_decay,
        grad_clip_norm=1.0,
        max_rows=None,
        shuffle=False,
    )


# --- TRL ---------------------------------------------------------------------------------------------------------


@dataclass
class Stopwatch:
    "What is noted while TRL works."

    seconds: dict[str, float] = field(default_factory=dict)  # by method
    passes: int = 0
    prompts: tuple = ()
    lengths: tuple = ()
    # clock and processor time when the step in progress began
    started: tuple[float, float] | None = None

    def wrap(
        self, trainer: Any, name: str, note: Callable[[Any], None] = lambda result: None
    ) -> None:
        "Time a method of `trainer`, and look at its results."
        method = getattr(trainer, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = now()[0]
            result = method(*args, **kwargs)
            self.seconds[name] = self.seconds.get(name, 0.0) + now()[0] - start
            note(result)
            return result

        setattr(trainer, name, timed)

    def note_generated(self, generated: tuple) -> None:
        "Keep the prompts and the lengths of the completions, the first two of what `_generate` returns."
        self.prompts = tuple(map(tuple, generated[0]))
        self.lengths = tuple(map(len, generated[1]))

    def note_pass(self, _: Any) -> None:
        "Count a pass over whole sequences."
        self.passes += 1


@dataclass
class SideMemory:
    "GPU memory of one of two sides that take turns in one process."

    held: int = 0  # bytes after its last turn
    peak: int = 0
    before: int = 0  # of both sides, when its turn began

    def begin(self) -> None:
        "A turn begins."
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()

    def end(self) -> float:
        "A turn ends; returns the peak so far in GB."
        if torch.cuda.is_available():
            highest = self.held + torch.cuda.max_memory_allocated() - self.before
            self.peak = max(self.peak, highest)
            self.held += torch.cuda.memory_allocated() - self.before
        return self.peak / 1e9


def trl_config(setting: Setting, folder: str) -> Any:
    "TRL's settings, spelled out where ours are others; what costs it time and we do not do is off."
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=folder,
        use_cpu=setting.device == "cpu",
        bf16=setting.dtype == "bfloat16",  # autocast, over weights in float32
        generation_kwargs={"min_new_tokens": setting.tokens} if setting.words else None,
        gradient_checkpointing=False,  # on by default: less memory, one more forward pass
        per_device_train_batch_size=setting.rows_at_once,
        gradient_accumulation_steps=setting.rows // setting.rows_at_once,
        num_generations=setting.completions,
        max_completion_length=setting.tokens,
        max_steps=setting.steps + 1,
        shuffle_dataset=False,
        temperature=1.0,
        top_k=0,
        beta=setting.kl_beta,
        loss_type="dapo",
        scale_rewards="group",
        learning_rate=setting.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=setting.weight_decay,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        save_strategy="no",
        report_to="none",
        logging_strategy="no",
        disable_tqdm=True,
    )


def alternate(
    setting: Setting, folder: str, progress: Callable[[str], None]
) -> tuple[list[Step], list[Step]]:
    "All steps of ours and of TRL's, in turn; the first of each is for warming up."
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOTrainer

    adapter = None
    if rank := setting.lora_rank:
        alpha = config_of(setting).lora_alpha
        adapter = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear")
    ours = []
    theirs = []
    watch = Stopwatch()
    mine = SideMemory()
    mine.begin()
    side = Ours(setting, folder)
    mine.end()
    other = SideMemory()
    other.begin()

    class TakeTurns(TrainerCallback):
        "Ends TRL's step, runs ours, starts TRL's next one."

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            watch.started = watch.started or now()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            step = finish_step(watch, now(), trainer.model)
            give_back_memory()
            theirs.append(replace(step, peak_gb=other.end()))
            mine.begin()
            step = side.step()
            give_back_memory()
            ours.append(replace(step, peak_gb=mine.end()))
            other.begin()
            progress(f"step {len(ours)}: ours {ours[-1].total:.2f} s, TRL {theirs[-1].total:.2f} s")
            watch.started = now()

    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = GRPOTrainer(
            model=folder,
            args=trl_config(setting, scratch),
            reward_funcs=arbitrary_reward,
            train_dataset=Dataset.from_list(
                [{"prompt": messages} for messages in conversations(setting)]
            ),
            peft_config=adapter,
            callbacks=[TakeTurns()],
        )
        trainer.remove_callback(PrinterCallback)
        assert trainer.model.dtype == torch.float32
        assert str(side.model.dtype) == f"torch.{setting.dtype}"
        watch.wrap(trainer, "_generate", watch.note_generated)
        watch.wrap(trainer, "_generate_and_score_completions")
        watch.wrap(trainer, "_get_per_token_logps_and_entropies", watch.note_pass)
        trainer.train()
    side.close()
    return ours, theirs


def give_back_memory() -> None:
    "Free what one side keeps for its next step: with SmolLM2 both would hold half of 24 GB."
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc
        trim(0)


def now() -> tuple[float, float]:
    "Clock and processor time, once a GPU is done with what it was given."
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


def finish_step(watch: Stopwatch, end: tuple[float, float], model: torch.nn.Module) -> Step:
    "The step that just ended, and a clean stopwatch."
    sampling = watch.seconds["_generate"]
    scoring = watch.seconds["_generate_and_score_completions"] - sampling
    assert watch.started is not None
    total, cpu = (b - a for a, b in zip(watch.started, end, strict=True))
    passes = watch.passes
    watch.seconds = {}
    watch.passes = 0
    return Step(total, cpu, sampling, scoring, watch.prompts, watch.lengths, passes, size_of(model))


def check_same_work(setting: Setting, ours: list[Step], theirs: list[Step]) -> None:
    "Raises `AssertionError` unless both sides did what they were asked, and the same."
    assert len(ours) == len(theirs) == setting.steps + 1, f"{len(ours)} and {len(theirs)} steps"
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True), 1):
        asked = (setting.tokens,) * setting.rows
        for side, lengths in (("ours", a.lengths), ("TRL", b.lengths)):
            assert lengths == asked, (
                f"step {number}, {side}: {len(lengths)} completions of {sorted(set(lengths))} tokens"
            )
        repeated = tuple(p for p in a.prompts for _ in range(setting.completions))
        assert repeated == b.prompts, f"step {number}: the prompts differ"
        assert a.passes == b.passes, f"step {number}: {a.passes} passes against {b.passes}"
    for side, steps in (("ours", ours), ("TRL", theirs)):
        assert len({s.weights for s in steps}) == len(steps), (
            f"{side}: a step left the weights as they were"
        )


# --- floors ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    "What one step has to do, in the plainest form."

    body: int  # weights that every token is multiplied with
    head: int  # weights of the output embedding
    prompt_tokens: int  # of the prompts of a step, each counted once per completion
    completion_tokens: int
    decode_steps: int  # passes over the weights to sample the completions, all rows together
    trained: bool = True  # whether the weights have gradients; False with an adapter, whose own work is not counted

    def flops(self) -> dict[str, float]:
        "Multiplications and additions of the matrix products alone: attention and everything elementwise is free."
        forward = 2.0 * (
            self.body * (self.prompt_tokens + self.completion_tokens)
            + self.head * self.completion_tokens
        )
        training = (3 if self.trained else 2) * forward
        return {"sampling": forward, "scoring": forward, "training": training}


def work_of(setting: Setting, size: ModelSize | None, steps: list[Step]) -> Work:
    "The work of the measured steps, on average."
    prompts = statistics.mean(sum(map(len, s.prompts)) for s in steps) * setting.completions
    body, head = (size.body, size.head) if size else (0, 0)
    completions = setting.rows * setting.tokens
    trained = setting.lora_rank == 0
    return Work(body, head, round(prompts), completions, setting.tokens, trained)


@dataclass(frozen=True)
class Floors:
    "Seconds below which this machine cannot come, by part."

    flops: dict[str, float]  # matrix products at the measured rates
    weights: float  # reading the weights for every decoded token
    rates: dict[str, float]  # what was measured

    @property
    def seconds(self) -> dict[str, float]:
        "The higher of the two for sampling, the products for the rest, and their sum."
        parts = self.flops | {"sampling": max(self.flops["sampling"], self.weights)}
        return parts | {"total": sum(parts.values())}


def floors_of(setting: Setting, work: Work, size: ModelSize) -> Floors:
    "Measure the machine at the rows of this setting, and divide."
    most = torch.get_num_threads()
    few, many = (
        gemm_rate(size, rows, seconds=0.5, max_threads=most)
        for rows in (setting.rows, work.prompt_tokens + work.completion_tokens)
    )
    read = read_rate(size.nbytes, seconds=2.0, max_threads=most)
    flops = work.flops() if setting.kl_beta else work.flops() | {"scoring": 0.0}
    rate = {"sampling": max(few, many), "scoring": many, "training": many}
    rates = {
        "gemm_rows": setting.rows,
        "gemm_few_rows_flops": few,
        "gemm_many_rows_flops": many,
        "read_bytes": read,
    }
    return Floors(
        {part: flops[part] / rate[part] for part in flops},
        size.nbytes * work.decode_steps / read,
        rates,
    )


# --- results -----------------------------------------------------------------------------------------------------


def median_and_range(values: list[float]) -> dict[str, float]:
    "Median and range."
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summary(
    setting: Setting, ours: list[Step], theirs: list[Step], work: Work, floors: Floors
) -> dict[str, Any]:
    "Everything that was measured, as plain values; the first step of each side is left out."
    sides = {"ours": ours[1:], "trl": theirs[1:]}
    seconds = {
        s: {m: median_and_range([getattr(x, m) for x in steps]) for m in MEASURES}
        for s, steps in sides.items()
    }
    ratio = {m: seconds["trl"][m]["median"] / seconds["ours"][m]["median"] for m in MEASURES}
    floor = floors.seconds
    return {
        "setting": asdict(setting),
        "machine": machine(),
        "seconds": seconds,
        "ratio": ratio,  # of medians: how many times as long TRL takes
        "ratio_of_neighbours": median_and_range(
            [b.total / a.total for a, b in zip(*sides.values(), strict=True)]
        ),
        "floors": {
            "seconds": floor,
            "flops_seconds": floors.flops,
            "weights_seconds": floors.weights,
        }
        | floors.rates,
        "times_floor": {
            s: {p: seconds[s][p]["median"] / floor[p] for p in PARTS if floor[p]} for s in sides
        },
        "work": asdict(work) | {"passes_over_sequences": ours[1].passes},
        "steps": {
            s: [{m: getattr(x, m) for m in MEASURES} for x in steps] for s, steps in sides.items()
        },
    }


def machine() -> dict[str, Any]:
    "What it ran on, how busy that was, and the most memory that both sides together took."
    import transformers
    import trl

    versions = {m.__name__: m.__version__ for m in (torch, transformers, trl)}
    where = {
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }
    used = {"load": os.getloadavg()[0], "peak_memory_gb": peak_memory()["process"]}
    return where | used | {"python": platform.python_version()} | versions


def table(result: dict[str, Any]) -> str:
    "Medians, ratio and floor, one line per part."
    seconds = result["seconds"]
    ratio = result["ratio"]
    floor = result["floors"]["seconds"]
    lines = [
        f"{'seconds per step':<18}{'ours':>9}{'TRL':>9}{'TRL/ours':>10}{'floor':>10}{'ours/floor':>12}"
    ]
    for part in PARTS:
        a, b = (seconds[side][part]["median"] for side in ("ours", "trl"))
        times = f"{a / floor[part]:>12.1f}" if floor[part] else f"{'':>12}"
        lines.append(f"{part:<18}{a:>9.3f}{b:>9.3f}{ratio[part]:>10.2f}{floor[part]:>10.4f}{times}")
    a, b = (seconds[side]["cpu"]["median"] for side in ("ours", "trl"))
    lines.append(f"{'processor time':<18}{a:>9.3f}{b:>9.3f}{ratio['cpu']:>10.2f}")
    near = result["ratio_of_neighbours"]
    where = result["machine"]
    setting = result["setting"]
    sampled = setting["prompts"] * setting["completions"] * setting["tokens"]
    return "\n".join(
        [
            *lines,
            f"step by step, TRL/ours is {near['min']:.2f} to {near['max']:.2f}, median {near['median']:.2f}",
            f"{setting['model']}: {sampled} tokens sampled and trained on per step, {setting['steps']} steps, "
            f"KL {setting['kl_beta']:g}, {setting['dtype']}, {where['threads']} threads, load {where['load']:.1f}, "
            f"{where['peak_memory_gb']:.1f} GB at the peak",
        ]
    )


def run(setting: Setting, progress: Callable[[str], None] = print) -> dict[str, Any]:
    "Measure one setting."
    with tempfile.TemporaryDirectory() as folder:
        save_endless(setting.model, folder)
        ours, theirs = alternate(setting, folder, progress)
        check_same_work(setting, ours, theirs)
        model, _ = load_model(folder, dtype=setting.dtype)
        size = model_size(model)
    work = work_of(setting, size, ours[1:])
    # of layers with states no floor is known
    nothing = Floors(dict.fromkeys(work.flops(), 0.0), 0.0, {})
    return summary(setting, ours, theirs, work, floors_of(setting, work, size) if size else nothing)


async def run_phase(loop: GRPOLoop, phase: str) -> None:
    "One phase, awaited where it has to be."
    result = getattr(loop, phase)()
    if inspect.isawaitable(result):
        await result


def profile(setting: Setting, rows: int = 12) -> str:
    "The operators of each phase of a step of ours, the second one, by their own processor time."
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    with tempfile.TemporaryDirectory() as folder:
        save_endless(setting.model, folder)
        side = Ours(setting, folder, inline=True)
    side.step()
    lines = []
    for phase in (
        "prompts",
        "sample",
        "score",
        "advantages",
        "datums",
        "reference",
        "backward",
        "optimize",
        "sync",
    ):
        with profiled(activities=[ProfilerActivity.CPU]) as profiler:
            side.runner.run(run_phase(side.loop, phase))
        results = sorted(profiler.key_averages(), key=lambda e: -e.self_cpu_time_total)[:rows]
        total = sum(e.self_cpu_time_total for e in profiler.key_averages()) / 1e3
        if total > 1:
            lines.append(f"{phase}: {total:.0f} ms in operators")
        slow_operators = [
            (e.key, e.count, e.self_cpu_time_total / 1e3)
            for e in results
            if e.self_cpu_time_total > 10 * total
        ]
        lines += [
            f"  {ms:>9.1f} ms {ms / total:>5.0%} {count:>7}  {name}"
            for name, count, ms in slow_operators
            if total > 1
        ]
    side.close()
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--setting", choices=SETTINGS, default="tiny")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--steps", type=int, help="measured steps")
    parser.add_argument("--tokens", type=int, help="tokens of a completion")
    parser.add_argument("--kl-beta", type=float, help="0 = no reference model on either side")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="on both sides; TRL's under autocast"
    )
    parser.add_argument(
        "--profile", action="store_true", help="the operators of each phase of ours, and no more"
    )
    parser.add_argument("--threads", type=int, help="of torch; default: its own choice")
    args = parser.parse_args()
    transformers_logging.disable_progress_bar()
    settings = {
        k: v for k in ("steps", "tokens", "kl_beta", "dtype") if (v := getattr(args, k)) is not None
    }
    with threads(args.threads):
        if args.profile:
            print(profile(replace(SETTINGS[args.setting], **settings)))
            return
        result = run(replace(SETTINGS[args.setting], **settings))
    print(table(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
