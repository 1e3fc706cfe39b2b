"""The numeric changelog: every commit of a range that changed the numbers of a case, in order, and by how much."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from repro_bisect.axes.axis import Axis, short
from repro_bisect.driver.circumstances import lost_of, refuse_disturbed, refuse_explained, refuse_lost
from repro_bisect.driver.drift import Drift, HistoryResult, Rename, Row, drift
from repro_bisect.driver.result import in_order
from repro_bisect.driver.session import Options, session, undisturbed
from repro_bisect.predicates.predicates import Bitwise
from repro_bisect.probe.answers import Answer, Code, differ_twice, trace_of, unlike_before, unusable
from repro_bisect.probe.executors import Signal
from repro_bisect.probe.progress import Watch
from repro_bisect.probe.request import Request
from repro_bisect.probe.scheduler import PendingProbe, Scheduler
from repro_bisect.search.changelog import Changelog, Entry, Survey
from repro_bisect.search.first_bad import Verdict
from repro_golden.base.errors import NotVerifiableError
from repro_golden.case.file import Case
from repro_golden.compare.endings import ended_early, failed_since
from repro_golden.compare.renames import aligned
from repro_golden.compare.traces import first_difference, first_divergent_index, require_finite
from repro_golden.repository.checkout import Checkout
from repro_golden.store.golden import GoldenRun
from repro_golden.subjects.environments.builds import environment_changes
from repro_golden.trace import Trace

__all__ = ["history_of"]

_FLAKY = "two replays of it differ"
_REPLAY = 2
"""Number of the replays that dump tensors."""


def history_of(checkout: Checkout, case: Case, axis: Axis, watch: Watch, options: Options) -> HistoryResult:
    """List every point of an axis that changed the numbers of a case.

    Args:
        checkout: The repository; nothing in it changes.
        case: The case.
        axis: The range.
        watch: Called with every line of progress, and about once a second.
        options: How to search; `Options.every` tests every point.

    Raises:
        NotVerifiableError: GOOD does not reproduce itself.
        ReproError: the rollouts or an end cannot be used.
        MachineFailureError: the machine failed; the same command resumes.
    """
    predicate = Bitwise(strict=case.compare.strict)

    def search(options: Options) -> HistoryResult:
        with session(checkout, case, axis, predicate, watch, options, golden_first=True) as (scheduler, golden):
            return _History(scheduler, golden, every=options.every).run()

    return undisturbed(search, watch, options)


@dataclass(frozen=True)
class _Job:
    """A probe: a point's numbers, or, once they are known, a replay that dumps a signal, or a whole second replay."""

    point: str
    signal: Signal | None = None
    again: bool = False


