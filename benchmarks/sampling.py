"""Completions sampled by our engine, next to transformers' `generate` on the same weights, and the machine at its best.

    python benchmarks/sampling.py --model tiny --json FILE
    python benchmarks/sampling.py --model smollm2 --json FILE
    python benchmarks/sampling.py --model smollm2 --vllm /path/to/python    # of an environment with vLLM's CPU build

Both sides begin with conversations and end with texts, and sample in turns in one process: 8 completions of each prompt,
temperature 1, nothing cut off, all of exactly the same length. Ours also returns the logprob of every token. Figures
are medians of the rounds after the first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch
from roofline import gemm_rate, read_rate, threads

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.core.types import SampleParams
from rl_notebook.task.data import Row, load_rows
from rl_notebook.backends.work import ModelSize
from rl_notebook.loop.rollouts import encode_rows
from rl_notebook.loop.step import sample_group
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_rows

COMPLETIONS = 8  # of each prompt
TOKENS = {"tiny": 64, "smollm2": 32}  # of a completion
THREADS = {"tiny": 1, "smollm2": None}  # of torch, for both sides; None = all


@dataclass(frozen=True)
class Case:
    "What both sides are asked to sample."

    model: str
    dtype: str
    rows: int  # completions at once
    tokens: int  # of each
    rounds: int = 5  # measured ones; one more comes before them

    @property
    def questions(self) -> list[Row]:
        "The prompts."
        return load_rows(toy_rows(self.rows // COMPLETIONS, seed=1))


@dataclass
class Sampled:
    "One round of one side."

    seconds: float
    cpu: float  # processor time of all threads
    lengths: set[int]
    # seconds of ours inside the engine: prefill, decode steps, text of what has ended
    engine: float = 0.0
    completions: Sequence[Any] = ()


class Ours:
    "The local backend, as a step samples from it."

    def __init__(self, case: Case, model: Any, tokenizer: Any):
        self.case = case
        self.tokenizer = tokenizer
        self.backend = open_local(model, tokenizer, reference=False, device="cpu", dtype=case.dtype)  # type: ignore
        self.engine: Any = self.backend.sampler.engine  # type: ignore[attr-defined]
        self.engine.eos_token_ids = frozenset()
        self.runner = asyncio.Runner()

    def sample(self, seed: int) -> Sampled:
        "Conversations to completions."
        before = self.engine.meter.work.get("sampling")
        start = now()
        result = self.runner.run(self._sample(seed))
        seconds, cpu = (b - a for a, b in zip(start, now(), strict=True))
        engine = self.engine.meter.work["sampling"].seconds - (before.seconds if before else 0.0)
        return Sampled(seconds, cpu, {s.completion_len for s in result}, engine, result)

    async def _sample(self, seed: int) -> list[Any]:
        prompts = encode_rows(self.case.questions, self.tokenizer)
        params = SampleParams(n=COMPLETIONS, max_tokens=self.case.tokens, seed=seed)
        sampled = await asyncio.gather(
            *(sample_group(p, self.backend.sampler, params) for p in prompts)
        )
        return [s for rollouts in sampled for s in rollouts.samples]

    def close(self) -> None:
        self.runner.run(self.backend.close())
        self.runner.close()


class Generate:
    "Transformers' own loop, with its usual cache."

    def __init__(self, case: Case, model: Any, tokenizer: Any):
        self.case = case
        self.model = model
        self.tokenizer = tokenizer
        tokenizer.padding_side = "left"
        for config in (model.config, model.generation_config):
            config.eos_token_id = None

    def sample(self, seed: int) -> Sampled:
        "Conversations to texts."
        start = now()
        torch.manual_seed(seed)
        conversations = [
            list(row.messages) for row in self.case.questions for _ in range(COMPLETIONS)
        ]
        options: dict[str, Any] = {
            "add_generation_prompt": True,
            "padding": True,
            "return_tensors": "pt",
        }
        ids = self.tokenizer.apply_chat_template(conversations, return_dict=True, **options)
        options = {
            "do_sample": True,
            "top_k": 0,
            "top_p": 1.0,
            "temperature": 1.0,
            "max_new_tokens": self.case.tokens,
        }
        result = self.model.generate(**ids, **options)[:, ids["input_ids"].shape[1] :]
        self.tokenizer.batch_decode(result, skip_special_tokens=True)
        return Sampled(*(b - a for a, b in zip(start, now(), strict=True)), {result.shape[1]})


def now() -> tuple[float, float]:
    "Clock and processor time."
    return time.perf_counter(), time.process_time()


# --- how far the sampler is from the trainer ---------------------------------------------------------------------


def mismatch(model: Any, samples: Sequence[Any]) -> dict[str, float]:
    "Mean and largest gap in nats between the sampler and the model's own forward pass, and between that and float32."
    scored, exact = (model_logprobs(m, samples) for m in (model, copy_in_float32(model)))
    sampled = torch.tensor(
        [lp for s in samples for lp in s.logprobs[s.prompt_len :]], dtype=torch.float64
    )
    gaps = {
        "sampler_to_model": (sampled - scored).abs(),
        "model_to_float32": (scored - exact).abs(),
    }
    gaps["sampler_to_float32"] = (sampled - exact).abs()
    return {
        f"{name}_{statistic}": float(getattr(gap, statistic)())
        for name, gap in gaps.items()
        for statistic in ("mean", "max")
    }


def copy_in_float32(model: Any) -> Any:
    "The same weights, computed in float32."
    copy = type(model)(model.config).float().eval()
    copy.load_state_dict(model.state_dict())
    return copy


@torch.no_grad()
def model_logprobs(model: Any, samples: Sequence[Any]) -> torch.Tensor:
    "Logprobs of the completions' tokens, sample after sample, by the model's own forward pass."
    results = []
    for s in samples:
        ids = torch.tensor(s.tokens)[None]
        logprobs = (
            model(input_ids=ids, use_cache=False)
            .logits[0, s.prompt_len - 1 : -1]
            .float()
            .log_softmax(-1)
        )
        results.append(logprobs.gather(-1, ids[0, s.prompt_len :, None])[:, 0].double())
    return torch.cat(results)


# --- vLLM --------------------------------------------------------------------------------------------------------

VLLM = """
import json, sys, time
from vllm import LLM, SamplingParams

