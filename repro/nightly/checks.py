"""What a night looks at beside its baseline: does a case reproduce itself, in other layouts, and what logs have?"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from repro.nightly.records import EVENTS, Check, Status
from repro.report.layouts import unknown
from repro_bisect.axes.axis import short
from repro_bisect.axes.layouts import LayoutComparison
from repro_bisect.axes.sets import layout_axis
from repro_bisect.driver.layout_difference import replay_layouts
from repro_bisect.driver.session import Options
from repro_bisect.probe.answers import Answer, Code, Skip
from repro_bisect.probe.progress import Event, Watch
from repro_bisect.probe.request import Request
from repro_bisect.probe.scheduler import Scheduler
from repro_golden.base.errors import MachineFailureError, NotVerifiableError, ReproError
from repro_golden.case.file import Bound, Case
from repro_golden.compare.endings import failed_since
from repro_golden.compare.mismatch.bounds import mismatch_checks
from repro_golden.compare.traces import every_violation, first_difference
from repro_golden.engine_checks.command import check_rollouts
from repro_golden.engine_checks.findings import EngineCheck
from repro_golden.repository.checkout import Checkout
from repro_golden.repository.worktrees import Worktrees
from repro_golden.trace import Trace

__all__ = [
    "events_check",
    "failure",
    "finding_check",
    "layout_checks",
    "layout_text",
    "line",
    "mismatch_check",
    "rollout_checks",
    "run_to_run",
]


def line(text: object) -> str:
    """One line of any text."""
    return " ".join(str(text).split())


def failure(answer: Answer) -> str:
    """Why a replay left no trace."""
    if isinstance(answer, Skip):
        return line(answer.reason)
    return f"it left no trace (exit {answer.code})" if isinstance(answer, Code) else "it left no trace"


def run_to_run(scheduler: Scheduler, case: Case, commit: str) -> tuple[Check, Trace | None]:
    """Two replays of a commit in processes of their own: do they agree?

    Returns:
        The check, and the first of both; None where one failed.
    """
    scheduler.say(f"replaying {case.name} at {short(commit)} twice")
    first, again = scheduler.ask(*(Request(commit, case.steps, stage="ends", run=run, full=True) for run in (0, 1)))
    for answer in (first, again):
        if not isinstance(answer, Trace):
            return Check("run-to-run", "error", failure(answer)), None
    assert isinstance(first, Trace)
    assert isinstance(again, Trace)
    return _alike(first, again, case), first


def _alike(first: Trace, again: Trace, case: Case) -> Check:
    if len(first.steps) != len(again.steps):
        return Check("run-to-run", "flaky", f"one replay made {len(first.steps)} steps, another {len(again.steps)}")
    if failed := failed_since(first, again) or failed_since(again, first):
        return Check("run-to-run", "flaky", line(f"two replays end in other ways: of one {failed}"))
    differs = first_difference(first, again)
    if len(first.steps) < case.steps:
        return Check("run-to-run", "not judged", f"both replays made {len(first.steps)} of {case.steps} steps")
    if differs is None:
        return Check("run-to-run", "green", f"two replays agree bit for bit over {len(first.steps)} steps")
    if case.compare.mode == "bounds":
        left = next(every_violation(first, again, case.compare.bounds), None)
        if left is None:
            return Check("run-to-run", "green", line(f"two replays differ at {differs}, within the case's bounds"))
        return Check("run-to-run", "flaky", line(f"two replays differ beyond the case's bounds at {left}"))
    return Check("run-to-run", "flaky", line(f"two replays differ at {differs}"))


def mismatch_check(case: Case, trace: Trace, engine: str) -> list[Check]:
    """Whether trainer and rollout engine are as near as the case's ``[mismatch]`` says; nothing without bounds.

    Args:
        case: With its bounds.
        trace: Of tonight.
        engine: `rollouts.sampled_by` of its rollouts.
    """
    by = f" (rollouts by {engine})" if engine else ""
    proofs = mismatch_checks(case.mismatch, trace)
    return [Check("mismatch", "green" if proof.passed else "changed", line(f"{proof.detail}{by}")) for proof in proofs]


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
        result = replay_layouts(checkout, case, axis, None, watch, options)
    except MachineFailureError:
        raise
    except NotVerifiableError as error:
        return Check(label, "not judged", line(error))
    except ReproError as error:
        return Check(label, "error", line(error).partition("; choose another end")[0])
    if result.comparison is None:
        return Check(label, "flaky", line("; ".join(f"{layout}: {why}" for layout, why in result.flaky.items())))
    green: Status = "not judged" if result.comparison.untold else "green"
    text = "; ".join([layout_text(result.comparison), *map(line, result.remarks)])
    return Check(label, "changed" if result.outcome == "part" else green, text)


def layout_text(c: LayoutComparison) -> str:
    """How two layouts compare, in one line."""
    if c.parted:
        return line(f"parts from the case at {c.parted}")
    if c.verdict == "equal":
        return f"equal bits in {c.signals} signals of {c.steps} steps"
    first = f", first at {line(c.first)}" if c.first else ""
    known = f"; {left}" if (left := unknown(c)) else ""
    gap = f"; log-probs {c.log_probs} apart" if c.log_probs and c.log_probs.differing else ""
    return f"both {c.within} ({c.tolerance:g} allowed){first}{gap}{known}"


def rollout_checks(checkout: Checkout, case: Case, commit: str, tree: str, watch: Watch) -> list[Check]:
    """The checks of the case's rollout engine that it asks for, on a commit's code; the first line is on the engine.

    Raises:
        MachineFailureError: the machine failed.
    """
    asked = case.nightly.rollout
    if not asked:
        return []
    watch(Event(f"checking the rollout engine of {case.name} at {short(commit)}"))
    try:
        with (
            contextlib.closing(Worktrees.of(checkout, case)) as worktrees,
            worktrees.at(commit, tree) as place,
        ):
            checked = check_rollouts(case, place, only=asked if isinstance(asked, tuple) else ())
    except MachineFailureError:
        raise
    except ReproError as error:
        return [Check("rollout", "error", line(error))]
    out = [
        f"{finding.name} does not apply ({finding.detail})"
        for finding in checked.findings
        if finding.outcome == "not applicable"
    ]
    checks = [finding_check(finding) for finding in checked.findings if finding.outcome != "not applicable"]
    return [Check("rollout", "green" if checks else "not judged", line("; ".join([checked.engine, *out]))), *checks]


def finding_check(engine_check: EngineCheck) -> Check:
    """What one check of a rollout engine is to a night."""
    status: Status = "flaky" if engine_check.name.endswith("run-to-run") else "changed"
    if engine_check.outcome == "failed":
        status = "error"
    elif engine_check.passed:
        status = "green"
    first = engine_check.likeness.first if engine_check.likeness and engine_check.outcome == "differs" else None
    where = f"; first at {first.where}: {first.size}" if first else ""
    return Check(f"rollout {engine_check.name}", status, line(f"{engine_check.detail}{where}"))


def events_check(
    ours: Mapping[int, Mapping[str, float]],
    theirs: Mapping[int, Mapping[str, float]],
    bounds: Mapping[str, Bound],
    offset: int | None = None,
) -> Check:
    """Tonight's metrics beside those of TensorBoard's event files, in float32 as files hold them.

    Args:
        ours: By step and name.
        theirs: Likewise: the baseline.
        bounds: The case's, by metric; of other metrics bits count.
        offset: The number that the files give to our step 0. None is 0, as long as no other is likelier: numbers that
            are equal under another numbering are not called changed.
    """
    from repro.report.events import all_agree, left_out, nothing_common
    from repro.text import count
    from repro_golden.compare.tensorboard import agreeing_offset, differences

    at = offset or 0
    result = differences(theirs, ours, bounds, at, prefix=True)  # a case makes the first steps of a training run
    beside = "".join(f"; {note}" for note in left_out(result, "the events", "the case"))
    if result.agrees:
        text = f"{count(result.values, 'value')} of {count(len(result.metrics), 'metric')} as in the events{beside}"
        return Check(EVENTS, "green", line(text))
    if offset is None and (other := agreeing_offset(theirs, ours, bounds)) is not None:
        return Check(EVENTS, "not judged", f"{all_agree(other)} --offset 0 judges them as they are numbered")
    if not result.changes:
        why = nothing_common(result, theirs, ours, ("the baseline", "the case"), at)
        return Check(EVENTS, "error", line(f"no metric at a common step: {why}"))
    far = (result.differing or result.nonfinite)[0]
    more = f", and {len(result.differing) - 1} more values" if len(result.differing) > 1 else ""
    return Check(EVENTS, "changed", line(f"{far.metric} at step {far.step}: {far.a!r} became {far.b!r}{more}{beside}"))
