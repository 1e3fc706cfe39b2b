"""Training states that bisects start from, kept under ``$GIT_COMMON_DIR/repro/states`` within a budget."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path
from typing import IO

__all__ = ["KEPT", "States"]

KEPT = 4
"""How many times one case's budget all states of a repository may take. The least recently used go first."""


class States:
    """The states of one trainer, by the step that each lies before.

    Those in use by some process are never removed.
    """

    def __init__(self, base: Path, key: str) -> None:
        """Open the states of `key`, and hold them."""
        self.folder = base / key
        self.folder.mkdir(parents=True, exist_ok=True)
        self._base = base
        self._held: IO[str] = (self.folder / "lock").open("w")
        fcntl.flock(self._held, fcntl.LOCK_SH)
        os.utime(self.folder)

    def steps(self) -> list[int]:
        """The steps before which there is a state, ascending."""
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit())

    def at(self, step: int) -> Path:
        """Where the state before a step lies."""
        return self.folder / str(step)

    def take(self, made: Path) -> None:
        """Keep the states in a folder, each in one named by its step, where they are not known yet."""
        for path in made.iterdir() if made.is_dir() else ():
            with contextlib.suppress(OSError):  # another process has made the same one meanwhile
                path.rename(self.at(int(path.name)))

    def close(self, budget: int) -> None:
        """Let go, and remove the least recently used states of the repository beyond `KEPT` budgets."""
        self._held.close()
        found = [p for p in self._base.iterdir() if p.is_dir()]
        sizes = {p: sum(f.stat().st_size for f in p.rglob("*") if f.is_file()) for p in found}
        for path in sorted(found, key=lambda p: p.stat().st_mtime):
            if sum(sizes.values()) <= KEPT * budget:
                return
            with contextlib.suppress(OSError), (path / "lock").open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
                del sizes[path]
