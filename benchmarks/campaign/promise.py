"""What a part of the campaign is asked for, and what it says."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class Unfinished(Exception):  # noqa: N818 - no error
    """The time was up before all was tried; it says how far it came."""


@dataclass
class Promise:
    """One promise and how it was tried.

    Attributes:
        what: The promise, as one line of the page's table.
        tried: How often it was tried.
        held: How often it held.
        figures: What was measured on the way, by name, with units in the values.
        broken: A line for each try that it did not survive, with what reproduces it.
    """

    what: str
    tried: int = 0
    held: int = 0
    figures: dict[str, str] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def judge(self, held: bool, otherwise: str) -> None:
        """Count one try; `otherwise` is its line among the broken."""
        self.tried += 1
        self.held += held
        if not held:
            self.broken.append(otherwise)


@dataclass(frozen=True)
class Asked:
    """What a part is asked for.

    Attributes:
        seed: Everything drawn follows from it.
        share: How much of the whole is tried, above 0 and at most 1.
        work: An empty folder.
        jobs: Processes at once.
        only: A part of the line of each promise that is tried; empty for all.
        kept: A folder for answers that are not asked for twice; None for none.
        until: The time by `time.monotonic` from which on nothing new is asked.
    """

    seed: int
    share: float
    work: Path
    jobs: int
    only: str = ""
    kept: Path | None = None
    until: float = math.inf

    def wants(self, what: str) -> bool:
        """Whether promises about this are tried."""
        return self.only in what or (bool(what) and what in self.only)

    def count(self, whole: int, least: int = 1) -> int:
        """The share of so many."""
        return max(least, round(whole * self.share))

    def some(self, every: Sequence[T], *names: object) -> list[T]:
        """All of them from a tenth of the whole on; of a smaller share some that are drawn, one at least."""
        few = max(1, round(len(every) * self.share * 10))
        return list(every) if few >= len(every) else self.random("some", *names).sample(list(every), few)

    def random(self, *names: object) -> random.Random:
        """A generator of its own for each purpose, so that one does not move the others."""
        return random.Random(f"{self.seed} {names}")
