"Fireworks' own SDK against the emulator: setting up, releasing, learning, sampling, syncing."

import asyncio
import dataclasses
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from contextlib import contextmanager
from dataclasses import replace

import httpx
import numpy as np
import pytest

pytest.importorskip("fireworks.training.sdk")
pytest.importorskip("starlette")

from fireworks.training.sdk import DeploymentManager, DeploymentSampler, TrainerJobManager
from injected_faults import Fault, FaultyEmulator

from rl_notebook.backends.services import fireworks as fw
from rl_notebook.backends.services import resources
from rl_notebook.emulator.service import trainer_of
from rl_notebook.backends.services.fireworks import open_fireworks
from rl_notebook.backends.services.wire import Secret
from rl_notebook.backends.services.provision import (
    DeployConfig,
    TrainerConfig,
    InfraConfig,
    ReconnectableClient,
)
from rl_notebook.backends.services.provision import (
    ResourceCleanup,
    ResourceFile,
    ResourceState,
    clean_leftovers,
)
from rl_notebook.backends.services.provision import (
    create_trainer_job,
    leftovers,
    setup_deployment,
    setup_infra,
)
from rl_notebook.config.config import Config, ResumeConfig
from rl_notebook.core.types import AdamParams, BackendError, ConfigError, Datum, SampleParams
from rl_notebook.loop.setup import rollout_setup
from rl_notebook.recipes import rl_loop
from rl_notebook.loop.rollouts import RolloutSetup
from rl_notebook.task.toy import toy_rows

QWEN = "accounts/fireworks/models/qwen3-8b"
SHAPE = "accounts/fireworks/trainingShapes/qwen3-8b-128k-h200"
SHAPES = InfraConfig(training_shape_id=SHAPE, ref_training_shape_id=f"{SHAPE}-forward")
DATUMS = [Datum([72, 105, 33, 10], [0, 1, 1], sample=0), Datum([72, 111, 33], [0, 1], sample=1)]
ADAM = AdamParams(learning_rate=1e-2)


class EmulatorState:
    "An emulator and the SDK's managers for it."

    numbers = itertools.count(1)

    def __init__(self, running):
        self.running = running
        self.url = running.url
        self.key = running.key.reveal()
        self.jobs = TrainerJobManager(api_key=self.key, base_url=self.url)
        self.deployments = DeploymentManager(api_key=self.key, base_url=self.url)
        self.serving = f"serving-{next(self.numbers)}"  # the deployment of this test
        self.deploy = DeployConfig(deployment_id=self.serving, tokenizer_model="tiny")
        self.look_from_here()

    @property
    def managers(self):
        return {"rlor_mgr": self.jobs, "deploy_mgr": self.deployments}

    def look_from_here(self) -> None:
        self.mark, self.before = len(self.running.emulator.log), {j.name for j in self.all_jobs()}

    def all_jobs(self):
        return self.running.emulator.site.resources.all("rlorTrainerJobs")

    def asked(self, *methods) -> list[str]:
        "What was asked of the control plane since the mark: method and path, without what only reads."
        log = self.running.emulator.log[self.mark :]
        wanted = methods or ("POST", "PATCH", "DELETE")
        asked = [
            f"{e.method} {e.path.removeprefix('/v1/accounts/local/')}"
            for e in log
            if e.method in wanted
        ]
        return [line for line in asked if "/v1/" not in line]

    def was_asked(self, *want: str) -> bool:
        "Whether exactly this was asked, in this order; the log is written just after an answer is sent."
        end = time.monotonic() + 60
        while self.asked() != list(want) and time.monotonic() < end:
            time.sleep(0.02)
        return self.asked() == list(want)

    def state(self, job_id: str) -> str:
        return self.jobs.get(job_id)["state"].removeprefix("JOB_STATE_")

    def states(self) -> list[str]:
        "Of the jobs made since the mark."
        return sorted(
            self.state(j.name.rsplit("/", 1)[1])
            for j in self.all_jobs()
            if j.name not in self.before
        )

    def most_replicas(self, deployment_id: str | None = None) -> int:
        return self.deployments._get_deployment(deployment_id or self.serving)["maxReplicaCount"]

    def setup(self, cleanup=None, **wishes):
        settings = {
            "base_model": QWEN,
            "infra_cfg": SHAPES,
            "deploy_cfg": self.deploy,
            "needs_inference": True,
        }
        settings |= {"role_prefix": "grpo", "poll_interval_s": 0.02, **self.managers, **wishes}
        return setup_infra(cleanup=cleanup, **settings)

    @contextmanager
    def such_that(self, *faults: Fault, startup_delay_s: float = 0.0):
        "Something goes wrong, or takes long, for a while."
        site = self.running.emulator.site
        self.running.faults.reset(faults)
        site.startup_delay_s = startup_delay_s
        try:
            yield
        finally:
            self.running.faults.reset(())
            site.startup_delay_s = 0.0


