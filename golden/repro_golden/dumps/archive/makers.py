"""The constructors that a dump's pickle may call, each rebuilt from plain values with checks of its own."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from repro_golden.base.errors import ReproError
from repro_golden.dumps.archive.bounds import Budget, check_key, shown
from repro_golden.dumps.values import TORCH_DTYPES, Record, Tensor, Unknown, little

__all__ = [
    "KNOWN",
    "SCALARS",
    "STORAGES",
    "Maker",
    "Storage",
    "build_array",
    "build_dtype",
    "is_code",
    "is_dtype",
    "storage_of",
]

_Make = Callable[[Budget, tuple[Any, ...]], Any]

_DIMENSIONS = 32  # what every numpy holds
_SPAN = 1 << 58  # elements that any size or stride may reach
_ITEM = 1 << 20  # bytes of one element of a text array
_REBUILT = 640  # a few bytes can ask again and again for a set of one long list, so that its time counts too


@dataclass(frozen=True)
class Maker(Unknown):
    """A constructor that is known. Where it stands as a value, uncalled, it is a foreign name like any other.

    Attributes:
        make: builds the value from the budget and the arguments.
        plain: whether `__new__` of it does the same.
        unbuilt: whether the value gets its content by a BUILD that must follow.
    """

    make: _Make = field(default=lambda *_: None, compare=False)
    plain: bool = False
    unbuilt: bool = False


@dataclass(frozen=True)
class _StorageClass(Unknown):
    """A class of torch storages; `dtype` is None for storages that are counted in bytes."""

    dtype: str | None = None


@dataclass(frozen=True)
class Storage:
    """A tensor's storage: its bytes, and the dtype that its class says."""

    dtype: str | None
    raw: bytes


@dataclass(eq=False)
class _Dtype:
    """A numpy dtype under construction: kind and size, then its byte order from BUILD."""

    code: str
    order: str | None = None

    def dtype(self) -> np.dtype[Any]:
        """The object that numpy has for it."""
        if self.code[0] == "O":
            return np.dtype(object)
        one_byte = self.code[0] == "S" or self.code[1:] == "1"
        return np.dtype(("|" if one_byte else self.order or "<") + self.code)


def _refuse(budget: Budget, what: str, fix: str = "it is damaged; write it again") -> NoReturn:
    raise ReproError(f"{budget.where} {what}: {fix}")


def is_dtype(value: Any) -> bool:
    """Whether a value of the stack is a numpy dtype that BUILD may complete."""
    return type(value) is _Dtype


# torch


def storage_of(
    budget: Budget, reference: Any, storages: dict[str, Storage], read_storage: Callable[[str], bytes]
) -> Storage:
    """The storage that a persistent id names.

    Raises:
        ReproError: no storage of a torch archive, or the archive's bytes are of another length.
    """
    if type(reference) is not tuple or len(reference) != 5 or reference[0] != "storage":
        _refuse(budget, "refers to something outside of it that is no tensor storage", "save it with torch.save")
    _, named, key, _, count = reference
    if not isinstance(named, _StorageClass) or type(key) is not str or not _is_size(count):
        _refuse(budget, "refers to a tensor storage of no known kind", "save dense, unquantised tensors")
    storage = storages.get(key)
    if storage is None:
        storage = storages[key] = Storage(named.dtype, read_storage(key))
    if storage.dtype != named.dtype:
        _refuse(budget, f"refers to storage {shown(key)} under two dtypes", "save the tensors one by one")
    size = 1 if named.dtype is None else np.dtype(TORCH_DTYPES[named.dtype]).itemsize
    if count * size != len(storage.raw):
        _refuse(budget, f"has {len(storage.raw)} bytes in storage {shown(key)}, where its pickle says {count * size}")
    return storage


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < _SPAN


def _sizes(budget: Budget, value: Any, what: str) -> tuple[int, ...]:
    if type(value) is not tuple or len(value) > _DIMENSIONS or not all(map(_is_size, value)):
        _refuse(budget, f"has {what} of {shown(value) if type(value) is tuple else 'no tuple'}")
    if math.prod(size for size in value if size) >= _SPAN and what == "a shape":
        _refuse(budget, f"has a shape of {shown(value)}, which is absurd")
    return value


def _tensor_v2(budget: Budget, args: tuple[Any, ...]) -> Tensor:
    if len(args) not in (6, 7):
        _refuse(budget, "has a tensor of a form that torch 2 does not write", "save it again with a current torch")
    storage, offset, shape, strides = args[:4]
    _no_extras(budget, args[6] if len(args) == 7 else None)
    dtype = storage.dtype if type(storage) is Storage else None
    if dtype is None:
        _refuse(budget, "has a tensor without a typed storage", "save it again with a current torch")
    return _tensor(budget, storage.raw, dtype, offset, shape, strides)


