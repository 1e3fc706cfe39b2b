"""Whether what two points are compared by says something of their code: what else may have decided it.

A key holds what a case names (`probe.journal.around`). What it does not name, as a file outside of git or the code
beside `subject.path`, may be another one when the next search, or a commit with the same key, is replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from repro_bisect.axes.axis import short
from repro_bisect.probe.answers import Answer, Code, unlike_before
from repro_bisect.probe.request import Request
from repro_bisect.probe.scheduler import Scheduler
from repro_golden.base.errors import NotVerifiableError
from repro_golden.trace import Trace

__all__ = ["at_itself", "made_together", "refuse_changed_world", "refuse_explained"]


def made_together(scheduler: Scheduler, these: Iterable[Request], those: Iterable[Request]) -> bool:
    """Whether one search made a replay of each of two sides."""
    searches = [
        {made.search for request in side if (made := scheduler.prober.made(request))} - {""} for side in (these, those)
    ]
    return not searches[0].isdisjoint(searches[1])


def at_itself(scheduler: Scheduler, asked: Request) -> Request:
    """A request whose answer is no replay of another commit with the same key."""
    made = scheduler.prober.made(asked)
    return (
        asked if made is None or made.commit == scheduler.history.commit(asked.point) else scheduler.prober.anew(asked)
    )


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
    again = scheduler.ask(*(_bare(scheduler, request) for _, request, _ in old))
    for (name, request, answer), now in zip(old, again, strict=True):
        if unlike := _unlike(answer, now, request.steps, f"its replay now, of {name}"):
            raise _changed(name, unlike)


def refuse_explained(scheduler: Scheduler, first: Request, again: Request) -> None:
    """Two replays of one key differ: is that no noise, but another commit's code, or what changed between searches?

    Raises:
        NotVerifiableError: so it is: each of them says the same again where, or when, it was made.
    """
    prober, history = scheduler.prober, scheduler.history
    made, other = prober.made(first), prober.made(again)
    before, after = prober.known(first), prober.known(again)
    if made is None or other is None or before is None or after is None:
        return
    if made.commit == other.commit:
        if made.search != other.search == prober.search and not _again_unlike(scheduler, again, after):
            raise _changed(short(made.commit), _unlike(before, after, first.steps, "its replay now"))
        return
    commits = [made.commit, other.commit]
    if not all(commit in (history.good, *history.parents) for commit in commits):
        return
    for request, commit, answer in zip((first, again), commits, (before, after), strict=True):
        if _again_unlike(scheduler, replace(request, point=commit), answer):  # one after the other: they have one key
            return
    names, paths = " and ".join(map(short, commits)), ", ".join(history.paths)
    raise NotVerifiableError(
        f"{names} have the same code in {paths} and say otherwise, each of them again: what decides lies outside of "
        f"{paths}; widen it (`--path`, or subject.path of the case)"
    )


def _changed(name: str, unlike: str) -> NotVerifiableError:
    return NotVerifiableError(
        f"{name} is not what it was when an earlier search replayed it ({unlike}): what no commit holds has changed "
        "since, or it does not reproduce itself; `--fresh` replays all of it anew"
    )


def _again_unlike(scheduler: Scheduler, request: Request, before: Answer) -> str:
    """How one more replay is another than one before; '' where it is not."""
    (now,) = scheduler.ask(_bare(scheduler, request))
    return _unlike(before, now, request.steps, "its replay now")


def _bare(scheduler: Scheduler, request: Request) -> Request:
    """A new replay of as much."""
    return scheduler.prober.anew(replace(request, dump=(), keep=None, stage="confirmation"))


def _unlike(before: Answer, now: Answer, steps: int, name: str) -> str:
    """How an answer is another than an earlier one; '' where it is not."""
    if isinstance(before, Code) and isinstance(now, Code):
        return "" if bool(before.code) == bool(now.code) else f"it exited with {before.code}, and now with {now.code}"
    if not isinstance(before, Trace) or isinstance(now, Code):
        return f"{name} says something else"
    return unlike_before(before, now, steps, name, "it differs")
