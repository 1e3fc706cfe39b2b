"""Two traces: the first step, phase and signal in which they differ, and by how much."""

from __future__ import annotations

import functools
import math
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from repro_golden.base.canonical import mapping_of, same_float
from repro_golden.base.errors import NotShownError, NotVerifiableError, ReproError
from repro_golden.base.observed import tellings
from repro_golden.case.file import Bound, Compare
from repro_golden.case.identity import Difference, Identity
from repro_golden.compare.coverage import Coverage, coverage_of, earlier_of, only_bounds, telling_rows
from repro_golden.compare.endings import ended_early
from repro_golden.compare.kl import kl_of_step
from repro_golden.compare.renames import NOTHING, Renames, aligned, first_other_chain
from repro_golden.compare.step_difference import first_of_round, in_order
from repro_golden.compare.told_metrics import moved_text, told_under
from repro_golden.compare.untouched import untouched
from repro_golden.trace import NotFinite, Row, Trace, read_dump
from repro_golden.trace.families import family
from repro_golden.trace.model import METRIC
from repro_golden.trace.tensor_difference import TensorDifference, measure

__all__ = [
    "NO_AGREEMENT",
    "Comparison",
    "Divergence",
    "MetricChange",
    "check_identities",
    "compare",
    "differences_in_text",
    "every_violation",
    "first_difference",
    "first_divergent_index",
    "measured",
    "named_alike",
    "on_purpose",
    "require_finite",
    "violations",
]

Kind = Literal["value", "dtype", "shape", "missing", "added", "bound", "nonfinite"]


@dataclass(frozen=True)
class Divergence:
    """The first place where two traces differ.

    Attributes:
        step: The optimizer update.
        phase: input, forward, loss, grad or update.
        signal: The signal's name.
        kind: What differs: ``value``, ``dtype``, ``shape``; the signal is ``missing`` from b or ``added`` by it; or a
            metric left its ``bound``; or it is ``nonfinite`` in b alone, and no bound judges it.
        detail: The two sides, in words.
        magnitude: The size, where values were at hand.
        differing: How many signals of each phase of that step differ.
        now: The signal's name in b, where that is another.
    """

    step: int
    phase: str
    signal: str
    kind: Kind
    detail: str
    magnitude: TensorDifference | None = None
    differing: Mapping[str, int] = field(default_factory=dict)
    now: str = ""

    @property
    def name(self) -> str:
        """The signal's name on both sides."""
        return f"{self.signal} (now {self.now})" if self.now else self.signal

    @property
    def signals(self) -> list[tuple[int, str, str]]:
        """Step, phase and name of the signal, under each name that it has."""
        return [(self.step, self.phase, name) for name in (self.signal, self.now) if name]

    @property
    def of_itself(self) -> str:
        """As two runs of the same code differ, in words: of a file that only the first one saved, with a cure."""
        is_file = self.kind == "missing" and family(self.phase, self.signal) == "saved"
        fix = ", a file that only the first run saved: if it is a cache, name it by {out}, or clear it first"
        return f"{self}{fix if is_file else ''}"

    def __str__(self) -> str:
        size = f": {self.magnitude}" if self.magnitude and self.magnitude.elements else ""
        return f"step {self.step}, {self.phase}, {self.name} ({self.detail}){size}"


@dataclass(frozen=True)
class MetricChange:
    """One metric at one step on both sides; a side that lacks it holds None."""

    step: int
    metric: str
    a: float | None
    b: float | None

    @property
    def same(self) -> bool:
        """Equal bits; see `canonical.same_float`."""
        return same_float(self.a, self.b)


@dataclass(frozen=True)
class Comparison:
    """What comparing two traces found.

    Attributes:
        steps: How many steps both have and were compared.
        divergence: The first difference, or None when all compared steps agree.
        metrics: Every metric at every compared step.
        kl: Per compared step, KL(a || b) over the recorded tokens as (k1, k3); empty without log-prob columns.
        lengths: How many steps each has, where both are meant to have as many; None where one is a part.
        renames: What has another name in the second; it is compared under the first one's.
        looked: What was compared, and what was seen and not compared.
        nonfinite: Where nothing differs, what is NaN or infinite first: such values agree on nothing.
        brought: Whether the baseline is finite there and everywhere, so that this is a difference.
        ended: Which side ended before the other, in words; empty where none did, or one is a part.
        untouched: Where something differs, that no trained parameter, gradient or metric does; '' where one does too.
    """

    steps: int
    divergence: Divergence | None
    metrics: Sequence[MetricChange]
    kl: Mapping[int, tuple[float, float]]
    lengths: tuple[int, int] | None = None
    renames: Renames = NOTHING
    looked: Coverage = field(default_factory=Coverage)
    nonfinite: NotFinite | None = None
    ended: str = ""
    untouched: str = ""
    brought: bool = False

    @property
    def equal(self) -> bool:
        """Whether every compared step agrees, in finite values, and neither side goes on where the other ended."""
        return self.divergence is None and not self.ended and self.nonfinite is None

    def to_mapping(self) -> dict[str, Any]:
        """JSON types; floats that are not finite as the hex of their bits."""
        kl = {step: {"k1": k1, "k3": k3} for step, (k1, k3) in self.kl.items()}
        named = {"renamed": self.renames, "looked_at": self.looked}
        return mapping_of(self, "renames", "looked", equal=self.equal, kl=kl, **named)


