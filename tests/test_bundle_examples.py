"""The writers of `examples/bundles`, each on values that have the fields of its trainer, read back by `Run.open`."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace as Of

import numpy as np
import pytest
import torch

from rl_notebook.runs.run import Run

FOLDER = Path(__file__).parents[1] / "examples/bundles"
IDS = [1, 2, 7, 3]
SAMPLER = [-0.5, -0.1]
OLD = [-0.6, -0.1]


def nested(*rows) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(row) for row in rows])


def of(module, step: int = 0):
    "What each trainer has of two completions of one prompt."
    t = torch.tensor
    advantages = [[0.5, 0.5], [-0.5, -0.5]]
    if module == "verl_bundle":
        fields = {"prompts": nested(IDS[:2], IDS[:2]), "responses": nested(IDS[2:], IDS[2:])}
        fields |= {
            "response_mask": nested([1, 1], [1, 1]),
            "rm_scores": nested([0.0, 1.0], [0.0, 0.0]),
        }
        fields |= {"rollout_log_probs": nested(SAMPLER, SAMPLER), "old_log_probs": nested(OLD, OLD)}
        return (
            fields | {"advantages": nested(*advantages)},
            ["u_0_0", "u_1_0"],
            [{"min_global_steps": 1}] * 2,
        )
    if module == "skyrl_bundle":  # one column of padding on the left
        batch = {"sequences": t([[0, *IDS]] * 2), "attention_mask": t([[0, 1, 1, 1, 1]] * 2)}
        batch |= {"response_mask": t([[0, 1, 1]] * 2), "loss_mask": t([[0.0, 1, 1]] * 2)}
        batch |= {
            "rollout_logprobs": t([[0.0, *SAMPLER]] * 2),
            "action_log_probs": t([[0.0, *OLD]] * 2),
        }
        return (batch | {"advantages": t([[0.0, *a] for a in advantages])},)
    if module == "slime_bundle":
        data = {"tokens": [t(IDS)] * 2, "response_lengths": [2, 2], "loss_masks": [t([1, 1])] * 2}
        data |= {"raw_reward": [0.0, 1.0, 0.0], "partition": [1, 0]}  # the rewards of all ranks
        data |= {"rollout_log_probs": [t(SAMPLER)] * 2, "log_probs": [t(OLD)] * 2}
        return (data | {"advantages": [t(a) for a in advantages]},)
    if module == "tinker_bundle":

        def wrap(values):
            return Of(data=values)

        shared = {"target_tokens": wrap(IDS[1:]), "logprobs": wrap([0.0, *SAMPLER])}
        inputs = [shared | {"advantages": wrap([0.0, *a])} for a in advantages]
        datums = [
            Of(model_input=Of(to_ints=lambda: IDS[:-1]), loss_fn_inputs=own) for own in inputs
        ]
        return (datums, [{"logprobs": wrap([0.0, *OLD])}] * 2)
    row = {"action_log_probs": t([[-2.0, *OLD]] * 2), "rollout_log_probs": t([[0.0, *SAMPLER]] * 2)}
    row |= {
        "sequences": t([IDS] * 2),
        "attention_mask": t([[1] * 4] * 2),
        "action_mask": t([[0, 1, 1]] * 2),
    }
    return (
        Of(
            **row,
            advantages=t([[0.0, *a] for a in advantages]),
            prompts=["a", "a"],
            rewards=t([1.0, 0.0]),
        ),
    )


@pytest.mark.parametrize(
    "module", ["verl_bundle", "skyrl_bundle", "slime_bundle", "tinker_bundle", "openrlhf_bundle"]
)
def test_a_writer_keeps_what_its_trainer_has(module, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    result = __import__(module)
    sys.modules["write"].write_step(tmp_path, 3, module, list(result.samples_of(*of(module))))
    record = Run.open(tmp_path).record(3)
    assert (len(record.groups), len(record.datums), record.origin) == (1, 2, module)
    for d, advantage in zip(record.datums, (0.5, -0.5), strict=True):
        assert d.advantage == pytest.approx(advantage)
        assert d.tokens.tolist() == IDS
        assert np.allclose(d.sampler_logprobs[1:], SAMPLER)
        policy = record.loss.logprobs[0].values if record.loss else d.old_logprobs
        assert np.allclose(policy[1:], OLD)
        assert d.weights.tolist() == [0, 1, 1]


def test_verl_keeps_what_a_padded_batch_has(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import verl_bundle

    t = torch.tensor
    batch = {"input_ids": t([[0, *IDS, 0]] * 2), "attention_mask": t([[0, 1, 1, 1, 1, 0]] * 2)}
    batch |= {"responses": t([[*IDS[2:], 0]] * 2), "response_mask": t([[1, 1, 0]] * 2)}
    batch |= {"rollout_log_probs": t([[*SAMPLER, 0.0]] * 2), "old_log_probs": t([[*OLD, 0.0]] * 2)}
    batch |= {
        "advantages": t([[0.5, 0.5, 0], [-0.5, -0.5, 0]]),
        "token_level_scores": t([[0, 1.0, 0], [0, 0, 0]]),
    }

    class Trainer:
        global_steps = 4

        def _update_actor(self, batch):
            return "updated"

    trainer = verl_bundle.recorded_ray(Trainer, tmp_path)()
    assert trainer._update_actor(Of(batch=batch, non_tensor_batch={"uid": ["a", "a"]})) == "updated"
    record = Run.open(tmp_path).record(4)
    assert [s.reward for g in record.groups for s in g.samples] == [1.0, 0.0]
    for d, advantage in zip(record.datums, (0.5, -0.5), strict=True):
        assert (d.tokens.tolist(), d.weights.tolist()) == (IDS, [0, 1, 1])
        assert d.advantage == pytest.approx(advantage)
        assert np.allclose(d.sampler_logprobs[1:], SAMPLER)


def test_prime_rl_and_the_schema(tmp_path, monkeypatch):
    jsonschema = pytest.importorskip("jsonschema")
    monkeypatch.syspath_prepend(str(FOLDER))
    import json

    import prime_rl_bundle
    from write import write_step

    series = {
        "trainer_logprobs": torch.tensor([0.0, -2, *OLD]),
        "inference_logprobs": torch.tensor([0.0, 0, *SAMPLER]),
    }
    inputs = Of(
        **series, advantages=torch.tensor([0, 0, 0.5, 0.5]), loss_mask=torch.tensor([0, 0, 1, 1])
    )
    path = write_step(tmp_path, 0, "prime-rl", [prime_rl_bundle.sample_of(inputs, 0)])
    schema = json.loads((FOLDER / "bundle.schema.json").read_text())
    jsonschema.validate(json.loads(path.read_text()), schema)
    record = Run.open(tmp_path).record(0)
    assert np.allclose(record.loss.logprobs[0].values[1:], OLD)
    jsonschema.validate(json.loads(record.save_bundle(tmp_path / "ours").read_text()), schema)
