"""What a search passed over and what it took, for reports: skipped points with one reason are one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from repro.text import count, plural
from repro_bisect.axes.axis import short
from repro_bisect.driver.drift import HistoryResult
from repro_bisect.driver.result import BisectResult
from repro_golden.base.clean import one_line

__all__ = ["Skipped", "cost_text", "skip_lines", "skipped"]

_SHOWN = 10
"""Reasons of skips that a terminal shows; the report shows all."""


@dataclass(frozen=True)
class Skipped:
    """Points that were skipped for one reason.

    Attributes:
        points: They, in the order of their range, the oldest first.
        what: What a point is: commit, version, change or layout.
        reason: Why.
        diagnosis: What is known of such a failure; empty where nothing is.
    """

    points: Sequence[str]
    what: str
    reason: str
    diagnosis: str = ""

    @property
    def first(self) -> str:
        """The oldest of them, as it is shown."""
        return short(self.points[0])

    @property
    def last(self) -> str:
        """The newest, or empty where there is one alone."""
        return short(self.points[-1]) if len(self.points) > 1 else ""

    @property
    def count(self) -> str:
        """``8 commits``; empty for one."""
        return f"{len(self.points)} {plural(self.what)}" if len(self.points) > 1 else ""

    @property
    def who(self) -> str:
        """``8 commits, the first 1b4a825dfe, the last 804ce94760``; of one its name."""
        return f"{self.count}, the first {self.first}, the last {self.last}" if self.count else self.first


def skipped(skips: Mapping[str, str], what: str, diagnoses: Mapping[str, str] | None = None) -> list[Skipped]:
    """The reasons of `skips`, in the order in which they first come, each with all of its points.

    Args:
        skips: Why, by point, in the order of their range, the oldest first.
        what: What a point is.
        diagnoses: What is known of the failures of some.
    """
    points: dict[tuple[str, str], list[str]] = {}
    for point, reason in skips.items():
        points.setdefault((reason, (diagnoses or {}).get(point, "")), []).append(point)
    return [Skipped(every, what, reason, known) for (reason, known), every in points.items()]


def skip_lines(groups: Sequence[Skipped]) -> list[str]:
    """What a terminal shows of them."""
    lines = []
    for group in groups[:_SHOWN]:
        lines.append(one_line(f"skipped {group.who}: {group.reason}"))
        lines += [one_line(f"  {group.diagnosis}")] if group.diagnosis else []
    return lines + ([f"and {len(groups) - _SHOWN} more"] if len(groups) > _SHOWN else [])


def cost_text(result: BisectResult | HistoryResult, tried: str, what: str) -> str:
    """What a search took, behind what it tried: probes, steps and time, skipped points, and what the steps were for."""
    cost, total = result.cost, result.cost.total
    parts = [tried, count(total.probes, "probe"), count(total.steps, "trained step"), f"{result.seconds:.0f} s"]
    parts += [f"{count(cost.reused, 'probe')} reused"] if cost.reused else []
    parts += [f"{count(len(result.skips), what)} skipped"] if result.skips else []
    bills = [("the ends", cost.ends), ("the search", cost.search), ("the confirmation", cost.confirmation)]
    bills += [("the explanation", cost.explanation)] if cost.explanation.steps else []
    steps = ", ".join(f"{bill.steps} for {name}" for name, bill in bills)
    return ", ".join(parts) + (f"; trained steps: {steps}" if total.steps else "")