@pytest.fixture(scope="module")
def running():
    with FaultyEmulator() as emulator:
        yield emulator


@pytest.fixture
def site(running):
    return EmulatorState(running)


def cleanup_of(site, **options) -> ResourceCleanup:
    return ResourceCleanup(site.jobs, site.deployments, 0, **options)


def test_the_policy_comes_first_then_the_deployment_linked_to_it(site):
    with site.such_that(startup_delay_s=0.3):
        statuses = []
        with cleanup_of(site) as cleanup:
            infra = site.setup(cleanup, needs_reference=True, on_status=statuses.append)
            policy = infra.policy_job_id
            reference = infra.reference_job_id
            assert site.was_asked(
                "POST rlorTrainerJobs", "POST rlorTrainerJobs", "POST deployments"
            )
            assert policy.startswith("grpo-policy-")
            assert reference.startswith("grpo-reference-")
            serving = site.deployments.get(site.serving)
            assert serving.hot_load_trainer_job == f"accounts/local/rlorTrainerJobs/{policy}"
            assert site.jobs.get(reference)["forwardOnly"] is True
            assert infra.inference_model == f"accounts/local/deployments/{site.serving}"
            assert infra.max_seq_len == 512
            assert set(infra.boot_metrics) == {
                "train/step",
                "infra/total_boot_time",
                "infra/deploy_boot_time",
            }
            site.look_from_here()
            infra.close()
        assert site.was_asked(
            f"POST rlorTrainerJobs/{reference}:cancel",
            f"POST rlorTrainerJobs/{policy}:cancel",
            f"PATCH deployments/{site.serving}",
        )
        assert (site.state(policy), site.state(reference)) == ("CANCELLED", "CANCELLED")
        assert site.most_replicas() == 0
        assert cleanup.left == []
    states = {
        role: [s.state for s in statuses if s.role == role]
        for role in ("policy", "reference", "deployment")
    }
    assert (states["policy"][0], states["policy"][-1]) == ("requested", "running")
    assert set(states["policy"]) <= {"requested", "pending", "creating", "running"}
    assert states["deployment"][-1] == "ready"
    assert all(isinstance(s, ResourceState) and s.link.startswith(site.url) for s in statuses)


def test_a_deployment_is_reattached_and_scaled_up_again(site):
    before = repr((SHAPES, site.deploy))
    with cleanup_of(site) as cleanup:
        site.setup(cleanup).close()
    assert site.most_replicas() == 0
    site.look_from_here()
    with cleanup_of(site) as cleanup:
        infra = site.setup(cleanup)
        patches = [line for line in site.asked() if line.startswith("PATCH")]
        assert patches == [f"PATCH deployments/{site.serving}"] * 2  # replicas, then the trainer
        assert site.most_replicas() == 1
        assert site.deployments.get(site.serving).hot_load_trainer_job.endswith(infra.policy_job_id)
        infra.close()
    assert repr((SHAPES, site.deploy)) == before


def test_another_shape_is_not_served_silently(site):
    with cleanup_of(site) as cleanup:
        site.setup(cleanup).close()
    other = InfraConfig(training_shape_id="accounts/fireworks/trainingShapes/llama-70b")
    with pytest.raises(
        BackendError, match=r"deployment shape: got .*qwen3-8b.*; expected .*llama-70b"
    ):
        site.setup(infra_cfg=other)


def test_trainers_are_attached_to_resumed_and_left_as_they_were(site):
    first = site.setup(deploy_cfg=None, needs_inference=False)
    site.look_from_here()
    with cleanup_of(site) as cleanup:
        again = site.setup(
            cleanup, deploy_cfg=None, needs_inference=False, policy_job_id=first.policy_job_id
        )
        again.close()
    assert site.asked() == []
    assert site.state(first.policy_job_id) == "RUNNING"
    first.close()
    site.jobs._post(f"/v1/accounts/local/rlorTrainerJobs/{first.policy_job_id}:cancel")
    with cleanup_of(site) as cleanup:
        site.setup(cleanup, needs_inference=False, policy_job_id=first.policy_job_id).close()
        assert site.state(first.policy_job_id) == "RUNNING"
    assert site.state(first.policy_job_id) == "CANCELLED"
    with pytest.raises(BackendError, match="'no-such-job', which is not there"):
        site.setup(policy_job_id="no-such-job")


