"""What a night looks at beside its baseline: does a case reproduce itself, in other layouts, and what logs have?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from repro_bisect.axes import layout_axis
from repro_bisect.axis import short
from repro_bisect.bench import Options
from repro_bisect.desk import Desk
from repro_bisect.layouts import LayoutComparison
from repro_bisect.probe import Answer, Code, Skip
from repro_bisect.result import Watch
from repro_bisect.sides import compare_sides
from repro_golden.case import Bound, Case
from repro_golden.checkout import Checkout
from repro_golden.compare import first_difference, violations
from repro_golden.errors import MachineFailureError, NotVerifiableError, ReproError
from repro_golden.nights import Check
from repro_golden.trace import Trace

__all__ = ["events_check", "failure", "layout_checks", "layout_text", "line", "run_to_run"]

_SHOWN = 8


def line(text: object) -> str:
    """One line of any text."""
    return " ".join(str(text).split())


def failure(answer: Answer) -> str:
    """Why a replay left no trace."""
    if isinstance(answer, Skip):
        return line(answer.reason)
    return f"it left no trace (exit {answer.code})" if isinstance(answer, Code) else "it left no trace"


def run_to_run(desk: Desk, case: Case, commit: str) -> tuple[Check, Trace | None]:
    """Two replays of a commit in processes of their own: do they agree?

    Returns:
        The check, and the first of both; None where one failed.
    """
    desk.say(f"replaying {case.name} at {short(commit)} twice")
    asked = [desk.submit(commit, case.steps, stage="ends", run=run, full=True) for run in (0, 1)]
    first, again = desk.results(asked)
    for answer in (first, again):
        if not isinstance(answer, Trace):
            return Check("run-to-run", "error", failure(answer)), None
    assert isinstance(first, Trace)
    assert isinstance(again, Trace)
    return _alike(first, again, case), first


def _alike(first: Trace, again: Trace, case: Case) -> Check:
    if len(first.steps) != len(again.steps):
        return Check("run-to-run", "flaky", f"one replay made {len(first.steps)} steps, another {len(again.steps)}")
    differs = first_difference(first, again)
    if differs is None:
        return Check("run-to-run", "green", f"two replays agree bit for bit over {len(first.steps)} steps")
    if case.compare.mode == "bounds":
        left = [v for i in range(len(first.steps)) for v in violations(first, again, i, case.compare.bounds)]
        if not left:
            return Check("run-to-run", "green", line(f"two replays differ at {differs}, within the case's bounds"))
        return Check("run-to-run", "flaky", line(f"two replays differ beyond the case's bounds at {left[0]}"))
    return Check("run-to-run", "flaky", line(f"two replays differ at {differs}"))


def layout_checks(
    checkout: Checkout, case: Case, commit: str, watch: Watch, options: Options, *, spared: str = ""
) -> list[Check]:
    """Each number of threads, batch composition and layout that the case names, against the case itself.

    Args:
        checkout: The repository.
        case: The case.
        commit: Whose code is run.
        watch: Called with every line of progress.
        options: How to replay.
        spared: Why none of them can be judged tonight; empty where they can.

    Raises:
        MachineFailureError: the machine failed.
    """
    asked = [(f"threads={n}", f"threads={n}") for n in case.nightly.threads]
    asked += [(f"batch {name}", name) for name in case.nightly.batches]
    asked += [(f"layout {name}", name) for name in case.nightly.layouts]
    if spared:
        return [Check(label, "not judged", spared) for label, _ in asked]
    return [_layout_check(checkout, case, commit, watch, options, label, name) for label, name in asked]


def _layout_check(
    checkout: Checkout, case: Case, commit: str, watch: Watch, options: Options, label: str, name: str
) -> Check:
    try:
        axis = layout_axis(checkout, case, f"case..{name}", at=commit)
        found = compare_sides(checkout, case, axis, case.nightly.tolerance, watch, options)
    except MachineFailureError:
        raise
    except NotVerifiableError as error:
        return Check(label, "not judged", line(error))
    except ReproError as error:
        return Check(label, "error", line(error).partition("; choose another end")[0])
    if found.comparison is None:
        return Check(label, "flaky", line("; ".join(f"{layout}: {why}" for layout, why in found.flaky.items())))
    return Check(label, "changed" if found.outcome == "part" else "green", layout_text(found.comparison))


def layout_text(c: LayoutComparison) -> str:
    """How two layouts compare, in one line."""
    if c.parted:
        return line(f"parts from the case at {c.parted}")
    if c.first is None:
        return f"equal bits in {c.signals} signals of {c.steps} steps"
    units = c.worst.units if c.worst and c.worst.units is not None else 0.0
    known = f"; of {c.unmeasured} differences no size is known" if c.unmeasured else ""
    gap = f"; log-probs {c.log_probs} apart" if c.log_probs and c.log_probs.differing else ""
    return f"agrees within {units:.3g} eps ({c.tolerance:g} allowed), first at {line(c.first)}{gap}{known}"


def events_check(
    ours: Mapping[int, Mapping[str, float]],
    theirs: Mapping[int, Mapping[str, float]],
    bounds: Mapping[str, Bound],
) -> Check:
    """Tonight's metrics beside those of TensorBoard's event files, in float32 as files hold them.

    Args:
        ours: By step and name.
        theirs: Likewise: the baseline.
        bounds: The case's, by metric; of other metrics bits count.
    """
    from repro_golden.events import differences

    found = differences(theirs, ours, bounds)
    if not found.changes:
        return Check("events", "error", _nothing_common(ours, theirs))
    if found.agrees:
        return Check("events", "green", f"{found.values} values of {len(found.metrics)} metrics as in the events")
    far = (found.differing or found.nonfinite)[0]
    beside = f", and {len(found.differing) - 1} more values" if len(found.differing) > 1 else ""
    return Check("events", "changed", f"{far.metric} at step {far.step}: {far.a!r} became {far.b!r}{beside}")


def _nothing_common(ours: Mapping[int, Mapping[str, float]], theirs: Mapping[int, Mapping[str, float]]) -> str:
    from repro_golden.events import matched

    a, b = ({name for step in side.values() for name in step} for side in (ours, theirs))
    if matched(sorted(b), sorted(a)):
        steps = [f"{min(side)} to {max(side)}" for side in (ours, theirs)]
        return f"no step in common: the case has steps {steps[0]}, the events {steps[1]}"
    return f"no metric in common: the case has {_names(a)}; the events have {_names(b)}"


def _names(names: set[str]) -> str:
    shown: Sequence[str] = sorted(names)[:_SHOWN]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return line(", ".join(shown) + more) or "none"
