"""Plain values as a pickle of protocol 2 that equal content always makes alike, whoever shares which object."""

from __future__ import annotations

import os
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from repro_golden.base.canonical import atomic
from repro_golden.base.errors import ReproError
from repro_golden.dumps.archive.bounds import DEPTH, LIMIT, Budget, check_key
from repro_golden.dumps.archive.makers import SCALARS, STORAGES, is_code
from repro_golden.dumps.values import Record, Tensor, Unknown, key_of, little

__all__ = ["pickled", "write_archive"]

_MARK, _STOP, _PROTO = b"(", b".", b"\x80\x02"
_u4 = struct.Struct("<I").pack
_i4 = struct.Struct("<i").pack
_f8 = struct.Struct(">d").pack
_FLOAT_ROW = np.dtype([("opcode", "u1"), ("value", ">f8")])

_STORAGES = {dtype: name for name, dtype in STORAGES.items() if dtype}
"""Dtypes that have a storage class of their own; the newer ones are written as bytes with a dtype beside them."""


def pickled(value: Any) -> tuple[bytes, list[Tensor]]:
    """A value's pickle for a torch archive.

    Only texts and class names are memoised, by content, so that the bytes do not depend on which objects are shared.

    Args:
        value: built of what `read_archive` gives; arrays need not be contiguous.

    Returns:
        The pickle, and the tensors whose bytes its storages "0", "1", ... are, in order.

    Raises:
        ReproError: a value of another type, or one that is nested deeper than a reader follows.
    """
    writer = _Writer()
    writer.write(value, 0)
    return b"".join([_PROTO, *writer.parts, _STOP]), writer.tensors


