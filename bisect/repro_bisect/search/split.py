"""Which commits to probe next: the rule, over bitsets.

A probe x cuts the suspects S in two: S & ancestors(x) (x is BAD: the culprit is among them) and the rest. Probing the
best min(|S & anc(x)|, |S - anc(x)|) is git's rule. Here x need not be a suspect itself: a merge outside S may cut S
better than any member, and around skips it may be the only one that cuts at all. With k probes at once the parts should
be k + 1 equal ones.

Where probes differ in cost, balance per cost decides. The smaller part's share of S is at most half the bits that the
verdict is worth, so an uneven probe has to be cheap to be chosen: one at half the cost may cut off half as much. It
always cuts something off, or it is no probe at all, so that cheap ones come to an end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Generic, Self

from repro_bisect.search.dag import Commit, Dag, bits

__all__ = ["TRIES", "Risk", "Skips", "State", "price"]


# -- what skipped commits say about the untried ones near them
# Commits that cannot be tested come in runs: a broken build stays broken until somebody mends it. Two consequences,
# kept
# apart because only the first one changes an answer:
#
# - *presumed*: what lies between two commits that were skipped for the same reason is taken for skipped too, as long as
#   anything else tells suspects apart, and in the end where enough of it was tried (`split.TRIES`);
# - *risk*: what lies near skipped commits is a worse probe than its balance says. This only orders probes.

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
        presumed = 0
        for group in groups.values():
            presumed |= _between(self.dag, group, tested)
        for i in self.indices:
            presumed &= ~(1 << i)
        return presumed

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
    union = 0
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
        union |= covered
    return union


# -- which commits to probe next: the rule, over bitsets

TRIES = 16
"""Where only presumed commits could still tell suspects apart, they are tried until so many of the splitters were
skipped. A run of no more is tried whole. Where commits fail independently, up to half of them, a testable one that
would have told suspects apart is passed over in 7 of 2,940 histories (tests/test_search.py); the answer then says what
was presumed. A wide run that is broken throughout costs a dozen failing builds more than none, whatever its width."""

_SCALE = 32
"""Fractional bits of a score and of a price. Both are integers, so that equal is equal on every machine."""

_ONE = 1 << _SCALE

_SUSPECT, _OUTSIDER = 3, 2
"""Weights of a probe among the suspects and of one outside. After an outsider is BAD the suspects may have no newest
commit, and such sets cut worse later. Over thousands of random histories of 20 to 400 commits, the worst culprit cost
two probes more than with git's rule in 1 of 200 when both weighed alike, and never when they weighed 3:2, at the same
average."""


@dataclass(frozen=True)
class State(Generic[Commit]):
    """What verdicts leave to be done.

    Attributes:
        dag: the range.
        suspects: bitset S.
        splitters: indices of the commits whose verdict would tell suspects apart, tried or not, ascending, with
            |S & ancestors(x)| of each.
        skips: the skipped commits.
        tested: bitset of the commits with a GOOD or BAD verdict.
    """

    dag: Dag[Commit]
    suspects: int
    splitters: dict[int, int]
    skips: Skips[Commit]
    tested: int

    @classmethod
    def of(cls, dag: Dag[Commit], suspects: int, pool: Collection[int], skips: Skips[Commit], tested: int) -> Self:
        """The state for a set of suspects, where all that can cut it is in `pool` (ascending).

        What cuts a set cuts every larger one too, so that the splitters of a larger one serve.
        """
        size = suspects.bit_count()
        counts = zip(pool, dag.count(suspects, pool), strict=True)
        return cls(dag, suspects, {i: count for i, count in counts if 0 < count < size}, skips, tested)

    def parts(self, probes: Iterable[int]) -> list[int]:
        """The sets of suspects that GOOD and BAD verdicts of `probes` may leave, the smallest first."""
        return sorted(partition(self.dag, [self.suspects], probes), key=int.bit_count)

    def after(self, probes: Iterable[int], part: int) -> State[Commit]:
        """The state once `probes` left this part of the suspects."""
        tested = self.tested
        for i in probes:
            tested |= 1 << i
        return State.of(self.dag, part, self.splitters, self.skips, tested)

    @property
    def is_line(self) -> bool:
        """Whether the suspects form a chain: each has all earlier ones among its ancestors."""
        size = self.suspects.bit_count()
        return all(self.splitters.get(i, size) == n for n, i in enumerate(bits(self.suspects), 1))

    @cached_property
    def presumed(self) -> int:
        """Commits that count as skipped because they lie between two skips (bitset)."""
        return self.skips.presumed(self.tested)

    @cached_property
    def candidates(self) -> dict[int, int]:
        """Splitters that may be probed; those that are presumed to fail only where nothing else is left."""
        if not self.skips.indices:
            return self.splitters
        untried, presumed = self.untried, self.presumed
        likely = {i: count for i, count in untried.items() if not presumed >> i & 1}
        return likely or (untried if len(self.splitters) - len(untried) < TRIES else {})

    @cached_property
    def untried(self) -> dict[int, int]:
        """Splitters that were not skipped."""
        skipped = set(self.skips.indices)
        return {i: count for i, count in self.splitters.items() if i not in skipped}

    def choose(self, k: int, under_way: Iterable[int] = (), prices: Mapping[int, int] | None = None) -> list[int]:
        """Up to `k` candidates that together cut the suspects best, in the order they were chosen.

        Args:
            k: how many probes.
            under_way: probes under way: they cut too, and are not chosen again.
            prices: what a probe costs (`price`), where it is not 1.
        """
        key = k, tuple(under_way), tuple(sorted(prices.items())) if prices else ()
        if key not in self._chosen:
            self._chosen[key] = self._choose(k, key[1], prices or {})
        return list(self._chosen[key])

    @cached_property
    def _chosen(self) -> dict[tuple[object, ...], list[int]]:
        """What was chosen before: who asks for the bound and for the next probes asks for the same."""
        return {}

    def _choose(self, k: int, under_way: Iterable[int], prices: Mapping[int, int]) -> list[int]:
        peel = partial(self._peel, frozenset(bits(self.suspects)), prices)
        # What is under way or chosen cuts none of the parts that it leaves, so it is never chosen again.
        cells, chosen = partition(self.dag, [self.suspects], under_way), list[int]()
        while len(chosen) < k:
            cells = [cell for cell in cells if cell & (cell - 1)]  # a single suspect is decided
            added = [probe for cell, share in _shares(cells, k - len(chosen)) for probe in peel(cell, share)]
            added = list(dict.fromkeys(added))
            if not added:
                # The largest parts cannot be cut: their share goes to the others, one part at a time.
                added = next(filter(None, (peel(cell, 1) for cell in _by_size(cells))), [])
            if not added:
                break
            chosen += added
            cells = partition(self.dag, cells, added)
        return chosen

    def _peel(self, inside: frozenset[int], prices: Mapping[int, int], cell: int, share: int) -> list[int]:
        """Cut `share` parts of equal size off a cell, from the oldest end: on a line, share + 1 equal parts."""
        chosen, rest = list[int](), cell
        pool: Collection[int] = self.candidates
        lone = bool(pool) and self.presumed >> next(iter(pool)) & 1 == 1  # candidates are presumed all or none
        chance = self.skips.chances(self.tested, self.suspects.bit_count(), lone=lone) if self.skips.indices else None
        for left in range(share, 0, -1):
            size = rest.bit_count()
            best, best_score, best_price, splits = -1, 0, 1, list[int]()
            counts = self.candidates.values() if rest == self.suspects else self.dag.count(rest, pool)
            for i, below in zip(pool, counts, strict=True):
                if not 0 < below < size:
                    continue
                splits.append(i)
                # Largest where below = size / (left + 1); for one probe it is min(below, size - below).
                score = left * below if left * below < size - below else size - below
                score *= _SUSPECT if i in inside else _OUTSIDER
                # Score per cost, compared without division: cross-multiplied, the oldest of equals wins.
                cost = prices.get(i, _ONE) if prices else 1
                if chance:
                    score <<= _SCALE
                    if score * best_price <= best_score * cost:
                        continue  # no chance makes it better
                    numerator, denominator = chance(i)
                    score = score * numerator // denominator
                if score * best_price > best_score * cost:
                    best, best_score, best_price = i, score, cost
            if best < 0:
                break
            chosen.append(best)
            rest &= ~self.dag.ancestors[best]
            pool = splits
        return chosen


def price(cost: float) -> int:
    """A relative cost as a positive integer; nothing is quite free, so that of free probes the best one is chosen.

    Raises:
        ValueError: it is negative or not finite.
    """
    if not 0 <= cost < float("inf"):
        raise ValueError(f"a cost must be a finite number of at least 0, not {cost}")
    return max(1, int(cost * _ONE))


def partition(dag: Dag[Commit], cells: Iterable[int], probes: Iterable[int]) -> list[int]:
    """The non-empty parts that the verdicts of `probes` would tell apart."""
    parts = list(cells)
    for i in probes:
        mask = dag.ancestors[i]
        parts = [part for cell in parts for part in (cell & mask, cell & ~mask) if part]
    return parts


def _by_size(cells: Iterable[int]) -> list[int]:
    return sorted(cells, key=lambda cell: (-cell.bit_count(), cell & -cell))


def _shares(cells: Iterable[int], k: int) -> list[tuple[int, int]]:
    """Give k probes to the cells so that the largest size / (probes + 1) is as small as can be (D'Hondt)."""
    cells = _by_size(cells)
    sizes, shares = [cell.bit_count() for cell in cells], [0] * len(cells)
    for _ in range(k if cells else 0):
        # Compare sizes[c] / (shares[c] + 1) without division: cross-multiplied, the first of equals wins.
        best = 0
        for c in range(1, len(cells)):
            if sizes[c] * (shares[best] + 1) > sizes[best] * (shares[c] + 1):
                best = c
        shares[best] += 1
    return [(cell, share) for cell, share in zip(cells, shares, strict=True) if share]
