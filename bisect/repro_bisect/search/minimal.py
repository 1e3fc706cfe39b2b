"""The smallest part of a set of changes that still moves the numbers: delta debugging, as a pure function.

It asks of subsets whether they move the numbers, and is told that they do, do not, or cannot be tested. Two ways are
joined. First the set is built up as QuickXplain does (Junker, AAAI 2004), one needed change after the other, each found
by halving: that is about log2(n) questions for each change of the answer, where ddmin (Zeller & Hildebrandt, IEEE TSE
2002) may take n^2. Then ddmin's own step, leaving changes out, goes over what was found: it makes the answer 1-minimal
where changes undo each other, so that more of them may do less, and where some subsets cannot be tested, and it is what
proves it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

__all__ = ["Asking", "Minimal", "Response", "minimal"]


class Response(Enum):
    """What a subset of the changes does."""

    MOVES = "MOVES"
    SAME = "SAME"
    SKIP = "SKIP"


Subset = frozenset[int]
T = TypeVar("T")
Asking = Generator[Sequence[Subset], Sequence[Response], T]
"""Yields several questions at once, is sent their answers, and returns what it found."""


@dataclass(frozen=True)
class Minimal:
    """What was found.

    Attributes:
        chosen: A subset that moves the numbers, ascending.
        hidden: Its changes of which it is not known whether they are needed: the rest of it cannot be tested.
        asked: How many subsets were tried.
    """

    chosen: tuple[int, ...]
    hidden: tuple[int, ...]
    asked: int


def minimal(count: int, slots: int = 1) -> Asking[Minimal]:
    """Search for a subset of ``range(count)`` that moves the numbers, and of which nothing can be left out.

    No subset is asked for twice, nor the empty and the full one: the first is known not to move the numbers, the second
    is known to. Where no change undoes another (what moves the numbers still does with more changes) and every subset
    can be tested, no smaller part of the answer moves them. In general none does that lacks one change alone.

    Args:
        count: How many changes there are, at least one.
        slots: How many questions are answered at once.

    Yields:
        Subsets of which it is to be told what they do, at most `slots` at once.

    Returns:
        The subset.
    """
    known = _Known(count, max(1, slots))
    chosen, gap = yield from _built(known, count)
    chosen = yield from _left_out(known, chosen, 2 if gap else len(chosen))
    whole = frozenset(chosen)
    hidden = [c for c in chosen if known.found[whole - {c}] is Response.SKIP]
    return Minimal(tuple(chosen), tuple(hidden), len(known.found) - 2)


class _Known:
    """What subsets do, as far as that was asked."""

    def __init__(self, count: int, slots: int) -> None:
        self.found = {frozenset[int](): Response.SAME, frozenset(range(count)): Response.MOVES}
        self.slots = slots

    def learn(self, subsets: Iterable[Subset]) -> Asking[None]:
        """Ask for what is not known, at most `slots` at once."""
        new = [subset for subset in dict.fromkeys(subsets) if subset not in self.found]
        for k in range(0, len(new), self.slots):
            batch = new[k : k + self.slots]
            self.found.update(zip(batch, (yield batch), strict=True))

    def first_moving(self, subsets: Sequence[Subset]) -> Asking[Subset | None]:
        """The first of them that moves the numbers."""
        left = list(subsets)
        while left:
            if (moving := next((s for s in left if self.found.get(s) is Response.MOVES), None)) is not None:
                return moving
            left = [s for s in left if s not in self.found]
            yield from self.learn(left[: self.slots])
        return None


def _built(known: _Known, count: int) -> Asking[tuple[list[int], bool]]:
    """A subset that moves the numbers, and whether some of it was taken only because prefixes could not be tested.

    What moves them is always ``chosen + candidates``.
    """
    chosen, candidates, gap = list[int](), list(range(count)), False
    while candidates:
        low, high = yield from _boundary(known, chosen, candidates)
        gap = gap or high - low > 1
        chosen += candidates[max(low, 0) : high]
        candidates = candidates[: max(low, 0)]
    return sorted(chosen), gap


def _boundary(known: _Known, chosen: Sequence[int], candidates: Sequence[int]) -> Asking[tuple[int, int]]:
    """Lengths of a prefix that moves nothing and of the next longer one that does, together with `chosen`.

    Between them lie only prefixes that cannot be tested: ``[=, =, ?, ?, !]`` gives 1 and 4. A length of -1 stands for
    none, where not even `chosen` alone is known to move nothing; a second of 0 means that `chosen` is all it takes.
    """
    prefixes = [frozenset([*chosen, *candidates[:k]]) for k in range(len(candidates) + 1)]
    while True:
        states = [known.found.get(prefix) for prefix in prefixes]
        high = states.index(Response.MOVES)
        low = max((k for k in range(high) if states[k] is Response.SAME), default=-1)
        unknown = [k for k in range(low + 1, high) if states[k] is None]
        if not unknown:
            return low, high
        room = known.slots
        asked = [0] if unknown[0] == 0 else []  # most often few changes are the cause, and nothing is left to find
        rest = unknown[len(asked) :]
        room = min(room - len(asked), len(rest))
        asked += [rest[(k + 1) * len(rest) // (room + 1)] for k in range(room)]
        yield from known.learn(prefixes[k] for k in asked)


def _left_out(known: _Known, chosen: list[int], pieces: int) -> Asking[list[int]]:
    """A part of `chosen` that still moves the numbers, and no longer does where one more change is left out."""
    while True:
        pieces = min(pieces, len(chosen))
        cuts = [k * len(chosen) // pieces for k in range(pieces + 1)]
        rests = [frozenset(chosen[: cuts[k]] + chosen[cuts[k + 1] :]) for k in range(pieces)]
        if (subset := (yield from known.first_moving(rests))) is not None:
            chosen, pieces = sorted(subset), max(pieces - 1, 2)
        elif pieces == len(chosen):
            return chosen
        else:
            pieces *= 2
