"""One pass over gigabytes of text for fixed phrases, in bounded memory."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from repro.doctor.artefacts.kinds import Hit
from repro.doctor.artefacts.logs.asides import aside

__all__ = ["BEHIND", "KEPT", "NEAR", "SHOWN", "Scan", "Source", "Taker", "safe", "scan"]

KEPT = 100
"""Lines kept of each phrase in which it is a sign, and so many in which it is none. Later ones are counted."""

_JUDGED = 20 * KEPT
"""Lines of each phrase that are asked whether it is a sign there."""

SHOWN = 400
"""Characters kept of a line."""

_BLOCK = 1 << 20
"""Bytes read at a time: what the phrases' automaton and its matches take stays in the cache."""

_LONG = 96 << 10
"""Bytes of a line that are held until its end is seen. A longer one is searched in pieces. More than what
`repro_golden.base.printed.lines.labelled` reads."""

_HEAD, _BEFORE, _AFTER = 160, 60, 160
"""Bytes shown of a line's beginning, and around a phrase that stands far into it."""

_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")

NEAR, BEHIND = 1024, 256
"""Bytes before and behind a phrase that are looked at to see whether it is a sign, beside the line's beginning."""


class Source(Protocol):
    """What is read: a file, or what gzip unpacks."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill the buffer from its start and say how many bytes that were; 0 at the end."""


Taker = Callable[[int, bytes], None]
"""Is given the number of a line and its bytes, cut at 96 KiB."""


