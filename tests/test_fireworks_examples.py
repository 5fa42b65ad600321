"The scripts of examples/fireworks run as they are, with the real SDK, against an emulator; the outcome is looked at."

from __future__ import annotations

import argparse
import importlib
import itertools
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from rl_notebook.emulator.service import RunningEmulator, start_emulator
from rl_notebook.task.models import load_model

FOLDER = Path(__file__).parent.parent / "examples" / "fireworks"
SMALL_RUN_OPTIONS = [
    "--tokenizer",
    "tiny",
    "--rows",
    "toy",
    "--max-tokens",
    "24",
    "--learning-rate",
    "1e-3",
]
LINE = re.compile(r"^step (\d+): reward (\S+) loss (\S+) (.*)synced (\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEmulator]:
    "One service for all scripts; each has a separate deployment."
    with start_emulator(folder=tmp_path_factory.mktemp("emulator")) as running:
        yield running


@dataclass(frozen=True)
class Outcome:
    "What a script printed, and what the service saw of it."

    output: str
    policy: str  # id of its trainer job
    reference: str | None
    paths: list[str]  # of the requests that were answered with 200
    emulator: RunningEmulator

    def count(self, end: str, job: str | None = None) -> int:
        "How many requests went to an address that ends so, of one trainer or of all."
        return sum(p.endswith(end) and (job is None or f"/{job}/" in p) for p in self.paths)

    @property
    def snapshots(self):
        "The bucket of the policy trainer."
        return self.emulator.emulator.site.snapshots(f"job-{self.policy}")


def run(emulator: RunningEmulator, script: str, deployment: str, *options: str) -> Outcome:
    "Run a script to its end; every resource that it made has to be released."
    site = emulator.emulator.site
    log_length = len(emulator.emulator.log)
    before = {job.name for job in site.resources.all("rlorTrainerJobs")}
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    quick = {"FW_TRAINER_CANCEL_GRACE_PERIOD_S": "0", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        str(FOLDER / script),
        *SMALL_RUN_OPTIONS,
        "--deployment",
        deployment,
        *options,
    ]
    env = inherited | quick | emulator.environment()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    output = done.stdout + done.stderr
    assert emulator.key.reveal() not in output
    assert done.returncode == 0, output[-3000:]

    jobs = [job for job in site.resources.all("rlorTrainerJobs") if job.name not in before]
    assert [job.goal for job in jobs] == ["JOB_STATE_CANCELLED"] * len(jobs)
    served = site.resources.find(f"accounts/local/deployments/{deployment}")
    assert served is not None
    assert served.body["maxReplicaCount"] == 0
    ids = {bool(job.body.get("forwardOnly")): job.name.rsplit("/", 1)[1] for job in jobs}
    assert served.body["hotLoadTrainerJob"].endswith(ids[False])
    paths = [e.path for e in emulator.emulator.log[log_length:] if e.status == 200]
    return Outcome(output, ids[False], ids.get(True), paths, emulator)


def check_training(outcome: Outcome, steps: int, syncs: int) -> None:
    "The number of updates of the policy, none of the reference; the number of snapshots, the first whole; the weights moved."
    assert outcome.count("/optim_step", outcome.policy) == outcome.count("/optim_step") == steps
    assert outcome.reference is not None
    assert outcome.count("/forward", outcome.reference) >= steps
    snapshots = outcome.snapshots
    pages = [snapshots.meta(name) for name in snapshots.names()]
    assert [page["checkpoint_type"] for page in pages] == ["base", *["delta"] * (syncs - 1)]
    assert [page["previous"] for page in pages[1:]] == snapshots.names()[:-1]
    weights = [
        load_model("tiny")[0].state_dict(),
        *(snapshots.load(name)[0] for name in snapshots.names()),
    ]
    for old, new in itertools.pairwise(weights):
        moved = max(float((new[name] - old[name].to(new[name])).abs().max()) for name in new)
        assert 0 < moved < 1e-2


def check_lines(outcome: Outcome, steps: int) -> list[tuple[str, str]]:
    "One line a step, of finite numbers; returns what else each says, and what was synced."
    lines = LINE.findall(outcome.output)
    assert [int(number) for number, *_ in lines] == list(range(1, steps + 1)), outcome.output[
        -2000:
    ]
    assert all(
        0 < float(reward) < 1 and math.isfinite(float(loss)) for _, reward, loss, _, _ in lines
    )
    return [(more, synced) for *_, more, synced in lines]


def check_synced(outcome: Outcome, identities: list[str]) -> None:
    "What was saved was also loaded by the deployment, in this order."
    assert outcome.snapshots.names() == identities
    requests = [
        e
        for e in outcome.emulator.emulator.log
        if e.path.endswith("/hot_load") and e.method == "POST"
    ]
    assert all(e.status == 200 for e in requests)


@pytest.mark.slow
def test_step_by_step(emulator: RunningEmulator):
    outcome = run(emulator, "step_by_step.py", "by-step", "--steps", "2")
    check_training(outcome, steps=2, syncs=2)
    rows = check_lines(outcome, steps=2)
    check_synced(outcome, [synced for _, synced in rows])
    first, second = (float(more.split()[1]) for more, _ in rows)
    assert abs(first) < 1e-4 < abs(second)  # policy and reference start as the same model
    assert "trainers cancelled, deployment scaled to zero" in outcome.output


@pytest.mark.slow
def test_provision_by_hand(emulator: RunningEmulator):
    outcome = run(emulator, "provision_by_hand.py", "by-hand", "--steps", "2")
    check_training(outcome, steps=2, syncs=2)
    check_synced(outcome, [synced for _, synced in check_lines(outcome, steps=2)])
    assert outcome.count("/forward", outcome.reference) >= 4  # two prompt groups a step


@pytest.mark.slow
def test_off_policy(emulator: RunningEmulator):
    outcome = run(emulator, "off_policy.py", "off-policy", "--steps", "4")
    check_training(outcome, steps=4, syncs=2)
    rows = check_lines(outcome, steps=4)
    assert [synced == "none" for _, synced in rows] == [True, False, True, False]
    check_synced(outcome, [synced for _, synced in rows if synced != "none"])
    numbers = [[float(n) for n in re.findall(r"\d[\d.e+-]*", more)] for more, _ in rows]
    # prefill and what was reported with each sampled token
    assert all(gap < 1e-4 for *_, gap in numbers)
    ratios = [mean for mean, *_ in numbers]
    assert abs(ratios[0] - 1) < 1e-4  # just synced: the policy is what sampled
    assert abs(ratios[1] - 1) > 1e-4  # one update ahead of what sampled
    assert abs(ratios[2] - 1) < 1e-4


@pytest.mark.slow
def test_recipe(emulator: RunningEmulator, tmp_path: Path):
    settings = ["--steps", "3", "--max-seq-len", "96", "--log-path", str(tmp_path / "run")]
    outcome = run(emulator, "recipe.py", "recipe", *settings)
    verdicts = re.findall(r"^step \d+ · reward (\S+) .*$", outcome.output, re.MULTILINE)
    assert len(verdicts) == 3
    assert all(math.isfinite(float(reward)) for reward in verdicts)
    trained = outcome.output.count("groups with signal 1/1")
    assert trained >= 2
    check_training(outcome, steps=trained, syncs=trained)
    saved_bytes = b"".join(f.read_bytes() for f in (tmp_path / "run").rglob("*") if f.is_file())
    assert emulator.key.reveal().encode() not in saved_bytes


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModuleType, ModuleType]]:
    "recipe.py and task.py, imported."
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", ["recipe.py", "--tokenizer", "tiny"])
    yield importlib.import_module("recipe"), importlib.import_module("task")
    for name in ("recipe", "task"):
        sys.modules.pop(name, None)


@pytest.mark.filterwarnings("ignore:Config. other spellings:UserWarning")
def test_three_spellings_are_one_config(modules: tuple[ModuleType, ModuleType]):
    recipe, _ = modules
    args = vars(recipe.options())
    newest, older, oldest = (
        recipe.config(argparse.Namespace(**args | {"spelling": s})) for s in recipe.SPELLINGS
    )
    assert newest == older == oldest


def test_without_a_key_a_script_says_what_to_do(modules: tuple[ModuleType, ModuleType]):
    with pytest.raises(SystemExit, match="rl-notebook emulate"):
        modules[1].service()
