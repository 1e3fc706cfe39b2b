"""An explanation, for a terminal, as Markdown and as a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.report.change import change_of
from repro.report.pieces import written
from repro_bisect.axes.axis import short
from repro_golden.base.clean import one_line

if TYPE_CHECKING:
    from repro_bisect.explain.result import Explained, Explanation, Size, Version

__all__ = ["explain_lines", "explain_text", "size_plot", "write_report"]

_TENSORS = 8
"""Tensors of an operation that are named."""
_DEEP = 6
"""Frames of a stack that a terminal shows."""
_RAN = 4
"""Lines of a change that it shows where none of them is on the way."""


def explain_lines(explanation: Explanation, *, beside: bool = False, plotted: bool = False) -> list[str]:
    """The answer for a terminal, without what a bisect has said already.

    Args:
        explanation: The answer.
        beside: Whether the change is shown beside it.
        plotted: Whether the sizes are.
    """
    lines = [one_line(explanation.text)]
    if explanation.divergence is None:
        return lines
    for version in (explanation.before, explanation.after):
        lines += ["", *_version(version)]
    if explanation.mentions:
        lines += ["", "the change is not on the way there, but defines what these lines read:"]
        # both versions name a line that each has: the change is shown once
        for place in {(str(place), place.hunk): place for place in explanation.mentions}.values():
            lines += [f"  {place} {place.function}", *([] if beside else _indented(place.hunk))]
    elif explanation.ran:
        lines += ["", "no line of the change is on the way there; these lines of it ran:"]
        for place in explanation.ran[:_RAN]:
            lines += [f"  {place} in {place.function}", *([] if beside else _indented(place.hunk))]
        lines += [f"  and {len(explanation.ran) - _RAN} more: see --json"] if len(explanation.ran) > _RAN else []
    elif explanation.named and not any(place.touched for place in explanation.places):
        lines += ["", "no line of the change is on the way there: what it computes with was made elsewhere"]
    if explanation.written:
        text = "recorded as the code is written, without torch.compile, where the step has other numbers: the two first"
        lines += ["", one_line(f"{text} differ there at {explanation.written}")]
    if explanation.size:
        lines += ["", *size_lines(explanation.size, plotted=plotted)]
    if explanation.environment:
        lines += ["", "the environments differ:", *(one_line(f"  {change}") for change in explanation.environment)]
    if explanation.others:
        more = "operation" if explanation.others == 1 else "operations"
        lines += ["", f"{explanation.others} more {more} of that step read the same bits and differ: see --json"]
    return lines


def explain_text(explanation: Explanation) -> str:
    """The answer for a terminal."""
    lines = explain_lines(explanation)
    if explanation.divergence is not None:
        start = (
            f"both started from the saved state before step {explanation.start}"
            if explanation.start
            else "both ran from step 0"
        )
        counts = f"{explanation.before.operations} and {explanation.after.operations} operations"
        lines += ["", one_line(f"first signal that differs: {explanation.divergence}"), f"recorded: {counts}; {start}"]
    return "\n".join([*lines, one_line(f"looked at {explanation.looked}")])


def _made(outputs: Sequence[str]) -> str:
    """What an operation made: of very many tensors, as a fused optimizer makes them, the first."""
    more = f" and {len(outputs) - _TENSORS} more" if len(outputs) > _TENSORS else ""
    return (", ".join(outputs[:_TENSORS]) or "nothing") + more


def _version(version: Version) -> list[str]:
    heading = one_line(f"{short(version.point)} {version.subject}")
    op = version.explained
    if op is None:
        return [f"{heading}: nothing in this place"]
    lines = [f"{heading}:", f"  {title(op)}"]
    if op.place:
        lines.append(f"  {op.place} in {op.place.function}{' (changed)' if op.place.touched else ''}")
        lines += _indented(op.place.text)
    reads = ", ".join(f"T{k} {text}" for k, text in enumerate(op.inputs[:_TENSORS]))
    reads += f" and {len(op.inputs) - _TENSORS} more" if len(op.inputs) > _TENSORS else ""
    lines.append(f"  ({op.arguments}){f' with {reads}' if reads else ''} -> {_made(op.outputs)}")
    at = op.stack.index(op.place) if op.place in op.stack else -1
    for word, places in (("which calls", op.stack[:at][::-1] if at > 0 else ()), ("called from", op.stack[at + 1 :])):
        shown = [place for place in places if not place.file.startswith(("/", "<"))][:_DEEP]
        lines += [f"  {word} {place} in {place.function}" for place in shown]
    return lines


def title(explained: Explained) -> str:
    """An operation in one line."""
    parts = [explained.name, explained.phase]
    parts += [explained.module] if explained.module else []
    parts += [explained.node] if explained.node else []
    return ", ".join(parts)


def size_plot(explanation: Explanation) -> str:
    """How far the elements of the first difference are apart, as SVG; empty where no plot shows more than a line."""
    from repro.report.plots import ulp_plot

    return ulp_plot(explanation.size.histogram, explanation.size.dtypes[1]) if explanation.size else ""


def size_lines(size: Size, *, plotted: bool = False) -> list[str]:
    """How large the difference is where it begins; how far its elements are apart, unless a plot shows that."""
    lines = [f"size, at {size.where}: {size.magnitude}"]
    if size.dtypes[0] != size.dtypes[1]:
        lines.append(f"  {size.dtypes[0]} became {size.dtypes[1]}: their values are compared")
    if size.histogram and not plotted:
        total = max(count for _, count in size.histogram)
        for most, count in size.histogram:
            how = f"up to {most:>8} ULP" if most else f"{'the sign of zero':<18}"
            lines.append(f"  {how}  {count:>8}  {'#' * max(1, round(30 * count / total))}")
    return lines


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in text.splitlines()]


def write_report(explanation: Explanation, folder: Path, command: str) -> Iterator[Path]:
    """Write ``report.md`` and ``report.html`` (self-contained): each path once it is there."""

    def context(page: bool) -> dict[str, Any]:
        plot = size_plot(explanation) if page else ""
        return {
            "found": explanation,
            "sides": [side for side in (explanation.before, explanation.after) if side.explained],
            "change": change_of(explanation),
            "command": command,
            "size": "\n".join(size_lines(explanation.size, plotted=bool(plot))) if explanation.size else "",
            "plot": plot,
        }

    return written("explain", folder, context)
