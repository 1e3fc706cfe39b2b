"""What of two trainings is the same to the end, where only what stands beside it differs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import IntEnum

from repro_golden.compare.coverage import RATES, Coverage, kind_of
from repro_golden.compare.step_difference import Difference, differing, unlike
from repro_golden.trace import Row, Trace

__all__ = ["Reach", "reach", "untouched"]

_BESIDE = frozenset({
    "state", "number", "own", "scaler", "buffer", "unsaved", "frozen", "module", "copy", "leaf", "rng", "saved",
})  # fmt: skip
"""Kinds of signals that are neither read nor updated nor told: what they do to the training shows in those that are."""
_TRAINED = frozenset({"parameter", "gradient"})


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
    kinds, alone = set[str](), False
    for differences, one_sided in _differences(a, b):
        if any(what != _SHAPE and kind not in _BESIDE for kind, what in differences):
            return ""
        kinds |= {what for _, what in differences}
        alone = alone or one_sided
    metrics = _metrics(a)
    logged = metrics == _metrics(b) and any(metrics) and not (looked.unsure or looked.counters)
    parts = ["trained parameters", *(["gradients"] * bool(looked.gradients)), *(["metrics"] * logged)]
    steps = f"all {count} steps" if count > 1 else "the one step"
    form = f": {kinds.pop()} changed" if len(kinds) == 1 and "" not in kinds and not alone else ""
    return f"{_listed(parts)} have the same bits in {steps}{form}"


class Reach(IntEnum):
    """How near to the training what differs comes."""

    BESIDE = 0  # state, buffers, copies, files: what they do to the training shows in the others
    TOLD = 1  # a metric, or another number that is read or told
    TRAINED = 2  # a trained parameter or gradient that both have: one more may be trained by nothing


def reach(a: Trace, b: Trace) -> Reach:
    """The nearest that any difference of two traces comes, over the steps that both have.

    Args:
        a: A trace.
        b: Another, under the first one's names.
    """
    nearest = Reach.BESIDE
    for differences, _ in _differences(a, b):
        for kind, what in differences:
            if what != _SHAPE and kind not in _BESIDE:
                trained = kind in _TRAINED and what != _ALONE
                nearest = max(nearest, Reach.TRAINED if trained else Reach.TOLD)
        if nearest is Reach.TRAINED:
            break
    return nearest


def _differences(a: Trace, b: Trace) -> Iterator[tuple[list[tuple[str, str]], bool]]:
    """By step what differs: of each signal its kind and the form in which alone it does; and if any is on one side."""
    only_one = unlike(a, b)
    for index in range(min(len(a.steps), len(b.steps))):
        if a.steps[index].root == b.steps[index].root:
            continue
        rows_a, rows_b = a.rows(index), b.rows(index)
        alone = {row.key for row in rows_a} != {row.key for row in rows_b}
        differences = differing(rows_a, rows_b, only_one.at(index))
        yield [(_kind(row), _what(difference, row, other)) for difference, row, other in differences], alone


_SHAPE, _ALONE = "only a shape", "one side alone"


def _what(difference: Difference, row: Row, other: Row | None) -> str:
    """Which form of a signal differs, and not its content; '' for any other difference of what both sides have."""
    if other is None:
        return _ALONE
    if row.placement != other.placement:
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
