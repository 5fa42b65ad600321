"Recorded calls of the cookbook's IGPO, turned into calls of ours."

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import httpx
import numpy as np
from golden_adapters import (
    AGREED,
    KL_VALUE_ONLY,
    Case,
    Outcome,
    adapter,
    agree,
    close,
    floats,
    loss_batch,
    misfits,
    refusal,
    assert_rejected,
    run,
    value_only_kl,
)

from rl_notebook.core import datums
from rl_notebook.loop import igpo
from rl_notebook.backends.services.completions import OpenAISampler
from rl_notebook.core.types import Logprobs, RolloutSample

TEXT_IS_NOT_SEARCHED = "turns are those of the loss mask; tags in the text, at their share of the characters, say nothing"
NOTHING_SAMPLED = "a sample in which the policy generates nothing is rejected"
NO_PROMPT = "a sample that begins without a prompt is rejected, its first token has no logprob"
MISSING_OUTCOMES = "outcomes that are missing are rejected, not read as 0"
TEXT_AGAIN = "the prefix is sent as the ids that it consists of, not decoded and tokenised again"
INCOMPLETE = "a reply that does not cover the answer is rejected, not averaged, and never scored 0"
NOTHING_TO_SCORE = (
    "no answer, or an answer of one token without a prefix, is an error; there the score is 0"
)
TOO_MANY = "a reply for more tokens than were sent is rejected"
NO_MASK = "turns that overlap, touch or leave the completion are no loss mask"
ONE_TOKEN = "an answer without a prefix has a token without logprob and is rejected"
WEIGHT_LATER = (
    "its weight only switches gains on and off here; ours multiplies them once they are normalised"
)
LAST_UNSCORED = (
    "a last turn without a score is rejected; agrees with skip_last, which needs no score of it"
)
SHORT_ADVANTAGES = "advantages of another length are rejected, not padded with 0"


# -- rewards and advantages --------------------------------------------------------------------------------------


@adapter("igpo_z_normalize")
def z_normalize(case: Case) -> Outcome:
    "Population standard deviation; zeros below eps."
    close(
        igpo.z_normalize(floats(case.inputs["values"]), **case.config),
        floats(case.expected["z"]),
        "z",
    )
    return AGREED


@adapter("igpo_turn_advantages")
def turn_advantages(case: Case) -> Outcome:
    "Both kinds of reward normalised over the turns of the group, added, discounted."
    x = case.inputs
    ig = x["ig_rewards"]
    outcome = x["outcome_rewards"]
    if [len(r) for r in ig] != [len(r) for r in outcome]:
        assert_rejected(lambda: igpo.turn_advantages(ig, outcome, **case.config), "outcome rewards")
        return Outcome((MISSING_OUTCOMES,))
    ours = igpo.turn_advantages(ig, outcome, **case.config)
    theirs = case.expected["advantages"]
    assert len(ours) == len(theirs)
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        close(a, floats(b), f"advantages of rollout {i}")
    return AGREED


# -- turns and tokens ---------------------------------------------------------------------------------------------


def sample_of_turns(num_tokens: int, turns: Sequence[tuple[int, int]]) -> RolloutSample:
    "A sample in which the policy generates these turns; rejected where it generates nothing or the first token."
    mask = np.zeros(num_tokens, dtype=np.int64)
    for start, end in turns:
        mask[start:end] = 1
    return RolloutSample(
        tokens=np.arange(num_tokens), logprobs=np.zeros(num_tokens), loss_mask=mask, reward=0.0
    )


@adapter("igpo_detect_turns")
def detected_turns(case: Case) -> Outcome:
    "A completion without a gap in its mask is one turn, whatever its text holds."
    x = case.inputs
    completion = (x["prompt_len"], x["total_tokens"])
    recorded = [tuple(t) for t in case.expected["turns"]]
    if completion[0] == completion[1] or completion[0] == 0:
        assert_rejected(lambda: sample_of_turns(completion[1], [completion]), "loss_mask")
        return Outcome((NOTHING_SAMPLED if completion[0] else NO_PROMPT,))
    ours = sample_of_turns(completion[1], [completion]).turns
    assert ours == [completion]
    if ours != recorded:
        assert len(recorded) > 1, "the text was cut although it holds no tag"
        return Outcome((TEXT_IS_NOT_SEARCHED,))
    return AGREED


