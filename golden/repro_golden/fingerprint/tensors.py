"""One tensor: its fingerprint, its scan."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from repro_golden.fingerprint.backends.gpu import _BLOCK, _current, _step, own_memory
from repro_golden.fingerprint.collector import Collector
from repro_golden.fingerprint.definition import MASK
from repro_golden.fingerprint.in_flight import settle
from repro_golden.fingerprint.share import Share
from repro_golden.fingerprint.views import Scan

__all__ = ["Singles", "fingerprint", "fingerprints", "lanes_of_small", "scan", "shares"]

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
    settle((tensor,))
    held = tensor if tensor.is_contiguous() else tensor.contiguous()
    a, b = kernel(held.data_ptr(), size >> 3, size & 7)
    return int(a), int(b)


@functools.cache
def _kernel() -> Any:
    try:
        from repro_golden.fingerprint.backends._numba import lanes
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


# -- lanes of tensors that are read one by one as they pass, on the device: a launch for each, one copy home for all


_ROOM = 1 << 15
"""Tensors whose results lie together."""
_UNROLL, _ROUNDS, _WARPS = 4, 32, 4


class Singles:
    """Reads tensors of one device, each on the stream that is current when it passes.

    Under Triton's interpreter it takes CPU tensors: so its kernel is tested anywhere.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._rooms: list[torch.Tensor] = []
        self._count = 0
        self._compiled: dict[bool, Any] = {}

    def add(self, tensor: torch.Tensor) -> int | None:
        """Read a plain tensor; its number, or None where it does not begin at a multiple of 8 bytes."""
        from repro_golden.fingerprint.backends import _triton

        held = tensor if tensor.is_contiguous() else tensor.contiguous()
        address, size = held.data_ptr(), held.numel() * held.element_size()
        if address % 8:
            return None
        if self._count == _ROOM * len(self._rooms):
            with own_memory(self.device):
                self._rooms.append(torch.zeros(_ROOM * 2, dtype=torch.int64, device=self.device))
        slot, self._count = self._count, self._count + 1
        if not size:
            return slot
        words, tail, aligned = size >> 3, size & 7, address % 16 == 0
        grid = (-(-(words + (tail > 0)) // (_BLOCK * _UNROLL * _ROUNDS)), 1, 1)
        arguments = (address, words, tail, self._rooms[-1], slot % _ROOM)
        constants = (aligned, _BLOCK, _UNROLL, _ROUNDS, _step(_BLOCK))
        compiled = self._compiled.get(aligned)
        with _current(self.device):
            if compiled is not None:
                compiled[grid](*arguments, *constants)
            else:
                self._compiled[aligned] = _triton.whole[grid](*arguments, *constants, num_warps=_WARPS)
        return slot

    def result(self) -> list[tuple[int, int]]:
        """The lanes of each tensor, in the order of their numbers; waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        full, remainder = divmod(self._count, _ROOM)
        used = [_ROOM] * full + [remainder] * (remainder > 0)
        rooms = [room.view(_ROOM, 2)[:n].tolist() for room, n in zip(self._rooms, used, strict=True)]
        return [(a & MASK, b & MASK) for room in rooms for a, b in room]
