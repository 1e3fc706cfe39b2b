"""Files of the user's checkout that a program reads while another working tree is under test.

It may find them by a variable, a path of its own or a link, where no command names them. This runs inside foreign
programs, from their start on: the standard library alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from repro_golden.base.audit import hear

__all__ = ["paths", "take", "watch"]

paths: set[str] = set()
"""Those that were opened to be read since `take`, which git may track or not."""
_taken: set[str] = set()


def take() -> list[str]:
    """`paths`, each once in a process."""
    new = sorted(paths)
    _taken.update(new)
    paths.clear()
    return new


def watch(place: str, home: str) -> None:
    """Keep the paths of files below the checkout that are opened from now on, as Python's audit events tell.

    Args:
        place: The working tree under test.
        home: The checkout.
    """
    within = _below(os.path.realpath(home), os.path.realpath(place))
    known: dict[str, bool] = {}

    def opened(path: object, mode: object, flags: int) -> None:
        if type(path) is not str or flags & (os.O_WRONLY | os.O_RDWR):
            return
        folder = path[: path.rfind("/") + 1]
        if not folder.startswith("/"):
            if mode is None:  # `os.open`, whose path may be one below a folder that is open
                return
            folder = os.path.join(os.getcwd(), folder)  # noqa: PTH109, PTH118
        inside = known.get(folder)
        if inside is None:
            inside = known[folder] = within(os.path.realpath(folder))
        if inside and (whole := folder + os.path.basename(path)) not in _taken:  # noqa: PTH119
            paths.add(whole)

    hear({"open": opened})


def _below(home: str, place: str) -> Callable[[str], bool]:
    """Whether a folder is one of the checkout's, and neither git's nor of the working tree under test."""

    def within(folder: str) -> bool:
        inside, other = (f"{folder}/".startswith(f"{top.rstrip('/')}/") for top in (home, place))
        return inside and not other and not f"{folder}/".startswith(f"{home}/.git/")

    return within
