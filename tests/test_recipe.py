"""The recipe as the Fireworks guides import it, and what `train` does around the loop."""

import asyncio
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from errors import failed
from tiny_models import uneven

from rl_notebook.agents.environments import agent_rollouts
from rl_notebook.backends.local.trainer import open_local, read_folder
from rl_notebook.cli import main as command
from rl_notebook.config.config import DeployConfig
from rl_notebook.core.types import BackendError, ConfigError, DataError, RLNotebookError, RolloutRun
from rl_notebook.core.types import RolloutSample, SampleParams
from rl_notebook.recipes import async_rl_loop, rl_loop
from rl_notebook.recipes.rl_loop import Config, Problem, RunResult, load_problem, main, make_problem
from rl_notebook.runs.records import StepRecord
from rl_notebook.runs.run import RunFolder
from rl_notebook.task.chat import sample_from_completion
from rl_notebook.task.data import load_rows
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import is_heldout, toy_rows

SMALL_RUN: dict[str, Any] = {
    "max_rows": 8,
    "prompt_groups_per_step": 2,
    "completions_per_prompt": 4,
    "max_completion_tokens": 8,
    "max_seq_len": 64,
    "learning_rate": 1e-3,
}


def toy(eval_rows: int = 0) -> Problem:
    "Eight rows, others held out, and a reward."
    held_out = load_rows(toy_rows(eval_rows, split="heldout")) if eval_rows else []
    return Problem(load_rows(toy_rows(8)), held_out, uneven)


def run(cfg: Config, **options: Any) -> RunResult:
    "Train quietly."
    return main(cfg, say=lambda line: None, progress=False, **options)


# --- as in the Fireworks guides ---------------------------------------------------------------------------------------


SEED = """
from rl_notebook.recipes.rl_loop import Config, main

cfg = Config(
    base_model="tiny",
    dataset={dataset!r},
    learning_rate=1e-5,
    kl_beta=0.001,
    completions_per_prompt=4,
    max_completion_tokens=8,
    temperature=1.0,
    epochs=1,
    max_rows=2,
    max_seq_len=64,
    log_path={log_path!r},
)
main(cfg)
"""


