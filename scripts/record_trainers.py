"""What other trainers' own code computes on random batches: python scripts/record_trainers.py PEERS.

It writes tests/golden/trainers. PEERS is a folder with a folder for each: `verl`, `skyrl` and `tinker-cookbook` as
their wheels unpack, `prime-rl` and `fw-cookbook` as checked out. TRL is the one that is installed. Only single
functions are taken from their files, so nothing else of them has to import. Tinker's loss is computed by a service;
SkyRL's server has one of the same meaning.
"""

import ast
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import test_trl_words

GROUPS = 3
K = 4
WIDTH = 6
BATCHES = 5
ROWS = GROUPS * K
OUT = Path(__file__).parents[1] / "tests/golden/trainers/cases.json"
LIMIT = 64  # max_completion_tokens of what divides by a constant

Batch = dict[str, torch.Tensor]
Loss = Callable[[Batch, torch.Tensor], torch.Tensor]  # batch, (ROWS, WIDTH) logprobs -> loss


def taken(path: Path, *names: str, **around: Any) -> SimpleNamespace:
    "Functions and classes of a file, without their decorators and without the rest of it."
    tree = ast.parse(path.read_text())
    results = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name in names
    ]
    assert {n.name for n in results} == {*names}, path
    for n in results:
        n.decorator_list = []
    made = {"torch": torch, "np": np, "defaultdict": defaultdict, "Any": Any, **around}
    code = ast.Module([ast.ImportFrom("__future__", [ast.alias("annotations")], 0), *results], [])
    exec(compile(ast.fix_missing_locations(code), str(path), "exec"), made)
    return SimpleNamespace(**made)


def field_defaults(path: Path, name: str) -> SimpleNamespace:
    "The defaults of a class of settings: what follows the = of each field, or the first argument of its Field()."
    tree = next(
        n
        for n in ast.walk(ast.parse(path.read_text()))
        if isinstance(n, ast.ClassDef) and n.name == name
    )
    result = {}
    for n in tree.body:
        if isinstance(n, ast.AnnAssign) and n.value is not None:
            value = n.value.args[0] if isinstance(n.value, ast.Call) and n.value.args else n.value
            if isinstance(value, ast.Call):
                continue
            result[n.target.id] = ast.literal_eval(value)
    return SimpleNamespace(**result)


def make_batch(seed: int) -> Batch:
    "Logprobs in float64 with a few far off, masks with holes, and a group without signal."
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.rand(shape, generator=g, dtype=torch.float64)

    def normal():
        return torch.randn(ROWS, WIDTH, generator=g, dtype=torch.float64)

    def near(x, by):
        return (
            (x + by * normal() * (1 + 3 * (draw(ROWS, WIDTH) > 0.9)))
            .clamp(max=-1e-3)
            .round(decimals=3)
        )

    p = (-2.5 * draw(ROWS, WIDTH) - 0.05).round(decimals=3)
    old = near(p, 0.3)
    lengths = torch.randint(2, WIDTH + 1, (ROWS, 1), generator=g)
    mask = (torch.arange(WIDTH) < lengths).double() * (draw(ROWS, WIDTH) > 0.15)
    mask[:, 0] = 1
    rewards = torch.randint(0, 3, (GROUPS, K), generator=g).double() / 2
    # signal; none
    rewards[0, :3] = torch.tensor([0.0, 1.0, 0.5])
    rewards[1] = 0.5
    rewards[2, 0] = 0
    rewards[2, 1] = 1
    series = {"policy": p, "old": old, "sampler": near(old, 0.2), "ref": near(p, 0.4)}
    return {**series, "mask": mask, "rewards": rewards.flatten()}


