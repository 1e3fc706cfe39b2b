"""What `_numba` does, in NumPy: the same bits, more slowly, without the time that compiled code takes to be loaded.

For little work, and where a foreign program's environment lacks numba. Where a program has its subnormal numbers
flushed to zero (`torch.set_flush_denormal`), the largest magnitude and the norm of float16 have them here and not
there; the fingerprint itself has every bit in both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from repro_golden.fingerprint.definition import MASK, reference
from repro_golden.fingerprint.kinds import BF16, BYTES, F16, F32, F64, I16, I32, I64, U16, U32, U64

__all__ = ["gather", "run"]

Table = npt.NDArray[np.int64]
Figures = tuple[int, float, float]
"""Non-finite count, largest finite magnitude and sum of squares of the finite values."""

_DTYPES = {F32: "<f4", F16: "<f2", F64: "<f8", I16: "<i2", I32: "<i4", I64: "<i8", U16: "<u2", U32: "<u4", U64: "<u8"}
_WIDTH, _NEAR, _LINE = 8, 4096, 64
"""As in `_numba`: they decide the order in which squares are summed."""


def run(
    jobs: Table, luts: npt.NDArray[np.float64], sums: npt.NDArray[np.uint64], stats: npt.NDArray[np.float64]
) -> None:
    """See `_numba.run`."""
    for k, (address, rows, words, stride, first, step, tail, _, kind, lut, item, pitch) in enumerate(jobs.tolist()):
        a = b = 0
        bad, top, squares = 0, 0.0, 0.0
        size, content = words * 8 + tail, b""
        if item:
            content = _collected(address, (rows, size // item, item), (stride, pitch, 1))
            for near in _scattered(content, rows, words, across=rows > 1 and stride < pitch) if kind else ():
                bad, top, squares = _added((bad, top, squares), _measure(near, kind, luts[lut]))
            if step == words:  # all in a row
                rows, size = 1, len(content)
        for row in range(rows):
            raw = content[row * size :][:size] if item else ctypes.string_at(address + row * stride, size)
            lanes = reference(raw, first + row * step)
            a, b = (a + lanes.a) & MASK, (b + lanes.b) & MASK
            for near in _pieces(raw) if kind and not item else ():
                bad, top, squares = _added((bad, top, squares), _measure(near, kind, luts[lut]))
        sums[k] = a, b
        if kind:
            stats[k] = bad, top, squares


def _added(total: Figures, more: Figures) -> Figures:
    return total[0] + more[0], max(total[1], more[1]), total[2] + more[2]


def _pieces(raw: bytes) -> Iterator[bytes]:
    """A row as it is measured: so many words at a time, and what is left of the last one with them."""
    starts = [*range(0, max(len(raw) // 8, 1), _NEAR)]
    for at in starts:
        yield raw[at * 8 :] if at == starts[-1] else raw[at * 8 : (at + _NEAR) * 8]


def _scattered(content: bytes, rows: int, words: int, *, across: bool) -> Iterator[bytes]:
    """Rows of scattered elements as they are measured: what lies close together in memory, a cacheful at a time."""
    table, wide = np.frombuffer(content, "<u8").reshape(rows, words), _NEAR
    if across:
        table, wide = table.T, _LINE
    for left in range(0, table.shape[1], wide):
        width = min(wide, table.shape[1] - left)
        for up in range(0, len(table), _NEAR // width):
            yield table[up : up + _NEAR // width, left : left + width].tobytes()


def _collected(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """The bytes of a scattered box in memory."""
    size = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    memory = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
    return np.ndarray(shape, np.uint8, memory, strides=strides).tobytes()


def gather(table: Table, out: npt.NDArray[np.uint64]) -> None:
    """See `_numba.gather`."""
    for k, (address, size) in enumerate(table.tolist()):
        out[k] = int.from_bytes(ctypes.string_at(address, size), "little")


def _measure(raw: bytes, kind: int, lut: npt.NDArray[np.float64]) -> Figures:
    if not raw:
        return 0, 0.0, 0.0
    if kind == BYTES:
        return _look_up(raw, lut)
    with np.errstate(all="ignore"):  # NaN is expected, and warnings are the program's own
        if kind == BF16:
            values = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        else:
            values = np.frombuffer(raw, _DTYPES[kind]).astype(np.float64)
        magnitudes = np.abs(values)
        finite = magnitudes < np.inf  # False for NaN
        magnitudes[~finite] = 0.0
        squares = np.zeros((-(-len(values) // _WIDTH), _WIDTH))
        squares.reshape(-1)[: len(values)] = magnitudes * magnitudes
        parts = np.add.accumulate(squares)[-1]  # one after the other, which `sum` does not promise
        while len(parts) > 1:
            parts = parts[::2] + parts[1::2]
    return len(values) - int(finite.sum()), float(magnitudes.max()), float(parts[0])


def _look_up(raw: bytes, lut: npt.NDArray[np.float64]) -> Figures:
    counts = np.bincount(np.frombuffer(raw, np.uint8), minlength=256)
    finite = lut[:, 0] < np.inf
    there = finite & (counts > 0)
    squares = np.add.accumulate([0.0, *(lut[there, 1] * counts[there])])[-1]
    return int(counts[~finite].sum()), float(lut[there, 0].max(initial=0.0)), float(squares)
