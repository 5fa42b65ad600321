"""What renders widgets where there is no JupyterLab: `@jupyter-widgets/html-manager`, in a page without a kernel.

VS Code, Colab, voilà and exported pages build on it. Its packages are fetched once with npm, at fixed versions, into
the environment that runs the tests, and are served from this machine: the page asks no other one for anything."""

from __future__ import annotations

import base64
import functools
import hashlib
import http.server
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import anywidget
import ipywidgets
from ipywidgets.embed import dependency_state, embed_snippet

CACHE = Path(sys.prefix) / "share" / "rl_notebook-tests"
PACKAGES = {  # name and version, and the checksum of the archive
    "@jupyter-widgets/html-manager@1.0.15": "5thBIV6ymNgmPVOHvzx+gGy8ZSKmSazhtGw4/c4xJDVz"
    "RhG9PTeQsRjF3FUTopvFi//SABeNz1yp47bCrJ3CQA==",
    "requirejs@2.3.7": "DouTG8T1WanGok6Qjg2SXuCMzszOo0eHeH9hDZ5Y4x8Je+9JB38HdTLT4/VA8OaUhBa0JPVHJ0pyBkM1z+pDsw==",
}


def fetch_package(package: str) -> Path:
    "The folder of an npm package, downloaded where it is not there yet; raises OSError where it cannot be had."
    folder = CACHE / package.rpartition("/")[2]
    if folder.exists():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    npm = shutil.which("npm")
    if npm is None:
        raise OSError("npm is not on PATH")
    done = subprocess.run(
        [npm, "pack", "--silent", package], cwd=CACHE, capture_output=True, text=True, timeout=120
    )
    if done.returncode:
        raise OSError(f"npm pack {package} failed: {done.stderr.strip()[-200:]}")
    archive = CACHE / done.stdout.split()[-1]
    result = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if result != PACKAGES[package]:
        raise AssertionError(
            f"{package}: the archive has the checksum {result}; expected {PACKAGES[package]}"
        )
    with tarfile.open(archive) as tar:
        # Python before 3.11.4 has no filters; the checksum says that the archive is the one that is meant
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(CACHE / f"{folder.name}.part")
    (CACHE / f"{folder.name}.part" / "package").rename(folder)
    return folder


def write_page(folder: Path, widgets: Sequence[ipywidgets.Widget]) -> None:
    "A page that holds these widgets as they are now, and the scripts that it loads."
    manager, loader = map(fetch_package, PACKAGES)
    shutil.copytree(manager / "dist", folder, dirs_exist_ok=True)
    # where its style sheets look for them
    for fonts in ("@jupyter-widgets", "@jupyter-widgets/html-manager/dist"):
        shutil.copytree(
            manager / "dist",
            folder / fonts,
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("*.js*"),
        )
    shutil.copy(loader / "require.js", folder)
    shutil.copy(
        Path(anywidget.__file__).parent / "nbextension" / "index.js", folder / "anywidget.js"
    )
    state = dependency_state(
        widgets, drop_defaults=False
    )  # as a notebook keeps it; the script of a widget is a default
    snippet = embed_snippet(
        views=list(widgets),
        state=state,
        drop_defaults=False,
        requirejs=False,
        embed_url="embed-amd.js",
        cors=False,
    )
    head = '<meta charset="utf-8"><link rel="icon" href="data:,"><script src="require.js"></script>'
    page = f"<!doctype html>{head}<body>{snippet}</body>"
    (folder / "index.html").write_text(page, encoding="utf-8")


class Quiet(http.server.SimpleHTTPRequestHandler):
    "Serves files and says nothing."

    def log_message(self, *args: object) -> None: ...


@contextmanager
def serve_folder(folder: Path) -> Iterator[str]:
    "The address of a folder on this machine."
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
