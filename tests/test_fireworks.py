"Fireworks' own SDK against the emulator: setting up, giving back, learning, drawing, syncing."

import io
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("fireworks.training.sdk")
pytest.importorskip("starlette")

from fireworks.training.sdk import DeploymentManager, FiretitanServiceClient, TrainerJobManager

from rl_notebook.backends import fireworks as fw
from rl_notebook.backends.emulator import start_emulator, trainer_of
from rl_notebook.backends.fireworks import (
    DeployConfig,
    InfraConfig,
    ReconnectableClient,
    ResourceCleanup,
    ResourceFile,
    ResourceState,
    TrainerConfig,
    WeightSyncScope,
    clean_leftovers,
    create_trainer_job,
    dry_run,
    leftovers,
    plan_infra,
    setup_deployment,
    setup_infra,
)
from rl_notebook.core import AdamParams, BackendError, ConfigError, Datum

QWEN = "accounts/fireworks/models/qwen3-8b"
SHAPE = "accounts/fireworks/trainingShapes/qwen3-8b-128k-h200"
SHAPES = InfraConfig(training_shape_id=SHAPE, ref_training_shape_id=f"{SHAPE}-forward")
SERVING = DeployConfig(deployment_id="grpo-serving", tokenizer_model="tiny")
DATUMS = [Datum([72, 105, 33, 10], [0, 1, 1], sample=0), Datum([72, 111, 33], [0, 1], sample=1)]
ADAM = AdamParams(learning_rate=1e-2)


class Site:
    "An emulator and the SDK's managers for it."

    def __init__(self, running):
        self.running, self.url, self.key = running, running.url, running.key.reveal()
        self.jobs = TrainerJobManager(api_key=self.key, base_url=self.url)
        self.deployments = DeploymentManager(api_key=self.key, base_url=self.url)
        self.mark = 0

    @property
    def managers(self):
        return {"rlor_mgr": self.jobs, "deploy_mgr": self.deployments}

    def asked(self, *methods) -> list[str]:
        "What was asked of the control plane since the mark: method and path, without what only reads."
        log = self.running.emulator.log[self.mark :]
        wanted = methods or ("POST", "PATCH", "DELETE")
        asked = [f"{e.method} {e.path.removeprefix('/v1/accounts/local/')}" for e in log if e.method in wanted]
        return [line for line in asked if "/v1/" not in line]

    def state(self, job_id: str) -> str:
        return self.jobs.get(job_id)["state"].removeprefix("JOB_STATE_")

    def most_replicas(self, deployment_id: str) -> int:
        return self.deployments._get_deployment(deployment_id)["maxReplicaCount"]

    def setup(self, cleanup=None, **wishes):
        given = {"base_model": QWEN, "infra_cfg": SHAPES, "deploy_cfg": SERVING, "needs_inference": True}
        given |= {"role_prefix": "grpo", "poll_interval_s": 0.02, **self.managers, **wishes}
        return setup_infra(cleanup=cleanup, **given)


@contextmanager
def site_of(**settings):
    with start_emulator(**settings) as running:
        yield Site(running)


@pytest.fixture
def site():
    with site_of() as made:
        yield made


def cleanup_of(site, **options) -> ResourceCleanup:
    return ResourceCleanup(site.jobs, site.deployments, 0, **options)


