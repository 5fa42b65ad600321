"The rollout contract, driven to its edges: what is passed, what is retried, what is counted, what ends the run."

import asyncio
import gc
import warnings
from dataclasses import replace

import httpx
import numpy as np
import pytest
from golden_adapters import simulate
from hypothesis import given
from hypothesis import strategies as st

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.config.config import Config
from rl_notebook.core.types import AlignmentError, BackendError, Completion, RewardError, RolloutRun
from rl_notebook.core.types import RolloutSample, SampleParams
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.loop.rollouts import CircuitBreaker, assemble, sample_completions, sample_rollouts
from rl_notebook.loop.rollouts import sampling_seed, prompt_seed
from rl_notebook.task.chat import start_conversation
from rl_notebook.task.data import Prompt, Rollouts, Row, load_rows
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_rows

PROMPT = Prompt(Row(key="q17", prompt="3+5=", answer="8"), [1, 3, 10, 5], index=3, number=41)
WHERE = r"group 3 \(row 'q17', number 41\), rollout 2"


def sample(reward=1.0, **changes) -> RolloutSample:
    "An answer to `PROMPT`."
    fields = {
        "tokens": [1, 3, 10, 5, 8, 2],
        "logprobs": [0.0] * 4 + [-0.1, -0.2],
        "loss_mask": [0] * 4 + [1, 1],
    }
    return RolloutSample(**fields | changes, reward=reward)


def status(code) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "http://localhost")
    return httpx.HTTPStatusError(
        f"status {code}", request=request, response=httpx.Response(code, request=request)
    )


def run_rollouts(rollout_fn, n=4, **options) -> Rollouts:
    "All samples of the prompt, on a clock on which waiting takes no time."
    return simulate(sample_rollouts(rollout_fn, PROMPT, n, **options))


def run_with_complaints(coroutine):
    "Run a coroutine; returns its result, and every complaint of the event loop about what was left behind."
    complaints = []

    async def main():
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: complaints.append(context)
        )
        try:
            return await coroutine
        finally:
            gc.collect(1)
            await asyncio.sleep(0)
            left = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            complaints.extend(f"still running: {t}" for t in left)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            result = simulate(main())
        except Exception as error:
            result = error
    gc.collect(1)
    return result, complaints


# --- what is passed --------------------------------------------------------------------------------------------------


@given(
    st.sets(st.sampled_from(["row_index", "epoch", "rollout_index", "evaluation"])), st.booleans()
)
def test_a_function_gets_the_context_that_it_names_and_nothing_else(names, everything):
    received = []
    parameters = ", ".join(["sample_prompt", *sorted(names), *(["**more"] if everything else [])])
    scope = {"received": received, "sample": sample}
    source = f"async def f({parameters}):\n    received.append(locals())\n    return sample()"
    exec(source, scope)
    run_rollouts(scope["f"], context={"epoch": 2, "evaluation": True})
    whole = {"row_index": 41, "epoch": 2, "evaluation": True}
    for i, got in enumerate(received):
        expected = whole | {"rollout_index": i}
        assert {k: v for k, v in got.items() if k in expected} == {k: expected[k] for k in names}
        assert got.get("more", {}) == (
            {k: v for k, v in expected.items() if k not in names} if everything else {}
        )


# --- what is tried again ---------------------------------------------------------------------------------------------

PASSING = [
    httpx.ConnectError("no connection"), status(429), TimeoutError("slow"), ExceptionGroup("both", [TimeoutError()]),
]  # fmt: skip
FATAL = [
    status(401), KeyError("answer"), ExceptionGroup("both", [TimeoutError(), KeyError("answer")]),
]  # fmt: skip


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_a_lost_connection_is_tried_again_and_then_the_sample_is_lost(error):
    calls = []
    seeds = set()

    async def fails(sample_prompt, rollout_index):
        calls.append(rollout_index)
        if rollout_index != 2:
            return sample()
        seeds.add(sample_prompt["seed"])
        raise error

    sampled = run_rollouts(fails, retries=3)
    assert calls.count(2) == 4
    assert len(calls) == 7
    assert len(seeds) == 1, "nothing was sampled, so a retry has the same seed"
    assert len(sampled.samples) == 3
    assert sampled.dropped == (f"rollout 2 raised {type(error).__name__}: {error}",)
    assert len(run_rollouts(fails).dropped) == 1


