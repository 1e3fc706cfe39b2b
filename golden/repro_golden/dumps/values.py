"""The plain values that a dump becomes: numbers, text, containers, arrays, tensors, and records of foreign classes."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from repro_golden.base.errors import ReproError

if TYPE_CHECKING:
    import torch

__all__ = ["TORCH_DTYPES", "Record", "Tensor", "Unknown", "key_of", "little", "same"]


TORCH_DTYPES: dict[str, str] = {
    "bfloat16": "<u2",
    "bool": "|b1",
    "complex128": "<c16",
    "complex64": "<c8",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "float8_e4m3fn": "|u1",
    "float8_e4m3fnuz": "|u1",
    "float8_e5m2": "|u1",
    "float8_e5m2fnuz": "|u1",
    "float8_e8m0fnu": "|u1",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "int8": "|i1",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "uint8": "|u1",
}
"""torch's dtypes and the numpy dtype that holds their bits; numpy has no bfloat16 and no float8."""


@dataclass(frozen=True, eq=False)
class Tensor:
    """A torch tensor as plain data. Device, requires_grad and strides are not part of it.

    Attributes:
        dtype: torch's name, a key of `TORCH_DTYPES`.
        array: the bits, of the tensor's shape; read-only when it was read from a file.

    Raises:
        ReproError: a dtype that is not in `TORCH_DTYPES`, or an array of another dtype than the bits need.
    """

    dtype: str
    array: np.ndarray[Any, Any]

    def __post_init__(self) -> None:
        expected = TORCH_DTYPES.get(self.dtype)
        if expected is None:
            raise ReproError(f"torch dtype {self.dtype!r} is not known here; known are {', '.join(TORCH_DTYPES)}")
        if self.array.dtype != np.dtype(expected):
            raise ReproError(f"a {self.dtype} tensor is held as {np.dtype(expected)}, not as {self.array.dtype}")

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of its dimensions; () for a scalar."""
        return tuple(self.array.shape)

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return self.array.size

    def floats(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The elements as float64, in the tensor's shape; 64-bit integers beyond 2**53 are rounded.

        Raises:
            ReproError: a complex tensor.
        """
        if self.dtype in _FLOAT8:
            table = np.array([_float8(self.dtype, byte) for byte in range(256)], dtype=np.float64)
            return np.asarray(table[self.array])
        if self.dtype == "bfloat16":
            wide = (self.array.astype(np.uint32) << 16).view(np.float32)
            return _as_float64(wide)
        if self.dtype.startswith("complex"):
            raise ReproError("a complex tensor has no real values; compare its bits")
        return _as_float64(self.array)

    @staticmethod
    def of(tensor: torch.Tensor) -> Tensor:
        """The bits of a torch tensor, copied to the host.

        Raises:
            ReproError: a sparse or quantised tensor, or a dtype that is not in `TORCH_DTYPES`.
        """
        import torch

        name = str(tensor.dtype).removeprefix("torch.")
        if name not in TORCH_DTYPES or tensor.layout != torch.strided:
            raise ReproError(f"a {tensor.layout} tensor of {tensor.dtype} is not read as plain data")
        dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        raw = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
        return Tensor(name, np.frombuffer(raw, dtype=TORCH_DTYPES[name]).reshape(tuple(tensor.shape)))

    def torch(self) -> torch.Tensor:
        """A torch tensor of its own on the CPU, bit for bit."""
        import torch

        dtype = getattr(torch, self.dtype)
        if not self.numel:
            return torch.empty(self.shape, dtype=dtype)
        raw = np.frombuffer(bytearray(self.array.tobytes()), dtype=np.uint8)
        return torch.from_numpy(raw).view(dtype).reshape(self.shape)


@dataclass(frozen=True)
class Unknown:
    """A class or function that a file names. It was not imported, and nothing of it ran.

    Attributes:
        name: module and qualified name, joined by a dot.
        parts: how many of the trailing components are the qualified name (2 for `types.Sample.Status`).
    """

    name: str
    parts: int = 1


@dataclass(frozen=True, eq=False)
class Record:
    """An object of a foreign class, as the plain fields that its pickle holds. It was never instantiated.

    Attributes:
        name: module and qualified name of its class (or of the function that would have made it).
        state: what its `__setstate__` or `__dict__` would have got (a dict for dataclasses); None without one.
        args: what its constructor would have got.
        kwargs: keyword arguments of its constructor.
        items: what would have been appended (a list) or set (a dict) on it; None without any.
        made: "new" by `__new__`, "call" by calling the class or function (enum members).
        parts: as in `Unknown`.
    """

    name: str
    state: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    items: list[Any] | dict[Any, Any] | None = None
    made: Literal["new", "call"] = "new"
    parts: int = 1