def test_the_policy_comes_first_then_the_deployment_linked_to_it():
    with site_of(startup_delay_s=0.3) as site:
        told = []
        with cleanup_of(site) as cleanup:
            infra = site.setup(cleanup, needs_reference=True, on_status=told.append)
            policy, reference = infra.policy_job_id, infra.reference_job_id
            assert site.asked() == ["POST rlorTrainerJobs", "POST rlorTrainerJobs", "POST deployments"]
            assert policy.startswith("grpo-policy-")
            assert reference.startswith("grpo-reference-")
            serving = site.deployments.get("grpo-serving")
            assert serving.hot_load_trainer_job == f"accounts/local/rlorTrainerJobs/{policy}"
            assert site.jobs.get(reference)["forwardOnly"] is True
            assert infra.inference_model == "accounts/local/deployments/grpo-serving"
            assert infra.training_shape_id == SHAPE
            assert infra.max_seq_len == 512
            assert set(infra.boot_metrics) == {"train/step", "infra/total_boot_time", "infra/deploy_boot_time"}
            site.mark = len(site.running.emulator.log)
            infra.close()
        assert site.asked() == [
            f"POST rlorTrainerJobs/{reference}:cancel",
            f"POST rlorTrainerJobs/{policy}:cancel",
            "PATCH deployments/grpo-serving",
        ]
        assert (site.state(policy), site.state(reference)) == ("CANCELLED", "CANCELLED")
        assert site.most_replicas("grpo-serving") == 0
        assert cleanup.left == []
    states = {role: [s.state for s in told if s.role == role] for role in ("policy", "reference", "deployment")}
    assert (states["policy"][0], states["policy"][-1]) == ("requested", "running")
    assert set(states["policy"]) <= {"requested", "pending", "creating", "running"}
    assert states["deployment"][-1] == "ready"
    assert all(isinstance(s, ResourceState) and s.link.startswith(site.url) for s in told)


def test_per_deployment_asks_for_the_deployment_first(site):
    deploy = DeployConfig(
        deployment_id="own-bucket", tokenizer_model="tiny", weight_sync_scope=WeightSyncScope.PER_DEPLOYMENT
    )
    with cleanup_of(site) as cleanup:
        infra = site.setup(cleanup, deploy_cfg=deploy)
        assert site.asked() == ["POST deployments", "POST rlorTrainerJobs"]
        assert site.jobs.get(infra.policy_job_id)["hotLoadDeploymentId"] == "own-bucket"
        assert site.deployments.get("own-bucket").hot_load_trainer_job is None
        infra.close()


def test_a_deployment_is_reattached_and_scaled_up_again(site):
    before = repr((SHAPES, SERVING))
    with cleanup_of(site) as cleanup:
        site.setup(cleanup).close()
    assert site.most_replicas("grpo-serving") == 0
    site.mark = len(site.running.emulator.log)
    with cleanup_of(site) as cleanup:
        infra = site.setup(cleanup)
        patches = [line for line in site.asked() if line.startswith("PATCH")]
        assert patches == ["PATCH deployments/grpo-serving"] * 2  # replicas, then the trainer
        assert site.most_replicas("grpo-serving") == 1
        assert site.deployments.get("grpo-serving").hot_load_trainer_job.endswith(infra.policy_job_id)
        infra.close()
    assert repr((SHAPES, SERVING)) == before


def test_another_shape_is_not_served_silently(site):
    with cleanup_of(site) as cleanup:
        site.setup(cleanup).close()
    other = InfraConfig(training_shape_id="accounts/fireworks/trainingShapes/llama-70b")
    with pytest.raises(BackendError, match="deployment shape: got .*qwen3-8b.*; expected .*llama-70b"):
        site.setup(infra_cfg=other)


def test_lora_shares_its_base_as_the_reference(site):
    with cleanup_of(site) as cleanup:
        infra = site.setup(cleanup, infra_cfg=InfraConfig(training_shape_id=SHAPE), lora_rank=4, needs_reference=True)
        assert site.asked().count("POST rlorTrainerJobs") == 1
        assert infra.reference_job_id is None
        before = logprobs(infra.reference)
        train(infra.policy)
        assert logprobs(infra.policy) != before
        assert logprobs(infra.reference) == before
        infra.close()


def test_no_reference_shape_means_no_reference(site):
    wishes = {"infra_cfg": InfraConfig(training_shape_id=SHAPE), "needs_reference": True}
    with cleanup_of(site) as cleanup:
        infra = site.setup(cleanup, **wishes)
        assert infra.reference is None
        assert site.asked().count("POST rlorTrainerJobs") == 1
        infra.close()
    plan = plan_infra(**site.managers, base_model=QWEN, auto_reference=True, **wishes)
    assert plan.reference.request.auto_select_training_shape
    assert plan.reference.request.forward_only


