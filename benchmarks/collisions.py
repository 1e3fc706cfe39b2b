"""Families of distinct tensors that look alike, and their lanes: where a hash that is too simple would collide."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from repro_golden.fingerprint.backends import _numba
from repro_golden.fingerprint.backends.backend import JOB
from repro_golden.fingerprint.kinds import luts

TENSORS = 1 << 21
"""About as many in each family: of their pairs, 512 are expected to agree in a given 32 bits."""
BATCH = 32 << 20  # bytes of tensors that exist at a time
ODD = 0x9E3779B97F4A7C15

Array = npt.NDArray[Any]
Words = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Family:
    """Distinct tensors of one kind: their lanes [n, 2], and how far their pairs that agree in 32 bits vary.

    `spread` is the variance of their number over its mean. It is 1 where each pair meets by its own chance. Where
    all values at some places are combined with all at others, pairs that agree in part of the places meet together.
    """

    name: str
    spread: float
    lanes: Words

    @property
    def expected(self) -> float:
        """Pairs that agree in 32 bits when these are random."""
        return len(self.lanes) * (len(self.lanes) - 1) / 2**33

    @property
    def sigma(self) -> float:
        """Standard deviation of that number."""
        return math.sqrt(self.expected * self.spread)


def lanes_of(content: Array, first: int | Array = 0) -> Words:
    """The lanes [n, 2] of each row of `content`, of which word `first` of a tensor is the first."""
    content = np.ascontiguousarray(content)
    size = content.itemsize * content.shape[1]
    columns = {"address": content.ctypes.data + np.arange(len(content)) * size, "rows": 1, "words": size // 8,
               "first": first, "tail": size % 8}  # fmt: skip
    jobs, sums = np.zeros((len(content), len(JOB)), np.int64), np.empty((len(content), 2), np.uint64)
    for name, column in columns.items():
        jobs[:, JOB.index(name)] = column
    _numba.run(jobs, luts(), sums, np.empty((0, 3)))
    return sums


def survey() -> list[Family]:
    """Every family. No tensor occurs twice, in one of them or in two: sizes or values keep them apart."""
    rng = np.random.default_rng(1)
    normal = rng.standard_normal((TENSORS // 65, 32), np.float32).view(np.uint32)
    halved = (rng.standard_normal((TENSORS // 129, 64), np.float32).view(np.uint32) >> 16).astype(np.uint16)
    random = rng.integers(0, 1 << 64, (TENSORS // 1025, 16), np.uint64)
    constant = np.repeat(np.arange(1, TENSORS // 1025, dtype=np.float32)[:, None], 32, axis=1).view(np.uint64)
    ordered = np.arange(TENSORS // 2017 * 64).reshape(-1, 64)
    signs = np.array([0, 1, -1], np.float32)
    halved_signs = (signs.view(np.uint32) >> 16).astype(np.uint16)
    numbers = np.arange(2, TENSORS + 2)
    ones = int(np.ones(2, np.float32).view(np.uint64)[0])
    families = [
        ("one ULP, fp32 [32]", 1, variants(normal, one_ulp)),
        ("one ULP, bf16 [64]", 1, variants(halved, one_ulp)),
        ("one ULP, fp32 [1048576] of ones", 1,
         everywhere(TENSORS // 4, ones, [ones + 1, ones - 1, ones + 2**32, ones - 2**32])),
        ("one number negated, fp32 [2097152] of ones", 1, everywhere(TENSORS // 2, ones, [ones ^ 2**63, ones ^ 2**31])),
        ("one number negated, complex64 [2097152] of 1 + i", 1, everywhere(TENSORS, ones, [ones ^ 2**63 ^ 2**31])),
        ("one bit, 128 random bytes", 1, variants(random, one_bit)),
        ("one bit, fp32 [32] constant", 1, variants(constant, one_bit)),
        ("two words swapped, int64 [64] arange", 1, variants(ordered, one_swap)),
        ("0 and 1, fp32 [64], sample", 1, drawn(signs[:2], 64, scatter=True)),
        ("-1, 0 and 1, fp32 [41], sample", 1, drawn(signs, 41, scatter=True)),
        ("0 to 15, fp32 [16], sample", 1, drawn(np.arange(16, dtype=np.float32), 16, scatter=True)),
        ("0 and 1, int8 [21], all", combined(256, 256, 32), drawn(np.arange(2, dtype=np.int8), 21)),
        ("-1, 0 and 1, bf16 [13], all", combined(81, 81, 81, 3), drawn(halved_signs, 13)),
        ("0 to 7, int16 [7], all", combined(8**4, 8**3), drawn(np.arange(8, dtype=np.int16), 7)),
        ("constant, fp32 [12]", 1, iter([lanes_of(np.repeat(numbers.astype(np.float32)[:, None], 12, axis=1))])),
        ("arange from n, int64 [5]", 1, iter([lanes_of(numbers[:, None] + np.arange(5))])),
        ("arange permuted, int64 [10], all", permuted(10), (lanes_of(p) for p in permutations(10))),
        ("two numbers shifted in zeros, fp32 [64]", 1, shifted(numbers[: TENSORS // 63].astype(np.float32))),
        ("one number and zeros after it, int64 [1] to [64]", combined(TENSORS // 64, 64), padded(TENSORS // 64)),
        ("found by search, fp32 [4]", 1, iter([lanes_of(FOUND)])),
    ]  # fmt: skip
    return [Family(name, spread, np.concatenate(list(lanes))) for name, spread, lanes in families]


FOUND = np.array([[8903, 31393, -19812, -14709], [-8903, -31393, 19812, 14709]], np.float32)
"""Found by search over pairs [x, y, -u, -v] and [-x, -y, u, v] of whole numbers of 1 to 2^15, against a draft whose
first fold was by half a word: where both halves changed in their highest bit, one was cancelled and the rest not mixed.
"""


def combined(*choices: int) -> float:
    """The spread of all combinations of so many values of each word.

    Pairs that differ in the same words in the same way meet together: a word has q(q - 1) ways to differ, each alone,
    and q to agree, which together weigh q^2.
    """
    return math.prod(2 - 1 / q for q in choices) - 1


def permuted(count: int) -> float:
    """The same of all permutations: of those that differ in j places, the other places' (count - j)! meet together."""
    return sum(sum((-1) ** i / math.factorial(i) for i in range(j + 1)) for j in range(2, count + 1))


