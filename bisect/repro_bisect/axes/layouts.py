"""Two layouts of one case, signal by signal: the first that differs at all, and where they part.

Sums of the same numbers in another order differ by a few roundings, so bits alone do not tell a layout that computes
something else from one that computes the same in another order. A difference is therefore measured in units of the
dtype's epsilon, relative to the tensor's largest magnitude: ``max |a - b| / (eps * max(absmax a, absmax b))``.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from repro_golden.base.canonical import mapping_of
from repro_golden.base.errors import ReproError
from repro_golden.compare.traces import check_comparable
from repro_golden.fingerprint.share import merge
from repro_golden.trace import PHASES, Row, Trace, read_dump
from repro_golden.trace.families import family
from repro_golden.trace.model import DIGEST, METRIC
from repro_golden.trace.tensor_difference import decode
from repro_golden.trace.token_columns import column_parts, kept, part_of, side_by_side

__all__ = ["EPSILON", "TOLERANCE", "LayoutComparison", "LogProbGap", "Parting", "compare_layouts", "joined", "parting"]

TOLERANCE = 64.0
"""Units of epsilon that another order of sums may make, unless the user says otherwise."""

EPSILON = {
    "float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7,
    "metric": 2.0**-23,
}  # fmt: skip
"""The distance from 1 to the next number. A metric is a Python float that holds what trainers compute in fp32."""

How = Literal["whole", "sampled", "at least", "none"]


@dataclass(frozen=True)
class Parting:
    """A signal whose bits differ between two layouts.

    Attributes:
        step: The optimizer update.
        phase: input, forward, loss, grad or update.
        signal: Its name.
        detail: What it is, or what of it differs beside its values.
        units: The distance in units of epsilon; None where there is none, as between integers.
        how: Measured on the ``whole`` values, on those that traces keep (``sampled``), known only to be ``at least`` so
            much by the largest magnitudes, or not at all.
        beyond: Why no reordered sum explains it; empty where one may.
    """

    step: int
    phase: str
    signal: str
    detail: str
    units: float | None
    how: How
    beyond: str

    @property
    def size(self) -> str:
        """The distance in words."""
        if self.units is None:
            return "no distance"
        text = f"{self.units:.3g} eps"
        if self.how == "at least":
            return f"at least {text} (only its largest magnitude is known)" if self.units else "not measured"
        return f"{text} (sampled)" if self.how == "sampled" else text

    def __str__(self) -> str:
        text = f"step {self.step}, {self.phase}, {self.signal} ({self.detail}): {self.size}"
        return f"{text}: {self.beyond}" if self.beyond else text


@dataclass(frozen=True)
class LogProbGap:
    """How far apart two layouts' log-probs of the same tokens are, over unmasked tokens of all steps compared.

    Attributes:
        tokens: How many there are.
        differing: How many of them differ.
        largest: The largest |a - b|, in nats; infinite where one is not finite on one side alone.
        mean: The mean |a - b|, in nats.
        step: The update with the largest, the first one of equals.
    """

    tokens: int
    differing: int
    largest: float
    mean: float
    step: int

    def __str__(self) -> str:
        text = f"at most {self.largest:.3g} nats (step {self.step}), {self.mean:.3g} on average"
        return f"{text}, on {self.differing} of {self.tokens} tokens"


@dataclass(frozen=True)
class LayoutComparison:
    """What comparing two layouts found.

    Attributes:
        steps: Steps that were compared: all that both have, or up to where they part.
        tolerance: Units of epsilon that a reordered sum may make.
        signals: How many signals both layouts have in these steps.
        equal: How many of them have equal bits.
        first: The first that differs at all.
        parted: The first whose difference no reordered sum explains.
        worst: The farthest apart within the tolerance, or past it where they part.
        unmeasured_at: By step, how many differ by what is not known.
        sampled: By step, how many of which a sample of elements is all that was compared.
        alone: Names of signals that one layout alone has, which are not compared, by ``a`` and ``b``.
        log_probs: Of the policy's log-probs, token by token; None where both layouts do not show them.
        untold: How many gradients, parameters and optimizer states one layout alone has: nothing is known of them.
        shown: Metrics that were read from lines of text, which are not compared.
    """

    steps: int
    tolerance: float
    signals: int
    equal: int
    first: Parting | None
    parted: Parting | None
    worst: Parting | None
    unmeasured_at: Mapping[int, int]
    sampled: Mapping[int, int]
    alone: Mapping[str, Sequence[str]]
    log_probs: LogProbGap | None = None
    untold: int = 0
    shown: Sequence[str] = ()

    @property
    def verdict(self) -> Literal["equal", "agree", "part"]:
        """``equal`` bits, or they ``agree`` within the tolerance as far as that is known, or ``part``."""
        if self.parted:
            return "part"
        return "equal" if self.equal == self.signals and not self.untold else "agree"

    @property
    def unmeasured(self) -> int:
        """How many differ by what is not known."""
        return sum(self.unmeasured_at.values())

    @property
    def within(self) -> str:
        """``agree within 3.8 eps``: how far apart they are at most, in words."""
        if self.worst:
            return f"agree within {self.worst.units or 0.0:.3g} eps"
        return "agree within what the case allows" if self.first else "agree"

    def to_mapping(self) -> dict[str, Any]:
        """JSON types."""
        return mapping_of(self, unmeasured=self.unmeasured, verdict=self.verdict)


def compare_layouts(
    a: Trace,
    b: Trace,
    tolerance: float = TOLERANCE,
    absolute: Mapping[str, float] | None = None,
    relative: Mapping[str, float] | None = None,
) -> LayoutComparison:
    """Compare two layouts' traces over the steps that both have, up to the signal at which they part.

    Args:
        a: The one.
        b: The other.
        tolerance: Units of epsilon that a reordered sum may make; 0: every bit must be equal.
        absolute: By signal, as a glob: how far apart it may be in its own unit; epsilons then count for nothing.
        relative: Likewise as a share of the larger side; a signal that `absolute` fits too may be within either.

    Raises:
        ReproError: they cannot be compared, or have no signal in common.
    """
    check_comparable(a, b)
    steps = signals = equal = 0
    first: Parting | None = None
    worst: Parting | None = None
    parted: Parting | None = None
    alone: dict[str, dict[str, None]] = {"a": {}, "b": {}}
    untold: set[tuple[int, str]] = set()
    unmeasured, sampled = Counter[int](), Counter[int]()
    for index in range(min(len(a.steps), len(b.steps))):
        steps += 1
        pairs, only = _paired(joined(a.rows(index)), joined(b.rows(index)))
        for side, rows in only.items():
            alone[side] |= dict.fromkeys(f"{row.phase} {row.name}" for row in rows)
            untold |= {row.key for row in rows if _trained(row)}
        for row, others in pairs:
            signals += 1
            difference = parting(a, b, a.steps[index].step, row, others, tolerance)
            if difference is None:
                equal += 1
                continue
            if row.dtype == DIGEST and row.phase != "input" and tolerance > 0:
                unmeasured.update(
                    [difference.step]
                )  # hashes of tensors that may differ by roundings say no more than that they differ
                continue
            counted = _allowed(difference, row, others, absolute or {}, relative or {})
            first = first or counted or replace(difference, beyond="")
            unmeasured.update([difference.step] if difference.how == "at least" and not difference.units else ())
            sampled.update([difference.step] if difference.how == "sampled" else ())
            if (difference := counted) is None:
                continue
            worst = difference if worst is None or (difference.units or 0) > (worst.units or 0) else worst
            if difference.beyond:
                parted = difference
                break
        if parted:
            break
    if not signals:
        raise ReproError(f"{a.directory} and {b.directory} have no signal in common: nothing to compare")
    unpaired = {side: list(names) for side, names in alone.items()}
    gap = _log_prob_gap(a, b, steps)
    shown = sorted({name for trace in (a, b) for record in trace.steps[:steps] for name in record.shown})
    return LayoutComparison(
        steps, tolerance, signals, equal, first, parted, worst, dict(unmeasured), dict(sampled), unpaired, gap,
        len(untold), shown,
    )  # fmt: skip


def _allowed(
    difference: Parting, row: Row, others: Sequence[Row], absolute: Mapping[str, float], relative: Mapping[str, float]
) -> Parting | None:
    """What counts of a difference: nothing of a signal that is within its own allowance."""
    most, share = (
        next((value for pattern, value in globs.items() if fnmatchcase(row.name, pattern)), None)
        for globs in (absolute, relative)
    )
    if (most is None and share is None) or difference.units is None or row.phase == "input":
        return difference
    if share is not None and difference.units * EPSILON[row.dtype] <= share:  # an epsilon is one of the larger side
        return None
    if most is None:
        return replace(difference, beyond=f"beyond {share:g} of the larger, which the case allows")
    if row.dtype == "metric":
        gaps = [abs(_number(row) - _number(other)) for other in others]
    else:
        gaps = [difference.units * EPSILON[row.dtype] * max(row.absmax, *(other.absmax for other in others))]
    if all(gap <= most for gap in gaps):  # not so for NaN
        return None
    return replace(difference, beyond=f"beyond {most:g}, which the case allows")


def _number(row: Row) -> float:
    return float(struct.unpack("<d", row.values)[0]) if row.values else math.nan


def _log_prob_gap(a: Trace, b: Trace, steps: int) -> LogProbGap | None:
    by_step: list[tuple[int, npt.NDArray[np.float64]]] = []
    for index in range(steps):
        first, second = (column_parts(t.rows(index), "log_probs") for t in (a, b))
        masks = column_parts(a.rows(index), "loss_mask")
        for part, x in first.items():
            y = second.get(part)
            values = side_by_side(x, y)
            if y is None or values is None or x.dtype not in EPSILON or x.dtype != y.dtype:
                continue
            keep = kept(part_of(masks, part), x)
            if keep is None:
                return None
            u, v = (side[keep] for side in values)
            same = (u == v) | (np.isnan(u) & np.isnan(v))
            with np.errstate(invalid="ignore"):
                apart = np.where(same, 0.0, np.abs(u - v))
            by_step.append((a.steps[index].step, np.where(np.isfinite(apart), apart, math.inf)))
    every = np.concatenate([gaps for _, gaps in by_step]) if by_step else np.zeros(0)
    if not len(every):
        return None
    far, step = max(((float(gaps.max()), -step) for step, gaps in by_step if len(gaps)))
    return LogProbGap(len(every), int((every > 0).sum()), far, float(every.mean()), -step)


def joined(rows: Sequence[Row]) -> list[Row]:
    """The rows of a step, with the shards of a tensor (``NAME@RANK``, each with its placement) as one row.

    Their fingerprints add up to the whole's, so nothing is gathered; of the values nothing is known then. Shards of
    which some are missing stay as they are.
    """
    parts: dict[tuple[str, str], list[Row]] = {}
    items: list[Row | tuple[str, str]] = []
    for row in rows:
        key = row.phase, _base(row.name)
        if row.placement is None:
            items.append(row)
            continue
        if key not in parts:
            items.append(key)
        parts.setdefault(key, []).append(row)
    out: list[Row] = []
    for item in items:
        out += [item] if isinstance(item, Row) else _whole(item[1], parts[item])
    return out


def _whole(name: str, rows: Sequence[Row]) -> list[Row]:
    share = merge([row.share for row in rows if row.share is not None])
    if not share.whole:
        return list(rows)
    distinct = list({row.placement: row for row in rows}.values())
    return [
        replace(
            rows[0], name=name, lanes=share.lanes, placement=None, sketch=b"", values=None,
            nonfinite=sum(row.nonfinite for row in distinct), absmax=max(row.absmax for row in distinct),
            l2=math.hypot(*(row.l2 for row in distinct)),
        )
    ]  # fmt: skip


def _base(name: str) -> str:
    """The name without the rank that it is told apart by."""
    base, at, rank = name.rpartition("@")
    return base if at and rank.isdigit() else name


def _paired(rows_a: Sequence[Row], rows_b: Sequence[Row]) -> tuple[list[tuple[Row, list[Row]]], dict[str, list[Row]]]:
    """Every signal that both have, by phase and in a's order, and those that one alone has.

    A tensor that ranks of one layout hold in versions of their own (``NAME@RANK``) pairs with the other's single one,
    each of them; losses, activations, buffers and generators of ranks do not, for they are of other data.
    """
    by_key, in_a = {row.key: row for row in rows_b}, {row.key for row in rows_a}
    ranks, paired = _by_rank(rows_b), set[Any]()
    pairs: list[tuple[Row, list[Row]]] = []
    only_a = []
    for row in rows_a:
        single = by_key.get((row.key[0], _base(row.name))) if _shared(row) else None
        if row.key in by_key:
            others = [by_key[row.key]]
        elif single is not None and single.key not in in_a and _alike(row, single):
            others = [single]
        else:
            others = [other for other in ranks.get(row.key, ()) if _alike(row, other)]
        paired |= {other.key for other in others}
        if others:
            pairs.append((row, others))
        else:
            only_a.append(row)
    only_b = [row for row in rows_b if row.key not in paired]
    if not any(map(_trained, (row for row, _ in pairs))) and any(map(_trained, only_a)) and any(map(_trained, only_b)):
        raise ReproError(
            f"the layouts have no gradient and no parameter in common, such as {only_a[0].name} and {only_b[0].name}: "
            "nothing that was trained would be compared"
        )
    return sorted(pairs, key=lambda pair: PHASES.index(pair[0].phase)), {"a": only_a, "b": only_b}


def _by_rank(rows: Sequence[Row]) -> dict[tuple[int, str], list[Row]]:
    """The versions that ranks have of what they mean to share, by its place and name."""
    ranks: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        if row.name != _base(row.name) and _shared(row):
            ranks.setdefault((row.key[0], _base(row.name)), []).append(row)
    return ranks


def _alike(row: Row, other: Row) -> bool:
    return (row.dtype, row.shape) == (other.dtype, other.shape)


def _trained(row: Row) -> bool:
    """Whether a signal is a gradient, a parameter or an optimizer's state."""
    return row.phase in ("grad", "update") and row.dtype != METRIC and family(row.phase, row.name) is None


