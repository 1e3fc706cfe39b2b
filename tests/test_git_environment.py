"""repro as git itself starts it: from a hook, an alias or `git rebase --exec`, which say where the repository is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import warm_kit
from conftest import Repo, environment
from history_kit import start

COMMAND = ("--", sys.executable, "-c", "import sys; sys.exit(int(open('code').read()))")


def with_culprit(folder: Path) -> tuple[Repo, str, str]:
    """A repository with something staged; the range to search, and its culprit."""
    repo = start(folder, case=None)
    commits = []
    for number, code in enumerate((0, 0, 3, 3)):
        (repo.root / "code").write_text(f"{code}\n")
        (repo.root / "number").write_text(f"{number}\n")
        commits.append(repo.commit(f"Number {number}"))
    stage(repo)
    return repo, f"{commits[0]}..{commits[-1]}", commits[2]


def stage(repo: Repo) -> None:
    """Change the index of a working tree, and its files further."""
    (repo.root / "code").write_text("7\n")
    (repo.root / "new").write_text("staged\n")
    repo.git("add", "--all")
    (repo.root / "code").write_text("8\n")


def git_folder(repo: Repo) -> Path:
    return Path(repo.git("rev-parse", "--absolute-git-dir"))


def started(root: Path, variables: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return warm_kit.run([sys.executable, "-m", "repro", *arguments], root, environment() | variables, timeout=100)


def finds(repo: Repo, variables: dict[str, str], spec: str, culprit: str) -> None:
    """The culprit is found, and neither the index nor the files nor HEAD change."""
    before = ((git_folder(repo) / "index").read_bytes(), (git_folder(repo) / "HEAD").read_bytes())
    done = started(repo.root, variables, "bisect", "--quick", spec, "--when", "exit", "--json", "-j", "1", *COMMAND)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["culprit"]["commit"] == culprit
    assert ((git_folder(repo) / "index").read_bytes(), (git_folder(repo) / "HEAD").read_bytes()) == before
    assert (repo.root / "code").read_text() == "8\n"


def test_the_variables_of_a_hook(tmp_path: Path) -> None:
    """With GIT_DIR and GIT_INDEX_FILE of a hook, what is staged stays and the culprit is found."""
    repo, spec, culprit = with_culprit(tmp_path)
    finds(repo, {"GIT_DIR": ".git", "GIT_INDEX_FILE": ".git/index", "GIT_PREFIX": ""}, spec, culprit)


def test_the_variables_of_a_hook_in_a_linked_worktree(tmp_path: Path) -> None:
    """The same where GIT_DIR is a worktree's own folder."""
    repo, spec, culprit = with_culprit(tmp_path)
    linked = Repo(repo.root / "linked")
    repo.git("worktree", "add", "--quiet", "--detach", str(linked.root))
    stage(linked)
    folder = git_folder(linked)
    assert folder == repo.root / ".git" / "worktrees" / "linked"
    variables = {"GIT_DIR": "../.git/worktrees/linked", "GIT_INDEX_FILE": str(folder / "index"), "GIT_WORK_TREE": "."}
    finds(linked, variables, spec, culprit)


def test_a_pre_commit_hook(tmp_path: Path) -> None:
    """A hook that bisects before `git commit -a`, which has an index of its own: the commit holds what it should."""
    repo, spec, culprit = with_culprit(tmp_path)
    command = " ".join(
        f"'{part}'" for part in (sys.executable, "-m", "repro", "bisect", "--quick", spec, "--when", "exit")
    )
    test = " ".join(f'"{part}"' for part in COMMAND)
    hook = repo.root / ".git" / "hooks" / "pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\nenv | grep ^GIT_ > {tmp_path}/variables\n{command} --json {test} > {tmp_path}/found\n")
    hook.chmod(0o755)
    repo.git("commit", "--quiet", "--all", "--message", "By way of the hook")
    assert "GIT_INDEX_FILE=" in (tmp_path / "variables").read_text()
    assert json.loads((tmp_path / "found").read_text())["culprit"]["commit"] == culprit
    assert repo.git("show", "HEAD:code") == "8"
    assert repo.git("show", "--name-only", "--format=", "HEAD").split() == ["code", "new"]


def test_another_repository_than_the_one_named_is_refused(tmp_path: Path) -> None:
    """GIT_DIR of one repository in the working directory of another is refused in one line with the cure."""
    repo, spec, _ = with_culprit(tmp_path)
    other = Repo(tmp_path / "other")
    other.root.mkdir()
    other.git("init", "--quiet")
    done = started(repo.root, {"GIT_DIR": str(other.root / ".git")}, "bisect", spec, "--when", "exit", *COMMAND)
    assert done.returncode == 2
    assert "unset GIT_DIR" in done.stderr
    assert len(done.stderr.splitlines()) == 1
