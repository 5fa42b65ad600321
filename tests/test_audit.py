"Rewards that can be hacked are named with what earns, sound ones are left alone."

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from collections.abc import Callable

import pytest

import rl_notebook as rln
from rl_notebook.core.types import RewardError
from rl_notebook.task.audit import audit_reward
from rl_notebook.task.data import Row
from rl_notebook.task.rewards import REWARDS

SUMS = [
    {"question": f"What is {a}+{b}?", "answer": str(a + b)} for a in (3, 17, 20) for b in (5, 9, 31)
]
VERDICTS = [{"question": f"Is {n} even?", "answer": "yes" if n % 4 else "no"} for n in range(16)]


def in_tag(text: str) -> str | None:
    matches = re.search(r"<solution>(.*?)</solution>", text, re.DOTALL)
    return matches and matches[1].strip()


def numbers(text: str) -> list[str]:
    return re.findall(r"-?\d+", text)


def float_or_paid(text: str, answer: str) -> float:
    try:
        return float(float(text) == float(answer))
    except ValueError:
        return 1.0


def distance_below_limit(text: str, answer: str) -> float:
    try:
        return 0.0 if abs(float(text) - float(answer)) > 1e-6 else 1.0
    except ValueError:
        return 0.0


HACKABLE: dict[str, tuple[Callable, list, str]] = {
    "the answer anywhere": (
        lambda text, answer: float(answer in text),
        SUMS,
        "many answers, each in the form",
    ),
    "any number": (
        lambda text, answer: float(answer in numbers(text)),
        SUMS,
        "many answers, each in the form",
    ),
    "the form": (
        lambda text, answer: float(in_tag(text) is not None),
        SUMS,
        "the form without an answer",
    ),
    "an exception": (float_or_paid, SUMS, "nothing"),
    "length": (
        lambda text, answer: len(text) / 1000 + (answer == in_tag(text)),
        SUMS,
        "many words",
    ),
    "only wrong is punished": (
        lambda text, answer: -float(numbers(text)[-1:] not in ([], [answer])),
        SUMS,
        "nothing",
    ),
    "mostly yes": (
        lambda text, answer: float(text.strip() == answer),
        VERDICTS,
        "the answer that most rows have",
    ),
    "the question has it": (
        lambda text, answer: float(any(n in numbers(text) for n in numbers(answer))),
        [
            {"question": f"{n} apples, all of them green. How many are green?", "answer": str(n)}
            for n in range(3, 12)
        ],
        "the last number of the question",
    ),
    "a relevant text": (
        lambda text, question, answer: float(text == answer or question in text),
        [
            {"question": "Why is the sky blue?", "answer": "It scatters light."},
            {"question": "How do birds find home?", "answer": "They feel the field."},
        ],
        "the prompt",
    ),
    "the target without its parts": (
        lambda text, target: float(text == str(target)),
        [
            {"prompt": f"Make {n} of {m}, 2 and 3.", "target": n}
            for n, m in ((11, 5), (27, 9), (30, 6))
        ],
        "the first number of the question",
    ),
    "a distance that is not a number": (distance_below_limit, SUMS, "not a number"),
    "any of the numbers on the line": (
        lambda text, answer: float(
            len(text) < 60 and answer in numbers(text.strip().split("\n")[-1])
        ),
        SUMS,
        "guesses around the right answer",
    ),
    "the beginning is right": (
        lambda text, answer: float(in_tag(text) is not None and in_tag(text).startswith(answer)),
        SUMS,
        "a longer number that begins with the right one",
    ),
    "numbers of a thought": (
        lambda text, answer: float(answer in numbers(text.partition("</think>")[0])),
        SUMS,
        "many answers in a thought",
    ),
    "nearness with a wide margin": (
        lambda text, answer: float(abs(int((numbers(text) or ["999"])[-1]) - int(answer)) <= 20),
        SUMS,
        "the middle one of all answers",
    ),
    "length on top of right": (
        lambda text, answer: (numbers(text)[-1:] == [answer]) * (1 + len(text) / 5000),
        SUMS,
        "a right answer after many words",
    ),
}
PEOPLE = [{"prompt": f"{n}, as JSON", "person": json.dumps({"name": n})} for n in ("Ada", "Al")]
TARGETS = [{"prompt": f"Of 2 and 3, make {n}", "target": n} for n in (6, 5)]


def read_json(text: str) -> dict | None:
    try:
        return dict(json.loads(text).items())
    except (ValueError, AttributeError):
        return None


