"""Router replay: the trainer takes the experts that the sampler chose, and nothing else of the numbers changes.

The failure that it fixes is modelled as it happens: the trainer's routers round their logits to bfloat16, everything
else is equal. `reference_logprobs` is a mixture of experts written once more, plainly, with the experts as an argument;
what replay can restore is what it says for the sampler's experts under the trainer's gate weights.
"""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_models import EOS, byte_tokenizer
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
)
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rl_notebook.core.align import align_routing
from rl_notebook.backends.base import Backend
from rl_notebook.backends.local.model import open_model
from rl_notebook.backends.local.trainer import open_local
from rl_notebook.backends.local.routing import (
    find_routers,
    noting,
    read_notes,
    replaying,
    write_notes,
)
from rl_notebook.task.chat import sample_from_completion
from rl_notebook.config.config import Config
from rl_notebook.core.types import AlignmentError, BackendError, Datum, SampleParams
from rl_notebook.task.data import load_rows
from rl_notebook.core.datums import datum_from_sample
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.runs.run import RunFolder


PROMPT = 16
NEW = 24
TOP_K = 2
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 258,
}
IDS = {
    "eos_token_id": EOS,
    "bos_token_id": None,
    "pad_token_id": None,
    "max_position_embeddings": 256,
}


def tiny_mixture(near: float = 0.02) -> PreTrainedModel:
    "Two layers of eight experts; router rows are equal but for `near`, so that their logits nearly tie."
    torch.manual_seed(0)
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": 32,
        "head_dim": 8,
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **IDS, **experts, norm_topk_prob=True))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4 if p.ndim > 1 else 1)
        for router in find_routers(model).modules:
            router.weight.copy_((torch.randn(32) + near * torch.randn(8, 32)) / 32**0.5)
    return model.eval()


def open_with_replay(model: PreTrainedModel | None = None, **options) -> Backend:
    options = {
        "router_replay": True,
        "router_replay_completion_only": False,
        "inline": True,
    } | options
    return open_local(model or tiny_mixture(), byte_tokenizer(), **options)


def in_bfloat16(router, args, output):
    "What a trainer does whose routers compute in low precision: other choices, and slightly other weights."
    logits = output[0].bfloat16().to(output[0].dtype)
    weights, chosen = logits.softmax(-1).topk(router.top_k)
    return (
        logits,
        weights / weights.sum(-1, keepdim=True) if router.norm_topk_prob else weights,
        chosen,
    )


def only_choice(router, args, output):
    "The same choices, but the weights of the chosen experts are exact."
    logits = output[0]
    chosen = in_bfloat16(router, args, output)[2]
    weights = logits.softmax(-1).gather(-1, chosen)
    return (
        logits,
        weights / weights.sum(-1, keepdim=True) if router.norm_topk_prob else weights,
        chosen,
    )


def perturb(backend: Backend, hook=in_bfloat16) -> None:
    for router in find_routers(backend.policy.state.module).modules:
        router.register_forward_hook(hook)


async def sample_datums(backend: Backend, prompts: int = 4, n: int = 4) -> list[Datum]:
    datums = []
    for i in range(prompts):
        prompt = list(range(40 + i, 40 + i + PROMPT))
        for c in await backend.sampler.sample(prompt, SampleParams(n=n, max_tokens=NEW, seed=i)):
            datums.append(
                datum_from_sample(sample_from_completion(c, 1.0), advantage=1.0, sample=len(datums))
            )
    return datums


def limit_notes(datums: list[Datum], to: str) -> list[Datum]:
    "The datums with notes of 'none', of the 'completion', or of 'all' tokens."
    keep = {
        "none": lambda d: None,
        "completion": lambda d: align_routing(
            d.routing, PROMPT, len(d.weights), completion_only=True
        ),
        "all": lambda d: d.routing,
    }[to]
    return [replace(d, routing=keep(d)) for d in datums]


