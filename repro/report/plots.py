"""Plots as self-contained SVG."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from repro.report.palette import LIGHT, SERIES, VERDICTS
from repro.report.pieces import clean
from repro.report.svg import chart_of, svg_of
from repro.text import plural
from repro_bisect.axes.axis import short
from repro_bisect.driver.drift import Drift, HistoryResult
from repro_bisect.driver.result import BisectResult
from repro_golden.compare.traces import Comparison

__all__ = ["commit_strip", "distance_plot", "drift_plot", "history_plot"]

SHOWN = ("grad_norm", "kl_loss", "loss", "train_rollout_logprob_abs_diff")
BEFORE, AFTER = SERIES[0], SERIES[1]
_DRAWN = 500
"""Steps or commits that a plot has room for; of more, these are drawn evenly, and whatever stands out."""


def drift_plot(comparison: Comparison, metrics: Sequence[str] = SHOWN) -> str:
    """The shown metrics before and after, over steps. Values that are not finite leave a gap."""
    import altair as alt

    drawn = _steps_drawn(comparison, metrics)
    rows = [
        {"step": change.step, "metric": change.metric, "side": side, "value": value}
        for change in comparison.metrics
        if change.metric in metrics and change.step in drawn
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
    faceted = chart.facet(facet=alt.Facet("metric:N", title=None, sort=list(metrics)), columns=2)
    return svg_of(faceted.resolve_scale(y="independent"))


def distance_plot(comparison: Comparison, metrics: Sequence[str] = SHOWN) -> str:
    """|after - before| of the shown metrics and KL (k3) at each step, on a log scale; equal steps leave no point."""
    import altair as alt

    drawn = _steps_drawn(comparison, metrics)
    distances = [(step, metric, size) for step, metric, size in _distances(comparison, metrics) if step in drawn]
    distances += [(step, "KL k3", abs(k3)) for step, (_, k3) in comparison.kl.items() if step in drawn]
    rows = [{"step": s, "metric": m, "distance": d} for s, m, d in distances if math.isfinite(d) and d > 0]
    if not rows:
        return ""
    steps = [min(c.step for c in comparison.metrics), max(c.step for c in comparison.metrics)]
    chart = chart_of(rows).encode(
        x=alt.X("step:Q", title="step", axis=alt.Axis(tickMinStep=1), scale=alt.Scale(domain=steps)),
        y=alt.Y("distance:Q", title=None, scale=alt.Scale(type="log"), axis=alt.Axis(format=".0e", tickCount=6)),
        color=alt.Color("metric:N", title=None, sort=[*metrics, "KL k3"], scale=alt.Scale(range=list(SERIES)),
                        legend=alt.Legend(labelLimit=0)),
    )  # fmt: skip
    return svg_of(chart.mark_line(point=True, strokeWidth=2).properties(width=560, height=200))


def _distances(comparison: Comparison, metrics: Sequence[str]) -> list[tuple[int, str, float]]:
    """Step, metric and |after - before|, wherever both are."""
    return [
        (c.step, c.metric, abs(c.b - c.a))
        for c in comparison.metrics
        if c.metric in metrics and c.a is not None and c.b is not None
    ]


def _steps_drawn(comparison: Comparison, metrics: Sequence[str]) -> set[int]:
    """All steps; of very many those that are `spread`, and each metric's worst."""
    steps = sorted({change.step for change in comparison.metrics})
    worst: dict[str, tuple[float, int]] = {}
    for step, metric, size in _distances(comparison, metrics) if len(steps) > _DRAWN else ():
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
