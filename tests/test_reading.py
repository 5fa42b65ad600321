"""Runs are read without torch, transformers and JupyterLab: the wheel, installed as README says, in an environment of its own.

The environment gets the distributions that README names and what they require, linked from the one that runs the tests, so that
no network is needed and nothing else is there.
"""

import io
import json
import pickle
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement
from synthetic import synthetic_record

from rl_notebook.runs.dumps import _ARRAYS, ArrayUnpickler
from rl_notebook.runs.run import RunFolder

ROOT = Path(__file__).parents[1]
SOURCES = ("setup.py", "settings.ini", "pyproject.toml", "README.md", "LICENSE")
REFUSED = ("skyrl", "capture_store")  # pickles, and one file of a run that lies elsewhere
DRIVER = """
import contextlib, importlib.util, io, json, sys, traceback, warnings
from rl_notebook.cli import main

results = []
for command in json.load(open(sys.argv[1])):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(command)
        except BaseException:
            code = traceback.format_exc()
    results.append([command, code, out.getvalue()[-2000:], err.getvalue()[-2000:]])
absent = [name for name in ("torch", "transformers", "jupyterlab", "matplotlib", "httpx") if importlib.util.find_spec(name)]
print(json.dumps([results, absent]))
"""


def named_in_readme() -> list[str]:
    "The distributions that README says reading needs."
    line = re.search(
        r"pip install --no-deps \. && pip install (.+)", (ROOT / "README.md").read_text()
    )
    return line[1].split()


def with_requirements(names: list[str]) -> set[str]:
    "Distributions and what they require on this machine, without extras."
    found = set[str]()
    while names:
        name = re.sub(r"[-_.]+", "-", names.pop()).lower()
        if name in found:
            continue
        try:
            required = map(Requirement, distribution(name).requires or ())
        except PackageNotFoundError:
            continue
        found.add(name)
        names += [r.name for r in required if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    "The interpreter of an environment with the wheel and what reading needs."
    place = tmp_path_factory.mktemp("reading")
    source = place / "source"
    source.mkdir()
    for name in SOURCES:
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "rl_notebook", source / "rl_notebook", ignore=shutil.ignore_patterns("__pycache__")
    )
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    build = [
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(place),
        str(source),
    ]
    subprocess.run([*pip, *build], check=True, capture_output=True, text=True)
    (wheel,) = place.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place / "env")], check=True)
    env = {"base": str(place / "env"), "platbase": str(place / "env")}
    libraries = Path(sysconfig.get_path("purelib", vars=env))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(libraries)
    for name in with_requirements(named_in_readme()):
        for file in {Path(file.parts[0]) for file in distribution(name).files or ()}:
            target = Path(distribution(name).locate_file(file))
            if file.parts[0] not in ("..", "__pycache__") and not (libraries / file).exists():
                (libraries / file).symlink_to(target)
    return place / "env" / "bin" / "python"


def test_readme_names_a_part_of_what_the_package_requires():
    required = (ROOT / "settings.ini").read_text().split("\nrequirements = ")[1].split("\n")[0]
    all_names = {Requirement(r).name.lower() for r in required.split()}
    assert {name.lower() for name in named_in_readme()} < all_names
    assert not {"torch", "transformers", "jupyterlab"} & with_requirements(named_in_readme())


