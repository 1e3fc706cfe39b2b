"""`repro init`: prepare any git repository."""

from __future__ import annotations

from pathlib import Path

import click

from repro.output import emit, json_option

__all__ = ["init"]


@click.command()
@click.option("--case", "name", default="first", show_default=True, help="Name of the first case.")
@click.option(
    "--remote", help="A DVC remote to share (s3://, ssh://, a folder); by default a folder of your own outside git."
)
@json_option
def init(name: str, remote: str | None, as_json: bool) -> int:
    """Write golden/, a first case and, where missing, DVC with a remote. Twice is harmless.

    Where there is no dvc.yaml, golden/dvc.yaml gets a stage that replays the golden runs.
    """
    from repro.initialise import initialise
    from repro_golden.repository.checkout import find_checkout

    done = initialise(find_checkout(Path.cwd()).root, name, remote)
    text = "\n".join(f"wrote {line}" for line in done) if done else "nothing to do: golden/, DVC and a case are here"
    emit(as_json, {"wrote": done}, text + "\nnext: repro golden record")
    return 0
