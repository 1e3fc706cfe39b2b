"""The tokens of a train dump that a trainer counts: per-token columns with the loss mask laid over them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from repro_golden.dumps.rollout.arrays import numbers
from repro_golden.dumps.train.joining import Joined

__all__ = ["Counted", "counted", "has_column", "sample_means", "sample_name"]

Floats = npt.NDArray[np.float64]


class Counted(NamedTuple):
    """The tokens of one sample that its loss mask counts.

    Attributes:
        row: The sample's place among those of the rollout.
        positions: Of the tokens in the response, from 0.
        values: Of each column asked for.
    """

    row: int
    positions: npt.NDArray[np.int64]
    values: tuple[Floats, ...]


def has_column(joined: Joined, name: str) -> bool:
    """Whether any sample has a value in a column."""
    return any(value is not None for value in _rows(joined, name))


def counted(joined: Joined, *names: str) -> Iterator[Counted]:
    """The counted tokens of each sample that has all of these columns, with one value for each token of the response.

    Where replicas of a column differ, the first one is taken; rules on replicas say that they differ.
    """
    columns = [_rows(joined, name) for name in names]
    masks = _rows(joined, "loss_masks")
    for row, values in enumerate(zip(*columns, strict=False)):
        parsed = [_floats(value) for value in values]
        if any(array is None for array in parsed) or len({array.size for array in parsed if array is not None}) != 1:
            continue
        arrays = [array for array in parsed if array is not None]
        mask = _floats(masks[row]) if row < len(masks) else None
        counts = np.ones(arrays[0].size, bool) if mask is None or mask.size != arrays[0].size else mask != 0
        yield Counted(row, np.flatnonzero(counts), tuple(array[counts] for array in arrays))


def sample_means(joined: Joined, name: str) -> float | None:
    """A column's mean as the trainers log it: of each sample over its counted tokens, then over the samples.

    Returns:
        None without the column, without counted tokens, and where a value is not finite.
    """
    with np.errstate(all="ignore"):
        means = [float(sample.values[0].mean()) for sample in counted(joined, name) if sample.values[0].size]
        mean = float(np.mean(means)) if means else np.nan
    return mean if np.isfinite(mean) else None


def sample_name(joined: Joined, row: int) -> str:
    """What a sample is called: its index where the dumps say it."""
    index = joined.indices[row] if row < len(joined.indices) else None
    return f"sample {row if index is None else index}"


def _rows(joined: Joined, name: str) -> list[Any]:
    column = joined.columns.get(name) or {}
    return column.get(None) or next(iter(column.values()), [])


def _floats(value: Any) -> Floats | None:
    array = numbers(list(value) if isinstance(value, tuple) else value)
    return None if array is None or array.ndim != 1 else array.astype(np.float64)
