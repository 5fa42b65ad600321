"Shared prefixes: the same logprobs and gradients as datum by datum, whatever the datums have in common."

import asyncio
import copy
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import byte_tokenizer, tiny_model
from transformers import BloomConfig, BloomForCausalLM, MistralConfig, MistralForCausalLM

from rl_notebook.backends.local.engine import plan_batches
from rl_notebook.backends.local.model import open_model
from rl_notebook.backends.local.scoring import Batch, Scoring
from rl_notebook.backends.local.trainer import open_local
from rl_notebook.backends.local.prefixes import plan_trees, prefix_tree
from rl_notebook.core.types import Datum


tokens = st.lists(st.integers(2, 4), min_size=1, max_size=12)  # few values: many common prefixes


# --- the tree ----------------------------------------------------------------------------------------------------


@given(st.lists(tokens, min_size=1, max_size=10))
@example([[2], [2], [2, 3], [2, 3]])
def test_a_tree_holds_every_prefix_once(rows):
    sequences = [np.array(row) for row in rows]
    tree = prefix_tree(sequences)
    ids = tree.ids[0].numpy()
    positions = tree.positions[0].numpy()
    prefixes = {tuple(row[: n + 1]) for row in rows for n in range(len(row))}
    assert len(ids) == len(prefixes)
    for s, place in zip(sequences, tree.place, strict=True):
        assert ids[place[: len(s)]].tolist() == s.tolist()
        assert positions[place[: len(s)]].tolist() == list(range(len(s)))
        assert (place[len(s) :] == place[len(s) - 1]).all()
    queries = torch.cat([block.queries.flatten() for block in tree.blocks])
    assert queries[tree.home].tolist() == list(range(len(ids)))  # each token attends once


@given(st.lists(tokens, min_size=1, max_size=12), st.integers(1, 60))
def test_batches_take_every_sequence_once_and_stay_within_the_budget(rows, budget):
    sequences = [np.array(row) for row in rows]
    batches = plan_trees(sequences, budget)
    assert sorted(i for indices, _, _ in batches for i in indices) == list(range(len(rows)))
    for indices, size, weight in batches:
        assert size == prefix_tree([sequences[i] for i in indices]).ids.shape[1] <= weight
        assert weight <= budget or len(indices) == 1


# --- logprobs and gradients --------------------------------------------------------------------------------------


def mistral():
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = MistralForCausalLM(
        MistralConfig(vocab_size=200, **sizes, num_key_value_heads=2, sliding_window=5)
    )
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4 if p.ndim == 2 else 1)
    return model.eval()


MODELS = {name: tiny_model(name) for name in ("qwen3", "gpt2")} | {"mistral": mistral()}


def pair_of(family: str, **options):
    "Two backends over equal weights: one reads trees whenever there is a datum, the other never."
    backends = [
        open_local(copy.deepcopy(MODELS[family]), None, inline=True, device="cpu", **options)
        for _ in range(2)
    ]
    for backend, shares in zip(backends, (True, False), strict=True):
        roles = (backend.policy.state, backend.reference)
        assert [role.scoring.no_tree for role in roles] == ["", ""]
        for role in roles:  # under LoRA both are one model
            role.scoring.causal.no_tree = "" if shares else "switched off"
    return backends


def always(scoring: Scoring, datums) -> list[Batch]:
    "Trees, whether or not they gain."
    if scoring.no_tree:
        return PLAIN(scoring, datums)
    trees = plan_trees([d.input_tokens for d in datums], scoring.tokens_per_batch)
    return [Batch.of(datums, tree, "cpu") for tree in trees]


PLAIN = Scoring.batches


@pytest.fixture
def trees():
    with always_trees():
        yield


@contextmanager
def always_trees():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scoring, "batches", always)
        yield


