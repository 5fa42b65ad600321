"The emulated trainer over real HTTP: order, refusals, losses, divisors, snapshots."

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from tiny_models import byte_tokenizer, one_thread, tiny_model

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from live_server import serve
from starlette.applications import Starlette

from rl_notebook.emulator import trainer as trainer_module
from rl_notebook.emulator.messages import ON_ERROR, SERVED_LOSSES, Batch
from rl_notebook.emulator.messages import served_datum, served_loss
from rl_notebook.emulator.models import Models, Serving, Snapshots
from rl_notebook.emulator.trainer import EmulatedTrainer
from rl_notebook.core.types import BackendError, Datum

__all__ = ["one_thread"]


ADAM = {
    "learning_rate": 1e-2,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.01,
    "grad_clip_norm": 5.0,
}
BASE = "accounts/fireworks/models/any"


def new_models() -> Models:
    return Models((tiny_model(), byte_tokenizer()))


class Running:
    "A trainer with a real HTTP server, in a thread."

    def __init__(self, folder: Path, middleware=lambda app: app, **options):
        self.trainer = EmulatedTrainer(
            new_models(), Snapshots(folder / "snapshots"), folder, **options
        )
        self.served = contextlib.ExitStack()
        self.url = self.served.enter_context(
            serve(middleware(Starlette(routes=self.trainer.routes(), exception_handlers=ON_ERROR)))
        )
        self.http = self.served.enter_context(
            httpx.Client(base_url=f"{self.url}/api/v1", timeout=120)
        )

    def post(self, path: str, body: dict, status: int = 200, **headers) -> dict:
        response = self.http.post(
            path, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )
        assert response.status_code == status, response.text
        return response.json()

    def result(self, path: str, body: dict, **headers) -> dict:
        "Hand in and fetch."
        return self.fetch(self.post(path, body, **headers)["request_id"])

    def fetch(self, request_id: str) -> dict:
        "The result of a request, however long it takes."
        while (result := self.post("retrieve_future", {"request_id": request_id})).get(
            "type"
        ) == "try_again":
            pass
        return result

    def model(self, sdk_version: str = "0.23.0", **lora) -> str:
        session = self.post("create_session", {"sdk_version": sdk_version, "tags": []})[
            "session_id"
        ]
        body = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": BASE,
            "lora_config": {"rank": 0, **lora},
        }
        return self.result("create_model", body)["model_id"]

    def close(self) -> None:
        self.trainer.lose_memory()
        self.served.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    service = Running(tmp_path_factory.mktemp("service"), name="job-1")
    yield service
    service.close()


@pytest.fixture
def start_service(tmp_path):
    "A function that starts services for this test alone."
    with contextlib.ExitStack() as stack:

        def start(folder: Path = tmp_path, **options) -> Running:
            service = Running(folder, **options)
            stack.callback(service.close)
            return service

        yield start


# What is trained, in our words and on the wire


