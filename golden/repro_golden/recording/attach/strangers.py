"""Modules of another working tree than the one under test: an editable installation brings them, or a path in a launch.

Numbers of such a process are another commit's, and every commit's would agree. So each Python process is asked at each
step and at its end: modules are imported late too. This runs inside foreign programs: the standard library alone.
"""

from __future__ import annotations

import functools
import json
import os
import sys

__all__ = ["FILES", "look", "said"]

FILES = "strangers-*.json"
"""What a process that met some leaves in the folder of its raw records."""

_KEPT = ("site-packages", "dist-packages", f"{os.sep}.git{os.sep}")
"""An environment inside a checkout is none of its code."""

_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120

_seen: set[str] = set()


def look(place: str, home: str | None, folder: str, *, tests: bool = False) -> None:
    """Write down which of this process's modules came from elsewhere; those that were looked at before are not again.

    Args:
        place: The working tree under test.
        home: The user's own checkout, where that is another.
        folder: Where it is written.
        tests: Whether the program only tests the tree: then what the tree has not may come from anywhere.
    """
    if len(sys.modules) == len(_seen):
        return
    names = [name for name in list(sys.modules) if name not in _seen]
    _seen.update(names)
    files = {name: str(getattr(sys.modules.get(name), "__file__", None) or "") for name in names}
    found = [[name, file] for name, file in files.items() if file and _strange(file, place, home, tests)]
    if found:
        path = os.path.join(folder, FILES.replace("*", f"{os.getpid()}-{len(_seen)}"))  # noqa: PTH118
        with open(path, "w", encoding="utf-8") as out:  # noqa: PTH123
            json.dump(found, out)


def said(name: str, file: str) -> str:
    """The line for such a module, with its cure."""
    what = file if name == "__main__" else f"{name} ({file})"
    return (
        f"{what} was imported from another working tree, not from the commit under test (an editable installation, a "
        "path in the launch?): let relative paths name the code, in the launch, and as PYTHONPATH=src before repro or "
        "in subject.env of a case"
    )


def _strange(file: str, place: str, home: str | None, tests: bool) -> bool:
    """Whether a module's file stands for one of the tree's own, or belongs to another working tree of this repository.

    The path as it is counts first: what the tree links to is meant.
    """
    here = _real(place)
    if _below(file, place) or _below(file, here):
        return False
    real = os.path.join(_real(os.path.dirname(file)), os.path.basename(file))  # noqa: PTH118, PTH119, PTH120
    if any(_below(real, own) for own in (here, _OURS)) or any(part in real for part in _KEPT):
        return False
    top = _real(home) if home and _below(real, _real(home)) else _top(os.path.dirname(real))  # noqa: PTH120
    if top is None:
        return False
    counterpart = os.path.join(here, os.path.relpath(real, top))  # noqa: PTH118
    if os.path.exists(counterpart):  # noqa: PTH110
        return os.path.realpath(counterpart) != real
    return not tests and (_below(real, _real(home or os.devnull)) or _common(top) == _common(here) is not None)


@functools.cache
def _real(folder: str) -> str:
    return os.path.realpath(folder)


def _below(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip(os.sep) + os.sep)


@functools.cache
def _top(folder: str) -> str | None:
    """The working tree that a folder lies in; None outside of any."""
    if os.path.lexists(os.path.join(folder, ".git")):  # noqa: PTH118
        return folder
    above = os.path.dirname(folder)  # noqa: PTH120
    return None if above == folder else _top(above)


@functools.cache
def _common(top: str) -> str | None:
    """The git folder that all working trees of a repository share; None where it cannot be read."""
    git = os.path.join(top, ".git")  # noqa: PTH118
    if os.path.isdir(git):  # noqa: PTH112
        return os.path.realpath(git)
    try:
        with open(git, encoding="utf-8") as file:  # noqa: PTH123
            named = file.read().partition("gitdir:")[2].strip()
        own = os.path.join(top, named)  # noqa: PTH118
        with open(os.path.join(own, "commondir"), encoding="utf-8") as file:  # noqa: PTH118, PTH123
            return os.path.realpath(os.path.join(own, file.read().strip()))  # noqa: PTH118
    except OSError:
        return None
