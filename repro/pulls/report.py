"""The report on a pull request: as words for a terminal, as a comment, a page, JSON and JUnit's XML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from repro import __version__
from repro.pulls.blocks import blocks_of, foot
from repro.pulls.comment import comment
from repro.pulls.metrics import LEFT
from repro.pulls.pair import PairResult
from repro.pulls.result import WORDS, Entry, Failed, PullReport, judging, moved_bounds, summary, verdict_line
from repro.report.pieces import clean, code, plain, said, templates
from repro.text import table, utc
from repro_bisect.axes.axis import short
from repro_golden.base.canonical import write_atomic
from repro_golden.base.clean import one_line

__all__ = ["FILES", "junit", "page", "pull_text", "write_report"]


# -- the report on two commits as JUnit's XML, which every CI shows as tests


def junit(report: PullReport) -> str:
    """One suite for each case: ``bits``, or ``bounds: METRIC`` for each bound that the case sets."""
    root = ElementTree.Element("testsuites", name="repro report pr")
    for entry in report.entries:
        _suite(root, entry, report.at)
    for name in ("tests", "failures", "errors", "skipped"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _suite(root: ElementTree.Element, entry: Entry, at: str) -> None:
    result = entry if isinstance(entry, PairResult) else None
    seconds = f"{result.seconds:.3f}" if result else "0"
    suite = ElementTree.SubElement(
        root, "testsuite", name=one_line(entry.case), timestamp=one_line(result.at if result else at), time=seconds
    )
    line = one_line(plain(verdict_line(entry)))
    names = [f"bounds: {name}" for name in result.bounds] if result else []
    left = _left(entry)
    counts = {"failure": 0, "error": 0, "skipped": 0}
    for n, name in enumerate(names or ["bits"]):
        time = seconds if n == 0 else "0"  # one replay judged them all
        test = ElementTree.SubElement(
            suite, "testcase", classname=one_line(f"repro.{entry.case}"), name=one_line(name), time=time
        )
        if outcome := _outcome(entry, left, name.removeprefix("bounds: ") if names else None):
            counts[outcome] += 1
            child = ElementTree.SubElement(test, outcome, message=line)
            if outcome != "skipped":
                child.set("type", entry.verdict)
                child.text = line
    suite.set("tests", str(len(names) or 1))
    suite.set("failures", str(counts["failure"]))
    suite.set("errors", str(counts["error"]))
    suite.set("skipped", str(counts["skipped"]))


def _left(entry: Entry) -> set[str]:
    """The bounds that were left."""
    if isinstance(entry, Failed) or entry.verdict != "moved" or not entry.compared:
        return set()
    judges = judging(entry)
    return {judges.get(name, name) for name in moved_bounds(entry.compared)}


def _outcome(entry: Entry, left: set[str], metric: str | None) -> str:
    """``failure``, ``error`` or ``skipped`` of a bound, or of all bits; empty for what passed."""
    if entry.verdict == "unverifiable":
        return "skipped"
    if isinstance(entry, Failed):
        return "error"
    if entry.agrees:
        return ""
    # without a bound that was left, all of HEAD is at fault: it is noise, or ends early
    ended = entry.compared is not None and bool(entry.compared.drift.ended)
    return "failure" if metric is None or not left or ended or metric in left else ""


# -- the report on a pull request: as words for a terminal, as a comment, a page, JSON and JUnit's XML

FILES = ("comment.md", "report.html", "report.json", "junit.xml")
_SHOWN = 10
"""Lines of notes, and rows of a table without a worst step, that a terminal shows."""
_PLOTS = 3
"""Culprits whose drift is drawn."""


def pull_text(report: PullReport) -> str:
    """What was found, for a terminal: the answers first, then where numbers moved most."""
    several = len(report.entries) > 1
    lines = [summary(report.entries), ""] if several else []
    lines += map(_title, report.entries)
    for result in report.results:
        details = _text_of(result)
        lines += ["", *([f"{clean(result.case)}:"] if several and details else []), *details]
    return "\n".join(lines)


def _text_of(result: PairResult) -> list[str]:
    """A case's tables: of metrics the rows of the worst step, since a terminal is narrow."""
    lines: list[str] = []
    for block in blocks_of(result):
        lines += [""] if lines and block.rows and not lines[-1].startswith("First") else []
        if block.change or (block.fold and block.title != "Metrics"):
            lines.append(f"{block.title}: see the report")
            continue
        lines += [plain(line) for line in block.lines[:_SHOWN] if block.title != "Metrics"]
        rows = [[plain(cell) for cell in row] for row in block.rows]
        if block.title == "Metrics":
            rows = [row for row in rows if "worst" in row[1] or LEFT in row[1]]
        if rows:
            lines += [table(block.head, rows[:_SHOWN] if block.title == "Culprits" else rows)]
        lines += [plain(line) for line in block.below]
    return lines


def page(report: PullReport) -> str:
    """The report as a page that needs nothing beside itself."""
    commits: dict[str, tuple[str, Any]] = {}
    for result in report.results:
        commits |= {f"{name} {p.commit}": (name, p) for name, p in (("BASE", result.base), ("HEAD", result.head))}
    context = {
        "report": report,
        "title": summary(report.entries) if len(report.entries) != 1 else _title(report.entries[0]),
        "verdicts": [(e.verdict, (code(e.case), said(": ")), verdict_line(e)) for e in report.entries],
        "sections": [_section(result) for result in report.results],
        "ends": commits.values(),
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


def _title(entry: Entry) -> str:
    return f"{clean(entry.case)}: {plain(verdict_line(entry))}"


def _plots(result: PairResult) -> list[tuple[str, str]]:
    """Each plot with its title; what there is no data for is left out."""
    from repro.report.plots import distance_plot, heat_map, token_scatter, ulp_plot

    plots: list[tuple[str, str]] = []
    for culprit in result.culprits[:_PLOTS]:
        if culprit.comparison:
            title = (
                f"What {short(culprit.commit.commit)} moved, against its parent: |after - before|; KL and gaps in nats"
            )
            plots.append((title, distance_plot(culprit.comparison)))
    if result.compared and (plot_data := result.compared.plot_data):
        plots.append(("Where signals differ, and how far", heat_map(plot_data)))
        of = plot_data.of
        whole = "" if of.get("exact") else ", a sample of it"
        where = f"{of.get('phase')} {of.get('signal')} at step {of.get('step')}{whole}" if of else ""
        apart = ulp_plot(plot_data.histogram, str(of.get("dtype", "")))
        plots.append((f"How far the elements of {clean(where)} are apart", apart))
        if tokens := plot_data.tokens:
            title = f"Log-probs of the same tokens at step {tokens.step}: {len(tokens.pairs)} of {tokens.total} tokens"
            plots.append((title, token_scatter(tokens)))
    return [(title, svg) for title, svg in plots if svg]


def write_report(report: PullReport, folder: Path, key: str = "default") -> list[Path]:
    """Write ``comment.md``, ``report.html``, ``report.json`` and ``junit.xml`` and return their paths.

    Args:
        report: What was found.
        folder: Where to.
        key: See `comment.comment`.
    """
    data = json.dumps(report.to_mapping(), indent=1, sort_keys=True, allow_nan=False) + "\n"
    texts = (comment(report, key), page(report), data, junit(report))
    paths = [folder / name for name in FILES]
    for path, text in zip(paths, texts, strict=True):
        write_atomic(path, text)
    return paths
