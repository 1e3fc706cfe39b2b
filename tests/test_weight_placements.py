from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from examples_kit import at_most
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from repro_core.config import ModelConfig
from repro_core.engines.megatron.weights import names
from repro_core.model.layout_free import Joining, LayoutError, Local, same_bits
from repro_core.rollout.engine import HeldWeights
from repro_core.rollout.sglang.held import layout, placements
from repro_golden.recording.weight_pieces import canonical_tensors, join, pieces

torch.set_num_threads(1)
QWEN2 = ModelConfig(vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=1, tie_word_embeddings=False)
QWEN3 = replace(QWEN2, model_type="qwen3", kv_channels=16)
MOE = replace(
    QWEN3, model_type="qwen3_moe", num_experts=3, num_experts_per_tok=2, moe_intermediate_size=24, vocab_size=130
)


def whole(model: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in names(model).items()}


def loaded(model: ModelConfig, rank: int, ranks: int, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of one process, filled step by step as SGLang's loaders do, junk where they write nothing."""
    head, heads, groups = model.head_dim, model.num_attention_heads, model.num_key_value_heads
    own_heads = heads // ranks
    own_groups, replicas = (1, ranks // groups) if ranks >= groups else (groups // ranks, 1)
    tied = model.tie_word_embeddings

    def qkv(at: str, kind: str) -> Tensor:
        parts = {name: weights[f"{at}{name}_proj.{kind}"] for name in "qkv"}
        shape = ((own_heads + 2 * own_groups) * head, *parts["q"].shape[1:])
        out, offset = torch.full(shape, torch.nan), 0
        for name, part in parts.items():
            size = (own_heads if name == "q" else own_groups) * head
            shard = rank if name == "q" else rank // replicas
            out.narrow(0, offset, size).copy_(part.narrow(0, shard * size, size))
            offset += size
        return out

    def merged(names_: list[str]) -> Tensor:
        parts = [weights[name] for name in names_]
        size = parts[0].shape[0] // ranks
        out = torch.full((size * len(parts), parts[0].shape[1]), torch.nan)
        for k, part in enumerate(parts):
            out.narrow(0, k * size, size).copy_(part.narrow(0, rank * size, size))
        return out

    def row_parallel(name: str) -> Tensor:
        size = weights[name].shape[1] // ranks
        return weights[name].narrow(1, rank * size, size).clone()

    def vocabulary(name: str) -> Tensor:
        padded = (model.vocab_size + 63) // 64 * 64
        if padded % ranks:
            padded = (model.vocab_size + 64 * ranks - 1) // (64 * ranks) * (64 * ranks)
        each = padded // ranks
        first, last = min(rank * each, model.vocab_size), min((rank + 1) * each, model.vocab_size)
        out = torch.full((each, model.hidden_size), 7.0)
        out[: last - first].copy_(weights[name].narrow(0, first, last - first))
        out[last - first :].fill_(0)
        return out

    embedding = "model.embed_tokens.weight"
    placements = {
        embedding: vocabulary(embedding),
        "lm_head.weight": vocabulary(embedding if tied else "lm_head.weight"),
    }
    placements["model.norm.weight"] = weights["model.norm.weight"].clone()
    for n in range(model.num_hidden_layers):
        layer = f"model.layers.{n}."
        at, mlp = f"{layer}self_attn.", f"{layer}mlp."
        placements[f"{at}qkv_proj.weight"] = qkv(at, "weight")
        if model.qkv_bias:
            placements[f"{at}qkv_proj.bias"] = qkv(at, "bias")
        placements[f"{at}o_proj.weight"] = row_parallel(f"{at}o_proj.weight")
        for name in ("o_proj.bias", "q_norm.weight", "k_norm.weight"):
            if f"{at}{name}" in weights:
                placements[f"{at}{name}"] = weights[f"{at}{name}"].clone()
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            placements[f"{layer}{name}"] = weights[f"{layer}{name}"].clone()
        if not model.has_experts:
            placements[f"{mlp}gate_up_proj.weight"] = merged([f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"])
            placements[f"{mlp}down_proj.weight"] = row_parallel(f"{mlp}down_proj.weight")
            continue
        placements[f"{mlp}gate.weight"] = weights[f"{mlp}gate.weight"].clone()
        experts = [f"{mlp}experts.{e}." for e in range(model.num_experts)]
        placements[f"{mlp}experts.w13_weight"] = torch.stack(
            [merged([f"{e}gate_proj.weight", f"{e}up_proj.weight"]) for e in experts]
        )
        placements[f"{mlp}experts.w2_weight"] = torch.stack([row_parallel(f"{e}down_proj.weight") for e in experts])
    return placements


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@st.composite
def models(draw: st.DrawFn) -> tuple[ModelConfig, int]:
    """A model of any family, and how many processes divide it."""
    ranks = draw(st.sampled_from([1, 2, 3, 4, 8]))
    groups = draw(st.sampled_from([g for g in (1, 2, 3, 4, 8) if g % ranks == 0 or ranks % g == 0]))
    family = draw(st.sampled_from(["qwen2", "qwen3", "qwen3_moe"]))
    unit = ranks * groups
    heads = unit // max(d for d in (1, 2, 3, 4, 8) if unit % d == 0 and ranks % d == 0 and groups % d == 0)
    head = draw(st.sampled_from([2, 4]))
    model = ModelConfig(
        model_type=family,
        vocab_size=draw(st.integers(1, 700)),
        hidden_size=heads * head if family == "qwen2" else draw(st.integers(1, 9)),
        intermediate_size=ranks * draw(st.integers(1, 3)),
        num_hidden_layers=draw(st.integers(1, 2)),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        kv_channels=None if family == "qwen2" else head,
        attention_bias=None if family == "qwen2" else draw(st.booleans()) or None,
        tie_word_embeddings=draw(st.booleans()),
        num_experts=draw(st.integers(1, 3)) if family == "qwen3_moe" else 0,
        num_experts_per_tok=1 if family == "qwen3_moe" else 0,
        moe_intermediate_size=ranks * draw(st.integers(1, 3)) if family == "qwen3_moe" else 0,
    )
    return model, ranks


@at_most(60)
@given(models())
def test_the_shares_of_all_processes_add_up_to_the_canonical_tensors(drawn: tuple[ModelConfig, int]) -> None:
    """What SGLang's loaders put into any number of processes has, through its placements, the whole's fingerprints."""
    model, ranks = drawn
    weights = whole(model)
    got = [loaded(model, rank, ranks, weights) for rank in range(ranks)]
    placed = [placements(model, rank, ranks, shapes(tensors)) for rank, tensors in enumerate(got)]
    held, untold = join(p for t, d in zip(got, placed, strict=True) for p in pieces(t, d, "{}"))
    sent, _ = join(pieces(weights, None, "{}"))
    assert not untold
    assert held == sent


@at_most(60)
@given(models())
def test_the_values_of_all_processes_make_the_canonical_tensors_whole(drawn: tuple[ModelConfig, int]) -> None:
    """Joined element by element, every canonical element is there, and every process that has it has the same bits."""
    model, ranks = drawn
    weights = whole(model)
    joining, held = Joining(names(model)), []
    for rank in range(ranks):
        tensors, known = loaded(model, rank, ranks, weights), layout(model, rank, ranks)
        for name, tensor in tensors.items():
            joining.add(known[name], tensor)
        held.append(HeldWeights(tensors, placements(model, rank, ranks, shapes(tensors))))
    joined = joining.finish()
    for name, tensor in weights.items():
        (value,) = canonical_tensors(held, {name}).values()
        assert same_bits(value, tensor) and same_bits(joined[name], tensor), name
    assert canonical_tensors(held).keys() == weights.keys()


@pytest.mark.parametrize("model", [QWEN2, QWEN3, MOE], ids=["qwen2", "qwen3", "moe"])
def test_every_element_of_a_parameter_is_placed_but_the_padding(model: ModelConfig) -> None:
    """No part of a parameter is left out of the comparison, except rows that pad the vocabulary."""
    for rank in range(2):
        for name, local in layout(model, rank, 2).items():
            placed = torch.zeros(local.shape, dtype=torch.int64)
            for part in local.boxes:
                placed.as_strided(part.size, part.step, part.start).add_(1)
            rows = placed if name not in ("model.embed_tokens.weight", "lm_head.weight") else placed[: _true(local)]
            assert bool((rows == 1).all()), name
            assert int(placed.sum()) == rows.numel(), name


def _true(local: Local) -> int:
    (part,) = local.boxes
    return part.size[0]


def test_neighbours_hold_one_key_value_head_where_there_are_fewer_than_processes() -> None:
    """With one key-value head on two processes both hold it whole, and each half of the queries."""
    model = replace(QWEN3, num_key_value_heads=1)
    boxes = [layout(model, rank, 2)["model.layers.0.self_attn.qkv_proj.weight"].boxes for rank in range(2)]
    assert [[part.at for part in rank] for rank in boxes] == [[0, 0, 0], [2 * 16 * 32, 0, 0]]
    assert {part.size for part in boxes[1][1:]} == {(16, 32)}


WRONG = {
    "a quantized model's scales": (
        QWEN3,
        {"model.layers.0.mlp.down_proj.weight_scale": (32,)},
        "model.layers.0.mlp.down_proj.weight_scale: parameters of SGLang that a plain qwen3 has not",
    ),
    "experts in another order of dimensions": (
        MOE,
        {"model.layers.0.mlp.experts.w2_weight": (3, 24, 32)},
        "model.layers.0.mlp.experts.w2_weight: shape [3, 24, 32] in SGLang, where rank 0 of 1 has [3, 32, 24]",
    ),
    "a vocabulary that is not padded": (
        QWEN3,
        {"model.embed_tokens.weight": (67, 32)},
        "model.embed_tokens.weight: shape [67, 32] in SGLang, where rank 0 of 1 has [128, 32]",
    ),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG.keys())
def test_what_is_not_known_is_refused_by_name(case: tuple[ModelConfig, dict[str, tuple[int, ...]], str]) -> None:
    """A parameter that is not mapped, or of another shape, is an error that names it."""
    model, given_, message = case
    with pytest.raises(LayoutError) as error:
        placements(model, 0, 1, given_)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_tables_of_rotary_embeddings_hold_nothing_canonical() -> None:
    """They are the engine's own buffers: no placement, no error."""
    assert placements(QWEN3, 0, 1, {"model.layers.0.self_attn.rotary_emb.cos_sin_cache": (512, 16)}) == {}


@pytest.mark.parametrize(("model", "ranks"), [(QWEN3, 3), (replace(QWEN3, intermediate_size=49), 2), (QWEN3, 0)])
def test_models_that_do_not_divide_are_refused(model: ModelConfig, ranks: int) -> None:
    """Heads or widths that do not divide over the processes are an error, no wrong mapping."""
    with pytest.raises(LayoutError):
        layout(model, 0, ranks)
