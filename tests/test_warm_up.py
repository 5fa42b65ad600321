"Steps that learn from given answers (on a service: test_tinker) or from a teacher: loss by hand, records, undo, seek."

import asyncio

import numpy as np
import pytest
import torch
from test_loop import SMALL_RUN, make_loop, same, weights

from rl_notebook.backends.base import with_teacher
from rl_notebook.backends.local.trainer import open_local
from rl_notebook.config.config import Config
from rl_notebook.core.types import ConfigError, PhaseError, RecordError
from rl_notebook.insight.doctor.doctor import diagnose
from rl_notebook.experiments.replay import replay
from rl_notebook.experiments.whatif import what_if
from rl_notebook.insight.xray import xray
from rl_notebook.loop.async_loop import AsyncGRPOLoop
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.recipes.open import open_backend
from rl_notebook.runs.run import Run, RunFolder
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_reward, toy_rows
from rl_notebook.views.payloads import token_payload, token_rows

QUESTIONS = {
    "What is 12+25?": "12+25 is #### 37",
    "What is 7+1?": "#### 8",
    "What is 40+32?": "It is #### 72",
}
ROWS = [{"question": q, "completion": a} for q, a in QUESTIONS.items()]
IGNORED_SETTINGS = {
    "tis": "token",
    "kl_beta": 0.5,
    "aggregation": "sequence_mean",
    "entropy_coeff": 0.1,
    "advantage_scale": "none",
}


def test_loss_and_gradient_are_those_of_transformers():
    async def ours():
        # of which the warm-up reads nothing
        loop = make_loop(make_loss=lambda *_: None, **IGNORED_SETTINGS)
        record = (await loop.warm_up(ROWS, 1))[0]
        await loop.undo(to="backward")
        await loop.backward()
        return record, {name: p.grad for name, p in loop.backend.policy.state.params.items()}

    record, gradients = asyncio.run(ours())
    model, tokenizer = load_model("tiny")
    total = torch.zeros(())
    count = 0
    for question, answer in QUESTIONS.items():
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        reply = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        labels = torch.tensor([[-100] * len(prompt) + reply])
        total = total + model(torch.tensor([[*prompt, *reply]]), labels=labels).loss * len(reply)
        count += len(reply)
    (total / count).backward()
    assert record.loss.loss == pytest.approx((total / count).item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"ppo_n_minibatches": 2, **IGNORED_SETTINGS}])
def test_warm_up_steps_are_steps_of_the_run(settings, tmp_path):
    async def main():
        loop = make_loop(keep_undo=5, **settings)
        folder = RunFolder.create(tmp_path / "run", loop.cfg)
        loop.outputs, loop.on_undo, begun = [folder.add], [folder.rewind], weights(loop)
        warmed = await loop.warm_up(ROWS, 4)
        assert [r.metrics["warm_up/loss"] for r in warmed] == sorted(
            (r.loss.loss for r in warmed), reverse=True
        )
        sampled = warmed[0].datums[0].active
        [policy] = await loop.backend.policy.forward(warmed[0].datums[:1])
        sampler = await loop.backend.sampler.logprobs(warmed[0].datums[0].tokens)
        np.testing.assert_allclose(policy.values[sampled], sampler.values[sampled], atol=1e-4)
        later = await loop.step()
        run = Run.open(folder.path)
        assert (later.consumed, later.is_supervised, run.record(4).is_supervised) == (
            3,
            False,
            True,
        )
        findings = xray(run.record(3), run.record(2))
        assert "cross-entropy of the given answers" in findings.sentence
        assert not findings.checks.failed
        if "weight_sync_interval" not in settings:
            other = make_loop(**settings)
            assert (await other.seek(5, run)).gap == 0.0
            assert same(weights(other), weights(loop))
            with pytest.raises(
                RecordError,
                match=r"got given answers; expected sampled completions\. await loop\.seek",
            ):
                await replay(run, 2, make_loop(**settings))
        for _ in range(5):
            await loop.undo()
        assert (loop.state.number, loop.cursor.consumed) == (1, 0)
        assert same(weights(loop), begun)
        with pytest.raises(
            PhaseError, match="got rows that are sampled ahead; expected a fresh step"
        ):
            await AsyncGRPOLoop(loop.backend, ROWS, len, Config(recipe="async_rl_loop")).warm_up(
                ROWS
            )

    asyncio.run(main())


