"""Whether a regular expression of a file may be tried: some take longer than the age of the universe."""

from __future__ import annotations

import re

__all__ = ["why_slow"]

_LONGEST = 1000
_REPEATS = 4

_TOKEN = re.compile(
    r"(?P<back>\\[1-9]|\(\?P=)|(?P<one>\\.|\[\^?\]?(?:\\.|[^\]\\])*\])|(?P<open>\()|(?P<close>\))|(?P<branch>\|)"
    r"|(?P<repeat>[*+]|\{\d*,\d*\}|\{\d+\})|(?P<option>(?<!\()\?)|(?P<other>.)",
    re.DOTALL,
)


def why_slow(pattern: str) -> str:
    """Why a pattern is not tried; '' where it may be.

    Python's engine is exponential on a repetition of what repeats or branches itself, and on back references. Both are
    found by reading the pattern from left to right; patterns of quantisation need neither.
    """
    if len(pattern) > _LONGEST:
        return f"is longer than {_LONGEST} characters"
    groups = [False]  # for each open group: whether something in it repeats or branches
    last = False  # the same of what a quantifier here would repeat
    repeats = 0
    for token in _TOKEN.finditer(pattern):
        kind = token.lastgroup
        if kind == "back":
            return "refers back to a group"
        if kind == "repeat":
            if last:
                return "repeats what repeats or branches itself"
            repeats += 1
            last = groups[-1] = True
        elif kind == "option":
            groups[-1] = True
        elif kind == "close":
            last = groups.pop() if len(groups) > 1 else False
            groups[-1] = groups[-1] or last
        else:
            if kind == "open":
                groups.append(False)
            groups[-1] = groups[-1] or kind == "branch"
            last = False
    return "" if repeats <= _REPEATS else f"repeats more than {_REPEATS} times"
