"""Optimizers that step in turn, in the order in which another trace has them.

Steps of one round stand in the order of the optimizers' parameter names, so a rename can exchange them. A trace is
shown in the baseline's order where what each optimizer showed in the first round is, bit for bit, what one of the
baseline's did.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from repro_golden.base.canonical import digest
from repro_golden.compare.name_matching import Content, content
from repro_golden.fingerprint.definition import SCHEME
from repro_golden.trace import Row, Trace
from repro_golden.trace.families import BESIDE, UNREAD, family, optimizers
from repro_golden.trace.model import METRIC, StepRecord, chain, root

__all__ = ["in_order_of"]

_NAME = re.compile(r"((?:start/|end/)?)(optimizer\.\d+/)?(.*)", re.DOTALL)


def in_order_of(a: Trace, b: Trace) -> Trace | None:
    """`b` with the steps of each round in the baseline `a`'s order, and its optimizers numbered so; None for no other.

    Raises:
        ReproError: rows of the first round are missing or damaged.
    """
    turns, others = _turns(a), _turns(b)
    if len(turns) < 2 or len(turns) != len(others):
        return None
    shown = [_shown(b.rows(index)) for index in range(len(others))]
    order = list[int]()
    for index in range(len(turns)):
        wanted = _shown(a.rows(index))
        place = next((k for k, one in enumerate(shown) if one == wanted and k not in order), None)
        if place is None:
            return None
        order.append(place)
    numbers = {others[place]: turn for place, turn in zip(order, turns, strict=True)}
    return None if order == sorted(order) and others == turns else _Turned(b, order, numbers)


def _turns(trace: Trace) -> list[str]:
    """The optimizers of the first round in the order of their steps, as their signals' names begin."""
    turns = list[str]()
    for index in range(len(trace.steps)):
        stepped = optimizers(trace.rows(index))
        if len(stepped) != 1 or (turn := next(iter(stepped))) in turns:
            return turns
        turns.append(turn)
    return turns


def _shown(rows: Sequence[Row]) -> Counter[tuple[str, Content]]:
    """What one optimizer showed, without names."""
    return Counter((row.phase, content(row)) for row in rows if not _beside(row))


def _beside(row: Row) -> bool:
    return family(row.phase, row.name) in BESIDE


class _Turned(Trace):
    """A trace whose rounds are in another order; what lives beside the optimizers stands with the last of a round.

    Args:
        source: The trace.
        order: For each place in a round, the place of that step in the source's.
        numbers: For the beginning of an optimizer's names, the one that it has here.
    """

    def __init__(self, source: Trace, order: Sequence[int], numbers: Mapping[str, str]) -> None:
        self.directory, self.header, self.end = source.directory, source.header, source.end
        self._source, self._order, self._numbers = source, order, numbers
        self.steps: list[StepRecord] = []
        previous = digest("chain", SCHEME)
        for index, record in enumerate(source.steps):
            own, rows = self._own(index), self.rows(index)
            names = {x.name: y.name for x, y in zip(own, rows, strict=True) if x.dtype == METRIC}
            made = source.steps[self._place(index)]
            metrics = {names.get(name, name): value for name, value in made.metrics.items()}
            previous = chain(previous, record.step, step_root := root(rows))
            self.steps.append(replace(made, step=record.step, root=step_root, chain=previous, metrics=metrics))

    def rows(self, index: int) -> list[Row]:
        """See `Trace.rows`."""
        return [replace(row, name=self._name(row)) for row in self._own(index)]

    def _own(self, index: int) -> list[Row]:
        """A step's rows, under the source's names."""
        size = len(self._order)
        first = index - index % size
        own = [row for row in self._source.rows(self._place(index)) if not _beside(row)]
        last = min(first + size, len(self._source.steps)) - 1
        beside = [row for row in self._source.rows(last) if _beside(row)] if index == last else []
        return own + beside

    def name_of(self, phase: str, name: str) -> str:
        """See `Trace.name_of`."""
        return self._source.name_of(phase, name)

    def _place(self, index: int) -> int:
        """Where a step is in the source; a round that was cut off is left as it is."""
        size = len(self._order)
        first = index - index % size
        return first + self._order[index % size] if first + size <= len(self._source.steps) else index

    def _name(self, row: Row) -> str:
        match = _NAME.fullmatch(row.name)
        assert match is not None, "the pattern fits every text"
        start, number, rest = match[1], match[2] or "", match[3]
        of_one = row.phase in ("grad", "update") and row.name != UNREAD and family(row.phase, rest) not in BESIDE
        if not (number or start == "start/" or of_one):
            return row.name
        return f"{start}{self._numbers.get(number, number)}{rest}"
