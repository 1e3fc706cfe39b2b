"""Which steps of several optimizers belong together; the standard library alone.

Where several optimizers step in turn, one step of each makes a round: it ends where one of them steps again. As long as
one alone was seen there is nothing to wait for, and each step is a round. One that the program makes when a round has
its steps, after others, begins the next: a stage of the training has ended. The process that trains and the one that
writes the trace ask the same rule, so that a run of fewer steps ends between two rounds.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Rounds", "read", "written"]

_JOINED, _ANEW = "\x1f", "\x1e"
"""Between the labels of optimizers that stepped together, and before those made anew: names may hold all that can be
printed."""


def written(labels: Iterable[str], *, anew: bool) -> str:
    """How a raw log has a step of these optimizers."""
    return (_ANEW if anew else "") + _JOINED.join(labels)


def read(text: str) -> tuple[frozenset[str], bool]:
    """The inverse of `written`."""
    return frozenset(text.removeprefix(_ANEW).split(_JOINED)), text.startswith(_ANEW)


class Rounds:
    """The round under way."""

    def __init__(self) -> None:
        self._now: set[str] = set()
        self._closed: set[frozenset[str]] = set()
        self._steps: list[frozenset[str]] = []

    def begins(self, labels: frozenset[str], *, anew: bool) -> bool:
        """Whether a step of these optimizers begins a round.

        Args:
            labels: Theirs.
            anew: Whether one of them steps for the first time, and was made after all steps before. In the first round
                it may be made when it is needed.
        """
        return not self._now or bool(self._now & labels) or (anew and bool(self._closed))

    def step(self, labels: frozenset[str], *, anew: bool) -> tuple[bool, bool]:
        """Take a step of these optimizers: whether it begins a round, and whether that ends with it."""
        begins = self.begins(labels, anew=anew)
        if begins:
            self._close()
        self._now |= labels
        self._steps.append(labels)
        closes = self._closed == {labels}
        if closes:
            self._close()
        return begins, closes

    def _close(self) -> None:
        self._closed.update(self._steps)
        self._now.clear()
        self._steps.clear()
