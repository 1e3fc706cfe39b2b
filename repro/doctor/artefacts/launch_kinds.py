"""What a launch is: flags, variables, and what the trainer's parsers know. `kinds` has these with all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from repro_golden.base.checks import Where
from repro_golden.base.systems import System

__all__ = ["Flag", "Launch", "Origin", "ParserDump", "PythonCode", "Step", "Variable", "Way"]


@dataclass(frozen=True)
class Flag:
    """A flag of a command line.

    Attributes:
        name: As written, with its dashes, without a value behind ``=``.
        values: Its values; none for a switch. What a shell would have to compute stays as written (``$GPUS``).
        where: File and line.
    """

    name: str
    values: tuple[str, ...]
    where: Where


Origin = Literal["export", "prefix", "runtime-env", "unset"]


@dataclass(frozen=True)
class Variable:
    """An environment variable that a launch sets.

    Attributes:
        value: Its value; what a shell would have to compute stays as written.
        origin: ``export`` in the script, ``prefix`` of the command, ``runtime-env`` of a submitted Ray job, which alone
            is sure to reach the actors; ``unset`` where the script removes it.
        where: File and line.
    """

    value: str
    origin: Origin
    where: Where


@dataclass(frozen=True)
class Launch:
    """A launch script or argv: what starts a trainer.

    Attributes:
        path: The script; the word ``argv`` where it was given on the command line.
        argv: The trainer's command line with variables and arrays of the script put in.
        flags: Its flags by name (``--rollout-batch-size``), the last one where it is given twice; dashes as written.
        given: All flags in order, also the overridden.
        env: Variables that reach the trainer, the last setting of each.
        settings: All settings of variables in order, by name.
        system: slime, miles or relax, where the entry point, flags or paths say so.
        trainer: Whether it is known to start one of the three. Rules of theirs are not tried on another program.
        entry: The program that parses the flags: ``train.py``, ``train_async.py``, ``relax/entrypoints/train.py``.
        submitted: Whether it goes through ``ray job submit``.
        commands: Other commands of the script, in order, as words.
        text: The script.
        missing: Files of its checkout that it sources and that are not there: where it does, the file as value.
        joined: Words that a backslash at a line's end makes of two, the second a flag.
        returns: The first line of each of its files that ends in CR LF, that and a backslash before others.
        shortened: Arrays with flags of which it gets the first word alone, by their names.
        hidden: Whether variables may reach the trainer that are not known: of a file that is not there, from a shell.
        otherwise: The same without what one branch alone sets, of which nobody knows whether it is taken; None where
            that is no other launch.
        shared: What is known of it whichever branches are taken; None where it and `otherwise` are all that may be.
        doubted: Whether nothing may be launched without it.
    """

    path: Path
    argv: tuple[str, ...]
    flags: Mapping[str, Flag]
    given: Sequence[Flag]
    env: Mapping[str, Variable]
    settings: Sequence[tuple[str, Variable]] = ()
    system: System | None = None
    trainer: bool = False
    entry: str = ""
    submitted: bool = False
    commands: Sequence[tuple[str, ...]] = ()
    text: str = ""
    missing: Sequence[Where] = ()
    joined: Sequence[Where] = ()
    returns: Sequence[Where] = ()
    shortened: Sequence[Where] = ()
    hidden: bool = False
    otherwise: Launch | None = None
    shared: Launch | None = None
    doubted: bool = False

    @property
    def asynchronous(self) -> bool:
        """Whether it trains while it samples: ``train_async.py``."""
        return self.entry.endswith("train_async.py")

    def has(self, *names: str) -> bool:
        """Whether one of the flags is given (a ``--no-`` twin is not what is asked)."""
        return any(name in self.flags for name in names)

    def value(self, name: str) -> str | None:
        """The flag's first value; None where it is not given, has none, or only a shell knows it."""
        flag = self.flags.get(name)
        if flag is None or not flag.values or "$" in flag.values[0] or "`" in flag.values[0]:
            return None
        return flag.values[0]

    def number(self, name: str, default: float | None = None) -> float | None:
        """The flag's value as a number.

        Returns:
            `default` where the flag is not given; None where its value is no finite number.
        """
        if name not in self.flags:
            return default
        try:
            number = float(self.value(name) or "")
        except ValueError:
            return None
        return number if np.isfinite(number) else None

    def where(self, name: str) -> Where:
        """Where a flag stands; the script where it is not given."""
        flag = self.flags.get(name)
        return flag.where if flag else Where(str(self.path), item=name)


@dataclass(frozen=True)
class ParserDump:
    """The flags that a trainer's own parsers have.

    Attributes:
        path: Where it was read.
        options: Every registered flag.
        source: What said so: ``--help``, what its parsers wrote in a replay, the source of a checkout.
        complete: Whether a flag that is missing here is sure to be unknown (not for a checkout's source alone, whose
            Megatron and SGLang lie elsewhere).
        ignored: Flags that a process says no parser took.
        abbreviates: Whether the parser takes an unambiguous beginning of a flag.
    """

    path: Path
    options: frozenset[str]
    source: str
    complete: bool
    ignored: tuple[str, ...] = ()
    abbreviates: bool = False


class Way(NamedTuple):
    """A branch that a step stands in: of the statement in `line` its block number `block`; `leaves`: it returns."""

    line: int
    block: int
    leaves: bool


class Step(NamedTuple):
    """Something that Python code does.

    Attributes:
        kind: `switch`: turns determinism on; `variable`: sets one that decides it; `megatron`: builds a model with
            Megatron; `model`: builds another; `groups`: makes process groups.
        name: What is called or set.
        line: Where.
        branch: The branches around it, outermost first.
    """

    kind: Literal["switch", "variable", "megatron", "model", "groups"]
    name: str
    line: int
    branch: tuple[Way, ...]

    def leads_to(self, later: Step) -> bool:
        """Whether a step further down can follow: not from another branch, nor after a return."""
        others = {way.line: way.block for way in later.branch}
        return not any(others.get(way.line, -1 if way.leaves else way.block) != way.block for way in self.branch)


@dataclass(frozen=True)
class PythonCode:
    """Python source that switches determinism on.

    Attributes:
        path: The file.
        functions: What the module (`<module>`) and each function and method (`Class.name`) does, in order; a call of
            another function of the file stands for what that does.
        starts_others: Whether it starts other processes, which inherit its variables.
    """

    path: Path
    functions: Mapping[str, Sequence[Step]]
    starts_others: bool
