"""The Python of a command line: that which the user's shell would run it with."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Interpreter", "is_ours", "named_by", "python_of", "same_python"]

_PYTHON = re.compile(r"python(\d+(\.\d+)*)?t?")
_WRAPPERS = frozenset(
    ("chrt", "command", "env", "exec", "ionice", "nice", "nohup", "numactl", "setsid", "stdbuf", "taskset", "time")
)
"""Programs that run the rest of their words."""
_NAMES = ("python", "python3")


@dataclass(frozen=True)
class Interpreter:
    """The Python of a command line.

    Attributes:
        path: Its path, not resolved, since an environment's python is a link.
        at: Which word names it, or is a script of it; None where none does.
        program: What that word means: the path of the interpreter or of the script.
    """

    path: str
    at: int | None = None
    program: str = ""


def python_of(command: Sequence[str], folder: Path, variables: Mapping[str, str]) -> Interpreter | None:
    """The interpreter that a command line runs in.

    It is the first word that is one, or is a script of one (torchrun, accelerate), as found on PATH; else that of the
    active environment (VIRTUAL_ENV, CONDA_PREFIX), else the first on PATH.

    Args:
        command: The words.
        folder: Where it is typed.
        variables: The user's environment.

    Returns:
        The interpreter; None where there is none.
    """
    search = variables.get("PATH", os.defpath)
    candidates = [*_named(command, folder, search), *map(Interpreter, _active(variables))]
    candidates += [Interpreter(path) for name in _NAMES if (path := shutil.which(name, path=search))]
    return next((python for python in candidates if os.access(python.path, os.X_OK)), None)


def named_by(command: Sequence[str], folder: Path, search: str) -> str | None:
    """The interpreter that a command line names, itself or by a script of one, as found on `search`, a PATH."""
    return next((python.path for python in _named(command, folder, search) if os.access(python.path, os.X_OK)), None)


def same_python(a: str, b: str) -> bool:
    """Whether two interpreters are one, of one environment."""
    try:
        return Path(a).samefile(b) and Path(a).parent.samefile(Path(b).parent)
    except OSError:
        return False


def _named(command: Sequence[str], folder: Path, search: str) -> list[Interpreter]:
    """The interpreter that the words name, if they do."""
    for at, word in enumerate(command):
        if word.startswith("-") or "=" in word.partition("/")[0] or word.isdigit():
            continue  # an option of a wrapper, a variable, a niceness
        program = os.path.normpath(folder / word) if os.sep in word else shutil.which(word, path=search)
        if program is None or not Path(program).is_file():
            return []
        if _PYTHON.fullmatch(Path(word).name):
            return [Interpreter(program, at, program)]
        if Path(word).name not in _WRAPPERS:
            return [Interpreter(path, at, program) for path in _of_script(Path(program), search)]
    return []


def _of_script(script: Path, search: str) -> list[str]:
    """The interpreter in a script's first line; pip writes it in the second where the path is long or has blanks."""
    try:
        with script.open("rb") as file:
            lines = [os.fsdecode(file.readline(4096)) for _ in range(2)]
    except OSError:
        return []
    if not lines[0].startswith("#!"):
        return []
    argv = lines[0][2:].split()
    if lines[1].startswith("'''exec' "):
        argv = shlex.split(lines[1].removeprefix("'''exec' "))
    names = [word for word in argv if _PYTHON.fullmatch(Path(word).name)]
    paths = [name if os.sep in name else shutil.which(name, path=search) for name in names[:1]]
    return [path for path in paths if path]


def _active(variables: Mapping[str, str]) -> list[str]:
    """The interpreter of the environment that is active."""
    places = [variables[name] for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if variables.get(name)]
    return [str(Path(place) / "bin" / "python") for place in places]


def is_ours(python: str) -> bool:
    """Whether an interpreter is that of the environment that repro runs in."""
    return same_python(python, sys.executable)
