"""Where a log shows what a model was asked and said: any message can stand there."""

from __future__ import annotations

import bisect
import re

from repro_golden.base.clean import without_colours

__all__ = ["MARKS", "TAG", "Samples", "source_of"]

_ORDER = {"[prompt]": 0, "[response]": 1, "[ground_truth]": 2, "[score]": 3}
_BEGINS, _ENDS = ("<|im_start|>", "<|start_header_id|>"), ("<|im_end|>", "<|eot_id|>")
MARKS = (*_ORDER, *_BEGINS, *_ENDS)
"""verl's names of a sample's parts, as its reward managers print them, and marks of chat templates."""
TAG = re.compile(r"(?:\(\w[^()]*(?:\([^()]*\))?[^()]*\)|\s)*(\[(?:prompt|response|ground_truth|score)\])(?=\s|$)")
"""A part's name at a line's beginning."""
_SOURCE = re.compile(r"\(\w[^()]*?(?:\([^()]*\))? pid=\d+(?:, ip=[^\s)]+)?\)|\[rank\d{1,6}\]")
_MOST = 50_000


def source_of(text: str) -> str:
    """What Ray or torchrun puts before the lines of one process; '' for lines without."""
    match = _SOURCE.match(text)
    return match[0] if match else ""


class Samples:
    """Gathers, in one pass, the lines that lie between the marks of a sample. One that is never ended is none."""

    def __init__(self) -> None:
        self._parts: dict[str, tuple[str, int]] = {}
        """By process, the part that is open, and its line."""
        self._turns: dict[str, int] = {}
        """By process, the line of a chat's turn that is open."""
        self._closed: dict[str, list[tuple[int, int]]] = {}
        self._count = 0
        self._last = 0

    def mark(self, number: int, line: bytes) -> None:
        """A line that holds a mark."""
        if number == self._last:
            return
        self._last = number
        text = without_colours(line.decode("utf-8", "replace"))
        source = source_of(text)
        if match := TAG.match(text):
            before = self._parts.pop(source, None)
            if before and _ORDER[before[0]] < _ORDER[match[1]]:
                self._close(source, before[1], number)
            if match[1] != "[score]":
                self._parts[source] = (match[1], number)
        begun, ended = (max(text.rfind(mark) for mark in marks) for marks in (_BEGINS, _ENDS))
        if ended >= 0 and source in self._turns:
            self._close(source, self._turns.pop(source), number)
        if begun > ended:
            self._turns[source] = number

    def _close(self, source: str, first: int, last: int) -> None:
        if self._count < _MOST:
            self._count += 1
            self._closed.setdefault(source, []).append((first, last))

    def opened(self, text: str) -> bool:
        """Whether a sample of a line's process has begun and not ended."""
        source = source_of(without_colours(text))
        return source in self._parts or source in self._turns

    def hold(self, number: int, text: str) -> bool:
        """Whether a line lies in one that was ended."""
        closed = self._closed.get(source_of(text), [])
        at = bisect.bisect_right(closed, (number, 1 << 62))
        # a part may lie in a turn of the chat, or the other way round
        return any(first <= number <= last for first, last in closed[max(at - 8, 0) : at + 8])
