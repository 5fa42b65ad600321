"The benchmarks measure what they say: equal gradients and equal work. How fast or small is for `make bench` to say."

import functools
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pretend import DEVICE
from tiny_models import one_thread

__all__ = ["one_thread"]


FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(FOLDER))  # as when a script runs: they share roofline.py


def script(name: str) -> ModuleType:
    "A benchmark as a module."
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# --- memory.py ---------------------------------------------------------------------------------------------------

memory = script("memory")
SMALL_CASE = memory.Case(vocabulary=500, length=24, sequences=3, hidden=16)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_both_passes_leave_the_same_gradients():
    measured = {
        variant: (1.0, memory.measure(variant, SMALL_CASE)[1]) for variant in memory.VARIANTS
    }
    result = memory.compare(measured, SMALL_CASE)
    assert result["logits_mb"] == pytest.approx(3 * 23 * 500 * 4 / 1e6)
    assert "500" in memory.table([result])


# --- coverage.py -------------------------------------------------------------------------------------------------

coverage = script("coverage")


def test_the_known_mean_is_a_sum_over_all_completions():
    model, _ = coverage.make_model()
    probabilities = coverage.next_probabilities(model, [1, 2])
    assert coverage.exact_mean((), probabilities, lambda text: 1.0) == pytest.approx(1)
    starts = coverage.exact_mean((), probabilities, lambda text: float(text.startswith("c")))
    assert starts == pytest.approx(probabilities[()][2])
    ends = coverage.exact_mean((0, 1), probabilities, lambda text: float(text == "ab"))
    assert ends == pytest.approx(probabilities[0, 1][coverage.END])


# --- step.py -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def step() -> ModuleType:
    pytest.importorskip("trl", reason="TRL is in the extra `bench`")
    return script("step")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param({}, marks=pytest.mark.slow),
        {"kl_beta": 0.0, "lora_rank": 4, "batch": 3, "task": "sums"},
    ],
    ids=["all weights", "an adapter, in two batches"],
)
def setting(step, request):
    return step.Setting("tiny", prompts=2, completions=3, tokens=6, steps=1, **request.param)


@pytest.fixture(scope="module")
def steps(step, setting, tmp_path_factory) -> tuple[list, list]:
    folder = str(tmp_path_factory.mktemp("endless"))
    step.save_endless("tiny", folder)
    return step.alternate(setting, folder, lambda line: None)


def test_both_sides_do_the_same_work(step, setting, steps):
    ours, theirs = steps
    step.check_same_work(setting, ours, theirs)
    assert {sum(s.lengths) for s in [*ours, *theirs]} == {2 * 3 * 6}
    assert {s.passes for s in [*ours, *theirs]} == {2}
    for s in [*ours, *theirs]:
        assert min(s.sampling, s.scoring, s.training) > 0


# --- learn.py ----------------------------------------------------------------------------------------------------


def test_a_side_is_there_from_the_step_that_reached_the_target(step):
    side = script("learn").Side(0.5, seconds=[1.0] * 6, right=[0.3, 0.6, 0.6, 0.6, 0.1, 0.1])
    assert side.there
    assert side.result()["steps"] == 3
    assert side.result()["seconds"] == 3.0


# --- prefixes.py -------------------------------------------------------------------------------------------------


def test_prefixes_are_compared_at_equal_results():
    prefixes = script("prefixes")
    setting = prefixes.Setting(
        "tiny", prompts=1, completions=4, prompt_tokens=40, tokens=8, rounds=1
    )
    result = prefixes.measure(setting, lambda line: None)
    assert result["tokens"]["each"] == 4 * 47
    assert 40 <= result["tokens"]["once"] <= 40 + 4 * 7
    assert "once" in prefixes.table(result)


# --- sampling.py -------------------------------------------------------------------------------------------------


def short_rate(rate: Callable[..., float], *args: Any, **options: Any) -> float:
    "A rate of the machine from as few calls as give one."
    return rate(*args, **options | {"seconds": 0.0})


