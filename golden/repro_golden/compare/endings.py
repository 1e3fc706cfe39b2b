"""How the programs of two traces ended: before the other, or not well."""

from __future__ import annotations

from repro_golden.trace import Trace
from repro_golden.trace.families import family

__all__ = ["ended_early", "failed_since"]


def ended_early(a: Trace, b: Trace) -> str:
    """Which of a baseline and a run ended before the other; empty where none is seen to have done so.

    A run that was stopped after all steps that the baseline's program made by itself would have gone on.
    """
    made, most = sorted((len(a.steps), len(b.steps)))
    if made != most:
        return f"{'the run' if len(b.steps) < most else 'the baseline'} ended after step {made} of {most}"
    goes_on = (b.end or {}).get("stopped") and _ended_by_itself(a)
    return f"the baseline ended after step {made}, and the run goes on" if goes_on else ""


def _ended_by_itself(trace: Trace) -> bool:
    """Whether a program was not stopped; a recorder that did not say so yet recorded how it left things."""
    stopped = (trace.end or {}).get("stopped")
    if stopped is not None or not trace.steps:
        return stopped is False
    return any(family(row.phase, row.name) == "end" for row in trace.rows(len(trace.steps) - 1))


def failed_since(a: Trace, b: Trace) -> str:
    """How `b`'s program failed after its steps, where the baseline's did not; "" where it did not, or both did."""
    before, after = ((trace.end or {}).get("exit", 0) for trace in (a, b))
    return f"its program failed (exit code {after}) after {len(b.steps)} steps" if after and not before else ""
