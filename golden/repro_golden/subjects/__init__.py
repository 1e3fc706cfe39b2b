"""The kinds of subject, one module each: how one is started, told what to do, and asked who it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from repro_golden.case import Case, CommandSubject, TrainerSubject
from repro_golden.children import Place, Run, RunResult
from repro_golden.errors import ReproError
from repro_golden.identity import Identity
from repro_golden.subjects import command, core, trainers

__all__ = ["exit_code", "identity_of", "launch", "packages_of", "try_out"]


def launch(
    case: Case,
    place: Place,
    runs: Sequence[Run],
    log: Path,
    *,
    cancel: threading.Event | None = None,
    enough: Callable[[], bool] | None = None,
) -> list[RunResult]:
    """Make runs one after the other and return what they say.

    Args:
        case: The case.
        place: The subject's code.
        runs: Each with a subject of its own.
        log: File for the children's output.
        cancel: Ends the child early when it is set.
        enough: Asked now and then, when the traces hold what was made so far; ends the child once it says so. Then
            nothing is returned: what the traces hold is the result.

    Raises:
        CancelledError: `cancel` was set.
        ChildFailure: the subject failed or ran out of time.
        MachineFailureError: the child was killed from outside, or the disk is full.
        ReproError: the instrument refused (bad rollouts, say).
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(b"")
    if isinstance(case.subject, TrainerSubject):
        return [trainers.run(case, case.subject, place, run, log, cancel, enough) for run in runs]
    if isinstance(case.subject, CommandSubject):
        return [command.run(case, case.subject, place, run, log, cancel, enough) for run in runs]
    return core.run_all(case, case.subject, place, runs, log, cancel, enough)


def exit_code(case: Case, place: Place, log: Path, *, cancel: threading.Event | None = None) -> int:
    """Run the program of a command subject as it is, without a recorder, and return its exit code.

    Raises:
        CancelledError: `cancel` was set.
        ChildFailure: its setup or check failed, it was not found, or it ran out of time.
        MachineFailureError: it was killed from outside.
        ReproError: the subject is no command.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(b"")
    if not isinstance(case.subject, CommandSubject):
        raise ReproError(f"{case.name} is of kind {case.subject.kind}, which has no exit code: give a command after --")
    if isinstance(case.subject, TrainerSubject):
        return trainers.exit_code(case, case.subject, place, log, cancel)
    return command.exit_code(case, case.subject, place, log, cancel)


def try_out(case: Case, place: Place, log: Path) -> None:
    """Show that what the case says of its subject beside its command is true where it lies.

    Raises:
        ReproError: there is no such folder, or its check fails.
    """
    if isinstance(case.subject, CommandSubject):
        command.try_out(case, case.subject, place, log)


def identity_of(case: Case, root: Path) -> Identity:
    """The identity a child of this case would have, without training."""
    return _asked(case, root)[0]


def packages_of(case: Case, root: Path) -> list[str]:
    """``name==version`` of every package that a child of this case could import."""
    return _asked(case, root)[1]


def _asked(case: Case, root: Path) -> tuple[Identity, list[str]]:
    if isinstance(case.subject, CommandSubject):
        return command.identity(case, case.subject, root)
    return core.identity(case, case.subject, root)
