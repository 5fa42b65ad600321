"Evaluation with separate samples, pass@k and avg@k, and the best checkpoint."

import asyncio
import itertools
import json
import math

import pytest

import rl_notebook as rln
from rl_notebook.config.config import Config
from rl_notebook.core.types import ConfigError, Datum, RecordError
from rl_notebook.task.data import load_rows
from rl_notebook.core.metrics import evaluation_names, pass_at_k
from rl_notebook.recipes.rl_loop import Problem, train
from rl_notebook.runs.run import read_best
from rl_notebook.task.toy import toy_reward, toy_rows

SMALL_RUN = {
    "kl_beta": 0.0, "prompt_groups_per_step": 2, "completions_per_prompt": 4, "max_completion_tokens": 16,
    "max_rows": 64, "learning_rate": 2e-4,
}  # fmt: skip


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_all_choices_with_a_right_one(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        right = [i < c for i in range(n)]
        chosen = [*itertools.combinations(right, k)]
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))
        assert pass_at_k(n, c, k) == pytest.approx(1 - math.comb(n - c, k) / math.comb(n, k))


def test_held_out_rows_are_sampled_as_the_evaluation_says():
    backend = rln.open_local(*rln.load_model("tiny"), inline=True)
    held_out = toy_rows(6, split="heldout")
    eval_settings = {
        "eval_samples": 4,
        "eval_sampling": {"temperature": 0.0, "max_completion_tokens": 24},
    }
    greedy = rln.GRPOLoop(
        backend, toy_rows(8), toy_reward, Config(**SMALL_RUN, **eval_settings), eval_rows=held_out
    )
    result = asyncio.run(greedy.evaluate())
    # four times the same
    assert result["eval/pass@1"] == result["eval/pass@4"] == result["eval/avg@4"]
    assert result["eval/num_samples"] == 24
    wider = Config(
        **SMALL_RUN, eval_samples=8, eval_sampling={"temperature": 1.0, "max_completion_tokens": 24}
    )
    loop = rln.GRPOLoop(backend, toy_rows(8), toy_reward, wider, eval_rows=held_out)
    result = asyncio.run(loop.evaluate())
    curve = [result[f"eval/pass@{k}"] for k in (1, 2, 4, 8)]
    assert curve == sorted(curve)
    assert curve[0] < curve[-1]
    assert result["eval/avg@8"] == pytest.approx(curve[0])
    assert asyncio.run(loop.evaluate()) == result  # the same samples again
    alone = rln.GRPOLoop(backend, toy_rows(8), toy_reward, Config(**SMALL_RUN), eval_rows=held_out)
    assert not any("@" in name for name in asyncio.run(alone.evaluate()))


def test_evaluation_settings_without_effect_are_rejected():
    for settings, text in (
        ({"eval_sampling": {"seed": 3}}, "eval_sampling: got 'seed'"),
        ({"eval_sampling": {"top_p": 2.0}}, "top_p: got 2.0"),
        ({"eval_sampling": {"max_completion_tokens": 5000}}, "leaves no prompt room"),
        ({"eval_samples": 0}, "eval_samples: got 0; expected at least 1"),
        ({"keep_best": "eval/reward"}, "Set log_path and eval_interval"),
        (
            {"keep_best": "reward", "log_path": "x", "eval_interval": 1},
            "expected a metric of the evaluation",
        ),
    ):
        with pytest.raises(ConfigError, match=text.replace("(", r"\(")):
            Config(**settings)


def run(folder, scores, resume=False, **settings):
    "A run whose evaluations have the scores of the list, step by step, from step 0."
    cfg = Config(
        **SMALL_RUN
        | {"log_path": str(folder), "eval_interval": 1, "keep_best": "eval/score"}
        | settings
    )

    async def evaluation_fn(step, rollout_fn):
        return {"score": scores[step]}

    problem = Problem(
        load_rows(toy_rows(64)), [], lambda text: float(len(text)), evaluation_fn=evaluation_fn
    )
    return asyncio.run(
        train(cfg, problem=problem, resume=resume, say=lambda line: None, progress=False)
    )


def test_the_best_checkpoint_is_kept_and_named(tmp_path):
    folder = tmp_path / "run"
    run(folder, [9.0, 0.1, 0.5, 0.3, 0.5], steps=4, dcp_save_interval=1)  # step 0 is the base model
    noted = json.loads((folder / "best.json").read_text())
    assert noted == {
        "step": 2,
        "metric": "eval/score",
        "value": 0.5,
        "checkpoint": "checkpoints/00002",
    }
    finished_run = rln.Run.open(folder)
    # the best, though only the last two are kept of a run
    assert finished_run.checkpoints == [2, 3, 4]
    assert (folder / noted["checkpoint"]).is_dir()
    run(folder, [0, 0, 0, 0, 0, 0.4, 0.8, 0.6], resume=True, steps=7)
    assert read_best(folder)["step"] == 6
    assert finished_run.checkpoints == [6, 7]


def test_the_kept_weights_are_those_that_were_measured(tmp_path):
    run(tmp_path / "run", [0.0, 0.1, 0.5, 0.3], steps=3)
    run(tmp_path / "short", [0.0, 0.1, 0.5], steps=2)
    weights = []
    for folder in ("run", "short"):
        backend = rln.open_local(*rln.load_model("tiny"), inline=True)
        result = rln.Run.open(tmp_path / folder).latest_checkpoint(at_most=2)
        asyncio.run(backend.policy.load_state(result.state, optimizer=False))
        logprobs = asyncio.run(backend.policy.forward([Datum([5, 6, 7, 8, 9], [0, 1, 1, 1])]))
        weights.append(logprobs[0].values[1:].tolist())
    assert weights[0] == weights[1]


@pytest.mark.parametrize("samples", [1, 6])
def test_keep_best_takes_only_a_metric_that_is_measured(tmp_path, samples):
    settings = {
        "eval_samples": samples,
        "eval_rows": 2,
        "eval_interval": 1,
        "steps": 1,
        "log_path": str(tmp_path / "run"),
    }
    loop = rln.GRPOLoop(
        rln.open_local(*rln.load_model("tiny"), inline=True), toy_rows(4), toy_reward, Config(**SMALL_RUN | settings),
        eval_rows=toy_rows(2, split="heldout"),
    )  # fmt: skip
    assert [*asyncio.run(loop.evaluate())] == evaluation_names(samples, ["toy_reward"])
    cfg = Config(**SMALL_RUN | settings, keep_best="eval/rewards")
    with pytest.raises(ConfigError, match=r"one of eval/reward, .*Did you mean 'eval/reward'"):
        asyncio.run(train(cfg, backend=object()))  # before anything is asked of a backend
    assert not (tmp_path / "run").exists()
    best = Config(**SMALL_RUN | settings, keep_best="eval/rewards/toy_reward/mean")
    asyncio.run(train(best, backend=rln.open_local("tiny")))
    assert read_best(tmp_path / "run")["metric"] == "eval/rewards/toy_reward/mean"


def test_a_metric_that_is_not_measured_is_named(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"keep_best: got 'eval/scor'; .* one of eval/score\. Did you mean 'eval/score'",
    ):
        run(tmp_path / "run", [0.0, 0.1], steps=1, keep_best="eval/scor")
    assert rln.Run.open(tmp_path / "run").steps == []  # before the first step
    (tmp_path / "best.json").write_text("{}")
    with pytest.raises(RecordError, match="expected step, metric, value and checkpoint"):
        read_best(tmp_path)
