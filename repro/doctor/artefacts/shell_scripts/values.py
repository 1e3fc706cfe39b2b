"""What a reader of shell scripts works with: words, where they were written, and what is set at a point."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from tree_sitter import Language, Node, Parser

__all__ = [
    "LONGEST",
    "BoundError",
    "Fields",
    "Function",
    "Part",
    "Scope",
    "Setting",
    "Value",
    "Word",
    "ansi",
    "joined",
    "known",
    "parsed",
    "placed",
    "plain",
    "put",
    "said",
    "scalar",
    "single",
    "text_of",
    "unescaped",
    "unquoted",
]


LONGEST = 1 << 20
"""Characters of one value: scripts that double a variable again and again grow no further."""
_TORN = 4
"""Times that words are put together again which the parser has torn."""
_MOST = 1 << 16
"""Words of one command or array."""


class BoundError(Exception):
    """The script asks for more than is read: depth, length or steps."""


class Part(NamedTuple):
    """A piece of a value: its text, whether that is known or a shell computes it, and may make several words of it."""

    text: str
    known: bool = True
    several: bool = False


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


def single(words: Iterable[Word]) -> bool:
    """Whether each is one word, known or not."""
    return not any(part.several for word in words for part in word.value)


def placed(words: list[Word], at: int, word: Word) -> list[Word]:
    """Words with another one in a place behind single ones: of several there it takes the first's."""
    return [*words[:at], word, *words[at + single(words[at : at + 1]) :]]


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


def said(held: object) -> object:
    """A word, a list of them or a setting apart from where it was written: equal where a shell passes on the same."""
    if isinstance(held, Word):
        return held.text, known(held.value), single([held])
    return tuple(map(said, held)) if isinstance(held, list) else held.value if isinstance(held, Setting) else held


class Held(NamedTuple):
    """What a name is at a point; what of it is None it is not."""

    scalar: Word | None
    array: list[Word] | None
    exported: Setting | None
    attributes: str | None


Function = tuple[Node, Path, int]
"""A function's body, its file, and the file's first line, less one."""


@dataclass
class Scope:
    """What is set at a point of the script.

    Attributes:
        path: The file being read.
        scalars: Variables.
        arrays: Arrays; an empty one is known to be nothing, which a name that was never set is not.
        positional: ``$1`` and those after it; None where they are not known.
        substitute: What a command substitution gives, where that can be said without running it.
        line: The first line of the file that is read, less one.
        exported: What is exported, and what was unset.
        attributes: Letters of ``declare -i`` and its like, by name.
        joins: Collects words of which a backslash at a line's end made one, the second part a flag.
        functions: Bodies by name; of several branches chose one, and None where they may not have defined it.
        saved: What the names that the running function made its own were before; None outside of functions.
        beneath: Names that are a caller's own, or stand before its call.
        modes: Options that change how all is read, once a script may have set them; one set for all copies.
    """

    path: Path
    scalars: dict[str, Word] = field(default_factory=dict)
    arrays: dict[str, list[Word]] = field(default_factory=dict)
    positional: list[Word] | None = None
    substitute: Callable[[Node, Scope], Value | None] | None = None
    line: int = 0
    exported: dict[str, Setting] = field(default_factory=dict)
    attributes: dict[str, str] = field(default_factory=dict)
    functions: dict[str, list[Function | None]] = field(default_factory=dict)
    saved: dict[str, Held] | None = None
    beneath: frozenset[str] = frozenset()
    modes: set[str] = field(default_factory=set)
    joins: list[Word] | None = None

    def copy(self) -> Scope:
        """The same, to be changed apart."""
        return replace(
            self,
            scalars=dict(self.scalars),
            arrays=dict(self.arrays),
            exported=dict(self.exported),
            functions=dict(self.functions),
            attributes=dict(self.attributes),
            saved=None if self.saved is None else dict(self.saved),
        )

    def take(self, other: Scope) -> None:
        """Hold what another one holds."""
        self.scalars, self.arrays, self.positional = other.scalars, other.arrays, other.positional
        self.exported, self.attributes, self.saved = other.exported, other.attributes, other.saved
        self.functions = other.functions

    def word(self, value: Value, node: Node) -> Word:
        """A word written at a node."""
        return Word(value, str(self.path), self.line + node.start_point[0] + 1)

    def put(self, name: str, word: Word) -> None:
        """Set a variable, also where it is exported; of an array its first element."""
        if held := self.arrays.pop(name, []):
            self.arrays[name] = placed(held, 0, word)
            return
        self.scalars[name] = word
        setting = self.exported.get(name)
        if setting is not None and setting.value is not None:
            self.exported[name] = replace(setting, value=word.value)

    def unknown(self, name: str, _: object = None) -> Word:
        """What only a shell knows."""
        return Word((Part(f"${{{name}}}", False, name.endswith("[@]")),), str(self.path), self.line + 1)

    def forget(self, name: str, *, array: bool = False) -> None:
        """Something that is not read through may have written a name: only a shell knows it from here on.

        Args:
            name: It.
            array: Whether that makes it an array, if it is none.
        """
        held = self.arrays.pop(name, [] if array else None)
        if held is None or name in self.scalars:
            self.put(name, self.unknown(name))
        if held is not None:
            self.arrays[name] = self.shared(name, ())

    def shared(self, name: str, ways: Sequence[Sequence[Word] | None]) -> list[Word]:
        """The words of an array that all ways leave; a value that differs is not known, nor what follows a flag."""
        words: list[Word] = []
        rest = self.unknown(f"{name}[@]")
        uneven = len({None if way is None else len(way) for way in ways}) != 1
        for each in zip(*(way or () for way in ways), strict=False):
            differ = len({said(word) for word in each}) > 1
            if differ and (uneven or not single(each) or any(word.text.startswith("--") for word in each)):
                return [*words, rest]
            words.append(self.unknown(f"{name}[{len(words)}]") if differ else each[-1])
        return [*words, rest] if uneven and single(words[-1:]) else words

    def forget_all(self) -> None:
        """Whatever is set may have been written."""
        for name in {*self.scalars, *self.arrays}:
            self.forget(name)

    def lose(self) -> None:
        """The positions are not known from here on; None means that nobody gave any, as far as can be said."""
        self.positional = [Word((Part("$@", False, several=True),), str(self.path), self.line + 1)]

    def held(self, name: str) -> Held:
        """What a name is here."""
        return Held(self.scalars.get(name), self.arrays.get(name), self.exported.get(name), self.attributes.get(name))

    def keep(self, name: str) -> None:
        """A name becomes the running function's own: what it was comes back behind the call."""
        if self.saved is not None:
            self.saved.setdefault(name, self.held(name))

    def put_back(self) -> None:
        """The running function ends: names that were its own are what they were."""
        for name, held in (self.saved or {}).items():
            put(self.scalars, name, held.scalar)
            put(self.arrays, name, held.array)
            put(self.exported, name, held.exported)
            put(self.attributes, name, held.attributes)

    @property
    def spaces(self) -> str | None:
        """The characters at which expansions are split; None where they are not known."""
        word = self.scalars.get("IFS")
        return " \t\n" if word is None else word.text if known(word.value) else None


