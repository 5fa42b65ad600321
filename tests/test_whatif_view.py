"The what-if panel: what it shows is what `what_if` says, mistakes are shown, hostile text stays text."

import base64
from dataclasses import replace

import numpy as np
import pytest
from synthetic import synthetic_record

from rl_notebook.core import LossError
from rl_notebook.losses import AGGREGATIONS, POLICY_LOSSES
from rl_notebook.records import StepRecord
from rl_notebook.views.whatif import (
    CHOSEN,
    DOTS,
    SIDE,
    WhatIfPanel,
    dots_payload,
    dots_html,
    result_html,
    table_payload,
)
from rl_notebook.whatif import what_if


@pytest.fixture
def record() -> StepRecord:
    return synthetic_record(20, seed=5)


def shifted(record: StepRecord) -> list[np.ndarray]:
    "Logprobs of a policy that has moved."
    rng = np.random.default_rng(0)
    return [lp.values + rng.normal(0, 0.3, len(lp.values)) for lp in record.loss.logprobs]


def test_the_panel_begins_where_the_record_stood(record):
    panel = WhatIfPanel(record)
    assert panel.chosen == {}
    assert panel.result.table.note[CHOSEN] == "same gradient as recorded"
    assert "the record&#x27;s own" in panel.static_html()
    assert "policy" not in [c.description for c in panel.widget.children[0].children]


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
    for row in table_payload(want)["rows"]:
        for cell in row["cells"]:
            assert f">{cell}</td>" in panel.shown.value
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


def test_dots_are_the_tokens(record):
    result = what_if(record, {CHOSEN: {"policy_loss": "ppo", "eps_clip": 0.1}}, policy_logprobs=shifted(record))
    payload = dots_payload(result)
    places = [*payload["plus"], *payload["minus"], *payload["zero"]]
    assert all(0 <= x <= SIDE and 0 <= y <= SIDE for x, y in places)
    assert any(y == SIDE // 2 and x != SIDE // 2 for x, y in places)  # clipped tokens
    assert all(x <= SIDE // 2 for x, _ in payload["plus"])  # raised by the recorded gradient, but for a weak KL term
    drawn = base64.b64decode(dots_html(payload).split("base64,")[1].split('"')[0]).decode()
    assert drawn.count("h4v4") == len(places)


def test_many_tokens_stay_a_small_picture():
    record = synthetic_record(20, groups=64, completions=16)
    result = what_if(record, {CHOSEN: {"policy_loss": "sapo"}}, policy_logprobs=shifted(record))
    assert sum(d.num_loss_tokens for d in record.datums) > 10_000
    payload = dots_payload(result)
    assert sum(len(payload[k]) for k in ("plus", "minus", "zero")) <= DOTS
    assert len(result_html(result)) < 30_000


def test_a_gradient_of_zeros_is_drawn(record):
    flat_rewards = [replace(d, advantage=0.0) for d in record.datums]
    result = what_if(replace(record, datums=flat_rewards, options={}), {CHOSEN: {}})
    assert table_payload(result)["note"] == "no gradient"
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
