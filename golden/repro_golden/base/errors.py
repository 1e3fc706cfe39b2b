"""What can go wrong, sorted by what the user can do about it. Each message is one line that names the cure."""

from __future__ import annotations

__all__ = [
    "AbsentError", "MachineFailureError", "NotShownError", "NotVerifiableError", "RefusedError", "ReproError",
    "ShortageError", "UnjudgedError",
]  # fmt: skip


class ReproError(Exception):
    """A failure the user can cure; the command line prints it as one line and exits with `exit_code`."""

    exit_code = 2


class NotVerifiableError(ReproError):
    """The question has no answer here: another machine, noise, or nothing but skips."""

    exit_code = 3


class UnjudgedError(ReproError):
    """Two traces of which a rule cannot say anything: the one is neither good nor bad beside the other."""

    exit_code = 3


class NotShownError(UnjudgedError):
    """A baseline does not show what a rule reads. Of GOOD, the question is to be corrected.

    Attributes:
        lacks: What it does not show, as what is said of it.
        fix: How to correct it.
    """

    exit_code = 2

    def __init__(self, lacks: str, fix: str) -> None:
        super().__init__(lacks, fix)
        self.lacks, self.fix = lacks, fix

    def __str__(self) -> str:
        return f"the baseline {self.lacks}: {self.fix}"


class RefusedError(ReproError):
    """A run that must not become a golden run, with the proof it failed."""

    exit_code = 1


class AbsentError(ReproError):
    """What a commit needs is not on this machine. It may be brought: nothing that is kept says so of the commit."""


class MachineFailureError(ReproError):
    """git, DVC, the disk or a worker failed. Never a verdict on a commit: the search stops and can be resumed."""


class ShortageError(MachineFailureError):
    """The machine had too little of what programs that run at once share: memory, room, processes, a port."""
