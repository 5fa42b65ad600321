"Information gain by turn: the arithmetic as properties, the requests counted, the real model, a real step."

import asyncio
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.config.config import Config, IGPOConfig
from rl_notebook.core.datums import datums_from_groups
from rl_notebook.core.losses import POLICY_LOSSES, make_loss_fn
from rl_notebook.core.types import BackendError, DataError, Datum, Logprobs, PromptGroup
from rl_notebook.core.types import RolloutSample, SampleParams
from rl_notebook.loop.async_loop import AsyncGRPOLoop
from rl_notebook.loop.igpo import (
    AnswerScorer,
    AnswerTokens,
    answer_tokens,
    has_turn_signal,
    igpo_advantages,
)
from rl_notebook.loop.igpo import igpo_table, information_gain, prefix_ends
from rl_notebook.loop.igpo import turn_advantages, with_information_gain, z_normalize
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.loop.rollouts import RolloutSetup, encode_rows, sample_prompt
from rl_notebook.recipes import igpo_loop
from rl_notebook.recipes.rl_loop import replay_step
from rl_notebook.runs.records import StepRecord
from rl_notebook.runs.run import Run, RunFolder
from rl_notebook.task.data import load_rows
from rl_notebook.task.models import build_tokenizer, load_model
from rl_notebook.task.toy import toy_reward, toy_rows

ANSWER = AnswerTokens((), (7, 9))


def conversation_sample(
    *stretches: tuple[int, int], scores=None, reward: float | None = 1.0, **fields
) -> RolloutSample:
    "A sample of (tokens that are given, tokens that the policy samples), one pair a turn."
    mask = np.concatenate([np.repeat([0, 1], pair) for pair in stretches])
    info = {} if scores is None else {"answer_scores": list(scores)}
    return RolloutSample(
        np.arange(len(mask)), np.full(len(mask), -1.0), mask, reward, info=info, **fields
    )


# --- advantages ---------------------------------------------------------------------------------------------------

number = st.floats(-20, 0).map(lambda x: round(x, 3))


@st.composite
def rollouts(draw, smallest: int = 1):
    "(scores, outcome) of the rollouts of a group; a rollout of no turns has one score."
    turns = draw(st.lists(st.integers(0, 5), min_size=smallest, max_size=6))
    return [
        ([draw(number) for _ in range(n + 1)], draw(st.sampled_from([0.0, 1.0, 0.25])))
        for n in turns
    ]


def advantages_of(group, **options) -> list[np.ndarray]:
    gains = [information_gain(scores) for scores, _ in group]
    outcomes = [
        np.append(np.zeros(len(g) - 1), out) if len(g) else g
        for g, (_, out) in zip(gains, group, strict=True)
    ]
    return turn_advantages(gains, outcomes, **options)


@given(rollouts(), st.sampled_from([0.0, 0.3, 1.0, 2.0]))
def test_gamma_0_is_the_turn_alone_and_gamma_1_the_sum_of_what_follows(group, weight):
    alone = advantages_of(group, gamma=0.0, ig_weight=weight)
    gains = np.concatenate([information_gain(scores) for scores, _ in group])
    outcomes = np.concatenate(
        [[0.0] * (len(s) - 2) + [out] if len(s) > 1 else [] for s, out in group]
    )

    def flat(x):
        return (
            np.zeros(len(x)) if len(x) < 2 or x.std() < 1e-6 else (x - x.mean()) / (x.std() + 1e-6)
        )

    np.testing.assert_allclose(
        np.concatenate(alone), weight * flat(gains) + flat(outcomes), atol=1e-9
    )
    for single, summed in zip(
        alone, advantages_of(group, gamma=1.0, ig_weight=weight), strict=True
    ):
        np.testing.assert_allclose(summed, np.cumsum(single[::-1])[::-1], atol=1e-9)


# --- groups ---------------------------------------------------------------------------------------------------------


def test_the_last_turn_can_go_without_gain_but_only_the_last_of_a_run():
    run = [
        conversation_sample((2, 1), (1, 1), scores=(-4, -3, -1)),
        conversation_sample((2, 1), (1, 1), scores=(-4, -2, -1)),
    ]
    groups = [PromptGroup(run, runs=(0, 0)), PromptGroup(run)]
    skipping = IGPOConfig(gamma=0.0, skip_ig_last_turn=True)
    joined, separate = (
        np.concatenate(g.turn_advantages) for g in igpo_advantages(groups, skipping)
    )
    np.testing.assert_allclose(joined, z_normalize([1, 2, 2, 0]) + z_normalize([0, 0, 0, 1]))
    np.testing.assert_allclose(separate, z_normalize([1, 0, 2, 0]) + z_normalize([0, 1, 0, 1]))


