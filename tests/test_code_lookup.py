"""Keys of the code of many commits are made together."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Repo
from history_kit import note

from repro_golden.repository.checkout import find_checkout
from repro_golden.repository.code_key import code_keys


def test_many_commits_are_looked_up_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of git's processes does not grow with the number of commits."""
    repo = Repo(tmp_path / "repo")
    repo.root.mkdir()
    repo.git("init", "--quiet", "--initial-branch=main")
    commits = [note(repo, str(number), "core/train.py") for number in range(12)]
    git = find_checkout(repo.root).git

    def processes(commits: list[str]) -> int:
        trace = tmp_path / f"trace-{len(commits)}"
        monkeypatch.setenv("GIT_TRACE2_EVENT", str(trace))
        keys = code_keys(git, commits, [".", "core"])
        monkeypatch.delenv("GIT_TRACE2_EVENT")
        assert len({keys.of(commit) for commit in commits}) == len(commits)
        return trace.read_text().count('"event":"start"')

    assert processes(commits) == processes(commits[:2]) == 3
