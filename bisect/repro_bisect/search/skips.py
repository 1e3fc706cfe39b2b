"""What skipped commits say about the untried ones near them.

Commits that cannot be tested come in runs: a broken build stays broken until somebody mends it. Two consequences, kept
apart because only the first one changes an answer:

- *presumed*: what lies between two commits that were skipped for the same reason is taken for skipped too, as long as
  anything else tells suspects apart, and in the end where enough of it was tried (`split.TRIES`);
- *risk*: what lies near skipped commits is a worse probe than its balance says. This only orders probes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Generic

from repro_bisect.search.dag import Commit, Dag, bits

__all__ = ["Risk", "Skips"]

Risk = tuple[int, int]
"""Chance that a commit can be tested, as an exact fraction (numerator, denominator)."""

_REMEMBERED = 16
"""Walking a decision tree goes to and fro between few states of the verdicts around skips."""


class Skips(Generic[Commit]):
    """The skipped commits of a search, and what they say.

    Only verdicts between two skips change it, so searches with equal skips share one object, which remembers.
    """

    def __init__(self, dag: Dag[Commit], skips: Sequence[tuple[int, str]], presume: bool) -> None:
        """Take the index and reason of each skipped commit, ascending, and whether to presume anything."""
        self.dag, self.skips, self.presume = dag, skips, presume
        self.indices = [i for i, _ in skips]
        self._hull = _between(dag, self.indices, 0)
        self._presumed = lru_cache(_REMEMBERED)(self._find_presumed)
        self._runs = lru_cache(_REMEMBERED)(self._find_runs)

    def presumed(self, tested: int) -> int:
        """Commits between two skips of the same non-empty reason with nothing tested between them.

        Between means: on some path from the one to the other. A single GOOD or BAD verdict on any such path takes the
        presumption back for that pair.

        Args:
            tested: bitset of the commits with a GOOD or BAD verdict.

        Returns:
            A bitset without the skipped commits themselves.
        """
        return self._presumed(tested & self._hull) if self.presume else 0

    def chances(self, tested: int, size: int, *, lone: bool = False) -> Callable[[int], Risk]:
        """The chance that a commit can be tested, given where skips were met.

        If the width of a run of untestable commits is equally likely to be of any order of magnitude, a run seen to be
        L wide ends within d more commits with probability d / (L + d). So probes leave a run in growing strides, and a
        run of w costs O(log w) of them. An eighth of the suspects is added to L: the first stride is then not a timid
        one. (Of 0 to 1 times the suspects, 0.1 to 0.2 gave the fewest probes on lines of 136 and 300 with runs of 1 to
        100.) Reasons do not matter here: commits inside a mixed run stay possible probes, but poor ones.

        Args:
            tested: bitset of the commits with a GOOD or BAD verdict.
            size: the number of suspects.
            lone: take each skip for itself, and nothing between two for failing: how far a commit is from what was
                tried is then all that counts, so that probes are spread over a run.

        Returns:
            A function from indices to fractions: one, where no way leads to a skip.
        """
        runs = self._alone if lone else self._runs(tested & self._hull)

        def chance(i: int) -> Risk:
            if i not in runs.distance and not runs.reach(i):
                return 1, 1
            # d / (L + size / 8 + d) in whole numbers; inside a run d is taken as 1/2.
            eighths = 8 * runs.distance[i] or 4
            return eighths, 8 * runs.width[i] + size + eighths

        return chance

    def _find_presumed(self, tested: int) -> int:
        groups: dict[str, list[int]] = {}
        for i, reason in self.skips:
            if reason:
                groups.setdefault(reason, []).append(i)
        found = 0
        for group in groups.values():
            found |= _between(self.dag, group, tested)
        for i in self.indices:
            found &= ~(1 << i)
        return found

    def _find_runs(self, tested: int) -> Runs:
        members = _between(self.dag, self.indices, tested)
        for i in self.indices:
            members |= 1 << i
        return Runs(self.dag.neighbours, bits(members))

    @cached_property
    def _alone(self) -> Runs:
        return Runs(self.dag.neighbours, self.indices)


class Runs:
    """Connected runs of untestable commits, and how far other commits are from them.

    Attributes:
        distance: links from a commit to the nearest run, for those that were reached so far.
        width: the size of that run.
    """

    def __init__(self, neighbours: Sequence[Sequence[int]], members: list[int]) -> None:
        self._neighbours = neighbours
        self.distance, self.width = dict.fromkeys(members, 0), dict[int, int]()
        for start in members:
            if start in self.width:
                continue
            run, self.width[start] = [start], 0
            for i in run:  # it grows while it is read
                for near in neighbours[i]:
                    if near in self.distance and near not in self.width:
                        self.width[near] = 0
                        run.append(near)
            self.width.update(dict.fromkeys(run, len(run)))
        self._queue = deque(members)

    def reach(self, commit: int) -> bool:
        """Walk away from the runs, breadth first, until the commit is met; False if there is no way to it."""
        while self._queue:
            if commit in self.distance:
                return True
            i = self._queue.popleft()
            for near in self._neighbours[i]:
                if near not in self.distance:
                    self.distance[near], self.width[near] = self.distance[i] + 1, self.width[i]
                    self._queue.append(near)
        return commit in self.distance


def _between(dag: Dag[Commit], skipped: Sequence[int], tested: int) -> int:
    """Union of the intervals [a, b] of skipped commits that hold no tested commit, ends included."""
    found = 0
    for b in reversed(skipped):
        below, covered = dag.ancestors[b], 0
        for a in skipped:
            if a >= b:
                break
            # Inside an interval that was taken already, every smaller one adds nothing.
            if not covered >> a & 1:
                span = below & dag.descendants(a)
                if not span & tested:
                    covered |= span
        found |= covered
    return found
