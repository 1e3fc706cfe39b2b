"""Plots of a `PlotData` as self-contained SVG: where two traces differ, how far, and what that does to log-probs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from repro.report.palette import LIGHT, SERIES
from repro.report.pieces import clean, cut
from repro.report.plot_data import Cell, PlotData, Tokens
from repro.report.svg import chart_of, svg_of

__all__ = ["heat_map", "token_scatter", "ulp_plot"]

_COLUMNS = 120
"""Columns of a heat-map at most: more steps share one, which shows their worst."""
_DOT, _LINE = SERIES[0], LIGHT["changed-line"]
_ODD = {
    "one side only, or another type or shape": LIGHT["flaky-line"],
    "not finite": LIGHT["series-1"],
    "size not measured": LIGHT["not-judged-line"],
}
"""Cells without a size."""
_LEAST = 1e-300


def _kind(cell: Cell) -> str:
    """Which of `_ODD` a cell is; empty where it has a size."""
    if cell.relative is not None:
        return ""
    kinds = list(_ODD)
    return kinds[0] if cell.text in ("missing", "added", "dtype", "shape") else kinds[2 - ("finite" in cell.text)]


def heat_map(plot_data: PlotData) -> str:
    """Signals over steps: the largest difference of the elements at hand over the tensor's largest magnitude.

    Cells that have no size have colours of their own, cells that agree are empty. Empty text where there is no cell.
    """
    import altair as alt

    if not plot_data.cells:
        return ""
    stride = -(-len(plot_data.steps) // _COLUMNS)
    worst: dict[tuple[int, int], Cell] = {}
    for cell in plot_data.cells:
        place = cell.step // stride, cell.signal
        if place not in worst or _weight(cell) > _weight(worst[place]):
            worst[place] = cell
    labels = [f"{n + 1}. {cut(clean(name), 48)}" for n, name in enumerate(plot_data.signals)]
    rows: list[dict[str, Any]] = [
        {"step": plot_data.steps[column * stride], "signal": labels[signal], "kind": _kind(cell) or "size",
         "size": max(cell.relative, _LEAST) if cell.relative is not None else None}
        for (column, signal), cell in worst.items()
    ]  # fmt: skip
    sizes = [row["size"] for row in rows if row["size"] is not None]
    low, high = min(sizes, default=1.0), max(sizes, default=1.0)
    domain = [low, high] if high > low else [low / 10, high * 10]
    columns = [plot_data.steps[i] for i in range(0, len(plot_data.steps), stride)]
    title = "step (optimizer update)" + (f", {stride} to a column, the worst shown" if stride > 1 else "")
    base = chart_of(rows).encode(
        x=alt.X("step:O", title=title, scale=alt.Scale(domain=columns),
                axis=alt.Axis(labelAngle=0, labelOverlap=True, grid=False)),
        y=alt.Y("signal:N", title="signals, in the order in which they differ", sort=labels,
                scale=alt.Scale(domain=labels), axis=alt.Axis(labelLimit=0, labelFontSize=10, maxExtent=400)),
    )  # fmt: skip
    kinds = [kind for kind in _ODD if any(row["kind"] == kind for row in rows)]
    legend = alt.Legend(title="largest difference / largest magnitude", titleLimit=0, gradientLength=180, format=".0e")
    layers = []
    if sizes:
        sized = base.transform_filter("datum.kind == 'size'").mark_rect()
        scale = alt.Scale(type="log", range=[LIGHT[f"heat-{end}"] for end in ("low", "mid", "high")], domain=domain)
        layers.append(sized.encode(color=alt.Color("size:Q", scale=scale, legend=legend)))
    if kinds:
        odd = base.transform_filter("datum.kind != 'size'").mark_rect()
        colors = alt.Scale(domain=kinds, range=[_ODD[kind] for kind in kinds])
        layers.append(odd.encode(color=alt.Color("kind:N", scale=colors, legend=alt.Legend(title=None, labelLimit=0))))
    width = min(720, max(160, 22 * len(columns)))
    chart = alt.layer(*layers).resolve_scale(color="independent").properties(width=width, height=14 * len(labels))
    more = f"{plot_data.more} more signals differ later and are not drawn"
    if plot_data.more:
        chart = chart.properties(title=alt.Title(more, orient="bottom", anchor="start", fontSize=11, fontWeight=400))
    return svg_of(chart)


def _weight(cell: Cell) -> float:
    """Which of several steps' cells is shown: what has no size is worse than any number."""
    return math.inf if cell.relative is None else cell.relative


def _distance(most: int) -> str:
    """The distances that end at a power of two."""
    if most <= 2:
        return str(most)
    return f"{most // 2 + 1}-{most}" if most <= 2048 else f"to 2^{most.bit_length() - 1}"


def ulp_plot(histogram: Sequence[tuple[int, int]], dtype: str) -> str:
    """How many elements are how many representable values apart.

    Empty text where that was not measured, or all of them are in one bar, which a line says as well.

    Args:
        histogram: As in `tensor_difference.ulp_histogram`.
        dtype: Of the elements.
    """
    import altair as alt

    if len(histogram) < 2:
        return ""
    labels = [_distance(most) for most, _ in histogram]
    rows = [{"ulp": label, "elements": n} for label, (_, n) in zip(labels, histogram, strict=True)]
    chart = chart_of(rows).mark_bar(color=_DOT).encode(
        x=alt.X("ulp:N", title=f"distance in ULP (representable values of {clean(dtype)})", sort=labels,
                axis=alt.Axis(labelAngle=-35, labelOverlap=False)),
        y=alt.Y("elements:Q", title="elements that differ", axis=alt.Axis(tickMinStep=1)),
    )  # fmt: skip
    return svg_of(chart.properties(width=min(720, max(300, 44 * len(rows))), height=180))


def token_scatter(tokens: Tokens) -> str:
    """What HEAD adds to each token's log-prob. Pairs that are not finite are left out; empty text without any."""
    import altair as alt

    rows = [{"base": a, "gap": b - a} for a, b in tokens.pairs if math.isfinite(a) and math.isfinite(b - a)]
    if not rows:
        return ""
    lost = len(tokens.pairs) - len(rows)
    left = f" ({lost} not finite, not drawn)" if lost else ""
    points = chart_of(rows).mark_point(filled=True, size=16, opacity=0.55, color=_DOT).encode(
        x=alt.X("base:Q", title=f"log-prob under BASE, nats{left}", scale=alt.Scale(zero=False)),
        y=alt.Y("gap:Q", title="log-prob HEAD - BASE, nats", axis=alt.Axis(format=".1e")),
    )  # fmt: skip
    zero = chart_of([{"gap": 0}]).mark_rule(color=_LINE, strokeDash=[4, 3]).encode(y="gap:Q")
    return svg_of((points + zero).properties(width=560, height=240))
