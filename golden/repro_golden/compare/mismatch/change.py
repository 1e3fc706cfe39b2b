"""The train/rollout mismatch of two traces of one case, number by number."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from repro_golden.base.canonical import mapping_of, same_float
from repro_golden.compare.mismatch.measured import Mismatch, measure
from repro_golden.compare.renames import first_other_chain
from repro_golden.compare.traces import named_alike
from repro_golden.trace import Trace
from repro_golden.trace.token_columns import pairs_of, trainers_of

__all__ = ["MismatchChange", "Number", "mismatch_change"]


@dataclass(frozen=True)
class Number:
    """One number of the mismatch on both sides.

    Attributes:
        metric: One of `measured.NUMBERS`.
        before: The baseline's; None without a token.
        after: The other side's; likewise.
    """

    metric: str
    before: float | None
    after: float | None

    @property
    def same(self) -> bool:
        """Equal bits."""
        return same_float(self.before, self.after)

    @property
    def ratio(self) -> float | None:
        """The quotient after / before: 1 for equal ones, infinite from 0 to something; None where there is none."""
        if self.before is None or self.after is None:
            return None
        if self.same:
            return 1.0
        if self.before == 0:
            return math.copysign(math.inf, self.after) if self.after else 1.0
        quotient = self.after / self.before
        return None if math.isnan(quotient) else quotient

    def to_mapping(self) -> dict[str, Any]:
        """JSON types; floats that are not finite as the hex of their bits."""
        return mapping_of(self, ratio=self.ratio)


@dataclass(frozen=True)
class MismatchChange:
    """The mismatch of both sides, each over all tokens of the same steps.

    Attributes:
        before: The baseline's.
        after: The other side's.
    """

    before: Mismatch
    after: Mismatch

    def numbers(self) -> list[Number]:
        """All of them, in the order of `measured.NUMBERS`."""
        after = self.after.numbers()
        return [Number(name, value, after[name]) for name, value in self.before.numbers().items()]

    @property
    def same(self) -> bool:
        """Whether nothing moved."""
        return all(number.same for number in self.numbers())

    def to_mapping(self) -> dict[str, Any]:
        """JSON types; floats that are not finite as the hex of their bits."""
        return mapping_of(self, numbers=self.numbers())


def mismatch_change(a: Trace, b: Trace, bound: float | None = None) -> MismatchChange | None:
    """The mismatch of the baseline `a` and of `b` over the steps in which both show one pair of columns.

    Args:
        a: The baseline.
        b: The other trace.
        bound: Gap in nats over which each side's first token is named.

    Returns:
        None where there is no such step.

    Raises:
        ReproError: rows are missing or damaged.
    """
    equal = first_other_chain(a, b) is None  # then b need not be read
    b = named_alike(a, b)
    pairs = []
    for index in range(min(len(a.steps), len(b.steps))):
        if equal:
            before = after = pairs_of(a, index)
        else:  # of one column: two would be as far apart as they are, whatever the engine did
            columns = [name for name in trainers_of(a, index) if name in trainers_of(b, index)]
            before, after = pairs_of(a, index, columns), pairs_of(b, index, columns)
        if before is not None and after is not None:
            pairs.append((before, after))
    if not pairs:
        return None
    first = measure([before for before, _ in pairs], bound)
    return MismatchChange(first, first if equal else measure([after for _, after in pairs], bound))
