"The site's sources: every page once, links that lead somewhere, names that lead to their signature."

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rl_notebook.config.config import Config
from rl_notebook.core.options import leaf_types
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.task.toy import load_model

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def sources() -> ModuleType:
    "The script; it loads nbformat, which takes seconds."
    spec = importlib.util.spec_from_file_location("sources", ROOT / "docs" / "sources.py")
    made = sys.modules["sources"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def site(sources: ModuleType) -> Any:
    return sources.Site.of(ROOT)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, sources: ModuleType) -> Path:
    target = tmp_path_factory.mktemp("site")
    sources.write_site(ROOT, target)
    return target


def test_the_sidebar_has_every_notebook_once(site: Any):
    listed = sorted(page for _, pages in site.sidebar() for page in pages)
    assert listed == sorted(p.relative_to(ROOT / "nbs").as_posix() for p in site.notebooks() if p.stem != "index")
    captions = ["Start", "Your own task", "Look into a step", "Other trainers and machines", "Reference"]
    assert [caption for caption, _ in site.sidebar()] == captions


@pytest.mark.parametrize(
    ("asked", "page"),
    [
        ("custom reward", "task/01_rewards.ipynb"),
        ("kl_beta", "settings.md"),
        ("lora", "backends/local/08_trainer.ipynb"),
        ("vllm", "tutorials/402_past_one_machine.ipynb"),
        ("custom loss", "core/05_losses.ipynb"),
        ("grpotrainer", "tutorials/403_coming_from_trl.ipynb"),
        ("memory", "experiments/03_preflight.ipynb"),
        ("vllm", "backends/services/02_openai.ipynb"),
        ("resume", "tutorials/401_scripted_runs.ipynb"),
        ("all settings", "settings.md"),
        ("quickstart", "index.ipynb"),
    ],
)
def test_titles_have_the_words_that_people_search(written: Path, asked: str, page: str, sources: ModuleType):
    text = (written / page).read_text(encoding="utf-8")
    if page.endswith(".ipynb"):
        text = "\n".join(
            c.source for c in sources.nbformat.reads(text, as_version=4).cells if c.cell_type == "markdown"
        )
    headings = " ".join(re.findall(r"^(?:#+ |\| \{setting\})(.*)", text, re.MULTILINE)).lower()
    assert all(word in headings for word in asked.split())


def test_the_settings_page_has_every_setting_with_its_meaning(written: Path):
    rows = re.findall(r"^\| \{setting\}`(\S+)` \| .+ \| (.+) \|$", (written / "settings.md").read_text(), re.MULTILINE)
    assert {name for name, _ in rows} == set(leaf_types(Config))
    assert [name for name, meaning in rows if not meaning.strip()] == []


@pytest.mark.parametrize(
    ("page", "text", "moved"),
    [
        ("nbs/index.ipynb", "[a](core/05_losses.ipynb#x)", "[a](core/05_losses.ipynb#x)"),
        ("nbs/tutorials/101_one_step_by_hand.ipynb", "[a](../core/05_losses.ipynb)", "[a](../core/05_losses.ipynb)"),
        ("nbs/index.ipynb", "[a](../examples/README.md)", "[a](examples/README.md)"),
        ("nbs/index.ipynb", '<a href="core/05_losses.ipynb">', '<a href="core/05_losses.html">'),
        ("examples/gsm8k/README.md", "[a](../../nbs/core/05_losses.ipynb)", "[a](../../core/05_losses.ipynb)"),
        ("examples/gsm8k/README.md", "![a](curve.svg)", "![a](curve.svg)"),
        ("CONTRIBUTING.md", "[a](https://x.org/y) [b](#z)", "[a](https://x.org/y) [b](#z)"),
    ],
)
def test_links_lead_to_pages(site: Any, page: str, text: str, moved: str):
    assert site.relink(text, page) == moved


def test_a_name_is_linked_once_and_never_in_code_or_headings(sources: ModuleType):
    names = {"GRPOLoop": "rl_notebook.loop.loop"}
    text = "# `GRPOLoop`\n\n`rln.GRPOLoop(x)` `GRPOLoop` and `GRPOLoop`, `other`\n```\n`GRPOLoop`\n```"
    link = "{py:obj}`GRPOLoop <rl_notebook.loop.loop.GRPOLoop>`"
    assert sources.linked(text, names) == text.replace("` `GRPOLoop` and", f"` {link} and", 1)


def test_every_public_name_is_on_a_page_of_signatures(written: Path, sources: ModuleType):
    names = sources.public_names(ROOT)
    assert len(names) > 100
    assert [m for m in set(names.values()) if not (written / "api" / f"{m}.md").exists()] == []


def test_the_gallery_has_a_picture_below_each_title(written: Path, sources: ModuleType):
    cells = sources.nbformat.read(written / "gallery.ipynb", as_version=4).cells
    titles = [c.source.splitlines()[0] for c in cells if c.source.startswith("### ")]
    assert titles == [f"### {title}" for wanted in sources.GALLERY.values() for title, _, _ in wanted]
    drawn = [o for c in cells if c.cell_type == "code" for o in c.outputs if "text/html" in o.data]
    assert len(drawn) >= len(titles)


def test_the_page_of_150_lines_keeps_its_word(sources: ModuleType):
    page = sources.nbformat.read(ROOT / "nbs" / "tutorials" / "100_a_step_in_150_lines.ipynb", as_version=4)
    lines = [line for c in page.cells if c.cell_type == "code" for line in c.source.splitlines() if line.strip()]
    assert len([line for line in lines if not line.strip().startswith("#")]) <= 150


def test_the_backend_of_the_recipe_makes_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recipe = (ROOT / "CONTRIBUTING.md").read_text().split("### Add a backend")[1].split("```")[1]
    rows = [{"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}]
    prompt = load_model("tiny")[1].apply_chat_template(rows[0]["messages"], add_generation_prompt=True)["input_ids"]
    (tmp_path / "drawn.jsonl").write_text(json.dumps({"prompt": prompt, "completions": list("23456789")}))
    monkeypatch.chdir(tmp_path)
    exec(recipe.removeprefix("python\n"), known := {})
    cfg = Config(completions_per_prompt=8, prompt_groups_per_step=1, max_concurrent=3, max_completion_tokens=8)

    async def step():
        async with known["backend"] as backend:
            return await GRPOLoop(backend, rows, lambda text, answer: float(text == answer), cfg).step()

    record = asyncio.run(step())
    assert sorted(s.text for s in record.groups[0].samples) == list("23456789")
    assert record.metrics["sampling/sampling_logp_difference/max"] < 1e-5
