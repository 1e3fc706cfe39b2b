"""What is read of a shell script, and what its branches leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tree_sitter import Node

from repro.doctor.artefacts.shell_values import Part, Scope, Value, Word, plain

__all__ = ["Command", "Script", "Setting", "merge", "parts_of", "starts"]


@dataclass(frozen=True)
class Setting:
    """A variable of the environment that a script sets.

    Attributes:
        name: The variable.
        value: Its value; None where it is unset.
        where: The word that sets it, for its file and line.
        prefix: Whether it stands before one command.
    """

    name: str
    value: Value | None
    where: Word
    prefix: bool = False


@dataclass(frozen=True)
class Command:
    """A command that the script would run.

    Attributes:
        words: Its words.
        settings: Variables set in front of it.
        exported: What is exported when it runs.
    """

    words: tuple[Word, ...]
    settings: tuple[Setting, ...]
    exported: dict[str, Setting]


@dataclass
class Script:
    """What was read.

    Attributes:
        commands: In order.
        settings: Exports, unsets and prefixes in order.
        missing: Files near it that it sources and that are not there, with the word that names them.
        cut: Why reading stopped early; '' where it did not.
    """

    commands: list[Command] = field(default_factory=list)
    settings: list[Setting] = field(default_factory=list)
    missing: list[Word] = field(default_factory=list)
    cut: str = ""


def starts(command: Command) -> bool:
    """Whether it starts something that takes flags."""
    return sum(word.text.startswith("--") for word in command.words) > 2


def parts_of(clause: Node) -> tuple[list[Node], list[Node]]:
    """The statements of a condition, and those of what follows it."""
    condition: list[Node] = []
    body: list[Node] = []
    current = body if clause.type == "else_clause" else condition
    for child in clause.children:
        if child.type == "then":
            current = body
        elif child.type in ("elif_clause", "else_clause"):
            continue
        elif child.is_named and child.type != "comment":
            current.append(child)
    return condition, body


def merge(scope: Scope, after: Sequence[Scope]) -> None:
    """Put together what branches left."""
    for name in {name for one in after for name in one.scalars}:
        held = [one.scalars[name] for one in after if name in one.scalars]
        if name in scope.scalars and len(held) < len(after):
            held.append(scope.scalars[name])
        if len({plain(word.value) for word in held}) == 1:
            scope.scalars[name] = held[-1]
        else:
            scope.scalars[name] = held[-1]._replace(value=(Part(f"${{{name}}}", False),))
    for name in {name for one in after for name in one.arrays}:
        changed = [
            one.arrays[name] for one in after if name in one.arrays and one.arrays[name] is not scope.arrays.get(name)
        ]
        if changed:
            scope.arrays[name] = changed[-1]
