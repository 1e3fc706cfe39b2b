"""The charts of a comparison as Vega-Lite with gaps: see `charts.filled`. Each is made once."""

from __future__ import annotations

from functools import cache
from typing import Any

from repro.site.charts import finished

__all__ = ["ROW", "TOKEN_HEAD", "heat_chart", "token_chart", "ulp_chart"]

ROW = 17
"""Pixels of a signal in the heat-map."""

TOKEN_HEAD = [("a", "baseline, nats"), ("b", "other, nats"), ("gap", "difference, nats")]
"""The columns of the scatter's table."""

_HATCH = "M-.5,.5L.5,-.5M-.5,0L0,-.5M0,.5L.5,0"


@cache
def heat_chart() -> str:
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
    size = (ROW - 4) ** 2
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
def ulp_chart() -> str:
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
def token_chart() -> str:
    """Log-probs of tokens; gaps ``domain``, its ends ``low`` and ``high``, titles ``a`` and ``b``, ``description``."""
    import altair as alt

    scale, axis = alt.Scale(domain=["@domain"], nice=False, zero=False), alt.Axis(tickCount=6)
    x = alt.X("a:Q", title="@a", scale=scale, axis=axis)
    y = alt.Y("b:Q", title="@b", scale=scale, axis=axis)
    tooltip = [alt.Tooltip(f"{name}:N", title=title) for name, title in TOKEN_HEAD]
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
