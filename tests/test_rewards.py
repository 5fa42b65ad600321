"Reward functions: reading answers, every signature, misbehaviour with its message, and the worker process."

import asyncio
import csv
import functools
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from errors import failed
from hypothesis import given
from hypothesis import strategies as st

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.config.config import Config
from rl_notebook.core.types import Completion, RewardError, RolloutSample
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.runs.run import Run, RunFolder
from rl_notebook.task.audit import audit_reward
from rl_notebook.task.data import make_row
from rl_notebook.task.rewards import (
    Limits,
    MathVerify,
    countdown_reward,
    graded,
    gsm8k_reward,
    make_length_reward,
    make_soft_overlong,
    parse_number,
    reward_fn,
    score,
    score_blocking,
    tagged_integer_reward,
)
from rl_notebook.task.toy import toy_rows

CHAT = make_row({"id": "q17", "question": "48/2+48?", "answer": "72", "level": "easy"})
TEXT = make_row({"id": "q18", "prompt": "48/2+48 =", "answer": "72"})


def values(function, texts=("72", "7"), row=CHAT, **options) -> list[float]:
    return score_blocking(texts, row, [function], **options).values[0].tolist()


# --- reading answers


@given(st.integers(-(10**12), 10**12))
def test_whole_numbers_read_back_with_and_without_separators(n):
    assert {
        parse_number(t) for t in (str(n), f"{n:,}", f"${n:,}", f"{n:,}.00 USD", f"x = **{n}**")
    } == {n}


@given(st.text(max_size=60))
def test_any_text_is_read_without_an_exception(text):
    parse_number(text)
    for wrapped in (text, f"<answer>{text}</answer>", f"\\boxed{{{text}}}", f"#### {text}"):
        assert gsm8k_reward(wrapped, "#### 72") in (0.0, 1.0)
        assert tagged_integer_reward(wrapped, "<answer>72</answer>") in (0.0, 1.0)


@pytest.mark.parametrize(
    ("figure", "truth", "reward"),
    [  # what a reader of the two would say
        ("minus 7", "7", 0),
        ("–7", "7", 0),
        ("x = –3", "-3", 1),
        ("-$5", "-5", 1),
        ("±7", "7", 0),
        ("2³", "2", 0),
        ("10²", "100", 0),
        ("2.998×10⁸", "299800000", 1),
        ("3½", "3", 0),
        ("-3½", "-3.5", 1),
        ("3 1/2 cups", "3.5", 1),
        (r"1\frac{1}{2}", "1.5", 1),
        ("1.5 million", "1.5", 0),
        ("1.5 million", "1500000", 1),
        ("5k", "5000", 1),
        ("5 km", "5", 1),
        ("50%", "0.5", 1),
        ("72%", "72", 0),
        ("72%", "36 + 36 = 72% of them\n#### 72", 1),  # the worked solution says percent
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
        ("48/2+48", "72", 0),  # copied from the question
        ("48/2+48 = 72", "72", 1),
        ("72", "48/2+48", 1),
        ("144/2", "72", 0),
        ("-(-72)", "72", 0),
        (r"\frac{6}{8}", "0.75", 0),
        (r"\frac{3}{4}", "0.75", 1),
        ("2^{10}", "2^{10}", 1),
    ],
)
def test_a_number_is_read_as_what_is_written(figure, truth, reward):
    assert gsm8k_reward(f"#### {figure}", truth) == reward


