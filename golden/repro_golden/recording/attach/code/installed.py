"""What an installer made of the repository under test: copies of its modules, and programs that start them.

`pip install .` copies the code of one commit, which stays whichever commit is under test. An editable installation
copies none, and yet programs start the functions that its entry points named then. Where a package is from, installers
write beside it (PEP 610). This runs inside foreign programs: the standard library alone.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from repro_golden.recording.attach.code.noted import notes
from repro_golden.recording.attach.code.working_trees import (
    below,
    is_alike,
    is_remote,
    name_of,
    origin_in,
    real,
    remembered,
)

__all__ = ["TESTS", "Copy", "copies", "said"]

TESTS = re.compile(r"(^|/)(tests?/|conftest\.py$|test_[^/]*\.py$|[^/]*_test\.py$)")
"""Tests, by their paths."""
_COMPILED = (".so", ".pyd")
_STAMPED = ("_version.py", "__version__.py")
"""Files that builds write a version into."""
_WORKTREE = re.compile(r".*/repro/worktrees/[^/]+/(?P<name>[^/]+)/[^/]+/at-[^/]+/[^/]+(?:/(?P<path>.*))?")
"""One of ours, which may be gone."""
_ENVIRONMENTS = "/repro/environments/"
"""Where environments are that a case's `lock` decides."""
_PROJECT = ("pyproject.toml", "setup.cfg", "setup.py")
"""Files that make a folder one that can be installed, and name its entry points."""


class Copy:
    """A package that an installer made of this repository; itself, and no equal one, is what is remembered of it.

    Attributes:
        site: The folder that it is imported from.
        files: The modules and data in it, as seen from there.
        programs: Of each program by its path what it starts, ``module:function``; '' for one that is a copy itself.
        project: The folder in the tree under test that it was made of.
        under_test: Whether it was made of the tree under test itself, so that what is compiled is of it.
        sure: Whether it is known to be of the project: an archive that lies in a checkout may be of another one.
    """

    def __init__(
        self, site: str, files: frozenset[str], programs: dict[str, str], project: str, under_test: bool, sure: bool
    ) -> None:
        self.site, self.files, self.programs = site, files, programs
        self.project, self.under_test, self.sure = project, under_test, sure

    def has(self, path: str) -> bool:
        """Whether a file is part of it."""
        inside = path.startswith(f"{self.site}{os.sep}") and path[len(self.site) + 1 :].replace(os.sep, "/")
        return inside in self.files or path in self.programs


@remembered
def copies(site: str, place: str, home: str | None) -> Sequence[Copy]:
    """Those in a folder of packages.

    Args:
        site: The folder.
        place: The working tree under test.
        home: The user's own checkout, where that is another.
    """
    return [copy for note in notes(site) if (copy := _read(site, note, place, home))]


