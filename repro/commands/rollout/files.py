"""Which rollouts a path on the command line means: ours, or dumps of slime, Miles and Relax."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from repro.output import parameters
from repro_golden.base.systems import SYSTEMS, System

if TYPE_CHECKING:
    from repro_golden.dumps.rollout.files import RolloutDump

__all__ = ["Reading", "bytes_of", "dump_options", "dumps_at", "is_ours"]

_INSIDE = "rollout_data"
"""Where --dump-details keeps rollout dumps."""


@dataclass(frozen=True)
class Reading:
    """How dumps are read.

    Attributes:
        allow: Classes whose objects are read as plain fields.
        limit: Most memory that one may take, as ``16GiB``; None for the usual bound.
        system: Whose they are; None where each tells itself.
    """

    allow: tuple[str, ...] = ()
    limit: str | None = None
    system: str | None = None

    def read(self, path: Path) -> RolloutDump:
        """Read a dump.

        Raises:
            ReproError: see `read_rollout_dump`; or no size.
        """
        from repro_golden.dumps.archive.reading import LIMIT
        from repro_golden.dumps.rollout.files import read_rollout_dump

        bound = LIMIT if self.limit is None else bytes_of(self.limit)
        return read_rollout_dump(path, system=cast("System | None", self.system), allow=self.allow, limit=bound)


dump_options = parameters(
    click.option(
        "--allow-pickle", "allow", multiple=True, metavar="CLASS",
        help="Read objects of this class as plain fields; its code never runs.",
    ),
    click.option("--limit", metavar="SIZE", help="Most memory that reading a dump may take, 16GiB by default."),
    click.option("--system", type=click.Choice(SYSTEMS), help="Whose dumps they are, where they do not tell."),
)  # fmt: skip
"""``--allow-pickle``, ``--limit`` and ``--system``: how dumps are read."""


def is_ours(path: Path) -> bool:
    """Whether a folder holds rollouts in our own form."""
    from repro_golden.store.rollouts import INDEX

    return (path / INDEX).exists()


def dumps_at(path: Path) -> list[Path]:
    """The dumps that a path means: a file, a folder of ``N.pt``, or a folder of --dump-details.

    Raises:
        ReproError: there are none, or nothing is there at all.
    """
    from repro_golden.base.errors import ReproError
    from repro_golden.dumps.rollout.files import dump_files

    if not path.exists():
        raise ReproError(f"no file at {path}: give a dump N.pt, or a folder of them")
    if not path.is_dir():
        return [path]
    for folder in _folders(path):
        if dumps := dump_files(folder):
            return dumps
    others = sorted(path.glob("*[0-9].pt"))
    fix = f"; name its files themselves, such as {others[0]}" if others else ""
    raise ReproError(f"{path} holds no rollouts: neither our index.json nor dumps N.pt or eval_N.pt{fix}")


def _folders(path: Path) -> Iterator[Path]:
    yield path
    if (path / _INSIDE).is_dir():
        yield path / _INSIDE


def bytes_of(text: str) -> int:
    """The bytes that ``--limit`` says.

    Raises:
        ReproError: it is no size.
    """
    from pydantic import TypeAdapter, ValidationError

    from repro_golden.base.errors import ReproError
    from repro_golden.case.subject_tables import Bytes

    try:
        size: int = TypeAdapter(Bytes).validate_python(text)
    except ValidationError:
        size = 0
    if size <= 0:
        raise ReproError(f"--limit {text} is no size: write --limit 32GiB")
    return size
