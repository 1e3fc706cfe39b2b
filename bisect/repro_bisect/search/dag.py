"""A range of commits as a DAG whose ancestor sets are bitsets.

Commits are numbered in a topological order (parents first); a set of commits is a Python int whose bit i stands for
commit i.

The ancestors of a commit are kept as its gaps: the lower numbers that it does *not* contain. A history that merges its
branches has few of them, near the commit itself. So a range needs memory in proportion to its length, and how many
members of a set each commit contains is a prefix sum less a small correction (`Dag.count`). Other shapes (a branch as
old as the range that is merged last, random parents) have gaps of up to n^2 / 16 bytes, and counting reads them all.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate
from typing import Generic, TypeVar

__all__ = ["Ancestors", "Commit", "ContradictionError", "Dag", "Gaps", "bits", "explain", "gaps_of"]

Commit = TypeVar("Commit", bound=Hashable)
"""Whatever names a commit: a hash, a version, a number."""

Gaps = tuple[int, int]
"""(start, mask): bit j of the mask stands for commit 8 * start + j. Whole bytes, because sets are cut there."""

_DIGITS = bytes.maketrans(b"01", b"\0\1")


class ContradictionError(ValueError):
    """Verdicts that no single culprit explains: monotonicity does not hold."""


@dataclass(frozen=True, eq=False)
class Dag(Generic[Commit]):
    """Commits and their parents.

    Attributes:
        parents: the parents of each commit. Parents that are no keys lie outside the range and are ignored; so a
            first-parent search is the same class over a mapping that lists only first parents.
        order: the commits, parents first. Equal mappings in equal order give equal orders.
        ancestors: for each index, the bitset of that commit and all its ancestors, made when asked for.

    Raises:
        ValueError: the parents form a cycle.
    """

    parents: Mapping[Commit, Sequence[Commit]]
    order: tuple[Commit, ...] = field(init=False, repr=False)
    ancestors: Ancestors = field(init=False, repr=False)

    def __post_init__(self) -> None:
        inside = {c: tuple(p for p in dict.fromkeys(ps) if p in self.parents) for c, ps in self.parents.items()}
        try:
            order = tuple(TopologicalSorter(inside).static_order())
        except CycleError as error:
            cycle = " -> ".join(map(str, error.args[1]))
            raise ValueError(f"the parents form a cycle: {cycle}; a history has none, check the mapping") from None
        object.__setattr__(self, "parents", inside)
        object.__setattr__(self, "order", order)
        gaps: list[Gaps] = []
        for i, commit in enumerate(order):
            gaps.append(gaps_of(i, [self.index[p] for p in inside[commit]], gaps))
        object.__setattr__(self, "ancestors", Ancestors(gaps))

    @classmethod
    def between(cls, parents: Mapping[Commit, Sequence[Commit]], goods: Iterable[Commit], bad: Commit) -> Dag[Commit]:
        """The range to search: `bad` and its ancestors, less the goods and theirs.

        # [G, ?, ?, B]     one good end: (G..B]
        # [G, ?, B] and [G', ?, B]     several: what only B reaches

        Raises:
            ValueError: `bad` is no key of `parents`.
            ContradictionError: `bad` is one of the goods or an ancestor of one.
        """
        if bad not in parents:
            raise ValueError(f"{bad} is not in the history that was given; fetch it, or check its name")
        excluded: set[Commit] = set()
        for good in goods:
            _reach(parents, good, excluded)
            if bad in excluded:
                raise ContradictionError(f"{bad} is BAD but is reached from {good}, which is GOOD; swap the ends?")
        reached = set(excluded)
        _reach(parents, bad, reached)
        return cls({c: ps for c, ps in parents.items() if c in reached and c not in excluded})

    @cached_property
    def index(self) -> dict[Commit, int]:
        """The number of each commit: its place in `order`."""
        return {commit: i for i, commit in enumerate(self.order)}

    def descendants(self, i: int) -> int:
        """The bitset of commit i and all its descendants."""
        if i not in self._descendants:
            held = ["1"]
            for start, mask in self.ancestors.gaps[i + 1 :]:
                at = i - 8 * start
                held.append("0" if at >= 0 and mask >> at & 1 else "1")
            self._descendants[i] = int("".join(reversed(held)), 2) << i
        return self._descendants[i]

    @cached_property
    def _descendants(self) -> dict[int, int]:
        """Those that were asked for: of skipped commits, and there are few."""
        return {}

    @cached_property
    def neighbours(self) -> tuple[tuple[int, ...], ...]:
        """For each index, the indices of its parents and children."""
        near: list[list[int]] = [[] for _ in self.order]
        for i, commit in enumerate(self.order):
            for parent in self.parents[commit]:
                near[i].append(self.index[parent])
                near[self.index[parent]].append(i)
        return tuple(map(tuple, near))

    def count(self, members: int, pool: Iterable[int]) -> list[int]:
        """For each index of `pool`, how many of `members` (a bitset, not empty) are that commit or its ancestors."""
        first = ((members & -members).bit_length() - 1) // 8  # in bytes, like the gaps
        members >>= 8 * first
        upto = list(accumulate(f"{members:b}".encode().translate(_DIGITS)[::-1]))
        packed = members.to_bytes(len(upto) // 8 + 1, "little")
        last, gaps, cut, counts = len(upto) - 1, self.ancestors.gaps, int.from_bytes, list[int]()
        for i in pool:
            at = i - 8 * first
            if at < 0:
                counts.append(0)
                continue
            count = upto[at if at < last else last]
            start, mask = gaps[i]
            if mask:
                start -= first
                if start < 0:
                    mask, start = mask >> -8 * start, 0
                count -= (cut(packed[start : start + mask.bit_length() // 8 + 1], "little") & mask).bit_count()
            counts.append(count)
        return counts

    def commits(self, mask: int) -> frozenset[Commit]:
        """The commits of a bitset."""
        return frozenset(self.order[i] for i in bits(mask))

    def __contains__(self, commit: object) -> bool:
        return commit in self.parents

    def __iter__(self) -> Iterator[Commit]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


class Ancestors:
    """For each index, the bitset of that commit and all its ancestors."""

    def __init__(self, gaps: Sequence[Gaps]) -> None:
        self.gaps = gaps

    def __getitem__(self, i: int) -> int:
        start, mask = self.gaps[i]
        return (2 << range(len(self.gaps))[i]) - 1 ^ mask << 8 * start

    def __len__(self) -> int:
        return len(self.gaps)


def bits(mask: int) -> list[int]:
    """The indices of a bitset, ascending."""
    first = max(0, (mask & -mask).bit_length() - 1)
    # One pass over the digits: taking the lowest bit off again and again would be quadratic.
    return [i for i, digit in enumerate(reversed(f"{mask >> first:b}"), first) if digit == "1"]


def gaps_of(i: int, parents: Sequence[int], gaps: Sequence[Gaps]) -> Gaps:
    """The gaps of commit i: what each of its parents lacks."""
    first, common = 0, (1 << i) - 1 if not parents else -1
    for p in parents:
        start, mask = gaps[p]
        if not mask:
            start = (p + 1) // 8
        # A parent lacks everything between itself and i, too.
        mask |= (1 << i - 8 * start) - (1 << p + 1 - 8 * start)
        if start > first:
            first, common = start, common >> 8 * (start - first)
        common &= mask >> 8 * (first - start)
    skip = max(0, (common & -common).bit_length() - 1) // 8
    return (first + skip, common >> 8 * skip) if common else (0, 0)


def _reach(parents: Mapping[Commit, Sequence[Commit]], start: Commit, seen: set[Commit]) -> None:
    """Add `start` and all its ancestors to `seen`, which is closed under parents already."""
    stack = [start]
    while stack:
        commit = stack.pop()
        if commit not in seen:
            seen.add(commit)
            stack.extend(parents.get(commit, ()))


# -- which two verdicts do not go together, in one line

_FIX = "the fault is not monotonic here: judge both again, or search for one change at a time"


def explain(dag: Dag[Commit], good: int, bad: int, newest: int) -> str:
    """Name the newest verdict and one that it contradicts.

    Args:
        dag: the range.
        good: bitset of the GOOD commits.
        bad: bitset of the BAD commits. No commit is an ancestor of all of these and of none of `good`.
        newest: index of the commit whose verdict, in one of the sets, left no suspect.
    """
    name = dag.order
    if good & bad & 1 << newest:
        return f"{name[newest]} was judged both GOOD and BAD; {_FIX}"
    is_good = bool(good >> newest & 1)
    # GOOD commits contain no BAD one: the nearest commit that breaks this is named.
    if is_good and (below := bad & dag.ancestors[newest]):
        return f"{name[newest]} is GOOD but contains {name[bits(below)[-1]]}, which is BAD; {_FIX}"
    if not is_good and (above := good & dag.descendants(newest)):
        return f"{name[bits(above)[0]]} is GOOD but contains {name[newest]}, which is BAD; {_FIX}"
    # Otherwise the BAD commits share no suspect that the GOOD ones leave: name the BAD one that shares least.
    excluded = 0
    for i in bits(good):
        excluded |= dag.ancestors[i]
    common = dag.ancestors[newest] & ~(0 if is_good else excluded)
    shared = {i: (dag.ancestors[i] & common).bit_count() for i in bits(bad & ~(1 << newest))}
    other = name[min(shared, key=lambda i: (shared[i], i))]
    verdict = "GOOD" if is_good else "BAD"
    return f"{name[newest]} is {verdict} and {other} is BAD: with the other verdicts no commit explains both; {_FIX}"