# --- losses ---------------------------------------------------------------------------------------------------------


# Those that are left out look at other tokens of the sample or of the batch.
@pytest.mark.parametrize(
    "name", [name for name in POLICY_LOSSES if name not in ("gmpo", "kl_cov", "clip_cov")]
)
def test_every_policy_loss_takes_an_advantage_per_token(name):
    "A token is pushed as if its whole sample had its advantage, which test_losses_properties judges."
    rng = np.random.default_rng(5)
    samples = [
        conversation_sample((3, 4), (2, 5), scores=(-3, -1, -2)),
        conversation_sample((2, 6), scores=(-3, -4), reward=0.0),
    ]
    (group,) = igpo_advantages([PromptGroup(samples)])
    series = [[rng.normal(-1.0, 0.4, len(s.tokens) - 1) for _ in range(3)] for s in samples]
    datums = [
        replace(d, old_logprobs=o, sampler_logprobs=b)
        for d, (_, o, b) in zip(datums_from_groups([group]), series, strict=True)
    ]

    def gradients(datums):
        policy = [torch.tensor(p, requires_grad=True) for p, _, _ in series]
        tis = "off" if name == "reinforce" else "token"
        make_loss_fn(datums, policy_loss=name, aggregation="sum", tis=tis)(datums, policy)[
            0
        ].backward()
        return [p.grad.numpy() for p in policy]

    mixed = gradients(datums)
    checked = 0
    for value in {float(v) for turns in group.turn_advantages for v in turns}:
        alone = gradients([replace(d, advantage=value) for d in datums])
        for d, ours, theirs in zip(datums, mixed, alone, strict=True):
            at = d.active & (d.advantage == value)
            np.testing.assert_allclose(ours[at], theirs[at], rtol=1e-6)
            checked += int(at.sum())
    assert checked == sum(int(d.active.sum()) for d in datums)
    assert all((grad[~d.active] == 0).all() for d, grad in zip(datums, mixed, strict=True))


# --- the answer ------------------------------------------------------------------------------------------------------


def test_lead_and_answer_are_encoded_once_and_a_shared_token_belongs_to_the_answer():
    tokenizer = build_tokenizer()
    whole = answer_tokens(tokenizer, "## 5", lead="##")
    assert (whole.lead, tokenizer.decode(whole.tokens)) == ((), "#### 5")
    plain = answer_tokens(tokenizer, " 5", lead="####")
    assert (tokenizer.decode(plain.lead), tokenizer.decode(plain.tokens)) == ("####", " 5")


@pytest.mark.parametrize("answer", [None, "", "  \n", ["a"], {"a": 1}])
def test_a_row_without_an_answer_is_an_error(answer):
    with pytest.raises(DataError, match="expected a text or a number"):
        answer_tokens(build_tokenizer(), answer)


# --- requests --------------------------------------------------------------------------------------------------------


class Counting:
    "A sampler that counts, is slow on demand, and whose weights can move while it is asked."

    def __init__(self, moves_at: int | None = None, fails: int = 0):
        self.asked = Counter()
        self.version = 0
        self.busy = 0
        self.most = 0
        self.moves_at = moves_at
        self.fails = fails

    async def logprobs(self, tokens):
        self.asked[tuple(tokens.tolist())] += 1
        if self.asked.total() == self.moves_at:
            self.version += 1
        version = self.version
        self.busy = self.busy + 1
        self.most = max(self.most, self.busy)
        await asyncio.sleep(0.001)
        self.busy -= 1
        if self.fails:
            self.fails -= 1
            raise BackendError("the server", got="no answer")
        return Logprobs(
            np.full(len(tokens) - 1, -1.0 * len(tokens) - version), policy_version=version
        )


def test_never_more_requests_than_allowed_at_a_time_in_any_event_loop():
    sampler = Counting()
    scorer = AnswerScorer(sampler, workers=3)
    samples = [conversation_sample((4, n), (2, 3)) for n in (2, 3, 3, 4)]

    async def main():
        return await asyncio.gather(*(scorer.sample_scores(s, ANSWER) for s in samples))

    for _ in range(2):
        for scores, sample in zip(asyncio.run(main()), samples, strict=True):
            assert scores == [-1.0 * (end + 2) for end in prefix_ends(sample)]
    assert sampler.most == 3
    assert sampler.asked.total() == 2 * 3 * len(samples)


