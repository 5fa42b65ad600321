"Completions of held-out rows in a run folder: before, after, and when the run goes back."

import asyncio
from dataclasses import replace

import numpy as np
import pytest

import rl_notebook as rln
from rl_notebook.core.types import PromptGroup, RecordError, RolloutSample
from rl_notebook.recipes.rl_loop import train
from rl_notebook.runs.held_out import HeldOut, read_completions, write_held_out

CFG = rln.Config(
    prompt_groups_per_step=2,
    completions_per_prompt=4,
    max_completion_tokens=16,
    max_seq_len=96,
    eval_rows=5,
    eval_samples=2,
    steps=2,
)


def trained(cfg):
    return asyncio.run(train(cfg, backend=rln.open_local("tiny")))


@pytest.mark.parametrize("every", [0, 2])  # measured after training, or at the end of the last step
def test_completions_are_kept_before_and_after(tmp_path, every):
    cfg = replace(CFG, log_path=str(tmp_path / "run"), eval_interval=every)
    result = trained(cfg)
    run = rln.Run.open(cfg.log_path)
    held_out = run.held_out()
    assert sorted(held_out.completions) == [0, 2]
    assert [len(table) for table in held_out.completions.values()] == [10, 10]
    means = held_out.means()
    assert means.loc["reward", "before"] == pytest.approx(result.reward_before)
    assert means.loc["reward", "after"] == pytest.approx(result.reward_after)
    assert {*means.index} >= {"rewards/toy_reward"}
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Held-out rows" in page
    assert held_out.pairs()[0][0] in page


def test_going_back_puts_later_completions_aside(tmp_path):
    cfg = replace(CFG, log_path=str(tmp_path / "run"))
    trained(cfg)
    run = rln.RunFolder.resume(cfg.log_path, cfg)
    away = run.rewind(1)
    assert sorted(run.held_out().completions) == [0]
    assert (away / "held_out" / "00002.jsonl").exists()


def test_damaged_completions_are_named(tmp_path):
    cfg = replace(CFG, log_path=str(tmp_path / "run"), steps=1)
    trained(cfg)
    (tmp_path / "run" / "held_out" / "00000.jsonl").write_text('{"row": 3')
    with pytest.raises(
        RecordError,
        match=r"00000\.jsonl: not readable: got .*expected JSON Lines with row, sample",
    ):
        rln.Run.open(cfg.log_path).held_out()


def test_what_was_written_is_read(tmp_path):
    "Digits stay text, a prompt of token ids has none, and a reward may be missing."
    sample = RolloutSample([1, 2], [np.nan, -0.1], [0, 1], None, text="007", rewards={"late_at": 1})
    groups = [
        PromptGroup((sample,), {"prompt_tokens": [1]}, "12"),
        PromptGroup((replace(sample, reward=0.5),), {"question": "42"}, "13"),
    ]
    path = write_held_out(tmp_path, 0, groups)
    table = read_completions(path)
    assert table["row"].tolist() == ["12", "13"]
    assert table["text"].tolist() == ["007"] * 2
    assert table["prompt"].tolist() == ["", "42"]
    assert table["rewards/late_at"].tolist() == [1, 1]
    held_out = HeldOut({0: table, 3: table})
    assert held_out.means().loc["reward", "before"] == 0.5
    assert held_out.pairs() == [["", "nan: 007", "nan: 007"], ["42", "0.5: 007", "0.5: 007"]]


def test_rows_without_any_reward_are_no_error(tmp_path):
    sample = RolloutSample([1, 2], [np.nan, -0.1], [0, 1], None, text="x")
    table = read_completions(write_held_out(tmp_path, 0, [PromptGroup((sample,), {}, "0")]))
    held_out = HeldOut({0: table, 3: table})
    assert held_out.means().empty
    assert "1 held-out rows" in repr(held_out)
    assert "nan: x" in held_out._repr_html_()
