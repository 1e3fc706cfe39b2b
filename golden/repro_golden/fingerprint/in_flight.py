"""What a GPU has not done yet: it captures work for a graph, or has copies to make that a program waits for later."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["captures", "settle", "under_way"]

under_way = set[int]()
"""Captures of all threads, where somebody tells (`attach.stepping.whole_graphs`): to wait for a GPU would end them."""


def captures() -> bool:
    """Whether what is put on the current stream is captured, for a CUDA graph, and not done."""
    usable = torch.cuda.is_initialized()  # type: ignore[no-untyped-call] # not so in a fork of a process that used it
    try:
        return bool(usable and torch.cuda.is_current_stream_capturing())
    except RuntimeError:  # after an error that CUDA does not forget, which is the program's
        return False


def settle(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until what lies in pinned memory is there.

    While a CUDA graph is captured nothing is waited for: that would end the capture, before which all was done.

    Args:
        tensors: Plain ones, of any device.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    if under_way or not any(map(torch.Tensor.is_pinned, tensors)) or captures():
        return
    for device in range(torch.cuda.device_count()):
        if torch._C._cuda_hasPrimaryContext(device):  # type: ignore[attr-defined] # none is made for this
            torch.cuda.synchronize(device)
