"The loop object: phases, re-running, undo, overlap, interruption. Everything on the shipped model, really trained."

import asyncio
import os
import re
import signal
import threading
import traceback
from collections import Counter
from dataclasses import replace

import numpy as np
import openai
import pytest
import torch

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.config.config import Config
from rl_notebook.insight.xray import xray
from rl_notebook.core.types import AlignmentError, ConfigError, LossError, PhaseError, RewardError
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.loop.state import PHASES
from rl_notebook.task.data import load_rows
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_format_reward, toy_reward, toy_rows

SMALL_RUN = {
    "prompt_groups_per_step": 3,
    "completions_per_prompt": 6,
    "max_completion_tokens": 16,
    "max_seq_len": 96,
    "learning_rate": 1e-3,
    "kl_beta": 0.05,
    "epochs": 1,
}


def make_loop(
    reward=(toy_reward, toy_format_reward),
    rows=24,
    make_loss=None,
    keep=None,
    outputs=(),
    keep_undo=1,
    **settings,
):
    "A loop over the toy task with a separate backend."
    cfg = Config(**SMALL_RUN | settings)
    model, tokenizer = load_model("tiny")
    backend = open_local(
        model, tokenizer, temperature=cfg.temperature, lora_rank=cfg.lora_rank, reference=True
    )
    reward = list(reward) if isinstance(reward, tuple) else reward
    options = {
        "make_loss": make_loss,
        "dynamic_filter_fn": keep,
        "outputs": outputs,
        "keep_undo": keep_undo,
    }
    return GRPOLoop(backend, load_rows(toy_rows(rows, seed=3)), reward, cfg, **options)


# differs inside nearly every group
def LENGTH(text):
    return float(len(text))


# every group is trained on, so that every step has its full number
def ALL(group):
    return True


def weights(loop):
    "A copy of everything that is trained."
    return {k: v.detach().clone() for k, v in loop.backend.policy.state.params.items()}


def same(a, b, tol=0.0):
    return all(torch.allclose(a[k], b[k], rtol=0, atol=tol) for k in a)


async def up_to(loop, phase):
    "Run the phases of a fresh step up to and including `phase`."
    for name in PHASES[: PHASES.index(phase) + 1]:
        result = getattr(loop, name)()
        if asyncio.iscoroutine(result):
            result = await result
    return result


def run(coroutine):
    return asyncio.run(coroutine)


# --- phases ---------------------------------------------------------------------------------------------------------


def test_the_error_of_a_reward_function_is_short_and_keeps_its_line():
    def breaks(text):
        return float(text.split("####")[9])

    loop = make_loop(reward=breaks)
    run(up_to(loop, "sample"))
    with pytest.raises(RewardError, match="reward function 'breaks' raised") as raised:
        loop.score()
    assert [f.name for f in traceback.extract_tb(raised.value.__cause__.__traceback__)] == [
        "breaks"
    ]
    assert [f.name for f in traceback.extract_tb(raised.tb)][1:] == [
        "check_and_run",
        "score",
        "score_groups_here",
    ]


