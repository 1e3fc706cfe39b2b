"""What really lies in a folder that the user named: a link in it that leads elsewhere is somebody else's word."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path

__all__ = ["Inside"]

_MOST = 200_000
"""Entries that are looked at for links; of a larger tree no folder is read as a whole."""


class Inside:
    """The inside of a path that the user named. A link that is named itself is followed.

    Args:
        path: It. A snapshot of the Hugging Face cache is taken with the blobs beside it that its links lead to.
    """

    def __init__(self, path: Path) -> None:
        real = path.resolve()
        cached = real.parent.name == "snapshots" and real.parent.parent.name.startswith(("models--", "datasets--"))
        self._root = real.parent.parent if cached else real
        self._named = real

    def holds(self, path: Path) -> bool:
        """Whether a path that exists really lies inside."""
        return path.resolve().is_relative_to(self._root)

    def whole(self, folder: Path) -> bool:
        """Whether no link below a folder leads out, so that who reads all of it stays inside."""
        return not self._crowded and folder.resolve() not in self._leaking

    @property
    def _crowded(self) -> bool:
        return self._walked[1]

    @property
    def _leaking(self) -> set[Path]:
        return self._walked[0]

    @cached_property
    def _walked(self) -> tuple[set[Path], bool]:
        """The folders with a link somewhere below that leads out, and whether there were too many entries."""
        leaking: set[Path] = set()
        todo, seen = [self._named], 0
        while todo:
            folder = todo.pop()
            try:
                entries = list(os.scandir(folder))
            except OSError:  # a file, or nothing that could be read
                continue
            seen += len(entries)
            if seen > _MOST:
                return leaking, True
            for entry in entries:
                path = Path(entry.path)
                if entry.is_dir(follow_symlinks=False):
                    todo.append(path)
                elif entry.is_symlink() and self._leads_out(path):
                    leaking.update(p for p in path.parents if p.is_relative_to(self._named))
        return leaking, False

    def _leads_out(self, link: Path) -> bool:
        try:
            return link.exists() and not self.holds(link)
        except (OSError, RuntimeError):
            return False  # it leads nowhere
