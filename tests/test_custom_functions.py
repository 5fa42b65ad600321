"""Custom functions, by name: found, called, recorded and compared; those that a foreign run folder names: rejected.

The second half attacks: a run folder from elsewhere names code in every place that we know of, and every command
and every entry of the Python interface is tried on it. What it names would leave a file behind; none may.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.cli import main as command
from rl_notebook.config.config import Config
from rl_notebook.core.types import ConfigError, Logprobs, LossError, RecordError
from rl_notebook.task.data import load_rows
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.core.losses import POLICY_LOSSES, LossOptions, make_loss_fn, register_loss
from rl_notebook.core.trust import NameFromFile
from rl_notebook.core.imports import source_hash
from rl_notebook.recipes.rl_loop import (
    Problem,
    diagnose_step,
    load_problem,
    main,
    replay_step,
    train,
)
from rl_notebook.runs.records import StepRecord
from rl_notebook.runs.run import Run, read_checkpoint
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_reward, toy_rows
from rl_notebook.experiments.whatif import what_if
from tiny_models import uneven

SMALL_RUN: dict[str, Any] = {
    "max_rows": 16,
    "prompt_groups_per_step": 2,
    "completions_per_prompt": 4,
    "max_completion_tokens": 8,
    "max_seq_len": 64,
    "learning_rate": 1e-3,
    "kl_beta": 0.0,
    "steps": 2,
}
OPTIONS = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL_RUN.items()]

MODULE = """
"Functions of a user of the package."
from dataclasses import replace

import numpy as np
import torch


def plain(t, tis, o):
    return -t.advantages * t.policy_logprobs * tis


def doubled(t, tis, o):
    return 2 * plain(t, tis, o)


def mean(t, tis, o):
    return plain(t, tis, o).mean()


def clipped(tokens, tis, options):
    r = torch.exp(tokens.policy_logprobs - tokens.old_logprobs)
    return torch.maximum(-r * tokens.advantages, -r.clamp(*options.clip_range) * tokens.advantages) * tis


def by_name(policy_logprobs, old_logprobs, advantages, eps_clip=0.2):
    ratio = torch.exp(policy_logprobs - old_logprobs)
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - eps_clip, 1 + eps_clip) * advantages)


def misspelled(logprobs, old_logprobs, advantages):
    return -logprobs * advantages


def uneven(text: str) -> float:
    return float(sum(map(ord, text)) % 7)


def centred(groups):
    return [replace(g, advantages=g.rewards - np.median(g.rewards)) for g in groups]


def fails(groups):
    raise ZeroDivisionError("no groups today")