@pytest.mark.parametrize(
    "change", [{"aggregation": "sequence_mean"}, {"aggregation": "sum"}, {"policy_loss": "gspo"}]
)
def test_the_requested_loss_is_trained_and_recorded(change):
    async def main():
        loop = make_loop()
        await up_to(loop, "reference")
        looked = loop.loss(kl_beta=0.5, **change)
        trained = await loop.backward()
        assert looked.output.loss == pytest.approx(trained.output.loss, rel=1e-4, abs=1e-6)
        for a, b in zip(looked.output.dlogprobs, trained.output.dlogprobs, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
        record = await loop.step()
        assert {**record.options, **change, "kl_beta": 0.5} == record.options
        assert record.metrics["kl_beta"] == 0.5
        assert (await loop.step()).options["policy_loss"] == "grpo"

    run(main())


def test_a_loss_that_cannot_be_computed_is_not_kept():
    async def main():
        loop = make_loop(kl_beta=0.0)
        await up_to(loop, "reference")
        with pytest.raises(LossError, match="ref_logprobs: got none"):
            loop.loss(kl_beta=0.5)
        with pytest.raises(LossError, match="does not read eps_clip"):
            loop.loss(eps_clip=0.1)
        assert (await loop.step()).options == loop.cfg.loss_options()

    run(main())


def test_backward_again_replaces_the_gradient():
    async def main():
        once = make_loop()
        twice = make_loop()
        await up_to(once, "backward")
        await up_to(twice, "backward")
        twice.loss(kl_beta=3.0)
        await twice.backward()
        twice.loss(kl_beta=once.cfg.kl_beta)
        await twice.backward()
        norms = [(await loop.optimize()).metrics["grad_norm"] for loop in (once, twice)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)

    run(main())


# --- undo -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("finished", [False, True])
def test_undo_restores_weights_optimizer_cursor_and_sampler(finished):
    async def main():
        loop = make_loop()
        await loop.step()
        before = weights(loop)
        place = loop.state.cursor.consumed
        tokens = np.array(loop.records[-1].groups[0].samples[0].tokens)
        served = await loop.backend.sampler.logprobs(tokens)
        if finished:
            first = await loop.step()
        else:
            await up_to(loop, "sync")
            first = loop.finish()
        assert not same(before, weights(loop))
        await loop.undo()
        assert same(before, weights(loop))
        assert (loop.state.number, loop.cursor.consumed) == (2, place)
        np.testing.assert_array_equal(
            (await loop.backend.sampler.logprobs(tokens)).values, served.values
        )
        again = await loop.step()
        assert "sync/gap" in first.metrics
        for name in first.metrics:
            assert again.metrics[name] == pytest.approx(first.metrics[name], nan_ok=True), name

    run(main())


# --- steps without signal -------------------------------------------------------------------------------------------


def test_a_step_with_nothing_to_learn_is_a_normal_outcome():
    async def main():
        loop = make_loop(reward=lambda text: 1.0)
        before = weights(loop)
        record = await loop.step()
        assert not record.trained
        assert "none of the 3 groups has a signal" in record.reason
        assert same(before, weights(loop))
        assert loop.policy_version == 0
        assert record.metrics["frac_reward_zero_std"] == 1.0
        assert (await loop.step()).step == 2

    run(main())


def test_a_reward_that_does_not_read_the_text_is_asked_about_and_one_that_is_silent_named():
    async def main():
        shown = str(
            xray(await make_loop(reward=lambda completions: [-19.0] * len(completions)).step())
        )
        assert re.search(
            r"\d+ different completions earned -19: does the reward read the text\?", shown
        )
        one = make_loop(reward=lambda text: 0.0, prompt_groups_per_step=1)
        assert (
            "the only group has no signal: every completion earned the same reward (0)"
            in (await one.step()).reason
        )
        with pytest.raises(
            RewardError,
            match=r"sample 0 is unscorable: silent gave None; so did all \d+.* return its value\?",
        ):
            await make_loop(reward=silent).step()

    run(main())


def silent(text):
    "Has no opinion."


def test_refill_replaces_zero_variance_groups():
    async def main():
        def reward(text, question):
            return float(len(text)) if "?" in question else 1.0

        plain = make_loop(reward=reward)
        refilled = make_loop(reward=reward, refill=True)
        a = await plain.step()
        b = await refilled.step()
        live = [sum(np.ptp(g.rewards) > 0 for g in r.groups) for r in (a, b)]
        assert live[0] < 3
        assert live[1] == 3
        assert len(b.groups) > 3
        assert refilled.cursor.consumed == len(b.groups)
        assert [g.index for g in b.groups] == list(range(len(b.groups)))

    run(main())


# --- batching -------------------------------------------------------------------------------------------------------


def test_how_a_step_is_cut_does_not_change_the_update():
    async def main():
        extra = {"max_completion_tokens": 16, "aggregation": "token_mean", "grad_clip_norm": 0.0}
        cut = {"max_samples_per_fwd_bwd": 6}
        loops = [make_loop(**extra), make_loop(**extra, **cut)]
        records = [await loop.step() for loop in loops]
        assert records[0].metrics["num_loss_tokens"] == records[1].metrics["num_loss_tokens"]
        norms = [r.metrics["grad_norm"] for r in records]
        assert norms[0] == pytest.approx(norms[1], rel=2e-4)
        assert same(*map(weights, loops), tol=2e-4)

    run(main())


def test_a_greedy_step_can_be_undone_to_any_phase():
    async def main():
        loop = make_loop(reward=LENGTH, min_samples_per_fwd_bwd=6, max_samples_per_fwd_bwd=6)
        first = await loop.step()
        await loop.undo(to="loss")
        await loop.reference()
        again = await loop.step()
        assert again.metrics["grad_norm"] == pytest.approx(first.metrics["grad_norm"], rel=2e-4)
        assert again.metrics["reward"] == first.metrics["reward"]

    run(main())


def test_a_greedy_step_that_failed_leaves_no_gradient_behind():
    async def main():
        cut = {"min_samples_per_fwd_bwd": 6, "max_samples_per_fwd_bwd": 6}
        whole = make_loop(reward=LENGTH)
        greedy = make_loop(reward=LENGTH, **cut)
        trainer = greedy.backend.policy
        calls = Counter()
        pass_through = trainer.forward_backward_custom

        async def failing(datums, loss_fn):
            calls["passes"] += 1
            if calls["passes"] == 2:
                raise TimeoutError("no trainer")
            return await pass_through(datums, loss_fn)

        trainer.forward_backward_custom = failing
        with pytest.raises(TimeoutError):
            await greedy.step()
        records = [await loop.step() for loop in (whole, greedy)]
        assert calls["passes"] > 2
        assert records[0].metrics["grad_norm"] == pytest.approx(
            records[1].metrics["grad_norm"], rel=2e-4
        )

    run(main())


# --- windows --------------------------------------------------------------------------------------------------------


def stop_in(loop, step, phase="backward"):
    "Request a stop during a phase of a step."
    method = getattr(loop, phase)

    def stopping(*args, **kwargs):
        if loop.state.number == step:
            loop.stop()
        return method(*args, **kwargs)

    setattr(loop, phase, stopping)


def texts(record):
    "What a step was trained on, in order."
    return [(g.key, s.text) for g in record.groups for s in g.samples]


# --- rewards that wait ----------------------------------------------------------------------------------------------


def test_a_step_trains_on_advantages_of_single_tokens():
    async def go():
        loop = make_loop(kl_beta=0.0)
        await up_to(loop, "advantages")
        each = [np.linspace(-1, 1, len(d.weights)) for d in loop.datums()]
        with pytest.raises(AlignmentError, match=f"{len(each) - 1} series for {len(each)} datums"):
            loop.datums(advantages=each[1:])
        with pytest.raises(AlignmentError, match="group 0"):
            loop.datums(advantages=[each[0][1:], *each[1:]])
        loop.datums(advantages=each)
        record = await loop.step()
        logprobs = [p.values for p in record.loss.logprobs]
        losses = [
            -(d.weights * a * p)[d.active].sum()
            for d, a, p in zip(record.datums, each, logprobs, strict=True)
        ]
        count = sum(d.num_loss_tokens for d in record.datums)
        assert record.loss.loss == pytest.approx(sum(losses) / count, abs=1e-5)

    run(go())


def test_score_is_awaited_where_it_waits_and_says_so():
    async def judge(text):
        return float(len(text))

    async def go():
        loop = make_loop(reward=judge)
        await up_to(loop, "sample")
        shown = loop.score()
        assert (
            repr(shown)
            == "not graded yet: these rewards have to be awaited. Run await loop.score()."
        )
        with pytest.raises(PhaseError, match=r"got no score yet. Run await loop.score\(\)"):
            loop.advantages()
        scored_groups = await shown
        assert loop.state.values["score"] is scored_groups
        # what need not wait may be awaited, too
        assert await loop.score(LENGTH) is loop.state.values["score"]
        assert [g.rewards.tolist() for g in loop.score(LENGTH)] == [
            g.rewards.tolist() for g in scored_groups
        ]
        assert loop.advantages()

    run(go())


@pytest.mark.parametrize("client", ["AsyncOpenAI", "OpenAI"])
def test_a_judge_may_ask_the_policy_of_its_own_loop(client):
    async def go():
        loop = make_loop(reward=LENGTH)
        async with loop.serve() as server:
            with server.rollout() as rollout:
                judge = getattr(openai, client)(
                    base_url=rollout.url, api_key=rollout.key, max_retries=0
                )

                def asks(text):
                    messages = [{"role": "user", "content": "1+1"}]
                    return judge.chat.completions.create(model="policy", messages=messages)

                def plain(text):
                    return float(asks(text).usage.completion_tokens)

                async def waits(text):
                    return float((await asks(text)).usage.completion_tokens)

                loop.change(reward=plain if client == "OpenAI" else waits)
                record = await loop.step()
        assert min(record.groups[0].rewards) >= 1

    run(go())


def test_a_reward_that_is_late_drops_its_sample_with_the_reason():
    async def judge(text):
        return 1.0 if calls.append(text) or len(calls) > 1 else await asyncio.Event().wait()

    calls = []
    record = run(make_loop(reward=judge, reward_timeout=0.5).step())
    [dropped] = [reason for g in record.groups for reason in g.dropped]
    assert dropped.endswith("is unscorable: judge took longer than 0.5 s (reward_timeout)")


@pytest.mark.parametrize("plain", [True, False])
def test_an_interrupt_ends_the_wait_for_a_reward(plain):
    never = threading.Event()
    calls = []

    def interrupt_once():
        calls.append(1)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    async def judge(text):
        interrupt_once()
        await asyncio.Event().wait()

    def blocks(text):
        interrupt_once()
        never.wait()

    loop = make_loop(reward=blocks if plain else judge)
    with pytest.raises(KeyboardInterrupt):
        run(loop.step())
    never.set()
    assert loop.state.current == "score"
    loop.change(reward=LENGTH)
    assert run(loop.step()).step == 1


# --- what the backend cannot do -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting",
    [{"overlong_buffer": 4}, {"rewards": ["gsm8k"], "reward_weights": [0.5]}],
    ids=["penalty", "weights"],
)
def test_a_setting_that_a_rollout_function_would_ignore_is_rejected(setting):
    async def rollout_fn(sample_prompt):
        return None

    with pytest.raises(
        ConfigError, match=f"{list(setting)[-1]}: got .*; expected unset with a rollout function"
    ):
        make_loop(reward=rollout_fn, **setting)


