"Forks of recorded completions: turns that are replayed, weights that are put back, other sources, other rewards."

import asyncio
import itertools
from math import comb

import numpy as np
import pytest
from test_loop import make_loop

from rl_notebook.core.intervals import RANGE_SEEN, betting, clopper_pearson, mean_interval
from rl_notebook.core.types import ConfigError, DataError, RLNotebookError, SampleParams
from rl_notebook.experiments.fork import Fork, fork, make_tree
from rl_notebook.experiments.locate import locate
from rl_notebook.loop.back import save_checkpoint
from rl_notebook.runs.run import RunFolder
from rl_notebook.task.chat import start_conversation
from rl_notebook.task.data import Row
from rl_notebook.task.toy import toy_reward


def parameters(loop):
    "The trained weights of a loop's local policy."
    return {k: p.detach().clone() for k, p in loop.backend.policy.state.params.items()}


def same_samples(a, b):
    "Whether two records have the same samples to the last bit."
    pairs = [
        p
        for g, h in zip(a.groups, b.groups, strict=True)
        for p in zip(g.samples, h.samples, strict=True)
    ]
    return all(
        np.array_equal(s.tokens, t.tokens)
        and np.array_equal(s.logprobs, t.logprobs, equal_nan=True)
        for s, t in pairs
    )


def test_the_next_step_is_the_same_to_the_last_bit():
    async def main():
        forked, other = make_loop(), make_loop()
        [record] = await forked.run(1, progress=False)
        await other.run(1, progress=False)
        result = await fork(forked, record, 0, 0, n=4)
        assert "from the undo slot" in result.weights
        assert result.gap < 1e-5
        await locate(forked, record, 0, 0, 24, bounds=(0.0, 2.0))
        [a] = await forked.run(1, progress=False)
        [b] = await other.run(1, progress=False)
        assert same_samples(a, b)
        assert a.loss.loss == b.loss.loss
        assert a.policy_version == b.policy_version
        theirs = parameters(other)
        assert all(bool((p == theirs[k]).all()) for k, p in parameters(forked).items())
        late = await fork(forked, record, 0, 0, n=2)
        assert late.weights == "the current ones"
        assert late.gap > 1e-4

    asyncio.run(main())


def test_a_checkpoint_has_the_weights_of_the_step_after_it(tmp_path):
    async def main():
        loop = make_loop(keep_undo=0)
        run = RunFolder.create(tmp_path / "run", loop.cfg)
        loop.outputs.append(run.add)
        await loop.run(1, progress=False)
        assert await save_checkpoint(loop, run) == 1
        await loop.run(2, progress=False)
        result = await fork(loop, run.record(2), 1, 0, n=2, run=run)
        assert "from the checkpoint after step 1" in result.weights
        assert result.gap < 1e-5

    asyncio.run(main())


def two_turns(replies=None, through_setup=True):
    "A rollout factory: ask, say something, ask again."
    replies = replies or itertools.repeat("Try again.")

    def make_rollout_fn(setup):
        async def rollout_fn(sample_prompt):
            row = Row(key="x", messages=({"role": "user", "content": sample_prompt["question"]},))
            talk = start_conversation(setup.tokenizer, row)
            sampler = setup.sampler if through_setup else setup.sampler.sampler
            for turn in range(2):
                [completion] = await sampler.sample(
                    talk.tokens, SampleParams(**setup.sample_kwargs)
                )
                talk = talk.add_completion(completion)
                if turn == 0:
                    talk = talk.add_messages({"role": "user", "content": next(replies)})
            return talk.to_sample(toy_reward(completion.text, sample_prompt["answer"]))

        return rollout_fn

    return make_rollout_fn


def test_turns_before_the_place_are_replayed_and_the_rest_is_played():
    async def main():
        loop = make_loop(two_turns())
        [record] = await loop.run(1, progress=False)
        sample = record.groups[1].samples[2]
        (first, end), (second, _) = sample.turns
        for target in (first, second):
            result = await fork(
                loop, record, 1, 2, target=target, token=[int(sample.tokens[first])], n=4
            )
            assert len(result.branches) == 2
            assert not np.isnan(result.sampled.rewards).any()
            again = await fork(
                loop, record, 1, 2, target=target, token=[int(sample.tokens[first])], n=4
            )
            assert again.branches == result.branches
        texts = {c.text for c in result.sampled.continuations}
        assert len(texts) > 1  # the draws differ
        before = loop.backend.tokenizer.decode(sample.tokens[second : target + 1].tolist())
        assert result.before == before
        with pytest.raises(DataError, match="expected a token that the policy sampled"):
            await fork(loop, record, 1, 2, target=end + 1)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (two_turns(map(str, itertools.count())), "request 2 with another prompt"),
        (two_turns(through_setup=False), "0 requests of setup.sampler"),
    ],
)
def test_a_rollout_that_does_not_repeat_is_an_error(factory, message):
    async def main():
        loop = make_loop(factory)
        [record] = await loop.run(1, progress=False)
        sample = record.groups[0].samples[0]
        with pytest.raises(DataError, match=message):
            await fork(loop, record, 0, 0, target=sample.turns[1][0], n=2)

    asyncio.run(main())


def test_a_backend_needs_a_reward_and_gives_the_same():
    async def main():
        loop = make_loop(toy_reward)
        [record] = await loop.run(1, progress=False)
        await loop.undo()
        params = loop.cfg.sample_params(seed=0)
        with pytest.raises(ConfigError, match="expected reward="):
            await fork(loop.backend, record, 0, 0)
        mine = await fork(loop, record, 0, 0, n=4)
        theirs = await fork(loop.backend, record, 0, 0, n=4, reward=toy_reward, params=params)
        assert mine.branches == theirs.branches
        assert "which are those of the record" in theirs.weights
        assert mine.weights == "those of step 1, which are loaded"
        lengths = await fork(loop, record, 0, 0, n=4, token=[7], reward=lambda text: len(text) / 7)
        assert {b.interval.method for b in lengths.branches} == {RANGE_SEEN}
        assert not lengths.sampled.interval.is_guaranteed
        assert Fork.from_json(mine.to_json()) == mine
        assert "<table" in mine._repr_html_()
        for wrong in (
            {"group": 99},
            {"sample": 99},
            {"target": 0},
            {"token": ""},
            {"token": 10**6},
        ):
            with pytest.raises(RLNotebookError):
                await fork(loop, record, **wrong)

    asyncio.run(main())


def test_intervals_cover_where_the_probability_is_known():
    rng = np.random.default_rng(5)
    for n in (3, 9):
        for p in rng.uniform(0, 1, 12):
            chances = [comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
            for interval in (clopper_pearson, lambda k, n: betting([1] * k + [0] * (n - k))):
                assert sum(c for k, c in enumerate(chances) if p in interval(k, n)) >= 0.95
    assert mean_interval([0, 1, 0.5]).method == "bootstrap"


def test_a_tree_has_every_continuation_once():
    rng = np.random.default_rng(0)
    paths = [
        (tuple(rng.integers(0, 3, rng.integers(0, 6)).tolist()), float(i % 2)) for i in range(60)
    ]

    def spelled(nodes, before=()):
        for node in nodes:
            tokens = (*before, *node.tokens)
            if node.children:
                yield from spelled(node.children, tokens)
            else:
                yield from ((tokens, reward) for reward in node.rewards)

    assert sorted(spelled(make_tree(paths))) == sorted(paths)