def test_all_scores_of_a_sample_come_from_the_same_weights():
    sampler = Counting(moves_at=3)
    sample = conversation_sample((4, 2), (2, 3), (1, 1))
    result = asyncio.run(AnswerScorer(sampler, workers=1).sample_scores(sample, ANSWER))
    assert result == [-1.0 * (end + 2) - 1 for end in prefix_ends(sample)]
    assert sampler.asked.total() == 2 * 4


def test_weights_that_move_all_the_time_are_an_error():
    class Moving(Counting):
        async def logprobs(self, tokens):
            self.version += 1
            return await super().logprobs(tokens)

    with pytest.raises(BackendError, match="expected one version within 5 attempts"):
        asyncio.run(AnswerScorer(Moving()).sample_scores(conversation_sample((4, 2)), ANSWER))


def test_a_request_that_fails_takes_the_others_of_its_sample_with_it():
    sampler = Counting(fails=1)
    sample = conversation_sample((4, 2), (2, 3), (1, 1))
    with pytest.raises(BackendError, match="no answer"):
        asyncio.run(AnswerScorer(sampler, workers=1).sample_scores(sample, ANSWER))
    assert sampler.asked.total() < 4  # the last prefix was not asked for


# --- around a rollout ------------------------------------------------------------------------------------------------


# --- the real model --------------------------------------------------------------------------------------------------


def two_turns(setup):
    "The tiny model works a sum out up to its marker, the environment gives a space, the model says the number."
    space = setup.tokenizer(" ")["input_ids"]

    async def rollout(sample_prompt):
        params = replace(setup.params, seed=sample_prompt["seed"])
        start = sample_prompt["prompt_token_ids"]
        (first,) = await setup.sampler.sample(start, replace(params, stop=("####",)))
        (second,) = await setup.sampler.sample([*first.full_tokens, *space], params)
        parts = [(start, 0), (first.tokens, 1), (space, 0), (second.tokens, 1)]
        tokens = np.concatenate([ids for ids, _ in parts])
        mask = np.concatenate([np.full(len(ids), by_policy) for ids, by_policy in parts])
        logprobs = np.full(len(tokens), np.nan)
        logprobs[mask == 1] = [*first.logprobs, *second.logprobs]
        text = setup.tokenizer.decode(tokens[len(start) :], skip_special_tokens=True)
        reward = toy_reward(text, sample_prompt["answer"])
        return RolloutSample(
            tokens, logprobs, mask, reward, text=text, policy_version=first.policy_version
        )

    return rollout


SETTINGS = {
    "completions_per_prompt": 4,
    "prompt_groups_per_step": 3,
    "max_completion_tokens": 20,
    "max_seq_len": 96,
    "learning_rate": 1e-3,
    "kl_beta": 0.0,
    "drop_zero_variance_groups": True,
}


def make_loop(options: IGPOConfig, keep=None, **settings) -> GRPOLoop:
    cfg = Config(**SETTINGS | settings)
    model, tokenizer = load_model("tiny")
    return GRPOLoop(
        open_local(model, tokenizer, reference=False),
        load_rows(toy_rows(12, seed=3)),
        with_information_gain(two_turns, options),
        cfg,
        advantage_fn=partial(igpo_advantages, igpo=options),
        dynamic_filter_fn=keep or partial(has_turn_signal, igpo=options),
    )


def test_the_sampler_scores_as_the_trainer_does():
    model, tokenizer = load_model("tiny")
    backend = open_local(model, tokenizer, reference=False)
    (prompt,) = encode_rows(load_rows(toy_rows(1, seed=8)), tokenizer)
    setup = RolloutSetup(backend.sampler, tokenizer, SampleParams(max_tokens=20), 4)
    fn = with_information_gain(two_turns, IGPOConfig(answer_lead="#### "))(setup)

    async def main():
        sample = await fn(sample_prompt(prompt, 0, seed=1))
        answer = answer_tokens(tokenizer, prompt.row.answer, "#### ")
        datums = []
        for end in prefix_ends(sample):
            tokens = np.concatenate([sample.tokens[:end], answer.lead, answer.tokens]).astype(
                np.int64
            )
            weights = np.arange(1, len(tokens)) >= len(tokens) - len(answer.tokens)
            datums.append(Datum(tokens=tokens, weights=weights))
        result = await backend.policy.forward(datums)
        return sample, [
            lp.values[d.weights == 1].mean() for lp, d in zip(result, datums, strict=True)
        ]

    sample, by_trainer = asyncio.run(main())
    assert len(sample.turns) == 2
    np.testing.assert_allclose(sample.info["answer_scores"], by_trainer, atol=1e-4)


