"""What other trainers' divergences from a teacher are: python scripts/record_distillation.py PEERS.

It writes tests/golden/distillation/cases.json. PEERS has `trl/loss_utils.py` (trl/experimental/sdpo/loss_utils.py; commit
f2cd5771) and `sdpo/core_algos.py` (verl/trainer/ppo/core_algos.py of lasgroup/SDPO; commit 0e6d5106). Only functions are taken.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from record_trainers import taken

TOKENS = 4
VOCAB = 12
ALPHAS = (0.0, 0.3, 0.5, 1.0)
OUT = Path(__file__).parents[1] / "tests/golden/distillation/cases.json"


def make_case(seed: int, count: int) -> dict[str, torch.Tensor]:
    "Logits of a policy and of a teacher, and the teacher's `count` likeliest tokens."
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(TOKENS, VOCAB, generator=g).mul(2).round(decimals=3)
    teacher = (logits + torch.randn(TOKENS, VOCAB, generator=g)).round(decimals=3)
    return {"logits": logits, "teacher": teacher, "ids": teacher.topk(count).indices}


def by_trl(case: dict[str, torch.Tensor], logits: torch.Tensor, alpha: float, trl) -> torch.Tensor:
    "TRL's divergence over the teacher's tokens: it takes those of its student, so the two change places, and so does alpha."
    return trl.compute_topk_self_distillation_loss(
        case["teacher"],
        logits,
        distillation_topk=case["ids"].shape[1],
        distillation_alpha=1 - alpha,
        distillation_add_tail=True,
    )


def by_sdpo(
    case: dict[str, torch.Tensor], logits: torch.Tensor, alpha: float, sdpo
) -> torch.Tensor:
    "SDPO's own divergence over given tokens, one sample per token so that its mean is taken apart."
    config = SimpleNamespace(
        full_logit_distillation=True,
        distillation_topk=case["ids"].shape[1],
        distillation_add_tail=True,
        alpha=alpha,
        is_clip=None,
    )
    policy = logits.log_softmax(-1).gather(-1, case["ids"])
    teacher = case["teacher"].log_softmax(-1).gather(-1, case["ids"])
    losses = []
    for p, q in zip(policy, teacher, strict=True):
        loss, _ = sdpo.compute_self_distillation_loss(
            p[None, :1],
            q[None, :1],
            torch.ones(1, 1),
            config,
            student_topk_log_probs=p[None, None],
            teacher_topk_log_probs=q[None, None],
        )
        losses.append(loss)
    return torch.stack(losses)


def main(peers: Path) -> None:
    "Record every case."
    names = ("compute_divergence", "add_tail_bucket", "compute_topk_self_distillation_loss")
    trl = taken(peers / "trl/loss_utils.py", *names, F=F)

    def agg_loss(loss_mat, loss_mask, **_):
        return (loss_mat * loss_mask).sum() / loss_mask.sum()

    sdpo = taken(
        peers / "sdpo/core_algos.py", "compute_self_distillation_loss", F=F, agg_loss=agg_loss
    )
    cases = []
    for seed, count in ((0, 3), (1, 5), (2, VOCAB)):
        case = make_case(seed, count)
        results = []
        for alpha in ALPHAS:
            for name, function, module in (("trl", by_trl, trl), ("sdpo", by_sdpo, sdpo)):
                logits = case["logits"].clone().requires_grad_()
                value = function(case, logits, alpha, module)
                value.sum().backward()
                numbers = {"value": value.tolist(), "gradient": logits.grad.tolist()}
                results.append({"by": name, "alpha": alpha, **numbers})
        cases.append({k: v.tolist() for k, v in case.items()} | {"results": results})
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(cases) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
