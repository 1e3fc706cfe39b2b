"""Training states that bisects start from, kept under ``$GIT_COMMON_DIR/repro/states`` within a budget."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

from repro_golden.base.files import is_still

__all__ = ["KEPT", "States", "keep"]

KEPT = 4
"""How many times one case's budget all states of a repository may take. The least recently used go first."""

_GONE = ".gone-"
"""Start of the names of folders that are being removed: nobody opens them any more."""


class States:
    """The states of one trainer, by the step that each lies before.

    Those in use by some process are never removed.
    """

    def __init__(self, base: Path, key: str) -> None:
        """Open the states of `key`, and hold them."""
        self.folder = base / key
        self._base = base
        self._held = _hold(self.folder)
        os.utime(self.folder)

    def steps(self) -> list[int]:
        """The steps before which there is a state, ascending."""
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit())

    def at(self, step: int) -> Path:
        """Where the state before a step lies."""
        return self.folder / str(step)

    def close(self, budget: int) -> None:
        """Let go, and remove the least recently used states of the repository beyond `KEPT` budgets."""
        self._held.close()
        with contextlib.suppress(OSError):  # a result that is there is not lost for want of tidiness
            _tidy(self._base, KEPT * budget)


def keep(made: Path, folder: Path) -> None:
    """Move the states in one folder to another, which somebody holds, where they are not known yet.

    Each lies in a folder named by its step; whatever else lies there stays.
    """
    for path in made.iterdir() if made.is_dir() else ():
        if path.name.isdigit():
            with contextlib.suppress(OSError):  # another process has made the same one meanwhile
                path.rename(folder / path.name)


def _hold(folder: Path) -> IO[str]:
    """A shared lock on a folder, which is made; not on one that another process removes meanwhile."""
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
        with contextlib.suppress(FileNotFoundError):
            held = (folder / "lock").open("w")
            fcntl.flock(held, fcntl.LOCK_SH)
            if is_still(held, folder / "lock"):
                return held
            held.close()


def _tidy(base: Path, most: int) -> None:
    """Remove the least recently used folders that nobody holds until at most `most` bytes are left."""
    for gone in base.glob(f"{_GONE}*"):  # of a process that was killed, or is still at it
        shutil.rmtree(gone, ignore_errors=True)
    folders = {}
    for path in base.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.is_dir() and not path.name.startswith(_GONE):
                folders[path] = (path.stat().st_mtime, _size(path))
    left = sum(size for _, size in folders.values())
    for path in sorted(folders, key=lambda path: folders[path][0]):
        if left <= most:
            return
        with contextlib.suppress(OSError), (path / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_still(lock, path / "lock"):
                # renamed first: whoever opens the key now makes a folder anew, and never sees one that is half gone
                gone = path.rename(tempfile.mkdtemp(prefix=_GONE, dir=base))
                shutil.rmtree(gone, ignore_errors=True)
                left -= folders[path][1]


def _size(folder: Path) -> int:
    """Bytes of the files below a folder, of which some may be removed meanwhile."""
    size = 0
    for root, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                size += Path(root, name).stat().st_size
    return size
