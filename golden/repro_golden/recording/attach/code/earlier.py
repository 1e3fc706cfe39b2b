"""Files that a run of other code may have written: a cache that is filled once holds what its code made.

The time of a file's last change tells of all that write; Python's audit events do not. Who reads is told by those.
This runs inside foreign programs, from their start on: the standard library alone, and little of that.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

__all__ = ["FILES", "OTHERS", "Touched", "others_in"]

FILES = "touched-*.jsonl"
"""What each process that met such a file leaves in the folder of its raw records: path, and time of last change."""
OTHERS = "others"
"""There too, before the program starts: when it begins and when other code ran, in seconds since the epoch."""

_SYSTEM = ("/proc", "/sys", "/run")
_CACHES = (
    "fontconfig", "huggingface/hub", "matplotlib", "pip", "repro", "torch/hub", "torch/kernels", "triton", "uv", "vllm",
)  # fmt: skip
"""Folders of the user's cache whose files are named by what they hold, or by a version of it."""
_OTHER_CACHES = ("~/.config/matplotlib", "~/.nv", "~/.triton")
_VARIABLES = (
    "CUDA_CACHE_PATH", "MPLCONFIGDIR", "PIP_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "UV_CACHE_DIR",
)  # fmt: skip
"""Variables that name such folders."""
_PARTS = ("/__pycache__/", "/site-packages/", "/dist-packages/", "/torchinductor_", "/ray/session_", "/.git/")
_HUB = ("/models--", "/datasets--", "/spaces--")
_OF_HUB = ("/blobs/", "/refs/", "/snapshots/")
_READ, _WRITTEN = 1000, 200
"""Files of a process that are told."""
_SPELLED = 10_000
"""Paths that are remembered: programs write some files again and again."""


class Touched:
    """Takes the files that a process opens, and tells of those that may be another code's, or be read by another's."""

    def __init__(
        self,
        others: Mapping[str, Any],
        worktree: str | None,
        checkout: str,
        tracked: Callable[[], Container[str]],
        no_commits: Sequence[str],
        tell: Callable[[str, float | None], None],
    ) -> None:
        """Begin with none.

        Args:
            others: See `others_in`.
            worktree: That of the commit under test, where it is none of the user's.
            checkout: The user's.
            tracked: What git tracks there.
            no_commits: Folders that are no commit's.
            tell: Takes a file, and when it was last changed; None of one that is about to be written.
        """
        self._began, self._open, self._spans = others["began"], others["open"], others["spans"]
        self._first = min([self._began, self._open, *(began for began, _ in self._spans)])
        folders = [*_SYSTEM, *no_commits, *_caches(), *([worktree] if worktree else ())]
        self._left_out = tuple(f"{os.path.realpath(folder).rstrip('/')}/" for folder in folders)
        self._checkout, self._tracked = f"{os.path.realpath(checkout).rstrip('/')}/", tracked
        self._tell, self._read, self._written, self._spelled = tell, set[str](), set[str](), set[str]()

    def opened(self, path: object, mode: object, flags: int) -> None:
        """A file is about to be opened."""
        if type(path) is bytes:
            path = os.fsdecode(path)
        if type(path) is not str or (mode is None and not path.startswith("/")):  # below a folder that is open, maybe
            return
        if flags & (os.O_TRUNC | os.O_EXCL):
            self._wrote(path)
        if flags & (os.O_TRUNC | os.O_EXCL | os.O_WRONLY):  # what only adds to a file neither reads it nor makes it
            return
        facts = os.stat(path)  # noqa: PTH116 - the program's own call raises what this does
        if facts.st_ctime >= self._first and facts.st_size and stat.S_ISREG(facts.st_mode):
            moment = facts.st_ctime
            if moment >= min(self._began, self._open) or any(a <= moment <= b for a, b in self._spans):
                file = os.path.realpath(path)
                if file not in self._read and file not in self._written and self._counts(file, self._read, _READ):
                    self._tell(file, moment)

    def renamed(self, _: Any, target: Any, *folders: int) -> None:
        """A file is about to get another name: it is as if it were written."""
        if folders == (-1, -1):  # else it is below a folder that is open
            self._wrote(os.fsdecode(target))

    def _wrote(self, path: str) -> None:
        if len(self._written) < _WRITTEN and path not in self._spelled:
            file = os.path.realpath(path)
            if path.startswith("/") and len(self._spelled) < _SPELLED:
                self._spelled.add(path)
            if file not in self._written and self._counts(file, self._written, _WRITTEN):
                self._tell(file, None)

    def _counts(self, file: str, known: set[str], most: int) -> bool:
        """Whether a file is told, which is known from then on."""
        if len(known) >= most or file.startswith(self._left_out) or any(part in file for part in _PARTS):
            return False
        if any(part in file for part in _HUB) and any(part in file for part in _OF_HUB):
            return False
        if file.startswith(self._checkout) and file[len(self._checkout) :] in self._tracked():
            return False
        known.add(file)
        return True


def others_in(folder: str) -> Mapping[str, Any] | None:
    """What a folder of raw records says of other code; None where it says nothing.

    Returns:
        ``began``: when this run did; ``spans``: from when to when others ran; ``open``: since when some may still.
    """
    path = os.path.join(folder, OTHERS)  # noqa: PTH118
    if not os.path.exists(path):  # noqa: PTH110
        return None
    import json

    with open(path, encoding="utf-8") as file:  # noqa: PTH123
        others: dict[str, Any] = json.load(file)
    return others


def _caches() -> list[str]:
    """Folders whose files are the same for all code, or named by what they hold."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folders = [*(f"{cache}/{name}" for name in _CACHES), *_OTHER_CACHES]
    folders += [folder for name in _VARIABLES if (folder := os.environ.get(name))]
    return [os.path.expanduser(folder) for folder in folders]  # noqa: PTH111
