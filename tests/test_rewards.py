"Reward functions: reading answers, every signature, misbehaviour with its message, and the worker process."

import asyncio
import functools
import math
import os
import signal
import sqlite3
import threading
import time

import numpy as np
import pytest
import torch
from errors import failed
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_notebook.core.types import Completion, RewardError, RolloutSample
from rl_notebook.task.data import make_row
from rl_notebook.task.rewards import (
    LIMITS,
    Limits,
    MathVerify,
    final_answer,
    graded,
    gsm8k_reward,
    last_boxed,
    make_length_reward,
    make_soft_overlong,
    parse_number,
    reward_fn,
    score,
    score_blocking,
    tagged_integer_reward,
    weighted_total,
)

CHAT = make_row({"id": "q17", "question": "48/2+48?", "answer": "72", "level": "easy"})
TEXT = make_row({"id": "q18", "prompt": "48/2+48 =", "answer": "72"})


def values(function, texts=("72", "7"), row=CHAT, **options) -> list[float]:
    return score_blocking(texts, row, [function], **options).values[0].tolist()


# --- reading answers


@given(st.integers(-(10**12), 10**12))
def test_whole_numbers_read_back_with_and_without_separators(n):
    assert {parse_number(t) for t in (str(n), f"{n:,}", f"${n:,}", f"{n:,}.00 USD", f"x = **{n}**")} == {n}


@given(st.text(max_size=60))
def test_any_text_is_read_without_an_exception(text):
    parse_number(text)
    for wrapped in (text, f"<answer>{text}</answer>", f"\\boxed{{{text}}}", f"#### {text}"):
        assert gsm8k_reward(wrapped, "#### 72") in (0.0, 1.0)
        assert tagged_integer_reward(wrapped, "<answer>72</answer>") in (0.0, 1.0)


@given(st.text(alphabet="ab{}\\", max_size=30))
def test_a_boxed_answer_has_matched_braces(text):
    found = last_boxed(text.replace("ab", "\\boxed{"))
    if found is not None:
        bare = found.replace("\\{", "").replace("\\}", "")
        assert bare.count("{") == bare.count("}")


@pytest.mark.parametrize(
    ("given", "truth", "reward"),
    [  # what a reader of the two would say
        ("minus 7", "7", 0),
        ("–7", "7", 0),
        ("x = –3", "-3", 1),
        ("-$5", "-5", 1),
        ("±7", "7", 0),
        ("2³", "2", 0),
        ("10²", "100", 1),
        ("2.998×10⁸", "299800000", 1),
        ("3½", "3", 0),
        ("-3½", "-3.5", 1),
        ("3 1/2 cups", "3.5", 1),
        (r"1\frac{1}{2}", "1.5", 1),
        ("1.5 million", "1.5", 0),
        ("1.5 million", "1500000", 1),
        ("5k", "5000", 1),
        ("5 km", "5", 1),
        ("50%", "0.5", 0),
        ("72%", "72", 1),
        ("1,234", "1234", 1),
        ("1,23", "123", 0),
        ("1\u202f234", "1234", 1),
        ("72, 73", "72", 0),
        ("5x", "5", 0),
        ("x - 7", "7", 0),
        ("6.63e-34", "9.1e-31", 0),
        ("1e-7", "0", 0),
        (str(2**100 + 1), str(2**100), 0),
        ("1e400", "1", 0),
    ],
)
def test_a_number_is_read_as_what_is_written(given, truth, reward):
    assert gsm8k_reward(f"#### {given}", truth) == reward


@pytest.mark.parametrize("name", ["gsm8k", "gsm8k_strict", "math_verify"])
def test_any_of_several_accepted_answers_counts(name):
    if name == "math_verify":
        pytest.importorskip("math_verify")
    wrap = "<answer>{}</answer>".format
    row = make_row({"question": "q", "answer": [wrap(72), wrap(73)]})
    assert score_blocking([wrap(72), wrap(73), wrap(74)], row, name).totals.tolist() == [1, 1, 0]


