"""Whether numbers were rounded: floats that need fewer bits than they have, and decimals that are too short."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction

import numpy as np

from repro.doctor.facts.train_columns import Floats

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
    telling = [value for value in {*values} if not _short_by_nature(value)]
    if len(telling) < _ENOUGH or 2 * len(telling) < len({*values}):
        return None
    places = [_decimals(value) for value in telling]
    most = max(places)
    return most if 0 < most <= _PLACES and sum(place >= most - 1 for place in places) * 2 > len(places) else None


def rounded_digits(values: Sequence[float]) -> int | None:
    """To how many significant digits numbers were rounded; None where they were not. See `rounded_decimals`."""
    telling = [value for value in {*values} if not _short_by_nature(value)]
    if len(telling) < _ENOUGH or 2 * len(telling) < len({*values}):
        return None
    digits = [len(Decimal(repr(value)).normalize().as_tuple().digits) for value in telling]
    most = max(digits)
    return most if most <= _DIGITS and sum(count >= most - 1 for count in digits) * 2 > len(digits) else None


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