def test_an_error_of_a_backend_loses_the_sample_at_once_since_the_backend_retried():
    calls = []

    async def fails(sample_prompt, rollout_index):
        calls.append(rollout_index)
        if rollout_index == 2:
            raise BackendError("busy")
        return sample()

    sampled = run_rollouts(fails, retries=3)
    assert (calls.count(2), len(sampled.samples)) == (1, 3)
    assert sampled.dropped == ("rollout 2 raised BackendError: busy",)


@pytest.mark.parametrize("error", FATAL, ids=repr)
def test_any_other_failure_ends_the_run_and_says_where(error):
    ended = []

    async def fails(sample_prompt, rollout_index):
        if rollout_index == 2:
            await asyncio.sleep(1)
            raise error
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(5)  # tidying up takes a while
            ended.append(rollout_index)

    raised, complaints = run_with_complaints(sample_rollouts(fails, PROMPT, 4, retries=3))
    assert isinstance(raised, RewardError)
    assert f"rollout_fn raised {type(error).__name__}" in str(raised)
    assert str(raised).startswith("group 3 (row 'q17', number 41), rollout 2: ")
    assert raised.__cause__ is error
    assert sorted(ended) == [0, 1, 3], "the others were cancelled, and waited for"
    assert complaints == []


def test_a_cancelled_step_cancels_its_rollouts():
    ended = []

    async def waits(sample_prompt, rollout_index):
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(rollout_index)

    async def main():
        task = asyncio.create_task(sample_rollouts(waits, PROMPT, 3, retries=9, group_retries=9))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    _, complaints = run_with_complaints(main())
    assert sorted(ended) == [0, 1, 2]
    assert complaints == []


def test_a_rollout_that_cancels_itself_is_not_a_cancelled_step():
    async def gives_up(sample_prompt, rollout_index):
        if rollout_index == 2:
            raise asyncio.CancelledError
        return sample()

    with pytest.raises(RewardError, match=f"^{WHERE}: rollout_fn cancelled itself"):
        run_rollouts(gives_up)


# --- what is lost, and sampled again ---------------------------------------------------------------------------------


@given(
    st.lists(
        st.lists(st.sampled_from(["ok", "none", "lost"]), min_size=1, max_size=4),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 3),
)
def test_lost_samples_are_made_again_and_everything_is_counted(plan, rounds):
    seeds = []
    calls = []

    async def planned(sample_prompt, rollout_index):
        calls.append(rollout_index)
        seeds.append(sample_prompt["seed"])
        outcomes = plan[rollout_index]
        fate = outcomes[min(calls.count(rollout_index), len(outcomes)) - 1]
        if fate == "lost":
            raise ConnectionError("gone")
        return None if fate == "none" else sample(reward=float(rollout_index))

    n = len(plan)
    sampled = run_rollouts(planned, n=n, seed=5, group_retries=rounds)
    tried = [[*fates, *[fates[-1]] * 9][: rounds + 1] for fates in plan]
    expected = [i for i, fates in enumerate(tried) if "ok" in fates]
    assert [s.reward for s in sampled.samples] == expected
    assert len(sampled.samples) + len(sampled.dropped) == n
    assert [calls.count(i) for i in range(n)] == [
        f.index("ok") + 1 if "ok" in f else rounds + 1 for f in tried
    ]
    assert len(sampled.resampled) == len(calls) - n
    assert len(set(seeds)) == len(seeds)
    assert sorted(seeds[:n]) == [prompt_seed(5, 41) + i for i in range(n)], (
        "the first round is as it always was"
    )
    assert set(seeds[n:]) <= {
        sampling_seed(5, 41, i, r) for i in range(n) for r in range(1, rounds + 1)
    }


