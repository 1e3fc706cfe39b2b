"""What a search shows while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Event", "Running", "Watch"]


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