class _Writer:
    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.tensors: list[Tensor] = []
        self._memo: dict[tuple[str, ...], bytes] = {}
        self._put = self.parts.append
        self._budget = Budget("the value", LIMIT)
        self._atoms: dict[type, Callable[[Any], None]] = {
            str: self._text,
            float: lambda value: self._put(b"G" + _f8(value)),
            int: lambda value: self._put(_integer(value)),
            bool: lambda value: self._put(b"\x88" if value else b"\x89"),
            type(None): lambda _: self._put(b"N"),
            bytes: self._bytes,
            bytearray: self._bytearray,
            complex: self._complex,
            Tensor: self._tensor,
            Unknown: self._unknown,
            np.ndarray: self._array,
        }
        self._nested: dict[type, Callable[[Any, int], None]] = {
            list: self._list,
            tuple: self._tuple,
            dict: self._dict,
            OrderedDict: self._ordered,
            set: self._set,
            frozenset: self._set,
            Record: self._record,
        }

    def write(self, value: Any, depth: int) -> None:
        """Append a value's opcodes."""
        atom = self._atoms.get(type(value))
        nested = self._nested.get(type(value))
        if atom is not None:
            atom(value)
        elif nested is not None:
            if depth >= DEPTH:
                raise ReproError(f"a value is nested deeper than {DEPTH} levels, or holds itself: it cannot be written")
            nested(value, depth)
        elif isinstance(value, np.generic):
            self._scalar(value)
        elif isinstance(value, Unknown):
            self._unknown(value)
        else:
            name = f"{type(value).__module__}.{type(value).__qualname__}"
            raise ReproError(f"a {name} cannot be written to a dump: make it plain values")

    def _memoised(self, key: tuple[str, ...], make: Callable[[], None]) -> None:
        opcode = self._memo.get(key)
        if opcode is not None:
            self._put(opcode)
            return
        make()
        index = len(self._memo)
        self._memo[key] = b"h%c" % index if index < 256 else b"j" + _u4(index)
        self._put(b"q%c" % index if index < 256 else b"r" + _u4(index))

    # Scalars

    def _text(self, value: str) -> None:
        def make() -> None:
            raw = value.encode("utf-8", "surrogatepass")
            if len(raw) >= 1 << 32:
                raise ReproError("a text of more than 4 GiB cannot be written to a dump: shorten it")
            self._put(b"X" + _u4(len(raw)))
            self._put(raw)

        self._memoised(("text", value), make)

    def _latin(self, raw: bytes) -> None:
        """Bytes as protocol 2 has them: text that is encoded again when it is read."""
        self._named("_codecs", "encode")
        text = raw.decode("latin1").encode()
        if len(text) >= 1 << 32:
            raise ReproError("bytes of more than 4 GiB cannot be written as one value: write a tensor instead")
        self._put(b"X" + _u4(len(text)))
        self._put(text)
        self._text("latin1")
        self._put(b"\x86R")

    def _bytes(self, value: bytes) -> None:
        if value:
            self._latin(value)
        else:
            self._named("__builtin__", "bytes")
            self._put(b")R")

    def _bytearray(self, value: bytearray) -> None:
        self._named("__builtin__", "bytearray")
        if value:
            self._latin(bytes(value))
            self._put(b"\x85R")
        else:
            self._put(b")R")

    def _complex(self, value: complex) -> None:
        self._named("__builtin__", "complex")
        self._put(b"G" + _f8(value.real) + b"G" + _f8(value.imag) + b"\x86R")

    # Containers

    def _list(self, value: list[Any], depth: int) -> None:
        self._put(b"]")
        if value:
            self._put(_MARK)
            self._many(value, depth)
            self._put(b"e")

    def _many(self, values: Iterable[Any], depth: int) -> None:
        values = list(values)
        types = set(map(type, values))
        if types == {float}:
            rows = np.empty(len(values), _FLOAT_ROW)
            rows["opcode"] = b"G"[0]
            rows["value"] = values
            self._put(rows.tobytes())
        elif types == {int}:
            codes = {number: _integer(number) for number in set(values)}
            self._put(b"".join([codes[number] for number in values]))
        else:
            for value in values:
                self.write(value, depth + 1)

    def _tuple(self, value: tuple[Any, ...], depth: int) -> None:
        if not value:
            self._put(b")")
        elif len(value) <= 3:
            self._many(value, depth)
            self._put((b"\x85", b"\x86", b"\x87")[len(value) - 1])
        else:
            self._put(_MARK)
            self._many(value, depth)
            self._put(b"t")

    def _dict(self, value: dict[Any, Any], depth: int) -> None:
        self._put(b"}")
        self._items(value, depth)

    def _ordered(self, value: OrderedDict[Any, Any], depth: int) -> None:
        self._named("collections", "OrderedDict")
        self._put(b")R")
        self._items(value, depth)

    def _items(self, value: dict[Any, Any], depth: int) -> None:
        if value:
            self._put(_MARK)
            for key, item in value.items():
                if type(key) is not str:
                    check_key(key, self._budget)
                self.write(key, depth + 1)
                self.write(item, depth + 1)
            self._put(b"u")

    def _set(self, value: set[Any] | frozenset[Any], depth: int) -> None:
        self._named("__builtin__", type(value).__name__)
        for element in value:
            check_key(element, self._budget)
        self._list(sorted(value, key=lambda element: repr(key_of(element))), depth)
        self._put(b"\x85R")

    # Arrays and tensors

    def _array(self, value: np.ndarray[Any, Any]) -> None:
        value = little(value)
        self._named("numpy.core.multiarray", "_reconstruct")
        self._named("numpy", "ndarray")
        self._put(b"K\x00\x85")
        self._latin(b"b")
        self._put(b"\x87R")
        self._put(_MARK)
        self._put(b"K\x01")
        self._tuple(value.shape, 0)
        self._dtype(value.dtype)
        self._put(b"\x89")
        if value.dtype == object:
            if not set(map(type, value.ravel().tolist())) <= SCALARS:
                raise ReproError("a numpy object array of other than plain scalars cannot be written: make it a list")
            self._list(value.ravel().tolist(), 0)
        else:
            self._bytes(value.tobytes())
        self._put(b"tb")

    def _scalar(self, value: np.generic) -> None:
        self._named("numpy.core.multiarray", "scalar")
        self._dtype(value.dtype)
        self._bytes(value.tobytes())
        self._put(b"\x86R")

    def _dtype(self, dtype: np.dtype[Any]) -> None:
        kind = dtype.kind
        code = f"{kind}{dtype.itemsize // 4 if kind == 'U' else dtype.itemsize}"
        if not is_code(code) or dtype.names is not None:
            raise ReproError(f"a numpy array of dtype {dtype} cannot be written to a dump: make it numbers or text")
        self._named("numpy", "dtype")
        self._text(code)
        self._put(b"\x89\x88\x87R(K\x03")
        self._text(dtype.str[0])
        self._put(b"NNN")
        if kind == "U":
            self._put(_integer(dtype.itemsize) + b"K\x04K\x08")
        elif kind == "S":
            self._put(_integer(dtype.itemsize) + b"K\x01K\x00")
        else:
            self._put(2 * _integer(-1) + (b"K\x3f" if kind == "O" else b"K\x00"))
        self._put(b"tb")

    def _tensor(self, value: Tensor) -> None:
        """A storage of its own for each tensor: sharing is not content."""
        storage = _STORAGES.get(value.dtype)
        self._named("torch._utils", "_rebuild_tensor_v2" if storage else "_rebuild_tensor_v3")
        self._put(_MARK + _MARK)
        self._text("storage")
        if storage:
            self._named("torch", storage)
        else:
            self._named("torch.storage", "UntypedStorage")
        self._text(str(len(self.tensors)))
        self._text("cpu")
        self._put(_integer(value.numel if storage else value.array.nbytes) + b"tQK\x00")
        self._tuple(value.shape, 0)
        self._tuple(_strides(value.shape), 0)
        self._put(b"\x89")
        self._named("collections", "OrderedDict")
        self._put(b")R")
        if not storage:
            self._named("torch", value.dtype)
        self._put(b"tR")
        self.tensors.append(value)

    # Names

    def _named(self, module: str, name: str) -> None:
        line = f"{module}\n{name}\n".encode()
        self._memoised(("name", module, name), lambda: self._put(b"c" + line))

    def _foreign(self, name: str, parts: int) -> None:
        """A name of a file's own. A nested class is an attribute of the outer one, as protocol 2 has it."""
        components = name.split(".")
        if not 0 < parts < len(components):
            raise ReproError(f"{name!a} is no class in a module: it cannot be written to a dump")
        module, qualified = ".".join(components[:-parts]), components[-parts:]
        for _ in qualified[1:]:
            self._named("__builtin__", "getattr")
        self._named(module, qualified[0])
        for attribute in qualified[1:]:
            self._text(attribute)
            self._put(b"\x86R")

    def _unknown(self, value: Unknown) -> None:
        self._foreign(value.name, value.parts)

    def _record(self, value: Record, depth: int) -> None:
        self._foreign(value.name, value.parts)
        self._tuple(value.args, depth + 1)
        if value.made == "call":
            self._put(b"R")
        elif value.kwargs:
            self._dict(value.kwargs, depth + 1)
            self._put(b"\x92")
        else:
            self._put(b"\x81")
        if isinstance(value.items, dict):
            self._items(value.items, depth + 1)
        elif value.items:
            self._put(_MARK)
            self._many(value.items, depth + 1)
            self._put(b"e")
        if value.state is not None:
            self.write(value.state, depth + 1)
            self._put(b"b")


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides that torch gives a contiguous tensor."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K%c" % value
    if 0 <= value < 65536:
        return b"M" + value.to_bytes(2, "little")
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + _i4(value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if value < 0 and len(raw) > 1 and raw[-1] == 0xFF and raw[-2] & 0x80:  # as pickle shortens it
        raw = raw[:-1]
    if len(raw) > 1024:
        raise ReproError("an integer of more than 1024 bytes cannot be written to a dump")
    return b"\x8a%c" % len(raw) + raw if len(raw) < 256 else b"\x8b" + _u4(len(raw)) + raw


# -- writing `.pt` files that `torch.load` reads, without torch: equal content gives equal bytes

_FOLDER = "archive"
_ALIGNMENT = 64  # where torch puts storages, so that they can be mapped into memory
_LOCAL_HEADER = 30
_ZIP64_EXTRA = 20
_CHUNK = 1 << 24


def write_archive(path: str | os.PathLike[str], value: Any) -> None:
    """Write a value as a torch.save archive, whole or not at all.

    A `Tensor` becomes a torch tensor, a numpy array an array that numpy 1 and 2 read, a `Record` an object of its
    class, which the reader must have. Shared objects are written once for each place, so that the bytes depend on
    content alone; memory order of arrays and the order of a set are not content, the order of a dict's keys is kept.

    Args:
        path: the file, whose folder is made.
        value: built of what `read_archive` gives.

    Raises:
        ReproError: a type that cannot be written, or nesting deeper than a reader follows.
        MachineFailureError: the disk is full or the folder cannot be written.
    """
    data, tensors = pickled(value)
    with atomic(Path(path)) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        _add(archive, "data.pkl", data)
        _add(archive, "byteorder", b"little")
        for index, tensor in enumerate(tensors):
            _add(archive, f"data/{index}", tensor.array.tobytes())
        _add(archive, "version", b"3\n")


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    info = zipfile.ZipInfo(f"{_FOLDER}/{name}", (1980, 1, 1, 0, 0, 0))
    info.create_system = 3  # else it depends on the machine that writes
    info.external_attr = 0o644 << 16
    info.file_size = len(content)
    large = len(content) * 1.05 > zipfile.ZIP64_LIMIT  # as zipfile decides
    start = archive.start_dir + _LOCAL_HEADER + len(info.filename) + (_ZIP64_EXTRA if large else 0) + 4
    padding = -start % _ALIGNMENT
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    with archive.open(info, "w") as entry:
        for at in range(0, len(content), _CHUNK):
            entry.write(memoryview(content)[at : at + _CHUNK])
