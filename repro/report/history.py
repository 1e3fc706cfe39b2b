"""The report of a history: one table of what changed the numbers, for a terminal, as Markdown and as a page."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from repro.report.pieces import Markdown, cut, endpoint_rows, report_text, written
from repro.report.skips import cost_text, skip_lines, skipped
from repro.text import NO_METRIC, count, plural, table
from repro_bisect.axes.axis import short
from repro_bisect.driver.drift import Drift, HistoryResult, Moved, Row
from repro_golden.base.canonical import write_atomic
from repro_golden.base.clean import one_line
from repro_golden.compare.traces import Divergence

__all__ = ["METRICS", "headline", "history_table", "history_text", "write_report"]

METRICS = {"grad_norm": "grad_norm", "loss": "loss", "logp gap": "train_rollout_logprob_abs_diff"}
"""Columns of metrics, with the names that they go by in traces."""
HEAD = ("commit", "date", "subject", "step", "phase", "signal", "size", "grad_norm", "loss", "KL k3", "logp gap")
LEFT = 6
"""The first so many columns are words; numbers follow, to the right."""
WIDTH = 120
_SHOWN = 10
"""Points of a group that a terminal shows; the report shows all."""
_LARGE = 100_000
_NEAR = 1e-3
_SIGN = "sign of 0"


def headline(result: HistoryResult) -> str:
    """What was found, in one line: at least so much, where not every point was run or not every change is named."""
    groups, what = result.of_kind("group"), result.what
    changed = len(result.of_kind("change", "group"))  # of a group one or more did
    whole = f"{count(result.points, what)} of {short(result.good)}..{short(result.bad)}"
    more = []
    if groups:
        more.append(f"{count(len(groups), 'group')} of {plural(what)} cannot be told apart")
    if flaky := result.of_kind("flaky"):
        more.append(f"{len(flaky)} FLAKY")
    tail = f" ({', '.join(more)})" if more else ""
    unrun = not result.every and changed < result.points
    tail += "; none was run between equal numbers" if unrun else ""
    unsure = unrun or result.skips or not result.verifiable
    if changed or more:
        return f"{'at least ' if unsure else ''}{changed} of {whole} changed the numbers of {result.case}{tail}"
    return f"none of {whole} {'is known to have ' if unsure else ''}changed the numbers of {result.case}{tail}"


def notes(result: HistoryResult) -> list[str]:
    """What a reader must know to read the table."""
    lines = []
    if any(row.against_previous for row in result.rows):
        lines.append(
            f"Each {result.what} against the one before it, then against GOOD, at the step where that metric differs "
            "most, with its sign: grad_norm and loss relative (Δ: absolute, where the first is 0), KL and the "
            "train/rollout log-prob gap in nats. >= is what samples of a tensor show."
        )
    beside = [(row, row.against_previous.untouched) for row in result.rows if row.against_previous]
    lines += [f"{short(row.commit.commit)}: {same}." for row, same in beside if same]
    if not result.looked.logged:
        lines.append(f"{NO_METRIC.capitalize()}.")
    lines += [f"{remark}." for remark in result.remarks]
    if result.noise:
        lines.append(f"{result.noise}.")
    if result.ended:
        lines.append(f"{result.ended}: only the {count(result.steps, 'step')} that both make are compared.")
    lines += [f"{short(r.before)}..{short(r.after)}: {r.renames}; no number changed." for r in result.renames]
    if result.of_kind("merge"):
        lines.append("A [merge] joins sides that had both changed the numbers; it is no change of its own.")
    if not result.every:
        equal = f"GOOD and BAD agree bit for bit{result.looked.but}. " if result.agree else ""
        lines.append(f"{equal}What changed and changed back between two tested commits is found by `--every` alone.")
    return lines


def _fit(text: str, column: str, width: int) -> str:
    """A cell as wide as its column: words to the left, numbers to the right."""
    if column == "subject" and len(text) > width:
        return f"{text[: width - 1]}…"
    return cut(text, width).ljust(width) if HEAD.index(column) < LEFT else text.rjust(width)


def extent(divergence: Divergence | None) -> str:
    """The largest distance in representable values, of a metric its ratio; what else differs where it has none."""
    if divergence is None:
        return "0"
    size = divergence.magnitude
    if size is None:
        return divergence.kind
    if size.nonfinite:
        return "NaN/inf"
    if size.numbers:
        return _ratio(*size.numbers)
    if size.only_sign_of_zero and size.exact:
        return _SIGN
    if size.max_ulp is None:
        return "?"
    ulp = str(size.max_ulp) if size.max_ulp < _LARGE else f"{size.max_ulp:.1e}"
    return f"{ulp} ULP" if size.exact else f">={ulp} ULP"


def _ratio(a: float, b: float) -> str:
    """By how much a number grew; the difference where it was 0, or so near that the ratio would look like 1."""
    if a == b:
        return _SIGN
    return f"x{b / a:.4g}" if a and abs(b - a) >= _NEAR * abs(a) else f"Δ{b - a:+.1e}"


def signed(moved: Moved | None, *, relative: bool = True) -> str:
    """The change of a metric at its worst step, relative to what it was or in its own unit."""
    if moved is None:
        return "-"
    gap, value = moved.worst, moved.worst.relative
    if gap.a is None or gap.b is None or value is None:
        return "gone" if gap.b is None else "new"
    if value == 0:
        return "0" if gap.same else _SIGN
    if math.isnan(value):
        return "NaN"
    if relative and gap.a != 0:
        return f"{value:+.1e}"
    return f"{'Δ' if relative else ''}{gap.b - gap.a:+.1e}"


def kl(drift: Drift) -> str:
    """The farthest KL of any step by k3."""
    if "k3" not in drift.kl:
        return "-"
    value = drift.kl["k3"]["worst"][1]
    return "0" if value == 0 else "NaN" if math.isnan(value) else f"{value:.1e}"


def sizes(drift: Drift | None) -> list[str]:
    """The columns from step on."""
    if drift is None:
        return ["-"] * (len(HEAD) - 3)
    d = drift.divergence
    where = [str(d.step), d.phase, d.name] if d else ["-", "-", "(equal)"]
    grad_norm, loss, gap = (drift.metric(name) for name in METRICS.values())
    return [*where, extent(d), signed(grad_norm), signed(loss), kl(drift), signed(gap, relative=False)]


def subject(row: Row) -> str:
    """A row's subject, with what it is where it is no plain change."""
    marks = {"merge": "[merge] ", "flaky": "[FLAKY] ", "group": f"[one of {len(row.points)}] "}
    return marks.get(row.kind, "") + row.commit.subject


