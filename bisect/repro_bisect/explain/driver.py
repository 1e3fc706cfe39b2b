"""Explaining a difference: the divergent step of two versions, recorded operation by operation and compared."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from repro_bisect.axes.axis import Axis, short
from repro_bisect.explain.cause import Cause, find_cause, under_names
from repro_bisect.explain.result import Answer, Explained, Explanation, Size, Version
from repro_bisect.explain.source import Diff, Place, Sources, read_diff
from repro_bisect.explain.source import Version as Source
from repro_bisect.probe.answers import Recording, Skip, trace_of
from repro_bisect.probe.executors import State
from repro_bisect.probe.one_step import prepare, same_step, state_key
from repro_bisect.probe.request import Request
from repro_bisect.probe.scheduler import Scheduler
from repro_bisect.probe.states import States
from repro_golden.base.errors import NotVerifiableError
from repro_golden.compare.coverage import coverage_of
from repro_golden.compare.endings import ended_early, failed_since
from repro_golden.compare.renames import aligned
from repro_golden.compare.step_difference import round_at
from repro_golden.compare.told_metrics import moved_text
from repro_golden.compare.traces import Divergence, first_difference, require_finite
from repro_golden.recording.operations.stream import Operation, Stream, dump_of, kept_of
from repro_golden.repository.checkout import Checkout
from repro_golden.subjects.environments.builds import environment_changes
from repro_golden.trace import Trace
from repro_golden.trace.tensor_difference import decode, measure, ulp_histogram

__all__ = ["Recorded", "explain"]


@dataclass(frozen=True)
class Recorded:
    """What two replays from step 0 recorded on their way.

    Attributes:
        steps: The first and the last step whose operations were recorded.
        recordings: Of both versions.
    """

    steps: tuple[int, int]
    recordings: tuple[Recording, Recording]


def explain(
    scheduler: Scheduler,
    checkout: Checkout,
    before: str,
    after: str,
    *,
    golden: Mapping[int, Path] | None = None,
    until: int | None = None,
    recorded: Recorded | None = None,
) -> Explanation:
    """Say why the numbers of one point of the scheduler's axis differ from those of another.

    Args:
        scheduler: Where replays run; `before` and `after` are points of its axis.
        checkout: The repository.
        before: The first version.
        after: The second.
        golden: Saved states of the first version that are at hand, by step.
        until: A step in which they are known to differ; None looks at all of the case.
        recorded: What earlier replays of both recorded, if any did; it serves where it holds the divergent step.

    Raises:
        NotVerifiableError: a version does not reproduce itself, or not under the recorder.
        ReproError: a version cannot be replayed.
    """
    return _Explainer(scheduler, checkout, (before, after), golden or {}, until, recorded).run()


_READ_AGAIN = ("operation", "random")
"""Causes that need to be sure of what their operation read, so that it is read once more as it does."""


class _Explainer:
    def __init__(
        self,
        scheduler: Scheduler,
        checkout: Checkout,
        points: tuple[str, str],
        golden: Mapping[int, Path],
        until: int | None,
        recorded: Recorded | None,
    ) -> None:
        self.recorded = recorded
        self.scheduler, self.checkout, self.points, self.golden = scheduler, checkout, points, golden
        self.steps = scheduler.case.steps if until is None else until + 1
        self.axis: Axis = scheduler.history
        self.subjects = self.axis.subjects(points)
        self.commits = a, b = (self.axis.commit(points[0]), self.axis.commit(points[1]))
        self.diff = read_diff(checkout, a, b) if a != b else Diff()
        self.state: State | None = None
        self.written: Divergence | None = None
        self.round = (0, 0)

    def run(self) -> Explanation:
        """From two traces to an answer."""
        traces = self._traces()
        divergence = first_difference(*traces, strict=self.scheduler.case.compare.strict)
        alignment = aligned(*traces)
        environment = [str(change) for change in environment_changes(traces[0].header, traces[1].header)]
        before, after = (Version(point, self.subjects.get(point, ""), 0, None) for point in self.points)
        looked = coverage_of(traces[1], alignment.alone, moved=[] if divergence else moved_text(*traces))
        steps = min(len(trace.steps) for trace in traces)
        text = f"{_said(self.points)} agree bit for bit over {steps} steps{looked.but}"
        ended = ended_early(*traces)
        text = f"{text}; {alignment.renames}" if alignment.renames else text
        if ended:
            text += (
                f"; {ended.replace('the run', short(self.points[1])).replace('the baseline', short(self.points[0]))}"
            )
        if failed := failed_since(*traces):
            text += f"; {short(self.points[1])}: {failed}"
        case = self.scheduler.case
        explanation = Explanation(
            "agree", case.name, text, divergence, before, after, environment=environment, looked=looked
        )
        if divergence is None:
            require_finite(traces[1])
            return explanation
        if not case.subject.recorded:
            raise NotVerifiableError(
                "operations are seen by the recorder alone, and the case says recorder = false: set it to true"
            )
        self.scheduler.say(f"{_said(self.points)} differ at {divergence}: recording that step's operations")
        recordings = self._recordings(divergence, traces)
        for rank in range(len(recordings[0].streams)):
            streams = (recordings[0].streams[rank], recordings[1].streams[rank])
            if alignment.renames:
                streams = (under_names(streams[0], {}), under_names(streams[1], alignment.names))
            versions = [
                replace(version, operations=len(stream.operations))
                for version, stream in zip((before, after), streams, strict=True)
            ]
            start = self.state.step if self.state else None
            explanation = replace(
                explanation, before=versions[0], after=versions[1], rank=rank, start=start, written=self.written
            )
            sources = self._sources(streams)
            difference = self.written or divergence
            signal = (difference.phase, difference.signal)
            if cause := find_cause(*streams, signal, (sources[0].touched, sources[1].touched)):
                return self._answer(explanation, cause, divergence, traces, sources, recordings)
        return replace(explanation, answer="unseen", text=_UNSEEN)

    # -- replays

    def _traces(self) -> tuple[Trace, Trace]:
        """Both versions' traces, the second up to where it leaves the first."""
        (before, after), steps = self.points, self.steps
        (first,) = self.scheduler.ask(Request(before, steps, stage="explanation"))
        a = trace_of(first, short(before))
        (second,) = self.scheduler.ask(Request(after, steps, a, stage="explanation"))
        return a, trace_of(second, short(after))

    def _recordings(self, divergence: Divergence, traces: tuple[Trace, Trace]) -> tuple[Recording, Recording]:
        """The divergent step of both under the recorder, from the last equal state where both can start there.

        A step that has other numbers under the recorder is none to explain, unless because torch.compile's functions
        ran there as they are written: then it serves if the two differ in that too, and it is the same twice.
        """
        step = divergence.step
        self.round = round_at(traces[0], step)
        if self.recorded and self.recorded.steps == self.round:
            recordings = self._whole(*self.recorded.recordings)
        else:
            recordings = self._record(((), ()), self._state(self.round[0], traces))
        moved = [
            point
            for point, recording, trace in zip(self.points, recordings, traces, strict=True)
            if not same_step(recording.trace, trace, step)
        ]
        if not moved:
            return recordings
        if not any(stream.compiled for recording in recordings for stream in recording.streams):
            self.scheduler.prober.forget(*recordings)
            raise NotVerifiableError(
                f"step {step} of {short(moved[0])} has other numbers under the recorder than without it: it does not "
                "reproduce itself (`repro bisect` tells whether it is noisy), or takes another way under a dispatch "
                "mode, as torch.func's transforms do"
            )
        self.written = first_difference(recordings[0].trace, recordings[1].trace)
        if self.written is None:
            raise NotVerifiableError(
                f"{_said(self.points)} agree in step {step} as their code is written, which is how the recorder runs "
                "it: what differs is what torch.compile makes of it"
            )
        return recordings

    def _state(self, step: int, traces: tuple[Trace, Trace]) -> State | None:
        """The first version's state before the step, if both make the same of it as on their own way there."""
        if step == 0:
            return None
        states = States(self.checkout.state / "states", state_key(self.scheduler, self.points[0]))
        try:
            shortcut = prepare(self.scheduler, states, self.golden, self.points, step, traces)
        finally:
            states.close(self.scheduler.case.case.states_budget)
        self.state = shortcut.state if shortcut else None
        return self.state

    def _record(
        self, values: tuple[Sequence[int], Sequence[int]], state: State | None, run: int = 0
    ) -> tuple[Recording, Recording]:
        last = self.round[1]

        def started(point: str, other: str, wanted: Sequence[int]) -> Future[Any]:
            asked = Request(point, last + 1 - (state.step if state else 0), stage="explanation", run=run, start=state)
            return self.scheduler.start(
                point, lambda pending: pending.operations(asked, self.round, wanted, against=other)
            )

        futures = [started(*each) for each in zip(self.points, self.points[::-1], values, strict=True)]
        return self._whole(*self.scheduler.results(futures))

    def _whole(self, *recordings: Any) -> tuple[Recording, Recording]:
        """Both recordings, if nothing is missing of them."""
        for point, recording in zip(self.points, recordings, strict=True):
            if isinstance(recording, Skip):
                raise NotVerifiableError(f"the operations of {short(point)} are not known: {recording.reason}")
            for stream in recording.streams:
                if stream.problem:
                    raise NotVerifiableError(f"the recording of {short(point)} is not whole: {stream.problem}")
        return recordings[0], recordings[1]

    # -- what they say

    def _same_code(self) -> bool:
        """Whether no file of the subject's code differs, but for those that say what environment it wants."""
        subject, paths = self.scheduler.case.subject, [PurePosixPath(path) for path in self.axis.paths]
        locks = subject.locks
        files = [PurePosixPath(file) for file in {*self.diff.before, *self.diff.after} - set(locks)]
        return not any(file.is_relative_to(path) for file in files for path in paths)

    def _sources(self, streams: tuple[Stream, Stream]) -> tuple[Sources, Sources]:
        a, b = self.commits
        return (
            Sources(Source(self.checkout, a, self.diff.before, "before"), streams[0]),
            Sources(Source(self.checkout, b, self.diff.after, "after"), streams[1]),
        )

    def _answer(
        self,
        explanation: Explanation,
        cause: Cause,
        divergence: Divergence,
        traces: tuple[Trace, Trace],
        sources: tuple[Sources, Sources],
        recordings: tuple[Recording, Recording],
    ) -> Explanation:
        cause, size = self._measured(cause, divergence.step, explanation.rank, recordings)
        operations = list(zip((cause.before, cause.after), sources, strict=True))
        explained = [
            None if o is None else Explained.of(o, source.place(o), source.stack(o)) for o, source in operations
        ]
        mentions: list[Place] = []
        ran: dict[str, Place] = {}
        if not any(side and side.place and side.place.touched for side in explained):
            for operation, source in operations:
                mentions += source.mentions(operation) if operation else []
            # the later version's first: what the earlier one has besides is what the change took away
            for place in () if mentions else (place for o, source in operations[::-1] for place in source.ran(o)):
                ran.setdefault(place.hunk, place)
        cause_sources = sources[0 if cause.side == "before" else 1]
        gap = cause.gap and (_edge(cause.gap[0], cause_sources), _edge(cause.gap[1], cause_sources))
        inputs = _differing_inputs(divergence, traces)
        answer: Answer = "inputs" if inputs else cause.kind
        text = _sentence(cause, inputs, gap, explained)
        if explanation.environment and self._same_code():
            answer, text = "environment", f"{_only_the_environment(explanation.environment)}: {text}"
        return replace(
            explanation,
            answer=answer,
            text=text,
            before=replace(explanation.before, explained=explained[0]),
            after=replace(explanation.after, explained=explained[1]),
            side=cause.side,
            gap=gap,
            size=size,
            mentions=mentions,
            ran=list(ran.values()),
            others=len(cause.others),
        )

    def _measured(
        self, cause: Cause, step: int, rank: int, recordings: tuple[Recording, Recording]
    ) -> tuple[Cause, Size | None]:
        """The size of the difference, from a second recording that keeps values; and what its inputs really held."""
        wanted = [
            sorted({o.index for o in (operation, cause.pair[k] if cause.pair else None) if o is not None})
            for k, operation in enumerate((cause.before, cause.after))
        ]
        if not any(wanted) and not self.written:
            return cause, None
        streams = [recording.streams[rank] for recording in recordings]
        if cause.pair and cause.kind not in _READ_AGAIN and not self.written:
            raw = [kept_of(stream, operation) for stream, operation in zip(streams, cause.pair, strict=True)]
            if raw[0] is not None and raw[1] is not None:
                return cause, _size_of(cause.pair, (raw[0], raw[1]))
        again = self._record((wanted[0], wanted[1]), self.state, run=1)
        for point, first, second in zip(self.points, recordings, again, strict=True):
            if self.written and not same_step(first.trace, second.trace, step):
                self.scheduler.prober.forget(*recordings, *again)
                raise NotVerifiableError(
                    f"step {step} of {short(point)} has other numbers in each recording: it does not reproduce itself "
                    "as it is written, without torch.compile"
                )
        values = [recording.streams[rank] for recording in again]
        if cause.kind in _READ_AGAIN and cause.before and cause.after:
            # what lies in memory that nobody has written is read by none, and has no content
            places = [k for k, value in enumerate(cause.before.inputs) if value.content]
            read = [
                [_held(stream, operation, "in", k) for k in places]
                for stream, operation in zip(values, (cause.before, cause.after), strict=True)
            ]
            if None in (*read[0], *read[1]):
                raise NotVerifiableError(
                    f"the second recording of step {step} makes other calls than the first: what {cause.before.name} "
                    "read could not be looked at again"
                )
            if other := [k for k, a, b in zip(places, *read, strict=True) if a != b]:
                # its inputs changed behind the back of who read them first
                makers = [index for k in other for index in cause.after.inputs[k].makers]
                writer = streams[1].operations[max(makers)] if makers else None
                return replace(cause, kind="gap", gap=(writer, cause.after)), None
        if cause.pair is None:
            return cause, None
        raw = [_held(stream, operation, "out", 0) for stream, operation in zip(values, cause.pair, strict=True)]
        if raw[0] is None or raw[1] is None:
            return cause, None
        return cause, _size_of(cause.pair, (raw[0], raw[1]))


