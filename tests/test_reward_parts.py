"Parts of the reward that are compared by themselves: with their weights, in the loop, in pre-flight and in what-if."

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from test_loop import SMALL_RUN, make_loop

from rl_notebook.core.advantages import with_advantages
from rl_notebook.config.config import Config
from rl_notebook.core.types import LossError, PromptGroup, RewardError, RolloutSample
from rl_notebook.experiments.replay import replay_advantages
from rl_notebook.experiments.whatif import reward_lab, what_if
from rl_notebook.experiments.preflight import preflight


def length(text: str) -> float:
    return float(len(text))


def letters(text: str) -> float | None:
    "Not known of a text that begins with a blank."
    return None if text.startswith(" ") else float(sum(map(ord, text)) % 7) / 100


def z(x):
    return np.zeros(len(x)) if np.ptp(x) < 1e-6 else (x - x.mean()) / (x.std(ddof=1) + 1e-8)


def test_a_loop_compares_each_part_with_its_weight():
    async def main():
        weights = {"length": 0.5, "letters": 2.0}
        loop = make_loop(
            reward=(length, letters),
            rewards=["length", "letters"],
            reward_weights=[0.5, 2.0],
            advantage_scale="parts",
        )
        assert loop.task.part_weights == weights
        record = await loop.step()
        for g in record.groups:
            want = np.zeros(len(g.samples))
            for name, weight in weights.items():
                part = np.array([s.rewards.get(name, np.nan) for s in g.samples], dtype=float)
                scored = ~np.isnan(part)
                want[scored] += weight * z(part[scored]) if scored.sum() > 1 else 0.0
            np.testing.assert_allclose(g.advantages, want, atol=1e-9)
        assert any(abs(g.advantages - z(g.rewards)).max() > 0.1 for g in record.groups)
        assert replay_advantages(loop, record).same is not False
        assert {d.advantage for d in record.datums} <= {
            a for g in record.groups for a in g.advantages
        }
        with pytest.raises(LossError, match="parts that add up to"):  # these weights are not 1
            what_if(record, {"parts": {"advantage_scale": "parts"}})

    asyncio.run(main())


def test_what_if_preflight_and_reward_lab_apply_the_rule():
    async def main():
        loop = make_loop(reward=(length, letters), advantage_scale="parts")
        record = await loop.step()
        shown = what_if(
            record, {"sum": {"advantage_scale": "std"}, "again": {"advantage_scale": "parts"}}
        )
        again = shown.dlogprobs["again"]
        recorded = shown.dlogprobs["recorded"]
        assert all(np.allclose(a, b, atol=1e-9) for a, b in zip(again, recorded, strict=True))
        assert not all(
            np.allclose(a, b) for a, b in zip(shown.dlogprobs["sum"], recorded, strict=True)
        )
        assert len(reward_lab(record, [length, letters], [1.0, 3.0]).groups) == len(record.groups)
        cfg = Config(
            **SMALL_RUN, advantage_scale="parts", rewards=["a", "b"], reward_weights=[1.0, 4.0]
        )
        checked = await preflight(loop.backend, loop.rows, [length, letters], cfg)
        assert "parts" not in str(checked.verdict)

    asyncio.run(main())


def test_a_group_that_names_no_parts_is_rejected():
    sample = RolloutSample(tokens=[1, 2], logprobs=[0, -1], loss_mask=[0, 1], reward=1.0)
    group = PromptGroup(samples=(sample, replace(sample, reward=0.0)), key="q")
    with pytest.raises(
        LossError,
        match=r"row 'q'.*advantage_scale 'parts': got rewards \[1.0, 0.0\], parts that add up",
    ):
        with_advantages([group], scale="parts")
    parts = tuple(replace(s, rewards={"a": s.reward, "b": 0.0}) for s in group.samples)
    [with_parts] = with_advantages([replace(group, samples=parts)], scale="parts")
    assert with_parts.advantages == pytest.approx([0.7071068, -0.7071068])
    tripled = [replace(s, reward=3 * s.reward) for s in parts]
    [with_parts] = with_advantages(
        [replace(group, samples=tuple(tripled))], scale="parts", weights={"a": 3.0}
    )
    assert with_parts.advantages == pytest.approx([2.1213203, -2.1213203])


@pytest.mark.parametrize("scale", ["opo", "whiten"])
def test_a_scale_that_weighs_by_tokens_names_a_completion_without_them(scale):
    sample = RolloutSample([1, 2, 3], [0.0, -1.0, -1.0], [0, 1, 1], reward=1.0)
    text = RolloutSample([], [], [], reward=0.0, text="an answer")
    for others in ([text, replace(text, reward=1.0)], [sample, text]):
        with pytest.raises(
            LossError, match=rf"sample \d: advantage_scale '{scale}': got a completion without"
        ):
            with_advantages([PromptGroup(others)], scale=scale)
    unscored = [sample, replace(sample, reward=None)]
    with pytest.raises(RewardError, match="rewards of a group: got"):
        with_advantages([PromptGroup(unscored)], scale=scale)
    (group,) = with_advantages([PromptGroup([sample, replace(sample, reward=0.0)])], scale=scale)
    assert np.isfinite(group.advantages).all()
