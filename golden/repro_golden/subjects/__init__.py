"""The kinds of subject: how one is started, told what to do, and asked who it is.

A kind is a class (`kinds.kind.Kind`) in a file of `kinds/`, which is found there.
"""

from __future__ import annotations

import pkgutil
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from repro_golden.base.errors import ReproError
from repro_golden.case.file import Case
from repro_golden.case.identity import Identity
from repro_golden.recording.attach.code.identify import Built, build, marked
from repro_golden.replay.children import Run, RunResult
from repro_golden.repository.checkout import Place
from repro_golden.subjects import kinds
from repro_golden.subjects.environments import builds, overlays
from repro_golden.subjects.environments.builds import Who
from repro_golden.subjects.kinds.kind import Kind
from repro_golden.subjects.pythons import build_in
from repro_golden.trace import Header, Trace

__all__ = [
    "KINDS",
    "build_of",
    "exit_code",
    "given_to",
    "identity_of",
    "kind_of",
    "launch",
    "loaded_by",
    "packages_in",
    "packages_of",
    "try_out",
    "who_is",
]


def _kinds() -> dict[str, type[Kind]]:
    modules = [import_module(f"{kinds.__name__}.{file.name}") for file in pkgutil.iter_modules(kinds.__path__)]
    classes = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    return {name: cls for cls in classes if issubclass(cls, Kind) for name in vars(cls).get("names", ())}


KINDS: Mapping[str, type[Kind]] = _kinds()
"""Every kind, by the names that case files have for it."""


def kind_of(case: Case) -> Kind:
    """The case's subject, as what it can do."""
    return KINDS[case.subject.kind](case)


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
    return kind_of(case).launch(place, runs, log, cancel, enough)


def exit_code(case: Case, place: Place, log: Path, *, cancel: threading.Event | None = None) -> int:
    """Run the program of a command subject as it is, without a recorder, and return its exit code.

    Raises:
        CancelledError: `cancel` was set.
        ChildFailure: its setup or check failed, it was not found, or it ran out of time.
        MachineFailureError: it was killed from outside, or failed and a disk was full meanwhile.
        ReproError: the subject is no command.
    """
    return kind_of(case).exit_code(place, log, cancel)


def try_out(case: Case, place: Place, log: Path) -> None:
    """Show that what the case says of its subject beside its command is true where it lies.

    Raises:
        ReproError: there is no such folder, or its check fails.
    """
    kind_of(case).try_out(place, log)


def who_is(case: Case, root: Path) -> Who:
    """Who a child of this case would be, without training."""
    return kind_of(case).identity(root)


def identity_of(case: Case, root: Path) -> Identity:
    """The identity that it would have."""
    return who_is(case, root).identity


def packages_of(case: Case, root: Path) -> list[str]:
    """``name==version`` of every package that it could import."""
    return who_is(case, root).packages


def given_to(header: Header) -> Mapping[str, Any]:
    """What a trace tells of the process that the words and variables of its case are for; see `Kind.given`."""
    kind = KINDS.get(str(header.subject.get("kind")))
    return kind.given(header) if kind else {}


def loaded_by(case: Case, trace: Trace, who: Who) -> list[str] | None:
    """Normalised names of the packages that a run loaded and its numbers may rest on; None where nobody said."""
    if trace.modules is None:
        return None
    return kind_of(case).rests_on({who.modules[name] for name in trace.modules if name in who.modules})


def build_of(case: Case, root: Path, *, again: bool = False) -> Built:
    """What stands for the interpreter of a child of this case and the content of all that it could import.

    Where lock files decide the environment, they are part of a commit: the interpreter alone stands for the rest.

    Args:
        case: The case.
        root: The user's checkout.
        again: Whether to pass over what this process remembers of interpreters.
    """
    _remember(not again)
    return kind_of(case).build(root)


def packages_in(case: Case, python: str, root: Path, *, again: bool = False) -> Built:
    """The same of an interpreter that a child said it runs in; without a digest where nothing is known of that."""
    _remember(not again)
    try:
        return build_in(case, python, root)
    except ReproError:
        return Built("", marked([python]))


def _remember(before: bool) -> None:
    if not before:
        for remembered in (build, builds.asked, overlays.edited):
            remembered.cache_clear()
