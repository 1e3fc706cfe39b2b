"""Commits and worktrees. Nothing here changes the user's checkout, index, branches or configuration."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import git

from repro_golden.checkout import Checkout, subject_tree
from repro_golden.errors import MachineFailureError, ReproError
from repro_golden.launch import Place

__all__ = ["CommitInfo", "History", "Worktrees"]


@dataclass(frozen=True)
class CommitInfo:
    """What a report says of a commit."""

    commit: str
    author: str
    date: str
    subject: str
    parents: tuple[str, ...]
    diffstat: str
    """``git show --stat`` without the header."""


class History:
    """The commits of a range GOOD..BAD.

    Attributes:
        good: Full id of the good end.
        bad: Full id of the bad end.
        parents: Every commit of the range, newest first, with its parents.
    """

    def __init__(self, checkout: Checkout, spec: str) -> None:
        """Resolve ``GOOD..BAD``; an empty BAD means HEAD.

        Raises:
            ReproError: not a range, an unknown revision, GOOD no ancestor of BAD, or nothing between them.
        """
        self.repo = git.Repo(checkout.root)
        good, dots, bad = spec.partition("..")
        if not dots or not good or bad.startswith("."):
            raise ReproError(f"{spec!r} is no range: write GOOD..BAD, such as v1.2..HEAD")
        self.good, self.bad = self._resolve(good), self._resolve(bad or "HEAD")
        if self.good == self.bad:
            raise ReproError(f"{good} and {bad or 'HEAD'} are the same commit: there is nothing between them")
        ends = self.repo.commit(self.good), self.repo.commit(self.bad)
        if not self.repo.is_ancestor(*ends):
            base = self.repo.merge_base(*ends)
            cure = f"; their merge base is {base[0].hexsha[:10]}, try {base[0].hexsha[:10]}..{bad}" if base else ""
            raise ReproError(f"GOOD {good} is not an ancestor of BAD {bad or 'HEAD'}{cure}")
        lines = self.repo.git.rev_list("--parents", "--topo-order", f"{self.good}..{self.bad}").splitlines()
        self.parents: Mapping[str, Sequence[str]] = {c: p for c, *p in (line.split() for line in lines)}

    def _resolve(self, revision: str) -> str:
        try:
            return str(self.repo.commit(revision).hexsha)
        except (git.BadName, git.BadObject, ValueError, git.GitCommandError):
            raise ReproError(f"git knows no commit {revision!r} here: check the spelling, or fetch it first") from None

    @cached_property
    def _trees(self) -> dict[tuple[str, str], str | None]:
        return {}

    def tree(self, commit: str, path: str) -> str | None:
        """Hash of the subject's folder in a commit; None when the commit lacks it."""
        if (commit, path) not in self._trees:
            self._trees[commit, path] = subject_tree(self.repo.commit(commit), path)
        return self._trees[commit, path]

    def info(self, commit: str) -> CommitInfo:
        """Author, date, subject and diffstat."""
        c = self.repo.commit(commit)
        stat = self.repo.git.show("--stat=100", "--format=", commit, "--").strip("\n")
        return CommitInfo(
            commit,
            f"{c.author.name} <{c.author.email}>",
            c.authored_datetime.isoformat(),
            str(c.summary),
            tuple(p.hexsha for p in c.parents),
            stat,
        )

    def close(self) -> None:
        """End git's helper processes."""
        self.repo.close()


class Worktrees:
    """Detached worktrees under ``$GIT_COMMON_DIR/repro/worktrees``, one folder per process.

    The repository's hooks and filters never run: hooks are pointed at nothing, and every configured filter is emptied
    for the one command that fills the worktree. Each process holds a lock on its folder, so what a killed one left
    behind is recognised and removed by the next.
    """

    def __init__(self, checkout: Checkout) -> None:
        self._repo = git.Repo(checkout.root)
        base = checkout.state / "worktrees"
        base.mkdir(parents=True, exist_ok=True)
        self._sweep(base)
        self._folder = Path(tempfile.mkdtemp(prefix="p", dir=base))
        self._lock = (self._folder / "lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._quiet = ["-c", f"core.hooksPath={os.devnull}", "-c", "core.fsmonitor=false", *self._empty_filters()]

    def _empty_filters(self) -> list[str]:
        try:
            names = self._repo.git.config("--name-only", "--get-regexp", r"^filter\.").splitlines()
        except git.GitCommandError:  # no filter is configured
            return []
        filters = sorted({name.rsplit(".", 1)[0] for name in names})
        settings = ("smudge=", "process=", "required=false")
        return [part for f in filters for s in settings for part in ("-c", f"{f}.{s}")]

    @contextlib.contextmanager
    def at(self, commit: str, tree: str | None) -> Iterator[Place]:
        """A worktree of one commit, removed on exit.

        Raises:
            MachineFailureError: git could not make it.
        """
        path = Path(tempfile.mkdtemp(prefix=f"{commit[:10]}-", dir=self._folder)) / "tree"
        try:
            self._git("worktree", "add", "--quiet", "--detach", "--force", str(path), commit)
            yield Place(path, commit, tree)
        finally:
            self._remove(path)

    def _remove(self, path: Path) -> None:
        shutil.rmtree(path.parent, ignore_errors=True)
        with contextlib.suppress(MachineFailureError):
            self._git("worktree", "prune")

    def close(self) -> None:
        """Remove this process's folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.close()
        with contextlib.suppress(MachineFailureError):
            self._git("worktree", "prune")
        self._repo.close()

    def _sweep(self, base: Path) -> None:
        """Remove the folders of processes that are gone: whoever lives holds a lock on its own."""
        for folder in base.iterdir():
            lock = folder / "lock"
            try:
                with lock.open("a") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            except OSError:
                continue  # its owner lives, or is just making it
        with contextlib.suppress(git.GitCommandError):
            self._repo.git.worktree("prune")

    def _git(self, *arguments: str) -> None:
        command = ["git", *(self._quiet if hasattr(self, "_quiet") else []), *arguments]
        try:
            self._repo.git.execute(command)
        except git.GitCommandError as error:
            message = " ".join(str(error.stderr).split())[:300]
            raise MachineFailureError(f"`git {' '.join(arguments[:2])}` failed: {message}") from None
