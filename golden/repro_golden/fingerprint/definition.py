"""psum128, version 1: the definition, its NumPy reference and its algebra.

The content of a tensor is its row-major little-endian bytes, cut into 8-byte words (the last zero-padded). Each word
is mixed with its position by a bijection (in the manner of splitmix64: Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014) and the mixed words are summed modulo 2^64 in two lanes. Sums do not
depend on order, so the fingerprints of shards add up to the fingerprint of the whole. dtype and shape are bound in at
the end.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

__all__ = ["C1", "C2", "C3", "SCHEME", "Lanes", "add", "bind", "reference"]

SCHEME = "psum128/1"
C1, C2, C3 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK = (1 << 64) - 1


class Lanes(NamedTuple):
    """The two sums of a tensor's content: what adds up over shards. Each is an integer modulo 2^64."""

    a: int
    b: int

    def to_bytes(self) -> bytes:
        """16 bytes, little-endian, lane a first."""
        return struct.pack("<QQ", self.a, self.b)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Lanes:
        """The inverse of `to_bytes`."""
        return cls(*struct.unpack("<QQ", raw))


def reference(content: bytes, first_word: int = 0) -> Lanes:
    """The definition, in NumPy. `first_word` is the global index of the first word of `content`."""
    c1, c2, c3 = (np.uint64(c) for c in (C1, C2, C3))
    w: npt.NDArray[np.uint64] = np.frombuffer(content + bytes(-len(content) % 8), dtype="<u8")
    i = np.arange(first_word + 1, first_word + 1 + len(w), dtype=np.uint64)
    z = w ^ (i * c1)
    z = (z ^ (z >> np.uint64(32))) * c2
    z = (z ^ (z >> np.uint64(29))) * c3
    y = (z ^ (z >> np.uint64(31))) * c1
    a, b = z ^ (z >> np.uint64(32)), y ^ (y >> np.uint64(32))
    return Lanes(int(a.sum(dtype=np.uint64)), int(b.sum(dtype=np.uint64)))


def add(shares: Iterable[Lanes]) -> Lanes:
    """The lanes of a whole from those of its shards (modulo 2^64; no shards give the lanes of empty content)."""
    a = b = 0
    for share in shares:
        a, b = (a + share.a) & MASK, (b + share.b) & MASK
    return Lanes(a, b)


def bind(lanes: Lanes, dtype: str, shape: Sequence[int]) -> str:
    """The fingerprint: 32 hex digits over lanes, dtype (torch's name, such as ``bfloat16``) and shape."""
    return xxhash.xxh3_128_hexdigest(_frame(dtype, tuple(shape)) + lanes.to_bytes())


@functools.lru_cache(maxsize=4096)
def _frame(dtype: str, shape: tuple[int, ...]) -> bytes:
    return f"{SCHEME}\0{dtype}\0{','.join(map(str, shape))}\0".encode()
