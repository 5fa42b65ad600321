"The Tinker backend: the journal under faults at any request, and the real SDK against an emulated service."

import asyncio
import sys
import time
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_server import serve
from starlette.applications import Starlette
from starlette.responses import RedirectResponse
from starlette.routing import Route
from tiny_models import byte_tokenizer, tiny_model
from tinker_run import PROMPT, reinforce, train_on_fixed
from toy_service import TOY, Dropped, Service

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.backends.services.link import (
    ENCODINGS,
    Limits,
    ServiceTrainer,
    SdkAdapter,
    label_of,
)
from rl_notebook.backends.services.link import state_name, version_in
from rl_notebook.backends.services.tinker import TinkerSampler, open_tinker, tinker_sdk
from rl_notebook.recipes.open import open_backend
from rl_notebook.config.config import Config
from rl_notebook.core.types import (
    AdamParams,
    BackendError,
    ConfigError,
    Datum,
    LossError,
    MissingExtra,
    SampleParams,
)
from rl_notebook.core.losses import LossOptions


KEY = "tml-not-to-be-seen"
ADAM = AdamParams(learning_rate=0.05)
DATUMS = [
    Datum([0, 1, 2, 3], [0, 1, 1], advantage=1.0),
    Datum([3, 2, 5], [1, 1], advantage=-0.5, sample=1),
    Datum([4, 4, 1, 0, 2], [0, 0, 1, 1], advantage=0.25, sample=2),
]


def trainer_of(service, **options) -> ServiceTrainer:
    return ServiceTrainer(
        service.connect, TOY, **{"pause_s": 0.0, "say": lambda line: None} | options
    )


def run(test):
    return asyncio.run(test)


# --- the journal, on a toy service -----------------------------------------------------------------------------------

TRAIN = st.tuples(
    st.just("train"),
    st.integers(0, 2),
    st.sampled_from(["none", "num_loss_tokens", "num_sequences"]),
)
OTHERS = st.one_of(
    st.tuples(st.just("backward"), st.integers(0, 2)),
    st.tuples(st.just("save"), st.sampled_from(["a", "b"])),
    st.tuples(st.just("load"), st.integers(0, 3)),
    st.tuples(st.just("load weights"), st.integers(0, 3)),
    st.tuples(st.sampled_from(["discard", "score", "refused"])),
)
SCRIPTS = st.lists(st.one_of(TRAIN, TRAIN, OTHERS), min_size=3, max_size=12)
FAULTS = st.dictionaries(
    st.integers(1, 40), st.sampled_from(["before", "after"]), min_size=2, max_size=8
)


async def run_script(operations, faults=(), **options):
    "Weights, logprobs, versions and metrics at the end of a script."
    service = Service(faults)
    paths = []
    metrics = []
    t = trainer_of(service, attempts=len(dict(faults)) + 2, **options)
    await t.open()
    for name, *what in operations:
        if name in ("backward", "train"):
            await t.forward_backward_custom(DATUMS[what[0] :], reinforce)
        if name == "train":
            metrics.append(await t.optim_step(ADAM, grad_accumulation_normalization=what[1]))
        elif name == "save":
            paths.append(await t.save_state(*what))
        elif name.startswith("load") and paths:
            await t.load_state(paths[what[0] % len(paths)], optimizer=name == "load")
        elif name == "discard":
            await t.discard_gradients()
        elif name == "score":
            await t.forward(DATUMS)
        elif name == "refused":
            await t.discard_gradients()
            await t.backward(DATUMS[:1], [np.array([0.0, 1.0, -0.5])])
            await t.backward([Datum([0, 9], [1])], [np.ones(1)])
            with pytest.raises(BackendError, match="rejected"):
                await t.optim_step(ADAM)
            await t.discard_gradients()
    scores = np.concatenate([lp.values for lp in await t.forward(DATUMS)])
    return (
        t.link.client.table,
        scores,
        (t.versions.current, t.versions.published, len(t.pending)),
        metrics,
        t,
    )


