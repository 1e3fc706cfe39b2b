"""What a search goes along: commits, versions of a dependency, flags or layouts, each a graph of named points."""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from repro_bisect.axes.arrival import Lost, lost
from repro_golden.base.canonical import digest
from repro_golden.base.errors import ReproError
from repro_golden.case.file import Case
from repro_golden.trace import Header

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
        labels: The changes that it is made of, where each can be left out.
        without: Makes its case of the axis's without some of them, or raises ReproError.
        threads: How many torch is to have; None where it was not asked.
    """

    name: str
    about: str
    apply: Callable[[Case], Case] = field(compare=False)
    skip: str = ""
    labels: Sequence[str] = ()
    without: Callable[[Case, Collection[str]], Case] = field(default=lambda case, _: case, compare=False)
    threads: int | None = None


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
        self._excused: set[str] = set()
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

    def lost(self, point: str, good: Header, made: Header, twins: Sequence[tuple[Header, Header]] = ()) -> Lost | None:
        """What of a point did not reach the process that trains.

        Args:
            point: It.
            good: Of the trace that it is compared with.
            made: Of its own.
            twins: Of two replays of one point each.
        """
        threads, asked = made.subject.get("switches", {}).get("threads"), self._points[point].threads
        if asked is not None and threads not in (None, str(asked)):
            text = f"torch.get_num_threads() is {threads} in the program (OMP_NUM_THREADS of its env, set_num_threads)"
            return Lost(text, sure=True, known=True)
        return lost(good, made, twins=twins)

    def changes_lost(self, point: str, case: Case, good: Header, made: Header) -> dict[str, Lost]:
        """Likewise of each change that a point is made of, but for those that are excused."""
        by_label: dict[str, Lost] = {}
        for label in self._points[point].labels:
            with contextlib.suppress(ReproError):  # a later one needs it
                less = self._points[point].without(case, {label})
                if label not in self._excused and (of_it := lost(good, made, less.canonical())):
                    by_label[label] = of_it
        return by_label

    def excuse(self, labels: Iterable[str]) -> None:
        """Ask no more of changes that do not show in the process that trains, and move numbers all the same."""
        self._excused.update(labels)

    def beside(self, point: str, case: Case, labels: Collection[str]) -> str | None:
        """A point beside the line: the same without some of its changes; None where there is none."""
        whole = self._points[point]
        rest = [label for label in whole.labels if label not in labels]
        try:
            whole.without(case, labels)
        except ReproError:
            return None
        if not rest:
            return None
        name = f"{point} without {' + '.join(labels)}"
        self.add(Change(name, whole.about, lambda case: whole.without(case, labels), labels=rest))
        return name

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
