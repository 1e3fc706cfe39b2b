"""Lanes of tensors that are read one by one as they pass, on the device: a launch for each, one copy home for all.

`collector.Collector` reads many tensors in one launch, step by step the same ones. Operations pass one by one, each
with tensors of its own: here nothing is prepared, uploaded or kept for a next time.
"""

from __future__ import annotations

from typing import Any

import torch

from repro_golden.fingerprint.definition import MASK
from repro_golden.fingerprint.gpu import _BLOCK, _current, _own_memory, _step

__all__ = ["Singles"]

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
        from repro_golden.fingerprint import _triton

        held = tensor if tensor.is_contiguous() else tensor.contiguous()
        address, size = held.data_ptr(), held.numel() * held.element_size()
        if address % 8:
            return None
        if self._count == _ROOM * len(self._rooms):
            with _own_memory(self.device):
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
