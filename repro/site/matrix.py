"""The overview: one row for each case on a machine, one column for each night."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from repro.nightly.records import STATUSES, NightlyRun, worst
from repro.site.folder import nightly_key, page_name
from repro.site.results import Results, when

__all__ = ["SHOWN", "SYMBOLS", "Cell", "Matrix", "Row", "matrix"]

SHOWN = 30
"""Nights of the first page."""

SYMBOLS = {"green": "✓", "changed": "≠", "flaky": "~", "error": "!", "not judged": "?", "no run": "·"}


@dataclass(frozen=True)
class Cell:
    """What a night found of a case on a machine.

    Attributes:
        status: The worst of that date's, or ``no run``.
        since: The status of the date's last run, where that is another one; else empty.
        href: The page that tells more; empty where there was no run.
        text: What a pointer that rests there shows.
    """

    status: str
    href: str = ""
    text: str = ""
    since: str = ""

    @property
    def symbol(self) -> str:
        """One character."""
        return SYMBOLS[self.status]

    @property
    def words(self) -> str:
        """For who sees no symbols."""
        return f"{self.status}, then {self.since}" if self.since else self.status

    @property
    def kind(self) -> str:
        """Its class in the style sheet."""
        return self.status.replace(" ", "-")


@dataclass(frozen=True)
class Row:
    """A case on a machine.

    Attributes:
        case: The case's name.
        page: The file name of its page, without the ending.
        machine: The machine.
        cells: One for each date.
    """

    case: str
    page: str
    machine: str
    cells: Sequence[Cell]


@dataclass(frozen=True)
class Matrix:
    """A table of nights.

    Attributes:
        dates: The columns, newest first, as ``2026-11-22``.
        months: ``2026-11`` and how many columns it has.
        rows: By case, then machine.
        counts: How many cells have each status.
        newest: Of the newest date each status, how many cells have it, and what later runs of the date say of them.
    """

    dates: Sequence[str]
    months: Sequence[tuple[str, int]]
    rows: Sequence[Row]
    counts: dict[str, int]
    newest: Sequence[tuple[str, int, str]]


def matrix(results: Results, last: int | None = None) -> Matrix:
    """The overview of the last so many dates, or of all."""
    by_row: dict[tuple[str, str], dict[str, list[NightlyRun]]] = {}
    for run in results.runs:
        by_row.setdefault((run.case, run.machine), {}).setdefault(run.at[:10], []).append(run)
    dates = sorted({run.at[:10] for run in results.runs}, reverse=True)[:last]
    rows = [
        Row(case, page_name(case), machine, [_cell(results, by_date.get(date, ())) for date in dates])
        for (case, machine), by_date in sorted(by_row.items())
    ]
    counts = Counter(cell.status for row in rows for cell in row.cells)
    months = [(month, len(list(days))) for month, days in groupby(dates, key=lambda date: date[:7])]
    order = (*_ORDER, "no run")
    newest = [summary for status in order if (summary := _newest(status, [row.cells[0] for row in rows if dates]))]
    return Matrix(dates, months, rows, {status: counts[status] for status in order}, newest)


def _newest(status: str, cells: Sequence[Cell]) -> tuple[str, int, str] | None:
    matching = [cell for cell in cells if cell.status == status]
    since = Counter(cell.since for cell in matching if cell.since)
    return (status, len(matching), ", ".join(f"{n} {word} since" for word, n in since.items())) if matching else None


_ORDER = ("changed", "flaky", "error", "not judged", "green")
assert set(_ORDER) == set(STATUSES)


def _cell(results: Results, runs: Sequence[NightlyRun]) -> Cell:
    """Of several on a date, the worst; of equally bad ones the last."""
    if not runs:
        return Cell("no run")
    status = worst([run.status for run in runs])
    run = [run for run in runs if run.status == status][-1]
    page = results.page_of(run)
    href = f"comparisons/{page}.html" if page else f"cases/{page_name(run.case)}.html#n-{nightly_key(run)}"
    reason = next((check.text for check in run.checks if check.status == status and status != "green"), "")
    last = runs[-1]
    since = last.status if last.status != status else ""
    then = f"; the last, {_minute(last)}, {last.status}" if since else ""
    more = f" (the worst of {len(runs)} that day{then})" if len(runs) > 1 else ""
    text = f"{run.at[:10]} {_minute(run)} {status}{more}{': ' if reason else ''}{reason[:160]}"
    return Cell(status, href, text, since)


def _minute(run: NightlyRun) -> str:
    return f"{when(run.at):%H:%M} UTC"
