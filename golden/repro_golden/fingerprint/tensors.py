"""One tensor: its fingerprint, its scan."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from repro_golden.fingerprint.collector import Collector
from repro_golden.fingerprint.share import Share
from repro_golden.fingerprint.views import Scan

__all__ = ["fingerprint", "fingerprints", "lanes_of_small", "scan", "shares"]

_SMALL = 1 << 20
"""Bytes up to which one core reads a tensor at once."""


def fingerprints(tensors: Iterable[torch.Tensor]) -> list[str]:
    """The fingerprints of many whole tensors: on a GPU in one launch and one copy.

    Raises:
        ReproError: a tensor without a content, or one of which other processes hold parts.
    """
    collector = Collector(statistics=False)
    collector.add(list(tensors))
    return collector.finish().fingerprints()


def fingerprint(tensor: torch.Tensor) -> str:
    """128 bits, as 32 hex digits, that stand for content, dtype and shape of one whole tensor; see `fingerprints`."""
    return fingerprints([tensor])[0]


def lanes_of_small(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The lanes of a small plain tensor on the CPU, without what many or large ones need; None for all others.

    Where numba is not installed, always None.
    """
    kernel = _kernel()
    if kernel is None or not tensor.is_cpu or tensor.is_conj() or tensor.is_neg():
        return None
    size = tensor.numel() * tensor.element_size()
    if size > _SMALL:
        return None
    held = tensor if tensor.is_contiguous() else tensor.contiguous()
    a, b = kernel(held.data_ptr(), size >> 3, size & 7)
    return int(a), int(b)


@functools.cache
def _kernel() -> Any:
    try:
        from repro_golden.fingerprint._numba import lanes
    except ImportError:
        return None
    return lanes


def scan(tensor: torch.Tensor) -> Scan:
    """Fingerprint lanes, statistics and sketch of one whole tensor of any dtype, shape, strides and device."""
    collector = Collector()
    collector.add([tensor])
    return collector.finish().result()[0][0]


def shares(tensor: torch.Tensor, placement: object = None) -> dict[str, Share]:
    """What this tensor gives to the fingerprints of canonical tensors, by name.

    Args:
        tensor: The local tensor, or a DTensor.
        placement: What `placement.read` takes; without one, a DTensor's own or the whole tensor.

    Raises:
        ReproError: a tensor without a content, or a placement that does not fit it or cannot be carried.
    """
    from repro_golden.fingerprint.placement import whole

    if placement is None and not hasattr(tensor, "device_mesh"):
        placement = whole("", tuple(tensor.shape))
    collector = Collector(statistics=False)
    collector.add([tensor], [placement])
    return {s.name: s.share for s in collector.finish().result()[0] if s.share is not None}
