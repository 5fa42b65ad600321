"Completions of held-out rows in a run folder: before, after, and when the run goes back."

import asyncio
from dataclasses import replace

import pytest

import rl_notebook as rln
from rl_notebook.core.types import RecordError
from rl_notebook.recipes.rl_loop import train

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
        match=r"00000\.jsonl: held-out completions: got .*expected JSON Lines with row, sample",
    ):
        rln.Run.open(cfg.log_path).held_out()