def verl(
    peers: Path, policy_loss: str = "vanilla", cov: dict[str, Any] | None = None, **changed: Any
) -> Loss:
    root = peers / "verl/verl"
    words = (
        yaml.safe_load(
            (root / "trainer/config/actor/actor.yaml").read_text().replace("???", "none")
        )
        | changed
    )
    words["policy_loss"] = SimpleNamespace(**words["policy_loss"] | (cov or {}))
    maths = taken(root / "utils/torch_functional.py", "masked_sum", "masked_mean")
    names = ("compute_grpo_outcome_advantage", "agg_loss", f"compute_policy_loss_{policy_loss}")
    m = taken(
        root / "trainer/ppo/core_algos.py",
        *names,
        "kl_penalty",
        "kl_penalty_forward",
        verl_F=maths,
        AlgoConfig=int,
    )

    class Words(SimpleNamespace):
        def get(self, name: str, default: Any) -> Any:
            return getattr(self, name, default)

    config = Words(**words, global_batch_info={"dp_size": 1})

    def loss(b: Batch, p: torch.Tensor) -> torch.Tensor:
        scores = torch.zeros_like(p)
        scores[:, 0] = b["rewards"]
        a, _ = m.compute_grpo_outcome_advantage(scores, b["mask"], np.repeat(np.arange(GROUPS), K))
        info = {"dp_size": 1, "batch_num_tokens": b["mask"].sum(), "global_batch_size": ROWS}
        config.global_batch_info |= info | {"loss_scale_factor": config.loss_scale_factor}
        at = {"loss_agg_mode": config.loss_agg_mode, "config": config}
        total, _ = vars(m)[f"compute_policy_loss_{policy_loss}"](
            b["old"], p, a, b["mask"].bool(), **at
        )
        if config.use_kl_loss:
            kl = m.kl_penalty(p, b["ref"], config.kl_loss_type)
            mean = m.agg_loss(
                kl, b["mask"].bool(), config.loss_agg_mode, **config.global_batch_info
            )
            total = total + config.kl_loss_coef * mean
        return total

    return loss


def skyrl(
    peers: Path, micro: int = ROWS, correct: dict[str, Any] | None = None, **changed: Any
) -> Loss:
    root = peers / "skyrl/skyrl"
    maths = taken(
        root / "backends/skyrl_train/utils/torch_utils.py", "masked_mean", "safe_exp_delta"
    )
    settings = root / "train/config/config.py"
    off = SimpleNamespace(
        **vars(field_defaults(settings, "OffPolicyCorrectionConfig")) | (correct or {})
    )
    config = SimpleNamespace(
        **vars(field_defaults(settings, "AlgorithmConfig")) | changed, off_policy_correction=off
    )
    path = root / "backends/skyrl_train/utils/off_policy_correction_utils.py"
    names = [n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)]
    correction = taken(path, *names, **vars(maths))
    names = (
        "compute_grpo_outcome_advantage",
        "apply_loss_reduction_to_advantages_minibatch",
        "ppo_policy_loss",
    )
    around = vars(maths) | {"apply_off_policy_correction": correction.apply_off_policy_correction}
    m = taken(
        root / "backends/skyrl_train/utils/ppo_utils.py",
        *names,
        "reduce_loss",
        "compute_approx_kl",
        **around,
    )

    def loss(b: Batch, p: torch.Tensor) -> torch.Tensor:
        scores = torch.zeros_like(p)
        scores[:, 0] = b["rewards"]
        a, _ = m.compute_grpo_outcome_advantage(scores, b["mask"], np.repeat(np.arange(GROUPS), K))
        prompts = [(i, i + K) for i in range(0, ROWS, K)]
        a = m.apply_loss_reduction_to_advantages_minibatch(
            a, b["mask"], config.loss_reduction, micro, LIMIT, prompts
        )
        total = torch.zeros((), dtype=p.dtype)
        for rows in torch.arange(ROWS).split(micro):  # as worker.py adds up its micro-batches
            at = [x[rows] for x in (p, b["old"], a)]
            pg, _ = m.ppo_policy_loss(
                *at, config=config, loss_mask=b["mask"][rows], rollout_logprobs=b["sampler"][rows]
            )
            kl = m.compute_approx_kl(
                p[rows], b["ref"][rows], b["mask"][rows], config.kl_estimator_type
            )
            kl = maths.masked_mean(kl, b["mask"][rows], dim=-1).mean()
            total = total + pg + config.use_kl_loss * config.kl_loss_coef * kl * len(rows) / ROWS
        return total

    return loss