def test_where_the_answer_stands():
    assert final_answer("<answer>1</answer><answer>2</answer>") == "1"
    assert final_answer("\\boxed{1} \\boxed{2}") == "2"
    assert final_answer("#### 1\n#### 2\nmore") == "2"
    assert final_answer("<answer>\\boxed{5}</answer>") == "5"
    assert final_answer("<think><answer>1</answer></think>") is None
    assert gsm8k_reward("<think>#### 72", "72") == 0.0


@pytest.mark.parametrize(
    ("boxed", "truth", "reward"),
    [  # what the reward of the reference's multi-turn example gives, executed
        ("1e2", "#### 100", 1.0),
        ("1e3", "#### 100", 0.0),
        ("3+4", "#### 7", 1.0),
        ("3+4", "#### 8", 0.0),
        (r"\sqrt{16}", "#### 4", 1.0),
        (r"\sqrt{17}", "#### 4", 0.0),
        (r"\frac{8}{2}", "#### 4", 1.0),
        (r"2 \times 2", "#### 4", 1.0),
        ("４", "#### 4", 1.0),
        ("٤٢", "#### 42", 1.0),
        ("4", "4+0\n#### 4\n#### 5", 1.0),
        ("5", "4+0\n#### 4\n#### 5", 1.0),
        ("6", "4+0\n#### 4\n#### 5", 0.0),
    ],
)
def test_boxed_answers_are_graded_as_the_reference_grades_them(boxed, truth, reward, judge):
    text = f"so \\boxed{{{boxed}}}"
    assert gsm8k_reward(text, truth) == reward
    assert asyncio.run(judge(text, truth)) == reward


# --- every signature


def test_trl_sync_async_and_columns():
    seen = {}

    def sync(prompts, completions, completion_ids, level, solution, trainer_state, log_metric, **kwargs):
        seen.update(prompts=prompts, completions=completions, ids=completion_ids, level=level, solution=solution)
        seen.update(step=trainer_state.global_step, rest=kwargs)
        log_metric("n", 3)
        return [1, None]

    async def later(completions, **kwargs):
        await asyncio.sleep(0)
        return np.array([0.5, 0.25])

    drawn = [Completion([5, 6], [8, 2], [-0.1, -0.2], text=t) for t in ("72", "7")]
    scores = score_blocking(drawn, CHAT, [sync, later], step=7)
    assert seen["prompts"] == [[{"role": "user", "content": "48/2+48?"}]] * 2
    assert seen["completions"] == [[{"role": "assistant", "content": t}] for t in ("72", "7")]
    assert (seen["ids"], seen["level"], seen["solution"]) == ([[8, 2]] * 2, ["easy"] * 2, ["72"] * 2)
    assert seen["step"] == 7
    assert set(seen["rest"]) == {"id", "question", "answer", "log_extra"}
    assert scores.rewards(1) == {"sync": None, "later": 0.25}
    assert scores.metrics == {"n": 3.0}
    score_blocking(["72"], TEXT, lambda prompts, completions: seen.update(p=prompts, c=completions) or [0])
    assert (seen["p"], seen["c"]) == (["48/2+48 ="], ["72"])


def test_trls_own_functions_work_unchanged():
    rewards = pytest.importorskip("trl.rewards")
    pytest.importorskip("math_verify")
    texts = ["<think>\nhm\n</think>\nSo \\boxed{72}.", "\\boxed{71}"]
    functions = [rewards.accuracy_reward, rewards.think_format_reward, rewards.get_soft_overlong_punishment(4, 2)]
    drawn = [Completion([5], range(n), [-0.1] * n, text=t) for t, n in zip(texts, (3, 9), strict=True)]
    row = make_row({"prompt": [{"role": "user", "content": "48/2+48?"}], "solution": "$72$"})
    assert [v.tolist() for v in score_blocking(drawn, row, functions).values] == [[1, 0], [1, 0], [-0.5, -1]]


