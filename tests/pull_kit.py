"""Results of pairs and what is read of them, for the tests of reports on pull requests."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from trace_kit import write

from repro.pulls.blocks import blocks_of
from repro.pulls.pair import PairResult, compare_traces
from repro.pulls.result import Entry, PullReport
from repro.report.pieces import clean, plain
from repro_bisect.axes.axis import PointInfo
from repro_golden.case.file import Bound, Compare
from repro_golden.fingerprint import reference
from repro_golden.trace import Row, Trace
from repro_golden.trace.writer import metric_row

NAN = math.nan
Steps = Sequence[Mapping[str, Any]]


def point(letter: str, subject: str = "Work", date: str = "2026-11-20T23:30:00-05:00") -> PointInfo:
    return PointInfo(letter * 40, "Ada L. <ada@example.org>", date, subject, (), " a.py | 1 +\n")


def trace(folder: Path, steps: Steps) -> Trace:
    """A trace of metrics and, where a step names ``tokens``, log-probs."""
    rows = []
    for step in steps:
        made = [metric_row("loss", name, value) for name, value in step.items() if name != "tokens"]
        if "tokens" in step:
            raw = struct.pack(f"<{len(step['tokens'])}f", *step["tokens"])
            made.append(
                Row("forward", "log_probs", "float32", (len(step["tokens"]),), reference(raw), 0, 1.0, 1.0, raw, raw)
            )
        rows.append(made)
    return Trace(write(folder, rows))


def pair(tmp: Path, a: Steps, b: Steps, bounds: Mapping[str, Bound] | None = None, **changes: Any) -> PairResult:
    """What `compare_traces` says of two traces, as a result."""
    n = len(list(tmp.iterdir()))
    rule = Compare(mode="bounds", bounds=dict(bounds)) if bounds else Compare()
    compared = compare_traces(trace(tmp / f"a{n}", a), trace(tmp / f"b{n}", b), rule)
    result = PairResult(
        "toy", point("a", "Base"), point("b"), compared.verdict, "", compared, bounds or {},
        {"base": None, "head": None}, 5, [], None, "", [], "machine-1", "2026-11-22T03:12:45Z", 2.5,
    )  # fmt: skip
    return replace(result, **changes)


def report(*entries: Entry) -> PullReport:
    return PullReport("a" * 40, "b" * 40, entries, "repro report pr aaaaaaaaaa..bbbbbbbbbb", "2026-11-22T03:12:45Z")


def cells(result: PairResult, title: str = "Metrics") -> dict[str, list[list[str]]]:
    """The rows of a block's table as plain text, by their first cell."""
    tables: dict[str, list[list[str]]] = {}
    for block in blocks_of(result):
        if block.title.endswith(title):
            for row in block.rows:
                tables.setdefault(plain(row[0]), []).append([plain(cell) for cell in row[1:]])
    return tables


def below(result: PairResult) -> str:
    return "\n".join(plain(line) for block in blocks_of(result) for line in block.below)


def flat(steps: int = 3, **metrics: float) -> list[dict[str, Any]]:
    return [dict(metrics) for _ in range(steps)]


def with_step(step: int, base: Steps, **metrics: Any) -> list[dict[str, Any]]:
    """The same steps with one changed."""
    return [{**s, **metrics} if n == step else dict(s) for n, s in enumerate(base)]


class Shown(HTMLParser):
    """The tags and the text of rendered Markdown; the text in code apart, for GitHub calls nobody from there."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text, self.prose, self.depth = "", "", 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Count it."""
        assert not attrs, f"<{tag} {attrs}>: none of ours has any"
        self.tags.append(tag)
        self.depth += tag == "code"

    def handle_endtag(self, tag: str) -> None:
        """Leave it."""
        self.depth -= tag == "code"

    def handle_data(self, data: str) -> None:
        """Keep it."""
        self.text += data
        self.prose += data if not self.depth else ""


OURS = {"p", "strong", "code", "pre", "table", "thead", "tbody", "tr", "th", "td", "details", "summary", "h3", "h4",
        "ul", "li"}  # fmt: skip


def rendered(text: str) -> Shown:
    """A comment as GitHub renders it, as far as CommonMark with tables goes."""
    shown = Shown()
    shown.feed(MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(text))
    shown.close()
    return shown


def check_text(text: str, names: Iterable[str]) -> None:
    """No tag but ours, nobody is called, and the names are read as they were written."""
    shown = rendered(text)
    assert set(shown.tags) <= OURS, set(shown.tags) - OURS
    assert not re.search(r"@\w", shown.prose) and not re.search(r"\w://|www\.", shown.prose)
    read = shown.text.replace("\u200b", "")
    for name in names:
        assert clean(name) in read, (name, text)
