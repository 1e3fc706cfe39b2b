"""Metrics against what earlier nights had: a median, how far values are from it, and how far tonight's may be.

Everything here is pure. Numbers are compared exactly, as fractions, so that no sum overflows and nothing depends on an
order: the rule is the same for a value above the median and for its mirror image below.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from repro.nightly.records import Baseline, Check, NightlyRun, Summary
from repro.text import as_float
from repro_golden.base.observed import bounded
from repro_golden.case.file import Bound
from repro_golden.case.tables import NightlyTable

__all__ = ["SIGMA", "Judged", "judge", "judge_metrics", "metrics_check", "nonfinite", "summarise", "trusted"]

SIGMA = 1.4826
"""Standard deviations of a normal distribution in one median absolute deviation."""

Place = Literal["last", "low", "high"]
_PLACES: dict[Place, str] = {"last": "at the last step", "low": "where it is lowest", "high": "where it is highest"}
_SHOWN = 3


@dataclass(frozen=True)
class Judged:
    """One value of tonight beside those of trusted nights.

    Attributes:
        verdict: ``inside`` or ``outside`` of what they allow; ``unknown`` where they are too few; ``not finite``.
        value: Tonight's.
        count: How many of them there are.
        median: The middle of them; NaN of none.
        mad: The middle of their distances from the median; NaN of none.
        limit: How far from the median a value may be; NaN of none.
        metric: Its name.
        place: At the last step, or over all steps.
    """

    verdict: Literal["inside", "outside", "unknown", "not finite"]
    value: float
    count: int
    median: float = math.nan
    mad: float = math.nan
    limit: float = math.nan
    metric: str = ""
    place: Place = "last"

    def __str__(self) -> str:
        where = f"{self.metric} {_PLACES[self.place]} is {self.value!r}"
        if self.verdict == "not finite":
            return where
        if self.verdict == "unknown":
            return f"{where}: only {_runs(self.count)} to judge it by"
        return f"{where}, {_runs(self.count)} had {self.median!r} +- {self.limit:.3g}"


def judge(value: float, history: Sequence[float], *, mads: float, least: int, bound: Bound | None = None) -> Judged:
    """Whether a value is what it was.

    It is outside when ``|value - median| > max(mads * 1.4826 * MAD, atol + rtol * |median|)``: two-sided, and without a
    bound and with equal values in the past any other value is outside, for bit-stable numbers have no noise.

    Args:
        value: Tonight's.
        history: Those of trusted nights, in any order; what is not finite among them counts for nothing.
        mads: Standard deviations that a value may be away.
        least: With fewer values nothing is known.
        bound: How far the case lets that metric be from a baseline's.
    """
    known = [Fraction(x) for x in history if math.isfinite(x)]
    if not math.isfinite(value):
        return Judged("not finite", value, len(known))
    if len(known) < max(1, least):
        return Judged("unknown", value, len(known))
    median = statistics.median(known)
    mad = statistics.median([abs(x - median) for x in known])
    limit = Fraction(mads) * Fraction(SIGMA) * mad
    if bound is not None:
        limit = max(limit, Fraction(bound.atol) + Fraction(bound.rtol) * abs(median))
    verdict: Literal["inside", "outside"] = "outside" if abs(Fraction(value) - median) > limit else "inside"
    return Judged(verdict, value, len(known), as_float(median), as_float(mad), as_float(limit))


def judge_metrics(
    tonight: Mapping[str, Summary],
    history: Sequence[Mapping[str, Summary]],
    table: NightlyTable,
    bounds: Mapping[str, Bound],
) -> list[Judged]:
    """Every metric of tonight: at the last step and, where those are other values, its lowest and highest.

    Args:
        tonight: By name.
        history: Those of trusted nights, oldest first; the newest ``table.history`` count.
        table: By what to judge.
        bounds: The case's, by metric; each holds for whatever tells its metric (`bounded`).
    """
    judged = []
    runs = history[-table.history :]
    judges = bounded(bounds, tonight)
    for name, summary in tonight.items():
        seen = [run[name] for run in runs if name in run]
        for place in _PLACES:
            if place != "last" and all(getattr(s, place) == s.last for s in (summary, *seen)):
                continue  # it says what the last step says
            past = [getattr(s, place) for s in seen]
            bound = bounds[judges[name]] if name in judges else None
            result = judge(getattr(summary, place), past, mads=table.mads, least=table.least, bound=bound)
            judged.append(Judged(**{**vars(result), "metric": name, "place": place}))
    return judged


def metrics_check(
    tonight: Mapping[str, Summary],
    history: Sequence[Mapping[str, Summary]],
    table: NightlyTable,
    bounds: Mapping[str, Bound],
    where: Mapping[str, int] | None = None,
) -> Check:
    """The check of a night's metrics; see `judge_metrics`.

    Args:
        tonight: By name.
        history: Those of trusted nights, oldest first.
        table: By what to judge.
        bounds: The case's, by metric.
        where: The first step at which a metric is not finite, of those that ever are.
    """
    if bad := nonfinite(tonight):
        steps = [f"{name} at step {where[name]}" if where and name in where else name for name in bad]
        return Check("metrics", "error", f"not finite: {_listed(steps)}")
    if not tonight:
        return Check("metrics", "not judged", "the trainer reports none: [observe] metrics finds them in its output")
    runs = history[-table.history :]
    judged = judge_metrics(tonight, history, table, bounds)
    gone = sorted({name for run in runs for name in run} - tonight.keys())
    outside = [j for j in judged if j.verdict == "outside"]
    if len(runs) < table.least:
        return Check("metrics", "not judged", f"{_runs(len(runs))} of {table.least} that it takes")
    if outside or gone:
        texts = [str(j) + (_STABLE if j.limit == 0 else "") for j in outside] + [f"{name} is gone" for name in gone]
        return Check("metrics", "changed", _listed(texts, "; "))
    known = {j.metric for j in judged if j.verdict == "inside"}
    if not known:
        return Check("metrics", "not judged", f"no metric has a value in {table.least} trusted nights")
    young = sorted(tonight.keys() - known)
    text = f"{len(known)} as in {_runs(len(runs))}" + (f"; too young to judge: {_listed(young)}" if young else "")
    return Check("metrics", "green", text)


_STABLE = " (all of them the same: bit-stable numbers have no noise)"


def nonfinite(metrics: Mapping[str, Summary]) -> list[str]:
    """The metrics that are NaN or infinite at any step."""
    return sorted(name for name, s in metrics.items() if not all(math.isfinite(v) for v in vars(s).values()))


def summarise(steps: Iterable[Mapping[str, float]]) -> dict[str, Summary]:
    """Every metric over a run's steps, by name; a step that lacks one counts for nothing."""
    values: dict[str, list[float]] = {}
    for step in steps:
        for name, value in step.items():
            values.setdefault(name, []).append(value)
    return {name: _summary(series) for name, series in values.items()}


