"""Writes one step as a bundle, with numpy alone: copy this file into the environment of your trainer."""

import json
from pathlib import Path

import numpy as np

PER_TOKEN = (
    "loss_mask",
    "weights",
    "sampler_logprobs",
    "old_logprobs",
    "policy_logprobs",
    "ref_logprobs",
    "advantages",
)


def write_step(folder, step, trainer, samples, **more):
    "`samples`: dicts with `tokens`, `loss_mask`, and what is known, as long as the tokens or as the completion."
    names = [n for n in PER_TOKEN if any(s.get(n) is not None and np.ndim(s[n]) for s in samples)]
    arrays = {"tokens": [np.asarray(s["tokens"]) for s in samples]} | {n: [] for n in names}
    for s in samples:
        for name in names:
            values = np.asarray([] if s.get(name) is None else s[name], dtype=float).ravel()
            # nothing was measured on the prompt
            fill = 0.0 if name in ("loss_mask", "weights") else np.nan
            arrays[name].append(np.r_[np.full(len(s["tokens"]) - len(values), fill), values])
    lengths = np.array([len(s["tokens"]) for s in samples])
    facts = [{k: v for k, v in s.items() if k not in (*names, "tokens")} for s in samples]
    plain = {
        "format": "rl_notebook.bundle/1",
        "step": step,
        "trainer": trainer,
        "samples": facts,
        **more,
    }
    path = Path(folder, f"bundle_{step:05d}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        path.with_suffix(".npz"),
        lengths=lengths,
        **{n: np.concatenate(v) for n, v in arrays.items()},
    )
    path.write_text(json.dumps(plain, default=float))  # last: it makes the bundle whole
    return path
