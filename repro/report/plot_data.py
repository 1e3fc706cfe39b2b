"""What plots show of two traces: where they differ and how far, the pairs of the first difference, and log-probs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from repro_golden.base.canonical import mapping_of
from repro_golden.compare.kl import kl_of_step
from repro_golden.compare.step_difference import differing, unlike
from repro_golden.compare.traces import first_divergent_index, measured, named_alike
from repro_golden.trace import Row, Trace, read_dump
from repro_golden.trace.model import METRIC
from repro_golden.trace.tensor_difference import decode, ulp_histogram
from repro_golden.trace.token_columns import column_parts, kept

__all__ = ["Cell", "PlotData", "Tokens", "plot_data_of"]

SIGNALS = 48
"""Most signals of a heat-map: those that differ first."""
PAIRS = 1500
"""Most tokens of a scatter: evenly spaced ones."""


@dataclass(frozen=True)
class Cell:
    """A signal that differs at a step.

    Attributes:
        step: Position among the steps that are drawn.
        signal: Position among its signals.
        relative: The largest |a - b| of the elements at hand over the largest magnitude of the tensor; None where it
            has no size: missing on one side, other shapes, not finite, or missed by the sample.
        ulp: Most representable values between a pair; None likewise, and for a metric.
        exact: Whether every element was at hand.
        text: What differs, where there is no size.
    """

    step: int
    signal: int
    relative: float | None
    ulp: int | None
    exact: bool
    text: str = ""


@dataclass(frozen=True)
class Tokens:
    """Log-probs of the same tokens under both sides.

    Attributes:
        step: The optimizer update: that with the largest KL.
        total: Tokens that count in it.
        pairs: (a, b) in nats, of at most `PAIRS` tokens, evenly spaced.
    """

    step: int
    total: int
    pairs: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class PlotData:
    """Two traces that differ.

    Attributes:
        steps: The compared steps.
        signals: ``phase name`` of those that differ, in the order in which they do.
        more: How many further signals differ.
        cells: Where and how far.
        histogram: Of the first signal that differs: ``(most, count)`` as in `tensor_difference.ulp_histogram`.
        of: Which signal that is, at which step, and whether all of it was at hand.
        tokens: None without log-probs of one shape.
    """

    steps: Sequence[int]
    signals: Sequence[str]
    more: int
    cells: Sequence[Cell]
    histogram: Sequence[tuple[int, int]]
    of: Mapping[str, Any]
    tokens: Tokens | None

    def to_mapping(self) -> dict[str, Any]:
        """JSON types; cells as lists in the order of their attributes, floats that are not finite as hex."""
        return mapping_of(self, cells=[list(vars(cell).values()) for cell in self.cells])


def plot_data_of(
    a: Trace, b: Trace, dumped: tuple[Trace, Trace] | None = None, *, strict: bool = False
) -> PlotData | None:
    """What plots show of `b` against `a`; None where all common steps agree.

    Sizes are of what traces keep.

    Args:
        a: The baseline.
        b: The other one.
        dumped: Further replays of both that hold the first signal that differs whole, for the histogram.
        strict: Whether another name is a difference too.
    """
    b = named_alike(a, b, strict=strict)
    begin = first_divergent_index(a, b, strict=True)
    if begin is None:
        return None
    dumped = (dumped[0], named_alike(*dumped, strict=strict)) if dumped else None
    count = min(len(a.steps), len(b.steps))
    order: dict[str, int] = {}
    cells: list[Cell] = []
    first: tuple[int, Row, Row] | None = None
    for index in range(begin, count):
        for kind, row, other in differing(a.rows(index), b.rows(index), unlike(a, b).at(index)):
            name = f"{row.phase} {row.name}"
            signal = order.setdefault(name, len(order))
            if first is None and kind == "value" and other:
                first = index, row, other
            if signal < SIGNALS:
                cells.append(_cell(a, b, index, signal, kind, row, other))
    names = list(order)
    steps = [record.step for record in a.steps[:count]]
    histogram, of = _histogram(*(dumped or (a, b)), a.steps[first[0]].step, *first[1:]) if first else ([], {})
    return PlotData(steps, names[:SIGNALS], len(names[SIGNALS:]), cells, histogram, of, _tokens(a, b, begin, count))


def _cell(a: Trace, b: Trace, index: int, signal: int, kind: str, row: Row, other: Row | None) -> Cell:
    if kind != "value" or other is None:
        return Cell(index, signal, None, None, False, kind)
    size = measured(a, b, a.steps[index].step, row, other)
    ulp = None if size.numbers else size.max_ulp
    if size.nonfinite:
        return Cell(index, signal, None, ulp, size.exact, f"{size.nonfinite} not finite")
    if size.differing == 0 or size.max_abs is None:
        return Cell(index, signal, None, None, size.exact, "differs, size not measured")
    scale = max(row.absmax, other.absmax)
    relative = size.max_abs / scale if size.max_abs else 0.0  # 0.0 and -0.0 differ, by nothing
    return Cell(index, signal, relative if math.isfinite(relative) else None, ulp, size.exact)


def _histogram(a: Trace, b: Trace, step: int, row: Row, other: Row) -> tuple[list[tuple[int, int]], dict[str, Any]]:
    left, right = read_dump(a, step, row), read_dump(b, step, other)
    whole = left is not None and right is not None
    if left is not None and right is not None:
        x, y = left, right
    elif row.values is not None and other.values is not None:
        x, y, whole = row.values, other.values, True
    else:
        x, y = row.sketch, other.sketch
    histogram = ulp_histogram(row.dtype, x, y) if len(x) == len(y) and row.dtype != METRIC else []
    of = {"step": step, "phase": row.phase, "signal": row.name, "dtype": row.dtype, "exact": whole}
    return histogram, of


def _tokens(a: Trace, b: Trace, begin: int, count: int) -> Tokens | None:
    kls = {index: kl for index in range(begin, count) if (kl := kl_of_step(a, b, index)) is not None}
    if not kls:
        return None
    index = max(kls, key=lambda i: math.inf if math.isnan(kls[i][1]) else abs(kls[i][1]))
    x, y = a.row(index, "forward", "log_probs"), b.row(index, "forward", "log_probs")
    if not (x and y and x.values is not None and y.values is not None):
        return None
    keep = kept(column_parts(a.rows(index), "loss_mask").get(""), x)
    if keep is None:
        return None
    pairs = np.stack([decode(x.dtype, x.values), decode(y.dtype, y.values)], axis=1)[keep]
    chosen: Any = (
        np.unique(np.linspace(0, len(pairs) - 1, min(PAIRS, len(pairs))).round().astype(int)) if len(pairs) else []
    )
    return Tokens(a.steps[index].step, len(pairs), [(float(p), float(q)) for p, q in pairs[chosen]])
