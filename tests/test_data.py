"Rows from every source, the download cache, the cursor, and the sample that ships."

import hashlib
import json
import re
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_notebook.core import DataError
from rl_notebook.data import Cursor, Row, fetch, find_answer, load_rows, make_row, restore_cursor

SAMPLE = Path(__file__).parents[1] / "examples" / "gsm8k" / "sample.jsonl"
CHAT = [{"role": "user", "content": "48/2+48?"}]


def message(call, exc=DataError) -> str:
    with pytest.raises(exc) as e:
        call()
    return str(e.value)


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
    splits = datasets.DatasetDict(train=datasets.Dataset.from_list(records))
    assert "splits: got ['train']; expected one data set. Pick a split." in message(lambda: load_rows(splits))


@pytest.mark.parametrize("name", ["answer", "ground_truth", "label", "solution"])
def test_answer_columns(name):
    assert make_row({"prompt": "x", name: "7"}).answer == "7"


def test_a_column_of_another_name_is_answered_with_the_setting_that_names_it():
    records = [{"problem": "1+1?", "result": "2"}]
    for missing, columns in (("question", {}), ("answer", {"question": "problem"})):
        said = message(lambda columns=columns: load_rows(records, columns=columns, require_answer=True))
        assert f"columns={{'{missing}': 'its name'}} of load_rows, which is dataset_columns in a config" in said
        assert "_column" not in said.replace("dataset_columns", "")
    (row,) = load_rows(records, columns={"question": "problem", "answer": "result"}, require_answer=True)
    assert (row.messages[0]["content"], row.answer) == ("1+1?", "2")


def test_answer_of_verl_and_precedence():
    assert find_answer({"reward_model": {"ground_truth": "72"}}) == "72"
    assert find_answer({"solution": "long", "answer": "72"}) == "72"
    assert find_answer({"answer": "1", "gold": "2"}, "gold") == "2"
    assert find_answer({"answer": "1"}, "gold") is None


def test_prompt_forms():
    assert make_row({"question": "1+1?"}).messages == ({"role": "user", "content": "1+1?"},)
    assert make_row({"prompt": "1+1="}).prompt == "1+1="
    assert make_row({"prompt": CHAT}).messages == tuple(CHAT)
    assert make_row({"prompt_token_ids": [3, 4], "messages": CHAT}).prompt_tokens == (3, 4)
    few_shot = [*CHAT, {"role": "assistant", "content": "72"}, *CHAT]
    assert make_row({"messages": few_shot}).messages == tuple(few_shot)  # only a final assistant message is dropped
    assert make_row({"messages": [*few_shot, {"role": "assistant", "content": "72"}]}).messages == tuple(few_shot)


def test_empty_cells_count_as_absent():
    frame = pd.DataFrame({"prompt": ["a=", None], "question": [None, "b?"], "answer": [1, None], "label": [None, "x"]})
    rows = load_rows(frame.convert_dtypes())
    assert (rows[0].prompt, rows[1].messages[0]["content"]) == ("a=", "b?")
    assert [r.answer for r in rows] == [1, "x"]
    assert "no prompt" in message(lambda: load_rows([{"prompt": "  "}]))


# --- bad input says what, where, got, expected, fix


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (
            b'{"question": "a"}\n{"question": \n',
            "d.jsonl, line 2: malformed line: got b'{\"question\": \\n'",
        ),
        (b'{"question": "a"}\n[1]\n', "d.jsonl, line 2: malformed line: got [1]; expected an object"),
        (b'{"question": "\xff"}\n', 'd.jsonl, line 1: malformed line: got b\'{"question": "\\xff"}\\n\'; expected one'),
        (b'{"question": "a"}\n\n{"id": "q9"}\n', "d.jsonl, line 3: no prompt: got columns id; expected something in"),
        (b'{"messages": [{"content": "a"}]}\n', "d.jsonl, line 1: message 0: got {'content': 'a'}; expected a mapping"),
        (b'{"prompt": 5}\n', "d.jsonl, line 1: prompt: got 5; expected a text or a list of messages"),
        (b'{"question": {"a": 1}}\n', "d.jsonl, line 1: question: got {'a': 1}; expected a text or a list of messages"),
        (b"", "empty data set: got 0 rows from"),
        (b"\n\n", "empty data set: got 0 rows from"),
    ],
)
def test_malformed_files(tmp_path, content, shown):
    (tmp_path / "d.jsonl").write_bytes(content)
    assert shown in message(lambda: load_rows(tmp_path / "d.jsonl"))


