"""`repro diff`: two traces."""

from __future__ import annotations

from pathlib import Path

import click

from repro.output import emit, json_option

__all__ = ["diff"]


@click.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@json_option
def diff(a: Path, b: Path, as_json: bool) -> int:
    """Compare trace A (the baseline) with trace B, bit for bit.

    A trace is a folder with a header.json; a golden run's folder serves too.
    """
    from repro.text import comparison_text
    from repro_golden.compare import compare
    from repro_golden.identity import Identity

    traces = [open_trace(path) for path in (a, b)]
    found = compare(*traces)
    differences = Identity.from_mapping(traces[0].header.identity).differences(
        Identity.from_mapping(traces[1].header.identity)
    )
    data = found.to_mapping() | {"identity": [str(d) for d in differences]}
    notes = "".join(f"\nidentity differs: {d}" for d in differences)
    if len(traces[0].steps) != len(traces[1].steps):
        notes += f"\nA has {len(traces[0].steps)} steps, B has {len(traces[1].steps)}: only common ones were compared"
    emit(as_json, data, comparison_text(found) + notes + f"\nreproduce with: repro diff {a} {b}")
    return 0 if found.equal else 1


def open_trace(path: Path):  # type: ignore[no-untyped-def]  # the Trace class is imported late
    """A trace, or the trace of a golden run."""
    from repro_golden.trace import Trace

    return Trace(path / "trace" if (path / "run.json").exists() else path)
