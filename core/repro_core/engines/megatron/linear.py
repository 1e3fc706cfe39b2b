"""Megatron's linear layers with the products of Hugging Face's models, one matrix of theirs at a time.

What differs in Megatron's own, each seen to change bits on a CPU:

- it keeps queries, keys and values in one weight, and gate and up in another: one product over such a weight is
  another call of the matrix library than two or three, and its sums may run in another order;
- it adds a bias to the rounded product, which in bf16 rounds twice;
- it multiplies [tokens, rows, width]: with a single row and a frozen weight torch takes a product of vectors for each
  token, so a frozen reference would not give the bits of the policy that it is a copy of.

Weights, their shards, and what is communicated stay Megatron's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the field's name for it

__all__ = ["GateUpLinear", "OutputLayer", "QkvLinear", "RowLinear", "product"]


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
        found: Tensor = (
            gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=True, group=self.tp_group)
            if self.sequence_parallel
            else copy_to_tensor_model_parallel_region(input_, group=self.tp_group)
        )
        return found


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
