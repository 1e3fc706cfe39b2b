from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from examples_kit import at_most
from hypothesis import given
from hypothesis import strategies as st
from model_kit import backward_with, edit_config, make, same_bits, some_tokens
from safetensors.torch import load_file, save_file

from repro_core.config import ModelConfig
from repro_core.data.task import (
    BOS_ID,
    CLOSENESS,
    DIGITS,
    ENDED,
    EOS_ID,
    PAD_ID,
    VOCAB_SIZE,
    Problem,
    decode,
    encode,
    prompts,
    reward,
)
from repro_core.model.decoder import KvCache, Policy, init_weights, rms_norm, rotary_tables
from repro_core.model.hf import HfError, load_hf, save_hf

torch.set_num_threads(1)

TIED = ModelConfig(vocab_size=67, hidden_size=32, intermediate_size=48, max_position_embeddings=64)
UNTIED = ModelConfig(
    vocab_size=67,
    hidden_size=48,
    intermediate_size=40,
    num_attention_heads=6,
    num_key_value_heads=1,
    rope_theta=500.0,
    tie_word_embeddings=False,
    max_position_embeddings=64,
)
UNGROUPED = replace(TIED, num_key_value_heads=4)
CONFIGS = pytest.mark.parametrize("config", [TIED, UNTIED, UNGROUPED], ids=["tied", "untied", "ungrouped"])


def transformers_model(config: ModelConfig, dtype: torch.dtype = torch.float32):
    """Transformers' own model of this configuration, with random weights, built on the spot."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    other = {"rope_theta", "model_type", "kv_channels", "attention_bias", "norm_topk_prob", "moe_intermediate_size"}
    other |= {"num_experts", "num_experts_per_tok"}
    values = {key: getattr(config, key) for key in ModelConfig.__dataclass_fields__.keys() - other}
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    model = Qwen2ForCausalLM(Qwen2Config(**values, rope_parameters=rope, attn_implementation="eager"))
    model.to(dtype)
    model.config.use_cache = False  # training's forward; a cache lays the keys out anew, which can move last bits
    # .to() has rounded the rotary frequencies to bf16; from_pretrained, the way models are really loaded, keeps fp32.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model.eval()


# ---- the decoder


@CONFIGS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_logits_and_gradients_equal_transformers(config: ModelConfig, dtype: torch.dtype) -> None:
    """Logits and all gradients have the bits of transformers' eager Qwen2 when the weights are equally aligned."""
    policy, theirs = make(config, dtype=dtype), transformers_model(config, dtype)
    assert list(policy.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(policy.state_dict())
    for _ in backward_with(policy, theirs):
        for (name, mine), (their_name, other) in zip(policy.named_parameters(), theirs.named_parameters(), strict=True):
            assert name == their_name and same_bits(mine.grad, other.grad), name


def test_right_padding_reaches_no_real_token() -> None:
    """What stands in the padding of a right-padded batch changes no bit of the real tokens' logits."""
    policy = make(TIED)
    tokens = some_tokens(3, 9)
    other = tokens.clone()
    other[1, 4:] = 5
    ours, changed = policy(tokens), policy(other)
    assert same_bits(ours[1, :4].detach(), changed[1, :4].detach())
    assert not torch.equal(ours[1, 4:], changed[1, 4:])


@CONFIGS
@at_most(15)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4), steps=st.integers(1, 4))
def test_cached_decoding_equals_the_full_forward(config: ModelConfig, lengths: list[int], steps: int) -> None:
    """Prefilling right-padded prompts and decoding one token at a time gives the uncached logits, within 1e-5."""
    policy, rows, width = make(config), len(lengths), max(lengths)
    tokens = some_tokens(rows, width + steps)
    ends = torch.tensor(lengths)
    cache = KvCache.allocate(policy, rows, width + steps)
    with torch.no_grad():
        full = policy(tokens)
        prefill = tokens[:, :width].clone()
        prefill[torch.arange(width) >= ends[:, None]] = 66  # foreign tokens where the padding is
        logits = policy(prefill, torch.arange(width).expand(rows, width), cache)
        for row, length in enumerate(lengths):
            torch.testing.assert_close(logits[row, :length], full[row, :length], rtol=0, atol=1e-5)
        for step in range(steps):
            positions = (ends + step)[:, None]
            logits = policy(tokens.gather(1, positions), positions, cache)
            wanted = full[torch.arange(rows), ends + step]
            torch.testing.assert_close(logits[:, 0], wanted, rtol=0, atol=1e-5)


