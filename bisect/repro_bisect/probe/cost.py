"""What the probes of a bisect cost, by what they were for."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from repro_golden.base.canonical import mapping_of

__all__ = ["Bill", "Cost", "Stage"]

Stage = Literal["ends", "search", "confirmation", "explanation"]
"""What a probe was for."""


@dataclass
class Bill:
    """What some probes cost."""

    probes: int = 0
    steps: int = 0
    seconds: float = 0.0


@dataclass
class Cost:
    """What the probes of one bisect cost, by what they were for; reused ones cost nothing. `began`: when it did."""

    ends: Bill = field(default_factory=Bill)
    search: Bill = field(default_factory=Bill)
    confirmation: Bill = field(default_factory=Bill)
    explanation: Bill = field(default_factory=Bill)
    reused: int = 0
    began: float = field(default_factory=time.monotonic, compare=False)

    @property
    def total(self) -> Bill:
        """All of them."""
        bills = (self.ends, self.search, self.confirmation, self.explanation)
        return Bill(sum(b.probes for b in bills), sum(b.steps for b in bills), sum(b.seconds for b in bills))

    def to_mapping(self) -> dict[str, Any]:
        """JSON types: the totals, and each part."""
        return asdict(self.total) | mapping_of(self, "began")
