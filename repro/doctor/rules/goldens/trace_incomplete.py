"""Traces that were cut off."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import TraceRun
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]


def _check(run: TraceRun) -> Iterator[Found]:
    trace = run.trace
    if trace.complete:
        return
    made, wanted = len(trace.steps), trace.header.steps
    how = "without a closing line: its process was killed, or is still running" if trace.end is None else "early"
    yield Found(
        f"it has {made} of {wanted} steps and ends {how}",
        Where(str(run.path / "steps.jsonl"), made or None, item="steps", value=f"{made} of {wanted}"),
    )


RULE = Rule(
    id="trace-incomplete",
    title="Traces that were cut off",
    inputs=(TraceRun,),
    severity="warning",
    certainty="certain",
    why="a comparison ends with its last step: what came later is not compared",
    cure="look for the end of the process in its log (killed, out of memory, out of time), and run it again",
    sources=("docs/trace.md",),
    check=_check,
)
