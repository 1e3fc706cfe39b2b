"""A ``config.json`` that contradicts itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from repro.doctor.artefacts.kinds import HfConfig
from repro.doctor.facts.checkpoints.names import expert_count, layer_count, number, text_values
from repro.doctor.rule import Found, Rule, Severity, Where

__all__ = ["RULE"]


def _check(config: HfConfig) -> Iterator[Found]:
    values = text_values(config.values)
    if not isinstance(config.values.get("model_type"), str):
        said = "there is no model_type: AutoConfig cannot tell which model it is"
        yield Found(said, Where(str(config.path), item="model_type"), "warning", "likely")
    for said, key, severity in _contradictions(values):
        yield Found(said, Where(str(config.path), item=key, value=str(values.get(key))[:80]), severity)


def _contradictions(values: Mapping[str, Any]) -> Iterator[tuple[str, str, Severity | None]]:
    heads, groups = number(values.get("num_attention_heads")), number(values.get("num_key_value_heads"))
    hidden, layers = number(values.get("hidden_size")), layer_count(values)
    if heads and groups and heads % groups:
        yield f"{heads} attention heads cannot share {groups} key-value heads", "num_key_value_heads", None
    apart = any(values.get(key) for key in ("head_dim", "kv_lora_rank", "qk_rope_head_dim", "linear_num_key_heads"))
    if hidden and heads and hidden % heads and not apart:
        yield f"hidden_size {hidden} is not divisible by {heads} heads, and there is no head_dim", "hidden_size", None
    experts = expert_count(values)
    chosen = next(
        (n for key in ("num_experts_per_tok", "moe_topk", "top_k_experts") if (n := number(values.get(key)))), None
    )
    if experts and chosen and chosen > experts:
        yield f"{chosen} experts for each token, and there are {experts}", "num_experts_per_tok", None
    types = values.get("layer_types")
    if isinstance(types, list) and layers and len(types) < layers:
        yield f"layer_types has {len(types)} entries for {layers} layers", "layer_types", None
    words = number(values.get("vocab_size"))
    said = values.get("eos_token_id")
    for token in said if isinstance(said, list) else [said]:
        if words and type(token) is int and token >= words:
            yield (
                f"eos_token_id {token} is beyond vocab_size {words}: generation never ends on it",
                "eos_token_id",
                "warning",
            )


RULE = Rule(
    "hf-config", "A config.json that contradicts itself", (HfConfig,), "error", "certain",
    "the model cannot be built, or is another one than the weights are of",
    "take config.json from the model that was converted",
    ("slime guide: Debugging",), _check,
)  # fmt: skip