def prime_rl(peers: Path, **changed: Any) -> Loss:
    config = field_defaults(
        peers / "prime-rl/packages/prime-rl-configs/src/prime_rl/configs/trainer.py",
        "DefaultLossConfig",
    )
    config = SimpleNamespace(**vars(config) | changed)
    names = (
        "_safe_mean",
        "compute_importance_ratio_and_mismatch_kl",
        "default_loss_fn",
        "compute_loss",
    )
    made = taken(
        peers / "prime-rl/src/prime_rl/trainer/rl/loss.py",
        *names,
        LossInputs=SimpleNamespace,
        LossOutputs=SimpleNamespace,
    )

    def loss(b: Batch, p: torch.Tensor) -> torch.Tensor:
        r = b["rewards"].view(GROUPS, K)
        a = (r - r.mean(1, keepdim=True)).flatten()  # orchestrator/algo/grpo.py, a method
        # orchestrator/train_sink.py: filter_zero_advantages
        rows = [i for i in range(ROWS) if a[i] != 0]
        mask = b["mask"].bool()
        each = [[x[i] for i in rows] for x in (p, b["sampler"])]
        shaped = [a[i].expand(WIDTH) for i in rows], [mask[i] for i in rows]

        def fn(inputs):
            return made.default_loss_fn(inputs, config)

        scales = [int(mask[rows].sum()), 1, 1]
        return made.compute_loss(*each, None, *shaped, None, None, None, fn, *scales)[0]

    return loss


def tinker(peers: Path, name: str = "importance_sampling", **bounds: float) -> Loss:
    data = taken(
        peers / "tinker-cookbook/tinker_cookbook/rl/data_processing.py", "compute_advantages"
    )
    jnp = SimpleNamespace(
        exp=torch.exp,
        clip=torch.clamp,
        minimum=torch.minimum,
        where=torch.where,
        zeros_like=torch.zeros_like,
    )
    jax = SimpleNamespace(lax=SimpleNamespace(stop_gradient=torch.Tensor.detach))
    names = ("safe_loss_mask", f"{name}_loss")
    server = taken(peers / "skyrl/skyrl/tinker/loss_fns.py", *names, jnp=jnp, jax=jax)
    config = SimpleNamespace(**bounds)

    def loss(b: Batch, p: torch.Tensor) -> torch.Tensor:
        groups = [
            SimpleNamespace(get_total_rewards=lambda r=r: r.tolist())
            for r in b["rewards"].view(GROUPS, K)
        ]
        a = torch.cat(data.compute_advantages(groups)).double().unsqueeze(1)
        return vars(server)[f"{name}_loss"](p, b["mask"], b["sampler"], a, config).sum()

    return loss


