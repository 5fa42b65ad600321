"""tinker-cookbook: around `TrainingClient.forward_backward`.

Ran on datums of the cookbook's `assemble_training_data` in Tinker's types; not against the service.
"""

from write import write_step


def samples_of(data, outputs):
    "One sample a datum; its series are in target coordinates, so the first token has none."
    for datum, output in zip(data, outputs, strict=True):
        inputs = datum.loss_fn_inputs
        targets = inputs["target_tokens"].data
        tokens = [*datum.model_input.to_ints()[:1], *targets]
        advantages = inputs["advantages"].data
        mask = [float(a != 0) for a in advantages]  # the cookbook takes the mask away before
        first = next((i for i, m in enumerate(mask) if m), len(mask))
        series = {
            "sampler_logprobs": inputs["logprobs"].data,
            "policy_logprobs": output["logprobs"].data,
        }
        yield {
            "tokens": tokens,
            "loss_mask": mask,
            "advantages": advantages,
            "group": str(tokens[: first + 1]),
            **series,
        }


def record(client, folder):
    "Have a training client write a bundle at each pass."
    plain = client.forward_backward
    count = [0]

    def forward_backward(data, loss_fn, *args, **options):
        future = plain(data, loss_fn, *args, **options)
        result = future.result()
        write_step(folder, count[0], "tinker", list(samples_of(data, result.loss_fn_outputs)))
        count[0] += 1
        return future

    client.forward_backward = forward_backward