@settings(max_examples=40)
@given(SCRIPTS, FAULTS)
def test_faults_at_any_request_leave_the_same_weights(operations, faults):
    without = [("discard",) if name == "refused" else (name, *what) for name, *what in operations]
    table, scores, versions, metrics, _ = run(run_script(without))
    table_, scores_, versions_, metrics_, _ = run(run_script(operations, faults))
    assert np.array_equal(table, table_)
    assert np.array_equal(scores, scores_, equal_nan=True)
    assert versions == versions_
    assert metrics == metrics_


@settings(max_examples=25)
@given(SCRIPTS, st.integers(1, 3), st.sets(st.integers(0, 40)))
def test_a_journal_that_shortens_itself_changes_nothing(operations, length, faults):
    table, *_ = run(run_script(operations))
    table_, *_, t = run(
        run_script(operations, dict.fromkeys(faults, "after"), journal_steps=length)
    )
    assert np.array_equal(table, table_)
    assert len(t.journal.updates) < length


def test_a_gradient_on_the_service_is_not_sent_again():
    async def test():
        service = Service()
        t = ServiceTrainer(service.connect, replace(TOY, name="tinker"), pause_s=0.0)
        await t.open()
        before = service.requests
        await t.forward_backward_builtin(DATUMS, LossOptions())
        metrics = await t.optim_step(ADAM)
        assert service.requests == before + 2
        assert "forward_gap" not in metrics
        assert t.journal.updates[0].passes[0].sent_on is None
        # the step; then the pass has to be sent again, and is compared
        service.faults[service.requests + 1] = "before"
        await t.forward_backward_builtin(DATUMS, LossOptions())
        with pytest.warns(
            UserWarning, match="reconnected after Dropped: optim_step; repeated 1 update"
        ):
            assert (await t.optim_step(ADAM))["forward_gap"] < 1e-6

    run(test())


@pytest.mark.parametrize(
    ("metrics", "error", "text"),
    [
        ({"loss:sum": 7.0}, LossError, "the service's grpo: got 7, off by"),
        ({}, BackendError, "the service's value of its loss: got no metrics; expected loss:sum"),
    ],
)
def test_a_loss_of_the_service_that_is_another_one_leaves_nothing_behind(metrics, error, text):
    service = Service()

    def connect():
        client = service.connect()
        right = client.forward_backward

        def forward_backward(*args):
            future = right(*args)
            future.result().metrics = metrics
            return future

        client.forward_backward = forward_backward
        return client

    async def test():
        t = ServiceTrainer(connect, replace(TOY, name="tinker"))
        with pytest.raises(error, match=text):
            await t.forward_backward_builtin(DATUMS, LossOptions())
        assert t.link.client is None
        assert t.pending == []

    run(test())


def test_a_rejected_request_is_sent_once():
    async def test():
        service = Service()
        t = trainer_of(service)
        await t.forward(DATUMS)
        before = service.requests
        with pytest.raises(
            BackendError, match="toy rejected the request: got Refused: unknown token"
        ):
            await t.forward([Datum([0, 9], [1])])
        assert service.requests == before + 1
        with pytest.raises(BackendError, match=r"no state nowhere"):
            await t.load_state("nowhere")
        await t.forward_backward_custom(DATUMS, reinforce)
        await t.optim_step(ADAM)
        assert t.link.client.steps == 1

    run(test())


def test_a_path_that_cannot_be_loaded_changes_nothing():
    async def test():
        t = trainer_of(Service())
        await t.forward_backward_custom(DATUMS, reinforce)
        await t.optim_step(ADAM)
        await t.forward_backward_custom(DATUMS, reinforce)
        before = [lp.values for lp in await t.forward(DATUMS)]
        with pytest.raises(BackendError, match="rejected"):
            await t.load_state("nowhere")
        assert len(t.pending) == 1
        assert all(
            np.array_equal(a, b.values, equal_nan=True)
            for a, b in zip(before, await t.forward(DATUMS))
        )

    run(test())


