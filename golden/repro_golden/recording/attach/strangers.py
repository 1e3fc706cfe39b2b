"""Modules of another working tree than the one under test: an editable installation brings them, or a path in a launch.

Numbers of such a process are another commit's, and every commit's would agree. So each Python process is asked at each
step and at its end: modules are imported late too. A module reads what lies beside it, so its package counts as a
whole. This runs inside foreign programs: the standard library alone.
"""

from __future__ import annotations

import filecmp
import functools
import json
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

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
    foreign = [(name, module) for name, module in new if name.partition(".")[0] not in sys.stdlib_module_names]
    found = [
        [name, path, other]
        for name, module in foreign
        for path in _paths(module, place, home)
        if (other := _strange(name, path, place, home, tests)) is not None
    ]
    if found:
        path = os.path.join(folder, FILES.replace("*", f"{os.getpid()}-{len(_seen)}"))  # noqa: PTH118
        with open(path, "w", encoding="utf-8") as out:  # noqa: PTH123
            json.dump(found, out)


def _paths(module: object, place: str, home: str | None) -> Iterator[str]:
    """The file of a module; of a namespace package its folders, but for those behind what the tree has in their place.

    As they stand there: to ask a module that is lazy would import it.
    """
    file = _attribute(module, "__file__")
    if isinstance(file, str):
        yield os.path.normpath(file)
        return
    folders = _folders(module)
    for n, folder in enumerate(folders):
        origin = _origin(folder, place, home)
        if origin and os.path.isdir(folder) and origin.counterpart(_real(folder)) not in map(_real, folders[:n]):  # noqa: PTH112
            yield folder


def _folders(module: object) -> list[str]:
    """Where a package's modules are looked for."""
    try:
        return [os.path.normpath(folder) for folder in _attribute(module, "__path__") or () if isinstance(folder, str)]
    except Exception:  # noqa: BLE001 - a namespace whose parent is gone, or what only is called so
        return []


def _attribute(module: object, name: str) -> Any:
    try:
        return object.__getattribute__(module, "__dict__").get(name)
    except (AttributeError, TypeError):
        return None


def said(name: str, file: str, other: str = "") -> str:
    """The line for such a module, with its cure.

    Args:
        name: The module.
        file: Its file, or its folder.
        other: What the commit has otherwise beside it, where that alone is so.
    """
    what = file if name == "__main__" else f"{name} ({file})"
    where = f", where {other} is not the same" if other else ""
    return (
        f"{what} was imported from another working tree, not from the commit under test{where} (an editable "
        "installation, a path in the launch?): let relative paths name the code, in the launch, and as PYTHONPATH=src "
        "before repro or in subject.env of a case"
    )


def _strange(name: str, path: str, place: str, home: str | None, tests: bool) -> str | None:
    """None of what the tree has alike in its place; else '', or what beside it is not alike."""
    origin = _origin(path, place, home)
    if origin is None:
        return None
    real = _real_file(path)
    counterpart, lone = origin.counterpart(real), not os.path.isdir(real)  # noqa: PTH112
    if not os.path.exists(counterpart) and (lone or tests or not origin.sure):  # noqa: PTH110
        return None if tests or not origin.sure else ""
    if lone and not _alike(real, counterpart):
        return ""
    if tests and _TESTS.search(os.path.relpath(real, origin.top)):
        return None
    package, whole = _package(name, real)
    other = _other(package, origin.counterpart(package), whole, tests and not whole)
    return other and os.path.relpath(os.path.join(package, other), origin.top)  # noqa: PTH118


class _Origin(NamedTuple):
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


def _origin(path: str, place: str, home: str | None) -> _Origin | None:
    """The other working tree of this repository that a path is of; None of any other path.

    The path as it is counts first: what the tree links to is meant.
    """
    here = _real(place)
    if _below(path, place) or _below(path, here):
        return None
    real = _real_file(path)
    if any(_below(real, own) for own in (here, _OURS, _STANDARD)) or any(part in real for part in _KEPT):
        return None
    own = _real(home) if home else ""
    if home and _below(real, own) and not _below(real, f"{own}/.git"):
        return _Origin(own, here, True)
    unsure = None
    for top in _trees(os.path.dirname(real), here):  # noqa: PTH120
        same = _is_of_same(top, here)
        if same:
            return _Origin(top, here, True)
        if same is None:
            unsure = unsure or _Origin(top, here, False)
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


