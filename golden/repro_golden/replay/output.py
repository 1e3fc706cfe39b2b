"""What a child printed: its end, and the line of it that names an error."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path

from repro_golden.base.clean import without_colours

__all__ = ["RAISED", "last_line", "last_lines", "tail"]

_LAST = 50
"""Lines of output that are searched: behind the cause come the tracebacks of other ranks and the launcher's summary."""
TAIL = 1 << 20
"""Bytes at the end of a log that are read: it may be of any size."""


def tail(log: Path, start: int = 0) -> str:
    """The last `TAIL` bytes of a log, of what lies behind its first `start`, without colours."""
    with log.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(min(start, end), end - TAIL))
        return without_colours(file.read(TAIL).decode("utf-8", errors="replace"))


def last_lines(text: str) -> str:
    """Those that are searched."""
    return "\n".join(text.splitlines()[-_LAST:])


_FIRST = re.compile(r"Root Cause \(first observed failure\):.*?rank\s*: (\d+) .*?exitcode\s*: (-?\d+)", re.DOTALL)
"""How torchrun's summary names the rank that failed first."""
_ENDED = "failed (exitcode:"
"""In torchrun's line that a rank ended, which it writes before a traceback of its own."""
RAISED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Failure)(:|$)")
"""The last line of a traceback."""
_TRACEBACK = re.compile(r"(.*?)(?:Original )?Traceback \(most recent call last\):$")
"""A traceback's first line, behind what a launcher writes before each."""


def last_line(log: Path) -> str:
    """The line of a child's output that names its error: the exception of the last traceback, else the last line.

    Of a torchrun, of what the rank that failed first printed as such.
    """
    text = tail(log).strip()
    lines = text.splitlines()
    if match := _FIRST.search(text):
        mark = f"[rank{match[1]}]: "
        printed = [line.removeprefix(mark) for line in lines if line.startswith(mark)]
        if not printed:  # it failed before torch knew which rank it is
            earlier = itertools.takewhile(lambda line: _ENDED not in line, lines)
            printed = [line for line in earlier if RAISED.match(line)]
        return f"rank {match[1]} failed first, with {match[2]}: {_named(printed) or 'no traceback'}"[:300]
    return _named(lines)[:300] or "no output"


def _named(lines: Sequence[str]) -> str:
    """Of lines the one that names an error, whose message may have more: it follows the frames, which are indented."""
    lines = lines[-_LAST:]
    for number in reversed(range(len(lines))):
        if match := _TRACEBACK.match(lines[number]):
            raised = itertools.dropwhile(lambda line: line.startswith(f"{match[1]} "), lines[number + 1 :])
            return next((line for line in raised if line.startswith(match[1])), lines[-1])
    return lines[-1] if lines else ""
