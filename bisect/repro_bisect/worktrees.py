"""Worktrees of commits. Nothing here changes the user's checkout, index, branches or configuration."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import git

from repro_bisect.contents import fill
from repro_golden.checkout import Checkout
from repro_golden.children import Place
from repro_golden.errors import MachineFailureError
from repro_golden.scratch import scratch_folder

__all__ = ["Worktrees"]

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
        self._base, self._common = checkout.state / "worktrees", checkout.state.parent
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
            fill(path, self._common, self._quiet)
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