def per_token(
    recorded: Sequence[float], turns: Sequence[tuple[int, int]], values: Sequence[float], first: int
) -> Outcome:
    "Advantages of turns (first token, one past the last) at the targets that score their tokens."
    n = len(recorded)
    whole = [(a, b) for a, b in turns if a < b]
    if not whole:
        assert_rejected(lambda: sample_of_turns(n + 1, turns), "loss_mask")
        return Outcome((NOTHING_SAMPLED,))
    edges = [e for turn in whole for e in turn]
    separate = (
        all(a < b for a, b in pairwise(edges)) and max(first, 1) <= edges[0] and edges[-1] <= n + 1
    )
    if not separate or len(values) != len(turns):
        return Outcome((NO_MASK,))
    close(
        datums.per_target(sample_of_turns(n + 1, whole), np.array(values)),
        floats(recorded),
        "advantages",
    )
    return AGREED


@adapter("igpo_expand_boundaries")
def expanded_boundaries(case: Case) -> Outcome:
    "An advantage on every token of its turn, at the target that scores the token."
    x = case.inputs
    turns = [tuple(t) for t in x["turn_boundaries"]]
    return per_token(case.expected["per_token"], turns, x["turn_adv"], x["prompt_len"])


@adapter("igpo_expand_spans")
def expanded_spans(case: Case) -> Outcome:
    "The same from (first token, length, turn from 1)."
    x = case.inputs
    known = {t: (start, start + length) for start, length, t in x["spans"]}
    return per_token(
        case.expected["per_token"], [known[t] for t in sorted(known)], x["turn_adv"], 0
    )


# -- scores -------------------------------------------------------------------------------------------------------


class Recorded:
    "A sampler that answers with recorded logprobs, and remembers what it was asked."

    def __init__(self, replies: Mapping[tuple[int, ...], Sequence[float]]):
        self.replies = replies
        self.asked = []

    async def logprobs(self, tokens: np.ndarray) -> Logprobs:
        self.asked.append(tuple(tokens.tolist()))
        return Logprobs(self.replies[self.asked[-1]], policy_version=0)


def score_all(
    sampler: Any, prefixes: Sequence[Sequence[int]], answer: Sequence[int]
) -> list[float]:
    "Our scores of an answer after each prefix."
    scorer = igpo.AnswerScorer(sampler)
    tokens = igpo.AnswerTokens((), tuple(answer))

    async def main() -> list[float]:
        prefix_ids = [np.array(prefix, dtype=np.int64) for prefix in prefixes]
        return [(await scorer.score(prefix, tokens)).score for prefix in prefix_ids]

    return asyncio.run(main())


@adapter("igpo_score_datum")
def score_datum(case: Case) -> Outcome:
    "What is read and what is scored."
    prefix = case.inputs["prefix_tokens"]
    answer = case.inputs["answer_tokens"]
    tokens = (*prefix, *answer)
    sampler = Recorded({tokens: [-1.0] * (len(tokens) - 1)})
    if len(tokens) < 2:
        assert_rejected(lambda: score_all(sampler, [prefix], answer), "logprobs")
        return Outcome((ONE_TOKEN,))
    score_all(sampler, [prefix], answer)
    (request,) = sampler.asked
    assert list(request[:-1]) == case.expected["model_input_tokens"]
    assert list(request[1:]) == case.expected["target_tokens"]
    return AGREED


def prompt_logprobs(response: Mapping[str, Any]) -> list[float | None]:
    "The values of a recorded reply, in either of the two layouts; none where it has no logprobs."
    (choice,) = response["choices"]
    logprobs = choice.get("logprobs") or {}
    if "token_logprobs" in logprobs:
        return logprobs["token_logprobs"]
    return [row["logprob"] for row in logprobs.get("content") or []]


def scored_by_server(
    response: Mapping[str, Any], prefix: Sequence[int], answer: Sequence[int]
) -> tuple[igpo.Scored, Any]:
    "What our sampler makes of a server's reply, and the prompt that it has sent."
    requests = []

    def reply(request: httpx.Request) -> httpx.Response:
        requests.append(json.loads(request.content)["prompt"])
        return httpx.Response(200, json=response)

    async def main() -> igpo.Scored:
        options = {"dialect": "fireworks", "kind": "both", "transport": httpx.MockTransport(reply)}
        sampler = OpenAISampler("http://server", "m", None, **options)
        try:
            return await igpo.score_answer(
                sampler, np.array(prefix), igpo.AnswerTokens((), tuple(answer))
            )
        finally:
            await sampler.close()

    return asyncio.run(main()), requests[0]


