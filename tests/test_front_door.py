"`import rl_notebook as rln`: the names that a researcher finds in it, and what the import costs."

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rl_notebook as rln

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "numpy", "pandas", "transformers", "plotly", "matplotlib", "yaml", "httpx")


def python(code: str) -> str:
    "What a fresh interpreter prints."
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return done.stdout.strip()


def test_the_import_loads_nothing_heavy():
    code = (
        f"import sys, rl_notebook as rln; dir(rln); print([m for m in {HEAVY} if m in sys.modules])"
    )
    assert python(code) == "[]"
    loaded = "print([m for m in sys.modules if m.startswith('rl_notebook.')])"
    assert python(f"import sys, rl_notebook; rl_notebook.__all__; {loaded}") == "[]"


@pytest.mark.parametrize("name", rln.__all__)
def test_a_name_is_there_and_says_what_it_is(name):
    value = getattr(rln, name)
    assert vars(rln)[name] is value  # kept: the second look is a plain attribute
    assert inspect.isfunction(value) or inspect.isclass(value)
    assert value.__module__.startswith("rl_notebook.")
    text = inspect.getdoc(value) or ""
    assert len(text.split()) >= 3, f"{name}: {text!r} says too little"


def test_only_these_names_are_listed():
    assert 35 <= len(rln.__all__) <= 65
    shown = dir(rln)
    assert (
        sorted(n for n in shown if not re.fullmatch("__.+__", n))
        == rln.__all__
        == sorted(rln.__all__)
    )
    assert {"__doc__", "__path__", "__version__"} <= set(shown)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("dashbrd", "Dashboard"), ("GRPO_lop", "GRPOLoop"), ("GRPOTrainer", "GRPOLoop"), ("whatif_", "what_if"), ("z", 0)],
)  # fmt: skip
def test_an_unknown_name_is_shown_the_nearest(typed, meant):
    with pytest.raises(AttributeError) as caught:
        getattr(rln, typed)
    message = str(caught.value)
    assert repr(typed) in message
    assert "dir(rl_notebook)" in message
    assert re.findall(r"Did you mean '(\w+)'", message) == ([meant] if meant else [])


def test_a_star_import_brings_the_front_door():
    names: dict[str, object] = {}
    exec("from rl_notebook import *", names)
    assert sorted(names.keys() - {"__builtins__"}) == rln.__all__


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(rln.__file__).read_text(encoding="utf-8"))
    block = next(
        n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"
    )
    stated = {
        (n.module, a.name, a.asname)
        for n in block.body
        if isinstance(n, ast.ImportFrom)
        for a in n.names
    }
    assert stated == {
        (home, name, name) for home, names in rln._HOMES.items() for name in names.split()
    }
