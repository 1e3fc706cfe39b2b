"""The report on two commits as JUnit's XML, which every CI shows as tests."""

from __future__ import annotations

from xml.etree import ElementTree

from repro.pulls.pair import PairResult
from repro.pulls.result import Entry, Failed, PullReport, moved_bounds, verdict_line
from repro.report.pieces import plain
from repro_golden.base.clean import one_line

__all__ = ["junit"]


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
    counts = {"failure": 0, "error": 0, "skipped": 0}
    for n, name in enumerate(names or ["bits"]):
        time = seconds if n == 0 else "0"  # one replay judged them all
        test = ElementTree.SubElement(
            suite, "testcase", classname=one_line(f"repro.{entry.case}"), name=one_line(name), time=time
        )
        if outcome := _outcome(entry, name.removeprefix("bounds: ") if names else None):
            counts[outcome] += 1
            child = ElementTree.SubElement(test, outcome, message=line)
            if outcome != "skipped":
                child.set("type", entry.verdict)
                child.text = line
    suite.set("tests", str(len(names) or 1))
    suite.set("failures", str(counts["failure"]))
    suite.set("errors", str(counts["error"]))
    suite.set("skipped", str(counts["skipped"]))


def _outcome(entry: Entry, metric: str | None) -> str:
    """``failure``, ``error`` or ``skipped``; empty for what passed."""
    if entry.verdict == "unverifiable":
        return "skipped"
    if isinstance(entry, Failed):
        return "error"
    if entry.agrees:
        return ""
    left = moved_bounds(entry.compared) if entry.compared and entry.verdict == "moved" else {}
    # without a bound that was left, all of HEAD is at fault: it is noise, or ends early
    return "" if metric is not None and left and metric not in left else "failure"
