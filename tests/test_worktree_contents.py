"""What git leaves out of a worktree: submodules and LFS content, without hooks, filters or network."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest
from conftest import Repo
from history_kit import TRAIN, note, start

from repro_bisect.worktrees import Worktrees
from repro_golden.checkout import find_checkout
from repro_golden.errors import ReproError

COMMAND = ("--", sys.executable, "train.py", "--steps", "2")


def library(folder: Path, name: str, value: str) -> Repo:
    """A repository that is to be a submodule."""
    repo = Repo(folder / name)
    repo.root.mkdir()
    repo.git("init", "--quiet", "--initial-branch=main")
    (repo.root / "values.py").write_text(f"SCALE = {value}\n")
    repo.commit("Start")
    return repo


def with_submodule(folder: Path) -> tuple[Repo, Repo]:
    """A trainer that takes its scale from a submodule which has a submodule itself; both repositories."""
    inner, outer = library(folder, "inner", "1.0"), library(folder, "outer", "1.0")
    allow = ("-c", "protocol.file.allow=always")
    outer.git(*allow, "submodule", "--quiet", "add", str(inner.root), "deep")
    outer.commit("Take inner in")
    train = TRAIN.replace("import torch\n", "import sys\nimport torch\nsys.path.insert(0, 'outer')\nimport values\n", 1)
    train = train.replace("scale = 1.0\n", "scale = values.SCALE\n")
    repo = start(folder, train.replace("import values\n", "import values\nimport deep.values\n"), None)
    repo.git(*allow, "submodule", "--quiet", "add", str(outer.root), "outer")
    repo.git(*allow, "submodule", "--quiet", "update", "--init", "--recursive")
    repo.commit("Take outer in")
    return repo, outer


def test_a_submodule_that_moved_the_numbers(tmp_path: Path) -> None:
    """A commit that only moves a submodule's commit is found; the submodules' own files and hooks are left alone."""
    repo, outer = with_submodule(tmp_path)
    good = repo.git("rev-parse", "HEAD")
    note(repo, "one", "other")
    inside = repo.root / "outer"
    (outer.root / "values.py").write_text("SCALE = 1.0 + 1e-6\n")
    outer.commit("Scale")
    hook = repo.root / ".git" / "modules" / "outer" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    Repo(inside).git("fetch", "--quiet", str(outer.root), "main")
    Repo(inside).git("checkout", "--quiet", "FETCH_HEAD")
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/hook-ran\n")
    hook.chmod(0o755)
    culprit = repo.commit("Update outer")
    note(repo, "two", "other")
    before = {p: p.read_bytes() for p in (repo.root / ".git" / "modules").rglob("*") if p.is_file()}
    done = repo.repro("bisect", f"{good}..HEAD", "--json", *COMMAND)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["culprit"]["commit"] == culprit, done.stderr
    assert {p: p.read_bytes() for p in (repo.root / ".git" / "modules").rglob("*") if p.is_file()} == before
    assert not (tmp_path / "hook-ran").exists()


def test_a_submodule_that_is_not_here_is_refused(tmp_path: Path) -> None:
    """A clone without its submodules, and a submodule's commit that was never fetched, are refused with the cure."""
    repo, outer = with_submodule(tmp_path)
    clone = Repo(tmp_path / "clone")
    repo.git("clone", "--quiet", "--no-recurse-submodules", str(repo.root), str(clone.root))
    note(clone, "one", "other")
    done = clone.repro("bisect", "HEAD~1..HEAD", *COMMAND)
    assert done.returncode == 2
    assert "git submodule update --init --recursive" in done.stderr.splitlines()[-1]
    (outer.root / "values.py").write_text("SCALE = 2.0\n")
    unknown = outer.commit("Never fetched")
    repo.git("update-index", "--cacheinfo", f"160000,{unknown},outer")
    repo.git("commit", "--quiet", "--message", "Update outer")
    done = repo.repro("bisect", "HEAD~1..HEAD", *COMMAND)
    assert done.returncode == 2
    assert f"commit {unknown[:10]} of the submodule outer is not here" in done.stderr.splitlines()[-1]


def lfs(repo: Repo, content: bytes, *, here: bool = True) -> None:
    """Write a file as Git LFS keeps it: a pointer in git, and the content in its own store if it is here."""
    oid = hashlib.sha256(content).hexdigest()
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {len(content)}\n"
    (repo.root / "data.bin").write_text(pointer)
    (repo.root / ".gitattributes").write_text("*.bin filter=lfs diff=lfs merge=lfs -text\n")
    if here:
        store = repo.root / ".git" / "lfs" / "objects" / oid[:2] / oid[2:4]
        store.mkdir(parents=True, exist_ok=True)
        (store / oid).write_bytes(content)


def test_lfs_content_is_put_in_its_place(tmp_path: Path) -> None:
    """A worktree has the content of each commit's LFS files; what was never fetched is refused with the cure."""
    repo = start(tmp_path, case=None)
    lfs(repo, b"first" * 1000)
    first = repo.commit("First")
    lfs(repo, b"second" * 1000)
    second = repo.commit("Second")
    lfs(repo, b"third", here=False)
    third = repo.commit("Third")
    worktrees = Worktrees(find_checkout(repo.root))
    try:
        for commit, content in ((first, b"first" * 1000), (second, b"second" * 1000)):
            with worktrees.at(commit, None) as place:
                assert (place.root / "data.bin").read_bytes() == content
        with pytest.raises(ReproError, match="git lfs fetch --all"), worktrees.at(third, None):
            pass
    finally:
        worktrees.close()
    assert not list((repo.root / ".git" / "repro" / "worktrees").glob("*"))