@pytest.mark.slow
def test_the_import_of_the_documents_runs_as_a_script(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": f"What is 1+{i}?"}], "ground_truth": str(i + 1)}
        for i in range(4)
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    script = tmp_path / "script.py"
    script.write_text(SEED.format(dataset=str(data), log_path=str(tmp_path / "run")))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "step 1 · reward " in done.stdout
    run = RunFolder.open(tmp_path / "run")
    assert run.steps == [1, 2]
    assert [record.groups[0].row["ground_truth"] for record in run] in (["1", "2"], ["2", "1"])


# --- what is loaded -------------------------------------------------------------------------------------------------


def test_a_keyword_says_what_it_is_whatever_its_parameters_are_called():
    "A factory whose parameter has another name, and what it makes; a function whose parameter is called `setup`."
    rows = [{"prompt": "1+1=", "answer": "2"}] * 4
    group_sizes = list[int]()

    def factory(dependencies):
        group_sizes.append(dependencies.completions_per_prompt)

        async def run(row):
            return await sampled(dependencies, row)

        return run

    async def sampled(dependencies, row):
        params = SampleParams(**dependencies.sample_kwargs, seed=row["seed"])
        [completion] = await dependencies.sampler.sample(row["prompt_token_ids"], params)
        return sample_from_completion(completion, uneven(completion.text))

    def make_rollout_fn(setup):
        async def by_name(setup_of_a_row):
            return await sampled(setup, setup_of_a_row)

        return by_name

    for rollouts in ({"rollout_fn_factory": factory}, {"rollout_fn_factory": make_rollout_fn}):
        for module in (rl_loop, async_rl_loop):
            assert (
                module.main(
                    Config(**SMALL_RUN, steps=1), rows=rows, say=lambda _: None, **rollouts
                ).steps
                == 1
            )
    assert group_sizes == [4, 4]

    with pytest.raises(ConfigError, match="rollout_fn: got a rollout_fn_factory as well"):
        run(Config(**SMALL_RUN, steps=1), rows=rows, rollout_fn=len, rollout_fn_factory=factory)


@pytest.mark.parametrize("recipe", ["rl_loop", "async_rl_loop"])
@pytest.mark.parametrize("with_rollouts", [True, False])
def test_main_takes_rows_a_filter_and_an_evaluation_as_in_the_guides(recipe, with_rollouts):
    asked = list[tuple[int, float]]()
    kept = list[int]()
    records = list[StepRecord]()

    def make_rollout_fn(setup):
        async def rollout_fn(sample_prompt, *, evaluation=False):
            params = SampleParams(**setup.sample_kwargs, seed=sample_prompt["seed"])
            [completion] = await setup.sampler.sample(sample_prompt["prompt_token_ids"], params)
            sample = sample_from_completion(completion, uneven(completion.text) + 100 * evaluation)
            return RolloutRun((sample,), sample.reward)

        return rollout_fn

    async def evaluation_fn(step, rollout_fn):
        outcome = await rollout_fn(rows[0])
        assert isinstance(outcome, RolloutSample)  # a run of one segment is that segment
        asked.append((step, outcome.reward))
        return {"reward": outcome.reward} if step else None

    main = {"rl_loop": rl_loop, "async_rl_loop": async_rl_loop}[recipe].main
    overrides = {"rollout_fn_factory": make_rollout_fn} if with_rollouts else {}
    rows = toy_rows(8)
    cfg = Config(**SMALL_RUN, steps=2, eval_interval=1)

    def keep(group):
        return kept.append(group.number) or True

    settings = {
        "dynamic_filter_fn": keep,
        "evaluation_fn": evaluation_fn,
        "on_record": [records.append],
        **overrides,
    }
    result = main(cfg, rows=rows, say=lambda line: None, progress=False, **settings)
    assert (result.steps, kept != []) == (2, True)
    assert [step for step, _ in asked] == [0, 1, 2]
    assert all(reward >= 100 for _, reward in asked) == with_rollouts
    assert [r.metrics["eval/reward"] for r in records] == [reward for step, reward in asked[1:3]]


def test_held_out_rows_are_no_training_rows(tmp_path):
    problem = load_problem(Config(max_rows=64, eval_rows=32))
    digits = [
        [int(c) for c in str(row.data["question"]) if c.isdigit()] for row in problem.eval_rows
    ]
    assert all(is_heldout(terms) for terms in digits)
    assert not {row.data["question"] for row in problem.rows} & {
        row.data["question"] for row in problem.eval_rows
    }
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(
            json.dumps({"question": f"What is {i}?", "answer": str(i)}) + "\n" for i in range(10)
        )
    )
    problem = load_problem(Config(dataset=str(data), max_rows=6, eval_rows=3))
    assert [row.answer for row in problem.rows] == list("012345")
    assert [row.answer for row in problem.eval_rows] == list("678")
    problem = load_problem(Config(dataset=str(data), max_rows=None, eval_rows=3))
    assert (len(problem.rows), [row.answer for row in problem.eval_rows]) == (7, list("789"))


def test_a_service_without_a_key_is_rejected_before_anything_is_sent():
    deployment = DeployConfig(tokenizer_model="tiny")
    fireworks = Config(
        **SMALL_RUN, base_model="accounts/fireworks/models/qwen3-8b", deployment=deployment
    )
    with pytest.raises(
        BackendError, match="key: got no FIREWORKS_API_KEY; expected an environment variable"
    ):
        main(fireworks)
    with pytest.raises(
        BackendError, match="key: got no TINKER_API_KEY; expected an environment variable"
    ):
        main(
            Config(
                **SMALL_RUN,
                backend="tinker",
                base_model="Qwen/Qwen3-8B",
                tokenizer_model="tiny",
                lora_rank=4,
            )
        )


def test_a_backend_that_is_passed_stays_open():
    backend = open_local(*load_model("tiny"))
    for _ in range(2):
        assert run(Config(**SMALL_RUN, steps=1), problem=toy(), backend=backend).steps == 1


