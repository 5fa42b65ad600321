"What one sees while stepping: why a run ended, who has the loop, what was changed, and the step in progress."

import asyncio
import signal
from dataclasses import replace

import pytest
import torch
from test_async_loop import begin
from test_loop import ALL, LENGTH, SMALL_RUN, make_loop, same, up_to, weights

from rl_notebook.backends.local.trainer import open_local
from rl_notebook.config.config import Config
from rl_notebook.core.types import BackendError, ConfigError, DivergedError, LossError, PhaseError
from rl_notebook.experiments.replay import replay
from rl_notebook.loop.back import save_checkpoint
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.loop.rollouts import RolloutFactory
from rl_notebook.loop.weights import LEASES
from rl_notebook.recipes.rl_loop import Problem, train
from rl_notebook.runs.run import Run, RunFolder
from rl_notebook.task.chat import sample_from_completion
from rl_notebook.task.data import load_rows
from rl_notebook.task.models import load_model
from rl_notebook.task.toy import toy_rows
from rl_notebook.views.dashboard import Dashboard, on_pane_message, tick


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 300))


# --- how a run ends -----------------------------------------------------------------------------------------------


def test_a_run_prints_each_verdict_once_with_the_checks_that_failed_and_says_why_it_ended(capsys):
    async def main():
        loop = make_loop(rows=6, reward=lambda completion_text: 1.0)  # no group teaches anything
        records = await loop.run(50)
        output = capsys.readouterr().out
        assert [output.count(r.verdict) for r in records] == [1, 1]
        assert "✗ signal" not in output  # all earn the most
        assert all(
            r.verdict in line and "none of the 3 groups has a signal" in line
            for r, line in zip(records, output.split("\n"))
        )
        assert (
            "2 steps: all 6 prompts are used up (6 rows, epochs=1); raise epochs, or pass more rows"
            in output
        )
        assert repr(records) == "2 records, steps 1 to 2"
        assert await loop.run(50) == []
        assert "no steps: all 6 prompts are used up" in capsys.readouterr().out
        assert "all 6 prompts are used up" in repr(await loop.run(progress=False))

    run(main())


def test_a_run_that_was_stopped_or_is_at_its_last_step_says_so_and_a_whole_one_says_nothing(capsys):
    async def main():
        loop = make_loop(rows=30, steps=3)
        loop.outputs.append(lambda record: loop.stop() if record.step == 1 else None)
        assert "stopped as requested (step 2, next: prompts" in (await loop.run(2)).ended
        assert (await loop.run(1)).ended == ""
        assert "all steps of the config are done (steps=3)" in (await loop.run(2)).ended
        assert "steps=3" in capsys.readouterr().out
        assert (await make_loop(rows=6).run(progress=False)).ended == ""  # to the end, as asked

    run(main())


# --- who has the loop ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["in turns", "asynchronous"])
def test_a_step_in_a_cell_while_the_dashboard_plays_waits_for_its_turn(kind):
    async def main():
        loop = make_loop(rows=24) if kind == "in turns" else begin(rows=40, reward=LENGTH)
        dashboard = Dashboard(loop)
        playing = dashboard.start("play", 2)
        records = [await loop.step(), await loop.step()]
        await playing
        steps = [r.step for r in loop.records]
        assert steps == list(range(1, len(steps) + 1))
        assert len({r.step for r in records}) == 2
        assert dashboard.error is None
        dashboard.close()
        await loop.close()

    run(main())


def test_two_cells_that_step_the_same_loop_take_turns_and_a_phase_that_cannot_wait_says_who_has_it():
    async def main():
        loop = make_loop(rows=30)
        first = asyncio.ensure_future(loop.step())
        while loop.running != "sample":
            await asyncio.sleep(0.001)
        with pytest.raises(
            PhaseError, match=r"score: got sample is running, begun in another cell.*Pause the dash"
        ):
            loop.score()
        with pytest.raises(PhaseError, match="prompts"):
            loop.prompts()
        others = await asyncio.gather(first, loop.step(), loop.step())
        assert [r.step for r in others] == [1, 2, 3]
        assert (loop.weights.shared.holder, loop.weights.shared.lease, LEASES.get()) == (
            None,
            None,
            (),
        )

    run(main())