def test_a_trainer_that_fails_leaves_nothing_running():
    with site_of(startup_delay_s=0.2, faults="job_fails:at=2") as site:
        with pytest.raises(BackendError, match=r"reference trainer grpo-reference-\w+: trainer: got FAILED: .*expected RUN"):
            site.setup(needs_reference=True)
        names = [j.name for j in site.running.emulator.site.shelf.all("rlorTrainerJobs")]
        assert sorted(site.state(n.rsplit("/", 1)[1]) for n in names) == ["CANCELLED", "FAILED"]
        assert site.most_replicas("grpo-serving") == 0
        assert not fw.OPEN_CLEANUPS


def test_trainers_are_attached_to_resumed_and_left_as_they_were(site):
    first = site.setup(deploy_cfg=None, needs_inference=False)
    site.mark = len(site.running.emulator.log)
    with cleanup_of(site) as cleanup:
        again = site.setup(cleanup, deploy_cfg=None, needs_inference=False, policy_job_id=first.policy_job_id)
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


def test_a_dry_run_only_reads(site, capsys):
    dry_run(**site.managers, base_model=QWEN, infra_cfg=SHAPES, deploy_cfg=SERVING, needs_reference=True, needs_inference=True)
    printed = capsys.readouterr().out
    assert site.asked() == []
    for part in ("policy      create", "reference   create", "forward_only=True", "deployment  create", "grpo-serving"):
        assert part in printed
    assert site.key not in printed


def test_what_is_missing_is_said_before_anything_is_asked_for(site):
    with pytest.raises(ValueError, match=r"deployment\.tokenizer_model: got None; expected a tokenizer"):
        site.setup(deploy_cfg=DeployConfig(deployment_id="grpo-serving"))
    with pytest.raises(ConfigError, match="deploy_mgr: got None"):
        site.setup(deploy_mgr=None)
    with pytest.raises(ConfigError, match="gradient_accumulation_steps must be 1"):
        create_trainer_job(site.jobs, base_model=QWEN, infra=InfraConfig(), grad_accum=4)
    with pytest.raises(BackendError, match="training shape of the policy"):
        site.setup(infra_cfg=InfraConfig(training_shape_id="qwen3-8b-128k-h200"))
    assert site.asked() == []


def test_the_parts_of_the_earliest_guide(site):
    told, options = [], {"base_model": QWEN, "infra": InfraConfig(), "poll_interval_s": 0.02}
    serving = setup_deployment(site.deployments, SERVING, QWEN, InfraConfig(), on_status=told.append, poll_interval_s=0.02)
    policy = create_trainer_job(
        site.jobs, display_name="grpo-policy", hot_load_deployment_id="grpo-serving", on_status=told.append, **options
    )
    flags = ["--forward-only", "--no-compile"]
    reference = create_trainer_job(site.jobs, display_name="grpo-reference", extra_args=flags, **options)
    assert serving.inference_model == "accounts/local/deployments/grpo-serving"
    job = site.jobs.get(reference.job_id)
    assert job["forwardOnly"] is True
    assert job["trainingConfig"]["extraArgs"] == ["--no-compile"]
    assert [s.role for s in told if s.state in ("ready", "running")] == ["deployment", "policy"]
    client = FiretitanServiceClient(base_url=policy.base_url, api_key=site.key).create_training_client(base_model=QWEN)
    out = client.forward([fw.as_sdk_datum(d) for d in DATUMS], "cross_entropy").result()
    assert len(out.loss_fn_outputs) == 2
    assert create_trainer_job(site.jobs, job_id=policy.job_id, **options).job_id == policy.job_id


# --- clients ------------------------------------------------------------------------------------------------------


def logprobs(client: ReconnectableClient) -> list[list[float]]:
    return [list(out["logprobs"].data) for out in client.forward(DATUMS, "cross_entropy").loss_fn_outputs]


def reward_everything(datums, policy_logprobs):
    return -sum((lp * lp.new_tensor(d.weights)).sum() for d, lp in zip(datums, policy_logprobs, strict=True)), {}


def train(client: ReconnectableClient) -> None:
    client.forward_backward_custom(DATUMS, reward_everything)
    client.optim_step(ADAM, grad_accumulation_normalization="num_loss_tokens")