def cells(result: HistoryResult) -> list[list[str]]:
    """Two lines for each row: against the one before it, and against GOOD where that is another one."""
    lines = []
    for row in result.rows:
        first = [short(row.commit.commit), row.commit.date[:10], subject(row), *sizes(row.against_previous)]
        lines.append([one_line(cell) for cell in first])
        if row.cumulative and row.cumulative != row.against_previous:
            lines.append(["", "", "since GOOD", *map(one_line, sizes(row.cumulative))])
    return lines


def history_table(result: HistoryResult) -> str:
    """The table for a terminal, no wider than it may be: columns without a value are left out, long names are cut."""
    rows = cells(result)
    if not rows:
        return ""
    columns = [i for i in range(len(HEAD)) if i < LEFT or any(row[i] not in ("-", "") for row in rows)]
    columns = [i for i in columns if i != 1 or any(row[1] for row in rows)]  # another axis has no dates
    lines = [[line[i] for i in columns] for line in ([*HEAD], *rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(columns))]
    names = [HEAD[i] for i in columns]
    for name, least in (("signal", 14), ("subject", 12), ("signal", 8)):  # each as far as it goes
        over = max(0, sum(widths) + 2 * (len(widths) - 1) - WIDTH)
        n = names.index(name)
        widths[n] = max(min(least, widths[n]), widths[n] - over)
    text_lines = []
    for line in lines:
        parts = [_fit(cell, name, w) for cell, name, w in zip(line, names, widths, strict=True)]
        text_lines.append("  ".join(parts).rstrip())
    return "\n".join(text_lines)


def listed(result: HistoryResult, most: int | None = None) -> list[str]:
    """What a line of the table has no room for: members of groups, why flaky ones are, changed environments."""
    lines = []
    for row in result.rows:
        name = short(row.commit.commit)
        if row.kind == "flaky":
            lines.append(f"FLAKY {name}: {row.detail}")
        if row.kind == "group":
            lines.append(f"{name}: the change is in one or more of these, which cannot be told apart:")
            lines += [
                f"  {short(p)} {result.subjects.get(p, '')}{'  (not tried)' if p in row.untried else ''}".rstrip()
                for p in row.points[:most]
            ]
            lines += [f"  and {len(row.points) - most} more"] if most and len(row.points) > most else []
        if row.environment:
            lines.append(
                f"{name}: its environment changed, which may be the cause: {'; '.join(row.environment[:most])}"
            )
    return [one_line(line) for line in lines]


def cost_line(result: HistoryResult) -> str:
    """What it took."""
    return cost_text(result, count(result.points, result.what), result.what)


def looked_line(result: HistoryResult) -> str:
    """By what the commits were judged."""
    return one_line(f"looked at {result.looked}")


def history_text(result: HistoryResult) -> str:
    """The result for a terminal."""
    wrapped_notes = [textwrap.fill(note, WIDTH) for note in notes(result)]
    more = [textwrap.fill(line, WIDTH, subsequent_indent="    ") for line in listed(result, _SHOWN)]
    blocks = [[headline(result)], [history_table(result)], more, wrapped_notes]
    skips = skip_lines(skipped(result.skips, result.what))
    blocks += [[*skips, *(textwrap.fill(line, WIDTH) for line in (looked_line(result), cost_line(result)))]]
    return "\n\n".join("\n".join(block) for block in blocks if any(block))


def _context(result: HistoryResult, command: str) -> dict[str, Any]:
    return {
        "result": result,
        "headline": headline(result),
        "ends": endpoint_rows(result.ends),
        "head": HEAD,
        "rows": cells(result),
        "table": Markdown(table(HEAD, [[report_text(c) for c in row] for row in cells(result)])) if result.rows else "",
        "listed": listed(result),
        "notes": notes(result),
        "skipped": skipped(result.skips, result.what),
        "looked": looked_line(result),
        "cost": cost_line(result),
        "command": command,
    }


def write_report(result: HistoryResult, folder: Path, command: str) -> Iterator[Path]:
    """Write ``report.md``, ``report.html`` (self-contained) and, where something drifted, ``drift.svg``.

    Yields:
        Each path once it is there.
    """
    from repro.report.plots import history_plot

    plot = cache(lambda: history_plot(result))
    yield from written("history", folder, lambda page: _context(result, command) | ({"plot": plot()} if page else {}))
    if plot():
        yield write_atomic(folder / "drift.svg", plot())
