"""Checkpoints in Hugging Face's layout: ``config.json`` and safetensors, in one file or in shards with an index."""

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

from repro_core.config import ModelConfig
from repro_core.data.rollout_file import replace_file
from repro_core.model.decoder import Policy
from repro_core.model.hf_config import CONFIG, EXPORT_AGAIN, HfError, config_values, read_config, read_json

__all__ = ["HfError", "load_hf", "read_tensors", "save_hf"]

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARDS = "model-?????-of-?????.safetensors"
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def save_hf(policy: Policy, directory: str | os.PathLike[str], *, max_shard_bytes: int = 5_000_000_000) -> None:
    """Write `policy` so that transformers and `load_hf` read it. Equal weights give equal bytes.

    Tensors keep their dtype and bits; a tied ``lm_head.weight`` is left out. An older checkpoint in the directory is
    replaced; other files stay. ``config.json`` goes first and comes back last, so that a directory where a kill left
    a mixture is refused instead of read.

    Args:
        policy: fp32, bf16 or fp16 throughout.
        directory: made if missing.
        max_shard_bytes: most bytes of tensors in one file; a single larger tensor gets a file of its own.

    Raises:
        HfError: the policy's dtype is mixed or is not one of the three.
    """
    target = Path(directory)
    tensors = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in policy.state_dict().items()
        if not (policy.config.tie_word_embeddings and name == "lm_head.weight")
    }
    dtype = _one_dtype(tensors, f"cannot write {target}")
    target.mkdir(parents=True, exist_ok=True)
    (target / CONFIG).unlink(missing_ok=True)
    for stale in [target / _SINGLE, target / _INDEX, *target.glob(_SHARDS)]:
        stale.unlink(missing_ok=True)
    shards = _shards(tensors, max_shard_bytes)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names if len(shards) > 1 else [_SINGLE], shards, strict=True):
        # transformers insists on this key; a second one would make the bytes random (safetensors writes no order).
        replace_file(target / name, save(shard, metadata={"format": "pt"}))
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        _write_json(target / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(target / CONFIG, {**config_values(policy.config), "torch_dtype": _DTYPES[dtype]})


def load_hf(directory: str | os.PathLike[str]) -> Policy:
    """Read a Qwen2, Qwen3 or Qwen3-MoE checkpoint, with the tensors' own dtype, on the CPU.

    Raises:
        HfError: a file is missing or unreadable, the architecture is another, a feature is set that `model` does not
            have, or tensors are missing, unexpected, or of the wrong shape or dtype.
    """
    source = Path(directory)
    config = read_config(source)
    tensors = read_tensors(source)
    with torch.device("meta"):
        wanted = Policy(config).state_dict()
    _check_tensors(source, tensors, {name: tuple(tensor.shape) for name, tensor in wanted.items()}, config)
    policy = Policy(config).to(_one_dtype(tensors, str(source)))
    # Copied, not assigned: a tensor read from the file lies in mapped memory at any alignment, and BLAS may order its
    # sums by alignment.
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            parameter.copy_(tensors[name])
    return policy


def _shards(tensors: Mapping[str, Tensor], max_bytes: int) -> list[dict[str, Tensor]]:
    """Fill shards in the order of `tensors`, opening a new one when the next tensor would not fit."""
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        if shards[-1] and used + tensor.nbytes > max_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += tensor.nbytes
    return shards


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    replace_file(path, (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode())


def read_tensors(source: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint under the names in its files: of the single one, or of every shard of the index.

    Raises:
        HfError: a file is missing, unreadable, or disagrees with the index.
    """
    single, index = source / _SINGLE, source / _INDEX
    if single.exists() and index.exists():
        raise HfError(f"{source} has both {_SINGLE} and {_INDEX}: remove the one that is stale")
    if single.exists():
        return _read_file(single)
    if not index.exists():
        raise HfError(f"{source} has neither {_SINGLE} nor {_INDEX}: fetch the weights, or {EXPORT_AGAIN}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) and Path(name).name == name for name in weight_map.values()
    ):
        raise HfError(f"{index}: weight_map must give a file name in this directory per tensor: {EXPORT_AGAIN}")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(weight_map.values())):
        if not (source / name).exists():
            raise HfError(f"{source / name} is missing, but {_INDEX} names it: fetch the shard, or {EXPORT_AGAIN}")
        shard = _read_file(source / name)
        wanted = {key for key, file in weight_map.items() if file == name}
        if set(shard) != wanted:
            first = min(set(shard) ^ wanted)
            raise HfError(f"{source / name} and {_INDEX} disagree, first about {first}: {EXPORT_AGAIN}")
        tensors.update(shard)
    return tensors


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except OSError as error:
        raise HfError(f"cannot read {path} ({error.strerror or error}): check the path and its permissions") from error
    except SafetensorError as error:
        raise HfError(f"{path} is truncated or no safetensors file ({error}): fetch it again") from error


def _check_tensors(
    source: Path, tensors: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]], config: ModelConfig
) -> None:
    optional = {"lm_head.weight"} if config.tie_word_embeddings else set()
    missing, unexpected = wanted.keys() - tensors.keys() - optional, tensors.keys() - wanted.keys()
    if missing or unexpected:
        kind, names = ("lacks", missing) if missing else ("has unexpected", unexpected)
        raise HfError(f"{source} {kind} {min(names)} ({len(names)} such tensors): {EXPORT_AGAIN}")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != wanted[name]:
            shapes = f"{list(tensor.shape)}, but {CONFIG} says {list(wanted[name])}"
            raise HfError(f"{source}: {name} has shape {shapes}: {EXPORT_AGAIN}")
    if optional & tensors.keys():
        pair = [
            tensors[name].contiguous().view(torch.uint8) for name in ("lm_head.weight", "model.embed_tokens.weight")
        ]
        if not torch.equal(*pair):
            raise HfError(f"{source}: lm_head.weight is tied but differs from the embedding: set tie_word_embeddings")


def _one_dtype(tensors: Mapping[str, Tensor], where: str) -> torch.dtype:
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) != 1 or not dtypes <= _DTYPES.keys():
        names = ", ".join(sorted(map(str, dtypes)))
        raise HfError(f"{where}: weights are {names}, not all fp32, bf16 or fp16: convert them to one of the three")
    return dtypes.pop()
