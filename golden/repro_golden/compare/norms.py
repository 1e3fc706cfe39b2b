"""The gradients' norm where one program has torch or Megatron clip, and the other clips by a function of its own.

The recorder reads the norm of the former in phase grad as ``grad_norm``, and what that program tells of it stands in
phase loss as ``grad_norm#logged``. What the latter tells of its own is ``grad_norm`` there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from repro_golden.compare.name_matching import content
from repro_golden.compare.told_metrics import ToldMetrics
from repro_golden.trace.families import is_norm
from repro_golden.trace.model import METRIC, Row

__all__ = ["as_read", "own_norms", "told_too"]


def own_norms(rows_a: Sequence[Row], rows_b: Sequence[Row], told: ToldMetrics | None) -> dict[str, str]:
    """Norms that are read on one side of a step, and on the other at most told by the program, with that side.

    A program of which one is read in other steps clips at other times, or now and then: its norms are not among them.
    """
    sides = [
        {_base(row) for row in rows if row.phase == "grad" and row.dtype == METRIC and is_norm(row.name)}
        for rows in (rows_a, rows_b)
    ]
    own = dict.fromkeys(sides[0] - sides[1], "b") | dict.fromkeys(sides[1] - sides[0], "a")
    return {norm: side for norm, side in own.items() if told and told.by_itself(side, norm)}


def as_read(rows_b: Sequence[Row], norms: Mapping[str, str]) -> Sequence[Row]:
    """Rows of the other side, with the norms that its program tells under the baseline's names for what is told."""
    return [_as_read(row, norms) for row in rows_b] if norms else rows_b


def _as_read(row: Row, norms: Mapping[str, str]) -> Row:
    base = _base(row)
    if row.phase != "loss" or row.dtype != METRIC or base not in norms:
        return row
    rest = row.name.removeprefix(base)
    rest = f"#logged{rest}" if norms[base] == "b" else rest.removeprefix("#logged")
    return replace(row, name=base + rest)


def told_too(row: Row, others: Iterable[Row], norms: Mapping[str, str]) -> bool:
    """Whether such a norm that one side alone has in a phase is told by the other too, as a norm with equal bits."""
    return (
        row.dtype == METRIC
        and _base(row) in norms
        and any(o.dtype == METRIC and _base(o).endswith("norm") and content(o) == content(row) for o in others)
    )


def _base(row: Row) -> str:
    """A metric's name without what tells several of one name apart."""
    return re.split("[#@]", row.name, maxsplit=1)[0]