def same(a: Any, b: Any) -> bool:
    """Equal content of equal types, with floats by their bits: NaN equals the same NaN, and -0.0 is not 0.0.

    The order of a dict's keys, the memory and byte order of an array and which objects are shared are not content.

    Raises:
        ReproError: nested deeper than Python's stack, as a value that holds itself is.
    """
    try:
        return _same(a, b)
    except RecursionError:
        raise ReproError("the values are nested too deeply to compare; does one hold itself?") from None


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if a is b and type(a) in _ATOMS:
        return True
    compare = _COMPARE.get(type(a))
    if compare is not None:
        return compare(a, b)
    if isinstance(a, np.generic):
        return bool(a.dtype == b.dtype) and a.tobytes() == b.tobytes()
    return bool(a == b)


def _same_floats(a: float, b: float) -> bool:
    return (a == b and a != 0.0) or _bits(a) == _bits(b)


def _same_lists(a: list[Any], b: list[Any]) -> bool:
    if len(a) != len(b):
        return False
    types = set(map(type, a))
    if types <= {int, str, bool, type(None)} and list(map(type, a)) == list(map(type, b)):
        return a == b
    if types == {float} and set(map(type, b)) == {float}:
        return struct.pack(f"<{len(a)}d", *a) == struct.pack(f"<{len(b)}d", *b)
    return all(map(_same, a, b))


def _same_tuples(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return len(a) == len(b) and all(map(_same, a, b))


def _same_dicts(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
    if len(a) != len(b):
        return False
    others = {key_of(key): value for key, value in b.items()}
    return all(key_of(key) in others for key in a) and all(_same(v, others[key_of(k)]) for k, v in a.items())


def _same_sets(a: set[Any], b: set[Any]) -> bool:
    return sorted(map(repr, map(key_of, a))) == sorted(map(repr, map(key_of, b)))


def little(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An array with the bytes of each element in little-endian order, NaNs' payloads included."""
    if array.dtype.str[0] != ">":
        return array
    return array.byteswap().view(array.dtype.newbyteorder("<"))


def _same_arrays(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    a, b = little(a), little(b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return _same_lists(a.ravel().tolist(), b.ravel().tolist()) if a.dtype == object else a.tobytes() == b.tobytes()


def _same_tensors(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and _same_arrays(a.array, b.array)


def _same_records(a: Record, b: Record) -> bool:
    plain = (a.name, a.made, a.parts) == (b.name, b.made, b.parts)
    return plain and _same((a.state, a.args, a.kwargs, a.items), (b.state, b.args, b.kwargs, b.items))


def _same_complex(a: complex, b: complex) -> bool:
    return _bits(a.real) == _bits(b.real) and _bits(a.imag) == _bits(b.imag)


def key_of(value: Any) -> Any:
    """A hashable stand-in for a dict's key or a set's element that keeps type and bits: 1, True and 1.0 stay apart."""
    if type(value) is str:
        return value
    if type(value) is float:
        return ("float", _bits(value))
    if type(value) is complex:
        return ("complex", _bits(value.real), _bits(value.imag))
    if isinstance(value, np.generic):
        return (value.dtype.str, value.tobytes())
    if type(value) is tuple:
        return ("tuple", *map(key_of, value))
    if type(value) is frozenset:
        return ("frozenset", *sorted(map(repr, map(key_of, value))))
    if type(value) is int and value.bit_length() > 1024:  # a longer one has no repr
        return ("int", hex(value))
    return (type(value).__name__, value)


def _as_float64(array: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        return array.astype(np.float64)


_bits = struct.Struct("<d").pack
_ATOMS = {int, str, bool, bytes, type(None), float, complex}

_COMPARE: dict[type, Callable[[Any, Any], bool]] = {
    float: _same_floats,
    complex: _same_complex,
    list: _same_lists,
    tuple: _same_tuples,
    dict: _same_dicts,
    OrderedDict: _same_dicts,
    set: _same_sets,
    frozenset: _same_sets,
    np.ndarray: _same_arrays,
    Tensor: _same_tensors,
    Record: _same_records,
}


_FLOAT8: dict[str, tuple[int, int, int]] = {
    "float8_e4m3fn": (4, 3, 7),
    "float8_e4m3fnuz": (4, 3, 8),
    "float8_e5m2": (5, 2, 15),
    "float8_e5m2fnuz": (5, 2, 16),
    "float8_e8m0fnu": (8, 0, 127),
}
"""Exponent bits, mantissa bits and bias."""


def _float8(dtype: str, byte: int) -> float:
    exponent_bits, mantissa_bits, bias = _FLOAT8[dtype]
    if dtype == "float8_e8m0fnu":  # an exponent and nothing else: no sign, no zero
        return float("nan") if byte == 255 else 2.0 ** (byte - bias)
    sign = -1.0 if byte & 128 else 1.0
    exponent = byte >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = byte & (1 << mantissa_bits) - 1
    if dtype.endswith("fnuz"):
        if byte == 128:
            return float("nan")
    elif dtype == "float8_e4m3fn":
        if byte & 127 == 127:
            return float("nan")
    elif exponent == 31:
        return float("nan") if mantissa else sign * float("inf")
    unit = 1 << mantissa_bits
    if exponent:
        return float(sign * (1 + mantissa / unit) * 2.0 ** (exponent - bias))
    return sign * (mantissa / unit) * 2.0 ** (1 - bias)
