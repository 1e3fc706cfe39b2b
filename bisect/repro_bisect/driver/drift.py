"""How far a change moved the numbers: its first divergence, and every metric and KL over all steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from repro_bisect.axes.axis import PointInfo
from repro_bisect.probe.progress import Cost
from repro_bisect.search.changelog import Kind
from repro_golden.base.canonical import mapping_of
from repro_golden.case.file import Compare
from repro_golden.compare.coverage import Coverage
from repro_golden.compare.renames import NOTHING, Renames
from repro_golden.compare.traces import Divergence, MetricChange, compare, named_alike
from repro_golden.trace import Trace

__all__ = ["Drift", "Gap", "HistoryResult", "Moved", "Rename", "Row", "drift", "kl_places", "moved_metrics"]


@dataclass(frozen=True)
class Gap:
    """One quantity on both sides of one step.

    Attributes:
        step: The optimizer update.
        a: Before; None where that side lacks it.
        b: After; likewise.
    """

    step: int
    a: float | None
    b: float | None

    @property
    def same(self) -> bool:
        """Equal bits."""
        return MetricChange(self.step, "", self.a, self.b).same

    @property
    def absolute(self) -> float | None:
        """|b - a|: NaN where a side is NaN or the difference has no size; None where a side is missing."""
        if self.a is None or self.b is None:
            return None
        return 0.0 if self.same else abs(self.b - self.a)

    @property
    def relative(self) -> float | None:
        """(b - a) / |a|, signed; infinite from 0 to something; NaN and None as for `absolute`."""
        if self.a is None or self.b is None:
            return None
        gap = 0.0 if self.same else self.b - self.a
        if gap == 0 or math.isnan(gap):
            return gap
        if self.a == 0:
            return math.copysign(math.inf, gap)
        return gap / abs(self.a)

    @property
    def weight(self) -> float:
        """By which the worst is chosen: NaN on one side, or a missing side, is worse than any number."""
        if self.same:
            return 0.0
        size = self.absolute
        return math.inf if size is None or math.isnan(size) else size

    def to_mapping(self) -> dict[str, Any]:
        """JSON types."""
        return mapping_of(self, absolute=self.absolute, relative=self.relative)


@dataclass(frozen=True)
class Moved:
    """One metric over all common steps.

    Attributes:
        first: Where it first differs; None where it never does.
        worst: Where it differs most.
        last: At the last common step.
        left: Where it first left its bound; None where it has none or never left it.
        apart: Whether it differs in a step in which both sides have it.
    """

    first: Gap | None
    worst: Gap
    last: Gap
    left: Gap | None = None
    apart: bool = True

    def to_mapping(self) -> dict[str, Any]:
        """JSON types."""
        return mapping_of(self, "apart", *() if self.left else ("left",))


@dataclass(frozen=True)
class Drift:
    """How far trace b is from trace a.

    Attributes:
        steps: How many steps both have.
        divergence: The first difference, with its magnitude; None where all common steps agree.
        metrics: Every metric that either side has.
        kl: KL(a || b) over a step's recorded tokens by the estimators ``k1`` and ``k3``, each as (step, value) where it
            is ``worst`` (farthest from 0; NaN is farther than any number) and at the ``last`` step, and at the
            ``first`` where it is not 0, if there is one. Empty where no log-probs of one shape were recorded on both
            sides.
        ended: Which side ended before the other, in words; empty where none did.
        renames: What has another name in b.
        looked: What was judged.
        untouched: As `Comparison.untouched`.
    """

    steps: int
    divergence: Divergence | None
    metrics: Mapping[str, Moved]
    kl: Mapping[str, Mapping[str, tuple[int, float]]]
    ended: str = ""
    renames: Renames = NOTHING
    looked: Coverage = field(default_factory=Coverage)
    untouched: str = ""

    def metric(self, *names: str) -> Moved | None:
        """The first of some metrics that exists, whatever folder it was logged under (``train/loss`` is ``loss``)."""
        for name in names:
            keys = [key for key in self.metrics if key == name or key.rpartition("/")[2] == name]
            if keys:
                return self.metrics[min(keys, key=len)]
        return None

    def to_mapping(self) -> dict[str, Any]:
        """JSON types; floats that are not finite as the hex of their bits."""
        kl = {
            name: {place: {"step": step, "value": value} for place, (step, value) in values.items()}
            for name, values in self.kl.items()
        }
        return mapping_of(self, "renames", "looked", kl=kl, renamed=self.renames, looked_at=self.looked)


def drift(a: Trace, b: Trace, *, strict: bool = False, left: Sequence[Divergence] = ()) -> Drift:
    """How far `b` is from `a`; where names are not `strict`, another name is no difference.

    Args:
        a: The base.
        b: The other.
        strict: Whether another name is a difference.
        left: The metrics that left their bounds, step by step (`violations`).

    Raises:
        ReproError: the traces cannot be compared.
    """
    comparison = compare(a, b, Compare(names="strict" if strict else "matched"))
    out: dict[str, set[int]] = {}
    for violation in left:
        out.setdefault(violation.signal, set()).add(violation.step)
    return Drift(
        comparison.steps,
        comparison.divergence,
        moved_metrics(comparison.metrics, out),
        _kl(a, named_alike(a, b, strict=strict), comparison.kl),
        comparison.ended,
        comparison.renames,
        comparison.looked,
        comparison.untouched,
    )


def moved_metrics(
    changes: Iterable[MetricChange], left: Mapping[str, Collection[int]] | None = None
) -> dict[str, Moved]:
    """Each metric over all steps; those in `left` it spent out of its bound."""
    by_name: dict[str, list[Gap]] = {}
    for change in changes:
        by_name.setdefault(change.metric, []).append(Gap(change.step, change.a, change.b))
    moved = {}
    for name, gaps in by_name.items():
        out, first = (left or {}).get(name, ()), next((g for g in gaps if not g.same), None)
        beyond = next((g for g in gaps if g.step in out), None)
        apart = any(not g.same and g.absolute is not None for g in gaps)
        moved[name] = Moved(first, max(gaps, key=lambda g: g.weight), gaps[-1], beyond, apart)
    return moved


def _kl(a: Trace, b: Trace, known: Mapping[int, tuple[float, float]]) -> dict[str, dict[str, tuple[int, float]]]:
    """Steps before the first difference have the same policy: their KL is 0 without being computed."""
    count = min(len(a.steps), len(b.steps))
    if not known and not all(t.row(count - 1, "forward", "log_probs") for t in (a, b)):
        return {}
    last = a.steps[count - 1].step
    if not known:
        if a.steps[count - 1].chain != b.steps[count - 1].chain:
            return {}  # there are log-probs, but not of one shape
        known = {last: (0.0, 0.0)}
    return kl_places(known)


def kl_places(known: Mapping[int, tuple[float, float]]) -> dict[str, dict[str, tuple[int, float]]]:
    """By estimator the steps of `Drift.kl`, of the KL of each step by both."""
    summary: dict[str, dict[str, tuple[int, float]]] = {}
    for index, name in enumerate(("k1", "k3") if known else ()):
        steps = [(step, pair[index]) for step, pair in known.items()]
        worst = max(steps, key=lambda s: math.inf if math.isnan(s[1]) else abs(s[1]))
        summary[name] = {"worst": worst, "last": steps[-1]}
        if worst[1] != 0:
            summary[name]["first"] = next(s for s in steps if s[1] != 0)
    return summary


@dataclass(frozen=True)
class Row:
    """A line of the numeric changelog.

    Attributes:
        kind: ``change``: this commit changed the numbers. ``merge``: both sides that it joins had changed them, so its
            own numbers differ from each side's; what it added itself, if anything, cannot be told. ``group``: one or
            more of several commits did, and the rest cannot be tested. ``flaky``: two replays of it differ; no change.
        commit: The commit; of a group its last.
        before: The point that it is compared with: its parent, or the nearest testable point before it.
        points: The commits of a group, oldest first; else this one alone.
        untried: Those of them that were only presumed untestable, or stand for what was not searched.
        against_previous: How far its numbers are from those of `before`; None for flaky ones.
        cumulative: How far they are from GOOD's; likewise.
        environment: What its lock files changed in the environment that it ran in.
        detail: Why it is flaky; else empty.
    """

    kind: Kind
    commit: PointInfo
    before: str
    points: Sequence[str]
    untried: Sequence[str] = ()
    against_previous: Drift | None = None
    cumulative: Drift | None = None
    environment: Sequence[str] = ()
    detail: str = ""


@dataclass(frozen=True)
class Rename:
    """Two tested points with the same numbers under other names.

    Attributes:
        before: The one.
        after: The next that was tested: it, or a point between both, made the rename.
        renames: What has another name.
    """

    before: str
    after: str
    renames: Renames

    def to_mapping(self) -> dict[str, Any]:
        """JSON types."""
        return mapping_of(self, "renames", renamed=self.renames)


@dataclass(frozen=True)
class HistoryResult:
    """The numeric changelog of a range.

    Attributes:
        good: The good end.
        bad: The bad end.
        case: The case's name.
        what: What a point is: commit, version, change or layout.
        rows: Every change, oldest first.
        skips: Why, for the points that could not be tested, the oldest first.
        subjects: One line on each point that is named here.
        points: How many points the range has.
        agree: Whether GOOD's and BAD's numbers are the same, bit for bit.
        every: Whether every point was tested.
        noise: Why nothing is said of what came after the last row; empty where all is said.
        steps: Steps that were compared.
        cost: Probes, trained steps and seconds, by what they were for.
        seconds: Wall time.
        machine: Where.
        golden: The golden run that served as GOOD's first run, if one did.
        renames: What was renamed without a change of numbers, oldest first.
        ended: Which end makes fewer steps than the other, in words; the steps that both make are compared.
        looked: What GOOD's run shows, by which the others were judged, and what it or BAD alone has.
        ends: Who, when and what of GOOD and of BAD.
        remarks: What is to be known of the search.
    """

    good: str
    bad: str
    case: str
    what: str
    rows: Sequence[Row]
    skips: Mapping[str, str]
    subjects: Mapping[str, str]
    points: int
    agree: bool
    every: bool
    noise: str
    steps: int
    cost: Cost
    seconds: float
    machine: str
    golden: str | None
    renames: Sequence[Rename] = ()
    ended: str = ""
    looked: Coverage = field(default_factory=Coverage)
    ends: Sequence[PointInfo] = ()
    remarks: Sequence[str] = ()

    def of_kind(self, *kinds: Kind) -> list[Row]:
        """The rows of some kinds."""
        return [row for row in self.rows if row.kind in kinds]

    @property
    def verifiable(self) -> bool:
        """Whether every change was named: no groups are left, nothing is flaky, both ends make the same steps."""
        return not self.of_kind("group", "flaky") and not self.noise and not self.ended

    def to_mapping(self) -> dict[str, Any]:
        """JSON types."""
        return mapping_of(self, "looked", verifiable=self.verifiable, looked_at=self.looked)
