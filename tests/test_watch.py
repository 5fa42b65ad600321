"TRL's own trainer, recorded: the run folder has what TRL used, and training is the same."

import ast
import dataclasses
import functools
import hashlib
import inspect
import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import rl_notebook as rln
from rl_notebook.cli import main as command
from rl_notebook.config.aliases import in_words_of_trl
from rl_notebook.core.losses import make_loss_fn
from rl_notebook.core.types import ConfigError, RecordError
from rl_notebook.insight import trends
from rl_notebook.insight import xray as xray_module
from rl_notebook.insight.doctor import causes, doctor, evidence
from rl_notebook.runs import watch as module  # noqa: F401 (for PROCESSES)
from rl_notebook.task.models import tiny_path
from rl_notebook.task.toy import toy_rows

transformers.utils.logging.disable_progress_bar()
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning:torch"
)


def text_of(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def right(completions: list, answer: list, **_: Any) -> list[float]:
    return [
        float(text_of(c).strip().endswith(str(a))) for c, a in zip(completions, answer, strict=True)
    ]


def short(completions: list, **_: Any) -> list[float | None]:
    return [None if len(text_of(c)) < 6 else -len(text_of(c)) / 100 for c in completions]


def trainer(
    folder: Path,
    cls: type = GRPOTrainer,
    rewards: Any = (right, short),
    peft: Any = None,
    **settings: Any,
) -> Any:
    rows = [
        {"prompt": [{"role": "user", "content": r["question"]}], "answer": r["answer"]}
        for r in toy_rows(64)
    ]
    data = Dataset.from_list(rows)
    names = ("rollout_func", "tools", "processing_class")
    more = {k: settings.pop(k) for k in names if k in settings}
    if "eval_steps" in settings:
        more |= {"eval_dataset": data.select(range(8))}
    plain: dict[str, Any] = {
        "output_dir": str(folder / "trl"), "use_cpu": True, "bf16": False, "per_device_train_batch_size": 8,
        "num_generations": 4, "max_completion_length": 24, "max_steps": 2, "learning_rate": 2e-3, "top_k": 0,
        "beta": 0.0, "seed": 1, "save_strategy": "no", "report_to": "none", "logging_steps": 1, "disable_tqdm": True,
    }  # fmt: skip
    args = GRPOConfig(**{**plain, **settings})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return cls(
            str(tiny_path()), list(rewards), args, train_dataset=data, peft_config=peft, **more
        )


def record_training(folder: Path, **settings: Any) -> tuple[Any, list[rln.StepRecord]]:
    t = trainer(folder, **settings)
    watched = rln.watch(t, folder / "run")
    t.train()
    assert not watched.ended
    return t, watched.records


class Doubled(GRPOTrainer):
    def compute_loss(self, *args: Any, **more: Any) -> Any:
        return 2 * super().compute_loss(*args, **more)


class SteeperThanItsLoss(GRPOTrainer):
    def compute_loss(self, *args: Any, **more: Any) -> Any:
        loss = super().compute_loss(*args, **more)
        return loss + (loss - loss.detach())  # the same number, twice the gradient


class OtherTensors(GRPOTrainer):
    def create_optimizer(self, *_: Any) -> Any:
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.01)
        return self.optimizer


class OtherOldPolicy(GRPOTrainer):
    def _generate_and_score_completions(self, inputs: Any) -> Any:
        out = super()._generate_and_score_completions(inputs)
        return out | {"old_per_token_logps": out["old_per_token_logps"] - 3.5}


def divides_by_zero(completions: list, **_: Any) -> list[float | None]:
    return [math.nan if i % 2 else float(len(text_of(c))) for i, c in enumerate(completions)]


def silent(completions: list, **_: Any) -> list[float | None]:
    return [None for _ in completions]


