"Rows from every source, the download cache, the cursor, and the sample that ships."

import ast
import json
import threading
import tracemalloc
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from errors import failed
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.config.config import Config
from rl_notebook.task.data import Cursor, Row, load_rows, restore_cursor
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.recipes.rl_loop import load_problem

SAMPLE = Path(__file__).parents[1] / "examples" / "gsm8k" / "sample.jsonl"
CHAT = [{"role": "user", "content": "48/2+48?"}]


# --- every source gives the same rows


def test_jsonl_parquet_frame_list_and_hf_dataset_agree(tmp_path):
    records = [{"id": f"q{i}", "messages": CHAT, "answer": str(i), "level": i} for i in range(5)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    frame = pd.DataFrame(records)
    frame.to_parquet(tmp_path / "d.parquet")
    expected = load_rows(records)
    assert load_rows(tmp_path / "d.jsonl") == expected
    assert load_rows(str(tmp_path / "d.parquet")) == expected
    assert load_rows(frame) == expected
    datasets = pytest.importorskip("datasets")
    assert load_rows(datasets.Dataset.from_list(records)) == expected
    assert load_rows(datasets.Dataset.from_list(records).to_iterable_dataset()) == expected
    columns = {name: [record.get(name) for record in records] for name in records[0]}
    assert load_rows(columns) == expected
    assert load_rows(pa.table(columns)) == expected
    failed(
        lambda: load_rows({"question": ["a", "b"], "answer": ["1"]}),
        "columns",
        expected="one length",
    )
    failed(lambda: load_rows({"train": records, "test": records}), "splits")
    splits = datasets.DatasetDict(train=datasets.Dataset.from_list(records))
    failed(
        lambda: load_rows(splits),
        "splits",
        got="['train']",
        expected="one data set",
        fix="Pick a split",
    )


def test_a_column_of_another_name_is_reported_with_the_setting_that_names_it():
    records = [{"problem": "1+1?", "result": "2"}]
    for columns, named in (
        ({}, "'question': 'its name', 'answer': 'its name'"),
        ({"question": "problem"}, "'answer': 'its name'"),
    ):

        def call(columns=columns):
            return load_rows(records, columns=columns, require_answer=True)

        failed(call, fix=f"columns={{{named}}} of load_rows, which is dataset_columns in a config")
    (row,) = load_rows(
        records, columns={"question": "problem", "answer": "result"}, require_answer=True
    )
    assert (row.messages[0]["content"], row.answer) == ("1+1?", "2")


def test_empty_cells_count_as_absent():
    frame = pd.DataFrame(
        {
            "prompt": ["a=", None],
            "question": [None, "b?"],
            "answer": [1, None],
            "label": [None, "x"],
        }
    )
    rows = load_rows(frame.convert_dtypes())
    assert (rows[0].prompt, rows[1].messages[0]["content"]) == ("a=", "b?")
    assert [r.answer for r in rows] == [1, "x"]
    for empty in ("  ", None, float("nan"), []):
        failed(
            lambda empty=empty: load_rows([{"prompt": "a"}, {"prompt": empty}]),
            "prompt",
            where="record 1",
            expected="not empty",
        )
    failed(
        lambda: load_rows([{"prompt": "a"}, {"prompt": "\ud800"}]),
        "prompt",
        where="record 1",
        expected="UTF-8",
    )
    for cell in (pd.Series([1, 2]), np.array(5)):  # no truth value, or no length
        assert load_rows([{"prompt": "a", "answer": cell}])[0].answer is cell


TALK = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


@pytest.mark.parametrize(
    "written",
    [
        json.dumps(TALK),
        json.dumps(TALK, indent=1),
        repr(TALK),
        json.dumps(TALK[0]),
        json.dumps({"messages": TALK}),
    ],
)
def test_a_conversation_that_a_cell_holds_as_text_is_one(written, tmp_path):
    pd.DataFrame({"prompt": [written], "answer": ["4"]}).to_csv(tmp_path / "d.csv", index=False)
    held = ast.literal_eval(written)
    for source in (
        tmp_path / "d.csv",
        [{"messages": written}],
        [{"question": written}],
        [{"prompt": held}],
    ):
        assert [m["content"] for m in load_rows(source)[0].messages] == ["2+2?"]


@pytest.mark.parametrize(
    "text", ['{"content": "x"}\nSummarize it.', '[{"a": 1}]', "[1, 2] has which sum?", "{'a': 1}"]
)
def test_a_text_that_only_looks_like_json_is_a_prompt(text):
    assert load_rows([{"prompt": text}])[0].prompt == text
    assert load_rows([{"question": text}])[0].messages[0]["content"] == text


OTHERS = [  # what a cell may hold that is no prompt
    *(
        '[{"role": "user", ',
        f"array([{TALK[0]}], dtype=object)",
        '[{"from": "human", "value": "2+2?"}]',
    ),
    *(
        [1, 2],
        ["2+2?"],
        [{"role": 1}],
        [{"role": "user", "content": float("nan")}],
        {"role": ["user"]},
        {"a"},
    ),
    *(b"2+2?", 3.5, True, pd.Series(["2+2?"]), np.array(["a", "b"]), pd.Timestamp("2026-01-01")),
]


@pytest.mark.parametrize("value", OTHERS, ids=repr)
def test_a_prompt_of_another_type_is_rejected_with_row_and_column(value):
    error = failed(lambda: load_rows([{"prompt": "2+2?"}, {"prompt": value}]), where="record 1")
    assert "prompt" in f"{error.where} {error.what}", "the column is named"


def test_a_column_that_no_record_holds_is_named_before_anything_is_sampled():
    class Own:
        pass

    backend = open_local("tiny")
    for name, value in {
        "tags": {1},
        "own": Own(),
        "many": pd.Series([1]),
        "deep": {"a": [{"b": {1}}]},
    }.items():
        rows = [{"id": "q1", "question": "1+1?"}, {"id": "q2", "question": "1+2?", name: value}]

        def call(rows=rows):
            return GRPOLoop(backend, rows, lambda text: 0.0)

        failed(call, f"column '{name}'", where="row 'q2'", fix="leave it out")


def test_names_that_are_no_file_get_the_way_to_what_is_meant():
    for name in ("gsm8k", "nowhere.jsonl"):

        def call(name=name):
            return load_problem(Config(dataset=name))

        failed(call, "no such file or data set", got=name, fix="as openai/gsm8k")


# --- bad input says what, where, got, expected, fix


def test_missing_answer_is_an_error_only_when_asked():
    records = [{"question": "a", "answer": "1"}, {"question": "b", "answer": None}]
    assert load_rows(records)[1].answer is None

    def load_with_answers():
        return load_rows(records, require_answer=True)

    failed(
        load_with_answers,
        "no answer",
        where="record 1",
        got="columns question, answer",
        fix="a reward that needs no answer",
    )


# --- files of every kind

KINDS = {  # name: what is in it
    "d.jsonl": b'\xef\xbb\xbf{"question": "a", "answer": "012", "n": null}\n\n{"question": "b", "answer": 7, "n": 3}\n',
    "d.json": b' [{"question": "a", "answer": "012", "n": null}, {"question": "b", "answer": 7, "n": 3}]',
    "lines.json": b'{"question": "a", "answer": "012", "n": null}\n{"question": "b", "answer": 7, "n": 3}\n',
    "d.csv": b'\xef\xbb\xbfquestion,answer,n\na,012,\n"b",7,3\n',
}


@pytest.mark.parametrize("name", KINDS)
def test_files_of_every_kind_keep_their_values(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    path = f"data/{name}"  # a relative path of two parts is no name on the hub
    Path(path).write_bytes(KINDS[name])
    rows = load_rows(path, require_answer=True)
    text = name.endswith("csv")
    assert [(r.messages[0]["content"], r.answer) for r in rows] == [
        ("a", "012"),
        ("b", "7" if text else 7),
    ]
    assert [r.data["n"] for r in rows] == (["", "3"] if text else [None, 3])
    assert load_problem(Config(dataset=path)).rows == rows


BROKEN = {  # name: what is in it, where, got
    "d.csv": (b'question,answer\na,1\nb,"2', "d.csv", "Error after d.csv, line 2: unexpected end"),
    "many.csv": (b"question,answer\na,1,2\n", "many.csv, line 2", "{'question': 'a'"),
    "d.json": (b'[{"question": "a"}', "d.json", "JSONDecodeError: Expecting"),
    "d.pq": (b"question", "d.pq", "ArrowInvalid"),
    "d.jsonl": (b'{"question": "a"}\n{', "d.jsonl, line 2", "b'{'"),
    "d.jsonl.gz": (b"\x1f\x8b", "d.jsonl.gz", ".gz"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_broken_is_named_with_its_place(tmp_path, name):
    content, where, got = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    failed(lambda: load_rows(tmp_path / name), where=where, got=got)


def test_everything_that_a_row_lacks_is_reported_at_once(tmp_path):
    def judge(text, answer, level): ...

    (tmp_path / "d.jsonl").write_text('{"id": "q1", "text": "1+1?"}')
    backend = open_local("tiny")
    lacks = "no prompt, no answer, no level"
    custom_reward = f"{__name__}:needs"
    for reads, call in (
        (
            "'needs'",
            lambda: load_problem(
                Config(dataset=str(tmp_path / "d.jsonl"), rewards=["gsm8k", custom_reward])
            ),
        ),
        ("'judge'", lambda: GRPOLoop(backend, str(tmp_path / "d.jsonl"), ["gsm8k", judge])),
    ):
        failed(
            call,
            lacks,
            expected=f"(read by reward function 'gsm8k' and reward function {reads}), and",
        )
        expected = f"a column level (read by reward function {reads})"
        failed(
            call, lacks, got="columns id, text", expected=expected, fix="columns={'question': 'its"
        )
    rows = load_rows([{"question": "1+1?"}])
    failed(
        lambda: GRPOLoop(backend, rows, judge),
        "no answer, no level",
        where="row '0'",
        got="columns question",
    )

    def named():
        return load_rows([{"q": "a"}], columns={"question": "problem"}, require=["answer"])

    failed(
        named,
        "column 'problem' (for 'question'), no answer",
        got="columns q",
        expected="to be there",
    )
    # a reward that reads none needs none
    assert GRPOLoop(backend, rows, lambda text: 1.0).rows == rows

    def trl(completions, answer, **kw):
        return [None]

    other = load_rows([{"question": "a", "answer": None}])
    assert GRPOLoop(backend, other, trl).rows == other  # of a task that it leaves to another
    failed(
        lambda: GRPOLoop(backend, rows, trl), "no answer", where="row '0'", got="columns question"
    )
    failed(lambda: GRPOLoop(backend, other, ["gsm8k", trl]), "no answer", where="row '0'")


def needs(text, answer, level): ...


# --- addresses, against a real server


@pytest.fixture
def server():
    class Handler(BaseHTTPRequestHandler):
        body = b'{"question": "1+1?", "answer": "2"}\n'

        def do_GET(self):
            short = self.path.startswith("/short")
            blank = 256 * self.path.startswith("/long")
            self.send_response(404 if self.path.startswith("/missing") else 200)
            self.send_header("Content-Length", str(len(self.body) + 100 * short + (blank << 16)))
            self.end_headers()
            self.wfile.write(self.body)
            for _ in range(blank):
                self.wfile.write(b"\n" * (1 << 16))

        def log_message(self, *args):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=partial(httpd.serve_forever, poll_interval=0.01))
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_an_address_is_read_and_what_fails_shows_no_secret(server):
    assert load_rows(f"{server}/train.jsonl?token=secret")[0].answer == "2"
    tracemalloc.start()
    assert len(load_rows(f"{server}/long.jsonl", max_rows=1)) == 1
    assert tracemalloc.get_traced_memory()[1] < 8 << 20  # of the 16 MiB that it has
    tracemalloc.stop()
    for address, got in (
        (f"{server}/missing.jsonl?token=secret", "status 404 Not Found"),
        (f"{server}/short.jsonl?token=secret", "RemoteProtocolError"),
        ("http://127.0.0.1:9/x.jsonl", "ConnectError"),
    ):
        error = failed(
            lambda address=address: load_rows(address),
            "download",
            got=got,
            fix="Check URL and network",
        )
        assert "secret" not in str(error)


# --- the cursor


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 9),
    seed=st.integers(0, 99),
    epochs=st.integers(1, 3),
    cuts=st.lists(st.integers(1, 7), max_size=8),
)
def test_cursor_visits_each_row_once_an_epoch_and_resumes_anywhere(n, seed, epochs, cuts):
    start = Cursor([Row(key=str(i), prompt="x") for i in range(n)], seed=seed, epochs=epochs)
    whole, end = start.take(10_000)
    assert end.exhausted
    for e in range(epochs):
        assert sorted(r.key for r in whole[e * n : (e + 1) * n]) == sorted(str(i) for i in range(n))
    visited = []
    cursor = start
    for k in cuts:
        rows, cursor = cursor.take(k)
        visited += rows
        cursor = restore_cursor(start, json.loads(json.dumps(cursor.state())))
    assert visited == whole[: len(visited)]
    assert visited + cursor.take(10_000)[0] == whole


# --- the sample that ships


def test_other_rows_are_noticed_and_the_same_rows_from_elsewhere_are_the_same(tmp_path):
    records = [
        {"question": f"{i}+1?", "answer": str(i + 1), "level": [i], "note": None} for i in range(9)
    ]
    state = json.loads(json.dumps(Cursor(load_rows(records), shuffle=False).take(2)[1].state()))
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    pd.DataFrame(records).to_parquet(tmp_path / "d.parquet")
    for source in (records, tmp_path / "d.jsonl", tmp_path / "d.parquet", pd.DataFrame(records)):
        assert restore_cursor(Cursor(load_rows(source), shuffle=False), state).consumed == 2
    for changed in (
        records[::-1],
        [*records[:8], records[8] | {"answer": "7"}],
        [*records[:8], records[8] | {"question": "x"}],
        [*records[:8], records[8] | {"level": [7]}],
        [*records[:8], records[8] | {"more": 1}],
        [records[1], records[0], *records[2:]],
    ):

        def call(changed=changed):
            return restore_cursor(Cursor(load_rows(changed), shuffle=False), state)

        failed(
            call,
            "rows of the data",
            where="resume",
            got="other or edited rows",
            fix="begin a new run",
        )


def test_sample_loads_as_rows():
    rows = load_rows(SAMPLE, require_answer=True)
    assert all(r.messages and r.messages[0]["role"] == "user" and "#### " in r.answer for r in rows)