# --- records, trackers, evaluation ----------------------------------------------------------------------------------


def test_records_go_to_every_listener(tmp_path):
    records: list[StepRecord] = []
    lines: list[str] = []
    cfg = Config(**SMALL_RUN, log_path=str(tmp_path / "run"))
    result = main(cfg, problem=toy(), on_record=[records.append], say=lines.append, progress=False)
    assert [record.step for record in records] == [1, 2, 3, 4]
    assert all(
        line.startswith(record.verdict) for line, record in zip(lines, records, strict=False)
    )
    assert result.run is not None
    assert [
        record.metrics == stored.metrics for record, stored in zip(records, result.run, strict=True)
    ] == [True] * 4
    assert result.run.checkpoints == [4]  # the trained policy is always kept
    assert (result.reward_before, result.reward_after, result.stopped) == (None, None, False)
    assert str(result).startswith("done (4 steps, ")


def test_held_out_reward_before_after_and_every_so_often(tmp_path):
    cfg = Config(**SMALL_RUN, eval_rows=3, eval_interval=3, log_path=str(tmp_path / "run"))
    result = run(cfg, problem=toy(eval_rows=3))
    measured = RunFolder.open(tmp_path / "run").metrics()["eval/reward"].dropna()
    assert measured.index.tolist() == [0, 3, 4]
    assert (result.reward_before, result.reward_after) == (measured[0], measured[4])
    assert str(result).startswith(
        f"held-out reward {measured[0]:.2f} -> {measured[4]:.2f} (4 steps, "
    )


# --- weights that leave the numbers ---------------------------------------------------------------------------------


def options(folder: Any, steps: int, rate: float) -> list[str]:
    "A small run from the command line; `dataset` is its own, so that every group has signal."
    settings = SMALL_RUN | {
        "max_rows": 64,
        "learning_rate": rate,
        "steps": steps,
        "log_path": folder,
    }
    return [
        arg
        for name, value in settings.items()
        for arg in (f"--{name.replace('_', '-')}", str(value))
    ]


def test_a_rate_that_destroys_the_weights_ends_the_run_and_leaves_the_checkpoint(tmp_path, capfd):
    folder = tmp_path / "run"
    uninterrupted = tmp_path / "uninterrupted"
    assert command(["train", *options(folder, 2, 1e-3)]) == 0
    assert command(["train", "--resume", *options(folder, 4, 9e37)]) == 2
    output = capfd.readouterr()
    assert re.search(
        r"step 3: optim_step, update \d: update rejected: got NaN or infinity in model\.\S+",
        output.err,
    )
    assert (
        "stopped after step 2; it resumes after step 2 with: rl-notebook train --resume"
        in output.out + output.err
    )
    assert (RunFolder.open(folder).checkpoints, RunFolder.open(folder).steps) == ([2], [1, 2])
    # costs that record, not the run
    (folder / "steps/00001/tokens.parquet").write_bytes(b"spoiled")
    lines = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(lines.replace('"step": 1', '"step": 7', 1))
    assert command(["train", "--resume", *options(folder, 4, 1e-3)]) == 0
    assert command(["train", *options(uninterrupted, 4, 1e-3)]) == 0
    here, there = (read_folder(d / "checkpoints/00004/trainer")[0] for d in (folder, uninterrupted))
    assert all(torch.equal(here[name], there[name]) for name in here if not name.startswith("rng"))


def test_weights_that_were_spoiled_between_steps_are_not_saved(tmp_path):
    backend = open_local(*load_model("tiny"))
    lines = []

    def set_nan(record: StepRecord) -> None:
        if record.step == 3:
            next(iter(backend.policy.state.params.values())).data[0] = torch.nan  # type: ignore[attr-defined]

    cfg = Config(**SMALL_RUN, log_path=str(tmp_path / "run"), dcp_save_interval=2)
    with pytest.raises(RLNotebookError, match=r"(?i)nan"):
        main(
            cfg,
            problem=toy(),
            backend=backend,
            on_record=[set_nan],
            say=lines.append,
            progress=False,
        )
    assert RunFolder.open(tmp_path / "run").checkpoints == [2]
    assert any(
        "and no checkpoint could be saved" in line and "not finite: got NaN" in line
        for line in lines
    )