SHARED: dict[str, dict[str, Any]] = {
    "plain": {"save_strategy": "steps", "save_steps": 1},
    "two iterations": {"num_iterations": 2},
    "no rate": {"learning_rate": 0.0},
    "warm-up": {"warmup_steps": 1},
    "other tensors": {"cls": OtherTensors},
    "other old policy": {"cls": OtherOldPolicy, "num_iterations": 2},
    "NaN": {"rewards": (divides_by_zero, silent)},
    "doubled": {"cls": Doubled},
    "steeper": {"cls": SteeperThanItsLoss},
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    "Runs of two steps by their name in SHARED: each is trained once."

    @functools.cache
    def run(name: str) -> tuple[Any, list[rln.StepRecord], Path]:
        folder = tmp_path_factory.mktemp("shared")
        return *record_training(folder, **SHARED[name]), folder

    return run


def weights(t: Any) -> str:
    return hashlib.sha256(
        b"".join(p.detach().numpy().tobytes() for p in t.model.parameters())
    ).hexdigest()


def test_training_is_the_same_to_the_last_bit(tmp_path: Path):
    plain = trainer(tmp_path, gradient_accumulation_steps=2)
    plain.train()
    assert weights(record_training(tmp_path, gradient_accumulation_steps=2)[0]) == weights(plain)


FAULTS = {  # name in SHARED: the check that fails in step 1, and its words
    "no rate": ("update", "the weights did not move: the learning rate is 0"),
    "other tensors": ("update", "the weights did not move, at a learning rate of 0.01"),
    "other old policy": (
        "old policy",
        "differ by 3.500 nats per token, 3.500 at most, before any update",
    ),
    "NaN": (
        "rewards",
        "4 of 8 completions have no reward, so advantage 0: all functions gave None or NaN",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_training_fails_a_check(shared: Any, name: str):
    check, words = FAULTS[name]
    _, (first, second), _ = shared(name)
    failed = {c.name: c for c in rln.xray(first).failed}
    assert words in failed[check].text
    assert "synced" not in rln.xray(first)["weights"].text or check != "update"
    # the weights have moved since
    assert "old policy" not in {c.name for c in rln.xray(second, first).failed}


def test_a_right_training_passes_the_checks(shared: Any):
    "The weights moved as far as they did, and the first pass over a generation has the logprobs of when it was sampled."
    for name in ("plain", "two iterations", "warm-up"):
        t, (first, second), folder = shared(name)
        assert {c.name for c in rln.xray(first).failed} <= {"completions", "clipping"}, name
        assert rln.xray(first)["old policy"].ok is (True if name == "two iterations" else None)
        assert second.metrics["update_norm"] > 0
    assert rln.xray(first)["update"].text == "the learning rate is 0 here, as its schedule has it"
    t, (_, second), folder = shared("plain")
    load = transformers.AutoModelForCausalLM.from_pretrained
    before = dict(load(folder / "trl" / "checkpoint-1").named_parameters())
    moved = sum(
        float((p - before[name]).detach().square().sum()) for name, p in t.model.named_parameters()
    )
    assert second.metrics["update_norm"] == pytest.approx(math.sqrt(moved), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "words"), {"doubled": "the loss is", "steeper": "at best 2 times that"}.items()
)
def test_options_that_do_not_give_the_loss_and_its_gradient_are_withdrawn(
    shared: Any, name: str, words: str
):
    t, records, _ = shared(name)
    for record, log in zip(
        records, [row for row in t.state.log_history if "loss" in row], strict=True
    ):
        assert record.loss.loss == pytest.approx(float(log["loss"]), rel=1e-4)
        assert words in record.options["make_loss"]
        assert "which is not taken apart" in rln.xray(record).sentence


def test_a_loss_that_goes_around_the_trainers_ends_the_recording(tmp_path: Path):
    class Around(GRPOTrainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return model(inputs["prompt_ids"]).logits.square().mean()

    t = trainer(tmp_path, cls=Around)
    watched = rln.watch(t, tmp_path / "run")
    with pytest.warns(UserWarning, match="0 calls of _compute_loss"):
        t.train()
    assert t.state.global_step == 2
    assert "See what overrides compute_loss" in watched.ended


def test_a_run_continues_in_its_folder_from_a_checkpoint(shared: Any, tmp_path: Path):
    _, before, folder = shared("plain")
    place = shutil.copytree(folder / "run", tmp_path / "run")
    more = {**SHARED["plain"], "max_steps": 3}
    t = trainer(tmp_path, **more)
    rln.watch(t, place)
    with pytest.raises(
        RecordError, match="2 recorded steps, and a training that begins at its first"
    ):
        t.train()
    assert rln.Run.open(place).steps == [1, 2]
    t = trainer(tmp_path, **more)
    watched = rln.watch(t, place)
    t.train(resume_from_checkpoint=str(folder / "trl" / "checkpoint-1"))
    assert not watched.ended
    assert rln.Run.open(place).steps == [1, 2, 3]
    assert [p.name for p in (place / "discarded" / "001" / "steps").iterdir()] == ["00002"]
    assert [[g.number for g in r.groups] for r in watched.records] == [[0, 1], [2, 3], [4, 5]]
    for ours, theirs in zip(watched.records[1].datums, before[1].datums, strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()


MORE = {
    "grpo": {"importance_sampling_level": "sequence"},
    "cispo": {"epsilon_high": 5.0},
    "sapo": {"off_policy_mask_threshold": 0.01},
    "dapo": {"delta": 1.05},
}


@pytest.mark.parametrize(
    ("kind", "beta", "accumulated", "iterations"),
    [
        ("grpo", 0.0, 1, 1),
        ("grpo", 0.04, 2, 2),
        ("bnpo", 0.04, 2, 1),
        ("dr_grpo", 0.04, 1, 2),
        ("dapo", 0.04, 1, 1),
        ("cispo", 0.0, 2, 2),
        ("sapo", 0.0, 2, 1),
        ("luspo", 0.0, 1, 2),
        ("vespo", 0.04, 2, 2),
    ],
)
def test_the_loss_is_known_here_or_what_is_not_is_named(
    tmp_path: Path, kind, beta, accumulated, iterations
):
    more = {**MORE.get(kind, {}), "loss_type": kind, "beta": beta, "num_iterations": iterations}
    more |= {"gradient_accumulation_steps": accumulated}
    if kind == "luspo" and accumulated == 1:
        more |= {"top_entropy_quantile": 0.5}
    t, records = record_training(tmp_path, **more)
    logged = [row["loss"] for row in t.state.log_history if "loss" in row]
    for record, loss in zip(records, logged, strict=True):
        assert record.loss is not None
        assert record.loss.loss == pytest.approx(float(loss), abs=1e-4)
        if kind == "bnpo" and accumulated > 1:
            assert "tokens of each micro-batch" in record.options["make_loss"]
            continue
        agrees_with_its_options(record)


def test_numbers_are_those_that_trl_logs(tmp_path: Path):
    t, records = record_training(tmp_path, beta=0.04, gradient_accumulation_steps=2)
    logs = [row for row in t.state.log_history if "reward" in row]
    same = [
        "rewards/right/mean",
        "rewards/short/mean",
        "reward",
        "completions/mean_length",
        "grad_norm",
    ]
    for record, log in zip(records, logs, strict=True):
        for name in same:
            logged_value = math.nan if log[name] is None else float(log[name])
            assert record.metrics[name] == pytest.approx(logged_value, rel=1e-3, nan_ok=True), name
        for g in record.groups:
            centred = (g.rewards - g.rewards.mean()) / (g.rewards.std(ddof=1) + 1e-4)
            np.testing.assert_allclose(g.advantages, centred, atol=1e-5)


def test_rows_keep_their_place_through_shuffle_and_split(tmp_path: Path):
    "A fresh pass of the model, without padding, over the recorded tokens gives the recorded logprobs."
    t = trainer(
        tmp_path,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        beta=0.04,
        learning_rate=0.0,
    )
    watched = rln.watch(t, tmp_path / "run")
    t.train()
    model = t.model.eval()
    for record in watched.records:
        assert len(record.passes) == 2
        for d, lp in zip(record.datums, record.loss.logprobs, strict=True):
            sample = record.groups[d.group].samples[d.sample]
            assert d.tokens.tolist() == sample.tokens.tolist()
            with torch.no_grad():
                logits = model(torch.tensor(d.tokens)[None]).logits[0, :-1].float()
            fresh = logits.log_softmax(-1)[range(len(d.tokens) - 1), d.tokens[1:].tolist()].numpy()
            for series in (lp.values, d.old_logprobs, d.ref_logprobs):
                np.testing.assert_allclose(series[d.active], fresh[d.active], atol=2e-5)


def test_unscored_and_cut_off_completions_are_recorded_as_such(tmp_path: Path):
    def never(completions, **_):
        return [None] * len(completions)

    never.__name__ = "never"
    _, records = record_training(
        tmp_path, rewards=(short, never), max_completion_length=8, mask_truncated_completions=True
    )
    samples = [s for r in records for g in r.groups for s in g.samples]
    assert {s.rewards["never"] for s in samples} == {None}
    assert any(s.reward is None for s in samples)
    assert all((s.reward is None) == (s.rewards["short"] is None) for s in samples)
    cut = [(d, r.groups[d.group].samples[d.sample]) for r in records for d in r.datums]
    assert {s.finish_reason for _, s in cut} == {"stop", "length"}
    for d, s in cut:
        assert d.num_loss_tokens == (0 if s.truncated else s.completion_len)
    assert rln.xray(records[0])["completions"].fix.startswith("Raise max_completion_length, or")


def test_a_custom_rollout_brings_sampler_logprobs_and_turns(tmp_path: Path):
    "Tokens of the environment between two turns are not the policy's."

    def rollout(prompts: list, t: Any) -> dict:
        ids = t._tokenizer.apply_chat_template(prompts, add_generation_prompt=True)["input_ids"]
        reply = t._tokenizer.encode("#### 12", add_special_tokens=False)
        count = len(reply)
        turn = [*reply, *reply, *reply, t._tokenizer.eos_token_id]
        mask = [1] * count + [0] * count + [1] * (count + 1)
        logprobs = [-0.5, None, *[-1.5] * (3 * count - 1)]
        return {
            "prompt_ids": ids,
            "completion_ids": [turn] * len(ids),
            "logprobs": [logprobs] * len(ids),
            "env_mask": [mask] * len(ids),
        }

    _, records = record_training(
        tmp_path, rollout_func=rollout, max_steps=1, rewards=(lambda completions, **_: [*range(8)],)
    )
    (sample, *_) = records[0].groups[0].samples
    datum = records[0].datums[0]
    assert len(sample.turns) == 2
    assert "before it samples again" in rln.xray(records[0])["weights"].text
    recorded_logprobs = sample.logprobs[sample.loss_mask == 1]
    assert (recorded_logprobs[0], {*recorded_logprobs[2:]}) == (-0.5, {-1.5})
    assert math.isnan(recorded_logprobs[1])
    assert np.isnan(sample.logprobs[sample.loss_mask == 0]).all()
    assert datum.num_loss_tokens == sample.completion_len
    np.testing.assert_array_equal(datum.sampler_logprobs[datum.active], recorded_logprobs)


TOOLS = """{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}\
<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}\
{% if add_generation_prompt %}<|assistant|>{% endif %}"""
CALLS = {"open": "<tool_call>", "close_pattern": "</tool_call>", "repeats": True, "content": "json"}
CALLS |= {"transform": {"type": "function", "function": "{content}"}}


class CallsTools(GRPOTrainer):
    "Every other completion begins by calling a tool; what follows its answer is sampled."

    def _generate_single_turn(self, prompt_ids, *args, **more):
        ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **more)
        if "num_generations" not in more:  # the first turn
            text = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call><|end|>'
            ids[::2] = [self._tokenizer.encode(text, add_special_tokens=False)] * len(ids[::2])
        return ids, logprobs

    def _generate_and_score_completions(self, inputs):
        self.scored = super()._generate_and_score_completions(inputs)
        return self.scored


def test_a_reply_of_a_tool_is_masked_as_trl_masks_it(tmp_path: Path):
    def add(a: int, b: int) -> str:
        "Add.\n\nArgs:\n    a: One.\n    b: Another."
        return str(a + b)

    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_path(), chat_template=TOOLS)
    fields = {"tool_calls": CALLS, "content": {"close_pattern": r"<\|end\|>", "content": "text"}}
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|assistant|>",
        "fields": fields,
    }
    more = {
        "tools": [add],
        "processing_class": tokenizer,
        "max_completion_length": 160,
        "max_steps": 1,
    }
    t, (record,) = record_training(tmp_path, cls=CallsTools, **more)
    rows = zip(
        *(t.scored[name] for name in ("completion_ids", "tool_mask", "completion_mask")),
        strict=True,
    )
    theirs = {tuple(ids[read > 0].tolist()): mask[read > 0].tolist() for ids, mask, read in rows}
    masked = set[str]()
    for d in record.datums:
        s = record.groups[d.group].samples[d.sample]
        completion = s.tokens[s.prompt_len :]
        weights = d.weights[s.prompt_len - 1 :]
        assert weights.tolist() == theirs[tuple(completion.tolist())]
        masked.add(tokenizer.decode(completion[weights == 0]))
    assert masked == {"", "<|tool|>7<|end|><|assistant|>"}


PROCESSES = """
import json
from pathlib import Path
import test_watch as its
more = dict(per_device_train_batch_size=4, beta=0.04, gradient_accumulation_steps=2)
plain = its.trainer(Path("plain"), **more, loss_type="grpo")
plain.train()
for kind in ("grpo", "dapo", "fails"):
    folder = Path(kind)
    t = its.trainer(folder, **more, loss_type="dapo" if kind == "dapo" else "grpo")
    watched, record = its.rln.watch(t, folder / "run"), its.module.Update.record
    if kind == "fails" and not t.accelerator.is_main_process:
        its.module.Update.record = lambda step: record(step) if step.number < 2 else 1 / 0
    t.train()
    its.module.Update.record = record
    assert kind == "dapo" or its.weights(t) == its.weights(plain)
    if t.accelerator.is_main_process:
        (folder / "log.json").write_text(json.dumps([t.state.log_history, watched.ended]))
t = its.trainer(Path("spread"), per_device_train_batch_size=3, steps_per_generation=2, loss_type="grpo")
watched = its.rln.watch(t, Path("spread", "run"))
t.train()
assert not watched.ended
if t.accelerator.is_main_process:
    generated = [[its.text_of(c) for c in t._logs["completion"]], list(t._logs["advantages"])]
    Path("spread", "log.json").write_text(json.dumps([t.state.log_history, *generated]))
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
more |= dict(beta=0.0, loss_type="grpo")
for kind in ("whole", "sharded"):
    t = its.trainer(Path(kind), **more)
    if kind == "sharded":  # accelerate shards nothing on CPUs of itself
        wrap = dict(auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Qwen3DecoderLayer"])
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **wrap)
        AcceleratorState._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
    watched = its.rln.watch(t, Path(kind, "run"))
    t.train()
    assert not watched.ended
    assert hasattr(next(t.model.parameters()), "to_local") == (kind == "sharded")
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "Runs of two processes, the second of which records no more in one: their folders, with what TRL logged."
    folder = tmp_path_factory.mktemp("two")
    (folder / "two.py").write_text(PROCESSES)
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "--standalone",
        "two.py",
    ]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "ACCELERATE_USE_CPU": "1"}
    options = {
        "cwd": folder,
        "env": env,
        "capture_output": True,
        "text": True,
        "check": False,
        "timeout": 400,
    }
    done = subprocess.run(start, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grpo", "dapo"])
def test_two_processes_bring_one_record(two: Path, kind: str):
    "The rows of both, and the loss and the gradient that TRL averages over them."
    logs, ended = json.loads((two / kind / "log.json").read_text())
    assert not ended
    logged = [row for row in logs if "loss" in row]
    for record, log in zip(rln.Run.open(two / kind / "run"), logged, strict=True):
        assert (len(record.datums), len(record.groups)) == (16, 4)
        assert [g.number for g in record.groups] == [*range(4 * record.step - 4, 4 * record.step)]
        assert record.metrics["reward"] == pytest.approx(float(log["reward"]), rel=1e-3)
        assert record.loss.loss == pytest.approx(float(log["loss"]), abs=1e-4)
        assert record.metrics["grad_norm"] == pytest.approx(float(log["grad_norm"]), rel=1e-3)
        agrees_with_its_options(record)


@pytest.mark.slow
def test_groups_that_are_spread_over_processes_are_recorded_whole(two: Path):
    "Two steps train on one generation of three groups of four, of which each process generated six completions."
    logs, texts, advantages = json.loads((two / "spread" / "log.json").read_text())
    logged = [row for row in logs if "loss" in row]
    trained = []
    for record, log in zip(rln.Run.open(two / "spread" / "run"), logged, strict=True):
        for group in record.groups:
            rows = slice(4 * group.number, 4 * group.number + 4)
            assert [s.text for s in group.samples] == texts[rows]
            assert group.advantages.tolist() == advantages[rows]
        for d in record.datums:
            group = record.groups[d.group]
            assert d.tokens.tolist() == group.samples[d.sample].tokens.tolist()
            assert d.advantage == group.advantages[d.sample]
            trained.append((group.number, d.sample))
        assert len(record.datums) == 6
        assert record.loss.loss == pytest.approx(float(log["loss"]), abs=1e-4)
        agrees_with_its_options(record)
    assert sorted(trained) == [(group, sample) for group in range(3) for sample in range(4)]


@pytest.mark.slow
def test_weights_that_two_processes_shard_are_recorded_as_whole_ones(two: Path):
    runs = [rln.Run.open(two / kind / "run") for kind in ("whole", "sharded")]
    assert runs[0].steps == runs[1].steps == [1, 2]
    for whole, sharded in zip(*runs, strict=True):
        assert [d.tokens.tolist() for d in whole.datums] == [
            d.tokens.tolist() for d in sharded.datums
        ]
        assert sharded.loss.loss == pytest.approx(whole.loss.loss, abs=1e-6)
        for name in ("reward", "grad_norm", "update_norm"):
            assert sharded.metrics[name] == pytest.approx(whole.metrics[name], rel=1e-4), name


@pytest.mark.slow
def test_a_process_that_records_no_more_is_not_waited_for(two: Path):
    assert "ZeroDivisionError" in json.loads((two / "fails" / "log.json").read_text())[1]
    assert rln.Run.open(two / "fails" / "run").steps == [1]


def agrees_with_its_options(record: rln.StepRecord) -> None:
    "The recorded options give TRL's loss and the gradient that its backward pass brought to each logprob."
    leaves = [torch.tensor(lp.values, requires_grad=True) for lp in record.loss.logprobs]
    entropies = [torch.tensor(lp.entropy) for lp in record.loss.logprobs]
    ours, _ = make_loss_fn(record.datums, **record.options)(record.datums, leaves, entropies)
    ours.backward()
    assert ours.item() == pytest.approx(record.loss.loss, abs=1e-6, rel=1e-6)
    for leaf, gradient in zip(leaves, record.loss.dlogprobs, strict=True):
        np.testing.assert_allclose(np.nan_to_num(leaf.grad), gradient, atol=1e-6, rtol=1e-5)


def test_evaluation_is_not_training(tmp_path: Path):
    cut = {"top_k": 20, "temperature": 0.5}  # in addition to TRL's fields
    options = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}
    _, records = record_training(tmp_path, **options, generation_kwargs=cut)
    assert {(s.processed, s.temperature) for r in records for g in r.groups for s in g.samples} == {
        (True, 0.5)
    }
    # generation_kwargs do not reach it
    assert {lp.temperature for r in records for lp in r.loss.logprobs} == {1.0}
    assert "sampled at 0.5, scored at 1" in rln.xray(records[0])["on-policy"].text
    assert [r.step for r in records] == [1, 2]
    assert all(len(r.datums) == 8 for r in records)


class CustomTrainer(GRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return 2 * super()._compute_loss(model, inputs)


def test_a_custom_loss_an_adapter_and_half_precision(tmp_path: Path):
    from peft import LoraConfig

    adapter = LoraConfig(r=4, target_modules="all-linear")
    _, records = record_training(
        tmp_path, cls=CustomTrainer, peft=adapter, bf16=True, beta=0.04, max_steps=2
    )
    for record in records:
        assert "a custom _compute_loss" in record.options["make_loss"]
        assert {lp.dtype for lp in record.loss.logprobs} == {"bfloat16"}
        assert all(
            np.isfinite(lp.values[d.active]).all()
            for d, lp in zip(record.datums, record.loss.logprobs, strict=True)
        )
        assert all(np.isfinite(d.ref_logprobs[d.active]).all() for d in record.datums)


def test_the_command_line_reads_it(shared: Any, capsys: pytest.CaptureFixture[str]):
    _, records, folder = shared("plain")
    run = str(folder / "run")
    outputs = {}
    for words, code in {"show": 0, "show --step 2": 0, "view --once": 0, "doctor": 2}.items():
        name, *more = words.split()
        assert command([name, run, *more]) == code
        outputs[words] = "".join(capsys.readouterr())
    assert f"{records[1].metrics['reward']:.4g}" in outputs["show"]
    assert "doctor: step 2: sampler logprobs: got none in this run" in outputs["show --step 2"]
    assert "TRL has them with use_vllm or a rollout_func" in outputs["doctor"]
    assert rln.Run.open(run).config["trainer"].startswith("trl 1.")


def test_every_sentence_is_in_the_words_of_trl():
    "No text of the x-ray, the trends or the doctor names a setting that TRL has not."
    trl = {f.name for f in dataclasses.fields(GRPOConfig)}
    ours = {name for name in rln.Config().flat() if "_" in name} | {
        "loop",
        "datums_from_groups",
        "group_advantages",
    }
    # of what TRL's records lack
    ours -= trl | {"advantage_fn", "weight_sync_interval", "kl_metric", "max_concurrent"}
    ours -= {"teacher_coeff"}
    for source in map(inspect.getsource, (xray_module, trends, causes, doctor, evidence)):
        nodes = ast.walk(ast.parse(source))
        texts = [
            n.value
            for n in nodes
            if isinstance(n, ast.Constant) and isinstance(n.value, str) and " " in n.value
        ]
        for text in map(in_words_of_trl, texts):
            assert not ours & {*re.findall(r"\w+", text)}, text


def test_a_trainer_that_cannot_be_watched_is_rejected_before_it_trains(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"got list without _generate; expected a trl\.GRPOTrainer"
    ):
        rln.watch([], tmp_path / "run")
    t = trainer(tmp_path)
    rln.watch(t, tmp_path / "run")
    with pytest.raises(ConfigError, match="got a trainer that is watched already"):
        rln.watch(t, tmp_path / "run")


def test_the_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--max_steps", "2", "--report_to", "none"])
    runpy.run_path(
        str(Path(__file__).parent.parent / "examples" / "watch_trl" / "train.py"),
        run_name="__main__",
    )
    assert "Watched(watch_trl: 2 steps" in capsys.readouterr().out
    assert [*rln.Run.open("runs/watch_trl").record(2).groups[0].samples[0].rewards] == [
        "right",
        "short",
    ]
