"""Checkpoints that resume bit for bit.

A checkpoint is one directory: the policy in Hugging Face's form (for other tools to read), ``state.safetensors`` with
every tensor of `Trainer.state`, and ``trainer.json`` with the format number, the configuration and the SHA-256 of
``state.safetensors``. It is written next to its place and renamed there whole: what has the checkpoint's name is never
half of one. (A kill between the two renames of a replacement leaves the old one as ``.NAME.PID.old``.)
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from repro_core.data.rollout_file import replace_file

__all__ = ["FORMAT", "CheckpointError", "fit", "load_checkpoint", "restore_rng", "rng_state", "save_checkpoint"]

FORMAT = 1
"""Raised when an older reader would misread the files; readers refuse a newer one."""

_STATE, _META = "state.safetensors", "trainer.json"


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or resumed from, in one line that names the cure."""


def save_checkpoint(
    directory: str | Path,
    state: Mapping[str, Tensor],
    config: Mapping[str, Any],
    write_weights: Callable[[Path], None],
) -> None:
    """Write a checkpoint, replacing an older one at the same place.

    Args:
        directory: its parents are made.
        state: tensors by name.
        config: JSON types, for the reader's information.
        write_weights: writes the policy's own files into the directory that it is given.

    Raises:
        CheckpointError: something that is no checkpoint lies at `directory`; it is left alone.
        OSError: the disk refuses.
    """
    target = Path(directory)
    if target.exists() and not (target / _META).is_file() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is no checkpoint: choose another directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.{os.getpid()}.new")
    stale = target.with_name(f".{target.name}.{os.getpid()}.old")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        write_weights(fresh)
        # Cloned: safetensors refuses tensors that share storage, and views may.
        data = save({name: value.detach().cpu().contiguous().clone() for name, value in state.items()})
        replace_file(fresh / _STATE, data)
        meta = {"format": FORMAT, "config": dict(config), "sha256": {_STATE: hashlib.sha256(data).hexdigest()}}
        replace_file(fresh / _META, (json.dumps(meta, indent=1, sort_keys=True) + "\n").encode())
        if target.exists():
            target.rename(stale)
        try:
            fresh.rename(target)
        except OSError:
            if stale.exists():
                stale.rename(target)
            raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(stale, ignore_errors=True)


def load_checkpoint(directory: str | Path) -> dict[str, Tensor]:
    """The state that `save_checkpoint` wrote.

    Raises:
        CheckpointError: no checkpoint there, one of a newer format, or one whose files are damaged or incomplete.
    """
    source = Path(directory)
    if not (source / _META).is_file():
        raise CheckpointError(f"{source} is no checkpoint (no {_META}): give the directory that save wrote")
    try:
        meta = json.loads((source / _META).read_text())
        written, policy = int(meta["format"]), meta["config"].get("policy", "torch")
        digest = str(meta["sha256"].get(_STATE))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{source / _META} is unreadable ({error}): use another checkpoint") from None
    if policy != "torch":
        raise CheckpointError(f"{source} was saved with policy {policy!r}: load it with that")
    if written > FORMAT:
        raise CheckpointError(f"{source} has format {written}, this reader knows up to {FORMAT}: update repro_core")
    try:
        if hashlib.sha256((source / _STATE).read_bytes()).hexdigest() != digest:
            raise CheckpointError(f"{source / _STATE} is damaged (its SHA-256 differs): use another checkpoint")
        return dict(load_file(str(source / _STATE)))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{source / _STATE} is unreadable ({error}): use another checkpoint") from None


def fit(directory: str, saved: Mapping[str, Tensor], current: Mapping[str, Tensor]) -> None:
    """Refuse a checkpoint that holds other tensors than a run of ours has.

    Random generators may differ in size, and columns of a half-trained rollout may be there or not.

    Args:
        directory: the checkpoint's, for the message.
        saved: what it holds.
        current: what it must hold.

    Raises:
        CheckpointError: a tensor is missing, unexpected, or of another dtype or shape.
    """
    for name in sorted(saved.keys() | current.keys()):
        theirs, ours = _kind(saved.get(name)), _kind(current.get(name))
        if theirs != ours and not name.startswith(("rng/", "rollout/")):
            raise CheckpointError(
                f"{directory} does not fit: {name} is {theirs} there and {ours} here; "
                "use the configuration that saved it"
            )


def _kind(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def rng_state() -> dict[str, Tensor]:
    """The global generators of torch (CPU), Python and NumPy as uint8 tensors, named ``rng/...``."""
    version, keys, gauss = random.getstate()
    kind, words, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert not isinstance(words, (int, str))
    return {
        "rng/torch": torch.get_rng_state(),
        "rng/python": _bytes([version, list(keys), gauss]),
        "rng/numpy": _bytes([kind, [int(w) for w in words], int(position), int(has_gauss), float(cached)]),
    }


def restore_rng(state: Mapping[str, Tensor]) -> None:
    """Set the generators to what `rng_state` returned; other keys are left alone."""
    torch.set_rng_state(state["rng/torch"])
    version, keys, gauss = json.loads(bytes(state["rng/python"].tolist()))
    random.setstate((version, tuple(keys), gauss))
    kind, words, position, has_gauss, cached = json.loads(bytes(state["rng/numpy"].tolist()))
    np.random.set_state((kind, np.array(words, dtype=np.uint32), position, has_gauss, cached))


def _bytes(value: Any) -> Tensor:
    # JSON writes the shortest decimal that reads back as the same double, so a cached Gaussian survives bit for bit.
    return torch.tensor(list(json.dumps(value, separators=(",", ":")).encode()), dtype=torch.uint8)
