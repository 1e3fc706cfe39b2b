"""Checkpoints in Hugging Face's layout: ``config.json`` and safetensors, in one file or in shards with an index."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from repro_core.config import ModelConfig
from repro_core.model import Policy
from repro_core.rollout_file import replace_file

__all__ = ["HfError", "load_hf", "save_hf"]

_SINGLE, _INDEX, _CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
_SHARDS = "model-?????-of-?????.safetensors"
_ARCHITECTURE = "Qwen2ForCausalLM"
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_EXPORT_AGAIN = "export the checkpoint again with save_pretrained"


class HfError(ValueError):
    """A checkpoint that cannot be read or written, in one line that names the cure."""


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
    (target / _CONFIG).unlink(missing_ok=True)
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
    # rope_theta at the top level is what transformers 4 reads, and transformers 5 still does.
    fixed = {
        "architectures": [_ARCHITECTURE],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "torch_dtype": _DTYPES[dtype],
    }
    _write_json(target / _CONFIG, {**asdict(policy.config), **fixed})


def load_hf(directory: str | os.PathLike[str]) -> Policy:
    """Read a Qwen2 checkpoint, with the tensors' own dtype, on the CPU.

    Raises:
        HfError: a file is missing or unreadable, the architecture is another, a feature is set that `model` does not
            have, or tensors are missing, unexpected, or of the wrong shape or dtype.
    """
    source = Path(directory)
    config = _read_config(source)
    tensors = _read_tensors(source)
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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise HfError(f"{path.parent} has no {path.name}: name a checkpoint directory, or {_EXPORT_AGAIN}") from error
    except OSError as error:
        raise HfError(f"cannot read {path} ({error.strerror}): check the path and its permissions") from error
    except ValueError as error:
        raise HfError(f"{path} is no JSON ({error}): {_EXPORT_AGAIN}") from error
    if not isinstance(value, dict):
        raise HfError(f"{path} must hold a JSON object, not {type(value).__name__}: {_EXPORT_AGAIN}")
    return value


def _read_config(source: Path) -> ModelConfig:
    """The model of a ``config.json``. Keys other than sizes default as transformers' Qwen2Config does."""
    path = source / _CONFIG
    values = _read_json(path)
    if values.get("architectures", [_ARCHITECTURE]) != [_ARCHITECTURE] or values.get("model_type") != "qwen2":
        found = values.get("architectures") or values.get("model_type")
        raise HfError(f"{path}: architecture is {found}, only {_ARCHITECTURE} is supported: use such a checkpoint")
    sizes = {key: _size(path, values, key) for key in _SIZES}
    if values.get("num_key_value_heads") is None:  # Qwen2Config reads an explicit null as plain multi-head attention
        if "num_key_value_heads" not in values:
            raise HfError(f"{path}: num_key_value_heads is missing: {_EXPORT_AGAIN}")
        values["num_key_value_heads"] = sizes["num_attention_heads"]
    config = ModelConfig(
        **sizes,
        num_key_value_heads=_size(path, values, "num_key_value_heads"),
        max_position_embeddings=_size(path, {"max_position_embeddings": 32768, **values}, "max_position_embeddings"),
        rms_norm_eps=_positive(path, "rms_norm_eps", values.get("rms_norm_eps", 1e-6)),
        initializer_range=_positive(path, "initializer_range", values.get("initializer_range", 0.02)),
        rope_theta=_rope_theta(path, values),
        tie_word_embeddings=values.get("tie_word_embeddings", False) is True,
    )
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    unsupported = [
        (values.get("hidden_act", "silu") != "silu", f"hidden_act {values.get('hidden_act')!r}"),
        (values.get("attention_dropout", 0.0) != 0.0, f"attention_dropout {values.get('attention_dropout')}"),
        (values.get("quantization_config") is not None, "quantization"),
        (_slides(values, config.num_hidden_layers), "sliding-window attention"),
        (config.hidden_size % heads != 0 or config.head_dim % 2 != 0, f"{heads} heads on {config.hidden_size} columns"),
        (heads % kv_heads != 0, f"{kv_heads} key-value heads under {heads} heads"),
        (values.get("head_dim") not in (None, config.head_dim), f"head_dim {values.get('head_dim')}"),
    ]
    for broken, what in unsupported:
        if broken:
            raise HfError(f"{path}: {what} is not supported: use a checkpoint without it")
    return config


