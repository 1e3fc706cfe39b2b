"""The report of a comparison of two layouts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from repro import __version__
from repro.report.pieces import written
from repro.text import count
from repro_bisect.axes.axis import short
from repro_bisect.axes.layouts import LayoutComparison
from repro_bisect.driver.layout_difference import Between, LayoutResult
from repro_golden.base.clean import one_line

__all__ = ["layout_text", "unknown", "write_layout_report"]

_SHOWN = 3


def headline(result: LayoutResult) -> str:
    """The verdict in one line."""
    pair, c = f"{result.a} and {result.b}", result.comparison
    if c is None:
        who = " and ".join(result.flaky)
        return f"{who} does not reproduce itself on {result.case}: nothing is compared"
    if c.parted:
        p = c.parted
        return f"{pair} part on {result.case}: step {p.step}, phase {p.phase}, signal {p.signal}"
    if c.verdict == "equal":
        return f"{pair} agree bit for bit on {result.case}"
    left = unknown(c)
    return f"{pair} {c.within} on {result.case}{f', as far as is known: {left}' if left else ''}"


def unknown(c: LayoutComparison) -> str:
    """What of an agreement nothing is known of; "" where that is nothing."""
    parts = [f"{count(c.unmeasured, 'difference')} could not be measured"] if c.unmeasured else []
    if several := sum(c.sampled.values()):
        parts.append(f"{count(several, 'difference')} seen in a sample of elements alone")
    parts += [f"{count(c.untold, 'trained tensor')} of one layout alone not compared"] if c.untold else []
    return ", ".join(parts)


def lines(result: LayoutResult) -> list[str]:
    """What was found, one fact a line."""
    if result.comparison is None:
        facts = [f"{layout}: {why}" for layout, why in result.flaky.items()]
    else:
        facts = [*_compared(result.comparison), *(_key_line(between) for between in result.between)]
    return [one_line(line) for line in [*facts, *result.remarks]]


def _compared(c: LayoutComparison) -> list[str]:
    facts = [f"first difference: {c.first}"] if c.first else []
    facts += [f"where they part: {c.parted}"] if c.parted and c.parted != c.first else []
    facts += [f"farthest apart: {c.worst}"] if c.worst and c.worst not in (c.first, c.parted) else []
    facts.append(
        f"{c.equal} of {count(c.signals, 'signal')} in {count(c.steps, 'step')} have equal bits; "
        f"allowed: {c.tolerance:g} eps"
    )
    facts += [f"log-probs of the same tokens: {c.log_probs} apart"] if c.log_probs and c.log_probs.differing else []
    for side, names in c.alone.items():
        if names:
            listed = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
            facts.append(f"only in the {'first' if side == 'a' else 'second'} layout, not compared: {listed}")
    facts += [f"read from lines of text, and not compared: {', '.join(c.shown)}"] if c.shown else []
    return facts


def _key_line(between: Between) -> str:
    c = between.comparison
    if c is None:
        return f"{between.key}: cannot be told ({between.skip})"
    if c.parted:
        return f"{between.key}: parts at {c.parted}"
    first = f", first at {c.first}" if c.first else ""
    known = f", as far as is known ({left})" if (left := unknown(c)) else ""
    return f"{between.key}: " + ("equal bits" if c.verdict == "equal" else f"both {c.within}{known}{first}")


def cost_line(result: LayoutResult) -> str:
    """What it took."""
    total = result.cost.total
    reused = f", {count(result.cost.reused, 'probe')} reused" if result.cost.reused else ""
    return f"{count(total.probes, 'probe')}, {count(total.steps, 'trained step')}, {result.seconds:.0f} s{reused}"


def layout_text(result: LayoutResult) -> str:
    """The result for a terminal."""
    return "\n".join([one_line(headline(result)), "", *lines(result), "", cost_line(result)])


def write_layout_report(result: LayoutResult, folder: Path, command: str) -> Iterator[Path]:
    """Write ``report.md`` and ``report.html``: each path once it is there."""
    content = {
        "headline": headline(result),
        "lines": lines(result),
        "cost": f"{cost_line(result)}. Code: {short(result.commit)}. Machine: {result.machine}. repro {__version__}.",
        "command": command,
    }
    return written("layouts", folder, lambda _: content)
