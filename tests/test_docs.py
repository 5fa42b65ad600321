"The site's sources: every page once, links that lead somewhere, names that lead to their signature."

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import rl_notebook
from rl_notebook.cli import main
from rl_notebook.config.config import Config
from rl_notebook.core.validation import leaf_types
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.task.models import load_model

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def sources() -> ModuleType:
    "The script; it loads nbformat, which takes seconds."
    spec = importlib.util.spec_from_file_location("sources", ROOT / "docs" / "sources.py")
    module = sys.modules["sources"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(sources: ModuleType) -> Any:
    return sources.Checkout.of(ROOT)


@pytest.fixture(scope="module")
def site_folder(tmp_path_factory: pytest.TempPathFactory, sources: ModuleType) -> Path:
    target = tmp_path_factory.mktemp("site")
    sources.write_site(ROOT, target)
    return target


def test_the_sidebar_has_every_notebook_once(site: Any):
    listed = sorted(page for _, pages in site.sidebar for page in pages)
    assert listed == sorted(
        p.relative_to(ROOT / "nbs").as_posix() for p in site.notebooks() if p.stem != "index"
    )
    captions = [
        "Start",
        "Your own task",
        "Look into a step",
        "Other trainers and machines",
        "Reference",
    ]
    assert [caption for caption, _ in site.sidebar] == captions


@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("custom reward", "task/01_rewards.ipynb"),
        ("kl_beta", "settings.md"),
        ("lora", "backends/local/08_trainer.ipynb"),
        ("vllm", "tutorials/402_past_one_machine.ipynb"),
        ("custom loss", "core/09_losses.ipynb"),
        ("grpotrainer", "tutorials/403_coming_from_trl.ipynb"),
        ("memory", "experiments/03_preflight.ipynb"),
        ("vllm", "backends/services/02_openai.ipynb"),
        ("resume", "tutorials/401_scripted_runs.ipynb"),
        ("all settings", "settings.md"),
        ("quickstart", "index.ipynb"),
        ("install quickstart", "start.md"),
        ("wandb", "runs/13_trackers.ipynb"),
    ],
)
def test_titles_have_the_words_that_people_search(
    site_folder: Path, query: str, page: str, sources: ModuleType
):
    text = (site_folder / page).read_text(encoding="utf-8")
    if page.endswith(".ipynb"):
        text = "\n".join(
            c.source
            for c in sources.nbformat.reads(text, as_version=4).cells
            if c.cell_type == "markdown"
        )
    headings = " ".join(re.findall(r"^(?:#+ |\| \{setting\})(.*)", text, re.MULTILINE)).lower()
    assert all(word in headings for word in query.split())


def test_the_settings_page_has_every_setting_with_its_meaning(site_folder: Path):
    rows = re.findall(
        r"^\| \{setting\}`(\S+)` \| .+ \| (.+) \|$",
        (site_folder / "settings.md").read_text(),
        re.MULTILINE,
    )
    assert {name for name, _ in rows} == set(leaf_types(Config))
    assert [name for name, meaning in rows if not meaning.strip()] == []


@pytest.mark.parametrize(
    ("page", "text", "moved"),
    [
        ("nbs/index.ipynb", "[a](core/09_losses.ipynb#x)", "[a](core/09_losses.ipynb#x)"),
        (
            "nbs/tutorials/101_one_step_by_hand.ipynb",
            "[a](../core/09_losses.ipynb)",
            "[a](../core/09_losses.ipynb)",
        ),
        ("nbs/index.ipynb", "[a](../examples/README.md)", "[a](examples/README.md)"),
        ("nbs/index.ipynb", '<a href="core/09_losses.ipynb">', '<a href="core/09_losses.html">'),
        (
            "examples/gsm8k/README.md",
            "[a](../../nbs/core/09_losses.ipynb)",
            "[a](../../core/09_losses.ipynb)",
        ),
        ("examples/fireworks/README.md", "![a](curve.svg)", "![a](curve.svg)"),
        ("CONTRIBUTING.md", "[a](https://x.org/y) [b](#z)", "[a](https://x.org/y) [b](#z)"),
    ],
)
def test_links_lead_to_pages(site: Any, page: str, text: str, moved: str):
    assert site.relink(text, page) == moved


