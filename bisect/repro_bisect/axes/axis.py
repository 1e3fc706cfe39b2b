"""What a search goes along: commits, versions of a dependency, flags or layouts, each a graph of named points."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from repro_golden.base.canonical import digest
from repro_golden.base.errors import NotVerifiableError
from repro_golden.case.file import Case

__all__ = ["Axis", "Change", "Code", "PointInfo", "Varied", "before", "short"]

_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


def short(name: str) -> str:
    """A point as it is shown: ten digits of a commit, anything else whole."""
    return name[:10] if _COMMIT.fullmatch(name) else name


@dataclass(frozen=True)
class PointInfo:
    """What a report says of a point.

    Attributes:
        commit: Its name: of a commit its full id.
        author: Who made the commit; empty on another axis.
        date: When; likewise.
        subject: First line of the commit's message, or what the point changes.
        parents: Names of those before it.
        diffstat: ``git show --stat`` without the header; empty on another axis.
    """

    commit: str
    author: str
    date: str
    subject: str
    parents: tuple[str, ...]
    diffstat: str


class Axis(ABC):
    """Points from a good end to a bad one. Points with the same `tree` and the same case share a probe.

    Attributes:
        what: What a point is: commit, version, change or layout.
        good: The good end.
        named: What was named as the good end; another than that where both ends only have an ancestor in common.
        bad: The bad end.
        parents: Every point after the good end, newest first, with those before it.
        paths: What of the repository decides numbers.
    """

    what: str
    good: str
    named: str
    bad: str
    parents: Mapping[str, Sequence[str]]
    paths: Sequence[str]

    @abstractmethod
    def tree(self, point: str) -> str | None:
        """Hash of the subject's code there; None where there is none of it."""

    def commit(self, point: str) -> str:
        """The commit whose code is run there: where points are commits, the point."""
        return point

    def case(self, point: str, case: Case) -> Case:
        """The case as it is there: the same everywhere, where nothing else is said."""
        del point
        return case

    def skipped(self, point: str) -> str:
        """Why a point cannot be tested, where that is known without trying; else empty."""
        del point
        return ""

    @abstractmethod
    def descendants(self, point: str) -> set[str]:
        """The points that contain one, without itself."""

    @abstractmethod
    def subjects(self, points: Sequence[str]) -> dict[str, str]:
        """One line on each point."""

    @abstractmethod
    def info(self, point: str) -> PointInfo:
        """What a report says of it."""

    @abstractmethod
    def holds(self, path: str) -> str | None:
        """A commit of the axis that has a file or folder; None where none has."""

    def git_tests(self, culprit: str, verdicts: Mapping[str, str]) -> int | None:
        """Tests that `git bisect run` makes until it names a culprit; None where it cannot, or that is not known."""
        del culprit, verdicts
        return None


def before(axis: Axis, point: str, good: str) -> str:
    """What a point is compared with, to see what it did itself.

    Of a merge that is the side on which `good` lies: what the other side lacks of it is not the merge's doing.
    """
    parents = axis.info(point).parents
    if len(parents) < 2:
        return parents[0] if parents else good
    holding = {good, *axis.descendants(good)}
    return next((parent for parent in parents if parent in holding), parents[0])


@dataclass(frozen=True)
class Change:
    """One point of a `Varied` axis.

    Attributes:
        name: As it is shown.
        about: What it changes against the one before, in one line.
        apply: Makes its case of the axis's.
        skip: Why it cannot be tested; empty where that is not known yet.
        lost: What of it did not reach a program, by what that says of itself (`Header.subject`); empty where all did,
            as far as is known.
    """

    name: str
    about: str
    apply: Callable[[Case], Case] = field(compare=False)
    skip: str = ""
    lost: Callable[[Mapping[str, Any]], str] = field(default=lambda _: "", compare=False)


@dataclass(frozen=True)
class Code:
    """One commit's code.

    Attributes:
        commit: Full id of the commit.
        tree: Hash of the subject's code in it.
        paths: What holds that code.
        holds: See `Axis.holds`.
    """

    commit: str
    tree: str
    paths: Sequence[str]
    holds: Callable[[str], str | None]


class Varied(Axis):
    """One commit's code under one case after another, in a line.

    Attributes:
        what: What a point is.
        paths: What holds the subject's code.
    """

    def __init__(self, what: str, code: Code, points: Sequence[Change]) -> None:
        """A line of at least two points, the good end first.

        Args:
            what: What a point is.
            code: What is run.
            points: From the good end to the bad one.
        """
        self.what, self.paths, self._code = what, code.paths, code
        self._points = {point.name: point for point in points}
        names = list(self._points)
        self.good = self.named = names[0]
        self.bad = names[-1]
        self.parents = {names[k]: [names[k - 1]] for k in range(len(names) - 1, 0, -1)}

    def add(self, point: Change) -> None:
        """A point beside the line, such as a set of changes that a search came upon."""
        self._points[point.name] = point

    def tree(self, point: str) -> str | None:
        """Differs from point to point, although the code does not: what runs there does."""
        return digest("varied", self._code.tree, point)

    def commit(self, point: str) -> str:
        """See `Axis.commit`."""
        del point
        return self._code.commit

    def case(self, point: str, case: Case) -> Case:
        """See `Axis.case`."""
        return self._points[point].apply(case)

    def skipped(self, point: str) -> str:
        """See `Axis.skipped`."""
        return self._points[point].skip

    def refuse_lost(self, point: str, subject: Mapping[str, Any]) -> None:
        """Refuse to say anything of a point whose program ran without what the point changes.

        Args:
            point: It.
            subject: What its program says of itself (`Header.subject`).

        Raises:
            NotVerifiableError: so it was.
        """
        if lost := self._points[point].lost(subject):
            raise NotVerifiableError(f"{point}: {lost}, so that nothing can be said of it")

    def descendants(self, point: str) -> set[str]:
        """See `Axis.descendants`."""
        names = list(self._points)
        return set(names[names.index(point) + 1 :])

    def subjects(self, points: Sequence[str]) -> dict[str, str]:
        """See `Axis.subjects`."""
        return {name: self._points[name].about for name in points}

    def info(self, point: str) -> PointInfo:
        """See `Axis.info`."""
        return PointInfo(point, "", "", self._points[point].about, tuple(self.parents.get(point, ())), "")

    def holds(self, path: str) -> str | None:
        """See `Axis.holds`."""
        return self._code.holds(path)
