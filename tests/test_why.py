"""One verdict on any log or run: from metrics alone, from tokens, and on the command line.

The runs are of the shipped model, a few small steps each: what is asked is whether a verdict that metrics alone gave stays
when the tokens of the same run are looked at.
"""

import asyncio
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import rl_notebook as rln
from rl_notebook.cli import main
from rl_notebook.core.types import RecordError
from rl_notebook.insight.doctor.questions import QUESTIONS, Cause
from rl_notebook.insight.doctor.why import why, words_of_trainer

LOGS = Path(__file__).parent / "logs"
HEALTHY = {
    "loss": 0.01,
    "grad_norm": 0.8,
    "reward": 0.4,
    "reward_std": 0.3,
    "frac_reward_zero_std": 0.1,
    "kl": 0.002,
    "entropy": 0.6,
    "completions/mean_length": 80.0,
    "completions/clipped_ratio": 0.02,
    "learning_rate": 1e-5,
}


def log_of(*parts):
    "A log as text, from pairs of a number of steps and what differs in them from a healthy one."
    rows = [HEALTHY | changes for steps, changes in parts for _ in range(steps)]
    return "\n".join(json.dumps({"step": i + 1, **row}) for i, row in enumerate(rows))


DEAD = {"frac_reward_zero_std": 1.0, "reward_std": 0.0, "reward": 0.0, "grad_norm": 0.0}
CUT = {"completions/clipped_ratio": 0.95}
CASES = {  # log: the question of the verdict and a part of its text
    "no signal from the start": (log_of((12, DEAD)), "signal", "100%"),
    "no signal after ten steps": (log_of((10, {}), (20, DEAD)), "signal", "since step 11"),
    "cut": (log_of((12, CUT)), "completions", "95%"),
    "cut, so no signal": (log_of((12, CUT | DEAD)), "completions", "95%"),
    "a third cut": (log_of((12, {"completions/clipped_ratio": 0.3} | DEAD)), "signal", "100%"),
    "empty": (log_of((12, {"completions/mean_length": 1.0})), "completions", "1.000 tokens"),
    "NaN": (log_of((12, {}), (4, {"loss": math.nan, "grad_norm": math.nan})), "numbers", "step 13"),
    "too large": (log_of((8, {}), (9, {"kl": 4.0} | DEAD | CUT)), "step size", "since step 8"),
    "too large, then no KL": (
        log_of((1, {}), (1, {"kl": 4.0}), (12, DEAD | {"kl": None})),
        "step size",
        "since step 1",
    ),
    "collapsed": (log_of((12, {}), (20, {"entropy": 0.001})), "step size", "entropy"),
    "rate 0": (log_of((12, {"learning_rate": 0.0})), "step size", "in every step"),
    "rate 0.1": (log_of((12, {"learning_rate": 0.1})), "step size", "0.1"),
    "gradient 0": (log_of((12, {"grad_norm": 0.0})), "computation", "10% of the groups"),
    "advantages lost": (
        log_of((12, {"advantage_std": 1.0}), (12, {"advantage_std": 0.01})),
        "computation",
        "since step 13",
    ),
    "useless values": (log_of((12, {"value_explained_variance": -0.4})), "computation", "-40%"),
    "repetition": (
        log_of((20, {"repetition_rate": 0.02}), (20, {"repetition_rate": 0.5})),
        "completions",
        "since step 21",
    ),
    "cut, then brief": (
        log_of((12, {"completions/clipped_ratio": 0.4}), (12, {})),
        "completions",
        "40% of the completions were",
    ),
    "one part gains": (
        "\n".join(
            json.dumps(
                HEALTHY
                | {"reward": 0.4 + 0.01 * i, "rewards/format": 0.01 * i, "rewards/answer": 0.4}
            )
            for i in range(90)
        ),
        "reward",
        "answer stays at 0.400",
    ),
    "one part gains, another never pays": (
        "\n".join(
            json.dumps(
                HEALTHY | {"reward": 0.01 * i, "rewards/format": 0.01 * i, "rewards/answer": 0}
            )
            for i in range(90)
        ),
        "reward",
        "answer stays at 0.000 (a guess)",
    ),
    "signal runs out": (
        "\n".join(
            json.dumps(
                HEALTHY
                | {
                    "reward": 0.3 + 0.004 * i,
                    "reward_max": 1.5,
                    "zero_variance_group_frac": i / 140,
                    "frac_reward_zero_std": None,
                }
            )
            for i in range(100)
        ),
        "signal",
        "68%",
    ),
    "NaN, then cut": (
        log_of((12, {}), (4, {"loss": math.nan, "grad_norm": math.nan} | CUT)),
        "numbers",
        "step 13",
    ),
    "stands still": (log_of((60, {"kl": 1e-8})), "step size", "after 60 steps"),
    "mismatch": (
        log_of((12, {"sampling/sampling_logp_difference/mean": 0.3})),
        "agreement",
        "0.300",
    ),
    "left behind": (
        "\n".join(
            json.dumps({"step": i, **HEALTHY, "sampling/sampling_logp_difference/mean": 0.02 * i})
            for i in range(20)
        ),
        "sync",
        "0.000 at first",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_verdict_on_a_log(name):
    log, question, text = CASES[name]
    verdict = why(log)
    assert (verdict.exit_code, verdict.verdict.name) == (1, question), verdict
    assert text in verdict.sentence
    assert verdict.verdict.fix


def test_what_is_open_makes_a_verdict_likely_and_names_what_would_settle_it():
    verdict = why(log_of((8, {}), (9, {"kl": 4.0})))
    assert verdict.verdict.certainty == "likely"
    assert {"reward", "computation", "sync", "agreement"} <= {c.name for c in verdict.open}
    assert "rln.watch(trainer, folder)" in verdict.settle
    assert why(log_of((12, CUT))).verdict.certainty == "sure"


def test_what_looks_wrong_and_is_right():
    distances = [0.0, 0.01, 0.02, -0.001, 0.04, 0.05, 0.06, 0.07, 0.08]
    rows = [HEALTHY | {"loss": 0.04 * kl, "kl": kl, "clip_ratio": 0.0} for kl in distances]
    verdict = why("\n".join(map(str, rows)))
    assert (verdict.kind, verdict.exit_code) == ("expected", 0)
    assert {c.name for c in verdict.expected} == {"computation", "agreement", "step size"}
    odd = verdict.sections()["looks odd, and is right"]
    assert any("0.040 × kl" in text for text in odd)
    assert verdict.sentence == (
        "No fault was found: the reward is 0.400; not known: reward, computation, sync, agreement, held-out"
    )


def test_length_that_grows_with_the_reward_is_said_and_is_no_fault():
    rows = [
        HEALTHY
        | {"reward": 0.01 * i, "completions/mean_length": 80 + 4 * i, "step_time": 2 + 0.1 * i}
        for i in range(60)
    ]
    verdict = why("\n".join(map(str, rows)))
    assert verdict.exit_code == 0
    assert any("it may pay length" in cause.text for cause in verdict.open)
    assert any(cause.title == "A step takes longer" for cause in verdict.expected)


def test_a_table_of_markdown_is_read():
    rows = "\n".join(f"| {i} | 0.0001 | -10.5 | 1.5 | 0.0 | {0.1 * i} |" for i in range(1, 13))
    header = "| Step | Training Loss | reward | reward_std | rewards / exact | rewards / answer |\n|---|---|---|---|---|---|\n"
    verdict = why(header + rows)
    assert verdict.verdict.text == "exact paid 0 in every step"


def test_solved_is_no_fault():
    rising = [
        HEALTHY | {"reward": min(1.0, 0.1 * i), "frac_reward_zero_std": float(i > 10)}
        for i in range(30)
    ]
    verdict = why("\n".join(map(str, rising)))
    assert (verdict.kind, verdict.exit_code) == ("expected", 0)
    assert verdict.verdict.title == "Solved"
    assert any(
        text.startswith("Solved: ") for text in verdict.sections()["looks odd, and is right"]
    )


def test_nothing_is_wrong_only_where_no_question_is_open():
    rising = why("\n".join(map(str, [HEALTHY | {"reward": 0.05 * i} for i in range(12)])))
    assert rising.sentence == (
        "No fault was found: the reward rose from 0.075 to 0.475; not known: reward, computation, sync, agreement, held-out"
    )
    answers = [Cause(name, True, "a check holds") for name in QUESTIONS]
    answered = replace(rising, causes=tuple(answers))
    assert answered.sentence == "Nothing is wrong: the reward rose from 0.075 to 0.475"
    flat = replace(why(log_of((12, {}))), causes=tuple(answers))
    assert flat.sentence == "No fault was found: the reward is 0.400"


def test_held_out_rows_that_get_worse():
    rows = [
        HEALTHY | {"reward": 0.02 * i, "eval/reward": 0.5 - 0.01 * abs(i - 8)} for i in range(40)
    ]
    verdict = why("\n".join(json.dumps({"step": i, **row}) for i, row in enumerate(rows)))
    assert verdict.verdict.name == "held-out"


def test_the_fix_is_in_the_words_of_the_trainer():
    assert (
        "num_generations"
        in why("\n".join([str(HEALTHY | DEAD | {"frac_reward_zero_std": 0.8})] * 9)).verdict.fix
    )
    row = {
        "actor/grad_norm": 0.5,
        "critic/score/mean": 0.1,
        "response_length/clip_ratio": 0.9,
        "response_length/mean": 512.0,
    }
    verdict = why("\n".join(json.dumps({"step": i, **row}) for i in range(9)))
    assert verdict.verdict.fix.startswith("Raise data.max_response_length")
    to_verl = words_of_trainer("verl")
    assert (
        to_verl("raise eps_clip_high or kl_beta")
        == "raise actor_rollout_ref.actor.clip_ratio_high or actor_rollout_ref.actor.kl_loss_coef (with use_kl_loss)"
    )
    assert words_of_trainer("OpenRLHF")("widen eps_clip") == "widen --actor.eps_clip"
    assert words_of_trainer("prime-rl")("raise kl_beta").startswith("raise trainer.loss.kl_tau")
    assert (
        words_of_trainer("NeMo-RL")("set grad_clip_norm, lower the learning rate")
        == "set policy.max_grad_norm, lower the learning rate (policy.optimizer.kwargs.lr)"
    )
    assert words_of_trainer("")("widen eps_clip") == "widen eps_clip"


def test_a_trainer_of_transformers_keeps_its_log():
    trainer = SimpleNamespace(
        state=SimpleNamespace(log_history=[{"step": i, **HEALTHY, **DEAD} for i in range(9)])
    )
    assert why(trainer).verdict.name == "signal"
    trainer.state.log_history = []
    with pytest.raises(RecordError, match="has logged nothing"):
        why(trainer)


@pytest.mark.parametrize("source", [3, [3], Path("no-such-log"), "no number\nin these lines"])
def test_what_cannot_be_asked(source):
    with pytest.raises(RecordError):
        why(source)


# --- real logs and the command ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["trainer_state.json", "trl_stdout.txt", "verl.jsonl", "slime.wandb"]
)
def test_logs_of_healthy_runs_have_no_fault(name, capsys):
    assert main(["why", str(LOGS / name)]) == 0, capsys.readouterr().out


def test_the_command(tmp_path, capsys, monkeypatch):
    log = tmp_path / "log.jsonl"
    log.write_text(log_of((12, DEAD)) + "\n")
    assert main(["why", str(log)]) == 1
    assert capsys.readouterr().out.startswith("✗ No signal: ")
    assert main(["why", str(log), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["kind"], data["verdict"]["question"]) == ("fault", "signal")
    assert {*data} >= {"sentence", "evidence", "excluded", "open", "settle"}
    assert main(["why", str(log), "--markdown"]) == 1
    assert capsys.readouterr().out.startswith("**No signal: ")
    assert main(["why", str(tmp_path / "none")]) == 2
    assert main(["why", str(log), "--json", "--markdown"]) == 2
    assert main(["why", "-", "--watch"]) == 2


def test_a_log_that_grows_is_followed(tmp_path, capsys, monkeypatch):
    log = tmp_path / "log.jsonl"
    log.write_text(log_of((12, {})) + "\n")
    later = iter([log_of((14, {})), log_of((14, {}), (20, DEAD))])
    clock = iter(range(1000))

    def grow(seconds):
        log.write_text(next(later, log.read_text()) + "\n")

    monkeypatch.setattr(
        "rl_notebook.cli.time", SimpleNamespace(sleep=grow, monotonic=lambda: next(clock))
    )
    assert main(["why", str(log), "--watch", "--idle-timeout", "10"]) == 1
    output = capsys.readouterr().out
    assert (
        output.count("numbers: loss, gradient and reward are finite") == 2
    )  # of three readings that differ
    assert output.index("✓ No fault was found") < output.index("✗ No signal")


def test_ten_thousand_steps(tmp_path):
    "At most six seconds of a processor, on a machine that others use as well, and 200 MB; torch stays out."
    log = tmp_path / "log.jsonl"
    log.write_text(log_of((10_000, {})) + "\n")
    code = (
        "import sys, time; from rl_notebook.cli import main; code = main(['why', sys.argv[1]]);"
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'));"
        "print(code, time.process_time(), int(peak.split()[1]) / 1024, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(log)], capture_output=True, text=True, check=True
    )
    code, seconds, megabytes, torch = done.stdout.splitlines()[-1].split()
    assert (code, torch) == ("0", "False")
    assert float(megabytes) < 200
    assert float(seconds) < 6


# --- runs with a known fault -----------------------------------------------------------------------------------------------


class OtherTemperature:
    "A server that samples at a temperature of its own."

    def __init__(self, sampler):
        self.sampler = sampler

    async def sample(self, prompt_tokens, params):
        return await self.sampler.sample(prompt_tokens, replace(params, temperature=0.5))

    async def logprobs(self, tokens):
        return await self.sampler.logprobs(tokens)


def no_reward(text):
    return 0.0


def brief(text):
    return -len(text) / 10


FAULTS = {  # name: settings, reward, expected questions with tokens
    "healthy": ({}, rln.toy_reward, None),
    "no signal": ({}, no_reward, {"signal"}),
    "cut": ({"max_completion_tokens": 3}, rln.toy_reward, {"completions"}),
    "stale": ({"weight_sync_interval": 0, "learning_rate": 4e-4}, rln.toy_reward, {"sync"}),
    "temperature": ({}, rln.toy_reward, {"agreement"}),
    "too large": ({"learning_rate": 1e-2}, rln.toy_reward, {"step size"}),
    "pays length": ({}, brief, {"reward"}),
}


def records_of(name):
    "A run of six small steps."
    settings, reward, _ = FAULTS[name]
    size = {"prompt_groups_per_step": 4, "completions_per_prompt": 6, "max_completion_tokens": 16}
    cfg = rln.Config(
        **(size | {"max_seq_len": 64, "learning_rate": 5e-5, "kl_beta": 0.02} | settings)
    )
    backend = rln.open_local("tiny", reference=True)
    if name == "temperature":
        backend.sampler = OtherTemperature(backend.sampler)

    async def run():
        loop = rln.GRPOLoop(backend, rln.toy_rows(64), reward, cfg)
        for _ in range(6):
            await loop.step()
        return [*loop.records]

    return asyncio.run(run())


@pytest.mark.parametrize("name", FAULTS)
def test_tokens_make_a_verdict_sharper_and_never_reverse_it(name):
    records = records_of(name)
    alone = why(records, tokens=False)
    with_tokens = why(records)
    expected = FAULTS[name][2]
    if expected is None:
        assert (alone.exit_code, with_tokens.exit_code) == (0, 0), with_tokens
        return
    assert with_tokens.exit_code == 1
    assert with_tokens.verdict.name in expected, with_tokens
    # what metrics excluded is no fault, and their fault is not excluded
    assert with_tokens.verdict.name not in {c.name for c in alone.excluded}, alone
    if alone.faults:
        assert alone.verdict.name not in {c.name for c in with_tokens.excluded}
        same = alone.verdict.name == with_tokens.verdict.name
        assert same or alone.verdict.certainty != "sure", alone
    # the same answers in every format
    assert json.loads(with_tokens.to_json())["verdict"]["question"] in QUESTIONS
    assert with_tokens.sentence in with_tokens.to_markdown()
    assert "<b>" in with_tokens._repr_html_()
