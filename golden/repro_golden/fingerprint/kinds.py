"""How the statistics read a dtype: which numbers its bytes are."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = [
    "BF16",
    "BYTES",
    "F16",
    "F32",
    "F64",
    "I16",
    "I32",
    "I64",
    "NONE",
    "NUMBERS",
    "PLAIN_TENSORS",
    "U16",
    "U32",
    "U64",
    "WIDTHS",
    "dtype_name",
    "kind_of",
    "lut",
    "luts",
]

NONE, F32, BF16, F16, F64, BYTES, I16, U16, I32, U32, I64, U64 = range(12)
"""No statistics; floating-point formats; one byte looked up in a table; integers. Complex numbers are their parts."""

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
"""Types whose tensors are memory with a shape, and no more, where they are strided."""
NUMBERS = {
    F32: torch.float32, BF16: torch.bfloat16, F16: torch.float16, F64: torch.float64, BYTES: torch.uint8,
    I16: torch.int16, U16: torch.uint16, I32: torch.int32, U32: torch.uint32, I64: torch.int64, U64: torch.uint64,
}  # fmt: skip
"""The dtype of one number."""

WIDTHS = {kind: dtype.itemsize for kind, dtype in NUMBERS.items()}
"""Bytes of one number."""

_KINDS = {
    torch.float32: F32, torch.complex64: F32, torch.bfloat16: BF16, torch.float16: F16, torch.complex32: F16,
    torch.float64: F64, torch.complex128: F64, torch.int16: I16, torch.uint16: U16, torch.bits16: U16,
    torch.int32: I32, torch.uint32: U32, torch.int64: I64, torch.uint64: U64,
}  # fmt: skip
_SIGNED = ("int1", "int2", "int3", "int4", "int5", "int6", "int7", "int8")


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name without its prefix: ``float32``, ``bfloat16``, ``float8_e4m3fn``."""
    return str(dtype).removeprefix("torch.")


@functools.cache
def kind_of(dtype: torch.dtype) -> tuple[int, int]:
    """The kind of a dtype, and the number of its table in `luts` (0 where it needs none)."""
    kind = _KINDS.get(dtype, BYTES)
    return kind, _TABLES.setdefault(dtype, len(_TABLES)) if kind == BYTES else 0


_TABLES: dict[torch.dtype, int] = {torch.uint8: 0}


@functools.cache
def lut(dtype: torch.dtype) -> torch.Tensor:
    """Magnitude and square, float64 [256, 2], of each 8-bit pattern; infinite where the pattern is not finite."""
    patterns = torch.arange(256, dtype=torch.uint8, device="cpu")
    name = dtype_name(dtype)
    if name == "float4_e2m1fn_x2":  # two numbers a byte: the larger, and the sum of their squares
        e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device="cpu")
        low, high = e2m1[(patterns & 7).long()], e2m1[(patterns >> 4 & 7).long()]
        return torch.stack([torch.maximum(low, high), low * low + high * high], dim=1)
    if name.startswith("float8"):
        values = patterns.view(dtype).to(torch.float64).abs()
    elif name in _SIGNED:
        values = patterns.view(torch.int8).to(torch.float64).abs()
    else:  # unsigned and bit containers: their bytes
        values = patterns.to(torch.float64)
    values = torch.where(values.isfinite(), values, torch.inf)
    return torch.stack([values, values * values], dim=1)


def luts() -> npt.NDArray[np.float64]:
    """The tables [n, 256, 2] that `kind_of` has numbered so far: more of them as dtypes are met, never others."""
    return _stacked(tuple(_TABLES))


@functools.lru_cache(maxsize=64)
def _stacked(dtypes: tuple[torch.dtype, ...]) -> npt.NDArray[np.float64]:
    import numpy as np

    return np.array([lut(d).tolist() for d in dtypes])
