"""Layers of Megatron's GPTModel in the arithmetic of Hugging Face's: norms, attention, products, experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the field's name for it

from repro_core.engines.megatron.shares import held_positions
from repro_core.model.decoder import attention, rms_norm
from repro_core.model.experts import route

__all__ = [
    "CoreAttention",
    "Experts",
    "GateUpLinear",
    "OutputLayer",
    "QkvLinear",
    "RmsNorm",
    "Rotary",
    "Router",
    "RowLinear",
    "product",
]


# -- RMS normalisation inside Megatron's layers, with the arithmetic of `repro_core.model.decoder.rms_norm`
# Megatron's own fallback, ``torch.nn.RMSNorm``, multiplies by the weight before it rounds, which differs in bf16, and
# refuses sequence parallelism.


class RmsNorm(nn.Module):
    """A norm as Megatron's layer specification builds it.

    Args:
        config: Megatron's ``TransformerConfig``.
        hidden_size: of the last dimension: the hidden size, or a head's width for the norm of queries and keys.
        eps: added to the mean of squares.

    Attributes:
        weight: [hidden_size], replicated over the tensor-parallel group. Under sequence parallelism each process sees
            only its tokens, so the attribute ``sequence_parallel`` asks Megatron to sum its gradient over the group.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """`rms_norm` over the last dimension of x [..., hidden_size]."""
        return rms_norm(x, self.weight, self.eps)


# -- the core of attention, and its positions, inside Megatron's layers
# Megatron's own ``DotProductAttention`` fuses the scale into the product of queries and keys and refuses context
# parallelism. This one is `repro_core.model.decoder.attention`, so that one process gives the bits of the policy in
# plain
# torch.
#
# Context parallelism splits a sequence of s tokens into 2n chunks over n processes; process r holds chunks r and
# 2n - 1 - r, so that each has as much of the causal triangle as the others. Keys and values are gathered and put back
# into the order of the sequence: a query then sums over the same slots in the same order as in one process.


class CoreAttention(nn.Module):
    """Causal grouped-query attention of one process's heads; rows are padded on the right, so no other mask is needed.

    Args:
        pg_collection: the process groups of Megatron's layer. The rest of Megatron's signature has no use here.
    """

    def __init__(self, *, pg_collection: Any, **_unused: Any) -> None:
        super().__init__()
        self.group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _attention_mask: Tensor | None,
        packed_seq_params: object | None = None,
        **_unused: Any,
    ) -> Tensor:
        """What each token attends to.

        Args:
            query: [tokens here, rows, heads here, head_dim].
            key: [tokens here, rows, kv heads here, head_dim].
            value: as `key`.
            packed_seq_params: None.

        The mask in Megatron's signature is not read: the causal one is made from the positions.

        Returns:
            [tokens here, rows, heads here x head_dim].

        Raises:
            ValueError: packed sequences are asked for.
        """
        if packed_seq_params is not None:
            raise ValueError("packed sequences need Transformer Engine's attention: the local one has no such kernel")
        size, length = self.group.size(), len(query) * self.group.size()
        here = held_positions(length, self.group.rank(), size).to(query.device)
        if size > 1:
            order = torch.cat([held_positions(length, rank, size) for rank in range(size)]).argsort().to(query.device)
            # Every process of the group uses all keys, so their gradients are summed: a reduce-scatter.
            key, value = (
                gather_from_sequence_parallel_region(
                    kv.contiguous(), tensor_parallel_output_grad=True, group=self.group
                ).index_select(0, order)
                for kv in (key, value)
            )
        visible = (torch.arange(length, device=query.device) <= here[:, None])[None]

        # Rows first in memory, tokens second: the strides of the policy in plain torch, which choose the kernels.
        def rows(x: Tensor) -> Tensor:
            return x.transpose(0, 1).contiguous().transpose(1, 2)

        return attention(rows(query), rows(key), rows(value), visible).transpose(0, 1).contiguous()


