"""Which layers are peers: a dense layer and one of experts are not, nor are two kinds of attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from repro.doctor.facts.checkpoints.names import expert_count, layer_count, number, text_values

__all__ = ["kind_of_layer"]


def kind_of_layer(values: Mapping[str, Any], layer: int, rests: Iterable[str]) -> str:
    """The kind of a layer, by the config where it says so, else by its tensors.

    Args:
        values: The config; empty where there is none.
        layer: Its number.
        rests: Names of its tensors behind the number.
    """
    text = text_values(values)
    count = layer_count(values)
    if count is not None and layer >= count:
        return "ahead"  # predicts further tokens: it has parts of its own
    types = text.get("layer_types")
    attention = types[layer] if isinstance(types, list) and layer < len(types) and isinstance(types[layer], str) else ""
    experts = _has_experts(text, layer)
    if experts is None:
        experts = any(part in rest for rest in rests for part in ("experts.", "router", "mlp.gate.", "moe."))
    return f"{attention[:40]} {'experts' if experts else 'dense'}".strip()


def _has_experts(text: Mapping[str, Any], layer: int) -> bool | None:
    """Whether the config gives a layer experts; None where it does not say."""
    if not expert_count(text):
        return None
    kinds = text.get("mlp_layer_types")
    if isinstance(kinds, list) and layer < len(kinds):
        return str(kinds[layer]) != "dense"
    dense = text.get("mlp_only_layers")
    if isinstance(dense, list) and layer in [one for one in dense if type(one) is int]:
        return False
    first, frequency = number(text.get("first_k_dense_replace")), text.get("moe_layer_freq")
    if isinstance(frequency, list):
        return bool(frequency[layer]) if layer < len(frequency) else None
    if first is not None:
        step = number(frequency) or 1
        return layer >= first and layer % step == 0
    sparse = number(text.get("decoder_sparse_step"))
    if sparse:
        return (layer + 1) % sparse == 0
    return None
