"""Files of the user's checkout that a program reads while another working tree is under test.

It may find them by a variable, a path of its own or a link, where no command names them. This runs inside foreign
programs, from their start on: the standard library alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from repro_golden.base.audit import hear

__all__ = ["paths", "take", "watch"]

paths: dict[str, str] = {}
"""Those that were opened to be read since `take`, which git may track or not, and where they lie there."""
_known: set[str] = set()


def take(tracked: Callable[[str], bool]) -> dict[str, str]:
    """Those of `paths` that git tracks, each once in a process; of the others nothing is kept.

    Args:
        tracked: Whether it tracks what lies at a path.
    """
    new: dict[str, str] = {}
    while paths:  # to which other threads may add meanwhile
        path, file = paths.popitem()
        if tracked(file):
            new[path] = file
    _known.update(new)
    return dict(sorted(new.items()))


def watch(place: str, home: str) -> None:
    """Keep the paths of files below the checkout that are opened from now on, as Python's audit events tell.

    Args:
        place: The working tree under test.
        home: The checkout.
    """
    within = _below(os.path.realpath(home), os.path.realpath(place))
    folders: dict[str, str] = {}

    def real(folder: str) -> str:
        found = folders.get(folder)
        if found is None:
            found = folders[folder] = os.path.realpath(folder)
        return found

    def opened(path: object, mode: object, flags: int) -> None:
        if type(path) is not str or flags & (os.O_WRONLY | os.O_RDWR):
            return
        if not path.startswith("/"):
            if mode is None:  # `os.open`, whose path may be one below a folder that is open
                return
            path = f"{os.getcwd()}/{path}"  # noqa: PTH109
        if path in _known:
            return
        file = path
        for _ in range(_LINKS):
            folder, _, name = file.rpartition("/")
            file = f"{real(folder or '/').rstrip('/')}/{name}"
            if within(file):
                paths[path] = file
                return
            if not os.path.islink(file):  # noqa: PTH114
                return
            file = os.path.join(os.path.dirname(file), os.readlink(file))  # noqa: PTH115, PTH118, PTH120

    hear({"open": opened})


_LINKS = 40
"""Links of a path that a system follows."""


def _below(home: str, place: str) -> Callable[[str], bool]:
    """Whether a file is one of the checkout's, and neither git's nor of the working tree under test."""
    own, git, other = (f"{top.rstrip('/')}/" for top in (home, f"{home}/.git", place))

    def within(file: str) -> bool:
        return file.startswith(own) and not file.startswith((git, other))

    return within
