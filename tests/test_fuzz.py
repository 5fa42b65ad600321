"""Whatever comes in from outside, what comes out is a value or one of our errors with its parts.

Each edge (settings, YAML, flags, rows, rewards, templates, run folders, answers of services) gets hostile input,
written down for the finds of the past and drawn at random for those to come; SLOW=1 draws ten times as many.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import io
import json
import math
import os
import shutil
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import byte_tokenizer, one_thread  # noqa: F401 (the fixture is used by every test)

from rl_notebook.backends.openai import OpenAISampler, probe
from rl_notebook.chat import encode_prompt
from rl_notebook.cli import parse_train
from rl_notebook.config import Config
from rl_notebook.settings import CONVERTED, NEUTRAL, RENAMED, SPELLED, leaf_types, sub_configs
from rl_notebook.core import RLNotebookError, SampleParams
from rl_notebook.data import load_rows, make_row
from rl_notebook.recipes.rl_loop import Problem, main
from rl_notebook.records import Run
from rl_notebook.retries import Retries
from rl_notebook.rewards import score_blocking
from rl_notebook.toy import load_model, toy_rows

MANY = 10 if os.environ.get("SLOW") == "1" else 1


def cases(default: int) -> settings:
    "So many examples by default, ten times as many under SLOW=1."
    quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=default * MANY, deadline=None, suppress_health_check=quiet)


def refused(do: Callable[[], Any]) -> RLNotebookError | None:
    "What `do` was refused with, or None; anything but an error of ours with its parts comes through."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            do()
        except RLNotebookError as error:
            check_parts(error)
            return error
    return None


def check_parts(error: RLNotebookError) -> None:
    "What, and got, expected or how to fix it; a text that every terminal takes, of bearable length."
    text = str(error)
    text.encode("utf-8")
    assert error.what, text
    more = (
        "; expected",
        "\n- ",
        ". ",
        ": got ",
        " leaves ",
        " is more than ",
        " gives up ",
    )  # rules of a config are sentences
    assert error.expected or error.fix or any(part in text for part in more), text
    assert len(text) < 6000, len(text)


# --- hostile values ---------------------------------------------------------------------------------------------------


class Mute:
    "A value that does not show itself."

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    __str__ = __repr__


class Liar:
    "A value that says that it is a number, and is none."

    def __float__(self) -> float:
        raise RuntimeError("no float")

    __index__ = __int__ = __bool__ = __len__ = __iter__ = __float__


LONELY = "half \ud83d of a pair"
NUMBERS: list[Any] = [
    0,
    1,
    -1,
    True,
    False,
    2,
    5,
    2**31,
    2**63,
    -(2**63) - 1,
    10**400,
    -(10**400),
    10**5000,
    0.5,
    -0.0,
    1e-300,
    5e-324,
    1e38,
    1e39,
    1e308,
    math.inf,
    -math.inf,
    math.nan,
    Decimal("1e-5"),
    Decimal("sNaN"),
    Fraction(1, 3),
    1j,
    np.float32(0.5),
    np.int64(3),
    np.array([1, 2]),
    np.array(7),
    np.float64("nan"),
]
TEXTS: list[Any] = [
    "",
    " ",
    "x",
    "\0",
    "a\0b",
    LONELY,
    "é",
    "1e5",
    "nan",
    "1" * 400,
    "x" * 300,
    "x/" * 300,
    "None",
    "auto",
]
ODD: list[Any] = [
    None,
    [],
    {},
    (),
    set(),
    b"bytes",
    [[]],
    [None],
    {"a": 1},
    {1: 2},
    {None: {}},
    [1, "a", None],
    object(),
    Mute(),
    [Mute()],
    Liar(),
    {"a": Mute()},
    range(3),
    datetime.date(2020, 1, 1),
    dict,
    len,
    ...,
]
VALUES = [*NUMBERS, *TEXTS, *ODD]
hostile = st.integers(0, len(VALUES) - 1).map(lambda i: VALUES[i])  # not all of them have a repr
json_values = st.recursive(
    st.sampled_from([None, True, False, 0, 1, -1, 2**63, 10**400, 0.5, 1e308, -1e308, *TEXTS[:7]]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "role", "content", "0", ""]), inner, max_size=3)
    ),
    max_leaves=6,
)

# --- settings ---------------------------------------------------------------------------------------------------------

NAMES = sorted({*leaf_types(Config), *sub_configs(Config), *RENAMED, *CONVERTED, *NEUTRAL, *SPELLED, "nonsense", ""})
plausible = st.sampled_from(
    [
        0,
        1,
        2,
        8,
        0.1,
        1.0,
        True,
        False,
        None,
        "local",
        "tinker",
        "fireworks",
        "openai",
        "ppo",
        "dapo",
        "gspo",
        "cispo",
        "async_rl_loop",
        "accounts/x/models/y",
        "http://127.0.0.1:1",
        ["gsm8k"],
        {},
    ]
)
some_settings = st.dictionaries(st.sampled_from(NAMES), hostile | plausible, min_size=1, max_size=4)


def use(cfg: Config, folder: Path) -> None:
    "All that is done with a config before anything is opened; what was written is read again."
    repr(cfg), cfg._repr_html_(), cfg.effective()
    cfg.sample_params(), cfg.adam(), cfg.loss_options(), cfg.to_dict()
    cfg.to_yaml(folder / "config.yaml").encode()
    assert Config.from_yaml(folder / "config.yaml") == cfg


def try_settings(given_: dict[str, Any], folder: Path) -> None:
    refused(lambda: use(Config.from_dict(given_), folder))


@cases(120)
@given(given_=some_settings)
def test_settings(given_: dict[str, Any], tmp_path: Path) -> None:
    try_settings(given_, tmp_path)


def try_sample_params(given_: dict[str, Any]) -> None:
    refused(lambda: SampleParams(**given_))


@cases(40)
@given(given_=st.dictionaries(st.sampled_from([f.name for f in dataclasses.fields(SampleParams)]), hostile, max_size=3))
def test_sample_params(given_: dict[str, Any]) -> None:
    try_sample_params(given_)


# --- YAML -------------------------------------------------------------------------------------------------------------

YAML = [
    "1: 2",
    "null: 3",
    "? [a, b]\n: 1",
    "? {a: b}\n: 1",
    "a: 1\na: 2",
    "learning_rate: " + "9" * 400,
    "seed: " + "9" * 5000,
    "seed: !!int x",
    "seed: !!float x",
    "seed: 2020-99-99",
    "seed: 2020-01-01",
    "[" * 3000,
    "{a: " * 3000,
    "rewards: " + "[" * 3000,
    "rewards: &a [*a]",
    "deployment: &a {extra_values: *a}",
    "deployment: {extra_values: {a: &b [*b]}}",
    'log_path: "\\ud83d"',
    'log_path: "a\\0b"',
    "log_path: " + "x" * 300,
    "log_path: ''",
    "!!python/object/apply:os.system [ls]",
    "\t- a",
    "a: b: c",
    "%",
    "--- a\n--- b",
    "seed: !!binary x",
    "!!set {a, b}",
    "dataset: !!timestamp x",
    "tis: 5",
    "tis: {1: 2}",
    "tis: {cap: {a: b}}",
    "deployment: {extra_values: {2020-01-01: 1}}",
    "deployment: {extra_values: !!set {a}}",
    "seed: 0x" + "f" * 400,
    "seed: 1:60:60",
    "<<: 1",
    "<<: {seed: 1}",
    "seed: .inf",
    "rewards: !!omap [a: 1]",
    "x: !!bool y",
    "seed: !!null 5",
    "a: &a [x,x]\nb: &b [*a,*a]",
]
yaml_text = (
    st.sampled_from(YAML)
    | st.builds(
        lambda name, value: f"{name}: {value}",
        st.sampled_from(NAMES),
        st.sampled_from([y.partition(": ")[2] or y for y in YAML]),
    )
    | st.text(alphabet=":-[]{}&*!|>%@#?,'\" \n\tab01.~<", max_size=30)
)


def try_yaml(text: str | bytes, folder: Path) -> None:
    path = folder / "given.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    refused(lambda: use(Config.from_yaml(path), folder))


@cases(30)
@given(text=yaml_text | st.binary(max_size=20))
def test_yaml(text: str | bytes, tmp_path: Path) -> None:
    try_yaml(text, tmp_path)


# --- the command ------------------------------------------------------------------------------------------------------

flag_values = st.sampled_from(
    [*(t for t in TEXTS), *(y.partition(": ")[2] or y for y in YAML), "-1", "99999", "cpu:7", "null", "-", "--"]
)
flags = st.lists(
    st.tuples(st.sampled_from([*NAMES, "config", "leftover", "resume"]), flag_values), min_size=1, max_size=3
).map(lambda pairs: [part for name, value in pairs for part in (f"--{name}", value)])


def try_parse(args: list[str]) -> None:
    with (
        contextlib.suppress(SystemExit),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        refused(lambda: parse_train(args))


@cases(30)
@given(args=flags)
def test_flags(args: list[str]) -> None:
    try_parse(args)


# --- rows -------------------------------------------------------------------------------------------------------------

COLUMNS = [
    "messages",
    "prompt",
    "question",
    "prompt_tokens",
    "prompt_token_ids",
    "answer",
    "ground_truth",
    "key",
    "id",
    "reward_model",
    "x",
]
records = st.dictionaries(st.sampled_from(COLUMNS), hostile | json_values, max_size=4)
messages = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "x"]), hostile | st.sampled_from(["user", "assistant", "hello"]), max_size=3
    ),
    max_size=3,
)
LINES = [
    b"null",
    b"5",
    b'"x"',
    b"[]",
    b"{}",
    b"[" * 3000,
    b'{"question": ' + b"[" * 3000,
    b'{"prompt_tokens": 5}',
    b'{"prompt_tokens": [true]}',
    b'{"prompt_tokens": "abc"}',
    b'{"prompt_tokens": {"1": 2}}',
    b'{"prompt_tokens": [1e400]}',
    b'{"prompt_tokens": [' + b"9" * 400 + b"]}",
    b'{"question": ' + b"9" * 5000 + b"}",
    b'{"messages": "x"}',
    b'{"messages": {"role": "user"}}',
    b'{"messages": [5]}',
    b'{"question": "\\ud83d"}',
    b'{"prompt": "\\ud83d"}',
    b'{"messages": [{"role": "user", "content": "\\ud83d"}]}',
    b'{"question": "a\\u0000b"}',
    b'{"messages": [{"role": "user"}]}',
    b'{"messages": [{"role": "user", "content": 5}]}',
    b'{"question": "x", "key": {}}',
    b"\xff\xfe",
    b'{"question": "x", "answer": ' + b"9" * 400 + b"}",
    b'{"question": NaN}',
    b"{" * 3000,
    b'{"a": 1',
    b"\0",
]

TOKENIZER = load_model("tiny")[1]


odd_sources = st.integers(0, len(NUMBERS) + len(ODD) - 1).map(lambda i: [*NUMBERS, *ODD][i])


def rows_and_prompts(source: Any) -> None:
    for row in load_rows(source):
        ids = encode_prompt(TOKENIZER, row, max_seq_len=512)
        assert all(type(t) is int and 0 <= t < len(TOKENIZER) for t in ids)


def try_rows(source: Any) -> None:
    refused(lambda: rows_and_prompts(source))


@cases(100)
@given(
    source=st.lists(records | messages.map(lambda m: {"messages": m}), max_size=2)
    | st.lists(hostile, max_size=2)
    | odd_sources
)
def test_rows(source: Any) -> None:
    try_rows(source)


def try_lines(data: bytes, folder: Path) -> None:
    (folder / "rows.jsonl").write_bytes(data)
    try_rows(str(folder / "rows.jsonl"))
    (folder / "rows.parquet").write_bytes(data)
    try_rows(str(folder / "rows.parquet"))


@cases(40)
@given(data=st.sampled_from(LINES) | st.binary(max_size=40))
def test_lines(data: bytes, tmp_path: Path) -> None:
    try_lines(data, tmp_path)


# --- rewards ----------------------------------------------------------------------------------------------------------


def raising(error: BaseException | type[BaseException]) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


FAILURES = [
    raising(e)
    for e in (
        ValueError("x"),
        GeneratorExit,
        SystemExit(3),
        MuteError(),
        RecursionError(),
        StopIteration,
        StopAsyncIteration,
        MemoryError(),
        BaseException("bare"),
        UnicodeEncodeError("utf-8", LONELY, 0, 1, "x"),
        ValueError(LONELY),
        asyncio.CancelledError(),
    )
]
outcomes = st.one_of(hostile.map(lambda v: lambda: v), st.sampled_from(FAILURES))
shapes = st.sampled_from(["native", "async", "trl", "trl list", "verl", "awaits"])


def grading(shape: str, outcome: Callable[[], Any]) -> Callable[..., Any]:
    "A reward function of some library's shape with this outcome."

    async def asynchronous(text: str) -> Any:
        await asyncio.sleep(0)
        return outcome()

    return {
        "native": lambda text: outcome(),
        "async": asynchronous,
        "trl": lambda prompts, completions, **columns: outcome(),
        "trl list": lambda prompts, completions, **columns: [outcome() for _ in completions],
        "verl": lambda data_source, solution_str, ground_truth, extra_info=None: {
            "score": outcome(),
            "other": outcome(),
        },
        "awaits": lambda text: asynchronous(text),
    }[shape]


def try_reward(shape: str, outcome: Callable[[], Any]) -> None:
    def grade() -> None:
        scores = score_blocking(["a", "b"], make_row({"question": "x", "answer": "1"}), grading(shape, outcome))
        assert all(math.isnan(t) or abs(t) < 1e150 for t in scores.totals)
        scores.to_frame()

    refused(grade)


@cases(80)
@given(shape=shapes, outcome=outcomes)
def test_rewards(shape: str, outcome: Callable[[], Any]) -> None:
    try_reward(shape, outcome)


# --- chat templates ---------------------------------------------------------------------------------------------------

TEMPLATES = [
    "{{ 1 / 0 }}",
    "{{ messages[99].content }}",
    "{{ messages.x.y.z }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ 'x' * 10**12 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{",
    "{% if %}",
    "{{ raise_exception('no') }}",
    "{{ messages | sort }}",
    "{{ messages[0].content | int / 0 }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ '\\ud83d' }}",
    "",
    "x",
    "{{ messages[0].content.encode('ascii') }}",
    "{{ {}['a'] }}",
    "{{ [][5] }}",
    "{{ none + 1 }}",
    "{{ strftime_now('%') }}",
    "{{ messages[0] }}",
    "{{ 1e400 | int }}",
]


def try_template(template: str) -> None:
    tokenizer = load_model("tiny")[1]
    tokenizer.chat_template = template
    row = make_row({"question": "What?", "answer": "1"})
    refused(lambda: encode_prompt(tokenizer, row, max_seq_len=512))


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates(template: str) -> None:
    try_template(template)


# --- run folders ------------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
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
    reward = lambda text: float(sum(map(ord, text)) % 7)
    cfg = Config(**SMALL, log_path=str(folder), dcp_save_interval=1)
    main(cfg, problem=Problem(load_rows(toy_rows(4)), [], reward), say=lambda line: None, progress=False)
    look(folder)
    return folder


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    "The way to each value inside a JSON value, up to two per list."
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
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


FILES = ["run.json", "steps/00001/record.json", "checkpoints/00002/checkpoint.json", "metrics.jsonl", "config.yaml"]
odd_json = st.sampled_from(
    [
        None,
        True,
        -1,
        0,
        10**400,
        1e308,
        "",
        "x",
        LONELY,
        [],
        {},
        [None],
        {"$float": "x"},
        {"$array": 1},
        {"$pairs": 5},
        {"$bytes": "é"},
        {"$tuple": 5},
        {"$nonsense": 1},
        {"a": {"b": []}},
        ...,
    ]
)


def look(folder: Path) -> None:
    "All that looking at a run reads."
    run = Run.open(folder)
    repr(run), run._repr_html_(), run.metrics(), run.latest_checkpoint()
    for step in run.steps:
        record = run.record(step)
        repr(record), record._repr_html_(), record.completions_table()


def try_run(finished: Path, folder: Path, name: str, change: Callable[[bytes], bytes]) -> RLNotebookError | None:
    work = folder / "run"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(finished, work, copy_function=os.link)
    path = work / name
    data = change(path.read_bytes())
    path.unlink()
    path.write_bytes(data)
    return refused(lambda: look(work))


def changed_json(pick: int, new: Any) -> Callable[[bytes], bytes]:
    "One place of a JSON file changed, its description signed again."

    def change(data: bytes) -> bytes:
        value = json.loads(data)
        value.pop("sha256", None)  # a foreign run may be signed by who wrote it
        ways = [p for p in places(value) if not p or p[0] not in ("files", "config")]
        way = ways[pick % len(ways)]
        return json.dumps(replaced(value, way, None if new is ... and not way else new)).encode(
            "utf-8", "surrogatepass"
        )

    return change


@cases(30)
@given(name=st.sampled_from(FILES[:3]), pick=st.integers(0, 10**6), new=odd_json)
def test_descriptions(name: str, pick: int, new: Any, finished: Path, tmp_path: Path) -> None:
    try_run(finished, tmp_path, name, changed_json(pick, new))


@pytest.mark.parametrize("where", [("metrics", "reward"), ("groups", 0, "samples", 0, "reward"), ("$array",)], ids=str)
def test_a_number_beyond_every_float(where: tuple[Any, ...], finished: Path, tmp_path: Path) -> None:
    def change(data: bytes) -> bytes:
        value = json.loads(data)
        del value["sha256"]
        where_ = where if where[0] in value else next(p for p in places(value) if p and p[-1] == where[0])
        return json.dumps(replaced(value, where_, 10**400)).encode()

    assert try_run(finished, tmp_path, FILES[1], change) is not None


def changed_bytes(at: float, new: bytes) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        place = int(at * len(data))
        return data[:place] + new + data[place + len(new) :]

    return change


@cases(25)
@given(
    name=st.sampled_from(FILES),
    at=st.floats(0, 1),
    new=st.binary(min_size=1, max_size=4)
    | st.sampled_from([b"\n", b"[" * 3000, b"9" * 5000, b'{"step": "x"}\n', b'{"step": 1, "reward": "x"}\n']),
)
def test_flipped_bytes(name: str, at: float, new: bytes, finished: Path, tmp_path: Path) -> None:
    try_run(finished, tmp_path, name, changed_bytes(at, new))


# --- answers of services ----------------------------------------------------------------------------------------------

RIGHT = {
    "object": "list",
    "data": [{"id": "tiny", "owned_by": "vllm", "max_model_len": 512}],
    "version": "1",
    "choices": [
        {
            "text": "a",
            "finish_reason": "stop",
            "token_ids": [5, 6],
            "prompt_token_ids": [1, 2, 3],
            "logprobs": {"tokens": ["a", "b"], "token_logprobs": [-0.5, -0.5]},
            "prompt_logprobs": [None, {"2": {"logprob": -1.0}}, {"3": {"logprob": -1.0}}],
        },
    ],
}


class Puppet:
    "A server of one thread that answers every request with these bytes."

    def __init__(self) -> None:
        self.answer = b""
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.socket.accept()
                with contextlib.suppress(OSError), connection:
                    connection.settimeout(5)
                    data = b""
                    while b"\r\n\r\n" not in data:
                        if not (more := connection.recv(65536)):
                            break
                        data += more
                    head, _, body = data.partition(b"\r\n\r\n")
                    size = next(
                        (
                            int(line.split(b":")[1])
                            for line in head.split(b"\r\n")
                            if line.lower().startswith(b"content-length:")
                        ),
                        0,
                    )
                    while len(body) < size:
                        body += connection.recv(65536)
                    connection.sendall(self.answer)

    def says(self, body: bytes, status: bytes = b"200 OK", kind: bytes = b"application/json", cut: int = 0) -> None:
        head = (
            b"HTTP/1.1 "
            + status
            + b"\r\nConnection: close\r\nContent-Type: "
            + kind
            + b"\r\nContent-Length: "
            + str(len(body) + cut).encode()
        )
        self.answer = head + b"\r\n\r\n" + body


@pytest.fixture(scope="module")
def puppet() -> Iterator[Puppet]:
    served = Puppet()
    yield served
    served.socket.close()


BODIES = [
    b"null",
    b"5",
    b'"x"',
    b"[]",
    b"{}",
    b"",
    b"\xff\xfe",
    b"<html>busy</html>",
    b"[" * 3000,
    b'{"choices": null}',
    b'{"choices": 5}',
    b'{"choices": [null]}',
    b'{"choices": {"a": 1}}',
    b'{"choices": [' + b"9" * 5000 + b"]}",
    b'{"data": 5}',
    b'{"data": [5]}',
    b'{"error": null}',
    b'{"error": {"message": {"a": [1]}}}',
]
ONCE = Retries(deadline_s=0.2, attempt_s=5, first_wait_s=0.2)


async def ask_openai(url: str) -> None:
    sampler = OpenAISampler(url, "tiny", None, dialect="vllm", retries=ONCE, kind="both")
    try:
        for call in (sampler.sample([1, 2, 3], SampleParams(max_tokens=2, seed=1)), sampler.logprobs([1, 2, 3])):
            with contextlib.suppress(RLNotebookError):
                await call
        await sampler.sample([1, 2, 3], SampleParams(max_tokens=2, seed=1))
        await probe(sampler, [1, 2, 3], 2)
    finally:
        await sampler.close()


def try_openai(puppet: Puppet, body: bytes, **options: Any) -> None:
    puppet.says(body, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refused(lambda: asyncio.run(ask_openai(puppet.url)))


def wrong_answer(pick: int, new: Any) -> bytes:
    ways = list(places(RIGHT))
    return json.dumps(
        replaced(RIGHT, ways[pick % len(ways)], None if new is ... and not ways[pick % len(ways)] else new)
    ).encode("utf-8", "surrogatepass")


answers = st.sampled_from(BODIES) | st.builds(wrong_answer, st.integers(0, 10**6), odd_json)


@cases(25)
@given(
    body=answers,
    status=st.sampled_from([b"200 OK", b"200 OK", b"200 OK", b"400 Bad", b"401 No", b"999 What"]),
    cut=st.sampled_from([0, 0, 0, 5]),
)
def test_answers_of_a_server(body: bytes, status: bytes, cut: int, puppet: Puppet) -> None:
    try_openai(puppet, body, status=status, cut=cut)


@pytest.mark.parametrize("name", list(Config().flat()))
def test_a_long_text_is_quoted_in_short(name: str) -> None:
    for text in ("{a: " * 3000, "x" * 9000):
        error = refused(lambda text=text: Config.from_dict({name: text}))
        assert error is None or len(str(error)) < 2500, (name, len(str(error)))