def _package(name: str, real: str) -> tuple[str, bool]:
    """The folder of a module's top-level package; of a module that is one file, what it lies in, and False."""
    for folder in map(_real, _folders(sys.modules.get(name.partition(".")[0]))):
        if real == folder or _below(real, folder):
            return folder, True
    return os.path.dirname(real), False  # noqa: PTH120


_TESTS = re.compile(r"(^|/)(tests?/|conftest\.py$|test_[^/]*\.py$|[^/]*_test\.py$)")
"""Tests, which a search may take from the checkout: with what lies beside them."""
_PAPERS = (".ipynb", ".lock", ".md", ".rst", "pyproject.toml", "requirements.txt", "setup.cfg", "tox.ini")
"""What lies beside modules at the top of a repository, and is not read by them."""


@functools.cache
def _other(there: str, here: str, whole: bool, of_here: bool) -> str | None:
    """A file of one of two folders that is not the same in the other, as seen from there; None where all are.

    Of the tree under test those count that git tracks; where that does not say, as of submodules, which lie there
    without a repository, what a library may consist of. Of the other tree those that git tracks: its builds in place
    and what is only tried there are nobody's.

    Args:
        there: The folder in the other tree.
        here: The one in the tree under test.
        whole: Whether files of folders in it count.
        of_here: Whether those count alone that the tree under test has.
    """
    from repro_golden.recording.attach.identify import counted, tracked

    pairs, known = [(there, here)], set[tuple[str, str]]()
    while pairs:
        pair = pairs.pop()
        known.add(pair)
        names = set(tracked(pair[1]) or [str(path.relative_to(pair[1])) for path in counted(pair[1], deep=whole)])
        names |= frozenset() if of_here else tracked(pair[0])
        for name in sorted(names if whole else (n for n in names if os.sep not in n and not n.endswith(_PAPERS))):
            one, other = (os.path.join(folder, name) for folder in pair)  # noqa: PTH118
            if os.path.isdir(one) and os.path.isdir(other):  # noqa: PTH112 - a link, or a submodule
                linked = (_real(one), _real(other))
                pairs += [linked] if whole and linked[0] != linked[1] and linked not in known else []
            elif (os.path.lexists(one) or os.path.lexists(other)) and not _alike(one, other):
                return os.path.relpath(one, there)
    return None


def _alike(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other) or filecmp.cmp(one, other, shallow=False)  # noqa: PTH121
    except OSError:  # one is not there; links that lead nowhere may be the same
        return os.path.islink(one) and os.path.islink(other) and os.readlink(one) == os.readlink(other)  # noqa: PTH114, PTH115


def _real_file(path: str) -> str:
    """A path without links to the folders that lead to it; a link itself is what it is."""
    return os.path.join(_real(os.path.dirname(path)), os.path.basename(path))  # noqa: PTH118, PTH119, PTH120


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
def _is_of_same(top: str, here: str) -> bool | None:
    """Whether two working trees are of one repository, or of clones of one: with a remote, or each other, in common.

    None where a repository cannot be read.
    """
    one, other = _common(top), _common(here)
    if one is None or other is None or one == other:
        return None if None in (one, other) else True
    return not _names(one).isdisjoint(_names(other))


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


@functools.cache
def _common(top: str) -> str | None:
    """The git folder that all working trees of a repository share; None where it cannot be read."""
    git = os.path.join(top, ".git")  # noqa: PTH118
    if os.path.isdir(git):  # noqa: PTH112
        return os.path.realpath(git)
    try:
        with open(git, encoding="utf-8") as file:  # noqa: PTH123
            own = os.path.join(top, file.read().partition("gitdir:")[2].strip() or ".git")  # noqa: PTH118
        shared = os.path.join(own, "commondir")  # noqa: PTH118
        if not os.path.exists(shared):  # noqa: PTH110 - a submodule's own, or one that lies apart
            return os.path.realpath(own) if os.path.isdir(own) else None  # noqa: PTH112
        with open(shared, encoding="utf-8") as file:  # noqa: PTH123
            return os.path.realpath(os.path.join(own, file.read().strip()))  # noqa: PTH118
    except (OSError, ValueError):
        return None
