"Runs cases, asks the doctor, and counts how good its answers are."

from __future__ import annotations

import functools
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from rl_notebook.core.types import RLNotebookError
from rl_notebook.insight.doctor.doctor import Diagnosis, diagnose
from rl_notebook.runs.records import StepRecord

from .faults import CLEAN, NONE, Case, run_case
from .steps import Run, World, gap, gaps, opened

FAULTS = ("right", "second", "none, wrongly", "wrong, in doubt", "wrong, sure", "silent", "error")
OUTCOMES = {"known": FAULTS, "none": FAULTS, "clean": ("right", "false alarm", "error")}
SURE = 0.9  # a score that states a cause


@dataclass(frozen=True)
class Size:
    "How large a fault is, whatever anybody says of it."

    mean: float  # gap, nats, of the tokens that have one
    variation: float  # total variation of the law drawn from and the one asked for, mean; NaN where nobody knows it
    evidence: float  # nats, of all tokens for the law drawn from: what the best of tests could have
    far: float  # of tokens from a draw of the server's model, standard deviations


@dataclass(frozen=True)
class Answer:
    "What the doctor said of a case, and what that is worth."

    case: Case
    outcome: str
    cause: str
    score: float
    second: str
    gap: float  # nats
    floor: float  # the gap of the same step with nothing wrong
    size: Size
    seconds: float

    @property
    def counted(self) -> bool:
        "Whether there is anything to be found: more than another order of the same arithmetic makes."
        return self.case.kind.family in ("clean", "hidden") or self.gap > 2 * self.floor

    @property
    def row(self) -> dict[str, object]:
        "As plain values."
        c = self.case
        what = {"name": c.name, "kind": c.kind.name, "family": c.kind.family, "split": c.split, "right": c.kind.right}
        said = {"outcome": self.outcome, "cause": self.cause, "score": self.score, "second": self.second}
        size = {"gap": self.gap, "floor": self.floor, "counted": self.counted} | asdict(self.size)
        return what | said | size | {"seconds": self.seconds}


def section(case: Case) -> str:
    "What is asked of a case: a cause, that there is none, or that all is well."
    return "clean" if case.kind.family == "clean" else "none" if case.kind.right[0] == NONE else "known"


def worth(case: Case, d: Diagnosis) -> str:
    "The outcome of an answer."
    right = case.kind.right
    if d.cause in right:
        return "right"
    if section(case) == "clean":
        return "false alarm"
    others = (*d.undecided, *(f.cause for f in d.findings if f.cause != d.cause))
    if d.cause == CLEAN:
        return "silent"
    if right != (NONE,) and ({*d.undecided, *others[:1]} & {*right}):
        return "second"
    if d.cause == NONE:
        return "none, wrongly"
    return "wrong, sure" if d.score >= SURE and not d.undecided else "wrong, in doubt"


@functools.cache
def floors() -> dict[World, float]:
    "Gaps of steps with nothing wrong."
    return {}


async def floor_of(world: World) -> float:
    "The gap of the same step with nothing wrong."
    if world not in floors():
        floors()[world] = gap(await (await opened(world)).step())
    return floors()[world]


@torch.no_grad()
def size_of(run: Run, record: StepRecord) -> Size:
    "How large a fault is."
    apart = gaps(record)[1:]
    apart, surprise, spread = apart[np.isfinite(apart)], 0.0, 0.0
    for s in (s for g in record.groups for s in g.samples):
        logits = run.server.model(torch.tensor([s.tokens.tolist()])).logits[0, :-1].float() / (s.temperature or 1.0)
        law, mask = logits.log_softmax(-1).double(), torch.from_numpy(s.loss_mask[1:] > 0)
        entropy = -(law.exp() * law).sum(-1)
        own = law.gather(-1, torch.from_numpy(s.tokens[1:].copy())[:, None])[:, 0]
        surprise += float((-own - entropy)[mask].sum())
        spread += float(((law.exp() * law**2).sum(-1) - entropy**2)[mask].sum())
    known = run.server.variations
    mean, variation = (float(np.mean(v)) if len(v) else math.nan for v in (apart, known))
    evidence = run.server.evidence if known else math.nan
    return Size(mean, variation, evidence, surprise / max(spread, 1e-12) ** 0.5)


