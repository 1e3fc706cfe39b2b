"""A weight loader inside of SGLang's processes that spoils a buffer, as memory that was released and never reloaded."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

__all__ = ["spoil"]


def spoil(model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Multiply every table of rotary embeddings by the one number that is sent."""
    ((_, factor),) = named_tensors
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("cos_sin_cache"):
                buffer.mul_(factor.to(buffer.device))