def fireworks(peers: Path, tis: dict[str, Any] | None = None, **changed: Any) -> Loss:
    root = peers / "fw-cookbook/training/utils"
    advantages = taken(root / "data.py", "compute_advantages").compute_advantages
    weight = taken(root / "rl/tis.py", "compute_tis_weight", SAFETY_CLAMP=20.0)
    names = (
        "_normalize_prompt_lens",
        "_get_loss_mask",
        "run_loss_loop",
        "validate_inference_logprobs_for_sample",
    )
    names += ("_coerce_response_logprobs", "_format_policy_loss_label")
    shape = {"SampleContext": SimpleNamespace, "LossLoopResult": SimpleNamespace}
    common = taken(
        root / "rl/common.py", *names, compute_tis_weight=weight.compute_tis_weight, **shape
    )
    config = SimpleNamespace(**vars(field_defaults(root / "rl/tis.py", "TISConfig")) | (tis or {}))
    around = vars(common) | {"SAFETY_CLAMP": 20.0}
    m = taken(root / "rl/grpo.py", "make_grpo_loss_fn", "validate_grpo_config", **around)

    def loss(b: Batch, p: torch.Tensor) -> torch.Tensor:
        groups = b["rewards"].view(GROUPS, K)
        a = [x for r in groups for x in advantages(r.tolist())]
        # recipes/rl_loop.py: should_accept
        rows = [i for i in range(ROWS) if len(set(groups[i // K].tolist())) > 1]

        def lists(name):
            return [b[name][i].tolist() for i in rows]

        data = [
            SimpleNamespace(loss_fn_inputs={"weights": SimpleNamespace(data=m)})
            for m in lists("mask")
        ]
        args = [a[i] for i in rows], lists("ref"), 1, lists("sampler"), lists("old")
        return m.make_grpo_loss_fn(*args, tis_config=config, **changed)(data, [p[i] for i in rows])[
            0
        ]

    return loss


def trl(peers: Path, micro: int = ROWS, **words: Any) -> Loss:
    "TRL's `_compute_loss` by the stand-in for its trainer in tests/test_trl_words.py, in micro-batches."

    def loss(b: Batch, p: torch.Tensor) -> torch.Tensor:
        trainer = SimpleNamespace(
            multi_objective_aggregation="sum_then_normalize", scale_rewards="group"
        )
        trainer.reward_weights = torch.ones(1)
        trainer.reward_funcs = [0]
        names = vars(sys.modules[test_trl_words.GRPOTrainer.__module__]) | {
            "self": trainer,
            "device": "cpu",
        }
        names |= {"rewards_per_func": b["rewards"].unsqueeze(1), "num_generations": K}
        exec(test_trl_words.ADVANTAGES, names)
        test_trl_words.ROWS = micro
        test_trl_words.WIDTH = WIDTH
        total = 0.0
        grad = torch.zeros_like(p)
        for rows in torch.arange(ROWS).split(micro):
            part = {k: b[k][rows] for k in ("old", "sampler", "ref", "mask")} | {
                "p": p.detach()[rows]
            }
            part |= {
                "advantages": names["advantages"][rows].double(),
                "entropy": torch.zeros(len(rows), WIDTH).double(),
            }
            value, by_p, _ = test_trl_words.trl_loss(words, part)
            total = total + value / (ROWS // micro)
            grad[rows] = torch.tensor(by_p) / (ROWS // micro)
        return total + (grad * (p - p.detach())).sum()  # the derivative that TRL found

    return loss


def losses(peers: Path) -> Iterator[tuple[str, dict[str, Any], Loss]]:
    "Trainer, settings as we say them, and its own loss."
    vllm = {"vllm_importance_sampling_correction": True}
    yield "TRL", {}, trl(peers)
    yield "TRL", {"kl_beta": 0.04}, trl(peers, beta=0.04)
    yield (
        "TRL",
        {"aggregation": "sequence_mean", "eps_clip_high": 0.28},
        trl(peers, loss_type="grpo", epsilon_high=0.28),
    )
    yield "TRL", {"micro_batch": 4}, trl(peers, 4, loss_type="bnpo")
    yield "TRL", {"aggregation": "sample_mean"}, trl(peers, loss_type="luspo")
    yield "TRL", {"policy_loss": "vespo"}, trl(peers, loss_type="vespo")
    yield "TRL, vLLM", {}, trl(peers, **vllm)
    yield "TRL, vLLM", {"kl_beta": 0.04}, trl(peers, beta=0.04, **vllm)
    yield (
        "TRL, vLLM",
        {"tis": "token", "tis_mode": "truncate"},
        trl(peers, vllm_importance_sampling_mode="token_truncate"),
    )
    yield "verl", {}, verl(peers)
    yield "verl", {"kl_beta": 1e-3}, verl(peers, use_kl_loss=True)
    yield (
        "verl",
        {"aggregation": "sequence_mean", "eps_clip_high": 0.28},
        verl(peers, loss_agg_mode="seq-mean-token-mean", clip_ratio_high=0.28),
    )
    by_constant = {"aggregation": "constant", "max_completion_tokens": LIMIT}
    yield (
        "verl",
        by_constant,
        verl(peers, loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=LIMIT),
    )
    bounds = {"dppo_low": 0.05, "dppo_high": 0.1, "dppo_cap": 3.0}
    for name in ("dppo_tv", "dppo_kl"):
        theirs = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1}
        yield "verl", {"policy_loss": name, **bounds}, verl(peers, name, **theirs)
    gmpo = {"policy_loss": "gmpo", "aggregation": "sequence_mean", "eps_clip": 0.4}
    yield "verl", gmpo, verl(peers, "geo_mean", clip_ratio_low=0.4, clip_ratio_high=0.4)
    cov = {"policy_loss": "kl_cov", "cov_share": 0.2, "kl_cov_coef": 0.1}
    yield "verl", cov, verl(peers, "kl_cov", {"kl_cov_ratio": 0.2})
    # all: no random choice
    cov = {"policy_loss": "clip_cov", "cov_share": 1.0, "clip_cov_low": 0.1, "eps_clip_c": None}
    yield "verl", cov, verl(peers, "clip_cov", {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1})
    yield "prime-rl", {}, prime_rl(peers)
    yield (
        "prime-rl",
        {"dppo_mask": 0.1, "kl_beta": 0.0},
        prime_rl(peers, dppo_mask_low=0.1, dppo_mask_high=0.1, kl_tau=0.0),
    )
    yield (
        "prime-rl",
        {"dppo_mask": None, "kl_beta": 0.0},
        prime_rl(peers, dppo_mask_low=1.0, dppo_mask_high=1.0, kl_tau=0.0),
    )
    yield "SkyRL", {}, skyrl(peers)
    yield (
        "SkyRL",
        {"eps_clip_c": 3.0, "kl_beta": 0.0},
        skyrl(peers, policy_loss_type="dual_clip", use_kl_loss=False),
    )
    yield "SkyRL", {"micro_batch": 4}, skyrl(peers, 4, loss_reduction="token_mean_legacy")
    yield "SkyRL", by_constant, skyrl(peers, loss_reduction="seq_mean_token_sum_norm")
    yield (
        "SkyRL",
        {"tis": "token", "tis_cap": 2.0},
        skyrl(peers, correct={"tis_ratio_type": "token"}),
    )
    yield "SkyRL", {"aggregation": "prompt_mean"}, skyrl(peers, loss_reduction="prompt_mean")
    dropped = {"tis_mode": "reject", "tis_floor": 0.9, "tis_cap": 1.2}
    for level, name, short in (("sequence", "geometric", "geo"), ("product", "product", "product")):
        theirs = {"sequence_mask_metric": name, f"{short}_mask_low": 0.9, f"{short}_mask_high": 1.2}
        yield "SkyRL", {"tis": level, **dropped}, skyrl(peers, correct=theirs)
    theirs = {"token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2.0}
    icepop = {"tis": "token", "tis_cap": 1.2, "icepop_threshold": 2.0}
    yield (
        "SkyRL",
        icepop,
        skyrl(
            peers, correct=theirs | {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.2}
        ),
    )
    yield "tinker-cookbook", {}, tinker(peers)
    bounds = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}
    for name in ("ppo", "cispo"):
        words = {"policy_loss": name, "eps_clip": 0.2, "eps_clip_high": 0.28}
        yield "tinker-cookbook", words, tinker(peers, name, **bounds)
    yield "Fireworks", {}, fireworks(peers)
    yield (
        "Fireworks",
        {"eps_clip_high": 0.28, "icepop_threshold": 1.5},
        fireworks(peers, {"icepop_threshold": 1.5}, eps_clip_high=0.28),
    )


def advantages(peers: Path, b: Batch) -> dict[str, list[float]]:
    "By our name, the advantages that a trainer's own function finds."
    verls = peers / "verl/verl"
    skyrls = peers / "skyrl/skyrl/backends/skyrl_train/utils/ppo_utils.py"
    maths = ("masked_sum", "masked_mean", "masked_var", "masked_whiten")
    names = (
        "compute_opo_outcome_advantage",
        "compute_reinforce_plus_plus_baseline_outcome_advantage",
    )
    around = taken(verls / "utils/torch_functional.py", *maths)
    m = taken(verls / "trainer/ppo/core_algos.py", *names, verl_F=around, AlgoConfig=int)
    maxrl = taken(skyrls, "compute_maxrl_advantage").compute_maxrl_advantage
    result = {}
    for name, function in (
        ("opo", vars(m)[names[0]]),
        ("whiten", vars(m)[names[1]]),
        ("maxrl", maxrl),
    ):
        scores = torch.zeros_like(b["mask"])
        scores[:, 0] = b["rewards"]
        a, _ = function(scores, b["mask"], np.repeat(np.arange(GROUPS), K), epsilon=0.0)
        result[name] = [float(f"{v:.12g}") for v in a[:, 0].tolist()]
    return result


def main(peers: Path) -> None:
    def digits(x):
        return [float(f"{v:.12g}") for v in x.flatten().tolist()]

    batches = [make_batch(seed) for seed in range(BATCHES)]
    cases = []
    for trainer, settings, loss in losses(peers):
        values = []
        grads = []
        for b in batches[: None if not settings else 2]:
            p = b["policy"].clone().requires_grad_()
            value = loss(b, p)
            value.backward()
            values += digits(value.detach())
            grads.append(digits(p.grad[b["mask"] > 0]))
        cases.append({"trainer": trainer, "settings": settings, "loss": values, "grad": grads})
        print(trainer, settings, values)
    shape = {"groups": GROUPS, "width": WIDTH}
    OUT.parent.mkdir(exist_ok=True)
    stored = [
        {
            k: x.reshape(ROWS, -1).squeeze(1).tolist() if k == "rewards" else x.tolist()
            for k, x in b.items()
        }
        for b in batches
    ]
    results = [advantages(peers, b) for b in batches]
    OUT.write_text(
        json.dumps({**shape, "batches": stored, "advantages": results, "cases": cases}) + "\n"
    )
    print(OUT.stat().st_size, "bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