def three_datums(seed: int) -> list[Datum]:
    rng = np.random.default_rng(seed)
    datums = []
    for i in range(3):
        n = int(rng.integers(4, 24))
        weights = (np.arange(n - 1) >= n // 3).astype(float)
        datums.append(
            Datum(rng.integers(0, 255, n), weights, advantage=float(rng.normal()), sample=i)
        )
    return datums


def wire_datum(d: Datum, **series) -> dict:
    def tensor(values, dtype):
        return {"data": np.asarray(values).tolist(), "dtype": dtype, "shape": [len(values)]}

    inputs = {"target_tokens": tensor(d.target_tokens, "int64")}
    inputs |= {
        k: tensor(v, "float32")
        for k, v in ({"weights": d.weights} | series).items()
        if v is not None
    }
    chunk = {"type": "encoded_text", "tokens": d.input_tokens.tolist()}
    return {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": inputs}


def pass_body(
    model_id: str, seq_id: int, datums: list[dict], loss_fn: str = "cross_entropy", **more
) -> dict:
    part = {"data": datums, "loss_fn": loss_fn, **more}
    return {"model_id": model_id, "seq_id": seq_id, "forward_backward_input": part}


def step_body(model_id: str, seq_id: int, normalization: str | None = None) -> dict:
    more = {"grad_accumulation_normalization": normalization} if normalization else {}
    return {
        "model_id": model_id,
        "seq_id": seq_id,
        "adam_params": ADAM,
        "type": "optim_step",
        **more,
    }


# The Tinker SDK


@pytest.fixture(scope="module")
def tinker():
    return pytest.importorskip("tinker", reason="the tinker extra is not installed")


@pytest.fixture
def tinker_service(tinker, running):
    return tinker.ServiceClient(base_url=running.url, api_key="tml-test")


def tinker_datums(tinker, datums: list[Datum]) -> list:
    def one(d: Datum):
        inputs = {"target_tokens": d.target_tokens, "weights": d.weights.astype(np.float32)}
        prompt = tinker.types.ModelInput.from_ints(d.input_tokens.tolist())
        return tinker.types.Datum(model_input=prompt, loss_fn_inputs=inputs)

    return [one(d) for d in datums]


def test_a_batch_in_pieces_is_one_batch(tinker_service, tinker):
    # the SDK cuts at 1024
    whole = [Datum([i % 250, (7 * i) % 250, 3], [1.0, 1.0]) for i in range(1100)]
    client = tinker_service.create_lora_training_client("any", rank=2, seed=0).result()
    out = client.forward_backward(tinker_datums(tinker, whole), "cross_entropy").result()
    assert len(out.loss_fn_outputs) == len(whole)
    total = -sum(sum(o["logprobs"].data) for o in out.loss_fn_outputs)
    assert out.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    metrics = client.optim_step(tinker.types.AdamParams(**ADAM)).result().metrics
    assert (metrics["num_sequences"], metrics["num_loss_tokens"]) == (1100, 2200)


# Order, and each once


# What is rejected


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: d["loss_fn_inputs"].pop("target_tokens"), "target_tokens"),
        (lambda d: d["loss_fn_inputs"]["weights"]["data"].append(1.0), "reshape"),
        (lambda d: d["loss_fn_inputs"]["weights"].update(dtype="int8"), "'int8'"),
        (lambda d: d["loss_fn_inputs"].update(reward=d["loss_fn_inputs"]["weights"]), "reward"),
        (lambda d: d["model_input"]["chunks"][0].update(type="image"), "'image'"),
        (lambda d: d["model_input"].clear(), "chunks"),
        (lambda d: d["loss_fn_inputs"]["weights"].update(sparse_crow_indices=[0]), "sparse"),
        (
            lambda d: d["loss_fn_inputs"]["target_tokens"]["data"].__setitem__(0, 100_000),
            "datum 0, target_tokens",
        ),
    ],
)
def test_a_wrong_datum_fails_its_own_request_only(running, change, text):
    model_id = running.model()
    datum = wire_datum(three_datums(0)[0])
    change(datum)
    failed = running.result("forward_backward", pass_body(model_id, 1, [datum]))
    assert failed["category"] == "user"
    assert text in failed["error"]
    good = running.result(
        "forward_backward", pass_body(model_id, 2, [wire_datum(three_datums(0)[0])])
    )
    assert "loss:sum" in good["metrics"]


def test_names_cannot_leave_the_folder(running):
    model_id = running.model()
    other = running.model("0.38.0")
    names = ["..", "a/b", "/etc", "a\\b", "", "A" * 200, None, ".hidden"]
    for seq_id, name in enumerate(names, 1):
        for who in (model_id, other):
            failed = running.result(
                "save_weights", {"model_id": who, "seq_id": seq_id, "path": name}
            )
            assert failed["category"] == "user", (name, failed)
    paths = ["cross_job://../x", "tinker://a/weights/../..", "a/../b", "tinker://x"]
    for seq_id, path in enumerate(paths, len(names) + 1):
        body = {"model_id": other, "seq_id": seq_id, "path": path, "optimizer": True}
        assert running.result("load_weights", body)["category"] == "user"


# Losses, divisors, snapshots


@pytest.mark.parametrize("normalization", [None, "none", "num_loss_tokens", "num_sequences"])
def test_the_gradient_is_divided_by_what_has_a_dlogprob(running, normalization):
    model_id = running.model()
    datums = three_datums(5)
    series = [d.weights for d in datums]
    series[1] = np.zeros_like(series[1])
    wire = [wire_datum(d, weights=w) for d, w in zip(datums, series, strict=True)]
    running.post("forward_backward", pass_body(model_id, 1, wire))
    metrics = running.result("optim_step", step_body(model_id, 2, normalization))["metrics"]
    tokens = sum(int(w.sum()) for w in series)
    assert (metrics["num_loss_tokens"], metrics["num_sequences"]) == (tokens, 2)
    whole = running.model()
    running.post("forward_backward", pass_body(whole, 1, wire))
    plain = running.result("optim_step", step_body(whole, 2))["metrics"]["grad_norm"]
    divisor = {"num_loss_tokens": tokens, "num_sequences": 2}.get(normalization, 1)
    assert metrics["grad_norm"] == pytest.approx(plain / divisor, rel=1e-5)


def by_hand(name: str, p: np.ndarray, q: np.ndarray, a: np.ndarray, on: np.ndarray) -> float:
    "The documented formulas, over the positions that count."
    r = np.exp(p - q)
    if name == "gspo":
        r = np.full_like(r, np.exp((p - q)[on].mean()))
    clipped = {"dapo": (0.8, 1.28), "cispo": (0.8, 1.28)}.get(name, (0.8, 1.2))
    terms = {
        "cross_entropy": -p,
        "importance_sampling": -r * a,
        "reinforce": -r * a,
        "cispo": -np.clip(r, *clipped) * p * a,
        "dro": -(p * a - 0.025 * (p - q) ** 2),
    }.get(name, -np.minimum(r * a, np.clip(r, *clipped) * a))
    return float(terms[on].sum())


