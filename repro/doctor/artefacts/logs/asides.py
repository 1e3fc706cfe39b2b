"""Whether a phrase in a line of a log is a sign, or stands in what the line quotes, advises or shows of samples."""

from __future__ import annotations

import bisect
import re

from repro.doctor.artefacts.kinds import Aside
from repro_golden.base.clean import without_colours

__all__ = ["MARKS", "Samples", "aside"]

_ORDER = {"[prompt]": 0, "[response]": 1, "[ground_truth]": 2, "[score]": 3}
_BEGINS, _ENDS = ("<|im_start|>", "<|start_header_id|>"), ("<|im_end|>", "<|eot_id|>")
MARKS = (*_ORDER, *_BEGINS, *_ENDS)
"""verl's names of a sample's parts, as its reward managers print them, and marks of chat templates."""
_TAG = re.compile(r"(?:\(\w[^()]*(?:\([^()]*\))?[^()]*\)|\s)*(\[(?:prompt|response|ground_truth|score)\])(?=\s|$)")
"""A part's name at a line's beginning."""
_SOURCE = re.compile(r"\(\w[^()]*?(?:\([^()]*\))? pid=\d+(?:, ip=[^\s)]+)?\)|\[rank\d{1,6}\]")
_MOST_SAMPLES = 50_000
_SAMPLES = ("First rollout sample:", "Finish rollout:", "GenerateReqInput(", "text_preview=")
"""Lines that quote prompts and responses, in which any message can stand."""
_GIVEN = re.compile(
    r"\b(?:sandbox|tool|interpreter)s?(?:[ _-]call)?[ _-](?:result|output|response|stdout|stderr)s?\b"
    r"|\b(?:response|completion|prompt|answer|output|text)s? (?:of|for) (?:sample|prompt|request|rollout)\b"
    r"|\bsample(?: \d+)?(?:'s)? (?:response|completion|prompt|answer)\b",
    re.IGNORECASE,
)
"""The same in other words, and what tools gave that a model called."""
_GIVERS = ("sandbox", "tool", "interpreter", " of ", " for ", "sample ", "sample'")
"""One of them is in all that `_GIVEN` matches."""

_CHAT = tuple(mark for mark in MARKS if mark.startswith("<"))
_BARS = ("|", "\u2502", "\u2503")
"""What a table's row begins with, and has between its cells: TRL's of completions."""

_BEGINNING = re.compile(
    r"(?:\s|\(\w[^()]{0,100}?(?:\([^()]{0,100}\))? pid=\d+[^()]{0,80}\)|\[[^\]]{0,80}\]:?|\S{1,80}\.py:\d+ - )*"
)
"""What Ray, ranks and loggers put before a line."""
_COMMAND = re.compile(r"\+{1,9} \S")
_RAISED = re.compile(r"[\w.]*(?:Error|Exception)(?:[:(]|$)|Fatal ")
"""How an exception's own line begins."""
_LEVEL = re.compile(
    r"""\b(?<![^\s\[|"':(-])(DEBUG|INFO|NOTICE|WARN(?:ING)?|ERR(?:OR)?|CRITICAL|FATAL)(?=[\s\]|,"':)-]|$)"""
)
_EARLY = 400
"""Characters of a line in which its level stands."""

_ADVICE = re.compile(
    r"\b(?:(?:if|when(?:ever)?) (?:you|your|this|the run|it)|to (?:avoid|prevent)|in case of) [^.;:]{0,60}$",
    re.IGNORECASE,
)
_ADVISED = 100
"""Characters before a phrase that may advise on it."""
_OPENED = re.compile(r"[\"'`\u201c](?<![^\s(\[,].)")
"""A quotation mark as it begins a quotation, and no apostrophe, nor what stands behind a field's `=`."""
_CALLED = re.compile(r"\w\($")
"""What stands before a call's argument."""
_FIELD = re.compile(r"(?:error|exception|message|msg|reason|details?|stderr|cause)[\"']?\s?[:=]\s?$", re.IGNORECASE)
"""What stands before a message that is a field and no quotation."""
_RECORD = re.compile(r"""["'](?:level\w*|severity|lvl)["']\s?:""")
"""What a logger's record in JSON holds."""
_CUT = 200
"""Of so many characters behind a phrase the rest may be missing, and a quotation's mark with it."""


def _source_of(text: str) -> str:
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
        source = _source_of(text)
        if match := _TAG.match(text):
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
        if self._count < _MOST_SAMPLES:
            self._count += 1
            self._closed.setdefault(source, []).append((first, last))

    def opened(self, text: str) -> bool:
        """Whether a sample of a line's process has begun and not ended."""
        source = _source_of(without_colours(text))
        return source in self._parts or source in self._turns

    def hold(self, number: int, text: str) -> bool:
        """Whether a line lies in one that was ended."""
        closed = self._closed.get(_source_of(text), [])
        at = bisect.bisect_right(closed, (number, 1 << 62))
        # a part may lie in a turn of the chat, or the other way round
        return any(first <= number <= last for first, last in closed[max(at - 8, 0) : at + 8])


def aside(before: str, phrase: str, behind: str) -> Aside:
    """Why a phrase is no sign by itself, by the line around it; '' where it is one.

    Args:
        before: The line up to the phrase: all of it, or its beginning and what is near.
        phrase: It.
        behind: The line behind it, or the beginning of that.
    """
    before = without_colours(before)
    at = match.end() if (match := _BEGINNING.match(before)) else 0
    if _COMMAND.match(before, at) or any(mark in before for mark in _SAMPLES):
        return "shown"
    if any(mark in before for mark in MARKS) and (_TAG.match(before) or any(mark in before for mark in _CHAT)):
        return "shown"
    if before.startswith(_BARS, at) and _cells(before[at:] + phrase + behind) and any(bar in behind for bar in _BARS):
        return "shown"
    if any(word in before.lower() for word in _GIVERS) and _GIVEN.search(before):
        return "shown"
    level = match[1] if (match := _LEVEL.search(before[:_EARLY])) else ""
    if level.startswith(("ERR", "CRIT", "FATAL")) or _RAISED.match(before + phrase, at):
        return ""
    record = before.startswith("{", at) and _RECORD.search(before + phrase + behind)
    if _ADVICE.search(before[-_ADVISED:]) or (not record and _in_quotes(before, phrase, behind)):
        return "quoted"
    return "level" if level in ("DEBUG", "INFO") else ""


def _cells(text: str) -> bool:
    """Whether a row has two cells at least: a panel has one."""
    return sum(text.count(bar) for bar in _BARS) > 2


def _in_quotes(before: str, phrase: str, behind: str) -> bool:
    """Whether a phrase stands in a quotation."""
    start = 0
    while opened := _OPENED.search(before, start):
        mark = "\u201d" if opened[0] == "\u201c" else opened[0]
        closes = re.compile(rf"(?<!\\){mark}(?!\w)")
        closed = closes.search(before, opened.end())
        if closed is None:
            lead = before[: opened.start()][-40:]
            if closes.search(phrase) or _CALLED.search(lead) or _FIELD.search(lead):
                return False
            return bool(closes.search(behind)) or len(behind) >= _CUT
        start = closed.end()
    return False
