"A teacher that reads another prompt, and the divergence over its likeliest tokens: other trainers' numbers, and whole logits."

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import one_thread

import rl_notebook as rln
from rl_notebook.backends.base import with_teacher
from rl_notebook.core.losses import LossOptions, make_loss_fn
from rl_notebook.core.types import ConfigError, DataError, Datum, LossError, TopLogprobs

__all__ = ["one_thread"]

CASES = json.loads((Path(__file__).parent / "golden/distillation/cases.json").read_text())


def divergence(logits, teacher, ids, alpha, **options):
    "The summed divergence of a case, and its gradient by the logits."
    tokens, count = np.shape(ids)
    values = torch.tensor(teacher).log_softmax(-1).gather(-1, torch.tensor(ids)).numpy()
    top = TopLogprobs(np.array(ids), values, np.ones(tokens, bool), "raw")
    datum = Datum(np.zeros(tokens + 1, int), np.ones(tokens), ref_logprobs=np.zeros(tokens))
    datum = replace(datum, ref_top_logprobs=top)
    settings = {"teacher_coeff": 1.0, "teacher_top": count, "teacher_alpha": alpha}
    loss_fn = make_loss_fn([datum], aggregation="sum", **settings | options)
    leaf = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    logprobs = leaf.log_softmax(-1)
    top_policy = logprobs.gather(-1, torch.tensor(ids))
    loss, metrics = loss_fn([datum], [logprobs[:, 0]], top_policy_logprobs=[top_policy])
    loss.backward()
    return loss.item(), leaf.grad.numpy(), metrics


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)).__contains__)
def test_the_divergence_is_that_of_trl_and_of_sdpo(case):
    for theirs in case["results"]:
        value, gradient, metrics = divergence(
            case["logits"], case["teacher"], case["ids"], theirs["alpha"]
        )
        assert abs(value - sum(theirs["value"])) < 2e-5
        assert np.abs(gradient - theirs["gradient"]).max() < 2e-5
        assert np.abs(gradient).max() > 0.05
        assert metrics["teacher/divergence"] == pytest.approx(value / len(case["ids"]))


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_more_tokens_bring_it_up_to_that_of_the_whole_vocabulary(alpha):
    rng = np.random.default_rng(0)
    logits, teacher = 2 * rng.standard_normal((2, 3, 40))
    order = np.argsort(-teacher, -1)
    parts = [divergence(logits, teacher, order[:, :k], alpha)[0] for k in (1, 5, 20, 40)]
    p, q = (torch.tensor(x).log_softmax(-1) for x in (logits, teacher))
    middle = torch.log(alpha * q.exp() + (1 - alpha) * p.exp())
    from_teacher = (q.exp() * (q - (p if alpha == 0 else middle))).sum().item()
    from_policy = (p.exp() * (p - (q if alpha == 1 else middle))).sum().item()
    whole = {0.0: from_teacher, 1.0: from_policy}.get(
        alpha, alpha * from_teacher + (1 - alpha) * from_policy
    )
    assert parts == sorted(parts)
    assert parts[0] < 0.9 * whole
    assert parts[-1] == pytest.approx(whole, abs=1e-5)


def with_solution(row, sample, group):
    "The question, and what it comes to."
    return [{"role": "user", "content": f"{row['question']} It is {row['answer']}."}]


SETTINGS = {
    "kl_beta": 0.0,
    "teacher_coeff": 1.0,
    "reward_coeff": 0.0,
    "prompt_groups_per_step": 2,
    "completions_per_prompt": 2,
    "max_completion_tokens": 6,
}


def taught(prompt=with_solution, frozen=True, model=None, **settings):
    model, tokenizer = model or rln.load_model("tiny")
    backend = rln.open_local(model, tokenizer, reference=frozen, inline=True)
    cfg = rln.Config(**SETTINGS | settings)
    backend = with_teacher(backend, prompt=prompt)
    return rln.GRPOLoop(backend, rln.toy_rows(8), rln.toy_reward, cfg)