def test_the_system_prompt_is_in_front_of_rows_that_are_passed():
    rows = [
        {"question": "2+2", "answer": "4"},
        {
            "messages": [
                {"role": "system", "content": "Mine."},
                {"role": "user", "content": "3+3"},
            ]
        },
    ]
    cfg = Config(**SMALL_RUN | {"shuffle": False, "system_prompt": "Be short."})
    backend = open_local("tiny")
    read = [list(rows), load_rows(rows)]
    loops = [GRPOLoop(backend, each, len, cfg, eval_rows=each) for each in read]
    for loop in loops:
        asked = [row.messages[0] for row in (*loop.rows, *loop.eval_rows)]
        contents = [message["content"] for message in asked]
        assert contents == ["Be short.", "Mine."] * 2
        assert "Be short." in backend.tokenizer.decode(loop.prompts()[0].tokens)


def test_a_setting_that_the_backend_would_ignore_is_rejected():
    loop = make_loop()
    for change, message in [
        ({"temperature": 0.7}, r"temperature: got 0.7; expected 1.0, at which the policy scores"),
        ({"lora_rank": 4}, r"lora_rank: got 4; expected 0, as the backend was opened"),
    ]:
        with pytest.raises(ConfigError, match=message):
            GRPOLoop(loop.backend, loop.rows, toy_reward, replace(loop.cfg, **change))
    loop.backend.reference = None
    with pytest.raises(ConfigError, match=r"kl_beta: got 0.05; expected 0 without a reference"):
        GRPOLoop(loop.backend, loop.rows, toy_reward, loop.cfg)
