"""Recordings of operations as the journal holds them: beside their trace, and whole or not there."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from repro_golden.base.canonical import digest
from repro_golden.recording import operations
from repro_golden.recording.operations.stream import Stream, read_stream

__all__ = ["FOLDER", "recorder", "seal", "sealed_streams", "streams_of"]

FOLDER = "operations"
"""In the folder of a replay, or of its trace."""
_SEAL = "digest"


def streams_of(folder: Path) -> list[Stream]:
    """The operations of each rank that a replay left.

    Raises:
        ReproError: they cannot be read.
    """
    return [read_stream(path) for path in sorted((folder / FOLDER).glob("rank-*.jsonl"))]


def seal(folder: Path) -> None:
    """Write down what a replay's operations, and the values beside them, are."""
    (folder / FOLDER / _SEAL).write_text(_digest_of(folder / FOLDER))


def sealed_streams(folder: Path) -> Sequence[Stream]:
    """As `streams_of`; none where a file is not as it was when they were sealed, or is missing."""
    try:
        whole = (folder / FOLDER / _SEAL).read_text(errors="replace") == _digest_of(folder / FOLDER)
    except OSError:
        return []
    return streams_of(folder) if whole else []


def _digest_of(folder: Path) -> str:
    files = sorted(path for path in folder.iterdir() if path.name != _SEAL)
    return digest(*(part for path in files for part in (path.name, digest(path.read_bytes()))))


@functools.cache
def recorder() -> str:
    """Digest of the code that records operations: another version may see others, or more of them."""
    files = sorted(path for place in operations.__path__ for path in Path(place).glob("*.py"))
    return digest(*(path.read_bytes() for path in files))
