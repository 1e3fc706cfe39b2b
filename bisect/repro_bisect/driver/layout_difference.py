"""Replaying two layouts of a case, and those between them, and comparing what they compute."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from repro_bisect.axes.arrival import Lost
from repro_bisect.axes.layouts import EPSILON, LayoutComparison, compare_layouts
from repro_bisect.axes.sets import LayoutLine
from repro_bisect.driver.circumstances import refused
from repro_bisect.driver.session import Options, session
from repro_bisect.predicates.predicates import Bitwise
from repro_bisect.probe.answers import Skip, differ_twice, trace_of, unlike_before
from repro_bisect.probe.executors import Signal
from repro_bisect.probe.progress import Cost, Watch
from repro_bisect.probe.request import Request
from repro_bisect.probe.scheduler import Scheduler
from repro_golden.base.canonical import canonical_json, mapping_of
from repro_golden.base.errors import NotVerifiableError, ReproError
from repro_golden.case.file import Case
from repro_golden.compare.endings import ended_early, failed_since
from repro_golden.compare.step_difference import differing, unlike
from repro_golden.compare.traces import require_finite
from repro_golden.repository.checkout import Checkout
from repro_golden.trace import Header, Trace

__all__ = ["Between", "LayoutResult", "replay_layouts"]

_DUMPED = 1 << 28
"""Bytes of tensors that are written whole to measure how far layouts are apart."""
_NAMES = 80_000
"""Bytes of the names of such tensors, which are told in one variable of the environment: Linux takes 128 KiB of it."""


@dataclass(frozen=True)
class Between:
    """What one key alone changes.

    Attributes:
        key: Which, from what to what.
        layout: The layout with it.
        comparison: Against the layout before; None where one of both cannot be tested.
        skip: Why, in that case.
    """

    key: str
    layout: str
    comparison: LayoutComparison | None
    skip: str = ""


@dataclass(frozen=True)
class LayoutResult:
    """What comparing two layouts found.

    Attributes:
        a: The first layout.
        b: The second.
        case: The case's name.
        commit: Whose code was run.
        outcome: ``equal``, ``agree`` (within the tolerance), ``part``, or ``flaky`` (one does not reproduce itself).
        flaky: How, by layout.
        comparison: None where one is flaky.
        between: Where several keys changed, what each of them does.
        cost: Probes, trained steps and seconds.
        seconds: Wall time.
        machine: Where.
        remarks: What is to be known of the replays beside their numbers.
    """

    a: str
    b: str
    case: str
    commit: str
    outcome: Literal["equal", "agree", "part", "flaky"]
    flaky: Mapping[str, str]
    comparison: LayoutComparison | None
    between: Sequence[Between]
    cost: Cost
    seconds: float
    machine: str
    remarks: Sequence[str] = ()

    def to_mapping(self) -> dict[str, Any]:
        """JSON types."""
        return mapping_of(self)


def replay_layouts(
    checkout: Checkout, case: Case, axis: LayoutLine, tolerance: float | None, watch: Watch, options: Options
) -> LayoutResult:
    """Replay both ends of a line of layouts twice, those between once, and compare them signal by signal.

    Args:
        checkout: The repository.
        case: The case.
        axis: The layouts.
        tolerance: Units of epsilon that another order of sums may make, in place of what the case says.
        watch: Called with every line of progress.
        options: How to replay.

    Raises:
        NotVerifiableError: two replays of an end agree, but one makes fewer steps.
        ReproError: the rollouts or an end cannot be used, or the layouts observe nothing alike.
        MachineFailureError: the machine failed; the same command resumes.
    """
    with session(checkout, axis.roomy, axis, Bitwise(), watch, options) as (scheduler, _):
        return _Replays(scheduler, axis, case, axis.tolerance if tolerance is None else tolerance).run()


class _Replays:
    def __init__(self, scheduler: Scheduler, axis: LayoutLine, case: Case, tolerance: float) -> None:
        self.scheduler, self.axis, self.case, self.tolerance = scheduler, axis, case, tolerance
        self.began = time.monotonic()
        self.steps = scheduler.case.steps
        self.remarks = [*scheduler.remarks]
        self.twins: list[tuple[Header, Header]] = []

    def run(self) -> LayoutResult:
        """Both ends twice, then what is between."""
        endpoints = (self.axis.good, self.axis.bad)
        self.scheduler.say(f"replaying {endpoints[0]} and {endpoints[1]} twice each")
        requests = [Request(e, self.steps, stage="ends", run=run, full=True) for e in endpoints for run in (0, 1)]
        answers = zip([end for end in endpoints for _ in (0, 1)], self.scheduler.ask(*requests), strict=True)
        traces = [trace_of(answer, end) for end, answer in answers]
        first, last = traces[0].header, traces[2].header
        self.twins = [(first, traces[1].header), (last, traces[3].header)]
        asked = ((endpoints[1], first, last), (endpoints[0], last, first))
        parts = {end: part for end, a, b in asked if (part := self.axis.lost(end, a, b, self.twins))}
        self._refuse(parts, agree=False)
        flaky = {
            end: f"two replays of it differ at {difference.of_itself}"
            for end, first, again in zip(endpoints, traces[::2], traces[1::2], strict=True)
            if (difference := differ_twice(first, again, end))
        }
        if flaky:
            return self._result("flaky", flaky, None, [])
        made = [len(trace.steps) for trace in (traces[0], traces[2])]
        if made[0] != made[1]:
            raise ReproError(
                f"{endpoints[0]} makes {made[0]} steps, {endpoints[1]} {made[1]}: give both the same to do"
            )
        for (end, a), b in zip(zip(endpoints, traces[::2], strict=True), traces[2::-2], strict=True):
            if failed := failed_since(b, a):
                raise NotVerifiableError(f"{end}: {failed}, and the other's did not")
        self.remarks += self.scheduler.tell_length("each", traces[0])
        both = {endpoints[0]: traces[0], endpoints[1]: traces[2]}
        compared = self._compared(traces[0], traces[2])
        self._refuse(parts, agree=compared.first is None)
        for end, part in [*parts.items()][:1]:  # it may have come by a file, say, or a script computes with it
            self._remark(end, part)
        comparison, flaky = self._measured(both, compared)
        if flaky:
            return self._result("flaky", flaky, None, [])
        if comparison.verdict != "part":
            require_finite(traces[2])
        between = self._between(both) if comparison.first and len(self.axis.keys) > 1 else []
        return self._result(comparison.verdict, {}, comparison, between)

    def _refuse(self, parts: Mapping[str, Lost], *, agree: bool) -> None:
        for end, part in parts.items():
            if part.refuses(agree=agree):
                raise refused(end, part.text)

    def _remark(self, point: str, part: Lost) -> None:
        text = f"{point}: {part.text}, under this name at least"
        if text not in self.remarks:
            self.remarks.append(text)

    def _compared(self, a: Trace, b: Trace) -> LayoutComparison:
        return compare_layouts(a, b, self.tolerance, self.axis.absolute, self.axis.relative)

    def _measured(self, both: Mapping[str, Trace], seen: LayoutComparison) -> tuple[LayoutComparison, dict[str, str]]:
        """The same with what differs measured on whole tensors, of one more replay of each.

        Returns:
            The comparison, and the ends whose third replay is another than the first two, with how.
        """
        if seen.first is None:
            return seen, {}
        wanted = self._dumps(list(both.values()), seen)
        if not wanted:
            return seen, {}
        last = max(seen.first.step, seen.parted.step if seen.parted else 0, *(step for step, _, _ in wanted))
        self.scheduler.say(f"measuring {len(wanted)} signals whole: replaying both to step {last}")
        steps = last - next(iter(both.values())).header.first_step + 1
        requests = [Request(end, steps, stage="confirmation", run=2, full=True, dump=wanted) for end in both]
        answers = self.scheduler.ask(*requests)
        dumped = [trace_of(answer, end) for answer, end in zip(answers, both, strict=True)]
        third = "a third replay of it"
        flaky = {
            end: how
            for (end, first), again in zip(both.items(), dumped, strict=True)
            if (how := unlike_before(first, again, steps, third, f"{third} differs from the first two"))
        }
        if flaky:
            return seen, flaky
        whole = self._compared(dumped[0], dumped[1])
        if whole.parted or seen.parted:  # what parted them by a part of it does so as a whole
            return (whole if whole.parted else seen), {}
        worst = max(
            (c.worst for c in (whole, seen) if c.worst),
            key=lambda p: (p.units or 0.0, p.how != "sampled"),
            default=None,
        )
        sampled = {step: n for step, n in seen.sampled.items() if step > last} | dict(whole.sampled)
        unmeasured = {step: n for step, n in seen.unmeasured_at.items() if step > last} | dict(whole.unmeasured_at)
        return replace(seen, first=whole.first, worst=worst, sampled=sampled, unmeasured_at=unmeasured), {}

    def _dumps(self, traces: Sequence[Trace], seen: LayoutComparison) -> list[Signal]:
        """The signals whose whole tensors are wanted: those that differ, as many as find room, and where they part."""
        assert seen.first is not None
        parted = seen.parted if seen.parted and seen.parted.how == "sampled" else None
        signals = [(p.step, p.phase, p.signal) for p in (parted,) if p]
        size, names = 0, 0
        for index, record in enumerate(traces[0].steps[: seen.steps]):
            if record.step < seen.first.step or size > _DUMPED or names > _NAMES:
                continue
            for kind, row, other in differing(
                traces[0].rows(index), traces[1].rows(index), unlike(*traces[:2]).at(index)
            ):
                # shards that a command's ranks hold are written by none; in process the whole is put together
                known = bool(row.sketch and other and other.sketch) or self.case.subject.tells
                if kind == "value" and known and row.values is None and row.dtype in EPSILON:
                    size, names = size + math.prod(row.shape) * 8, names + len(canonical_json(row.name)) + 32
                    if size <= _DUMPED and names <= _NAMES:
                        signals.append((record.step, row.phase, row.name))
        return list(dict.fromkeys(signals))

    def _between(self, both: Mapping[str, Trace]) -> list[Between]:
        """What each key does to the layout before it."""
        line = [self.axis.good, *self.axis.keys]
        inner = line[1:-1]
        self.scheduler.say(f"replaying {', '.join(inner)}: which key makes the difference?")
        replays = self.scheduler.ask(*(Request(point, self.steps, full=True) for point in inner))
        answers = dict(both) | dict(zip(inner, replays, strict=True))
        between = []
        for before, after in itertools.pairwise(line):
            a, b = answers[before], answers[after]
            why = next((answer.reason for answer in (b, a) if isinstance(answer, Skip)), "")
            if isinstance(a, Trace) and isinstance(b, Trace) and not why:
                why = ended_early(a, b)
            compared = self._compared(a, b) if isinstance(a, Trace) and isinstance(b, Trace) and not why else None
            if compared and isinstance(a, Trace) and isinstance(b, Trace):
                part = self.axis.lost(after, a.header, b.header, self.twins)
                if part and part.refuses(agree=compared.first is None):
                    compared, why = None, part.text
                elif part:
                    self._remark(after, part)
            between.append(Between(self.axis.keys[after], after, compared, why))
        return between

    def _result(
        self,
        outcome: Literal["equal", "agree", "part", "flaky"],
        flaky: Mapping[str, str],
        comparison: LayoutComparison | None,
        between: Sequence[Between],
    ) -> LayoutResult:
        return LayoutResult(
            a=self.axis.good,
            b=self.axis.bad,
            case=self.case.name,
            commit=self.axis.commit(self.axis.good),
            outcome=outcome,
            flaky=flaky,
            comparison=comparison,
            between=between,
            cost=self.scheduler.cost,
            seconds=time.monotonic() - self.began,
            machine=self.scheduler.machine,
            remarks=self.remarks,
        )
