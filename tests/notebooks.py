"""Runs notebooks as `nbdev_test` does, several at a time, with a limit for each.

One that takes longer ends the run with its name and its place: `python tests/notebooks.py --n_workers 2`."""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbdev.test

LIMIT = float(os.environ.get("RL_NOTEBOOK_PAGE_LIMIT", "600"))  # seconds a notebook
RUNNING = TemporaryDirectory(prefix="rl-notebook-pages-")  # a file for each that runs
run = nbdev.test.test_nb
# a million imported objects stay: looking through them as often as Python does takes a tenth of the time
gc.set_threshold(20_000, 20, 20)


def within_the_limit(path: Path, **options: Any) -> Any:
    "Run one in this process, which ends where it does not."
    mark = Path(RUNNING.name, path.name)
    mark.touch()
    faulthandler.dump_traceback_later(LIMIT, exit=True, file=sys.__stderr__)
    try:
        return run(path, **options)
    finally:
        faulthandler.cancel_dump_traceback_later()
        mark.unlink()


if __name__ == "__main__":
    # where workers find it: a notebook that ran is `__main__` from then on
    within_the_limit.__module__ = "notebooks"
    sys.modules["notebooks"] = sys.modules["__main__"]
    nbdev.test.test_nb = within_the_limit
    try:
        nbdev.test.nbdev_test()
    except BrokenProcessPool:
        old = time.time() - LIMIT + 1
        names = [path.name for path in Path(RUNNING.name).iterdir() if path.stat().st_mtime <= old]
        sys.exit(
            f"{', '.join(names) or 'a notebook'}: not done after {LIMIT:g} s (RL_NOTEBOOK_PAGE_LIMIT); see above where"
        )
