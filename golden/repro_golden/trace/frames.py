"""The append-only log that a recorder writes: one frame per step, readable up to a kill at any byte.

It needs the standard library alone, so that it can run inside a foreign trainer. A frame is ``STEP`` | length u64 |
crc32 u32 | payload; the payload is the length of a JSON table (u32), the table (the rows' words, one list per column),
their numbers (`NUMBERS`, row by row) and the raw bytes of sketches and values that the numbers give lengths for.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from repro_golden.base.canonical import parse_json
from repro_golden.base.files import open_regular
from repro_golden.fingerprint.definition import Lanes
from repro_golden.trace.model import Row

__all__ = [
    "ABSENT",
    "NUMBERS",
    "FrameReader",
    "Packed",
    "join",
    "json_column",
    "pack",
    "pack_rows",
    "payload_of",
    "read_frames",
    "split",
    "unpack",
]

_HEAD = struct.Struct("<4sQI")
NUMBERS = struct.Struct("<QQqddqq")
"""Both lanes, non-finite count, absmax, l2, length of the sketch, length of the values (`ABSENT` without any)."""
_MAGIC = b"STEP"
ABSENT = -1  # the length written for a row that keeps no values


class Packed(NamedTuple):
    """Rows on their way into a frame: each column of the table as JSON without its brackets, the numbers, the bytes."""

    table: tuple[str, ...]
    numbers: bytes
    raw: bytes


COLUMNS = ("phase", "name", "dtype", "shape", "placement")
"""The table's columns, in order."""


def pack_rows(rows: Sequence[Row]) -> Packed:
    """Rows, ready for a frame."""
    table = tuple(json_column([getattr(r, column) for r in rows]) for column in COLUMNS)
    numbers, raw = list[bytes](), list[bytes]()
    for r in rows:
        length = ABSENT if r.values is None else len(r.values)
        numbers.append(NUMBERS.pack(*r.lanes, r.nonfinite, r.absmax, r.l2, len(r.sketch), length))
        raw += (r.sketch, r.values or b"")
    return Packed(table, b"".join(numbers), b"".join(raw))


def json_column(values: Sequence[object]) -> str:
    """A column of a table."""
    return json.dumps(values, separators=(",", ":"))[1:-1]


def pack(step: int, rows: Sequence[Row], label: str = "") -> bytes:
    """One frame. A label tells the step from others of its rank: the optimizers that made it."""
    return join(step, [pack_rows(rows)], label)


def join(step: int, parts: Sequence[Packed], label: str = "") -> bytes:
    """One frame of several lots of rows."""
    parts = [part for part in parts if part.numbers]
    columns = zip(*(part.table for part in parts), strict=True) if parts else [()] * len(COLUMNS)
    texts = [f'"{name}":[{",".join(texts)}]' for name, texts in zip(COLUMNS, columns, strict=True)]
    named = [f'"label":{json.dumps(label)}'] if label else []
    head = ("{" + ",".join([f'"step":{step}', *named, *texts]) + "}").encode()
    payload = b"".join(
        [struct.pack("<I", len(head)), head, *(part.numbers for part in parts), *(part.raw for part in parts)]
    )
    return _HEAD.pack(_MAGIC, len(payload), zlib.crc32(payload)) + payload


def payload_of(frame: bytes) -> bytes:
    """What a frame holds."""
    return frame[_HEAD.size :]


def split(payload: bytes) -> tuple[dict[str, Any], memoryview, memoryview]:
    """The table of a frame's payload, its rows' numbers (`NUMBERS`) and the bytes that these give lengths for."""
    (size,) = struct.unpack_from("<I", payload)
    table, rest = parse_json(payload[4 : 4 + size]), memoryview(payload)[4 + size :]
    end = NUMBERS.size * len(table["phase"])
    return table, rest[:end], rest[end:]


def unpack(payload: bytes) -> tuple[int, list[Row], str]:
    """Step number, rows and label of a frame's payload."""
    table, numbers, raw = split(payload)
    rows, at = [], 0
    for i, (a, b, nonfinite, absmax, l2, sketched, length) in enumerate(NUMBERS.iter_unpack(numbers)):
        sketch, at = bytes(raw[at : at + sketched]), at + sketched
        values = None
        if length != ABSENT:
            values, at = bytes(raw[at : at + length]), at + length
        rows.append(
            Row(
                phase=table["phase"][i],
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
    return int(table["step"]), rows, table.get("label", "")


class FrameReader:
    """Reads a log, also while it grows: each call of `more` goes on where the last one ended."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def more(self) -> Iterator[tuple[int, list[Row], str]]:
        """The whole frames up to the first that is cut short or damaged: `unpack` of each."""
        return map(unpack, self.payloads())

    def payloads(self) -> Iterator[bytes]:
        """As `more`, the payloads as they are."""
        size = self._path.stat().st_size  # a damaged length must not become a request for that much memory
        with open_regular(self._path) as file:
            file.seek(self._at)
            while len(head := file.read(_HEAD.size)) == _HEAD.size:
                magic, length, crc = _HEAD.unpack(head)
                if magic != _MAGIC or length > size:
                    return
                payload = file.read(length)
                if len(payload) != length or zlib.crc32(payload) != crc:
                    return
                self._at = file.tell()
                yield payload


def read_frames(path: Path) -> Iterator[tuple[int, list[Row]]]:
    """Step numbers and rows of a log's whole frames; what follows a damaged one is lost."""
    return ((step, rows) for step, rows, _ in FrameReader(path).more())
