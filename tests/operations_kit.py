"""Recording a block's operations in this process, and finding them in what was written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from repro_golden.fingerprint import content, reference
from repro_golden.recording.operations.recorder import OperationRecorder
from repro_golden.recording.operations.stream import Frame, Operation, Stream

__all__ = ["FILES", "NAME", "asked", "lanes", "named", "recording"]

NAME = "rank-00000.jsonl"
FILES = [NAME, "rank-00000.values"]
"""What a recording leaves: the operations, and the values of small results."""


@contextlib.contextmanager
def recording(folder: Path, dump: Sequence[int] = (), rank: int = 0) -> Iterator[OperationRecorder]:
    """A block whose operations are recorded."""
    recorder = OperationRecorder(folder, str(Path(__file__).parents[1]), 0, rank, dump=dump)
    recorder.open()
    recorder.begin()
    try:
        yield recorder
    finally:
        recorder.pause()
        recorder.close()


def named(stream: Stream, name: str) -> list[Operation]:
    """The operations of a name, in order."""
    return [o for o in stream.operations if o.name.split(".")[1:2] == [name]]


def asked(operation: Operation) -> Frame:
    """The innermost frame that is not torch's own."""
    return next(frame for frame in operation.stack if "/torch/" not in frame.file)


def lanes(tensor: torch.Tensor) -> str:
    """The two lanes of a tensor's content, from its bytes."""
    expected = reference(content(tensor).tobytes())
    return f"{expected.a:016x}{expected.b:016x}"
