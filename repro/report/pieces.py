"""Lines that are part our own words and part somebody else's, and how each medium shows them.

A commit's subject, a metric's or a branch's name is anybody's text: it must not become markup, a link, a mention or an
escape sequence. A line therefore keeps apart what was said here and what is quoted, until it is shown.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Line", "Piece", "clean", "code", "cut", "escaped", "fenced", "markdown", "plain", "quoted", "said"]


@dataclass(frozen=True)
class Piece:
    """A part of a line.

    Attributes:
        text: What it says.
        kind: ``said``: our own words, which hold no markup. ``code``: a name. ``quoted``: prose of somebody else.
    """

    text: str
    kind: Literal["said", "code", "quoted"]


Line = Sequence[Piece]

_NAME = 90
"""Characters of a name that Markdown shows."""


def said(text: str) -> Piece:
    """Our own words."""
    return Piece(text, "said")


def code(text: str) -> Piece:
    """A name."""
    return Piece(clean(text), "code")


def quoted(text: str) -> Piece:
    """Somebody else's prose."""
    return Piece(clean(text), "quoted")


_UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
"""Control characters, marks that turn the direction of text so that it reads as other text than it is, halves of
surrogate pairs, and what XML forbids."""


def clean(text: str) -> str:
    """One line without what is not seen: see `_UNSEEN`."""
    return _UNSEEN.sub("", " ".join(text.split()))


def cut(text: str, width: int) -> str:
    """A text without its middle where it is too long: names differ at their ends."""
    if len(text) <= width:
        return text
    left = (width - 1) // 2
    return f"{text[: width - 1 - left]}…{text[len(text) - left :]}"


def plain(line: Line) -> str:
    """The line without markup, for terminals and files that escape their own way."""
    return "".join(piece.text for piece in line)


_MARKS = re.compile(r"[\\`*_\[\]{}~$!#]")
_NOTHING = "\u200b"
_LINKS = re.compile(
    r"(?i)(?<=:)(?=//)|(?<=www)(?=\.)"  # bare addresses
    r"|(?<=#)(?=\d)|(?<=\bgh-)(?=\d)"  # issues
    r"|(?<=\b[0-9a-f]{6})(?=[0-9a-f]{1,34}\b)"  # commits
)
"""Where a space of no width keeps GitHub from making a link, and from telling an issue that it was mentioned."""
_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;", "@": "@&#8203;"})
"""A space of no width after @ keeps GitHub from calling somebody."""


def escaped(text: str) -> str:
    """Somebody else's prose in GitHub's Markdown: no markup, no HTML, no link, no mention."""
    text = _MARKS.sub(lambda mark: "\\" + mark[0], _LINKS.sub(_NOTHING, text)).translate(_ENTITIES)
    return text.replace(_NOTHING, "&#8203;")


def _span(text: str, *, cell: bool) -> str:
    """A name as code: between more backticks than it holds in a row."""
    if not text.strip():
        return "(empty)"
    if cell and "|" in text:  # a table is split at its bars before code is looked for
        return f"<code>{escaped(text)}</code>"
    ticks = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    pad = " " if text[0] in "` " or text[-1] in "` " else ""
    return f"{ticks}{pad}{text}{pad}{ticks}"


def markdown(line: Line, *, width: int = 200, cell: bool = False) -> str:
    """The line in GitHub's Markdown.

    Args:
        line: The line.
        width: Characters that are shown of a quoted text; of a name no more than `_NAME`.
        cell: Whether it stands in a table.
    """
    shown = []
    for piece in line:
        if piece.kind == "code":
            shown.append(_span(cut(piece.text, min(width, _NAME)), cell=cell))
        else:
            shown.append(escaped(cut(piece.text, width)) if piece.kind == "quoted" else piece.text)
    return "".join(shown)


def fenced(text: str) -> str:
    """Lines as a block of code, behind a fence that they do not close."""
    ticks = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{ticks}\n{text}\n{ticks}"