def why_rejected(
    values: Sequence[float | None], prefix: Sequence[int], answer: Sequence[int]
) -> str | None:
    "Why a reply that the other program averages is an error here; None where it is not."
    count = len(prefix) + len(answer)
    if count < 2 or not answer:
        return NOTHING_TO_SCORE
    if len(values) > count + 1:
        return TOO_MANY
    if not prefix or len(values) < count or None in values[1:count]:
        return INCOMPLETE
    return None


@adapter("igpo_score_prefix_inference__*")
def score_prefix(case: Case) -> Outcome:
    "The score of an answer after a prefix, by a server."
    x = case.inputs
    prefix = x["prefix_tokens"]
    answer = x["answer_tokens"]
    difference = why_rejected(prompt_logprobs(x["response"]), prefix, answer)
    if case.raises or difference:
        assert_rejected(
            lambda: scored_by_server(x["response"], prefix, answer), "logprobs", "echo", "tokens"
        )
        return AGREED if case.raises else Outcome((difference,))
    scored, sent = scored_by_server(x["response"], prefix, answer)
    assert sent == [*prefix, *answer]
    text = case.expected["request"]["json"]["prompt"]
    assert text == " ".join(map(str, sent)), "its tokenizer joins ids"
    close(scored.score, case.expected["score"], "score")
    return Outcome((TEXT_AGAIN,))


@adapter("igpo_turn_scorer")
def turn_scorer(case: Case) -> Outcome:
    "Scores of all prefixes, gains between them, and the outcome of each step."
    x = case.inputs
    c = case.config
    e = case.expected
    prefixes = x["prefixes"]
    answer = x["answer_tokens"]
    differs = []
    replies = {(*p, *answer): lp for p, lp in zip(prefixes, x["trainer_logprobs"], strict=True)}
    scores = score_all(Recorded(replies), prefixes, answer)
    close(scores, e["prefix_scores"], "scores")
    turns = len(x["step_rewards"])
    if len(scores) == turns:  # the last turn was not scored
        differs.append(LAST_UNSCORED)
        gains = igpo.information_gain([*scores, 0.0], skip_last=True)
    else:
        gains = igpo.information_gain(scores, skip_last=c["skip_ig_last_turn"])
    assert len(gains) == turns
    close(gains * (c["ig_weight"] != 0), e["ig_rewards"], "gains")
    close(e["outcome_rewards"], x["step_rewards"], "outcomes")
    if c["ig_weight"] != 1:

        def weighted(w):
            return np.concatenate(
                igpo.turn_advantages([gains], [floats(x["step_rewards"])], ig_weight=w)
            )

        half = (weighted(0.0) + weighted(1.0)) / 2
        close(
            weighted(c["ig_weight"]),
            half if c["ig_weight"] == 0.5 else weighted(0.0),
            "weighted advantages",
        )
        differs.append(WEIGHT_LATER)
    return Outcome(tuple(differs))


# -- the loss -----------------------------------------------------------------------------------------------------


@adapter("igpo_loss")
def igpo_loss(case: Case) -> Outcome:
    "The clipped surrogate with an advantage per token and a correction without a cap: our ppo."
    x = case.inputs
    c = case.config
    options = {
        "policy_loss": "ppo",
        "eps_clip": c["eps_clip"],
        "kl_beta": c["kl_beta"],
        "kl_estimator": "k1",
    }
    options |= {"tis": "token", "tis_cap": np.inf}
    settings = {"old_logprobs": x["old_logprobs"] or [], "advantages": [0.0] * len(x["tokens"])}
    b = loss_batch(replace(case, inputs={**x, **settings}), options)
    b = replace(b, advantages=[floats(a) for a in x["per_token_advantages"]])
    if (outcome := refusal(case, b)) is not None:
        return outcome
    if misfits(b, b.advantages):
        assert_rejected(lambda: run(b), "advantage")
        return Outcome((SHORT_ADVANTAGES,))
    if b.options["kl_beta"]:
        value_only_kl(b)
        return Outcome((KL_VALUE_ONLY,))
    agree(run(b), b)
    return AGREED
