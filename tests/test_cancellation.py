"""Cancelled at any await of a step or an undo, a loop and its trainer still agree.

Every await is tried twice: cancelled as soon as it waits, and when what it waits for is done but not yet noted. After
each, the run continues and must reach the weights of an undisturbed run, and so must the step that `undo` returns to.
"""

import asyncio
import contextlib
import functools
import gc
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from service_runs import KEY, updates_and_weights, no_service_is_left, policy_trainer, service
from tiny_models import byte_tokenizer, one_thread, tiny_model

from rl_notebook.backends.base import Backend
from rl_notebook.backends.local.trainer import open_local
from rl_notebook.backends.services.tinker import open_tinker
from rl_notebook.config.config import Config
from rl_notebook.loop.async_loop import AsyncGRPOLoop
from rl_notebook.loop.loop import GRPOLoop
from rl_notebook.task.data import load_rows

__all__ = ["no_service_is_left", "one_thread"]


async def local(**options: Any) -> Backend:
    return open_local(tiny_model(), byte_tokenizer(), **options)


async def tinker() -> Backend:
    quick = {"probing": False, "conformance": "off", "base_model": "a-model", "lora_rank": 4}
    return await open_tinker(base_url=service().url, key=KEY, tokenizer=byte_tokenizer(), **quick)


BACKENDS: dict[str, Callable[[], Awaitable[Backend]]] = {
    "local": local,
    "local-inline": lambda: local(inline=True),
    "tinker": tinker,
}


def weights(backend: Backend) -> np.ndarray:
    "Everything that is trained, where it is trained."
    policy: Any = backend.policy
    if hasattr(policy, "state"):
        params = {name: p.detach().numpy() for name, p in policy.state.params.items()}
    else:
        params = updates_and_weights(
            policy_trainer(service(), backend), policy.link.client.model_id
        )[1]
    return np.concatenate([params[name].ravel().copy() for name in sorted(params)])


# --- the kinds of steps -----------------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "sync": {},
    "minibatches": {"ppo_n_minibatches": 2, "policy_loss": "ppo"},
    "calls": {"max_samples_per_fwd_bwd": 3},
    "overlapped": {"min_samples_per_fwd_bwd": 4},
    "async": {"recipe": "async_rl_loop"},
    "async-ahead": {"recipe": "async_rl_loop", "max_head_offpolicy_versions": 1},
    "async-chunks": {"recipe": "async_rl_loop", "pipeline_chunks_per_step": 2},
}
SMALL_RUN = {
    "prompt_groups_per_step": 2,
    "completions_per_prompt": 3,
    "max_completion_tokens": 4,
    "max_seq_len": 64,
}


def REWARD(text):
    return float(sum(map(ord, text)) % 13)


def begin(backend: Backend, kind: str) -> GRPOLoop:
    "A loop over a few sums, every group of which is trained on."
    lora = backend.capabilities.lora_rank
    cfg = Config(
        **SMALL_RUN, lora_rank=lora, learning_rate=1e-3, kl_beta=0.05, epochs=100, **KINDS[kind]
    )
    rows = load_rows([{"prompt": f"{i}+{i * i} ="} for i in range(8)])
    cls = AsyncGRPOLoop if cfg.recipe == "async_rl_loop" else GRPOLoop
    return cls(backend, rows, REWARD, cfg, dynamic_filter_fn=lambda group: True)


# --- a coroutine that is cancelled -----------------------------------------------------------------------------------


@dataclass
class CancelledAt:
    "Awaits a coroutine, and cancels the task at its k-th suspension: at once, or when what it waits for is done."

    work: Coroutine[Any, Any, Any]
    at: int  # from 1
    late: bool = False
    waits: int = 0  # suspensions so far

    def __await__(self) -> Generator[Any, Any, Any]:
        task = asyncio.current_task()
        error = None
        assert task is not None
        while True:
            try:
                waited = self.work.throw(error) if error is not None else self.work.send(None)
            except StopIteration as end:
                return end.value
            self.waits += 1
            if self.waits == self.at and not self.late:
                task.cancel()
            elif self.waits == self.at and waited is None:
                asyncio.get_running_loop().call_soon(task.cancel)
            elif self.waits == self.at:
                waited.add_done_callback(lambda _: task.cancel())
            try:
                error = None
                yield waited
            except BaseException as thrown:
                error = thrown


# --- what has to come out --------------------------------------------------------------------------------------------


