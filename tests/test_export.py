"What was trained leaves as folders that other programs load, and the model that was handed over stays loadable."

import asyncio
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import byte_tokenizer, one_thread, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rl_notebook.backends.base import Backend
from rl_notebook.backends.local.trainer import open_local
from rl_notebook.cli import main as command
from rl_notebook.config.config import Config
from rl_notebook.core.types import AdamParams, BackendError, ConfigError, Datum, RecordError
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.runs.run import write_best
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_rows

__all__ = ["one_thread"]


IDS = list(range(20, 60))


def run(awaitable: Any) -> Any:
    return asyncio.run(awaitable)


def loss(datums, logprobs):
    return -logprobs[0].sum(), {}


def trained_backend(tmp_path: Path, model: Any = None, **options: Any) -> Backend:
    "A backend after two large updates, over a model that is saved in a folder."
    model = model or tiny_model()
    model.save_pretrained(tmp_path / "base")
    backend = open_local(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"),
        byte_tokenizer(),
        **options,
        inline=True,
    )
    for _ in range(2):
        run(
            backend.policy.forward_backward_custom(
                [Datum(np.array(IDS), np.ones(len(IDS) - 1))], loss
            )
        )
        run(backend.policy.optim_step(AdamParams(learning_rate=0.03)))
    return backend


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.tensor([IDS])).logits


def load_whole(folder: Path) -> Any:
    "The model of a folder, every weight of which is in it."
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model


KINDS = [
    ("qwen3", False, 0, "hf"),
    ("llama", True, 0, None),
    ("qwen3", True, 4, "merged"),
    ("llama", False, 4, "hf"),
]


@pytest.mark.parametrize(("family", "tied", "rank", "to"), KINDS)
def test_a_whole_model_is_what_transformers_loads(family, tied, rank, to, tmp_path):
    backend = trained_backend(tmp_path, tiny_model(family, tied=tied, eos=[3, 256]), lora_rank=rank)
    want = logits(backend.policy.state.module)
    run(backend.export(tmp_path / "out", to))
    model = load_whole(tmp_path / "out")
    assert (logits(model) - want).abs().max() <= 1e-5
    assert (logits(load_whole(tmp_path / "base")) - want).abs().max() > 0.1
    # merging leaves the policy as it is
    assert torch.equal(logits(backend.policy.state.module), want)
    assert model.generation_config.eos_token_id == [3, 256]
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == len(byte_tokenizer())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


VLLM = os.environ.get("RL_NOTEBOOK_VLLM_PYTHON", "")
PROMPT_LOGPROBS = """
import json, sys
from vllm import LLM, SamplingParams

ids = json.loads(sys.argv[2])
model = LLM(sys.argv[1], dtype="float32", max_model_len=256, enforce_eager=True, kv_cache_memory_bytes=2**28)
(out,) = model.generate([{"prompt_token_ids": ids}], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
print(json.dumps([found[i].logprob for found, i in zip(out.prompt_logprobs[1:], ids[1:], strict=True)]))
"""


@pytest.mark.skipif(
    not VLLM, reason="RL_NOTEBOOK_VLLM_PYTHON is not set: an interpreter that has vLLM's CPU build"
)
@pytest.mark.parametrize(
    ("name", "rank", "to"), [("tiny", 0, "hf"), ("tiny", 4, "merged"), ("smollm2", 4, "merged")]
)
def test_a_whole_model_is_what_vllm_loads(name, rank, to, tmp_path):
    model, tokenizer = load_model(name)
    backend = open_local(model, tokenizer, lora_rank=rank, inline=True)
    datum = Datum(
        np.array(ids := tokenizer.encode("Add up 17 and 25. #### 42")), np.ones(len(ids) - 1)
    )
    (before,) = run(backend.policy.forward([datum]))
    for _ in range(2):
        run(backend.policy.forward_backward_custom([datum], loss))
        run(backend.policy.optim_step(AdamParams(learning_rate=0.001)))
    (trained,) = run(backend.policy.forward([datum]))
    run(backend.export(tmp_path / "out", to))
    overrides = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": "",
    }
    command = [VLLM, "-c", PROMPT_LOGPROBS, str(tmp_path / "out"), json.dumps(ids)]
    output = subprocess.run(
        command, env={**os.environ, **overrides}, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    logprobs = np.array(json.loads(output.strip().splitlines()[-1]))
    assert np.abs(trained.values - before.values).max() > 0.1
    assert np.abs(logprobs - trained.values).max() < 1e-3


@pytest.mark.parametrize("tied", [False, True])
def test_an_adapter_is_what_peft_loads(tied, tmp_path):
    from peft import PeftModel

    backend = trained_backend(tmp_path, tiny_model(tied=tied), lora_rank=4)
    want = logits(backend.policy.state.module)
    run(backend.export(tmp_path / "out", None))
    base = load_whole(tmp_path / "base")
    assert (logits(PeftModel.from_pretrained(base, tmp_path / "out")) - want).abs().max() <= 1e-5
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "out")  # finds its base by itself
    assert (logits(whole) - want).abs().max() <= 1e-5
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 256
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == len(byte_tokenizer())


