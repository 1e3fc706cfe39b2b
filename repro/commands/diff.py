"""`repro diff`: two traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from repro.output import emit, json_option, vary_option

__all__ = ["diff"]


@click.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@vary_option
@json_option
def diff(a: Path, b: Path, vary: tuple[str, ...], as_json: bool) -> int:
    """Compare trace A (the baseline) with trace B, bit for bit.

    A trace is a folder with a header.json; a golden run's folder serves too.
    """
    from repro.text import comparison_text
    from repro_golden.compare import check_identities, compare

    traces = [open_trace(path) for path in (a, b)]
    differences = check_identities(traces[0], traces[1], vary)
    found = compare(*traces)
    data = found.to_mapping() | {"identity": differences}
    notes = "".join(f"\nidentity differs: {d}" for d in differences)
    if len(traces[0].steps) != len(traces[1].steps):
        notes += f"\nA has {len(traces[0].steps)} steps, B has {len(traces[1].steps)}: only common ones were compared"
    broken = [f"{name} is incomplete: {why}" for name, t in zip("AB", traces, strict=True) if (why := _broken(t))]
    notes += "".join(f"\n{line}" for line in broken)
    options = "".join(f" --vary {part}" for part in vary)
    emit(as_json, data, comparison_text(found) + notes + f"\nreproduce with: repro diff{options} {a} {b}")
    return 1 if not found.equal else 3 if broken else 0


def _broken(trace: Any) -> str:
    """Why a trace that agrees as far as it goes proves no more."""
    if trace.end is None:
        return f"its recording broke off after {len(trace.steps)} steps"
    code = trace.end.get("exit", 0)
    return f"its program failed (exit code {code}) after {len(trace.steps)} steps" if code else ""


def open_trace(path: Path):  # type: ignore[no-untyped-def]  # the Trace class is imported late
    """A trace, or the trace of a golden run."""
    from repro_golden.trace import Trace

    return Trace(path / "trace" if (path / "run.json").exists() else path)
