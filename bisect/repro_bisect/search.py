"""The search for the first bad commit: a pure function from verdicts to the next probes.

One culprit c is assumed: a commit is BAD if and only if c is among its ancestors or is itself. Verdicts may come in any
order; the state is immutable, so a search can be replayed, forked and compared:

    search = Search(Dag.between(parents, goods, bad), bad, goods)
    while search.answer is None:
        for commit in search.next(k=2):
            search = search.with_verdict(commit, judge(commit))
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Generic

from repro_bisect.contradiction import explain
from repro_bisect.dag import Commit, ContradictionError, Dag, bits
from repro_bisect.skips import presumed, risks
from repro_bisect.split import choose, partition

__all__ = ["Ambiguous", "ContradictionError", "Dag", "Found", "Search", "Verdict"]

_EXACT_BOUND = 512
"""Up to so many suspects `Search.bound` walks the whole decision tree."""
_MOST_ROUNDS = 32
"""Balanced searches end long before; a hopeless shape (a merge of thousands of lone commits) is not walked further."""


class Verdict(StrEnum):
    """What a probe says about a commit."""

    GOOD = "GOOD"
    BAD = "BAD"
    SKIP = "SKIP"
    """It cannot be tested: it does not build, import or start."""


@dataclass(frozen=True)
class Found(Generic[Commit]):
    """The first bad commit."""

    commit: Commit


@dataclass(frozen=True)
class Ambiguous(Generic[Commit]):
    """Suspects that no commit left to test can tell apart. The culprit is one of them."""

    commits: frozenset[Commit]
    presumed: frozenset[Commit] = frozenset()
    """Commits never tried, only presumed untestable, that would narrow the set if they can be tested after all."""


@dataclass(frozen=True)
class Search(Generic[Commit]):
    """All that is known about the culprit.

    Attributes:
        dag: the range; `Dag.between` makes it. Only ancestors of `bad` that are not ancestors of a good are searched.
        bad: the known bad end.
        goods: known good ends; those outside `dag` are already excluded by it.
        presume: whether commits between two skips of one reason count as skipped without being tried.
            ``dataclasses.replace(search, presume=False)`` tries them.

    Raises:
        ValueError: `bad` is not in `dag`.
        ContradictionError: `bad` is one of the goods or an ancestor of one.
    """

    dag: Dag[Commit]
    bad: Commit
    goods: Collection[Commit] = ()
    presume: bool = True
    _good: int = field(default=0, repr=False)
    _bad: int = field(default=0, repr=False)
    _skips: tuple[tuple[int, str], ...] = field(default=(), repr=False)
    # What could not cut a larger set cannot cut a smaller one: a search starts from its parent's survivors.
    _pool: tuple[int, ...] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.bad not in self.dag:
            raise ValueError(f"the bad end {self.bad} is not in the range that is searched")
        object.__setattr__(self, "goods", tuple(self.goods))
        good, bad = self._good, self._bad | 1 << self.dag.index[self.bad]
        for commit in self.goods:
            if commit in self.dag:
                good |= 1 << self.dag.index[commit]
        object.__setattr__(self, "_good", good)
        object.__setattr__(self, "_bad", bad)
        if not self._suspects:
            raise ContradictionError(f"{self.bad} is BAD but is reached from a commit that is GOOD; swap the ends?")

    def with_verdict(self, commit: Commit, verdict: Verdict | str, reason: str = "") -> Search[Commit]:
        """The search with one more verdict; the order of verdicts does not matter.

        GOOD or BAD outweighs a SKIP of the same commit. Skips of one commit for different reasons count as a skip
        for no reason.

        Args:
            commit: a commit of the range, or one of the goods.
            verdict: GOOD, BAD or SKIP.
            reason: why it was skipped. Equal non-empty reasons allow the commits between to be presumed skipped.

        Raises:
            ValueError: the commit is not in the range, or the verdict is none of the three.
            ContradictionError: no single culprit explains the verdicts.
        """
        verdict = Verdict(verdict)
        if commit not in self.dag:
            if commit not in self.goods:
                raise ValueError(f"{commit} is not in the range that is searched")
            if verdict is Verdict.BAD:
                raise ContradictionError(
                    f"{commit} is BAD but was given as a good end; record it again, or move the end"
                )
            return self
        i = self.dag.index[commit]
        good, bad, skips = self._good, self._bad, dict(self._skips)
        if verdict is Verdict.SKIP:
            skips[i] = reason if skips.get(i, reason) == reason else ""
        elif verdict is Verdict.GOOD:
            good |= 1 << i
        else:
            bad |= 1 << i
        try:
            return replace(
                self, _good=good, _bad=bad, _skips=tuple(sorted(skips.items())), _pool=tuple(self._splitters)
            )
        except ContradictionError:
            raise ContradictionError(explain(self.dag, good, bad, i)) from None

    @property
    def verdicts(self) -> dict[Commit, Verdict]:
        """Every commit of the range with a verdict, the ends included."""
        found = {self.dag.order[i]: Verdict.SKIP for i, _ in self._skips}
        found |= {self.dag.order[i]: Verdict.GOOD for i in bits(self._good)}
        return found | {self.dag.order[i]: Verdict.BAD for i in bits(self._bad)}

    @cached_property
    def suspects(self) -> frozenset[Commit]:
        """Commits that may still be the culprit: ancestors of every BAD, of no GOOD."""
        return self.dag.commits(self._suspects)

    @cached_property
    def presumed(self) -> frozenset[Commit]:
        """Untested commits that count as skipped because they lie between two skips of the same non-empty reason.

        This is cheap and may be wrong: report them as not tried. A window of w such commits costs O(log w) probes.
        Any GOOD or BAD verdict between the two skips takes it back. Empty where `presume` is off.
        """
        return self.dag.commits(self._presumed)

    @cached_property
    def answer(self) -> Found[Commit] | Ambiguous[Commit] | None:
        """The culprit, or the exact set around skips; None while a probe can still tell suspects apart."""
        if len(self.suspects) == 1:
            return Found(next(iter(self.suspects)))
        if self._candidates:
            return None
        return Ambiguous(self.suspects, self.dag.commits(self._presumed & _mask(self._splitters)))

    def next(self, k: int = 1, in_flight: Iterable[Commit] = ()) -> list[Commit]:
        """Up to `k` commits to probe at once, chosen to cut the suspects best; the same for equal searches.

        k = 1 maximises min(suspects among the ancestors, suspects elsewhere) over all untested commits of the range
        (one that is no suspect itself must be half as good again); k > 1 aims at k + 1 equal parts, which on a line of
        n takes ceil(log_{k+1} n) rounds. Near skips, commits are weighed by their chance to be testable
        (`repro_bisect.skips.risks`).

        Args:
            k: how many probes, or free workers; none for 0.
            in_flight: probes under way, whose verdicts are counted on; they are not chosen again.

        Returns:
            Fewer than `k` where fewer help; none where there is an answer or everything useful is in flight.

        Raises:
            ValueError: k < 0.
        """
        if k < 0:
            raise ValueError(f"k must be at least 0, not {k}")
        flying = [self.dag.index[c] for c in in_flight if c in self.dag]
        chosen = choose(self.dag, self._suspects, self._candidates, k, self._risks, flying)
        return [self.dag.order[i] for i in chosen]

    def moot(self, in_flight: Iterable[Commit]) -> set[Commit]:
        """The probes under way that no longer tell any suspects apart: cancel them."""
        return {c for c in in_flight if c not in self.dag or self.dag.index[c] not in self._splitters}

    def bound(self, k: int = 1) -> int:
        """Rounds of `k` probes that are still needed at most, if no further probe is skipped.

        On a line without skips it is ceil(log_{k+1} n). Elsewhere the whole decision tree is walked, for up to 512
        suspects; above that only the largest part of each cut, which is an estimate for unusual shapes.

        Raises:
            ValueError: k < 1.
        """
        if k < 1:
            raise ValueError(f"k must be at least 1, not {k}: no probes, no end")
        # A sound bound on every path would be |S| - 1: a cut always leaves less. It serves where walking is hopeless.
        most, stack = 0, [(self, 0)]
        while stack:
            search, rounds = stack.pop()
            size = search._suspects.bit_count()
            if rounds + size - 1 <= most:
                continue
            if not search._skips and search._is_line:
                most = max(most, rounds + _rounds_on_line(size, k))
                continue
            probes = search.next(k)
            if not probes:
                most = max(most, rounds)
            elif rounds >= _MOST_ROUNDS and size > _EXACT_BOUND:
                most = max(most, rounds + size - 1)
            else:
                cells = sorted(partition(self.dag, [search._suspects], map(self.dag.index.__getitem__, probes)))
                if size > _EXACT_BOUND:
                    cells = [max(cells, key=int.bit_count)]
                stack.extend((search._after(probes, cell), rounds + 1) for cell in cells)
        return most

    def _after(self, probes: Iterable[Commit], cell: int) -> Search[Commit]:
        """The search once `probes` were judged by a culprit in `cell`, which they do not cut."""
        search = self
        for commit in probes:
            bad = cell & self.dag.ancestors[self.dag.index[commit]]
            search = search.with_verdict(commit, Verdict.BAD if bad else Verdict.GOOD)
        return search

    @cached_property
    def _suspects(self) -> int:
        mask = self.dag.ancestors[self.dag.index[self.bad]]
        for i in bits(self._bad):
            mask &= self.dag.ancestors[i]
        for i in bits(self._good):
            mask &= ~self.dag.ancestors[i]
        return mask

    @cached_property
    def _splitters(self) -> dict[int, None]:
        """Indices of the range whose verdict would tell suspects apart, tried or not, ascending."""
        suspects, ancestors = self._suspects, self.dag.ancestors
        pool: Iterable[int] = self._range if self._pool is None else self._pool
        return {i: None for i in pool if (cut := ancestors[i] & suspects) and cut != suspects}

    @property
    def _range(self) -> list[int]:
        """Ancestors of the bad end that the good ends do not reach: the only commits worth probing."""
        mask = self.dag.ancestors[self.dag.index[self.bad]]
        for commit in self.goods:
            if commit in self.dag:
                mask &= ~self.dag.ancestors[self.dag.index[commit]]
        return bits(mask)

    @cached_property
    def _presumed(self) -> int:
        return presumed(self.dag, self._skips, self._good | self._bad) if self.presume else 0

    @cached_property
    def _candidates(self) -> list[int]:
        """Splitters that may be probed."""
        barred = self._presumed | _mask(i for i, _ in self._skips)
        return [i for i in self._splitters if not barred >> i & 1] if barred else list(self._splitters)

    @cached_property
    def _risks(self) -> dict[int, tuple[int, int]]:
        if not self._skips:
            return {}
        return risks(self.dag, self._skips, self._good | self._bad, self._suspects.bit_count())

    @property
    def _is_line(self) -> bool:
        """Whether the suspects form a chain: each has all earlier ones among its ancestors."""
        suspects, ancestors = self._suspects, self.dag.ancestors
        return all((ancestors[i] & suspects).bit_count() == n for n, i in enumerate(bits(suspects), 1))


def _mask(indices: Iterable[int]) -> int:
    mask = 0
    for i in indices:
        mask |= 1 << i
    return mask


def _rounds_on_line(size: int, k: int) -> int:
    """Ceil of log_{k+1} size, in integers."""
    rounds, reach = 0, 1
    while reach < size:
        rounds, reach = rounds + 1, reach * (k + 1)
    return rounds
