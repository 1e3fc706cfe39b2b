"""Which steps of several optimizers belong together; the standard library alone.

Where several optimizers step in turn, one step of each makes a round: it ends where one of them steps again. As long as
one alone was seen there is nothing to wait for, and each step is a round. The process that trains and the one that
writes the trace ask the same rule, so that a run of fewer steps ends between two rounds.
"""

from __future__ import annotations

__all__ = ["JOINED", "Rounds"]

JOINED = "\x1f"
"""Between the labels of optimizers that stepped together: names may hold all that can be printed."""


class Rounds:
    """The round under way."""

    def __init__(self) -> None:
        self._now: set[str] = set()
        self._closed: set[frozenset[str]] = set()
        self._steps: list[frozenset[str]] = []

    def begins(self, labels: frozenset[str]) -> bool:
        """Whether a step of these optimizers begins a round."""
        return not self._now or bool(self._now & labels)

    def step(self, labels: frozenset[str]) -> tuple[bool, bool]:
        """Take a step of these optimizers: whether it begins a round, and whether that ends with it."""
        begins = self.begins(labels)
        if begins:
            self._close()
        self._now |= labels
        self._steps.append(labels)
        ends = self._closed == {labels}
        if ends:
            self._close()
        return begins, ends

    def _close(self) -> None:
        self._closed.update(self._steps)
        self._now.clear()
        self._steps.clear()