def test_missing_settings_are_reported_before_any_request(site):
    with pytest.raises(
        ValueError, match=r"deployment\.tokenizer_model: got None; expected a tokenizer"
    ):
        site.setup(deploy_cfg=DeployConfig(deployment_id=site.serving))
    with pytest.raises(ConfigError, match="deploy_mgr: got None"):
        site.setup(deploy_mgr=None)
    with pytest.raises(ConfigError, match="gradient_accumulation_steps must be 1"):
        create_trainer_job(site.jobs, base_model=QWEN, infra=InfraConfig(), grad_accum=4)
    with pytest.raises(BackendError, match="training shape of the policy"):
        site.setup(infra_cfg=InfraConfig(training_shape_id="qwen3-8b-128k-h200"))
    assert site.asked() == []


# --- clients ------------------------------------------------------------------------------------------------------


def logprobs(client: ReconnectableClient) -> list[list[float]]:
    return [
        list(out["logprobs"].data)
        for out in client.forward(DATUMS, "cross_entropy").loss_fn_outputs
    ]


def reward_everything(datums, policy_logprobs):
    return -sum(
        (lp * lp.new_tensor(d.weights)).sum() for d, lp in zip(datums, policy_logprobs, strict=True)
    ), {}


def train(client: ReconnectableClient) -> None:
    client.forward_backward_custom(DATUMS, reward_everything)
    client.optim_step(ADAM, grad_accumulation_normalization="num_loss_tokens")


def restart(site, job_id: str) -> None:
    "The trainer of a job starts again: what was in its memory is gone."
    emulated = site.running.emulator.site
    trainer_of(
        emulated, emulated.resources.find(f"accounts/local/rlorTrainerJobs/{job_id}")
    ).lose_memory()


def test_learned_weights_of_a_trainer_are_not_silently_lost(site):
    with cleanup_of(site) as cleanup:
        policy = site.setup(
            cleanup, infra_cfg=InfraConfig(training_shape_id=SHAPE), needs_inference=False
        ).policy
        train(policy)
        restart(site, policy.job_id)
        with pytest.raises(
            BackendError,
            match=r"2 training calls since the last saved state went with .*start again",
        ):
            logprobs(policy)
        policy.reconnect()
        train(policy)
        saved = policy.save_state("learned")
        learned = logprobs(policy)
        restart(site, policy.job_id)
        assert logprobs(policy) == learned  # loaded again, since nothing was trained after it
        train(policy)
        restart(site, policy.job_id)
        with pytest.raises(
            BackendError, match=rf"reconnect\(\), then load_state_with_optimizer\('{saved.path}'\)"
        ):
            policy.optim_step(ADAM)
        assert policy.reconnects == 2
        policy.close()


# --- endings ------------------------------------------------------------------------------------------------------

ENDINGS = """
import os, signal, sys, time
from fireworks.training.sdk import DeploymentManager, TrainerJobManager
from rl_notebook.backends.services.provision import *

runs, QWEN, SHAPE = sys.argv[1], sys.argv[2], sys.argv[3]
where = {"api_key": os.environ["FIREWORKS_API_KEY"], "base_url": os.environ["FIREWORKS_BASE_URL"]}


def ending(exit_kind):
    jobs, deployments = TrainerJobManager(**where), DeploymentManager(**where)
    deploy = DeployConfig(deployment_id=f"serving-{exit_kind}", tokenizer_model="tiny")
    cleanup = ResourceCleanup(jobs, deployments, 0, folder=f"{runs}/{exit_kind}")
    wishes = {"base_model": QWEN, "infra_cfg": InfraConfig(training_shape_id=SHAPE), "role_prefix": exit_kind}
    wishes |= {"rlor_mgr": jobs, "deploy_mgr": deployments, "deploy_cfg": deploy, "needs_inference": True}
    if exit_kind == "exit":  # nothing closes it
        setup_infra(**wishes, cleanup=cleanup, poll_interval_s=0.05)
        print(f"ready {exit_kind} {os.getpid()}", flush=True)
        sys.exit(0)
    with cleanup:
        setup_infra(**wishes, cleanup=cleanup, poll_interval_s=0.05)
        print(f"ready {exit_kind} {os.getpid()}", flush=True)
        if exit_kind == "exception":
            raise ValueError("the loop broke")
        time.sleep(300)


for exit_kind in ("exception", "exit", "interrupt", "terminate", "kill"):
    if os.fork() == 0:
        ending(exit_kind)
        sys.exit(0)
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
"""
SIGNALS = {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM, "kill": signal.SIGKILL}