def _said(points: Sequence[str]) -> str:
    return " and ".join(short(point) for point in points)


def _edge(operation: Operation | None, source: Sources) -> str:
    return "the beginning of the step" if operation is None else f"{operation.name} at {source.place(operation)}"


def _held(stream: Stream, operation: Operation, kind: str, place: int) -> bytes | None:
    """What a second recording has of an operation of the first; None where another has its number there.

    What comes from a data loader's workers is opened when it arrives: of such calls there may be more, or fewer.
    """
    there = stream.operations[operation.index] if operation.index < len(stream.operations) else None
    if there is None or there.asked != operation.asked:
        return None
    path = dump_of(stream, operation.index, kind, place)
    return path.read_bytes() if path.exists() else None


# -- an explanation in words, and in figures that were measured


_UNSEEN = "no recorded operation differs: what made the difference was not seen"


def _differing_inputs(divergence: Divergence, traces: tuple[Trace, Trace]) -> str:
    """What of a step's inputs differs, where it is they that do; else empty."""
    signal = divergence.signal
    if divergence.phase != "input":
        return ""
    if signal.startswith("start/"):
        whose = "the run starts from" if divergence.step == traces[0].header.first_step else "an optimizer begins with"
        return f"the weights that {whose} ({signal.removeprefix('start/')})"
    contents = []
    for trace in (traces[0], aligned(*traces).trace):
        index = next(i for i, record in enumerate(trace.steps) if record.step == divergence.step)
        row = trace.row(index, "input", signal)
        contents.append((row.dtype, row.shape, row.values) if row else None)
    a, b = contents
    if a is None or b is None:
        return f"the data of the step ({signal} is there on one side only)"
    if a[:2] == b[:2] and a[2] is not None and b[2] is not None and a[2]:
        item = len(a[2]) // math.prod(a[1])
        elements = [Counter(raw[k : k + item] for k in range(0, len(raw), item)) for raw in (a[2], b[2])]
        if elements[0] == elements[1]:
            return f"the order of the data of the step ({signal} holds the same elements in another order)"
    return f"the data of the step ({signal})"


