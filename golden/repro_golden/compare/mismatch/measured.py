"""How far the trainer's log-probs are from those that the rollout engine reported for the tokens it sampled.

Of each unmasked response token ``d = trainer - rollout`` in nats, in fp64. The trainer's column is ``old_log_probs``,
the policy as it was when the rollout's training began; without one ``log_probs``.

=================  ===========================================================================================
gap                ``|d|``
k1                 mean of ``-d``: an unbiased estimate of KL(rollout || trainer), of any sign
k3                 mean of ``exp(d) - 1 - d``: of the same, each term >= 0 (Schulman, 2020)
importance ratio   ``exp(d)``, the weight that brings a sampled token back on policy
percentile         nearest rank: the ``ceil(p / 100 * tokens)``-th smallest gap, a gap that a token has
ess                effective sample size as a share of the tokens: ``sum(r)**2 / sum(r**2) / tokens``
=================  ===========================================================================================

Sums are `math.fsum`: exact, then rounded once, so no order plays a part. Nothing is clamped: a ratio too large for fp64
is infinite, and so are the means and sums that it is in. A token whose log-prob is not finite on a side (minus infinity
on both included: it cannot have been sampled) has no gap: such tokens are counted apart and left out of every number,
and whoever judges the numbers judges that count first. Without a token there is no number (None), rather than a 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from repro_golden.base.canonical import mapping_of
from repro_golden.trace import Trace
from repro_golden.trace.token_columns import Floats, Integers, TokenPairs, pairs_of

__all__ = [
    "NUMBERS",
    "Bucket",
    "Mismatch",
    "Token",
    "difference",
    "exact_sum",
    "measure",
    "of_trace",
    "ratios",
    "token_at",
]

_PER_MILLE = {"p50": 500, "p90": 900, "p99": 990, "p999": 999}


@dataclass(frozen=True)
class Token:
    """One token and what both sides gave it.

    Attributes:
        step: The optimizer update.
        sample: Number of its sample in the update, or in the part; None where the trace does not show lengths.
        position: Its place in the response, from 0; without lengths its place in the column.
        part: Micro-batch and rank, as ``.1@0``, where each showed a column of its own; else empty.
        trainer: Log-prob in nats.
        rollout: Likewise.
    """

    step: int
    sample: int | None
    position: int
    part: str
    trainer: float
    rollout: float

    @property
    def place(self) -> str:
        """Where it is, in words."""
        batch, at, rank = self.part.partition("@")
        of = f" of micro-batch {batch[1:]}" * bool(batch) + f" of rank {rank}" * bool(at)
        return (
            f"token {self.position}{of}"
            if self.sample is None
            else f"sample {self.sample}{of}, position {self.position}"
        )

    def __str__(self) -> str:
        return f"{self.place} (trainer {self.trainer!r}, rollout {self.rollout!r})"


@dataclass(frozen=True)
class Bucket:
    """The gaps of the tokens whose position, or response's length, is from `low` to `high`, both included.

    Attributes:
        low: 0, 1, 2, 4, 8, …
        high: 0, 1, 3, 7, 15, …
        tokens: How many.
        mean: Mean gap in nats.
        max: Largest gap in nats.
    """

    low: int
    high: int
    tokens: int
    mean: float
    max: float


@dataclass(frozen=True)
class Mismatch:
    """The mismatch of one step, or of several taken together. See the module for the numbers.

    Attributes:
        column: Which column is the trainer's: ``old_log_probs`` or ``log_probs``.
        steps: The optimizer updates that the tokens are of.
        tokens: Unmasked tokens with finite log-probs on both sides.
        nonfinite: Unmasked tokens without.
        trainer_nonfinite: Those of them whose trainer's log-prob is NaN or infinite.
        rollout_nonfinite: Those whose rollout's is.
        mean: Mean gap in nats.
        max: Largest gap.
        p50: Percentile of the gaps, as p90, p99 and p999 (99.9).
        k1: KL(rollout || trainer) in nats.
        k3: Likewise.
        ratio_max: Largest importance ratio.
        ratio_min: Smallest.
        above_2: Share of the tokens whose ratio is above 2.
        below_half: Share whose ratio is below 1/2.
        ess: Effective sample size as a share of the tokens.
        worst: The token with the largest gap, the first one of equals.
        bound: In nats; None where none was given.
        over: The first token whose gap is over the bound.
        first_nonfinite: The first token that is not finite.
        by_position: By position in the response.
        by_length: By length of the response. Both are empty where the trace does not show lengths.
    """

    column: str
    steps: Sequence[int]
    tokens: int
    nonfinite: int
    trainer_nonfinite: int
    rollout_nonfinite: int
    mean: float | None
    max: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    p999: float | None
    k1: float | None
    k3: float | None
    ratio_max: float | None
    ratio_min: float | None
    above_2: float | None
    below_half: float | None
    ess: float | None
    worst: Token | None
    bound: float | None
    over: Token | None
    first_nonfinite: Token | None
    by_position: Sequence[Bucket]
    by_length: Sequence[Bucket]

    def numbers(self) -> dict[str, float | None]:
        """`NUMBERS` by name."""
        return {name: value for name, value in vars(self).items() if name in NUMBERS}

    def to_mapping(self) -> dict[str, Any]:
        """JSON types; floats that are not finite as the hex of their bits."""
        return mapping_of(self)

    def __str__(self) -> str:
        bad = f"{self.nonfinite} of {self.tokens + self.nonfinite} tokens not finite" if self.nonfinite else ""
        bad += f", first {self.first_nonfinite}" if self.nonfinite else ""
        if self.mean is None or self.max is None or self.p99 is None or self.k3 is None:
            return bad or "no unmasked token"
        text = f"mean {self.mean:.3g}, p99 {self.p99:.3g}, max {self.max:.3g} nats"
        text += f" at {self.worst.place}" if self.max and self.worst else ""
        text += f"; k3 {self.k3:.3g}; ratio {self.ratio_min:.6g} to {self.ratio_max:.6g}"
        text += f"; {self.tokens} tokens"
        return f"{bad}; {text}" if bad else text


NUMBERS = (
    "tokens", "nonfinite", "mean", "max", "p50", "p90", "p99", "p999", "k1", "k3", "ratio_max", "ratio_min", "above_2",
    "below_half", "ess",
)  # fmt: skip
"""The attributes of a `Mismatch` that two sides are compared by."""


def of_trace(trace: Trace, index: int, bound: float | None = None) -> Mismatch | None:
    """The mismatch of the `index`-th step of a trace; None where it does not show both sides' log-probs.

    Args:
        trace: Any trace with the columns.
        index: Of `trace.steps`.
        bound: Gap in nats over which the first token is named.

    Raises:
        ReproError: the step's rows are missing or damaged.
    """
    pairs = pairs_of(trace, index)
    return None if pairs is None else measure([pairs], bound)


def measure(steps: Sequence[TokenPairs], bound: float | None = None) -> Mismatch:
    """The mismatch of the tokens of one or more steps taken together.

    Args:
        steps: In order; at least one.
        bound: See `of_trace`.
    """
    trainer = np.concatenate([pairs.trainer for pairs in steps])
    rollout = np.concatenate([pairs.rollout for pairs in steps])
    position = np.concatenate([pairs.position for pairs in steps])
    length = np.concatenate([pairs.length for pairs in steps])
    finite = np.isfinite(trainer) & np.isfinite(rollout)
    d = difference(trainer[finite], rollout[finite])
    gap, where = np.abs(d), np.flatnonzero(finite)
    over = where[gap > bound] if bound is not None else where[:0]
    worst = where[np.argmax(gap)] if len(gap) else None
    bad = np.flatnonzero(~finite)
    known = length[finite] >= 0
    return Mismatch(
        column=steps[0].column,
        steps=[pairs.step for pairs in steps],
        tokens=len(d),
        nonfinite=len(bad),
        trainer_nonfinite=int((~np.isfinite(trainer)).sum()),
        rollout_nonfinite=int((~np.isfinite(rollout)).sum()),
        **_numbers(d, gap),
        worst=None if worst is None else token_at(steps, int(worst)),
        bound=bound,
        over=token_at(steps, int(over[0])) if len(over) else None,
        first_nonfinite=token_at(steps, int(bad[0])) if len(bad) else None,
        by_position=_buckets(position[finite][known], gap[known]),
        by_length=_buckets(length[finite][known], gap[known]),
    )


def difference(trainer: Floats, rollout: Floats) -> Floats:
    """``trainer - rollout`` of finite log-probs."""
    with np.errstate(over="ignore"):  # only fp64 columns of absurd size get there: infinitely far apart
        d: Floats = trainer - rollout
        return d


def token_at(steps: Sequence[TokenPairs], index: int) -> Token:
    """The `index`-th of the tokens of some steps, counted through."""
    for pairs in steps:
        if index < len(pairs):
            sample = int(pairs.sample[index])
            return Token(
                step=pairs.step,
                sample=None if sample < 0 else sample,
                position=int(pairs.position[index]),
                part=pairs.parts[int(pairs.part[index])],
                trainer=float(pairs.trainer[index]),
                rollout=float(pairs.rollout[index]),
            )
        index -= len(pairs)
    raise IndexError(index)


def ratios(d: Floats) -> Floats:
    """Importance ratios ``exp(d)``: infinite where fp64 ends (d > 709.78), 0 on the other side."""
    with np.errstate(over="ignore", under="ignore"):
        ratio: Floats = np.exp(d)
        return ratio


def exact_sum(values: Floats) -> float:
    """`math.fsum`, where sums beyond fp64 are infinite and a sum of both infinities is NaN."""
    try:
        return math.fsum(values.tolist()) + 0.0  # -0.0 is no sum of anything
    except OverflowError:  # on the way, perhaps: so far scaled down, none of its parts leaves fp64
        scale = 2.0 ** len(values).bit_length()
        return math.fsum((values / scale).tolist()) * scale
    except ValueError:
        return math.nan


def _numbers(d: Floats, gap: Floats) -> dict[str, Any]:
    """The numbers of some finite tokens by name; all None without one."""
    count = len(d)
    names = [name for name in NUMBERS if name not in ("tokens", "nonfinite")]
    if not count:
        return dict.fromkeys(names)
    ordered, ratio = np.sort(gap), ratios(d)
    with np.errstate(over="ignore", invalid="ignore"):
        # expm1: at d = 1e-5 a term is 5e-11, and exp - 1 alone is off by 1e-16; never below 0 by its rounding
        terms = np.where(np.isposinf(d), np.inf, np.maximum(np.expm1(d) - d, 0.0))
        # relative to the largest, so that no square overflows: the share does not change
        weights = np.where(d == d.max(), 1.0, ratios(d - d.max()))
    total, squares = exact_sum(weights), exact_sum(weights * weights)
    numbers = {
        "mean": exact_sum(gap) / count,
        "max": float(ordered[-1]),
        "k1": exact_sum(-d) / count + 0.0,
        "k3": exact_sum(terms) / count,
        "ratio_max": float(ratio.max()),
        "ratio_min": float(ratio.min()),
        "above_2": int((ratio > 2).sum()) / count,
        "below_half": int((ratio < 0.5).sum()) / count,
        "ess": total * total / squares / count,
    }
    ranks = {name: -(-share * count // 1000) for name, share in _PER_MILLE.items()}
    return numbers | {name: float(ordered[rank - 1]) for name, rank in ranks.items()}


def _buckets(by: Integers, gap: Floats) -> list[Bucket]:
    """Gaps by powers of two of what they are ordered by; buckets without a token are left out."""
    buckets = []
    bits = np.frexp(by.astype(np.float64))[1]  # the bit length: 0, 1, 2 (2 to 3), 3 (4 to 7), …
    for k in np.unique(bits).tolist():
        gaps = gap[bits == k]
        low = (1 << k) >> 1
        buckets.append(Bucket(low, max((1 << k) - 1, 0), len(gaps), exact_sum(gaps) / len(gaps), float(gaps.max())))
    return buckets
