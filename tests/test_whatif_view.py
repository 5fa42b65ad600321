"The what-if panel: what it shows is what `what_if` says, mistakes are shown, hostile text stays text."

from dataclasses import replace

import numpy as np
import pytest
from synthetic import synthetic_record

from rl_notebook.core.types import LossError
from rl_notebook.core.losses import AGGREGATIONS, POLICY_LOSSES
from rl_notebook.runs.records import StepRecord
from rl_notebook.views.whatif import (
    CHOSEN,
    SIDE,
    WhatIfPanel,
    dots_payload,
    result_html,
)
from rl_notebook.insight.whatif import what_if


@pytest.fixture
def record() -> StepRecord:
    return synthetic_record(20, seed=5)


def shifted(record: StepRecord) -> list[np.ndarray]:
    "Logprobs of a policy that has moved."
    rng = np.random.default_rng(0)
    return [lp.values + rng.normal(0, 0.3, len(lp.values)) for lp in record.loss.logprobs]


SETTINGS = [
    {"policy_loss": "ppo", "eps_clip": 0.07},
    {"policy_loss": "gspo", "aggregation": "sequence_mean"},
    {"kl_beta": 0.2, "kl_estimator": "k1"},
    {"tis": "token", "tis_cap": 1.5},
    {"advantage_scale": "loo"},
    {"policy_loss": "dro", "tis": "sequence", "advantage_scale": "batch", "kl_beta": 1.0},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_what_is_shown_is_what_if(record, settings):
    later = shifted(record)
    panel = WhatIfPanel(record, later)
    panel.where.value = "after it moved"
    for name, value in settings.items():
        panel.controls[name].value = value
    # the clip slider stands at 0.2, and that is what a loss that reads it is given
    reads_clip = "eps_clip" in POLICY_LOSSES[panel.controls["policy_loss"].value][1]
    asked = {"eps_clip": 0.2} | settings if reads_clip else settings
    want = what_if(record, {CHOSEN: asked}, policy_logprobs=later)
    assert panel.result.table.equals(want.table)
    for loss in want.table["loss"]:
        assert f">{loss:.4g}</td>" in panel.shown.value
    assert panel.error == ""


@pytest.mark.variant
def test_every_combination_gives_an_answer_or_a_reason(record):
    panel = WhatIfPanel(record)
    reasons = set()
    for loss in POLICY_LOSSES:
        for aggregation in AGGREGATIONS:
            for tis in ("off", "token", "sequence"):
                panel.controls["policy_loss"].value = loss
                panel.controls["aggregation"].value = aggregation
                panel.controls["tis"].value = tis
                wrong = aggregation == "constant" or (loss == "reinforce" and tis != "off")
                assert bool(panel.error) == wrong
                assert ('role="alert"' in panel.shown.value) == wrong
                reasons.add(panel.error)
    assert any("divisor" in r for r in reasons)
    assert any("anchored on the sampler" in r for r in reasons)


def test_a_control_that_nothing_reads_is_grey(record):
    panel = WhatIfPanel(record)
    assert panel.controls["eps_clip"].disabled
    assert panel.controls["tis_cap"].disabled
    assert not panel.controls["kl_estimator"].disabled
    panel.controls["policy_loss"].value = "ppo"
    panel.controls["tis"].value = "token"
    panel.controls["kl_beta"].value = 0.0
    assert not panel.controls["eps_clip"].disabled
    assert not panel.controls["tis_cap"].disabled
    assert panel.controls["kl_estimator"].disabled


def test_a_bug_is_not_shown_as_an_answer(record, monkeypatch):
    panel = WhatIfPanel(record)
    monkeypatch.setattr("rl_notebook.views.whatif.what_if", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        panel.update()


def test_a_gradient_of_zeros_is_drawn(record):
    flat_rewards = [replace(d, advantage=0.0) for d in record.datums]
    result = what_if(replace(record, datums=flat_rewards, options={}), {CHOSEN: {}})
    assert "The chosen settings: no gradient." in result_html(result)
    assert dots_payload(result)["zero"] == [[SIDE // 2, SIDE // 2]]


def test_bad_records_are_refused_or_explained(record):
    with pytest.raises(LossError, match="nothing that was trained"):
        WhatIfPanel(StepRecord(1, reason="all groups are dead"))
    without = replace(record, datums=[replace(d, sampler_logprobs=None) for d in record.datums])
    panel = WhatIfPanel(without)
    panel.controls["tis"].value = "token"
    assert "without sampler_logprobs" in panel.error
    assert len(panel.inspector().rows) == 0
    panel.controls["tis"].value = "off"
    assert panel.error == ""
    assert len(panel.inspector().rows) == len(record.datums)
    odd = replace(
        record, options={"policy_loss": "ppo", "eps_clip": 0.9, "tis": "token", "tis_cap": 40.0, "kl_beta": 3.0}
    )
    panel = WhatIfPanel(odd)
    assert panel.chosen == {}
    assert panel.result.table.note[CHOSEN] == "same gradient as recorded"