NO_AGREEMENT = "nothing differs, but values that are not finite agree on nothing"


def on_purpose(bad: NotFinite) -> str:
    """What leaves out a value that is not finite on purpose, behind a comma; '' where nothing does."""
    named = bad.phase in ("", "loss") or family(bad.phase, bad.name) not in (None, "end")
    return ", [observe] ignore leaves out what is so on purpose" if named else ""


def require_finite(trace: Trace) -> None:
    """Refuse an agreement with a trace that is not finite.

    Raises:
        NotVerifiableError: it has a value that is not.
    """
    if bad := trace.first_nonfinite():
        raise NotVerifiableError(f"{NO_AGREEMENT}: first {bad}; `--when finite` searches for it{on_purpose(bad)}")


def compare(a: Trace, b: Trace, rule: Compare | None = None, *, prefix: bool = False) -> Comparison:
    """Compare `b` with the baseline `a` over the steps that both have. What was only renamed is no difference.

    Args:
        a: The baseline.
        b: The other trace.
        rule: What counts as equal; bitwise by default.
        prefix: One of both was asked for fewer steps than the other: that it is shorter is no difference.

    Raises:
        NotVerifiableError: no signal is in both.
        ReproError: nothing to compare: no common steps, other start steps, or other rollouts; or the rows of a side
            are missing or damaged.
    """
    check_comparable(a, b)
    lengths, ended = (None, "") if prefix else ((len(a.steps), len(b.steps)), ended_early(a, b))
    count = min(len(a.steps), len(b.steps))
    alignment = aligned(a, b, strict=rule is not None and rule.strict)
    as_given, b = b, alignment.trace
    index = first_other_chain(a, b)
    if rule is not None and rule.mode == "bounds":
        divergence = next(every_violation(a, b, rule.bounds), None)
    else:
        divergence = None if index is None else _first_signal(a, b, index)
    metrics = [change for i in range(count) for change in _metric_changes(a, b, i)]
    kl = (
        {}
        if index is None or not a.shows("forward", "log_probs")
        else {a.steps[i].step: v for i in range(index, count) if (v := kl_of_step(a, b, i)) is not None}
    )
    bounded = rule is not None and rule.mode == "bounds"
    looked = (
        only_bounds(rule.bounds)
        if rule and bounded
        else coverage_of(b, alignment.alone, moved=[] if divergence else moved_text(a, b))
    )
    if not bounded:
        telling_rows(a)  # equal roots stand for rows that both have: whose baseline lost them agrees with nothing
    looked = replace(looked, earlier=earlier_of(as_given))
    if divergence is None and alignment.alone and looked.nothing:
        raise NotVerifiableError(f"{a.directory} and {b.directory} have no signal in common: nothing was looked at")
    nonfinite = as_given.first_nonfinite() if divergence is None else None
    same = untouched(a, b, looked) if divergence and not bounded else ""
    brought = nonfinite is not None and a.first_nonfinite() is None
    return Comparison(
        count, divergence, metrics, kl, lengths, alignment.renames, looked, nonfinite, ended, same, brought
    )  # fmt: skip


def check_comparable(a: Trace, b: Trace) -> None:
    """Refuse pairs that answer no question.

    Raises:
        ReproError: with the reason and the cure.
    """
    if not a.steps or not b.steps:
        empty = a if not a.steps else b
        raise ReproError(f"{empty.directory} holds no whole step: nothing to compare; record it again")
    if a.header.first_step != b.header.first_step:
        raise ReproError(
            f"the traces start at steps {a.header.first_step} and {b.header.first_step}: nothing lines up; "
            "record both from the same step"
        )
    if _asked(a) != _asked(b):
        raise NotVerifiableError(
            f"{a.directory} and {b.directory} were recorded with other --activations, --metric, --ignore or --signals: "
            "record both with the same"
        )
    if a.header.rollouts != b.header.rollouts:
        raise ReproError(
            f"{a.directory} and {b.directory} were trained on different rollouts: not comparable; "
            "replay both on the same"
        )


