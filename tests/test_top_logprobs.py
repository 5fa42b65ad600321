"The likeliest tokens of the sampler: from every kind of sampler, through a step, into a record and back."

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from live_server import app_of, emulated, serve
from tiny_models import byte_tokenizer, one_thread, tiny_model

import rl_notebook as rln
from rl_notebook.backends.local.engine import Engine
from rl_notebook.backends.local.model import open_model
from rl_notebook.backends.local.trainer import open_local
from rl_notebook.backends.services.completions import OpenAISampler, probe_server, request_seed
from rl_notebook.core.datums import datum_from_sample
from rl_notebook.core.types import BackendError, ConfigError, SampleParams, TopLogprobs
from rl_notebook.runs.records import TOP_FILE, read_record, staged_folder, write_record
from rl_notebook.task.chat import sample_from_spans

__all__ = ["one_thread"]

PROMPT = [72, 101, 108, 108, 111]
TOP = 6


def model():
    return tiny_model(context=96)


@pytest.fixture(scope="module")
def local():
    backend = open_local(model(), byte_tokenizer(), inline=True)
    yield backend
    asyncio.run(backend.__aexit__())


def sample_locally(local, params):
    "What a server must answer: it samples completion i with the seed of request i."

    async def each():
        alone = [replace(params, n=1, seed=request_seed(params.seed, i)) for i in range(params.n)]
        return [(await local.sampler.sample(PROMPT, p))[0] for p in alone]

    return asyncio.run(each())


def assert_same_top(got: TopLogprobs, want: TopLogprobs, tolerance: float = 1e-5) -> None:
    "The same tokens with the same logprobs; order is free where logprobs are equal."
    assert len(got) == len(want)
    for mine, theirs in zip(got, want, strict=True):
        assert len(mine) == len(theirs)
        assert np.allclose(
            sorted(v for _, v in mine), sorted(v for _, v in theirs), atol=tolerance, rtol=0
        )
        mine, theirs = dict(mine), dict(theirs)
        for token in mine.keys() & theirs.keys():
            assert abs(mine[token] - theirs[token]) < tolerance
        lowest = min(theirs.values())
        assert all(abs(mine[token] - lowest) < tolerance for token in mine.keys() - theirs.keys())


# The engine -----------------------------------------------------------------------------------------------------

CUTS = ({}, {"temperature": 0.6}, {"temperature": 1.3, "top_k": 9, "top_p": 0.8}, {"top_p": 0.5})


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_the_engine_reports_what_transformers_would_sample_from(cut):
    weights = tiny_model(vocab=40, eos=None, scale=3)
    engine = Engine(open_model(weights), eos_token_ids=frozenset(), max_batch=5)
    plain = SampleParams(n=3, max_tokens=12, seed=4, **cut)
    asked = engine.submit([5, 6, 7], replace(plain, top_logprobs=TOP))
    other = engine.submit([5, 6], replace(plain, n=2, top_logprobs=2))
    silent = engine.submit([5, 6, 7], plain)
    while not engine.idle:
        engine.run_steps(16)
    judges = transformers.LogitsProcessorList(
        [transformers.TemperatureLogitsWarper(plain.temperature)]
    )
    if plain.top_k:
        judges.append(transformers.TopKLogitsWarper(plain.top_k))
    judges.append(transformers.TopPLogitsWarper(plain.top_p))
    for with_top, without in zip(asked.completions, silent.completions, strict=True):
        assert without.top_logprobs is None
        assert with_top.tokens.tolist() == without.tokens.tolist()
        assert np.abs(with_top.logprobs - without.logprobs).max() < 1e-5  # another row of the batch
        assert with_top.top_logprobs.distribution == "sampling"
        ids = torch.tensor([with_top.full_tokens])
        with torch.no_grad():
            logits = weights(ids).logits[0]
        for i, pairs in enumerate(with_top.top_logprobs):
            end = with_top.prompt_len + i
            want = judges(ids[:, :end], logits[end - 1][None].clone()).log_softmax(-1)[0]
            values = want.topk(TOP).values
            values = values[values > -torch.inf]
            assert np.abs(np.array([v for _, v in pairs]) - values.numpy()).max() < 1e-4
            assert all(abs(float(want[token]) - value) < 1e-4 for token, value in pairs)
    assert {len(pairs) for c in other.completions for pairs in c.top_logprobs} <= {1, 2}


