"""`repro report nightly`: judge every case tonight, and bisect what changed."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import click

from repro.output import json_option, told

if TYPE_CHECKING:
    from repro_golden.base.errors import ReproError
    from repro_golden.case.file import Case

__all__ = ["nightly"]


@click.command()
@click.argument("names", nargs=-1, metavar="[CASE]...")
@click.option(
    "--results", type=click.Path(path_type=Path), help="Folder of all nights' results.  [default: golden/nights]"
)
@click.option("--at", metavar="COMMIT", default="HEAD", show_default=True, help="The commit that is judged.")
@click.option("--no-bisect", is_flag=True, help="Do not search for the commits that changed what changed.")
@click.option(
    "--last", type=click.IntRange(min=1), help="Trusted nights to judge metrics by; by default the case says."
)
@click.option("-j", "--jobs", type=click.IntRange(min=1), help="Replays at once; by default what the machine serves.")
@click.option(
    "--tensorboard", type=click.Path(path_type=Path), help="Also write all nights as TensorBoard event files."
)
@click.option(
    "--baseline", metavar="EVENTS", type=click.Path(path_type=Path),
    help="Also compare metrics with a run's TensorBoard event files.",
)  # fmt: skip
@click.option("--offset", type=int, help="Number that the event files of --baseline give to step 0.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the report (Markdown and HTML).")
@json_option
def nightly(
    names: tuple[str, ...],
    results: Path | None,
    at: str,
    no_bisect: bool,
    last: int | None,
    jobs: int | None,
    tensorboard: Path | None,
    baseline: Path | None,
    offset: int | None,
    out: Path | None,
    as_json: bool,
) -> int:
    """Judge each CASE (names or globs; all that is guarded by default) on one commit, and keep what came of it.

    Two fresh replays must agree; their numbers are compared with the golden run of this machine or, without one, with
    the last green commit, replayed here; other thread counts, batches and layouts where the case asks for them; and
    metrics with those of earlier green nights. What changed is bisected from the last green commit.

    The working tree's changes play no part. One small file for each machine, case and night is added to the results:
    commit them with git or DVC.

    Exit codes: 0 all green; 1 something changed, or a metric is not finite; 2 any other error; 3 something is flaky or
    could not be judged.
    """
    from repro import __version__
    from repro.live import bisect_view
    from repro.nightly.nightly import Asked, exit_code, nightly_run_of, nightly_run_without_case
    from repro.nightly.records import NightlyRuns
    from repro.nightly.report import annotate, nightly_text, write_report
    from repro_bisect.axes.commits import resolve
    from repro_bisect.probe.progress import Event
    from repro_golden.base.canonical import jsonable
    from repro_golden.base.extras import require
    from repro_golden.repository.checkout import find_checkout

    require("a report", "report", *["tensorboard"] * bool(tensorboard or baseline))
    checkout = find_checkout(Path.cwd())
    cases, refused = _chosen(checkout.root, names)
    _refuse(cases, last, baseline, offset)
    commit = resolve(checkout, at)
    store = NightlyRuns(results if results is not None else checkout.root / "golden" / "nights")
    known = {
        case.name: store.read(case=case.name) for case in cases
    }  # a damaged one is said before anything is replayed
    events = None
    if baseline is not None:
        from repro_golden.compare.tensorboard import read_events

        events = read_events(baseline)
    more = [f"--results {shlex.quote(str(results))}"] if results is not None else []
    more += ["--no-bisect"] if no_bisect else []
    more += [f"--last {last}"] if last else []
    more += [f"--baseline {shlex.quote(str(baseline))}"] if baseline is not None else []
    more += [f"--offset {offset}"] if offset is not None else []

    def again(*which: str) -> str:
        return " ".join(["repro report nightly", *map(shlex.quote, which), f"--at {commit[:10]}", *more])

    runs = [
        nightly_run_without_case(checkout, name, why, commit, Asked(again(name), __version__))
        for name, why in refused.items()
    ]
    files = [store.write(run) for run in runs]
    for case in cases:
        asked = Asked(again(case.name), __version__, jobs, not no_bisect, last, events, offset)
        with bisect_view() as watch:
            run = nightly_run_of(checkout, case, commit, known[case.name], watch, asked)
            files.append(store.write(run))
            watch(Event(f"{run.status}: {case.name}, {files[-1]}"))
        runs.append(run)
    folder = out if out is not None else _unused(checkout.state / "reports", runs[0].at.replace(":", ""))
    command, code, colour = again(*names), exit_code(runs), sys.stdout.isatty()
    data = {"nights": jsonable(runs), "files": [str(path) for path in files], "exit_code": code}
    text = f"{nightly_text(runs, files, colour=colour)}\n"
    with told(as_json, data, text, command, styled=colour) as reports:
        reports.extend(write_report(runs, files, folder, command))
        if tensorboard is not None:
            from repro.nightly.tensorboard import write_nightly_runs

            write_nightly_runs([*(run for history in known.values() for run in history), *runs], tensorboard)
    annotate(runs)
    return code


def _chosen(root: Path, names: Sequence[str]) -> tuple[list[Case], dict[str, ReproError]]:
    """The cases that names and globs mean, each once, in the order of their names; and why the others cannot be judged.

    Raises:
        ReproError: one means none, or there is none.
    """
    from repro_golden.base.errors import NotVerifiableError, ReproError
    from repro_golden.case.file import CASES, NO_CASE, read_case, unknown_case
    from repro_golden.store.golden import CASE_LOST, Store

    guarded = Store(root).guarded()
    if not guarded:
        raise ReproError(f"no case in {root / CASES}: {NO_CASE}")
    for name in names:
        if not any(fnmatchcase(known, name) for known in guarded):
            raise unknown_case(root, name)
    cases: list[Case] = []
    refused: dict[str, ReproError] = {}
    for known, path in guarded.items():
        if names and not any(fnmatchcase(known, name) for name in names):
            continue
        if path is None:
            refused[known] = NotVerifiableError(CASE_LOST.format(known))
            continue
        try:
            cases.append(read_case(path))
        except ReproError as error:  # of one case; the others are judged
            refused[known] = error
    return cases, refused


def _refuse(cases: Sequence[Case], last: int | None, baseline: Path | None, offset: int | None) -> None:
    """Refuse options that do not fit the cases."""
    from repro_golden.base.errors import ReproError

    if offset is not None and baseline is None:
        raise ReproError("--offset is for TensorBoard event files: give them with --baseline")
    if baseline is not None and len(cases) > 1:
        raise ReproError(f"--baseline is of one run, and {len(cases)} cases are judged: name the one that it is of")
    for case in cases:
        if last is not None and last < case.nightly.least:
            raise ReproError(f"--last {last} never reaches the {case.nightly.least} nights that {case.name} asks for")


def _unused(reports: Path, time: str) -> Path:
    """A folder for this report alone, also where two are made in one second."""
    wanted = reports / f"nightly-{time}"
    number = 2
    while wanted.exists():
        wanted = reports / f"nightly-{time}-{number}"
        number += 1
    return wanted