@pytest.mark.slow
def test_every_ending_but_kill_releases_everything_and_kill_leaves_a_list(site, tmp_path):
    env = os.environ | site.running.environment() | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", ENDINGS, str(tmp_path), QWEN, SHAPE]
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        ready = {}
        while len(ready) < 5:
            _, exit_kind, pid = process.stdout.readline().split()
            ready[exit_kind] = int(pid)
        with pytest.raises(BackendError, match="a list that a running backend owns"):
            leftovers(tmp_path / "kill")
        for exit_kind, number in SIGNALS.items():
            os.kill(ready[exit_kind], number)
        errors = process.stderr.read()
    assert "ValueError: the loop broke" in errors
    assert "KeyboardInterrupt" in errors
    assert site.key not in errors
    new_jobs = [j for j in site.all_jobs() if j.name not in site.before]
    states = {j.name.split("/")[-1].split("-")[0]: j.state(time.time()) for j in new_jobs}
    assert states.pop("kill") == "JOB_STATE_RUNNING"
    assert states == dict.fromkeys(
        ("exception", "exit", "interrupt", "terminate"), "JOB_STATE_CANCELLED"
    )
    assert {
        exit_kind: site.most_replicas(f"serving-{exit_kind}") for exit_kind in ready
    } == dict.fromkeys(ready, 0) | {"kill": 1}
    assert [exit_kind for exit_kind in ready if leftovers(tmp_path / exit_kind)] == ["kill"]

    left = leftovers(tmp_path / "kill")
    assert [(r.role, r.action) for r in left] == [
        ("policy", "cancel"),
        ("deployment", "scale_to_zero"),
    ]
    listed = (tmp_path / "kill" / "resources.json").read_text()
    assert json.loads(listed)["format"] == 1
    assert site.key not in listed
    with pytest.raises(
        BackendError, match=r"(?s)leftover='attach'.*leftover='clean'.*curl .*:cancel"
    ):
        resources.settle_leftovers(tmp_path / "kill", "error", Secret(site.key))
    result = resources.settle_leftovers(tmp_path / "kill", "attach", Secret(site.key))
    assert result["policy"].id == left[0].id
    gone = clean_leftovers(tmp_path / "kill", key=site.key)
    assert [r.role for r in gone] == ["deployment", "policy"]
    assert site.state(left[0].id) == "CANCELLED"
    assert site.most_replicas("serving-kill") == 0
    assert leftovers(tmp_path / "kill") == []


def test_deleting_is_an_action_too(site):
    with cleanup_of(site) as cleanup:
        job = create_trainer_job(
            site.jobs, base_model=QWEN, infra=InfraConfig(), poll_interval_s=0.02
        )
        cleanup.delete_trainer(job.job_id)
        setup_deployment(site.deployments, site.deploy, QWEN, poll_interval_s=0.02)
        cleanup.deployment(site.serving, action="delete")
        with pytest.raises(ConfigError, match="got 'explode'"):
            cleanup.deployment(site.serving, action="explode")
    assert site.deployments.get(site.serving) is None
    assert site.jobs.try_get(job.job_id) is None or site.state(job.job_id) == "DELETED"


# --- the backend --------------------------------------------------------------------------------------------------

QUICK = {"say": lambda line: None, "grace_s": 0, "poll_interval_s": 0.02, "pause_s": 0.02}


def settings_of(site, **more):
    trainer = {"training_shape_id": SHAPE, "reference_training_shape_id": f"{SHAPE}-forward"}
    sizes = {"max_seq_len": 256, "max_completion_tokens": 64}
    deployment = {"tokenizer_model": "tiny", "deployment_id": site.serving}
    settings = {
        "base_model": QWEN,
        "trainer": trainer,
        "deployment": deployment,
        **sizes,
        "kl_beta": 0.0,
    }
    return settings | {"key": site.key, "base_url": site.url} | QUICK | more


def run(site, test, **more):
    async def inside():
        async with await open_fireworks(**settings_of(site, **more)) as backend:
            return await test(backend)

    return asyncio.run(inside())


def toy(backend) -> Datum:
    tokens = backend.tokenizer.encode("1+2=3", add_special_tokens=False)
    return Datum(np.array(tokens), np.array([0] + [1] * (len(tokens) - 2)), advantage=1.0)


async def learn(backend, datum: Datum, rate: float = 1e-3) -> None:
    await backend.policy.forward_backward_custom([datum], lambda ds, lps: (-lps[0].nansum(), {}))
    await backend.policy.optim_step(AdamParams(learning_rate=rate))


async def scores(backend, datum: Datum) -> np.ndarray:
    return (await backend.policy.forward([datum]))[0].values[datum.active]


async def served_logprobs(backend, datum: Datum) -> np.ndarray:
    return (await backend.sampler.logprobs(datum.tokens)).values[datum.active]


