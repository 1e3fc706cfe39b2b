"""What numbers may rest on beside the code, as it was when it was read, and whether it still is so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from repro_golden.base.errors import ReproError

__all__ = ["Snapshot", "Stand", "Watched", "all_of"]

Marks: TypeAlias = Mapping[str, Any]

Stand: TypeAlias = tuple[int, bool]
"""How often something was found to be other than before, and whether it is now as it was at first."""


@dataclass(frozen=True)
class Snapshot:
    """What was read of one thing.

    Attributes:
        facts: Digests of it.
        marks: Of each place that was looked at, taken before that was read, what moves when it is touched.
        look: The marks as they are now. It costs little, where the facts may be dear.
    """

    facts: tuple[str, ...]
    marks: Marks
    look: Callable[[], Marks]


def all_of(name: str, read: Callable[[], tuple[str, ...]]) -> Snapshot:
    """What is read so quickly that it is its own mark, by the name that it is told by."""

    def look() -> Marks:
        return {name: read()}

    marks = look()
    return Snapshot(marks[name], marks, look)


class Watched:
    """One thing that numbers may rest on: what was read of it at first is what a key holds.

    Attributes:
        facts: That.
        last: How it stood when somebody looked last.
        changed: Places that were touched when it was found to be other than before.
    """

    def __init__(self, find: Callable[[bool], Snapshot]) -> None:
        """Read it.

        Args:
            find: Reads it; told whether to pass over all that this process remembers of an earlier reading.
        """
        self._find, self._found, self._lock = find, find(False), threading.Lock()
        self.last: Stand = 0, True
        self.facts, self.changed = self._found.facts, set[str]()

    def stand(self) -> Stand:
        """Look at it; it is read anew only where a place was touched since."""
        with self._lock:
            try:
                marks = self._found.look()
            except ReproError:
                marks = {"what cannot be looked at": ""}
            if marks != self._found.marks:
                try:
                    fresh = self._find(True)
                except ReproError:  # what cannot be read is not what it was
                    fresh = Snapshot((), marks, self._found.look)
                turns = self.last[0]
                if fresh.facts != self._found.facts:
                    turns += 1
                    self.changed.add(min(place for place, _ in marks.items() ^ self._found.marks.items()))
                self._found, self.last = fresh, (turns, fresh.facts == self.facts)
            return self.last
