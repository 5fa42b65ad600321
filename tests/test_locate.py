"Where a completion was lost: the search on curves that are known, and a completion of the tiny model."

import asyncio

import numpy as np
import pytest
from test_loop import make_loop

from rl_notebook.core.types import ConfigError, PromptGroup, RolloutSample
from rl_notebook.experiments.locate import BATCH, Located, Search, find_place, locate, parting
from rl_notebook.task.toy import toy_reward


def place_on(curve, seed, budget=300, common=True):
    "The place that is named on a curve of probabilities, and what it cost; the last value is the reward."

    async def sample(kept, batch):
        key = [seed, batch] if common else [seed, batch, kept]
        return (np.random.default_rng(key).random(BATCH) < curve[kept]).astype(float)

    search = Search(sample, len(curve) - 1, float(curve[-1]), budget)
    return asyncio.run(find_place(search)).place, search.used


@pytest.mark.parametrize("common", [True, False])
def test_one_fall_is_found_and_several_are_not(common):
    found = 0
    named = 0
    for seed in range(12):
        rng = np.random.default_rng([11, seed])
        length = int(rng.integers(8, 50))
        place = int(rng.integers(length))
        fall = np.where(np.arange(length) <= place, 0.9, 0.03)
        at, used = place_on([*fall, 0.0], seed, common=common)
        found += at == place
        assert used <= 300
        several = 1 - (
            np.arange(length)[:, None] > rng.choice(length, min(4, length), replace=False)
        ).mean(1)
        flat = np.full(length, rng.uniform(0, 0.2))
        named += sum(
            place_on([*curve, 0.0], seed, common=common)[0] is not None for curve in (several, flat)
        )
    assert found >= 10
    assert named <= 1


def test_a_success_is_won_where_the_curve_rises():
    curve = [0.1] * 20 + [0.95] * 20 + [1.0]
    assert place_on(curve, 3)[0] == 19


@pytest.mark.parametrize("seed", range(3))
def test_a_rise_between_the_places_looked_at_first_is_found(seed):
    curve = [0.12, *[0.92] * 3, *[0.02] * 14, 0.0]
    assert place_on(curve, seed)[0] == 3


def test_a_fall_that_the_first_batches_hide_is_found():
    curve = [0.25, 0.5, 0.65, 0.58, 0.71, 0.71, 0.0]
    places = [place_on(curve, seed)[0] for seed in range(8)]
    assert places.count(5) >= 6
    assert set(places) <= {5, None}


def test_a_small_budget_says_that_it_does_not_know():
    curve = [0.9] * 20 + [0.05] * 20 + [0.0]
    for budget in (24, 48):
        place, used = place_on(curve, 0, budget)
        assert place is None
        assert used <= budget


def test_a_completion_of_the_tiny_model():
    async def main():
        loop = make_loop(toy_reward)
        [record] = await loop.run(1, progress=False)
        group, sample = next(
            (i, j)
            for i, g in enumerate(record.groups)
            for j, s in enumerate(g.samples)
            if s.reward == 0
        )
        before = loop.state.number, loop.policy_version
        located = await locate(loop, record, group, sample, 96)
        assert located.used <= 96
        assert (loop.state.number, loop.policy_version) == before
        assert Located.from_json(located.to_json()) == located
        assert located.points[-1].mean == 0
        assert located.headline in repr(located)
        assert located._repr_html_().count("clip-path") == len(located.pieces)
        again = await locate(loop, record, group, sample, 96)
        assert (again.points, again.place) == (located.points, located.place)
        with pytest.raises(ConfigError, match="at least 24"):
            await locate(loop, record, group, sample, 16)
        with pytest.raises(ConfigError, match="bounds"):
            await locate(loop, record, group, sample, bounds=(1.0, 2.0))

    asyncio.run(main())


def group_of(*completions):
    "A group of completions, each its tokens and its reward."

    def one(tokens, reward):
        ids = [1, *tokens]
        return RolloutSample(ids, [0.0] + [-1.0] * len(tokens), [0] + [1] * len(tokens), reward)

    return PromptGroup([one(*c) for c in completions])


def test_where_a_group_parts():
    right = [((5, 6, 7, i), 1.0) for i in range(8)]
    wrong = [((5, 6, 9, i), 0.0) for i in range(8)]
    result = parting(group_of(*right, *wrong))
    assert result.depth == 2
    assert result.is_clear
    mixed = [((5, i % 2, i), float(i // 2 % 2)) for i in range(12)]
    assert not parting(group_of(*mixed)).is_clear
    assert parting(group_of(*right)).branches == ()
