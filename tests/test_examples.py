"The example scripts run as they are."

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_two_files_of_a_rollout_train():
    code = (
        "import dataclasses, train\n"
        "from rl_notebook.recipes.rl_loop import Problem, main\n"
        "cfg = dataclasses.replace(train.cfg, steps=2, prompt_groups_per_step=2)\n"
        "seen = []\n"
        "main(cfg, problem=Problem(train.problem.rows, [], train.problem.reward), on_record=[seen.append])\n"
        "assert len(seen) == 2 and all('tidy' in s.info for r in seen for g in r.groups for s in g.samples)\n"
    )
    folder = ROOT / "examples" / "single_turn"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