def _summary(values: Sequence[float]) -> Summary:
    if any(math.isnan(v) for v in values):
        return Summary(values[0], values[-1], math.nan, math.nan, math.nan)
    if not all(math.isfinite(v) for v in values):
        return Summary(values[0], values[-1], min(values), max(values), sorted(values)[len(values) // 2])
    middle = as_float(statistics.median(map(Fraction, values)))
    return Summary(values[0], values[-1], min(values), max(values), middle)


def trusted(
    runs: Sequence[NightlyRun], asked: tuple[str, str, str, int], baseline: Baseline, since: Collection[str]
) -> list[NightlyRun]:
    """The nights by which tonight's metrics may be judged, in the order given.

    They are green, of the same machine, case and rollouts, and of the same epoch. An epoch ends where somebody approved
    other numbers: with a golden run it is the nights that were compared with that very one (its chain tells); without
    one it is the nights that were not compared with a golden run, of commits that hold the newest approval.

    Args:
        runs: Any.
        asked: Tonight's machine, the digests of the case and of its rollouts, and how many steps were made.
        baseline: What tonight's numbers are compared with.
        since: The commits up to tonight's that hold the newest approval; all up to tonight's where there is none.
    """
    return [
        run
        for run in runs
        if run.status == "green"
        and (run.machine, run.key, run.rollouts, run.steps) == asked
        and run.commit["commit"] in since
        and _same_epoch(run.baseline, baseline)
    ]


def _same_epoch(then: Baseline, now: Baseline) -> bool:
    if "golden" in (then.kind, now.kind):
        return (then.kind, then.chain) == (now.kind, now.chain)
    return True


def _runs(count: int) -> str:
    return f"{count} trusted night" + ("" if count == 1 else "s")


def _listed(texts: Sequence[str], comma: str = ", ") -> str:
    more = f"{comma}and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return comma.join(texts[:_SHOWN]) + more
