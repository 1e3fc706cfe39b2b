"""The command line that does a command again: its ends and its Python pinned, from the repository's root."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from repro_golden.case.file import Case

__all__ = ["again"]

_OF_THE_TELLING = frozenset((
    "as_json", "exit_zero", "export", "fresh", "jobs", "key", "number", "out", "post", "repository", "tensorboard",
))  # fmt: skip
"""Parameters that change how or where an answer is told, and not the answer."""


def again(root: Path | None = None, replayed: Case | None = None, **pinned: Any) -> str:
    """The line of the command that is running.

    Args:
        root: The repository, from which its paths are told; without one they are told as they were given.
        replayed: The case that is: with it, the variables that its program takes from ours are part of the line.
        pinned: Values in place of those given, by the names of the command's parameters; None leaves one out.
    """
    context = click.get_current_context()
    command: Sequence[str] = context.params.get("command") or ()
    before = _variables(replayed, command) if replayed else {}
    argv = context.command_path.split()
    argv += [word for kind in (click.Argument, click.Option) for word in _given(context, kind, pinned, root)]
    if command:
        program, more = _absolute(command)
        before, argv = before | more, [*argv, "--", *program]
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in before.items()), *map(shlex.quote, argv)])


def _given(context: click.Context, kind: type, pinned: dict[str, Any], root: Path | None) -> Iterator[str]:
    """The words of the arguments, or of the options, that were given or are pinned."""
    unsaid = click.core.ParameterSource.DEFAULT
    for parameter in context.command.params:
        name = str(parameter.name)
        if not isinstance(parameter, kind) or name in _OF_THE_TELLING or name == "command":
            continue
        if name not in pinned and context.get_parameter_source(name) == unsaid:
            continue
        value = pinned.get(name, context.params[name])
        option = max(parameter.opts, key=len)
        if isinstance(parameter, click.Option) and parameter.is_flag:
            yield from [option] if value else parameter.secondary_opts[:1]
            continue
        for item in value if isinstance(value, tuple) else () if value is None else (value,):
            yield from (option, _word(item, root)) if isinstance(parameter, click.Option) else (_word(item, root),)


def _word(value: Any, root: Path | None) -> str:
    if isinstance(value, Path) and root is not None:
        path = Path.cwd() / value
        return os.path.relpath(path, root) if path.is_relative_to(root) else str(path)
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _variables(case: Case, command: Sequence[str]) -> dict[str, str]:
    """Those of ours that decide bits and reach the program; of a case's own none, and of a command's PYTHONPATH."""
    from repro_golden.case.identity import BITS_VARIABLES
    from repro_golden.replay.children import BITS_DEFAULTS, base_environment

    handed, env = base_environment(case), case.subject.env
    variables = {
        name: os.environ[name]
        for name in BITS_VARIABLES
        if name in os.environ and name not in env and name not in BITS_DEFAULTS and handed[name] == os.environ[name]
    }
    path = env.get("PYTHONPATH") if command else None
    return variables | ({"PYTHONPATH": path} if path else {})


def _absolute(command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """A program's words with the place of its Python; and what says it where none of the words does."""
    from repro_golden.case.python_of import python_of

    python, argv = python_of(command, Path.cwd(), os.environ), list(command)
    if python is None:
        return argv, {}
    if python.at is not None:
        argv[python.at] = str(Path(python.program).absolute())
        return argv, {}
    home = Path(python.path).parent.parent
    return argv, {"VIRTUAL_ENV": str(home)} if (home / "bin" / "python").exists() else {}
