"""Worktrees of commits. Nothing here changes the user's checkout, index, branches or configuration."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from repro_golden.base.scratch import scratch_folder
from repro_golden.repository.checkout import Checkout, Place
from repro_golden.repository.contents import fill, git_failed
from repro_golden.repository.git import GitFailedError
from repro_golden.repository.linked import Linked

__all__ = ["Worktrees"]


class Worktrees:
    """Detached worktrees under ``$GIT_COMMON_DIR/repro/worktrees``, one folder per process.

    The repository's hooks and filters never run: hooks are pointed at nothing, and every configured filter is emptied
    for the one command that fills the worktree. A worktree holds every file, also where the checkout is a sparse one.
    What a killed process left behind is removed by the next.
    """

    def __init__(self, checkout: Checkout, link: Sequence[str] = ()) -> None:
        """Prepare to make some.

        Args:
            checkout: Of which.
            link: What of the user's checkout each of them has too, though no commit holds it.

        Raises:
            ReproError: that is not there to be linked.
        """
        self._linked = Linked(checkout.git, link)
        self._home, self._git = checkout.root, checkout.git.without_filters()
        self._exit = contextlib.ExitStack()
        self._base, self._common = checkout.state / "worktrees", checkout.common
        self._folder = self._exit.enter_context(scratch_folder(self._base))
        self._forget()

    @contextlib.contextmanager
    def at(self, commit: str, tree: str | None) -> Iterator[Place]:
        """A worktree of one commit, removed on exit.

        Raises:
            MachineFailureError: git could not make it.
            ReproError: a submodule or LFS object of the commit is not here, or what is linked was changed meanwhile.
        """
        path = Path(tempfile.mkdtemp(prefix=f"{commit[:10]}-", dir=self._folder)) / "tree"
        try:
            with self._alone():
                self._run("worktree", "add", "--quiet", "--detach", "--force", "--no-checkout", str(path), commit)
            self._run("reset", "--quiet", "--hard", at=path)  # the long part, side by side
            fill(path, self._common, commit, self._git, self._home)
            self._linked.put(path)
            yield Place(path, commit, tree, home=self._home)
            self._linked.check()
        finally:
            self._remove(path)

    def _remove(self, path: Path) -> None:
        shutil.rmtree(path.parent, ignore_errors=True)
        if path.parent.exists():  # a trainer or its setup made folders that nothing can be removed from
            _make_writable(path.parent)
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
            for note in self._common.glob("worktrees/*/gitdir"):
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
            self._git.at(at or self._home)(*arguments)
        except GitFailedError as error:
            raise git_failed(f"`git {' '.join(arguments[:2])}`", error.stderr, self._base) from None


def _make_writable(top: Path) -> None:
    """Let the owner change every folder below one."""
    for folder, below, _ in os.walk(top):  # which looks into a folder after this has made it readable
        for name in below:
            if not (path := Path(folder, name)).is_symlink():
                with contextlib.suppress(OSError):
                    path.chmod(stat.S_IRWXU)
