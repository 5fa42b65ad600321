"""What is on disk is what was in memory, whatever happens to the process, the disk or the files."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import math
import os
import resource
import stat
import tempfile
import warnings
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import synthetic_record
from tiny_models import byte_tokenizer, tiny_model

from rl_notebook.backends.local.trainer import open_local, read_folder
from rl_notebook.core.types import (
    Datum,
    Logprobs,
    LossOutput,
    PromptGroup,
    RecordError,
    RolloutSample,
)
from rl_notebook.runs.records import (
    StepRecord,
    decode,
    encode,
    read_record,
    staged_folder,
    write_record,
)
from rl_notebook.runs.run import RunFolder

CONFIG = {"base_model": "tiny", "dataset": "toy", "seed": 0, "kl_beta": 0.001, "tis": {"cap": 5.0}}


def same(a, b) -> bool:
    "Whether two values are the same in type, in every bit of a number, and all the way down."
    if is_dataclass(a):
        return type(a) is type(b) and all(
            same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a)
        )
    if isinstance(a, np.ndarray):
        if not isinstance(b, np.ndarray):
            return False
        alike = a.dtype == b.dtype and a.shape == b.shape
        return (
            alike
            and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
            and (a.dtype.kind != "f" or same_signs(a, b))
        )
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or (
            a == b and math.copysign(1, a) == math.copysign(1, b)
        )
    return type(a) is type(b) and a == b


def same_signs(a: np.ndarray, b: np.ndarray) -> bool:
    "Whether zeros have the same sign."
    return bool((np.signbit(a) == np.signbit(b))[~np.isnan(a)].all())


def write_and_read(record: StepRecord, folder: Path) -> StepRecord:
    "A record, written and read."
    with staged_folder(folder) as inside:
        write_record(record, inside)
    return read_record(folder)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    "A run of three steps."
    run = RunFolder.create(tmp_path / "run", CONFIG)
    for step in (1, 2, 3):
        run.add(synthetic_record(step, groups=3, completions=3))
    return run


# --- exact ------------------------------------------------------------------------------------------------------

floats = st.floats(width=64)
finite = st.floats(allow_nan=False, allow_infinity=False)
names = st.text(max_size=8)
# halves of surrogate pairs too
text = st.text(st.characters() | st.characters(categories=["Cs"]), max_size=8)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | floats | text | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(text | st.integers(), inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$float", "$tuple", "a"]), inner, max_size=2)
    ),
    max_leaves=6,
)


@st.composite
def samples(draw):
    "Any rollout sample."
    n = draw(st.integers(2, 6))
    mask = [0, *draw(st.lists(st.sampled_from([0, 1]), min_size=n - 1, max_size=n - 1))]
    mask[-1] = 1
    series = st.lists(floats, min_size=n, max_size=n)
    return RolloutSample(
        draw(st.lists(st.integers(0, 2**40), min_size=n, max_size=n)),
        draw(series),
        mask,
        draw(st.none() | floats),
        draw(st.sampled_from(["stop", "length", "abort"])),
        draw(text),
        draw(
            st.dictionaries(
                st.sampled_from(["correct", "format"]) | names, st.none() | floats, max_size=2
            )
        ),
        draw(st.none() | series),
        draw(st.integers(0, 9)),
        draw(floats),
        draw(st.booleans()),
        draw(st.dictionaries(text, plain, max_size=2)),
    )


@st.composite
def groups(draw, index=0):
    "Any prompt group, empty ones included."
    inside = draw(st.lists(samples(), max_size=3))
    advantages = draw(st.none() | st.lists(floats, min_size=len(inside), max_size=len(inside)))
    dropped = draw(st.lists(text, max_size=2).map(tuple))
    row = draw(st.dictionaries(text, plain, max_size=3))
    number = draw(st.integers(0, 10**9))
    return PromptGroup(inside, row, draw(text), index, advantages, dropped, number)


@st.composite
def datums(draw):
    "Any datum."
    n = draw(st.integers(2, 6))
    series = st.none() | st.lists(floats, min_size=n - 1, max_size=n - 1)
    weights = st.lists(st.sampled_from([0.0, 1.0]), min_size=n - 1, max_size=n - 1)
    advantage = draw(floats | st.lists(floats, min_size=n - 1, max_size=n - 1).map(np.array))
    three = (draw(series) for _ in range(3))
    ids = draw(st.lists(st.integers(0, 2**40), min_size=n, max_size=n))
    place = (draw(st.integers(0, 9)), draw(st.integers(0, 9)), draw(text), draw(st.integers(0, 9)))
    return Datum(ids, draw(weights), advantage, *three, *place)


@st.composite
def losses(draw):
    "Any loss output; its series need not fit the datums."
    lengths = draw(st.lists(st.integers(0, 4), max_size=3))
    arrays = [
        np.array(draw(st.lists(floats, min_size=n, max_size=n)), dtype=np.float64) for n in lengths
    ]
    provenance = (
        draw(st.sampled_from(["target", "token"])),
        draw(text),
        draw(st.none() | st.integers(0, 9)),
    )
    provenance = (*provenance, draw(floats), draw(st.booleans()), draw(text))
    logprobs = tuple(Logprobs(a, *provenance, draw(st.sampled_from([None, -a]))) for a in arrays)
    return LossOutput(
        draw(floats), draw(st.dictionaries(text, floats, max_size=2)), logprobs, tuple(arrays)
    )


@st.composite
def records(draw):
    "Any step record."
    return StepRecord(
        step=draw(st.integers(0, 10**6)),
        groups=[draw(groups(i)) for i in range(draw(st.integers(0, 3)))],
        datums=draw(st.lists(datums(), max_size=3)),
        loss=draw(st.none() | losses()),
        metrics=draw(st.dictionaries(text, floats, max_size=3)),
        options=draw(st.dictionaries(text, plain, max_size=3)),
        reason=draw(text),
        policy_version=draw(st.integers(0, 9)),
        seconds=draw(st.dictionaries(text, finite, max_size=2)),
        consumed=draw(st.integers(0, 10**6)),
        passes=draw(st.lists(st.integers(1, 9), max_size=3)),
        divided_by=draw(st.sampled_from(["none", "num_loss_tokens", "num_sequences"])),
    )


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(record=records())
def test_any_record_comes_back_as_it_was(record: StepRecord):
    with tempfile.TemporaryDirectory() as folder:
        assert same(write_and_read(record, Path(folder) / "r"), record)


@settings(max_examples=100, deadline=None)
@given(value=plain)
def test_any_plain_value_comes_back_as_it_was(value):
    assert same(decode(json.loads(json.dumps(encode(value), allow_nan=False))), value)


# --- readable by others -------------------------------------------------------------------------------------------


def test_the_files_need_nothing_of_this_package(run: RunFolder):
    def no_constant(name):
        raise AssertionError(f"{name} is not JSON")

    for path in [*run.path.rglob("*.json"), *run.path.rglob("*.jsonl")]:
        for line in (
            path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        ):
            json.loads(line, parse_constant=no_constant)
    record = run.record(2)
    table = pd.read_parquet(run.path / "steps/00002/completions.parquet")
    assert table["text"].tolist() == [s.text for g in record.groups for s in g.samples]
    assert table["rewards/correct"].tolist() == [
        s.rewards["correct"] for g in record.groups for s in g.samples
    ]
    tokens = pd.read_parquet(run.path / "steps/00002/tokens.parquet")
    assert tokens["token"].tolist() == [
        t for g in record.groups for s in g.samples for t in s.tokens
    ]
    assert yaml.safe_load((run.path / "config.yaml").read_text()) == CONFIG
    lines = pd.read_json(run.path / "metrics.jsonl", lines=True, precise_float=True)
    assert lines["reward"].tolist() == [r.metrics["reward"] for r in run]
    assert lines["seconds/sample"].tolist() == [0.8] * 3


def test_a_metric_may_not_hide_the_step(run: RunFolder):
    with pytest.raises(RecordError, match="names of metrics: got policy_version"):
        run.add(replace(synthetic_record(4), metrics={"policy_version": 1.0}))
    assert run.steps == [1, 2, 3]


# --- rejected, with the reason ------------------------------------------------------------------------------------


def rewrite(path: Path, **changes) -> None:
    "Change fields of a JSON file, as one that was written before such files had a checksum."
    plain = json.loads(path.read_text()) | changes
    plain.pop("sha256", None)
    path.write_text(json.dumps(plain))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"later": 1}, "unexpected keyword argument 'later'"),
        ({"groups": []}, "expected 0, the sum over the samples"),
        ({"step": 7}, "got step 7; expected step 2"),
    ],
)
def test_parts_that_do_not_fit_are_rejected(changes: dict, reason: str | None, run: RunFolder):
    rewrite(run.path / "steps/00002/record.json", **changes)
    with pytest.raises(RecordError, match=reason):
        run.record(2)


@pytest.mark.parametrize(
    "flip",
    [
        ('"step": 2', '"step" 2'),
        ('"policy_version": ', '"policy_version": "one", "of": '),
        ("{", "["),
    ],
)
def test_a_damaged_line_costs_that_line_and_its_record_replaces_it(
    flip: tuple[str, str], run: RunFolder
):
    run.log_metrics(1, {"eval/reward": 0.25})
    path = run.path / "metrics.jsonl"
    whole = run.metrics()
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], lines[1].replace(*flip), *lines[2:]]))
    with pytest.warns(UserWarning, match=r"metrics.jsonl, line 2: damaged and left out"):
        opened = RunFolder.open(run.path)
    assert "line 2: damaged and left out" in repr(opened)
    pd.testing.assert_frame_equal(opened.metrics(), whole, check_like=True)
    assert opened.rewind(2) is not None
    assert RunFolder.open(run.path).notes == ()


def test_a_damaged_record_costs_that_record(run: RunFolder):
    (run.path / "steps/00002/arrays.safetensors").write_bytes(b"other")
    with pytest.warns(UserWarning, match=r"step 2 is left out: .*arrays.safetensors: damaged"):
        assert [record.step for record in run] == [1, 3]
    with pytest.raises(RecordError, match=r"arrays.safetensors: damaged"):
        run.record(2)
    assert run.metrics().index.tolist() == [1, 2, 3]
    lines = (run.path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run.path / "metrics.jsonl").write_text(lines[0] + lines[2])
    with pytest.warns(UserWarning, match=r"step 2 is left out"):
        assert run.metrics().index.tolist() == [1, 3]


def test_a_folder_from_before_checksums_is_read(run: RunFolder):
    save(run, 3)
    whole = [*run]
    metrics = run.metrics()
    for path in [*run.path.rglob("record.json"), *run.path.rglob("checkpoint.json")]:
        rewrite(path)
    opened = RunFolder.open(run.path)
    assert (opened.config, opened.notes, opened.latest_checkpoint().step) == (CONFIG, (), 3)
    assert all(same(a, b) for a, b in zip(opened, whole, strict=True))
    pd.testing.assert_frame_equal(opened.metrics(), metrics)
    opened.add(synthetic_record(4))
    assert opened.metrics().index.tolist() == [1, 2, 3, 4]
    assert RunFolder.resume(run.path, CONFIG).config == CONFIG


def test_a_folder_that_earlier_versions_sealed_is_read(run: RunFolder):
    metrics = run.metrics()
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    sealed = [line | {"crc32": f"{zlib.crc32(json.dumps(line).encode()):08x}"} for line in lines]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in sealed))
    text = (run.path / "config.yaml").read_text()
    first = f"# sha256 of the lines below: {hashlib.sha256(text.encode()).hexdigest()}\n"
    (run.path / "config.yaml").write_text(first + text)
    opened = RunFolder.open(run.path)
    assert (opened.config, opened.notes) == (CONFIG, ())
    pd.testing.assert_frame_equal(opened.metrics(), metrics)


def contents(path: Path) -> tuple:
    "All that a run folder tells: settings, metrics, records, the state that training continues from."
    run = RunFolder.open(path)
    result = run.latest_checkpoint()
    state = read_folder(Path(result.state)) if result else None
    return (
        run.config,
        run.metrics(),
        [*run],
        replace(result, path=Path()) if result else None,
        state,
    )


def same_contents(a: tuple, b: tuple) -> bool:
    "Whether two readings of a run folder are the same."
    tensors = [
        {k: v.numpy() for k, v in t[0].items()} if (t := reading[4]) else {} for reading in (a, b)
    ]
    parts = [
        (r[0], r[1].to_dict(), r[2], r[3] and vars(r[3]) | {"state": ""}, r[4] and r[4][1])
        for r in (a, b)
    ]
    return same(parts[0], parts[1]) and same(*tensors)


def test_a_flipped_bit_is_rejected_named_or_harmless(tmp_path: Path):
    "Flips in every file of a run folder that is read; the counts are printed (`pytest -s`)."
    run = RunFolder.create(tmp_path / "run", CONFIG)
    backend = open_local(tiny_model(layers=1), byte_tokenizer(), reference=False, inline=True)
    for step in (1, 2):
        run.add(synthetic_record(step, groups=2, completions=2))
    run.log_metrics(2, {"eval/reward": 0.5})
    save(run, 2, backend.policy.save_state)
    whole = contents(run.path)
    rng = np.random.default_rng(0)
    counts = Counter()
    assert same_contents(contents(run.path), whole)
    # these may be edited by hand
    for name in sorted(files(run.path).keys() - {"config.yaml", "metrics.jsonl"}):
        path = run.path / name
        outcomes = Counter()
        data = path.read_bytes()
        for place in rng.integers(
            0, 8 * len(data), 162 if os.environ.get("SLOW") == "1" else 3
        ).tolist():
            flipped = bytearray(data)
            flipped[place // 8] ^= 1 << place % 8
            path.write_bytes(flipped)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    same_as_before = same_contents(contents(run.path), whole)
                    named = any(name.rpartition("/")[2] in str(w.message) for w in caught)
                    outcomes["named" if named else "harmless" if same_as_before else "TAKEN"] += 1
                except RecordError:
                    outcomes["rejected"] += 1
            assert "TAKEN" not in outcomes, (
                name,
                place,
                data[max(0, place // 8 - 40) : place // 8 + 40],
            )
        path.write_bytes(data)
        print(f"{name:45} {dict(outcomes)}")
        counts += outcomes
    print(f"{counts.total()} flips: {dict(counts)}")
    assert counts["rejected"] + counts["named"] > 0.8 * counts.total()


def test_a_folder_holds_one_run(run: RunFolder):
    with pytest.raises(RecordError) as error:
        RunFolder.create(run.path, CONFIG | {"kl_beta": 0.1, "tis": {"cap": 2.0}})
    assert str(error.value) == (
        f"{run.path}: the run folder holds another run: got 3 steps of a run with other settings: kl_beta (recorded"
        " 0.001, now 0.1), tis.cap (recorded 5.0, now 2.0); expected none. Choose another log_path, or resume the run"
        f" that is there: rl-notebook train --resume --log-path {run.path}."
    )
    with pytest.raises(RecordError, match="got 3 steps of a run with the same settings"):
        RunFolder.create(run.path, CONFIG | {"log_path": "elsewhere"})
    (run.path / "run.json").unlink()
    with pytest.raises(
        RecordError, match=r"got config\.yaml, metrics\.jsonl, steps; expected a folder without"
    ):
        RunFolder.create(run.path, CONFIG)
    assert len(list((run.path / "steps").iterdir())) == 3


# --- a full disk, a read-only folder, a killed process ------------------------------------------------------------


def files(folder: Path) -> dict[str, bytes]:
    "Every file in a folder."
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


def test_a_full_disk_leaves_nothing_half_written(run: RunFolder):
    before = files(run.path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # a real write that really stops in the middle
    resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, hard))
    try:
        with pytest.raises(
            RecordError, match=r"cannot write: got File too large .*Free some space"
        ):
            run.add(synthetic_record(4, groups=30, completions=8))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files(run.path) == before
    assert sorted(p.name for p in (run.path / "steps").iterdir()) == ["00001", "00002", "00003"]
    run.add(synthetic_record(4))
    assert run.metrics().index.tolist() == [1, 2, 3, 4]


def refused_by_the_disk(folder: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    "From here on `fsync` of a folder fails, as on file systems that have none."
    flush = os.fsync

    def fsync(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))
        flush(handle)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_a_file_system_that_cannot_flush_names_holds_a_run(
    number: int, run: RunFolder, tmp_path: Path, monkeypatch
):
    refused_by_the_disk(run.path, monkeypatch, number)
    with pytest.warns(UserWarning, match="the file system cannot flush the names of files"):
        run.add(synthetic_record(4))
    assert run.steps == [*run.metrics().index] == [1, 2, 3, 4]
    with pytest.warns(UserWarning, match="cannot flush"):
        fresh = RunFolder.create(tmp_path / "fresh", CONFIG)
    with pytest.warns(UserWarning, match="cannot flush"):
        assert save(fresh, 1).step == 1


def test_a_step_that_is_recorded_once_more_gets_what_is_missing(run: RunFolder):
    lines = (run.path / "metrics.jsonl").read_text()
    run.add(run.record(3))
    assert (run.path / "metrics.jsonl").read_text() == lines
    # the third was not written
    (run.path / "metrics.jsonl").write_text("".join(lines.splitlines(keepends=True)[:2]))
    run.add(run.record(3))
    assert [json.loads(line)["step"] for line in (run.path / "metrics.jsonl").open()] == [1, 2, 3]
    with pytest.raises(RecordError, match="recorded already: got 3, with other content"):
        run.add(replace(run.record(3), consumed=77))


# --- checkpoints ----------------------------------------------------------------------------------------------------


async def local_state(name: str) -> str:
    "A trainer that writes into the folder."
    Path(name).mkdir()
    (Path(name) / "model.safetensors").write_bytes(b"weights")
    return name


def save(run: RunFolder, step: int, save_state=local_state, **kwargs):
    "A checkpoint after a step."
    extra = {"window": (1, 2)}
    return asyncio.run(
        run.save_checkpoint(
            step, save_state, {"consumed": step}, policy_version=step - 1, extra=extra, **kwargs
        )
    )


# --- going back -----------------------------------------------------------------------------------------------------


def test_a_rewind_that_was_cut_short_is_finished_by_the_next(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
):
    whole = Path.rename
    moved = []

    def once(self: Path, target: Path) -> Path:
        if moved:
            raise KeyboardInterrupt
        moved.append(self.name)
        return whole(self, target)

    monkeypatch.setattr(Path, "rename", once)
    with pytest.raises(KeyboardInterrupt):
        run.rewind(1)
    monkeypatch.undo()
    assert moved == ["00003"]
    run.rewind(1)
    assert (run.steps, run.metrics().index.tolist()) == ([1], [1])
    assert sorted(p.name for p in run.path.glob("discarded/*/steps/*")) == ["00002", "00003"]


def test_a_creation_that_was_cut_off_is_begun_again(tmp_path):
    whole = RunFolder.create(tmp_path / "run", {"seed": 1})
    (whole.path / "run.json").unlink()
    again = RunFolder.create(tmp_path / "run", {"seed": 2})
    assert again.config == {"seed": 2}
    (again.path / "run.json").unlink()
    (again.path / "steps" / "00001").mkdir()
    with pytest.raises(RecordError, match="expected a folder without files of these names"):
        RunFolder.create(tmp_path / "run", {"seed": 3})
