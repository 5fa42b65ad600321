"The emulator: control plane and dropped connections, asked by hand, by the real Fireworks SDK, and as a process."

from __future__ import annotations

import asyncio
import importlib
import json
import math
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from injected_faults import Fault, FaultyEmulator

from rl_notebook.emulator.access import KEY_VARIABLE
from rl_notebook.emulator.service import RunningEmulator, start_emulator
from rl_notebook.emulator.testing import emulator, emulator_fixture  # noqa: F401  (the fixture)
from rl_notebook.cli import main
from rl_notebook.core.types import ConfigError
from rl_notebook.task.models import load_model

sdk = pytest.importorskip("fireworks.training.sdk")

MODEL = "accounts/fireworks/models/qwen3-8b"
SHAPE = "accounts/fireworks/trainingShapes/qwen3-8b-policy"
JOBS = "/v1/accounts/local/rlorTrainerJobs"
DEPLOYMENTS = "/v1/accounts/local/deployments"
WANTED = {"trainingConfig": {"baseModel": MODEL, "loraRank": 0}}
FAST = {"poll_interval_s": 0.02}

shared = emulator_fixture(scope="module")


def by_hand(running: RunningEmulator, **more: Any) -> httpx.Client:
    "A client that shows the key."
    return httpx.Client(
        base_url=running.url, headers={"X-Api-Key": running.key.reveal()}, timeout=60, **more
    )


@pytest.fixture
def http(shared: RunningEmulator) -> Iterator[httpx.Client]:
    "A client of the shared emulator."
    with by_hand(shared) as client:
        yield client


class Managers:
    "The SDK's managers, and the clients of trainers, of one emulator."

    def __init__(self, running: RunningEmulator):
        self.access = {"api_key": running.key.reveal(), "base_url": running.url}
        self.trainers = sdk.TrainerJobManager(**self.access)
        self.deployments = sdk.DeploymentManager(**self.access)
        self.services: list[Any] = []

    def policy(self, base_url: str, **options: Any) -> Any:
        "A training client of the trainer at an address."
        service = sdk.FiretitanServiceClient(base_url=base_url, api_key=self.access["api_key"])
        self.services.append(service)
        return service.create_training_client(base_model=MODEL, **options)

    def job(self, id: str, **options: Any) -> Any:
        "A trainer that runs."
        return self.trainers.create_and_wait(
            sdk.TrainerJobConfig(base_model=MODEL, requested_job_id=id, **options), **FAST
        )

    def deployment(self, id: str, **options: Any) -> Any:
        "A deployment that is ready."
        self.deployments.create_or_get(
            sdk.DeploymentConfig(deployment_id=id, base_model=MODEL, **options)
        )
        return self.deployments.wait_for_ready(id, **FAST)

    def close(self) -> None:
        for opened in (*self.services, self.trainers, self.deployments):
            opened.close()


@pytest.fixture
def managers(shared: RunningEmulator) -> Iterator[Managers]:
    "The SDK's managers on the shared emulator."
    result = Managers(shared)
    yield result
    result.close()


def datum(tokens: tuple[int, ...] = (5, 6, 7, 2)) -> Any:
    "One datum of the SDK."
    n = len(tokens) - 1
    target = sdk.TensorData(data=list(tokens[1:]), dtype="int64", shape=[n])
    weights = sdk.TensorData(data=[1.0] * n, dtype="float32", shape=[n])
    return sdk.Datum(
        model_input=sdk.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={"target_tokens": target, "weights": weights},
    )


def loss_of(policy: Any) -> float:
    "The loss of the datum under the policy as it is."
    return policy.forward([datum()], "cross_entropy").result().metrics["loss:sum"]


def learn(policy: Any, steps: int = 1) -> None:
    "Some updates on one datum."
    for _ in range(steps):
        policy.forward_backward([datum()], "cross_entropy").result()
        policy.optim_step(sdk.AdamParams(learning_rate=1e-4)).result()


# --- who may call -----------------------------------------------------------------------------------------------------