def test_relative_positions_decide() -> None:
    """RoPE makes attention depend on distances: shifting all positions leaves logits, stretching them does not."""
    policy, tokens = make(TIED), some_tokens(2, 8)
    order = torch.arange(8).expand(2, 8)
    plain = policy(tokens)
    torch.testing.assert_close(policy(tokens, order + 11), plain, rtol=0, atol=1e-4)
    assert float((policy(tokens, order * 3) - plain).detach().abs().max()) > 1e-2


def test_rotary_tables_are_fp32_rotations() -> None:
    """Tables are fp32, position 0 is the identity, cos^2 + sin^2 = 1, and pair i turns by theta^(-2i/d) a position."""
    cos, sin = rotary_tables(torch.tensor([[0, 1, 300]]), 8, 100.0)
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (1, 3, 8)
    assert bool((cos[0, 0] == 1).all()) and bool((sin[0, 0] == 0).all())
    torch.testing.assert_close(cos**2 + sin**2, torch.ones(1, 3, 8))
    wanted = 100.0 ** (-torch.arange(0, 8, 2).double() / 8)
    torch.testing.assert_close(torch.asin(sin[0, 1, :4][1:]).double(), wanted[1:], rtol=1e-6, atol=0)


def test_rms_norm_rounds_before_the_weight() -> None:
    """In bf16 the mean square is fp32 and the quotient is rounded before the weight multiplies it."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.linspace(0.5, 1.5, 64).bfloat16()
    wide = x.float()
    quotient = wide / torch.sqrt((wide**2).mean(-1, keepdim=True) + 1e-6)
    assert same_bits(rms_norm(x, weight, 1e-6), weight * quotient.bfloat16())
    assert not torch.equal(rms_norm(x, weight, 1e-6), (weight.float() * quotient).bfloat16())


def test_initial_weights_ignore_and_spare_the_global_generator() -> None:
    """Construction and init draw nothing from the global generator; the seed alone decides; bf16 is fp32 rounded."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = Policy(TIED)
    init_weights(first, 3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second, other, half = Policy(TIED), Policy(TIED), Policy(TIED).bfloat16()
    init_weights(second, 3)
    init_weights(other, 4)
    init_weights(half, 3)
    for (name, a), b, c, d in zip(
        first.named_parameters(), second.parameters(), other.parameters(), half.parameters(), strict=True
    ):
        assert same_bits(a.detach(), b.detach()) and same_bits(a.detach().bfloat16(), d.detach())
        if name.endswith("norm.weight"):
            assert bool((a == 1).all())
        elif name.endswith("bias"):
            assert bool((a == 0).all())
        else:
            assert 0.015 < float(a.detach().std()) < 0.025 and not torch.equal(a, c)
    with pytest.raises(ValueError, match="32 bits"):
        init_weights(first, 2**32 + 3)


def test_tied_embeddings_are_one_parameter() -> None:
    """A tied head stays the embedding's own parameter through deepcopy and a change of dtype."""
    policy = copy.deepcopy(make(TIED)).bfloat16()
    assert policy.lm_head.weight is policy.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(policy.named_parameters()) and "lm_head.weight" in policy.state_dict()


# ---- checkpoints


@CONFIGS
@pytest.mark.parametrize("limit", [10**9, 9000], ids=["single", "sharded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_checkpoints_round_trip_and_load_in_transformers(
    config: ModelConfig, limit: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Our directory gives back every bit to us and to transformers, which then computes the same logits."""
    from transformers import Qwen2ForCausalLM

    policy = make(config, dtype=dtype)
    save_hf(policy, tmp_path / "a", max_shard_bytes=limit)
    assert (tmp_path / "a" / "model.safetensors.index.json").exists() == (limit == 9000)
    again = load_hf(tmp_path / "a")
    theirs = Qwen2ForCausalLM.from_pretrained(tmp_path / "a", attn_implementation="eager", dtype=dtype, use_cache=False)
    assert again.config == config
    for name, tensor in policy.state_dict().items():
        assert same_bits(again.state_dict()[name], tensor) and same_bits(theirs.state_dict()[name], tensor), name
    tokens = some_tokens(2, 9)
    assert same_bits(policy(tokens).detach(), again(tokens).detach())
    for parameter in theirs.parameters():
        # transformers computes on memory mapped from the file, whose alignment moves the last bits of a product.
        parameter.data = parameter.data.clone()
    assert same_bits(theirs(tokens).logits.detach(), policy(tokens).detach())
    save_hf(again, tmp_path / "b", max_shard_bytes=limit)
    assert {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()
    }


@CONFIGS
@pytest.mark.parametrize("limit", ["1GB", "9KB"], ids=["single", "sharded"])
def test_transformers_checkpoints_load(config: ModelConfig, limit: str, tmp_path: Path) -> None:
    """What transformers' save_pretrained writes loads with all bits and gives the same logits."""
    theirs = transformers_model(config)
    theirs.save_pretrained(tmp_path, max_shard_size=limit)
    assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text())
    ours = load_hf(tmp_path)
    assert ours.config == config
    for name, tensor in theirs.state_dict().items():
        assert same_bits(ours.state_dict()[name], tensor), name
    tokens = some_tokens(2, 9)
    assert same_bits(ours(tokens).detach(), theirs(tokens).logits.detach())


def test_a_save_replaces_the_older_checkpoint_alone(tmp_path: Path) -> None:
    """Saving single after sharded (and back) leaves no stale weights, and files of other names stay."""
    (tmp_path / "model_notes.safetensors").write_bytes(b"mine")
    for seed, limit, files in ((1, 9000, 11), (2, 10**9, 1), (3, 9000, 11), (4, 20000, 4)):
        policy = make(TIED, seed)
        save_hf(policy, tmp_path, max_shard_bytes=limit)
        assert same_bits(load_hf(tmp_path).model.norm.weight.detach(), policy.model.norm.weight.detach())
        assert len(list(tmp_path.glob("model[.-]*safetensors"))) == files
    assert (tmp_path / "model_notes.safetensors").read_bytes() == b"mine"
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 321.0},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 321.0}},
        {"rope_theta": 321, "rope_scaling": {"type": "default"}},
        {"rope_theta": 321.0, "rope_scaling": None, "rope_parameters": {"rope_theta": 321.0}},
    ],
)
def test_rope_theta_is_found_wherever_it_stands(changes: dict[str, object], tmp_path: Path) -> None:
    """rope_theta is read from the top level, from rope_parameters and from beside a default rope_scaling."""
    save_hf(make(TIED), tmp_path)
    edit_config(tmp_path, **changes)
    assert load_hf(tmp_path).config.rope_theta == 321.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"model_type": "qwen3"}, "only Qwen2ForCausalLM"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, "disagree"),
        ({"rope_theta": 0}, "rope_theta must be a number greater than 0"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"head_dim": 16}, "head_dim 16"),
        ({"num_key_value_heads": 3}, "3 key-value heads"),
        ({"hidden_size": "32"}, "hidden_size must be an integer"),
        ({"intermediate_size": 47}, "has shape"),
        ({"num_hidden_layers": 3}, r"lacks model\.layers\.2"),
        ({"num_hidden_layers": 1}, r"unexpected model\.layers\.1"),
        ({"tie_word_embeddings": False}, r"lacks lm_head\.weight"),
        ({"quantization_config": {"bits": 4}}, "quantization"),
    ],
)
def test_unsupported_configurations_are_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    """Everything in config.json that the model would compute differently is refused in one line."""
    save_hf(make(TIED), tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(HfError, match=message) as caught:
        load_hf(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_sliding_window_out_of_use_is_no_obstacle(tmp_path: Path) -> None:
    """Qwen2's usual config names a sliding window that is switched off or begins after the last layer: that loads."""
    save_hf(make(TIED), tmp_path)
    edit_config(tmp_path, use_sliding_window=False, sliding_window=4096, max_window_layers=1)
    load_hf(tmp_path)
    edit_config(tmp_path, use_sliding_window=True, max_window_layers=2)
    load_hf(tmp_path)


def test_broken_directories_are_refused(tmp_path: Path) -> None:
    """No config, no weights, both forms, a missing or swapped or truncated shard, mixed dtypes: one line each."""

    def refused(message: str) -> None:
        with pytest.raises(HfError, match=message) as caught:
            load_hf(tmp_path)
        assert "\n" not in str(caught.value)

    refused("has no config.json")
    save_hf(make(TIED), tmp_path)
    single = tmp_path / "model.safetensors"
    whole = load_file(single)
    save_file({**whole, "model.norm.weight": whole["model.norm.weight"].bfloat16()}, single)
    refused("torch.bfloat16, torch.float32")
    save_file({**whole, "lm_head.weight": whole["model.embed_tokens.weight"] + 1}, single)
    refused("tied but differs")
    save_file({**whole, "lm_head.weight": whole["model.embed_tokens.weight"].clone()}, single)
    load_hf(tmp_path)
    single.unlink()
    refused("neither")
    save_hf(make(TIED), tmp_path, max_shard_bytes=9000)
    single.write_bytes(b"")
    refused("has both")
    single.unlink()
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    kept = shards[1].read_bytes()
    shards[1].write_bytes(kept[:-4])
    refused("truncated")
    shards[1].write_bytes(shards[0].read_bytes())
    refused("disagree, first about")
    shards[1].unlink()
    refused("is missing, but")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../x.safetensors"}}')
    refused("weight_map")
    (tmp_path / "config.json").write_text("{")
    refused("is no JSON")


def test_a_policy_of_mixed_dtypes_is_not_written(tmp_path: Path) -> None:
    """A policy whose parameters have several dtypes is refused before anything is replaced."""
    policy = make(TIED)
    policy.model.norm.bfloat16()
    with pytest.raises(HfError, match="not all fp32"):
        save_hf(policy, tmp_path / "new")
    assert not (tmp_path / "new").exists()


# ---- tokens and task


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_encoding_round_trips(text: str) -> None:
    """decode(encode(text)) is text for all Unicode, with specials dropped wherever they stand."""
    assert decode(encode(text)) == text == decode([*encode(text, bos=False), EOS_ID, PAD_ID])
    assert encode(text)[0] == BOS_ID and encode(text, bos=False) == list(text.encode())


def test_decoding_never_fails_on_bytes_and_refuses_foreign_ids() -> None:
    """Invalid UTF-8 becomes U+FFFD; ids outside the vocabulary raise."""
    assert decode([0xFF, ord("7")]) == "\ufffd7"
    for token in (-1, VOCAB_SIZE):
        with pytest.raises(ValueError, match="outside the byte vocabulary"):
            decode([token])


@given(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 12), st.integers(0, 30))
def test_prompts_are_a_function_of_seed_and_rollout(seed: int, rollout_id: int, count: int, most: int) -> None:
    """Same arguments, same problems; labels are right; operands stay in range; a shorter rollout is a prefix."""
    problems = prompts(seed, rollout_id, count, most)
    assert problems == prompts(seed, rollout_id, count + 3, most)[:count] and len(problems) == count
    for problem in problems:
        a, b = map(int, problem.prompt.removesuffix("=").split("+"))
        assert max(a, b) <= most and problem.label == str(a + b)


def test_prompts_are_pinned() -> None:
    """The sequence itself is part of the contract: recorded runs name their data by rollout_id alone."""
    first = [problem.prompt for problem in prompts(1234, 0, 4, 9)]
    assert first == ["2+1=", "1+5=", "5+4=", "6+4="] and first != [problem.prompt for problem in prompts(1234, 1, 4, 9)]
    assert prompts(0, 0, 1, 0) == [Problem("0+0=", "0")]


@given(st.lists(st.integers(0, VOCAB_SIZE - 1) | st.sampled_from([*b"0123456789", EOS_ID]), max_size=30))
def test_rewards_lie_in_the_unit_interval_and_one_means_exact(tokens: list[int]) -> None:
    """Any response earns between 0 and 1, and 1 exactly if it begins with the label's bytes and the end."""
    value = reward(tokens, "17")
    assert 0.0 <= value <= 1.0
    assert (value == 1.0) == (tokens[:3] == [*b"17", EOS_ID])


def test_the_reward_rule_climbs() -> None:
    """Each thing the rule asks for earns more than the thing before it, and tokens behind the end change nothing."""
    ladder = [
        [EOS_ID],
        [*b"xyz7"],
        [*b"x777"],
        [*b"7777"],
        [*b"12", EOS_ID],
        [*b"6", EOS_ID],
        [*b"07", EOS_ID],
        [*b"7", EOS_ID],
    ]
    values = [reward(tokens, "7") for tokens in ladder]
    assert values[0] == 0.0 == reward([], "7") and values[-1] == 1.0
    assert values[1:4] == [DIGITS * 0.25, DIGITS * 0.75, DIGITS]
    assert values[4:7] == [DIGITS + ENDED + CLOSENESS / part for part in (6, 2, 1)]
    assert values == sorted(values) and len(set(values)) == len(values)
    assert [reward([*tokens, EOS_ID, 1], "7") for tokens in ladder[4:]] == values[4:]
    assert reward([*b"9" * 10_000, EOS_ID], "7") == DIGITS + ENDED
