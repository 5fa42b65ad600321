"A race: racers are ordinary runs, its file is read back, and what it says of made-up curves is right often enough."

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import rl_notebook as rln
from rl_notebook.backends.base import Capabilities
from rl_notebook.cli import main
from rl_notebook.core.intervals import detection_power, look_levels, student
from rl_notebook.core.types import BackendError, ConfigError, RecordError
from rl_notebook.recipes.race import Race
from rl_notebook.views.dashboard import Dashboard

CFG = rln.Config(
    prompt_groups_per_step=2, completions_per_prompt=8, max_completion_tokens=24, learning_rate=1e-4
)
VARIANTS = {"grpo": CFG, "dr_grpo": replace(CFG, advantage_scale="none", aggregation="constant")}
ROWS = rln.toy_rows(6)


def open_tiny() -> rln.Backend:
    return rln.open_local(*rln.load_model("tiny"), inline=True)


async def logprobs_of(backend: rln.Backend) -> np.ndarray:
    "What the sampler says of a few tokens."
    return (await backend.sampler.logprobs([5, 6, 7, 8])).values


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Race, Path, list[int], bool]:
    "A race of three steps, its folder, the steps that were told, and whether the backend has its weights back."
    folder = tmp_path_factory.mktemp("races") / "first"
    told = list[int]()

    async def run() -> tuple[Race, bool]:
        async with open_tiny() as backend:
            before = await logprobs_of(backend)
            race = await rln.race(
                VARIANTS,
                ROWS,
                rln.toy_reward,
                seeds=2,
                steps=3,
                backend=backend,
                path=folder,
                on_step=lambda race: told.append(race.taken),
                progress=False,
            )
            return race, np.array_equal(before, await logprobs_of(backend))

    race, is_restored = asyncio.run(run())
    return race, folder, told, is_restored


def test_each_racer_is_the_run_that_it_would_be_alone(finished):
    race = finished[0]

    def what_was_done(loop: rln.GRPOLoop) -> list[tuple[list[str], float | None]]:
        texts = [[s.text for g in r.groups for s in g.samples] for r in loop.records]
        return [*zip(texts, [r.metrics.get("grad_norm") for r in loop.records], strict=True)]

    async def alone() -> list[tuple[list[str], float | None]]:
        async with open_tiny() as backend:
            cfg = replace(VARIANTS["dr_grpo"], seed=1, steps=3)
            loop = rln.GRPOLoop(backend, ROWS, rln.toy_reward, cfg)
            await loop.run(3, progress=False)
            return what_was_done(loop)

    raced = what_was_done(race.loops["dr_grpo", 1])
    assert raced[0][1]  # trained
    assert raced == asyncio.run(alone())


def test_a_pair_begins_with_the_same_completions_and_another_seed_with_others(finished):
    race = finished[0]
    texts = {
        key: [s.text for g in loop.records[0].groups for s in g.samples]
        for key, loop in race.loops.items()
    }
    assert texts["grpo", 0] == texts["dr_grpo", 0]
    assert texts["grpo", 0] != texts["grpo", 1]


def test_it_tells_each_step_and_gives_the_backend_back(finished):
    race, _, told, is_restored = finished
    assert told == [1, 2, 3] == [*range(1, race.taken + 1)]
    assert is_restored


def test_it_is_read_back_and_its_runs_are_ordinary(finished):
    race, folder, *_ = finished
    again = Race.open(folder)
    assert repr(again) == repr(race)
    for name, curve in race.curves.items():
        assert np.array_equal(again.curves[name], curve)
    run = rln.Run.open(folder / "dr_grpo-1")
    assert run.steps == [1, 2, 3]
    assert run.config["seed"] == 1
    assert run.config["log_path"] == str(folder / "dr_grpo-1")


def test_show_and_view_read_it(finished, capsys: pytest.CaptureFixture, tmp_path: Path):
    race, folder, *_ = finished
    assert main(["show", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == repr(race)
    assert main(["show", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 3
    page = tmp_path / "page.html"
    assert main(["view", str(folder), "--out", str(page)]) == 0
    text = page.read_text()
    assert "Race: grpo, dr_grpo" in text
    assert 'id="carried"' in text  # the figure


def test_the_dashboard_of_a_racer_has_the_chart_on_top(finished):
    race = finished[0]
    dashboard = Dashboard(race.loops["dr_grpo", 0])
    assert dashboard.screen.charts.shown[0]["name"] == "race"
    assert "Race: grpo, dr_grpo" in repr(dashboard.screen.charts.shown)
    dashboard.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"variants": {"grpo": CFG}}, "two or more"),
        ({"variants": {"../up": CFG, "b": CFG}}, "letters, digits"),
        ({"seeds": 1}, "two or more"),
        ({"seeds": (3, 3)}, "all different"),
        ({"steps": 40}, "enough for 40"),
        ({"difference": 0.0}, "above 0"),
        ({"metric": "eval/reward"}, "eval_interval"),
        ({"metric": "rewards"}, "a metric of every step"),
    ],
)
def test_what_cannot_race_is_refused(change, words):
    given = {"variants": VARIANTS, "seeds": 2, "steps": 3, "progress": False} | change

    async def run() -> None:
        async with open_tiny() as backend:
            await rln.race(given.pop("variants"), ROWS, rln.toy_reward, backend=backend, **given)

    with pytest.raises(ConfigError, match=words):
        asyncio.run(run())


