"What a terminal, a log file or a pipe receives: nothing in it acts, nothing is lost where it lacks a character."

from __future__ import annotations

import io
import json
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic import synthetic_record

from rl_notebook.cli import main
from rl_notebook.core.types import RecordError, print_plain
from rl_notebook.loop.state import write_line
from rl_notebook.runs.run import RunFolder

EVIL = "\x1b[31mred\x1b]0;title\x07 \u202eabc\u202c \u2067d\u2069 e\x00\u2028f 你好 🙂 – é"
PLACES = [(), ("--step", "1"), ("--step", "1", "--group", "0", "--sample", "0")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = RunFolder.create(
        tmp_path_factory.mktemp("terminal") / "run", {"base_model": "nothing"}
    )
    record = synthetic_record(1)

    def dress(s):
        return replace(s, text=EVIL, finish_reason=EVIL, rewards={EVIL: s.reward})

    groups = [
        replace(g, samples=tuple(map(dress, g.samples)), key=EVIL, row={"question": EVIL})
        for g in record.groups
    ]
    folder.add(replace(record, groups=groups))
    folder.release()
    return folder.path


def control_characters(text: str) -> set[str]:
    return {
        c
        for c in text
        if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c not in "\n\t"
    }


@pytest.mark.parametrize("place", PLACES, ids=["run", "step", "sample"])
def test_nothing_that_a_model_wrote_acts(
    place, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(run), *place]) == 0
    plain = capsys.readouterr().out
    assert main(["show", str(run), *place, "--json"]) == 0
    data = json.loads(text := capsys.readouterr().out)
    assert (control_characters(plain), control_characters(text)) == (set(), set())
    if place:
        assert "\\u001b[31mred" in plain
        assert "\\u202eabc" in plain
        assert (data if "text" in data else data["completions"][0])["text"] == EVIL


def test_errors_and_lines_do_not_act_either(capsys: pytest.CaptureFixture[str]) -> None:
    error = RecordError(f"row {EVIL}", where=EVIL, got=EVIL, expected=EVIL, fix=EVIL)
    print_plain(error)
    write_line(EVIL)
    assert main(["show", f"/nowhere/{EVIL}".replace("\0", "")]) == 2
    output = capsys.readouterr()
    assert (
        control_characters(str(error)),
        control_characters(output.out),
        control_characters(output.err),
    ) == (set(), set(), set())


@pytest.mark.parametrize(
    "encoding",
    [
        "ascii",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("latin-1", "cp1252")),
        "gbk",
    ],
)
def test_a_character_that_an_encoding_lacks_is_escaped(
    encoding: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def printed(encoding: str) -> str:
        out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", out)
        print_plain("🙂 – 你好")
        write_line("🙂 – 你好")
        for more in (*PLACES, ("--step", "1", "--json")):
            assert main(["show", str(run), *more]) == 0
        out.flush()
        return out.buffer.getvalue().decode(encoding)

    text = printed(encoding)
    all_of_it = printed("utf-8")
    assert len(text.splitlines()) == len(all_of_it.splitlines())
    assert "\\U0001f642" in text
    assert ("你好" in text) == (encoding == "gbk")
    assert "🙂 – 你好" in all_of_it


def test_a_closed_output_takes_nothing_and_costs_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shut = io.StringIO()
    shut.close()
    for stream in (None, shut):
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["show", str(run)]) == 0
