"""A command line of a case as words, with the Python and the variables that it runs with."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from repro_golden.base.errors import ReproError
from repro_golden.case.file import Case, CommandSubject, CoreSubject
from repro_golden.case.subject_tables import Subject
from repro_golden.replay.children import base_environment

__all__ = ["argv_of", "beside_case", "interpreter", "replaced", "variables_of"]


def argv_of(text: str, tokens: Mapping[str, str], shell: bool) -> list[str]:
    """The words of a command line with our tokens replaced, literally; other braces stay."""
    if shell:
        return ["/bin/sh", "-c", replaced(text, {name: shlex.quote(value) for name, value in tokens.items()})]
    return [replaced(word, tokens) for word in shlex.split(text)]


def replaced(text: str, tokens: Mapping[str, str]) -> str:
    """A text with our tokens replaced; other braces stay."""
    for name, value in tokens.items():
        text = text.replace("{" + name + "}", value)
    return text


def interpreter(subject: Subject, root: Path, home: Path | None = None) -> str:
    """The Python that a subject runs in: named, found on PATH, in an environment's folder, or ours.

    Args:
        subject: Whose.
        root: The checkout or worktree that it runs in.
        home: The user's own checkout, where `root` is a worktree: environments are seldom part of a commit.

    Raises:
        ReproError: there is none.
    """
    python = subject.own_python
    if python is None:
        return sys.executable
    for path in (place / python / inside for place in (root, home or root) for inside in ("", "bin/python")):
        if path.is_file() and os.access(path, os.X_OK):
            return str(path)  # not resolved: an environment's python is a link
    candidates = [Path(folder) / python for folder in os.get_exec_path()] if os.sep not in python else []
    for path in candidates:
        if path.is_file() and os.access(path, os.X_OK):
            return str(path)
    raise ReproError(f"no Python at {python!r}: correct subject.python")


def variables_of(case: Case, subject: CommandSubject, python: str, tokens: Mapping[str, str]) -> dict[str, str]:
    """The environment of the program. Its Python's folder comes first on PATH; PYTHONPATH is the case's alone."""
    environment = base_environment(case)
    environment["PATH"] = os.pathsep.join([str(Path(python).parent), environment.get("PATH", os.defpath)])
    return environment | {name: replaced(value, tokens) for name, value in subject.env.items()}


def beside_case(ours: Mapping[str, str], subject: CommandSubject | CoreSubject) -> dict[str, str]:
    """What an environment tells its processes, without what the case says itself; PATH is made of both."""
    return {name: value for name, value in ours.items() if name == "PATH" or name not in subject.env}
