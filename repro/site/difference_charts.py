"""Charts of a comparison: where numbers diverge and how far, the first difference in ULP, and tokens' log-probs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from repro.site.charts import filled, finished
from repro.site.folder import number
from repro_golden.base.canonical import decode_float

__all__ = ["Drawn", "difference_charts"]


@dataclass(frozen=True)
class Drawn:
    """A chart of a comparison, with its data.

    Attributes:
        name: ``heat``, ``ulp`` or ``tokens``.
        title: Its heading.
        note: What a reader must know to read it.
        spec: Vega-Lite, its data named ``rows``.
        columns: The data, by field.
        head: The columns of its table, as (field, heading).
    """

    name: str
    title: str
    note: str
    spec: Mapping[str, Any]
    columns: Mapping[str, Sequence[Any]]
    head: Sequence[tuple[str, str]]


def difference_charts(plot_data: Mapping[str, Any], labels: tuple[str, str]) -> list[Drawn]:
    """The charts of a `repro.report.plot_data.PlotData`, given as JSON.

    Args:
        plot_data: It.
        labels: What to call the baseline and the other one.
    """
    charts = [_heat(plot_data)]
    if len(plot_data["histogram"]) > 1:  # one bar says no more than a line
        charts.append(_ulp(plot_data["histogram"], plot_data["of"]))
    if plot_data["tokens"] and plot_data["tokens"]["pairs"]:
        charts.append(_tokens(plot_data["tokens"], labels))
    return charts


def _heat(plot_data: Mapping[str, Any]) -> Drawn:
    steps, signals = plot_data["steps"], plot_data["signals"]
    cells = [
        (steps[step], signals[signal], _finite(size), ulp, exact, text)
        for step, signal, size, ulp, exact, text in plot_data["cells"]
    ]
    sizes = [cell[2] for cell in cells if cell[2]]
    # whole powers of ten, so that the legend's ends are short
    low = 10.0 ** math.floor(math.log10(min(sizes, default=1e-9)))
    high = max(10 * low, 10.0 ** math.ceil(math.log10(max(sizes, default=low))))
    columns: dict[str, list[Any]] = {
        "step": [cell[0] for cell in cells],
        "signal": [cell[1] for cell in cells],
        "size": [number(cell[2]) for cell in cells],
        "shade": [None if cell[2] is None else number(max(cell[2], low)) for cell in cells],
        "ulp": [cell[3] for cell in cells],
        "kind": [_kind(cell[2], cell[4]) for cell in cells],
        "text": [cell[5] for cell in cells],
    }
    more = f" {plot_data['more']} further signals differ and are not drawn." if plot_data["more"] else ""
    note = (
        "The largest |a - b| of a tensor over its largest magnitude, on a log scale. A signal's first "
        "coloured cell is where it first differs; an empty cell holds equal bits. Hatched: differs, without a measured "
        f"size. With a dot: measured on a sample of the tensor, so the true distance may be larger.{more}"
    )
    described = (
        f"Heat-map of {len(signals)} signals over {len(steps)} steps: the relative distance of each; "
        "the table below it has the data."
    )
    spec = filled(
        _heat_chart(),
        steps=steps,
        signals=signals,
        domain=[low, high],
        height=_ROW * len(signals),
        description=described,
    )
    head = [
        ("step", "step"),
        ("signal", "signal"),
        ("size", "relative distance"),
        ("ulp", "most ULP"),
        ("kind", "measured"),
        ("text", "what"),
    ]
    return Drawn("heat", "Where and how far the numbers diverge", note, spec, columns, head)


def _finite(size: float | str | None) -> float | None:
    value = math.nan if size is None else decode_float(size)
    return value if math.isfinite(value) else None


def _kind(size: float | None, exact: bool) -> str:
    if size is None:
        return "not measured"
    return "on every element" if exact else "on a sample"


def _ulp(histogram: Sequence[Sequence[int]], of: Mapping[str, Any]) -> Drawn:
    columns: dict[str, list[Any]] = {
        "most": [str(most) for most, _ in histogram],
        "count": [count for _, count in histogram],
    }
    where = f"{of['phase']} {of['signal']} of step {of['step']} ({of['dtype']})"
    how = "every element" if of["exact"] else "a sample of its elements"
    described = f"Histogram of the distances in ULP of {where}; the table below it has the data."
    return Drawn(
        "ulp",
        "The first difference, in representable values",
        f"{where}: {how}, those that differ. One ULP is the step to the next representable value.",
        filled(_ulp_chart(), description=described),
        columns,
        [("most", "distance, at most so many ULP"), ("count", "elements")],
    )


def _tokens(tokens: Mapping[str, Any], labels: tuple[str, str]) -> Drawn:
    pairs = [(decode_float(a), decode_float(b)) for a, b in tokens["pairs"]]
    columns = {
        "a": [number(a) for a, _ in pairs],
        "b": [number(b) for _, b in pairs],
        "gap": [number(b - a) for a, b in pairs],
    }
    finite = [v for pair in pairs for v in pair if math.isfinite(v)] or [-1.0, 0.0]
    low, high = min(finite), max(finite)
    pad = (high - low) * 0.04 or 0.1
    domain = [number(low - pad), number(high + pad)]
    lost = sum(not (math.isfinite(a) and math.isfinite(b)) for a, b in pairs)
    which = "all" if len(pairs) == tokens["total"] else f"{len(pairs):,} evenly spaced ones of"
    note = (
        f"Step {tokens['step']}, that with the largest KL: {which} {tokens['total']:,} tokens. On the dashed line both "
        f"give a token the same log-prob.{f' {lost} are not finite on a side: triangles at the edge.' if lost else ''}"
    )
    described = f"Scatter of {len(pairs)} tokens' log-probs under both versions, with the line on which they are equal."
    spec = filled(
        _token_chart(),
        domain=domain,
        low={"a": domain[0], "b": domain[0]},
        high={"a": domain[1], "b": domain[1]},
        a=f"log-prob under {labels[0]}, nats",
        b=f"log-prob under {labels[1]}, nats",
        description=described,
    )
    return Drawn("tokens", "Log-probs of the same tokens", note, spec, columns, _TOKEN_HEAD)


# -- the charts of a comparison as Vega-Lite with gaps: see `charts.filled`. Each is made once


_ROW = 17
"""Pixels of a signal in the heat-map."""

_TOKEN_HEAD = [("a", "baseline, nats"), ("b", "other, nats"), ("gap", "difference, nats")]
"""The columns of the scatter's table."""