def _tensor_v3(budget: Budget, args: tuple[Any, ...]) -> Tensor:
    if len(args) not in (7, 8):
        _refuse(budget, "has a tensor of a form that torch 2 does not write", "save it again with a current torch")
    storage, offset, shape, strides, _, _, named = args[:7]
    _no_extras(budget, args[7] if len(args) == 8 else None)
    dtype = named.name.removeprefix("torch.") if isinstance(named, Unknown) else ""
    if type(storage) is not Storage or dtype not in TORCH_DTYPES:
        _refuse(budget, "has a tensor of an unknown dtype", f"known are {', '.join(TORCH_DTYPES)}")
    return _tensor(budget, storage.raw, dtype, offset, shape, strides)


def _no_extras(budget: Budget, extras: Any) -> None:
    if extras:
        _refuse(budget, "has a lazily conjugated or negated tensor", "save tensor.resolve_conj().resolve_neg()")


def _tensor(budget: Budget, raw: bytes, dtype: str, offset: Any, shape: Any, strides: Any) -> Tensor:
    shape = _sizes(budget, shape, "a shape")
    strides = _sizes(budget, strides, "strides")
    held = np.dtype(TORCH_DTYPES[dtype])
    if len(shape) != len(strides) or not _is_size(offset):
        _refuse(budget, f"has a tensor whose shape {shown(shape)} does not fit its strides {shown(strides)}")
    numel = math.prod(shape)
    if not numel:
        return Tensor(dtype, _frozen(np.empty(shape, held)))
    room = len(raw) // held.itemsize
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if last >= room:
        _refuse(budget, f"has a tensor of shape {shown(shape)} that reaches beyond its storage of {room} elements")
    if numel > room:
        _refuse(
            budget,
            f"has a tensor of {numel} elements over a storage of {room}",
            "it is an expanded view; save tensor.contiguous()",
        )
    steps = tuple(
        stride * held.itemsize if size > 1 else held.itemsize for size, stride in zip(shape, strides, strict=True)
    )
    view: np.ndarray[Any, Any] = np.ndarray(shape, held, raw, offset * held.itemsize, steps)
    if not view.flags.c_contiguous:
        budget.spend(view.nbytes)
        view = view.copy(order="C")
    return Tensor(dtype, _frozen(view))


