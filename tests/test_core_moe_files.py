from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_kit import edit_config, make, same_bits, some_tokens
from moe_kit import (
    BIASED,
    CONFIGS,
    DTYPES,
    MOE,
    MOE_TIED,
    QWEN3,
    fused,
    transformers_model,
)
from safetensors.torch import load_file

from repro_core.config import ConfigError, ModelConfig, TrainConfig
from repro_core.model.decoder import Policy
from repro_core.model.hf import HfError, load_hf, save_hf


@CONFIGS
@pytest.mark.parametrize("limit", [10**9, 9000], ids=["single", "sharded"])
def test_checkpoints_round_trip_and_load_in_transformers(config: ModelConfig, limit: int, tmp_path: Path) -> None:
    """Our directory gives back every byte to us, and transformers computes the same logits from it."""
    from transformers import AutoModelForCausalLM

    policy, tokens = make(config), some_tokens(2, 9)
    save_hf(policy, tmp_path / "a", max_shard_bytes=limit)
    again = load_hf(tmp_path / "a")
    assert again.config == config
    for name, tensor in policy.state_dict().items():
        assert same_bits(again.state_dict()[name], tensor), name
    save_hf(again, tmp_path / "b", max_shard_bytes=limit)
    assert {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()
    }
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "a",
        attn_implementation="eager",
        experts_implementation="eager",
        use_cache=False,
        dtype=torch.float32,
    )
    for parameter in theirs.parameters():
        # transformers computes on memory mapped from the file, whose alignment moves the last bits of a product.
        parameter.data = parameter.data.clone()
    for name, tensor in fused(config, policy.state_dict()).items():
        assert same_bits(theirs.state_dict()[name], tensor), name
    assert same_bits(theirs(tokens).logits.detach(), policy(tokens).detach())


@CONFIGS
@DTYPES
def test_transformers_checkpoints_load(config: ModelConfig, dtype: torch.dtype, tmp_path: Path) -> None:
    """What transformers' save_pretrained writes loads with all bits and gives the same logits; and back again."""
    from transformers import AutoModelForCausalLM

    theirs = transformers_model(config, dtype)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_hf(tmp_path / "theirs")
    assert ours.config == config
    for name, tensor in fused(config, ours.state_dict()).items():
        assert same_bits(theirs.state_dict()[name], tensor), name
    tokens = some_tokens(2, 9)
    assert same_bits(ours(tokens).detach(), theirs(tokens).logits.detach())
    save_hf(ours, tmp_path / "ours")
    AutoModelForCausalLM.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "back")
    first, last = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "back"))
    assert first.keys() == last.keys() and all(same_bits(first[name], last[name]) for name in first)


def test_head_dim_defaults_as_in_transformers(tmp_path: Path) -> None:
    """Where config.json has no head_dim, Qwen3 has 128 and Qwen3-MoE hidden_size / num_attention_heads."""
    save_hf(Policy(replace(QWEN3, kv_channels=128)), tmp_path / "dense")
    save_hf(Policy(replace(MOE, kv_channels=None)), tmp_path / "moe")
    for name, width in (("dense", 128), ("moe", 8)):
        edit_config(tmp_path / name, head_dim="absent")
        assert load_hf(tmp_path / name).config.head_dim == width


def test_the_number_of_experts_has_two_names(tmp_path: Path) -> None:
    """Transformers 4 writes num_experts, 5 num_local_experts: either serves, and both where they agree."""
    save_hf(make(MOE), tmp_path)
    edit_config(tmp_path, num_local_experts=8)
    assert load_hf(tmp_path).config == MOE
    edit_config(tmp_path, num_experts="absent")
    assert load_hf(tmp_path).config == MOE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM'] of model_type qwen3_moe"),
        ({"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"}, "Qwen3MoeForCausalLM are supported"),
        ({"decoder_sparse_step": 2}, 'without experts .*"decoder_sparse_step": 2'),
        ({"mlp_only_layers": [0]}, r'without experts .*"mlp_only_layers": \[0\]'),
        ({"num_local_experts": 4}, "num_experts 8 and num_local_experts 4 disagree"),
        ({"num_experts": "absent"}, "num_experts must be an integer"),
        ({"num_experts": 0}, "num_experts must be an integer of at least 1"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok of 1 to num_experts"),
        ({"num_experts": 9}, r"lacks model\.layers\.0\.mlp\.experts\.8"),
        ({"num_experts": 7}, r"unexpected model\.layers\.0\.mlp\.experts\.7"),
        ({"moe_intermediate_size": 25}, "has shape"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false"),
        ({"attention_bias": True}, r"lacks model\.layers\.0\.self_attn\.k_proj\.bias"),
        ({"attention_bias": 1}, "attention_bias must be true or false"),
        ({"head_dim": 15}, "head_dim 15 is not supported"),
        ({"head_dim": 8}, "has shape"),
        ({"head_dim": None}, "head_dim must be an integer"),
        ({"num_key_value_heads": None}, "num_key_value_heads must be an integer"),
        ({"num_key_value_heads": 3}, "3 key-value heads"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 9}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    ],
)
def test_unsupported_configurations_are_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    """Everything in config.json that the model would compute differently is refused in one line."""
    save_hf(make(MOE), tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(HfError, match=message) as caught:
        load_hf(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"model_type": "llama"}, "model.model_type must be one of"),
        ({"num_experts": 4}, "need model_type qwen3_moe, not qwen2"),
        ({"model_type": "qwen3", "norm_topk_prob": True}, "need model_type qwen3_moe, not qwen3"),
        ({"model_type": "qwen3_moe"}, "not 0, 0 and 0"),
        ({"model_type": "qwen3_moe", "num_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 8}, "2, 3"),
        ({"model_type": "qwen3_moe", "num_experts": 2, "num_experts_per_tok": 1}, "2, 1 and 0"),
        ({"attention_bias": False}, "cannot be false under qwen2"),
        ({"kv_channels": 32}, "under qwen2"),
        ({"model_type": "qwen3", "kv_channels": 7}, "kv_channels 7 must be even"),
        ({"model_type": "qwen3", "kv_channels": 0}, "kv_channels 0 must be even"),
        ({"hidden_size": 66}, "must be an even multiple"),
        ({"num_attention_heads": 0}, "num_attention_heads 0 must be at least 1"),
        ({"num_key_value_heads": 3}, "must divide"),
    ],
)
def test_models_that_do_not_exist_are_refused(model: dict[str, object], message: str) -> None:
    """Settings that contradict each other are refused with both sides, before anything is built."""
    with pytest.raises(ConfigError, match=message):
        TrainConfig.from_mapping({"model": model})


def test_families_differ_in_biases_and_norms() -> None:
    """Qwen2: bias on q, k, v. Qwen3: norms instead, and with attention_bias a bias on all four projections."""

    def parts(config: ModelConfig) -> set[str]:
        names = [name for name, _ in Policy(config).named_parameters() if ".layers.0.self_attn." in name]
        return {name.split("self_attn.")[1] for name in names} - {f"{p}_proj.weight" for p in "qkvo"}

    biases, norms = {f"{p}_proj.bias" for p in "qkv"}, {"q_norm.weight", "k_norm.weight"}
    assert parts(ModelConfig()) == parts(ModelConfig(attention_bias=True)) == biases
    assert parts(QWEN3) == parts(MOE) == parts(replace(QWEN3, attention_bias=False)) == norms
    assert parts(BIASED) == parts(MOE_TIED) == norms | biases | {"o_proj.bias"}
