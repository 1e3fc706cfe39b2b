"""`repro explain`: the operation, the line and the size of what moved the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from repro.commands.again import again
from repro.commands.choose import DashedCommand, asked, case_of, command_options
from repro.output import json_option, told

if TYPE_CHECKING:
    from repro_golden.case.command_line import CommandLine
    from repro_golden.case.file import Case
    from repro_golden.repository.checkout import Checkout

__all__ = ["explain"]


@click.command(cls=DashedCommand)
@click.argument("what", metavar="COMMIT|A..B|TRACE")
@click.argument("other", required=False, metavar="[TRACE]")
@click.option("--case", "name", help="The case to replay; may be left out when there is only one.")
@click.option("-j", "--jobs", type=click.IntRange(min=1), help="Replays at once; by default what the machine serves.")
@click.option("--ray", metavar="ADDRESS", help="Replay on this Ray cluster; auto finds a running one.")
@click.option("--path", "paths", multiple=True, help="A folder or file that holds what matters; may be repeated.")
@click.option("--fresh", is_flag=True, help="Use nothing that earlier bisects found.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the report (Markdown and HTML).")
@command_options
@json_option
def explain(
    what: str,
    other: str | None,
    line: CommandLine,
    name: str | None,
    jobs: int | None,
    ray: str | None,
    paths: tuple[str, ...],
    fresh: bool,
    out: Path | None,
    as_json: bool,
) -> int:
    """Name the operation and the source line that moved the numbers of a case, and by how much.

    COMMIT is compared with its first parent, A..B the one end with the other, and of two TRACEs the commits that they
    were recorded from.

    Both versions are replayed up to the first step that differs; that step runs once more in each with every operation
    recorded. The answer is the first operation that reads the same bits in both and makes others, or the place where
    the operations themselves differ.
    """
    from repro.live import bisect_view
    from repro.report.explain import explain_text, write_report
    from repro_bisect.axes.axis import short
    from repro_bisect.axes.commits import typed
    from repro_bisect.driver.session import Options, commits_of, session
    from repro_bisect.explain.driver import explain as explained
    from repro_bisect.predicates.predicates import Bitwise
    from repro_golden.repository.checkout import find_checkout

    checkout = find_checkout(Path.cwd())
    case, spec = _asked(checkout, what, other, name, line)
    options = Options(jobs, ray, paths=paths, fresh=fresh)
    axis = commits_of(checkout, case, spec, options)
    with bisect_view() as watch, session(checkout, case, axis, Bitwise(), watch, options) as (scheduler, golden):
        golden_states = golden.states if golden else {}
        explanation = explained(scheduler, checkout, axis.good, axis.bad, golden=golden_states)
    span = f"{short(axis.good)}..{short(axis.bad)}"
    typed_range = typed(checkout, axis.good, axis.bad)
    command = again(checkout.root, case, what=typed_range, other=None, name=None if line.argv else case.name)
    folder = out or checkout.state / "reports" / f"explain-{span}-{case.name}{asked(checkout.root, line)}"
    with told(as_json, explanation.to_mapping(), f"{explain_text(explanation)}\n", command) as written:
        written.extend(write_report(explanation, folder, command))
    return 3 if explanation.answer == "unseen" else 0


def _asked(checkout: Checkout, what: str, other: str | None, name: str | None, line: CommandLine) -> tuple[Case, str]:
    """The case and the range that the arguments mean.

    Raises:
        ReproError: they mean none.
    """
    from repro_bisect.axes.commits import resolve
    from repro_golden.base.errors import ReproError
    from repro_golden.trace import Trace

    if other is None and not (Path(what) / "header.json").is_file():
        if ".." not in what and not checkout.git.tells("rev-parse", "--verify", "--quiet", f"{what}^"):
            resolve(checkout, what)
            raise ReproError(f"{what} has no parent to compare it with: give two commits, A..B")
        return case_of(checkout, name, line), what if ".." in what else f"{what}^..{what}"
    if other is None:
        raise ReproError(f"{what} is a trace: give the one to compare it with too")
    traces = [Trace(Path(path)) for path in (what, other)]
    commits = [trace.header.subject.get("commit") for trace in traces]
    for path, commit in zip((what, other), commits, strict=True):
        if not commit:
            raise ReproError(
                f"{path} is of no commit: its checkout had changes or files of its own; commit or ignore them, and "
                "record again"
            )
    recorded = str(traces[0].header.case.get("name", ""))
    case = case_of(checkout, name or (None if line.argv else recorded or None), line)
    return case, f"{commits[0]}..{commits[1]}"
