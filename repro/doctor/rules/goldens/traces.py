"""Traces."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import TraceRun
from repro.doctor.facts.goldens import nonfinite, nonfinite_numbers
from repro_golden.base.checks import Found, Where, rule
from repro_golden.base.errors import ReproError


@rule(
    title="Traces that were cut off",
    severity="warning",
    certainty="certain",
    why="a comparison ends with its last step: what came later is not compared",
    cure="look for the end of the process in its log (killed, out of memory, out of time), and run it again",
    sources=("docs/reference/trace.md",),
)
def _trace_incomplete(run: TraceRun) -> Iterator[Found]:
    trace = run.trace
    if trace.complete:
        return
    made, wanted = len(trace.steps), trace.header.steps
    how = "without a closing line: its process was killed, or is still running" if trace.end is None else "early"
    yield Found(
        f"it has {made} of {wanted} steps and ends {how}",
        Where(str(run.path / "steps.jsonl"), made or None, item="steps", value=f"{made} of {wanted}"),
    )


_STEPS = 200
"""Steps whose rows are looked at: the first ones. Metrics are looked at in all."""


def _not_finite(run: TraceRun) -> Iterator[Found]:
    trace = run.trace
    for index, record in enumerate(trace.steps):
        odd = [(name, record.metrics[name]) for name in nonfinite_numbers(trace, index)]
        if odd:
            name, value = odd[0]
            others = f", and {len(odd) - 1} more metrics with it" if len(odd) > 1 else ""
            yield Found(
                f"{name} is {value} at step {record.step}{others}",
                Where(str(run.path / "steps.jsonl"), index + 1, f"step {record.step} {name}", str(value)),
            )
            break
    for index, record in enumerate(trace.steps[:_STEPS]):
        bad = [row for row in nonfinite(trace, index) if row.dtype != "metric"]
        if not bad:
            continue
        first = bad[0]
        # masks of attention are -inf on purpose; parameters and columns of tokens never are
        certain = first.phase != "forward" or first.values is not None
        yield Found(
            f"{first.nonfinite} values of {first.phase} {first.name} are not finite at step {record.step} (the first "
            f"of {len(bad)} signals)",
            Where(
                str(run.path),
                item=f"step {record.step} {first.phase} {first.name}",
                value=f"{first.nonfinite} non-finite",
            ),
            severity=None if certain else "warning",
            certainty=None if certain else "possible",
        )
        return


@rule(
    title="NaN or infinity in a trace",
    severity="error",
    certainty="certain",
    why="from there on every parameter is NaN, or will be with the next update",
    cure="the first signal that is named is where it began: look at that sample, layer or scale; `repro explain` "
    "against a run that is well names the operation",
    sources=("Miles guide: Debugging (gradient NaN/Inf)",),
)
def _trace_not_finite(run: TraceRun) -> Iterator[Found]:
    try:
        yield from _not_finite(run)
    except ReproError as error:
        yield Found(f"its rows cannot be read: {error}", Where(str(run.path)))