@dataclass
class Baseline:
    "A backend, and the weights of a run on it that nothing disturbs."

    backend: Backend
    kind: str
    start: str  # state of the trainer
    want: list[np.ndarray] = field(default_factory=list)  # weights after n steps
    # of a branch after its step, and of its loop after the next
    branch_weights: list[np.ndarray] = field(default_factory=list)
    reached: bool = False  # whether the await to cancel was reached

    @classmethod
    async def record(cls, backend: Backend, kind: str) -> "Baseline":
        "A run of a few steps that nothing disturbs."
        baseline = cls(backend, kind, await backend.policy.save_state("at-the-start"))
        async with baseline.fresh() as loop:
            baseline.want.append(weights(backend))
            for _ in range(3):
                await loop.step()
                baseline.want.append(weights(backend))
        assert not any(
            np.array_equal(a, b) for a, b in zip(baseline.want, baseline.want[1:], strict=False)
        )
        return baseline

    @contextlib.asynccontextmanager
    async def fresh(self):
        "A loop at the start."
        backend = self.backend
        await backend.policy.discard_gradients()
        await backend.policy.load_state(self.start)
        await backend.sync(await backend.policy.save_weights_for_sampler("at-the-start"))
        loop = begin(backend, self.kind)
        try:
            yield loop
        finally:
            await loop.close()

    def same(self, want: np.ndarray, when: str) -> None:
        "The weights are these: bit for bit in this process, where the passes are the same (a batch taken back: one)."
        got = weights(self.backend)
        exact = hasattr(self.backend.policy, "state") and self.kind != "async-chunks"
        tol = 0.0 if exact else 1e-6
        assert np.allclose(got, want, rtol=0, atol=tol), (
            f"weights {when}: {np.abs(got - want).max():.2g} off"
        )

    def check(self, loop: GRPOLoop, steps: int) -> None:
        "Weights, records and the sampler's version after n steps."
        self.same(self.want[steps], f"after {steps}")
        assert loop.state.number == steps + 1, loop.place
        assert [r.step for r in loop.records] == [*range(1, steps + 1)]
        assert loop.policy_version == self.backend.sampler.policy_version  # type: ignore[attr-defined]
        assert loop.weights.sampler.is_current

    async def cancel_at(self, work: Coroutine[Any, Any, Any], at: int, late: bool) -> None:
        "Cancel a call at its k-th suspension, if it has k."
        call = CancelledAt(work, at, late)

        async def body() -> Any:
            return await call

        task = asyncio.ensure_future(body())
        await asyncio.wait([task], timeout=60)
        self.reached |= call.waits >= at
        assert task.done(), "wedged"
        if not task.cancelled():
            task.result()


async def cancel_step(baseline: Baseline, loop: GRPOLoop, *point: Any) -> None:
    "A step, the step after it, and back."
    await baseline.cancel_at(loop.step(), *point)
    if not loop.records:
        await loop.step()
    baseline.check(loop, 1)
    await loop.step()
    baseline.check(loop, 2)
    await loop.undo()
    baseline.check(loop, 1)
    await loop.step()
    baseline.check(loop, 2)


async def cancel_step_and_undo(baseline: Baseline, loop: GRPOLoop, *point: Any) -> None:
    "A step is taken back, wherever it was cancelled."
    await loop.step()
    await baseline.cancel_at(loop.step(), *point)
    if loop.state.number == 3 or loop.state.updated:
        await loop.undo()
        baseline.check(loop, 1)
    while loop.state.number < 4:
        await loop.step()
    baseline.check(loop, 3)


async def cancel_undo(baseline: Baseline, loop: GRPOLoop, *point: Any) -> None:
    "Taking back a step is cancelled."
    await loop.step()
    await loop.step()
    await baseline.cancel_at(loop.undo(), *point)
    if loop.state.number == 3:
        await loop.undo()
    baseline.check(loop, 1)
    await loop.step()
    await loop.step()
    baseline.check(loop, 3)


WHAT = {"step": cancel_step, "taken back": cancel_step_and_undo, "undo": cancel_undo}


async def cancel_at_every(baseline: Baseline, what: str, every: int = 1) -> tuple[int, list[str]]:
    "How many cancellations were tried, and what went wrong after which."
    tried = 0
    wrong = list[str]()
    at = 1
    async with baseline.fresh() as loop:
        await WHAT[what](baseline, loop, 0, False)  # left alone
    baseline.reached = True
    while baseline.reached:
        baseline.reached = False
        for late in (False, True):
            place = f"{baseline.kind}, {what}, await {at}{' late' if late else ''}"
            try:
                async with baseline.fresh() as loop:
                    await asyncio.wait_for(WHAT[what](baseline, loop, at, late), 60)
            except Exception as error:  # counted, and reported
                wrong.append(f"{place}: {type(error).__name__}: {str(error)[:200]}")
        tried += 2 * baseline.reached
        at += every
    return tried, wrong


