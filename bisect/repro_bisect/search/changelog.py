"""Which commits of a range changed the numbers: a pure function from what is known of some to what to test next.

A `Changelog` is told the numbers of points (anything that is equal where they are) and says which points to test next,
and which changed the numbers. Between two tested points with equal numbers nothing is tested unless every point is.
Between two with other numbers the house's `Search` halves; every point that it tests is kept, so that the probes of one
search serve the next.

    GOOD A ? ? ? A ? ? B ? C BAD        what lies between A and A is pruned; A..B, B..C and C..BAD are searched
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from repro_bisect.search.dag import Dag
from repro_bisect.search.first_bad import Ambiguous, Search, Verdict

__all__ = ["Changelog", "Entry", "Kind", "Survey"]

Kind = Literal["change", "merge", "group", "flaky"]


@dataclass(frozen=True)
class Entry:
    """What a changelog says of one commit, or of several that cannot be told apart.

    Attributes:
        kind: ``change``: this one changed the numbers. ``merge``: both sides that it joins had changed them, so its
            numbers are those of neither; what it added itself, if anything, cannot be told. ``group``: one or more of
            these did, and those between the ends cannot be tested.
        before: The point that it is compared with.
        after: The commit; of a group the last.
        points: All of them, oldest first.
        untried: Those that were not tested, only presumed untestable or not searched.
    """

    kind: Kind
    before: str
    after: str
    points: tuple[str, ...]
    untried: frozenset[str] = frozenset()


@dataclass
class Survey:
    """What is known of a range at one time.

    Attributes:
        entries: What is found, oldest first.
        wanted: Points that must be tested, whatever the searches say.
        searches: Those that are not at their end, the oldest interval first.
    """

    entries: list[Entry] = field(default_factory=list)
    wanted: list[str] = field(default_factory=list)
    searches: list[Search[str]] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether no probe can tell more."""
        return not self.wanted and not self.searches