@dataclass
class Scan:
    """What one pass found.

    Attributes:
        size: Bytes.
        lines: How many; a last one without an end counts.
        hits: By phrase, the first `KEPT` lines that hold it.
        counts: By phrase, how many lines hold it.
        marks: (number of a line, offset of its first byte), ascending, about one for each block.
    """

    size: int = 0
    lines: int = 0
    hits: dict[str, list[Hit]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    marks: list[tuple[int, int]] = field(default_factory=lambda: [(1, 0)])


def safe(line: bytes) -> str:
    """A line as text that can be shown: no colours, nothing that steers a terminal, at most `SHOWN` characters."""
    text = _ANSI.sub("", line.decode("utf-8", "replace"))
    return "".join(c if c.isprintable() else " " for c in text[: SHOWN * 2]).rstrip()[:SHOWN]


@functools.cache
def _automaton(phrases: tuple[bytes, ...]) -> Callable[[memoryview], Sequence[tuple[int, int, int]]]:
    from ahocorasick_rs import BytesAhoCorasick, Implementation

    automaton = BytesAhoCorasick(phrases, implementation=Implementation.DFA)  # half as fast again as what it chooses
    return lambda block: automaton.find_matches_as_indexes(block, overlapping=True)


def scan(
    source: Source,
    phrases: Sequence[str],
    *,
    takers: Mapping[str, Taker] | None = None,
    shown: Callable[[str], bool] | None = None,
    block: int = _BLOCK,
    long: int = _LONG,
) -> Scan:
    """Read a source to its end and find the lines that hold a phrase.

    Args:
        source: Read from where it stands.
        phrases: What to look for, exact, without line ends. Twice the same is once.
        takers: By further phrases, what is called with every line that holds one, whatever their number; once a line.
        shown: Whether a line, by its beginning, may lie in what the log shows: it takes no place of a sign.
        block: Bytes read at a time.
        long: Bytes of a line that are held whole, at least 4096.
    """
    takers = takers or {}
    sought = tuple(dict.fromkeys(p for p in (*phrases, *takers) if p))
    result = Scan(hits={p: [] for p in phrases if p}, counts=dict.fromkeys((p for p in phrases if p), 0))
    if any("\n" in p for p in sought):
        raise ValueError("a phrase goes over a line's end")
    one_pass = _Pass(result, sought, takers, max(block, 1), max(long, 4096))
    one_pass.shown = shown
    one_pass.run(source)
    return result


class _Pass:
    """The state of one pass: a buffer, whose first byte is `base` bytes into the source."""

    def __init__(
        self, scan: Scan, phrases: tuple[str, ...], takers: Mapping[str, Taker], block: int, long: int
    ) -> None:
        encoded = tuple(p.encode("utf-8", "surrogatepass") for p in phrases)
        self.found = scan
        self.phrases = phrases
        self.takers = [takers.get(p) for p in phrases]
        self.hits = [scan.hits.get(p) for p in phrases]
        self.counts = [0] * len(phrases)
        self.signs, self.asides = [0] * len(phrases), [0] * len(phrases)
        """By phrase, how many lines are kept in which it is a sign, and in which it is none."""
        self.shown: Callable[[str], bool] | None = None
        self.wanted = [hits is not None for hits in self.hits]
        """By phrase, whether more lines of it are kept."""
        self.last = [0] * len(phrases)
        """By phrase, the last line that was seen to hold it."""
        self.search = _automaton(encoded) if encoded else None
        longest = max(map(len, encoded), default=1)
        self.after = max(_AFTER, BEHIND) + longest
        self.before = max(_BEFORE, NEAR) + longest
        self.block, self.long = block, max(long, 8 * SHOWN + self.after + self.before)
        self.buffer = bytearray(self.long + 2 * block + self.after + self.before)
        self.filled = 0
        self.base = 0
        self.line, self.line_start = 1, 0
        """Where the buffer's first unread line begins: its number, and its offset in the source."""
        self.head = b""
        """The beginning of a line that is searched in pieces."""
        self.read_to = 0
        """Offset in the source up to which matches have been taken."""

    def run(self, source: Source) -> None:
        view = memoryview(self.buffer)
        ended = False
        while not ended:
            count = source.readinto(view[self.filled : self.filled + self.block]) or 0
            ended = count == 0
            # the bytes carried over hold no line end, except what is kept before a long line's unread part
            line_end = self.buffer.rfind(b"\n", self.filled, self.filled + count) + 1
            self.filled += count
            if ended:
                limit = self.filled
            elif line_end:
                limit = line_end
            elif self.filled > self.long:
                limit = self.filled - self.after
                if self.line_start >= self.base:
                    self.head = bytes(self.buffer[self.line_start - self.base : self.line_start - self.base + _HEAD])
            else:
                continue
            self._take(view, limit)
            keep = limit if ended or line_end else limit - self.before
            view[: self.filled - keep] = view[keep : self.filled]
            self.filled -= keep
            self.base += keep
        self.found.size = self.base + self.filled
        self.found.lines = self.line - 1 + (self.found.size > self.line_start)
        for phrase, count in zip(self.phrases, self.counts, strict=True):
            if phrase in self.found.counts:
                self.found.counts[phrase] = count

    def _take(self, view: memoryview, limit: int) -> None:
        """Take the matches that end at `limit` or before and were not taken, and count lines up to there."""
        buffer, last, counts = self.buffer, self.last, self.counts
        cursor = self.read_to - self.base
        begun = cursor
        line, first = self.line, self.line
        for index, start, end in self.search(view[:limit]) if self.search else ():
            if end <= begun:
                continue
            if end > cursor:
                line += buffer.count(10, cursor, end)
                cursor = end
            if last[index] == line:
                continue
            last[index] = line
            counts[index] += 1
            if self.wanted[index] or self.takers[index]:
                self._keep(index, line, first, start, end)
        line += buffer.count(10, cursor, limit)
        if line != first:
            self.line_start = self.base + buffer.rfind(b"\n", begun, limit) + 1
            self.found.marks.append((line, self.line_start))
        self.line, self.read_to = line, self.base + limit

    def _keep(self, index: int, line: int, first: int, start: int, end: int) -> None:
        """Keep a line, or hand it over."""
        offset = self.line_start if line == first else self.base + self.buffer.rfind(b"\n", 0, start) + 1
        begin = max(offset - self.base, 0)
        stop = self.buffer.find(b"\n", end, self.filled)
        stop = self.filled if stop < 0 else stop
        stop -= self.buffer[stop - 1 : stop] == b"\r" and stop > end
        hits, taker = self.hits[index], self.takers[index]
        if taker:
            taker(line, bytes(self.buffer[begin : min(stop, begin + _LONG)]))
        if hits is None or not self.wanted[index]:
            return
        head = bytes(self.buffer[begin : begin + _HEAD]) if offset >= self.base else self.head
        far = start + self.base - offset > NEAR
        before = (head if far else b"") + bytes(self.buffer[max(begin, start - NEAR) : start])
        parts = before, bytes(self.buffer[start:end]), bytes(self.buffer[end : min(stop, end + BEHIND)])
        why = aside(*(part.decode("utf-8", "replace") for part in parts))
        within = self.shown is not None and self.shown(parts[0].decode("utf-8", "replace"))
        tally = self.asides if why or within else self.signs
        tally[index] += 1
        self.wanted[index] = self.signs[index] < KEPT and self.counts[index] < _JUDGED
        if tally[index] > KEPT:
            return
        if end + self.base - offset <= SHOWN:
            excerpt = bytes(self.buffer[begin : min(stop, begin + 4 * SHOWN)])
        else:
            around = self.buffer[max(offset - self.base + _HEAD, start - _BEFORE, 0) : min(stop, start + _AFTER)]
            excerpt = head + b" ... " + bytes(around)
        hits.append(Hit(line, offset, safe(excerpt).strip(), why))
