"""`repro diff`: two traces."""

from __future__ import annotations

from pathlib import Path

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
    emit(as_json, data, comparison_text(found) + notes + f"\nreproduce with: repro diff {a} {b}")
    return 0 if found.equal else 1


def open_trace(path: Path):  # type: ignore[no-untyped-def]  # the Trace class is imported late
    """A trace, or the trace of a golden run."""
    from repro_golden.trace import Trace

    return Trace(path / "trace" if (path / "run.json").exists() else path)