class Changelog:
    """Which points of a range changed the numbers.

    A merge is on the line of its first parent that contains GOOD. Where it changed the numbers, what its other parents
    brought in is a line of its own, from where it left what the first one contains, and searched likewise.

    Attributes:
        numbers: What was told of points that can be tested, by their key.
        skips: Why the others cannot, by their key.
    """

    def __init__(
        self,
        parents: Mapping[str, Sequence[str]],
        good: str,
        bad: str,
        key: Callable[[str], Hashable],
        *,
        every: bool = False,
        moved: Callable[[Hashable, Hashable], bool] = operator.ne,
    ) -> None:
        """Take a range.

        Args:
            parents: Every point after GOOD, newest first, with those before it; see `Axis.parents`.
            good: The good end.
            bad: The bad end.
            key: Points with the same key have the same numbers: the hash of their code.
            every: Test every point.
            moved: Whether what two numbers have in common differs: those that differ need not have moved.
        """
        self.good, self.bad, self.key, self.every, self._parents = good, bad, key, every, parents
        self.moved = moved
        self.numbers: dict[Hashable, Hashable] = {}
        self.skips: dict[Hashable, str] = {}
        self._dag = Dag(parents)
        self._after: set[str] = set()
        for point in self._dag.order:  # parents first
            if any(p == good or p in self._after for p in parents[point]):
                self._after.add(point)
        self._order = {point: n for n, point in enumerate(reversed(list(parents)))}
        self.line = self.down(bad, lambda point: point == good)

    def tell(self, point: str, numbers: Hashable | None, skip: str = "") -> None:
        """What came of testing a point, and all others with its key.

        Args:
            point: It.
            numbers: Equal for equal numbers; None where it cannot be tested.
            skip: Why it cannot be. Equal reasons allow those between to be presumed.
        """
        key = self.key(point)
        self.numbers.pop(key, None)
        self.skips.pop(key, None)
        if numbers is None:
            self.skips[key] = skip
        else:
            self.numbers[key] = numbers

    def survey(self) -> Survey:
        """What is known, and what is to be tested."""
        survey = _Surveyor(self).run()
        survey.entries.sort(key=lambda entry: (self.position(entry.after), entry.kind))
        return survey

    def next(self, survey: Survey, k: int, under_way: Collection[Hashable]) -> list[str]:
        """Up to `k` points to test now, those that tell most of the oldest change first.

        Args:
            survey: The newest.
            k: How many.
            under_way: Keys of those under way.
        """
        taken, chosen = set(under_way), list[str]()

        def take(points: Iterable[str]) -> None:
            for point in points:
                if len(chosen) < k and self.key(point) not in taken:
                    taken.add(self.key(point))
                    chosen.append(point)

        take(survey.wanted)
        for search in survey.searches:
            take(search.next(k - len(chosen), under_way=[p for p in search.dag if self.key(p) in taken]))
        return chosen

    def moot(self, survey: Survey, under_way: Iterable[Hashable]) -> set[Hashable]:
        """Keys of tests under way that tell nothing any more."""
        left = set(under_way) - {self.key(p) for p in survey.wanted}
        for search in survey.searches:
            near = [p for p in search.dag if self.key(p) in left]
            left -= {self.key(p) for p in near} - {self.key(p) for p in search.moot(near)}
        return left

    def twins(self, point: str) -> list[str]:
        """All points of the range with the same key."""
        return [p for p in (self.good, *self._parents) if self.key(p) == self.key(point)]

    def before(self, point: str) -> str | None:
        """The parent on its line: the first that contains GOOD, else the first; None beyond the range."""
        parents = self._parents.get(point, ())
        inside = [p for p in parents if p == self.good or p in self._after]
        return next(iter([*inside, *parents]), None)

    def down(self, tip: str, until: Callable[[str], bool]) -> list[str]:
        """A line, oldest first: from where `until` says so, or where it leaves the range, up to `tip`."""
        line = [tip]
        while not until(line[-1]) and (parent := self.before(line[-1])) is not None:
            line.append(parent)
        return line[::-1]

    def position(self, point: str) -> int:
        """Where it is in the order of the range; GOOD, and what is before it, first."""
        return self._order.get(point, -1)

    def merges(self, point: str) -> bool:
        """Whether it joins several lines."""
        return len(self._parents.get(point, ())) > 1

    def sides(self, merge: str) -> list[list[str]]:
        """What a merge brought in: the line of each other parent, from where it left the first."""
        first = self.before(merge)
        assert first is not None
        reached, lines = {first}, list[list[str]]()
        for parent in self._parents[merge]:
            line = self.down(parent, lambda point: self._contained(point, reached))
            if len(line) > 1:
                lines.append(line)
            reached.add(parent)
        return lines

    def brought(self, merge: str) -> list[str]:
        """Every point that a merge brought in and that changes code, oldest first."""
        first, index = self.before(merge), self._dag.index
        mask = self._dag.ancestors[index[merge]] & ~(1 << index[merge])
        if first in index:
            mask &= ~self._dag.ancestors[index[first]]
        inside = self._dag.commits(mask)
        return [p for p in self._order if p in inside and self.key(p) != self.key(self.before(p) or self.good)]

    def _contained(self, point: str, tips: Collection[str]) -> bool:
        index = self._dag.index
        if point not in index:  # GOOD, or from before it: all that contains GOOD contains it
            return point in tips or any(tip == self.good or tip in self._after for tip in tips)
        return any(tip in index and self._dag.ancestors[index[tip]] >> index[point] & 1 for tip in tips)


