"""OpenRLHF 0.11: around `make_experience_batch`. Ran on its own `Experience` and batching; its trainer needs a GPU."""

from write import write_step

OURS = {
    "action_log_probs": "old_logprobs",
    "base_action_log_probs": "ref_logprobs",
    "rollout_log_probs": "sampler_logprobs",
}
OURS |= {"advantages": "advantages"}


def samples_of(experience):
    "One sample a row; its series are in target coordinates, one shorter than the sequence."
    for i, tokens in enumerate(experience.sequences):
        real = experience.attention_mask[i].bool()
        series = {ours: getattr(experience, name, None) for name, ours in OURS.items()}
        series = {
            n: v[i][real[1:]].float().cpu().numpy() for n, v in series.items() if v is not None
        }
        mask = experience.action_mask[i][real[1:]].float().cpu().numpy()
        facts = {"group": str(experience.prompts[i]), "reward": float(experience.rewards[i])}
        yield {"tokens": tokens[real].tolist(), "loss_mask": mask, **series, **facts}


def record(trainer, folder):
    "Have a PPOTrainer write a bundle of each batch of experience."
    maker = trainer.experience_maker
    count = [0]
    plain = maker.make_experience_batch

    def make_experience_batch(*args, **options):
        batch = plain(*args, **options)
        write_step(folder, count[0], "OpenRLHF", [row for e in batch for row in samples_of(e)])
        count[0] += 1
        return batch

    maker.make_experience_batch = make_experience_batch