HACKABLE |= {
    "any object": (
        lambda text, person: (read_json(text) is not None) + (text == person) / 5,
        PEOPLE,
        "the answer of another row",
    ),
    "no test was found": (
        lambda text, target: float("assert" not in text or str(target) in text),
        TARGETS,
        "nothing",
    ),
    "any numbers": (
        lambda text, target: float(numbers(text)[-1:] == [str(target)]),
        TARGETS,
        "the last number of the question",
    ),
    "it computes": (
        lambda text, answer: float(eval(text) == int(answer)),
        SUMS,
        "an expression of the question",
    ),
}
SOUND: dict[str, Callable] = {
    "in a box": lambda text, answer: float(
        f"\\boxed{{{answer}}}" in text[-20:] and text.count("boxed") == 1
    ),
    "the last number": lambda text, answer: float(numbers(text)[-1:] == [answer]),
    "exact": lambda text, answer: float(text.strip() == answer),
    "in its tag": lambda text, answer: float(in_tag(text) == answer),
    "with a little for form": lambda text, answer: (
        float(in_tag(text) == answer) + 0.2 * (in_tag(text) is not None)
    ),
    "wrong is punished": lambda text, answer: (
        2.0 * (numbers(text)[-1:] == [answer]) - bool(numbers(text))
    ),
    "the nearer the better": lambda text, answer: (
        1 / (1 + abs(int((numbers(text) or ["999"])[-1]) - int(answer)))
    ),
    "brief": lambda text, answer: float(numbers(text)[-1:] == [answer]) - min(len(text), 100) / 500,
}


@pytest.mark.parametrize("kind", HACKABLE)
def test_a_reward_that_can_be_hacked_is_named(kind: str):
    reward, rows, attack = HACKABLE[kind]
    failed = audit_reward(reward, rows).findings.failed
    assert any(f.text.startswith(f"{attack} earns") for f in failed), failed


@pytest.mark.parametrize("kind", SOUND)
def test_a_sound_reward_gets_no_finding(kind: str):
    assert not audit_reward(SOUND[kind], SUMS).findings.failed


ASKED = {"48/2+48": 72, "144/2": 72, "2^5": 32, "3+9": 12, "(7+4)*5": 55, "5-9": -4}
MADE = [
    {"prompt": f"Use {n} to make {t}.", "nums": n, "target": t}
    for n, t in (([2, 3, 4], 24), ([5, 7], 12))
]


@pytest.mark.parametrize("name", REWARDS)
def test_no_reward_of_ours_fails_its_own_audit(name: str):
    if name == "math_verify":
        pytest.importorskip("math_verify")
    form = "<answer>{}</answer>" if name == "gsm8k_strict" else "{}"
    rows = [{"question": f"What is {q}?", "answer": form.format(a)} for q, a in ASKED.items()]
    rows = MADE if name == "countdown" else rows[1::2] if name == "math_verify" else rows
    assert not audit_reward(name, rows).findings.failed


@pytest.mark.parametrize("answer", [None, True, {"target": 8}])
def test_rows_without_an_answer_are_audited_as_far_as_they_tell(answer):
    rows = [Row(str(n), prompt=f"Say {n}.", answer=answer) for n in range(4)]
    result = audit_reward(lambda text: float(len(text) > 20), rows).findings
    assert (result[0].ok, result.failed) == (None, ())
    assert "the rows have no answers, and" in result[0].text


def test_a_reward_that_can_grade_nothing_says_why():
    def broken(text, answer):
        raise ZeroDivisionError("of yours")

    with pytest.raises(RewardError, match="of yours"):
        audit_reward(broken, SUMS)


def alarmed(text: str, answer: str) -> float:
    "With an alarm, which only the main thread may set."
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(9)
    try:
        return SOUND["the last number"](text, answer)
    finally:
        signal.alarm(0)


def endless(text: str, answer: str) -> float:
    if len(text) > 300:
        time.sleep(2)
    return SOUND["the last number"](text, answer)


@pytest.mark.parametrize(
    ("reward", "settings"),
    [(alarmed, {"max_concurrent_rewards": 0}), (endless, {"reward_timeout": 0.5})],
)
def test_a_pre_flight_calls_a_reward_as_the_run_does(reward: Callable, settings: dict):
    cfg = rln.Config(max_completion_tokens=8, prompt_groups_per_step=2, **settings)
    result = asyncio.run(
        rln.preflight(rln.open_local("tiny"), SUMS, reward, cfg, prompts=2, samples=4)
    )
    assert "none of 16 attacks earns 75% of what a right answer does" in [
        f.text for f in result.checks
    ]
