"""`repro report post`: the comment of an earlier `repro report pr`, where that job's token could not write."""

from __future__ import annotations

from pathlib import Path

import click

from repro.output import emit, json_option

__all__ = ["post"]


@click.command()
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE")
@click.option("--pr", "number", type=click.IntRange(min=1), help="The pull request; in a GitHub job its own.")
@click.option("--repo", "repository", metavar="OWNER/NAME", help="Where; in a GitHub job its own.")
@json_option
def post(file: Path, number: int | None, repository: str | None, as_json: bool) -> int:
    """Write FILE, a comment.md of `repro report pr`, on a pull request: anew where it is there already.

    A job for a pull request from a fork has a token that can only read. It keeps comment.md as an artifact, and a
    workflow_run job, whose token can write, posts it.
    """
    from repro.pulls.github import PullComments
    from repro.pulls.github_pull import find_pull, find_token, marker_of
    from repro_golden.base.errors import ReproError
    from repro_golden.base.extras import require

    require("a comment", "report")
    try:
        body = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ReproError(f"cannot read {file} ({why}): give a comment.md of `repro report pr`") from None
    line = marker_of(body)
    if line is None:
        raise ReproError(f"{file} does not begin as a comment of `repro report pr` does: give its comment.md")
    pull = find_pull(Path.cwd(), repository, number)
    posted = PullComments(pull, find_token()).write(line, body)
    data = {"comment": posted.url, "created": posted.created, "repository": pull.repository, "pr": pull.number}
    emit(as_json, data, f"{'posted' if posted.created else 'updated'}: {posted.url}")
    return 0
