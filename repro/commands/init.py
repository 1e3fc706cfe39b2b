"""`repro init`: prepare any git repository."""

from __future__ import annotations

import os
import re
from pathlib import Path

import click

from repro.output import emit, json_option

__all__ = ["init"]


@click.command()
@click.option("--case", "name", help="Name of the case.  [default: first]")
@click.option(
    "--remote", help="A DVC remote to share (s3://, ssh://, a folder); by default a folder of your own outside git."
)
@click.option("--example", is_flag=True, help="Copy the built-in trainer to core/, with a case of it, to try repro on.")
@json_option
def init(name: str | None, remote: str | None, example: bool, as_json: bool) -> int:
    """Write golden/ and, where missing, DVC with a remote; say how to record. Twice is harmless.

    Where there is no dvc.yaml, golden/dvc.yaml gets a stage that replays the golden runs. A repository that holds the
    built-in trainer gets a first case of it.
    """
    from repro.initialise import fetch_command, initialise, next_command
    from repro_golden.base.errors import ReproError
    from repro_golden.case.file import NAME
    from repro_golden.repository.checkout import find_checkout

    root = find_checkout(Path.cwd()).root
    if name and not re.fullmatch(NAME, name):
        raise ReproError(f"--case {name} is no name of a case: take letters, digits, dots, dashes and underscores")
    if remote and re.match(r"\.{1,2}(/|$)", remote):  # of the folder where it was typed
        remote = os.path.relpath(Path.cwd() / remote, root)
    done = initialise(root, name or "first", remote, example=example)
    wrote = [f"wrote {line}" for line in done] or ["nothing to do: golden/ and DVC are here"]
    following = [*fetch_command(root), *next_command(root, name)]
    lines = [*wrote, f"next: {following[0]}", *(f"      {line}" for line in following[1:])]
    emit(as_json, {"wrote": done, "next": following}, "\n".join(lines))
    return 0