def test_verl_float_and_dict():
    row = make_row(
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": "48/2+48?"}],
            "reward_model": {"style": "rule", "ground_truth": "72"},
            "extra_info": {"index": 3},
        }
    )

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        assert (data_source, extra_info) == ("openai/gsm8k", {"index": 3, "num_turns": 2})
        return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth}

    scores = score_blocking(["72", "7"], row, compute_score)
    assert (scores.totals.tolist(), scores.metrics) == ([1, 0], {"acc": 0.5})
    assert values(lambda solution_str, ground_truth: 0.5, row=row) == [0.5, 0.5]


def test_verifiers_gets_what_its_own_caller_passes():
    row = make_row({"question": "q", "answer": "72", "info": '{"unit": "clips"}', "task": "gsm8k"})

    def by_state(state):
        assert (state["info"], state["task"], state["turn"]) == ({"unit": "clips"}, "gsm8k", 1)
        return float(state["answer"] == state["completion"][-1]["content"])

    def by_parser(completion, answer, parser, info):
        assert info == {"unit": "clips"}
        return float(parser.parse_answer(completion) == answer)

    def group(completions, answers, infos, tasks, states):
        assert (infos, tasks) == ([{"unit": "clips"}] * 2, ["gsm8k"] * 2)
        return [float(c[-1]["content"] == a) for c, a in zip(completions, answers, strict=True)]

    def states_only(states):
        return [float(s["completion"][-1]["content"] == s["answer"]) for s in states]

    for fn in (by_state, by_parser, group, states_only):
        assert values(fn, row=row) == [1, 0]


def test_verifiers_sync_async_and_conversations():
    async def correct(completion, answer, **kwargs):
        assert kwargs["prompt"] == list(CHAT.messages)
        assert kwargs["state"]["completion"] == completion
        return float(completion[-1]["content"] == answer)

    def chatty(completion, info):
        assert info == {}
        return len(completion)

    assert values(correct) == [1, 0]
    assert values(chatty, texts=["72"], row=TEXT) == [2]  # text where the row is text
    turns = [{"role": "assistant", "content": "7"}, {"role": "user", "content": "Sure?"}]
    turns += [{"role": "assistant", "content": "72"}]
    sample = RolloutSample([1, 2, 3], [0, -1, -1], [0, 1, 1], None, text="772", info={"messages": turns})
    assert values(correct, texts=[sample]) == [1]


def test_native_gets_what_it_names():
    assert values(lambda c: len(c)) == [2, 1]
    assert values(lambda text, row: float(row.key == "q17")) == [1, 1]
    assert values(lambda text, *, level="none", missing=0.25: missing if level == "easy" else 0) == [0.25, 0.25]
    assert values(lambda text, **everything: len(everything)) == values(lambda text, **kw: len(kw))
    drawn = Completion([5], [8, 2, 3], [-0.1] * 3, text="72")
    assert values(make_soft_overlong(4, 2), texts=[drawn]) == [-0.5]
    assert values(make_length_reward(3, 2), texts=[drawn]) == [1]
    assert values(functools.partial(lambda bonus, text, answer: bonus, 0.5)) == [0.5, 0.5]
    assert values(lambda text: torch.tensor(0.5)) == [0.5, 0.5]


# --- several, weighted, unscorable


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.5, 1.0, -2.0]), st.lists(st.none() | st.floats(-5, 5), min_size=3, max_size=3)
        ),
        min_size=1,
        max_size=4,
    )
)
def test_weighted_total_against_plain_python(columns):
    table = [np.array([math.nan if v is None else v for v in cells]) for _, cells in columns]
    totals = weighted_total(table, [w for w, _ in columns])
    for i, total in enumerate(totals):
        said = [w * cells[i] for w, cells in columns if w != 0 and cells[i] is not None]
        assert math.isnan(total) if not said else total == pytest.approx(sum(said))


