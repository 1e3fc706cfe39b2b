"""A signal's whole content, put together from the pieces of all that hold some.

Who puts it together needs no torch.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from repro_golden.base.canonical import write_atomic
from repro_golden.trace import dump_path

__all__ = ["At", "Piece", "assemble", "box", "keep_piece", "keep_whole", "put_together"]

At = tuple[int, str, str]
"""Step, phase and name of a signal."""

PIECES = "pieces"
"""The folder of pieces among the raw records of ranks."""


class Piece(NamedTuple):
    """A box of elements of a canonical tensor (`placement.Part`), with its bytes in row-major order."""

    shape: tuple[int, ...]
    size: tuple[int, ...]
    at: int
    to: tuple[int, ...]
    raw: bytes


def box(
    raw: npt.NDArray[np.uint8], item: int, start: int, size: Sequence[int], step: Sequence[int]
) -> npt.NDArray[np.uint8]:
    """A box of elements of `item` bytes as a view of row-major bytes: uint8 [*size, item]."""
    steps = (*(s * item for s in step), 1)
    return np.lib.stride_tricks.as_strided(raw[start * item :], (*size, item), steps)


def put_together(pieces: Iterable[Piece]) -> bytes | None:
    """The row-major bytes of a canonical tensor; None where an element is missing. Of replicas the last one counts."""
    out: npt.NDArray[np.uint8] | None = None
    for piece in pieces:
        item = len(piece.raw) // math.prod(piece.size)
        if out is None:
            out = np.zeros(math.prod(piece.shape) * item, np.uint8)
            there = np.zeros(math.prod(piece.shape), np.uint8)
        values = np.frombuffer(piece.raw, np.uint8).reshape(*piece.size, item)
        box(out, item, piece.at, piece.size, piece.to)[...] = values
        box(there, 1, piece.at, piece.size, piece.to)[...] = 1
    return None if out is None or not there.all() else out.tobytes()


def keep_whole(trace: Path) -> Callable[[At, list[Piece]], None]:
    """Writes a signal that one tensor holds all of to the dumps of a trace; one that lies in several is left out."""

    def keep(at: At, pieces: list[Piece]) -> None:
        if (raw := put_together(pieces)) is not None:
            path = dump_path(trace, *at)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(raw)

    return keep


def keep_piece(folder: Path, rank: int) -> Callable[[At, list[Piece]], None]:
    """Writes what this rank holds of a signal among the raw records, for `assemble`."""
    number = itertools.count()

    def keep(at: At, pieces: list[Piece]) -> None:
        (folder / PIECES).mkdir(exist_ok=True)
        head = {"at": at, "pieces": [[p.shape, p.size, p.at, p.to, len(p.raw)] for p in pieces]}
        name = f"{rank:05d}-{next(number):05d}-{quote(at[2], safe='')[:80]}"
        write_atomic(folder / PIECES / name, json.dumps(head).encode() + b"\n" + b"".join(p.raw for p in pieces))

    return keep


def assemble(folder: Path, trace: Path) -> None:
    """Put the pieces that all ranks wrote below `folder` together, as the dumps of a trace."""
    by_signal: dict[At, list[Path]] = {}
    for path in sorted((folder / PIECES).glob("*")):
        with path.open("rb") as file:
            at = json.loads(file.readline())["at"]
        by_signal.setdefault((at[0], at[1], at[2]), []).append(path)
    keep = keep_whole(trace)
    for at, paths in by_signal.items():
        keep(at, [piece for path in reversed(paths) for piece in _read(path)])  # where ranks differ, the first counts


def _read(path: Path) -> Iterator[Piece]:
    with path.open("rb") as file:
        for shape, size, at, to, length in json.loads(file.readline())["pieces"]:
            yield Piece(tuple(shape), tuple(size), at, tuple(to), file.read(length))
