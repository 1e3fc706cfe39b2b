"""The core of attention, and its positions, inside Megatron's layers.

Megatron's own ``DotProductAttention`` fuses the scale into the product of queries and keys and refuses context
parallelism. This one is `repro_core.model.decoder.attention`, so that one process gives the bits of the policy in plain
torch.

Context parallelism splits a sequence of s tokens into 2n chunks over n processes; process r holds chunks r and
2n - 1 - r, so that each has as much of the causal triangle as the others. Keys and values are gathered and put back
into the order of the sequence: a query then sums over the same slots in the same order as in one process.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn

from repro_core.engines.megatron.shares import held_positions
from repro_core.model.decoder import attention

__all__ = ["CoreAttention", "Rotary"]


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
