"""Whether what the bad end changes reached the program: else nothing can be said of it."""

from __future__ import annotations

from repro_bisect.axes.axis import Varied
from repro_bisect.probe.answers import Answer
from repro_bisect.probe.request import Request
from repro_bisect.probe.scheduler import Scheduler
from repro_golden.base.errors import NotVerifiableError
from repro_golden.compare.traces import first_difference
from repro_golden.trace import Trace

__all__ = ["lost_of", "refuse_lost", "refused"]


_SAID = "so that nothing can be said of it"


def refused(point: str, text: str) -> NotVerifiableError:
    """Of a point whose program ran without what the point changes."""
    return NotVerifiableError(f"{point}: {text}, {_SAID}")


def lost_of(scheduler: Scheduler, point: str, baseline: Trace | None, answer: Answer) -> str:
    """What of a point did not reach its program although BAD's shows it; '' where nothing is known to be lost."""
    axis = scheduler.history
    if not isinstance(axis, Varied) or baseline is None or not isinstance(answer, Trace):
        return ""
    parts = axis.changes_lost(point, scheduler.case, baseline.header, answer.header)
    return next((f"{part.text}, {_SAID}" for part in parts.values() if part.sure), "")


def refuse_lost(scheduler: Scheduler, baseline: Trace, last: Trace, *, agree: bool) -> list[str]:
    """Refuse a bad end of which a part neither shows in the process that trains nor moves any number.

    What does not show may have come another way, as by a file that a launch script writes. So where the numbers differ,
    the end is replayed without that part: what makes no difference is refused, what makes one is excused.

    Args:
        scheduler: Where probes run.
        baseline: GOOD's trace.
        last: BAD's.
        agree: Whether they agree.

    Returns:
        What is to be known of parts that may not have arrived.

    Raises:
        NotVerifiableError: there is such a part.
    """
    axis = scheduler.history
    if not isinstance(axis, Varied):
        return []
    bad, headers = axis.bad, (baseline.header, last.header)
    if agree:
        if (whole := axis.lost(bad, *headers)) is None:
            return []
        if whole.sure:
            raise refused(bad, whole.text)
        parts = {bad: whole}
    else:
        parts = axis.changes_lost(bad, scheduler.case, *headers)
        sure = [label for label, part in parts.items() if part.sure]
        if sure and _idle(scheduler, axis, sure):
            raise refused(bad, parts[sure[0]].text)
    axis.excuse(parts)
    notes = [f"{label}: {part.text}, under this name at least" for label, part in parts.items()]
    for text in notes:
        scheduler.say(text)
    return notes


def _idle(scheduler: Scheduler, axis: Varied, labels: list[str]) -> bool:
    """Whether BAD's numbers are the same without some of its changes, to the last step."""
    less = axis.beside(axis.bad, scheduler.case, labels)
    if less is None:
        return False
    scheduler.say(f"{' + '.join(labels)} does not show in the process that trains: replaying BAD with and without it")
    steps = scheduler.case.steps
    asked = [Request(point, steps, stage="ends", full=True) for point in (axis.bad, less)]
    a, b = scheduler.ask(*asked)
    if not (isinstance(a, Trace) and isinstance(b, Trace)):
        return False
    return first_difference(a, b) is None and len(a.steps) == len(b.steps)
