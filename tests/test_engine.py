"The engine: every completion as if it were alone, and logprobs that the model itself would give."

import json
import os
import sys

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import EOS, byte_tokenizer, one_thread, tiny_model

from rl_notebook.backends.local.engine import Engine, Uniforms, echo
from rl_notebook.backends.local.fast import mergeable, takes_blocks
from rl_notebook.backends.local.model import (
    AdjustedHead,
    CausalModel,
    KnownHead,
    bare_model,
    head_logprobs,
    open_model,
    pick_logprobs,
    probe_error,
)
from rl_notebook.core.types import BackendError, ConfigError, MissingExtra, SampleParams

__all__ = ["one_thread"]


PROMPTS = ([72, 105], [65, 66, 67, 68, 69, 70], [1], list(range(40, 70)))


def engine_of(model, **kwargs) -> Engine:
    return Engine(open_model(model), byte_tokenizer(), **kwargs)


def engine_without_end(**kwargs) -> Engine:
    "An engine whose completions end by their budget only."
    return engine_of(
        tiny_model(eos=None, **kwargs.pop("sizes", {})), eos_token_ids=frozenset(), **kwargs
    )


def finish(engine: Engine, steps: int = 16) -> None:
    while not engine.idle:
        engine.run_steps(steps)


def sample(engine: Engine, prompt, params: SampleParams):
    request = engine.submit(prompt, params)
    finish(engine)
    return request.completions


def plain_logprobs(model, tokens) -> np.ndarray:
    "The model's logprobs of each token after the first, from one plain forward pass."
    ids = torch.tensor([list(tokens)])
    with torch.no_grad():
        return (
            pick_logprobs(bare_model(model)(ids).logits[0, :-1].float(), ids[0, 1:])
            .double()
            .numpy()
        )


# Agreement ------------------------------------------------------------------------------------------------------


@settings(max_examples=15)
@given(
    family=st.sampled_from(["qwen3", "llama"]),
    tied=st.booleans(),
    layers=st.integers(1, 3),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1), (2, 2)]),
    vocab=st.sampled_from([17, 258]),
    prompts=st.lists(st.lists(st.integers(0, 16), min_size=1, max_size=20), min_size=1, max_size=5),
    n=st.integers(1, 4),
    max_batch=st.sampled_from([1, 3, 64]),
    tokens=st.sampled_from([16, 4096]),
    seed=st.integers(0, 10**6),
)
def test_logprobs_are_those_of_a_plain_forward_pass(
    family, tied, layers, heads, vocab, prompts, n, max_batch, tokens, seed
):
    model = tiny_model(
        family,
        tied=tied,
        layers=layers,
        heads=heads[0],
        kv_heads=heads[1],
        vocab=vocab,
        seed=seed,
        eos=3,
    )
    engine = engine_of(model, max_batch=max_batch, tokens_per_batch=tokens)
    budgets = [1 + (seed + i) % 12 for i in range(len(prompts))]
    pairs = zip(prompts, budgets, strict=True)
    requests = [engine.submit(p, SampleParams(n=n, max_tokens=b, seed=seed)) for p, b in pairs]
    finish(engine)
    for c in (c for r in requests for c in r.completions):
        want = plain_logprobs(model, c.full_tokens)[c.prompt_len - 1 :]
        assert np.abs(c.logprobs - want).max() <= 1e-4
        assert np.array_equal(c.logprobs, c.sampling_logprobs)
        (again,) = echo(engine, [c.full_tokens])
        assert np.abs(again.values - plain_logprobs(model, c.full_tokens)).max() <= 1e-4


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2"])
@pytest.mark.parametrize("route", ["fast", "modules", "full"])
def test_every_route_gives_the_same(family, route):
    model = tiny_model(family, scale=1)
    if family == "gpt2" and route == "fast":
        with pytest.raises(AttributeError):
            CausalModel(model, route)
        assert open_model(model).route == "modules"
        return
    assert probe_error(CausalModel(model, route), sampling=True) < 1
    assert open_model(model, routes=[route]).route == route


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_cache_goes_by_the_name_that_the_model_has_for_it(name):
    "transformers 5.24 renames it, and drops the older name in 5.40."
    model = tiny_model()
    cache_name = CausalModel(model).cache_name
    kind = type(model.model)

    def newer(self, *, cache=None, **kwargs):
        return kind.forward(self, **kwargs | ({} if cache is None else {cache_name: cache}))

    def older(self, *, past_key_values=None, **kwargs):
        return kind.forward(
            self, **kwargs | ({} if past_key_values is None else {cache_name: past_key_values})
        )

    model.model.__class__ = type("Other", (kind,), {"forward": newer if name == "cache" else older})
    assert CausalModel(model).cache_name == name
    assert probe_error(CausalModel(model), sampling=True) < 1


