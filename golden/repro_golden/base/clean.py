r"""One cleaner for text that somebody else wrote, before a person, a terminal or a CI's log reads it.

A commit's subject, an author, a metric's name, a path or an error's text is anybody's: it may hold escape sequences
(which colour, overwrite, or fill the clipboard), marks that turn the direction of text, characters that nobody sees,
and lines that a CI takes for commands. Nothing is dropped: what is not seen is written out (``\x1b``, ``\u202e``), so
that two names never look alike because of it. The standard library is all that this needs: the recorder uses it too.
"""

from __future__ import annotations

import re

__all__ = ["no_command", "one_line", "visible", "without_colours"]

_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters: C0 but tab and newline, DEL, C1
    "\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff0-\ufffb"
    "\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"  # format characters
    "\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\uffa0\U000e0000-\U000e0fff"  # letters and marks without ink
    "\u2028\u2029\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"  # other ends of lines, halves of pairs, no characters at all
)
_COLOURS = re.compile("\x1b(?:\\[[0-?]*[ -/]*[@-~]|\\][^\x07\x1b]*(?:\x07|\x1b\\\\))")
_BREAKS = re.compile(r"(?:\r?\n[ \t]*)+|\t")
_COMMAND = re.compile(r"^([^\S\n]*):(?=:)", re.MULTILINE)
_OLD_COMMAND = re.compile(r"#(?=#\w*\[)")


def visible(text: str) -> str:
    """The text with what is not seen written as Python writes it; newlines and tabs stay."""
    return _UNSEEN.sub(lambda unseen: unseen[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """`visible` text in one line: a blank stands for its tabs, and for newlines and how the next line is indented."""
    return visible(_BREAKS.sub(" ", text).rstrip(" "))


def without_colours(text: str) -> str:
    """The text without what colours it or moves the cursor: of what a program prints, such as Ray's, and of no name."""
    return _COLOURS.sub("", text)


def no_command(text: str) -> str:
    """The text without a line that a CI obeys: a backslash breaks ``::name::`` at its start, ``##[name]`` anywhere."""
    return _OLD_COMMAND.sub(r"#\\", _COMMAND.sub(r"\1\\:", text))