# --- stopping -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows_of_script", [False, True], ids=["a run folder", "rows of a script"])
def test_a_stop_is_reported_with_what_is_saved(rows_of_script, tmp_path, monkeypatch):
    from rl_notebook.loop.loop import GRPOLoop

    sample = GRPOLoop.sample
    lines = []

    async def stops(loop: GRPOLoop) -> Any:
        if loop.state.number == 3:
            loop.stop()
        return await sample(loop)

    monkeypatch.setattr(GRPOLoop, "sample", stops)
    folder = tmp_path / "a run"
    cfg = Config(**SMALL_RUN, log_path=str(folder), eval_rows=0 if rows_of_script else 2)
    parts = (
        {"rows": toy().rows, "reward": toy().reward}
        if rows_of_script
        else {"problem": toy(eval_rows=2)}
    )
    result = main(cfg, say=lines.append, progress=False, **parts)
    assert (result.steps, result.stopped, result.reward_after) == (2, True, None)
    assert str(result).startswith("stopped (2 steps, ")
    command = f"rl-notebook train --resume --log-path '{folder}'"
    script = f"the script that began it, main(..., resume=True), and log_path '{folder}'"
    assert (
        f"stopped after step 2; it resumes after step 2 with: {script if rows_of_script else command}"
        in lines
    )
    assert RunFolder.open(folder).checkpoints == [2]


# --- completions in flight --------------------------------------------------------------------------------------------


class Counted:
    "A sampler that notes how many completions are asked of it at once."

    def __init__(self, sampler):
        self.inner = sampler
        self.now = 0
        self.most = 0

    async def sample(self, prompt_tokens, params):
        self.now += params.n
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(0.005)
            return await self.inner.sample(prompt_tokens, params)
        finally:
            self.now -= params.n

    def __getattr__(self, name):
        return getattr(self.inner, name)


FIXED = {"concurrency": {"mode": "fixed", "max_concurrency": 3}}


@pytest.mark.parametrize(
    ("asks", "limit"), [("sampler", {"max_concurrent": 2}), ("serve", FIXED), ("loop", FIXED)]
)
def test_a_limit_is_one_of_completions(limit, asks):
    most = limit.get("max_concurrent", 3)

    async def play(sample_prompt, rollout):
        body = {"messages": sample_prompt["messages"]}
        head = {"Authorization": f"Bearer {rollout.key}"}
        async with httpx.AsyncClient(headers=head, timeout=60) as client:
            (await client.post(f"{rollout.url}/chat/completions", json=body)).raise_for_status()
        return 1.0

    def make_rollout_fn(setup):
        async def rollout_fn(sample_prompt):
            params = SampleParams(**setup.sample_kwargs, seed=sample_prompt["seed"])
            [completion] = await setup.sampler.sample(sample_prompt["prompt_token_ids"], params)
            return sample_from_completion(completion, uneven(completion.text))

        return rollout_fn

    backend = open_local(*load_model("tiny"), reference=False)
    backend.sampler = Counted(backend.sampler)
    factory = {"sampler": make_rollout_fn, "serve": agent_rollouts(play), "loop": None}[asks]
    overrides = {"rollout_fn_factory": factory} if factory else {}
    cfg = Config(**SMALL_RUN | {"kl_beta": 0.0, "prompt_groups_per_step": 4}, steps=1, **limit)
    assert run(cfg, backend=backend, rows=toy_rows(8), **overrides).steps == 1
    assert 0 < backend.sampler.most <= most


# --- what a run leaves behind -----------------------------------------------------------------------------------------


PERF = (
    "wait_time_ratio",
    "overlap_ratio",
    "step_wall_time",
    "ref_forward_time",
    "fwd_bwd_time",
    "optim_step_time",
)
PERF += (
    "weight_sync_time",
    "trainer_wait_for_sampler_time",
    "sampler_wait_for_trainer_time",
    "rollout_samples_per_s",
)