class _Surveyor:
    """One look at what a changelog knows."""

    def __init__(self, log: Changelog) -> None:
        self.log, self.found = log, Survey()
        self._seen: set[Hashable] = set()
        self._sides: dict[str, list[list[str]] | None] = {}

    def run(self) -> Survey:
        """From the main line down to what its merges brought in."""
        self._walk(self.log.line)
        return self.found

    def _numbers(self, point: str) -> Hashable | None:
        return self.log.numbers.get(self.log.key(point))

    def _skip(self, point: str) -> str | None:
        return self.log.skips.get(self.log.key(point))

    def _known(self, points: Iterable[str]) -> bool:
        """Whether these were tested; those that were not are asked for."""
        missing = [p for p in points if self._untested(p)]
        self.found.wanted += missing
        return not missing

    def _add(self, kind: Kind, before: str, points: Sequence[str], untried: Iterable[str] = ()) -> None:
        parent = self.log.before(points[0])
        if parent is not None and self.log.key(parent) == self.log.key(before):
            before = parent  # the nearest of those with the same code
        if tuple(points) not in self._seen:  # a merge of the main line into a side brings in what is listed already
            self._seen.add(tuple(points))
            self.found.entries.append(Entry(kind, before, points[-1], tuple(points), frozenset(untried)))

    def _walk(self, line: Sequence[str]) -> None:
        key, every = self.log.key, self.log.every
        nodes = [line[0], *(b for a, b in pairwise(line) if key(a) != key(b))]  # the others cannot differ
        if self._known(nodes if every else (line[0], line[-1])):
            tested = [n for n, point in enumerate(nodes) if self._numbers(point) is not None]
            for i, j in pairwise(tested):
                if self._numbers(nodes[i]) == self._numbers(nodes[j]):
                    continue
                if j > i + 1:
                    self._between(nodes[i : j + 1])
                elif self.log.merges(nodes[j]):
                    self._merge(nodes[i], nodes[j])
                else:
                    self._add("change", nodes[i], [nodes[j]])
        if every:
            for point in line[1:]:
                if self.log.merges(point):
                    self._search_sides(point)

    def _between(self, nodes: Sequence[str]) -> None:
        """Two tested points with other numbers, and none between them that can be told apart yet."""
        dag = Dag({after: [before] for before, after in pairwise(nodes)})
        search = Search(dag, nodes[-1], [nodes[0]])
        for point in nodes[1:-1]:
            if (reason := self._skip(point)) is not None:
                search = search.with_verdict(point, Verdict.SKIP, reason)
        if search.answer is None:
            self.found.searches.append(search)
            return
        assert isinstance(search.answer, Ambiguous)
        points = list[str]()
        for before, point in pairwise(nodes):
            below = self.log.before(point)  # not on a side that is walked up to its merge
            if self.log.merges(point) and not self.log.every and below and self.log.key(below) == self.log.key(before):
                points += [p for p in self.log.brought(point) if p not in nodes and p not in points]
            points.append(point)
        self._add("group", nodes[0], points, (p for p in points if self._untested(p)))

    def _untested(self, point: str) -> bool:
        return self._numbers(point) is None and self._skip(point) is None

    def _merge(self, before: str, merge: str) -> None:
        """A merge whose numbers are not those of the line that it is on: look for who is to answer for them."""
        sides = self._search_sides(merge)
        if sides is None:
            return
        numbers, moved, sides_moved = self._numbers(merge), self.log.moved, list[list[str]]()
        for line in sides:
            last = next(p for p in reversed(line) if p != merge and self._numbers(p) is not None)
            if moved(self._numbers(line[0]), self._numbers(last)):
                if not moved(self._numbers(last), numbers):
                    return  # it has the numbers of that side, whose own rows say how they came about
                sides_moved.append(line)
            if line[-1] == merge:  # the side's tip cannot be tested
                if not moved(self._numbers(line[0]), numbers):
                    points = line[line.index(last) + 1 :]
                    self._add("group", before, points, (p for p in points if self._untested(p)))
                return  # else the walk along that side says it
        alone = len(sides_moved) == 1 and not moved(self._numbers(sides_moved[0][0]), self._numbers(before))
        self._add("change" if alone or not sides_moved else "merge", before, [merge])

    def _search_sides(self, merge: str) -> list[list[str]] | None:
        """What a merge brought in, searched; None where its ends must be tested first."""
        if merge not in self._sides:
            self._sides[merge] = None  # until it is known
            lines = [self._side(merge, line) for line in self.log.sides(merge)]
            if all(lines):
                self._sides[merge] = lines
        return self._sides[merge]

    def _side(self, merge: str, line: list[str]) -> list[str]:
        """One side between ends that can be tested, searched; empty where that is not known of them."""
        while self._skip(line[0]) is not None:
            lower = self.log.before(line[0])
            line = [self.log.good if lower is None else lower, *line]
        if not self._known((line[0], line[-1])):
            return []
        if self._skip(line[-1]) is not None and self._numbers(merge) is not None:
            line = [*line, merge]
        self._walk(line)
        return line