def test_none_is_unscorable_and_not_zero():
    samples = [RolloutSample([1, 2], [0, -1], [0, 1], 0.0, text=t) for t in ("ab", "a")]
    judge, watch = (
        reward_fn(lambda text: 1.0 if len(text) > 1 else None, name="j"),
        reward_fn(len, name="w", style="native"),
    )
    scores = score_blocking(samples, CHAT, [judge, watch], weights=[1.0, 0.0])
    assert [s.reward for s in graded(samples, scores)] == [1.0, None]
    assert graded(samples, scores)[1].rewards == {"j": None, "w": 1.0}
    failed(lambda: graded(samples[:1], scores), "scores", got="2", expected="1, one per sample")


# --- misbehaviour: each message names function, group, sample, row, and what was got


@pytest.mark.parametrize(
    ("bad", "got"),
    [
        (math.nan, "nan"),
        (math.inf, "inf"),
        ("1.0", "'1.0'"),
        (np.float32("nan"), "nan"),
    ],
)
def test_a_value_that_is_no_reward(bad, got):
    def mine(text):
        return bad if text == "7" else 1.0

    where, number = "group 3, sample 1 (row 'q17')", "a finite number, at most 1e+30 in size, or None"
    failed(lambda: values(mine, group=3), "'mine'", where=where, got=f"{got} for completion '7'", expected=number)
    failed(lambda: values(lambda completions: [0, bad], group=3), where=where, got=f"{got} for completion '7'")


def test_a_function_that_raises_is_never_zero():
    def mine(text):
        return float(text)

    where, said = "group 3, sample 1 (row 'q17')", "ValueError: could not convert"
    error = failed(lambda: values(mine, texts=["72", "x" * 200], group=3), "'mine' raised", where=where, got=said)
    assert f"for completion '{'x' * 80}'; expected" in str(error)  # and no more of it
    assert isinstance(error.__cause__, ValueError)

    async def later(completion, answer):
        await asyncio.sleep(0)
        raise KeyError("tests")

    failed(lambda: values(later), "'later' raised", where="sample 0 (row 'q17')", got="KeyError: 'tests'")


@pytest.mark.parametrize(
    ("result", "got"),
    [([1.0], "1 values"), ([1.0] * 3, "3 values"), (1.0, "1.0"), ("ab", "'ab'"), (None, "None"), ({}, "{}")],
)
def test_a_batch_of_the_wrong_shape(result, got):
    def mine(completions):
        return result

    wrong = lambda: values(mine, group=0)
    got = f"{got} for 2 completions, the first '72'"
    failed(wrong, "'mine'", where="group 0 (row 'q17')", got=got, expected="a list of 2, one per completion")


def test_a_row_without_answer_is_an_error_only_for_rewards_that_need_one():
    bare = make_row({"id": "q19", "question": "?"})
    for needs, name in (
        (gsm8k_reward, "answer"),
        (lambda solution_str, ground_truth: 1, "ground_truth"),
        (lambda completions, solution: [1, 1], "solution"),
    ):
        failed(
            lambda needs=needs: values(needs, row=bare),
            where="sample 0 (row 'q19')" if needs is gsm8k_reward else "row 'q19'",
            got=f"no value for its parameter {name}",
            fix="Does the row have an answer?" if needs is gsm8k_reward else "",
        )
    assert values(lambda text: 1.0, row=bare) == [1, 1]


