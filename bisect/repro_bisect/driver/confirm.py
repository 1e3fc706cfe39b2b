"""Confirming a culprit: full replays of it, its parent and the bad end, with the divergent tensor dumped whole."""

from __future__ import annotations

from dataclasses import dataclass, replace

from repro_bisect.axes.axis import PointInfo, short
from repro_bisect.driver.range_search import RangeSearch
from repro_bisect.driver.result import Culprit
from repro_bisect.predicates.predicates import Bitwise, Predicate, first_violation
from repro_bisect.probe.prober import Code, Skip, trace_of
from repro_bisect.probe.request import Request
from repro_bisect.probe.scheduler import PendingProbe, Scheduler
from repro_golden.compare.renames import aligned
from repro_golden.compare.traces import Divergence, compare, first_difference
from repro_golden.subjects.environments.builds import environment_changes
from repro_golden.trace import Trace

__all__ = ["Confirmed", "Interval", "confirm"]


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
    """

    culprit: Culprit
    after: Trace | None
    last: Trace | None
    explains: bool | None
    before: Trace | None = None
    earlier: Divergence | None = None
    flaky: bool = False


def confirm(
    scheduler: Scheduler, range_search: RangeSearch, commit: str, interval: Interval, end: Divergence | None
) -> Confirmed | None:
    """Replay in full what a search named; None where the replays contradict it.

    Args:
        scheduler: Where the replays run.
        range_search: The search.
        commit: What it named.
        interval: What it searched.
        end: Where the bad end differs from the baseline; None for exit codes.

    Raises:
        ReproError: the commit cannot be tested any more.
    """
    info, history, predicate = scheduler.history.info(commit), scheduler.history, scheduler.prober.predicate
    if interval.baseline is None or end is None:
        return _by_exit_code(scheduler, info, interval)
    scheduler.say(f"confirming {short(commit)} {info.subject}: full replays of it, its parent and BAD")
    tested = range_search.tested.get(commit) or range_search.test(commit, PendingProbe(commit, None))
    first = trace_of(tested.answer, "the culprit")
    outcome = range_search.divergence(tested)
    divergence = outcome if isinstance(outcome, Divergence) else end
    steps, parent = scheduler.prober.case.steps, info.parents[0] if info.parents else interval.good
    waiting = [
        scheduler.submit(Request(c, steps, stage="confirmation", run=2, partial=True, dump=divergence.signals))
        for c in (parent, commit)
    ]
    if others := history.tree(interval.bad) != history.tree(commit):
        waiting.append(
            scheduler.submit(Request(interval.bad, steps, stage="confirmation", run=2, partial=True, full=True))
        )
    its_parent, itself, *of_bad = scheduler.results(waiting)
    after = trace_of(itself, "the culprit")
    before = interval.baseline if isinstance(its_parent, Skip) else trace_of(its_parent, "its parent")
    last = trace_of(of_bad[0], "BAD") if others else after
    if tested.one_step and not (range_search.shortcut and range_search.shortcut.same(first, after)):
        return None
    # A metric that two replays of one commit share proves nothing where their bits differ.
    if not tested.one_step and (differs := first_difference(first, after)):
        return _flaky(scheduler, info, differs, first, after)
    judged = interval.baseline if parent == interval.good else _straight(range_search, parent)
    if judged and (differs := first_difference(judged, before)):
        return _flaky(scheduler, history.info(parent), differs, judged, before)
    earlier = None
    if isinstance(predicate, Bitwise):
        moved = first_violation(predicate, before, after)
        if parent != interval.good and parent in history.descendants(interval.good):
            earlier = first_violation(predicate, interval.baseline, before)
    elif first_violation(predicate, interval.baseline, before):  # the parent is BAD already
        moved = None
    else:  # by a bound a small step past it counts, though parent and culprit may be close
        moved = first_violation(predicate, interval.baseline, after)
    if moved is None:
        return None
    explains = _explains(predicate, after, last)
    if others and interval.last and (differs := first_difference(interval.last, last)):
        scheduler.say(f"FLAKY {short(interval.bad)}: two replays of BAD differ at {differs}")
        explains = None
    environment = [str(change) for change in environment_changes(before.header, after.header)]
    comparison = replace(compare(before, after), divergence=moved)
    renames = aligned(interval.baseline, before).renames
    culprit = Culprit(info, moved, comparison, environment, renames=renames)
    return Confirmed(culprit, after, last, explains, before, earlier)


def _straight(range_search: RangeSearch, commit: str) -> Trace | None:
    """The trace from step 0 that a commit was judged by; None where it was judged by one step, or not at all."""
    tested = range_search.tested.get(commit)
    return tested.answer if tested and not tested.one_step and isinstance(tested.answer, Trace) else None


def _by_exit_code(scheduler: Scheduler, info: PointInfo, interval: Interval) -> Confirmed:
    """Run culprit and parent once more: flaky where a code says something else than before."""
    parent = info.parents[0] if info.parents else interval.good
    scheduler.say(f"confirming {short(info.commit)} {info.subject}: running it and its parent once more")
    steps, points = scheduler.prober.case.steps, (info.commit, parent)
    answers = scheduler.ask(*(Request(point, steps, stage="confirmation", run=1) for point in points))
    codes = [answer.code for answer in answers if isinstance(answer, Code)]
    flaky = len(codes) < len(answers) or codes[0] == 0 or codes[1] != 0
    return Confirmed(Culprit(info, None, None), None, None, None, flaky=flaky)


def _explains(predicate: Predicate, culprit: Trace, last: Trace) -> bool | None:
    """Whether the bad end's trace is the culprit's, as far as the predicate asks; None where that cannot be told.

    So it is where one of them ends early and they agree so far, and where the predicate finds fault with any trace like
    the culprit's, whatever it is compared with (`finite`, checks of a CI).
    """
    strict = isinstance(predicate, Bitwise) and predicate.strict
    if first_difference(culprit, last, strict=strict) and first_violation(predicate, culprit, last):
        return None if first_violation(predicate, culprit, culprit) else False
    return True if len(culprit.steps) == len(last.steps) else None


def _flaky(scheduler: Scheduler, info: PointInfo, differs: Divergence, first: Trace, after: Trace) -> Confirmed:
    """A culprit that differs from itself, shown with the first difference of two of its own replays."""
    scheduler.record(info.commit, "FLAKY")
    scheduler.say(f"FLAKY {short(info.commit)}: two replays of it differ at {differs}")
    comparison = replace(compare(first, after), divergence=differs)
    return Confirmed(Culprit(info, differs, comparison), after, None, None, flaky=True)