def test_an_unscorable_sample_is_not_sampled_again():
    calls = []

    async def unscorable(sample_prompt):
        calls.append(1)
        return sample(reward=None)

    sampled = run_rollouts(unscorable, group_retries=3)
    assert (len(calls), sampled.resampled) == (4, ())
    assert assemble(sampled, sampled.samples).dropped == tuple(
        f"sample {i} is unscorable" for i in range(4)
    )


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from([1.0, 0.0, None])), min_size=1, max_size=6
    ),
    st.integers(0, 3),
    st.integers(1, 5),
)
def test_samples_and_reasons_add_up_and_runs_stay_whole(planned_runs, lost, smallest):
    async def run(sample_prompt, rollout_index):
        if rollout_index >= len(planned_runs):
            return None
        segments, reward = planned_runs[rollout_index]
        return RolloutRun((sample(),) * segments, reward)

    sampled = run_rollouts(run, n=len(planned_runs) + lost)
    group = assemble(sampled, sampled.samples, smallest)
    scored = [i for i, (_, reward) in enumerate(planned_runs) if reward is not None]
    expected = scored if len(scored) >= smallest else []
    assert len(group.run_starts) == len(expected)
    assert len(group.run_starts) + len(group.dropped) == len(planned_runs) + lost
    if group.runs:
        assert list(group.runs) == [i for i in expected for _ in range(planned_runs[i][0])]
    elif group.samples:
        assert all(n == 1 for n, _ in planned_runs)
    if 0 < len(scored) < smallest:
        each = "run" if sampled.runs else "sample"
        few = f"group has {len(scored)} of {len(planned_runs) + lost} {each}s; min_group_size is {smallest}"
        assert group.dropped.count(few) == len(scored)


# --- samples that cannot be right ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"logprobs": [0.0] * 4 + [-0.1, None]},
            "logprobs: got nan at token 5, where loss_mask is 1",
        ),
        ({"tokens": [1, 3, -100, 5, 8, 2]}, "tokens: got -100 at token 2; expected ids from 0"),
        (
            {"logprobs": [0.0] * 4 + [-0.1, 0.3]},
            "logprobs: got 0.3 at token 5, .*; expected natural logs of prob",
        ),
        (
            {"finish_reason": "banana"},
            r"finish_reason: got 'banana'; expected \('stop', 'length', 'abort', 'cut'\)",
        ),
        ({"reward": np.inf}, "reward: got inf; expected a finite number or None"),
        (
            {"logprobs": [-0.1, -0.2]},
            "RolloutSample: logprobs: got 2 values for 6 tokens; expected one per token",
        ),
        ({"loss_mask": [0] * 6}, "RolloutSample: loss_mask: got no sampled token"),
        (
            {"loss_mask": [0, 0, 0, 0, 1, 2]},
            r"RolloutSample: loss_mask: got \[0, 1, 2\]; expected 0 or 1",
        ),
    ],
    ids=lambda x: "" if isinstance(x, str) else repr(x),
)
def test_a_sample_that_cannot_be_right_is_named(changes, says):
    async def alone(sample_prompt, rollout_index):
        return sample(**changes) if rollout_index == 2 else sample()

    async def in_a_run(sample_prompt, rollout_index):
        reward = changes.get("reward", 1.0)
        return RolloutRun((sample(), sample(**changes)), reward) if rollout_index == 2 else sample()

    with pytest.raises((AlignmentError, RewardError), match=f"^{WHERE}: {says}"):
        run_rollouts(alone)
    segment = (
        "" if "RolloutSample" in says else ", segment 0" if "reward" in changes else ", segment 1"
    )
    with pytest.raises((AlignmentError, RewardError), match=f"^{WHERE}{segment}: {says}"):
        run_rollouts(in_a_run)


def test_a_promise_that_is_not_kept_is_named():
    async def text(sample_prompt):
        return "8"

    def blocking(sample_prompt):
        return sample()

    with pytest.raises(
        RewardError,
        match="rollout 0: rollout_fn: got str; expected RolloutSample, RolloutRun or None",
    ):
        run_rollouts(text)
    with pytest.raises(
        RewardError, match="rollout 0: rollout_fn: got RolloutSample; expected something to await"
    ):
        run_rollouts(blocking)


# --- the breaker -----------------------------------------------------------------------------------------------------


@given(
    st.lists(st.booleans(), max_size=150),
    st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    st.sampled_from([2, 8, 64]),
)
def test_a_breaker_trips_when_it_should_and_not_before(lost, limit, window):
    breaker = CircuitBreaker(limit, window)
    seen = []
    for bad in lost:
        seen = [*seen, bad][-window:]
        if 2 * len(seen) >= window and sum(seen) > limit * len(seen):
            with pytest.raises(
                BackendError,
                match=f"{sum(seen)} of the last {len(seen)} .*max_rollout_failure_rate",
            ):
                breaker.note("rejected" if bad else "")
            return
        breaker.note("rejected" if bad else "")


