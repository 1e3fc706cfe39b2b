"""What git tells the programs that it starts, in the environment. Imports nothing heavy: every command begins here."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from repro_golden.base.errors import ReproError

__all__ = ["forget_repository"]

_SETTINGS = ("GIT_CONFIG_PARAMETERS", "GIT_CONFIG_COUNT")
"""Settings such as safe.directory, which hold everywhere: git hands them on to its submodules too."""


def forget_repository(environment: MutableMapping[str, str]) -> None:
    """Drop the variables by which git tells a hook, an alias or `git rebase --exec` its repository and index.

    Every git command in a worktree would act on those instead. The working directory then says which repository is
    meant; where it says another than the variables did, nothing is guessed.

    Raises:
        ReproError: the working directory is in another repository than the variables name.
    """
    if not any(name.startswith("GIT_") for name in environment):  # as nearly always
        return
    named = _folder_of_git(environment) if "GIT_DIR" in environment else None
    asked = ["git", "rev-parse", "--local-env-vars"]
    for name in subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split():
        if name not in _SETTINGS:
            environment.pop(name, None)
    actual = _folder_of_git(environment) if named else None
    if named and actual and not named.samefile(actual):
        raise ReproError(
            f"GIT_DIR names {named}, but the working directory is in the repository of {actual}: "
            "change to the one that is meant, or unset GIT_DIR"
        )


def _folder_of_git(environment: Mapping[str, str]) -> Path | None:
    """The git folder that git itself takes here; None outside of any."""
    asked = ["git", "rev-parse", "--absolute-git-dir"]
    done = subprocess.run(asked, env=environment, capture_output=True, text=True, check=False)
    return Path(done.stdout.removesuffix("\n")) if done.stdout else None
