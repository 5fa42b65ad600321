"""GRPO on Fireworks, call by call: set up, then sample, score, build datums, score by the reference, step, sync.

FIREWORKS_API_KEY=... python examples/fireworks/step_by_step.py
"""

from __future__ import annotations

import asyncio

from fireworks.training.sdk import (
    AdamParams,
    AdaptiveConcurrencyController,
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
    WeightSyncScope,
    setup_infra,
)
from rl_notebook.core.datums import build_grpo_datums
from rl_notebook.core.losses import make_grpo_loss_fn

args = settings("GRPO on Fireworks, call by call")
api_key, base_url = service()

# 1. The control plane. The account is found by the key: the managers of today take no account_id.
rlor_mgr = TrainerJobManager(api_key=api_key, base_url=base_url)
deploy_mgr = DeploymentManager(api_key=api_key, base_url=base_url)

infra_cfg = InfraConfig(training_shape_id=args.shape, ref_training_shape_id=f"{args.shape}-forward")
deploy_cfg = DeployConfig(
    deployment_id=args.deployment,
    tokenizer_model=tokenizer_folder(args.tokenizer),
    weight_sync_scope=WeightSyncScope.PER_TRAINER,
)


def train(infra) -> None:
    "The loop; what it talks to is in `infra`."
    policy = infra.policy
    reference = infra.reference
    tokenizer = load_tokenizer(args.tokenizer)
    sampler = DeploymentSampler(
        inference_url=deploy_mgr.inference_url,
        model=infra.inference_model,
        api_key=api_key,
        tokenizer=tokenizer,
        concurrency_controller=AdaptiveConcurrencyController(initial_window=16),
    )
    tracker = WeightSyncer(
        policy_client=policy.inner,
        deploy_mgr=deploy_mgr,
        deployment_id=args.deployment,
        base_model=args.base_model,
        hotload_timeout=600,
        first_checkpoint_type="base",
    )
    adam = AdamParams(
        learning_rate=args.learning_rate, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01
    )

    step = 0
    for row in load_task(args.rows):
        if step == args.steps:
            break
        # 3. Completions of the deployment, each request for one of them. `sample_with_tokens` is a coroutine.
        ask = sampler.sample_with_tokens(
            messages=list(row.messages), n=args.samples, max_tokens=args.max_tokens
        )
        completions = asyncio.run(ask)
        rewards = [score(c.text, row) for c in completions]
        if len(set(rewards)) == 1:
            print(f"row {row.key}: every completion earned {rewards[0]:g}, nothing to learn")
            continue

        # 4. Training sequences, and the frozen reference's logprobs of them.
        datums = build_grpo_datums(completions)
        ref_fwd = reference.forward(datums, "cross_entropy")
        ref_logprobs = [list(x["logprobs"].data) for x in ref_fwd.loss_fn_outputs]

        # 5. One update. The loss function runs here; the trainer gets its derivative.
        loss_fn = make_grpo_loss_fn(rewards, ref_logprobs, kl_beta=0.001)
        result = policy.forward_backward_custom(datums, loss_fn)
        policy.optim_step(adam)
        step += 1

        # 6. The new weights, to the deployment: whole the first time, then what changed.
        snapshot = tracker.save_and_hotload(f"step-{step:05d}")
        reward = sum(rewards) / len(rewards)
        loss = result.metrics["grpo_loss"]
        kl = result.metrics["mean_kl"]
        print(
            f"step {step}: reward {reward:.3f} loss {loss:.6f} kl {kl:.6f} synced {snapshot}",
            flush=True,
        )


# 2. Trainers and a deployment. All of the work is inside this block: at its end trainers are cancelled and the
#    deployment is scaled to zero, also after an error or Ctrl-C.
with ResourceCleanup(rlor_mgr, deploy_mgr) as cleanup:
    infra = setup_infra(
        rlor_mgr=rlor_mgr,
        deploy_mgr=deploy_mgr,
        base_model=args.base_model,
        infra_cfg=infra_cfg,
        deploy_cfg=deploy_cfg,
        lora_rank=0,
        needs_reference=True,
        needs_inference=True,
        role_prefix="grpo",
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