def test_a_service_that_goes_away_and_returns_is_used_again():
    async def test():
        service = Service()
        t = trainer_of(service, attempts=3)
        await t.forward_backward_custom(DATUMS, reinforce)
        service.faults |= dict.fromkeys(range(service.requests, service.requests + 50), "before")
        with pytest.raises(
            BackendError, match=r"toy is lost: got Dropped.*within 3 attempts.*Call again"
        ) as caught:
            await t.optim_step(ADAM)
        assert isinstance(caught.value.__cause__, Dropped)
        service.faults.clear()
        await t.optim_step(ADAM)
        assert t.link.client.steps == 1

    run(test())


def test_a_loaded_state_has_no_gradient():
    async def test():
        t = trainer_of(Service())
        path = await t.save_state("a")
        await t.forward_backward_custom(DATUMS, reinforce)
        await t.load_state(path)
        with pytest.raises(BackendError, match="no accumulated gradient"):
            await t.optim_step(ADAM)

    run(test())


def test_a_cancelled_await_leaves_the_books_in_order():
    async def test():
        t = trainer_of(Service())
        await t.forward_backward_custom(DATUMS, reinforce)
        waiting = asyncio.ensure_future(t.optim_step(ADAM))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await t.forward(DATUMS)
        assert (len(t.journal.updates), len(t.pending), t.versions.published) in [
            (1, 0, False),
            (0, 1, True),
        ]
        assert t.link.client.steps == len(t.journal.updates)

    run(test())


def test_a_reconnect_is_one_line_of_warning():
    async def test():
        t = ServiceTrainer(Service({1: "after"}).connect, TOY, pause_s=0.0)
        with pytest.warns(UserWarning, match="^toy: reconnected after Dropped: forward$"):
            await t.forward(DATUMS)

    run(test())


def test_replaced_states_are_deleted_and_others_are_not():
    async def test():
        gone = []
        t = trainer_of(Service(), adapter=SdkAdapter(forget=gone.append))
        first, other, second = [await t.save_state(name) for name in ("undo-0", "kept", "undo-0")]
        assert gone == [first]
        assert len({first, other, second}) == 3
        for path in (other, second):
            await t.load_state(path)

    run(test())


# --- small parts -----------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.text(max_size=200), st.integers(0, 10**6), st.booleans(), st.integers(1, 10**6))
def test_names_of_states_carry_the_version(name, current, published, number):
    from rl_notebook.backends.local.scoring import Versions

    remote = state_name(label_of(name), Versions(current, current + 1, published), "0f3a", number)
    assert version_in(f"tinker://some-model/weights/{remote}") == (current, published)
    assert len(remote) <= 63
    assert remote.strip("-").replace("-", "a").isalnum()
    assert remote == remote.lower()


def test_versions_are_counted_as_locally():
    async def counted(policy, sync):
        history = []
        paths = []

        def versions():
            return (policy.versions.current, policy.versions.upcoming, policy.versions.published)

        for name in [
            "save",
            "step",
            "save",
            "sync",
            "step",
            "load 0",
            "sync",
            "load 1",
            "sync",
            "weights 0",
            "sync",
        ]:
            kind, _, which = name.partition(" ")
            if kind == "save":
                paths.append(await policy.save_state(f"s{len(paths)}"))
            elif kind == "step":
                await policy.forward_backward_custom(DATUMS, reinforce)
                await policy.optim_step(ADAM)
            elif kind == "sync":
                sync(policy)
            else:
                await policy.load_state(paths[int(which)], optimizer=kind == "load")
            history.append((name, versions()))
        return history

    async def test():
        async with open_local(tiny_model(), byte_tokenizer()) as local:
            local_versions = await counted(local.policy, lambda p: p.versions.publish())
        assert (
            await counted(trainer_of(Service()), lambda p: p.versions.publish()) == local_versions
        )

    run(test())


# --- the SDK against an emulated service -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def service(model, tmp_path_factory):
    from rl_notebook.emulator.service import start_emulator

    with start_emulator(model=model, folder=tmp_path_factory.mktemp("served"), key=KEY) as running:
        yield running


