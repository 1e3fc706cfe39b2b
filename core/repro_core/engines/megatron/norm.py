"""RMS normalisation inside Megatron's layers, with the arithmetic of `repro_core.model.decoder.rms_norm`.

Megatron's own fallback, ``torch.nn.RMSNorm``, multiplies by the weight before it rounds, which differs in bf16, and
refuses sequence parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from repro_core.model.decoder import rms_norm

__all__ = ["RmsNorm"]


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
