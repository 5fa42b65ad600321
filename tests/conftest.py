"What every test may rely on: no network, offline hubs, and hypothesis without a stopwatch."

import os
import sys
import signal
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings
from offline import heartbeats, stay_here

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", WANDB_SILENT="true")
os.environ["TINKER_TELEMETRY"] = "0"  # else the SDKs report, at the end, to services that are gone

# A shared machine is sometimes slow; that is not what property tests are about.
settings.register_profile("house", deadline=None, print_blob=True)
settings.load_profile("house")

stay_here()

# A run in the background, or under nohup, ignores Ctrl-C, and so would the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

PERSONAL = ("FIREWORKS_", "TINKER_", "OPENAI_", "WANDB_API_KEY", "HF_TOKEN", "RL_NOTEBOOK_EMULATOR_KEY")


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    "No test sees the keys of whoever runs it, nor the servers they are for."
    for name in [name for name in os.environ if name.startswith(PERSONAL) and name != "TINKER_TELEMETRY"]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True, scope="module")
def _no_client_outlives_its_file() -> Iterator[None]:
    "A client that a test opened by hand falls silent when its file is done: its service is gone by then."
    yield
    if {"tinker", "fireworks.training.sdk"} & set(sys.modules):
        for task in heartbeats():
            task.get_loop().call_soon_threadsafe(task.cancel)


# --- several workers ---------------------------------------------------------------------------------------------

# `pytest --numprocesses`. Tests of a file share fixtures and stay on one worker, and so do all browser tests; but each
# part of a long table is on its own. What takes longest comes first, so that the workers end together. The tables come
# last: they keep processors busy, of which the browser had better have one, and are not held up by anything themselves.
SLOW = os.environ.get("SLOW") == "1"  # also what is long and rarely says anything new
LONGEST = ("browser/", "test_doctor", "test_time_travel", "test_resume", "test_cli", "test_whatif_view", "test_loop")
APART = ("test_the_right_cause_and_no_false_alarm",)


def unit(nodeid: str) -> str:
    "What a test is handed to a worker with."
    path, _, name = nodeid.partition("::")
    if name.startswith(APART):
        return nodeid
    return "browser" if "/browser/" in path else path


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    "Longest first, tables last; without workers, the order stays. Slow ones only when asked for."
    for item in items:
        if item.get_closest_marker("slow") and not SLOW:
            item.add_marker(pytest.mark.skip(reason="slow: runs with SLOW=1"))
    if hasattr(config, "workerinput"):
        place = lambda nodeid: next((i for i, name in enumerate(LONGEST) if name in nodeid), len(LONGEST))
        items.sort(key=lambda item: len(LONGEST) + 1 if item.name.startswith(APART) else place(item.nodeid))


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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    "Texts of all workers."
    for text in config.stash.get(SAID, []):
        terminalreporter.write_line(f"\n{text}")
