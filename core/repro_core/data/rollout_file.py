"""A rollout as one canonical file: equal content, equal bytes.

safetensors with a single metadata key, ``rollout``, that holds canonical JSON of ``{"format": 1, **meta}`` (several
metadata keys would be written in random order). safetensors orders tensors by dtype and name, so neither insertion
order nor the file's name leaves a trace.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from repro_core.contract import Rollout

__all__ = ["FORMAT", "RolloutError", "read_rollout", "replace_file", "write_rollout"]

FORMAT = 1
"""The file's format number. Readers refuse a newer one and read all older ones."""

_DTYPES = {
    "tokens": torch.int64,
    "total_lengths": torch.int64,
    "response_lengths": torch.int64,
    "loss_mask": torch.int64,
    "rollout_log_probs": torch.float32,
    "rewards": torch.float32,
    "group_index": torch.int64,
}
_ROUTED, _ROUTED_DTYPES = "routed_experts", (torch.uint8, torch.int16)
_META = ("rollout_id", "prompts", "labels", "statuses", "sampling")
_RECORD_AGAIN = "fetch or record the rollout again"


class RolloutError(ValueError):
    """A rollout that cannot be read or written, in one line that names the cure."""


def write_rollout(path: str | os.PathLike[str], rollout: Rollout) -> None:
    """Write `rollout` to `path` whole or not at all. Values are kept bit for bit, NaN payloads and -0.0 included.

    Raises:
        RolloutError: the rollout breaks the layout of `repro_core.Rollout`, or its meta is no plain JSON.
    """
    target = Path(path)
    _check(rollout.meta, rollout.tensors, f"cannot write {target}", "mend the recorder")
    meta = _canonical({"format": FORMAT, **rollout.meta}, target)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in rollout.tensors.items()}
    replace_file(target, save(tensors, metadata={"rollout": meta}))


def read_rollout(path: str | os.PathLike[str]) -> Rollout:
    """Read what `write_rollout` wrote.

    Raises:
        RolloutError: the file is missing, truncated, foreign, of a newer format, or its content does not add up.
    """
    source = Path(path)
    try:
        with safe_open(source, framework="pt") as file:
            text = (file.metadata() or {}).get("rollout")
            # Cloned: a tensor read from the file lies in mapped memory at any alignment, and BLAS may order its sums
            # by alignment.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - no mapping
    except OSError as error:
        raise RolloutError(f"cannot read {source} ({error.strerror or error}): {_RECORD_AGAIN}") from error
    except SafetensorError as error:
        raise RolloutError(f"{source} is truncated or no safetensors file ({error}): {_RECORD_AGAIN}") from error
    if text is None:
        raise RolloutError(f"{source} has no 'rollout' metadata, so it is no rollout file: {_RECORD_AGAIN}")
    try:
        meta = json.loads(text)
    except ValueError as error:
        raise RolloutError(f"{source}: the 'rollout' metadata is no JSON ({error}): {_RECORD_AGAIN}") from error
    number = meta.pop("format", None) if isinstance(meta, dict) else None
    if type(number) is not int or number < 1:
        raise RolloutError(f"{source}: the 'rollout' metadata has no format number: {_RECORD_AGAIN}")
    if number > FORMAT:
        raise RolloutError(f"{source} has format {number}, this version reads up to {FORMAT}: install a newer repro")
    _check(meta, tensors, str(source), _RECORD_AGAIN)
    return Rollout(meta, tensors)


def replace_file(path: Path, data: bytes) -> None:
    """Make `data` the content of `path`, through a temporary file beside it: a kill leaves the old file or the new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _canonical(meta: Mapping[str, Any], target: Path) -> str:
    """JSON with one spelling per value. NaN and infinities have none and are refused."""
    try:
        text = json.dumps(meta, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        same = json.loads(text) == meta
        text.encode("utf-8")
    except (TypeError, ValueError) as error:
        raise RolloutError(f"cannot write {target}: meta is no plain JSON ({error}): mend the recorder") from error
    if not same:  # such as tuples, or numbers as keys, which JSON would give back as something else
        raise RolloutError(f"cannot write {target}: meta does not survive JSON: use lists and string keys only")
    return text


def _check(meta: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str, fix: str) -> None:
    """Hold content against the layout that `repro_core.Rollout` documents."""
    for key in _META:
        if key not in meta:
            raise RolloutError(f"{where}: meta lacks {key!r}: {fix}")
    if "format" in meta:
        raise RolloutError(f"{where}: meta must not hold 'format', the file's own number: {fix}")
    for name, dtype in _DTYPES.items():
        if name not in tensors:
            raise RolloutError(f"{where}: tensor {name!r} is missing: {fix}")
        if tensors[name].dtype != dtype or tensors[name].ndim != 1:
            actual = f"{tensors[name].dtype} {list(tensors[name].shape)}"
            raise RolloutError(f"{where}: tensor {name!r} must be {dtype} with one dimension, not {actual}: {fix}")
    routed = tensors.get(_ROUTED)
    if routed is not None and (routed.dtype not in _ROUTED_DTYPES or routed.ndim != 3 or 0 in routed.shape[1:]):
        actual = f"{routed.dtype} {list(routed.shape)}"
        raise RolloutError(f"{where}: {_ROUTED} must be uint8 or int16 [tokens, layers, top-k], not {actual}: {fix}")
    if routed is not None and bool((routed < 0).any()):
        raise RolloutError(f"{where}: {_ROUTED} holds negative numbers: {fix}")
    totals, responses = tensors["total_lengths"], tensors["response_lengths"]
    if len(totals) == len(responses) and bool(((responses < 0) | (totals < responses)).any()):
        raise RolloutError(f"{where}: response_lengths must lie between 0 and total_lengths: {fix}")
    wanted = {
        "tokens": ("the sum of total_lengths", int(totals.sum())),
        "response_lengths": ("one per sample", len(totals)),
        "loss_mask": ("the sum of response_lengths", int(responses.sum())),
        "rollout_log_probs": ("the sum of response_lengths", int(responses.sum())),
        "rewards": ("one per sample", len(totals)),
        "group_index": ("one per sample", len(totals)),
    }
    if routed is not None:
        wanted[_ROUTED] = ("the sum of total_lengths", int(totals.sum()))
    for name, (rule, length) in wanted.items():
        if len(tensors[name]) != length:
            raise RolloutError(f"{where}: {name} has {len(tensors[name])} entries, not {length} ({rule}): {fix}")
