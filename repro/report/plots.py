"""Plots as self-contained SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from repro_bisect.result import BisectResult
from repro_golden.compare import Comparison

__all__ = ["commit_strip", "distance_plot", "drift_plot"]

SHOWN = ("grad_norm", "kl_loss", "loss", "train_rollout_logprob_abs_diff")
BEFORE, AFTER = "#4878a8", "#c8503c"
VERDICTS = {"GOOD": "#3f8f5f", "BAD": "#c8503c", "SKIP": "#b8a04a", "FLAKY": "#8a5fa8", "not tried": "#d8dde2"}


def drift_plot(comparison: Comparison, metrics: Sequence[str] = SHOWN) -> str:
    """The shown metrics before and after, over steps. Values that are not finite leave a gap."""
    import altair as alt

    rows = [
        {"step": change.step, "metric": change.metric, "side": side, "value": value}
        for change in comparison.metrics
        if change.metric in metrics
        for side, value in (("before", change.a), ("after", change.b))
        if value is not None and math.isfinite(value)
    ]
    if not rows:
        return ""
    base = _chart(rows).encode(
        x=alt.X("step:Q", title="step", axis=alt.Axis(tickMinStep=1)),
        y=alt.Y("value:Q", title=None, scale=alt.Scale(zero=False)),
        color=alt.Color("side:N", title=None, scale=alt.Scale(domain=["before", "after"], range=[BEFORE, AFTER])),
        strokeDash=alt.StrokeDash(
            "side:N", title=None, scale=alt.Scale(domain=["before", "after"], range=[[1, 0], [5, 3]])
        ),
    )
    chart = base.mark_line(point=True, strokeWidth=2).properties(width=330, height=160)
    faceted = chart.facet(facet=alt.Facet("metric:N", title=None, sort=list(metrics)), columns=2)
    return _svg(faceted.resolve_scale(y="independent"))


def distance_plot(comparison: Comparison, metrics: Sequence[str] = SHOWN) -> str:
    """|after - before| of the shown metrics and KL (k3) at each step, on a log scale; equal steps leave no point."""
    import altair as alt

    found = [
        (c.step, c.metric, abs(c.b - c.a))
        for c in comparison.metrics
        if c.metric in metrics and c.a is not None and c.b is not None
    ]
    found += [(step, "KL k3", abs(k3)) for step, (_, k3) in comparison.kl.items()]
    rows = [{"step": s, "metric": m, "distance": d} for s, m, d in found if math.isfinite(d) and d > 0]
    if not rows:
        return ""
    steps = [min(c.step for c in comparison.metrics), max(c.step for c in comparison.metrics)]
    chart = _chart(rows).encode(
        x=alt.X("step:Q", title="step", axis=alt.Axis(tickMinStep=1), scale=alt.Scale(domain=steps)),
        y=alt.Y("distance:Q", title=None, scale=alt.Scale(type="log"), axis=alt.Axis(format=".0e", tickCount=6)),
        color=alt.Color("metric:N", title=None, sort=[*metrics, "KL k3"], scale=alt.Scale(scheme="tableau10"),
                        legend=alt.Legend(labelLimit=0)),
    )  # fmt: skip
    return _svg(chart.mark_line(point=True, strokeWidth=2).properties(width=560, height=200))


def commit_strip(result: BisectResult) -> str:
    """Every commit of the range, oldest first, coloured by its verdict."""
    import altair as alt

    order = list(reversed(result.order))
    rows = [
        {
            "n": i,
            "verdict": result.verdicts.get(c, "not tried"),
            "culprit": bool(result.culprit and c == result.culprit.commit),
        }
        for i, c in enumerate(order)
    ]
    base = _chart(rows).encode(
        x=alt.X("n:O", title="commits, oldest first", axis=alt.Axis(labels=False, ticks=False, domain=False))
    )
    bars = base.mark_bar(height=26).encode(
        color=alt.Color("verdict:N", title=None, scale=alt.Scale(domain=list(VERDICTS), range=list(VERDICTS.values()))),
    )
    mark = base.transform_filter("datum.culprit").mark_point(
        shape="triangle-up", size=90, filled=True, color="#222", yOffset=22
    )
    return _svg((bars + mark).properties(width=700, height=44))


def _chart(rows: list[dict[str, Any]]) -> Any:
    import altair as alt

    return alt.Chart.from_dict({"data": {"values": rows}, "mark": "point"}, validate=False)


def _svg(chart: Any) -> str:
    import vl_convert

    config = {"font": "system-ui, sans-serif", "view": {"stroke": None}, "background": "transparent"}
    return str(vl_convert.vegalite_to_svg(chart.configure(**config).to_json()))
