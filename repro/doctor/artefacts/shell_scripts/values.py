"""What a reader of shell scripts works with: words, where they were written, and what is set at a point."""

from __future__ import annotations

import ast
import functools
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tree_sitter import Node

__all__ = [
    "LONGEST",
    "BoundError",
    "Fields",
    "Part",
    "Scope",
    "Value",
    "Word",
    "ansi",
    "evaluate",
    "joined",
    "known",
    "number",
    "plain",
    "scalar",
    "text_of",
    "unescaped",
    "unquoted",
]


# -- arithmetic of a shell script: whole numbers, as bash counts


def evaluate(source: str, value: Callable[[str], str | None]) -> int | None:
    """An arithmetic expression of bash.

    Args:
        source: What stands between ``$((`` and ``))``.
        value: A variable's value; None where it is not known.

    Returns:
        Its value; None where it is not known, or beyond what is read here.
    """

    def name(match: re.Match[str]) -> str:
        text = value(match[0])
        return text if text is not None and re.fullmatch(r"-?\d{1,19}", text) else "x"

    # the dollar sign is a matter of taste in there
    source = re.sub(r"\$\{(\w+)\}|\$(?=\w)", r"\1", source[:500])
    source = re.sub(r"[A-Za-z_]\w*", name, source).strip()
    if len(source) > 500 or not re.fullmatch(r"[\d+\-*/%()<>=!&| \t\n]+", source):
        return None
    source = source.replace("&&", " and ").replace("||", " or ")
    source = re.sub(r"!(?!=)", " not ", source)
    try:
        return _number(ast.parse(re.sub(r"\b0+(\d)", r"\1", source), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


_COMPARE: dict[type, Callable[[int, int], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp):
        value = _number(node.operand)
        if isinstance(node.op, ast.Not):
            return int(not value)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        return _counted(node.op, _number(node.left), _number(node.right))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return int(_COMPARE[type(node.ops[0])](_number(node.left), _number(node.comparators[0])))
    if isinstance(node, ast.BoolOp):
        values = [bool(_number(value)) for value in node.values]
        return int(all(values) if isinstance(node.op, ast.And) else any(values))
    raise ValueError


def _counted(operation: ast.operator, left: int, right: int) -> int:
    if max(abs(left), abs(right)) > 1 << 62:
        raise ValueError
    if isinstance(operation, ast.Add):
        return left + right
    if isinstance(operation, ast.Sub):
        return left - right
    if isinstance(operation, ast.Mult):
        return left * right
    sign = -1 if (left < 0) != (right < 0) else 1
    quotient = sign * (abs(left) // abs(right))  # bash rounds towards zero
    if isinstance(operation, ast.Div):
        return quotient
    if isinstance(operation, ast.Mod):
        return left - quotient * right
    raise ValueError


# -- what a reader of shell scripts works with: words, where they were written, and what is set at a point

LONGEST = 1 << 20
"""Characters of one value: scripts that double a variable again and again grow no further."""
_MOST = 1 << 16
"""Words of one command or array."""
_SPACE = re.compile(r"[ \t\n]+")


class BoundError(Exception):
    """The script asks for more than is read: depth, length or steps."""


class Part(NamedTuple):
    """A piece of a value: its text, and whether it is known or stands for what a shell would compute."""

    text: str
    known: bool = True


Value = tuple[Part, ...]


class Word(NamedTuple):
    """A word, and where it was written: its file and line."""

    value: Value
    path: str
    line: int

    @property
    def text(self) -> str:
        """As the shell would pass it on; what is not known, as written."""
        return plain(self.value)


def plain(value: Iterable[Part]) -> str:
    """A value as text."""
    return "".join(part.text for part in value)


def known(value: Iterable[Part]) -> bool:
    """Whether a shell would have nothing to compute."""
    return all(part.known for part in value)


@dataclass
class Scope:
    """What is set at a point of the script.

    Attributes:
        path: The file being read.
        scalars: Variables.
        arrays: Arrays.
        positional: ``$1`` and those after it; None where they are not known.
        substitute: What a command substitution gives, where that can be said without running it.
        line: The first line of the file that is read, less one.
    """

    path: Path
    scalars: dict[str, Word] = field(default_factory=dict)
    arrays: dict[str, list[Word]] = field(default_factory=dict)
    positional: list[Word] | None = None
    substitute: Callable[[Node, Scope], Value | None] | None = None
    line: int = 0

    def copy(self) -> Scope:
        """The same, to be changed apart."""
        return Scope(self.path, dict(self.scalars), dict(self.arrays), self.positional, self.substitute, self.line)

    def word(self, value: Value, node: Node) -> Word:
        """A word written at a node."""
        return Word(value, str(self.path), self.line + node.start_point[0] + 1)


def text_of(node: Node) -> str:
    """The source of a node."""
    return (node.text or b"").decode(errors="replace")


class Fields:
    """Words being put together."""

    def __init__(self) -> None:
        self.done: list[Word] = []
        self._parts: list[Part] | None = None
        self._origin: Word | None = None
        self._length = 0

    def add(self, value: Value, origin: Word) -> None:
        """Add what is not split; even nothing makes a word (``""``)."""
        self._length += sum(len(part.text) for part in value)
        if self._length > LONGEST:
            raise BoundError("a word is too long")
        if self._parts is None:
            self._parts, self._origin = [], origin
        self._parts += value

    def split(self, value: Value, origin: Word) -> None:
        """Add an expansion outside of quotes: split at its white space."""
        for part in value:
            if not part.known:
                self.add((part,), origin)
                continue
            for number, piece in enumerate(_SPACE.split(part.text)):
                if number:
                    self.end()
                if piece:
                    self.add((Part(piece),), origin)

    def end(self) -> None:
        """End the word, if one was begun."""
        if self._parts is not None and self._origin is not None:
            self.done.append(Word(tuple(self._parts), self._origin.path, self._origin.line))
            if len(self.done) > _MOST:
                raise BoundError("too many words")
        self._parts = None

    def several(self, words: Sequence[Word]) -> None:
        """Add words that stay apart: ``"${A[@]}"``."""
        for number, word in enumerate(words):
            if number:
                self.end()
            self.add(word.value, word)


def joined(position: int, word: Word) -> Value:
    """A word of several that are put together with spaces between."""
    return word.value if position == 0 else (Part(" "), *word.value)


def unescaped(text: str) -> str:
    """Outside of quotes a backslash keeps what follows, and joins lines."""
    return re.sub(r"\\(\n|[\s\S])", lambda m: "" if m[1] == "\n" else m[1], text)


def unquoted(text: str) -> str:
    """Between double quotes it does so before a few characters alone."""
    return re.sub(r'\\([\n$`"\\])', lambda m: "" if m[1] == "\n" else m[1], text)


_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "v": "\v"}


def ansi(text: str) -> str:
    """What stands in ``$'...'``."""

    def one(match: re.Match[str]) -> str:
        body = match[1]
        if body[0] in "xuU" and len(body) > 1:
            code = int(body[1:], 16)
        elif body[0] in "01234567":
            code = int(body, 8)
        else:
            return _ESCAPES.get(body, body if body in "\\'\"?" else match[0])
        return chr(code) if code < 0x110000 else "\ufffd"

    return re.sub(r"\\([0-7]{1,3}|x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{1,4}|U[0-9a-fA-F]{1,8}|[\s\S])", one, text)


def scalar(name: str, scope: Scope) -> Word | None:
    """A variable, or the first element of an array of that name."""
    if name.isdigit():
        at = int(name[:6])
        if at == 0:
            return Word((Part(str(scope.path)),), str(scope.path), 1)
        if scope.positional is None or at > len(scope.positional):
            return None
        return scope.positional[at - 1]
    if name in scope.scalars:
        return scope.scalars[name]
    if name == "BASH_SOURCE":
        return Word((Part(str(scope.path)),), str(scope.path), 1)
    if scope.arrays.get(name):
        return scope.arrays[name][0]
    return None


def _digits(scope: Scope, name: str) -> str | None:
    word = scalar(name, scope)
    return word.text if word and known(word.value) else None


def number(source: str, scope: Scope) -> int | None:
    """An arithmetic expression of bash; None where it is not known."""
    return evaluate(source, functools.partial(_digits, scope))