async def synced(backend, name: str) -> tuple[str, int]:
    snapshot = await backend.policy.save_weights_for_sampler(name)
    return backend.sync.saved[snapshot].kind, await backend.sync(snapshot)


def test_a_rollout_can_make_its_own_requests(site):
    "Address, key, model and tokenizer of the setup, with a client that knows nothing of this package."

    async def test(backend):
        cfg = Config(**{k: v for k, v in settings_of(site).items() if k not in ("key", *QUICK)})
        setup = rollout_setup(backend, cfg)
        assert setup.tokenizer_id == "tiny"
        assert setup.api_key not in repr(setup)
        body = {"model": setup.model, "prompt": [5, 6, 7], "max_tokens": 4}
        async with httpx.AsyncClient(
            headers={"Authorization": f"Bearer {setup.api_key}"}
        ) as client:
            response = await client.post(
                f"{setup.inference_base_url}/inference/v1/completions", json=body
            )
        assert response.status_code == 200
        assert response.json()["choices"][0]["finish_reason"] in ("stop", "length")

    run(site, test)
    nowhere = RolloutSetup(None, None, SampleParams(), 4)
    with pytest.raises(ConfigError, match="inference_base_url: got a sampler that has no address"):
        _ = nowhere.inference_base_url


def test_a_limit_is_one_of_requests(site, monkeypatch):
    "Two groups of four completions, over HTTP; what is in flight is counted where a request is made."
    in_flight = [0]
    most = [0]

    async def counted(sampler, *args, **options):
        in_flight[0] += 1
        most[0] = max(most[0], in_flight[0])
        try:
            return await stream(sampler, *args, **options)
        finally:
            in_flight[0] -= 1

    stream = DeploymentSampler.async_completions_stream
    monkeypatch.setattr(DeploymentSampler, "async_completions_stream", counted)
    sizes = {"max_seq_len": 64, "max_completion_tokens": 8, "prompt_groups_per_step": 2, "steps": 1}
    settings = settings_of(site, **sizes, concurrency={"mode": "fixed", "max_concurrency": 3})
    cfg = Config(**{k: v for k, v in settings.items() if k not in ("key", *QUICK)})

    async def test():
        async with await open_fireworks(cfg, key=site.key, **QUICK) as backend:
            assert (
                type(backend.sampler.drawer._concurrency_controller).__name__
                == "FixedConcurrencyController"
            )
            in_flight[0] = most[0] = 0
            return await rl_loop.train(
                cfg, backend=backend, rows=toy_rows(4), say=lambda _: None, progress=False
            )

    assert asyncio.run(test()).steps == 1
    assert 0 < most[0] <= 3


def test_first_a_base_then_deltas_and_a_base_where_the_chain_has_a_gap(site):
    async def test(backend):
        datum = toy(backend)
        assert await synced(backend, "a") == ("base", 1)
        await learn(backend, datum)
        assert await synced(backend, "b") == ("delta", 2)
        await learn(backend, datum)
        await backend.policy.save_weights_for_sampler("never-loaded")
        await learn(backend, datum)
        assert await synced(backend, "d") == ("base", 3)
        assert (
            np.abs(await served_logprobs(backend, datum) - await scores(backend, datum)).max()
            < 1e-4
        )

    run(site, test)


def test_lora_always_sends_whole_adapters_and_shares_its_reference(site):
    async def test(backend):
        datum = toy(backend)
        before = (await backend.reference.forward([datum]))[0].values
        for version in (1, 2):
            await learn(backend, datum)
            assert await synced(backend, f"s{version}") == ("base", version)
        assert (
            np.abs(await served_logprobs(backend, datum) - await scores(backend, datum)).max()
            < 1e-4
        )
        assert np.array_equal(
            (await backend.reference.forward([datum]))[0].values, before, equal_nan=True
        )
        assert site.asked().count("POST rlorTrainerJobs") == 1

    run(site, test, lora_rank=4, kl_beta=0.01, trainer={"training_shape_id": SHAPE})