def test_a_greedy_completion_says_what_else_was_likely(local):
    params = SampleParams(n=2, max_tokens=6, seed=1, temperature=0, top_logprobs=3)
    for c in sample_locally(local, params):
        assert c.top_logprobs.distribution == "raw"
        assert [pairs[0][0] for pairs in c.top_logprobs] == c.tokens.tolist()
        first = [pairs[0][1] for pairs in c.top_logprobs]
        assert np.abs(np.array(first) - c.logprobs).max() < 1e-6


# Servers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("dialect", ["vllm", "fireworks"])
def test_a_server_reports_those_of_the_model(tmp_path, local, dialect, mode):
    server = emulated(model(), byte_tokenizer(), tmp_path, logprobs_mode=mode)
    plain = SampleParams(n=2, max_tokens=7, seed=3, top_logprobs=5)

    async def ask(url):
        sampler = OpenAISampler(url, "tiny", byte_tokenizer(), dialect=dialect)
        await probe_server(sampler, PROMPT)
        try:
            return [
                await sampler.sample(PROMPT, p) for p in (plain, replace(plain, temperature=0.5))
            ]
        finally:
            await sampler.close()

    with serve(app_of(server)) as url:
        at_1, at_half = asyncio.run(ask(url))
    for got, want in zip(at_1, sample_locally(local, plain), strict=True):
        assert got.tokens.tolist() == want.tokens.tolist()
        assert got.top_logprobs.distribution == "sampling"
        assert_same_top(got.top_logprobs, want.top_logprobs)
    raw_mode = mode == "raw_logprobs" or dialect == "fireworks"
    for got, want in zip(
        at_half, sample_locally(local, replace(plain, temperature=0.5)), strict=True
    ):
        assert got.top_logprobs.distribution == ("raw" if raw_mode else "sampling")
        if not raw_mode:
            assert_same_top(got.top_logprobs, want.top_logprobs)
            continue
        for i, pairs in enumerate(
            got.top_logprobs
        ):  # raw, to the power of two, is what was sampled from
            ratios = {
                token: 2 * value - dict(want.top_logprobs[i])[token] for token, value in pairs
            }
            assert np.ptp([*ratios.values()]) < 1e-4


def test_a_deployment_of_fireworks_reports_those_of_the_model(tmp_path, local):
    sampling = pytest.importorskip("fireworks.training.sdk.sampling")
    fireworks = pytest.importorskip("rl_notebook.backends.services.fireworks")
    server = emulated(model(), byte_tokenizer(), tmp_path)
    params = SampleParams(n=1, max_tokens=7, seed=3, top_logprobs=5)
    (want,) = asyncio.run(local.sampler.sample(PROMPT, params))
    with serve(app_of(server)) as url:
        sampler = sampling.DeploymentSampler(
            inference_url=url, model="m", api_key="fw-not-a-real-key", tokenizer=byte_tokenizer()
        )
        options = {"max_tokens": 7, "seed": 3, "logprobs": True, "top_logprobs": 5}
        (sampled,) = asyncio.run(sampler.sample_with_prompt_tokens(PROMPT, **options))
    got = fireworks.completion_of(sampled, PROMPT, params)
    assert got.top_logprobs.distribution == "sampling"
    assert_same_top(got.top_logprobs, want.top_logprobs)
    with pytest.raises(BackendError, match="top_logprobs: got none; expected 7 lists"):
        fireworks.completion_of(replace(sampled, inference_topk_token_ids=None), PROMPT, params)


def test_a_server_that_sends_fewer_says_so(tmp_path):
    server = emulated(model(), byte_tokenizer(), tmp_path)
    many = SampleParams(max_tokens=3, seed=3, top_logprobs=21)

    async def ask(url, dialect, message):
        sampler = OpenAISampler(url, "tiny", byte_tokenizer(), dialect=dialect)
        with pytest.raises(BackendError, match=message):
            await sampler.sample(PROMPT, many)
        await sampler.close()

    with serve(app_of(server)) as url:
        asyncio.run(ask(url, "fireworks", "top_logprobs: got 21; expected 5 at most"))
        asyncio.run(ask(url, "sglang", "top_logprobs: got 21; expected 0 at most"))
        asyncio.run(ask(url, "vllm", "greater than max allowed: 20"))


