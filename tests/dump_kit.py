"""Dumps made byte by byte: archives with chosen pickles, storages and damage, and values that Hypothesis draws."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn

from repro_golden.base.errors import ReproError
from repro_golden.dumps.archive.reading import read_archive
from repro_golden.dumps.values import TORCH_DTYPES, Tensor

__all__ = [
    "ARRAY_DTYPES",
    "archive",
    "arrays",
    "plain_values",
    "refusal",
    "saved",
    "tensor_pickle",
    "tensors",
    "with_torch",
    "without_torch",
]


def saved(path: Path, value: Any, protocol: int = 2) -> Path:
    """A dump of torch.save."""
    torch.save(value, path, pickle_protocol=protocol)
    return path


def refusal(path: Path, **options: Any) -> str:
    """The one line that refuses a file: it names the file, and a cure after a colon."""
    with pytest.raises(ReproError) as caught:
        read_archive(path, **options)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(str(path))
    assert ": " in line.removeprefix(str(path))
    assert len(line) < len(str(path)) + 600
    return line


def archive(path: Path, pickle: bytes, storages: dict[str, bytes] | None = None, folder: str = "archive") -> Path:
    """A torch.save archive around any pickle.

    Args:
        path: the file to write.
        pickle: what `data.pkl` holds.
        storages: bytes by key.
        folder: the archive's own name.
    """
    with zipfile.ZipFile(path, "w") as made:
        made.writestr(f"{folder}/data.pkl", pickle)
        made.writestr(f"{folder}/byteorder", "little")
        for key, raw in (storages or {}).items():
            made.writestr(f"{folder}/data/{key}", raw)
        made.writestr(f"{folder}/version", "3\n")
    return path


def tensor_pickle(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    count: int,
    *,
    offset: int = 0,
    key: str = "0",
    storage: str = "FloatStorage",
) -> bytes:
    """The pickle of one tensor over a storage that claims `count` elements, whatever the numbers are."""

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(number(value) for value in values) + b"t"

    def number(value: int) -> bytes:
        raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return b"\x8a" + bytes([len(raw)]) + raw

    reference = (
        b"(" + text("storage") + f"ctorch\n{storage}\n".encode() + text(key) + text("cpu") + number(count) + b"tQ"
    )
    arguments = (
        b"(" + reference + number(offset) + numbers(shape) + numbers(strides) + b"\x89ccollections\nOrderedDict\n)Rt"
    )
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n" + arguments + b"R."


ARRAY_DTYPES = ("?", "<i4", "<i8", ">i4", "<u2", "<f2", "<f4", "<f8", ">f8", "<c8", "<U3", "|S4")
_SHAPES = stn.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)


@st.composite
def arrays(draw: st.DrawFn, dtypes: tuple[str, ...] = ARRAY_DTYPES) -> np.ndarray[Any, Any]:
    """Arrays of any of these dtypes: scalars, empty ones, transposed and sliced ones; floats of any bits."""
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    shape = draw(_SHAPES)
    size = int(np.prod(shape, dtype=int)) * dtype.itemsize
    if dtype.kind in "US":
        made = draw(stn.arrays(dtype, shape, elements=st.text("ab\u00e9\U0001f600", max_size=3).map(_fits(dtype))))
    elif dtype.kind == "b":
        made = draw(stn.arrays(dtype, shape))
    else:
        made = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), dtype).reshape(shape)
    form = draw(st.sampled_from(["as it is", "fortran", "transposed", "strided"]))
    if form == "fortran":
        return np.asfortranarray(made) if made.ndim else made
    if form == "transposed":
        return made.T
    return np.repeat(made, 2, axis=0)[::2] if form == "strided" and made.ndim else made


def _fits(dtype: np.dtype[Any]) -> Any:
    return (lambda text: text.encode("ascii", "ignore")) if dtype.kind == "S" else (lambda text: text)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Tensors of every dtype, of any bits."""
    name = draw(st.sampled_from(sorted(TORCH_DTYPES)))
    return Tensor(name, draw(arrays((TORCH_DTYPES[name],))))


_FLOATS = st.integers(0, (1 << 64) - 1).map(
    lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0]
) | st.sampled_from(
    [
        0.0,
        -0.0,
        float("inf"),
        -float("inf"),
        float("nan"),
        struct.unpack("<d", struct.pack("<Q", 0x7FF0000000000001))[0],
    ]
)
_INTEGERS = (
    st.integers()
    | st.integers(-(1 << 2100), 1 << 2100)
    | st.sampled_from(
        [sign * (1 << power) + by for power in (7, 8, 15, 16, 31, 32, 63) for sign in (1, -1) for by in (-1, 0, 1)]
    )
)
_TEXTS = st.text(st.characters(), max_size=8) | st.sampled_from(["\ud800", "a\udfffb", "\0", "\U0001f600", "torch\nx"])
_COMPLEX = st.builds(complex, _FLOATS, _FLOATS)
_SCALARS = st.one_of(st.none(), st.booleans(), _INTEGERS, _FLOATS, _TEXTS, st.binary(max_size=8))
_NUMPY_SCALARS = st.one_of(
    st.builds(np.float64, _FLOATS),
    st.integers(-5, 5).map(np.int32),
    st.booleans().map(np.bool_),
    st.builds(np.str_, st.just("ab")),
)
_KEYS = st.one_of(_TEXTS, st.integers(-3, 300), st.tuples(st.integers(0, 3), st.text(max_size=2)), st.booleans())


def plain_values(*, with_tensors: bool = True) -> st.SearchStrategy[Any]:
    """Whatever a dump may hold, but for records of foreign classes."""
    leaves = [_SCALARS, _COMPLEX, st.binary(max_size=5).map(bytearray), _NUMPY_SCALARS, arrays()]
    if with_tensors:
        leaves.append(tensors())
    return st.recursive(
        st.one_of(leaves),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.lists(inner, max_size=4).map(tuple),
            st.lists(_FLOATS, max_size=5),
            st.lists(_INTEGERS, max_size=5),
            st.dictionaries(_KEYS, inner, max_size=3),
            st.sets(_KEYS, max_size=3),
            st.frozensets(_KEYS, max_size=3),
        ),
        max_leaves=12,
    )


def with_torch(value: Any) -> Any:
    """A value with its `Tensor`s as torch tensors, for torch.save."""
    return _mapped(value, Tensor, lambda tensor: tensor.torch())


def without_torch(value: Any) -> Any:
    """What torch.load gave, with its tensors as `Tensor`s."""
    import torch

    return _mapped(value, torch.Tensor, Tensor.of)


def _mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, kind):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, kind, change) for item in value)
    return {key: _mapped(item, kind, change) for key, item in value.items()} if type(value) is dict else value