def test_failures_of_a_sync_are_distinguished(site):
    async def test(backend):
        datum = toy(backend)

        async def failing(kind, *faults):
            await learn(backend, datum)
            with (
                site.such_that(*faults),
                pytest.raises(fw.SyncError, match=f"weight sync {kind}") as caught,
            ):
                await synced(backend, kind.replace(" ", "-"))
            assert caught.value.kind == kind
            assert fw.SYNC_FIXES[kind] in str(caught.value)
            assert backend.policy.versions.current == 0

        with pytest.warns(UserWarning, match="Sending full weights again"):
            await failing("failed", Fault("hotload_error", times=2))
        assert backend.sync.syncer.hotload_timeout == 60
        backend.sync.syncer.hotload_timeout = 1  # only where it is to run out
        await failing("timed out", Fault("hotload_stalls", seconds=30))
        site.deployments.scale_to_zero(site.serving)
        await failing("not ready")
        backend.sync.syncer.hotload_timeout = 60
        site.deployments.update(site.serving, {"maxReplicaCount": 1}, "max_replica_count")
        assert await synced(backend, "at-last") == ("base", 1)
        other = create_trainer_job(
            site.jobs, base_model=QWEN, infra=InfraConfig(), poll_interval_s=0.02
        )
        site.deployments.update(
            site.serving, {"hotLoadTrainerJob": other.job_name}, "hot_load_trainer_job"
        )
        await learn(backend, datum)
        with (
            pytest.warns(UserWarning, match="Sending full weights instead"),
            pytest.raises(fw.SyncError, match="weight sync rejected: got HTTP 4") as caught,
        ):
            await synced(backend, "elsewhere")
        assert caught.value.kind == "rejected"
        site.jobs.delete(other.job_id)

    run(site, test, weight_sync={"weight_sync_timeout": 60})


def test_a_rejected_delta_is_followed_by_full_weights_if_they_are_still_there(site):
    async def test(backend):
        datum = toy(backend)
        await synced(backend, "a")
        await learn(backend, datum)
        with (
            site.such_that(Fault("hotload_error", times=1)),
            pytest.warns(UserWarning, match="Sending full weights instead"),
        ):
            assert await synced(backend, "b") == ("delta", 2)
        assert (
            np.abs(await served_logprobs(backend, datum) - await scores(backend, datum)).max()
            < 1e-4
        )
        await learn(backend, datum)
        stale = await backend.policy.save_weights_for_sampler("c")
        await learn(backend, datum)
        assert await synced(backend, "d") == ("base", 3)
        with pytest.raises(fw.SyncError, match="chain broken"):
            await backend.sync(stale)

    run(site, test)


def test_both_logprobs_are_kept_and_a_stop_token_ends_a_completion(site):
    async def test(backend):
        prompt = backend.tokenizer.encode("3+4=", add_special_tokens=False)
        for params in (
            SampleParams(n=2, max_tokens=6, seed=5),
            SampleParams(max_tokens=6, temperature=0.6, top_p=0.9, seed=5),
        ):
            for c in await backend.sampler.sample(prompt, params):
                raw = (await backend.sampler.logprobs(c.full_tokens)).values[len(prompt) - 1 :]
                assert np.abs(raw - c.logprobs).max() < 1e-4
                assert np.isfinite(c.sampling_logprobs).all()
                assert (
                    np.abs(c.sampling_logprobs - c.logprobs).max() < 1e-4
                ) == params.draws_from_raw
        stop = backend.tokenizer.encode("5", add_special_tokens=False)
        ended = await backend.sampler.sample(
            prompt, SampleParams(n=8, max_tokens=20, stop_token_ids=tuple(stop), seed=1)
        )
        assert all(stop[0] not in c.tokens[:-1] for c in ended)

    run(site, test)


def test_a_deployment_that_was_restarted_gets_its_weights_again_before_anything_is_trained(site):
    params = SampleParams(n=2, max_tokens=6, seed=5)

    def restarted():
        "As a service does it: the replica goes, another comes, with the base model."
        site.deployments.scale_to_zero(site.serving)
        site.deployments.update(site.serving, {"maxReplicaCount": 1}, "max_replica_count")

    async def test(backend):
        datum = toy(backend)
        prompt = datum.tokens[:4]
        first = (await backend.sampler.sample(prompt, params))[0].logprobs
        for name in ("a", "b"):
            await learn(backend, datum, rate=1e-2)
            await synced(backend, name)
        want = await backend.sampler.sample(prompt, params)
        assert not np.array_equal(want[0].logprobs, first)
        # the policy has other weights than those that were served
        await learn(backend, datum, rate=1e-2)
        restarted()
        with pytest.warns(UserWarning, match="lost its weights"):
            got = await asyncio.gather(*(backend.sampler.sample(prompt, params) for _ in range(3)))
        for sampled in got:
            assert [c.tokens.tolist() for c in sampled] == [c.tokens.tolist() for c in want]
            assert (
                max(
                    np.abs(a.logprobs - b.logprobs).max()
                    for a, b in zip(sampled, want, strict=True)
                )
                < 1e-4
            )
            assert {c.policy_version for c in sampled} == {2}
        restarted()
        with pytest.warns(UserWarning, match="lost its weights"):
            await served_logprobs(backend, datum)
        await learn(backend, datum)
        assert (await synced(backend, "c"))[1] == 3  # and the chain continues
        assert (
            np.abs(await served_logprobs(backend, datum) - await scores(backend, datum)).max()
            < 1e-4
        )

    run(site, test)


