"""What a probe left: its trace, and what lies beside it. Recordings of operations are whole there, or not there."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from repro_bisect.probe.executors import Signal
from repro_bisect.probe.request import Request
from repro_golden.base.canonical import digest
from repro_golden.recording import operations
from repro_golden.recording.operations.stream import Stream, read_stream
from repro_golden.trace import Trace, dump_path

__all__ = [
    "FOLDER", "dumped", "ended_itself", "recorder", "seal", "sealed_streams", "streams_of", "trace_in", "undumped",
]  # fmt: skip

FOLDER = "operations"
"""In the folder of a replay, or of its trace."""
_SEAL = "digest"


def trace_in(folder: Path) -> Trace | None:
    """The trace in a folder; None where no step was made."""
    if not (folder / "steps.jsonl").exists():
        return None
    trace = Trace(folder)
    return trace if trace.steps else None


def dumped(trace: Path, signals: Sequence[Signal]) -> list[Signal]:
    """Those of the signals whose whole content lies beside a trace."""
    return [signal for signal in signals if dump_path(trace, *signal).exists()]


def undumped(trace: Path, asked: Request) -> tuple[Signal, ...]:
    """Those whose whole content was asked for, and does not lie there."""
    return tuple(sorted(set(asked.dump) - set(dumped(trace, asked.dump))))


def ended_itself(trace: Trace) -> bool:
    """Whether a program made fewer steps than it was asked for and ended well: it would again."""
    end = trace.end or {}
    return len(trace.steps) < trace.header.steps and end.get("reason") == "finished" and end.get("exit") == 0


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