def restart(site, job_id: str) -> None:
    "The trainer of a job starts again: what was in its memory is gone."
    emulated = site.running.emulator.site
    trainer_of(emulated, emulated.shelf.find(f"accounts/local/rlorTrainerJobs/{job_id}")).lose_memory()


def test_the_reference_is_never_trained(site):
    with cleanup_of(site) as cleanup:
        infra = site.setup(cleanup, needs_reference=True, needs_inference=False)
        for name in ("optim_step", "forward_backward", "forward_backward_custom"):
            with pytest.raises(BackendError, match="a call on a frozen model; expected forward"):
                {"optim_step": lambda: infra.reference.optim_step(ADAM)}.get(
                    name, lambda name=name: getattr(infra.reference, name)(DATUMS, reward_everything)
                )()
        assert logprobs(infra.reference) == logprobs(infra.policy)
        infra.close()


def test_a_frozen_trainer_is_reached_again_by_itself(site):
    with cleanup_of(site) as cleanup:
        infra = site.setup(cleanup, needs_reference=True, needs_inference=False)
        before = logprobs(infra.reference)
        restart(site, infra.reference_job_id)
        assert logprobs(infra.reference) == before
        assert infra.reference.reconnects == 1
        infra.close()


def test_what_a_trainer_had_learned_is_not_silently_lost(site):
    with cleanup_of(site) as cleanup:
        policy = site.setup(cleanup, infra_cfg=InfraConfig(training_shape_id=SHAPE), needs_inference=False).policy
        train(policy)
        restart(site, policy.job_id)
        with pytest.raises(BackendError, match="2 training calls since the last saved state went with .*start again"):
            logprobs(policy)
        policy.reconnect()
        train(policy)
        saved, learned = policy.save_state("learned"), logprobs(policy)
        restart(site, policy.job_id)
        assert logprobs(policy) == learned  # loaded again, since nothing was trained after it
        train(policy)
        restart(site, policy.job_id)
        with pytest.raises(BackendError, match=rf"reconnect\(\), then load_state_with_optimizer\('{saved.path}'\)"):
            policy.optim_step(ADAM)
        assert policy.reconnects == 2
        policy.close()


# --- endings ------------------------------------------------------------------------------------------------------

ENDINGS = """
import os, signal, sys, time
from fireworks.training.sdk import DeploymentManager, TrainerJobManager
from rl_notebook.backends.fireworks import *

runs, QWEN, SHAPE = sys.argv[1], sys.argv[2], sys.argv[3]
where = {"api_key": os.environ["FIREWORKS_API_KEY"], "base_url": os.environ["FIREWORKS_BASE_URL"]}


def ending(how):
    jobs, deployments = TrainerJobManager(**where), DeploymentManager(**where)
    deploy = DeployConfig(deployment_id=f"serving-{how}", tokenizer_model="tiny")
    cleanup = ResourceCleanup(jobs, deployments, 0, folder=f"{runs}/{how}")
    wishes = {"base_model": QWEN, "infra_cfg": InfraConfig(training_shape_id=SHAPE), "role_prefix": how}
    wishes |= {"rlor_mgr": jobs, "deploy_mgr": deployments, "deploy_cfg": deploy, "needs_inference": True}
    if how == "exit":  # nobody closes it
        setup_infra(**wishes, cleanup=cleanup, poll_interval_s=0.05)
        print(f"ready {how} {os.getpid()}", flush=True)
        sys.exit(0)
    with cleanup:
        setup_infra(**wishes, cleanup=cleanup, poll_interval_s=0.05)
        print(f"ready {how} {os.getpid()}", flush=True)
        if how == "exception":
            raise ValueError("the loop broke")
        time.sleep(60)


for how in ("exception", "exit", "interrupt", "terminate", "kill"):
    if os.fork() == 0:
        ending(how)
        sys.exit(0)
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
"""
SIGNALS = {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM, "kill": signal.SIGKILL}


