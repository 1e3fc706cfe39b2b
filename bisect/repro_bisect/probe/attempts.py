"""Runs of tasks, and which failures are their commits' own: what had others beside it is tried again, alone."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from repro_bisect.axes.axis import short
from repro_bisect.predicates.predicates import Exit
from repro_bisect.probe.answers import kind_of
from repro_bisect.probe.executors import Executor, Outcome, Task
from repro_golden.base.errors import AbsentError, NotVerifiableError, ShortageError
from repro_golden.replay.children import CancelledError, ChildFailure
from repro_golden.subjects.missing import found_missing

__all__ = ["Attempts", "Company", "Control", "DisturbedError"]

_LOOK = 0.1
"""Seconds between two looks whether a run that waits is still wanted."""
_ENOUGH = 3
"""Kinds of skips that were skips alone too, after which none is doubted."""
_OFTEN = 4
"""One run beside others of so many, at least, fails and does not alone, where they disturb each other."""


@dataclass(frozen=True)
class Control:
    """What whoever waits for a probe has to do with it.

    Attributes:
        cancel: Ends the probe without an answer when it is set.
        progress: Told now and then how many steps are made, and of how many at most.
    """

    cancel: threading.Event | None = None
    progress: Callable[[int, int], None] | None = None


class Attempts:
    """Makes the runs of one search.

    Attributes:
        company: Which of them had others beside them.
    """

    def __init__(self, executor: Executor, good: str) -> None:
        """Make runs.

        Args:
            executor: Where they run.
            good: The commit of the good end, which works: what it makes by itself is nothing to be linked.
        """
        self._executor, self._good, self.company = executor, good, Company()
        self._made: frozenset[str] | None = None

    def run(self, task: Task, folder: Path, control: Control, *, alone: bool = False) -> Outcome:
        """What comes of a task. What the machine lacked beside others is tried once more, alone.

        Raises:
            CancelledError: See `Control`.
            MachineFailureError: It was the machine.
            DisturbedError: See `Company`.
            ReproError: The instrument refused.
        """
        with self.company.run(alone=alone, cancel=control.cancel) as run:
            try:
                outcome, lacked = self._once(task, folder, control, run), ""
            except ShortageError as error:
                if not run.beside:
                    raise
                lacked = str(error)
        if not lacked:
            return self._without_made(task, outcome, control)
        for left in folder.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        with self.company.run(alone=True, cancel=control.cancel) as run:
            outcome = self._once(task, folder, control, run)
        with self.company.doubting:
            self.company.tried(short(task.commit), lacked, "")
        return replace(self._without_made(task, outcome, control), tries=2)

    def _once(self, task: Task, folder: Path, control: Control, run: _InCompany) -> Outcome:
        cancel, progress = control.cancel, control.progress
        if progress and not isinstance(task.predicate, Exit):  # whose programs leave no trace that could grow
            progress(0, task.steps)
        report_steps = None if progress is None else lambda steps: progress(steps, task.steps)
        try:
            outcome = replace(self._executor.run(task, folder, cancel, report_steps), beside=run.beside)
        except AbsentError as error:
            return Outcome(ChildFailure("absent", -1, str(error), str(folder / "log")))
        self.has_made(task.commit, outcome.made)
        return self.company.trusted(outcome, short(task.commit))

    def has_made(self, commit: str, files: Iterable[str]) -> None:
        """Note what the program of a commit made by itself: that of GOOD counts."""
        if commit == self._good:
            self._made = (self._made or frozenset()).union(files)

    def _without_made(self, task: Task, outcome: Outcome, control: Control) -> Outcome:
        """An outcome without the advice to link what GOOD's program makes by itself; GOOD's own keeps it."""
        failure = outcome.failure
        message, name = found_missing(failure.message) if failure else ("", "")
        if not failure or not name or task.commit == self._good:
            return outcome
        if self._made is None and outcome.beside:
            with self.company.run(alone=True, cancel=control.cancel):
                self._made = self._made or frozenset()  # GOOD began beside BAD, and may have made it
        if not any(made == name or made.startswith(f"{name}/") for made in self._made or ()):
            return outcome
        shortened = replace(failure, message=message) if failure.code is None else None
        return replace(outcome, failure=shortened, code=failure.code)


class DisturbedError(NotVerifiableError):
    """Points say otherwise alone than beside other probes: nothing that was made side by side is to be trusted."""

    def __init__(self, what: str) -> None:
        """Say what differs."""
        super().__init__(
            f"{what}: probes that run at once may disturb each other, by a path, cache or port that they share; "
            "`-j 1` runs them one by one"
        )


@dataclass(eq=False)
class _InCompany:
    """A run under way, and whether another one was it at the same time."""

    beside: bool = False


class Company:
    """The runs under way, and what became of skips beside others that were tried alone.

    Attributes:
        doubting: Held by whoever tries a skip alone: the next one may be of the same kind.
    """

    def __init__(self) -> None:
        self._changed, self._runs, self._alone = threading.Condition(), list[_InCompany](), 0
        self._beside, self._borne_out, self._refuted, self._disturbed = 0, set[str](), set[str](), 0
        self.doubting = threading.RLock()

    @contextlib.contextmanager
    def run(self, *, alone: bool, cancel: threading.Event | None = None) -> Iterator[_InCompany]:
        """A run, once those are through that want to be alone; such a one, once no other is under way.

        Raises:
            CancelledError: `cancel` was set before its turn.
        """
        mine = _InCompany()
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