def test_both_samplers_sample_what_was_asked_and_ours_knows_its_logprobs(
    tmp_path, capsys, monkeypatch
):
    "With rates of the machine that are measured for a moment: no figure of time is looked at."
    file = tmp_path / "sampling.json"
    sampling = script("sampling")
    for rate in (sampling.read_rate, sampling.gemm_rate):
        quick = functools.partial(short_rate, rate)
        monkeypatch.setattr(sampling, rate.__name__, quick)
    sampling.main(["--rows", "16", "--tokens", "4", "--rounds", "1", "--json", str(file)])
    full, half = json.loads(file.read_text())["cases"]
    assert {(r["rows"], r["tokens"], *r["sides"]) for r in (full, half)} == {
        (16, 4, "ours", "generate")
    }
    assert (
        full["mismatch"]["sampler_to_model_max"] < 1e-4 < half["mismatch"]["sampler_to_model_mean"]
    )
    assert (
        half["mismatch"]["sampler_to_float32_mean"] < 3 * half["mismatch"]["model_to_float32_mean"]
    )
    assert "vLLM was not run" in capsys.readouterr().out


# --- gpu.py ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_gpu_script_can_be_tried_without_one(tmp_path, capsys):
    gpu = script("gpu")
    file = tmp_path / "gpu.json"
    parts = [part for part in gpu.PARTS if part != "step"]
    with pytest.raises(SystemExit) as ended:
        gpu.main(
            [
                "--device",
                "cpu",
                "--parts",
                *parts,
                "--rows",
                "4",
                "--tokens",
                "6",
                "--json",
                str(file),
            ]
        )
    result = json.loads(file.read_text())
    assert (ended.value.code, result["agreed"]) == (0, True)
    assert [part for part in parts if result[part] and "failed" in result[part]] == []
    # a CPU agrees with itself, and bfloat16 with nothing
    assert result["agreement"]["float32"]["logprobs"] == 0
    assert 1e-4 < result["agreement"]["bfloat16"]["logprobs"] < 0.2
    assert result["training"]["mfu"] is None
    assert max(case["off"] for case in result["variants"].values()) < 1e-5
    assert "its figures mean nothing" in capsys.readouterr().out


def test_a_part_that_fails_or_takes_too_long_does_not_end_the_gpu_script(monkeypatch):
    gpu = script("gpu")
    saved = []

    def forever(plan):
        while True:
            pass

    def missing(plan):
        raise RuntimeError("no kernel")

    parts = {"long": (0.2, forever), "training": (9, missing), "vllm": (9, lambda plan: None)}
    monkeypatch.setattr(gpu, "PARTS", parts)
    plan = replace(gpu.TINY, device="cuda")
    monkeypatch.setattr(gpu, "machine", lambda device: {})
    result = gpu.measure(plan, tuple(parts), save=lambda r: saved.append({*r}), progress=str)
    assert result["long"] == {"failed": "TimeoutError: stopped after 0 s"}
    assert result["training"] == {"failed": "RuntimeError: no kernel"}
    assert (result["vllm"], result["agreed"]) == (None, False)
    assert "long" in saved[0]
    assert "vllm" not in saved[1]


@pytest.mark.slow
def test_the_gpu_script_and_trl_do_the_same_work():
    pytest.importorskip("trl", reason="TRL is in the extra `bench`")
    gpu = script("gpu")
    result = gpu.beside_trl(replace(gpu.TINY, tokens=5), lambda line: None)
    assert min(result["ratio"].values()) > 0


# --- roofline.py --------------------------------------------------------------------------------------------------

roofline = script("roofline")


def test_rates_of_another_device_come_from_many_calls():
    calls = []
    result = roofline.best_rate(lambda: calls.append(1), 3.0, DEVICE, 0.01, None)
    assert len(calls) % roofline.CALLS == 0
    assert result > 0
