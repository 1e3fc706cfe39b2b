"""What pins packages, moves in a range and is installed by nothing is told of, where it may be what decides."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from conftest import Repo
from history_kit import note, start

from repro_bisect.driver.circumstances import NOT_FOUND, not_installed
from repro_golden.case.file import Case
from repro_golden.repository.git import Git

PROJECT = '[project]\nname = "a"\nversion = "{}"\ndependencies = ["depx=={}"]\n'
LOCK = '[[package]]\nname = "depx"\nversion = "{}"\n\n[[package]]\nname = "depy"\nversion = "{}"\n'


def command(setup: str = "") -> Case:
    """A case of a command."""
    subject = {"kind": "command", "command": "true", **({"setup": setup} if setup else {})}
    return Case.model_validate({"case": {"name": "toy", "steps": 2}, "subject": subject})


@pytest.mark.parametrize(
    ("name", "before", "after", "told"),
    [
        ("requirements.txt", "depx==1.0\n", "depx==1.1\n", "`--package depx==1.0..1.1`"),
        ("ci/requirements-dev.txt", "depx==1.0\n", "depx==1.0\ndepy==2\n", "ci/requirements-dev.txt differs"),
        ("requirements.txt", "depx==1.0\n", "", "requirements.txt differs"),
        ("uv.lock", LOCK.format(1, 2), LOCK.format(1, 3), "`--package depy==2..3`"),
        ("poetry.lock", LOCK.format(1, 2), LOCK.format(2, 3), "poetry.lock differs between the ends"),
        ("environment.yml", "dependencies: [depx=1]", "dependencies: [depx=2]", "environment.yml differs"),
        ("pyproject.toml", PROJECT.format(1, 1), PROJECT.format(1, 2), "pyproject.toml differs"),
        ("pyproject.toml", PROJECT.format(1, 1), PROJECT.format(2, 1), ""),
        ("docs/requirements.txt", "depx==1.0\n", "depx==1.1\n", ""),
        ("train.py", "depx==1.0\n", "depx==1.1\n", ""),
    ],
)
def test_what_moves_and_is_not_installed(tmp_path: Path, name: str, before: str, after: str, told: str) -> None:
    """Lock files and a project's dependencies count, with the release to search where one moved."""
    repo = Repo(tmp_path / "repo")
    (repo.root / name).parent.mkdir(parents=True)
    repo.git("init", "--quiet", "--initial-branch=main")
    (repo.root / name).write_text(before)
    good = repo.commit("Good")
    (repo.root / name).write_text(after)
    bad = repo.commit("Bad")
    text = not_installed(command(), Git(repo.root), good, bad)
    assert told in text and bool(told) == bool(text) and "\n" not in text
    assert ("--package" in text) == ("--package" in told)
    assert not_installed(command(setup="pip install -r requirements.txt"), Git(repo.root), good, bad) == ""


def test_what_says_that_a_package_is_not_there() -> None:
    """Python's words for a module that is not there, or has less in it."""
    for message in ("ModuleNotFoundError: No module named 'depx'", "ImportError: cannot import name 'a' from 'depx'"):
        assert NOT_FOUND.search(message)
    assert not NOT_FOUND.search("RuntimeError: the shapes do not agree")


@pytest.mark.whole
def test_an_agreement_tells_what_was_not_installed(tmp_path: Path) -> None:
    """Ends that agree while requirements.txt moves agree with a remark."""
    repo = start(tmp_path, case=None)
    note(repo, "one")
    (repo.root / "requirements.txt").write_text("depx==1.0\n")
    repo.commit("Pin")
    (repo.root / "requirements.txt").write_text("depx==1.1\n")
    repo.commit("Move")
    program = ("--", sys.executable, "train.py", "--steps", "2")
    result = json.loads(repo.repro("bisect", "HEAD~1..HEAD", "--json", *program).stdout)
    assert result["outcome"] == "agree" and "requirements.txt differs between the ends" in result["remarks"][0]
