"Each trainer's preset against its own code: tests/golden/trainers, made by running it (scripts/record_trainers.py)."

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_notebook.core.advantages import with_advantages
from rl_notebook.core.types import Datum, Logprobs, LossError, PromptGroup, RolloutSample
from rl_notebook.experiments.trainers import NOT_HERE, TRAINERS, compare_trainers
from rl_notebook.experiments.whatif import RECORDED, FrozenBatch, flat, what_if

GOLDEN = json.loads((Path(__file__).parent / "golden/trainers/cases.json").read_text())
WIDTH = GOLDEN["width"]
STEP_OPTIONS: dict[str, dict[str, Any]] = {  # what a step may have been trained with
    "defaults": {},
    "dapo": {
        "policy_loss": "dapo",
        "eps_clip_c": 4.0,
        "tis": "token",
        "icepop_threshold": 2.0,
        "kl_beta": 0.05,
    },
    "gspo": {"policy_loss": "gspo", "aggregation": "sequence_mean", "anchor": "rollout"},
    "vespo": {
        "policy_loss": "vespo",
        "vespo_k_pos": 1.0,
        "tis": "token",
        "off_policy_mask_threshold": 0.1,
    },
    "dppo": {
        "policy_loss": "dppo_tv",
        "kl_beta": 0.1,
        "kl_estimator": "k1",
        "kl_bias_correction": True,
    },
}


def frozen_step(
    number: int, options: dict[str, Any], drop: bool = False, scale: str = "std"
) -> FrozenBatch:
    "A recorded batch as a step of ours; `drop`: without the groups that have no signal."
    b = {k: np.array(v) for k, v in GOLDEN["batches"][number].items()}
    places = np.array_split(np.arange(len(b["rewards"])), GOLDEN["groups"])
    ids = range(WIDTH + 1)

    def sample(i):
        return RolloutSample(ids, np.zeros(WIDTH + 1), [0, *b["mask"][i]], float(b["rewards"][i]))

    groups = [PromptGroup(tuple(map(sample, rows)), index=g) for g, rows in enumerate(places)]
    datums = []
    policy = []
    for g, rows in zip(with_advantages(groups, scale=scale), places, strict=True):
        for j, i in enumerate(rows if g.advantages.any() or not drop else []):
            series = {f"{name}_logprobs": b[name][i] for name in ("old", "sampler", "ref")}
            place = {"group": g.index, "sample": j}
            datums.append(Datum(ids, b["mask"][i], float(g.advantages[j]), **series, **place))
            policy.append(Logprobs(b["policy"][i]))
    return FrozenBatch(
        tuple(datums), tuple(policy), options, tuple(with_advantages(groups, scale=scale))
    )


def difference(
    case: dict[str, Any], number: int, options: dict[str, Any], drop: bool = False
) -> float:
    "The largest difference in loss or dL/dlogprob, relative to the largest value."
    name = case["trainer"]
    batch = frozen_step(number, options, drop)
    whole = frozen_step(number, options)
    result = compare_trainers(batch, {name: case["settings"]})
    if "covariances with groups that were dropped before training" in result.not_compared[name]:
        return 0.0
    row = result.table.loc[name]
    causes = result.causes
    trained = {d.group for d in batch.datums}
    assert np.isclose(causes["turn"].sum(), 1)
    assert np.isclose(
        causes["length"].prod(), row["dlogprob_norm"] / result.table.loc[RECORDED, "dlogprob_norm"]
    )
    kept = np.repeat(
        [d.group in trained for d in whole.datums], [d.num_loss_tokens for d in whole.datums]
    )
    theirs = np.array(case["grad"][number])
    worst = (
        np.abs(flat(batch.datums, result.dlogprobs[name]) - theirs[kept]).max()
        / np.abs(theirs).max()
    )
    pulled = theirs[~kept].any()  # the KL of groups that are gone
    assert pulled == any("dropped" in text for text in result.not_compared[name])
    return float(worst if pulled else max(worst, abs(row["loss"] / case["loss"][number] - 1)))


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_preset_is_the_loss_of_its_trainer(trainer: str) -> None:
    cases = [c for c in GOLDEN["cases"] if c["trainer"] == trainer]
    results = []
    variants = [*STEP_OPTIONS.values()]
    for i, case in enumerate(cases):
        results += [difference(case, number, {}) for number in range(len(case["loss"]))]
        results += [
            difference(case, 0, options)
            for options in (variants if i == 0 else [variants[i % len(variants)]])
        ]
        results += [difference(case, 1, {}, drop=True)]
    assert max(results) < 1e-6


@pytest.mark.parametrize("scale", GOLDEN["advantages"][0])
def test_an_advantage_is_that_of_its_trainer(scale: str) -> None:
    "Of verl (`whiten` is its REINFORCE++ with a baseline) and SkyRL; here what has no signal stays 0 if whitened."
    for number, theirs in enumerate(GOLDEN["advantages"]):
        groups = frozen_step(number, {}, scale=scale).groups
        for g, expected in zip(groups, np.array_split(theirs[scale], len(groups)), strict=True):
            np.testing.assert_allclose(
                g.advantages, expected if np.ptp(g.rewards) else 0.0, rtol=1e-6, atol=1e-9
            )


