"""GRPO you can step through. `import rl_notebook as rln` gives the names that a notebook starts with; each of them is
imported when it is first used, so that the import itself takes milliseconds. All others are imported from their module:
`from rl_notebook.core.losses import loss_terms`. docs/modules.md lists the modules."""

from importlib import import_module as _import_module
from importlib.machinery import PathFinder as _PathFinder
from typing import TYPE_CHECKING
from typing import Any as _Any

__version__ = "0.1.0"

# Where torchao is installed, transformers imports it with its first model, and it reports which CUDA libraries do not load.
if _PathFinder.find_spec("torchao"):
    import logging as _logging

    _logging.getLogger("torchao").setLevel(_logging.ERROR)
    _logging.getLogger("torch.utils._pytree").addFilter(lambda line: "Enum subclass" not in line.getMessage())

# What is at the front door, and in which module it lives. A type checker reads the imports below instead: keep both equal.
_HOMES = {
    "core.types": "Completion Datum PromptGroup RLNotebookError RolloutSample SampleParams",
    "config.config": "Config",
    "task.data": "Row load_rows",
    "task.audit": "audit_reward",
    "task.rewards": "gsm8k_reward",
    "task.chat": "sample_from_completion start_conversation",
    "task.models": "load_model",
    "task.toy": "toy_format_reward toy_reward toy_rows",
    "backends.base": "Backend",
    "backends.local.trainer": "open_local",
    "recipes.open": "open_backend",
    "core.advantages": "with_advantages",
    "core.datums": "datums_from_groups",
    "core.losses": "make_loss_fn register_loss",
    "loop.rollouts": "RolloutSetup",
    "loop.step": "sync_weights",
    "runs.cite": "cite",
    "runs.records": "StepRecord",
    "runs.run": "Run RunFolder",
    "runs.search": "find",
    "runs.watch": "watch",
    "loop.loop": "GRPOLoop",
    "loop.async_loop": "AsyncGRPOLoop",
    "experiments.replay": "compare_loops replay",
    "insight.trends": "ledger watch_run",
    "experiments.preflight": "measure_noise_floor preflight",
    "experiments.plan": "plan",
    "insight.xray": "xray",
    "insight.doctor.doctor": "diagnose",
    "insight.doctor.why": "list_runs why",
    "experiments.trainers": "compare_trainers",
    "experiments.whatif": "reward_lab what_if",
    "experiments.fork": "fork",
    "experiments.locate": "locate parting",
    "views.charts": "chart",
    "views.tokens": "inspect_tokens",
    "views.dashboard": "Dashboard",
    "views.whatif": "WhatIfPanel",
    "views.report": "compare write_report",
    "recipes.rl_loop": "main train",
    "recipes.predict": "predict_step",
    "recipes.race": "Race race",
    "recipes.from_trainer": "from_trainer",
}

if TYPE_CHECKING:
    from .core.advantages import with_advantages as with_advantages
    from .loop.async_loop import AsyncGRPOLoop as AsyncGRPOLoop
    from .backends.base import Backend as Backend
    from .backends.local.trainer import open_local as open_local
    from .recipes.open import open_backend as open_backend
    from .task.chat import sample_from_completion as sample_from_completion
    from .task.chat import start_conversation as start_conversation
    from .config.config import Config as Config
    from .core.types import Completion as Completion
    from .core.types import Datum as Datum
    from .core.types import PromptGroup as PromptGroup
    from .core.types import RLNotebookError as RLNotebookError
    from .core.types import RolloutSample as RolloutSample
    from .core.types import SampleParams as SampleParams
    from .task.data import Row as Row
    from .task.data import load_rows as load_rows
    from .core.datums import datums_from_groups as datums_from_groups
    from .insight.doctor.doctor import diagnose as diagnose
    from .insight.doctor.why import list_runs as list_runs
    from .insight.doctor.why import why as why
    from .loop.loop import GRPOLoop as GRPOLoop
    from .core.losses import make_loss_fn as make_loss_fn
    from .core.losses import register_loss as register_loss
    from .experiments.fork import fork as fork
    from .experiments.locate import locate as locate
    from .experiments.locate import parting as parting
    from .experiments.plan import plan as plan
    from .experiments.preflight import preflight as preflight
    from .recipes.rl_loop import main as main
    from .recipes.rl_loop import train as train
    from .recipes.predict import predict_step as predict_step
    from .recipes.race import Race as Race
    from .recipes.race import race as race
    from .recipes.from_trainer import from_trainer as from_trainer
    from .runs.cite import cite as cite
    from .runs.run import Run as Run
    from .runs.run import RunFolder as RunFolder
    from .runs.records import StepRecord as StepRecord
    from .runs.search import find as find
    from .runs.watch import watch as watch
    from .task.audit import audit_reward as audit_reward
    from .task.rewards import gsm8k_reward as gsm8k_reward
    from .loop.rollouts import RolloutSetup as RolloutSetup
    from .loop.step import sync_weights as sync_weights
    from .task.models import load_model as load_model
    from .task.toy import toy_format_reward as toy_format_reward
    from .task.toy import toy_reward as toy_reward
    from .task.toy import toy_rows as toy_rows
    from .experiments.replay import compare_loops as compare_loops
    from .experiments.replay import replay as replay
    from .insight.trends import ledger as ledger
    from .insight.trends import watch_run as watch_run
    from .views.charts import chart as chart
    from .views.dashboard import Dashboard as Dashboard
    from .views.report import compare as compare
    from .views.report import write_report as write_report
    from .views.tokens import inspect_tokens as inspect_tokens
    from .views.whatif import WhatIfPanel as WhatIfPanel
    from .experiments.trainers import compare_trainers as compare_trainers
    from .experiments.whatif import reward_lab as reward_lab
    from .experiments.whatif import what_if as what_if
    from .experiments.preflight import measure_noise_floor as measure_noise_floor
    from .insight.xray import xray as xray

_NAMES = sorted(name for names in _HOMES.values() for name in names.split())


def _load(name: str) -> _Any:
    "A name of the front door, imported now and kept."
    for home, names in _HOMES.items():
        if name in names.split():
            value = globals()[name] = getattr(_import_module(f"{__name__}.{home}"), name)
            return value
    raise AttributeError(_unknown(name), name=name)


def _unknown(name: str) -> str:
    "What to say of a name that is not here."
    from difflib import get_close_matches

    by_key = {n.lower().replace("_", ""): n for n in _NAMES} | {"grpotrainer": "GRPOLoop", "grpoconfig": "Config"}
    near = get_close_matches(name.lower().replace("_", ""), by_key, 1)
    hint = f" Did you mean {by_key[near[0]]!r}?" if near else ""
    return f"module {__name__!r} has no attribute {name!r}.{hint} dir({__name__}) lists the names at the front door"


def __dir__() -> list[str]:
    "The front door, and what Python asks of every package."
    return [*_NAMES, *(name for name in globals() if name.startswith("__") and name.endswith("__"))]


if not TYPE_CHECKING:  # a checker that saw a module's __getattr__ would take every name for a good one
    __all__ = _NAMES
    __getattr__ = _load