async def survey(
    name: str, kinds: Sequence[str], whats: Sequence[str], every: int = 1
) -> list[str]:
    "Points on one backend: what went wrong; prints counts."
    lines = []
    async with await BACKENDS[name]() as backend:
        for kind in kinds:
            baseline = await Baseline.record(backend, kind)
            for what in whats:
                tried, wrong = await cancel_at_every(baseline, what, every)
                print(
                    f"{name:13} {kind:13} {what:11} {tried:4} tried {len(wrong):4} wrong",
                    flush=True,
                )
                assert tried
                lines += wrong
    return lines


def test_a_cancelled_step_or_undo_continues_to_the_same_weights():
    assert asyncio.run(survey("local", ["sync"], [*WHAT], every=19)) == []


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["local", "local-inline"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cancellation_at_any_await_continues_to_the_same_weights(backend, kind):
    assert asyncio.run(survey(backend, [kind], [*WHAT])) == []


# --- who insists -----------------------------------------------------------------------------------------------------


def slow_updates(loop: GRPOLoop) -> None:
    "Let an optimizer step take its time, in the trainer's own thread."
    policy: Any = loop.backend.policy
    run = policy.run

    async def slow(fn: Callable[..., Any], *args: Any) -> Any:
        wait = 0.2 if getattr(fn, "__name__", "") == "update" else 0
        return await run(lambda: (time.sleep(wait), fn(*args))[1])

    policy.run = slow


def test_a_second_cancellation_leaves_and_the_next_turn_waits_for_the_update():
    async def main():
        backend = await local()
        baseline = await Baseline.record(backend, "sync")
        async with baseline.fresh() as loop:
            slow_updates(loop)
            task = asyncio.ensure_future(loop.step())
            while loop.running != "optimize" or loop.weights.shared.section.done():
                await asyncio.sleep(0)
            for _ in range(2):
                task.cancel()
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not loop.weights.shared.section.done()
            await loop.step()
            baseline.check(loop, 1)

    asyncio.run(main())


# --- interrupts ------------------------------------------------------------------------------------------------------

LOOP = ("arrivals", "back", "change", "loop", "phases", "state", "weights")
FILES = (*(f"rl_notebook/loop/{name}.py" for name in LOOP), "rl_notebook/backends/local/trainer.py")


def interrupt_at(run: Callable[[], Any], at: int) -> str:
    "Call with an interrupt at the n-th line of the loop or the trainer; where that was, if it ran n lines."
    lines_run = 0
    where = ""

    def tracer(frame: Any, event: str, arg: Any) -> Any:
        nonlocal lines_run, where
        if not frame.f_code.co_filename.endswith(FILES):
            return None
        lines_run += event == "line"
        if lines_run == at and not where:
            where = f"line {at}, {frame.f_code.co_name}:{frame.f_lineno}"
            signal.raise_signal(signal.SIGINT)
        return tracer

    sys.settrace(tracer)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            run()
    finally:
        sys.settrace(None)
    return where


def run_and_cancel_rest(
    event_loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any]
) -> None:
    "Run a call; if it raises, cancel what is left of it, as `asyncio.run` does."
    task = event_loop.create_task(work)
    try:
        event_loop.run_until_complete(task)
    finally:
        sys.settrace(None)
        tasks = [task, *asyncio.all_tasks(event_loop)]
        for one in tasks:
            one.cancel()
        event_loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))


def interrupts(every: int) -> tuple[int, list[str]]:
    "KeyboardInterrupt at every n-th line of a step that computes in the main thread: how many, what went wrong."
    event_loop = asyncio.new_event_loop()
    tried = 0
    wrong = list[str]()
    at = 1
    run = event_loop.run_until_complete
    baseline = run(Baseline.record(run(local(inline=True)), "sync"))
    while True:
        entered = baseline.fresh()
        loop = run(entered.__aenter__())
        if not (
            where := interrupt_at(
                functools.partial(run_and_cancel_rest, event_loop, loop.step()), at
            )
        ):
            event_loop.close()
            return tried, wrong
        try:
            run(asyncio.wait_for(after_an_interrupt(baseline, loop), 60))
        except Exception as error:  # counted, and reported
            wrong.append(f"{where}: {type(error).__name__}: {str(error)[:200]}")
        tried = tried + 1
        at = at + every


async def after_an_interrupt(baseline: Baseline, loop: GRPOLoop) -> None:
    "The step is finished, taken back and made again."
    if not loop.records:
        await loop.step()
    baseline.check(loop, 1)
    await loop.undo()
    baseline.check(loop, 0)
    await loop.step()
    await loop.step()
    baseline.check(loop, 2)


