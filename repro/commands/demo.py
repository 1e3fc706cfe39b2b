"""`repro demo`: the whole job on a scratch repository with a hidden regression."""

from __future__ import annotations

from pathlib import Path

import click

from repro.output import emit, json_option, progress

__all__ = ["demo"]


@click.command()
@click.option("--seed", type=int, default=7, show_default=True, help="Which regression is hidden, where and how.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("demo-result"),
    show_default=True,
    help="Folder for the repository, the reports and the picture; an earlier demo's is replaced.",
)
@json_option
def demo(seed: int, out: Path, as_json: bool) -> int:
    """Hide a precision regression in a history of 64 commits and more, and let `repro` find it.

    Makes a scratch git repository with a copy of the built-in trainer, seals the answer, runs init, record, verify and
    bisect on it, and compares what was found with the answer. Exit code 0: the planted commit and step were named.
    """
    from repro_golden.base.extras import require

    require("the demo", "trainer", "golden", "report")
    from repro.demo.run import result_text, run_demo, write_picture

    with progress("demo") as say:
        result = run_demo(seed, out, say)
    text = result_text(result, out)
    write_picture(text, f"repro demo --seed {seed}", out / "demo.svg")
    emit(as_json, result.to_mapping() | {"picture": str(out / "demo.svg")}, text.plain)
    return 1 if result.problem else 0
