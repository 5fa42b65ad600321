"A warm-up on given answers: loss and gradient of transformers' own, records, undo, seek (on a service: test_tinker)."

import asyncio

import numpy as np
import pytest
import torch
from test_loop import make_loop, same, weights

from rl_notebook.config.config import Config
from rl_notebook.core.types import DataError, PhaseError
from rl_notebook.insight.replay import replay
from rl_notebook.insight.xray import xray
from rl_notebook.loop.async_loop import AsyncGRPOLoop
from rl_notebook.runs.run import Run, RunFolder
from rl_notebook.task.toy import load_model

QUESTIONS = {"What is 12+25?": "12+25 is #### 37", "What is 7+1?": "#### 8", "What is 40+32?": "It is #### 72"}
ROWS = [{"question": q, "completion": a} for q, a in QUESTIONS.items()]
OWN = {"tis": "token", "kl_beta": 0.5, "aggregation": "sequence_mean", "entropy_coeff": 0.1, "advantage_scale": "none"}


def test_loss_and_gradient_are_those_of_transformers():
    async def ours():
        loop = make_loop(make_loss=lambda *_: None, **OWN)  # of which the warm-up reads nothing
        record = (await loop.warm_up(ROWS, 1))[0]
        await loop.undo(to="backward")
        await loop.backward()
        return record, {name: p.grad for name, p in loop.backend.policy.state.params.items()}

    record, found = asyncio.run(ours())
    model, tokenizer = load_model("tiny")
    total, count = torch.zeros(()), 0
    for question, answer in QUESTIONS.items():
        asked = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        said = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        labels = torch.tensor([[-100] * len(prompt) + said])
        total = total + model(torch.tensor([[*prompt, *said]]), labels=labels).loss * len(said)
        count += len(said)
    (total / count).backward()
    assert record.loss.loss == pytest.approx((total / count).item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("how", [{}, {"weight_sync_interval": 3}, {"ppo_n_minibatches": 2, **OWN}])
def test_its_steps_are_steps_of_the_run(how, tmp_path):
    async def main():
        loop = make_loop(keep_undo=4, **how)
        folder = RunFolder.create(tmp_path / "run", loop.cfg)
        loop.outputs, loop.on_undo, begun = [folder.add], [folder.rewind], weights(loop)
        warmed = await loop.warm_up(ROWS, 4)
        assert [r.metrics["warm_up/loss"] for r in warmed] == sorted((r.loss.loss for r in warmed), reverse=True)
        tokens = warmed[0].datums[0].tokens
        policy, sampler = await loop.backend.policy.forward(warmed[0].datums), loop.backend.sampler
        spoken = warmed[0].datums[0].active
        np.testing.assert_allclose(policy[0].values[spoken], (await sampler.logprobs(tokens)).values[spoken], atol=1e-4)
        later = await loop.step() if "weight_sync_interval" not in how else None
        end, run = weights(loop), Run.open(folder.path)
        assert (run.record(4).given, run.record(4).verdict) == (True, warmed[3].verdict)
        assert "cross-entropy of the given answers" in xray(run.record(3), run.record(2)).sentence
        assert not any(c.ok is False for c in xray(run.record(3), run.record(2)).checks)
        if later is not None:
            assert (later.consumed, later.given) == (3, False)
            other = make_loop(**how)
            assert (await other.seek(5, run)).gap == 0.0
            assert same(weights(other), end)
            with pytest.raises(Exception, match=r"got given answers; expected drawn completions\. await loop\.seek"):
                await replay(run, 2, make_loop(**how))
            await loop.undo()
        for _ in range(4 if later is None else 3):
            await loop.undo()
        assert (loop.state.number, loop.cursor.consumed) == (1 if later is None else 2, 0)
        assert later is not None or same(weights(loop), begun)
        with pytest.raises(DataError, match="row '0': answer: got None; expected a text for the policy to say"):
            await loop.warm_up([{"question": "?"}])
        with pytest.raises(PhaseError, match="got rows that are drawn ahead; expected a fresh step"):
            await AsyncGRPOLoop(loop.backend, ROWS, len, Config(recipe="async_rl_loop")).warm_up(ROWS)

    asyncio.run(main())
