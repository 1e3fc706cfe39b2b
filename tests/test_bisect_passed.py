"""Searches that go on past a commit whose change stays farther from the training than that of BAD."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Repo
from history_kit import start

PROGRAM = """
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
model, frozen = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(4):
    loss = (model(torch.ones(3, 4)) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print({"loss": loss.item(), "score": model.weight.sum().item()})
"""

STATE = (
    "frozen = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)",
    "frozen = torch.nn.Linear(4, 2), torch.nn.Linear(4, 3)",
)
METRIC = ("weight.sum()", "weight.mean()")
TRAINING = ("lr=0.01", "lr=0.02")
HARMLESS = ("range(4)", "range(0, 4)")


def history(folder: Path, *edits: tuple[str, str]) -> tuple[Repo, list[str]]:
    """A repository with a commit for each edit, after the first one; all commits."""
    repo = start(folder, PROGRAM, None)
    commits = [repo.git("rev-parse", "HEAD")]
    for edit in edits:
        repo.edit("train.py", *edit)
        commits.append(repo.commit(edit[1]))
    return repo, commits


def searched(repo: Repo, commits: list[str], *words: str) -> tuple[dict[str, Any], list[str]]:
    """The result, and by number the commits that it passed."""
    range_ = f"{commits[0]}..{commits[-1]}"
    done = repo.repro("bisect", "--no-explain", range_, "--json", *words, "--", sys.executable, "train.py")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    return result, [passed["commit"]["commit"] for passed in result["passed"]]


@pytest.mark.whole
@pytest.mark.parametrize(
    ("edits", "passed"),
    [
        ([STATE, HARMLESS, TRAINING], [1]),
        ([METRIC, TRAINING, HARMLESS], [1]),
        ([STATE, METRIC, TRAINING], [1, 2]),
        ([TRAINING, METRIC, STATE], []),
    ],
)
def test_what_moved_the_training_is_named(tmp_path: Path, edits: list[tuple[str, str]], passed: list[int]) -> None:
    """Commits before it that moved a module beside it, or what it tells, are passed and told."""
    repo, commits = history(tmp_path, *edits)
    result, on_the_way = searched(repo, commits)
    assert result["culprit"]["commit"] == commits[1 + edits.index(TRAINING)]
    assert on_the_way == [commits[number] for number in passed]
    assert result["git_probes"] is None or not passed
    text = repo.repro("bisect", "--no-explain", f"{commits[0]}..{commits[-1]}", "--", sys.executable, "train.py").stdout
    assert all(f"Passed: {commit[:10]}, which moved no trained parameter or gradient" in text for commit in on_the_way)


def test_what_moved_a_number_that_is_told_is_named(tmp_path: Path) -> None:
    """Where BAD trains as GOOD does, who moved a module beside it is passed, and who tells other numbers is named."""
    repo, commits = history(tmp_path, STATE, METRIC)
    result, passed = searched(repo, commits)
    assert (result["culprit"]["commit"], passed) == (commits[2], [commits[1]])
    assert result["explains_bad"] is True


@pytest.mark.whole
def test_nothing_is_passed_where_bad_moved_nothing_nearer(tmp_path: Path) -> None:
    """A module beside the training is sought where nothing else differs; with --quick the first commit counts."""
    repo, commits = history(tmp_path, HARMLESS, STATE)
    result, passed = searched(repo, commits)
    assert (result["culprit"]["commit"], passed) == (commits[2], [])
    repo.edit("train.py", *TRAINING)
    commits.append(repo.commit("training"))
    result, passed = searched(repo, commits, "--quick")
    assert (result["culprit"]["commit"], passed) == (commits[2], [])
