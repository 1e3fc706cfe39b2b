"""A program's own order of a trace's steps, where several optimizers step in turn and a trace has them by their names.

Rounds are what a closing line says of a rank's order: ``[[times, [[offset, number], ...]], ...]``. So many rounds in a
row had, for each of the trace's steps, the place of the program's own in the round, and the number of its optimizer.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Any

__all__ = ["Order", "Rounds"]

Rounds = Sequence[tuple[int, Sequence[Sequence[int]]]]


class Order:
    """A rank's own order of steps."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._firsts = list(itertools.accumulate((times * len(order) for times, order in rounds), initial=0))

    @classmethod
    def read(cls, raw: Any) -> Order:
        """What a closing line says of a rank; nothing of what is in no such form."""
        try:
            rounds = [(int(times), [(int(offset), int(number)) for offset, number in order]) for times, order in raw]
        except (TypeError, ValueError):
            rounds = []
        return cls([(times, order) for times, order in rounds if times > 0 and order])

    def around(self, index: int) -> tuple[int, Sequence[Sequence[int]]] | None:
        """The index of the first step of the round that a step is of, and its order; None where nothing tells."""
        if not 0 <= index < self._firsts[-1]:
            return None
        entry = bisect.bisect_right(self._firsts, index) - 1
        first, order = self._firsts[entry], self._rounds[entry][1]
        return index - (index - first) % len(order), order
