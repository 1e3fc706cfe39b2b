"""Whether what two points are compared by says something of their code: what else may have decided it.

A key holds what a case names (`probe.around`). What it does not name, as a file outside of git or the code
beside `subject.path`, may be another one when the next search, or a commit with the same key, is replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from repro_bisect.axes.axis import short
from repro_bisect.probe.answers import Answer, Code, unlike_before
from repro_bisect.probe.attempts import DisturbedError
from repro_bisect.probe.request import Request
from repro_bisect.probe.scheduler import Scheduler
from repro_golden.base.errors import NotVerifiableError
from repro_golden.repository.code_key import same_beside
from repro_golden.repository.linked import what_decides
from repro_golden.store.golden import GoldenRun
from repro_golden.trace import Trace

__all__ = ["made_together", "refuse_changed_world", "refuse_disturbed", "refuse_explained"]


def made_together(scheduler: Scheduler, these: Iterable[Request], those: Iterable[Request]) -> bool:
    """Whether one search made a replay of each of two sides."""
    searches = [
        {made.search for request in side if (made := scheduler.prober.made(request))} - {""} for side in (these, those)
    ]
    return not searches[0].isdisjoint(searches[1])


def refuse_changed_world(scheduler: Scheduler, sides: Sequence[tuple[str, Sequence[Request], Answer]]) -> None:
    """Two points are compared by what one search made, or each once more now, which must say the same again.

    Args:
        scheduler: Where replays run.
        sides: For both, what it is called, the replays that spoke for it, and what it is judged by.

    Raises:
        NotVerifiableError: a point has other numbers than before.
    """
    if made_together(scheduler, *(requests for _, requests, _ in sides)):
        return
    search = scheduler.prober.search
    old = [
        (name, requests[0], answer)
        for name, requests, answer in sides
        if not any((made := scheduler.prober.made(request)) and made.search == search for request in requests)
    ]
    scheduler.say(f"earlier searches replayed {' and '.join(name for name, _, _ in old)}: once more now")
    again = scheduler.ask(*(_bare(scheduler, request, answer) for _, request, answer in old))
    for (name, _, answer), now in zip(old, again, strict=True):
        if unlike := _unlike(answer, now, f"its replay now, of {name}"):
            raise _changed(name, unlike)


def refuse_disturbed(scheduler: Scheduler, *sides: tuple[Request, Answer]) -> None:
    """What contradicts itself, or others, was replayed beside other probes: is that the program's doing, or theirs?

    Exit codes are weighed as noisy ones are. Once a program has differed from itself alone, that is not asked again.

    Args:
        scheduler: Where replays run.
        sides: Replays of one point: what was asked for, and what came of it.

    Raises:
        DisturbedError: two replays that are alone agree, and one of these is another.
    """
    traces = [(request, answer) for request, answer in sides if isinstance(answer, Trace)]
    made = scheduler.prober.made
    beside = [answer for request, answer in traces if (by := made(request)) and by.beside]
    if not beside or scheduler.differs_alone:
        return
    request, answer = min(traces, key=lambda side: len(side[1].steps))
    scheduler.say(f"{short(request.point)} was replayed beside other probes: twice more, alone")
    now, again = (
        scheduler.ask(replace(_bare(scheduler, request, answer), alone=True))[0] for _ in range(2)
    )  # one after the other
    if _unlike(now, again, "a replay alone"):
        scheduler.differs_alone = True
    elif any(_unlike(now, answer, "a replay beside other probes") for answer in beside):
        raise DisturbedError(f"{short(request.point)} has other numbers alone than beside other probes")


def refuse_explained(scheduler: Scheduler, first: tuple[Request, Answer], again: tuple[Request, Answer]) -> None:
    """Two replays of one key differ: is that no noise, but what no commit holds, or other code than the key's?

    Another commit's code may have made one of them, or what changed between two searches. A golden run was made in a
    checkout, which may have what no worktree has.

    Args:
        scheduler: Where replays run.
        first: What was asked for, and what came of it.
        again: Likewise, later.

    Raises:
        DisturbedError: it is what ran beside them.
        NotVerifiableError: so it is: it says the same twice more, or each the same again at its own commit.
    """
    refuse_disturbed(scheduler, first, again)
    prober, history = scheduler.prober, scheduler.history
    if golden := prober.golden(first[0]):
        if not _unlike(again[1], _once_more(scheduler, *again), "another replay now"):
            raise _of_a_checkout(scheduler, golden, again[0].point, _unlike(first[1], again[1], "a replay of it"))
        return
    made, other = prober.made(first[0]), prober.made(again[0])
    if made is None or other is None or (made == other):
        return
    if made.commit == other.commit:
        (now,) = scheduler.ask(_bare(scheduler, *again))
        if not _unlike(now, _once_more(scheduler, again[0], now), "another replay now"):
            raise _changed(short(made.commit), _unlike(first[1], again[1], "its later replay"))
        return
    commits = [made.commit, other.commit]
    if not all(commit in (history.good, *history.parents) for commit in commits):
        return
    for commit, (request, answer) in zip(commits, (first, again), strict=True):
        at_home = replace(request, point=commit)
        if _unlike(answer, _once_more(scheduler, at_home, answer), "its replay now"):
            return
    names, paths = " and ".join(map(short, commits)), ", ".join(history.paths)
    same = f"{names} have the same code in {paths} and say otherwise, each of them again: what decides"
    if "." in history.paths:
        raise NotVerifiableError(f"{same} is in no file of theirs, but may be a commit's id, date or message")
    raise NotVerifiableError(f"{same} lies outside of {paths}; widen it (`--path`, or subject.path of the case)")


def _of_a_checkout(scheduler: Scheduler, golden: GoldenRun, point: str, unlike: str) -> NotVerifiableError:
    """The error for a point whose replays agree, and not with its golden run."""
    git, paths = scheduler.prober.git, ", ".join(scheduler.history.paths)
    why, of = what_decides(git, scheduler.case.subject.link), str(golden.record.get("commit"))
    if not same_beside(git, of, scheduler.history.commit(point)):
        why = (
            f"it was recorded at {short(of)}, which has other files outside of {paths}: widen that (`--path`, or "
            f"subject.path of the case) if they decide; else {why}"
        )
    return NotVerifiableError(
        f"two replays of {short(point)} agree, and its golden run, which was made in a checkout, does not ({unlike}): "
        + why
    )


def _changed(name: str, unlike: str) -> NotVerifiableError:
    return NotVerifiableError(
        f"{name} is not what it was when an earlier search replayed it ({unlike}): what no commit holds has changed "
        "since, or it does not reproduce itself; `--fresh` replays all of it anew"
    )


def _once_more(scheduler: Scheduler, request: Request, before: Answer) -> Answer:
    """What a replay says that nobody has made, over as many steps as one before made."""
    (now,) = scheduler.ask(_bare(scheduler, request, before))
    return now


def _bare(scheduler: Scheduler, request: Request, before: Answer) -> Request:
    """A new replay of as much, and of nothing beside it."""
    steps = request.steps
    if isinstance(before, Trace) and not scheduler.case.subject.told_steps:
        steps = min(steps, len(before.steps))
    return scheduler.prober.anew(
        replace(request, steps=steps, baseline=None, dump=(), keep=None, stage="confirmation", partial=True)
    )


def _unlike(before: Answer, now: Answer, name: str) -> str:
    """How an answer is another than an earlier one, as far as both go; '' where it is not."""
    if isinstance(before, Code) and isinstance(now, Code):
        return "" if bool(before.code) == bool(now.code) else f"it exited with {before.code}, and now with {now.code}"
    if not isinstance(before, Trace) or isinstance(now, Code):
        return f"{name} says something else"
    return unlike_before(before, now, len(before.steps), name, "it differs")
