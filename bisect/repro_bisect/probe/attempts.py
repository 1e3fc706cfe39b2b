"""Runs of tasks, and which of their failures are their commits' own: what may be another's is tried again, alone."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from repro_bisect.axes.axis import short
from repro_bisect.predicates.predicates import Exit
from repro_bisect.probe.company import Company, InCompany
from repro_bisect.probe.executors import Executor, Outcome, Task
from repro_golden.base.errors import AbsentError, ShortageError
from repro_golden.replay.children import ChildFailure
from repro_golden.subjects.missing import found_missing

__all__ = ["Attempts", "Control"]


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

    def _once(self, task: Task, folder: Path, control: Control, run: InCompany) -> Outcome:
        cancel, progress = control.cancel, control.progress
        if progress and not isinstance(task.predicate, Exit):  # whose programs leave no trace that could grow
            progress(0, task.steps)
        told = None if progress is None else lambda steps: progress(steps, task.steps)
        try:
            outcome = replace(self._executor.run(task, folder, cancel, told), beside=run.beside)
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
        own = replace(failure, message=message) if failure.code is None else None
        return replace(outcome, failure=own, code=failure.code)
