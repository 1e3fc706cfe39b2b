"""Modules of another working tree than the one under test: an editable installation brings them, or a path in a launch.

Numbers of such a process are another commit's, and every commit's would agree. So each Python process is asked at each
step and at its end: modules are imported late too. This runs inside foreign programs: the standard library alone.
"""

from __future__ import annotations

import filecmp
import functools
import json
import os
import sys

__all__ = ["FILES", "look", "said"]

FILES = "strangers-*.json"
"""What a process that met some leaves in the folder of its raw records."""

_KEPT = ("site-packages", "dist-packages")
"""An environment inside a checkout is none of its code."""
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120
_STANDARD = os.path.realpath(os.path.dirname(os.__file__))  # noqa: PTH120

_seen: set[tuple[str, int]] = set()


def look(place: str, home: str | None, folder: str, *, tests: bool = False, end: bool = False) -> None:
    """Write down which of this process's modules came from elsewhere; those that were looked at before are not again.

    Args:
        place: The working tree under test.
        home: The user's own checkout, where that is another.
        folder: Where it is written.
        tests: Whether the program only tests the tree: then what the tree has not may come from anywhere.
        end: Whether the process ends: then modules that took the place of others are looked for too.
    """
    if len(sys.modules) == len(_seen) and not end:
        return
    new = [(name, module) for name, module in list(sys.modules.items()) if (name, id(module)) not in _seen]
    _seen.update((name, id(module)) for name, module in new)
    files = [(name, _file(module)) for name, module in new if name.partition(".")[0] not in sys.stdlib_module_names]
    found = [[name, file] for name, file in files if file and _strange(file, place, home, tests)]
    if found:
        path = os.path.join(folder, FILES.replace("*", f"{os.getpid()}-{len(_seen)}"))  # noqa: PTH118
        with open(path, "w", encoding="utf-8") as out:  # noqa: PTH123
            json.dump(found, out)


def _file(module: object) -> str:
    """The file of a module as it stands there: to ask one that is lazy would import it."""
    try:
        file = object.__getattribute__(module, "__dict__").get("__file__")
    except (AttributeError, TypeError):
        return ""
    return os.path.normpath(file) if isinstance(file, str) else ""


def said(name: str, file: str) -> str:
    """The line for such a module, with its cure."""
    what = file if name == "__main__" else f"{name} ({file})"
    return (
        f"{what} was imported from another working tree, not from the commit under test (an editable installation, a "
        "path in the launch?): let relative paths name the code, in the launch, and as PYTHONPATH=src before repro or "
        "in subject.env of a case"
    )


def _strange(file: str, place: str, home: str | None, tests: bool) -> bool:
    """Whether a module's file is of another working tree of this repository, and not what the tree has in its place.

    The path as it is counts first: what the tree links to is meant.
    """
    here = _real(place)
    if _below(file, place) or _below(file, here):
        return False
    real = os.path.join(_real(os.path.dirname(file)), os.path.basename(file))  # noqa: PTH118, PTH119, PTH120
    if any(_below(real, own) for own in (here, _OURS, _STANDARD)) or any(part in real for part in _KEPT):
        return False
    own = _real(home) if home else ""
    of_home = bool(home) and _below(real, own) and not _below(real, f"{own}/.git")
    top = own if of_home else _top(os.path.dirname(real))  # noqa: PTH120
    if top is None or not (of_home or _is_of_same(top, here)):
        return False
    counterpart = os.path.join(here, os.path.relpath(real, top))  # noqa: PTH118
    if os.path.isfile(counterpart):  # noqa: PTH113
        return not filecmp.cmp(real, counterpart, shallow=False)
    return not tests


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
def _is_of_same(top: str, here: str) -> bool:
    """Whether two working trees are of one repository, or of clones of one: with a remote, or each other, in common."""
    one, other = _common(top), _common(here)
    if one is None or other is None or one == other:
        return one == other is not None
    return bool({one, os.path.dirname(one), *_remotes(one)} & {other, os.path.dirname(other), *_remotes(other)})  # noqa: PTH120


def _remotes(common: str) -> list[str]:
    """The addresses of a repository's remotes, folders without links; its submodules are other repositories."""
    urls, inside = list[str](), False
    try:
        with open(os.path.join(common, "config"), encoding="utf-8", errors="replace") as file:  # noqa: PTH118, PTH123
            for line in map(str.strip, file):
                inside = line.startswith("[remote ") if line.startswith("[") else inside
                key, _, value = line.partition("=")
                urls += [value.strip()] if inside and key.strip() == "url" and value.strip() else []
    except OSError:
        return []
    return [os.path.realpath(url) if os.path.isdir(url) else url for url in urls]  # noqa: PTH112


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
