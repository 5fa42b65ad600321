"What every test may rely on: no network, offline hubs, and hypothesis without a stopwatch."

import ctypes
import gc
import os
import sys
import signal
import tempfile
from collections.abc import Iterator

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
# so that what passed passes again; SLOW=1 takes new ones.
SLOW = os.environ.get("SLOW") == "1"
settings.register_profile(
    "house",
    deadline=None,
    print_blob=True,
    derandomize=not SLOW,
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
    # models are freed at the end of each file
    gc.set_threshold(20_000, 20, 20)
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
    "No test sees the keys in the environment of its user, nor the servers they are for."
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
    "Models are in cycles, and what is freed in many threads is not released by itself: workers grew to gigabytes."
    gc.freeze()  # what other files imported
    yield
    gc.collect()
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not SLOW:
            item.add_marker(pytest.mark.skip(reason="slow: runs with SLOW=1"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    "Gives a worker whole files, and one of them all of tests/browser, so that JupyterLab is started once."
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith("tests/browser/"):
                return "browser"
            return super()._split_scope(nodeid)

    return ByFile(config, log)
