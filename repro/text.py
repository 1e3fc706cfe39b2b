"""Comparisons in words and tables, for terminals and Markdown alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from fractions import Fraction

from repro_bisect.driver.drift import Gap, kl_places, moved_metrics
from repro_golden.base.canonical import same_float
from repro_golden.base.clean import one_line
from repro_golden.compare.traces import NO_AGREEMENT, Comparison, on_purpose

__all__ = [
    "METRICS_HEAD",
    "NO_METRIC",
    "agreeing",
    "as_float",
    "both",
    "comparison_text",
    "count",
    "duration",
    "metrics_rows",
    "metrics_table",
    "number",
    "percent",
    "plural",
    "sides",
    "table",
    "utc",
    "value",
]


def number(value: float | None, digits: int = 7) -> str:
    """A number to so many significant digits, or a dash for an absent value."""
    return "-" if value is None else f"{value:.{digits}g}"


def as_float(number: float | Fraction) -> float:
    """The nearest float, of an integer too; infinity where none is near."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def value(number: float | None, digits: int = 7, absent: str = "absent") -> str:
    """A number as it is shown: what is none, or absent, as a word."""
    if number is None:
        return absent
    return "NaN" if math.isnan(number) else f"{number:.{digits}g}"


def both(a: float | None, b: float | None, show: Callable[[float | None, int], str] = number) -> tuple[str, str]:
    """Two sides of seven digits each, and of all where other bits would look equal in these."""
    texts = show(a, 7), show(b, 7)
    return texts if texts[0] != texts[1] or same_float(a, b) else (show(a, 17), show(b, 17))


def sides(a: float | None, b: float | None, show: Callable[[float | None, int], str] = number) -> str:
    """``2.5 -> 5``: see `both`."""
    return " -> ".join(both(a, b, show))


def percent(share: float, digits: int) -> str:
    """A share in percent with its sign, whole where it is large: ``+0.25``, ``+150``."""
    text = f"{100 * share:+.{digits}g}"
    return f"{100 * share:+.0f}" if "e+" in text else text


def relative(change: Gap) -> str:
    """The difference b - a, and that relative to |a|; as a factor from tenfold on, and left out where a is 0."""
    if change.a is None or change.b is None:
        return "-"
    gap = change.b - change.a
    if gap == 0 and not change.same:
        return "the sign of zero"
    if not change.a or not math.isfinite(gap):
        return f"{gap:+.3g}"
    share = gap / abs(change.a)
    return f"{gap:+.3g} ({percent(share, 2)}%)" if abs(share) < 10 else f"{gap:+.3g} (x{change.b / change.a:.3g})"


def count(number: int, word: str) -> str:
    """``1 probe``, ``2 probes``, ``2 sets of changes``."""
    return f"{number} {word}" if number == 1 else f"{number} {plural(word)}"


def plural(word: str) -> str:
    """``probes``, ``sets of changes``."""
    first, of, rest = word.partition(" of ")
    return f"{first}s{of}{rest}"


def duration(seconds: float) -> str:
    """``8 s``, ``3 min``, ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    hours, minutes = divmod(round(whole / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def utc(date: str) -> str:
    """A commit's date in UTC; as it is where it is none."""
    try:
        return datetime.fromisoformat(date).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    except ValueError:
        return date


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that is aligned in plain text too. Bars inside cells are escaped."""
    cells = [[one_line(c).replace("|", "\\|") for c in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


NO_METRIC = "no metric was recorded"
METRICS_HEAD = ("metric", "first step", "there", "worst step", "difference there", "at the last step")


def metrics_rows(comparison: Comparison) -> list[list[str]]:
    """One row for each metric that moved and for KL between the two policies, with the columns of `METRICS_HEAD`."""
    rows = []
    for name, moved in moved_metrics(comparison.metrics).items():
        if (first := moved.first) is not None:
            there, worst = sides(first.a, first.b), moved.worst
            rows.append([name, str(first.step), there, str(worst.step), relative(worst), relative(moved.last)])
    for name, places in kl_places(comparison.kl).items():
        if "first" in places:
            (begin, at_first), (step, most), (_, last) = (places[place] for place in ("first", "worst", "last"))
            rows.append([f"KL {name}", str(begin), f"0 -> {at_first:.3g}", str(step), f"{most:.3g}", f"{last:.3g}"])
    return rows


def metrics_table(comparison: Comparison, shown: Callable[[str], str] = str) -> str:
    """`metrics_rows` as a table; `shown` makes its cells what the medium asks for."""
    rows = [[shown(cell) for cell in row] for row in metrics_rows(comparison)]
    if rows:
        return table(METRICS_HEAD, rows)
    return "no metric moved in the compared steps" if comparison.looked.logged else NO_METRIC


def agreeing(steps: int) -> str:
    """``the 3 steps that both made agree``."""
    return f"the {count(steps, 'step')} that both made agree{'s' if steps == 1 else ''}"


def comparison_text(comparison: Comparison) -> str:
    """What a comparison found, for people."""
    renamed = f"; {one_line(str(comparison.renames))}" if comparison.renames else ""
    d = comparison.divergence
    looked = f"looked at {one_line(str(comparison.looked))}"
    unlogged = "" if comparison.looked.logged else f"\n{NO_METRIC}"
    if d is None and comparison.ended:
        return f"differs: {comparison.ended}; {agreeing(comparison.steps)}{renamed}\n{looked}{unlogged}"
    if d is None:
        word, bad = "agrees: ", ""
        if comparison.nonfinite:
            first = f"{one_line(str(comparison.nonfinite))}{on_purpose(comparison.nonfinite)}"
            # what is said to differ behind it, such as numbers in lines of text, is not first said not to
            agreement = NO_AGREEMENT.rpartition(", but ")[2] if comparison.looked.but else NO_AGREEMENT
            word = "differs: finite in the baseline, and not in the run; " if comparison.brought else f"{agreement}: "
            bad = f"\nnot finite: first {first}"
        compared = f"{count(comparison.steps, 'step')} compared{comparison.looked.but}"
        return f"{word}{compared}{renamed}\n{looked}{unlogged}{bad}"
    counts = ", ".join(f"{n} in {phase}" for phase, n in d.differing.items())
    lines = [f"differs at step {d.step}, phase {d.phase}, signal {one_line(d.name)}: {one_line(d.detail)}"]
    if d.magnitude is not None:
        lines.append(f"size: {d.magnitude}")
    if counts:
        lines.append(f"signals that differ in that step: {counts}")
    if comparison.untouched:
        lines.append(f"{comparison.untouched}")
    lines += [
        text for text in (comparison.ended, one_line(str(comparison.renames)) if comparison.renames else "") if text
    ]
    return "\n".join([*lines, looked, "", metrics_table(comparison)])
