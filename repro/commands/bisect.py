"""`repro bisect`: the commit that moved the numbers."""

from __future__ import annotations

from pathlib import Path

import click

from repro.output import emit, json_option, progress

__all__ = ["bisect"]


@click.command()
@click.argument("commits", metavar="GOOD..BAD")
@click.option("--case", "name", help="The case to replay; may be left out when there is only one.")
@click.option("-j", "--jobs", type=click.IntRange(min=1), help="Probes at once; by default what the processors serve.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the report (Markdown and HTML).")
@json_option
def bisect(commits: str, name: str | None, jobs: int | None, out: Path | None, as_json: bool) -> int:
    """Replay the recorded rollouts of a case across GOOD..BAD and name the first commit that moved the numbers.

    Your checkout, index and branches are not touched: commits are replayed in worktrees of their own. A search that was
    interrupted resumes when the same command is run again.
    """
    from repro.report.bisect import bisect_text, write_report
    from repro_bisect.driver import Event, bisect_range, default_jobs
    from repro_golden.case import find_case
    from repro_golden.checkout import find_checkout

    checkout = find_checkout(Path.cwd())
    case = find_case(checkout.root, name)
    jobs = jobs or default_jobs(case)
    with progress("bisecting") as say:

        def watch(event: Event) -> None:
            left = f"  [{event.suspects} suspects, at most {event.rounds} rounds]" if event.suspects > 1 else ""
            say(event.text + left)

        result = bisect_range(checkout, case, commits, watch, jobs=jobs)
    command = f"repro bisect {result.good[:10]}..{result.bad[:10]} --case {case.name}"
    folder = out or checkout.state / "reports" / f"{result.good[:10]}..{result.bad[:10]}-{case.name}"
    paths = write_report(result, folder, command)
    data = result.to_mapping() | {"reports": [str(p) for p in paths], "reproduce": command}
    emit(as_json, data, f"{bisect_text(result)}\nreport: {paths[0]}\nreport: {paths[1]}\nreproduce with: {command}")
    return 0 if result.outcome in ("found", "agree") else 3