def _frozen(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


def _parameter(budget: Budget, args: tuple[Any, ...]) -> Tensor:
    if len(args) != 3 or type(args[0]) is not Tensor:
        _refuse(budget, "has a parameter without a tensor")
    return args[0]


def _size(budget: Budget, args: tuple[Any, ...]) -> tuple[int, ...]:
    if not args:
        return ()
    value = args[0]
    if (
        len(args) != 1
        or type(value) not in (tuple, list)
        or len(value) > _DIMENSIONS
        or not all(type(size) is int for size in value)
    ):
        _refuse(budget, "has a torch.Size of something else than integers")
    return tuple(value)


# numpy

_CODE = re.compile(r"b1|[iu][1248]|f[248]|c8|c16|O8?|[SU][1-9][0-9]{0,6}")


def is_code(code: str) -> bool:
    """Whether a numpy dtype, as kind and size ("i8", "U12"), may stand in a dump."""
    return _CODE.fullmatch(code) is not None and (code[0] not in "SU" or int(code[1:]) * 4 <= _ITEM)


def _dtype(budget: Budget, args: tuple[Any, ...]) -> _Dtype:
    code = args[0] if args else None
    if type(code) is not str or not is_code(code):
        _refuse(budget, f"has a numpy array of dtype {shown(code)}", "save numbers, bools, text or bytes")
    return _Dtype(code)


def build_dtype(budget: Budget, dtype: _Dtype, state: Any) -> None:
    """Give a dtype its byte order.

    Raises:
        ReproError: a structured, sub-array or dated dtype, or damage.
    """
    if (
        dtype.order is not None
        or type(state) is not tuple
        or len(state) != 8
        or any(part is not None for part in state[2:5])
    ):
        _refuse(budget, "has a numpy dtype with fields or metadata", "save numbers, bools, text or bytes")
    if type(state[1]) is not str or state[1] not in ("<", ">", "|"):
        _refuse(budget, f"has a numpy dtype of byte order {shown(state[1])}")
    dtype.order = "<" if state[1] == "|" else state[1]


def _reconstruct(budget: Budget, args: tuple[Any, ...]) -> np.ndarray[Any, Any]:
    if len(args) != 3 or not isinstance(args[0], Unknown):
        _refuse(budget, "has a numpy array of a form that is not known")
    if args[0].name != "numpy.ndarray":
        _refuse(budget, f"has a numpy array of class {args[0].name}", "save numpy.asarray(...) of it")
    return np.empty(0, np.uint8)


def build_array(budget: Budget, array: np.ndarray[Any, Any], state: Any) -> None:
    """Give an array its shape and content, in place: other places of the pickle may refer to it already.

    Raises:
        ReproError: shape and bytes do not fit, or an object array of other than plain scalars.
    """
    if type(state) is not tuple or len(state) != 5 or type(state[2]) is not _Dtype or type(state[3]) is not bool:
        _refuse(budget, "has a numpy array of a form that is not known")
    _, shape, kind, fortran, raw = state
    shape = _sizes(budget, shape, "a shape")
    dtype = kind.dtype()
    _check_content(budget, shape, dtype, raw)
    if dtype.str[0] == ">":  # numpy itself would swap some and keep others
        raw = little(np.frombuffer(raw, dtype)).tobytes()
        dtype = dtype.newbyteorder("<")
    array.__setstate__((1, shape, dtype, fortran, raw))
    _frozen(array)


SCALARS = frozenset({int, float, str, bool, bytes, type(None)})
"""The types that the elements of an object array may have."""


def _check_content(budget: Budget, shape: tuple[int, ...], dtype: np.dtype[Any], raw: Any) -> None:
    numel = math.prod(shape)
    if dtype.kind == "O":
        if type(raw) is not list or len(raw) != numel or not set(map(type, raw)) <= SCALARS:
            _refuse(budget, "has a numpy object array of other than plain scalars", "save lists or typed arrays")
        budget.spend(8 * numel)
    elif type(raw) is not bytes or len(raw) != numel * dtype.itemsize:
        held = len(raw) if type(raw) is bytes else "no"
        _refuse(budget, f"has a numpy array of shape {shown(shape)} and dtype {dtype.str} over {held} bytes")
    elif dtype.kind == "U" and numel:
        budget.spend(len(raw))
        if np.frombuffer(raw, dtype.byteorder.replace("=", "<") + "u4").max() > 0x10FFFF:
            _refuse(budget, "has a numpy text array of something else than text")


def _frombuffer(budget: Budget, args: tuple[Any, ...]) -> np.ndarray[Any, Any]:
    if len(args) not in (4, 5) or type(args[0]) not in (bytes, bytearray) or type(args[1]) is not _Dtype:
        _refuse(budget, "has a numpy array of a form that is not known")
    kind, shape, order = args[1:4]
    axes = args[4] if len(args) == 5 else None
    if type(order) is not str or order not in ("C", "F", "K") or (order == "K") == (axes is None):
        _refuse(budget, "has a numpy array of an order that is not known")
    budget.spend(len(args[0]))
    raw = bytes(args[0])
    shape = _sizes(budget, shape, "a shape")
    dtype = kind.dtype()
    if dtype.kind == "O":
        _refuse(budget, "has a numpy object array over bytes")
    _check_content(budget, shape, dtype, raw)
    flat = little(np.frombuffer(raw, dtype) if raw else np.empty(0, dtype))
    if order == "K":
        if type(axes) is not tuple or sorted(_sizes(budget, axes, "axes")) != list(range(len(shape))):
            _refuse(budget, "has a numpy array of an order that is not known")
        return _frozen(flat.reshape(shape).transpose(axes))
    return _frozen(flat.reshape(shape, order="F" if order == "F" else "C"))


def _scalar(budget: Budget, args: tuple[Any, ...]) -> Any:
    if len(args) != 2 or type(args[0]) is not _Dtype or args[0].code[0] == "O":
        _refuse(budget, "has a numpy scalar of a form that is not known")
    dtype = args[0].dtype()
    _check_content(budget, (), dtype, args[1])
    return np.frombuffer(args[1], dtype)[0]


# Python


def _ordered(budget: Budget, args: tuple[Any, ...]) -> OrderedDict[Any, Any]:
    ordered: OrderedDict[Any, Any] = OrderedDict()
    pairs = args[0] if len(args) == 1 else []
    if len(args) > 1 or type(pairs) is not list or not all(type(p) in (list, tuple) and len(p) == 2 for p in pairs):
        _refuse(budget, "has an OrderedDict of a form that is not known")
    budget.spend(_REBUILT * len(pairs))
    for key, value in pairs:
        check_key(key, budget)
        ordered[key] = value
    return ordered


def _elements(budget: Budget, args: tuple[Any, ...]) -> list[Any]:
    if not args:
        return []
    if len(args) != 1 or type(args[0]) not in (list, tuple):
        _refuse(budget, "has a set that is not made of a list")
    budget.spend(_REBUILT * len(args[0]))
    for key in args[0]:
        check_key(key, budget)
    return list(args[0])


def _set(budget: Budget, args: tuple[Any, ...]) -> set[Any]:
    return set(_elements(budget, args))


def _frozenset(budget: Budget, args: tuple[Any, ...]) -> frozenset[Any]:
    return frozenset(_elements(budget, args))


def _complex(budget: Budget, args: tuple[Any, ...]) -> complex:
    if len(args) != 2 or not all(type(part) is float for part in args):
        _refuse(budget, "has a complex number of other than two floats")
    return complex(*args)


def _encode(budget: Budget, args: tuple[Any, ...]) -> bytes:
    if len(args) != 2 or type(args[0]) is not str or type(args[1]) is not str or args[1] != "latin1":
        _refuse(budget, "has bytes in another encoding than latin1")
    budget.spend(len(args[0]))
    try:
        return args[0].encode("latin1")
    except UnicodeEncodeError:
        _refuse(budget, "has bytes that are no bytes")


def _bytes(budget: Budget, args: tuple[Any, ...]) -> bytes:
    if args:
        _refuse(budget, "makes bytes of something")
    return b""


def _bytearray(budget: Budget, args: tuple[Any, ...]) -> bytearray:
    if len(args) > 1 or (args and type(args[0]) is not bytes):
        _refuse(budget, "makes a bytearray of other than bytes")
    budget.spend(len(args[0]) if args else 0)
    return bytearray(*args)


def _reconstructor(budget: Budget, args: tuple[Any, ...]) -> Record:
    """How protocols below 2 make an object: of a class, its base `object` and None."""
    named, base, state = args if len(args) == 3 else (None, None, None)
    if (
        type(named) is not Unknown
        or not isinstance(base, Unknown)
        or base.name != "builtins.object"
        or state is not None
    ):
        _refuse(budget, "makes an object by copyreg of a built-in base", "save its plain fields")
    return Record(named.name, parts=named.parts)


def _newobj(budget: Budget, args: tuple[Any, ...]) -> Record:
    if not args or type(args[0]) is not Unknown:
        _refuse(budget, "makes an object by copyreg of no class")
    return Record(args[0].name, None, args[1:], parts=args[0].parts)


STORAGES = {
    "BFloat16Storage": "bfloat16",
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "ShortStorage": "int16",
    "UntypedStorage": None,
}
"""torch's classes of storages and the dtypes that they are of."""

_MAKERS: list[tuple[tuple[str, ...], str, _Make]] = [
    (("torch._utils",), "_rebuild_tensor_v2", _tensor_v2),
    (("torch._utils",), "_rebuild_tensor_v3", _tensor_v3),
    (("torch._utils",), "_rebuild_parameter", _parameter),
    (("torch",), "Size", _size),
    (("numpy",), "dtype", _dtype),
    (("numpy.core.multiarray", "numpy._core.multiarray"), "_reconstruct", _reconstruct),
    (("numpy.core.multiarray", "numpy._core.multiarray"), "scalar", _scalar),
    (("numpy.core.numeric", "numpy._core.numeric"), "_frombuffer", _frombuffer),
    (("collections",), "OrderedDict", _ordered),
    (("__builtin__", "builtins"), "set", _set),
    (("__builtin__", "builtins"), "frozenset", _frozenset),
    (("__builtin__", "builtins"), "complex", _complex),
    (("__builtin__", "builtins"), "bytes", _bytes),
    (("__builtin__", "builtins"), "bytearray", _bytearray),
    (("_codecs",), "encode", _encode),
    (("copy_reg", "copyreg"), "_reconstructor", _reconstructor),
    (("copy_reg", "copyreg"), "__newobj__", _newobj),
]

_PYTHON_3 = {"__builtin__": "builtins", "copy_reg": "copyreg"}

KNOWN: dict[tuple[str, str], Unknown] = {
    (module, name): Maker(
        f"{_PYTHON_3.get(module, module)}.{name}",
        make=make,
        plain=name == "OrderedDict",
        unbuilt=name == "_reconstruct",
    )
    for modules, name, make in _MAKERS
    for module in modules
} | {
    (module, name): _StorageClass(f"{module}.{name}", dtype=dtype)
    for name, dtype in STORAGES.items()
    for module in ("torch", "torch.storage", "torch.cuda")
}
"""By module and name, what a pickle may call."""