T = TypeVar("T")


def put(held: dict[str, T], name: str, value: T | None) -> None:
    """Give a name what it holds; None takes it away."""
    if value is None:
        held.pop(name, None)
    else:
        held[name] = value


@functools.cache
def _parser() -> Parser:
    import tree_sitter_bash

    return Parser(Language(tree_sitter_bash.language()))


_BARE = re.compile(rb"\$(\w+|[@*#?!$-])")


def parsed(source: bytes) -> Node:
    """The tree of a script."""
    root = _parser().parse(source).root_node
    for _ in range(_TORN):  # `$A-$1`, `a:$B/c`: the parser ends the word behind the mark, unless there are braces
        torn = [node.start_byte for node in _marks(root) if _BARE.match(source, node.start_byte)]
        if not torn:
            break
        for at in reversed(torn):
            match = _BARE.match(source, at)
            name = match[1] if match else b""
            name = name[:1] if name[:1].isdigit() else name
            source = source[:at] + b"${" + name + b"}" + source[at + 1 + len(name) :]
        root = _parser().parse(source).root_node
    return root


def _marks(root: Node) -> list[Node]:
    """The marks ``$`` that are no expansion's."""
    marks, nodes = [], [root]
    while nodes:
        node = nodes.pop()
        nodes += reversed(node.children)
        if node.type == "$" and node.parent is not None and node.parent.type == "concatenation":
            marks.append(node)
    return marks


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

    def split(self, value: Value, origin: Word, spaces: str | None = " \t\n") -> None:
        """Add an expansion outside of quotes, split at white space.

        Args:
            value: It.
            origin: Where it was written.
            spaces: ``IFS``; None where that is not known. What it splits at other marks is not known either.
        """
        blank = "".join(mark for mark in spaces or "" if mark in " \t\n")
        marks = set(" \t\n" if spaces is None else spaces) - set(blank)
        for part in value:
            if not part.known or (marks and marks & set(part.text)):
                self.add((Part(part.text, False, several=True),), origin)
                continue
            for number, piece in enumerate(re.split(f"[{blank}]+", part.text) if blank else [part.text]):
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


def joined(position: int, word: Word, between: str | None = " ") -> Value:
    """A word of several that are put together with a space between, or another mark; None where it is not known."""
    return (
        word.value
        if position == 0
        else (Part("$IFS" if between is None else between, between is not None), *word.value)
    )


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
        before = (scope.positional or [])[:at]
        if not single(before):
            return before[0]._replace(value=(Part(f"${{{name}}}", False),))
        return before[-1] if len(before) == at else None
    if name in scope.scalars:
        return scope.scalars[name]
    if name == "BASH_SOURCE":
        return Word((Part(str(scope.path)),), str(scope.path), 1)
    if scope.arrays.get(name):
        return scope.arrays[name][0]
    return None