def two_loops_on_one_backend():
    "Two loops that were opened apart from each other over one backend, with different rows."
    one = make_loop(rows=24, reward=LENGTH)
    rows = load_rows(toy_rows(24, seed=9))
    return one, GRPOLoop(one.backend, rows, LENGTH, one.cfg, name="other")


def test_two_loops_over_one_backend_that_are_stepped_at_once_train_one_after_the_other():
    async def main():
        one, other = two_loops_on_one_backend()
        await asyncio.gather(one.run(2, progress=False), other.run(2, progress=False))
        one_alone, other_alone = two_loops_on_one_backend()
        for loop in (one_alone, other_alone, one_alone, other_alone):
            await loop.step()
        assert same(weights(one), weights(one_alone))
        for a, b in ((one, one_alone), (other, other_alone)):
            assert [r.metrics.get("grad_norm") for r in a.records] == [
                r.metrics.get("grad_norm") for r in b.records
            ]
            assert [r.policy_version for r in a.records] == [r.policy_version for r in b.records]

    run(main())


def test_a_loop_that_comes_between_backward_and_update_of_another_drops_its_gradient():
    async def main():
        one, other = two_loops_on_one_backend()
        await one.step()
        await up_to(one, "backward")
        alone = (await other.step()).metrics["grad_norm"]
        one_alone, other_alone = two_loops_on_one_backend()
        await one_alone.step()
        assert (await other_alone.step()).metrics["grad_norm"] == alone
        with pytest.raises(PhaseError, match="no update to take back"):
            await one.undo()  # it would take the other's along
        with pytest.raises(
            PhaseError, match=r"no reference, backward yet. Run await loop.reference"
        ):
            await one.optimize()
        await one.step()
        assert (one.state.number, one.policy_version) == (3, 3)

    run(main())


def test_a_step_inside_a_step_of_another_loop_is_rejected_and_does_not_wait_for_itself():
    async def main():
        one, other = two_loops_on_one_backend()

        async def asks(step, rollout_fn):
            return await asyncio.gather(other.step())

        one.evaluation_fn = asks
        with pytest.raises(
            PhaseError, match=r"the backend for .other.: got a step of .main. that waits for this"
        ):
            await one.evaluate()
        assert (await other.step()).step == 1

    run(main())


def test_a_window_is_joined_between_its_steps_and_says_who_has_it_within_one():
    async def main():
        loop = make_loop(rows=24, weight_sync_interval=2, keep=lambda g: True)
        dashboard = Dashboard(loop)
        playing = dashboard.start("step")
        while not loop.running:
            await asyncio.sleep(0.001)
        with pytest.raises(
            PhaseError,
            match=r"a window of several steps.*running, begun in another cell or by a dash",
        ):
            await asyncio.create_task(loop.evaluate(loop.rows[:1]))
        await playing
        assert dashboard.window is not None
        await asyncio.create_task(loop.evaluate(loop.rows[:1]))
        await dashboard.play(1)
        assert [r.step for r in loop.records] == [1, 2]

    run(main())


@pytest.mark.parametrize("kind", ["in turns", "asynchronous"])
def test_after_a_stop_step_continues(kind):
    async def main():
        loop = make_loop(rows=30, reward=LENGTH) if kind == "in turns" else begin(rows=30)
        loop.stop()
        assert (await loop.step()).step == 1
        stepping = asyncio.ensure_future(loop.step())
        while not loop.running:
            await asyncio.sleep(0.001)
        loop.stop()
        assert await stepping is None
        assert (await loop.step()).step == 2
        await loop.close()

    run(main())


# --- settings that change while the loop stands -------------------------------------------------------------------


