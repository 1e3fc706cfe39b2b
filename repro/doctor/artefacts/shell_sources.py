"""Which files a launch script reads: those of its own checkout, as its author meant them."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

__all__ = ["Sources"]

_CHECKOUT = re.compile(r"/(?:slime|miles|[Rr]elax)/((?:scripts|examples)/.+)")
"""/root/slime is where the trainers' images have the checkout that a script is of."""


class Sources:
    """The files that a script may read: below its checkout, else below the folder above its own.

    Args:
        path: The script.
    """

    def __init__(self, path: Path) -> None:
        self._root = _root_of(path)
        self._relative = not path.is_absolute()

    def find(self, text: str, folder: Path) -> Path | None:
        """The file of a `source`, if it may be read.

        Args:
            text: What the script says.
            folder: That of the script that says it.
        """
        if self._root is None or "\0" in text or not text or text.startswith("~"):
            return None
        path = Path(posixpath.normpath(folder / text))
        try:
            if path.resolve().is_relative_to(self._root) and path.is_file():
                return self._named(path)
            if (found := _CHECKOUT.search(text)) and (self._root / found[1]).resolve().is_relative_to(self._root):
                return self._named(self._root / found[1]) if (self._root / found[1]).is_file() else None
        except (OSError, RuntimeError):
            pass
        return None

    def missing(self, text: str) -> bool:
        """Whether a path says of itself where it is, and is not there."""
        try:
            known = self._root is not None and "\0" not in text and text.startswith("/") and not _CHECKOUT.search(text)
            return known and not Path(posixpath.normpath(text)).exists()
        except OSError:
            return False

    def _named(self, path: Path) -> Path:
        """As the user named the script: from here, if that was."""
        here = Path.cwd()
        return path.relative_to(here) if self._relative and path.is_relative_to(here) else path


def _root_of(path: Path) -> Path | None:
    """The checkout that a script lies in; else the folder above its own."""
    try:
        if not path.is_file():
            return None
        folders = path.resolve().parents
        for folder in folders[:5]:
            if (folder / ".git").exists() or (folder / "scripts" / "models").is_dir():
                return folder
    except (OSError, RuntimeError):
        return None
    return folders[min(1, len(folders) - 1)]
