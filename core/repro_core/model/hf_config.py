"""The ``config.json`` of Hugging Face's Qwen2, Qwen3 and Qwen3-MoE, to and from a `ModelConfig`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from repro_core.config import ModelConfig

__all__ = ["CONFIG", "EXPORT_AGAIN", "HfError", "config_values", "read_config", "read_json"]

CONFIG = "config.json"
EXPORT_AGAIN = "export the checkpoint again with save_pretrained"

_Family = Literal["qwen2", "qwen3", "qwen3_moe"]
_ARCHITECTURES: dict[_Family, str] = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_WRITTEN = (
    *_SIZES,
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_theta",
    "max_position_embeddings",
    "tie_word_embeddings",
    "initializer_range",
)
_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")


class HfError(ValueError):
    """A checkpoint that cannot be read or written, in one line that names the cure."""


def config_values(config: ModelConfig) -> dict[str, Any]:
    """What ``config.json`` says about the model, but for the dtype; transformers 4 and 5 both read it."""
    # rope_theta at the top level is what transformers 4 reads, and transformers 5 still does.
    values: dict[str, Any] = {key: getattr(config, key) for key in _WRITTEN} | {
        "architectures": [_ARCHITECTURES[config.model_type]],
        "model_type": config.model_type,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "use_sliding_window": False,
    }
    if config.model_type != "qwen2":
        values |= {"head_dim": config.head_dim, "attention_bias": config.output_bias}
    if config.has_experts:
        values |= {key: getattr(config, key) for key in _EXPERTS} | {"decoder_sparse_step": 1, "mlp_only_layers": []}
    return values


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of the checkpoint.

    Raises:
        HfError: missing, unreadable, or something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise HfError(f"{path.parent} has no {path.name}: name a checkpoint directory, or {EXPORT_AGAIN}") from error
    except OSError as error:
        raise HfError(f"cannot read {path} ({error.strerror}): check the path and its permissions") from error
    except ValueError as error:
        raise HfError(f"{path} is no JSON ({error}): {EXPORT_AGAIN}") from error
    if not isinstance(value, dict):
        raise HfError(f"{path} must hold a JSON object, not {type(value).__name__}: {EXPORT_AGAIN}")
    return value


def read_config(source: Path) -> ModelConfig:
    """The model of a checkpoint's ``config.json``. Keys other than sizes default as in transformers' own classes.

    Raises:
        HfError: it is unreadable, of another architecture, contradicts itself, or asks for what `model` has not.
    """
    path = source / CONFIG
    values = read_json(path)
    family = _family(path, values)
    sizes: dict[str, Any] = {key: _size(path, values, key) for key in _SIZES}
    heads = sizes["num_attention_heads"]
    if values.get("num_key_value_heads") is None:  # the dense classes read an explicit null as one per query head
        if "num_key_value_heads" not in values:
            raise HfError(f"{path}: num_key_value_heads is missing: {EXPORT_AGAIN}")
        if family != "qwen3_moe":
            values["num_key_value_heads"] = heads
    config = ModelConfig(
        **sizes,
        model_type=family,
        num_key_value_heads=_size(path, values, "num_key_value_heads"),
        max_position_embeddings=_size(path, {"max_position_embeddings": 32768, **values}, "max_position_embeddings"),
        rms_norm_eps=_positive(path, "rms_norm_eps", values.get("rms_norm_eps", 1e-6)),
        initializer_range=_positive(path, "initializer_range", values.get("initializer_range", 0.02), or_zero=True),
        rope_theta=_rope_theta(path, values),
        tie_word_embeddings=values.get("tie_word_embeddings", False) is True,
        **(_experts(path, values) if family == "qwen3_moe" else {}),
        **({} if family == "qwen2" else _qwen3_attention(path, values, family, sizes["hidden_size"], heads)),
    )
    kv_heads = config.num_key_value_heads
    unsupported = [
        (values.get("hidden_act", "silu") != "silu", f"hidden_act {values.get('hidden_act')!r}"),
        (values.get("attention_dropout", 0.0) != 0.0, f"attention_dropout {values.get('attention_dropout')}"),
        (values.get("quantization_config") is not None, "quantization"),
        (_slides(values, config), "sliding-window attention"),
        (
            config.kv_channels is None and config.hidden_size % (2 * heads) != 0,
            f"{heads} heads on {config.hidden_size} columns",
        ),
        (heads % kv_heads != 0, f"{kv_heads} key-value heads under {heads} heads"),
        (values.get("head_dim") not in (None, config.head_dim), f"head_dim {values.get('head_dim')}"),
    ]
    for broken, what in unsupported:
        if broken:
            raise HfError(f"{path}: {what} is not supported: use a checkpoint without it")
    for holds, message in config.rules():
        if not holds:
            raise HfError(f"{path}: {message}: {EXPORT_AGAIN}")
    return config


def _family(path: Path, values: Mapping[str, Any]) -> _Family:
    """The model type, which `architectures` must confirm where it stands."""
    for family, architecture in _ARCHITECTURES.items():
        if values.get("model_type") == family and values.get("architectures", [architecture]) == [architecture]:
            return family
    description = " of model_type ".join(str(values[key]) for key in ("architectures", "model_type") if values.get(key))
    *most, last = _ARCHITECTURES.values()
    raise HfError(
        f"{path}: architecture is {description or None}, only {', '.join(most)} and {last} are supported: "
        "use such a checkpoint"
    )


def _qwen3_attention(path: Path, values: Mapping[str, Any], family: _Family, hidden: int, heads: int) -> dict[str, Any]:
    """Width of a head and biases. Without head_dim Qwen3Config takes 128, and Qwen3MoeConfig hidden / heads."""
    even = hidden % heads == 0
    width: int | None = None
    if "head_dim" in values or family == "qwen3":
        width = _size(path, {"head_dim": 128, **values}, "head_dim")
        if width % 2:
            raise HfError(f"{path}: head_dim {width} is not supported: use a checkpoint with an even one")
    return {
        "kv_channels": None if even and width == hidden // heads else width,
        "attention_bias": _flag(path, values, "attention_bias") or None,
    }


def _experts(path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of experts. transformers 4 writes num_experts, transformers 5 num_local_experts."""
    counts = {key: _size(path, values, key) for key in ("num_experts", "num_local_experts") if key in values}
    if len(set(counts.values())) > 1:
        raise HfError(f"{path}: {' and '.join(f'{k} {v}' for k, v in counts.items())} disagree: keep the right one")
    if values.get("decoder_sparse_step", 1) != 1 or values.get("mlp_only_layers"):
        settings = {key: values[key] for key in ("decoder_sparse_step", "mlp_only_layers") if key in values}
        raise HfError(
            f"{path}: layers without experts ({json.dumps(settings)}) are not supported: "
            "use a checkpoint whose layers all have experts"
        )
    return {
        "num_experts": min(counts.values()) if counts else _size(path, values, "num_experts"),
        "num_experts_per_tok": _size(path, values, "num_experts_per_tok"),
        "moe_intermediate_size": _size(path, values, "moe_intermediate_size"),
        "norm_topk_prob": _flag(path, values, "norm_topk_prob"),
    }


