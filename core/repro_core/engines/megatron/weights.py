"""One model under two names: Hugging Face's, which are canonical here, and those of Megatron's `GPTModel`.

`TENSORS` and `RULES` are the whole mapping, one line each. Nothing here imports megatron-core: the tensors of any rank
of any layout can be cut (`to_local`), joined (`join`) and described (`placement_of`) in one process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from repro_core.config import ModelConfig
from repro_core.engines.megatron.slices import CUTS, Fused, How, Where
from repro_core.model.layout_free import Flat, Ints, Joining, LayoutError, Local, same_bits, take

__all__ = ["RULES", "TENSORS", "Held", "Rule", "Where", "join", "layout", "names", "placement_of", "to_local"]


def _models(model: ModelConfig, critic: bool) -> dict[str, bool]:
    """Whether a model is one of those that `TENSORS` speaks of."""
    return {
        "": True,
        "untied": not critic and not model.tie_word_embeddings,
        "critic": critic,
        "qkv bias": model.qkv_bias,
        "output bias": model.output_bias,
        "qk norm": model.qk_norm,
        "dense": not model.has_experts,
        "experts": model.has_experts,
    }


# Canonical name: shape, and which models have it. {n} is a layer, {e} an expert.
TENSORS: dict[str, tuple[str, str]] = {
    "model.embed_tokens.weight": ("vocab hidden", ""),
    "model.layers.{n}.self_attn.q_proj.weight": ("queries hidden", ""),
    "model.layers.{n}.self_attn.q_proj.bias": ("queries", "qkv bias"),
    "model.layers.{n}.self_attn.k_proj.weight": ("keys hidden", ""),
    "model.layers.{n}.self_attn.k_proj.bias": ("keys", "qkv bias"),
    "model.layers.{n}.self_attn.v_proj.weight": ("keys hidden", ""),
    "model.layers.{n}.self_attn.v_proj.bias": ("keys", "qkv bias"),
    "model.layers.{n}.self_attn.o_proj.weight": ("hidden queries", ""),
    "model.layers.{n}.self_attn.o_proj.bias": ("hidden", "output bias"),
    "model.layers.{n}.self_attn.q_norm.weight": ("head", "qk norm"),
    "model.layers.{n}.self_attn.k_norm.weight": ("head", "qk norm"),
    "model.layers.{n}.mlp.gate_proj.weight": ("mlp hidden", "dense"),
    "model.layers.{n}.mlp.up_proj.weight": ("mlp hidden", "dense"),
    "model.layers.{n}.mlp.down_proj.weight": ("hidden mlp", "dense"),
    "model.layers.{n}.mlp.gate.weight": ("experts hidden", "experts"),
    "model.layers.{n}.mlp.experts.{e}.gate_proj.weight": ("expert hidden", "experts"),
    "model.layers.{n}.mlp.experts.{e}.up_proj.weight": ("expert hidden", "experts"),
    "model.layers.{n}.mlp.experts.{e}.down_proj.weight": ("hidden expert", "experts"),
    "model.layers.{n}.input_layernorm.weight": ("hidden", ""),
    "model.layers.{n}.post_attention_layernorm.weight": ("hidden", ""),
    "model.norm.weight": ("hidden", ""),
    "lm_head.weight": ("vocab hidden", "untied"),
    "score.weight": ("value hidden", "critic"),
}


def _chunks(model: ModelConfig, where: Where) -> dict[str, bool]:
    """Whether a chunk is one of those that `RULES` speaks of."""
    return {
        "": True,
        "first": where.first,
        "last": where.last,
        "tied copy": model.tie_word_embeddings and not where.critic and where.last and not where.first,
        "plain norm": not where.fused_norms,
        "fused norm": where.fused_norms,
        "plain norm of mlp": model.has_experts or not where.fused_norms,
        "fused norm of mlp": where.fused_norms and not model.has_experts,
        "apart": not where.grouped_experts,
        "grouped": where.grouped_experts,
    }


class Rule(NamedTuple):
    """One kind of tensor of `GPTModel`.

    Attributes:
        megatron: Its name. {n} is the layer's number in the chunk, {e} the expert's on the rank.
        hf: The canonical tensors that it holds. {n} and {e} are the numbers in the whole model.
        how: How ranks divide it: see `slices.CUTS`.
        chunk: Which chunks have it: see `_chunks`. Nor has one it whose model lacks the canonical tensors.
    """

    megatron: str
    hf: tuple[str, ...]
    how: How
    chunk: str = ""


def _layer(megatron: str, hf: str, how: How, chunk: str = "") -> Rule:
    """A rule for each layer. ``[q,k,v]`` in the canonical name stands for several."""
    before, _, rest = hf.partition("[")
    choices, _, after = rest.partition("]")
    many = tuple(before + choice + after for choice in choices.split(",")) if rest else (hf,)
    return Rule(f"decoder.layers.{{n}}.{megatron}", tuple(f"model.layers.{{n}}.{name}" for name in many), how, chunk)


RULES: tuple[Rule, ...] = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocabulary", "first"),
    _layer("input_layernorm.weight", "input_layernorm.weight", "whole", "plain norm"),
    _layer("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", "whole", "fused norm"),
    _layer("self_attention.linear_qkv.weight", "self_attn.[q,k,v]_proj.weight", "groups"),
    _layer("self_attention.linear_qkv.bias", "self_attn.[q,k,v]_proj.bias", "groups"),
    _layer("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "whole"),
    _layer("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "whole"),
    _layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "columns"),
    _layer("self_attention.linear_proj.bias", "self_attn.o_proj.bias", "whole"),
    _layer("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "whole", "plain norm of mlp"),
    _layer("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight", "whole", "fused norm of mlp"),
    _layer("mlp.linear_fc1.weight", "mlp.[gate,up]_proj.weight", "rows"),
    _layer("mlp.linear_fc2.weight", "mlp.down_proj.weight", "columns"),
    _layer("mlp.router.weight", "mlp.gate.weight", "whole"),
    _layer("mlp.experts.local_experts.{e}.linear_fc1.weight", "mlp.experts.{e}.[gate,up]_proj.weight", "rows", "apart"),
    _layer("mlp.experts.local_experts.{e}.linear_fc2.weight", "mlp.experts.{e}.down_proj.weight", "columns", "apart"),
    _layer("mlp.experts.linear_fc1.weight{e}", "mlp.experts.{e}.[gate,up]_proj.weight", "rows", "grouped"),
    _layer("mlp.experts.linear_fc2.weight{e}", "mlp.experts.{e}.down_proj.weight", "columns", "grouped"),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",), "whole", "last"),
    Rule("output_layer.weight", ("lm_head.weight",), "vocabulary", "last"),
    Rule("output_layer.weight", ("model.embed_tokens.weight",), "vocabulary", "tied copy"),
    Rule("output_layer.weight", ("score.weight",), "whole", "last"),
)  # fmt: skip


class Held(NamedTuple):
    """What one chunk of one rank holds, for `join`.

    Attributes:
        where: The chunk.
        tensors: By Megatron's names: weights, gradients, or moments. Keys of ``_extra_state`` are passed over.
        flat: For a distributed optimizer's shards, which slice of the flattened tensor each is. A rank then need not
            have all of its tensors.
    """

    where: Where
    tensors: Mapping[str, Any]
    flat: Mapping[str, Flat] | None = None


@lru_cache(maxsize=64)
def names(model: ModelConfig, critic: bool = False) -> Mapping[str, Ints]:
    """Shapes of the canonical tensors by name, in no particular order: those of `Policy`'s ``named_parameters``.

    Args:
        model: its sizes.
        critic: with ``score.weight`` [1, hidden] in place of the language model's head.
    """
    sizes = {
        "vocab": model.vocab_size,
        "hidden": model.hidden_size,
        "queries": model.num_attention_heads * model.head_dim,
        "keys": model.num_key_value_heads * model.head_dim,
        "head": model.head_dim,
        "mlp": model.intermediate_size,
        "experts": model.num_experts,
        "expert": model.moe_intermediate_size,
        "value": 1,
    }
    shapes: dict[str, Ints] = {}
    kinds = _models(model, critic)
    for pattern, (shape, models) in TENSORS.items():
        if kinds[models]:
            for n in range(model.num_hidden_layers if "{n}" in pattern else 1):
                for e in range(model.num_experts if "{e}" in pattern else 1):
                    shapes[pattern.format(n=n, e=e)] = tuple(sizes[size] for size in shape.split())
    return MappingProxyType(shapes)


@lru_cache(maxsize=64)
def layout(model: ModelConfig, where: Where, rules: tuple[Rule, ...] = RULES) -> Mapping[str, Local]:
    """What each tensor of a chunk holds, by Megatron's names.

    Raises:
        LayoutError: the model does not divide so.
    """
    shapes, chunks = names(model, where.critic), _chunks(model, where)
    contents: dict[str, Local] = {}
    for rule in rules:
        for name, canonical in _numbered(rule, model, where) if chunks[rule.chunk] else ():
            if all(source in shapes for source in canonical):
                rank, ranks = where.expert_shard if "{e}" in rule.megatron else (where.tp_rank, where.tp)
                parts = [(source, shapes[source]) for source in canonical]
                contents[name] = CUTS[rule.how](Fused(name, parts, rank, ranks, model, where.vocab))
    return MappingProxyType(contents)


def to_local(
    model: ModelConfig, where: Where, canonical: Mapping[str, Tensor], rules: tuple[Rule, ...] = RULES
) -> dict[str, Tensor]:
    """The tensors that a chunk loads, bit for bit; rows that pad the vocabulary are 0.

    Args:
        model: its sizes.
        where: the chunk.
        canonical: the whole tensors; those that other chunks hold may be absent. A tied ``lm_head.weight`` is passed
            over where it is the embedding.
        rules: the mapping.

    Raises:
        LayoutError: the model does not divide so; or a tensor is missing, unexpected, or of another shape.
    """
    shapes = dict(names(model, where.critic))
    embedding, head = canonical.get("model.embed_tokens.weight"), canonical.get("lm_head.weight")
    if model.tie_word_embeddings and not where.critic and head is not None and embedding is not None:
        if not same_bits(head, embedding):
            raise LayoutError("lm_head.weight: tied, yet not the embedding: set tie_word_embeddings = false")
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    for name, tensor in canonical.items():
        if name not in shapes:
            raise LayoutError(f"{name}: the model has no such tensor")
        if tuple(tensor.shape) != shapes[name]:
            raise LayoutError(f"{name}: shape {list(tensor.shape)}, where the model has {list(shapes[name])}")
    tensors = {}
    for name, local in layout(model, where, rules).items():
        for part in local.boxes:
            if part.name not in canonical:
                raise LayoutError(f"{part.name}: missing, and {name} is made of it")
        tensors[name] = take(local, canonical)
    return tensors


def join(model: ModelConfig, held: Iterable[Held], rules: tuple[Rule, ...] = RULES) -> dict[str, Tensor]:
    """The whole tensors, by their canonical names, from those of all ranks: the inverse of `to_local`.

    Every element must be on some rank, and where several hold it they must agree bit for bit. Tied models have no
    ``lm_head.weight``, as in ``named_parameters``.

    Args:
        model: its sizes.
        held: of every rank, replicas included or left out. Read one by one.
        rules: the mapping.

    Raises:
        LayoutError: a tensor or a rank is missing, a tensor is unexpected or of another shape, or replicas differ.
    """
    joining: Joining | None = None
    for where, tensors, flat in held:
        joining = joining or Joining(names(model, where.critic))
        known = layout(model, where, rules)
        parameters = {name: tensor for name, tensor in tensors.items() if not name.endswith("_extra_state")}
        for name in sorted(known.keys() - parameters.keys() if flat is None else ()):
            raise LayoutError(f"{name}: missing on {where}")
        for name, tensor in parameters.items():
            local, cut = _known(known, name, where), None if flat is None else flat.get(name)
            wanted = local.shape if cut is None else _slice(name, local, cut)
            if tuple(tensor.shape) != wanted:
                raise LayoutError(f"{name}: shape {list(tensor.shape)}, where {where} has {list(wanted)}")
            joining.add(local, tensor, cut)
    return (joining or Joining(names(model))).finish()


def placement_of(
    model: ModelConfig, where: Where, name: str, prefix: str = "", flat: Flat | None = None
) -> dict[str, Any]:
    """Which canonical elements a chunk's tensor holds, as data for ``placement`` of `repro_core.Observe`.

    It serves the weight, its gradient, its fp32 main copy and its moments alike.

    Args:
        model: its sizes.
        where: the chunk.
        name: Megatron's.
        prefix: stands before the canonical names, such as ``exp_avg/``.
        flat: the tensor is this slice of the flattened one, one-dimensional.

    Raises:
        LayoutError: the chunk has no such tensor, or not that slice of it.
    """
    local = _known(layout(model, where), name, where)
    if flat is not None:
        _slice(name, local, flat)
    return local.data(prefix, flat)


def _numbered(rule: Rule, model: ModelConfig, where: Where) -> Iterator[tuple[str, list[str]]]:
    """Megatron's name and the canonical ones for every layer of the chunk and every expert of the rank."""
    layers, experts = where.layers_of(model), where.experts_of(model)
    for n, layer in enumerate(layers) if "{n}" in rule.megatron else [(0, 0)]:
        for e, expert in enumerate(experts) if "{e}" in rule.megatron else [(0, 0)]:
            yield rule.megatron.format(n=n, e=e), [name.format(n=layer, e=expert) for name in rule.hf]


def _known(known: Mapping[str, Local], name: str, where: Where) -> Local:
    if name not in known:
        raise LayoutError(f"{name}: {where} has no such tensor")
    return known[name]


def _slice(name: str, local: Local, flat: Flat) -> Ints:
    count = math.prod(local.shape)
    if not 0 <= flat[0] <= flat[1] <= count:
        raise LayoutError(f"{name}: {flat[0]}:{flat[1]} is no slice of its {count} elements")
    return (flat[1] - flat[0],)
