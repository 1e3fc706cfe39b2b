"""Dicts that are printed over several lines, as by `json.dumps` with an indent, pprint and rich, put in one line again.

This runs inside foreign programs, with the standard library alone.
"""

from __future__ import annotations

import re
import threading
from typing import NamedTuple

from repro_golden.base.clean import without_colours
from repro_golden.base.printed.lines import LIMIT, STRING, bare, source

__all__ = ["Whole", "Wrapped"]

_MAY_BEGIN = re.compile("\\{|[\\[(]\\s*(?:\x1b\\[[0-9;]*m\\s*)*$")
_LISTED = re.compile(r"[\[(\s]*(?:\{|$)")
_TOKEN = re.compile(rf"""{STRING}|[()\[\]{{}}'"]|[^()\[\]{{}}'"]+""", re.DOTALL)
_REST = {quote: re.compile(rf"[^{quote}\\]*(?:\\.[^{quote}\\]*)*{quote}", re.DOTALL) for quote in ("'", '"')}
"""What is left of a string, with the quote that ends it."""
_STRINGS = re.compile(r"b?['\"]")
_DICT = re.compile(r"\{(?:['\"]|$)")
_CLOSES = {"(": ")", "[": "]", "{": "}"}
_SOURCES = 64
"""Processes whose lines Ray prints here, of which dicts are held."""


class Whole(NamedTuple):
    """A dict whose last line has come.

    Attributes:
        text: It and what stands before and behind it, in one line.
        lines: Those that it was printed in.
    """

    text: str
    lines: list[str]


class Wrapped(threading.local):
    """Joins those lines of a stream in which a bracket is open at the end.

    A line that cannot go on with the one before breaks them off, and so does what is longer than the longest line that
    is read: neither is told. Each thread's lines stand for themselves, and so do those behind a prefix of Ray.
    """

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}

    def add(self, line: str) -> Whole | None:
        """Take the next line, without its end.

        Returns:
            What this line ends; None where it ends nothing that began in another.
        """
        if not self._open and not _MAY_BEGIN.search(line):
            return None
        text, of = bare(line), source(line)
        begun = self._open.pop(of, None)
        if begun is None or not begun.goes_on(text, line):
            begun = _Open()
        begun.take(text, line)
        if begun.whole:
            return Whole("".join(begun.parts), begun.lines) if len(begun.lines) > 1 else None
        if begun.closers and begun.length <= LIMIT and len(self._open) < _SOURCES:
            self._open[of] = begun
        return None


class _Open:
    """Lines up to one that ends with a bracket open, or inside of a string."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.lines: list[str] = []
        self.closers: list[str] = []
        self.length = 0
        self.whole = False
        self._quote = ""
        self._in_text = False  # whether the first bracket is no dict's, and no list's that stands by itself

    def goes_on(self, text: str, line: str) -> bool:
        """Whether a line may be the next one; `text` is what is bare of it."""
        if self._quote:
            return not _DICT.match(text)
        last = self.parts[-1][-1]
        if text.startswith("{") and last != ":" and not (last in "[(," and self.closers[-1] != "}"):
            return False  # another dict: no key begins so
        if (
            text.startswith("{")
            and self._in_text
            and not without_colours(line).removeprefix(source(line))[:1].isspace()
        ):
            return False  # what is in a list behind a label is set in
        if last in _REST and _STRINGS.match(text):  # pprint breaks long ones
            return True
        return last in ",:[({" or text.startswith((",", "]", ")", "}"))

    def take(self, text: str, line: str) -> None:
        """Read on; `closers` is empty where nothing is open behind it."""
        at, between = 0, ""
        if not self.lines:
            at = _begin(text)
            self._in_text = at > 0 and text[at] != "{"
        elif self._quote:  # rich breaks words that are longer than its line
            between = " " if self.lines[-1][-1:].isspace() else ""
        elif self.parts[-1][-1] in ",:":
            between = " "
        self.lines.append(line)
        self.length += len(line) + 1
        if text:
            self.parts.append(between + text)
            self._scan(text, at)

    def _scan(self, text: str, at: int) -> None:
        if self._quote:
            rest = _REST[self._quote].match(text)
            if not rest:
                return
            at, self._quote = rest.end(), ""
        for match in _TOKEN.finditer(text, at):
            part = match[0]
            if part in _REST:  # no other ends it here
                self._quote = part
                return
            if part in _CLOSES:
                self.closers.append(_CLOSES[part])
            elif part in (")", "]", "}"):
                if not self.closers or self.closers.pop() != part:
                    self.closers.clear()
                    return
                if not self.closers:
                    self.whole = True
                    return


def _begin(text: str) -> int:
    """Where the first bracket stands that may stay open: of a dict, of a list of such, or the last in the line."""
    if _LISTED.match(text):
        return 0
    return text.index("{") if "{" in text else max(0, len(text) - 1)
