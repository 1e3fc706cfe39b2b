"""Somebody else's trainer, guarded as docs/how-to/guard-your-trainer.md says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import Repo

CASE = """\
[case]
name = "bandit"
steps = 6
rollouts = "golden/rollouts/bandit"

[subject]
module = "training.interface"
path = "."

[subject.config]
arms = 4
seed = 3

[first_step]
check = false
"""


@pytest.mark.whole
def test_a_foreign_trainer_is_recorded_verified_and_bisected(tmp_path: Path) -> None:
    """A trainer that shares no code with ours gets a golden run, and the commit that moved its numbers is named."""
    repo = Repo(tmp_path / "fork")
    (repo.root / "training").mkdir(parents=True)
    shutil.copy(Path(__file__).parent / "interface_example.py", repo.root / "training" / "interface.py")
    (repo.root / "golden" / "cases").mkdir(parents=True)
    (repo.root / "golden" / "cases" / "bandit.toml").write_text(CASE)
    (repo.root / ".gitignore").write_text("__pycache__/\n")
    repo.git("init", "--quiet")
    assert repo.repro("init", "--remote", str(tmp_path / "remote")).returncode == 0
    repo.commit("Start")
    done = repo.repro("golden", "record")
    assert done.returncode == 0, done.stdout + done.stderr
    good = repo.commit("Record")
    assert repo.repro("golden", "verify").returncode == 0
    repo.edit("training/interface.py", '"""One REINFORCE update."""', '"""One update by REINFORCE."""')
    repo.commit("Say it better")
    repo.edit("training/interface.py", "lr=0.5", "lr=0.5, weight_decay=1e-6")
    culprit = repo.commit("Regularise")
    repo.edit("training/interface.py", '"""The interface."""', '"""The one interface."""')
    repo.commit("Say that better too")
    found = repo.repro("bisect", "--no-explain", f"{good}..HEAD", "--json")
    result = json.loads(found.stdout)
    assert (found.returncode, result["culprit"]["commit"]) == (0, culprit), found.stderr
    assert (result["divergence"]["step"], result["divergence"]["phase"]) == (0, "update")