def test_every_ending_but_kill_gives_everything_back_and_kill_leaves_a_list(site, tmp_path):
    env = os.environ | site.running.environment() | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", ENDINGS, str(tmp_path), QWEN, SHAPE]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        ready = {}
        while len(ready) < 5:
            _, how, pid = process.stdout.readline().split()
            ready[how] = int(pid)
        with pytest.raises(BackendError, match="a list that a running backend owns"):
            leftovers(tmp_path / "kill")
        for how, number in SIGNALS.items():
            os.kill(ready[how], number)
        errors = process.stderr.read()
    assert "ValueError: the loop broke" in errors
    assert "KeyboardInterrupt" in errors
    assert site.key not in errors
    shelf = site.running.emulator.site.shelf
    states = {j.name.split("/")[-1].split("-")[0]: j.state(time.time()) for j in shelf.all("rlorTrainerJobs")}
    assert states.pop("kill") == "JOB_STATE_RUNNING"
    assert states == dict.fromkeys(("exception", "exit", "interrupt", "terminate"), "JOB_STATE_CANCELLED")
    assert {how: site.most_replicas(f"serving-{how}") for how in ready} == dict.fromkeys(ready, 0) | {"kill": 1}
    assert [how for how in ready if leftovers(tmp_path / how)] == ["kill"]

    left = leftovers(tmp_path / "kill")
    assert [(r.role, r.action) for r in left] == [("policy", "cancel"), ("deployment", "scale_to_zero")]
    listed = (tmp_path / "kill" / "resources.json").read_text()
    assert json.loads(listed)["format"] == 1
    assert site.key not in listed
    with pytest.raises(BackendError, match=r"(?s)leftover='attach'.*leftover='clean'.*curl .*:cancel"):
        fw.settle_leftovers(tmp_path / "kill", "error", fw.Secret(site.key))
    found = fw.settle_leftovers(tmp_path / "kill", "attach", fw.Secret(site.key))
    assert found["policy"].id == left[0].id
    gone = clean_leftovers(tmp_path / "kill", key=site.key)
    assert [r.role for r in gone] == ["deployment", "policy"]
    assert site.state(left[0].id) == "CANCELLED"
    assert site.most_replicas("serving-kill") == 0
    assert leftovers(tmp_path / "kill") == []


def test_what_cannot_be_given_back_is_said_with_its_command_and_stays_on_the_list(tmp_path):
    with start_emulator() as running:
        site = Site(running)
        cleanup = cleanup_of(site, folder=tmp_path)
        infra = site.setup(cleanup)
        infra.close()
    with pytest.warns(RuntimeWarning, match="still runs and costs") as warned:
        left = cleanup.close()
    assert [r.role for r in left] == ["policy", "deployment"]
    assert left == leftovers(tmp_path)
    text = "\n".join(str(w.message) for w in warned)
    assert f"-H \"X-Api-Key: $FIREWORKS_API_KEY\" '{site.url}/v1/{left[0].name}:cancel'" in text
    assert site.key not in text
    assert not fw.OPEN_CLEANUPS


def test_a_resource_that_is_gone_or_stopped_counts_as_given_back(site):
    cleanup = cleanup_of(site)
    job = create_trainer_job(site.jobs, base_model=QWEN, infra=InfraConfig(), cleanup=cleanup, poll_interval_s=0.02)
    cleanup.trainer("never-made")
    site.jobs._post(f"/v1/accounts/local/rlorTrainerJobs/{job.job_id}:cancel")
    assert cleanup.close() == []


def test_deleting_is_an_action_too(site):
    with cleanup_of(site) as cleanup:
        job = create_trainer_job(site.jobs, base_model=QWEN, infra=InfraConfig(), poll_interval_s=0.02)
        cleanup.delete_trainer(job.job_id)
        setup_deployment(site.deployments, SERVING, QWEN, poll_interval_s=0.02)
        cleanup.deployment("grpo-serving", action="delete")
        with pytest.raises(ConfigError, match="got 'explode'"):
            cleanup.deployment("grpo-serving", action="explode")
    assert site.deployments.get("grpo-serving") is None
    assert site.jobs.try_get(job.job_id) is None or site.state(job.job_id) == "DELETED"
