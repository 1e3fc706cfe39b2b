"""Working trees of one repository: the one under test, and others that code may come from.

This runs inside foreign programs: the standard library alone.
"""

from __future__ import annotations

import filecmp
import functools
import os
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple, ParamSpec, TypeVar, cast

__all__ = [
    "Origin",
    "below",
    "forget",
    "is_alike",
    "is_remote",
    "name_of",
    "origin_in",
    "real",
    "real_file",
    "remembered",
]

P = ParamSpec("P")
T = TypeVar("T")

_remembered: list[Callable[[], None]] = []


def remembered(function: Callable[P, T]) -> Callable[P, T]:
    """A function whose answers are remembered until `forget`: the same path holds other things at another time."""
    cached = functools.cache(function)
    _remembered.append(cached.cache_clear)
    return cast("Callable[P, T]", cached)


def forget() -> None:
    """Ask of every file and folder anew."""
    filecmp.clear_cache()
    for clear in _remembered:
        clear()


class Origin(NamedTuple):
    """A working tree that something came from, and the one under test.

    Attributes:
        top: The former; of what is in a submodule, the superproject's.
        here: The latter.
        sure: Whether they are known to be of one repository.
    """

    top: str
    here: str
    sure: bool

    def counterpart(self, real: str) -> str:
        """What stands in the tree under test for a path."""
        return os.path.normpath(os.path.join(self.here, os.path.relpath(real, self.top)))  # noqa: PTH118


def origin_in(folder: str, place: str, home: str | None) -> Origin | None:
    """The working tree of this repository that a folder is of, which need not be there; None of any other folder.

    Args:
        folder: The folder, without links.
        place: The working tree under test.
        home: The user's own checkout, where that is another.
    """
    here = real(place)
    if below(f"{folder}/", here):
        return Origin(here, here, True)
    checkout = real(home) if home else ""
    if home and below(f"{folder}/", checkout) and not below(f"{folder}/", f"{checkout}/.git"):
        return Origin(checkout, here, True)
    unsure = None
    for top in _trees(folder, here):
        same = _is_of_same(top, here)
        if same:
            return Origin(top, here, True)
        if same is None:
            unsure = unsure or Origin(top, here, False)
    return unsure


def _trees(folder: str, here: str) -> Iterator[str]:
    """The working tree that a folder lies in, and of a submodule its superproject's."""
    top = _top(folder)
    while top is not None:
        yield top
        above = _top(os.path.dirname(top))  # noqa: PTH120
        top = above if above and _is_submodule(top, above, here) else None


def _is_submodule(top: str, above: str, here: str) -> bool:
    """Whether a working tree may be a submodule of the one around it."""
    common = _common(top) or f"{os.sep}modules{os.sep}"
    if common != os.path.join(top, ".git") and f"{os.sep}modules{os.sep}" in common:  # noqa: PTH118
        return True
    return os.path.isdir(os.path.join(here, os.path.relpath(top, above)))  # noqa: PTH112, PTH118 - old ones keep their own


def is_alike(path: str, other: str) -> bool:
    """Whether two files hold the same, or are links to nowhere that do."""
    try:
        return os.path.samefile(path, other) or filecmp.cmp(path, other, shallow=False)  # noqa: PTH121
    except OSError:  # one is not there; links that lead nowhere may be the same
        return os.path.islink(path) and os.path.islink(other) and os.readlink(path) == os.readlink(other)  # noqa: PTH114, PTH115


def real_file(path: str) -> str:
    """A path without links to the folders that lead to it; a link itself is what it is."""
    return os.path.join(real(os.path.dirname(path)), os.path.basename(path))  # noqa: PTH118, PTH119, PTH120


@remembered
def real(folder: str) -> str:
    """A folder without links."""
    return os.path.realpath(folder)


def below(path: str, folder: str) -> bool:
    """Whether a path lies in a folder, at any depth."""
    return path.startswith(folder.rstrip(os.sep) + os.sep)


@remembered
def _top(folder: str) -> str | None:
    """The working tree that a folder lies in; None outside of any."""
    if os.path.lexists(os.path.join(folder, ".git")):  # noqa: PTH118
        return folder
    above = os.path.dirname(folder)  # noqa: PTH120
    return None if above == folder else _top(above)


def name_of(top: str) -> str | None:
    """What its repository is called where something is kept for it; None where that cannot be read."""
    from pathlib import Path

    from repro_golden.base.canonical import named_after

    return named_after(Path(common)) if (common := _common(top)) else None


@remembered
def _is_of_same(top: str, here: str) -> bool | None:
    """Whether two working trees are of one repository, or of clones of one: with a remote, or each other, in common.

    None where a repository cannot be read.
    """
    git_folder, other = _common(top), _common(here)
    if git_folder is None or other is None or git_folder == other:
        return None if None in (git_folder, other) else True
    return not _names(git_folder).isdisjoint(_names(other))


def is_remote(url: str, here: str) -> bool:
    """Whether an address is one of those that a working tree's repository has its commits from, however written."""
    common = _common(here)
    return common is not None and _plain(url) in map(_plain, _names(common))


def _plain(url: str) -> str:
    return re.sub(r"^(\w+://)?([^@/]*@)?", "", url).replace(":", "/", 1).rstrip("/").removesuffix(".git")


def _names(common: str) -> set[str]:
    """What a repository is called by its clones, and what it calls those that it has its commits from."""
    return {common, common.removesuffix(f"{os.sep}.git"), *_remotes(common)}


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


@remembered
def _common(top: str) -> str | None:
    """The git folder that all working trees of a repository share; None where it cannot be read."""
    git = os.path.join(top, ".git")  # noqa: PTH118
    if os.path.isdir(git):  # noqa: PTH112
        return os.path.realpath(git)
    try:
        with open(git, encoding="utf-8") as file:  # noqa: PTH123
            git_folder = os.path.join(top, file.read().partition("gitdir:")[2].strip() or ".git")  # noqa: PTH118
        shared = os.path.join(git_folder, "commondir")  # noqa: PTH118
        if not os.path.exists(shared):  # noqa: PTH110 - a submodule's own, or one that lies apart
            return os.path.realpath(git_folder) if os.path.isdir(git_folder) else None  # noqa: PTH112
        with open(shared, encoding="utf-8") as file:  # noqa: PTH123
            return os.path.realpath(os.path.join(git_folder, file.read().strip()))  # noqa: PTH118
    except (OSError, ValueError):
        return None