def test_a_step_trains_every_token_with_the_advantage_of_its_turn(tmp_path):
    options = IGPOConfig(gamma=0.9, skip_ig_last_turn=True)
    loop = make_loop(options, prompt_groups_per_step=6)
    record = asyncio.run(loop.step())
    assert record.trained
    by_hand = {g.index: g for g in igpo_advantages(record.groups, options)}
    trained = {d.group for d in record.datums}
    assert trained == {i for i, g in by_hand.items() if has_turn_signal(g)}
    assert any(len(set(record.groups[i].rewards)) == 1 for i in trained), (
        "no group without a difference of rewards"
    )
    total = sum(d.num_loss_tokens for d in record.datums)
    for d, dlogprob in zip(record.datums, record.loss.dlogprobs, strict=True):
        sample, turns = (
            by_hand[d.group].samples[d.sample],
            by_hand[d.group].turn_advantages[d.sample],
        )
        expected = np.zeros(len(d.weights))
        for (a, b), value in zip(sample.turns, turns, strict=True):
            expected[a - 1 : b - 1] = -value / total
        np.testing.assert_allclose(dlogprob, expected, atol=1e-9)
    assert len({tuple(np.unique(d.advantage[d.active])) for d in record.datums}) > 1

    run = RunFolder.create(tmp_path / "run", loop.cfg)
    run.add(record)
    assert igpo_table(run.record(1)).equals(igpo_table(record))


def test_a_recorded_run_of_the_recipe_can_be_resumed_and_replayed(tmp_path):
    evaluated = []

    def counted(setup):
        rollout = two_turns(setup)

        async def rollout_fn(sample_prompt, *, evaluation):
            sample = await rollout(sample_prompt)
            evaluated.append(evaluation)
            return sample

        return rollout_fn

    task = {
        "rollout_fn_factory": counted,
        "rows": toy_rows(12, seed=3),
        "eval_rows": toy_rows(3, seed=4),
    }
    options = task | {"say": lambda line: None, "progress": False}
    settings = SETTINGS | {
        "dcp_save_interval": 1,
        "log_path": str(tmp_path / "run"),
        "kl_beta": 0.0,
    }
    cfg = igpo_loop.Config(**settings, steps=1, igpo=IGPOConfig(skip_ig_last_turn=True))
    assert igpo_loop.main(cfg, **options).steps == 1
    assert Counter(evaluated) == {False: 12, True: 6}
    longer = replace(cfg, steps=3)
    assert igpo_loop.main(longer, **options, resume=True).steps == 2
    run = Run.open(cfg.log_path)
    assert [r.step for r in run] == [1, 2, 3]
    again = asyncio.run(
        replay_step(cfg.log_path, 3, problem=igpo_loop.igpo_problem(longer, **task))
    )
    assert again.first_difference is None, again
    scored = [s.info["answer_scores"] for g in run.record(3).groups for s in g.samples]
    assert {len(scores) for scores in scored} == {3}


def test_the_asynchronous_loop_takes_the_same_functions():
    options = IGPOConfig(skip_ig_last_turn=True)
    cfg = Config(
        **SETTINGS | {"recipe": "async_rl_loop", "max_head_offpolicy_versions": 1, "steps": 3}
    )
    model, tokenizer = load_model("tiny")
    loop = AsyncGRPOLoop(
        open_local(model, tokenizer, reference=False),
        load_rows(toy_rows(24, seed=3)),
        with_information_gain(two_turns, options),
        cfg,
        advantage_fn=partial(igpo_advantages, igpo=options),
        dynamic_filter_fn=partial(has_turn_signal, igpo=options),
    )

    async def main():
        records = await loop.run(3)
        await loop.close()
        return records

    records = asyncio.run(main())
    assert len(records) == 3
    for record in records:
        groups = {g.index: g for g in record.groups}
        for d in record.datums:
            turns = groups[d.group].turn_advantages[d.sample]
            assert set(np.unique(d.advantage[d.active])) == set(turns.tolist())


# --- the table -------------------------------------------------------------------------------------------------------


def test_the_table_counts_turns_along_a_run_and_puts_the_outcome_on_its_last():
    samples = [
        conversation_sample((2, 1), (1, 2), scores=(-4, -3, -1)),
        conversation_sample((2, 3), scores=(-1, -2)),
        conversation_sample((2, 1), scores=(-4, -4)),
    ]
    record = StepRecord(step=1, groups=(PromptGroup(samples, runs=(0, 0, 1), key="q"),))
    table = igpo_table(record)
    assert table["turn"].tolist() == [1, 2, 3, 1]
    assert table["outcome"].tolist() == [0, 0, 1, 1]
    assert table["ig"].tolist() == [1, 2, -1, 0]
    assert table["advantage"].isna().all()
    assert igpo_table(StepRecord(step=1)).empty
