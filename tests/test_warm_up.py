"A warm-up on given answers: loss and gradient of transformers' own, records, undo, seek, and a service over HTTP."

import asyncio

import numpy as np
import pytest
import torch
from test_loop import make_loop, same, weights
from tiny_models import byte_tokenizer, one_thread, tiny_model

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.backends.services.tinker import open_tinker
from rl_notebook.config.config import Config
from rl_notebook.core.types import DataError, PhaseError
from rl_notebook.emulator.service import start_emulator
from rl_notebook.insight.replay import replay
from rl_notebook.insight.xray import xray
from rl_notebook.loop.async_loop import AsyncGRPOLoop
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.runs.run import Run, RunFolder
from rl_notebook.task.toy import load_model

__all__ = ["one_thread"]

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
        if later is None:
            assert same(weights(loop), begun)
        with pytest.raises(DataError, match="row '0': answer: got None; expected a text for the policy to say"):
            await loop.warm_up([{"question": "?"}])
        with pytest.raises(PhaseError, match="got rows that are drawn ahead; expected a fresh step"):
            await AsyncGRPOLoop(loop.backend, ROWS, len, Config(recipe="async_rl_loop")).warm_up(ROWS)

    asyncio.run(main())


def test_a_service_computes_it_itself(tmp_path):
    cfg = {"prompt_groups_per_step": 2, "lora_rank": 4, "learning_rate": 1e-3, "kl_beta": 0.0, "sync_audit": False}
    rows = [{"prompt": "Hello", "completion": "world"}, {"prompt": "again", "completion": "and on"}]

    async def warmed(backend, name):
        loop = GRPOLoop(backend, rows, len, Config(backend=name, **cfg))
        records = await loop.warm_up(rows, 2)
        await loop.undo()
        return records, await backend.policy.forward(records[1].datums)

    async def there(url):
        quiet = {"probing": False, "conformance": "off", "pause_s": 0.02, "reference": False, "say": lambda line: None}
        where = {"base_url": url, "key": "tml-warm-up", "base_model": "a-model", "tokenizer": byte_tokenizer()}
        async with await open_tinker(**where, **quiet, lora_rank=4) as backend:
            return await warmed(backend, "tinker")

    async def here():
        async with open_local(tiny_model(), byte_tokenizer(), lora_rank=4) as backend:
            return await warmed(backend, "local")

    tiny_model().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    with start_emulator(model=str(tmp_path / "model"), folder=tmp_path / "served", key="tml-warm-up") as service:
        theirs, undone = asyncio.run(there(service.url))
        asked = [e.path.rsplit("/", 1)[-1] for e in service.emulator.log]
    ours, undone_here = asyncio.run(here())
    for a, b in zip(ours, theirs, strict=True):
        assert (a.loss.loss, a.options) == (pytest.approx(b.loss.loss, rel=1e-4), b.options)
    for a, b, before in zip(undone_here, undone, theirs[1].loss.logprobs, strict=True):
        np.testing.assert_allclose(a.values[-5:], b.values[-5:], atol=1e-4)
        np.testing.assert_array_equal(b.values[-5:], before.values[-5:])
    assert (asked.count("forward_backward"), asked.count("forward")) == (
        3,
        0,
    )  # a pass a step, and what scores after undo