PLACES = {
    "/v1/accounts": "message",
    f"{JOBS}/x": "message",
    "/inference/v1/completions": "error",
    "/hot_load/v1/models/hot_load": "error",
    "/training/v1/rlorTrainerJobs/local/x/api/v1/get_server_capabilities": "detail",
    "/api/v1/get_server_capabilities": "detail",
    "/v1/models": "error",
    "/emulator/v1/status": "detail",
}


@pytest.mark.parametrize("path", PLACES)
def test_every_address_needs_the_key(shared: RunningEmulator, path: str) -> None:
    for headers in (
        {},
        {"X-Api-Key": ""},
        {"X-Api-Key": "wrong"},
        {"Authorization": "Bearer wrong"},
    ):
        response = httpx.get(shared.url + path, headers=headers)
        assert response.status_code == 401
        assert PLACES[path] in response.json()
        assert shared.key.reveal() not in response.text


def test_another_host_name_is_rejected(http: httpx.Client) -> None:
    assert http.get("/v1/accounts", headers={"Host": "rebound.example:8600"}).status_code == 403


def test_the_key_comes_from_the_environment_and_shows_itself_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "not-a-real-key-1")
    with start_emulator() as running, by_hand(running) as client:
        assert running.key.reveal() == "not-a-real-key-1"
        client.post(f"{JOBS}?rlorTrainerJobId=policy", json=WANTED)
        files = [
            p.read_text(errors="replace") for p in running.emulator.folder.rglob("*") if p.is_file()
        ]
        assert files
        shown = [repr(running), repr(running.emulator.app), repr(running.emulator.log), *files]
        shown.append(client.get("/emulator/v1/status").text)
        assert not any("not-a-real-key" in text for text in shown)
    for bad in ("", "short", "with space in it", "with\nnewline"):
        with pytest.raises(ConfigError, match="8 or more"):
            start_emulator(key=bad)


def test_ids_cannot_leave_their_folder(tmp_path: Path) -> None:
    trainer = "accounts/local/rlorTrainerJobs/../x"
    with start_emulator(folder=tmp_path / "emulator") as running, by_hand(running) as client:
        before = set(tmp_path.rglob("*"))
        for id in ("..", "../../x", "%2e%2e%2fx", "a.b", "A", "-a", "a" * 64, "a\x00b", "ä"):
            for path, query in ((JOBS, "rlorTrainerJobId"), (DEPLOYMENTS, "deploymentId")):
                response = client.post(path, params={query: id}, json=WANTED | {"baseModel": MODEL})
                assert response.status_code == 400
                assert "lower-case" in response.json()["message"]
            model = {"output_model": f"accounts/local/models/{id}", "trainer_job_id": trainer}
            assert (
                client.post("/v1/accounts/local/checkpoints/x:promote", json=model).status_code
                == 404
            )
            bucket = {"baseModel": MODEL, "hotLoadTrainerJob": trainer}
            assert client.post(f"{DEPLOYMENTS}?deploymentId=x", json=bucket).status_code == 400
        assert set(tmp_path.rglob("*")) == before


# --- jobs and deployments over time -----------------------------------------------------------------------------------


def test_a_restart_finds_jobs_deployments_and_checkpoints(tmp_path: Path) -> None:
    with start_emulator(folder=tmp_path) as running:
        managers = Managers(running)
        policy = managers.policy(managers.job("policy").base_url)
        learn(policy)
        trained = loss_of(policy)
        policy.save_state("step-1").result()
        managers.deployment("serving", hot_load_trainer_job="accounts/local/rlorTrainerJobs/policy")
        managers.close()
    with start_emulator(folder=tmp_path) as running:
        managers = Managers(running)
        assert (
            managers.deployments.get("serving").hot_load_trainer_job
            == "accounts/local/rlorTrainerJobs/policy"
        )
        endpoint = managers.trainers.wait_for_existing("policy", **FAST)
        assert [
            r["name"].rsplit("/", 1)[1] for r in managers.trainers.list_checkpoints("policy")
        ] == ["step-1"]
        policy = managers.policy(endpoint.base_url)
        assert loss_of(policy) != pytest.approx(trained, rel=1e-3)  # memory is lost: a fresh model
        policy.load_state_with_optimizer("step-1").result()
        assert loss_of(policy) == pytest.approx(trained, rel=1e-6)
        managers.close()