@pytest.mark.parametrize("name", ["gsm8k", "gsm8k_strict", "math_verify"])
def test_any_of_several_accepted_answers_counts(name):
    if name == "math_verify":
        pytest.importorskip("math_verify")
    wrap = "<answer>{}</answer>".format
    row = make_row({"question": "q", "answer": [wrap(72), wrap(73)]})
    assert score_blocking([wrap(72), wrap(73), wrap(74)], row, name).totals.tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    ("boxed", "truth", "reward"),
    [  # what the reward of the reference's multi-turn example gives, executed; but it pays for arithmetic left to do
        ("1e2", "#### 100", 1.0),
        ("1e3", "#### 100", 0.0),
        ("3+4", "#### 7", 0.0),
        ("3+4", "#### 8", 0.0),
        (r"\sqrt{16}", "#### 4", 0.0),
        (r"\sqrt{17}", "#### 4", 0.0),
        (r"\frac{8}{2}", "#### 4", 0.0),
        (r"2 \times 2", "#### 4", 0.0),
        ("４", "#### 4", 1.0),
        ("٤٢", "#### 42", 1.0),
        ("4", "4+0\n#### 4\n#### 5", 1.0),
        ("5", "4+0\n#### 4\n#### 5", 1.0),
        ("6", "4+0\n#### 4\n#### 5", 0.0),
    ],
)
def test_boxed_answers_are_graded_as_the_reference_grades_figures(boxed, truth, reward, judge):
    text = f"so \\boxed{{{boxed}}}"
    assert gsm8k_reward(text, truth) == reward
    assert asyncio.run(judge(text, truth)) == reward


def read_written_answers() -> list[dict[str, str]]:
    "Answers in other words than the reference's: the same number, or another one."
    path = Path(__file__).parent / "written_answers.tsv"
    with path.open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))


@pytest.mark.parametrize("name", ["gsm8k", "math_verify"])
def test_an_answer_written_otherwise_is_paid_where_it_is_the_same_number(name, judge):
    form = {"gsm8k": "#### {}", "math_verify": "\\boxed{{{}}}"}[name]
    wrong = []
    for case in read_written_answers():
        text = form.format(case["answer"])
        reference = case["reference"]
        earned = (
            asyncio.run(judge(text, reference))
            if name == "math_verify"
            else gsm8k_reward(text, reference)
        )
        known_limit = name in case["judged otherwise by"].split()
        if (earned != float(case["same"])) != known_limit:
            wrong.append((reference, case["answer"], earned))
    assert wrong == []


SIZES = [
    "9^9^9^9",
    "9**9**9",
    "2^{10^9}",
    "10^{-100000000}",
    "1e-400",
    "1e-999999999",
    "-.5E-99999999",
    "0e999999999",
]
SIZES += [
    "1e-" + "1" * 150,
    "1e+" + "9" * 90,
    "9" * 5000,
    "(" * 90 + "1" + ")" * 90,
    "-" * 190 + "1",
    "100000!",
]
SIZES += [
    "\\sqrt{" * 30 + "2" + "}" * 30,
    "9*" * 90 + "9",
    "9^999+1/" * 20 + "1",
    "1e-99999999 million",
]


@pytest.mark.parametrize("number_type", [int, str, float, np.int64])
def test_countdown_reads_numbers_however_a_row_holds_them(number_type):
    def grade(number):
        return countdown_reward(
            f"<answer>{number}</answer>", number_type(3), [number_type(1), number_type(2)]
        )

    assert [grade("1+2"), grade("3"), grade("1+1+1")] == [1.0, 0.0, 0.0]
    for columns in (
        {"target": "x", "nums": [1, 2]},
        {"target": 3, "nums": [1, None]},
        {"target": 3, "nums": "[1, 2]"},
    ):
        bad = "target" if columns["target"] == "x" else "nums"
        with pytest.raises(RewardError, match=f"row 'q1'.*column '{bad}'"):
            score_blocking(["1+2"], make_row({"id": "q1", "question": "?", **columns}), "countdown")


@pytest.mark.parametrize("name", ["gsm8k", "gsm8k_strict", "format", "gsm8k_format", "countdown"])
def test_whatever_a_completion_or_a_row_holds_is_scored_at_once(name):
    begin = time.process_time()
    for wrap in ("<answer>{}</answer>", "\\boxed{{{}}}", "#### {}"):
        for size in map(wrap.format, SIZES):
            for answer in ("72", size, [size, 10**5000]):
                row = make_row({"question": "q", "answer": answer, "target": 3, "nums": [1, 2]})
                score_blocking([size], row, name)
    assert time.process_time() - begin < 5