# --- straight from the sampler ---------------------------------------------------------------------------------------


class Shaky:
    "A sampler of which some requests fail and some completions are empty."

    def __init__(self, *plan):
        self.plan = list(plan)
        self.asked = []

    async def sample(self, prompt_tokens, params):
        self.asked.append(params)
        empty = self.plan.pop(0) if self.plan else ()
        if isinstance(empty, Exception):
            raise empty
        full = Completion(prompt_tokens, [8, 2], [-0.1, -0.2])
        return [
            replace(full, tokens=[], logprobs=[]) if i in empty else full for i in range(params.n)
        ]


def test_a_request_is_tried_again_with_the_same_seed_and_empty_completions_with_others():
    sampler = Shaky(ConnectionError("gone"), (0, 3), (1,), (0,))
    params = SampleParams(n=4, seed=5)
    completions = simulate(sample_completions(sampler, PROMPT, params, retries=1, group_retries=2))
    assert [p.n for p in sampler.asked] == [4, 4, 2, 1]
    assert sampler.asked[0].seed == sampler.asked[1].seed == prompt_seed(5, 41)
    assert len({p.seed for p in sampler.asked}) == 3
    assert (len(completions.samples), completions.dropped) == (3, ("completion 3 is empty",))
    assert completions.resampled == (
        "completion 0 is empty",
        "completion 3 is empty",
        "completion 3 is empty",
    )


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "got None"),
        ("text", "got 'text'"),
        ([None], "got None as completion 0"),
        ((), "0 completions"),
    ],
)
def test_a_sampler_that_returns_no_completions_is_named(returned, message):
    class Custom:
        async def sample(self, prompt_tokens, params):
            return returned

    class Plain(Custom):
        def sample(self, prompt_tokens, params):
            return returned

    with pytest.raises(
        BackendError, match=rf"group 3 \(row 'q17'\): .*: got {message.removeprefix('got ')}"
    ):
        simulate(sample_completions(Custom(), PROMPT, SampleParams(n=2)))
    with pytest.raises(
        BackendError, match=r"Plain\.sample: got .*; expected something to await\. Write `async def"
    ):
        simulate(sample_completions(Plain(), PROMPT, SampleParams(n=2)))


def test_a_lost_request_is_an_error_unless_a_breaker_watches():
    params = SampleParams(n=4)
    with pytest.raises(BackendError, match="down"):
        simulate(sample_completions(Shaky(BackendError("down")), PROMPT, params))
    breaker = CircuitBreaker(0.5)
    completions = simulate(
        sample_completions(Shaky(BackendError("down")), PROMPT, params, breaker=breaker)
    )
    assert completions.dropped == ("the request raised BackendError: down",) * 4
    assert len(breaker.recent) == 1
    with pytest.raises(KeyError):
        simulate(
            sample_completions(Shaky(KeyError("bug")), PROMPT, params, retries=3, breaker=breaker)
        )


# --- the function of the Fireworks guides, with no line changed but its imports --------------------------------------

ROLLOUT = '''
from rl_notebook.recipes.open import build_deployment_sampler
from rl_notebook.core.types import RolloutSample

def make_rollout_fn(setup):
    sampler = build_deployment_sampler(setup)
    sample_kwargs = dict(setup.sample_kwargs)

    async def rollout_fn(sample_prompt: dict) -> RolloutSample | None:
        completions = await sampler.sample_with_prompt_tokens(
            sample_prompt["prompt_token_ids"], n=1, **sample_kwargs,
        )
        if not completions:
            return None
        c = completions[0]
        output = list(c.full_tokens)[c.prompt_len:]
        return RolloutSample(
            tokens=list(c.full_tokens),
            logprobs=[0.0] * c.prompt_len + list(c.inference_logprobs),
            loss_mask=[0] * c.prompt_len + [1] * len(output),
            reward=score(c),                       # your reward function
            finish_reason=c.finish_reason,
            text=c.text,
        )

    return rollout_fn
'''  # fmt: skip


