"""`repro report pr`: what BASE..HEAD does to the numbers of every case, for a pull request."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from repro.commands.again import again
from repro.commands.choose import DashedCommand, asked, command_options, say_python
from repro.output import emit, json_option

if TYPE_CHECKING:
    from repro.pulls.github import PullComments
    from repro.pulls.result import Entry, PullReport
    from repro_bisect.driver.session import Options
    from repro_bisect.probe.progress import Watch
    from repro_golden.case.command_line import CommandLine
    from repro_golden.repository.checkout import Checkout

__all__ = ["pr"]


@click.command(cls=DashedCommand)
@click.argument("commits", metavar="BASE..HEAD")
@click.option("--case", "names", multiple=True, help="A case to replay; by default every one. May be repeated.")
@click.option("--bisect", "name", is_flag=True, help="Name every commit that moved the numbers, and explain it.")
@click.option("-j", "--jobs", type=click.IntRange(min=1), help="Replays at once; by default what the machine serves.")
@click.option("--fresh", is_flag=True, help="Use nothing that earlier searches found.")
@click.option("--path", "paths", multiple=True, help="A folder or file that holds what matters; may be repeated.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for comment.md, report.html, .json, junit.xml.")
@click.option("--post", is_flag=True, help="Write the comment on the pull request; anew where it is there already.")
@click.option("--pr", "number", type=click.IntRange(min=1), help="With --post: its number; in a GitHub job its own.")
@click.option("--repo", "repository", metavar="OWNER/NAME", help="With --post: where; in a GitHub job its own.")
@click.option("--key", default="default", show_default=True, help="Tells comments of several workflows apart.")
@click.option("--tensorboard", type=click.Path(path_type=Path), help="Folder for both sides as TensorBoard runs.")
@command_options
@json_option
def pr(
    commits: str,
    line: CommandLine,
    names: tuple[str, ...],
    name: bool,
    jobs: int | None,
    fresh: bool,
    paths: tuple[str, ...],
    out: Path | None,
    post: bool,
    number: int | None,
    repository: str | None,
    key: str,
    tensorboard: Path | None,
    as_json: bool,
) -> int:
    """Replay every case on BASE and on HEAD, from the same rollouts on this machine, and say whether numbers moved.

    BASE is taken to be the commit at which HEAD's branch left it; an empty HEAD means the current commit. What the
    journal holds of earlier replays is used again.

    Your checkout, index and branches are not touched.

    Exit codes: 0 all cases agree, 1 numbers moved or HEAD does not reproduce itself, 2 a case failed or the comment
    could not be posted, 3 a case cannot be verified here.
    """
    from repro.live import bisect_view
    from repro.pulls.github import PullComments
    from repro.pulls.github_pull import find_pull, find_token, marker
    from repro.pulls.pair import now
    from repro.pulls.report import pull_text, write_report
    from repro.pulls.result import PullReport
    from repro_bisect.axes.axis import short
    from repro_bisect.axes.commits import resolve, typed
    from repro_bisect.driver.session import Options
    from repro_golden.base.extras import require
    from repro_golden.repository.checkout import find_checkout

    require("a report", "report", *["tensorboard"] * bool(tensorboard))
    checkout, (left, right) = find_checkout(Path.cwd()), _range(commits)
    marker(key)
    token = find_token() if post else ""  # before anything is started, which then has none
    base, head = resolve(checkout, left), resolve(checkout, right)
    # what a post needs is asked for before hours of replays, not after them
    comments = PullComments(find_pull(checkout.root, repository, number), token) if post else None
    options = Options(jobs=jobs, fresh=fresh, paths=paths)
    with bisect_view() as watch:
        entries = _entries(checkout, names, line, (left, head), watch, options, name=name)
    span = f"{short(base)}..{short(head)}"
    report = PullReport(base, head, entries, again(checkout.root, commits=typed(checkout, base, head)), now())
    written: list[Path] = []
    try:
        folder = out or checkout.state / "reports" / f"pr-{span}{asked(checkout.root, line)}"
        written = write_report(report, folder, key)
        if tensorboard:
            from repro.nightly.tensorboard import write_pulls

            write_pulls(report.results, tensorboard)
    finally:  # whatever becomes of the files, the answer is told
        files = "".join(f"\nreport: {path}" for path in written)
        text = f"{pull_text(report)}\n{files}\nreproduce with: {report.command}"
        annotate(report)
        if not as_json:
            print(text, flush=True)
    data = report.to_mapping() | {"reports": [str(path) for path in written]}
    code = report.exit_code
    if comments:
        data["comment"], problem = _posted(comments, written[0], marker(key))
        code = code or 2 if problem else code
        code = 2 if problem and code == 3 else code
        if not as_json and data["comment"]:
            print(f"comment: {data['comment']}")
        if problem:
            data["error"] = problem
            print(f"repro: {problem}", file=sys.stderr)
    if as_json:
        emit(as_json, data, "")
    return code


def _range(commits: str) -> tuple[str, str]:
    """Both revisions as they are written.

    Raises:
        ReproError: it is no range.
    """
    from repro_golden.base.errors import ReproError

    left, dots, right = commits.partition("..")
    if not dots or not left or right.startswith("."):
        raise ReproError(f"{commits!r} is no range: write BASE..HEAD, such as origin/main..HEAD")
    return left, right or "HEAD"


def _entries(
    checkout: Checkout,
    names: Sequence[str],
    line: CommandLine,
    endpoints: tuple[str, str],
    watch: Watch,
    options: Options,
    *,
    name: bool,
) -> list[Entry]:
    """What was found of each case; one that fails does not keep the others from it.

    Raises:
        ReproError: there is no case, or none of a name that was given.
        MachineFailureError: the machine failed; the same command resumes.
    """
    from repro.pulls.cases import PullCases
    from repro.pulls.pair import compare_commits
    from repro.pulls.result import Failed
    from repro_golden.base.errors import MachineFailureError, NotVerifiableError, ReproError
    from repro_golden.case.file import CASES, NO_CASE, find_case, unknown_case

    line.check(beside=", ".join(names))
    cases = PullCases(checkout, *endpoints)
    known = cases.names
    if not known and not line.argv:
        raise ReproError(f"no cases in {checkout.root / CASES}: {NO_CASE}")
    if wrong := [requested for requested in names if requested not in known]:
        raise unknown_case(checkout.root, wrong[0])
    entries: list[Entry] = []
    for case_name in ["command"] if line.argv else dict.fromkeys(names or known):
        if not line.argv and (why := cases.absent(case_name)):
            entries.append(Failed(case_name, why, "unverifiable"))
            continue
        try:
            if line.argv:  # what it passes on is said by who calls, not by HEAD
                case = line.case(checkout.root)
                say_python(case, line)
            else:
                case = cases.replayed(find_case(checkout.root, case_name))
            result = compare_commits(checkout, case, *endpoints, watch, options, name=name)
            entries.append(result if line.argv else cases.judged(result))
        except MachineFailureError:
            raise
        except NotVerifiableError as error:
            entries.append(Failed(case_name, str(error), "unverifiable"))
        except ReproError as error:
            entries.append(Failed(case_name, f"{error}{'' if line.argv else cases.left_out(case_name)}"))
    return entries


def annotate(report: PullReport) -> None:
    """Mark the GitHub job, where this is one, with each case that does not agree."""
    from repro.pulls.github import annotation
    from repro.pulls.result import WORDS, verdict_line
    from repro.report.pieces import clean, plain

    for entry in report.entries:
        title, text = f"{clean(entry.case)}: {WORDS[entry.verdict]}", plain(verdict_line(entry))
        if entry.verdict in ("moved", "flaky", "error"):
            annotation("error", title, text)
        elif entry.verdict == "unverifiable":
            annotation("warning", title, text)


def _posted(comments: PullComments, file: Path, marker: str) -> tuple[str, str]:
    """The comment's page; or why there is none."""
    from repro_golden.base.errors import ReproError

    try:
        return comments.write(marker, file.read_text(encoding="utf-8")).url, ""
    except ReproError as error:
        return "", f"{error} (the comment is kept in {file})"
