"""The gradients' norm where one program has torch or Megatron clip, and the other clips by a function of its own.

The recorder reads the norm of the former in phase grad as ``grad_norm``, and what that program tells of it stands in
phase loss as ``grad_norm#logged``. What the latter tells of its own is ``grad_norm`` there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from repro_golden.compare.name_matching import content
from repro_golden.compare.told_metrics import ToldMetrics, base_of
from repro_golden.trace.families import is_norm
from repro_golden.trace.model import METRIC, Row

__all__ = ["Norms", "own_norms"]


class Norms(NamedTuple):
    """Norms that are read on one side of a step, and on the other at most told by the program.

    Attributes:
        tellers: By name, the side whose program tells it, ``a`` or ``b``.
        metrics: What both tell.
        at: The step's index; None where it is not known.
    """

    tellers: Mapping[str, str]
    metrics: ToldMetrics | None
    at: int | None

    def as_read(self, rows_b: Sequence[Row]) -> Sequence[Row]:
        """Rows of the other side, with what its program tells of them under the baseline's names for that."""
        return [self._as_read(row) for row in rows_b] if self.tellers else rows_b

    def _as_read(self, row: Row) -> Row:
        base = base_of(row.name)
        if row.phase != "loss" or row.dtype != METRIC or base not in self.tellers:
            return row
        rest = row.name.removeprefix(base)
        rest = f"#logged{rest}" if self.tellers[base] == "b" else rest.removeprefix("#logged")
        return replace(row, name=base + rest)

    def told_too(self, row: Row, others: Iterable[Row]) -> bool:
        """Whether one that one side alone has in a phase is told by the other's program (`instead`), with equal bits.

        In lines of text, to their digits.
        """
        norm = base_of(row.name)
        if row.dtype != METRIC or norm not in self.tellers or self.metrics is None:
            return False
        names = self.metrics.instead(self.tellers[norm], norm)
        if any(o.dtype == METRIC and base_of(o.name) in names and content(o) == content(row) for o in others):
            return True
        if row.phase != "grad" or row.number is None or self.at is None:
            return False
        return any(base_of(text) in names for text in self.metrics.in_text(self.tellers[norm], row.number, self.at))


def own_norms(rows_a: Sequence[Row], rows_b: Sequence[Row], metrics: ToldMetrics | None, index: int | None) -> Norms:
    """Those of a step that the other's program tells in its place in every step (`ToldMetrics.instead`)."""
    norms = [
        {base_of(row.name) for row in rows if row.phase == "grad" and row.dtype == METRIC and is_norm(row.name)}
        for rows in (rows_a, rows_b)
    ]
    tellers = dict.fromkeys(norms[0] - norms[1], "b") | dict.fromkeys(norms[1] - norms[0], "a")
    return Norms(
        {norm: side for norm, side in tellers.items() if metrics and metrics.instead(side, norm)}, metrics, index
    )