async def gaps(backend: Backend, datums: list[Datum]) -> np.ndarray:
    "|trainer - sampler| of every sampled token."
    scored = await backend.policy.forward(datums)
    return np.concatenate(
        [
            np.abs(s.values - d.sampler_logprobs)[d.active]
            for s, d in zip(scored, datums, strict=True)
        ]
    )


def moe_block(block, h: torch.Tensor, chosen: torch.Tensor, rounded: bool) -> torch.Tensor:
    "(S, D) through the experts `chosen` (S, k), one token and one expert at a time."
    logits = h @ block.gate.weight.T
    logits = logits.bfloat16().to(h.dtype) if rounded else logits
    gates = logits.softmax(-1).gather(-1, chosen)
    gates = gates / gates.sum(-1, keepdim=True) if block.gate.norm_topk_prob else gates
    rows = []
    for s in range(len(h)):
        row = torch.zeros_like(h[s])
        for k in range(chosen.shape[1]):
            gate, up = (block.experts.gate_up_proj[chosen[s, k]] @ h[s]).chunk(2)
            row = row + gates[s, k] * (block.experts.down_proj[chosen[s, k]] @ (F.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows)


def reference_logprobs(
    model, tokens: np.ndarray, chosen: np.ndarray, rounded: bool = False
) -> torch.Tensor:
    "(N-1,) logprobs of one sequence with given experts (N-1, L, k): the model's attention, our own mixture."
    ids = torch.tensor(tokens)[None]
    x = model.model.embed_tokens(ids[:, :-1])
    place = torch.arange(x.shape[1])[None]
    rotary = model.model.rotary_emb(x, place)
    for layer, decoder in enumerate(model.model.layers):
        mixed, _ = decoder.self_attn(decoder.input_layernorm(x), rotary, attention_mask=None)
        x = x + mixed
        h = decoder.post_attention_layernorm(x)[0]
        x = x + moe_block(decoder.mlp, h, torch.tensor(chosen[:, layer]), rounded)[None]
    logits = model.lm_head(model.model.norm(x))[0]
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]


def experts_of(backend: Backend, datum: Datum) -> np.ndarray:
    "(N-1, L, k) of a datum whose tokens are all noted."
    return read_notes(
        find_routers(backend.policy.state.module), [datum.routing], len(datum.weights)
    )[0]


def weighted_sum(datums, policy_logprobs):
    "Each scored logprob times another number."
    total = 0
    for d, series in zip(datums, policy_logprobs, strict=True):
        at = torch.tensor(d.active.nonzero()[0])
        total = total + d.advantage * (series[at] * torch.cos(at.double()).to(series)).sum()
    return total, {}


def gradients(backend: Backend) -> dict[str, torch.Tensor]:
    return {
        name: p.grad.clone()
        for name, p in backend.policy.state.params.items()
        if p.grad is not None
    }


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    "Largest difference of two gradients, relative to the largest entry."
    assert a.keys() == b.keys()
    return max(float((a[k] - b[k]).abs().max()) for k in a) / max(
        float(g.abs().max()) for g in a.values()
    )


# --- notes ----------------------------------------------------------------------------------------------------------


def test_notes_name_the_experts_that_read_each_token_whatever_the_batch():
    "A note is what a plain pass over the whole sequence chooses, for prompts of different lengths sampled together."

    async def main():
        backend = open_with_replay(tiny_mixture(near=1.0))
        prompts = [list(range(40, 40 + n)) for n in (3, 9, 1, 16)]
        params = SampleParams(n=3, max_tokens=10, seed=1)
        completions = await asyncio.gather(*(backend.sampler.sample(p, params) for p in prompts))
        routers = find_routers(backend.policy.state.module)
        for c in [c for group in completions for c in group]:
            assert len(c.routing) == len(c.prompt_tokens) + len(c.tokens) - 1
            with torch.no_grad(), noting(routers) as notes:
                backend.policy.state.module(torch.tensor([c.full_tokens[:-1]]))
                assert write_notes(routers, notes.take().numpy()) == c.routing

    asyncio.run(main())