@pytest.mark.parametrize("name", SERVED_LOSSES)
@pytest.mark.parametrize("masked", [False, True])
def test_every_served_loss_is_its_formula(name, masked):
    rng = np.random.default_rng(1)
    p = rng.normal(-2, 0.5, 9)
    q = rng.normal(-2, 0.5, 9)
    mask = np.array([0, 0, 0, 1, 1, 1, 1, 0, 1.0])
    a = np.where(mask > 0, 1.5, 0.0)
    inputs = {"target_tokens": np.arange(9), "logprobs": q, "advantages": a} | (
        {"weights": mask} if masked else {}
    )
    if name == "cross_entropy":
        inputs = {"target_tokens": np.arange(9), "weights": mask}
    datum = served_datum(np.arange(9), inputs)
    series = torch.tensor(p, dtype=torch.float32, requires_grad=True)
    loss, _ = served_loss(Batch((datum,), name))((datum,), [series])
    assert loss.item() == pytest.approx(by_hand(name, p, q, a, mask > 0), rel=1e-5)
    loss.backward()
    assert series.grad[mask == 0].abs().max() == 0
    assert series.grad[mask > 0].abs().min() > 0 or name in ("ppo", "dapo", "gspo")


def test_a_merged_snapshot_serves_what_the_adapter_serves(running):
    model_id = running.model(rank=3, seed=2)
    running.post(
        "forward_backward", pass_body(model_id, 1, [wire_datum(d) for d in three_datums(0)])
    )
    running.post("optim_step", step_body(model_id, 2))
    for seq_id, kind in ((3, "base"), (4, "merged_base")):
        body = {
            "model_id": model_id,
            "seq_id": seq_id,
            "path": f"lora-{seq_id}",
            "checkpoint_type": kind,
        }
        assert running.result("save_weights_for_sampler", body)["path"] == f"lora-{seq_id}"

    async def scores(name: str) -> np.ndarray:
        weights, page = running.trainer.snapshots.load(name)
        serving = Serving(new_models(), page["lora_rank"])
        assert await serving.swap(name, weights) == 1
        scored = await serving.backend.sampler.logprobs([5, 6, 7, 8])
        with pytest.raises(BackendError, match="do not fit"):
            await serving.swap("other", {"w": torch.zeros(1)})
        await serving.close()
        return scored.values

    np.testing.assert_allclose(
        asyncio.run(scores("lora-3")), asyncio.run(scores("lora-4")), atol=1e-5
    )


def test_unnamed_snapshots_do_not_pile_up(running, monkeypatch):
    monkeypatch.setattr(trainer_module, "KEPT_UNNAMED", 2)
    model_id = running.model("0.38.0", rank=2)
    for seq_id in range(1, 5):
        body = {
            "model_id": model_id,
            "seq_id": seq_id,
            "path": None,
            "sampling_session_seq_id": seq_id,
        }
        assert ":sample:" in running.result("save_weights_for_sampler", body)["sampling_session_id"]
    mine = [
        n for n in running.trainer.snapshots.names() if n.startswith(model_id.replace(":", "."))
    ]
    assert [n.rpartition("-")[2] for n in mine] == ["3", "4"]
    assert [row for row in running.trainer.checkpoints() if row["run"] == model_id] == []


def test_sessions_that_share_one_model_do_not_mix_their_weights(start_service):
    service = start_service()
    model_id = service.model("0.38.0", rank=2, seed=4)
    samplers = []
    for k in range(3):
        service.post(
            "forward_backward",
            pass_body(model_id, 3 * k + 1, [wire_datum(d) for d in three_datums(k)]),
        )
        service.post("optim_step", step_body(model_id, 3 * k + 2))
        body = {
            "model_id": model_id,
            "seq_id": 3 * k + 3,
            "path": None,
            "sampling_session_seq_id": k,
        }
        samplers.append(service.result("save_weights_for_sampler", body)["sampling_session_id"])
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [40, 41, 42]}]}
    ask = {
        "prompt": prompt,
        "prompt_logprobs": True,
        "sampling_params": {"max_tokens": 4, "seed": 1},
    }

    def sample(job: tuple[int, int]) -> list:
        out = service.result(
            "asample", {**ask, "sampling_session_id": samplers[job[0]], "seq_id": job[1]}
        )
        return [out["sequences"][0]["tokens"], out["prompt_logprobs"][1:]]

    alone = [sample((k, 0)) for k in range(3)]
    assert len({tuple(logprobs) for _, logprobs in alone}) == 3
    jobs = [(k, n) for n in range(1, 4) for k in range(3)]
    with ThreadPoolExecutor(6) as pool:
        for (k, _), (tokens, logprobs) in zip(jobs, pool.map(sample, jobs), strict=True):
            assert tokens == alone[k][0]
            np.testing.assert_allclose(logprobs, alone[k][1], atol=1e-5)
