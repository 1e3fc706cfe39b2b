"""Tensors of any dtype and strides as stretches that can be copied, in the order of their content."""

from __future__ import annotations

from collections.abc import Iterator

import torch

__all__ = ["carried", "views"]

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def carried(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as a dtype that torch can copy: it has no copy for some of its small ones."""
    lazy = tensor.is_conj() or tensor.is_neg()  # these are carried out by the copy
    return tensor if lazy or tensor.element_size() not in _CARRIERS else tensor.view(_CARRIERS[tensor.element_size()])


def views(tensor: torch.Tensor, limit: int, start: int = 0) -> Iterator[tuple[torch.Tensor, int]]:
    """Views of at most `limit` elements that make up the tensor row-major, and the element each begins with.

    The tensor's own first element is number `start`.
    """
    count = tensor.numel()
    if count <= limit:
        if count:
            yield tensor, start
        return
    while tensor.shape[0] == 1:
        tensor = tensor[0]
    row = count // tensor.shape[0]
    if row * 8 > limit:
        for k in range(tensor.shape[0]):
            yield from views(tensor[k], limit, start + k * row)
    else:  # eight rows begin at a word again
        rows = limit // row // 8 * 8
        for k in range(0, tensor.shape[0], rows):
            yield tensor[k : k + rows], start + k * row
