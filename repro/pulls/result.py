"""What `repro report pr` found of all cases, and what each of its answers says in one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from repro import __version__
from repro.pulls.pair import Compared, PairResult
from repro.report.pieces import Line, code, plain, quoted, said
from repro.text import count
from repro_bisect.axes.axis import short
from repro_golden.base.observed import bounded

__all__ = ["FORMAT", "WORDS", "Entry", "Failed", "PullReport", "judging", "moved_bounds", "summary", "verdict_line"]

FORMAT = 1

WORDS = {
    "moved": "numbers moved",
    "flaky": "HEAD does not reproduce itself",
    "error": "error",
    "unverifiable": "not verifiable",
    "within": "within bounds",
    "identical": "bit-identical",
}
"""What a verdict is called, the worst first."""


@dataclass(frozen=True)
class Failed:
    """A case that gave no result.

    Attributes:
        case: Its name.
        line: Why, in one line that names the cure.
        verdict: ``error``; ``unverifiable`` where the question has no answer here.
    """

    case: str
    line: str
    verdict: Literal["error", "unverifiable"] = "error"

    def to_mapping(self) -> dict[str, Any]:
        """JSON types."""
        return {"case": self.case, "verdict": self.verdict, "reason": self.line}


Entry = PairResult | Failed


@dataclass(frozen=True)
class PullReport:
    """Every case of a repository, replayed on two commits.

    Attributes:
        base: Full id of the baseline as it was given.
        head: Full id of the other one.
        entries: What was found of each case, in order.
        command: What does it again.
        at: When, in UTC.
    """

    base: str
    head: str
    entries: Sequence[Entry]
    command: str
    at: str

    @property
    def results(self) -> list[PairResult]:
        """The cases that gave a result."""
        return [entry for entry in self.entries if isinstance(entry, PairResult)]

    @property
    def exit_code(self) -> int:
        """1 where numbers moved or HEAD is noise; else 2 where a case failed; else 3 where one is not verifiable."""
        verdicts = {entry.verdict for entry in self.entries}
        if verdicts & {"moved", "flaky"}:
            return 1
        return 2 if "error" in verdicts else 3 if "unverifiable" in verdicts else 0

    def to_mapping(self) -> dict[str, Any]:
        """JSON types, without NaN."""
        return {
            "format": FORMAT,
            "version": __version__,
            "at": self.at,
            "base": self.base,
            "head": self.head,
            "summary": summary(self.entries),
            "exit_code": self.exit_code,
            "reproduce": self.command,
            "results": [entry.to_mapping() | {"line": plain(verdict_line(entry))} for entry in self.entries],
        }


def summary(entries: Sequence[Entry]) -> str:
    """How many cases came to which verdict."""
    counts: Counter[str] = Counter(entry.verdict for entry in entries)
    parts = [f"{counts[v]} {w.removeprefix('numbers ')}" for v, w in WORDS.items() if counts[v]]
    return f"{count(len(entries), 'case')}: {', '.join(parts)}"


def moved_bounds(compared: Compared) -> dict[str, list[int]]:
    """The steps at which each metric left its bound, by metric."""
    steps: dict[str, list[int]] = {}
    for violation in (v for v in compared.violations if v.kind == "bound"):
        steps.setdefault(violation.signal, []).append(violation.step)
    return steps


def judging(result: PairResult) -> dict[str, str]:
    """Which bound judges each metric that either side tells: ``loss`` also judges ``loss#1`` (`bounded`)."""
    return bounded(result.bounds, result.compared.drift.metrics if result.compared else ())


def verdict_line(entry: Entry) -> Line:
    """The answer for one case, without the case's name."""
    word = said(WORDS[entry.verdict])
    if isinstance(entry, Failed):
        return word, said(": "), quoted(entry.line)
    compared = entry.compared
    if compared is None:
        return (word, said(": "), quoted(entry.reason)) if entry.reason else (word,)
    if entry.verdict == "flaky":
        return word, said(": "), quoted(compared.flaky)
    steps = count(compared.drift.steps, "step")
    if entry.verdict == "identical":
        renamed = (said("; "), quoted(str(compared.drift.renames))) if compared.drift.renames else ()
        every = "all " if compared.drift.steps != 1 else ""
        return word, said(f" in {every}{steps}{compared.drift.looked.but}"), *renamed
    if entry.verdict == "within":
        return word, said("; bits differ from"), *_where(compared)
    if entry.by_length_alone:
        return word, said(f": {entry.other_length},"), *_who(entry)
    if compared.violations:
        first = compared.violations[0]
        how = "out of bounds" if first.kind == "bound" else "to what is not finite"
        left = said(f" {how} at step {first.step} in "), code(first.signal)
        return word, *left, said(f" ({first.phase})"), *_who(entry)
    if same := compared.drift.untouched:
        return said("other signals moved at"), *_where(compared), *_who(entry), said(f"; {same}")
    return word, said(" at"), *_where(compared), *_who(entry)


def _where(compared: Compared) -> Line:
    first = compared.drift.divergence
    return (said(f" step {first.step} in "), code(first.name), said(f" ({first.phase})")) if first else ()


def _who(entry: PairResult) -> Line:
    """By which commit; "at least", where a search could not name each."""
    search = entry.bisect
    others = search is not None and (search.explains_bad is False or search.earlier is not None)
    n = "at least " if entry.unnamed or others else ""
    if len(entry.culprits) == 1:
        culprit = entry.culprits[0].commit
        return said(f" by {n}"), code(short(culprit.commit)), said(" "), quoted(culprit.subject)
    if entry.culprits:
        pieces = [piece for c in entry.culprits[:3] for piece in (said(", "), code(short(c.commit.commit)))][1:]
        more = [said(f" and {len(entry.culprits) - 3} more")] if len(entry.culprits) > 3 else []
        return said(f" by {n}{len(entry.culprits)} commits: "), *pieces, *more
    several = f" by one or more of {entry.commits} commits"
    if entry.unnamed:
        return said(f"{several}, not named: "), quoted(entry.unnamed)
    if entry.bisect is not None:
        return (said(several),)
    return said(f"{several}; "), code("--bisect"), said(" names each")
