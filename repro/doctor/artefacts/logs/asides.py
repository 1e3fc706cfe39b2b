"""Whether a phrase in a line of a log is a sign, or stands in what the line quotes, advises or shows."""

from __future__ import annotations

import re

from repro.doctor.artefacts.kinds import Aside
from repro.doctor.artefacts.logs.samples import MARKS, TAG
from repro_golden.base.clean import without_colours

__all__ = ["aside"]

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
    if any(mark in before for mark in MARKS) and (TAG.match(before) or any(mark in before for mark in _CHAT)):
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
            own = before[: opened.start()][-40:]
            if closes.search(phrase) or _CALLED.search(own) or _FIELD.search(own):
                return False
            return bool(closes.search(behind)) or len(behind) >= _CUT
        start = closed.end()
    return False