def test_a_name_is_linked_once_and_never_in_code_or_headings(sources: ModuleType):
    names = {"GRPOLoop": "rl_notebook.loop.loop"}
    text = (
        "# `GRPOLoop`\n\n`rln.GRPOLoop(x)` `GRPOLoop` and `GRPOLoop`, `other`\n```\n`GRPOLoop`\n```"
    )
    link = "{py:obj}`GRPOLoop <rl_notebook.loop.loop.GRPOLoop>`"
    assert sources.linked(text, names) == text.replace("` `GRPOLoop` and", f"` {link} and", 1)


def test_the_sidebar_begins_with_a_start_page_and_has_a_page_for_each_section(
    site_folder: Path, sources: ModuleType
):
    index = sources.nbformat.read(site_folder / "index.ipynb", as_version=4).cells[-1].source
    entries = re.findall(r"^(\S+\.(?:md|ipynb))$", index, re.MULTILINE)
    assert entries[0] == "start.md"
    assert [entry.split("/")[-1][:3] for entry in entries[1:5]] == ["101", "102", "103", "104"]
    assert len(entries) < 20
    hubs = [(site_folder / page).read_text() for page, _ in sources.HUBS.values()]
    start = (site_folder / "start.md").read_text()
    assert all(
        f"](/{entry})" in start
        for entry in [*entries[1:5], *(page for page, _ in sources.HUBS.values())]
    )
    assert "make demo" in start
    assert "pip install ." in start
    pages = {path.relative_to(site_folder).as_posix() for path in site_folder.rglob("*.ipynb")} - {
        "index.ipynb"
    }
    assert [
        page
        for page in sorted(pages - {*entries})
        if not any(f"](/{page}): " in hub for hub in hubs)
    ] == []


def test_every_public_name_is_on_a_page_of_signatures(site_folder: Path, sources: ModuleType):
    names = sources.public_names(ROOT)
    assert len(names) > 100
    assert [m for m in set(names.values()) if not (site_folder / "api" / f"{m}.md").exists()] == []


def test_the_gallery_has_a_picture_below_each_title(site_folder: Path, sources: ModuleType):
    cells = sources.nbformat.read(site_folder / "gallery.ipynb", as_version=4).cells
    titles = [c.source.splitlines()[0] for c in cells if c.source.startswith("### ")]
    assert titles == [
        f"### {title}" for wanted in sources.GALLERY.values() for title, _, _ in wanted
    ]
    pictures = [
        o for c in cells if c.cell_type == "code" for o in c.outputs if "text/html" in o.data
    ]
    assert len(pictures) >= len(titles)


def test_the_page_of_150_lines_keeps_its_word(sources: ModuleType):
    page = sources.nbformat.read(
        ROOT / "nbs" / "tutorials" / "100_a_step_in_150_lines.ipynb", as_version=4
    )
    cells = [c.source for c in page.cells if c.cell_type == "code"]
    compares = re.compile(r"\b(rln|rl_notebook|backend)\b")  # with the package, as the page says
    step = [cells[0], *(source for source in cells[1:] if not compares.search(source))]
    lines = [line for source in step for line in source.splitlines() if line.strip()]
    assert len([line for line in lines if not line.strip().startswith("#")]) <= 150


