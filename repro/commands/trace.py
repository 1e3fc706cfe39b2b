"""`repro trace`: record a program that knows nothing of us, or take what a trainer has written."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from repro.commands.rollout.files import bytes_of, dump_options
from repro.output import emit, json_option
from repro_golden.base.clean import one_line

__all__ = ["trace"]


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The trace's folder, new or empty.")
@click.option("--ranks", type=click.IntRange(min=1), help="How many ranks must have recorded; by default all.")
@click.option("--steps", type=click.IntRange(min=1), help="End the program after so many steps.")
@click.option("--activations", metavar="GLOB", multiple=True, help="Also outputs of these modules, and gradients.")
@click.option("--metric", metavar="REGEX", multiple=True, help="Numbers in lines of output; named groups name them.")
@click.option("--ignore", metavar="GLOB", multiple=True, help="Metrics to leave out, and signals such as rng/random.")
@click.option("--signals", metavar="light[:N]", default="full", help="Optimizer state after each N-th step alone (16).")
@click.option(
    "--from",
    "folder",
    type=click.Path(path_type=Path),
    help="Run nothing: take the dumps that slime, Miles or Relax wrote there (--dump-details).",
)
@click.option("--log", type=click.Path(path_type=Path), help="With --from: what the trainer printed.")
@click.option("--steps-per-rollout", type=click.IntRange(min=1), help="With --from: updates of each rollout.")
@click.option("--cp-size", type=click.IntRange(min=1), help="With --from: context-parallel ranks of Relax.")
@click.option("--grad-norm", metavar="NAME", help="With --from: the file name given to --ci-save-grad-norm.")
@dump_options
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def trace(
    out: Path,
    ranks: int | None,
    steps: int | None,
    activations: tuple[str, ...],
    metric: tuple[str, ...],
    ignore: tuple[str, ...],
    signals: str,
    folder: Path | None,
    command: tuple[str, ...],
    as_json: bool,
    **dumps: Any,
) -> int:
    """Run CMD and record every training step of every Python process in it.

    Gradients, parameters and optimizer state are fingerprinted after each optimizer step; no bit of the program
    changes. Its input, output, signals and exit code pass through. Compare two recordings with `repro diff A B`.

    With --from DIR nothing is run: the trace is made of the train dumps, events and log of a run of slime, Miles or
    Relax. Two such traces compare with each other as recorded ones do.

    With --json the object is all that stdout gets: what the program prints goes to stderr.

    Example: repro trace --out before -- torchrun --nproc-per-node 2 train.py

    Example: repro trace --from dumps --log run.log --out before
    """
    from repro.text import count
    from repro_golden.base.errors import ReproError
    from repro_golden.base.observed import SIGNALS
    from repro_golden.case.file import pattern_problem
    from repro_golden.recording.attach.base.settings import Settings
    from repro_golden.recording.attach.gathered.run import run_traced
    from repro_golden.recording.attach.gathered.unseen import unmatched
    from repro_golden.trace import Trace

    flags = [f"--{name.replace('_', '-').replace('allow', 'allow-pickle')}" for name, value in dumps.items() if value]
    if folder is not None:
        alone = {"a command": command, "--steps": steps, "--activations": activations, "--metric": metric}
        if other := next((name for name, value in alone.items() if value), None):
            raise ReproError(f"--from takes what is there and runs nothing: leave out {other}")
        return _imported(folder, out, as_json, ranks=ranks, ignore=ignore, **dumps)
    if flags:
        raise ReproError(f"{flags[0]} goes with --from")
    if not command:
        raise click.UsageError("say what to run (-- CMD ...), or --from DIR")
    for text in metric:
        if problem := pattern_problem(text):
            raise ReproError(problem)
    if not re.fullmatch(SIGNALS, signals):
        raise click.UsageError(f"--signals is full, light or light:N, not {signals!r}")
    settings = Settings("", steps=steps, activations=activations, metrics=metric, ignore=ignore, signals=signals)
    code, collected = run_traced(command, out, settings, ranks, sys.stderr if as_json else None, _commit(out))
    notes = [] if collected.complete else [f"incomplete: {collected.short or 'not every rank ended in good order'}"]
    if steps and collected.steps < steps:
        notes.append(f"the program ended before the {steps} that were asked for")
    if unseen := unmatched(Trace(out), activations, metric):
        notes.append(unseen)
    if collected.ignored:  # a number of the training may be called like a time
        names = ", ".join(collected.ignored[:3]) + (", ..." if len(collected.ignored) > 3 else "")
        notes.append(f"left out {len(collected.ignored)} metrics that differ from run to run ({names})")
    data = {"ranks": collected.ranks, "ignored": list(collected.ignored), "exit_code": code}
    _told(out, collected.steps, count(collected.ranks, "rank"), collected.complete, notes, data if as_json else None)
    return code


def _commit(out: Path) -> str | None:
    """The commit whose code runs here; None outside of a repository, and with changes beside what is recorded."""
    from repro_golden.base.errors import ReproError
    from repro_golden.repository.checkout import find_checkout

    try:
        return find_checkout(Path.cwd()).commit_without(out.resolve())
    except ReproError:
        return None


def _told(
    out: Path, steps: int, what: str, complete: bool, notes: Sequence[str], data: Mapping[str, Any] | None
) -> None:
    """Say what was recorded: beside the program's own output, or as the one JSON object."""
    from repro.text import count

    if data is not None:
        payload = {"trace": str(out), "steps": steps, "complete": complete, "notes": list(notes), **data}
        emit(True, payload, "")
        return
    print(one_line("; ".join([f"repro: {count(steps, 'step')} of {what} in {out}", *notes])), file=sys.stderr)


def _imported(
    folder: Path, out: Path, as_json: bool, *, limit: str | None, allow: tuple[str, ...], log: Path | None, **how: Any
) -> int:
    from repro_golden.dumps.archive.reading import LIMIT
    from repro_golden.dumps.run.imported import trace_of_folder

    bound = LIMIT if limit is None else bytes_of(limit)
    imported, problems = trace_of_folder(folder, out, log=log, allow=allow, limit=bound, **how)
    for text in problems:
        print(one_line(f"repro: warning: {text}"), file=sys.stderr)
    kind, notes = str(imported.header.subject["kind"]), [] if imported.complete else ["incomplete: the run broke off"]
    data = {"kind": kind, "warnings": list(problems), "exit_code": 0}
    _told(out, len(imported.steps), kind, imported.complete, notes, data if as_json else None)
    return 0