def test_a_setting_changes_between_two_steps_and_is_in_the_record_of_the_next(capsys):
    async def main():
        loop = make_loop(rows=30, keep=ALL, kl_beta=0.0)
        await up_to(loop, "backward")
        for change in (
            lambda: loop.change(learning_rate=3e-4),
            lambda: setattr(loop, "cfg", replace(loop.cfg, learning_rate=3e-4)),
        ):
            with pytest.raises(
                PhaseError, match=r"change of learning_rate: got a step that has begun.*loop\.step"
            ):
                change()
        assert loop.cfg.learning_rate == 1e-3
        assert "reward: " in repr(loop.change(reward=LENGTH))
        assert loop.state.current == "score"
        await up_to(loop, "optimize")
        with pytest.raises(PhaseError, match=r"another reward.*updated"):
            loop.change(reward=LENGTH)
        first = await loop.step()
        changed = loop.change(learning_rate=3e-4, max_completion_tokens=9)
        assert "learning_rate: 0.001 -> 0.0003" in repr(changed)
        loop.cfg = replace(loop.cfg, kl_beta=0.05)
        assert "kl_beta: 0.0 -> 0.05" in capsys.readouterr().out
        second = await loop.step()
        assert (first.metrics["learning_rate"], first.options["kl_beta"]) == (1e-3, 0.0)
        assert (second.metrics["learning_rate"], second.options["kl_beta"]) == (3e-4, 0.05)
        settings = {"learning_rate": 3e-4, "kl_beta": 0.05, "max_completion_tokens": 9}
        assert (first.changed, second.changed) == (
            {"reward": "LENGTH"},
            settings | {"reward": "LENGTH"},
        )
        assert max(s.completion_len for g in second.groups for s in g.samples) <= 9
        loop.change(epochs=3)
        await loop.undo()
        assert (loop.cfg.epochs, loop.cursor.total) == (3, 90)

    run(main())


def test_a_rejected_update_is_tried_again_in_its_step_at_a_lower_rate_or_with_another_gradient():
    async def main():
        settings = {
            "keep": ALL,
            "ppo_n_minibatches": 2,
            "prompt_groups_per_step": 2,
            "completions_per_prompt": 4,
        }
        loop = make_loop(**settings, learning_rate=9e37)
        calm = make_loop(**settings)
        want = [await calm.step(), await calm.step()]
        for _ in range(2):
            with pytest.raises(
                BackendError, match=r"step 1: .*rejected.*as before.*loop\.change\(learning_rate="
            ):
                await loop.step()
        with pytest.raises(PhaseError, match="change of epochs: got a step that has begun"):
            loop.change(learning_rate=1e-3, epochs=2)
        assert repr(loop.change(learning_rate=1e-3)) == "learning_rate: 9e+37 -> 0.001"
        first = await loop.step()
        assert first.changed == {"learning_rate": 1e-3}
        await up_to(loop, "backward")
        next(p for p in loop.backend.policy.state.params.values() if p.grad is not None).grad[0] = (
            torch.inf
        )
        for _ in range(2):
            with pytest.raises(
                BackendError, match=r"step 2: .*norm: got inf.*as before.*await loop\.backward\(\)"
            ):
                await loop.optimize()
        await loop.backward()
        second = await loop.step()
        assert [first.metrics["update_norm"], second.metrics["update_norm"]] == [
            r.metrics["update_norm"] for r in want
        ]
        assert same(weights(loop), weights(calm))

    run(main())


def custom_rollouts(setup):
    "Rollouts of one turn, by a function of the user."

    async def play(sample_prompt):
        (completion,) = await setup.sampler.sample(sample_prompt["prompt_token_ids"], setup.params)
        return sample_from_completion(completion, reward=float(len(completion.text)))

    return play


@pytest.mark.parametrize(
    "reward", [LENGTH, RolloutFactory(custom_rollouts)], ids=["reward", "rollout_fn"]
)
def test_weights_that_have_diverged_are_named_at_the_next_sample_and_undo_brings_back_those_before(
    reward,
):
    async def main():
        loop = make_loop(
            reward, keep=ALL, prompt_groups_per_step=2, completions_per_prompt=4, learning_rate=1e25
        )
        before = weights(loop)
        await loop.step()  # finite weights whose logits are not
        for _ in range(2):
            with pytest.raises(
                DivergedError,
                match=r"sampling, token 1 .*logits: got NaN or infinity.*loop\.undo\(\)",
            ):
                await loop.step()
        await loop.undo()
        assert same(weights(loop), before)
        loop.change(learning_rate=1e-3)
        assert (await loop.step()).metrics["update_norm"] < 10
        assert (await loop.step()).step == 2

    run(main())


def test_another_reward_grades_and_another_temperature_is_that_of_sampler_and_policy():
    async def main():
        loop = make_loop(rows=30, reward=LENGTH, keep=ALL)
        loop.change(reward=lambda completion_text: -float(len(completion_text)), temperature=0.7)
        warm = await loop.step()
        assert all(s.reward <= 0 for g in warm.groups for s in g.samples)
        assert warm.changed == {"reward": "<lambda>", "temperature": 0.7}
        assert {lp.temperature for lp in warm.loss.logprobs} == {0.7}
        assert warm.metrics["sampling/sampling_logp_difference/max"] < 1e-4

    run(main())