def _only_the_environment(changes: Sequence[str]) -> str:
    """That it, and no code, differs: the first part by name."""
    more = f" and {len(changes) - 1} more" if len(changes) > 1 else ""
    return f"only the environment differs ({changes[0]}{more})"


def _size_of(pair: tuple[Operation, Operation], raw: tuple[bytes, bytes]) -> Size:
    """The first results of two operations, compared whole; those of two dtypes by their values."""
    values = [operation.outputs[0] for operation in pair]
    dtypes = (values[0].dtype, values[1].dtype)
    total = math.prod(values[0].shape)
    where = pair[0].name + (f" in {pair[0].module}" if pair[0].module else "")
    if dtypes[0] == dtypes[1]:
        return Size(where, measure(dtypes[0], *raw, total), ulp_histogram(dtypes[0], *raw), dtypes)
    wide = [decode(dtype, data).astype("<f8").tobytes() for dtype, data in zip(dtypes, raw, strict=True)]
    difference = measure("float64", wide[0], wide[1], total)
    return Size(where, replace(difference, max_ulp=None), (), dtypes)


def _sentence(cause: Cause, inputs: str, gap: tuple[str, str] | None, explained: Sequence[Explained | None]) -> str:
    """The answer in one sentence."""
    main = cause.operation
    order = explained if cause.side == "before" else explained[::-1]
    at = next((f" at {side.place}" for side in order if side and side.place), "")
    a, b = cause.before, cause.after
    forms = [[(v.dtype, list(v.shape)) for v in o.inputs] if o else [] for o in (a, b)]
    form = next((f"{x[0]} {x[1]} became {y[0]} {y[1]}" for x, y in zip(*forms, strict=False) if x != y), "")
    if inputs:
        return f"the step begins with other values: {inputs}; the difference comes from {main.name}{at}"
    if gap:
        return (
            f"what {gap[1]} read was written after {gap[0]} by no recorded operation: what wrote it was not seen, as "
            "kernels of extensions and of custom autograd functions and collectives are not"
        )
    simple = {
        "inputs": f"{main.name}{at} reads a value from outside of torch, or from before the step, that differs"
        + (f" ({form})" if form else ""),
        "random": f"{main.name}{at} draws other random numbers: the generator's stream differs",
        "operation": f"{main.name}{at} reads the same bits with the same arguments, and makes others",
    }
    if cause.kind in simple:
        return simple[cause.kind]
    if a is None or b is None:
        return f"{main.name}{at} is {'made only after the change' if a is None else 'no longer made'}"
    if cause.kind == "arguments":
        return f"{main.name}{at} is given other arguments: ({a.arguments}) became ({b.arguments})"
    if a.name == b.name:
        what = f"tensors of another dtype or shape ({form})" if form else "other values"
        return f"{main.name}{at} reads {what} than before"
    other = a.name if cause.side == "after" else b.name
    return f"{main.name}{at} stands where {other} {'stood' if cause.side == 'after' else 'stands now'}"
