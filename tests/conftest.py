"What every test may rely on: no network, offline hubs, and hypothesis without a stopwatch."

import os
import sys

import pytest
from hypothesis import settings

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", WANDB_SILENT="true")

# A shared machine is sometimes slow; that is not what property tests are about.
settings.register_profile("house", deadline=None, print_blob=True)
settings.load_profile("house")

HERE = {"localhost", "::1", "::", "0.0.0.0", os.uname().nodename}


def _stay_here(event: str, args: tuple) -> None:
    "Refuses connections to other machines: a test that needs the network fails at the weather's whim."
    if event == "socket.connect" and isinstance(args[1], tuple):
        host = str(args[1][0])
    elif event == "socket.getaddrinfo":
        host = args[0].decode() if isinstance(args[0], bytes) else str(args[0] or "localhost")
    else:
        return
    if host not in HERE and not host.startswith("127."):
        raise OSError(f"tests do not use the network: {event} to {host}")


sys.addaudithook(_stay_here)


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    "No test sees the keys of whoever runs it."
    for name in ("WANDB_API_KEY", "HF_TOKEN", "FIREWORKS_API_KEY", "TINKER_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
