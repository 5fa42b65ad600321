"A key goes into the headers of the service that it is for, and nowhere else: files, logs, reprs, errors, pages."

from __future__ import annotations

import base64
import gzip
import json
import logging
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest

pytest.importorskip("fireworks.training.sdk")
pytest.importorskip("tinker")
pytest.importorskip("starlette")
pytest.importorskip("hpack")

from verbose_run import WRONG

from rl_notebook.backends.services.wire import HEADER_LOGGERS, key_from_env, shows_no_header

KEY = "tml-Zq7/Lw+9=planted&4u"  # with characters that an address has to quote
HERE = Path(__file__).parent
VARIABLES = ("FIREWORKS_API_KEY", "TINKER_API_KEY", "OPENAI_API_KEY", "RL_NOTEBOOK_EMULATOR_KEY")


def spellings(key: str) -> set[bytes]:
    "A key as it may appear in a text: plain, quoted, escaped, in base64 at each of the three places of a triple."
    plain = key.encode()
    spelled = {
        plain,
        quote(key).encode(),
        quote_plus(key).encode(),
        quote(key, safe="").encode(),
        plain.hex().encode(),
    }
    spelled |= {json.dumps(key)[1:-1].encode(), json.dumps(key).replace("/", "\\/")[1:-1].encode()}
    spelled |= {key.replace("&", "&amp;").encode(), plain[::-1]}
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        for shift in range(3):
            inner = encode(b"\0" * shift + plain)
            spelled.add(inner[4 if shift else 0 : len(inner) - 4])
    return spelled


def spellings_in(data: bytes) -> list[str]:
    "The spellings of both keys that some bytes contain."
    return sorted(s.decode() for key in (KEY, WRONG) for s in spellings(key) if s in data)


def unpack(path: Path) -> Iterator[tuple[str, bytes]]:
    "The name and the contents of a file, and of what is packed in it."
    raw = path.read_bytes()
    yield str(path), str(path).encode() + b"\n" + raw
    if raw[:2] == b"\x1f\x8b":
        yield f"{path}, unpacked", gzip.decompress(raw)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                yield f"{path}, {name}", archive.read(name)


def leaks(folder: Path) -> dict[str, list[str]]:
    "File -> the spellings of a key that it contains."
    files = [part for path in sorted(folder.rglob("*")) if path.is_file() for part in unpack(path)]
    assert files
    return {name: result for name, data in files if (result := spellings_in(data))}


def environment(**more: str) -> Mapping[str, str]:
    "That of this process with the key in every variable that is read for one."
    path = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    return {**os.environ, **dict.fromkeys(VARIABLES, KEY), "PYTHONPATH": path, **more}


# --- the search finds every key ------------------------------------------------------------------------------------------