def _shared(row: Row) -> bool:
    """Whether ranks mean to have the same of it: what comes of each one's own data and draws is no other layout's."""
    inner = row.name.removeprefix("end/")
    return row.phase in ("grad", "update") and family(row.phase, inner) not in ("buffer", "unsaved", "rng")


def parting(a: Trace, b: Trace, step: int, row: Row, others: Sequence[Row], tolerance: float) -> Parting | None:
    """How a signal of `a` differs from what it is in `b`, one row or one for each rank; None where bits are equal."""
    partings = [p for other in others if (p := _parting(a, b, step, row, other, tolerance))]
    return max(partings, key=lambda p: (bool(p.beyond), p.units or 0.0), default=None)


def _parting(a: Trace, b: Trace, step: int, row: Row, other: Row, tolerance: float) -> Parting | None:
    if (row.dtype, row.shape, row.lanes, row.placement) == (other.dtype, other.shape, other.lanes, other.placement):
        return None
    detail = f"{row.dtype} {list(row.shape)}" + (
        f", on rank {other.name.rpartition('@')[2]}" * (other.name != row.name)
    )

    def found(units: float | None, how: How, beyond: str, what: str = detail) -> Parting:
        because = "an input differs" if row.phase == "input" else beyond
        return Parting(step, row.phase, row.name, what, units, how, because)

    if row.dtype != other.dtype:
        return found(None, "none", "dtypes differ", f"{row.dtype} became {other.dtype}")
    if row.shape != other.shape:
        return found(None, "none", "shapes differ", f"{list(row.shape)} became {list(other.shape)}")
    if row.dtype not in EPSILON:
        return found(None, "none", f"{row.dtype} has no epsilon")
    if row.nonfinite != other.nonfinite:
        return found(math.inf, "whole", f"{row.nonfinite} non-finite became {other.nonfinite}")
    if row.dtype == "metric" and row.values and other.values:
        x, y = (struct.unpack("<d", r.values)[0] for r in (row, other) if r.values)
        detail = f"{x!r} became {y!r}"
    units, how = _units(a, b, step, row, other)
    over = f"beyond {tolerance:g} eps" if not units <= tolerance else ""
    over = over if tolerance else "every bit must be equal"  # also where no distance is known, or it is -0.0's to 0.0
    return found(units, how, over, detail)