def test_a_restarted_trainer_is_brought_up_to_date(site):
    async def learned(backend, restarts):
        datum = toy(backend)
        for step in range(3):
            await learn(backend, datum)
            if step in restarts:
                restart(site, backend.infra.policy_job_id)
        assert await synced(backend, "end") == ("base", 1)
        assert (
            np.abs(await served_logprobs(backend, datum) - await scores(backend, datum)).max()
            < 1e-4
        )
        return await scores(backend, datum), backend.policy.reconnects

    calm, none = run(site, lambda b: learned(b, ()))
    stormy, some = run(site, lambda b: learned(b, (0, 2)))
    assert (none, some) == (0, 2)
    assert np.abs(calm - stormy).max() < 1e-5


def test_a_shared_reference_and_its_policy_come_back_together(site):
    "The reference notices that the trainer is gone; one recovery brings up both, with the journal of the policy."

    async def learned(backend):
        datum = toy(backend)
        for _ in range(2):
            await learn(backend, datum)
        want = await scores(backend, datum)
        base = (await backend.reference.forward([datum]))[0].values
        restart(site, backend.infra.policy_job_id)
        mark = len(site.running.emulator.log)
        again = (await backend.reference.forward([datum]))[0].values
        assert np.allclose(again, base, atol=1e-6, equal_nan=True)
        assert np.abs(await scores(backend, datum) - want).max() < 1e-5
        made = [
            e for e in list(site.running.emulator.log)[mark:] if e.path.endswith("/create_session")
        ]
        assert len(made) == 1, "one service client for both"
        assert (
            backend.policy.reconnects,
            backend.infra.policy.reconnects,
            backend.infra.reference.reconnects,
        ) == (
            1,
            1,
            1,
        )

    run(site, learned, lora_rank=4, kl_beta=0.01, trainer={"training_shape_id": SHAPE})


def test_a_state_loads_in_another_job(site):
    async def first(backend):
        await learn(backend, toy(backend))
        return await backend.policy.save_state("runs/first/checkpoints/00001"), await scores(
            backend, toy(backend)
        )

    async def second(backend):
        assert backend.infra.policy_job_id not in path
        return (
            await scores(backend, toy(backend)),
            await served_logprobs(backend, toy(backend)),
            backend.policy.versions.current,
        )

    path, want = run(site, first)
    _, _, job, name = path.replace("cross_job://", "cross_job//").split("/")
    got, sampled_from_weights, version = run(
        site, second, resume={"resume_from": name, "resume_job_id": job}
    )
    assert np.abs(got - want).max() < 1e-6
    assert np.abs(sampled_from_weights - want).max() < 1e-4
    assert version == 0


def test_a_bare_name_is_a_state_of_the_job_itself_and_the_step_offset_counts(site, tmp_path):
    async def first(backend):
        await learn(backend, toy(backend))
        path = await backend.policy.save_state("step-4")
        return (
            backend.infra.policy_job_id,
            path.rsplit("/", 1)[-1],
            await scores(backend, toy(backend)),
        )

    job, name, want = run(site, first)
    overrides = {
        "trainer": {"job_id": job},
        "prompt_groups_per_step": 2,
        "completions_per_prompt": 2,
    }
    sizes = {"max_seq_len": 64, "max_completion_tokens": 4, "steps": 12}
    settings = settings_of(
        site, **overrides, **sizes, resume={"resume_from": name, "step_offset": 10}
    )
    log_path = str(tmp_path / "run")
    cfg = Config(
        **{k: v for k, v in settings.items() if k not in ("key", *QUICK)}, log_path=log_path
    )
    steps = list[int]()
    lines = list[str]()

    async def second(key):
        async with await open_fireworks(cfg, key=key, **QUICK) as backend:
            assert backend.infra.policy_job_id == job
            assert np.abs(await scores(backend, toy(backend)) - want).max() < 1e-6
            callbacks = {
                "say": lines.append,
                "progress": False,
                "on_record": [lambda r: steps.append(r.step)],
            }
            return await rl_loop.train(cfg, backend=backend, rows=toy_rows(8), **callbacks)

    assert asyncio.run(second(site.key)).steps == 2
    assert steps == [11, 12]
    assert rl_loop.Run.open(log_path).metrics().loc[10, "infra/total_boot_time"] > 0
    assert any("resuming after step 10" in line for line in lines)
    assert rl_loop.step_there(replace(cfg, resume=ResumeConfig("step-00007"))) == 7
    new = replace(cfg, trainer=TrainerConfig(training_shape_id=SHAPE))
    before = len(site.asked())
    with pytest.raises(ConfigError, match=r"resume\.resume_from: got 'step.*Set trainer\.job_id"):
        asyncio.run(open_fireworks(new, key=site.key, **QUICK))
    assert len(site.asked()) == before


