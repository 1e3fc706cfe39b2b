"""The kinds of subject, one module each: how one is started, told what to do, and asked who it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from repro_golden.base.canonical import digest
from repro_golden.base.errors import ReproError
from repro_golden.case.file import Case, CommandSubject, TrainerSubject
from repro_golden.case.identity import Identity
from repro_golden.replay.children import Run, RunResult, watched
from repro_golden.repository.place import Place
from repro_golden.subjects import command, core, trainers
from repro_golden.subjects.argv import interpreter
from repro_golden.subjects.environments.builds import Who
from repro_golden.subjects.surroundings import folders_of

__all__ = ["build_of", "exit_code", "identity_of", "launch", "packages_of", "try_out"]


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
        MachineFailureError: the child was killed from outside, or it did not end well and a disk was full meanwhile.
        ReproError: the instrument refused (bad rollouts, say).
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with watched(place, log, case.subject.env, folders_of(case, place.home or place.root)) as disks:
        log.write_bytes(b"")
        results = _launch(case, place, runs, log, cancel, enough)
        if len(results) < len(runs) or any(_cut(*pair) for pair in zip(results, runs, strict=True)):
            disks.blame()
        return results


def _launch(
    case: Case,
    place: Place,
    runs: Sequence[Run],
    log: Path,
    cancel: threading.Event | None,
    enough: Callable[[], bool] | None,
) -> list[RunResult]:
    if isinstance(case.subject, TrainerSubject):
        return [trainers.run(case, case.subject, place, run, log, cancel, enough) for run in runs]
    if isinstance(case.subject, CommandSubject):
        return [command.run(case, case.subject, place, run, log, cancel, enough) for run in runs]
    return core.run_all(case, case.subject, place, runs, log, cancel, enough)


def _cut(result: RunResult, run: Run) -> bool:
    """Whether a run did not make all of its steps: a program may go on, and differ, where it could not write."""
    return run.train and (result.diverged or result.steps < run.steps)


def exit_code(case: Case, place: Place, log: Path, *, cancel: threading.Event | None = None) -> int:
    """Run the program of a command subject as it is, without a recorder, and return its exit code.

    Raises:
        CancelledError: `cancel` was set.
        ChildFailure: its setup or check failed, it was not found, or it ran out of time.
        MachineFailureError: it was killed from outside, or failed and a disk was full meanwhile.
        ReproError: the subject is no command.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(case.subject, CommandSubject):
        raise ReproError(f"{case.name} is of kind {case.subject.kind}, which has no exit code: give a command after --")
    with watched(place, log, case.subject.env, folders_of(case, place.home or place.root)) as disks:
        log.write_bytes(b"")
        if isinstance(case.subject, TrainerSubject):
            code = trainers.exit_code(case, case.subject, place, log, cancel)
        else:
            code = command.exit_code(case, case.subject, place, log, cancel)
        if code:
            disks.blame()
        return code


def try_out(case: Case, place: Place, log: Path) -> None:
    """Show that what the case says of its subject beside its command is true where it lies.

    Raises:
        ReproError: there is no such folder, or its check fails.
    """
    if isinstance(case.subject, CommandSubject):
        command.try_out(case, case.subject, place, log)


def identity_of(case: Case, root: Path) -> Identity:
    """The identity a child of this case would have, without training."""
    return _asked(case, root).identity


def packages_of(case: Case, root: Path) -> list[str]:
    """``name==version`` of every package that a child of this case could import."""
    return _asked(case, root).packages


def build_of(case: Case, root: Path) -> str:
    """What stands for the interpreter of a child of this case and the content of all that it could import.

    Where lock files decide the environment, they are part of a commit: the interpreter alone stands for the rest.
    """
    subject = case.subject
    if isinstance(subject, CommandSubject) and subject.locks:
        python = Path(interpreter(subject, root))
        binary = python.stat()
        return digest("interpreter", str(python.resolve()), f"{binary.st_size} {binary.st_mtime_ns}")
    return _asked(case, root).build


def _asked(case: Case, root: Path) -> Who:
    if isinstance(case.subject, CommandSubject):
        return command.identity(case, case.subject, root)
    return core.identity(case, case.subject, root)