@st.composite
def batches_of_datums(draw):
    "Datums that branch off one another anywhere, with any mask, prompts included."
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sequences = [rng.integers(0, 200, draw(st.integers(2, 20)))]
    for _ in range(draw(st.integers(1, 7))):
        parent = sequences[rng.integers(len(sequences))]
        cut = int(rng.integers(0, len(parent) + 1))
        sequences.append(
            np.concatenate(
                [parent[:cut], rng.integers(0, 200, max(2 - cut, int(rng.integers(0, 12))))]
            )
        )
    masks = [(rng.random(len(s) - 1) < 0.6).astype(float) for s in sequences]
    datums = [
        Datum(s, m, advantage=float(rng.normal()), sample=i)
        for i, (s, m) in enumerate(zip(sequences, masks))
    ]
    return [datums[i] for i in rng.permutation(len(datums))]


def loss_by_place(prompt_logprobs: bool):
    "A loss that multiplies every scored logprob by its place, so that no two gradients cancel by accident."

    def loss(datums, logprobs):
        total = torch.zeros(())
        for d, lp in zip(datums, logprobs, strict=True):
            scored = lp[torch.from_numpy(d.active | prompt_logprobs)]
            total = (
                total
                + d.advantage * (scored * (1 + torch.arange(len(scored)))).sum()
                + 0 * scored.sum()
            )
        return total, {}

    return loss


def gradient(backend) -> torch.Tensor:
    return torch.cat(
        [
            p.grad.double().flatten()
            for p in backend.policy.state.params.values()
            if p.grad is not None
        ]
    )


def compare(
    family, datums, budget, prompt_logprobs, rank=0, dtype="float64", nats=1e-5, gradients=1e-6
):
    options = {
        "tokens_per_batch": budget,
        "prompt_logprobs": prompt_logprobs,
        "lora_rank": rank,
        "dtype": dtype,
    }
    once, each = pair_of(family, **options)
    if rank:
        for a, b in zip(
            once.policy.state.params.values(), each.policy.state.params.values(), strict=True
        ):
            a.data.normal_(std=0.03, generator=torch.Generator().manual_seed(a.numel()))
            b.data.copy_(a.data)
    with always_trees():
        compare_pair(once, each, datums, loss_by_place(prompt_logprobs), nats, gradients)


def compare_pair(once, each, datums, loss, nats, gradients):
    a, b = (asyncio.run(x.policy.forward_backward_custom(datums, loss)) for x in (once, each))
    rows = [(a.logprobs, b.logprobs)]
    rows.append(tuple(asyncio.run(x.policy.forward(datums)) for x in (once, each)))
    rows.append(tuple(asyncio.run(x.reference.forward(datums)) for x in (once, each)))
    for ours, theirs in rows:
        for x, y in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(x.values, y.values, atol=nats, rtol=0)
    ga = gradient(once)
    gb = gradient(each)
    assert (ga - gb).norm() <= gradients * gb.norm() + 1e-30


CASES = st.tuples(
    st.sampled_from(["qwen3", "gpt2", "mistral"]),
    st.sampled_from([6, 24, 60, 10_000]),
    st.booleans(),
)


@settings(max_examples=8)
@given(batches_of_datums(), CASES)
def test_trees_give_the_logprobs_and_gradients_of_single_rows(datums, case):
    family, budget, prompt_logprobs = case
    compare(family, datums, budget, prompt_logprobs)


@settings(max_examples=4)
@given(batches_of_datums(), st.sampled_from([6, 60, 10_000]), st.booleans())
def test_trees_under_lora(datums, budget, prompt_logprobs):
    pytest.importorskip("peft")
    compare("qwen3", datums, budget, prompt_logprobs, rank=2)


@pytest.mark.parametrize("family", MODELS)
def test_in_float32_they_differ_by_rounding(family):
    compare(
        family, [*a_group(), *a_group(seed=1, count=3)], 10_000, False, 0, "float32", 1e-4, 1e-6
    )


# --- when it is done ---------------------------------------------------------------------------------------------