# --- lost connections -----------------------------------------------------------------------------------------------------------


def test_a_dropped_connection_is_closed_and_not_an_error() -> None:
    for kind, status in (("drop_before", 404), ("drop_after", 200)):
        with (
            FaultyEmulator([Fault(kind, times=1, path=JOBS)]) as running,
            by_hand(running) as client,
        ):
            with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
                client.post(f"{JOBS}?rlorTrainerJobId=policy", json=WANTED)
            assert client.get(f"{JOBS}/policy").status_code == status
            assert running.faults.log == [(kind, f"POST {JOBS}")]
            assert running.emulator.log[0].status is None


def test_a_model_at_hand_is_served() -> None:
    model, tokenizer = load_model("tiny")
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    with start_emulator((model, tokenizer)) as running, by_hand(running) as client:
        body = {
            "model": MODEL,
            "prompt": [5, 6, 7],
            "max_tokens": 1,
            "echo": True,
            "logprobs": True,
        }
        response = client.post("/inference/v1/completions", json=body).json()
        flat = -math.log(model.config.vocab_size)
        assert response["choices"][0]["logprobs"]["content"][1]["logprob"] == pytest.approx(
            flat, abs=1e-5
        )
        assert client.get("/emulator/v1/status").json()["model"] == "given"


# --- what programs of others send -------------------------------------------------------------------------------------


