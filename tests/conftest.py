"What every test may rely on: no network, offline hubs, and hypothesis without a stopwatch."

import os

import pytest
from hypothesis import settings
from offline import stay_here

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", WANDB_SILENT="true")

# A shared machine is sometimes slow; that is not what property tests are about.
settings.register_profile("house", deadline=None, print_blob=True)
settings.load_profile("house")

stay_here()

PERSONAL = ("FIREWORKS_", "TINKER_", "OPENAI_", "WANDB_API_KEY", "HF_TOKEN", "RL_NOTEBOOK_EMULATOR_KEY")


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    "No test sees the keys of whoever runs it, nor the servers they are for."
    for name in [name for name in os.environ if name.startswith(PERSONAL)]:
        monkeypatch.delenv(name)