def trained_adapter(base: Path, **settings: Any) -> Any:
    "A PeftModel over the model of a folder whose adapter says something, as after a warm-up on answers."
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4,
        lora_alpha=8,
        task_type="CAUSAL_LM",
        **{"target_modules": ["q_proj", "up_proj"], **settings},
    )
    torch.manual_seed(0)
    module = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if "lora_B" in name or "lora_embedding_B" in name:
                p.normal_(std=0.2)
    return module.eval()


def updated(backend: Backend) -> torch.Tensor:
    "Logits of the policy after an update."
    run(backend.policy.forward_backward_custom([Datum(np.array(IDS), np.ones(len(IDS) - 1))], loss))
    run(backend.policy.optim_step(AdamParams(learning_rate=0.03)))
    return logits(backend.policy.state.module)


ADAPTERS = {
    "plain": {},
    "head and embedding": {"target_modules": ["q_proj", "lm_head", "embed_tokens"]},
    "a trained head": {"modules_to_save": ["lm_head"]},
    "dora": {"use_dora": True},
}


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("tied", [False, True])
def test_an_adapter_that_was_trained_before_continues_and_is_exported_whole(kind, tied, tmp_path):
    from peft import PeftModel

    for part in (tiny_model("llama", tied=tied), byte_tokenizer()):
        part.save_pretrained(tmp_path / "base")
    module = trained_adapter(tmp_path / "base", **ADAPTERS[kind])
    began = logits(module).log_softmax(-1)[0, :-1].gather(-1, torch.tensor(IDS[1:])[:, None])[:, 0]
    # still a part of it
    next(p for name, p in module.named_parameters() if "lora_A" in name).requires_grad_(False)
    backend = open_local(module, byte_tokenizer(), inline=True)
    datum = Datum(np.array(IDS), np.ones(len(IDS) - 1))
    want = updated(backend)
    assert np.abs(run(backend.reference.forward([datum]))[0].values - began.numpy()).max() < 1e-4
    assert np.abs(run(backend.policy.forward([datum]))[0].values - began.numpy()).max() > 0.01
    run(backend.export(tmp_path / "adapter", None))
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert (
        logits(PeftModel.from_pretrained(whole, tmp_path / "adapter")) - want
    ).abs().max() <= 1e-4
    run(backend.export(tmp_path / "merged", "merged"))
    assert (logits(load_whole(tmp_path / "merged")) - want).abs().max() <= 1e-3
    # and continues from there
    again = open_local(*load_model(str(tmp_path / "adapter")), inline=True)
    assert (logits(again.policy.state.module) - want).abs().max() <= 1e-4


