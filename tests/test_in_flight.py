"Completions in flight: looked at without a trace in what is sampled, and one of them is cut."

import asyncio

import numpy as np
import pytest

import rl_notebook as rln
from rl_notebook.core.datums import datum_from_sample
from rl_notebook.runs.records import read_record, staged_folder, write_record
from rl_notebook.views.dashboard import Dashboard

SETTINGS = {
    "prompt_groups_per_step": 3,
    "completions_per_prompt": 4,
    "max_completion_tokens": 40,
    "kl_beta": 0.0,
    "top_logprobs": 3,
}


def open_loop(**settings):
    backend = rln.open_local(*rln.load_model("tiny"), inline=True)
    rows = rln.toy_rows(12, split="hard")
    return rln.GRPOLoop(backend, rows, rln.toy_reward, rln.Config(**SETTINGS | settings))


async def sample_and_look(loop, look):
    "Sample the step, and call `look` between any two rounds of the engine."
    loop.prompts()
    sampling = asyncio.create_task(loop.sample())
    while not sampling.done():
        look()
        await asyncio.sleep(0)
    return [s for rollouts in await sampling for s in rollouts.samples]


def no_look():
    "Nobody looks."


def test_samples_are_the_same_to_the_last_bit_with_a_dashboard_that_looks():
    async def main():
        plain = await sample_and_look(open_loop(), no_look)
        loop = open_loop()
        dashboard = Dashboard(loop)
        pane = dashboard.screen.rollouts
        shown = []

        def look():
            pane.looked = -np.inf  # at any time, not twice a second
            pane.look(loop, dashboard.watch)
            shown.append(pane.payload)

        looked_at = await sample_and_look(loop, look)
        dashboard.close()
        return plain, looked_at, shown

    plain, looked_at, shown = asyncio.run(main())
    for mine, theirs in zip(looked_at, plain, strict=True):
        assert mine.tokens.tolist() == theirs.tokens.tolist()
        assert mine.logprobs.tobytes() == theirs.logprobs.tobytes()
        assert mine.top_logprobs.logprobs.tobytes() == theirs.top_logprobs.logprobs.tobytes()
    flying = [payload for payload in shown if payload]
    texts = [row["text"] for payload in flying for row in payload["rows"] if row["text"]]
    assert texts
    finished = [s.text for s in plain]
    for text in texts:
        assert any(text.strip() in whole for whole in finished)
    assert {row["name"] for row in flying[0]["rows"]} == {"group 0", "group 1", "group 2"}
    assert "group 1 (4 completions)" in flying[0]["line"]


@pytest.mark.parametrize("overlong", ["keep", "mask"])
def test_a_completion_that_is_cut_ends_and_the_step_goes_on(tmp_path, overlong):
    async def main():
        plain = await sample_and_look(open_loop(), no_look)
        loop = open_loop(overlong=overlong)
        cut = []

        def cut_one():
            started = [p for p in loop.sampler.in_flight() if p.tokens]
            if started and not cut:
                cut.append([*started[0].tokens])
                started[0].cut()
                assert started[0].key not in {p.key for p in loop.sampler.in_flight()}

        samples = await sample_and_look(loop, cut_one)
        assert loop.sampling == []
        assert loop.sampler.in_flight() == []
        grades = iter(range(99))
        loop.score(lambda completion: next(grades) % 2)
        return plain, samples, cut[0], await loop.step()

    plain, samples, shown, record = asyncio.run(main())
    ended = [s for s in samples if s.finish_reason == "cut"]
    assert len(ended) == 1
    [at] = [i for i, s in enumerate(samples) if s.finish_reason == "cut"]
    own = ended[0].tokens[ended[0].prompt_len :].tolist()
    assert own[:-1] == shown  # it ended with its next token
    assert len(own) < len(plain[at].tokens) - plain[at].prompt_len
    for i, (mine, theirs) in enumerate(zip(samples, plain, strict=True)):
        end = len(mine.tokens) if i == at else None
        assert mine.tokens.tolist() == theirs.tokens[:end].tolist()
    truncated = np.mean([s.truncated for s in samples])
    assert ended[0].truncated
    assert record.metrics["completions/clipped_ratio"] == pytest.approx(truncated)
    datum = datum_from_sample(ended[0], advantage=1.0, overlong=overlong)
    assert bool(datum.active.any()) == (overlong == "keep")
    with staged_folder(tmp_path / "step") as inside:
        write_record(record, inside)
    again = [s for g in read_record(tmp_path / "step").groups for s in g.samples]
    assert [s.finish_reason for s in again] == [s.finish_reason for s in samples]


class Service:
    "A sampler that says nothing of a completion before it is back."

    def __init__(self, sampler):
        self.sampler = sampler
        self.gate = asyncio.Event()

    async def sample(self, prompt_tokens, params):
        await self.gate.wait()
        return await self.sampler.sample(prompt_tokens, params)


def test_of_a_service_the_prompts_are_counted():
    async def main():
        loop = open_loop()
        service = Service(loop.sampler)
        loop.sampler = service
        dashboard = Dashboard(loop)
        loop.prompts()
        sampling = asyncio.create_task(loop.sample())
        while not loop.sampling:
            await asyncio.sleep(0)
        dashboard.watch.look(loop, "sample")
        dashboard.screen.rollouts.looked = -np.inf
        dashboard.screen.rollouts.look(loop, dashboard.watch)
        payload = dashboard.screen.rollouts.payload
        service.gate.set()
        await sampling
        dashboard.close()
        return payload

    payload = asyncio.run(main())
    assert payload["rows"] == []
    assert payload["line"] == "The step waits for group 0, group 1, group 2; 0 prompts are back."
