"""Where worktrees lie: below no checkout, and apart from those of other machines."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import Repo
from history_kit import start

from repro_golden.repository.checkout import find_checkout
from repro_golden.repository.worktrees import Worktrees, folder_for

UPWARDS = """\
import os, sys
from pathlib import Path
above = [folder / "limit" for folder in Path(os.environ["PWD"], "judge.py").parents]
found = [path for path in above if path.is_file()]
sys.exit(bool(found) and int(Path("value").read_text()) >= int(found[0].read_text()))
"""


def test_what_lies_above_a_worktree_is_not_the_checkout(tmp_path: Path) -> None:
    """A program that looks for its settings in the folders above it finds its commit's or none, and never today's."""
    repo = Repo(tmp_path / "repo")
    repo.root.mkdir()
    repo.git("init", "--quiet", "--initial-branch=main")
    (repo.root / "judge.py").write_text(UPWARDS)
    commits = []
    for n in range(5):
        (repo.root / "value").write_text(f"{n}")
        if n == 3:
            (repo.root / "limit").write_text("1")
        commits.append(repo.commit(f"value {n}"))
    ends = "--no-explain", "--json", "--when", "exit", "HEAD~4..HEAD"
    done = repo.repro("bisect", *ends, "--", sys.executable, "judge.py")
    assert json.loads(done.stdout)["culprit"]["commit"] == commits[3], done.stderr
    assert not repo.worktrees


def test_where_worktrees_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the user's cache, or in a folder of ours for what is temporary where that lies in a checkout or is not ours.

    Where nothing serves, beside the rest of our state. Two repositories have two folders.
    """
    repo, other = Repo(tmp_path / "repo"), Repo(tmp_path / "more" / "repo")
    for each in (repo, other):
        each.root.mkdir(parents=True)
        each.git("init", "--quiet")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("HOME", str(repo.root / "home"))
    for cache, above in (
        (tmp_path / "cache", tmp_path / "cache"), (repo.root / "cache", temporary), (Path("cache"), temporary),
    ):  # fmt: skip
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        first, second = (folder_for(find_checkout(each.root)) for each in (repo, other))
        assert first.is_relative_to(above) and second.parent == first.parent and second != first
    temporary.rename(repo.root / "tmp")
    monkeypatch.setattr(tempfile, "tempdir", str(repo.root / "tmp"))
    assert folder_for(find_checkout(repo.root)) == repo.root / ".git" / "repro" / "worktrees"


def test_a_checkout_whose_name_is_as_long_as_a_name_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worktrees have a folder, and another one than those of its neighbour."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    repos = [Repo(tmp_path / ("n" * 254 + end)) for end in "ab"]
    for repo in repos:
        repo.root.mkdir()
        repo.git("init", "--quiet")
    folders = [folder_for(find_checkout(repo.root)) for repo in repos]
    for folder in folders:
        folder.mkdir(parents=True)


@pytest.mark.parametrize("name", ["pär", "my-repo.v2", ".git2", "-x", "a b", "a:b", "modules", "x" * 255])
def test_what_a_worktree_is_called(tmp_path: Path, name: str) -> None:
    """As the repository's folder, in each of its working trees, where that may be a package; nothing lies beside it."""
    repo = Repo(tmp_path / name)
    repo.root.mkdir()
    repo.git("init", "--quiet")
    commit = repo.commit("Start")
    repo.git("worktree", "add", "--quiet", "--detach", str(tmp_path / "linked"))
    for root in (repo.root, tmp_path / "linked"):
        with contextlib.closing(Worktrees(find_checkout(root))) as made, made.at(commit, None) as place:
            assert place.root.name == ("tree" if name in (".git2", "-x", "a b", "a:b") else name)
            assert [path.name for path in place.root.parent.iterdir()] == [place.root.name]


def test_a_repository_that_is_the_package(tmp_path: Path) -> None:
    """A program that imports the checkout's folder by its name, from the folder above it, is run in each worktree."""
    repo = Repo(tmp_path / "par")
    repo.root.mkdir()
    repo.git("init", "--quiet", "--initial-branch=main")
    (repo.root / "judge.py").write_text("from par.value import VALUE\nraise SystemExit(VALUE > 1)\n")
    commits = []
    for n in range(4):
        (repo.root / "value.py").write_text(f"VALUE = {n}\n")
        commits.append(repo.commit(f"value {n}"))
    command = "sh", "-c", f"cd .. && {sys.executable} -m par.judge"
    done = repo.repro("bisect", "HEAD~3..HEAD", "--no-explain", "--json", "--when", "exit", "--", *command)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["culprit"]["commit"] == commits[2]


def test_what_another_machine_has_is_not_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two with equal paths and disks of their own leave each other's worktrees of a shared repository alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    repo = start(tmp_path, case=None)
    mine = Worktrees(find_checkout(repo.root))
    with mine.at(repo.git("rev-parse", "HEAD"), None) as place:
        (tmp_path / "cache").rename(tmp_path / "elsewhere")
        Worktrees(find_checkout(repo.root)).close()
        shutil.rmtree(tmp_path / "cache")
        (tmp_path / "elsewhere").rename(tmp_path / "cache")
        assert Repo(place.root).git("status", "--porcelain") == ""
    mine.close()
    assert not repo.worktrees
