"""Which runs had others beside them, and runs that have none: what all share may have come between them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from repro_golden.base.errors import NotVerifiableError
from repro_golden.replay.children import CancelledError

__all__ = ["Company", "DisturbedError"]

_LOOK = 0.1
"""Seconds between two looks whether a run that waits is still wanted."""


class DisturbedError(NotVerifiableError):
    """A point says otherwise alone than beside other probes: nothing that was made side by side is to be trusted."""

    def __init__(self, what: str) -> None:
        """Say what differs."""
        super().__init__(
            f"{what}: probes that run at once disturb each other, by a path, cache or port that they share; "
            "`-j 1` runs them one by one"
        )


@dataclass(eq=False)
class _Run:
    """A run under way, and whether another one was it at the same time."""

    beside: bool = False


class Company:
    """The runs under way."""

    def __init__(self) -> None:
        self._changed, self._runs, self._alone = threading.Condition(), list[_Run](), 0

    @contextlib.contextmanager
    def run(self, *, alone: bool, cancel: threading.Event | None = None) -> Iterator[_Run]:
        """A run, once those are through that want to be alone; such a one, once no other is under way.

        Raises:
            CancelledError: `cancel` was set before its turn.
        """
        mine = _Run()
        with self._changed:
            self._alone += alone
        try:
            with self._changed:
                while self._runs if alone else self._alone:
                    self._wait(cancel)
                self._runs.append(mine)
                for run in self._runs if len(self._runs) > 1 else ():
                    run.beside = True
            yield mine
        finally:
            with self._changed:
                self._alone -= alone
                self._runs = [run for run in self._runs if run is not mine]
                self._changed.notify_all()

    def _wait(self, cancel: threading.Event | None) -> None:
        if cancel and cancel.is_set():
            raise CancelledError
        self._changed.wait(_LOOK)