_HATCH = "M-.5,.5L.5,-.5M-.5,0L0,-.5M0,.5L.5,0"


@cache
def _heat_chart() -> str:
    """Steps by signals; gaps ``steps``, ``signals``, ``domain``, ``height`` and ``description``."""
    import altair as alt

    x = alt.X(
        "step:O",
        title="step (optimizer update)",
        scale=alt.Scale(domain=["@steps"], paddingInner=0.08, paddingOuter=0.04),
        axis=alt.Axis(labelAngle=0, labelOverlap="greedy", labelSeparation=4, ticks=False, domain=False),
    )
    y = alt.Y(
        "signal:N",
        title=None,
        sort=None,
        scale=alt.Scale(domain=["@signals"], paddingInner=0.08, paddingOuter=0.04),
        axis=alt.Axis(labelLimit=230, ticks=False, domain=False, labelPadding=6),
    )
    tooltip = [
        alt.Tooltip("signal:N", title="signal"),
        alt.Tooltip("step:O", title="step"),
        alt.Tooltip("size:Q", title="relative distance", format=".3g"),
        alt.Tooltip("ulp:Q", title="most ULP", format=","),
        alt.Tooltip("kind:N", title="measured"),
        alt.Tooltip("text:N", title="what"),
    ]
    rows = alt.Chart(alt.NamedData("rows"))
    sized = rows.transform_filter("isValid(datum.shade)")
    color = alt.Color(
        "shade:Q",
        title="relative distance",
        scale=alt.Scale(type="log", domain=["@domain"], range=[f"var(--heat-{end})" for end in ("low", "mid", "high")]),
        legend=alt.Legend(
            orient="top", direction="horizontal", gradientLength=220, gradientThickness=10, format=".0e", tickCount=3
        ),
    )
    bare = rows.transform_filter("!isValid(datum.shade)")
    size = (_ROW - 4) ** 2
    chart = alt.layer(
        sized.mark_rect(cornerRadius=1).encode(x=x, y=y, color=color, tooltip=tooltip),
        bare.mark_rect(cornerRadius=1, fill="var(--line)").encode(x=x, y=y, tooltip=tooltip),
        bare.mark_point(shape=_HATCH, stroke="var(--ink)", strokeWidth=1, filled=False, size=size, tooltip=None).encode(
            x=x, y=y
        ),
        sized.transform_filter("datum.kind == 'on a sample'")
        .mark_point(filled=False, size=20, fill="var(--ink)", stroke="var(--page)", strokeWidth=1, opacity=1)
        .encode(x=x, y=y, tooltip=tooltip),
    )
    return finished(chart.properties(width="container", height=0, description="@description")).replace(
        '"height": 0', '"height": "@height"'
    )


