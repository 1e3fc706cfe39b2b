"""One check of a trainer's CI, asked of one step: whether the baseline shows what it reads, and what breaks it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from repro_bisect.predicates.ci_inputs import Seen
from repro_bisect.predicates.ci_table import CiCheck, How
from repro_golden.compare.mismatch import difference, exact_sum
from repro_golden.compare.step_difference import differing, unlike
from repro_golden.compare.traces import Divergence
from repro_golden.trace.token_columns import Floats

__all__ = ["Asked"]


@dataclass(frozen=True)
class Asked:
    """A check with the thresholds that it is asked with.

    Attributes:
        check: Which.
        limits: By name, as `ci_table.OPTIONS` has them.
        strict: Whether the threshold itself is over it.
    """

    check: CiCheck
    limits: Mapping[str, float]
    strict: bool

    @property
    def allowed(self) -> str:
        """What is good, in words."""
        under = "<" if self.strict else "<="
        limits = {name: f"{value:.6g}" for name, value in self.limits.items()}
        return {
            "near": "|x| {under} {atol}", "range": "{low} < x < {high}", "tokens": "|x - y| {under} {atol}",
            "means": "|x - y| {under} {atol}", "relative": "+-{rtol} of the larger", "hashes": "equal", "bits": "equal",
        }[self.check.how].format(under=under, **limits)  # fmt: skip

    def due(self, step: int, per_rollout: int) -> bool:
        """Whether it holds at an update, by its number from 0."""
        when = self.check.when
        return when == "every" or step == 0 or (when == "rollout" and step % per_rollout == 0)

    def shown(self, seen: Seen) -> bool:
        """Whether a baseline's step shows what it reads."""
        return _SHOWN[self.check.how](self.check, seen)

    def broken(self, a: Seen, b: Seen) -> Divergence | None:
        """What of a probe's step `b` breaks it, where the baseline's step `a` shows what it reads."""
        return next(_not_finite(self.check, a, b), None) or next(_BROKEN[self.check.how](self, a, b), None)

    def near(self, x: float) -> bool:
        """Whether a number is near 0; NaN and infinities never are."""
        limit = self.limits["atol"]
        return math.isfinite(x) and (x == 0 or abs(x) < limit or (not self.strict and abs(x) <= limit))

    def found(self, seen: Seen, phase: str, signal: str, what: str) -> Divergence:
        """A violation."""
        return Divergence(seen.step, phase, signal, "bound", f"{what}; ci:{self.check.name} allows {self.allowed}")


# -- what a baseline shows


def _metrics_shown(check: CiCheck, seen: Seen) -> bool:
    return all(seen.metric(name) for name in check.metrics)


def _columns_shown(check: CiCheck, seen: Seen) -> bool:
    return seen.tokens(*check.columns) is not None


def _either_shown(check: CiCheck, seen: Seen) -> bool:
    return _metrics_shown(check, seen) or _columns_shown(check, seen)


_SHOWN: Mapping[How, Callable[[CiCheck, Seen], bool]] = {
    "near": _metrics_shown, "range": _either_shown, "tokens": _either_shown, "means": _either_shown,
    "relative": lambda check, seen: any(seen.metric(name) for name in check.metrics),
    "hashes": lambda _, seen: bool(seen.updated()), "bits": _columns_shown,
}  # fmt: skip


# -- what breaks a check


def _not_finite(check: CiCheck, a: Seen, b: Seen) -> Iterator[Divergence]:
    """Columns with values that no metric may show: a trainer can turn them into 0 on the way."""
    for name in check.columns:
        if a.tokens(name) is None:
            continue
        tokens = b.tokens(name)
        bad = 0 if tokens is None else int((~np.isfinite(tokens[0])).sum())
        what = "it has no unmasked tokens any more" if tokens is None else f"{bad} unmasked tokens are not finite"
        if tokens is None or bad:
            yield Divergence(b.step, a.column_phase(name), name, "bound", f"{what}; ci:{check.name} reads it")


def _pairs(check: CiCheck, a: Seen, b: Seen) -> Iterator[tuple[str, float | None]]:
    """Each name that the baseline has a check's metrics by, with the probe's number; None where it has none."""
    for metric in check.metrics:
        if names := a.metric(metric):
            now = b.metric(metric)
            yield from now.items() if now else [(next(iter(names)), None)]


