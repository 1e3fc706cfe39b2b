"""Searches that go on past a commit whose change stays farther from the training than that of BAD."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Repo
from history_kit import note, start

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


@pytest.mark.whole
def test_what_a_merge_brought_in_past_a_passed_commit_is_named_on_its_side(tmp_path: Path) -> None:
    """The side lacks what was passed; the log for git names what is named."""
    repo, commits = history(tmp_path, STATE)
    repo.git("checkout", "--quiet", "-b", "side", commits[0])
    repo.edit("train.py", "- 1).square", "- 2).square")
    side = repo.commit("training")
    repo.git("checkout", "--quiet", "main")
    for k in range(2):
        note(repo, f"note {k}")
    repo.git("merge", "--quiet", "--no-edit", "side")
    log = tmp_path / "log"
    result, passed = searched(repo, [commits[0], "HEAD"], "--export", str(log))
    assert (result["culprit"]["commit"], passed) == (side, [commits[1]])
    assert f"git bisect bad {commits[1]}" not in log.read_text()


@pytest.mark.whole
def test_what_differs_later_before_a_passed_commit_ends_no_search(tmp_path: Path) -> None:
    """A file that one saves at the end is told; the commit that moved the training is the answer."""
    saved = ("    print(", "    step == 3 and torch.save(frozen.state_dict(), 'frozen.pt')\n    print(")
    repo, commits = history(tmp_path, saved, METRIC, HARMLESS, TRAINING)
    result, passed = searched(repo, commits)
    assert result["culprit"]["commit"] == commits[4] and commits[2] in passed


@pytest.mark.whole
def test_skips_behind_a_passed_commit_leave_suspects_and_no_culprit(tmp_path: Path) -> None:
    """What was passed is told as that, and is none of them."""
    broken = ("import torch\n", "import torch, gone\n")
    repo, commits = history(tmp_path, STATE, HARMLESS, broken, TRAINING, broken[::-1])
    done = repo.repro("bisect", f"{commits[0]}..{commits[-1]}", "--json", "--", sys.executable, "train.py")
    result = json.loads(done.stdout)
    assert (done.returncode, result["outcome"], result["culprits"]) == (3, "ambiguous", [])
    assert [each["commit"]["commit"] for each in result["passed"]] == [commits[1]]
    assert set(result["suspects"]) == set(commits[3:])


@pytest.mark.whole
def test_an_error_behind_a_passed_commit_leaves_it_as_the_answer(tmp_path: Path) -> None:
    """With why nothing more is known."""
    in_text = ('print({"loss": loss.item(), "score": model.weight.sum().item()})',
               'print(f"loss {loss.item():.3f} score {model.weight.sum().item():.0f}")')  # fmt: skip
    moved = ("score {model.weight.sum().item():.0f}", "score {model.weight.mean().item():.4f}")
    repo, commits = history(tmp_path, STATE, in_text, HARMLESS, moved)
    log = tmp_path / "log"
    result, passed = searched(repo, commits, "--export", str(log))
    assert (result["culprit"]["commit"], passed, result["explains_bad"]) == (commits[1], [], False)
    good = [line.split()[-1] for line in log.read_text().splitlines() if line.startswith("git bisect good")]
    assert good == [commits[0]], "what was judged beside what was passed is none for git"
    assert any("is not known" in remark for remark in result["remarks"])


def test_one_parameter_more_is_no_change_of_those_that_both_have(tmp_path: Path) -> None:
    """A commit that moved a metric is named where a later one only adds a parameter that nothing reads."""
    more = ("AdamW(model.parameters()", "AdamW([*model.parameters(), torch.nn.Parameter(torch.ones(2))]")
    repo, commits = history(tmp_path, METRIC, more)
    result, passed = searched(repo, commits)
    assert (result["culprit"]["commit"], passed) == (commits[1], [])
