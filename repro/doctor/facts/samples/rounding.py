"""Whether numbers were rounded: floats that need fewer bits than they have, and decimals that are too short."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction

import numpy as np

from repro.doctor.facts.samples.train_columns import Floats

__all__ = ["narrow_dtype", "rounded_decimals", "rounded_digits"]

_DENOMINATOR = 4096
"""Means over so many samples at most are exact fractions, short by nature."""


def narrow_dtype(values: Floats) -> str:
    """The 16-bit dtype that all values fit, '' where some need more.

    Args:
        values: Finite ones, none 0.
    """
    if not len(values):
        return ""
    with np.errstate(over="ignore", under="ignore"):
        single = values.astype(np.float32)
        if not (single == values).all():
            return ""
        if not (single.view(np.uint32) & 0xFFFF).any():
            return "bfloat16"
        return "float16" if (single.astype(np.float16) == single).all() else ""


def rounded_decimals(values: Sequence[float]) -> int | None:
    """To how many decimals numbers were rounded; None where they were not.

    Numbers that are short by nature say nothing: whole ones, binary fractions, fractions of few samples.

    Args:
        values: Finite ones.
    """
    return _rounded(values, _decimals, _PLACES) or None


def rounded_digits(values: Sequence[float]) -> int | None:
    """To how many significant digits numbers were rounded; None where they were not. See `rounded_decimals`."""
    return _rounded(values, lambda value: len(Decimal(repr(value)).normalize().as_tuple().digits), _DIGITS)


def _rounded(values: Sequence[float], length_of: Callable[[float], int], most: int) -> int | None:
    """The length that more than half of the telling values have, or nearly."""
    telling = [value for value in {*values} if not _short_by_nature(value)]
    if len(telling) < _ENOUGH or 2 * len(telling) < len({*values}):
        return None
    lengths = [length_of(value) for value in telling]
    longest = max(lengths)
    return longest if longest <= most and sum(n >= longest - 1 for n in lengths) * 2 > len(lengths) else None


_ENOUGH = 4
"""Different numbers that must agree."""
_PLACES = 6
_DIGITS = 7
"""A float32 takes 9 significant digits, a float64 up to 17; fewer in all of several numbers were cut."""


def _short_by_nature(value: float) -> bool:
    if value == math.floor(value) or (value * 2.0**20).is_integer():
        return True
    close = Fraction(value).limit_denominator(_DENOMINATOR)
    return abs(float(close) - value) <= 1e-12 * abs(value)


def _decimals(value: float) -> int:
    exponent = Decimal(repr(value)).normalize().as_tuple().exponent
    return max(-exponent, 0) if isinstance(exponent, int) else 0
