"""What a search shows while it runs, and what its probes cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from repro_golden.base.canonical import mapping_of

__all__ = ["Bill", "Cost", "Event", "Running", "Stage", "Watch"]

Stage = Literal["ends", "search", "confirmation", "explanation"]
"""What a probe was for."""


@dataclass(frozen=True)
class Running:
    """How far a probe is.

    Attributes:
        steps: The steps that it has made.
        of: The steps that it will make at most; None where nobody knows.
        seconds: Since it began.
    """

    steps: int
    of: int | None
    seconds: float


@dataclass(frozen=True)
class Event:
    """Something to show while a bisect runs.

    Attributes:
        text: One line; empty where only the view changed.
        order: Every commit of the range, newest first.
        verdicts: Those that have one.
        running: Commits whose probes run, and how far each is.
        suspects: How many commits may still be the culprit.
        rounds: Rounds of probes still needed at most.
        left: Seconds still needed at most, by what a round took so far; None before one ended.
        posterior: The likeliest culprits with their probability, where verdicts are noisy.
    """

    text: str
    order: Sequence[str] = ()
    verdicts: Mapping[str, str] = field(default_factory=dict)
    running: Mapping[str, Running] = field(default_factory=dict)
    suspects: int = 0
    rounds: int = 0
    left: float | None = None
    posterior: Mapping[str, float] = field(default_factory=dict)


Watch = Callable[[Event], None]


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
