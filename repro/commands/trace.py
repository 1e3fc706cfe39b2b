"""`repro trace`: record a program that knows nothing of us."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["trace"]


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The trace's folder, new or empty.")
@click.option("--ranks", type=click.IntRange(min=1), help="How many ranks must have recorded; by default all.")
@click.option("--steps", type=click.IntRange(min=1), help="End the program after so many steps.")
@click.option("--activations", metavar="GLOB", multiple=True, help="Also outputs of these modules, and gradients.")
@click.option("--metric", metavar="REGEX", multiple=True, help="Numbers in lines of output; named groups name them.")
@click.option("--ignore", metavar="GLOB", multiple=True, help="Metrics to leave out.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def trace(
    out: Path,
    ranks: int | None,
    steps: int | None,
    activations: tuple[str, ...],
    metric: tuple[str, ...],
    ignore: tuple[str, ...],
    command: tuple[str, ...],
) -> int:
    """Run CMD and record every training step of every Python process in it.

    Gradients, parameters and optimizer state are fingerprinted after each optimizer step; no bit of the program
    changes. Its input, output, signals and exit code pass through. Compare two recordings with `repro diff A B`.

    Example: repro trace --out before -- torchrun --nproc-per-node 2 train.py
    """
    from repro_golden.attach.run import run_traced
    from repro_golden.attach.settings import Settings
    from repro_golden.attach.unmatched import unmatched
    from repro_golden.case import pattern_problem
    from repro_golden.errors import ReproError
    from repro_golden.trace import Trace

    for text in metric:
        if problem := pattern_problem(text):
            raise ReproError(problem)
    settings = Settings("", steps=steps, activations=activations, metrics=metric, ignore=ignore)
    code, found = run_traced(command, out, settings, ranks)
    ranks_text = "1 rank" if found.ranks == 1 else f"{found.ranks} ranks"
    note = "" if found.complete else "; incomplete: not every rank ended in good order"
    if steps and found.steps < steps:
        note += f"; the program ended before the {steps} that were asked for"
    if unseen := unmatched(Trace(out), activations, metric):
        note += f"; {unseen}"
    if found.ignored:  # a number of the training may be called like a time
        names = ", ".join(found.ignored[:3]) + (", ..." if len(found.ignored) > 3 else "")
        note += f"; left out {len(found.ignored)} metrics that differ from run to run ({names})"
    click.echo(f"repro: {found.steps} steps of {ranks_text} in {out}{note}", err=True)
    return code
