"""Modules of another working tree than the one under test: an editable installation brings them, or a path in a launch.

Numbers of such a process are another commit's, and every commit's would agree. So each Python process is asked at each
step and at its end: modules are imported late too. A module reads what lies beside it, so its package counts as a
whole. What the process opened in the user's checkout counts too (`reads`). This runs inside foreign programs: the
standard library alone.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from repro_golden.recording.attach import installed, reads
from repro_golden.recording.attach.by_identity import id_of
from repro_golden.recording.attach.installed import TESTS, Copy
from repro_golden.recording.attach.working_trees import Origin, below, is_alike, origin_in, real, real_file

__all__ = ["look", "said"]

_FILES = "strangers-*.json"
"""What a process that met some leaves in the folder of its raw records: a line for each module."""
_MAIN = ("__main__", "__mp_main__")
"""What each process calls its own file: another module tells more."""

_KEPT = ("site-packages", "dist-packages")
"""An environment inside a checkout is none of its code."""
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120
_STANDARD = os.path.realpath(os.path.dirname(os.__file__))  # noqa: PTH120

_seen: set[tuple[str, int]] = set()
_numbers = itertools.count()


def look(place: str, home: str | None, folder: str, *, tests: bool = False, end: bool = False) -> None:
    """Write down what of this process came from elsewhere; modules that were looked at before are not again.

    Args:
        place: The working tree under test.
        home: The user's own checkout, where that is another.
        folder: Where it is written.
        tests: Whether the program only tests the tree: then what the tree has not may come from anywhere.
        end: Whether the process ends: then modules that took the place of others are looked for too.
    """
    if len(sys.modules) == len(_seen) and not reads.paths and not end:
        return
    new = [(name, module) for name, module in list(sys.modules.items()) if (name, id_of(module)) not in _seen]
    _seen.update((name, id_of(module)) for name, module in new)
    foreign = [(name, module) for name, module in new if name.partition(".")[0] not in sys.stdlib_module_names]
    copies = installed.copies(place, home) if foreign else ()
    found = {
        name: line
        for name, module in foreign
        for path in _paths(module, place, home)
        if (line := _said_of(copies, name, path, place, home, tests=tests)) is not None
    }
    if found := found or _read(place, home, tests=tests):
        path = os.path.join(folder, _FILES.replace("*", f"{os.getpid()}-{next(_numbers)}"))  # noqa: PTH118
        with open(path, "w", encoding="utf-8") as out:  # noqa: PTH123
            json.dump(found, out)


def _read(place: str, home: str | None, *, tests: bool) -> dict[str, str]:
    """The lines for files that the process has read since in the user's checkout, where the commit has another.

    A module is judged as one (`_strange`), and what only says which version it is of decides no number.
    """
    if home is None or not reads.paths:
        return {}
    own, here = real(home), real(place)
    known = _known(own)
    opened = reads.take(lambda file: os.path.relpath(file, own) in known and not below(file, _OURS))
    modules = {_attribute(module, "__file__") for module in list(sys.modules.values())} if opened else set()
    files = {path: os.path.relpath(file, own) for path, file in opened.items() if path not in modules}
    return {
        path: f"{path} was read in your checkout, which git tracks, and the commit under test has another: let the "
        "program find it from where it runs (its own folder, or the working directory)"
        for path, file in files.items()
        if not _VERSIONS.search(file) and not (tests and TESTS.search(file))
        if not is_alike(os.path.join(own, file), os.path.join(here, file))  # noqa: PTH118
    }


_listed: dict[str, tuple[dict[str, str], frozenset[str]]] = {}


def _known(own: str) -> frozenset[str]:
    """What git tracks in the checkout; it is asked again where its index is another."""
    from repro_golden.recording.attach.identify import marked, tracked

    marks, known = _listed.get(own, ({}, frozenset()))
    if not marks or marked(marks) != marks:
        marks = {}
        known = tracked(own, marks)
        _listed[own] = marks, known
    return known


def _paths(module: object, place: str, home: str | None) -> Iterator[str]:
    """The file of a module; of a namespace package its folders, but for those behind what the tree has in their place.

    As they stand there: to ask a module that is lazy would import it.
    """
    file = _attribute(module, "__file__")
    if isinstance(file, str):
        yield _followed(os.path.normpath(file), place, home)
        return
    folders = _folders(module)
    for n, folder in enumerate(folders):
        origin = _origin(folder, place, home)
        if origin and os.path.isdir(folder) and origin.counterpart(real(folder)) not in map(real, folders[:n]):  # noqa: PTH112
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


def said(folder: Path) -> str | None:
    """The line for a module that processes met, with its cure; None where they met none.

    Args:
        folder: Of their raw records.
    """
    for path in sorted(folder.glob(_FILES)):
        found = json.loads(path.read_text(encoding="utf-8"))
        return str(next((line for name, line in found.items() if name not in _MAIN), None) or min(found.values()))
    return None


def _said_of(copies: Sequence[Copy], name: str, path: str, place: str, home: str | None, *, tests: bool) -> str | None:
    if copy := next((one for one in copies if one.has(path)), None):
        return installed.said(copy, "__main__" if name in _MAIN else name, path, place, tests=tests)
    other = _strange(name, path, place, home, tests)
    if other is None:
        return None
    what = path if name == "__main__" else f"{name} ({path})"
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
    file = real_file(path)
    counterpart, lone = origin.counterpart(file), not os.path.isdir(file)  # noqa: PTH112
    if not os.path.exists(counterpart) and (lone or tests or not origin.sure):  # noqa: PTH110
        return None if tests or not origin.sure else ""
    if lone and not is_alike(file, counterpart):
        return ""
    if tests and TESTS.search(os.path.relpath(file, origin.top)):
        return None
    package, whole = _package(name, file)
    other = _other(package, origin.counterpart(package), whole, tests and not whole)
    return other and os.path.relpath(os.path.join(package, other), origin.top)  # noqa: PTH118


def _followed(path: str, place: str, home: str | None) -> str:
    """A module's file; of a link that no working tree of this repository holds, where it leads.

    What installers link to is no code of a working tree.
    """
    if not os.path.islink(path) or any(part in path for part in _KEPT):  # noqa: PTH114
        return path
    held = any(below(path, tree) for tree in (place, real(place))) or _origin(path, place, home)
    return path if held else os.path.realpath(path)


def _origin(path: str, place: str, home: str | None) -> Origin | None:
    """The other working tree of this repository that a path is of; None of any other path.

    The path as it is counts first: what the tree links to is meant.
    """
    here = real(place)
    if below(path, place) or below(path, here):
        return None
    file = real_file(path)
    if any(below(file, own) for own in (here, _OURS, _STANDARD)) or any(part in file for part in _KEPT):
        return None
    return origin_in(os.path.dirname(file), place, home)  # noqa: PTH120


def _package(name: str, file: str) -> tuple[str, bool]:
    """The folder of a module's top-level package; of a module that is one file, what it lies in, and False."""
    for folder in map(real, _folders(sys.modules.get(name.partition(".")[0]))):
        if file == folder or below(file, folder):
            return folder, True
    return os.path.dirname(file), False  # noqa: PTH120


