"""`repro diff`: two traces, or a trace and what a trainer gave to TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from repro.output import emit, json_option, strict_names_option, vary_option
from repro_golden.base.clean import one_line

if TYPE_CHECKING:
    from repro_golden.compare.tensorboard import EventsComparison

__all__ = ["diff"]


@click.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--offset", type=int, default=0, help="Number that event files give to a trace's step 0.")
@click.option("--mismatch", is_flag=True, help="Show the train/rollout mismatch also where no number moved.")
@strict_names_option
@vary_option
@json_option
def diff(
    a: Path, b: Path, offset: int, mismatch: bool, strict_names: bool, vary: tuple[str, ...], as_json: bool
) -> int:
    """Compare trace A (the baseline) with trace B, bit for bit.

    A trace is a folder with a header.json; a golden run's folder serves too. Either side may be a folder of TensorBoard
    event files: then the metrics that both sides have are compared, in float32, as event files hold no more. Where one
    side's last step with such a metric is before the other's, it ended early, and that is a difference.

    Signals that have another name in B and the same bits in every step were renamed; that is told and no difference.
    """
    from repro_golden.base.errors import ReproError

    events = [_holds_events(path) for path in (a, b)]
    if mismatch and any(events):
        raise ReproError("--mismatch is for traces: TensorBoard event files hold no log-probs of tokens")
    if any(events):
        return _diff_events(a, b, events, offset, as_json)
    if offset:
        raise ReproError("--offset is for TensorBoard event files: neither side is a folder of them")
    return _diff_traces(a, b, vary, as_json, mismatch=mismatch, strict_names=strict_names)


def _diff_traces(a: Path, b: Path, vary: tuple[str, ...], as_json: bool, *, mismatch: bool, strict_names: bool) -> int:
    from repro.report.mismatch import mismatch_text
    from repro.text import comparison_text
    from repro_golden.case.file import Compare
    from repro_golden.compare.mismatch.change import mismatch_change
    from repro_golden.compare.traces import check_identities, compare

    traces = [open_trace(path) for path in (a, b)]
    differences = check_identities(traces[0], traces[1], vary)
    comparison = compare(traces[0], traces[1], Compare(names="strict" if strict_names else "matched"))
    # of long traces that agree no row is read unless somebody asks
    gap = None if not (comparison.divergence or comparison.ended or mismatch) else mismatch_change(*traces)
    data = comparison.to_mapping() | {"identity": differences, "mismatch": gap.to_mapping() if gap else None}
    gap_text = mismatch_text(data["mismatch"], every=mismatch)
    notes = "".join(f"\nidentity differs: {one_line(d)}" for d in differences)
    broken = [f"{name} is incomplete: {why}" for name, t in zip("AB", traces, strict=True) if (why := _broken(t))]
    notes += "".join(f"\n{line}" for line in broken)
    options = " --mismatch" * mismatch + " --strict-names" * strict_names + "".join(f" --vary {part}" for part in vary)
    data |= {"incomplete": broken, "equal": comparison.equal and not broken}
    text = comparison_text(comparison)
    differs = comparison.divergence or (comparison.nonfinite and not comparison.ended)
    if broken and not differs:  # what is missing may be what broke off
        text = text.replace("differs:", "not verifiable:", 1)
    text += f"\n\n{gap_text}" if gap_text else ""
    again = one_line(f"reproduce with: repro diff{options} {a} {b}")
    emit(as_json, data, f"{text}{notes}\n{again}")
    return 1 if differs else 3 if broken else 0 if comparison.equal else 1


def _diff_events(a: Path, b: Path, events: list[bool], offset: int, as_json: bool) -> int:
    from repro.report.events import all_agree, nothing_common
    from repro_golden.base.errors import ReproError
    from repro_golden.compare.tensorboard import agreeing_offset, differences, read_events

    metrics: list[dict[int, dict[str, float]]] = []
    broken = []
    for name, path, logged in zip("AB", (a, b), events, strict=True):
        if logged:
            metrics.append(read_events(path))
            continue
        trace = open_trace(path)
        metrics.append({step.step: dict(step.metrics) for step in trace.steps})
        if why := _broken(trace):
            broken.append(f"{name} is incomplete: {why}")
    # the steps of the first side count: seen from a trace, event files are ahead by the offset
    sign = 1 if events[0] else -1
    comparison = differences(metrics[0], metrics[1], {}, sign * offset)
    if not comparison.changes:
        why = nothing_common(comparison, metrics[0], metrics[1], ("A", "B"), offset)
        raise ReproError(f"{a} and {b} have no metric at a common step: {why}")
    text = _events_text(comparison)
    if comparison.differing and (other := agreeing_offset(metrics[0], metrics[1], {}, sign * offset)) is not None:
        text += f"\n{all_agree(sign * other)}"
    differs = bool(comparison.differing or comparison.nonfinite)
    if broken and not differs:  # what is missing may be what broke off
        text = text.replace("differs:", "not verifiable:", 1)
    text = "\n".join([text, *broken])
    option = f" --offset {offset}" if offset else ""
    again = one_line(f"reproduce with: repro diff{option} {a} {b}")
    data = comparison.to_mapping() | {"offset": offset, "incomplete": broken}
    data["equal"] = comparison.agrees and not broken
    emit(as_json, data, f"{text}\n{again}")
    return 1 if differs else 3 if broken else 0 if comparison.agrees else 1


def _events_text(comparison: EventsComparison) -> str:
    from repro.report.events import left_out
    from repro.text import count, metrics_table
    from repro_golden.compare.traces import NO_AGREEMENT, Comparison

    steps = {change.step for change in comparison.changes}
    names = ", ".join(a if a == b else f"{a} ~ {b}" for a, b in comparison.metrics)
    compared = f"{count(comparison.values, 'value')} of {count(len(steps), 'step')} compared in float32: {names}"
    notes = left_out(comparison, "A", "B")
    if comparison.nonfinite:
        c = comparison.nonfinite[0]
        notes.append(
            f"not finite on both sides: {count(len(comparison.nonfinite), 'value')}, first {c.metric} at step {c.step}"
        )
    if comparison.agrees:
        return "\n".join(map(one_line, (f"agrees: {compared}", *notes)))
    if comparison.ended and (comparison.differing or comparison.nonfinite):
        notes.append(comparison.ended)
    elif comparison.ended:
        return "\n".join(map(one_line, (f"differs: {comparison.ended}; nothing differs before: {compared}", *notes)))
    if not comparison.differing:
        summary = f"{NO_AGREEMENT}: {compared}"
        return "\n".join(map(one_line, (summary, *notes)))
    first = comparison.differing[0]
    table = metrics_table(Comparison(len(steps), None, comparison.changes, {}))
    head = f"differs at step {first.step}, metric {first.metric}: {first.a!r} became {first.b!r}"
    return "\n".join([*map(one_line, (head, compared, *notes)), "", table])


def _broken(trace: Any) -> str:
    """Why a trace that agrees as far as it goes proves no more."""
    if trace.end is None:
        return f"its recording broke off after {len(trace.steps)} steps"
    code = trace.end.get("exit", 0)
    return f"its program failed (exit code {code}) after {len(trace.steps)} steps" if code else ""


def _holds_events(path: Path) -> bool:
    """Whether a folder holds event files and is no trace, whose program may have written some beside it."""
    from repro_golden.compare.tensorboard import event_files

    trace = any((path / name).exists() for name in ("header.json", "run.json"))
    return not trace and path.is_dir() and bool(event_files(path))


def open_trace(path: Path):  # type: ignore[no-untyped-def]  # the Trace class is imported late
    """A trace, or the trace of a golden run."""
    from repro_golden.trace import Trace

    return Trace(path / "trace" if (path / "run.json").exists() else path)
