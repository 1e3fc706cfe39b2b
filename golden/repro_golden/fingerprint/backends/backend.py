"""Where jobs run: what the CPU and the GPU have in common.

A job is a row of twelve numbers (`JOB`). A backend splits jobs into pieces, carries them out and hands back one row of
sums for each piece; `Results` adds those of a slot, in the order in which they were given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["BUFFER", "JOB", "Backend", "Order", "Results", "Run", "Table", "split"]

JOB = ("address", "rows", "words", "stride", "first", "step", "tail", "slot", "kind", "lut", "item", "pitch")
"""Columns of a job: `plan.Span` from a memory address on, the slot it is summed into, how statistics read it."""
_ACROSS = 64  # rows of a scattered piece, or more: they may be neighbours in memory where a row's elements are not

_Number = TypeVar("_Number", bound=np.number)
Table = npt.NDArray[np.int64]
BUFFER = 16 << 20
"""Bytes of the buffer through which tensors pass that must be copied together."""


@dataclass(frozen=True)
class Results:
    """What came home, by slot.

    Attributes:
        lanes: uint64 [slots, 2].
        nonfinite: int64 [slots].
        absmax: float64 [slots].
        squares: float64 [slots], sums of squares.
        words: uint64, what was gathered, in the order it was asked for.
        kept: The bytes of each tensor that was kept.
    """

    lanes: npt.NDArray[np.uint64]
    nonfinite: npt.NDArray[np.int64]
    absmax: npt.NDArray[np.float64]
    squares: npt.NDArray[np.float64]
    words: npt.NDArray[np.uint64]
    kept: list[bytes]

    @classmethod
    def of(cls, slots: int, runs: Iterable[Run], words: npt.NDArray[np.uint64], kept: list[bytes]) -> Results:
        """Add up the pieces of each run."""
        runs = list(runs)
        if len(runs) == 1 and runs[0][3] is None and len(runs[0][0].starts) == slots and runs[0][0].pieces is None:
            nothing = np.zeros(slots)  # the shortest way for lanes alone: every slot has a piece, in its place
            lanes = np.add.reduceat(runs[0][2], runs[0][0].starts, axis=0)
            return cls(lanes, nothing.astype(np.int64), nothing, nothing, words, kept)
        lanes, nonfinite = np.zeros((slots, 2), np.uint64), np.zeros(slots, np.int64)
        absmax, squares = np.zeros(slots), np.zeros(slots)
        for order, base, sums, figures in runs:
            if not len(order.starts):
                continue
            indices = order.slots + base
            lanes[indices] += np.add.reduceat(order.taken(sums), order.starts, axis=0)
            if figures is not None:
                bad, top, square = map(order.taken, figures)
                nonfinite[indices] += np.add.reduceat(bad, order.starts)
                absmax[indices] = np.maximum(absmax[indices], np.maximum.reduceat(top, order.starts))
                squares[indices] += np.add.reduceat(square, order.starts)
        return cls(lanes, nonfinite, absmax, squares, words, kept)


class Order(NamedTuple):
    """Which pieces belong to which slot: those from each of `starts` to the next, of all pieces taken in this order."""

    pieces: npt.NDArray[np.int64] | None
    starts: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]

    @classmethod
    def of(cls, slots: npt.NDArray[np.int64]) -> Order:
        """The order of pieces that belong to `slots` [n]."""
        steps = np.diff(slots)
        pieces = np.argsort(slots, kind="stable") if np.any(steps < 0) else None
        if pieces is not None:
            slots = slots[pieces]
            steps = np.diff(slots)
        starts = np.flatnonzero(np.concatenate([[1], steps])) if len(slots) else np.empty(0, np.int64)
        return cls(pieces, starts, slots[starts])

    def taken(self, figures: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
        """Figures of the pieces, [n, ...], in this order."""
        return figures if self.pieces is None else figures[self.pieces]


Figures = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.float64]]
"""Of pieces their non-finite counts, absmax and squares, [n] each."""
Run = tuple[Order, int, npt.NDArray[np.uint64], Figures | None]
"""Pieces, the slot that is their slot 0, their sums [n, 2], and their figures."""


class Backend(Protocol):
    """One device's way of doing jobs. Everything it is given must stay as it is until it has returned."""

    device: torch.device

    def buffer(self) -> torch.Tensor:
        """uint8 [BUFFER] on the device, 16-byte aligned, used again for each copy."""

    def run(self, jobs: Table, base: int) -> None:
        """Start `jobs` [n, 12], whose slot 0 is slot `base`."""

    def gather(self, table: Table) -> None:
        """Start fetching the 1 to 8 bytes at each address of `table` [n, 2] (address, bytes)."""

    def keep(self, tensor: torch.Tensor) -> None:
        """Start fetching a tensor's row-major bytes."""

    def finish(self, slots: int) -> tuple[Callable[[], bool], Callable[[], Results]]:
        """Start the way home: whether all is there, and a call that waits for it."""