async def up_to_reference(loop):
    loop.prompts()
    await loop.sample()
    loop.score()
    loop.advantages()
    loop.datums()
    return await loop.reference()


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_weights_learn_the_kl_to_the_whole_distribution_behind_the_other_prompt(alpha):
    "Both prompts, the model and the divergence are written again here, with transformers alone."

    async def main():
        model, tokenizer = rln.load_model("tiny")
        size = model.config.vocab_size
        loop = taught(model=(model, tokenizer), teacher_top=size, teacher_alpha=alpha)
        await up_to_reference(loop)
        await loop.backward()
        ours = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        unknown = loop.backend.policy.state.scoring.causal.unknown
        terms = []
        for group in loop.state.values["advantages"]:
            messages = [
                {
                    "role": "user",
                    "content": f"{group.row['question']} It is {group.row['answer']}.",
                }
            ]
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
            for sample in group.samples:
                completion = sample.tokens[sample.prompt_len :].tolist()
                both = []
                for ids in (sample.tokens[: sample.prompt_len].tolist(), prompt):
                    logits = model(torch.tensor([ids + completion])).logits[0, len(ids) - 1 : -1]
                    logits[:, sorted(unknown)] = -1e9
                    both.append(logits.double().log_softmax(-1))
                p, q = both[0], both[1].detach()
                pair = (q, p) if alpha == 0 else (p, q)
                terms.append((pair[0].exp() * (pair[0] - pair[1])).sum(-1))
        loss = torch.cat(terms).mean()
        loss.backward()
        theirs = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return loop.state.values["backward"].output.loss, loss.item(), ours, theirs

    value, expected, ours, theirs = asyncio.run(main())
    assert value == pytest.approx(expected, rel=1e-4)
    assert expected > 0.1
    assert ours.keys() == theirs.keys()
    size = max(float(g.abs().max()) for g in theirs.values())
    assert size > 1e-3
    for name, g in theirs.items():
        assert float((ours[name] - g).abs().max()) < 2e-4 * size, name


def test_a_teacher_sees_sample_and_group_and_none_is_the_own_prompt():
    seen = []

    def prompt(row, sample, group):
        seen.append((row["question"], sample.text, len(group.samples)))
        return None if len(seen) % 2 else f"{row['answer']} "

    async def main():
        loop = taught(prompt, frozen=False, teacher_top=4, max_samples_per_fwd_bwd=2)
        datums = await up_to_reference(loop)
        scored = await loop.backend.policy.forward(list(loop.state.values["datums"]))
        groups = loop.state.values["advantages"]
        assert seen == [(g.row["question"], s.text, 2) for g in groups for s in g.samples]
        for i, (d, own) in enumerate(zip(datums, scored, strict=True)):
            gap = np.abs(d.ref_logprobs - own.values)[d.active].max()
            assert (gap < 1e-5) if i % 2 == 0 else (gap > 1e-3)
            assert np.isnan(d.ref_logprobs[~d.active]).all()
            top = d.ref_top_logprobs
            assert top.tokens.shape == (d.num_loss_tokens, 4)
            for t in np.flatnonzero(d.active):
                listed = dict(top[t])
                if d.target_tokens[t] in listed:
                    assert listed[d.target_tokens[t]] == pytest.approx(d.ref_logprobs[t], abs=1e-5)
        record = await loop.step()
        words = rln.xray(record).sentence
        assert "the teacher's term is teacher_coeff 1 at" in words
        assert "teacher_prompt prompt" in record.sources
        assert {c.name: c.ok for c in rln.xray(record).checks}["finite"]

    asyncio.run(main())


