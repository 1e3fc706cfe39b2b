"""The report on two commits as a comment of a pull request: Markdown that always fits where GitHub keeps it."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from repro import __version__
from repro.pulls.blocks import blocks_of, foot
from repro.pulls.github_pull import marker
from repro.pulls.metrics import Block
from repro.pulls.pair import PairResult
from repro.pulls.result import WORDS, Entry, PullReport, summary, verdict_line
from repro.report.pieces import Line, Markdown, clean, code, cut, fenced, markdown, quoted, said, templates
from repro.text import count, utc

__all__ = ["LIMIT", "comment"]

LIMIT = 65_000
"""Bytes of a comment. GitHub takes 65,536 characters, and a character is never less than a byte."""
_LINES = 48_000
"""Bytes of the verdict lines, where there are very many cases."""
_ROWS = 40
_PART = 40
"""Bytes of the smallest part of a section: more parts than that cannot fit, and are not tried."""
_WIDE, _COMMAND = 240, 2000


def comment(report: PullReport, key: str = "default", *, limit: int = LIMIT) -> str:
    """The comment, whatever is in the report no longer than `limit` bytes.

    Details go first, from the last ones on; verdict lines stay, the names in them shortened where they must be.

    Args:
        report: What was found.
        key: Tells the comments of several workflows on one pull request apart.
        limit: Bytes of UTF-8 at most; at least 20,000.
    """
    entries = report.entries
    lines = _verdicts(entries, min(_LINES, limit * 3 // 4))
    sections = [(entry, blocks_of(entry)) for entry in entries if isinstance(entry, PairResult)]
    # a part is a section's frame or one of its blocks: [frame, block, block, frame, block, ...]
    parts = [(n, k) for n, (_, blocks) in enumerate(sections) for k in range(len(blocks) + 1)]

    def render(number: int) -> str:
        sizes = Counter(n for n, _ in parts[:number])
        rendered = [_section(*sections[n], size - 1, several=len(entries) > 1) for n, size in sizes.items()]
        context = {
            "marker": marker(key),
            "summary": summary(entries) if len(entries) > 1 else "",
            "verdicts": lines,
            "sections": rendered,
            "left": _left_out(sections, parts[number:]),
            "ends": _endpoint_lines(report),
            "at": report.at.replace("T", " ").replace("Z", " UTC"),
            "command": fenced(_shortened(report.command)),
            "version": __version__,
            "md": partial(markdown, width=_WIDE),
            "cell": partial(markdown, width=_WIDE, cell=True),
            "rows": _ROWS,
        }
        text = templates().get_template("pull.md.jinja").render(**context)
        return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"

    most = min(len(parts), limit // _PART)
    if most == len(parts) and len((whole := render(most)).encode()) <= limit:
        return whole
    # [fits, fits, ..., does not, does not]
    number = bisect_right(range(1, most), False, key=lambda n: len(render(n).encode()) > limit)
    return render(number)


def _section(entry: PairResult, blocks: Sequence[Block], number: int, *, several: bool) -> dict[str, Any]:
    return {
        "case": clean(entry.case),
        "name": (code(entry.case),) if several else (),
        "word": WORDS[entry.verdict],
        "fold": several and entry.agrees,
        "blocks": blocks[:number],
        "foot": foot(entry),
    }


def _shortened(command: str) -> str:
    return (
        command if len(command) <= _COMMAND else f"{cut(command, _COMMAND)}\n# shortened: all of it is in report.html"
    )


def _verdicts(entries: Sequence[Entry], limit: int) -> Sequence[str]:
    """A line for each case, with names as long as there is room for."""
    for width in (400, 180, 90, 40, 24):
        lines = [markdown((code(e.case), said(": "), *verdict_line(e)), width=width) for e in entries]
        if sum(len(line.encode()) + 3 for line in lines) <= limit:
            return lines
    return _crowded(entries, limit)


def _crowded(entries: Sequence[Entry], limit: int) -> Sequence[str]:
    """One line for each verdict, with the names of its cases, where a line for each case would not fit."""
    groups = {word: [e for e in entries if e.verdict == verdict] for verdict, word in WORDS.items()}
    for width in (24, 12):
        by_word = {word: [markdown((code(e.case),), width=width) for e in group] for word, group in groups.items()}
        if sum(len(name.encode()) + 2 for names in by_word.values() for name in names) <= limit - 1000:
            break
    room, lines = limit - 1000, []
    for word, names in by_word.items():
        fitting: list[str] = []
        for name in names:
            if (room := room - len(name.encode()) - 2) < 0:
                break
            fitting.append(name)
        more = [f"{len(names) - len(fitting)} more"] if len(fitting) < len(names) else []
        lines += [Markdown(f"{word}: {', '.join([*fitting, *more])}")] if names else []
    return lines


def _left_out(sections: Sequence[tuple[PairResult, list[Block]]], gone: Sequence[tuple[int, int]]) -> str:
    """What was left out for length."""
    if not gone:
        return ""
    whole = {n for n, k in gone if k == 0}
    parts = [n for n, _ in gone if n not in whole]
    named = (
        [f"{count(len(parts), 'part')} of {markdown((code(sections[parts[0]][0].case),), width=60)}"] if parts else []
    )
    named += [f"all details of {count(len(whole), 'case')}"] if whole else []
    left = f"Left out for length: {' and '.join(named)}. The whole is in report.html and report.json of the same run."
    return Markdown(left)


def _endpoint_lines(report: PullReport) -> list[str]:
    """Both commits in full; of the baseline the one that served, which cases share."""
    lines: dict[str, None] = {}
    for result in report.results:
        for name, point in (("BASE", result.base), ("HEAD", result.head)):
            date = quoted(f"({utc(point.date)})")
            line: Line = (said(f"{name} "), code(point.commit), said(" "), quoted(point.subject), said(" "), date)
            lines[markdown(line, width=_WIDE)] = None
    if not lines:
        lines = {markdown((said(f"{n} "), code(c))): None for n, c in (("BASE", report.base), ("HEAD", report.head))}
    return list(lines)
