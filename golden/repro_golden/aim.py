"""Changing or writing out one signal as it passes, under its canonical name.

A canonical tensor may lie in several local ones, on several ranks, and a local one may hold parts of several. The
planted change is made to its first element, by whoever holds that: one owner, or all replicas alike, so that replicas
do not part. Its whole content is put together from the pieces of all that hold some.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import torch

from repro_golden.canonical import write_atomic
from repro_golden.fingerprint import content
from repro_golden.fingerprint.distributed import local_of
from repro_golden.fingerprint.placement import Part, read, whole
from repro_golden.plant import plant_one_ulp
from repro_golden.trace import dump_path

__all__ = ["Aim", "At", "Piece", "assemble", "keep_piece", "keep_whole", "put_together"]

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


class Aim:
    """Plants a change of one ULP in one signal, and writes others out.

    Args:
        plant: ``[step, phase, name]`` of the signal to change before it is fingerprinted.
        dump: ``[step, phase, name]`` of the signals whose whole content is wanted.
        keep: Takes the pieces of such a signal that one tensor holds.
        rank: Of this process, where there are several: ``NAME@RANK`` means the signal of that rank alone.
    """

    def __init__(
        self,
        plant: Sequence[Any] | None,
        dump: Iterable[Sequence[Any]],
        keep: Callable[[At, list[Piece]], None],
        rank: int | None = None,
    ) -> None:
        self._plant = None if plant is None else tuple(plant)
        self._dump = {tuple(wanted) for wanted in dump}
        self._keep, self._rank = keep, rank
        self._steps = {at[0] for at in self._dump} | ({self._plant[0]} if self._plant else set())

    def take(self, step: int, phase: str, name: str, value: object, placement: Any = None) -> None:
        """Look at what is observed; arguments as `Signals.take` has them."""
        if step not in self._steps:
            return
        group = value if isinstance(value, Mapping) else {"": value}
        where = placement if isinstance(value, Mapping) else {"": placement}
        for key, tensor in group.items():
            if isinstance(tensor, torch.Tensor):
                self._look(step, phase, name + key, tensor, where and where.get(key))

    def _look(self, step: int, phase: str, name: str, tensor: torch.Tensor, placement: Any) -> None:
        local, own = local_of(tensor)
        placed = own or whole("", tuple(local.shape)) if placement is None else read(placement)
        by_name = itertools.groupby(sorted(placed.parts, key=lambda part: part.name), lambda part: part.name or name)
        for canonical, parts in ((found, list(group)) for found, group in by_name):
            every = [(step, phase, canonical)]
            every += [] if self._rank is None else [(step, phase, f"{canonical}@{self._rank}")]
            if self._plant in every:
                _plant(local, parts)
            for at in every:
                if at in self._dump:
                    self._keep(at, list(_pieces(local, parts)))


def _plant(local: torch.Tensor, parts: Iterable[Part]) -> None:
    for part in parts:
        if part.elements and part.at == 0:
            index = np.unravel_index(part.start, tuple(local.shape)) if local.ndim else ()
            plant_one_ulp(local[tuple(int(i) for i in index)])
            return


def _pieces(local: torch.Tensor, parts: Iterable[Part]) -> Iterator[Piece]:
    raw = content(local)
    for part in parts:
        if part.elements:
            held = _box(raw, raw.nbytes // local.numel(), part.start, part.size, part.step)
            yield Piece(part.shape, part.size, part.at, part.to, held.tobytes())


def _box(
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
        _box(out, item, piece.at, piece.size, piece.to)[...] = values
        _box(there, 1, piece.at, piece.size, piece.to)[...] = 1
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
    found: dict[At, list[Path]] = {}
    for path in sorted((folder / PIECES).glob("*")):
        with path.open("rb") as file:
            at = json.loads(file.readline())["at"]
        found.setdefault((at[0], at[1], at[2]), []).append(path)
    keep = keep_whole(trace)
    for at, paths in found.items():
        keep(at, [piece for path in reversed(paths) for piece in _read(path)])  # where ranks differ, the first counts


def _read(path: Path) -> Iterator[Piece]:
    with path.open("rb") as file:
        for shape, size, at, to, length in json.loads(file.readline())["pieces"]:
            yield Piece(tuple(shape), tuple(size), at, tuple(to), file.read(length))
