"""Recorded calls of other implementations against ours, one test per case, and a table of what came of them.

    pytest tests/test_golden.py                         # the cases in tests/golden
    GOLDEN_DIR=elsewhere pytest tests/test_golden.py    # other cases of the same format

A file without an adapter is named in the table; a case of a file with one is never skipped.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import golden_adapters
import golden_rollouts
import golden_routing
import numpy as np
import pytest
import torch
from golden_adapters import Case, find_adapter, read_cases

from rl_notebook.core import advantages
from rl_notebook.task import chat
from rl_notebook.loop import groups
from rl_notebook.loop import loop
from rl_notebook.core import losses
from rl_notebook.core import metrics
from rl_notebook.loop import rollouts
from rl_notebook.recipes import open as open_module
from rl_notebook.core import builtin
from rl_notebook.loop.groups import Gate
from rl_notebook.backends.services import openai
from rl_notebook.core.types import RLNotebookError

OWN = Path(__file__).parent / "golden"
FOLDER = Path(os.environ.get("GOLDEN_DIR") or OWN)
FILES = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
UNCOVERED = [stem for stem in FILES if find_adapter(stem) is None]
CASES = [case for stem, content in FILES.items() if stem not in UNCOVERED for case in read_cases(stem, content)]


class Tally:
    "What came of the cases of this session."

    def __init__(self):
        self.files: dict[str, Counter[str]] = defaultdict(Counter)
        self.differences: dict[str, Counter[str]] = defaultdict(Counter)

    def table(self) -> str:
        "One line per file, its chosen differences below it, then the files that nobody covers."
        width = max(map(len, [*self.files, *UNCOVERED]))
        lines = [f"{'recorded cases in ' + FOLDER.name:{width}}    ran  agreed  by choice  failed"]
        total: Counter[str] = Counter()
        for stem, n in sorted(self.files.items()):
            total += n
            lines.append(f"{stem:{width}}  {self._numbers(n)}")
            lines += [f"  {count:4} {why}" for why, count in sorted(self.differences[stem].items())]
        lines.append(f"{'all':{width}}  {self._numbers(total)}")
        lines += [f"{stem:{width}}  no adapter yet" for stem in UNCOVERED]
        return "\n".join(lines)

    @staticmethod
    def _numbers(n: Counter[str]) -> str:
        failed = n["ran"] - n["agreed"] - n["by choice"]
        return f"{n['ran']:5}  {n['agreed']:6}  {n['by choice']:9}  {failed:6}"


@pytest.fixture(scope="module")
def tally(say: Callable[[str], None]) -> Iterator[Tally]:
    "Collects outcomes and says them after the last case."
    found = Tally()
    yield found
    say(found.table())


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.file}-{case.name}")
def test_recorded_case(case: Case, tally: Tally) -> None:
    tally.files[case.file]["ran"] += 1
    outcome = find_adapter(case.file)(case)
    tally.files[case.file]["by choice" if outcome.differs else "agreed"] += 1
    tally.differences[case.file].update(outcome.differs)
    assert all(why and "\n" not in why for why in outcome.differs), "a difference is stated in one line"


@pytest.mark.skipif(FOLDER != OWN, reason="other folders may hold files that nobody covers")
def test_every_file_of_ours_has_an_adapter() -> None:
    assert FILES
    assert UNCOVERED == []


@pytest.mark.skipif(FOLDER != OWN, reason="other cases may have been recorded with other defaults")
@pytest.mark.parametrize("stem", [s for s in FILES if fnmatch(s, "loss_*__HEAD") or s == "trl_sapo"])
def test_our_defaults_are_the_recorded_ones(stem: str) -> None:
    defaults, name = FILES[stem]["defaults"], stem.split("__")[0].removeprefix("loss_")
    if stem == "trl_sapo":
        recorded = {k: defaults[k] for k in ("sapo_temperature_pos", "sapo_temperature_neg")}
    else:
        recorded = golden_adapters.surrogate_options(name, defaults)
        assert losses.LossOptions().tis_cap == defaults["tis"]["cap"]
    options = losses.LossOptions(policy_loss=recorded.pop("policy_loss", "sapo"))
    recorded.pop("kl_beta", None)  # ours is 0: no reference is asked for unless somebody wants it
    for knob, value in recorded.items():
        same_as_low = knob == "eps_clip_high" and options.knob(knob) is None
        assert value in ((None, recorded["eps_clip"]) if same_as_low else (options.knob(knob),)), knob


# -- the cases notice what they are there to notice --------------------------------------------------------------

BREAKAGES: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {}


def breakage(files: str) -> Callable[[Callable[[pytest.MonkeyPatch], None]], Any]:
    "Register a way to break our code, and the files whose cases must notice."

    def register(fn: Callable[[pytest.MonkeyPatch], None]) -> Any:
        BREAKAGES[fn.__name__] = (files, fn)
        return fn

    return register


def replaced(monkeypatch: pytest.MonkeyPatch, name: str, new: Callable[..., Any]) -> None:
    "Put another function in the place of one of rl_notebook.core.losses, under every name it has there."
    old = getattr(losses, name)
    monkeypatch.setattr(losses, name, new)
    for key, (fn, knobs) in losses.POLICY_LOSSES.items():
        if fn is old:
            monkeypatch.setitem(losses.POLICY_LOSSES, key, (new, knobs))


@breakage("loss_grpo__HEAD loss_dapo__* loss_gspo__* trl_grpo")
def upper_clip_bound_is_the_lower_one(monkeypatch):
    monkeypatch.setattr(
        losses.LossOptions, "clip_range", property(lambda o: (1 - o.knob("eps_clip"), 1 + o.knob("eps_clip")))
    )


@breakage("loss_dapo__* trl_bnpo trl_dapo trl_dr_grpo")
def dual_clip_is_forgotten(monkeypatch):
    def single(r, t, o):
        return torch.maximum(-r * t.advantage, -torch.clamp(r, *o.clip_range) * t.advantage)

    replaced(monkeypatch, "clipped_surrogate", single)


@breakage(
    "loss_grpo__* loss_dapo__* loss_dro__* loss_gspo__* loss_cispo__* loss_importance_sampling__* trl_grpo "
    "server_datums__517d206d server_datums__HEAD"
)
def correction_is_forgotten(monkeypatch):
    for module in (losses, builtin):
        monkeypatch.setattr(module, "tis_weights", lambda t, o: torch.ones_like(t.old))


@breakage("tis_weights__HEAD loss_*__HEAD")
def icepop_keeps_everything(monkeypatch):
    keep = lambda t, o: torch.clamp(losses.raw_tis_weights(t, o), o.tis_floor, o.tis_cap)
    monkeypatch.setattr(losses, "tis_weights", keep)
    monkeypatch.setattr(golden_adapters, "tis_weights", keep)


@breakage("trl_grpo trl_bnpo trl_dr_grpo trl_dapo trl_cispo trl_sapo seed003_grpo_onpolicy")
def one_sample_too_many_in_the_divisor(monkeypatch):
    natural = losses.natural_denominator
    monkeypatch.setattr(losses, "natural_denominator", lambda n, how: natural(n, how) + (how != "sum"))


@breakage("loss_grpo__HEAD trl_grpo")
def kl_looks_the_other_way(monkeypatch):
    monkeypatch.setitem(losses.KL_ESTIMATORS, "k3", lambda p, f: torch.exp(p - f) - (p - f) - 1)


@breakage("loss_grpo__517d206d loss_reinforce__*")
def k1_is_twice_itself(monkeypatch):
    monkeypatch.setitem(losses.KL_ESTIMATORS, "k1", lambda p, f: 2 * (p - f))


@breakage("loss_gspo__517d206d loss_gspo__HEAD loss_gspo__ebed367d")
def sequence_ratio_is_a_sum(monkeypatch):
    def summed(t, cap):
        log_s = (t.mean_per_sample((t.policy - t.old).detach()) * t.lengths)[t.sample]
        return torch.exp(torch.clamp(t.policy - t.policy.detach() + log_s, max=10.0 if cap is None else cap))

    replaced(monkeypatch, "sequence_ratio", summed)


@breakage("loss_cispo__517d206d loss_cispo__HEAD trl_cispo")
def cispo_weight_has_a_gradient(monkeypatch):
    def attached(t, tis, o):
        weight = torch.clamp(torch.exp(losses.log_ratio(t, o.knob("ratio_log_cap"))), *o.clip_range)
        return -weight * t.policy * t.advantage * tis

    replaced(monkeypatch, "cispo", attached)


@breakage("loss_dro__517d206d loss_dro__HEAD")
def dro_corrects_its_pull(monkeypatch):
    def corrected(t, tis, o):
        pull = o.knob("dro_beta") / 2 * (t.policy - t.old) ** 2 * (t.advantage != 0)
        return -(t.policy * t.advantage - pull) * tis

    replaced(monkeypatch, "dro", corrected)


@breakage("loss_importance_sampling__517d206d loss_importance_sampling__HEAD loss_grpo__HEAD")
def log_ratio_has_no_cap(monkeypatch):
    monkeypatch.setattr(losses, "log_ratio", lambda t, cap: t.policy - t.old)


@breakage("loss_reinforce__517d206d loss_reinforce__HEAD")
def reinforce_looks_at_old(monkeypatch):
    replaced(monkeypatch, "reinforce", lambda t, tis, o: -torch.exp(t.policy - t.old) * t.advantage)


@breakage("loss_grpo__ebed367d seed003_grpo_onpolicy")
def grpo_has_the_other_sign(monkeypatch):
    replaced(monkeypatch, "grpo", lambda t, tis, o: t.advantage * t.policy * tis)


@breakage("trl_sapo")
def sapo_swaps_its_temperatures(monkeypatch):
    def swapped(t, tis, o):
        r = torch.exp(losses.log_ratio(t, o.knob("ratio_log_cap")))
        tau = torch.where(t.advantage > 0, o.knob("sapo_temperature_neg"), o.knob("sapo_temperature_pos"))
        return -torch.sigmoid(tau * (r - 1)) * 4 / tau * t.advantage * tis

    replaced(monkeypatch, "sapo", swapped)


@breakage("advantages seed003_grpo_onpolicy seed003_grpo_offpolicy")
def spread_is_that_of_the_population(monkeypatch):
    group = advantages.group_advantages
    for module in (golden_adapters, losses):
        monkeypatch.setattr(module, "group_advantages", lambda r, **k: group(r, **{**k, "ddof": 0}))


@breakage("logprob_align__517d206d logprob_align__HEAD")
def alignment_is_off_by_one(monkeypatch):
    align = golden_adapters.align_logprobs
    monkeypatch.setattr(golden_adapters, "align_logprobs", lambda *a, **k: np.roll(align(*a, **k), 1))


@breakage("datum_from_tokens_weights")
def weights_are_not_shifted(monkeypatch):
    make = golden_adapters.datum_from_tokens_weights
    monkeypatch.setattr(golden_adapters, "datum_from_tokens_weights", lambda t, w, n: make(t, np.roll(w, 1), n))


@breakage("server_datums__517d206d server_datums__HEAD")
def a_service_is_sent_the_samplers_logprobs(monkeypatch):
    inputs = builtin.builtin_inputs

    def other(datums, o, denominator=None):
        return [
            row | {"logprobs": d.sampler_logprobs.astype(np.float32)}
            for d, row in zip(datums, inputs(datums, o, denominator), strict=True)
        ]

    monkeypatch.setattr(golden_adapters, "builtin_inputs", other)


@breakage("loss_path__517d206d")
def clip_bounds_are_sent_as_widths(monkeypatch):
    monkeypatch.setitem(builtin._SAID, "clip_low_threshold", ("eps_clip", lambda o: o.knob("eps_clip")))


@breakage("sdk_parse_completions")
def an_echo_is_off_by_one(monkeypatch):
    target = openai.target_from_echo
    monkeypatch.setattr(openai, "target_from_echo", lambda *a, **k: np.roll(target(*a, **k), 1))


@breakage("router_replay__517d206d router_replay__HEAD")
def experts_go_to_the_token_they_predict(monkeypatch):
    align = golden_routing.align_routing
    shifted = lambda *a: (found := align(*a)) and ("", *found[:-1])
    monkeypatch.setattr(golden_routing, "align_routing", shifted)


@breakage("async_gate__HEAD async_gate_controller__517d206d async_loop__517d206d async_coordinator__HEAD")
def rows_may_be_a_version_too_old(monkeypatch):
    honest = Gate.staleness_capacity.fget
    monkeypatch.setattr(Gate, "staleness_capacity", property(lambda gate: honest(gate) + gate.batch))


@breakage("async_gate_controller__517d206d async_loop__517d206d async_coordinator__HEAD")
def rejected_rows_keep_their_place(monkeypatch):
    monkeypatch.setattr(Gate, "reject", Gate.accept)


@breakage("async_loop__517d206d async_coordinator__HEAD")
def a_batch_may_be_a_row_short(monkeypatch):
    hand_over = groups.next_batch
    monkeypatch.setattr(groups, "next_batch", lambda p, count, *more: hand_over(p, max(1, count - 1), *more))


def after_landing(monkeypatch, change):
    "Change a producer each time a row came back."
    land = groups.land

    def changed(producer, number, task):
        land(producer, number, task)
        change(producer)

    monkeypatch.setattr(groups, "land", changed)


@breakage("async_loop__517d206d async_coordinator__HEAD")
def rows_count_as_drawn_from_the_newest_weights(monkeypatch):
    def renew(p):
        p.ready = [groups.replace(row, version=p.gate.version) for row in p.ready]

    after_landing(monkeypatch, renew)


@breakage("async_chunks__HEAD")
def smaller_chunks_come_first(monkeypatch):
    cut = golden_rollouts.balanced_chunks
    monkeypatch.setattr(golden_rollouts, "balanced_chunks", lambda total, chunks: cut(total, chunks)[::-1])


@breakage("ppo_minibatches__517d206d")
def the_last_minibatch_takes_the_rest(monkeypatch):
    def floored(count, parts):
        parts = max(1, min(parts, count))
        edges = [*range(0, count, count // parts)][:parts]
        return [slice(a, b) for a, b in zip(edges, [*edges[1:], count], strict=True)]

    monkeypatch.setattr(golden_rollouts, "minibatch_slices", floored)


@breakage("group_assembler")
def small_groups_are_kept(monkeypatch):
    put = golden_rollouts.assemble
    monkeypatch.setattr(golden_rollouts, "assemble", lambda drawn, graded, smallest=1: put(drawn, graded))


@breakage("rollout_to_prompt_group__HEAD")
def segments_are_runs_of_their_own(monkeypatch):
    together = rollouts.gather_draws
    monkeypatch.setattr(rollouts, "gather_draws", lambda *a: replace(together(*a), runs=()))


@breakage("rollout_to_prompt_group__HEAD rollout_to_prompt_group__517d206d rollout_example__517d206d")
def samples_are_not_checked(monkeypatch):
    monkeypatch.setattr(rollouts, "check_drawn", lambda sample, where: None)


@breakage("rollout_example__517d206d")
def a_prompt_is_a_token_longer(monkeypatch):
    length = property(lambda c: c.completion.prompt_len + 1)
    monkeypatch.setattr(open_module.DeploymentCompletion, "prompt_len", length)


@breakage("completion_to_run__HEAD")
def raw_logprobs_are_those_drawn_from(monkeypatch):
    monkeypatch.setattr(chat, "drawn_logprobs", lambda completion: completion.logprobs)


@breakage("combine_prompt_groups")
def groups_are_laid_end_to_end_backwards(monkeypatch):
    lay = golden_rollouts.datums_from_groups
    monkeypatch.setattr(golden_rollouts, "datums_from_groups", lambda groups: lay(groups[::-1]))


@breakage("cursor_dataloader__HEAD")
def a_run_goes_on_a_row_too_late(monkeypatch):
    late = lambda cursor, state: replace(cursor, consumed=state["consumed"] + 1)
    monkeypatch.setattr(golden_rollouts, "restore_cursor", late)


@breakage("step_metrics__517d206d")
def entropy_is_that_of_all_tokens(monkeypatch):
    def pooled(groups, datums):
        series = np.concatenate([s.logprobs for g in groups for s in g.samples])
        return metrics.step_metrics(groups, datums) | {"entropy": float(-np.nanmean(series))}

    monkeypatch.setattr(golden_rollouts, "step_metrics", pooled)


@breakage("sync_collect__HEAD")
def batches_are_not_filled_up(monkeypatch):
    async def never(loop, attempts=10):
        return 0

    monkeypatch.setattr(loop.GRPOLoop, "refill", never)


@pytest.mark.skipif(FOLDER != OWN, reason="other cases may not contain what notices")
@pytest.mark.parametrize("name", BREAKAGES)
@pytest.mark.variant(every=4)
def test_every_breakage_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files, break_it = BREAKAGES[name]
    break_it(monkeypatch)
    for pattern in files.split():
        cases = [case for case in CASES if fnmatch(case.file, pattern)]
        assert cases, f"no cases in {pattern}"
        assert any(fails(case) for case in cases), f"{pattern}: all {len(cases)} cases pass"


def fails(case: Case) -> bool:
    "Whether a case no longer passes."
    try:
        find_adapter(case.file)(case)
    except (AssertionError, RLNotebookError, pytest.fail.Exception):
        return True
    return False
