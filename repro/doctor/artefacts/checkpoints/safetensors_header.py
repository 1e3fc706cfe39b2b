"""The header of a safetensors file, read by hand within bounds: names, dtypes, shapes and where the bytes lie."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from repro_golden.base.errors import ReproError

__all__ = ["BITS", "Placed", "read_header"]

BITS: dict[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""The dtypes of the format, and the bits of one element."""

_HEADER = 100_000_000
"""Bytes of a header: what the format's own reader allows."""

_DIMENSIONS = 64


class Placed(NamedTuple):
    """A tensor: dtype as written, shape, and the bytes of the file that hold it, from `start` up to `end`."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path) -> dict[str, Placed]:
    """What a safetensors file holds, by name, in the order of the bytes.

    Raises:
        ReproError: no file, cut short, or a header that does not fit together or reaches beyond the file.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            length = int.from_bytes(head, "little")
            if len(head) < 8:
                raise ReproError(f"{path} has {size} bytes, too few for safetensors: copy it again")
            if length > _HEADER or length > size - 8:
                raise ReproError(
                    f"{path} says that its header has {length} bytes, and the file has {size}: it is cut short or no "
                    "safetensors; copy it again"
                )
            raw = file.read(length)
    except (OSError, ValueError) as error:
        raise ReproError(f"{path} cannot be read: {error}") from None
    if len(raw) != length:
        raise ReproError(f"{path} became shorter while it was read: wait until it is written")
    entries = _parse(path, raw)
    placed = {name: _placed(path, name, entry, 8 + length, size) for name, entry in entries.items()}
    ordered = dict(sorted(placed.items(), key=lambda item: (item[1].start, item[1].end)))
    end, before = 0, ""
    for name, tensor in ordered.items():
        if tensor.start < end and tensor.start != tensor.end:
            raise ReproError(f"{path} keeps {name!a} in bytes of {before!a}: write it again")
        end, before = max(end, tensor.end), name
    return ordered


def _parse(path: Path, raw: bytes) -> Mapping[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            raise ReproError(f"{path} names a tensor or field twice in its header: write it again")
        return fields

    try:
        header = json.loads(raw.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ReproError(f"{path} has a header that is no JSON ({str(error)[:120]}): copy it again") from None
    if not isinstance(header, dict):
        raise ReproError(f"{path} has a header that is no object: it is no safetensors file")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def _placed(path: Path, name: str, entry: Any, base: int, size: int) -> Placed:
    known = ascii(name[:200])
    if not isinstance(entry, dict):
        raise ReproError(f"{path} says nothing of {known}: write it again")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ReproError(f"{path} has {known} in a dtype that safetensors does not have: write it again")
    if not _sizes(shape) or len(shape) > _DIMENSIONS:
        raise ReproError(f"{path} has {known} in a shape that is none: write it again")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ReproError(f"{path} does not say where {known} lies: write it again")
    if math.prod(shape) * BITS[dtype] != 8 * (offsets[1] - offsets[0]):
        raise ReproError(f"{path} has {known} with other bytes than its shape and dtype need: write it again")
    if base + offsets[1] > size:
        raise ReproError(
            f"{path} is cut short: {known} ends at byte {base + offsets[1]}, and the file has {size}; copy it again"
        )
    return Placed(dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(part) is int and 0 <= part < 1 << 62 for part in value)