@cache
def _ulp_chart() -> str:
    """Distances in ULP; the gap is ``description``."""
    import altair as alt

    chart = (
        alt.Chart(alt.NamedData("rows"))
        .mark_bar(color="var(--series-1)", cornerRadiusEnd=1)
        .encode(
            x=alt.X(
                "most:O",
                title="distance, at most so many ULP",
                sort=None,
                axis=alt.Axis(labelAngle=0, labelOverlap="greedy", labelSeparation=6, ticks=False),
            ),
            y=alt.Y("count:Q", title="elements", axis=alt.Axis(tickCount=5, format="~s")),
            tooltip=[
                alt.Tooltip("most:N", title="at most, ULP"),
                alt.Tooltip("count:Q", title="elements", format=","),
            ],
        )
    )
    return finished(chart.properties(width="container", height=230, description="@description"))


@cache
def _token_chart() -> str:
    """Log-probs of tokens; gaps ``domain``, its ends ``low`` and ``high``, titles ``a`` and ``b``, ``description``."""
    import altair as alt

    scale, axis = alt.Scale(domain=["@domain"], nice=False, zero=False), alt.Axis(tickCount=6)
    x = alt.X("a:Q", title="@a", scale=scale, axis=axis)
    y = alt.Y("b:Q", title="@b", scale=scale, axis=axis)
    tooltip = [alt.Tooltip(f"{name}:N", title=title) for name, title in _TOKEN_HEAD]
    rows = alt.Chart(alt.NamedData("rows"))
    left, bottom = alt.value(4), alt.value({"expr": "height - 4"})

    def edge(test: str, **place: Any) -> Any:
        mark = rows.transform_filter(test).mark_point(
            shape="triangle-up", filled=True, size=50, color="var(--error-line)", opacity=1
        )
        return mark.encode(tooltip=tooltip, **place)

    equal = alt.Chart({"values": ["@low", "@high"]}).mark_line(
        color="var(--soft)", strokeDash=[4, 3], strokeWidth=1, aria=False
    )
    dots = rows.transform_filter("isFinite(datum.a) && isFinite(datum.b)").mark_circle(
        size=18, opacity=0.55, color="var(--series-1)"
    )
    chart = alt.layer(
        equal.encode(x=x, y=y),
        dots.encode(x=x, y=y, tooltip=tooltip),
        edge("isFinite(datum.a) && !isFinite(datum.b)", x=x, y=bottom),
        edge("!isFinite(datum.a) && isFinite(datum.b)", x=left, y=y),
        edge("!isFinite(datum.a) && !isFinite(datum.b)", x=left, y=bottom),
    )
    return finished(chart.properties(width="container", height=340, description="@description"))