def test_completion_only_keeps_the_notes_from_the_last_prompt_token_on():
    async def main():
        both = [open_with_replay(router_replay_completion_only=only) for only in (False, True)]
        completions = [
            await b.sampler.sample(range(40, 56), SampleParams(max_tokens=NEW, seed=3))
            for b in both
        ]
        whole, sampled = (c.routing for (c,) in completions)
        assert whole[PROMPT - 1 :] == sampled
        assert len(sampled) == len(completions[1][0].tokens)
        kept = sample_from_completion(completions[1][0], 1.0).routing
        assert kept == ("",) * (PROMPT - 1) + sampled

    asyncio.run(main())


def test_without_replay_nothing_is_recorded_and_no_hook_stays():
    async def main():
        backend = open_with_replay(router_replay=False)
        (c,) = await backend.sampler.sample(range(40, 56), SampleParams(max_tokens=4, seed=0))
        assert c.routing is None
        assert not backend.capabilities.routing
        on = open_with_replay()
        await on.policy.forward_backward_custom(await sample_datums(on, 1), weighted_sum)
        for module in (
            on.policy.state.module,
            on.sampler.engine.causal.model,
            on.reference.scoring.causal.model,
        ):
            assert not any(router._forward_hooks for router in find_routers(module).modules)

    asyncio.run(main())


def test_notes_of_another_model_are_rejected_with_their_place():
    async def main():
        backend = open_with_replay()
        datum = (await sample_datums(backend, 1, 1))[0]
        for note in ("AAAA", "//////8=", "not base64"):
            wrong = replace(datum, routing=(*datum.routing[:5], note, *datum.routing[6:]))
            with pytest.raises(AlignmentError, match="sample 0, input 5: routing: got"):
                await backend.policy.forward([wrong])

    asyncio.run(main())


@pytest.mark.parametrize("family", ["mixtral", "olmoe"])
def test_other_families_are_noted_and_replayed(family):
    torch.manual_seed(0)
    sizes = SIZES | {"intermediate_size": 32}
    if family == "mixtral":
        model = MixtralForCausalLM(MixtralConfig(**sizes, **IDS, num_local_experts=8))
    else:
        model = OlmoeForCausalLM(OlmoeConfig(**sizes, **IDS, num_experts=8, num_experts_per_tok=2))
    routers = find_routers(model.eval())
    ids = torch.arange(40, 60)[None]
    with torch.no_grad(), noting(routers) as notes:
        plain = model(ids).logits
        chosen = notes.take()
    with torch.no_grad(), replaying(routers, chosen):
        assert (model(ids).logits - plain).abs().max() < 1e-6
    with torch.no_grad(), replaying(routers, (chosen + 1) % 8):
        assert (model(ids).logits - plain).abs().max() > 1e-4


# --- what replay restores -------------------------------------------------------------------------------------------


def test_a_blank_lets_the_trainer_choose():
    "Notes of some tokens only: the pass is that of a model which chooses at the others."

    async def main():
        backend = open_with_replay()
        datum = (await sample_datums(backend, 1, 1))[0]
        perturb(backend)
        routers = find_routers(backend.policy.state.module)
        holes = tuple("" if i % 3 == 0 else note for i, note in enumerate(datum.routing))
        chosen = read_notes(routers, [holes], len(holes))[0]
        with (
            torch.no_grad(),
            replaying(routers, torch.from_numpy(chosen)),
            noting(routers) as notes,
        ):
            backend.policy.state.module(torch.tensor(datum.tokens[None, :-1]))
            choices = notes.take().numpy()
        noted = chosen[:, 0, 0] >= 0
        assert (choices[noted] == chosen[noted]).all()
        assert (choices >= 0).all()
        (scored,) = await backend.policy.forward([replace(datum, routing=holes)])
        with torch.no_grad():
            want = reference_logprobs(
                backend.policy.state.module, datum.tokens, choices, rounded=True
            ).numpy()
        np.testing.assert_allclose(scored.values[datum.active], want[datum.active], atol=2e-5)

    asyncio.run(main())