def _size(path: Path, values: Mapping[str, Any], key: str) -> int:
    value = values.get(key)
    if type(value) is not int or value < 1:
        raise HfError(f"{path}: {key} must be an integer of at least 1, not {value!r}: {_EXPORT_AGAIN}")
    return value


def _positive(path: Path, key: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0.0 < value < math.inf:
        raise HfError(f"{path}: {key} must be a number greater than 0, not {value!r}: {_EXPORT_AGAIN}")
    return float(value)


def _rope_theta(path: Path, values: Mapping[str, Any]) -> float:
    """The rotary base: at the top level (transformers 4) or in ``rope_parameters`` (5); both must agree."""
    found = {} if values.get("rope_theta") is None else {"rope_theta": values["rope_theta"]}
    for key in ("rope_parameters", "rope_scaling"):
        rope = values.get(key) or {}
        if not isinstance(rope, dict):
            raise HfError(f"{path}: {key} must be an object, not {rope!r}: {_EXPORT_AGAIN}")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise HfError(f"{path}: {key} {json.dumps(rope)} is not supported: use a checkpoint with default RoPE")
        if rope.get("rope_theta") is not None:
            found[f"{key}.rope_theta"] = rope["rope_theta"]
    if values.get("partial_rotary_factor", 1.0) != 1.0:
        raise HfError(f"{path}: partial_rotary_factor is not supported: use a checkpoint with default RoPE")
    thetas = {_positive(path, key, value) for key, value in found.items()}
    if len(thetas) > 1:
        raise HfError(f"{path}: {' and '.join(f'{k} {v}' for k, v in found.items())} disagree: keep the right one")
    return thetas.pop() if thetas else 10000.0


def _slides(values: Mapping[str, Any], layers: int) -> bool:
    """Whether any layer attends through a sliding window."""
    if values.get("layer_types") is not None:
        return any(kind != "full_attention" for kind in values["layer_types"])
    window = values.get("sliding_window", 4096) if values.get("use_sliding_window", False) else None
    return window is not None and values.get("max_window_layers", 28) < layers


def _read_tensors(source: Path) -> dict[str, Tensor]:
    """All tensors of the single file, or of every shard that the index names."""
    single, index = source / _SINGLE, source / _INDEX
    if single.exists() and index.exists():
        raise HfError(f"{source} has both {_SINGLE} and {_INDEX}: remove the one that is stale")
    if single.exists():
        return _read_file(single)
    if not index.exists():
        raise HfError(f"{source} has neither {_SINGLE} nor {_INDEX}: fetch the weights, or {_EXPORT_AGAIN}")
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) and Path(name).name == name for name in weight_map.values()
    ):
        raise HfError(f"{index}: weight_map must give a file name in this directory per tensor: {_EXPORT_AGAIN}")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(weight_map.values())):
        if not (source / name).exists():
            raise HfError(f"{source / name} is missing, but {_INDEX} names it: fetch the shard, or {_EXPORT_AGAIN}")
        shard = _read_file(source / name)
        wanted = {key for key, file in weight_map.items() if file == name}
        if set(shard) != wanted:
            first = min(set(shard) ^ wanted)
            raise HfError(f"{source / name} and {_INDEX} disagree, first about {first}: {_EXPORT_AGAIN}")
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
        raise HfError(f"{source} {kind} {min(names)} ({len(names)} such tensors): {_EXPORT_AGAIN}")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != wanted[name]:
            shapes = f"{list(tensor.shape)}, but {_CONFIG} says {list(wanted[name])}"
            raise HfError(f"{source}: {name} has shape {shapes}: {_EXPORT_AGAIN}")
    if optional & tensors.keys():
        pair = [
            tensors[name].contiguous().view(torch.uint8) for name in ("lm_head.weight", "model.embed_tokens.weight")
        ]
        if not torch.equal(*pair):
            raise HfError(f"{source}: lm_head.weight is tied but differs from the embedding: set tie_word_embeddings")


def _one_dtype(tensors: Mapping[str, Tensor], where: str) -> torch.dtype:
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) != 1 or not dtypes <= _DTYPES.keys():
        found = ", ".join(sorted(map(str, dtypes)))
        raise HfError(f"{where}: weights are {found}, not all fp32, bf16 or fp16: convert them to one of the three")
    return dtypes.pop()
