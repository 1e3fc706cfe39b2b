"""What can go wrong, sorted by what the user can do about it. Each message is one line that names the cure."""

from __future__ import annotations

__all__ = ["AbsentError", "MachineFailureError", "NotVerifiableError", "RefusedError", "ReproError"]


class ReproError(Exception):
    """A failure the user can cure; the command line prints it as one line and exits with `exit_code`."""

    exit_code = 2


class NotVerifiableError(ReproError):
    """The question has no answer here: another machine, noise, or nothing but skips."""

    exit_code = 3


class RefusedError(ReproError):
    """A run that must not become a golden run, with the proof it failed."""

    exit_code = 1


class AbsentError(ReproError):
    """What a commit needs is not on this machine. It may be brought: nothing that is kept says so of the commit."""


class MachineFailureError(ReproError):
    """git, DVC, the disk or a worker failed. Never a verdict on a commit: the search stops and can be resumed."""
