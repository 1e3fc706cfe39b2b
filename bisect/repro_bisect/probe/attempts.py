"""Runs of tasks, and which of their failures are their commits' own: what may be another's is tried again, alone."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from repro_bisect.axes.axis import short
from repro_bisect.predicates.predicates import Exit
from repro_bisect.probe.company import Company
from repro_bisect.probe.executors import Executor, Outcome, Task
from repro_golden.base.errors import AbsentError, MachineFailureError
from repro_golden.replay.children import ChildFailure
from repro_golden.subjects.missing import found_missing

__all__ = ["Attempts", "Control"]

_NAMED = 3
"""Commits that a remark names."""


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
            good: The commit of the good end, which works: what fails there is not its own doing.
        """
        self._executor, self._good, self.company = executor, good, Company()
        self._made, self._own = set[str](), dict[str, list[str]]()

    def run(self, task: Task, folder: Path, control: Control, *, alone: bool = False) -> Outcome:
        """What comes of a task. What is put down to the machine is tried once more, alone, before it is believed.

        Words of the output that come again there are the commit's own: its exit code, or a skip.

        Raises:
            CancelledError: See `Control`.
            MachineFailureError: It was the machine.
            DisturbedError: See `Company`.
            ReproError: The instrument refused.
        """
        first, error = self._once(task, folder, control, alone=alone)
        if error and not first.beside:
            raise error
        if not first.blamed:
            return self._without_made(task, first, control)
        for left in folder.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        again, error = self._once(task, folder, control, alone=True)
        if error:
            raise error
        if again.blamed and (again.blamed != first.blamed or task.commit == self._good):
            raise MachineFailureError(again.blamed)
        if again.blamed:
            self._own.setdefault(again.blamed, []).append(short(task.commit))
            if failure := again.failure:
                again = replace(again, failure=replace(failure, message=f"{failure.message} ({again.blamed})"))
        elif first.beside:
            with self.company.doubting:
                self.company.tried(short(task.commit), first.blamed, "")
        return replace(self._without_made(task, again, control), tries=2)

    def _once(
        self, task: Task, folder: Path, control: Control, *, alone: bool
    ) -> tuple[Outcome, MachineFailureError | None]:
        """What comes of a task, and the machine's failure where something beside its output tells of one."""
        cancel, progress = control.cancel, control.progress
        if progress and not isinstance(task.predicate, Exit):  # whose programs leave no trace that could grow
            progress(0, task.steps)
        told = None if progress is None else lambda steps: progress(steps, task.steps)
        with self.company.run(alone=alone, cancel=cancel) as run:
            try:
                outcome = self._executor.run(task, folder, cancel, told)
            except MachineFailureError as error:
                return Outcome(blamed=str(error), beside=run.beside), error
            except AbsentError as error:
                return Outcome(ChildFailure("absent", -1, str(error), str(folder / "log"))), None
            self.has_made(outcome.made)
        return self.company.trusted(replace(outcome, beside=run.beside), short(task.commit)), None

    def has_made(self, files: Iterable[str]) -> None:
        """Note what some program made by itself."""
        self._made.update(files)

    def _without_made(self, task: Task, outcome: Outcome, control: Control) -> Outcome:
        """An outcome without the advice to link what the program of another commit makes by itself; GOOD's keeps it."""
        failure = outcome.failure
        message, name = found_missing(failure.message) if failure else ("", "")
        if not failure or not name or task.commit == self._good:
            return outcome
        with self.company.run(alone=True, cancel=control.cancel) if outcome.beside else contextlib.nullcontext():
            pass  # those under way may be making it
        if not any(made == name or made.startswith(f"{name}/") for made in self._made):
            return outcome
        own = replace(failure, message=message) if failure.code is None else None
        return replace(outcome, failure=own, code=failure.code)

    @property
    def remarks(self) -> list[str]:
        """What of the machine is taken for the doing of commits."""
        return [
            f"{', '.join(points[:_NAMED])}{' and others' * (len(points) > _NAMED)}: {why}; so says the output, alone "
            "too, and nothing else: it counts as the program's own failure"
            for why, points in ((why, list(dict.fromkeys(points))) for why, points in self._own.items())
        ]