@pytest.mark.parametrize(
    "settings", [{"teacher_top": 4}, pytest.param({"teacher_top": 0}, marks=pytest.mark.slow)]
)
def test_steps_go_back_and_come_again_to_the_last_bit(settings, tmp_path):
    async def main():
        loop = taught(**settings, ppo_n_minibatches=2)
        run = rln.RunFolder.create(tmp_path / "run", loop.cfg)
        loop.outputs.append(run.add)
        loop.on_undo.append(run.rewind)
        await loop.step()
        first = await loop.step()
        await loop.undo()
        again = await loop.step()
        assert first.loss.loss == again.loss.loss
        assert first.metrics["grad_norm"] == again.metrics["grad_norm"]
        stored = rln.Run.open(tmp_path / "run").record(2)
        assert stored.loss.loss == first.loss.loss
        for was, now in zip(first.datums, stored.datums, strict=True):
            assert (now.ref_top_logprobs is None) == (settings["teacher_top"] == 0)
            for t in np.flatnonzero(was.active) if now.ref_top_logprobs else ():
                assert now.ref_top_logprobs[t] == was.ref_top_logprobs[t]
        fresh = taught(**settings, ppo_n_minibatches=2)
        assert (await fresh.seek(2, rln.Run.open(tmp_path / "run"))).gap == 0.0
        report = await rln.replay(
            rln.Run.open(tmp_path / "run"), 2, taught(**settings, ppo_n_minibatches=2)
        )
        assert report.same, str(report)

    asyncio.run(main())


def test_what_does_not_fit_is_said():
    with pytest.raises(LossError, match="teacher_top: got 5; expected 0 without teacher_coeff"):
        LossOptions(teacher_top=5)
    with pytest.raises(LossError, match=r"teacher_alpha: got 0\.5; expected 0 without teacher_top"):
        LossOptions(teacher_coeff=1.0, teacher_alpha=0.5)
    with pytest.raises(
        LossError, match="score_centering: got True; expected False with teacher_top"
    ):
        LossOptions(teacher_coeff=1.0, teacher_top=5, score_centering=True)
    with pytest.raises(ConfigError, match="teacher_prompt: there is no teacher at teacher_coeff=0"):
        rln.Config(teacher_prompt="tests:prompt")
    with pytest.raises(
        ConfigError, match="teacher_prompt: got 'prompt'; expected 'module:function'"
    ):
        rln.Config(teacher_prompt="prompt", teacher_coeff=1.0)
    with pytest.raises(LossError, match="teacher_prompt"):
        taught(lambda row: "")
    datum = Datum([0, 1, 2], [0, 1], ref_logprobs=[0, 0])
    with pytest.raises(LossError, match="ref_top_logprobs: got none"):
        make_loss_fn([datum], teacher_coeff=1.0, teacher_top=2)

    async def main():
        with pytest.raises(DataError, match="teacher_prompt of group 0, sample 0"):
            await up_to_reference(taught(lambda row, sample, group: 5))

    asyncio.run(main())


def test_a_config_names_the_prompt_and_the_policy_as_it_was_opened_teaches(monkeypatch, tmp_path):
    (tmp_path / "prompts_of_a_test.py").write_text(
        "def with_solution(row, sample, group):\n    return f'{row[\"answer\"]} '\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    async def main():
        name = "prompts_of_a_test:with_solution"
        cfg = rln.Config(**SETTINGS, teacher_top=3, teacher_prompt=name, learning_rate=1e-2)
        async with await rln.open_backend(cfg) as backend:
            loop = rln.GRPOLoop(backend, rln.toy_rows(8), rln.toy_reward, cfg)
            before = await up_to_reference(loop)
            await loop.step()
            await up_to_reference(loop)
            read = list(before)
            frozen = await backend.reference.forward(read)
            moved = await backend.policy.forward(read)
            gaps = [
                np.nanmax(np.abs(a.values - b.values)) for a, b in zip(frozen, moved, strict=True)
            ]
            assert min(gaps) > 1e-3

    asyncio.run(main())
