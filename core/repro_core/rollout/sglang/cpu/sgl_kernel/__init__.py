"""Stand-in for SGLang's compiled CPU kernels: what text models on ``torch_native`` attention call, in plain torch.

It registers one operator, the hash of seeded sampling. SGLang looks for the others to see whether it has them, finds
none, and takes the plain torch way through each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from repro_sglang_cpu import only_without_gpu
from torch import Tensor

only_without_gpu("sgl_kernel")

__version__ = "0.0.0"

_BITS = 0xFFFFFFFF


def assign_req_to_token_pool_cpu(
    requests: Tensor, table: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, _width: int
) -> None:
    """Write each request's new slots into its row of the table, columns start to end."""
    taken = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[request, start:end] = slots[taken : taken + end - start].to(table.dtype)
        taken += end - start


def _murmur_hash32(seeds: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """MurmurHash3 of (seed, position, column): int64 [rows, columns] with the values of SGLang's uint32."""
    # int64 wraps as uint64 does, and every step masks what it keeps, so the sign never shows.
    seed, position, column = seeds.view(torch.int64)[:, None], positions[:, None], columns[None, :]
    hashed = _mix(torch.zeros_like(seed), seed & _BITS)
    hashed = _mix(hashed, (seed >> 32) & _BITS)
    hashed = _mix(hashed, position.to(torch.int64) & _BITS)
    hashed = _mix(hashed, column.to(torch.int64) & _BITS) ^ 16
    hashed = ((hashed ^ (hashed >> 16)) * 0x85EBCA6B) & _BITS
    hashed = ((hashed ^ (hashed >> 13)) * 0xC2B2AE35) & _BITS
    return hashed ^ (hashed >> 16)


def _mix(hashed: Tensor, block: Tensor) -> Tensor:
    block = _rotated((block * 0xCC9E2D51) & _BITS, 15)
    mixed = _rotated(hashed ^ ((block * 0x1B873593) & _BITS), 13)
    return (mixed * 5 + 0xE6546B64) & _BITS


def _rotated(value: Tensor, by: int) -> Tensor:
    return ((value << by) | (value >> (32 - by))) & _BITS


_operators = torch.library.Library("sgl_kernel", "FRAGMENT")
_operators.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
_operators.impl("murmur_hash32_cpu", _murmur_hash32, "CPU")


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name}: repro's stand-in for machines without a GPU does not have it")

    return missing