# --- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradient_is_that_of_the_model_with_these_experts(checkpointing):
    "In float64, against autograd through the plain mixture; also when layers run a second time in the backward pass."

    async def main():
        backend = open_with_replay(dtype="float64")
        datums = await sample_datums(backend, 2, 2)
        perturb(backend, only_choice)
        module = backend.policy.state.module
        want = torch.zeros(())
        for d in datums:
            series = reference_logprobs(module, d.tokens, experts_of(backend, d))
            want = want + weighted_sum([d], [series])[0]
        want.backward()
        expected = gradients(backend)
        await backend.policy.discard_gradients()
        if checkpointing:
            module.train()
            module.gradient_checkpointing_enable({"use_reentrant": False})
        await backend.policy.forward_backward_custom(datums, weighted_sum)
        assert distance(gradients(backend), expected) < 1e-9
        routed = [name for name in expected if name.endswith("gate.weight")]
        assert len(routed) == 2
        assert all(expected[name].abs().max() > 0 for name in routed)
        await backend.policy.discard_gradients()
        await backend.policy.forward_backward_custom(limit_notes(datums, "none"), weighted_sum)
        assert distance(gradients(backend), expected) > 1e-3

    asyncio.run(main())


def test_order_padding_and_the_split_into_batches_do_not_matter():
    async def main():
        backend = open_with_replay(dtype="float64")
        datums = await sample_datums(backend, 4, 3)
        short = [Datum(d.tokens[:n], d.weights[: n - 1], advantage=0.5, routing=d.routing[: n - 1], sample=90 + n)
                 for d, n in zip(datums, (18, 22, 27), strict=False)]  # fmt: skip
        datums = [*datums, *short]
        perturb(backend, only_choice)
        scores = {
            d.sample: s.values
            for d, s in zip(datums, await backend.policy.forward(datums), strict=True)
        }
        await backend.policy.forward_backward_custom(datums, weighted_sum)
        together = gradients(backend)
        await backend.policy.discard_gradients()
        backend.policy.state.scoring = replace(backend.policy.state.scoring, tokens_per_batch=64)
        shuffled = [datums[i] for i in np.random.default_rng(0).permutation(len(datums))]
        assert len(backend.policy.state.scoring.batches(shuffled)) > 3
        for d, s in zip(shuffled, await backend.policy.forward(shuffled), strict=True):
            np.testing.assert_allclose(s.values, scores[d.sample], atol=1e-12)
        await backend.policy.forward_backward_custom(shuffled, weighted_sum)
        assert distance(gradients(backend), together) < 1e-9

    asyncio.run(main())


def test_the_reference_of_an_adapter_keeps_its_own_experts():
    async def main():
        backend = open_with_replay(lora_rank=4)
        datums = await sample_datums(backend, 2, 2)
        elsewhere = [replace(d, routing=d.routing[::-1]) for d in datums]
        plain = await backend.reference.forward(limit_notes(datums, "none"))
        for a, b in zip(plain, await backend.reference.forward(elsewhere), strict=True):
            np.testing.assert_array_equal(a.values, b.values)
        moved = await gaps(backend, elsewhere)
        assert moved.max() > 1e-2

    asyncio.run(main())


def test_the_probe_compares_routes_and_not_choices():
    "With near ties a decode step may choose otherwise than a whole pass; that is no reason to reject the model."
    assert open_model(tiny_mixture(near=1e-5)).route == "modules"
    assert open_model(tiny_mixture(near=1e-3).bfloat16()).route == "modules"


# --- a whole step ---------------------------------------------------------------------------------------------------


