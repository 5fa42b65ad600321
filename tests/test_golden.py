"""Recorded calls of other implementations against ours, one test per case, and how many agree.

    pytest tests/test_golden.py                         # the cases in tests/golden
    GOLDEN_DIR=elsewhere pytest tests/test_golden.py    # other cases of the same format

A file without an adapter is named in the table; a case of a file with one is never skipped.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import golden_adapters
import pytest
from golden_adapters import Case, Outcome, find_adapter, read_cases

from rl_notebook.core import losses

GOLDEN = Path(__file__).parent / "golden"
FOLDER = Path(os.environ.get("GOLDEN_DIR") or GOLDEN)
FILES = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
UNCOVERED = [stem for stem in FILES if find_adapter(stem) is None]
CASES = [
    case
    for stem, content in FILES.items()
    if stem not in UNCOVERED
    for case in read_cases(stem, content)
]


@pytest.fixture(scope="module")
def recorded_outcomes() -> Iterator[dict[str, list[Outcome]]]:
    "File -> what came of its cases; printed after the last one."
    outcomes: dict[str, list[Outcome]] = defaultdict(list)
    yield outcomes
    outcomes["all"] = [o for of_file in outcomes.values() for o in of_file]
    counts = {stem: (len(of), sum(bool(o.differs) for o in of)) for stem, of in outcomes.items()}
    lines = [
        f"{stem}: {ran} ran, of which {by_choice} differ by choice"
        for stem, (ran, by_choice) in counts.items()
    ]
    print("\n".join([*lines, *(f"{stem}: no adapter yet" for stem in UNCOVERED)]))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.file}-{case.name}")
def test_recorded_case(case: Case, recorded_outcomes: dict[str, list[Outcome]]) -> None:
    recorded_outcomes[case.file].append(find_adapter(case.file)(case))


@pytest.mark.skipif(FOLDER != GOLDEN, reason="other folders may hold files without an adapter")
def test_every_file_of_ours_has_an_adapter() -> None:
    assert FILES
    assert UNCOVERED == []


@pytest.mark.skipif(
    FOLDER != GOLDEN, reason="other cases may have been recorded with other defaults"
)
@pytest.mark.parametrize(
    "stem", [s for s in FILES if fnmatch(s, "loss_*__HEAD") or s == "trl_sapo"]
)
def test_our_defaults_are_the_recorded_ones(stem: str) -> None:
    defaults = FILES[stem]["defaults"]
    name = stem.split("__")[0].removeprefix("loss_")
    if stem == "trl_sapo":
        recorded = {k: defaults[k] for k in ("sapo_temperature_pos", "sapo_temperature_neg")}
    else:
        recorded = golden_adapters.surrogate_options(name, defaults)
        assert losses.LossOptions().tis_cap == defaults["tis"]["cap"]
    options = losses.LossOptions(policy_loss=recorded.pop("policy_loss", "sapo"))
    recorded.pop("kl_beta", None)  # ours is 0: no reference is opened unless a setting needs it
    for parameter, value in recorded.items():
        same_as_low = parameter == "eps_clip_high" and options.param(parameter) is None
        assert value in (
            (None, recorded["eps_clip"]) if same_as_low else (options.param(parameter),)
        ), parameter
