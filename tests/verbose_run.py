"A short run on a service with everything said aloud: DEBUG logs, warnings, reprs, errors of three kinds, pickles."

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from service_runs import config, fixed_datums, policy_trainer, problem

from rl_notebook.emulator.service import RunningEmulator, start_emulator
from rl_notebook.backends.services.fireworks import open_fireworks
from rl_notebook.backends.services.provision import fireworks_sdk
from rl_notebook.backends.services.tinker import open_tinker, tinker_sdk
from rl_notebook.core.types import Datum, RLNotebookError
from rl_notebook.recipes.rl_loop import train

WRONG = "tml-Wr0ng/But+also=Nobodys&Business"  # a key that opens nothing


def chain(error: BaseException) -> list[BaseException]:
    "An error and all that it has to do with."
    known: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in known:
            known.append(node)
            waiting += [node.__cause__, node.__context__]
    return known


def show(name: str, value: Any) -> None:
    "A value in every form in which it might be kept."
    print(name, repr(value), str(value), sep="\n")
    for method in ("_repr_html_", "_repr_mimebundle_", "_repr_markdown_"):
        if hasattr(value, method):
            print(getattr(value, method)())
    print({key: repr(part) for key, part in getattr(value, "__dict__", {}).items()})
    if type(value).__module__.startswith("rl_notebook"):
        with contextlib.suppress(Exception):  # most of them cannot be pickled, which is as good
            print(pickle.dumps(value))


def show_error(name: str, error: BaseException) -> None:
    "An error as a notebook shows it, and what it drags along."
    print(name, "".join(traceback.format_exception(error)), sep="\n")
    for node in chain(error):
        show(f"{name}: {type(node).__name__}", node)


async def fails(name: str, work: Any) -> None:
    "Await something that has to fail."
    try:
        await work
    except RLNotebookError as error:
        show_error(name, error)
        return
    raise AssertionError(f"{name}: no error")


async def open_with_key(backend: str, running: RunningEmulator, cfg: Any, **more: Any) -> Any:
    "The backend, with the key from the environment unless another is given."
    quick = {"base_url": running.url, "pause_s": 0.05, "attempts": 1, "say": print, **more}
    if backend == "fireworks":
        return await open_fireworks(cfg, grace_s=0, poll_interval_s=0.05, **quick)
    names = {
        "base_model": cfg.base_model,
        "lora_rank": cfg.lora_rank,
        "tokenizer": cfg.tokenizer_model,
    }
    return await open_tinker(**names, conformance="off", probing=False, **quick)


async def train_and_provoke(backend: str, folder: Path, running: RunningEmulator) -> None:
    "Train, show everything, provoke everything."
    cfg = config(backend, 2, folder / "run", report_to=("tensorboard",), dcp_save_interval=1)
    await fails("a wrong key", open_with_key(backend, running, cfg, key=WRONG))
    back = await open_with_key(backend, running, cfg)
    records: list[Any] = []
    result = await train(
        cfg, problem=problem(), backend=back, on_record=[records.append], progress=False
    )
    links = [getattr(part, "link", None) for part in (back.policy, back.reference, back.sampler)]
    shown = {
        "backend": back,
        "config": cfg,
        "result": result,
        "records": records,
        "emulator": running.emulator,
    }
    shown |= {
        "running": running,
        "gate": running.emulator.app,
        "log": running.emulator.log,
        "links": links,
    }
    shown |= {
        name: getattr(back, name, None)
        for name in ("policy", "reference", "sampler", "sync", "infra", "cleanup")
    }
    for name, value in shown.items():
        show(name, value)
    for link in filter(None, links):
        show("link", link)
    await fails(
        "a rejected request",
        back.policy.forward([Datum(np.array([1, 10**6, 2]), np.array([1, 1]))]),
    )
    await fails("another rejected request", back.sync("no-such-snapshot"))
    policy_trainer(running, back).lose_memory()
    await fails("a lost service", back.policy.forward(fixed_datums()))
    await back.close()
    await asyncio.to_thread(running.stop)


def main(backend: str, folder: Path) -> None:
    "All of it, with every logger at its loudest."
    tinker_sdk()
    assert fireworks_sdk().TrainerJobManager  # the SDK turns loggers down as its parts are imported
    logging.basicConfig(level=logging.DEBUG, filename=folder / "everything.log", force=True)
    known = [name for name in logging.root.manager.loggerDict if not name.startswith("torch")]
    for name in ["httpx", "httpcore", "urllib3", "hpack", *known]:
        logging.getLogger(name).setLevel(logging.DEBUG)
    logging.captureWarnings(True)
    warnings.simplefilter("always")
    asyncio.run(train_and_provoke(backend, folder, start_emulator(folder=folder / "emulator")))
    print("the end")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