def _asked(trace: Trace) -> dict[str, list[str]]:
    """What a recording was asked to observe beside what it always does, wherever its header says so."""
    observe = trace.header.subject.get("observe") or trace.header.case.get("observe") or {}
    return {key: [globs] if isinstance(globs, str) else sorted(globs) for key, globs in observe.items() if globs}


def check_identities(a: Trace, b: Trace, vary: Sequence[str]) -> list[str]:
    """The differences of two traces' identities, all of them in parts that are meant to vary.

    Raises:
        NotVerifiableError: another part differs, so the comparison would not say what made the difference.
    """
    differences = identity_differences(a, b)
    if other := [d for d in differences if d.part not in vary]:
        parts = dict.fromkeys(d.part for d in other)
        text = "; ".join(str(next(d for d in other if d.part == part)) for part in parts)
        options = " ".join(f"--vary {part}" for part in parts)
        raise NotVerifiableError(f"not comparable: {text}; compare all the same with {options}")
    return [str(d) for d in differences]


def identity_differences(a: Trace, b: Trace) -> list[Difference]:
    """In what two runs had other identities; libraries that neither loaded are no part of it, where both say so."""
    before, after = (Identity.from_mapping(trace.header.identity) for trace in (a, b))
    if a.modules is None or b.modules is None:
        return before.differences(after)
    modules = a.modules | b.modules
    pairs = ((name, a.sources.get(name, ""), b.sources.get(name, "")) for name in sorted({*a.sources, *b.sources}))
    return before.loading(modules).differences(after.loading(modules)) + [
        Difference("environment", f"source of {name}", x, y)
        for name, x, y in pairs
        if x != y and name in a.modules & b.modules
    ]


def named_alike(a: Trace, b: Trace, *, strict: bool = False) -> Trace:
    """`b` as it is to be compared with the baseline `a`: under its names, unless another name is a difference."""
    return aligned(a, b, strict=strict).trace


def first_divergent_index(a: Trace, b: Trace, *, strict: bool = False) -> int | None:
    """Index of the first step whose bits differ; None when all common ones agree. See `first_difference`."""
    return first_other_chain(a, named_alike(a, b, strict=strict))


def first_difference(a: Trace, b: Trace, *, strict: bool = False) -> Divergence | None:
    """The first step, phase and signal whose bits differ, in the steps that both have.

    Args:
        a: The baseline.
        b: The other trace.
        strict: Whether another name is a difference too.
    """
    b = named_alike(a, b, strict=strict)
    index = first_other_chain(a, b)
    return None if index is None else _first_signal(a, b, index)


def _first_signal(a: Trace, b: Trace, index: int) -> Divergence:
    """The first differing signal of a step's round, phase by phase and in the baseline's order of observation."""
    index, differences = first_of_round(a, b, index)
    if not differences:
        raise ReproError(
            f"step {a.steps[index].step} has two roots for equal signals: a trace is damaged; record it again"
        )
    kind, row, other = differences[0]
    counts = Counter(f[1].phase for f in differences)
    step = a.steps[index].step
    size = measured(a, b, step, row, other) if kind == "value" and other else None
    name, now = row.name, b.name_of(row.phase, other.name if other else row.name)
    if kind == "added":
        name = now  # the baseline has none
    now = "" if now == name or kind == "missing" else now
    detail = _detail(kind, row, other)
    if kind in ("missing", "added") and row.dtype == METRIC:
        side, rows = ("run", b.rows(index)) if kind == "missing" else ("baseline", a.rows(index))
        if kind == "missing" and row.name in b.steps[index].shown:
            detail = f"{row.number!r} became {b.steps[index].metrics[row.name]!r} in lines of text"
        if phase := next((each.phase for each in rows if each.name == row.name), ""):
            detail = f"observed by the {side} in phase {phase}"
    if kind in ("missing", "added") and (before := a.header.recorder) != (after := b.header.recorder):
        detail += f"; recorder {before} made the baseline and {after} the run, and one reads more: record it again"
    if kind == "missing" and any(each.name.startswith(f"{row.name}@") for each in b.rows(index)):
        detail = "the run's ranks do not agree on it"
    return Divergence(step, row.phase, name, kind, detail, size, dict(counts), now)