FIXED = [
    ({"lora_rank": 8}, "lora_rank"),
    ({"base_model": "other"}, "base_model"),
    ({"seed": 5}, "seed"),
    ({"top_k": 10**6, "loss_path": "builtin"}, "loss_path"),
    ({"learning_rate": -1.0}, "learning_rate"),
]


def test_fixed_settings_are_rejected_by_name_and_nothing_is_changed():
    loop = make_loop(rows=6)
    before = loop.cfg
    for settings, message in FIXED:
        with pytest.raises(ConfigError, match=message):
            loop.change(**settings)
        with pytest.raises(ConfigError, match=message):
            loop.cfg = replace(loop.cfg, **settings)
        assert loop.cfg is before


IMPOSSIBLE = [
    ({"refill": True, "weight_sync_interval": 2}, "refill"),
    ({"advantage_fn": "nosuch:fn"}, "No module named"),
    ({"advantage_scale": "batch", "min_samples_per_fwd_bwd": 4}, "advantage_scale"),
]


def test_a_change_that_backend_or_loop_cannot_take_is_rejected_at_once():
    async def main():
        loop = make_loop(rows=12, keep=ALL)
        before = (loop.cfg, loop.arguments, loop.advantage_fn)
        for settings, message in IMPOSSIBLE:
            with pytest.raises((ConfigError, LossError), match=message):
                loop.change(**settings)
            assert (loop.cfg, loop.arguments, loop.advantage_fn) == before
        assert [(await loop.step()).step for _ in range(2)] == [1, 2]

    run(main())


def test_another_limit_of_completions_in_flight_holds_from_the_next_sample_on():
    async def main():
        loop = make_loop(rows=12)
        in_flight = 0
        counts = list[int]()
        sample = loop.sampler.sampler.sample

        async def counted(prompt, params):
            nonlocal in_flight
            in_flight += params.n
            counts.append(in_flight)
            try:
                return await sample(prompt, params)
            finally:
                in_flight -= params.n

        loop.sampler.sampler = type("Counted", (), {"sample": staticmethod(counted)})()
        await loop.step()
        assert max(counts) > 6
        for most in (2, 12):
            counts.clear()
            loop.change(max_concurrent=most)
            await loop.step()
            assert max(counts) == most

    run(main())


def test_a_change_that_asynchronous_rows_depend_on_is_rejected_and_the_rate_is_not():
    async def main():
        loop = begin(rows=20, reward=LENGTH)
        for setting in (
            {"temperature": 0.5},
            {"max_completion_tokens": 4},
            {"reward": LENGTH},
            {"steps": 3},
        ):
            with pytest.raises(ConfigError, match=next(iter(setting))):
                loop.change(**setting)
        loop.change(learning_rate=1e-6)
        record = await loop.step()
        assert (record.changed, record.metrics["learning_rate"]) == ({"learning_rate": 1e-6}, 1e-6)
        await loop.close()

    run(main())


def test_seek_replay_and_resume_know_what_was_changed(tmp_path):
    async def main():
        folder = RunFolder.create(tmp_path / "run", make_loop(rows=30).cfg)
        loop = make_loop(rows=30, outputs=[folder.add])
        await loop.step()
        loop.change(kl_beta=0.2, weight_decay=0.3, advantage_scale="none", temperature=0.8)
        records = [await loop.step() for _ in range(2)]
        report = await replay(Run.open(folder.path), 3, make_loop(rows=30))
        assert [p.phase for p in report.phases if p.same is False] == []
        one = make_loop(rows=30)
        # the settings of 3 are not those of 1
        again = [await replay(Run.open(folder.path), step, one) for step in (3, 1)]
        assert [report.same for report in again] == [True, True]
        other = make_loop(rows=30)
        assert (await other.seek(3, Run.open(folder.path))).gap < 1e-6
        assert same(weights(other), weights(loop), 1e-6)
        assert Run.open(folder.path).record(3).changed == dict(records[1].changed)

    run(main())


