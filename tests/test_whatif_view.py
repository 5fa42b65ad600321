"The what-if panel: what it shows is what `what_if` says, mistakes are shown, hostile text stays text."

import numpy as np
import pytest
from synthetic import synthetic_record

from rl_notebook.core.losses import POLICY_LOSSES
from rl_notebook.experiments.whatif import what_if
from rl_notebook.runs.records import StepRecord
from rl_notebook.views.whatif import CHOSEN, WhatIfPanel


@pytest.fixture
def record() -> StepRecord:
    return synthetic_record(20, seed=5)


def moved_logprobs(record: StepRecord) -> list[np.ndarray]:
    "Logprobs of a policy that has moved."
    rng = np.random.default_rng(0)
    return [lp.values + rng.normal(0, 0.3, len(lp.values)) for lp in record.loss.logprobs]


SETTINGS = [
    {"policy_loss": "ppo", "eps_clip": 0.07},
    {"policy_loss": "dro", "tis": "sequence", "advantage_scale": "batch", "kl_beta": 1.0},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_panel_shows_the_result_of_what_if(record, settings):
    later = moved_logprobs(record)
    panel = WhatIfPanel(record, later)
    panel.where.value = "after it moved"
    for name, value in settings.items():
        panel.controls[name].value = value
    # the clip slider is at 0.2, and a loss that reads it gets that
    reads_clip = "eps_clip" in POLICY_LOSSES[panel.controls["policy_loss"].value][1]
    changes = {"eps_clip": 0.2} | settings if reads_clip else settings
    want = what_if(record, {CHOSEN: changes}, policy_logprobs=later)
    assert panel.result.table.equals(want.table)
    for loss in want.table["loss"]:
        assert f">{loss:.4g}</td>" in panel.shown.value
    assert panel.error == ""


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
