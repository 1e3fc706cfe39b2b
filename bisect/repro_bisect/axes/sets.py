"""Axes other than commits: releases of a package, a file of changes, two layouts. The code is one commit's.

As with commits, what the working tree itself has changed plays no part.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from repro_bisect.axes.axis import Axis, Change, Code, Varied
from repro_bisect.axes.commits import resolve
from repro_bisect.axes.flags import FlagChange, changed, check_changes, read_flags, set_name
from repro_golden.base.canonical import digest
from repro_golden.base.errors import ReproError
from repro_golden.case.file import Case
from repro_golden.case.subject_tables import TABLES
from repro_golden.case.tables import ROUNDINGS, joined
from repro_golden.repository.checkout import Checkout
from repro_golden.repository.code_key import code_keys
from repro_golden.subjects.argv import interpreter
from repro_golden.subjects.environments.releases import parse_range, releases

__all__ = ["FlagSet", "LayoutLine", "flags_axis", "layout_axis", "package_axis", "roomy"]


def _code_of(checkout: Checkout, case: Case, at: str | None) -> Code:
    """The code of a case in a commit, HEAD by default.

    Raises:
        ReproError: there is no such commit, or it has none of the code.
    """
    ask, commit = checkout.git, resolve(checkout, at or "HEAD")

    def holds(path: str) -> str | None:
        return commit if code_keys(ask, [commit], [path]).of(commit) else None

    if not case.subject.path:  # the installed module
        return Code(commit, digest("installed"), [], holds)
    paths = checkout.paths(case)
    keys = code_keys(ask, [commit], paths)
    tree = keys.of(commit)
    if tree is None or case.subject.path in keys.absent([commit]):
        raise ReproError(
            f"{commit[:10]} has none of {case.subject.path}, the code of {case.name}: use --at COMMIT, or correct "
            "subject.path"
        )
    return Code(commit, tree, paths, holds)


# -- releases of a package


def package_axis(
    checkout: Checkout, case: Case, text: str, *, at: str | None, index: str | None, yanked: bool = False
) -> Varied:
    """The releases of ``NAME==LOW..HIGH``, each in an environment of its own; with `yanked` also those withdrawn.

    Raises:
        ReproError: no range, no such package or end, or the code is not there.
        MachineFailureError: the index could not be read.
    """
    wanted = parse_range(text)
    code = _code_of(checkout, case, at)
    available = releases(wanted, index=index, python=interpreter(case.subject, checkout.root))
    points = [
        Change(
            f"{wanted.name} {release.version}",
            f"release {k} of {len(available)}",
            lambda case, version=str(release.version): _pinned(case, wanted.name, version),  # type: ignore[misc]
            (release.incompatible if yanked else release.problem) or "",
        )
        for k, release in enumerate(available, 1)
    ]
    return Varied("version", code, points)


def _pinned(case: Case, name: str, version: str) -> Case:
    subject = case.subject.model_dump()
    pinned = subject | {"packages": subject["packages"] | {name: version}}
    return case.model_copy(update={"subject": type(case.subject).model_validate(pinned)})


# -- a file of changes


class FlagSet(Varied):
    """Changes of which any part can be made. Its line is the two ends; what lies between is added as it is asked for.

    Attributes:
        changes: All of them.
    """

    def __init__(self, code: Code, case: Case, changes: Sequence[FlagChange]) -> None:
        """See `flags_axis`."""
        self.changes, self._case = changes, case
        endpoints = [self._change(()), self._change(range(len(changes)))]
        super().__init__("set of changes", code, endpoints)

    def point(self, chosen: frozenset[int]) -> str:
        """The point at which these changes are made; one that cannot be made is a point that is skipped."""
        change = self._change(sorted(chosen))
        self.add(change)
        return change.name

    def _change(self, chosen: Sequence[int]) -> Change:
        changes = [self.changes[k] for k in chosen]
        about = f"{len(changes)} of {len(self.changes)} changes"
        return _change(set_name(self.changes, chosen), about, self._case, changes)


def flags_axis(checkout: Checkout, case: Case, path: Path, *, at: str | None) -> Varied:
    """The changes of a file: a `FlagSet`, or where they have an order a line on which each adds one.

    Raises:
        ReproError: the file cannot be read, or the changes together do not fit the case.
    """
    file = read_flags(path)
    check_changes(case, file.change)
    code = _code_of(checkout, case, at)
    if file.order == "set":
        return FlagSet(code, case, file.change)
    points = [_change(set_name(file.change, ()), "the case", case, [])]
    points += [
        _change(c.label, c.about if c.name else f"change {k + 1} of {len(file.change)}", case, file.change[: k + 1])
        for k, c in enumerate(file.change)
    ]
    return Varied("change", code, points)


def _change(name: str, about: str, case: Case, changes: Sequence[FlagChange]) -> Change:
    try:
        changed(case, changes)
    except ReproError as error:
        return Change(name, about, lambda case: case, str(error))

    def without(case: Case, labels: Collection[str]) -> Case:
        return changed(case, [change for change in changes if change.label not in labels])

    labels = [change.label for change in changes]
    return Change(name, about, lambda case: changed(case, changes), labels=labels, without=without)


# -- layouts

_RANKS = re.compile(r"(?<!\S)(--nproc[-_]per[-_]node(?:=|\s+))\d+(?!\S)")
_KEYS = {"threads": "cpus", "ranks": "ranks"}


@dataclass(frozen=True)
class _Layout:
    """One end: a table of the case file, or the case itself, and what is said beside it."""

    table: str = "case"
    threads: int | None = None
    ranks: int | None = None

    def __str__(self) -> str:
        parts = [self.table] if self.table != "case" or self == _Layout() else []
        parts += [f"{key}={n}" for key in _KEYS if (n := getattr(self, key)) is not None]
        return ",".join(parts)

    @classmethod
    def parse(cls, text: str, case: Case) -> _Layout:
        """From ``NAME``, ``KEY=N`` or several, with commas between them."""
        fields: dict[str, Any] = {}
        for word in (part.strip() for part in text.split(",")):
            key, equal, number = word.partition("=")
            if equal and key in _KEYS and re.fullmatch(r"[1-9]\d{0,5}", number):
                name, value = key, int(number)
            elif not equal and (word == "case" or word in case.layouts):
                name, value = "table", word  # type: ignore[assignment]
            else:
                known = ", ".join(["case", *case.layouts, *(f"{key}=N" for key in _KEYS)])
                raise ReproError(f"{word!r} is no layout of {case.name}: use {known}, or write a [layouts.NAME] table")
            if name in fields:
                raise ReproError(f"{text!r} says its {name} twice: say it once")
            fields[name] = value
        return cls(**fields)

    def toward(self, other: _Layout) -> list[_Layout]:
        """The layouts from here to another, each with one key more of it."""
        line, at = [self], self
        for key in ("table", *_KEYS):
            if getattr(at, key) != getattr(other, key):
                at = replace(at, **{key: getattr(other, key)})
                line.append(at)
        return line

    def key_of(self, before: _Layout) -> str:
        """What it changes against the one before."""
        keys = [key for key in ("table", *_KEYS) if getattr(self, key) != getattr(before, key)]
        unset = "the layout's own"
        return ", ".join(f"{key}: {getattr(before, key) or unset} -> {getattr(self, key) or unset}" for key in keys)

    def of(self, case: Case) -> Case:
        """The case in this layout.

        Raises:
            ReproError: it does not fit the case.
        """
        subject, resources = case.subject.model_dump(), case.resources.model_dump()
        table = case.layouts.get(self.table)
        if table:
            resources |= {key: n for key in ("ranks", "cpus", "gpus") if (n := getattr(table, key)) is not None}
            if table.command:
                subject |= {"command": table.command, "save": "", "resume": ""}
            subject["env"] = subject["env"] | table.env
            if table.flags:
                subject["flags"] = [*subject.get("flags", ()), *table.flags]
            if table.config:
                subject["config"] = joined(subject.get("config", {}), table.config)
        resources |= {"cpus": self.threads} if self.threads else {}
        if self.ranks:
            resources["ranks"] = self.ranks
            subject |= {line: _launched(subject[line], self.ranks) for line in ("command",) if line in subject}
        raw = case.model_dump() | {"subject": subject, "resources": resources}
        try:
            return Case.model_validate(raw)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(str(part) for part in problem["loc"] if part not in ("subject", *TABLES))
            text = problem["msg"].removeprefix("Value error, ")
            text = f"{problem['loc'][-1]} is not for kind {case.subject.kind}" if "extra" in problem["type"] else text
            raise ReproError(
                f"the layout {self} does not fit {case.name}: {where + ': ' if where else ''}{text}"
            ) from None


def _launched(command: str, ranks: int) -> str:
    """A torchrun line for so many processes; another line as it is. All else in it stays as it is written."""
    return _RANKS.sub(rf"\g<1>{ranks}", command, count=1)


class LayoutLine(Varied):
    """From one layout to another, one key after the other.

    Attributes:
        keys: What each point but the first changes.
        tolerance: How far apart both ends may be in units of epsilon, as the case says.
        absolute: How far signals may be in their own unit, by glob, likewise.
        relative: How far signals may be as a share of the larger, by glob, likewise.
        roomy: The case with what the largest of its layouts needs of a machine, for whoever makes room for probes.
    """

    def __init__(self, code: Code, case: Case, line: Sequence[_Layout]) -> None:
        """See `layout_axis`."""
        cases = [layout.of(case) for layout in line]
        self.keys = {str(after): after.key_of(before) for before, after in itertools.pairwise(line)}
        self.tolerance, self.absolute, self.relative = _bounds(case, line[0], line[-1])
        most = {key: max(getattr(c.resources, key) for c in cases) for key in ("cpus", "gpus", "ranks")}
        self.roomy = case.model_copy(update={"resources": case.resources.model_copy(update=most)})
        abouts = [self.keys.get(str(layout), "the first layout") for layout in line]
        points = [_placed(str(layout), about, c) for layout, about, c in zip(line, abouts, cases, strict=True)]
        super().__init__("layout", code, points)


def _bounds(case: Case, a: _Layout, b: _Layout) -> tuple[float, Mapping[str, float], Mapping[str, float]]:
    """How far apart two layouts may be: between the case and one of its tables alone as the table says."""
    nightly, names = case.nightly, {str(a), str(b)}
    roundings = ROUNDINGS if case.subject.system else {}
    tolerance, absolute, relative = nightly.tolerance, nightly.absolute or roundings, nightly.relative
    if "case" in names and (table := case.layouts.get(min(names - {"case"}))):
        tolerance = tolerance if table.tolerance is None else table.tolerance
        absolute = absolute if table.absolute is None else table.absolute
        relative = relative if table.relative is None else table.relative
    return tolerance, absolute, relative


def _placed(name: str, about: str, laid_out: Case) -> Change:
    """A point whose subject and resources are those of a case, whatever the one is that it is applied to."""
    update = {"subject": laid_out.subject, "resources": laid_out.resources}
    asked = re.search(r"(?:^|,)threads=(\d+)", name)
    threads = int(asked[1]) if asked else None
    return Change(name, about, lambda case: case.model_copy(update=update), threads=threads)


def layout_axis(checkout: Checkout, case: Case, text: str, *, at: str | None) -> LayoutLine:
    """The layouts of ``A..B``.

    Raises:
        ReproError: no such layouts, both are one, or one of them does not fit the case.
    """
    a, dots, b = text.partition("..")
    if not (dots and a and b):
        raise ReproError(f"{text!r} is no pair of layouts: write A..B, such as threads=1..threads=4")
    if "case" in case.layouts:
        raise ReproError(f"{case.name}: [layouts.case] is what the case itself is called: give it another name")
    endpoints = [_Layout.parse(end, case) for end in (a, b)]
    line = endpoints[0].toward(endpoints[1])
    if len({layout.of(case).digest for layout in endpoints}) == 1:
        raise ReproError(f"{a} and {b} are one layout of {case.name}: give two that differ")
    return LayoutLine(_code_of(checkout, case, at), case, line)


def roomy(axis: Axis, case: Case) -> Case:
    """The case by which a machine makes room for the probes of an axis."""
    return axis.roomy if isinstance(axis, LayoutLine) else case