def test_a_resumed_run_continues_with_the_changed_settings(tmp_path):
    cfg = Config(
        **SMALL_RUN
        | {"log_path": str(tmp_path / "run"), "max_rows": 12, "steps": 3, "learning_rate": 1e-4}
    )
    lines = []

    async def main():
        folder = RunFolder.create(cfg.log_path, cfg)
        rows = toy_rows(12, seed=cfg.seed)
        async with open_local(*load_model("tiny")) as backend:
            loop = GRPOLoop(backend, load_rows(rows), LENGTH, cfg, outputs=[folder.add])
            await loop.step()
            loop.change(learning_rate=3e-4, weight_decay=0.2)
            await loop.step()
            await save_checkpoint(loop, folder)
        problem = Problem(load_rows(rows), [], LENGTH)
        await train(
            replace(cfg, weight_decay=0.1),
            problem=problem,
            resume=True,
            say=lines.append,
            progress=False,
        )

    run(main())
    record = Run.open(cfg.log_path).record(3)
    assert (record.metrics["learning_rate"], record.changed) == (3e-4, {"learning_rate": 3e-4})
    assert any(
        "as it was changed in the run:\nlearning_rate: 0.0001 -> 0.0003" in line for line in lines
    )


# --- the step in progress -----------------------------------------------------------------------------------------


def shown_values(dashboard):
    "The map's values and title, the table's rows, the line that says what is shown."
    tick(dashboard)
    screen = dashboard.screen
    about = {a["name"]: a["title"] for a in screen.charts.shown}.get("advantages", "")
    return about, len(screen.pane.table["rows"]), screen.now.value + screen.value.value


def test_the_dashboard_shows_what_each_phase_returns_whatever_runs_it():
    async def main():
        loop = make_loop(rows=30, reward=LENGTH)
        dashboard = Dashboard(loop)
        loop.prompts()
        assert "Step 1, after prompts" in shown_values(dashboard)[2]
        await loop.sample()
        title, rows, text = shown_values(dashboard)
        assert (title, rows) == ("Tokens by group, step 1, after sample", 18)
        assert "Current step 1, after sample.</b> 18 samples of 3 prompts" in text
        loop.score()
        assert shown_values(dashboard)[0] == "Rewards by group, step 1, after score"
        assert dashboard.history.column("reward")[0].tolist() == [1]
        assert (
            dashboard.screen.pane.table["rows"][0]["reward"]
            == loop.state.values["score"][0].samples[0].reward
        )
        loop.advantages()
        assert shown_values(dashboard)[0] == "Advantages by group, step 1, after advantages"
        first = dashboard.screen.pane.table["rows"][0]["advantage"]
        loop.advantages(scale="none")  # again, otherwise
        assert "after advantages" in shown_values(dashboard)[0]
        assert dashboard.screen.pane.table["rows"][0]["advantage"] != first
        loop.datums()
        await loop.reference()
        loop.loss()
        assert "after loss" in shown_values(dashboard)[0]
        on_pane_message(dashboard, {"open": [0, 0]})
        on_pane_message(dashboard, {"inspect": True})
        [inspector] = dashboard.screen.inspector.children
        assert "dlogprob" in [s["name"] for s in inspector.payload["series"]]
        on_pane_message(dashboard, {"close": True})
        assert dashboard.screen.pane.completion == {}
        await dashboard.step()
        title, _, text = shown_values(dashboard)
        assert title == "Advantages by group, step 1"
        assert "Current step" not in text
        loop.prompts()
        title, _, text = shown_values(dashboard)
        assert title == "Advantages by group, step 1"
        assert "Current step 2, after prompts" in text
        assert "Map and table are of step 1" in text
        await loop.sample()
        assert shown_values(dashboard)[0] == "Tokens by group, step 2, after sample"
        await dashboard.undo()
        assert "after sample" not in shown_values(dashboard)[0]
        dashboard.close()

    run(main())


def test_an_interrupt_pauses_a_loop_that_plays_in_the_background():
    async def main():
        loop = make_loop(rows=30)
        dashboard = Dashboard(loop)
        dashboard.delay = 0.05
        playing = dashboard.start("play")
        while not loop.running:
            await asyncio.sleep(0.001)
        tick(dashboard)
        signal.raise_signal(signal.SIGINT)
        await playing
        assert not loop.done
        assert dashboard.pausing
        tick(dashboard)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        dashboard.close()

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a kernel between two cells
    try:
        asyncio.new_event_loop().run_until_complete(main())
    finally:
        signal.signal(signal.SIGINT, before)