# --- every signature


def test_trl_sync_async_and_columns():
    columns_seen = {}

    def sync(
        prompts, completions, completion_ids, level, solution, trainer_state, log_metric, **kwargs
    ):
        columns_seen.update(
            prompts=prompts,
            completions=completions,
            ids=completion_ids,
            level=level,
            solution=solution,
        )
        columns_seen.update(step=trainer_state.global_step, rest=kwargs)
        log_metric("n", 3)
        return [1, None]

    async def later(completions, **kwargs):
        await asyncio.sleep(0)
        return np.array([0.5, 0.25])

    sampled = [Completion([5, 6], [8, 2], [-0.1, -0.2], text=t) for t in ("72", "7")]
    scores = score_blocking(sampled, CHAT, [sync, later], step=7)
    assert (columns_seen["prompts"], columns_seen["completions"]) == (["48/2+48?"] * 2, ["72", "7"])
    assert (columns_seen["ids"], columns_seen["level"], columns_seen["solution"]) == (
        [[8, 2]] * 2,
        ["easy"] * 2,
        ["72"] * 2,
    )
    assert columns_seen["step"] == 7
    assert set(columns_seen["rest"]) == {"id", "question", "answer", "log_extra"}
    assert scores.rewards(1) == {"sync": None, "later": 0.25}
    assert scores.metrics == {"n": 3.0}
    score_blocking(
        ["72"],
        TEXT,
        lambda prompts, completions: columns_seen.update(p=prompts, c=completions) or [0],
    )
    assert (columns_seen["p"], columns_seen["c"]) == (["48/2+48 ="], ["72"])
    messages = [{"role": "user", "content": "48/2+48?"}]
    for row in (make_row({"prompt": messages, "question": "?"}), make_row({"messages": messages})):
        score_blocking(
            ["72"],
            row,
            lambda prompts, completions: columns_seen.update(p=prompts, c=completions) or [0],
        )
        assert (columns_seen["p"], columns_seen["c"]) == (
            [messages],
            [[{"role": "assistant", "content": "72"}]],
        )
    turns = [{"role": "assistant", "content": "7"}, {"role": "user", "content": "Sure?"}]
    sample = RolloutSample(
        [1, 2, 3], [0, -1, -1], [0, 1, 1], None, text="7", info={"messages": turns}
    )
    score_blocking([sample], CHAT, lambda completions: columns_seen.update(c=completions) or [0])
    assert columns_seen["c"] == [turns]  # a conversation is one


def test_what_reward_functions_log_reaches_the_record(tmp_path):
    def brief(completions, log_extra, log_metric, **columns):
        log_extra("kind", [np.float64(len(text)) for text in completions])
        log_extra("first", [Word(text[:1]) for text in completions])
        log_metric("longest", max(map(len, completions)))
        return [-float(len(text)) for text in completions]

    class Word:
        def __init__(self, text):
            self.text = text

        def __str__(self):
            return self.text

    def verl(data_source, solution_str, ground_truth, extra_info=None):
        return {"score": 1.0, "acc": float("1" in solution_str)}

    cfg = Config(
        prompt_groups_per_step=2, completions_per_prompt=3, max_completion_tokens=8, kl_beta=0
    )
    loop = GRPOLoop(open_local("tiny"), toy_rows(8), [brief, verl], cfg)
    run = RunFolder.create(tmp_path / "run", cfg)
    run.add(asyncio.run(loop.step()))
    record = Run.open(tmp_path / "run").record(1)
    logged = [s.info["logged_by_rewards"] for g in record.groups for s in g.samples]
    texts = [s.text for g in record.groups for s in g.samples]
    assert [cells["kind"] for cells in logged] == [float(len(text)) for text in texts]
    assert [cells["first"] for cells in logged] == [text[:1] for text in texts]
    assert record.metrics["logged/acc"] == pytest.approx(np.mean(["1" in text for text in texts]))
    longest = [max(len(s.text) for s in g.samples) for g in record.groups]
    assert record.metrics["logged/longest"] == pytest.approx(np.mean(longest))


