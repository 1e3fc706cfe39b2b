"""What one pass over a tensor yields."""

from __future__ import annotations

from dataclasses import dataclass

from repro_golden.fingerprint.definition import Lanes
from repro_golden.fingerprint.share import Share

__all__ = ["Scan"]


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
