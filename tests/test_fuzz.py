"""Whatever comes in from outside, what comes out is a value or one of our errors with its parts.

Each edge (settings, YAML, rows, run folders) gets hostile input, listed for the finds of the past and drawn at
random for those to come; SLOW=1 draws ten times as many.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import byte_tokenizer, one_thread  # noqa: F401 (the fixture is used by every test)

from rl_notebook.config.config import Config
from rl_notebook.config.aliases import NEUTRAL, OTHER_WORDS, RENAMED, SPELLED
from rl_notebook.core.validation import leaf_types, sub_configs
from rl_notebook.core.types import RLNotebookError
from rl_notebook.recipes.rl_loop import Problem, main
from rl_notebook.runs.run import Run
from rl_notebook.task.chat import encode_prompt
from rl_notebook.task.data import load_rows
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_rows

MANY = 10 if os.environ.get("SLOW") == "1" else 1


def cases(default: int) -> settings:
    "So many examples by default, ten times as many under SLOW=1."
    quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=default * MANY, deadline=None, suppress_health_check=quiet)


def error_of(do: Callable[[], Any]) -> RLNotebookError | None:
    "What `do` was rejected with, or None; anything but an error of ours with its parts comes through."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            do()
        except RLNotebookError as error:
            check_parts(error)
            return error
    return None


def check_parts(error: RLNotebookError) -> None:
    "It has its parts, in a text that every terminal takes, of limited length."
    text = str(error)
    text.encode("utf-8")
    assert error.what, text
    assert len(text) < 6000, len(text)


# --- hostile values ---------------------------------------------------------------------------------------------------


LONELY = "half \ud83d of a pair"
NUMBERS: list[Any] = [
    0, 1, -1, True, 5, 2**63, 10**400, 0.5, -0.0, 5e-324, 1e39, math.inf, -math.inf, math.nan, Fraction(1, 3),
    np.float32(0.5), np.int64(3), np.array([1, 2]),
]  # fmt: skip
TEXTS: list[Any] = [
    "",
    " ",
    "a\0b",
    LONELY,
    "é",
    "1e5",
    "nan",
    "1" * 400,
    "x/" * 300,
    "None",
    "auto",
]
OTHERS: list[Any] = [
    None,
    [],
    {},
    set(),
    b"bytes",
    [None],
    {"a": 1},
    {1: 2},
    [1, "a", None],
    object(),
    len,
    ...,
]
VALUES = [*NUMBERS, *TEXTS, *OTHERS]
hostile = st.integers(0, len(VALUES) - 1).map(lambda i: VALUES[i])  # not all of them have a repr
json_values = st.recursive(
    st.sampled_from([None, True, 0, -1, 2**63, 10**400, 0.5, 1e308, *TEXTS[:6]]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "role", "content", "0", ""]), inner, max_size=3)
    ),
    max_leaves=6,
)

# --- settings ---------------------------------------------------------------------------------------------------------

NAMES = sorted(
    {
        *leaf_types(Config),
        *sub_configs(Config),
        *RENAMED,
        *OTHER_WORDS,
        *NEUTRAL,
        *SPELLED,
        "nonsense",
        "",
    }
)
plausible = st.sampled_from(
    [
        0,
        1,
        8,
        0.1,
        True,
        None,
        "local",
        "tinker",
        "openai",
        "ppo",
        "gspo",
        "async_rl_loop",
        "http://x",
        ["gsm8k"],
        {},
    ]
)
some_settings = st.dictionaries(st.sampled_from(NAMES), hostile | plausible, min_size=1, max_size=4)


def use_config(cfg: Config, folder: Path) -> None:
    "All that is done with a config before anything is opened; what was written is read again."
    repr(cfg), cfg._repr_html_(), cfg.effective()
    cfg.sample_params(), cfg.adam(), cfg.loss_options(), cfg.to_dict()
    cfg.to_yaml(folder / "config.yaml").encode()
    assert Config.from_yaml(folder / "config.yaml") == cfg


@cases(120)
@given(options=some_settings)
def test_settings(options: dict[str, Any], tmp_path: Path) -> None:
    with suppress(OverflowError):  # Python's own, of a number of 400 digits
        error_of(lambda: use_config(Config.from_dict(options), tmp_path))


# --- YAML -------------------------------------------------------------------------------------------------------------

YAML = [
    "1: 2", "? [a, b]\n: 1", "a: 1\na: 2", "seed: " + "9" * 5000, "seed: !!int x", "seed: 2020-99-99", "[" * 3000,
    "rewards: &a [*a]", "deployment: {extra_values: {a: &b [*b]}}", 'log_path: "\\ud83d"', 'log_path: "a\\0b"',
    "log_path: " + "x" * 300, "!!python/object/apply:os.system [ls]", "a: b: c", "--- a\n--- b", "seed: !!binary x",
    "!!set {a, b}", "tis: {1: 2}", "tis: {cap: {a: b}}", "seed: 1:60:60", "<<: 1", "seed: .inf", "seed: !!null 5",
]  # fmt: skip
yaml_text = (
    st.sampled_from(YAML)
    | st.builds(
        lambda name, value: f"{name}: {value}",
        st.sampled_from(NAMES),
        st.sampled_from([y.partition(": ")[2] or y for y in YAML]),
    )
    | st.text(alphabet=":-[]{}&*!|>%@#?,'\" \n\tab01.~<", max_size=30)
)


@cases(30)
@given(text=yaml_text | st.binary(max_size=20))
def test_yaml(text: str | bytes, tmp_path: Path) -> None:
    path = tmp_path / "given.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    error_of(lambda: use_config(Config.from_yaml(path), tmp_path))


# --- rows -------------------------------------------------------------------------------------------------------------

COLUMNS = [
    "messages",
    "prompt",
    "question",
    "prompt_tokens",
    "answer",
    "ground_truth",
    "key",
    "reward_model",
    "x",
]
records = st.dictionaries(st.sampled_from(COLUMNS), hostile | json_values, max_size=4)
messages = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "x"]),
        hostile | st.sampled_from(["user", "assistant", "hello"]),
        max_size=3,
    ),
    max_size=3,
)
LINES = [
    b"null", b'"x"', b"[]", b"{}", b"[" * 3000, b'{"question": ' + b"[" * 3000, b'{"prompt_tokens": 5}', b'{"a": 1',
    b'{"prompt_tokens": [true]}', b'{"prompt_tokens": {"1": 2}}', b'{"prompt_tokens": [1e400]}', b'{"messages": "x"}',
    b'{"question": ' + b"9" * 5000 + b"}", b'{"messages": [5]}', b'{"prompt": "\\ud83d"}', b'{"question": NaN}',
    b'{"messages": [{"role": "user", "content": 5}]}', b'{"question": "x", "key": {}}', b"\xff\xfe", b"\0",
]  # fmt: skip

TOKENIZER = load_model("tiny")[1]


odd_sources = st.integers(0, len(NUMBERS) + len(OTHERS) - 1).map(lambda i: [*NUMBERS, *OTHERS][i])


def rows_and_prompts(source: Any) -> None:
    for row in load_rows(source):
        ids = encode_prompt(TOKENIZER, row, max_seq_len=512)
        assert all(type(t) is int and 0 <= t < len(TOKENIZER) for t in ids)


@cases(100)
@given(
    source=st.lists(records | messages.map(lambda m: {"messages": m}), max_size=2)
    | st.lists(hostile, max_size=2)
    | odd_sources
)
def test_rows(source: Any) -> None:
    error_of(lambda: rows_and_prompts(source))


@cases(40)
@given(data=st.sampled_from(LINES) | st.binary(max_size=40))
def test_lines(data: bytes, tmp_path: Path) -> None:
    for name in ("rows.jsonl", "rows.parquet"):
        (tmp_path / name).write_bytes(data)
        error_of(lambda name=name: rows_and_prompts(str(tmp_path / name)))


# --- run folders ------------------------------------------------------------------------------------------------------

SMALL_RUN: dict[str, Any] = {
    "max_rows": 4,
    "prompt_groups_per_step": 2,
    "completions_per_prompt": 2,
    "max_completion_tokens": 4,
    "max_seq_len": 64,
    "learning_rate": 1e-3,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "A run of two steps with checkpoints."
    folder = tmp_path_factory.mktemp("finished") / "run"

    def reward(text):
        return float(sum(map(ord, text)) % 7)

    cfg = Config(**SMALL_RUN, log_path=str(folder), dcp_save_interval=1)
    main(
        cfg,
        problem=Problem(load_rows(toy_rows(4)), [], reward),
        say=lambda line: None,
        progress=False,
    )
    read_run(folder)
    return folder


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    "The way to each value inside a JSON value, up to two per list."
    yield path
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:2])
        if isinstance(value, list)
        else ()
    )
    for key, inside in inner:
        yield from places(inside, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    "A copy of a JSON value with one place changed; `...` takes it away."
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1 and new is ...:
        del copy[path[0]]
    else:
        copy[path[0]] = replaced(copy[path[0]], path[1:], new)
    return copy


FILES = [
    "run.json",
    "steps/00001/record.json",
    "checkpoints/00002/checkpoint.json",
    "metrics.jsonl",
    "config.yaml",
]
ODD_JSON = [
    None, True, -1, 10**400, 1e308, "", LONELY, [], {}, [None], {"$float": "x"}, {"$array": 1}, {"$nonsense": 1}, ...,
]  # fmt: skip
odd_json = st.sampled_from(ODD_JSON)


def read_run(folder: Path) -> None:
    "All that looking at a run reads."
    run = Run.open(folder)
    repr(run), run._repr_html_(), run.metrics(), run.latest_checkpoint()
    for step in run.steps:
        record = run.record(step)
        repr(record), record._repr_html_(), record.completions_table()


def try_run(
    finished: Path, folder: Path, name: str, change: Callable[[bytes], bytes]
) -> RLNotebookError | None:
    work = folder / "run"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(finished, work, copy_function=os.link)
    path = work / name
    data = change(path.read_bytes())
    path.unlink()
    path.write_bytes(data)
    return error_of(lambda: read_run(work))


def changed_json(pick: int, new: Any) -> Callable[[bytes], bytes]:
    "One place of a JSON file changed, its description signed again."

    def change(data: bytes) -> bytes:
        value = json.loads(data)
        value.pop("sha256", None)  # a foreign run may be signed by who wrote it
        candidates = [p for p in places(value) if not p or p[0] not in ("files", "config")]
        place = candidates[pick % len(candidates)]
        return json.dumps(replaced(value, place, None if new is ... and not place else new)).encode(
            "utf-8", "surrogatepass"
        )

    return change


@cases(30)
@given(name=st.sampled_from(FILES[:3]), pick=st.integers(0, 10**6), new=odd_json)
def test_descriptions(name: str, pick: int, new: Any, finished: Path, tmp_path: Path) -> None:
    "Values of other kinds, signed again: an error of ours, or one of Python's at once."
    with suppress(TypeError, ValueError, AttributeError, KeyError, IndexError):
        try_run(finished, tmp_path, name, changed_json(pick, new))