def open_toy_backend(service, **options):
    quick = {
        "probing": False,
        "conformance": "off",
        "pause_s": 0.02,
        "reference": False,
        "say": lambda line: None,
    }
    where = {
        "base_url": service.url,
        "key": KEY,
        "base_model": "a-model",
        "tokenizer": byte_tokenizer(),
    }
    return open_tinker(**{"lora_rank": 4} | where | quick | options)


def datums_of(completions) -> list[Datum]:
    def make(i, c):
        return Datum(
            c.full_tokens,
            [0] * (c.prompt_len - 1) + [1] * len(c.tokens),
            advantage=i - 1.5,
            sample=i,
        )

    return [make(i, c) for i, c in enumerate(completions)]


def test_probes_and_conformance_of_a_right_service(service):
    async def test():
        async with await open_toy_backend(
            service, probing=True, conformance="raise", reference=True
        ) as backend:
            assert not backend.checks.failed
            assert not backend.probes.failed
            assert backend.capabilities.max_seq_len == 256
            assert backend.capabilities.seed
            assert backend.policy.encoding == ENCODINGS[0]
            assert backend.sampler.raw_always
            shown = f"{backend.probes!r}{backend.checks._repr_html_()}{backend!r}"
            assert KEY not in shown

    run(test())


def test_the_likeliest_tokens_are_those_of_the_model(service):
    plain = SampleParams(n=2, max_tokens=5, seed=3, top_logprobs=4)

    async def test():
        async with await open_toy_backend(service, probing=True) as backend:
            for params in (plain, replace(plain, temperature=0.5)):
                for c in await backend.sampler.sample(PROMPT, params):
                    top = c.top_logprobs
                    assert top.distribution == ("sampling" if params is plain else "raw")
                    assert [len(pairs) for pairs in top] == [4] * len(c.tokens)
                    for i, pairs in enumerate(top):
                        for token, logprob in pairs:
                            text = [*PROMPT, *c.tokens[:i].tolist(), token]
                            scored = (await backend.sampler.logprobs(text)).values[-1]
                            assert abs(scored - logprob) < 1e-4

    run(test())


def test_a_service_that_loads_only_into_fresh_models_gets_one(model, monkeypatch):
    "As SkyRL 0.4, whose models take a state before anything else or not at all."
    from rl_notebook.emulator import trainer as its
    from rl_notebook.emulator.service import start_emulator

    used = set()
    rejected_loads = []

    def noting(name, ask):
        def noted(call):
            model_id = call.body.get("model_id") or call.body.get("forward_backward_input", {}).get(
                "model_id"
            )
            if name == "load_weights" and model_id in used:
                rejected_loads.append(model_id)
                raise its.Refusal(400, "load", got="LoadWeights is not permitted with seq_id 6")
            used.add(model_id)
            return ask(call)

        return noted

    for name in ("forward", "forward_backward", "optim_step", "save_weights", "load_weights"):
        monkeypatch.setitem(its.POSTS, name, noting(name, its.POSTS[name]))

    async def test(running):
        async with await open_toy_backend(running) as backend:
            before = await backend.policy.forward(DATUMS)
            state = await backend.policy.save_state("here")
            await backend.policy.forward_backward_custom(DATUMS, reinforce)
            await backend.policy.optim_step(ADAM)
            await backend.policy.load_state(state)
            after = await backend.policy.forward(DATUMS)
            assert all(
                np.array_equal(a.values, b.values, equal_nan=True)
                for a, b in zip(before, after, strict=True)
            )
        assert rejected_loads

    with start_emulator(model=model, key=KEY) as running:
        run(test(running))
        # no adapter is left behind
        assert not running.emulator.site.trainers["root"].memory.learners