def guide_function(score):
    "What the guide's file defines, with a custom reward function."
    scope = {"score": score}
    exec(compile(ROLLOUT, "rollout.py", "exec"), scope)
    return scope["make_rollout_fn"]


def loop_of(reward, **settings) -> GRPOLoop:
    "A loop over the built-in task on the model that ships."
    small = {
        "prompt_groups_per_step": 2,
        "completions_per_prompt": 4,
        "max_completion_tokens": 12,
        "max_seq_len": 96,
    }
    cfg = Config(**small | {"learning_rate": 1e-3, "kl_beta": 0.0} | settings)
    model, tokenizer = load_model("tiny")
    backend = open_local(model, tokenizer, temperature=cfg.temperature, reference=False)
    return GRPOLoop(backend, load_rows(toy_rows(8, seed=3)), reward, cfg)


async def steps(loop, count=2) -> list:
    return [await loop.step() for _ in range(count)]


def test_the_guides_rollout_trains_like_any_other():
    records, again = (
        asyncio.run(steps(loop_of(guide_function(lambda c: len(c.text) / 10)))) for _ in range(2)
    )
    for record, same in zip(records, again, strict=True):
        assert record.trained
        assert record.metrics["rollout/num_dropped"] == 0
        assert record.metrics["staleness/max"] == 0, (
            "a sample put together by hand is as old as what it is made of"
        )
        for group, same_group in zip(record.groups, same.groups, strict=True):
            texts = [s.text for s in group.samples]
            assert texts == [s.text for s in same_group.samples], (
                "no seed was passed on, and yet it repeats"
            )
            assert len(set(texts)) > 1, "samples of a prompt are not copies of each other"
            for s in group.samples:
                assert s.policy_version == record.step - 1
                np.testing.assert_allclose(s.raw_logprobs, s.logprobs, atol=1e-6)
        for policy, d in zip(record.loss.logprobs, record.datums, strict=True):
            gap = np.abs(policy.values - d.sampler_logprobs)[d.active].max()
            assert gap < 1e-4, "trainer and sampler see the same tokens at the same places"


REWRITES = {  # what a template makes of an assistant's turn
    "drops its thought": ("{{ m.content.split('</think>')[-1] }}", "<think>2+2</think>4"),
    "rejects it": (
        "{% if '?' in m.content %}{{ raise_exception('no questions') }}{% endif %}{{ m.content }}",
        "4?",
    ),
}


@pytest.mark.parametrize("rewrites", REWRITES)
def test_a_turn_that_a_template_changes_costs_only_that_rollout(rewrites, tmp_path):
    change, reply = REWRITES[rewrites]
    turn = "{% if m.role == 'assistant' %}" + change + "{% else %}{{ m.content }}{% endif %}"
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
        + turn
        + "{{ '<|end|>' }}{% endfor %}<|assistant|>"
    )
    (tmp_path / "t.jinja").write_text(template)

    def factory(setup):
        async def rollout_fn(sample_prompt, rollout_index):
            c = start_conversation(
                setup.tokenizer, Row(key="q", messages=tuple(sample_prompt["messages"]))
            )
            completion = setup.tokenizer.encode(
                (reply if rollout_index == 1 else "4") + "<|end|>", add_special_tokens=False
            )
            c = c.add_completion(Completion(c.tokens, completion, [-0.5] * len(completion)))
            c = c.add_messages({"role": "user", "content": "Sure?"})
            [last] = await setup.sampler.sample(c.tokens, setup.params)
            return c.add_completion(last).to_sample(float(rollout_index))

        return rollout_fn

    overrides = {"chat_template": str(tmp_path / "t.jinja"), "max_seq_len": 160}
    record = asyncio.run(loop_of(factory, **overrides).step())
    assert record.trained
    assert record.metrics["rollout/num_dropped"] == 2
    for group in record.groups:
        assert len(group.samples) == 3
        [reason] = group.dropped
        assert reason.startswith("rollout 1 cannot be continued (on_template_mismatch: drop): ")
        assert "no questions" in reason or "differs from the chat template's rendering" in reason
    with pytest.raises(
        AlignmentError,
        match=r"rollout 1.*(no questions|differs from the chat template's rendering)",
    ):
        asyncio.run(loop_of(factory, **overrides, on_template_mismatch="raise").step())