def _flag(path: Path, values: Mapping[str, Any], key: str) -> bool:
    value = values.get(key, False)
    if type(value) is not bool:
        raise HfError(f"{path}: {key} must be true or false, not {value!r}: {EXPORT_AGAIN}")
    return value


def _size(path: Path, values: Mapping[str, Any], key: str) -> int:
    value = values.get(key)
    if type(value) is not int or value < 1:
        raise HfError(f"{path}: {key} must be an integer of at least 1, not {value!r}: {EXPORT_AGAIN}")
    return value


def _positive(path: Path, key: str, value: Any, *, or_zero: bool = False) -> float:
    if type(value) not in (int, float) or not (0.0 < value < math.inf or (or_zero and value == 0.0)):
        raise HfError(f"{path}: {key} must be a number greater than 0, not {value!r}: {EXPORT_AGAIN}")
    return float(value)


def _rope_theta(path: Path, values: Mapping[str, Any]) -> float:
    """The rotary base: at the top level (transformers 4) or in ``rope_parameters`` (5); both must agree."""
    by_key = {} if values.get("rope_theta") is None else {"rope_theta": values["rope_theta"]}
    for key in ("rope_parameters", "rope_scaling"):
        rope = values.get(key) or {}
        if not isinstance(rope, dict):
            raise HfError(f"{path}: {key} must be an object, not {rope!r}: {EXPORT_AGAIN}")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise HfError(f"{path}: {key} {json.dumps(rope)} is not supported: use a checkpoint with default RoPE")
        if rope.get("rope_theta") is not None:
            by_key[f"{key}.rope_theta"] = rope["rope_theta"]
    if values.get("partial_rotary_factor", 1.0) != 1.0:
        raise HfError(f"{path}: partial_rotary_factor is not supported: use a checkpoint with default RoPE")
    thetas = {_positive(path, key, value) for key, value in by_key.items()}
    if len(thetas) > 1:
        raise HfError(f"{path}: {' and '.join(f'{k} {v}' for k, v in by_key.items())} disagree: keep the right one")
    return thetas.pop() if thetas else 10000.0


def _slides(values: Mapping[str, Any], config: ModelConfig) -> bool:
    """Whether any layer attends through a sliding window."""
    window = values.get("sliding_window", 4096) if values.get("use_sliding_window", False) else None
    if config.has_experts and window is not None:  # Qwen3MoeModel asks nothing else
        return True
    if values.get("layer_types") is not None:
        return any(kind != "full_attention" for kind in values["layer_types"])
    return window is not None and values.get("max_window_layers", 28) < config.num_hidden_layers
