"""A case's `[mismatch]` bounds held against a trace: which are broken, at which step, sample and position."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from repro_golden.base.canonical import mapping_of
from repro_golden.base.checks import Proof
from repro_golden.case.tables import MismatchTable
from repro_golden.compare.mismatch.measured import Mismatch, Token, difference, measure, ratios, token_at
from repro_golden.trace import Trace
from repro_golden.trace.token_columns import Floats, TokenPairs, pairs_of

__all__ = ["Breach", "breaches", "mismatch_checks"]

_NAME = "train/rollout mismatch in bounds"
_LEAST = ("ratio_min", "ess")
"""Numbers that may not be smaller; all others may not be larger."""
_TOKENS: Mapping[str, Callable[[Floats, float], npt.NDArray[np.bool_]]] = {
    "max": lambda d, bound: np.abs(d) > bound,
    "ratio_max": lambda d, bound: ratios(d) > bound,
    "ratio_min": lambda d, bound: ratios(d) < bound,
}
"""Bounds that a single token breaks, and which do. Of the others the token with the largest gap is named."""


@dataclass(frozen=True)
class Breach:
    """A bound that a step breaks.

    Attributes:
        metric: The bound's name; ``nonfinite``, ``columns`` or ``tokens`` for what makes bounds unanswerable.
        detail: The number and its bound, or why there is none.
        step: The optimizer update.
        token: The first token over the bound, or the one with the largest gap where it is one of all tokens.
    """

    metric: str
    detail: str
    step: int
    token: Token | None

    def to_mapping(self) -> dict[str, Any]:
        """JSON types; floats that are not finite as the hex of their bits."""
        return mapping_of(self)

    def __str__(self) -> str:
        if self.token is None:
            return f"step {self.step}: {self.detail}"
        which = "at" if self.metric in (*_TOKENS, "nonfinite") else "the largest gap is at"
        return f"step {self.step}: {self.detail}: {which} {self.token}"


def breaches(table: MismatchTable, trace: Trace) -> list[Breach]:
    """Every bound of a case that a trace breaks, by step and in the table's order; empty without bounds.

    A token that is not finite on a side breaks all bounds, and so does a step without the columns. A step in which no
    token is unmasked breaks none, unless no step has a token.

    Raises:
        ReproError: rows are missing or damaged.
    """
    if not table.bounds:
        return []
    count = len(trace.steps) if table.steps is None else min(table.steps, len(trace.steps))
    broken, tokens = list[Breach](), 0
    for index in range(count):
        step, pairs = trace.steps[index].step, pairs_of(trace, index)
        if pairs is None:
            why = "rollout_log_probs and old_log_probs (or log_probs) of the same tokens were not observed"
            broken.append(Breach("columns", why, step, None))
            continue
        tokens += len(pairs)
        broken += _of_step(table.bounds, pairs, measure([pairs]))
    if not broken and not tokens:
        broken.append(Breach("tokens", "no step has an unmasked token", trace.header.first_step, None))
    return broken


def _of_step(bounds: Mapping[str, float], pairs: TokenPairs, mismatch: Mismatch) -> list[Breach]:
    broken = []
    if mismatch.nonfinite:
        total = mismatch.tokens + mismatch.nonfinite
        detail = f"{mismatch.nonfinite} of {total} tokens not finite"
        broken.append(Breach("nonfinite", detail, pairs.step, mismatch.first_nonfinite))
    values = mismatch.numbers()
    for name, bound in bounds.items():
        value = values[name]
        if value is None:
            continue
        inside = value >= bound if name in _LEAST else (abs(value) if name == "k1" else value) <= bound  # not so of NaN
        if not inside:
            detail = f"{name} {value:.6g}, allowed {'at least' if name in _LEAST else 'at most'} {bound:g}"
            broken.append(Breach(name, detail, pairs.step, _token(name, bound, pairs) or mismatch.worst))
    return broken


def _token(name: str, bound: float, pairs: TokenPairs) -> Token | None:
    """The first token over a bound of single tokens."""
    if name not in _TOKENS:
        return None
    finite = np.isfinite(pairs.trainer) & np.isfinite(pairs.rollout)
    d = difference(np.where(finite, pairs.trainer, 0.0), np.where(finite, pairs.rollout, 0.0))
    over = np.flatnonzero(finite & _TOKENS[name](d, bound))
    return token_at([pairs], int(over[0])) if len(over) else None


def mismatch_checks(table: MismatchTable, trace: Trace) -> list[Proof]:
    """What a recording must show of its mismatch: nothing without bounds."""
    if not table.bounds:
        return []
    broken = breaches(table, trace)
    if broken:
        more = f" ({len(broken) - 1} more)" if len(broken) > 1 else ""
        return [Proof(_NAME, False, f"{broken[0]}{more}")]
    count = len(trace.steps) if table.steps is None else min(table.steps, len(trace.steps))
    steps = [pairs for index in range(count) if (pairs := pairs_of(trace, index)) is not None]
    return [Proof(_NAME, True, str(measure(steps)))]
