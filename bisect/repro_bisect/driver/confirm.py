"""Confirming a culprit: full replays of it, its parent and the bad end, with the divergent tensor dumped whole."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeGuard

from repro_bisect.axes.axis import PointInfo, short
from repro_bisect.axes.axis import before as point_before
from repro_bisect.driver.circumstances import refuse_changed_world, refuse_disturbed, refuse_explained
from repro_bisect.driver.range_search import RangeSearch
from repro_bisect.driver.result import Culprit
from repro_bisect.explain.driver import Recorded
from repro_bisect.predicates.predicates import Bitwise, Predicate, first_violation, known_violation
from repro_bisect.probe.answers import Answer, Code, Recording, Skip, differ_twice, trace_of
from repro_bisect.probe.request import Request
from repro_bisect.probe.scheduler import PendingProbe, Scheduler
from repro_golden.base.errors import NotShownError, NotVerifiableError, UnjudgedError
from repro_golden.compare.renames import aligned
from repro_golden.compare.step_difference import round_at
from repro_golden.compare.traces import Divergence, compare, differences_in_text, first_difference
from repro_golden.subjects.environments.builds import environment_changes
from repro_golden.trace import Trace

__all__ = ["Confirmed", "Interval", "confirm", "explains_end"]


@dataclass(frozen=True)
class Interval:
    """A range to search.

    Attributes:
        good: Its good end.
        bad: Its bad end.
        baseline: The good end's trace; None for exit codes.
        last: The bad end's trace, as far as it is known; None for exit codes.
    """

    good: str
    bad: str
    baseline: Trace | None
    last: Trace | None


@dataclass(frozen=True)
class Confirmed:
    """A culprit that was borne out.

    Attributes:
        culprit: What is said of it.
        after: Its own full trace; None for exit codes.
        last: The bad end's full trace; None for exit codes and flaky culprits.
        explains: Whether both are the same; None where that cannot be told.
        before: Its parent's full trace; None for exit codes.
        earlier: Where that differs from the good end's: a commit before the culprit moves numbers too, in a later step.
        flaky: Whether its own replays differ.
        recorded: Its parent's replay and its own, where they recorded the operations that an explanation asks for.
        remarks: What is to be known of the bad end beside its numbers.
        untold: Why nothing is known of what comes after the culprit: two replays of the bad end differ, or the culprit
            does not show what the predicate reads of a baseline.
    """

    culprit: Culprit
    after: Trace | None
    last: Trace | None
    explains: bool | None
    before: Trace | None = None
    earlier: Divergence | None = None
    flaky: bool = False
    recorded: Recorded | None = None
    remarks: Sequence[str] = ()
    untold: str = ""


def confirm(
    scheduler: Scheduler,
    range_search: RangeSearch,
    commit: str,
    interval: Interval,
    end: Divergence | None,
    *,
    explain: bool = False,
) -> Confirmed | None:
    """Replay in full what a search named; None where the replays contradict it, or cannot bear it out.

    Where an explanation follows, the replays record the operations of the divergent step on their way: one whose
    numbers are those of the replay before it confirms them all the more.

    Args:
        scheduler: Where the replays run.
        range_search: The search.
        commit: What it named.
        interval: What it searched.
        end: Where the bad end differs from the baseline; None for exit codes.
        explain: Whether an explanation follows.

    Raises:
        NotVerifiableError: a replay of it, or of its parent, ends before the one that it was judged by.
        ReproError: the commit cannot be tested any more.
    """
    info, history, predicate = scheduler.history.info(commit), scheduler.history, scheduler.predicate
    if interval.baseline is None or end is None:
        return _by_exit_code(scheduler, range_search, info, interval)
    scheduler.say(f"confirming {short(commit)} {info.subject}: full replays of it, its parent and BAD")
    known = range_search.tested.get(commit)
    tested = known or scheduler.results([scheduler.start(commit, range_search.test)])[0]
    first = trace_of(tested.answer, "the culprit")
    outcome = range_search.divergence(tested)
    divergence = outcome if isinstance(outcome, Divergence) else end
    steps, parent = scheduler.case.steps, point_before(history, commit, interval.good)
    judged = interval.baseline if parent == interval.good else _straight(range_search, parent)
    asked = [
        scheduler.prober.at_itself(
            Request(c, steps, stage="confirmation", run=2, partial=True, dump=divergence.signals)
        )
        for c in (parent, commit)
    ]
    requests = [[request, replace(request, dump=(), run=0)] for request in asked]
    others, last = history.tree(interval.bad) != history.tree(commit), interval.last
    if of_bad := others and (last is None or len(last.steps) < steps):
        asked.append(Request(interval.bad, steps, stage="confirmation", partial=True, full=True))
    straight = None if tested.one_step or range_search.shortcut or not explain else (judged, first)
    (its_parent, itself, *more), recorded = _replays(scheduler, asked, straight)
    after = trace_of(itself, "the culprit")
    before = interval.baseline if isinstance(its_parent, Skip) else trace_of(its_parent, "its parent")
    stands_in = interval.good if isinstance(its_parent, Skip) else parent
    if stands_in == interval.good:
        of_good = [replace(requests[0][1], point=interval.good, run=run) for run in (0, 1)]
        requests[0] = of_good if isinstance(its_parent, Skip) else [requests[0][0], *of_good]
    last = trace_of(more[0], "BAD") if of_bad else last if others and last else after
    borne_out = not tested.one_step or (range_search.shortcut and range_search.shortcut.same(first, after))
    if not borne_out or _only_lacks_good(scheduler, info, interval, its_parent):
        return None
    # A metric that two replays of one commit share proves nothing where their bits differ.
    in_text = partial(_in_text, predicate, interval.baseline)
    if not tested.one_step and (
        differs := differ_twice(first, after, short(commit), min(steps, len(first.steps))) or in_text(first, after)
    ):
        refuse_explained(scheduler, (requests[1][1], first), (asked[1], after))
        return _flaky(scheduler, info, differs, first, after)
    if judged and (
        differs := differ_twice(judged, before, short(parent), min(steps, len(judged.steps))) or in_text(judged, before)
    ):
        refuse_explained(scheduler, (replace(asked[0], dump=(), run=0), judged), (asked[0], before))
        return _flaky(scheduler, history.info(parent), differs, judged, before)
    refuse_changed_world(
        scheduler, [(short(stands_in), requests[0], before), (f"{short(commit)} {info.subject}", requests[1], after)]
    )
    moved = _moved(predicate, interval.baseline, before, after, range_search.bound)
    earlier = None
    if parent != interval.good and parent in history.descendants(interval.good):
        earlier = known_violation(predicate, interval.baseline, before)
    if moved is None:
        return None
    explains, untold = explains_end(predicate, after, last)
    once = others and interval.last is not None and last.directory == interval.last.directory
    if once and explains is not True:  # one replay of BAD does not say so much
        again = Request(interval.bad, steps, stage="confirmation", run=2, partial=True, full=True)
        last = trace_of(scheduler.ask(again)[0], "BAD")
    if others and interval.last and (differs := first_difference(interval.last, last)):
        whole = Request(interval.bad, steps)
        refuse_disturbed(scheduler, (whole, interval.last), (replace(whole, run=2 if once else 0), last))
        explains, untold = None, f"two replays of BAD differ at {differs}"
        scheduler.say(f"FLAKY {short(interval.bad)}: {untold}")
    if explains and (text := in_text(after, last)):
        explains, untold = None, f"it and BAD tell {text.signal} in lines of text, and differ there"
    if explains and parent != interval.good and len(before.steps) < _asked_of(scheduler, interval):
        explains = None  # a commit before it stops the training
    environment = [str(change) for change in environment_changes(before.header, after.header)]
    comparison = replace(compare(before, after), divergence=moved)
    renames = aligned(interval.baseline, before).renames
    culprit = Culprit(info, moved, comparison, environment, renames=renames, before=parent,
                      until=round_at(before, moved.step)[1] if scheduler.case.subject.recorded else None)  # fmt: skip
    return Confirmed(
        culprit, after, last, explains, before, earlier, recorded=recorded,
        remarks=_shorter(scheduler, interval, last), untold=untold,
    )  # fmt: skip


def _moved(predicate: Predicate, good: Trace, before: Trace, after: Trace, bound: int) -> Divergence | None:
    """What a culprit moved; None where its parent is BAD already, or it is not.

    By bits that is where it differs from its parent. Where GOOD and the culprit differ, the two may have nothing to be
    compared by, such as a number that GOOD alone tells as one and they in lines of text.

    Raises:
        NotVerifiableError: it is a number that the parent does not tell there, or in fewer digits.
    """
    if not isinstance(predicate, Bitwise):
        if known_violation(predicate, good, before, bound):
            return None
        return first_violation(predicate, good, after)  # a small step past a bound counts, though they may be close
    moved = first_violation(predicate, before, after)
    if moved or first_violation(predicate, good, before):
        return moved
    moved = first_violation(predicate, good, after)
    if moved is None or moved.step > before.steps[-1].step:
        return None
    if number := _in_text(predicate, good, before, after):
        return number
    if any(moved.signal in step.metrics for step in before.steps):
        raise NotVerifiableError(
            f"which commit moved {moved.signal} cannot be told: the culprit's parent does not tell it at step "
            f"{moved.step}, or in fewer digits; ask with --when metric:NAME"
        )
    return moved


def _in_text(predicate: Predicate, good: Trace, a: Trace, b: Trace) -> Divergence | None:
    """Where two differ by bits in what GOOD tells as a number and they in lines of text."""
    if not isinstance(predicate, Bitwise):
        return None
    numbers = {name for step in good.steps for name in step.compared}
    return next((each for each in differences_in_text(a, b) if each.signal in numbers), None)


def _only_lacks_good(scheduler: Scheduler, info: PointInfo, interval: Interval, its_parent: Answer) -> bool:
    """Whether all that is known of a commit is that it differs from GOOD, which it lacks: its parent tells nothing.

    One whose parents have no code has brought all of it.
    """
    history = scheduler.history
    parents = history.parents.get(info.commit)
    if parents is None:  # a set of changes is with GOOD's, whatever is undone
        return False
    parent_tells = parents and (not isinstance(its_parent, Skip) or not any(map(history.tree, parents)))
    return not parent_tells and info.commit not in history.descendants(interval.good)


def _asked_of(scheduler: Scheduler, interval: Interval) -> int:
    """How many steps GOOD makes of those that are asked for; its golden run may have more."""
    return min(len(interval.baseline.steps), scheduler.case.steps) if interval.baseline else 0


def _shorter(scheduler: Scheduler, interval: Interval, last: Trace) -> list[str]:
    """Tell where BAD makes fewer steps than GOOD, which moves no number."""
    history, good, made = scheduler.history, _asked_of(scheduler, interval), len(last.steps)
    if made >= good or (interval.good, interval.bad) != (history.good, history.bad):  # part of a range, with --all
        return []
    text = f"BAD {short(interval.bad)} makes {made} of GOOD's {good} steps: no more are compared"
    scheduler.say(text)
    return [text]


def _replays(
    scheduler: Scheduler, asked: Sequence[Request], straight: tuple[Trace | None, Trace] | None
) -> tuple[list[Answer], Recorded | None]:
    """The replays that were asked for, of a parent and its commit first.

    A replay whose numbers are others under the recorder, or might be, because that leaves functions of torch.compile as
    they are written, is made again without it.

    Args:
        scheduler: Where they run.
        asked: Them.
        straight: What parent and commit were judged by, where their operations are to be recorded on the way; None
            records none.

    Returns:
        Their answers, and what was recorded.
    """
    prober, pair = scheduler.prober, asked[:2]
    steps = _recordable(scheduler, straight) if straight else None
    if straight is None or steps is None:
        return scheduler.ask(*asked), None
    ways = list(zip(pair, pair[::-1], strict=True))
    for replay, other in ways:
        if prober.known(replay) is not None and not prober.known_operations(replay, steps, against=other.point):
            return scheduler.ask(*asked), None

    def start(request: Request, other: Request) -> Future[Any]:
        def recorded(pending: PendingProbe) -> Recording | Skip:
            return pending.operations(request, steps, against=other.point)

        return scheduler.start(request.point, recorded)

    started = [start(*both) for both in ways]
    results: list[Any] = scheduler.results([*started, *(scheduler.submit(replay) for replay in asked[2:])])
    recordings: list[Recording | Skip] = results[:2]
    traces = list[Trace | None]()
    for k, (replay, judged) in enumerate(zip(pair, straight, strict=True)):
        recording = recordings[k]
        if not _unmoved(recording, judged):
            traces.append(None)
            continue
        if prober.known(replay) is None:
            recordings[k] = recording = prober.keep(replay, recording)
        traces.append(recording.trace)
    plain = iter(scheduler.ask(*(replay for replay, trace in zip(pair, traces, strict=True) if trace is None)))
    answers, (before, after) = [next(plain) if trace is None else trace for trace in traces], recordings
    if isinstance(before, Skip) or isinstance(after, Skip):
        return [*answers, *results[2:]], None
    return [*answers, *results[2:]], Recorded(steps, (before, after))


def _recordable(scheduler: Scheduler, straight: tuple[Trace | None, Trace]) -> tuple[int, int] | None:
    """The steps whose operations explain what was judged; None where they are not known, or cannot be recorded."""
    case, (before, after) = scheduler.case, straight
    if before is None or not case.subject.recorded:
        return None
    differs = first_difference(before, after, strict=case.compare.strict)
    return round_at(before, differs.step) if differs else None


def _unmoved(recording: Recording | Skip, judged: Trace | None) -> TypeGuard[Recording]:
    """Whether a recorded replay is as good as one without the recorder."""
    return (
        judged is not None
        and isinstance(recording, Recording)
        and not any(stream.compiled for stream in recording.streams)
        and len(recording.trace.steps) >= len(judged.steps)
        and first_difference(judged, recording.trace) is None
    )


def _straight(range_search: RangeSearch, commit: str) -> Trace | None:
    """The trace from step 0 that a commit was judged by; None where it was judged by one step, or not at all."""
    tested = range_search.tested.get(commit)
    return tested.answer if tested and not tested.one_step and isinstance(tested.answer, Trace) else None


def _by_exit_code(scheduler: Scheduler, range_search: RangeSearch, info: PointInfo, interval: Interval) -> Confirmed:
    """Run culprit and parent once more: flaky where a code says something else than before.

    A parent from before GOOD was not run before, and is GOOD only as far as the search assumed it.
    """
    parent = point_before(scheduler.history, info.commit, interval.good)
    scheduler.say(f"confirming {short(info.commit)} {info.subject}: running it and its parent once more")
    steps, points = scheduler.case.steps, (info.commit, parent)
    firsts = [Request(point, steps, stage="confirmation") for point in points]
    asked = [
        scheduler.prober.at_itself(replace(first, run=int(scheduler.known(first) is not None))) for first in firsts
    ]
    answers = scheduler.ask(*asked)
    codes = [answer.code for answer in answers if isinstance(answer, Code)]
    assumed = parent != interval.good and parent not in range_search.search.dag
    flaky = len(codes) < len(answers) or codes[0] == 0 or (codes[1] != 0 and not assumed)
    if flaky:
        for first, again, answer in zip(firsts, asked, answers, strict=True):
            before = scheduler.known(first)
            if isinstance(before, Code) and isinstance(answer, Code) and (before.code == 0) != (answer.code == 0):
                refuse_explained(scheduler, (first, before), (again, answer))
    else:
        named = zip(points, zip(asked, firsts, strict=True), answers, strict=True)
        refuse_changed_world(scheduler, [(short(point), requests, answer) for point, requests, answer in named])
    return Confirmed(Culprit(info, None, None), None, None, None, flaky=flaky)


def explains_end(predicate: Predicate, culprit: Trace, last: Trace) -> tuple[bool | None, str]:
    """Whether the bad end's trace is the culprit's, as far as the predicate asks; None where that cannot be told.

    So it is where one of them ends early and they agree so far, and where the predicate finds fault with any trace like
    the culprit's, whatever it is compared with (`finite`, checks of a CI). Where the predicate cannot be asked with the
    culprit as the baseline, the second says why.
    """
    strict = isinstance(predicate, Bitwise) and predicate.strict
    try:
        if first_difference(culprit, last, strict=strict) and first_violation(predicate, culprit, last):
            return (None if first_violation(predicate, culprit, culprit) else False), ""
    except NotShownError as error:
        return None, f"it {error.lacks}; ask from it with another --when"
    except UnjudgedError as error:
        return None, str(error)
    return (True if len(culprit.steps) == len(last.steps) else None), ""


def _flaky(scheduler: Scheduler, info: PointInfo, differs: Divergence, first: Trace, after: Trace) -> Confirmed:
    """A culprit that differs from itself, shown with the first difference of two of its own replays."""
    scheduler.record(info.commit, "FLAKY")
    scheduler.say(f"FLAKY {short(info.commit)}: two replays of it differ at {differs}")
    comparison = replace(compare(first, after), divergence=differs)
    return Confirmed(Culprit(info, differs, comparison), after, None, None, flaky=True)
