"""Folders of Hugging Face: safetensors with their index, ``config.json``, and the tokenizer beside them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from repro.doctor.artefacts.bounded_json import read_object
from repro.doctor.artefacts.kinds import HfCheckpoint, HfConfig, Reader, TensorInfo, TensorStats
from repro.doctor.artefacts.safetensors_header import Placed, read_header
from repro.doctor.artefacts.tensor_bytes import WHOLE, read_elements, scan_elements
from repro.doctor.artefacts.tokenizer import has_tokenizer, read_tokenizer
from repro_golden.base.errors import ReproError

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
    return HfCheckpoint(
        path=folder,
        index=index,
        tensors={name: TensorInfo(shard, tensor.dtype, tensor.shape) for name, (shard, tensor) in placed.items()},
        shards=shards,
        unreadable=unreadable,
        total_size=total,
        config=config,
        read=functools.partial(_read_tensor, folder, placed),
        scan=_scanner(folder, placed),
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


def _read_tensor(folder: Path, placed: Mapping[str, tuple[str, Placed]], name: str) -> npt.NDArray[Any]:
    path, tensor = _placed(folder, placed, name)
    return read_elements(path, name, tensor)


class _scanner:  # noqa: N801 - a function that remembers
    def __init__(self, folder: Path, placed: Mapping[str, tuple[str, Placed]]) -> None:
        self._folder = folder
        self._tensors = placed
        self._whole = sum(tensor.end - tensor.start for _, tensor in placed.values()) <= WHOLE
        self._seen: dict[str, TensorStats] = {}

    def __call__(self, name: str) -> TensorStats:
        if name not in self._seen:
            path, tensor = _placed(self._folder, self._tensors, name)
            self._seen[name] = scan_elements(path, tensor, whole=self._whole)
        return self._seen[name]


def _fits(path: Path) -> bool:
    if path.is_dir():
        return (path / INDEX).exists() or _is_config(path / _CONFIG) or any(map(_is_model, _glob(path)))
    return path.name == INDEX or (_is_model(path) and path.is_file())


def _glob(path: Path) -> Iterator[Path]:
    yield from path.glob("model*.safetensors")


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
