"""Run folders that are damaged, half copied or made to harm: each costs one step, by name, and ends soon.

A folder has three steps; one file of the middle one is damaged, and the command line looks at all of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sqlite3
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from synthetic import synthetic_record

from rl_notebook.cli import main
from rl_notebook.core.types import RecordError
from rl_notebook.runs.records import read_arrays
from rl_notebook.runs.run import Run, RunFolder

FOREIGN = Path(__file__).parent / "foreign"
BLOCK = bytes(2**20)
pytestmark = pytest.mark.filterwarnings("ignore:step . is left out")


def bundles(place: Path) -> Path:
    "Three steps as bundles with npz; returns the file of the second."
    record = Run.open(FOREIGN / "slime").record(0)
    for step in (1, 2, 3):
        file = replace(record, step=step).save_bundle(place).with_suffix(".safetensors")
        np.savez_compressed(file.with_suffix(".npz"), **read_arrays(file))
        file.unlink()
    return place / "bundle_00002.npz"


def tables(place: Path) -> Path:
    shutil.copytree(FOREIGN / "trl", place, dirs_exist_ok=True)
    return next(place.rglob("completions_00002.parquet"))


def dumps(place: Path) -> Path:
    train = next((FOREIGN / "faulty" / "slime-system").rglob("train_data")).parent
    shutil.copytree(train, place, dirs_exist_ok=True)
    return place / "train_data" / "1.pt"


def json_lines(place: Path) -> Path:
    shutil.copytree(FOREIGN / "faulty" / "prime_rl_exports-stale", place, dirs_exist_ok=True)
    return next(place.rglob("step_1/rank_0.jsonl"))


def named_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def endless_file(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def sparse_file(file: Path) -> None:
    file.unlink()
    with file.open("wb") as f:
        f.truncate(2**40)


def cut_in_half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def zip_bomb(file: Path) -> None:
    "The same archive, one of whose members becomes 260 MB."
    members = {
        entry: zipfile.ZipFile(file).read(entry) for entry in zipfile.ZipFile(file).namelist()
    }
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, content in members.items():
            archive.writestr(
                name, BLOCK * 260 if name.endswith(("tokens.npy", "data/0")) else content
            )


def text_bomb(file: Path) -> None:
    "A long text once, and 100,000 rows that name it."
    texts = pa.DictionaryArray.from_arrays(
        pa.array(np.zeros(100_000, np.int32)), pa.array(["x" * 2_000_000])
    )
    pq.write_table(
        pa.table({"prompt": texts, "completion": texts, "advantage": np.zeros(100_000)}), file
    )


def number_bomb(file: Path) -> None:
    zeros = np.zeros(17_500_000, np.int64)
    pq.write_table(
        pa.table({"prompt": zeros, "completion": zeros}), file, row_group_size=len(zeros)
    )


def no_columns(file: Path) -> None:
    pq.write_table(pq.read_table(file).select(["step"]), file)


def bad_footer(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-120:-20] = bytes(100)
    file.write_bytes(data)


def change_arrays(
    **arrays: Callable[[dict[str, np.ndarray]], np.ndarray],
) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        result = read_arrays(file)
        np.savez(file, **{**result, **{name: change(result) for name, change in arrays.items()}})

    return damage


def no_numbers(file: Path) -> None:
    np.savez(file, **{**read_arrays(file), "tokens": np.array(["a"])})


def change_saved(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        torch.save(change(torch.load(file, weights_only=True)), file)

    return damage


def shared_lists(saved_value: dict[str, Any]) -> dict[str, Any]:
    "Ten lists in ten lists, nine times: a few bytes, a thousand million numbers."
    values: list[Any] = [0.0] * 10
    for _ in range(9):
        values = [values] * 10
    return {
        **saved_value,
        "samples": [{**sample, "tokens": values} for sample in saved_value["samples"]],
    }


def expanded_tensor(saved_value: dict[str, Any]) -> dict[str, Any]:
    "A tensor of one number that says it has 10^11."
    return {
        **saved_value,
        "samples": [{**s, "tokens": torch.zeros(1).expand(10**11)} for s in saved_value["samples"]],
    }


def half_a_line(file: Path) -> None:
    whole = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(whole[:2]) + whole[2][:50])


def infinite(file: Path) -> None:
    file.write_text(re.sub(r'("token_ids": ?\[)\d+', r"\g<1>1e400", file.read_text()))


def deep(file: Path) -> None:
    file.write_bytes(b"[" * 200_000 + b"\n")


CASES: dict[str, tuple[Callable[[Path], Path], Callable[[Path], None]]] = {
    **{
        f"bundle, {f.__name__}": (bundles, f)
        for f in (named_pipe, endless_file, sparse_file, cut_in_half, empty, zip_bomb, no_numbers)
    },
    "bundle, lengths below 0": (
        bundles,
        change_arrays(lengths=lambda a: np.r_[-5, a["lengths"][1:] + 5]),
    ),
    "bundle, lengths in part": (bundles, change_arrays(lengths=lambda a: a["lengths"] + 0.25)),
    **{
        f"table, {f.__name__}": (tables, f)
        for f in (named_pipe, sparse_file, text_bomb, number_bomb, no_columns, bad_footer)
    },
    **{
        f"dump, {f.__name__}": (dumps, f) for f in (named_pipe, endless_file, sparse_file, zip_bomb)
    },
    "dump, shared": (dumps, change_saved(shared_lists)),
    "dump, expanded": (dumps, change_saved(expanded_tensor)),
    "dump, infinite": (
        dumps,
        change_saved(lambda saved_value: {**saved_value, "samples": [{"tokens": float("inf")}]}),
    ),
    **{
        f"lines, {f.__name__}": (json_lines, f)
        for f in (named_pipe, sparse_file, half_a_line, infinite, deep)
    },
}


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_step_costs_that_step(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, damage = CASES[case]
    damage(make(tmp_path))
    began = time.process_time()
    run = Run.open(tmp_path)
    readable = []
    named = []
    for step in run.steps:
        try:
            run.record(step)
            readable.append(step)
        except RecordError as error:
            named.append((step, str(tmp_path) in str(error)))
    assert (len(readable) >= 2, named) in ((True, [(1, True)]), (True, [(2, True)]))
    assert main(["show", str(tmp_path)]) == 0
    assert [*run.metrics().index] == readable
    assert time.process_time() - began < 10


@pytest.mark.parametrize("where", ["a row", "no row"])
def test_a_store_that_never_ends_is_ended(where: str, tmp_path: Path) -> None:
    shutil.copytree(FOREIGN / "tinker_cookbook", tmp_path / "run")
    (store := tmp_path / "run" / "capture.sqlite").unlink(missing_ok=True)
    for other in (tmp_path / "run").rglob("capture.sqlite"):
        other.unlink()
    split = "'train'" if where == "a row" else "CASE WHEN i < 0 THEN 'train' ELSE 'test' END"
    numbers = "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM r)"
    with sqlite3.connect(store) as connection:
        columns = f"i AS cursor, 'a' AS sampling_session_id, 0 AS iteration, {split} AS split"
        connection.execute(f"CREATE VIEW wire_rows AS {numbers} SELECT {columns} FROM r")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl_notebook.runs.capture.QUERY_LIMIT_S", 0.5)
        patch.setattr("rl_notebook.runs.records.ALWAYS_UNPACKED", 2**24)
        with pytest.raises(RecordError, match=r"capture\.sqlite: not readable"):
            Run.open(tmp_path / "run").record(0)


def test_a_packed_file_of_many_steps_is_bounded(tmp_path: Path) -> None:
    shutil.copytree(FOREIGN / "prime_rl_monitors", tmp_path / "run")
    sealed = next((tmp_path / "run").rglob("*.jsonl.zst"))
    with pa.CompressedOutputStream(pa.OSFile(str(sealed), "wb"), "zstd") as stream:
        for _ in range(300):
            stream.write(BLOCK)
    with pytest.raises(RecordError, match="become more than"):
        _ = Run.open(tmp_path / "run").steps


# --- records of this package ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = RunFolder.create(tmp_path_factory.mktemp("own") / "run", {"base_model": "nothing"})
    for step in (1, 2, 3):
        run.add(synthetic_record(step))
    run.release()
    return run.path


def edit_record(path: Path, at: tuple[Any, ...], value: Any) -> None:
    "Put a value into a record, with a checksum that fits."
    plain = json.loads(path.read_text())
    part = plain
    for key in at[:-1]:
        part = part[key]
    part[at[-1]] = value
    plain.pop("sha256")
    plain["sha256"] = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(plain))


KINDS: tuple[tuple[tuple[Any, ...], Any], ...] = (
    (("step",), "2"),
    (("metrics", "reward"), "high"),
    (("metrics", "reward"), 10**400),
    (("seconds",), [1]),
    (("timeline",), {"$tuple": [{"$tuple": [1, 2, 3]}]}),
    (("policy_version",), None),
    (("reason",), 3),
    (("groups", 0, "samples", 0, "reward"), "1"),
    (("groups", 0, "samples", 0, "text"), 5),
    (("groups", 0, "samples", 0, "temperature"), []),
    (("groups", 0, "index"), 1.5),
    (("groups", 0, "row"), "text"),
    (("datums", 0, "group"), "0"),
    (("datums", 0, "sample"), 10**30),
    (("loss", "loss"), {}),
    (("options", "kl_beta"), "none"),
    (("loss", "logprobs", 0, "policy_version"), "new"),
)


@pytest.mark.parametrize(
    ("at", "value"), KINDS, ids=[f"{'.'.join(map(str, at))} {str(v)[:9]}" for at, v in KINDS]
)
def test_a_value_of_another_kind_costs_its_step(at, value, good_run: Path, tmp_path: Path) -> None:
    path = shutil.copytree(good_run, tmp_path / "run")
    edit_record(path / "steps" / "00002" / "record.json", at, value)
    with pytest.raises(RecordError, match="00002"):
        Run.open(path).record(2)
    assert [record.step for record in Run.open(path)] == [1, 3]
    assert main(["show", str(path)]) == 0


@pytest.mark.parametrize("name", ["²", "٣", "9" * 40, "arrays.safetensors", "tokens.parquet"])
def test_odd_names_and_foreign_bytes_in_a_folder_of_ours(
    name: str, good_run: Path, tmp_path: Path
) -> None:
    path = shutil.copytree(good_run, tmp_path / "run")
    record = path / "steps" / "00002"
    if (record / name).exists():
        (record / name).write_bytes(b"PAR1 of no use PAR1")
        about = {"bytes": 19, "sha256": hashlib.sha256((record / name).read_bytes()).hexdigest()}
        edit_record(record / "record.json", ("files", name), about)
    else:
        (path / "steps" / name).mkdir()
    expected = [1, 3] if (record / name).exists() else [1, 2, 3]
    assert [loaded.step for loaded in Run.open(path)] == expected
    assert main(["show", str(path)]) == 0


def test_a_file_that_is_large_for_a_reason_is_read(tmp_path: Path) -> None:
    "Zeros pack well; only what no step needs is rejected."
    np.savez_compressed(tmp_path / "a.npz", values=np.zeros(1_000_000))
    assert read_arrays(tmp_path / "a.npz")["values"].shape == (1_000_000,)


def test_a_sample_of_length_0_costs_that_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = bundles(tmp_path)
    before = Run.open(tmp_path).record(2)
    change_arrays(lengths=lambda a: np.r_[0, sum(a["lengths"][:2]), a["lengths"][2:]])(file)
    after = Run.open(tmp_path).record(2)
    count = sum(len(g.samples) for g in before.groups)
    assert sum(len(g.samples) for g in after.groups) == count - 1
    assert [g.dropped for g in after.groups if g.dropped] == [("no token was sampled",)]
    for place in ((), ("--step", "2")):
        assert main(["show", str(tmp_path), *place]) == 0


def test_settings_that_are_nested_without_end(good_run: Path, tmp_path: Path) -> None:
    path = shutil.copytree(good_run, tmp_path / "run")
    (path / "config.yaml").write_bytes(b"[" * 200_000)
    with pytest.raises(
        RecordError, match=r"config\.yaml: not readable: got lists and mappings 200,000 deep"
    ):
        Run.open(path)
