"""Models of the Qwen3 family, ours and transformers' own, for the tests of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from repro_core.config import ModelConfig
from repro_core.model.decoder import Policy

torch.set_num_threads(1)

QWEN3 = ModelConfig(
    model_type="qwen3", vocab_size=67, hidden_size=32, intermediate_size=48, kv_channels=16, max_position_embeddings=64
)
BIASED = replace(QWEN3, kv_channels=None, attention_bias=True, num_key_value_heads=1, tie_word_embeddings=False)
MOE = ModelConfig(
    model_type="qwen3_moe",
    vocab_size=67,
    hidden_size=32,
    kv_channels=16,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    norm_topk_prob=True,
    tie_word_embeddings=False,
    max_position_embeddings=64,
)
MOE_TIED = replace(
    MOE, norm_topk_prob=False, tie_word_embeddings=True, kv_channels=None, num_experts_per_tok=3, attention_bias=True
)
MOE_UNGROUPED = replace(MOE, hidden_size=48, num_key_value_heads=4, kv_channels=6, num_experts=5)
MOE_ALL = replace(MOE, num_experts=4, num_experts_per_tok=4)
MOE_ONE = replace(MOE, num_experts=1, num_experts_per_tok=1, norm_topk_prob=False)
CASES = {
    "qwen3": QWEN3,
    "qwen3-biased": BIASED,
    "moe": MOE,
    "moe-tied-biased": MOE_TIED,
    "moe-ungrouped": MOE_UNGROUPED,
    "moe-top-k-is-all": MOE_ALL,
    "moe-one-expert": MOE_ONE,
}
CONFIGS = pytest.mark.parametrize("config", CASES.values(), ids=CASES.keys())
EXPERTS = pytest.mark.parametrize("config", [MOE, MOE_TIED, MOE_ALL], ids=["moe", "tied", "all"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def transformers_model(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Any:
    """Transformers' own model of this configuration, eager throughout, with random weights."""
    import transformers

    mine = {"model_type", "rope_theta", "kv_channels", "attention_bias"}
    if not config.has_experts:
        mine |= {"num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"}
    values = {key: getattr(config, key) for key in ModelConfig.__dataclass_fields__ if key not in mine}
    kind = "Qwen3Moe" if config.has_experts else "Qwen3"
    settings = getattr(transformers, f"{kind}Config")(
        **values,
        head_dim=config.head_dim,
        attention_bias=bool(config.attention_bias),
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        attn_implementation="eager",
        experts_implementation="eager",
        use_cache=False,  # training's forward; a cache lays the keys out anew, which can move last bits
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(settings).to(dtype)
    # .to() has rounded the rotary frequencies to bf16; from_pretrained, the way models are really loaded, keeps fp32.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model.eval()


def fused(config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our names to those that transformers has in memory: the experts of a layer in two tensors."""
    if not config.has_experts:
        return tensors
    out = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(config.num_hidden_layers):
        start = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([tensors[f"{start}{e}.{part}_proj.weight"] for e in range(config.num_experts)])
            for part in ("gate", "up", "down")
        )
        out |= {f"{start}gate_up_proj": torch.cat([gate, up], dim=1), f"{start}down_proj": down}
    return out


def own_routing(policy: Policy, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and the experts chosen for them as `routing` takes them."""
    chosen: list[Tensor] = []
    logits = policy(tokens, chosen=chosen)
    return logits, torch.stack(chosen, dim=2)


# ---- the decoder