def test_other_refusals():
    asked = lambda functions, *weights: lambda: score_blocking(["a"], CHAT, functions, *weights)
    failed(asked([]), "reward functions", got="no reward function")
    failed(asked([lambda a: 1, lambda b: 1]), got="'<lambda>' twice", expected="different ones")
    failed(asked("gsm8k", [1, 2]), "weights", got="2", expected="1")
    failed(asked("gsm8k", [math.nan]), "weight", got="nan", expected="a finite")
    failed(lambda: score_blocking([], CHAT, "gsm8k"), "completions", got="none", expected="at least 1")
    failed(lambda: values(lambda: 1.0), got="no value for its parameter (it has none)")

    def half(completions, log_extra):
        log_extra("note", ["only one"])
        return [1, 1]

    failed(lambda: values(half), "log_extra('note')", got="1", expected="2 values")
    assert values(lambda text: asyncio.sleep(0, 0.5)) == [0.5, 0.5]  # a plain function may return an awaitable


@pytest.mark.filterwarnings("error")
def test_a_failure_leaves_no_coroutine_behind():
    async def fails(text):
        if text == "0":
            raise ValueError("first")
        await asyncio.sleep(60)
        return 1.0

    start = time.perf_counter()
    failed(lambda: values(fails, texts=["0", "1", "2"]), got="ValueError: first")
    failed(lambda: values(lambda text: 1 / int(text), texts=["0", "1", "2"]), got="ZeroDivisionError")
    assert time.perf_counter() - start < 50


# --- math-verify in its process


@pytest.fixture(scope="module")
def judge():
    pytest.importorskip("math_verify")
    return MathVerify(timeout=5)


def test_math_verify_compares_symbolically(judge):
    row = make_row({"prompt": "?", "answer": r"\frac{1}{2}"})
    texts = [r"\boxed{0.5}", r"<answer>\frac{2}{4}</answer>", r"\boxed{2}", "0.5"]
    assert values(judge, texts=texts, row=row) == [1, 1, 0, 0]
    assert values(judge, texts=["#### 72"], row=make_row({"prompt": "?", "answer": "so\n#### 72"})) == [1]
    assert judge.timeouts == 0


@pytest.mark.parametrize(
    ("given", "truth", "reward"),
    [
        ("12", "1,2", 0),
        ("1,2", "12", 0),
        ("2,1", "1,2", 1),
        ("(1,2)", "(2,1)", 0),
        ("6.63e-34", "9.1e-31", 0),
        (str(2**100 + 1), str(2**100), 0),
        ("1,200", "1200", 1),
        (r"50\%", "0.5", 1),
        ("2³", "2", 0),
        ("minus 7", "7", 0),
        (r"\pi", "3.14159", 0),
        (r"\sqrt{2}", "1.41421356", 1),
        ("(x+1)^2", "x^2+2x+1", 1),
    ],
)
def test_math_verify_pays_what_is_the_same(judge, given, truth, reward):
    assert asyncio.run(judge(f"\\boxed{{{given}}}", truth)) == reward


def test_a_comparison_that_hangs_is_killed_counted_and_unscorable(judge):
    before = judge.timeouts
    start = time.perf_counter()
    row = make_row({"prompt": "?", "answer": "72"})
    scores = score_blocking([r"\boxed{9^{9^{9^{9}}}!}", r"\boxed{72}"], row, reward_fn(judge, name="math"))
    assert [scores.reward(0), scores.reward(1)] == [None, 1.0]  # the next one got a fresh worker
    assert judge.timeouts == before + 1
    assert time.perf_counter() - start < 120


def test_a_worker_that_dies_is_replaced():
    pytest.importorskip("math_verify")
    judge = MathVerify(timeout=300)
    assert judge.compare("$1$", "$1$") is True
    threading.Timer(0.2, os.kill, (judge._worker.pid, signal.SIGKILL)).start()
    assert judge.compare("$9^{9^{9^{9}}}!$", "$72$") is None
    assert judge.timeouts == 1
    assert judge.compare("$1$", "$1$") is True


def test_after_an_interrupt_no_verdict_is_taken_for_another():
    pytest.importorskip("math_verify")
    judge = MathVerify(timeout=300)
    assert judge.compare("$1$", "$1$") is True
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        judge.compare("$9^{9^{9^{9}}}!$", "$72$")
    assert judge.compare("$1$", "$2$") is False