def test_missing_answer_is_an_error_only_when_asked():
    records = [{"question": "a", "answer": "1"}, {"question": "b", "answer": None}]
    assert load_rows(records)[1].answer is None
    text = message(lambda: load_rows(records, require_answer=True))
    assert "record 1: no answer: got columns question, answer; expected something in answer, ground_truth" in text
    assert "use a reward that needs no answer" in text


def test_other_refusals(tmp_path):
    assert "got 0; expected 1 or more" in message(lambda: load_rows([{"prompt": "a"}], max_rows=0))
    assert "expected a path, URL, DataFrame" in message(lambda: load_rows(3))
    assert "sha256: got a list; expected a file or URL" in message(lambda: load_rows([{"prompt": "a"}], sha256="0"))
    (tmp_path / "d.jsonl").write_text('{"prompt": "a"}')
    assert "d.jsonl: checksum: got sha256" in message(lambda: load_rows(tmp_path / "d.jsonl", sha256="0" * 64))
    (tmp_path / "d.parquet").write_bytes(b"PAR1 not really PAR1")
    assert "unreadable file" in message(lambda: load_rows(tmp_path / "d.parquet"))


def test_max_rows_stops_before_a_bad_line(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"prompt": "a"}\nbroken\n')
    assert len(load_rows(tmp_path / "d.jsonl", max_rows=1)) == 1


# --- the cache, against a real server


@pytest.fixture
def server():
    class Handler(BaseHTTPRequestHandler):
        body, hits = b'{"question": "1+1?", "answer": "2"}\n', 0

        def do_GET(self):
            type(self).hits += 1
            short = self.path.startswith("/short")
            self.send_response(404 if self.path.startswith("/missing") else 200)
            self.send_header("Content-Length", str(len(self.body) + 100 * short))
            self.end_headers()
            self.wfile.write(self.body)

        def log_message(self, *args):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=partial(httpd.serve_forever, poll_interval=0.01))
    thread.start()
    yield Handler, f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_url_is_cached_checksummed_and_repaired(server, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    handler, url = server
    right = hashlib.sha256(handler.body).hexdigest()
    rows = load_rows(f"{url}/train.jsonl", sha256=right)
    assert rows[0].answer == "2"
    assert load_rows(f"{url}/train.jsonl") == rows
    assert handler.hits == 1
    path = fetch(f"{url}/train.jsonl")
    assert path.parent == tmp_path / "rl_notebook"
    assert path.with_name(path.name + ".sha256").read_text() == f"{right}  {path.name}\n"

    path.write_text("damaged")
    with pytest.warns(UserWarning, match=r"the cached copy .* is damaged; fetching it again"):
        assert load_rows(f"{url}/train.jsonl") == rows
    assert handler.hits == 2

    path.with_name(path.name + ".sha256").unlink()  # a crash between the file and its checksum
    assert load_rows(f"{url}/train.jsonl") == rows
    assert handler.hits == 3

    handler.body = b'{"question": "2+2?", "answer": "4"}\n'  # a new file at the same place, asked for by checksum
    assert load_rows(f"{url}/train.jsonl", sha256=hashlib.sha256(handler.body).hexdigest())[0].answer == "4"
    text = message(lambda: load_rows(f"{url}/train.jsonl", sha256=right))
    assert "checksum: got sha256" in text
    assert right in text
    assert not [p for p in path.parent.iterdir() if p.name.startswith(".")]


def test_failed_downloads_leave_nothing_and_show_no_secret(server, tmp_path):
    _, url = server
    text = message(lambda: fetch(f"{url}/missing.jsonl?token=secret", directory=tmp_path))
    assert "/missing.jsonl: download: got status 404 Not Found; expected 200. Check the URL." in text
    assert "secret" not in text
    assert "/short.jsonl: download: got RemoteProtocolError" in message(
        lambda: fetch(f"{url}/short.jsonl", directory=tmp_path)
    )
    assert list(tmp_path.iterdir()) == []
    dead = httpx.Client(transport=httpx.MockTransport(lambda r: (_ for _ in ()).throw(httpx.ConnectError("refused"))))
    text = message(lambda: fetch("http://example.org/x.jsonl", directory=tmp_path, client=dead))
    assert "got ConnectError (refused); expected a file. Check the network, or give a local path." in text


def test_cache_folder_that_cannot_be_made(server, tmp_path):
    _, url = server
    (tmp_path / "file").write_text("in the way")
    text = message(lambda: fetch(f"{url}/a.jsonl", directory=tmp_path / "file" / "cache"))
    assert "cache folder" in text
    assert "Set XDG_CACHE_HOME." in text


# --- the cursor


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 9), seed=st.integers(0, 99), epochs=st.integers(1, 3), cuts=st.lists(st.integers(1, 7), max_size=8)
)
def test_cursor_visits_each_row_once_an_epoch_and_resumes_anywhere(n, seed, epochs, cuts):
    start = Cursor([Row(key=str(i), prompt="x") for i in range(n)], seed=seed, epochs=epochs)
    whole, end = start.take(10_000)
    assert end.exhausted
    for e in range(epochs):
        assert sorted(r.key for r in whole[e * n : (e + 1) * n]) == sorted(str(i) for i in range(n))
    seen, cursor = [], start
    for k in cuts:
        rows, cursor = cursor.take(k)
        seen += rows
        cursor = restore_cursor(start, json.loads(json.dumps(cursor.state())))
    assert seen == whole[: len(seen)]
    assert seen + cursor.take(10_000)[0] == whole