class Rotary(RotaryEmbedding):  # type: ignore[misc]
    """Megatron's rotary angles, computed on the device where the tokens are.

    Megatron's own moves its table to CUDA on first use, pins memory to slice it, and caches results by object, which
    keeps process groups alive that a later run in this process has replaced.
    """

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, **_unused: object) -> Tensor:
        """Angles fp32 [tokens here, 1, 1, head_dim] of a sequence of `max_seq_len` tokens, as Megatron orders them."""
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        self.inv_freq: Tensor = self.inv_freq.to(device)
        half: Tensor = self.get_freqs_non_repeated(max_seq_len, offset)
        angles = torch.cat([half, half], dim=-1)[:, None, None]
        if packed_seq or self.cp_group.size() == 1:
            return angles
        here = held_positions(max_seq_len, self.cp_group.rank(), self.cp_group.size())
        return angles.index_select(0, here.to(angles.device))


# -- megatron's linear layers with the products of Hugging Face's models, one matrix of theirs at a time
# What differs in Megatron's own, each seen to change bits on a CPU:
#
# - it keeps queries, keys and values in one weight, and gate and up in another: one product over such a weight is
#   another call of the matrix library than two or three, and its sums may run in another order;
# - it adds a bias to the rounded product, which in bf16 rounds twice;
# - it multiplies [tokens, rows, width]: with a single row and a frozen weight torch takes a product of vectors for each
#   token, so a frozen reference would not give the bits of the policy that it is a copy of.
#
# Weights, their shards, and what is communicated stay Megatron's.


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` of x [tokens, rows, width] as one product of matrices, whatever the number of rows."""
    return F.linear(x.flatten(0, 1), weight, bias).view(x.shape[0], x.shape[1], -1)


class RowLinear(RowParallelLinear):  # type: ignore[misc]
    """Megatron's row-parallel layer: the output projections of attention and of the dense MLP."""

    def _forward_impl(self, input: Tensor, weight: Tensor, **_unused: Any) -> Tensor:  # noqa: A002 - Megatron's name
        # What is left out concerns fused gradients and communication that a row-parallel layer has none of here.
        return product(input, weight)


class _Column(ColumnParallelLinear):  # type: ignore[misc]
    """What the column-parallel layers here share."""

    def whole(self, input_: Tensor) -> Tensor:
        """All tokens' inputs, from those here under sequence parallelism; the gradient is summed over the group."""
        inputs: Tensor = (
            gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=True, group=self.tp_group)
            if self.sequence_parallel
            else copy_to_tensor_model_parallel_region(input_, group=self.tp_group)
        )
        return inputs


class OutputLayer(_Column):
    """Megatron's output layer, over the real rows of the vocabulary alone.

    The rows that only pad it would take part in every softmax. Leaving them out of the product gives logits of the
    same shape, hence bits, as without padding, and an exact 0 as their gradient.

    Attributes:
        rows: How many of this process's rows are real; they come first.
    """

    rows: int

    def forward(self, input_: Tensor, weight: Tensor | None = None, **_unused: object) -> tuple[Tensor, None]:
        """Logits [tokens, rows, real vocabulary here] of input_ [tokens here, rows, hidden]."""
        return product(self.whole(input_), (self.weight if weight is None else weight)[: self.rows]), None


class _Apart(_Column, ABC):
    """A column-parallel layer over several matrices that lie in one weight."""

    @abstractmethod
    def apart(self, rows: Tensor) -> list[Tensor]:
        """The matrices (or biases) in the weight (or bias), in the order in which they are multiplied."""

    @abstractmethod
    def together(self, outputs: list[Tensor]) -> Tensor:
        """Outputs [tokens, rows, width] of the matrices, as one of the weight would lie."""

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """Outputs [tokens, rows, width here] of input_ [tokens here, rows, hidden], and no bias left to add."""
        x, weights = self.whole(input_), self.apart(self.weight)
        biases = [None] * len(weights) if self.bias is None else self.apart(self.bias)
        return self.together([product(x, w, b) for w, b in zip(weights, biases, strict=True)]), None


class QkvLinear(_Apart):
    """Queries, keys and values; the weight holds them by groups: the queries of one key head, this, and its values."""

    def apart(self, rows: Tensor) -> list[Tensor]:
        """The projections to queries, keys and values, heads in order."""
        head = self.config.kv_channels
        per_group = self.config.num_attention_heads // self.config.num_query_groups
        groups = rows.view(-1, (per_group + 2) * head, *rows.shape[1:])
        parts = groups.split_with_sizes([per_group * head, head, head], dim=1)
        return [part.flatten(0, 1) for part in parts]

    def together(self, outputs: list[Tensor]) -> Tensor:
        """By groups again: Megatron's attention takes them apart."""
        groups = outputs[1].shape[-1] // self.config.kv_channels
        return torch.cat([out.view(*out.shape[:2], groups, -1) for out in outputs], dim=-1).flatten(2)


class GateUpLinear(_Apart):
    """Gate and up of a gated MLP; the weight holds this process's rows of one, then those of the other."""

    def apart(self, rows: Tensor) -> list[Tensor]:
        """The projections to the gate, and up."""
        return list(rows.chunk(2))

    def together(self, outputs: list[Tensor]) -> Tensor:
        """Side by side."""
        return torch.cat(outputs, dim=-1)


# -- the router and the experts of a layer, with the arithmetic of Qwen3-MoE in transformers
# Megatron's own rounds the router's scores before it chooses, does not renormalise a softmax over all experts, and
# weights an expert's inner activations rather than its output: other bits each time. Which tokens travel where stays
# Megatron's dispatcher's work.


class Router(TopKRouter):  # type: ignore[misc]
    """`repro_core.model.experts.route`, between Megatron's gate and its dispatcher.

    Attributes:
        router_replay: Where routing is replayed, it says which experts instead of the top k: anything with the
            ``get_replay_topk`` of Megatron's ``RouterReplay``. None leaves the choice to the scores.
        norm_topk_prob: Scale a token's weights to the sum 1. Set by `repro_core.engines.megatron.model`.
    """

    norm_topk_prob = False

    def gating(self, input: Tensor) -> Tensor:  # noqa: A002 - Megatron's name
        """Logits [..., experts] of input [..., hidden], in its dtype."""
        return product(input, self.weight)

    def routing(self, logits: Tensor, **_unused: object) -> tuple[Tensor, Tensor]:
        """Each token's weight for each expert, 0 where it was not chosen, and which were chosen: [tokens, experts]."""
        flat, chosen = logits.reshape(-1, logits.shape[-1]), None
        if self.router_replay is not None:
            scores = torch.softmax(flat.detach(), dim=-1, dtype=torch.float32)
            chosen = self.router_replay.get_replay_topk(scores, self.topk, None, None, _top)[1]
        experts, best = route(flat, self.topk, normalize=self.norm_topk_prob, replay=chosen)
        weights = torch.zeros_like(flat).scatter(1, experts, best)
        return weights, torch.zeros_like(flat, dtype=torch.bool).scatter(1, experts, True)


def _top(scores: Tensor, k: int, *_groups: object, **_named: object) -> tuple[Tensor, Tensor]:
    best, experts = torch.topk(scores, k, dim=-1)
    return best, experts


class Experts(SequentialMLP):  # type: ignore[misc]
    """A process's experts, one after the other; each token's output is weighted after the last projection."""

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Any, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Outputs of tokens that lie expert by expert.

        Args:
            permuted_local_hidden_states: [tokens, hidden].
            tokens_per_expert: how many of them belong to each expert here.
            permuted_probs: [tokens], their weights.

        Returns:
            [tokens, hidden], and no bias.
        """
        counts = [int(count) for count in tokens_per_expert]
        parts = permuted_local_hidden_states.split_with_sizes(counts)
        outputs = [expert(part)[0] for expert, part in zip(self.local_experts, parts, strict=True)]
        weighted = torch.cat(outputs) * permuted_probs[:, None].to(permuted_local_hidden_states.dtype)
        return weighted, None