# --- functions that wait


def clear(threads: list) -> bool:
    return all(t is not threading.main_thread() for t in threads)


def test_calls_wait_together_within_the_limit_and_plain_ones_in_threads():
    free, running, most, threads = threading.Semaphore(0), 0, 0, []

    def blocks(text):
        nonlocal running, most
        threads.append(threading.current_thread())
        running, most = running + 1, max(most, running + 1)
        free.acquire()
        running -= 1
        return 1.0

    async def held_open():
        grading = asyncio.ensure_future(score(["a"] * 6, CHAT, blocks, limits=Limits(most=3)))
        while len(threads) < 3:
            await asyncio.sleep(0.001)  # the event loop is free meanwhile
        free.release(6)
        return await grading

    assert asyncio.run(held_open()).totals.tolist() == [1] * 6
    assert (most, clear(threads)) == (3, True)


def _late(signum, frame):
    raise TimeoutError


def _within_a_second(text):
    "As many scorers do it: what goes wrong is a 0."
    try:
        before = signal.signal(signal.SIGALRM, _late)
        signal.alarm(1)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        return 1.0
    except Exception:
        return 0.0


def helped(text):
    return _within_a_second(text)


def test_an_alarm_behind_a_helper_is_no_silent_zero_and_has_no_second_limit():
    assert asyncio.run(score(["a"] * 3, CHAT, helped)).totals.tolist() == [1.0] * 3
    assert score_blocking(["a"] * 3, CHAT, helped).totals.tolist() == [1.0] * 3
    with pytest.raises(RewardError, match="reward_timeout: got helped, which runs in the main thread"):
        asyncio.run(score(["a"], CHAT, helped, limits=Limits(timeout=5.0)))


def test_a_reward_that_asks_for_other_rewards_does_not_wait_for_itself():
    async def both(text):
        return (await score([text], CHAT, lambda text: 0.5)).totals[0] * 2

    asked = LIMITS.most + 8
    graded_ = asyncio.run(asyncio.wait_for(score(["a"] * asked, CHAT, both), 120))
    assert graded_.totals.tolist() == [1.0] * asked


def test_functions_that_cannot_be_in_a_thread_stay_where_the_loop_is():
    rows, threads = sqlite3.connect(":memory:"), []

    def looks_up(text):
        threads.append(threading.current_thread())
        return float(rows.execute("select 0.5").fetchone()[0])

    def alarmed(text):
        threads.append(threading.current_thread())
        before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, before)
        return 0.25

    assert asyncio.run(score(["a"] * 3, CHAT, [looks_up, alarmed])).totals.tolist() == [0.75] * 3
    assert threads.count(threading.main_thread()) == 6  # calls of `looks_up` that failed in a thread were made again


def test_a_call_that_is_too_late_makes_its_sample_unscorable_with_the_reason():
    never = threading.Event()

    def slow(text):
        return never.wait() if text == "late" else 1.0

    async def judge(completions):
        await asyncio.sleep(60)

    texts, limits = ["late", "in time"], Limits(timeout=0.5)
    scores = asyncio.run(score(texts, CHAT, [slow, "format"], limits=limits))
    assert scores.rewards(0) == {"slow": None, "format": 0.0}
    assert [scores.reward(i) for i in (0, 1)] == [None, 1.0]  # what "format" said of the first one is half a grade
    samples = [RolloutSample([1, 2], [0, -1], [0, 1], None, text=t) for t in texts]
    assert graded(samples, scores)[0].info["late"] == "slow took longer than 0.5 s (reward_timeout)"
    watched = [reward_fn(judge, weight=0), "format"]  # one of no weight spoils nothing
    assert asyncio.run(score(texts, CHAT, watched, limits=limits)).totals.tolist() == [0, 0]
    never.set()


def test_an_interrupt_ends_a_wait_that_blocks():
    async def forever(text):
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        score_blocking(["a"], CHAT, forever)
