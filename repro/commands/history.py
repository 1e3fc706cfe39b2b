"""`repro history`: every commit that changed the numbers, and by how much."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from repro.commands.again import again
from repro.commands.axes import axis_of, axis_options, axis_parameters, report_folder
from repro.commands.choose import DashedCommand, asked, case_of, command_options
from repro.output import json_option, told

if TYPE_CHECKING:
    from repro_golden.case.command_line import CommandLine

__all__ = ["history"]


@click.command(cls=DashedCommand)
@axis_options
@click.option("--case", "name", help="The case to replay; may be left out when there is only one.")
@click.option("-j", "--jobs", type=click.IntRange(min=1), help="Probes at once; by default what the machine serves.")
@click.option("--ray", metavar="ADDRESS", help="Run the probes on this Ray cluster; auto finds a running one.")
@click.option("--path", "paths", multiple=True, help="A folder or file that holds what matters; may be repeated.")
@click.option("--first-parent", is_flag=True, help="Follow only the first parent of merges.")
@click.option("--every", is_flag=True, help="Test every commit: also finds what changed the numbers and changed back.")
@click.option("--fresh", is_flag=True, help="Use nothing that earlier searches found.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the report (Markdown, HTML, drift.svg).")
@command_options
@json_option
def history(
    commits: str | None,
    package: str | None,
    flags: Path | None,
    layout: str | None,
    at: str | None,
    index_url: str | None,
    tolerance: float | None,
    line: CommandLine,
    name: str | None,
    jobs: int | None,
    ray: str | None,
    paths: tuple[str, ...],
    first_parent: bool,
    every: bool,
    fresh: bool,
    out: Path | None,
    as_json: bool,
) -> int:
    """List every commit of GOOD..BAD that changed the numbers of a case, in order, and by how much.

    In place of commits: --package lists the releases of a dependency that did, --flags the changes of a file that has
    an order, --layout the keys of a layout.

    Each is shown with the first step, phase and signal that differ, and with the sizes of the change: against the
    commit before it, and against GOOD. Numbers are the same where every bit of every signal of every step is.

    Between two commits with the same numbers nothing is tested, so a change that is taken back before the next tested
    commit is not seen: --every tests all commits and finds both.

    Exit codes: 0 the list is complete, 3 it is not (commits that cannot be tested hide a change, or one is FLAKY).
    """
    from repro.live import bisect_view
    from repro.report.history import history_text, write_report
    from repro_bisect.axes.sets import roomy
    from repro_bisect.driver.history import history_of
    from repro_bisect.driver.session import Options
    from repro_golden.base.errors import ReproError
    from repro_golden.repository.checkout import find_checkout

    checkout = find_checkout(Path.cwd())
    case = case_of(checkout, name, line)
    options = Options(jobs=jobs, ray=ray, paths=paths, first_parent=first_parent, every=every, fresh=fresh)
    if tolerance is not None:
        raise ReproError("--tolerance is for `repro bisect --layout`: a history compares bits, leave it out")
    chosen = {"package": package, "flags": flags, "layout": layout, "index_url": index_url}
    axis = axis_of(checkout, case, commits, options, at=at, line=True, **chosen)  # type: ignore[arg-type]
    with bisect_view() as watch:
        result = history_of(checkout, roomy(axis, case), axis, watch, options)
    parameters = axis_parameters(checkout, axis, index_url)
    command = again(checkout.root, case, **parameters, name=None if line.argv else case.name)
    folder = out or checkout.state / "reports" / f"history-{report_folder(axis, case)}{asked(checkout.root, line)}"
    with told(as_json, result.to_mapping(), history_text(result), command) as written:
        written.extend(write_report(result, folder, command))
    return 0 if result.verifiable else 3
