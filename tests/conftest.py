"What every test may rely on: no network, offline hubs, and hypothesis without a stopwatch."

import ctypes
import gc
import os
import sys
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings
from offline import heartbeats, stay_here

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", WANDB_SILENT="true")
NOTES = tempfile.TemporaryDirectory(prefix="rl-notebook-state-")  # of the runs that tests begin
os.environ["XDG_STATE_HOME"] = NOTES.name
os.environ["TINKER_TELEMETRY"] = "0"  # else the SDKs report, at the end, to services that are gone

# A shared machine is sometimes slow; that is not what property tests are about. The examples are the same on every run,
# so that what passed passes again; SLOW=1 draws new ones.
SLOW = os.environ.get("SLOW", "")  # "variants": also those of `LONG`; "1": also what rarely says anything new
settings.register_profile("house", deadline=None, print_blob=True, derandomize=SLOW != "1")
settings.load_profile("house")

stay_here()

# Collecting imports a million objects that stay: looking through them for garbage, again and again, takes a third of
# the time that collecting takes. So that begins with the first test, and leaves out what was there before it.
gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    "From here on garbage is looked for, in what the tests make."
    gc.freeze()
    gc.enable()


# A run in the background, or under nohup, ignores Ctrl-C, and so would the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

PERSONAL = ("FIREWORKS_", "TINKER_", "OPENAI_", "WANDB_API_KEY", "HF_TOKEN", "RL_NOTEBOOK_EMULATOR_KEY")


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    "No test sees the keys of whoever runs it, nor the servers they are for."
    for name in [name for name in os.environ if name.startswith(PERSONAL) and name != "TINKER_TELEMETRY"]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True, scope="module")
def _no_client_outlives_its_file() -> Iterator[None]:
    "A client that a test opened by hand falls silent when its file is done: its service is gone by then."
    yield
    if {"tinker", "fireworks.training.sdk"} & set(sys.modules):
        for task in heartbeats():
            task.get_loop().call_soon_threadsafe(task.cancel)


@pytest.fixture(autouse=True, scope="module")
def _no_memory_outlives_its_file() -> Iterator[None]:
    "Models are in cycles, and what is freed in many threads is not given back by itself: workers grew to gigabytes."
    yield
    gc.collect()
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)


# --- several workers ---------------------------------------------------------------------------------------------

