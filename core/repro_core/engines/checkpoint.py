"""Checkpoints that resume bit for bit.

A checkpoint is one directory: the policy in Hugging Face's form (for other tools to read), ``state.safetensors`` with
every tensor of `Trainer.state`, and ``trainer.json`` with the format number, the configuration and the SHA-256 of every
other file (once of ``state.safetensors`` alone). It is written next to its place and renamed there whole: what has the
checkpoint's name is never half of one. (A kill between the two renames of a replacement leaves the old one as
``.NAME.PID.old``.)
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from repro_core.config import ModelConfig, TrainConfig
from repro_core.data.rollout_file import replace_file
from repro_core.model.hf_config import read_config

__all__ = [
    "FORMAT",
    "META",
    "CheckpointError",
    "check_architecture",
    "check_files",
    "check_settings",
    "digest_of",
    "fit",
    "load_checkpoint",
    "model_of",
    "read_meta",
    "restore_rng",
    "rng_state",
    "save_checkpoint",
]

FORMAT = 1
"""Raised when an older reader would misread the files; readers refuse a newer one."""

META = "trainer.json"
_STATE = "state.safetensors"
_FREE = ("initializer_range", "max_position_embeddings", "kv_channels", "attention_bias")
"""What of a model may differ from a checkpoint's: it takes no part in what the model computes, or is `_RESOLVED`."""
_RESOLVED = ("head_dim", "qkv_bias", "output_bias")
"""What a model makes of settings that may be left to the family."""


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
    if target.exists() and not (target / META).is_file() and (not target.is_dir() or any(target.iterdir())):
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
        digests = {path.name: digest_of(path) for path in sorted(fresh.iterdir())}
        meta = {"format": FORMAT, "config": dict(config), "sha256": digests}
        replace_file(fresh / META, (json.dumps(meta, indent=1, sort_keys=True) + "\n").encode())
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


def load_checkpoint(
    directory: str | Path, config: TrainConfig, model: ModelConfig, *, sampling: bool = False
) -> dict[str, Tensor]:
    """The state that `save_checkpoint` wrote.

    Args:
        directory: the checkpoint.
        config: of the run that goes on with it.
        model: which that run trains; not what `config` says of one where it starts from a Hugging Face checkpoint.
        sampling: whether it only samples, from the files in Hugging Face's form; a critic is not asked for then.

    Raises:
        CheckpointError: no checkpoint there, one of a newer format, of another model, dtype or policy, or one whose
            files are damaged or incomplete.
        repro_core.model.hf_config.HfError: its ``config.json`` cannot be read.
    """
    source = Path(directory)
    meta = read_meta(source, FORMAT, "torch")
    check_settings(source, meta["config"], config, critic=not sampling)
    digests = {_STATE: "", **meta["sha256"]}
    check_files(source, digests if sampling else {_STATE: digests[_STATE]})
    of_other_tools = meta["config"].get("hf_checkpoint") is not None
    if not of_other_tools:
        check_architecture(source, model_of(source, meta["config"]), model)
    elif config.hf_checkpoint is not None:  # one that is sampled from by itself has its own model
        check_architecture(source, read_config(source), model)
    try:
        return dict(load_file(str(source / _STATE)))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{source / _STATE} is unreadable ({error}): use another checkpoint") from None


# -- what every checkpoint is asked, whichever engine wrote it