async def judged(case: Case, *, alone: bool = False, dry: bool = False, http: bool = False) -> Answer:
    "What the doctor says of a case: from the record alone, or with the machines; or nothing, if it is not asked."
    run = await opened(replace(case.world, http=http))
    try:
        return await answer_of(case, run, alone, dry)
    finally:
        await run.close()


async def answer_of(case: Case, run: Run, alone: bool, dry: bool) -> Answer:
    "What the doctor says of a case in this run."
    begin = time.perf_counter()
    try:
        record = await run_case(case, run)
    except RLNotebookError as error:  # the client has seen it before there was a record
        spent = time.perf_counter() - begin
        return Answer(case, "refused", error.what, 0.0, "", math.inf, 0.0, Size(*[math.nan] * 4), spent)
    found: dict[str, Any] = {"gap": gap(record), "size": size_of(run, record)}
    found["floor"] = 0.0 if section(case) == "clean" else await floor_of(case.world)
    if dry:
        return Answer(case, "not asked", "", 0.0, "", **found, seconds=time.perf_counter() - begin)
    try:
        d = await diagnose(record, backend=None if alone else run.backend)
    except Exception as error:  # the doctor must answer whatever a run did
        said = {"outcome": "error", "cause": f"{type(error).__name__}: {error}", "score": 0.0, "second": ""}
    else:
        second = next((f.cause for f in d.findings if f.cause != d.cause), "")
        said = {
            "outcome": worth(case, d),
            "cause": d.cause,
            "score": d.score,
            "second": "/".join(d.undecided) or second,
        }
    return Answer(case, **said, **found, seconds=time.perf_counter() - begin)


def counts(answers: Iterable[Answer]) -> Counter[str]:
    "Answers by outcome."
    return Counter(a.outcome for a in answers)


def tables(answers: list[Answer], verbose: bool) -> Iterator[str]:
    "The confusion table, a row per kind, and with `verbose` a line per case."
    counted = [a for a in answers if a.counted]
    titles = {"known": "a known cause", "none": "none of the known", "clean": "nothing is wrong"}
    for name, outcomes in OUTCOMES.items():
        n = counts(a for a in counted if section(a.case) == name)
        parts = "  ".join(f"{o} {n[o]}" for o in (*outcomes, "refused", "not asked") if n[o] or o in outcomes[:1])
        yield f"{titles[name]:<20}{sum(n.values()):>4} cases   {parts}"
    left = len(answers) - len(counted)
    yield f"{left} more cases have no gap above that of their clean step, and are not counted"
    yield ""
    for kind in dict.fromkeys(a.case.kind for a in answers):
        own = [a for a in answers if a.case.kind == kind]
        n = counts(a for a in own if a.counted)
        parts = "  ".join(f"{o} {n[o]}" for o in (*FAULTS, "false alarm", "refused", "not asked") if n[o])
        flat = sum(not a.counted for a in own)
        yield f"{kind.family:<12}{kind.name:<56}{parts}{f'  no gap {flat}' * bool(flat)}"
        for a in own if verbose else ():
            parts = f"gap {a.gap:.2g} mean {a.size.mean:.2g} (clean {a.floor:.1g})"
            parts += f" TV {a.size.variation:.2g}, {a.size.evidence:.2g} nats, z {a.size.far:+.1f}"
            said = f"{a.cause} {a.score:.2f}, then {a.second}"
            what = f"{str(a.case.strength)[:10]!r:<13}{a.case.setting:<7}seed {a.case.seed:<4}"
            yield f"    {a.outcome:<16}{what}{parts:<76}{said}"
