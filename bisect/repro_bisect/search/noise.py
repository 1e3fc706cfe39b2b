"""What outcomes say about two unknown rates: how often a bad commit fails, and how often a good one does.

A commit with the culprit says BAD with one rate, a commit without it with another; neither is known. Each end has a
rate of *wrong* outcomes (GOOD from a commit with the culprit, BAD from one without) that has a Beta distribution before
anything was tested, the same for both ends. Such a rate is integrated out exactly, so that the two rates are never
estimated and then believed.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "CAUTIOUS",
    "USUAL",
    "Count",
    "Floats",
    "Ints",
    "Prior",
    "Rates",
    "entropy",
    "log_chance",
    "log_chance_of_one_rate",
    "wrong_rate",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

Prior = tuple[int, int]
"""As if so many wrong and right outcomes of each end had been seen: Beta(wrong, right)."""

USUAL: Prior = 1, 3
"""A quarter on average, small rates likelier than large ones. Up to a rate of 0.2 of wrong outcomes on both ends the
answers at a threshold of 0.95 are right at least 0.95 of the time, and oftener the rarer wrong outcomes are. At 0.3
both ends are worse than it expects, and one answer of ten is wrong."""

CAUTIOUS: Prior = 2, 4
"""A third on average, and a lucky streak is held for no proof of a small rate: for one test in ten more the answers are
right at least 0.95 of the time up to a rate of 0.3."""


class Rates(NamedTuple):
    """How often a test says BAD, on average over the posterior."""

    good: float
    """Of a commit without the culprit."""
    bad: float
    """Of a commit with it."""


class Count(NamedTuple):
    """The outcomes of one commit's tests."""

    goods: int
    bads: int


def log_chance(wrong: Ints, right: Ints, prior: Prior = USUAL) -> Floats:
    """Log of the chance of these very outcomes of one end, in their order, its rate integrated out."""
    w, r = prior
    table = _log_factorials(int((wrong + right).max(initial=0)) + w + r)
    log_beta: Floats = table[wrong + w - 1] + table[right + r - 1] - table[wrong + right + w + r - 1]
    return log_beta - _log_beta(w, r)


def log_chance_of_one_rate(goods: int, bads: int) -> float:
    """Log of the chance of all outcomes if every commit fails alike, at one rate that is uniform."""
    return _log_beta(1 + bads, 1 + goods)


def wrong_rate(wrong: Ints, right: Ints, prior: Prior = USUAL) -> Floats:
    """Mean of an end's rate of wrong outcomes after so many wrong and right ones."""
    mean: Floats = (wrong + prior[0]) / (wrong + right + sum(prior))
    return mean


def entropy(chance: Floats) -> Floats:
    """Entropy of a yes or no with this chance, in bits; 0 at 0 and at 1."""
    p = np.clip(chance, 0.0, 1.0)  # sums of a posterior pass 1 by a rounding
    q = 1.0 - p
    tiny = np.finfo(np.float64).tiny  # so that 0 log 0 is 0 and not NaN
    bits: Floats = -(p * np.log2(np.maximum(p, tiny)) + q * np.log2(np.maximum(q, tiny)))
    return bits


def _log_beta(a: int, b: int) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _log_factorials(most: int) -> NDArray[Any]:
    """Logs of 0!, 1!, ... up to at least `most`!."""
    return _table(1 << max(8, most.bit_length()))


@lru_cache(maxsize=8)
def _table(size: int) -> NDArray[Any]:
    table = np.array([math.lgamma(i + 1) for i in range(size)])
    table.setflags(write=False)
    return table
