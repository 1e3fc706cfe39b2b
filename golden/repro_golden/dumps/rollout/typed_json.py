"""Any plain value as JSON that keeps its type and bits, with the long parts in one block of bytes beside it."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from repro_golden.base.canonical import decode_float, encode_float
from repro_golden.base.errors import ReproError
from repro_golden.dumps.rollout.arrays import Array, regular
from repro_golden.dumps.values import TORCH_DTYPES, Record, Tensor, Unknown, key_of

__all__ = ["Decoder", "Encoder"]

_LONG = 16
"""Lists of so many numbers, and bytes of so many, go to the block."""

_WIDE = 1024
"""Bits beyond which Python refuses to write a number in decimal, or soon will."""

_KINDS = {"i": "<i8", "f": "<f8", "b": "|b1"}


FORMAT = 1
"""Of what `Encoder` makes. It stands beside a rollout's columns, and in the digest of a dump's content."""


class Encoder:
    """Turns values into JSON. None, true, text, whole numbers, finite floats and lists are themselves.

    Every JSON object is ``{TAG: ...}``, so that no dict of a user's can be taken for one.

    Args:
        by_key: Whether dicts are written in the order of their keys, so that equal dicts are equal JSON. Else their own
            order is kept.

    Attributes:
        block: The bytes of arrays, long lists and long byte strings, one after the other.
    """

    def __init__(self, *, by_key: bool = False) -> None:
        self.block = bytearray()
        self._by_key = by_key

    def encode(self, value: Any) -> Any:
        """A value as JSON.

        Raises:
            ReproError: a value of a type that dumps do not have.
        """
        handler = _ENCODE.get(type(value))
        if handler is not None:
            return handler(self, value)
        if isinstance(value, np.generic):
            return {"scalar": [self._dtype(value.dtype), value.tobytes().hex()]}
        raise ReproError(f"a {type(value).__name__} cannot be kept in a rollout: remove it where the dump is written")

    def _put(self, raw: bytes) -> int:
        self.block += raw
        return len(self.block) - len(raw)

    def _text(self, value: str) -> Any:
        try:
            value.encode()
        except UnicodeEncodeError:  # a lone surrogate, which no UTF-8 file holds
            return {"surrogates": value.encode("utf-8", "surrogatepass").hex()}
        return value

    def _int(self, value: int) -> Any:
        return value if value.bit_length() <= _WIDE else {"int": hex(value)}

    def _float(self, value: float) -> Any:
        encoded = encode_float(value)
        return {"float": encoded} if isinstance(encoded, str) else encoded

    def _list(self, value: list[Any]) -> Any:
        array = regular(value) if len(value) >= _LONG or (value and type(value[0]) is list) else None
        # a list of empty lists has a shape, but the shape does not say how deep it goes
        if array is not None and array.size >= _LONG:
            return {"list": [_KINDS[array.dtype.kind], list(array.shape), self._put(array.tobytes())]}
        return [self.encode(item) for item in value]

    def _tuple(self, value: tuple[Any, ...]) -> Any:
        return {"tuple": [self.encode(item) for item in value]}

    def _bytes(self, value: bytes) -> Any:
        return {"bytes": value.hex()} if len(value) < _LONG else {"block": [self._put(value), len(value)]}

    def _bytearray(self, value: bytearray) -> Any:
        return {"bytearray": self._bytes(bytes(value))}

    def _complex(self, value: complex) -> Any:
        return {"complex": [self._float(value.real), self._float(value.imag)]}

    def _dict(self, value: dict[Any, Any]) -> Any:
        names = list(value)
        plain = all(type(name) is str and self._text(name) is name for name in names)
        # an object has no order: what is to keep its own must be in order, or a list
        if plain and (self._by_key or names == sorted(names)):
            return {"dict": {name: self.encode(value[name]) for name in sorted(names)}}
        return {"items": self._pairs(value)}

    def _ordered(self, value: OrderedDict[Any, Any]) -> Any:
        return {"ordered": self._pairs(value)}

    def _pairs(self, value: dict[Any, Any]) -> list[Any]:
        items = sorted(value.items(), key=lambda item: repr(key_of(item[0]))) if self._by_key else value.items()
        return [[self.encode(key), self.encode(item)] for key, item in items]

    def _set(self, value: set[Any] | frozenset[Any]) -> Any:
        # sorted: a set has no order, and equal content must be equal text
        return {type(value).__name__: [self.encode(item) for item in sorted(value, key=lambda v: repr(key_of(v)))]}

    def _tensor(self, value: Tensor) -> Any:
        return {"tensor": [value.dtype, list(value.shape), self._put(value.array.tobytes())]}

    def _array(self, value: Array) -> Any:
        if value.dtype == object:
            return {"objects": [list(value.shape), [self.encode(item) for item in value.ravel().tolist()]]}
        return {"array": [self._dtype(value.dtype), list(value.shape), self._put(value.tobytes())]}

    def _record(self, value: Record) -> Any:
        parts = (value.state, value.args, value.kwargs, value.items)
        return {"record": [value.name, value.made, value.parts, *(self.encode(part) for part in parts)]}

    def _dtype(self, dtype: np.dtype[Any]) -> str:
        if dtype.names is not None or dtype.kind not in "biufcSUMm":
            raise ReproError(f"an array of {dtype} cannot be kept in a rollout: remove it where the dump is written")
        return dtype.str


_ENCODE: dict[type, Callable[[Encoder, Any], Any]] = {
    type(None): lambda _, value: value,
    bool: lambda _, value: value,
    int: Encoder._int,
    str: Encoder._text,
    float: Encoder._float,
    list: Encoder._list,
    tuple: Encoder._tuple,
    bytes: Encoder._bytes,
    bytearray: Encoder._bytearray,
    complex: Encoder._complex,
    dict: Encoder._dict,
    OrderedDict: Encoder._ordered,
    set: Encoder._set,
    frozenset: Encoder._set,
    Tensor: Encoder._tensor,
    np.ndarray: Encoder._array,
    Record: Encoder._record,
    Unknown: lambda _, value: {"unknown": [value.name, value.parts]},
}


class Decoder:
    """The inverse of `Encoder`.

    Args:
        block: Its `Encoder.block`.
    """

    def __init__(self, block: bytes) -> None:
        self.block = block

    def decode(self, raw: Any) -> Any:
        """The value again, bit for bit.

        Raises:
            ReproError: JSON that `Encoder` does not write.
        """
        if isinstance(raw, list):
            return [self.decode(item) for item in raw]
        if not isinstance(raw, dict):
            return raw
        try:
            [(tag, body)] = raw.items()
            return _DECODE[tag](self, body)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ReproError(
                f"a part of this rollout is damaged ({json.dumps(raw)[:80]}: {error}): convert the dump again"
            ) from None

    def _take(self, dtype: str, shape: list[int], start: int) -> Array:
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(self.block, dtype=np.dtype(dtype), count=count, offset=start).reshape(shape).copy()

    def _raw(self, body: list[int]) -> bytes:
        start, size = body
        return bytes(self.block[start : start + size])

    def _items(self, body: list[list[Any]]) -> list[tuple[Any, Any]]:
        return [(self.decode(key), self.decode(value)) for key, value in body]

    def _scalar(self, body: list[str]) -> Any:
        return np.frombuffer(bytes.fromhex(body[1]), dtype=np.dtype(body[0]))[0]

    def _objects(self, body: list[list[Any]]) -> Array:
        array = np.empty(len(body[1]), dtype=object)
        for at, item in enumerate(body[1]):  # one by one: numpy would take lists apart
            array[at] = self.decode(item)
        return array.reshape(body[0])

    def _array(self, body: list[Any]) -> Array:
        dtype, shape, start = body
        if np.dtype(dtype).itemsize == 0:  # text of no length
            return np.empty(shape, dtype=dtype)
        return self._take(dtype, shape, start)

    def _tensor(self, body: list[Any]) -> Tensor:
        dtype, shape, start = body
        return Tensor(dtype, self._take(TORCH_DTYPES[dtype], shape, start))

    def _record(self, body: list[Any]) -> Record:
        name, made, parts, state, args, kwargs, items = (*body[:3], *map(self.decode, body[3:]))
        return Record(name, state, args, kwargs, items, made, parts)


_DECODE: dict[str, Callable[[Decoder, Any], Any]] = {
    "surrogates": lambda _, body: bytes.fromhex(body).decode("utf-8", "surrogatepass"),
    "int": lambda _, body: int(body, 16),
    "float": lambda _, body: decode_float(body),
    "list": lambda self, body: self._take(*body).tolist(),
    "tuple": lambda self, body: tuple(self.decode(item) for item in body),
    "bytes": lambda _, body: bytes.fromhex(body),
    "block": lambda self, body: self._raw(body),
    "bytearray": lambda self, body: bytearray(self.decode(body)),
    "complex": lambda self, body: complex(self.decode(body[0]), self.decode(body[1])),
    "dict": lambda self, body: {key: self.decode(value) for key, value in body.items()},
    "items": lambda self, body: dict(self._items(body)),
    "ordered": lambda self, body: OrderedDict(self._items(body)),
    "set": lambda self, body: {self.decode(item) for item in body},
    "frozenset": lambda self, body: frozenset(self.decode(item) for item in body),
    "tensor": lambda self, body: self._tensor(body),
    "array": lambda self, body: self._array(body),
    "objects": lambda self, body: self._objects(body),
    "scalar": lambda self, body: self._scalar(body),
    "record": lambda self, body: self._record(body),
    "unknown": lambda _, body: Unknown(*body),
}