def test_a_function_of_trl_that_got_the_other_form_is_shown_which_and_why():
    listed = make_row({"prompt": [{"role": "user", "content": "48/2+48?"}]})
    failed(
        lambda: values(lambda completions: [len(c[0]["content"]) for c in completions]),
        fix="`completions` are texts",
    )
    failed(
        lambda: values(lambda completions: [float(c) for c in completions], row=listed),
        fix="are lists of messages",
    )


def test_a_function_without_parameters_is_shown_what_it_is_called_with():
    failed(
        lambda: values(lambda: 1.0),
        got="no parameters",
        expected="first the text of the completion",
        fix="(text,",
    )


def test_functions_of_trl_work_unchanged():
    rewards = pytest.importorskip("trl.rewards")
    pytest.importorskip("math_verify")
    texts = ["<think>\nhm\n</think>\nSo \\boxed{72}.", "\\boxed{71}"]
    functions = [
        rewards.accuracy_reward,
        rewards.think_format_reward,
        rewards.get_soft_overlong_punishment(4, 2),
    ]
    sampled = [
        Completion([5], range(n), [-0.1] * n, text=t) for t, n in zip(texts, (3, 9), strict=True)
    ]
    row = make_row({"prompt": [{"role": "user", "content": "48/2+48?"}], "solution": "$72$"})
    assert [v.tolist() for v in score_blocking(sampled, row, functions).values] == [
        [1, 0],
        [1, 0],
        [-0.5, -1],
    ]


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


def test_verifiers_gets_what_its_usual_caller_passes():
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
    sample = RolloutSample(
        [1, 2, 3], [0, -1, -1], [0, 1, 1], None, text="772", info={"messages": turns}
    )
    assert values(correct, texts=[sample]) == [1]


def test_native_gets_what_it_names():
    assert values(lambda c: len(c)) == [2, 1]
    assert values(lambda text, row: float(row.key == "q17")) == [1, 1]
    assert values(
        lambda text, *, level="none", missing=0.25: missing if level == "easy" else 0
    ) == [0.25, 0.25]
    assert values(lambda text, **everything: len(everything)) == values(lambda text, **kw: len(kw))
    completions = Completion([5], [8, 2, 3], [-0.1] * 3, text="72")
    assert values(make_soft_overlong(4, 2), texts=[completions]) == [-0.5]
    assert values(make_length_reward(3, 2), texts=[completions]) == [1]
    assert values(functools.partial(lambda bonus, text, answer: bonus, 0.5)) == [0.5, 0.5]
    assert values(lambda text: torch.tensor(0.5)) == [0.5, 0.5]


# --- misbehaviour: each message names function, group, sample, row, and what was got


@pytest.mark.filterwarnings("error")
def test_a_failure_leaves_no_coroutine_behind():
    async def fails(text):
        if text == "0":
            raise ValueError("first")
        await asyncio.sleep(60)
        return 1.0

    start = time.perf_counter()
    failed(lambda: values(fails, texts=["0", "1", "2"]), got="ValueError: first")
    failed(
        lambda: values(lambda text: 1 / int(text), texts=["0", "1", "2"]), got="ZeroDivisionError"
    )
    assert time.perf_counter() - start < 50


# --- math-verify in its process


@pytest.fixture(scope="module")
def judge():
    pytest.importorskip("math_verify")
    return MathVerify(timeout=5)