def test_a_backend_without_states_is_refused():
    async def run() -> None:
        async with open_tiny() as backend:
            backend.capabilities = replace(backend.capabilities, state_snapshots=False)
            await rln.race(VARIANTS, ROWS, rln.toy_reward, backend=backend, steps=3)

    assert Capabilities("any").state_snapshots
    with pytest.raises(BackendError, match="no state snapshots"):
        asyncio.run(run())


@pytest.mark.parametrize(
    "damage",
    [
        {"format": "rl_notebook.race/9"},
        {"variants": ["../../outside", "b"]},
        {"seeds": ["x"]},
        {"every": 0},
        {"window": 10**9},
    ],
)
def test_a_file_that_is_no_race_is_refused(damage, finished, tmp_path: Path):
    plain = json.loads((finished[1] / "race.json").read_text()) | damage
    (tmp_path / "race.json").write_text(json.dumps(plain))
    with pytest.raises(RecordError, match=r"race\.json"):
        Race.open(tmp_path)


# --- what it says -------------------------------------------------------------------------------------------------


def made_up(rng: np.random.Generator, ahead: float, seeds: int = 4, steps: int = 20) -> Race:
    "Curves that wander by seed, of which the second is ahead by the same everywhere."
    luck = rng.normal(0, 0.03, (2, seeds, steps)).cumsum(-1) / 4 + rng.normal(
        0, 0.05, (2, seeds, steps)
    )
    return Race({"a": 0.5 + luck[0], "b": 0.5 + ahead + luck[1]}, tuple(range(seeds)), steps)


def counted(rng: np.random.Generator, seeds: int) -> np.ndarray:
    "Shares of 32 completions that are right, which are often the same to the last bit but for rounding."
    drift = rng.normal(0, 0.05, (seeds, 1)) * np.linspace(0, 1, 20)
    by_prompt = 0.5 + drift[:, :, None] + rng.normal(0, 0.25, (seeds, 20, 4))
    return rng.binomial(8, by_prompt.clip(0, 1)).sum(-1) / 32


@pytest.mark.parametrize(
    "seeds", [pytest.param(n, marks=[pytest.mark.slow] * (n > 2)) for n in (2, 4, 8)]
)
def test_equal_variants_are_seldom_told_apart(seeds):
    rng = np.random.default_rng(seeds)
    races = [made_up(rng, 0.0, seeds) for _ in range(400)]
    races += [
        Race({"a": counted(rng, seeds), "b": counted(rng, seeds)}, tuple(range(seeds)), 20)
        for _ in range(400)
    ]
    answers = [race.results[0].answer for race in races]
    assert answers.count("better") + answers.count("worse") <= 0.05 * len(races)


def test_a_large_difference_is_found_before_the_end():
    result = made_up(np.random.default_rng(0), 0.5, 8).results[0]
    assert result.answer == "better"
    assert result.step < 20
    assert 0.5 in result.interval


def test_an_open_race_says_in_whole_numbers_what_it_would_take():
    race = made_up(np.random.default_rng(1), 0.02)
    needed = race.plan().to_dict("records")[-1]
    assert repr(race).endswith(f"takes about {needed['seeds']} seeds of 20 steps")


def test_three_variants_share_the_confidence():
    race = made_up(np.random.default_rng(0), 0.1)
    three = replace(race, curves={**race.curves, "c": race.curves["b"]})
    pair = race.leads("b")[-1].interval
    wider = three.leads("b")[-1].interval
    assert wider.low < pair.low < pair.high < wider.high
    assert [lead.variant for lead in three.results] == ["b", "c"]


def test_levels_of_looks_spend_what_there_is():
    for looks in (1, 2, 5, 50):
        assert (1 - look_levels(looks, 0.9)).sum() == pytest.approx(0.1)


def test_a_stated_power_is_the_power_found():
    rng = np.random.default_rng(0)
    samples = 0.6 + rng.normal(size=(2000, 6))
    found = np.mean([student(values, 0.9).low > 0 for values in samples])
    assert detection_power(1.0, 10**6, 0.6, 6, 0.9) == pytest.approx(found, abs=0.03)