def _read(site: str, note: str, place: str, home: str | None) -> Copy | None:
    """The package with a note of where it is from; None where that is not this repository."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # damaged: pip says so
        about, folder = json.loads(_text(note)), os.path.dirname(note)  # noqa: PTH120
        if (source := _source(about, place, home)) is None:
            return None
        starts = dict(_starts(_text(os.path.join(folder, "entry_points.txt"))))  # noqa: PTH118
        # `importlib.metadata` takes longer to import than most Pythons take to start
        rows = csv.reader(_text(os.path.join(folder, "RECORD")).splitlines())  # noqa: PTH118
        listed = [row[0].replace(os.sep, "/") for row in rows if row]
        outside = [os.path.normpath(os.path.join(site, path)) for path in listed if path.startswith("..")]  # noqa: PTH118
        programs = [path for path in outside if os.path.basename(os.path.dirname(path)) in ("bin", "Scripts")]  # noqa: PTH119, PTH120
        editable = (about.get("dir_info") or {}).get("editable")
        files = (path for path in listed if not path.startswith("..") and ".dist-info/" not in path)
        files = (path for path in files if not path.endswith(".pyc") and (not editable or path.endswith(_COMPILED)))
        named = {path: starts.get(os.path.basename(path), "") for path in programs}  # noqa: PTH119
        return Copy(os.path.normpath(site), frozenset(files), named, *source)
    return None


def _text(path: str) -> str:
    """What a file holds; nothing of one that is not there."""
    return "".join(_texts("", [path]))


def _starts(text: str) -> Iterator[tuple[str, str]]:
    """Programs by name, and what they start, of the entry points of a package."""
    section = ""
    for line in map(str.strip, text.splitlines()):
        name, is_entry, value = line.partition("=")
        if line.startswith("["):
            section = line
        elif is_entry and section in ("[console_scripts]", "[gui_scripts]"):
            yield name.strip(), value.strip()


def _source(about: Any, place: str, home: str | None) -> tuple[str, bool, bool] | None:
    """`project`, `under_test` and `sure` of a package; None where nothing says that it is of this repository."""
    here = real(place)
    if "vcs_info" in about:
        inside = os.path.join(here, about.get("subdirectory") or "")  # noqa: PTH118
        return (os.path.normpath(inside), False, True) if is_remote(about["url"], here) else None
    if not about["url"].startswith("file:"):
        return None
    from urllib.parse import unquote, urlsplit

    folder = real(unquote(urlsplit(about["url"]).path))
    worktree = _WORKTREE.fullmatch(folder)
    if worktree and worktree["name"] == name_of(here) and "dir_info" in about:
        inside = os.path.normpath(os.path.join(here, worktree["path"] or ""))  # noqa: PTH118
        return inside, below(f"{folder}/", here), True
    origin = origin_in(folder, place, home)
    if origin is None or not origin.sure:
        return None
    if "dir_info" not in about:  # an archive that was built of it lies in it
        return here, False, False
    return origin.counterpart(folder), origin.top == here, True


def said(copy: Copy, name: str, path: str, place: str, *, tests: bool) -> str | None:
    """The line for a module or program that is not what the tree under test has, with its cure; None where it is.

    Args:
        copy: What it is part of.
        name: The module.
        path: Its file.
        place: The working tree under test.
        tests: Whether the program only tests the tree: then what the tree has not may come from anywhere.
    """
    if path in copy.programs:
        return _said_of_program(copy, path, place)
    what = path if name == "__main__" else f"{name} ({path})"
    inside = path[len(copy.site) + 1 :].replace(os.sep, "/")
    top, _, rest = inside.partition("/")
    if inside.endswith(_COMPILED):
        built_of = copy.under_test or _ENVIRONMENTS in f"{copy.site}/"  # whose key is what it was built of
        if built_of or not _has_source(copy, top):
            return None
        return (
            f"{what} was compiled when it was installed, which tells nothing of the commit under test: let "
            "subject.setup of a case build it in each worktree ({python} setup.py build_ext --inplace)"
        )
    if (twin := _twin(copy, top)) is None:  # a build may have made it
        return None
    other = _other(copy, inside, os.path.join(twin, rest) if rest else twin, tests)  # noqa: PTH118
    if other is None and rest and not (tests and TESTS.search(inside)):
        other = _beside(copy, top, twin)
    if other is None:
        return None
    fix = f"let a relative path name the code, as PYTHONPATH={os.path.relpath(os.path.dirname(twin), real(place))}"  # noqa: PTH120
    if os.path.basename(twin) != top:  # noqa: PTH119 - no path makes that a package of its name
        fix = (
            "let subject.setup of a case install it into each worktree ({python} -m pip install --no-deps "
            f"--target=built ./{os.path.relpath(copy.project, real(place))}), with PYTHONPATH=built"
        )
    return (
        f"{what} was imported from a copy of this repository that was installed, not from the commit under test, where "
        f"{os.path.relpath(other, real(place))} is not the same: {fix} before repro or in subject.env of a case"
    )


def _has_source(copy: Copy, top: str) -> bool:
    """Whether the tree has the project that something compiled is of."""
    files = _listed(copy.project)
    if copy.sure or _twin(copy, top):
        return bool(files)
    module = top.partition(".")[0]
    projects = [file for file in files if os.path.basename(file) in _PROJECT]  # noqa: PTH119
    # its name, and no dependency's
    word = re.compile(rf"(?:\bname\s*=|Extension\s*\()\s*[\"'](?:[\w.]*\.)?{re.escape(module)}[\"']")
    return any(os.path.basename(file).partition(".")[0] == module for file in files) or any(  # noqa: PTH119
        word.search(text) for text in _texts(copy.project, projects)
    )


def _other(copy: Copy, inside: str, there: str, tests: bool) -> str | None:
    """What the tree should have for a file of a copy, where it has not; what a build makes is in no tree."""
    if os.path.basename(there) in _STAMPED:  # noqa: PTH119
        return None
    if os.path.lexists(there):
        return None if is_alike(os.path.join(copy.site, inside), there) else there  # noqa: PTH118
    from repro_golden.recording.attach.code.identify import ignored

    return None if tests or ignored(copy.project, [there]) else there


@remembered
def _listed(project: str) -> Sequence[str]:
    """The files of a project, as seen from there, by git; of one without a repository what a library consists of."""
    from repro_golden.recording.attach.code.identify import counted, tracked

    return sorted(tracked(project) or (os.path.relpath(path, project) for path in counted(project)))


@remembered
def _twin(copy: Copy, top: str) -> str | None:
    """What the tree has for a top-level module or package of a copy, in whichever folder and under whichever name.

    Under another name it is a folder that has most modules of the package: a build may map one to the other.
    """
    inner = [path.partition("/")[2] for path in copy.files if path.startswith(f"{top}/") and path.endswith(".py")]
    modules = {name for name in inner if name != "__init__.py"} or set(inner)
    known, named = Counter[str](), set[str]()
    for name in _listed(copy.project):
        parts = name.split("/")
        if top in parts and (parts[-1] == top or parts[-1].endswith(".py")):
            named.add("/".join(parts[: parts.index(top) + 1]))
        known.update("/".join(parts[:at]) for at in range(len(parts)) if "/".join(parts[at:]) in modules)
    alike = {place for place in known if copy.sure and 2 * known[place] > len(modules)}
    places = {place for place in named if known[place]} or alike or named
    best = min(places, key=lambda place: (-known[place], len(place), place), default=None)
    return None if best is None else os.path.join(copy.project, best)  # noqa: PTH118


@remembered
def _beside(copy: Copy, top: str, twin: str) -> str | None:
    """A file of a package's copy that is not the same in the tree; what installers left out is not known."""
    from repro_golden.recording.attach.code.identify import ignored

    mine = {path[len(top) + 1 :] for path in copy.files if path.startswith(f"{top}/") and not path.endswith(_COMPILED)}
    mine = {name for name in mine if os.path.basename(name) not in _STAMPED}  # noqa: PTH119
    there = {name: os.path.join(twin, name) for name in sorted(mine)}  # noqa: PTH118
    gone = [path for path in there.values() if not os.path.lexists(path)]
    made = ignored(copy.project, gone) if gone else frozenset()
    others = (
        path
        for name, path in there.items()
        if path not in made and not is_alike(os.path.join(copy.site, top, name), path)  # noqa: PTH118
    )
    return next(others, None)