def test_an_interrupt_in_the_main_thread_tears_no_update_apart():
    tried, wrong = interrupts(every=5 if os.environ.get("SLOW") == "1" else 307)
    print(f"{tried} interrupts tried, {len(wrong)} wrong")
    assert tried > 6
    assert wrong == []


SLOW_SAMPLES = """
import asyncio, sys
sys.path.insert(0, {tests!r})
import rl_notebook as rln
import test_cancellation as tests
from dataclasses import replace
class Slow:
    async def sample(self, prompt_tokens, params):
        print("sampling", flush=True)
        await asyncio.sleep(3600)
backend = await tests.local()
loop = tests.begin(replace(backend, sampler=Slow()), "sync")
def unread(text):
    return {{}}["answer"]
"""


def test_a_cell_shows_its_own_lines_and_where_the_loop_stands():
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")

    def shown(code: str, interrupt: bool = False) -> str:
        "What a cell shows: its error, or its value."
        message_id = client.execute(code)
        output = ""
        while True:
            message = client.get_iopub_msg(timeout=300)
            content = message["content"]
            if message["parent_header"].get("msg_id") != message_id:
                continue
            if interrupt and "sampling" in content.get("text", ""):
                manager.interrupt_kernel()
                interrupt = False
            output += "\n".join(content.get("traceback", ())) + content.get("data", {}).get(
                "text/plain", ""
            )
            if content.get("execution_state") == "idle":
                return output

    with contextlib.ExitStack() as stack:
        stack.callback(manager.shutdown_kernel, now=True)
        stack.callback(client.stop_channels)
        assert shown(SLOW_SAMPLES.format(tests=str(Path(__file__).parent))) == ""
        message = "Interrupted. await loop.step() continues from here: step 1, next: sample; 2 of"
        for call in (
            "await loop.step()",
            "await loop.sample()",
            "await loop.evaluate(loop.rows[:1])",
        ):
            text = shown(call, interrupt=True)
            assert (text.startswith(message), len(text.splitlines())) == (True, 1), text
        tried = "await rln.preflight(loop.backend, loop.rows, lambda text: 1.0, loop.cfg)"
        assert shown(tried, interrupt=True) == "Interrupted: preflight, sample."
        assert shown("x = 1\nloop.datums()").splitlines()[:-1] == ["cell, line 2: loop.datums()"]
        graded = "s = rln.RolloutSample([1, 2], [0, -1.0], [0, 1], None)\nfrom rl_notebook.task.rewards import score\n"
        *lines, last = shown(f"{graded}await score([s], loop.rows[0], unread)").splitlines()
        assert lines[0] == 'cell, line 13, in unread: return {}["answer"]'
        assert lines[1:] == [
            "KeyError: 'answer'",
            "cell, line 3: await score([s], loop.rows[0], unread)",
        ]
        assert last.startswith("RewardError: ")


# --- rollouts that never end ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ended", ["timeout", "cancelled", "failed", "abandoned"])
@pytest.mark.parametrize("kind", ["sync", "overlapped", "async"])
def test_a_rollout_that_hangs_ends_with_its_step(
    kind: str, ended: str, monkeypatch: pytest.MonkeyPatch, capfd: Any
):
    "A step in a separate event loop leaves nothing behind; rows of an async loop end when it is closed."
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda event: unraisable.append(event.exc_value))

    async def rollout_fn(sample_prompt: dict[str, Any], rollout_index: int) -> None:
        if ended == "failed" and rollout_index == 2:
            raise ValueError("no such game")
        await asyncio.Event().wait()

    async def main(loop: GRPOLoop) -> int:
        step = asyncio.ensure_future(loop.step())
        if ended == "timeout":
            await asyncio.gather(asyncio.wait_for(step, 0.1), return_exceptions=True)
        else:
            await asyncio.wait([step], timeout=0.1)
        if ended == "abandoned":
            return 0
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
        if kind == "async":
            await loop.close()
        return len(asyncio.all_tasks()) - 1

    cfg = Config(**SMALL_RUN, kl_beta=0.0, **KINDS[kind])
    cls = AsyncGRPOLoop if kind == "async" else GRPOLoop
    loop = cls(
        open_local(tiny_model(), byte_tokenizer()),
        [{"prompt": f"{i} ="} for i in range(4)],
        rollout_fn,
        cfg,
    )
    events = asyncio.new_event_loop()
    left = events.run_until_complete(main(loop))
    events.close()
    del loop
    gc.collect()
    assert left == 0
    assert not [error for error in unraisable if isinstance(error, ValueError)]
    if ended != "abandoned":  # asyncio itself tells of tasks whose event loop was closed
        assert (unraisable, capfd.readouterr().err) == ([], "")
