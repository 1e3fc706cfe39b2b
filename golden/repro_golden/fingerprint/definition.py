"""psum128, version 1: the definition, its NumPy reference and its algebra.

The content of a tensor is its row-major little-endian bytes, cut into 8-byte words (the last zero-padded). Each word
is mixed with its position by bijections (in the manner of splitmix64: Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014; the last constant is that of MurmurHash3's finaliser) and the mixed words
are summed modulo 2^64 in two lanes. Sums do not depend on order, so the fingerprints of shards add up to the
fingerprint of the whole. dtype and shape are bound in at the end.

The first fold is by 33 and not by half a word: two numbers of 4 bytes that both change their sign would otherwise
cancel most of each other. The position enters the second lane twice, so no two words can trade places unseen by both.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from repro_golden.base.canonical import xxh3_128_hexdigest

__all__ = [
    "C1", "C2", "C3", "C4", "SCHEME", "Lanes", "add", "bind", "frame", "reference", "reference_in_pieces",
    "reference_word",
]  # fmt: skip

SCHEME = "psum128/1"
C1, C2, C3, C4 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xFF51AFD7ED558CCD
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
    import numpy as np

    c1, c2, c3, c4 = (np.uint64(c) for c in (C1, C2, C3, C4))
    w = np.frombuffer(content + bytes(-len(content) % 8), dtype="<u8")
    key = np.arange(first_word + 1, first_word + 1 + len(w), dtype=np.uint64) * c1
    z = w ^ key
    z = (z ^ (z >> np.uint64(33))) * c2
    z = (z ^ (z >> np.uint64(29))) * c3
    z = z ^ (z >> np.uint64(32))
    a, b = z * c1, (z ^ key) * c4
    a, b = a ^ (a >> np.uint64(32)), b ^ (b >> np.uint64(32))
    return Lanes(int(a.sum(dtype=np.uint64)), int(b.sum(dtype=np.uint64)))


def reference_in_pieces(content: bytes | memoryview) -> Lanes:
    """`reference` of a content of any size, with the memory that a piece of it takes."""
    return add(reference(bytes(content[at : at + _PIECE]), at // 8) for at in range(0, len(content), _PIECE))


_PIECE = 1 << 22
"""Bytes that are hashed at once."""


def reference_word(word: int, index: int = 0) -> Lanes:
    """`reference` of one word, in Python's integers: NumPy is not worth its start for so little."""
    key = (index + 1) * C1 & MASK
    z = word ^ key
    z = (z ^ z >> 33) * C2 & MASK
    z = (z ^ z >> 29) * C3 & MASK
    z ^= z >> 32
    a, b = z * C1 & MASK, (z ^ key) * C4 & MASK
    return Lanes(a ^ a >> 32, b ^ b >> 32)


def add(shares: Iterable[Lanes]) -> Lanes:
    """The lanes of a whole from those of its shards (modulo 2^64; no shards give the lanes of empty content)."""
    a = b = 0
    for share in shares:
        a, b = (a + share.a) & MASK, (b + share.b) & MASK
    return Lanes(a, b)


def bind(lanes: Lanes, dtype: str, shape: Sequence[int]) -> str:
    """The fingerprint: 32 hex digits over lanes, dtype (torch's name, such as ``bfloat16``) and shape."""
    return xxh3_128_hexdigest(frame(dtype, tuple(shape)) + lanes.to_bytes())


@functools.lru_cache(maxsize=4096)
def frame(dtype: str, shape: tuple[int, ...]) -> bytes:
    """What the lanes are bound to: the fingerprint is xxh3_128 over these bytes and the lanes'."""
    return f"{SCHEME}\0{dtype}\0{','.join(map(str, shape))}\0".encode()
