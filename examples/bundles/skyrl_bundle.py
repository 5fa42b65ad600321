"""SkyRL 0.4: a callback. Ran in its own callback handler on its own, padded batches; its trainer needs a GPU."""

import numpy as np
from write import write_step

OURS = {
    "action_log_probs": "old_logprobs",
    "base_action_log_probs": "ref_logprobs",
    "advantages": "advantages",
}
OURS |= {"rollout_logprobs": "sampler_logprobs", "loss_mask": "loss_mask"}


def samples_of(batch):
    "One sample a row; SkyRL aligns to the right, and its response fields are as wide as the longest response."
    real = batch["attention_mask"].numpy() > 0
    completion_mask = batch["response_mask"].numpy() > 0
    for i, tokens in enumerate(batch["sequences"].numpy()):
        series = {
            ours: batch[name][i].float().numpy()[completion_mask[i]]
            for name, ours in OURS.items()
            if batch.get(name) is not None
        }
        sample_tokens = tokens[real[i]]
        yield {
            "tokens": sample_tokens,
            "group": str(
                sample_tokens[: len(sample_tokens) - int(np.sum(completion_mask[i]))].tolist()
            ),
            **series,
        }


def recorder(folder):
    "Give it to the trainer among its callbacks; the fully asynchronous trainer takes none."
    from skyrl.train.utils.callbacks import TrainingCallback

    class Recorder(TrainingCallback):
        def on_step_end(self, trainer, callback_input, control):
            write_step(folder, trainer.global_step, "SkyRL", list(samples_of(callback_input.batch)))

    return Recorder()
