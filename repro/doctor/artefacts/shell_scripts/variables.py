"""What sets and unsets the variables of a shell script: assignments, ``declare``, ``unset``, ``read``.

What is not read through leaves a name not known: a wrong value is worse than none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tree_sitter import Node

from repro.doctor.artefacts.shell_scripts.arithmetic import number
from repro.doctor.artefacts.shell_scripts.values import (
    LONGEST,
    BoundError,
    Part,
    Scope,
    Setting,
    Value,
    Word,
    known,
    placed,
    single,
    text_of,
)
from repro.doctor.artefacts.shell_scripts.words import expand, expand_all

__all__ = ["READING", "Variables"]

_MOVING = frozenset({"SECONDS", "RANDOM", "SRANDOM", "LINENO", "BASHPID", "EPOCHSECONDS", "EPOCHREALTIME"})
"""A shell gives these another value each time."""
_ODD = frozenset("nulcAr")
"""Attributes under which a name holds something else than what it is given: a reference, upper case, keys."""
READING = frozenset({"read", "mapfile", "readarray", "printf", "getopts"})
"""Commands that write variables which they are given by name."""
_WITH_WORD = {"read": frozenset("dinNptua"), "mapfile": frozenset("dnOsuCc"), "readarray": frozenset("dnOsuCc")}
"""Options of theirs with a word behind them."""


class Variables:
    """Sets variables, and notes those of the environment.

    Args:
        settings: Collects exports and unsets, in order.

    Attributes:
        hidden: Whether variables are exported whose names only a shell knows.
        every: Whether all that is set is exported (``set -a``).
    """

    def __init__(self, settings: list[Setting]) -> None:
        self._settings = settings
        self.hidden = False
        self.every = False
        self.moving = set(_MOVING)
        """Names that hold another value each time, or that a trap may set between any two commands."""

    # -- assignments

    def assign(self, node: Node, scope: Scope) -> None:
        """``NAME=value``, ``NAME+=value``, ``NAME[1]=value``, ``NAME=(...)``."""
        if (target := node.child_by_field_name("name")) is not None:
            self._store(text_of(target), _given(node, scope), scope, more=_adds(node))

    def prefix(self, node: Node, scope: Scope) -> Setting | None:
        """``NAME=value`` before a command."""
        target = node.child_by_field_name("name")
        if target is None or target.type != "variable_name":
            return None
        given, name = _given(node, scope), text_of(target)
        value = given.value if isinstance(given, Word) and not _adds(node) else (_unknown(name),)
        return Setting(name, value, scope.word((), node), prefix=True)

    def _store(self, name: str, given: Word | list[Word], scope: Scope, *, more: bool, export: bool = False) -> None:
        subscript = re.fullmatch(r"(\w+)\[(.*)\]", name, re.S)
        if subscript:
            self._store_at(subscript[1], number(subscript[2], scope), given, scope, more)
        elif isinstance(given, Word):
            self.set(name, given, scope, more=more, export=export)
        elif self._odd(name, scope) or any(re.match(r"\[[^\]]*\]\+?=", word.text) for word in given):
            self._forget(name, scope, array=True)  # it names its places itself
        else:
            before = scope.arrays.get(name) or ([scope.scalars[name]] if name in scope.scalars else [])
            self._hold(name, [*before, *given] if more else given, scope)

    def _store_at(self, name: str, at: int | None, given: Word | list[Word], scope: Scope, more: bool) -> None:
        held = scope.arrays.get(name) or ([scope.scalars[name]] if name in scope.scalars else [])
        sure = at is not None and 0 <= at <= len(held) and single(held[:at])
        if at is None or not sure or more or self._odd(name, scope) or not isinstance(given, Word):
            self._forget(name, scope, array=True)  # there may be holes in it
        else:
            self._hold(name, placed(held, at, given), scope)

    def _hold(self, name: str, words: list[Word], scope: Scope) -> None:
        if len(words) > LONGEST >> 4:
            raise BoundError("an array is too long")
        scope.arrays[name] = words
        scope.scalars.pop(name, None)

    def set(self, name: str, word: Word, scope: Scope, *, more: bool = False, export: bool = False) -> None:
        """Give a variable a value, or add to it, as its attributes say."""
        counted = "i" in scope.attributes.get(name, "")
        if self._odd(name, scope):
            self._forget(name, scope)
            return
        if more and scope.arrays.get(name):
            first, *rest = scope.arrays[name]
            scope.arrays[name] = [first._replace(value=first.value + word.value), *rest]
            return
        if more and not (name in scope.arrays and name not in scope.scalars):
            held: Value = scope.scalars[name].value if name in scope.scalars else (_unknown(name),)
            word = word._replace(value=(*held, *((Part("+"),) if counted else ()), *word.value))
        if counted:
            result = number(word.text, scope) if known(word.value) else None
            word = word._replace(value=(_unknown(name) if result is None else Part(str(result)),))
        if len(word.text) > LONGEST:
            raise BoundError("a variable is too long")
        setting = scope.exported.get(name)
        scope.put(name, word)
        if export or self.every or (setting is not None and setting.value is not None):
            self._export(name, word, scope)

    def _odd(self, name: str, scope: Scope) -> bool:
        return name in self.moving or bool(_ODD.intersection(scope.attributes.get(name, "")))

    def _forget(self, name: str, scope: Scope, *, array: bool = False) -> None:
        scope.forget(name, array=array)
        if "n" in scope.attributes.get(name, ""):  # it stands for another one
            scope.forget_all()

    def _export(self, name: str, word: Word, scope: Scope) -> None:
        scope.exported[name] = Setting(name, word.value, word)
        self._settings.append(scope.exported[name])

    # -- declarations

    def declare(self, node: Node, scope: Scope) -> None:
        """``declare``, ``typeset``, ``local``, ``export``, ``readonly``."""
        command = text_of(node.children[0])
        texts = [text_of(child) for child in node.children if child.type == "word"]
        options = "".join(text[1:] for text in texts if text.startswith("-"))
        if set(options) & set("fFp"):
            return
        export = "n" not in options if command == "export" else "x" in options
        made = _Made(command, options)
        # all words are expanded before a name is given one: `local X=$X`, `export A=1 B=$A`; arrays are given at once
        waiting: list[tuple[Node, Word]] = []
        for child in node.named_children:
            if child.type == "variable_assignment":
                given = _given(child, scope)
                if isinstance(given, Word):
                    waiting.append((child, given))
                else:
                    self._give(child, given, scope, made, export)
        for child, word in waiting:
            self._give(child, word, scope, made, export)
        for child in node.named_children:
            if child.type == "variable_assignment":
                continue
            if child.type == "variable_name":
                name = text_of(child)
                fresh = made.make(name, scope)
                made.close(name, scope)
                if command == "export" and "n" in options:
                    scope.exported.pop(name, None)
                elif export and name in scope.scalars:
                    self._export(name, scope.word(scope.scalars[name].value, child), scope)
                elif fresh and set(options) & set("An"):
                    self._forget(name, scope, array="A" in options)
            elif child.type != "comment" and not (child.type == "word" and text_of(child).startswith("-")):
                for word in expand(child, scope):
                    self._declare_word(word, scope, made, export)

    def _give(self, node: Node, given: Word | list[Word], scope: Scope, made: _Made, export: bool) -> None:
        target = node.child_by_field_name("name")
        if target is not None:
            name = text_of(target).partition("[")[0]
            made.make(name, scope)
            self._store(text_of(target), given, scope, more=_adds(node), export=export)
            made.close(name, scope)

    def _declare_word(self, word: Word, scope: Scope, made: _Made, export: bool) -> None:
        """``export "$NAME=$VALUE"``: the name stands in a word."""
        name, equals, _ = word.text.partition("=")
        if equals and name.isidentifier():
            made.make(name, scope)
            value = (Part(word.text[len(name) + 1 :], known(word.value)),)
            self._store(name, word._replace(value=value), scope, more=False, export=export)
            made.close(name, scope)
        elif not known(word.value):
            self.hidden = self.hidden or export
            if equals:
                scope.forget_all()

    def unset(self, node: Node, scope: Scope) -> list[str]:
        """``unset``; the names that it takes away, which may be functions."""
        words = [
            scope.word(tuple(p for n in group for w in expand(n, scope) for p in w.value), node)
            for group in _whole(node)
        ]
        names = [word for word in words if not word.text.startswith("-")]
        for word in names:
            subscript = re.fullmatch(r"(\w+)\[(.*)\]", word.text, re.S)
            if not known(word.value):
                scope.forget_all()
            elif subscript:
                self._unset_at(subscript[1], number(subscript[2], scope), scope)
            elif any(other.text == "-f" for other in words):
                continue
            elif self._odd(word.text, scope) or word.text in scope.beneath - {*(scope.saved or {})}:
                scope.forget(word.text)  # it may stay, and what it hid may show again
            else:
                scope.scalars.pop(word.text, None)
                scope.attributes.pop(word.text, None)
                scope.arrays[word.text] = []
                scope.exported[word.text] = Setting(word.text, None, word)
                self._settings.append(scope.exported[word.text])
        return [word.text for word in names]

    def _unset_at(self, name: str, at: int | None, scope: Scope) -> None:
        held = scope.arrays.get(name, [])
        if held and at in (-1, len(held) - 1) and single(held):
            scope.arrays[name] = held[:-1]
        else:
            self._forget(name, scope, array=True)

    # -- commands that write variables

    def read(self, words: Sequence[Word], scope: Scope) -> None:
        """``read``, ``mapfile``, ``printf -v``, ``getopts``: what they read is known to a shell alone."""
        name, args = words[0].text, words[1:]
        if name == "getopts":
            scope.forget("OPTARG")
            scope.forget("OPTIND")
        targets = args[1:2] if name in ("printf", "getopts") else _targets(name, args)
        if not targets:
            scope.forget("REPLY")
            scope.forget("MAPFILE", array=True)
        for target in targets:
            if not known(target.value):
                scope.forget_all()
            elif (match := re.fullmatch(r"(\w+)(\[.*\])?", target.text, re.S)) and not match[1].isdigit():
                keyed = name in ("mapfile", "readarray") or match[2] is not None or _option(args, target) == "a"
                self._forget(match[1], scope, array=keyed)


class _Made:
    """What ``declare`` and its like make of a name, beside giving it a value."""

    def __init__(self, command: str, options: str) -> None:
        self._local = command in ("local", "declare", "typeset") and "g" not in options
        self._beneath = "g" in options
        self._array = "a" in options
        self._attributes = set(options) & (_ODD | {"i"}) if command != "export" else set()
        self._fixed = command == "readonly" or "r" in options
        self._new = command in ("local", "declare", "typeset")

    def make(self, name: str, scope: Scope) -> bool:
        """Make a name the function's own, with attributes; whether it is new."""
        if self._local and scope.saved is not None:
            fresh = name not in scope.saved
            scope.keep(name)
            if fresh:
                scope.scalars.pop(name, None)
                scope.attributes.pop(name, None)
                scope.arrays[name] = []
                if name in scope.beneath:
                    scope.put(name, Word((_unknown(name),), str(scope.path), scope.line + 1))
        else:
            fresh = self._new and name not in scope.scalars and name not in scope.arrays
            if fresh and self._array:
                scope.arrays[name] = []
            if self._beneath and scope.saved and name in scope.saved:
                scope.forget_all()  # it is not the function's own that is meant
        self._add(name, scope, self._attributes - {"r"})
        return fresh

    def close(self, name: str, scope: Scope) -> None:
        """It has its value."""
        if self._fixed:
            self._add(name, scope, {"r"})

    def _add(self, name: str, scope: Scope, letters: set[str]) -> None:
        if letters:
            scope.attributes[name] = "".join({*scope.attributes.get(name, ""), *letters})