def test_a_planted_key_is_found_where_it_is_packed_or_part_of_something(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(f"Bearer {KEY}".encode()))
    with zipfile.ZipFile(tmp_path / "b.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("c.json", json.dumps({"key": KEY}))
    for shift in range(3):
        (tmp_path / f"basic-{shift}").write_bytes(
            base64.b64encode(b"user:pass"[shift:] + KEY.encode() + b"@host")
        )
    (tmp_path / f"named-{quote(KEY, safe='')}").write_text("nothing inside")
    (tmp_path / "harmless").write_text(f"{KEY[:-1]} {KEY[1:]} ***")
    assert len(leaks(tmp_path)) == 6
    assert str(tmp_path / "harmless") not in leaks(tmp_path)


# --- what looks like a key is masked wherever text is shown -----------------------------------------------------------

DRAWN = "a1B2c3D4e5" * 4
LOOKS = [
    *(f"{start}{DRAWN[:36]}" for start in ("sk-", "sk-proj-", "gho_", "ghp_", "github_pat_", "hf_", "fw_", "tml-", "wandb_v1_")),
    "xoxb-123456789012-abcdefghij", "AKIA" + "IOSFODNN7EXAMPLE", f"Bearer {DRAWN}",
    "https://me:hunter2hunter2@host/x", "https://host/x?token=hunter2hunter2&n=1", "https://host/x?a=b&api_key=hunter2hunter2",
]  # fmt: skip
PROSE = [
    "An `sk-` prefix, sk-learn-contrib, hf_model_name, fw-ai/cookbook, hf-internal-testing/tiny-random-LlamaForCausalLM.",
    "The bearer of bad news asks: what does https://example.org/?step=3&keys=a tell us? Ask a@example.org.",
]


@pytest.mark.parametrize("look", LOOKS, ids=lambda look: look[:12])
def test_what_looks_like_a_key_is_not_shown(look: str, capsys: pytest.CaptureFixture[str]) -> None:
    from rl_notebook.backends.services.wire import server_message
    from rl_notebook.cli import main
    from rl_notebook.config.config import Config, SettingsTable
    from rl_notebook.core.types import BackendError, ConfigError
    from rl_notebook.runs.records import html_table

    secret = "hunter2hunter2" if "hunter2" in look else look.removeprefix("Bearer ")
    with pytest.raises(ConfigError, match="run_name: got a value that looks like a key") as caught:
        Config(run_name=look)
    shown = [
        str(caught.value),
        str(BackendError("x", got=look)),
        server_message(json.dumps({"error": f"no {look} here"})),
    ]
    table = SettingsTable(("a", "b"), (("run_name", look, None),))
    shown += [repr(table), table._repr_html_(), html_table(["text"], [(look,)])]
    assert main(["train", "--run-name", look]) == 2
    output = capsys.readouterr()
    assert not [text for text in (*shown, output.out, output.err) if secret in text]


@pytest.mark.parametrize("text", PROSE)
def test_ordinary_text_is_left_alone(text: str) -> None:
    from rl_notebook.core.types import without_keys

    assert without_keys(text) == text


def test_a_value_of_the_environment_is_hidden_whole_where_this_package_reads_it_and_no_word_is(
    monkeypatch,
):
    from rl_notebook.config.config import Config
    from rl_notebook.core.types import without_keys

    for name, value in {
        "SOMETHING_PASSWORD": "training",
        "DB_TOKEN": "policy-1",
        "OPENAI_API_KEY": "training",
    }.items():
        monkeypatch.setenv(name, value)
    assert Config(log_path="runs/training", run_name="policy-1").log_path == "runs/training"
    monkeypatch.setenv("HF_TOKEN", "not-needed-1")
    text = "training by policy-1 is not-needed-10"
    assert without_keys(f"{text}: 'not-needed-1', énot-needed-1.") == f"{text}: '***', é***."


# --- runs and pages ---------------------------------------------------------------------------------------------------

ERRORS = {
    "fireworks": ("401", "expected 0 to", "no-such-snapshot", "Fireworks is lost"),
    "tinker": ("401", "token id: got 1000000", "no-such-snapshot", "tinker is lost"),
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ERRORS)
def test_a_run_with_everything_logged_does_not_say_the_key(backend: str, tmp_path: Path) -> None:
    with (tmp_path / "said.txt").open("w") as log:
        command = [
            sys.executable,
            "-X",
            "dev",
            "-W",
            "always",
            str(HERE / "verbose_run.py"),
            backend,
            str(tmp_path),
        ]
        ended = subprocess.run(
            command,
            env=environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=240,
            check=False,
        )
    text = (tmp_path / "said.txt").read_text(errors="replace")
    assert ended.returncode == 0, text[-2000:]
    assert "\nthe end\n" in text
    trace = (tmp_path / "everything.log").read_text(errors="replace")
    # httpcore, at its loudest
    assert "send_request_headers.started request=<Request [b'POST']>" in trace
    assert "HTTP Request: POST" in trace  # httpx
    for part in ERRORS[backend]:
        assert part in text
    names = {path.name for path in tmp_path.rglob("*")}
    assert {"run.json", "state.json"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert leaks(tmp_path) == {}


def test_http2_writes_headers_into_its_log_until_a_key_is_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from hpack import Encoder

    for name in HEADER_LOGGERS:
        logging.getLogger(name).removeFilter(shows_no_header)
    with caplog.at_level(logging.DEBUG):
        Encoder().encode([("x-api-key", KEY)], huffman=False)
        assert spellings_in(caplog.text.encode())  # what the package does by itself
        caplog.clear()
        key_from_env(key=KEY)
        encoder = Encoder()
        for _ in range(2):
            encoder.encode([("x-api-key", KEY)], huffman=False)
        encoder.header_table.maxsize = 0
        logging.getLogger("hpack.hpack").warning("still heard")
    assert "still heard" in caplog.text
    assert not spellings_in(caplog.text.encode())
