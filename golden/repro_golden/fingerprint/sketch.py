"""Which raw values of a tensor its trace row keeps, and where they lie in memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["SKETCH", "in_words", "sketch_offsets", "sketch_places", "sketch_positions"]

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
