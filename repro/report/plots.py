"""Plots as self-contained SVG in the colours of the light scheme: of metrics, of a range, and where traces differ."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from repro.report.palette import LIGHT, SERIES, VERDICTS
from repro.report.pieces import clean, cut
from repro.report.plot_data import Cell, PlotData, Tokens
from repro.text import plural
from repro_bisect.axes.axis import short
from repro_bisect.driver.drift import Drift, HistoryResult
from repro_bisect.driver.result import BisectResult
from repro_golden.compare.traces import Comparison

__all__ = [
    "commit_strip", "distance_plot", "drift_plot", "heat_map", "history_plot", "token_scatter", "ulp_plot",
]  # fmt: skip

_FONT = "Arial, Liberation Sans, Helvetica, sans-serif"
"""Of one width wherever it is, so that the room that labels get when a plot is made is what they take when shown."""
_TEXT = {"labelColor": LIGHT["soft"], "titleColor": LIGHT["soft"]}
_CONFIG: dict[str, Any] = {
    "font": _FONT,
    "view": {"stroke": None},
    "background": "transparent",
    "axis": _TEXT | {"gridColor": LIGHT["line"], "domainColor": LIGHT["soft"], "tickColor": LIGHT["soft"]},
    "header": _TEXT,
    "legend": _TEXT,
    "title": {"color": LIGHT["soft"]},
}

SHOWN = ("grad_norm", "kl_loss", "loss", "train_rollout_logprob_abs_diff")
BEFORE, AFTER = SERIES[0], SERIES[1]
_DRAWN = 500
"""Steps or commits that a plot has room for; of more, these are drawn evenly, and whatever stands out."""


def chart_of(rows: list[dict[str, Any]]) -> Any:
    """A chart over rows, to be given marks and encodings."""
    import altair as alt

    return alt.Chart.from_dict({"data": {"values": rows}, "mark": "point"}, validate=False)


def svg_of(chart: Any) -> str:
    """The chart as SVG."""
    import vl_convert

    return str(vl_convert.vegalite_to_svg(json.dumps(chart.configure(**_CONFIG).to_dict())))


def drift_plot(comparison: Comparison) -> str:
    """The shown metrics before and after, over steps. Values that are not finite leave a gap."""
    import altair as alt

    drawn = _steps_drawn(comparison)
    rows = [
        {"step": change.step, "metric": change.metric, "side": side, "value": value}
        for change in comparison.metrics
        if change.metric in SHOWN and change.step in drawn
        for side, value in (("before", change.a), ("after", change.b))
        if value is not None and math.isfinite(value)
    ]
    if not rows:
        return ""
    base = chart_of(rows).encode(
        x=alt.X("step:Q", title="step", axis=alt.Axis(tickMinStep=1)),
        y=alt.Y("value:Q", title=None, scale=alt.Scale(zero=False)),
        color=alt.Color("side:N", title=None, scale=alt.Scale(domain=["before", "after"], range=[BEFORE, AFTER])),
        strokeDash=alt.StrokeDash(
            "side:N", title=None, scale=alt.Scale(domain=["before", "after"], range=[[1, 0], [5, 3]])
        ),
    )
    chart = base.mark_line(point=True, strokeWidth=2).properties(width=330, height=160)
    faceted = chart.facet(facet=alt.Facet("metric:N", title=None, sort=list(SHOWN)), columns=2)
    return svg_of(faceted.resolve_scale(y="independent"))


def distance_plot(comparison: Comparison) -> str:
    """|after - before| of the shown metrics and KL (k3) at each step, on a log scale; equal steps leave no point."""
    import altair as alt

    drawn = _steps_drawn(comparison)
    distances = [(step, metric, size) for step, metric, size in _distances(comparison) if step in drawn]
    distances += [(step, "KL k3", abs(k3)) for step, (_, k3) in comparison.kl.items() if step in drawn]
    rows = [{"step": s, "metric": m, "distance": d} for s, m, d in distances if math.isfinite(d) and d > 0]
    if not rows:
        return ""
    steps = [min(c.step for c in comparison.metrics), max(c.step for c in comparison.metrics)]
    chart = chart_of(rows).encode(
        x=alt.X("step:Q", title="step", axis=alt.Axis(tickMinStep=1), scale=alt.Scale(domain=steps)),
        y=alt.Y("distance:Q", title=None, scale=alt.Scale(type="log"), axis=alt.Axis(format=".0e", tickCount=6)),
        color=alt.Color("metric:N", title=None, sort=[*SHOWN, "KL k3"], scale=alt.Scale(range=list(SERIES)),
                        legend=alt.Legend(labelLimit=0)),
    )  # fmt: skip
    return svg_of(chart.mark_line(point=True, strokeWidth=2).properties(width=560, height=200))


def _distances(comparison: Comparison) -> list[tuple[int, str, float]]:
    """Step, metric and |after - before|, wherever both are."""
    return [
        (c.step, c.metric, abs(c.b - c.a))
        for c in comparison.metrics
        if c.metric in SHOWN and c.a is not None and c.b is not None
    ]


def _steps_drawn(comparison: Comparison) -> set[int]:
    """All steps; of very many those that are `spread`, and each metric's worst."""
    steps = sorted({change.step for change in comparison.metrics})
    worst: dict[str, tuple[float, int]] = {}
    for step, metric, size in _distances(comparison) if len(steps) > _DRAWN else ():
        worst[metric] = max(worst.get(metric, (-1.0, step)), (size if math.isfinite(size) else math.inf, step))
    return {steps[k] for k in spread(len(steps), _DRAWN)} | {step for _, step in worst.values()}


