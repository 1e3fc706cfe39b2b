"""The report on a pull request: as words for a terminal, as a comment, a page, JSON and JUnit's XML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from repro import __version__
from repro.pulls.blocks import blocks_of, foot
from repro.pulls.comment import comment
from repro.pulls.junit import junit
from repro.pulls.pair import PairResult
from repro.pulls.result import WORDS, PullReport, summary, verdict_line
from repro.report.pages import templates
from repro.report.pieces import Line, clean, code, plain, said
from repro.text import table, utc
from repro_bisect.axes.axis import short
from repro_golden.base.canonical import write_atomic

__all__ = ["FILES", "page", "pull_text", "write_report"]

FILES = ("comment.md", "report.html", "report.json", "junit.xml")
_SHOWN = 10
"""Lines of notes, and rows of a table without a worst step, that a terminal shows."""
_PLOTS = 3
"""Culprits whose drift is drawn."""


def pull_text(report: PullReport) -> str:
    """What was found, for a terminal: the answers first, then where numbers moved most."""
    several = len(report.entries) > 1
    lines = [summary(report.entries), ""] if several else []
    lines += [f"{clean(entry.case)}: {plain(verdict_line(entry))}" for entry in report.entries]
    for result in report.results:
        shown = _text_of(result)
        lines += ["", *([f"{clean(result.case)}:"] if several and shown else []), *shown]
    return "\n".join(lines)


def _text_of(result: PairResult) -> list[str]:
    """A case's tables: of metrics the rows of the worst step, since a terminal is narrow."""
    lines: list[str] = []
    for block in blocks_of(result):
        lines += [""] if lines and block.rows and not lines[-1].startswith("First") else []
        if block.fold and block.title != "Metrics":
            lines.append(f"{block.title}: see the report")
            continue
        lines += [plain(line) for line in block.lines[:_SHOWN] if block.title != "Metrics"]
        rows = [[plain(cell) for cell in row] for row in block.rows]
        if block.title == "Metrics":
            rows = [row for row in rows if "worst" in row[1]]
        if rows:
            lines += [table(block.head, rows[:_SHOWN] if block.title == "Culprits" else rows)]
        lines += [plain(line) for line in block.below]
    return lines


def page(report: PullReport) -> str:
    """The report as a page that needs nothing beside itself."""
    ends: dict[str, tuple[str, Any]] = {}
    for result in report.results:
        ends |= {f"{name} {p.commit}": (name, p) for name, p in (("BASE", result.base), ("HEAD", result.head))}
    context = {
        "report": report,
        "title": summary(report.entries) if len(report.entries) != 1 else _title(report),
        "verdicts": [(entry.verdict, _named(report, n), verdict_line(entry)) for n, entry in enumerate(report.entries)],
        "sections": [_section(result) for result in report.results],
        "ends": ends.values(),
        "utc": utc,
        "clean": clean,
        "at": report.at.replace("T", " ").replace("Z", " UTC"),
        "version": __version__,
    }
    return templates().get_template("pull.html.jinja").render(**context)


def _section(result: PairResult) -> dict[str, Any]:
    return {
        "result": result,
        "word": WORDS[result.verdict],
        "blocks": blocks_of(result),
        "foot": foot(result),
        "plots": _plots(result),
    }


def _title(report: PullReport) -> str:
    entry = report.entries[0]
    return f"{clean(entry.case)}: {plain(verdict_line(entry))}"


def _named(report: PullReport, n: int) -> Line:
    return code(report.entries[n].case), said(": ")


def _plots(result: PairResult) -> list[tuple[str, str]]:
    """Each plot with its title; what there is no data for is left out."""
    from repro.report.picture_plots import heat_map, token_scatter, ulp_plot
    from repro.report.plots import distance_plot

    found: list[tuple[str, str]] = []
    for culprit in result.culprits[:_PLOTS]:
        if culprit.comparison:
            title = (
                f"What {short(culprit.commit.commit)} moved, against its parent: |after - before|; KL and gaps in nats"
            )
            found.append((title, distance_plot(culprit.comparison)))
    if result.compared and (picture := result.compared.picture):
        found.append(("Where signals differ, and how far", heat_map(picture)))
        of = picture.of
        whole = "" if of.get("exact") else ", a sample of it"
        where = f"{of.get('phase')} {of.get('signal')} at step {of.get('step')}{whole}" if of else ""
        found.append((f"How far the elements of {clean(where)} are apart", ulp_plot(picture)))
        if tokens := picture.tokens:
            title = f"Log-probs of the same tokens at step {tokens.step}: {len(tokens.pairs)} of {tokens.total} tokens"
            found.append((title, token_scatter(tokens)))
    return [(title, svg) for title, svg in found if svg]


def write_report(report: PullReport, folder: Path, key: str = "default") -> list[Path]:
    """Write ``comment.md``, ``report.html``, ``report.json`` and ``junit.xml`` and return their paths.

    Args:
        report: What was found.
        folder: Where to.
        key: See `pull_comment.comment`.
    """
    data = json.dumps(report.to_mapping(), indent=1, sort_keys=True, allow_nan=False) + "\n"
    texts = (comment(report, key), page(report), data, junit(report))
    paths = [folder / name for name in FILES]
    for path, text in zip(paths, texts, strict=True):
        write_atomic(path, text)
    return paths
