"""Where jobs run: what the CPU and the GPU have in common, and the CPU.

A job is a row of ten numbers (`JOB`). A backend splits jobs into pieces, carries them out and hands back one row of
sums for each piece; `Results` adds those of a slot, in the order in which they were given.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import os
import threading
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from repro_golden.fingerprint.kinds import luts

__all__ = ["JOB", "Backend", "Cpu", "Order", "Results", "backend_for", "split"]

JOB = ("address", "rows", "words", "stride", "first", "step", "tail", "slot", "kind", "lut")
"""Columns of a job: `plan.Span` from a memory address on, the slot it is summed into, how statistics read it."""

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
        lanes, stats = np.zeros((slots, 2), np.uint64), np.zeros((slots, 3))
        for order, base, sums, figures in runs:
            if not len(order.starts):
                continue
            sums = sums if order.pieces is None else sums[order.pieces]
            own = order.slots + base
            lanes[own] += np.add.reduceat(sums, order.starts, axis=0)
            if figures is not None:
                figures = figures if order.pieces is None else figures[order.pieces]
                stats[own, ::2] += np.add.reduceat(figures[:, ::2], order.starts, axis=0)
                stats[own, 1] = np.maximum(stats[own, 1], np.maximum.reduceat(figures[:, 1], order.starts))
        return cls(lanes, stats[:, 0].astype(np.int64), stats[:, 1], stats[:, 2], words, kept)


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


Run = tuple[Order, int, npt.NDArray[np.uint64], npt.NDArray[np.float64] | None]
"""Pieces, the slot that is their slot 0, their sums [n, 2], and their non-finite counts, absmax and squares [n, 3]."""


class Backend(Protocol):
    """One device's way of doing jobs. Everything it is given must stay as it is until it has returned."""

    device: torch.device

    def buffer(self) -> torch.Tensor:
        """uint8 [BUFFER] on the device, 16-byte aligned, used again for each copy."""

    def run(self, jobs: Table, base: int) -> None:
        """Start `jobs` [n, 10], whose slot 0 is slot `base`."""

    def gather(self, table: Table) -> None:
        """Start fetching the 1 to 8 bytes at each address of `table` [n, 2] (address, bytes)."""

    def keep(self, tensor: torch.Tensor) -> None:
        """Start fetching a tensor's row-major bytes."""

    def finish(self, slots: int) -> tuple[Callable[[], bool], Callable[[], Results]]:
        """Start the way home: whether all is there, and a call that waits for it."""


def split(jobs: Table, piece: int) -> Table:
    """The same work in jobs of at most `piece` words, each one stretch or several whole rows."""
    rows, words = jobs[:, 1], jobs[:, 2]
    if (rows * words).max(initial=0) <= piece:
        return jobs
    jobs, k = _repeat(jobs, np.where((rows > 1) & (words > piece), rows, 1))
    single = k > 0
    jobs[:, 0] += k * jobs[:, 3]
    jobs[:, 4] += k * jobs[:, 5]
    jobs[single | (jobs[:, 2] > piece), 1] = 1
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


def _repeat(jobs: Table, counts: npt.NDArray[np.int64]) -> tuple[Table, npt.NDArray[np.int64]]:
    """Each row `counts` times, and which repetition each is."""
    starts = np.cumsum(counts) - counts
    return np.repeat(jobs, counts, axis=0), np.arange(counts.sum()) - np.repeat(starts, counts)


