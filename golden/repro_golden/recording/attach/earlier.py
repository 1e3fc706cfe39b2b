"""Files that a run of other code may have written: a cache that is filled once holds what that code made.

The time of a file's last change tells of all that write; Python's audit events do not. Who reads is told by those.
This runs inside foreign programs, from their start on: the standard library alone, and little of that.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Container, Sequence

__all__ = ["MET", "SPANS", "Reads", "spans_in"]

MET = "earlier-*.jsonl"
"""What each process that read such a file leaves in the folder of its raw records."""
SPANS = "earlier"
"""There too, before the program starts: from when to when, in seconds since the epoch, which other code ran."""

_COMMON = (
    "/__pycache__/", "/site-packages/", "/dist-packages/", "/huggingface/hub/", "/torch/hub/", "/torchinductor_",
    "/.triton/", "/.nv/", "/matplotlib/", "/fontconfig/", "/pip/", "/uv/", "/ray/session_", "/repro/worktrees/",
    ".git/",
)  # fmt: skip
"""Parts of paths of what is kept under a digest or a version of its content, or by us."""
_SYSTEM = ("/proc/", "/sys/", "/run/")


class Reads:
    """Takes the files that a process opens, and tells of those that may be another code's."""

    def __init__(
        self,
        spans: Sequence[tuple[float, float, str]],
        worktree: str | None,
        checkout: str,
        tracked: Callable[[], Container[str]],
        others: Sequence[str],
        tell: Callable[[str, str], None],
    ) -> None:
        """Begin with none.

        Args:
            spans: When other code ran, and whose it was.
            worktree: That of the commit under test, where it is none of the user's.
            checkout: The user's.
            tracked: What git tracks there.
            others: Folders that are no commit's.
            tell: Takes a file, and whose code ran when it was last changed.
        """
        self._spans = spans
        self._first, self._last = min(began for began, _, _ in spans), max(ended for _, ended, _ in spans)
        others = [*others, worktree] if worktree else others
        self._others = (*_SYSTEM, *(f"{os.path.realpath(folder).rstrip('/')}/" for folder in others))
        self._checkout, self._tracked = f"{os.path.realpath(checkout).rstrip('/')}/", tracked
        self._tell, self._told = tell, set[str]()

    def opened(self, path: object, mode: object, flags: int) -> None:
        """A file is about to be opened."""
        if type(path) is not str or flags & (os.O_WRONLY | os.O_RDWR) or (mode is None and not path.startswith("/")):
            return
        facts = os.stat(path)  # noqa: PTH116 - the program's own call raises what this does
        moment = facts.st_ctime
        if not self._first <= moment <= self._last or not stat.S_ISREG(facts.st_mode):
            return
        file = os.path.realpath(path)
        if file in self._told or file.startswith(self._others) or any(part in file for part in _COMMON):
            return
        if file.startswith(self._checkout) and file[len(self._checkout) :] in self._tracked():
            return
        if ran := dict.fromkeys(whose for began, ended, whose in self._spans if began <= moment <= ended):
            self._told.add(file)
            self._tell(file, " and ".join(ran))


def spans_in(folder: str) -> Sequence[tuple[float, float, str]]:
    """When other code ran, as it stands in a folder of raw records."""
    path = os.path.join(folder, SPANS)  # noqa: PTH118
    if not os.path.exists(path):  # noqa: PTH110
        return ()
    import json

    with open(path, encoding="utf-8") as file:  # noqa: PTH123
        return [(began, ended, whose) for began, ended, whose in json.load(file)]
