"""A command line in place of a case file: ``-- python train.py``, and the case that it makes."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from repro_golden.base.canonical import parse_toml
from repro_golden.base.errors import ReproError
from repro_golden.case.file import CASES, Case, first_problem, read_case
from repro_golden.case.python_of import is_ours, python_of

__all__ = ["OPEN_END", "CommandLine"]

OPEN_END = 1_000_000
"""Steps of a command that is replayed to its own end."""


@dataclass(frozen=True)
class CommandLine:
    """A program that is given to be run, and what a case would say of it.

    Attributes:
        argv: The program and its arguments; none where there is no command.
        steps: Optimizer steps; None for all that it makes.
        ranks: Processes that train.
        gpus: GPUs that a run takes.
        metrics: Patterns of its output, whose named groups are metrics.
        pass_env: Variables that it gets though they look secret.
        link: Folders and files of the checkout that git does not track, from where the command is given.
    """

    argv: Sequence[str] = ()
    steps: int | None = None
    ranks: int = 1
    gpus: int = 0
    metrics: Sequence[str] = ()
    pass_env: Sequence[str] = ()
    link: Sequence[Path] = ()

    @property
    def names_python(self) -> bool:
        """Whether its words tell which interpreter runs; else that is what PATH or an environment gives it."""
        python = python_of(self.argv, Path.cwd(), os.environ)
        return python is not None and python.at is not None

    def check(self, beside: str | None = None) -> None:
        """Refuse what does not go together.

        Args:
            beside: The case that was named, if one was.

        Raises:
            ReproError: there are a command and a case, or what belongs to a command without one.
        """
        if self.argv and beside:
            raise ReproError("--case and a command after -- exclude each other: give one of them")
        if not self.argv and self != CommandLine():
            raise ReproError(
                "--steps, --ranks, --gpus, --metric, --pass-env and --link are for a command after --: "
                "a case says them itself"
            )

    def case(self, root: Path, name: str = "command") -> Case:
        """The case that it makes.

        Raises:
            ReproError: a word cannot stand in a case, or one stands for a number of steps that was not given.
        """
        try:
            case = Case.model_validate(parse_toml(self.text(root, name)))
        except ValueError as error:
            why = first_problem(error) if isinstance(error, ValidationError) else error
            raise ReproError(f"the command makes no case ({why})") from None
        if case.subject.told_steps and not self.steps:
            raise ReproError("{step} stands for the number of steps: say how many they are with --steps")
        return case

    def new_file(self, root: Path, name: str) -> Path:
        """Where its case file will be, or is: the same command that was stopped left the same file.

        Raises:
            ReproError: the name is none, or there is another case of that name.
        """
        path = root / CASES / f"{name}.toml"
        if Path(name).name != name:
            raise ReproError(f"{name!r} is no name for a case: use letters, digits, '.', '_' and '-'")
        if path.exists() and path.read_bytes() != self.text(root, name, read_case(path).steps).encode():
            raise ReproError(f"{path} exists: record it with `repro golden record {name}`, or choose another name")
        return path

    def text(self, root: Path, name: str, steps: int | None = None) -> str:
        """The case file.

        Args:
            root: The checkout.
            name: The case's name.
            steps: How many it made, where that was not given.

        Raises:
            ReproError: a word names a file of the folder that it was given in, and it is run in the root.
        """
        python, command = self._python(root)
        _refuse_other_folder(root, command)
        return "\n".join([
            "[case]", f"name = {json.dumps(name)}", f"steps = {self.steps or steps or OPEN_END}", "",
            "[subject]", 'kind = "command"', f"command = {json.dumps(shlex.join(command))}", *python,
            *_search_path(root), *_list("pass_env", self.pass_env), *_list("link", self._linked(root)), "",
            *(["[observe]", *_list("metrics", self.metrics), ""] if self.metrics else []),
            "[resources]", f"ranks = {self.ranks}", *([f"gpus = {self.gpus}"] if self.gpus else []), "",
        ])  # fmt: skip

    def _python(self, root: Path) -> tuple[list[str], Sequence[str]]:
        """The case's `python`, where the command runs in another than ours, and the command.

        The folder of the interpreter comes first on PATH, so that its name alone means it, and the same command line
        makes the same case however the interpreter was named. Behind another program (nice, env) a relative path,
        which means nothing in a worktree, becomes ``{python}``.
        """
        python = python_of(self.argv, Path.cwd(), os.environ)
        if python is None:
            return [], self.argv
        argv = list(self.argv)
        if python.at == 0 and Path(python.program).parent == Path(python.path).parent:
            argv[0] = Path(python.program).name
        elif python.at and python.program == python.path and os.sep in argv[python.at]:
            argv[python.at] = "{python}"
        if is_ours(python.path):
            return [], argv
        path = Path(python.path)
        location = path.relative_to(root) if path.is_relative_to(root) else path
        return [f"python = {json.dumps(str(location))}"], argv

    def _linked(self, root: Path) -> list[str]:
        """What is linked, relative to the root.

        Raises:
            ReproError: it lies elsewhere.
        """
        paths = [Path(os.path.normpath(Path.cwd() / path)) for path in self.link]
        if outside := [path for path in paths if not path.is_relative_to(root) or path == root]:
            raise ReproError(
                f"--link {outside[0]} is not below {root}: link what lies in the checkout, and name what "
                "lies elsewhere by its absolute path in the command"
            )
        return [str(path.relative_to(root)) for path in paths]


def _list(name: str, values: Sequence[str]) -> list[str]:
    return [f"{name} = {json.dumps(list(values))}"] if values else []


def _search_path(root: Path) -> list[str]:
    """The user's PYTHONPATH, which a case must name; what lies in the repository, relative to its root."""
    entries = []
    for entry in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        path = Path(os.path.normpath(Path.cwd() / entry))
        entries.append(str(path.relative_to(root)) if path.is_relative_to(root) else str(path))
    return [f"env = {{ PYTHONPATH = {json.dumps(os.pathsep.join(entries))} }}"] if entries else []


def _refuse_other_folder(root: Path, command: Sequence[str]) -> None:
    """See that no word names a file of the folder that a command is given in, where it means another in the root."""
    here = Path.cwd()
    for word in command[1:] if here != root and here.is_relative_to(root) else ():
        there = word and not Path(word).is_absolute() and (here / word).is_file()
        if there and not ((root / word).exists() and (root / word).samefile(here / word)):
            raise ReproError(
                f"a command runs in the root of its checkout, {root}, where {word} is not this file: "
                f"write {os.path.relpath(here / word, root)}, or where it is to run here, "
                f"sh -c {shlex.quote(f'cd {shlex.quote(os.path.relpath(here, root))} && {shlex.join(command)}')}"
            )