# `pytest --numprocesses`. Tests of a file share fixtures and stay on one worker, and so do all browser tests; but each
# part of a long table is on its own. What takes longest comes first, then the tables, so that many short files are left
# for the end and the workers end together.
LONGEST = ("browser/", "test_time_travel", "test_fireworks.py", "test_backend_contract", "test_emulator.py", "test_cli")
LONGEST += ("test_async_loop", "test_doctor", "test_loop", "test_local_backend", "test_tinker", "test_resume")
LONGEST += ("test_xray", "test_openai", "test_dashboard.py", "test_whatif.py", "test_charts", "test_bad_views", "zoo/")
LONGEST += ("test_script", "test_new")
# Whole programs, kills, services, browsers and long tables: part of a node id, and the variant that is always run.
LONG = {
    "browser/test_hostile": "", "browser/test_beside": "", "test_nothing_is_cut_off": "",
    "test_service_faults": "",
    "test_a_page_that_is_executed": "",
    "test_train_with_defaults_runs": "", "has_read_enough_ends_it_quietly": "check", "import_of_the_documents": "",
    "test_kill_9_anywhere": "full]", "test_kill_9_at": "", "test_kill_9_again": "", "an_uninterrupted_run_repeats": "",
    "test_an_interrupt_stops_after_the_phase_saves": "full-backward", "test_a_second_interrupt_ends": "",
    "test_resume_from_begins_another": "", "test_seek_comes_to_the_weights": "plain-0",
    "test_two_branches_give_what": "lora", "test_windows_of_two_branches": "", "test_windows_are_replayed": "",
    "test_branches_of_branches_by_hand": "", "test_a_branch_keeps_the_batch": "", "run_in_windows_is_sought": "",
    "test_what_cannot_be_computed_again": "", "test_every_step_is_replayed": "plain",
    "test_a_step_is_replayed_as_far": "chunks-rollouts", "test_on_policy_and_synchronous_is": "a reference-straight",
    "test_a_rollout_that_raises_ends_the_wait": "plain-2", "test_a_trainer_that_fails_once": "optim_step-1",
    "in_one_record_whatever_the_order": "0-0", "test_several_updates_with_every_loss": "AsyncGRPOLoop-grpo",
    "test_undo_and_the_same_batch": "0-backward", "test_the_first_phase_that_differs": "a reward",
    "test_a_phase_that_fails_leaves": "optimize", "test_two_steps_are_taken_back": "",
    "updates_that_failed_are_gone_on_with": "optim_step-[2]", "fireworks-lora]": "",
    "normalizations_divide_once": "local]", "outlives_its_client_and_is_dropped": "tinker",
    "test_tinker.py::test_no_heartbeat_outlives": "served",
    "test_a_state_loads_in_a_fresh_process": "", "test_checks_leave_no_adapter": "", "wrong_services_are_found": "",
    "test_without_the_web_framework": "",
    "test_what_clients_ask_for": "", "test_the_sdk_trains_once": "drop_before", "test_every_ending_but_kill": "",
    "test_provision_by_hand": "", "test_off_policy": "", "test_fireworks_examples.py::test_recipe": "",
    "test_a_real_full_disk": "", "test_a_disk_that_fills_up": "", "test_a_reward_that_fails_late": "",
    "test_overlap_writes": "", "test_overlap_trains": "", "test_no_schedule_is_faster": "1-2",
    "test_doctor.py::test_one_group_and_many": "1]", "test_records[512": "",
    "test_the_loop_with_a_loss_of_the_service": "given0",
    "test_what_failed_is_asked_again": "False-garbage", "test_a_cancelled_step_or_undo": "sync",
    "test_so_it_does_on_a_service": "", "test_what_goes_wrong_is_named_within": "rate-21",
    "test_a_healthy_run_gives_no_alarm": "", "test_a_live_chart_takes": "",
    "test_a_builtin_loss_trains_like": "tinker", "test_a_service_that_forgets_everything": "",
    "test_every_combination_gives_an_answer": "", "test_a_page_of_very_many_steps": "",
    "test_faults_around_a_loss_of_the_service": "", "test_the_tool_example_warms_up": "",
    "test_the_right_cause_and_no_false_alarm": "", "test_no_more_samples_are_under_way": "4",
    "sorted_searched_and_have_an_address": "1280-light", "test_no_sentence_claims_what_is_not_so": "0.2",
    "test_how_a_step_is_cut_does_not": "max_samples-token", "test_chunks_give_the_gradient_of_one_pass": "token_mean",
    "in_turn_each_train_every_row_once": "batch-0", "takes_effect_after_the_phase_and_the_loop_goes": "backward",
    "test_a_branch_gives_what_it_gives_alone": "start", "test_a_filter_that_raises_is_an_error": "1",
    "every_row_is_trained_once_whatever_happens": "ahead 1", "test_every_row_is_in_one_record[": "0",
    "test_an_update_that_would_leave_the_numbers": "bad1", "test_a_damaged_file_is_measured_again": "{",
    "test_a_script_trains_here": "multi", "test_without_a_package_of_the_extra": "uvicorn",
    "test_live_first_and_still_after": "", "test_a_tutorial_runs_through_the_menu": "",
    "test_fireworks_examples.py::test_step_by_step": "", "test_the_command_ends_when_it_is_told": "",
    "test_keys.py::test_a_run_with_everything_said_aloud": "", "whose_kernel_is_gone_says_so": "",
    "test_a_greedy_step_can_be_undone": "loss", "test_xray_is_the_function_in_whatever_order": "rln",
    "test_a_deployment_that_was_restarted_gets": "0-True", "test_old_weights_are_never_called_a_shift": "3",
    "test_a_rollout_factory_an_evaluation": "", "test_a_module_of_another_folder": "",
    "test_new.py::test_it_trains": "", "test_its_notebook_runs_and_says": "",
    "test_its_test_and_notebook_survive": "",
    "test_a_step_of_the_backend_stays_on_its_device": "{'prompt_logprobs'", "test_what_was_learned_stays": "later",
    "an_address_that_is_not_on_the_page": "step=3", "an_address_opens_the_page_at_its_token": "400-light",
    "test_the_gpu_script_can_be_tried": "", "test_a_decode_step_waits_only_where": "None-fast",
    "test_a_loop_that_was_handed_over_waits": "2", "local-inline]": "", "local-small-batches]": "",
}  # fmt: skip
# Long tables of which every fourth row is always run.
SAMPLED = ("test_bad_views.py::test_records", "test_bad_views.py::test_folders", "test_every_breakage_is_noticed")
APART = ("test_the_right_cause_and_no_false_alarm", "test_so_it_does_at_every_await")


def unit(nodeid: str) -> str:
    "What a test is handed to a worker with."
    path, _, name = nodeid.partition("::")
    if name.startswith(APART):
        return nodeid
    return "browser" if "/browser/" in path else path


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    "Longest first, then tables; without workers, the order stays. Slow ones only when asked for."
    seen = Counter()
    for item in items:
        table = next((name for name in SAMPLED if name in item.nodeid), None)
        seen[table] += 1
        variant = (name in item.nodeid and not (kept and f"[{kept}" in item.nodeid) for name, kept in LONG.items())
        further = seen[table] % 4 if table else any(variant)
        if further and SLOW not in ("1", "variants"):
            item.add_marker(pytest.mark.skip(reason="a further variant: runs with SLOW=variants"))
        if item.get_closest_marker("slow") and SLOW != "1":
            item.add_marker(pytest.mark.skip(reason="slow: runs with SLOW=1"))
    if hasattr(config, "workerinput"):
        place = lambda nodeid: next((i for i, name in enumerate(LONGEST) if name in nodeid), len(LONGEST) + 1)
        items.sort(key=lambda item: len(LONGEST) if item.name.startswith(APART) else place(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    "Hands out units in the order in which they were collected."
    from xdist.scheduler import LoadScopeScheduling

    class ByUnit(LoadScopeScheduling):
        _split_scope = staticmethod(unit)

    config.option.loadscopereorder = False
    return ByUnit(config, log)


# --- what a run has to say ---------------------------------------------------------------------------------------

SAID = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def say(pytestconfig: pytest.Config) -> Callable[[str], None]:
    "Prints a text at the end of the run. A worker of pytest-xdist has no terminal; what it says is handed on."
    return pytestconfig.stash.setdefault(SAID, []).append


def pytest_sessionfinish(session: pytest.Session) -> None:
    "A worker hands over what it has to say."
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["said"] = session.config.stash.get(SAID, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    "And it is kept for the end of the run."
    node.config.stash.setdefault(SAID, []).extend(getattr(node, "workeroutput", {}).get("said", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    "Texts of all workers."
    for text in config.stash.get(SAID, []):
        terminalreporter.write_line(f"\n{text}")