_VERSIONS = re.compile(
    r"(?:^|/)(?:PKG-INFO|VERSION|version\.txt|_version\.py|__version__\.py|pyproject\.toml|setup\.cfg"
    r"|[^/]*requirements[^/]*\.txt|(?:CHANGE(?:LOG|S)|HISTORY|NEWS|README)(?:\.\w+)?)$",
    re.IGNORECASE,
)
"""Files that say what a package is, as its setup reads them."""
_PAPERS = (".ipynb", ".lock", ".md", ".rst", "tox.ini")
"""Ends of what also lies beside modules at the top of a repository, and is not read by them."""


@functools.cache
def _other(there: str, here: str, whole: bool, of_here: bool) -> str | None:
    """A file of one of two folders that is not the same in the other, as seen from there; None where all are.

    Of the tree under test those count that git tracks; where that does not say, what a library may consist of. Of the
    other tree those that git tracks: its builds in place and what is only tried there are nobody's.

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
        for name in sorted(names if whole else filter(_is_beside, names)):
            one, other = (os.path.join(folder, name) for folder in pair)  # noqa: PTH118
            if os.path.isdir(one) and os.path.isdir(other):  # noqa: PTH112 - a link, or a submodule
                linked = (real(one), real(other))
                pairs += [linked] if whole and linked[0] != linked[1] and linked not in known else []
            elif (os.path.lexists(one) or os.path.lexists(other)) and not is_alike(one, other):
                return os.path.relpath(one, there)
    return None


def _is_beside(name: str) -> bool:
    """Whether a module of one file may read a file of its folder."""
    return os.sep not in name and not name.endswith(_PAPERS) and not _VERSIONS.search(name)
