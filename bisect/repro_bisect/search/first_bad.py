"""The search for the first bad commit: a pure function from verdicts to the next probes.

One culprit c is assumed: a commit is BAD if and only if c is among its ancestors or is itself. Verdicts may come in any
order; the state is immutable, so a search can be replayed, forked and compared:

    search = Search(Dag.between(parents, goods, bad), bad, goods)
    while search.answer is None:
        for commit in search.next(k=2):
            search = search.with_verdict(commit, judge(commit))
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Generic, NamedTuple

from repro_bisect.search.dag import Commit, ContradictionError, Dag, bits, explain
from repro_bisect.search.split import Skips, State, price

__all__ = ["Ambiguous", "ContradictionError", "Dag", "FirstBad", "Search", "Verdict"]

_EXACT_BOUND = 128
"""Up to so many suspects `Search.bound` walks the whole decision tree."""
_MOST_WORK = 2
"""Above that, the splitters are read so many times at most. Balanced cuts, which halve them, need no more; a hopeless
shape (a merge of thousands of lone commits, a wide run of skips) is not walked further."""


class Verdict(StrEnum):
    """What a probe says about a commit."""

    GOOD = "GOOD"
    BAD = "BAD"
    SKIP = "SKIP"
    """It cannot be tested: it does not build, import or start."""


@dataclass(frozen=True)
class FirstBad(Generic[Commit]):
    """The first bad commit."""

    commit: Commit


@dataclass(frozen=True)
class Ambiguous(Generic[Commit]):
    """Suspects that no commit left to test can tell apart. The culprit is one of them."""

    commits: frozenset[Commit]
    presumed: frozenset[Commit] = frozenset()
    """Commits never tried, only presumed untestable, that would narrow the set if they can be tested after all."""


class _Parent(NamedTuple):
    """What a search leaves to the one with one more verdict, which needs not begin anew."""

    state: State[Any]
    good: int
    bad: int


@dataclass(frozen=True)
class Search(Generic[Commit]):
    """All that is known about the culprit.

    Attributes:
        dag: the range; `Dag.between` makes it. Only ancestors of `bad` that are not ancestors of a good are searched.
        bad: the known bad end.
        goods: known good ends; those outside `dag` are already excluded by it.
        presume: whether commits between two skips of one reason count as skipped without being tried.
            ``dataclasses.replace(search, presume=False)`` tries them all.

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
    _parent: _Parent | None = field(default=None, repr=False, compare=False)

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
        parent = _Parent(self._state, self._good, self._bad)
        try:
            return replace(self, _good=good, _bad=bad, _skips=tuple(sorted(skips.items())), _parent=parent)
        except ContradictionError:
            raise ContradictionError(explain(self.dag, good, bad, i)) from None

    @property
    def verdicts(self) -> dict[Commit, Verdict]:
        """Every commit of the range with a verdict, the ends included."""
        verdicts = {self.dag.order[i]: Verdict.SKIP for i, _ in self._skips}
        verdicts |= {self.dag.order[i]: Verdict.GOOD for i in bits(self._good)}
        return verdicts | {self.dag.order[i]: Verdict.BAD for i in bits(self._bad)}

    @cached_property
    def suspects(self) -> frozenset[Commit]:
        """Commits that may still be the culprit: ancestors of every BAD, of no GOOD."""
        return self.dag.commits(self._suspects)

    @cached_property
    def presumed(self) -> frozenset[Commit]:
        """Untested commits that count as skipped because they lie between two skips of the same non-empty reason.

        This may be wrong. They are tried when nothing else tells suspects apart, but not all of a wide window, which
        costs O(log w) probes: report what is left as not tried. Any GOOD or BAD verdict between the two skips takes it
        back. Empty where `presume` is off.
        """
        return self.dag.commits(self._state.presumed)

    @cached_property
    def answer(self) -> FirstBad[Commit] | Ambiguous[Commit] | None:
        """The culprit, or the exact set around skips; None while a probe can still tell suspects apart."""
        if self._suspects.bit_count() == 1:
            return FirstBad(next(iter(self.suspects)))
        if self._state.candidates:
            return None
        return Ambiguous(
            self.suspects, frozenset(c for c in self.presumed if self.dag.index[c] in self._state.splitters)
        )

    @property
    def deciding(self) -> list[Commit]:
        """Skipped commits that would tell suspects apart, could they be tested."""
        return [self.dag.order[i] for i, _ in self._skips if i in self._state.splitters]

    def next(
        self, k: int = 1, under_way: Iterable[Commit] = (), costs: Mapping[Commit, float] | None = None
    ) -> list[Commit]:
        """Up to `k` commits to probe at once, chosen to cut the suspects best; the same for equal searches.

        k = 1 maximises min(suspects among the ancestors, suspects elsewhere) over all untested commits of the range
        (one that is no suspect itself must be half as good again); k > 1 aims at k + 1 equal parts, which on a line of
        n takes ceil(log_{k+1} n) rounds. Near skips, commits are weighed by their chance to be testable
        (`repro_bisect.search.split.Skips.chances`).

        With costs, what is maximised is that balance per cost: a probe that costs a tenth is chosen where it leaves at
        least a tenth of the best probe's smaller part. Equal costs change nothing.

        Args:
            k: how many probes, or free workers; none for 0.
            under_way: probes under way, whose verdicts are counted on; they are not chosen again.
            costs: what a probe costs relative to one that is not listed, whose cost is 1: 0 for one that is known or
                built already, more where an environment must be built first. The answer does not depend on them; the
                rounds may, and `bound` knows nothing of them.

        Returns:
            Fewer than `k` where fewer help; none where there is an answer or everything useful is under way.

        Raises:
            ValueError: k < 0, or a cost is negative or not finite.
        """
        if k < 0:
            raise ValueError(f"k must be at least 0, not {k}")
        running = [self.dag.index[c] for c in under_way if c in self.dag]
        prices = {self.dag.index[c]: price(cost) for c, cost in (costs or {}).items() if c in self.dag}
        return [self.dag.order[i] for i in self._state.choose(k, running, prices)]

    def moot(self, under_way: Iterable[Commit]) -> set[Commit]:
        """The probes under way that no longer tell any suspects apart: cancel them."""
        return {c for c in under_way if c not in self.dag or self.dag.index[c] not in self._state.splitters}

    def bound(self, k: int = 1) -> int:
        """Rounds of `k` probes that are still needed at most, if no further probe is skipped.

        On a line without skips it is ceil(log_{k+1} n). Elsewhere the whole decision tree is walked, for up to 128
        suspects; above that only the largest part of each cut, and not for long, which is an estimate for unusual
        shapes.

        Raises:
            ValueError: k < 1.
        """
        if k < 1:
            raise ValueError(f"k must be at least 1, not {k}: no probes, no end")
        most, stack, left = 0, [(self._state, 0)], _MOST_WORK * len(self._state.splitters)
        while stack:
            state, rounds = stack.pop()
            size = state.suspects.bit_count()
            # A round tells suspects apart and tries a commit, so there are no more rounds than of either.
            if rounds + min(size - 1, len(state.untried)) <= most:
                continue
            if not self._skips and state.is_line:
                most = max(most, rounds + _rounds_on_line(size, k))
                continue
            left -= len(state.splitters)
            if size > _EXACT_BOUND and left < 0:
                most = max(most, rounds + _rounds_on_line(min(size, len(state.candidates) + 1), k))
            elif probes := state.choose(k):
                parts = state.parts(probes)
                walked = parts if size <= _EXACT_BOUND else parts[-1:]
                stack.extend((state.after(probes, part), rounds + 1) for part in walked)
            else:
                most = max(most, rounds)
        return most

    @cached_property
    def _suspects(self) -> int:
        ancestors, parent = self.dag.ancestors, self._parent
        mask = parent.state.suspects if parent else ancestors[self.dag.index[self.bad]]
        for i in bits(self._bad & ~parent.bad if parent else self._bad):
            mask &= ancestors[i]
        for i in bits(self._good & ~parent.good if parent else self._good):
            mask &= ~ancestors[i]
        return mask

    @cached_property
    def _state(self) -> State[Commit]:
        known, suspects, tested = self._parent and self._parent.state, self._suspects, self._good | self._bad
        if known and (known.skips.skips, known.skips.presume) == (self._skips, self.presume):
            skips = known.skips
        else:
            skips = Skips(self.dag, self._skips, self.presume)
        if known and known.suspects == suspects:  # as after a SKIP
            return replace(known, skips=skips, tested=tested)
        return State.of(self.dag, suspects, known.splitters if known else self._range, skips, tested)

    @property
    def _range(self) -> list[int]:
        """Ancestors of the bad end that the good ends do not reach: the only commits worth probing."""
        mask = self.dag.ancestors[self.dag.index[self.bad]]
        for commit in self.goods:
            if commit in self.dag:
                mask &= ~self.dag.ancestors[self.dag.index[commit]]
        return bits(mask)


def _rounds_on_line(size: int, k: int) -> int:
    """Ceil of log_{k+1} size, in integers."""
    rounds, reach = 0, 1
    while reach < size:
        rounds, reach = rounds + 1, reach * (k + 1)
    return rounds
