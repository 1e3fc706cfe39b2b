"""Numbers as rows hold them: read by who recorded them, and by who puts ranks together, who needs no torch for it."""

from __future__ import annotations

import struct
from typing import Any

from repro_golden.trace.model import METRIC

__all__ = ["NORM", "number_of"]

NORM = "?norm"
"""In a name, before the p of a p-norm of which each rank has its shards' part."""


def number_of(row: Any) -> float:
    """The number in a metric's row, or in that of a tensor of one element."""
    if row.dtype == METRIC:
        return float(struct.unpack("<d", row.values)[0])
    import torch  # only where a program logged a tensor

    raw = bytearray(row.values or row.sketch)
    return float(torch.frombuffer(raw, dtype=getattr(torch, row.dtype)).to(torch.float64).item())