def test_no_heartbeat_outlives_its_backend(model):
    from rl_notebook.emulator.service import start_emulator

    async def test(running):
        backend = await open_toy_backend(running, reference=True)
        completions = await backend.sampler.sample(PROMPT, SampleParams(n=1, max_tokens=2))
        await backend.reference.forward(datums_of(completions))
        services = [session.service for session in backend.close.args[3]]
        beats = [service.holder._session_heartbeat_task for service in services]
        assert len(beats) == 3  # of the policy, the sampler and the reference
        assert not any(beat.done() for beat in beats)
        await backend.close()
        deadline = time.monotonic() + 10
        while not all(beat.done() for beat in beats) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        assert all(beat.done() for beat in beats)

    with start_emulator(model=model, key=KEY) as running:
        run(test(running))


@pytest.mark.slow
def test_a_service_that_averages_trains_the_same(model, monkeypatch):
    from deviations import TINKER

    from rl_notebook.emulator.service import start_emulator

    async def test(running):
        async with await open_toy_backend(running, conformance="raise") as backend:
            assert backend.policy.encoding == ENCODINGS[2]
            async with open_local(tiny_model(), byte_tokenizer(), lora_rank=4) as local:
                pairs = zip(
                    await train_on_fixed(backend, 2), await train_on_fixed(local, 2), strict=True
                )
                assert max(np.nanmax(np.abs(a - b)) for a, b in pairs) < 1e-4

    TINKER["averaged"].plant(monkeypatch)
    with start_emulator(model=model, key=KEY) as running:
        run(test(running))


class ScriptedClient:
    "A sampling client without an end of text: it stops at the requested tokens, or nowhere."

    def __init__(self, stops):
        self.stops = stops
        self.requested = []
        self.line = [7, 8, 256, 9, 256, 10]

    def sample(self, prompt, n, params):
        stop = params.stop or []
        self.requested.append(stop)
        stop_lengths = [i + 1 for i, t in enumerate(self.line) if self.stops and t in stop]
        tokens = self.line[: min([params.max_tokens, *stop_lengths])]
        reason = "stop" if len(tokens) in stop_lengths else "length"
        logprobs = [-1.0 - i for i in range(len(tokens))]
        sequence = SimpleNamespace(tokens=tokens, logprobs=logprobs, stop_reason=reason)
        future = Future()
        future.set_result(SimpleNamespace(sequences=[sequence] * n))
        return future

    def compute_logprobs(self, tokens):
        future = Future()
        future.set_result([None, *(-float(i) for i in range(1, tokens.length))])
        return future


@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize(
    ("stop", "requested", "expected"),
    [
        ({}, [256], [7, 8, 256]),
        ({"stop": ("x",)}, ["x"], [7, 8, 256]),
        ({"stop_token_ids": (8,)}, [8, 256], [7, 8]),
        ({"stop_token_ids": (256,)}, [256], [7, 8, 256]),
    ],
)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_completion_ends_at_the_end_of_text(stops, stop, requested, expected, temperature):
    async def test():
        client = ScriptedClient(stops)
        session = SimpleNamespace(
            package=tinker_sdk()[0], sdk=tinker_sdk()[1], sampling={}, make=lambda fn: client
        )
        sampler = TinkerSampler(session, "a-model", byte_tokenizer(), Limits())
        (c,) = await sampler.sample(
            PROMPT, SampleParams(max_tokens=6, temperature=temperature, **stop)
        )
        assert client.requested == [requested]
        assert c.tokens.tolist() == expected
        assert c.finish_reason == "stop"
        first = 1 if temperature == 1.0 else len(PROMPT)
        assert c.logprobs.tolist() == [-float(first + i) for i in range(len(expected))]
        (short,) = await sampler.sample(PROMPT, SampleParams(max_tokens=1, **stop))
        assert (short.tokens.tolist(), short.finish_reason) == ([7], "length")

    run(test())


