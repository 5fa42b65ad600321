"""Off-policy GRPO on Fireworks: the deployment gets new weights every few steps, and the loss corrects its staleness.

FIREWORKS_API_KEY=... python examples/fireworks/off_policy.py
"""

from __future__ import annotations

import asyncio

import httpx
from fireworks.training.sdk import (
    AdamParams,
    DeploymentManager,
    DeploymentSampler,
    TrainerJobManager,
    WeightSyncer,
)
from task import load_task, load_tokenizer, score, service, settings, tokenizer_folder

from rl_notebook.backends.services.provision import (
    DeployConfig,
    InfraConfig,
    ResourceCleanup,
    setup_infra,
)
from rl_notebook.core.datums import build_grpo_datums
from rl_notebook.core.losses import make_offpolicy_grpo_loss_fn

args = settings("GRPO on Fireworks with weights that lag")
HOTLOAD_INTERVAL = 2  # optimizer steps between weight syncs
CLIP_RHO = 10.0  # largest importance ratio of a completion

api_key, base_url = service()
rlor_mgr = TrainerJobManager(api_key=api_key, base_url=base_url)
deploy_mgr = DeploymentManager(api_key=api_key, base_url=base_url)


def behavior_logprobs(model: str, tokens: list[int]) -> list[float]:
    "Logprobs of a whole sequence under the weights that the deployment serves: one per token but the first."
    response = httpx.post(
        f"{deploy_mgr.inference_url}/inference/v1/completions",
        headers={"Authorization": f"Bearer {api_key}"},
        json={
            "model": model,
            "prompt": tokens,  # ids, so nothing is encoded twice
            "max_tokens": 1,
            "echo": True,
            "logprobs": 1,
            "prompt_cache_max_len": 0,  # what is cached is not scored again
        },
        timeout=120,
    )
    response.raise_for_status()
    # One value per token given and per token sampled, None at the first. The trainer's series begins at the second token
    # too, so [1:] of this is position by position its series; the token sampled on top is left out.
    return response.json()["choices"][0]["logprobs"]["token_logprobs"][1 : len(tokens)]


def train(infra) -> None:
    "The loop."
    policy = infra.policy
    reference = infra.reference
    sampler = DeploymentSampler(
        inference_url=deploy_mgr.inference_url,
        model=infra.inference_model,
        api_key=api_key,
        tokenizer=load_tokenizer(args.tokenizer),
    )
    tracker = WeightSyncer(
        policy_client=policy.inner,
        deploy_mgr=deploy_mgr,
        deployment_id=args.deployment,
        base_model=args.base_model,
    )
    adam = AdamParams(
        learning_rate=args.learning_rate, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01
    )
    step = 0
    for row in load_task(args.rows):
        if step == args.steps:
            break
        ask = sampler.sample_with_tokens(
            messages=list(row.messages), n=args.samples, max_tokens=args.max_tokens, logprobs=True
        )
        completions = asyncio.run(ask)
        rewards = [score(c.text, row) for c in completions]
        if len(set(rewards)) == 1:
            continue
        datums = build_grpo_datums(completions)
        ref_fwd = reference.forward(datums, "cross_entropy")
        ref_logprobs = [list(x["logprobs"].data) for x in ref_fwd.loss_fn_outputs]

        # The behaviour policy is the one that sampled: it is asked before the next sync changes it. At temperature 1 its
        # prefill should say what was reported with each token when it was sampled.
        behavior = [
            behavior_logprobs(infra.inference_model, list(c.full_tokens)) for c in completions
        ]
        sampled = [c.sampling_logprobs for c in completions]
        gap = max(
            abs(b - d)
            for bs, ds in zip(behavior, sampled, strict=True)
            for b, d in zip(bs[-len(ds) :], ds)
        )

        loss_fn = make_offpolicy_grpo_loss_fn(
            rewards, ref_logprobs, behavior, kl_beta=0.001, clip_rho=CLIP_RHO
        )
        result = policy.forward_backward_custom(datums, loss_fn)
        policy.optim_step(adam)
        step += 1
        snapshot = (
            tracker.save_and_hotload(f"step-{step:05d}") if step % HOTLOAD_INTERVAL == 0 else "none"
        )
        reward = sum(rewards) / len(rewards)
        loss = result.metrics["grpo_loss"]
        rho = f"rho {result.metrics['rho/mean']:.6f} at most {result.metrics['rho/max']:.6f}"
        print(
            f"step {step}: reward {reward:.3f} loss {loss:.6f} {rho} gap {gap:.1e} synced {snapshot}",
            flush=True,
        )


with ResourceCleanup(rlor_mgr, deploy_mgr) as cleanup:
    infra = setup_infra(
        rlor_mgr=rlor_mgr,
        deploy_mgr=deploy_mgr,
        base_model=args.base_model,
        infra_cfg=InfraConfig(
            training_shape_id=args.shape, ref_training_shape_id=f"{args.shape}-forward"
        ),
        deploy_cfg=DeployConfig(
            deployment_id=args.deployment, tokenizer_model=tokenizer_folder(args.tokenizer)
        ),
        needs_reference=True,
        needs_inference=True,
        role_prefix="grpo-offpolicy",
        api_key=api_key,
        cleanup=cleanup,
        on_status=print,
    )
    try:
        train(infra)
    finally:
        infra.close()
print(
    "trainers cancelled, deployment scaled to zero" if not cleanup.left else f"left: {cleanup.left}"
)
