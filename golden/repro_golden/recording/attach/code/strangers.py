"""Modules of another working tree than the one under test: an editable installation brings them, or a path in a launch.

Numbers of such a program are another commit's, and every commit's would agree. So each Python process writes down what
it meets (`met`), and it is judged here when the program has ended. A module reads what lies beside it, so its package
counts as a whole. What a process opened in the user's checkout counts too.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from repro_golden.recording.attach.code import installed
from repro_golden.recording.attach.code.identify import counted, marked, tracked
from repro_golden.recording.attach.code.installed import TESTS
from repro_golden.recording.attach.code.met import FILES, TRACKED
from repro_golden.recording.attach.code.working_trees import (
    below,
    forget,
    is_alike,
    origin_in,
    real,
    real_file,
    remembered,
)

__all__ = ["prepare", "said"]

_MAIN = ("__main__", "__mp_main__")
"""What each process calls its own file: another module tells more."""


def prepare(folder: Path, checkout: Path) -> None:
    """Tell the processes of a program which files git tracks in the user's checkout.

    Args:
        folder: Of their raw records.
        checkout: The checkout.
    """
    (folder / TRACKED).write_bytes(os.fsencode("\0".join(sorted(_known(os.path.realpath(checkout))))))


_listed: dict[str, tuple[dict[str, str], frozenset[str]]] = {}


def _known(checkout: str) -> frozenset[str]:
    """What git tracks in a checkout; it is asked again where its index is another."""
    marks, known = _listed.get(checkout, ({}, frozenset()))
    if not marks or marked(marks) != marks:
        marks = {}
        known = tracked(checkout, marks)
        _listed[checkout] = marks, known
    return known


def said(folder: Path, root: Path, home: Path | None) -> str | None:
    """The line for a module or a file that processes met, with its cure; None where all were of the commit.

    Args:
        folder: Of their raw records.
        root: The working tree under test.
        home: The user's own checkout, where that is another.
    """
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob(FILES))]
    if (met := _told(texts)) is None:
        return (
            "what a process imported and read was not written down whole (the disk is full, or the program limits the "
            "size of files by ulimit -f): make room for it"
        )
    if not met:
        return None
    forget()  # what was the same at another commit
    place, checkout = str(root), str(home) if home else None
    modules = [entry for entry in met if "name" in entry]
    run = {path for entry in met if "read" not in entry for path in (entry["path"], real_file(entry["path"]))}
    main = ""
    for module in modules:
        line = _said_of(module, place, checkout)
        if line and module["name"] not in _MAIN:
            return line
        main = main or line or ""
    return main or next(_read([entry for entry in met if "read" in entry], run, place, checkout or ""), None)


def _told(texts: Sequence[str]) -> list[dict[str, Any]] | None:
    """What processes met, each thing once; None where one of them could not write all of it."""
    if not all(text.endswith("\n") for text in texts):
        return None
    try:
        return [json.loads(line) for line in dict.fromkeys(line for text in texts for line in text.splitlines())]
    except ValueError:  # room was made behind a line that was cut short
        return None


def _read(read: Iterable[Mapping[str, Any]], run: Set[str], place: str, home: str) -> Iterator[str]:
    """The lines for files that were read in the user's checkout, where the commit has another.

    A module is judged as one (`_strange`), and what only says which version it is of decides no number.

    Args:
        read: What was.
        run: Files of modules.
        place: The working tree under test.
        home: The checkout.
    """
    checkout, here = real(home), real(place)
    for entry in read:
        file = os.path.relpath(entry["file"], checkout)
        meant = _VERSIONS.search(file) or (entry["tests"] and TESTS.search(file))
        if meant or not run.isdisjoint((entry["read"], entry["file"])):
            continue
        if not is_alike(entry["file"], os.path.join(here, file)):  # noqa: PTH118
            yield (
                f"{entry['read']} was read in your checkout, which git tracks, and the commit under test has another: "
                "let the program find it from where it runs (its own folder, or the working directory)"
            )


def _said_of(module: Mapping[str, Any], place: str, home: str | None) -> str | None:
    name, path, tests = str(module["name"]), str(module["path"]), bool(module["tests"])
    if site := module.get("site"):
        copy = next((copy for copy in installed.copies(site, place, home) if copy.has(path)), None)
        called = "__main__" if name in _MAIN else name
        return installed.said(copy, called, path, place, tests=tests) if copy else None
    other = _strange(path, module["folders"], place, home, tests)
    if other is None:
        return None
    folder, file = os.path.split(real_file(path))
    made = os.path.isfile(path) and file not in tracked(folder)  # noqa: PTH113
    cache = "; name a cache of code that runs make so too, or keep it outside of the checkout" if made else ""
    what = path if name == "__main__" else f"{name} ({path})"
    where = f", where {other} is not the same" if other else ""
    return (
        f"{what} was imported from another working tree, not from the commit under test{where} (an editable "
        "installation, a path in the launch?): let relative paths name the code, in the launch, and as PYTHONPATH=src "
        f"before repro or in subject.env of a case{cache}"
    )


def _strange(path: str, folders: Sequence[str], place: str, home: str | None, tests: bool) -> str | None:
    """None of what the tree has alike in its place; else '', or what beside it is not alike."""
    file = real_file(path)
    origin = origin_in(os.path.dirname(file), place, home)  # noqa: PTH120
    if origin is None:
        return None
    counterpart, lone = origin.counterpart(file), not os.path.isdir(file)  # noqa: PTH112
    if not os.path.exists(counterpart) and (lone or tests or not origin.sure):  # noqa: PTH110
        return None if tests or not origin.sure else ""
    if lone and not is_alike(file, counterpart):
        return ""
    if tests and TESTS.search(os.path.relpath(file, origin.top)):
        return None
    package, whole = _package(folders, file)
    other = _other(package, origin.counterpart(package), whole, tests and not whole)
    return other and os.path.relpath(os.path.join(package, other), origin.top)  # noqa: PTH118


def _package(folders: Iterable[str], file: str) -> tuple[str, bool]:
    """Which folder of its top-level package a module is in; of one that is one file, what it lies in, and False."""
    for folder in map(real, folders):
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


@remembered
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
    pairs, known = [(there, here)], set[tuple[str, str]]()
    while pairs:
        pair = pairs.pop()
        known.add(pair)
        names = set(tracked(pair[1]) or [str(path.relative_to(pair[1])) for path in counted(pair[1], deep=whole)])
        names |= frozenset() if of_here else tracked(pair[0])
        for name in sorted(names if whole else filter(_is_beside, names)):
            theirs, other = (os.path.join(folder, name) for folder in pair)  # noqa: PTH118
            if os.path.isdir(theirs) and os.path.isdir(other):  # noqa: PTH112 - a link, or a submodule
                linked = (real(theirs), real(other))
                pairs += [linked] if whole and linked[0] != linked[1] and linked not in known else []
            elif (os.path.lexists(theirs) or os.path.lexists(other)) and not is_alike(theirs, other):
                return os.path.relpath(theirs, there)
    return None


def _is_beside(name: str) -> bool:
    """Whether a module of one file may read a file of its folder."""
    return os.sep not in name and not name.endswith(_PAPERS) and not _VERSIONS.search(name)