@pytest.mark.parametrize(("off", "accepted"), [(1e-4, True), (1e-2, False)])
def test_kernels_for_few_tokens_may_round_differently_but_not_be_wrong(off, accepted):
    "On some processors they add up in another order: what the model itself is off by is allowed, up to a limit."
    model = tiny_model()
    whole = model.model.norm.forward

    def rounded(x):
        return whole(x) * (1 + off) if x.shape[:-1].numel() <= 2 else whole(x)

    model.model.norm.forward = rounded
    assert (probe_error(CausalModel(model, "modules"), sampling=True) < 1) == accepted


def test_a_wrong_fast_route_is_not_used():
    "A decoder that looks Llama-shaped but scales its residual stream."
    model = tiny_model()
    down = model.model.layers[0].mlp.down_proj.forward
    model.model.layers[0].mlp.down_proj.forward = lambda x: 2 * down(x)
    assert probe_error(CausalModel(model, "fast"), sampling=True) > 10
    assert open_model(model).route == "modules"


# Dice -----------------------------------------------------------------------------------------------------------


def boundary_gap(model, completion, position: int, seed: int, index: int) -> float:
    "How far the uniform number at a position was from the nearest step of the cumulative distribution."
    with torch.no_grad():
        ids = torch.tensor([completion.full_tokens[: completion.prompt_len + position]])
        cdf = model(ids).logits[0, -1].double().softmax(-1).cumsum(-1)
    return float((cdf - Uniforms(seed, index)[position]).abs().min())


def test_same_seed_same_tokens_in_any_company():
    model = tiny_model()
    ties = 0
    checked_tokens = 0
    for seed in range(12):
        params = SampleParams(n=3, max_tokens=24, seed=seed)
        alone = sample(engine_of(model), PROMPTS[1], params)
        crowd = engine_of(model, max_batch=7)
        others = [
            crowd.submit(p, SampleParams(n=2, max_tokens=5 + seed, temperature=0.7))
            for p in PROMPTS
        ]
        crowd.run_steps(3)
        request = crowd.submit(PROMPTS[1], params)
        finish(crowd, steps=1 + seed)
        assert all(r.done for r in others)
        for index, (a, b) in enumerate(zip(alone, request.completions, strict=True)):
            checked_tokens += 1
            if a.tokens.tolist() != b.tokens.tolist():
                first = next(
                    i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y
                )
                assert boundary_gap(model, a, first, seed, index) < 1e-5, (
                    "tokens differ without a tie"
                )
                ties += 1
    print(
        f"\nsame seed alone and in company: {checked_tokens} completions, {ties} floating-point ties"
    )
    assert ties <= 1


def test_seeds_and_indices_differ_and_none_is_entropy():
    engine = engine_of(tiny_model())
    a = sample(engine, [5], SampleParams(n=3, max_tokens=30, seed=0))
    b = sample(engine, [5], SampleParams(n=1, max_tokens=30, seed=1))
    assert len({tuple(c.tokens) for c in [*a, *b]}) == 4
    free = [tuple(sample(engine, [5], SampleParams(max_tokens=30))[0].tokens) for _ in range(2)]
    assert free[0] != free[1]


