"""The numbers in a field, whether the dump holds them as a list, a numpy array or a tensor."""

from __future__ import annotations

from typing import Any

import numpy as np

from repro_golden.dumps.values import Tensor

__all__ = ["Array", "length", "numbers", "regular"]

Array = np.ndarray[Any, Any]


def length(value: Any) -> int | None:
    """How many entries a field has along its first dimension; None where it has no entries at all, as a number."""
    if isinstance(value, list | tuple):
        return len(value)
    if isinstance(value, Tensor):
        return value.shape[0] if value.shape else None
    if isinstance(value, np.ndarray):
        return value.shape[0] if value.shape else None
    return None


def numbers(value: Any, *, wide: bool = True) -> Array | None:
    """The numbers of a field as int64, uint64, float64 or bool; None where it is no regular array of numbers.

    Numbers keep their value: narrower ones are widened, unless `wide` is false, which takes arrays as they are.
    """
    if isinstance(value, Tensor):
        if value.dtype.startswith("complex"):
            return None
        array = value.array if value.array.dtype.kind in "biu" and not _is_bits(value) else value.floats()
        return _wide(array) if wide else array
    if isinstance(value, np.ndarray):
        return (_wide(value) if wide else value) if value.dtype.kind in "biuf" else None
    return regular(value)


def regular(value: Any) -> Array | None:
    """A list of numbers, or lists of lists of equal lengths, as an array; None where it is anything else.

    All numbers must be of one type: int within 64 bits, float, or bool.
    """
    if not isinstance(value, list):
        return None
    shape, flat = [len(value)], value
    while flat and type(flat[0]) is list:
        width = len(flat[0])
        if any(type(item) is not list or len(item) != width for item in flat):
            return None
        shape.append(width)
        flat = [number for item in flat for number in item]
    flat = [number.item() if isinstance(number, np.generic) else number for number in flat]
    kinds = set(map(type, flat))
    dtype = {int: np.int64, float: np.float64, bool: np.bool_}.get(next(iter(kinds), int)) if len(kinds) < 2 else None
    if dtype is None:
        return None
    try:
        return np.array(flat, dtype=dtype).reshape(shape)
    except (OverflowError, ValueError):
        return None


def _is_bits(value: Tensor) -> bool:
    return value.dtype == "bfloat16" or value.dtype.startswith("float8")


def _wide(array: Array) -> Array:
    kind = array.dtype.kind
    if kind == "u":
        return array.astype(np.uint64 if array.dtype.itemsize == 8 else np.int64)
    return array.astype({"b": np.bool_, "i": np.int64, "f": np.float64}[kind])
