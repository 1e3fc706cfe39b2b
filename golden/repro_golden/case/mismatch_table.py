"""How far trainer and rollout engine may be apart, as a table of a case: no part of its key, and of no golden run."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["MismatchTable"]

_Most = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=False)] | None


class MismatchTable(BaseModel):
    """`[mismatch]`: bounds of the numbers that `mismatch.Mismatch` has, of each step. Nothing is judged without one."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    steps: int | None = Field(default=None, ge=1)
    """How many steps are judged, the first; all by default. Rollouts that all were sampled from the starting weights
    are off-policy from the second one on."""
    mean: _Most = None
    """Largest mean gap, nats."""
    max: _Most = None
    """Largest gap of any token, nats."""
    p50: _Most = None
    """Largest percentile of the gaps, nats; as p90, p99 and p999, which is 99.9."""
    p90: _Most = None
    p99: _Most = None
    p999: _Most = None
    k1: _Most = None
    """Largest |KL(rollout || trainer)| by k1, nats."""
    k3: _Most = None
    """Largest KL(rollout || trainer) by k3, nats."""
    ratio_max: _Most = None
    """Largest importance ratio."""
    ratio_min: _Most = None
    """Least importance ratio."""
    above_2: _Most = None
    """Largest share of tokens whose ratio is above 2."""
    below_half: _Most = None
    """Largest share of tokens whose ratio is below 1/2."""
    ess: _Most = None
    """Least effective sample size, as a share of the tokens."""

    @property
    def bounds(self) -> dict[str, float]:
        """Those that were set, by name."""
        found = self.model_dump(exclude={"steps"}, exclude_none=True)
        return {name: float(value) for name, value in found.items()}

    @model_validator(mode="after")
    def _bounds_something(self) -> MismatchTable:
        if self.steps is not None and not self.bounds:
            raise ValueError("steps alone bounds nothing: set mean, max, p99, k3, ratio_max or another number")
        return self