def _said_of_program(copy: Copy, path: str, place: str) -> str | None:
    """The line for a program that the project under test does not define like that."""
    name, starts = os.path.basename(path), copy.programs[path]  # noqa: PTH119
    if starts:
        texts = [re.sub(r"(?m)#.*$", "", text) for text in _texts(copy.project, _PROJECT)]
        named, same = (rf"(?<![\w.-]){re.escape(word)}(?![\w.-])" for word in (name, starts))
        # a project that does not write it so may make it in another way
        if any(re.search(same, text) for text in texts) or not any(re.search(named, text) for text in texts):
            return None
        what = f"starts {starts}, as it did when it was installed, and the commit under test does not say that"
    else:
        files = [file for file in _listed(copy.project) if os.path.basename(file) == name]  # noqa: PTH119
        lines = [text.partition("\n")[2] for text in _texts(copy.project, files)]
        if not files or next(_texts(copy.site, [path]), "").partition("\n")[2] in lines:
            return None
        file = os.path.relpath(os.path.join(copy.project, files[0]), real(place))  # noqa: PTH118
        what = f"is a copy that was installed, and {file} of the commit under test is not the same"
    return f"{path} {what}: start a file of the commit's, or a module (python -m), in its place"


def _texts(folder: str, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        with contextlib.suppress(OSError), open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:  # noqa: PTH118, PTH123
            yield file.read()