def _units(a: Trace, b: Trace, step: int, row: Row, other: Row) -> tuple[float, How]:
    """The distance in units, and how it was measured."""
    scale = EPSILON[row.dtype] * max(row.absmax, other.absmax)
    least = abs(row.absmax - other.absmax) / scale if scale else 0.0  # no element pair need be farther apart
    for x, y, how in _values(a, b, step, row, other):
        measured = _distance(row.dtype, x, y)
        if measured is None:
            return math.inf, how
        units = measured / scale if measured else 0.0
        if how == "whole":
            return units, how
        if units > 0:  # else the sample missed the difference
            return max(units, least), "sampled"
    return least, "at least"


def _values(a: Trace, b: Trace, step: int, row: Row, other: Row) -> Iterator[tuple[bytes, bytes, How]]:
    """What is kept of both sides, the best first."""
    x, y = read_dump(a, step, row), read_dump(b, step, other)
    if x and y and len(x) == len(y):
        yield x, y, "whole"
    if row.values is not None and other.values is not None and len(row.values) == len(other.values):
        yield row.values, other.values, "whole"
    if row.sketch and len(row.sketch) == len(other.sketch):
        total = math.prod(row.shape)
        yield row.sketch, other.sketch, "whole" if len(decode(row.dtype, row.sketch)) == total else "sampled"


def _distance(dtype: str, x: bytes, y: bytes) -> float | None:
    """The largest |a - b|; None where a value that is not finite became another one."""
    a, b = decode(dtype, x), decode(dtype, y)
    finite = np.isfinite(a) & np.isfinite(b)
    kinds = (np.isnan(a) & np.isnan(b)) | (a == b)  # the same NaN or infinity, whatever its payload
    if not (finite | kinds).all():
        return None
    with np.errstate(over="ignore"):
        return float(np.abs(a[finite] - b[finite]).max(initial=0.0))