def datum_with_masks(tokens: list[int], prompt: int, *names: str) -> Any:
    "A datum of a recipe: targets, and by each name which of them the model sampled itself."
    n = len(tokens) - 1
    mask = [float(i >= prompt - 1) for i in range(n)]
    inputs = {name: sdk.TensorData(data=mask, dtype="float32", shape=[n]) for name in names}
    inputs["target_tokens"] = sdk.TensorData(data=tokens[1:], dtype="int64", shape=[n])
    return sdk.Datum(model_input=sdk.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def test_a_step_of_the_managed_kind_with_a_reference_and_its_masks(shared: RunningEmulator) -> None:
    "The calls of a GRPO recipe on resources that the SDK provisions itself, each field of its datums among them."
    torch.manual_seed(0)
    service = sdk.FiretitanServiceClient.from_firetitan_config(
        api_key=shared.environment()["FIREWORKS_API_KEY"], base_url=shared.url, base_model=MODEL, lora_rank=0,
        tokenizer_model="tiny", training_shape_id=SHAPE, reference_required=True, create_deployment=True,
        replica_count=1, learning_rate=1e-5, hotload_timeout_s=60, cleanup_trainer_on_close=True,
        cleanup_deployment_on_close=sdk.CLEANUP_DEPLOYMENT_ON_CLOSE_SCALE_TO_ZERO,
    )  # fmt: skip
    try:
        policy = service.create_training_client(MODEL, lora_rank=0)
        reference = service.create_reference_client(policy_client=policy)
        sampler = service.create_deployment_sampler(tokenizer=load_model("tiny")[1])
        service.hotload_sampler_snapshot(policy.save_weights_for_sampler("step-0").result().path)
        options = {
            "n": 2,
            "max_tokens": 4,
            "temperature": 1.0,
            "logprobs": True,
            "top_p": 1.0,
            "top_k": 0,
        }
        sampled = asyncio.run(sampler.sample_with_prompt_tokens([5, 6, 7], **options))
        sequences = [(c.full_tokens, c.prompt_len) for c in sampled]
        scored = {}
        for names in ((), ("loss_mask",), ("mask",), ("weights",), ("weights", "loss_mask")):
            data = [datum_with_masks(tokens, prompt, *names) for tokens, prompt in sequences]
            output = reference.forward(data, "cross_entropy").result()
            scored[names] = (
                [o["logprobs"].data for o in output.loss_fn_outputs],
                output.metrics["loss:sum"],
            )
        # a mask decides what counts, not what is scored
        assert all(lps == scored[()][0] for lps, _ in scored.values())
        assert (
            len({round(loss, 4) for names, (_, loss) in scored.items() if names})
            == 1
            < scored[()][1]
        )
        data = [datum_with_masks(tokens, prompt, "weights") for tokens, prompt in sequences]

        def loss_fn(
            datums: list[Any], logprobs: list[Any]
        ) -> tuple[torch.Tensor, dict[str, float]]:
            kl = sum(
                (lp - torch.tensor(ref)).sum()
                for lp, ref in zip(logprobs, scored[()][0], strict=True)
            )
            return -logprobs[0].sum() + logprobs[1].sum() + 0.001 * kl, {"mean_kl": kl.item()}

        output = policy.forward_backward_custom(data, loss_fn).result()
        # policy and reference are still the same
        assert output.metrics["mean_kl"] == pytest.approx(0.0, abs=1e-4)
        policy.optim_step(
            sdk.AdamParams(learning_rate=1e-3), grad_accumulation_normalization=None
        ).result()
        service.hotload_sampler_snapshot(policy.save_weights_for_sampler("step-1").result().path)
        after = asyncio.run(sampler.sample_with_prompt_tokens([5, 6, 7], **options, echo=True))[0]
        again = policy.forward(
            [datum_with_masks(after.full_tokens, 3, "loss_mask")], "cross_entropy"
        ).result()
        gap = torch.tensor(again.loss_fn_outputs[0]["logprobs"].data) - torch.tensor(
            after.inference_logprobs
        )
        assert gap.abs().max() < 1e-4  # the deployment serves what the trainer learned
        policy.save_state("step-1").result()
        kinds = {row["checkpointType"] for row in service.list_checkpoints(service.trainer_job_id)}
        assert "CHECKPOINT_TYPE_TRAINING" in kinds
        assert len(kinds) > 1
    finally:
        service.close()


# --- as a process -----------------------------------------------------------------------------------------------------


def emulate(*args: str, folder: Path) -> subprocess.Popen[str]:
    "`rl-notebook emulate` in a separate process."
    code = "import sys; from rl_notebook.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "emulate", "--port", "0", "--folder", str(folder), *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def printed_variables(process: subprocess.Popen[str]) -> dict[str, str]:
    "The variables that it prints for its user to set."
    assert process.stdout is not None
    result: dict[str, str] = {}
    for line in process.stdout:
        if match := re.fullmatch(r"export (\w+)=(\S+)\n", line):
            result[match[1]] = match[2]
        if "Ctrl-C" in line:
            return result
    raise AssertionError(process.communicate()[1])


def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    process = emulate("--startup-delay", "0.1", folder=tmp_path)
    try:
        variables = printed_variables(process)
        names = ("FIREWORKS", "TINKER", "OPENAI")
        assert set(variables) == {f"{n}_{part}" for n in names for part in ("BASE_URL", "API_KEY")}
        assert variables["TINKER_API_KEY"].startswith("tml-")
        key = {"X-Api-Key": variables["FIREWORKS_API_KEY"]}
        with httpx.Client(base_url=variables["FIREWORKS_BASE_URL"], headers=key) as client:
            assert client.get("/v1/accounts").json()["accounts"][0]["name"] == "accounts/local"
            job = client.post(f"{JOBS}?rlorTrainerJobId=policy", json=WANTED).json()
            assert job["state"] in ("JOB_STATE_PENDING", "JOB_STATE_CREATING")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
        assert (process.returncode, err) == (0, "")
        assert out.strip() == "emulator: stopped"
        assert (
            json.loads((tmp_path / "control/rlorTrainerJobs/policy.json").read_text())["goal"]
            == "JOB_STATE_RUNNING"
        )
    finally:
        with suppress(ProcessLookupError):
            process.kill()


@pytest.mark.parametrize("args", [["--startup-delay", "-1"], ["--model", "no-such-model"]])
def test_the_command_rejects_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str]
) -> None:
    assert main(["emulate", "--port", "0", "--folder", str(tmp_path / "emulator"), *args]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("rl-notebook emulate: ")
    assert err.count("\n") == 1
    assert out == ""


def test_without_a_package_of_the_extra_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name for name in sys.modules if name.split(".")[0] in ("rl_notebook", "starlette")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette", None)
    with pytest.raises(
        ImportError, match=r"the emulator(?s:.*)pip install 'rl-notebook\[emulator\]'"
    ):
        importlib.import_module("rl_notebook.emulator.service")