@pytest.mark.parametrize(
    ("formula", "truth", "reward"),
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
def test_math_verify_pays_what_is_the_same(judge, formula, truth, reward):
    assert asyncio.run(judge(f"\\boxed{{{formula}}}", truth)) == reward


def test_a_comparison_that_hangs_is_killed_counted_and_unscorable(judge):
    before = judge.timeouts
    row = make_row({"prompt": "?", "answer": "72"})
    fn = reward_fn(judge, name="math")
    judge.timeout = 1
    assert score_blocking([r"\boxed{9^{9^{9^{9}}}!}"], row, fn).reward(0) is None
    judge.timeout = 60
    # the next one got a fresh worker
    assert score_blocking([r"\boxed{72}"], row, fn).reward(0) == 1.0
    assert judge.timeouts == before + 1


def test_a_time_limit_is_that_of_each_comparison_not_of_those_before_it(judge):
    judge.timeout = 60
    row = make_row({"question": "?", "answer": ["x+1", "x+2"]})
    texts = [r"\boxed{9^{9^{9^{8}}}!}", r"\boxed{1+x}"]
    scores = asyncio.run(score(texts, row, judge, limits=Limits(timeout=2)))
    assert scores.totals[1] == 1.0
    assert scores.late == {0: "MathVerify took longer than 2 s (reward_timeout)"}


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


def outside_main_thread(threads: list) -> bool:
    return all(t is not threading.main_thread() for t in threads)


def test_calls_wait_together_within_the_limit_and_plain_ones_in_threads():
    free = threading.Semaphore(0)
    running = 0
    most = 0
    threads = []

    def blocks(text):
        nonlocal running, most
        threads.append(threading.current_thread())
        running, most = running + 1, max(most, running + 1)
        free.acquire()
        running -= 1
        return 1.0

    async def held_open():
        scoring = asyncio.ensure_future(score(["a"] * 6, CHAT, blocks, limits=Limits(most=3)))
        while len(threads) < 3:
            await asyncio.sleep(0.001)  # the event loop is free meanwhile
        free.release(6)
        return await scoring

    assert asyncio.run(held_open()).totals.tolist() == [1] * 6
    assert (most, outside_main_thread(threads)) == (3, True)


def alarmed(text):
    "With an alarm, which only the main thread may set."
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, before)
    return 0.25


def test_a_function_for_the_main_thread_needs_a_setting_and_has_no_second_limit():
    with pytest.raises(RewardError, match=r"main thread.*max_concurrent_rewards=0"):
        asyncio.run(score(["a"] * 3, CHAT, alarmed))
    one_by_one = Limits(most=0)
    assert (
        asyncio.run(score(["a"] * 3, CHAT, alarmed, limits=one_by_one)).totals.tolist()
        == [0.25] * 3
    )
    assert score_blocking(["a"] * 3, CHAT, alarmed).totals.tolist() == [0.25] * 3
    with pytest.raises(
        RewardError, match=r"a limit of 5\.0 s for alarmed, which runs in the thread"
    ):
        asyncio.run(score(["a"], CHAT, alarmed, limits=Limits(most=0, timeout=5.0)))


def plain_judge(text):
    "Starts a separate event loop."
    return asyncio.run(asyncio.sleep(0, 0.5))


def make_judge():
    "One with a client, which belongs to the event loop in which it waited first."
    room = asyncio.Semaphore(1)

    async def judge(text):
        async with room:
            await asyncio.sleep(0)
            return float(len(text))

    return judge


@pytest.mark.filterwarnings("ignore:coroutine 'sleep' was never awaited")
def test_a_client_is_asked_in_one_event_loop_by_all_calls_of_a_notebook():
    judge = make_judge()
    texts = ["a", "bb", "ccc"]
    sums = [{"question": f"{n}+1", "answer": str(n + 1)} for n in (2, 3)]

    async def notebook():
        later = asyncio.ensure_future(asyncio.sleep(0.01, 7))  # of another cell: it continues
        assert await asyncio.gather(*map(judge, texts)) == [1, 2, 3]
        assert (await score(texts, CHAT, judge)).totals.tolist() == [1, 2, 3]
        assert score_blocking(texts, CHAT, [judge, plain_judge]).totals.tolist() == [1.5, 2.5, 3.5]
        assert "earns" in str(audit_reward(judge, sums))
        assert (await score(texts, CHAT, [judge, plain_judge])).totals.tolist() == [1.5, 2.5, 3.5]
        failed(lambda: score_blocking(texts, CHAT, broken), got="SystemExit: 3")
        assert await asyncio.wait_for(asyncio.gather(later, *map(judge, texts)), 60) == [7, 1, 2, 3]

    async def broken(text):
        await asyncio.sleep(0)
        raise SystemExit(3)

    asyncio.run(notebook())