def test_cursor_without_end_and_in_order():
    rows = [Row(key=str(i), prompt="x") for i in range(3)]
    endless = Cursor(rows, epochs=None, consumed=3_000_001)
    assert (endless.epoch, endless.exhausted, len(endless.take(7)[0])) == (1_000_000, False, 7)
    assert [r.key for r in Cursor(rows, shuffle=False, epochs=2).take(5)[0]] == ["0", "1", "2", "0", "1"]


def test_cursor_refusals():
    rows = [Row(key=str(i), prompt="x") for i in range(3)]
    assert "empty data set: got 0 rows; expected at least 1" in message(lambda: Cursor([]))
    assert "consumed: got 4; expected 0 to 3" in message(lambda: Cursor(rows, consumed=4))
    state = Cursor(rows).take(1)[1].state()
    assert "seed of the data: got 1; expected 0, as recorded" in message(lambda: restore_cursor(Cursor(rows, 1), state))
    assert "state: got no consumed, next" in message(
        lambda: restore_cursor(Cursor(rows), {k: state[k] for k in ("rows", "seed", "shuffle")})
    )


# --- the sample that ships

ANNOTATION = re.compile(r"<<([-0-9+*/.()]+)=(-?[0-9.]+)>>(-?[0-9][0-9,]*(?:\.[0-9]+)?)")


def test_sample_is_arithmetically_right():
    records = [json.loads(line) for line in SAMPLE.read_text().splitlines()]
    assert len(records) >= 24
    assert len({r["question"] for r in records}) == len(records)
    for r in records:
        assert set(r) == {"question", "answer"}
        found = ANNOTATION.findall(r["answer"])
        assert len(found) == r["answer"].count("<<") >= 1, r["answer"]
        for expression, value, shown in found:
            assert eval(expression, {"__builtins__": {}}) == pytest.approx(float(value), abs=1e-9), (expression, value)
            assert float(shown.replace(",", "")) == float(value), (value, shown)
        body, final = r["answer"].split("\n#### ")
        assert float(final.replace(",", "")) == float(found[-1][1]), r["answer"]
        for line in body.split("\n"):
            for left, expression in re.findall(r"([-0-9+*/.]+) = \$?<<([^=]+)=", line):
                assert left == expression, line  # the sum in the text is the one in the annotation


def test_sample_loads_as_rows():
    rows = load_rows(SAMPLE, require_answer=True)
    assert all(r.messages and r.messages[0]["role"] == "user" and "#### " in r.answer for r in rows)
