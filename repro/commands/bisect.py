"""`repro bisect`: the commit that moved the numbers."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from repro.output import emit, json_option

if TYPE_CHECKING:
    from repro_golden.case import Case
    from repro_golden.checkout import Checkout

__all__ = ["bisect"]

_OPEN_END = 1_000_000
"""Steps of a command that is to be replayed to its own end."""


@click.command()
@click.argument("commits", metavar="GOOD..BAD")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- CMD...]")
@click.option("--case", "name", help="The case to replay; may be left out when there is only one.")
@click.option("-j", "--jobs", type=click.IntRange(min=1), help="Probes at once; by default what the machine serves.")
@click.option("--ray", metavar="ADDRESS", help="Run the probes on this Ray cluster; auto finds a running one.")
@click.option("--when", metavar="PREDICATE", help="What makes a commit BAD; by default what the case says.")
@click.option("--path", "paths", multiple=True, help="A folder or file that holds what matters; may be repeated.")
@click.option("--first-parent", is_flag=True, help="Follow only the first parent of merges.")
@click.option("--all", "every", is_flag=True, help="Name every culprit: move the baseline until the ends agree.")
@click.option(
    "--confidence", type=click.FloatRange(0.5, 1, min_open=True, max_open=True), help="Noisy verdicts: when to stop."
)
@click.option("--fresh", is_flag=True, help="Use nothing that earlier bisects found.")
@click.option("--steps", type=click.IntRange(min=1), help="With CMD: steps to replay; by default all it makes.")
@click.option("--ranks", type=click.IntRange(min=1), default=1, show_default=True, help="With CMD: processes.")
@click.option("--gpus", type=click.IntRange(min=0), default=0, show_default=True, help="With CMD: GPUs of a probe.")
@click.option("--metric", "metrics", multiple=True, help="With CMD: pattern of output whose named groups are metrics.")
@click.option("--export", type=click.Path(path_type=Path), help="Also write what is known as a `git bisect log`.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the report (Markdown and HTML).")
@json_option
def bisect(
    commits: str,
    command: tuple[str, ...],
    name: str | None,
    jobs: int | None,
    ray: str | None,
    when: str | None,
    paths: tuple[str, ...],
    first_parent: bool,
    every: bool,
    confidence: float | None,
    fresh: bool,
    steps: int | None,
    ranks: int,
    gpus: int,
    metrics: tuple[str, ...],
    export: Path | None,
    out: Path | None,
    as_json: bool,
) -> int:
    """Replay a case across GOOD..BAD and name the first commit that moved its numbers.

    With CMD, a training program that knows nothing of repro, no case file is needed.

    PREDICATE is one of: bitwise, finite, exit (CMD's exit code, as for `git bisect run`), kl>NUMBER, ulp>NUMBER,
    metric:NAME [rtol=NUMBER] [atol=NUMBER], or FILE.py:FUNCTION.

    Your checkout, index and branches are not touched: commits are replayed in worktrees of their own. A search that was
    interrupted resumes when the same command is run again.
    """
    from repro.live import bisect_view
    from repro.report.bisect import bisect_text, write_report
    from repro_bisect.driver import Options, bisect_range
    from repro_bisect.gitrule import git_log
    from repro_golden.canonical import write_atomic
    from repro_golden.checkout import find_checkout

    checkout = find_checkout(Path.cwd())
    case = _case(checkout, name, command, steps, {"ranks": ranks, "gpus": gpus}, metrics)
    open_end = bool(command) and steps is None and when != "exit"
    options = Options(jobs, ray, when, paths, first_parent, every, fresh, confidence, open_end)
    with bisect_view() as watch:
        result = bisect_range(checkout, case, commits, watch, options)
    said = [f"repro bisect {result.good[:10]}..{result.bad[:10]}"]
    said += [f"--case {case.name}"] if not command else []
    said += [f"--when {shlex.quote(when)}"] if when else []
    said += [f"--path {shlex.quote(path)}" for path in paths]
    said += [flag for flag, given in (("--first-parent", first_parent), ("--all", every)) if given]
    said += [f"--confidence {confidence}"] if confidence else []
    said += [f"--steps {steps}"] if steps else []
    said += [f"--metric {shlex.quote(metric)}" for metric in metrics]
    said += [f"--ranks {ranks}"] if ranks > 1 else []
    said += [f"--gpus {gpus}"] if gpus else []
    again = " ".join([*said, *(["--", shlex.join(command)] if command else [])])
    folder = out or checkout.state / "reports" / f"{result.good[:10]}..{result.bad[:10]}-{case.name}"
    written: list[Path] = []
    try:
        written += write_report(result, folder, again)
        if export:
            write_atomic(export, git_log(result.good, result.bad, result.accepted, result.subjects))
    finally:  # whatever becomes of the files, the answer is told
        data = result.to_mapping() | {"reports": [str(p) for p in written], "reproduce": again}
        reports = "".join(f"\nreport: {path}" for path in written)
        emit(as_json, data, f"{bisect_text(result)}{reports}\nreproduce with: {again}")
    return 0 if result.outcome in ("found", "agree") else 3


def _case(
    checkout: Checkout,
    name: str | None,
    command: tuple[str, ...],
    steps: int | None,
    resources: dict[str, int],
    metrics: tuple[str, ...],
) -> Case:
    from repro_golden.case import command_case, find_case
    from repro_golden.errors import ReproError

    if command and name:
        raise ReproError("--case and a command after -- exclude each other: give one of them")
    if not command and (steps or metrics or resources != {"ranks": 1, "gpus": 0}):
        raise ReproError("--steps, --ranks, --gpus and --metric are for a command after --: a case says them itself")
    if command:
        return command_case(checkout.root, "command", command, steps or _OPEN_END, resources, metrics)
    return find_case(checkout.root, name)