def _near(asked: Asked, a: Seen, b: Seen) -> Iterator[Divergence]:
    for name, x in _pairs(asked.check, a, b):
        if x is None or not asked.near(x):
            yield asked.found(b, b.phase(name), name, _said(x))


def _relative(asked: Asked, a: Seen, b: Seen) -> Iterator[Divergence]:
    for metric in asked.check.metrics:
        for name, x in a.metric(metric).items():
            for y in b.metric(metric).values() or [None]:
                if y is None or not _alike(x, y, asked.limits["rtol"]):
                    yield asked.found(b, b.phase(name), name, f"{x!r} became {_said(y)}")


def _alike(x: float, y: float, rtol: float) -> bool:
    """Whether two numbers are within a share of the larger; NaN and infinities never are, two zeros always."""
    return math.isfinite(x) and math.isfinite(y) and abs(y - x) <= rtol * max(abs(x), abs(y))


def _range(asked: Asked, a: Seen, b: Seen) -> Iterator[Divergence]:
    def inside(x: float | None) -> bool:
        return x is not None and math.isfinite(x) and asked.limits["low"] < x < asked.limits["high"]

    pairs = list(_pairs(asked.check, a, b))
    for name, x in pairs:
        if not inside(x):
            yield asked.found(b, b.phase(name), name, _said(x))
    if not pairs:
        tokens = b.tokens(*asked.check.columns)
        mean = None if tokens is None else _mean(tokens[0])
        if not inside(mean):
            yield asked.found(b, "forward", asked.check.columns[0], _said(mean, "mean over tokens "))


def _two(asked: Asked, a: Seen, b: Seen) -> Iterator[Divergence]:
    """Two means; of columns where the log shows none. For `tokens` also of |x - y|, which no two signs hide in."""
    x_name, y_name = asked.check.metrics
    logged = _metrics_shown(asked.check, a)
    if logged:
        xs, ys = b.metric(x_name), b.metric(y_name)
        for x in xs.values() or [None]:
            for y in ys.values() or [None]:
                if x is None or y is None or not asked.near(x - y):
                    where = next(iter(xs), next(iter(a.metric(x_name))))
                    yield asked.found(b, b.phase(where), where, f"{_said(x)}, {y_name.partition('/')[2]} {_said(y)}")
    if (logged and asked.check.how == "means") or not _columns_shown(asked.check, a):
        return
    tokens, (column, other) = b.tokens(*asked.check.columns), asked.check.columns
    if tokens is None:
        yield asked.found(b, "forward", column, f"not of the same tokens as {other} any more")
        return
    d = difference(tokens[0], tokens[1])
    gap, what = (abs(_mean(d)), "mean x - y") if asked.check.how == "means" else (_mean(np.abs(d)), "mean |x - y|")
    if not asked.near(gap):
        yield asked.found(b, "forward", column, f"{what} against {other} {gap!r}")


def _hashes(asked: Asked, a: Seen, b: Seen) -> Iterator[Divergence]:
    for row in b.updated():
        if row.nonfinite:
            yield asked.found(b, "update", row.name, f"{row.nonfinite} values are not finite")
    for kind, row, _ in differing(a.updated(), b.updated(), unlike(a.trace, b.trace)):
        yield asked.found(b, "update", row.name, "not the baseline's" if kind in ("value", "dtype", "shape") else kind)


def _bits(asked: Asked, a: Seen, b: Seen) -> Iterator[Divergence]:  # noqa: ARG001 - the baseline plays no part
    tokens, (column, other) = b.tokens(*asked.check.columns), asked.check.columns
    if tokens is None:
        yield asked.found(b, "forward", column, f"not of the same tokens as {other}")
        return
    x, y = (side.view(np.int64) for side in tokens)  # widening to fp64 is exact: equal bits stay equal, others apart
    count = int((x != y).sum())
    if count:
        yield asked.found(b, "forward", column, f"{count} of {len(x)} unmasked tokens are not those of {other}")


_BROKEN: Mapping[How, Callable[[Asked, Seen, Seen], Iterator[Divergence]]] = {
    "near": _near, "range": _range, "tokens": _two, "means": _two, "relative": _relative, "hashes": _hashes,
    "bits": _bits,
}  # fmt: skip


def _said(x: float | None, what: str = "") -> str:
    return "not shown any more" if x is None else f"{what}{x!r}"


def _mean(values: Floats) -> float:
    return exact_sum(values) / len(values)