def variants(bases: Array, change: Callable[[Array], Array]) -> Iterator[Words]:
    """Each base [n, size] and all its changes."""
    step = max(1, BATCH // change(bases[:1]).nbytes)
    for k in range(0, len(bases), step):
        yield lanes_of(change(bases[k : k + step]).reshape(-1, bases.shape[1]))


def one_ulp(bases: Array) -> Array:
    """Each element alone one step away from zero, or one towards it; bases are bit patterns."""
    eye = np.eye(bases.shape[1], dtype=bases.dtype)
    return bases[:, None] + np.concatenate([0 * eye[:1], eye, 0 - eye])


def one_bit(bases: Array) -> Array:
    """Each bit alone flipped; bases are uint64."""
    bits = np.arange(64 * bases.shape[1])
    masks = np.zeros((1 + len(bits), bases.shape[1]), np.uint64)
    masks[1 + bits, bits // 64] = np.uint64(1) << (bits % 64).astype(np.uint64)
    return bases[:, None] ^ masks


def one_swap(bases: Array) -> Array:
    """Each two words swapped."""
    size = bases.shape[1]
    a, b = np.triu_indices(size, 1)
    order = np.tile(np.arange(size), (1 + len(a), 1))
    order[1 + np.arange(len(a)), a], order[1 + np.arange(len(a)), b] = b, a
    return bases[:, order]


def everywhere(words: int, word: int, others: list[int]) -> Iterator[Words]:
    """One large tensor of equal words, in which each alone is one of `others`.

    Lanes are sums, so they move by as much as those of the word that changes; a whole tensor is read to confirm it.
    """
    content, places = np.full((words, 1), word, np.uint64), np.arange(words)
    base, before = lanes_of(content.T), lanes_of(content, places)
    for other in others:
        lanes = base - before + lanes_of(np.full((words, 1), other, np.uint64), places)
        content[words // 3] = other
        if not np.array_equal(lanes_of(content.T)[0], lanes[words // 3]):
            raise RuntimeError("the lanes of a tensor are not the sum of those of its words")
        content[words // 3] = word
        yield lanes


def drawn(levels: Array, count: int, *, scatter: bool = False) -> Iterator[Words]:
    """Tensors of these values: all there are of `count` elements, or with `scatter` a sample of them.

    The sample's tensors are the digits of multiples of an odd number modulo 2^64, so none comes twice.
    """
    total = TENSORS if scatter else len(levels) ** count
    for start in range(0, total, 1 << 17):
        rest = np.arange(start, min(start + (1 << 17), total), dtype=np.uint64) * np.uint64(ODD if scatter else 1)
        content = np.empty((len(rest), count), levels.dtype)
        for k in range(count):
            rest, digit = np.divmod(rest, np.uint64(len(levels)))
            content[:, k] = levels[digit]
        yield lanes_of(content)


def permutations(count: int) -> Iterator[Array]:
    """All orders of 0 to ``count - 1``, in batches."""
    orders = np.zeros((1, 1), np.int64)
    for n in range(1, count - 1):
        orders = np.concatenate([np.insert(orders, at, n, axis=1) for at in range(n + 1)])
    return (np.insert(orders, at, count - 1, axis=1) for at in range(count))


def shifted(numbers: Array) -> Iterator[Words]:
    """Each number and its negative, side by side in zeros, at every place of 64."""
    for place in range(63):
        content = np.zeros((len(numbers), 64), np.float32)
        content[:, place], content[:, place + 1] = numbers, -numbers
        yield lanes_of(content)


def padded(count: int) -> Iterator[Words]:
    """So many large numbers, each alone and with 1 to 63 zero words after it."""
    content = np.zeros((count, 64), np.uint64)
    content[:, 0] = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(ODD)
    for size in range(1, 65):
        yield lanes_of(content[:, :size])
