"""What of two trainings is the same to the end, where only what stands beside it differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from repro_golden.compare.coverage import RATES, Coverage, kind_of
from repro_golden.compare.step_difference import Difference, differing, unlike
from repro_golden.trace import Row, Trace

__all__ = ["untouched"]

_BESIDE = frozenset({
    "state", "number", "own", "scaler", "buffer", "unsaved", "frozen", "module", "copy", "leaf", "rng", "saved",
})  # fmt: skip
"""Kinds of signals that are neither read nor updated nor told: what they do to the training shows in those that are."""


def untouched(a: Trace, b: Trace, looked: Coverage) -> str:
    """The sentence for two traces of which no trained parameter, gradient or metric has other bits, though others do.

    One with the same bits in another shape has no other ones. Metrics are named where both tell the same in each step,
    and what changed where nothing is on one side alone.

    Args:
        a: The baseline.
        b: The other trace, under the baseline's names.
        looked: What was compared.

    Returns:
        ``trained parameters and gradients have the same bits in all 8 steps``, with what changed where no value did;
        '' where one of them differs too, no parameter is shown, or one trace is longer.
    """
    count = len(a.steps)
    if not looked.parameters or not count or count != len(b.steps):
        return ""
    only_one, kinds, alone = unlike(a, b), set[str](), False
    for index in range(count):
        if a.steps[index].root == b.steps[index].root:
            continue
        rows_a, rows_b = a.rows(index), b.rows(index)
        alone = alone or {row.key for row in rows_a} != {row.key for row in rows_b}
        for difference, row, other in differing(rows_a, rows_b, only_one.at(index)):
            what = _what(difference, row, other)
            if what != _SHAPE and _kind(row) not in _BESIDE:
                return ""
            kinds.add(what)
    metrics = _metrics(a)
    logged = metrics == _metrics(b) and any(metrics) and not looked.unsure
    parts = ["trained parameters", *(["gradients"] * bool(looked.gradients)), *(["metrics"] * logged)]
    steps = f"all {count} steps" if count > 1 else "the one step"
    form = f": {kinds.pop()} changed" if len(kinds) == 1 and "" not in kinds and not alone else ""
    return f"{_listed(parts)} have the same bits in {steps}{form}"


_SHAPE = "only a shape"


def _what(difference: Difference, row: Row, other: Row | None) -> str:
    """Which form of a signal differs, and not its content; '' for any other difference."""
    if other is None or row.placement != other.placement:
        return ""
    if difference == "shape" and row.lanes == other.lanes:
        return _SHAPE
    return "only a dtype" if difference == "dtype" and row.shape == other.shape else ""


def _metrics(trace: Trace) -> list[set[str]]:
    """The metrics of each step that are compared by bits, beside learning rates."""
    return [{name for name in step.compared if not RATES.fullmatch(name)} for step in trace.steps]


def _kind(row: Row) -> str:
    """Its kind, of what the end shows that of the object which is shown once more."""
    kind = kind_of(row)
    return kind_of(replace(row, name=row.name.partition("end/")[2])) if kind == "end" else kind


def _listed(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