def read_meta(source: Path, newest: int, policy: str) -> dict[str, Any]:
    """``trainer.json``, of which `format`, `config` and `sha256` are there.

    Raises:
        CheckpointError: there is none, it cannot be read, is newer than `newest`, or another policy wrote it.
    """
    if not (source / META).is_file():
        raise CheckpointError(f"{source} is no checkpoint (no {META}): give the directory that save wrote")
    try:
        meta = json.loads((source / META).read_text(encoding="utf-8"))
        written, writer = int(meta["format"]), dict(meta["config"]).get("policy", "torch")
        meta["sha256"] = dict(meta["sha256"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{source / META} is unreadable ({error}): use another checkpoint") from None
    if written > newest:
        raise CheckpointError(f"{source} has format {written}, this reader knows up to {newest}: update repro_core")
    if writer != policy:
        raise CheckpointError(f"{source} was saved with policy {writer!r}: load it with that")
    return dict(meta)


def model_of(source: Path, saved: Mapping[str, Any]) -> ModelConfig:
    """The model of a saved configuration.

    Raises:
        CheckpointError: it holds none.
    """
    try:
        return ModelConfig(**saved["model"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{source / META} is unreadable ({error}): use another checkpoint") from None


def check_settings(source: Path, saved: Mapping[str, Any], config: TrainConfig, *, critic: bool = True) -> None:
    """Refuse a checkpoint of another dtype, or one with a critic where there is none, or the other way round.

    Raises:
        CheckpointError: naming both sides; or the checkpoint does not say.
    """
    ours = config.to_mapping()
    for key in ("dtype", "advantage_estimator") if critic else ("dtype",):
        if key not in saved:
            raise CheckpointError(f"{source / META} is unreadable (no {key!r}): use another checkpoint")
        there, here = saved[key], ours[key]
        if there != here if key == "dtype" else (there == "ppo") != (here == "ppo"):
            raise CheckpointError(
                f"{source} does not fit: {key} is {there!r} there and {here!r} here; "
                "use the configuration that saved it"
            )


def check_architecture(source: Path, saved: ModelConfig, model: ModelConfig) -> None:
    """Refuse a checkpoint of another architecture, shapes alike or not: it would train on, and be another model.

    Raises:
        CheckpointError: naming a setting and both sides.
    """
    free = (*_FREE, "intermediate_size") if model.has_experts and saved.has_experts else _FREE
    for key in (*(field.name for field in fields(model) if field.name not in free), *_RESOLVED):
        if (there := getattr(saved, key)) != (here := getattr(model, key)):
            raise CheckpointError(
                f"{source} is of another architecture: model.{key} is {there!r} there and {here!r} here; "
                "use the configuration that saved it"
            )


def check_files(source: Path, digests: Mapping[str, str | None], *, whole: bool = True) -> None:
    """Refuse a checkpoint of which a file is missing or damaged.

    Args:
        source: the checkpoint.
        digests: SHA-256 of each file; None for one that differs between equal states.
        whole: False looks for the files without reading them.

    Raises:
        CheckpointError: naming the file.
    """
    for name, digest in digests.items():
        if not (source / name).is_file():
            raise CheckpointError(f"{source / name} is missing: fetch it, or use another checkpoint")
        if whole and digest is not None and digest_of(source / name) != digest:
            raise CheckpointError(f"{source / name} is damaged (its SHA-256 differs): use another checkpoint")


def digest_of(path: Path) -> str:
    """SHA-256 of a file, as hexadecimal digits.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path} is unreadable ({error}): use another checkpoint") from None


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
    kind, vector, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert not isinstance(vector, (int, str))
    return {
        "rng/torch": torch.get_rng_state(),
        "rng/python": _bytes([version, list(keys), gauss]),
        "rng/numpy": _bytes([kind, [int(w) for w in vector], int(position), int(has_gauss), float(cached)]),
    }


def restore_rng(state: Mapping[str, Tensor]) -> None:
    """Set the generators to what `rng_state` returned; other keys are left alone."""
    torch.set_rng_state(state["rng/torch"])
    version, keys, gauss = json.loads(bytes(state["rng/python"].tolist()))
    random.setstate((version, tuple(keys), gauss))
    kind, vector, position, has_gauss, cached = json.loads(bytes(state["rng/numpy"].tolist()))
    np.random.set_state((kind, np.array(vector, dtype=np.uint32), position, has_gauss, cached))


def _bytes(value: Any) -> Tensor:
    # JSON writes the shortest decimal that reads back as the same double, so a cached Gaussian survives bit for bit.
    return torch.tensor(list(json.dumps(value, separators=(",", ":")).encode()), dtype=torch.uint8)
