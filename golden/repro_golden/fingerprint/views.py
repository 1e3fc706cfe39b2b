"""Tensors of any dtype and strides as stretches that can be copied, in the order of their content."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from repro_golden.fingerprint.definition import Lanes
from repro_golden.fingerprint.share import Share

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["SKETCH", "Scan", "carried", "in_words", "sketch_offsets", "sketch_places", "sketch_positions", "views"]

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


# -- what one pass over a tensor yields


@dataclass(slots=True)
class Scan:
    """What one pass over a tensor yields.

    Attributes:
        lanes: The additive sums of its content.
        nonfinite: Elements that are NaN or infinite (of complex numbers, parts).
        absmax: Largest finite magnitude; 0 when there is none.
        l2: Root of the sum of squares of the finite values, in fp64.
        sketch: Raw bytes of the values at `sketch_positions`; empty for a share, and where all values are kept.
        values: All raw bytes, where they were asked for.
        name: The canonical tensor that this is a share of; empty for the tensor as it was given.
        share: What is known of the canonical tensor; None for a tensor that was given whole.
    """

    lanes: Lanes
    nonfinite: int
    absmax: float
    l2: float
    sketch: bytes
    values: bytes | None = None
    name: str = ""
    share: Share | None = None


# -- which raw values of a tensor its trace row keeps, and where they lie in memory

SKETCH = 16
"""How many raw values of a tensor its trace row keeps."""

_MASK = (1 << 64) - 1


def sketch_places(count: int) -> Sequence[int]:
    """Which elements of a tensor of `count` elements its sketch holds: the same for every run, spread by splitmix64."""
    return range(count) if count <= SKETCH else sorted(_splitmix64(j) % count for j in range(1, SKETCH + 1))


def _splitmix64(index: int) -> int:
    z = index * 0x9E3779B97F4A7C15 & _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return z ^ z >> 31


@functools.lru_cache(maxsize=4096)
def sketch_positions(count: int) -> npt.NDArray[np.int64]:
    """`sketch_places` as an array."""
    import numpy as np

    return np.array(sketch_places(count), np.int64)


@functools.lru_cache(maxsize=4096)
def sketch_offsets(shape: tuple[int, ...], strides: tuple[int, ...], item: int) -> npt.NDArray[np.int64]:
    """Where the sketch's words lie, in bytes from the tensor's first."""
    import numpy as np

    index = np.unravel_index(sketch_positions(math.prod(shape)), shape) if shape else ()
    offsets = sum(
        (np.asarray(i) * s for i, s in zip(index, strides, strict=True)),
        np.zeros(len(sketch_positions(math.prod(shape))), np.int64),
    )
    return in_words(offsets * item, item)


def in_words(offsets: npt.NDArray[np.int64], item: int) -> npt.NDArray[np.int64]:
    """Offsets of elements of `item` bytes as those of their words."""
    if item <= 8:
        return offsets
    import numpy as np

    return (offsets[:, None] + np.arange(0, item, 8)).reshape(-1)
