"""Commits and worktrees. Nothing here changes the user's checkout, index, branches or configuration."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import git

from repro_golden.checkout import Checkout, whole_tree
from repro_golden.children import Place
from repro_golden.errors import MachineFailureError, ReproError
from repro_golden.scratch import scratch_folder

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

    Every question is a git process of its own: GitPython's shared object reader must not be used by two threads.

    Attributes:
        good: Full id of the good end.
        bad: Full id of the bad end.
        parents: Every commit of the range, newest first, with its parents.
    """

    def __init__(self, checkout: Checkout, spec: str, path: str) -> None:
        """Resolve ``GOOD..BAD`` (an empty BAD means HEAD) and look up the subject's folder `path` in every commit.

        Raises:
            ReproError: not a range, an unknown revision, GOOD no ancestor of BAD, or nothing between them.
        """
        self._git = git.Git(str(checkout.root))
        good, dots, bad = spec.partition("..")
        if not dots or not good or bad.startswith("."):
            raise ReproError(f"{spec!r} is no range: write GOOD..BAD, such as v1.2..HEAD")
        self.good, self.bad = self._resolve(good), self._resolve(bad or "HEAD")
        if self.good == self.bad:
            raise ReproError(f"{good} and {bad or 'HEAD'} are the same commit: there is nothing between them")
        base = self._git.merge_base(self.good, self.bad, with_exceptions=False)
        if base != self.good:
            cure = f"; their merge base is {base[:10]}, try {base[:10]}..{bad or 'HEAD'}" if base else ""
            raise ReproError(f"GOOD {good} is not an ancestor of BAD {bad or 'HEAD'}{cure}")
        lines = self._git.rev_list("--parents", "--topo-order", f"{self.good}..{self.bad}").splitlines()
        self.parents: Mapping[str, Sequence[str]] = {c: p for c, *p in (line.split() for line in lines)}
        self._trees = self._read_trees(
            [self.good, *self.parents, *(p for ps in self.parents.values() for p in ps)], path
        )

    def _resolve(self, revision: str) -> str:
        try:
            return str(self._git.rev_parse("--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"))
        except git.GitCommandError:
            raise ReproError(f"git knows no commit {revision!r} here: check the spelling, or fetch it first") from None

    def _read_trees(self, commits: Sequence[str], path: str) -> dict[str, str | None]:
        """One ``git cat-file --batch-check`` for all commits."""
        unique = list(dict.fromkeys(commits))
        path = "" if path in (".", "./") else path.rstrip("/")
        with tempfile.TemporaryFile() as questions:
            questions.write("".join(f"{c}:{path}\n" for c in unique).encode())
            questions.seek(0)
            answer = self._git.cat_file("--batch-check=%(objectname) %(objecttype)", istream=questions)
        found: dict[str, str | None] = {}
        for commit, line in zip(unique, answer.splitlines(), strict=True):
            name, _, kind = line.rpartition(" ")
            found[commit] = name if kind == "tree" else None
        if path:
            return found
        whole = {tree: whole_tree(self._entries(tree)) for tree in {t for t in found.values() if t}}
        return {commit: whole[tree] if tree else None for commit, tree in found.items()}

    def _entries(self, tree: str) -> list[str]:
        """``name hash`` of each entry of a tree."""
        found = []
        for line in self._git.ls_tree("-z", tree).split("\0"):
            facts, tab, name = line.partition("\t")
            found += [f"{name} {facts.split()[2]}"] if tab else []
        return found

    def tree(self, commit: str) -> str | None:
        """Hash of the subject's folder in a commit: equal hashes are equal code. None when the commit lacks it."""
        return self._trees[commit]

    def info(self, commit: str) -> CommitInfo:
        """Author, date, subject and diffstat."""
        fields = self._git.log("-1", "--format=%an <%ae>%x00%aI%x00%s%x00%P", commit).split("\0")
        stat = self._git.show("--stat=100", "--format=", "-m", "--first-parent", commit, "--").strip("\n")
        return CommitInfo(commit, fields[0], fields[1], fields[2], tuple(fields[3].split()), stat)


_LITTLE = 1 << 20
"""Bytes of free disk under which a git failure is put down to the disk."""


class Worktrees:
    """Detached worktrees under ``$GIT_COMMON_DIR/repro/worktrees``, one folder per process.

    The repository's hooks and filters never run: hooks are pointed at nothing, and every configured filter is emptied
    for the one command that fills the worktree. What a killed process left behind is removed by the next.
    """

    def __init__(self, checkout: Checkout) -> None:
        self._home, self._git = checkout.root, git.Git(str(checkout.root))
        self._exit = contextlib.ExitStack()
        self._base = checkout.state / "worktrees"
        self._folder = self._exit.enter_context(scratch_folder(self._base))
        self._quiet = ["-c", f"core.hooksPath={os.devnull}", "-c", "core.fsmonitor=false", *self._empty_filters()]
        self._forget()

    def _empty_filters(self) -> list[str]:
        try:
            names = self._git.config("--name-only", "--get-regexp", r"^filter\.").splitlines()
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
            with self._alone():
                self._run("worktree", "add", "--quiet", "--detach", "--force", "--no-checkout", str(path), commit)
            self._run("reset", "--quiet", "--hard", at=path)  # the long part, side by side
            yield Place(path, commit, tree, home=self._home)
        finally:
            self._remove(path)

    def _remove(self, path: Path) -> None:
        shutil.rmtree(path.parent, ignore_errors=True)
        self._forget()

    def close(self) -> None:
        """Remove this process's folder."""
        self._exit.close()
        self._forget()

    def _forget(self) -> None:
        """Drop git's notes on our worktrees that are gone.

        `git worktree prune` would drop the user's too, such as one on a disk that is not mounted now.
        """
        with self._alone():
            for note in self._base.parent.parent.glob("worktrees/*/gitdir"):
                with contextlib.suppress(OSError):
                    target = Path(note.read_text(encoding="utf-8").strip())
                    if target.is_relative_to(self._base) and not target.exists():
                        shutil.rmtree(note.parent, ignore_errors=True)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock on git's notes on worktrees: git reads those of every other, and stumbles over half a one."""
        with self._base.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _run(self, *arguments: str, at: Path | None = None) -> None:
        try:
            (git.Git(str(at)) if at else self._git).execute(["git", *self._quiet, *arguments])
        except git.GitCommandError as error:
            message = " ".join(str(error.stderr).split())[:300]
            if shutil.disk_usage(self._base).free < _LITTLE:  # git itself only says that it cannot write
                message = f"no space left at {self._base}"
            raise MachineFailureError(
                f"`git {' '.join(arguments[:2])}` failed: {message}; cure that and run the same command again"
            ) from None