def _given(node: Node, scope: Scope) -> Word | list[Word]:
    """What an assignment gives: a word, or an array's."""
    value = node.child_by_field_name("value")
    if value is None:
        return scope.word((), node)
    if value.type == "array":
        return expand_all([child for child in value.named_children if child.type != "comment"], scope)
    return scope.word(expand(value, scope, split=False)[0].value, node)


def _adds(node: Node) -> bool:
    return any(child.type == "+=" for child in node.children)


def _unknown(name: str) -> Part:
    return Part(f"${{{name}}}", False)


def _whole(node: Node) -> list[list[Node]]:
    """The words of ``unset A[0]``, which the parser takes apart."""
    groups: list[list[Node]] = []
    for child in node.named_children:
        if groups and groups[-1][-1].end_byte == child.start_byte:
            groups[-1].append(child)
        else:
            groups.append([child])
    return groups


def _option(args: Sequence[Word], word: Word) -> str:
    """The letter of the option right before a word."""
    at = next((at for at, each in enumerate(args) if each is word), 0)
    before = args[at - 1].text if at else ""
    return before[-1:] if before.startswith("-") else ""


def _targets(name: str, args: Sequence[Word]) -> list[Word]:
    """The names that ``read`` and ``mapfile`` are given."""
    targets: list[Word] = []
    at = 0
    while at < len(args):
        text = args[at].text
        takes = next((n for n, letter in enumerate(text) if n and letter in _WITH_WORD[name]), 0)
        if targets or not text.startswith("-"):
            targets.append(args[at])
        elif takes and takes == len(text) - 1:
            at += 1
            if name == "read" and text[-1] == "a":
                targets += args[at : at + 1]
        at += 1
    return targets