def test_a_wrong_key_and_a_wrong_address():
    with pytest.raises(BackendError, match="TINKER_API_KEY"):
        run(open_tinker(base_model="x", tokenizer=byte_tokenizer()))
    began = time.monotonic()
    with pytest.raises(BackendError, match="got ConnectError; expected a response"):
        run(
            open_tinker(
                base_url="http://127.0.0.1:9", key=KEY, base_model="x", tokenizer=byte_tokenizer()
            )
        )
    assert time.monotonic() - began < 30
    moved = Route(
        "/{path:path}",
        lambda request: RedirectResponse(f"https://elsewhere.test{request.url.path}?key=1"),
    )
    with (
        serve(Starlette(routes=[moved])) as url,
        pytest.raises(BackendError, match=r"a redirect to .*healthz; exp"),
    ):
        run(open_tinker(base_url=url, key=KEY, base_model="x", tokenizer=byte_tokenizer()))
    with pytest.raises(BackendError, match="tokenizer: got 'no-such-model'"):
        run(open_tinker(base_url="http://127.0.0.1:9", key=KEY, base_model="no-such-model"))


def test_a_length_that_the_service_does_not_take_is_rejected_before_anything_is_trained(
    service, monkeypatch, tmp_path
):
    byte_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    where = {"backend": "tinker", "base_url": service.url, "base_model": "a-model", "lora_rank": 4}

    def asked():
        return {e.path.rpartition("/")[2] for e in service.emulator.log[mark:]}

    mark = len(service.emulator.log)

    async def opens():
        async with await open_toy_backend(service):
            assert "create_model" in asked()

    run(opens())
    mark = len(service.emulator.log)
    for longest in (4000, 257):
        with pytest.raises(
            ConfigError,
            match=rf"a-model: max_seq_len: got {longest}; expected at most 256, its context",
        ):
            run(
                open_backend(
                    Config(
                        **where,
                        tokenizer_model=str(tmp_path),
                        max_seq_len=longest,
                        max_completion_tokens=64,
                    )
                )
            )
    assert asked() - {"session_heartbeat"} == {"get_server_capabilities", "healthz"}


def test_the_loop_with_a_loss_of_the_service(service):
    "Steps, undo and records are the same; a step takes fewer calls."
    from rl_notebook.config.config import Config
    from rl_notebook.loop.loop import GRPOLoop

    sizes = {
        "prompt_groups_per_step": 2,
        "completions_per_prompt": 4,
        "max_completion_tokens": 6,
        "seed": 1,
    }

    def passes(start: int) -> int:
        requests = [e.path.rsplit("/", 1)[-1] for e in list(service.emulator.log)[start:]]
        return sum(name in ("forward", "forward_backward") for name in requests)

    async def stepped(path: str):
        quick = {"backend": "tinker", "lora_rank": 4, "kl_beta": 0.0, "learning_rate": 1e-3}
        cfg = Config(loss_path=path, sync_audit=False, **sizes, **quick)
        async with await open_toy_backend(service) as backend:
            loop = GRPOLoop(
                backend,
                [{"prompt": text} for text in ("Hello", "World", "again", "and on")],
                varied,
                cfg,
            )
            await loop.step()
            await loop.undo()
            first = await loop.step()
            begun = len(service.emulator.log)
            second = await loop.step()
            calls = passes(begun)
            scores = await backend.policy.forward(second.datums)
            by_place = {
                (d.group, d.sample): s.values for d, s in zip(second.datums, scores, strict=True)
            }
            # greedy passes take groups in the order of their arrival
            return first, second, calls, by_place

    def varied(completion: str) -> float:
        return float(sum(map(ord, completion)) % 7)

    first, second, calls, values = run(stepped("client"))
    first_, second_, calls_, values_ = run(stepped("builtin"))
    for ours, theirs in ((first, first_), (second, second_)):
        graded, graded_ = (
            {g.number: g.rewards.tolist() for g in record.groups} for record in (ours, theirs)
        )
        assert graded == graded_
        assert ours.loss.loss == pytest.approx(theirs.loss.loss, rel=1e-4, abs=1e-5)
        assert ours.options == theirs.options
    assert values.keys() == values_.keys()
    assert all(np.allclose(values[k], values_[k], atol=1e-4, equal_nan=True) for k in values)
    assert (calls, calls_) == (2 * len(second.passes), len(second_.passes))