def test_a_client_is_asked_in_one_event_loop_by_all_calls_of_a_script():
    judge = make_judge()
    texts = ["a", "bb", "ccc"]
    for _ in range(2):
        assert score_blocking(texts, CHAT, judge).totals.tolist() == [1, 2, 3]
        assert asyncio.run(score(texts, CHAT, judge)).totals.tolist() == [1, 2, 3]


def test_a_reward_that_asks_for_other_rewards_does_not_wait_for_itself():
    async def both(text):
        return (await score([text], CHAT, lambda text: 0.5)).totals[0] * 2

    count = Limits().most + 8
    graded_ = asyncio.run(asyncio.wait_for(score(["a"] * count, CHAT, both), 120))
    assert graded_.totals.tolist() == [1.0] * count


def test_a_blocking_call_calls_plain_functions_in_its_own_thread():
    rows = sqlite3.connect(":memory:")
    threads = []

    def looks_up(text):
        threads.append(threading.current_thread())
        return float(rows.execute("select 0.5").fetchone()[0])

    assert score_blocking(["a"] * 3, CHAT, looks_up).totals.tolist() == [0.5] * 3
    assert threads == [threading.main_thread()] * 3


@pytest.mark.parametrize("error", [StopIteration, SystemExit, KeyError])
def test_an_error_of_a_plain_function_in_a_thread_is_named(error):
    def raises(text):
        raise error("of mine")

    with pytest.raises(RewardError, match=r"reward function .raises. raised: got .*of mine"):
        asyncio.run(asyncio.wait_for(score(["a"], CHAT, raises), 60))


def test_calls_that_never_end_delay_neither_later_calls_nor_the_end_of_the_process():
    program = """
import asyncio, threading
from rl_notebook.task.data import make_row
from rl_notebook.task.rewards import Limits, score
def endless(text):
    threading.Event().wait() if text == "late" else None
    return 1.0
row = make_row({"question": "?"})
texts = ["late"] * 40 + ["in time"] * 2
print(asyncio.run(score(texts, row, endless, limits=Limits(timeout=0.2))).late[0])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == (
        "endless took longer than 0.2 s (reward_timeout); its thread cannot be stopped and runs until the call returns\n"
    )


def test_a_call_that_is_too_late_makes_its_sample_unscorable_with_the_reason():
    never = threading.Event()

    def slow(text):
        return never.wait() if text == "late" else 1.0

    async def judge(completions):
        await asyncio.sleep(60)

    texts = ["late", "in time"]
    limits = Limits(timeout=0.5)
    scores = asyncio.run(score(texts, CHAT, [slow, "format"], limits=limits))
    assert scores.rewards(0) == {"slow": None, "format": 0.0}
    # what "format" said of the first one is half a grade
    assert [scores.reward(i) for i in (0, 1)] == [None, 1.0]
    samples = [RolloutSample([1, 2], [0, -1], [0, 1], None, text=t) for t in texts]
    assert graded(samples, scores)[0].info["late"] == (
        "slow took longer than 0.5 s (reward_timeout); "
        "its thread cannot be stopped and runs until the call returns"
    )
    watched = [reward_fn(judge, weight=0), "format"]  # one of no weight spoils nothing
    assert asyncio.run(score(texts, CHAT, watched, limits=limits)).totals.tolist() == [0, 0]
    never.set()
