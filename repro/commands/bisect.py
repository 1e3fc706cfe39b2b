"""`repro bisect`: the commit, release or change that moved the numbers, or where two layouts part."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from repro.commands.again import again
from repro.commands.axes import axis_of, axis_options, axis_parameters, report_folder
from repro.commands.choose import DashedCommand, asked, case_of, command_options
from repro.output import json_option, told

if TYPE_CHECKING:
    from repro_bisect.axes.axis import Axis
    from repro_bisect.driver.result import BisectResult
    from repro_golden.case.command_line import CommandLine

__all__ = ["bisect"]


@click.command(cls=DashedCommand)
@axis_options
@click.option("--case", "name", help="The case to replay; may be left out when there is only one.")
@click.option("-j", "--jobs", type=click.IntRange(min=1), help="Probes at once; by default what the machine serves.")
@click.option("--ray", metavar="ADDRESS", help="Run the probes on this Ray cluster; auto finds a running one.")
@click.option("--when", metavar="PREDICATE", help="What makes a point BAD; by default what the case says.")
@click.option("--path", "paths", multiple=True, help="A folder or file that holds what matters; may be repeated.")
@click.option("--first-parent", is_flag=True, help="Follow only the first parent of merges.")
@click.option("--all", "every", is_flag=True, help="Name every culprit: move the baseline until the ends agree.")
@click.option(
    "--confidence", type=click.FloatRange(0.5, 1, min_open=True, max_open=True), help="Noisy verdicts: when to stop."
)
@click.option("--fresh", is_flag=True, help="Use nothing that earlier bisects found.")
@click.option(
    "--try-skips",
    is_flag=True,
    help="Try also what is presumed to fail: commits like those around them, releases that were yanked.",
)
@click.option("--quick", is_flag=True, help="End with the culprit's name: neither confirm nor explain it.")
@click.option("--explain/--no-explain", "why", default=True, help="Also name the operation and the line; the default.")
@click.option("--export", type=click.Path(path_type=Path), help="Also write what is known as a `git bisect log`.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the report (Markdown and HTML).")
@command_options
@json_option
def bisect(
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
    when: str | None,
    paths: tuple[str, ...],
    first_parent: bool,
    every: bool,
    confidence: float | None,
    fresh: bool,
    try_skips: bool,
    quick: bool,
    why: bool,
    export: Path | None,
    out: Path | None,
    as_json: bool,
) -> int:
    """Replay a case across GOOD..BAD and name the first commit that moved its numbers.

    In place of commits: --package goes along the releases of a dependency, --flags finds the smallest part of a file's
    changes that moves the numbers, and --layout names the first signal at which two layouts part.

    With CMD, a training program that knows nothing of repro, no case file is needed.

    PREDICATE is one of: bitwise, finite, exit (CMD's exit code, as for `git bisect run`), kl>NUMBER, ulp>NUMBER,
    metric:NAME [rtol=NUMBER] [atol=NUMBER], or FILE.py:FUNCTION.

    Your checkout, index and branches are not touched: commits are replayed in worktrees of their own. A search that was
    interrupted resumes when the same command is run again.
    """
    from repro.doctor.quiet import diagnosis
    from repro.live import bisect_view
    from repro_bisect.axes.sets import FlagSet, LayoutLine
    from repro_bisect.driver.session import Options
    from repro_golden.repository.checkout import find_checkout

    checkout = find_checkout(Path.cwd())
    case = case_of(checkout, name, line)
    open_end = bool(line.argv) and line.steps is None and when != "exit"
    how = (first_parent, every, fresh, confidence, open_end, why, diagnosis, try_skips, quick)
    options = Options(jobs, ray, when, paths, *how)
    chosen = {"package": package, "flags": flags, "layout": layout, "index_url": index_url}
    axis = axis_of(checkout, case, commits, options, at=at, tolerance=tolerance, **chosen)  # type: ignore[arg-type]
    values = {"--when": when, "--all": every, "--confidence": confidence, "--export": export, "--try-skips": try_skips}
    _refuse(axis, values | {"--quick": quick})
    parameters = axis_parameters(checkout, axis, index_url)
    command = again(checkout.root, case, **parameters, name=None if line.argv else case.name)
    folder = out or checkout.state / "reports" / f"{report_folder(axis, case)}{asked(checkout.root, line, when)}"
    if isinstance(axis, LayoutLine):
        from repro.report.layouts import layout_text, write_layout_report
        from repro_bisect.driver.layout_difference import replay_layouts

        with bisect_view() as watch:
            difference = replay_layouts(checkout, case, axis, tolerance, watch, options)
        with told(as_json, difference.to_mapping(), layout_text(difference), command) as written:
            written.extend(write_layout_report(difference, folder, command))
        return 3 if difference.outcome == "flaky" else 0
    from repro.report.bisect import bisect_text, write_report
    from repro_bisect.axes.gitrule import git_log
    from repro_bisect.driver.commits import bisect_range
    from repro_bisect.driver.delta import minimal_set
    from repro_golden.base.canonical import write_atomic

    with bisect_view() as watch:
        if isinstance(axis, FlagSet):
            result: BisectResult = minimal_set(checkout, case, axis, watch, options)
        else:
            result = bisect_range(checkout, case, axis, watch, options)
    with told(as_json, result.to_mapping() | {"what": axis.what}, bisect_text(result, axis.what), command) as written:
        if export:
            write_atomic(export, git_log(result.good, result.bad, result.accepted, result.subjects))
        written.extend(write_report(result, folder, command, axis.what))
    return 0 if result.outcome in ("found", "agree") else 3


def _refuse(axis: Axis, values: dict[str, Any]) -> None:
    """Refuse options that say nothing of an axis."""
    from repro_bisect.axes.sets import FlagSet, LayoutLine
    from repro_golden.base.errors import ReproError

    refused = ["--export"] if axis.what != "commit" else []
    if isinstance(axis, FlagSet):
        refused += ["--all", "--confidence", "--try-skips", "--quick"]
    if isinstance(axis, LayoutLine):
        refused += ["--when", "--all", "--confidence", "--try-skips", "--quick"]
    if values["--quick"] and values["--all"]:
        raise ReproError("--quick ends with the first name, and --all goes on from a confirmed one: give one of them")
    if values["--all"] and values["--when"] == "exit":
        raise ReproError("--all goes on from a commit's numbers, of which --when exit knows none: leave it out")
    if wrong := next((flag for flag in refused if values[flag]), None):
        raise ReproError(f"{wrong} is not for a search along a {axis.what}: leave it out")
