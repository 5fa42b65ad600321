"""What other trainers make of the sampler's likeliest tokens: python scripts/record_top_corrections.py PEERS.

It writes tests/golden/corrections/cases.json. PEERS has `vime/score_centering.py` (score_centering_correction and, from
its ppo_utils, importance_weights; commit 2b83ea20), `prime-rl/loss.py` (IPOLoss, selective_log_softmax_with_sampling_mask
and what they call) and `slime/ppo_utils.py` (slime/utils/ppo_utils.py; commit 624b824a). Only functions are taken.
"""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed
from record_trainers import taken

TOKENS = 9
VOCAB = 12
OUT = Path(__file__).parents[1] / "tests/golden/corrections/cases.json"
LIMITS = {"none": (None, None), "tis": (0.0, 2.0), "mis": (0.5, 2.0)}  # lowest and highest weight


def make_case(seed: int, head: int, top_p: float) -> dict[str, torch.Tensor]:
    "Logits of a policy, logprobs of a sampler that moved away from it, its likeliest tokens, and what it sampled."
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(TOKENS, VOCAB, generator=g).mul(2).round(decimals=3)
    other = (logits + 0.5 * torch.randn(TOKENS, VOCAB, generator=g)).round(decimals=3)
    ranked, order = other.log_softmax(-1).sort(-1, descending=True)
    mass = ranked.exp()
    ranked = ranked.masked_fill(mass.cumsum(-1) - mass >= top_p, -torch.inf).log_softmax(-1)
    sampled = order.gather(-1, torch.multinomial(ranked.exp(), 1, generator=g))[:, 0]
    advantages = torch.randn(TOKENS, generator=g).round(decimals=2)
    ids = order[:, :head].masked_fill(ranked[:, :head] == -torch.inf, -1)
    return {
        "logits": logits,
        "ids": ids,
        "sampler": ranked[:, :head],
        "tokens": sampled,
        "advantages": advantages,
    }


def centered(case: dict[str, torch.Tensor], peers: Path, mode: str) -> dict[str, list]:
    "vime's correction of each token, and its gradient by the logits."
    vime = taken(
        peers / "vime/score_centering.py", "importance_weights", "score_centering_correction"
    )
    logits = case["logits"].clone().requires_grad_()
    low, high = LIMITS[mode]
    by_policy = logits.log_softmax(-1).gather(-1, case["ids"])
    value, *_ = vime.score_centering_correction(
        by_policy, case["sampler"], mode=mode, low=low, high=high
    )
    value.sum().backward()
    return {"value": value.tolist(), "gradient": logits.grad.tolist()}


def kept(case: dict[str, torch.Tensor], peers: Path) -> dict[str, list]:
    "The sampled tokens' logprobs among those kept, by slime and by prime-rl, and their gradients by the logits."
    slime = taken(
        peers / "slime/ppo_utils.py",
        "_VocabParallelLogProbEntropy",
        "_calculate_log_probs_and_entropy_chunk",
        "calculate_log_probs_and_entropy",
        "_maybe_all_reduce",
        "_get_vocab_parallel_rank_size",
        dist=torch.distributed,
    )
    prime = taken(
        peers / "prime-rl/loss.py",
        "selective_log_softmax",
        "sampling_replay_mask",
        "selective_log_softmax_with_sampling_mask",
    )
    mask = torch.zeros(TOKENS, VOCAB + 1, dtype=torch.bool).scatter_(
        -1, case["ids"] % (VOCAB + 1), True
    )
    results = {}
    for name in ("slime", "prime-rl"):
        logits = case["logits"].clone().requires_grad_()
        if name == "slime":
            value, _ = slime.calculate_log_probs_and_entropy(
                logits, case["tokens"], None, log_prob_keep_mask=mask[:, :VOCAB]
            )
        else:
            value = prime.selective_log_softmax_with_sampling_mask(
                logits[None], case["tokens"][None], case["ids"][None]
            )
        (value.flatten() * case["advantages"]).sum().backward()
        results[name] = {"value": value.flatten().tolist(), "gradient": logits.grad.tolist()}
    return results


def centered_on_kept(case: dict[str, torch.Tensor], peers: Path) -> dict[str, list]:
    "prime-rl's centering over the tokens kept, its trust region wide open, and its gradient by the logits."
    prime = taken(
        peers / "prime-rl/loss.py",
        "IPOLoss",
        "sampling_replay_mask",
        "sampling_mask_logprobs",
        math=math,
        Tensor=torch.Tensor,
    )
    logits = case["logits"].clone().requires_grad_()
    scored = prime.sampling_mask_logprobs(logits, case["tokens"], case["ids"])
    series = {"trainer_mask_logprobs": scored, "inference_mask_logprobs": case["sampler"]}
    inputs = SimpleNamespace(**series, loss_mask=torch.ones(TOKENS, dtype=torch.bool))
    loss = prime.IPOLoss(SimpleNamespace(max_importance_ratio=2.0, eps=1e9))
    loss.score_centering_loss(inputs, case["advantages"], None).backward()
    return {"gradient": logits.grad.tolist()}


def main(peers: Path) -> None:
    "Record every case."
    cases = []
    for seed in range(3):
        whole = make_case(seed, head=5, top_p=1.0)
        cut = make_case(seed, head=VOCAB, top_p=0.8)
        cases.append(
            {
                "whole": {k: v.tolist() for k, v in whole.items()},
                "vime": {mode: centered(whole, peers, mode) for mode in LIMITS},
                "cut": {k: v.masked_fill(v == -torch.inf, -1e9).tolist() for k, v in cut.items()},
                "kept": kept(cut, peers),
                "centered on kept": centered_on_kept(cut, peers),
            }
        )
    OUT.write_text(json.dumps(cases) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
