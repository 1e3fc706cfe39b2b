"""The report of a night over some cases: for a terminal, as Markdown and as a page, and as notes in GitHub's log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import click

from repro.nightly.records import STATUSES, Night, Status, worst
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


def headline(nights: Sequence[Night]) -> str:
    """The verdict in one line, the worst first."""
    counts = Counter(night.status for night in nights)
    parts = [f"{counts[status]} {status}" for status in reversed(STATUSES) if counts[status]]
    return f"{count(len(nights), 'case')}: {', '.join(parts)}"


def culprit_lines(night: Night) -> list[str]:
    """Who changed the numbers, where and why; or what came of the search. Clean text."""
    lines = []
    for culprit in night.culprits:
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
    if night.bisect and night.bisect.get("why"):
        lines.append(f"bisected {night.bisect['range']}: {night.bisect['why']}")
    return [line[: len(line) - len(line.lstrip())] + clean(line) for line in lines]


def _mismatch(night: Night) -> Mapping[str, Any] | None:
    """The train/rollout mismatch of the baseline and of tonight; None where all is equal or nothing was compared."""
    mismatch: Mapping[str, Any] | None = (night.compared or {}).get("mismatch")
    return mismatch


def looked_line(night: Night) -> str:
    """By what the night was judged; empty where it does not say it. Clean text."""
    return clean(f"looked at {night.looked}") if night.looked else ""


def _fix(night: Night) -> str:
    """What to do about numbers that changed on purpose."""
    if not any(check.status == "changed" and check.name in ("baseline", "metrics") for check in night.checks):
        return ""
    return f"if that is meant: repro golden approve {night.case} --reason ..., then commit golden/runs"


def _styled(status: Status, text: str, *, colour: bool) -> str:
    return click.style(text, fg=COLOURS[status]) if colour else text


def nightly_text(nights: Sequence[Night], files: Sequence[Path], *, colour: bool = False) -> str:
    """The result for a terminal.

    Args:
        nights: One for each case.
        files: Where each was written.
        colour: Whether the terminal shows colours.
    """
    total = worst([night.status for night in nights])
    lines = [_styled(total, headline(nights), colour=colour)]
    for night, path in zip(nights, files, strict=True):
        title = f"{night.case} at {short(night.commit['commit'])}: {night.status}"
        lines += ["", _styled(night.status, clean(title), colour=colour)]
        for check in night.checks:
            word = _styled(check.status, f"{check.status:{_WIDTH}}", colour=colour)
            lines.append(f"  {word}  {clean(check.name)}: {clean(check.text)}")
        lines += [f"  {looked}"] if (looked := looked_line(night)) else []
        lines += [f"  {line}" for line in culprit_lines(night)]
        lines += [f"  {row}" for row in mismatch_text(_mismatch(night)).splitlines()]
        lines += [f"  {fix}"] if (fix := _fix(night)) else []
        lines.append(f"  result: {clean(str(path))}")
    return "\n".join(lines)


def annotate(nights: Sequence[Night]) -> None:
    """A note in the log of GitHub's runner for every case that is not green; nothing elsewhere."""
    from repro.pulls.github import annotation

    for night in nights:
        if night.status == "green":
            continue
        texts = [f"{check.name}: {check.text}" for check in night.checks if check.status == night.status]
        # without its own baseline check a night is not judged although nothing says so
        text = "; ".join([*texts, *(line.strip() for line in culprit_lines(night))]) or "nothing to compare with"
        annotation(_LEVELS[night.status], f"{night.case}: {night.status}", clean(text))


def _context(nights: Sequence[Night], files: Sequence[Path], command: str) -> dict[str, Any]:
    cases = [
        {
            "night": night,
            "mark": MARKS[night.status],
            "kind": night.status.replace(" ", "-"),
            "commit": short(str(night.commit["commit"])),
            "subject": clean(str(night.commit["subject"])),
            "checks": [
                {
                    "mark": MARKS[check.status],
                    "kind": check.status.replace(" ", "-"),
                    "status": check.status,
                    "name": clean(check.name),
                    "text": clean(check.text),
                }
                for check in night.checks
            ],
            "looked": looked_line(night),
            "mismatch": mismatch_rows(mismatch) if (mismatch := _mismatch(night)) else [],
            "of": mismatch_title(mismatch) if mismatch else "",
            "culprits": "\n".join(culprit_lines(night)),
            "search": (night.bisect or {}).get("reproduce", ""),
            "cure": _fix(night),
            "at": utc(night.at),
            "file": str(path),
        }
        for night, path in zip(nights, files, strict=True)
    ]
    total = worst([night.status for night in nights])
    return {
        "headline": headline(nights),
        "mark": MARKS[total],
        "cases": cases,
        "seconds": round(sum(night.seconds for night in nights)),
        "command": command,
        "gap_head": HEAD,
    }


def write_report(nights: Sequence[Night], files: Sequence[Path], folder: Path, command: str) -> Iterator[Path]:
    """Write ``report.md`` and ``report.html`` (self-contained): each path once it is there."""
    return written("nightly", folder, lambda _: _context(nights, files, command))
