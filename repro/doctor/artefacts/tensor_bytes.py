"""Elements of tensors in safetensors files: widened to float32, and looked at in pieces without holding them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from repro.doctor.artefacts.kinds import TensorStats
from repro.doctor.artefacts.safetensors_header import BITS, Placed
from repro_golden.base.errors import ReproError
from repro_golden.dumps.values import Tensor

__all__ = ["WHOLE", "read_elements", "scan_elements"]

WHOLE = 256 << 30
"""Bytes of a checkpoint up to which all of every tensor is looked at."""

_PIECE = 8 << 20
_ELEMENTS = 1 << 32  # 16 GiB as float32


class _Bits(NamedTuple):
    """How to read a float's bits: its unsigned integer, its magnitude's mask, the lowest of inf or NaN, inf itself."""

    unsigned: str
    magnitude: int
    special: int
    infinite: int | None


_FLOATS: dict[str, _Bits] = {
    "BF16": _Bits("<u2", 0x7FFF, 0x7F80, 0x7F80),
    "F16": _Bits("<u2", 0x7FFF, 0x7C00, 0x7C00),
    "F32": _Bits("<u4", 0x7FFFFFFF, 0x7F800000, 0x7F800000),
    "F64": _Bits("<u8", (1 << 63) - 1, 0x7FF << 52, 0x7FF << 52),
    "F8_E4M3": _Bits("|u1", 0x7F, 0x7F, None),
    "F8_E5M2": _Bits("|u1", 0x7F, 0x7C, 0x7C),
    "F8_E8M0": _Bits("|u1", 0xFF, 0xFF, None),
}

_TORCH = {
    "BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip

_INTEGERS = {
    "BOOL": "|b1", "U8": "|u1", "I8": "|i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
    "I64": "<i8",
}  # fmt: skip


def read_elements(path: Path, name: str, tensor: Placed) -> npt.NDArray[Any]:
    """All elements, flat: floats as float32, integers and bools as they are.

    Raises:
        ReproError: the file cannot be read, is too large for memory, or has a dtype without such elements.
    """
    known = _TORCH.get(tensor.dtype) or _INTEGERS.get(tensor.dtype)
    if known is None:
        raise ReproError(f"{path} has {name!a} in {tensor.dtype}, whose elements are not read")
    count = (tensor.end - tensor.start) * 8 // BITS[tensor.dtype]
    if count > _ELEMENTS:
        raise ReproError(f"{path} has {count} elements in {name!a}, more than are read at once")
    held = np.dtype(_INTEGERS.get(tensor.dtype, "<f4"))
    try:
        elements = np.empty(count, held)
    except MemoryError:
        raise ReproError(f"{path} has {count} elements in {name!a}, more than memory holds") from None
    at = 0
    for raw in _pieces(path, tensor, [(tensor.start, tensor.end)]):
        piece = _widen(raw, tensor.dtype)
        elements[at : at + len(piece)] = piece
        at += len(piece)
    return elements


def _widen(raw: bytes, dtype: str) -> npt.NDArray[Any]:
    if dtype == "BOOL":
        return np.asarray(np.frombuffer(raw, "|u1") != 0)  # any byte is one
    if dtype in _INTEGERS:
        return np.frombuffer(raw, _INTEGERS[dtype])
    if dtype == "BF16":
        return np.asarray((np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32))
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype in ("F16", "F32", "F64"):
            return np.frombuffer(raw, {"F16": "<f2", "F32": "<f4", "F64": "<f8"}[dtype]).astype(np.float32)
        table = Tensor(_TORCH[dtype], np.arange(256, dtype=np.uint8)).floats().astype(np.float32)
    return np.asarray(table[np.frombuffer(raw, "|u1")])


def scan_elements(path: Path, tensor: Placed, *, whole: bool) -> TensorStats:
    """One look at a tensor's elements.

    Args:
        path: The file.
        tensor: Where it lies.
        whole: All of it; otherwise its first, middle and last 8 MiB.

    Raises:
        ReproError: the file cannot be read.
    """
    import xxhash

    digest = xxhash.xxh3_128(f"{tensor.dtype}{tensor.shape}".encode())
    bits = _FLOATS.get(tensor.dtype)
    unsigned = np.dtype(bits.unsigned if bits else f"<u{max(BITS[tensor.dtype], 8) // 8}" if _round(tensor) else "|u1")
    nan = inf = 0
    first: Any = None
    constant = zero = True
    spans = [(tensor.start, tensor.end)] if whole else _windows(tensor)
    for raw in _pieces(path, tensor, spans):
        digest.update(raw)
        integers = np.frombuffer(raw, unsigned)
        if not len(integers):
            continue
        first = integers[0] if first is None else first
        constant = constant and not (integers != first).any()
        if bits is not None:
            magnitude = integers & unsigned.type(bits.magnitude)
            largest = magnitude.max()
            zero = zero and largest == 0 and tensor.dtype != "F8_E8M0"
            if largest >= bits.special:
                infinite = 0 if bits.infinite is None else int((magnitude == bits.infinite).sum())
                inf += infinite
                nan += int((magnitude >= bits.special).sum()) - infinite
    same = constant or (zero and bits is not None)  # -0.0 beside 0.0 is zero all the same
    value = _value(first, tensor.dtype) if first is not None and same and not (nan or inf) else None
    return TensorStats(nan, inf, value, digest.hexdigest(), whole or spans == [(tensor.start, tensor.end)])


def _round(tensor: Placed) -> bool:
    return BITS[tensor.dtype] in (8, 16, 32, 64)


def _value(first: Any, dtype: str) -> float:
    if dtype not in _TORCH and dtype not in _INTEGERS:
        return float(first)
    value = float(_widen(first.tobytes(), dtype)[0])
    return 0.0 if value == 0 else value


def _windows(tensor: Placed) -> list[tuple[int, int]]:
    size = tensor.end - tensor.start
    if size <= 3 * _PIECE:
        return [(tensor.start, tensor.end)]
    middle = tensor.start + (size // 2 // 8) * 8
    last = tensor.end - _PIECE
    return [(tensor.start, tensor.start + _PIECE), (middle, min(middle + _PIECE, last)), (last, tensor.end)]


def _pieces(path: Path, tensor: Placed, spans: list[tuple[int, int]]) -> Iterator[bytes]:
    """The bytes of the spans, in pieces of whole elements."""
    try:
        with path.open("rb") as file:
            for start, end in spans:
                file.seek(start)
                while start < end:
                    raw = file.read(min(_PIECE, end - start))
                    if len(raw) < min(_PIECE, end - start):
                        raise ReproError(f"{path} became shorter while it was read: wait until it is written")
                    yield raw
                    start += len(raw)
    except OSError as error:
        raise ReproError(f"{path} cannot be read at byte {tensor.start}: {error}") from None
