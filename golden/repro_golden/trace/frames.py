"""The append-only log that a recorder writes: one frame per step, readable up to a kill at any byte.

It needs the standard library alone, so that it can run inside a foreign trainer. A frame is ``STEP`` | length u64 |
crc32 u32 | payload; the payload is the length of a JSON table (u32), the table (one list per column) and the raw bytes
of sketches and values that the table gives lengths for.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from repro_golden.canonical import decode_float, encode_float
from repro_golden.fingerprint.definition import Lanes
from repro_golden.trace.model import Row

__all__ = ["pack", "read_frames", "unpack"]

_HEAD = struct.Struct("<4sQI")
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
        "a": [r.lanes.a for r in rows],
        "b": [r.lanes.b for r in rows],
        "nonfinite": [r.nonfinite for r in rows],
        "absmax": [encode_float(r.absmax) for r in rows],
        "l2": [encode_float(r.l2) for r in rows],
        "placement": [r.placement for r in rows],
        "sketch": [len(r.sketch) for r in rows],
        "values": [_ABSENT if r.values is None else len(r.values) for r in rows],
    }
    head = json.dumps(table, separators=(",", ":")).encode()
    blobs = b"".join(part for r in rows for part in (r.sketch, r.values or b""))
    payload = struct.pack("<I", len(head)) + head + blobs
    return _HEAD.pack(_MAGIC, len(payload), zlib.crc32(payload)) + payload


def unpack(payload: bytes) -> tuple[int, list[Row]]:
    """Step number and rows of a frame's payload."""
    (size,) = struct.unpack_from("<I", payload)
    table = json.loads(payload[4 : 4 + size])
    at = 4 + size
    rows = []
    for i, phase in enumerate(table["phase"]):
        sketch, at = payload[at : at + table["sketch"][i]], at + table["sketch"][i]
        values = None
        if (length := table["values"][i]) != _ABSENT:
            values, at = payload[at : at + length], at + length
        rows.append(
            Row(
                phase=phase,
                name=table["name"][i],
                dtype=table["dtype"][i],
                shape=tuple(table["shape"][i]),
                lanes=Lanes(table["a"][i], table["b"][i]),
                nonfinite=table["nonfinite"][i],
                absmax=decode_float(table["absmax"][i]),
                l2=decode_float(table["l2"][i]),
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
