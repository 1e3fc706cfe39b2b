"""The report of a night over some cases: for a terminal, as Markdown and as a page, and as notes in GitHub's log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import click

from repro.nightly.records import STATUSES, NightlyRun, Status, worst
from repro.report.mismatch import HEAD, mismatch_rows, mismatch_text, mismatch_title
from repro.report.pieces import clean, written
from repro.text import count, utc
from repro_bisect.axes.axis import short

__all__ = ["COLOURS", "MARKS", "annotate", "culprit_lines", "headline", "nightly_text", "write_report"]

COLOURS: Mapping[Status, str] = {
    "green": "green", "not judged": "bright_black", "flaky": "magenta", "changed": "red", "error": "yellow",
}  # fmt: skip
"""For terminals. A colour never stands without its word."""

MARKS: Mapping[Status, str] = {"green": "🟢", "not judged": "⚪", "flaky": "🟣", "changed": "🔴", "error": "⚠️"}
"""For Markdown and pages, likewise."""

_LEVELS: Mapping[Status, Literal["error", "warning"]] = {
    "not judged": "warning", "flaky": "warning", "changed": "error", "error": "error",
}  # fmt: skip
_WIDTH = max(map(len, STATUSES))


def headline(runs: Sequence[NightlyRun]) -> str:
    """The verdict in one line, the worst first."""
    counts = Counter(run.status for run in runs)
    parts = [f"{counts[status]} {status}" for status in reversed(STATUSES) if counts[status]]
    return f"{count(len(runs), 'case')}: {', '.join(parts)}"


def culprit_lines(run: NightlyRun) -> list[str]:
    """Who changed the numbers, where and why; or what came of the search. Clean text."""
    lines = []
    for culprit in run.culprits:
        commit, at = culprit["commit"], culprit["divergence"]
        lines.append(f"{short(commit['commit'])} {commit['subject']} ({commit['author']}, {utc(commit['date'])})")
        if at:
            lines.append(f"  first at step {at['step']}, phase {at['phase']}, signal {at['signal']}: {at['detail']}")
        if same := (culprit.get("comparison") or {}).get("untouched"):
            lines.append(f"  {same}")
        if why := culprit["explanation"]:
            lines.append(f"  why: {why['text']}")
        elif culprit["unexplained"]:
            lines.append(f"  not explained: {culprit['unexplained']}")
        if culprit["environment"]:
            lines.append(f"  its environment changed, which may be the cause: {'; '.join(culprit['environment'])}")
    if run.bisect:
        lines += [f"bisected {run.bisect['range']}: {text}" for text in run.search]
    return [line[: len(line) - len(line.lstrip())] + clean(line) for line in lines]


def _mismatch(run: NightlyRun) -> Mapping[str, Any] | None:
    """The train/rollout mismatch of the baseline and of tonight; None where all is equal or nothing was compared."""
    mismatch: Mapping[str, Any] | None = (run.compared or {}).get("mismatch")
    return mismatch


def looked_line(run: NightlyRun) -> str:
    """By what the night was judged; empty where it does not say it. Clean text."""
    return clean(f"looked at {run.looked}") if run.looked else ""


def _fix(run: NightlyRun) -> str:
    """What to do about numbers that changed on purpose."""
    if not any(check.status == "changed" and check.name in ("baseline", "metrics") for check in run.checks):
        return ""
    return f"if that is meant: repro golden approve {run.case} --reason ..., then commit golden/runs"


def _styled(status: Status, text: str, *, colour: bool) -> str:
    return click.style(text, fg=COLOURS[status]) if colour else text


def nightly_text(runs: Sequence[NightlyRun], files: Sequence[Path], *, colour: bool = False) -> str:
    """The result for a terminal.

    Args:
        runs: One for each case.
        files: Where each was written.
        colour: Whether the terminal shows colours.
    """
    total = worst([run.status for run in runs])
    lines = [_styled(total, headline(runs), colour=colour)]
    for run, path in zip(runs, files, strict=True):
        title = f"{run.case} at {short(run.commit['commit'])}: {run.status}"
        lines += ["", _styled(run.status, clean(title), colour=colour)]
        for check in run.checks:
            word = _styled(check.status, f"{check.status:{_WIDTH}}", colour=colour)
            lines.append(f"  {word}  {clean(check.name)}: {clean(check.text)}")
        lines += [f"  {looked}"] if (looked := looked_line(run)) else []
        lines += [f"  {line}" for line in culprit_lines(run)]
        lines += [f"  {row}" for row in mismatch_text(_mismatch(run)).splitlines()]
        lines += [f"  {fix}"] if (fix := _fix(run)) else []
        lines.append(f"  result: {clean(str(path))}")
    return "\n".join(lines)


def annotate(runs: Sequence[NightlyRun]) -> None:
    """A note in the log of GitHub's runner for every case that is not green; nothing elsewhere."""
    from repro.pulls.github import annotation

    for run in runs:
        if run.status == "green":
            continue
        texts = [f"{check.name}: {check.text}" for check in run.checks if check.status == run.status]
        # without its own baseline check a night is not judged although nothing says so
        text = "; ".join([*texts, *(line.strip() for line in culprit_lines(run))]) or "nothing to compare with"
        annotation(_LEVELS[run.status], f"{run.case}: {run.status}", clean(text))


def _context(runs: Sequence[NightlyRun], files: Sequence[Path], command: str) -> dict[str, Any]:
    cases = [
        {
            "night": run,
            "mark": MARKS[run.status],
            "kind": run.status.replace(" ", "-"),
            "commit": short(str(run.commit["commit"])),
            "subject": clean(str(run.commit["subject"])),
            "checks": [
                {
                    "mark": MARKS[check.status],
                    "kind": check.status.replace(" ", "-"),
                    "status": check.status,
                    "name": clean(check.name),
                    "text": clean(check.text),
                }
                for check in run.checks
            ],
            "looked": looked_line(run),
            "mismatch": mismatch_rows(mismatch) if (mismatch := _mismatch(run)) else [],
            "of": mismatch_title(mismatch) if mismatch else "",
            "culprits": "\n".join(culprit_lines(run)),
            "search": (run.bisect or {}).get("reproduce", ""),
            "cure": _fix(run),
            "at": utc(run.at),
            "file": str(path),
        }
        for run, path in zip(runs, files, strict=True)
    ]
    total = worst([run.status for run in runs])
    return {
        "headline": headline(runs),
        "mark": MARKS[total],
        "cases": cases,
        "seconds": round(sum(run.seconds for run in runs)),
        "command": command,
        "gap_head": HEAD,
    }


def write_report(runs: Sequence[NightlyRun], files: Sequence[Path], folder: Path, command: str) -> Iterator[Path]:
    """Write ``report.md`` and ``report.html`` (self-contained): each path once it is there."""
    return written("nightly", folder, lambda _: _context(runs, files, command))
