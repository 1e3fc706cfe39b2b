"""What a run took: the time of its steps and the most memory it held. It decides nothing and is part of no root."""

from __future__ import annotations

import resource
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Usage", "measure", "slowest", "spent_of"]

_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes in the kernel's unit of ru_maxrss."""


@dataclass(frozen=True)
class Usage:
    """What a run took.

    Attributes:
        step_us: Microseconds of each step, the first one's making not counted; empty where nobody measured.
        host_bytes: The most memory of its process that was resident at once.
        device_bytes: The most that torch held on the current GPU; 0 without one.
    """

    step_us: Sequence[int]
    host_bytes: int
    device_bytes: int

    @property
    def step_seconds(self) -> float | None:
        """Median time of a step, without the first where there are others: it warms up."""
        steps = self.step_us[1:] or self.step_us
        return statistics.median(steps) / 1e6 if steps else None

    @property
    def memory(self) -> int:
        """Bytes: the GPU's where one was used, else the host's."""
        return self.device_bytes or self.host_bytes

    def to_mapping(self) -> dict[str, Any]:
        """JSON types."""
        return asdict(self) | {"step_us": list(self.step_us)}


def measure(seconds: Iterable[float]) -> dict[str, Any]:
    """What this process took so far, as JSON types; `seconds` are its steps'."""
    torch = sys.modules.get("torch")
    used = torch is not None and torch.cuda.is_initialized()
    device = torch.cuda.max_memory_allocated() if torch is not None and used else 0
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT
    return Usage([round(1e6 * s) for s in seconds], host, device).to_mapping()


def slowest(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One for all ranks: the steps of the slowest, the memory of the largest."""
    return {
        "step_us": max((list(rank["step_us"]) for rank in ranks), key=sum, default=[]),
        "host_bytes": max((rank["host_bytes"] for rank in ranks), default=0),
        "device_bytes": max((rank["device_bytes"] for rank in ranks), default=0),
    }


def spent_of(end: Mapping[str, Any] | None) -> Usage | None:
    """What a trace's closing line says of it; None where that is missing, cut off, or of an older recorder."""
    raw = (end or {}).get("spent")
    return Usage(list(raw["step_us"]), int(raw["host_bytes"]), int(raw["device_bytes"])) if raw else None
