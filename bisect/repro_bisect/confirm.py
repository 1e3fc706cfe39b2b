"""Confirming a culprit: full replays of it, its parent and the bad end, with the divergent tensor dumped whole."""

from __future__ import annotations

from dataclasses import dataclass, replace

from repro_bisect.commits import CommitInfo
from repro_bisect.desk import Desk, Flight
from repro_bisect.executors import Signal
from repro_bisect.hunt import Hunt
from repro_bisect.predicates import Bitwise, first_violation
from repro_bisect.probe import Skip, trace_of
from repro_bisect.result import Culprit
from repro_golden.compare import Divergence, compare, first_difference
from repro_golden.errors import NotVerifiableError
from repro_golden.subjects.environments import environment_changes
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
        flaky: Whether its own replays differ.
    """

    culprit: Culprit
    after: Trace | None
    last: Trace | None
    explains: bool | None
    flaky: bool = False


def confirm(desk: Desk, hunt: Hunt, commit: str, interval: Interval, end: Divergence | None) -> Confirmed | None:
    """Replay in full what a search named; None where a verdict from one step is not borne out.

    Args:
        desk: Where the replays run.
        hunt: The search.
        commit: What it named.
        interval: What it searched.
        end: Where the bad end differs from the baseline; None for exit codes.

    Raises:
        NotVerifiableError: the numbers moved and came back around the commit.
        ReproError: the commit cannot be tested any more.
    """
    info, history, predicate = desk.history.info(commit), desk.history, desk.prober.predicate
    if interval.baseline is None or end is None:
        return Confirmed(Culprit(info, None, None), None, None, None)
    desk.say(f"confirming {commit[:10]} {info.subject}: full replays of it, its parent and BAD")
    tested = hunt.tested.get(commit) or hunt.test(commit, Flight(commit, None))
    first = trace_of(tested.answer, "the culprit")
    found = hunt.divergence(tested) or end
    signal: Signal = (found.step, found.phase, found.signal)
    steps, parent = desk.prober.case.steps, info.parents[0] if info.parents else interval.good
    waiting = [
        desk.submit(c, steps, stage="confirmation", run=2, partial=True, dump=[signal]) for c in (parent, commit)
    ]
    if others := history.tree(interval.bad) != history.tree(commit):
        waiting.append(desk.submit(interval.bad, steps, stage="confirmation", run=2, partial=True, full=True))
    its_parent, itself, *rest = desk.results(waiting)
    after = trace_of(itself, "the culprit")
    before = interval.baseline if isinstance(its_parent, Skip) else trace_of(its_parent, "its parent")
    last = trace_of(rest[0], "BAD") if others else after
    moved = first_violation(predicate, before, after)
    if tested.one_step:
        if moved is None or not (hunt.shortcut and hunt.shortcut.same(first, after)):
            return None
    elif isinstance(predicate, Bitwise) and (differs := first_difference(first, after)):
        return _flaky(desk, info, differs, first, after)
    if moved is None:
        raise NotVerifiableError(
            f"{commit[:10]} and its parent agree, and both differ from GOOD: the numbers moved and came back; "
            f"search {interval.good[:10]}..{parent[:10]} for the first time"
        )
    explains = first_violation(predicate, after, last) is None and len(after.steps) == len(last.steps)
    environment = [str(change) for change in environment_changes(before.header, after.header)]
    comparison = replace(compare(before, after), divergence=moved)
    return Confirmed(Culprit(info, moved, comparison, environment), after, last, explains)


def _flaky(desk: Desk, info: CommitInfo, differs: Divergence, first: Trace, after: Trace) -> Confirmed:
    """A culprit that differs from itself, shown with the first difference of two of its own replays."""
    desk.record(info.commit, "FLAKY")
    desk.say(f"FLAKY {info.commit[:10]}: two replays of it differ at {differs}")
    comparison = replace(compare(first, after), divergence=differs)
    return Confirmed(Culprit(info, differs, comparison), after, None, None, flaky=True)