def test_the_backend_of_the_recipe_makes_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recipe = (ROOT / "docs" / "recipes.md").read_text().split("## Add a backend")[1].split("```")[1]
    rows = [{"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}]
    prompt = load_model("tiny")[1].apply_chat_template(
        rows[0]["messages"], add_generation_prompt=True
    )["input_ids"]
    (tmp_path / "drawn.jsonl").write_text(
        json.dumps({"prompt": prompt, "completions": list("23456789")})
    )
    monkeypatch.chdir(tmp_path)
    exec(recipe.removeprefix("python\n"), names := {})
    cfg = Config(
        completions_per_prompt=8,
        prompt_groups_per_step=1,
        max_concurrent=3,
        max_completion_tokens=8,
    )

    async def step():
        async with names["backend"] as backend:
            return await GRPOLoop(
                backend, rows, lambda text, answer: float(text == answer), cfg
            ).step()

    record = asyncio.run(step())
    assert sorted(s.text for s in record.groups[0].samples) == list("23456789")
    assert record.metrics["sampling/sampling_logp_difference/max"] < 1e-5


# --- what README and CONTRIBUTING print runs as printed -------------------------------------------------------------

PRINTED = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def code_blocks(page: str, language: str) -> list[str]:
    "The blocks of a page in a language, in order."
    text = (ROOT / page).read_text(encoding="utf-8")
    return [block for name, block in PRINTED.findall(text) if name == language]


def run_in_bash(script: str, folder: Path) -> str:
    "What commands print in one shell, whose programs are those of this environment; each has to end well."
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-ec", script],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_commands_of_the_readme_run_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    "In order, from an empty folder, in this process: test_new starts the program. The demonstration is in test_cli."
    commands = [line for block in code_blocks("README.md", "sh") for line in block.splitlines()]
    setup = [line for line in commands if line.startswith(("pip ", "make "))]
    assert [line.split()[1] for line in setup if line.startswith("make ")] == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^demo: \$\(STAMP\).*\n\t\$\(BIN\)/rl-notebook demo$", makefile, re.MULTILINE)
    assert "\ntest: $(STAMP)" in makefile
    assert "exec make test" in (ROOT / ".ci" / "run").read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # half an hour; test_small_model_example trains the same file with other sizes
    long = "rl-notebook train --config examples/small_model/sums.yaml"
    assert long in commands
    for line in commands:
        if line in setup or line in ("", long):
            continue
        program, *arguments = shlex.split(line, comments=True)
        if program == "cd":
            monkeypatch.chdir(*arguments)
        else:
            assert program == "rl-notebook"
            assert main(arguments) == 0, line
    del sys.modules["task"]
    output = capsys.readouterr().out
    assert "held-out reward" in output
    assert "every phase is the same" in output
    assert (tmp_path / "my_task" / "runs" / "first" / "export" / "config.json").is_file()


def test_python_of_the_readme_that_is_no_cell_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    "The cells run with the notebook that README is made from."
    cells = json.loads((ROOT / "nbs" / "index.ipynb").read_text(encoding="utf-8"))["cells"]
    names = {
        "".join(cell["source"]).strip().replace("\n\n\n", "\n\n")
        for cell in cells
        if cell["cell_type"] == "code"
    }
    blocks = [block for block in code_blocks("README.md", "python") if block.strip() not in names]
    assert len(blocks) == 1
    monkeypatch.chdir(tmp_path)
    exec(blocks[0], {"rln": rl_notebook})
    assert "Loss is" in capsys.readouterr().out
    assert (tmp_path / "runs" / "mine" / "run.json").is_file()


def test_a_notebook_is_edited_as_text_as_contributing_says(tmp_path: Path):
    "In a fresh clone: the folder for the text is there."
    commands = [
        line
        for b in code_blocks("CONTRIBUTING.md", "sh")
        for line in b.splitlines()
        if "jupytext" in line
    ]
    notebook = tmp_path / "nbs" / "task" / "00_data.ipynb"
    for file in (".jt/.gitignore", "nbs/task/00_data.ipynb"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    before = json.loads(notebook.read_text())["cells"]
    run_in_bash("\n".join(commands).replace(".venv/bin/", ""), tmp_path)
    after = json.loads(notebook.read_text())["cells"]
    assert [(cell["id"], cell["source"]) for cell in after] == [
        (cell["id"], cell["source"]) for cell in before
    ]


def test_the_advantages_of_the_recipe_are_a_setting(tmp_path: Path):
    lines = code_blocks("docs/recipes.md", "diff")[0].splitlines()
    package = tmp_path / "rl_notebook"
    shutil.copytree(
        ROOT / "rl_notebook", package, ignore=shutil.ignore_patterns("assets", "__pycache__")
    )
    source = (package / "core" / "advantages.py").read_text()
    changes = re.findall(r"^([- ])(.*\n)((?:\+.*\n)+)", "\n".join(lines) + "\n", re.MULTILINE)
    for sign, before, added in changes:
        assert source.count(before) == 1
        # a line without a sign stays, and is followed by new ones
        kept = before if sign == " " else ""
        source = source.replace(before, kept + re.sub(r"^\+", "", added, flags=re.MULTILINE))
    (package / "core" / "advantages.py").write_text(source)
    code = [
        "from rl_notebook.core.advantages import group_advantages",
        "from rl_notebook.config.config import Config",
        "from rl_notebook.cli import parse_train",
        "print(group_advantages([1, 2, 5], scale='range').round(3).tolist())",
        "print(Config(advantage_scale='range').advantage_scale, parse_train(['--advantage-scale', 'range'])[0].advantage_scale)",
        "Config(advantage_scale='range', ddof=0)",
    ]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "[-0.417, -0.167, 0.583]\nrange range\n", done.stderr
    assert "ddof: advantage_scale='range' divides by no standard deviation" in done.stderr