BEFORE = "the policy before the step"
SAPO = {"policy_loss": "sapo", "sapo_temperature_pos": 2.0}
TRUNCATED = {"tis": "product", "tis_mode": "mask", "tis_cap": 3.0}
OTHER: list[
    tuple[str, dict[str, Any], str, str]
] = [  # a term, settings of it alone, and both sides of the cause
    (
        "denominator",
        {"aggregation": "sequence_mean"},
        "own tokens × completions of all groups",
        "tokens of all groups",
    ),
    ("advantage", {"advantage_scale": "none"}, "r − mean", "(r − mean) / (std + 1e-08)"),
    ("ratio", {"anchor": "rollout"}, "of each token to the sampler", f"of each token to {BEFORE}"),
    (
        "ratio",
        SAPO,
        f"as in sapo (sapo_temperature_pos=2.0), to {BEFORE}",
        f"of each token to {BEFORE}",
    ),
    ("clip", {"eps_clip": 0.1, "eps_clip_c": 3.0}, "0.9 to 1.1, dual clip 3", "0.8 to 1.2"),
    ("correction", TRUNCATED, "weights of completions (product), 0 outside 0 to 3", "none"),
    (
        "masks and bonus",
        {"off_policy_mask_threshold": 0.01},
        "off_policy_mask_threshold 0.01",
        "none",
    ),
    ("KL", {"kl_beta": 0.1}, "0.1 × k3 × ratio to the reference", "none"),
]


@pytest.mark.parametrize(("term", "settings", "theirs", "recorded"), OTHER)
def test_the_one_setting_that_differs_is_the_cause(
    term: str, settings: dict[str, Any], theirs: str, recorded: str
) -> None:
    "A step that was trained as TRL would have: nothing differs, and then one thing, whose gradient `what_if` confirms."
    batch = frozen_step(0, {"policy_loss": "ppo"})
    same = {"advantage_eps": 1e-8}
    alike = compare_trainers(batch, {"TRL": same})
    assert (len(alike.causes), alike.table.loc["TRL", "note"]) == (0, "the recorded gradient")
    result = compare_trainers(batch, {"TRL": {**same, **settings}})
    (row,) = result.causes.to_dict("records")
    assert (row["term"], row["theirs"], row["recorded"]) == (term, theirs, recorded)
    bias = {"kl_bias_correction": True} if term == "KL" else {}
    confirmed = what_if(batch, {"x": {**settings, **bias}}).dlogprobs["x"]
    np.testing.assert_allclose(
        flat(batch.datums, result.dlogprobs["TRL"]), flat(batch.datums, confirmed), atol=1e-12
    )
    assert f"{term}: {theirs} (recorded: {recorded})" in repr(result)


def test_whether_a_step_trained_groups_without_signal_changes_no_trainer_that_leaves_them_out() -> (
    None
):
    for settings in ({}, {"aggregation": "sequence_mean"}, {"aggregation": "sample_mean"}):
        results = [
            compare_trainers(frozen_step(0, {}, drop), {"Fireworks": settings})
            for drop in (False, True)
        ]
        assert np.isclose(*(one.table["dlogprob_norm"]["Fireworks"] for one in results), rtol=1e-12)


def test_parts_that_cannot_be_compared_are_named() -> None:
    batch = frozen_step(0, {"policy_loss": "ppo"})
    blind = replace(
        batch,
        datums=tuple(replace(d, sampler_logprobs=None, ref_logprobs=None) for d in batch.datums),
    )
    result = compare_trainers(replace(blind, groups=()))
    reasons = {name: " ".join(notes) for name, notes in result.not_compared.items()}
    assert set(result.causes["term"]) == {"denominator", "clip"}
    assert (
        "KL, which stays as recorded: the record lacks the reference's logprobs" in reasons["SkyRL"]
    )
    assert (
        "ratio, which stays as recorded: the record lacks the sampler's logprobs"
        in reasons["tinker-cookbook"]
    )
    assert all(NOT_HERE[name] in reasons[name] for name in NOT_HERE)
    assert all(
        "advantage, which stays as recorded: the record lacks the rewards" in notes
        for notes in reasons.values()
    )
    comparison = compare_trainers(
        frozen_step(0, {"policy_loss": "ppo"}, drop=True), {"SkyRL": {"micro_batch": 3}}
    )
    assert {"KL of groups that were dropped before training"} < set(
        comparison.not_compared["SkyRL"]
    )
    with pytest.raises(LossError, match="trainers: got 'verl'; expected"):
        compare_trainers(batch, "verl")  # type: ignore[arg-type]
    rows = what_if(comparison, {"mine": {"aggregation": "prompt_mean"}})
    assert [*rows.table.index] == [RECORDED, "SkyRL", "mine"]
    both = ["dlogprob_norm", "cosine"]
    assert rows.table.loc["SkyRL", both].equals(comparison.table.loc["SkyRL", both])
    for message, kwargs in (
        ("'SkyRL'.*a row that is there", {}),
        ("policy_logprobs", {"policy_logprobs": []}),
    ):
        with pytest.raises(LossError, match=message):
            what_if(comparison, {"SkyRL": {}}, **kwargs)
    with pytest.raises(LossError, match="Did you mean 'verl'"):
        compare_trainers(batch, {"Verl": {}})
    with pytest.raises(LossError, match="micro_batch: got 2 updates"):
        compare_trainers(replace(batch, updates=(4, 8)), {"TRL": {"micro_batch": 2}})
