"""GRPO on Fireworks without `setup_infra`: trainers, deployment and clients by hand, several prompts a step.

FIREWORKS_API_KEY=... python examples/fireworks/provision_by_hand.py
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from fireworks.training.sdk import (
    AdamParams,
    DeploymentManager,
    DeploymentSampler,
    FiretitanServiceClient,
    TrainerJobConfig,
    TrainerJobManager,
    WeightSyncer,
)
from task import load_task, load_tokenizer, score, service, settings, tokenizer_folder

from rl_notebook.backends.services.provision import (
    DeployConfig,
    InfraConfig,
    ResourceCleanup,
    create_trainer_job,
    datum_from_tokens_weights,
    setup_deployment,
)
from rl_notebook.core.losses import make_grpo_loss_fn

args = settings("GRPO on Fireworks without setup_infra")
PROMPT_GROUPS_PER_STEP = 2

api_key, base_url = service()
# no account_id: the key says whose it is
rlor_mgr = TrainerJobManager(api_key=api_key, base_url=base_url)
deploy_mgr = DeploymentManager(api_key=api_key, base_url=base_url)


def provision(cleanup: ResourceCleanup):
    "Step 1: the policy's job is asked for first, since the deployment is linked to it; then all three are awaited."
    shape = rlor_mgr.resolve_training_profile(args.shape)
    # hot_load_deployment_id is deprecated: it is the deployment that names the trainer now, not the other way round.
    policy_job = rlor_mgr.create(
        TrainerJobConfig(
            base_model=args.base_model,
            display_name="grpo-policy",
            training_shape_ref=shape.training_shape,
        )
    )
    cleanup.trainer(policy_job.job_id)
    common = {"base_model": args.base_model, "lora_rank": 0, "cleanup": cleanup, "on_status": print}
    infra = InfraConfig(training_shape_id=args.shape)
    forward = InfraConfig(training_shape_id=f"{args.shape}-forward")
    deploy_cfg = DeployConfig(
        deployment_id=args.deployment, tokenizer_model=tokenizer_folder(args.tokenizer)
    )
    with ThreadPoolExecutor(max_workers=3) as pool:
        dep_fut = pool.submit(
            setup_deployment, deploy_mgr, deploy_cfg, args.base_model, infra,
            hot_load_trainer_job=policy_job.job_name, cleanup=cleanup, on_status=print,
        )  # fmt: skip
        pol_fut = pool.submit(
            create_trainer_job, rlor_mgr, infra=infra, job_id=policy_job.job_id, **common
        )
        ref_fut = pool.submit(
            create_trainer_job, rlor_mgr, infra=forward, display_name="grpo-reference",
            extra_args=["--forward-only", "--no-compile"], **common,
        )  # fmt: skip
        return dep_fut.result(), pol_fut.result(), ref_fut.result()


def client_of(endpoint):
    "A training client of the SDK."
    service = FiretitanServiceClient(base_url=endpoint.base_url, api_key=api_key)
    return service.create_training_client(base_model=args.base_model, lora_rank=0)


def build_grpo_datums(completions, max_seq_len=8192):
    "Step 2: the SDK's own `Datum`s (Tinker's are another class). Only the completion's tokens count."
    tokens = [c.full_tokens for c in completions]
    weights = [[float(i >= c.prompt_len) for i in range(len(c.full_tokens))] for c in completions]
    return [
        datum_from_tokens_weights(t, w, max_seq_len) for t, w in zip(tokens, weights, strict=True)
    ]


def mean_of_losses(loss_fns, sizes):
    "Step 3: one loss of several prompts. Each group is compared with itself only, not with those next to it."

    def loss_fn(data, logprobs):
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        parts = [
            fn(data[a : a + n], logprobs[a : a + n])
            for fn, a, n in zip(loss_fns, starts, sizes, strict=True)
        ]

        def mean(name):
            return sum(metrics[name] for _, metrics in parts) / len(parts)

        return sum(loss for loss, _ in parts) / len(parts), {
            name: mean(name) for name in parts[0][1]
        }

    return loss_fn


def train(dep_info, policy_client, reference_client) -> None:
    "Step 4: the loop."
    tokenizer = load_tokenizer(args.tokenizer)
    sampler = DeploymentSampler(
        inference_url=deploy_mgr.inference_url,
        model=dep_info.inference_model,
        api_key=api_key,
        tokenizer=tokenizer,
    )
    tracker = WeightSyncer(  # no dcp_timeout: saving states is the client's business now
        policy_client=policy_client, deploy_mgr=deploy_mgr, deployment_id=args.deployment,
        base_model=args.base_model, hotload_timeout=600, first_checkpoint_type="base",
    )  # fmt: skip
    adam = AdamParams(
        learning_rate=args.learning_rate, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01
    )
    prompt_buffer = []
    global_step = 0
    for row in load_task(args.rows):
        if global_step == args.steps:
            break
        ask = sampler.sample_with_tokens(
            messages=list(row.messages), n=args.samples, max_tokens=args.max_tokens
        )
        completions = asyncio.run(ask)  # a coroutine now
        rewards = [score(c.text, row) for c in completions]
        if len(set(rewards)) == 1:
            continue
        datums = build_grpo_datums(completions)
        ref_fwd = reference_client.forward(datums, "cross_entropy").result()
        ref_logprobs = [list(x["logprobs"].data) for x in ref_fwd.loss_fn_outputs]
        prompt_buffer.append(
            (datums, rewards, make_grpo_loss_fn(rewards, ref_logprobs, kl_beta=0.001))
        )
        if len(prompt_buffer) < PROMPT_GROUPS_PER_STEP:
            continue

        batch = [datum for datums, _, _ in prompt_buffer for datum in datums]
        earned = [reward for _, rewards, _ in prompt_buffer for reward in rewards]
        loss_fn = mean_of_losses(
            [fn for _, _, fn in prompt_buffer], [len(r) for _, r, _ in prompt_buffer]
        )
        result = policy_client.forward_backward_custom(batch, loss_fn).result()
        policy_client.optim_step(adam).result()
        global_step = global_step + 1
        prompt_buffer = []
        snapshot = tracker.save_and_hotload(f"step-{global_step:05d}")
        reward = sum(earned) / len(earned)
        loss = result.metrics["grpo_loss"]
        kl = result.metrics["mean_kl"]
        print(
            f"step {global_step}: reward {reward:.3f} loss {loss:.6f} kl {kl:.6f} synced {snapshot}",
            flush=True,
        )


with ResourceCleanup(rlor_mgr, deploy_mgr) as cleanup:
    dep_info, policy_ep, reference_ep = provision(cleanup)
    train(dep_info, client_of(policy_ep), client_of(reference_ep))
print(
    "trainers cancelled, deployment scaled to zero" if not cleanup.left else f"left: {cleanup.left}"
)
