"""verl 0.9: a subclass of the trainer that `trainer.v1.trainer_mode` names.

Ran on jagged tensors in a TensorDict, as its queue gives them; its trainer needs a GPU.
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