def moved_model():
    "The shipped model, moved a little."
    model, tokenizer = load_model("tiny")
    torch.manual_seed(1)
    with torch.no_grad():
        _ = [p.add_(0.02 * torch.randn_like(p)) for p in model.parameters()]
    return model, tokenizer


@pytest.mark.parametrize(
    "settings", [{"reward_coeff": 0.0}, {"reward_coeff": 0.5, "policy_loss": "ppo"}]
)
def test_the_advantage_is_teacher_minus_sampler(settings, tmp_path):
    def taught():
        pupil, teacher = (
            open_local(*model_and_tokenizer, reference=False)
            for model_and_tokenizer in (load_model("tiny"), moved_model())
        )
        cfg = Config(**SMALL_RUN | {"kl_beta": 0.0, "teacher_coeff": 0.7} | settings)
        return GRPOLoop(with_teacher(pupil, teacher), toy_rows(24, seed=3), toy_reward, cfg)

    async def main():
        loop = taught()
        folder = RunFolder.create(tmp_path / "run", loop.cfg)
        loop.outputs.append(folder.add)
        begun = weights(loop)
        record = await loop.step()
        # those with equal rewards, too
        assert {d.group for d in record.datums} == {g.index for g in record.groups}
        model = moved_model()[0]
        count = sum(d.num_loss_tokens for d in record.datums)
        for d, gradients in zip(record.datums, record.loss.dlogprobs, strict=True):
            logits = model(torch.tensor(d.input_tokens.copy())[None]).logits[0]
            theirs = (
                torch.log_softmax(logits, -1)[range(len(d.weights)), d.target_tokens.copy()]
                .detach()
                .numpy()
            )
            group = record.groups[d.group]
            pushed = (
                0.7 * (theirs - group.samples[d.sample].logprobs[1:])
                + settings["reward_coeff"] * group.advantages[d.sample]
            )
            np.testing.assert_allclose(gradients[d.active], -pushed[d.active] / count, atol=1e-6)
        assert what_if(record, {"same": {}}).outputs["same"].loss == pytest.approx(
            record.loss.loss, rel=1e-5
        )
        checks = {c.name: c.ok for c in xray(record).checks}
        assert (checks["reference"], checks["signal"], (await diagnose(record)).ok) == (
            None,
            True,
            True,
        )
        assert token_payload(token_rows(record)[0])["first"] == "ref-policy"
        end = weights(loop)
        again = taught()
        assert (await again.seek(1, Run.open(folder.path))).gap == 0.0
        assert same(weights(again), end)
        await loop.undo()
        assert same(weights(loop), begun)

    asyncio.run(main())


def test_a_config_opens_a_teacher_and_a_loop_needs_one():
    async def main():
        async with await open_backend(
            Config(teacher="tiny", teacher_coeff=1.0, kl_beta=0.1)
        ) as backend:
            loop = GRPOLoop(
                backend, toy_rows(8), toy_reward, Config(**SMALL_RUN, teacher_coeff=1.0)
            )
            for d in (await loop.step()).datums:
                np.testing.assert_allclose(
                    d.ref_logprobs[d.active], d.sampler_logprobs[d.active], atol=1e-4
                )
            with pytest.raises(
                ConfigError, match=r"teacher_coeff: got 0\.0; expected above 0 with a teacher"
            ):
                loop.change(teacher_coeff=0.0)
        with pytest.raises(
            ConfigError, match=r"teacher_coeff: got 1\.0; expected 0 without a teacher"
        ):
            GRPOLoop(open_local(*load_model("tiny")), toy_rows(8), toy_reward, loop.cfg)

    asyncio.run(main())