def a_group(prompt: int = 40, completion: int = 16, count: int = 6, seed: int = 0) -> list[Datum]:
    rng = np.random.default_rng(seed)
    start = rng.integers(0, 200, prompt)
    mask = [0.0] * (prompt - 1) + [1.0] * completion
    rows = [np.concatenate([start, rng.integers(0, 200, completion)]) for _ in range(count)]
    return [Datum(row, mask, advantage=float(rng.normal()), sample=i) for i, row in enumerate(rows)]


def strangers(count: int = 6) -> list[Datum]:
    "Datums of one length that have nothing in common."
    rng = np.random.default_rng(1)
    return [
        Datum([i, *rng.integers(0, 200, 39)], [1.0] * 39, advantage=1.0, sample=i)
        for i in range(count)
    ]


def test_a_group_is_a_tree_and_the_step_says_what_it_saved():
    backend = open_local(tiny_model(), byte_tokenizer(), inline=True, device="cpu")
    datums = a_group()
    (batch,) = backend.policy.state.scoring.batches(datums)
    assert batch.tree
    assert batch.tokens <= 40 + 6 * 15
    output = asyncio.run(backend.policy.forward_backward_custom(datums, loss_by_place(False)))
    assert output.metrics["perf/prefix_tokens_saved"] == 6 * 55 - batch.tokens


def test_a_batch_without_shared_prefixes_runs_as_before():
    "The batches of the plain plan, and every number to the bit."
    once, each = pair_of("qwen3")
    datums = strangers()
    plain = plan_batches([len(d.weights) for d in datums], 16384, 512)
    assert [(b.rows, b.tree) for b in once.policy.state.scoring.batches(datums)] == [
        (rows, None) for rows in plain
    ]
    a, b = (
        asyncio.run(x.policy.forward_backward_custom(datums, loss_by_place(False)))
        for x in (once, each)
    )
    assert a.metrics == b.metrics
    assert a.metrics["perf/prefix_tokens_saved"] == 0
    assert all(
        np.array_equal(x.values, y.values) for x, y in zip(a.logprobs, b.logprobs, strict=True)
    )
    assert torch.equal(gradient(once), gradient(each))


def test_a_datum_alone_and_one_without_a_scored_position(trees):
    once, each = pair_of("qwen3")
    silent = [replace(d, weights=np.zeros(len(d.weights))) for d in a_group(count=2)]
    for datums in (a_group(count=1), silent, [*silent, *a_group()]):
        a, b = (asyncio.run(x.policy.forward(datums)) for x in (once, each))
        for x, y in zip(a, b, strict=True):
            np.testing.assert_allclose(x.values, y.values, atol=1e-4)


def test_turns_of_a_conversation_share_what_came_before():
    whole = np.random.default_rng(3).integers(0, 200, 120)
    ends = list(accumulate([30, 30, 30, 30]))
    datums = [
        Datum(whole[:end], [0.0] * (end - 11) + [1.0] * 10, advantage=1.0, sample=end)
        for end in ends
    ]
    backend = open_local(tiny_model(), byte_tokenizer(), inline=True, device="cpu")
    (batch,) = backend.policy.state.scoring.batches(datums)
    assert batch.tree
    assert batch.tokens == 119


def test_a_model_without_attention_by_name_says_so_and_runs_as_before():
    torch.manual_seed(0)
    model = BloomForCausalLM(
        BloomConfig(vocab_size=258, hidden_size=32, n_layer=2, n_head=4)
    ).eval()
    causal = open_model(model, routes=("modules", "full"), sampling=False)
    assert "logprobs off" in causal.no_tree
    assert not any(b.tree for b in Scoring(causal).batches(a_group()))


def test_attention_with_a_soft_cap_is_rejected_by_name():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = Gemma2Config(vocab_size=258, **sizes, num_key_value_heads=2, head_dim=8)
    model = Gemma2ForCausalLM._from_config(config, attn_implementation="eager").eval()
    assert (
        open_model(model, routes=("modules",), sampling=False).no_tree
        == "ValueError: attention with softcap"
    )