"""


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    "A working directory with `my_functions.py`, and a separate state directory; imports of both are forgotten."
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    # a file that is changed within a second is read again
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    losses = dict(POLICY_LOSSES)
    modules = set(sys.modules)
    (tmp_path / "my_functions.py").write_text(MODULE)
    yield tmp_path
    POLICY_LOSSES.clear()
    POLICY_LOSSES.update(losses)
    forget(*(set(sys.modules) - modules))


def forget(*modules: str) -> None:
    "As in a new process."
    for name in modules:
        if name.startswith(("my_functions", "evil")):
            sys.modules.pop(name, None)


def grpo_loop(cfg: Config, **kwargs: Any) -> GRPOLoop:
    "A loop over the toy task."
    rows = load_rows(toy_rows(16))
    return GRPOLoop(
        open_local(*load_model("tiny"), reference=cfg.kl_beta > 0), rows, uneven, cfg, **kwargs
    )


def one_step(**settings: Any) -> StepRecord:
    "A step of the toy task."
    return asyncio.run(grpo_loop(Config(**SMALL_RUN | settings)).step())


@pytest.fixture(scope="module")
def record() -> StepRecord:
    "A step with our `grpo`."
    return one_step()


# --- a custom loss, everywhere ----------------------------------------------------------------------------------------


def test_a_run_with_custom_functions_from_the_command_line(workdir, capsys):
    "Reward, loss and advantage by name; replay and resume know them, and say when the source is another."
    options = ["--rewards", "my_functions:uneven", "--policy-loss", "my_functions:doubled"]
    options += ["--advantage-fn", "my_functions:centred", "--log-path", "run"]
    assert command(["train", *OPTIONS, *options]) == 0
    record = Run.open("run").record(2)
    assert record.options["policy_loss"] == "my_functions:doubled"
    hashes = set(record.sources.values())
    assert [*record.sources] == [
        "reward uneven",
        "advantage_fn centred",
        "policy_loss my_functions:doubled",
    ]
    assert hashes == {hashlib.sha256(MODULE.encode()).hexdigest()[:12]}
    assert all((g.advantages == g.rewards - np.median(g.rewards)).all() for g in record.groups)
    as_ours = what_if(record, {"plain": {"policy_loss": "grpo"}}).table
    assert as_ours.loc["plain", "note"] == "direction of recorded, 0.5 times as long"

    forget("my_functions")
    assert command(["replay", "run", "2"]) == 0
    output = capsys.readouterr().out
    assert "every phase is the same, to the last bit" in output
    assert "not the source" not in output
    forget("my_functions")
    (workdir / "my_functions.py").write_text(MODULE.replace("return 2 *", "return 3 *"))
    assert command(["replay", "run", "1"]) == 1
    output = capsys.readouterr().out
    assert "backward is the first phase that is not the same" in output
    assert "policy_loss my_functions:doubled: not the source of step 1" in output
    assert command(["train", "--resume", "--log-path", "run", "--steps", "3"]) == 0
    assert "policy_loss my_functions:doubled: not the source of step 2" in "".join(
        capsys.readouterr()
    )
    assert Run.open("run").record(3).sources["reward uneven"] not in hashes


def test_a_registered_loss_is_known_wherever_a_loss_is_named(workdir, record):
    sys.path.insert(0, str(workdir))
    import my_functions  # type: ignore[import-not-found]

    register_loss(my_functions.doubled, name="mine")
    table = what_if(
        record, {"mine": {"policy_loss": "mine"}, "named": {"policy_loss": "my_functions:doubled"}}
    ).table
    assert table.loc["mine", "note"] == "direction of recorded, 2 times as long"
    assert table.loc["named", "note"] == "same gradient as mine"

    loop = grpo_loop(Config(**SMALL_RUN, policy_loss="mine"))
    done = asyncio.run(loop.step())
    assert done.options["policy_loss"] == "mine"
    assert done.sources["policy_loss mine"] == source_hash(my_functions.doubled)
    assert Config.from_dict(loop.cfg.to_dict()) == loop.cfg

    async def looked_at() -> StepRecord:
        "A step whose loss is chosen when it is looked at."
        loop = grpo_loop(Config(**SMALL_RUN))
        loop.prompts()
        await loop.sample()
        loop.score(), loop.advantages(), loop.datums()
        await loop.reference()
        loop.loss(policy_loss="my_functions:doubled")
        return await loop.step()

    assert asyncio.run(looked_at()).options["policy_loss"] == "my_functions:doubled"


def test_a_loss_takes_what_it_needs_by_name_wherever_a_loss_is_taken(workdir, record):
    sys.path.insert(0, str(workdir))
    from my_functions import by_name

    assert all(
        f"`{name}`" in register_loss.__doc__
        for name in ("policy_logprobs", "old_logprobs", "advantages")
    )
    small = {"eps_clip": 0.01, "anchor": "rollout", "tis": "token"}
    variants: dict[str, Any] = {
        "ppo": {"policy_loss": "ppo"},
        "small": {"policy_loss": "ppo", **small},
    }
    variants |= {"fn": {"policy_loss": by_name}, "fn small": {"policy_loss": by_name, **small}}
    variants |= {"named": {"policy_loss": "my_functions:by_name"}}
    variants |= {
        "lambda": {"policy_loss": lambda policy_logprobs, advantages: -policy_logprobs * advantages}
    }
    moved = [
        Logprobs(lp.values + 0.3 * np.sin(np.arange(len(lp.values)))) for lp in record.loss.logprobs
    ]
    result = what_if(record, variants, policy_logprobs=moved)
    alike = [note.removeprefix("same gradient as ") for note in result.table.note[-4:]]
    assert alike == ["ppo", "small", "ppo", "recorded"]
    assert result.outputs["fn small"].metrics["clip_ratio/region_mean"] > 0

    async def looked_at() -> tuple[StepRecord, StepRecord]:
        "A step whose loss is passed when it is looked at, after one of a config that has parameters of another."
        loop = grpo_loop(Config(**SMALL_RUN, policy_loss="ppo", eps_clip=0.1))
        loop.prompts()
        await loop.sample()
        loop.score(), loop.advantages(), loop.datums()
        await loop.reference()
        assert (
            loop.loss(by_name).output.loss
            == loop.loss("my_functions:by_name", eps_clip=0.2).output.loss
        )
        loop.loss(by_name)
        return await loop.step(), await loop.step()

    first, second = asyncio.run(looked_at())
    assert (first.options["policy_loss"], first.options["eps_clip"]) == ("by_name", None)
    assert second.options["policy_loss"] == "ppo"
    assert first.sources["policy_loss by_name"] == source_hash(by_name)
    assert one_step(policy_loss=by_name).options["policy_loss"] == "by_name"
    options = [
        "--policy-loss",
        "my_functions:by_name",
        "--eps-clip",
        "0.1",
        "--rewards",
        "my_functions:uneven",
    ]
    assert command(["train", *OPTIONS, *options, "--log-path", "run"]) == 0
    assert Run.open("run").record(1).options["eps_clip"] == 0.1


def test_series_that_a_loss_needs_are_present_or_named(workdir, record):
    def needs(ref_logprobs, policy_logprobs, sampler_logprobs, entropy, advantages):
        return -policy_logprobs * advantages + (policy_logprobs - ref_logprobs) ** 2 - 0.1 * entropy

    with pytest.raises(
        LossError, match=r"policy_loss 'needs': got a loss .*no ref_logprobs, .* Set kl_metric=True"
    ):
        grpo_loop(Config(**SMALL_RUN, policy_loss=needs))
    backend = open_local(*load_model("tiny"))
    loop = GRPOLoop(
        backend,
        load_rows(toy_rows(16)),
        uneven,
        Config(**SMALL_RUN, policy_loss=needs, kl_metric=True),
    )
    assert asyncio.run(loop.step()).trained
    with pytest.raises(
        LossError, match=r"policy_loss='needs': got 8 of 8 datums without ref_logprobs"
    ):
        what_if(record, {"x": {"policy_loss": needs}})
    with pytest.raises(
        LossError, match=r"make_loss 'needs': .* loss of single tokens is passed as Config\(policy"
    ):
        grpo_loop(Config(**SMALL_RUN), make_loss=needs)


def test_short_names_of_an_earlier_release_are_announced_and_others_listed(record):
    def short(t, tis, o):
        return -t.advantage * t.policy_logprobs * tis

    with pytest.warns(UserWarning, match="ActiveTokens.advantage is called advantages now"):
        result = what_if(record, {"short": {"policy_loss": short}})
    assert result.table.loc["short", "note"] == "same gradient as recorded"
    with pytest.raises(
        LossError,
        match=r"'advantag': the tokens .* have policy_logprobs, old_.* mean 'advantages'\?",
    ):
        what_if(record, {"x": {"policy_loss": lambda t, tis, o: t.advantag}})


def test_losses_that_share_a_name_are_kept_apart(workdir, record):
    def factory(scale):
        def scaled_loss(policy_logprobs, advantages):
            return -scale * advantages * policy_logprobs

        return scaled_loss

    table = what_if(record, {str(scale): {"policy_loss": factory(scale)} for scale in (2, 3)}).table
    assert [*table.note[1:]] == [
        f"direction of recorded, {scale} times as long" for scale in (2, 3)
    ]


def test_parameters_are_those_that_were_declared(workdir, record):
    with pytest.raises(
        LossError, match=r"eps_clip: got none\. Give your loss a default: a parameter"
    ):
        what_if(record, {"clipped": {"policy_loss": "my_functions:clipped"}})
    with pytest.raises(LossError, match=r"does not read eps_clip: .* If it does, say so: register"):
        what_if(record, {"clipped": {"policy_loss": "my_functions:clipped", "eps_clip": 0.1}})
    source = MODULE.replace("def clipped", "@register_loss(eps_clip=0.3)\ndef clipped")
    (workdir / "my_functions.py").write_text(
        "from rl_notebook.core.losses import register_loss\n" + source
    )
    forget("my_functions")
    POLICY_LOSSES.pop("my_functions:clipped")
    both = (
        {"policy_loss": "my_functions:clipped", "eps_clip": 0.1},
        {"policy_loss": "ppo", "eps_clip": 0.1},
    )
    outputs = what_if(record, {"clipped": both[0], "ppo": both[1]}).outputs
    assert (
        outputs["clipped"].metrics["clip_ratio/region_mean"]
        == outputs["ppo"].metrics["clip_ratio/region_mean"]
    )
    assert LossOptions("my_functions:clipped").clip_range == (0.7, 1.3)
    with pytest.raises(
        ConfigError, match=r"sapo: it is read with policy_loss=.sapo., not .clipped."
    ):
        Config(policy_loss="clipped", sapo={"temperature_pos": 2.0})


MISTAKES = [
    (
        "mean",
        r"got a tensor of shape \(\); expected a tensor of shape \(\d+,\), one term per token. Return the terms",
    ),
    (
        "uneven",
        r"policy_loss 'uneven': got a parameter 'text'; expected some of policy_logprobs, old_logprobs",
    ),
    (
        "misspelled",
        r"got a parameter 'logprobs'; expected some of .* advantages, .* Did you mean 'policy_logprobs'\?",
    ),
    (
        "nothing",
        r"got 'my_functions:nothing'; expected a function of my_functions \(.*py\), which has plain, doubled",
    ),
    (
        "__name__",
        r"got 'my_functions:__name__', which is of type str; expected a function of my_functions",
    ),
]


@pytest.mark.parametrize(("name", "message"), MISTAKES, ids=[name for name, _ in MISTAKES])
def test_a_mistake_in_a_loss_is_named(name, message, workdir, record, capsys):
    with pytest.raises(LossError, match=message):
        what_if(record, {"x": {"policy_loss": f"my_functions:{name}"}})
    assert (
        command(
            [
                "train",
                *OPTIONS,
                "--rewards",
                "my_functions:uneven",
                "--policy-loss",
                f"my_functions:{name}",
            ]
        )
        == 2
    )
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("rl-notebook train: policy_loss")


def test_advantages_by_name_and_as_an_object(workdir, record):
    problem = Problem(load_rows(toy_rows(16)), [], uneven, advantage_fn="my_functions:centred")
    lines: list[Any] = []
    main(
        Config(**SMALL_RUN),
        problem=problem,
        on_record=[lines.append],
        say=lambda line: None,
        progress=False,
    )

    def all_ones(groups):
        return [replace(g, advantages=g.rewards * 0 + 1) for g in groups]

    assert all(
        (g.advantages == g.rewards - np.median(g.rewards)).all() for r in lines for g in r.groups
    )
    result = what_if(
        record,
        {"centred": {"advantage_fn": "my_functions:centred"}, "one": {"advantage_fn": all_ones}},
    )
    assert {d.advantage for d in result.datums["one"]} == {1.0}
    assert result.table.loc["centred", "cosine"] > 0
    with pytest.raises(LossError, match="advantage_fn: got ddof as well; expected one of the two"):
        what_if(record, {"x": {"advantage_fn": all_ones, "ddof": 1}})
    with pytest.raises(
        LossError, match="got ZeroDivisionError: no groups today; expected groups with advantages"
    ):
        what_if(record, {"x": {"advantage_fn": "my_functions:fails"}})
    with pytest.raises(
        ConfigError, match="advantage_fn: advantage_scale, advantage_eps and ddof would"
    ):
        Config(advantage_fn="my_functions:centred", advantage_scale="loo")
    with pytest.raises(
        ConfigError, match="advantage_fn: got 'centred'; expected 'module:function'"
    ):
        Config(advantage_fn="centred")

    async def branched() -> list[str]:
        loop = grpo_loop(Config(**SMALL_RUN), advantage_fn=all_ones)
        loop.prompts()
        return [
            *(await loop.branch(advantage_fn="my_functions:centred")).advantage_fn.__name__.split()
        ]

    assert asyncio.run(branched()) == ["centred"]


# --- a run folder from elsewhere --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "An honest run of two steps, to be tampered with."
    folder = tmp_path_factory.mktemp("sent") / "run"
    problem = Problem(load_rows(toy_rows(16)), [], toy_reward)
    settings = SMALL_RUN | {"kl_beta": 0.01}
    main(
        Config(**settings, log_path=str(folder), dcp_save_interval=1),
        problem=problem,
        say=lambda s: None,
        progress=False,
    )
    return folder


class Trap:
    "A copy of a run folder, and the file that appears when something of it is executed."

    def __init__(self, honest: Path, workdir: Path):
        self.path = workdir / "from_a_stranger"
        self.canary = workdir / "executed"
        shutil.copytree(honest, self.path)
        code = f"from pathlib import Path\nPath({str(self.canary)!r}).touch()\n"
        code += "def f(*args, **more):\n    return 1.0\ng = rewards = f\n"
        for folder in (workdir, self.path, self.path / "steps"):
            (folder / "evil.py").write_text(code)

    def settings(self, **changes: Any) -> None:
        "Change the config."
        file = self.path / "config.yaml"
        file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | changes))

    def rewrite(self, change: Callable[[dict[str, Any]], Any], step: int = 2) -> None:
        "Change what describes a step; the checksums of its files are made to fit."
        folder = self.path / "steps" / f"{step:05d}"
        plain = json.loads((folder / "record.json").read_text())
        change(plain)
        plain.pop("sha256", None)  # records of before there were checksums have none
        for name in plain["files"]:
            content = (folder / name).read_bytes()
            plain["files"][name] = {
                "bytes": len(content),
                "sha256": hashlib.sha256(content).hexdigest(),
            }
        (folder / "record.json").write_text(json.dumps(plain))

    def texts(self) -> None:
        "Every answer is a shell command."
        shell = f"touch {self.canary}"
        for step in (1, 2):
            self.rewrite(
                lambda r: [s.update(text=shell) for g in r["groups"] for s in g["samples"]], step
            )

    @property
    def sprung(self) -> bool:
        "Whether something was executed."
        return self.canary.exists() or "evil" in sys.modules


class Bomb:
    "Unpickled, it leaves a file behind."

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


def _rewards(*names: str) -> Callable[[Trap], None]:
    return lambda trap: (trap.texts(), trap.settings(rewards=list(names)))[1]


def _yaml_tag(trap: Trap) -> None:
    with (trap.path / "config.yaml").open("a") as file:
        file.write(f"\nrewards: !!python/object/apply:os.system ['touch {trap.canary}']\n")


def _recorded_loss(name: str) -> Callable[[Trap], None]:
    return lambda trap: trap.rewrite(lambda r: r["options"].update(policy_loss=name))


def _pickles(trap: Trap) -> None:
    "Pickles where arrays and states are, and next to them."
    bomb = pickle.dumps(Bomb(trap.canary))
    for name in ("arrays.safetensors", "tokens.parquet", "completions.parquet"):
        (trap.path / "steps" / "00002" / name).write_bytes(bomb)
    trap.rewrite(lambda r: None)
    for state in trap.path.glob("checkpoints/*/trainer"):
        for name in ("pytorch_model.bin", "state.pt", "state.pkl"):
            (state / name).write_bytes(bomb)


def _parquet_types(trap: Trap) -> None:
    "A column whose type is a pickle, as old versions of pyarrow had them."
    file = trap.path / "steps" / "00002" / "tokens.parquet"
    table = pq.read_table(file)
    bomb = pickle.dumps(Bomb(trap.canary))
    hidden = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": bomb,
    }
    fields = [f.with_metadata(hidden) for f in table.schema]
    pq.write_table(pa.table(table.columns, schema=pa.schema(fields, table.schema.metadata)), file)
    trap.rewrite(lambda r: None)


def _model(trap: Trap) -> None:
    "A model with its code and its chat template."
    model = trap.path / "model"
    model.mkdir()
    (model / "modeling_evil.py").write_text(
        (trap.path / "evil.py").read_text() + "class Evil: pass\n"
    )
    auto = dict.fromkeys(
        ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"), "modeling_evil.Evil"
    )
    auto["AutoTokenizer"] = ["modeling_evil.Evil", None]
    (model / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto}))
    (model / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": auto["AutoTokenizer"]}})
    )
    trap.settings(base_model=str(model))


def _template(trap: Trap) -> None:
    "The tiny model with a chat template that reaches for the shell."
    model, tokenizer = load_model("tiny")
    model.save_pretrained(trap.path / "model")
    shell = f"cycler.__init__.__globals__.os.system('touch {trap.canary}')"
    tokenizer.chat_template = "{{ " + shell + " }}{{ ''.__class__.__mro__[1].__subclasses__() }}"
    tokenizer.save_pretrained(trap.path / "model")
    rows = [{"messages": [{"role": "user", "content": "1+1"}], "answer": "2"}] * 16
    (trap.path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    trap.settings(base_model=str(trap.path / "model"), dataset=str(trap.path / "rows.jsonl"))


ATTACKS: dict[str, Callable[[Trap], Any]] = {
    "a shell": _rewards("os:system"),
    "a module of the folder": _rewards("evil:f"),
    "our own module that imports one": _rewards(
        "rl_notebook.runs.records:os", "rl_notebook.task.rewards:subprocess"
    ),
    "a function that evaluates": _rewards("builtins:exec", "pickle:loads", "subprocess:getoutput"),
    "one text for a list": lambda trap: (trap.texts(), trap.settings(rewards="os:system")),
    "a loss": lambda trap: trap.settings(policy_loss="evil:f"),
    "a loss of a step": _recorded_loss("evil:f"),
    "advantages": lambda trap: trap.settings(advantage_fn="evil:f"),
    "rows of a function": lambda trap: trap.settings(dataset="evil:f"),
    "an earlier spelling": lambda trap: trap.settings(loss_type="evil:f"),
    "a loss for a sub-config": lambda trap: trap.settings(
        tis={"level": "evil:f"}, report_to=["evil:f"]
    ),
    "tags": _yaml_tag,
    "pickles": _pickles,
    "types of parquet": _parquet_types,
    "a model with code": _model,
    "a chat template": _template,
}


@contextlib.contextmanager
def errors_allowed() -> Iterator[None]:
    "Errors are allowed: only what is executed counts."
    with contextlib.suppress(Exception):
        yield


async def _stepped(path: Path) -> None:
    "The loop of a run, opened by hand."
    run = Run.open(path)
    cfg = replace(Config.from_dict(run.config), log_path=None)
    rows = load_rows(toy_rows(16))
    loop = GRPOLoop(open_local(*load_model("tiny")), rows, list(cfg.rewards) or toy_reward, cfg)
    await loop.seek(1, run)
    await loop.step()


def _looked_at(path: Path) -> None:
    "Everything that shows or explains a record."
    from rl_notebook.views.report import write_report
    from rl_notebook.views.tokens import inspect_tokens
    from rl_notebook.views.whatif import WhatIfPanel
    from rl_notebook.experiments.whatif import reward_lab
    from rl_notebook.insight.xray import xray

    run = Run.open(path)
    tokenizer = load_model("tiny")[1]
    repr(run), run._repr_html_(), run.metrics()
    write_report(run, path / "report.html")
    record = run.record(2)
    for look in (
        lambda: what_if(record, {"k1": {"kl_beta": 0.1}}),
        lambda: what_if(record, {"ppo": {"policy_loss": "ppo"}}),
        lambda: WhatIfPanel(record),
        lambda: make_loss_fn(record.datums, **record.options)(record.datums, [])[0],
        lambda: xray(record),
        lambda: inspect_tokens(record, tokenizer),
        lambda: reward_lab(record, list(run.config.get("rewards", [])) or toy_reward),
    ):
        with errors_allowed():
            repr(look())


ENTRIES: dict[str, Callable[[Path], Any]] = {
    "view": lambda p: command(["view", str(p), "--once"]),
    "doctor": lambda p: command(["doctor", str(p)]),
    "doctor --rescore": lambda p: command(["doctor", str(p), "--step", "2", "--rescore"]),
    "replay": lambda p: command(["replay", str(p), "2"]),
    "train --resume": lambda p: command(
        ["train", "--resume", "--log-path", str(p), "--steps", "3"]
    ),
    "train --config": lambda p: command(
        ["train", "--config", str(p / "config.yaml"), "--log-path", f"{p}-again"]
    ),
    "replay_step": lambda p: asyncio.run(replay_step(p, 2)),
    "diagnose_step": lambda p: asyncio.run(diagnose_step(p, 2)),
    "train": lambda p: asyncio.run(
        train(Config.from_dict(Run.open(p).config), resume=True, progress=False)
    ),
    "train from the file": lambda p: main(
        replace(Config.from_yaml(p / "config.yaml"), log_path=None), progress=False
    ),
    "a checkpoint": lambda p: load_problem(
        Config.from_dict(read_checkpoint(p / "checkpoints" / "00002").config)
    ),
    "a loop": lambda p: asyncio.run(_stepped(p)),
    "views": _looked_at,
}
EVERYWHERE = ("a shell", "a loss of a step")  # these are tried through every entry


@pytest.mark.parametrize("attack", EVERYWHERE)
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_foreign_run_folder_executes_nothing(entry, attack, sent, workdir, capsys, monkeypatch):
    trap = Trap(sent, workdir)
    ATTACKS[attack](trap)
    # who is asked, and says yes without reading
    monkeypatch.setattr("builtins.input", lambda *args: "y")
    with errors_allowed():
        ENTRIES[entry](trap.path)
    assert not trap.sprung, capsys.readouterr()


@pytest.mark.parametrize("attack", [a for a in ATTACKS if a not in EVERYWHERE])
def test_other_tricks_by_the_shortest_way(attack, sent, workdir, capsys):
    trap = Trap(sent, workdir)
    ATTACKS[attack](trap)
    with errors_allowed():
        load_problem(Config.from_dict(Run.open(trap.path).config))
    with errors_allowed():
        Run.open(trap.path).record(2)
    if attack in ("a model with code", "a chat template"):
        with errors_allowed():
            asyncio.run(replay_step(trap.path, 2))
    assert not trap.sprung, capsys.readouterr()


def test_rejected_names_are_listed_and_can_be_trusted(sent, workdir, capsys):
    "The proof that the attacks would work: with --trust the very same folder executes what it names."
    trap = Trap(sent, workdir)
    trap.settings(rewards=["evil:f", "format"], policy_loss="evil:g")
    assert command(["replay", str(trap.path), "2"]) == 2
    errors = capsys.readouterr().err
    names = "config: got 'evil:f', 'evil:g', which"
    assert names in errors.replace("'evil:g', 'evil:f'", "'evil:f', 'evil:g'")
    fix = "Nothing was imported, read or sent. If you trust who wrote the folder: --trust, or trust=True in Python."
    assert fix in errors
    assert not trap.sprung
    command(["replay", str(trap.path), "2", "--trust"])
    assert f"{trap.path}: trusted with what it names: evil:f, evil:g" in capsys.readouterr().err
    assert trap.sprung


REACHING = {  # settings that reach out of the run: what is named in the message
    "a tracker": ({"report_to": ["wandb"]}, "'wandb'"),
    "a file as template": ({"chat_template": "/etc/passwd"}, "'/etc/passwd'"),
    "an address as rows": (
        {"dataset": "http://127.0.0.1:9/rows.jsonl"},
        "'http://127.0.0.1:9/rows.jsonl'",
    ),
    "a service": ({"backend": "tinker", "lora_rank": 8}, "'tinker'"),
    "a checkpoint elsewhere": ({"resume": {"resume_from": "../another"}}, "'../another'"),
}


@pytest.mark.parametrize("what", REACHING)
@pytest.mark.parametrize(
    "way", ["--resume --log-path {}", "--config {}/config.yaml --log-path new"]
)
def test_settings_of_a_foreign_run_that_reach_outside_need_trust(way, what, sent, workdir, capsys):
    trap = Trap(sent, workdir)
    (settings, named) = REACHING[what]
    trap.settings(**settings)
    before = sorted(trap.path.rglob("*"))
    modules = {*sys.modules}
    assert command(["train", *way.format(trap.path).split()]) == 2
    output = capsys.readouterr().err
    assert f"config: got {named}, which" in output.replace("'tinker', 'accounts", "'accounts")
    assert "Nothing was imported, read or sent" in output
    assert not {"wandb", "tinker"} & ({*sys.modules} - modules)
    assert sorted(trap.path.rglob("*")) == before


# --- a run that was started here --------------------------------------------------------------------------------------


@pytest.fixture
def custom_run(workdir: Path) -> Path:
    "A run with custom functions."
    overrides = {"rewards": ["my_functions:uneven"], "policy_loss": "my_functions:plain"}
    main(
        Config(**SMALL_RUN, **overrides, log_path="run", dcp_save_interval=1),
        say=lambda line: None,
        progress=False,
    )
    forget("my_functions")
    return workdir / "run"


def is_rejected(path: Path | str) -> bool:
    "Whether the names of a folder are rejected."
    try:
        load_problem(Config.from_dict(Run.open(path).config))
    except RecordError:
        return True
    return False


def test_a_run_that_was_started_here_is_known_by_its_path_and_its_beginning(
    custom_run, workdir, monkeypatch
):
    assert not is_rejected(custom_run)
    assert not is_rejected("run")
    assert type(Run.open(custom_run).record(2).options["policy_loss"]) is str
    shutil.copytree(custom_run, workdir / "copy")
    assert is_rejected(workdir / "copy")
    text = (custom_run / "config.yaml").read_text()
    edits = (
        text.replace("my_functions:uneven", "os:system"),
        text + "\n",
        text.replace("seed: 0", "seed: 1"),
    )
    # what is edited by hand stays trusted; a name that is new in it does not
    for edited in edits:
        (custom_run / "config.yaml").write_text(edited)
        assert is_rejected(custom_run) == ("os:system" in edited)
    (custom_run / "config.yaml").write_text(text)
    assert not is_rejected(custom_run)
    step = Trap.__new__(Trap)
    step.path = custom_run
    step.rewrite(lambda r: r["options"].update(policy_loss="os:system"))
    assert isinstance(Run.open(custom_run).record(2).options["policy_loss"], NameFromFile)
    monkeypatch.setenv("XDG_STATE_HOME", str(workdir / "another"))
    assert is_rejected(custom_run)


def test_a_foreign_run_that_is_resumed_with_trust_is_trusted_from_then_on(
    custom_run, workdir, capsys
):
    moved = workdir / "moved"
    custom_run.rename(moved)
    resume = ["train", "--resume", "--log-path", str(moved), "--steps", "3"]
    assert command(resume) == 2
    assert "rl-notebook train: config: got 'my_functions:" in capsys.readouterr().err
    assert command([*resume, "--trust"]) == 0
    assert not is_rejected(moved)