def differences_in_text(a: Trace, b: Trace) -> list[Divergence]:
    """Each number in lines of text that moved (`moved_text`), where it first did: no difference where bits decide."""
    b = named_alike(a, b)
    return [
        Divergence(
            number.step, "loss", number.metric, "value", f"{number.a!r} became {number.b!r} in lines of text",
            measure(METRIC, struct.pack("<d", number.a), struct.pack("<d", number.b), 1),
        )
        for number in moved_text(a, b)
    ]  # fmt: skip


def _detail(kind: Kind, row: Row, other: Row | None) -> str:
    if kind == "missing":
        return "observed by the baseline only"
    if kind == "added":
        return "not observed by the baseline"
    if kind == "dtype" and other:
        return f"dtype {row.dtype} became {other.dtype}"
    if kind == "shape" and other:
        return f"shape {list(row.shape)} became {list(other.shape)}"
    if other and None not in (row.number, other.number):
        return f"{row.number!r} became {other.number!r}"
    return f"{row.dtype} {list(row.shape)}"


def measured(a: Trace, b: Trace, step: int, row: Row, other: Row) -> TensorDifference:
    """The size of a signal's difference: from whole dumps where both sides have them, else from what traces keep."""
    total = math.prod(row.shape)
    dumps = read_dump(a, step, row), read_dump(b, step, other)
    if dumps[0] is not None and dumps[1] is not None:
        return measure(row.dtype, dumps[0], dumps[1], total)
    if row.values is not None and other.values is not None:
        return measure(row.dtype, row.values, other.values, total)
    # a tensor that was added up of shards has no sketch, and the other side may have it whole
    sampled = measure(row.dtype, row.sketch, other.sketch, total) if len(row.sketch) == len(other.sketch) else None
    if sampled is None or sampled.differing == 0:  # no element that both sampled differs: the size is unknown, not zero
        return TensorDifference(0, total, 0, None, None, None, 0)
    return sampled


def _metric_changes(a: Trace, b: Trace, index: int) -> list[MetricChange]:
    x, y = a.steps[index].metrics, told_under(a, b, index)[0]
    step = a.steps[index].step
    return [MetricChange(step, name, x.get(name), y.get(name)) for name in (*x, *(n for n in y if n not in x))]


@functools.lru_cache(maxsize=64)
def _tells(trace: Trace, metric: str) -> bool:
    """Whether any step tells a metric: asked at each step that does not."""
    return any(tellings(metric, record.metrics) for record in trace.steps)


def every_violation(a: Trace, b: Trace, bounds: Mapping[str, Bound]) -> Iterator[Divergence]:
    """The `violations` of all common steps."""
    count = min(len(a.steps), len(b.steps))
    return (violation for index in in_order(a, b, count) for violation in violations(a, b, index, bounds))


def violations(a: Trace, b: Trace, index: int, bounds: Mapping[str, Bound]) -> list[Divergence]:
    """The metrics of one step that left their bounds. A metric that is absent, NaN or infinite has left every bound.

    A bound holds for each time that a step of either side tells its metric, and for each rank that does: beside
    ``loss`` for ``loss#1`` and ``loss@0`` (`tellings`). A step in which neither side tells it says nothing, nor does
    what `b` tells beside each of the baseline's numbers (`told_under`).

    Raises:
        NotShownError: the baseline tells it in no step.
    """
    divergences = []
    step, before, (after, beside) = a.steps[index].step, a.steps[index].metrics, told_under(a, b, index)
    for metric, bound in bounds.items():
        if metric not in before and not _tells(a, metric):
            known = ", ".join(sorted({name for record in a.steps for name in record.metrics})) or "none"
            raise NotShownError(f"has no metric {metric!r} in any step (it has: {known})", "correct its name")
        for name in (name for name in tellings(metric, before, after) if name not in beside):
            x, y = before.get(name), after.get(name)
            limit = bound.atol + bound.rtol * abs(x or 0.0)
            if x is not None and y is not None and math.isfinite(x) and math.isfinite(y) and abs(y - x) <= limit:
                continue
            rows = (*a.rows(index), *b.rows(index))
            phase = next((r.phase for r in rows if r.name == name and r.dtype == METRIC), "loss")
            divergences.append(Divergence(step, phase, name, "bound", f"{x!r} became {y!r}, allowed +-{limit:.3g}"))
    return divergences
