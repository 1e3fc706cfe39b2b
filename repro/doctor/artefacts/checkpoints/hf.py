"""Folders of Hugging Face: safetensors with their index, ``config.json``, and the tokenizer beside them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from repro.doctor.artefacts.bounded_json import read_object
from repro.doctor.artefacts.checkpoints.safetensors_header import BITS, Placed, read_header
from repro.doctor.artefacts.checkpoints.tokenizer import has_tokenizer, read_tokenizer
from repro.doctor.artefacts.kinds import HfCheckpoint, HfConfig, Reader, TensorInfo, TensorStats
from repro_golden.base.errors import ReproError
from repro_golden.dumps.values import Tensor

__all__ = ["CONFIG", "HF", "INDEX", "read_checkpoint", "read_config"]

INDEX = "model.safetensors.index.json"
_CONFIG = "config.json"
_CONFIG_LIMIT = 16 << 20
_FILES = 100_000


def read_config(path: Path) -> HfConfig:
    """A ``config.json``.

    Raises:
        ReproError: not readable, or no JSON object.
    """
    return HfConfig(path, read_object(path, _CONFIG_LIMIT))


def read_checkpoint(folder: Path, config: HfConfig | None = None) -> HfCheckpoint:
    """A folder of safetensors; what is corrupt in it stands in `unreadable`.

    Raises:
        ReproError: the folder cannot be read.
    """
    unreadable: dict[str, str] = {}
    index, total = _index(folder, unreadable)
    shards = _shards(folder, index)
    placed: dict[str, tuple[str, Placed]] = {}
    for shard in shards:
        try:
            header = read_header(folder / shard)
        except ReproError as error:
            unreadable[shard] = str(error)
            continue
        for name, tensor in header.items():
            if name not in placed or (index or {}).get(name) == shard:
                placed[name] = (shard, tensor)
    whole = sum(tensor.end - tensor.start for _, tensor in placed.values()) <= _WHOLE
    return HfCheckpoint(
        path=folder,
        index=index,
        tensors={name: TensorInfo(shard, tensor.dtype, tensor.shape) for name, (shard, tensor) in placed.items()},
        shards=shards,
        unreadable=unreadable,
        total_size=total,
        config=config,
        read=lambda name: _read_elements(*_placed(folder, placed, name), name),
        scan=functools.cache(lambda name: _scan_elements(*_placed(folder, placed, name), whole=whole)),
    )


def _index(folder: Path, unreadable: dict[str, str]) -> tuple[dict[str, str] | None, int | None]:
    """``weight_map`` and ``metadata.total_size``."""
    path = folder / INDEX
    if not path.exists():
        return None, None
    try:
        index = read_object(path)
        files = index.get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            unreadable[INDEX] = f"{path} has no weight_map from tensors to files: write it again"
            return None, None
    except ReproError as error:
        unreadable[INDEX] = str(error)
        return None, None
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return files, int(total) if isinstance(total, int | float) and 0 <= total < 1 << 62 else None


def _shards(folder: Path, index: Mapping[str, str] | None) -> tuple[str, ...]:
    """The safetensors files of the model: those that are called ``model*`` or that the index names; else all."""
    there = _names(folder)
    named = set((index or {}).values())
    model = [name for name in there if name.startswith("model") or name in named]
    return tuple(model or there)


def _names(folder: Path) -> list[str]:
    try:
        files = (entry for _, entry in zip(range(_FILES), folder.iterdir(), strict=False))
        return sorted(entry.name for entry in files if entry.name.endswith(".safetensors") and entry.is_file())
    except OSError as error:
        raise ReproError(f"{folder} cannot be read: {error}") from None


def _placed(folder: Path, placed: Mapping[str, tuple[str, Placed]], name: str) -> tuple[Path, Placed]:
    if name not in placed:
        raise ReproError(f"{folder} has no tensor {name!a}")
    shard, tensor = placed[name]
    return folder / shard, tensor


def _fits(path: Path) -> bool:
    if path.is_dir():
        models = path.glob("model*.safetensors")
        return (path / INDEX).exists() or _is_config(path / _CONFIG) or any(map(_is_model, models))
    return path.name == INDEX or (_is_model(path) and path.is_file())


def _is_model(path: Path) -> bool:
    return path.name.startswith("model") and path.name.endswith(".safetensors")


def _is_config(path: Path) -> bool:
    """Whether a ``config.json`` is a model's, as far as it can be read."""
    if path.name != _CONFIG or not path.is_file():
        return False
    if has_tokenizer(path.parent) or (path.parent / "generation_config.json").exists():
        return True
    with path.open("rb") as file:
        head = file.read(_CONFIG_LIMIT)
    return any(
        word in head for word in (b'"model_type"', b'"architectures"', b'"hidden_size"', b'"transformers_version"')
    )


def _read(path: Path) -> Iterator[object]:
    """The checkpoint, its config and its tokenizer, as far as they are there; then the first that is corrupt."""
    folder = path if path.is_dir() else path.parent
    problems: list[str] = []
    config = None
    if (folder / _CONFIG).exists():
        try:
            config = read_config(folder / _CONFIG)
        except ReproError as error:
            problems.append(str(error))
    if (folder / INDEX).exists() or _names(folder):
        yield read_checkpoint(folder, config)
    if config is not None:
        yield config
    if has_tokenizer(folder):
        try:
            yield read_tokenizer(folder)
        except ReproError as error:
            problems.append(str(error))
    if problems:
        raise ReproError("; ".join(problems))


HF = Reader(
    "Hugging Face checkpoint", _fits, _read,
    owns=("*.safetensors", "*.json", "*.txt", "*.jinja", "*.bin", "*.model", "*.py", "*.md"), beside=True,
)  # fmt: skip
"""A folder with safetensors or a model's ``config.json``; one of its shards or its index stands for the folder."""

CONFIG = Reader("config.json", _is_config, lambda path: [read_config(path)])
"""A model's ``config.json`` alone."""

# -- elements of tensors in safetensors files: widened to float32, and looked at in pieces without holding them


_WHOLE = 256 << 30
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


def _read_elements(path: Path, tensor: Placed, name: str) -> npt.NDArray[Any]:
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


def _scan_elements(path: Path, tensor: Placed, *, whole: bool) -> TensorStats:
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
    size = BITS[tensor.dtype]
    unsigned = np.dtype(bits.unsigned if bits else f"<u{size // 8}" if size in (8, 16, 32, 64) else "|u1")
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