class Cpu:
    """Every core, without the GIL; results are there when the call returns."""

    device = torch.device("cpu")
    _PIECE = 1 << 17  # words (1 MiB): the same on every machine, for statistics sum piece by piece
    _SHARED = 1 << 19  # words from which on the work is shared between threads

    def __init__(self) -> None:
        self._slots: list[npt.NDArray[np.int64]] = []
        self._sums: list[npt.NDArray[np.uint64]] = []
        self._stats: list[npt.NDArray[np.float64]] = []
        self._words: list[npt.NDArray[np.uint64]] = []
        self._kept: list[bytes] = []

    def buffer(self) -> torch.Tensor:
        """uint8 [BUFFER]; see `Backend`."""
        return _buffers().own

    def run(self, jobs: Table, base: int) -> None:
        """Carry out `jobs` [n, 10]; see `Backend`."""
        kernels = _kernels()
        jobs = split(jobs, self._PIECE)
        sums, stats, tables = np.empty((len(jobs), 2), np.uint64), np.zeros((len(jobs), 3)), luts()
        work = jobs[:, 1] * jobs[:, 2]
        threads = threads_of_this_process()
        if threads > 1 and work.sum() >= self._SHARED:
            shares = np.searchsorted(np.cumsum(work), np.linspace(0, work.sum(), threads + 1)[1:-1])
            ends = [0, *shares.tolist(), len(jobs)]
            tasks = [_pool(os.getpid()).submit(kernels.run, jobs[a:b], tables, sums[a:b], stats[a:b])
                     for a, b in itertools.pairwise(ends[1:])]  # fmt: skip
            kernels.run(jobs[: ends[1]], tables, sums[: ends[1]], stats[: ends[1]])
            for task in tasks:
                task.result()
        else:
            kernels.run(jobs, tables, sums, stats)
        self._slots.append(jobs[:, 7] + base)
        self._sums.append(sums)
        self._stats.append(stats)

    def gather(self, table: Table) -> None:
        """Fetch words; see `Backend`."""
        words = np.empty(len(table), np.uint64)
        _kernels().gather(table, words)
        self._words.append(words)

    def keep(self, tensor: torch.Tensor) -> None:
        """Fetch a tensor's bytes."""
        from repro_golden.fingerprint.tensors import content

        lazy = not tensor.is_cpu or tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous()
        size = 0 if lazy else tensor.numel() * tensor.element_size()
        self._kept.append(
            content(tensor).tobytes() if lazy else ctypes.string_at(tensor.data_ptr() if size else 0, size)
        )

    def finish(self, slots: int) -> tuple[Callable[[], bool], Callable[[], Results]]:
        """All is there already."""
        words = np.concatenate([np.empty(0, np.uint64), *self._words])
        order = Order.of(np.concatenate([np.empty(0, np.int64), *self._slots]))
        sums = np.concatenate([np.empty((0, 2), np.uint64), *self._sums])
        stats = np.concatenate([np.empty((0, 3)), *self._stats])
        results = Results.of(slots, [(order, 0, sums, stats)], words, self._kept)
        return (lambda: True), (lambda: results)


@functools.cache
def _kernels() -> ModuleType:
    """Those that numba compiles, where it is installed; a foreign program's environment may lack it."""
    try:
        return importlib.import_module("repro_golden.fingerprint._numba")
    except ImportError:
        return importlib.import_module("repro_golden.fingerprint._numpy")


def threads_of_this_process() -> int:
    """The cores this process may use, shared with the other ranks of the machine where a launcher says how many."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, cores // max(1, int(ranks) if ranks.isdigit() else 1))


@functools.cache
def _pool(pid: int) -> ThreadPoolExecutor:
    """One pool per process: threads do not survive a fork."""
    del pid
    return ThreadPoolExecutor(max(1, threads_of_this_process() - 1), thread_name_prefix="fingerprint")


class _Buffers(threading.local):
    """A buffer for each thread."""

    def __init__(self) -> None:
        self.own = torch.empty(BUFFER, dtype=torch.uint8, device="cpu")  # whatever the program's default is


@functools.cache
def _buffers() -> _Buffers:
    return _Buffers()


@functools.cache
def _gpu_ready(device: torch.device) -> bool:
    """Whether Triton works here; where it does not, one warning says why and the CPU path serves."""
    try:
        from repro_golden.fingerprint.gpu import check

        check(device)
    except Exception as error:  # noqa: BLE001 - Triton, the driver and the compiler fail in many ways
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        warnings.warn(f"fingerprints of {device} tensors are made on the CPU ({reason})", RuntimeWarning, stacklevel=2)
        return False
    return True


def backend_for(device: torch.device) -> Backend:
    """The backend that reads tensors of `device` where they lie; the CPU for those of devices without one."""
    if device.type == "cuda" and _gpu_ready(device):
        from repro_golden.fingerprint.gpu import Gpu

        return Gpu(device)
    return Cpu()