def test_a_warm_up_is_computed_by_the_service(service):
    "The loss and the weights are those of the local backend, in one pass a step, and `undo` gives the state before."
    from rl_notebook.loop.loop import GRPOLoop

    rows = [{"prompt": "Hello", "completion": "world"}, {"prompt": "again", "completion": "and on"}]
    quick = {
        "prompt_groups_per_step": 2,
        "lora_rank": 4,
        "learning_rate": 1e-3,
        "kl_beta": 0.0,
        "sync_audit": False,
    }

    async def warmed(opening, name: str):
        async with opening as backend:
            loop = GRPOLoop(backend, rows, len, Config(backend=name, **quick))
            records = await loop.warm_up(rows, 2)
            await loop.undo()
            return records, await backend.policy.forward(records[1].datums)

    async def there():
        return await warmed(await open_toy_backend(service), "tinker")

    begun = len(service.emulator.log)
    theirs, undone = run(there())
    asked = [e.path.rsplit("/", 1)[-1] for e in list(service.emulator.log)[begun:]]
    ours, undone_ = run(warmed(open_local(tiny_model(), byte_tokenizer(), lora_rank=4), "local"))
    assert [r.loss.loss for r in ours] == pytest.approx([r.loss.loss for r in theirs], rel=1e-4)
    for d, a, b, before in zip(
        theirs[1].datums, undone_, undone, theirs[1].loss.logprobs, strict=True
    ):
        np.testing.assert_allclose(a.values[d.active], b.values[d.active], atol=1e-4)
        np.testing.assert_array_equal(b.values[d.active], before.values[d.active])
    # two steps, and what scores
    assert (asked.count("forward_backward"), asked.count("forward")) == (3, 0)


def test_a_loss_that_a_service_cannot_compute_is_rejected_when_the_loop_opens(service):
    from rl_notebook.config.config import Config
    from rl_notebook.loop.loop import GRPOLoop
    from rl_notebook.task.toy import toy_reward, toy_rows

    cfg = Config(backend="tinker", lora_rank=4, kl_beta=0.0, loss_path="builtin")

    async def test():
        async with await open_toy_backend(service) as backend:
            with pytest.raises(ConfigError, match="make_loss: got a loss of yours; expected none"):
                GRPOLoop(
                    backend,
                    toy_rows(8),
                    toy_reward,
                    cfg,
                    make_loss=lambda datums, denominator: reinforce,
                )
        async with open_local(tiny_model(), byte_tokenizer(), lora_rank=4) as local:
            with pytest.raises(
                ConfigError, match=r"got grpo; expected 'client'\. local does not compute this loss"
            ):
                GRPOLoop(local, toy_rows(8), toy_reward, cfg)

    run(test())


def test_spans_are_taken_and_a_closed_loss_names_an_open_one(service):
    "What tinker-cookbook 0.6.1 sends."
    import tinker
    from tinker.types import PromptProvenanceSpan, SampledProvenanceSpan

    targets = tinker.TensorData(data=[5, 6, 7], dtype="int64", shape=[3])
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([4, 5, 6]),
        loss_fn_inputs={"target_tokens": targets},
    )
    runs = [
        PromptProvenanceSpan(sequence_id="s", length=2),
        SampledProvenanceSpan(sequence_id="s", length=1),
    ]

    async def test():
        async with await open_toy_backend(service) as backend:
            client = backend.policy.link.client  # type: ignore[attr-defined]

            def sent(d, loss):
                return client.forward_backward([d], loss).result()

            assert (
                len(sent(datum.with_provenance(runs, runs), "cross_entropy").loss_fn_outputs) == 1
            )
            with pytest.raises(
                tinker.TinkerError, match=r"stable_reinforce.*Take importance_sampling, or ppo"
            ):
                sent(datum, "stable_reinforce")

    run(test())


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "tinker", None)
    with pytest.raises(
        MissingExtra,
        match=r"the Tinker backend: got no tinker. pip install 'rl-notebook\[tinker\]'",
    ):
        tinker_sdk()
