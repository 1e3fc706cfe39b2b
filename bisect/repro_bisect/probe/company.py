"""Which runs had others beside them, and runs that have none: what all share may have come between them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from repro_bisect.probe.executors import Outcome
from repro_bisect.probe.reasons import kind_of
from repro_golden.base.errors import NotVerifiableError
from repro_golden.replay.children import CancelledError

__all__ = ["Company", "DisturbedError", "InCompany"]

_LOOK = 0.1
"""Seconds between two looks whether a run that waits is still wanted."""
_ENOUGH = 3
"""Kinds of skips that were skips alone too, after which none is doubted."""
_OFTEN = 4
"""One run beside others of so many, at least, fails and does not alone, where they disturb each other."""


class DisturbedError(NotVerifiableError):
    """Points say otherwise alone than beside other probes: nothing that was made side by side is to be trusted."""

    def __init__(self, what: str) -> None:
        """Say what differs."""
        super().__init__(
            f"{what}: probes that run at once may disturb each other, by a path, cache or port that they share; "
            "`-j 1` runs them one by one"
        )


@dataclass(eq=False)
class InCompany:
    """A run under way, and whether another one was it at the same time."""

    beside: bool = False


class Company:
    """The runs under way, and what became of skips beside others that were tried alone.

    Attributes:
        doubting: Held by whoever tries a skip alone: the next one may be of the same kind.
    """

    def __init__(self) -> None:
        self._changed, self._runs, self._alone = threading.Condition(), list[InCompany](), 0
        self._beside, self._borne_out, self._refuted, self._disturbed = 0, set[str](), set[str](), 0
        self.doubting = threading.RLock()

    @contextlib.contextmanager
    def run(self, *, alone: bool, cancel: threading.Event | None = None) -> Iterator[InCompany]:
        """A run, once those are through that want to be alone; such a one, once no other is under way.

        Raises:
            CancelledError: `cancel` was set before its turn.
        """
        mine = InCompany()
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
                self._beside += mine.beside
                self._runs = [run for run in self._runs if run is not mine]
                self._changed.notify_all()

    def trusted(self, outcome: Outcome, point: str) -> Outcome:
        """An outcome that rests on nothing which another run at the same time installed, or was started on.

        Raises:
            DisturbedError: it may.
        """
        if outcome.beside and outcome.installs:
            raise DisturbedError(f"{point} installs {outcome.installs} where other probes look for their code")
        return outcome

    def _wait(self, cancel: threading.Event | None) -> None:
        if cancel and cancel.is_set():
            raise CancelledError
        self._changed.wait(_LOOK)

    def believes(self, why: str) -> bool:
        """Whether a skip need not be tried alone: its kind was, or kinds enough, and stayed skips."""
        kind = kind_of(why)
        if kind in self._borne_out:
            return kind not in self._refuted
        return len(self._borne_out) >= _ENOUGH and not self._refuted

    def tried(self, point: str, why: str, again: str, *, beside: bool = True) -> None:
        """Note what came of a failure that was tried alone. One that is none may be chance; many beside others are not.

        Args:
            point: What was tried.
            why: Why it was skipped, or what the machine lacked.
            again: The same of it alone; '' where it does not fail.
            beside: Whether others ran beside it at first.

        Raises:
            DisturbedError: too many of the runs beside others failed, and do not alone.
        """
        if again:
            self._borne_out.add(kind_of(again))
            return
        self._refuted.add(kind_of(why))
        self._disturbed += beside
        if beside and self._disturbed > 1 and self._disturbed * _OFTEN >= self._beside:
            raise DisturbedError(
                f"{point} can be tested alone, and not beside other probes ({why}), nor could another one before it"
            )