asked = json.load(sys.stdin)
model = LLM(asked["folder"], dtype=asked["dtype"], max_model_len=512, enable_prefix_caching=True)
prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
times = []
for n in asked["counts"]:
    times.append([])
    for seed in range(asked["rounds"] + 1):
        options = {"n": n, "max_tokens": asked["tokens"], "temperature": 1.0, "ignore_eos": True, "logprobs": 0}
        start = time.perf_counter()
        outputs = model.generate(prompts, SamplingParams(**options, seed=seed), use_tqdm=False)
        times[-1].append(time.perf_counter() - start)
        assert {len(c.token_ids) for o in outputs for c in o.outputs} == {asked["tokens"]}
with open(asked["result_file"], "w") as file:  # vLLM has its own say on stdout
    json.dump(times, file)
"""


def run_vllm(python: str, asked: dict[str, Any], model: Any, tokenizer: Any) -> list[float]:
    "Median seconds of a round of vLLM for each of `asked['counts']`, in a separate process; raises `CalledProcessError`."
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        result_file = Path(folder) / "seconds.json"
        arguments = json.dumps(asked | {"folder": folder, "result_file": str(result_file)})
        cores = f"0-{(os.cpu_count() or 1) - 1}"  # otherwise it leaves one out
        # GB
        env = {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "1", **os.environ}
        subprocess.run(
            [python, "-c", VLLM],
            input=arguments,
            stdout=subprocess.DEVNULL,
            text=True,
            check=True,
            env=env,
        )
        times = json.loads(result_file.read_text())
        return [statistics.median(rounds[1:]) for rounds in times]


# --- measuring ---------------------------------------------------------------------------------------------------


def floors(case: Case, size: ModelSize, prompt_tokens: int) -> dict[str, float]:
    "Seconds for reading all weights once per decoded position, and for the matrix products of prompts and completions."
    sampled = case.rows * case.tokens
    most = torch.get_num_threads()
    read = read_rate(size.nbytes, seconds=1.0, max_threads=most)
    flops = size.flops(prompt_tokens + sampled, sampled) / gemm_rate(
        size, case.rows, seconds=0.2, max_threads=most
    )
    return {"weights": case.tokens * size.nbytes / read, "products": flops}


def measure(
    case: Case, vllm: str | None = None, progress: Callable[[str], None] = print
) -> dict[str, Any]:
    "Sample in turns; raises `AssertionError` where a completion has another length than was asked for."
    model, tokenizer = load_model(case.model, dtype=case.dtype)
    sides = {"ours": Ours(case, model, tokenizer), "generate": Generate(case, model, tokenizer)}
    outcome: dict[str, list[Sampled]] = {name: [] for name in sides}
    for turn in range(case.rounds + 1):
        for name, side in sides.items():
            outcome[name].append(side.sample(turn))
            assert outcome[name][-1].lengths == {case.tokens}, (
                f"{name}: {outcome[name][-1].lengths} tokens"
            )
    ours = sides["ours"]
    measured_rounds = {name: rounds[1:] for name, rounds in outcome.items()}
    gaps = mismatch(model, outcome["ours"][-1].completions[:: case.rows // 8])
    size = ours.engine.causal.size
    floor = floors(case, size, sum(len(p.tokens) for p in encode_rows(case.questions, tokenizer)))
    medians = {
        n: {k: statistics.median(getattr(d, k) for d in r) for k in ("seconds", "cpu")}
        for n, r in measured_rounds.items()
    }
    if vllm is not None:
        asked = {
            "dtype": case.dtype,
            "prompts": [p.tokens.tolist() for p in encode_rows(case.questions, tokenizer)],
            "counts": [COMPLETIONS],
            "tokens": case.tokens,
            "rounds": case.rounds,
        }
        (seconds,) = run_vllm(vllm, asked, model, tokenizer)
        medians["vllm"] = {"seconds": seconds}
    ours.close()  # type: ignore[attr-defined]
    pairs = list(zip(measured_rounds["generate"], measured_rounds["ours"], strict=True))
    result = asdict(case) | {
        "route": ours.engine.causal.route,
        "sides": medians,
        "floors": floor,
        "mismatch": gaps,
    }
    result["tokens_per_s"] = {n: case.rows * case.tokens / m["seconds"] for n, m in medians.items()}
    result["ratio"] = {
        k: statistics.median(getattr(a, k) / getattr(b, k) for a, b in pairs)
        for k in ("seconds", "cpu")
    }
    result["outside_engine"] = statistics.median(
        1 - d.engine / d.seconds for d in measured_rounds["ours"]
    )
    result["times_weights"] = {n: m["seconds"] / floor["weights"] for n, m in medians.items()}
    progress(line(result))
    return result


HEADING = (
    f"{'':<24}{'tokens/s':>10}{'generate':>10}{'vLLM':>8}{'ratio':>7}{'cpu s':>8}{'ratio':>7}"
    f"{'/weights':>10}{'/floor':>8}{'outside':>9}{'nats':>9}"
)


def line(r: dict[str, Any]) -> str:
    "One case."
    rate = r["tokens_per_s"]
    ours = r["sides"]["ours"]
    vllm = f"{rate['vllm']:>8.0f}" if "vllm" in rate else f"{'-':>8}"
    return (
        f"{r['model']} {r['dtype']} {r['rows']:>3} rows".ljust(24)
        + f"{rate['ours']:>10.0f}{rate['generate']:>10.0f}{vllm}{r['ratio']['seconds']:>7.2f}"
        + f"{ours['cpu']:>8.3f}{r['ratio']['cpu']:>7.2f}{r['times_weights']['ours']:>10.2f}"
        + f"{ours['seconds'] / max(r['floors'].values()):>8.2f}{r['outside_engine']:>9.0%}"
        + f"{r['mismatch']['sampler_to_model_mean']:>9.1e}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", choices=TOKENS, default="tiny")
    parser.add_argument(
        "--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"]
    )
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 16, 32], help="multiples of 8")
    parser.add_argument("--tokens", type=int, help="of a completion")
    parser.add_argument(
        "--rounds", type=int, default=5, help="measured ones; one more comes before them"
    )
    parser.add_argument(
        "--threads", type=int, help="of torch; default: 1 for tiny, else its own choice"
    )
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment with vLLM's CPU build")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args(arguments)
    if wrong := [rows for rows in args.rows if rows < 8 or rows % COMPLETIONS]:
        parser.error(f"--rows: got {wrong[0]}, expected multiples of {COMPLETIONS}")
    tokens = args.tokens or TOKENS[args.model]
    cases = [
        Case(args.model, dtype, rows, tokens, args.rounds)
        for dtype in args.dtype
        for rows in args.rows
    ]
    print(HEADING)
    with threads(args.threads or THREADS[args.model]):
        measured = [measure(case, args.vllm) for case in cases]
        count = torch.get_num_threads()
    print(
        f"{count} threads, load {os.getloadavg()[0]:.1f}"
        + ("" if args.vllm else "; vLLM was not run")
    )
    if args.json:
        machine = {
            "threads": count,
            "cpus": os.cpu_count(),
            "load": os.getloadavg()[0],
            "torch": torch.__version__,
        }
        args.json.write_text(json.dumps({"machine": machine, "cases": measured}, indent=1) + "\n")


if __name__ == "__main__":
    main()
