"""How far the metrics of two commits are apart, in the tables of a report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from repro.report.change import Change
from repro.report.pieces import Line, Piece, code, said
from repro.text import count, percent, sides, value
from repro_bisect.driver.drift import Drift, Gap, Moved
from repro_golden.case.file import Bound

__all__ = ["LEFT", "METRICS", "Block", "metric_blocks"]

METRICS = {
    "grad_norm": ("grad_norm",),
    "loss": ("loss",),
    "entropy": ("entropy", "entropy_loss"),
    "log-prob gap": ("train_rollout_logprob_abs_diff",),
    "reward": ("reward", "raw_reward", "rewards"),
}
"""What every report shows where it exists, with the names that trainers log it under."""
LEFT = "first out of bound"
"""What the step is called at which a metric first left its bound."""
_KL = {"k1": "KL(base ‖ head) k1, nats", "k3": "KL(base ‖ head) k3, nats"}
_LONG = 24
"""Rows of a table that is shown at once."""
_STILL = 12
"""Metrics that did not move and are named."""


@dataclass(frozen=True)
class Block:
    """A part of a report.

    Attributes:
        title: Its heading; empty for none.
        lines: What stands above the table.
        head: The table's columns; empty for none.
        rows: Its cells.
        below: What stands under it.
        fold: Whether it is closed until a reader opens it.
        change: Part of a commit's diff, under all that.
    """

    title: str
    lines: Sequence[Line] = ()
    head: Sequence[str] = ()
    rows: Sequence[Sequence[Line]] = ()
    below: Sequence[Line] = ()
    fold: bool = False
    change: Change | None = None


def _difference(gap: Gap) -> str:
    """From base to head, with its sign."""
    if gap.a is None or gap.b is None:
        return "one side is absent"
    if gap.same:
        return "0"
    if math.isnan(gap.a) or math.isnan(gap.b):
        return "both NaN, other bits" if math.isnan(gap.a) and math.isnan(gap.b) else "NaN on one side"
    if gap.a == gap.b:
        return "the sign of zero"
    return f"{gap.b - gap.a:+.3g}"


def _relative(gap: Gap) -> str:
    """The difference relative to the base's value."""
    share = gap.relative
    if share is None or gap.a is None or gap.b is None or math.isnan(share):
        return "no size"
    if gap.same or share == 0:
        return "0"
    if gap.a == 0:
        return "from 0"
    if not math.isfinite(share):
        return "no size"
    return f"{percent(share, 3)} %" if abs(share) < 10 else f"x{gap.b / gap.a:.3g}"


def _held(bound: Bound | None, gap: Gap, *, left: bool) -> str:
    """How far the metric may move there, and whether it stays so near; one told beside the base's own left none."""
    if bound is None:
        return ""
    if gap.a is None or not math.isfinite(gap.a):
        return "left: no finite base" if left else "not judged"
    limit = bound.atol + bound.rtol * abs(gap.a)
    inside = gap.b is not None and math.isfinite(gap.b) and abs(gap.b - gap.a) <= limit
    return f"±{limit:.3g}, {'holds' if inside else 'left'}"


def _places(moved: Moved) -> Iterator[tuple[str, Gap]]:
    """The first, the worst and the last step, and that where its bound was first left; each step once."""
    gaps: dict[int, tuple[list[str], Gap]] = {}
    for name, gap in (("first", moved.first), ("worst", moved.worst), ("last", moved.last), (LEFT, moved.left)):
        if gap is not None:
            gaps.setdefault(gap.step, ([], gap))[0].append(name)
    yield from ((f"{step} ({', '.join(names)})", gap) for step, (names, gap) in gaps.items())


def _chosen(drift: Drift, bounds: Sequence[str]) -> dict[str, str]:
    """The keys of the metrics that are always shown, each with what it is called."""
    labels: dict[str, str] = {}
    for label, names in METRICS.items():
        if (moved := drift.metric(*names)) is not None:
            labels[next(key for key, other in drift.metrics.items() if other is moved)] = label
    return labels | {name: name for name in bounds if name in drift.metrics and name not in labels}


def _label(key: str, label: str) -> Line:
    unit = ", nats" if label in ("entropy", "log-prob gap") else ""
    return (code(key),) if key == label else (said(f"{label}{unit} ("), code(key), said(")"))


def _kl_rows(places: Mapping[str, tuple[int, float]], name: str) -> Iterator[list[str]]:
    """A row for each step of `places` that differs."""
    steps: dict[int, list[str]] = {}
    for place in ("first", "worst", "last"):
        steps.setdefault(places[place][0], []).append(place)
    values = dict(places.values())
    for step, names in steps.items():
        yield [_KL[name], f"{step} ({', '.join(names)})", "", value(values[step], 3), "", ""]


def metric_blocks(drift: Drift, bounds: Mapping[str, Bound], left: Sequence[str]) -> list[Block]:
    """The table of what is always asked for, then that of what else moved.

    Args:
        drift: The sizes.
        bounds: By metric, those that judge it.
        left: Metrics that left theirs: they are shown though they may not have moved, such as NaN on both sides.
    """
    head = ["metric", "step", "base -> head", "difference", "relative", *(["bound"] if bounds else [])]
    chosen = _chosen(drift, list(bounds))
    rows: list[list[Line]] = []
    still: list[Piece] = []
    for name, places in drift.kl.items():
        if "first" in places:
            rows += [[(said(cell),) for cell in cells[: len(head)]] for cells in _kl_rows(places, name)]
        else:
            still.append(said(f"KL {name}"))
    for key, label in chosen.items():
        moved = drift.metrics[key]
        if moved.first is None and key not in left:
            still.append(code(key))
            continue
        for step, gap in _places(moved):
            held = _held(bounds.get(key), gap, left=key in left)
            cells = [step, sides(gap.a, gap.b, value), _difference(gap), _relative(gap), held]
            rows.append([_label(key, label), *((said(cell),) for cell in cells[: len(head) - 1])])
    others = {key: moved for key, moved in drift.metrics.items() if key not in chosen}
    below = _unmoved(still, sum(moved.first is None for moved in others.values()))
    blocks = []
    if rows or below:
        where = ["first differs", "differs most", *(["first left its bound"] if bounds else [])]
        above: Line = (said(f"Where a metric {', where it '.join(where)}, and at the last common step."),)
        blocks = [Block("Metrics", [above] if rows else (), head, rows, below, fold=len(rows) > _LONG)]
    differing = {key: moved for key, moved in others.items() if moved.first is not None}
    for apart, what in (
        (True, "that moved, each at its worst step"),
        (False, "that one side alone tells, in some steps or in all"),
    ):
        if gaps := {key: moved.worst for key, moved in differing.items() if moved.apart is apart}:
            title = f"{count(len(gaps), 'other metric')} {what}"
            blocks.append(Block(title, (), head[:5], [_row(key, gap) for key, gap in gaps.items()], fold=True))
    return blocks


def _row(key: str, gap: Gap) -> list[Line]:
    """A metric at one step."""
    cells = str(gap.step), sides(gap.a, gap.b, value), _difference(gap), _relative(gap)
    return [(code(key),), *((said(cell),) for cell in cells)]


def _unmoved(still: Sequence[Piece], others: int) -> list[Line]:
    """One line on what did not move."""
    named = [piece for name in still[:_STILL] for piece in (said(", "), name)][1:]
    others += len(still[_STILL:])
    more = [said(f"{' and ' if named else ''}{count(others, 'other metric')}")] if others else []
    return [(said("Did not move: "), *named, *more, said("."))] if named or more else []
