"""slime: `--rollout-data-postprocess-path slime_bundle.record`.

Ran on what its own conversion, schedule and split give to two ranks; its trainer needs a GPU.
"""

import os

from write import write_step

OURS = {
    "loss_masks": "loss_mask",
    "rollout_log_probs": "sampler_logprobs",
    "log_probs": "old_logprobs",
}
OURS |= {"ref_log_probs": "ref_logprobs", "advantages": "advantages"}


def samples_of(data):
    "One sample for each of the lists of a rank; series are of the response, `raw_reward` is of all ranks."
    rewards = data.get("local_raw_reward") or [data["raw_reward"][k] for k in data["partition"]]
    for i, tokens in enumerate(data["tokens"]):
        series = {ours: data[name][i] for name, ours in OURS.items() if data.get(name) is not None}
        prompt = len(tokens) - int(data["response_lengths"][i])
        series = {name: values.float().cpu().numpy() for name, values in series.items()}
        token_ids = tokens.tolist()
        yield {
            "tokens": token_ids,
            "group": str(token_ids[:prompt]),
            "reward": float(rewards[i]),
            **series,
        }


def record(args, rollout_id, rollout_data):
    "One bundle a rollout and rank, in the folder that BUNDLES names."
    folder = os.path.join(
        os.environ.get("BUNDLES", "bundles"), f"rank_{os.environ.get('RANK', '0')}"
    )
    write_step(folder, rollout_id, "slime", list(samples_of(rollout_data)))