def test_an_adapter_that_would_leave_out_weights_is_exported_as_the_whole_model(tmp_path):
    tiny_model().save_pretrained(tmp_path / "base")
    merged = trained_adapter(tmp_path / "base").merge_and_unload()
    unfrozen = trained_adapter(tmp_path / "base")
    unfrozen.get_base_model().model.norm.weight.requires_grad_()
    two = trained_adapter(tmp_path / "base")
    two.add_adapter("other", two.peft_config["default"])
    two.base_model.set_adapter(["default", "other"])
    cases = {
        "up_proj.weight of its base is not that of": (merged, 4),
        "norm.weight was trained as well": (unfrozen, 0),
        "2 adapters are active": (two, 0),
        "its base is in no folder": (tiny_model(), 4),
    }
    for i, (reason, (model, rank)) in enumerate(cases.items()):
        backend = open_local(model, byte_tokenizer(), lora_rank=rank, inline=True)
        want = updated(backend)
        with pytest.raises(
            ConfigError, match=rf"export: got 'adapter', but .*{reason}.*Export 'merged'"
        ):
            run(backend.export(tmp_path / f"no{i}", "adapter"))
        run(backend.export(tmp_path / f"out{i}", None))
        assert (logits(load_whole(tmp_path / f"out{i}")) - want).abs().max() <= 1e-4, reason


