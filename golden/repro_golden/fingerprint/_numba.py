"""psum128 and the statistics of a trace on the CPU, compiled by numba and cached on disk."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from repro_golden.fingerprint.definition import C1, C2, C3

__all__ = ["lanes", "scan_f32", "stats_bf16", "stats_f64"]

_C1, _C2, _C3 = np.uint64(C1), np.uint64(C2), np.uint64(C3)
_S29, _S31, _S32, _ONE = np.uint64(29), np.uint64(31), np.uint64(32), np.uint64(1)
Words = npt.NDArray[np.uint64]


@numba.njit(nogil=True, cache=True)
def lanes(words: Words, first_word: int) -> tuple[Any, Any]:
    """Both lanes of `words` [n] whose first word has the global index `first_word`."""
    a = np.uint64(0)
    b = np.uint64(0)
    key = (np.uint64(first_word) + _ONE) * _C1
    for i in range(words.size):
        z = words[i] ^ key
        key += _C1  # a running key saves one multiplication a word
        z = (z ^ (z >> _S32)) * _C2
        z = (z ^ (z >> _S29)) * _C3
        y = (z ^ (z >> _S31)) * _C1
        a += z ^ (z >> _S32)
        b += y ^ (y >> _S32)
    return a, b


# Statistics describe a signal to people; equality never rests on them. Sums run in fp64 over a fixed number
# of accumulators: one order on every machine.


@numba.njit(nogil=True, cache=True)
def stats_f64(x: npt.NDArray[np.float64]) -> tuple[int, float, float]:
    """Non-finite count, largest finite magnitude, l2 over the finite values of `x` [n]."""
    bad = 0
    top = 0.0
    sums = np.zeros(8)
    for i in range(x.size):
        v = abs(np.float64(x[i]))
        if v < np.inf:  # False for NaN and both infinities
            top = max(top, v)
            sums[i & 7] += v * v
        else:
            bad += 1
    return bad, top, np.sqrt(sums.sum())


@numba.njit(nogil=True, cache=True)
def scan_f32(words: Words, x: npt.NDArray[np.float32]) -> tuple[Any, Any, int, float, float]:
    """Lanes of `words` and statistics of `x` [n], the same fp32 memory, in one call: most tensors are small."""
    a, b = lanes(words, 0)
    bad = 0
    top = np.float32(0)
    s0 = s1 = s2 = s3 = 0.0
    whole = x.size & ~3
    for i in range(0, whole, 4):
        v0, v1, v2, v3 = abs(x[i]), abs(x[i + 1]), abs(x[i + 2]), abs(x[i + 3])
        f0, f1, f2, f3 = v0 < np.inf, v1 < np.inf, v2 < np.inf, v3 < np.inf  # False for NaN and both infinities
        bad += 4 - (f0 + f1 + f2 + f3)
        v0, v1 = v0 if f0 else np.float32(0), v1 if f1 else np.float32(0)
        v2, v3 = v2 if f2 else np.float32(0), v3 if f3 else np.float32(0)
        top = max(top, max(max(v0, v1), max(v2, v3)))
        s0 += np.float64(v0) * np.float64(v0)
        s1 += np.float64(v1) * np.float64(v1)
        s2 += np.float64(v2) * np.float64(v2)
        s3 += np.float64(v3) * np.float64(v3)
    for i in range(whole, x.size):
        v = abs(x[i])
        if v < np.inf:
            top = max(top, v)
            s0 += np.float64(v) * np.float64(v)
        else:
            bad += 1
    return a, b, bad, np.float64(top), np.sqrt((s0 + s1) + (s2 + s3))


@numba.njit(nogil=True, cache=True)
def stats_bf16(bits: npt.NDArray[np.uint16]) -> tuple[int, float, float]:
    """As `stats_f64`, for the raw bits of bf16 (the upper half of an fp32)."""
    bad = 0
    top = np.float32(0)
    sums = np.zeros(8)
    word = np.zeros(1, np.uint32)
    value = word.view(np.float32)
    for i in range(bits.size):
        word[0] = np.uint32(bits[i] & np.uint16(0x7FFF)) << np.uint32(16)
        v = value[0]
        if v < np.inf:
            top = max(top, v)
            sums[i & 7] += np.float64(v) * np.float64(v)
        else:
            bad += 1
    return bad, np.float64(top), np.sqrt(sums.sum())