def test_a_grpo_step_replays_and_its_record_keeps_the_notes(tmp_path):
    async def main():
        settings = {
            "prompt_groups_per_step": 2,
            "completions_per_prompt": 4,
            "max_completion_tokens": 12,
        }
        cfg = Config(
            **settings,
            max_seq_len=96,
            kl_beta=0.05,
            learning_rate=1e-3,
            epochs=1,
            router_replay=True,
        )
        seen = []
        backend = open_with_replay(router_replay_completion_only=cfg.router_replay_completion_only)
        perturb(backend)
        score = backend.reference.forward

        async def watched(datums):
            seen.extend(d.routing for d in datums)
            return await score(datums)

        backend.reference.forward = watched
        rows = load_rows([{"prompt": f"count from {i}: "} for i in range(4)])
        loop = GRPOLoop(backend, rows, lambda text: float(len(set(text))), cfg)
        record = await loop.step()
        assert record.trained
        assert seen == [d.routing for d in record.datums]  # asked, and answered by its own experts
        folder = RunFolder.create(tmp_path / "run", cfg)
        folder.add(record)
        (back,) = RunFolder.open(tmp_path / "run")
        for one, other in zip(record.datums, back.datums, strict=True):
            assert one.routing is not None
            assert other.routing == one.routing
            assert len(one.routing) == len(one.tokens) - 1
            assert "" not in one.routing[int(one.active.nonzero()[0][0]) :]

    asyncio.run(main())


# --- a service's own notes ------------------------------------------------------------------------------------------


def test_fireworks_is_asked_for_notes_and_gets_them_back_with_the_policys_datums_only():
    "The SDK's own classes: an echo gives one entry per token read, and only the policy's datum carries them."
    sampling = pytest.importorskip("fireworks.training.sdk.sampling")
    from rl_notebook.backends.services.fireworks import FireworksSampler, completion_of
    from rl_notebook.backends.local.worker import Worker
    from rl_notebook.backends.services.completions import OpenAISampler
    from rl_notebook.backends.services.provision import sdk_classes
    from rl_notebook.backends.services.link import bare_datum

    asked = []
    completions = sampling.SampledCompletion(
        "Hi",
        [5, 6, 7, 8],
        2,
        "stop",
        2,
        [-9.0, -0.5, -0.2],
        [-9.0, -0.5, -0.2],
        True,
        ["b", "c", ""],
        1,
    )

    class Drawer:
        tokenizer = byte_tokenizer()

        async def sample_with_prompt_tokens(self, prompt, **options):
            asked.append(options)
            return [completions]

    async def main():
        got = {}
        for routing in ("none", "completion", "all"):
            scorer = OpenAISampler("http://127.0.0.1:9", "tiny", Drawer.tokenizer)
            sampler = FireworksSampler(Drawer(), scorer, Worker(inline=True), routing=routing)
            (got[routing],) = await sampler.sample([5, 6], SampleParams(max_tokens=4))
        assert [o.get("include_routing_matrix") for o in asked] == [None, True, True]
        assert [o.get("echo") for o in asked] == [None, True, True]
        assert got["completion"].routing == ("", "c", "")
        assert got["all"].routing == ("b", "c", "")
        datum = datum_from_sample(sample_from_completion(got["all"], 1.0))
        classes = sdk_classes()
        policy = bare_datum(replace(classes, replays=True), datum)
        reference = bare_datum(classes, datum)
        assert policy.model_input.to_ints() == reference.model_input.to_ints() == [5, 6, 7]
        assert policy.model_input.routing_matrices == ["b", "c", ""]
        assert reference.model_input.routing_matrices is None
        completions.routing_matrices = None
        with pytest.raises(BackendError, match="deployment: no expert choices came back"):
            await sampler.sample([5, 6], SampleParams(max_tokens=4))
        completions.routing_matrices = ["b", "c", "d", "e"]
        with pytest.raises(AlignmentError, match="deployment: routing: got 4 entries"):
            completion_of(completions, [5, 6], SampleParams())

    asyncio.run(main())
