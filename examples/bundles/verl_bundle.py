"""verl 0.9: a subclass of the trainer that `trainer.v1.trainer_mode` names, or of `RayPPOTrainer`.

Ran on jagged tensors in a TensorDict, as the queue of the first gives them, and on the padded `DataProto` that `compute_advantage`
of the second returns; both trainers need a GPU.
"""

from write import write_step

OURS = {
    "response_mask": "loss_mask",
    "rollout_log_probs": "sampler_logprobs",
    "old_log_probs": "old_logprobs",
}
OURS |= {"ref_log_prob": "ref_logprobs", "advantages": "advantages"}
FIELDS = ["prompts", "responses", "rm_scores", *OURS]


def samples_of(fields, keys, tags):
    "One sample a row of nested fields of the response; padding is left out."
    rows = {
        name: [v.float().cpu().numpy() for v in values.unbind()] for name, values in fields.items()
    }
    for i, (key, tag) in enumerate(zip(keys, tags, strict=True)):
        if not tag.get("is_padding"):
            prompt = rows["prompts"][i]
            response = rows["responses"][i]
            series = {ours: rows[name][i] for name, ours in OURS.items() if name in rows}
            facts = {
                "group": str(key).rsplit("_", 2)[0],
                "reward": float(rows["rm_scores"][i].sum()),
            }
            tokens = [*prompt.astype(int), *response.astype(int)]
            yield {
                "tokens": tokens,
                **series,
                **facts,
                "policy_version": tag.get("min_global_steps"),
            }


def recorded(trainer_class, folder):
    "The class that writes a bundle before each update."
    import transfer_queue as tq

    class Recorded(trainer_class):
        def _update_actor(self, batch, metrics):
            result = tq.kv_batch_get(
                keys=batch.keys, partition_id=batch.partition_id, select_fields=FIELDS
            )
            rows = list(samples_of(dict(result.items()), batch.keys, batch.tags))
            write_step(folder, self.global_steps, "verl", rows)
            return super()._update_actor(batch, metrics)

    return Recorded


def samples_of_padded(batch, groups):
    "One sample a row of the padded tensors in `DataProto.batch`; `groups` is `DataProto.non_tensor_batch['uid']`."
    real = batch["attention_mask"] > 0
    width = batch["responses"].shape[1]
    for i, group in enumerate(groups):
        kept = real[i][-width:]  # padding is left of prompts and right of responses
        series = {
            ours: batch[name][i][kept].float().cpu().numpy()
            for name, ours in OURS.items()
            if name in batch.keys()  # noqa: SIM118 (a TensorDict)
        }
        tokens = batch["input_ids"][i][real[i]].cpu().numpy()
        reward = float(batch["token_level_scores"][i].sum())
        yield {"tokens": tokens, **series, "group": str(group), "reward": reward}


def recorded_ray(trainer_class, folder):
    "`RayPPOTrainer`, or a subclass of it, that writes a bundle before each update."

    class Recorded(trainer_class):
        def _update_actor(self, batch):
            rows = list(samples_of_padded(batch.batch, batch.non_tensor_batch["uid"]))
            write_step(folder, self.global_steps, "verl", rows)
            return super()._update_actor(batch)

    return Recorded
