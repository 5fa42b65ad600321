"""Where a policy lives and what draws from it."""

import sys
from functools import partial
from importlib import import_module
from types import ModuleType


def _moved(module: str, name: str) -> object:
    "A name of a module that is called otherwise now; nothing is imported before it is asked for."
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(import_module(module), name)


for _earlier, _now in {"emulator": "service", "emulated_trainer": "trainer"}.items():
    _module = sys.modules[f"{__name__}.{_earlier}"] = ModuleType(f"{__name__}.{_earlier}")
    _module.__getattr__ = partial(_moved, f"rl_notebook.emulator.{_now}")