def test_runs_are_read_without_torch_transformers_and_jupyterlab(python, tmp_path):
    run = RunFolder.create(tmp_path / "sums", {"base_model": "tiny", "dataset": "toy"})
    for step in (1, 2):
        run.add(synthetic_record(step, steps=2, groups=3, completions=4))
    foreign = [p for p in sorted((ROOT / "tests/foreign").glob("*/*")) if p.is_dir()]
    folders = [run.path, *(p for p in foreign if p.parent.name != "faulty")]
    logs = [
        ROOT / "tests/logs" / name
        for name in ("trainer_state.json", "verl.jsonl", "trl_stdout.txt")
    ]
    claim = "last step: kl > -1e9"
    reward = "last step group 0 sample 0: reward > -1e9"
    commands = list[list[str]]()
    for path in map(str, [*folders, *logs]):
        is_log = "tests/logs" in path
        commands += [
            ["show", path],
            ["why", path, "--json"],
            ["cite", path, claim if is_log else reward],
        ]
        if not is_log:
            commands += [["doctor", path]]
    commands += [
        ["show", str(run.path), "--step", "1"],
        ["show", str(run.path), "--step", "1", "--group", "0", "--sample", "0"],
    ]
    commands += [
        ["view", str(path), "--once", "--out", str(tmp_path / "page.html")] for path in folders[:4]
    ]
    commands += [["view", str(run.path), str(logs[0]), "--out", f"{tmp_path}/site/"], ["skill"]]
    places = [str(tmp_path), str(ROOT / "tests/foreign"), str(ROOT / "tests/logs")]
    commands += [["runs", *places], ["find", 'reward >0 and no "sorry"', *places, "--json"]]
    asked = tmp_path / "commands.json"
    asked.write_text(json.dumps(commands))
    done = subprocess.run(
        [str(python), "-I", "-c", DRIVER, str(asked)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    results, there = json.loads(done.stdout)
    assert there == []
    for command, code, out, err in results:
        refused = any(word in command[1] for word in REFUSED) if len(command) > 1 else False
        cited = {0, 2} if "kl" in command[-1] else {0}
        if command[1:] and "prime_rl_exports" in command[1]:  # which record no reward
            cited = {1}
        allowed = {"show": {0}, "view": {0}, "cite": cited, "skill": {0},
                   "runs": {0}, "find": {0}, "why": {0, 1}, "doctor": {0, 1, 2}}[command[0]]  # fmt: skip
        assert code in ({2} if refused else allowed), f"{command}: {code}\n{err}"
        assert "left out" not in err, f"{command}: {err}"
        assert "No module named" not in err + out
    own = [r for r in results if r[0][:2] == ["doctor", str(run.path)]]
    assert own[0][1] in (0, 1)  # it compared trainer and sampler, from the record alone
    assert (tmp_path / "site/sums/steps/00002.html").is_file()


def saved(value) -> bytes:
    "A value as `torch.save` writes it."
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


KINDS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
         torch.uint8, torch.bool)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_have_the_numbers_of_the_tensors(kind):
    whole = (torch.arange(24).reshape(2, 3, 4) % 5).to(kind)
    tensors = [
        whole,
        whole[1, :, ::2],
        whole.transpose(0, 2),
        whole[0, 0, 3],
        whole[:0],
        whole[:1].expand(3, 3, 4),
    ]
    arrays = ArrayUnpickler(saved({"all": tensors, "n": np.arange(3)}), _ARRAYS).load()
    for tensor, array in zip(tensors, arrays["all"], strict=True):
        assert array.shape == tuple(tensor.shape)
        assert array.tolist() == tensor.tolist()
    assert arrays["n"].tolist() == [0, 1, 2]


def test_jagged_tensors_are_rows():
    rows = [torch.arange(2), torch.arange(5), torch.arange(0)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    read = ArrayUnpickler(saved({"nested": nested})).load()["nested"]
    assert [row.tolist() for row in read] == [row.tolist() for row in rows]


class Calls:
    "An object that calls something when it is unpickled."

    def __reduce__(self):
        return (print, ("called",))


def test_nothing_is_called_and_nothing_is_read_beyond_the_file(capsys):
    for value in (Calls(), {1: Calls()}, io.BytesIO, torch.device("cpu")):
        with pytest.raises(pickle.UnpicklingError):
            ArrayUnpickler(saved({"a": value})).load()
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="become more than"):
        ArrayUnpickler(saved({"a": torch.zeros(1).expand(10**10)})).load()
    reader = ArrayUnpickler(saved({}))
    numbers = np.arange(4.0)
    for offset, size, stride in (
        (0, (5,), (1,)),
        (3, (2,), (1,)),
        (0, (2, 2), (3, 1)),
        (-1, (1,), (1,)),
        (3, (2,), (-1,)),
    ):
        with pytest.raises(ValueError, match="beyond its 4 numbers"):
            reader.tensor(numbers, offset, size, stride)
