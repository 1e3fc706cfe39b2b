"""Charts of nights, as Vega-Lite without data: the page's script fills in the rows and the colours of the day.

A colour is written ``var(--name)``: the script replaces it by what the style sheet says under the present scheme.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from repro_golden.base.clean import one_line

__all__ = ["filled", "finished", "series_chart", "unit_of"]

_STATUSES = ("green", "changed", "flaky", "error", "not judged")


def unit_of(metric: str) -> str:
    """The unit of a metric by its name; empty where it has none, or none that a name tells."""
    name = metric.rpartition("/")[2].lower()
    if "kl" in name.split("_") or "logprob" in name or "log_prob" in name or "entropy" in name:
        return "nats"
    if name.endswith(("_seconds", "_time", "time_s")):
        return "s"
    return ""


def finished(chart: Any) -> str:
    """A chart's specification as JSON. Its configuration is left to the page."""
    spec: dict[str, Any] = chart.to_dict(validate=False)
    spec.pop("config", None)
    return json.dumps(spec)


def filled(template: str, **given: Any) -> dict[str, Any]:
    """A specification with its gaps filled: ``"@name"``, alone or as the only item of a list, becomes a value.

    Altair takes a tenth of a second for a chart; a site has thousands that differ in a title or a domain. Titles end up
    in Vega's expressions, which know no line separators in a text: what is not seen is written out.
    """
    for name, value in given.items():
        plain = one_line(value) if isinstance(value, str) else value
        gap, text = f'"@{name}"', json.dumps(plain)
        template = template.replace(f"[{gap}]", text).replace(gap, text)
    specification: dict[str, Any] = json.loads(template)
    return specification


def series_chart(title: str, unit: str) -> dict[str, Any]:
    """One quantity over nights, a line for each machine.

    Rows ``nights`` have ``at`` (milliseconds), ``value``, ``special`` (``NaN``, ``+inf`` or ``-inf`` in place of a
    value), ``machine``, ``status``, ``dot`` (whether to mark it), and ``night``, ``commit`` and ``shown`` to read.
    Rows ``changes`` have ``at``, ``night``, ``status`` and ``what``.
    The page's script gives the colours of the machines, the ticks of the nights and the type of the scale.
    """
    what = f"{title} in {unit}" if unit else title
    described = f"{what} of each night, one line for each machine; the table below it has the data."
    label = f"{title}, {unit}" if unit else title
    return filled(_series(), description=described, label=label, unit=unit or title)


@cache
def _series() -> str:
    import altair as alt

    time = alt.X(
        "at:T",
        title="night (UTC)",
        scale=alt.Scale(type="utc", padding=8),
        axis=alt.Axis(grid=False, labelOverlap="greedy", labelSeparation=8, format="%d %b", labelFlush=True),
    )
    value = alt.Y(
        "value:Q",
        title="@unit",
        scale=alt.Scale(type="linear", zero=False, padding=8),
        # eight digits: bit-stable series have one value, whose few digits would be another number
        axis=alt.Axis(tickCount=5, format=".8~g", titleLimit=170),
    )
    machine = alt.Color("machine:N", title=None, legend=None)
    tooltip = [alt.Tooltip(f"{name}:N", title=name) for name in ("night", "machine", "status", "commit")]
    tooltip.insert(1, alt.Tooltip("shown:N", title="@label"))
    runs = alt.Chart(alt.NamedData("nights"))

    rules = (
        alt.Chart(alt.NamedData("changes"), name="changes")
        .mark_rule(strokeWidth=1.5, strokeDash=[3, 3], aria=False)
        .encode(
            x=time,
            color=alt.condition(
                "datum.status == 'changed'", alt.value("var(--changed-line)"), alt.value("var(--soft)")
            ),
            tooltip=[alt.Tooltip("night:N", title="changed"), alt.Tooltip("what:N", title="by")],
        )
    )
    lines = runs.mark_line(strokeWidth=1.75, strokeJoin="round", aria=False).encode(x=time, y=value, color=machine)
    marks = (
        runs.properties(name="marks")
        .transform_filter("isValid(datum.value)")
        .mark_point(filled=True, size=42, strokeWidth=0)
        .encode(
            x=time,
            y=value,
            color=alt.Color(
                "status:N",
                legend=None,
                scale=alt.Scale(
                    domain=list(_STATUSES), range=[f"var(--{s.replace(' ', '-')}-line)" for s in _STATUSES]
                ),
            ),
            opacity=alt.condition("datum.dot", alt.value(1), alt.value(0)),
            tooltip=tooltip,
        )
    )
    edges = [
        runs.properties(name=name)
        .transform_filter(f"datum.special == '{special}'")
        .mark_point(
            shape=shape,
            size=70,
            filled=True,
            color="var(--error-line)",
            stroke="var(--error-line)",
            strokeWidth=2,
            opacity=1,
        )
        .encode(x=time, y=alt.value(place), tooltip=tooltip)
        for name, special, shape, place in (
            ("edge_nan", "NaN", "M-.7,-.7L.7,.7M.7,-.7L-.7,.7", 4),
            ("edge_above", "+inf", "triangle-up", 4),
            ("edge_below", "-inf", "triangle-down", {"expr": "height - 4"}),
        )
    ]
    chart = alt.layer(rules, lines, marks, *edges).resolve_scale(color="independent")
    return finished(chart.properties(width="container", height=170, description="@description"))
