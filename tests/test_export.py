"What was trained leaves as folders that other programs load, and the model that was handed over stays loadable."

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import byte_tokenizer, one_thread, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rl_notebook.backends.base import Backend
from rl_notebook.backends.local import open_local
from rl_notebook.cli import main as command
from rl_notebook.config import Config
from rl_notebook.core import AdamParams, BackendError, ConfigError, Datum, RecordError
from rl_notebook.loop import GRPOLoop
from rl_notebook.toy import load_model, toy_rows

__all__ = ["one_thread"]

IDS = list(range(20, 60))


def run(awaitable: Any) -> Any:
    return asyncio.run(awaitable)


def loss(datums, logprobs):
    return -logprobs[0].sum(), {}


def trained(tmp_path: Path, model: Any = None, **options: Any) -> Backend:
    "A backend after two large updates, over a model that has a folder of its own."
    model = model or tiny_model()
    model.save_pretrained(tmp_path / "base")
    backend = open_local(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), byte_tokenizer(), **options, inline=True
    )
    for _ in range(2):
        run(backend.policy.forward_backward_custom([Datum(np.array(IDS), np.ones(len(IDS) - 1))], loss))
        run(backend.policy.optim_step(AdamParams(learning_rate=0.03)))
    return backend


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.tensor([IDS])).logits


def loads(folder: Path) -> Any:
    "The model of a folder, every weight of which is in it."
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_the_model_that_was_handed_over_is_left_alone_under_lora(family, tmp_path):
    model = tiny_model(family)
    frozen = next(iter(model.parameters())).requires_grad_(False)
    before = logits(model)
    backend = open_local(model, byte_tokenizer(), lora_rank=4, inline=True)
    for _ in range(2):
        run(backend.policy.forward_backward_custom([Datum(np.array(IDS), np.ones(len(IDS) - 1))], loss))
        run(backend.policy.optim_step(AdamParams(learning_rate=0.03)))
    assert (logits(backend.policy.state.module) - before).abs().max() > 0.1
    assert torch.equal(logits(model), before)
    assert [p.requires_grad for p in model.parameters()] == [p is not frozen for p in model.parameters()]
    model.save_pretrained(tmp_path / "mine")
    assert torch.equal(logits(loads(tmp_path / "mine")), before)
    ours = {p.data_ptr() for p in backend.policy.state.module.parameters()}
    assert all(p.data_ptr() in ours for p in model.parameters())  # one copy of the base in memory


KINDS = [("qwen3", False, 0, "hf"), ("llama", True, 0, None), ("qwen3", True, 4, "merged"), ("llama", False, 4, "hf")]


@pytest.mark.parametrize(("family", "tied", "rank", "to"), KINDS)
def test_a_whole_model_is_what_transformers_loads(family, tied, rank, to, tmp_path):
    backend = trained(tmp_path, tiny_model(family, tied=tied, eos=[3, 256]), lora_rank=rank)
    want = logits(backend.policy.state.module)
    run(backend.export(tmp_path / "out", to))
    model = loads(tmp_path / "out")
    assert (logits(model) - want).abs().max() <= 1e-5
    assert (logits(loads(tmp_path / "base")) - want).abs().max() > 0.1
    assert torch.equal(logits(backend.policy.state.module), want)  # merging leaves the policy as it is
    assert model.generation_config.eos_token_id == [3, 256]
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == len(byte_tokenizer())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


@pytest.mark.parametrize("tied", [False, True])
def test_an_adapter_is_what_peft_loads(tied, tmp_path):
    from peft import PeftModel

    backend = trained(tmp_path, tiny_model(tied=tied), lora_rank=4)
    want = logits(backend.policy.state.module)
    run(backend.export(tmp_path / "out", None))
    base = loads(tmp_path / "base")
    assert (logits(PeftModel.from_pretrained(base, tmp_path / "out")) - want).abs().max() <= 1e-5
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "out")  # finds its base by itself
    assert (logits(whole) - want).abs().max() <= 1e-5
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 256
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == len(byte_tokenizer())


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(tmp_path):
    backend = trained(tmp_path)
    loop = GRPOLoop(open_local(*load_model("tiny"), inline=True), toy_rows(4), lambda text: 0.0, Config())
    for to in ("adapter", "merged", "gguf"):
        with pytest.raises(ConfigError, match=rf"export: got '{to}'; expected 'hf': the policy has no adapter"):
            run(backend.export(tmp_path / "out", to))
        with pytest.raises(ConfigError, match=f"got '{to}'"):
            run(loop.export(tmp_path / "deep" / "out", to))
    assert sorted(p.name for p in tmp_path.rglob("*") if "out" in p.name) == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("whole")
    for taken in (tmp_path / "mine", tmp_path / "mine" / "thesis.txt"):
        with pytest.raises(RecordError, match="export: got something that is there; expected a free name"):
            run(loop.export(taken))
    loop.backend.export = None
    with pytest.raises(
        BackendError, match=r"backend local: export: got weights that stay on the service; .* output_model"
    ):
        run(loop.export(tmp_path / "out"))
    backend.policy.state.params["lm_head.weight"].data[0] = torch.nan
    with pytest.raises(BackendError, match=r"export: not finite: got NaN or infinity in lm_head\.weight"):
        run(backend.export(tmp_path / "out", None))


@pytest.mark.parametrize("rank", [0, 4])
def test_the_command_writes_what_the_run_trained(rank, tmp_path, capsys):
    folder = tmp_path / "run"
    small = (
        "--max-rows 4 --prompt-groups-per-step 2 --completions-per-prompt 4 --max-completion-tokens 8 --max-seq-len 64"
    )
    options = [*small.split(), "--learning-rate", "0.01", "--lora-rank", str(rank), "--dcp-save-interval", "1"]
    assert command(["train", *options, "--log-path", str(folder)]) == 0
    capsys.readouterr()
    assert command(["export", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "export")
    assert command(["export", str(folder), "--step", "1", "--to", "hf", "--out", str(tmp_path / "first")]) == 0
    backend = open_local(*load_model("tiny"), lora_rank=rank, inline=True)
    for step, out in ((1, tmp_path / "first"), (2, folder / "export")):
        run(backend.policy.load_state(str(folder / f"checkpoints/{step:05d}/trainer"), optimizer=False))
        assert (
            logits(AutoModelForCausalLM.from_pretrained(out)) - logits(backend.policy.state.module)
        ).abs().max() <= 1e-5
    assert (logits(load_model("tiny")[0]) - logits(backend.policy.state.module)).abs().max() > 1e-3
    assert command(["export", str(folder)]) == 2
    assert "export: got something that is there; expected a free name" in capsys.readouterr().err
    assert command(["export", str(folder), "--step", "7", "--out", str(tmp_path / "none")]) == 2
    assert "export: got no whole checkpoint after step 7; expected one after 1, 2" in capsys.readouterr().err