@pytest.mark.parametrize("recipe", [rl_loop, async_rl_loop])
def test_a_run_with_its_rows_is_replayed_with_them_and_says_which_rows_waited(
    recipe, tmp_path, capsys
):
    path = tmp_path / "run"
    cfg = recipe.Config(**SMALL_RUN | {"max_completion_tokens": 16}, steps=2, log_path=str(path))
    quiet = {"say": lambda line: None, "progress": False}
    recipe.main(cfg, rows=toy_rows(16, seed=99), dynamic_filter_fn=lambda group: True, **quiet)
    table = rl_loop.Run.open(path).metrics()
    assert {f"perf/{name}" for name in PERF} <= set(table.columns)
    assert (table.loc[1:, "perf/step_wall_time"] > 0).all()
    problem = rl_loop.recorded_problem(rl_loop.Run.open(path), cfg)
    assert [r.data for r in problem.rows] == toy_rows(16, seed=99)
    if recipe is rl_loop:
        assert command(["replay", str(path), "2"]) == 0, capsys.readouterr()


def test_rows_without_answer_are_rejected_only_where_a_reward_reads_it(tmp_path):
    path = tmp_path / "countdown.jsonl"
    path.write_text(
        '{"question": "Make 98.", "target": 98, "nums": [44, 19, 35]}\n', encoding="utf-8"
    )
    assert load_problem(Config(dataset=str(path), rewards=("countdown",))).rows[0].answer is None
    assert (
        make_problem(Config(dataset=str(path)), reward=lambda text, target: 1.0)
        .rows[0]
        .data["target"]
        == 98
    )
    with pytest.raises(DataError, match="no answer"):
        load_problem(Config(dataset=str(path), rewards=("countdown", "gsm8k")))


def test_a_resumed_run_notices_other_rows_and_continues_with_the_same_from_elsewhere(tmp_path):
    rows = [{"question": f"What is {i}+1?", "answer": str(i + 1)} for i in range(8)]

    def write(folder: Path, records: list[dict[str, str]]) -> Config:
        (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records))
        overrides = {
            "dataset": str(folder / "d.jsonl"),
            "log_path": str(folder / "run"),
            "rewards": ["gsm8k"],
        }
        return Config(
            **{
                **SMALL_RUN,
                **overrides,
                "max_rows": None,
                "completions_per_prompt": 2,
                "kl_beta": 0.0,
            }
        )

    first = tmp_path / "first"
    later = tmp_path / "later"
    first.mkdir()
    run(replace(write(first, rows), steps=1))
    for changed in ([*rows[:7], {**rows[7], "answer": "7"}], rows[::-1]):
        failed(
            lambda changed=changed: run(write(first, changed), resume=True),
            "rows of the data",
            where="resume",
        )
    write(first, rows)
    first.rename(later)
    run(replace(write(later, rows), steps=2), resume=True)
    seen = [
        group.row["question"]
        for step in (1, 2)
        for group in RunFolder.open(later / "run").record(step).groups
    ]
    assert len(set(seen)) == 4


def test_the_row_that_shortens_every_completion_is_named_and_plain_prompts_are_reported(tmp_path):
    rows = [
        *({"id": f"r{i}", "prompt": f"{i}+1=", "answer": "1"} for i in range(3)),
        {"id": "long", "prompt": "x" * 480},
    ]
    lines: list[str] = []
    cfg = Config(
        base_model="tiny", steps=1, completions_per_prompt=2, prompt_groups_per_step=1, kl_beta=0.0
    )
    main(cfg, rows=rows, reward=lambda text: float(len(text)), say=lines.append, progress=False)
    [budget] = [line for line in lines if line.startswith("fitted")]
    assert "as the prompt of row 'long' has 480 tokens" in budget
    assert any("prompts of plain text, without the chat template: all" in line for line in lines)
    lines.clear()
    short = [{"question": row["prompt"], "answer": "1"} for row in rows[:3]]
    main(cfg, rows=short, reward=lambda text: float(len(text)), say=lines.append, progress=False)
    assert not [line for line in lines if "as the prompt" in line or "plain text" in line]