def spread(count: int, most: int) -> set[int]:
    """All of so many numbers from 0 on, or some of them, the ends among these."""
    if count <= most:
        return set(range(count))
    return {k * (count - 1) // (most - 1) for k in range(most)}


def commit_strip(result: BisectResult) -> str:
    """Every commit of the range, oldest first, coloured by its verdict. Empty text where there is one alone.

    Of very many, those that were tried are drawn, and some of the others between them.
    """
    import altair as alt

    order = list(reversed(result.order))
    if len(order) < 2:
        return ""
    some = spread(len(order), _DRAWN)
    rows = [
        {
            "n": i,
            "verdict": result.verdicts.get(c, "not tried"),
            "culprit": bool(result.culprit and c == result.culprit.commit),
        }
        for i, c in enumerate(order)
        if i in some or c in result.verdicts
    ]
    base = chart_of(rows).encode(
        x=alt.X("n:O", title="commits, oldest first", axis=alt.Axis(labels=False, ticks=False, domain=False))
    )
    bars = base.mark_bar(height=26).encode(
        color=alt.Color("verdict:N", title=None, scale=alt.Scale(domain=list(VERDICTS), range=list(VERDICTS.values()))),
    )
    mark = base.transform_filter("datum.culprit").mark_point(
        shape="triangle-up", size=90, filled=True, color=LIGHT["ink"], yOffset=22
    )
    return svg_of((bars + mark).properties(width=700, height=44))


def history_plot(result: HistoryResult) -> str:
    """How far each change left the numbers from GOOD's: one place for each row, in order, on a log scale.

    0 has no logarithm and is drawn at the bottom, what has no size (NaN, or relative to 0) at the top; both have shapes
    of their own.
    """
    import altair as alt

    drifts = [
        (n, row, name, size)
        for n, row in enumerate(result.rows)
        if row.cumulative
        for name, size in _drifts(row.cumulative).items()
    ]
    real = [size for *_, size in drifts if math.isfinite(size) and size > 0]
    if not drifts:
        return ""
    low = max(-300, math.floor(math.log10(min(real, default=1e-9))) - 1)
    high = max(low + 2, min(300, math.ceil(math.log10(max(real, default=1e-9))) + 1))
    kinds = {"measured": "circle", "0": "triangle-down", "no size: NaN, or relative to 0": "cross"}
    rows: list[dict[str, Any]] = []
    for n, row, name, size in drifts:
        kind = list(kinds)[2 if not math.isfinite(size) else 1 if size == 0 else 0]
        height = {"measured": size, "0": 10.0**low}.get(kind, 10.0**high)
        label = clean(f"{short(row.commit.commit)} {row.commit.subject}")
        rows.append(
            {
                "n": n,
                "what": name,
                "kind": kind,
                "size": height,
                "commit": label[:34] + "…" * (len(label) > 34),
                "at": n + 0.06 * (_DRIFTS.index(name) - 1.5),
            }  # equal values lie side by side
        )
    names = [name for name in _DRIFTS if any(r["what"] == name for r in rows)]
    drawn = [kind for kind in kinds if any(r["kind"] == kind for r in rows)]
    labels: dict[int, str] = {r["n"]: r["commit"] for r in rows}
    base = chart_of(rows).encode(
        x=alt.X("at:Q", title=f"{plural(result.what)} that changed the numbers, oldest first",
                scale=alt.Scale(domain=[-0.5, len(result.rows) - 0.5], nice=False),
                axis=alt.Axis(values=list(labels), labelAngle=-35, labelLimit=260, labelOverlap=False, grid=False,
                              labelExpr=f"{json.dumps(list(labels.values()))}[indexof({list(labels)}, datum.value)]")),
        y=alt.Y("size:Q", title=["distance from GOOD at the worst step: relative;",
                                 f"KL k3 and log-prob gap in nats (0 is drawn at 1e{low})"],
                scale=alt.Scale(type="log", domain=[10.0 ** (low - 0.5), 10.0 ** (high + 0.5)]),
                axis=alt.Axis(format=".0e", tickCount=6)),
        color=alt.Color("what:N", title=None, sort=names, scale=alt.Scale(domain=names, range=list(SERIES))),
    )  # fmt: skip
    points = base.mark_point(filled=True, size=70, opacity=0.9).encode(
        shape=alt.Shape(
            "kind:N", title=None, scale=alt.Scale(domain=drawn, range=[kinds[k] for k in drawn]),
            legend=alt.Legend(labelLimit=0) if len(drawn) > 1 else None,
        ),
        tooltip=["commit:N", "what:N", "size:Q", "kind:N"],
    )  # fmt: skip
    width = max(420, len(result.rows) * max(18, min(60, 1100 // len(result.rows))))
    return svg_of((base.mark_line(strokeWidth=1.5) + points).properties(width=width, height=260))


_DRIFTS = ("grad_norm", "loss", "KL k3", "log-prob gap")


def _drifts(drift: Drift) -> dict[str, float]:
    """What is drawn of a drift: sizes without sign; a side that is missing has none."""
    sizes: dict[str, float] = {}
    for name in _DRIFTS:
        if name == "KL k3":
            sizes |= {name: abs(drift.kl["k3"]["worst"][1])} if "k3" in drift.kl else {}
        elif moved := drift.metric(SHOWN[3] if name == "log-prob gap" else name):
            size = moved.worst.absolute if name == "log-prob gap" else moved.worst.relative
            sizes[name] = math.nan if size is None else abs(size)
    return sizes


# -- of a `PlotData`: where two traces differ, how far, and what that does to log-probs

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
        return str(most or "sign of 0")
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