@pytest.mark.parametrize(
    "settings_",
    [
        {"min_p": 0.3},
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 1.3, "temperature": 0.7, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_min_p_and_penalty_are_those_of_transformers(settings_):
    "Every token's distribution, from the processors of transformers' own `generate`, in a batch with plain rows."
    model = tiny_model(vocab=40, eos=None, scale=3)
    p = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    engine = Engine(open_model(model), eos_token_ids=frozenset(), max_batch=5)
    p = p | settings_
    plain = engine.submit([5, 6, 7], SampleParams(n=3, max_tokens=12, seed=4))
    request = engine.submit([5, 6, 7, 5], SampleParams(n=4, max_tokens=16, seed=4, **settings_))
    finish(engine)
    judges = transformers.LogitsProcessorList()
    if "repetition_penalty" in settings_:
        judges.append(
            transformers.RepetitionPenaltyLogitsProcessor(settings_["repetition_penalty"])
        )
    judges.append(transformers.TemperatureLogitsWarper(p["temperature"]))
    if p["top_k"]:
        judges.append(transformers.TopKLogitsWarper(p["top_k"]))
    judges.append(transformers.TopPLogitsWarper(p["top_p"]))
    judges.append(transformers.MinPLogitsWarper(p["min_p"]))
    cut = 0
    for c in request.completions:
        ids = torch.tensor([c.full_tokens])
        want = []
        raw = []
        with torch.no_grad():
            logits = model(ids).logits[0]
        for i in range(c.prompt_len, len(ids[0])):
            expected_logprobs = judges(ids[:, :i], logits[i - 1][None].clone()).log_softmax(-1)[0]
            cut += int((expected_logprobs == -torch.inf).sum())
            want.append(float(expected_logprobs[ids[0, i]]))
            raw.append(float(logits[i - 1].log_softmax(-1)[ids[0, i]]))
        # finite, so no token that is cut off was sampled
        assert np.abs(c.sampling_logprobs - want).max() < 1e-4
        assert np.abs(c.logprobs - raw).max() < 1e-4
    assert (cut > 0) == (p["min_p"] > 0)
    alone = Engine(open_model(model), eos_token_ids=frozenset())
    both = [
        (plain, alone.submit([5, 6, 7], plain.params)),
        (request, alone.submit([5, 6, 7, 5], request.params)),
    ]
    finish(alone)
    for a, b in both:
        assert [c.tokens.tolist() for c in a.completions] == [
            c.tokens.tolist() for c in b.completions
        ]


def test_a_grammar_masks_what_is_sampled_and_no_logprob_of_the_model():
    "Each token is sampled from the model's distribution over what may come next; other rows change nothing."
    llguidance = pytest.importorskip("llguidance")
    shape = {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yz"]}}
    rules = {
        "required": ["a", "b"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    grammar = "start: %json " + json.dumps({"type": "object", "properties": shape} | rules)
    model = tiny_model(scale=1)
    settings = {"n": 3, "max_tokens": 60, "seed": 4, "grammar": grammar}
    free = SampleParams(n=2, max_tokens=30, seed=4)
    texts = set()
    engine = engine_of(model)
    held = engine.submit([5, 6], SampleParams(**settings))
    other = engine.submit([7], free)
    greedy = engine.submit([5, 6], SampleParams(**settings | {"temperature": 0, "n": 1}))
    finish(engine)
    assert [c.tokens.tolist() for c in other.completions] == [
        c.tokens.tolist() for c in sample(engine, [7], free)
    ]
    for c in held.completions + greedy.completions:
        matcher = llguidance.LLMatcher(engine.words, grammar)
        logits = (
            model(torch.tensor([c.full_tokens]))
            .logits[0, 1:-1]
            .detach()
            .log_softmax(-1)
            .double()
            .numpy()
        )
        for at, token in enumerate(c.tokens.tolist()):
            allowed = np.frombuffer(matcher.compute_logit_bias(), np.uint8) > 0
            assert allowed[token]
            share = np.logaddexp.reduce(logits[at][allowed])
            assert c.logprobs[at] == pytest.approx(logits[at][token], abs=1e-4)
            used = logits[at][token] - share if c.params.temperature else 0
            assert c.sampling_logprobs[at] == pytest.approx(used, abs=1e-4)
            assert c.params.temperature or logits[at][token] == logits[at][allowed].max()
            matcher.consume_token(token)
        parsed = json.loads(c.text)
        assert (c.finish_reason, c.tokens[-1], c.params.draws_from_raw) == ("stop", EOS, False)
        assert [parsed["a"] in range(100), parsed["b"] in ("x", "yz")] == [True, True]
        texts.add(c.text)
    assert len(texts) > 1


def test_a_grammar_that_cannot_be_followed_is_rejected_at_once(monkeypatch):
    pytest.importorskip("llguidance")
    engine = engine_of(tiny_model())
    with pytest.raises(ConfigError, match="a fast tokenizer"):
        Engine(open_model(tiny_model())).submit(
            [5], SampleParams(max_tokens=9, grammar='start: "x"')
        )
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtra, match=r"rl-notebook\[structured\]"):
        engine.submit([5], SampleParams(max_tokens=9, grammar='start: "x"'))
    assert engine.idle


# The batch ------------------------------------------------------------------------------------------------------


def conversation(engine: Engine, turns: int = 4, n: int = 3) -> list:
    "Completions of turns, each after the first completion of the turn before and some tokens of an answer."
    prompt = list(range(30, 50))
    completions = []
    for turn in range(turns):
        replies = sample(engine, prompt, SampleParams(n=n, max_tokens=7, seed=turn))
        completions += replies
        prompt = [*replies[0].full_tokens, 60 + turn, 61, 62]
    return completions


@pytest.mark.parametrize("family", ["Qwen3", "Gemma3Text", "GPT2", "Mistral"])
def test_a_later_turn_is_read_from_where_the_last_one_ended(family):
    window = {} if family == "GPT2" else {"sliding_window": 9}
    model = random_model(family, **WINDOWED.get(family, ({},))[0] | window)
    engine = Engine(open_model(model), eos_token_ids=frozenset())
    for c in conversation(engine):
        assert (
            np.abs(c.logprobs - plain_logprobs(model, c.full_tokens)[c.prompt_len - 1 :]).max()
            <= 1e-4
        )
    # then one token of the turn before and three new ones
    assert engine.prefilled_tokens == 20 + 4 + 4 + 4
    before = engine.prefilled_tokens
    with torch.no_grad():
        next(model.parameters()).mul_(1.0)  # the same numbers, but the engine cannot know
    conversation(engine, turns=1)
    prompt = [*sample(engine, [5, 6, 7], SampleParams(max_tokens=4, seed=0))[0].full_tokens, 9]
    sample(engine, prompt, SampleParams(max_tokens=4, seed=0))
    assert engine.prefilled_tokens == before + 20 + 3 + 2
    assert engine.prefixes.used == sum(
        t.nbytes for past in engine.prefixes.known.values() for p in past.pairs.values() for t in p
    )


def test_the_prefix_cache_is_bounded(monkeypatch):
    engine = engine_without_end()
    conversation(engine)
    one = engine.prefixes.used // len(engine.prefixes.known)
    monkeypatch.setattr("rl_notebook.backends.local.engine.PREFIX_CACHE_BYTES", 4 * one)
    conversation(engine, turns=6)
    assert 0 < engine.prefixes.used <= 4 * one


def test_buffers_grow_past_a_block():
    engine = engine_without_end(sizes={"context": 400})
    (c,) = sample(engine, PROMPTS[3], SampleParams(max_tokens=300, seed=0))
    assert len(c.tokens) == 300
    assert np.abs(c.logprobs - plain_logprobs(engine.causal.model, c.full_tokens)[29:]).max() < 1e-4


# Endings --------------------------------------------------------------------------------------------------------


def test_eos_ends_a_completion_and_is_part_of_it():
    engine = engine_of(tiny_model(vocab=258, eos=[3, 4]), eos_token_ids=None)
    assert engine.eos_token_ids == {3, 4, EOS}
    completions = sample(engine, [5, 6], SampleParams(n=200, max_tokens=60, seed=0))
    stopped = [c for c in completions if c.finish_reason == "stop"]
    assert stopped
    for c in completions:
        ends = [i for i, t in enumerate(c.tokens) if t in engine.eos_token_ids]
        assert ends == ([len(c.tokens) - 1] if c.finish_reason == "stop" else [])
        assert c.finish_reason == "stop" or len(c.tokens) == 60
        assert c.text == byte_tokenizer().decode(
            [t for t in c.tokens if t not in (3, 4)], skip_special_tokens=True
        )


def test_stop_strings_span_tokens():
    "One byte a token, so a stop string of three letters spans three of them."
    tokenizer = byte_tokenizer()
    engine = engine_without_end()
    for seed in range(8):
        plain = sample(engine, [5, 6], SampleParams(max_tokens=40, seed=seed))[0]
        text = tokenizer.decode(plain.tokens.tolist())
        stop = next(
            (text[i : i + 3] for i in range(5, len(text) - 3) if "\ufffd" not in text[i : i + 3]),
            None,
        )
        if stop is None:
            continue
        (c,) = sample(
            engine, [5, 6], SampleParams(max_tokens=40, seed=seed, stop=("never there", stop))
        )
        assert c.finish_reason == "stop"
        assert c.text == text[: text.find(stop)]
        assert c.tokens.tolist() == plain.tokens.tolist()[: len(c.tokens)]
        assert tokenizer.decode(c.tokens.tolist()).endswith(stop)
        assert stop not in tokenizer.decode(c.tokens.tolist()[:-1])
        return
    pytest.fail("no seed gave three plain letters in a row")


# Windows and states ---------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "head_dim": 8,
}
SIZES |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2}
WINDOWED = {  # family: settings next to the window, and the route that it takes
    "Mistral": ({}, "fast"),
    "Qwen2": ({"use_sliding_window": True, "max_window_layers": 2}, "fast"),
    "Gemma2": ({}, "modules"),
    "Gemma3Text": ({"sliding_window_pattern": 2}, "modules"),
    "GptOss": (MIXED | {"num_local_experts": 4, "num_experts_per_tok": 2}, "modules"),
    "Mixtral": ({"num_local_experts": 4, "num_experts_per_tok": 2}, "modules"),
    "Phi3": ({}, "modules"),
    "Qwen3": ({"use_sliding_window": True, "max_window_layers": 2}, "fast"),
    "Olmo3": (MIXED, "modules"),
    "Cohere2": ({}, "modules"),
    "Ministral": (MIXED, "fast"),
}
LONG = (
    ()
    if os.environ.get("SLOW") == "1"
    else ("Mixtral", "Phi3", "Qwen3", "Olmo3", "Cohere2", "Ministral")
)


def random_model(family: str, **settings):
    "A tiny model of any family, with logits sharp enough to tell one context from another."
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        **SIZES | {"eos_token_id": None, "bos_token_id": None} | settings
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.mul_(4)
    return model


@pytest.mark.parametrize(
    ("family", "window"), [("Mistral", 2), *((f, 7) for f in WINDOWED if f not in LONG)]
)
def test_a_sliding_window_is_attended_over_as_the_model_does_it(family, window):
    settings, route = WINDOWED[family]
    model = random_model(family, sliding_window=window, **settings)
    engine = Engine(open_model(model), max_batch=4, eos_token_ids=frozenset())
    assert (engine.causal.route, engine.max_seq_len) == (route, 128)
    prompts = [list(range(3, 3 + n)) for n in (2, 19, 33)]
    requests = [engine.submit(p, SampleParams(n=2, max_tokens=45, seed=1)) for p in prompts]
    greedy = engine.submit(prompts[1], SampleParams(max_tokens=40, temperature=0))
    finish(engine)
    with torch.no_grad():
        want = model.generate(torch.tensor([prompts[1]]), max_new_tokens=40, do_sample=False)[
            0, 19:
        ].tolist()
    assert greedy.completions[0].tokens.tolist() == want
    for c in (c for r in requests for c in r.completions):
        assert (
            np.abs(c.logprobs - plain_logprobs(model, c.full_tokens)[c.prompt_len - 1 :]).max()
            <= 1e-4
        )
    tokens = requests[1].completions[0].full_tokens
    (scored,) = echo(engine, [tokens])
    assert np.abs(scored.values - plain_logprobs(model, tokens)).max() <= 1e-4
    model.config.get_text_config().sliding_window = 128  # the window matters, so the test can fail
    assert np.abs(scored.values - plain_logprobs(model, tokens)).max() > 1e-2


def test_a_route_that_forgets_the_window_is_not_used():
    "Twelve tokens of a probe do not reach past the window of a real model; the probe does."
    model = random_model("Mistral", sliding_window=64)
    causal = CausalModel(model, "fast")
    assert probe_error(causal, sampling=True) < 1
    forgetful = causal.fast
    causal.fast = lambda *args: forgetful(*args[:-1], (None,) * 4)
    assert probe_error(causal, sampling=True) > 10
    assert model.config.sliding_window == 64


NOT_SUPPORTED = {  # family: settings, and what the message says
    "Rwkv": ({}, r"RwkvForCausalLM: the model cannot be run"),
    "xLSTM": ({}, r"xLSTMForCausalLM: the model cannot be run"),
    "Llama4Text": (
        {"attention_chunk_size": 8, "num_local_experts": 2},
        r"Llama4ForCausalLM: the model cannot be sampled from here: got .* chunked_attention",
    ),
}


@pytest.mark.parametrize("family", NOT_SUPPORTED)
def test_models_that_cannot_be_run_are_rejected_by_name_and_sent_on(family):
    settings, message = NOT_SUPPORTED[family]
    with pytest.raises(BackendError, match=f"^{message}.*Train it on a service"):
        open_model(random_model(family, **settings))


# The head -------------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    rows=st.integers(0, 9),
    vocab=st.integers(2, 30),
    chunk=st.integers(1, 200),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    frozen=st.booleans(),
    bias=st.booleans(),
    cap=st.sampled_from([None, 2.0]),
    masked=st.integers(0, 3),
    with_entropy_grad=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    seed=st.integers(0, 1000),
)
def test_the_chunked_head_is_the_plain_one(
    rows, vocab, chunk, temperature, frozen, bias, cap, masked, with_entropy_grad, dtype, seed
):
    torch.manual_seed(seed)
    head = torch.nn.Linear(6, vocab, bias=bias, dtype=dtype).requires_grad_(not frozen)
    if cap:
        head = AdjustedHead(head, 1.5, cap)
    unknown = torch.arange(vocab) >= max(1, vocab - masked)
    if unknown.any():
        head = KnownHead(head, unknown)
    hidden = torch.randn(rows, 6, dtype=dtype)
    targets = torch.randint(int((~unknown).sum()), (rows,))
    along = torch.randn(2, rows, dtype=dtype)

    def run(make):
        h = hidden.clone().requires_grad_()
        outputs = make(h)
        inputs = [h, *(p for p in head.parameters() if p.requires_grad)]
        of = [out for out in outputs if out.requires_grad]
        return [*outputs, *torch.autograd.grad(of, inputs, list(along[: len(of)]))]

    def plain(h):
        logprobs = (head(h) / temperature).log_softmax(-1)
        entropies = -(logprobs.exp() * logprobs.clamp(min=-1e4)).sum(-1)
        picked = logprobs.gather(-1, targets[:, None])[:, 0]
        return picked, entropies if with_entropy_grad else entropies.detach()

    chunked = run(
        lambda h: head_logprobs(h, targets, head, temperature, chunk, True, with_entropy_grad)
    )
    for a, b in zip(chunked, run(plain), strict=True):
        atol = 1e-12 if dtype == torch.float64 else 1e-6 * max(1.0, float(b.detach().norm()))
        assert torch.allclose(a, b, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("tied", "dtype"), [(False, "float32"), (True, "float32"), (True, "bfloat16")]
)
def test_large_matrices_are_read_in_blocks_and_follow_a_sync(tied, dtype):
    "In half precision only where the processor multiplies it."
    atol = {"float32": 1e-4, "bfloat16": 0.2}[dtype]
    model = tiny_model(hidden=384, vocab=1000, tied=tied, eos=None, scale=1.0).to(
        getattr(torch, dtype)
    )
    causal = open_model(model)
    assert causal.route == "fast"
    has_kernel = dtype == "float32" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert takes_blocks(mergeable([bare_model(model).lm_head])) == has_kernel
    engine = Engine(causal, byte_tokenizer(), eos_token_ids=frozenset())
    for _ in range(3):
        for prompt, n in (([5, 6, 7], 1), (list(range(9, 30)), 5)):
            for c in sample(engine, prompt, SampleParams(max_tokens=12, n=n, seed=1)):
                expected = plain_logprobs(model, [*prompt, *c.tokens])[len(prompt) - 1 :]
                np.testing.assert_allclose(c.logprobs, expected, atol=atol)
        with torch.no_grad():
            for p in model.parameters():  # written in place, as by a sync
                p.mul_(1.3)
