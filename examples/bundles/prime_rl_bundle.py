"""prime-rl: `trainer.loss.type = "custom"`, `import_path = "prime_rl_bundle.loss"`.

Ran as the custom loss of prime-rl's `setup_rl_loss_fn`, to the last bit its default loss; its trainer needs a GPU.
"""

import itertools
import os

from write import write_step

COUNT = itertools.count()
OURS = {
    "inference_logprobs": "sampler_logprobs",
    "trainer_logprobs": "policy_logprobs",
    "ref_logprobs": "ref_logprobs",
}
OURS |= {"advantages": "advantages", "loss_mask": "loss_mask"}


def sample_of(inputs, number):
    "One sequence of `LossInputs`; ids and groups are not in it: positions and a number take their place."
    series = {ours: getattr(inputs, name, None) for name, ours in OURS.items()}
    series = {
        name: values.detach().float().cpu().numpy()
        for name, values in series.items()
        if values is not None
    }
    return {"tokens": range(len(series["loss_mask"])), "group": str(number), **series}


def loss(inputs, **options):
    "prime-rl's own loss, with its settings as `kwargs` of the custom one, and a bundle of what it was given."
    from prime_rl.configs.trainer import DefaultLossConfig
    from prime_rl.trainer.rl.loss import default_loss_fn

    folder = os.path.join(
        os.environ.get("BUNDLES", "bundles"), f"rank_{os.environ.get('RANK', '0')}"
    )
    number = next(COUNT)
    write_step(folder, number, "prime-rl", [sample_of(inputs, number)])
    return default_loss_fn(inputs, DefaultLossConfig(**options))