# A step and its record ------------------------------------------------------------------------------------------


async def step_of(**settings):
    rows = rln.toy_rows(2)
    cfg = rln.Config(completions_per_prompt=3, max_completion_tokens=8, kl_beta=0, **settings)
    async with rln.open_local("tiny", reference=False) as backend:
        rewards = [lambda completion: float(sum(map(ord, str(completion))) % 3)]
        loop = rln.GRPOLoop(backend, rows, rewards, cfg)
        return await loop.step()


def is_mapped(array) -> bool:
    "Whether an array looks into a file that is mapped into memory."
    while array is not None and not isinstance(array, np.memmap):
        array = getattr(array, "base", None)
    return array is not None


def test_a_record_keeps_them_in_a_file_of_their_own(tmp_path):
    asked = asyncio.run(step_of(top_logprobs=TOP, prompt_groups_per_step=2))
    plain = asyncio.run(step_of(prompt_groups_per_step=2))
    for name, record in (("asked", asked), ("plain", plain)):
        with staged_folder(tmp_path / name) as inside:
            write_record(record, inside)
    assert (tmp_path / "asked" / TOP_FILE).is_file()
    assert not (tmp_path / "plain" / TOP_FILE).exists()
    samples = [s for g in asked.groups for s in g.samples]
    silent = [s for g in plain.groups for s in g.samples]
    for with_top, without in zip(samples, silent, strict=True):
        assert with_top.tokens.tolist() == without.tokens.tolist()
        assert np.array_equal(with_top.logprobs, without.logprobs, equal_nan=True)
    assert all(s.top_logprobs is None for s in silent)
    again = read_record(tmp_path / "asked")
    assert again.datums
    for before, after in zip(samples, (s for g in again.groups for s in g.samples), strict=True):
        assert is_mapped(after.top_logprobs.tokens)
        assert [*after.top_logprobs] == [*before.top_logprobs]
        assert [bool(pairs) for pairs in after.top_logprobs] == (after.loss_mask == 1).tolist()
        for token, logprob, pairs in zip(
            after.tokens, after.logprobs, after.top_logprobs, strict=True
        ):
            assert abs(dict(pairs).get(int(token), logprob) - logprob) < 1e-6 or not pairs
    for before, after in zip(asked.datums, again.datums, strict=True):
        assert len(after.top_logprobs) == len(after.weights)
        assert [*after.top_logprobs] == [*before.top_logprobs]
    assert all(d.top_logprobs is None for d in read_record(tmp_path / "plain").datums)


def test_a_conversation_has_them_where_the_policy_spoke():
    top = TopLogprobs.from_rows([[(8, -0.1)], [(2, -0.3), (9, -1.5)]])
    turn = rln.Completion([5, 6], [8, 2], [-0.1, -0.3], top_logprobs=top)
    last = rln.Completion([5, 6, 8, 2, 7], [4], [-0.2])
    spans = [([5, 6], None), ([8, 2], turn), ([7], None), ([4], last)]
    sample = sample_from_spans(spans, 1.0, "", {})
    assert [len(pairs) for pairs in sample.top_logprobs] == [0, 0, 1, 2, 0, 0]
    datum = datum_from_sample(sample, max_seq_len=4)
    assert [len(pairs) for pairs in datum.top_logprobs] == [0, 1, 2]


def test_more_than_a_backend_reports_is_rejected_first():
    with pytest.raises(ConfigError, match="top_logprobs: got -1"):
        SampleParams(top_logprobs=-1)
    cfg = rln.Config(top_logprobs=3, kl_beta=0)

    async def open_loop():
        async with rln.open_local("tiny", reference=False) as backend:
            short = replace(backend, capabilities=replace(backend.capabilities, top_logprobs=2))
            rln.GRPOLoop(short, rln.toy_rows(2), [rln.toy_reward], cfg)

    with pytest.raises(ConfigError, match="top_logprobs: got 3; expected 2 at most"):
        asyncio.run(open_loop())
