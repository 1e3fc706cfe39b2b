"""Merges between two branches of which one lacks what GOOD has: what a merge only brings along is not its doing."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import Repo

TRAIN = """\
import torch
from inputs import inputs
from late import late
from rate import RATE
torch.set_num_threads(1)
torch.manual_seed(0)
net = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(net.parameters(), lr=RATE, foreach=False)
x, y = torch.randn(8, 4), torch.randn(8, 3)
for step in range(4):
    loss = late(((net(inputs(x)) - y) ** 2).mean(), step)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
FILES = {
    "train.py": TRAIN,
    "inputs.py": "def inputs(x):\n    return x\n",
    "late.py": "def late(loss, step):\n    return loss\n",
    "rate.py": "RATE = 0.1\n",
    "notes.txt": "",
}
LARGER = {"inputs.py": "def inputs(x):\n    return x * 1.5\n"}
LATE = {"late.py": "def late(loss, step):\n    return loss * 1.001 if step >= 2 else loss\n"}
HARMLESS = {"late.py": "def late(loss, step):\n    return loss  # as it is\n"}
COMMAND = ("--", "python", "train.py")


def commit(repo: Repo, files: Mapping[str, str], subject: str) -> str:
    """A commit of some files."""
    for name, text in files.items():
        (repo.root / name).write_text(text)
    return repo.commit(subject)


def merge(repo: Repo, branch: str, files: Mapping[str, str] | None = None) -> str:
    """A merge of a branch into the current one, with files of its own."""
    repo.git("merge", "--quiet", "--no-ff", "--no-commit", branch)
    return commit(repo, files or {}, f"Merge {branch}")


@pytest.fixture
def branches(tmp_path: Path) -> Repo:
    """A trainer, a branch `feature` beside `main`; main is checked out."""
    repo = Repo(tmp_path / "repo")
    repo.root.mkdir()
    repo.git("init", "--quiet", "--initial-branch", "main")
    commit(repo, FILES, "A trainer")
    repo.git("branch", "feature")
    return repo


def found(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What a command says as JSON."""
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.whole
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_merge_is_compared_with_the_side_that_holds_good(branches: Repo, jobs: str) -> None:
    """A merge that moves a late step itself is named by that, and not by what main, which is GOOD, had before.

    The first parent is the branch, which lacks GOOD's change. Probes made ahead lie on that branch.
    """
    commit(branches, LARGER, "Larger inputs")
    branches.git("checkout", "--quiet", "feature")
    commit(branches, HARMLESS, "A comment")
    merged = merge(branches, "main", LATE)
    result = found(branches.repro("bisect", "-j", jobs, "main..feature", "--json", *COMMAND))
    assert result["culprit"]["commit"] == merged
    assert result["divergence"]["step"] == 2
    assert "late.py" in json.dumps(result["culprits"][0]["explanation"])


@pytest.mark.whole
def test_a_merge_that_brings_goods_own_change_is_no_culprit(branches: Repo) -> None:
    """The branch lacks what main has; of the two that differ from what they follow the branch's commit alone is one."""
    commit(branches, LARGER, "Larger inputs")
    commit(branches, {"notes.txt": "x"}, "Notes")
    branches.git("checkout", "--quiet", "feature")
    culprit = commit(branches, {"rate.py": "RATE = 0.2\n"}, "A larger rate")
    for into, other in (("main", "feature"), ("feature", "main")):
        branches.git("checkout", "--quiet", "-B", f"merged-into-{into}", into)
        merge(branches, other)
        line = ("bisect", f"main..merged-into-{into}", "--all", "--no-explain", "--json", *COMMAND)
        result = found(branches.repro(*line))
        assert [each["commit"]["commit"] for each in result["culprits"]] == [culprit], into


@pytest.mark.whole
def test_several_merge_bases_are_told(branches: Repo) -> None:
    """Where each branch was merged into the other, a pull request is told what it was not compared with."""
    larger = commit(branches, LARGER, "Larger inputs")
    branches.git("checkout", "--quiet", "feature")
    rate = commit(branches, {"rate.py": "RATE = 0.2\n"}, "A larger rate")
    merge(branches, larger)
    branches.git("checkout", "--quiet", "main")
    merge(branches, rate)
    branches.git("checkout", "--quiet", "feature")
    commit(branches, {"notes.txt": "x"}, "Notes")
    done = branches.repro("report", "pr", "main..feature", *COMMAND)
    told = done.stdout + done.stderr
    assert "were merged into each other" in told and (larger[:10] in told or rate[:10] in told), told