def test_opening_that_fails_or_is_cancelled_leaves_nothing_running(site):
    async def cancel_while_opening():
        task = asyncio.create_task(open_fireworks(**settings_of(site)))
        while not task.done() and {j.name for j in site.all_jobs()} <= site.before:
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with site.such_that(startup_delay_s=60):
        asyncio.run(cancel_while_opening())
    assert site.states() == ["CANCELLED"]
    with (
        site.such_that(Fault("job_fails"), startup_delay_s=0.1),
        pytest.raises(BackendError, match="got FAILED"),
    ):
        asyncio.run(open_fireworks(**settings_of(site)))
    assert site.states() == ["CANCELLED", "FAILED"]
    assert site.most_replicas() == 0
    assert not resources.OPEN_CLEANUPS


def test_resources_of_a_killed_process_are_resumed_or_released(site, tmp_path):
    async def test():
        first = await open_fireworks(**settings_of(site, log_path=str(tmp_path / "first")))
        for name in ("attach", "clean"):
            ResourceFile(tmp_path / name).write(ResourceFile(tmp_path / "first").read())
        with pytest.raises(BackendError, match="leftover='attach'"):
            await open_fireworks(**settings_of(site, log_path=str(tmp_path / "attach")))
        more = {"log_path": str(tmp_path / "attach"), "leftover": "attach"}
        async with await open_fireworks(**settings_of(site, **more)) as again:
            assert again.infra.policy_job_id == first.infra.policy_job_id
            assert again.infra.deployment_id == site.serving
            datum = toy(again)
            assert (
                np.abs(await served_logprobs(again, datum) - await scores(again, datum)).max()
                < 1e-4
            )
        assert site.state(first.infra.policy_job_id) == "CANCELLED"
        more = {"log_path": str(tmp_path / "clean"), "leftover": "clean"}
        async with await open_fireworks(**settings_of(site, **more)) as fresh:
            assert fresh.infra.policy_job_id != first.infra.policy_job_id
        gone = ResourceFile(tmp_path / "first").read()[0]
        ResourceFile(tmp_path / "gone").write(
            [dataclasses.replace(gone, name=f"{gone.name}-deleted")]
        )
        more = {"log_path": str(tmp_path / "gone"), "leftover": "attach"}
        async with await open_fireworks(**settings_of(site, **more)) as fresh:
            assert not fresh.infra.policy_job_id.endswith("-deleted")
        await first.close()
        assert [leftovers(tmp_path / name) for name in ("first", "attach", "clean", "gone")] == [
            []
        ] * 4

    asyncio.run(test())


def test_settings_that_cannot_work_are_rejected_first(site):
    for match, more in {
        r"deployment\.tokenizer_model: got None": {"deployment": {"deployment_id": "x"}},
        "leftover: got 'burn'": {"leftover": "burn"},
        "max_seq_len: got 4000; expected at most 512, the context of the training": {
            "max_seq_len": 4000
        },
    }.items():
        with pytest.raises(ConfigError, match=match):
            asyncio.run(open_fireworks(**settings_of(site, **more)))
    assert site.asked() == []


def test_a_trainer_that_says_it_does_not_replay_is_rejected_and_released(site):
    with pytest.raises(
        ConfigError, match="trainer: router_replay: got a trainer that chooses its own experts"
    ):
        asyncio.run(open_fireworks(**settings_of(site, router_replay=True)))
    made = site.asked()[:2]
    released = site.asked()[2:]
    assert made == ["POST rlorTrainerJobs", "POST deployments"]
    assert [line.split(":")[-1].split("/")[0] for line in released] == [
        "cancel",
        "PATCH deployments",
    ]


def test_the_key_is_shown_nowhere(site, caplog, capsys, tmp_path):
    async def test(backend):
        shown = [
            repr(x)
            for x in (
                backend,
                backend.policy,
                backend.sampler,
                backend.sync,
                backend.infra,
                backend.cleanup,
            )
        ]
        with site.such_that(Fault("hotload_error")), pytest.raises(BackendError) as failed:
            await synced(backend, "a")
        return [*shown, *traceback.format_exception(failed.value)]

    with caplog.at_level(logging.DEBUG, logger="fireworks"):
        shown = run(site, test, log_path=str(tmp_path), say=print)
    files = [f.read_text(errors="replace") for f in tmp_path.rglob("*") if f.is_file()]
    everything = "\n".join([*shown, *files, caplog.text, *capsys.readouterr()])
    assert "policy     running" in everything
    assert site.key not in everything