class _History:
    def __init__(self, scheduler: Scheduler, golden: GoldenRun | None, *, every: bool) -> None:
        self.scheduler, self.axis, self.golden, self.every = scheduler, scheduler.history, golden, every
        self.numbers: dict[Hashable, Trace] = {}  # by the chain of the first trace that had them
        self.log = Changelog(
            self.axis.parents,
            self.axis.good,
            self.axis.bad,
            self.axis.tree,
            every=every,
            moved=lambda a, b: a != b and self._moved(self.numbers[a], self.numbers[b]),
        )
        self.strict = self.scheduler.case.compare.strict
        self.traces: dict[Hashable, Trace] = {}
        self.replays: dict[tuple[Hashable, Signal | None, bool], Answer] = {}
        self.flaky: dict[Hashable, tuple[str, str]] = {}
        self.lost: set[Hashable] = set()  # keys of what lies after noise that stays
        self.survey = Survey()
        self.steps = self.scheduler.case.steps
        self.noise = self.ended = ""
        self.remarks = [*scheduler.remarks]

    def run(self) -> HistoryResult:
        """Both ends, the searches, and a replay of both sides of every change."""
        self.scheduler.begin()
        agree = self._replay_endpoints()
        self.scheduler.drive(self._plan, self._take, lambda: next(iter(self.survey.searches), None))
        assert self.survey.done
        return self._result(self.survey.entries, agree)

    def _replay_endpoints(self) -> bool:
        """GOOD twice, BAD once; whether they agree. BAD's second replay comes with those of what is found."""
        good, bad = self.axis.good, self.axis.bad
        once = "its golden run is at hand; replaying it once" if self.golden else "replaying it twice"
        self.scheduler.say(f"GOOD {short(good)}: {once}; BAD {short(bad)}: once")
        twins = self.axis.tree(good) == self.axis.tree(bad)
        asked = [(good, 0), (good, 1), *([] if twins else [(bad, 0)])]
        requests = [Request(point, self.steps, stage="ends", run=run) for point, run in asked]
        answers = self.scheduler.ask(*requests)
        first, again, last = (
            trace_of(answer, name)
            for answer, name in zip([*answers, answers[0]], ("GOOD", "GOOD", "BAD"), strict=False)
        )
        if differs := differ_twice(first, again, "GOOD"):
            refuse_explained(self.scheduler, (requests[0], first), (requests[1], again))
            raise self._noisy_good(f"{_FLAKY} at {differs.of_itself}")
        self.remarks += self.scheduler.tell_length("GOOD", first)
        lengths = len(first.steps), len(last.steps)
        self.steps = min(lengths)
        self.ended = ended_early(first, last).replace("the run", "BAD").replace("the baseline", "GOOD")
        if failed := failed_since(first, last):
            self.ended = self.ended or f"BAD: {failed}"
        for point, trace in ((good, first), (bad, last)):
            self._know(point, trace)
        agree = not self._moved(first, last) and not self.ended
        self.remarks += refuse_lost(self.scheduler, first, last, agree=agree)
        if agree:
            require_finite(last)
        return agree

    def _numbers(self, trace: Trace) -> Hashable:
        """The same for traces that agree bit for bit, whatever their signals are called.

        Those of which one has objects that the other lacks are not the same: each may agree with a third that has none.
        """
        chain = trace.steps[self.steps - 1].chain
        if chain not in self.numbers:
            for numbers, other in self.numbers.items():
                if not self._moved(other, trace) and not self._alone(other, trace):
                    return numbers
            self.numbers[chain] = trace
        return chain

    def _alone(self, a: Trace, b: Trace) -> Mapping[str, str]:
        """Objects that one of both has alone, and which (`Alignment.alone`)."""
        return aligned(a, b, strict=self.strict).alone

    def _moved(self, a: Trace, b: Trace) -> bool:
        """Whether what both have differs in a step that all make."""
        index = first_divergent_index(a, b, strict=self.strict)
        return index is not None and index < self.steps

    def _noisy_good(self, why: str) -> NotVerifiableError:
        return NotVerifiableError(
            f"GOOD {short(self.axis.good)} is FLAKY, {why}: a changelog of noise is "
            "none; make it deterministic, or start the range at a commit that is"
        )

    def _plan(self, room: int) -> bool:
        """Fill what is free, replays of what is found first; end what is moot; False where nothing is left to run."""
        survey = self.survey = self.log.survey()
        pending = self.scheduler.pending_probes.values()
        jobs: list[_Job] = [probe.job for probe in pending]
        under_way = [self.axis.tree(job.point) for job in jobs if not job.signal]
        asked = [job for entry in survey.entries for job in self._replays(entry)]
        bad = self.axis.tree(self.axis.bad)
        if (self.flaky or survey.done) and bad not in self.flaky:  # its numbers may be chance, as noise before it
            asked.insert(0, _Job(self.axis.bad, again=True))
        started = {self._name(job) for job in jobs}
        for job in asked:
            if room > 0 and self._name(job) not in {*started, *self.replays}:
                started.add(self._name(job))
                self._submit(job)
                room -= 1
        for point in self.log.next(survey, max(0, room), under_way):
            self._submit(_Job(point))
        moot = self.log.moot(survey, under_way)
        self.scheduler.cancel(
            probe for probe in pending if not probe.job.signal and not probe.job.again and probe.tree in moot
        )
        return bool(pending)

    def _submit(self, job: _Job) -> None:
        self.scheduler.submit(self._request(job), job)

    def _request(self, job: _Job) -> Request:
        asked = Request(job.point, self.scheduler.case.steps)
        if job.again:
            asked = replace(asked, stage="confirmation", run=1)
        if job.signal:
            steps = job.signal[0] - self._trace(job.point).header.first_step + 1
            asked = Request(job.point, steps, stage="confirmation", run=_REPLAY, partial=True, dump=[job.signal])
        return asked

    def _trace(self, point: str) -> Trace:
        return self.traces[self.axis.tree(point)]

    def _replays(self, entry: Entry) -> list[_Job]:
        """The replays that an entry's sizes are measured by, and that show whether its numbers are its own."""
        return [
            _Job(point, signal)
            for before in (entry.before, self.axis.good)
            for point, signal in self._signals(before, entry.after)
        ]

    def _signals(self, before: str, after: str) -> list[tuple[str, Signal]]:
        """Both points, each with the first signal that differs under the name that it has there."""
        differs = first_difference(self._trace(before), self._trace(after), strict=self.strict)
        return [(before, differs.signals[0]), (after, differs.signals[-1])] if differs else []

    def _name(self, job: _Job) -> tuple[Hashable, Signal | None, bool]:
        """Jobs with one name are one: points with the same code share a replay."""
        return self.axis.tree(job.point), job.signal, job.again

    def _take(self, pending: PendingProbe, answer: Answer) -> None:
        """A point's numbers, or a replay that bears them out or does not."""
        job: _Job = pending.job
        if job.signal or job.again:
            self.replays[self._name(job)] = answer
            first = self._trace(job.point)
            steps = job.signal[0] - first.header.first_step + 1 if job.signal else self.steps
            if unlike := unlike_before(first, answer, steps, "a second replay of it", _FLAKY):
                asked = Request(job.point, self.scheduler.case.steps), self._request(job)
                refuse_disturbed(self.scheduler, (asked[0], first), (asked[1], answer))
                self._is_flaky(job.point, unlike)
        elif self.axis.tree(job.point) in self.lost:  # it was under way
            return
        elif lost := lost_of(self.scheduler, job.point, self._trace(self.axis.good), answer):
            self._cannot(job.point, lost)
        elif isinstance(answer, Trace) and len(answer.steps) >= self.steps:
            self._know(job.point, answer)
        elif isinstance(answer, Trace):
            self._cannot(job.point, f"it ends after {len(answer.steps)} of {self.steps} steps")
        elif isinstance(answer, Code):
            self._cannot(job.point, unusable("", answer))
        else:
            self._cannot(job.point, answer.reason, answer.diagnosis)

    def _know(self, point: str, trace: Trace) -> None:
        """A point's numbers, and those of its twins."""
        numbers, same = self._numbers(trace), self._trace(self.axis.good) if self.traces else trace
        self.traces[self.axis.tree(point)] = trace
        self.log.tell(point, numbers)
        good = not self._moved(same, trace)
        for twin in self.log.twins(point):
            self.scheduler.record(twin, Verdict.GOOD if good else Verdict.BAD)
        if point != self.axis.good:
            where = (
                f"GOOD's numbers{self._renamed(same, trace)}"
                if good
                else f"other numbers than GOOD from {self._where(same, trace)}"
            )
            self.scheduler.say(f"{self._count()}: {short(point)} has {where}")

    def _count(self) -> str:
        """How many points of the range were tried, those with the same code included."""
        tried = sum(point in self.scheduler.verdicts for point in self.axis.parents)
        return f"{self.axis.what} {tried} of {len(self.axis.parents)}"

    def _renamed(self, a: Trace, b: Trace) -> str:
        renames = aligned(a, b).renames
        return f"; {renames}" if renames else ""

    def _where(self, a: Trace, b: Trace) -> str:
        differs = first_difference(a, b, strict=self.strict)
        assert differs is not None, "their chains differ"
        return f"step {differs.step}, {differs.phase}, {differs.name}"

    def _renames(self) -> list[Rename]:
        """Between points of the line that were tested one after the other and have the same numbers."""
        tested = [point for point in self.log.line if self.axis.tree(point) in self.log.numbers]
        renamings = []
        for before, after in pairwise(tested):
            a, b = self._trace(before), self._trace(after)
            if self._numbers(a) == self._numbers(b) and (renames := aligned(a, b).renames):
                renamings.append(Rename(before, after, renames))
        return renamings

    def _cannot(self, point: str, reason: str, diagnosis: str = "") -> None:
        self.log.tell(point, None, reason)
        for twin in self.log.twins(point):
            self.scheduler.record(twin, Verdict.SKIP, reason)
        self.scheduler.say(f"{self._count()}: SKIP {short(point)} {reason}")
        self.scheduler.know(self.log.twins(point), diagnosis)

    def _is_flaky(self, point: str, why: str) -> None:
        """Numbers that are not a point's own say nothing; where BAD's are not, nothing is said of what is after it."""
        key = self.axis.tree(point)
        if key == self.axis.tree(self.axis.good):
            raise self._noisy_good(why)
        if key not in self.flaky:
            self.scheduler.say(f"FLAKY {short(point)}: {why}")
        self.flaky.setdefault(key, (point, why))
        self.log.tell(point, None, _FLAKY)
        for twin in self.log.twins(point):
            self.scheduler.record(twin, "FLAKY")
        if self.axis.tree(self.axis.bad) not in self.flaky:
            return
        first = min((p for p, _ in self.flaky.values()), key=self.log.position)
        if self.axis.tree(first) != self.axis.tree(self.axis.bad):
            after = f"what changed the numbers after {short(first)} cannot be told"
            self.noise = f"BAD does not reproduce itself either: {after}"
        later = self.axis.descendants(first)
        before = {self.axis.tree(p) for p in (self.axis.good, *self.axis.parents) if p not in later}
        for p in later:
            if self.axis.tree(p) not in before:
                self.lost.add(self.axis.tree(p))
                self.log.tell(p, None, _FLAKY)

    def _result(self, entries: Sequence[Entry], agree: bool) -> HistoryResult:
        rows = [self._row(entry) for each in entries if (entry := self._moved_entry(each))]
        rows += [
            Row("flaky", self.axis.info(point), self.log.before(point) or self.axis.good, [point], detail=why)
            for point, why in self.flaky.values()
            if self._is_first(point)
        ]
        rows.sort(key=lambda row: self.log.position(row.commit.commit))
        named = [
            self.axis.good,
            self.axis.bad,
            *self.scheduler.skips,
            *(p for row in rows for p in (row.before, *row.points)),
        ]
        return HistoryResult(
            good=self.axis.good,
            bad=self.axis.bad,
            case=self.scheduler.case.name,
            what=self.axis.what,
            rows=rows,
            skips={point: self.scheduler.skips[point] for point in in_order(self.scheduler.skips, self.axis.parents)},
            subjects=self.axis.subjects(list(dict.fromkeys(named))),
            points=len(self.axis.parents),
            agree=agree and self.axis.tree(self.axis.bad) not in self.flaky,
            every=self.every,
            noise=self.noise,
            steps=self.steps,
            cost=self.scheduler.cost,
            seconds=time.monotonic() - self.scheduler.began,
            machine=self.scheduler.machine,
            golden=str(self.golden.directory) if self.golden else None,
            renames=self._renames(),
            ended=self.ended,
            remarks=self.remarks,
            looked=self.scheduler.looked(*(self._trace(p) for p in (self.axis.good, self.axis.bad))),
            ends=[self.axis.info(self.axis.good), self.axis.info(self.axis.bad)],
        )

    def _moved_entry(self, entry: Entry) -> Entry | None:
        """An entry whose ends differ in what both have.

        Where the later one has objects back that the other lacks, it is compared with the nearest before that has any.
        """
        after = self._trace(entry.after)
        if self._moved(self._trace(entry.before), after):
            return entry
        came = {name for name, side in self._alone(self._trace(entry.before), after).items() if side == "b"}
        points, point = [*reversed(entry.points)], entry.before
        while came and (earlier := self.log.before(point)) is not None:
            points.append(point)
            point = earlier
            trace = self.traces.get(self.axis.tree(point))
            if trace is None or came <= {name for name, side in self._alone(trace, after).items() if side == "b"}:
                continue
            tried = self.traces.keys() | self.log.skips.keys()
            untried = entry.untried | {p for p in points if self.axis.tree(p) not in tried}
            group = Entry("group", point, entry.after, (*reversed(points),), untried)
            return group if self._moved(trace, after) else None
        return None

    def _is_first(self, point: str) -> bool:
        """Whether a flaky point may have brought the noise: the nearest tested one before it is not flaky."""
        before = self.log.before(point)
        while before is not None:
            key = self.axis.tree(before)
            if key in self.flaky and key != self.axis.tree(point):
                return False
            if key in self.log.numbers:
                break
            before = self.log.before(before)
        return True

    def _row(self, entry: Entry) -> Row:
        before, after, good = self._trace(entry.before), self._trace(entry.after), self.axis.good
        return Row(
            entry.kind,
            self.axis.info(entry.after),
            entry.before,
            entry.points,
            sorted(entry.untried, key=self.log.position),
            self._drift(entry.before, entry.after),
            self._drift(good, entry.after),
            [str(change) for change in environment_changes(before.header, after.header)],
        )

    def _drift(self, a: str, b: str) -> Drift:
        """Over all steps by what traces keep; the first difference over whole tensors, of replays that bear it out."""
        measured = drift(self._trace(a), self._trace(b), strict=self.strict)
        replays = [self.replays.get((self.axis.tree(point), signal, False)) for point, signal in self._signals(a, b)]
        whole = [trace for trace in replays if isinstance(trace, Trace)]
        if len(whole) == 2:
            return replace(measured, divergence=first_difference(whole[0], whole[1], strict=self.strict))
        return measured
