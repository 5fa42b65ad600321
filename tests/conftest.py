"What every test may rely on: no network, offline hubs, and hypothesis without a stopwatch."

import ctypes
import gc
import os
import sys
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings
from offline import heartbeats, stay_here

# tensors this small are faster on one thread; torch reads it once
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(
    HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", WANDB_SILENT="true"
)
NOTES = tempfile.TemporaryDirectory(prefix="rl-notebook-state-")  # of the runs that tests begin
os.environ["XDG_STATE_HOME"] = NOTES.name
os.environ["TINKER_TELEMETRY"] = "0"  # else the SDKs report, at the end, to services that are gone

# A shared machine is sometimes slow; that is not what property tests are about. The examples are the same on every run,
# so that what passed passes again; SLOW=1 draws new ones.
# "variants": also those marked so; "1": also what rarely says anything new
SLOW = os.environ.get("SLOW", "")
settings.register_profile(
    "house",
    deadline=None,
    print_blob=True,
    derandomize=SLOW != "1",
    max_examples=100 if SLOW else 25,
)
settings.load_profile("house")

stay_here()

# Collecting imports a million objects that stay: looking through them for garbage, again and again, takes a third of
# the time that collecting takes. So that begins with the first test, and leaves out what was there before it.
gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    "From here on garbage is looked for, in what the tests make."
    gc.freeze()
    gc.enable()


# A run in the background, or under nohup, ignores Ctrl-C, and so would the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

PERSONAL = (
    "FIREWORKS_",
    "TINKER_",
    "OPENAI_",
    "WANDB_API_KEY",
    "HF_TOKEN",
    "RL_NOTEBOOK_EMULATOR_KEY",
)


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    "No test sees the keys of whoever runs it, nor the servers they are for."
    for name in [
        name for name in os.environ if name.startswith(PERSONAL) and name != "TINKER_TELEMETRY"
    ]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True, scope="module")
def _no_client_outlives_its_file() -> Iterator[None]:
    "A client that a test opened by hand falls silent when its file is done: its service is gone by then."
    yield
    if {"tinker", "fireworks.training.sdk"} & set(sys.modules):
        for task in heartbeats():
            task.get_loop().call_soon_threadsafe(task.cancel)


@pytest.fixture(autouse=True, scope="module")
def _no_loss_outlives_its_file() -> Iterator[None]:
    "A loss that a test passed is registered; tests of other files know those of the package."
    from rl_notebook.core.losses import POLICY_LOSSES

    before = dict(POLICY_LOSSES)
    yield
    POLICY_LOSSES.clear()
    POLICY_LOSSES.update(before)


@pytest.fixture(autouse=True, scope="module")
def _no_memory_outlives_its_file() -> Iterator[None]:
    "Models are in cycles, and what is freed in many threads is not given back by itself: workers grew to gigabytes."
    yield
    gc.collect()
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)


# --- several workers ---------------------------------------------------------------------------------------------

# `pytest --numprocesses`. Tests of a file share fixtures and stay on one worker, and so do all browser tests that need
# JupyterLab, and those that need none. These and large files, which take longest, come first: many short ones are left
# for the end, and the workers end together.


def unit(nodeid: str) -> str:
    "What a test is handed to a worker with."
    path = nodeid.partition("::")[0]
    kind = "browser, pages" if path.endswith(("pages.py", "site.py", "table.py")) else "browser"
    return kind if "/browser/" in path else path


def left_out(item: pytest.Item, seen: Counter[str]) -> str:
    "Why a test is for another run, if it is; `seen` counts the parameters of a table so far."
    if item.get_closest_marker("slow") and SLOW != "1":
        return "slow: runs with SLOW=1"
    mark = item.get_closest_marker("variant")
    if mark is None or SLOW:
        return ""
    table = item.nodeid.partition("[")[0]
    seen[table] += 1
    every = mark.kwargs.get("every")
    but = mark.kwargs.get("but")
    chosen = (every and seen[table] % every == 1) or (but and f"[{but}" in item.name)
    return "" if chosen else "a further variant: runs with SLOW=variants"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    "Marks what is left out; where there are workers, puts first what takes longest."
    seen = Counter[str]()
    for item in items:
        if reason := left_out(item, seen):
            item.add_marker(pytest.mark.skip(reason=reason))
    if hasattr(config, "workerinput"):
        items.sort(
            key=lambda item: -(2**63 if "/browser/" in item.nodeid else item.path.stat().st_size)
        )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    "Hands out units in the order in which they were collected."
    from xdist.scheduler import LoadScopeScheduling

    class ByUnit(LoadScopeScheduling):
        _split_scope = staticmethod(unit)

    config.option.loadscopereorder = False
    return ByUnit(config, log)


# --- what a run has to say ---------------------------------------------------------------------------------------

SAID = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def say(pytestconfig: pytest.Config) -> Callable[[str], None]:
    "Prints a text at the end of the run. A worker of pytest-xdist has no terminal; what it says is handed on."
    return pytestconfig.stash.setdefault(SAID, []).append


def pytest_sessionfinish(session: pytest.Session) -> None:
    "A worker hands over what it has to say."
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["said"] = session.config.stash.get(SAID, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    "And it is kept for the end of the run."
    node.config.stash.setdefault(SAID, []).extend(getattr(node, "workeroutput", {}).get("said", []))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    "Texts of all workers."
    for text in config.stash.get(SAID, []):
        terminalreporter.write_line(f"\n{text}")
