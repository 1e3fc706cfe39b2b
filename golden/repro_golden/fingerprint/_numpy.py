"""What `_numba` does, in NumPy: the same lanes, more slowly, where a foreign program's environment lacks numba."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from repro_golden.fingerprint.definition import MASK, reference
from repro_golden.fingerprint.kinds import BF16, BYTES, F16, F32, F64, I16, I32, I64, U16, U32, U64

__all__ = ["gather", "run"]

Table = npt.NDArray[np.int64]

_DTYPES = {F32: "<f4", F16: "<f2", F64: "<f8", I16: "<i2", I32: "<i4", I64: "<i8", U16: "<u2", U32: "<u4", U64: "<u8"}


def run(
    jobs: Table, luts: npt.NDArray[np.float64], sums: npt.NDArray[np.uint64], stats: npt.NDArray[np.float64]
) -> None:
    """See `_numba.run`."""
    for k, (address, rows, words, stride, first, step, tail, _, kind, lut, item, pitch) in enumerate(jobs.tolist()):
        a = b = 0
        size, content = words * 8 + tail, b""
        if item:
            content = _collected(address, (rows, size // item, item), (stride, pitch, 1))
            if step == words:  # all in a row
                rows, size = 1, len(content)
        for row in range(rows):
            raw = content[row * size :][:size] if item else ctypes.string_at(address + row * stride, size)
            lanes = reference(raw, first + row * step)
            a, b = (a + lanes.a) & MASK, (b + lanes.b) & MASK
            if kind:
                bad, top, squares = _measure(raw, kind, luts[lut])
                stats[k] = stats[k, 0] + bad, max(stats[k, 1], top), stats[k, 2] + squares
        sums[k] = a, b


def _collected(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """The bytes of a scattered box in memory."""
    size = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    memory = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
    return np.ndarray(shape, np.uint8, memory, strides=strides).tobytes()


def gather(table: Table, out: npt.NDArray[np.uint64]) -> None:
    """See `_numba.gather`."""
    for k, (address, size) in enumerate(table.tolist()):
        out[k] = int.from_bytes(ctypes.string_at(address, size), "little")


def _measure(raw: bytes, kind: int, lut: npt.NDArray[np.float64]) -> tuple[int, float, float]:
    """Non-finite count, largest finite magnitude and sum of squares of the finite values in `raw`."""
    with np.errstate(all="ignore"):  # NaN is expected, and warnings are the program's own
        return _measured(raw, kind, lut)


def _measured(raw: bytes, kind: int, lut: npt.NDArray[np.float64]) -> tuple[int, float, float]:
    if kind == BYTES:
        counts = np.bincount(np.frombuffer(raw, np.uint8), minlength=256)
        finite = lut[:, 0] < np.inf
        there = finite & (counts > 0)
        squares = float(np.dot(lut[there, 1], counts[there]))
        return int(counts[~finite].sum()), float(lut[there, 0].max(initial=0.0)), squares
    if kind == BF16:
        values = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    else:
        values = np.frombuffer(raw, _DTYPES[kind]).astype(np.float64)
    magnitudes = np.abs(values)
    bounded = magnitudes[magnitudes < np.inf]  # False for NaN
    return len(values) - len(bounded), float(bounded.max(initial=0.0)), float(np.dot(bounded, bounded))
