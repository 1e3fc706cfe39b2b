"""The append-only log that a recorder writes: one frame per step, readable up to a kill at any byte.

It needs the standard library alone, so that it can run inside a foreign trainer. A frame is ``STEP`` | length u64 |
crc32 u32 | payload; the payload is the length of a JSON table (u32), the table (the rows' words, one list per column),
their numbers (`_NUMBERS`, row by row) and the raw bytes of sketches and values that the numbers give lengths for.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from repro_golden.fingerprint.definition import Lanes
from repro_golden.trace.model import Row

__all__ = ["pack", "read_frames", "unpack"]

_HEAD = struct.Struct("<4sQI")
_NUMBERS = struct.Struct("<QQqddqq")
"""Both lanes, non-finite count, absmax, l2, length of the sketch, length of the values."""
_MAGIC = b"STEP"
_ABSENT = -1  # the length written for a row that keeps no values


def pack(step: int, rows: Sequence[Row]) -> bytes:
    """One frame."""
    table = {
        "step": step,
        "phase": [r.phase for r in rows],
        "name": [r.name for r in rows],
        "dtype": [r.dtype for r in rows],
        "shape": [r.shape for r in rows],
        "placement": [r.placement for r in rows],
    }
    head = json.dumps(table, separators=(",", ":")).encode()
    pieces = [struct.pack("<I", len(head)), head]
    for r in rows:
        kept = _ABSENT if r.values is None else len(r.values)
        pieces.append(_NUMBERS.pack(*r.lanes, r.nonfinite, r.absmax, r.l2, len(r.sketch), kept))
    for r in rows:
        pieces += (r.sketch, r.values or b"")
    payload = b"".join(pieces)
    return _HEAD.pack(_MAGIC, len(payload), zlib.crc32(payload)) + payload


def unpack(payload: bytes) -> tuple[int, list[Row]]:
    """Step number and rows of a frame's payload."""
    (size,) = struct.unpack_from("<I", payload)
    table = json.loads(payload[4 : 4 + size])
    numbers = 4 + size
    at = numbers + _NUMBERS.size * len(table["phase"])
    rows = []
    for i, phase in enumerate(table["phase"]):
        a, b, nonfinite, absmax, l2, sketched, kept = _NUMBERS.unpack_from(payload, numbers + i * _NUMBERS.size)
        sketch, at = payload[at : at + sketched], at + sketched
        values = None
        if kept != _ABSENT:
            values, at = payload[at : at + kept], at + kept
        rows.append(
            Row(
                phase=phase,
                name=table["name"][i],
                dtype=table["dtype"][i],
                shape=tuple(table["shape"][i]),
                lanes=Lanes(a, b),
                nonfinite=nonfinite,
                absmax=absmax,
                l2=l2,
                sketch=sketch,
                values=values,
                placement=table["placement"][i],
            )
        )
    return int(table["step"]), rows


def read_frames(path: Path) -> Iterator[tuple[int, list[Row]]]:
    """The whole frames of a log, up to the first that is cut short or damaged (that one and all after it are lost)."""
    size = path.stat().st_size  # a damaged length must not become a request for that much memory
    with path.open("rb") as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            magic, length, crc = _HEAD.unpack(head)
            if magic != _MAGIC or length > size:
                return
            payload = file.read(length)
            if len(payload) != length or zlib.crc32(payload) != crc:
                return
            yield unpack(payload)