def split(jobs: Table, piece: int, row: int | None = None) -> Table:
    """The same work in jobs of at most `piece` words, each one stretch or several whole rows of up to `row` words."""
    rows, words = jobs[:, 1], jobs[:, 2]
    if (rows * words).max(initial=0) <= piece:
        return jobs
    if np.any(jobs[:, 10]):
        jobs = _narrow(jobs, np.maximum(1, piece // np.minimum(rows, _ACROSS)))
        rows, words = jobs[:, 1], jobs[:, 2]
    jobs, k = _repeat(jobs, np.where((rows > 1) & (words > (row or piece)), rows, 1))
    single = k > 0
    jobs[:, 0] += k * jobs[:, 3]
    jobs[:, 4] += k * jobs[:, 5]
    jobs[single | (jobs[:, 2] > (row or piece)), 1] = 1
    rows, words = jobs[:, 1].copy(), jobs[:, 2].copy()
    several = rows > 1
    height = np.where(several, np.maximum(1, piece // np.maximum(words, 1)), 1)
    counts = np.where(several, -(-rows // height), np.maximum(1, -(-words // piece)))
    jobs, k = _repeat(jobs, counts)
    rows, words, several, height = (np.repeat(v, counts) for v in (rows, words, several, height))
    jobs[:, 0] += np.where(several, k * height * jobs[:, 3], k * piece * 8)
    jobs[:, 4] += np.where(several, k * height * jobs[:, 5], k * piece)
    jobs[:, 1] = np.where(several, np.minimum(height, rows - k * height), 1)
    jobs[:, 2] = np.where(several, words, np.minimum(piece, words - k * piece))
    jobs[:, 6] = np.where(several | (k == np.repeat(counts, counts) - 1), jobs[:, 6], 0)
    return jobs


def _narrow(jobs: Table, most: npt.NDArray[np.int64]) -> Table:
    """The same work with at most so many words, [n], in the rows of each scattered job."""
    most = np.where(jobs[:, 10] > 0, most, np.maximum(1, jobs[:, 2]))
    counts = np.maximum(1, -(-jobs[:, 2] // most))
    jobs, k = _repeat(jobs, counts)
    before = k * np.repeat(most, counts)
    jobs[:, 0] += before * (8 // np.maximum(1, jobs[:, 10])) * jobs[:, 11]
    jobs[:, 4] += before
    jobs[:, 2] = np.minimum(np.repeat(most, counts), jobs[:, 2] - before)
    return jobs


def _repeat(jobs: Table, counts: npt.NDArray[np.int64]) -> tuple[Table, npt.NDArray[np.int64]]:
    """Each row `counts` times, and which repetition each is."""
    starts = np.cumsum(counts) - counts
    return np.repeat(jobs, counts, axis=0), np.arange(counts.sum()) - np.repeat(starts, counts)
