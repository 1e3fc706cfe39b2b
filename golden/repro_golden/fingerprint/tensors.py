"""Tensors to content: the bytes that a fingerprint stands for, and the figures a trace keeps beside it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from repro_golden.fingerprint import _numba
from repro_golden.fingerprint.definition import MASK, Lanes, bind

__all__ = ["SKETCH", "Scan", "content", "dtype_name", "fingerprint", "scan"]

SKETCH = 16
"""How many raw values of a tensor its trace row keeps."""


@dataclass(slots=True)
class Scan:
    """What one pass over a tensor yields.

    Attributes:
        lanes: The additive sums of its content.
        nonfinite: Elements that are NaN or infinite.
        absmax: Largest finite magnitude; 0 when there is none.
        l2: Root of the sum of squares of the finite values, in fp64.
        sketch: Raw bytes of the values at `sketch_positions`.
    """

    lanes: Lanes
    nonfinite: int
    absmax: float
    l2: float
    sketch: bytes


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name without its prefix: ``float32``, ``bfloat16``, ``float8_e4m3fn``."""
    return str(dtype).removeprefix("torch.")


def content(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """A tensor's row-major bytes [nbytes], without a copy where it is contiguous on the CPU."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    tensor = tensor.to("cpu").contiguous().reshape(-1)
    if tensor.numel() == 1:  # torch calls any stride of one element contiguous, and view() does not
        tensor = tensor.as_strided((1,), (1,))
    if tensor.dtype in _NUMPY_DTYPES:
        return tensor.numpy().view(np.uint8)
    if tensor.dtype == torch.bool:
        return tensor.view(torch.uint8).numpy()
    return tensor.view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)


_NUMPY_DTYPES = {torch.float32, torch.float64, torch.int64, torch.int32}  # the common ones take the shortest way


def scan(tensor: torch.Tensor) -> Scan:
    """Fingerprint lanes, statistics and sketch of one tensor of any dtype, shape and strides."""
    count = tensor.numel()
    if tensor.dtype is torch.float32 and count > 1 and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg():
        values = tensor.detach().numpy().reshape(-1)
        if not (count % 2 or tensor.data_ptr() % 8):
            a, b, bad, top, l2 = _numba.scan_f32(values.view(np.uint64), values)
            return Scan(Lanes(int(a), int(b)), bad, top, l2, values.take(_positions(count)).tobytes())
    raw = content(tensor)
    bad, top, l2 = _statistics(tensor, raw)
    sketch = raw.reshape(-1, tensor.element_size())[_positions(count)].tobytes() if count else b""
    return Scan(_lanes(raw), bad, top, l2, sketch)


def fingerprint(tensor: torch.Tensor) -> str:
    """128 bits, as 32 hex digits, that stand for content, dtype and shape of one tensor."""
    return bind(_lanes(content(tensor)), dtype_name(tensor.dtype), tensor.shape)


_NO_WORDS = np.empty(0, np.uint64)


def _lanes(raw: npt.NDArray[np.uint8]) -> Lanes:
    whole = raw.size & ~7
    head = raw[:whole]
    if raw.ctypes.data & 7:  # numba compiles another, slower loop for unaligned words
        head = head.copy()
    a, b = _numba.lanes(head.view(np.uint64), 0)
    a, b = int(a), int(b)
    if whole != raw.size:
        last = np.zeros(8, np.uint8)
        last[: raw.size - whole] = raw[whole:]
        c, d = _numba.lanes(last.view(np.uint64), whole // 8)
        a, b = (a + int(c)) & MASK, (b + int(d)) & MASK
    return Lanes(a, b)


def _statistics(tensor: torch.Tensor, raw: npt.NDArray[np.uint8]) -> tuple[int, float, float]:
    if raw.ctypes.data % 8:
        raw = raw.copy()
    if tensor.dtype == torch.float32:
        return _numba.scan_f32(_NO_WORDS, raw.view(np.float32))[2:]
    if tensor.dtype == torch.bfloat16:
        return _numba.stats_bf16(raw.view(np.uint16))
    if tensor.dtype == torch.float64:
        return _numba.stats_f64(raw.view(np.float64))
    wide = tensor.detach().to("cpu")
    if tensor.is_complex():
        wide = torch.view_as_real(wide.to(torch.complex128).resolve_conj())
    return _numba.stats_f64(wide.to(torch.float64).contiguous().reshape(-1).numpy())


@functools.lru_cache(maxsize=4096)
def _positions(count: int) -> npt.NDArray[np.int64]:
    return sketch_positions(count)


def sketch_positions(count: int) -> npt.NDArray[np.int64]:
    """Which elements of a tensor of `count` elements its sketch holds: the same for every run, spread by splitmix64."""
    if count <= SKETCH:
        return np.arange(count, dtype=np.int64)
    j = np.arange(1, SKETCH + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    j = (j ^ (j >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    j = (j ^ (j >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.sort((j ^ (j >> np.uint64(31))) % np.uint64(count)).astype(np.int64)