def test_an_adapter_that_cannot_be_trained_as_it_is_says_what_to_do(tmp_path):
    from peft import PromptTuningConfig, get_peft_model

    tiny_model().save_pretrained(tmp_path / "base")
    trained_adapter(tmp_path / "base").save_pretrained(tmp_path / "adapter")
    prompts = get_peft_model(
        tiny_model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    inside = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    cases = [
        (
            trained_adapter(tmp_path / "base"),
            8,
            r"lora_rank: got 8 for a PeftModel.*Leave lora_rank out.*merge_and_unload",
        ),
        (
            inside,
            0,
            r"with an adapter inside.*PeftModel\.from_pretrained\(base, folder, is_trainable=True\)",
        ),
        (inside, 8, "with an adapter inside"),
        (prompts, 0, "got a PROMPT_TUNING adapter"),
        (trained_adapter(tmp_path / "base").requires_grad_(False), 0, "is_trainable=True"),
    ]
    for model, rank, message in cases:
        with pytest.raises((ConfigError, BackendError), match=message):
            open_local(model, byte_tokenizer(), lora_rank=rank)


def test_what_cannot_be_exported_is_rejected_and_leaves_nothing(tmp_path):
    backend = trained_backend(tmp_path)
    loop = GRPOLoop(
        open_local(*load_model("tiny"), inline=True), toy_rows(4), lambda text: 0.0, Config()
    )
    for to in ("adapter", "merged", "onnx"):
        with pytest.raises(
            ConfigError, match=rf"export: got '{to}'; expected 'hf': the policy has no adapter"
        ):
            run(backend.export(tmp_path / "out", to))
        with pytest.raises(ConfigError, match=f"got '{to}'"):
            run(loop.export(tmp_path / "deep" / "out", to))
    assert sorted(p.name for p in tmp_path.rglob("*") if "out" in p.name) == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("whole")
    for target in (tmp_path / "mine", tmp_path / "mine" / "thesis.txt"):
        with pytest.raises(
            RecordError, match="export: got something that is there; expected a free name"
        ):
            run(loop.export(target))
    loop.backend.export = None
    with pytest.raises(
        BackendError,
        match=r"backend local: export: got weights that stay on the service; .* output_model",
    ):
        run(loop.export(tmp_path / "out"))
    backend.policy.state.params["lm_head.weight"].data[0] = torch.nan
    with pytest.raises(
        BackendError, match=r"export: not finite: got NaN or infinity in lm_head\.weight"
    ):
        run(backend.export(tmp_path / "out", None))


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 4])
def test_the_command_writes_what_the_run_trained(rank, tmp_path, capsys):
    folder = tmp_path / "run"
    small = "--max-rows 4 --prompt-groups-per-step 2 --completions-per-prompt 4 --max-completion-tokens 8 --max-seq-len 64"
    options = [
        *small.split(),
        "--learning-rate",
        "0.01",
        "--lora-rank",
        str(rank),
        "--dcp-save-interval",
        "1",
    ]
    assert command(["train", *options, "--log-path", str(folder)]) == 0
    capsys.readouterr()
    assert command(["export", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "export")
    assert (
        command(
            ["export", str(folder), "--step", "1", "--to", "hf", "--out", str(tmp_path / "first")]
        )
        == 0
    )
    backend = open_local(*load_model("tiny"), lora_rank=rank, inline=True)
    for step, out in ((1, tmp_path / "first"), (2, folder / "export")):
        run(
            backend.policy.load_state(
                str(folder / f"checkpoints/{step:05d}/trainer"), optimizer=False
            )
        )
        assert (
            logits(AutoModelForCausalLM.from_pretrained(out)) - logits(backend.policy.state.module)
        ).abs().max() <= 1e-5
    assert (logits(load_model("tiny")[0]) - logits(backend.policy.state.module)).abs().max() > 1e-3
    assert command(["export", str(folder)]) == 2
    assert "export: got something that is there; expected a free name" in capsys.readouterr().err
    assert command(["export", str(folder), "--step", "7", "--out", str(tmp_path / "none")]) == 2
    assert (
        "export: got no whole checkpoint after step 7; expected one after 1, 2"
        in capsys.readouterr().err
    )


def card_of(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("rank", "to"), [(0, "hf"), (4, "adapter"), (4, "merged")])
def test_the_card_says_how_to_load_the_folder_and_that_works(
    rank, to, tmp_path, capsys, monkeypatch
):
    async def whole() -> tuple[Path, Any]:
        cfg = Config(
            temperature=0.7,
            top_k=5,
            max_completion_tokens=8,
            lora_rank=rank,
            log_path=str(tmp_path / "secret"),
        )
        async with open_local(*load_model("tiny"), lora_rank=rank, temperature=0.7) as backend:
            loop = GRPOLoop(backend, toy_rows(4), lambda text: float(len(text)), cfg)
            await loop.step()
            return await loop.export(tmp_path / "out", to), loop.records[0].metrics["reward"]

    folder, reward = run(whole())
    card = card_of(folder)
    assert f"| reward in training | {reward:.4g} (step 1) | {reward:.4g} (step 1) |" in card
    assert "# tiny after 1 steps of GRPO" in card
    assert "temperature: 0.7" in card
    assert str(tmp_path) not in card
    sampled = GenerationConfig.from_pretrained(folder)
    assert (sampled.do_sample, sampled.temperature, sampled.top_k, sampled.max_new_tokens) == (
        True,
        0.7,
        5,
        8,
    )
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    capsys.readouterr()
    exec(code, names)
    assert capsys.readouterr().out.strip()
    assert names["sampling"].top_k == 5
    assert names["output"].numel() <= names["prompt"]["input_ids"].numel() + 8


def test_a_card_names_the_model_that_was_trained_and_its_template(tmp_path):
    template = tmp_path / "mine.jinja"
    template.write_text(
        "{% for m in messages %}<|bos|><|user|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
    )
    model, tokenizer = load_model("tiny")
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "my-model")
    cfg = Config(system_prompt="Be short.", chat_template=str(template), stop=("####",))

    async def export() -> Path:
        async with open_local(*load_model(str(tmp_path / "my-model"))) as backend:
            loop = GRPOLoop(backend, toy_rows(4), lambda text: 0.0, cfg)
            return await loop.export(tmp_path / "out")

    folder = run(export())
    card = card_of(folder)
    assert "# my-model after 0 steps" in card
    assert "No figure was recorded" in card
    assert str(tmp_path) not in card
    assert "'content': 'Be short.'" in card
    assert "'####': pass these, too" in card
    assert AutoTokenizer.from_pretrained(folder).chat_template == template.read_text()


def test_the_best_checkpoint_can_be_taken(tmp_path):
    folder = tmp_path / "run"
    small = "--max-rows 4 --prompt-groups-per-step 2 --completions-per-prompt 4 --max-completion-tokens 8 --steps 2"
    often = "--eval-rows 2 --eval-interval 1 --dcp-save-interval 1 --keep-best eval/reward"
    assert command(["train", *small.split(), *often.split(), "--log-path", str(folder)]) == 0
    assert command(["export", str(folder), "--step", "best", "--out", str(tmp_path / "kept")]) == 0
    step = json.loads((folder / "best.json").read_text())["step"]
    assert f"after {step} steps" in card_of(tmp_path / "kept")
    write_best(folder, 3 - step, "eval/reward", 1.0)  # the other one is the best now
    assert command(["export", str(folder), "--step", "best", "--out", str(tmp_path / "other")]) == 0
    assert f"after {3 - step} steps" in card_of(tmp_path / "other")
