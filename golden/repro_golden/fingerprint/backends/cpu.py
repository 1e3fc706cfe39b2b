"""The CPU's backend: every core, compiled loops, results at once."""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch

from repro_golden.fingerprint.backends import _numpy
from repro_golden.fingerprint.backends.backend import BUFFER, Order, Results, Table, split
from repro_golden.fingerprint.distributed import local_of
from repro_golden.fingerprint.in_flight import settle
from repro_golden.fingerprint.kinds import luts
from repro_golden.fingerprint.views import carried

__all__ = ["Cpu", "content", "threads_of_this_process"]


# -- one tensor's content: its bytes in row-major order


def content(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """A tensor's row-major bytes [nbytes], without a copy where it is contiguous on the CPU."""
    if type(tensor) is not torch.Tensor:
        tensor, _ = local_of(tensor)
    settle((tensor,))
    tensor = carried(tensor.detach()).resolve_conj().resolve_neg().to("cpu").contiguous().reshape(-1)
    if not tensor.numel():
        return np.empty(0, np.uint8)
    if tensor.numel() == 1:  # torch calls any stride of one element contiguous, and view() does not
        tensor = tensor.as_strided((1,), (1,))
    return tensor.view(torch.uint8).numpy()


# -- the CPU's backend: every core, compiled loops, results at once


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
        """Carry out `jobs` [n, 12]; see `Backend`."""
        total = int(np.dot(jobs[:, 1], jobs[:, 2]))
        kernels = _loops.run(jobs, total)
        if total > self._PIECE:  # else no job is of more
            jobs = split(jobs, self._PIECE)
        sums, stats, tables = np.empty((len(jobs), 2), np.uint64), np.zeros((len(jobs), 3)), luts()
        if total >= self._SHARED and (threads := threads_of_this_process()) > 1:
            work = jobs[:, 1] * jobs[:, 2]
            shares = np.searchsorted(np.cumsum(work), np.linspace(0, total, threads + 1)[1:-1])
            bounds = [0, *shares.tolist(), len(jobs)]
            tasks = [_started(kernels.run, jobs[a:b], tables, sums[a:b], stats[a:b])
                     for a, b in itertools.pairwise(bounds[1:])]  # fmt: skip
            kernels.run(jobs[: bounds[1]], tables, sums[: bounds[1]], stats[: bounds[1]])
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
        _loops.gather(table).gather(table, words)
        self._words.append(words)

    def keep(self, tensor: torch.Tensor) -> None:
        """Fetch a tensor's bytes."""
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
        figures = stats[:, 0].astype(np.int64), stats[:, 1], stats[:, 2]
        results = Results.of(slots, [(order, 0, sums, figures)], words, self._kept)
        return (lambda: True), (lambda: results)


class _Loops:
    """NumPy's loops as long as there is little to read, numba's from then on; both give the same bits.

    A program of a few small steps is read sooner than numba is loaded. Which of them reads is decided by what was asked
    for, never by a clock.
    """

    # what NumPy's work is reckoned at, and after how much of it numba is loaded: for a row, a word of it, one fetched
    _ROW, _WORD, _FETCHED, _ENOUGH = 3e-5, 1e-7, 2e-6, 0.3

    def __init__(self) -> None:
        self._spent = 0.0

    def run(self, jobs: Table, total: int) -> ModuleType:
        """What carries out jobs of so many words."""
        return self._for(self._ROW * int(jobs[:, 1].sum()) + self._WORD * total)

    def gather(self, table: Table) -> ModuleType:
        """What fetches words."""
        return self._for(self._FETCHED * len(table))

    def _for(self, seconds: float) -> ModuleType:
        self._spent += seconds
        return _numpy if self._spent < self._ENOUGH else _compiled()


_loops = _Loops()


@functools.cache
def _compiled() -> ModuleType:
    """Those that numba compiles, where it is installed; a foreign program's environment may lack it."""
    try:
        return importlib.import_module("repro_golden.fingerprint.backends._numba")
    except ImportError:
        return _numpy


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


def _started(work: Callable[..., None], *given: object) -> Future[None]:
    """Work that another thread does; done at once where Python is ending, when no pool takes any more."""
    try:
        return _pool(os.getpid()).submit(work, *given)
    except RuntimeError:
        work(*given)
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _Buffers(threading.local):
    """A buffer for each thread."""

    def __init__(self) -> None:
        self.own = torch.empty(BUFFER, dtype=torch.uint8, device="cpu")  # whatever the program's default is


@functools.cache
def _buffers() -> _Buffers:
    return _Buffers()
