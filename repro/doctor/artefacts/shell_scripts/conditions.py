"""Conditions of a shell script whose result can be said without running it."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping

from tree_sitter import Node

from repro.doctor.artefacts.shell_scripts.arithmetic import number
from repro.doctor.artefacts.shell_scripts.patterns import escaped, matches, pattern
from repro.doctor.artefacts.shell_scripts.values import Scope, known, text_of
from repro.doctor.artefacts.shell_scripts.words import expand

__all__ = ["holds"]


def holds(node: Node, scope: Scope) -> bool | None:
    """Whether a condition holds; None where only a shell knows.

    Args:
        node: A command, a test, a list of them.
        scope: What is set.
    """
    return _holds(node, scope, 0)


def _holds(node: Node, scope: Scope, depth: int) -> bool | None:
    if depth > 30:
        return None
    inner = [child for child in node.children if not child.is_extra]
    kind = node.type
    if kind == "command":
        return {"true": True, ":": True, "false": False}.get(text_of(node))
    if kind == "negated_command" and inner:
        return _not(_holds(inner[-1], scope, depth + 1))
    if kind in ("test_command", "compound_statement") and len(inner) == 3:
        if inner[0].type == "((":
            result = number(text_of(inner[1]), scope)
            return None if result is None else result != 0
        return None if kind == "compound_statement" else _Test(node, scope).holds()
    if kind == "list" and len(inner) == 3 and inner[1].type in ("&&", "||"):
        return _both(inner[1].type == "&&", _holds(inner[0], scope, depth + 1), _holds(inner[2], scope, depth + 1))
    return None


def _both(every: bool, left: bool | None, right: bool | None) -> bool | None:
    """``&&``, or else ``||``."""
    if (not every) in (left, right):
        return not every
    return None if None in (left, right) else every


def _not(value: bool | None) -> bool | None:
    return None if value is None else not value


_NESTING = frozenset({"binary_expression", "unary_expression", "parenthesized_expression"})
_UNARY = re.compile(r"-[a-zA-Z]")
_BINARY = re.compile(r"==?|!=|=~|<|>|-(?:eq|ne|lt|le|gt|ge|nt|ot|ef)")
_DECIMAL = re.compile(r" *([-+]?\d{1,18}) *")


class _UnreadError(Exception):
    """A test in a form that is not read."""


class _Test:
    """``[ ... ]`` or ``[[ ... ]]``, read from its words: the parser binds ``&&`` more tightly than ``=``.

    Args:
        node: The test.
        scope: What is set.
    """

    def __init__(self, node: Node, scope: Scope) -> None:
        self._words = _leaves(node)[1:-1]
        self._single = text_of(node).startswith("[ ")
        self._scope = scope

    def holds(self) -> bool | None:
        """Whether it holds; None where only a shell knows."""
        try:
            value = self._either()
        except (_UnreadError, RecursionError):
            return None
        return None if self._words else value

    def _next(self, *texts: str) -> bool:
        matched = bool(self._words) and text_of(self._words[0]) in texts
        if matched:
            self._words.pop(0)
        return matched

    def _either(self) -> bool | None:
        value = self._each()
        while self._next("-o" if self._single else "||"):
            value = _both(False, value, self._each())
        return value

    def _each(self) -> bool | None:
        value = self._one()
        while self._next("-a" if self._single else "&&"):
            value = _both(True, value, self._one())
        return value

    def _one(self) -> bool | None:
        if self._next("!"):
            return _not(self._one())
        if self._next("(", "\\("):
            value = self._either()
            if not self._next(")", "\\)"):
                raise _UnreadError
            return value
        if not self._words:
            raise _UnreadError
        word = self._words.pop(0)
        if self._words and _BINARY.fullmatch(text_of(self._words[0])):
            operation = text_of(self._words.pop(0))
            if not self._words:
                raise _UnreadError
            return self._compare(operation, word, self._words.pop(0))
        if _UNARY.fullmatch(text_of(word)) and self._words:
            return self._asked(text_of(word), self._words.pop(0))
        text = self._text(word)
        return None if text is None else text != ""

    def _asked(self, operation: str, node: Node) -> bool | None:
        if operation not in ("-n", "-z"):
            return None
        if self._single and not expand(node, self._scope):
            return True  # what is left is `[ -n ]`
        text = self._text(node)
        return None if text is None else (text == "") == (operation == "-z")

    def _text(self, node: Node) -> str | None:
        """A word's text; None where it is not known, or not one word."""
        words = expand(node, self._scope, split=self._single)
        return words[0].text if len(words) == 1 and known(words[0].value) else None

    def _compare(self, operation: str, left: Node, right: Node) -> bool | None:
        a, b = self._text(left), self._text(right)
        if operation in ("=", "==", "!="):
            if self._single or right.type in ("string", "raw_string", "ansi_c_string"):
                glob = None if b is None else escaped(b)
            else:
                glob = pattern(text_of(right), self._scope)
            same = matches(a, glob, self._scope) if not self._single else None if None in (a, b) else a == b
            return same if operation != "!=" else _not(same)
        compare = _NUMBERS.get(operation)
        if compare is None or a is None or b is None:
            return None
        x, y = self._number(a), self._number(b)
        return None if x is None or y is None else compare(x, y)

    def _number(self, text: str) -> int | None:
        """``[[`` counts, of ``010`` too; ``[`` reads what stands there."""
        decimal = _DECIMAL.fullmatch(text)
        return number(text, self._scope) if not self._single else int(decimal[1]) if decimal else None


def _leaves(node: Node) -> list[Node]:
    """The words of a test, in order."""
    return [leaf for c in node.children for leaf in (_leaves(c) if c.type in _NESTING else [c]) if not c.is_extra]


_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
