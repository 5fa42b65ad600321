"""What `to_trainer` writes, loaded by the trainers' own config classes: python scripts/check_trainers.py TRAINER PEERS.

TRAINER is verl, skyrl, prime-rl or tinker. PEERS is a folder with a folder for each: `verl`, `skyrl` and
`tinker-cookbook` as their wheels unpack, `prime-rl` and `verifiers` as checked out. Install what they import
without dependencies (hydra-core, omegaconf, ray, tensordict, chz, prime-pydantic-config, renderers, …): none of them
computes anything here. Packages that only talk to sandboxes are replaced by empty ones (`STUBBED`).
"""

import asyncio
import importlib.abc
import importlib.machinery
import json
import os
import shlex
import sys
import tempfile
import tomllib
import types
from pathlib import Path
from typing import Any

STUBBED = ("prime_sandboxes", "prime_tunnel", "prime_runs", "connectrpc", "mcp", "mcp_types")
FOLDERS = {
    "verl": ["verl"],
    "skyrl": ["skyrl"],
    "prime-rl": ["prime-rl/packages/prime-rl-configs/src", "verifiers"],
    "tinker": ["tinker-cookbook"],
}
SAMPLED: dict[str, Any] = {"anchor": "rollout", "advantage_scale": "none", "weight_decay": 0.0}
WARM: dict[str, Any] = {
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 2,
    "steps": 8,
    "lora_rank": 16,
    "ppo_n_minibatches": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "clipped": {"policy_loss": "ppo", "kl_beta": 0.01},
    "dual clip": {"policy_loss": "ppo", "eps_clip_c": 3.0, "aggregation": "constant", **WARM},
    "leave one out": {"policy_loss": "ppo", "advantage_scale": "loo", "overlong": "mask"},
    "no clip": {"policy_loss": "importance_sampling", **SAMPLED},
    "masks": {"policy_loss": "dppo_tv", "dppo_low": 0.1, "dppo_high": 0.15, **SAMPLED, **WARM},
    "cosine": {"policy_loss": "cispo", "lr_scheduler_type": "cosine", "top_k": 20, "aggregation": "sum", **SAMPLED},
}  # fmt: skip


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    "Empty packages, whose names are empty classes."

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] in STUBBED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        class Empty(types.ModuleType):
            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return type(name, (), {})

        module = Empty(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def options(folder: Path, command: str) -> list[str]:
    "The options of `run.sh`."
    text = (folder / "run.sh").read_text().split(command, 1)[1]
    return shlex.split(text.replace("\\\n", " ").replace('"$@"', ""))


def value_at(config: Any, path: str) -> Any:
    "A setting of a loaded config by its path."
    for name in path.split("."):
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    return config


def load_verl(folder: Path, peers: Path) -> tuple[Any, list[str]]:
    from hydra import compose, initialize_config_dir
    from verl.utils.config import omega_conf_to_dataclass

    given = options(folder, "main_ppo")
    with initialize_config_dir(str(peers / "verl/verl/trainer/config"), version_base=None):
        config = compose("ppo_trainer", overrides=given)
    paths = ("actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm")
    made = [omega_conf_to_dataclass(value_at(config, path)) for path in paths]
    return config, [type(part).__name__ for part in made]


def load_skyrl(folder: Path, peers: Path) -> tuple[Any, list[str]]:
    from skyrl.train.config import SkyRLTrainConfig

    config = SkyRLTrainConfig.from_cli_overrides(options(folder, "train.py"))
    return config, ["SkyRLTrainConfig"]


def load_prime_rl(folder: Path, peers: Path) -> tuple[Any, list[str]]:
    sys.modules["tomli"] = tomllib
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    from prime_rl.configs.rl import RLConfig
    from pydantic_config import cli

    config = cli(RLConfig, args=["@", "rl.toml"])
    sys.modules.pop("notebook_task", None)
    sys.modules.pop("rewards", None)
    import notebook_task

    tasks = list(notebook_task.Rows(config.orchestrator.train.source[0].env.taskset))
    answer = json.loads(tasks[0].data.row)["answer"]
    reply = types.SimpleNamespace(last_reply=f"2 3 #### {answer}")
    score = asyncio.run(notebook_task.OneTurn.score(tasks[0], reply))
    assert score == 1.0, score
    sys.path.remove(str(folder))
    return config, ["RLConfig", f"{len(tasks)} tasks, graded"]


def load_tinker(folder: Path, peers: Path) -> tuple[Any, list[str]]:
    sys.path.insert(0, str(folder))
    for name in ("train", "rewards"):
        sys.modules.pop(name, None)
    import train

    config = train.make_config()
    sys.path.remove(str(folder))
    return config, [type(config).__name__]


LOADERS = {
    "verl": load_verl,
    "skyrl": load_skyrl,
    "prime-rl": load_prime_rl,
    "tinker": load_tinker,
}


def main(trainer: str, peers: Path) -> None:
    sys.meta_path.insert(0, Stubs())
    sys.path[:0] = [str(peers / name) for name in FOLDERS[trainer]]
    if trainer == "skyrl":  # pydantic asks for it below Python 3.12
        import typing

        import typing_extensions

        typing.TypedDict = typing_extensions.TypedDict
    from rl_notebook import Config, load_rows, toy_rows
    from rl_notebook.core.types import ConfigError
    from rl_notebook.recipes.conversion import same_value
    from rl_notebook.recipes.rl_loop import Problem
    from rl_notebook.recipes.to_trainer import write_trainer
    from rl_notebook.task.toy import toy_reward

    problem = Problem(load_rows(toy_rows(40)), (), toy_reward)
    small = {
        "max_completion_tokens": 24,
        "max_seq_len": 96,
        "prompt_groups_per_step": 4,
        "kl_beta": 0.0,
    }
    for name, values in CONFIGS.items():
        folder = Path(tempfile.mkdtemp()) / "out"
        cfg = Config(**small | {"base_model": "Qwen/Qwen3-8B"} | values)
        try:
            written = write_trainer(cfg, problem, trainer, folder, None)
        except ConfigError as error:
            print(f"{trainer}: {name}: not written: {error}")
            continue
        config, made = LOADERS[trainer](folder, peers)
        same = 0
        other = []
        for path, value in written.conversion.settings.items():
            if path.startswith("rows."):  # read by the recipe itself
                continue
            try:
                there = value_at(config, path)
            except (AttributeError, KeyError, TypeError):
                other.append(f"{path}: not in the loaded config")
                continue
            there = list(there) if type(there).__name__ == "ListConfig" else there
            if same_value(value, there) or (value == "None" and there is None):
                same += 1
            else:
                other.append(f"{path}={value!r}: {there!r}")
        print(
            f"{trainer}: {name}: {', '.join(made)}; {same} settings as written", *other, sep="\n  "
        )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve())
